// Codes of an octet into the bits of one word, and back: 2 to 8 bits each, the first in the lowest bits.
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

// Shifts by constants are cheap, by variables of 64 bits are not: choose once for eight codes.
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

// Eight codes as round_octet leaves them.  Where whole codes fill 32 bits, they need no mask each: biased to
// be positive, they are summed, and the biases taken off at once.
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

// The integers of eight codes.  A code that lies in the mantissa of a power of two of the right size is that
// power plus the code: one LOP3 each, or one PRMT where it is a byte, and one difference.  Two's complement is
// biased to be positive by its sign bit, which comes from the launch: of two constants ptxas makes two LOP3s.
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
