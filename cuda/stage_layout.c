/* The memory of a stage on a GPU: arenas walked once to count and once to carve, so that the size that the plan predicts
 * and the size that the stage takes are the same code. */
#include "cuda/stage.h"

#include <stdlib.h>
#include <string.h>

enum { ALIGN = 256 }; /* bytes: what kernels and products read widest, and more */

typedef struct {
    char *base;
    size_t used, element; /* bytes of the stage's dtype */
} arena;

static void *
take(arena *from, int64_t count, size_t size)
{
    void *at = from->base == NULL ? NULL : from->base + from->used;
    from->used += ((size_t)count * size + ALIGN - 1) / ALIGN * ALIGN;
    return at;
}

static float *
floats(arena *from, int64_t count)
{
    return take(from, count, sizeof(float));
}

static void *
elements(arena *from, int64_t count)
{
    return take(from, count, from->element);
}

static void
layout_params(tp_stage *stage, arena *from)
{
    for (int i = 0; i < stage->params; i++) {
        stage_param *param = &stage->param[i];
        param->value = floats(from, param->floats);
        param->grad = floats(from, param->floats);
        param->m = floats(from, param->floats);
        param->v = floats(from, param->floats);
        param->copy = param->has_copy ? elements(from, param->floats) : NULL;
    }
}

static void
layout_activations(const tp_stage *stage, tp_block_kind kind, block_activations *out, arena *from)
{
    const tp_model *model = &stage->config.model;
    int64_t rows = (int64_t)stage->config.slicing->max_batch * stage->config.slicing->seq_len, width = model->n_embd;
    *out = (block_activations){0};
    if (kind == TP_EMBEDDING)
        return;
    out->input = elements(from, rows * width);
    out->mean = floats(from, rows);
    out->rstd = floats(from, rows);
    if (kind == TP_HEAD) {
        out->d_norm = elements(from, rows * width);
        return;
    }
    out->norm = elements(from, rows * width);
    if (kind == TP_ATTENTION) {
        out->qkv = elements(from, rows * 3 * width);
        out->o = elements(from, rows * width);
        out->lse = floats(from, rows * model->n_head);
    } else {
        out->h = elements(from, rows * 4 * width);
        out->g = elements(from, rows * 4 * width);
    }
}

static void
layout_gradients(const tp_stage *stage, tp_block_kind kind, block_gradients *out, arena *from)
{
    const tp_model *model = &stage->config.model;
    int64_t rows = (int64_t)stage->config.slicing->max_batch * stage->config.slicing->seq_len, width = model->n_embd;
    *out = (block_gradients){0};
    if (kind == TP_EMBEDDING)
        return;
    out->d_input = elements(from, rows * width);
    if (kind == TP_HEAD)
        return;
    out->d_norm = elements(from, rows * width);
    if (kind == TP_ATTENTION) {
        out->dqkv = elements(from, rows * 3 * width);
        out->d_o = elements(from, rows * width);
        out->delta = floats(from, rows * model->n_head);
    } else {
        out->dh = elements(from, rows * 4 * width);
    }
}

static void
layout_slots(tp_stage *stage, arena *from)
{
    const tp_slicing *slicing = stage->config.slicing;
    int64_t rows = (int64_t)slicing->max_batch * slicing->seq_len, width = stage->config.model.n_embd;
    int head = tp_cuda_stage_heads(stage);
    for (int block = 0; block < stage->blocks; block++) {
        stage_block *self = &stage->block[block];
        for (int slot = 0; slot < stage->config.activation_slots; slot++)
            layout_activations(stage, self->kind, &self->activations[slot], from);
        for (int slot = 0; slot < stage->config.gradient_slots; slot++)
            layout_gradients(stage, self->kind, &self->gradients[slot], from);
    }
    for (int slot = 0; slot < stage->config.activation_slots; slot++)
        stage->output[slot] = head ? NULL : elements(from, rows * width);
    for (int slot = 0; slot < stage->config.gradient_slots; slot++)
        stage->d_output[slot] = head ? NULL : elements(from, rows * width);
}

static void
layout_groups(row_groups *groups, int64_t rows, int64_t height, arena *from)
{
    int64_t most = rows < height ? rows : height;
    groups->index = take(from, most, sizeof(int32_t));
    groups->start = take(from, most + 1, sizeof(int32_t));
    groups->rows = take(from, rows, sizeof(int32_t));
}

/* The same order on both sides: one copy takes all of it. */
static size_t
layout_ints(const tp_stage *stage, stage_ints *ints, arena *from)
{
    const tp_slicing *slicing = stage->config.slicing;
    int64_t tokens = (int64_t)slicing->batch * slicing->seq_len;
    size_t before = from->used;
    *ints = (stage_ints){0};
    if (tp_cuda_stage_heads(stage))
        ints->targets = take(from, tokens, sizeof(int32_t));
    if (tp_cuda_stage_scatters(stage)) {
        ints->tokens = take(from, tokens, sizeof(int32_t));
        layout_groups(&ints->by_token, tokens, stage->config.model.vocab_size, from);
    }
    if (tp_cuda_stage_embeds(stage)) {
        ints->positions = take(from, tokens, sizeof(int32_t));
        layout_groups(&ints->by_position, tokens, slicing->seq_len, from);
    }
    return from->used - before;
}

size_t
tp_cuda_stage_layout(tp_stage *stage, char *base)
{
    const tp_slicing *slicing = stage->config.slicing;
    const tp_model *model = &stage->config.model;
    int64_t tokens = (int64_t)slicing->batch * slicing->seq_len, width = model->n_embd;
    arena from = {base, 0, tp_dtype_bytes(stage->dtype)};
    layout_params(stage, &from);
    stage->zeroed_bytes = from.used;
    layout_slots(stage, &from);
    if (tp_cuda_stage_heads(stage)) {
        stage->tile_rows = tokens < TP_CUDA_HEAD_TILE ? tokens : TP_CUDA_HEAD_TILE;
        stage->tile_logits = elements(&from, stage->tile_rows * tp_cuda_padded_vocab(model));
        stage->tile_x = elements(&from, stage->tile_rows * width);
        stage->loss = floats(&from, tokens);
    }
    if (tp_cuda_stage_scatters(stage))
        stage->embedding_rows = elements(&from, tokens * width);
    stage->sums = take(&from, stage->params, sizeof(double));
    stage->ints_bytes = layout_ints(stage, &stage->on_device, &from);
    return from.used;
}

size_t
tp_cuda_stage_layout_host(tp_stage *stage, char *base)
{
    const tp_slicing *slicing = stage->config.slicing;
    arena from = {base, 0, tp_dtype_bytes(stage->dtype)};
    layout_ints(stage, &stage->on_host, &from);
    stage->host_loss = floats(&from, (int64_t)slicing->batch * slicing->seq_len);
    stage->host_sums = take(&from, stage->params, sizeof(double));
    return from.used;
}

/* ---- the tables ------------------------------------------------------------------------------------------------------------ */

static int
holds(const tp_stage_config *config, const tp_param *param, int index)
{
    int head = tp_model_blocks(&config->model) - 1;
    if (param->block >= config->first_block && param->block < config->last_block)
        return 1;
    return index == 0 && config->model.tie_weights && config->last_block == head + 1;
}

static int
ends_in(const char *name, const char *suffix)
{
    size_t length = strlen(name), tail = strlen(suffix);
    return length >= tail && strcmp(name + length - tail, suffix) == 0;
}

/* Index in stage->param of the tensor of `block` whose name ends in `suffix`; -1: none. */
static int
find(const tp_stage *stage, int block, const char *suffix)
{
    for (int i = 0; i < stage->params; i++)
        if (stage->param[i].info.block == block && ends_in(stage->param[i].info.name, suffix))
            return i;
    return -1;
}

static void
describe_params(tp_stage *stage)
{
    const tp_stage_config *config = &stage->config;
    for (int index = 0; index < tp_model_params(&config->model); index++) {
        tp_param info;
        tp_model_param(&config->model, index, &info);
        if (!holds(config, &info, index))
            continue;
        stage_param *param = &stage->param[stage->params++];
        *param = (stage_param){.info = info, .index = index};
        int head = ends_in(info.name, "lm_head.weight") || (index == 0 && config->model.tie_weights);
        param->floats = (head ? tp_cuda_padded_vocab(&config->model) : info.rows) * info.cols;
        int product = ends_in(info.name, "c_attn.bias") || ends_in(info.name, "c_proj.bias") ||
                      ends_in(info.name, "c_fc.bias");
        param->has_copy = stage->dtype != TP_F32 && (info.is_matrix || product);
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

tp_status
tp_cuda_stage_describe(const tp_stage_config *config, tp_dtype dtype, tp_stage **out)
{
    int blocks = config->last_block - config->first_block, all = tp_model_blocks(&config->model);
    if (config->first_block < 0 || blocks < 1 || config->last_block > all)
        return tp_fail(TP_EVALUE, "a stage of blocks [%d, %d): a part of [0, %d) would be right", config->first_block,
                       config->last_block, all);
    size_t slots = (size_t)config->activation_slots, gslots = (size_t)config->gradient_slots;
    size_t params = (size_t)tp_model_params(&config->model);
    size_t bytes = sizeof(tp_stage) + (size_t)blocks * sizeof(stage_block) + params * sizeof(stage_param) +
                   (size_t)blocks * (slots * sizeof(block_activations) + gslots * sizeof(block_gradients)) +
                   (slots + gslots) * sizeof(void *);
    char *memory = calloc(1, bytes); /* tables, not tensors: outside the account */
    if (memory == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the tables of a stage");
    tp_stage *stage = (tp_stage *)(void *)memory;
    stage->config = *config;
    stage->dtype = dtype;
    stage->blocks = blocks;
    stage->block = (stage_block *)(void *)(memory + sizeof(tp_stage));
    stage->param = (stage_param *)(void *)(stage->block + blocks);
    char *at = (char *)(stage->param + params);
    for (int i = 0; i < blocks; i++) {
        stage->block[i].activations = (block_activations *)(void *)at;
        at += slots * sizeof(block_activations);
        stage->block[i].gradients = (block_gradients *)(void *)at;
        at += gslots * sizeof(block_gradients);
    }
    stage->output = (void **)(void *)at;
    stage->d_output = stage->output + slots;
    describe_params(stage);
    for (int i = 0; i < blocks; i++)
        describe_block(stage, i);
    *out = stage;
    return TP_OK;
}
