// Functions with which threads load and store elements, codes and scales.  teams.cuh has the functions that compute
// with them.
//
// An octet is eight consecutive elements of a row, starting at a multiple of eight.  Whatever the bits of a code,
// the codes of an octet fill whole bytes of the frame, so no two threads write the same byte.
#pragma once

#include "codec.cuh"

namespace frames {

using namespace codec;

// The place of a tensor: element or byte `i` of row (a, b, c) is at address + a*stride[0] + b*stride[1] +
// c*stride[2] + i*inner, all in bytes.  `vectors`: whether every row starts on 16 bytes and its elements are
// contiguous.  `kind`: type of the elements (0 Fp32, 1 Bf16, 2 Fp16), for kernels that were not compiled for one.
struct Place {
    i64 address, stride[3], inner;
    u32 vectors, kind;
};

// How a row is coded.
//   bits: for integers, the number of bits of a code; for floats, the number of bits of the mantissa.
//   special: for integers, 1 for codes with an offset, 2 for clipped codes, else 0; for floats, 1 if scales are powers
//   of two, else 0.
//   block, blocks: the number of elements of a block, and the number of blocks of the row.
//   rotation: the number of elements that are rotated together; 0 without rotation.
//   shift: the binary logarithm of `block` if it is a power of two; 31 if there is only one block; else -1.
struct Coding {
    i64 codes_end, scales_at, scales_end, frame_bytes;
    u32 bits, special, block, blocks, rotation;
    int shift;
};

// Random bits: the number of octet `i` of row (a, b, c) is start + a*stride[0] + b*stride[1] + c*stride[2] + i.
struct Noise {
    i64 start, stride[3];
    Words key;
    u32 on, unused;
};

// The argument of every kernel; impl/cuda/launch.py has the same fields.  A row has fewer than 2^31 elements, so the
// numbers of elements, octets and blocks have 32 bits.
struct Arguments {
    i64 source_stride, extents;
    u32 numel, middle;  // elements of a row; size of dimension b
    u32 loops, team_shift, tile, parts, sources, carried, exact, divisor;
    Place values, frames, output, error;
    Coding coding, second;
    Noise noise;
    Decay decay;
};

// Returns the offset in bytes (in octets for random bits) of the row on which this thread block works.  The grid is
// (thread blocks of a row, size of c, size of a times size of b), so if b has size 1, nothing is divided.
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

// How many elements octet `octet` has: 8, fewer at the end of a row, 0 beyond it.
__device__ __forceinline__ int octet_count(u32 octet, u32 numel) {
    const u32 whole = numel / kOctet;
    return octet < whole ? kOctet : octet == whole ? int(numel % kOctet) : 0;
}

// ---- lanes -------------------------------------------------------------------------------------

// Returns the number of this thread's octet among the octets of its thread block.  The even lanes of a warp have the
// warp's first sixteen octets, and the odd lanes its last sixteen.  So two neighbouring lanes can swap halves of their
// octets of fp32, and every load and store of a warp covers 512 contiguous bytes.
__device__ __forceinline__ u32 slot() {
    const u32 thread = threadIdx.x;
    return (thread & ~31u) | (thread & 31u) >> 1 | (thread & 1u) << 4;
}

constexpr u32 kWarp = 0xffffffffu;

// The bit of the lane number to flip to get the lane whose octet is `distance` away, a power of two below 32.
__device__ __forceinline__ u32 lanes_apart(int distance) { return distance == 16 ? 1u : u32(distance) << 1; }

__device__ __forceinline__ uint4 swapped(uint4 mine) {
    return make_uint4(__shfl_xor_sync(kWarp, mine.x, 1), __shfl_xor_sync(kWarp, mine.y, 1),
                      __shfl_xor_sync(kWarp, mine.z, 1), __shfl_xor_sync(kWarp, mine.w, 1));
}

__device__ __forceinline__ uint4 either(bool first, uint4 x, uint4 y) {
    return make_uint4(first ? x.x : y.x, first ? x.y : y.y, first ? x.z : y.z, first ? x.w : y.w);
}

// Returns the number of the first of the two quads (four fp32 each) that this lane loads.  An even lane loads the first
// half of its own octet.  An odd lane loads the second half of its neighbour's octet.
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

// Loads an octet element by element: at the end of a row, and in rows that are strided or do not begin on 16 bytes.
// Elements beyond the row repeat the first element, so they do not change any extreme.
template <class T>
__device__ __forceinline__ Held<T> load_singly(const u8* row, const Place& place, u32 octet, int count) {
    using Word = typename T::Word;
    row += i64(octet * kOctet) * place.inner;
    const Word first = count > 0 ? *reinterpret_cast<const Word*>(row) : Word(0);
    Held<T> held{};
#pragma unroll
    for (int i = 0; i < kOctet; ++i)
        held.set(i, i < count ? *reinterpret_cast<const Word*>(row + i * place.inner) : first);
    return held;
}

template <class T>
__device__ __forceinline__ void store_singly(u8* row, const Place& place, u32 octet, int count,
                                             const Held<T>& held) {
    row += i64(octet * kOctet) * place.inner;
#pragma unroll
    for (int i = 0; i < kOctet; ++i)
        if (i < count) *reinterpret_cast<typename T::Word*>(row + i * place.inner) = held.word(i);
}

// Loads an octet.  `vectors` is place.vectors, or a constant of the same value.  `together` may be true only if all
// lanes of the warp take part, each with a whole octet.  Then `apart` is the distance, in octets, between the octets of
// two lanes whose slots differ by 16.  With `together`, an octet of fp32 is loaded in halves: each lane loads a half of
// its own octet and a half of its neighbour's, so that the loads of a warp are contiguous, and the two lanes then swap
// halves.
template <class T>
__device__ __forceinline__ Held<T> load_octet(const u8* row, const Place& place, bool vectors, u32 octet,
                                              int count, bool together, u32 apart) {
    Held<T> held;
    const uint4* from = reinterpret_cast<const uint4*>(row);
    if constexpr (Held<T>::kWords == kOctet) {
        if (together && vectors) {
            const bool even = threadIdx.x % 2 == 0;
            from += near_quad(octet, apart);
            const uint4 near = from[0], far = from[2 * apart], other = swapped(either(even, far, near));
            held.set_quad(0, either(even, near, other));
            held.set_quad(1, either(even, other, far));
            return held;
        }
    }
    if (count != kOctet || !vectors) return load_singly<T>(row, place, octet, count);
    constexpr int kQuads = Held<T>::kWords / 4;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) held.set_quad(i, from[octet * kQuads + i]);
    return held;
}

// Stores an octet as it is held, in the way that load_octet loads it.
template <class T>
__device__ __forceinline__ void store_held(u8* row, const Place& place, bool vectors, u32 octet, int count,
                                           bool together, const Held<T>& held, u32 apart = 16) {
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
        store_singly(row, place, octet, count, held);
    }
}

template <class T>
__device__ __forceinline__ void store_octet(u8* row, const Place& place, bool vectors, u32 octet, int count,
                                            bool together, const float (&values)[kOctet], u32 apart = 16) {
    Held<T> held{};
#pragma unroll
    for (int i = 0; i < Held<T>::kWords; ++i) {
        if constexpr (Held<T>::kWords == kOctet) {
            held.words[i] = T::narrow(values[i]);
        } else {
            held.words[i] = narrowed_two<T>(values[2 * i], values[2 * i + 1]);
        }
    }
    store_held(row, place, vectors, octet, count, together, held, apart);
}

template <class T>
__device__ __forceinline__ void widen_octet(const Held<T>& held, float (&values)[kOctet]) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) values[i] = T::widen(held.word(i));
}

// Loads an octet of a type that the launch gives, and widens it.
__device__ __forceinline__ void load_any(const u8* row, const Place& place, u32 octet, int count, bool together,
                                         u32 apart, float (&values)[kOctet]) {
    const bool vectors = place.vectors != 0;
    switch (place.kind) {
        case 0: return widen_octet(load_octet<Fp32>(row, place, vectors, octet, count, together, apart), values);
        case 1: return widen_octet(load_octet<Bf16>(row, place, vectors, octet, count, together, apart), values);
        default: return widen_octet(load_octet<Fp16>(row, place, vectors, octet, count, together, apart), values);
    }
}

// Stores values, which must be saturated already, in a type that the launch gives.
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

// Writes zeros to the padding of a frame: at most 15 bytes after the codes, and at most 15 bytes after the scales.  All
// of the threads 0 to 31 must call it; `thread` is the number of the calling thread.
__device__ __forceinline__ void store_padding(u8* frame, const Coding& c, int thread) {
    const i64 at = thread < 16 ? c.codes_end + thread : c.scales_end + thread - 16;
    const i64 end = thread < 16 ? c.scales_at : c.frame_bytes;
    if (thread < 32 && at < end) frame[at] = 0;
}

// The number of an element's block, by a shift if the block is a power of two.
__device__ __forceinline__ u32 block_of(const Coding& c, u32 element) {
    return rare(c.shift < 0) ? element / c.block : element >> c.shift;
}

// The number of the block in which an octet begins, and how many elements of the octet (at most 8) lie in this block.
struct Within {
    u32 block;
    int left;
};

__device__ __forceinline__ Within within_blocks(const Coding& c, u32 octet) {
    const u32 block = block_of(c, octet * kOctet), left = (block + 1) * c.block - octet * kOctet;
    return {block, left < kOctet ? int(left) : kOctet};
}

}  // namespace frames
