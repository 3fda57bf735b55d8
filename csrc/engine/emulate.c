/* The engine with kernels replaced by timed waits: order, messages and waits are real, only the work is sleep. */
#include "csrc/engine/internal.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"

tp_status
tp_engine_open_emulated(const tp_program *program, int rank, const tp_durations *durations, tp_comm *comm,
                        tp_region *region, tp_heap *heap, tp_engine **out)
{
    if (rank < 0 || rank >= program->ranks)
        return tp_fail(TP_EVALUE, "rank is %d: 0 to %d would be right", rank, program->ranks - 1);
    if (program->ranks > 1 && comm == NULL)
        return tp_fail(TP_EVALUE, "a program of %d ranks needs a communicator", program->ranks);
    tp_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return tp_fail(TP_EMEMORY, "no memory for an engine");
    engine->config = (tp_engine_config){.program = program, .rank = rank, .comm = comm, .region = region, .threads = 1};
    engine->heap = heap;
    engine->durations = durations;
    tp_status status = tp_engine_take_tables(engine, program, rank, 1);
    if (status == TP_OK)
        status = tp_heap_alloc(heap, (size_t)engine->count * sizeof *engine->stamps, "message stamps",
                               (void **)&engine->stamps);
    if (status != TP_OK) {
        tp_engine_close(engine);
        return status;
    }
    *out = engine;
    return TP_OK;
}

static double
seconds_of(const tp_engine *engine, tp_op op, const tp_instr *instr)
{
    const tp_durations *durations = engine->durations;
    const double *seconds = durations->seconds[op];
    if (seconds == NULL)
        return op == TP_OP_B && durations->seconds[TP_OP_I] != NULL
                   ? seconds_of(engine, TP_OP_I, instr) + seconds_of(engine, TP_OP_W, instr)
                   : 0;
    int64_t unit = op == TP_OP_OPT || op == TP_OP_AR ? 0 : tp_program_unit(engine->config.program, instr);
    return seconds[instr->stage * durations->stage_stride + unit * durations->unit_stride];
}

/* When the message that instruction i reads is there: its stamp plus the link's time. */
static int64_t
arrival(const tp_engine *engine, int64_t i)
{
    const tp_instr *reader = &engine->code[i];
    const tp_program *program = engine->config.program;
    const tp_durations *durations = engine->durations;
    uint16_t wanted = reader->op == TP_OP_F ? TP_OP_RF : TP_OP_RB;
    int64_t at = i;
    while (engine->code[--at].op != wanted || engine->code[at].stage != reader->stage ||
           engine->code[at].micro != reader->micro || engine->code[at].slice != reader->slice) {
    }
    int sender = wanted == TP_OP_RF ? reader->stage - 1 : reader->stage + 1;
    double lag = 0;
    if (durations->comm_unit_s != NULL)
        lag = durations->comm_unit_s[sender * tp_program_units(program) + tp_program_unit(program, reader)];
    else if (durations->comm_s != NULL)
        lag = durations->comm_s[sender];
    return engine->stamps[at] + (int64_t)(lag * 1e9);
}

static tp_status
barrier(tp_engine *engine)
{
    double one = 1;
    tp_comm *comm = engine->config.comm;
    return comm == NULL ? TP_OK : comm->ops->allgather(comm, &one, sizeof one, engine->gather);
}

static tp_status
emulate_one(tp_engine *engine, int64_t i, int64_t start_ns)
{
    const tp_instr *instr = &engine->code[i];
    switch (instr->op) {
    case TP_OP_SF:
    case TP_OP_SB: engine->stamps[i] = start_ns; /* fall through */
    case TP_OP_RF:
    case TP_OP_RB: return tp_engine_message(engine, instr, &engine->stamps[i], sizeof *engine->stamps);
    default:
        tp_clock_sleep_until(start_ns + (int64_t)(1e9 * seconds_of(engine, (tp_op)instr->op, instr)));
        return TP_OK;
    }
}

tp_status
tp_engine_run_emulated(tp_engine *engine, tp_step_result *result)
{
    int finished = 0;
    memset(engine->received, 0, (size_t)engine->config.program->ranks * sizeof *engine->received);
    TP_TRY(barrier(engine)); /* all ranks begin together, as the simulator has it */
    result->begin_ns = tp_clock_ns();
    for (int64_t i = 0; i < engine->count; i++) {
        const tp_instr *instr = &engine->code[i];
        tp_event *event = &engine->events[i];
        tp_engine_note(engine, instr);
        int64_t before = tp_clock_ns();
        TP_TRY(tp_engine_wait_inputs(engine, i));
        if (engine->from[i] >= 0)
            tp_clock_sleep_until(arrival(engine, i));
        *event = (tp_event){.position = (int32_t)i, .step = (int32_t)engine->step, .start_ns = tp_clock_ns()};
        event->wait_ns = event->start_ns - before;
        if (instr->op == TP_OP_OPT && !finished++) {
            TP_TRY(barrier(engine));
            event->wait_ns = tp_clock_ns() - event->start_ns;
        }
        TP_TRY(emulate_one(engine, i, instr->op == TP_OP_OPT ? tp_clock_ns() : event->start_ns));
        event->end_ns = tp_clock_ns();
    }
    result->end_ns = tp_clock_ns();
    return TP_OK;
}
