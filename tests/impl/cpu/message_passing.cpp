// Litmus test of the flags in shared memory.  One thread writes a row and then sets its flag; another thread waits for
// that flag, reads the row, and sets a flag of its own, after which the row is written anew.  Prints the number of
// stale words.
#include "flags.hpp"

#include <cstdio>
#include <cstdlib>
#include <thread>

namespace {

constexpr int kWords = 64, kApart = 16;  // each word of a row is on a cache line of its own
struct alignas(128) Flag {
    std::int64_t number = 0;
};
Flag written, read_;
alignas(128) std::int64_t row[kWords * kApart];

std::int64_t least(Flag& flag) {
    return acquire_least(reinterpret_cast<const unsigned char*>(&flag), 1, sizeof(Flag));
}

}  // namespace

int main(int, char** arguments) {
    const std::int64_t rounds = std::atoll(arguments[1]);
    long stale = 0;
    std::thread reader([&] {
        for (std::int64_t number = 1; number <= rounds; ++number) {
            while (least(written) < number) std::this_thread::yield();
            for (int word = kWords; word-- > 0;) stale += row[word * kApart] != number;
            release(&read_.number, number);
        }
    });
    for (std::int64_t number = 1; number <= rounds; ++number) {
        while (least(read_) < number - 1) std::this_thread::yield();
        for (int word = 0; word < kWords; ++word) row[word * kApart] = number;
        release(&written.number, number);
    }
    reader.join();
    std::printf("%ld\n", stale);
}
