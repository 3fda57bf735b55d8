/* Opening and closing an engine: sizes, tables, the device, its stages, and how messages get out of it. */
#include "csrc/engine/engine.h"

#include <stdlib.h>

#include "csrc/base/team.h"
#include "csrc/engine/internal.h"

/* ---- sizes -------------------------------------------------------------------------------------------------------------- */

tp_status
tp_engine_stage_config(const tp_engine_config *config, int stage, tp_stage_config *out)
{
    tp_stage_counts counts = tp_engine_stage_counts(config, stage);
    int part = tp_engine_part(config, stage);
    *out = (tp_stage_config){.model = config->model,
                             .slicing = config->slicing,
                             .first_block = config->partition[part],
                             .last_block = config->partition[part + 1],
                             .activation_slots = counts.activation_slots,
                             .gradient_slots = counts.gradient_slots,
                             .saves = config->saves,
                             .two_places = counts.two_places,
                             .versions = counts.versions,
                             .replicas = tp_engine_members(config),
                             .shards = config->shards && tp_engine_members(config) > 1,
                             .member = tp_engine_member(config, stage),
                             .store = config->store};
    out->keep_keys = tp_engine_keeps_keys(config, stage);
    out->by_block = tp_engine_goes_by_block(config, &counts);
    out->remake_within = out->by_block && counts.within > 0;
    out->slice_gradients = tp_engine_slices_gradients(config, stage);
    TP_TRY(tp_engine_remakes_slices(config, stage, &out->remake_slices));
    return tp_engine_has_one_room(config, stage, &out->one_room);
}

static int64_t
gather_count(const tp_engine_config *config)
{
    return tp_model_params(&config->model) + TP_GATHER_EXTRA;
}

tp_status
tp_engine_stage_bytes(const tp_engine_config *config, int stage, tp_stage_bytes *bytes, size_t *workspace)
{
    tp_stage_config part;
    TP_TRY(tp_engine_stage_config(config, stage, &part));
    *workspace = tp_align_bytes(config->provider->device->workspace_bytes(&part, &config->device));
    return config->provider->stage->bytes(&part, &config->device, bytes);
}

size_t
tp_engine_table_bytes(const tp_engine_config *config)
{
    engine_tables tables = {0};
    if (config->provider->counts_tables)
        tables = tp_engine_tables(config, gather_count(config));
    return tp_align_bytes(tables.needs) + tp_align_bytes(tables.forward_needs) + tp_align_bytes(tables.from) +
           tp_align_bytes(tables.received) + tp_align_bytes(tables.loan) + tp_align_bytes(tables.reuses) +
           tp_align_bytes(tables.events) + tp_align_bytes(tables.gather) + tp_align_bytes(tables.stages) +
           tp_align_bytes(tables.slots) + tp_align_bytes(tables.loads) +
           tp_align_bytes(tables.guests) + tp_align_bytes(tables.copied) + tp_align_bytes(tables.copies) +
           tp_align_bytes(tables.within) + tp_align_bytes(tables.within_begins) +
           tp_align_bytes(tp_engine_sums_bytes(config));
}

/* Of all stages of the rank together. The workspace they share: one after another they work. */
static tp_status
stages_bytes(const tp_engine_config *config, tp_stage_bytes *total, size_t *workspace)
{
    *total = (tp_stage_bytes){0};
    *workspace = 0;
    for (int stage = 0; stage < config->program->stages; stage++) {
        tp_stage_bytes bytes;
        size_t own;
        if (config->program->rank_of[stage] != config->rank)
            continue;
        TP_TRY(tp_engine_stage_bytes(config, stage, &bytes, &own));
        *workspace = own > *workspace ? own : *workspace;
        total->memory += bytes.memory;
        total->lent += bytes.lent;
        total->store += bytes.store;
    }
    return TP_OK;
}

tp_status
tp_engine_bytes(const tp_engine_config *config, size_t *bytes)
{
    tp_stage_bytes stages;
    size_t guests, workspace;
    TP_TRY(stages_bytes(config, &stages, &workspace));
    TP_TRY(tp_engine_guests_bytes(config, &guests));
    *bytes = tp_engine_table_bytes(config) + tp_align_bytes(guests) + stages.memory + workspace;
    return TP_OK;
}

tp_status
tp_engine_lent_bytes(const tp_engine_config *config, size_t *bytes)
{
    tp_stage_bytes stages;
    size_t workspace;
    TP_TRY(stages_bytes(config, &stages, &workspace));
    *bytes = config->program->ranks > 1 ? stages.lent : 0;
    return TP_OK;
}

tp_status
tp_engine_store_bytes(const tp_engine_config *config, size_t *bytes)
{
    tp_stage_bytes stages;
    size_t workspace;
    TP_TRY(stages_bytes(config, &stages, &workspace));
    *bytes = stages.store;
    return TP_OK;
}

static int
is_halved(const tp_instr *instr)
{
    return instr->op == TP_OP_F && instr->flags & TP_HALVES;
}

int
tp_engine_updates(const tp_engine_config *config)
{
    return tp_program_versions(config->program, 0) > 0;
}

static tp_status
check_updates(const tp_engine_config *config)
{
    const tp_program *program = config->program;
    if (!tp_engine_updates(config))
        return TP_OK;
    if (config->provider->stage->update_micro == NULL)
        return tp_fail(TP_EVALUE, "the program updates by micro-batches (U): backend %s has one version of its weights, cpu or cuda "
                       "would be right", config->provider->name);
    if (config->model.tie_weights && program->stages > 1)
        return tp_fail(TP_EVALUE, "the program updates by micro-batches (U) and tie_weights is True: its ends on two stages would have "
                       "different versions, False would be right");
    if (tp_engine_members(config) > 1)
        return tp_fail(TP_EVALUE, "the program updates by micro-batches (U) on %d replicas: one would be right",
                       tp_engine_members(config));
    return TP_OK;
}

tp_status
tp_engine_check_shape(const tp_engine_config *config)
{
    const tp_program *program = config->program;
    int copies = program->copies;
    TP_TRY(tp_model_check(&config->model));
    TP_TRY(tp_slicing_check(config->slicing, &config->model));
    if (config->rank < 0 || config->rank >= program->ranks)
        return tp_fail(TP_EVALUE, "rank is %d: 0 to %d would be right", config->rank, program->ranks - 1);
    if (config->device.threads < 1 || config->device.threads > TP_TEAM_MOST)
        return tp_fail(TP_EVALUE, "threads per rank is %d: 1 to %d would be right", config->device.threads,
                       TP_TEAM_MOST);
    if (config->slicing->seq_len > config->model.block_size)
        return tp_fail(TP_EVALUE, "seq_len is %d: at most block_size = %d would be right", config->slicing->seq_len,
                       config->model.block_size);
    if (program->micros != copies * config->slicing->micros)
        return tp_fail(TP_EVALUE, "the program has %d micro-batches%s, the slicing %d", program->micros,
                       copies > 1 ? " for two copies of the model" : "", config->slicing->micros);
    for (int q = 0; q < program->micros; q++)
        if (program->slices[q] != config->slicing->micro[tp_engine_micro(config, q)].slices)
            return tp_fail(TP_EVALUE, "micro-batch %d has %d slices in the program, %d in the slicing", q,
                           program->slices[q], config->slicing->micro[tp_engine_micro(config, q)].slices);
    for (int64_t i = 0; i < program->begin[program->ranks]; i++)
        if (is_halved(&program->code[i]) && config->slicing->micro[program->code[i].micro].half == 0)
            return tp_fail(TP_EVALUE, "micro-batch %d is halved in the program and not in the slicing",
                           program->code[i].micro);
    TP_TRY(check_updates(config));
    TP_TRY(tp_engine_check_copies(config));
    return tp_engine_check_guests(config);
}

tp_status
tp_engine_check(const tp_engine_config *config)
{
    int blocks = tp_model_blocks(&config->model), stages = tp_program_copy_stages(config->program);
    TP_TRY(tp_engine_check_shape(config));
    if (config->partition[0] != 0 || config->partition[stages] != blocks)
        return tp_fail(TP_EVALUE, "the stages cover blocks [%d, %d): [0, %d) would be right", config->partition[0],
                       config->partition[stages], blocks);
    for (int stage = 0; stage < stages; stage++)
        if (config->partition[stage + 1] <= config->partition[stage])
            return tp_fail(TP_EVALUE, "stage %d has no block", stage);
    return tp_engine_check_saving(config);
}

tp_status
tp_engine_halve(const tp_program *program, tp_slicing *slicing)
{
    for (int64_t i = 0; i < program->begin[program->ranks]; i++) {
        const tp_instr *instr = &program->code[i];
        if (is_halved(instr) && instr->micro < slicing->micros && slicing->micro[instr->micro].half == 0)
            TP_TRY(tp_slicing_halve(slicing, instr->micro));
    }
    return TP_OK;
}

/* How messages get out of the device's memory: its communicator reads it, or the host may, or it is read for the host. */
static tp_status
connect(tp_engine *engine)
{
    tp_comm *comm = engine->config.comm;
    if (comm == NULL)
        return TP_OK;
    if (comm->ops->bind != NULL) {
        if (comm->bound) /* to unbind it would take the device from under messages of that engine's */
            return tp_fail(TP_EVALUE, "this communicator has the device of an engine that is open still: a communicator of its own, "
                           "or the end of that engine, would be right");
        comm->bound = engine->bound = 1;
        return comm->ops->bind(comm, engine->device);
    }
    if (engine->config.provider->host_memory && !engine->config.staged)
        return TP_OK;
    TP_TRY(tp_engine_stage_comm(comm, engine->device, &engine->staged));
    engine->config.comm = engine->staged;
    return TP_OK;
}

/* *out: where the stages' ends lie if their readers may map it; NULL: the stages take them. */
static tp_status
find_arena(tp_engine *engine, char **out)
{
    const tp_comm *comm = engine->config.comm;
    size_t needed, bytes = 0;
    TP_TRY(tp_engine_lent_bytes(&engine->config, &needed));
    void *arena = needed == 0 || comm == NULL || comm->ops->arena == NULL ? NULL : comm->ops->arena(engine->config.comm, &bytes);
    engine->lends = arena != NULL && bytes >= needed;
    *out = engine->lends ? arena : NULL;
    return TP_OK;
}

static tp_status
open_stages(tp_engine *engine)
{
    const tp_engine_config *config = &engine->config;
    char *arena;
    TP_TRY(find_arena(engine, &arena));
    for (int stage = 0; stage < config->program->stages; stage++) {
        if (config->program->rank_of[stage] != config->rank)
            continue;
        tp_stage_config part;
        tp_stage_bytes bytes;
        TP_TRY(tp_engine_stage_config(config, stage, &part));
        TP_TRY(config->provider->stage->bytes(&part, &config->device, &bytes));
        part.lent = arena;
        TP_TRY(config->provider->stage->open(&part, engine->device, &engine->stage[stage]));
        arena += arena == NULL ? 0 : bytes.lent;
    }
    if (engine->lends)
        return tp_engine_match_loans(engine);
    tp_engine_match_guests(engine);
    return TP_OK;
}

static tp_status
open_parts(tp_engine *engine, const tp_engine_config *config, tp_heap *account)
{
    const tp_provider *provider = config->provider;
    tp_stage_bytes stages;
    size_t workspace;
    TP_TRY(stages_bytes(config, &stages, &workspace));
    if (!provider->counts_tables)
        TP_TRY(tp_heap_open(0, &engine->private));
    engine->heap = provider->counts_tables ? account : engine->private;
    engine->account = account;
    TP_TRY(tp_engine_take_tables(engine, config->program, config->rank, gather_count(config)));
    TP_TRY(provider->device->open(&config->device, account, &engine->device));
    if (tp_engine_sums_bytes(config) > 0)
        TP_TRY(tp_heap_alloc(account, tp_engine_sums_bytes(config), "the engine's room for gradients", (void **)&engine->sums));
    TP_TRY(tp_engine_take_guests(engine, account));
    TP_TRY(connect(engine));
    TP_TRY(tp_engine_check_guests_way(engine));
    TP_TRY(tp_engine_reserve_posted(engine));
    TP_TRY(provider->device->reserve(engine->device, workspace));
    TP_TRY(open_stages(engine));
    TP_TRY(tp_engine_open_copier(engine));
    return tp_engine_open_summer(engine);
}

/* What a proven program must have besides, to be trained by: messages, one OPT a stage, and an AR exactly where the two
 * ends of a tied embedding are apart. */
static tp_status
check_program(const tp_program *program, int tied)
{
    int64_t count[TP_OPS] = {0};
    int remote = 0, last = tp_program_copy_stages(program) - 1; /* of a copy; the other's ends lie the other way round */
    TP_TRY(tp_program_check(program));
    TP_TRY(tp_program_check_canonical(program));
    for (int64_t i = 0; i < program->begin[program->ranks]; i++)
        count[program->code[i].op]++;
    for (int stage = 1; stage <= last; stage++)
        remote |= tp_program_remote(program, stage);
    if (count[TP_OP_OPT] == 0 || (remote && count[TP_OP_SF] == 0))
        return tp_fail(TP_EVALUE, "the program has no %s: a lowered one would be right",
                       count[TP_OP_OPT] == 0 ? "optimizer updates" : "messages");
    if ((count[TP_OP_AR] > 0) != (tied && program->rank_of[0] != program->rank_of[last]))
        return tp_fail(
            TP_EVALUE, "the program has %lld AR, but the model's head is %s and its ends are on ranks %d and %d",
            (long long)count[TP_OP_AR], tied ? "tied" : "not tied", program->rank_of[0], program->rank_of[last]);
    return TP_OK;
}

/* Close what was opened. Where messages are the device's, the ranks have met, and to part they may wait for each other (NCCL's
 * ncclCommFinalize), those that have opened for messages: so all hear of it first. What fails on the way out is not the reason. */
static tp_status
give_up(tp_engine *engine, tp_status status)
{
    tp_error_state reason;
    tp_error_save(&reason);
    if (engine->bound)
        (void)tp_engine_fail(engine, status);
    tp_engine_unbind(engine);
    tp_engine_close(engine);
    tp_error_restore(&reason);
    return status;
}

tp_status
tp_engine_open(const tp_engine_config *config, tp_heap *heap, tp_engine **out)
{
    TP_TRY(tp_engine_check(config));
    TP_TRY(check_program(config->program, config->model.tie_weights));
    TP_TRY(tp_engine_check_replicas(config));
    TP_TRY(tp_engine_check_comm(config));
    tp_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return tp_fail(TP_EMEMORY, "no memory for an engine");
    engine->config = *config;
    engine->config.counts = NULL; /* the caller's, for its questions alone */
    engine->config.shards = config->shards && tp_engine_members(config) > 1;
    engine->first = config->replica * config->program->ranks;
    engine->updates = tp_engine_updates(config) ? config->program->micros : 0;
    tp_status status = tp_engine_check_told(engine, open_parts(engine, config, heap));
    if (status != TP_OK)
        return give_up(engine, status);
    *out = engine;
    return TP_OK;
}

void
tp_engine_unbind(tp_engine *engine)
{
    tp_comm *comm = engine->config.comm;
    if (engine->bound && comm->ops->bind(comm, NULL) == TP_OK)
        comm->bound = engine->bound = 0; /* else it has said so: nothing is left to do about it */
}

int
tp_engine_is_bound(const tp_engine *engine)
{
    return engine->bound;
}

void
tp_engine_close(tp_engine *engine)
{
    if (engine == NULL)
        return;
    tp_engine_close_copier(engine);
    tp_engine_close_summer(engine);
    if (engine->staged != NULL)
        engine->staged->ops->close(engine->staged);
    if (engine->device != NULL) {
        for (int stage = 0; stage < engine->config.program->stages; stage++)
            engine->config.provider->stage->close(engine->stage[stage]);
        tp_heap_free(engine->account, engine->sums);
        tp_heap_free(engine->account, engine->rooms);
        engine->config.provider->device->close(engine->device);
    }
    if (engine->heap != NULL) {
        tp_heap_free(engine->heap, engine->stamps);
        tp_sched_links_close(&engine->links);
        tp_sched_sums_close(&engine->beside);
        tp_engine_drop_tables(engine);
    }
    tp_heap_close(engine->private);
    free(engine);
}

const tp_stage_ops *
tp_engine_stage_ops(const tp_engine *engine)
{
    return engine->config.provider->stage;
}

tp_stage *
tp_engine_stage(tp_engine *engine, int i, int *virtual_stage)
{
    for (int stage = 0; engine->durations == NULL && stage < engine->config.program->stages; stage++)
        if (engine->stage[stage] != NULL && i-- == 0) {
            *virtual_stage = stage;
            return engine->stage[stage];
        }
    return NULL;
}
