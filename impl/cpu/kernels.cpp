// The integer codecs on the host: encode, decode, decode_sum and decode_sum_encode over batches of
// strided rows, as plain C functions of one structure (`Job`, mirrored by kernels.py).
//
// The arithmetic of one value and one scale is ../cuda/codec.cuh; here are the loops, written so that
// compilers vectorise them.  A row is worked in pieces that stay in the first-level cache: a piece's
// codes are bytes in a small buffer between rounding and packing.  Only packing knows the width when
// it is compiled.  Never built with -ffast-math: NaN, denormals and the order of operations count.
#include "../cuda/codec.cuh"

#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

using namespace codec;

namespace {

constexpr i64 kPiece = 2048;    // elements whose codes wait for packing: whole octets
constexpr i64 kGroup = 256;     // elements that share one test for ties
constexpr i64 kHeld = 1 << 15;  // fp32 sums kept for a second look; beyond, they are summed twice
constexpr i64 kAhead = 1 << 14;  // elements of the largest block whose successor is fetched meanwhile
constexpr i64 kTogether = 256;  // small blocks that are encoded together
constexpr int kDims = 8;

struct Plane {  // rows of one tensor
    i64 address, strides[kDims];  // bytes
};

struct Code {
    i64 bits, asymmetric, block, blocks, codes_end, scales_at, frame_bytes;
};

struct Job {
    i64 numel, kind;  // kind: 0 fp32, 1 bf16, 2 fp16
    i64 dims, sizes[kDims];
    i64 sources, source_stride;
    Plane values, frames, output;
    Code coding, second;
};

using Any = Scheme<0>;

Any scheme_of(const Code& code, bool asymmetric) { return {int(code.bits), asymmetric}; }

i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// ---- rows --------------------------------------------------------------------------------------

template <class Body>
void each_row(const Job& job, const Plane& a, const Plane& b, Body body) {
    i64 at[kDims] = {}, first = a.address, second = b.address;
    while (true) {
        body(first, second);
        i64 dim = job.dims - 1;
        for (; dim >= 0; --dim) {
            first += a.strides[dim];
            second += b.strides[dim];
            if (++at[dim] < job.sizes[dim]) break;
            first -= a.strides[dim] * at[dim];
            second -= b.strides[dim] * at[dim];
            at[dim] = 0;
        }
        if (dim < 0) return;
    }
}

// ---- packing: codes as bytes to a little-endian stream of bits, and back ---------------------------

// Neighbours join pairwise, three times: 8 fields of BITS in bytes become one of 8 * BITS.
template <int BITS>
void pack(const u8* __restrict codes, u8* __restrict out, i64 count) {
    if constexpr (BITS == 8) {
        std::memcpy(out, codes, std::size_t(count));
    } else if constexpr (BITS == 4) {
        for (i64 i = 0; i < count / 2; ++i) {
            u16 pair;
            std::memcpy(&pair, codes + 2 * i, 2);
            out[i] = u8(pair | pair >> 4);
        }
        if (count % 2) out[count / 2] = codes[count - 1];
    } else {
        const auto joined = [](const u8* from) {
            u64 word;
            std::memcpy(&word, from, 8);
            word = (word & 0x00ff00ff00ff00ffull) | (word & 0xff00ff00ff00ff00ull) >> (8 - BITS);
            word = (word & 0x0000ffff0000ffffull) | (word & 0xffff0000ffff0000ull) >> (16 - 2 * BITS);
            return (word & 0x00000000ffffffffull) | (word & 0xffffffff00000000ull) >> (32 - 4 * BITS);
        };
        // Eight bytes are written for BITS: what is too much, the next octet overwrites.
        const i64 bytes = (count * BITS + 7) / 8;
        i64 i = 0;
        for (; BITS * i + 8 <= bytes; ++i) {
            const u64 word = joined(codes + 8 * i);
            std::memcpy(out + BITS * i, &word, 8);
        }
        for (; 8 * i < count; ++i) {
            u8 last[8] = {};
            std::memcpy(last, codes + 8 * i, std::size_t(smaller(8, count - 8 * i)));
            const u64 word = joined(last);
            std::memcpy(out + BITS * i, &word, std::size_t(smaller(BITS, bytes - BITS * i)));
        }
    }
}

// Reads up to 7 bytes beyond the codes: a frame has its scales there.
template <int BITS>
void unpack(const u8* __restrict in, u8* __restrict codes, i64 count) {
    if constexpr (BITS == 8) {
        std::memcpy(codes, in, std::size_t(count));
    } else if constexpr (BITS == 4) {
        for (i64 i = 0; i < count / 2; ++i) {
            const u16 pair = u16((in[i] | in[i] << 4) & 0x0f0f);
            std::memcpy(codes + 2 * i, &pair, 2);
        }
        if (count % 2) codes[count - 1] = in[count / 2] & 15;
    } else {
        const auto spread = [](u64 word) {
            constexpr u64 quad = (1ull << (4 * BITS)) - 1, pair = (1ull << (2 * BITS)) - 1, one = (1ull << BITS) - 1;
            word = (word & quad) | (word & quad << (4 * BITS)) << (32 - 4 * BITS);
            constexpr u64 pairs = pair | pair << 32, ones = one | one << 16 | one << 32 | one << 48;
            word = (word & pairs) | (word & pairs << (2 * BITS)) << (16 - 2 * BITS);
            return (word & ones) | (word & ones << BITS) << (8 - BITS);
        };
        for (i64 i = 0; i < count / 8; ++i) {
            u64 word;
            std::memcpy(&word, in + BITS * i, 8);
            word = spread(word);
            std::memcpy(codes + 8 * i, &word, 8);
        }
        if (const i64 rest = count % 8) {
            u64 word;
            std::memcpy(&word, in + count / 8 * BITS, 8);
            word = spread(word);
            std::memcpy(codes + count - rest, &word, std::size_t(rest));
        }
    }
}

void pack(i64 bits, const u8* codes, u8* out, i64 count) {
    switch (bits) {
        case 2: return pack<2>(codes, out, count);
        case 3: return pack<3>(codes, out, count);
        case 4: return pack<4>(codes, out, count);
        case 5: return pack<5>(codes, out, count);
        case 6: return pack<6>(codes, out, count);
        case 7: return pack<7>(codes, out, count);
        default: return pack<8>(codes, out, count);
    }
}

void unpack(i64 bits, const u8* in, u8* codes, i64 count) {
    switch (bits) {
        case 2: return unpack<2>(in, codes, count);
        case 3: return unpack<3>(in, codes, count);
        case 4: return unpack<4>(in, codes, count);
        case 5: return unpack<5>(in, codes, count);
        case 6: return unpack<6>(in, codes, count);
        case 7: return unpack<7>(in, codes, count);
        default: return unpack<8>(in, codes, count);
    }
}

// ---- scales as the frame stores them -----------------------------------------------------------

Stored load(const Code& code, const u8* frame, i64 block) {
    Stored stored{0.0f, 0.0f};
    const u8* scales = frame + code.scales_at;
    std::memcpy(&stored.scale, scales + 4 * block, 4);
    if (code.asymmetric) std::memcpy(&stored.low, scales + 4 * (code.blocks + block), 4);
    return stored;
}

void store(const Code& code, u8* frame, i64 block, Stored stored) {
    u8* scales = frame + code.scales_at;
    std::memcpy(scales + 4 * block, &stored.scale, 4);
    if (code.asymmetric) std::memcpy(scales + 4 * (code.blocks + block), &stored.low, 4);
}

void clear_padding(const Code& code, u8* frame) {
    const i64 end = code.scales_at + 4 * code.blocks * (code.asymmetric ? 2 : 1);
    std::memset(frame + code.codes_end, 0, std::size_t(code.scales_at - code.codes_end));
    std::memset(frame + end, 0, std::size_t(code.frame_bytes - end));
}

// ---- values to codes ---------------------------------------------------------------------------

// The largest key of a block.  Without an offset the stored words' magnitudes order as the numbers
// do, so 16-bit words are compared as they are.
template <class T, bool ASYMMETRIC>
Extent extent(const typename T::Word* __restrict values, i64 count) {
    using Word = typename T::Word;
    if constexpr (ASYMMETRIC) {
        u32 high = 0, low = 0;
        for (i64 i = 0; i < count; ++i) {
            const u32 key = ordered(bits_of(T::widen(values[i])));
            high = key > high ? key : high;
            low = ~key > low ? ~key : low;
        }
        return {high, low};
    } else {
        constexpr Word magnitude = Word(Word(~Word(0)) >> 1);
        Word most = 0;
        for (i64 i = 0; i < count; ++i) {
            const Word word = values[i] & magnitude;
            most = word > most ? word : most;
        }
        return {bits_of(T::widen(most)) & kAbs, 0};
    }
}

// The pattern whose low bits are the code.  Without an offset no quotient of a finite block passes the
// ends by more than a rounding.  With one none is negative, and the scale may be so much rounded that
// quotients are huge: their patterns order as they do.
template <bool ASYMMETRIC>
u32 clamped_pattern(Any scheme, float quotient) {
    const u32 bits = bits_of(quotient + kRound), most = bits_of(kRound + scheme.last());
    return ASYMMETRIC && bits > most ? most : bits;
}

// The same from the bracket, and in `doubt` whether its ends differ.
template <bool ASYMMETRIC>
inline __attribute__((always_inline)) u32 bracketed_pattern(
    Any scheme, Divider divider, Bracket bracket, float value, u32& doubt) {
    const float numerator = numerator_of(scheme, divider, value);
    const u32 low = clamped_pattern<ASYMMETRIC>(scheme, numerator * bracket.low);
    const u32 high = clamped_pattern<ASYMMETRIC>(scheme, numerator * bracket.high);
    doubt |= low ^ high;
    return low;
}

// Asks for memory, which need not exist.
template <class Word>
void fetch(const Word* values, i64 count) {
    const auto* bytes = reinterpret_cast<const char*>(values);
    for (i64 at = 0; at < count * i64(sizeof(Word)); at += 64) __builtin_prefetch(bytes + at);
}

// Codes of a few values that share a scale, by products; returns 0 where none is in doubt.
template <class T, bool ASYMMETRIC>
inline __attribute__((always_inline)) u32 multiply_group(
    Any scheme, Divider divider, const typename T::Word* __restrict values, u8* __restrict codes, i64 count) {
    const Bracket bracket = bracket_of(divider);
    const u8 mask = u8((1u << scheme.bits()) - 1u);
    u32 doubt = 0;
    i64 first = 0;
    if constexpr (std::is_same_v<T, Bf16>) {  // two in a word: halves need no shuffles to become fp32
        for (i64 i = 0; i < count / 2; ++i) {
            u32 both;
            std::memcpy(&both, values + 2 * i, 4);
            const float left = float_of(both << 16), right = float_of(both & 0xffff0000u);
            const u32 even = bracketed_pattern<ASYMMETRIC>(scheme, divider, bracket, left, doubt);
            const u32 odd = bracketed_pattern<ASYMMETRIC>(scheme, divider, bracket, right, doubt);
            const u16 pair = u16(u16((even & 0xffu) | odd << 8) & u16(mask | mask << 8));
            std::memcpy(codes + 2 * i, &pair, 2);
        }
        first = count / 2 * 2;
    }
    for (i64 i = first; i < count; ++i) {
        codes[i] = u8(bracketed_pattern<ASYMMETRIC>(scheme, divider, bracket, T::widen(values[i]), doubt)) & mask;
    }
    return doubt;
}

// The same by divisions.
template <class T, bool ASYMMETRIC>
__attribute__((noinline)) void divide_group(
    Any scheme, Divider divider, const typename T::Word* __restrict values, u8* __restrict codes, i64 count) {
    scheme.asymmetric = ASYMMETRIC;
    const u8 mask = u8((1u << scheme.bits()) - 1u);
    for (i64 i = 0; i < count; ++i) {
        const float numerator = numerator_of(scheme, divider, T::widen(values[i]));
        codes[i] = u8(clamped_pattern<ASYMMETRIC>(scheme, numerator / divider.divisor)) & mask;
    }
}

// A group by products, and by divisions where they leave doubt.
template <class T, bool ASYMMETRIC>
inline __attribute__((always_inline)) void round_group(
    Any scheme, Divider divider, const typename T::Word* values, u8* codes, i64 count) {
    if (multiply_group<T, ASYMMETRIC>(scheme, divider, values, codes, count) != 0) {
        divide_group<T, ASYMMETRIC>(scheme, divider, values, codes, count);
    }
}

// Meanwhile fetches what lies `ahead` elements on, where that is not 0: memory would otherwise rest
// while a block that has been fetched is rounded.
template <class T, bool ASYMMETRIC>
void round_values(Any scheme, Stored stored, const typename T::Word* values, i64 ahead, u8* codes, i64 count) {
    if (stored.broken()) {
        std::memset(codes, 0, std::size_t(count));
        return;
    }
    scheme.asymmetric = ASYMMETRIC;
    const Divider divider = divider_of(scheme, stored);
    i64 at = 0;
    for (; at + kGroup <= count; at += kGroup) {
        if (ahead != 0) fetch(values + at + ahead, kGroup);
        round_group<T, ASYMMETRIC>(scheme, divider, values + at, codes + at, kGroup);
    }
    if (at == count) return;
    if (ahead != 0) fetch(values + at + ahead, count - at);
    round_group<T, ASYMMETRIC>(scheme, divider, values + at, codes + at, count - at);
}

// Writes a row's frame.  `next` brings the values of [begin, end), wherever it keeps them, at most
// `whole` at once, so that a block of that size is there for both looks; those that lie in order as
// they are can be fetched `ahead`.  Small blocks go together:
// then the long chain from a block's maximum to its divisor overlaps with its neighbours'.
template <class T, bool ASYMMETRIC, class Next>
void encode_row(const Code& code, i64 numel, i64 whole, bool in_order, u8* frame, Next next) {
    const Any scheme = scheme_of(code, ASYMMETRIC);
    const bool direct = code.bits == 8;
    const i64 together = code.block < kPiece ? smaller(kPiece / code.block, kTogether) : 1;
    const bool held = together * code.block <= whole;
    const i64 ahead = !in_order ? 0 : together * code.block <= kAhead ? together * code.block : kPiece;
    alignas(64) u8 codes[kPiece];
    Stored stored[kTogether];
    i64 packed = 0;  // elements whose codes stand in the frame
    for (i64 first = 0; first < code.blocks; first += together) {
        const i64 blocks = smaller(together, code.blocks - first);
        const i64 begin = first * code.block, end = smaller(begin + blocks * code.block, numel);
        const typename T::Word* values = held ? next(begin, end) : nullptr;
        for (i64 block = 0; block < blocks; ++block) {
            const i64 start = begin + block * code.block, stop = smaller(start + code.block, end);
            Extent most{0, 0};
            if (held) {
                most = extent<T, ASYMMETRIC>(values + (start - begin), stop - start);
            } else {
                for (i64 at = start; at < stop; at += kPiece) {
                    const i64 next_at = smaller(at + kPiece, stop);
                    most.include(extent<T, ASYMMETRIC>(next(at, next_at), next_at - at));
                }
            }
            stored[block] = stored_of(scheme, most);
            store(code, frame, first + block, stored[block]);
        }
        for (i64 block = 0, at = begin; block < blocks; ++block) {
            const i64 stop = smaller(begin + (block + 1) * code.block, end);
            while (at < stop) {
                i64 until = direct ? stop : smaller(packed + kPiece, stop);
                until = held ? until : smaller(at + kPiece, until);
                const typename T::Word* from = held ? values + (at - begin) : next(at, until);
                u8* to = direct ? frame + at : codes + (at - packed);
                round_values<T, ASYMMETRIC>(scheme, stored[block], from, ahead, to, until - at);
                at = until;
                if (!direct && at == packed + kPiece) {
                    pack(code.bits, codes, frame + packed / 8 * code.bits, kPiece);
                    packed += kPiece;
                }
            }
        }
    }
    if (!direct && packed < numel) pack(code.bits, codes, frame + packed / 8 * code.bits, numel - packed);
    clear_padding(code, frame);
}

template <class T>
void encode_rows(const Job& job) {
    using Word = typename T::Word;
    each_row(job, job.values, job.frames, [&](i64 from, i64 to) {
        const auto* values = reinterpret_cast<const Word*>(from);
        const auto next = [&](i64 begin, i64) { return values + begin; };
        auto* frame = reinterpret_cast<u8*>(to);
        if (job.coding.asymmetric) {
            encode_row<T, true>(job.coding, job.numel, job.numel, true, frame, next);
        } else {
            encode_row<T, false>(job.coding, job.numel, job.numel, true, frame, next);
        }
    });
}

// ---- codes to values, and their sums -----------------------------------------------------------

constexpr int kSources = 4;  // added in one go

// One block, or its part, of several frames.
struct Terms {
    const u8* codes[kSources];
    Stored stored[kSources];
};

// Values of `COUNT` terms, in order, after what `out` holds (ADD) or alone.
template <class T, bool ASYMMETRIC, bool SATURATE, int COUNT, bool ADD>
void sum_terms(Any scheme, const Terms& terms, typename T::Word* __restrict out, i64 count) {
    scheme.asymmetric = ASYMMETRIC;
    const float largest = T::largest();
    const u8 *__restrict a = terms.codes[0], *__restrict b = terms.codes[COUNT > 1 ? 1 : 0];
    const u8 *__restrict c = terms.codes[COUNT > 2 ? 2 : 0], *__restrict d = terms.codes[COUNT > 3 ? 3 : 0];
    const Stored sa = terms.stored[0], sb = terms.stored[COUNT > 1 ? 1 : 0];
    const Stored sc = terms.stored[COUNT > 2 ? 2 : 0], sd = terms.stored[COUNT > 3 ? 3 : 0];
    const auto one = [&](Stored stored, u32 code) {
        const float exact = value_of(scheme, stored, code);
        return SATURATE ? saturated(exact, largest) : exact;
    };
    for (i64 i = 0; i < count; ++i) {
        float sum = one(sa, a[i]);
        if (ADD) sum = T::widen(out[i]) + sum;
        if (COUNT > 1) sum += one(sb, b[i]);
        if (COUNT > 2) sum += one(sc, c[i]);
        if (COUNT > 3) sum += one(sd, d[i]);
        out[i] = SATURATE ? T::narrow(sum) : T::narrow_finite(sum);
    }
}

template <class T, int COUNT, bool ADD>
void sum_terms(Any scheme, const Terms& terms, typename T::Word* out, i64 count) {
    bool safe = true;
    for (int term = 0; term < COUNT; ++term) safe = safe && within(terms.stored[term], T::largest());
    if (scheme.asymmetric) {
        if (safe) sum_terms<T, true, false, COUNT, ADD>(scheme, terms, out, count);
        else sum_terms<T, true, true, COUNT, ADD>(scheme, terms, out, count);
    } else {
        if (safe) sum_terms<T, false, false, COUNT, ADD>(scheme, terms, out, count);
        else sum_terms<T, false, true, COUNT, ADD>(scheme, terms, out, count);
    }
}

// Values [begin, end) of `COUNT` frames, `stride` bytes apart; begin is a multiple of 8, and at most
// kPiece elements follow.
template <class T, int COUNT, bool ADD>
void sum_piece(const Code& code, const u8* frame, i64 stride, i64 begin, i64 end, typename T::Word* out) {
    const Any scheme = scheme_of(code, code.asymmetric != 0);
    alignas(64) u8 buffer[COUNT][kPiece];
    const u8* codes[COUNT];
    for (int term = 0; term < COUNT; ++term) {
        const u8* packed = frame + term * stride + begin / 8 * code.bits;
        if (code.bits != 8) unpack(code.bits, packed, buffer[term], end - begin);
        codes[term] = code.bits != 8 ? buffer[term] : packed;
    }
    i64 block = begin / code.block;
    for (i64 at = begin; at < end; ++block) {
        const i64 stop = smaller((block + 1) * code.block, end);
        Terms terms;
        for (int term = 0; term < COUNT; ++term) {
            terms.codes[term] = codes[term] + (at - begin);
            terms.stored[term] = load(code, frame + term * stride, block);
        }
        sum_terms<T, COUNT, ADD>(scheme, terms, out + (at - begin), stop - at);
        at = stop;
    }
}

template <class T>
void decode_rows(const Job& job) {
    each_row(job, job.values, job.frames, [&](i64 to, i64 from) {
        auto* out = reinterpret_cast<typename T::Word*>(to);
        const auto* frame = reinterpret_cast<const u8*>(from);
        for (i64 at = 0; at < job.numel; at += kPiece) {
            sum_piece<T, 1, false>(job.coding, frame, 0, at, smaller(at + kPiece, job.numel), out + at);
        }
    });
}

// The sum over sources, in ascending order, of [begin, end); begin is a multiple of 8.
void sum_sources(const Job& job, i64 frames, i64 begin, i64 end, u32* out) {
    const Code& code = job.coding;
    const i64 stride = job.source_stride;
    for (i64 at = begin; at < end; at += kPiece) {
        const i64 stop = smaller(at + kPiece, end);
        const auto* frame = reinterpret_cast<const u8*>(frames);
        u32* to = out + (at - begin);
        i64 left = job.sources;
        if (left >= 4) {
            sum_piece<Fp32, 4, false>(code, frame, stride, at, stop, to);
            left -= 4, frame += 4 * stride;
        } else if (left >= 2) {
            sum_piece<Fp32, 2, false>(code, frame, stride, at, stop, to);
            left -= 2, frame += 2 * stride;
        } else {
            sum_piece<Fp32, 1, false>(code, frame, stride, at, stop, to);
            left -= 1, frame += stride;
        }
        for (; left >= 4; left -= 4, frame += 4 * stride) {
            sum_piece<Fp32, 4, true>(code, frame, stride, at, stop, to);
        }
        for (; left >= 1; --left, frame += stride) {
            sum_piece<Fp32, 1, true>(code, frame, stride, at, stop, to);
        }
    }
}

template <bool ASYMMETRIC>
void sum_encode_rows(const Job& job, u32* held) {
    each_row(job, job.frames, job.output, [&](i64 from, i64 to) {
        // Sums come in whole octets, so a piece that begins inside one begins before it.
        const auto next = [&](i64 begin, i64 end) -> const u32* {
            const i64 first = begin / 8 * 8;
            sum_sources(job, from, first, smaller((end + 7) / 8 * 8, job.numel), held);
            return held + (begin - first);
        };
        encode_row<Fp32, ASYMMETRIC>(job.second, job.numel, kHeld, false, reinterpret_cast<u8*>(to), next);
    });
}

}  // namespace

// Each returns 0, or 1 where memory ran out.
extern "C" {

__attribute__((visibility("default"))) i64 job_bytes() { return i64(sizeof(Job)); }

__attribute__((visibility("default"))) int encode(const Job* job) {
    if (job->kind == 0) encode_rows<Fp32>(*job);
    else if (job->kind == 1) encode_rows<Bf16>(*job);
    else encode_rows<Fp16>(*job);
    return 0;
}

__attribute__((visibility("default"))) int decode(const Job* job) {
    if (job->kind == 0) decode_rows<Fp32>(*job);
    else if (job->kind == 1) decode_rows<Bf16>(*job);
    else decode_rows<Fp16>(*job);
    return 0;
}

__attribute__((visibility("default"))) int decode_sum(const Job* job) {
    each_row(*job, job->values, job->frames, [&](i64 to, i64 from) {
        sum_sources(*job, from, 0, job->numel, reinterpret_cast<u32*>(to));
    });
    return 0;
}

__attribute__((visibility("default"))) int decode_sum_encode(const Job* job) {
    const i64 most = smaller(job->second.block, kHeld);
    const std::unique_ptr<u32[]> held(new (std::nothrow) u32[std::size_t(most + kPiece)]);
    if (!held) return 1;
    if (job->second.asymmetric) sum_encode_rows<true>(*job, held.get());
    else sum_encode_rows<false>(*job, held.get());
    return 0;
}

}  // extern "C"
