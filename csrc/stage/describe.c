#include "csrc/stage/describe.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- the tables ------------------------------------------------------------------------------------------------------ */

/* Its own wte of a stage that has the head and not the embedding. */
static int
holds_tied(const tp_stage_config *config)
{
    return config->model.tie_weights && config->first_block > 0 && config->last_block == tp_model_blocks(&config->model);
}

static int
params_of(const tp_stage_config *config)
{
    return holds_tied(config) + tp_model_first_param(&config->model, config->last_block) -
           tp_model_first_param(&config->model, config->first_block);
}

static void
describe_params(tp_stage_base *stage)
{
    const tp_stage_config *config = &stage->config;
    int tied = holds_tied(config), first = tp_model_first_param(&config->model, config->first_block) - tied;
    stage->params = params_of(config);
    for (int i = 0; i < stage->params; i++) {
        stage->param[i].index = tied && i == 0 ? 0 : first + i;
        tp_model_param(&config->model, stage->param[i].index, &stage->param[i].info);
    }
}

/* Indices in stage->param, where a block's tensors lie in the order of Hugging Face's: each weight, with its bias if there are any.
 * Looked for by their names they took a twentieth of planning a large model. */
static void
describe_block(tp_stage_base *stage, int i)
{
    const tp_model *model = &stage->config.model;
    tp_stage_block *block = &stage->block[i];
    int global = stage->config.first_block + i, bias = model->bias != 0;
    int at = holds_tied(&stage->config) + tp_model_first_param(model, global) -
             tp_model_first_param(model, stage->config.first_block);
    block->kind = tp_model_block_kind(model, global);
    block->saves = stage->config.saves != NULL ? (tp_saves)stage->config.saves[global] : TP_KEEPS;
    block->norm = block->norm_bias = block->in = block->in_bias = block->out = block->out_bias = -1;
    if (block->kind == TP_EMBEDDING) {
        block->in = at++;
        block->out = at;
        return;
    }
    block->norm = at++;
    if (bias)
        block->norm_bias = at++;
    block->in = block->kind == TP_HEAD && model->tie_weights ? 0 : at++; /* wte is the first of all, its own or the embedding's */
    if (block->kind == TP_HEAD)
        return;
    if (bias)
        block->in_bias = at++;
    block->out = at++;
    if (bias)
        block->out_bias = at;
}

/* The tables behind the stage, in one piece of memory with it. */
static void
place_tables(tp_stage_base *stage)
{
    size_t slots[2] = {(size_t)stage->config.activation_slots, (size_t)stage->config.gradient_slots};
    char *at = (char *)stage + stage->sizes.stage;
    stage->block = (tp_stage_block *)(void *)at;
    stage->param = (tp_stage_param *)(void *)(stage->block + stage->blocks);
    at = (char *)(stage->param + params_of(&stage->config));
    for (int i = 0; i < stage->blocks; i++) {
        stage->block[i].activations = (tp_activations *)(void *)at;
        at += slots[0] * stage->sizes.activations;
        stage->block[i].gradients = (tp_gradients *)(void *)at;
        at += slots[1] * stage->sizes.gradients;
        stage->block[i].made = (tp_inner *)(void *)at;
        stage->block[i].stored = stage->block[i].made + slots[0];
        stage->block[i].remade = stage->block[i].stored + slots[0];
        at = (char *)(stage->block[i].remade + slots[1]);
    }
    for (int end = 0; end < 4; end++) {
        stage->end[end] = (void **)(void *)at;
        at += slots[end == TP_END_OUTPUT_GRADIENT || end == TP_END_INPUT_GRADIENT] * sizeof(void *);
    }
    stage->version_of = stage->config.versions > 0 ? (int32_t *)(void *)at : NULL;
    if (stage->config.shards) { /* replicas have no versions */
        stage->leaves_of = (int64_t *)(void *)at;
        stage->row_at = stage->leaves_of + stage->config.replicas;
        stage->row_block = (int32_t *)(void *)(stage->row_at + stage->blocks + 1);
    }
}

tp_status
tp_stage_describe(const tp_stage_config *config, const tp_stage_sizes *sizes, tp_stage **out)
{
    int blocks = config->last_block - config->first_block, all = tp_model_blocks(&config->model);
    if (config->first_block < 0 || blocks < 1 || config->last_block > all)
        return tp_fail(TP_EVALUE, "a stage of blocks [%d, %d): a part of [0, %d) would be right", config->first_block,
                       config->last_block, all);
    size_t slots = (size_t)config->activation_slots, gslots = (size_t)config->gradient_slots;
    size_t bytes = sizes->stage + (size_t)blocks * sizeof(tp_stage_block) +
                   (size_t)params_of(config) * sizeof(tp_stage_param) +
                   (size_t)blocks * (slots * (sizes->activations + 2 * sizeof(tp_inner)) + gslots * (sizes->gradients + sizeof(tp_inner))) +
                   2 * (slots + gslots) * sizeof(void *) +
                   (config->versions > 0 ? (size_t)config->slicing->micros * sizeof(int32_t) : 0) +
                   (config->shards ? (size_t)(config->replicas + blocks + 1) * sizeof(int64_t) + (size_t)(blocks + 2) * sizeof(int32_t) : 0);
    tp_stage_base *stage = calloc(1, bytes); /* tables, not tensors: outside the account */
    if (stage == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the tables of a stage");
    stage->config = *config;
    stage->sizes = *sizes;
    stage->blocks = blocks;
    snprintf(stage->what, sizeof stage->what, "the stage of blocks [%d, %d)", config->first_block, config->last_block);
    place_tables(stage);
    describe_params(stage);
    for (int i = 0; i < blocks; i++)
        describe_block(stage, i);
    *out = (tp_stage *)(void *)stage;
    return TP_OK;
}

void
tp_stage_tied_ends(const tp_stage_base *stage, tp_tied *out)
{
    *out = (tp_tied){0};
    if (!tp_stage_is_tied_apart(stage))
        return;
    size_t rows = (size_t)(tp_stage_tokens(stage) * stage->config.model.n_embd) * stage->sizes.element;
    *out = tp_stage_heads(stage) ? (tp_tied){.in = stage->embedding_rows, .in_bytes = rows}
                                 : (tp_tied){.out = stage->embedding_rows, .out_bytes = rows};
}

void
tp_stage_tied_values(const tp_stage_base *stage, void *values, size_t bytes, tp_tied *out)
{
    *out = (tp_tied){0};
    if (tp_stage_is_tied_apart(stage))
        *out = tp_stage_heads(stage) ? (tp_tied){.out = values, .out_bytes = bytes} : (tp_tied){.in = values, .in_bytes = bytes};
}

/* ---- a slice --------------------------------------------------------------------------------------------------------- */

/* tp_slice_at.room_begin in room for so many rows, of a W that moves seldom: slices lie below what is put by for them, from the end
 * of the buffers down. Where nothing is put by the next slice begins at that end anew, and where it has no room what is put by moves
 * there: at every W where forward takes the first rows (`between`). Where all rows have room, each has its place. */
static int64_t
room_begin(const tp_stage_base *stage, const tp_slice_at *at, int64_t room, int between)
{
    const tp_stage_config *config = &stage->config;
    const tp_micro *cut = at->micro;
    if (!stage->sizes.moves_seldom)
        return at->first_row + at->rows - config->slicing->max_rows;
    if (!config->slice_gradients || cut->slices == 1 || (room == tp_stage_rows(stage) && !between))
        return 0;
    int64_t begin = cut->start[cut->slices] - room;
    for (int s = cut->slices - 2; s >= at->slice; s--) {
        int64_t end = tp_stage_groups_begin(stage, cut, s + 1);
        if (between || end == cut->start[s + 1] || cut->start[s] < begin)
            begin = end - room;
    }
    return begin;
}

tp_slice_at
tp_stage_at(const tp_stage_base *stage, int micro, int slice, tp_half half, int slot, int gslot)
{
    const tp_micro *cut = &stage->config.slicing->micro[micro];
    int64_t seq_len = stage->config.slicing->seq_len;
    tp_slice_at at = {.q = micro, .slice = slice, .slot = slot, .gslot = gslot, .micro = cut};
    at.first = half == TP_SECOND_HALF ? cut->half : 0;
    at.last = half == TP_FIRST_HALF ? cut->half : cut->batch;
    at.begin = cut->start[slice];
    at.end = cut->start[slice + 1];
    at.first_row = at.begin * cut->batch + at.first * seq_len; /* only one slice has halves */
    at.rows = (at.end - at.begin) * (at.last - at.first);
    at.batch_row = (int64_t)cut->first_seq * seq_len;
    at.all_rows = (int64_t)cut->batch * seq_len;
    at.whole = cut->batch > 1 && cut->slices > 1;
    at.room_begin = at.gradients_begin = room_begin(stage, &at, stage->slice_rows, 0);
    if (stage->config.one_room == TP_ROOM_BETWEEN_SLICES)
        at.room_begin = room_begin(stage, &at, stage->remade_rows, 1);
    return at;
}

int
tp_stage_swaps(const tp_stage_base *stage, const tp_stage_block *block, const tp_slice_at *at, int out, tp_swap swap[TP_SWAPS_MOST])
{
    const tp_inner *inner = out ? &block->made[at->slot] : &block->remade[at->gslot], *stored = &block->stored[at->slot];
    const int64_t begin = (out ? tp_stage_made_begin : tp_stage_inner_begin)(stage, block, at);
    const struct {
        void *device, *store;
        int64_t width, begin;
    } array[] = {{inner->norm, stored->norm, 1, begin}, {inner->qkv, stored->qkv, 3, begin}, {inner->o, stored->o, 1, begin},
                 {inner->h, stored->h, 4, out ? begin : tp_stage_h_begin(stage, block, at)}, {inner->g, stored->g, 4, begin}};
    int count = 0;
    for (size_t k = 0; block->saves == TP_SWAPS && k < sizeof array / sizeof *array; k++) {
        size_t row = (size_t)(array[k].width * stage->config.model.n_embd) * stage->sizes.element;
        if (array[k].device != NULL)
            swap[count++] = (tp_swap){(char *)array[k].device + (size_t)(at->first_row - array[k].begin) * row,
                                      (char *)array[k].store + (size_t)at->first_row * row, (size_t)at->rows * row};
    }
    return count;
}

static tp_stage_part
part_of(const tp_stage_base *stage, const tp_slice_at *at, int64_t first, int64_t last)
{
    const tp_model *model = &stage->config.model;
    int64_t seq_len = stage->config.slicing->seq_len;
    return (tp_stage_part){.row = tp_stage_row(stage, at, 0, first),
                           .lse = first * model->n_head * seq_len,
                           .shape = {.batch = last - first,
                                     .heads = model->n_head,
                                     .head_dim = model->n_embd / model->n_head,
                                     .slice = at->end - at->begin,
                                     .context = at->begin,
                                     .total = seq_len,
                                     .qkv_stride = 3 * model->n_embd,
                                     .o_stride = model->n_embd}};
}

int
tp_stage_parts(const tp_stage_base *stage, const tp_slice_at *at, tp_stage_part part[2])
{
    int count = 0;
    const int64_t edge[] = {0, at->micro->half, at->micro->batch};
    for (int k = 0; k < 2; k++)
        if (edge[k] < edge[k + 1] && edge[k] >= at->first && edge[k + 1] <= at->last)
            part[count++] = part_of(stage, at, edge[k], edge[k + 1]);
    return count;
}

void
tp_stage_order(const tp_stage_base *stage, const int32_t *tokens, int32_t *inputs, int32_t *targets, int32_t *positions)
{
    const tp_slicing *slicing = stage->config.slicing;
    int64_t seq_len = slicing->seq_len;
    for (int32_t q = 0; q < slicing->micros; q++) {
        const tp_micro *micro = &slicing->micro[q];
        for (int64_t s = 0; s < micro->batch; s++) {
            int64_t at = (micro->first_seq + s) * (seq_len + 1);
            for (int64_t t = 0; t < seq_len; t++) {
                int64_t row = micro->first_seq * seq_len + tp_micro_row(micro, seq_len, t, s);
                if (inputs != NULL)
                    inputs[row] = tokens[at + t];
                if (targets != NULL)
                    targets[row] = tokens[at + t + 1];
                if (positions != NULL)
                    positions[row] = (int32_t)t;
            }
        }
    }
}

/* ---- of tp_stage_ops --------------------------------------------------------------------------------------------------- */

static const tp_stage_base *
base_of(const tp_stage *stage)
{
    return (const tp_stage_base *)(const void *)stage;
}

int
tp_stage_params(const tp_stage *stage)
{
    return base_of(stage)->params;
}

int
tp_stage_param_index(const tp_stage *stage, int i)
{
    return base_of(stage)->param[i].index;
}

int
tp_stage_param_shape(const tp_stage *stage, int i, int64_t *rows, int64_t *cols)
{
    const tp_param *info = &base_of(stage)->param[i].info;
    *rows = info->rows;
    *cols = info->cols;
    return info->is_matrix;
}

float *
tp_stage_state(const tp_stage_base *stage, int i, tp_state state)
{
    const tp_stage_param *param = &stage->param[i];
    return tp_stage_is_sharded(stage, state) ? param->grad
           : state == TP_STATE_M      ? param->m
           : state == TP_STATE_V    ? param->v
           : state == TP_STATE_GRAD ? param->grad
                                    : tp_stage_version(stage, i, stage->newest);
}

tp_status
tp_stage_check_state(const tp_stage_base *stage, int i, tp_state state)
{
    if (!tp_stage_answers_for(stage, i) && state != TP_STATE_VALUE)
        return tp_fail(TP_EVALUE, "%s: its gradient and moments are with the head's stage", stage->param[i].info.name);
    return TP_OK;
}

tp_status
tp_stage_check_whole(const tp_stage_base *stage, int i, tp_state state)
{
    if (tp_stage_is_sharded(stage, state))
        return tp_fail(TP_EVALUE, "%s: each of %d replicas has a part of its moments: gathered ones would be right",
                       stage->param[i].info.name, stage->config.replicas);
    return TP_OK;
}

static const tp_stage_param *
first_gradient(const tp_stage_base *base)
{
    const tp_stage_param *first = base->param;
    while (first->grad == NULL) /* of a tied embedding, behind which its positions come */
        first++;
    return first;
}

float *
tp_stage_gradients(tp_stage *stage, int64_t *floats)
{
    const tp_stage_base *base = base_of(stage);
    const tp_stage_param *last = &base->param[base->params - 1], *first = first_gradient(base);
    *floats = last->grad + last->floats - first->grad;
    return first->grad;
}

int64_t
tp_stage_block_gradients(const tp_stage *stage, int block, int64_t *first)
{
    const tp_stage_base *base = (const tp_stage_base *)(const void *)stage;
    const tp_stage_block *self = &base->block[block];
    const int all[] = {self->norm, self->norm_bias, self->in, self->in_bias, self->out, self->out_bias};
    int low = base->params, high = -1;
    *first = 0;
    if (self->kind != TP_ATTENTION && self->kind != TP_FFN)
        return 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        low = all[i] >= 0 && all[i] < low ? all[i] : low;
        high = all[i] > high ? all[i] : high;
    }
    *first = base->param[low].grad - first_gradient(base)->grad;
    return base->param[high].grad + base->param[high].floats - base->param[low].grad;
}

void *
tp_stage_guest(tp_stage *stage, int slot, size_t *bytes)
{
    const tp_stage_base *base = base_of(stage);
    *bytes = base->guest_bytes;
    return base->slots + (size_t)slot * base->slot_bytes;
}

void *
tp_stage_end(tp_stage *stage, tp_end end, int micro, int slice, tp_half half, int slot, size_t *bytes)
{
    const tp_stage_base *base = base_of(stage);
    tp_slice_at at = tp_stage_at(base, micro, slice, half, slot, slot);
    size_t row = (size_t)base->config.model.n_embd * base->sizes.element;
    char *whole = base->end[end][slot];
    *bytes = (size_t)at.rows * row;
    return whole == NULL ? NULL : whole + (size_t)at.first_row * row;
}
