/* Element-wise work: GELU and its gradient, biases, sums and casts. Bound by memory; one pass, 16 bytes at a time. */
#include "cuda/kernels.h"

#include "cuda/rows.h"

#define GELU_ROOT  0.7978845608f /* sqrt(2 / pi) */
#define GELU_CUBIC 0.044715f

typedef struct {
    int64_t n;
    const void *x, *dy;
    void *y;
    int vector;
} pointwise_args;

typedef struct {
    int64_t rows;
    void *y;
    const float *bias;
    const void *residual;
    int n, vector;
} add_bias_args;

/* s = 1 / (1 + e^-2u), e = e^-2|u| and part = 1 / (1 + e), u = sqrt(2/pi) (x + 0.044715 x^3): 0.5 (1 + tanh u) is s, and s
 * keeps its digits where tanh u has come near -1. Memory gives an SM an element of bf16 every forty instructions or so: two
 * divisions would be most of them. */
TP_DEVICE float
gelu_gate(float x, float *e, float *part)
{
    const float u = GELU_ROOT * tp_fmaf(GELU_CUBIC * x * x, x, x);
    *e = tp_expf(-2.0f * fabsf(u));
    *part = tp_reciprocal(1.0f + *e);
    return (u < 0.0f ? *e : 1.0f) * *part;
}

TP_DEVICE float
gelu_of(float x)
{
    float e, part;
    return x * gelu_gate(x, &e, &part);
}

/* gelu' = s + x s (1 - s) 2 u'; s (1 - s) = e / (1 + e)^2. */
TP_DEVICE float
gelu_slope(float x)
{
    float e, part;
    const float s = gelu_gate(x, &e, &part), slope = 2.0f * GELU_ROOT * tp_fmaf(3.0f * GELU_CUBIC * x, x, 1.0f);
    return e == 0.0f ? s : tp_fmaf(x * slope, e * part * part, s); /* u' may be infinite */
}

#define ROWS_BF16 0
#include "cuda/rows.inc"
#include "cuda/pointwise.inc"
#undef ROWS_BF16
#define ROWS_BF16 1
#include "cuda/rows.inc"
#include "cuda/pointwise.inc"

static pointwise_args
pointwise_job(tp_dtype dtype, int64_t n, const void *x, const void *dy, void *y, tp_grid *grid)
{
    const size_t element = tp_dtype_bytes(dtype);
    pointwise_args a = {n, x, dy, y, 0};
    a.vector = rows_aligned(x, 0, element) && rows_aligned(dy, 0, element) && rows_aligned(y, 0, element);
    *grid = tp_grid1(rows_blocks(n, ROWS_BLOCK * (int64_t)(16 / element)));
    return a;
}

tp_status
tp_cuda_gelu(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, const void *h, void *g)
{
    tp_grid grid;
    pointwise_args a = pointwise_job(dtype, rows * n, h, NULL, g, &grid);
    return dtype == TP_BF16 ? TP_LAUNCH(gelu_bf16, grid, ROWS_BLOCK, 0, stream, a)
                            : TP_LAUNCH(gelu_f32, grid, ROWS_BLOCK, 0, stream, a);
}

tp_status
tp_cuda_dgelu(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, const void *h, const void *dg, void *dh)
{
    tp_grid grid;
    pointwise_args a = pointwise_job(dtype, rows * n, h, dg, dh, &grid);
    return dtype == TP_BF16 ? TP_LAUNCH(dgelu_bf16, grid, ROWS_BLOCK, 0, stream, a)
                            : TP_LAUNCH(dgelu_f32, grid, ROWS_BLOCK, 0, stream, a);
}

tp_status
tp_cuda_add_bias(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, void *y, const float *bias,
                 const void *residual)
{
    const size_t element = tp_dtype_bytes(dtype);
    const int64_t lanes = (int64_t)(16 / element);
    add_bias_args a = {rows, y, bias, residual, (int)n, 0};
    const tp_grid grid = tp_grid1(rows_blocks(rows * ((n + lanes - 1) / lanes), ROWS_BLOCK));
    TP_TRY(rows_check(rows, n));
    a.vector = rows_aligned(y, n, element) && rows_aligned(residual, 0, element) && rows_aligned(bias, 0, 4);
    return dtype == TP_BF16 ? TP_LAUNCH(add_bias_bf16, grid, ROWS_BLOCK, 0, stream, a)
                            : TP_LAUNCH(add_bias_f32, grid, ROWS_BLOCK, 0, stream, a);
}

tp_status
tp_cuda_add(tp_stream stream, tp_dtype dtype, int64_t n, const void *x, void *y)
{
    tp_grid grid;
    pointwise_args a = pointwise_job(dtype, n, x, NULL, y, &grid);
    return dtype == TP_BF16 ? TP_LAUNCH(add_bf16, grid, ROWS_BLOCK, 0, stream, a)
                            : TP_LAUNCH(add_f32, grid, ROWS_BLOCK, 0, stream, a);
}

tp_status
tp_cuda_cast(tp_stream stream, tp_dtype dtype, int64_t n, const float *x, void *y)
{
    tp_grid grid;
    pointwise_args a = pointwise_job(dtype, n, x, NULL, y, &grid);
    return dtype == TP_BF16 ? TP_LAUNCH(cast_bf16, grid, ROWS_BLOCK, 0, stream, a)
                            : TP_LAUNCH(cast_f32, grid, ROWS_BLOCK, 0, stream, a);
}
