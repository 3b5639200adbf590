// The functions of the CUDA driver (libcuda) that torch needs to start, and the version of NVRTC, which CuPy asks for.
#include "fake.hpp"

extern "C" long fake_allocation(const void* memory, const void** base);

API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
    *flags = 0, *active = 1;
    return 0;
}
API int cuCtxGetCurrent(void** context) {
    *context = reinterpret_cast<void*>(16);
    return 0;
}
API int cuCtxSetCurrent(void*) { return 0; }
API int cuDriverGetVersion(int* version) {
    *version = 13000;
    return 0;
}
API int cuGetErrorString(int, const char** text) {
    *text = "fake GPU: an error of the driver";
    return 0;
}
API int cuMemGetAddressRange(const void** base, size_t* bytes, const void* memory) {
    const void* first;
    size_t found = fake_allocation(memory, &first);
    if (base) *base = first;
    if (bytes) *bytes = found;
    return found ? 0 : 1;
}

API int nvrtcVersion(int* major, int* minor) {
    *major = 13, *minor = 0;
    return 0;
}
API const char* nvrtcGetErrorString(int) { return "fake GPU: NVRTC compiles nothing"; }
