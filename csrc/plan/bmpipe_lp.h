/* A small dense linear programme solved by the dual simplex method, made to grow: minimise cost . x over x >= 0 with rows
 * a . x >= low, cost >= 0, so that rows may be added to a solved one. Its multipliers are only ever used as weights of a
 * bound that is then evaluated without it: a wrong digit here makes a weaker bound, not a wrong one. */
#ifndef TP_PLAN_BMPIPE_LP_H
#define TP_PLAN_BMPIPE_LP_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/base/status.h"

/* Condensed (Tucker) tableau: basic = right - table . nonbasic, objective = value + cost . nonbasic, cost >= 0. Variables 0 ..
 * columns - 1 are x, columns + i is the slack of row i. */
typedef struct {
    int columns, rows, room;
    double *table;            /* [room][columns] */
    double *right, *cost;     /* [room], [columns] */
    int32_t *basic, *nonbasic; /* [room], [columns] */
    int32_t *vacant;          /* [room] numbers that no row has: the first room - rows */
    double value;
    int64_t work;             /* multiplications left to spend */
    int stuck;                /* the place in the tableau that no x satisfies, after -1 */
} tp_bmpipe_lp;

/* Bytes of memory for tp_bmpipe_lp_open. */
size_t
tp_bmpipe_lp_bytes(int columns, int room);
/* No rows yet; cost[columns] >= 0. */
void
tp_bmpipe_lp_open(tp_bmpipe_lp *lp, void *memory, int columns, int room, const double *cost);
/* to: opened with as many columns and as much room. */
void
tp_bmpipe_lp_copy(const tp_bmpipe_lp *from, tp_bmpipe_lp *to);
/* a . x >= low, dense; returns the row's number, -1 where there is no room. */
int
tp_bmpipe_lp_add(tp_bmpipe_lp *lp, const double *a, double low);
/* Leave out the rows that the solution satisfies with more than `above` to spare, if may[number]. */
void
tp_bmpipe_lp_drop(tp_bmpipe_lp *lp, double above, const uint8_t *may);
/* 1: solved, 0: out of work, -1: no x satisfies the rows. */
int
tp_bmpipe_lp_solve(tp_bmpipe_lp *lp);
/* x[columns]; multiplier[room] by row number, >= 0 also where the work ran out. */
void
tp_bmpipe_lp_read(const tp_bmpipe_lp *lp, double *x, double *multiplier);
/* After -1: multipliers of the rows whose combination no x satisfies. */
void
tp_bmpipe_lp_read_ray(const tp_bmpipe_lp *lp, double *multiplier);

#endif
