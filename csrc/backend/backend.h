/* The kernels' vtable: what the CPU's stage (csrc/stage) asks of csrc/cpu. All numbers are fp32 unless said. A GPU's stage calls
 * the launchers of cuda/kernels.h instead; it shares the layout of rows, tp_attention and the aim of the contract below.
 *
 * Layout: activations are sequence-major, row (t, b) of token t and sequence b is row t * B + b; rows have a leading
 * dimension `ld` in floats. Gradients of parameters are accumulated (+=), activations and their gradients are written (=)
 * unless said. Kernels allocate nothing: they use backend->workspace, sized before by workspace_bytes.
 *
 * THE REPRODUCIBILITY CONTRACT, which makes every slicing give the same bits:
 *  - linear, linear_t: the K products of an output element are cut into n = ceil(K / 192) pieces, piece i being those
 *    from floor(K i / n) on. Each piece is a chain of fused multiply-adds from +0, k ascending, acc = fma(a_k, b_k, acc),
 *    and the pieces are added from the first to the last: a sum over a vocabulary in one chain would lose a digit. The
 *    epilogue (bias, residual, GELU) is applied once to the finished sum.
 *  - linear_w: rows come in groups of TP_ROW_GROUP from the first row of each call on, in the order the pointers give; the
 *    last group of a call may be shorter. The groups are a chain, from +0 or from the old value where it accumulates; how
 *    one is summed is the instruction set's (fused multiply-adds: one chain over all rows). So whoever calls cuts rows at
 *    multiples of TP_ROW_GROUP, which no slicing moves, and bias_w is called with the same rows.
 *  - AMX (amx_tile.h) sums groups of 32 k's another way and cuts K at multiples of them, into n = ceil(K / 384) pieces; a product
 *    with an infinity, or with what rounds to one in bf16 (3.396e38), is NaN there.
 *  - Other blocking, the number of rows, threads, and whether AVX2 or AVX-512 multiplies do not show in a product.
 *  - row-wise ops (LayerNorm, GELU, softmax, loss): a row's result depends on that row alone.
 *  - attention: tiles of keys and of queries are anchored at absolute multiples, so row t gives the same bits for any
 *    slice that contains it; dK, dV of a key are chains over queries ascending.
 *  - threads (team) share rows, columns or heads, never a sum.                                                          */
#ifndef TP_BACKEND_BACKEND_H
#define TP_BACKEND_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/base/mem.h"
#include "csrc/base/row_group.h"
#include "csrc/base/status.h"
#include "csrc/base/team.h"

typedef struct tp_backend tp_backend;

#define TP_SUMSQ_LEAF 16384 /* floats of a leaf of a sum of squares, counted from the first: who shards a tensor cuts it there */

/* y[rows, n_out] = epilogue(x[rows, n_in] W[n_in, n_out]); W in device layout ("value" of a weight).
 * x_stride may be negative or any: row r of x begins at x + r * x_stride. */
typedef enum {
    TP_EPILOGUE_NONE,     /* y = acc + bias */
    TP_EPILOGUE_RESIDUAL, /* y = residual + (acc + bias); residual may be y */
    TP_EPILOGUE_GELU,     /* aux = acc + bias; y = gelu(aux), tanh form */
    TP_EPILOGUE_DGELU     /* linear_t only: y = acc * gelu'(aux); y may be aux */
} tp_epilogue;

typedef struct {
    int64_t rows, n_in, n_out;
    const float *x;
    int64_t x_stride;
    const float *weight; /* linear: value layout; linear_t: transposed layout */
    const float *bias;   /* [n_out] or NULL (linear only) */
    float *y;
    int64_t y_stride;
    tp_epilogue epilogue;
    float *aux;          /* GELU: written [rows, n_out]; DGELU: read; RESIDUAL: the residual, read */
    int64_t aux_stride;
} tp_linear;

typedef struct {
    int64_t batch, heads, head_dim; /* B, H, D */
    int64_t slice, context, total;  /* S, C, T: queries are rows [C, C+S) of each sequence; T = tokens of the whole sequence */
    int64_t qkv_stride, o_stride;   /* elements between rows (t, b) and (t, b+1) of q (CUDA: k, v too) and dq, of o and do */
} tp_attention;

typedef struct {
    uint32_t abi;     /* TP_BACKEND_ABI */
    const char *name; /* "amx", "avx512", "avx2", "portable" */

    /* -- weight layouts. weight_floats >= rows * cols (padding is zero and stays zero); the layout is a permutation, so
     *    element-wise updates (adamw, sumsq) work on whole layouts. -- */
    int64_t (*weight_floats)(int64_t rows, int64_t cols);
    int64_t (*weight_t_floats)(int64_t rows, int64_t cols);
    void (*weight_import)(tp_backend *be, int64_t rows, int64_t cols, const float *row_major, float *value);
    void (*weight_export)(tp_backend *be, int64_t rows, int64_t cols, const float *value, float *row_major);
    /* packed_t[weight_t_floats] = the layout linear_t multiplies with, from value. Once per step. */
    void (*weight_transpose)(tp_backend *be, int64_t rows, int64_t cols, const float *value, float *packed_t);

    /* -- matrix products -- */
    void (*linear)(tp_backend *be, const tp_linear *op);   /* y = x W */
    void (*linear_t)(tp_backend *be, const tp_linear *op); /* y[rows, n_in] = x[rows, n_out] W^T; op->n_in, n_out are W's shape */
    /* grad (value layout of [n_in, n_out]) (+)= sum over r of x[r, :]^T dy[r, :], r = 0..rows-1 in this order, groups of
     * TP_ROW_GROUP from r = 0 on; strides may be negative (rows walked downwards). accumulate 0: chains start from +0 and
     * grad is overwritten. */
    void (*linear_w)(tp_backend *be, int64_t rows, int64_t n_in, int64_t n_out, const float *x, int64_t x_stride,
                     const float *dy, int64_t dy_stride, float *grad, int accumulate);
    /* grad[n] = chain over rows of grad[n] + dy[r, n] (accumulate 0: from +0). */
    void (*bias_w)(tp_backend *be, int64_t rows, int64_t n, const float *dy, int64_t dy_stride, float *grad, int accumulate);

    /* -- attention: k, v (kv_stride floats between rows), dk, dv (dkv_stride) point at row (0, 0), head 0; q, dq, o, d_o have the
     *    slice's rows alone, from (C, 0) on; head h at + h * D. scale = 1/sqrt(D). --
     * forward reads k, v rows [0, C+S); writes o and lse[(b * H + h) * T + t] (natural log). Both are NaN where scores are 2^29 or
     *   more: an lse of that size does not give P back.
     * backward (push): delta[(b * H + h) * T + t] = sum_d do * o is written for rows [C, C+S), over the sum of P as a rounded lse
     *   gives it where that lse is large; dq from k, v rows [0, C+S); dk, dv rows [0, C+S) go on with what these queries add, one
     *   chain over queries descending, begun by the slice that ends the sequence: rows [C, C+S) are complete then, as no later
     *   query is left and no earlier one sees them. Called for slices in descending order. dq, dk, dv may not alias q, k, v. */
    void (*attention_forward)(tp_backend *be, const tp_attention *shape, const float *q, const float *k, const float *v,
                              int64_t kv_stride, float *o, float *lse);
    void (*attention_backward)(tp_backend *be, const tp_attention *shape, const float *q, const float *k, const float *v,
                               int64_t kv_stride, const float *o, const float *d_o, const float *lse, float *delta, float *dq,
                               float *dk, float *dv, int64_t dkv_stride);

    /* -- LayerNorm, eps 1e-5. y may be NULL (statistics only). beta may be NULL. mean, rstd [rows]. -- */
    void (*layernorm)(tp_backend *be, int64_t rows, int64_t n, const float *x, int64_t x_stride, const float *gamma,
                      const float *beta, float *y, int64_t y_stride, float *mean, float *rstd);
    /* y = (x - mean) * rstd * gamma + beta from saved statistics: the same bits as layernorm gave. statistics of row r at
     * mean[r * stat_stride]. x_stride, stat_stride may be negative. */
    void (*layernorm_apply)(tp_backend *be, int64_t rows, int64_t n, const float *x, int64_t x_stride, const float *mean,
                            const float *rstd, int64_t stat_stride, const float *gamma, const float *beta, float *y,
                            int64_t y_stride);
    /* dx = dresidual + LayerNorm's input gradient of dy (dresidual NULL: nothing is added; may be dx).
     * dgamma[n], dbeta[n] (NULL: no bias): chains over rows r = 0..rows-1 added to the old values. All strides may be negative. */
    void (*layernorm_backward)(tp_backend *be, int64_t rows, int64_t n, const float *dy, int64_t dy_stride, const float *x,
                               int64_t x_stride, const float *mean, const float *rstd, int64_t stat_stride,
                               const float *gamma, const float *dresidual, int64_t dresidual_stride, float *dx,
                               int64_t dx_stride, float *dgamma, float *dbeta);

    /* -- embedding. wte, wpe in value layout of [V, E], [block_size, E]. tokens[r], positions[r] of each row. -- */
    void (*embedding)(tp_backend *be, int64_t rows, int64_t n, int64_t vocab, int64_t positions_count, const int32_t *tokens,
                      const int32_t *positions, const float *wte, const float *wpe, float *y, int64_t y_stride);
    /* grad (value layout of [height, n])[index[r], :] += dy[r, :], r = 0..rows-1 in this order. */
    void (*scatter_add)(tp_backend *be, int64_t rows, int64_t n, int64_t height, const int32_t *index, const float *dy,
                        int64_t dy_stride, float *grad);

    /* -- loss: logits [rows, vocab] in place -> dlogits = (softmax - onehot) * scale; loss[r] = -log softmax[target] as
     *    double. dlogits 0: leave the logits alone. -- */
    void (*softmax_loss)(tp_backend *be, int64_t rows, int64_t vocab, float *logits, int64_t stride, const int32_t *targets,
                         float scale, int dlogits, double *loss);

    /* -- element-wise over n floats of a layout -- */
    void (*add)(tp_backend *be, int64_t n, const float *x, float *y);      /* y += x */
    void (*copy)(tp_backend *be, int64_t n, const float *x, float *y);     /* y = x */
    void (*zero)(tp_backend *be, int64_t n, float *y);
    double (*sumsq)(tp_backend *be, int64_t n, const float *x);            /* fixed tree in double, the same for any team: */
    /* leaves[ceil(n / TP_SUMSQ_LEAF)] = its leaves, which sumsq adds up in their order. */
    void (*sumsq_leaves)(tp_backend *be, int64_t n, const float *x, double *leaves);
    /* Decoupled AdamW (Loshchilov & Hutter 2019): g' = g * grad_scale; m, v updated; bias-corrected; p = from - lr * (mhat /
     * (sqrt(vhat) + eps) + weight_decay * from). Coefficients already hold the step: bias1 = 1 - beta1^t. `from` may be p. */
    void (*adamw)(tp_backend *be, int64_t n, const float *from, float *p, const float *g, float *m, float *v, float lr,
                  double beta1, double beta2, float eps, float weight_decay, float bias1, float bias2, float grad_scale);

    /* Bytes of workspace that every op above needs for stages of a model of these dimensions, slices of up to `rows`
     * rows, with `members` threads. */
    size_t (*workspace_bytes)(int64_t n_embd, int64_t n_head, int64_t vocab, int64_t seq_len, int64_t rows, int members);
} tp_backend_ops;

#define TP_BACKEND_ABI 5u

struct tp_backend {
    const tp_backend_ops *ops;
    tp_heap *heap;   /* borrowed: the rank's account */
    tp_team *team;   /* borrowed; NULL: one thread */
    void *workspace; /* owned; NULL until tp_backend_reserve */
    size_t workspace_bytes;
};

/* The embedded CPU backend. isa NULL: the best this processor has, or $TERAPIPE_ISA; "amx", "avx512", "avx2", "portable".
 * EVALUE: unknown or not supported here. Fills *be; ended by tp_backend_close. */
TP_MUST_USE tp_status
tp_cpu_open(const char *isa, tp_heap *heap, tp_team *team, tp_backend *be);
/* The vtable alone, for sizes: never fails for isa NULL. NULL if isa is unknown or not supported here. */
const tp_backend_ops *
tp_cpu_ops(const char *isa);
/* Allocate the workspace from the heap. */
TP_MUST_USE tp_status
tp_backend_reserve(tp_backend *be, size_t bytes);
void
tp_backend_close(tp_backend *be);

#endif
