#include "csrc/stage/stage.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/stage/parts.h"

/* ---- what a stage holds --------------------------------------------------------------------------------------------- */

static int
holds(const tp_stage_config *config, const tp_param *param, int index)
{
    int head = tp_model_blocks(&config->model) - 1;
    if (param->block >= config->first_block && param->block < config->last_block)
        return 1;
    return index == 0 && config->model.tie_weights && config->last_block == head + 1;
}

/* Index in stage->param of the tensor of `block` whose name ends in `suffix`; -1: none. */
static int
find(const tp_stage *stage, int block, const char *suffix)
{
    for (int i = 0; i < stage->params; i++) {
        const char *name = stage->param[i].info.name;
        size_t length = strlen(name), tail = strlen(suffix);
        if (stage->param[i].info.block == block && length >= tail && strcmp(name + length - tail, suffix) == 0)
            return i;
    }
    return -1;
}

static void
describe_params(tp_stage *stage, const tp_backend_ops *ops)
{
    const tp_stage_config *config = &stage->config;
    int has_head = config->last_block == tp_model_blocks(&config->model);
    for (int index = 0; index < tp_model_params(&config->model); index++) {
        tp_param info;
        tp_model_param(&config->model, index, &info);
        if (!holds(config, &info, index))
            continue;
        stage_param *param = &stage->param[stage->params++];
        *param = (stage_param){.info = info, .index = index};
        int lookup_only = index == 1 || (index == 0 && !(has_head && config->model.tie_weights));
        param->needs_t = info.is_matrix && !lookup_only;
        param->floats = info.is_matrix ? ops->weight_floats(info.rows, info.cols) : info.cols;
        param->t_floats = info.is_matrix ? ops->weight_t_floats(info.rows, info.cols) : 0;
    }
}

static void
describe_block(tp_stage *stage, int i)
{
    const tp_model *model = &stage->config.model;
    stage_block *block = &stage->block[i];
    int global = stage->config.first_block + i;
    block->kind = tp_model_block_kind(model, global);
    block->norm = block->norm_bias = block->in = block->in_bias = block->out = block->out_bias = -1;
    if (block->kind == TP_EMBEDDING) {
        block->in = find(stage, global, "wte.weight");
        block->out = find(stage, global, "wpe.weight");
    } else if (block->kind == TP_HEAD) {
        block->norm = find(stage, global, "ln_f.weight");
        block->norm_bias = find(stage, global, "ln_f.bias");
        block->in = model->tie_weights ? find(stage, 0, "wte.weight") : find(stage, global, "lm_head.weight");
    } else {
        int attention = block->kind == TP_ATTENTION;
        block->norm = find(stage, global, attention ? "ln_1.weight" : "ln_2.weight");
        block->norm_bias = find(stage, global, attention ? "ln_1.bias" : "ln_2.bias");
        block->in = find(stage, global, attention ? "c_attn.weight" : "c_fc.weight");
        block->in_bias = find(stage, global, attention ? "c_attn.bias" : "c_fc.bias");
        block->out = find(stage, global, "c_proj.weight");
        block->out_bias = find(stage, global, "c_proj.bias");
    }
}

/* The tables of a stage without its memory. */
static tp_status
describe(const tp_stage_config *config, const tp_backend_ops *ops, tp_stage **out)
{
    int blocks = config->last_block - config->first_block, all = tp_model_blocks(&config->model);
    if (config->first_block < 0 || blocks < 1 || config->last_block > all)
        return tp_fail(TP_EVALUE, "a stage of blocks [%d, %d): a part of [0, %d) would be right", config->first_block,
                       config->last_block, all);
    size_t slots = (size_t)config->activation_slots, gslots = (size_t)config->gradient_slots;
    size_t bytes = sizeof(tp_stage) + (size_t)blocks * sizeof(stage_block) +
                   (size_t)tp_model_params(&config->model) * sizeof(stage_param) +
                   (size_t)blocks * (slots * sizeof(block_activations) + gslots * sizeof(block_gradients)) +
                   (slots + gslots) * sizeof(float *);
    char *memory = calloc(1, bytes); /* tables, not tensors: outside the account */
    if (memory == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the tables of a stage");
    tp_stage *stage = (tp_stage *)memory;
    stage->config = *config;
    stage->blocks = blocks;
    stage->block = (stage_block *)(memory + sizeof(tp_stage));
    stage->param = (stage_param *)(stage->block + blocks);
    char *at = (char *)(stage->param + tp_model_params(&config->model));
    for (int i = 0; i < blocks; i++) {
        stage->block[i].activations = (block_activations *)at;
        at += slots * sizeof(block_activations);
        stage->block[i].gradients = (block_gradients *)at;
        at += gslots * sizeof(block_gradients);
    }
    stage->output = (float **)at;
    stage->d_output = stage->output + slots;
    describe_params(stage, ops);
    for (int i = 0; i < blocks; i++)
        describe_block(stage, i);
    *out = stage;
    return TP_OK;
}

size_t
tp_stage_bytes(const tp_stage_config *config, const tp_backend_ops *ops)
{
    tp_stage *stage;
    if (describe(config, ops, &stage) != TP_OK)
        return 0;
    size_t bytes = tp_stage_layout(stage, NULL);
    free(stage);
    return tp_align_bytes(bytes);
}

size_t
tp_stage_workspace_bytes(const tp_stage_config *config, const tp_backend_ops *ops, int members)
{
    const tp_slicing *slicing = config->slicing;
    int64_t rows = slicing->max_rows > TP_HEAD_TILE ? slicing->max_rows : TP_HEAD_TILE;
    return ops->workspace_bytes(config->model.n_embd, config->model.n_head, config->model.vocab_size, slicing->seq_len,
                                rows, members);
}

tp_status
tp_stage_open(const tp_stage_config *config, tp_backend *backend, tp_stage **out)
{
    tp_stage *stage;
    TP_TRY(describe(config, backend->ops, &stage));
    stage->be = backend;
    char what[96];
    snprintf(what, sizeof what, "the stage of blocks [%d, %d)", config->first_block, config->last_block);
    tp_status status = tp_heap_alloc(backend->heap, tp_stage_layout(stage, NULL), what, &stage->memory);
    if (status != TP_OK) {
        free(stage);
        return status;
    }
    tp_stage_layout(stage, stage->memory);
    *out = stage;
    return TP_OK;
}

void
tp_stage_close(tp_stage *stage)
{
    if (stage == NULL)
        return;
    tp_heap_free(stage->be->heap, stage->memory);
    free(stage);
}

/* ---- parameters ------------------------------------------------------------------------------------------------------- */

int
tp_stage_params(const tp_stage *stage)
{
    return stage->params;
}

int
tp_stage_param_index(const tp_stage *stage, int i)
{
    return stage->param[i].index;
}

int
tp_stage_param_shape(const tp_stage *stage, int i, int64_t *rows, int64_t *cols)
{
    *rows = stage->param[i].info.rows;
    *cols = stage->param[i].info.cols;
    return stage->param[i].info.is_matrix;
}

static float *
state_of(const stage_param *param, tp_state state)
{
    switch (state) {
    case TP_STATE_M: return param->m;
    case TP_STATE_V: return param->v;
    case TP_STATE_GRAD: return param->grad;
    default: return param->value;
    }
}

void
tp_stage_import(tp_stage *stage, int i, tp_state state, const float *row_major)
{
    stage_param *param = &stage->param[i];
    if (param->info.is_matrix)
        stage->be->ops->weight_import(stage->be, param->info.rows, param->info.cols, row_major, state_of(param, state));
    else
        stage->be->ops->copy(stage->be, param->floats, row_major, state_of(param, state));
}

void
tp_stage_export(const tp_stage *stage, int i, tp_state state, float *row_major)
{
    const stage_param *param = &stage->param[i];
    if (param->info.is_matrix)
        stage->be->ops->weight_export(stage->be, param->info.rows, param->info.cols, state_of(param, state), row_major);
    else
        stage->be->ops->copy(stage->be, param->floats, state_of(param, state), row_major);
}

void
tp_stage_pack(tp_stage *stage)
{
    for (int i = 0; i < stage->params; i++) {
        stage_param *param = &stage->param[i];
        if (param->needs_t)
            stage->be->ops->weight_transpose(stage->be, param->info.rows, param->info.cols, param->value,
                                             param->packed_t);
    }
}

/* ---- a step ------------------------------------------------------------------------------------------------------------- */

slice_at
tp_stage_at(const tp_stage *stage, int micro, int slice, tp_half half, int slot, int gslot)
{
    const tp_micro *cut = &stage->config.slicing->micro[micro];
    slice_at at = {.q = micro, .slice = slice, .slot = slot, .gslot = gslot, .micro = cut};
    at.first = half == TP_SECOND_HALF ? cut->half : 0;
    at.last = half == TP_FIRST_HALF ? cut->half : cut->batch;
    at.begin = cut->start[slice];
    at.end = cut->start[slice + 1];
    at.first_row = at.begin * cut->batch + at.first * stage->config.slicing->seq_len; /* only one slice has halves */
    at.rows = (at.end - at.begin) * (at.last - at.first);
    at.batch_row = (int64_t)cut->first_seq * stage->config.slicing->seq_len;
    at.whole = cut->batch > 1 && cut->slices > 1;
    return at;
}

void
tp_stage_begin(tp_stage *stage, const int32_t *tokens, int train)
{
    const tp_slicing *slicing = stage->config.slicing;
    int64_t seq_len = slicing->seq_len;
    stage->train = train;
    for (int i = 0; i < 2; i++)
        stage->tile[i].rows = stage->tile[i].seen = 0;
    stage->head_from = 0;
    if (stage->tokens == NULL)
        return;
    for (int32_t q = 0; q < slicing->micros; q++) {
        const tp_micro *micro = &slicing->micro[q];
        for (int64_t s = 0; s < micro->batch; s++) {
            const int32_t *sequence = tokens + (micro->first_seq + s) * (seq_len + 1);
            for (int64_t t = 0; t < seq_len; t++) {
                int64_t row = micro->first_seq * seq_len + tp_micro_row(micro, seq_len, t, s);
                int64_t canonical = (micro->first_seq + s) * seq_len + (seq_len - 1 - t);
                stage->tokens[row] = sequence[t];
                stage->targets[row] = sequence[t + 1];
                stage->positions[row] = (int32_t)t;
                if (stage->chain_tokens != NULL) {
                    stage->chain_tokens[canonical] = sequence[t];
                    stage->chain_positions[canonical] = (int32_t)t;
                }
            }
        }
    }
}

void
tp_stage_forward(tp_stage *stage, int micro, int slice, tp_half half, int activation_slot)
{
    slice_at at = tp_stage_at(stage, micro, slice, half, activation_slot, 0);
    for (int block = 0; block < stage->blocks; block++)
        tp_block_forward(stage, block, &at);
}

void
tp_stage_input_gradient(tp_stage *stage, int micro, int slice, int activation_slot, int gradient_slot)
{
    slice_at at = tp_stage_at(stage, micro, slice, TP_WHOLE, activation_slot, gradient_slot);
    for (int block = stage->blocks - 1; block >= 0; block--)
        tp_block_input_gradient(stage, block, &at);
}

void
tp_stage_weight_gradient(tp_stage *stage, int micro, int slice, int activation_slot, int gradient_slot)
{
    slice_at at = tp_stage_at(stage, micro, slice, TP_WHOLE, activation_slot, gradient_slot);
    for (int block = stage->blocks - 1; block >= 0; block--)
        tp_block_weight_gradient(stage, block, &at);
}

double
tp_stage_loss(const tp_stage *stage)
{
    double total = 0;
    for (int32_t s = 0; s < stage->config.slicing->batch; s++)
        total += stage->sequence_loss[s];
    return total;
}

float *
tp_stage_end(tp_stage *stage, tp_end end, int micro, int slice, tp_half half, int slot, size_t *bytes)
{
    slice_at at = tp_stage_at(stage, micro, slice, half, slot, slot);
    int64_t width = stage->config.model.n_embd;
    float *whole = NULL;
    *bytes = (size_t)(at.rows * width) * sizeof(float);
    switch (end) {
    case TP_END_INPUT: whole = stage->block[0].activations[slot].input; break;
    case TP_END_OUTPUT: whole = stage->output[slot]; break;
    case TP_END_OUTPUT_GRADIENT: whole = stage->d_output[slot]; break;
    case TP_END_INPUT_GRADIENT: whole = stage->block[0].gradients[slot].d_input; break;
    }
    return whole == NULL ? NULL : whole + at.first_row * width;
}
