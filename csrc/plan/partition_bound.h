/* A lower bound on a step's time in one order, over every partition: a linear programme of the order's path inequalities, in which
 * layers may be divided between stages. */
#ifndef TP_PLAN_PARTITION_BOUND_H
#define TP_PLAN_PARTITION_BOUND_H

#include "csrc/cost/cost.h"
#include "csrc/sched/sched.h"

/* Embedding, `layers` attention and FFN blocks each in any numbers on any virtual stage, head; micro-batches of one slice that are
 * alike; W directly behind I. */
typedef struct {
    tp_schedule schedule; /* of F and B: no ZB */
    int ranks, chunks, micros, layers;
    double seconds[TP_BLOCK_KINDS][TP_COST_PHASES]; /* of one block and micro-batch */
    double fixed_s;                                 /* of every F, I and W besides, on every stage */
    double comm_s;                                  /* of a message on its link */
} tp_partition_question;

/* A proven lower bound in seconds on the schedule's makespan, updates left out, over all partitions with a block on every stage:
 * the linear relaxation of PLANNERS.md 4.3 by cutting planes, whose multipliers weigh paths; the bound is evaluated from the
 * weights alone. 0 where the thread was told to stop, and of over 4096 stages; less where time is up. EVALUE: as
 * tp_program_build; a number that is negative or not finite; fewer blocks than stages. EMEMORY. */
TP_MUST_USE tp_status
tp_partition_bound(const tp_partition_question *question, double *bound_s);

#endif
