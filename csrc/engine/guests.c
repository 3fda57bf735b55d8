/* Activations that one rank keeps for another (SE, RE, SL, RL): the rooms for them, and which instruction waits for what comes home. */
#include "csrc/engine/internal.h"

static int
is_guest(const tp_instr *instr)
{
    return instr->op == TP_OP_SE || instr->op == TP_OP_RE || instr->op == TP_OP_SL || instr->op == TP_OP_RL;
}

/* The first instruction of a guest that this rank runs; NULL: there is none. */
static const tp_instr *
first_guest(const tp_program *program, int rank)
{
    for (int64_t k = program->begin[rank]; k < program->begin[rank + 1]; k++)
        if (is_guest(&program->code[k]))
            return &program->code[k];
    return NULL;
}

int
tp_engine_has_guests(const tp_program *program, int rank)
{
    return first_guest(program, rank) != NULL;
}

static int
keeps_guests(const tp_provider *provider)
{
    return provider->stage->guest != NULL;
}

tp_status
tp_engine_check_guests(const tp_engine_config *config)
{
    const tp_instr *guest = first_guest(config->program, config->rank);
    if (guest == NULL || keeps_guests(config->provider))
        return TP_OK;
    return tp_fail(TP_EVALUE, "the program has %d%s%d.0: provider %s does not keep activations in another rank's memory", guest->stage,
                   tp_op_name(guest->op), guest->micro, config->provider->name);
}

tp_status
tp_engine_size_guest(const tp_engine_config *config, int first, int end, int32_t batch, int32_t seq_len, int64_t *bytes)
{
    static const int32_t one = 1;
    tp_stage_config part = {.model = config->model, .first_block = first, .last_block = end, .activation_slots = 1,
                            .gradient_slots = 1, .saves = config->saves};
    tp_slicing *slicing;
    if (!keeps_guests(config->provider))
        return tp_fail(TP_EVALUE, "provider %s does not keep activations in another rank's memory", config->provider->name);
    if (first < 0 || end <= first || end > tp_model_blocks(&config->model))
        return tp_fail(TP_EVALUE, "blocks [%d, %d): a range within [0, %d) would be right", first, end,
                       tp_model_blocks(&config->model));
    TP_TRY(tp_slicing_open(seq_len, batch, 1, &batch, &one, &seq_len, &slicing));
    part.slicing = slicing;
    tp_stage_bytes found;
    tp_status status = tp_slicing_check(slicing, &config->model);
    if (status == TP_OK)
        status = config->provider->stage->bytes(&part, &config->device, &found);
    *bytes = status == TP_OK ? (int64_t)found.guest : 0;
    tp_slicing_close(slicing);
    return status;
}

/* Of guests of `stage` on this rank: the bytes of one, and of all. */
static tp_status
guests_of(const tp_engine_config *config, int stage, size_t *one, size_t *all)
{
    tp_stage_bytes bytes;
    size_t workspace;
    *one = *all = 0;
    if (tp_program_host(config->program, stage) != config->rank)
        return TP_OK;
    TP_TRY(tp_engine_stage_bytes(config, stage, &bytes, &workspace));
    *one = bytes.guest;
    *all = (size_t)tp_program_guest_slots(config->program, stage) * bytes.guest;
    return TP_OK;
}

tp_status
tp_engine_guests_bytes(const tp_engine_config *config, size_t *bytes)
{
    *bytes = 0;
    for (int stage = 0; tp_engine_rank_has_guests(config) && stage < config->program->stages; stage++) {
        size_t one, all;
        TP_TRY(guests_of(config, stage, &one, &all));
        *bytes += all;
    }
    return TP_OK;
}

tp_status
tp_engine_take_guests(tp_engine *engine, tp_heap *account)
{
    const tp_engine_config *config = &engine->config;
    size_t total, used = 0;
    if (engine->guest == NULL)
        return TP_OK;
    TP_TRY(tp_engine_guests_bytes(config, &total));
    TP_TRY(tp_heap_alloc(account, total, "the engine's room for guests", &engine->rooms));
    for (int stage = 0; stage < config->program->stages; stage++) {
        size_t one, all;
        TP_TRY(guests_of(config, stage, &one, &all));
        engine->guest[stage] = (tp_engine_guest){(char *)engine->rooms + used, one};
        used += all;
    }
    return TP_OK;
}

tp_status
tp_engine_check_guests_way(const tp_engine *engine)
{
    const tp_comm *comm = engine->config.comm;
    if (engine->guest == NULL || comm == NULL || comm->ops->bind == NULL || comm->ops->lend != NULL)
        return TP_OK;
    return tp_fail(TP_EVALUE, "the program keeps activations in another rank's memory, which %s does not send: nccl, or messages "
                   "through the host, would be right", comm->ops->name);
}

/* The instruction that must wait until `evicted`, an SE, has left: the first behind it that writes into its slot; -1: none, or RL,
 * for which the communicator waits. */
static int64_t
next_writer(const tp_engine *engine, int64_t evicted)
{
    const tp_instr *se = &engine->code[evicted];
    int64_t k = evicted + 1, reader;
    for (; k < engine->count; k++) {
        const tp_instr *instr = &engine->code[k];
        int writes = instr->op == TP_OP_F || instr->op == TP_OP_RF || instr->op == TP_OP_RL;
        if (writes && instr->stage == se->stage && TP_SLOT_ACTIVATION(instr->slot) == TP_SLOT_ACTIVATION(se->slot))
            break;
    }
    if (k == engine->count || engine->code[k].op == TP_OP_RL)
        return -1;
    if (engine->code[k].op == TP_OP_F)
        return k;
    /* A message lands when its reader, or that of a later one of that peer, waits for it. */
    for (reader = k + 1; reader < engine->count; reader++)
        if (engine->code[reader].op == TP_OP_F && engine->code[reader].stage == se->stage &&
            engine->code[reader].micro == engine->code[k].micro)
            break;
    for (int64_t i = k + 1; i < reader && reader < engine->count; i++)
        if ((engine->from[i] == engine->from[reader] && engine->needs[i] >= engine->needs[reader]) ||
            (engine->load[i].from == engine->from[reader] && engine->load[i].needs >= engine->needs[reader]))
            return k;
    return reader < engine->count ? reader : k;
}

void
tp_engine_match_guests(tp_engine *engine)
{
    const tp_comm *comm = engine->config.comm;
    engine->lends = engine->guest != NULL && comm != NULL && comm->ops->bind != NULL;
    for (int64_t i = 0; i < engine->count; i++)
        engine->reuses[i] = -1;
    for (int64_t i = 0; engine->lends && i < engine->count; i++) {
        int64_t writer = engine->code[i].op == TP_OP_SE ? next_writer(engine, i) : -1;
        if (writer >= 0)
            engine->reuses[writer] = (int32_t)i;
    }
}

void *
tp_engine_guest_end(tp_engine *engine, const tp_instr *instr, size_t *bytes)
{
    int hosts = instr->op == TP_OP_RE || instr->op == TP_OP_SL, slot = (int)TP_SLOT_ACTIVATION(instr->slot);
    const tp_engine_guest *guest = &engine->guest[instr->stage];
    if (!hosts)
        return engine->config.provider->stage->guest(engine->stage[instr->stage], slot, bytes);
    *bytes = guest->bytes;
    return guest->rooms + (size_t)slot * guest->bytes;
}

tp_status
tp_engine_guest_message(tp_engine *engine, const tp_instr *instr)
{
    size_t bytes;
    void *data = tp_engine_guest_end(engine, instr, &bytes);
    return tp_engine_message(engine, instr, data, bytes);
}
