/* The three matrix products of a layer, on a device, by cublasLt with cached plans. The emulated build has a cublasLt of its
 * own (cuda/emu/dl_cublaslt.c: loops on the host), where a row's result depends on that row alone.
 *
 * Matrices are row-major with strides in elements >= their width. Sums are fp32; what is stored as bf16 is rounded once, to
 * nearest even. Calls enqueue on the handle's stream and allocate nothing once a product of that shape has been prepared. */
#ifndef TP_CUDA_GEMM_H
#define TP_CUDA_GEMM_H

#include <stddef.h>
#include <stdint.h>

#include "cuda/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tp_gemm tp_gemm;

typedef enum {
    TP_GEMM_LINEAR,   /* y[rows, n_out] = epilogue(x[rows, n_in] w[n_in, n_out]) */
    TP_GEMM_LINEAR_T, /* y[rows, n_in] = epilogue(x[rows, n_out] w[n_in, n_out]^T) */
    TP_GEMM_LINEAR_W  /* float y[n_in, n_out] (+)= x[rows, n_in]^T w[rows, n_out]: the weight's gradient, w is dy */
} tp_gemm_kind;

typedef enum {
    TP_GEMM_NONE,
    TP_GEMM_BIAS,          /* LINEAR: y = acc + bias */
    TP_GEMM_BIAS_GELU_AUX, /* LINEAR: aux = acc + bias; y = gelu(aux), tanh form, of aux before or after it is rounded */
    TP_GEMM_BIAS_RESIDUAL, /* LINEAR: y = aux + (acc + bias); aux may be y */
    TP_GEMM_DGELU          /* LINEAR_T: y = acc * gelu'(aux), of acc before or after it is rounded to dtype */
} tp_gemm_epilogue;

typedef struct {
    tp_gemm_kind kind;
    tp_dtype dtype; /* of x, w, aux, bias, and of y but in LINEAR_W */
    tp_gemm_epilogue epilogue;
    int accumulate; /* LINEAR_W: 1 adds to y, 0 writes it. Elsewhere 0 */
    int64_t rows, n_in, n_out;
    const void *x;
    int64_t x_stride;
    const void *w;
    int64_t w_stride;
    void *y;
    int64_t y_stride;
    const void *bias; /* [n_out], of dtype (cublasLt has no other); NULL with an epilogue that has one: zeros */
    void *aux;        /* GELU_AUX: written; RESIDUAL, DGELU: read; [rows, width of y] */
    int64_t aux_stride;
} tp_gemm_op;

typedef struct {
    int candidates;   /* 0, 1: the heuristic's first; else that many (<= 32) are timed when a product is prepared */
    int reproducible; /* 1: one algorithm without split sums for every number of rows: a row's bits do not depend on how many
                         are multiplied with it. Slower. LINEAR_W, whose rows no slicing changes: the heuristic's first, any.
                         Where cublasLt refuses a number of rows that algorithm: another (tp_gemm_caveat) */
    int fuse;         /* 0: where timed, the faster of fused and separate GELU; else fused where cublasLt has it. Separate where
                         a fused one, when it is prepared, is not our kernel's GELU (tp_gemm_caveat). 1: always separate */
} tp_gemm_options;

/* Bytes of workspace a handle needs: the stage's arena has them. */
size_t
tp_gemm_workspace_bytes(const tp_cuda_device *device);
/* A handle for one stream of the device. workspace [tp_gemm_workspace_bytes], on the device, aligned to 256 bytes. options
 * NULL: zeros. ERUNTIME: cublasLt is missing or too old (says where it was looked for). */
TP_MUST_USE tp_status
tp_gemm_open(tp_cuda_device *device, tp_stream stream, const tp_gemm_options *options, void *workspace, tp_gemm **out);
/* NULL is allowed. */
void
tp_gemm_close(tp_gemm *gemm);
/* Choose how to do this product: once for each that a step will ask for, before it is captured. Everything but the
 * pointers counts, and of them their alignment. y and aux are overwritten: what was chosen is run, and where the library then
 * refuses it, another. x and w should hold numbers, which a fused GELU is told by. */
TP_MUST_USE tp_status
tp_gemm_prepare(tp_gemm *gemm, const tp_gemm_op *op);
/* EVALUE: a size, stride, pointer or epilogue that cannot be (names it). ERUNTIME: cublasLt cannot do it. Prepares what was
 * not prepared, untimed. rows 0: LINEAR_W with accumulate 0 writes zeros; else nothing. */
TP_MUST_USE tp_status
tp_gemm_run(tp_gemm *gemm, const tp_gemm_op *op);
/* Products prepared so far. */
int64_t
tp_gemm_plans(const tp_gemm *gemm);
/* "", or why a reproducible handle is not wholly so, why no GELU is fused, and that a bias is not. Good until the handle closes. */
const char *
tp_gemm_caveat(const tp_gemm *gemm);
/* Text about how the product of this op is done ("cublasLt algorithm 66, tile 21, fused GELU, 1.2 waves"), cut to size. */
void
tp_gemm_describe(tp_gemm *gemm, const tp_gemm_op *op, char *text, size_t size);

/* EVALUE unless the op can be. No device is asked. */
TP_MUST_USE tp_status
tp_gemm_check(const tp_gemm_op *op);
/* Columns of y: n_out; of LINEAR_T n_in. Rows of y: rows; of LINEAR_W n_in. */
int64_t
tp_gemm_width(const tp_gemm_op *op);

#ifdef __cplusplus
}
#endif

#endif
