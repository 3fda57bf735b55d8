/* One table of slice costs, prepared for many shortest-path searches under a falling threshold. Internal to csrc/plan. */
#ifndef TP_PLAN_SLICE_DP_H
#define TP_PLAN_SLICE_DP_H

#include <math.h>
#include <stddef.h>

#include "csrc/plan/arena.h"
#include "csrc/plan/slice_kernel.h"

#define TP_SLICE_LEVELS 8 /* thresholds whose windows dense tables remember */

typedef struct {
    int n, smooth;
    double a2, a3;
    const double *g0, *g1;  /* smooth */
    double *top;            /* smooth: the running maximum of g1, +inf if a2 or a3 is negative */
    int rising, monotone;   /* smooth: a2, a3 >= 0; g1 never falls either, so that the window has no holes */
    double *h0, *h;         /* smooth: g - a3 i^2 / 2 by slice length; +inf beyond the cap */
    double shortest;        /* smooth: the least h of the lengths below a block */
    double *rows;           /* dense: one row per start, as long as a plan may need it; +inf beyond the cap */
    const size_t *row;      /* dense: [n + 1] where they begin; +inf up to the next one */
    double *peaks;          /* dense: by block of lengths, the largest cost of its row up to there */
    double *q;              /* a3 e^2 / 2 (dense: 0) */
} tp_slice_table;

/* Of one start of a dense table: the last length within the thresholds, and how many blocks of lengths are all within them; the
 * costs at the end of either. */
typedef struct {
    int last, blocks;
    double at_last[TP_SLICE_LIMITS], peak[TP_SLICE_LIMITS];
} tp_slice_window;

/* A search minimises the sum of `sum` over slices whose cost in every `limit` is within that limit's threshold. */
typedef struct {
    int n, cap, limits, weighted; /* limits: masks; the first `weighted` of them are part of the latency */
    double weight; /* K - 1 */
    tp_slice_table sum, limit[TP_SLICE_LIMITS];
    double threshold[TP_SLICE_LIMITS]; /* of the last forward search */
    double most_bytes;   /* threshold of the memory limit, if it is one */
    int *last, *safe;    /* by start: no longer slice is within the thresholds; all up to this length are */
    tp_slice_window *level; /* dense: [TP_SLICE_LEVELS][n] the windows of the thresholds at[], which fall */
    double at[TP_SLICE_LEVELS][TP_SLICE_LIMITS];
    int levels;
    int *far;            /* by start: no slice from it or an earlier one (but 0) ends beyond, in the last search */
    double *u, *w;       /* u[e] = F[e] - q[e] forward, w[e] = B[e] + q[e] backward: u + w is the best path through e */
    const tp_slice_kernels *kernels;
    int64_t asked;  /* steps since somebody was asked whether to stop (csrc/base/deadline.h) */
    int convex;     /* sum.h is, up to this length, and the queue pays (slice_monge.c); 0: kernels search */
    int *queue;     /* [2][n + 1] */
    double *source; /* [n + 1] */
} tp_slice_dp;

/* The edges that a plan better than the goal may use. */
typedef struct {
    int64_t count, room;
    int *from, *to;
    double *sum, *limit[2];
    double *key, *order; /* the floor from which on the edge is not needed; scratch */
    double *dist, *tail; /* [n + 1] from the start, to the end */
    int64_t *parent; /* [n + 1] */
    int *pick;       /* [n + 1] and padding: scratch */
} tp_slice_edges;

static inline double
tp_slice_at(const tp_slice_table *t, int start, int length)
{
    if (!t->smooth) {
        size_t at = t->row[start] + (size_t)length - 1;
        return at < t->row[start + 1] ? t->rows[at] : INFINITY;
    }
    return start == 0 ? t->g0[length] : t->g1[length] + t->a2 * start + t->a3 * ((double)length * start);
}

/* The same cost before it is made ready. */
static inline double
tp_slice_cost_at(const tp_slice_cost *c, int start, int length)
{
    if (c->table != NULL)
        return c->table[(size_t)length * (size_t)(c->units + 1) + (size_t)start];
    return start == 0 ? c->g0[length] : c->g1[length] + c->a2 * start + c->a3 * ((double)length * start);
}

/* What searches add up, by length: index 1 is the slice of one unit. Dense: no longer than the row. */
static inline const double *
tp_slice_row(const tp_slice_table *t, int start)
{
    if (!t->smooth)
        return t->rows + t->row[start] - 1;
    return start == 0 ? t->h0 : t->h;
}

/* backward NULL: one table, which is sum and limit. Otherwise the sum of both, a limit for each, and one for the sum. A message
 * of the options is in the limits of either, not in the sum. A memory limit is one more limit, or plain infinities in a dense
 * table. Slices whose part of the sum is more than `most` need not be looked at. */
TP_MUST_USE tp_status
tp_slice_dp_open(tp_arena *arena, const tp_slice_cost *cost, const tp_slice_cost *backward,
                 const tp_slice_options *options, double most, tp_slice_dp *dp);
/* The least sum within the thresholds [limits]; +inf if there is none, or if the thread is told to stop. */
double
tp_slice_dp_forward(tp_slice_dp *dp, const double *threshold);
/* The first part of it: the windows of these thresholds (slice_windows.c). */
void
tp_slice_windows(tp_slice_dp *dp, const double *threshold);
/* About how many seconds it takes, where that is more than a moment, by costs that are smooth; else 0. */
double
tp_slice_search_s(const tp_slice_dp *dp, const double *threshold);
/* The parts of it for Monge costs (slice_monge.c): the last length up to which the table is convex; whether the last windows
 * allow the queue; the search itself, after u of the first slices was set. */
int
tp_slice_convex(const tp_slice_table *t, int n);
int
tp_slice_monge_fits(const tp_slice_dp *dp);
void
tp_slice_monge_forward(tp_slice_dp *dp);
/* The slices of that sum, last first, into length[]; returns how many. Among equals the cheapest slice is taken. */
int
tp_slice_dp_path(const tp_slice_dp *dp, int *length);
/* Distances to the end within the thresholds of the last forward search; not all where the thread is told to stop. */
void
tp_slice_dp_backward(tp_slice_dp *dp);
/* A lower bound on the last slice's cost in limit l: no threshold below it is feasible. */
double
tp_slice_dp_last_slice(const tp_slice_dp *dp, int l);

/* ---- shared by the planners -------------------------------------------------------------------------------------- */

TP_MUST_USE tp_status
tp_slice_options_check(const tp_slice_cost *cost, const tp_slice_options *options);
/* No slice that costs more is part of a better plan than this one: it is once in the sum, and stages - 1 times in what the
 * largest slice adds. coarse: evaluated; its units are `factor` times as long. */
static inline double
tp_slice_most(const tp_slice_plan *coarse, const tp_slice_options *options, int units, int factor)
{
    return units % factor == 0 ? coarse->latency_s / options->stages * (1.0 + 1e-9) : INFINITY;
}
/* Units `factor` times as long; the units left over at the end are dropped. */
TP_MUST_USE tp_status
tp_slice_cost_coarsen(tp_arena *arena, const tp_slice_cost *cost, int factor, tp_slice_cost *out);
TP_MUST_USE tp_status
tp_slice_plan_open(int groups, int64_t slices, tp_slice_plan *plan);
/* Set total, max and latency from the costs that the caller gave. EVALUE: no slicing has one that a double holds; the plan is
 * freed. */
TP_MUST_USE tp_status
tp_slice_plan_evaluate(const tp_slice_cost *cost, const tp_slice_cost *backward, const tp_slice_options *options,
                       tp_slice_plan *plan);
static inline double
tp_slice_bytes(const tp_slice_memory *m, int start, int length)
{
    double end = (double)start + length;
    return m->row_bytes * length + m->pair_bytes * ((double)length * end) + m->context_bytes * end;
}
/* The same in units `factor` times as long; 0 if a slice of one such unit does not fit. */
static inline int
tp_slice_memory_coarsen(const tp_slice_memory *m, int factor, int units, tp_slice_memory *out)
{
    *out = (tp_slice_memory){m->limit_bytes, m->row_bytes * factor, m->pair_bytes * factor * factor,
                             m->context_bytes * factor};
    return m->limit_bytes <= 0.0 || tp_slice_bytes(out, units - 1, 1) <= m->limit_bytes;
}
/* Whether a slice is within the memory, with room for the rounding of the sums. */
static inline int
tp_slice_held(const tp_slice_memory *m, int start, int length)
{
    return m->limit_bytes <= 0.0 || tp_slice_bytes(m, start, length) <= m->limit_bytes * (1.0 + 1e-12);
}

/* ---- the reduced graph (slice_edges.c) --------------------------------------------------------------------------- */

/* Room for tp_slice_edges_keep, and, if tp_slice_edges_narrow is to follow, in all. *edges is zeros, or has key and order of
 * others with as much room, which are only used while edges are kept. */
TP_MUST_USE tp_status
tp_slice_edges_open(tp_arena *arena, int n, int64_t room, int64_t all, tp_slice_edges *edges);
/* After a forward and a backward search: keep the edges of plans whose largest costs are at least floor[0] and floor[1],
 * together floor[2] (one table: floor[0] alone), and whose latency is below goal. With a ceiling, the last of them is raised
 * towards it until the edges fit. 0 if they do not. */
int
tp_slice_edges_keep(const tp_slice_dp *dp, double floor[3], const double *ceiling, double goal, tp_slice_edges *edges);
double
tp_slice_edges_search(tp_slice_edges *edges, int n, int limits, const double *threshold);
int
tp_slice_edges_path(const tp_slice_edges *edges, int n, int *length);
/* After tp_slice_edges_search with these three thresholds: the edges of plans whose largest costs are at least floor[], as
 * above, behind those of `edges`, in the room that they leave. 0: there is not enough. */
int
tp_slice_edges_narrow(const tp_slice_edges *edges, int n, const double threshold[3], const double floor[3], double weight,
                      double goal, tp_slice_edges *out);

#endif
