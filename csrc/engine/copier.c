/* Swaps beside the work (TP_BESIDE): the device makes the copies of a rank's SO and SI aside, in their order, while the rank goes on,
 * or where it cannot a thread of the rank does. The rank counts copies: what it has begun, what is done, and for each instruction
 * how many must be done before it. */
#include "csrc/engine/helper.h"
#include "csrc/engine/internal.h"

#include <stdlib.h>

#include "csrc/base/clock.h"

struct tp_engine_copier {
    int64_t number;          /* of this step's copies, the next */
    tp_engine_helper helper; /* not running: the device copies */
};

int
tp_engine_copies(const tp_program *program, int rank)
{
    int copies = 0;
    for (int64_t i = program->begin[rank]; i < program->begin[rank + 1]; i++)
        copies += tp_engine_is_copy(&program->code[i]);
    return copies;
}

tp_status
tp_engine_check_copies(const tp_engine_config *config)
{
    if (config->provider->host_memory || config->provider->device->aside_begin != NULL || !tp_program_swaps_beside(config->program))
        return TP_OK;
    return tp_fail(TP_EVALUE, "the program swaps beside the work (&): provider %s makes copies in the order of its work, a program "
                   "without & would be right", config->provider->name);
}

tp_status
tp_engine_match_copies(tp_engine *engine, const tp_program *program)
{
    int64_t units = tp_program_units(program);
    int32_t *out, *in, copies = 0; /* copies until the last SO of a stage's places, and the SI of a slice */
    if (engine->copied == NULL)
        return TP_OK;
    out = calloc((size_t)program->stages * (size_t)(2 + units), sizeof *out);
    if (out == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the copies of %d stages", program->stages);
    in = out + 2 * program->stages;
    int two = 0;
    for (int64_t i = 0; i < engine->count; i++)
        two |= engine->code[i].op == TP_OP_SO && engine->code[i].flags & TP_TWO_PLACES;
    for (int64_t i = 0; i < engine->count; i++) {
        const tp_instr *instr = &engine->code[i];
        int odd = two && TP_SLOT_ACTIVATION(instr->slot) & 1u;
        int32_t *here = instr->op == TP_OP_F || instr->op == TP_OP_SO ? &out[2 * instr->stage + odd]
                                                                      : &in[instr->stage * units + tp_program_unit(program, instr)];
        const int reads = instr->op == TP_OP_F || instr->op == TP_OP_B || instr->op == TP_OP_I || tp_instr_is_within(instr);
        engine->copied[i] = reads ? *here : 0;
        if (!tp_engine_is_copy(instr))
            continue;
        engine->copies[copies++] = (int32_t)i;
        *here = copies;
    }
    free(out);
    return TP_OK;
}

static tp_status
copy(tp_engine *engine, const tp_instr *instr)
{
    const tp_stage_ops *ops = engine->config.provider->stage;
    tp_stage *stage = engine->stage[instr->stage];
    int slot = (int)TP_SLOT_ACTIVATION(instr->slot), micro = tp_engine_micro(&engine->config, instr->micro);
    return instr->op == TP_OP_SO ? ops->swap_out(stage, micro, instr->slice, slot)
                                 : ops->swap_in(stage, micro, instr->slice, slot, (int)TP_SLOT_GRADIENT(instr->slot));
}

static tp_status
copy_one(tp_engine *engine, uint32_t number)
{
    int64_t at = engine->copies[number];
    tp_event *event = &engine->events[at];
    event->start_ns = tp_clock_ns();
    tp_status status = copy(engine, &engine->code[at]);
    event->end_ns = tp_clock_ns();
    return status;
}

tp_status
tp_engine_open_copier(tp_engine *engine)
{
    if (engine->copied == NULL || engine->durations != NULL)
        return TP_OK;
    tp_engine_copier *copier = calloc(1, sizeof *copier);
    if (copier == NULL)
        return tp_fail(TP_EMEMORY, "no memory for a copier");
    engine->copier = copier;
    return engine->device->ops->aside_begin != NULL ? TP_OK
                                                    : tp_engine_helper_open(&copier->helper, engine, "tp-copier", "swaps", copy_one);
}

void
tp_engine_close_copier(tp_engine *engine)
{
    tp_engine_copier *copier = engine->copier;
    if (copier != NULL)
        tp_engine_helper_close(&copier->helper);
    free(copier);
    engine->copier = NULL;
}

tp_status
tp_engine_begin_copies(tp_engine *engine)
{
    tp_engine_copier *copier = engine->copier;
    if (copier == NULL)
        return TP_OK;
    copier->number = 0;
    return copier->helper.running ? tp_engine_helper_begin_step(&copier->helper) : TP_OK;
}

/* On the device, marks included. */
static tp_status
copy_aside(tp_engine *engine, int64_t i)
{
    const tp_device_ops *ops = engine->device->ops;
    int64_t number = engine->copier->number++;
    TP_TRY(ops->aside_begin(engine->device, number));
    tp_status status = ops->mark(engine->device, &engine->events[i].start_ns);
    if (status == TP_OK)
        status = copy(engine, &engine->code[i]);
    if (status == TP_OK)
        status = ops->mark(engine->device, &engine->events[i].end_ns);
    tp_status ended = ops->aside_end(engine->device, number);
    return status != TP_OK ? status : ended;
}

tp_status
tp_engine_begin_copy(tp_engine *engine, int64_t i)
{
    if (!engine->copier->helper.running)
        return copy_aside(engine, i);
    tp_engine_helper_go(&engine->copier->helper);
    return TP_OK;
}

tp_status
tp_engine_wait_copies(tp_engine *engine, int64_t i)
{
    if (!engine->copier->helper.running)
        return engine->device->ops->aside_wait(engine->device, engine->copied[i] - 1);
    return tp_engine_helper_wait(&engine->copier->helper, (uint32_t)engine->copied[i]);
}
