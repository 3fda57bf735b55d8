/* Stages within a limit of memory, by the engine's own count of its bytes: a stage takes no less with a block more at either end, so
 * that stages filled one after another, each as far as it may go, reach the end if any do. */
#include "csrc/engine/internal.h"

#include <math.h>
#include <stdlib.h>

#include "csrc/base/deadline.h"

typedef struct {
    tp_engine_config config; /* its partition is `boundary` */
    int32_t *boundary;       /* [stages + 1] */
    int32_t *cap;            /* [stages + 1] beyond that no end of the stage before leads anywhere */
    int32_t *reach;          /* [stages][blocks] the last end of a stage from there that is within the limit; 0: not known yet */
    int32_t *varies;         /* [stages] its rank keeps guests, and takes more or less with the stages before */
    double *until;           /* [blocks + 1] running sums of seconds */
    int64_t limit;
    int blocks, stages;
} cutter;

/* Nothing does once the thread is told to stop: then no search goes on. */
static int
fits(cutter *x, int stage, int from, int to)
{
    if (tp_deadline_told())
        return 0;
    x->boundary[stage] = from;
    x->boundary[stage + 1] = to;
    x->config.rank = x->config.program->rank_of[stage];
    return tp_engine_bytes_alike(&x->config, stage) <= (size_t)x->limit;
}

/* At most what leaves a block for each later stage; `from` itself where one block is too much. */
static int
reach_of(cutter *x, int stage, int from)
{
    int32_t *known = &x->reach[(size_t)stage * (size_t)x->blocks + (size_t)from];
    if (*known > 0 && !x->varies[stage])
        return *known - 1;
    int low = from, high = x->blocks - (x->stages - 1 - stage);
    while (low < high) {
        int middle = low + (high - low + 1) / 2;
        if (fits(x, stage, from, middle))
            low = middle;
        else
            high = middle - 1;
    }
    *known = low + 1;
    return low;
}

/* The last end of a stage from there that is no longer than `most`. */
static int
end_of(cutter *x, int stage, int from, double most)
{
    int low = from, high = reach_of(x, stage, from);
    while (low < high) {
        int middle = low + (high - low + 1) / 2;
        if (x->until[middle] - x->until[from] <= most)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Every stage as long as may be, none longer than `most`; the seconds of the longest, or -1 where that does not reach the end. Where
 * the block that follows is too much for the next stage even alone, it may be none for a later one, which holds fewer micro-batches:
 * the stage before leaves its last block to come between. */
static double
fill(cutter *x, double most)
{
    int k = 0;
    double longest = 0.0;
    x->boundary[0] = 0;
    for (int stage = 1; stage <= x->stages; stage++)
        x->cap[stage] = x->blocks - (x->stages - stage);
    while (k < x->stages) {
        int end = end_of(x, k, x->boundary[k], most);
        end = end < x->cap[k + 1] ? end : x->cap[k + 1];
        if (end > x->boundary[k]) {
            x->boundary[++k] = end;
        } else {
            if (k == 0)
                return -1.0;
            x->cap[k] = x->boundary[k] - 1;
            k--;
        }
    }
    for (k = 0; k < x->stages; k++)
        longest = fmax(longest, x->until[x->boundary[k + 1]] - x->until[x->boundary[k]]);
    return x->boundary[x->stages] == x->blocks ? longest : -1.0;
}

static tp_status
sum_up(cutter *x, const double *seconds)
{
    for (int i = 0; i < x->blocks; i++) {
        x->until[i + 1] = x->until[i] + seconds[i];
        if (!(seconds[i] >= 0.0 && x->until[i + 1] <= 0x1p53))
            return tp_fail(TP_EVALUE, "seconds[%d] is %g: from 0 on, and at most 2^53 together, would be right", i, seconds[i]);
    }
    return TP_OK;
}

static int
cut_evenly(cutter *x)
{
    double low = -1.0, high = fill(x, INFINITY);
    if (high < 0.0)
        return 0;
    int found = 1; /* since the last question just below it: few lengths are possible, and the least is mostly found early */
    while (high - low > 1.0) {
        double middle = found ? high - 1.0 : floor(low + (high - low) / 2.0), longest = fill(x, middle);
        *(longest >= 0.0 ? &high : &low) = longest >= 0.0 ? longest : middle;
        found = !found && longest >= 0.0;
    }
    return fill(x, high) >= 0.0;
}

tp_status
tp_engine_cut(const tp_engine_config *config, int64_t limit, const double *seconds, int32_t *boundary, int *found)
{
    cutter x = {.config = *config, .boundary = boundary, .limit = limit};
    x.blocks = tp_model_blocks(&config->model);
    x.stages = tp_program_copy_stages(config->program);
    x.config.partition = boundary;
    TP_TRY(tp_engine_check_shape(config));
    if (x.stages > x.blocks)
        return tp_fail(TP_EVALUE, "%d stages for %d blocks: a block for each would be right", x.stages, x.blocks);
    x.reach = calloc((size_t)x.stages * (size_t)x.blocks, sizeof *x.reach);
    x.until = calloc((size_t)x.blocks + 1, sizeof *x.until);
    x.cap = calloc(2 * (size_t)x.stages + 1, sizeof *x.cap);
    if (x.reach == NULL || x.until == NULL || x.cap == NULL) {
        free(x.reach);
        free(x.until);
        free(x.cap);
        return tp_fail(TP_EMEMORY, "no memory to cut %d blocks into %d stages", x.blocks, x.stages);
    }
    x.varies = x.cap + x.stages + 1;
    tp_engine_counts counts = {0};
    tp_status status = tp_engine_count(config->program, &counts);
    x.config.counts = &counts;
    for (int stage = 0; status == TP_OK && stage < x.stages; stage++)
        x.varies[stage] = counts.guests[config->program->rank_of[stage]];
    if (status == TP_OK)
        status = sum_up(&x, seconds);
    if (status == TP_OK) {
        *found = cut_evenly(&x);
        status = tp_deadline_check_told();
    }
    tp_engine_counts_close(&counts);
    free(x.reach);
    free(x.until);
    free(x.cap);
    return status;
}
