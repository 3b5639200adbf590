// Packs the codes of an octet into one word, with 2 to 8 bits each and the first in the lowest bits, and unpacks them;
// rounds eight values stochastically to packed codes.
#pragma once

#include "codec.cuh"

namespace codec {

template <int BITS>
CODEC_FN u64 packed(const u32 (&codes)[kOctet]) {
    u64 word = 0;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) word |= u64(codes[i]) << (i * BITS);
    return word;
}

template <int BITS>
CODEC_FN void unpacked(u64 word, u32 (&codes)[kOctet]) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) codes[i] = u32(word >> (i * BITS)) & ((1u << BITS) - 1u);
}

// Shifting 64 bits is cheap by constants and expensive by variables, so the width is chosen once for eight codes.
template <int BITS>
CODEC_FN u64 pack(Scheme<BITS> scheme, const u32 (&codes)[kOctet]) {
    if constexpr (BITS != 0) {
        return packed<BITS>(codes);
    } else {
        switch (scheme.stated) {
            case 2: return packed<2>(codes);
            case 3: return packed<3>(codes);
            case 4: return packed<4>(codes);
            case 5: return packed<5>(codes);
            case 6: return packed<6>(codes);
            case 7: return packed<7>(codes);
            default: return packed<8>(codes);
        }
    }
}

// Packs eight codes, given as the patterns that round_octet returns.  Since a whole number of codes fills 32 bits, the
// codes need not be masked one by one: the patterns are shifted and added up, and then all that is not code is
// subtracted at once.
template <int BITS>
CODEC_FN u64 pack_rounded(Scheme<BITS> scheme, const u32 (&rounded)[kOctet]) {
    static_assert(BITS == 4 || BITS == 8, "whole codes in 32 bits");
    constexpr int kCodes = 32 / BITS;
    constexpr u32 kOnes = BITS == 4 ? 0x11111111u : 0x01010101u, kHalf = 1u << (BITS - 1);
    const u32 bias = scheme.asymmetric ? 0u : kHalf, taken = kOnes * (bias - bits_of(kRound)), signs = kOnes * bias;
    u32 words[2] = {0, 0};
#pragma unroll
    for (int i = kOctet - 1; i >= 0; --i) {
        u32& word = words[i / kCodes];
        word = (word << BITS) + rounded[i];
    }
    const u32 low = (words[0] + taken) ^ signs;
    return BITS == 4 ? low : low | u64((words[1] + taken) ^ signs) << 32;
}

// ---- stochastic rounding of eight codes of 4 or 8 bits ------------------------------------------

// Says where a code is in the bit pattern of the float `kBase + code`.  The lowest kFraction bits of the pattern are a
// fraction, and the code is above them.  With 8 bits of code, 15 of the mantissa's 23 bits are left for the fraction.
template <int BITS, bool ASYMMETRIC>
struct Floored {
    static_assert(BITS == 4 || BITS == 8, "compiled for these");
    static constexpr int kFraction = BITS == 4 ? 16 : 15;
    static constexpr float kBase = BITS == 4 ? 192.0f : ASYMMETRIC ? 256.0f : 384.0f;

    // Packs the codes of eight patterns: the upper halves of two patterns are added up at a time, as in `pack_rounded`.
    template <class Pattern>
    static CODEC_FN u64 pack(int count, Pattern pattern) {
        constexpr int kPairs = 16 / BITS, kUp = 16 - kFraction;
        constexpr u32 kOnes = BITS == 4 ? 0x11111111u : 0x01010101u, kBias = ASYMMETRIC ? 0u : kOnes << (BITS - 1);
        const u32 zero = bits_of(kBase), taken = kBias - kOnes * (zero << kUp >> 16);
        u32 words[2] = {0, 0};
#pragma unroll
        for (int j = kOctet / 2 - 1; j >= 0; --j) {
            const int i = j % kPairs + j / kPairs * 2 * kPairs;
            const u32 low = i < count ? pattern(i) : zero, high = i + kPairs < count ? pattern(i + kPairs) : zero;
            words[i / 4] = (words[i / 4] << BITS) + (low << kUp >> 16 | (high << kUp & 0xffff0000u));
        }
        const u32 first = (words[0] + taken) ^ kBias;
        return BITS == 4 ? first : first | u64((words[1] + taken) ^ kBias) << 32;
    }
};

// Rounds eight values of one block stochastically, with the random bits of their octet, and returns the packed codes.
// The codes from number `count` on are 0.
//
// round(quotient + shift_of(bits)) equals floor(quotient + (bits + 1/2) / 65536), and the floor is the part of the bit
// pattern above the fraction.  That takes one fused multiply-add for an element, where rounding takes four additions.
// If a sum is nearer than `kMargin` to a whole number, its code is not certain, and all eight values are divided.
// In units of 2^-kFraction, the error of a sum is at most the total of these parts:
//   one half for the rounding of the sum;
//   one half for the 1/2 that is left out;
//   with 8 bits, one half for the rounding of the base;
//   a quarter with 4 bits, and two with 8 bits, for the product.  Its error is less than 2^-21 * (last + 1): the
//   reciprocal is exact to 2^-22, since it may be denormal, and product and quotient are each rounded by 2^-24.
template <bool ASYMMETRIC, bool CLIPPED, int BITS>
CODEC_FN u64 drawn_word(Scheme<BITS> stated, Divider divider, const float (&values)[kOctet], const Words& random,
                        int count) {
    using In = Floored<BITS, ASYMMETRIC>;
    constexpr u32 kMargin = (BITS == 4 ? 2u : 4u) << (32 - In::kFraction);
    const Scheme<BITS> scheme{stated.stated, ASYMMETRIC, CLIPPED};
    const float first = In::kBase + scheme.first(), last = In::kBase + scheme.last() + 0.5f;
    u32 nearest = ~0u;
    const u64 word = In::pack(count, [&](int i) {
        const u32 bits = i % 2 == 0 ? random.word[i / 2] & 0xffffu : random.word[i / 2] >> 16;
        const float start = float_of(0x43400000u | bits) + (In::kBase - 192.0f);  // kBase + bits / 65536
        float sum = fused(numerator_of(scheme, divider, values[i]), divider.reciprocal, start);
        if (ASYMMETRIC || CLIPPED) {  // below: to a sum that is not certain; above: to one that is the last code
            sum = sum < first ? first : sum;
            sum = sum > last ? last : sum;
        }
        const u32 fraction = (bits_of(sum) << (32 - In::kFraction)) + kMargin;
        nearest = fraction < nearest ? fraction : nearest;
        return bits_of(sum);
    });
    if (!rare(nearest < 2 * kMargin)) return word;
    return In::pack(count, [&](int i) {
        const u32 code = divided(scheme, divider, values[i], shift_of(random, i)) - bits_of(kRound);
        return bits_of(In::kBase) + (code << In::kFraction);
    });
}

template <int BITS>
CODEC_FN u64 drawn_word(Scheme<BITS> scheme, Divider divider, const float (&values)[kOctet], const Words& random,
                        int count) {
    return rare(scheme.asymmetric) ? drawn_word<true, false>(scheme, divider, values, random, count)
           : rare(scheme.clipped)  ? drawn_word<false, true>(scheme, divider, values, random, count)
                                   : drawn_word<false, false>(scheme, divider, values, random, count);
}

// Writes the integers for which eight codes stand.  If the bits of a code are put into the right place of the mantissa
// of a power of two, the float is this power plus the code, and the power is subtracted.  For each code that takes one
// LOP3, or one PRMT if the code is a byte, and one subtraction.  Codes in two's complement are made positive by
// flipping their sign bit.  The mask of this bit comes from the launch: with two constants, ptxas would use two LOP3s.
template <int BITS>
CODEC_FN void integers_of(Scheme<BITS> scheme, u64 word, float (&integers)[kOctet]) {
    static_assert(BITS == 4 || BITS == 8, "compiled for these");
    const u32 sign = scheme.asymmetric ? 0u : 1u << (scheme.stated - 1);
    const float low = scheme.asymmetric ? 0.0f : float(1 << (BITS - 1));
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
        if constexpr (BITS == 8) {
            const u32 bytes = u32(word >> (i / 4 * 32)) ^ sign * 0x01010101u;
#ifdef __CUDA_ARCH__
            const u32 bits = __byte_perm(bytes, 0x4b000000u, 0x7540u | u32(i % 4));
#else
            const u32 bits = 0x4b000000u | (bytes >> (i % 4 * 8) & 0xffu);
#endif
            integers[i] = float_of(bits) - (8388608.0f + low);
        } else {
            const int at = i < 5 ? 4 * i : 4 * i - 12;  // of 23 bits
            const u32 bits = i < 5 ? u32(word) : u32(word) >> 12, one = u32(127 + 23 - at) << 23;
            const float code = float_of((bits & (0xfu << at)) ^ (one | sign << at));
            integers[i] = code - (float_of(one) + low);
        }
    }
}

template <int MANTISSA>
CODEC_FN u64 pack(Floats<MANTISSA> scheme, const u32 (&codes)[kOctet]) {
    return scheme.bits() == 4 ? packed<4>(codes) : packed<8>(codes);
}

template <int MANTISSA>
CODEC_FN void unpack(Floats<MANTISSA> scheme, u64 word, u32 (&codes)[kOctet]) {
    scheme.bits() == 4 ? unpacked<4>(word, codes) : unpacked<8>(word, codes);
}

template <int BITS>
CODEC_FN void unpack(Scheme<BITS> scheme, u64 word, u32 (&codes)[kOctet]) {
    if constexpr (BITS != 0) {
        unpacked<BITS>(word, codes);
    } else {
        switch (scheme.stated) {
            case 2: return unpacked<2>(word, codes);
            case 3: return unpacked<3>(word, codes);
            case 4: return unpacked<4>(word, codes);
            case 5: return unpacked<5>(word, codes);
            case 6: return unpacked<6>(word, codes);
            case 7: return unpacked<7>(word, codes);
            default: return unpacked<8>(word, codes);
        }
    }
}

}  // namespace codec
