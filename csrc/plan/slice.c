/* Token slices, and batch and token slices together: PLANNERS.md 1.3 and 1.5.
 *
 * Invariant of the descending walk: every plan whose largest slice costs more than u has a latency of at least
 * best - tolerance. The least sum S(u) within threshold u does not rise with u, so a plan whose largest slice lies in
 * (v, u] has latency >= S(u) + (K-1) max, and v is chosen so that this cannot beat the best. Near the optimum v is
 * close to u; there the walk goes on in the graph of the few slices that a better plan could still use. */
#include "csrc/plan/plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"
#include "csrc/plan/slice_dp.h"

#define SMALL_STEP 3e-4  /* a relative step below which the reduced graph is tried */
#define DEPTH 2e-3       /* relative depth of a reduced graph, if its edges fit */
#define EDGE_ROOM 4000   /* with more edges a search over all slices is as cheap */
#define WORTH 12          /* searches in it that pay for building it */
#define PASS_MOST 255
#define LONG 16384       /* units from which on it is not */
#define LONG_EDGE_ROOM 40000
#define HINT_GAP 1e-3
#define FEW 256          /* units in which searches take microseconds */

typedef struct {
    int n, batch, tables, stages;
    const tp_slice_cost *cost; /* [tables] */
    tp_slice_dp *dp;           /* [tables] */
    tp_slice_edges *edges;     /* [tables] */
    unsigned char *alive;      /* [tables]: a better plan could have a group of this many sequences */
    double *sum, *fill;        /* [tables]: S_b; [batch + 1]: least sum of q sequences */
    int *choice;               /* [batch + 1] */
    int *length, *uses;        /* scratch: [n]; [tables] */
    double weight, best, tolerance, deadline_s, sum_above;
    int hint;               /* nobody asks for its bound */
    int scaled;             /* the plan is already that of coarse units */
    int passed, pass;       /* steps in which the reduced graph is not tried since it last gained little, and how many to pass */
    double certified, certified_at; /* a bound of all plans by tp_slice_bound, and the latency it was found with */
    const tp_slice_options *options;
    tp_slice_plan *plan;
} walk;

/* ---- one threshold ----------------------------------------------------------------------------------------------- */

/* Unbounded knapsack over the group sizes (PLANNERS.md 1.5). */
static double
fill_batch(walk *w)
{
    w->fill[0] = 0.0;
    for (int q = 1; q <= w->batch; q++) {
        w->fill[q] = INFINITY;
        for (int b = 1; b <= q && b <= w->tables; b++)
            if (w->fill[q - b] + w->sum[b - 1] < w->fill[q]) {
                w->fill[q] = w->fill[q - b] + w->sum[b - 1];
                w->choice[q] = b;
            }
    }
    return w->fill[w->batch];
}

static int
path_of(walk *w, int table, int reduced)
{
    if (reduced)
        return tp_slice_edges_path(&w->edges[table], w->n, w->length);
    return tp_slice_dp_path(&w->dp[table], w->length);
}

/* Write the plan of the last fill_batch, groups from large to small. */
static void
record(walk *w, int reduced)
{
    tp_slice_plan *plan = w->plan;
    plan->groups = plan->slices = 0;
    for (int b = w->tables; b >= 1; b--) {
        if (w->uses[b - 1] == 0)
            continue;
        int count = path_of(w, b - 1, reduced);
        for (int u = 0; u < w->uses[b - 1]; u++) {
            plan->group[plan->groups++] = (tp_slice_group){b, plan->slices, count};
            for (int k = count - 1; k >= 0; k--)
                plan->length[plan->slices++] = w->length[k];
        }
    }
}

/* The largest slice of the cheapest fill; a better plan is kept. */
static double
settle(walk *w, int reduced)
{
    double total = 0.0, largest = 0.0;
    memset(w->uses, 0, (size_t)w->tables * sizeof(int));
    for (int q = w->batch; q > 0; q -= w->choice[q])
        w->uses[w->choice[q] - 1]++;
    for (int b = 0; b < w->tables; b++) {
        if (w->uses[b] == 0)
            continue;
        int count = path_of(w, b, reduced), start = 0;
        for (int k = count - 1; k >= 0; start += w->length[k--]) {
            double c = tp_slice_at(&w->dp[b].limit[0], start, w->length[k]);
            total += w->uses[b] * tp_slice_at(&w->dp[b].sum, start, w->length[k]);
            largest = c > largest ? c : largest;
        }
    }
    if (total + w->weight * largest < w->best) {
        w->best = total + w->weight * largest;
        record(w, reduced);
    }
    return largest;
}

/* Within `threshold`, without the plan. */
static double
least_within(walk *w, double threshold)
{
    for (int b = 0; b < w->tables; b++) {
        const double both[TP_SLICE_LIMITS] = {threshold, w->dp[b].most_bytes};
        w->sum[b] = w->alive[b] ? tp_slice_dp_forward(&w->dp[b], both) : INFINITY;
        w->plan->searches += w->alive[b];
    }
    return fill_batch(w);
}

static double
search(walk *w, double threshold, double *largest)
{
    double least = least_within(w, threshold);
    *largest = least < INFINITY ? settle(w, 0) : 0.0;
    return least;
}

static double
search_edges(walk *w, double threshold, double *largest)
{
    const double both[2] = {threshold, INFINITY};
    for (int b = 0; b < w->tables; b++) {
        w->sum[b] = w->alive[b] ? tp_slice_edges_search(&w->edges[b], w->n, 1, both) : INFINITY;
        w->plan->small_searches += w->alive[b];
    }
    double least = fill_batch(w);
    *largest = least < INFINITY ? settle(w, 1) : 0.0;
    return least;
}

/* ---- the walk ---------------------------------------------------------------------------------------------------- */

static double
goal_of(const walk *w)
{
    return w->best - w->tolerance * w->best;
}

/* No plan with its largest slice in (result, u] beats the goal. */
static double
below(const walk *w, double least, double largest, double u)
{
    double v = fmin(largest, (goal_of(w) - least) / w->weight);
    return nextafter(fmin(v, u) * (1.0 - w->tolerance), -INFINITY); /* strictly less, for u == 0 too */
}

/* After search(u): build the reduced graphs for largest slices in (*floor, v], raising the floor until they fit. 0 if
 * they do not. A table built with a lower floor than the next one keeps more edges than it needs: no harm. */
static int
keep_edges(walk *w, double *floor, double v)
{
    double floors[3] = {*floor, 0.0, 0.0};
    int64_t total = 0;
    for (int b = 0; b < w->tables; b++) {
        if (!w->alive[b])
            continue;
        double rest = w->fill[w->batch - b - 1]; /* the other sequences cost at least this */
        if (!tp_slice_edges_keep(&w->dp[b], floors, &v, goal_of(w) - rest, &w->edges[b]))
            return 0;
        total += w->edges[b].count;
    }
    w->plan->edges = total > w->plan->edges ? total : w->plan->edges;
    *floor = floors[0];
    return 1;
}

static int
out_of_time(const walk *w)
{
    return tp_deadline_late() || (w->deadline_s > 0.0 && 1e-9 * (double)tp_clock_ns() > w->deadline_s);
}

/* Is there no time for one search within this threshold? */
static int
takes_too_long(const walk *w, double threshold)
{
    double seconds = 0.0;
    if (w->deadline_s <= 0.0 && tp_deadline_get() == 0)
        return 0;
    for (int b = 0; b < w->tables; b++)
        seconds += tp_slice_search_s(&w->dp[b], &threshold);
    return seconds > 0.0 &&
           (tp_deadline_late() || (w->deadline_s > 0.0 && 1e-9 * (double)tp_clock_ns() + seconds > w->deadline_s));
}

/* A group size whose own least sum leaves too little for the rest can never come back: thresholds only fall. */
static void
drop_sizes(walk *w, double lowest)
{
    for (int b = 0; b < w->tables; b++)
        if (w->alive[b] && w->sum[b] + w->fill[w->batch - b - 1] + w->weight * lowest >= goal_of(w))
            w->alive[b] = 0;
}

/* Try to finish (floor, v] in the reduced graph, floor as low as its room allows; returns how far down that went. It costs as
 * much as a few searches over all slices: where it gained no more it is left alone for a while. */
static double
walk_edges(walk *w, double v)
{
    if (w->passed++ < w->pass)
        return v;
    int64_t before = w->plan->small_searches;
    w->passed = 0;
    w->pass = 2 * w->pass + 1 < PASS_MOST ? 2 * w->pass + 1 : PASS_MOST;
    for (int b = 0; b < w->tables; b++)
        if (w->alive[b])
            tp_slice_dp_backward(&w->dp[b]);
    double floor = v * (1.0 - DEPTH), at = v, largest, least;
    if (tp_deadline_was_told() || !keep_edges(w, &floor, v))
        return v;
    while (at > floor && (least = search_edges(w, at, &largest)) < INFINITY)
        at = below(w, least, largest, at);
    if (w->plan->small_searches - before >= WORTH * w->tables)
        w->pass = 0;
    return floor;
}

/* One weighted search on the best plan. Not for messages or group sizes. */
static tp_status
certify(walk *w)
{
    double bound;
    if (w->batch > 1 || w->options->message != NULL || w->best >= w->certified_at)
        return TP_OK;
    tp_slice_options options = *w->options;
    if (w->deadline_s > 0.0) /* as much time again, where the plan took all */
        options.time_limit_s = fmax(w->deadline_s + w->options->time_limit_s - 1e-9 * (double)tp_clock_ns(), 1e-9);
    TP_TRY(tp_slice_bound(w->cost, &options, w->plan->length, w->plan->slices, &bound));
    w->certified = fmax(w->certified, bound);
    w->certified_at = w->best;
    return TP_OK;
}

/* Is the best plan proven to be as near the optimum as was asked? */
static tp_status
near_enough(walk *w, int *yes)
{
    *yes = 0;
    if (w->options->gap <= 0.0)
        return TP_OK;
    if (w->best < w->certified_at * (1.0 - 0.25 * w->options->gap)) /* a little better plan hardly moves the bound */
        TP_TRY(certify(w));
    *yes = w->best <= w->certified * (1.0 + w->options->gap);
    return TP_OK;
}

static tp_status
descend(walk *w, double u, double lowest)
{
    double largest, least;
    int near = 0;
    TP_TRY(near_enough(w, &near));
    while (u >= lowest && !near && !out_of_time(w) && !takes_too_long(w, u)) {
        least = least_within(w, u);
        w->sum_above = least;
        if (least == INFINITY) {
            u = -INFINITY;
            break;
        }
        /* The plan's own largest slice may lead further down, or to a better plan: the search there would say so. */
        largest = (goal_of(w) - least) / w->weight < (1.0 - SMALL_STEP) * u ? u : settle(w, 0);
        drop_sizes(w, lowest);
        double v = below(w, least, largest, u);
        u = u - v < SMALL_STEP * u && v >= lowest ? walk_edges(w, v) : v;
        TP_TRY(near_enough(w, &near));
    }
    w->plan->optimal = u < lowest;
    if (!w->plan->optimal && !w->hint)
        TP_TRY(certify(w));
    double below_all = fmax(w->certified, w->sum_above + w->weight * lowest);
    w->plan->lower_bound_s = w->plan->optimal ? goal_of(w) : fmin(goal_of(w), below_all);
    return TP_OK;
}

/* ---- where to begin ---------------------------------------------------------------------------------------------- */

/* The least sum per unit, times the units: below every S(t), without a search. */
static double
cheap_sum(walk *w)
{
    for (int b = 0; b < w->tables; b++) {
        double rate = INFINITY;
        for (int i = 1; i <= w->dp[b].cap; i++)
            rate = fmin(rate, fmin(w->cost[b].g0[i], w->cost[b].g1[i]) / i);
        w->sum[b] = w->cost[b].a2 < 0.0 || w->cost[b].a3 < 0.0 ? 0.0 : rate * w->n;
    }
    return fill_batch(w) * (1.0 - 1e-15 * w->n);
}

static double
latency_at(walk *w, double threshold)
{
    double largest, least = search(w, threshold, &largest);
    return least == INFINITY ? INFINITY : least + w->weight * largest;
}

/* A few golden-section steps on the threshold: not exact, only a good first plan. Returns the better one of the last two. With few
 * units, which is where all begin from, there is time for it. */
static double
probe(walk *w, double low, double high, int steps)
{
    const double ratio = 0.6180339887498949;
    double a = high - ratio * (high - low), b = low + ratio * (high - low);
    double at_a = latency_at(w, a), at_b = latency_at(w, b);
    for (int k = 2; k < steps && (w->n <= FEW || !out_of_time(w)); k++) {
        if (at_a <= at_b) {
            high = b, b = a, at_b = at_a;
            at_a = latency_at(w, a = high - ratio * (high - low));
        } else {
            low = a, a = b, at_a = at_b;
            at_b = latency_at(w, b = low + ratio * (high - low));
        }
    }
    return at_a <= at_b ? a : b;
}

/* Around the hint. Coarse units may hide short slices, and their best threshold is then far from the best one here: longer and
 * longer steps until the latency rises, so that the walk need not find its way plan by plan. */
static void
probe_hint(walk *w, double hint)
{
    double at = hint, before = hint, step = 0.03;
    int down = probe(w, 0.985 * hint, 1.002 * hint, 4) < hint;
    while (!out_of_time(w)) {
        double best = w->best, next = down ? at * (1.0 - step) : at / (1.0 - step);
        if (latency_at(w, next) >= best)
            break;
        before = at;
        at = next;
        step = fmin(2.0 * step, 0.5);
    }
    double beyond = down ? at * (1.0 - step) : at / (1.0 - step);
    if (at != hint)
        probe(w, fmin(before, beyond), fmax(before, beyond), 6);
}

/* A group of b sequences holds b times as much. */
static tp_slice_memory
memory_of(const tp_slice_options *options, int sequences)
{
    tp_slice_memory m = options->memory;
    m.row_bytes *= sequences;
    m.pair_bytes *= sequences;
    m.context_bytes *= sequences;
    return m;
}

static tp_status
open_walk(tp_arena *arena, walk *w, const tp_slice_options *options, double most)
{
    void *memory;
    size_t tables = (size_t)w->tables, batch = (size_t)w->batch;
    TP_TRY(tp_arena_take(arena, tables, sizeof *w->dp, &memory));
    w->dp = memory;
    TP_TRY(tp_arena_take(arena, tables, sizeof *w->edges, &memory));
    w->edges = memory;
    TP_TRY(tp_arena_take(arena, tables, 1, &memory));
    w->alive = memory;
    memset(w->alive, 1, tables);
    TP_TRY(tp_arena_take(arena, tables, sizeof(double), &memory));
    w->sum = memory;
    TP_TRY(tp_arena_take(arena, batch + 1, sizeof(double), &memory));
    w->fill = memory;
    TP_TRY(tp_arena_take(arena, batch + 1, sizeof(int), &memory));
    w->choice = memory;
    TP_TRY(tp_arena_take(arena, tables, sizeof(int), &memory));
    w->uses = memory;
    TP_TRY(tp_arena_take(arena, (size_t)w->n, sizeof(int), &memory));
    w->length = memory;
    for (int b = 0; b < w->tables; b++) {
        int64_t pairs = (int64_t)w->n * (w->n + 1) / 2, room = w->n < LONG ? EDGE_ROOM : LONG_EDGE_ROOM;
        tp_slice_options one = *options;
        one.message = options->message != NULL ? &options->message[b] : NULL;
        one.memory = memory_of(options, b + 1);
        TP_TRY(tp_slice_dp_open(arena, &w->cost[b], NULL, &one, most, &w->dp[b]));
        w->edges[b].key = w->edges[0].key; /* 32 tables of a batch would need megabytes */
        w->edges[b].order = w->edges[0].order;
        TP_TRY(tp_slice_edges_open(arena, w->n, pairs < room ? pairs : room, 0, &w->edges[b]));
    }
    return TP_OK;
}

/* The plan of units `factor` times as long is one of these, too. */
static void
scale(walk *w, const tp_slice_plan *coarse, int factor)
{
    tp_slice_plan *plan = w->plan;
    memcpy(plan->group, coarse->group, (size_t)coarse->groups * sizeof *plan->group);
    for (int k = 0; k < coarse->slices; k++)
        plan->length[k] = factor * coarse->length[k];
    plan->groups = coarse->groups;
    plan->slices = coarse->slices;
    w->scaled = 1;
}

/* The threshold that is best at a coarser granularity is close to the best here; 0: none. most: no slice that costs more is
 * part of a better plan. */
static tp_status
coarse_hint(walk *w, const tp_slice_options *options, double *hint, double *most);

static tp_status
run_walk(tp_arena *arena, walk *w, const tp_slice_options *options)
{
    double hint = 0.0, most = INFINITY, lowest = INFINITY, largest, quadratic = 0.0;
    int begun = 0;
    TP_TRY(coarse_hint(w, options, &hint, &most));
    TP_TRY(open_walk(arena, w, options, most));
    for (int b = 0; b < w->tables; b++) {
        lowest = fmin(lowest, tp_slice_dp_last_slice(&w->dp[b], 0));
        quadratic = fmax(quadratic, fabs(w->dp[b].sum.q[w->n]));
    }
    w->best = INFINITY;
    if (w->scaled && takes_too_long(w, hint)) {
        TP_TRY(tp_slice_plan_evaluate(w->cost, NULL, options, w->plan));
        w->best = w->plan->latency_s;
        w->sum_above = cheap_sum(w);
        begun = 1;
    } else if (hint > 0.0) {
        w->sum_above = w->dp[0].sum.smooth ? cheap_sum(w) : search(w, INFINITY, &largest);
        for (int k = 0; k < 32 && (begun = search(w, hint, &largest) < INFINITY) == 0; k++)
            hint *= 1.02; /* more is needed where coarse units leave a rest */
        if (begun && !out_of_time(w))
            probe_hint(w, hint);
    }
    if (!begun) {
        w->sum_above = search(w, INFINITY, &largest);
        if (w->weight > 0.0 && (w->n <= FEW || !out_of_time(w)))
            probe(w, lowest, largest, 12);
    }
    /* of the plan, not of sum_above: that may be no more than a bound, and 0 */
    w->tolerance = 1e-12 + 2.2e-16 * (w->n + (w->n + w->weight) * quadratic / fmax(w->best, 1e-300));
    if (w->weight > 0.0 && goal_of(w) > 0.0) /* no cost is below 0, and what is rounding beside 0 is everything */
        TP_TRY(descend(w, (goal_of(w) - w->sum_above) / w->weight, lowest));
    else {
        w->plan->optimal = 1;
        w->plan->lower_bound_s = goal_of(w);
    }
    return TP_OK;
}

static tp_status
solve(const tp_slice_cost *cost, int batch, int tables, const tp_slice_options *options, double deadline_s, int hint,
      tp_slice_plan *plan)
{
    tp_arena arena;
    walk w = {.n = cost->units, .batch = batch, .tables = tables, .cost = cost, .plan = plan, .deadline_s = deadline_s};
    w.hint = hint;
    w.weight = (double)options->stages - 1.0;
    w.options = options;
    w.certified_at = INFINITY;
    TP_TRY(tp_slice_plan_open(batch, (int64_t)batch * cost->units, plan));
    tp_status status = tp_arena_open(&arena);
    if (status == TP_OK) {
        status = run_walk(&arena, &w, options);
        if (status == TP_OK)
            status = tp_deadline_check_told(); /* its searches ended wherever they were */
        tp_arena_close(&arena);
    }
    if (status != TP_OK)
        tp_slice_plan_free(plan);
    return status;
}

static tp_status
coarse_messages(tp_arena *arena, const walk *w, const tp_slice_cost *message, int factor, const tp_slice_cost **out)
{
    void *memory;
    TP_TRY(tp_arena_take(arena, (size_t)w->tables, sizeof(tp_slice_cost), &memory));
    tp_slice_cost *coarse = memory;
    for (int b = 0; b < w->tables; b++)
        TP_TRY(tp_slice_cost_coarsen(arena, &message[b], factor, &coarse[b]));
    *out = coarse;
    return TP_OK;
}

static tp_status
coarse_hint(walk *w, const tp_slice_options *options, double *hint, double *most)
{
    enum { FACTOR = 8 };
    int fine = w->tables > 1 ? 64 : FEW; /* below this many units a search costs no more than the hint is worth */
    int longest = options->longest > 0 ? options->longest / FACTOR : 0;
    if (w->n <= fine || w->weight == 0.0 || (options->longest > 0 && longest == 0))
        return TP_OK;
    tp_arena arena;
    tp_slice_plan plan;
    tp_slice_options coarse = *options;
    coarse.longest = longest;
    coarse.gap = w->n >= LONG ? HINT_GAP : 0.0; /* a hint need not be proven */
    if (!tp_slice_memory_coarsen(&options->memory, FACTOR, w->n / FACTOR, &coarse.memory))
        return TP_OK;
    TP_TRY(tp_arena_open(&arena));
    void *memory;
    tp_status status = tp_arena_take(&arena, (size_t)w->tables, sizeof(tp_slice_cost), &memory);
    tp_slice_cost *cost = memory;
    for (int b = 0; status == TP_OK && b < w->tables; b++)
        status = tp_slice_cost_coarsen(&arena, &w->cost[b], FACTOR, &cost[b]);
    if (status == TP_OK && options->message != NULL)
        status = coarse_messages(&arena, w, options->message, FACTOR, &coarse.message);
    if (status == TP_OK)
        status = solve(cost, w->batch, w->tables, &coarse, w->deadline_s, 1, &plan);
    if (status == TP_OK && tp_slice_plan_evaluate(cost, NULL, &coarse, &plan) == TP_OK) { /* else: no hint */
        *hint = plan.max_s;
        *most = tp_slice_most(&plan, options, w->n, FACTOR);
        if (w->n % FACTOR == 0)
            scale(w, &plan, FACTOR);
        w->plan->searches += plan.searches;
        w->plan->small_searches += plan.small_searches;
        tp_slice_plan_free(&plan);
    }
    tp_arena_close(&arena);
    return status;
}

tp_status
tp_plan_slices(const tp_slice_cost *cost, int batch, const tp_slice_options *options, tp_slice_plan *out)
{
    double start = 1e-9 * (double)tp_clock_ns();
    if (batch < 1)
        return tp_fail(TP_EVALUE, "batch is %d: at least 1 sequence is needed", batch);
    TP_TRY(tp_slice_options_check(cost, options));
    int tables = options->widest > 0 && options->widest < batch ? options->widest : batch;
    tp_slice_plan plan;
    double deadline_s = options->time_limit_s > 0.0 ? start + options->time_limit_s : 0.0;
    TP_TRY(solve(cost, batch, tables, options, deadline_s, 0, &plan));
    TP_TRY(tp_slice_plan_evaluate(cost, NULL, options, &plan));
    plan.lower_bound_s = fmin(plan.lower_bound_s, plan.latency_s);
    plan.seconds = 1e-9 * (double)tp_clock_ns() - start;
    *out = plan;
    return TP_OK;
}
