// Flags in shared memory, by which one process tells others that its message there is complete.
//
// A rank writes its message and then sets its flag; another rank reads the flag and then the message.  Processors
// other than x86, such as those of Grace hosts, may make the writes visible, or carry out the reads, in another
// order.  Therefore the flag is written with release and read with acquire semantics: a process that sees the
// flag also sees everything that was written before it.
#pragma once

#include <cstdint>

namespace {

inline void release(std::int64_t* flag, std::int64_t number) { __atomic_store_n(flag, number, __ATOMIC_RELEASE); }

inline std::int64_t acquire(const std::int64_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

// Returns the smallest of `count` flags that are `step` bytes apart: the number that all of them have reached.
inline std::int64_t acquire_least(const unsigned char* flags, std::int64_t count, std::int64_t step) {
    std::int64_t least = acquire(reinterpret_cast<const std::int64_t*>(flags));
    for (std::int64_t i = 1; i < count; ++i) {
        const std::int64_t number = acquire(reinterpret_cast<const std::int64_t*>(flags + i * step));
        least = number < least ? number : least;
    }
    return least;
}

}  // namespace
