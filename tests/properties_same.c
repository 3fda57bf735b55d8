/* cuda/properties.h against the real cuda.h: compiled (not run) by tests/test_cuda_nccl.py where that header is. */
#include <cuda.h>

#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #ours " is not " #theirs)
SAME(13, CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
SAME(16, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(36, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE);
SAME(37, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
SAME(38, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
SAME(75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(76, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(97, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME(sizeof(int), sizeof(CUdevice));
SAME(16, sizeof(CUuuid));
CUresult (*const a)(unsigned) = cuInit;
CUresult (*const b)(CUdevice *, int) = cuDeviceGet;
CUresult (*const c)(int *, CUdevice_attribute, CUdevice) = cuDeviceGetAttribute;
CUresult (*const d)(char *, int, CUdevice) = cuDeviceGetName;
CUresult (*const e)(size_t *, CUdevice) = cuDeviceTotalMem_v2;
CUresult (*const f)(CUuuid *, CUdevice) = cuDeviceGetUuid_v2;
CUresult (*const g)(char *, int, CUdevice) = cuDeviceGetPCIBusId;
