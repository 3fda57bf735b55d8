/* What is done to every float of a layout: bound by memory, so one pass each. */
#include "csrc/cpu/cpu.h"
#include "csrc/cpu/share.h"
#include "csrc/cpu/vec.h"

#include <string.h>

typedef struct {
    int64_t n;
    const float *x;
    float *y;
} pointwise_job;

static void
add_work(void *argument, int member, int members)
{
    const pointwise_job *job = argument;
    int64_t i, last;
    tp_team_share(job->n, VEC_LANES, member, members, &i, &last);
    for (; i + VEC_LANES <= last; i += VEC_LANES)
        vec_store(job->y + i, vec_add(vec_load(job->y + i), vec_load(job->x + i)));
    if (i < last)
        vec_store_n(job->y + i, vec_add(vec_load_n(job->y + i, last - i), vec_load_n(job->x + i, last - i)), last - i);
}

static void
cpu_add(tp_backend *be, int64_t n, const float *x, float *y)
{
    pointwise_job job = {n, x, y};
    share_run(be, n, add_work, &job);
}

static void
copy_work(void *argument, int member, int members)
{
    const pointwise_job *job = argument;
    int64_t first, last;
    tp_team_share(job->n, VEC_LANES, member, members, &first, &last);
    if (first < last)
        memcpy(job->y + first, job->x + first, (size_t)(last - first) * sizeof(float));
}

static void
cpu_copy(tp_backend *be, int64_t n, const float *x, float *y)
{
    pointwise_job job = {n, x, y};
    share_run(be, n, copy_work, &job);
}

static void
zero_work(void *argument, int member, int members)
{
    const pointwise_job *job = argument;
    int64_t first, last;
    tp_team_share(job->n, VEC_LANES, member, members, &first, &last);
    if (first < last)
        memset(job->y + first, 0, (size_t)(last - first) * sizeof(float));
}

static void
cpu_zero(tp_backend *be, int64_t n, float *y)
{
    pointwise_job job = {n, NULL, y};
    share_run(be, n, zero_work, &job);
}
