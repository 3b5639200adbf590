// Rows, octets and teams: how threads reach elements and frames.  No arithmetic of codecs: codec.cuh.
//
// An octet is eight consecutive elements of a row, starting at a multiple of eight: whatever the
// width of a code, it is whole bytes of the frame, so no two threads ever write one byte.  A team is a
// power of two of threads that share one block of the codec.
#pragma once

#include "codec.cuh"
#include "packing.cuh"

namespace frames {

using namespace codec;

// Where rows lie: element or byte `i` of row (a, b, c) is at address + a*stride[0] + b*stride[1] +
// c*stride[2] + i*inner; all in bytes.  `vectors`: every row starts on 16 bytes and inner is dense.
// `kind`: type of the elements, Fp32, Bf16, Fp16, for kernels that were not compiled for one.
struct Place {
    i64 address, stride[3], inner;
    u32 vectors, kind;
};

// `bits`: of mantissa, for floats.  `special`: an offset, or, for floats, scales that are powers of two.
// `shift` is the logarithm of a block that is a power of two, else -1.  `rotation`: elements, or 0.
struct Coding {
    i64 codes_end, scales_at, scales_end, frame_bytes;
    u32 bits, special, block, blocks, rotation;
    int shift;
};

// Random bits: octet `i` of row (a, b, c) is number start + a*stride[0] + b*stride[1] + c*stride[2] + i.
struct Noise {
    i64 start, stride[3];
    Words key;
    u32 on, unused;
};

// The one argument of every kernel; impl/cuda/launch.py has the same fields.  Elements of a row are fewer
// than 2^31, so that their numbers, and those of octets and blocks, are 32 bits.
struct Arguments {
    i64 source_stride, extents;
    u32 numel, middle;  // elements of a row; number of b's
    u32 loops, team_shift, tile, parts, sources, carried, exact, unused;
    Place values, frames, output, error;
    Coding coding, second;
    Noise noise;
    Decay decay;
};

// The grid is (thread blocks of a row, c's, a's * b's): no division where there is one b.
__device__ __forceinline__ i64 row_offset(const Arguments& a, const i64 (&stride)[3]) {
    if (gridDim.y == 1 && gridDim.z == 1) return 0;
    const u32 outer = a.middle == 1 ? blockIdx.z : blockIdx.z / a.middle;
    return i64(outer) * stride[0] + i64(blockIdx.z - outer * a.middle) * stride[1] + i64(blockIdx.y) * stride[2];
}

__device__ __forceinline__ u8* row_start(const Arguments& a, const Place& place) {
    return reinterpret_cast<u8*>(place.address) + row_offset(a, place.stride);
}

template <class Scheme>
__device__ __forceinline__ Scheme scheme_of(const Coding& coding) {
    return Scheme::of(coding.bits, coding.special);
}

// Elements of octet `octet` that exist: 8, fewer at the end of a row, 0 beyond it.
__device__ __forceinline__ int octet_count(u32 octet, u32 numel) {
    const u32 whole = numel / kOctet;
    return octet < whole ? kOctet : octet == whole ? int(numel % kOctet) : 0;
}

// ---- lanes -------------------------------------------------------------------------------------

// Which octet of its thread block a thread has.  Even lanes of a warp have its first sixteen, odd lanes
// the others: then two neighbours have two octets of fp32 whose halves they can swap, so that every load
// and store of a warp covers 512 bytes without gaps.
__device__ __forceinline__ u32 slot() {
    const u32 thread = threadIdx.x;
    return (thread & ~31u) | (thread & 31u) >> 1 | (thread & 1u) << 4;
}

constexpr u32 kWarp = 0xffffffffu;

// What to flip of a lane to find the one whose octet is `distance` away, a power of two below 32.
__device__ __forceinline__ u32 lanes_apart(int distance) { return distance == 16 ? 1u : u32(distance) << 1; }

__device__ __forceinline__ uint4 swapped(uint4 mine) {
    return make_uint4(__shfl_xor_sync(kWarp, mine.x, 1), __shfl_xor_sync(kWarp, mine.y, 1),
                      __shfl_xor_sync(kWarp, mine.z, 1), __shfl_xor_sync(kWarp, mine.w, 1));
}

__device__ __forceinline__ uint4 either(bool first, uint4 x, uint4 y) {
    return make_uint4(first ? x.x : y.x, first ? x.y : y.y, first ? x.z : y.z, first ? x.w : y.w);
}

// The first of a lane's two quads of fp32: a half of its octet if it is even, of its neighbour's if it is odd.
__device__ __forceinline__ u32 near_quad(u32 octet, u32 apart) {
    return threadIdx.x % 2 == 0 ? octet * 2 : (octet - apart) * 2 + 1;
}

// ---- elements ----------------------------------------------------------------------------------

// An octet of elements as they are stored, in 4 or 8 words.
template <class T>
struct Held {
    static constexpr int kWords = int(sizeof(typename T::Word)) * kOctet / 4;
    u32 words[kWords];
    __device__ __forceinline__ typename T::Word word(int i) const {
        if constexpr (kWords == kOctet) {
            return words[i];
        } else {
            return u16(words[i / 2] >> (i % 2 * 16));
        }
    }
    __device__ __forceinline__ void set(int i, typename T::Word word) {
        if constexpr (kWords == kOctet) {
            words[i] = word;
        } else {
            const u32 kept = words[i / 2] & (i % 2 == 0 ? 0xffff0000u : 0xffffu);
            words[i / 2] = kept | u32(word) << (i % 2 * 16);
        }
    }
    __device__ __forceinline__ uint4 quad(int i) const {
        return make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    }
    __device__ __forceinline__ void set_quad(int i, uint4 quad) {
        words[4 * i] = quad.x;
        words[4 * i + 1] = quad.y;
        words[4 * i + 2] = quad.z;
        words[4 * i + 3] = quad.w;
    }
};

// Ask for an octet: to be settled before it is used.  `vectors`: as place says, or better known.
// `together`: all lanes of the warp are here, and have
// whole octets, those of lanes 16 slots apart `apart` octets apart; then neighbours have their halves of fp32
// octets crossed.  Absent elements repeat the first, which keeps them out of every extreme.
template <class T>
__device__ __forceinline__ Held<T> fetch_elements(const u8* row, const Place& place, bool vectors, u32 octet,
                                                  int count, bool together, u32 apart) {
    Held<T> held;
    const uint4* from = reinterpret_cast<const uint4*>(row);
    if constexpr (Held<T>::kWords == kOctet) {
        if (together && vectors) {
            from += near_quad(octet, apart);
            held.set_quad(0, from[0]);
            held.set_quad(1, from[2 * apart]);
            return held;
        }
    }
    if (count == kOctet && vectors) {
        constexpr int kQuads = Held<T>::kWords / 4;
#pragma unroll
        for (int i = 0; i < kQuads; ++i) held.set_quad(i, from[octet * kQuads + i]);
    } else {
        using Word = typename T::Word;
        row += i64(octet * kOctet) * place.inner;
        const Word first = count > 0 ? *reinterpret_cast<const Word*>(row) : Word(0);
#pragma unroll
        for (int i = 0; i < Held<T>::kWords; ++i) held.words[i] = 0;
#pragma unroll
        for (int i = 0; i < kOctet; ++i)
            held.set(i, i < count ? *reinterpret_cast<const Word*>(row + i * place.inner) : first);
    }
    return held;
}

template <class T>
__device__ __forceinline__ void settle(bool crossed, Held<T>& held) {
    if constexpr (Held<T>::kWords == kOctet) {
        if (crossed) {
            const bool even = threadIdx.x % 2 == 0;
            const uint4 near = held.quad(0), far = held.quad(1), other = swapped(either(even, far, near));
            held.set_quad(0, either(even, near, other));
            held.set_quad(1, either(even, other, far));
        }
    }
}

template <class T>
__device__ __forceinline__ Held<T> load_octet(const u8* row, const Place& place, u32 octet, int count,
                                              bool together, u32 apart = 16) {
    const bool vectors = place.vectors != 0;
    Held<T> held = fetch_elements<T>(row, place, vectors, octet, count, together, apart);
    settle(together && vectors, held);
    return held;
}

template <class T>
__device__ __forceinline__ void store_octet(u8* row, const Place& place, bool vectors, u32 octet, int count,
                                            bool together, const float (&values)[kOctet], u32 apart = 16) {
    Held<T> held{};
#pragma unroll
    for (int i = 0; i < kOctet; ++i) held.set(i, T::narrow(values[i]));
    uint4* to = reinterpret_cast<uint4*>(row);
    if constexpr (Held<T>::kWords == kOctet) {
        if (together && vectors) {
            const bool even = threadIdx.x % 2 == 0;
            const uint4 other = swapped(either(even, held.quad(1), held.quad(0)));
            to += near_quad(octet, apart);
            to[0] = either(even, held.quad(0), other);
            to[2 * apart] = either(even, other, held.quad(1));
            return;
        }
    }
    if (count == kOctet && vectors) {
        constexpr int kQuads = Held<T>::kWords / 4;
#pragma unroll
        for (int i = 0; i < kQuads; ++i) to[octet * kQuads + i] = held.quad(i);
    } else {
        row += i64(octet * kOctet) * place.inner;
#pragma unroll
        for (int i = 0; i < kOctet; ++i)
            if (i < count) *reinterpret_cast<typename T::Word*>(row + i * place.inner) = held.word(i);
    }
}

template <class T>
__device__ __forceinline__ void widen_octet(const Held<T>& held, float (&values)[kOctet]) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) values[i] = T::widen(held.word(i));
}

// The same where the launch says the type.
__device__ __forceinline__ void load_any(const u8* row, const Place& place, u32 octet, int count, bool together,
                                         u32 apart, float (&values)[kOctet]) {
    switch (place.kind) {
        case 0: return widen_octet(load_octet<Fp32>(row, place, octet, count, together, apart), values);
        case 1: return widen_octet(load_octet<Bf16>(row, place, octet, count, together), values);
        default: return widen_octet(load_octet<Fp16>(row, place, octet, count, together), values);
    }
}

// Values that saturated before.
__device__ __forceinline__ void store_any(u8* row, const Place& place, u32 octet, int count, bool together,
                                          u32 apart, const float (&values)[kOctet]) {
    switch (place.kind) {
        case 0: return store_octet<Fp32>(row, place, place.vectors != 0, octet, count, together, values, apart);
        case 1: return store_octet<Bf16>(row, place, place.vectors != 0, octet, count, together, values);
        default: return store_octet<Fp16>(row, place, place.vectors != 0, octet, count, together, values);
    }
}

__device__ __forceinline__ float largest_of(const Place& place) {
    return place.kind == 0 ? Fp32::largest() : place.kind == 1 ? Bf16::largest() : Fp16::largest();
}

// ---- codes -------------------------------------------------------------------------------------

__device__ __forceinline__ u64 load_codes(const u8* frame, bool vectors, int bits, u32 octet, int count) {
    const u8* from = frame + octet * u32(bits);
    if (count == kOctet && vectors) {
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

__device__ __forceinline__ void store_codes(u8* frame, bool vectors, int bits, u32 octet, int count, u64 word) {
    u8* to = frame + octet * u32(bits);
    if (count == kOctet && vectors) {
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

template <int BITS>
__device__ __forceinline__ Stored load_scale(Scheme<BITS> scheme, const u8* frame, bool vectors,
                                             const Coding& c, u32 block) {
    const u8* from = frame + c.scales_at + 4 * i64(block);
    return {load_float(from, vectors), scheme.asymmetric ? load_float(from + 4 * i64(c.blocks), vectors) : 0.0f};
}

template <int MANTISSA>
__device__ __forceinline__ Stored load_scale(Floats<MANTISSA> scheme, const u8* frame, bool vectors,
                                             const Coding& c, u32 block) {
    const u8* scales = frame + c.scales_at;
    return {scheme.powers ? power_of(scales[block]) : load_float(scales + 4 * i64(block), vectors), 0.0f};
}

template <int BITS>
__device__ __forceinline__ void store_scale(Scheme<BITS> scheme, u8* frame, bool vectors, const Coding& c,
                                            u32 block, Stored s) {
    u8* to = frame + c.scales_at + 4 * i64(block);
    store_float(to, vectors, s.scale);
    if (scheme.asymmetric) store_float(to + 4 * i64(c.blocks), vectors, s.low);
}

template <int MANTISSA>
__device__ __forceinline__ void store_scale(Floats<MANTISSA> scheme, u8* frame, bool vectors, const Coding& c,
                                            u32 block, Stored s) {
    u8* scales = frame + c.scales_at;
    if (scheme.powers) {
        scales[block] = exponent_of(s.scale);
    } else {
        store_float(scales + 4 * i64(block), vectors, s.scale);
    }
}

// Zero the at most 15 bytes after the codes and after the scales; any 32 threads of a row.
__device__ __forceinline__ void store_padding(u8* frame, const Coding& c, int thread) {
    const i64 at = thread < 16 ? c.codes_end + thread : c.scales_end + thread - 16;
    const i64 end = thread < 16 ? c.scales_at : c.frame_bytes;
    if (thread < 32 && at < end) frame[at] = 0;
}

// The block of an element; a shift where it can be.
__device__ __forceinline__ u32 block_of(const Coding& c, u32 element) {
    if (c.blocks == 1) return 0;
    return c.shift >= 0 ? element >> c.shift : element / c.block;
}

// Which blocks an octet lies in: the first one, and how many elements until the next, at most eight.
struct Within {
    u32 block;
    int left;
};

__device__ __forceinline__ Within within_blocks(const Coding& c, u32 octet) {
    const u32 block = block_of(c, octet * kOctet), left = (block + 1) * c.block - octet * kOctet;
    return {block, left < kOctet ? int(left) : kOctet};
}

// ---- rotation ----------------------------------------------------------------------------------

// Rotate the groups of c.rotation elements that are whole in a row of `numel`; all lanes of the warp, whose
// octets are those of their slots, in whole groups.  Absent elements are then to be filled again.
__device__ __forceinline__ void rotate_octet(const Coding& c, u32 octet, u32 numel, bool back,
                                             float (&values)[kOctet]) {
    const int size = int(c.rotation), inside = size < kOctet ? size : kOctet;
    const u32 end = (octet * kOctet | (c.rotation - 1)) + 1;  // of the group of a whole octet
    // Elements of this octet below `limit` are in whole groups.
    const int limit = size <= kOctet ? octet_count(octet, numel) & ~(inside - 1) : end <= numel ? kOctet : 0;
    const float part = float_of(0x7f000000u - bits_of(float(size)));  // 1 / size
#pragma unroll
    for (int i = 0; i < kOctet; ++i)
        if (i < limit) values[i] = values[i] * part;
#pragma unroll
    for (int distance = 1; distance < kOctet; distance *= 2) {
        if (distance >= inside) break;
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            if ((i & distance) == 0 && i < limit) {
                const float first = values[i], second = values[i + distance];
                values[i] = butterfly(first, second, false);
                values[i + distance] = butterfly(second, first, true);
            }
        }
    }
    for (int distance = 1; distance * kOctet < size; distance *= 2) {
        const bool second = (octet & u32(distance)) != 0;
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            const float other = __shfl_xor_sync(kWarp, values[i], lanes_apart(distance));
            if (limit != 0) values[i] = butterfly(values[i], other, second);
        }
    }
    if (back) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i)
            if (i < limit) values[i] = values[i] * float(size);
    }
}

__device__ __forceinline__ void fill_absent(int count, float (&values)[kOctet]) {
#pragma unroll
    for (int i = 1; i < kOctet; ++i)
        if (i >= count) values[i] = values[0];
}

// ---- decoding ----------------------------------------------------------------------------------

// Codes and scale of an octet while they are under way.
struct Fetched {
    u64 codes;
    Stored stored;
};

template <class Scheme>
__device__ __forceinline__ Fetched fetch_octet(Scheme scheme, const u8* frame, bool vectors, const Coding& c,
                                               u32 octet, int count, Within in) {
    return {load_codes(frame, vectors, scheme.bits(), octet, count), load_scale(scheme, frame, vectors, c, in.block)};
}

// Any block, also one that begins inside the octet; saturates at `largest`.
template <class Scheme>
__device__ __forceinline__ void expand_octet(Scheme scheme, const u8* frame, bool vectors, const Coding& c,
                                             int count, float largest, Within in, Fetched fetched,
                                             float (&values)[kOctet]) {
    u32 codes[kOctet];
    unpack(scheme, fetched.codes, codes);
    Stored stored = fetched.stored;
    if (in.left >= count) {
        values_of(scheme, stored, codes, values);
        if (!within(scheme, stored, largest)) {
#pragma unroll
            for (int i = 0; i < kOctet; ++i) values[i] = saturated(values[i], largest);
        }
    } else {
        u32 block = in.block, left = u32(in.left);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            if (left == 0 && i < count) {
                stored = load_scale(scheme, frame, vectors, c, ++block);
                left = c.block;
            }
            values[i] = saturated(value_of(scheme, stored, codes[i]), largest);
            --left;
        }
    }
}

// From the values of codes to elements: rotated back, where the codec rotates, and saturated.
__device__ __forceinline__ void rotate_back(const Coding& c, u32 octet, u32 numel, float largest,
                                            float (&values)[kOctet]) {
    rotate_octet(c, octet, numel, true, values);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) values[i] = saturated(values[i], largest);
}

// The sum over sources in ascending order, in fp32; each term saturates.  Codes and scales of AHEAD
// sources are under way at a time.  ROTATED: the launch may ask for a rotation; then all lanes come.
template <class Scheme, int AHEAD, bool ROTATED>
__device__ __forceinline__ void sum_octet(const Arguments& a, const u8* frame, bool vectors, u32 octet, int count,
                                          float (&sums)[kOctet]) {
    const Coding& c = a.coding;
    const Scheme scheme = scheme_of<Scheme>(c);
    const Within in = count > 0 ? within_blocks(c, octet) : Within{0, kOctet};
    const float largest = Fp32::largest();
#pragma unroll
    for (int i = 0; i < kOctet; ++i) sums[i] = -0.0f;  // changes no first term, zeros' signs included
    for (u32 source = 0; source < a.sources; source += AHEAD) {
        Fetched fetched[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k)
            if (source + k < a.sources && count > 0)
                fetched[k] = fetch_octet(scheme, frame + k * a.source_stride, vectors, c, octet, count, in);
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            if (source + k < a.sources) {
                float term[kOctet] = {};
                if (count > 0)
                    expand_octet(scheme, frame + k * a.source_stride, vectors, c, count, largest, in, fetched[k], term);
                if constexpr (ROTATED) {
                    if (c.rotation != 0) rotate_back(c, octet, a.numel, largest, term);
                }
#pragma unroll
                for (int i = 0; i < kOctet; ++i) sums[i] = sums[i] + term[i];
            }
        }
        frame += AHEAD * a.source_stride;
    }
}

// ---- encoding ----------------------------------------------------------------------------------

// All threads of the thread block call it, `turn` 0, 1, 2, ...; blockDim is a multiple of the team and of
// 32, and a team's threads are those of consecutive slots.  `two`: the extent has two ends.
__device__ __forceinline__ Extent team_extent(Extent mine, u32 team, bool two, u32 turn = 0) {
    __shared__ u32 highs[2][32], lows[2][32];  // by turns: who is a turn ahead disturbs nobody who still reads
#pragma unroll
    for (u32 offset = 16; offset > 0; offset /= 2) {
        if (offset >= team) continue;
        const u32 apart = lanes_apart(int(offset)), high = __shfl_xor_sync(kWarp, mine.high, apart);
        mine.include({high, two ? __shfl_xor_sync(kWarp, mine.low, apart) : 0u});
    }
    if (team > 32) {
        const u32 thread = threadIdx.x;
        u32(&high)[32] = highs[turn % 2], (&low)[32] = lows[turn % 2];
        if (thread % 32 == 0) {
            high[thread / 32] = mine.high;
            low[thread / 32] = mine.low;
        }
        __syncthreads();
        const u32 first = (thread & ~(team - 1)) / 32;
        for (u32 warp = first; warp < first + team / 32; ++warp) mine.include({high[warp], low[warp]});
    }
    return mine;
}

// Which octets a thread of a team has: lane, lane + team, ... of its block; `apart` those that are of lanes 16
// slots apart.  Blocks are multiples of 8, or the whole row.  A team has a.loops blocks, one a turn.
struct Team {
    u32 size, lane, block, octets, step, apart;
    __device__ __forceinline__ Team(const Arguments& a, const Coding& c) {
        const u32 mine = slot(), teams = blockDim.x >> a.team_shift;
        size = 1u << a.team_shift;
        lane = mine & (size - 1);
        block = blockIdx.x * teams + (mine >> a.team_shift);
        step = gridDim.x * teams;
        octets = (c.block + kOctet - 1) / kOctet;
        apart = size >= 32 ? 16 : (16u >> a.team_shift) * octets;
    }
    __device__ __forceinline__ void advance() { block += step; }
    __device__ __forceinline__ u32 octet(int j) const { return block * octets + lane + u32(j) * size; }
    __device__ __forceinline__ int count(const Arguments& a, const Coding& c, int j) const {
        return lane + u32(j) * size < octets && block < c.blocks ? octet_count(octet(j), a.numel) : 0;
    }
    __device__ __forceinline__ static bool together(int count) {
        return __all_sync(kWarp, count == kOctet) != 0;
    }
};

__device__ __forceinline__ Words random_words(const Arguments& a, i64 row, u32 octet) {
    return philox(a.noise.key, u64(a.noise.start + row + i64(octet)));
}

// The same where the launch says whether there are any.
__device__ __forceinline__ Words any_words(const Arguments& a, u32 octet) {
    if (a.noise.on == 0) return {};
    return random_words(a, row_offset(a, a.noise.stride), octet);
}

__device__ __forceinline__ float any_shift(const Arguments& a, const Words& random, int i) {
    return a.noise.on != 0 ? shift_of(random, i) : 0.0f;
}

template <class Scheme>
__device__ __forceinline__ u64 word_of(Scheme scheme, Stored stored, int count, u32 (&codes)[kOctet]) {
#pragma unroll
    for (int i = 1; i < kOctet; ++i)
        if (i >= count) codes[i] = 0;  // spare bits are 0
    return stored.broken() ? 0 : pack(scheme, codes);
}

// The largest magnitude among elements as they are stored, which is in the order of their patterns.
template <class T>
__device__ __forceinline__ u32 largest_pattern(const Held<T>& held, u32 largest) {
#pragma unroll
    for (int i = 0; i < Held<T>::kWords; ++i) {
        if constexpr (Held<T>::kWords == kOctet) {
            const u32 word = held.words[i] & kAbs;
            largest = word > largest ? word : largest;
        } else {  // in the upper half; what is below it only orders equals
            const u32 high = held.words[i] & 0x7fffffffu, low = held.words[i] << 16 & 0x7fffffffu;
            largest = high > largest ? high : largest;
            largest = low > largest ? low : largest;
        }
    }
    return largest;
}

// Octets of a thread, as they came.
template <class T, int OCTETS>
struct Mine {
    Held<T> held[OCTETS];
};

// Encode integers, OCTETS octets a thread in registers.  `source.bring(team, octet, count, together)` brings an
// octet of the row as Held<T>.  AHEAD: it only asks for it, and those of the next turn are under way while this turn's
// are encoded.  Where a thread block's turn is whole (a.exact: blocks are OCTETS octets a thread, and all starts
// are aligned), nothing is asked about counts.
template <class T, int BITS, int OCTETS, bool STOCHASTIC, bool AHEAD, class Source>
struct Encoder {
    const Arguments& a;
    const Coding& c;
    const Place& place;
    u8* frame;
    const Source& source;
    i64 noise_row;

    template <bool WHOLE>
    __device__ __forceinline__ Mine<T, OCTETS> fetch(const Team& team) const {
        Mine<T, OCTETS> mine;
#pragma unroll
        for (int j = 0; j < OCTETS; ++j) {
            const int count = WHOLE ? kOctet : team.count(a, c, j);
            mine.held[j] = source.template bring<WHOLE>(team, team.octet(j), count, WHOLE || together(count));
        }
        return mine;
    }

    __device__ __forceinline__ static bool together(int count) {
        if constexpr (AHEAD && Held<T>::kWords == kOctet) return Team::together(count);
        return false;
    }

    template <bool WHOLE>
    __device__ __forceinline__ void encode(const Team& team, Mine<T, OCTETS>& mine, u32 turn) const {
        const Scheme<BITS> scheme = scheme_of<Scheme<BITS>>(c);
        const bool vectors = WHOLE || place.vectors != 0;
        Extent extent{0, 0};
        u32 largest = 0;
#pragma unroll
        for (int j = 0; j < OCTETS; ++j) {
            const int count = WHOLE ? kOctet : team.count(a, c, j);
            if constexpr (AHEAD) settle(WHOLE || (together(count) && a.values.vectors != 0), mine.held[j]);
            if (scheme.asymmetric) {
                float values[kOctet];
                widen_octet(mine.held[j], values);
                if (WHOLE || count > 0) include_octet(scheme, values, extent);
            } else if (WHOLE || count > 0) {
                largest = largest_pattern(mine.held[j], largest);
            }
        }
        if (!scheme.asymmetric)
            extent.high = bits_of(T::widen(typename T::Word(sizeof(typename T::Word) == 4 ? largest : largest >> 16)));
        const Stored stored = stored_of(scheme, team_extent(extent, team.size, scheme.asymmetric, turn));
        const Divider divider = divider_of(scheme, stored);
#pragma unroll
        for (int j = 0; j < OCTETS; ++j) {
            const int count = WHOLE ? kOctet : team.count(a, c, j);
            if (WHOLE || count > 0) {
                u32 rounded[kOctet];
                float values[kOctet];
                widen_octet(mine.held[j], values);
                Words random{};
                if constexpr (STOCHASTIC) random = random_words(a, noise_row, team.octet(j));
                const auto shift = [&](int i) { return shift_of(random, i); };
                round_octet<STOCHASTIC>(scheme, divider, values, shift, rounded);
#pragma unroll
                for (int i = 1; i < kOctet; ++i)
                    if (i >= count) rounded[i] = bits_of(kRound);  // spare bits are 0
                const u64 word = stored.broken() ? 0 : pack_rounded(scheme, rounded);
                store_codes(frame, vectors, BITS, team.octet(j), count, word);
            }
        }
        if (team.lane == 0 && (WHOLE || team.block < c.blocks))
            store_scale(scheme, frame, vectors, c, team.block, stored);
    }

    __device__ __forceinline__ void run() const {
        if (blockIdx.x == 0) store_padding(frame, c, int(threadIdx.x));
        const u32 tile = blockDim.x * u32(OCTETS * kOctet);  // elements
        u32 end = (blockIdx.x + 1) * tile;
        Team team(a, c);
        Mine<T, OCTETS> following;
        bool whole = a.exact != 0 && end <= a.numel;
        if constexpr (AHEAD) following = whole ? fetch<true>(team) : fetch<false>(team);
        for (u32 turn = 0; turn < a.loops; ++turn) {
            Mine<T, OCTETS> mine = following;
            const bool now = whole;
            Team next = team;
            next.advance();
            end += gridDim.x * tile;
            whole = a.exact != 0 && end <= a.numel;
            if constexpr (AHEAD) {
                if (turn + 1 < a.loops) following = whole ? fetch<true>(next) : fetch<false>(next);
            }
            if (now) {
                if constexpr (!AHEAD) mine = fetch<true>(team);
                encode<true>(team, mine, turn);
            } else {
                if constexpr (!AHEAD) mine = fetch<false>(team);
                encode<false>(team, mine, turn);
            }
            team = next;
        }
    }
};

template <class T, int BITS, int OCTETS, bool STOCHASTIC, bool AHEAD, class Source>
__device__ __forceinline__ void encode_team(const Arguments& a, const Coding& c, const Place& place,
                                            const Source& source) {
    const i64 noise_row = STOCHASTIC ? row_offset(a, a.noise.stride) : 0;
    Encoder<T, BITS, OCTETS, STOCHASTIC, AHEAD, Source>{a, c, place, row_start(a, place), source, noise_row}.run();
}

// ---- what general kernels do beside: rotation, error feedback, whatever the launch asks for ------

// An octet with what it carries: x + error, not rotated.  All lanes of the warp.
__device__ __forceinline__ void load_carried(const Arguments& a, const u8* row, const u8* error, u32 octet, int count,
                                             bool together, u32 apart, float (&values)[kOctet]) {
    load_any(row, a.values, octet, count, together, apart, values);
    if (a.carried != 0) {
        float errors[kOctet];
        load_any(error, a.error, octet, count, together, apart, errors);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) values[i] = values[i] + errors[i];
    }
}

// Replace the carried error of an octet by what its codes leave over of `values`, which are x + error.
// `decoded`: the values of its codes, still rotated.  All lanes of the warp.
__device__ __forceinline__ void store_carried(const Arguments& a, const Coding& c, u8* error, u32 octet, int count,
                                              bool together, u32 apart, const float (&values)[kOctet],
                                              float (&decoded)[kOctet]) {
    if (c.rotation != 0) rotate_back(c, octet, a.numel, Fp32::largest(), decoded);
    float errors[kOctet];
    load_any(error, a.error, octet, count, together, apart, errors);
    const float largest = largest_of(a.error);
#pragma unroll
    for (int i = 0; i < kOctet; ++i)
        errors[i] = saturated(carried_of(a.decay, errors[i], values[i], decoded[i]), largest);
    store_any(error, a.error, octet, count, together, apart, errors);
}

// The codes of an octet in one block, and in `values` what they decode to, where it is wanted.
template <class Scheme>
__device__ __forceinline__ void encode_octet(const Arguments& a, const Coding& c, Scheme scheme, Stored stored,
                                             Divider divider, const Words& random, int count, bool decoded,
                                             float (&values)[kOctet], u32 (&codes)[kOctet]) {
    const auto shift = [&](int i) { return any_shift(a, random, i); };
    codes_of<true>(scheme, divider, values, shift, codes);
    if (decoded) {
        values_of(scheme, stored, codes, values);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) values[i] = saturated(values[i], Fp32::largest());
    }
}

// The same for an octet that may lie in several blocks: `scale(block, starts)` gives a block's, and hears
// whether the block starts in this octet.  Gives the word of its codes.
template <class Scheme, class Scale>
__device__ __forceinline__ u64 encode_across(const Arguments& a, const Coding& c, Scheme scheme, const Words& random,
                                             u32 octet, int count, Scale scale, float (&values)[kOctet]) {
    const Within in = within_blocks(c, octet);
    u32 block = in.block;
    int left = in.left;
    Stored stored = scale(block, octet * kOctet == block * c.block);
    Divider divider = divider_of(scheme, stored);
    u32 codes[kOctet];
    if (left >= count) {
        encode_octet(a, c, scheme, stored, divider, random, count, a.carried != 0, values, codes);
        return word_of(scheme, stored, count, codes);
    }
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
        if (left == 0 && i < count) {
            left = int(c.block);
            stored = scale(++block, true);
            divider = divider_of(scheme, stored);
        }
        codes[i] = i < count && !stored.broken() ? divided_code(scheme, divider, values[i], any_shift(a, random, i)) : 0;
        values[i] = saturated(value_of(scheme, stored, codes[i]), Fp32::largest());
        --left;
    }
    return pack(scheme, codes);
}

}  // namespace frames
