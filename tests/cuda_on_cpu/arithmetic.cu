// The functions of codec.cuh, one by one, for tests: an element a thread, 256 threads.
#include "frames.cuh"

using namespace frames;

struct Probe {
    i64 values, out, count, bits, asymmetric, scale, low, random;
};

__device__ i64 element() { return i64(blockIdx.x) * 256 + threadIdx.x; }

template <class T>
__global__ void widen(const Probe p) {
    const i64 i = element();
    if (i < p.count)
        reinterpret_cast<float*>(p.out)[i] = T::widen(reinterpret_cast<const typename T::Word*>(p.values)[i]);
}

template <class T>
__global__ void narrow(const Probe p) {
    const i64 i = element();
    if (i < p.count) {
        const float value = saturated(reinterpret_cast<const float*>(p.values)[i], T::largest());
        reinterpret_cast<typename T::Word*>(p.out)[i] = T::narrow(value);
    }
}

// A value with a scale and an offset of its own to its code.
__global__ void encode_values(const Probe p) {
    const i64 i = element();
    if (i >= p.count) return;
    const Scheme<0> scheme{int(p.bits), p.asymmetric != 0};
    const Stored stored{reinterpret_cast<const float*>(p.scale)[i], reinterpret_cast<const float*>(p.low)[i]};
    reinterpret_cast<u32*>(p.out)[i] =
        code_of(scheme, divider_of(scheme, stored), reinterpret_cast<const float*>(p.values)[i]);
}

// The same with 16 random bits for each.
__global__ void encode_values_at_random(const Probe p) {
    const i64 i = element();
    if (i >= p.count) return;
    const Scheme<0> scheme{int(p.bits), p.asymmetric != 0};
    const Stored stored{reinterpret_cast<const float*>(p.scale)[i], reinterpret_cast<const float*>(p.low)[i]};
    const float shift = shift_of(reinterpret_cast<const u32*>(p.random)[i]);
    reinterpret_cast<u32*>(p.out)[i] =
        code_of(scheme, divider_of(scheme, stored), reinterpret_cast<const float*>(p.values)[i], shift);
}

// To a float of `bits` bits of mantissa; nearest where there are no random bits.
__global__ void encode_floats(const Probe p) {
    const i64 i = element();
    if (i >= p.count) return;
    const Floats<0> scheme{int(p.bits), p.asymmetric != 0};
    const Stored stored{reinterpret_cast<const float*>(p.scale)[i], 0.0f};
    const float shift = p.random != 0 ? shift_of(reinterpret_cast<const u32*>(p.random)[i]) : 0.0f;
    reinterpret_cast<u32*>(p.out)[i] =
        code_of(scheme, divider_of(scheme, stored), reinterpret_cast<const float*>(p.values)[i], shift);
}

// The four words of octet `values[i]`, of the key whose words are at `random`.
__global__ void random_words(const Probe p) {
    const i64 i = element();
    if (i >= p.count) return;
    const Words words = philox(*reinterpret_cast<const Words*>(p.random), reinterpret_cast<const u64*>(p.values)[i]);
    for (int j = 0; j < 4; ++j) reinterpret_cast<u32*>(p.out)[4 * i + j] = words.word[j];
}

// Size of the arguments, and where their parts start.
__global__ void layout(const Probe p) {
    const Arguments* a = nullptr;
    const i64 at[] = {i64(sizeof(Arguments)), i64(&a->numel), i64(&a->carried), i64(&a->values),
                      i64(&a->error.kind),    i64(&a->coding), i64(&a->second.shift), i64(&a->noise.key),
                      i64(&a->decay)};
    for (int i = 0; i < 9; ++i) reinterpret_cast<i64*>(p.out)[i] = at[i];
}
