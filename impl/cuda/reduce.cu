// Frames of several sources to the frame of their sum, with another codec: the middle of a two-hop
// reduction.
//
// Versions (impl/cuda/kernels.py chooses):
//   1. decode_sum, then encode: two or three launches and an fp32 buffer between them.  Any codecs.
//   2. decode_sum_encode: one launch; the sum never leaves the registers of the team that encodes it.
//      For second codecs whose block is a multiple of 8 (or the whole row) up to 8,192 elements: four
//      octets a thread spilled 200 to 400 bytes.
// Sums are fp32, sources in ascending order (DeepSpeed adds halves).
#include "frames.cuh"

using namespace frames;

template <int FIRST, int SECOND>
__global__ void __launch_bounds__(1024) decode_sum_encode(const Arguments a) {
    const u8* from = row_start(a, a.frames);
    encode_team<SECOND, 1>(a, a.second, a.output, row_start(a, a.output),
                           [&](i64 octet, int count, float(&values)[kOctet]) {
                               sum_octet<FIRST, 1>(a, from, octet, count, Fp32::largest(), values);
#pragma unroll
                               for (int i = 1; i < kOctet; ++i)  // spare codes decode to offsets: out of extremes
                                   if (i >= count) values[i] = values[0];
                           });
}
