/* Every kernel's launcher. All are asynchronous on `stream` and allocate nothing; pointers are the device's (the host's in
 * the emulated build) unless said. Statuses: ERUNTIME, the launch was not taken (names the kernel).
 *
 * Numbers: arrays of `void` are of `dtype`; all else is fp32 (doubles and int32 where written). Arithmetic is fp32 and a
 * bf16 result is rounded once, to nearest even. NaN goes through every kernel: a run that diverged shows.
 * Layout: sequence-major rows (backend.h); strides are in elements and not below n. Any alignment is right; arrays whose
 * first element and stride are multiples of 16 bytes are read and written 16 bytes at a time. rows, n, groups >= 0.
 *
 * THE REPRODUCIBILITY CONTRACT: no float is added by an atomic. A row's result depends on that row alone. Sums over rows
 * are taken in tiles anchored at the first row given (row 0 of the micro-batch), by a tree that follows from the number
 * of rows; so every slicing gives the same bits, and so does every order in which blocks run.                            */
#ifndef TP_CUDA_KERNELS_H
#define TP_CUDA_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "cuda/device.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "csrc/backend/backend.h"

/* ---- rows: norm.cu, pointwise.cu ------------------------------------------------------------------------------------ */

/* LayerNorm (Ba, Kiros & Hinton 2016), eps 1e-5: y = (x - mean) * rstd * gamma + beta; variance in a second pass. The mean that y is
 * made with has more digits than the one written. A row whose deviation is beyond 5e29 is NaN.
 * beta NULL: none. mean, rstd [rows], either may be NULL. y NULL: statistics only; y may be x. */
TP_MUST_USE tp_status
tp_cuda_layernorm(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, const void *x, int64_t x_stride,
                  const float *gamma, const float *beta, void *y, int64_t y_stride, float *mean, float *rstd);
/* dx = dresidual + LayerNorm's input gradient of dy, from the statistics that tp_cuda_layernorm wrote. dresidual NULL:
 * nothing is added. dx may be dresidual, dy or x (of the same stride). */
TP_MUST_USE tp_status
tp_cuda_layernorm_backward(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, const void *dy, int64_t dy_stride,
                           const void *x, int64_t x_stride, const float *mean, const float *rstd, const float *gamma,
                           const void *dresidual, int64_t dresidual_stride, void *dx, int64_t dx_stride);
/* Floats of `partial` that the two sums over rows below need: enough for either, and for fewer rows. */
int64_t
tp_cuda_partial_floats(int64_t rows, int64_t n);
/* dgamma[n] (+)= sum over all rows of dy * unit, dbeta[n] (+)= sum of dy (NULL: no bias), unit = (x - mean) * rstd.
 * accumulate 0: overwritten. partial: written, not read before. */
TP_MUST_USE tp_status
tp_cuda_layernorm_param_gradient(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, const void *dy,
                                 int64_t dy_stride, const void *x, int64_t x_stride, const float *mean,
                                 const float *rstd, float *dgamma, float *dbeta, int accumulate, float *partial);
/* db[n] (+)= sum over all rows of dy. */
TP_MUST_USE tp_status
tp_cuda_bias_gradient(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, const void *dy, int64_t dy_stride,
                      float *db, int accumulate, float *partial);
/* Rows without gaps, [rows, n]. g = gelu(h), the tanh form (Hendrycks & Gimpel 2016); g may be h. */
TP_MUST_USE tp_status
tp_cuda_gelu(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, const void *h, void *g);
/* dh = dg * gelu'(h); dh may be dg or h. */
TP_MUST_USE tp_status
tp_cuda_dgelu(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, const void *h, const void *dg, void *dh);
/* y = residual + (y + bias), [rows, n] without gaps; bias [n] or residual NULL: not added. */
TP_MUST_USE tp_status
tp_cuda_add_bias(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, void *y, const float *bias,
                 const void *residual);
/* y += x, n elements. */
TP_MUST_USE tp_status
tp_cuda_add(tp_stream stream, tp_dtype dtype, int64_t n, const void *x, void *y);
/* y = x in dtype, n elements. */
TP_MUST_USE tp_status
tp_cuda_cast(tp_stream stream, tp_dtype dtype, int64_t n, const float *x, void *y);

/* ---- the ends of the vocabulary: vocab.cu --------------------------------------------------------------------------- */

/* y[r, :] = wte[tokens[r], :] + wpe[positions[r], :]; wte, wpe: rows of n without gaps. Indices are the host's to check. */
TP_MUST_USE tp_status
tp_cuda_embedding(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, const int32_t *tokens,
                  const int32_t *positions, const void *wte, const void *wpe, void *y, int64_t y_stride);
/* grad[group_index[g], :] += the sum of dy[rows_of[i], :], i in [group_start[g], group_start[g + 1]), by a tree that
 * follows from the group's size. Each index is one group: tp_cuda_group_rows (groups.h) makes them on the host. */
TP_MUST_USE tp_status
tp_cuda_embedding_gradient(tp_stream stream, tp_dtype dtype, int64_t n, int64_t groups, const int32_t *group_index,
                           const int32_t *group_start, const int32_t *rows_of, const void *dy, int64_t dy_stride,
                           float *grad, int64_t grad_stride);
/* loss[r] = -log softmax(logits[r, :vocab])[targets[r]]; where write_gradient, logits becomes (softmax - onehot) * scale
 * and its padding [vocab, stride) zero. stride >= vocab; what stands in the padding is not read. */
TP_MUST_USE tp_status
tp_cuda_softmax_loss(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t vocab, void *logits, int64_t stride,
                     const int32_t *targets, float scale, int write_gradient, float *loss);

/* ---- the optimizer: optim.cu ---------------------------------------------------------------------------------------- */

/* Tensors that are measured, or updated, all in one launch. A block does a leaf of one of them or a part of a leaf, and finds in two
 * tables in device memory which. n, decays and the arrays are the caller's, the rest tp_cuda_list_tensors'. */
typedef struct {
    int64_t n;         /* elements; 0: the others are not read */
    int64_t first;     /* its first leaf among all */
    const float *grad; /* [n], as all that follow; to be measured needs no other */
    float *value, *m, *v;
    void *copy;        /* of dtype: the new value; NULL: none */
    int32_t decays;    /* 1: weight_decay is meant for it */
    int32_t vector;    /* 1: all begin on 16 bytes */
} tp_cuda_tensor;

typedef struct {
    int64_t count, leaves;
    const tp_cuda_tensor *tensor; /* [count] */
    const int32_t *owner;         /* [leaves] whose each is */
} tp_cuda_tensors;

/* Of a tensor of n elements. */
int64_t
tp_cuda_leaves(int64_t n);
/* Completes both tables on the host, from where they go to the device; gives the leaves of all. */
int64_t
tp_cuda_list_tensors(int64_t count, tp_cuda_tensor *tensor, int32_t *owner);
/* sums[i] = the sum of squares of the i-th tensor's gradient in double, by a tree that follows from its n. partial [leaves]: written,
 * not read before. */
TP_MUST_USE tp_status
tp_cuda_sumsq(tp_stream stream, const tp_cuda_tensors *list, double *sums, double *partial);
/* The leaves of that alone: partial [leaves]. */
TP_MUST_USE tp_status
tp_cuda_sumsq_leaves(tp_stream stream, const tp_cuda_tensors *list, double *partial);
/* And, on the host, the sum of a tensor's leaves by the same tree. */
double
tp_cuda_sum_leaves(int64_t leaves, const double *partial);

/* As tp_backend_ops.adamw: bias1 = 1 - beta1^t, bias2 = 1 - beta2^t of this step. */
typedef struct {
    double beta1, beta2;
    float lr, eps, weight_decay, bias1, bias2, grad_scale;
} tp_adamw_args;

/* Decoupled AdamW (Loshchilov & Hutter 2019) of all tensors: from the values of `before`, a table of as many tensors that differ from
 * the list's in value, copy and vector alone, or the list's own. `args` is the host's and read at the call; on_device, if not NULL,
 * lies in device memory and is read by the kernel instead (then args may be NULL): what the device itself has found. grad_scale NaN:
 * values are before's, and m and v stay. */
TP_MUST_USE tp_status
tp_cuda_adamw(tp_stream stream, tp_dtype dtype, const tp_cuda_tensors *list, const tp_cuda_tensor *before, const tp_adamw_args *args,
              const tp_adamw_args *on_device);

/* In device memory: how a gradient of a micro-batch updates, of which the host knows nothing yet. */
typedef struct {
    tp_adamw_args args;
    double norm2;     /* of the last micro-batch, or of that which was refused */
    int32_t refused;  /* 1 + the first micro-batch of the step whose norm is not finite; 0: none */
} tp_cuda_clipped;

/* norm2 = the sum of sums[n], by a tree that follows from n; squares[i] = sums[i], and from micro 1 on the sum of both. *out: `args`
 * with grad_scale such that a norm above grad_clip (> 0; else all are right) becomes it (tp_adamw_clip); NaN from the first norm on
 * that is not finite, until micro 0. args is the host's and read at the call. */
TP_MUST_USE tp_status
tp_cuda_clip(tp_stream stream, int64_t n, int64_t micro, const double *sums, double *squares, double grad_clip,
             const tp_adamw_args *args, tp_cuda_clipped *out);

/* ---- attention: attention.cu ---------------------------------------------------------------------------------------- */

/* Which of two computes bf16 (fp32 has one kernel, whatever is asked). Both keep the contract; their bits differ. WGMMA needs
 * compute capability 9.0: elsewhere it fails on the device, so ask tp_cuda_attention_check once, before there is work. */
typedef enum { TP_ATTENTION_MMA, TP_ATTENTION_WGMMA } tp_attention_kernel;

static inline int
tp_cuda_has_wgmma(const tp_cuda_properties *properties)
{
    return properties->major == 9 && properties->minor == 0;
}
/* ERUNTIME: this device cannot run that kernel. */
TP_MUST_USE tp_status
tp_cuda_attention_check(tp_attention_kernel kernel, const tp_cuda_properties *properties);
/* The meaning of backend.h's attention_forward and attention_backward: q, k, v (and dq, dk, dv) point at row (0, 0), head 0,
 * qkv_stride elements between rows; o and d_o likewise with o_stride; lse and delta [B, H, T] fp32, natural logarithm. Other than
 * there, o and lse are NaN from scores of 2^22 on, and what a rounded lse makes of P below is left (attention.h).
 * bf16: D a multiple of 8 up to 128, strides multiples of 8, arrays on 16 bytes. fp32: D up to 128. EVALUE names what is out
 * of these bounds. multiprocessors: how many the stream's blocks run on (tp_cuda_multiprocessors): the size of blocks follows from
 * it, the bits do not. Rows that backend.h does not name are neither read nor written: rows after the slice (forward), and q, o,
 * d_o, lse, delta before it (backward) may hold anything.
 * kept: kept_bytes of device memory on 16 bytes, NULL and 0 for none, for the call alone. Backward by wgmma makes S and dP of the slice's
 * own pairs once where they fit, as they do for all heads in tp_cuda_attention_kept_bytes, else twice; the bits are the same. */
int64_t
tp_cuda_attention_kept_bytes(const tp_attention *shape);
TP_MUST_USE tp_status
tp_cuda_attention_forward(tp_stream stream, tp_dtype dtype, tp_attention_kernel kernel, int multiprocessors,
                          const tp_attention *shape, const void *q, const void *k, const void *v, void *o, float *lse);
TP_MUST_USE tp_status
tp_cuda_attention_backward(tp_stream stream, tp_dtype dtype, tp_attention_kernel kernel, int multiprocessors,
                           const tp_attention *shape, const void *q, const void *k, const void *v, const void *o, const void *d_o,
                           const float *lse, float *delta, void *dq, void *dk, void *dv, void *kept, size_t kept_bytes);
/* For benchmarks and tests: bf16 by tiles of 64 x groups rows, or as near as there are kernels; 0: as the shape asks, as at first.
 * mma.sync has 1 and 2 (D above 64: 1); wgmma, where groups are warpgroups that multiply, 1, 2 and 3 (D above 64: 1 and 2).
 * Process-wide; not while kernels are launched. The bits do not depend on it but in wgmma's forward for D up to 64, where they are
 * the same by 2 and 3, others by 1. */
void
tp_cuda_attention_force(int groups);

#ifdef __cplusplus
}
#endif

#endif
