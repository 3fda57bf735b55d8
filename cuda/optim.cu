/* AdamW (Loshchilov & Hutter 2019) and sums of squares: one pass over fp32 arrays, bound by memory. */
#include "cuda/kernels.h"

#include <float.h>

#include "cuda/rows.h"

#define SUMSQ_LEAF 16384 /* elements of one block: part of the tree, so of the bits */
#define SUMSQ_AHEAD 8    /* chunks read at once: of a part of a GPU few blocks run, and only what is on its way hides how long it takes */
#define ADAMW_PART 4096  /* elements of one block: a few turns share what it begins with, and the last blocks end soon */
#define ADAMW_PARTS (SUMSQ_LEAF / ADAMW_PART)

typedef struct {
    const tp_cuda_tensor *tensor;
    const int32_t *owner;
    double *partial;
} sumsq_args;

typedef struct {
    const tp_cuda_tensor *tensor;
    const double *partial;
    double *sums;
} sumsq_end_args;

typedef struct {
    const tp_cuda_tensor *tensor, *before;
    const int32_t *owner;
    const tp_adamw_args *on_device; /* NULL: `given` */
    tp_adamw_args given;
} adamw_args;

/* What a block has to do: elements [begin, end) of one tensor. */
typedef struct {
    int64_t begin, end;
    const float *from, *g;
    float *p, *m, *v;
    void *copy;
    int vector, decays;
} adamw_part;

typedef struct {
    float scale, least_g, least_v, rate, root, eps, keep, kept1, rest1, taken1, kept2, rest2, taken2;
} adamw_numbers;

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

TP_DEVICE adamw_part
adamw_part_of(const adamw_args *a, int32_t block)
{
    const int32_t leaf = block / ADAMW_PARTS, owner = TP_LD(a->owner + leaf);
    const tp_cuda_tensor *of = a->tensor + owner, *before = a->before + owner;
    const int64_t n = TP_LD(&of->n);
    adamw_part at;
    at.begin = (leaf - TP_LD(&of->first)) * SUMSQ_LEAF + block % ADAMW_PARTS * ADAMW_PART;
    at.end = n - at.begin < ADAMW_PART ? n : at.begin + ADAMW_PART;
    at.from = TP_LD(&before->value);
    at.g = TP_LD(&of->grad);
    at.p = TP_LD(&of->value);
    at.m = TP_LD(&of->m);
    at.v = TP_LD(&of->v);
    at.copy = TP_LD(&of->copy);
    TP_GLOBAL(at.from);
    TP_GLOBAL(at.g);
    TP_GLOBAL(at.m);
    TP_GLOBAL(at.v);
    at.vector = TP_LD(&of->vector) && TP_LD(&before->vector);
    at.decays = TP_LD(&of->decays);
    return at;
}

/* As csrc/cpu/optim.c, whose moments become zero where subnormal numbers would slow its processor: the same numbers. NaN
 * is below nothing and stays. */
TP_DEVICE adamw_numbers
adamw_numbers_of(const tp_adamw_args with, int decays)
{
    const float hidden = with.eps * 0x1p-24f, hidden_square = hidden * hidden;
    adamw_numbers by;
    by.least_g = hidden < 0x1p-55f ? hidden : 0x1p-55f;
    by.least_v = hidden_square < FLT_MIN ? hidden_square : FLT_MIN;
    by.rate = with.lr * (1.0f / with.bias1);
    by.root = 1.0f / sqrtf(with.bias2);
    by.eps = with.eps;
    by.keep = decays ? 1.0f - with.lr * with.weight_decay : 1.0f;
    /* beta = kept + rest, and 1 - beta: a float alone is another beta (csrc/cpu/optim.c). */
    by.kept1 = with.beta1 < 0.5 ? (float)with.beta1 : 1.0f;
    by.kept2 = with.beta2 < 0.5 ? (float)with.beta2 : 1.0f;
    by.rest1 = (float)(with.beta1 - (double)by.kept1);
    by.taken1 = (float)(1 - with.beta1);
    by.rest2 = (float)(with.beta2 - (double)by.kept2);
    by.taken2 = (float)(1 - with.beta2);
    by.scale = with.grad_scale;
    return by;
}

#define ROWS_BF16 0
#include "cuda/rows.inc"
#include "cuda/optim.inc"

/* One leaf: four chains a thread, in double, where the square of a float is exact. */
TP_KERNEL_BOUNDS(sumsq_leaf, sumsq_args, ROWS_BLOCK, 4)
{
    TP_SHARED(double, sums, ROWS_BLOCK);
    const tp_cuda_tensor *of = a.tensor + TP_LD(a.owner + TP_BLOCK_X);
    const int64_t first = (TP_BLOCK_X - TP_LD(&of->first)) * SUMSQ_LEAF, left = TP_LD(&of->n) - first;
    const int n = left < SUMSQ_LEAF ? (int)left : SUMSQ_LEAF, whole = TP_LD(&of->vector) && n == SUMSQ_LEAF;
    const float *grad = TP_LD(&of->grad) + first;
    double chain[4] = {0.0, 0.0, 0.0, 0.0}, sum;
    for (int c = 0; c < SUMSQ_LEAF; c += 4 * SUMSQ_AHEAD * ROWS_BLOCK) {
        float x[SUMSQ_AHEAD][4];
        TP_UNROLL
        for (int j = 0; j < SUMSQ_AHEAD; j++) {
            const int i = c + 4 * (j * ROWS_BLOCK + TP_THREAD);
            floats_read_f32(grad + i, whole ? 4 : n - i, whole, x[j]);
        }
        TP_UNROLL
        for (int j = 0; j < SUMSQ_AHEAD; j++)
            TP_UNROLL
            for (int k = 0; k < 4; k++)
                chain[k] = fma((double)x[j][k], (double)x[j][k], chain[k]);
    }
    sum = sumsq_block((chain[0] + chain[2]) + (chain[1] + chain[3]), sums);
    if (TP_THREAD == 0)
        TP_ST(a.partial + TP_BLOCK_X, sum);
}

/* A tensor's leaves. */
TP_KERNEL_BOUNDS(sumsq_end, sumsq_end_args, ROWS_BLOCK, 1)
{
    TP_SHARED(double, sums, ROWS_BLOCK);
    const tp_cuda_tensor *of = a.tensor + TP_BLOCK_X;
    const int64_t leaves = (TP_LD(&of->n) + SUMSQ_LEAF - 1) / SUMSQ_LEAF;
    const double *partial = a.partial + TP_LD(&of->first);
    double sum = 0.0;
    for (int64_t i = TP_THREAD; i < leaves; i += ROWS_BLOCK)
        sum += TP_LD(partial + i);
    sum = sumsq_block(sum, sums);
    if (TP_THREAD == 0)
        TP_ST(a.sums + TP_BLOCK_X, sum);
}

/* PyTorch's clip_grad_norm_, as csrc/stage/stage_ops.h's tp_adamw_clip. */
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
        args.grad_scale = before != 0 || !finite                            ? NAN
                          : a.grad_clip > 0.0 && a.grad_clip < norm + 1e-6 ? (float)(a.grad_clip / (norm + 1e-6))
                                                                           : 1.0f;
        a.out->args = args;
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
tp_cuda_leaves(int64_t n)
{
    return (n + SUMSQ_LEAF - 1) / SUMSQ_LEAF;
}

int64_t
tp_cuda_list_tensors(int64_t count, tp_cuda_tensor *tensor, int32_t *owner)
{
    int64_t leaves = 0;
    for (int64_t i = 0; i < count; i++) {
        tp_cuda_tensor *of = &tensor[i];
        of->first = leaves;
        of->vector = rows_aligned(of->grad, 0, 4) && rows_aligned(of->value, 0, 4) && rows_aligned(of->m, 0, 4) &&
                     rows_aligned(of->v, 0, 4) && rows_aligned(of->copy, 0, 4);
        leaves += tp_cuda_leaves(of->n);
        for (int64_t leaf = of->first; leaf < leaves; leaf++)
            owner[leaf] = (int32_t)i;
    }
    return leaves;
}

tp_status
tp_cuda_sumsq_leaves(tp_stream stream, const tp_cuda_tensors *list, double *partial)
{
    sumsq_args a = {list->tensor, list->owner, partial};
    TP_TRY(TP_REACHES(stream, "sumsq_leaf", list->tensor, (size_t)list->count * sizeof *list->tensor));
    return TP_LAUNCH(sumsq_leaf, tp_grid1(list->leaves), ROWS_BLOCK, 0, stream, a);
}

double
tp_cuda_sum_leaves(int64_t leaves, const double *partial)
{
    double sums[ROWS_BLOCK] = {0.0};
    for (int64_t i = 0; i < leaves; i++)
        sums[i % ROWS_BLOCK] += partial[i];
    for (int half = ROWS_BLOCK / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            sums[i] += sums[i + half];
    return sums[0];
}

tp_status
tp_cuda_sumsq(tp_stream stream, const tp_cuda_tensors *list, double *sums, double *partial)
{
    sumsq_end_args end = {list->tensor, partial, sums};
    TP_TRY(tp_cuda_sumsq_leaves(stream, list, partial));
    return TP_LAUNCH(sumsq_end, tp_grid1(list->count), ROWS_BLOCK, 0, stream, end);
}

tp_status
tp_cuda_clip(tp_stream stream, int64_t n, int64_t micro, const double *sums, double *squares, double grad_clip,
             const tp_adamw_args *args, tp_cuda_clipped *out)
{
    clip_args a = {n, micro, sums, squares, grad_clip, *args, out};
    return TP_LAUNCH(clip, tp_grid1(1), ROWS_BLOCK, 0, stream, a);
}

tp_status
tp_cuda_adamw(tp_stream stream, tp_dtype dtype, const tp_cuda_tensors *list, const tp_cuda_tensor *before, const tp_adamw_args *args,
              const tp_adamw_args *on_device)
{
    adamw_args a = {list->tensor, before, list->owner, on_device, {0, 0, 0, 0, 0, 0, 0, 0}};
    const tp_grid grid = tp_grid1(list->leaves * ADAMW_PARTS);
    if (on_device == NULL)
        a.given = *args;
    TP_TRY(TP_REACHES(stream, "adamw", list->tensor, (size_t)list->count * sizeof *list->tensor));
    TP_TRY(TP_REACHES(stream, "adamw", before, (size_t)list->count * sizeof *before));
    return dtype == TP_BF16 ? TP_LAUNCH(adamw_bf16, grid, ROWS_BLOCK, 0, stream, a)
                            : TP_LAUNCH(adamw_f32, grid, ROWS_BLOCK, 0, stream, a);
}
