// Numbers in memory that processes share, which announce what lies beside them there.
//
// A rank writes its message, then sets its flag; another reads the flag, then the message.  Processors other
// than x86, as those of Grace hosts, may make these writes visible, or carry these reads out, in another order,
// unless the flag is written with release and read with acquire: what was written, or read, before the flag was
// set has then happened for whoever sees the flag.
#pragma once

#include <cstdint>

namespace {

inline void release(std::int64_t* flag, std::int64_t number) { __atomic_store_n(flag, number, __ATOMIC_RELEASE); }

inline std::int64_t acquire(const std::int64_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

// The least of `count` flags, `step` bytes apart: all of them have reached it.
inline std::int64_t acquire_least(const unsigned char* flags, std::int64_t count, std::int64_t step) {
    std::int64_t least = acquire(reinterpret_cast<const std::int64_t*>(flags));
    for (std::int64_t i = 1; i < count; ++i) {
        const std::int64_t number = acquire(reinterpret_cast<const std::int64_t*>(flags + i * step));
        least = number < least ? number : least;
    }
    return least;
}

}  // namespace
