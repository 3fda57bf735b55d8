/* The attention of a slice as a graph of cuDNN's backend API, and the plan that runs it.
 *
 * The graph is the composite one: S = scale Q K^T; what a query may not see becomes -FLT_MAX; softmax over the keys, whose max
 * plus log of the sum is an output (our lse: natural logarithm); O = P V. Query row r of the slice sees key c where
 * r + s_kv - s_q >= c: "bottom-right causal", the slice being the last s_q rows of its context and itself. cuDNN recognises
 * the whole as one flash-attention kernel; no intermediate is stored. Strides are those of our rows, K and V where they lie; lse's
 * too: 9.19's kernel for sm_90 has all three of them as parameters, and the logarithm is the natural one (disassembled). */
#ifndef TP_CUDA_CUDNN_GRAPH_H
#define TP_CUDA_CUDNN_GRAPH_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/backend/backend.h"
#include "cuda/dl_cudnn.h"

/* Of the tensors in memory. Intermediates have other ids. */
typedef enum {
    TP_CUDNN_Q = 1,   /* bf16 [B, H, s_q, D] */
    TP_CUDNN_K,       /* bf16 [B, H, D, s_kv]: transposed by its strides */
    TP_CUDNN_V,       /* bf16 [B, H, s_kv, D] */
    TP_CUDNN_O,       /* bf16 [B, H, s_q, D] */
    TP_CUDNN_LSE,     /* fp32 [B, H, s_q, 1] */
    TP_CUDNN_SCALE,   /* fp32, from here on numbers that are the host's, given at each run */
    TP_CUDNN_HIDDEN,  /* fp32 */
    TP_CUDNN_S_Q,     /* int32 */
    TP_CUDNN_S_KV,    /* int32 */
    TP_CUDNN_IDS      /* one more than the last */
} tp_cudnn_id;

/* Where plans are made for. On a part of a GPU too they are the whole's: no engine of attention takes another number of
 * multiprocessors (CUDNN_ATTR_ENGINEHEUR_SM_COUNT_TARGET; 9.19 offers none then), and blocks that are too many wait. */
typedef struct {
    const tp_cudnn_library *dnn;
    dn_handle handle;         /* NULL: `deviceprop` describes a device that is not here (9.8 or newer): such plans do not run */
    dn_descriptor deviceprop;
    size_t workspace_bytes;   /* a plan may have */
} tp_cudnn_place;

typedef struct tp_cudnn_plan tp_cudnn_plan;

/* The forward plan of a shape that cuda/attention.cu would take, in bf16: the first of what cuDNN's heuristics offer (mode A) that
 * is deterministic, does not want more workspace and can be built: 0.5 to 1.5 s, as cuDNN compiles its kernel. It allocates, and
 * must not be called while a stream captures. ERUNTIME: cuDNN has none, and what it said of the last. */
TP_MUST_USE tp_status
tp_cudnn_plan_forward(const tp_cudnn_place *place, const tp_attention *shape, tp_cudnn_plan **out);
/* NULL is allowed. */
void
tp_cudnn_plan_free(const tp_cudnn_library *dnn, tp_cudnn_plan *plan);
/* Enqueue on the stream of the place's handle; pointers as tp_cuda_attention_forward's. */
TP_MUST_USE tp_status
tp_cudnn_plan_run(const tp_cudnn_place *place, const tp_cudnn_plan *plan, const void *q, const void *k, const void *v, void *o,
                  float *lse, void *workspace);
/* cuDNN's number of its engine, and bytes of workspace that it wants. */
int64_t
tp_cudnn_plan_engine(const tp_cudnn_plan *plan);
size_t
tp_cudnn_plan_workspace(const tp_cudnn_plan *plan);

#endif
