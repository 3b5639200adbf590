// Published formats, equal to the torch operations of impl/codecs/published_formats.py bit for bit.
//
// A format is a type with a layout, and with functions that encode and decode one block.  A short last block is
// filled up with its last element.  Codes are 32-bit words until a piece of a row is packed, since loops vectorise
// best if all their values have the same width.
#pragma once

#include "random.hpp"
#include "rounding.hpp"
#include "values.hpp"

namespace {

// The layout of a frame: the bits of a code (`bits`), the elements of a block (`size`), the bytes of a block in
// addition to its codes (`beside`), and the bytes of a row in addition to those of its blocks (`whole`).  `of_row`
// computes a number that all blocks of a row need, such as NVFP4's fp32 scale.
template <i64 BITS, i64 SIZE, i64 BESIDE, i64 WHOLE = 0>
struct Layout {
    static constexpr i64 bits = BITS, size = SIZE, beside = BESIDE, whole = WHOLE;
    static float of_row(const Job&, i64) { return 0.0f; }
};

// The bits of the largest magnitude; they are kInfinity or more if an element is not finite.
template <i64 SIZE>
u32 most(const u32* values) {
    u32 top = 0;
    for (i64 i = 0; i < SIZE; ++i) top = (values[i] & kAbs) > top ? values[i] & kAbs : top;
    return top;
}

template <i64 SIZE>
void fill(u32* codes, u32 code) {
    for (i64 i = 0; i < SIZE; ++i) codes[i] = code;
}

inline float floored(float scale) { return scale < kSmallestNormal ? kSmallestNormal : scale; }

// Small floats with MANTISSA bits of mantissa, smallest exponent LEAST and largest bit pattern TOP (without the sign).
// Codes number the values in ascending order, so the most negative value, whose magnitude has the pattern TOP, has code
// 0.
template <int MANTISSA, int LEAST, int TOP>
struct Small {
    static constexpr u32 least = 127 + LEAST, bias = (least - 1) << 23;
    static constexpr int zero = TOP;

    static int pattern(u32 magnitude) {
        u32 exponent = magnitude >> 23;
        exponent = exponent < least ? least : exponent;
        const float steps = float_of(magnitude) * float_of((254u + MANTISSA - exponent) << 23);
        const int size = int((exponent - least) << MANTISSA) + int(bits_of(steps + kRound) - bits_of(kRound));
        return size > TOP ? TOP : size;
    }
    static u32 code(float quotient) {
        const u32 word = bits_of(quotient);
        const int size = pattern(word & kAbs);
        return u32(zero + (word >> 31 ? -size : size));
    }
    // Computed without denormal numbers, as in Reader<kFloats>.
    static float magnitude(u32 pattern) {
        const float read = float_of((pattern << (23 - MANTISSA)) + bias);
        return pattern < 1u << MANTISSA ? read + read - float_of(least << 23) : read;
    }
    static float entry(u32 code) {
        const int size = int(code) - zero;
        return float_of(bits_of(magnitude(u32(size < 0 ? -size : size))) | (u32(size) & 0x80000000u));
    }
};

template <class ELEMENT, int LARGEST>  // LARGEST: the largest element, in eighths
struct Microscaled : Layout<6, 32, 1> {
    static void encode(const u32* __restrict values, float, u32* __restrict codes, u8* next) {
        const u32 top = most<size>(values);
        if (top >= kInfinity) {
            fill<size>(codes, ELEMENT::zero);
            *next = 255;
            return;
        }
        const u32 exponent = (bits_of(floored(float_of(top) / (LARGEST / 8.0f))) + 0x7fffffu) >> 23;
        const float inverse = float_of((254 - exponent) << 23);  // exact, since the scale is a power of two
        for (i64 i = 0; i < size; ++i) codes[i] = ELEMENT::code(float_of(values[i]) * inverse);
        *next = u8(exponent);
    }
    static void decode(const u32* __restrict codes, const u8* next, float, u32* __restrict values) {
        const float power = power_of(*next);
        for (i64 i = 0; i < size; ++i) values[i] = bits_of(ELEMENT::entry(codes[i]) * power);
    }
};

using E2m3 = Microscaled<Small<3, 0, 31>, 60>;
using E3m2 = Microscaled<Small<2, -2, 31>, 224>;

struct Nvfp4 : Layout<4, 16, 1, 4> {
    using Element = Small<1, 0, 7>;
    using Scale = Small<3, -6, 126>;

    static float of_row(const Job& job, i64 row) {
        u32 top = 0;
        with_type(job.type, [&](auto type) {
            using T = decltype(type);
            top = extent<T, false>(reinterpret_cast<const typename T::Word*>(row), job.numel).high;
        });
        return top >= kInfinity ? float_of(kNaN) : floored(float_of(top) / 2688.0f);
    }
    static void encode(const u32* __restrict values, float row, u32* __restrict codes, u8* next) {
        const float ratio = float_of(most<size>(values)) / 6.0f / row;
        *next = u8(ratio == ratio ? Scale::pattern(bits_of(ratio)) : 0);
        if (*next == 0) {
            fill<size>(codes, Element::zero);
            return;
        }
        const float scale = Scale::magnitude(*next) * row;
        for (i64 i = 0; i < size; ++i) codes[i] = Element::code(float_of(values[i]) / scale);
    }
    static void decode(const u32* __restrict codes, const u8* next, float row, u32* __restrict values) {
        const float scale = Scale::magnitude(*next) * row;
        for (i64 i = 0; i < size; ++i) values[i] = bits_of(Element::entry(codes[i]) * scale);
    }
};

struct Nf4 : Layout<4, 64, 4> {
    static constexpr float table[16] = {
        -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
        -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
        0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
        0.7229568362236023f, 1.0f};
    // For each entry of the table but the first: the smallest fp32 quotient that is encoded as this entry and not as
    // the entry before it.  A quotient is encoded as the nearer entry, where both distances are rounded to fp32.
    static constexpr float from[15] = {
        -0x1.b239b0p-1f, -0x1.38a4e0p-1f, -0x1.d70900p-2f, -0x1.5bd4ecp-2f, -0x1.e079d8p-3f, -0x1.1a7176p-3f,
        -0x1.74f0e2p-5f, 0x1.45f600p-5f,  0x1.ec90c6p-4f,  0x1.a0cfc2p-3f,  0x1.2b05aap-2f,  0x1.8ea7f4p-2f,
        0x1.00da08p-1f,  0x1.491b60p-1f,  0x1.b913b4p-1f};

    static void encode(const u32* __restrict values, float, u32* __restrict codes, u8* next) {
        const u32 top = most<size>(values);
        const float scale = top >= kInfinity ? float_of(kNaN) : floored(float_of(top));
        std::memcpy(next, &scale, 4);
        if (top >= kInfinity) {
            fill<size>(codes, 7);
            return;
        }
        for (i64 i = 0; i < size; ++i) {
            const float quotient = float_of(values[i]) / scale;
            int code = 0;
#pragma GCC unroll 15
            for (const float least : from) code += quotient >= least;
            codes[i] = u32(code);
        }
    }
    static void decode(const u32* __restrict codes, const u8* next, float, u32* __restrict values) {
        float scale;
        std::memcpy(&scale, next, 4);
#if WIDE
        const __m512 entries = _mm512_mul_ps(_mm512_loadu_ps(table), _mm512_set1_ps(scale));
        for (i64 i = 0; i < size; i += 16) {
            _mm512_storeu_ps(values + i, _mm512_permutexvar_ps(_mm512_loadu_si512(codes + i), entries));
        }
#else
        for (i64 i = 0; i < size; ++i) values[i] = bits_of(table[codes[i]] * scale);
#endif
    }
};

template <int BITS>
struct Spikes : Layout<BITS, 128, 10> {
    static constexpr i64 size = 128, beside = 10;
    static constexpr int steps = (1 << BITS) - 1;

    static u16 bf16(float value) { return Bf16::narrow_finite(saturated(value, Bf16::largest())); }

    static u32 lowest(const u32* keys) {
        u32 low = ~0u;
        for (i64 i = 0; i < size; ++i) low = keys[i] < low ? keys[i] : low;
        return low;
    }
    static u32 highest(const u32* keys) {
        u32 high = 0;
        for (i64 i = 0; i < size; ++i) high = keys[i] > high ? keys[i] : high;
        return high;
    }
    static int place(const u32* keys, u32 key) {  // of the first element with that key
        int first = size;
        for (int i = 0; i < size; ++i) {
            const int at = keys[i] == key ? i : int(size);
            first = at < first ? at : first;
        }
        return first;
    }

    static void encode(const u32* __restrict values, float, u32* __restrict codes, u8* next) {
        if (most<size>(values) >= kInfinity) {
            const u16 broken[5] = {0, kNaN >> 16, kNaN >> 16, kNaN >> 16, kNaN >> 16};
            fill<size>(codes, 0);
            std::memcpy(next, broken, beside);
            return;
        }
        u32 keys[size];
        for (i64 i = 0; i < size; ++i) keys[i] = ordered(bits_of(float_of(values[i]) + 0.0f));  // -0 counts as 0
        const int least = place(keys, lowest(keys)), largest = place(keys, highest(keys));
        keys[least] = keys[largest] = ~0u;
        const u16 low = bf16(float_of(unordered(lowest(keys))));
        keys[least] = keys[largest] = 0;
        const float high = float_of(unordered(highest(keys))), begin = Bf16::widen(low);
        const float step = high / steps - begin / steps;
        const u16 stored = bf16(step < 0.0f ? 0.0f : step);
        const float divisor = floored(Bf16::widen(stored) / 2.0f);
        for (i64 i = 0; i < size; ++i) {
            float quotient = (float_of(values[i]) / 2.0f - begin / 2.0f) / divisor;
            quotient = quotient > 0.0f ? quotient : 0.0f;
            quotient = quotient < float(steps) ? quotient : float(steps);
            codes[i] = bits_of(quotient + kRound) - bits_of(kRound);
        }
        codes[least] = codes[largest] = 0;
        const u16 beyond[5] = {u16(least | largest << 8), bf16(float_of(values[least])), bf16(float_of(values[largest])),
                               low, stored};
        std::memcpy(next, beyond, beside);
    }
    static void decode(const u32* __restrict codes, const u8* next, float, u32* __restrict values) {
        u16 stored[5];
        std::memcpy(stored, next, beside);
        const float low = Bf16::widen(stored[3]) / 2.0f, step = Bf16::widen(stored[4]) / 2.0f;
        for (i64 i = 0; i < size; ++i) values[i] = bits_of((float(int(codes[i])) * step + low) * 2.0f);
        values[next[0] % size] = bits_of(Bf16::widen(stored[1]));
        values[next[1] % size] = bits_of(Bf16::widen(stored[2]));
    }
};

struct Sign1 : Layout<1, 128, 4> {
    static void encode(const u32* __restrict values, float, u32* __restrict codes, u8* next) {
        double sums[size];
        for (i64 i = 0; i < size; ++i) sums[i] = double(float_of(values[i] & kAbs));
        for (i64 half = size / 2; half > 0; half /= 2) {
            for (i64 i = 0; i < half; ++i) sums[i] += sums[i + half];
        }
        const u32 mean = bits_of(float(sums[0] / size)), stored = mean < kInfinity ? mean : kNaN;
        std::memcpy(next, &stored, 4);
        for (i64 i = 0; i < size; ++i) codes[i] = float_of(values[i]) < 0.0f;
    }
    static void decode(const u32* __restrict codes, const u8* next, float, u32* __restrict values) {
        u32 mean;
        std::memcpy(&mean, next, 4);
        for (i64 i = 0; i < size; ++i) values[i] = mean ^ codes[i] << 31;
    }
};

// ---- rows ------------------------------------------------------------------------------------------

template <class FORMAT>
void encode_format(const Job& job, i64 row, u8* frame, i64) {
    alignas(64) u32 values[kPiece], codes[kPiece];
    alignas(64) u8 bytes[kPiece];
    const float of_row = FORMAT::of_row(job, row);
    u8* next = frame + (job.numel * FORMAT::bits + 7) / 8;
    for (i64 at = 0; at < job.numel; at += kPiece) {
        const i64 count = smaller(kPiece, job.numel - at);
        bring(job.type, row, at, count, values);
        for (i64 i = count; i % FORMAT::size != 0; ++i) values[i] = values[count - 1];
        for (i64 i = 0; i < count; i += FORMAT::size, next += FORMAT::beside) {
            FORMAT::encode(values + i, of_row, codes + i, next);
        }
        for (i64 i = 0; i < count; ++i) bytes[i] = u8(codes[i]);
        pack<FORMAT::bits>(bytes, frame + at / 8 * FORMAT::bits, count);
    }
    std::memcpy(next, &of_row, FORMAT::whole);
    next += FORMAT::whole;
    std::memset(next, 0, std::size_t(frame + job.coding.frame_bytes - next));
}

// Decodes elements [at, at + count) of a frame to fp32, saturated; `values` has room for a whole last block.
template <class FORMAT>
void format_piece(const Job& job, const u8* frame, i64 at, i64 count, u32* values) {
    alignas(64) u32 codes[kPiece];
    alignas(64) u8 bytes[kPiece] = {}, packed[kPiece + 8];
    const u8* next = frame + (job.numel * FORMAT::bits + 7) / 8;
    float of_row = 0.0f;
    std::memcpy(&of_row, next + (job.numel + FORMAT::size - 1) / FORMAT::size * FORMAT::beside, FORMAT::whole);
    std::memcpy(packed, frame + at / 8 * FORMAT::bits, std::size_t((count * FORMAT::bits + 7) / 8));
    unpack<FORMAT::bits>(packed, bytes, count);  // reads beyond the codes, therefore from a copy
    for (i64 i = 0; i < kPiece; ++i) codes[i] = bytes[i];
    next += at / FORMAT::size * FORMAT::beside;
    for (i64 i = 0; i < count; i += FORMAT::size, next += FORMAT::beside) {
        FORMAT::decode(codes + i, next, of_row, values + i);
    }
    for (i64 i = 0; i < count; ++i) values[i] = bits_of(saturated(float_of(values[i]), Fp32::largest()));
}

// bf16 by stochastic rounding; infinities stay infinite.
struct Bf16sr {};

template <>
void encode_format<Bf16sr>(const Job& job, i64 row, u8* frame, i64 number) {
    alignas(64) u32 values[kPiece];
    alignas(64) u16 random[kPiece];
    for (i64 at = 0; at < job.numel; at += kPiece) {
        const i64 count = smaller(kPiece, job.numel - at);
        bring(job.type, row, at, count, values);
        random_bits(job.key, u64(number + at) / 8, (count + 7) / 8, random);
        for (i64 i = 0; i < count; ++i) {
            const u32 word = values[i], size = word & kAbs;
            const u32 finite = bits_of(saturated(float_of(word), Bf16::largest())) + random[i];
            random[i] = u16((size < kInfinity ? finite : size == kInfinity ? word : kNaN) >> 16);
        }
        std::memcpy(frame + 2 * at, random, std::size_t(2 * count));
    }
    std::memset(frame + 2 * job.numel, 0, std::size_t(job.coding.frame_bytes - 2 * job.numel));
}

template <>
void format_piece<Bf16sr>(const Job&, const u8* frame, i64 at, i64 count, u32* values) {
    alignas(64) u16 words[kPiece];
    std::memcpy(words, frame + 2 * at, std::size_t(2 * count));
    widen<Bf16>(words, values, count);
}

// Converts fp32 to elements, saturated; infinities stay infinite.
template <class T>
void narrow_format(const u32* from, typename T::Word* to, i64 count) {
    if constexpr (std::is_same_v<T, Fp32>) {
        std::memcpy(to, from, std::size_t(count) * 4);
    } else {
        narrow<T>(from, to, count);
        constexpr u32 infinity = std::is_same_v<T, Fp16> ? 0x7c00u : 0x7f80u;
        for (i64 i = 0; i < count; ++i) {
            if ((from[i] & kAbs) == kInfinity) to[i] = typename T::Word((from[i] >> 16 & 0x8000u) | infinity);
        }
    }
}

// Decodes a frame to a row, or several frames to their sum, which is fp32.
template <class FORMAT>
void decode_format(const Job& job, const u8* frame, i64 row) {
    alignas(64) u32 values[kPiece];
    for (i64 at = 0; at < job.numel; at += kPiece) {
        const i64 count = smaller(kPiece, job.numel - at);
        format_piece<FORMAT>(job, frame, at, count, values);
        with_type(job.type, [&](auto type) {
            using T = decltype(type);
            narrow_format<T>(values, reinterpret_cast<typename T::Word*>(row) + at, count);
        });
        u32* sum = reinterpret_cast<u32*>(row) + at;
        for (i64 source = 1; source < job.sources; ++source) {
            format_piece<FORMAT>(job, frame + source * job.source_stride, at, count, values);
            for (i64 i = 0; i < count; ++i) sum[i] = bits_of(float_of(sum[i]) + float_of(values[i]));
        }
    }
}

// Runs body(FORMAT{}) for the format with number `kind`, in the order of FORMATS in impl/codecs/codec.py.
template <class Body>
void with_format(i64 kind, Body body) {
    switch (kind) {
        case 0: return body(Nvfp4{});
        case 1: return body(E2m3{});
        case 2: return body(E3m2{});
        case 3: return body(Nf4{});
        case 4: return body(Spikes<2>{});
        case 5: return body(Spikes<3>{});
        case 6: return body(Sign1{});
        default: return body(Bf16sr{});
    }
}

}  // namespace
