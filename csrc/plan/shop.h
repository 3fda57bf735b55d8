/* Token slices through stages of unequal times (PLANNERS.md 1.8). A slicing is a permutation flow shop: slice m passes machine
 * q = 0, 1, .. in order, C_q(m) = max(C_q(m - 1), C_{q-1}(m)) + c_q(m), and the makespan is C of the last slice on the last
 * machine. Machines are stages, or stages with the links between them. With a second chain, whose makespan is added, the
 * backward pass: its slices run last to first through the stages last to first, which by reversal of time is the same
 * recurrence over the slices in order (PLANNERS.md 1.6). */
#ifndef TP_PLAN_SHOP_H
#define TP_PLAN_SHOP_H

#include "csrc/plan/plan.h"

#define TP_SHOP_EXACT 256 /* units up to which labels prove the optimum, work permitting */

typedef struct {
    int units;
    int chains, machines;      /* 1 or 2 chains; machines of each, 1 .. 4096 */
    int costs;                 /* distinct ones */
    const tp_slice_cost *cost; /* [costs] of `units` each, checked */
    const int *cost_of;        /* [chains * machines] index of the machine's cost */
} tp_shop;

typedef struct {
    int longest;            /* no slice of more units; 0: none */
    tp_slice_memory memory; /* of each slice on every stage */
    int64_t work;           /* effort, in extensions of a label by a slice on one machine: for labels as much, for the bound a
                               third of it at most; 0: 6e9 for labels, ten or twenty seconds, as if 4e8 for the rest. The
                               same effort gives the same plan. */
} tp_shop_options;

typedef struct {
    double latency_s;
    double lower_bound_s; /* no slicing is faster */
    int optimal;          /* proven to be within 1e-12 of the least */
    int slices;
    int *length;          /* [slices] units */
    int64_t labels;       /* made */
    int64_t moves;        /* slicings tried by the local search */
    int64_t bounds;       /* dynamic programmes for the bound */
    double seconds;
} tp_shop_plan;

/* The makespan of `jobs` jobs on `machines` machines in this order; time_s[jobs][machines]; clock_s[machines]: scratch, left
 * with the end of the last job on each machine. 0 for no jobs. */
double
tp_flow_shop(const double *time_s, int64_t jobs, int64_t machines, double *clock_s);

/* The slicing of least makespan (two chains: sum of makespans). Proven optimal up to TP_SHOP_EXACT units if the work suffices:
 * label setting, where a label is the vector of C_q after some tokens, dropped if another of the same tokens is nowhere later,
 * or if a bound says that it cannot lead to less than the best known. Above, descent on the slice boundaries from good starts,
 * each slicing evaluated exactly; the best on each coarser grid that this one refines is among them, found as if asked for.
 * The bound: for random nondecreasing tokens x_0 <= x_1 <= .. at which a path changes machines, with N_q(e) = P(x_q <= e), N
 * before the first machine 1, behind the last 0, the longest path is at least the mean one:
 *     makespan >= sum over slices (j, e] sum_q c_q(j, e) (N_{q-1}(e) - N_q(j)),
 * and the least of the right side over all slicings is one dynamic programme. Equal machines: PLANNERS.md 1.3's
 * position-weighted Lagrangian. The N are mixed from near-critical paths of the slicings found by that very programme.
 * EVALUE, EINFEASIBLE (memory), EMEMORY. End *out with tp_shop_plan_free. */
TP_MUST_USE tp_status
tp_plan_shop(const tp_shop *shop, const tp_shop_options *options, tp_shop_plan *out);
void
tp_shop_plan_free(tp_shop_plan *plan);

#endif
