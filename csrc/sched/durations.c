/* Durations of instructions: checked (finite, not negative) before anything is simulated. */
#include "csrc/sched/internal.h"

#include <math.h>

/* part: of the operation, as costs name it. */
static tp_status
table_ok(const tp_program *p, const tp_durations *d, int op, const char *part, const double *table)
{
    int64_t units = d->unit_stride == 0 ? 1 : tp_program_units(p);
    int stages = d->stage_stride == 0 ? 1 : p->stages;
    for (int v = 0; table != NULL && v < stages; v++)
        for (int64_t u = 0; u < units; u++) {
            double seconds = table[v * d->stage_stride + u * d->unit_stride];
            if (!(seconds >= 0.0 && seconds < INFINITY))
                return tp_fail(TP_EVALUE,
                               "seconds of %s%s on stage %d, slice %lld of the batch, is %g: finite and at least 0 "
                               "would be right",
                               tp_op_name(op), part, v, (long long)u, seconds);
        }
    return TP_OK;
}

tp_status
tp_durations_check(const tp_program *program, const tp_durations *durations)
{
    for (int op = 0; op < TP_OPS; op++) {
        TP_TRY(table_ok(program, durations, op, "", durations->seconds[op]));
        TP_TRY(table_ok(program, durations, op, ".a", durations->half_s[0][op]));
        TP_TRY(table_ok(program, durations, op, ".b", durations->half_s[1][op]));
    }
    TP_TRY(table_ok(program, durations, TP_OP_OPT, ".sum", durations->sum_s));
    TP_TRY(table_ok(program, durations, TP_OP_OPT, ".norm", durations->norm_s));
    TP_TRY(table_ok(program, durations, TP_OP_OPT, ".gather", durations->gather_s));
    TP_TRY(table_ok(program, durations, TP_OP_OPT, ".beside", durations->beside_s));
    TP_TRY(table_ok(program, durations, TP_OP_OPT, ".last", durations->last_s));
    int64_t cells = program->stages * tp_program_units(program);
    const double *tables[] = {durations->comm_unit_s != NULL ? durations->comm_unit_s : durations->comm_s,
                              durations->half_comm_s[0], durations->half_comm_s[1], durations->back_comm_unit_s,
                              durations->guest_comm_s};
    static const char *const names[] = {"comm_s", "comm.a", "comm.b", "comm.back", "comm.guest"};
    for (int64_t i = 0; durations->latency_s != NULL && i < 2 * program->stages; i++)
        if (!(durations->latency_s[i] >= 0.0 && durations->latency_s[i] < INFINITY))
            return tp_fail(TP_EVALUE, "comm.latency[%lld] is %g: finite and at least 0 would be right",
                           (long long)(i % program->stages), durations->latency_s[i]);
    for (int k = 0; k < 5; k++) {
        int64_t count = k == 0 && durations->comm_unit_s == NULL ? program->stages : cells;
        for (int64_t i = 0; tables[k] != NULL && i < count; i++)
            if (!(tables[k][i] >= 0.0 && tables[k][i] < INFINITY))
                return tp_fail(TP_EVALUE, "%s[%lld] is %g: finite and at least 0 would be right", names[k], (long long)i,
                               tables[k][i]);
    }
    return TP_OK;
}

double
tp_program_update_s(const tp_program *p, const tp_durations *d, int rank, double *before_s)
{
    double seconds = 0.0, before;
    *before_s = 0.0;
    int64_t k = p->begin[rank + 1];
    while (k > p->begin[rank] && p->code[k - 1].op == TP_OP_OPT)
        k--;
    for (; k < p->begin[rank + 1]; k++) {
        seconds += tp_durations_update_s(d, p->code[k].stage, &before);
        *before_s += before;
    }
    return seconds;
}

double
tp_sched_before_meeting_s(const tp_program *p, const tp_durations *d, int rank)
{
    double seconds;
    tp_program_update_s(p, d, rank, &seconds);
    for (int64_t k = p->begin[rank + 1] - 1; k >= p->begin[rank] && tp_sched_is_end(p->code[k].op); k--)
        if (p->code[k].op == TP_OP_AR)
            seconds += tp_durations_s(d, TP_OP_AR, 0, p->code[k].stage, 0);
    return seconds;
}
