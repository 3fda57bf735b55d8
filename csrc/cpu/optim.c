/* AdamW (Loshchilov & Hutter 2019): one pass over p, g, m, v; bound by memory. */
#include "csrc/cpu/cpu.h"
#include "csrc/cpu/vec.h"

typedef struct {
    int64_t n;
    float *p, *m, *v;
    const float *g;
    float lr, beta1, beta2, eps, weight_decay, inverse_bias1, inverse_root_bias2, grad_scale;
} adamw_job;

static void
adamw_work(void *argument, int member, int members)
{
    const adamw_job *job = argument;
    int64_t first, last;
    tp_team_share(job->n, 4096, member, members, &first, &last);
    vf16 scale = vec_set1(job->grad_scale), b1 = vec_set1(job->beta1), b2 = vec_set1(job->beta2);
    vf16 c1 = vec_set1(1.0f - job->beta1), c2 = vec_set1(1.0f - job->beta2), eps = vec_set1(job->eps);
    vf16 rate = vec_set1(job->lr * job->inverse_bias1), keep = vec_set1(1.0f - job->lr * job->weight_decay);
    vf16 root = vec_set1(job->inverse_root_bias2);
    for (int64_t i = first; i < last; i += VEC_LANES) {
        int64_t lanes = last - i < VEC_LANES ? last - i : VEC_LANES;
        vf16 g = vec_mul(vec_load_n(job->g + i, lanes), scale);
        vf16 m = vec_fma(b1, vec_load_n(job->m + i, lanes), vec_mul(c1, g));
        vf16 v = vec_fma(b2, vec_load_n(job->v + i, lanes), vec_mul(c2, vec_mul(g, g)));
        vf16 step = vec_div(m, vec_fma(vec_sqrt(v), root, eps));
        vec_store_n(job->m + i, m, lanes);
        vec_store_n(job->v + i, v, lanes);
        vec_store_n(job->p + i, vec_fnma(rate, step, vec_mul(keep, vec_load_n(job->p + i, lanes))), lanes);
    }
}

static void
cpu_adamw(tp_backend *be, int64_t n, float *p, const float *g, float *m, float *v, float lr, float beta1, float beta2,
          float eps, float weight_decay, float bias1, float bias2, float grad_scale)
{
    adamw_job job = {n, p, m, v, g, lr, beta1, beta2, eps, weight_decay, 1.0f / bias1, 1.0f / __builtin_sqrtf(bias2), grad_scale};
    tp_team_run(n >= 32768 ? be->team : NULL, adamw_work, &job);
}
