/* Judging a plan: build the program that the engine would run, and simulate it; and the descent that does so thousands of times.
 * Partition and slices decide the durations; the durations decide where the program places weight gradients. */
#ifndef TP_PLAN_JUDGE_H
#define TP_PLAN_JUDGE_H

#include <stdint.h>

#include "csrc/base/status.h"
#include "csrc/cost/cost.h"
#include "csrc/sched/sched.h"

/* Orders that tp_program_build does not make, numbered behind those that it does (tp_schedule). */
enum { TP_ORDER_ZB_V = TP_SCHEDULES, TP_ORDER_DUALPIPE_V, TP_ORDER_HANAYO, TP_ORDER_SLICED, TP_ORDER_BPIPE, TP_ORDER_CHIMERA,
       TP_ORDER_PIPEDREAM, TP_ORDERS };

typedef struct {
    const tp_cost *cost;
    double latency_s, byte_s; /* a message on its link: latency_s + bytes byte_s */
    double far_latency_s, far_byte_s; /* the same of one that leaves its node */
    const uint8_t *far;       /* [ranks] 1: the next rank (after the last one rank 0) is on another node; NULL: no message leaves */
    double copy_byte_s;       /* of a guest's byte, of the time of either end */
    double read_byte_s;       /* of a stage's message's byte, of its reader's time, and where `lent` is 0 of its sender's too */
    int lent;                 /* 1: the reader makes the only copy */
    double row_bytes;         /* of a token in a message */
    /* A tied weight on two ranks: AR is of the rows' gradients and of the new values, which come back with OPT. */
    double tied_latency_s, tied_row_s, tied_values_s;
    int whole_weights;        /* W of a micro-batch is done with its first slice, or in groups of rows (cuda/stage.h) */
    /* Seconds of OPT, or of each U, on a stage of p parameters: update_s + p update_param_s, and update_head_s where the head is; the
     * replicas' ring: ring_s[i] + p ring_param_s[i], of replicas of i + 1 copies of the model (sched.h). params: of a block of each
     * kind; copied: more where the head is without the embedding, and less where that is without the head. */
    double update_s, update_param_s, update_head_s, ring_s[2], ring_param_s[2];
    /* Where replicas shard AdamW's moments, likewise: seconds in which they gather values, and by parameter of the update that others do. */
    double gather_s[2], gather_param_s[2], spared_param_s[2];
    double params[TP_BLOCK_KINDS], copied;
    int beside;               /* 1: replicas of one copy add up attentions' and FFNs' gradients beside the work (tp_durations.beside_s) */
} tp_judge_costs;

/* *bytes of a guest (sched.h) of a stage of blocks [first, end), whose largest micro-batch has `batch` sequences of seq_len tokens
 * and which makes `recompute` again (NULL: nothing). EVALUE: there are no guests. */
typedef tp_status (*tp_judge_guest)(void *context, int first, int end, int32_t batch, int32_t seq_len, const uint8_t *recompute,
                                    int64_t *bytes);

typedef struct {
    tp_judge_costs costs;
    int ranks, chunks, blocks, tied;
    const int32_t *kind; /* [blocks] tp_block_kind */
    const uint8_t *recompute; /* [blocks] 1: an attention or FFN that keeps its input alone (R, tp_cost_recompute); NULL: none */
    int keeps_keys;           /* tp_stage_ops.keeps_keys: attentions that are recomputed may keep theirs .. */
    int at_once;              /* .. 1: but do not: all slices are made again at once, which takes more memory and may fill a wait */
    tp_judge_guest guest;     /* for TP_ORDER_BPIPE */
    void *context;
} tp_judge_request;

/* The `pending` of a candidate whose looped stages stay as they are built, where `pending` W may wait. */
#define TP_JUDGE_AS_BUILT(pending) (-1 - (pending))
/* The same of one whose B stay whole, so that stages go back block by block (tp_stage_config.by_block): none is faster with messages
 * to send behind I, but micro-batches of one slice need less memory. Looped stages stay as they are built. Where replicas add up
 * gradients beside the work a candidate of `pending` >= 0 has whole B, too, if that is faster (and each micro-batch one slice). */
#define TP_JUDGE_WHOLE INT32_MIN
/* The same, and what they recompute is made within B (TP_WITHIN), in less memory still; but that fills no wait. */
#define TP_JUDGE_WITHIN (INT32_MIN + 1)

typedef struct {
    int order;               /* tp_schedule, or TP_ORDER_* (not the builder's TP_ZB_V, which TP_ORDER_ZB_V is) */
    int pending;             /* tp_program_split's. Ignored where the builder places W. 0 with guests, as a W that waits would hold
                                activations, and with U, which follows W. Below 0, TP_JUDGE_AS_BUILT(n): n, and looped BFS as it is built, not
                                by list scheduling where that is faster, which may hold more */
    int32_t micros;          /* of two copies of the model the second half of them is like the first */
    const int32_t *boundary; /* [stages + 1] blocks, ascending; of one copy of the model */
    const int32_t *batches, *slices; /* [micros] */
    const int32_t *lengths;  /* [units] */
    const uint8_t *recompute; /* [blocks] as the request's, which it replaces; NULL: the request's. Not for descents. */
    int at_once;              /* likewise, beside `recompute` */
} tp_candidate;

typedef struct tp_judge tp_judge;
/* Keeps the request's pointers, which must outlive it. EVALUE, EMEMORY. Not thread-safe. */
TP_MUST_USE tp_status
tp_judge_open(const tp_judge_request *request, tp_judge **out);
void
tp_judge_close(tp_judge *judge);
/* The program, lowered, and its makespan. The caller closes *program. EVALUE: a candidate that does not fit the request, or
 * has halves of micro-batches with slices, or copies of the model that differ; the builders' own, and what `guest` says. */
TP_MUST_USE tp_status
tp_judge_run(tp_judge *judge, const tp_candidate *candidate, tp_program **program, double *makespan_s);
/* The schedule alone, before W is placed and messages are added. The caller closes it. */
TP_MUST_USE tp_status
tp_judge_compute(tp_judge *judge, const tp_candidate *candidate, tp_program **program);
/* What it has done so far, in units of about 13 ns: the same everywhere, so that a limit on it is no clock. */
int64_t
tp_judge_work(const tp_judge *judge);

/* ---- a descent ----------------------------------------------------------------------------------------------------------- */

/* Bytes that the program takes over the memory's limit, of all ranks together, in *over; 0: it fits. */
typedef tp_status (*tp_judge_over)(void *context, const tp_program *program, const tp_candidate *candidate, int64_t *over);

typedef struct {
    int unit;                   /* slice boundaries move by multiples of so many tokens */
    int fixed_stages, fixed_slices;
    int64_t work;               /* of the judge, at most, but for the step that passes it; as much again for mending */
    int64_t beside;             /* and of each of the descents from the four best neighbours of the first one's end, for which a
                                   boundary of stages has moved; 0: none. A boundary often moves only if the slices move, too. */
    tp_judge_over over;         /* NULL: everything fits */
    void *context;
} tp_descent;

/* What a descent ends with: `plan`, its arrays in one block of memory, and its program, which tp_descended_close ends. */
typedef struct {
    tp_candidate plan;
    double makespan_s;
    int64_t over; /* 0: it fits */
    tp_program *program; /* of the plan, lowered */
    int32_t *memory;
} tp_descended;

/* By single moves from a plan that takes makespan_s, until none helps or the work is done: a boundary of stages
 * (or a run of up to four) by one block; tokens from one slice to another; all slices of a micro-batch bent; two joined or
 * one halved. Micro-batches that are alike change alike. Moves that keep the numbers of slices are looked at in the order of
 * the plan in hand first (a glance: one pass of the simulator), and the best of them judged. Never slower than a start that
 * fits. One that does not is mended first: by the moves of boundaries and of numbers of slices that leave least over the limit,
 * as long as each leaves less; where that ends above it, the answer is over it, too. The same answer for the same question:
 * ties go to the earlier move. EVALUE, EMEMORY, and what `over` says. */
TP_MUST_USE tp_status
tp_judge_descend(tp_judge *judge, const tp_candidate *start, double makespan_s, const tp_descent *descent, tp_descended *out);
void
tp_descended_close(tp_descended *descended);

#endif
