/* Idle time by cause, from counterfactual makespans: a cause costs what the makespan loses without it (sched.h, tp_bubble). */
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

static int
has_messages(const tp_program *p, const tp_durations *d)
{
    if (d->seconds[TP_OP_SE] || d->seconds[TP_OP_RE] || d->seconds[TP_OP_SL] || d->seconds[TP_OP_RL] || d->guest_comm_s)
        return 1;
    if (tp_sched_has_copies(d) || d->half_comm_s[0] || d->half_comm_s[1] || d->back_comm_unit_s)
        return 1;
    const double *comm = d->comm_unit_s != NULL ? d->comm_unit_s : d->comm_s;
    int64_t count = d->comm_unit_s != NULL ? p->stages * tp_program_units(p) : p->stages;
    for (int64_t i = 0; comm != NULL && i < count; i++)
        if (comm[i] > 0.0)
            return 1;
    return 0;
}

/* Mean of a table over the slices of each stage into even[stages]; is any slice unlike the first? */
static int
mean(const tp_program *p, const tp_durations *d, const double *table, double *even)
{
    int uneven = 0;
    for (int v = 0; v < p->stages; v++) {
        int64_t first = p->offset[tp_program_micro_begin(p, v)], units = p->offset[tp_program_micro_end(p, v)] - first;
        const double *row = table + v * d->stage_stride + first * d->unit_stride;
        double sum = 0.0;
        for (int64_t u = 0; u < units; u++) {
            sum += row[u * d->unit_stride];
            uneven |= row[u * d->unit_stride] != row[0];
        }
        even[v] = sum / (double)units;
    }
    return uneven;
}

/* Op by op into even[TP_OPS * stages], and behind them the halves of F. */
static int
even_out(const tp_program *p, const tp_durations *d, double *even)
{
    int uneven = 0;
    for (int op = TP_OP_F; op < TP_OPS; op++)
        if (d->seconds[op] != NULL && (op <= TP_OP_R || tp_sched_is_beside(op)))
            uneven |= mean(p, d, d->seconds[op], even + op * p->stages);
    for (int half = 0; half < 2; half++)
        if (d->half_s[half][TP_OP_F] != NULL)
            uneven |= mean(p, d, d->half_s[half][TP_OP_F], even + (TP_OPS + half) * p->stages);
    return uneven;
}

/* The durations of even slices; NULL tables, and no lane, where they are even already. ideal: without messages. */
static tp_status
even_open(const tp_program *p, const tp_durations *ideal, tp_lanes *lanes)
{
    if (ideal->unit_stride == 0)
        return TP_OK;
    double *even = calloc((size_t)(TP_OPS + 2) * (size_t)p->stages, sizeof *even);
    if (even == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the mean durations of %d stages", p->stages);
    lanes->tables = even;
    if (!even_out(p, ideal, even))
        return TP_OK;
    lanes->wanted |= TP_LANE_EVEN;
    lanes->even.stage_stride = 1;
    for (int op = TP_OP_F; op < TP_OPS; op++)
        if (ideal->seconds[op] != NULL && !tp_sched_is_end(op))
            lanes->even.seconds[op] = even + op * p->stages;
    for (int half = 0; half < 2; half++)
        if (ideal->half_s[half][TP_OP_F] != NULL)
            lanes->even.half_s[half][TP_OP_F] = even + (TP_OPS + half) * p->stages;
    return TP_OK;
}

tp_status
tp_sched_lanes_open(const tp_program *program, const tp_durations *durations, int beside, tp_lanes *lanes)
{
    tp_durations ideal = *durations;
    *lanes = (tp_lanes){.wanted = (beside ? TP_LANE_COPIED : 0u) | (has_messages(program, durations) ? TP_LANE_IDEAL : 0u)};
    if (beside)
        ideal.seconds[TP_OP_SO] = ideal.seconds[TP_OP_SI] = NULL;
    return even_open(program, &ideal, lanes);
}

void
tp_sched_lanes_close(tp_lanes *lanes)
{
    free(lanes->tables);
}

void
tp_sched_bubbles(const tp_program *program, const tp_lanes *lanes, const tp_totals *totals, double bubbles_s[TP_BUBBLES])
{
    double most = 0.0, work = 0.0, recompute = 0.0, swap = 0.0, fill = 0.0, idle = 0.0, T = totals->makespan_s, ideal_s = T,
           skew = 0.0, sums = 0.0, copied_s = T;
    int ranks = program->ranks;
    for (int r = 0; r < ranks; r++) {
        most = totals->work_s[r] > most ? totals->work_s[r] : most;
        work += totals->work_s[r];
        recompute += totals->recompute_s[r];
        swap += totals->swap_s[r];
        sums += totals->sum_s[r];
        fill += totals->fill_s[r];
        idle += T - totals->work_s[r];
    }
    if (lanes->wanted & TP_LANE_COPIED) {
        copied_s = totals->copied_s < T ? totals->copied_s : T;
        swap += ranks * (T - copied_s);
        ideal_s = copied_s;
    }
    if (lanes->wanted & TP_LANE_IDEAL)
        ideal_s = totals->ideal_s;
    /* where some slices have B and others I and W, the means of all are not what is done: they may be less than the busiest's work */
    double even_s = totals->even_s > most ? totals->even_s : most;
    if (lanes->wanted & TP_LANE_EVEN && even_s < ideal_s)
        skew = ranks * (ideal_s - even_s);
    double imbalance = ranks * most - work, comm = ranks * (copied_s - ideal_s);
    /* rounding may leave -1e-16 where nothing is left */
    imbalance = imbalance > 1e-12 * ranks * most ? imbalance : 0.0;
    comm = comm > 0.0 ? comm : 0.0;
    double rest = idle - imbalance - comm - skew - ranks * (T - copied_s);
    rest = rest > 1e-12 * ranks * T ? rest : 0.0;
    double early = idle > 0.0 ? fill / idle : 0.0;
    bubbles_s[TP_BUBBLE_warmup] = rest * (early < 1.0 ? early : 1.0);
    bubbles_s[TP_BUBBLE_cooldown] = rest - bubbles_s[TP_BUBBLE_warmup];
    bubbles_s[TP_BUBBLE_imbalance] = imbalance;
    bubbles_s[TP_BUBBLE_slice_skew] = skew;
    bubbles_s[TP_BUBBLE_recompute] = recompute;
    bubbles_s[TP_BUBBLE_swap] = swap;
    bubbles_s[TP_BUBBLE_comm] = comm + sums;
}
