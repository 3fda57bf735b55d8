/* What we use of NCCL, declared here because its header is not where packages are built. tests/nccl_same.c asserts each against
 * the real nccl.h where one is installed. Source: NCCL 2.28 user guide, "Communicators", "Point-to-point", "User buffer
 * registration". */
#ifndef TP_CUDA_DL_NCCL_H
#define TP_CUDA_DL_NCCL_H

#include <limits.h>
#include <stddef.h>

#include "csrc/base/status.h"
#include "cuda/device.h"

enum { /* ncclResult_t */
    NC_SUCCESS = 0,
    NC_SYSTEM_ERROR = 2,
    NC_INVALID_ARGUMENT = 4,
    NC_INVALID_USAGE = 5,
    NC_REMOTE_ERROR = 6,
    NC_IN_PROGRESS = 7
};
enum { NC_INT8 = 0, NC_UNDEFINED = INT_MIN, NC_ID_BYTES = 128 };

typedef struct nc_comm *nc_comm;

typedef struct {
    char internal[NC_ID_BYTES];
} nc_id;

/* ncclConfig_t as of 2.18: later versions append, and read by `size` and `version` what is there. */
#define NC_CONFIG_MAGIC   0xcafebeefu
#define NC_CONFIG_VERSION 21801u
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
    int reserved; /* of a later version: undefined */
} nc_config;

/* Calls do not block; a communicator shares nothing with its parent: see nccl.h. Where the most CTAs are NCCL's choice, so are the
 * fewest: it takes an undefined bound for a number and refuses what would then be the wrong way round. */
#define NC_CONFIG(most_ctas)                                                                                                   \
    ((nc_config){sizeof(nc_config), NC_CONFIG_MAGIC, NC_CONFIG_VERSION, 0, NC_UNDEFINED,                                       \
                 (most_ctas) == NC_UNDEFINED ? NC_UNDEFINED : 1, (most_ctas), NULL, 0, NC_UNDEFINED})

typedef int nc_get_version(int *);
typedef int nc_get_id(nc_id *);
typedef int nc_init(nc_comm *, int ranks, nc_id, int rank, nc_config *);
typedef int nc_split(nc_comm, int color, int key, nc_comm *, nc_config *);
typedef int nc_get_async_error(nc_comm, int *);
typedef int nc_on_comm(nc_comm);
typedef int nc_settled(nc_comm, int left);
typedef int nc_group(void);
typedef const char *nc_error_string(int);
typedef const char *nc_last_error(nc_comm);
typedef int nc_send(const void *, size_t count, int type, int peer, nc_comm, tp_stream);
typedef int nc_recv(void *, size_t count, int type, int peer, nc_comm, tp_stream);
typedef int nc_mem_alloc(void **, size_t);
typedef int nc_mem_free(void *);
typedef int nc_register(nc_comm, void *, size_t, void **);
typedef int nc_deregister(nc_comm, void *);

/* X(our member, our type, the library's name); the last TP_NCCL_OPTIONAL may be missing */
#define TP_NCCL_TABLE(X)                                                                                               \
    X(get_version, nc_get_version, ncclGetVersion)                                                                     \
    X(get_id, nc_get_id, ncclGetUniqueId)                                                                              \
    X(init, nc_init, ncclCommInitRankConfig)                                                                           \
    X(split, nc_split, ncclCommSplit)                                                                                  \
    X(get_async_error, nc_get_async_error, ncclCommGetAsyncError)                                                      \
    X(finalize, nc_on_comm, ncclCommFinalize)                                                                          \
    X(destroy, nc_on_comm, ncclCommDestroy)                                                                            \
    X(abort, nc_on_comm, ncclCommAbort)                                                                                \
    X(group_start, nc_group, ncclGroupStart)                                                                           \
    X(group_end, nc_group, ncclGroupEnd)                                                                               \
    X(error_string, nc_error_string, ncclGetErrorString)                                                               \
    X(last_error, nc_last_error, ncclGetLastError)                                                                     \
    X(send, nc_send, ncclSend)                                                                                         \
    X(recv, nc_recv, ncclRecv)                                                                                         \
    X(mem_alloc, nc_mem_alloc, ncclMemAlloc)                                                                           \
    X(mem_free, nc_mem_free, ncclMemFree)                                                                              \
    X(register_buffer, nc_register, ncclCommRegister)                                                                  \
    X(deregister_buffer, nc_deregister, ncclCommDeregister)                                                            \
    X(settled, nc_settled, fake_nccl_settled) /* libnccls of tests alone: emulated streams do not wait by themselves */
#define TP_NCCL_OPTIONAL 5

typedef struct {
#define TP_NCCL_MEMBER(member, type, name) type *member;
    TP_NCCL_TABLE(TP_NCCL_MEMBER)
#undef TP_NCCL_MEMBER
} tp_nccl;

/* The table, loaded once per process; 2.18.1 or newer. ERUNTIME as tp_dl_load. */
TP_MUST_USE tp_status
tp_nccl_load(const tp_nccl **out);
/* The file it came from and its version as 10000 * major + 100 * minor + patch; "" and 0 before it was loaded. */
void
tp_nccl_found(const char **path, int *version);
/* What the one that was loaded lacks of what we would use, and what comes of it; "": nothing, or none was loaded. */
const char *
tp_nccl_lacks(void);

#endif
