/* Contiguous blocks on stages under synchronous 1F1B: AutoPipe (Liu et al., CLUSTER 2022), its published search and an exact
 * one; and its slicer of the warm-up. PLANNERS.md section 2. */
#ifndef TP_PLAN_AUTOPIPE_H
#define TP_PLAN_AUTOPIPE_H

#include <stdint.h>

#include "csrc/base/status.h"
#include "csrc/plan/f1b.h"

#define TP_AUTOPIPE_STAGES 4096 /* most stages: the search holds some doubles for every pair of them */

/* What fits: stage k of p keeps min(m, p - k) micro-batches, so its blocks need
 *     sum static + min(m, p - k) sum activation + largest transient <= limit[k]     bytes.
 * in_flight[k] stands for min(m, p - k) where the plan will run in another order. Arrays are [blocks], finite, >= 0 (whole
 * numbers below 2^53 are exact); NULL: zeros. */
typedef struct {
    const double *static_bytes, *activation_bytes, *transient_bytes;
    const double *limit_bytes; /* [stages]; +inf is allowed */
    const int32_t *in_flight;  /* [stages] 1 .. m; NULL: as in 1F1B */
} tp_stage_memory;

typedef struct {
    int blocks, stages, micros;
    const double *forward_s, *backward_s; /* [blocks], finite, >= 0 */
    double comm_s;                        /* of a message between stages */
    int blocking;                         /* the stage that receives pays comm_s, else the link does */
    const tp_stage_memory *memory;        /* NULL: no limit */
} tp_stage_problem;

/* How a partition is found.
 *   EXACT      least makespan over all partitions that fit. Branch and bound over the boundaries, the first stage first, from
 *              the pivot plan and its descent; what is left out cannot be better: no plan uses the boundary within the stage
 *              bounds (tp_stages_narrow), or a path through the stages fixed so far is too long (csrc/plan/stages.h), or
 *              those stages are, simulated with the rest as a mere delay (tp_f1b_bound), or the stages before and those behind
 *              delay a stage too long at the least (tp_stage_prove: where the others leave much, as with few micro-batches).
 *   HEURISTIC  the paper's search as PLANNERS.md 2.3 and 2.4 resolve it.
 *   PIVOT      least largest path bound (csrc/plan/stages.h): a plan and a lower bound in microseconds.
 *   BALANCED   the paper's Algorithm 1 alone: least largest f + b. */
typedef enum { TP_AUTOPIPE_EXACT, TP_AUTOPIPE_HEURISTIC, TP_AUTOPIPE_PIVOT, TP_AUTOPIPE_BALANCED } tp_autopipe_method;

typedef struct {
    double time_limit_s; /* EXACT and HEURISTIC stop there with what they have; 0: none */
    int64_t effort;      /* the same after so many steps, which do not depend on the machine (some 3e8 a second here): an
                            evaluation of k of p stages takes 2 (p + m) (k / 4 + 8), a node k, a way through
                            a stage of tp_stage_prove m^2 / 16 and more; 0: none */
} tp_autopipe_limits;

typedef struct {
    int stages;
    int *boundary;                          /* [stages + 1], 0 first, `blocks` last */
    double *forward_s, *backward_s, *bytes; /* [stages]: sums over the stage's blocks; bytes without memory: 0 */
    double step_time_s;                     /* equal bits to tp_program_simulate of those times */
    double lower_bound_s;                   /* no partition that fits is faster */
    int optimal;        /* step_time_s is the least, but for the rounding of double sums (1e-12 of it) */
    tp_f1b_op *path;    /* [path_length] a critical path (csrc/plan/f1b.h) */
    int path_length;
    int master_stage;
    int64_t simulations, nodes; /* makespans evaluated; partial partitions looked at */
    double seconds;
} tp_stage_plan;

/* Among plans of one makespan the first found wins; the same problem gives the same plan. End *out with
 * tp_stage_plan_free. EVALUE naming the argument, its index and value; EINFEASIBLE naming the stage that is short of bytes in
 * the partition that is short of least, and what limit would do; EMEMORY. */
TP_MUST_USE tp_status
tp_plan_autopipe(const tp_stage_problem *problem, tp_autopipe_method method, const tp_autopipe_limits *limits,
                 tp_stage_plan *out);
void
tp_stage_plan_free(tp_stage_plan *plan);

/* ---- the slicer -------------------------------------------------------------------------------------------------------- */

/* Makespan of 1F1B whose first `split` micro-batches run forward in two halves (along the batch). For stage x of p, m
 * micro-batches, 0 <= split <= m:
 *   order     as 1F1B: w = min(m, p - 1 - x) forwards, then F(w + q), B(q), then the remaining B; in it every F(q) with
 *             q < split, in warm-up and behind it alike, is two ops F(q, 0), F(q, 1), one right behind the other.
 *   seconds   a half takes f[x] / 2, another forward f[x], a backward b[x] (always whole).
 *   messages  F of a whole micro-batch and every B: one message, comm_s from its end. A half: a message of its own,
 *             comm_s / 2 from the half's end, and F(q, h) of stage x + 1 waits for that of F(q, h). But where F(q) is the last
 *             of the w warm-up forwards of stage x (q = w - 1), its halves leave in one message, comm_s from the end of
 *             F(q, 1), for which both halves of stage x + 1 wait.
 *             Messages take time on the link, none of a stage's, and do not wait for one another.
 * forward_s, backward_s: [stages]. row: [3 * stages] scratch. split 0: equal bits to tp_f1b_run, not blocking. */
double
tp_sliced_f1b(int stages, int micros, int split, const double *forward_s, const double *backward_s, double comm_s,
              double *row);

/* The same with its arguments checked. EVALUE, EMEMORY. */
TP_MUST_USE tp_status
tp_plan_sliced_f1b(int stages, int micros, int split, const double *forward_s, const double *backward_s, double comm_s,
                   double *makespan_s);

typedef struct {
    int split;             /* the least number with the least makespan, 0 .. min(micros, stages - 1) */
    double step_time_s;    /* of it */
    double whole_s;        /* split 0 */
    int algorithm2_split;  /* the paper's Algorithm 2, corrected (PLANNERS.md 2.6), at most micros */
    double algorithm2_s;   /* makespan with it */
    double seconds;
} tp_slicer_plan;

/* forward_s, backward_s: [stages], of whole micro-batches. "Least" is within 1e-12. EVALUE, EMEMORY. */
TP_MUST_USE tp_status
tp_plan_slicer(int stages, int micros, const double *forward_s, const double *backward_s, double comm_s,
               tp_slicer_plan *out);

#endif
