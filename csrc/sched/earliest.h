/* Which rank's next op starts first, of equals the lowest rank's: a tournament, in which a new start costs the logarithm of the
 * ranks. */
#ifndef TP_SCHED_EARLIEST_H
#define TP_SCHED_EARLIEST_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "csrc/base/status.h"

typedef struct {
    int32_t ranks;
    double *start;   /* [ranks]; INFINITY: nothing can start yet */
    int32_t *winner; /* [2 * ranks] of the matches 2 i and 2 i + 1 at i, of all at 1; behind `ranks` each rank itself */
} tp_earliest;

/* EMEMORY. To be closed even where it fails. */
TP_MUST_USE static inline tp_status
tp_earliest_open(tp_earliest *e, int ranks)
{
    *e = (tp_earliest){.ranks = ranks, .start = malloc((size_t)ranks * sizeof *e->start),
                       .winner = malloc(2 * (size_t)ranks * sizeof *e->winner)};
    return e->start != NULL && e->winner != NULL ? TP_OK : tp_fail(TP_EMEMORY, "no memory for the next starts of %d ranks", ranks);
}

static inline void
tp_earliest_close(tp_earliest *e)
{
    free(e->start);
    free(e->winner);
}

static inline int32_t
tp_earliest_better(const tp_earliest *e, int32_t a, int32_t b)
{
    return e->start[b] < e->start[a] || (e->start[b] == e->start[a] && b < a) ? b : a;
}

/* Nothing can start on any rank. */
static inline void
tp_earliest_reset(tp_earliest *e)
{
    for (int32_t r = 0; r < e->ranks; r++) {
        e->start[r] = INFINITY;
        e->winner[e->ranks + r] = r;
    }
    for (int32_t i = e->ranks - 1; i > 0; i--)
        e->winner[i] = tp_earliest_better(e, e->winner[2 * i], e->winner[2 * i + 1]);
}

/* can: has the rank an op that can start? */
static inline void
tp_earliest_set(tp_earliest *e, int rank, int can, double start)
{
    e->start[rank] = can ? fmin(start, DBL_MAX) : INFINITY;
    for (int32_t i = (e->ranks + rank) / 2; i > 0; i /= 2)
        e->winner[i] = tp_earliest_better(e, e->winner[2 * i], e->winner[2 * i + 1]);
}

/* The rank; where nothing can start, any. */
static inline int
tp_earliest_first(const tp_earliest *e)
{
    return e->winner[1];
}

#endif
