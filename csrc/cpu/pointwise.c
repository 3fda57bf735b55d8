/* Element-wise work over whole layouts, and sums of squares by a tree that the number of threads does not change. */
#include "csrc/cpu/cpu.h"

#include <string.h>

#include "csrc/cpu/vec.h"

#define POINTWISE_GRAIN 16384 /* elements: also the leaf of sumsq's tree, so it is part of its bits */

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
    int64_t first, last;
    tp_team_share(job->n, POINTWISE_GRAIN, member, members, &first, &last);
    for (int64_t i = first; i < last; i += VEC_LANES) {
        int64_t lanes = last - i < VEC_LANES ? last - i : VEC_LANES;
        vec_store_n(job->y + i, vec_add(vec_load_n(job->y + i, lanes), vec_load_n(job->x + i, lanes)), lanes);
    }
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

static tp_team *
pointwise_team(const tp_backend *be, int64_t n)
{
    return n > 2 * POINTWISE_GRAIN ? be->team : NULL;
}

static void
cpu_add(tp_backend *be, int64_t n, const float *x, float *y)
{
    pointwise_job job = {.n = n, .x = x, .y = y};
    tp_team_run(pointwise_team(be, n), add_work, &job);
}

static void
cpu_copy(tp_backend *be, int64_t n, const float *x, float *y)
{
    pointwise_job job = {.n = n, .x = x, .y = y};
    tp_team_run(pointwise_team(be, n), copy_work, &job);
}

static void
cpu_zero(tp_backend *be, int64_t n, float *y)
{
    pointwise_job job = {.n = n, .y = y};
    tp_team_run(pointwise_team(be, n), zero_work, &job);
}

/* A leaf: floats squared in double by 16 lanes, then lanes pairwise. */
static double
sumsq_leaf(const float *x, int64_t n)
{
    double lane[VEC_LANES] = {0};
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES)
        for (int j = 0; j < VEC_LANES; j++)
            lane[j] += (double)x[i + j] * (double)x[i + j];
    for (int j = 0; i < n; i++, j++)
        lane[j] += (double)x[i] * (double)x[i];
    for (int step = VEC_LANES / 2; step > 0; step /= 2)
        for (int j = 0; j < step; j++)
            lane[j] += lane[j + step];
    return lane[0];
}

#define SUMSQ_LEAVES 4096 /* leaves of one team run: 64 M elements; sums of runs are added in order */

static void
sumsq_work(void *argument, int member, int members)
{
    const pointwise_job *job = argument;
    int64_t first, last;
    tp_team_share(job->n, POINTWISE_GRAIN, member, members, &first, &last);
    for (int64_t i = first; i < last; i += POINTWISE_GRAIN)
        job->leaves[i / POINTWISE_GRAIN] = sumsq_leaf(job->x + i, last - i < POINTWISE_GRAIN ? last - i : POINTWISE_GRAIN);
}

static double
cpu_sumsq(tp_backend *be, int64_t n, const float *x)
{
    double leaves[SUMSQ_LEAVES], total = 0;
    for (int64_t done = 0; done < n; done += (int64_t)SUMSQ_LEAVES * POINTWISE_GRAIN) {
        int64_t part = n - done < (int64_t)SUMSQ_LEAVES * POINTWISE_GRAIN ? n - done : (int64_t)SUMSQ_LEAVES * POINTWISE_GRAIN;
        pointwise_job job = {.n = part, .x = x + done, .leaves = leaves};
        tp_team_run(pointwise_team(be, part), sumsq_work, &job);
        for (int64_t i = 0; i * POINTWISE_GRAIN < part; i++)
            total += leaves[i];
    }
    return total;
}
