/* A partition within a limit of memory, by the engine's own count of its bytes. A stage takes no less with one more block at either
 * end: so stages that are filled one after another, each as far as the limit allows, reach the last block if any partition does.
 * Where a rank has several stages they are filled as if all of these were alike, or without the limit; then blocks move from stage
 * to stage (shift.c); and if that finds no partition, pairs.c and exact.c decide whether there is one. */
#include "csrc/engine/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

#define GRAIN 64.0 /* bytes: what the engine takes is a multiple */
#define MOST ((int64_t)1 << 62)
#define TRIES 5     /* of limits below one that was too much work to prove: a 256th below it, and twice as far each time */
#define FIRST_TRY 8

typedef struct {
    tp_engine_config config; /* its partition is `boundary` */
    int32_t *boundary;       /* [stages + 1] */
    int32_t *cap;            /* [stages + 1] beyond that no end of the stage before leads anywhere */
    int32_t *reach;          /* [stages][blocks] the last end of a stage from there that is within the limit; 0: not known yet */
    int32_t *others;         /* [stages] how many its rank has */
    int32_t *hosts;          /* [stages] its rank keeps guests */
    int32_t *best;           /* [stages + 1] boundaries that are kept while others are looked at */
    int32_t *alike;          /* [stages + 1] those of a rank's stages alike */
    double *until;           /* [blocks + 1] running sums of seconds */
    double *number;          /* [blocks + 1] of blocks */
    tp_engine_sizes sizes;
    int64_t limit;
    int blocks, stages, several; /* several: a rank has more than one of them, or guests, and sizes are remembered */
} cutter;

/* Bytes of the stage's rank, as if all its stages were like this one. */
static int64_t
bytes_alike(cutter *x, int stage, int from, int to)
{
    tp_engine_size size = tp_engine_size_of(&x->sizes, stage, from, to);
    int64_t bytes = x->sizes.beside[x->config.program->rank_of[stage]] + x->others[stage] * size.stage + size.workspace;
    for (int other = 0; x->hosts[stage] && other < x->stages; other++)
        if (x->sizes.host[other] == x->config.program->rank_of[stage])
            bytes += tp_engine_size_of(&x->sizes, other, from, to).guests;
    return bytes;
}

/* 0 for everything once the thread is told to stop, which ends every search. */
static int
fits(cutter *x, int stage, int from, int to)
{
    return !tp_deadline_told() && (x->limit == INT64_MAX || bytes_alike(x, stage, from, to) <= x->limit);
}

/* The last end within the limit of a stage that begins at `from`, with a block left for each later stage; `from` itself where even
 * one block is too much. */
static int
reach_of(cutter *x, int stage, int from)
{
    int32_t *known = &x->reach[(size_t)stage * (size_t)x->blocks + (size_t)from];
    if (*known > 0)
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

/* The last end within the limit of a stage that begins at `from` and takes at most `most` seconds. */
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

static double
longest_of(const cutter *x)
{
    double longest = 0.0;
    for (int k = 0; k < x->stages; k++)
        longest = fmax(longest, x->until[x->boundary[k + 1]] - x->until[x->boundary[k]]);
    return longest;
}

/* Fill the stages one after another, each as far as the limit and `most` seconds allow. Gives the seconds of the longest, -1 where
 * they do not reach the last block. A block may be too much for stage k even alone and fit a later stage, which holds fewer
 * micro-batches: then the stage before k gives up its last block to k, so that the other one comes later. */
static double
fill(cutter *x, double most)
{
    int k = 0;
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
    return x->boundary[x->stages] == x->blocks ? longest_of(x) : -1.0;
}

static tp_status
sum_up(cutter *x, const double *seconds)
{
    for (int i = 0; i < x->blocks; i++) {
        x->until[i + 1] = x->until[i] + seconds[i];
        if (!(seconds[i] >= 0.0 && seconds[i] == floor(seconds[i]) && x->until[i + 1] <= 0x1p53)) /* limits are halved down to 1 */
            return tp_fail(TP_EVALUE, "seconds[%d] is %g: whole numbers from 0 on, and at most 2^53 together, would be right", i,
                           seconds[i]);
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
    x->until = calloc(2 * (blocks + 1), sizeof *x->until);
    x->cap = calloc(5 * stages + 3, sizeof *x->cap);
    if (x->reach == NULL || x->until == NULL || x->cap == NULL)
        return tp_fail(TP_EMEMORY, "no memory to cut %d blocks into %d stages", x->blocks, x->stages);
    x->number = x->until + x->blocks + 1;
    for (int i = 0; i <= x->blocks; i++)
        x->number[i] = i;
    x->hosts = x->cap + x->stages + 1;
    x->others = x->hosts + x->stages;
    x->best = x->others + x->stages;
    x->alike = x->best + x->stages + 1;
    return tp_engine_sizes_open(&x->config, &x->sizes);
}

static void
cutter_close(cutter *x, tp_engine_counts *counts)
{
    tp_engine_counts_close(counts);
    tp_engine_sizes_close(&x->sizes);
    free(x->reach);
    free(x->until);
    free(x->cap);
}

static void
look_at_ranks(cutter *x)
{
    const tp_program *program = x->config.program;
    for (int stage = 0; stage < x->stages; stage++) {
        x->hosts[stage] = x->config.counts->guests[program->rank_of[stage]];
        for (int other = 0; other < program->stages; other++)
            x->others[stage] += program->rank_of[other] == program->rank_of[stage];
        x->several |= (x->others[stage] > 1 || x->hosts[stage]) && x->sizes.known != NULL;
    }
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
    TP_TRY(tp_engine_count(config->program, counts));
    TP_TRY(tables_open(x));
    look_at_ranks(x);
    return TP_OK;
}

static void
forget(cutter *x, int64_t limit)
{
    x->limit = limit;
    memset(x->reach, 0, (size_t)x->stages * (size_t)x->blocks * sizeof *x->reach);
}

/* By halves, all stages of a rank alike; *least: their limit, or INT64_MAX, where they are nothing. */
static tp_status
cut_alike(cutter *x, int64_t low, int64_t high, double close, int32_t *stages, int64_t *least)
{
    *least = INT64_MAX;
    while ((double)(high - low) > fmax(GRAIN, close * (double)high)) {
        forget(x, low + (high - low) / 2);
        if (fill(x, INFINITY) >= 0.0) {
            memcpy(stages, x->boundary, ((size_t)x->stages + 1) * sizeof *stages);
            *least = high = x->limit;
        } else {
            low = x->limit;
        }
        TP_TRY(tp_deadline_check_told());
    }
    return TP_OK;
}

static int
cut_evenly_by(cutter *x, double *until)
{
    double *own = x->until;
    x->until = until;
    int found = cut_evenly(x);
    x->until = own;
    return found;
}

/* Stages that blocks leave where they are too many: the most even ones in seconds or blocks, a block each but for the last of them,
 * or the first, and those that would need least if all of a rank were alike. 0: there are none, or the thread is told to stop. */
enum { EVEN, COUNTED, LAST, FIRST, ALIKE, STARTS };
static int
start_from(cutter *x, int start, int64_t limit)
{
    int64_t least = INT64_MAX;
    if (start == ALIKE) {
        if (cut_alike(x, 0, limit < MOST / 4 ? 4 * limit : MOST, 0.0, x->alike, &least) != TP_OK || least == INT64_MAX)
            return 0;
        memcpy(x->boundary, x->alike, ((size_t)x->stages + 1) * sizeof *x->alike);
        return 1;
    }
    forget(x, INT64_MAX);
    if (start == EVEN || start == COUNTED)
        return cut_evenly_by(x, start == EVEN ? x->until : x->number);
    for (int k = 0; k <= x->stages; k++)
        x->boundary[k] = start == LAST ? k : x->blocks - x->stages + k;
    x->boundary[0] = 0;
    x->boundary[x->stages] = x->blocks;
    return 1;
}

/* From x->boundary, where blocks leave it, as even as they make it, if it is within the limit then: one of *ends more. *least: about
 * the seconds of a step of the best. */
static tp_status
shift_within(cutter *x, int64_t limit, double *least, int *ends)
{
    double step_s;
    int64_t most;
    TP_TRY(tp_engine_shift_least(&x->sizes, limit, x->boundary, &most));
    if (most > limit)
        return TP_OK;
    TP_TRY(tp_engine_shift_even(&x->sizes, limit, x->until, x->boundary, &step_s));
    if (step_s < *least)
        memcpy(x->best, x->boundary, ((size_t)x->stages + 1) * sizeof *x->best);
    *least = fmin(*least, step_s);
    ++*ends;
    return TP_OK;
}

/* The most even of what is within the limit: with all stages of a rank alike, and where blocks left even ones; if these find none
 * whatever is, and where blocks left others. */
static tp_status
cut_several(cutter *x, int64_t limit, int *found)
{
    double least = INFINITY;
    int ends = 0;
    tp_answer answer = TP_NO;
    if (cut_evenly(x))
        TP_TRY(shift_within(x, limit, &least, &ends));
    if (start_from(x, EVEN, limit))
        TP_TRY(shift_within(x, limit, &least, &ends));
    if (ends == 0)
        TP_TRY(tp_engine_find_within(&x->sizes, limit, x->boundary, &answer));
    if (answer == TP_YES)
        TP_TRY(shift_within(x, limit, &least, &ends));
    for (int start = COUNTED, before = ends; start < STARTS && ends == before && answer != TP_NO; start++)
        if (start_from(x, start, limit))
            TP_TRY(shift_within(x, limit, &least, &ends));
    *found = ends > 0;
    memcpy(x->boundary, x->best, ((size_t)x->stages + 1) * sizeof *x->best);
    return tp_deadline_check_told();
}

/* Of pairs of stages the best there are, if these are better than where blocks leave even ones. */
static tp_status
cut_pairs(cutter *x, int64_t limit, int *found)
{
    tp_engine_pace pace = {x->until, tp_engine_filling(x->config.program)};
    double least = INFINITY;
    int ends = 0;
    tp_answer answer;
    if (start_from(x, EVEN, limit))
        TP_TRY(shift_within(x, limit, &least, &ends));
    TP_TRY(tp_engine_find_pairs(&x->sizes, limit, &pace, least, x->boundary, &answer));
    *found = answer == TP_YES;
    return *found ? tp_engine_shift_even(&x->sizes, limit, x->until, x->boundary, &least) : tp_deadline_check_told();
}

tp_status
tp_engine_cut(const tp_engine_config *config, int64_t limit, const double *seconds, int by_pairs, int32_t *boundary, int *found)
{
    cutter x;
    tp_engine_counts counts;
    tp_status status = cutter_start(&x, config, boundary, &counts);
    x.limit = limit;
    if (status == TP_OK)
        status = sum_up(&x, seconds);
    if (status == TP_OK && x.several) {
        status = (by_pairs ? cut_pairs : cut_several)(&x, limit, found);
    } else if (status == TP_OK) {
        *found = cut_evenly(&x);
        status = tp_deadline_check_told();
    }
    status = status == TP_OK ? x.sizes.failed : status;
    cutter_close(&x, &counts);
    return status;
}

/* Less than x->best from these boundaries, where blocks leave them. */
static tp_status
shift_to_less(cutter *x, int64_t enough, int64_t *least)
{
    int64_t most;
    TP_TRY(tp_engine_shift_least(&x->sizes, enough, x->boundary, &most));
    if (most < *least)
        memcpy(x->best, x->boundary, ((size_t)x->stages + 1) * sizeof *x->best);
    *least = most < *least ? most : *least;
    return TP_OK;
}

/* Less than x->best, until there is none. TP_UNKNOWN: there may be. Then limits further down are asked for, nearer to what all ranks
 * together need: there less is to be looked at. */
static tp_status
find_less(cutter *x, int64_t enough, int64_t *least, tp_answer *answer)
{
    int64_t below = 1;
    for (int tries = 0; tries < TRIES && *least > enough; tries++) {
        tp_answer found;
        TP_TRY(tp_engine_find_within(&x->sizes, *least - below, x->boundary, &found));
        if (tries == 0 || found == TP_YES)
            *answer = found;
        if (found == TP_NO)
            break;
        if (found == TP_YES)
            TP_TRY(shift_to_less(x, enough, least));
        tries = found == TP_YES ? -1 : tries;
        below = found == TP_YES ? 1 : *least >> (FIRST_TRY - tries);
    }
    return TP_OK;
}

static tp_status
cut_less(cutter *x, int64_t enough, int64_t *least)
{
    tp_answer answer = TP_UNKNOWN;
    if (*least < INT64_MAX) {
        memcpy(x->boundary, x->best, ((size_t)x->stages + 1) * sizeof *x->best);
        *least = INT64_MAX; /* that was a limit for stages alike */
        TP_TRY(shift_to_less(x, enough, least));
        TP_TRY(find_less(x, enough, least, &answer));
    }
    for (int start = COUNTED; start < ALIKE && answer == TP_UNKNOWN && start_from(x, start, 0); start++)
        TP_TRY(shift_to_less(x, enough, least));
    if (answer == TP_UNKNOWN && *least < INT64_MAX)
        TP_TRY(find_less(x, enough, least, &answer));
    return tp_deadline_check_told();
}

tp_status
tp_engine_cut_least(const tp_engine_config *config, int64_t low, int64_t high, double close, int32_t *boundary, int *found)
{
    cutter x;
    tp_engine_counts counts;
    int64_t least = INT64_MAX;
    if (low < 0 || high < low || !(close >= 0.0))
        return tp_fail(TP_EVALUE, "limits from %lld to %lld bytes, to %g of them: 0 <= low <= high and 0 <= close would be right",
                       (long long)low, (long long)high, close);
    tp_status status = cutter_start(&x, config, boundary, &counts);
    if (status == TP_OK)
        status = cut_alike(&x, low, high, close, x.best, &least);
    if (status == TP_OK && x.several)
        status = cut_less(&x, low, &least);
    status = status == TP_OK ? x.sizes.failed : status;
    *found = status == TP_OK && least <= high;
    if (*found)
        memcpy(boundary, x.best, ((size_t)x.stages + 1) * sizeof *boundary);
    cutter_close(&x, &counts);
    return status;
}
