/* What meets the vocabulary: rows gathered from and added to weights in panels, and the softmax of 50257 logits. */
#include "csrc/cpu/cpu.h"
#include "csrc/cpu/share.h"
#include "csrc/cpu/vec.h"

#include <math.h>

/* ---- embedding ----------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t rows, n, vocab, positions_count;
    const int32_t *tokens, *positions;
    const float *wte, *wpe, *dy;
    float *y, *grad;
    int64_t y_stride;
} embedding_job;

/* out[0..width) = (x +) y, width <= TP_PANEL; all sixteen lanes of a weight's panel may be read, its padding is there. */
VEC_INLINE void
panel_add(int64_t width, const float *x, const float *y, float *out)
{
    int64_t i = 0;
    for (; i + VEC_LANES <= width; i += VEC_LANES)
        vec_store(out + i, vec_add(vec_load(x + i), vec_load(y + i)));
    if (i < width)
        vec_store_n(out + i, vec_add(vec_load_n(x + i, width - i), vec_load_n(y + i, width - i)), width - i);
}

static void
embedding_work(void *argument, int member, int members)
{
    const embedding_job *job = argument;
    int64_t first, last;
    tp_team_share(job->rows, 1, member, members, &first, &last);
    for (int64_t r = first; r < last; r++)
        for (int64_t c = 0; c < job->n; c += TP_PANEL)
            panel_add(share_least(TP_PANEL, job->n - c), job->wte + panel_index(job->vocab, job->tokens[r], c),
                      job->wpe + panel_index(job->positions_count, job->positions[r], c),
                      job->y + r * job->y_stride + c);
}

static void
cpu_embedding(tp_backend *be, int64_t rows, int64_t n, int64_t vocab, int64_t positions_count, const int32_t *tokens,
              const int32_t *positions, const float *wte, const float *wpe, float *y, int64_t y_stride)
{
    embedding_job job = {.rows = rows, .n = n, .vocab = vocab, .positions_count = positions_count};
    job.tokens = tokens, job.positions = positions, job.wte = wte, job.wpe = wpe, job.y = y, job.y_stride = y_stride;
    share_run(be, rows * n, embedding_work, &job);
}

/* Threads share panels: two rows may name one index, and its sum must keep their order. */
static void
scatter_work(void *argument, int member, int members)
{
    const embedding_job *job = argument;
    int64_t first, last;
    tp_team_share(job->n, TP_PANEL, member, members, &first, &last);
    for (int64_t r = 0; r < job->rows; r++)
        for (int64_t c = first; c < last; c += TP_PANEL) {
            float *to = job->grad + panel_index(job->vocab, job->tokens[r], c);
            panel_add(share_least(TP_PANEL, job->n - c), to, job->dy + r * job->y_stride + c, to);
        }
}

static void
cpu_scatter_add(tp_backend *be, int64_t rows, int64_t n, int64_t height, const int32_t *index, const float *dy,
                int64_t dy_stride, float *grad)
{
    embedding_job job = {.rows = rows, .n = n, .vocab = height, .tokens = index, .dy = dy, .y_stride = dy_stride};
    job.grad = grad;
    share_run(be, rows * n, scatter_work, &job);
}

/* ---- softmax and loss ---------------------------------------------------------------------------------------------- */

#define LOSS_BLOCK 256 /* logits summed in fp32 before they join a sum in double */

typedef struct {
    int64_t rows, vocab, stride;
    float *logits;
    const int32_t *targets;
    double *loss;
    float scale;
    int dlogits;
} loss_job;

static float
loss_largest(int64_t n, const float *x)
{
    vf16 a = vec_set1(-INFINITY), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 4 * VEC_LANES <= n; i += 4 * VEC_LANES) {
        a = vec_max(a, vec_load(x + i));
        b = vec_max(b, vec_load(x + i + VEC_LANES));
        c = vec_max(c, vec_load(x + i + 2 * VEC_LANES));
        d = vec_max(d, vec_load(x + i + 3 * VEC_LANES));
    }
    for (; i < n; i += VEC_LANES) {
        int64_t lanes = share_least(VEC_LANES, n - i);
        a = vec_max(a, vec_first_n(vec_load_n(x + i, lanes), lanes, a));
    }
    return vec_max_lane(vec_max(vec_max(a, b), vec_max(c, d)));
}

/* Sum of e^(x - largest) over n <= LOSS_BLOCK logits; where `keep`, x becomes e^(x - largest). */
static float
loss_block(int64_t n, vf16 largest, int keep, float *x)
{
    vf16 sum = vec_zero();
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES) {
        vf16 e = vec_exp(vec_sub(vec_load(x + i), largest));
        sum = vec_add(sum, e);
        if (keep)
            vec_store(x + i, e);
    }
    if (i < n) {
        vf16 e = vec_exp(vec_sub(vec_load_n(x + i, n - i), largest));
        sum = vec_add(sum, vec_first_n(e, n - i, vec_zero()));
        if (keep)
            vec_store_n(x + i, e, n - i);
    }
    return vec_sum(sum);
}

static void
loss_scale(int64_t n, float factor, float *x)
{
    vf16 f = vec_set1(factor);
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES)
        vec_store(x + i, vec_mul(vec_load(x + i), f));
    if (i < n)
        vec_store_n(x + i, vec_mul(vec_load_n(x + i, n - i), f), n - i);
}

static void
loss_work(void *argument, int member, int members)
{
    const loss_job *job = argument;
    int64_t first, last;
    tp_team_share(job->rows, 1, member, members, &first, &last);
    for (int64_t r = first; r < last; r++) {
        float *x = job->logits + r * job->stride, largest = loss_largest(job->vocab, x);
        float *target = x + job->targets[r];
        double sum = 0.0, margin = (double)*target - (double)largest;
        for (int64_t i = 0; i < job->vocab; i += LOSS_BLOCK)
            sum += (double)loss_block(share_least(LOSS_BLOCK, job->vocab - i), vec_set1(largest), job->dlogits, x + i);
        job->loss[r] = log(sum) - margin;
        if (job->dlogits) {
            double e = (double)*target;
            loss_scale(job->vocab, (float)((double)job->scale / sum), x);
            *target = (float)((e / sum - 1.0) * (double)job->scale);
        }
    }
}

static void
cpu_softmax_loss(tp_backend *be, int64_t rows, int64_t vocab, float *logits, int64_t stride, const int32_t *targets,
                 float scale, int dlogits, double *loss)
{
    loss_job job = {rows, vocab, stride, logits, targets, loss, scale, dlogits};
    share_run(be, rows * vocab, loss_work, &job);
}
