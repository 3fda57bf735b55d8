/* The properties of a GPU, read without a context on it: a process that only looks (the parent of ranks that are processes,
 * terapipe doctor) would hold a context's memory on every GPU until it ends. So only driver calls that need nothing but cuInit are
 * used (Driver API, "Device Management"), and for free memory NVML, which comes with the driver: cudaMemGetInfo makes a context. */
#ifndef TP_CUDA_PROPERTIES_H
#define TP_CUDA_PROPERTIES_H

#include "cuda/device.h"

/* What we use of libcuda.so.1, declared here; tests/properties_same.c asserts it against cuda.h. 0 is success. */
typedef struct {
    int (*init)(unsigned flags);
    int (*get)(int *device, int ordinal);
    int (*attribute)(int *value, int which, int device);
    int (*name)(char *text, int size, int device);
    int (*total)(size_t *bytes, int device);
    int (*uuid)(void *sixteen_bytes, int device);
    int (*bus_id)(char *text, int size, int device);
} tp_properties_driver;
/* And of libnvidia-ml.so.1 (NVML API, nvmlDeviceGetMemoryInfo). */
typedef struct {
    int (*init)(void);
    int (*by_uuid)(const char *uuid, void **device);
    int (*memory)(void *device, unsigned long long total_free_used[3]);
} tp_properties_nvml;

/* Of the GPU that this process numbers so; NULL: the real libraries. free_bytes is total_bytes where NVML cannot tell it.
 * ERUNTIME: the driver lacks a function, or fails (which, its answer). */
TP_MUST_USE tp_status
tp_properties_ask(int index, const tp_properties_driver *driver, const tp_properties_nvml *nvml, tp_cuda_properties *out);

#endif
