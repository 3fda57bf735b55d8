#include "csrc/sched/filled.h"

#include <stdlib.h>

#include "csrc/base/deadline.h"
#include "csrc/sched/internal.h"

double
tp_filled_slack(const tp_program *program)
{
    return 4.0 * (double)program->begin[program->ranks];
}

int
tp_filled_is_known(const tp_filled_given *given, const tp_filled *x)
{
    return given->exact && x->ticks < given->longest;
}

/* When the output of an instruction comes to its reader; moves the rank's clock past the copy. */
static void
leave(const tp_filled_given *g, const tp_program *p, int rank, const tp_instr *i, int64_t unit, double *clock)
{
    int back = i->op != TP_OP_F, reader = back ? i->stage - 1 : i->stage + 1;
    if (back ? tp_program_is_first(p, i->stage) : tp_program_is_last(p, i->stage))
        return;
    double there = *clock;
    if (p->rank_of[reader] != rank) {
        double lag_s = tp_durations_lag_s(g->d, g->units, back, 0, i->stage, unit);
        *clock += tp_durations_s(g->d, back ? TP_OP_SB : TP_OP_SF, 0, i->stage, unit);
        there = tp_sched_links_send(g->links, back, i->stage, *clock, lag_s) + lag_s;
    }
    g->ready_s[(back * p->stages + i->stage) * g->units + unit] = there;
}

/* What the simulator says of a program without halves, guests, or copies beside the work, to the bit: the same sums, in an order in
 * which filling has come by them, without finding one anew. */
static tp_status
replay(const tp_filled_given *g, const tp_filled *x, double *makespan_s)
{
    const tp_program *p = x->program;
    double *clocks = calloc((size_t)p->ranks, sizeof *clocks), last = 0.0;
    if (clocks == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d ranks", p->ranks);
    tp_sched_links_reset(g->links, g->d);
    for (int64_t k = 0; k < p->begin[p->ranks]; k++) {
        const tp_instr *i = &p->code[x->order[k]];
        int rank = p->rank_of[i->stage], forward = i->op == TP_OP_F, back = i->op == TP_OP_I;
        int64_t unit = tp_program_unit(p, i);
        double clock = clocks[rank];
        if ((forward && !tp_program_is_first(p, i->stage)) || (back && !tp_program_is_last(p, i->stage))) {
            int maker = forward ? i->stage - 1 : i->stage + 1;
            double ready = g->ready_s[(back * p->stages + maker) * g->units + unit];
            clock = ready > clock ? ready : clock;
            if (p->rank_of[maker] != rank)
                clock += tp_durations_s(g->d, forward ? TP_OP_RF : TP_OP_RB, 0, i->stage, unit);
        }
        clock += tp_durations_s(g->d, i->op, 0, i->stage, unit);
        if (forward || back)
            leave(g, p, rank, i, unit, &clock);
        clocks[rank] = clock;
    }
    for (int r = 0; r < p->ranks; r++)
        last = clocks[r] > last ? clocks[r] : last;
    free(clocks);
    *makespan_s = last;
    return TP_OK;
}

static tp_status
measure(const tp_filled_given *g, tp_filled *x)
{
    tp_sim *sim = NULL;
    if (x->seconds != TP_FILLED_NOT_YET)
        return TP_OK;
    if (g->replays)
        return replay(g, x, &x->seconds);
    TP_TRY(tp_sched_sim_open(x->program, g->ops, &sim));
    tp_sim_run(sim, g->d, &x->seconds);
    tp_sim_close(sim);
    return tp_deadline_check_told();
}

tp_status
tp_filled_is_better(const tp_filled_given *given, tp_filled *x, tp_filled *best, int *better)
{
    *better = best->program == NULL;
    if (*better || tp_program_equal(x->program, best->program)) /* fractions often agree */
        return TP_OK;
    double slack = tp_filled_slack(x->program);
    *better = tp_filled_is_known(given, x) && tp_filled_is_known(given, best) &&
              x->ticks + slack < (best->ticks - slack) * TP_FILLED_SLIGHT;
    if (*better)
        return TP_OK;
    TP_TRY(measure(given, best));
    TP_TRY(measure(given, x));
    *better = x->seconds < best->seconds * TP_FILLED_SLIGHT;
    return TP_OK;
}
