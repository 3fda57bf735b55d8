/* After the last backward: complete the gradients, measure them, update. */
#include "csrc/stage/stage.h"

#include <math.h>

/* Adds the head's two halves, once per step. */
static void
finish_head(tp_stage *stage)
{
    if (!tp_stage_heads(&stage->base))
        return;
    const tp_stage_param *weight = &stage->base.param[stage->base.block[stage->base.blocks - 1].in];
    tp_head_flush(stage, 0, 1);
    tp_head_flush(stage, 1, 1);
    if (!stage->tile[1].seen) /* sequences of one token have no backward rows */
        stage->be->ops->zero(stage->be, weight->floats, weight->grad);
    stage->be->ops->add(stage->be, weight->floats, stage->head_forward, weight->grad);
}

tp_status
tp_stage_tied(tp_stage *stage, tp_tied *out)
{
    if (tp_stage_is_tied_apart(&stage->base))
        finish_head(stage);
    tp_stage_tied_ends(&stage->base, out);
    return TP_OK;
}

tp_status
tp_stage_give_tied(tp_stage *stage, tp_tied *out)
{
    const tp_stage_param *wte = tp_stage_is_tied_apart(&stage->base) ? tp_stage_vocabulary(&stage->base) : NULL;
    tp_stage_tied_values(&stage->base, wte == NULL ? NULL : wte->value, wte == NULL ? 0 : (size_t)wte->floats * sizeof(float), out);
    return TP_OK;
}

tp_status
tp_stage_finish(tp_stage *stage)
{
    const tp_backend_ops *ops = stage->be->ops;
    const tp_model *model = &stage->base.config.model;
    int64_t rows = tp_stage_tokens(&stage->base), width = model->n_embd;
    if (!tp_stage_is_tied_apart(&stage->base)) /* else tp_stage_tied has */
        finish_head(stage);
    const tp_stage_param *wte = tp_stage_scatters(&stage->base) ? tp_stage_vocabulary(&stage->base) : NULL;
    if (wte != NULL && wte->grad != NULL) {
        if (!model->tie_weights)
            ops->zero(stage->be, wte->floats, wte->grad);
        ops->scatter_add(stage->be, rows, width, model->vocab_size, stage->chain_tokens, stage->base.embedding_rows,
                         width, wte->grad);
    }
    if (tp_stage_embeds(&stage->base)) {
        const tp_stage_param *wpe = &stage->base.param[stage->base.block[0].out];
        ops->zero(stage->be, wpe->floats, wpe->grad);
        ops->scatter_add(stage->be, rows, width, model->block_size, stage->chain_positions, stage->base.embedding_rows,
                         width, wpe->grad);
    }
    return TP_OK;
}

tp_status
tp_stage_loss(tp_stage *stage, double *out)
{
    *out = 0;
    for (int32_t s = 0; s < stage->base.config.slicing->batch; s++)
        *out += stage->sequence_loss[s];
    return TP_OK;
}

tp_status
tp_stage_sumsq(tp_stage *stage, double *sums)
{
    for (int i = 0; i < stage->base.params; i++) {
        const tp_stage_param *param = &stage->base.param[i];
        if (tp_stage_answers_for(&stage->base, i))
            sums[param->index] = stage->be->ops->sumsq(stage->be, param->floats, param->grad);
    }
    return TP_OK;
}

tp_status
tp_stage_update(tp_stage *stage, const tp_adamw *adamw, double grad_scale)
{
    double bias1 = 1 - pow(adamw->beta1, (double)adamw->step), bias2 = 1 - pow(adamw->beta2, (double)adamw->step);
    for (int i = 0; i < stage->base.params; i++) {
        const tp_stage_param *param = &stage->base.param[i];
        if (!tp_stage_answers_for(&stage->base, i))
            continue;
        stage->be->ops->adamw(stage->be, param->floats, param->value, param->grad, param->m, param->v, (float)adamw->lr,
                              (float)adamw->beta1, (float)adamw->beta2, (float)adamw->eps,
                              (float)(param->info.is_matrix ? adamw->weight_decay : 0), (float)bias1, (float)bias2,
                              (float)grad_scale);
        tp_stage_pack(stage, param); /* while its value may still be in a cache */
    }
    return TP_OK;
}
