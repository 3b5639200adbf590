// A CUDA runtime without a GPU (libcudart).
//
// A device's memory is memory of the host, and copies are made at once.  Kernels do nothing.  Streams and events are
// names in a trace, from which tests/fake_gpu/races.py computes what is ordered.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "fake.hpp"

namespace {

long environment(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text ? atol(text) : otherwise;
}
const int DEVICES = environment("FAKE_GPUS", 1), CAPABILITY = environment("FAKE_GPU_CAPABILITY", 90);
const size_t MEMORY = size_t(environment("FAKE_GPU_GIB", 80)) << 30;
constexpr int MULTIPROCESSORS = 132, DRIVER = 13000, PINNED = -1;

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

long now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

// The trace.
struct Entry {
    long kind, thread, stream, event, bytes;
    const char* name;
    long address, writes;
};
std::vector<Entry> entries;
std::atomic<bool> recording{false};
std::atomic<long> counts[ACCESS + 1];
std::atomic<long> options[] = {{1}, {0}, {1}};

// Allocations by address.
struct Allocation {
    size_t bytes;
    int device;
};
std::map<uintptr_t, Allocation> allocations;
size_t used[64];
thread_local int current = 0;

const std::pair<const uintptr_t, Allocation>* allocation_of(const void* memory) {
    auto after = allocations.upper_bound(uintptr_t(memory));
    if (after == allocations.begin()) return nullptr;
    const auto& found = *--after;
    return uintptr_t(memory) < found.first + found.second.bytes ? &found : nullptr;
}

size_t pages(size_t bytes) { return bytes ? (bytes + 4095) & ~size_t(4095) : 4096; }

cudaError_t allocate(void** memory, size_t bytes, int device) {
    Lock lock(mutex);
    *memory = nullptr;
    if (device != PINNED && used[device] + bytes > MEMORY) return cudaErrorMemoryAllocation;
    void* mapped =
        mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return cudaErrorMemoryAllocation;
    *memory = mapped;
    allocations[uintptr_t(mapped)] = {bytes, device};
    if (device != PINNED) used[device] += bytes;
    fake_note(device == PINNED ? PIN : ALLOCATE, nullptr, 0, bytes, "");
    return cudaSuccess;
}

cudaError_t release(void* memory) {
    Lock lock(mutex);
    auto found = allocations.find(uintptr_t(memory));
    if (found == allocations.end()) return memory ? cudaErrorInvalidValue : cudaSuccess;
    auto [bytes, device] = found->second;
    if (device != PINNED) used[device] -= bytes;
    fake_note(FREE, nullptr, 0, bytes, "");
    munmap(memory, pages(bytes));
    allocations.erase(found);
    return cudaSuccess;
}

// Streams whose work never ends.  fake_release() ends all of it, so an event remembers in which round it stuck.
std::set<const void*> stuck;
std::atomic<long> round_of_stuck{1};
struct Event {
    long number, ns, stuck;
};

bool is_stuck(const void* stream) {
    Lock lock(mutex);
    return stuck.count(stream);
}
bool is_stuck(cudaEvent_t event) { return reinterpret_cast<Event*>(event)->stuck == round_of_stuck; }
template <class Test>
void wait_while(Test test) {
    while (test()) usleep(1000);
}

// Kernels.
std::unordered_map<const void*, const char*> kernel_names;
struct Configuration {
    dim3 grid, block;
    size_t shared;
    void* stream;
};
thread_local std::vector<Configuration> configurations;

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, const void* stream) {
    auto found = kernel_names.find(kernel);
    const char* name = found == kernel_names.end() ? "?" : found->second;
    unsigned threads = block.x * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || !threads || threads > 1024 || grid.y > 65535 || grid.z > 65535) {
        fprintf(stderr, "fake GPU: %s is launched with %u x %u x %u blocks of %u threads\n", name, grid.x, grid.y,
                grid.z, threads);
        return cudaErrorInvalidConfiguration;
    }
    fake_note(KERNEL, stream, 0, 0, name);
    return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, const void* stream) {
    if (fake_option(COPIES) || kind != cudaMemcpyDeviceToDevice) memmove(to, from, bytes);
    fake_note(COPY, stream, 0, bytes, "copy");
    fake_access(stream, from, bytes, false, "copy");
    fake_access(stream, to, bytes, true, "copy");
    return cudaSuccess;
}

cudaError_t set(void* memory, int value, size_t bytes, const void* stream) {
    if (fake_option(COPIES)) memset(memory, value, bytes);
    fake_note(SET, stream, 0, bytes, "memset");
    fake_access(stream, memory, bytes, true, "memset");
    return cudaSuccess;
}

}  // namespace

// The trace, for the other libraries and for tests/fake_gpu/trace.py.
API void fake_note(long kind, const void* stream, long event, long bytes, const char* name) {
    ++counts[kind];
    if (!recording) return;
    Lock lock(mutex);
    entries.push_back({kind, syscall(SYS_gettid), long(stream), event, bytes, name, 0, 0});
}
API void fake_access(const void* stream, const void* memory, long bytes, bool writes, const char* name) {
    if (!recording || !bytes) return;
    Lock lock(mutex);
    if (!allocation_of(memory)) return;
    entries.push_back({ACCESS, syscall(SYS_gettid), long(stream), 0, bytes, name, long(memory), writes});
}
API long fake_option(int option) { return options[option]; }
API void fake_set_option(int option, long value) { options[option] = value; }
API void fake_stick(const void* stream) {
    Lock lock(mutex);
    stuck.insert(stream);
}
API void fake_release() {
    Lock lock(mutex);
    stuck.clear();
    ++round_of_stuck;
}
API void fake_record() {
    Lock lock(mutex);
    entries.clear();
    recording = true;
}
API long fake_stop(const Entry** first) {
    recording = false;
    Lock lock(mutex);
    *first = entries.data();
    return entries.size();
}
API long fake_count(long kind) { return counts[kind]; }
API void fake_reset_counts() {
    for (auto& count : counts) count = 0;
}
API long fake_unwritten(const char* name) {
    fprintf(stderr, "fake GPU: %s was called, which tests/fake_gpu/libraries does not have\n", name);
    return cudaErrorNotSupported;
}

// Kernels.
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
    configurations.push_back({grid, block, shared, stream});
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    auto last = configurations.back();
    configurations.pop_back();
    *grid = last.grid, *block = last.block, *shared = last.shared, *static_cast<void**>(stream) = last.stream;
    return cudaSuccess;
}
API void** __cudaRegisterFatBinary(void*) {
    static void* handle[1];
    return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                int*) {
    kernel_names[host] = name;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
    *kernel = (cudaKernel_t)host;
    return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
    return launch(kernel, grid, block, stream);
}
API cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
    return launch(kernel, grid, block, stream);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t,
                                            cudaStream_t stream) {
    return launch(kernel, grid, block, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
    return launch(kernel, config->gridDim, config->blockDim, config->stream);
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
    function(data);
    return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024, attributes->numRegs = 32;
    attributes->binaryVersion = attributes->ptxVersion = CAPABILITY;
    return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = 2;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                       unsigned) {
    *blocks = 2;
    return cudaSuccess;
}

// Devices, with the limits of an H100.
API cudaError_t cudaGetDeviceCount(int* count) {
    *count = DEVICES;
    return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) {
    *device = current;
    return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= DEVICES) return cudaErrorInvalidDevice;
    current = device;
    return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
    *version = DRIVER;
    return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = DRIVER;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    static const std::map<int, int> values = {
        {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrMaxBlockDimX, 1024},
        {cudaDevAttrMaxBlockDimY, 1024},
        {cudaDevAttrMaxBlockDimZ, 64},
        {cudaDevAttrMaxGridDimX, 0x7fffffff},
        {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxGridDimZ, 65535},
        {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMultiProcessorCount, MULTIPROCESSORS},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
        {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
        {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 << 10},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 228 << 10},
        {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
        {cudaDevAttrMaxRegistersPerBlock, 65536},
        {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
        {cudaDevAttrL2CacheSize, 50 << 20},
        {cudaDevAttrClockRate, 1980000},
        {cudaDevAttrComputeCapabilityMajor, CAPABILITY / 10},
        {cudaDevAttrComputeCapabilityMinor, CAPABILITY % 10},
    };
    auto found = values.find(attribute);
    *value = found == values.end() ? 0 : found->second;
    return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "Fake GPU sm_%d", CAPABILITY);
    memset(p->uuid.bytes, device + 1, sizeof p->uuid.bytes);
    p->totalGlobalMem = MEMORY, p->totalConstMem = 65536, p->l2CacheSize = 50 << 20, p->memoryBusWidth = 5120;
    p->major = CAPABILITY / 10, p->minor = CAPABILITY % 10, p->multiProcessorCount = MULTIPROCESSORS;
    p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = 227 << 10, p->sharedMemPerMultiprocessor = 228 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->maxBlocksPerMultiProcessor = 32;
    p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->canMapHostMemory = p->cooperativeLaunch = 1;
    p->asyncEngineCount = 3, p->pciBusID = device + 1;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
    snprintf(text, length, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 1;
    return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() {
    wait_while([] {
        Lock lock(mutex);
        return !stuck.empty();
    });
    fake_note(SYNC_DEVICE, nullptr, 0, 0, "");
    return cudaSuccess;
}
API cudaError_t cudaGetLastError() { return cudaSuccess; }
API cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
API const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "fake GPU: an error";
}
API const char* cudaGetErrorName(cudaError_t) { return "fakeError"; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// Memory.
API cudaError_t cudaMalloc(void** memory, size_t bytes) { return allocate(memory, bytes, current); }
API cudaError_t cudaFree(void* memory) { return release(memory); }
API cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) { return allocate(memory, bytes, PINNED); }
API cudaError_t cudaFreeHost(void* memory) { return release(memory); }
API cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned) {
    Lock lock(mutex);
    allocations[uintptr_t(memory)] = {bytes, PINNED};
    return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* memory) {
    Lock lock(mutex);
    allocations.erase(uintptr_t(memory));
    return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *total = MEMORY, *free = MEMORY - used[current];
    return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
    Lock lock(mutex);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered, attributes->device = -1;
    if (auto* found = allocation_of(memory)) {
        bool pinned = found->second.device == PINNED;
        attributes->type = pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
        attributes->device = pinned ? current : found->second.device;
        attributes->devicePointer = const_cast<void*>(memory);
        attributes->hostPointer = pinned ? const_cast<void*>(memory) : nullptr;
    }
    return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    copy(to, from, bytes, kind, nullptr);
    return cudaStreamSynchronize(nullptr);
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, bytes, kind, stream);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
    return copy(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t rows, cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < rows; ++row)
        copy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width, kind, stream);
    return cudaSuccess;
}
API cudaError_t cudaMemset(void* memory, int value, size_t bytes) { return set(memory, value, bytes, nullptr); }
API cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
    return set(memory, value, bytes, stream);
}

// Streams and events.
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    static std::atomic<long> last{0x1000};
    *stream = reinterpret_cast<cudaStream_t>(last += 16);
    return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return is_stuck(stream) || !fake_option(QUERIES) ? cudaErrorNotReady : cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    wait_while([&] { return is_stuck(stream); });
    fake_note(SYNC_STREAM, stream, 0, 0, "");
    return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (is_stuck(event)) fake_stick(stream);
    fake_note(WAIT, stream, reinterpret_cast<Event*>(event)->number, 0, "");
    return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    *mode = cudaStreamCaptureModeRelaxed;
    return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    static std::atomic<long> last{0};
    auto* made = new Event{++last, now(), 0};
    *event = reinterpret_cast<cudaEvent_t>(made);
    fake_note(EVENT, nullptr, made->number, 0, "");
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete reinterpret_cast<Event*>(event);
    return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    auto* recorded = reinterpret_cast<Event*>(event);
    recorded->ns = now(), recorded->stuck = is_stuck(stream) ? long(round_of_stuck) : 0;
    fake_note(RECORD, stream, recorded->number, 0, "");
    return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (is_stuck(event) || !fake_option(QUERIES)) return cudaErrorNotReady;
    fake_note(QUERY, nullptr, reinterpret_cast<Event*>(event)->number, 0, "");
    return cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    wait_while([&] { return is_stuck(event); });
    fake_note(SYNC_EVENT, nullptr, reinterpret_cast<Event*>(event)->number, 0, "");
    return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
    *ms = (reinterpret_cast<Event*>(end)->ns - reinterpret_cast<Event*>(begin)->ns) / 1e6f;
    return cudaSuccess;
}

// The driver's functions, which torch asks for by name; driver.cpp has some.
API long fake_allocation(const void* memory, const void** base) {
    Lock lock(mutex);
    auto* found = allocation_of(memory);
    *base = found ? reinterpret_cast<void*>(found->first) : nullptr;
    return found ? found->second.bytes : 0;
}
static int driver_nothing() { return 0; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
    *function = dlsym(RTLD_DEFAULT, symbol);
    if (!*function) *function = (void*)driver_nothing;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
