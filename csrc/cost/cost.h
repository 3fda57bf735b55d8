/* t(slice, context): seconds that a block needs for a slice of S tokens after C tokens of context, b sequences at once.
 *
 * A curve is TeraPipe's eq. 9 with t_ctx(S, 0) = 0 (PLANNERS.md 1.1):
 *
 *     t(S, C, b) = P(b S) + pair b S^2 / 2 + (C > 0) (a0 + b (a1 S + a2 C + a3 S C))
 *
 * P is piecewise linear through measured rows; the pairs inside a slice stand apart from it because b sequences of S
 * tokens have fewer pairs than one of b S. Or a curve is a table [slice][context], interpolated on triangles, so that
 * no entry beyond slice + context = units is ever read. Nothing here allocates: the caller owns every array. */
#ifndef TP_COST_COST_H
#define TP_COST_COST_H

#include <stdint.h>

#include "csrc/base/status.h"
#include "csrc/cost/waits.h"
#include "csrc/model/model.h"

/* F forward, I gradient of the input, W gradient of the weights. */
typedef enum { TP_COST_F, TP_COST_I, TP_COST_W, TP_COST_PHASES } tp_cost_phase;
enum { TP_COST_CURVES = (int)TP_BLOCK_KINDS * (int)TP_COST_PHASES }; /* one of each kind of block and phase */

typedef struct {
    int32_t points;               /* of P; 0: P is 0 */
    int32_t units;                /* of table */
    const double *rows, *seconds; /* [points], rows ascending; the first and last piece go on outside */
    const double *table;          /* [units + 1][units + 1], or NULL */
    double granularity;           /* tokens of a table's unit */
    double scale;                 /* of the table */
    double pair_s, a0, a1, a2, a3;
} tp_cost_curve;

/* What each curve says of a slice; slice 0: of none. */
typedef struct {
    double slice, context, batch;
    double seconds[TP_BLOCK_KINDS][TP_COST_PHASES];
} tp_cost_work;
enum { TP_COST_KNOWN = 512 }; /* a power of two: planners change a plan slice by slice, and time it anew each time */

/* R of a block, as it was measured. All slices at once: its weights stay in the cache. Slice by slice, between gradients: they do
 * not, but an attention keeps its keys (tp_stage_ops.keeps_keys). */
typedef enum {
    TP_COST_REMADE_ATTENTION,
    TP_COST_REMADE_ATTENTION_APART,
    TP_COST_REMADE_FFN,
    TP_COST_REMADE_FFN_APART,
    TP_COST_REMADE
} tp_cost_remade;

typedef struct {
    tp_cost_curve curve[TP_BLOCK_KINDS][TP_COST_PHASES];
    tp_cost_curve remade[TP_COST_REMADE]; /* no points and no table: not measured, and priced by what F takes (tp_cost_recompute) */
    double overhead_s; /* fixed, of every instruction */
    tp_cost_waits waits;
    tp_cost_work *known; /* [TP_COST_KNOWN] zero at first: where tp_cost_durations remembers slices, one thread at a time; NULL: nowhere */
} tp_cost;

/* EVALUE naming curve and number: rows that do not ascend, a table of no units, a granularity below one token, negative waits. */
TP_MUST_USE tp_status
tp_cost_check(const tp_cost *cost);

/* Seconds, never below 0. S, C >= 0; 0 for S = 0. */
double
tp_cost_seconds(const tp_cost_curve *curve, double slice, double context, double batch);

/* The planner's tables (PLANNERS.md 1.1) of a weighted sum of curves, in units of `granularity` tokens:
 * c(j, i) = G0[i] if j = 0 else G1[i] + a2 j + a3 i j. G0, G1: [units + 1], written; index 0 is 0.
 * weights: [TP_BLOCK_KINDS][TP_COST_PHASES]. The curves that weigh must not be tables. */
typedef struct {
    double *G0, *G1, a2, a3;
} tp_cost_slices;
TP_MUST_USE tp_status
tp_cost_slice_tables(const tp_cost *cost, const double *weights, double batch, double granularity, int64_t units,
                     tp_cost_slices *out);
/* The same as a full table [units + 1][units + 1] (0 where slice + context > units), for any curves. */
TP_MUST_USE tp_status
tp_cost_full_table(const tp_cost *cost, const double *weights, double batch, double granularity, int64_t units,
                   double *table);

/* Seconds of the engine's F, I and W of each unit (micro-batch and slice) on each stage.
 * blocks: [stages][TP_BLOCK_KINDS] how many of each kind; batches, slices: [micros]; lengths: of all slices in order.
 * F, I, W: [stages][units], written. A micro-batch of several sequences AND several slices makes all its weight gradients at
 * slice 0 and does its head at the last slice (rows of one sequence must be summed in one fixed order).
 * Where rows wait (csrc/model/waits.h) the curves have the time of a slice's own rows, and here each instruction has the time of
 * the rows that it really does:
 * prompt: like blocks, those of them whose weight gradients wait for no other slice (what they read is not kept); NULL: none.
 * left_s: [copies], written unless NULL: what the head adds to its stage's update, for rows that waited until then.
 * copies: of the model; each has its share of the micro-batches and its own head. As many copies as micro-batches: no row waits for
 * another micro-batch's (U, csrc/sched/sched.h). */
TP_MUST_USE tp_status
tp_cost_durations(const tp_cost *cost, int32_t stages, const int32_t *blocks, const int32_t *prompt, int32_t copies,
                  int32_t micros, const int32_t *batches, const int32_t *slices, const int32_t *lengths, double *F, double *I,
                  double *W, double *left_s);

/* R of each unit on each stage: making again what these attention and FFN blocks do not keep is their forward without its second
 * product, whose result is the next block's input and is there. Where it was measured (tp_cost_remade) it takes that, but no more
 * than its forward, whose part it is, and half of what its multiply-adds are of the forward's at least: either may be of a busier
 * machine. Else of an attention that product is E^2 multiply-adds a token, of a
 * FFN 4 E^2, which is half of all it has. Nor does an attention make what it keeps of queries, keys and values, E^2 each;
 * but what it makes of its 4 E^2 takes its share of its forward at least, whatever the FFN's curve says.
 * kept: [stages] columns of n_embd of these that the stage's attentions keep (tp_stage_ops.keeps_keys, where R are apart:
 * tp_program_remakes_apart); NULL: none. Arguments as above; R: [stages][units], written; 0 where there is no such block. */
TP_MUST_USE tp_status
tp_cost_recompute(const tp_cost *cost, int32_t stages, const int32_t *blocks, const uint8_t *kept, int32_t micros,
                  const int32_t *batches, const int32_t *slices, const int32_t *lengths, double *R);

#endif
