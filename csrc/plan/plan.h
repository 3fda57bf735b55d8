/* The planners: costs in, plan out, nothing else read or written. See PLANNERS.md for the mathematics.
 * Times are seconds in double. "Optimal" means: proven to be within the rounding of double sums (about 1e-12 of the
 * latency) of the least latency over every plan there is; no step of the search is heuristic. */
#ifndef TP_PLAN_PLAN_H
#define TP_PLAN_PLAN_H

#include <stdint.h>

#include "csrc/base/status.h"

/* ---- token slices (TeraPipe, Li et al., ICML 2021; PLANNERS.md section 1) ---------------------------------------- */

/* The cost of a slice of i units after j units of context, 1 <= i <= units - j. One of two forms:
 *   table != NULL: table[i * (units + 1) + j]; only that triangle is read;
 *   table == NULL: g0[i] if j == 0, else g1[i] + a2 j + a3 i j. Index 0 of g0, g1 is never read.
 * Costs are finite and not negative; neither monotone nor convex in anything. */
typedef struct {
    int units;
    const double *table;   /* [units + 1][units + 1] */
    const double *g0, *g1; /* [units + 1] */
    double a2, a3;
    const double *least;   /* of a table: NULL, or [units + 1] the least cost of each length, so that planners need not look */
} tp_slice_cost;

typedef enum { TP_SLICE_ISA_AUTO, TP_SLICE_ISA_PORTABLE, TP_SLICE_ISA_AVX2, TP_SLICE_ISA_AVX512 } tp_slice_isa;

/* What a slice of i units after j holds while it runs, on every stage: row i + pair i (i + j) + context (i + j) bytes, all
 * coefficients finite and not negative, per sequence. limit_bytes 0: no limit. */
typedef struct {
    double limit_bytes, row_bytes, pair_bytes, context_bytes;
} tp_slice_memory;

typedef struct {
    int stages;          /* K >= 1 equal stages */
    int longest;         /* no slice of more units (a memory limit); 0: none */
    int widest;          /* tp_plan_slices: no group of more sequences; 0: none */
    double time_limit_s; /* stop there with what is known; 0: none */
    double gap;          /* stop when (latency - bound) / bound is proven to be at most this; 0: only at the optimum */
    tp_slice_memory memory;
    /* Of one sequence or [group sizes]: seconds that a slice's message is on its link, which works beside the stages; NULL:
     * none. The latency is then total + (K - 1) max of cost + message, which is the makespan if no message takes longer than
     * its slice and a lower bound of it otherwise (PLANNERS.md 1.7). Same form as the costs. */
    const tp_slice_cost *message;
    int queue;           /* Monge costs (slice_monge.c): 0 from 16384 units on, 1 always, -1 never; for tests */
    tp_slice_isa isa;    /* TP_SLICE_ISA_AUTO but in tests; one that the machine lacks is EVALUE */
} tp_slice_options;

/* `batch` sequences that go through the pipeline together, cut into length[first .. first + slices). */
typedef struct {
    int batch, first, slices;
} tp_slice_group;

typedef struct {
    double total_s;       /* sum of the slice costs, of every group */
    double max_s;         /* the largest slice cost; with a backward table: of forward + the largest of backward */
    double latency_s;     /* total_s + (K - 1) max_s */
    double lower_bound_s; /* no plan is faster */
    int optimal;
    int groups, slices;
    tp_slice_group *group; /* [groups] */
    int *length;           /* [slices], units */
    int64_t searches;      /* dynamic programmes over all slices */
    int64_t small_searches; /* over the few edges that a better plan could use */
    int64_t edges;          /* largest such set of edges */
    int64_t boxes;          /* tp_plan_slices_apart: boxes examined */
    double seconds;
} tp_slice_plan;

/* EVALUE naming the cell (as name[i, j], or name.G1[i]) that is NaN, infinite or negative. */
TP_MUST_USE tp_status
tp_slice_cost_check(const tp_slice_cost *cost, const char *name);
/* The same, in one pass with least[units + 1] of a table, which becomes cost->least. */
TP_MUST_USE tp_status
tp_slice_cost_check_least(tp_slice_cost *cost, const char *name, double *least);

/* EINFEASIBLE where the memory of options holds no plan at all; EVALUE for bad coefficients. */
TP_MUST_USE tp_status
tp_slice_memory_check(const tp_slice_memory *memory, int units);

/* The plan of least sum + (K - 1) max for `batch` sequences through ONE pipeline that is not flushed in between:
 * cost[b - 1] is the cost of slices of b sequences at once, b = 1 .. min(batch, widest). batch 1: plain token slices.
 * The costs must have passed tp_slice_cost_check. End *out with tp_slice_plan_free. EVALUE, EMEMORY. */
TP_MUST_USE tp_status
tp_plan_slices(const tp_slice_cost *cost, int batch, const tp_slice_options *options, tp_slice_plan *out);
/* Where no more than `flush` sequences may be in the pipeline: flushes of up to that many, each planned as above; their
 * latencies add up, and the split of the batch into flushes is the best (PLANNERS.md 1.5). `flush_of` [batch]: sequences of
 * each flush, in the order of out->group; *flushes of them. cost[b - 1] for b = 1 .. min(flush, batch, widest). With a time limit
 * two sizes are planned in any case, which make up the batch; those that no time is left for are only bounded. */
TP_MUST_USE tp_status
tp_plan_slices_flushed(const tp_slice_cost *cost, int batch, int flush, const tp_slice_options *options,
                       tp_slice_plan *out, int *flush_of, int *flushes);
/* Forward and backward apart: least sum (f + b) + (K - 1) (max f + max b). Same rules. */
TP_MUST_USE tp_status
tp_plan_slices_apart(const tp_slice_cost *forward, const tp_slice_cost *backward, const tp_slice_options *options,
                     tp_slice_plan *out);
void
tp_slice_plan_free(tp_slice_plan *plan);

/* The least sum of slices of at most threshold_s each (algorithm 1's inner programme), +inf if there is none, and its
 * slices: length[units], *slices of them. *queued: whether the queue of Monge costs was used. */
TP_MUST_USE tp_status
tp_slice_least(const tp_slice_cost *cost, const tp_slice_options *options, double threshold_s, double *least_s, int *length,
               int *slices, int *queued);

/* A proven lower bound on the least latency, in one dynamic programme (position-weighted Lagrangian, PLANNERS.md 1.3),
 * from any slicing length[slices] of all units: the better the slicing, the tighter the bound. For instances too large
 * to solve. Never above the latency of the slicing given. options->time_limit_s ends what takes more than half a second: the bound
 * is then a looser one. */
TP_MUST_USE tp_status
tp_slice_bound(const tp_slice_cost *cost, const tp_slice_options *options, const int *length, int slices,
               double *bound_s);

/* ---- contiguous partition ---------------------------------------------------------------------------------------- */

/* boundary[0 .. parts], 0 first and n last, so that the largest part sum is least; no part is empty. time_s[n] finite,
 * not negative. EVALUE if parts < 1 or parts > n. */
TP_MUST_USE tp_status
tp_plan_balance(const double *time_s, int n, int parts, int *boundary);

#endif
