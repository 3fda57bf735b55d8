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
tp_engine_check_replicas(const tp_engine_config *config)
{
    int replicas = tp_engine_replicas(config), members = tp_engine_members(config);
    if (config->replica < 0 || config->replica >= replicas)
        return tp_fail(TP_EVALUE, "replica is %d: 0 to %d would be right", config->replica, replicas - 1);
    const tp_provider *provider = config->provider;
    if (members > 1 && (provider->stage->gradients == NULL || provider->device->add == NULL))
        return tp_fail(TP_EVALUE, "%d replicas: backend %s runs one", members, provider->name);
    return TP_OK;
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

/* Some floats of a gradient, cut into a part for each member; and by whom they are summed. */
typedef struct {
    tp_comm *comm;
    tp_device *device;
    float *data;
    int64_t floats;
    int part;          /* the stage as its copy counts it */
    int members, self; /* this rank's member */
} share;

/* At a multiple of LINE, so that no part begins between what kernels and copies read at once. */
static int64_t
part_begin(const share *all, int part)
{
    int64_t lines = (all->floats + LINE - 1) / LINE, begin = lines * part / all->members * LINE;
    return begin < all->floats ? begin : all->floats;
}

static int64_t
part_floats(const share *all, int part)
{
    return part_begin(all, part + 1) - part_begin(all, part);
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
 * 1: the sums of both. */
static tp_status
exchange_parts(tp_engine *engine, const share *all, int other, int gathering)
{
    tp_comm *comm = all->comm;
    int64_t mine = part_floats(all, all->self), theirs = part_floats(all, other);
    float *my_part = all->data + part_begin(all, all->self), *their_part = all->data + part_begin(all, other);
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
    int64_t floats = part_floats(all, all->self);
    float *own = all->data + part_begin(all, all->self), *sum = all->self == 0 ? own : room_for(engine, all, 0);
    for (int member = 1; member < all->members; member++)
        TP_TRY(device->ops->add(device, sum, member == all->self ? own : room_for(engine, all, member), floats));
    return sum == own ? TP_OK : device->ops->copy(device, own, sum, (size_t)floats * sizeof *own);
}

tp_status
tp_engine_sum_some(tp_engine *engine, tp_comm *comm, tp_device *device, int stage, int64_t from, int64_t count)
{
    const tp_engine_config *config = &engine->config;
    int members = tp_engine_members(config), self = config->replica * config->program->copies + tp_engine_copy(config, stage);
    int64_t floats, most = members * tp_engine_message_floats(config), end = from + count;
    float *gradients = config->provider->stage->gradients(engine->stage[stage], &floats);
    for (int64_t begin = from; begin < end; begin += most) {
        int64_t some = end - begin < most ? end - begin : most;
        share all = {comm, device, gradients + begin, some, tp_engine_part(config, stage), members, self};
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

tp_status
tp_engine_sum_replicas(tp_engine *engine, int64_t *waited_ns)
{
    *waited_ns = 0;
    const tp_program *program = engine->config.program;
    int each = tp_program_copy_stages(program);
    if (tp_engine_members(&engine->config) == 1)
        return TP_OK;
    TP_TRY(engine->device->ops->settle(engine->device));
    int64_t before = tp_clock_ns();
    if (engine->summer != NULL) {
        TP_TRY(tp_engine_end_sums(engine));
        *waited_ns = tp_clock_ns() - before;
        return TP_OK;
    }
    /* Only its twins must have come, as in the simulator: late stages are done first, and have summed before the first one is.
     * Part by part: a rank that has two stages has one of each copy, and so do all that it meets, who must be at the
     * same one. */
    for (int part = 0; part < each; part++)
        for (int stage = part; stage < program->stages; stage += each)
            if (engine->stage[stage] != NULL)
                TP_TRY(sum_stage(engine, stage));
    TP_TRY(engine->device->ops->settle(engine->device));
    *waited_ns = tp_clock_ns() - before;
    return TP_OK;
}
