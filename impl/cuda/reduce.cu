// Kernels that decode the frames of several sources, sum them, and encode the sum with another codec: the middle of a
// two-hop reduction.
//
// Versions, among which impl/cuda/kernels.py chooses:
//   1. decode_sum, then encode: two or three launches with an fp32 buffer between them.  For any codecs.
//   2. decode_sum_encode_general: one launch; the sum stays in the registers of the team that encodes it.  For second
//      codecs whose block has up to 4,096 elements, and is a multiple of 8 or the whole row.  Up to 512 threads hold
//      such a block; with 1024 threads, or more octets for each thread, registers spilled.  Error feedback is possible
//      only if the second codec has no rotation: otherwise both the sum and its rotation would have to be held.
//   3. decode_sum_encode: the same for integers of 4 and 8 bits without rotation and error feedback.  A thread holds
//      two octets, so that the search for the block's extent, the computation of its scale, and what a thread block
//      computes at its start serve both.
// Sums are in fp32, in ascending order of the sources (DeepSpeed adds in fp16).
#include "teams.cuh"

using namespace frames;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kAhead = 1;  // with two, registers spill
#else
constexpr int kAhead = 2;
#endif

template <class First, class Second>
__global__ void __launch_bounds__(512, kHalf) decode_sum_encode_general(const Arguments a) {
    const Coding& c = a.second;
    const Second scheme = scheme_of<Second>(c);
    const Team team(a, c, 0);  // there is only one turn
    const u32 octet = team.octet(0);
    const int count = team.count(a, c, 0);
    const bool together = team.together(count);
    u8 *frame = row_start(a, a.output), *error = row_start(a, a.error);
    float values[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) values[i] = -0.0f;
    add_sources<First, kAhead, true>(a, row_start(a, a.frames), a.frames.vectors != 0, octet, count, a.sources, values);
    if (a.carried != 0) {
        float errors[kOctet];
        load_any(error, a.error, octet, count, together, team.apart, errors);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) values[i] = values[i] + errors[i];
    }
    if (c.rotation != 0) rotate_octet(c, octet, a.numel, false, values);
    fill_absent(count, values);  // spare codes may decode to offsets, which must not change the extremes
    Extent extent{0, 0};
    if (count > 0) include_octet(scheme, values, extent);
    const Stored stored = stored_of(scheme, team_extent(extent, team.size, true));
    float decoded[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) decoded[i] = values[i];
    u32 codes[kOctet];
    encode_octet(a, c, scheme, stored, divider_of(scheme, stored), any_words(a, octet), count, a.carried != 0,
                 decoded, codes);
    if (count > 0) store_codes(frame, a.output.vectors != 0, scheme.bits(), octet, count, word_of(scheme, stored, count, codes));
    if (a.carried != 0) store_carried(a, c, error, octet, count, together, team.apart, values, decoded);
    if (team.lane == 0 && team.block < c.blocks) store_scale(scheme, frame, a.output.vectors != 0, c, team.block, stored);
    if (blockIdx.x == 0) store_padding(frame, c, int(threadIdx.x));
}

// Brings sums of elements; on the main path it loads the codes of AHEAD sources before it uses them.
template <int BITS, int AHEAD>
struct Sums {
    const Arguments& a;
    const u8* from;
    template <bool WHOLE>
    __device__ __forceinline__ Held<Fp32> bring(const Team&, u32 octet, int count) const {
        float sums[kOctet];
        sum_octet<BITS, AHEAD, WHOLE>(a, from, octet, count, sums);
        fill_absent(count, sums);
        Held<Fp32> held;
#pragma unroll
        for (int i = 0; i < kOctet; ++i) held.words[i] = bits_of(sums[i]);
        return held;
    }
};

template <int FIRST, int AHEAD, int SECOND, bool STOCHASTIC>
__global__ void __launch_bounds__(256, 2 * kHalf) decode_sum_encode(const Arguments a) {
    const Sums<FIRST, AHEAD> sums{a, row_start(a, a.frames)};
    encode_team<Fp32, SECOND, 2, STOCHASTIC>(a, a.second, a.output, sums);
}
