/* Flush groups (PLANNERS.md 1.5): where the memory holds only so many sequences the pipeline is emptied in between, and then
 * latencies do add up: H(q) = min over b <= flush of H(q - b) + T(b), T(b) the best of b sequences through one pipeline. */
#include "csrc/plan/plan.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/plan/slice_dp.h"

typedef struct {
    double *fill, *below; /* [batch + 1]: least latency of q sequences, and a bound of it */
    double *least;        /* [batch + 1]: what no plan of b sequences is below, once time is up */
    int bounded, *choice; /* bounded: least is filled; [batch + 1] */
    tp_slice_plan *of;    /* [flush] the plan of b sequences; an infinite latency: there was no time for one */
} flushes_of;

/* The least seconds of a unit of the cost's sequences, whatever the slices. 0: not known. */
static double
least_rate(const tp_slice_cost *cost)
{
    double rate = INFINITY;
    int n = cost->units;
    for (int i = 1; i <= n; i++) {
        double here = 0.0;
        if (cost->table == NULL) /* linear in the context: the ends decide */
            here = i == n ? cost->g0[i] : fmin(cost->g0[i], fmin(tp_slice_cost_at(cost, 1, i), tp_slice_cost_at(cost, n - i, i)));
        else if (cost->least != NULL)
            here = cost->least[i];
        rate = fmin(rate, here / i);
    }
    return rate;
}

/* What no plan of b sequences through one pipeline is below, without a search: some slice is the last one. */
static void
bound_sizes(const tp_slice_cost *cost, int flush, const tp_slice_options *options, double *least)
{
    int n = cost->units, tables = options->widest > 0 && options->widest < flush ? options->widest : flush;
    double largest = INFINITY;
    for (int q = 1; q <= flush; q++)
        least[q] = INFINITY;
    for (int b = 1; b <= tables; b++) {
        double sum = least_rate(&cost[b - 1]) * n;
        for (int q = b; q <= flush; q++)
            least[q] = fmin(least[q], least[q - b] + sum);
        for (int i = 1; i <= n; i++)
            largest = fmin(largest, tp_slice_cost_at(&cost[b - 1], n - i, i));
    }
    for (int q = 1; q <= flush; q++)
        least[q] = (least[q] + (options->stages - 1.0) * largest) * (1.0 - 1e-15 * (n + flush));
}

/* The size that most flushes have comes first, then that of what is left over: these two are a plan. Of the others only a bound is
 * known where time is up. */
static tp_status
plan_sizes(const tp_slice_cost *cost, int batch, int flush, const tp_slice_options *options, double start, flushes_of *f)
{
    for (int turn = 0, done = 0; turn <= flush; turn++) {
        int b = turn == 0 ? flush : turn == 1 ? batch % flush : flush + 1 - turn;
        tp_slice_options one = *options;
        if (b == 0 || f->of[b - 1].group != NULL)
            continue;
        if (one.time_limit_s > 0.0) { /* what is left, shared by the sizes to come; never none, which is no limit */
            double left = one.time_limit_s - (1e-9 * (double)tp_clock_ns() - start);
            if (left <= 0.0 && turn > 1) {
                if (!f->bounded++)
                    bound_sizes(cost, flush, options, f->least);
                f->of[b - 1] = (tp_slice_plan){.latency_s = INFINITY, .lower_bound_s = f->least[b]};
                continue;
            }
            one.time_limit_s = fmax(turn == 0 && flush > 1 ? 0.5 * left : left / (flush - done), 1e-9);
        }
        TP_TRY(tp_plan_slices(cost, b, &one, &f->of[b - 1]));
        done++;
    }
    return TP_OK;
}

static void
fill(int batch, int flush, flushes_of *f)
{
    for (int q = 1; q <= batch; q++) {
        f->fill[q] = f->below[q] = INFINITY;
        for (int b = 1; b <= q && b <= flush; b++) {
            if (f->fill[q - b] + f->of[b - 1].latency_s < f->fill[q]) {
                f->fill[q] = f->fill[q - b] + f->of[b - 1].latency_s;
                f->choice[q] = b;
            }
            f->below[q] = fmin(f->below[q], f->below[q - b] + f->of[b - 1].lower_bound_s);
        }
    }
}

/* Append the groups of one flush. */
static void
append(const tp_slice_plan *one, tp_slice_plan *out)
{
    for (int g = 0; g < one->groups; g++) {
        tp_slice_group *group = &out->group[out->groups++];
        *group = one->group[g];
        group->first += out->slices;
    }
    memcpy(out->length + out->slices, one->length, (size_t)one->slices * sizeof(int));
    out->slices += one->slices;
    out->total_s += one->total_s;
    out->max_s = fmax(out->max_s, one->max_s);
    out->optimal &= one->optimal;
}

static void
take(int batch, int flush, const flushes_of *f, tp_slice_plan *out, int *flush_of, int *flushes)
{
    out->optimal = 1;
    *flushes = 0;
    for (int q = batch; q > 0; q -= f->choice[q]) {
        flush_of[(*flushes)++] = f->choice[q];
        append(&f->of[f->choice[q] - 1], out);
    }
    for (int b = 0; b < flush; b++) {
        out->searches += f->of[b].searches;
        out->small_searches += f->of[b].small_searches;
        out->edges = f->of[b].edges > out->edges ? f->of[b].edges : out->edges;
        out->optimal &= f->of[b].optimal;
    }
    out->latency_s = f->fill[batch];
    out->lower_bound_s = fmin(f->below[batch] * (1.0 - 1e-15 * batch), f->fill[batch]);
}

static tp_status
solve(const tp_slice_cost *cost, int batch, int flush, const tp_slice_options *options, double start, flushes_of *f,
      tp_slice_plan *out, int *flush_of, int *flushes)
{
    TP_TRY(plan_sizes(cost, batch, flush, options, start, f));
    fill(batch, flush, f);
    if (!isfinite(f->fill[batch])) /* each flush is finite, all together need not be; and then none was chosen */
        return tp_fail(TP_EVALUE, "every slicing takes more than %g s on %d stages: smaller costs are needed", DBL_MAX, options->stages);
    TP_TRY(tp_slice_plan_open(batch, (int64_t)batch * cost->units, out));
    take(batch, flush, f, out, flush_of, flushes);
    return TP_OK;
}

tp_status
tp_plan_slices_flushed(const tp_slice_cost *cost, int batch, int flush, const tp_slice_options *options,
                       tp_slice_plan *out, int *flush_of, int *flushes)
{
    double start = 1e-9 * (double)tp_clock_ns();
    if (batch < 1 || flush < 1)
        return tp_fail(TP_EVALUE, "batch is %d and at most %d sequences may be in flight: at least 1 of each is needed", batch,
                       flush);
    flush = flush < batch ? flush : batch;
    size_t values = (size_t)batch + 1;
    flushes_of f = {.fill = calloc(values, sizeof(double)), .below = calloc(values, sizeof(double)),
                    .least = calloc(values, sizeof(double)), .choice = calloc(values, sizeof(int)),
                    .of = calloc((size_t)flush, sizeof(tp_slice_plan))};
    tp_status status = TP_OK;
    if (f.fill == NULL || f.below == NULL || f.least == NULL || f.choice == NULL || f.of == NULL)
        status = tp_fail(TP_EMEMORY, "no memory for the flushes of %d sequences", batch);
    else
        status = solve(cost, batch, flush, options, start, &f, out, flush_of, flushes);
    for (int b = 0; f.of != NULL && b < flush; b++)
        tp_slice_plan_free(&f.of[b]);
    free(f.fill);
    free(f.below);
    free(f.least);
    free(f.choice);
    free(f.of);
    if (status == TP_OK)
        out->seconds = 1e-9 * (double)tp_clock_ns() - start;
    return status;
}
