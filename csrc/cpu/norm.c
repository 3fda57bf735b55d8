/* LayerNorm of rows (Ba, Kiros & Hinton 2016), eps 1e-5. A row's bits depend on that row alone; gradients of gamma and beta
 * are chains over rows in the order of the call. Threads share rows, and columns for the chains. */
#include "csrc/cpu/cpu.h"
#include "csrc/cpu/vec.h"

#define NORM_EPS 1e-5f
#define NORM_WORTH_A_TEAM 16384 /* elements: below, waking a thread costs more than it saves */

static inline tp_team *
norm_team(const tp_backend *be, int64_t elements)
{
    return elements >= NORM_WORTH_A_TEAM ? be->team : NULL;
}

typedef struct {
    int64_t rows, n;
    const float *x, *gamma, *beta, *dy, *dresidual;
    int64_t x_stride, y_stride, dy_stride, dresidual_stride, stat_stride;
    float *y, *mean, *rstd, *dgamma, *dbeta;
    const float *known_mean, *known_rstd; /* NULL: measured here */
} norm_job;

static void
norm_measure(const float *x, int64_t n, float *mean, float *rstd)
{
    vf16 sum = vec_zero(), squares = vec_zero();
    for (int64_t i = 0; i < n; i += VEC_LANES)
        sum = vec_add(sum, vec_load_n(x + i, n - i < VEC_LANES ? n - i : VEC_LANES));
    *mean = vec_sum(sum) / (float)n;
    for (int64_t i = 0; i < n; i += VEC_LANES) {
        int64_t lanes = n - i < VEC_LANES ? n - i : VEC_LANES;
        vf16 d = vec_first_n(vec_sub(vec_load_n(x + i, lanes), vec_set1(*mean)), lanes, vec_zero());
        squares = vec_fma(d, d, squares);
    }
    float variance = vec_sum(squares) / (float)n;
    *rstd = 1.0f / __builtin_sqrtf(variance + NORM_EPS);
}

static void
norm_row(const norm_job *job, const float *x, float mean, float rstd, float *y)
{
    vf16 m = vec_set1(mean), r = vec_set1(rstd);
    for (int64_t i = 0; i < job->n; i += VEC_LANES) {
        int64_t lanes = job->n - i < VEC_LANES ? job->n - i : VEC_LANES;
        vf16 unit = vec_mul(vec_sub(vec_load_n(x + i, lanes), m), r), g = vec_load_n(job->gamma + i, lanes);
        vf16 b = job->beta == NULL ? vec_zero() : vec_load_n(job->beta + i, lanes);
        vec_store_n(y + i, vec_fma(unit, g, b), lanes);
    }
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
    norm_job job = {.rows = rows, .n = n, .x = x, .x_stride = x_stride, .gamma = gamma, .beta = beta, .y = y,
                    .y_stride = y_stride, .mean = mean, .rstd = rstd};
    tp_team_run(norm_team(be, rows * n), norm_forward_work, &job);
}

static void
cpu_layernorm_apply(tp_backend *be, int64_t rows, int64_t n, const float *x, int64_t x_stride, const float *mean,
                    const float *rstd, int64_t stat_stride, const float *gamma, const float *beta, float *y,
                    int64_t y_stride)
{
    norm_job job = {.rows = rows, .n = n, .x = x, .x_stride = x_stride, .gamma = gamma, .beta = beta, .y = y,
                    .y_stride = y_stride, .known_mean = mean, .known_rstd = rstd, .stat_stride = stat_stride};
    tp_team_run(norm_team(be, rows * n), norm_forward_work, &job);
}

/* dx = rstd (g - mean(g) - unit mean(g unit)), g = dy gamma, unit = (x - mean) rstd. */
static void
norm_backward_row(const norm_job *job, int64_t r)
{
    const float *x = job->x + r * job->x_stride, *dy = job->dy + r * job->dy_stride;
    const float *dresidual = job->dresidual == NULL ? NULL : job->dresidual + r * job->dresidual_stride;
    float *dx = job->y + r * job->y_stride, rstd = job->known_rstd[r * job->stat_stride];
    vf16 m = vec_set1(job->known_mean[r * job->stat_stride]), s = vec_set1(rstd), sum = vec_zero(), along = vec_zero();
    for (int64_t i = 0; i < job->n; i += VEC_LANES) {
        int64_t lanes = job->n - i < VEC_LANES ? job->n - i : VEC_LANES; /* gamma is zero beyond: nothing is added */
        vf16 unit = vec_mul(vec_sub(vec_load_n(x + i, lanes), m), s);
        vf16 g = vec_mul(vec_load_n(dy + i, lanes), vec_load_n(job->gamma + i, lanes));
        sum = vec_add(sum, g);
        along = vec_fma(g, unit, along);
    }
    vf16 mean_g = vec_set1(vec_sum(sum) / (float)job->n), mean_along = vec_set1(vec_sum(along) / (float)job->n);
    for (int64_t i = 0; i < job->n; i += VEC_LANES) {
        int64_t lanes = job->n - i < VEC_LANES ? job->n - i : VEC_LANES;
        vf16 unit = vec_mul(vec_sub(vec_load_n(x + i, lanes), m), s);
        vf16 g = vec_mul(vec_load_n(dy + i, lanes), vec_load_n(job->gamma + i, lanes));
        vf16 d = vec_mul(s, vec_fnma(unit, mean_along, vec_sub(g, mean_g)));
        if (dresidual != NULL)
            d = vec_add(vec_load_n(dresidual + i, lanes), d);
        vec_store_n(dx + i, d, lanes);
    }
}

static void
norm_backward_work(void *argument, int member, int members)
{
    const norm_job *job = argument;
    int64_t first, last;
    tp_team_share(job->rows, 1, member, members, &first, &last);
    for (int64_t r = first; r < last; r++)
        norm_backward_row(job, r);
}

static void
norm_chain_work(void *argument, int member, int members)
{
    const norm_job *job = argument;
    int64_t first, last;
    tp_team_share(job->n, VEC_LANES, member, members, &first, &last);
    for (int64_t i = first; i < last; i += VEC_LANES) {
        int64_t lanes = last - i < VEC_LANES ? last - i : VEC_LANES;
        vf16 dgamma = vec_load_n(job->dgamma + i, lanes);
        vf16 dbeta = job->dbeta == NULL ? vec_zero() : vec_load_n(job->dbeta + i, lanes);
        for (int64_t r = 0; r < job->rows; r++) {
            vf16 m = vec_set1(job->known_mean[r * job->stat_stride]), s = vec_set1(job->known_rstd[r * job->stat_stride]);
            vf16 dy = vec_load_n(job->dy + r * job->dy_stride + i, lanes);
            dgamma = vec_fma(dy, vec_mul(vec_sub(vec_load_n(job->x + r * job->x_stride + i, lanes), m), s), dgamma);
            dbeta = vec_add(dbeta, dy);
        }
        vec_store_n(job->dgamma + i, dgamma, lanes);
        if (job->dbeta != NULL)
            vec_store_n(job->dbeta + i, dbeta, lanes);
    }
}

static void
cpu_layernorm_backward(tp_backend *be, int64_t rows, int64_t n, const float *dy, int64_t dy_stride, const float *x,
                       int64_t x_stride, const float *mean, const float *rstd, int64_t stat_stride, const float *gamma,
                       const float *dresidual, int64_t dresidual_stride, float *dx, int64_t dx_stride, float *dgamma,
                       float *dbeta)
{
    norm_job job = {.rows = rows, .n = n, .x = x, .x_stride = x_stride, .gamma = gamma, .dy = dy, .dy_stride = dy_stride,
                    .dresidual = dresidual, .dresidual_stride = dresidual_stride, .y = dx, .y_stride = dx_stride,
                    .known_mean = mean, .known_rstd = rstd, .stat_stride = stat_stride, .dgamma = dgamma,
                    .dbeta = dbeta};
    tp_team_run(norm_team(be, rows * n), norm_chain_work, &job); /* first: dx may lie over dy or x */
    tp_team_run(norm_team(be, rows * n), norm_backward_work, &job);
}
