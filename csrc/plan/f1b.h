/* Synchronous 1F1B over stages of unequal times, evaluated in one pass without allocation: what a search over partitions
 * asks thousands of times. Internal to the plan room.
 *
 * The order of stage k of p, m micro-batches: w = min(m, p - 1 - k) forwards; then F(w + q), B(q) for q = 0 .. m - w - 1;
 * then B(m - w .. m - 1) (PLANNERS.md 2.2). Every op has a slot, so that a slot holds at most one op of a stage and all that
 * an op waits for is in earlier slots:
 *     F_k(q) at q + k for q < p - k, at 2 q + k from there on;   B_k(q) at 2 p - 1 - k + 2 q.
 * What an op reads is then the last end of its own stage and the last end of its neighbour before the slot, and one
 * evaluation is a stencil over the stages, slot by slot: 2 (p + m - 1) passes of vector operations.
 *
 * end = (max(end of own stage's last op, end of the neighbour's op + lag) + receive) + seconds: the sums and their order are
 * tp_program_simulate's with comm_s = lag and RF, RB = receive, so the makespans have equal bits. */
#ifndef TP_PLAN_F1B_H
#define TP_PLAN_F1B_H

#include <stdint.h>

#include "csrc/plan/arena.h"

#define TP_F1B_MICROS (1 << 20) /* most micro-batches: a critical path is as long */

typedef struct {
    int stages, micros;
    double lag_s;      /* of a message between stages, on the link */
    int top;           /* the last stage that is simulated: stages - 1 but for a bound (tp_f1b_bound) */
    int mask;          /* of tp_f1b_bound: at most this many micro-batches are behind `top` */
    double *turn;      /* [mask + 1] when they come back to it */
    int half, width;   /* doubles of a row: even stages first, then odd ones */
    int chunk;         /* slots between two rows kept for the path */
    double *forward_s, *backward_s, *forward_wait_s, *backward_wait_s; /* [width] */
    double *rows;      /* [chunk + 1][width] ends by slot */
    double *kept;      /* [slots / chunk + 1][width] */
    int64_t asked;     /* steps since somebody was asked whether to stop */
} tp_f1b;

/* What an op is: backward 0 or 1. */
typedef struct {
    int32_t backward, stage, micro;
} tp_f1b_op;

/* What a stage does in a slot; 0: nothing. slot in 0 .. 2 (stages + micros - 1) - 1. */
int
tp_f1b_op_at(int stages, int micros, int slot, int stage, tp_f1b_op *op);

/* Memory from the arena; stages >= 1, 1 <= micros <= TP_F1B_MICROS. comm_s: of a message; blocking: the stage that receives
 * it pays, else the link does (PLANNERS.md section 0). EMEMORY. */
TP_MUST_USE tp_status
tp_f1b_open(tp_arena *arena, int stages, int micros, double comm_s, int blocking, tp_f1b *out);
void
tp_f1b_set(tp_f1b *f, int stage, double forward_s, double backward_s);
/* The makespan; or +inf as soon as it is known to be more than limit_s (+inf: never). */
double
tp_f1b_run(tp_f1b *f, double limit_s);

/* The same with stages 0 .. top alone, whose times are set: a micro-batch is rest_s behind stage `top` between its forward
 * and its backward there, and nothing else holds it up. With rest_s the seconds of the stages behind, receiving, and of the
 * messages from `top` on and back, no makespan with any times of those stages that sum to it is less: what holds
 * an op back there only adds. top < stages - 1. */
double
tp_f1b_bound(tp_f1b *f, int top, double rest_s, double limit_s);

/* Most ops on a critical path. */
static inline int
tp_f1b_longest_path(int stages, int micros)
{
    return 2 * (stages + micros);
}
/* One critical path, from the first op to B_0(m - 1): of what an op could have waited for, a backward op takes the next
 * stage, a forward op its own (the path that is closest to the last stage, PLANNERS.md 2.2). path[tp_f1b_longest_path];
 * returns its length. *master: the stage with most seconds on it, receiving included; the larger index among equals. */
int
tp_f1b_path(tp_f1b *f, tp_f1b_op *path, int *master);

#endif
