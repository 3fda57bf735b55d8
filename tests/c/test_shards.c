/* Sharded moments: the members' parts of every row are all of it and no more, are cut where sums of squares have their leaves, and have
 * places of their own; and stages that have a part each measure, update and import, together, what one that has all does, bit for bit. */
#include "csrc/stage/stage.h"

#include <stdlib.h>
#include <string.h>

#include "tests/c/check.h"
#include "tests/c/drawn.h"

enum { MOST = 9 };

typedef struct {
    tp_stage_config config; /* of no shards */
    tp_slicing *slicing;
    tp_heap *heap;
    tp_device *device;
    tp_stage *whole, *part[MOST];
} job;

static void
draw(job *j)
{
    static const int widths[] = {8, 24, 40, 64, 136};
    const int32_t one = 1, length = 8;
    j->config.model = (tp_model){.n_layer = drawn(1, 3), .n_head = 2, .n_embd = widths[drawn(0, 4)], .vocab_size = drawn(5, 2000),
                                 .block_size = 8, .bias = drawn(0, 1), .tie_weights = drawn(0, 1)};
    int blocks = tp_model_blocks(&j->config.model);
    j->config.first_block = drawn(0, 2) ? 0 : drawn(0, blocks - 1);
    j->config.last_block = drawn(0, 2) ? blocks : drawn(j->config.first_block + 1, blocks);
    j->config.activation_slots = j->config.gradient_slots = 1;
    j->config.replicas = drawn(2, MOST);
    MUST(tp_slicing_open(8, 1, 1, &one, &one, &length, &j->slicing) == TP_OK);
    j->config.slicing = j->slicing;
}

static void
open_all(job *j)
{
    const tp_provider *cpu = tp_cpu_provider();
    const tp_device_config threads = {.threads = 1 + drawn(0, 1)};
    MUST(tp_heap_open(0, &j->heap) == TP_OK);
    MUST(cpu->device->open(&threads, j->heap, &j->device) == TP_OK);
    MUST(cpu->stage->open(&j->config, j->device, &j->whole) == TP_OK);
    for (int m = 0; m < j->config.replicas; m++) {
        tp_stage_config config = j->config;
        config.shards = 1;
        config.member = m;
        MUST(cpu->stage->open(&config, j->device, &j->part[m]) == TP_OK);
    }
}

static void
close_all(job *j)
{
    for (int m = 0; m < j->config.replicas; m++)
        tp_cpu_stage_ops.close(j->part[m]);
    tp_cpu_stage_ops.close(j->whole);
    j->device->ops->close(j->device);
    CHECK(tp_heap_bytes(j->heap) == 0);
    tp_heap_close(j->heap);
    tp_slicing_close(j->slicing);
}

static int
is_cut(const tp_stage_base *base, int64_t at, int64_t end)
{
    int cut = at == end;
    for (int i = 0; i < base->params; i++) {
        const tp_stage_param *param = &base->param[i];
        cut |= param->grad != NULL && at >= param->grad_at && at < param->grad_at + param->floats &&
               (at - param->grad_at) % TP_SUMSQ_LEAF == 0;
    }
    return cut;
}

/* Every float of every tensor has one member. */
static void
check_parts(const job *j)
{
    const tp_stage_base *base = &j->part[0]->base;
    int rows = tp_cpu_stage_ops.shard_rows(j->part[0]), members = j->config.replicas;
    int64_t all, covered = 0, end = 0;
    tp_cpu_stage_ops.gradients(j->part[0], &all);
    for (int row = 0; row < rows; row++) {
        int64_t floats = 0, begin = 0;
        for (int m = 0; m < members; m++) {
            tp_shard one = tp_cpu_stage_ops.shard(j->part[0], row, m);
            begin = one.row;
            end = one.row_end > end ? one.row_end : end;
            floats += one.floats;
            CHECK(one.first >= one.row && one.first + one.floats <= one.row_end);
            CHECK(is_cut(base, one.first, one.row_end));
            for (int k = 0; k < members; k++) {
                tp_shard other = tp_cpu_stage_ops.shard(j->part[0], row, k);
                CHECK(k == m || one.first >= other.first + other.floats || other.first >= one.first + one.floats);
            }
        }
        tp_shard any = tp_cpu_stage_ops.shard(j->part[0], row, 0);
        CHECK(floats == any.row_end - any.row && (floats == 0 || begin >= covered));
        covered = floats > 0 ? any.row_end : covered;
    }
    CHECK(end == all);
}

static void
check_places(const job *j)
{
    for (int m = 0; m < j->config.replicas; m++) {
        const tp_stage_base *base = &j->part[m]->base;
        int64_t last = 0, room = base->moments[1] - base->moments[0];
        for (int i = 0; i < base->params; i++) {
            tp_shard_part part = tp_stage_shard_part(base, i);
            CHECK(part.floats == 0 || (part.at >= last && part.begin + part.floats <= base->param[i].floats));
            last = part.floats == 0 ? last : part.at + part.floats;
        }
        CHECK(last <= room);
    }
}

static void
fill(job *j)
{
    int64_t floats;
    float *all = tp_cpu_stage_ops.gradients(j->whole, &floats);
    memset(all, 0, (size_t)floats * sizeof *all); /* what stands between tensors means nothing */
    for (int i = 0; i < j->whole->base.params; i++) {
        tp_stage_param *param = &j->whole->base.param[i];
        for (int64_t k = 0; param->grad != NULL && k < param->floats; k++) {
            param->grad[k] = (float)drawn(-1000, 1000) / 999;
            param->value[k] = (float)drawn(-1000, 1000) / 997;
        }
        for (int m = 0; m < j->config.replicas; m++)
            memcpy(j->part[m]->base.param[i].value, param->value, (size_t)param->floats * sizeof(float));
    }
    for (int m = 0; m < j->config.replicas; m++)
        memcpy(tp_cpu_stage_ops.gradients(j->part[m], &floats), all, (size_t)floats * sizeof *all);
}

/* As the engine does by messages: every member's shard of an array to all. */
static void
gather(const job *j, float *(*array)(tp_stage *))
{
    for (int row = 0; row < tp_cpu_stage_ops.shard_rows(j->part[0]); row++)
        for (int from = 0; from < j->config.replicas; from++) {
            tp_shard shard = tp_cpu_stage_ops.shard(j->part[0], row, from);
            for (int to = 0; to < j->config.replicas; to++)
                memmove(array(j->part[to]) + shard.first, array(j->part[from]) + shard.first, (size_t)shard.floats * sizeof(float));
        }
}

static float *
gradients(tp_stage *stage)
{
    int64_t floats;
    return tp_cpu_stage_ops.gradients(stage, &floats);
}

static void
check_squares(const job *j)
{
    double wanted[64] = {0}, found[64];
    int64_t each;
    MUST(tp_model_params(&j->config.model) <= 64);
    CHECK(tp_cpu_stage_ops.sumsq(j->whole, wanted) == TP_OK);
    for (int m = 0; m < j->config.replicas; m++)
        CHECK(tp_cpu_stage_ops.measure(j->part[m]) == TP_OK);
    for (int to = 0; to < j->config.replicas; to++) {
        double *room = tp_cpu_stage_ops.squares(j->part[to], &each);
        for (int from = 0; from < j->config.replicas; from++)
            memmove(room + from * each, tp_cpu_stage_ops.squares(j->part[from], &each) + from * each, (size_t)each * sizeof *room);
        memset(found, 0, sizeof found);
        CHECK(tp_cpu_stage_ops.sumsq(j->part[to], found) == TP_OK);
        CHECK(memcmp(found, wanted, sizeof found) == 0);
    }
}

static int
is_same(const job *j, int m, int i, tp_state of, tp_state in)
{
    const tp_stage_param *param = &j->whole->base.param[i];
    size_t bytes = (size_t)(param->info.rows * param->info.cols) * sizeof(float);
    float *one = malloc(bytes), *other = malloc(bytes);
    MUST(one != NULL && other != NULL);
    int same = tp_cpu_stage_ops.export(j->whole, i, of, one) == TP_OK && tp_cpu_stage_ops.export(j->part[m], i, in, other) == TP_OK &&
               memcmp(one, other, bytes) == 0;
    free(one);
    free(other);
    return same;
}

/* Values, and moments that are gathered where gradients were. */
static void
check_states(const job *j)
{
    static const tp_state moments[] = {TP_STATE_M, TP_STATE_V};
    for (int i = 0; i < j->whole->base.params; i++)
        for (int m = 0; m < j->config.replicas; m++)
            CHECK(is_same(j, m, i, TP_STATE_VALUE, TP_STATE_VALUE));
    for (int k = 0; k < 2; k++) {
        for (int m = 0; m < j->config.replicas; m++)
            CHECK(tp_cpu_stage_ops.spread(j->part[m], moments[k]) == TP_OK);
        gather(j, gradients);
        for (int i = 0; i < j->whole->base.params; i++)
            for (int m = 0; j->whole->base.param[i].grad != NULL && m < j->config.replicas; m++) {
                float none;
                CHECK(is_same(j, m, i, moments[k], TP_STATE_GRAD));
                CHECK(tp_cpu_stage_ops.export(j->part[m], i, moments[k], &none) == TP_EVALUE);
            }
    }
}

static void
check_updates(job *j)
{
    for (int step = 1; step <= 2; step++) {
        const tp_adamw adamw = {.lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .step = step};
        fill(j);
        check_squares(j);
        CHECK(tp_cpu_stage_ops.update(j->whole, &adamw, 0.7) == TP_OK);
        for (int m = 0; m < j->config.replicas; m++)
            CHECK(tp_cpu_stage_ops.update(j->part[m], &adamw, 0.7) == TP_OK);
        gather(j, tp_cpu_stage_ops.values);
    }
    check_states(j);
}

/* Whole moments that are imported everywhere, as of a checkpoint. */
static void
check_imports(job *j)
{
    static const tp_state moments[] = {TP_STATE_M, TP_STATE_V};
    for (int i = 0; i < j->whole->base.params; i++) {
        const tp_stage_param *param = &j->whole->base.param[i];
        int64_t count = param->info.rows * param->info.cols;
        float *random = malloc((size_t)count * sizeof *random);
        MUST(random != NULL);
        for (int k = 0; param->grad != NULL && k < 2; k++) {
            for (int64_t n = 0; n < count; n++)
                random[n] = (float)drawn(0, 1000) / 991;
            CHECK(tp_cpu_stage_ops.import(j->whole, i, moments[k], random) == TP_OK);
            for (int m = 0; m < j->config.replicas; m++)
                CHECK(tp_cpu_stage_ops.import(j->part[m], i, moments[k], random) == TP_OK);
        }
        free(random);
    }
    check_states(j);
}

int
main(void)
{
    for (uint32_t seed = 0; seed < 40; seed++) {
        job j = {0};
        state = seed;
        draw(&j);
        open_all(&j);
        check_parts(&j);
        check_places(&j);
        check_updates(&j);
        check_imports(&j);
        close_all(&j);
    }
    return failures != 0;
}
