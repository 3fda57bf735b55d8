/* A rank's device as the engine sees it (tp_device_ops), with what its stages share: stream, matrix products, workspace. */
#ifndef TP_CUDA_RANK_H
#define TP_CUDA_RANK_H

#include "csrc/stage/stage_ops.h"
#include "cuda/cudnn.h"
#include "cuda/device.h"
#include "cuda/gemm.h"
#include "cuda/kernels.h"

#define TP_CUDA_GEMM_BYTES ((size_t)32 << 20) /* on every device, so that a plan need not know which (gemm.h: at most) */

#ifndef TP_CUDA_SUM_FLOATS /* tests have few, to cross the border */
#define TP_CUDA_SUM_FLOATS ((int64_t)4 << 20) /* a link of 300 GB/s has them in 56 us: what starts a message is little beside it */
#endif

typedef struct {
    tp_cuda_event event;
    int64_t *at;
} tp_cuda_mark;

/* Marks in the order in which they were made. */
typedef struct {
    tp_cuda_mark *mark;
    int64_t count, room; /* events exist up to room */
} tp_cuda_marks;

/* A stretch of instructions and its graph, once it has been seen: eager the first time (products are prepared), captured and
 * then eager the second, launched from then on. A graph is made ready at the end of a step, when no receive is posted: making it
 * takes memory and may wait for the device, and so for a peer that waits in the same way for this rank's messages. */
typedef struct {
    int64_t position;
    int seen, gave_up;
    tp_cuda_graph graph;
    int ready;           /* the graph, to be launched */
    tp_cuda_marks marks; /* the graph's own */
} tp_cuda_stretch;

typedef struct {
    tp_device base;
    tp_device_config config;
    tp_cuda_device *cuda;
    tp_stream stream; /* compute */
    tp_gemm *gemm;
    tp_cudnn *cudnn;  /* NULL: attention is our kernels' */
    tp_attention_kernel attention; /* which of them */
    int keeps;        /* it keeps dS of a slice's own pairs (tp_cuda_attention_backward) */
    int kept_is_checked; /* by a stage: the device has been asked whether that shows in the bits */
    void *workspace;  /* TP_CUDA_GEMM_BYTES, of products, of cuDNN's plans and of such dS, as one runs after the other; then `partial` */
    void *partial;    /* of sums over rows */
    tp_stream aside;              /* of swaps beside the work; NULL: there were none yet */
    tp_cuda_event given;          /* what the compute stream was given before the copy that is begun */
    tp_cuda_event *copied;        /* [copies] by number, that it is done */
    int64_t copies;
    tp_cuda_event origin;
    int64_t origin_ns; /* host's clock when the device came to `origin` */
    tp_cuda_marks marks;
    tp_cuda_stretch *stretch; /* [stretches], ascending in position */
    int64_t stretches, room;
    tp_cuda_stretch *capturing; /* between stretch_begin and stretch_end */
    int64_t replayed;           /* stretches launched as graphs, ever */
    char caveat[512];           /* why the first stretch that was not captured was not; "": all are */
    const char *unkept;         /* why dS is not kept, where it might be; "": nothing to say */
    const char *asked;          /* what came of TERAPIPE_ATTENTION, where cuDNN does not say it; "": nothing to say */
    char told[1536];            /* all caveats */
} tp_cuda_rank;

extern const tp_device_ops tp_cuda_device_ops;
extern const tp_stage_ops tp_cuda_stage_ops;

/* Bytes of workspace for this stage: what tp_device_ops.workspace_bytes says. */
size_t
tp_cuda_workspace_bytes(const tp_stage_config *stage, const tp_device_config *config);
/* Which of our kernels computes attention there: by wgmma in bf16 where the device has it, else by mma.sync, or as
 * TERAPIPE_ATTENTION says. A row's bits are the same in every slice with either, not those of the other: ranks of a reproducible
 * run have one. EVALUE: the variable is none of its words. ERUNTIME: wgmma is asked for where there is none. */
TP_MUST_USE tp_status
tp_cuda_attention_choose(const tp_cuda_properties *properties, tp_dtype dtype, tp_attention_kernel *out);
/* The device behind an engine's, for a communicator that sends from its memory. */
static inline tp_cuda_rank *
tp_cuda_rank_of(tp_device *device)
{
    return (tp_cuda_rank *)device;
}

#endif
