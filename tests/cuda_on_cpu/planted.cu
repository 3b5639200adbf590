// Kernels with one planted bug each, which the shim must find, and their correct twins, which it must accept.
#include "codec.cuh"

using codec::i64;

struct Planted {
    i64 values, out, count;
};

// Neighbours exchange values through shared memory; `SYNC` says whether they wait for each other.
template <bool SYNC>
__global__ void rotate(const Planted a) {
    __shared__ int held[256];
    const int thread = int(threadIdx.x);
    held[thread] = reinterpret_cast<const int*>(a.values)[thread];
    if (SYNC) __syncthreads();
    reinterpret_cast<int*>(a.out)[thread] = held[(thread + 1) % 256];
}

// Warps exchange values twice; if `BUFFERS` is 1, the second turn overwrites what a slower warp still reads.
template <int BUFFERS>
__global__ void two_turns(const Planted a) {
    __shared__ int held[2][8];
    const int thread = int(threadIdx.x), warp = thread / 32;
    int sum = 0;
    for (int turn = 0; turn < 2; ++turn) {
        int(&mine)[8] = held[turn % BUFFERS];
        if (thread % 32 == 0) mine[warp] = warp + 100 * turn;
        __syncthreads();
        sum += mine[(warp + 1) % 8];
    }
    reinterpret_cast<int*>(a.out)[thread] = sum;
}

// Half of the threads return before a barrier.
__global__ void barrier_in_a_branch(const Planted a) {
    if (threadIdx.x < 128) {
        __syncthreads();
        reinterpret_cast<int*>(a.out)[threadIdx.x] = 1;
    }
}

// The mask names 32 lanes, but only 16 reach the collective.
__global__ void half_a_warp_shuffles(const Planted a) {
    if (threadIdx.x % 32 < 16)
        reinterpret_cast<int*>(a.out)[threadIdx.x] = __shfl_xor_sync(0xffffffffu, int(threadIdx.x), 1);
}

// A lane takes part in a shuffle whose mask does not name it.
__global__ void wrong_mask(const Planted a) {
    reinterpret_cast<int*>(a.out)[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, int(threadIdx.x), 1);
}
