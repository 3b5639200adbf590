// cuBLAS, cuBLASLt and cuDNN: matrix products are noted on the stream of their handle and do nothing.
#include <cstdlib>
#include <cstring>

#include "fake.hpp"

struct Handle {
    void* stream;
    int pointer_mode, math_mode;
};

API int cublasCreate_v2(Handle** handle) {
    *handle = new Handle{};
    return 0;
}
API int cublasDestroy_v2(Handle* handle) {
    delete handle;
    return 0;
}
API int cublasSetStream_v2(Handle* handle, void* stream) {
    handle->stream = stream;
    return 0;
}
API int cublasSetPointerMode_v2(Handle* handle, int mode) {
    handle->pointer_mode = mode;
    return 0;
}
API int cublasGetPointerMode_v2(Handle* handle, int* mode) {
    *mode = handle->pointer_mode;
    return 0;
}
API int cublasSetMathMode(Handle* handle, int mode) {
    handle->math_mode = mode;
    return 0;
}
API int cublasGetMathMode(Handle* handle, int* mode) {
    *mode = handle->math_mode;
    return 0;
}
API int cublasSetWorkspace_v2(Handle*, void*, size_t) { return 0; }

#define PRODUCT_OF(NAME)                                 \
    API int NAME(Handle* handle) {                       \
        fake_note(PRODUCT, handle->stream, 0, 0, #NAME); \
        return 0;                                        \
    }
PRODUCT_OF(cublasGemmEx)
PRODUCT_OF(cublasGemmStridedBatchedEx)
PRODUCT_OF(cublasSgemm_v2)
PRODUCT_OF(cublasSgemmEx)
PRODUCT_OF(cublasSgemmStridedBatched)
PRODUCT_OF(cublasDgemm_v2)
PRODUCT_OF(cublasDgemmStridedBatched)
PRODUCT_OF(cublasSgemv_v2)
PRODUCT_OF(cublasDgemv_v2)
PRODUCT_OF(cublasSdot_v2)
PRODUCT_OF(cublasDdot_v2)
PRODUCT_OF(cublasDotEx)

// Descriptions are opaque: torch gives them a first and a last call, and never reads them.
static int describe(void** description) {
    *description = calloc(1, 64);
    return 0;
}
static int forget(void* description) {
    free(description);
    return 0;
}
API size_t cublasLtGetVersion() { return 130000; }
API int cublasLtMatmulDescCreate(void** description, int, int) { return describe(description); }
API int cublasLtMatmulDescDestroy(void* description) { return forget(description); }
API int cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t) { return 0; }
API int cublasLtMatmulPreferenceCreate(void** description) { return describe(description); }
API int cublasLtMatmulPreferenceDestroy(void* description) { return forget(description); }
API int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
API int cublasLtMatrixLayoutCreate(void** description, int, unsigned long, unsigned long, long) {
    return describe(description);
}
API int cublasLtMatrixLayoutDestroy(void* description) { return forget(description); }
API int cublasLtMatrixLayoutSetAttribute(void*, int, const void*, size_t) { return 0; }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* found, int* count) {
    constexpr size_t result_bytes = 96;  // of one cublasLtMatmulHeuristicResult_t, whose status 0 is success
    memset(found, 0, result_bytes);
    *count = 1;
    return 0;
}
API int cublasLtMatmul(void*, void*, const void*, const void*, const void*, const void*, const void*, const void*,
                       const void*, const void*, void*, const void*, const void*, void*, size_t, void* stream) {
    fake_note(PRODUCT, stream, 0, 0, "cublasLtMatmul");
    return 0;
}

API size_t cudnnGetVersion() { return 92000; }
API size_t cudnnGetCudartVersion() { return 13000; }
API const char* cudnnGetErrorString(int) { return "fake GPU: cuDNN has no operations"; }
API int cudnnGetProperty(int property, int* value) {
    *value = property == 0 ? 9 : property == 1 ? 20 : 0;
    return 0;
}
