// Kernels for messages whose elements are not quantised, in fp32, bf16 or fp16, and for sums of bits.
//
//   copy_raw: copies elements to frames without changing their type.  Rows may be strided, so that the transpose of a
//   two-hop reduction needs no pass of its own.
//   sum_raw: adds the elements of all sources in registers, in fp32, in ascending order of the sources.  It stores the
//   sums in the type of the next hop's message or, after the last hop, divided by the number of ranks in fp32.  Additions
//   by torch would read and write all sums once for every source.  Infinities, and values beyond the largest of the
//   stored type, are treated as torch's casts treat them.
//   sum_bits: computes checksums of a row of fp32.  If an element is written, later checksums of the row are different.
#include "teams.cuh"

using namespace frames;

template <class T>
__global__ void __launch_bounds__(256, 4 * kHalf) copy_raw(const Arguments a) {
    const u8* from = row_start(a, a.values);
    u8* to = row_start(a, a.frames);
    if (blockIdx.x == 0) store_padding(to, a.coding, int(threadIdx.x));
    u32 first = blockIdx.x * 256;
    for (u32 turn = 0; turn < a.loops; ++turn, first += gridDim.x * 256) {
        const u32 octet = first + slot();
        if (whole(a, first + 256)) {
            store_held(to, a.frames, true, octet, kOctet, true, load_octet<T>(from, a.values, true, octet, kOctet, true, 16));
        } else if (const int count = octet_count(octet, a.numel); count > 0) {
            const bool together = octet_count(octet | 31, a.numel) == kOctet;
            const Held<T> held = load_octet<T>(from, a.values, a.values.vectors != 0, octet, count, together, 16);
            store_held(to, a.frames, a.frames.vectors != 0, octet, count, together, held);
        }
    }
}

// Adds one octet of each of `sources` sources to `sums`.  `row` is the row of the first source.  The elements of AHEAD
// sources are loaded before they are used.  The sources that are left are loaded in steps of AHEAD / 2, and so on.
template <class T, int AHEAD>
__device__ __forceinline__ void add_elements(const Arguments& a, const u8* row, bool vectors, u32 octet, int count,
                                             bool together, u32 sources, float (&sums)[kOctet]) {
    const u32 rest = sources % AHEAD;
#pragma unroll 1
    for (u32 source = rest; source < sources; source += AHEAD) {
        Held<T> held[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            held[k] = load_octet<T>(row, a.frames, vectors, octet, count, together, 16);
            row += a.source_stride;
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            float term[kOctet];
            widen_octet(held[k], term);
#pragma unroll
            for (int i = 0; i < kOctet; ++i) sums[i] = sums[i] + term[i];
        }
    }
    if constexpr (AHEAD > 1) {
        if (rest != 0) add_elements<T, AHEAD / 2>(a, row, vectors, octet, count, together, rest, sums);
    }
}

// Divides sums as torch divides them on a CPU.  A power of two is multiplied by its reciprocal, which is exact.
__device__ __forceinline__ void divide(u32 divisor, float (&sums)[kOctet]) {
    if (divisor == 1) return;
    if ((divisor & (divisor - 1)) == 0) {
        const float part = 1.0f / float(divisor);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) sums[i] = sums[i] * part;
    } else {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) sums[i] = sums[i] / float(divisor);
    }
}

template <class From, class To, int AHEAD>
__global__ void __launch_bounds__(256, 2 * kHalf) sum_raw(const Arguments a) {
    const u8* row = row_start(a, a.frames);
    u8* to = row_start(a, a.output);
    if (blockIdx.x == 0) store_padding(to, a.second, int(threadIdx.x));
    u32 first = blockIdx.x * 256;
    for (u32 turn = 0; turn < a.loops; ++turn, first += gridDim.x * 256) {
        const u32 octet = first + slot();
        float sums[kOctet];
#pragma unroll
        for (int i = 0; i < kOctet; ++i) sums[i] = -0.0f;  // adding it to the first term changes no sign of a zero
        if (whole(a, first + 256)) {
            add_elements<From, AHEAD>(a, row, true, octet, kOctet, true, a.sources, sums);
            divide(a.divisor, sums);
            store_octet<To>(to, a.output, true, octet, kOctet, true, sums);
        } else if (const int count = octet_count(octet, a.numel); count > 0) {
            const bool together = octet_count(octet | 31, a.numel) == kOctet;
            add_elements<From, 1>(a, row, a.frames.vectors != 0, octet, count, together, a.sources, sums);
            divide(a.divisor, sums);
            store_octet<To>(to, a.output, a.output.vectors != 0, octet, count, together, sums);
        }
    }
}

// Every thread writes one number, a polynomial of the bits of up to 64 elements in 64-bit arithmetic.  Its factor is odd,
// so the number changes if one of the elements changes; other changes cancel only by chance, about once in 2^64 cases.
__global__ void __launch_bounds__(256, 2 * kHalf) sum_bits(const Arguments a) {
    constexpr u32 kOctets = 8;
    constexpr u64 kFactor = 0x9e3779b97f4a7c15u;
    const u8* row = row_start(a, a.values);
    u64 sum = 0;
#pragma unroll 2
    for (u32 j = 0; j < kOctets; ++j) {
        const u32 first = (blockIdx.x * kOctets + j) * 256, octet = first + slot();
        const bool main = whole(a, first + 256);
        const int count = main ? kOctet : octet_count(octet, a.numel);
        const bool together = main || octet_count(octet | 31, a.numel) == kOctet;
        if (count > 0) {
            const Held<Fp32> held = load_octet<Fp32>(row, a.values, a.values.vectors != 0, octet, count, together, 16);
#pragma unroll
            for (int i = 0; i < kOctet; ++i)
                if (i < count) sum = sum * kFactor + held.words[i];
        }
    }
    reinterpret_cast<u64*>(a.output.address)[blockIdx.x * 256 + threadIdx.x] = sum;
}
