/* Launchers of every kernel. All are asynchronous on `stream`, allocate nothing, and return an error of an argument, of the
 * launch, or (later than its cause) of an earlier kernel. Matrices are row-major; strides and leading dimensions are in
 * elements; activations are sequence-major, row (t, b) = t * B + b. Where `dtype` is given, void pointers are of that type. */
#ifndef TP_CUDA_KERNELS_H
#define TP_CUDA_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "csrc/backend/backend.h"

/* A cudaStream_t; NULL: the default stream. */
typedef void *tp_stream;
/* The type of activations, of their gradients, and of the weight copies that products read. */
typedef enum { TP_F32 = 0, TP_BF16 = 1 } tp_dtype;

/* ---- attention (attention.cu) ------------------------------------------------------------------------------------------
 * The meaning of backend.h's attention_forward and attention_backward: q, k, v (and dq, dk, dv) point at row (0, 0), head 0,
 * qkv_stride elements between rows; o, d_o likewise with o_stride; lse, delta [B, H, T] fp32, natural logarithm.
 * bf16: D a multiple of 8 up to 128, strides multiples of 8, pointers on 16 bytes (lse, delta: 4). f32: D up to 128.
 * Reads and writes no row but those backend.h names: rows from C + S on (backward: q, o, d_o, lse, delta before C) may hold
 * anything. A row's bits do not depend on the slice that contains it. EVALUE names an argument that is out of these bounds. */
TP_MUST_USE tp_status
tp_cuda_attention_forward(tp_stream stream, tp_dtype dtype, const tp_attention *shape, const void *q, const void *k,
                          const void *v, void *o, float *lse);
TP_MUST_USE tp_status
tp_cuda_attention_backward(tp_stream stream, tp_dtype dtype, const tp_attention *shape, const void *q, const void *k,
                           const void *v, const void *o, const void *d_o, const float *lse, float *delta, void *dq,
                           void *dk, void *dv);

#ifdef __cplusplus
}
#endif

#endif
