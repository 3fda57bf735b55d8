/* Idle time by cause, from counterfactual makespans: a cause costs what the makespan loses without it (sched.h, tp_bubble). */
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

static int
has_messages(const tp_program *p, const tp_durations *d)
{
    if (d->seconds[TP_OP_SE] || d->seconds[TP_OP_RE] || d->seconds[TP_OP_SL] || d->seconds[TP_OP_RL] || d->guest_comm_s)
        return 1;
    if (d->seconds[TP_OP_AR] != NULL || d->sum_s != NULL || d->beside_s != NULL || d->gather_s != NULL)
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

/* Rows of even durations: an operation's, and behind them those of the halves of F. */
#define ROWS (TP_OPS + 2)

/* The row of what takes its slice's time on its stage; -1: of other instructions. */
static int
row_of(const tp_instr *i)
{
    if (i->op == TP_OP_F && i->flags & TP_HALVES)
        return TP_OPS + (i->flags & TP_HALF_SECOND ? 1 : 0);
    return tp_sched_is_compute(i->op) || tp_sched_is_beside(i->op) ? i->op : -1;
}

typedef struct {
    double first, sum;
    int64_t count;
} tally; /* of a row on a stage */

/* Means of what is done, alone, into even[ROWS * stages]: a stage may halve some forwards, or have B of some slices and I and W of
 * others, and U has no slices. Is any slice unlike the first that is done? */
static int
even_out(const tp_program *p, const tp_durations *d, tally *tallies, double *even)
{
    int uneven = 0;
    for (int64_t k = 0; k < p->begin[p->ranks]; k++) {
        const tp_instr *i = &p->code[k];
        int row = row_of(i);
        if (row < 0)
            continue;
        tally *mine = &tallies[row * p->stages + i->stage];
        double seconds = tp_durations_s(d, i->op, i->flags & TP_HALVES, i->stage, tp_program_unit(p, i));
        if (mine->count++ == 0)
            mine->first = seconds;
        mine->sum += seconds;
        uneven |= seconds != mine->first;
    }
    for (int cell = 0; cell < ROWS * p->stages; cell++)
        even[cell] = tallies[cell].count > 0 ? tallies[cell].sum / (double)tallies[cell].count : 0.0;
    return uneven;
}

/* The durations of even slices; NULL tables, and no lane, where they are even already. ideal: without messages. */
static tp_status
even_open(const tp_program *p, const tp_durations *ideal, tp_lanes *lanes)
{
    if (ideal->unit_stride == 0)
        return TP_OK;
    size_t cells = ROWS * (size_t)p->stages;
    double *even = malloc(cells * sizeof *even);
    tally *tallies = calloc(cells, sizeof *tallies);
    lanes->tables = even;
    if (even == NULL || tallies == NULL) {
        free(tallies);
        return tp_fail(TP_EMEMORY, "no memory for the mean durations of %d stages", p->stages);
    }
    int uneven = even_out(p, ideal, tallies, even);
    free(tallies);
    if (!uneven)
        return TP_OK;
    lanes->wanted |= TP_LANE_EVEN;
    lanes->even.stage_stride = 1;
    for (int op = TP_OP_F; op < TP_OPS; op++)
        if (tp_sched_is_compute(op) || tp_sched_is_beside(op))
            lanes->even.seconds[op] = even + op * p->stages;
    for (int half = 0; half < 2; half++)
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
        double own = totals->work_s[r] - totals->sum_s[r];
        most = own > most ? own : most;
        work += own;
        recompute += totals->recompute_s[r];
        swap += totals->swap_s[r];
        sums += totals->sum_s[r];
        fill += totals->fill_s[r];
        idle += T - own;
    }
    if (lanes->wanted & TP_LANE_COPIED) {
        copied_s = totals->copied_s < T ? totals->copied_s : T;
        swap += ranks * (T - copied_s);
        ideal_s = copied_s;
    }
    if (lanes->wanted & TP_LANE_IDEAL)
        ideal_s = totals->ideal_s;
    /* less by rounding alone: the means are of what is done */
    double even_s = totals->even_s > most ? totals->even_s : most;
    if (lanes->wanted & TP_LANE_EVEN && even_s < ideal_s)
        skew = ranks * (ideal_s - even_s);
    double imbalance = ranks * most - work, comm = ranks * (copied_s - ideal_s);
    /* rounding may leave -1e-16 where nothing is left */
    imbalance = imbalance > 1e-12 * ranks * most ? imbalance : 0.0;
    comm = comm > 0.0 ? comm : 0.0;
    double rest = idle - imbalance - comm - skew - ranks * (T - copied_s);
    rest = rest > 1e-12 * ranks * T ? rest : 0.0;
    double early = idle > sums ? fill / (idle - sums) : 0.0;
    bubbles_s[TP_BUBBLE_warmup] = rest * (early < 1.0 ? early : 1.0);
    bubbles_s[TP_BUBBLE_cooldown] = rest - bubbles_s[TP_BUBBLE_warmup];
    bubbles_s[TP_BUBBLE_imbalance] = imbalance;
    bubbles_s[TP_BUBBLE_slice_skew] = skew;
    bubbles_s[TP_BUBBLE_recompute] = recompute;
    bubbles_s[TP_BUBBLE_swap] = swap;
    bubbles_s[TP_BUBBLE_comm] = comm;
}
