/* AdamW (Loshchilov & Hutter 2019) and sums of squares: one pass over fp32 arrays, bound by memory. */
#include "cuda/kernels.h"

#include <float.h>

#include "cuda/rows.h"

#define SUMSQ_LEAF 16384 /* elements of one block: part of the tree, so of the bits */

typedef struct {
    int64_t n;
    const float *x;
    double *partial;
    int vector;
} sumsq_args;

typedef struct {
    int64_t n;
    const double *partial;
    double *out;
} sumsq_end_args;

typedef struct {
    int64_t n;
    const float *from, *g;
    float *p, *m, *v;
    void *copy;
    const tp_adamw_args *on_device; /* NULL: `given` */
    tp_adamw_args given;
    int vector;
} adamw_args;

typedef struct {
    int64_t n, micro;
    const double *sums;
    double *squares;
    double grad_clip;
    tp_adamw_args given;
    tp_cuda_clipped *out;
} clip_args;

/* The block's sum in thread 0 (elsewhere a part of it): pairs whose distance halves. sums: ROWS_BLOCK shared doubles. A thread keeps
 * its own number in a register too. Read back from sums[0], nvcc has every thread of clip load it, beside thread 0's last store. */
TP_DEVICE double
sumsq_block(double v, double *sums)
{
    sums[TP_THREAD] = v;
    for (int half = ROWS_BLOCK / 2; half > 0; half /= 2) {
        TP_SYNC();
        if (TP_THREAD < half)
            sums[TP_THREAD] = v += sums[TP_THREAD + half];
    }
    return v;
}

#define ROWS_BF16 0
#include "cuda/rows.inc"
#include "cuda/optim.inc"

/* One leaf: four chains a thread, in double, where the square of a float is exact; four chunks are read at once. */
TP_KERNEL_BOUNDS(sumsq_leaf, sumsq_args, ROWS_BLOCK, 4)
{
    TP_SHARED(double, sums, ROWS_BLOCK);
    const int64_t first = (int64_t)TP_BLOCK_X * SUMSQ_LEAF;
    const int n = a.n - first < SUMSQ_LEAF ? (int)(a.n - first) : SUMSQ_LEAF, whole = a.vector && n == SUMSQ_LEAF;
    double chain[4] = {0.0, 0.0, 0.0, 0.0}, sum;
    for (int c = 0; c < SUMSQ_LEAF; c += 16 * ROWS_BLOCK) {
        float x[4][4];
        TP_UNROLL
        for (int j = 0; j < 4; j++) {
            const int i = c + 4 * (j * ROWS_BLOCK + TP_THREAD);
            floats_read_f32(a.x + first + i, whole ? 4 : n - i, whole, x[j]);
        }
        TP_UNROLL
        for (int j = 0; j < 4; j++)
            TP_UNROLL
            for (int k = 0; k < 4; k++)
                chain[k] = fma((double)x[j][k], (double)x[j][k], chain[k]);
    }
    sum = sumsq_block((chain[0] + chain[2]) + (chain[1] + chain[3]), sums);
    if (TP_THREAD == 0)
        TP_ST(a.partial + TP_BLOCK_X, sum);
}

TP_KERNEL_BOUNDS(sumsq_end, sumsq_end_args, ROWS_BLOCK, 1)
{
    TP_SHARED(double, sums, ROWS_BLOCK);
    double sum = 0.0;
    for (int64_t i = TP_THREAD; i < a.n; i += ROWS_BLOCK)
        sum += TP_LD(a.partial + i);
    sum = sumsq_block(sum, sums);
    if (TP_THREAD == 0)
        TP_ST(a.out, sum);
}

/* PyTorch's clip_grad_norm_, as csrc/stage/update.c. */
TP_KERNEL_BOUNDS(clip, clip_args, ROWS_BLOCK, 1)
{
    TP_SHARED(double, sums, ROWS_BLOCK);
    double norm2 = 0.0;
    for (int64_t i = TP_THREAD; i < a.n; i += ROWS_BLOCK) {
        const double sum = TP_LD(a.sums + i);
        TP_ST(a.squares + i, a.micro == 0 ? sum : TP_LD(a.squares + i) + sum);
        norm2 += sum;
    }
    norm2 = sumsq_block(norm2, sums);
    if (TP_THREAD == 0) {
        const int32_t before = a.micro == 0 ? 0 : TP_LD(&a.out->refused);
        const int finite = norm2 <= DBL_MAX; /* NaN is not */
        const double norm = sqrt(norm2);
        tp_adamw_args args = a.given;
        args.grad_scale = before != 0 || !finite                   ? NAN
                          : a.grad_clip > 0.0 && norm > a.grad_clip ? (float)(a.grad_clip / (norm + 1e-6))
                                                                    : 1.0f;
        a.out->matrix = args;
        args.weight_decay = 0.0f;
        a.out->vector = args;
        if (before == 0)
            TP_ST(&a.out->norm2, norm2);
        TP_ST(&a.out->refused, before == 0 && !finite ? (int32_t)a.micro + 1 : before);
    }
}

#undef ROWS_BF16
#define ROWS_BF16 1
#include "cuda/rows.inc"
#include "cuda/optim.inc"

int64_t
tp_cuda_sumsq_partials(int64_t n)
{
    return (n + SUMSQ_LEAF - 1) / SUMSQ_LEAF;
}

tp_status
tp_cuda_sumsq(tp_stream stream, int64_t n, const float *x, double *out, double *partial)
{
    sumsq_args a = {n, x, partial, rows_aligned(x, 0, 4)};
    sumsq_end_args end = {tp_cuda_sumsq_partials(n), partial, out};
    TP_TRY(TP_LAUNCH(sumsq_leaf, tp_grid1(end.n), ROWS_BLOCK, 0, stream, a));
    return TP_LAUNCH(sumsq_end, tp_grid1(1), ROWS_BLOCK, 0, stream, end);
}

tp_status
tp_cuda_clip(tp_stream stream, int64_t n, int64_t micro, const double *sums, double *squares, double grad_clip,
             const tp_adamw_args *args, tp_cuda_clipped *out)
{
    clip_args a = {n, micro, sums, squares, grad_clip, *args, out};
    return TP_LAUNCH(clip, tp_grid1(1), ROWS_BLOCK, 0, stream, a);
}

tp_status
tp_cuda_adamw(tp_stream stream, tp_dtype dtype, int64_t n, const float *from, float *p, const float *g, float *m, float *v,
              void *copy, const tp_adamw_args *args, const tp_adamw_args *on_device)
{
    adamw_args a = {n, from, g, p, m, v, copy, on_device, {0, 0, 0, 0, 0, 0, 0, 0}, 0};
    const tp_grid grid = tp_grid1(rows_blocks(n, ROWS_BLOCK * (int64_t)(16 / tp_dtype_bytes(dtype))));
    if (on_device == NULL)
        a.given = *args;
    a.vector = rows_aligned(from, 0, 4) && rows_aligned(p, 0, 4) && rows_aligned(g, 0, 4) && rows_aligned(m, 0, 4) && rows_aligned(v, 0, 4) &&
               rows_aligned(copy, 0, 4);
    return dtype == TP_BF16 ? TP_LAUNCH(adamw_bf16, grid, ROWS_BLOCK, 0, stream, a)
                            : TP_LAUNCH(adamw_f32, grid, ROWS_BLOCK, 0, stream, a);
}
