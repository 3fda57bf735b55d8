/* DawnPiper (Peng et al., arXiv 2505.05856; PLANNERS.md section 3): a chain of nodes cut into pipeline stages, each of
 * which recomputes and swaps what its memory cannot hold.
 *
 * Memory. Stage x of K (from 0) holds v_x copies of its activations: 1F1B min(m, K - x), GPipe m, PipeDream K - x, or what
 * in_flight says of another order, as long as no stage holds more than the one before it. With
 * A activations, P parameters and O optimiser state of its nodes, of which it keeps B <= A bytes per micro-batch:
 *     synchronous (1F1B, GPipe)   v B + 2 P + O             weights and one gradient
 *     PipeDream                   v (B + P) + P + O         v versions of the weights, one gradient
 *     paper != 0                  v (B + P + O)             the paper's own count, for every schedule
 * and the largest working_bytes of its nodes once: room that a node needs while it runs or is re-created.
 *
 * Time, in the steady state. A stage whose nodes take T = sum (forward + backward) recomputes whole tensors R and swaps S
 * bytes per micro-batch of the others (any part of a tensor, since a copy may stop anywhere). Out and in use a direction of
 * the bus each, so a period hides at most swap_Bps * period bytes:
 *     W = min over R of max(T + sum_R recompute, S / swap_Bps),  S = A - sum_R activation - B.
 * The period is max W over the stages; with link_Bps also the cut_bytes / link_Bps of every cut (messages overlap, so a cut
 * costs a period of its own).
 *
 * tp_plan_dawnpiper is exact for that model: least period over all partitions into K non-empty contiguous stages and all
 * choices of R and S. Proof. (1) W never falls when a stage grows by a node (restrict the larger stage's R and S), so the
 * longest prefix that stays within a period is the best one and a probe decides a period (dawnpiper.c). If that leaves later
 * stages without nodes: W never rises when the same nodes move to a later stage (it holds no more copies), so nodes of earlier
 * stages are moved on; where all earlier ones have a single node, the next node is too much for any stage that may have it.
 * (2) A failed probe raises the lower bound to the least W that would have let a stage grow; a probe that succeeds lowers the
 * upper one to the largest W attained; the search ends when they meet. (3) W is a knapsack over real bytes, solved by an
 * expanding core with dominance, each state bounded by its linear relaxation (memopt_core.c); by two lists that meet in the
 * middle where that bounds better (memopt_pairs.c); and where tensors tie by a set that meets the bound (memopt_four.c). Of a
 * stage that needed these and is not the slowest, a set within 1e-6 of W is kept. Where the work limit, or a 64th of it for one
 * stage, ends (3) the stage counts as too slow in the search, but only what was proven of it enters the bound: then optimal is
 * 0 and lower_bound_s still holds.
 * Sums are double; bytes that are whole numbers are compared exactly where all of them and the limit, times the copies, are below 2^50,
 * others to about 1e-13 of the limit. */
#ifndef TP_PLAN_DAWNPIPER_H
#define TP_PLAN_DAWNPIPER_H

#include <stdint.h>

#include "csrc/base/status.h"

typedef enum { TP_FLIGHT_1F1B, TP_FLIGHT_GPIPE, TP_FLIGHT_PIPEDREAM, TP_FLIGHTS } tp_flight;

/* A chain in topological order; every array [count], finite, not negative. Times of one micro-batch. */
typedef struct {
    int count;
    const double *forward_s, *backward_s, *recompute_s;
    const double *activation_bytes, *param_bytes, *optimizer_bytes;
    const double *cut_bytes;   /* what crosses a boundary behind node i, one way; NULL: not known */
    const double *cut_tensors; /* how many tensors cross there; NULL: not known (tp_plan_dawnpiper_binary only) */
    const double *working_bytes; /* NULL: none */
} tp_nodes;

typedef struct {
    int stages, micros; /* micros: of a step; PipeDream does not read it */
    tp_flight flight;
    int paper;           /* != 0: the paper's count of memory */
    int optimise;        /* 0: recompute and swap nothing */
    double memory_bytes; /* of one stage */
    double swap_Bps;     /* bytes a second to the host, each way; 0: nothing is swapped */
    double link_Bps;     /* between stages, each way; 0: messages take no time */
    int64_t work_limit;  /* states of all knapsacks (exact) or stages examined (binary); 0: 4 million, 200 000 */
    const int *boundary; /* [stages + 1]: this partition instead of a search; NULL */
    const int32_t *in_flight; /* [stages] v_x, at least 1, never rising; NULL: as flight says */
} tp_dawnpiper_options;

typedef struct {
    int count, stages;
    int *boundary;      /* [stages + 1] */
    uint8_t *recompute; /* [count] */
    double *swap_bytes; /* [count] of one micro-batch */
    double *stage_s;    /* [stages] W */
    double *peak_bytes; /* [stages] */
    double *link_s;     /* [stages] of the message behind the stage; 0 behind the last */
    double period_s;    /* the largest of stage_s and link_s */
    double step_s;      /* 1F1B's or GPipe's step of the m micro-batches, messages overlapped; PipeDream: period_s */
    double lower_bound_s; /* no plan has a shorter period */
    double relaxed_s;     /* the same bound from the fractional form alone */
    int optimal;
    int64_t probes;      /* periods tried */
    int64_t evaluations; /* stages examined */
    int64_t knapsacks;   /* of them solved by the core search */
    int64_t states;      /* of the knapsacks */
    double seconds;
} tp_dawnpiper_plan;

/* EVALUE naming array and node that is NaN, infinite or negative; a total above 1e300. */
TP_MUST_USE tp_status
tp_nodes_check(const tp_nodes *nodes);

/* The exact planner, or the given partition with the best R and S of each stage. Among plans of one period: the shorter
 * simulated step of the partition with the longest stages first and the one with the longest stages last; then the first.
 * EVALUE (tp_nodes_check is called), EMEMORY, EINFEASIBLE naming stage, bytes short and the limit that would do.
 * End *out with tp_dawnpiper_plan_free. */
TP_MUST_USE tp_status
tp_plan_dawnpiper(const tp_nodes *nodes, const tp_dawnpiper_options *options, tp_dawnpiper_plan *out);

/* BiPar as published, its gaps closed as in PLANNERS.md 3.2 (bipar.c says how). relaxed_s and lower_bound_s are those of
 * the exact model. EINFEASIBLE also where this search finds no plan but one exists; the message says which. */
TP_MUST_USE tp_status
tp_plan_dawnpiper_binary(const tp_nodes *nodes, const tp_dawnpiper_options *options, tp_dawnpiper_plan *out);
void
tp_dawnpiper_plan_free(tp_dawnpiper_plan *plan);

/* Copies of its activations that stage x holds. */
int
tp_dawnpiper_copies(const tp_dawnpiper_options *options, int x);
/* Alg. 2: weight[x] = v_0 / v_x, the share of one micro-batch's memory that stage x should have (1, 4/3, 2, 4 for K = 4). */
void
tp_dawnpiper_weights(const tp_dawnpiper_options *options, double *weight);
/* boundary[stages + 1] by those weights of activation + param + optimizer bytes (by_memory), or of equal times: a stage
 * closes with the node that fills its share; no stage is empty. */
TP_MUST_USE tp_status
tp_plan_dawnpiper_balance(const tp_nodes *nodes, const tp_dawnpiper_options *options, int by_memory, int *boundary);

#endif
