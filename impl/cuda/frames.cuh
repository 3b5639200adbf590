// Rows, octets and teams: how threads reach elements and frames.  No arithmetic of codecs: codec.cuh.
//
// An octet is eight consecutive elements of a row, starting at a multiple of eight: whatever the
// width of a code, it is whole bytes of the frame, so no two threads ever write one byte.  A team is a
// power of two of threads that share one block of the codec.
#pragma once

#include "codec.cuh"

namespace frames {

using namespace codec;

// Where rows lie: element or byte `i` of row (a, b, c) is at address + a*stride[0] + b*stride[1] +
// c*stride[2] + i*inner; all in bytes.  `vectors`: every row starts on 16 bytes and inner is dense.
struct Place {
    i64 address, stride[3], inner, vectors;
};

// `shift` is the logarithm of a block that is a power of two, else -1.
struct Coding {
    i64 bits, asymmetric, block, shift, blocks, codes_end, scales_at, frame_bytes;
};

// The one argument of every kernel, all 8 bytes wide; impl/cuda/launch.py has the same fields.
struct Arguments {
    i64 numel, middle;  // elements of a row; number of b's
    i64 team_shift, tile, parts, sources, source_stride, extents;
    Place values, frames, output;
    Coding coding, second;
};

// The grid is (thread blocks of a row, c's, a's * b's): no division where there is one b.
__device__ __forceinline__ u8* row_start(const Arguments& a, const Place& place) {
    const u32 middle = u32(a.middle), outer = middle == 1 ? blockIdx.z : blockIdx.z / middle;
    return reinterpret_cast<u8*>(place.address) + i64(outer) * place.stride[0] +
           i64(blockIdx.z - outer * middle) * place.stride[1] + i64(blockIdx.y) * place.stride[2];
}

template <int BITS>
__device__ __forceinline__ Scheme<BITS> scheme_of(const Coding& coding) {
    return {int(coding.bits), coding.asymmetric != 0};
}

// Elements of octet `octet` that exist: 8, fewer at the end of a row, at most 0 beyond it.
__device__ __forceinline__ int octet_count(i64 octet, i64 numel) {
    const i64 left = numel - octet * kOctet;
    return left < kOctet ? (left < 0 ? 0 : int(left)) : kOctet;
}

// ---- elements ----------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ float load_value(const u8* row, const Place& place, i64 index) {
    return T::widen(*reinterpret_cast<const typename T::Word*>(row + index * place.inner));
}

// Absent elements repeat the first, which keeps them out of every extreme.
template <class T>
__device__ __forceinline__ void load_octet(const u8* row, const Place& place, i64 octet, int count,
                                           float (&values)[kOctet]) {
    if (count == kOctet && place.vectors != 0) {
        if constexpr (sizeof(typename T::Word) == 4) {
            const uint4* from = reinterpret_cast<const uint4*>(row) + octet * 2;
            const uint4 x = from[0], y = from[1];
            const u32 words[kOctet] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < kOctet; ++i) values[i] = T::widen(words[i]);
        } else {
            const uint4 x = reinterpret_cast<const uint4*>(row)[octet];
            const u32 words[kOctet / 2] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < kOctet; ++i) values[i] = T::widen(u16(words[i / 2] >> (i % 2 * 16)));
        }
    } else {
#pragma unroll
        for (int i = 0; i < kOctet; ++i)
            values[i] = i < count ? load_value<T>(row, place, octet * kOctet + i) : values[0];
    }
}

template <class T>
__device__ __forceinline__ void store_octet(u8* row, const Place& place, i64 octet, int count,
                                            const float (&values)[kOctet]) {
    typename T::Word words[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) words[i] = T::narrow(values[i]);
    if (count == kOctet && place.vectors != 0) {
        if constexpr (sizeof(typename T::Word) == 4) {
            uint4* to = reinterpret_cast<uint4*>(row) + octet * 2;
            to[0] = make_uint4(words[0], words[1], words[2], words[3]);
            to[1] = make_uint4(words[4], words[5], words[6], words[7]);
        } else {
            reinterpret_cast<uint4*>(row)[octet] =
                make_uint4(words[0] | u32(words[1]) << 16, words[2] | u32(words[3]) << 16,
                           words[4] | u32(words[5]) << 16, words[6] | u32(words[7]) << 16);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kOctet; ++i)
            if (i < count)
                *reinterpret_cast<typename T::Word*>(row + (octet * kOctet + i) * place.inner) = words[i];
    }
}

// ---- codes -------------------------------------------------------------------------------------

__device__ __forceinline__ u64 load_codes(const u8* frame, const Place& place, int bits, i64 octet, int count) {
    const u8* from = frame + octet * bits;
    if (count == kOctet && place.vectors != 0) {
        if (bits == 8) {
            const uint2 pair = *reinterpret_cast<const uint2*>(from);
            return pair.x | u64(pair.y) << 32;
        }
        if (bits == 4) return *reinterpret_cast<const u32*>(from);
        if (bits == 2) return *reinterpret_cast<const u16*>(from);
    }
    u64 word = 0;
    const int bytes = (count * bits + 7) / 8;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < bytes) word |= u64(from[i]) << (8 * i);
    return word;
}

__device__ __forceinline__ void store_codes(u8* frame, const Place& place, int bits, i64 octet, int count, u64 word) {
    u8* to = frame + octet * bits;
    if (count == kOctet && place.vectors != 0) {
        if (bits == 8) {
            *reinterpret_cast<uint2*>(to) = make_uint2(u32(word), u32(word >> 32));
            return;
        }
        if (bits == 4) {
            *reinterpret_cast<u32*>(to) = u32(word);
            return;
        }
        if (bits == 2) {
            *reinterpret_cast<u16*>(to) = u16(word);
            return;
        }
    }
    const int bytes = (count * bits + 7) / 8;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < bytes) to[i] = u8(word >> (8 * i));
}

// ---- scales and padding ------------------------------------------------------------------------

__device__ __forceinline__ float load_float(const u8* from, bool vectors) {
    if (vectors) return *reinterpret_cast<const float*>(from);
    return float_of(from[0] | from[1] << 8 | from[2] << 16 | u32(from[3]) << 24);
}

__device__ __forceinline__ void store_float(u8* to, bool vectors, float value) {
    if (vectors) {
        *reinterpret_cast<float*>(to) = value;
    } else {
        for (int i = 0; i < 4; ++i) to[i] = u8(bits_of(value) >> (8 * i));
    }
}

__device__ __forceinline__ Stored load_scale(const u8* frame, const Place& place, const Coding& c, i64 block) {
    const u8* from = frame + c.scales_at + 4 * block;
    const bool vectors = place.vectors != 0;
    return {load_float(from, vectors), c.asymmetric != 0 ? load_float(from + 4 * c.blocks, vectors) : 0.0f};
}

__device__ __forceinline__ void store_scale(u8* frame, const Place& place, const Coding& c, i64 block, Stored s) {
    u8* to = frame + c.scales_at + 4 * block;
    store_float(to, place.vectors != 0, s.scale);
    if (c.asymmetric != 0) store_float(to + 4 * c.blocks, place.vectors != 0, s.low);
}

// Zero the at most 15 bytes after the codes and after the scales; any 32 threads of a row.
__device__ __forceinline__ void store_padding(u8* frame, const Coding& c, int thread) {
    const i64 scales_end = c.scales_at + 4 * c.blocks * (c.asymmetric != 0 ? 2 : 1);
    const i64 at = thread < 16 ? c.codes_end + thread : scales_end + thread - 16;
    const i64 end = thread < 16 ? c.scales_at : c.frame_bytes;
    if (thread < 32 && at < end) frame[at] = 0;
}

// The block of an element; a shift where it can be, for a division costs as much as an octet's codes.
__device__ __forceinline__ i64 block_of(const Coding& c, i64 element) {
    if (c.blocks == 1) return 0;
    if (c.shift >= 0) return element >> c.shift;
    if ((element | c.block) >> 32 == 0) return u32(element) / u32(c.block);
    return element / c.block;
}

// Decode octet `octet`; any block, also one that begins inside it.
template <int BITS>
__device__ __forceinline__ void decode_octet(const u8* frame, const Place& place, const Coding& c, i64 octet,
                                             int count, float largest, float (&values)[kOctet]) {
    const Scheme<BITS> scheme = scheme_of<BITS>(c);
    u32 codes[kOctet];
    unpack(scheme, load_codes(frame, place, scheme.bits(), octet, count), codes);
    i64 block = block_of(c, octet * kOctet);
    i64 left = (block + 1) * c.block - octet * kOctet;  // elements until the next block
    Stored stored = load_scale(frame, place, c, block);
    if (left >= count) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) values[i] = value_of(scheme, stored, codes[i]);
        if (!within(stored, largest)) {
#pragma unroll
            for (int i = 0; i < kOctet; ++i) values[i] = saturated(values[i], largest);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            if (left == 0 && i < count) {
                stored = load_scale(frame, place, c, ++block);
                left = c.block;
            }
            values[i] = saturated(value_of(scheme, stored, codes[i]), largest);
            --left;
        }
    }
}

// The sum over sources in ascending order, in fp32; each term saturates at `largest`.  AHEAD sources
// are under way at a time: 2 hides latency, but spilled beside an encoder on sm_100.
template <int BITS, int AHEAD>
__device__ __forceinline__ void sum_octet(const Arguments& a, const u8* frame, i64 octet, int count, float largest,
                                          float (&sums)[kOctet]) {
    decode_octet<BITS>(frame, a.frames, a.coding, octet, count, largest, sums);
#pragma unroll AHEAD
    for (i64 source = 1; source < a.sources; ++source) {
        float term[kOctet];
        frame += a.source_stride;
        decode_octet<BITS>(frame, a.frames, a.coding, octet, count, largest, term);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) sums[i] = sums[i] + term[i];
    }
}

// ---- the extent of a block, over a team --------------------------------------------------------

// All threads of the thread block call it, once in a kernel; blockDim is a multiple of the team and
// of 32.
__device__ __forceinline__ Extent team_extent(Extent mine, int team) {
    __shared__ u32 highs[32], lows[32];
    for (int offset = (team < 32 ? team : 32) / 2; offset > 0; offset /= 2)
        mine.include({__shfl_xor_sync(0xffffffffu, mine.high, offset), __shfl_xor_sync(0xffffffffu, mine.low, offset)});
    if (team > 32) {
        const int thread = int(threadIdx.x);
        if (thread % 32 == 0) {
            highs[thread / 32] = mine.high;
            lows[thread / 32] = mine.low;
        }
        __syncthreads();
        const int first = thread / team * (team / 32);
        for (int warp = first; warp < first + team / 32; ++warp) mine.include({highs[warp], lows[warp]});
    }
    return mine;
}

// Encode octets held in registers (any grid of whole rows): thread `lane` of a team has octets lane, lane + team, ... of its
// block.  `load(octet, count, values)` brings an octet of the row, absent elements as repetitions of the
// first.
template <int BITS, int OCTETS, class Load>
__device__ __forceinline__ void encode_team(const Arguments& a, const Coding& c, const Place& place, u8* frame,
                                            Load load) {
    const Scheme<BITS> scheme = scheme_of<BITS>(c);
    const int thread = int(threadIdx.x), shift = int(a.team_shift), team = 1 << shift, lane = thread & (team - 1);
    const i64 block = i64(blockIdx.x) * (blockDim.x >> shift) + (thread >> shift);
    const i64 octets = (c.block + kOctet - 1) / kOctet;  // of a block: a multiple of 8, or the whole row
    float values[OCTETS][kOctet];
    int counts[OCTETS];
    Extent extent{0, 0};
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
        const i64 inside = lane + j * team, octet = block * octets + inside;
        counts[j] = inside < octets && block < c.blocks ? octet_count(octet, a.numel) : 0;
        if (counts[j] > 0) {
            load(octet, counts[j], values[j]);
#pragma unroll
            for (int i = 0; i < kOctet; ++i) extent.include(extent_of(scheme, values[j][i]));
        }
    }
    const Stored stored = stored_of(scheme, team_extent(extent, team));
    const Divider divider = divider_of(scheme, stored);
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
        if (counts[j] > 0) {
            u32 codes[kOctet];
#pragma unroll
            for (int i = 0; i < kOctet; ++i)
                codes[i] = i < counts[j] ? code_of(scheme, divider, values[j][i]) : 0;  // spare bits are 0
            const u64 word = stored.broken() ? 0 : pack(scheme, codes);
            store_codes(frame, place, scheme.bits(), block * octets + lane + j * team, counts[j], word);
        }
    }
    if (lane == 0 && block < c.blocks) store_scale(frame, place, c, block, stored);
    if (blockIdx.x == 0) store_padding(frame, c, thread);
}

}  // namespace frames
