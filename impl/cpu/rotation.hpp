// Hadamard rotations of rows of fp32, group by group, with `butterfly` of codec.cuh.  fp32 numbers are held as
// their bits, as are elements of every type.
#pragma once

#include "job.hpp"

namespace {

// The butterflies of distance 1, 2, 4 and 8 inside a vector, for groups of `size` elements.
#if WIDE
inline __m512 rotated_vector(__m512 v, i64 size) {
    const auto step = [](__m512 x, __m512 other, __mmask16 second) {
        return _mm512_mask_sub_ps(_mm512_add_ps(x, other), second, other, x);
    };
    v = step(v, _mm512_permute_ps(v, 0xb1), 0xaaaa);
    if (size > 2) v = step(v, _mm512_permute_ps(v, 0x4e), 0xcccc);
    if (size > 4) v = step(v, _mm512_shuffle_f32x4(v, v, 0xb1), 0xf0f0);
    if (size > 8) v = step(v, _mm512_shuffle_f32x4(v, v, 0x4e), 0xff00);
    return v;
}
#endif

inline void meet(u32& first, u32& second) {
    const float a = float_of(first), b = float_of(second);
    first = bits_of(butterfly(a, b, false)), second = bits_of(butterfly(b, a, true));
}

// Reads `count` values from `from`, rotates each group of `size` values, and writes them to `to`, which may be the
// same memory.  `count` is a multiple of `size`.
__attribute__((noinline)) inline void rotate(const u32* from, u32* to, i64 count, i64 size, bool back) {
    const float part = 1.0f / float(size);
    i64 at = 0;
#if WIDE
    for (; at + 16 <= count; at += 16) {
        const __m512 values = _mm512_mul_ps(_mm512_loadu_ps(from + at), _mm512_set1_ps(part));
        _mm512_storeu_ps(to + at, rotated_vector(values, size));
    }
#endif
    // The values that are left, because they do not fill a vector of 16; without vectors, all values.
    for (i64 i = at; i < count; ++i) to[i] = bits_of(float_of(from[i]) * part);
    for (i64 small = 1; small < smaller(size, 16) && at < count; small *= 2) {
        for (i64 i = at; i < count; i += 2 * small) {
            for (i64 j = i; j < i + small; ++j) {
                meet(to[j], to[j + small]);
            }
        }
    }
    for (i64 distance = 16; distance < size; distance *= 2) {
        for (i64 i = 0; i < count; i += 2 * distance) {
            u32 *__restrict first = to + i, *__restrict second = to + i + distance;
            for (i64 j = 0; j < distance; ++j) meet(first[j], second[j]);
        }
    }
    if (!back) return;
    for (i64 i = 0; i < count; ++i) to[i] = bits_of(float_of(to[i]) * float(size));
}

}  // namespace
