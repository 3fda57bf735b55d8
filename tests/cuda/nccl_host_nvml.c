/* libnvidia-ml.so.1 for tests/nccl_host.py: GPUs of compute capability 9.0 without links, as many as nccl_host.h has. (nvml.h is not everywhere.) */
#include <stdlib.h>

#include "tests/cuda/nccl_host.h"

#define EXPORT __attribute__((visibility("default")))

enum { DONE = 0, NOT_SUPPORTED = 3 };

EXPORT int
nvmlInit(void)
{
    return DONE;
}

EXPORT int
nvmlShutdown(void)
{
    return DONE;
}

EXPORT const char *
nvmlErrorString(int result)
{
    return result == DONE ? "no error" : "not supported here";
}

EXPORT int
nvmlDeviceGetCount(unsigned *out)
{
    *out = HOST_DEVICES;
    return DONE;
}

static int devices[HOST_DEVICES];

EXPORT int
nvmlDeviceGetHandleByPciBusId(const char *at, void **out)
{
    *out = &devices[strtol(at + 5, NULL, 16) - 1]; /* "0000:01:00.0" is the first */
    return DONE;
}

EXPORT int
nvmlDeviceGetHandleByIndex(unsigned index, void **out)
{
    *out = &devices[index];
    return DONE;
}

EXPORT int
nvmlDeviceGetIndex(void *device, unsigned *out)
{
    *out = (unsigned)((int *)device - devices);
    return DONE;
}

EXPORT int
nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor)
{
    (void)device;
    *major = 9;
    *minor = 0;
    return DONE;
}

EXPORT int
nvmlDeviceGetP2PStatus(void *one, void *other, int which, int *out)
{
    (void)one, (void)other, (void)which;
    *out = 0; /* it could */
    return DONE;
}

EXPORT int
nvmlDeviceGetNvLinkState(void *device, unsigned link, int *out)
{
    (void)device, (void)link, (void)out;
    return NOT_SUPPORTED;
}

EXPORT int
nvmlDeviceGetNvLinkRemotePciInfo(void *device, unsigned link, void *out)
{
    (void)device, (void)link, (void)out;
    return NOT_SUPPORTED;
}

EXPORT int
nvmlDeviceGetNvLinkCapability(void *device, unsigned link, int which, unsigned *out)
{
    (void)device, (void)link, (void)which, (void)out;
    return NOT_SUPPORTED;
}

EXPORT int
nvmlDeviceGetFieldValues(void *device, int count, void *out)
{
    (void)device, (void)count, (void)out;
    return NOT_SUPPORTED;
}
