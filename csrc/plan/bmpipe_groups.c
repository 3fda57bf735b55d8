/* Plans of several chunks whose layers stay together in groups of equal ones. A search that ends before its proof may find less
 * among many layers than among few large ones; asking for these, too, makes a plan no slower where its layers are cut finer. */
#include "csrc/plan/bmpipe_core.h"

#include "csrc/base/clock.h"

/* Do all types fall into whole groups, and has each virtual stage one? */
static int
groups_fit(const tp_bmpipe_layers *l, int virtuals, int size)
{
    int64_t groups = 0;
    for (int t = 0; t < l->types; t++) {
        if (l->count[t] % size != 0)
            return 0;
        groups += l->count[t] / size;
    }
    return groups >= virtuals;
}

/* A group of `size` layers is one layer. */
static tp_status
group_layers(const tp_bmpipe_layers *l, int size, tp_arena *arena, tp_bmpipe_layers *out)
{
    size_t types = (size_t)l->types, ways = types * (size_t)l->strategies;
    double *seconds, *bytes;
    int32_t *count;
    TP_ARENA_TAKE(arena, types, count);
    TP_ARENA_TAKE(arena, 2 * types + ways, seconds);
    TP_ARENA_TAKE(arena, types + ways, bytes);
    *out = *l;
    out->count = count;
    out->forward_s = seconds;
    out->backward_s = seconds + types;
    out->extra_s = seconds + 2 * types;
    out->static_bytes = bytes;
    out->activation_bytes = bytes + types;
    for (size_t t = 0; t < types; t++) {
        count[t] = l->count[t] / size;
        seconds[t] = size * l->forward_s[t];
        seconds[types + t] = size * l->backward_s[t];
        bytes[t] = size * l->static_bytes[t];
        for (int r = 0; r < l->choices[t]; r++) {
            size_t i = t * (size_t)l->strategies + (size_t)r;
            seconds[2 * types + i] = size * l->extra_s[i];
            bytes[types + i] = size * l->activation_bytes[i];
        }
    }
    return TP_OK;
}

/* *best becomes the plan of groups, taken apart, where that fits and is faster. */
static tp_status
or_apart(const tp_bmpipe_layers *l, const tp_bmpipe_options *o, int size, tp_bmpipe_plan *groups, tp_bmpipe_plan *best)
{
    tp_bmpipe_plan plan;
    double peak = 0.0;
    size_t cells = (size_t)l->types * (size_t)l->strategies * (size_t)o->chunks * (size_t)o->stages;
    for (size_t i = 0; i < cells; i++)
        groups->assignment[i] *= size;
    best->evaluations += groups->evaluations;
    best->simulations += groups->simulations;
    best->nodes += groups->nodes;
    tp_status status = tp_bmpipe_judge(l, o, groups->assignment, &plan);
    for (int x = 0; x < o->stages && status == TP_OK; x++)
        peak = plan.peak_bytes[x] > peak ? plan.peak_bytes[x] : peak;
    if (status == TP_OK && peak <= o->memory_bytes * (1.0 + TP_BMPIPE_SLACK) && plan.step_time_s < best->step_time_s) {
        tp_bmpipe_plan old = *best;
        best->assignment = plan.assignment;
        best->peak_bytes = plan.peak_bytes;
        best->step_time_s = plan.step_time_s;
        best->recompute_s = plan.recompute_s;
        best->imbalance_s = plan.imbalance_s;
        best->preparation_s = plan.preparation_s;
        plan = old;
    }
    tp_bmpipe_plan_free(&plan);
    return status;
}

tp_status
tp_bmpipe_or_groups(const tp_bmpipe_layers *layers, const tp_bmpipe_options *options, int64_t start_ns, tp_bmpipe_plan *best)
{
    tp_bmpipe_options o = *options;
    tp_status status = TP_OK;
    o.start = NULL;
    for (int size = 2; size <= layers->count[0] && status == TP_OK; size++) {
        tp_bmpipe_layers grouped;
        tp_bmpipe_plan groups = {0};
        tp_arena arena;
        if (!groups_fit(layers, o.chunks * o.stages, size))
            continue;
        if (options->time_limit_s > 0.0) {
            o.time_limit_s = options->time_limit_s - (double)(tp_clock_ns() - start_ns) * 1e-9;
            if (o.time_limit_s <= 0.0)
                break;
        }
        TP_TRY(tp_arena_open(&arena));
        status = group_layers(layers, size, &arena, &grouped);
        if (status == TP_OK)
            status = tp_bmpipe_plan_alone(&grouped, &o, &groups);
        if (status == TP_OK)
            status = or_apart(layers, options, size, &groups, best);
        else if (status == TP_EINFEASIBLE || status == TP_EVALUE) /* no plan in time; groups whose numbers are too large */
            status = TP_OK;
        tp_bmpipe_plan_free(&groups);
        tp_arena_close(&arena);
    }
    return status;
}
