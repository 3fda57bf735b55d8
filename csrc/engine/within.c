/* R within B (TP_WITHIN): a B goes back block by block and makes each again right before its gradients. Its event is the part of it
 * that went back, and that of its R the part that made again: the two stand one behind the other, as the simulator has them. */
#include "csrc/engine/internal.h"

static int
remakes(const tp_engine_config *config, int block)
{
    return config->saves != NULL && config->saves[block] == TP_REMAKES;
}

/* Blocks of the model, not of the rank's stages, so that what tables take does not depend on the partition. */
static int64_t
blocks_remade(const tp_engine_config *config)
{
    int64_t count = 0;
    for (int block = 0; block < tp_model_blocks(&config->model); block++)
        count += remakes(config, block);
    return count;
}

/* R within B of a stage of this rank: one of each of its micro-batches, or none. */
static int64_t
within_of(const tp_engine_config *config, int stage)
{
    const tp_program *program = config->program;
    if (config->saves == NULL || program->rank_of[stage] != config->rank)
        return 0;
    return config->counts != NULL ? config->counts->stage[stage].within : tp_program_within(program, stage);
}

void
tp_engine_within_bytes(const tp_engine_config *config, size_t *parts, size_t *begins)
{
    int64_t within = 0;
    for (int v = 0; v < config->program->stages; v++)
        within += within_of(config, v);
    *parts = (size_t)(within == 0 ? 0 : within * blocks_remade(config)) * sizeof(tp_engine_part_ns);
    *begins = within == 0 ? 0 : (size_t)config->program->stages * sizeof(int64_t);
}

void
tp_engine_place_within(tp_engine *engine)
{
    const int64_t most = engine->within == NULL ? 0 : blocks_remade(&engine->config);
    int64_t next = 0;
    for (int v = 0; most > 0 && v < engine->config.program->stages; v++) {
        engine->within_begins[v] = next;
        next += within_of(&engine->config, v) * most;
    }
}

tp_status
tp_engine_check_within(const tp_engine_config *config)
{
    for (int v = 0; v < config->program->stages; v++)
        if (config->provider->stage->backward_block == NULL && tp_engine_stage_counts(config, v).within > 0)
            return tp_fail(TP_EVALUE, "stage %d recomputes within B (R+): provider %s does not do that; R before B would be right", v,
                           config->provider->name);
    return TP_OK;
}

/* The first of the parts of a micro-batch's R within B. */
static tp_engine_part_ns *
parts_of(tp_engine *engine, const tp_instr *instr)
{
    const int64_t micro = tp_engine_micro(&engine->config, instr->micro);
    return engine->within + engine->within_begins[instr->stage] + micro * blocks_remade(&engine->config);
}

tp_status
tp_engine_go_back_within(tp_engine *engine, int64_t i)
{
    const tp_instr *instr = &engine->code[i];
    const tp_stage_ops *ops = engine->config.provider->stage;
    const int part = tp_engine_part(&engine->config, instr->stage), micro = tp_engine_micro(&engine->config, instr->micro);
    const int first = engine->config.partition[part], end = engine->config.partition[part + 1];
    const int slot = (int)TP_SLOT_ACTIVATION(instr->slot), gslot = (int)TP_SLOT_GRADIENT(instr->slot);
    tp_stage *stage = engine->stage[instr->stage];
    tp_engine_part_ns *made = parts_of(engine, instr);
    for (int block = end - 1; block >= first; block--) {
        if (remakes(&engine->config, block)) {
            TP_TRY(engine->device->ops->mark(engine->device, &made->begin));
            TP_TRY(ops->recompute_block(stage, micro, slot, gslot, block - first));
            TP_TRY(engine->device->ops->mark(engine->device, &made->end));
            made++;
        }
        TP_TRY(ops->backward_block(stage, micro, slot, gslot, block - first));
        tp_engine_went_back(engine, i, block - first);
    }
    return TP_OK;
}

tp_status
tp_engine_go_back_summing(tp_engine *engine, int64_t i)
{
    const tp_instr *instr = &engine->code[i];
    const int part = tp_engine_part(&engine->config, instr->stage), micro = tp_engine_micro(&engine->config, instr->micro);
    const int slot = (int)TP_SLOT_ACTIVATION(instr->slot), gslot = (int)TP_SLOT_GRADIENT(instr->slot);
    for (int block = engine->config.partition[part + 1] - engine->config.partition[part] - 1; block >= 0; block--) {
        TP_TRY(engine->config.provider->stage->backward_block(engine->stage[instr->stage], micro, slot, gslot, block));
        tp_engine_went_back(engine, i, block);
    }
    return TP_OK;
}

void
tp_engine_settle_within(tp_engine *engine)
{
    for (int64_t i = 0; engine->within != NULL && i + 1 < engine->count; i++) {
        if (!tp_instr_is_within(&engine->code[i]))
            continue;
        const tp_engine_part_ns *made = parts_of(engine, &engine->code[i]);
        const int part = tp_engine_part(&engine->config, engine->code[i].stage);
        int64_t all = 0, count = 0;
        for (int block = engine->config.partition[part]; block < engine->config.partition[part + 1]; block++)
            count += remakes(&engine->config, block);
        for (int64_t k = 0; k < count; k++)
            all += made[k].end - made[k].begin;
        tp_event *again = &engine->events[i], *back = again + 1;
        again->start_ns = back->start_ns;
        again->end_ns = back->start_ns = again->start_ns + all;
    }
}
