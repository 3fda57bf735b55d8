/* What the files of the exact search of one chunk share (bmpipe_exact.c, _lanes.c, _local.c, _proof.c). Internal to
 * csrc/plan/bmpipe*.c. */
#ifndef TP_PLAN_BMPIPE_EXACT_H
#define TP_PLAN_BMPIPE_EXACT_H

#include <math.h>

#include "csrc/plan/bmpipe_core.h"

#define TP_EXACT_ROWS 64 /* most inequalities of the search */

typedef struct tp_exact_lanes tp_exact_lanes;

typedef struct {
    double extra_s, most_s; /* E and max w of a suffix */
} tp_exact_label;

typedef struct {
    tp_exact_label *at;
    int count;
} tp_exact_labels;

typedef struct {
    tp_bmpipe_row row;
    double *rest;   /* [stages + 1][n + 1] least sum of the stages from here on */
    double *before; /* [stages + 1] lag and sum of the stages before, on the branch at hand */
    int64_t used;
} tp_exact_row;

typedef struct {
    double bound_s;
    int to;
} tp_exact_child;

/* qsort's: the lowest bound first, of equals the longer stage. */
static inline int
tp_exact_by_bound(const void *a, const void *b)
{
    const tp_exact_child *x = a, *y = b;
    if (x->bound_s != y->bound_s)
        return x->bound_s < y->bound_s ? -1 : 1;
    return y->to - x->to;
}

typedef struct {
    tp_bmpipe *p;
    int n, stages;
    double constant_s, least_most_s; /* F + B + messages; the least largest w of boundaries that fit, without extra seconds */
    int *reach;      /* [stages][n] the last end that a plan below the best may use; `from` itself: none */
    double **extra;  /* [stages][n] least extra seconds by end: [end - first_end] */
    tp_exact_labels *suffix; /* [stages + 1][n + 1] */
    tp_exact_label *scratch;  /* [LABELS + 1] */
    tp_exact_row *rows;
    int row_count;
    tp_exact_child *children; /* [stages][n] */
    double best_s;
    int *cut, *best_cut; /* [stages + 1] */
    int unsure;          /* a leaf took more extra time than its bound, for want of points */
    int whole, done;     /* all seconds are whole numbers, sums of them exact; there is a proof that the best is */
    int64_t prove_at;    /* nodes: not before */
    tp_exact_lanes *lanes; /* of a search that goes on for long; NULL */
    int anew, strict;    /* there were too many inequalities for lanes; this search is the one without */
} tp_exact;

static inline size_t
tp_exact_cell(const tp_exact *e, int stage, int from)
{
    return (size_t)stage * (size_t)e->n + (size_t)from;
}

static inline int
tp_exact_first_end(const tp_exact *e, int stage, int from)
{
    return stage == e->stages - 1 ? e->n : from + 1;
}

static inline double
tp_exact_goal(const tp_exact *e)
{
    return e->best_s * (1.0 - TP_BMPIPE_SLACK);
}

static inline double
tp_exact_weight(const tp_exact *e, int stage, int from, int to, double extra_s)
{
    int m = e->p->micros, full = m - e->stages + stage;
    return (m - 1) * (tp_bmpipe_between(e->p->backward_s, from, to) + extra_s) +
           (full > 0 ? full * tp_bmpipe_between(e->p->forward_s, from, to) : 0.0);
}

static inline double
tp_exact_extra(const tp_exact *e, int stage, int from, int to)
{
    return e->extra[tp_exact_cell(e, stage, from)][to - tp_exact_first_end(e, stage, from)];
}

/* The least E + max(w, most) from here on, given what is before; +inf: no plan below the best. */
static inline double
tp_exact_bound(const tp_exact *e, int stage, int from, double extra_s, double most_s)
{
    const tp_exact_labels *rest = &e->suffix[(size_t)stage * (size_t)(e->n + 1) + (size_t)from];
    double least = INFINITY;
    for (int k = 0; k < rest->count; k++) {
        double most = rest->at[k].most_s > most_s ? rest->at[k].most_s : most_s;
        double sum = rest->at[k].extra_s + most;
        least = sum < least ? sum : least;
    }
    return e->constant_s + extra_s + least;
}

static inline double
tp_exact_cost(const tp_exact *e, const tp_exact_row *q, int stage, int from, int to)
{
    return q->row.run[stage] * tp_bmpipe_between(e->p->forward_s, from, to) +
           q->row.run[e->stages + stage] * (tp_bmpipe_between(e->p->backward_s, from, to) + tp_exact_extra(e, stage, from, to));
}

/* ---- bmpipe_exact.c ----------------------------------------------------------------------------------------------------- */
/* Seconds of a stage of a plan; *backward_s +inf: no strategy fits. */
TP_MUST_USE tp_status
tp_exact_load(tp_exact *e, int stage, int from, int to, double *forward_s, double *backward_s);
/* e->cut is the best plan, if it takes less than that. */
void
tp_exact_keep(tp_exact *e, double makespan_s);
/* Simulates the boundaries e->cut; +inf if a stage has no strategy that fits. */
TP_MUST_USE tp_status
tp_exact_simulate(tp_exact *e, double *makespan_s);
TP_MUST_USE tp_status
tp_exact_row_open(tp_exact *e, tp_exact_row *q);
/* The path of the last simulation. */
TP_MUST_USE tp_status
tp_exact_row_fill(tp_exact *e, tp_exact_row *q);
/* Of the first `depth` stages as cut, all within reach. */
void
tp_exact_row_before(const tp_exact *e, tp_exact_row *q, int depth);

/* ---- bmpipe_lanes.c ----------------------------------------------------------------------------------------------------- */
/* Of the rows there are, before[] up to `depth` as they have it. */
TP_MUST_USE tp_status
tp_exact_lanes_open(tp_exact *e, int depth);
/* The last row is new: all stages are set. */
void
tp_exact_lanes_add(tp_exact *e);
/* 1: some inequality ends the branch where stages 0 .. stage are set. */
int
tp_exact_lanes_end(tp_exact *e, int stage, int to);

/* ---- bmpipe_local.c ----------------------------------------------------------------------------------------------------- */
/* From the best plan on: boundaries a .. b one layer earlier or later, first improvement, until none. */
TP_MUST_USE tp_status
tp_exact_improve(tp_exact *e);

/* ---- bmpipe_proof.c ----------------------------------------------------------------------------------------------------- */
/* Is no plan within reach better than the best? e->whole; *proven 0: there may be one. */
TP_MUST_USE tp_status
tp_exact_prove(tp_exact *e, int *proven);

#endif
