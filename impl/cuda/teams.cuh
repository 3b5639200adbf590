// Rotates, decodes, sums and encodes octets.  A team is a power of two of threads that work on one block of the codec.
// The arithmetic of codecs is in codec.cuh; elements, codes and scales are loaded and stored only by frames.cuh.
#pragma once

#include "frames.cuh"
#include "int_rounding.cuh"

namespace frames {

// How many thread blocks of 512 threads (16 warps) fill half of a multiprocessor, which holds 64 warps, or 32 on sm_75.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
constexpr int kHalf = 1;
#else
constexpr int kHalf = 2;
#endif

// Whether this is the main path: all octets before `end` exist and each lies in one block, and all rows are aligned, so
// that single octets need no tests.
__device__ __forceinline__ bool whole(const Arguments& a, u32 end) {
    return !rare(a.exact == 0 || end > a.numel / kOctet);
}

// ---- rotation ----------------------------------------------------------------------------------

// Rotates the groups of c.rotation elements in a row of `numel` elements, or undoes the rotation (`back`).  Elements at
// the end of the row that fill no group are not rotated.  All lanes of the warp must take part, each with the octet of
// its slot, and the warp must hold whole groups.  Elements beyond the row must be filled again afterwards.
__device__ __forceinline__ void rotate_octet(const Coding& c, u32 octet, u32 numel, bool back,
                                             float (&values)[kOctet]) {
    const int size = int(c.rotation), inside = size < kOctet ? size : kOctet;
    const u32 end = (octet * kOctet | (c.rotation - 1)) + 1;  // end of the group in which the octet lies
    // The elements of this octet before `limit` are in whole groups.
    const int limit = size <= kOctet ? octet_count(octet, numel) & ~(inside - 1) : end <= numel ? kOctet : 0;
    const float part = float_of(0x7f000000u - bits_of(float(size)));  // 1 / size
#pragma unroll
    for (int i = 0; i < kOctet; ++i)
        if (i < limit) values[i] = values[i] * part;
#pragma unroll
    for (int distance = 1; distance < kOctet; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            if ((i & distance) == 0 && i < limit && distance < inside) {
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

// The codes and the scale of an octet, loaded but not used yet.
struct Fetched {
    u64 codes;
    Stored stored;
};

template <class Scheme>
__device__ __forceinline__ Fetched fetch_octet(Scheme scheme, const u8* frame, bool vectors, const Coding& c,
                                               u32 octet, int count, Within in) {
    return {load_codes(frame, vectors, scheme.bits(), octet, count), load_scale(scheme, frame, vectors, c, in.block)};
}

// Decodes an octet, in which another block may begin; values are saturated at `largest`.
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

// Decodes an octet that lies in one block of which no value saturates.
template <int BITS>
__device__ __forceinline__ void expand_whole(Scheme<BITS> scheme, Fetched fetched, float (&values)[kOctet]) {
    integers_of(scheme, fetched.codes, values);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) values[i] = value_of(scheme, fetched.stored, values[i]);
}

// Rotates decoded values back and saturates them.
__device__ __forceinline__ void rotate_back(const Coding& c, u32 octet, u32 numel, float largest,
                                            float (&values)[kOctet]) {
    rotate_octet(c, octet, numel, true, values);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) values[i] = saturated(values[i], largest);
}

// Adds the saturated values of `sources` sources to `sums`, in ascending order, in fp32.  Codes and scales of AHEAD
// sources are loaded before they are used.  ROTATED: the codec may have a rotation, in which all lanes must take part.
template <class Scheme, int AHEAD, bool ROTATED>
__device__ __forceinline__ void add_sources(const Arguments& a, const u8* frame, bool vectors, u32 octet, int count,
                                            u32 sources, float (&sums)[kOctet]) {
    const Coding& c = a.coding;
    const Scheme scheme = scheme_of<Scheme>(c);
    const Within in = count > 0 ? within_blocks(c, octet) : Within{0, kOctet};
    const float largest = Fp32::largest();
#pragma unroll 1
    for (u32 source = 0; source < sources; source += AHEAD) {
        Fetched fetched[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k)
            if (source + k < sources && count > 0)
                fetched[k] = fetch_octet(scheme, frame + k * a.source_stride, vectors, c, octet, count, in);
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            if (source + k < sources) {
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

// Does what add_sources does, on the main path (`whole`).  `frame` is the frame of the first source.  Whether `scheme`
// has offsets is a constant, so that the compiler drops the branch.
template <int AHEAD, int BITS>
__device__ __forceinline__ void add_whole(Scheme<BITS> scheme, const Arguments& a, const u8* frame, u32 octet,
                                          u32 sources, float (&sums)[kOctet]) {
    const Coding& c = a.coding;
    const u32 block = block_of(c, octet * kOctet);
    const u8 *codes = frame + octet * u32(BITS), *scales = frame + c.scales_at + 4 * block;
#pragma unroll 1
    for (u32 source = 0; source < sources; source += AHEAD) {
        Fetched fetched[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            fetched[k].codes = load_codes(codes, true, BITS, 0, kOctet);
            fetched[k].stored = {load_float(scales, true), 0.0f};
            if (scheme.asymmetric) fetched[k].stored.low = load_float(scales + 4 * i64(c.blocks), true);
            codes += a.source_stride;
            scales += a.source_stride;
        }
        bool safe = true;
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) safe = safe & within(scheme, fetched[k].stored, Fp32::largest());
        // Two loops, since a condition in one loop becomes selections of all terms.
        if (rare(!safe)) {
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                float term[kOctet];
                expand_whole(scheme, fetched[k], term);
#pragma unroll
                for (int i = 0; i < kOctet; ++i) sums[i] = sums[i] + saturated(term[i], Fp32::largest());
            }
        } else {
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                float term[kOctet];
                expand_whole(scheme, fetched[k], term);
#pragma unroll
                for (int i = 0; i < kOctet; ++i) sums[i] = sums[i] + term[i];
            }
        }
    }
}

// Adds sources in steps of AHEAD as long as that many are left, then in steps of half as many, and so on.
template <int AHEAD, int BITS>
__device__ __forceinline__ void add_all(Scheme<BITS> scheme, const Arguments& a, const u8* frame, u32 octet,
                                        u32 sources, float (&sums)[kOctet]) {
    const u32 rest = sources % AHEAD, full = sources - rest;
    add_whole<AHEAD>(scheme, a, frame, octet, full, sums);
    if constexpr (AHEAD > 1) {
        if (rare(rest != 0)) add_all<AHEAD / 2>(scheme, a, frame + full * a.source_stride, octet, rest, sums);
    }
}

// The sum of an octet over all sources.  WHOLE: this is the main path.
template <int BITS, int AHEAD, bool WHOLE>
__device__ __forceinline__ void sum_octet(const Arguments& a, const u8* frame, u32 octet, int count,
                                          float (&sums)[kOctet]) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) sums[i] = -0.0f;  // adding it to the first term changes no sign of a zero
    if constexpr (!WHOLE) {
        add_sources<Scheme<BITS>, 1, false>(a, frame, a.frames.vectors != 0, octet, count, a.sources, sums);
    } else if (rare(scheme_of<Scheme<BITS>>(a.coding).asymmetric)) {
        add_all<AHEAD>(Scheme<BITS>{int(a.coding.bits), true}, a, frame, octet, a.sources, sums);
    } else {
        add_all<AHEAD>(Scheme<BITS>{int(a.coding.bits), false}, a, frame, octet, a.sources, sums);
    }
}

// ---- encoding ----------------------------------------------------------------------------------

// Returns the extent of the block on which a team works, from `mine`, the extent of this thread's elements.  All
// threads of the thread block must call it, with `turn` 0, 1, 2, ... in successive calls.  `team` is the number of
// threads in a team, which have consecutive slots; blockDim is a multiple of `team` and of 32.  `two` says whether
// `low` is used too.  With WARPS, the code is optimised for teams of at least a warp, and without WARPS for smaller
// teams.
template <bool WARPS = true>
__device__ __forceinline__ Extent team_extent(Extent mine, u32 team, bool two, u32 turn = 0) {
    __shared__ u32 highs[2][32], lows[2][32];  // used in turns: a warp may be one turn ahead of others
    bool shuffles = true;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    if (WARPS && !rare(team < 32)) {
        mine = {__reduce_max_sync(kWarp, mine.high), two ? __reduce_max_sync(kWarp, mine.low) : 0};
        shuffles = false;
    }
#endif
    if (shuffles) {
#pragma unroll
        for (u32 offset = 16; offset > 0; offset /= 2) {
            if (offset >= team) continue;
            const u32 apart = lanes_apart(int(offset)), high = __shfl_xor_sync(kWarp, mine.high, apart);
            mine.include({high, two ? __shfl_xor_sync(kWarp, mine.low, apart) : 0u});
        }
    }
    if (rare(team > 32)) {
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

// Says on which octets a thread works: on those with the numbers lane, lane + size, lane + 2 size and so on in the
// block of its team, which has `size` threads.  `apart` is the distance, in octets, between the octets of two lanes
// whose slots differ by 16.  Blocks are multiples of 8 elements, or the whole row.  A team works on a.loops blocks, one
// in each turn.
struct Team {
    u32 size, lane, block, octets, apart;
    __device__ __forceinline__ Team(const Arguments& a, const Coding& c, u32 turn) {
        const u32 mine = slot(), teams = blockDim.x >> a.team_shift;
        size = 1u << a.team_shift;
        lane = mine & (size - 1);
        block = (turn * gridDim.x + blockIdx.x) * teams + (mine >> a.team_shift);
        octets = (c.block + kOctet - 1) / kOctet;
        apart = size >= 32 ? 16 : (16u >> a.team_shift) * octets;
    }
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

// Returns the random bits of an octet; zeros if the launch has no random bits.
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
        if (i >= count) codes[i] = 0;  // bits beyond the row must be 0
    return stored.broken() ? 0 : pack(scheme, codes);
}

// The bit pattern of the largest magnitude among elements in their own type; patterns are ordered like magnitudes.
template <class T>
__device__ __forceinline__ u32 largest_pattern(const Held<T>& held, u32 largest) {
#pragma unroll
    for (int i = 0; i < Held<T>::kWords; ++i) {
        if constexpr (Held<T>::kWords == kOctet) {
            const u32 word = held.words[i] & kAbs;
            largest = word > largest ? word : largest;
        } else {  // the result is in the upper half; the lower half matters only among equal magnitudes
            const u32 high = held.words[i] & 0x7fffffffu, low = held.words[i] << 16 & 0x7fffffffu;
            largest = high > largest ? high : largest;
            largest = low > largest ? low : largest;
        }
    }
    return largest;
}

// Encodes blocks to integers; each thread keeps OCTETS octets in registers.  `source.bring<WHOLE>(team, octet, count)`
// returns an octet of the row as Held<T>.  WHOLE: this is the main path, where a block has OCTETS octets for each
// thread.  Nothing is loaded ahead for the next turn, since that would double the registers of a thread and halve the
// number of threads.
template <class T, int BITS, int OCTETS, bool STOCHASTIC, class Source>
struct Encoder {
    const Arguments& a;
    const Coding& c;
    const Place& place;
    u8* frame;
    const Source& source;
    i64 noise_row;

    template <bool WHOLE>
    __device__ __forceinline__ void bring(const Team& team, Held<T> (&held)[OCTETS]) const {
#pragma unroll
        for (int j = 0; j < OCTETS; ++j)
            held[j] = source.template bring<WHOLE>(team, team.octet(j), WHOLE ? kOctet : team.count(a, c, j));
    }

    template <bool WHOLE>
    __device__ __forceinline__ void encode(Scheme<BITS> scheme, const Team& team, u32 turn,
                                           const Held<T> (&held)[OCTETS]) const {
        const bool vectors = WHOLE || place.vectors != 0;
        Extent extent{0, 0};
        u32 largest = 0;
#pragma unroll
        for (int j = 0; j < OCTETS; ++j) {
            const int count = WHOLE ? kOctet : team.count(a, c, j);
            if (rare(scheme.asymmetric)) {
                float values[kOctet];
                widen_octet(held[j], values);
                if (WHOLE || count > 0) include_octet(scheme, values, extent);
            } else if (WHOLE || count > 0) {
                largest = largest_pattern(held[j], largest);
            }
        }
        if (!scheme.asymmetric)
            extent.high = bits_of(T::widen(typename T::Word(sizeof(typename T::Word) == 4 ? largest : largest >> 16)));
        const Stored stored = stored_of(scheme, team_extent<false>(extent, team.size, scheme.asymmetric, turn));
        const Divider divider = divider_of(scheme, stored);
#pragma unroll
        for (int j = 0; j < OCTETS; ++j) {
            const int count = WHOLE ? kOctet : team.count(a, c, j);
            if (WHOLE || count > 0) {
                float values[kOctet];
                widen_octet(held[j], values);
                u64 word;
                if constexpr (STOCHASTIC) {
                    word = drawn_word(scheme, divider, values, random_words(a, noise_row, team.octet(j)), count);
                } else {
                    u32 rounded[kOctet];
                    round_octet<false>(scheme, divider, values, [](int) { return 0.0f; }, rounded);
#pragma unroll
                    for (int i = 1; i < kOctet; ++i)
                        if (i >= count) rounded[i] = bits_of(kRound);  // bits beyond the row must be 0
                    word = pack_rounded(scheme, rounded);
                }
                if (stored.broken()) word = 0;
                store_codes(frame, vectors, BITS, team.octet(j), count, word);
            }
        }
        if (team.lane == 0 && (WHOLE || team.block < c.blocks))
            store_scale(scheme, frame, vectors, c, team.block, stored);
    }

    __device__ __forceinline__ void run() const {
        if (blockIdx.x == 0) store_padding(frame, c, int(threadIdx.x));
        const Scheme<BITS> scheme = scheme_of<Scheme<BITS>>(c);
#pragma unroll 1
        for (u32 turn = 0; turn < a.loops; ++turn) {
            const Team team(a, c, turn);
            Held<T> held[OCTETS];
            if (!whole(a, (turn * gridDim.x + blockIdx.x + 1) * blockDim.x * u32(OCTETS))) {
                bring<false>(team, held);
                encode<false>(scheme, team, turn, held);
            } else {
                bring<true>(team, held);
                if constexpr (STOCHASTIC) {  // with both, registers would spill
                    encode<true>(scheme, team, turn, held);
                } else if (rare(scheme.asymmetric)) {
                    encode<true>({scheme.stated, true}, team, turn, held);  // a constant, whose branches are dropped
                } else {
                    encode<true>({scheme.stated, false, scheme.clipped}, team, turn, held);
                }
            }
        }
    }
};

template <class T, int BITS, int OCTETS, bool STOCHASTIC, class Source>
__device__ __forceinline__ void encode_team(const Arguments& a, const Coding& c, const Place& place,
                                            const Source& source) {
    const i64 noise_row = STOCHASTIC ? row_offset(a, a.noise.stride) : 0;
    Encoder<T, BITS, OCTETS, STOCHASTIC, Source>{a, c, place, row_start(a, place), source, noise_row}.run();
}

// ---- general kernels: rotation, error feedback, and whatever else the launch asks for ------------

// Loads an octet plus its carried error, not rotated.  All lanes of the warp must take part.
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

// Updates the carried error of an octet from `values`, which are x + error, and `decoded`, the values of their codes,
// which are still rotated.  All lanes of the warp must take part.
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

// Encodes an octet that lies in one block.  If `decoded` is set, `values` are replaced by the values of the codes.
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

// The same for an octet that may lie in several blocks; returns its packed codes.  `scale(block, starts)` returns a
// block's scale; `starts` says whether the block starts in this octet.
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
