/* Token slices with separate forward and backward costs: least sum (f + b) + (K-1) (max f + max b), PLANNERS.md 1.6.
 * Branch and bound over boxes of (max f, max b). A box's search over all slices within its upper corner gives the least
 * sum, so it can hold nothing better unless low + low <= (goal - sum) / (K-1); that also pulls its upper corner in. */
#include "csrc/plan/plan.h"

#include <math.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/plan/slice_dp.h"

#define SMALL_BOX 0.02  /* relative size of a box that is finished in the reduced graph */
#define EDGE_ROOM 12000 /* with more edges it is better to split the box */

typedef struct {
    double low[2], high[2]; /* low <= max f, max b <= high */
    double bound;           /* no plan in the box is faster */
} box;

typedef struct {
    const tp_slice_cost *forward, *backward;
    tp_slice_dp dp;
    tp_slice_edges edges;
    double *rest[2]; /* smooth: the least g1 of this and all greater lengths */
    int *length, count;
    box *stack;
    int boxes, room;
    tp_arena *arena;
    double best, tolerance, deadline_s;
    tp_slice_plan *plan;
} apart;

static double
goal_of(const apart *a)
{
    return a->best - a->tolerance * a->best;
}

static tp_status
push(apart *a, const box *b)
{
    if (a->boxes == a->room) {
        void *memory;
        TP_TRY(tp_arena_take(a->arena, 2 * (size_t)a->room + 64, sizeof(box), &memory));
        if (a->boxes > 0)
            memcpy(memory, a->stack, (size_t)a->boxes * sizeof(box));
        a->stack = memory;
        a->room = 2 * a->room + 64;
    }
    a->stack[a->boxes++] = *b;
    return TP_OK;
}

/* The largest costs of the path just found; a better plan is kept. */
static void
settle(apart *a, double largest[2])
{
    double total = 0.0, latency;
    int start = 0;
    largest[0] = largest[1] = 0.0;
    for (int k = a->count - 1; k >= 0; start += a->length[k--]) {
        total += tp_slice_at(&a->dp.sum, start, a->length[k]);
        for (int l = 0; l < 2; l++)
            largest[l] = fmax(largest[l], tp_slice_at(&a->dp.limit[l], start, a->length[k]));
    }
    latency = total + a->dp.weight * (largest[0] + largest[1]);
    if (!(latency < a->best))
        return;
    a->best = latency;
    a->plan->slices = a->count;
    for (int k = 0; k < a->count; k++)
        a->plan->length[k] = a->length[a->count - 1 - k];
}

static double
search(apart *a, const double high[2], double largest[2])
{
    double least = tp_slice_dp_forward(&a->dp, high);
    a->plan->searches++;
    if (least < INFINITY) {
        a->count = tp_slice_dp_path(&a->dp, a->length);
        settle(a, largest);
    }
    return least;
}

/* ---- a large forward slice is a large backward slice ------------------------------------------------------------- */

/* The least cost in `other` of a slice whose cost in `one` is at least low, within the last windows. */
static double
least_other_smooth(const apart *a, int one, double low)
{
    const tp_slice_dp *dp = &a->dp;
    const tp_slice_table *t = &dp->limit[one], *o = &dp->limit[1 - one];
    double least = INFINITY;
    int n = dp->n, first = dp->cap + 1;
    for (int i = 1; i <= dp->last[0]; i++)
        if (t->g0[i] >= low)
            least = fmin(least, o->g0[i]);
    for (int j = 1; j < n; j++) {
        while (first > 1 && t->top[first - 1] + t->a2 * j + t->a3 * ((double)(first - 1) * j) >= low)
            first--;
        if (first <= dp->last[j])
            least = fmin(least, a->rest[1 - one][first] + o->a2 * j + o->a3 * ((double)first * j));
    }
    return least;
}

static double
least_other_dense(const apart *a, int one, double low)
{
    double least = INFINITY;
    for (int j = 0; j < a->dp.n; j++) {
        const double *t = tp_slice_row(&a->dp.limit[one], j), *o = tp_slice_row(&a->dp.limit[1 - one], j);
        least = fmin(least, a->dp.kernels->least_beyond(o + 1, t + 1, low, a->dp.last[j]));
    }
    return least;
}

static void
correlate(const apart *a, box *b)
{
    const tp_slice_table *f = &a->dp.limit[0], *g = &a->dp.limit[1];
    if (a->dp.sum.smooth && !(f->a2 >= 0.0 && f->a3 >= 0.0 && g->a2 >= 0.0 && g->a3 >= 0.0))
        return; /* the walking pointers need costs that rise with the context */
    for (int one = 0; one < 2; one++) {
        double low = b->low[one];
        double least = a->dp.sum.smooth ? least_other_smooth(a, one, low) : least_other_dense(a, one, low);
        b->low[1 - one] = fmax(b->low[1 - one], least * (1.0 - 1e-15));
    }
}

/* ---- boxes ------------------------------------------------------------------------------------------------------- */

/* Pull the upper corner in; 0 if nothing better is left. *shrunk: the largest relative step. */
static int
tighten(const apart *a, double least, box *b, double *shrunk)
{
    double room = (goal_of(a) - least) / a->dp.weight;
    *shrunk = 0.0;
    b->bound = least + a->dp.weight * (b->low[0] + b->low[1]);
    if (!(b->low[0] + b->low[1] < room))
        return 0;
    for (int l = 0; l < 2; l++) {
        double high = room - b->low[1 - l];
        if (high >= b->high[l])
            continue;
        *shrunk = fmax(*shrunk, isinf(b->high[l]) ? 1.0 : (b->high[l] - high) / b->high[l]);
        b->high[l] = high;
    }
    return 1;
}

/* Finish the box in the reduced graph. With (mf, mb) the largest costs of the best path found there, a better plan has
 * max f < mf, or max f >= mf and max b < mb. */
static tp_status
finish(apart *a, const box *start)
{
    int base = a->boxes;
    TP_TRY(push(a, start));
    while (a->boxes > base) {
        box b = a->stack[--a->boxes];
        double largest[2], shrunk, least = tp_slice_edges_search(&a->edges, a->dp.n, 2, b.high);
        a->plan->small_searches++;
        if (least == INFINITY)
            continue;
        a->count = tp_slice_edges_path(&a->edges, a->dp.n, a->length);
        settle(a, largest);
        if (!tighten(a, least, &b, &shrunk))
            continue;
        box right = b;
        right.low[0] = fmax(b.low[0], largest[0]);
        right.high[1] = fmin(b.high[1], nextafter(largest[1], -INFINITY));
        b.high[0] = fmin(b.high[0], nextafter(largest[0], -INFINITY));
        if (right.low[0] <= right.high[0] && right.low[1] <= right.high[1])
            TP_TRY(push(a, &right));
        if (b.low[0] <= b.high[0])
            TP_TRY(push(a, &b));
    }
    return TP_OK;
}

static tp_status
split(apart *a, const box *b, const double width[2])
{
    int l = width[0] / b->high[0] >= width[1] / b->high[1] ? 0 : 1;
    box low = *b, high = *b;
    low.high[l] = high.low[l] = b->low[l] + 0.5 * width[l];
    TP_TRY(push(a, &high));
    return push(a, &low);
}

static tp_status
examine(apart *a, box b)
{
    double largest[2], shrunk, least;
    do {
        if (b.bound >= goal_of(a) || b.low[0] > b.high[0] || b.low[1] > b.high[1])
            return TP_OK;
        a->plan->boxes++;
        least = search(a, b.high, largest);
        if (least == INFINITY)
            return TP_OK;
        correlate(a, &b);
        if (!tighten(a, least, &b, &shrunk))
            return TP_OK;
    } while (shrunk > 0.03);
    double width[2] = {b.high[0] - b.low[0], b.high[1] - b.low[1]};
    if (width[0] + width[1] < SMALL_BOX * (b.high[0] + b.high[1])) {
        tp_slice_dp_backward(&a->dp);
        if (tp_slice_edges_keep(&a->dp, b.low, NULL, goal_of(a), &a->edges)) {
            a->plan->edges = a->edges.count > a->plan->edges ? a->edges.count : a->plan->edges;
            return finish(a, &b);
        }
    }
    return split(a, &b, width);
}

static tp_status
run_boxes(apart *a)
{
    box all = {.high = {INFINITY, INFINITY}};
    for (int l = 0; l < 2; l++)
        all.low[l] = tp_slice_dp_last_slice(&a->dp, l);
    TP_TRY(push(a, &all));
    a->plan->optimal = 1;
    a->plan->lower_bound_s = goal_of(a);
    while (a->boxes > 0) {
        box b = a->stack[--a->boxes];
        if (a->deadline_s > 0.0 && 1e-9 * (double)tp_clock_ns() > a->deadline_s) {
            a->plan->optimal = 0;
            a->plan->lower_bound_s = fmin(a->plan->lower_bound_s, b.bound);
            continue;
        }
        TP_TRY(examine(a, b));
    }
    a->plan->lower_bound_s = fmin(a->plan->optimal ? goal_of(a) : a->plan->lower_bound_s, goal_of(a));
    return TP_OK;
}

/* ---- where to begin ---------------------------------------------------------------------------------------------- */

static double
latency_at(apart *a, const double scale[2], double largest[2])
{
    double least = search(a, scale, largest);
    return least == INFINITY ? INFINITY : least + a->dp.weight * (largest[0] + largest[1]);
}

/* Golden section over s in [low, high] of the thresholds s * corner[]; only for a good first plan. */
static void
probe(apart *a, const double corner[2], double low, double high, int steps)
{
    double largest[2];
    for (int k = 0; k < steps; k++) {
        double x = high - 0.6180339887498949 * (high - low), y = low + high - x;
        const double at_x[2] = {x * corner[0], x * corner[1]}, at_y[2] = {y * corner[0], y * corner[1]};
        if (latency_at(a, at_x, largest) <= latency_at(a, at_y, largest))
            high = y;
        else
            low = x;
    }
}

static void
begin(apart *a, double hint[2])
{
    double largest[2];
    a->best = INFINITY;
    for (int k = 0; k < 32 && (hint[0] > 0.0 || hint[1] > 0.0); k++) { /* more is needed where coarse units leave a rest */
        if (search(a, hint, largest) < INFINITY) {
            probe(a, hint, 0.985, 1.01, 3);
            return;
        }
        hint[0] *= 1.02;
        hint[1] *= 1.02;
    }
    const double all[2] = {INFINITY, INFINITY};
    search(a, all, largest);
    if (a->dp.weight > 0.0)
        probe(a, largest, 0.0, 1.0, 8);
}

/* The thresholds that are best at a coarser granularity are close to the best here; 0: none. most: no slice that costs more is
 * part of a better plan. */
static tp_status
coarse_hint(const apart *a, const tp_slice_options *options, double hint[2], double *most);

static tp_status
open_apart(apart *a, const tp_slice_options *options, double most)
{
    int n = a->forward->units;
    int64_t pairs = (int64_t)n * (n + 1) / 2;
    void *memory;
    TP_TRY(tp_slice_dp_open(a->arena, a->forward, a->backward, options, most, &a->dp));
    TP_TRY(tp_slice_edges_open(a->arena, n, pairs < EDGE_ROOM ? pairs : EDGE_ROOM, &a->edges));
    TP_TRY(tp_arena_take(a->arena, (size_t)n, sizeof(int), &memory));
    a->length = memory;
    for (int l = 0; a->dp.sum.smooth && l < 2; l++) {
        TP_TRY(tp_arena_take(a->arena, (size_t)n + 2, sizeof(double), &memory));
        a->rest[l] = memory;
        a->rest[l][a->dp.cap + 1] = INFINITY;
        for (int i = a->dp.cap; i >= 1; i--)
            a->rest[l][i] = fmin(a->rest[l][i + 1], a->dp.limit[l].g1[i]);
    }
    return TP_OK;
}

static tp_status
run_apart(apart *a, const tp_slice_options *options)
{
    double hint[2] = {0.0, 0.0}, most = INFINITY;
    TP_TRY(coarse_hint(a, options, hint, &most));
    TP_TRY(open_apart(a, options, most));
    begin(a, hint);
    double quadratic = fabs(a->dp.sum.q[a->dp.n]);
    a->tolerance = 1e-12 + 2.2e-16 * (a->dp.n + (a->dp.n + a->dp.weight) * quadratic / fmax(a->best, 1e-300));
    if (a->dp.weight > 0.0)
        return run_boxes(a);
    a->plan->optimal = 1;
    a->plan->lower_bound_s = goal_of(a);
    return TP_OK;
}

static tp_status
solve(const tp_slice_cost *forward, const tp_slice_cost *backward, const tp_slice_options *options, double deadline_s,
      tp_slice_plan *plan)
{
    tp_arena arena;
    apart a = {.forward = forward, .backward = backward, .arena = &arena, .plan = plan, .deadline_s = deadline_s};
    TP_TRY(tp_slice_plan_open(1, forward->units, plan));
    tp_status status = tp_arena_open(&arena);
    if (status == TP_OK) {
        status = run_apart(&a, options);
        tp_arena_close(&arena);
    }
    if (status != TP_OK) {
        tp_slice_plan_free(plan);
        return status;
    }
    plan->groups = 1;
    plan->group[0] = (tp_slice_group){1, 0, plan->slices};
    return TP_OK;
}

static tp_status
coarse_hint(const apart *a, const tp_slice_options *options, double hint[2], double *most)
{
    enum { FINE = 256, FACTOR = 8 };
    int longest = options->longest > 0 ? options->longest / FACTOR : 0, n = a->forward->units;
    if (n <= FINE || options->stages == 1 || (options->longest > 0 && longest == 0))
        return TP_OK;
    tp_slice_cost forward, backward, message;
    tp_slice_options coarse = *options;
    tp_slice_plan plan;
    coarse.longest = longest;
    if (!tp_slice_memory_coarsen(&options->memory, FACTOR, n / FACTOR, &coarse.memory))
        return TP_OK;
    TP_TRY(tp_slice_cost_coarsen(a->arena, a->forward, FACTOR, &forward));
    TP_TRY(tp_slice_cost_coarsen(a->arena, a->backward, FACTOR, &backward));
    if (options->message != NULL) {
        TP_TRY(tp_slice_cost_coarsen(a->arena, options->message, FACTOR, &message));
        coarse.message = &message;
    }
    TP_TRY(solve(&forward, &backward, &coarse, a->deadline_s, &plan));
    if (tp_slice_plan_evaluate(&forward, &backward, &coarse, &plan) != TP_OK)
        return TP_OK;
    *most = tp_slice_most(&plan, options, n, FACTOR);
    for (int k = 0, start = 0; k < plan.slices; start += plan.length[k++]) {
        double sent = options->message != NULL ? tp_slice_cost_at(&message, start, plan.length[k]) : 0.0;
        hint[0] = fmax(hint[0], tp_slice_cost_at(&forward, start, plan.length[k]) + sent);
        hint[1] = fmax(hint[1], tp_slice_cost_at(&backward, start, plan.length[k]) + sent);
    }
    a->plan->searches += plan.searches;
    a->plan->small_searches += plan.small_searches;
    tp_slice_plan_free(&plan);
    return TP_OK;
}

tp_status
tp_plan_slices_apart(const tp_slice_cost *forward, const tp_slice_cost *backward, const tp_slice_options *options,
                     tp_slice_plan *out)
{
    double start = 1e-9 * (double)tp_clock_ns();
    if (forward->units != backward->units)
        return tp_fail(TP_EVALUE, "the forward costs have %d units and the backward costs %d: the same is needed",
                       forward->units, backward->units);
    TP_TRY(tp_slice_options_check(forward, options));
    tp_slice_plan plan;
    TP_TRY(solve(forward, backward, options, options->time_limit_s > 0.0 ? start + options->time_limit_s : 0.0, &plan));
    TP_TRY(tp_slice_plan_evaluate(forward, backward, options, &plan));
    plan.lower_bound_s = fmin(plan.lower_bound_s, plan.latency_s);
    plan.seconds = 1e-9 * (double)tp_clock_ns() - start;
    *out = plan;
    return TP_OK;
}
