/* What the files of the BMPipe planner share. Internal to csrc/plan/bmpipe*.c. */
#ifndef TP_PLAN_BMPIPE_CORE_H
#define TP_PLAN_BMPIPE_CORE_H

#include "csrc/plan/arena.h"
#include "csrc/plan/bmpipe.h"
#include "csrc/sched/sched.h"

#define TP_BMPIPE_CHOICES 64   /* most strategies of a type */
#define TP_BMPIPE_POINTS 4096  /* most points of a front */
#define TP_BMPIPE_SLACK 1e-12 /* relative: sums of doubles that should be equal may differ by less */

/* What an interval of layers may keep, and the least extra backward time for it: bytes rise, extra falls. */
typedef struct {
    double bytes, extra_s;
    int32_t parent, strategy; /* point of the interval without its last layer, and that layer's strategy */
} tp_bmpipe_point;
typedef struct tp_bmpipe_front {
    const struct tp_bmpipe_front *parent;
    tp_bmpipe_point *point;
    int count, type; /* type: of the last layer */
    int exact;       /* 0: too many points, some were dropped */
} tp_bmpipe_front;

/* makespan >= sum run[v] F_v + run[virtual + v] B_v + lag_s, whatever the plan. */
typedef struct {
    double *run; /* [2 * virtual] */
    double lag_s;
} tp_bmpipe_row;

typedef struct {
    const tp_bmpipe_layers *layers;
    const tp_bmpipe_options *options;
    tp_arena *arena;
    int n, stages, chunks, virtuals, micros;
    int32_t *type_of, *run_begin;   /* [n] type of a layer, first layer of its type */
    double *forward_s, *backward_s, *static_bytes, *least_bytes; /* [n + 1] sums of what comes before; least_bytes: fewest kept */
    int32_t *vector_begin, *vector; /* [stages + 1]; [vectors][chunks] micro-batches in flight */
    tp_bmpipe_front **front;        /* [n * (n + 1)] made when asked for */
    tp_bmpipe_front *nothing;
    tp_bmpipe_point *merge;         /* room for one merge */
    int64_t points;                 /* made so far */
    tp_sim *sim;
    tp_durations durations;
    double *load, *link_s;          /* [2 * virtuals] F then B, what sim reads; [virtuals] */
    int64_t *path;                  /* [TP_OPS * virtuals] */
    int64_t evaluations, simulations, nodes;
    int64_t deadline_ns;            /* of what is done now; 0: none */
    int64_t end_ns;                 /* of all; 0: none */
    int late;                       /* the deadline has passed */
    int64_t asked;                  /* steps since somebody was asked whether to stop */
} tp_bmpipe;

/* ---- bmpipe.c, bmpipe_groups.c ------------------------------------------------------------------------------------------- */
/* The plan of these layers as they are. */
TP_MUST_USE tp_status
tp_bmpipe_plan_alone(const tp_bmpipe_layers *layers, const tp_bmpipe_options *options, tp_bmpipe_plan *out);
/* *best, which began to be made at start_ns, becomes the fastest plan that keeps layers in groups, found as if these were asked
 * for, where it is faster. */
TP_MUST_USE tp_status
tp_bmpipe_or_groups(const tp_bmpipe_layers *layers, const tp_bmpipe_options *options, int64_t start_ns, tp_bmpipe_plan *best);

/* ---- bmpipe_core.c ------------------------------------------------------------------------------------------------------ */
TP_MUST_USE tp_status
tp_bmpipe_take(tp_bmpipe *p, size_t count, size_t size, void **out);
TP_MUST_USE tp_status
tp_bmpipe_open(const tp_bmpipe_layers *layers, const tp_bmpipe_options *options, tp_arena *arena, tp_bmpipe *out);
void
tp_bmpipe_close(tp_bmpipe *p); /* what the arena does not hold */
/* Of p->load. */
double
tp_bmpipe_simulate(tp_bmpipe *p);
/* A critical path of the last simulation. */
void
tp_bmpipe_last_path(tp_bmpipe *p, tp_bmpipe_row *row);
double
tp_bmpipe_row_value(const tp_bmpipe *p, const tp_bmpipe_row *row, const double *load);
int
tp_bmpipe_is_late(tp_bmpipe *p);
/* Bytes of a stage: static + the worst vector in flight of kept[chunks] bytes. */
double
tp_bmpipe_bytes(const tp_bmpipe *p, int stage, double static_bytes, const double *kept);
static inline int
tp_bmpipe_fits(const tp_bmpipe *p, double bytes)
{
    return bytes <= p->options->memory_bytes * (1.0 + TP_BMPIPE_SLACK);
}
static inline size_t
tp_bmpipe_cells(const tp_bmpipe *p) /* of an assignment */
{
    return (size_t)p->layers->types * (size_t)p->layers->strategies * (size_t)p->virtuals;
}
static inline double
tp_bmpipe_between(const double *sums, int from, int to)
{
    return sums[to] - sums[from];
}

/* ---- bmpipe_front.c ----------------------------------------------------------------------------------------------------- */
/* Layers from .. to, at least one. */
TP_MUST_USE tp_status
tp_bmpipe_front_of(tp_bmpipe *p, int from, int to, const tp_bmpipe_front **out);
/* Intervals of the same layers have the same key: the first layer of an interval within a type is the type's first. */
static inline int
tp_bmpipe_canonical(const tp_bmpipe *p, int from, int to)
{
    return p->type_of[from] == p->type_of[to - 1] ? p->run_begin[from] : from;
}
/* The point of least extra time that keeps at most `bytes`; -1: none. */
int
tp_bmpipe_front_find(const tp_bmpipe_front *front, double bytes);
/* A lower bound on the least extra time of the interval within `bytes`, by fractional strategies; +inf if nothing fits. */
double
tp_bmpipe_fractional(const tp_bmpipe *p, int from, int to, double bytes);
/* Adds the strategies of a point to assignment[types][strategies][chunks][stages]. */
void
tp_bmpipe_assign(const tp_bmpipe *p, const tp_bmpipe_front *front, int point, int virtual_stage, int32_t *assignment);

/* ---- solvers: an assignment (zeroed before) and a bound ------------------------------------------------------------------ */
typedef struct {
    double makespan_s, bound_s;
    int proven;
    int64_t paths;
} tp_bmpipe_found;
TP_MUST_USE tp_status
tp_bmpipe_exact(tp_bmpipe *p, int32_t *assignment, tp_bmpipe_found *found);
TP_MUST_USE tp_status
tp_bmpipe_search(tp_bmpipe *p, int32_t *assignment, tp_bmpipe_found *found);

#endif
