/* One program, many durations: the ops in the order in which the worklist came by them, so that one evaluation is one
 * pass end[i] = max(end[previous on the rank], end[maker] + lag) + seconds. */
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    int32_t previous, maker; /* indices in this order; -1 */
    int32_t unit;
    uint16_t stage;
    uint8_t op, flags;
} node;

enum { IN_REMOTE = 1, OUT_REMOTE = 2 };

struct tp_sim {
    int64_t count, units;
    int32_t ranks, stages;
    int32_t *last;       /* [ranks] last node of the rank's body; -1 */
    node *nodes;         /* bodies: F B I W R, SO and SI */
    node *ends;          /* AR, OPT: stage and op; grouped by rank */
    int32_t *ends_begin; /* [ranks + 1] */
    double *end;         /* [count] */
    double *clock;       /* [ranks] */
};

void
tp_sim_close(tp_sim *sim)
{
    if (sim == NULL)
        return;
    free(sim->last);
    free(sim->nodes);
    free(sim->ends);
    free(sim->ends_begin);
    free(sim->end);
    free(sim->clock);
    free(sim);
}

typedef struct {
    const tp_program *p;
    int32_t *made_f, *made_b; /* [stages * units] node that made it; -1: nobody yet */
    int64_t *next;
    int32_t *stack;
    uint8_t *queued;
    int stacked;
} order;

/* -2: not made yet; -1: it needs none. */
static int32_t
maker_of(const order *o, const tp_instr *i, int64_t cell, int64_t units)
{
    int32_t made = -1;
    if (i->op == TP_OP_F && i->stage > 0)
        made = o->made_f[cell - units];
    else if (tp_sched_is_backward(i->op) && i->stage < o->p->stages - 1)
        made = o->made_b[cell + units];
    else
        return -1;
    return made < 0 ? -2 : made;
}

static void
order_wake(order *o, int rank)
{
    if (!o->queued[rank]) {
        o->queued[rank] = 1;
        o->stack[o->stacked++] = rank;
    }
}

static void
order_rank(order *o, tp_sim *sim, int rank)
{
    const tp_program *p = o->p;
    for (; o->next[rank] < p->begin[rank + 1]; o->next[rank]++) {
        const tp_instr *i = &p->code[o->next[rank]];
        int forward = i->op == TP_OP_F, backward = tp_sched_is_backward(i->op);
        if (tp_sched_is_message(i->op) || i->op >= TP_OP_AR)
            continue;
        int64_t unit = tp_program_unit(p, i), cell = i->stage * sim->units + unit;
        int32_t maker = maker_of(o, i, cell, sim->units);
        if (maker == -2)
            return;
        node *n = &sim->nodes[sim->count];
        *n = (node){sim->last[rank], maker, (int32_t)unit, i->stage, (uint8_t)i->op, 0};
        if ((forward && tp_program_remote(p, i->stage)) || (backward && tp_program_remote(p, i->stage + 1)))
            n->flags |= IN_REMOTE;
        if ((forward && tp_program_remote(p, i->stage + 1)) || (backward && tp_program_remote(p, i->stage)))
            n->flags |= OUT_REMOTE;
        sim->last[rank] = (int32_t)sim->count;
        if (forward || backward) {
            (forward ? o->made_f : o->made_b)[cell] = (int32_t)sim->count;
            int reader = i->stage + (forward ? 1 : -1);
            if (reader >= 0 && reader < p->stages)
                order_wake(o, p->rank_of[reader]);
        }
        sim->count++;
    }
}

static tp_status
find_order(order *o, tp_sim *sim)
{
    const tp_program *p = o->p;
    size_t cells = (size_t)p->stages * (size_t)sim->units, ranks = (size_t)p->ranks;
    o->made_f = malloc(cells * sizeof *o->made_f);
    o->made_b = malloc(cells * sizeof *o->made_b);
    o->next = malloc(ranks * sizeof *o->next);
    o->stack = malloc(ranks * sizeof *o->stack);
    o->queued = calloc(ranks, 1);
    if (o->made_f == NULL || o->made_b == NULL || o->next == NULL || o->stack == NULL || o->queued == NULL)
        return tp_fail(TP_EMEMORY, "no memory to order %lld instructions", (long long)p->begin[p->ranks]);
    memset(o->made_f, -1, cells * sizeof *o->made_f);
    memset(o->made_b, -1, cells * sizeof *o->made_b);
    for (int r = p->ranks - 1; r >= 0; r--) {
        o->next[r] = p->begin[r];
        order_wake(o, r);
    }
    while (o->stacked > 0) {
        int rank = o->stack[--o->stacked];
        o->queued[rank] = 0;
        order_rank(o, sim, rank);
    }
    for (int r = 0; r < p->ranks; r++)
        if (o->next[r] < p->begin[r + 1])
            return tp_sched_refuse(p, r, o->next[r] - p->begin[r], "deadlock: what it reads is never made");
    return TP_OK;
}

static tp_status
sim_make(const tp_program *p, tp_sim **out)
{
    size_t length = (size_t)p->begin[p->ranks] + 1, ranks = (size_t)p->ranks;
    tp_sim *sim = calloc(1, sizeof *sim);
    if (sim != NULL) {
        sim->nodes = malloc(length * sizeof *sim->nodes);
        sim->ends = malloc(((size_t)p->stages + 2) * sizeof *sim->ends);
        sim->ends_begin = calloc(ranks + 1, sizeof *sim->ends_begin);
        sim->end = malloc(length * sizeof *sim->end);
        sim->clock = malloc(ranks * sizeof *sim->clock);
        sim->last = malloc(ranks * sizeof *sim->last);
    }
    if (sim == NULL || sim->nodes == NULL || sim->ends == NULL || sim->ends_begin == NULL || sim->end == NULL ||
        sim->clock == NULL || sim->last == NULL) {
        tp_sim_close(sim);
        return tp_fail(TP_EMEMORY, "no memory for %zu instructions", length - 1);
    }
    sim->ranks = p->ranks;
    sim->stages = p->stages;
    sim->units = tp_program_units(p);
    memset(sim->last, -1, ranks * sizeof *sim->last);
    int32_t ends = 0;
    for (int r = 0; r < p->ranks; r++) {
        for (int64_t k = p->begin[r]; k < p->begin[r + 1]; k++)
            if (p->code[k].op >= TP_OP_AR)
                sim->ends[ends++] = (node){-1, -1, 0, p->code[k].stage, (uint8_t)p->code[k].op, 0};
        sim->ends_begin[r + 1] = ends;
    }
    *out = sim;
    return TP_OK;
}

tp_status
tp_sim_open(const tp_program *program, tp_sim **out)
{
    TP_TRY(tp_program_check_order(program));
    tp_sim *sim = NULL;
    TP_TRY(sim_make(program, &sim));
    order o = {.p = program};
    tp_status status = find_order(&o, sim);
    free(o.made_f);
    free(o.made_b);
    free(o.next);
    free(o.stack);
    free(o.queued);
    if (status != TP_OK) {
        tp_sim_close(sim);
        return status;
    }
    *out = sim;
    return TP_OK;
}

/* What a message adds: copies on both ranks, and the link. Apart, so that the common case stays tight. */
static double
message_in(const tp_sim *sim, const tp_durations *d, const node *n, double ready, double clock)
{
    int forward = n->op == TP_OP_F, from = forward ? n->stage - 1 : n->stage + 1;
    ready += tp_sched_lag_s(d, sim->units, from, n->unit);
    return (ready > clock ? ready : clock) + tp_sched_seconds(d, forward ? TP_OP_RF : TP_OP_RB, n->stage, n->unit);
}

void
tp_sim_run(tp_sim *sim, const tp_durations *durations, double *makespan_s)
{
    const tp_durations d = *durations;
    double *end = sim->end;
    int64_t half = d.seconds[TP_OP_B] == NULL; /* B = I + W */
    for (int64_t k = 0; k < sim->count; k++) {
        const node *n = &sim->nodes[k];
        double clock = n->previous < 0 ? 0.0 : end[n->previous], ready = n->maker < 0 ? 0.0 : end[n->maker];
        if (n->flags & IN_REMOTE)
            clock = message_in(sim, &d, n, ready, clock);
        else
            clock = ready > clock ? ready : clock;
        int64_t at = n->stage * d.stage_stride + n->unit * d.unit_stride;
        if (half && n->op == TP_OP_B)
            clock += tp_sched_compute_s(&d, TP_OP_B, n->stage, n->unit);
        else if (d.seconds[n->op] != NULL)
            clock += d.seconds[n->op][at];
        if (n->flags & OUT_REMOTE)
            clock += tp_sched_seconds(&d, n->op == TP_OP_F ? TP_OP_SF : TP_OP_SB, n->stage, n->unit);
        end[k] = clock;
    }
    double meet = 0.0, all = 0.0, last = 0.0;
    for (int r = 0; r < sim->ranks; r++) {
        sim->clock[r] = sim->last[r] < 0 ? 0.0 : end[sim->last[r]];
        if (sim->ends_begin[r] < sim->ends_begin[r + 1] && sim->ends[sim->ends_begin[r]].op == TP_OP_AR)
            meet = sim->clock[r] > meet ? sim->clock[r] : meet;
    }
    for (int pass = 0; pass < 2; pass++) { /* AR on all ranks, then OPT: csrc/sched/simulate.c, run_ends */
        for (int r = 0; r < sim->ranks; r++)
            for (int32_t e = sim->ends_begin[r]; e < sim->ends_begin[r + 1]; e++) {
                if ((sim->ends[e].op == TP_OP_OPT) != pass)
                    continue;
                double from = pass ? all : meet;
                sim->clock[r] = (sim->clock[r] > from ? sim->clock[r] : from) +
                                tp_sched_compute_s(&d, sim->ends[e].op, sim->ends[e].stage, 0);
            }
        for (int r = 0; r < sim->ranks; r++)
            all = sim->clock[r] > all ? sim->clock[r] : all;
        last = all;
    }
    *makespan_s = last;
}

void
tp_sim_path(const tp_sim *sim, const tp_durations *durations, int64_t *count, double *lag_s)
{
    int32_t at = -1;
    memset(count, 0, (size_t)TP_OPS * (size_t)sim->stages * sizeof *count);
    for (int r = 0; r < sim->ranks; r++)
        if (sim->last[r] >= 0 && (at < 0 || sim->end[sim->last[r]] > sim->end[at]))
            at = sim->last[r];
    *lag_s = 0.0;
    while (at >= 0) {
        const node *n = &sim->nodes[at];
        count[n->op * sim->stages + n->stage]++;
        at = n->previous;
        if (n->maker < 0)
            continue;
        int from = n->stage + (n->op == TP_OP_F ? -1 : 1);
        double link = n->flags & IN_REMOTE ? tp_sched_lag_s(durations, sim->units, from, n->unit) : 0.0;
        if (at < 0 || sim->end[n->maker] + link > sim->end[at]) {
            at = n->maker;
            *lag_s += link;
        }
    }
}
