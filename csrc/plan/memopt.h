/* What one stage saves: its least time W within memory, by recomputing whole tensors and swapping bytes (the model is in
 * dawnpiper.h). Internal to the plan room.
 *
 * With D bytes to save per micro-batch, W = min over R of max(T + r(R), (D - s(R)) / swap_Bps). Its linear relaxation
 * takes tensors by rising recompute seconds per byte, the last one in part, until what is recomputed and what that time
 * hides on the bus come to D; a wavelet matrix over that order answers it for any range of nodes in log n steps. */
#ifndef TP_PLAN_MEMOPT_H
#define TP_PLAN_MEMOPT_H

#include "csrc/plan/arena.h"
#include "csrc/plan/dawnpiper.h"

typedef struct {
    double low_s, high_s; /* W is between them; both +inf: the stage cannot fit */
} tp_memopt_range;

typedef struct {
    double r, s; /* seconds and bytes recomputed */
    int parent, item;
} tp_memopt_state;

typedef struct {
    double r, s;
    int at; /* the state's place in the pool */
} tp_memopt_live;

typedef struct {
    int64_t key; /* 1 + stage and range; 0: free */
    tp_memopt_range range;
    double chosen_s; /* of the best set that a search found, +inf if none did */
    uint8_t *chosen; /* [j - i] that set; NULL */
    int spent;       /* a search ended by its limit: another would do no better */
} tp_memopt_known;

struct tp_memopt_pairs_room;
struct tp_memopt_four_room;

typedef struct {
    const tp_nodes *nodes;
    const tp_dawnpiper_options *options;
    tp_arena arena;
    int n, whole; /* whole: bytes are whole numbers, of which sums and their quotients by copies are told apart */
    double *time_s, *active, *fixed_param, *fixed_state; /* [n + 1] sums of what comes before */
    double *working;                                     /* [levels + 1][n] largest of 2^level nodes from one on; NULL */
    int *order;                                          /* [n] nodes by recompute seconds per byte */
    double *ratio;                                       /* [n] of them, by node */
    int levels;
    int *zeros;                   /* [levels][n + 1] wavelet matrix over the ranks in that order */
    double *zero_bytes, *zero_s, *zero_lost_s; /* [levels][n + 1]; lost: what rounding took from zero_s */
    int *item;                    /* [n] a knapsack's tensors in order; scratch */
    uint8_t *chosen;              /* [n] by node: the best set of the last search */
    tp_memopt_state *pool;
    tp_memopt_live *list[3];
    int64_t pool_room, list_room;
    struct tp_memopt_pairs_room *pairs_room; /* opened by the first who needs it, as four_room */
    struct tp_memopt_four_room *four_room;
    tp_memopt_known *known;
    int64_t known_room, known_count;
    int64_t evaluations, knapsacks, states, limit; /* limit: of states */
    int64_t asked; /* steps since somebody was asked whether to stop */
} tp_memopt;

/* nodes and options must outlive it and have been checked. End with tp_memopt_close, also after an error. */
TP_MUST_USE tp_status
tp_memopt_open(const tp_nodes *nodes, const tp_dawnpiper_options *options, tp_memopt *out);
void
tp_memopt_close(tp_memopt *m);

/* Bytes of stage x on nodes [i, j) that no recomputation frees. */
double
tp_memopt_fixed(const tp_memopt *m, int x, int i, int j);
/* D: bytes of activations to save per micro-batch; 0 or less: it fits; +inf: it cannot. *slack: bytes that are rounding. */
double
tp_memopt_need(const tp_memopt *m, int x, int i, int j, double *slack);
static inline double
tp_memopt_time(const tp_memopt *m, int i, int j)
{
    return m->time_s[j] - m->time_s[i];
}
/* The linear relaxation, and the tensor that it cuts taken whole or not at all. */
tp_memopt_range
tp_memopt_relaxed(tp_memopt *m, int x, int i, int j);
/* No set is below, as far as is known without a search. */
TP_MUST_USE tp_status
tp_memopt_low(tp_memopt *m, int x, int i, int j, double *low_s);
/* Narrows the range until it says whether W <= enough. Where W is more, low_s is W itself or at least `cutoff` (unless the
 * work limit ended it: then low_s may be below `enough`). Remembers what it learnt. */
TP_MUST_USE tp_status
tp_memopt_decide(tp_memopt *m, int x, int i, int j, double enough, double cutoff, tp_memopt_range *out);
/* The same by the knapsack search (memopt_core.c), for the known stage's range; its best set goes to m->chosen, and *best_s is
 * what that takes. within: as of memopt_search.h. */
TP_MUST_USE tp_status
tp_memopt_knapsack(tp_memopt *m, int x, int i, int j, double enough, double cutoff, double within, tp_memopt_known *known,
                   double *best_s);
/* The best choice known for the stage: recompute and swap_bytes of nodes [i, j) are written; W, or where that is hard to tell,
 * within `period`, at most 1e-6 of it more. */
TP_MUST_USE tp_status
tp_memopt_choose(tp_memopt *m, int x, int i, int j, double period, uint8_t *recompute, double *swap_bytes, double *time_s);

/* Capuchin's choice (PLANNERS.md 3.2 and 9.5; capuchin.c): the same outputs; +inf if the stage cannot fit. */
typedef struct {
    double *evict, *back, *free_s; /* [n] by node: last access before eviction, first one after it, FreeTime */
    int *rank;                     /* [n] */
    int64_t asked;                 /* steps since somebody was asked whether to stop */
} tp_capuchin;
TP_MUST_USE tp_status
tp_capuchin_open(tp_memopt *m, tp_capuchin *out);
double
tp_capuchin_choose(const tp_memopt *m, tp_capuchin *c, int x, int i, int j, uint8_t *recompute, double *swap_bytes);

/* Shared by the planners (dawnpiper_plan.c). run: a planner's frame: check, open, plan, close, time. */
TP_MUST_USE tp_status
tp_dawnpiper_run(const tp_nodes *nodes, const tp_dawnpiper_options *options,
                 tp_status (*planner)(tp_memopt *m, tp_dawnpiper_plan *plan), tp_dawnpiper_plan *out);
TP_MUST_USE tp_status
tp_dawnpiper_check(const tp_nodes *nodes, const tp_dawnpiper_options *options);
TP_MUST_USE tp_status
tp_dawnpiper_plan_open(const tp_nodes *nodes, const tp_dawnpiper_options *options, tp_dawnpiper_plan *out);
/* From boundary, recompute, swap_bytes and stage_s: peaks, links, period and the simulated step. */
TP_MUST_USE tp_status
tp_dawnpiper_evaluate(const tp_memopt *m, tp_dawnpiper_plan *plan);
/* The relaxed optimum of all partitions (the bound of both planners), and a partition that attains it. EINFEASIBLE. */
TP_MUST_USE tp_status
tp_dawnpiper_relax(tp_memopt *m, int *boundary, double *bound_s, double *attained_s, int64_t *probes);

#endif
