/* The least that any slicing costs one stage: a shortest path over cuts. Internal to the plan room, and what bounds over
 * all slicings are made of. */
#ifndef TP_PLAN_SLICING_BOUND_H
#define TP_PLAN_SLICING_BOUND_H

#include "csrc/plan/plan.h"

/* A slice costs the weighted sum of cost[0 .. terms), all of as many units; the first of s units first[s] more, the last
 * last[s] more (NULL: nothing), both of them if it is the only one. */
typedef struct {
    tp_slice_cost cost[2];
    double weight[2];
    int terms;
    int longest; /* no slice of more units; 0: none */
    const double *first, *last; /* [units + 1] */
} tp_slice_path;

/* The least over all slicings of all units, O(units^2). Exact but for rounding. EMEMORY. */
TP_MUST_USE tp_status
tp_slice_path_least(const tp_slice_path *path, double *least_s);

#endif
