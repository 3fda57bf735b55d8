/* What cuda/gemm.c shares with gemm_prove.c, which runs a chosen algorithm once before a step relies on it. */
#ifndef TP_CUDA_GEMM_INSIDE_H
#define TP_CUDA_GEMM_INSIDE_H

#include "cuda/dl_cublaslt.h"
#include "cuda/gemm.h"
#include "cuda/gemm_key.h"

enum { GEMM_BUCKETS = 256, GEMM_REFUSALS = 16 };
enum { GEMM_DIFFERS = 1, GEMM_OTHER_GELU = 2, GEMM_NO_BIAS = 4 }; /* what is said once */
/* What cublasLt does with a product: all that its epilogue says; all but a GELU; neither GELU nor bias. */
typedef enum { GEMM_FUSED, GEMM_APART, GEMM_BARE } gemm_way;

typedef struct plan {
    plan_key key;
    int epilogue; /* that cublasLt runs; a GELU not fused, or a bias, follows as a kernel */
    int fused, bias_apart;
    lt_desc desc;
    lt_layout a, b, c, d;
    lt_algo algo;
    size_t workspace;
    float waves;
    struct plan *pin; /* whose algorithm it has, or NULL */
    int users;        /* of a pin */
    struct plan *next;
} plan;

struct tp_gemm {
    tp_cuda_device *device;
    tp_stream stream;
    tp_gemm_options options;
    const tp_cublaslt *lt;
    lt_handle handle;
    void *workspace;
    size_t workspace_bytes;
    int32_t multiprocessors; /* the device's, or its part's */
    int64_t count;
    plan *buckets[GEMM_BUCKETS];
    plan *pins; /* of a reproducible handle: plans for CANONICAL_ROWS */
    lt_algo refused[GEMM_REFUSALS]; /* offered, but did not run */
    int refusals, said;
    char caveat[512];
};

static inline int
tp_gemm_is_gelu(tp_gemm_epilogue epilogue)
{
    return epilogue == TP_GEMM_BIAS_GELU_AUX || epilogue == TP_GEMM_DGELU;
}

/* ---- gemm.c ---- */

/* NULL is allowed. */
void
tp_gemm_plan_free(const tp_gemm *gemm, plan *p);
/* Into the plan's descriptor: before each run. */
TP_MUST_USE tp_status
tp_gemm_set_pointers(const tp_gemm *gemm, const plan *p, const tp_gemm_op *op);
/* Enqueue with this algorithm, the product times alpha, and what the plan has apart. */
TP_MUST_USE tp_status
tp_gemm_execute(const tp_gemm *gemm, const plan *p, const tp_gemm_op *op, const lt_algo *algo, float alpha);
/* A plan, the caller's, that is done this way; *out NULL if cublasLt has no algorithm. seconds NULL: not timed. */
TP_MUST_USE tp_status
tp_gemm_try_plan(const tp_gemm *gemm, const plan_key *key, const tp_gemm_op *op, gemm_way way, double *seconds,
                 plan **out);
/* The product's plan anew, of what is left: `refused` and `options.fuse` say what is not. */
TP_MUST_USE tp_status
tp_gemm_replan(tp_gemm *gemm, const tp_gemm_op *op, plan **p);

/* ---- gemm_apart.c ---- */

/* 1: our kernel can add this product's bias (fp32 alone, rows without gaps). */
int
tp_gemm_may_add_bias(const tp_gemm_op *op);
/* *y: where the product goes. EVALUE: rows with gaps, where a GELU is apart. */
TP_MUST_USE tp_status
tp_gemm_before(const plan *p, const tp_gemm_op *op, void **y);
/* Enqueue what is left to do once the product is at y. */
TP_MUST_USE tp_status
tp_gemm_behind(const tp_gemm *gemm, const plan *p, const tp_gemm_op *op, void *y);

/* ---- gemm_prove.c ---- */

/* Into the caveat, the first time of each `what`. */
void
tp_gemm_say(tp_gemm *gemm, int what, const char *format, ...) __attribute__((format(printf, 3, 4)));

int
tp_gemm_was_refused(const tp_gemm *gemm, const lt_algo *algo);
/* Out of *count that were found. */
void
tp_gemm_drop_refused(const tp_gemm *gemm, lt_heuristic *found, int *count);
/* Run a plan that was made just now. One that the library refuses after all gives way to another; so does a fused GELU that is not
 * ours beside it, on up to 16 of the rows. y and aux are written. */
TP_MUST_USE tp_status
tp_gemm_prove(tp_gemm *gemm, const tp_gemm_op *op, plan *p);

#endif
