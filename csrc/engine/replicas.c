/* Data parallelism: the same program in several copies, each on its own sequences, whose gradients are added once a step. A program
 * that has two copies of the model (Chimera) counts as two: the members of a sum are the copies of a stage, replica after replica.
 *
 * All pairs of twins (the same rank of two replicas) exchange parts: first each gets its own part from everybody and adds it up,
 * then each gives the sum to everybody. It moves as many bytes as a ring's reduce-scatter and all-gather (Patarasu & Yuan 2009), in
 * as many messages; but every element is added in ascending order of replicas wherever it lies, which no ring does, so that the bits
 * do not depend on how stages cut the model. */
#include "csrc/engine/internal.h"

#include "csrc/base/clock.h"

#define LINE 64 /* floats */

tp_status
tp_engine_check_shards(const tp_engine_config *config)
{
    if (config->shards && config->provider->stage->shard == NULL)
        return tp_fail(TP_EVALUE, "backend %s keeps all of AdamW's moments on every replica: shards 0 would be right", config->provider->name);
    if (config->shards && tp_engine_updates(config))
        return tp_fail(TP_EVALUE, "the program updates by micro-batches (U), and replicas of it do not add up: shards 0 would be right");
    return TP_OK;
}

tp_status
tp_engine_check_replicas(const tp_engine_config *config)
{
    int replicas = tp_engine_replicas(config), members = tp_engine_members(config);
    if (config->replica < 0 || config->replica >= replicas)
        return tp_fail(TP_EVALUE, "replica is %d: 0 to %d would be right", config->replica, replicas - 1);
    const tp_provider *provider = config->provider;
    if (members > 1 && (provider->stage->gradients == NULL || provider->device->add == NULL))
        return tp_fail(TP_EVALUE, "%d replicas: backend %s runs one", members, provider->name);
    return tp_engine_check_shards(config);
}

int64_t
tp_engine_message_floats(const tp_engine_config *config)
{
    const tp_device_ops *device = config->provider->device;
    int64_t others = tp_engine_members(config) - 1, each = others > 0 ? device->waiting_floats / others / LINE * LINE : 0;
    each = each < LINE ? LINE : each;
    return each < device->message_floats ? each : device->message_floats;
}

size_t
tp_engine_sums_bytes(const tp_engine_config *config)
{
    return (size_t)(tp_engine_members(config) - 1) * (size_t)tp_engine_message_floats(config) * sizeof(float);
}

/* Some floats, of which each member has a part; and by whom they are exchanged. */
typedef struct share share;
struct share {
    tp_comm *comm;
    tp_device *device;
    float *data;
    int part;          /* the stage as its copy counts it */
    int members, self; /* this rank's member */
    void (*find)(const share *all, int member, int64_t *begin, int64_t *floats);
    int64_t floats;    /* even parts: of all; rows: of each */
    const tp_stage_ops *ops; /* parts of a row of shards, of which so many floats from `from` on: */
    const tp_stage *stage;
    int row;
    int64_t from, most;
};

/* At a multiple of LINE, so that no part begins between what kernels and copies read at once. */
static int64_t
even_begin(const share *all, int member)
{
    int64_t lines = (all->floats + LINE - 1) / LINE, begin = lines * member / all->members * LINE;
    return begin < all->floats ? begin : all->floats;
}

static void
find_even(const share *all, int member, int64_t *begin, int64_t *floats)
{
    *begin = even_begin(all, member);
    *floats = even_begin(all, member + 1) - *begin;
}

static void
find_shard(const share *all, int member, int64_t *begin, int64_t *floats)
{
    tp_shard shard = all->ops->shard(all->stage, all->row, member);
    int64_t left = shard.floats - all->from;
    *begin = shard.first + all->from;
    *floats = left < 0 ? 0 : left < all->most ? left : all->most;
}

static void
find_row(const share *all, int member, int64_t *begin, int64_t *floats)
{
    *begin = member * all->floats;
    *floats = all->floats;
}

static float *
room_for(const tp_engine *engine, const share *all, int member)
{
    int64_t before = member - (member > all->self);
    return engine->sums + before * tp_engine_message_floats(&engine->config);
}

/* As the communicator counts. */
static int
rank_of_member(const tp_engine *engine, const share *all, int member)
{
    const tp_program *program = engine->config.program;
    int stage = member % program->copies * tp_program_copy_stages(program) + all->part;
    return member / program->copies * program->ranks + program->rank_of[stage];
}

/* With this rank's twin, who has the other member: gathering 0: its own part comes from there, into the room for it, and that one's goes;
 * 1: both parts are done, and are given. */
static tp_status
exchange_parts(tp_engine *engine, const share *all, int other, int gathering)
{
    tp_comm *comm = all->comm;
    int64_t my_begin, mine, their_begin, theirs;
    all->find(all, all->self, &my_begin, &mine);
    all->find(all, other, &their_begin, &theirs);
    float *my_part = all->data + my_begin, *their_part = all->data + their_begin;
    const float *out = gathering ? my_part : their_part;
    float *in = gathering ? their_part : room_for(engine, all, other);
    int64_t sent = gathering ? mine : theirs, received = gathering ? theirs : mine;
    return comm->ops->exchange(comm, rank_of_member(engine, all, other),
                               tp_tag(TP_OP_OPT, (unsigned)all->part, 0, (unsigned)gathering), out,
                               (size_t)sent * sizeof *out, in, (size_t)received * sizeof *in);
}

/* In round t member r meets member t - r (mod members): every pair once, and never two at a time. */
static tp_status
meet_everybody(tp_engine *engine, const share *all, int gathering)
{
    for (int round = 0; round < all->members; round++) {
        int other = (round - all->self + all->members) % all->members;
        if (other != all->self)
            TP_TRY(exchange_parts(engine, all, other, gathering));
    }
    return TP_OK;
}

/* This member's part of all members, in ascending order of these. */
static tp_status
add_up(tp_engine *engine, const share *all)
{
    tp_device *device = all->device;
    int64_t begin, floats;
    all->find(all, all->self, &begin, &floats);
    float *own = all->data + begin, *sum = all->self == 0 ? own : room_for(engine, all, 0);
    for (int member = 1; floats > 0 && member < all->members; member++)
        TP_TRY(device->ops->add(device, sum, member == all->self ? own : room_for(engine, all, member), floats));
    return sum == own || floats == 0 ? TP_OK : device->ops->copy(device, own, sum, (size_t)floats * sizeof *own);
}

static share
share_of(const tp_engine *engine, tp_comm *comm, tp_device *device, int stage, float *data)
{
    const tp_engine_config *config = &engine->config;
    return (share){.comm = comm,
                   .device = device,
                   .data = data,
                   .part = tp_engine_part(config, stage),
                   .members = tp_engine_members(config),
                   .self = tp_engine_member(config, stage),
                   .ops = config->provider->stage,
                   .stage = engine->stage[stage],
                   .most = tp_engine_message_floats(config)};
}

/* What a row of shards has of each member: summed for who has it (gathering 0), or given by it. Message by message. */
static tp_status
pass_row(tp_engine *engine, share *all, int row, int gathering)
{
    int64_t most = 0;
    all->find = find_shard;
    all->row = row;
    for (int member = 0; member < all->members; member++) {
        tp_shard shard = all->ops->shard(all->stage, row, member);
        most = shard.floats > most ? shard.floats : most;
    }
    for (all->from = 0; all->from < most; all->from += all->most) {
        TP_TRY(meet_everybody(engine, all, gathering));
        if (!gathering)
            TP_TRY(add_up(engine, all));
    }
    return TP_OK;
}

/* Rows within floats [from, end). */
static tp_status
sum_shards(tp_engine *engine, share *all, int64_t from, int64_t end)
{
    int rows = all->ops->shard_rows(all->stage);
    for (int row = 0; row < rows; row++) {
        tp_shard shard = all->ops->shard(all->stage, row, all->self);
        if (shard.row >= from && shard.row_end <= end)
            TP_TRY(pass_row(engine, all, row, 0));
    }
    return TP_OK;
}

tp_status
tp_engine_sum_some(tp_engine *engine, tp_comm *comm, tp_device *device, int stage, int64_t from, int64_t count)
{
    const tp_engine_config *config = &engine->config;
    int64_t floats, end = from + count;
    float *gradients = config->provider->stage->gradients(engine->stage[stage], &floats);
    share all = share_of(engine, comm, device, stage, gradients);
    if (config->shards)
        return sum_shards(engine, &all, from, end);
    const int64_t most = all.members * all.most;
    all.find = find_even;
    for (int64_t begin = from; begin < end; begin += most) {
        all.data = gradients + begin;
        all.floats = end - begin < most ? end - begin : most;
        TP_TRY(meet_everybody(engine, &all, 0));
        TP_TRY(add_up(engine, &all));
        TP_TRY(meet_everybody(engine, &all, 1));
    }
    return TP_OK;
}

static tp_status
sum_stage(tp_engine *engine, int stage)
{
    int64_t floats;
    (void)engine->config.provider->stage->gradients(engine->stage[stage], &floats);
    return tp_engine_sum_some(engine, engine->config.comm, engine->device, stage, 0, floats);
}

/* A rank's stages part by part: one that has two stages has one of each copy, and so do all that it meets, who must be at the same one. */
static tp_status
each_part(tp_engine *engine, tp_status (*work)(tp_engine *engine, int stage))
{
    const tp_program *program = engine->config.program;
    int each = tp_program_copy_stages(program);
    for (int part = 0; part < each; part++)
        for (int stage = part; stage < program->stages; stage += each)
            if (engine->stage[stage] != NULL)
                TP_TRY(work(engine, stage));
    return TP_OK;
}

tp_status
tp_engine_sum_replicas(tp_engine *engine, int64_t *waited_ns)
{
    *waited_ns = 0;
    if (tp_engine_members(&engine->config) == 1)
        return TP_OK;
    TP_TRY(engine->device->ops->settle(engine->device));
    int64_t before = tp_clock_ns();
    if (engine->summer != NULL) {
        TP_TRY(tp_engine_end_sums(engine));
        *waited_ns = tp_clock_ns() - before;
        return TP_OK;
    }
    /* Only its twins must have come, as in the simulator: late stages are done first, and have summed before the first one is. */
    TP_TRY(each_part(engine, sum_stage));
    TP_TRY(engine->device->ops->settle(engine->device));
    *waited_ns = tp_clock_ns() - before;
    return TP_OK;
}

/* ---- shards ------------------------------------------------------------------------------------------------------------ */

/* All members' shards of an array that lies as the stage's gradients do. */
static tp_status
gather_array(tp_engine *engine, int stage, float *data)
{
    share all = share_of(engine, engine->config.comm, engine->device, stage, data);
    int rows = all.ops->shard_rows(all.stage);
    for (int row = 0; row < rows; row++)
        TP_TRY(pass_row(engine, &all, row, 1));
    return TP_OK;
}

static tp_status
gather_gradients(tp_engine *engine, int stage)
{
    int64_t floats;
    return gather_array(engine, stage, engine->config.provider->stage->gradients(engine->stage[stage], &floats));
}

static tp_status
gather_values(tp_engine *engine, int stage)
{
    return gather_array(engine, stage, engine->config.provider->stage->values(engine->stage[stage]));
}

static tp_status
gather_squares(tp_engine *engine, int stage)
{
    int64_t each;
    double *squares = engine->config.provider->stage->squares(engine->stage[stage], &each);
    share all = share_of(engine, engine->config.comm, engine->device, stage, (float *)(void *)squares);
    all.find = find_row;
    all.floats = each * (int64_t)(sizeof *squares / sizeof(float));
    return meet_everybody(engine, &all, 1);
}

tp_status
tp_engine_gather(tp_engine *engine, tp_engine_gathered what, int64_t *waited_ns)
{
    static tp_status (*const gather[])(tp_engine *, int) = {gather_gradients, gather_values, gather_squares};
    if (!engine->config.shards)
        return TP_OK;
    TP_TRY(engine->device->ops->settle(engine->device));
    int64_t before = tp_clock_ns();
    TP_TRY(each_part(engine, gather[what]));
    TP_TRY(engine->device->ops->settle(engine->device));
    *waited_ns += tp_clock_ns() - before;
    return TP_OK;
}

tp_status
tp_engine_gather_moments(tp_engine *engine, tp_state state)
{
    const tp_stage_ops *ops = engine->config.provider->stage;
    int64_t waited_ns = 0;
    if (!engine->config.shards)
        return tp_fail(TP_EVALUE, "moments are not sharded: each replica has all of its stages', which export gives");
    for (int stage = 0; stage < engine->config.program->stages; stage++)
        if (engine->stage[stage] != NULL)
            TP_TRY(ops->spread(engine->stage[stage], state));
    return tp_engine_fail(engine, tp_engine_gather(engine, TP_GATHER_GRADIENTS, &waited_ns));
}
