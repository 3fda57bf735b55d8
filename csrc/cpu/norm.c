/* LayerNorm of rows (Ba, Kiros & Hinton 2016), eps 1e-5. A row's bits depend on that row alone; gradients of gamma and
 * beta are chains over rows in the order of the call. Threads share rows, and columns for the chains. */
#include "csrc/cpu/rows.h"

#include <math.h>

#define NORM_EPS  1e-5f
#define NORM_SUMS 4 /* partial sums of a row: one would wait for its own additions */
#define NORM_TILE 8 /* rows that stay in the first cache from the chains to the input gradient */
#define NORM_FAR  16 /* deviations from zero: from there on the rounding of a row's mean shows, 1e-6 of what comes out */
#define NORM_RUN  64 /* rows whose chains a member goes on with before it takes its next columns */

typedef struct {
    int64_t rows, n;
    const float *x, *gamma, *beta, *dy, *dresidual;
    int64_t x_stride, y_stride, dy_stride, dresidual_stride, stat_stride;
    float *y, *mean, *rstd, *dgamma, *dbeta;
    const float *known_mean, *known_rstd; /* NULL: measured here */
    int64_t tile_first, tile_last;        /* rows of this run of the backward pass */
} norm_job;

VEC_INLINE float
norm_mean_of(const vf16 *sum, int64_t n)
{
    return vec_sum(vec_add(vec_add(sum[0], sum[2]), vec_add(sum[1], sum[3]))) / (float)n;
}

/* Of a row whose squares overflow in fp32, from deviations of 5e17 on: rstd would be 0, and the row zeros. */
static __attribute__((noinline, cold)) float
norm_huge(const float *x, int64_t n, float mean)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += ((double)x[i] - (double)mean) * ((double)x[i] - (double)mean);
    return (float)(1 / __builtin_sqrt(sum / (double)n));
}

/* What the rounding of `mean` left out of the row's. x - mean loses nothing near it. */
static __attribute__((noinline, cold)) float
norm_rest(const float *x, int64_t n, float mean)
{
    vf16 sum[NORM_SUMS] = {vec_zero(), vec_zero(), vec_zero(), vec_zero()}, m = vec_set1(mean);
    for (int64_t i = 0; i < n; i += VEC_LANES) {
        int64_t lanes = rows_lanes(n, i), k = i / VEC_LANES % NORM_SUMS;
        sum[k] = vec_add(sum[k], rows_first(vec_sub(rows_load(x + i, lanes), m), lanes));
    }
    return norm_mean_of(sum, n);
}

VEC_INLINE int
norm_far(float mean, float rstd)
{
    return __builtin_fabsf(mean) * rstd > NORM_FAR;
}

/* What (x - mean) rstd lacks, the same to all who have the saved statistics; -0, which leaves every bit, in a row that is not far. */
VEC_INLINE float
norm_lost(const float *x, int64_t n, float mean, float rstd)
{
    return norm_far(mean, rstd) ? -rstd * norm_rest(x, n, mean) : -0.0f;
}

VEC_INLINE vf16
norm_unit(const float *x, vf16 mean, vf16 rstd, vf16 lost, int64_t lanes)
{
    return vec_fma(vec_sub(rows_load(x, lanes), mean), rstd, lost);
}

static void
norm_measure(const float *x, int64_t n, float *mean, float *rstd)
{
    vf16 sum[NORM_SUMS] = {vec_zero(), vec_zero(), vec_zero(), vec_zero()};
    int64_t i = 0;
    for (; i + NORM_SUMS * VEC_LANES <= n; i += NORM_SUMS * VEC_LANES)
        for (int k = 0; k < NORM_SUMS; k++)
            sum[k] = vec_add(sum[k], vec_load(x + i + k * VEC_LANES));
    for (; i < n; i += VEC_LANES)
        sum[0] = vec_add(sum[0], vec_load_n(x + i, rows_lanes(n, i)));
    *mean = norm_mean_of(sum, n);
    vf16 m = vec_set1(*mean);
    for (int k = 0; k < NORM_SUMS; k++)
        sum[k] = vec_zero();
    for (i = 0; i + NORM_SUMS * VEC_LANES <= n; i += NORM_SUMS * VEC_LANES)
        for (int k = 0; k < NORM_SUMS; k++) {
            vf16 d = vec_sub(vec_load(x + i + k * VEC_LANES), m);
            sum[k] = vec_fma(d, d, sum[k]);
        }
    for (; i < n; i += VEC_LANES) {
        int64_t lanes = rows_lanes(n, i);
        vf16 d = rows_first(vec_sub(vec_load_n(x + i, lanes), m), lanes);
        sum[0] = vec_fma(d, d, sum[0]);
    }
    float variance = norm_mean_of(sum, n);
    *rstd = variance < HUGE_VALF ? 1.0f / __builtin_sqrtf(variance + NORM_EPS) : norm_huge(x, n, *mean);
    if (variance < HUGE_VALF && norm_far(*mean, *rstd)) { /* it was about the mean as rounded */
        const float rest = norm_rest(x, n, *mean), about = variance - rest * rest;
        *rstd = 1.0f / __builtin_sqrtf((about > 0 ? about : 0) + NORM_EPS);
    }
}

VEC_INLINE void
norm_part(const norm_job *job, const float *x, vf16 mean, vf16 rstd, vf16 lost, float *y, int64_t i, int64_t lanes)
{
    vf16 unit = norm_unit(x + i, mean, rstd, lost, lanes), gamma = rows_load(job->gamma + i, lanes);
    vf16 beta = job->beta == NULL ? vec_zero() : rows_load(job->beta + i, lanes);
    rows_store(y + i, vec_fma(unit, gamma, beta), lanes);
}

static void
norm_row(const norm_job *job, const float *x, float mean, float rstd, float *y)
{
    vf16 m = vec_set1(mean), s = vec_set1(rstd), lost = vec_set1(norm_lost(x, job->n, mean, rstd));
    int64_t i = 0;
    for (; i + VEC_LANES <= job->n; i += VEC_LANES)
        norm_part(job, x, m, s, lost, y, i, VEC_LANES);
    if (i < job->n)
        norm_part(job, x, m, s, lost, y, i, job->n - i);
}

static void
norm_forward_work(void *argument, int member, int members)
{
    const norm_job *job = argument;
    int64_t first, last;
    tp_team_share(job->rows, 1, member, members, &first, &last);
    for (int64_t r = first; r < last; r++) {
        const float *x = job->x + r * job->x_stride;
        float mean, rstd;
        if (job->known_mean != NULL) {
            mean = job->known_mean[r * job->stat_stride];
            rstd = job->known_rstd[r * job->stat_stride];
        } else {
            norm_measure(x, job->n, &mean, &rstd);
            job->mean[r] = mean;
            job->rstd[r] = rstd;
        }
        if (job->y != NULL)
            norm_row(job, x, mean, rstd, job->y + r * job->y_stride);
    }
}

static void
cpu_layernorm(tp_backend *be, int64_t rows, int64_t n, const float *x, int64_t x_stride, const float *gamma,
              const float *beta, float *y, int64_t y_stride, float *mean, float *rstd)
{
    norm_job job = {.rows = rows,
                    .n = n,
                    .x = x,
                    .x_stride = x_stride,
                    .gamma = gamma,
                    .beta = beta,
                    .y = y,
                    .y_stride = y_stride,
                    .mean = mean,
                    .rstd = rstd};
    tp_team_run(rows_team(be, rows * n), norm_forward_work, &job);
}

static void
cpu_layernorm_apply(tp_backend *be, int64_t rows, int64_t n, const float *x, int64_t x_stride, const float *mean,
                    const float *rstd, int64_t stat_stride, const float *gamma, const float *beta, float *y,
                    int64_t y_stride)
{
    norm_job job = {.rows = rows,
                    .n = n,
                    .x = x,
                    .x_stride = x_stride,
                    .gamma = gamma,
                    .beta = beta,
                    .y = y,
                    .y_stride = y_stride,
                    .known_mean = mean,
                    .known_rstd = rstd,
                    .stat_stride = stat_stride};
    tp_team_run(rows_team(be, rows * n), norm_forward_work, &job);
}

/* One row of the backward pass: dx = rstd (g - mean(g) - unit mean(g unit)), g = dy gamma, unit = (x - mean) rstd. */
typedef struct {
    const float *x, *dy, *gamma, *dresidual;
    float *dx;
    vf16 mean, rstd, lost, mean_g, mean_along;
} norm_line;

VEC_INLINE vf16
norm_line_unit(const norm_line *line, int64_t i, int64_t lanes)
{
    return norm_unit(line->x + i, line->mean, line->rstd, line->lost, lanes);
}

VEC_INLINE vf16
norm_g(const norm_line *line, int64_t i, int64_t lanes) /* zero beyond the row, whatever unit is there */
{
    return vec_mul(rows_load(line->dy + i, lanes), rows_load(line->gamma + i, lanes));
}

VEC_INLINE void
norm_dx_part(const norm_line *line, int64_t i, int64_t lanes)
{
    vf16 along = vec_fnma(norm_line_unit(line, i, lanes), line->mean_along, vec_sub(norm_g(line, i, lanes), line->mean_g));
    vf16 dx = vec_mul(line->rstd, along);
    if (line->dresidual != NULL)
        dx = vec_add(rows_load(line->dresidual + i, lanes), dx);
    rows_store(line->dx + i, dx, lanes);
}

static void
norm_measure_line(norm_line *line, int64_t n)
{
    vf16 sum[NORM_SUMS] = {vec_zero(), vec_zero(), vec_zero(), vec_zero()}; /* two of g, two of g unit */
    int64_t i = 0;
    for (; i + 2 * VEC_LANES <= n; i += 2 * VEC_LANES)
        for (int k = 0; k < 2; k++) {
            vf16 g = norm_g(line, i + k * VEC_LANES, VEC_LANES);
            sum[k] = vec_add(sum[k], g);
            sum[2 + k] = vec_fma(g, norm_line_unit(line, i + k * VEC_LANES, VEC_LANES), sum[2 + k]);
        }
    for (; i < n; i += VEC_LANES) {
        int64_t lanes = rows_lanes(n, i);
        vf16 g = norm_g(line, i, lanes);
        sum[0] = vec_add(sum[0], g);
        sum[2] = vec_fma(g, norm_line_unit(line, i, lanes), sum[2]);
    }
    line->mean_g = vec_set1(vec_sum(vec_add(sum[0], sum[1])) / (float)n);
    line->mean_along = vec_set1(vec_sum(vec_add(sum[2], sum[3])) / (float)n);
}

static void
norm_backward_row(const norm_job *job, int64_t r)
{
    const float mean = job->known_mean[r * job->stat_stride], rstd = job->known_rstd[r * job->stat_stride];
    norm_line line = {.x = job->x + r * job->x_stride,
                      .dy = job->dy + r * job->dy_stride,
                      .gamma = job->gamma,
                      .dresidual = job->dresidual == NULL ? NULL : job->dresidual + r * job->dresidual_stride,
                      .dx = job->y + r * job->y_stride,
                      .mean = vec_set1(mean),
                      .rstd = vec_set1(rstd)};
    int64_t i = 0;
    line.lost = vec_set1(norm_lost(line.x, job->n, mean, rstd));
    norm_measure_line(&line, job->n);
    for (; i + VEC_LANES <= job->n; i += VEC_LANES)
        norm_dx_part(&line, i, VEC_LANES);
    if (i < job->n)
        norm_dx_part(&line, i, job->n - i);
}

static void
norm_backward_work(void *argument, int member, int members)
{
    const norm_job *job = argument;
    int64_t first, last;
    tp_team_share(job->tile_last - job->tile_first, 1, member, members, &first, &last);
    for (int64_t r = job->tile_first + first; r < job->tile_first + last; r++)
        norm_backward_row(job, r);
}

/* `vectors` neighbouring vectors of columns at i, the last of `lanes` lanes, of the rows from `first`; lost[row - first]. */
VEC_INLINE void
norm_chain_columns(const norm_job *job, int64_t first, int64_t last, const float *lost, int64_t i, const int vectors, int64_t lanes)
{
    vf16 dgamma[NORM_SUMS], dbeta[NORM_SUMS];
    for (int k = 0; k < vectors; k++) {
        dgamma[k] = rows_load(job->dgamma + i + k * VEC_LANES, lanes);
        dbeta[k] = job->dbeta == NULL ? vec_zero() : rows_load(job->dbeta + i + k * VEC_LANES, lanes);
    }
    for (int64_t r = first; r < last; r++) {
        const float *dy = job->dy + r * job->dy_stride + i, *x = job->x + r * job->x_stride + i;
        vf16 m = vec_set1(job->known_mean[r * job->stat_stride]), s = vec_set1(job->known_rstd[r * job->stat_stride]);
        vf16 more = vec_set1(lost[r - first]);
        for (int k = 0; k < vectors; k++) {
            vf16 d = rows_load(dy + k * VEC_LANES, lanes);
            dgamma[k] = vec_fma(d, norm_unit(x + k * VEC_LANES, m, s, more, lanes), dgamma[k]);
            dbeta[k] = vec_add(dbeta[k], d);
        }
    }
    for (int k = 0; k < vectors; k++) {
        rows_store(job->dgamma + i + k * VEC_LANES, dgamma[k], lanes);
        if (job->dbeta != NULL)
            rows_store(job->dbeta + i + k * VEC_LANES, dbeta[k], lanes);
    }
}

static void
norm_chain_work(void *argument, int member, int members)
{
    const norm_job *job = argument;
    int64_t first, last, i, end;
    float lost[NORM_RUN];
    tp_team_share(job->n, VEC_LANES, member, members, &first, &last);
    for (int64_t r = job->tile_first; r < job->tile_last; r = end) {
        end = job->tile_last - r < NORM_RUN ? job->tile_last : r + NORM_RUN;
        for (i = r; i < end; i++)
            lost[i - r] = norm_lost(job->x + i * job->x_stride, job->n, job->known_mean[i * job->stat_stride],
                                    job->known_rstd[i * job->stat_stride]);
        for (i = first; i + 2 * VEC_LANES <= last; i += 2 * VEC_LANES)
            norm_chain_columns(job, r, end, lost, i, 2, VEC_LANES);
        for (; i < last; i += VEC_LANES)
            norm_chain_columns(job, r, end, lost, i, 1, rows_lanes(last, i));
    }
}

static void
cpu_layernorm_backward(tp_backend *be, int64_t rows, int64_t n, const float *dy, int64_t dy_stride, const float *x,
                       int64_t x_stride, const float *mean, const float *rstd, int64_t stat_stride, const float *gamma,
                       const float *dresidual, int64_t dresidual_stride, float *dx, int64_t dx_stride, float *dgamma,
                       float *dbeta)
{
    norm_job job = {.rows = rows,
                    .n = n,
                    .x = x,
                    .x_stride = x_stride,
                    .gamma = gamma,
                    .dy = dy,
                    .dy_stride = dy_stride,
                    .dresidual = dresidual,
                    .dresidual_stride = dresidual_stride,
                    .y = dx,
                    .y_stride = dx_stride,
                    .known_mean = mean,
                    .known_rstd = rstd,
                    .stat_stride = stat_stride,
                    .dgamma = dgamma,
                    .dbeta = dbeta};
    tp_team *team = rows_team(be, rows * n);
    /* A team would meet twice per tile; the chains are the same in any tiles. */
    int64_t tile = tp_team_members(team) == 1 ? NORM_TILE : rows;
    for (job.tile_first = 0; job.tile_first < rows; job.tile_first = job.tile_last) {
        job.tile_last = rows - job.tile_first < tile ? rows : job.tile_first + tile;
        tp_team_run(team, norm_chain_work, &job); /* first: dx may lie over dy or x */
        tp_team_run(team, norm_backward_work, &job);
    }
}
