/* LayerNorm of rows (Ba, Kiros & Hinton 2016) and the sums over rows: gradients of gamma, beta and of biases.
 *
 * A row is 1, 2, 4 or 8 neighbouring warps, as many as hold it in registers: NORM_CHUNKS chunks a thread, read once. What
 * is beyond (8192 bf16, 4096 floats) is read again in each pass, out of the cache. */
#include "cuda/kernels.h"

#include "cuda/rows.h"

#define NORM_EPS    1e-5f
#define NORM_SMALL  0x1p-40f /* times deviations before they are squared: they overflow from 5e29 on, not from 5e17 on */
#define NORM_CHUNKS 4
#define NORM_SPREAD 512 /* blocks: below it they get smaller */
#define SUM_TILES   256 /* of rows, at most: the second kernel's work */
#define SUM_ROWS    32  /* of a tile, at least */
#define SUM_BLOCK   1024
#define SUM_EACH    (SUM_TILES * TP_WARP / SUM_BLOCK)

typedef struct {
    int64_t rows, x_stride, y_stride;
    const void *x;
    const float *gamma, *beta;
    void *y;
    float *mean, *rstd;
    int n, warps, vector;
} layernorm_args;

typedef struct {
    int64_t rows, dy_stride, x_stride, dresidual_stride, dx_stride;
    const void *dy, *x, *dresidual;
    const float *mean, *rstd, *gamma;
    void *dx;
    int n, warps, vector;
} layernorm_backward_args;

typedef struct {
    int64_t rows, tile, dy_stride, x_stride;
    const void *dy, *x; /* x NULL: sums of dy alone */
    const float *mean, *rstd;
    float *partial; /* [tiles, 2 (of dy; of dy unit), n] */
    int n, vector;
} row_sums_args;

typedef struct {
    int64_t tiles;
    const float *partial;
    float *sums[2];
    int n, accumulate;
} tile_sums_args;

#define ROWS_BF16 0
#include "cuda/rows.inc"
#include "cuda/norm.inc"
#undef ROWS_BF16
#define ROWS_BF16 1
#include "cuda/rows.inc"
#include "cuda/norm.inc"

/* The sums of 32 columns over the tiles: each warp takes SUM_EACH or fewer, `warps` apart and all at once (there are few
 * blocks to hide their latency), then the warps are added in order. */
TP_KERNEL_BOUNDS(tile_sums, tile_sums_args, SUM_BLOCK, 1)
{
    TP_SHARED(float, of_warp, SUM_BLOCK);
    const int lane = TP_THREAD % TP_WARP, warp = TP_THREAD / TP_WARP, warps = TP_THREADS / TP_WARP, set = TP_BLOCK_Y;
    const int column = TP_BLOCK_X * TP_WARP + lane;
    float *sums = set == 0 ? a.sums[0] : a.sums[1];
    float part[SUM_EACH], sum = 0.0f;
    TP_UNROLL
    for (int j = 0; j < SUM_EACH; j++) {
        const int64_t tile = warp + j * warps;
        part[j] = column < a.n && tile < a.tiles ? TP_LD(a.partial + (2 * tile + set) * a.n + column) : 0.0f;
    }
    TP_UNROLL
    for (int j = 0; j < SUM_EACH; j++)
        sum += part[j];
    of_warp[TP_THREAD] = sum;
    TP_SYNC();
    if (warp == 0 && column < a.n && sums != NULL) {
        sum = 0.0f;
        for (int w = 0; w < warps; w++)
            sum += of_warp[w * TP_WARP + lane];
        TP_ST(sums + column, a.accumulate ? TP_LD(sums + column) + sum : sum);
    }
}

/* Warps of a row. */
static int
norm_warps(int64_t n, size_t element)
{
    int warps = 1;
    while (warps < ROWS_WARPS && (int64_t)warps * TP_WARP * NORM_CHUNKS * (int64_t)(16 / element) < n)
        warps *= 2;
    return warps;
}

/* Threads of a block and blocks of the grid: few rows lie in small blocks, one row each, so that all SMs have some. */
static int
norm_block(int64_t rows, int warps, tp_grid *grid)
{
    int block = ROWS_BLOCK;
    while (block > warps * TP_WARP && rows / (block / (warps * TP_WARP)) < NORM_SPREAD)
        block /= 2;
    *grid = tp_grid1(rows_blocks(rows, block / (warps * TP_WARP)));
    return block;
}

tp_status
tp_cuda_layernorm(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, const void *x, int64_t x_stride,
                  const float *gamma, const float *beta, void *y, int64_t y_stride, float *mean, float *rstd)
{
    const size_t element = tp_dtype_bytes(dtype);
    const int64_t lanes = (int64_t)(16 / element);
    layernorm_args a = {rows, x_stride, y_stride, x, gamma, beta, y, mean, rstd, (int)n, norm_warps(n, element), 0};
    tp_grid grid;
    const int block = norm_block(rows, a.warps, &grid);
    TP_TRY(rows_check(rows, n));
    a.vector = n % lanes == 0 && rows_aligned(x, x_stride, element) && rows_aligned(y, y == NULL ? 0 : y_stride, element) &&
               rows_aligned(gamma, 0, 4) && rows_aligned(beta, 0, 4);
    return dtype == TP_BF16 ? TP_LAUNCH(layernorm_bf16, grid, block, 0, stream, a)
                            : TP_LAUNCH(layernorm_f32, grid, block, 0, stream, a);
}

tp_status
tp_cuda_layernorm_backward(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, const void *dy, int64_t dy_stride,
                           const void *x, int64_t x_stride, const float *mean, const float *rstd, const float *gamma,
                           const void *dresidual, int64_t dresidual_stride, void *dx, int64_t dx_stride)
{
    const size_t element = tp_dtype_bytes(dtype);
    const int64_t lanes = (int64_t)(16 / element);
    layernorm_backward_args a = {rows,      dy_stride, x_stride, dresidual_stride, dx_stride, dy, x,
                                 dresidual, mean,      rstd,     gamma,            dx,        (int)n, norm_warps(n, element),
                                 0};
    tp_grid grid;
    const int block = norm_block(rows, a.warps, &grid);
    TP_TRY(rows_check(rows, n));
    a.vector = n % lanes == 0 && rows_aligned(dy, dy_stride, element) && rows_aligned(x, x_stride, element) &&
               rows_aligned(dx, dx_stride, element) && rows_aligned(gamma, 0, 4) &&
               rows_aligned(dresidual, dresidual == NULL ? 0 : dresidual_stride, element);
    return dtype == TP_BF16 ? TP_LAUNCH(layernorm_backward_bf16, grid, block, 0, stream, a)
                            : TP_LAUNCH(layernorm_backward_f32, grid, block, 0, stream, a);
}

/* Rows of a tile: it follows from the rows of the micro-batch alone. */
static int64_t
sums_tile(int64_t rows)
{
    const int64_t even = (rows + SUM_TILES - 1) / SUM_TILES, up = (even + ROWS_WARPS - 1) / ROWS_WARPS * ROWS_WARPS;
    return up < SUM_ROWS ? SUM_ROWS : up;
}

static int64_t
sums_tiles(int64_t rows)
{
    return (rows + sums_tile(rows) - 1) / sums_tile(rows);
}

int64_t
tp_cuda_partial_floats(int64_t rows, int64_t n)
{
    /* fewer rows may make more tiles (8192 and 8193): enough for any number up to these */
    const int64_t most = (rows + SUM_ROWS - 1) / SUM_ROWS;
    return 2 * (most < SUM_TILES ? most : SUM_TILES) * n;
}

/* x NULL: dy alone. */
static tp_status
sum_rows(tp_stream stream, tp_dtype dtype, row_sums_args a, float *dbeta, float *dgamma, int accumulate)
{
    const size_t element = tp_dtype_bytes(dtype);
    const int64_t strip = TP_WARP * (int64_t)(16 / element), tiles = sums_tiles(a.rows);
    const tp_grid grid = tp_grid2((a.n + strip - 1) / strip, tiles);
    const int block = tiles <= SUM_EACH * ROWS_WARPS ? ROWS_BLOCK : SUM_BLOCK;
    tile_sums_args end = {tiles, a.partial, {dbeta, dgamma}, a.n, accumulate};
    a.tile = sums_tile(a.rows);
    a.vector = a.n % (16 / (int)element) == 0 && rows_aligned(a.dy, a.dy_stride, element) && rows_aligned(a.x, a.x == NULL ? 0 : a.x_stride, element);
    TP_TRY(dtype == TP_BF16 ? TP_LAUNCH(row_sums_bf16, grid, ROWS_BLOCK, 0, stream, a)
                            : TP_LAUNCH(row_sums_f32, grid, ROWS_BLOCK, 0, stream, a));
    return TP_LAUNCH(tile_sums, tp_grid2((a.n + TP_WARP - 1) / TP_WARP, a.x == NULL ? 1 : 2), block, 0, stream, end);
}

tp_status
tp_cuda_layernorm_param_gradient(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, const void *dy,
                                 int64_t dy_stride, const void *x, int64_t x_stride, const float *mean,
                                 const float *rstd, float *dgamma, float *dbeta, int accumulate, float *partial)
{
    row_sums_args a = {rows, 0, dy_stride, x_stride, dy, x, mean, rstd, partial, (int)n, 0};
    TP_TRY(rows_check(rows, n));
    return sum_rows(stream, dtype, a, dbeta, dgamma, accumulate);
}

tp_status
tp_cuda_bias_gradient(tp_stream stream, tp_dtype dtype, int64_t rows, int64_t n, const void *dy, int64_t dy_stride,
                      float *db, int accumulate, float *partial)
{
    row_sums_args a = {rows, 0, dy_stride, 0, dy, NULL, NULL, NULL, partial, (int)n, 0};
    TP_TRY(rows_check(rows, n));
    return sum_rows(stream, dtype, a, db, NULL, accumulate);
}
