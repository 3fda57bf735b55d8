/* A local search for a partition within a limit of memory where ranks have several stages (chunks, two copies of the model,
 * guests): a rank takes the sum of these, so that no stage can be filled by itself. From a given partition blocks move from one
 * stage to any other, the boundaries between them shifting, as long as that helps. It may miss a partition; pairs.c and exact.c do
 * not. Where time is up it ends with what it has. */
#include "csrc/engine/internal.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

#define FURTHEST 2 /* blocks at once: a layer, which leaves the kinds of all blocks between where they were */

typedef struct {
    tp_engine_sizes *sizes;
    const double *until; /* [blocks + 1] running sums of seconds */
    int64_t *bytes;      /* [ranks] before a move that is looked at */
    int64_t *best;       /* [ranks] sorted, most first: what is to be less */
    int64_t *sorted;     /* [ranks] */
    double *seconds;     /* [ranks] */
    int32_t *boundary;   /* [parts + 1] */
    int stages, parts, ranks;
} shifter;

typedef struct {
    int from, to, blocks; /* parts, and how many blocks go */
} move;

/* Take the last m.blocks of part m.from to a later part, or its first ones to an earlier part: all boundaries between move. */
static void
shift(shifter *x, move m)
{
    for (int k = m.from + 1; k <= m.to; k++)
        x->boundary[k] -= m.blocks;
    for (int k = m.to + 1; k <= m.from; k++)
        x->boundary[k] += m.blocks;
}

static void
shift_back(shifter *x, move m)
{
    shift(x, (move){m.to, m.from, m.blocks});
}

static int
rank_of(const shifter *x, int stage)
{
    return x->sizes->config.program->rank_of[stage];
}

static int
by_most(const void *a, const void *b)
{
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
    return (left < right) - (left > right);
}

/* x->best: of all ranks, with the boundaries as they are. */
static void
start_best(shifter *x)
{
    tp_engine_sizes_count(x->sizes, x->boundary, x->best);
    qsort(x->best, (size_t)x->ranks, sizeof *x->best, by_most);
}

static int
has_more(const shifter *x, int part, int blocks)
{
    return x->boundary[part + 1] - x->boundary[part] > blocks;
}

static int
holds(const shifter *x, int rank, int part)
{
    for (int stage = part; stage < x->stages; stage += x->parts)
        if (rank_of(x, stage) == rank || x->sizes->host[stage] == rank)
            return 1;
    return 0;
}

/* Does a move change what the rank holds? */
static int
touches(const shifter *x, move m, int rank)
{
    int first = m.from < m.to ? m.from : m.to, last = m.from + m.to - first;
    for (int32_t i = x->sizes->first_held[rank]; i < x->sizes->first_held[rank + 1]; i++) {
        int part = x->sizes->held[i] % x->parts;
        if (part >= first && part <= last)
            return 1;
    }
    return 0;
}

static int64_t
bytes_of(const shifter *x, int rank)
{
    return tp_engine_sizes_of_rank(x->sizes, x->boundary, rank);
}

/* After a move, made by now, are those within `limit` who have the part that blocks went to? Mostly they are too full, if anyone. */
static int
is_taken_within(const shifter *x, move m, int64_t limit)
{
    for (int stage = m.to; stage < x->stages; stage += x->parts)
        if (bytes_of(x, rank_of(x, stage)) > limit)
            return 0;
    return 1;
}

/* Are all ranks' bytes after a move, made by now, less than the best, at the first rank of both orders where they differ? Then they
 * are the best. */
static int
is_less(shifter *x, move m)
{
    if (!is_taken_within(x, m, x->best[0]))
        return 0;
    for (int r = 0; r < x->ranks; r++) {
        x->sorted[r] = touches(x, m, r) ? bytes_of(x, r) : x->bytes[r];
        if (x->sorted[r] > x->best[0])
            return 0;
    }
    qsort(x->sorted, (size_t)x->ranks, sizeof *x->sorted, by_most);
    int r = 0;
    while (r < x->ranks && x->sorted[r] == x->best[r])
        r++;
    if (r == x->ranks || x->sorted[r] > x->best[r])
        return 0;
    memcpy(x->best, x->sorted, (size_t)x->ranks * sizeof *x->best);
    return 1;
}

/* Of a move, made by now, from where all ranks were within the limit. */
static int
is_within(const shifter *x, move m, int64_t limit)
{
    if (!is_taken_within(x, m, limit))
        return 0;
    for (int r = 0; r < x->ranks; r++)
        if (touches(x, m, r) && bytes_of(x, r) > limit)
            return 0;
    return 1;
}

/* Make the move after which the fullest ranks hold least: from a part of `rank`, the fullest, or from_any part if that changes what
 * it holds. 0: none helps. */
static int
relieve(shifter *x, int rank, int from_any)
{
    move best = {0, 0, 0};
    for (int from = 0; from < x->parts && !tp_deadline_late(); from++)
        for (int to = 0; (from_any || holds(x, rank, from)) && to < x->parts; to++)
            for (int blocks = 1; to != from && blocks <= FURTHEST && has_more(x, from, blocks); blocks++) {
                move m = {from, to, blocks};
                if (from_any && !touches(x, m, rank))
                    break;
                shift(x, m);
                if (bytes_of(x, rank) <= x->best[0] && is_less(x, m))
                    best = m;
                shift_back(x, m);
            }
    shift(x, best);
    return best.blocks > 0;
}

static int
fullest(const shifter *x)
{
    int r = 0;
    for (int other = 1; other < x->ranks; other++)
        r = x->bytes[other] > x->bytes[r] ? other : r;
    return r;
}

static double
seconds_of(const shifter *x, int part)
{
    return x->until[x->boundary[part + 1]] - x->until[x->boundary[part]];
}

double
tp_engine_filling(const tp_program *program)
{
    return (program->ranks - 1) / (double)tp_program_units(program);
}

typedef struct {
    double seconds;
    int rank, part; /* which they are */
} height;

static height
height_of(shifter *x)
{
    height h = {0};
    for (int r = 0; r < x->ranks; r++)
        x->seconds[r] = 0.0;
    for (int stage = 0; stage < x->stages; stage++) {
        int part = stage % x->parts, r = rank_of(x, stage);
        x->seconds[r] += seconds_of(x, part);
        h.part = seconds_of(x, part) > seconds_of(x, h.part) ? part : h.part;
        h.rank = x->seconds[r] > x->seconds[h.rank] ? r : h.rank;
    }
    h.seconds = x->seconds[h.rank] + seconds_of(x, h.part) * tp_engine_filling(x->sizes->config.program);
    return h;
}

/* Make the move from the slowest rank or the longest stage, within the limit, after which a step is shortest. 0: none helps. */
static int
shorten(shifter *x, int64_t limit, double *seconds)
{
    move best = {0, 0, 0};
    height before = height_of(x);
    *seconds = before.seconds;
    for (int from = 0; from < x->parts && !tp_deadline_late(); from++)
        for (int to = 0; (from == before.part || holds(x, before.rank, from)) && to < x->parts; to++)
            for (int blocks = 1; to != from && blocks <= FURTHEST && has_more(x, from, blocks); blocks++) {
                move m = {from, to, blocks};
                shift(x, m);
                double after = height_of(x).seconds;
                if (after < *seconds && is_within(x, m, limit)) {
                    *seconds = after;
                    best = m;
                }
                shift_back(x, m);
            }
    shift(x, best);
    return best.blocks > 0;
}

static void
shifter_close(shifter *x)
{
    free(x->bytes);
    free(x->seconds);
}

static tp_status
shifter_open(tp_engine_sizes *sizes, int32_t *boundary, shifter *out)
{
    const tp_program *program = sizes->config.program;
    size_t ranks = (size_t)program->ranks;
    *out = (shifter){.sizes = sizes, .boundary = boundary, .stages = program->stages, .ranks = program->ranks,
                     .parts = tp_program_copy_stages(program)};
    out->bytes = malloc(3 * ranks * sizeof *out->bytes);
    out->seconds = malloc(ranks * sizeof *out->seconds);
    if (out->bytes == NULL || out->seconds == NULL) {
        shifter_close(out);
        return tp_fail(TP_EMEMORY, "no memory for the bytes of %d ranks", program->ranks);
    }
    out->best = out->bytes + ranks;
    out->sorted = out->best + ranks;
    return TP_OK;
}

tp_status
tp_engine_shift_least(tp_engine_sizes *sizes, int64_t enough, int32_t *boundary, int64_t *most)
{
    shifter x;
    TP_TRY(shifter_open(sizes, boundary, &x));
    start_best(&x);
    while (x.best[0] > enough && !tp_deadline_late()) {
        tp_engine_sizes_count(sizes, boundary, x.bytes);
        int rank = fullest(&x);
        if (!relieve(&x, rank, 0) && !relieve(&x, rank, 1))
            break;
    }
    *most = x.best[0];
    shifter_close(&x);
    return tp_deadline_check_told();
}

tp_status
tp_engine_shift_even(tp_engine_sizes *sizes, int64_t limit, const double *until, int32_t *boundary, double *seconds)
{
    shifter x;
    TP_TRY(shifter_open(sizes, boundary, &x));
    x.until = until;
    *seconds = height_of(&x).seconds;
    while (!tp_deadline_late() && shorten(&x, limit, seconds))
        continue;
    shifter_close(&x);
    return tp_deadline_check_told();
}
