// Defines `Job`, the argument of most functions of the library: where the rows of tensors are in memory, and how rows
// are encoded.
//
// The structures in kernels.py have the same fields as `Job` and its parts.
#pragma once

#include "../cuda/codec.cuh"

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define WIDE 1  // loops that compilers do not vectorise are written with intrinsics, for vectors of 16 fp32
#else
#define WIDE 0
#endif

namespace {

using namespace codec;

constexpr i64 kPiece = 2048;  // elements that are worked on at once; a multiple of octets and of rotations
constexpr int kDims = 8;

// kClipped is no value of `Code::kind`: it selects loops for symmetric codes with `clipped` set.
enum Kind : i64 { kSymmetric, kAsymmetric, kFloats, kClipped };

struct Plane {  // the rows of one tensor
    i64 address, strides[kDims];  // both count bytes; for random bits, elements
};

struct Code {
    i64 kind, bits, mantissa, powers, hadamard, stochastic;
    i64 clipped;  // whether symmetric codes use all 2^bits codes, and the largest positive values are cut off
    i64 block, blocks, codes_end, scales_at, frame_bytes;

    Scheme<0> integers(bool asymmetric) const { return {int(bits), asymmetric, clipped != 0}; }
    Floats<0> floats() const { return {int(mantissa), powers != 0}; }
    i64 scale_bytes() const { return blocks * (powers ? 1 : kind == kAsymmetric ? 8 : 4); }
};

struct Job {
    i64 numel, type;  // elements of a row; type of elements: 0 fp32, 1 bf16, 2 fp16
    i64 dims, sizes[kDims];
    i64 sources, source_stride;
    i64 halves;  // whether terms and partial sums of a sum are rounded to fp16
    Plane values, frames, output, random, errors;
    Code coding, second;
    i64 error_type;  // type of the carried errors, as in `type`; -1 if no errors are carried
    Words key;       // of the random bits
    Decay decay;
};

inline i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// Calls body(addresses) for each row.  A plane holds the rows of one tensor, and `addresses` has the address of the row
// in each of `planes`.  The address and strides of a plane that is not used are 0.
template <int PLANES, class Body>
void each_row(const Job& job, const Plane* const (&planes)[PLANES], Body body) {
    i64 at[kDims] = {}, address[PLANES];
    for (int i = 0; i < PLANES; ++i) address[i] = planes[i]->address;
    while (true) {
        body(address);
        i64 dim = job.dims - 1;
        for (; dim >= 0; --dim) {
            const bool more = ++at[dim] < job.sizes[dim];
            for (int i = 0; i < PLANES; ++i) address[i] += planes[i]->strides[dim] * (more ? 1 : 1 - at[dim]);
            if (more) break;
            at[dim] = 0;
        }
        if (dim < 0) return;
    }
}

// ---- scales as the frame stores them -----------------------------------------------------------

inline Stored load(const Code& code, const u8* frame, i64 block) {
    Stored stored{0.0f, 0.0f};
    const u8* scales = frame + code.scales_at;
    if (code.powers) return {power_of(scales[block]), 0.0f};
    std::memcpy(&stored.scale, scales + 4 * block, 4);
    if (code.kind == kAsymmetric) std::memcpy(&stored.low, scales + 4 * (code.blocks + block), 4);
    return stored;
}

inline void store(const Code& code, u8* frame, i64 block, Stored stored) {
    u8* scales = frame + code.scales_at;
    if (code.powers) {
        scales[block] = exponent_of(stored.scale);
        return;
    }
    std::memcpy(scales + 4 * block, &stored.scale, 4);
    if (code.kind == kAsymmetric) std::memcpy(scales + 4 * (code.blocks + block), &stored.low, 4);
}

inline void clear_padding(const Code& code, u8* frame) {
    const i64 end = code.scales_at + code.scale_bytes();
    std::memset(frame + code.codes_end, 0, std::size_t(code.scales_at - code.codes_end));
    std::memset(frame + end, 0, std::size_t(code.frame_bytes - end));
}

}  // namespace
