/* A lower bound on the least latency in one dynamic programme (PLANNERS.md 1.3, "position-weighted Lagrangian"): for
 * any nondecreasing N with N(0) = 0 and N(L) = 1, the largest slice is at least the mean of the slices weighted by
 * N(end) - N(start), so latency >= min over slicings of sum c (1 + (K-1) (N(end) - N(start))). */
#include "csrc/plan/plan.h"

#include <float.h>
#include <math.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"
#include "csrc/plan/slice_dp.h"

/* Multipliers by the stationarity of the optimum: a slice of i units weighs as c / (i dc/di) - 1, spread evenly. */
static void
multipliers(const tp_slice_cost *cost, double weight, const int *length, int slices, double *n)
{
    int units = cost->units, start = 0;
    double total = 0.0;
    n[0] = 0.0;
    for (int k = 0; k < slices; start += length[k++]) {
        int i = length[k], step = i / 8 + 1; /* wide: measured costs are noisy, and come in tiles */
        int more = i + step <= units - start ? i + step : units - start, less = i > step ? i - step : 1;
        double c = tp_slice_cost_at(cost, start, i), share = 1.0;
        if (more > less) {
            double slope = (tp_slice_cost_at(cost, start, more) - tp_slice_cost_at(cost, start, less)) / (more - less);
            share = slope > 0.0 ? fmin(fmax(c / (i * slope) - 1.0, 0.02), 50.0) : 50.0;
        }
        for (int e = 1; e <= i; e++)
            n[start + e] = total + share * e / i;
        total += share;
    }
    for (int e = 1; e <= units; e++)
        n[e] *= weight / total;
}

static double
least_rate(const tp_slice_dp *dp)
{
    double rate = INFINITY;
    for (int j = 0; j < dp->n; j++)
        for (int i = 1; i <= dp->cap && i <= dp->n - j && (!dp->sum.smooth || j < 2); i++)
            rate = fmin(rate, tp_slice_at(&dp->sum, j, i) / i); /* smooth: later starts cost more than start 1 */
    return dp->sum.smooth && (dp->sum.a2 < 0.0 || dp->sum.a3 < 0.0) ? 0.0 : rate;
}

/* Is it time to end? Never before so many steps, half a second's: a bound of less work is whole whatever the limit. */
static int
is_up(int64_t *steps, int more, double end_s)
{
    const int64_t look = tp_deadline_steps, whole = look << 13, before = *steps;
    *steps += more;
    return *steps >= whole && before / look != *steps / look &&
           (tp_deadline_late() || (end_s > 0.0 && 1e-9 * (double)tp_clock_ns() > end_s));
}

/* The searches that end early have every way up to `end` begun: one that comes from before it, and then costs the least there is. */
static double
least_from(const tp_slice_dp *dp, int end, double rate)
{
    double least = INFINITY;
    for (int e = end; e <= dp->n; e++)
        least = fmin(least, dp->u[e] + rate * (dp->n - e));
    return least;
}

/* end_s, on tp_clock_ns: what is searched until then; 0: all. */
static double
weighted_search(tp_slice_dp *dp, const double *n, double threshold, double latency, double rate, double end_s)
{
    int64_t steps = 0;
    const tp_slice_table *t = &dp->sum;
    int units = dp->n, window = dp->cap, rising = !t->smooth || t->rising;
    dp->u[0] = 0.0;
    for (int e = 1; e < units + 1 + TP_SLICE_PAD; e++)
        dp->u[e] = INFINITY;
    for (int j = 0; j < units; j++) {
        if (dp->u[j] >= latency)
            continue;
        int last = dp->cap < units - j ? dp->cap : units - j;
        if (t->smooth && rising && j > 0) {
            window = window < last ? window : last;
            while (window > 0 && tp_slice_at(t, j, window) > threshold)
                window--;
            last = window;
        }
        const double *g = !t->smooth ? tp_slice_row(t, j) + 1 : j == 0 ? t->g0 + 1 : t->g1 + 1;
        const double level = t->smooth ? t->a2 * j : 0.0, slope = t->smooth ? t->a3 * j : 0.0;
        const double set[5] = {dp->u[j], level, slope, 1.0 - n[j], threshold};
        if (tp_deadline_told_after(&dp->asked, last))
            break;
        if (is_up(&steps, last, end_s))
            return least_from(dp, j, rate);
        dp->kernels->relax_weighted(dp->u + j + 1, g, n + j + 1, set, last);
    }
    return dp->u[units];
}

static tp_status
bound_in(tp_arena *arena, const tp_slice_cost *cost, const tp_slice_options *options, const int *length,
         int slices, double *bound_s)
{
    tp_slice_dp dp;
    void *memory;
    double latency = 0.0, largest = 0.0, limit_s = options->time_limit_s;
    double end_s = limit_s > 0.0 ? 1e-9 * (double)tp_clock_ns() + limit_s : 0.0;
    int start = 0;
    for (int k = 0; k < slices; start += length[k++]) {
        double c = tp_slice_cost_at(cost, start, length[k]);
        latency += c;
        largest = fmax(largest, c);
    }
    TP_TRY(tp_slice_dp_open(arena, cost, NULL, options, INFINITY, &dp));
    latency += dp.weight * largest;
    TP_TRY(tp_arena_take(arena, (size_t)cost->units + 1, sizeof(double), &memory));
    double *n = memory;
    multipliers(cost, dp.weight, length, slices, n);
    /* A plan with a slice above the threshold is no faster than the one given, so those slices need no search. */
    double rate = least_rate(&dp), threshold = dp.weight > 0.0 ? (latency - rate * dp.n) / dp.weight : INFINITY;
    double least = weighted_search(&dp, n, threshold, latency, rate, end_s);
    TP_TRY(tp_deadline_check_told());
    *bound_s = fmin(least, latency) * (1.0 - 1e-9); /* the weights are rounded */
    return TP_OK;
}

tp_status
tp_slice_bound(const tp_slice_cost *cost, const tp_slice_options *options, const int *length, int slices,
               double *bound_s)
{
    int64_t sum = 0;
    TP_TRY(tp_slice_options_check(cost, options));
    for (int k = 0; k < slices; k++) {
        if (length[k] < 1)
            return tp_fail(TP_EVALUE, "lengths[%d] is %d: at least 1 unit is needed", k, length[k]);
        sum += length[k];
    }
    if (sum != cost->units)
        return tp_fail(TP_EVALUE, "lengths sum to %lld units: %d is right", (long long)sum, cost->units);
    tp_arena arena;
    TP_TRY(tp_arena_open(&arena));
    tp_status status = bound_in(&arena, cost, options, length, slices, bound_s);
    tp_arena_close(&arena);
    if (status == TP_OK && !isfinite(*bound_s))
        return tp_fail(TP_EVALUE, "the slicing takes more than %g s on %d stages: smaller costs are needed", DBL_MAX,
                       options->stages);
    return status;
}

static tp_status
least_in(tp_arena *arena, const tp_slice_cost *cost, const tp_slice_options *options, double threshold_s,
         double *least_s, int *length, int *slices, int *queued)
{
    tp_slice_dp dp;
    TP_TRY(tp_slice_dp_open(arena, cost, NULL, options, INFINITY, &dp));
    const double both[2] = {threshold_s, dp.most_bytes};
    *least_s = tp_slice_dp_forward(&dp, both);
    TP_TRY(tp_deadline_check_told());
    *queued = tp_slice_monge_fits(&dp);
    *slices = *least_s < INFINITY ? tp_slice_dp_path(&dp, length) : 0;
    for (int k = 0; k < *slices / 2; k++) { /* last first */
        int swap = length[k];
        length[k] = length[*slices - 1 - k];
        length[*slices - 1 - k] = swap;
    }
    return TP_OK;
}

tp_status
tp_slice_least(const tp_slice_cost *cost, const tp_slice_options *options, double threshold_s, double *least_s, int *length,
               int *slices, int *queued)
{
    tp_arena arena;
    TP_TRY(tp_slice_options_check(cost, options));
    TP_TRY(tp_arena_open(&arena));
    tp_status status = least_in(&arena, cost, options, threshold_s, least_s, length, slices, queued);
    tp_arena_close(&arena);
    return status;
}
