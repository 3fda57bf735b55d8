/* The least period over all partitions: a probe that fills stages one after another, and a search that lets lower and
 * upper bound meet. Why the longest prefix is the best one: dawnpiper.h, (1). */
#include "csrc/plan/dawnpiper.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "csrc/base/deadline.h"
#include "csrc/plan/memopt.h"

/* What a stage is measured by: its relaxed W, its W, or the bytes that nothing can free (to name what would fit). */
typedef enum { RELAXED, EXACT, BYTES } measure;

typedef struct {
    tp_memopt *m;
    measure by;
    int n, stages;
    double *link_s;   /* [n + 1] of a cut before node p; NULL: none costs anything */
    int *allowed;     /* [n + 1] the last cut at or before p that the period allows (leftmost plan), or the first at or
                         after it (rightmost plan); 0 or n: none */
    int *last;        /* [stages + 1] the farthest end of a stage that leaves cuts for those behind it */
    double high;      /* a period that is attained */
    int64_t probes;
} search;

static tp_status
cost_of(search *s, int x, int i, int j, double enough, tp_memopt_range *out)
{
    switch (s->by) {
    case EXACT:
        return tp_memopt_decide(s->m, x, i, j, enough, s->high, out);
    case RELAXED:
        *out = tp_memopt_relaxed(s->m, x, i, j);
        out->high_s = out->low_s;
        return TP_OK;
    default:
        out->low_s = tp_memopt_fixed(s->m, x, i, j);
        if (!s->m->options->optimise)
            out->low_s += tp_dawnpiper_copies(s->m->options, x) * (s->m->active[j] - s->m->active[i]);
        out->high_s = out->low_s;
        return TP_OK;
    }
}

/* The cuts that a period allows. 0 if there are too few; *next: the least larger period that allows more. */
static int
allow(search *s, double period, double *next)
{
    int cuts = s->stages - 1, n = s->n;
    s->last[s->stages] = n;
    if (s->link_s == NULL) {
        for (int x = 0; x < s->stages; x++)
            s->last[x] = n - (s->stages - 1 - x);
        return 1;
    }
    int found = 0;
    s->allowed[0] = 0;
    for (int p = 1; p < n; p++) {
        s->allowed[p] = s->link_s[p] <= period ? p : s->allowed[p - 1];
        if (s->link_s[p] > period)
            *next = fmin(*next, s->link_s[p]);
    }
    s->allowed[n] = n;
    s->last[s->stages - 1] = n;
    for (int p = n - 1; p > 0 && found < cuts; p--)
        if (s->allowed[p] == p)
            s->last[s->stages - 2 - found++] = p;
    return found == cuts;
}

/* The longest [at, j) of stage x, j <= last, whose relaxed cost is within the period; `at` if there is none. Outwards from
 * a guess in doubling steps, then by halves, since costs rise with j. */
static int
reach(search *s, int x, int at, int last, int guess, double period)
{
    int low = at, high = last + 1, step = 1, j = guess > last ? last : guess; /* low fits, high does not */
    measure by = s->by;
    s->by = by == EXACT ? RELAXED : by;
    while (high - low > 1) {
        tp_memopt_range range = {INFINITY, INFINITY};
        j = j <= low ? low + 1 : j >= high ? high - 1 : j;
        int fits = cost_of(s, x, at, j, period, &range) == TP_OK && range.low_s <= period;
        if (fits)
            low = j;
        else
            high = j;
        j = low > at && high <= last ? low + (high - low) / 2 : fits ? low + step : high - step;
        step *= 2;
    }
    s->by = by;
    return low;
}

/* Stage x can take nothing behind boundary[x], but a later one, which holds fewer copies, may: the last cut that the period
 * allows within an earlier stage splits it, and the stages between move on by one. They cost no more there. 0: there is no
 * such cut; what is behind boundary[x] is then in stage x or before it in every plan. Else the first stage that moved. */
static int
make_room(const search *s, int x, int *boundary)
{
    for (int y = x - 1; y >= 0; y--) {
        int cut = boundary[y + 1] - 1;
        if (s->link_s != NULL)
            cut = s->allowed[cut];
        if (cut <= boundary[y])
            continue;
        memmove(boundary + y + 2, boundary + y + 1, (size_t)(x - y) * sizeof *boundary);
        boundary[y + 1] = cut;
        return y + 1;
    }
    return 0;
}

/* Update *attained for stages first .. x as make_room left them. *keeps 0: the work limit leaves open whether they keep to the
 * period. */
static tp_status
settle(search *s, int first, int x, double period, const int *boundary, double *attained, double *next, int *keeps)
{
    tp_memopt_range range;
    *keeps = 1;
    for (; first <= x && *keeps; first++) {
        TP_TRY(cost_of(s, first, boundary[first], boundary[first + 1], period, &range));
        *attained = fmax(*attained, range.high_s);
        if (s->link_s != NULL)
            *attained = fmax(*attained, s->link_s[boundary[first]]);
        *keeps = range.high_s <= period;
        if (!*keeps)
            *next = fmin(*next, range.low_s);
    }
    return TP_OK;
}

/* Fill stages from the first node, each as far as the period goes. *found: did they take all nodes? Then boundary[] and
 * *attained, the period they need. Else no period below *next can do more. */
static tp_status
probe(search *s, double period, int *boundary, double *attained, double *next, int *found)
{
    int at = 0;
    tp_memopt_range range;
    *attained = 0.0;
    *next = INFINITY;
    *found = 0;
    s->probes++;
    TP_TRY(tp_deadline_check("dawnpiper"));
    if (!allow(s, period, next))
        return TP_OK;
    boundary[0] = 0;
    for (int x = 0; x < s->stages; x++) {
        int j = reach(s, x, at, s->last[x], boundary[x + 1], period), cut;
        double cost = 0.0, more = INFINITY;
        if (j < s->last[x]) {
            TP_TRY(cost_of(s, x, at, j + 1, period, &range));
            more = range.low_s;
        }
        for (; j > at; j--) {
            TP_TRY(cost_of(s, x, at, j, period, &range));
            cost = range.high_s;
            if (cost <= period)
                break;
            more = range.low_s;
        }
        *next = fmin(*next, more);
        cut = s->link_s == NULL || x == s->stages - 1 ? j : s->allowed[j];
        if (x == s->stages - 1 && cut < s->n)
            return TP_OK;
        if (cut <= at) {
            int keeps = 0, first = make_room(s, x, boundary);
            if (first > 0)
                TP_TRY(settle(s, first, x, period, boundary, attained, next, &keeps));
            if (!keeps)
                return TP_OK;
            continue;
        }
        if (cut < j) {
            TP_TRY(cost_of(s, x, at, cut, period, &range));
            cost = fmin(range.high_s, cost);
        }
        *attained = fmax(*attained, cost);
        if (s->link_s != NULL && x < s->stages - 1)
            *attained = fmax(*attained, s->link_s[cut]);
        boundary[x + 1] = at = cut;
    }
    *found = 1;
    return TP_OK;
}

/* Let *low (no period below it does) and s->high (boundary[] attains it) meet, to `gap` of it. What a failed probe names
 * as next is proven; where that is not above the period tried, a stage was left undecided by the work limit, and the
 * search goes on above it while *low stays behind. */
static tp_status
close_in(search *s, double *low, double gap, int *boundary, int *trial)
{
    double from = *low, attained, next;
    int found;
    memcpy(trial, boundary, ((size_t)s->stages + 1) * sizeof *trial);
    while (from < s->high * (1.0 - gap)) {
        double middle = from + 0.5 * (s->high - from);
        if (middle >= s->high)
            middle = from;
        TP_TRY(probe(s, middle, trial, &attained, &next, &found));
        if (found) {
            s->high = fmin(attained, s->high);
            memcpy(boundary, trial, ((size_t)s->stages + 1) * sizeof *trial);
        } else {
            *low = fmax(*low, fmin(next, s->high));
            if (middle == from && next <= from)
                break;
            from = fmax(middle, fmin(next, s->high));
        }
    }
    return TP_OK;
}

static tp_status
open_search(tp_memopt *m, measure by, search *s)
{
    *s = (search){.m = m, .by = by, .n = m->n, .stages = m->options->stages, .high = INFINITY};
    void *memory = NULL;
    TP_TRY(tp_arena_take(&m->arena, (size_t)s->stages + 1, sizeof(int), &memory));
    s->last = memory;
    if (m->options->link_Bps <= 0.0 || by == BYTES)
        return TP_OK;
    TP_TRY(tp_arena_take(&m->arena, (size_t)s->n + 1, sizeof(int), &memory));
    s->allowed = memory;
    TP_TRY(tp_arena_take(&m->arena, (size_t)s->n + 1, sizeof(double), &memory));
    s->link_s = memory;
    for (int p = 1; p < s->n; p++)
        s->link_s[p] = m->nodes->cut_bytes[p - 1] / m->options->link_Bps;
    return TP_OK;
}

static tp_status
take_boundary(tp_memopt *m, int **out)
{
    void *memory = NULL;
    TP_TRY(tp_arena_take(&m->arena, (size_t)m->options->stages + 1, sizeof(int), &memory));
    *out = memory;
    return TP_OK;
}

/* Nothing fits: say by how much, with the partition whose largest fixed part is least. */
static tp_status
refuse(tp_memopt *m, int *boundary)
{
    search s;
    int *trial, found, worst = 0;
    double low = 0.0, next, most = -1.0;
    TP_TRY(open_search(m, BYTES, &s));
    TP_TRY(take_boundary(m, &trial));
    TP_TRY(probe(&s, INFINITY, boundary, &s.high, &next, &found));
    TP_TRY(close_in(&s, &low, 1e-15, boundary, trial));
    for (int x = 0; x < s.stages; x++) {
        tp_memopt_range range;
        TP_TRY(cost_of(&s, x, boundary[x], boundary[x + 1], 0.0, &range));
        if (range.high_s > most) {
            most = range.high_s;
            worst = x;
        }
    }
    return tp_fail(TP_EINFEASIBLE,
                   "memory_bytes is %.15g, and no partition into %d stages fits%s: of the best one, stage %d (nodes %d to "
                   "%d) needs %.15g bytes, %.15g short; memory_bytes = %.15g would do",
                   m->options->memory_bytes, s.stages,
                   m->options->optimise ? ", even with every activation recomputed" : " without recomputing or swapping",
                   worst, boundary[worst], boundary[worst + 1] - 1, most, most - m->options->memory_bytes, ceil(most));
}

tp_status
tp_dawnpiper_relax(tp_memopt *m, int *boundary, double *bound_s, double *attained_s, int64_t *probes)
{
    search s;
    int *trial, found = 0;
    double low = tp_memopt_time(m, 0, m->n) / m->options->stages * (1.0 - 1e-14), next;
    TP_TRY(open_search(m, RELAXED, &s));
    TP_TRY(take_boundary(m, &trial));
    for (int x = 0; x <= s.stages; x++)
        boundary[x] = (int)((int64_t)s.n * x / s.stages);
    for (int k = 0; k < m->n; k++)
        low = fmax(low, m->nodes->forward_s[k] + m->nodes->backward_s[k]);
    for (double wide = 0.01; !found; wide = wide < 4.0 ? 4.0 * wide : INFINITY) {
        double period = isinf(wide) ? DBL_MAX : fmin(low * (1.0 + wide), DBL_MAX);
        TP_TRY(probe(&s, period, boundary, &s.high, &next, &found));
        if (!found && period == DBL_MAX)
            return refuse(m, boundary);
        if (!found)
            low = fmax(low, fmin(next, DBL_MAX));
    }
    TP_TRY(close_in(&s, &low, 1e-12, boundary, trial));
    *bound_s = low * (1.0 - 1e-12);
    *attained_s = s.high;
    *probes += s.probes;
    return TP_OK;
}

/* Fill stages from the last node backwards, each as far as the period goes: the other extreme among the optimal plans. */
static tp_status
fill_back(search *s, double period, int *boundary, int *found)
{
    int end = s->n, cuts = 0;
    double next = INFINITY;
    tp_memopt_range range;
    *found = 0;
    if (!allow(s, period, &next))
        return TP_OK;
    int *first = s->last; /* the nearest start of a stage that leaves cuts for those before it */
    first[0] = 0;
    for (int p = 1; p < s->n && cuts < s->stages - 1; p++)
        if (s->link_s == NULL || s->link_s[p] <= period)
            first[++cuts] = p;
    boundary[s->stages] = end;
    for (int x = s->stages - 1; x >= 0; x--) {
        int low = first[x] - 1, high = end; /* low does not fit, high does */
        while (high - low > 1) {
            int i = low + (high - low) / 2;
            TP_TRY(cost_of(s, x, i, end, period, &range));
            if (range.high_s <= period)
                high = i;
            else
                low = i;
        }
        while (s->link_s != NULL && high > 0 && high < end && s->link_s[high] > period)
            high++;
        if (high >= end || (x == 0 && high > 0))
            return TP_OK;
        boundary[x] = end = high;
    }
    *found = 1;
    return TP_OK;
}

static tp_status
choose_all(tp_memopt *m, double period, tp_dawnpiper_plan *plan)
{
    for (int x = 0; x < plan->stages; x++) {
        TP_TRY(tp_memopt_choose(m, x, plan->boundary[x], plan->boundary[x + 1], period, plan->recompute,
                                plan->swap_bytes, &plan->stage_s[x]));
        if (isinf(plan->stage_s[x])) {
            int i = plan->boundary[x], j = plan->boundary[x + 1];
            double least = tp_memopt_fixed(m, x, i, j);
            if (!m->options->optimise)
                least += tp_dawnpiper_copies(m->options, x) * (m->active[j] - m->active[i]);
            return tp_fail(TP_EINFEASIBLE,
                           "memory_bytes is %.15g: stage %d (nodes %d to %d) needs at least %.15g bytes, %.15g short",
                           m->options->memory_bytes, x, i, j - 1, least, least - m->options->memory_bytes);
        }
    }
    return tp_dawnpiper_evaluate(m, plan);
}

static void
copy_plan(const tp_dawnpiper_plan *from, tp_dawnpiper_plan *to)
{
    memcpy(to->boundary, from->boundary, ((size_t)from->stages + 1) * sizeof *to->boundary);
    memcpy(to->recompute, from->recompute, (size_t)from->count);
    memcpy(to->swap_bytes, from->swap_bytes, ((size_t)from->count + 3 * (size_t)from->stages) * sizeof(double));
    to->period_s = from->period_s;
    to->step_s = from->step_s;
}

/* Can the partition have a shorter step than `plan`, its stages as fast as is known to be possible? */
static tp_status
may_be_shorter(tp_memopt *m, tp_dawnpiper_plan *other, const tp_dawnpiper_plan *plan, int *may)
{
    for (int x = 0; x < other->stages; x++)
        TP_TRY(tp_memopt_low(m, x, other->boundary[x], other->boundary[x + 1], &other->stage_s[x]));
    TP_TRY(tp_dawnpiper_evaluate(m, other));
    *may = other->step_s < plan->step_s * (1.0 - 1e-12);
    return TP_OK;
}

/* Of the plans of the least period, the leftmost is in `plan`; the rightmost where its step is shorter. */
static tp_status
choose_end(tp_memopt *m, search *s, double period, tp_dawnpiper_plan *plan)
{
    tp_dawnpiper_plan other;
    int found = 0, may = 0;
    TP_TRY(tp_dawnpiper_plan_open(m->nodes, m->options, &other));
    tp_status status = fill_back(s, period, other.boundary, &found);
    if (status == TP_OK && found)
        status = may_be_shorter(m, &other, plan, &may);
    if (status == TP_OK && may) {
        status = choose_all(m, period, &other);
        if (status == TP_OK && other.period_s <= period && other.step_s < plan->step_s * (1.0 - 1e-12))
            copy_plan(&other, plan);
    }
    tp_dawnpiper_plan_free(&other);
    return status;
}

static tp_status
search_plan(tp_memopt *m, tp_dawnpiper_plan *plan)
{
    search s;
    int *trial, found = 0;
    double attained, next;
    TP_TRY(tp_dawnpiper_relax(m, plan->boundary, &plan->relaxed_s, &attained, &plan->probes));
    TP_TRY(open_search(m, EXACT, &s));
    TP_TRY(take_boundary(m, &trial));
    plan->lower_bound_s = plan->relaxed_s;
    for (double wide = 2e-12; !found; wide = wide < 1.0 ? 8.0 * wide + 1e-5 : INFINITY) {
        double period = isinf(wide) ? DBL_MAX : plan->relaxed_s * (1.0 + wide);
        memcpy(trial, plan->boundary, ((size_t)s.stages + 1) * sizeof *trial);
        TP_TRY(probe(&s, period, trial, &attained, &next, &found));
        if (!found && period == DBL_MAX)
            return tp_fail(TP_EINTERNAL, "the relaxation has a plan and the exact search has none");
        if (!found)
            plan->lower_bound_s = fmax(plan->lower_bound_s, fmin(next, DBL_MAX));
    }
    s.high = attained;
    memcpy(plan->boundary, trial, ((size_t)s.stages + 1) * sizeof *trial);
    plan->lower_bound_s = fmin(plan->lower_bound_s, s.high);
    TP_TRY(close_in(&s, &plan->lower_bound_s, 1e-12, plan->boundary, trial));
    double period = s.high * (1.0 + 2e-12); /* how sums were rounded, which the unit of time decides, makes no stage too long */
    int ends = plan->stages > 1 && m->options->flight != TP_FLIGHT_PIPEDREAM;
    s.high *= 1.0 + 1e-9;
    if (ends)
        TP_TRY(probe(&s, period, trial, &attained, &next, &found));
    if (ends && found)
        memcpy(plan->boundary, trial, ((size_t)plan->stages + 1) * sizeof *trial);
    TP_TRY(choose_all(m, period, plan));
    if (ends)
        TP_TRY(choose_end(m, &s, period, plan));
    plan->probes += s.probes;
    return TP_OK;
}

/* A given partition: the bound is of this partition alone. */
static tp_status
given_plan(tp_memopt *m, tp_dawnpiper_plan *plan)
{
    memcpy(plan->boundary, m->options->boundary, ((size_t)plan->stages + 1) * sizeof *plan->boundary);
    TP_TRY(choose_all(m, 0.0, plan));
    for (int x = 0; x < plan->stages; x++) {
        int i = plan->boundary[x], j = plan->boundary[x + 1];
        tp_memopt_range range = tp_memopt_relaxed(m, x, i, j);
        plan->relaxed_s = fmax(plan->relaxed_s, fmax(range.low_s, plan->link_s[x]));
        TP_TRY(tp_memopt_decide(m, x, i, j, range.low_s, INFINITY, &range));
        plan->lower_bound_s = fmax(plan->lower_bound_s, fmax(range.low_s, plan->link_s[x]));
    }
    return TP_OK;
}

static tp_status
plan_with(tp_memopt *m, tp_dawnpiper_plan *plan)
{
    TP_TRY(m->options->boundary != NULL ? given_plan(m, plan) : search_plan(m, plan));
    plan->optimal = plan->lower_bound_s >= plan->period_s * (1.0 - 4e-12);
    plan->lower_bound_s = fmin(plan->lower_bound_s, plan->period_s) * (1.0 - 1e-12);
    plan->relaxed_s = fmin(plan->relaxed_s, plan->lower_bound_s);
    plan->evaluations = m->evaluations;
    plan->knapsacks = m->knapsacks;
    plan->states = m->states;
    return TP_OK;
}

tp_status
tp_plan_dawnpiper(const tp_nodes *nodes, const tp_dawnpiper_options *options, tp_dawnpiper_plan *out)
{
    return tp_dawnpiper_run(nodes, options, plan_with, out);
}
