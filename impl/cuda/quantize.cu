// Kernels that encode elements to frames: for any codec with scales, any block and length, strided rows, rounding to
// nearest or stochastically, with or without rotation and error feedback.
//
// Versions, each for cases that the one before it handles less well (impl/cuda/kernels.py chooses):
//   1. encode_extents and encode_given: two launches.  The extremes of a block are merged by an integer atomic
//      maximum, whose result does not depend on the order; then every octet is encoded.  For any block; each
//      element is read twice.
//   2. encode_staged: one launch, one read.  Shared memory holds a tile of whole blocks that is also a multiple of
//      8 elements.  For blocks that are not multiples of 8.
//   3. encode_general: one launch, one read.  The registers of a team of threads hold a block, with 16-byte loads and
//      one tree of shuffles.  For blocks of up to 8,192 elements that are a multiple of 8, or the whole row.  Up to 512
//      threads hold such a block, with one or two octets each; with four octets registers spilled.
//   4. encode_held: the same for integers of 4 and 8 bits without rotation and error feedback, compiled for their
//      types.  Elements are held in their own type, 64 bytes a thread.
// With error feedback, elements are read a second time, from the cache.  Rows may be strided, so that the transpose of
// a two-hop reduction needs no pass of its own.
#include "teams.cuh"

using namespace frames;

constexpr int kStaged = 8192;        // most elements of a tile, 32 kB
constexpr int kStagedBlocks = 1024;  // most blocks of a tile, 8 kB

// The merged extremes (blocks, 2) of this row, which must be zero before the first launch.
__device__ __forceinline__ u32* row_extents(const Arguments& a) {
    return reinterpret_cast<u32*>(a.extents) + 2 * i64(a.coding.blocks) * (i64(blockIdx.z) * gridDim.y + blockIdx.y);
}

// Version 1, first launch: blocks * a.parts thread blocks of 256 threads for a row, with a.tile elements each.
template <class Scheme>
__global__ void __launch_bounds__(256) encode_extents(const Arguments a) {
    const Coding& c = a.coding;
    const Scheme scheme = scheme_of<Scheme>(c);
    const u32 block = blockIdx.x / a.parts, part = blockIdx.x % a.parts;
    const u8 *row = row_start(a, a.values), *error = row_start(a, a.error);
    const u32 start = block * c.block, stop = a.numel - start < c.block ? a.numel : start + c.block;
    const u32 from = start + part * a.tile, to = from + a.tile < stop ? from + a.tile : stop;
    Extent extent{0, 0};
    for (u32 base = from / kOctet; base * kOctet < to; base += 256) {
        const u32 octet = base + slot();
        const int count = octet * kOctet < to ? octet_count(octet, a.numel) : 0;
        float values[kOctet];
        load_carried(a, row, error, octet, count, Team::together(count), 16, values);
        if (c.rotation != 0) rotate_octet(c, octet, a.numel, false, values);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            const u32 index = octet * kOctet + u32(i);
            if (index >= from && index < to) extent.include(extent_of(scheme, values[i]));
        }
    }
    extent = team_extent(extent, 256, true);
    if (threadIdx.x == 0) {
        u32* merged = row_extents(a) + 2 * block;
        atomicMax(merged, extent.high);
        atomicMax(merged + 1, extent.low);
    }
}

// Version 1, second launch: thread blocks of 256 threads with an octet each.
template <class Scheme>
__global__ void __launch_bounds__(256, 4) encode_given(const Arguments a) {
    const Coding& c = a.coding;
    const Scheme scheme = scheme_of<Scheme>(c);
    const u32 octet = blockIdx.x * 256 + slot();
    const int count = octet_count(octet, a.numel);
    const bool together = octet_count(octet | 31, a.numel) == kOctet;
    const u8* row = row_start(a, a.values);
    u8 *frame = row_start(a, a.frames), *error = row_start(a, a.error);
    if (blockIdx.x == 0) store_padding(frame, c, int(threadIdx.x));
    float values[kOctet];
    load_carried(a, row, error, octet, count, together, 16, values);
    if (c.rotation != 0) rotate_octet(c, octet, a.numel, false, values);
    if (count > 0) {
        const u32* extents = row_extents(a);
        const auto scale = [&](u32 block, bool starts) {
            const Stored stored = stored_of(scheme, {extents[2 * block], extents[2 * block + 1]});
            if (starts) store_scale(scheme, frame, a.frames.vectors != 0, c, block, stored);
            return stored;
        };
        const u64 word = encode_across(a, c, scheme, any_words(a, octet), octet, count, scale, values);
        store_codes(frame, a.frames.vectors != 0, scheme.bits(), octet, count, word);
    }
    if (a.carried != 0) {
        float again[kOctet];
        load_carried(a, row, error, octet, count, together, 16, again);
        store_carried(a, c, error, octet, count, together, 16, again, values);
    }
}

// Version 2: thread blocks of 256 threads with a tile each; a.tile is a multiple of the block and of 8.  Rotations of
// such blocks have groups of 2 or 4 elements, which lie inside octets.
template <class Scheme>
__global__ void __launch_bounds__(256, 4) encode_staged(const Arguments a) {
    __shared__ float staged[kStaged];
    __shared__ float scales[kStagedBlocks], offsets[kStagedBlocks];
    const Coding& c = a.coding;
    const Scheme scheme = scheme_of<Scheme>(c);
    const int thread = int(threadIdx.x), block = int(c.block);
    const u32 start = blockIdx.x * a.tile;
    const int count = int(a.numel - start < a.tile ? a.numel - start : a.tile), blocks = (count + block - 1) / block;
    const int octets = (count + kOctet - 1) / kOctet;
    const u8* row = row_start(a, a.values);
    u8 *frame = row_start(a, a.frames), *error = row_start(a, a.error);

    for (int each = thread; each < octets; each += 256) {
        const u32 octet = start / kOctet + u32(each);
        float values[kOctet];
        load_carried(a, row, error, octet, octet_count(u32(each), u32(count)), false, 16, values);
        if (c.rotation != 0) rotate_octet(c, octet, a.numel, false, values);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) staged[each * kOctet + i] = values[i];
    }
    __syncthreads();

    // A warp finds the extremes of a block of 32 or more elements, a single thread those of a smaller block.
    const int team = block >= 32 ? 32 : 1, lane = thread % team;
    for (int b = thread / team; b < blocks; b += 256 / team) {
        const int stop = (b + 1) * block < count ? (b + 1) * block : count;
        Extent extent{0, 0};
        for (int i = b * block + lane; i < stop; i += team) extent.include(extent_of(scheme, staged[i]));
        for (int offset = team / 2; offset > 0; offset /= 2)
            extent.include(
                {__shfl_xor_sync(kWarp, extent.high, offset), __shfl_xor_sync(kWarp, extent.low, offset)});
        if (lane == 0) {
            const Stored stored = stored_of(scheme, extent);
            scales[b] = stored.scale;
            offsets[b] = stored.low;
            store_scale(scheme, frame, a.frames.vectors != 0, c, start / c.block + u32(b), stored);
        }
    }
    __syncthreads();

    for (int each = thread; each < octets; each += 256) {
        const u32 octet = start / kOctet + u32(each), first = start / c.block;
        const int present = octet_count(u32(each), u32(count));
        float values[kOctet];
#pragma unroll
        for (int i = 0; i < kOctet; ++i) values[i] = staged[each * kOctet + i];
        const auto scale = [&](u32 b, bool) { return Stored{scales[b - first], offsets[b - first]}; };
        const u64 word = encode_across(a, c, scheme, any_words(a, octet), octet, present, scale, values);
        store_codes(frame, a.frames.vectors != 0, scheme.bits(), octet, present, word);
        if (a.carried != 0) {
            float again[kOctet];
            load_carried(a, row, error, octet, present, false, 16, again);
            store_carried(a, c, error, octet, present, false, 16, again, values);
        }
    }
    if (blockIdx.x == 0) store_padding(frame, c, thread);
}

// Version 3: each team of 2^a.team_shift threads has one block.
template <class Scheme, int OCTETS>
__global__ void __launch_bounds__(512, OCTETS == 1 ? kHalf : 1) encode_general(const Arguments a) {
    const Coding& c = a.coding;
    const Scheme scheme = scheme_of<Scheme>(c);
    const u8* row = row_start(a, a.values);
    u8 *frame = row_start(a, a.frames), *error = row_start(a, a.error);
    if (blockIdx.x == 0) store_padding(frame, c, int(threadIdx.x));
    for (u32 turn = 0; turn < a.loops; ++turn) {
        const Team team(a, c, turn);
        float values[OCTETS][kOctet];
        Extent extent{0, 0};
#pragma unroll
        for (int j = 0; j < OCTETS; ++j) {
            const int count = team.count(a, c, j);
            load_carried(a, row, error, team.octet(j), count, Team::together(count), team.apart, values[j]);
            if (c.rotation != 0) {
                rotate_octet(c, team.octet(j), a.numel, false, values[j]);
                fill_absent(count, values[j]);
            }
            if (count > 0) include_octet(scheme, values[j], extent);
        }
        const Stored stored = stored_of(scheme, team_extent(extent, team.size, true, turn));
        const Divider divider = divider_of(scheme, stored);
#pragma unroll
        for (int j = 0; j < OCTETS; ++j) {
            const u32 octet = team.octet(j);
            const int count = team.count(a, c, j);
            u32 codes[kOctet];
            encode_octet(a, c, scheme, stored, divider, any_words(a, octet), count, a.carried != 0, values[j], codes);
            if (count > 0)
                store_codes(frame, a.frames.vectors != 0, scheme.bits(), octet, count, word_of(scheme, stored, count, codes));
            if (a.carried != 0) {
                const bool together = Team::together(count);
                float again[kOctet];
                load_carried(a, row, error, octet, count, together, team.apart, again);
                store_carried(a, c, error, octet, count, together, team.apart, again, values[j]);
            }
        }
        if (team.lane == 0 && team.block < c.blocks) store_scale(scheme, frame, a.frames.vectors != 0, c, team.block, stored);
    }
}

// Version 4.
template <class T>
struct Elements {
    const Place& place;
    const u8* row;
    template <bool WHOLE>
    __device__ __forceinline__ Held<T> bring(const Team& team, u32 octet, int count) const {
        const bool together = WHOLE || Team::together(count);
        return load_octet<T>(row, place, WHOLE || place.vectors != 0, octet, count, together, team.apart);
    }
};

template <class T, int BITS, bool STOCHASTIC>
__global__ void __launch_bounds__(512, kHalf) encode_held(const Arguments a) {
    const Elements<T> elements{a.values, row_start(a, a.values)};
    constexpr int kOctets = sizeof(typename T::Word) == 4 ? 2 : 4;
    encode_team<T, BITS, kOctets, STOCHASTIC>(a, a.coding, a.frames, elements);
}
