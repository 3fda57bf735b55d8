/* Sums of gradients beside the work: a thread of the rank adds up a stage's blocks with their twins as soon as each has gone back for
 * the last time, while the rank goes on with other blocks and stages (as Li et al., "PyTorch Distributed", VLDB 2020, and Megatron-LM's
 * overlap-grad-reduce do with buckets). What an embedding and a head have is complete with the step alone (a tied weight has two
 * ends), and comes last. All twins run the same program, so they sum in the same order, and no two wait for each other. */
#include "csrc/engine/helper.h"
#include "csrc/engine/internal.h"

#include <stdlib.h>

#include "csrc/base/fpu.h"

typedef struct {
    int64_t at;    /* the instruction with which it is complete; the rank's count: with the step */
    int block;     /* of the stage, with which it is, as blocks go back from the last on */
    int stage;
    int64_t first, floats;
} piece;

struct tp_engine_summer {
    tp_comm *comm;     /* aside */
    tp_device *device; /* of one thread: the rank's own team has other work */
    piece *pieces;     /* [count] in the order in which they are complete */
    int count, next;   /* next: to be begun */
    _Atomic int halted;
    tp_engine_helper helper;
};

/* ---- what is summed when ------------------------------------------------------------------------------------------------ */

/* The last instruction that adds to weight gradients of the stage; -1: none. */
static int64_t
last_gradient(const tp_engine *engine, int stage)
{
    int64_t last = -1;
    for (int64_t i = 0; i < engine->count; i++)
        if (engine->code[i].stage == stage && (engine->code[i].op == TP_OP_B || engine->code[i].op == TP_OP_W))
            last = i;
    return last;
}

static void
add_piece(tp_engine_summer *summer, int64_t at, int block, int stage, int64_t first, int64_t end)
{
    if (end > first)
        summer->pieces[summer->count++] = (piece){at, block, stage, first, end - first};
}

/* The stage's blocks, from the last on, in pieces that are worth their messages; *low, *high: they are between these. */
static void
cut_blocks(tp_engine *engine, int stage, int64_t at, int64_t *low, int64_t *high)
{
    const tp_engine_config *config = &engine->config;
    const int part = tp_engine_part(config, stage), blocks = config->partition[part + 1] - config->partition[part];
    const int64_t worth = tp_engine_members(config) * tp_engine_message_floats(config);
    int64_t end = -1, begin = -1;
    int last = 0;
    *high = -1;
    for (int block = blocks - 1; block >= 0; block--) {
        int64_t first, floats = config->provider->stage->block_gradients(engine->stage[stage], block, &first);
        if (floats == 0)
            continue;
        *high = *high < 0 ? first + floats : *high;
        end = end < 0 ? first + floats : end;
        begin = first;
        last = block;
        if (end - begin >= worth) {
            add_piece(engine->summer, at, block, stage, begin, end);
            end = begin;
        }
    }
    add_piece(engine->summer, at, last, stage, begin, end);
    *low = begin;
}

static int
earlier(const void *a, const void *b)
{
    const piece *one = a, *other = b;
    if (one->at != other->at)
        return one->at < other->at ? -1 : 1;
    if (one->stage != other->stage)
        return one->stage > other->stage ? -1 : 1;
    return one->first > other->first ? -1 : one->first < other->first;
}

/* Replicas that shard the optimizer sum rows of a stage's shards, each with its first block. */
static void
cut_shards(tp_engine *engine, int stage, int64_t at)
{
    const tp_stage_ops *ops = engine->config.provider->stage;
    for (int row = 0; row < ops->shard_rows(engine->stage[stage]); row++) {
        tp_shard shard = ops->shard(engine->stage[stage], row, 0);
        int64_t first;
        int inner = at >= 0 && shard.block >= 0 && ops->block_gradients(engine->stage[stage], shard.block, &first) > 0;
        add_piece(engine->summer, inner ? at : engine->count, inner ? shard.block : 0, stage, shard.row, shard.row_end);
    }
}

static void
cut_stages(tp_engine *engine)
{
    tp_engine_summer *summer = engine->summer;
    for (int stage = 0; stage < engine->config.program->stages; stage++) {
        int64_t floats, low = 0, high = -1, at = engine->stage[stage] == NULL ? -1 : last_gradient(engine, stage);
        if (engine->stage[stage] == NULL)
            continue;
        if (engine->config.shards) {
            cut_shards(engine, stage, at);
            continue;
        }
        (void)engine->config.provider->stage->gradients(engine->stage[stage], &floats);
        if (at >= 0)
            cut_blocks(engine, stage, at, &low, &high);
        add_piece(summer, engine->count, 0, stage, high < 0 ? 0 : high, floats);
        add_piece(summer, engine->count, 0, stage, 0, high < 0 ? 0 : low);
    }
    qsort(summer->pieces, (size_t)summer->count, sizeof *summer->pieces, earlier);
}

/* ---- the thread ---------------------------------------------------------------------------------------------------------- */

static tp_status
sum_piece(tp_engine *engine, uint32_t number)
{
    tp_engine_summer *summer = engine->summer;
    const piece *it = &summer->pieces[number];
    if (tp_engine_helper_has_failed(&summer->helper)) /* its twins are elsewhere */
        return TP_OK;
    uint64_t before = tp_fpu_flush_subnormals();
    tp_status status = tp_engine_sum_some(engine, summer->comm, summer->device, it->stage, it->first, it->floats);
    tp_fpu_restore(before);
    return status;
}

/* Two copies of the model sum with ranks that they have other messages with; a device that is no host's memory in its own order. */
static int
can_sum_beside(const tp_engine *engine)
{
    const tp_engine_config *config = &engine->config;
    return config->sums_beside && tp_engine_members(config) > 1 && config->program->copies == 1 && engine->updates == 0 && engine->staged == NULL &&
           config->provider->host_memory && config->provider->stage->block_gradients != NULL &&
           config->provider->stage->backward_block != NULL && config->comm->ops->aside != NULL;
}

tp_status
tp_engine_open_summer(tp_engine *engine)
{
    const tp_engine_config *config = &engine->config;
    if (!can_sum_beside(engine))
        return TP_OK;
    tp_engine_summer *summer = calloc(1, sizeof *summer);
    if (summer == NULL)
        return tp_fail(TP_EMEMORY, "no memory for sums beside the work");
    engine->summer = summer;
    summer->pieces = calloc((size_t)tp_model_blocks(&config->model) + 2 * (size_t)config->program->stages, sizeof *summer->pieces);
    if (summer->pieces == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the sums of %d blocks", tp_model_blocks(&config->model));
    cut_stages(engine);
    tp_device_config alone = config->device;
    alone.threads = 1;
    TP_TRY(config->provider->device->open(&alone, engine->account, &summer->device));
    TP_TRY(config->comm->ops->aside(config->comm, &summer->halted, &summer->comm));
    return tp_engine_helper_open(&summer->helper, engine, "tp-summer", "adds up gradients", sum_piece);
}

void
tp_engine_close_summer(tp_engine *engine)
{
    tp_engine_summer *summer = engine->summer;
    if (summer == NULL)
        return;
    tp_engine_halt_sums(engine);
    tp_engine_helper_close(&summer->helper);
    if (summer->comm != NULL)
        summer->comm->ops->close(summer->comm);
    if (summer->device != NULL)
        summer->device->ops->close(summer->device);
    free(summer->pieces);
    free(summer);
    engine->summer = NULL;
}

tp_status
tp_engine_begin_sums(tp_engine *engine)
{
    if (engine->summer == NULL)
        return TP_OK;
    engine->summer->next = 0;
    return tp_engine_helper_begin_step(&engine->summer->helper);
}

int
tp_engine_sums_within(const tp_engine *engine, int64_t i)
{
    const tp_engine_summer *summer = engine->summer;
    return summer != NULL && engine->code[i].op == TP_OP_B && engine->code[i].slice == 0 && summer->next < summer->count &&
           summer->pieces[summer->next].at == i;
}

void
tp_engine_went_back(tp_engine *engine, int64_t i, int block)
{
    tp_engine_summer *summer = engine->summer;
    for (; summer != NULL && summer->next < summer->count; summer->next++) {
        const piece *next = &summer->pieces[summer->next];
        if (next->at > i || (next->at == i && next->block < block))
            return;
        tp_engine_helper_go(&summer->helper);
    }
}

tp_status
tp_engine_end_sums(tp_engine *engine)
{
    tp_engine_went_back(engine, engine->count, 0);
    return tp_engine_helper_wait(&engine->summer->helper, (uint32_t)engine->summer->count);
}

void
tp_engine_halt_sums(tp_engine *engine)
{
    tp_engine_summer *summer = engine->summer;
    if (summer == NULL || !summer->helper.running || tp_engine_helper_rests(&summer->helper))
        return;
    atomic_store(&summer->halted, 1);
    tp_engine_helper_rest(&summer->helper);
}
