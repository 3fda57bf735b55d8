/* Weight gradients are summed in groups of TP_ROW_GROUP rows that no slicing moves: whatever the slices, the micro-batches, the
 * order of the instructions and what blocks keep, every parameter's gradient is made of the same rows in the same groups in the
 * same order. The test's own backend notes these, because the real ones sum a group as a chain and would not show a group that
 * was cut. Also: each instruction does the head's rows, and the weight gradients' rows, that csrc/cost/waits.h says. */
#include "csrc/engine/engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/rng.h"
#include "csrc/cost/waits.h"
#include "csrc/stage/stage.h"
#include "tests/c/check.h"

enum { MOST_BATCH = 4, MOST_SLICES = 9, MOST_PARAMS = 32, MOST_GROUPS = 4096, MOST_BLOCKS = 6, VOCAB = 13 };

static uint64_t seed = 1;

static int
pick(int count)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (int)((seed >> 33) % (uint64_t)count);
}

/* ---- an instruction set that notes what it is given --------------------------------------------------------------------- */

typedef struct {
    int64_t rows;
    uint64_t x, dy; /* of the bits of its rows */
} group;

/* Of one array of gradients: the groups of its products, or of its biases' sums, in the order in which they came. */
typedef struct {
    const float *grad;
    int count;
    group of[MOST_GROUPS];
} chain;

static chain chains[MOST_PARAMS];
static const tp_backend_ops *real;

/* Rows of an instruction of the stage's: F, I or W of a slice. */
typedef enum { OP_F, OP_I, OP_W, OP_NONE } phase;
static struct {
    phase op;
    int q, s;
    const float *head[2], *kept; /* d(weight) of the head, of F's rows and of I's; of an attention whose rows wait, or NULL */
    int32_t passed[OP_NONE][MOST_BATCH][MOST_SLICES], flushed[OP_NONE][MOST_BATCH][MOST_SLICES], made[MOST_BATCH][MOST_SLICES];
} did;

static chain *
chain_of(const float *grad)
{
    int i = 0;
    while (i < MOST_PARAMS && chains[i].grad != grad)
        i++;
    MUST(grad != NULL && i < MOST_PARAMS); /* of a parameter */
    return &chains[i];
}

static uint64_t
bits_of(uint64_t so_far, int64_t count, const float *values)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        so_far = (so_far ^ bits) * 1099511628211u;
    }
    return so_far;
}

static void
note(chain *at, int64_t rows, int64_t n_in, const float *x, int64_t x_stride, int64_t n_out, const float *dy, int64_t dy_stride,
     int accumulate)
{
    MUST(rows > 0 && accumulate == (at->count > 0));
    for (int64_t r = 0; r < rows; r++) {
        if (r % TP_ROW_GROUP == 0) {
            MUST(at->count < MOST_GROUPS);
            at->of[at->count++] = (group){0, 0, 0};
        }
        group *now = &at->of[at->count - 1];
        now->rows++;
        now->x = bits_of(now->x, n_in, x + r * x_stride);
        now->dy = bits_of(now->dy, n_out, dy + r * dy_stride);
    }
}

static void
noted_linear_w(tp_backend *be, int64_t rows, int64_t n_in, int64_t n_out, const float *x, int64_t x_stride, const float *dy,
               int64_t dy_stride, float *grad, int accumulate)
{
    note(chain_of(grad), rows, n_in, x, x_stride, n_out, dy, dy_stride, accumulate);
    if (did.op < OP_NONE && (grad == did.head[0] || grad == did.head[1]))
        did.flushed[did.op][did.q][did.s] += (int32_t)rows;
    if (did.op == OP_W && grad == did.kept)
        did.made[did.q][did.s] += (int32_t)rows;
    real->linear_w(be, rows, n_in, n_out, x, x_stride, dy, dy_stride, grad, accumulate);
}

static void
noted_bias_w(tp_backend *be, int64_t rows, int64_t n, const float *dy, int64_t dy_stride, float *grad, int accumulate)
{
    note(chain_of(grad), rows, 0, dy, 0, n, dy, dy_stride, accumulate);
    real->bias_w(be, rows, n, dy, dy_stride, grad, accumulate);
}

static void
noted_linear_t(tp_backend *be, const tp_linear *product)
{
    if (did.op < OP_NONE && product->n_in == VOCAB)
        did.passed[did.op][did.q][did.s] += (int32_t)product->rows;
    real->linear_t(be, product);
}

static tp_status
noted_forward(tp_stage *stage, int micro, int slice, tp_half half, int slot)
{
    did.op = OP_F, did.q = micro, did.s = slice;
    return tp_cpu_stage_ops.forward(stage, micro, slice, half, slot);
}

static tp_status
noted_input_gradient(tp_stage *stage, int micro, int slice, int slot, int gradient_slot)
{
    did.op = OP_I, did.q = micro, did.s = slice;
    return tp_cpu_stage_ops.input_gradient(stage, micro, slice, slot, gradient_slot);
}

static tp_status
noted_weight_gradient(tp_stage *stage, int micro, int slice, int slot, int gradient_slot)
{
    did.op = OP_W, did.q = micro, did.s = slice;
    return tp_cpu_stage_ops.weight_gradient(stage, micro, slice, slot, gradient_slot);
}

static tp_status
noted_finish(tp_stage *stage)
{
    did.op = OP_NONE;
    return tp_cpu_stage_ops.finish(stage);
}

static tp_status
noting_open(const tp_device_config *config, tp_heap *heap, tp_device **out)
{
    static tp_backend_ops ops;
    TP_TRY(tp_cpu_provider()->device->open(config, heap, out));
    tp_backend *backend = &((tp_cpu_device *)*out)->backend;
    real = backend->ops;
    ops = *real;
    ops.linear_w = noted_linear_w;
    ops.bias_w = noted_bias_w;
    ops.linear_t = noted_linear_t;
    backend->ops = &ops;
    return TP_OK;
}

/* ---- a step of one rank of one stage -------------------------------------------------------------------------------------- */

typedef struct {
    int32_t seq_len, batch, micros, batches[MOST_BATCH], slices[MOST_BATCH], lengths[MOST_BATCH * MOST_SLICES];
    uint8_t saves[MOST_BLOCKS];
    char text[1 << 14];
} cut;

typedef struct {
    chain *chains;
    float *grad[MOST_PARAMS];
    int remake_slices, one_room; /* what the engine found the stage may do */
    int apart;                   /* of its attentions d(k) and d(v) have all rows, the rest of a slice alone */
} outcome;

static void
add(cut *c, const char *op, int q, int s, const char *more)
{
    size_t at = strlen(c->text);
    int written = snprintf(c->text + at, sizeof c->text - at, "0%s%d.%d%s ", op, q, s, more);
    MUST(written > 0 && (size_t)written < sizeof c->text - at);
}

static unsigned
kinds_that(const cut *c, const tp_model *model, tp_saves saves)
{
    unsigned kinds = 0;
    for (int i = 0; i < tp_model_blocks(model); i++)
        kinds |= c->saves[i] == saves ? 1u << tp_model_block_kind(model, i) : 0;
    return kinds;
}

/* Where each kind of instruction has come to. */
typedef struct {
    int q, s; /* the next */
} place;

static void
forward(cut *c, const tp_model *model, place *at, int halves)
{
    int halved = halves && c->slices[at->q] == 1 && c->batches[at->q] > 1;
    add(c, "F", at->q, at->s, halved ? "a" : "");
    if (halved)
        add(c, "F", at->q, at->s, "b");
    if (kinds_that(c, model, TP_SWAPS) != 0)
        add(c, "SO", at->q, at->s, "");
    if (++at->s == c->slices[at->q])
        *at = (place){at->q + 1, 0};
}

/* R and SI of a slice before its I: all of the micro-batch, ascending, where an attention is among what comes back. */
static void
bring_back(cut *c, const tp_model *model, int q, int s)
{
    static const char *const op[] = {[TP_REMAKES] = "R", [TP_SWAPS] = "SI"};
    for (tp_saves way = TP_REMAKES; way <= TP_SWAPS; way++) {
        unsigned kinds = kinds_that(c, model, way);
        int all = (kinds & 1u << TP_ATTENTION) != 0;
        for (int k = all ? 0 : s; kinds != 0 && k <= s && (!all || s == c->slices[q] - 1); k++)
            add(c, op[way], q, k, "");
    }
}

static void
down(const cut *c, place *at)
{
    if (--at->s < 0) {
        at->q++;
        at->s = at->q < c->micros ? c->slices[at->q] - 1 : 0;
    }
}

typedef enum { DIRECTLY, BEFORE_NEXT_I, DEFERRED, IN_TURN, ORDERS } order;

/* Any order that is legal: forwards ahead by any number of micro-batches, slice by slice or all `at_once`; W directly behind its I,
 * or before the next, or later; IN_TURN: a micro-batch's forwards behind all I of the one before. */
static void
write_program(cut *c, const tp_model *model, order weights, int at_once, int halves)
{
    place f = {0, 0}, i = {0, c->slices[0] - 1}, w = i;
    c->text[0] = 0;
    while (w.q < c->micros) {
        int can_w = w.q != i.q || w.s != i.s, can_i = i.q < f.q && (weights == DEFERRED || !can_w);
        int can_f = f.q < c->micros && (weights != DIRECTLY || !can_w) && (weights != IN_TURN || f.q == i.q), which = pick(3);
        if (which == 0 && can_f) {
            do
                forward(c, model, &f, halves);
            while (at_once && f.s > 0);
        } else if (which == 1 && can_i) {
            bring_back(c, model, i.q, i.s);
            add(c, "I", i.q, i.s, "");
            down(c, &i);
        } else if (which == 2 && can_w) {
            add(c, "W", w.q, w.s, "");
            down(c, &w);
        }
    }
}

static void
keep(tp_engine *engine, const tp_model *model, outcome *out)
{
    int number;
    tp_stage *stage = tp_engine_stage(engine, 0, &number);
    out->chains = malloc(sizeof chains);
    MUST(out->chains != NULL);
    memcpy(out->chains, chains, sizeof chains);
    out->remake_slices = stage->base.config.remake_slices;
    out->one_room = stage->base.config.one_room;
    out->apart = stage->base.block[1].gradients[0].dkv != NULL;
    for (int i = 0; i < tp_stage_params(stage); i++) {
        tp_param param;
        tp_model_param(model, i, &param);
        out->grad[i] = calloc((size_t)(param.rows * param.cols), sizeof(float));
        MUST(out->grad[i] != NULL && tp_cpu_stage_ops.export(stage, i, TP_STATE_GRAD, out->grad[i]) == TP_OK);
    }
}

static void
load(tp_engine *engine, const tp_model *model)
{
    int number;
    tp_stage *stage = tp_engine_stage(engine, 0, &number);
    memset(chains, 0, sizeof chains);
    MUST(tp_stage_params(stage) < MOST_PARAMS);
    for (int i = 0; i < tp_stage_params(stage); i++) {
        tp_param param;
        tp_model_param(model, i, &param);
        float *values = malloc((size_t)(param.rows * param.cols) * sizeof *values);
        MUST(values != NULL);
        tp_rng_normal(3, (uint64_t)i, 0.3, param.rows * param.cols, values);
        MUST(tp_cpu_stage_ops.import(stage, i, TP_STATE_VALUE, values) == TP_OK);
        chains[i].grad = stage->base.param[i].grad;
        free(values);
    }
    chains[tp_stage_params(stage)].grad = stage->head_forward;
    memset(&did, 0, sizeof did);
    did.op = OP_NONE;
    did.head[0] = stage->head_forward;
    did.head[1] = stage->base.param[stage->base.block[stage->base.blocks - 1].in].grad;
    did.kept = stage->base.block[1].saves == TP_KEEPS && !stage->base.config.slice_gradients
                   ? stage->base.param[stage->base.block[1].in].grad
                   : NULL;
    MUST(tp_cpu_stage_ops.pack(stage) == TP_OK);
}

static void
run(const cut *c, const tp_model *model, const int32_t *tokens, outcome *out)
{
    static const tp_step_options options = {.adamw = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .step = 1}};
    tp_device_ops device = *tp_cpu_provider()->device;
    tp_provider provider = *tp_cpu_provider();
    tp_stage_ops stage = tp_cpu_stage_ops;
    int32_t partition[] = {0, tp_model_blocks(model)};
    tp_program *parsed, *program;
    tp_slicing *slicing;
    tp_heap *heap;
    tp_engine *engine;
    tp_step_result result;
    device.open = noting_open;
    provider.device = &device;
    stage.forward = noted_forward;
    stage.input_gradient = noted_input_gradient;
    stage.weight_gradient = noted_weight_gradient;
    stage.finish = noted_finish;
    provider.stage = &stage;
    MUST(tp_slicing_open(c->seq_len, c->batch, c->micros, c->batches, c->slices, c->lengths, &slicing) == TP_OK);
    MUST(tp_program_parse(c->text, strlen(c->text), &parsed) == TP_OK && tp_program_lower(parsed, 0, &program) == TP_OK);
    MUST(tp_program_check(program) == TP_OK && tp_engine_halve(program, slicing) == TP_OK);
    tp_engine_config config = {.program = program, .model = *model, .slicing = slicing, .partition = partition,
                               .saves = c->saves, .store = ".", .provider = &provider, .device = {.threads = 1}};
    MUST(tp_heap_open(0, &heap) == TP_OK);
    MUST(tp_engine_check(&config) == TP_OK && tp_engine_open(&config, heap, &engine) == TP_OK);
    size_t bytes;
    MUST(tp_engine_bytes(&config, &bytes) == TP_OK && tp_heap_bytes(heap) == bytes);
    load(engine, model);
    MUST(tp_engine_step(engine, tokens, &options, &result) == TP_OK);
    keep(engine, model, out);
    tp_engine_close(engine);
    tp_heap_close(heap);
    tp_program_close(parsed);
    tp_program_close(program);
    tp_slicing_close(slicing);
}

static void
drop(outcome *out)
{
    free(out->chains);
    for (int i = 0; i < MOST_PARAMS; i++)
        free(out->grad[i]);
}

/* ---- the cases ------------------------------------------------------------------------------------------------------------- */

static void
cut_sequence(cut *c, int32_t *lengths, int32_t *slices)
{
    static const int32_t odd[] = {1, 1, 62, 5};
    int32_t left = c->seq_len, sum = 0;
    for (int i = 0; i < 4; i++)
        sum += odd[i];
    *slices = 0;
    if (sum == c->seq_len && pick(2)) {
        memcpy(lengths, odd, sizeof odd);
        *slices = 4;
        return;
    }
    int32_t most = 1 + pick(MOST_SLICES), longest = 1 + pick(c->seq_len);
    while (left > 0) {
        int32_t length = *slices == most - 1 ? left : 1 + pick(left < longest ? left : longest);
        lengths[(*slices)++] = length;
        left -= length;
    }
}

/* As many slices as there may be, of about one length. */
static void
cut_evenly(const cut *c, int32_t *lengths, int32_t *slices)
{
    int32_t left = c->seq_len;
    for (*slices = 0; *slices < MOST_SLICES && left > 0; left -= lengths[(*slices)++]) {
        int32_t mean = left / (MOST_SLICES - *slices);
        lengths[*slices] = *slices == MOST_SLICES - 1 ? left : mean < 9 ? 1 : mean - 4 + pick(9);
    }
}

/* At random; `plain`: a micro-batch and a slice for each sequence, all is kept. */
static void
cut_batch(cut *c, const tp_model *model, int plain)
{
    int32_t left = c->batch, *lengths = c->lengths;
    int even = !plain && c->seq_len > 200 && pick(2), ones = plain || even || pick(2);
    memset(c->saves, 0, sizeof c->saves);
    for (c->micros = 0; left > 0; c->micros++) {
        int32_t q = c->micros;
        c->batches[q] = ones ? 1 : 1 + pick(left);
        left -= c->batches[q];
        c->slices[q] = 1;
        lengths[0] = c->seq_len;
        if (even)
            cut_evenly(c, lengths, &c->slices[q]);
        else if (!plain && pick(5))
            cut_sequence(c, lengths, &c->slices[q]);
        lengths += c->slices[q];
    }
    int ffns_alone = pick(2), kinds = plain ? 1 : 1 + pick(3);
    for (int i = 1; i < tp_model_blocks(model) - 1; i++)
        if (!ffns_alone || tp_model_block_kind(model, i) == TP_FFN)
            c->saves[i] = (uint8_t)pick(kinds);
}

static void
same(const tp_model *model, const outcome *one, const outcome *other, const cut *c)
{
    for (int i = 0; i < MOST_PARAMS; i++) {
        const chain *a = &one->chains[i], *b = &other->chains[i];
        int k = 0;
        while (k < a->count && k < b->count && memcmp(&a->of[k], &b->of[k], sizeof a->of[k]) == 0)
            k++;
        if (k < a->count || k < b->count)
            fprintf(stderr, "gradient %d: %d groups are %d others from number %d on (%lld rows, %lld), T = %d: %s\n", i, a->count,
                    b->count, k, (long long)a->of[k].rows, (long long)b->of[k].rows, c->seq_len, c->text);
        MUST(k == a->count && k == b->count);
    }
    for (int i = 0; i < tp_model_params(model); i++) {
        tp_param param;
        tp_model_param(model, i, &param);
        MUST(memcmp(one->grad[i], other->grad[i], (size_t)(param.rows * param.cols) * sizeof(float)) == 0);
    }
}

static void
compare(void *context, int forward, int32_t slice, const tp_head_rows *rows)
{
    const int q = *(const int *)context;
    phase which = forward ? OP_F : OP_I;
    if (did.passed[which][q][slice] != rows->passed || did.flushed[which][q][slice] != rows->flushed)
        fprintf(stderr, "%s of %d.%d passed %d rows and made d(weight) of %d: %d and %d were expected\n", forward ? "F" : "I", q,
                (int)slice, (int)did.passed[which][q][slice], (int)did.flushed[which][q][slice], (int)rows->passed,
                (int)rows->flushed);
    MUST(did.passed[which][q][slice] == rows->passed && did.flushed[which][q][slice] == rows->flushed);
}

/* The latest step's, of micro-batches in turn: what csrc/cost/waits.h says that it did. */
static void
check_waits(const cut *c, int in_turn)
{
    tp_head_walk walk = {{0, 0}, 0};
    const int32_t *lengths = c->lengths;
    for (int q = 0; q < c->micros; lengths += c->slices[q++]) {
        int32_t rows[MOST_SLICES];
        if (in_turn)
            tp_head_walk_on(&walk, c->batches[q], c->slices[q], lengths, compare, &q);
        if (c->batches[q] > 1 || did.kept == NULL)
            continue;
        tp_weight_rows(c->slices[q], lengths, rows);
        MUST(memcmp(rows, did.made[q], (size_t)c->slices[q] * sizeof *rows) == 0);
    }
}

int
main(void)
{
    static const int32_t seq_lens[] = {69, 20, 33, 150, 300, 96, 64};
    static int32_t tokens[MOST_BATCH * 301];
    static cut c;
    int remade = 0, roomy = 0, apart = 0;
    for (int i = 0; i < MOST_BATCH * 301; i++)
        tokens[i] = pick(VOCAB);
    for (int n = 0; n < 7; n++) {
        tp_model model = {.n_layer = 1 + n % 2, .n_head = 1, .n_embd = 4, .vocab_size = VOCAB, .block_size = 300, .bias = n % 3 != 1,
                          .tie_weights = n % 2};
        outcome plain = {0};
        c.seq_len = seq_lens[n];
        c.batch = MOST_BATCH - n % 2;
        cut_batch(&c, &model, 1);
        write_program(&c, &model, DIRECTLY, 0, 0);
        run(&c, &model, tokens, &plain);
        MUST(plain.chains[0].count + plain.chains[tp_model_params(&model)].count > 0);
        for (int k = 0; k < 100; k++) {
            outcome mine = {0};
            cut_batch(&c, &model, 0);
            order way = (order)pick(ORDERS);
            write_program(&c, &model, way, pick(2), way != IN_TURN && pick(2));
            run(&c, &model, tokens, &mine);
            check_waits(&c, way == IN_TURN);
            same(&model, &mine, &plain, &c);
            remade += mine.remake_slices && c.slices[0] > 1;
            apart += mine.apart;
            roomy += mine.remake_slices && mine.one_room && c.slices[0] > 1;
            drop(&mine);
        }
        drop(&plain);
    }
    MUST(remade > 10 && roomy > 3 && apart > 3); /* it would prove nothing of what is put by */
    return 0;
}
