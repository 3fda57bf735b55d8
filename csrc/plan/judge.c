#include "csrc/plan/judge.h"

#include <stdlib.h>

enum { F, I, W, UPDATE, EXCHANGE, LINK, COPY, TABLES };

typedef struct {
    double *table[TABLES]; /* [stages * units] each, one block of memory */
    tp_durations durations;
} scratch;

static tp_status
scratch_open(const tp_program *program, const tp_judge_costs *costs, scratch *out)
{
    size_t cells = (size_t)program->stages * (size_t)tp_program_units(program);
    double *memory = malloc(TABLES * cells * sizeof *memory);
    if (memory == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the durations of %zu operations", cells);
    for (int t = 0; t < TABLES; t++)
        out->table[t] = memory + (size_t)t * cells;
    for (size_t i = 0; i < cells; i++)
        out->table[EXCHANGE][i] = costs->exchange_s;
    out->durations = (tp_durations){.stage_stride = tp_program_units(program), .unit_stride = 1};
    out->durations.seconds[TP_OP_F] = out->table[F];
    out->durations.seconds[TP_OP_I] = out->table[I];
    out->durations.seconds[TP_OP_W] = out->table[W];
    out->durations.seconds[TP_OP_OPT] = out->table[UPDATE];
    out->durations.seconds[TP_OP_AR] = out->table[EXCHANGE];
    out->durations.comm_unit_s = out->table[LINK];
    if (costs->copy_byte_s > 0.0) {
        static const tp_op ends[] = {TP_OP_SF, TP_OP_SB, TP_OP_RF, TP_OP_RB};
        for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++)
            out->durations.seconds[ends[i]] = out->table[COPY];
    }
    return TP_OK;
}

/* Messages and updates of one plan. */
static void
fill(const tp_program *program, const tp_judge_costs *costs, const int32_t *batches, const int32_t *lengths,
     const double *update_s, scratch *out)
{
    int64_t units = tp_program_units(program);
    for (int32_t q = 0; q < program->micros; q++)
        for (int64_t u = program->offset[q]; u < program->offset[q + 1]; u++) {
            double bytes = costs->row_bytes * (double)batches[q] * (double)lengths[u];
            for (int32_t k = 0; k < program->stages; k++) {
                out->table[LINK][k * units + u] = costs->latency_s + costs->byte_s * bytes;
                out->table[COPY][k * units + u] = costs->copy_byte_s * bytes;
                out->table[UPDATE][k * units + u] = update_s[k];
            }
        }
}

tp_status
tp_plan_glance(const tp_program *program, const tp_judge_costs *costs, const int32_t *batches, int32_t plans,
               const int32_t *blocks, const int32_t *lengths, const double *update_s, double *makespan_s)
{
    tp_sim *sim = NULL;
    scratch room;
    int64_t units = tp_program_units(program);
    int32_t stages = program->stages;
    TP_TRY(scratch_open(program, costs, &room));
    tp_status status = tp_sim_open(program, &sim);
    for (int32_t i = 0; i < plans && status == TP_OK; i++) {
        status = tp_cost_durations(costs->cost, stages, blocks + (int64_t)i * stages * TP_BLOCK_KINDS, program->micros,
                                   batches, program->slices, lengths + i * units, room.table[F], room.table[I],
                                   room.table[W]);
        if (status != TP_OK)
            break;
        fill(program, costs, batches, lengths + i * units, update_s + (int64_t)i * stages, &room);
        tp_sim_run(sim, &room.durations, &makespan_s[i]);
    }
    tp_sim_close(sim);
    free(room.table[0]);
    return status;
}
