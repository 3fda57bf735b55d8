/* Judging many plans that differ in their stage and slice boundaries alone: what a local search asks most. */
#ifndef TP_PLAN_JUDGE_H
#define TP_PLAN_JUDGE_H

#include <stdint.h>

#include "csrc/base/status.h"
#include "csrc/cost/cost.h"
#include "csrc/sched/sched.h"

typedef struct {
    const tp_cost *cost;
    double latency_s, byte_s; /* a message on its link: latency_s + bytes byte_s */
    double copy_byte_s;       /* of a message's byte, of the time of either end */
    double row_bytes;         /* of a token in a message */
    double exchange_s;        /* AR */
} tp_judge_costs;

/* makespan_s[plans]: of the same program, in its order as it is, under the durations of each plan.
 * batches: [micros] sequences. blocks: [plans][stages][TP_BLOCK_KINDS]; lengths: [plans][units] slice lengths, the
 * program's numbers of slices; update_s: [plans][stages] seconds of OPT. EVALUE, EMEMORY, ESCHEDULE as their parts. */
TP_MUST_USE tp_status
tp_plan_glance(const tp_program *program, const tp_judge_costs *costs, const int32_t *batches, int32_t plans,
               const int32_t *blocks, const int32_t *lengths, const double *update_s, double *makespan_s);

#endif
