// Frames to elements, and to sums of elements over sources.
//
// An octet a thread, 16-byte stores, scales through the cache: a scale is shared by a whole block, so its
// loads hit the first-level cache.  decode_sum adds in registers, sources in ascending order, in fp32.
// Versions (impl/cuda/kernels.py chooses):
//   1. decode_general, decode_sum_general: any codec, types and rotation as the launch says.
//   2. decode, decode_sum: integers of 4 and 8 bits without rotation, compiled for their types.  Codes are
//      few bytes a thread: decode has two octets, decode_sum four or eight sources under way.
#include "frames.cuh"

using namespace frames;

template <class Scheme>
__global__ void __launch_bounds__(256) decode_general(const Arguments a) {
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
        const Fetched fetched = fetch_octet(scheme, frame, a.frames, c, octet, count, in);
        expand_octet(scheme, frame, a.frames, c, count, c.rotation != 0 ? Fp32::largest() : largest, in, fetched,
                     values);
    }
    if (c.rotation != 0) rotate_back(c, octet, a.numel, largest, values);
    store_any(row_start(a, a.values), a.values, octet, count, together, values);
}

template <class Scheme>
__global__ void __launch_bounds__(256) decode_sum_general(const Arguments a) {
    const u32 octet = blockIdx.x * 256 + slot();
    const int count = octet_count(octet, a.numel);
    float sums[kOctet];
    sum_octet<Scheme, 2, true>(a, row_start(a, a.frames), octet, count, sums);
    store_octet<Fp32>(row_start(a, a.values), a.values, octet, count, octet_count(octet | 31, a.numel) == kOctet, sums);
}

template <class T, class Scheme>
__global__ void __launch_bounds__(256) decode(const Arguments a) {
    constexpr u32 kOctets = 2;
    const Scheme scheme = scheme_of<Scheme>(a.coding);
    const u8* frame = row_start(a, a.frames);
    u8* row = row_start(a, a.values);
    u32 first = blockIdx.x * (256 * kOctets) + slot();
    for (u32 turn = 0; turn < a.loops; ++turn, first += gridDim.x * (256 * kOctets)) {
        Within in[kOctets] = {};
        Fetched fetched[kOctets] = {};
#pragma unroll
        for (u32 j = 0; j < kOctets; ++j) {
            const u32 octet = first + 256 * j;
            const int count = octet_count(octet, a.numel);
            if (count > 0) {
                in[j] = within_blocks(a.coding, octet);
                fetched[j] = fetch_octet(scheme, frame, a.frames, a.coding, octet, count, in[j]);
            }
        }
#pragma unroll
        for (u32 j = 0; j < kOctets; ++j) {
            const u32 octet = first + 256 * j;
            const int count = octet_count(octet, a.numel);
            if (count > 0) {
                float values[kOctet];
                expand_octet(scheme, frame, a.frames, a.coding, count, T::largest(), in[j], fetched[j], values);
                store_octet<T>(row, a.values, octet, count, octet_count(octet | 31, a.numel) == kOctet, values);
            }
        }
    }
}

template <class Scheme, int AHEAD>
__global__ void __launch_bounds__(256, 1) decode_sum(const Arguments a) {
    const u8* frame = row_start(a, a.frames);
    u8* row = row_start(a, a.values);
    u32 octet = blockIdx.x * 256 + slot();
    for (u32 turn = 0; turn < a.loops; ++turn, octet += gridDim.x * 256) {
        const int count = octet_count(octet, a.numel);
        if (count == 0) return;
        float sums[kOctet];
        sum_octet<Scheme, AHEAD, false>(a, frame, octet, count, sums);
        store_octet<Fp32>(row, a.values, octet, count, octet_count(octet | 31, a.numel) == kOctet, sums);
    }
}
