/* What the files of csrc/sched share and nobody else sees. */
#ifndef TP_SCHED_INTERNAL_H
#define TP_SCHED_INTERNAL_H

#include "csrc/sched/sched.h"

/* ESCHEDULE at (rank, position) with "rank, position: instruction: rule" and the neighbourhood. */
tp_status
tp_sched_refuse(const tp_program *program, int rank, int64_t position, const char *format, ...) TP_PRINTF(4, 5);

/* Ops that compute, that is: take a rank's time and appear in a timeline. */
static inline int
tp_sched_is_compute(int op)
{
    return op <= TP_OP_R;
}
static inline int
tp_sched_is_message(int op)
{
    return op >= TP_OP_SF && op <= TP_OP_RB;
}
static inline int
tp_sched_is_backward(int op)
{
    return op == TP_OP_B || op == TP_OP_I;
}
/* The set of operations that the program has: bit op. */
#define TP_SCHED_BIT(op) (1u << (op))
unsigned
tp_sched_ops(const tp_program *program);
/* Sends or receives? Then it must have all of them. */
#define TP_SCHED_MESSAGES                                                                                              \
    (TP_SCHED_BIT(TP_OP_SF) | TP_SCHED_BIT(TP_OP_RF) | TP_SCHED_BIT(TP_OP_SB) | TP_SCHED_BIT(TP_OP_RB))
/* Messages, AR or OPT? Then its slots are assigned. */
#define TP_SCHED_SLOTTED (TP_SCHED_MESSAGES | TP_SCHED_BIT(TP_OP_AR) | TP_SCHED_BIT(TP_OP_OPT))
/* Room for a table over (stage, unit) is in proportion to the code: true for every program that check accepts; a text
 * such as `65535F65535.65535` must not make anyone allocate gigabytes. */
int
tp_sched_is_dense(const tp_program *program);

/* Ordered pairs of ranks that talk. forward[v]: the pair that SF of stage v uses; backward[v]: the pair of its SB; -1. */
typedef struct {
    int32_t count;
    int32_t *forward, *backward; /* [stages] */
    int32_t *source, *target;    /* [count] */
} tp_pairs;
TP_MUST_USE tp_status
tp_pairs_open(const tp_program *program, tp_pairs *pairs);
void
tp_pairs_close(tp_pairs *pairs);

static inline double
tp_sched_seconds(const tp_durations *d, int op, int stage, int64_t unit)
{
    const double *table = d->seconds[op];
    return table == NULL ? 0.0 : table[stage * d->stage_stride + unit * d->unit_stride];
}
/* B may be given as I + W. */
static inline double
tp_sched_compute_s(const tp_durations *d, int op, int stage, int64_t unit)
{
    if (op == TP_OP_B && d->seconds[TP_OP_B] == NULL)
        return tp_sched_seconds(d, TP_OP_I, stage, unit) + tp_sched_seconds(d, TP_OP_W, stage, unit);
    return tp_sched_seconds(d, op, stage, unit);
}
/* Seconds on the link of a message that leaves `stage`. */
static inline double
tp_sched_lag_s(const tp_durations *d, int64_t units, int stage, int64_t unit)
{
    if (d->comm_unit_s != NULL)
        return d->comm_unit_s[stage * units + unit];
    return d->comm_s == NULL ? 0.0 : d->comm_s[stage];
}
/* EVALUE naming the first entry that is not finite or is negative. */
TP_MUST_USE tp_status
tp_durations_check(const tp_program *program, const tp_durations *durations);

/* Where the worklist went: rank `rank` ran its next `count` instructions, run after run. */
typedef struct {
    int32_t rank, count;
} tp_run;

/* One evaluation: what the bubbles are computed from. */
typedef struct {
    double makespan_s;
    double *work_s, *recompute_s; /* [ranks] compute with R, and R alone */
    double *fill_s;               /* [ranks] idle before the first backward starts */
} tp_totals;

/* Bubbles of a program from its own evaluation and counterfactual ones over the same runs. */
TP_MUST_USE tp_status
tp_sched_bubbles(const tp_program *program, const tp_durations *durations, const tp_run *runs, int64_t run_count,
                 const tp_totals *totals, double bubbles_s[TP_BUBBLES]);
/* Replay runs (a legal order) with other durations. */
TP_MUST_USE tp_status
tp_sched_replay(const tp_program *program, const tp_durations *durations, const tp_run *runs, int64_t run_count,
                double *makespan_s);

#endif
