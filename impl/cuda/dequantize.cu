// Frames to elements, and to sums of elements over sources.
//
// One version: an octet a thread, 16-byte stores, scales through the cache.  A scale is shared by a
// whole block, so its loads hit the first-level cache.  decode_sum adds in registers, sources in
// ascending order, in fp32; decode is the sum of one source, saturating at the output's type.
#include "frames.cuh"

using namespace frames;

template <class T, int BITS>
__global__ void __launch_bounds__(256) decode(const Arguments a) {
    const i64 octet = i64(blockIdx.x) * 256 + threadIdx.x;
    const int count = octet_count(octet, a.numel);
    if (count == 0) return;
    float values[kOctet];
    decode_octet<BITS>(row_start(a, a.frames), a.frames, a.coding, octet, count, T::largest(), values);
    store_octet<T>(row_start(a, a.values), a.values, octet, count, values);
}

template <int BITS>
__global__ void __launch_bounds__(256) decode_sum(const Arguments a) {
    const i64 octet = i64(blockIdx.x) * 256 + threadIdx.x;
    const int count = octet_count(octet, a.numel);
    if (count == 0) return;
    float sums[kOctet];
    sum_octet<BITS, 2>(a, row_start(a, a.frames), octet, count, Fp32::largest(), sums);
    store_octet<Fp32>(row_start(a, a.values), a.values, octet, count, sums);
}
