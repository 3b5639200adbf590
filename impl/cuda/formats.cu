// Kernels that encode and decode published formats, which impl/codecs/published_formats.py specifies.
//
// Each thread works on an octet.  A block consists of the octets of 1 to 16 neighbouring threads of a warp, which find
// what the block's elements share, such as the scale, by shuffles.  A short last block is filled up with its last
// element.  In a frame, the codes are directly followed by the further bytes of each block (such as its scale), which
// may not be aligned.
//   encode_format: reads each element once.  For NVFP4, encode_extents of quantize.cu has read the elements before, to
//   find the row's maximum.
//   decode_format: decodes a frame to elements.  To fp32 it can also write the sum of several frames, which are added
//   in ascending order of their sources.
#include "teams.cuh"

using namespace frames;

// The further bytes of a block, in addition to its codes; at most 10.
struct Beside {
    u32 words[3];
};

// The layout of a frame: `bits` of a code, elements of a block (`size`), further bytes of a block (`beside`), and
// whether the row has an fp32 number (`whole`).  A table of `entries` values is kept in shared memory, since each
// thread may read any of them.
template <int BITS, int SIZE, int BESIDE, int ENTRIES = 0, bool WHOLE = false>
struct Layout {
    static constexpr int bits = BITS, size = SIZE, beside = BESIDE, entries = ENTRIES, team = SIZE / kOctet;
    static constexpr bool whole = WHOLE, infinities = false;
};

// ---- extremes of a block, which the lanes of a warp find together --------------------------------------

template <int TEAM, class Join>
__device__ __forceinline__ u32 joined(u32 mine, Join join) {
#pragma unroll
    for (int distance = TEAM / 2; distance > 0; distance /= 2)
        mine = join(mine, __shfl_xor_sync(kWarp, mine, lanes_apart(distance)));
    return mine;
}

template <int TEAM>
__device__ __forceinline__ u32 highest(const u32 (&keys)[kOctet]) {
    u32 high = keys[0];
#pragma unroll
    for (int i = 1; i < kOctet; ++i) high = keys[i] > high ? keys[i] : high;
    return joined<TEAM>(high, [](u32 a, u32 b) { return a > b ? a : b; });
}

template <int TEAM>
__device__ __forceinline__ u32 lowest(const u32 (&keys)[kOctet]) {
    u32 low = keys[0];
#pragma unroll
    for (int i = 1; i < kOctet; ++i) low = keys[i] < low ? keys[i] : low;
    return joined<TEAM>(low, [](u32 a, u32 b) { return a < b ? a : b; });
}

// The bits of the largest magnitude; they are kInfinity or more if an element is not finite.
template <int TEAM>
__device__ __forceinline__ u32 most(const float (&values)[kOctet]) {
    u32 sizes[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) sizes[i] = bits_of(values[i]) & kAbs;
    return highest<TEAM>(sizes);
}

__device__ __forceinline__ void from_table(const float* table, const u32 (&codes)[kOctet], float scale,
                                           float (&values)[kOctet]) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) values[i] = table[codes[i]] * scale;
}

__device__ __forceinline__ float floored(float scale) { return scale < kSmallestNormal ? kSmallestNormal : scale; }

// ---- formats: from an octet to its codes and its block's further bytes, and back --------------------------

// Small floats with MANTISSA bits of mantissa, smallest exponent LEAST and largest bit pattern TOP (without the sign).
// Codes number the values in ascending order, so the most negative value, whose magnitude has the pattern TOP, has code
// 0.
template <int MANTISSA, int LEAST, int TOP>
struct Small {
    static constexpr u32 least = 127 + LEAST, bias = (least - 1) << 23;

    static __device__ __forceinline__ int pattern(u32 magnitude) {
        u32 exponent = magnitude >> 23;
        exponent = exponent < least ? least : exponent;
        const float steps = float_of(magnitude) * float_of((254u + MANTISSA - exponent) << 23);
        const int size = int((exponent - least) << MANTISSA) + int(bits_of(steps + kRound) - bits_of(kRound));
        return size > TOP ? TOP : size;
    }
    static __device__ __forceinline__ u32 code(float quotient) {
        const u32 word = bits_of(quotient);
        const int size = pattern(word & kAbs);
        return u32(TOP + (word >> 31 ? -size : size));
    }
    static __device__ __forceinline__ float magnitude(u32 pattern) {
        const float read = float_of((pattern << (23 - MANTISSA)) + bias);
        return pattern < 1u << MANTISSA ? read + read - float_of(least << 23) : read;
    }
    static __device__ __forceinline__ float entry(u32 code) {
        const int size = int(code) - TOP;
        return float_of(bits_of(magnitude(u32(size < 0 ? -size : size))) | (u32(size) & 0x80000000u));
    }
};

template <class ELEMENT, int TOP, int LARGEST>  // LARGEST: the largest element, in eighths
struct Microscaled : Layout<6, 32, 1, 64> {
    static __device__ __forceinline__ float entry(u32 code) { return ELEMENT::entry(code); }
    static __device__ __forceinline__ void encode(const Arguments&, u32, const float (&values)[kOctet], float,
                                                  u32 (&codes)[kOctet], Beside& beside) {
        const u32 top = most<4>(values);
        const bool broken = top >= kInfinity;
        const u32 exponent = (bits_of(floored(float_of(top) / (LARGEST / 8.0f))) + 0x7fffffu) >> 23;
        const float inverse = float_of((254 - exponent) << 23);  // exact, since the scale is a power of two
#pragma unroll
        for (int i = 0; i < kOctet; ++i) codes[i] = broken ? TOP : ELEMENT::code(values[i] * inverse);
        beside.words[0] = broken ? 255 : exponent;
    }
    static __device__ __forceinline__ void decode(u32, const u32 (&codes)[kOctet], const Beside& beside, float,
                                                  const float* table, float (&values)[kOctet]) {
        from_table(table, codes, power_of(u8(beside.words[0])), values);
    }
};

using MXFP6E2M3 = Microscaled<Small<3, 0, 31>, 31, 60>;
using MXFP6E3M2 = Microscaled<Small<2, -2, 31>, 31, 224>;

struct NVFP4 : Layout<4, 16, 1, 16, true> {
    using Element = Small<1, 0, 7>;
    using Scale = Small<3, -6, 126>;

    static __device__ __forceinline__ float entry(u32 code) { return Element::entry(code); }
    static __device__ __forceinline__ void encode(const Arguments&, u32, const float (&values)[kOctet], float row,
                                                  u32 (&codes)[kOctet], Beside& beside) {
        const float ratio = float_of(most<2>(values)) / 6.0f / row;
        const u32 pattern = ratio == ratio ? u32(Scale::pattern(bits_of(ratio))) : 0u;
        const float scale = Scale::magnitude(pattern) * row;
#pragma unroll
        for (int i = 0; i < kOctet; ++i) codes[i] = pattern == 0 ? 7u : Element::code(values[i] / scale);
        beside.words[0] = pattern;
    }
    static __device__ __forceinline__ void decode(u32, const u32 (&codes)[kOctet], const Beside& beside, float row,
                                                  const float* table, float (&values)[kOctet]) {
        from_table(table, codes, Scale::magnitude(beside.words[0]) * row, values);
    }
};

struct NF4 : Layout<4, 64, 4, 16> {
    static __device__ __forceinline__ float entry(u32 code) {
        constexpr float entries[16] = {
            -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
            -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
            0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
            0.7229568362236023f, 1.0f};
        float value = entries[0];
#pragma unroll
        for (int i = 1; i < 16; ++i) value = code == u32(i) ? entries[i] : value;
        return value;
    }
    static __device__ __forceinline__ u32 nearest(float quotient) {
        // For each entry of the table but the first: the smallest fp32 quotient that is encoded as this entry and not
        // as the entry before it.  A quotient is encoded as the nearer entry, where both distances are rounded to fp32.
        constexpr float from[15] = {
            -0x1.b239b0p-1f, -0x1.38a4e0p-1f, -0x1.d70900p-2f, -0x1.5bd4ecp-2f, -0x1.e079d8p-3f, -0x1.1a7176p-3f,
            -0x1.74f0e2p-5f, 0x1.45f600p-5f,  0x1.ec90c6p-4f,  0x1.a0cfc2p-3f,  0x1.2b05aap-2f,  0x1.8ea7f4p-2f,
            0x1.00da08p-1f,  0x1.491b60p-1f,  0x1.b913b4p-1f};
        u32 code = 0;
#pragma unroll
        for (int i = 0; i < 15; ++i) code += quotient >= from[i] ? 1u : 0u;
        return code;
    }
    static __device__ __forceinline__ void encode(const Arguments&, u32, const float (&values)[kOctet], float,
                                                  u32 (&codes)[kOctet], Beside& beside) {
        const u32 top = most<8>(values);
        const bool broken = top >= kInfinity;
        const float scale = floored(float_of(top));
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            const u32 code = nearest(values[i] / scale);
            codes[i] = broken ? 7u : code;
        }
        beside.words[0] = broken ? kNaN : bits_of(scale);
    }
    static __device__ __forceinline__ void decode(u32, const u32 (&codes)[kOctet], const Beside& beside, float,
                                                  const float* table, float (&values)[kOctet]) {
        from_table(table, codes, float_of(beside.words[0]), values);
    }
};

template <int BITS>
struct Spikes : Layout<BITS, 128, 10> {
    static constexpr int steps = (1 << BITS) - 1;

    static __device__ __forceinline__ u32 bf16(float value) {
        return Bf16::narrow_finite(saturated(value, Bf16::largest()));
    }
    // The place of the first element in the block that has `key`.
    static __device__ __forceinline__ u32 place_of(u32 key, u32 start, const u32 (&keys)[kOctet]) {
        u32 places[kOctet];
#pragma unroll
        for (int i = 0; i < kOctet; ++i) places[i] = keys[i] == key ? start + u32(i) : 128u;
        return lowest<16>(places);
    }
    static __device__ __forceinline__ void encode(const Arguments&, u32 octet, const float (&values)[kOctet], float,
                                                  u32 (&codes)[kOctet], Beside& beside) {
        const u32 start = octet % 16 * kOctet;
        u32 keys[kOctet];
#pragma unroll
        for (int i = 0; i < kOctet; ++i) keys[i] = ordered(bits_of(values[i] + 0.0f));  // -0 counts as 0
        const u32 bottom = lowest<16>(keys), top = highest<16>(keys);
        const bool broken = bottom <= ordered(kInfinity | 0x80000000u) || top >= ordered(kInfinity);
        const u32 least = place_of(bottom, start, keys), largest = place_of(top, start, keys);
        u32 spikes = 0, mask = 0;  // values of the spikes, and which elements of this octet are spikes
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            const bool first = start + u32(i) == least, second = start + u32(i) == largest;
            spikes |= (first ? bf16(values[i]) : 0u) | (second ? bf16(values[i]) << 16 : 0u);
            if (first || second) keys[i] = ~0u;
            if (first || second) mask |= 1u << i;
        }
        spikes = joined<16>(spikes, [](u32 a, u32 b) { return a | b; });
        const u32 low = bf16(float_of(unordered(lowest<16>(keys))));
#pragma unroll
        for (int i = 0; i < kOctet; ++i)
            if ((mask >> i & 1u) != 0) keys[i] = 0;
        const float high = float_of(unordered(highest<16>(keys))), begin = Bf16::widen(u16(low));
        const float step = high / steps - begin / steps;
        const u32 stored = bf16(step < 0.0f ? 0.0f : step);
        const float divisor = floored(Bf16::widen(u16(stored)) / 2.0f);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            float quotient = (values[i] / 2.0f - begin / 2.0f) / divisor;
            quotient = quotient > 0.0f ? quotient : 0.0f;
            quotient = quotient < float(steps) ? quotient : float(steps);
            const u32 code = bits_of(quotient + kRound) - bits_of(kRound);
            codes[i] = broken || (mask >> i & 1u) != 0 ? 0u : code;
        }
        constexpr u32 nan = kNaN >> 16;
        beside.words[0] = broken ? nan << 16 : least | largest << 8 | spikes << 16;
        beside.words[1] = broken ? kNaN | nan : spikes >> 16 | low << 16;
        beside.words[2] = broken ? nan : stored;
    }
    static __device__ __forceinline__ void decode(u32 octet, const u32 (&codes)[kOctet], const Beside& beside, float,
                                                  const float*, float (&values)[kOctet]) {
        const u32(&words)[3] = beside.words;
        const float low = Bf16::widen(u16(words[1] >> 16)) / 2.0f, step = Bf16::widen(u16(words[2])) / 2.0f;
        const float first = Bf16::widen(u16(words[0] >> 16)), second = Bf16::widen(u16(words[1]));
        const u32 least = words[0] % 128, largest = (words[0] >> 8) % 128;
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            const u32 place = octet % 16 * kOctet + u32(i);
            const float value = (float(int(codes[i])) * step + low) * 2.0f;
            values[i] = place == largest ? second : place == least ? first : value;
        }
    }
};

using Spike2 = Spikes<2>;
using Spike3 = Spikes<3>;

struct Sign1 : Layout<1, 128, 4> {
    // Returns the sum of a block's magnitudes.  The second half of the block is added to the first half, element by
    // element.  The sums are halved and added in the same way, until one is left.  If the halves are in two threads,
    // each of these threads computes and keeps one half of the new sums.
    static __device__ __forceinline__ double sum(u32 octet, const float (&values)[kOctet]) {
        double sums[kOctet];
#pragma unroll
        for (int i = 0; i < kOctet; ++i) sums[i] = double(magnitude(values[i]));
#pragma unroll
        for (int distance = 8, half = 4; half > 0; distance /= 2, half /= 2) {
            const bool upper = (octet & u32(distance)) != 0;
#pragma unroll
            for (int i = 0; i < half; ++i) {
                const double given = upper ? sums[i] : sums[i + half];
                sums[i] = (upper ? sums[i + half] : sums[i]) + __shfl_xor_sync(kWarp, given, lanes_apart(distance));
            }
        }
        sums[0] += __shfl_xor_sync(kWarp, sums[0], lanes_apart(1));
#pragma unroll
        for (int distance = 8; distance > 1; distance /= 2)
            sums[0] += __shfl_xor_sync(kWarp, sums[0], lanes_apart(distance));
        return sums[0];
    }
    static __device__ __forceinline__ void encode(const Arguments&, u32 octet, const float (&values)[kOctet], float,
                                                  u32 (&codes)[kOctet], Beside& beside) {
        const u32 mean = bits_of(float(sum(octet, values) * (1.0 / size)));
        beside.words[0] = mean < kInfinity ? mean : kNaN;
#pragma unroll
        for (int i = 0; i < kOctet; ++i) codes[i] = values[i] < 0.0f ? 1u : 0u;
    }
    static __device__ __forceinline__ void decode(u32, const u32 (&codes)[kOctet], const Beside& beside, float,
                                                  const float*, float (&values)[kOctet]) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) values[i] = float_of(beside.words[0] ^ codes[i] << 31);
    }
};

struct BF16SR : Layout<16, 8, 0> {
    static constexpr bool infinities = true;

    static __device__ __forceinline__ void encode(const Arguments& a, u32 octet, const float (&values)[kOctet], float,
                                                  u32 (&codes)[kOctet], Beside&) {
        const Words random = philox(a.noise.key, u64(a.noise.start + row_offset(a, a.noise.stride) + i64(octet)));
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            const u32 word = bits_of(values[i]), size = word & kAbs, pair = random.word[i / 2];
            const u32 added = bits_of(saturated(values[i], Bf16::largest())) + (i % 2 == 0 ? pair & 0xffffu : pair >> 16);
            codes[i] = (size < kInfinity ? added : size == kInfinity ? word : kNaN) >> 16;
        }
    }
    static __device__ __forceinline__ void decode(u32, const u32 (&codes)[kOctet], const Beside&, float, const float*,
                                                  float (&values)[kOctet]) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) values[i] = Bf16::widen(u16(codes[i]));
    }
};

// ---- the codes and the blocks' further bytes in the frame -----------------------------------------------

// Codes of 16 bits are stored as octets 2 * octet and 2 * octet + 1 of 8 bits.
template <class F>
__device__ __forceinline__ void store_format(u8* frame, bool vectors, u32 octet, int count, u32 (&codes)[kOctet]) {
#pragma unroll
    for (int i = 1; i < kOctet; ++i)
        if (i >= count) codes[i] = 0;  // bits beyond the row must be 0
    if constexpr (F::bits == 16) {
        const u64 low = codes[0] | codes[1] << 16 | u64(codes[2] | codes[3] << 16) << 32;
        const u64 high = codes[4] | codes[5] << 16 | u64(codes[6] | codes[7] << 16) << 32;
        store_codes(frame, vectors, 8, 2 * octet, count < 4 ? 2 * count : kOctet, low);
        store_codes(frame, vectors, 8, 2 * octet + 1, count < 4 ? 0 : 2 * count - kOctet, high);
    } else {
        store_codes(frame, vectors, F::bits, octet, count, packed<F::bits>(codes));
    }
}

template <class F>
__device__ __forceinline__ void load_format(const u8* frame, bool vectors, u32 octet, int count,
                                            u32 (&codes)[kOctet]) {
    if constexpr (F::bits == 16) {
        const u64 low = load_codes(frame, vectors, 8, 2 * octet, count < 4 ? 2 * count : kOctet);
        const u64 high = load_codes(frame, vectors, 8, 2 * octet + 1, count < 4 ? 0 : 2 * count - kOctet);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) codes[i] = u32((i < 4 ? low : high) >> (i % 4 * 16)) & 0xffffu;
    } else {
        unpacked<F::bits>(load_codes(frame, vectors, F::bits, octet, count), codes);
    }
}

// `aligned`: whether `to` is aligned to 4 bytes, or to 2 if there are 10 bytes.
template <int BYTES>
__device__ __forceinline__ void store_beside(u8* to, bool aligned, const Beside& beside) {
    const u32(&words)[3] = beside.words;
    if (BYTES == 4 && aligned) {
        *reinterpret_cast<u32*>(to) = words[0];
    } else if (BYTES == 10 && aligned) {
#pragma unroll
        for (int i = 0; i < 5; ++i) reinterpret_cast<u16*>(to)[i] = u16(words[i / 2] >> (i % 2 * 16));
    } else {
#pragma unroll
        for (int i = 0; i < BYTES; ++i) to[i] = u8(words[i / 4] >> (i % 4 * 8));
    }
}

template <int BYTES>
__device__ __forceinline__ Beside load_beside(const u8* from, bool aligned) {
    Beside beside{};
    u32(&words)[3] = beside.words;
    if (BYTES == 4 && aligned) {
        words[0] = *reinterpret_cast<const u32*>(from);
    } else if (BYTES == 10 && aligned) {
#pragma unroll
        for (int i = 0; i < 5; ++i) words[i / 2] |= u32(reinterpret_cast<const u16*>(from)[i]) << (i % 2 * 16);
    } else {
#pragma unroll
        for (int i = 0; i < BYTES; ++i) words[i / 4] |= u32(from[i]) << (i % 4 * 8);
    }
    return beside;
}

// Where the blocks' further bytes begin in a frame, and whether they are aligned.
template <class F>
__device__ __forceinline__ i64 codes_end(const Arguments& a) {
    return (i64(a.numel) * F::bits + 7) / 8;
}

template <class F, bool MAIN>
__device__ __forceinline__ bool aligned(const Arguments& a, i64 at) {
    const bool off = at % (F::beside == 10 ? 2 : 4) != 0;
    return MAIN ? !rare(off) : a.frames.vectors != 0 && !off;
}

// ---- rows ----------------------------------------------------------------------------------------------

// The fp32 scale of an NVFP4 row, from its largest magnitude.
__device__ __forceinline__ float row_extent(const Arguments& a) {
    const u32 top = reinterpret_cast<const u32*>(a.extents)[2 * (i64(blockIdx.z) * gridDim.y + blockIdx.y)];
    return top >= kInfinity ? float_of(kNaN) : floored(float_of(top) / 2688.0f);
}

// Encodes one octet.  MAIN: this is the main path.
template <class F, class T, bool MAIN>
__device__ __forceinline__ void encode_one(const Arguments& a, const u8* row, u8* frame, float of_row, u32 octet) {
    const bool vectors = MAIN || a.values.vectors != 0;
    const int count = MAIN ? kOctet : octet_count(octet, a.numel);
    const bool together = MAIN || octet_count(octet | 31, a.numel) == kOctet;
    float values[kOctet];
    widen_octet(load_octet<T>(row, a.values, vectors, octet, count, together, 16), values);
    if (!MAIN && count < kOctet) {
        const u32 last = (a.numel - 1) / kOctet;
        const int end = octet_count(last, a.numel);
        float ending[kOctet], repeated = 0.0f;
        widen_octet(load_octet<T>(row, a.values, vectors, last, end, false, 16), ending);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) repeated = i == end - 1 ? ending[i] : repeated;
#pragma unroll
        for (int i = 0; i < kOctet; ++i) values[i] = i < count ? values[i] : repeated;
    }
    u32 codes[kOctet];
    Beside beside{};
    F::encode(a, octet, values, of_row, codes, beside);
    if (count > 0) {
        store_format<F>(frame, MAIN || a.frames.vectors != 0, octet, count, codes);
        if constexpr (F::beside != 0) {
            const i64 at = codes_end<F>(a);
            const u32 block = octet / F::team;
            const bool even = aligned<F, MAIN>(a, at);
            if (octet % F::team == 0) store_beside<F::beside>(frame + at + i64(block) * F::beside, even, beside);
        }
    }
}

template <class F, class T>
__global__ void __launch_bounds__(256, 4) encode_format(const Arguments a) {
    const u8* row = row_start(a, a.values);
    u8* frame = row_start(a, a.frames);
    float of_row = 0.0f;
    if constexpr (F::whole) of_row = row_extent(a);
    if (blockIdx.x == 0) {
        store_padding(frame, a.coding, int(threadIdx.x));
        if (F::whole && threadIdx.x == 0) store_float(frame + a.coding.scales_end - 4, false, of_row);
    }
    u32 first = blockIdx.x * 256;
#pragma unroll 1
    for (u32 turn = 0; turn < a.loops; ++turn, first += gridDim.x * 256) {
        if (whole(a, first + 256)) {
            encode_one<F, T, true>(a, row, frame, of_row, first + slot());
        } else {
            encode_one<F, T, false>(a, row, frame, of_row, first + slot());
        }
    }
}

template <class F, class T, bool MAIN>
__device__ __forceinline__ void decode_one(const Arguments& a, const u8* frame, u8* row, const float* table,
                                           u32 octet) {
    const bool vectors = MAIN || a.frames.vectors != 0;
    const int count = MAIN ? kOctet : octet_count(octet, a.numel);
    const bool together = MAIN || octet_count(octet | 31, a.numel) == kOctet;
    constexpr bool kSums = sizeof(typename T::Word) == 4;
    const i64 at = codes_end<F>(a);
    float sums[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) sums[i] = -0.0f;  // adding it to the first term changes no sign of a zero
#pragma unroll 1
    for (u32 source = 0; source < (count == 0 ? 0u : kSums ? a.sources : 1u); ++source, frame += a.source_stride) {
        u32 codes[kOctet];
        Beside beside{};
        float of_row = 0.0f, values[kOctet];
        load_format<F>(frame, vectors, octet, count, codes);
        if constexpr (F::beside != 0) {
            const u8* from = frame + at + i64(octet / F::team) * F::beside;
            beside = load_beside<F::beside>(from, aligned<F, MAIN>(a, at));
        }
        if constexpr (F::whole) {
            const i64 end = a.coding.scales_end - 4;
            of_row = load_float(frame + end, aligned<F, MAIN>(a, end));
        }
        F::decode(octet, codes, beside, of_row, table, values);
#pragma unroll
        for (int i = 0; i < kOctet; ++i)
            sums[i] = sums[i] + (F::infinities ? values[i] : saturated(values[i], Fp32::largest()));
    }
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
        const bool infinite = F::infinities && (bits_of(sums[i]) & kAbs) == kInfinity;
        if (!kSums && !infinite) sums[i] = saturated(sums[i], T::largest());
    }
    store_octet<T>(row, a.values, MAIN || a.values.vectors != 0, octet, count, together, sums);
}

template <class F, class T>
__global__ void __launch_bounds__(256, 4) decode_format(const Arguments a) {
    __shared__ float table[F::entries != 0 ? F::entries : 1];
    if constexpr (F::entries != 0) {
        if (threadIdx.x < F::entries) table[threadIdx.x] = F::entry(threadIdx.x);
        __syncthreads();
    }
    const u8* frame = row_start(a, a.frames);
    u8* row = row_start(a, a.values);
    u32 first = blockIdx.x * 256;
#pragma unroll 1
    for (u32 turn = 0; turn < a.loops; ++turn, first += gridDim.x * 256) {
        if (whole(a, first + 256)) {
            decode_one<F, T, true>(a, frame, row, table, first + slot());
        } else {
            decode_one<F, T, false>(a, frame, row, table, first + slot());
        }
    }
}
