/* The gradient's norm and AdamW, over whole layouts: a layout is a permutation whose padding is zero and stays zero. */
#include "csrc/cpu/cpu.h"
#include "csrc/cpu/share.h"
#include "csrc/cpu/vec.h"

/* ---- sum of squares ------------------------------------------------------------------------------------------------ */

#define SUMSQ_LEAVES 256 /* of the tree: a function of n alone, at least as many as a team has members */

typedef struct {
    int64_t n, leaf; /* floats per leaf */
    const float *x;
    double sums[SUMSQ_LEAVES];
} sumsq_job;

/* Sixteen chains in double; the square of a float is exact in double. */
static double
sumsq_leaf(int64_t n, const float *x)
{
    double lane[VEC_LANES] = {0};
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES)
        for (int j = 0; j < VEC_LANES; j++)
            lane[j] += (double)x[i + j] * (double)x[i + j];
    for (int j = 0; i + j < n; j++)
        lane[j] += (double)x[i + j] * (double)x[i + j];
    for (int half = VEC_LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++)
            lane[j] += lane[j + half];
    return lane[0];
}

static void
sumsq_work(void *argument, int member, int members)
{
    sumsq_job *job = argument;
    int64_t first, last;
    tp_team_share(SUMSQ_LEAVES, 1, member, members, &first, &last);
    for (int64_t i = first; i < last; i++) {
        int64_t from = share_least(i * job->leaf, job->n), to = share_least(from + job->leaf, job->n);
        job->sums[i] = sumsq_leaf(to - from, job->x + from);
    }
}

static double
cpu_sumsq(tp_backend *be, int64_t n, const float *x)
{
    sumsq_job job = {.n = n, .x = x};
    int64_t leaf = (n + SUMSQ_LEAVES - 1) / SUMSQ_LEAVES;
    job.leaf = (leaf + VEC_LANES - 1) / VEC_LANES * VEC_LANES;
    share_run(be, n, sumsq_work, &job);
    for (int half = SUMSQ_LEAVES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            job.sums[i] += job.sums[i + half];
    return job.sums[0];
}

/* ---- AdamW ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t n;
    float *p, *m, *v;
    const float *g;
    vf16 beta1, beta2, rest1, rest2, grad_scale, step, root_bias2, eps, keep;
} adamw_job;

VEC_INLINE vf16
adamw_vec(const adamw_job *job, vf16 p, vf16 g, vf16 *m, vf16 *v)
{
    g = vec_mul(g, job->grad_scale);
    *m = vec_fma(job->beta1, *m, vec_mul(job->rest1, g));
    *v = vec_fma(job->beta2, *v, vec_mul(job->rest2, vec_mul(g, g)));
    vf16 root = vec_add(vec_mul(vec_sqrt(*v), job->root_bias2), job->eps);
    return vec_fnma(job->step, vec_div(*m, root), vec_mul(p, job->keep));
}

static void
adamw_work(void *argument, int member, int members)
{
    const adamw_job local = *(const adamw_job *)argument, *job = &local;
    int64_t i, last;
    tp_team_share(job->n, VEC_LANES, member, members, &i, &last);
    for (; i + VEC_LANES <= last; i += VEC_LANES) {
        vf16 m = vec_load(job->m + i), v = vec_load(job->v + i);
        vec_store(job->p + i, adamw_vec(job, vec_load(job->p + i), vec_load(job->g + i), &m, &v));
        vec_store(job->m + i, m);
        vec_store(job->v + i, v);
    }
    if (i < last) {
        int64_t rest = last - i;
        vf16 m = vec_load_n(job->m + i, rest), v = vec_load_n(job->v + i, rest);
        vf16 p = adamw_vec(job, vec_load_n(job->p + i, rest), vec_load_n(job->g + i, rest), &m, &v);
        vec_store_n(job->p + i, p, rest);
        vec_store_n(job->m + i, m, rest);
        vec_store_n(job->v + i, v, rest);
    }
}

static void
cpu_adamw(tp_backend *be, int64_t n, float *p, const float *g, float *m, float *v, float lr, float beta1, float beta2,
          float eps, float weight_decay, float bias1, float bias2, float grad_scale)
{
    adamw_job job = {.n = n, .p = p, .m = m, .v = v, .g = g};
    job.beta1 = vec_set1(beta1), job.beta2 = vec_set1(beta2);
    job.rest1 = vec_set1((float)(1.0 - (double)beta1)), job.rest2 = vec_set1((float)(1.0 - (double)beta2));
    job.grad_scale = vec_set1(grad_scale), job.eps = vec_set1(eps);
    job.step = vec_set1((float)((double)lr / (double)bias1));
    job.root_bias2 = vec_set1((float)(1.0 / __builtin_sqrt((double)bias2)));
    job.keep = vec_set1((float)(1.0 - (double)lr * (double)weight_decay));
    share_run(be, 4 * n, adamw_work, &job);
}
