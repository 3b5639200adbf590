// Runs CUDA kernels on the host: each CUDA thread is a fiber, thread blocks run one after the other, all in one OS
// thread.
//
// This is included before an unmodified .cu file.  Threads switch only where CUDA lets them wait (at barriers and
// warp collectives), in an order that the launch chooses; a kernel without races gives the same result in every order.
// A barrier or warp collective that not all threads reach is reported, where a GPU would hang.  Atomics are plain
// operations, since threads do not switch inside them.  Not supported: inline PTX, dynamic shared memory, textures,
// cooperative groups.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // thread blocks run one at a time; static, so that ASan guards the ends of the array

struct Dimensions {
    unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline Dimensions threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

constexpr std::size_t kStack = std::size_t{256} << 10;
enum class State { ready, barrier, collective, done };
enum class Source { exact, exclusive, every };  // lane = argument, lane = own ^ argument, all named by the mask

struct Fiber {
    void* stack_pointer = nullptr;
    State state = State::ready;
    unsigned mask = 0, value = 0, argument = 0;  // of the collective in which the thread waits
    Source source = Source::exact;
};

inline std::vector<Fiber> fibers;
inline void (*body)(const void*);
inline const void* argument;
inline void* scheduler_pointer;
inline unsigned current;

#if !defined(__x86_64__)
#error "the fiber switch is written for x86-64"
#endif
// Saves the callee-saved registers on one stack and loads them from another.
__asm__(
    ".text\n.p2align 4\ncuda_on_cpu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
extern "C" void cuda_on_cpu_switch(void** save, void* load);

inline void wait(State state) {
    fibers[current].state = state;
    cuda_on_cpu_switch(&fibers[current].stack_pointer, scheduler_pointer);
}

inline std::string misuse;  // of a collective, thrown inside a fiber

inline void enter() {
    try {
        body(argument);
    } catch (const std::exception& problem) {
        misuse = problem.what();
    }
    wait(State::done);
    std::abort();  // a fiber that has ended is never resumed
}

inline std::string stuck() {
    std::size_t at[4] = {};
    for (const Fiber& fiber : fibers) ++at[std::size_t(fiber.state)];
    return "deadlock in block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
           std::to_string(blockIdx.z) + "): " + std::to_string(at[1]) + " threads at __syncthreads, " +
           std::to_string(at[2]) + " in a warp collective, " + std::to_string(at[3]) + " have returned";
}

// Releases all threads if all of them are at a barrier.
inline bool release_barrier() {
    if (std::any_of(fibers.begin(), fibers.end(), [](const Fiber& f) { return f.state != State::barrier; })) return false;
    for (Fiber& fiber : fibers) fiber.state = State::ready;
    return true;
}

// Releases the threads of a warp whose collective is complete; returns whether there were any.
inline bool release_warp(std::size_t warp) {
    bool any = false;
    const std::size_t lanes = std::min<std::size_t>(32, fibers.size() - warp);
    unsigned waiting = 0, values[32];
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        if (fibers[warp + lane].state == State::collective) waiting |= 1u << lane;
        values[lane] = fibers[warp + lane].value;
    }
    const unsigned present = lanes == 32 ? ~0u : (1u << lanes) - 1;
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        Fiber& fiber = fibers[warp + lane];
        if ((waiting >> lane & 1u) == 0 || (fiber.mask & present & ~waiting) != 0) continue;
        if (fiber.source == Source::every) {
            fiber.value = 1;
            for (std::size_t other = 0; other < lanes; ++other)
                if ((fiber.mask >> other & 1u) != 0 && values[other] == 0) fiber.value = 0;
        } else {
            const unsigned from = fiber.source == Source::exact ? fiber.argument : unsigned(lane) ^ fiber.argument;
            if (from < lanes) fiber.value = values[from];
        }
        fiber.state = State::ready;
        any = true;
    }
    return any;
}

inline void run_ready(unsigned thread) {
    if (fibers[thread].state != State::ready) return;
    current = thread;
    threadIdx = {thread, 0, 0};
    cuda_on_cpu_switch(&scheduler_pointer, fibers[thread].stack_pointer);
    if (!misuse.empty()) throw std::runtime_error(std::exchange(misuse, {}));
}

// Orders of threads: 0 ascending, 1 descending, others shuffled with that seed, anew after every barrier.  In order 0
// all warps run together from one wait to the next.  In the others each warp runs as far as it can, up to a barrier,
// before another runs, so that a warp that is ahead overwrites what others still need, if that is possible.
inline void run_block(unsigned order) {
    std::mt19937 random(order);
    std::vector<unsigned> warps((fibers.size() + 31) / 32), lanes(32);
    std::iota(warps.begin(), warps.end(), 0u);
    std::iota(lanes.begin(), lanes.end(), 0u);
    if (order == 1) {
        std::reverse(warps.begin(), warps.end());
        std::reverse(lanes.begin(), lanes.end());
    }
    for (;;) {
        if (order > 1) {
            std::shuffle(warps.begin(), warps.end(), random);
            std::shuffle(lanes.begin(), lanes.end(), random);
        }
        bool any = false;
        for (const unsigned warp : warps) {
            do {
                for (const unsigned lane : lanes)
                    if (warp * 32 + lane < fibers.size()) run_ready(warp * 32 + lane);
            } while (order != 0 && release_warp(warp * 32));
            any = release_warp(warp * 32) || any;
        }
        if (std::all_of(fibers.begin(), fibers.end(), [](const Fiber& f) { return f.state == State::done; })) return;
        if (!release_barrier() && !any) throw std::runtime_error(stuck());
    }
}

inline void launch(void (*kernel)(const void*), Dimensions grid, unsigned threads, unsigned order, const void* given) {
    static std::vector<char*> stacks;
    while (stacks.size() < threads) {
        void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::runtime_error("no memory for the stack of a fiber");
        stacks.push_back(static_cast<char*>(memory));
    }
    body = kernel;
    argument = given;
    gridDim = grid;
    blockDim = {threads, 1, 1};
    const unsigned long long blocks = 1ull * grid.x * grid.y * grid.z;
    for (unsigned long long at = 0; at < blocks; ++at) {
        const unsigned long long index = order % 2 == 0 ? at : blocks - 1 - at;
        blockIdx = {unsigned(index % grid.x), unsigned(index / grid.x % grid.y), unsigned(index / grid.x / grid.y)};
        fibers.assign(threads, Fiber{});
        for (unsigned thread = 0; thread < threads; ++thread) {
            void** top = reinterpret_cast<void**>(stacks[thread] + kStack) - 2;
            top[0] = reinterpret_cast<void*>(&enter);  // the address to which the first switch returns
            top[1] = nullptr;
            fibers[thread].stack_pointer = top - 6;  // six saved registers
        }
        run_block(order);
    }
}

inline unsigned collective(unsigned mask, unsigned value, unsigned argument_, Source source) {
    Fiber& fiber = fibers[current];
    if ((mask >> (current % 32) & 1u) == 0) throw std::runtime_error("a warp collective's mask lacks its caller");
    fiber.mask = mask;
    fiber.value = value;
    fiber.argument = argument_;
    fiber.source = source;
    wait(State::collective);
    return fibers[current].value;
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::wait(cuda_on_cpu::State::barrier); }

inline void __syncwarp(unsigned mask = ~0u) {
    cuda_on_cpu::collective(mask, 0, threadIdx.x % 32, cuda_on_cpu::Source::exact);
}

template <class T>
T shuffled(unsigned mask, T value, unsigned argument, cuda_on_cpu::Source source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 32 or 64 bits");
    unsigned words[sizeof(T) / 4];
    std::memcpy(words, &value, sizeof(T));
    for (unsigned& word : words) word = cuda_on_cpu::collective(mask, word, argument, source);
    std::memcpy(&value, words, sizeof(T));
    return value;
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned lanes) {
    return shuffled(mask, value, lanes, cuda_on_cpu::Source::exclusive);
}

template <class T>
T __shfl_sync(unsigned mask, T value, unsigned lane) {
    return shuffled(mask, value, lane, cuda_on_cpu::Source::exact);
}

inline int __all_sync(unsigned mask, bool holds) {
    return int(cuda_on_cpu::collective(mask, holds, 0, cuda_on_cpu::Source::every));
}

inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    for (unsigned lanes = 1; lanes < 32; lanes *= 2) value = std::max(value, __shfl_xor_sync(mask, value, lanes));
    return value;
}

template <class T>
T atomicMax(T* where, T value) {
    const T old = *where;
    *where = std::max(old, value);
    return old;
}

template <class T>
T atomicAdd(T* where, T value) {
    const T old = *where;
    *where = old + value;
    return old;
}

// ---- what Python calls -------------------------------------------------------------------------

struct Kernel {
    const char* name;
    void (*run)(const void* argument);
};

template <class Argument>
void call(void (*kernel)(Argument), const void* argument) {
    kernel(*static_cast<const std::remove_const_t<Argument>*>(argument));
}

extern const Kernel kernels[];
extern const std::size_t kernel_count;

// Returns an empty string, or an error's message.
extern "C" const char* launch(const char* name, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned order,
                              const void* argument) {
    static std::string error;
    error.clear();
    try {
        const Kernel* end = kernels + kernel_count;
        const Kernel* found = std::find_if(kernels, end, [&](const Kernel& k) { return std::string(name) == k.name; });
        if (found == end) throw std::runtime_error(std::string("no kernel ") + name);
        cuda_on_cpu::launch(found->run, {x, y, z}, threads, order, argument);
    } catch (const std::exception& problem) {
        error = problem.what();
    }
    return error.c_str();
}
