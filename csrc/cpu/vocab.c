/* The two ends of the vocabulary: embedding rows in and out, and the loss of a row of logits. */
#include "csrc/cpu/rows.h"

#include <float.h>
#include <math.h>

typedef struct {
    int64_t rows, n, vocab, positions_count;
    const int32_t *tokens, *positions;
    const float *wte, *wpe, *dy;
    int64_t stride;
    float *y;
} embedding_job;

/* 16 divides a panel: a vector lies in one. A token's row is two lines of each panel, which no prefetcher foresees. */
static void
embedding_work(void *argument, int member, int members)
{
    const embedding_job *job = argument;
    int64_t first, last;
    tp_team_share(job->rows, 1, member, members, &first, &last);
    for (int64_t r = first; r < last; r++) {
        int64_t token = job->tokens[r], next = job->tokens[r + 1 < last ? r + 1 : r], place = job->positions[r];
        float *y = job->y + r * job->stride;
        for (int64_t c = 0; c < job->n; c += VEC_LANES) {
            __builtin_prefetch(job->wte + panel_index(job->vocab, next, c));
            vf16 sum = vec_add(vec_load(job->wte + panel_index(job->vocab, token, c)),
                               vec_load(job->wpe + panel_index(job->positions_count, place, c)));
            rows_store(y + c, sum, rows_lanes(job->n, c));
        }
    }
}

static void
cpu_embedding(tp_backend *be, int64_t rows, int64_t n, int64_t vocab, int64_t positions_count, const int32_t *tokens,
              const int32_t *positions, const float *wte, const float *wpe, float *y, int64_t y_stride)
{
    embedding_job job = {.rows = rows,
                         .n = n,
                         .vocab = vocab,
                         .positions_count = positions_count,
                         .tokens = tokens,
                         .positions = positions,
                         .wte = wte,
                         .wpe = wpe,
                         .y = y,
                         .stride = y_stride};
    tp_team_run(rows_team(be, rows * n), embedding_work, &job);
}

static void
scatter_work(void *argument, int member, int members)
{
    const embedding_job *job = argument;
    int64_t first, last;
    tp_team_share(job->n, VEC_LANES, member, members, &first, &last);
    for (int64_t r = 0; r < job->rows; r++) {
        int64_t token = job->tokens[r], next = job->tokens[r + 1 < job->rows ? r + 1 : r];
        const float *dy = job->dy + r * job->stride;
        for (int64_t c = first; c < last; c += VEC_LANES) {
            int64_t lanes = rows_lanes(last, c);
            float *at = job->y + panel_index(job->vocab, token, c);
            __builtin_prefetch(job->y + panel_index(job->vocab, next, c), 1);
            rows_store(at, vec_add(rows_load(at, lanes), rows_load(dy + c, lanes)), lanes);
        }
    }
}

static void
cpu_scatter_add(tp_backend *be, int64_t rows, int64_t n, int64_t height, const int32_t *index, const float *dy,
                int64_t dy_stride, float *grad)
{
    embedding_job job = {
        .rows = rows, .n = n, .vocab = height, .tokens = index, .dy = dy, .stride = dy_stride, .y = grad};
    tp_team_run(rows_team(be, rows * n), scatter_work, &job);
}

/* The loss passes a row in parts that stay in the first cache between their maximum and their exponentials; a part is
 * taken relative to the largest logit so far, and the last pass brings it to the row's (Milakov & Gimelshein 2018, by
 * parts). Parts follow from the vocabulary alone. */
#define LOSS_PART  4096 /* floats; more where a row would have more than LOSS_PARTS parts */
#define LOSS_PARTS 64

typedef struct {
    int64_t rows, vocab, stride, part;
    float *logits;
    const int32_t *targets;
    float scale;
    int dlogits;
    double *loss;
} loss_job;

static float
loss_top(const float *x, int64_t n, float top_so_far)
{
    vf16 top[4];
    int64_t i = 0;
    for (int k = 0; k < 4; k++)
        top[k] = vec_set1(top_so_far);
    for (; i + 4 * VEC_LANES <= n; i += 4 * VEC_LANES)
        for (int k = 0; k < 4; k++)
            top[k] = vec_max(top[k], vec_load(x + i + k * VEC_LANES));
    for (; i < n; i += VEC_LANES) {
        int64_t lanes = rows_lanes(n, i);
        top[0] = vec_max(top[0], vec_first_n(vec_load_n(x + i, lanes), lanes, top[0]));
    }
    return vec_max_lane(vec_max(vec_max(top[0], top[1]), vec_max(top[2], top[3])));
}

VEC_INLINE vf16
loss_exp(float *x, vf16 top, int keep, int64_t lanes)
{
    vf16 e = rows_first(vec_exp(vec_sub(rows_load(x, lanes), top)), lanes);
    if (keep)
        rows_store(x, e, lanes);
    return e;
}

/* Sum of e^(x - top); x becomes that if it is to be kept. `ahead` is what is passed next. */
static double
loss_sum(float *x, int64_t n, float top, int keep, const float *ahead)
{
    vf16 t = vec_set1(top), sum[2] = {vec_zero(), vec_zero()};
    int64_t i = 0;
    for (; i + 2 * VEC_LANES <= n; i += 2 * VEC_LANES)
        for (int k = 0; k < 2; k++) {
            __builtin_prefetch(ahead + i + k * VEC_LANES, 1);
            sum[k] = vec_add(sum[k], loss_exp(x + i + k * VEC_LANES, t, keep, VEC_LANES));
        }
    for (; i < n; i += VEC_LANES)
        sum[0] = vec_add(sum[0], loss_exp(x + i, t, keep, rows_lanes(n, i)));
    return (double)vec_sum(vec_add(sum[0], sum[1]));
}

/* x * factor. What would come below 2^-100 is zero: AdamW could not see it, and the matrix products that take the
 * gradients run a hundred times slower once subnormal numbers are in their sums. */
#define LOSS_LEAST 0x1p-100

static void
loss_scale(float *x, int64_t n, double factor)
{
    double size = fabs(factor);
    vf16 least = vec_set1(size < LOSS_LEAST ? FLT_MAX : (float)(LOSS_LEAST / size));
    vf16 f = vec_set1(size < LOSS_LEAST ? 0.0f : (float)factor);
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES)
        vec_store(x + i, vec_mul(vec_keep(vec_load(x + i), least), f));
    if (i < n)
        vec_store_n(x + i, vec_mul(vec_keep(vec_load_n(x + i, n - i), least), f), n - i);
}

static void
loss_row(const loss_job *job, int64_t r, int64_t next)
{
    float *x = job->logits + r * job->stride, wanted = x[job->targets[r]];
    const int64_t vocab = job->vocab, part = job->part;
    float top[LOSS_PARTS], before = -FLT_MAX;
    double sum = 0;
    int p = 0;
    for (int64_t i = 0; i < vocab; i += part) {
        int64_t n = vocab - i < part ? vocab - i : part;
        const float *ahead = i + 2 * part <= vocab ? x + i + part : job->logits + next * job->stride;
        top[p] = loss_top(x + i, n, before);
        sum = (top[p] == before ? sum : sum * exp((double)before - (double)top[p])) +
              loss_sum(x + i, n, top[p], job->dlogits, ahead);
        before = top[p++];
    }
    job->loss[r] = log(sum) + ((double)before - (double)wanted);
    if (!job->dlogits)
        return;
    for (p = 0; (int64_t)p * part < vocab; p++) {
        int64_t n = vocab - p * part < part ? vocab - p * part : part;
        double factor = (double)job->scale / sum;
        loss_scale(x + p * part, n, top[p] == before ? factor : factor * exp((double)top[p] - (double)before));
    }
    x[job->targets[r]] -= job->scale;
}

static void
loss_work(void *argument, int member, int members)
{
    const loss_job *job = argument;
    int64_t first, last;
    tp_team_share(job->rows, 1, member, members, &first, &last);
    for (int64_t r = first; r < last; r++)
        loss_row(job, r, r + 1 < last ? r + 1 : r);
}

static void
cpu_softmax_loss(tp_backend *be, int64_t rows, int64_t vocab, float *logits, int64_t stride, const int32_t *targets,
                 float scale, int dlogits, double *loss)
{
    int64_t part = (vocab + LOSS_PARTS * VEC_LANES - 1) / (LOSS_PARTS * VEC_LANES) * VEC_LANES;
    loss_job job = {.rows = rows,
                    .vocab = vocab,
                    .stride = stride,
                    .part = part < LOSS_PART ? LOSS_PART : part,
                    .logits = logits,
                    .targets = targets,
                    .scale = scale,
                    .dlogits = dlogits,
                    .loss = loss};
    tp_team_run(rows_team(be, rows * vocab), loss_work, &job);
}
