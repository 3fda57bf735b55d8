/* Layers, recompute strategies, chunks and stages decided together (BMPipe: Wang et al., CLUSTER 2025; PLANNERS.md
 * section 4). Layers come in types, in model order; type t has count[t] equal layers. A plan cuts the sequence of layers into
 * chunks * stages consecutive virtual stages, none empty (virtual stage v = chunk * stages + stage), and gives each layer one
 * of its type's strategies: extra backward seconds for fewer bytes kept between forward and backward.
 *
 * The order of operations is fixed: 1F1B for one chunk, interleaved 1F1B (tp_program_build) for several. A stage holds (but
 * where in_flight says otherwise)
 *     its layers' static bytes + the most that its order ever has in flight: sum over chunks n_c * activation bytes of chunk c,
 * n over the Pareto-maximal vectors of micro-batches in flight. It fits if that is at most memory_bytes (1 + 1e-12). */
#ifndef TP_PLAN_BMPIPE_H
#define TP_PLAN_BMPIPE_H

#include <stdint.h>

#include "csrc/base/status.h"

#define TP_BMPIPE_LAYERS 1024 /* most layers in all */

typedef struct {
    int types, strategies;         /* strategies: of the type that has most */
    const int32_t *count;          /* [types] layers of the type, at least 1 */
    const int32_t *choices;        /* [types] strategies of the type, 1 .. strategies */
    const double *forward_s, *backward_s, *static_bytes; /* [types], of one layer (and one micro-batch) */
    const double *extra_s;         /* [types][strategies] seconds added to the layer's backward */
    const double *activation_bytes; /* [types][strategies] kept of one micro-batch */
} tp_bmpipe_layers;

typedef struct {
    int stages, chunks, micros;
    double memory_bytes;  /* of each stage; +inf: no limit */
    double comm_s;        /* of a message between stages, on the link */
    double time_limit_s;  /* hard: stop there with what is known; 0: none */
    int64_t effort;       /* several chunks: inequalities that the local search may evaluate (a simulation counts as 25
                             micros of them); the bound's work grows with it; 0: a default, about a second for both.
                             One: nodes of branch and bound, counted alike; 0: no limit */
    const int32_t *in_flight; /* [chunks][stages] micro-batches that a virtual stage has room for, 1 .. micros, where each has
                                 a room of its own or another order will run; NULL: what the schedule holds at once */
    const int32_t *start; /* [types][strategies][chunks][stages] a plan of these layers, as an answer has it: where it fits, so that
                             the answer is no slower; NULL: none */
    int unproven;         /* several chunks: 1: leave the bound out, which takes longer than the search (lower_bound_s 0) */
} tp_bmpipe_options;

typedef struct {
    int32_t *assignment;  /* [types][strategies][chunks][stages] layers */
    double *peak_bytes;   /* [stages] */
    double step_time_s;   /* equals tp_program_simulate's of the schedule with the plan's times */
    double lower_bound_s; /* no plan that fits is faster */
    /* With w[x] the seconds stage x computes for a micro-batch, r[x] of them recomputation (PLANNERS.md 4.3): idle time over
     * m * mean(w - r), recompute = m mean(r), imbalance = m (max w - mean w), preparation = step - m max w. */
    double recompute_s, imbalance_s, preparation_s;
    int optimal;          /* proven, to the rounding of double sums, and of times to 40 bits where there are several chunks */
    int64_t evaluations;  /* plans judged, by a bound or a simulation */
    int64_t simulations;  /* of them by a simulation */
    int64_t nodes;        /* of branch and bound */
    int64_t paths;        /* critical paths kept as inequalities */
    double seconds;
} tp_bmpipe_plan;

/* EVALUE naming the type and the field that is negative, NaN or infinite, or a count, a number of stages, chunks or
 * micro-batches that cannot be. */
TP_MUST_USE tp_status
tp_bmpipe_check(const tp_bmpipe_layers *layers, const tp_bmpipe_options *options);

/* The plan of least makespan: proven optimal for one chunk (branch and bound); for more an anytime search, then branch and
 * bound as far as the effort goes: optimal where it ends, else with a proven bound.
 * Deterministic unless the time limit ends it, and the same whatever all times are multiplied by. No slower than options->start,
 * nor than without it, nor, with several chunks and more than 1e-7 above its bound, than the plan of any equal groups of its
 * layers, found as if such layers had been asked for, each size with the whole effort; unless the time limit ends the search. End
 * *out with tp_bmpipe_plan_free, also after an error. EVALUE as check, or as judge for a start that is no plan, EINFEASIBLE naming
 * the stage and the bytes that are missing with the fewest bytes kept, EMEMORY. */
TP_MUST_USE tp_status
tp_plan_bmpipe(const tp_bmpipe_layers *layers, const tp_bmpipe_options *options, tp_bmpipe_plan *out);
void
tp_bmpipe_plan_free(tp_bmpipe_plan *plan);

/* Judge a given assignment: step time, peaks and the three bubbles (lower_bound_s is 0). EVALUE if it is no plan: wrong
 * counts, an empty virtual stage, types out of order. It need not fit. */
TP_MUST_USE tp_status
tp_bmpipe_judge(const tp_bmpipe_layers *layers, const tp_bmpipe_options *options, const int32_t *assignment,
                tp_bmpipe_plan *out);

/* The makespan of the schedule with seconds forward_s[v], backward_s[v] of each virtual stage, and one of its critical paths
 * as an inequality that holds for any seconds: makespan >= sum forward_runs[v] F_v + backward_runs[v] B_v + lag_s. */
TP_MUST_USE tp_status
tp_bmpipe_path(const tp_bmpipe_options *options, const double *forward_s, const double *backward_s, double *makespan_s,
               int64_t *forward_runs, int64_t *backward_runs, double *lag_s);

/* ---- the integer programme (PLANNERS.md 4.2, 4.3) for another solver: sparse rows low <= A x <= high -------------------- */
/* Columns: l[t, r, c, x] at ((t * strategies + r) * chunks + c) * stages + x (bound 0 above where the type has no such
 * strategy), then b[t, c, x] for t < types - 1 ("all layers of type t lie at virtual stages up to this one"), then T. */
typedef struct {
    int columns, rows, paths; /* the last `paths` rows are path inequalities */
    int64_t entries;
    double *cost, *low, *high;      /* [columns] */
    uint8_t *integer;               /* [columns] */
    int64_t *begin;                 /* [rows + 1] */
    int32_t *index;                 /* [entries] column */
    double *value;                  /* [entries] */
    double *row_low, *row_high;     /* [rows] */
} tp_bmpipe_ilp;

/* paths path inequalities: forward_runs, backward_runs [paths][chunks * stages], lag_s [paths]. Bytes are divided by
 * memory_bytes. End with tp_bmpipe_ilp_free, also after an error. EVALUE as check, EMEMORY. */
TP_MUST_USE tp_status
tp_bmpipe_ilp_build(const tp_bmpipe_layers *layers, const tp_bmpipe_options *options, int paths,
                    const int64_t *forward_runs, const int64_t *backward_runs, const double *lag_s, tp_bmpipe_ilp *out);
void
tp_bmpipe_ilp_free(tp_bmpipe_ilp *ilp);

#endif
