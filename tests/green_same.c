/* cuda/green.h against the real cuda.h: compiled (not run) by tests/test_cuda_nccl.py where that header is. */
#include <cuda.h>
#include <stddef.h>

#include "cuda/faults.h"
#include "cuda/green.h"

#define SAME(ours, theirs) _Static_assert((long long)(ours) == (long long)(theirs), #ours " is not " #theirs)
SAME(sizeof(tp_green_resource), sizeof(CUdevResource));
SAME(offsetof(tp_green_resource, is.sm.count), offsetof(CUdevResource, sm.smCount));
SAME(1, CU_DEV_RESOURCE_TYPE_SM);
SAME(1, CU_GREEN_CTX_DEFAULT_STREAM);
SAME(1, CU_STREAM_NON_BLOCKING);
SAME(sizeof(int), sizeof(CUdevice));
CUresult (*const a)(CUdevice, CUdevResource *, CUdevResourceType) = cuDeviceGetDevResource;
CUresult (*const b)(CUdevResource *, unsigned *, const CUdevResource *, CUdevResource *, unsigned, unsigned) =
    cuDevSmResourceSplitByCount;
CUresult (*const c)(CUdevResourceDesc *, CUdevResource *, unsigned) = cuDevResourceGenerateDesc;
CUresult (*const d)(CUgreenCtx *, CUdevResourceDesc, CUdevice, unsigned) = cuGreenCtxCreate;
CUresult (*const e)(CUgreenCtx) = cuGreenCtxDestroy;
CUresult (*const f)(CUstream *, CUgreenCtx, unsigned, int) = cuGreenCtxStreamCreate;
CUresult (*const g)(CUgreenCtx, CUdevResource *, CUdevResourceType) = cuGreenCtxGetDevResource;
CUresult (*const h)(CUcontext *, CUgreenCtx) = cuCtxFromGreenCtx;
CUresult (*const i)(CUcontext) = cuCtxPushCurrent;
CUresult (*const j)(CUcontext *) = cuCtxPopCurrent;
CUresult (*const k)(CUevent *, unsigned) = cuEventCreate;
SAME(0, CU_EVENT_DEFAULT);
SAME(2, CU_EVENT_DISABLE_TIMING);
/* the driver's numbers are the runtime's (green.c) */
SAME(TP_CUDA_NO_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(TP_CUDA_BAD_HANDLE, CUDA_ERROR_INVALID_HANDLE);
SAME(TP_CUDA_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(719, CUDA_ERROR_LAUNCH_FAILED);
SAME(810, CUDA_ERROR_MPS_CLIENT_TERMINATED);
