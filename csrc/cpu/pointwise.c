/* Element-wise work over whole layouts, and sums of squares by a tree that the number of threads does not change. */
#include "csrc/cpu/rows.h"

#include <string.h>

#define POINTWISE_GRAIN TP_SUMSQ_LEAF /* elements: the leaf of sumsq's tree is part of its bits */

typedef struct {
    int64_t n;
    const float *x;
    float *y;
    double *leaves;
} pointwise_job;

static void
add_work(void *argument, int member, int members)
{
    const pointwise_job *job = argument;
    const float *x = job->x;
    float *y = job->y;
    int64_t first, last, i;
    tp_team_share(job->n, POINTWISE_GRAIN, member, members, &first, &last);
    for (i = first; i + VEC_LANES <= last; i += VEC_LANES)
        vec_store(y + i, vec_add(vec_load(y + i), vec_load(x + i)));
    if (i < last)
        vec_store_n(y + i, vec_add(vec_load_n(y + i, last - i), vec_load_n(x + i, last - i)), last - i);
}

static void
copy_work(void *argument, int member, int members)
{
    const pointwise_job *job = argument;
    int64_t first, last;
    tp_team_share(job->n, POINTWISE_GRAIN, member, members, &first, &last);
    memcpy(job->y + first, job->x + first, (size_t)(last - first) * sizeof(float));
}

static void
zero_work(void *argument, int member, int members)
{
    const pointwise_job *job = argument;
    int64_t first, last;
    tp_team_share(job->n, POINTWISE_GRAIN, member, members, &first, &last);
    memset(job->y + first, 0, (size_t)(last - first) * sizeof(float));
}

static void
cpu_add(tp_backend *be, int64_t n, const float *x, float *y)
{
    pointwise_job job = {.n = n, .x = x, .y = y};
    tp_team_run(rows_team(be, n), add_work, &job);
}

static void
cpu_copy(tp_backend *be, int64_t n, const float *x, float *y)
{
    pointwise_job job = {.n = n, .x = x, .y = y};
    tp_team_run(rows_team(be, n), copy_work, &job);
}

static void
cpu_zero(tp_backend *be, int64_t n, float *y)
{
    pointwise_job job = {.n = n, .y = y};
    tp_team_run(rows_team(be, n), zero_work, &job);
}

#define SUMSQ_STREAMS 4 /* read at once: one core asks memory for about twice as much as along one stream */

VEC_INLINE void
sumsq_add(double *restrict lane, const float *restrict x)
{
    for (int j = 0; j < VEC_LANES; j++)
        lane[j] += (double)x[j] * (double)x[j]; /* the product is exact: fusing would change nothing */
}

/* A leaf: floats squared in double by 16 lanes of four quarters, then quarters and lanes pairwise. */
static double
sumsq_leaf(const float *x, int64_t n)
{
    double lane[SUMSQ_STREAMS][VEC_LANES] = {{0}};
    const int64_t quarter = n / (SUMSQ_STREAMS * VEC_LANES) * VEC_LANES;
    for (int64_t i = 0; i < quarter; i += VEC_LANES)
        for (int k = 0; k < SUMSQ_STREAMS; k++)
            sumsq_add(lane[k], x + k * quarter + i);
    for (int64_t i = SUMSQ_STREAMS * quarter; i < n; i++)
        lane[0][i % VEC_LANES] += (double)x[i] * (double)x[i];
    for (int j = 0; j < VEC_LANES; j++)
        lane[0][j] = (lane[0][j] + lane[2][j]) + (lane[1][j] + lane[3][j]);
    for (int step = VEC_LANES / 2; step > 0; step /= 2)
        for (int j = 0; j < step; j++)
            lane[0][j] += lane[0][j + step];
    return lane[0][0];
}

#define SUMSQ_LEAVES 4096 /* leaves of one team run: 64 M elements; sums of runs are added in order */

static void
sumsq_work(void *argument, int member, int members)
{
    const pointwise_job *job = argument;
    int64_t first, last;
    tp_team_share(job->n, POINTWISE_GRAIN, member, members, &first, &last);
    for (int64_t i = first; i < last; i += POINTWISE_GRAIN)
        job->leaves[i / POINTWISE_GRAIN] =
            sumsq_leaf(job->x + i, last - i < POINTWISE_GRAIN ? last - i : POINTWISE_GRAIN);
}

static void
cpu_sumsq_leaves(tp_backend *be, int64_t n, const float *x, double *leaves)
{
    pointwise_job job = {.n = n, .x = x, .leaves = leaves};
    tp_team_run(rows_team(be, n), sumsq_work, &job);
}

static double
cpu_sumsq(tp_backend *be, int64_t n, const float *x)
{
    const int64_t run = (int64_t)SUMSQ_LEAVES * POINTWISE_GRAIN;
    double leaves[SUMSQ_LEAVES], total = 0;
    for (int64_t done = 0; done < n; done += run) {
        int64_t part = n - done < run ? n - done : run;
        cpu_sumsq_leaves(be, part, x + done, leaves);
        for (int64_t i = 0; i * POINTWISE_GRAIN < part; i++)
            total += leaves[i];
    }
    return total;
}
