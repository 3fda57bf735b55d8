/* AdamW (Loshchilov & Hutter 2019): one pass over p, g, m, v; bound by memory.
 *
 * Subnormal numbers cost the processor a hundred cycles each, and moments whose gradient has become zero (rows of wte
 * of tokens that are gone) decay into them and stay: 0.9 times the smallest rounds back to it. So moments that small
 * become zero, and so do squares of gradients that eps hides: below its 2^-24th part. */
#include "csrc/cpu/rows.h"

#include <float.h>

/* Of a moment: beta = kept + rest, and 1 - beta. A float alone would be another beta, of which bias1 and bias2 know nothing:
 * 1 - 0.99999f is a 700th more than 0.00001. From 0.5 on `kept` is 1: behind a product that is rounded (vec_fma of the portable
 * build) a rest of less than its last bit would come to nothing. */
typedef struct {
    float kept, rest, taken;
} adamw_shares;

typedef struct {
    int64_t n;
    float *p, *m, *v;
    const float *from, *g;
    float lr, eps, weight_decay, inverse_bias1, inverse_root_bias2, grad_scale;
    adamw_shares mean, square;
    float least_g, least_v; /* of what v sees; 0 if eps hides nothing */
} adamw_job;

VEC_INLINE vf16
adamw_mean(adamw_shares share, vf16 old, vf16 more)
{
    vf16 rest = vec_fma(vec_set1(share.rest), old, vec_mul(vec_set1(share.taken), more));
    return vec_fma(vec_set1(share.kept), old, rest);
}

VEC_INLINE void
adamw_part(const adamw_job *job, int64_t i, int64_t lanes)
{
    vf16 g = vec_mul(rows_load(job->g + i, lanes), vec_set1(job->grad_scale));
    vf16 seen = vec_keep(g, vec_set1(job->least_g));
    vf16 m = adamw_mean(job->mean, rows_load(job->m + i, lanes), g);
    vf16 v = adamw_mean(job->square, rows_load(job->v + i, lanes), vec_mul(seen, seen));
    m = vec_keep(m, vec_set1(FLT_MIN));
    v = vec_keep(v, vec_set1(job->least_v));
    vf16 step = vec_div(m, vec_fma(vec_sqrt(v), vec_set1(job->inverse_root_bias2), vec_set1(job->eps)));
    vf16 kept = vec_mul(vec_set1(1.0f - job->lr * job->weight_decay), rows_load(job->from + i, lanes));
    rows_store(job->m + i, m, lanes);
    rows_store(job->v + i, v, lanes);
    rows_store(job->p + i, vec_fnma(vec_set1(job->lr * job->inverse_bias1), step, kept), lanes);
}

static void
adamw_work(void *argument, int member, int members)
{
    const adamw_job job =
        *(const adamw_job *)argument; /* a copy that no store can alias: its terms stay in registers */
    int64_t first, last, i;
    tp_team_share(job.n, 4096, member, members, &first, &last);
    for (i = first; i + VEC_LANES <= last; i += VEC_LANES)
        adamw_part(&job, i, VEC_LANES);
    if (i < last)
        adamw_part(&job, i, last - i);
}

static adamw_shares
adamw_shared(double beta)
{
    const float kept = beta < 0.5 ? (float)beta : 1;
    return (adamw_shares){.kept = kept, .rest = (float)(beta - (double)kept), .taken = (float)(1 - beta)};
}

static void
cpu_adamw(tp_backend *be, int64_t n, const float *from, float *p, const float *g, float *m, float *v, float lr, double beta1,
          double beta2, float eps, float weight_decay, float bias1, float bias2, float grad_scale)
{
    const float hidden = eps * 0x1p-24f, hidden_square = hidden * hidden;
    adamw_job job = {.n = n,
                     .from = from,
                     .p = p,
                     .m = m,
                     .v = v,
                     .g = g,
                     .lr = lr,
                     .mean = adamw_shared(beta1),
                     .square = adamw_shared(beta2),
                     .eps = eps,
                     .weight_decay = weight_decay,
                     .inverse_bias1 = 1.0f / bias1,
                     .inverse_root_bias2 = 1.0f / __builtin_sqrtf(bias2),
                     .grad_scale = grad_scale,
                     .least_g = hidden < 0x1p-55f ? hidden : 0x1p-55f,
                     .least_v = hidden_square < FLT_MIN ? hidden_square : FLT_MIN};
    tp_team_run(rows_team(be, n), adamw_work, &job);
}
