/* The memory of a stage: one arena, walked once to count and once to carve, so that the size that the plan predicts and
 * the size that the stage takes are the same code. */
#include "csrc/stage/parts.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    char *base;
    size_t used;
} arena;

static void *
take(arena *from, int64_t count, size_t size)
{
    void *at = from->base == NULL ? NULL : from->base + from->used;
    from->used += tp_align_bytes((size_t)count * size);
    return at;
}

static float *
floats(arena *from, int64_t count)
{
    return take(from, count, sizeof(float));
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
        param->packed_t = param->needs_t ? floats(from, param->t_floats) : NULL;
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
    out->input = floats(from, rows * width);
    out->mean = floats(from, rows);
    out->rstd = floats(from, rows);
    if (kind == TP_ATTENTION) {
        out->qkv = floats(from, rows * 3 * width);
        out->o = floats(from, rows * width);
        out->lse = floats(from, rows * model->n_head);
    } else if (kind == TP_FFN) {
        out->h = floats(from, rows * 4 * width);
        out->g = floats(from, rows * 4 * width);
    } else {
        out->dx = floats(from, rows * width);
        out->loss = take(from, rows, sizeof(double));
    }
}

static void
layout_gradients(const tp_stage *stage, tp_block_kind kind, block_gradients *out, arena *from)
{
    const tp_model *model = &stage->config.model;
    int64_t batch = stage->config.slicing->max_batch, rows = batch * stage->config.slicing->seq_len, width = model->n_embd;
    *out = (block_gradients){0};
    if (kind == TP_EMBEDDING)
        return;
    out->d_input = floats(from, rows * width);
    out->dnorm = floats(from, batch * 2 * width);
    if (kind == TP_ATTENTION) {
        out->dqkv = floats(from, rows * 3 * width);
        out->d_o = floats(from, rows * width);
        out->delta = floats(from, rows * model->n_head);
    }
}

static void
layout_head(tp_stage *stage, arena *from)
{
    const tp_model *model = &stage->config.model;
    const stage_block *head = &stage->block[stage->blocks - 1];
    for (int i = 0; i < 2; i++) {
        stage->tile[i].logits = floats(from, (int64_t)TP_HEAD_TILE * tp_logits_stride(model));
        stage->tile[i].x = floats(from, (int64_t)TP_HEAD_TILE * model->n_embd);
    }
    stage->head_dx = floats(from, (int64_t)TP_HEAD_TILE * model->n_embd);
    stage->head_forward = floats(from, stage->param[head->in].floats);
}

size_t
tp_stage_layout(tp_stage *stage, char *base)
{
    const tp_slicing *slicing = stage->config.slicing;
    const tp_model *model = &stage->config.model;
    arena from = {base, 0};
    int64_t rows = (int64_t)slicing->max_batch * slicing->seq_len, tokens = (int64_t)slicing->batch * slicing->seq_len;
    int has_head = stage->block[stage->blocks - 1].kind == TP_HEAD, has_embedding = stage->block[0].kind == TP_EMBEDDING;
    layout_params(stage, &from);
    for (int block = 0; block < stage->blocks; block++) {
        stage_block *self = &stage->block[block];
        for (int slot = 0; slot < stage->config.activation_slots; slot++)
            layout_activations(stage, self->kind, &self->activations[slot], &from);
        for (int slot = 0; slot < stage->config.gradient_slots; slot++)
            layout_gradients(stage, self->kind, &self->gradients[slot], &from);
    }
    for (int slot = 0; slot < stage->config.activation_slots; slot++)
        stage->output[slot] = has_head ? NULL : floats(&from, rows * model->n_embd);
    for (int slot = 0; slot < stage->config.gradient_slots; slot++)
        stage->d_output[slot] = has_head ? NULL : floats(&from, rows * model->n_embd);
    stage->scratch = floats(&from, (int64_t)slicing->max_rows * model->n_embd);
    if (has_head)
        layout_head(stage, &from);
    if (has_embedding || (has_head && model->tie_weights)) {
        stage->embedding_rows = floats(&from, tokens * model->n_embd);
        stage->chain_tokens = take(&from, tokens, sizeof(int32_t));
        stage->chain_positions = take(&from, tokens, sizeof(int32_t));
    }
    if (has_embedding || has_head) {
        stage->tokens = take(&from, tokens, sizeof(int32_t));
        stage->targets = take(&from, tokens, sizeof(int32_t));
        stage->positions = take(&from, tokens, sizeof(int32_t));
    }
    stage->sequence_loss = take(&from, slicing->batch, sizeof(double));
    return from.used;
}
