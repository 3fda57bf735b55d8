/* tp_plan_shop: the slicing it starts from, then descent, bound and label setting in turn. */
#include "csrc/plan/shop_search.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"

#define WORK ((int64_t)400 * 1000 * 1000)
#define LABEL_WORK ((int64_t)6 * 1000 * 1000 * 1000) /* most tables of 256 units are proven with a third of it */
#define SURROGATE 2048 /* units up to which a dense surrogate is made */
#define THRESHOLDS 48
#define GRIDS 512 /* no number of units up to 1 << 24 has more divisors */

/* The surrogate problem: equal machines, on which every slice costs what it costs on its slowest real machine (of each chain). */
static void
fill_surrogate(const tp_shop *shop, const tp_shop_options *o, double *table)
{
    int n = shop->units;
    int64_t steps = 0;
    for (int j = 0; j < n && !tp_deadline_told_after(&steps, (int64_t)n * shop->chains * shop->machines); j++)
        for (int i = 1; i <= n - j; i++) {
            double sum = 0.0;
            for (int chain = 0; chain < shop->chains; chain++) {
                double most = 0.0;
                int last = -1;
                for (int k = 0; k < shop->machines; k++) {
                    int c = shop->cost_of[chain * shop->machines + k];
                    if (c != last)
                        most = fmax(most, tp_slice_cost_at(&shop->cost[c], j, i));
                    last = c;
                }
                sum += most;
            }
            table[(size_t)j * (size_t)(n + 1) + (size_t)i] = tp_shop_allowed(shop, o, j, i) ? sum : INFINITY;
        }
}

/* The slicing of least sum with no slice above the threshold: slices into length[], returns their number; 0: there is none. */
static int
within(const double *table, int n, double threshold, double *dist, int *length)
{
    int *next = length + n + 1, count = 0;
    dist[n] = 0.0;
    for (int j = n - 1; j >= 0; j--) {
        const double *row = table + (size_t)j * (size_t)(n + 1);
        dist[j] = INFINITY;
        for (int i = 1; i <= n - j; i++)
            if (row[i] <= threshold && row[i] + dist[j + i] < dist[j]) {
                dist[j] = row[i] + dist[j + i];
                next[j] = j + i;
            }
    }
    if (dist[0] == INFINITY)
        return 0;
    for (int j = 0; j < n; j = next[j])
        length[count++] = next[j] - j;
    return count;
}

static void
offer(tp_shop_line *line, const int *length, int slices, int *kept, int *kept_slices, double *kept_latency)
{
    tp_shop_line_set(line, length, slices);
    if (line->latency < *kept_latency) {
        *kept_latency = line->latency;
        *kept_slices = slices;
        memcpy(kept, length, (size_t)slices * sizeof(int));
    }
}

/* Put into the line the best start: slicings of the surrogate for a ladder of thresholds, judged exactly. */
static tp_status
begin(tp_arena *arena, tp_shop_line *line)
{
    int n = line->shop->units, slices;
    void *memory;
    TP_TRY(tp_arena_take(arena, (size_t)n * ((size_t)n + 1) + (size_t)n + 1, sizeof(double), &memory));
    double *table = memory, *dist = table + (size_t)n * ((size_t)n + 1), low = INFINITY, high = 0.0;
    TP_TRY(tp_arena_take(arena, 3 * ((size_t)n + 1), sizeof(int), &memory));
    int *length = memory, *kept = length + 2 * (n + 1), kept_slices = 0;
    double latency = INFINITY;
    fill_surrogate(line->shop, line->options, table);
    TP_TRY(tp_deadline_check_told());
    slices = within(table, n, 1e308, dist, length);
    offer(line, length, slices, kept, &kept_slices, &latency);
    for (int m = 0; m < slices; m++)
        high = fmax(high, table[(size_t)line->start[m] * (size_t)(n + 1) + (size_t)length[m]]);
    for (int j = 0; j < n; j++)
        low = fmin(low, table[(size_t)j * (size_t)(n + 1) + (size_t)(n - j)]); /* some slice is the last */
    int steps = n <= TP_SHOP_EXACT ? THRESHOLDS : 12;
    low = fmax(low, high / 1000.0);
    for (int t = 0; t < steps && low < high; t++) {
        TP_TRY(tp_deadline_check_after(&line->asked, (int64_t)n * n));
        slices = within(table, n, high * pow(low / high, (t + 1.0) / steps) * (1.0 + 1e-12), dist, length);
        if (slices > 0)
            offer(line, length, slices, kept, &kept_slices, &latency);
    }
    tp_shop_line_set(line, kept, kept_slices);
    return TP_OK;
}

/* Slicings found in coarser units, by the number of those; their lengths are in `arena`, which outlives every search. */
typedef struct {
    tp_arena *arena;
    int count, units[GRIDS], slices[GRIDS], *length[GRIDS];
} grids;

static tp_status
solve(tp_arena *arena, const tp_shop *shop, const tp_shop_options *options, grids *known, tp_shop_line *line,
      tp_shop_plan *plan);

/* Searches `coarse`, whose costs have yet to be made, and notes what it found. */
static tp_status
search_coarse(tp_arena *arena, const tp_shop *shop, tp_shop *coarse, int factor, const tp_shop_options *options, grids *known,
              tp_shop_plan *plan)
{
    tp_shop_line of;
    tp_shop_plan unused = {0};
    void *memory;
    TP_TRY(tp_arena_take(arena, (size_t)shop->costs, sizeof(tp_slice_cost), &memory));
    tp_slice_cost *cost = memory;
    for (int c = 0; c < shop->costs; c++)
        TP_TRY(tp_slice_cost_coarsen(arena, &shop->cost[c], factor, &cost[c]));
    coarse->cost = cost;
    TP_TRY(solve(arena, coarse, options, known, &of, &unused));
    plan->labels += unused.labels;
    plan->moves += unused.moves + of.moves;
    plan->bounds += unused.bounds;
    TP_TRY(tp_arena_take(known->arena, (size_t)of.slices, sizeof(int), &memory));
    memcpy(memory, of.length, (size_t)of.slices * sizeof(int));
    known->units[known->count] = coarse->units;
    known->slices[known->count] = of.slices;
    known->length[known->count++] = memory;
    return TP_OK;
}

/* The slicing in units `factor` times as long, as if it had been asked for. *at: its place in known; -1: not possible. */
static tp_status
solve_coarse(const tp_shop_line *line, int factor, grids *known, tp_shop_plan *plan, int *at)
{
    tp_shop coarse = *line->shop;
    tp_shop_options options = *line->options;
    tp_arena own; /* a search takes much, and there may be a search for each divisor */
    coarse.units /= factor;
    for (*at = 0; *at < known->count; ++*at)
        if (known->units[*at] == coarse.units)
            return TP_OK;
    *at = -1;
    options.longest /= factor;
    if (known->count == GRIDS || (line->options->longest > 0 && options.longest == 0) ||
        !tp_slice_memory_coarsen(&line->options->memory, factor, coarse.units, &options.memory))
        return TP_OK;
    TP_TRY(tp_arena_open(&own));
    tp_status status = search_coarse(&own, line->shop, &coarse, factor, &options, known, plan);
    tp_arena_close(&own);
    *at = known->count - 1;
    return status;
}

/* What was found in units `factor` times as long, if it is allowed and better than what is in the line. */
static void
take_coarse(tp_shop_line *line, const grids *known, int at, int factor, int *scratch, int *done)
{
    const tp_shop *shop = line->shop;
    int left = shop->units - known->units[at] * factor, count = known->slices[at], before = line->slices, start = 0;
    double latency = line->latency;
    if (*done)
        memcpy(scratch, line->length, (size_t)before * sizeof(int));
    for (int m = 0; m < count; m++)
        line->order[m] = known->length[at][m] * factor;
    if (left > 0) /* units beyond the last whole one: a slice of their own */
        line->order[count++] = left;
    for (int m = 0; m < count; start += line->order[m++])
        if (!tp_shop_allowed(shop, line->options, start, line->order[m]))
            return;
    tp_shop_line_set(line, line->order, count);
    if (*done && line->latency >= latency)
        tp_shop_line_set(line, scratch, before);
    *done = 1;
}

/* The best of what is in the line, if *done, and of what coarser grids found: all that this one refines, by one prime at a time,
 * so that a finer grid is never worse. Where none of them is fine enough to begin with, also one that leaves a rest. 0 in *done:
 * nothing was possible. */
static tp_status
from_coarse(tp_arena *arena, tp_shop_line *line, grids *known, tp_shop_plan *plan, int *done)
{
    int n = line->shop->units, least = TP_SHOP_EXACT / 2, fine = n < 2 * least, at;
    void *scratch;
    TP_TRY(tp_arena_take(arena, (size_t)n, sizeof(int), &scratch));
    for (int factor = 2, rest = n; rest > 1; factor++) {
        if (rest % factor != 0)
            continue;
        while (rest % factor == 0)
            rest /= factor;
        TP_TRY(solve_coarse(line, factor, known, plan, &at));
        if (at >= 0)
            take_coarse(line, known, at, factor, scratch, done);
        fine |= at >= 0 && *done && n / factor >= least;
    }
    if (!fine) {
        grids alone = {.arena = arena};
        int factor = (n + least - 1) / least;
        TP_TRY(solve_coarse(line, factor, &alone, plan, &at));
        if (at >= 0)
            take_coarse(line, &alone, at, factor, scratch, done);
    }
    return TP_OK;
}

/* Start with one unit a slice, which is always allowed, where no coarse start is possible. */
static void
singles(tp_shop_line *line)
{
    for (int m = 0; m < line->shop->units; m++)
        line->order[m] = 1;
    tp_shop_line_set(line, line->order, line->shop->units);
}

/* Programmes that the work pays for: each looks at every slice, and mixes the paths through the machines of one plan, where an
 * exponential and a logarithm are worth four extensions of a label. */
static int
affordable(const tp_shop *shop, const tp_shop_line *line, int64_t work)
{
    int64_t one = (int64_t)shop->units * shop->units / 2 * shop->costs / 2 + 1;
    int64_t count = work / (one + 4 * (int64_t)line->slices * shop->machines);
    return count < 3 ? 3 : count > 300 ? 300 : (int)count;
}

static tp_status
solve(tp_arena *arena, const tp_shop *shop, const tp_shop_options *options, grids *known, tp_shop_line *line,
      tp_shop_plan *plan)
{
    int n = shop->units, exact = n <= TP_SHOP_EXACT, done = 0;
    int64_t work = options->work > 0 ? options->work : WORK;
    tp_shop_bound bound;
    double proven = 0.0;
    TP_TRY(tp_shop_line_open(arena, shop, options, line));
    if (!exact)
        TP_TRY(from_coarse(arena, line, known, plan, &done));
    if (!done && n <= SURROGATE)
        TP_TRY(begin(arena, line));
    else if (!done)
        singles(line);
    tp_shop_line_descend(line, work / 8);
    TP_TRY(tp_shop_bound_open(arena, shop, options, &bound));
    if (line->latency > 0.0) {
        tp_shop_bound_run(&bound, line, affordable(shop, line, work / 4));
        tp_shop_line_descend(line, work / 8);
    }
    TP_TRY(tp_deadline_check_told());
    if (exact && bound.best < line->latency * (1.0 - 1e-12))
        TP_TRY(tp_shop_labels(arena, line, bound.best > 0.0 ? &bound : NULL, options->work > 0 ? work : LABEL_WORK,
                              &plan->labels, &proven));
    if (exact && fmax(proven, bound.best) < line->latency * (1.0 - 3e-12)) {
        double before = line->latency;
        TP_TRY(from_coarse(arena, line, known, plan, &(int){1}));
        if (line->latency < before)
            tp_shop_line_descend(line, work / 8);
        TP_TRY(tp_deadline_check_told());
    }
    plan->bounds += bound.programmes;
    plan->latency_s = line->latency;
    plan->lower_bound_s = fmin(fmax(proven, bound.best), line->latency);
    plan->optimal = line->latency <= 0.0 || plan->lower_bound_s >= line->latency * (1.0 - 3e-12);
    return TP_OK;
}

static tp_status
check(const tp_shop *shop, const tp_shop_options *options)
{
    const tp_slice_options o = {.stages = shop->machines, .longest = options->longest, .memory = options->memory};
    if (shop->machines > 4096)
        return tp_fail(TP_EVALUE, "%d machines: at most 4096 would be right", shop->machines);
    TP_TRY(tp_slice_options_check(&shop->cost[0], &o));
    if ((int64_t)shop->units * shop->machines * shop->chains > 1 << 24)
        return tp_fail(TP_EVALUE, "%d units on %d machines: at most %d together (their product); a coarser granularity is needed",
                       shop->units, shop->machines * shop->chains, 1 << 24);
    return TP_OK;
}

static tp_status
keep(const tp_shop_line *line, tp_shop_plan *plan)
{
    plan->moves += line->moves;
    plan->slices = line->slices;
    plan->length = calloc((size_t)line->slices, sizeof(int));
    if (plan->length == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d slices", line->slices);
    memcpy(plan->length, line->length, (size_t)line->slices * sizeof(int));
    return TP_OK;
}

tp_status
tp_plan_shop(const tp_shop *shop, const tp_shop_options *options, tp_shop_plan *out)
{
    double start = 1e-9 * (double)tp_clock_ns();
    tp_arena arena;
    tp_shop_line line;
    tp_shop_plan plan = {0};
    grids coarser = {.arena = &arena};
    TP_TRY(check(shop, options));
    TP_TRY(tp_arena_open(&arena));
    tp_status status = solve(&arena, shop, options, &coarser, &line, &plan);
    if (status == TP_OK)
        status = keep(&line, &plan);
    tp_arena_close(&arena);
    TP_TRY(status);
    plan.seconds = 1e-9 * (double)tp_clock_ns() - start;
    *out = plan;
    return TP_OK;
}

void
tp_shop_plan_free(tp_shop_plan *plan)
{
    free(plan->length);
    plan->length = NULL;
}
