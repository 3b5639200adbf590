// Codes to values, and sums of values over several frames.
#pragma once

#include "packing.hpp"
#include "rotation.hpp"

namespace {

constexpr int kSources = 4;  // added in one go

// How codes of a kind are read.
template <Kind KIND>
struct Reader {
    Scheme<0> scheme;

    explicit Reader(const Code& code) : scheme(code.integers(KIND == kAsymmetric)) {}
    float value(Stored stored, u32 code) const {
        return value_of(Scheme<0>{scheme.stated, KIND == kAsymmetric}, stored, code);
    }
};

// `value_of` of codec.cuh, with what its scheme says taken out of the loop, and without denormal numbers,
// which processors are slow at: below the smallest normal element the pattern is read as if a leading
// bit stood there, which is then taken away.
template <>
struct Reader<kFloats> {
    u32 last, shift, bias, normal;  // last: bits before the sign; shift: of the pattern in fp32's

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

// One block, or its part, of several frames.
struct Terms {
    const u8* codes[kSources];
    Stored stored[kSources];
};

// Values of `COUNT` terms, in order, after what `out` holds (ADD) or alone.
template <class T, Kind KIND, bool SATURATE, int COUNT, bool ADD>
void sum_terms(const Code& code, const Terms& terms, typename T::Word* __restrict out, i64 count) {
    const Reader<KIND> reader(code);
    const float largest = T::largest();
    const u8 *__restrict a = terms.codes[0], *__restrict b = terms.codes[COUNT > 1 ? 1 : 0];
    const u8 *__restrict c = terms.codes[COUNT > 2 ? 2 : 0], *__restrict d = terms.codes[COUNT > 3 ? 3 : 0];
    const Stored sa = terms.stored[0], sb = terms.stored[COUNT > 1 ? 1 : 0];
    const Stored sc = terms.stored[COUNT > 2 ? 2 : 0], sd = terms.stored[COUNT > 3 ? 3 : 0];
    const auto one = [&](Stored stored, u32 number) __attribute__((always_inline)) {
        const float exact = reader.value(stored, number);
        return SATURATE ? saturated(exact, largest) : exact;
    };
    for (i64 i = 0; i < count; ++i) {
        float sum = one(sa, a[i]);
        if (ADD) sum = T::widen(out[i]) + sum;
        if (COUNT > 1) sum += one(sb, b[i]);
        if (COUNT > 2) sum += one(sc, c[i]);
        if (COUNT > 3) sum += one(sd, d[i]);
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
    } else {  // rare: one by one, which is the same order
        for (int term = 0; term < COUNT; ++term) {
            const Terms one{{terms.codes[term]}, {terms.stored[term]}};
            if (term == 0 && !ADD) sum_terms<T, KIND, true, 1, false>(code, one, out, count);
            else sum_terms<T, KIND, true, 1, true>(code, one, out, count);
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

// Values of `count` codes of one block, saturated.
template <class T>
void decode_block(const Code& code, Stored stored, const u8* codes, typename T::Word* out, i64 count) {
    sum_terms<T, 1, false>(code, Terms{{codes}, {stored}}, out, count);
}

// Values [begin, end) of `COUNT` frames, `stride` bytes apart; begin is a multiple of 8, and at most
// kPiece elements follow.
template <class T, int COUNT, bool ADD>
void sum_piece(const Code& code, const u8* frame, i64 stride, i64 begin, i64 end, typename T::Word* out) {
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

// Rotates the elements from `begin` on back, and saturates them.  `numel` is the row's, whose last
// elements, fewer than a group, have not been rotated.
inline void rotate_back(const Code& code, i64 numel, i64 begin, i64 end, u32* values) {
    const i64 whole = smaller(end, numel / code.hadamard * code.hadamard);
    if (begin < whole) rotate(values, values, whole - begin, code.hadamard, true);
}

// As sum_piece, of one frame whose elements are rotated.
template <class T, bool ADD>
void rotated_piece(const Code& code, i64 numel, const u8* frame, i64 begin, i64 end, typename T::Word* __restrict out) {
    alignas(64) u32 values[kPiece];
    sum_piece<Fp32, 1, false>(code, frame, 0, begin, end, values);
    rotate_back(code, numel, begin, end, values);
    for (i64 i = 0; i < end - begin; ++i) {
        const float value = saturated(float_of(values[i]), T::largest());
        out[i] = T::narrow(ADD ? T::widen(out[i]) + value : value);
    }
}

// Values [begin, end) of a frame; begin is a multiple of kPiece.
template <class T>
void decode_row(const Code& code, i64 numel, const u8* frame, typename T::Word* out) {
    for (i64 at = 0; at < numel; at += kPiece) {
        const i64 stop = smaller(at + kPiece, numel);
        if (code.hadamard != 0) rotated_piece<T, false>(code, numel, frame, at, stop, out + at);
        else sum_piece<T, 1, false>(code, frame, 0, at, stop, out + at);
    }
}

// The sum over sources, in ascending order, of [begin, end); begin is a multiple of 8 and of a rotation.
__attribute__((noinline)) inline void sum_sources(const Job& job, const u8* first, i64 begin, i64 end, u32* out) {
    const Code& code = job.coding;
    const i64 stride = job.source_stride;
    for (i64 at = begin; at < end; at += kPiece) {
        const i64 stop = smaller(at + kPiece, end);
        const u8* frame = first;
        u32* to = out + (at - begin);
        if (code.hadamard != 0) {
            rotated_piece<Fp32, false>(code, job.numel, frame, at, stop, to);
            for (i64 source = 1; source < job.sources; ++source) {
                rotated_piece<Fp32, true>(code, job.numel, frame + source * stride, at, stop, to);
            }
            continue;
        }
        i64 left = job.sources;
        if (left >= 4) {
            sum_piece<Fp32, 4, false>(code, frame, stride, at, stop, to);
            left -= 4, frame += 4 * stride;
        } else if (left >= 2) {
            sum_piece<Fp32, 2, false>(code, frame, stride, at, stop, to);
            left -= 2, frame += 2 * stride;
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
