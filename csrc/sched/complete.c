/* From the operations alone to what the engine runs, with its simulator: split, lower and sim in one. */
#include "csrc/sched/internal.h"

void
tp_completed_close(tp_completed *completed, const tp_completed *kept)
{
    if (kept == NULL || completed->program != kept->program) {
        tp_program_close(completed->order);
        tp_program_close(completed->program);
        tp_sim_close(completed->sim);
    }
    *completed = (tp_completed){NULL, NULL, NULL};
}

/* Most plans that a search compares differ in how long operations take, not in their order: what follows from that is found once. */
static tp_status
lower_order(unsigned ops, int tied, const tp_completed *known, tp_completed *out)
{
    if (known != NULL && known->program != NULL && tp_program_equal(out->order, known->order)) {
        tp_program_close(out->order);
        *out = *known;
        return TP_OK;
    }
    TP_TRY(tp_sched_lower(out->order, ops, tied, &out->program));
    return tp_sched_sim_open(out->program, ops | TP_SCHED_MESSAGES, &out->sim); /* it is lowered */
}

tp_status
tp_program_complete(const tp_program *compute, const tp_durations *durations, int pending, int tied, const tp_completed *known,
                    double goal_s, tp_completed *out)
{
    unsigned ops = tp_sched_ops(compute);
    *out = (tp_completed){NULL, NULL, NULL};
    TP_TRY(tp_durations_check(compute, durations));
    if (pending >= 0)
        TP_TRY(tp_sched_split(compute, ops, durations, pending, goal_s, &out->order));
    else
        TP_TRY(tp_program_strip(compute, &out->order));
    if (out->order == NULL)
        return TP_OK;
    tp_status status = lower_order(ops, tied, known, out);
    if (status != TP_OK)
        tp_completed_close(out, NULL);
    return status;
}
