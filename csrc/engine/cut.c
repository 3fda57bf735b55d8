/* Stages within a limit of memory, by the engine's own count of its bytes: a stage takes no less with a block more at either end, so
 * that stages filled one after another, each as far as it may go, reach the end if any do. */
#include "csrc/engine/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

#define GRAIN 64.0 /* bytes: what the engine takes is a multiple */

typedef struct {
    tp_engine_config config; /* its partition is `boundary` */
    int32_t *boundary;       /* [stages + 1] */
    int32_t *cap;            /* [stages + 1] beyond that no end of the stage before leads anywhere */
    int32_t *reach;          /* [stages][blocks] the last end of a stage from there that is within the limit; 0: not known yet */
    int32_t *varies;         /* [stages] its rank keeps guests, and takes more or less with the stages before */
    double *until;           /* [blocks + 1] running sums of seconds */
    int64_t *sizes;          /* [stages][SHAPES][blocks + 1] bytes of a rank by its stage's shape and blocks; 0: not known yet. NULL:
                                what is remade or swapped differs between layers */
    int64_t limit;
    int blocks, stages;
} cutter;

/* Layers are alike: what a stage takes depends on how many blocks it has, on the kind of the first, and on whether it has an end. */
enum { SHAPES = 6 };
static int64_t *
size_of(cutter *x, int stage, int from, int to)
{
    int shape = (from == 0 ? 0 : 2 + 2 * (from & 1)) + (to == x->blocks);
    return &x->sizes[((size_t)stage * SHAPES + (size_t)shape) * ((size_t)x->blocks + 1) + (size_t)(to - from)];
}

/* Nothing does once the thread is told to stop: then no search goes on. */
static int
fits(cutter *x, int stage, int from, int to)
{
    int64_t *known = x->sizes == NULL || x->varies[stage] ? NULL : size_of(x, stage, from, to);
    if (tp_deadline_told())
        return 0;
    if (known != NULL && *known > 0)
        return *known <= x->limit;
    x->boundary[stage] = from;
    x->boundary[stage + 1] = to;
    x->config.rank = x->config.program->rank_of[stage];
    int64_t bytes = (int64_t)tp_engine_bytes_alike(&x->config, stage);
    if (known != NULL)
        *known = bytes;
    return bytes <= x->limit;
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

/* Does what is remade or swapped depend on the kind of a block alone? */
static int
layers_are_alike(const tp_engine_config *config)
{
    for (int i = 3; config->saves != NULL && i < tp_model_blocks(&config->model) - 1; i++)
        if (config->saves[i] != config->saves[i - 2])
            return 0;
    return 1;
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

static tp_status
tables_open(cutter *x)
{
    size_t stages = (size_t)x->stages, blocks = (size_t)x->blocks;
    x->reach = calloc(stages * blocks, sizeof *x->reach);
    x->until = calloc(blocks + 1, sizeof *x->until);
    x->cap = calloc(2 * stages + 1, sizeof *x->cap);
    int alike = layers_are_alike(&x->config);
    if (alike)
        x->sizes = calloc(stages * SHAPES * (blocks + 1), sizeof *x->sizes);
    if (x->reach == NULL || x->until == NULL || x->cap == NULL || (alike && x->sizes == NULL))
        return tp_fail(TP_EMEMORY, "no memory to cut %d blocks into %d stages", x->blocks, x->stages);
    x->varies = x->cap + x->stages + 1;
    return TP_OK;
}

static void
cutter_close(cutter *x, tp_engine_counts *counts)
{
    tp_engine_counts_close(counts);
    free(x->sizes);
    free(x->reach);
    free(x->until);
    free(x->cap);
}

/* cutter_close ends what there is of it by then, whatever this gives. */
static tp_status
cutter_start(cutter *x, const tp_engine_config *config, int32_t *boundary, tp_engine_counts *counts)
{
    *counts = (tp_engine_counts){0};
    *x = (cutter){.config = *config, .boundary = boundary};
    x->blocks = tp_model_blocks(&config->model);
    x->stages = tp_program_copy_stages(config->program);
    x->config.partition = boundary;
    x->config.counts = counts;
    TP_TRY(tp_engine_check_shape(config));
    if (x->stages > x->blocks)
        return tp_fail(TP_EVALUE, "%d stages for %d blocks: a block for each would be right", x->stages, x->blocks);
    TP_TRY(tables_open(x));
    TP_TRY(tp_engine_count(config->program, counts));
    for (int stage = 0; stage < x->stages; stage++)
        x->varies[stage] = counts->guests[config->program->rank_of[stage]];
    return TP_OK;
}

tp_status
tp_engine_cut(const tp_engine_config *config, int64_t limit, const double *seconds, int32_t *boundary, int *found)
{
    cutter x;
    tp_engine_counts counts;
    tp_status status = cutter_start(&x, config, boundary, &counts);
    x.limit = limit;
    if (status == TP_OK)
        status = sum_up(&x, seconds);
    if (status == TP_OK) {
        *found = cut_evenly(&x);
        status = tp_deadline_check_told();
    }
    cutter_close(&x, &counts);
    return status;
}

tp_status
tp_engine_cut_least(const tp_engine_config *config, int64_t low, int64_t high, double close, int32_t *boundary, int *found)
{
    cutter x;
    tp_engine_counts counts;
    if (low < 0 || high < low || !(close >= 0.0))
        return tp_fail(TP_EVALUE, "limits from %lld to %lld bytes, to %g of them: 0 <= low <= high and 0 <= close would be right",
                       (long long)low, (long long)high, close);
    tp_status status = cutter_start(&x, config, boundary, &counts);
    size_t bytes = ((size_t)x.stages + 1) * sizeof *boundary;
    int32_t *best = status == TP_OK ? malloc(bytes) : NULL;
    if (status == TP_OK && best == NULL)
        status = tp_fail(TP_EMEMORY, "no memory for the boundaries of %d stages", x.stages);
    *found = 0;
    while (status == TP_OK && (double)(high - low) > fmax(GRAIN, close * (double)high)) {
        x.limit = low + (high - low) / 2;
        memset(x.reach, 0, (size_t)x.stages * (size_t)x.blocks * sizeof *x.reach);
        if (fill(&x, INFINITY) >= 0.0) {
            memcpy(best, boundary, bytes);
            *found = 1;
            high = x.limit;
        } else {
            low = x.limit;
        }
        status = tp_deadline_check_told();
    }
    if (*found)
        memcpy(boundary, best, bytes);
    free(best);
    cutter_close(&x, &counts);
    return status;
}
