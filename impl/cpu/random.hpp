// The random bits of many octets at once: `philox` of codec.cuh with one counter in each vector lane.
#pragma once

#include "job.hpp"

namespace {

constexpr i64 kCounters = 16;  // octets whose random bits are computed together

// Writes 16 random bits for each element of `octets` octets (8 elements each), of which the first has number `octet`.
// Bits are written for a multiple of kCounters octets, so `out` must have room for `octets` rounded up to such a
// multiple.
//
// A lane has 64 bits and holds the whole product of two 32-bit words.  A shift moves the product's upper half down.
// The next product ignores the upper 32 bits of a lane.
__attribute__((noinline)) inline void random_bits(const Words& key, u64 octet, i64 octets, u16* out) {
#if WIDE
    const auto every = [](u64 value) { return _mm512_set1_epi64(i64(value)); };
    const __m512i first = every(0xd2511f53u), second = every(0xcd9e8d57u);
    const __m512i first_half = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0);
    const __m512i second_half = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
    constexpr int xor3 = 0x96;
    __m512i lefts[10], rights[10];
    for (u32 round = 0; round < 10; ++round) {
        lefts[round] = every(key.word[2] + round * 0x9e3779b9u);
        rights[round] = every(key.word[3] + round * 0xbb67ae85u);
    }
    __m512i counter = _mm512_add_epi64(every(octet), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
    for (i64 at = 0; at < octets; at += kCounters) {
        for (int half = 0; half < 2; ++half, out += 64) {
            __m512i a = counter, b = _mm512_srli_epi64(counter, 32), c = every(key.word[0]), d = every(key.word[1]);
#pragma GCC unroll 10
            for (int round = 0; round < 10; ++round) {
                const __m512i one = _mm512_mul_epu32(first, a), two = _mm512_mul_epu32(second, c);
                a = _mm512_ternarylogic_epi64(_mm512_srli_epi64(two, 32), b, lefts[round], xor3);
                c = _mm512_ternarylogic_epi64(_mm512_srli_epi64(one, 32), d, rights[round], xor3);
                b = two, d = one;
            }
            const __m512i left = _mm512_mask_shuffle_epi32(a, 0xaaaa, b, _MM_PERM_CCAA);
            const __m512i right = _mm512_mask_shuffle_epi32(c, 0xaaaa, d, _MM_PERM_CCAA);
            _mm512_storeu_si512(out, _mm512_permutex2var_epi64(left, first_half, right));
            _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi64(left, second_half, right));
            counter = _mm512_add_epi64(counter, every(8));
        }
    }
#else
    for (i64 at = 0; at < octets; at += kCounters, octet += kCounters, out += 8 * kCounters) {
        u32 a[kCounters], b[kCounters], c[kCounters], d[kCounters], left = key.word[2], right = key.word[3];
        for (i64 i = 0; i < kCounters; ++i) {
            a[i] = u32(octet + u64(i)), b[i] = u32((octet + u64(i)) >> 32);
            c[i] = key.word[0], d[i] = key.word[1];
        }
        for (int round = 0; round < 10; ++round, left += 0x9e3779b9u, right += 0xbb67ae85u) {
            for (i64 i = 0; i < kCounters; ++i) {
                const u64 one = u64(0xd2511f53u) * a[i], two = u64(0xcd9e8d57u) * c[i];
                a[i] = u32(two >> 32) ^ b[i] ^ left, b[i] = u32(two);
                c[i] = u32(one >> 32) ^ d[i] ^ right, d[i] = u32(one);
            }
        }
        for (i64 i = 0; i < kCounters; ++i) {
            const u32 words[4] = {a[i], b[i], c[i], d[i]};
            std::memcpy(out + 8 * i, words, sizeof words);
        }
    }
#endif
}

}  // namespace
