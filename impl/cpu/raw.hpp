// Frames of casts: rows are copied, and the rows of several frames are summed in one pass.
//
// Large rows are decoded with stores that bypass the caches: a plain store would first read the cache line that it
// overwrites, and these reads would be a third of a copy's traffic.  Frames and sums are written to the caches, since
// they are read again soon.
#pragma once

#include "job.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

constexpr i64 kStreamed = 1 << 22;  // rows of at least so many bytes are written past the caches
constexpr i64 kLine = 64;

// Copies whole cache lines past the caches if the processor can; `to` is aligned to a line.
inline void stream_lines(u8* __restrict to, const u8* __restrict from, i64 bytes) {
#if defined(__SSE2__)
    for (i64 at = 0; at < bytes; at += kLine) {
        const auto* line = reinterpret_cast<const __m128i*>(from + at);
        const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
        const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
        auto* place = reinterpret_cast<__m128i*>(to + at);
        _mm_stream_si128(place, a);
        _mm_stream_si128(place + 1, b);
        _mm_stream_si128(place + 2, c);
        _mm_stream_si128(place + 3, d);
    }
#else
    std::memcpy(to, from, std::size_t(bytes));
#endif
}

// Makes sure that other processes see the stores of stream_lines before any store after this call.  If a rank then sets
// a flag in shared memory, a process that sees the flag also sees the row.
inline void finish_streams() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

inline void copy_bytes(u8* to, const u8* from, i64 bytes) {
    if (bytes < kStreamed) {
        std::memcpy(to, from, std::size_t(bytes));
        return;
    }
    const i64 front = i64(-reinterpret_cast<std::uintptr_t>(to) % kLine), lines = (bytes - front) / kLine * kLine;
    std::memcpy(to, from, std::size_t(front));
    stream_lines(to + front, from + front, lines);
    std::memcpy(to + front + lines, from + front + lines, std::size_t(bytes - front - lines));
    finish_streams();
}

// Adds up `count` elements of `COUNT` frames, which are `stride` bytes apart, in the order of the frames.  Without ADD,
// the sums are written to `out`.  With ADD, the elements are added to the sums that `out` holds.
template <class T, int COUNT, bool ADD>
void sum_raw(const u8* frame, i64 stride, i64 count, u32* __restrict out) {
    using Word = typename T::Word;
    const auto* a = reinterpret_cast<const Word*>(frame);
    const auto* b = reinterpret_cast<const Word*>(frame + (COUNT > 1 ? 1 : 0) * stride);
    const auto* c = reinterpret_cast<const Word*>(frame + (COUNT > 2 ? 2 : 0) * stride);
    const auto* d = reinterpret_cast<const Word*>(frame + (COUNT > 3 ? 3 : 0) * stride);
    for (i64 i = 0; i < count; ++i) {
        float sum = T::widen(a[i]);
        if (ADD) sum = float_of(out[i]) + sum;
        if (COUNT > 1) sum += T::widen(b[i]);
        if (COUNT > 2) sum += T::widen(c[i]);
        if (COUNT > 3) sum += T::widen(d[i]);
        out[i] = bits_of(sum);
    }
}

// Adds up `count` elements of all sources, in ascending order of the sources, and writes the sums to `out`.  `frame` is
// the frame of the first source, and `stride` the distance in bytes to the next source's frame.
template <class T>
void sum_raw_sources(const u8* frame, i64 sources, i64 stride, i64 count, u32* out) {
    i64 left = sources;
    if (left >= 4) {
        sum_raw<T, 4, false>(frame, stride, count, out);
        left -= 4, frame += 4 * stride;
    } else {
        sum_raw<T, 1, false>(frame, stride, count, out);
        left -= 1, frame += stride;
    }
    for (; left >= 4; left -= 4, frame += 4 * stride) sum_raw<T, 4, true>(frame, stride, count, out);
    for (; left >= 1; --left, frame += stride) sum_raw<T, 1, true>(frame, stride, count, out);
}

// Writes a row of sums piece by piece, so that each piece stays in the first-level cache.
template <class T>
void sum_raw_row(const Job& job, const u8* frame, u32* out) {
    for (i64 at = 0; at < job.numel; at += kPiece) {
        const i64 count = smaller(kPiece, job.numel - at);
        sum_raw_sources<T>(frame + at * i64(sizeof(typename T::Word)), job.sources, job.source_stride, count, out + at);
    }
}

}  // namespace
