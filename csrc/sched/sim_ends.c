/* What ends a step: AR, sums of gradients beside the work, and OPT, behind the nodes of sim.c. */
#include "csrc/sched/sim.h"

#include <stdlib.h>
#include <string.h>

/* Of each stage the node of its last gradients: nodes of a rank are in the order of its program. */
tp_status
tp_sim_find_sums(const tp_program *p, tp_sim *sim)
{
    TP_TRY(tp_sched_sums_open(p, NULL, &sim->sums));
    sim->gone = malloc((size_t)p->stages * sizeof *sim->gone);
    sim->whole = calloc((size_t)p->stages, 1);
    if (sim->gone == NULL || sim->whole == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the sums of %d stages", p->stages);
    memset(sim->gone, -1, (size_t)p->stages * sizeof *sim->gone);
    for (int32_t k = 0; k < sim->count; k++)
        if (sim->nodes[k].op == TP_OP_B || sim->nodes[k].op == TP_OP_W) {
            sim->gone[sim->nodes[k].stage] = k;
            sim->whole[sim->nodes[k].stage] = sim->nodes[k].op == TP_OP_B;
        }
    return TP_OK;
}

/* Of a rank: its AR from `from` on, or its OPT (only). */
static void
run_end(const tp_sim *sim, const tp_durations *d, int r, int only, double from)
{
    for (int32_t e = sim->ends_begin[r]; e < sim->ends_begin[r + 1]; e++)
        if (sim->ends[e].op == only)
            sim->clock[r] = (sim->clock[r] > from ? sim->clock[r] : from) + tp_durations_s(d, only, 0, sim->ends[e].stage, 0);
}

/* Of the rank's OPTs together, what comes before the ranks meet. */
static double
before_s(const tp_sim *sim, const tp_durations *d, int r)
{
    double total = 0.0, before;
    for (int32_t e = sim->ends_begin[r]; e < sim->ends_begin[r + 1]; e++)
        if (sim->ends[e].op == TP_OP_OPT) {
            tp_durations_update_s(d, sim->ends[e].stage, &before);
            total += before;
        }
    return total;
}

/* When the rank's sums beside its work are done. */
static double
sums_beside(const tp_sim *sim, const tp_durations *d, int r)
{
    double done = 0.0;
    for (int32_t n = sim->sums.begin[r]; d->beside_s != NULL && sim->ends_begin[r] < sim->ends_begin[r + 1] && n < sim->sums.begin[r + 1];
         n++) {
        int v = sim->sums.stages[n];
        const node *last = &sim->nodes[sim->gone[v]];
        double end = sim->end[sim->gone[v]], seconds = tp_durations_s(d, last->op, 0, v, last->unit);
        if (last->flags & OUT_REMOTE) /* the copy of the message behind it is no gradient's */
            end -= tp_durations_s(d, TP_OP_SB, 0, v, last->unit);
        done = tp_sched_sum_beside(d, v, sim->whole[v], done, end - seconds, end);
    }
    return done;
}

double
tp_sim_run_ends(const tp_sim *sim, const tp_durations *d, double meet_s)
{
    double met = 0.0, last = 0.0;
    for (int r = 0; r < sim->ranks; r++) {
        run_end(sim, d, r, TP_OP_AR, meet_s);
        double summed = sums_beside(sim, d, r);
        sim->clock[r] = summed > sim->clock[r] ? summed : sim->clock[r];
        double measured = sim->clock[r] + before_s(sim, d, r);
        met = measured > met ? measured : met;
    }
    for (int r = 0; r < sim->ranks; r++) {
        run_end(sim, d, r, TP_OP_OPT, met - before_s(sim, d, r));
        last = sim->clock[r] > last ? sim->clock[r] : last;
    }
    return last;
}
