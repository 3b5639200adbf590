// The arithmetic of codecs for one value and one scale, shared by NVRTC, nvcc and the host's compiler.
//
// impl/codecs/reference.py is the specification, which every function here equals bit for bit.  The rules that make
// that possible: no fused multiply-add by the compiler (--fmad=false, -ffp-contract=off), division by the scale,
// denormals are kept, and rounding is to nearest, ties to even.  No header is included.  bf16 and fp16 are converted
// by integer arithmetic, so the host computes the same as the device; only `narrowed_two` uses instructions.
#pragma once

#ifdef __CUDACC__
#define CODEC_FN __host__ __device__ __forceinline__
#else
#define CODEC_FN inline
#endif

namespace codec {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

CODEC_FN u32 bits_of(float value) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(value);
#else
    u32 bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
#endif
}

CODEC_FN float float_of(u32 bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

CODEC_FN float magnitude(float value) {
#ifdef __CUDA_ARCH__
    return fabsf(value);
#else
    return __builtin_fabsf(value);
#endif
}

// a * b + c, rounded once.
CODEC_FN float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

// Marks a condition that rarely holds, so that the compiler moves the code for this case out of the main path.
CODEC_FN bool rare(bool happens) { return __builtin_expect(happens, false); }

constexpr int kOctet = 8;  // elements of an octet, whose codes fill whole bytes
constexpr u32 kAbs = 0x7fffffffu, kInfinity = 0x7f800000u, kNaN = 0x7fc00000u;
constexpr float kSmallestNormal = 1.17549435082228750797e-38f;  // 2^-126, the smallest scale

// ---- element types: widen to fp32 exactly, narrow to nearest, ties to even --------------------

struct Fp32 {
    using Word = u32;
    static CODEC_FN float largest() { return 3.40282346638528859812e+38f; }
    static CODEC_FN float widen(Word word) { return float_of(word); }
    static CODEC_FN Word narrow(float value) { return bits_of(value); }
    static CODEC_FN Word narrow_finite(float value) { return bits_of(value); }
};

struct Bf16 {
    using Word = u16;
    static constexpr bool kBrain = true;
    static CODEC_FN float largest() { return 3.38953138925153547590e+38f; }
    static CODEC_FN float widen(Word word) { return float_of(u32(word) << 16); }
    static CODEC_FN Word narrow(float value) {
        const u32 bits = bits_of(value);
        if ((bits & kAbs) > kInfinity) return Word(kNaN >> 16);
        return narrow_finite(value);
    }
    static CODEC_FN Word narrow_finite(float value) {
        const u32 bits = bits_of(value);
        return Word((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
};

struct Fp16 {
    using Word = u16;
    static constexpr bool kBrain = false;
    static CODEC_FN float largest() { return 65504.0f; }
    static CODEC_FN float widen(Word word) {
        const u32 magnitude = u32(word) & 0x7fffu;
        u32 bits = bits_of(float_of(magnitude << 13) * 5.19229685853482762853e+33f);  // 2^(127-15)
        if (magnitude >= 0x7c00u) bits |= kInfinity;
        return float_of(bits | (u32(word) & 0x8000u) << 16);
    }
    // Only for NaN and |value| <= 65504, since decoding has saturated the value before.
    static CODEC_FN Word narrow(float value) {
        const u32 bits = bits_of(value), magnitude = bits & kAbs;
        u32 half;
        if (magnitude > kInfinity) {
            half = 0x7e00u;
        } else if (magnitude < 0x38800000u) {  // below 2^-14; fp16's smallest step is one ulp of 0.5f
            half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
        } else {
            half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
        }
        return Word(half | (bits >> 16 & 0x8000u));
    }
    static CODEC_FN Word narrow_finite(float value) { return narrow(value); }
};

// Returns `low` and `high`, rounded to 16 bits each, in one word; `low` is in the lower half.  Numbers beyond the
// largest number of the type become infinities, as in a cast.  NaN becomes 0x7fff.
template <class T>
CODEC_FN u32 narrowed_two(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 two;
    if constexpr (T::kBrain) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    }
    return two;
#else
    const auto one = [](float value) {
        const u32 bits = bits_of(value);
        const u32 magnitude = bits & kAbs;
        if (!T::kBrain && magnitude >= 0x477ff000u && magnitude <= kInfinity) return (bits >> 16 & 0x8000u) | 0x7c00u;
        return value != value ? 0x7fffu : u32(T::narrow(value));
    };
    return one(low) | one(high) << 16;
#endif
}

// ---- integer schemes: 2 to 8 bits, with or without an offset -----------------------------------

// BITS is 2 to 8 if a kernel is compiled for this number of bits, and 0 if the launch gives the number (`stated`).
// With `clipped`, symmetric codes use all 2^bits codes, from -2^(bits - 1) on, and the largest positive value is one
// step beyond the last code.
template <int BITS>
struct Scheme {
    int stated;
    bool asymmetric;
    bool clipped = false;
    static CODEC_FN Scheme of(u32 bits, u32 special) { return {int(bits), special == 1, special == 2}; }
    CODEC_FN int bits() const { return BITS != 0 ? BITS : stated; }
    CODEC_FN float first() const { return asymmetric ? 0.0f : -steps(); }
    CODEC_FN float last() const { return float((1 << (asymmetric ? bits() : bits() - 1)) - 1); }
    CODEC_FN float steps() const { return clipped ? last() + 1.0f : last(); }  // extent divided by scale
};

// Floats with 1, 2 or 3 bits of mantissa: e2m1, e5m2, e4m3.  MANTISSA is 0 if the launch gives it (`stated`).  Bit
// patterns without the sign are ordered like magnitudes, and are those of fp32 with another bias.
template <int MANTISSA>
struct Floats {
    int stated;
    bool powers;  // whether scales are powers of two (E8M0)
    static CODEC_FN Floats of(u32 mantissa, u32 special) { return {int(mantissa), special != 0}; }
    CODEC_FN int mantissa() const { return MANTISSA != 0 ? MANTISSA : stated; }
    CODEC_FN int bits() const { return mantissa() == 1 ? 4 : 8; }
    CODEC_FN int smallest() const { return mantissa() == 1 ? 0 : mantissa() == 2 ? -14 : -6; }  // exponent
    CODEC_FN u32 top() const { return mantissa() == 1 ? 0x07u : mantissa() == 2 ? 0x7bu : 0x7eu; }  // pattern
    CODEC_FN float last() const { return mantissa() == 1 ? 6.0f : mantissa() == 2 ? 57344.0f : 448.0f; }
};

// ---- the extent of a block: keys whose integer maximum is the extreme --------------------------

// Without an offset, `high` has the bits of a value without the sign, so that NaN > infinity > every finite magnitude.
// With an offset, `high` is larger for larger values, from -NaN to +NaN, and `low` is larger for smaller values.  The
// maximum of several extents does not depend on their order, and {0, 0} does not change it.
struct Extent {
    u32 high, low;
    CODEC_FN void include(Extent other) {
        high = other.high > high ? other.high : high;
        low = other.low > low ? other.low : low;
    }
};

CODEC_FN u32 ordered(u32 bits) { return bits ^ (u32(int(bits) >> 31) | 0x80000000u); }
CODEC_FN u32 unordered(u32 key) { return key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu); }

template <int BITS>
CODEC_FN Extent extent_of(Scheme<BITS> scheme, float value) {
    const u32 bits = bits_of(value);
    if (!scheme.asymmetric) return {bits & kAbs, 0};
    const u32 key = ordered(bits);
    return {key, ~key};
}

template <int MANTISSA>
CODEC_FN Extent extent_of(Floats<MANTISSA>, float value) {
    return {bits_of(value) & kAbs, 0};
}

// Includes eight values of a block in its extent; the scheme is tested once for all of them.
template <int BITS>
CODEC_FN void include_octet(Scheme<BITS> scheme, const float (&values)[kOctet], Extent& extent) {
    if (scheme.asymmetric) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) extent.include(extent_of(Scheme<BITS>{scheme.stated, true}, values[i]));
    } else {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            const u32 high = bits_of(values[i]) & kAbs;
            extent.high = high > extent.high ? high : extent.high;
        }
    }
}

template <int MANTISSA>
CODEC_FN void include_octet(Floats<MANTISSA>, const float (&values)[kOctet], Extent& extent) {
    include_octet(Scheme<8>{8, false}, values, extent);
}

// ---- scale and offset of a block, as the frame stores them -------------------------------------

struct Stored {
    float scale, low;
    CODEC_FN bool broken() const { return scale != scale; }
};

template <int BITS>
CODEC_FN Stored stored_of(Scheme<BITS> scheme, Extent extent) {
    constexpr u32 kLargestKey = 0xff7fffffu;  // of the largest finite value, in both directions
    const bool broken = scheme.asymmetric ? extent.high > kLargestKey || extent.low > kLargestKey
                                          : extent.high >= kInfinity;
    if (broken) return {float_of(kNaN), 0.0f};
    Stored stored{0.0f, 0.0f};
    if (rare(scheme.asymmetric)) {
        const float high = float_of(unordered(extent.high));
        stored.low = float_of(unordered(~extent.low)) + 0.0f;  // -0 is stored as 0
        stored.scale = high / scheme.last() - stored.low / scheme.last();  // high - low may overflow
    } else {
        stored.scale = float_of(extent.high) / scheme.steps();
    }
    stored.scale = stored.scale < kSmallestNormal ? kSmallestNormal : stored.scale;
    return stored;
}

template <int MANTISSA>
CODEC_FN Stored stored_of(Floats<MANTISSA> scheme, Extent extent) {
    if (extent.high >= kInfinity) return {float_of(kNaN), 0.0f};
    float scale = float_of(extent.high) / scheme.last();
    scale = scale < kSmallestNormal ? kSmallestNormal : scale;
    if (scheme.powers) scale = float_of((bits_of(scale) + 0x7fffffu) & kInfinity);  // up, so nothing saturates
    return {scale, 0.0f};
}

// A scale that is a power of two as one byte of the frame, and back.
CODEC_FN u8 exponent_of(float scale) { return scale != scale ? u8(255) : u8(bits_of(scale) >> 23); }
CODEC_FN float power_of(u8 exponent) { return float_of(exponent == 255 ? kNaN : u32(exponent) << 23); }

// ---- random bits of stochastic rounding: Philox4x32-10 (impl/codecs/rounding_noise.py) --------------------------

// 128 bits.  A key is the upper half of the counter and Philox's key; random bits are 16 for each element of an octet.
struct Words {
    u32 word[4];
};

CODEC_FN Words philox(Words key, u64 octet) {
    u32 a = u32(octet), b = u32(octet >> 32), c = key.word[0], d = key.word[1];
    u32 left = key.word[2], right = key.word[3];
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 first = u64(0xd2511f53u) * a, second = u64(0xcd9e8d57u) * c;
        a = u32(second >> 32) ^ b ^ left;
        b = u32(second);
        c = u32(first >> 32) ^ d ^ right;
        d = u32(first);
        left += 0x9e3779b9u;
        right += 0xbb67ae85u;
    }
    return {{a, b, c, d}};
}

// The number that 16 random bits add to a quotient before it is rounded: (bits - 32767.5) / 65536, exactly.
CODEC_FN float shift_of(u32 bits) { return (float_of(0x43000000u | bits) - 128.0f) - (0.5f - 0x1p-17f); }

// The same for element `i` of an octet.
CODEC_FN float shift_of(const Words& random, int i) {
    const u32 word = random.word[i / 2];
    return shift_of(i % 2 == 0 ? word & 0xffffu : word >> 16);
}

// ---- one value to its code ---------------------------------------------------------------------

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds |x| < 2^22 to nearest-even

// What all elements of a block are divided by.  `quick`: whether `quotient_of` divides exactly.
struct Divider {
    float divisor, reciprocal, half_low;
    bool quick;
};

CODEC_FN Divider divider_of(float divisor, float half_low) {
    return {divisor, 1.0f / divisor, half_low, divisor >= 0x1p-64f && divisor <= 0x1p125f};
}

template <int BITS>
CODEC_FN Divider divider_of(Scheme<BITS> scheme, Stored stored) {
    return divider_of(scheme.asymmetric ? stored.scale * 0.5f : stored.scale, stored.low * 0.5f);
}

template <int MANTISSA>
CODEC_FN Divider divider_of(Floats<MANTISSA>, Stored stored) {
    return divider_of(stored.scale, 0.0f);
}

// numerator / divisor, rounded as a division rounds it, if the divider is `quick` and the quotient is 0, or at least
// 2^-20 and finite (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).
//
// A division takes ten instructions and a branch, this three.  Before the last rounding the result is within 2^-22
// units in the last place of the quotient, so the two can only round differently if the quotient is that near to the
// middle between two numbers.  That leaves finitely many pairs of mantissas, and tests/impl/cuda/test_division.py
// tries all of them.  No product on the way is denormal: the remainder is a multiple of 2^-43 * 2^-23 * divisor.
// Smaller quotients may be off in their last places, which no code depends on.  The quotient of -0 is 0.
CODEC_FN float quotient_of(Divider divider, float numerator) {
    const float near = numerator * divider.reciprocal;
    return fused(fused(-near, divider.divisor, numerator), divider.reciprocal, near);
}

template <int BITS>
CODEC_FN float numerator_of(Scheme<BITS> scheme, Divider divider, float value) {
    return scheme.asymmetric ? value * 0.5f - divider.half_low : value;
}

// Returns the bits of kRound + code, where the code is round(quotient + shift), clamped.  The quotient is computed by a
// division.  The code is clamped after rounding, since 127 + 0.49999 may be rounded up.
template <int BITS>
CODEC_FN u32 divided(Scheme<BITS> scheme, Divider divider, float value, float shift) {
    float rounded = numerator_of(scheme, divider, value) / divider.divisor + shift + kRound;
    const float last = kRound + scheme.last(), first = kRound + scheme.first();
    rounded = rounded > last ? last : rounded;
    return bits_of(rounded < first ? first : rounded);
}

template <int BITS>
CODEC_FN u32 divided_code(Scheme<BITS> scheme, Divider divider, float value, float shift) {
    return divided(scheme, divider, value, shift) & ((1u << scheme.bits()) - 1u);
}

// The bit pattern of a quotient rounded to a float of 4 or 8 bits.
template <int MANTISSA>
CODEC_FN u32 pattern_of(Floats<MANTISSA> scheme, float quotient, float shift) {
    const int mantissa = scheme.mantissa();
    const u32 bits = bits_of(quotient), least = u32(127 + scheme.smallest());
    u32 exponent = bits >> 23 & 0xffu;
    exponent = exponent < least ? least : exponent;
    // The quotient in steps of 2^(exponent - 127 - mantissa); without noise the shift is 0.
    const float whole = quotient * float_of((254u + u32(mantissa) - exponent) << 23) + shift + kRound;
    const int steps = int(bits_of(whole) - bits_of(kRound));
    u32 size = ((exponent - least) << mantissa) + u32(steps < 0 ? -steps : steps);
    size = size > scheme.top() ? scheme.top() : size;
    return size | bits >> 31 << (scheme.bits() - 1);
}

template <int MANTISSA>
CODEC_FN u32 divided_code(Floats<MANTISSA> scheme, Divider divider, float value, float shift) {
    return pattern_of(scheme, value / divider.divisor, shift);
}

// Two reciprocals of a divisor, one too small by 2^-20 of its value and one too large.  The products of an element with
// both enclose the quotient.  (The reciprocal and its factor are each exact to 2^-22 even if denormal, product and
// quotient to 2^-24.)  Rounding is monotonic, so if both products round to the same code, the quotient does too.  Loops
// over many values use this, since a test and a branch for each value, as for `quick`, would cost too much.
struct Bracket {
    float low, high;
};

CODEC_FN Bracket bracket_of(Divider divider) {
    return {divider.reciprocal * (1.0f - 0x1p-20f), divider.reciprocal * (1.0f + 0x1p-20f)};
}

// ---- one code to its value ---------------------------------------------------------------------

// The value of the integer for which a code stands; NaN if the scale is NaN.
template <int BITS>
CODEC_FN float value_of(Scheme<BITS> scheme, Stored stored, float integer) {
    if (!scheme.asymmetric) return integer * stored.scale;
    return (integer * (stored.scale * 0.5f) + stored.low * 0.5f) * 2.0f;  // in halves: code * scale may overflow
}

template <int BITS>
CODEC_FN float value_of(Scheme<BITS> scheme, Stored stored, u32 code) {
    constexpr float kInteger = 8388608.0f;  // 2^23, to which the low bits of the pattern add integers
    const u32 half = scheme.asymmetric ? 0u : 1u << (scheme.bits() - 1);
    return value_of(scheme, stored, float_of((0x4b000000u | half) ^ code) - (kInteger + float(half)));
}

template <int MANTISSA>
CODEC_FN float value_of(Floats<MANTISSA> scheme, Stored stored, u32 code) {
    const u32 sign = code >> (scheme.bits() - 1), size = code & ((1u << (scheme.bits() - 1)) - 1u);
    // fp32's pattern with the element's bias; the product corrects the bias and normalises.
    const float element = float_of(size << (23 - scheme.mantissa())) *
                          float_of(u32(127 + 126 + scheme.smallest()) << 23);
    return float_of(bits_of(element) | sign << 31) * stored.scale;
}

// The values of eight codes of one block; the scheme is tested once for all of them.
template <int BITS>
CODEC_FN void values_of(Scheme<BITS> scheme, Stored stored, const u32 (&codes)[kOctet], float (&values)[kOctet]) {
    if (scheme.asymmetric) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) values[i] = value_of(Scheme<BITS>{scheme.stated, true}, stored, codes[i]);
    } else {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) values[i] = value_of(Scheme<BITS>{scheme.stated, false}, stored, codes[i]);
    }
}

template <int MANTISSA>
CODEC_FN void values_of(Floats<MANTISSA> scheme, Stored stored, const u32 (&codes)[kOctet],
                        float (&values)[kOctet]) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) values[i] = value_of(scheme, stored, codes[i]);
}

// Returns true only if no value of the block exceeds `largest` in magnitude, so that single elements need not be
// compared with it.  May return false although no value does.
CODEC_FN bool within(Stored stored, float largest) {
    return stored.scale <= largest * 0x1p-10f && stored.low <= largest * 0.5f && stored.low >= largest * -0.5f;
}

template <int BITS>
CODEC_FN bool within(Scheme<BITS>, Stored stored, float largest) {
    return within(stored, largest);
}

template <int MANTISSA>
CODEC_FN bool within(Floats<MANTISSA>, Stored stored, float largest) {
    return stored.scale <= largest * 0x1p-17f;  // the largest element of all patterns is 7 * 2^14
}

CODEC_FN float saturated(float value, float largest) {
    return value > largest ? largest : value < -largest ? -largest : value;
}

// ---- rotation: groups of n elements become H x / n, with the Hadamard matrix H in Sylvester's order --
//
// All elements are divided by n, then butterflies of distance 1, 2, 4, ... n / 2 replace (a, b) by (a + b, a - b).
// The rotation back does the same, and multiplies all elements by n at the end.

// One element of a butterfly's result; `second`: whether it is the second of the pair.
CODEC_FN float butterfly(float mine, float other, bool second) { return second ? other - mine : mine + other; }

// ---- error feedback ----------------------------------------------------------------------------

// `old` is the decay and `fresh` 1 - decay, each rounded once from double.
struct Decay {
    float old, fresh;
};

// The new error of an encoding: `value`, the element plus its old error, was encoded and decodes to `decoded`.
CODEC_FN float carried_of(Decay decay, float error, float value, float decoded) {
    const float left = (value - decoded) * decay.fresh;
    error = error * decay.old + left;
    return (bits_of(error) & kAbs) < kInfinity ? error : 0.0f;
}

// The same, in the type in which the error is stored.
template <class State>
CODEC_FN typename State::Word carried_of(Decay decay, float error, float value, float decoded) {
    return State::narrow(saturated(carried_of(decay, error, value, decoded), State::largest()));
}

// ---- octets: eight codes, which fill whole bytes -----------------------------------------------

// Rounds eight values of one block whose divider is `quick`, and writes the bits of kRound + code to `rounded`.
// `shift(i)` is the number that stochastic rounding adds to quotient i.  Symmetric quotients exceed `last` by no more
// than their own rounding.  So they are clamped only if `CLIPPED`, or if a shift of up to 0.49999 may carry them over a
// tie.
template <bool STOCHASTIC, bool ASYMMETRIC, bool CLIPPED, int BITS, class Shift>
CODEC_FN void quick_octet(Scheme<BITS> stated, Divider divider, const float (&values)[kOctet], Shift shift,
                          u32 (&rounded)[kOctet]) {
    const Scheme<BITS> scheme{stated.stated, ASYMMETRIC, CLIPPED};
    const float first = kRound + scheme.first(), last = kRound + scheme.last();
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
        const float quotient = quotient_of(divider, numerator_of(scheme, divider, values[i]));
        float whole = (STOCHASTIC ? quotient + shift(i) : quotient) + kRound;
        if (STOCHASTIC || ASYMMETRIC || CLIPPED) whole = whole > last ? last : whole;
        if (STOCHASTIC || ASYMMETRIC) whole = whole < first ? first : whole;
        rounded[i] = bits_of(whole);
    }
}

// The same for any divider.
template <bool STOCHASTIC, int BITS, class Shift>
CODEC_FN void round_octet(Scheme<BITS> scheme, Divider divider, const float (&values)[kOctet], Shift shift,
                          u32 (&rounded)[kOctet]) {
    if (rare(!divider.quick)) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i)
            rounded[i] = divided(scheme, divider, values[i], STOCHASTIC ? shift(i) : 0.0f);
    } else if (rare(scheme.asymmetric)) {
        quick_octet<STOCHASTIC, true, false>(scheme, divider, values, shift, rounded);
    } else if (scheme.clipped) {
        quick_octet<STOCHASTIC, false, true>(scheme, divider, values, shift, rounded);
    } else {
        quick_octet<STOCHASTIC, false, false>(scheme, divider, values, shift, rounded);
    }
}

template <bool STOCHASTIC, int BITS, class Shift>
CODEC_FN void codes_of(Scheme<BITS> scheme, Divider divider, const float (&values)[kOctet], Shift shift,
                       u32 (&codes)[kOctet]) {
    round_octet<STOCHASTIC>(scheme, divider, values, shift, codes);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) codes[i] &= (1u << scheme.bits()) - 1u;
}

template <bool STOCHASTIC, int MANTISSA, class Shift>
CODEC_FN void codes_of(Floats<MANTISSA> scheme, Divider divider, const float (&values)[kOctet], Shift shift,
                       u32 (&codes)[kOctet]) {
    if (rare(!divider.quick)) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i)
            codes[i] = divided_code(scheme, divider, values[i], STOCHASTIC ? shift(i) : 0.0f);
    } else {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            const u32 size = bits_of(quotient_of(divider, values[i])) & kAbs, sign = bits_of(values[i]) & ~kAbs;
            codes[i] = pattern_of(scheme, float_of(size | sign), STOCHASTIC ? shift(i) : 0.0f);  // -0 has a code too
        }
    }
}

}  // namespace codec
