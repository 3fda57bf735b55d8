/* Token slices with separate forward and backward costs: least sum (f + b) + (K-1) (max f + max b), PLANNERS.md 1.6.
 * Branch and bound over boxes of max f, max b and max f + max b. A box's search over all slices within its upper corner, of
 * which none costs more than max f + max b in f + b, gives the least sum, so it can hold nothing better unless max f + max b
 * <= (goal - sum) / (K-1); that also pulls its upper corner in. Where f and b rise together this alone is the descending walk
 * of one table (slice.c). Where they do not, the path found may need more of f and b than the box has room for together: the
 * box is cut into two that do not hold the path. */
#include "csrc/plan/plan.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"
#include "csrc/plan/slice_dp.h"

#define EDGE_ROOM 24000 /* edges of the reduced graph; with more, searches over all slices are as cheap */
#define DEEP 3e-2       /* the reduced graph is made for at most this part of its box, from the top */
#define FIRST_DEEP 3e-3 /* and at first for this part */
#define NEAR 5e-3       /* it is tried where a path's relative excess over its box is below this */
#define THIN 1e-3       /* least part of a box that is split off */
#define STEP 3e-3       /* a box whose corners moved by this relative step is searched again */
#define MUCH 2e-3       /* a relative gain below this shows no direction from a hint to better thresholds */
#define MEANT 1e-9      /* a plan that is slower than the best by at most this part of the latency is called optimal */
#define FINE 256        /* with more units than this a coarser granularity says where to begin */
#define WIDE 200        /* edges above which a reduction of their own is worth it */
#define APART 0.02      /* first relative step of either threshold around the best ones so far */
#define FEW_APART 0.16  /* the same where a search takes next to nothing */
#define LAST_APART 4e-3
#define MOST_APART 60   /* such searches; twice as many where they take next to nothing */

typedef struct {
    double low[3], high[3]; /* low <= max f, max b, max f + max b <= high */
    double bound;           /* no plan in the box is faster */
    tp_slice_edges edges;   /* of its plans, in the reduced graph */
    double slack;           /* goal - bound when that was reduced, or it was tried */
} box;

typedef struct {
    const tp_slice_cost *forward, *backward;
    tp_slice_dp dp;
    tp_slice_edges edges;
    int *length, count;
    box *stack;
    int boxes, room;
    int64_t room_edges; /* of the arrays: the reduced graph has edges.room, and its parts are behind it */
    tp_arena *arena;
    double depth; /* of the next reduced graph: a little more than its room had space for */
    double best, most, tolerance, deadline_s; /* most: the best plan's max f + max b */
    double left;  /* part of the latency by which no better plan is looked for: of rounding, or of the gap that was asked */
    double under; /* no plan is faster: of the first search */
    double at[2];       /* and each of these */
    int scaled;         /* the plan is already that of coarse units */
    tp_slice_plan *plan;
} apart;

static double
goal_of(const apart *a)
{
    return a->best - a->left * a->best;
}

static int
is_late(const apart *a)
{
    return tp_deadline_late() || (a->deadline_s > 0.0 && 1e-9 * (double)tp_clock_ns() > a->deadline_s);
}

/* Is there no time for one search within these thresholds? */
static int
takes_too_long(const apart *a, const double high[2])
{
    double seconds = a->deadline_s > 0.0 || tp_deadline_get() != 0 ? tp_slice_search_s(&a->dp, high) : 0.0;
    return seconds > 0.0 &&
           (tp_deadline_late() || (a->deadline_s > 0.0 && 1e-9 * (double)tp_clock_ns() + seconds > a->deadline_s));
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

/* The largest costs of the path just found; the path is kept if it is the best plan so far. */
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
    a->most = largest[0] + largest[1];
    memcpy(a->at, largest, sizeof a->at);
    a->plan->slices = a->count;
    for (int k = 0; k < a->count; k++)
        a->plan->length[k] = a->length[a->count - 1 - k];
}

static double
search(apart *a, const double high[3], double largest[2])
{
    const double within[TP_SLICE_LIMITS] = {high[0], high[1], high[2], a->dp.most_bytes};
    double least = tp_slice_dp_forward(&a->dp, within);
    a->plan->searches++;
    if (least < INFINITY) {
        a->count = tp_slice_dp_path(&a->dp, a->length);
        settle(a, largest);
    }
    return least;
}

/* ---- boxes ------------------------------------------------------------------------------------------------------- */

/* Pull the box in; 0 if nothing better is left. *shrunk: the largest relative step. */
static int
tighten(const apart *a, double least, box *b, double *shrunk)
{
    double room = (goal_of(a) - least) / a->dp.weight;
    *shrunk = 0.0;
    b->low[2] = fmax(b->low[2], b->low[0] + b->low[1]);
    b->bound = least + a->dp.weight * b->low[2];
    if (!(b->low[2] < room))
        return 0;
    for (int l = 2; l >= 0; l--) {
        double high = l == 2 ? room : b->high[2] - b->low[1 - l];
        if (high >= b->high[l])
            continue;
        *shrunk = fmax(*shrunk, isinf(b->high[l]) ? 1.0 : (b->high[l] - high) / b->high[l]);
        b->high[l] = high;
    }
    for (int l = 0; l < 2; l++)
        b->low[l] = fmax(b->low[l], b->low[2] - b->high[1 - l]);
    return 1;
}

static int
is_empty(const box *b)
{
    return b->low[0] > b->high[0] || b->low[1] > b->high[1] || b->low[2] > b->high[2];
}

/* By how much the largest costs of a path in the box, together, exceed what the box allows. */
static double
excess_of(const box *b, const double largest[2])
{
    return (largest[0] + largest[1]) / b->high[2] - 1.0;
}

/* Divide a box into two, neither of which holds the path just found. After tighten the path's largest costs together exceed what
 * the box allows: half of the excess is cut off from either side. Where the excess is only rounding: a better plan has max f <
 * largest[0], or max f >= largest[0] and max b < largest[1]. */
static tp_status
branch(apart *a, const box *b, const double largest[2])
{
    box left = *b, right = *b;
    double middle = 0.5 * (largest[0] + (b->high[2] - largest[1])), rest = (b->high[2] - middle) * (1.0 + a->tolerance);
    if (middle < largest[0] && rest < largest[1]) {
        left.high[0] = fmin(b->high[0], middle);
        right.low[0] = fmax(b->low[0], middle * (1.0 - a->tolerance));
        right.high[1] = fmin(b->high[1], rest);
    } else {
        left.high[0] = fmin(b->high[0], nextafter(largest[0], -INFINITY));
        right.low[0] = fmax(b->low[0], largest[0]);
        right.high[1] = fmin(b->high[1], nextafter(largest[1], -INFINITY));
    }
    if (!is_empty(&right))
        TP_TRY(push(a, &right));
    return is_empty(&left) ? TP_OK : push(a, &left);
}

/* Search the box again, rather than divide it? Yes where its corners moved by more than the excess. Where they did not move the
 * search would find the same path again, even one that only rounding puts inside the box. */
static int
is_worth_a_search(const box *b, double shrunk, const double largest[2])
{
    return shrunk > 0.0 && excess_of(b, largest) < shrunk;
}

static tp_status
proceed(apart *a, const box *b, double shrunk, const double largest[2])
{
    return is_worth_a_search(b, shrunk, largest) ? push(a, b) : branch(a, b, largest);
}

/* Finish the box in the reduced graph, which is reduced further for every part of the box with much fewer edges. largest[]: of the
 * path just found in it. */
static tp_status
finish(apart *a, const box *start, double step, const double largest_of[2])
{
    int base = a->boxes;
    TP_TRY(proceed(a, start, step, largest_of));
    while (a->boxes > base) {
        TP_TRY(tp_deadline_check_after(&a->dp.asked, a->dp.n + start->edges.count));
        box b = a->stack[--a->boxes];
        double largest[2], shrunk, least = tp_slice_edges_search(&b.edges, a->dp.n, 3, b.high);
        tp_slice_edges fewer;
        a->plan->small_searches++;
        if (least == INFINITY)
            continue;
        a->count = tp_slice_edges_path(&b.edges, a->dp.n, a->length);
        settle(a, largest);
        if (!tighten(a, least, &b, &shrunk))
            continue;
        double slack = goal_of(a) - b.bound;
        if (b.edges.count > WIDE && slack < 0.8 * b.slack) {
            b.slack = slack;
            if (tp_slice_edges_narrow(&b.edges, a->dp.n, b.high, b.low, a->dp.weight, goal_of(a), &fewer) &&
                fewer.count < b.edges.count / 5 * 4)
                b.edges = fewer;
        }
        TP_TRY(proceed(a, &b, shrunk, largest));
    }
    return TP_OK;
}

/* Try to finish the upper part of the box, as far down as the room for edges allows; *b is then what is left below. */
static tp_status
reduce(apart *a, box *b, double step, const double largest[2], int *done)
{
    double lowest = fmax(b->low[2], b->high[2] * (1.0 - a->depth)), floor[3] = {b->low[0], b->low[1], lowest};
    tp_slice_dp_backward(&a->dp);
    TP_TRY(tp_deadline_check_told());
    *done = tp_slice_edges_keep(&a->dp, floor, &b->high[2], goal_of(a), &a->edges);
    if (floor[2] == lowest && *done && lowest > b->low[2])
        a->depth = fmin(DEEP, 2.0 * a->depth);
    else if (floor[2] > lowest)
        a->depth = 1.2 * (1.0 - floor[2] / b->high[2]);
    if (!*done)
        return TP_OK;
    box upper = *b;
    upper.low[2] = floor[2];
    upper.edges = a->edges;
    upper.edges.room = a->room_edges;
    upper.slack = INFINITY;
    b->high[2] = floor[2] > b->low[2] ? floor[2] : -INFINITY;
    a->plan->edges = a->edges.count > a->plan->edges ? a->edges.count : a->plan->edges;
    return finish(a, &upper, step, largest);
}

/* Divide the box in two by max f + max b, then the upper part in two again: that part's floor bounds its parts. */
static tp_status
split(apart *a, box *b, double least, double excess, const double largest[2])
{
    double floor = b->high[2] * (1.0 - fmax(excess, THIN));
    if (floor > b->low[2]) {
        box below = *b;
        below.high[2] = floor;
        TP_TRY(push(a, &below));
        b->low[2] = floor * (1.0 - a->tolerance);
        b->bound = least + a->dp.weight * b->low[2];
    }
    return branch(a, b, largest);
}

static tp_status
examine(apart *a, box b)
{
    double largest[2], shrunk;
    while (b.bound < goal_of(a) && !is_empty(&b)) {
        if (is_late(a) || takes_too_long(a, b.high)) /* the box goes back as it is: its bound counts in the plan's */
            return push(a, &b);
        double least = search(a, b.high, largest);
        a->plan->boxes++;
        if (least == INFINITY || !tighten(a, least, &b, &shrunk))
            return TP_OK;
        if (shrunk > STEP)
            continue;
        double excess = excess_of(&b, largest);
        int done = 0, again = is_worth_a_search(&b, shrunk, largest);
        if (excess < NEAR)
            TP_TRY(reduce(a, &b, shrunk, largest, &done));
        if (!done && !again)
            return split(a, &b, least, excess, largest);
    }
    return TP_OK;
}

/* The least sum per unit, times the units: below every sum, without a search. */
static double
cheap_sum(const apart *a)
{
    const tp_slice_table *t = &a->dp.sum;
    double rate = INFINITY;
    for (int i = 1; i <= a->dp.cap; i++)
        rate = fmin(rate, fmin(t->g0[i], t->g1[i]) / i);
    return t->a2 < 0.0 || t->a3 < 0.0 ? 0.0 : rate * a->dp.n * (1.0 - 1e-15 * a->dp.n);
}

/* First what is below the first plan's max f + max b: better plans are found there sooner, and then little is left above. */
static tp_status
push_all(apart *a)
{
    const double all[3] = {INFINITY, INFINITY, INFINITY};
    double largest[2], shrunk;
    box lower = {.high = {INFINITY, INFINITY, INFINITY}}, upper;
    for (int l = 0; l < 2; l++)
        lower.low[l] = tp_slice_dp_last_slice(&a->dp, l);
    double least = takes_too_long(a, all) ? cheap_sum(a) : search(a, all, largest);
    a->plan->boxes++;
    int some = tighten(a, least, &lower, &shrunk);
    a->under = lower.bound;
    if (!some)
        return TP_OK;
    upper = lower;
    upper.low[2] = fmax(lower.low[2], a->most * (1.0 - a->tolerance));
    upper.bound = least + a->dp.weight * upper.low[2];
    TP_TRY(push(a, &upper));
    lower.high[2] = fmin(lower.high[2], a->most);
    return push(a, &lower);
}

static tp_status
run_boxes(apart *a)
{
    a->depth = FIRST_DEEP;
    TP_TRY(push_all(a));
    a->plan->optimal = 1;
    a->plan->lower_bound_s = goal_of(a);
    while (a->boxes > 0) {
        box b = a->stack[--a->boxes];
        if (is_late(a) || takes_too_long(a, b.high)) {
            a->plan->optimal = 0;
            a->plan->lower_bound_s = fmin(a->plan->lower_bound_s, b.bound);
            continue;
        }
        TP_TRY(examine(a, b));
    }
    a->plan->lower_bound_s = fmin(a->plan->optimal ? goal_of(a) : a->plan->lower_bound_s, goal_of(a));
    a->plan->lower_bound_s = fmax(a->plan->lower_bound_s, fmin(a->under, a->best - a->tolerance * a->best));
    a->plan->optimal &= a->left <= MEANT || a->best == 0.0;
    return TP_OK;
}

/* ---- where to begin ---------------------------------------------------------------------------------------------- */

static double
latency_at(apart *a, const double high[2], double largest[2])
{
    const double all[3] = {high[0], high[1], INFINITY};
    double least = search(a, all, largest);
    return least == INFINITY ? INFINITY : least + a->dp.weight * (largest[0] + largest[1]);
}

/* Golden section over s in [low, high] of the thresholds s * corner[]; only for a good first plan. With few units, which is where
 * all begin from, there is time for it. */
static void
probe(apart *a, const double corner[2], double low, double high, int steps)
{
    double largest[2];
    for (int k = 0; k < steps && (a->dp.n <= FINE || !is_late(a)); k++) {
        double x = high - 0.6180339887498949 * (high - low), y = low + high - x;
        const double at_x[2] = {x * corner[0], x * corner[1]}, at_y[2] = {y * corner[0], y * corner[1]};
        if (latency_at(a, at_x, largest) <= latency_at(a, at_y, largest))
            high = y;
        else
            low = x;
    }
}

/* Try thresholds around the hint. Coarse units may hide short slices, so the best thresholds there may be far from the best
 * here. */
static void
probe_hint(apart *a, const double hint[2])
{
    const double steps[2] = {0.97, 1.0 / 0.97};
    double largest[2], at = 1.0;
    for (int side = 0; side < 2 && at == 1.0; side++)
        for (double best = INFINITY, scale = steps[side]; a->best < best && !is_late(a); scale *= steps[side]) {
            const double corner[2] = {scale * hint[0], scale * hint[1]};
            best = a->best * (1.0 - MUCH); /* less is noise, and no direction */
            latency_at(a, corner, largest);
            at = a->best < best ? scale : at;
        }
    probe(a, hint, 0.985 * at, 1.01 * at, 3);
}

/* Then move each threshold by itself: where forward and backward are unlike, or noisy, the best ones are not in the hint's
 * proportion. Tables with 3 % of noise began 1.3 % above the optimum and took 82 boxes, now 60. With many units a second step is
 * worth its searches only after a gain. */
static void
probe_apart(apart *a)
{
    enum { WAYS = 4 };
    static const double ways[WAYS][2] = {{1, -1}, {-1, 1}, {1, 0}, {0, 1}};
    double largest[2], first = a->best;
    int few = a->dp.n <= FINE, tried = 0;
    for (double step = few ? FEW_APART : APART; step >= LAST_APART && (few || tried == 0 || a->best < first); step *= 0.5)
        for (int k = 0; k < WAYS && tried < MOST_APART * (1 + few) && !is_late(a); tried++) {
            double best = a->best, next[2] = {a->at[0] * (1.0 + step * ways[k][0]), a->at[1] * (1.0 + step * ways[k][1])};
            latency_at(a, next, largest);
            k = a->best < best ? 0 : k + 1;
        }
}

static void
begin(apart *a, double hint[2])
{
    double largest[2] = {0.0, 0.0};
    a->best = INFINITY;
    /* More is needed where coarse units leave a rest. Where they took all the time, too: what is left is as good a plan as theirs. */
    for (int k = 0; k < 32 && (hint[0] > 0.0 || hint[1] > 0.0); k++) {
        if (latency_at(a, hint, largest) < INFINITY) {
            probe_hint(a, hint);
            probe_apart(a);
            return;
        }
        double more = is_late(a) ? 2.0 : 1.02;
        hint[0] *= more;
        hint[1] *= more;
    }
    const double all[3] = {INFINITY, INFINITY, INFINITY};
    search(a, all, largest);
    if (a->dp.weight > 0.0) {
        probe(a, largest, 0.0, 1.0, 8);
        probe_apart(a);
    }
}

/* The plan of coarse units, in these, is the best one so far. */
static void
take_scaled(apart *a)
{
    double largest[2];
    a->best = INFINITY;
    a->count = a->plan->slices;
    for (int k = 0; k < a->count; k++)
        a->length[k] = a->plan->length[a->count - 1 - k];
    settle(a, largest);
}

/* The thresholds that are best at a coarser granularity are close to the best here; 0: none. most: no slice that costs more is
 * part of a better plan. */
static tp_status
coarse_hint(apart *a, const tp_slice_options *options, double hint[2], double *most);

static tp_status
open_apart(apart *a, const tp_slice_options *options, double most)
{
    int n = a->forward->units;
    int64_t pairs = (int64_t)n * (n + 1) / 2;
    void *memory;
    TP_TRY(tp_slice_dp_open(a->arena, a->forward, a->backward, options, most, &a->dp));
    pairs = pairs < 16 * n ? pairs : 16 * n;
    pairs = pairs < EDGE_ROOM ? pairs : EDGE_ROOM;
    a->room_edges = 3 * pairs;
    TP_TRY(tp_slice_edges_open(a->arena, n, pairs, a->room_edges, &a->edges));
    TP_TRY(tp_arena_take(a->arena, (size_t)n, sizeof(int), &memory));
    a->length = memory;
    return TP_OK;
}

static tp_status
run_apart(apart *a, const tp_slice_options *options)
{
    double hint[2] = {0.0, 0.0}, most = INFINITY;
    TP_TRY(coarse_hint(a, options, hint, &most));
    TP_TRY(open_apart(a, options, most));
    if (a->scaled && takes_too_long(a, hint))
        take_scaled(a);
    else
        begin(a, hint);
    TP_TRY(tp_deadline_check_told());
    double quadratic = fabs(a->dp.sum.q[a->dp.n]);
    a->tolerance = 1e-12 + 2.2e-16 * (a->dp.n + (a->dp.n + a->dp.weight) * quadratic / fmax(a->best, 1e-300));
    if (a->best > 0.0) /* at the low end of a double's range corners are rounded by more: boxes would not get smaller */
        a->tolerance += 1000.0 * DBL_TRUE_MIN * a->dp.weight / a->best;
    a->left = fmax(a->tolerance, 1.0 - 1.0 / (1.0 + options->gap) - a->tolerance);
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
        if (status == TP_OK)
            status = tp_deadline_check_told(); /* its searches ended wherever they were */
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
coarse_hint(apart *a, const tp_slice_options *options, double hint[2], double *most)
{
    enum { FACTOR = 8 };
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
    for (int k = 0; k < plan.slices; k++)
        a->plan->length[k] = FACTOR * plan.length[k];
    a->plan->slices = plan.slices;
    a->scaled = n % FACTOR == 0;
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
    plan.lower_bound_s = fmax(0.0, fmin(plan.lower_bound_s, plan.latency_s));
    plan.seconds = 1e-9 * (double)tp_clock_ns() - start;
    *out = plan;
    return TP_OK;
}
