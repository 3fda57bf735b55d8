/* The parts of tp_plan_shop. Internal. q runs over the machines of all chains: chain * machines + machine. */
#ifndef TP_PLAN_SHOP_SEARCH_H
#define TP_PLAN_SHOP_SEARCH_H

#include "csrc/plan/shop.h"
#include "csrc/plan/slice_dp.h"

/* One slicing with the ends before, and the longest way behind, each of its slices: another slicing that differs in a few
 * neighbouring slices costs only those. */
typedef struct {
    const tp_shop *shop;
    const tp_shop_options *options;
    int width;            /* machines of all chains */
    int slices;
    int *length, *start;  /* [units + 1] */
    double *head, *tail;  /* [units + 1][width]: C before slice m; longest path from slice m on machine q to the end */
    double *clock, *time; /* scratch [width], [costs] */
    int *order;           /* scratch [units] */
    double latency;
    int64_t moves, asked; /* asked: steps since somebody was asked whether to stop (csrc/base/deadline.h) */
} tp_shop_line;

/* room: units. */
TP_MUST_USE tp_status
tp_shop_line_open(tp_arena *arena, const tp_shop *shop, const tp_shop_options *options, tp_shop_line *out);
void
tp_shop_line_set(tp_shop_line *line, const int *length, int slices);
/* Descend by moving, joining and halving slices until nothing helps or so many more machines' steps were done, or the thread is
 * told to stop. */
void
tp_shop_line_descend(tp_shop_line *line, int64_t work);
/* clock[width] of the labels' recurrence, advanced by one slice. */
void
tp_shop_advance(const tp_shop *shop, int start, int length, double *time, double *clock);
double
tp_shop_latency(const tp_shop *shop, const double *clock);
static inline int
tp_shop_allowed(const tp_shop *shop, const tp_shop_options *o, int start, int length)
{
    return length <= shop->units - start && (o->longest <= 0 || length <= o->longest) &&
           tp_slice_held(&o->memory, start, length);
}

/* ---- the bound (shop_bound.c) ------------------------------------------------------------------------------------ */

typedef struct {
    const tp_shop *shop;
    const tp_shop_options *options;
    int width;
    double *share;      /* [width][units + 1] N_q(e), the current mixture */
    double *best_share; /* that of the best bound */
    double *in, *out;   /* [costs][units + 1] of the current mixture: sums of N_{q-1}, of N_q */
    double *rest;       /* [units + 1] least mean path from token j on; of the best bound after tp_shop_bound_run */
    int *next;          /* [units + 1] */
    double *soft;       /* scratch [2][units + 1][width] */
    double *row;        /* scratch [costs][units + 1] */
    int *length;        /* [units] the slicing of the last programme */
    int slices;
    double best;        /* the bound */
    int64_t programmes, asked; /* asked: as of tp_shop_line */
} tp_shop_bound;

TP_MUST_USE tp_status
tp_shop_bound_open(tp_arena *arena, const tp_shop *shop, const tp_shop_options *options, tp_shop_bound *out);
/* From the slicing of the line on; better slicings found on the way are left in the line. Leaves `rest` and `best_share` of
 * the best bound. */
void
tp_shop_bound_run(tp_shop_bound *bound, tp_shop_line *line, int programmes);

/* ---- labels (shop_label.c) --------------------------------------------------------------------------------------- */

/* Exact, unless the work ends first: returns a bound of all slicings, which is the best latency if it is proven. A better
 * slicing is left in the line. bound: may be NULL. */
TP_MUST_USE tp_status
tp_shop_labels(tp_arena *arena, tp_shop_line *line, const tp_shop_bound *bound, int64_t work, int64_t *labels,
               double *bound_s);

#endif
