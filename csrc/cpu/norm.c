/* LayerNorm (Ba, Kiros & Hinton 2016). A row's sums run over two vectors of lanes and one fixed tree, so they depend on
 * that row and n alone. dgamma and dbeta are a chain per column over the rows in the caller's order. */
#include "csrc/cpu/cpu.h"
#include "csrc/cpu/share.h"
#include "csrc/cpu/vec.h"

#include <math.h>

#define NORM_EPS 1e-5f

typedef struct {
    int64_t rows, n;
    const float *x, *gamma, *beta, *dy, *dresidual, *mean_in, *rstd_in;
    int64_t x_stride, y_stride, dy_stride, dresidual_stride, stat_stride;
    float *y, *mean, *rstd, *dgamma, *dbeta;
} norm_job;

VEC_INLINE vf16
norm_load(const float *x, int64_t i, int64_t n)
{
    return i + VEC_LANES <= n ? vec_load(x + i) : i < n ? vec_load_n(x + i, n - i) : vec_zero();
}

VEC_INLINE void
norm_store(float *y, int64_t i, int64_t n, vf16 v)
{
    if (i + VEC_LANES <= n)
        vec_store(y + i, v);
    else
        vec_store_n(y + i, v, n - i);
}

/* The lanes of v that lie below n at offset i; the others zero. */
VEC_INLINE vf16
norm_keep(vf16 v, int64_t i, int64_t n)
{
    return i + VEC_LANES <= n ? v : i < n ? vec_first_n(v, n - i, vec_zero()) : vec_zero();
}

/* Two passes: the variance of deviations from the mean loses nothing where |mean| is large. */
static void
norm_statistics(int64_t n, const float *x, float *mean, float *rstd)
{
    vf16 even = vec_zero(), odd = vec_zero();
    for (int64_t i = 0; i < n; i += 2 * VEC_LANES) {
        even = vec_add(even, norm_load(x, i, n));
        odd = vec_add(odd, norm_load(x, i + VEC_LANES, n));
    }
    *mean = vec_sum(vec_add(even, odd)) / (float)n;
    vf16 centre = vec_set1(*mean);
    even = odd = vec_zero();
    for (int64_t i = 0; i < n; i += 2 * VEC_LANES) {
        vf16 a = norm_keep(vec_sub(norm_load(x, i, n), centre), i, n);
        vf16 b = norm_keep(vec_sub(norm_load(x, i + VEC_LANES, n), centre), i + VEC_LANES, n);
        even = vec_fma(a, a, even);
        odd = vec_fma(b, b, odd);
    }
    *rstd = 1.0f / sqrtf(vec_sum(vec_add(even, odd)) / (float)n + NORM_EPS);
}

VEC_INLINE vf16
norm_hat(const float *x, int64_t i, int64_t n, vf16 mean, vf16 rstd)
{
    return vec_mul(vec_sub(norm_load(x, i, n), mean), rstd);
}

static void
norm_apply_row(int64_t n, const float *x, float mean, float rstd, const float *gamma, const float *beta, float *y)
{
    vf16 m = vec_set1(mean), r = vec_set1(rstd);
    for (int64_t i = 0; i < n; i += VEC_LANES) {
        vf16 shift = beta == NULL ? vec_zero() : norm_load(beta, i, n);
        norm_store(y, i, n, vec_fma(norm_hat(x, i, n, m, r), norm_load(gamma, i, n), shift));
    }
}

static void
norm_work(void *argument, int member, int members)
{
    const norm_job *job = argument;
    int64_t first, last;
    tp_team_share(job->rows, 1, member, members, &first, &last);
    for (int64_t r = first; r < last; r++) {
        const float *x = job->x + r * job->x_stride;
        norm_statistics(job->n, x, &job->mean[r], &job->rstd[r]);
        if (job->y != NULL)
            norm_apply_row(job->n, x, job->mean[r], job->rstd[r], job->gamma, job->beta, job->y + r * job->y_stride);
    }
}

static void
cpu_layernorm(tp_backend *be, int64_t rows, int64_t n, const float *x, int64_t x_stride, const float *gamma,
              const float *beta, float *y, int64_t y_stride, float *mean, float *rstd)
{
    norm_job job = {.rows = rows, .n = n, .x = x, .x_stride = x_stride, .gamma = gamma, .beta = beta};
    job.y = y, job.y_stride = y_stride, job.mean = mean, job.rstd = rstd;
    share_run(be, rows * n, norm_work, &job);
}

static void
norm_apply_work(void *argument, int member, int members)
{
    const norm_job *job = argument;
    int64_t first, last;
    tp_team_share(job->rows, 1, member, members, &first, &last);
    for (int64_t r = first; r < last; r++)
        norm_apply_row(job->n, job->x + r * job->x_stride, job->mean_in[r * job->stat_stride],
                       job->rstd_in[r * job->stat_stride], job->gamma, job->beta, job->y + r * job->y_stride);
}

static void
cpu_layernorm_apply(tp_backend *be, int64_t rows, int64_t n, const float *x, int64_t x_stride, const float *mean,
                    const float *rstd, int64_t stat_stride, const float *gamma, const float *beta, float *y,
                    int64_t y_stride)
{
    norm_job job = {.rows = rows, .n = n, .x = x, .x_stride = x_stride, .gamma = gamma, .beta = beta};
    job.mean_in = mean, job.rstd_in = rstd, job.stat_stride = stat_stride, job.y = y, job.y_stride = y_stride;
    share_run(be, rows * n, norm_apply_work, &job);
}

/* dx = dresidual + rstd (g - mean(g) - hat mean(g hat)), g = dy gamma. */
static void
norm_dx_row(const norm_job *job, int64_t r)
{
    int64_t n = job->n, stat = r * job->stat_stride;
    const float *x = job->x + r * job->x_stride, *dy = job->dy + r * job->dy_stride;
    const float *residual = job->dresidual == NULL ? NULL : job->dresidual + r * job->dresidual_stride;
    float *dx = job->y + r * job->y_stride;
    vf16 mean = vec_set1(job->mean_in[stat]), rstd = vec_set1(job->rstd_in[stat]);
    vf16 sum = vec_zero(), dot = vec_zero();
    for (int64_t i = 0; i < n; i += VEC_LANES) {
        vf16 g = vec_mul(norm_load(dy, i, n), norm_load(job->gamma, i, n)); /* zero beyond n, and so is g * hat */
        sum = vec_add(sum, g);
        dot = vec_fma(g, norm_hat(x, i, n, mean, rstd), dot);
    }
    vf16 mean_g = vec_set1(vec_sum(sum) / (float)n), mean_dot = vec_set1(vec_sum(dot) / (float)n);
    for (int64_t i = 0; i < n; i += VEC_LANES) {
        vf16 g = vec_mul(norm_load(dy, i, n), norm_load(job->gamma, i, n));
        vf16 hat = norm_hat(x, i, n, mean, rstd);
        vf16 d = vec_fnma(hat, mean_dot, vec_sub(g, mean_g));
        norm_store(dx, i, n,
                   residual == NULL ? vec_mul(rstd, d) : vec_fma(rstd, d, norm_load(residual, i, n)));
    }
}

/* Row r's share of dgamma and dbeta in columns [first, last); first is a multiple of VEC_LANES. */
static void
norm_parameters_row(const norm_job *job, int64_t r, int64_t first, int64_t last)
{
    const float *x = job->x + r * job->x_stride, *dy = job->dy + r * job->dy_stride;
    vf16 mean = vec_set1(job->mean_in[r * job->stat_stride]), rstd = vec_set1(job->rstd_in[r * job->stat_stride]);
    for (int64_t i = first; i < last; i += VEC_LANES) {
        vf16 d = norm_load(dy, i, last);
        norm_store(job->dgamma, i, last,
                   vec_fma(d, norm_hat(x, i, last, mean, rstd), norm_load(job->dgamma, i, last)));
        if (job->dbeta != NULL)
            norm_store(job->dbeta, i, last, vec_add(norm_load(job->dbeta, i, last), d));
    }
}

/* Alone, one walk over the rows while they are in cache; the parameters first, for dx may be dy. */
static void
norm_backward_alone(void *argument, int member, int members)
{
    const norm_job *job = argument;
    (void)member, (void)members;
    for (int64_t r = 0; r < job->rows; r++) {
        norm_parameters_row(job, r, 0, job->n);
        norm_dx_row(job, r);
    }
}

static void
norm_parameters_work(void *argument, int member, int members)
{
    const norm_job *job = argument;
    int64_t first, last;
    tp_team_share(job->n, VEC_LANES, member, members, &first, &last);
    for (int64_t r = 0; r < job->rows; r++)
        norm_parameters_row(job, r, first, last);
}

static void
norm_dx_work(void *argument, int member, int members)
{
    const norm_job *job = argument;
    int64_t first, last;
    tp_team_share(job->rows, 1, member, members, &first, &last);
    for (int64_t r = first; r < last; r++)
        norm_dx_row(job, r);
}

static void
cpu_layernorm_backward(tp_backend *be, int64_t rows, int64_t n, const float *dy, int64_t dy_stride, const float *x,
                       int64_t x_stride, const float *mean, const float *rstd, int64_t stat_stride, const float *gamma,
                       const float *dresidual, int64_t dresidual_stride, float *dx, int64_t dx_stride, float *dgamma,
                       float *dbeta)
{
    norm_job job = {.rows = rows, .n = n, .x = x, .x_stride = x_stride, .gamma = gamma};
    job.dy = dy, job.dy_stride = dy_stride, job.mean_in = mean, job.rstd_in = rstd, job.stat_stride = stat_stride;
    job.dresidual = dresidual, job.dresidual_stride = dresidual_stride;
    job.y = dx, job.y_stride = dx_stride, job.dgamma = dgamma, job.dbeta = dbeta;
    if (tp_team_members(be->team) == 1 || rows * n < SHARE_ALONE) {
        tp_team_run(NULL, norm_backward_alone, &job);
        return;
    }
    tp_team_run(be->team, norm_parameters_work, &job);
    tp_team_run(be->team, norm_dx_work, &job);
}
