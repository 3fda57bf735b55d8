/* Libraries found at run time: a table of functions filled by dlopen, so that the package loads where they are not.
 *
 * Where a library is looked for, first hit wins (the order lets a process share what PyTorch has loaded already):
 *   1. the path in its environment variable (TERAPIPE_CUBLASLT, ...), and then nowhere else;
 *   2. loaded already in this process;
 *   3. the folders that tp_dl_set_folders was told (site-packages/nvidia/.../lib);
 *   4. $CUDA_HOME/lib64, $CUDA_PATH/lib64, /usr/local/cuda/lib64;
 *   5. where the loader looks by itself.
 * Nothing is ever unloaded: CUDA's libraries do not survive it.
 *
 * A table is an X-macro of functions that gives a struct of pointers and an array of names in the same order: see
 * cuda/dl_cublaslt.h and .c. */
#ifndef TP_CUDA_DL_H
#define TP_CUDA_DL_H

#include <pthread.h>
#include <stddef.h>

#include "csrc/base/status.h"

typedef struct {
    const char *what;         /* "NCCL": what errors call it */
    const char *variable;     /* "TERAPIPE_NCCL" */
    const char *package;      /* "nvidia-nccl-cu13": what to install */
    const char *const *names; /* of functions, NULL last; the table's pointers are in this order */
    const char *sonames[4];   /* "libnccl.so.2", tried in turn; NULL after the last */
    int optional;             /* the last `optional` names may be missing: their pointers are NULL then */
    int needed;               /* the oldest version, as 10000 * major + 100 * minor + patch */
    int (*version)(void);     /* the version that the table says, in which any function may be missing; 0: it does not say */
    void *table;              /* as many pointers as there are names */
} tp_dl_library;

/* What has come of a library in this process: {.lock = PTHREAD_MUTEX_INITIALIZER} before its first load. */
typedef struct {
    pthread_mutex_t lock;
    int version; /* 0: not loaded */
    char path[512];
} tp_dl_state;

/* Where 3. looks: folders between colons, copied. NULL or "": none. Before the first tp_dl_load. */
TP_MUST_USE tp_status
tp_dl_set_folders(const char *folders);
/* Fill the library's table, once per process. ERUNTIME: not found (where it was looked for, what to install), does not
 * load (which file, why), a function is missing (which, in which file), or it is older than needed; the version found and that
 * needed are said. A later call looks again. */
TP_MUST_USE tp_status
tp_dl_load(const tp_dl_library *library, tp_dl_state *state);
/* For whoever lets the loader look by name (as CUDA's runtime does for libcuda): that the file which it would take was not copied
 * whole, which would end the process, or NULL. Valid until the thread's next call. */
const char *
tp_dl_cut(const char *soname);
/* The file it came from and its version; "" and 0 before it was loaded. */
void
tp_dl_found(tp_dl_state *state, const char **path, int *version);

#endif
