/* What the files of csrc/sched share: not for other folders. */
#ifndef TP_SCHED_INTERNAL_H
#define TP_SCHED_INTERNAL_H

#include "csrc/sched/sched.h"

enum { TP_SCHED_PART = 1 << 16 }; /* instructions between two questions whether to stop (csrc/base/deadline.h) */

/* ESCHEDULE at (rank, position) with "rank, position: instruction: rule" and the neighbourhood. */
tp_status
tp_sched_refuse(const tp_program *program, int rank, int64_t position, const char *format, ...) TP_PRINTF(4, 5);

/* Ops that compute. They take a rank's time and appear in a timeline, as swaps, U, AR and OPT do. */
static inline int
tp_sched_is_compute(int op)
{
    return op <= TP_OP_R;
}
static inline int
tp_sched_is_swap(int op)
{
    return op == TP_OP_SO || op == TP_OP_SI;
}
static inline int
tp_sched_goes_beside(const tp_instr *instr)
{
    return tp_sched_is_swap(instr->op) && instr->flags & TP_BESIDE;
}
/* Work that is no pass over a slice: a copy to or from memory, or an update. */
static inline int
tp_sched_is_beside(int op)
{
    return tp_sched_is_swap(op) || op == TP_OP_U;
}
static inline int
tp_sched_is_message(int op)
{
    return op >= TP_OP_SF && op <= TP_OP_RB;
}
/* AR and OPT, which end a rank's list. */
static inline int
tp_sched_is_end(int op)
{
    return op == TP_OP_AR || op == TP_OP_OPT;
}
static inline int
tp_sched_is_guest(int op)
{
    return op >= TP_OP_SE && op <= TP_OP_RL;
}
/* Instructions of the rank that keeps another's activations. */
static inline int
tp_sched_is_host(int op)
{
    return op == TP_OP_RE || op == TP_OP_SL;
}
/* Ops of which the first behind an RL waits for what that brings. */
static inline int
tp_sched_reads_load(int op)
{
    return op == TP_OP_B || op == TP_OP_I || op == TP_OP_R;
}
static inline int
tp_sched_is_backward(int op)
{
    return op == TP_OP_B || op == TP_OP_I;
}
/* Does it wait for the gradient that a backward reads? */
static inline int
tp_sched_goes_back(const tp_instr *instr)
{
    return tp_sched_is_backward(instr->op) || tp_instr_is_within(instr);
}
static inline int
tp_sched_is_send(int op)
{
    return op == TP_OP_SF || op == TP_OP_SB || op == TP_OP_SE || op == TP_OP_SL;
}
/* Slots. Activations (inputs, saved for backward) live from RF or F to W or B. Gradients, and what R makes again, from RB, R, B or
 * I to W, B or SB; and where the stage below is on the same rank, until its backwards have read them, as it has no message. */
#define TP_SCHED_BIT(op) (1u << (op))
static inline int
tp_sched_uses_activation(int op)
{
    return (TP_SCHED_BIT(op) & (TP_SCHED_BIT(TP_OP_F) | TP_SCHED_BIT(TP_OP_B) | TP_SCHED_BIT(TP_OP_I) | TP_SCHED_BIT(TP_OP_W) |
                                TP_SCHED_BIT(TP_OP_R) | TP_SCHED_BIT(TP_OP_SF) | TP_SCHED_BIT(TP_OP_RF) | TP_SCHED_BIT(TP_OP_SO) |
                                TP_SCHED_BIT(TP_OP_SI) | TP_SCHED_BIT(TP_OP_SE) | TP_SCHED_BIT(TP_OP_RL))) != 0;
}
static inline int
tp_sched_uses_gradient(int op)
{
    return (TP_SCHED_BIT(op) & (TP_SCHED_BIT(TP_OP_B) | TP_SCHED_BIT(TP_OP_I) | TP_SCHED_BIT(TP_OP_W) | TP_SCHED_BIT(TP_OP_R) |
                                TP_SCHED_BIT(TP_OP_SI) | TP_SCHED_BIT(TP_OP_SB) | TP_SCHED_BIT(TP_OP_RB))) != 0;
}
/* Does this backward read the gradient slot of the next stage of its copy, which is on the same rank? */
int
tp_sched_reads_next(const tp_program *program, const tp_instr *instr);
/* The set of operations that the program has, bit `op` of each, and the three flags: some F is of a half; swaps are made beside the
 * work; and that from two places. */
#define TP_SCHED_HAS_HALVES (1u << 31)
#define TP_SCHED_HAS_BESIDE (1u << 30)
#define TP_SCHED_HAS_TWO_PLACES (1u << 29)
unsigned
tp_sched_ops(const tp_program *program);
/* What of AR and OPT follows a rank's passes before the ranks meet. */
double
tp_sched_before_meeting_s(const tp_program *program, const tp_durations *durations, int rank);
/* tp_program_check_order and tp_program_bound for callers that know the set already: it saves a pass over the code. */
TP_MUST_USE tp_status
tp_sched_check_order(const tp_program *program, unsigned ops);
TP_MUST_USE tp_status
tp_sched_bound(const tp_program *program, unsigned ops, const tp_durations *durations, double *bound_s);
/* Its part that looks at each pass of a rank (jackson.c), without the step's end behind the ranks' meeting; 0 where the program has
 * halves, guests, swaps, updates by micro-batches, or B of some slices and I, W of others. */
TP_MUST_USE tp_status
tp_sched_jackson(const tp_program *program, unsigned ops, const tp_durations *durations, double *seconds);
/* The passes of sched.h without their checks: for programs that are known to pass check (split and lower: compute programs;
 * assign_slots: lowered ones). ops: tp_sched_ops; operations that the pass itself adds may be missing. goal_s: as that of
 * tp_program_complete; *out is NULL then. */
TP_MUST_USE tp_status
tp_sched_split(const tp_program *compute, unsigned ops, const tp_durations *durations, int pending, double goal_s,
               tp_program **out);
TP_MUST_USE tp_status
tp_sched_lower(const tp_program *compute, unsigned ops, int tied, tp_program **out);
TP_MUST_USE tp_status
tp_sched_assign_slots(tp_program *program, unsigned ops);
/* ops: with TP_SCHED_MESSAGES, whichever, where the program is lowered; what else it has must be there. */
TP_MUST_USE tp_status
tp_sched_sim_open(const tp_program *program, unsigned ops, tp_sim **out);
/* A program that has some of these messages must have all of its messages. */
#define TP_SCHED_MESSAGES                                                                                              \
    (TP_SCHED_BIT(TP_OP_SF) | TP_SCHED_BIT(TP_OP_RF) | TP_SCHED_BIT(TP_OP_SB) | TP_SCHED_BIT(TP_OP_RB))
#define TP_SCHED_GUESTS                                                                                                \
    (TP_SCHED_BIT(TP_OP_SE) | TP_SCHED_BIT(TP_OP_RE) | TP_SCHED_BIT(TP_OP_SL) | TP_SCHED_BIT(TP_OP_RL))
/* A program that has any of these is lowered: its slots are assigned. */
#define TP_SCHED_SLOTTED (TP_SCHED_MESSAGES | TP_SCHED_BIT(TP_OP_AR) | TP_SCHED_BIT(TP_OP_OPT))
/* What becomes of the forward output of each (stage, unit), [stages * units]; *halves NULL: nothing is halved, as tp_sched_ops
 * says already. The caller frees it. */
enum { TP_SCHED_HALVED = 1, TP_SCHED_APART = 2 }; /* F is two instructions; its halves are there one after the other */
TP_MUST_USE tp_status
tp_sched_halves(const tp_program *program, unsigned ops, uint8_t **halves);
/* Halves of the output that are there, or on their way, once this F is done: joined ones leave the rank with the second. */
static inline unsigned
tp_sched_leaving(const tp_program *program, const tp_instr *forward)
{
    if ((forward->flags & TP_HALF_JOINED) && tp_program_remote(program, forward->stage + 1))
        return forward->flags & TP_HALF_SECOND ? TP_HALVES : 0;
    return tp_instr_halves(forward);
}
/* The flags of such a message. */
static inline unsigned
tp_sched_message_flags(unsigned leaving)
{
    return leaving == TP_HALVES ? 0 : leaving;
}
/* Room for a table over (stage, unit) is in proportion to the code: true for every program that check accepts; a text
 * such as `65535F65535.65535` must not make anyone allocate gigabytes. */
int
tp_sched_is_dense(const tp_program *program);

/* The copies that the instructions of a program say (sched.h). */
int
tp_sched_copies(const tp_program *program);
/* A program of the same dimensions, placement and copies with room for counts[ranks] instructions. */
TP_MUST_USE tp_status
tp_sched_open_like(const tp_program *program, const int64_t *counts, tp_program **out);

/* hosts[stages]: the rank that holds each stage's guests, -1 where it has none. */
void
tp_sched_hosts(const tp_program *program, int32_t *hosts);
/* What check asks of SE, RE, SL and RL besides their order at both ends: whose they are, once each, and that nothing reads what is
 * away. ESCHEDULE. */
TP_MUST_USE tp_status
tp_sched_check_guests(const tp_program *program, unsigned ops);
/* Seconds on the link of a guest of `stage`. */
static inline double
tp_sched_guest_lag_s(const tp_durations *d, int64_t units, int stage, int64_t unit)
{
    return d->guest_comm_s == NULL ? 0.0 : d->guest_comm_s[stage * units + unit];
}
/* When it has come, sent at now_s; *free_s: when all that was sent before on its link has. */
static inline double
tp_sched_guest_send(double *free_s, double now_s, double lag_s)
{
    *free_s = (now_s > *free_s ? now_s : *free_s) + lag_s;
    return *free_s;
}

/* Ordered pairs of ranks that talk. forward[v]: the pair that SF of stage v uses; backward[v]: the pair of its SB; evict[v],
 * load[v]: of its SE and its SL; -1. */
typedef struct {
    int32_t count;
    int32_t *forward, *backward, *evict, *load; /* [stages] */
    int32_t *source, *target;    /* [count] */
} tp_pairs;
TP_MUST_USE tp_status
tp_pairs_open(const tp_program *program, unsigned ops, tp_pairs *pairs);
void
tp_pairs_close(tp_pairs *pairs);
/* The pair that a message goes by, of its send or, in a program whose messages have both ends, its receive; -1: no message. */
int
tp_pairs_of(const tp_pairs *pairs, const tp_instr *instr);

/* Do messages between neighbours take time of the ranks? */
static inline int
tp_sched_has_copies(const tp_durations *d)
{
    for (int op = TP_OP_SF; op <= TP_OP_RB; op++)
        if (d->seconds[op] != NULL || d->half_s[0][op] != NULL || d->half_s[1][op] != NULL)
            return 1;
    return 0;
}
/* EVALUE naming the first entry that is not finite or is negative. */
TP_MUST_USE tp_status
tp_durations_check(const tp_program *program, const tp_durations *durations);

/* The makespans that bubbles are computed from, besides that of the durations as they are: lanes of one evaluation (worklist.h).
 * COPIED: copies beside the work take no time; IDEAL: neither do messages and sums of gradients; EVEN: and slices take equally
 * long. */
enum { TP_LANE_COPIED = 1, TP_LANE_IDEAL = 2, TP_LANE_EVEN = 4 };
typedef struct {
    unsigned wanted;   /* those that differ from the lane before */
    tp_durations even; /* of EVEN, by stage alone, what takes a rank's time; all NULL where it is not wanted */
    double *tables;    /* its */
} tp_lanes;
TP_MUST_USE tp_status
tp_sched_lanes_open(const tp_program *program, const tp_durations *durations, int beside, tp_lanes *lanes);
void
tp_sched_lanes_close(tp_lanes *lanes);

/* One evaluation: what the bubbles are computed from. */
typedef struct {
    double makespan_s;
    double *work_s;               /* [ranks] all but messages */
    double *recompute_s, *swap_s; /* [ranks] of that in R, in SO and SI */
    double *sum_s;                /* [ranks] of that in AR and in replicas' sums */
    double *fill_s;               /* [ranks] idle before the first backward starts */
    double copied_s, ideal_s, even_s; /* makespans of the lanes that are wanted */
} tp_totals;

/* Bubbles of a program from its own makespan and those of its lanes. */
void
tp_sched_bubbles(const tp_program *program, const tp_lanes *lanes, const tp_totals *totals, double bubbles_s[TP_BUBBLES]);

#endif
