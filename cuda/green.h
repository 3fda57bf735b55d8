/* K equal parts of one GPU's multiprocessors: green contexts of the driver (CUDA 12.4 and later; Driver API 13.0, "Green
 * Contexts"), used by their streams and events: memory and modules stay the primary context's, and a green context is current
 * only while an event is created in it and around cublasLt's calls. What multiprocessors are left over belongs to none.
 *
 * cublasLt in the primary context, told of the part by CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET alone, takes clusters of 8 blocks and
 * tiles that are slow on it: for 512 rows of eight of GPT's products (2048 wide, a quarter of an H200) the fastest algorithms that it
 * offers so take 36 to 130 us, and those by the same call in the part's context 23 to 91, each 1.4 to 1.7 times as fast
 * (benchmarks/results/h200-2026-11-26-parts.json). Tried with cublasLt 13.1, in captures too; where another refuses in one, steps are
 * enqueued call by call.
 *
 * That its streams take work while the primary context is current: a green context's is "a normal primary context but with the
 * resources" of it (cuCtxFromGreenCtx), such a stream is of both to the driver (cuStreamGetCtx_v2), and it was seen of CUDA 13.1
 * that the green one need be current only where its stream is made (pytorch issue 176582). No page promises it of launches and
 * captures, and of events only that event and stream be of one context (cuEventRecord): tp_cuda_open tries launches and events
 * before there is work, and a step whose capture is refused is enqueued call by call. */
#ifndef TP_CUDA_GREEN_H
#define TP_CUDA_GREEN_H

#include "cuda/device.h"

/* What we use of the driver, declared here; tests/green_same.c asserts it against cuda.h. CUresult 0 is success. */
typedef struct {
    int type; /* 1: multiprocessors */
    unsigned char padding[92];
    union {
        struct {
            unsigned count, least, alignment;
        } sm;
        unsigned char oversize[48];
    } is;
} tp_green_resource;
typedef struct {
    int (*device_resource)(int device, tp_green_resource *, int type);
    int (*split)(tp_green_resource *groups, unsigned *count, const tp_green_resource *input, tp_green_resource *remaining,
                 unsigned flags, unsigned least);
    int (*describe)(void **description, tp_green_resource *, unsigned count);
    int (*create)(void **context, void *description, int device, unsigned flags);
    int (*destroy)(void *context);
    int (*stream)(void **stream, void *context, unsigned flags, int priority);
    int (*resource_of)(void *context, tp_green_resource *, int type);
    int (*current_of)(void **context, void *green);
    int (*push)(void *context);
    int (*pop)(void **context);
    int (*event)(void **event, unsigned flags);
} tp_green_driver;

typedef struct tp_green tp_green;

/* Split device `index` into `parts`, as large as they can be equal: the driver may make fewer groups than asked (whole
 * processing clusters), so the size goes down by 8 until there are enough. driver NULL: the real one. EVALUE: parts out of
 * range. ERUNTIME: a driver without green contexts. EINFEASIBLE: so many parts of at least 8 do not fit (names how many do). */
TP_MUST_USE tp_status
tp_green_open(int index, int parts, const tp_green_driver *driver, tp_green **out);
/* Part i, for tp_cuda_open: its streams, and the multiprocessors that were read back from its context. */
const tp_cuda_partition *
tp_green_part(const tp_green *green, int i);
/* After every device that was opened on a part. Takes NULL. */
void
tp_green_close(tp_green *green);

#endif
