/* The two ends of the vocabulary: embedding rows in and out, and the loss of a row of logits. */
#include "csrc/cpu/cpu.h"

#include <math.h>

#include "csrc/cpu/vec.h"

typedef struct {
    int64_t rows, n, vocab, positions_count;
    const int32_t *tokens, *positions;
    const float *wte, *wpe, *dy;
    int64_t stride;
    float *y;
} embedding_job;

static void
embedding_work(void *argument, int member, int members)
{
    const embedding_job *job = argument;
    int64_t first, last;
    tp_team_share(job->rows, 1, member, members, &first, &last);
    for (int64_t r = first; r < last; r++)
        for (int64_t c = 0; c < job->n; c += VEC_LANES) { /* 16 divides a panel: a vector lies in one */
            int64_t lanes = job->n - c < VEC_LANES ? job->n - c : VEC_LANES;
            vf16 token = vec_load(job->wte + panel_index(job->vocab, job->tokens[r], c));
            vf16 place = vec_load(job->wpe + panel_index(job->positions_count, job->positions[r], c));
            vec_store_n(job->y + r * job->stride + c, vec_add(token, place), lanes);
        }
}

static void
cpu_embedding(tp_backend *be, int64_t rows, int64_t n, int64_t vocab, int64_t positions_count, const int32_t *tokens,
              const int32_t *positions, const float *wte, const float *wpe, float *y, int64_t y_stride)
{
    embedding_job job = {.rows = rows, .n = n, .vocab = vocab, .positions_count = positions_count, .tokens = tokens,
                         .positions = positions, .wte = wte, .wpe = wpe, .y = y, .stride = y_stride};
    tp_team_run(rows * n >= 32768 ? be->team : NULL, embedding_work, &job);
}

static void
scatter_work(void *argument, int member, int members)
{
    const embedding_job *job = argument;
    int64_t first, last;
    tp_team_share(job->n, VEC_LANES, member, members, &first, &last);
    for (int64_t r = 0; r < job->rows; r++)
        for (int64_t c = first; c < last; c += VEC_LANES) {
            int64_t lanes = last - c < VEC_LANES ? last - c : VEC_LANES;
            float *at = job->y + panel_index(job->vocab, job->tokens[r], c);
            vec_store_n(at, vec_add(vec_load_n(at, lanes), vec_load_n(job->dy + r * job->stride + c, lanes)), lanes);
        }
}

static void
cpu_scatter_add(tp_backend *be, int64_t rows, int64_t n, int64_t height, const int32_t *index, const float *dy,
                int64_t dy_stride, float *grad)
{
    embedding_job job = {.rows = rows, .n = n, .vocab = height, .tokens = index, .dy = dy, .stride = dy_stride, .y = grad};
    tp_team_run(rows * n >= 32768 ? be->team : NULL, scatter_work, &job);
}

typedef struct {
    int64_t rows, vocab, stride;
    float *logits;
    const int32_t *targets;
    float scale;
    int dlogits;
    double *loss;
} loss_job;

static void
loss_row(const loss_job *job, int64_t r)
{
    float *x = job->logits + r * job->stride;
    int64_t vocab = job->vocab, full = vocab / VEC_LANES * VEC_LANES, tail = vocab - full;
    vf16 top = vec_set1(x[0]);
    for (int64_t i = 0; i < full; i += VEC_LANES)
        top = vec_max(top, vec_load(x + i));
    if (tail > 0)
        top = vec_max(top, vec_first_n(vec_load_n(x + full, tail), tail, top));
    float max = vec_max_lane(top), wanted = x[job->targets[r]];
    vf16 m = vec_set1(max), sums[2] = {vec_zero(), vec_zero()};
    double sum = 0; /* a float sum of 50257 terms would cost four digits: fold every 4096 */
    for (int64_t i = 0; i < vocab; i += VEC_LANES) {
        int64_t lanes = vocab - i < VEC_LANES ? vocab - i : VEC_LANES;
        vf16 e = vec_first_n(vec_exp(vec_sub(vec_load_n(x + i, lanes), m)), lanes, vec_zero());
        if (job->dlogits)
            vec_store_n(x + i, e, lanes);
        sums[i / VEC_LANES % 2] = vec_add(sums[i / VEC_LANES % 2], e);
        if (i % 4096 == 4096 - VEC_LANES) {
            sum += (double)vec_sum(vec_add(sums[0], sums[1]));
            sums[0] = sums[1] = vec_zero();
        }
    }
    sum += (double)vec_sum(vec_add(sums[0], sums[1]));
    job->loss[r] = log(sum) - ((double)wanted - (double)max);
    if (!job->dlogits)
        return;
    vf16 factor = vec_set1((float)((double)job->scale / sum));
    for (int64_t i = 0; i < vocab; i += VEC_LANES) {
        int64_t lanes = vocab - i < VEC_LANES ? vocab - i : VEC_LANES;
        vec_store_n(x + i, vec_mul(vec_load_n(x + i, lanes), factor), lanes);
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
        loss_row(job, r);
}

static void
cpu_softmax_loss(tp_backend *be, int64_t rows, int64_t vocab, float *logits, int64_t stride, const int32_t *targets,
                 float scale, int dlogits, double *loss)
{
    loss_job job = {rows, vocab, stride, logits, targets, scale, dlogits, loss};
    tp_team_run(rows * vocab >= 16384 ? be->team : NULL, loss_work, &job);
}
