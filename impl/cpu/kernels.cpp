// Codecs on the host: encode, decode, decode_sum and decode_sum_encode over batches of strided rows, as C functions
// of one structure (`Job`, which kernels.py mirrors).
//
// The arithmetic of one value and one scale is in ../cuda/codec.cuh.  Here are the loops, written so that compilers
// vectorise them.  A row is worked on in pieces that stay in the first-level cache: between rounding and packing,
// a piece's codes are bytes in a small buffer.  Only packing is compiled for each number of bits.  This file must
// not be built with -ffast-math, since NaN, denormals and the order of operations matter.
//
// The encoder takes its values from one of two sources.  Elements that only need rounding are read where they lie
// (`InPlace`): fp32, and bf16 for symmetric integers that are rounded to nearest.  All other values (other types,
// sums, values with a carried error, rotated values) are first written to a small buffer of fp32 (`Brought`).
#include "flags.hpp"
#include "formats.hpp"
#include "random.hpp"
#include "raw.hpp"
#include "rounding.hpp"
#include "values.hpp"

#include <climits>
#include <cstdlib>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr i64 kHeld = 1 << 15;   // larger blocks of fp32 values are not kept, but brought a second time
constexpr i64 kAhead = 1 << 14;  // for blocks of up to so many elements, the whole next block is prefetched
constexpr i64 kTogether = 256;   // most small blocks that are encoded together
constexpr i64 kSlack = 512;      // room for elements around a piece, up to whole octets and rotations

// ---- where the values of a row come from ---------------------------------------------------------

// A source that reads elements where they lie.  They lie in order, so they can be prefetched and read a second time.
template <class T>
struct InPlace {
    using Type = T;
    const typename T::Word* values;
    i64 most;

    static constexpr bool in_order() { return true; }
    static constexpr bool carries() { return false; }
    const typename T::Word* next(i64 begin, i64) { return values + begin; }
    void carry(i64, i64, Stored, const u8*) {}
};

// Memory for `count` words; `data` is null if `count` is 0 or memory ran out.
struct Memory {
    u32* const data;

    explicit Memory(i64 count) : data(static_cast<u32*>(count ? std::malloc(std::size_t(count) * 4) : nullptr)) {}
    Memory(const Memory&) = delete;
    ~Memory() { std::free(data); }
};

// A source that computes the values of a row in fp32: elements or sums, with the carried error added, and rotated.
struct Brought {
    using Type = Fp32;
    const Job& job;
    const Code& code;      // of the frame that is written
    const bool sums;       // whether the values are sums of frames, not elements
    const i64 most;        // most values that next() can bring at once
    const Memory held, turned;  // values before the rotation, and after it if both are needed
    i64 row = 0, errors = 0;  // addresses of the row that is encoded and of its carried error
    i64 start = 0;         // number of the first element that next() brought last
    i64 offset = 0;        // place of that element in `held`

    Brought(const Job& job, const Code& code, bool sums)
        : job(job), code(code), sums(sums), most(smaller(code.block > kPiece ? code.block : kPiece, kHeld)),
          held(most + 2 * kSlack), turned(carries() && code.hadamard != 0 ? most + 2 * kSlack : 0) {}

    bool has_memory() const { return held.data && (turned.data || !carries() || code.hadamard == 0); }
    static constexpr bool in_order() { return false; }
    bool carries() const { return job.error_type >= 0; }
    i64 rotated(i64 begin, i64 end) const {  // how many elements of [begin, end) are in whole groups
        if (code.hadamard == 0) return 0;
        const i64 whole = smaller(end, job.numel / code.hadamard * code.hadamard);
        return whole > begin ? whole - begin : 0;
    }

    const u32* next(i64 begin, i64 end) {
        start = begin;
        bring(begin, end);
        u32* values = held.data + offset;
        if (carries()) {
            with_type(job.error_type, [&](auto type) {
                using State = decltype(type);
                const auto* error = reinterpret_cast<const typename State::Word*>(errors) + begin;
                for (i64 i = 0; i < end - begin; ++i) {
                    values[i] = bits_of(float_of(values[i]) + State::widen(error[i]));
                }
            });
        }
        const i64 turning = rotated(begin, end);
        u32* to = turned.data ? turned.data : values;
        if (turning != 0) rotate(values, to, turning, code.hadamard, false);
        if (to != values) std::memcpy(to + turning, values + turning, std::size_t(end - begin - turning) * 4);
        return to;
    }

    void bring(i64 begin, i64 end) {
        offset = 0;
        if (!sums) return ::bring(job.type, row, begin, end - begin, held.data);
        // Frames are read in whole octets and whole groups of rotated elements.  So reading starts where the octet or
        // the group starts that contains element `begin`.
        const i64 grain = job.coding.hadamard > 8 ? job.coding.hadamard : 8;
        const i64 first = begin / grain * grain;
        offset = begin - first;
        const i64 last = smaller((end + grain - 1) / grain * grain, job.numel);
        sum_sources(job, reinterpret_cast<const u8*>(row), first, last, held.data);
    }

    // Updates the carried error of [begin, end), which next() has brought last, from the values and their codes.
    void carry(i64 begin, i64 end, Stored stored, const u8* codes) {
        alignas(64) u32 decoded[kPiece];
        decode_block<Fp32>(code, stored, codes, decoded, end - begin);
        if (code.hadamard != 0) rotate_back(code, job.numel, begin, end, decoded);
        const u32* values = held.data + offset + (begin - start);
        with_type(job.error_type, [&](auto type) {
            using State = decltype(type);
            auto* error = reinterpret_cast<typename State::Word*>(errors) + begin;
            for (i64 i = 0; i < end - begin; ++i) {
                const float value = float_of(values[i]), old = State::widen(error[i]);
                error[i] = carried_of<State>(job.decay, old, value, saturated(float_of(decoded[i]), Fp32::largest()));
            }
        });
    }
};

// ---- a row's frame -------------------------------------------------------------------------------

// Encodes one row, and writes its frame.  `source.next(begin, end)` returns the values of elements [begin, end), at
// most `source.most` of them.  A block of up to `source.most` elements is read once.  A larger block is read twice:
// first for its maximum, then for its codes.  Small blocks are encoded together, so that the long chains of operations
// from a block's maximum to its divisor overlap.  `number` is the number of the row's first element, on which random
// bits depend.
template <class Source>
void encode_row(const Job& job, const Code& code, Source& source, u8* frame, i64 number) {
    using T = typename Source::Type;
    const i64 numel = job.numel;
    const bool direct = code.bits == 8 && !code.stochastic && !source.carries();
    const i64 together = code.block < kPiece ? smaller(kPiece / code.block, kTogether) : 1;
    const bool held = together * code.block <= source.most;
    const i64 ahead = !source.in_order() ? 0 : together * code.block <= kAhead ? together * code.block : kPiece;
    alignas(64) u8 codes[kPiece];
    alignas(64) u16 random[kPiece];
    Stored stored[kTogether];
    i64 packed = 0;  // elements whose codes are in the frame already
    for (i64 first = 0; first < code.blocks; first += together) {
        const i64 blocks = smaller(together, code.blocks - first);
        const i64 begin = first * code.block, end = smaller(begin + blocks * code.block, numel);
        const typename T::Word* values = held ? source.next(begin, end) : nullptr;
        for (i64 block = 0; block < blocks; ++block) {
            const i64 start = begin + block * code.block, stop = smaller(start + code.block, end);
            Extent most{0, 0};
            if (held) {
                most = extent<T>(code, values + (start - begin), stop - start);
            } else {
                for (i64 at = start; at < stop; at += kPiece) {
                    const i64 until = smaller(at + kPiece, stop);
                    most.include(extent<T>(code, source.next(at, until), until - at));
                }
            }
            stored[block] = stored_of(code, most);
            store(code, frame, first + block, stored[block]);
        }
        for (i64 block = 0, at = begin; block < blocks; ++block) {
            const i64 stop = smaller(begin + (block + 1) * code.block, end);
            while (at < stop) {
                i64 until = direct ? stop : smaller(packed + kPiece, stop);
                until = held ? until : smaller(at + kPiece, until);
                if (code.stochastic && at == packed) {
                    const i64 octets = (smaller(kPiece, numel - packed) + 7) / 8;
                    random_bits(job.key, u64(number + packed) / 8, octets, random);
                }
                const typename T::Word* from = held ? values + (at - begin) : source.next(at, until);
                u8* to = direct ? frame + at : codes + (at - packed);
                round_values<T>(code, stored[block], from, random + (at - packed), ahead, to, until - at);
                if (source.carries()) source.carry(at, until, stored[block], to);
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
void encode_in_place(const Job& job) {
    each_row<3>(job, {&job.values, &job.frames, &job.random}, [&](const i64* at) {
        InPlace<T> source{reinterpret_cast<const typename T::Word*>(at[0]), job.numel};
        encode_row(job, job.coding, source, reinterpret_cast<u8*>(at[1]), at[2]);
    });
}

// Encodes each row of `values` to a row of `frames`.  If `sums` is false, the rows of `values` are elements.  If `sums`
// is true, they are frames of the first source, and the sum over all sources of the job is encoded.  Returns false if
// memory ran out.
bool encode_brought(const Job& job, const Code& code, const Plane& values, const Plane& frames, bool sums) {
    Brought source(job, code, sums);
    if (!source.has_memory()) return false;
    each_row<4>(job, {&values, &frames, &job.random, &job.errors}, [&](const i64* at) {
        source.row = at[0], source.errors = at[3];
        encode_row(job, code, source, reinterpret_cast<u8*>(at[1]), at[2]);
    });
    return true;
}

}  // namespace

// Each function with a job returns 0, or 1 if memory ran out.
extern "C" {

__attribute__((visibility("default"))) i64 job_bytes() { return i64(sizeof(Job)); }

__attribute__((visibility("default"))) int encode(const Job* job) {
    const Code& code = job->coding;
    const bool bare = job->error_type < 0 && code.hadamard == 0;
    if (bare && job->type == 0) encode_in_place<Fp32>(*job);
    else if (bare && job->type == 1 && code.kind == kSymmetric && !code.stochastic) encode_in_place<Bf16>(*job);
    else return encode_brought(*job, code, job->values, job->frames, false) ? 0 : 1;
    return 0;
}

__attribute__((visibility("default"))) int decode(const Job* job) {
    with_type(job->type, [&](auto type) {
        using T = decltype(type);
        each_row<2>(*job, {&job->values, &job->frames}, [&](const i64* at) {
            auto* out = reinterpret_cast<typename T::Word*>(at[0]);
            decode_row<T>(job->coding, job->numel, reinterpret_cast<const u8*>(at[1]), out);
        });
    });
    return 0;
}

__attribute__((visibility("default"))) int decode_sum(const Job* job) {
    each_row<2>(*job, {&job->values, &job->frames}, [&](const i64* at) {
        sum_sources(*job, reinterpret_cast<const u8*>(at[1]), 0, job->numel, reinterpret_cast<u32*>(at[0]));
    });
    return 0;
}

__attribute__((visibility("default"))) int decode_sum_encode(const Job* job) {
    return encode_brought(*job, job->second, job->frames, job->output, true) ? 0 : 1;
}

// Encodes rows in the published format whose number is `coding.kind`.
__attribute__((visibility("default"))) int encode_formats(const Job* job) {
    with_format(job->coding.kind, [&](auto format) {
        each_row<3>(*job, {&job->values, &job->frames, &job->random}, [&](const i64* at) {
            encode_format<decltype(format)>(*job, at[0], reinterpret_cast<u8*>(at[1]), at[2]);
        });
    });
    return 0;
}

__attribute__((visibility("default"))) int decode_formats(const Job* job) {
    with_format(job->coding.kind, [&](auto format) {
        each_row<2>(*job, {&job->values, &job->frames}, [&](const i64* at) {
            decode_format<decltype(format)>(*job, reinterpret_cast<const u8*>(at[1]), at[0]);
        });
    });
    return 0;
}

// Copies rows of `numel` bytes from `values` to `output`.
__attribute__((visibility("default"))) int copy(const Job* job) {
    each_row<2>(*job, {&job->output, &job->values}, [&](const i64* at) {
        std::memcpy(reinterpret_cast<u8*>(at[0]), reinterpret_cast<const u8*>(at[1]), std::size_t(job->numel));
    });
    return 0;
}

// Copies like `copy`, but writes past the caches if rows are large.
__attribute__((visibility("default"))) int stream(const Job* job) {
    each_row<2>(*job, {&job->output, &job->values}, [&](const i64* at) {
        copy_bytes(reinterpret_cast<u8*>(at[0]), reinterpret_cast<const u8*>(at[1]), job->numel);
    });
    return 0;
}

// Sums the frames of a cast to the type with number `type`.
__attribute__((visibility("default"))) int sum_raw(const Job* job) {
    with_type(job->type, [&](auto type) {
        using T = decltype(type);
        each_row<2>(*job, {&job->values, &job->frames}, [&](const i64* at) {
            sum_raw_row<T>(*job, reinterpret_cast<const u8*>(at[1]), reinterpret_cast<u32*>(at[0]));
        });
    });
    return 0;
}

// Sets a flag in shared memory, and wakes the processes that wait for it; for impl/transport/shared_memory.py.
__attribute__((visibility("default"))) void post_flag(std::int64_t* flag, std::int64_t number) {
    release(flag, number);
#if defined(__linux__)
    // A futex has 32 bits: this is the lower half of the flag, on little-endian machines.
    syscall(SYS_futex, flag, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

__attribute__((visibility("default"))) std::int64_t least_flag(
    const unsigned char* flags, std::int64_t count, std::int64_t step) {
    return acquire_least(flags, count, step);
}

}  // extern "C"
