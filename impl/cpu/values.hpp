// Decodes codes to values, and adds up the values of several frames.
#pragma once

#include "packing.hpp"
#include "rotation.hpp"

#include <type_traits>

namespace {

constexpr int kSources = 4;  // most sources that one loop adds up

// Reads the codes of one kind.
template <Kind KIND>
struct Reader {
    Scheme<0> scheme;

    explicit Reader(const Code& code) : scheme(code.integers(KIND == kAsymmetric)) {}
    float value(Stored stored, u32 code) const {
        return value_of(Scheme<0>{scheme.stated, KIND == kAsymmetric}, stored, code);
    }
};

// `value_of` of codec.cuh, with the scheme's branches taken out of the loop.  It avoids denormal numbers, which
// processors compute slowly: a pattern below the smallest normal element is read as if it had a leading bit, and the
// value of this bit is then subtracted.
template <>
struct Reader<kFloats> {
    u32 last, shift, bias, normal;  // last: number of bits below the sign; shift: to the place in fp32's pattern

    explicit Reader(const Code& code)
        : last(u32(code.bits - 1)), shift(u32(23 - code.mantissa)), bias(u32(126 + code.floats().smallest()) << 23),
          normal(1u << code.mantissa) {}
    float value(Stored stored, u32 code) const {
        const u32 size = code & ((1u << last) - 1u);
        const float read = float_of((size << shift) + bias);
        const float small = read + read - float_of(bias + (1u << 23));
        const u32 element = bits_of(size < normal ? small : read);
        return float_of(element | code >> last << 31) * stored.scale;
    }
};

// One block, or a part of it, of several frames.
struct Terms {
    const u8* codes[kSources];
    Stored stored[kSources];
};

// Decodes `count` codes of each of `COUNT` frames, and adds the values up in the order of the frames.  Without ADD, the
// sums are written to `out`.  With ADD, the values are added to the sums that `out` holds.
template <class T, Kind KIND, bool SATURATE, int COUNT, bool ADD>
void sum_terms(const Code& code, const Terms& terms, typename T::Word* __restrict out, i64 count) {
    const Reader<KIND> reader(code);
    const float largest = T::largest();
    const u8 *__restrict a = terms.codes[0], *__restrict b = terms.codes[COUNT > 1 ? 1 : 0];
    const u8 *__restrict c = terms.codes[COUNT > 2 ? 2 : 0], *__restrict d = terms.codes[COUNT > 3 ? 3 : 0];
    const Stored sa = terms.stored[0], sb = terms.stored[COUNT > 1 ? 1 : 0];
    const Stored sc = terms.stored[COUNT > 2 ? 2 : 0], sd = terms.stored[COUNT > 3 ? 3 : 0];
    const auto term = [&](Stored stored, u32 number) __attribute__((always_inline)) {
        const float exact = reader.value(stored, number);
        return SATURATE ? saturated(exact, largest) : exact;
    };
    for (i64 i = 0; i < count; ++i) {
        float sum = term(sa, a[i]);
        if (ADD) sum = T::widen(out[i]) + sum;
        if (COUNT > 1) sum += term(sb, b[i]);
        if (COUNT > 2) sum += term(sc, c[i]);
        if (COUNT > 3) sum += term(sd, d[i]);
        out[i] = SATURATE ? T::narrow(sum) : T::narrow_finite(sum);
    }
}

inline bool safe(const Code& code, Stored stored, float largest) {
    if (code.kind == kFloats) return within(code.floats(), stored, largest);
    return within(stored, largest);
}

template <class T, Kind KIND, int COUNT, bool ADD>
void sum_terms(const Code& code, const Terms& terms, typename T::Word* out, i64 count) {
    bool all = true;
    for (int term = 0; term < COUNT; ++term) all = all && safe(code, terms.stored[term], T::largest());
    if (all) return sum_terms<T, KIND, false, COUNT, ADD>(code, terms, out, count);
    if constexpr (COUNT == 1) {
        sum_terms<T, KIND, true, 1, ADD>(code, terms, out, count);
    } else {  // rarely; terms are added one by one, in the same order
        for (int term = 0; term < COUNT; ++term) {
            const Terms single{{terms.codes[term]}, {terms.stored[term]}};
            if (term == 0 && !ADD) sum_terms<T, KIND, true, 1, false>(code, single, out, count);
            else sum_terms<T, KIND, true, 1, true>(code, single, out, count);
        }
    }
}

template <class T, int COUNT, bool ADD>
void sum_terms(const Code& code, const Terms& terms, typename T::Word* out, i64 count) {
    switch (code.kind) {
        case kSymmetric: return sum_terms<T, kSymmetric, COUNT, ADD>(code, terms, out, count);
        case kAsymmetric: return sum_terms<T, kAsymmetric, COUNT, ADD>(code, terms, out, count);
        default: return sum_terms<T, kFloats, COUNT, ADD>(code, terms, out, count);
    }
}

// Writes the values of `count` codes of one block, saturated.
template <class T>
void decode_block(const Code& code, Stored stored, const u8* codes, typename T::Word* out, i64 count) {
    sum_terms<T, 1, false>(code, Terms{{codes}, {stored}}, out, count);
}

#if WIDE
// Returns the values for which the 16 possible codes of 4 bits stand in a block, as a table in a register.  `numbers`
// are the codes' values for scale 1.  They are multiplied by the block's scale as in `value_of`, and saturated.
inline __m512 values_of(const Code& code, __m512 numbers, Stored stored) {
    const __m512 top = _mm512_set1_ps(Fp32::largest()), bottom = _mm512_set1_ps(-Fp32::largest());
    __m512 values;
    if (code.kind == kAsymmetric) {
        const __m512 steps = _mm512_mul_ps(numbers, _mm512_set1_ps(stored.scale * 0.5f));
        values = _mm512_mul_ps(_mm512_add_ps(steps, _mm512_set1_ps(stored.low * 0.5f)), _mm512_set1_ps(2.0f));
    } else {
        values = _mm512_mul_ps(numbers, _mm512_set1_ps(stored.scale));
    }
    return _mm512_max_ps(bottom, _mm512_min_ps(top, values));  // the second operand's NaN is kept
}

template <Kind KIND>
__m512 numbers_of(const Code& code) {
    const Reader<KIND> reader(code);
    alignas(64) float numbers[16];
    for (u32 number = 0; number < 16; ++number) numbers[number] = reader.value({1.0f, 0.0f}, number);
    return _mm512_load_ps(numbers);
}

// Does what sum_piece does, for codes of 4 bits.  `begin`, `end` and the codec's block are multiples of 32.
template <int COUNT, bool ADD>
void sum_nibbles(const Code& code, const u8* frame, i64 stride, i64 begin, i64 end, u32* out) {
    const __m512 numbers = code.kind == kFloats      ? numbers_of<kFloats>(code)
                           : code.kind == kSymmetric ? numbers_of<kSymmetric>(code)
                                                     : numbers_of<kAsymmetric>(code);
    const __m512i lower = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(8));
    const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    i64 block = begin / code.block;
    for (i64 at = begin; at < end; ++block) {
        const i64 stop = smaller((block + 1) * code.block, end);
        __m512 values[COUNT];
        for (int term = 0; term < COUNT; ++term) {
            values[term] = values_of(code, numbers, load(code, frame + term * stride, block));
        }
        for (; at < stop; at += 32, out += 32) {
            __m512 even = _mm512_setzero_ps(), odd = even;
            if (ADD) {
                const __m512 front = _mm512_loadu_ps(out), back = _mm512_loadu_ps(out + 16);
                even = _mm512_permutex2var_ps(front, evens, back);
                odd = _mm512_permutex2var_ps(front, odds, back);
            }
#pragma GCC unroll 4
            for (int term = 0; term < COUNT; ++term) {
                const auto* codes = reinterpret_cast<const __m128i*>(frame + term * stride + at / 2);
                const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes));  // two codes in each lane
                const __m512 first = _mm512_permutexvar_ps(pairs, values[term]);
                const __m512 second = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), values[term]);
                even = term == 0 && !ADD ? first : _mm512_add_ps(even, first);
                odd = term == 0 && !ADD ? second : _mm512_add_ps(odd, second);
            }
            _mm512_storeu_ps(out, _mm512_permutex2var_ps(even, lower, odd));
            _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(even, upper, odd));
        }
    }
}
#endif

// Decodes elements [begin, end) of `COUNT` frames, which are `stride` bytes apart, and adds them up.  Without ADD, the
// sums are written to `out`.  With ADD, the elements are added to the sums that `out` holds.  `begin` is a multiple of
// 8, and there are at most kPiece elements.
template <class T, int COUNT, bool ADD>
void sum_piece(const Code& code, const u8* frame, i64 stride, i64 begin, i64 end, typename T::Word* out) {
#if WIDE
    if constexpr (std::is_same_v<T, Fp32>) {
        if (code.bits == 4 && code.block % 32 == 0 && begin % 32 == 0) {
            const i64 whole = (end - begin) / 32 * 32;
            sum_nibbles<COUNT, ADD>(code, frame, stride, begin, begin + whole, out);
            begin += whole, out += whole;
            if (begin == end) return;
        }
    }
#endif
    alignas(64) u8 buffer[COUNT][kPiece];
    const u8* codes[COUNT];
    for (int term = 0; term < COUNT; ++term) {
        const u8* packed = frame + term * stride + begin / 8 * code.bits;
        if (code.bits != 8) unpack(code.bits, packed, buffer[term], end - begin);
        codes[term] = code.bits != 8 ? buffer[term] : packed;
    }
    i64 block = begin / code.block;
    for (i64 at = begin; at < end; ++block) {
        const i64 stop = smaller((block + 1) * code.block, end);
        Terms terms;
        for (int term = 0; term < COUNT; ++term) {
            terms.codes[term] = codes[term] + (at - begin);
            terms.stored[term] = load(code, frame + term * stride, block);
        }
        sum_terms<T, COUNT, ADD>(code, terms, out + (at - begin), stop - at);
        at = stop;
    }
}

// Undoes the rotation of `values`, which are elements [begin, end) of a row of `numel` elements.  The last elements of
// a row, which fill no group, were not rotated and stay as they are.
inline void rotate_back(const Code& code, i64 numel, i64 begin, i64 end, u32* values) {
    const i64 whole = smaller(end, numel / code.hadamard * code.hadamard);
    if (begin < whole) rotate(values, values, whole - begin, code.hadamard, true);
}

// Converts elements to fp32.
template <class T>
void widen(const typename T::Word* __restrict from, u32* __restrict to, i64 count) {
    i64 i = 0;
#if WIDE
    if constexpr (std::is_same_v<T, Fp16>) {
        for (; i + 16 <= count; i += 16) {
            const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
            _mm512_storeu_ps(to + i, _mm512_cvtph_ps(words));
        }
    }
#endif
    for (; i < count; ++i) to[i] = bits_of(T::widen(from[i]));
}

// Runs body(T{}) for the type of elements with the number `type`.
template <class Body>
void with_type(i64 type, Body body) {
    if (type == 0) body(Fp32{});
    else if (type == 1) body(Bf16{});
    else body(Fp16{});
}

// Converts elements [begin, begin + count) of the row at address `row` to fp32.
inline void bring(i64 type, i64 row, i64 begin, i64 count, u32* to) {
    with_type(type, [&](auto kind) {
        using T = decltype(kind);
        widen<T>(reinterpret_cast<const typename T::Word*>(row) + begin, to, count);
    });
}

// Converts fp32 to elements, saturated.
template <class T>
void narrow(const u32* __restrict from, typename T::Word* __restrict to, i64 count) {
    i64 i = 0;
#if WIDE
    if constexpr (std::is_same_v<T, Fp16>) {
        const __m512 top = _mm512_set1_ps(T::largest()), bottom = _mm512_set1_ps(-T::largest());
        for (; i + 16 <= count; i += 16) {  // min and max keep the NaN of their second operand
            const __m512 values = _mm512_max_ps(bottom, _mm512_min_ps(top, _mm512_loadu_ps(from + i)));
            const __m256i words = _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), words);
        }
    }
#endif
    for (; i < count; ++i) to[i] = T::narrow(saturated(float_of(from[i]), T::largest()));
}

// Decodes elements [begin, end) of one frame to fp32, saturated, and rotated back if the codec rotates.
inline void values_piece(const Code& code, i64 numel, const u8* frame, i64 begin, i64 end, u32* out) {
    sum_piece<Fp32, 1, false>(code, frame, 0, begin, end, out);
    if (code.hadamard == 0) return;
    rotate_back(code, numel, begin, end, out);
    for (i64 i = 0; i < end - begin; ++i) out[i] = bits_of(saturated(float_of(out[i]), Fp32::largest()));
}

// Decodes a whole frame.
template <class T>
void decode_row(const Code& code, i64 numel, const u8* frame, typename T::Word* out) {
    for (i64 at = 0; at < numel; at += kPiece) {
        const i64 stop = smaller(at + kPiece, numel);
        if constexpr (std::is_same_v<T, Fp32>) {
            values_piece(code, numel, frame, at, stop, out + at);
        } else {
            if constexpr (std::is_same_v<T, Bf16>) {
                if (code.hadamard == 0) {
                    sum_piece<T, 1, false>(code, frame, 0, at, stop, out + at);
                    continue;
                }
            }
            alignas(64) u32 values[kPiece];
            values_piece(code, numel, frame, at, stop, values);
            narrow<T>(values, out + at, stop - at);
        }
    }
}

// Rounds fp32 to fp16, to infinity beyond its range.
inline float halved(float value) {
    const u32 bits = bits_of(value), magnitude = bits & kAbs;
    if (magnitude >= 0x477ff000u && magnitude <= kInfinity) return float_of((bits & ~kAbs) | kInfinity);  // 65520 on
    return Fp16::widen(Fp16::narrow(value));
}

// Adds terms to sums, where terms and sums are rounded to fp16.
inline void add_halves(const u32* __restrict terms, u32* __restrict sums, i64 count) {
    i64 i = 0;
#if WIDE
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    for (; i + 16 <= count; i += 16) {
        const __m512 term = _mm512_cvtph_ps(_mm512_cvtps_ph(_mm512_loadu_ps(terms + i), nearest));
        const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(sums + i), term);
        _mm512_storeu_ps(sums + i, _mm512_cvtph_ps(_mm512_cvtps_ph(sum, nearest)));
    }
#endif
    for (; i < count; ++i) sums[i] = bits_of(halved(float_of(sums[i]) + halved(float_of(terms[i]))));
}

// Adds up elements [begin, end) of all sources, in ascending order of the sources, and writes the sums to `out`.
// `first` is the frame of the first source.  `begin` is a multiple of 8, and of the number of elements that are rotated
// together.
__attribute__((noinline)) inline void sum_sources(const Job& job, const u8* first, i64 begin, i64 end, u32* out) {
    const Code& code = job.coding;
    const i64 stride = job.source_stride;
    for (i64 at = begin; at < end; at += kPiece) {
        const i64 stop = smaller(at + kPiece, end);
        const u8* frame = first;
        u32* to = out + (at - begin);
        if (job.halves != 0) {
            alignas(64) u32 term[kPiece];
            std::memset(to, 0, std::size_t(stop - at) * 4);
            for (i64 source = 0; source < job.sources; ++source, frame += stride) {
                values_piece(code, job.numel, frame, at, stop, term);
                add_halves(term, to, stop - at);
            }
            continue;
        }
        if (code.hadamard != 0) {
            alignas(64) u32 term[kPiece];
            values_piece(code, job.numel, frame, at, stop, to);
            for (i64 source = 1; source < job.sources; ++source) {
                values_piece(code, job.numel, frame + source * stride, at, stop, term);
                for (i64 i = 0; i < stop - at; ++i) to[i] = bits_of(float_of(to[i]) + float_of(term[i]));
            }
            continue;
        }
        i64 left = job.sources;
        if (left >= 4) {
            sum_piece<Fp32, 4, false>(code, frame, stride, at, stop, to);
            left -= 4, frame += 4 * stride;
        } else {
            sum_piece<Fp32, 1, false>(code, frame, stride, at, stop, to);
            left -= 1, frame += stride;
        }
        for (; left >= 4; left -= 4, frame += 4 * stride) {
            sum_piece<Fp32, 4, true>(code, frame, stride, at, stop, to);
        }
        for (; left >= 1; --left, frame += stride) {
            sum_piece<Fp32, 1, true>(code, frame, stride, at, stop, to);
        }
    }
}

}  // namespace
