/* The entrance to the BMPipe planner: chooses the solver, and judges the finished assignment. */
#include "csrc/plan/bmpipe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"
#include "csrc/plan/bmpipe_core.h"

static tp_status
plan_open(const tp_bmpipe_layers *l, const tp_bmpipe_options *o, tp_bmpipe_plan *plan)
{
    size_t cells = (size_t)l->types * (size_t)l->strategies * (size_t)o->chunks * (size_t)o->stages;
    *plan = (tp_bmpipe_plan){.assignment = calloc(cells, sizeof *plan->assignment),
                             .peak_bytes = calloc((size_t)o->stages, sizeof *plan->peak_bytes)};
    if (plan->assignment == NULL || plan->peak_bytes == NULL)
        return tp_fail(TP_EMEMORY, "no memory for an assignment of %zu numbers", cells);
    return TP_OK;
}

void
tp_bmpipe_plan_free(tp_bmpipe_plan *plan)
{
    free(plan->assignment);
    free(plan->peak_bytes);
    plan->assignment = NULL;
    plan->peak_bytes = NULL;
}

/* Is the assignment, called `what`, a plan? Walks the virtual stages in model order: no layer of a type comes after one of a later
 * type. */
static tp_status
assignment_ok(const tp_bmpipe *p, const int32_t *assignment, const char *what)
{
    const tp_bmpipe_layers *l = p->layers;
    int type = 0, left = l->count[0];
    for (int v = 0; v < p->virtuals; v++) {
        int layers = 0;
        for (int t = 0; t < l->types; t++)
            for (int r = 0; r < l->strategies; r++) {
                int count = assignment[(t * l->strategies + r) * p->virtuals + v];
                if (count < 0 || (count > 0 && r >= l->choices[t]))
                    return tp_fail(TP_EVALUE, "%s[%d, %d, %d, %d] is %d: %s", what, t, r, v / p->stages, v % p->stages,
                                   count, count < 0 ? "0 or more would be right" : "the type has no such strategy");
                if (count == 0)
                    continue;
                while (type < t && left == 0)
                    left = l->count[++type];
                if (type != t || count > left)
                    return tp_fail(TP_EVALUE, "%s has layer type %d at virtual stage %d: %d layers of type %d are due there",
                                   what, t, v, left, type);
                left -= count;
                layers += count;
            }
        if (layers == 0)
            return tp_fail(TP_EVALUE, "%s has no layer at chunk %d of stage %d: at least one would be right", what,
                           v / p->stages, v % p->stages);
    }
    if (type != l->types - 1 || left != 0)
        return tp_fail(TP_EVALUE, "%s leaves %d layers of type %d out", what, left, type);
    return TP_OK;
}

/* Seconds, bytes and bubbles of the assignment (PLANNERS.md 4.3: the split is exact, preparation being what remains). */
static tp_status
judge(tp_bmpipe *p, tp_bmpipe_plan *plan)
{
    const tp_bmpipe_layers *l = p->layers;
    void *memory = NULL;
    TP_TRY(tp_bmpipe_take(p, (size_t)p->chunks, sizeof(double), &memory));
    double *kept = memory, work_sum = 0.0, work_most = 0.0, redone = 0.0;
    for (int x = 0; x < p->stages; x++) {
        double work = 0.0, still = 0.0;
        for (int c = 0; c < p->chunks; c++) {
            int v = c * p->stages + x;
            double forward = 0.0, backward = 0.0, extra = 0.0;
            kept[c] = 0.0;
            for (int i = 0; i < l->types * l->strategies; i++) {
                int t = i / l->strategies, count = plan->assignment[i * p->virtuals + v];
                if (count == 0)
                    continue;
                forward += count * l->forward_s[t];
                backward += count * l->backward_s[t];
                extra += count * l->extra_s[i];
                kept[c] += count * l->activation_bytes[i];
                still += count * l->static_bytes[t];
            }
            p->load[v] = forward;
            p->load[p->virtuals + v] = backward + extra;
            work += forward + (backward + extra);
            redone += extra;
        }
        plan->peak_bytes[x] = tp_bmpipe_bytes(p, x, still, kept);
        work_sum += work;
        work_most = work > work_most ? work : work_most;
    }
    double micros = p->micros, mean = work_sum / p->stages;
    plan->step_time_s = tp_bmpipe_simulate(p);
    plan->recompute_s = micros * (redone / p->stages);
    plan->imbalance_s = micros * (work_most - mean);
    plan->preparation_s = plan->step_time_s - micros * work_most;
    return TP_OK;
}

/* ---- times independent of their unit ------------------------------------------------------------------------------------- */

enum { BITS = 40 }; /* of a rounded time */
static const double CLOSE = 1e-7; /* a plan so near its bound is not looked for again in groups of layers */
static const double FAR = 0x1p-900, LIFT = 0x1p-400; /* see round_times */
static const double ROUNDED = 0x1p-40; /* twice the largest relative change of a time, and so of a makespan, by rounding */

typedef struct {
    tp_bmpipe_layers layers;
    tp_bmpipe_options options;
    double unit_s; /* the longest of all times, or LIFT of it */
} rounded;

static double
round_time(double seconds, double unit_s)
{
    int exponent = 0;
    double part = frexp(seconds / unit_s, &exponent);
    return ldexp(rint(ldexp(part, BITS)), exponent - BITS);
}

static void
note_time(double seconds, double *least, double *most)
{
    *most = fmax(*most, seconds);
    *least = seconds > 0.0 ? fmin(*least, seconds) : *least;
}

/* Express the times in units of the longest and round each to so few bits that a common factor in the caller's times leaves no
 * trace: the search, in which ties decide and effort is counted, is then the same whatever the factor. Rounding is relative to each
 * time, not to a common grid: a makespan is a maximum of sums of times, so it changes by no larger a part than they do. In units of
 * the longest, those that are FAR below it would have no 40 bits, or be 0: then the unit is less. */
static tp_status
round_times(const tp_bmpipe_layers *l, const tp_bmpipe_options *o, tp_arena *arena, rounded *out)
{
    size_t types = (size_t)l->types, ways = types * (size_t)l->strategies;
    void *memory = NULL;
    TP_TRY(tp_arena_take(arena, 2 * types + ways, sizeof(double), &memory));
    double *forward = memory, *backward = forward + types, *extra = backward + types, least_s = INFINITY, most_s = 0.0;
    note_time(o->comm_s, &least_s, &most_s);
    for (int t = 0; t < l->types; t++) {
        note_time(l->forward_s[t], &least_s, &most_s);
        note_time(l->backward_s[t], &least_s, &most_s);
        for (int r = 0; r < l->choices[t]; r++)
            note_time(l->extra_s[t * l->strategies + r], &least_s, &most_s);
    }
    double unit_s = least_s < most_s * FAR ? most_s * LIFT : most_s > 0.0 ? most_s : 1.0;
    for (int t = 0; t < l->types; t++) {
        forward[t] = round_time(l->forward_s[t], unit_s);
        backward[t] = round_time(l->backward_s[t], unit_s);
        for (int r = 0; r < l->choices[t]; r++)
            extra[t * l->strategies + r] = round_time(l->extra_s[t * l->strategies + r], unit_s);
    }
    *out = (rounded){*l, *o, unit_s};
    out->layers.forward_s = forward;
    out->layers.backward_s = backward;
    out->layers.extra_s = extra;
    out->options.comm_s = round_time(o->comm_s, unit_s);
    return TP_OK;
}

/* *plan becomes the start if that fits and takes less than than_s. */
static tp_status
or_start(tp_bmpipe *p, double than_s, tp_bmpipe_plan *plan, int *taken)
{
    tp_bmpipe_plan start, spare;
    double peak = 0.0;
    tp_status status = plan_open(p->layers, p->options, &start);
    if (status == TP_OK) {
        memcpy(start.assignment, p->options->start, tp_bmpipe_cells(p) * sizeof *start.assignment);
        status = judge(p, &start);
    }
    for (int x = 0; x < p->stages && status == TP_OK; x++)
        peak = fmax(peak, start.peak_bytes[x]);
    *taken = status == TP_OK && tp_bmpipe_fits(p, peak) && start.step_time_s < than_s;
    if (*taken) {
        spare = *plan;
        *plan = start;
        start = spare;
    }
    tp_bmpipe_plan_free(&start);
    return status;
}

/* Solve, and judge the plan with the caller's times. Several chunks are solved with rounded times: their bound is lowered by
 * ROUNDED. */
static tp_status
solve(tp_bmpipe *p, const tp_bmpipe_layers *layers, const tp_bmpipe_options *options, double unit_s, tp_bmpipe_plan *plan)
{
    tp_bmpipe_found found = {0};
    int taken = 0;
    if (options->start != NULL)
        TP_TRY(assignment_ok(p, options->start, "start"));
    tp_status status = (p->chunks == 1 ? tp_bmpipe_exact : tp_bmpipe_search)(p, plan->assignment, &found);
    if (status != TP_OK && (status != TP_EINFEASIBLE || options->start == NULL))
        return status;
    p->layers = layers; /* the plan is judged with the caller's times */
    for (int v = 0; v < p->virtuals; v++)
        p->link_s[v] = options->comm_s;
    if (status == TP_OK)
        TP_TRY(judge(p, plan));
    if (options->start != NULL)
        TP_TRY(or_start(p, status == TP_OK ? plan->step_time_s : INFINITY, plan, &taken));
    if (status != TP_OK && !taken) /* a search that ended early may have found nothing where the start fits */
        return status;
    double bound_s = p->chunks == 1 ? found.bound_s : found.bound_s * unit_s * (1.0 - ROUNDED);
    plan->lower_bound_s = bound_s < plan->step_time_s ? bound_s : plan->step_time_s;
    plan->optimal = found.proven && p->chunks == 1; /* of several the bound decides, with the caller's times */
    plan->evaluations = p->evaluations;
    plan->simulations = p->simulations;
    plan->nodes = p->nodes;
    plan->paths = found.paths;
    return TP_OK;
}

tp_status
tp_bmpipe_plan_alone(const tp_bmpipe_layers *layers, const tp_bmpipe_options *options, tp_bmpipe_plan *out)
{
    tp_arena arena;
    tp_bmpipe p = {0};
    rounded r = {*layers, *options, 1.0};
    *out = (tp_bmpipe_plan){0};
    TP_TRY(tp_bmpipe_check(layers, options));
    TP_TRY(plan_open(layers, options, out));
    TP_TRY(tp_arena_open(&arena));
    tp_status status = options->chunks > 1 ? round_times(layers, options, &arena, &r) : TP_OK;
    if (status == TP_OK)
        status = tp_bmpipe_open(&r.layers, &r.options, &arena, &p);
    if (status == TP_OK)
        status = solve(&p, layers, options, r.unit_s, out);
    if (status == TP_OK)
        status = tp_deadline_check_told();
    tp_bmpipe_close(&p);
    tp_arena_close(&arena);
    return status;
}

tp_status
tp_plan_bmpipe(const tp_bmpipe_layers *layers, const tp_bmpipe_options *options, tp_bmpipe_plan *out)
{
    int64_t start_ns = tp_clock_ns();
    tp_status status = tp_bmpipe_plan_alone(layers, options, out);
    if (status == TP_OK && options->chunks > 1 && out->lower_bound_s < out->step_time_s * (1.0 - CLOSE))
        status = tp_bmpipe_or_groups(layers, options, start_ns, out);
    if (status == TP_OK) /* also where a start, or groups, have come to the bound that the search did not */
        out->optimal |= out->lower_bound_s >= out->step_time_s * (1.0 - 2.0 * (TP_BMPIPE_SLACK + ROUNDED));
    out->seconds = (double)(tp_clock_ns() - start_ns) * 1e-9;
    return status;
}

tp_status
tp_bmpipe_judge(const tp_bmpipe_layers *layers, const tp_bmpipe_options *options, const int32_t *assignment,
                tp_bmpipe_plan *out)
{
    tp_arena arena;
    tp_bmpipe p;
    *out = (tp_bmpipe_plan){0};
    TP_TRY(tp_bmpipe_check(layers, options));
    TP_TRY(plan_open(layers, options, out));
    memcpy(out->assignment, assignment,
           (size_t)layers->types * (size_t)layers->strategies * (size_t)options->chunks * (size_t)options->stages *
               sizeof *assignment);
    TP_TRY(tp_arena_open(&arena));
    tp_status status = tp_bmpipe_open(layers, options, &arena, &p);
    if (status == TP_OK)
        status = assignment_ok(&p, assignment, "assignment");
    if (status == TP_OK)
        status = judge(&p, out);
    tp_bmpipe_close(&p);
    tp_arena_close(&arena);
    return status;
}
