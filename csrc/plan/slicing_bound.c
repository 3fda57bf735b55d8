/* Shortest paths over cuts, and the lower bound on a step that follows from them. */
#include "csrc/plan/slicing_bound.h"

#include <math.h>
#include <stdlib.h>

#include "csrc/base/deadline.h"
#include "csrc/plan/slice_dp.h"

enum { LANES = 8 };

/* min over length of g[length] + slope length + rest[length]; the lanes have no order, so that the compiler may use them. */
static double
least_of_row(const double *g, double slope, const double *rest, int most)
{
    double best[LANES], least = INFINITY;
    int length = 1;
    for (int i = 0; i < LANES; i++)
        best[i] = INFINITY;
    for (; length + LANES <= most + 1; length += LANES)
        for (int i = 0; i < LANES; i++) {
            double s = g[length + i] + slope * (length + i) + rest[length + i];
            best[i] = s < best[i] ? s : best[i];
        }
    for (; length <= most; length++) {
        double s = g[length] + slope * length + rest[length];
        least = s < least ? s : least;
    }
    for (int i = 0; i < LANES; i++)
        least = best[i] < least ? best[i] : least;
    return least;
}

/* The slices that start at 0, with `first` of the first one (NULL: nothing more). */
static double
from_start(const tp_slice_cost *cost, const double *first, const double *rest)
{
    double best = INFINITY;
    for (int length = 1; length <= cost->units; length++) {
        double s = tp_slice_cost_at(cost, 0, length) + rest[length] + (first != NULL ? first[length] : 0.0);
        best = s < best ? s : best;
    }
    return best;
}

/* rest[start], 1 <= start <= units: the least that slices from there to the end cost. */
static void
fill_rest(const tp_slice_cost *cost, double *rest, int64_t *steps)
{
    int n = cost->units;
    rest[n] = 0.0;
    for (int start = n - 1; start >= 1 && !tp_deadline_told_after(steps, n - start); start--) {
        if (cost->table == NULL) {
            rest[start] = least_of_row(cost->g1, cost->a3 * start, rest + start, n - start) + cost->a2 * start;
            continue;
        }
        double best = INFINITY;
        for (int length = 1; length <= n - start; length++) {
            double s = tp_slice_cost_at(cost, start, length) + rest[start + length];
            best = s < best ? s : best;
        }
        rest[start] = best;
    }
}

/* ---- a step ------------------------------------------------------------------------------------------------------------- */

/* Of all micro-batches on one rank: the sum of their shortest paths, and how much longer one of them is at least that has the
 * head, the tail, or both (a path is no shorter for having them). */
typedef struct {
    double sum, head, tail, both;
} rank_paths;

static void
add_size(const tp_slice_cost *cost, double fixed_s, const tp_slicing_rank *r, int count, double *rest, double *both,
         int64_t *steps, rank_paths *out)
{
    int n = cost->units;
    fill_rest(cost, rest, steps);
    for (int i = 1; i <= n; i++)
        both[i] = r->head[i] + r->tail[i];
    double plain = from_start(cost, NULL, rest), head = from_start(cost, r->head, rest) - plain;
    double tail = from_start(cost, r->tail, rest) - plain, two = from_start(cost, both, rest) - plain;
    out->sum += count * (plain + fixed_s);
    out->head = head < out->head ? head : out->head;
    out->tail = tail < out->tail ? tail : out->tail;
    out->both = two < out->both ? two : out->both;
}

static double
bound_rank(int rank, int sizes, const tp_slicing_micro *micro, double *scratch, int64_t *steps)
{
    rank_paths all = {0.0, INFINITY, INFINITY, INFINITY}, core = all;
    int64_t micros = 0;
    for (int q = 0; q < sizes && !tp_deadline_was_told(); q++) {
        const tp_slicing_rank *r = &micro[q].rank[rank];
        double *both = scratch + r->all.units + 1;
        add_size(&r->all, r->all_s, r, micro[q].count, scratch, both, steps, &all);
        add_size(&r->core, r->core_s, r, micro[q].count, scratch, both, steps, &core);
        micros += micro[q].count;
    }
    /* The micro-batch that comes first and the one that ends last may be two. */
    double ends = micros > 1 && core.head + core.tail < core.both ? core.head + core.tail : core.both;
    double work = all.sum + all.head, way = core.sum + ends;
    return work > way ? work : way;
}

tp_status
tp_slicing_bound(int ranks, int sizes, const tp_slicing_micro *micro, double update_s, double *bound_s)
{
    double most = 0.0, micros = 0.0;
    int64_t steps = 0;
    int units = micro[0].rank[0].all.units;
    for (int q = 0; q < sizes; q++)
        micros += micro[q].count;
    double *scratch = malloc(((size_t)units + 1) * 2 * sizeof *scratch);
    if (scratch == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the cuts of %d units", units);
    for (int r = 0; r < ranks && !tp_deadline_was_told(); r++) {
        double s = bound_rank(r, sizes, micro, scratch, &steps);
        most = s > most ? s : most;
    }
    free(scratch);
    TP_TRY(tp_deadline_check_told());
    if (!isfinite(most + update_s))
        return tp_fail(TP_EVALUE, "the bound is %g: finite slice costs are needed", most + update_s);
    *bound_s = (most + update_s) * (1.0 - 1e-12 - 0x1p-50 * (units + micros));
    return TP_OK;
}
