/* Slices for uneven stages: checks, timing, and what surrounds the label search. */
#include "csrc/plan/uneven.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/plan/slicing_bound.h"
#include "csrc/plan/uneven_core.h"

/* Before rounding of sums along one path, relative: a path has at most units + 2 stages terms. */
static double
rounding(const tp_uneven_request *r)
{
    return 1e-12 + 0x1p-52 * (r->units + 2.0 * r->stages);
}

static tp_status
check_table(const tp_uneven_request *r, const double *table, const char *name)
{
    char where[64];
    size_t n = (size_t)r->units + 1;
    for (int k = 0; k < r->stages; k++)
        for (int s = 1; s <= r->units; s++)
            for (int c = 0; c <= r->units - s; c++) {
                double x = table[((size_t)k * n + (size_t)s) * n + (size_t)c];
                if (x >= 0.0 && x <= 1e300)
                    continue;
                snprintf(where, sizeof where, "%s[%d, %d, %d]", name, k, s, c);
                return tp_fail(TP_EVALUE, "%s is %g: a slice cost must be finite and not negative, in seconds", where, x);
            }
    return TP_OK;
}

tp_status
tp_uneven_check(const tp_uneven_request *r)
{
    if (r->stages < 1 || r->units < 1)
        return tp_fail(TP_EVALUE, "there are %d stages and %d units: at least 1 of each is needed", r->stages, r->units);
    if (r->longest < 0 || r->work < 0)
        return tp_fail(TP_EVALUE, "longest is %d, work %lld: 0 (no limit) or more would be right", r->longest,
                       (long long)r->work);
    TP_TRY(check_table(r, r->forward, "t"));
    return r->backward != NULL ? check_table(r, r->backward, "bwd") : TP_OK;
}

static double
latency(const tp_uneven_request *r, const int *length, int slices, double *free, double *slice)
{
    int width = r->backward != NULL ? 2 * r->stages : r->stages, start = 0;
    memset(free, 0, (size_t)width * sizeof *free);
    for (int i = 0; i < slices; start += length[i++]) {
        for (int k = 0; k < width; k++)
            slice[k] = tp_uneven_at(r, k, start, length[i]);
        tp_uneven_advance(r->stages, width, free, slice, free);
    }
    return tp_uneven_end(r->stages, width, free);
}

tp_status
tp_uneven_latency(const tp_uneven_request *r, const int *length, int slices, double *latency_s)
{
    int64_t sum = 0;
    for (int i = 0; i < slices; i++) {
        if (length[i] < 1)
            return tp_fail(TP_EVALUE, "slice %d has %d units: at least 1 is needed", i, length[i]);
        sum += length[i];
    }
    if (sum != r->units)
        return tp_fail(TP_EVALUE, "the slices have %lld units together: %d would be right", (long long)sum, r->units);
    double *scratch = calloc((size_t)r->stages * 4, sizeof *scratch);
    if (scratch == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the times of %d stages", r->stages);
    *latency_s = latency(r, length, slices, scratch, scratch + 2 * r->stages);
    free(scratch);
    return TP_OK;
}

tp_status
tp_uneven_offer(tp_uneven *u, const int *length, int slices)
{
    double seconds;
    TP_TRY(tp_uneven_latency(u->request, length, slices, &seconds));
    u->plan->evaluations++;
    u->plan->work += slices;
    if (seconds < u->plan->latency_s) {
        u->plan->latency_s = seconds;
        u->plan->slices = slices;
        memmove(u->plan->length, length, (size_t)slices * sizeof *length);
    }
    return TP_OK;
}

/* Slices of at most `most` units, equal but the last. */
static tp_status
offer_equal(tp_uneven *u, int most)
{
    void *memory;
    int left = u->request->units, slices = 0;
    TP_TRY(tp_slice_arena_take(u->arena, (size_t)left, sizeof(int), &memory));
    int *length = memory;
    for (; left > 0; left -= length[slices++])
        length[slices] = left < most ? left : most;
    return tp_uneven_offer(u, length, slices);
}

/* max over stages of the shortest [first slice through the stages before, all slices on it, last slice through those
 * behind], of forward plus that of backward; and of one stage's forward and backward together. */
static tp_status
bound_all(tp_uneven *u, double *bound_s)
{
    const tp_uneven_request *r = u->request;
    size_t n = (size_t)r->units + 1;
    int K = r->stages, shops = u->width / K;
    void *memory;
    TP_TRY(tp_slice_arena_take(u->arena, n * ((size_t)u->width * 2 + 4), sizeof(double), &memory));
    double *head = memory, *tail = head + n * (size_t)u->width, *first = tail + n * (size_t)u->width, *last = first + n;
    for (int shop = 0; shop < shops; shop++)
        for (int s = 1; s < (int)n; s++) {
            for (int k = 1; k < K; k++)
                head[(size_t)(shop * K + k) * n + (size_t)s] =
                    head[(size_t)(shop * K + k - 1) * n + (size_t)s] + tp_uneven_at(r, shop * K + k - 1, 0, s);
            for (int k = K - 2; k >= 0; k--)
                tail[(size_t)(shop * K + k) * n + (size_t)s] =
                    tail[(size_t)(shop * K + k + 1) * n + (size_t)s] + tp_uneven_at(r, shop * K + k + 1, r->units - s, s);
        }
    double apart = 0.0, together = 0.0, least;
    for (int shop = 0; shop < shops; shop++) {
        double worst = 0.0;
        for (int k = 0; k < K; k++) {
            const double *table = (shop ? r->backward : r->forward) + (size_t)k * n * n;
            size_t row = (size_t)(shop * K + k) * n;
            tp_slice_path path = {{{.units = r->units, .table = table}}, {1.0}, 1, u->cap, head + row, tail + row};
            TP_TRY(tp_slice_path_least(&path, &least));
            worst = least > worst ? least : worst;
        }
        apart += worst;
    }
    for (int k = 0; shops == 2 && k < K; k++) {
        size_t f = (size_t)k * n, b = (size_t)(K + k) * n;
        for (size_t s = 0; s < n; s++) {
            first[s] = head[f + s] + head[b + s];
            last[s] = tail[f + s] + tail[b + s];
        }
        tp_slice_path path = {{{.units = r->units, .table = r->forward + (size_t)k * n * n},
                               {.units = r->units, .table = r->backward + (size_t)k * n * n}},
                              {1.0, 1.0}, 2, u->cap, first, last};
        TP_TRY(tp_slice_path_least(&path, &least));
        together = least > together ? least : together;
    }
    *bound_s = (apart > together ? apart : together) * (1.0 - rounding(r));
    return TP_OK;
}

static tp_status
solve(tp_uneven *u)
{
    tp_uneven_plan *plan = u->plan;
    const tp_uneven_request *r = u->request;
    int exact = r->units <= TP_UNEVEN_EXACT, factor = exact ? 1 : (r->units - 1) / (TP_UNEVEN_EXACT / 2) + 1;
    double open = 0.0;
    TP_TRY(offer_equal(u, u->cap));
    TP_TRY(bound_all(u, &plan->lower_bound_s));
    if (exact || factor <= u->cap) {
        TP_TRY(tp_uneven_open(u, factor));
        TP_TRY(tp_uneven_surrogate(u));
        if (exact) /* a good start prunes more than it costs */
            TP_TRY(tp_uneven_improve(u, 4));
        TP_TRY(tp_uneven_labels(u, &open));
    }
    if (exact) {
        plan->optimal = open >= plan->latency_s;
        double proved = open * (1.0 - rounding(r));
        plan->lower_bound_s = plan->optimal || proved > plan->lower_bound_s ? proved : plan->lower_bound_s;
    }
    if (!plan->optimal)
        TP_TRY(tp_uneven_improve(u, factor));
    if (plan->lower_bound_s > plan->latency_s)
        plan->lower_bound_s = plan->latency_s;
    return TP_OK;
}

tp_status
tp_plan_uneven(const tp_uneven_request *r, tp_uneven_plan *plan)
{
    tp_slice_arena arena;
    int64_t started = tp_clock_ns();
    memset(plan, 0, sizeof *plan);
    plan->latency_s = INFINITY;
    plan->length = calloc((size_t)r->units, sizeof *plan->length);
    if (plan->length == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d slices", r->units);
    tp_uneven u = {.request = r, .arena = &arena, .stages = r->stages, .plan = plan,
                   .width = r->backward != NULL ? 2 * r->stages : r->stages,
                   .cap = r->longest > 0 && r->longest < r->units ? r->longest : r->units,
                   .limit = r->work > 0 ? r->work : TP_UNEVEN_WORK};
    tp_status status = tp_slice_arena_open(&arena);
    if (status != TP_OK)
        return status;
    status = solve(&u);
    tp_slice_arena_close(&arena);
    plan->seconds = 1e-9 * (double)(tp_clock_ns() - started);
    return status;
}

void
tp_uneven_plan_free(tp_uneven_plan *plan)
{
    free(plan->length);
    plan->length = NULL;
}
