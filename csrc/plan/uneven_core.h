/* Inside tp_plan_uneven: times of slices between the cuts of a grid. Internal to the plan room. */
#ifndef TP_PLAN_UNEVEN_CORE_H
#define TP_PLAN_UNEVEN_CORE_H

#include "csrc/plan/slice_dp.h"
#include "csrc/plan/uneven.h"

typedef struct {
    const tp_uneven_request *request;
    tp_slice_arena *arena;
    int stages, width; /* width: machines, stages or, with backward, twice as many */
    int cap;           /* no slice of more units */
    int cuts;          /* cut 0 is at 0, cut `cuts` at the end */
    int *at;           /* [cuts + 1] units */
    double *edge;      /* [a < b][width] */
    double *rest;      /* [cuts + 1][width]: at least so long from when a machine is free at a cut to the end of its flow shop */
    double *both;      /* [cuts + 1][stages]: the same of forward and backward of one stage together; with backward */
    double *least;     /* [cuts + 1][width]: the shortest next slice of a machine */
    int64_t limit;     /* of plan->work */
    tp_uneven_plan *plan;
} tp_uneven;

static inline double
tp_uneven_at(const tp_uneven_request *r, int machine, int start, int length)
{
    const double *table = machine < r->stages ? r->forward : r->backward;
    size_t k = (size_t)(machine < r->stages ? machine : machine - r->stages), n = (size_t)r->units + 1;
    return table[(k * n + (size_t)length) * n + (size_t)start];
}

/* [width] times of the slice between two cuts. */
static inline double *
tp_uneven_edge(const tp_uneven *u, int a, int b)
{
    size_t row = (size_t)a * (size_t)u->cuts - (size_t)a * (size_t)(a - 1) / 2;
    return u->edge + (row + (size_t)(b - a - 1)) * (size_t)u->width;
}

/* One more slice: times at which the machines are free become later. */
static inline void
tp_uneven_advance(int stages, int width, const double *from, const double *slice, double *to)
{
    for (int first = 0; first < width; first += stages) {
        double free = 0.0;
        for (int k = first; k < first + stages; k++) {
            free = (from[k] > free ? from[k] : free) + slice[k];
            to[k] = free;
        }
    }
}

static inline double
tp_uneven_end(int stages, int width, const double *free)
{
    return free[stages - 1] + (width > stages ? free[width - 1] : 0.0);
}

/* Times and rests between cuts factor units apart. */
TP_MUST_USE tp_status
tp_uneven_open(tp_uneven *u, int factor);
/* Take this slicing if it is faster than the plan's. */
TP_MUST_USE tp_status
tp_uneven_offer(tp_uneven *u, const int *length, int slices);
/* Slicings from the stages' largest and mean times, for many largest slices (UB of the label search). */
TP_MUST_USE tp_status
tp_uneven_surrogate(tp_uneven *u);
/* The best slicing on the grid; *open_s is a bound over the grid: the latency, or less if the work ended. */
TP_MUST_USE tp_status
tp_uneven_labels(tp_uneven *u, double *open_s);
/* Move, split and join cuts of the plan while that helps. */
TP_MUST_USE tp_status
tp_uneven_improve(tp_uneven *u, int step);

#endif
