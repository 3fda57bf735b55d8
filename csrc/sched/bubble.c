/* Causes of idle time by counterfactual runs (definitions: sched.h, tp_bubble). At most three more linear passes, and none
 * where nothing is copied beside the work, messages take no time and slices take equally long. */
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

static int
has_messages(const tp_program *p, const tp_durations *d)
{
    if (d->seconds[TP_OP_SE] || d->seconds[TP_OP_RE] || d->seconds[TP_OP_SL] || d->seconds[TP_OP_RL] || d->guest_comm_s)
        return 1;
    if (d->seconds[TP_OP_SF] || d->seconds[TP_OP_RF] || d->seconds[TP_OP_SB] || d->seconds[TP_OP_RB])
        return 1;
    for (int half = 0; half < 2; half++)
        if (d->half_comm_s[half] || d->half_s[half][TP_OP_SF] || d->half_s[half][TP_OP_RF])
            return 1;
    if (d->back_comm_unit_s != NULL)
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

static tp_status
slice_skew(const tp_program *p, const tp_durations *ideal, const tp_run *runs, int64_t run_count, double ideal_makespan,
           double *skew_s)
{
    *skew_s = 0.0;
    if (ideal->unit_stride == 0)
        return TP_OK;
    double *even = calloc((size_t)(TP_OPS + 2) * (size_t)p->stages, sizeof *even);
    if (even == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the mean durations of %d stages", p->stages);
    tp_status status = TP_OK;
    if (even_out(p, ideal, even)) {
        tp_durations d = {.stage_stride = 1};
        for (int op = 0; op < TP_OPS; op++)
            if (ideal->seconds[op] != NULL) {
                d.seconds[op] = even + op * p->stages;
                for (int v = 0; tp_sched_is_end(op) && v < p->stages; v++) /* AR, OPT: not of a slice */
                    even[op * p->stages + v] = ideal->seconds[op][v * ideal->stage_stride];
            }
        for (int half = 0; half < 2; half++)
            if (ideal->half_s[half][TP_OP_F] != NULL)
                d.half_s[half][TP_OP_F] = even + (TP_OPS + half) * p->stages;
        double makespan = 0.0;
        status = tp_sched_replay(p, &d, runs, run_count, &makespan);
        if (status == TP_OK && makespan < ideal_makespan)
            *skew_s = p->ranks * (ideal_makespan - makespan);
    }
    free(even);
    return status;
}

tp_status
tp_sched_bubbles(const tp_program *program, const tp_durations *durations, const tp_run *runs, int64_t run_count,
                 const tp_totals *totals, double bubbles_s[TP_BUBBLES])
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
    tp_durations ideal = *durations;
    if (totals->beside) {
        ideal.seconds[TP_OP_SO] = ideal.seconds[TP_OP_SI] = NULL;
        TP_TRY(tp_sched_replay(program, &ideal, runs, run_count, &copied_s));
        swap += copied_s < T ? ranks * (T - copied_s) : 0.0;
        copied_s = copied_s < T ? copied_s : T;
        ideal_s = copied_s;
    }
    static const int messages[] = {TP_OP_SF, TP_OP_RF, TP_OP_SB, TP_OP_RB, TP_OP_SE, TP_OP_RE, TP_OP_SL, TP_OP_RL};
    for (size_t i = 0; i < sizeof messages / sizeof messages[0]; i++)
        ideal.seconds[messages[i]] = ideal.half_s[0][messages[i]] = ideal.half_s[1][messages[i]] = NULL;
    ideal.comm_s = ideal.comm_unit_s = ideal.back_comm_unit_s = ideal.latency_s = ideal.half_comm_s[0] = ideal.half_comm_s[1] = NULL;
    ideal.guest_comm_s = NULL;
    if (has_messages(program, durations))
        TP_TRY(tp_sched_replay(program, &ideal, runs, run_count, &ideal_s));
    TP_TRY(slice_skew(program, &ideal, runs, run_count, ideal_s, &skew));
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
    return TP_OK;
}
