/* What the slice planners share: checks of costs and memory, and filling in a plan. */
#include "csrc/plan/plan.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"
#include "csrc/plan/slice_dp.h"

static int
bad(double x)
{
    return !(x >= 0.0 && x <= 1e300);
}

static tp_status
fail_cell(const char *where, double x)
{
    return tp_fail(TP_EVALUE, "%s is %g: a slice cost must be finite (at most 1e300) and not negative, in seconds", where,
                   isnan(x) ? NAN : x); /* NAN: of the two signs the one that prints without */
}

/* Is a cost of this length bad, and which is the least? In lanes and without an early exit, so that the compiler uses vectors and
 * tables of many megabytes are read at the speed of memory. */
static int
check_length(const double *row, int count, double *least)
{
    enum { LANES = 8 };
    double low[LANES], high[LANES];
    int j = 0, unordered = 0;
    for (int k = 0; k < LANES; k++)
        low[k] = high[k] = row[0];
    for (; j + LANES <= count; j += LANES)
        for (int k = 0; k < LANES; k++) {
            double x = row[j + k];
            low[k] = x < low[k] ? x : low[k];
            high[k] = x > high[k] ? x : high[k];
            unordered |= x != x;
        }
    for (; j < count; j++) {
        low[0] = row[j] < low[0] ? row[j] : low[0];
        high[0] = row[j] > high[0] ? row[j] : high[0];
        unordered |= row[j] != row[j];
    }
    for (int k = 1; k < LANES; k++) {
        low[0] = low[k] < low[0] ? low[k] : low[0];
        high[0] = high[k] > high[0] ? high[k] : high[0];
    }
    *least = low[0];
    return unordered || bad(low[0]) || bad(high[0]);
}

/* least: NULL, or [units + 1]. */
static tp_status
check_table(const tp_slice_cost *cost, const char *name, double *least)
{
    char where[96];
    int n = cost->units;
    int64_t steps = 0;
    for (int i = 1; i <= n; i++) {
        const double *row = cost->table + (size_t)i * (size_t)(n + 1);
        double low;
        TP_TRY(tp_deadline_check_after(&steps, n));
        if (check_length(row, n - i + 1, &low)) {
            int j = 0;
            while (!bad(row[j]))
                j++;
            snprintf(where, sizeof where, "%s[%d, %d]", name, i, j);
            return fail_cell(where, row[j]);
        }
        if (least != NULL)
            least[i] = low;
    }
    return TP_OK;
}

tp_status
tp_slice_cost_check_least(tp_slice_cost *cost, const char *name, double *least)
{
    if (cost->table == NULL || cost->units < 1)
        return tp_slice_cost_check(cost, name);
    TP_TRY(check_table(cost, name, least));
    cost->least = least;
    return TP_OK;
}

tp_status
tp_slice_cost_check(const tp_slice_cost *cost, const char *name)
{
    char where[96];
    int n = cost->units;
    if (n < 1)
        return tp_fail(TP_EVALUE, "%s has %d units: at least 1 is needed", name, n);
    if (cost->table != NULL)
        return check_table(cost, name, NULL);
    if (!isfinite(cost->a2) || !isfinite(cost->a3))
        return tp_fail(TP_EVALUE, "%s has a2 = %g, a3 = %g: finite coefficients are needed", name, cost->a2, cost->a3);
    for (int i = 1; i <= n; i++) {
        if (bad(cost->g0[i]) || !isfinite(cost->g1[i])) {
            snprintf(where, sizeof where, "%s.%s[%d]", name, bad(cost->g0[i]) ? "G0" : "G1", i);
            return fail_cell(where, bad(cost->g0[i]) ? cost->g0[i] : cost->g1[i]);
        }
        if (i < n) { /* linear in the context: the two ends decide */
            double first = tp_slice_cost_at(cost, 1, i), last = tp_slice_cost_at(cost, n - i, i);
            if (bad(first) || bad(last)) {
                snprintf(where, sizeof where, "%s(%d units after %d)", name, i, bad(first) ? 1 : n - i);
                return fail_cell(where, bad(first) ? first : last);
            }
        }
    }
    return TP_OK;
}

tp_status
tp_slice_options_check(const tp_slice_cost *cost, const tp_slice_options *options)
{
    if (options->stages < 1)
        return tp_fail(TP_EVALUE, "stages is %d: at least 1 is needed", options->stages);
    if (options->longest < 0)
        return tp_fail(TP_EVALUE, "the longest slice is %d units: at least 1 is needed", options->longest);
    if (!(options->gap >= 0.0))
        return tp_fail(TP_EVALUE, "the gap is %g: 0 or more is needed", options->gap);
    if (options->memory.limit_bytes > 0.0)
        TP_TRY(tp_slice_memory_check(&options->memory, cost->units));
    if (!(options->time_limit_s >= 0.0))
        return tp_fail(TP_EVALUE, "the time limit is %g s: 0 or more is needed", options->time_limit_s);
    if (cost->units > 1 << 24)
        return tp_fail(TP_EVALUE, "%d units: at most %d; a coarser granularity is needed", cost->units, 1 << 24);
    if (tp_slice_kernels_for(options->isa) == NULL)
        return tp_fail(TP_EVALUE, "instruction set %d is not on this machine: 0 chooses one", (int)options->isa);
    return TP_OK;
}

tp_status
tp_slice_memory_check(const tp_slice_memory *m, int units)
{
    const double parts[] = {m->limit_bytes, m->row_bytes, m->pair_bytes, m->context_bytes};
    static const char *const names[] = {"limit", "row", "pair", "context"};
    for (int k = 0; k < 4; k++)
        if (bad(parts[k]))
            return tp_fail(TP_EVALUE, "the memory's %s_bytes is %g: finite bytes from 0 on are needed", names[k], parts[k]);
    if (tp_slice_held(m, units - 1, 1)) /* bytes rise with the start: this is the neediest slice of one unit */
        return TP_OK;
    double needed = tp_slice_bytes(m, units - 1, 1);
    return tp_fail(TP_EINFEASIBLE,
                   "a slice of one unit after %d needs %.15g bytes and may use %.15g: %.15g bytes short on every stage; "
                   "limit_bytes = %.15g would fit",
                   units - 1, needed, m->limit_bytes, needed - m->limit_bytes, ceil(needed));
}

tp_status
tp_slice_cost_coarsen(tp_arena *arena, const tp_slice_cost *cost, int factor, tp_slice_cost *out)
{
    int n = cost->units / factor;
    void *memory;
    size_t width = (size_t)n + 1;
    *out = (tp_slice_cost){.units = n, .a2 = cost->a2 * factor, .a3 = cost->a3 * factor * factor};
    TP_TRY(tp_arena_take(arena, cost->table != NULL ? width * width : 2 * width, sizeof(double), &memory));
    double *values = memory;
    if (cost->table != NULL) {
        int64_t steps = 0;
        for (int i = 1; i <= n; i++) {
            TP_TRY(tp_deadline_check_after(&steps, n));
            for (int j = 0; j <= n - i; j++)
                values[(size_t)i * width + (size_t)j] = tp_slice_cost_at(cost, j * factor, i * factor);
        }
        out->table = values;
        return TP_OK;
    }
    for (int i = 1; i <= n; i++) {
        values[i] = cost->g0[i * factor];
        values[width + (size_t)i] = cost->g1[i * factor];
    }
    out->g0 = values;
    out->g1 = values + width;
    return TP_OK;
}

tp_status
tp_slice_plan_open(int groups, int64_t slices, tp_slice_plan *plan)
{
    memset(plan, 0, sizeof *plan);
    plan->group = calloc((size_t)groups, sizeof *plan->group);
    plan->length = calloc((size_t)slices, sizeof *plan->length);
    if (plan->group != NULL && plan->length != NULL)
        return TP_OK;
    tp_slice_plan_free(plan);
    return tp_fail(TP_EMEMORY, "no memory for a plan of %lld slices", (long long)slices);
}

void
tp_slice_plan_free(tp_slice_plan *plan)
{
    free(plan->group);
    free(plan->length);
    plan->group = NULL;
    plan->length = NULL;
}

tp_status
tp_slice_plan_evaluate(const tp_slice_cost *cost, const tp_slice_cost *backward, const tp_slice_options *options,
                       tp_slice_plan *plan)
{
    const tp_slice_cost *message = options->message;
    double total = 0.0, largest = 0.0, largest_backward = 0.0;
    for (int g = 0; g < plan->groups; g++) {
        const tp_slice_group *group = &plan->group[g];
        for (int k = 0, start = 0; k < group->slices; k++) {
            int length = plan->length[group->first + k];
            double c = tp_slice_cost_at(&cost[group->batch - 1], start, length);
            double back = backward != NULL ? tp_slice_cost_at(backward, start, length) : 0.0;
            double sent = message != NULL ? tp_slice_cost_at(&message[group->batch - 1], start, length) : 0.0;
            total += c + back;
            largest = fmax(largest, c + sent);
            if (backward != NULL)
                largest_backward = fmax(largest_backward, back + sent);
            start += length;
        }
    }
    plan->total_s = total;
    plan->max_s = largest + largest_backward;
    plan->latency_s = total + ((double)options->stages - 1.0) * plan->max_s;
    if (plan->groups > 0 && plan->group[0].slices > 0 && isfinite(plan->latency_s))
        return TP_OK;
    tp_slice_plan_free(plan);
    return tp_fail(TP_EVALUE, "every slicing takes more than %g s on %d stages: smaller costs are needed", DBL_MAX,
                   options->stages);
}
