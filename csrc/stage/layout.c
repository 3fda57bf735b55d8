/* The memory of a stage: one arena, walked once to count and once to carve, so that the size that the plan predicts and
 * the size that the stage takes are the same code. */
#include "csrc/stage/stage.h"

static void *
layout_activations(const tp_stage_base *stage, const tp_stage_block *block, tp_activations *out, tp_stage_arena *from)
{
    int64_t rows = tp_stage_rows(stage), width = stage->config.model.n_embd;
    out->input = tp_lay_floats(from, rows * width);
    out->mean = tp_lay_floats(from, rows);
    out->rstd = tp_lay_floats(from, rows);
    if (block->kind == TP_ATTENTION)
        out->lse = tp_lay_floats(from, rows * stage->config.model.n_head);
    if (block->kind == TP_HEAD) {
        out->dx = tp_lay_floats(from, rows * width);
        out->loss = tp_lay(from, rows, sizeof(double));
    }
    return out->input;
}

static void
layout_gradients(const tp_stage_base *stage, const tp_stage_block *block, void *d_input, tp_gradients *out, tp_stage_arena *from)
{
    int64_t batch = stage->config.slicing->max_batch, rows = tp_stage_rows(stage), width = stage->config.model.n_embd;
    int apart = (rows - 3 * stage->slice_rows) * width > 2 * TP_ALIGN; /* it takes less, whatever two arrays are aligned to */
    out->d_input = d_input;
    out->dnorm = tp_lay_floats(from, batch * 2 * width);
    if (block->kind == TP_ATTENTION) {
        out->dqkv = tp_lay_floats(from, (apart ? stage->slice_rows : rows) * 3 * width);
        out->dkv = apart ? tp_lay_floats(from, rows * 2 * width) : NULL;
        out->delta = tp_lay_floats(from, rows * stage->config.model.n_head);
    }
}

static void
layout_head(tp_stage *stage, tp_stage_arena *from)
{
    const tp_model *model = &stage->base.config.model;
    const tp_stage_block *head = &stage->base.block[stage->base.blocks - 1];
    for (int i = 0; i < 2; i++) {
        stage->tile[i].logits = tp_lay_floats(from, (int64_t)TP_HEAD_TILE * tp_logits_stride(model));
        stage->tile[i].x = tp_lay_floats(from, (int64_t)TP_HEAD_TILE * model->n_embd);
    }
    stage->head_dx = tp_lay_floats(from, (int64_t)TP_HEAD_TILE * model->n_embd);
    stage->head_forward = tp_lay_floats(from, stage->base.param[head->in].floats);
}

int64_t
tp_stage_scratch_rows(const tp_slicing *slicing)
{
    int64_t rows = slicing->max_rows;
    for (int32_t q = 0; q < slicing->micros; q++) {
        int64_t piece = slicing->micro[q].batch == 1 ? TP_WEIGHT_ROWS : TP_ROW_GROUP;
        piece = piece < slicing->seq_len ? piece : slicing->seq_len;
        if (slicing->micro[q].slices > 1 && rows < piece)
            rows = piece;
    }
    return rows;
}

size_t
tp_stage_layout(tp_stage *stage, char *base)
{
    const tp_slicing *slicing = stage->base.config.slicing;
    int64_t tokens = tp_stage_tokens(&stage->base), width = stage->base.config.model.n_embd;
    int heads = tp_stage_heads(&stage->base);
    tp_stage_arena from = {base, 0, TP_ALIGN, stage->base.sizes.element};
    tp_lay_params(&stage->base, &from);
    if (stage->base.config.versions > 0) {
        tp_lay_versions(&stage->base, &from);
        stage->squares = tp_lay(&from, stage->base.params, sizeof *stage->squares);
    }
    if (stage->base.config.shards)
        stage->leaves = tp_lay(&from, stage->base.leaves, sizeof *stage->leaves);
    tp_lay_slots(&stage->base, &from, layout_activations, layout_gradients);
    stage->scratch = tp_lay_floats(&from, tp_stage_scratch_rows(slicing) * width);
    if (heads)
        layout_head(stage, &from);
    if (tp_stage_scatters(&stage->base)) {
        stage->base.embedding_rows = tp_lay_elements(&from, tokens * width);
        stage->chain_tokens = tp_lay(&from, tokens, sizeof(int32_t));
        stage->chain_positions = tp_lay(&from, tokens, sizeof(int32_t));
    }
    if (tp_stage_embeds(&stage->base) || heads) {
        stage->tokens = tp_lay(&from, tokens, sizeof(int32_t));
        stage->targets = tp_lay(&from, tokens, sizeof(int32_t));
        stage->positions = tp_lay(&from, tokens, sizeof(int32_t));
    }
    stage->sequence_loss = tp_lay(&from, slicing->batch, sizeof(double));
    return from.used;
}
