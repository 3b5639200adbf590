// Kernels that decode frames to elements, or to sums of elements over sources.
//
// Each thread decodes an octet and stores 16 bytes at once.  A whole block shares a scale, so loads of scales hit the
// first-level cache.  decode_sum adds in registers, in fp32, in ascending order of the sources.
// Versions, among which impl/cuda/kernels.py chooses:
//   1. decode_general, decode_sum_general: any codec; the launch gives types and rotation.
//   2. decode, decode_sum: integers of 4 and 8 bits without rotation, compiled for their types.  Codes are only a few
//      bytes for a thread, so decode loads two octets and decode_sum up to four sources before it uses them.
#include "teams.cuh"

using namespace frames;

template <class Scheme>
__global__ void __launch_bounds__(256, 4) decode_general(const Arguments a) {
    const Coding& c = a.coding;
    const Scheme scheme = scheme_of<Scheme>(c);
    const u32 octet = blockIdx.x * 256 + slot();
    const int count = octet_count(octet, a.numel);
    const bool together = octet_count(octet | 31, a.numel) == kOctet;
    const u8* frame = row_start(a, a.frames);
    const float largest = largest_of(a.values);
    float values[kOctet] = {};
    if (count > 0) {
        const Within in = within_blocks(c, octet);
        const Fetched fetched = fetch_octet(scheme, frame, a.frames.vectors != 0, c, octet, count, in);
        expand_octet(scheme, frame, a.frames.vectors != 0, c, count, c.rotation != 0 ? Fp32::largest() : largest, in, fetched,
                     values);
    }
    if (c.rotation != 0) rotate_back(c, octet, a.numel, largest, values);
    store_any(row_start(a, a.values), a.values, octet, count, together, 16, values);
}

template <class Scheme>
__global__ void __launch_bounds__(256) decode_sum_general(const Arguments a) {
    const u32 octet = blockIdx.x * 256 + slot();
    const int count = octet_count(octet, a.numel);
    float sums[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) sums[i] = -0.0f;
    add_sources<Scheme, 2, true>(a, row_start(a, a.frames), a.frames.vectors != 0, octet, count, a.sources, sums);
    const bool together = octet_count(octet | 31, a.numel) == kOctet;
    store_octet<Fp32>(row_start(a, a.values), a.values, a.values.vectors != 0, octet, count, together, sums);
}

// Decodes the octets of one turn of the loop.  WHOLE: this is the main path.
template <class T, bool WHOLE, int BITS, int OCTETS>
__device__ __forceinline__ void decode_octets(Scheme<BITS> scheme, const Arguments& a, const u8* frame, u8* row,
                                              u32 first) {
    const bool vectors = WHOLE || a.frames.vectors != 0;
    Within in[OCTETS] = {};
    Fetched fetched[OCTETS] = {};
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
        const u32 octet = first + 256 * u32(j);
        const int count = WHOLE ? kOctet : octet_count(octet, a.numel);
        if (WHOLE || count > 0) {
            in[j] = WHOLE ? Within{block_of(a.coding, octet * kOctet), kOctet} : within_blocks(a.coding, octet);
            fetched[j] = fetch_octet(scheme, frame, vectors, a.coding, octet, count, in[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
        const u32 octet = first + 256 * u32(j);
        const int count = WHOLE ? kOctet : octet_count(octet, a.numel);
        if (WHOLE || count > 0) {
            float values[kOctet];
            if (WHOLE && !rare(!within(scheme, fetched[j].stored, T::largest()))) {
                expand_whole(scheme, fetched[j], values);
            } else {
                expand_octet(scheme, frame, vectors, a.coding, count, T::largest(), in[j], fetched[j], values);
            }
            const bool together = WHOLE || octet_count(octet | 31, a.numel) == kOctet;
            store_octet<T>(row, a.values, WHOLE || a.values.vectors != 0, octet, count, together, values);
        }
    }
}

template <class T, int BITS>
__global__ void __launch_bounds__(256) decode(const Arguments a) {
    constexpr int kOctets = 2;
    constexpr u32 kTile = 256 * kOctets;
    const Scheme<BITS> scheme = scheme_of<Scheme<BITS>>(a.coding);
    const u8* frame = row_start(a, a.frames);
    u8* row = row_start(a, a.values);
    u32 first = blockIdx.x * kTile;
#pragma unroll 1
    for (u32 turn = 0; turn < a.loops; ++turn, first += gridDim.x * kTile) {
        if (!whole(a, first + kTile)) {
            decode_octets<T, false, BITS, kOctets>(scheme, a, frame, row, first + slot());
        } else if (rare(scheme.asymmetric)) {
            decode_octets<T, true, BITS, kOctets>({scheme.stated, true}, a, frame, row, first + slot());
        } else {
            decode_octets<T, true, BITS, kOctets>({scheme.stated, false}, a, frame, row, first + slot());
        }
    }
}

template <int BITS, int AHEAD>
__global__ void __launch_bounds__(256, 2 * kHalf) decode_sum(const Arguments a) {
    const u8* frame = row_start(a, a.frames);
    u8* row = row_start(a, a.values);
    u32 first = blockIdx.x * 256;
    float sums[kOctet];
    for (u32 turn = 0; turn < a.loops; ++turn, first += gridDim.x * 256) {
        const u32 octet = first + slot();
        if (whole(a, first + 256)) {
            sum_octet<BITS, AHEAD, true>(a, frame, octet, kOctet, sums);
            store_octet<Fp32>(row, a.values, true, octet, kOctet, true, sums);
        } else if (octet_count(octet, a.numel) > 0) {
            const int count = octet_count(octet, a.numel);
            sum_octet<BITS, AHEAD, false>(a, frame, octet, count, sums);
            const bool together = octet_count(octet | 31, a.numel) == kOctet;
            store_octet<Fp32>(row, a.values, a.values.vectors != 0, octet, count, together, sums);
        }
    }
}
