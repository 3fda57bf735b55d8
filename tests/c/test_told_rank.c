/* A rank told to stop at its first question, its second, ..: opening, making parameters and a step of it end with EABORTED, nothing is
 * lost (under a sanitizer), and what is not told gives the bits that it gave before. */
#include "csrc/base/deadline.h"
#include "csrc/base/rng.h"
#include "csrc/engine/engine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/c/check.h"

enum { SEQ = 1600, BLOCKS = 6 };

static const tp_model model = {
    .n_layer = 2, .n_head = 2, .n_embd = 16, .vocab_size = 61, .block_size = SEQ, .bias = 1, .tie_weights = 1};

typedef struct {
    int64_t asked, at;
    tp_region *aborts; /* before it says so; NULL: it says so and nothing else */
} ear;

static int
heard(void *context)
{
    ear *e = context;
    if (++e->asked == e->at && e->aborts != NULL)
        tp_region_abort(e->aborts, TP_EIO, 3, "the disk of rank 3 is full");
    return e->asked >= e->at;
}

typedef struct {
    tp_program *program;
    tp_slicing *slicing;
    int32_t partition[2], tokens[SEQ + 1];
    tp_region *region;
} rank;

static int64_t opened, ready; /* questions by when the engine was there, and by when it had its parameters, packed */

static tp_status
train(const rank *r, tp_engine *engine, const ear *e, double loss[2])
{
    const tp_stage_ops *ops = tp_engine_stage_ops(engine);
    int number;
    tp_stage *stage = tp_engine_stage(engine, 0, &number);
    for (int i = 0; i < ops->params(stage); i++) {
        tp_param param;
        tp_model_param(&model, ops->param_index(stage, i), &param);
        float *values = calloc((size_t)(param.rows * param.cols), sizeof *values);
        MUST(values != NULL);
        tp_model_init_param(&model, &param, 11, values);
        tp_status status = tp_deadline_check_told();
        if (status == TP_OK)
            status = ops->import(stage, i, TP_STATE_VALUE, values);
        free(values);
        TP_TRY(status);
    }
    TP_TRY(ops->pack(stage));
    ready = e->asked;
    tp_step_options options = {.adamw = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .step = 1}, .update = 1};
    tp_step_result result;
    TP_TRY(tp_engine_step(engine, r->tokens, &options, &result));
    loss[0] = result.loss;
    return tp_engine_evaluate(engine, r->tokens, &loss[1]);
}

static tp_status
run(const rank *r, ear *e, double loss[2])
{
    tp_engine_config config = {.program = r->program, .model = model, .slicing = r->slicing, .partition = r->partition,
                               .provider = tp_cpu_provider(), .device = {.threads = 1}, .region = r->region};
    tp_heap *heap;
    tp_engine *engine = NULL;
    tp_listener none;
    MUST(tp_heap_open(0, &heap) == TP_OK);
    tp_deadline_listen(heard, e, &none);
    tp_status status = tp_engine_open(&config, heap, &engine);
    opened = e->asked;
    ready = INT64_MAX;
    if (status == TP_OK)
        status = train(r, engine, e, loss);
    tp_deadline_unlisten(&none);
    tp_engine_close(engine);
    MUST(tp_heap_bytes(heap) == 0);
    tp_heap_close(heap);
    return status;
}

static tp_region *
open_region(void)
{
    const uint8_t pairs[16] = {0};
    const tp_region_shape shape = {.ranks = 4, .pairs = pairs, .ring_bytes = 64, .max_gather_bytes = 64};
    size_t bytes;
    void *memory;
    tp_region *region;
    MUST(tp_region_bytes(&shape, &bytes) == TP_OK && tp_local_create(bytes, &memory) == TP_OK);
    MUST(tp_region_create(memory, bytes, &shape, &region) == TP_OK);
    return region;
}

int
main(void)
{
    static const int32_t one = 1, length = SEQ;
    rank r = {.partition = {0, BLOCKS}};
    tp_program *built;
    MUST(tp_model_blocks(&model) == BLOCKS);
    MUST(tp_slicing_open(SEQ, 1, 1, &one, &one, &length, &r.slicing) == TP_OK);
    MUST(tp_program_build(TP_GPIPE, 1, 1, 1, &one, &built) == TP_OK);
    MUST(tp_program_lower(built, 1, &r.program) == TP_OK);
    for (int i = 0; i <= SEQ; i++)
        r.tokens[i] = i * 7 % 61;
    tp_deadline_steps = 1;
    tp_deadline_listen_ns = 0;
    double whole[2], part[2];
    int while_opening = 0;
    ear never = {.at = INT64_MAX};
    MUST(run(&r, &never, whole) == TP_OK);
    /* a question a piece of memory; then one a block in F, B and evaluation, and in the head one a tile of 256 rows and product */
    CHECK(opened > 0 && ready > opened && never.asked - ready > 3 * BLOCKS + 3 * (SEQ / 256));
    for (int64_t at = 1, last = never.asked, made = ready; at <= last; at += at < made ? 1 + at / 50 : 1) {
        ear e = {.at = at};
        r.region = at % 2 ? open_region() : NULL;
        e.aborts = r.region;
        CHECK(run(&r, &e, part) == TP_EABORTED && e.asked == at);
        int words = strstr(tp_error_message(), at % 2 ? "the disk of rank 3 is full" : "interrupted") != NULL;
        while_opening += at % 2 && opened == at && words;
        CHECK(words || ready >= at); /* what proves a program, and makes parameters, knows of no region */
        r.region = NULL;
    }
    CHECK(while_opening > 0);
    MUST(run(&r, &never, part) == TP_OK);
    CHECK(memcmp(whole, part, sizeof whole) == 0);
    tp_program_close(built);
    tp_program_close(r.program);
    tp_slicing_close(r.slicing);
    return failures != 0;
}
