/* The key by which cuda/gemm.c finds a cached plan: all of a product's arguments, but of its pointers only the alignment. */
#ifndef TP_CUDA_GEMM_KEY_H
#define TP_CUDA_GEMM_KEY_H

#include "cuda/gemm.h"

/* Compared and hashed byte by byte: of one type, without gaps. */
typedef struct {
    int64_t kind, dtype, epilogue, accumulate, rows, n_in, n_out, x_stride, w_stride, y_stride, aux_stride;
    int64_t align_x, align_w, align_y, align_aux, align_bias;
} plan_key;

/* Bytes that the pointer is a multiple of, a power of two up to `most`. */
static inline int64_t
plan_alignment(const void *pointer, int64_t most)
{
    uintptr_t at = (uintptr_t)pointer;
    int64_t bytes = at ? (int64_t)(at & (~at + 1)) : most;
    return bytes < most ? bytes : most;
}

/* most 16: what every row of a matrix is aligned to, so that a slice has the key of all, whichever row it begins with. */
static inline int64_t
plan_rows_alignment(const void *first, int64_t stride, tp_dtype dtype, int64_t most)
{
    uintptr_t step = most == 16 ? (uintptr_t)stride * tp_dtype_bytes(dtype) : 0;
    return plan_alignment((const void *)((uintptr_t)first | step), most);
}

static inline plan_key
plan_key_of(const tp_gemm_op *op, int64_t most)
{
    tp_dtype of_y = op->kind == TP_GEMM_LINEAR_W ? TP_F32 : op->dtype;
    return (plan_key){
        .kind = op->kind, .dtype = op->dtype, .epilogue = op->epilogue, .accumulate = op->accumulate, .rows = op->rows,
        .n_in = op->n_in, .n_out = op->n_out, .x_stride = op->x_stride, .w_stride = op->w_stride,
        .y_stride = op->y_stride, .aux_stride = op->aux ? op->aux_stride : 0,
        .align_x = plan_rows_alignment(op->x, op->x_stride, op->dtype, most),
        .align_w = plan_rows_alignment(op->w, op->w_stride, op->dtype, most),
        .align_y = plan_rows_alignment(op->y, op->y_stride, of_y, most),
        .align_aux = plan_rows_alignment(op->aux, op->aux ? op->aux_stride : 0, op->dtype, most),
        .align_bias = op->bias ? plan_alignment(op->bias, most) : 0,
    };
}

#endif
