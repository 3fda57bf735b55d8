/* The two ends of the vocabulary: embedding rows in and their gradient, and the fused classifier. */
#include "cuda/kernels.h"

#include <float.h>

#include "cuda/rows.h"

#define GROUP_BLOCKS 65535 /* strips of columns lie in y */
#define LOSS_BLOCK   768   /* threads, at most: twice that is what the smallest SM (sm_120) holds */
#define LOSS_BLOCKS  2     /* of an SM: their rows stay in its share of the L2 cache from one pass to the other */
#define LOG2_E       1.4426950408889634f
#ifndef TP_CUDA_MANY_BLOCKS
#define TP_CUDA_MANY_BLOCKS 1024 /* fill any GPU: then a block takes ROWS_WARPS groups, a warp each that has few rows */
#endif

typedef struct {
    int64_t rows, y_stride;
    const int32_t *tokens, *positions;
    const void *wte, *wpe;
    void *y;
    int n, vector;
} embedding_args;

typedef struct {
    int64_t groups, dy_stride, grad_stride;
    const int32_t *group_index, *group_start, *rows_of;
    const void *dy;
    float *grad;
    int n, each, vector, vector_grad; /* each: groups that a block takes at a time, 1 to ROWS_WARPS */
} embedding_gradient_args;

typedef struct {
    int64_t rows;
    void *logits;
    const int32_t *targets;
    float scale;
    float *loss;
    int vocab, stride, write_gradient, vector;
} softmax_loss_args;

/* e^x for x <= 0 by one instruction: the difference from the largest logit is exact where logits are large, not a
 * difference of scaled ones. */
TP_DEVICE float
loss_exp(float x)
{
    return tp_exp2f(LOG2_E * x);
}

/* The largest, or the sum, over the block, the same bits in each thread; slots: one shared float per warp. */
TP_DEVICE float
block_reduce(float v, int largest, float *slots)
{
    const int warps = TP_THREADS / TP_WARP;
    TP_UNROLL
    for (int lanes = TP_WARP / 2; lanes > 0; lanes /= 2) {
        const float other = TP_SHFL_XOR_F(v, lanes);
        v = largest ? tp_maxf(v, other) : v + other;
    }
    TP_SYNC();
    if (TP_THREAD % TP_WARP == 0)
        slots[TP_THREAD / TP_WARP] = v;
    TP_SYNC();
    v = slots[0];
    for (int w = 1; w < warps; w++)
        v = largest ? tp_maxf(v, slots[w]) : v + slots[w];
    return v;
}

#define ROWS_BF16 0
#include "cuda/rows.inc"
#include "cuda/vocab.inc"
#undef ROWS_BF16
#define ROWS_BF16 1
#include "cuda/rows.inc"
#include "cuda/vocab.inc"

tp_status
tp_cuda_embedding(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, const int32_t *tokens,
                  const int32_t *positions, const void *wte, const void *wpe, void *y, int64_t y_stride)
{
    const size_t element = tp_dtype_bytes(dtype);
    const int64_t lanes = (int64_t)(16 / element);
    embedding_args a = {rows, y_stride, tokens, positions, wte, wpe, y, (int)n, 0};
    const tp_grid grid = tp_grid1(rows_blocks(rows * ((n + lanes - 1) / lanes), ROWS_BLOCK));
    TP_TRY(rows_check(rows, n));
    a.vector = rows_aligned(wte, n, element) && rows_aligned(wpe, n, element) && rows_aligned(y, y_stride, element);
    return dtype == TP_BF16 ? TP_LAUNCH(embedding_bf16, grid, ROWS_BLOCK, 0, stream, a)
                            : TP_LAUNCH(embedding_f32, grid, ROWS_BLOCK, 0, stream, a);
}

tp_status
tp_cuda_embedding_gradient(tp_stream stream, tp_dtype dtype, int64_t n, int64_t groups, const int32_t *group_index,
                           const int32_t *group_start, const int32_t *rows_of, const void *dy, int64_t dy_stride,
                           float *grad, int64_t grad_stride)
{
    const size_t element = tp_dtype_bytes(dtype);
    const int64_t strip = TP_WARP * (int64_t)(16 / element);
    const int64_t strips = (n + strip - 1) / strip, each = groups / ROWS_WARPS * strips < TP_CUDA_MANY_BLOCKS ? 1 : ROWS_WARPS;
    const int64_t blocks = (groups + each - 1) / each;
    embedding_gradient_args a = {groups, dy_stride, grad_stride, group_index, group_start, rows_of, dy, grad, (int)n, (int)each, 0, 0};
    const tp_grid grid = tp_grid2(blocks < GROUP_BLOCKS ? blocks : GROUP_BLOCKS, strips);
    TP_TRY(rows_check(groups, n));
    a.vector = n % (16 / (int64_t)element) == 0 && rows_aligned(dy, dy_stride, element);
    a.vector_grad = rows_aligned(grad, grad_stride, sizeof *grad);
    return dtype == TP_BF16 ? TP_LAUNCH(embedding_gradient_bf16, grid, ROWS_BLOCK, 0, stream, a)
                            : TP_LAUNCH(embedding_gradient_f32, grid, ROWS_BLOCK, 0, stream, a);
}

tp_status
tp_cuda_softmax_loss(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t vocab, void *logits, int64_t stride,
                     const int32_t *targets, float scale, int write_gradient, float *loss)
{
    const size_t element = tp_dtype_bytes(dtype);
    const int64_t warp = TP_WARP * (int64_t)(16 / element), threads = (vocab + warp - 1) / warp * TP_WARP;
    softmax_loss_args a = {rows, logits, targets, scale, loss, (int)vocab, (int)stride, write_gradient, 0};
    const int block = threads < LOSS_BLOCK ? (int)threads : LOSS_BLOCK;
    const tp_grid grid = tp_grid1(rows_blocks(rows, 1));
    TP_TRY(rows_check(rows, stride));
    if (vocab < 1 || vocab > stride)
        return tp_fail(TP_EVALUE, "loss: %lld logits in rows of %lld; a row must hold 1 or more", (long long)vocab,
                       (long long)stride);
    a.vector = rows_aligned(logits, stride, element);
    return dtype == TP_BF16 ? TP_LAUNCH(softmax_loss_bf16, grid, block, 0, stream, a)
                            : TP_LAUNCH(softmax_loss_f32, grid, block, 0, stream, a);
}
