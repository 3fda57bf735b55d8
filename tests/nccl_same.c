/* cuda/dl_nccl.h against the real nccl.h: compiled (not run) by tests/test_cuda_nccl.py where that header is. */
#include <nccl.h>

#include "cuda/dl_nccl.h"

#define SAME(ours, theirs) _Static_assert((long long)(ours) == (long long)(theirs), #ours " is not " #theirs)
SAME(NC_SUCCESS, ncclSuccess);
SAME(NC_SYSTEM_ERROR, ncclSystemError);
SAME(NC_INVALID_ARGUMENT, ncclInvalidArgument);
SAME(NC_INVALID_USAGE, ncclInvalidUsage);
SAME(NC_REMOTE_ERROR, ncclRemoteError);
SAME(NC_IN_PROGRESS, ncclInProgress);
SAME(NC_INT8, ncclInt8);
SAME(NC_UNDEFINED, NCCL_CONFIG_UNDEF_INT);
SAME(NC_ID_BYTES, NCCL_UNIQUE_ID_BYTES);
SAME(sizeof(nc_id), sizeof(ncclUniqueId));
SAME(NC_CONFIG_VERSION, NCCL_VERSION(2, 18, 1));
#define FIELD(ours, theirs) SAME(offsetof(nc_config, ours), offsetof(ncclConfig_t, theirs))
FIELD(size, size);
FIELD(magic, magic);
FIELD(version, version);
FIELD(blocking, blocking);
FIELD(cga_cluster_size, cgaClusterSize);
FIELD(min_ctas, minCTAs);
FIELD(max_ctas, maxCTAs);
FIELD(net_name, netName);
FIELD(split_share, splitShare);

/* The functions by their types: enums are ints, pointers to structs are pointers. */
ncclResult_t (*const init)(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *) = ncclCommInitRankConfig;
ncclResult_t (*const split)(ncclComm_t, int, int, ncclComm_t *, ncclConfig_t *) = ncclCommSplit;
ncclResult_t (*const async)(ncclComm_t, ncclResult_t *) = ncclCommGetAsyncError;
ncclResult_t (*const send)(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) = ncclSend;
ncclResult_t (*const recv)(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) = ncclRecv;
ncclResult_t (*const attach)(const ncclComm_t, void *, size_t, void **) = ncclCommRegister;
ncclResult_t (*const detach)(const ncclComm_t, void *) = ncclCommDeregister;
ncclResult_t (*const take)(void **, size_t) = ncclMemAlloc;
ncclResult_t (*const give)(void *) = ncclMemFree;
ncclResult_t (*const end)(ncclComm_t) = ncclCommFinalize;
const char *(*const last)(ncclComm_t) = ncclGetLastError;
