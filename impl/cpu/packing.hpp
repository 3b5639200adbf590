// Packs codes, one in each byte, into a little-endian stream of bits, and unpacks them.
#pragma once

#include "job.hpp"

// FIELDS: whether to use pext and pdep.  BMI2 alone is not enough: Zen 1 and 2 have BMI2 but not AVX-512, and take
// hundreds of cycles for either instruction.
#if WIDE && defined(__BMI2__)
#define FIELDS 1
#else
#define FIELDS 0
#endif

namespace {

// A mask of the low BITS of each byte.
template <int BITS>
constexpr u64 kEvery = ((1ull << BITS) - 1ull) * 0x0101010101010101ull;

// Joins neighbours pairwise three times, so that 8 bytes with BITS bits each become one word of 8 * BITS bits.
template <int BITS>
void pack(const u8* __restrict codes, u8* __restrict out, i64 count) {
    if constexpr (BITS == 8) {
        std::memcpy(out, codes, std::size_t(count));
    } else if constexpr (BITS == 4) {
        for (i64 i = 0; i < count / 2; ++i) {
            u16 pair;
            std::memcpy(&pair, codes + 2 * i, 2);
            out[i] = u8(pair | pair >> 4);
        }
        if (count % 2) out[count / 2] = codes[count - 1];
    } else {
        const auto joined = [](const u8* from) {
            u64 word;
            std::memcpy(&word, from, 8);
#if FIELDS
            return u64(_pext_u64(word, kEvery<BITS>));
#endif
            word = (word & 0x00ff00ff00ff00ffull) | (word & 0xff00ff00ff00ff00ull) >> (8 - BITS);
            word = (word & 0x0000ffff0000ffffull) | (word & 0xffff0000ffff0000ull) >> (16 - 2 * BITS);
            return (word & 0x00000000ffffffffull) | (word & 0xffffffff00000000ull) >> (32 - 4 * BITS);
        };
        // Eight bytes are written, but only the first BITS belong to this octet.  The next octet overwrites the rest.
        const i64 bytes = (count * BITS + 7) / 8;
        i64 i = 0;
        for (; BITS * i + 8 <= bytes; ++i) {
            const u64 word = joined(codes + 8 * i);
            std::memcpy(out + BITS * i, &word, 8);
        }
        for (; 8 * i < count; ++i) {
            u8 last[8] = {};
            std::memcpy(last, codes + 8 * i, std::size_t(smaller(8, count - 8 * i)));
            const u64 word = joined(last);
            std::memcpy(out + BITS * i, &word, std::size_t(smaller(BITS, bytes - BITS * i)));
        }
    }
}

// Unpacks `count` codes.  Reads up to 7 bytes beyond the codes, where a frame has its scales.
template <int BITS>
void unpack(const u8* __restrict in, u8* __restrict codes, i64 count) {
    if constexpr (BITS == 8) {
        std::memcpy(codes, in, std::size_t(count));
    } else if constexpr (BITS == 4) {
        for (i64 i = 0; i < count / 2; ++i) {
            const u16 pair = u16((in[i] | in[i] << 4) & 0x0f0f);
            std::memcpy(codes + 2 * i, &pair, 2);
        }
        if (count % 2) codes[count - 1] = in[count / 2] & 15;
    } else {
        const auto spread = [](u64 word) {
#if FIELDS
            return u64(_pdep_u64(word, kEvery<BITS>));
#endif
            constexpr u64 quad = (1ull << (4 * BITS)) - 1, pair = (1ull << (2 * BITS)) - 1, one = (1ull << BITS) - 1;
            word = (word & quad) | (word & quad << (4 * BITS)) << (32 - 4 * BITS);
            constexpr u64 pairs = pair | pair << 32, ones = one | one << 16 | one << 32 | one << 48;
            word = (word & pairs) | (word & pairs << (2 * BITS)) << (16 - 2 * BITS);
            return (word & ones) | (word & ones << BITS) << (8 - BITS);
        };
        for (i64 i = 0; i < count / 8; ++i) {
            u64 word;
            std::memcpy(&word, in + BITS * i, 8);
            word = spread(word);
            std::memcpy(codes + 8 * i, &word, 8);
        }
        if (const i64 rest = count % 8) {
            u64 word;
            std::memcpy(&word, in + count / 8 * BITS, 8);
            word = spread(word);
            std::memcpy(codes + count - rest, &word, std::size_t(rest));
        }
    }
}

__attribute__((noinline)) inline void pack(i64 bits, const u8* codes, u8* out, i64 count) {
    switch (bits) {
        case 2: return pack<2>(codes, out, count);
        case 3: return pack<3>(codes, out, count);
        case 4: return pack<4>(codes, out, count);
        case 5: return pack<5>(codes, out, count);
        case 6: return pack<6>(codes, out, count);
        case 7: return pack<7>(codes, out, count);
        default: return pack<8>(codes, out, count);
    }
}

__attribute__((noinline)) inline void unpack(i64 bits, const u8* in, u8* codes, i64 count) {
    switch (bits) {
        case 2: return unpack<2>(in, codes, count);
        case 3: return unpack<3>(in, codes, count);
        case 4: return unpack<4>(in, codes, count);
        case 5: return unpack<5>(in, codes, count);
        case 6: return unpack<6>(in, codes, count);
        case 7: return unpack<7>(in, codes, count);
        default: return unpack<8>(in, codes, count);
    }
}

}  // namespace
