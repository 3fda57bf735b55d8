/* What the baselines on a chain of blocks share. Internal to the plan room. */
#ifndef TP_PLAN_BASELINE_CHAIN_H
#define TP_PLAN_BASELINE_CHAIN_H

#include "csrc/plan/arena.h"
#include "csrc/plan/baselines.h"

/* Sums over blocks before i: [blocks + 1] each. */
typedef struct {
    const tp_chain *chain;
    double *forward, *backward, *fixed, *params;
    double *kept; /* huge blocks left out */
    int *huge;    /* those whose activation no stage can keep: in one sum with them the others' bytes would be none */
} tp_chain_sums;

/* Activation bytes of blocks [first, end), of one micro-batch. */
double
tp_chain_kept(const tp_chain_sums *sums, int first, int end);
TP_MUST_USE tp_status
tp_chain_sums_open(const tp_chain *chain, tp_arena *arena, tp_chain_sums *sums);
/* Room for a plan of up to `stages` stages. */
TP_MUST_USE tp_status
tp_chain_plan_open(const tp_chain *chain, int stages, tp_chain_plan *plan);

/* Of seconds: by more than the rounding of sums. What is closer is a tie, which the first takes: so plans do not depend on the
 * unit of time, since ties of whole seconds are none to the last bit in thousandths. */
static inline int
tp_chain_is_less(double a, double b)
{
    return a < b * (1.0 - 1e-12);
}

/* Micro-batches that stage k of `stages`, none of them replicated, holds at once. */
int
tp_chain_copies(const tp_chain *chain, int stages, int k);
/* Bytes of blocks [first, end) with `copies` micro-batches in flight, of which each keeps 1 / share; recompute: keeping none. */
double
tp_chain_bytes(const tp_chain_sums *sums, int first, int end, double copies, int recompute);
/* The same where some of action [blocks] keep nothing: what a plan's peak is, to the last bit. */
double
tp_chain_bytes_kept(const tp_chain_sums *sums, int first, int end, double copies, const uint8_t *action);
double
tp_chain_transient(const tp_chain *chain, int first, int end);

/* The least over partitions into `stages` of the largest weight, where weight(context, stage, first, end) does not fall when
 * the stage grows by a block: bisection to the last 1e-12 over "is there a partition whose weights are all at most tau?". Longest
 * prefixes that say yes have shown one. Their no is final if `rising`, where the weight of the same blocks does not fall from
 * one stage to the next; else all ends that can be reached are followed. boundary[stages + 1] and *largest are set. */
typedef double (*tp_chain_weight)(const void *context, int stage, int first, int end);
TP_MUST_USE tp_status
tp_chain_least_largest(int blocks, int stages, tp_chain_weight weight, int rising, const void *context, int *boundary,
                       double *largest);

/* EINFEASIBLE for a plan that is fixed: the first stage that does not fit. */
TP_MUST_USE tp_status
tp_chain_must_fit(const tp_chain_sums *sums, const tp_chain_plan *plan);
/* EINFEASIBLE: no plan of `stages` stages; what limit would do. */
tp_status
tp_chain_infeasible(const tp_chain_sums *sums, int stages, int recompute, int replicas);

/* Boundaries, replicas and actions are there: set times, bytes, step time and bound. devices: of the whole plan. */
TP_MUST_USE tp_status
tp_chain_judge(const tp_chain_sums *sums, int devices, tp_replicas sharing, tp_chain_plan *plan);

/* A planner's frame: check, open, plan, close, time. */
typedef tp_status (*tp_chain_planner)(const tp_chain_sums *sums, tp_arena *arena, int stages, const void *options,
                                      tp_chain_plan *plan);
TP_MUST_USE tp_status
tp_chain_run(const tp_chain *chain, int stages, int devices, tp_replicas sharing, tp_chain_planner planner, const void *options,
             tp_chain_plan *out);

#endif
