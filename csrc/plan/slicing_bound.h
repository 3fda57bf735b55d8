/* A lower bound on a step's time over every slicing and every order: shortest paths over cuts. */
#ifndef TP_PLAN_SLICING_BOUND_H
#define TP_PLAN_SLICING_BOUND_H

#include "csrc/plan/plan.h"

/* One rank and micro-batches of one size, by slices of i units after j: what the rank computes in all (F, I and W) and
 * without what may be put off (F and I). */
typedef struct {
    tp_slice_cost all, core;
    double all_s, core_s;      /* more, once a micro-batch, however it is cut: also messages' copies */
    const double *head, *tail; /* [units + 1], by the first slice: its way to the rank; its way home from it, to its last W */
} tp_slicing_rank;

typedef struct {
    int count;                   /* micro-batches of this size, >= 1 */
    const tp_slicing_rank *rank; /* [ranks] */
} tp_slicing_micro;

/* A proven lower bound on a step over every slicing of every micro-batch and every order on the given ranks:
 * a rank starts with the first slice of some micro-batch (head), and does all its work; or all its F and I, of which the last
 * one is I of the first slice of some micro-batch, whose gradient goes home (tail); then the update. Each is the shortest path
 * over the cuts (for the micro-batch with the head, with it), the sum over micro-batches, the largest over ranks, less the
 * rounding of sums. One dynamic programme of O(units^2) a rank, a size, and each of both. Costs may be
 * negative (lines below convex costs). EVALUE if the bound is not finite; EMEMORY. */
TP_MUST_USE tp_status
tp_slicing_bound(int ranks, int sizes, const tp_slicing_micro *micro, double update_s, double *bound_s);

#endif
