// Elements to frames: integer codecs of 2 to 8 bits, any block, any length, strided rows.
//
// Versions, each for what the one before it cannot do as well (impl/cuda/kernels.py chooses):
//   1. encode_extents + encode_given: two launches.  Extremes of a block are merged with an integer
//      atomic maximum, whose result does not depend on the order, then every octet is encoded.  Any
//      block; reads each element twice.
//   2. encode_staged: one launch, one read.  A tile of whole blocks that is also whole octets waits in
//      shared memory.  For blocks that are not multiples of 8.
//   3. encode_held: one launch, one read.  A block waits in the registers of a team of threads; 16-byte
//      loads, one shuffle tree.  For multiples of 8 (and whole rows) up to 16,384 elements: 1024 threads of one
//      octet, or 512 of four; four on 1024 threads spilled.
// Rows are strided, so that the transpose of a two-hop reduction costs no pass of its own.
#include "frames.cuh"

using namespace frames;

constexpr int kStaged = 8192;        // elements of a tile, 32 kB
constexpr int kStagedBlocks = 1024;  // blocks of a tile, 8 kB

// (blocks, 2) merged extremes of this row, zero before the first launch.
__device__ __forceinline__ u32* row_extents(const Arguments& a) {
    return reinterpret_cast<u32*>(a.extents) + 2 * a.coding.blocks * (i64(blockIdx.z) * gridDim.y + blockIdx.y);
}

// Version 1, first launch: blocks * a.parts thread blocks of 256 a row, a.tile elements each.
template <class T>
__global__ void __launch_bounds__(256) encode_extents(const Arguments a) {
    const Coding& c = a.coding;
    const Scheme<0> scheme = scheme_of<0>(c);
    const u32 block = blockIdx.x / u32(a.parts), part = blockIdx.x % u32(a.parts);
    const u8* values = row_start(a, a.values);
    const i64 start = i64(block) * c.block, stop = start + c.block < a.numel ? start + c.block : a.numel;
    const i64 from = start + part * a.tile, to = from + a.tile < stop ? from + a.tile : stop;
    Extent extent{0, 0};
    if (a.values.vectors != 0 && c.block % kOctet == 0) {
        for (i64 octet = from / kOctet + threadIdx.x; octet * kOctet < to; octet += 256) {
            float held[kOctet];
            load_octet<T>(values, a.values, octet, octet_count(octet, to), held);
#pragma unroll
            for (int i = 0; i < kOctet; ++i) extent.include(extent_of(scheme, held[i]));
        }
    } else {
        for (i64 index = from + threadIdx.x; index < to; index += 256)
            extent.include(extent_of(scheme, load_value<T>(values, a.values, index)));
    }
    extent = team_extent(extent, 256);
    if (threadIdx.x == 0) {
        u32* merged = row_extents(a) + 2 * block;
        atomicMax(merged, extent.high);
        atomicMax(merged + 1, extent.low);
    }
}

// Version 1, second launch: thread blocks of 256, an octet a thread.
template <class T>
__global__ void __launch_bounds__(256) encode_given(const Arguments a) {
    const Coding& c = a.coding;
    const Scheme<0> scheme = scheme_of<0>(c);
    const i64 octet = i64(blockIdx.x) * 256 + threadIdx.x;
    const int count = octet_count(octet, a.numel);
    u8* frame = row_start(a, a.frames);
    if (blockIdx.x == 0) store_padding(frame, c, int(threadIdx.x));
    if (count == 0) return;
    float values[kOctet];
    load_octet<T>(row_start(a, a.values), a.values, octet, count, values);
    const u32* extents = row_extents(a);
    i64 block = block_of(c, octet * kOctet), left = (block + 1) * c.block - octet * kOctet;
    Stored stored = stored_of(scheme, {extents[2 * block], extents[2 * block + 1]});
    Divider divider = divider_of(scheme, stored);
    if (octet * kOctet == block * c.block) store_scale(frame, a.frames, c, block, stored);
    u32 codes[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
        if (left == 0 && i < count) {
            left = c.block;
            ++block;
            stored = stored_of(scheme, {extents[2 * block], extents[2 * block + 1]});
            divider = divider_of(scheme, stored);
            store_scale(frame, a.frames, c, block, stored);
        }
        codes[i] = i < count && !stored.broken() ? code_of(scheme, divider, values[i]) : 0;
        --left;
    }
    store_codes(frame, a.frames, scheme.bits(), octet, count, pack(scheme, codes));
}

// Version 2: thread blocks of 256 with a tile each; a.tile is a multiple of the block and of 8.
template <class T>
__global__ void __launch_bounds__(256) encode_staged(const Arguments a) {
    __shared__ float staged[kStaged];
    __shared__ float scales[kStagedBlocks], offsets[kStagedBlocks];
    const Coding& c = a.coding;
    const Scheme<0> scheme = scheme_of<0>(c);
    const int thread = int(threadIdx.x), block = int(c.block);
    const i64 start = blockIdx.x * a.tile;
    const int count = int(start + a.tile < a.numel ? a.tile : a.numel - start), blocks = (count + block - 1) / block;
    const int octets = (count + kOctet - 1) / kOctet;
    const u8* values = row_start(a, a.values);
    u8* frame = row_start(a, a.frames);

    for (int octet = thread; octet < octets; octet += 256) {
        float held[kOctet];
        load_octet<T>(values, a.values, start / kOctet + octet, octet_count(octet, count), held);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) staged[octet * kOctet + i] = held[i];
    }
    __syncthreads();

    // A warp for each block of 32 and more, else a thread.
    const int team = block >= 32 ? 32 : 1, lane = thread % team;
    for (int b = thread / team; b < blocks; b += 256 / team) {
        const int stop = (b + 1) * block < count ? (b + 1) * block : count;
        Extent extent{0, 0};
        for (int i = b * block + lane; i < stop; i += team) extent.include(extent_of(scheme, staged[i]));
        for (int offset = team / 2; offset > 0; offset /= 2)
            extent.include({__shfl_xor_sync(0xffffffffu, extent.high, offset),
                            __shfl_xor_sync(0xffffffffu, extent.low, offset)});
        if (lane == 0) {
            const Stored stored = stored_of(scheme, extent);
            scales[b] = stored.scale;
            offsets[b] = stored.low;
            store_scale(frame, a.frames, c, start / block + b, stored);
        }
    }
    __syncthreads();

    for (int octet = thread; octet < octets; octet += 256) {
        int b = octet * kOctet / block, left = (b + 1) * block - octet * kOctet;
        Stored stored{scales[b], offsets[b]};
        Divider divider = divider_of(scheme, stored);
        const int present = octet_count(octet, count);
        u32 codes[kOctet];
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            if (left == 0 && i < present) {
                left = block;
                ++b;
                stored = {scales[b], offsets[b]};
                divider = divider_of(scheme, stored);
            }
            codes[i] = i < present && !stored.broken() ? code_of(scheme, divider, staged[octet * kOctet + i]) : 0;
            --left;
        }
        store_codes(frame, a.frames, scheme.bits(), start / kOctet + octet, present, pack(scheme, codes));
    }
    if (blockIdx.x == 0) store_padding(frame, c, thread);
}

// Version 3: each team of 2^a.team_shift threads has one block.
template <class T, int BITS, int OCTETS>
__global__ void __launch_bounds__(OCTETS == 1 ? 1024 : 512, 1) encode_held(const Arguments a) {
    const u8* from = row_start(a, a.values);
    encode_team<BITS, OCTETS>(a, a.coding, a.frames, row_start(a, a.frames),
                              [&](i64 octet, int count, float(&values)[kOctet]) {
                                  load_octet<T>(from, a.values, octet, count, values);
                              });
}
