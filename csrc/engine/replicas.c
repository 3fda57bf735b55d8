/* Data parallelism: the same program in several copies, each on its own sequences, whose gradients are added once a step.
 *
 * All pairs of twins (the same rank of two replicas) exchange parts: first each gets its own part from everybody and adds it up,
 * then each gives the sum to everybody. It moves as many bytes as a ring's reduce-scatter and all-gather (Patarasu & Yuan 2009), in
 * as many messages; but every element is added in ascending order of replicas wherever it lies, which no ring does, so that the bits
 * do not depend on how stages cut the model. */
#include "csrc/engine/internal.h"

#include <string.h>

#include "csrc/base/clock.h"

tp_status
tp_engine_check_replicas(const tp_engine_config *config)
{
    int replicas = tp_engine_replicas(config);
    if (config->replica < 0 || config->replica >= replicas)
        return tp_fail(TP_EVALUE, "replica is %d: 0 to %d would be right", config->replica, replicas - 1);
    if (replicas > 1 && config->provider->stage->gradient == NULL)
        return tp_fail(TP_EVALUE, "%d replicas: backend %s runs one", replicas, config->provider->name);
    return TP_OK;
}

/* Some floats of a gradient, cut into a part for each replica. */
typedef struct {
    float *data;
    int64_t floats;
    int stage; /* whose they are, for the words of an error */
} share;

static int64_t
part_begin(const share *all, int replicas, int part)
{
    return all->floats * part / replicas;
}

static int64_t
part_floats(const share *all, int replicas, int part)
{
    return part_begin(all, replicas, part + 1) - part_begin(all, replicas, part);
}

static float *
room_for(const tp_engine *engine, int replica)
{
    return engine->sums + (int64_t)(replica - (replica > engine->config.replica)) * TP_SUM_FLOATS;
}

/* With this rank's twin in another replica: gathering 0: its own part comes from there, into the room for it, and that one's goes;
 * 1: the sums of both. */
static tp_status
exchange_parts(tp_engine *engine, const share *all, int other, int gathering)
{
    tp_comm *comm = engine->config.comm;
    int replicas = engine->config.replicas, self = engine->config.replica;
    int64_t mine = part_floats(all, replicas, self), theirs = part_floats(all, replicas, other);
    float *my_part = all->data + part_begin(all, replicas, self), *their_part = all->data + part_begin(all, replicas, other);
    const float *out = gathering ? my_part : their_part;
    float *in = gathering ? their_part : room_for(engine, other);
    int64_t sent = gathering ? mine : theirs, received = gathering ? theirs : mine;
    return comm->ops->exchange(comm, other * engine->config.program->ranks + engine->config.rank,
                               tp_tag(TP_OP_OPT, (unsigned)all->stage, 0, (unsigned)gathering), out,
                               (size_t)sent * sizeof *out, in, (size_t)received * sizeof *in);
}

/* In round t replica r meets replica t - r (mod replicas): every pair once, and never two at a time. */
static tp_status
meet_everybody(tp_engine *engine, const share *all, int gathering)
{
    int replicas = engine->config.replicas, self = engine->config.replica;
    for (int round = 0; round < replicas; round++) {
        int other = (round - self + replicas) % replicas;
        if (other != self)
            TP_TRY(exchange_parts(engine, all, other, gathering));
    }
    return TP_OK;
}

static void
add(float *restrict to, const float *restrict from, int64_t floats)
{
    for (int64_t i = 0; i < floats; i++)
        to[i] += from[i];
}

/* This replica's part of all replicas, in ascending order of these. */
static void
add_up(tp_engine *engine, const share *all)
{
    int replicas = engine->config.replicas, self = engine->config.replica;
    int64_t floats = part_floats(all, replicas, self);
    float *own = all->data + part_begin(all, replicas, self), *sum = self == 0 ? own : room_for(engine, 0);
    for (int replica = 1; replica < replicas; replica++)
        add(sum, replica == self ? own : room_for(engine, replica), floats);
    if (sum != own)
        memcpy(own, sum, (size_t)floats * sizeof *own);
}

static tp_status
sum_tensor(tp_engine *engine, int stage, float *gradient, int64_t floats)
{
    int64_t most = (int64_t)engine->config.replicas * TP_SUM_FLOATS;
    for (int64_t begin = 0; begin < floats; begin += most) {
        share all = {gradient + begin, floats - begin < most ? floats - begin : most, stage};
        TP_TRY(meet_everybody(engine, &all, 0));
        add_up(engine, &all);
        TP_TRY(meet_everybody(engine, &all, 1));
    }
    return TP_OK;
}

/* The simulator lets the first OPT begin when all ranks have come to it, and so do we. */
static tp_status
wait_for_all(tp_engine *engine, int64_t *waited_ns)
{
    tp_comm *comm = engine->config.comm;
    int64_t before = tp_clock_ns();
    TP_TRY(comm->ops->allgather(comm, engine->gather, sizeof *engine->gather, engine->gather + engine->gather_count));
    *waited_ns = tp_clock_ns() - before;
    return TP_OK;
}

tp_status
tp_engine_sum_replicas(tp_engine *engine, int64_t *waited_ns)
{
    const tp_stage_ops *ops = engine->config.provider->stage;
    *waited_ns = 0;
    if (tp_engine_replicas(&engine->config) == 1)
        return TP_OK;
    TP_TRY(wait_for_all(engine, waited_ns));
    for (int stage = 0; stage < engine->config.program->stages; stage++)
        for (int i = 0; engine->stage[stage] != NULL && i < ops->params(engine->stage[stage]); i++) {
            int64_t floats;
            float *gradient = ops->gradient(engine->stage[stage], i, &floats);
            TP_TRY(sum_tensor(engine, stage, gradient, floats));
        }
    return TP_OK;
}
