/* A libcuda.so.1 that has no device: what libcudnn 9 looks up in it when it finalizes a plan without one. It takes any kernel
 * that cuDNN has compiled, and launches none. FAKE_DRIVER_CUBIN names a file for the last of them. Built by
 * tests/test_cudnn_plans.py, where the real libcudnn is. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_FOUND = 500 };

/* The end of a table of headers: where its offset, the size of one and their number stand. */
static size_t
table_end(const unsigned char *at, size_t offset, size_t size)
{
    uint64_t begin;
    uint16_t each, count;
    memcpy(&begin, at + offset, 8);
    memcpy(&each, at + size, 2);
    memcpy(&count, at + size + 2, 2);
    return (size_t)begin + (size_t)each * count;
}

/* An ELF file tells its own size: the headers of its sections come last, or (a cubin's) those of its segments. */
static size_t
elf_bytes(const unsigned char *at)
{
    if (memcmp(at, "\177ELF", 4) != 0)
        return 0;
    size_t segments = table_end(at, 32, 54), sections = table_end(at, 40, 58);
    return sections > segments ? sections : segments;
}

int
cuLibraryLoadData(void **library, const void *code)
{
    const char *path = getenv("FAKE_DRIVER_CUBIN");
    FILE *file = path != NULL ? fopen(path, "wb") : NULL;
    if (file != NULL) {
        fwrite(code, 1, elf_bytes(code), file);
        fclose(file);
    }
    *library = (void *)(uintptr_t)16;
    return SUCCESS;
}

int
cuLibraryGetKernel(void **kernel)
{
    *kernel = (void *)(uintptr_t)16;
    return SUCCESS;
}

int
cuKernelGetFunction(void **function)
{
    *function = (void *)(uintptr_t)16;
    return SUCCESS;
}

int
cuKernelGetAttribute(int *value)
{
    *value = 0;
    return SUCCESS;
}

/* Of the driver's own that compilers ask for: there are none. */
int
cuGetExportTable(const void **table)
{
    *table = NULL;
    return NOT_FOUND;
}

#define NOTHING(X)                                                                                                     \
    X(cuCtxGetCurrent) X(cuCtxGetDevice) X(cuCtxGetLimit) X(cuCtxPopCurrent) X(cuCtxPushCurrent) X(cuDeviceGet)        \
    X(cuDeviceGetAttribute) X(cuDeviceGetCount) X(cuDevicePrimaryCtxRelease) X(cuDevicePrimaryCtxReset)                \
    X(cuDevicePrimaryCtxRetain) X(cuDriverGetVersion) X(cuFuncGetAttribute) X(cuFuncSetAttribute) X(cuGetErrorName)    \
    X(cuGetErrorString) X(cuInit) X(cuKernelSetAttribute) X(cuLaunchCooperativeKernel) X(cuLaunchKernel)               \
    X(cuLaunchKernelEx) X(cuLibraryLoadFromFile) X(cuLibraryUnload) X(cuLinkAddData) X(cuLinkAddData_v2)               \
    X(cuLinkAddFile_v2) X(cuLinkComplete) X(cuLinkCreate) X(cuLinkCreate_v2) X(cuLinkDestroy) X(cuMemcpyDtoH_v2)       \
    X(cuModuleGetFunction) X(cuModuleGetGlobal_v2) X(cuModuleLoadData) X(cuModuleLoadDataEx) X(cuModuleLoadFatBinary)  \
    X(cuModuleUnload) X(cuOccupancyMaxActiveBlocksPerMultiprocessor) X(cuOccupancyMaxPotentialClusterSize)             \
    X(cuStreamGetCtx) X(cuStreamSynchronize) X(cuTensorMapEncodeIm2col) X(cuTensorMapEncodeTiled)

#define DO_NOTHING(name)                                                                                               \
    int name(void) { return SUCCESS; }
NOTHING(DO_NOTHING)
