/* After the last backward: complete the gradients, measure them, update. */
#include "csrc/stage/stage.h"

#include <math.h>

/* Adds the head's two halves, once per gradient. */
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

/* Rows of d(embedding output) of `tokens` tokens, in canonical order from `first` on, to the embeddings of words and positions. */
static void
scatter_rows(tp_stage *stage, int64_t first, int64_t tokens)
{
    const tp_backend_ops *ops = stage->be->ops;
    const tp_model *model = &stage->base.config.model;
    int64_t width = model->n_embd;
    const tp_stage_param *wte = tp_stage_scatters(&stage->base) ? tp_stage_vocabulary(&stage->base) : NULL;
    const float *rows = (const float *)stage->base.embedding_rows + (wte == NULL ? 0 : first * width);
    if (wte != NULL && wte->grad != NULL) {
        if (!model->tie_weights)
            ops->zero(stage->be, wte->floats, wte->grad);
        ops->scatter_add(stage->be, tokens, width, model->vocab_size, stage->chain_tokens + first, rows, width, wte->grad);
    }
    if (tp_stage_embeds(&stage->base)) {
        const tp_stage_param *wpe = &stage->base.param[stage->base.block[0].out];
        ops->zero(stage->be, wpe->floats, wpe->grad);
        ops->scatter_add(stage->be, tokens, width, model->block_size, stage->chain_positions + first, rows, width, wpe->grad);
    }
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
    if (!tp_stage_is_tied_apart(&stage->base)) /* else tp_stage_tied has */
        finish_head(stage);
    scatter_rows(stage, 0, tp_stage_tokens(&stage->base));
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
tp_stage_measure(tp_stage *stage)
{
    const tp_stage_base *base = &stage->base;
    if (!base->config.shards)
        return TP_OK;
    double *own = base->squares + base->config.member * base->squares_each;
    for (int i = 0; i < base->params; i++) {
        tp_shard_part part = tp_stage_shard_part(base, i);
        if (part.floats > 0)
            stage->be->ops->sumsq_leaves(stage->be, part.floats, base->param[i].grad + part.begin, own);
        own += tp_stage_leaves(part.floats);
    }
    return TP_OK;
}

/* As sumsq of each tensor adds them up. */
static void
sum_leaves(const tp_stage *stage, double *sums)
{
    const tp_stage_base *base = &stage->base;
    const double *leaf = stage->leaves;
    tp_stage_order_leaves(base, base->squares, stage->leaves);
    for (int i = 0; i < base->params; i++) {
        double sum = 0;
        if (!tp_stage_answers_for(base, i))
            continue;
        for (int64_t n = tp_stage_leaves(base->param[i].floats); n > 0; n--)
            sum += *leaf++;
        sums[base->param[i].index] = sum;
    }
}

tp_status
tp_stage_sumsq(tp_stage *stage, double *sums)
{
    if (stage->base.config.shards) {
        sum_leaves(stage, sums);
        return TP_OK;
    }
    for (int i = 0; i < stage->base.params; i++) {
        const tp_stage_param *param = &stage->base.param[i];
        if (stage->squares != NULL)
            sums[param->index] = stage->squares[i];
        else if (tp_stage_answers_for(&stage->base, i))
            sums[param->index] = stage->be->ops->sumsq(stage->be, param->floats, param->grad);
    }
    return TP_OK;
}

/* `floats` of the i-th tensor from `begin` on, from another version of its value, or its own, and its gradient. */
static void
update_floats(tp_stage *stage, int i, int64_t begin, int64_t floats, const float *from, float *m, float *v, const tp_adamw *adamw,
              double grad_scale)
{
    const tp_stage_param *param = &stage->base.param[i];
    double bias1 = 1 - pow(adamw->beta1, (double)adamw->step), bias2 = 1 - pow(adamw->beta2, (double)adamw->step);
    stage->be->ops->adamw(stage->be, floats, from + begin, param->value + begin, param->grad + begin, m, v, (float)adamw->lr,
                          adamw->beta1, adamw->beta2, (float)adamw->eps,
                          (float)(param->info.is_matrix ? adamw->weight_decay : 0), (float)bias1, (float)bias2,
                          (float)grad_scale);
}

/* And what products read of it. */
static void
update_tensor(tp_stage *stage, int i, const float *from, const tp_adamw *adamw, double grad_scale)
{
    const tp_stage_param *param = &stage->base.param[i];
    update_floats(stage, i, 0, param->floats, from, param->m, param->v, adamw, grad_scale);
    tp_stage_pack(stage, param); /* while its value may still be in a cache */
}

static void
update_shard(tp_stage *stage, int i, const tp_adamw *adamw, double grad_scale)
{
    const tp_stage_base *base = &stage->base;
    tp_shard_part part = tp_stage_shard_part(base, i);
    if (part.floats > 0)
        update_floats(stage, i, part.begin, part.floats, base->param[i].value, base->moments[0] + part.at, base->moments[1] + part.at,
                      adamw, grad_scale);
}

tp_status
tp_stage_update(tp_stage *stage, const tp_adamw *adamw, double grad_scale)
{
    for (int i = 0; i < stage->base.params; i++)
        if (stage->base.config.shards)
            update_shard(stage, i, adamw, grad_scale);
        else if (tp_stage_answers_for(&stage->base, i))
            update_tensor(stage, i, stage->base.param[i].value, adamw, grad_scale);
    return TP_OK;
}

void
tp_stage_take_moments(tp_stage *stage, int i, tp_state state)
{
    const tp_stage_base *base = &stage->base;
    tp_shard_part part = tp_stage_shard_part(base, i);
    if (part.floats > 0)
        stage->be->ops->copy(stage->be, part.floats, base->param[i].grad + part.begin, base->moments[state == TP_STATE_V] + part.at);
}

tp_status
tp_stage_spread(tp_stage *stage, tp_state state)
{
    const tp_stage_base *base = &stage->base;
    for (int i = 0; i < base->params; i++) {
        tp_shard_part part = tp_stage_shard_part(base, i);
        if (part.floats > 0)
            stage->be->ops->copy(stage->be, part.floats, base->moments[state == TP_STATE_V] + part.at, base->param[i].grad + part.begin);
    }
    return TP_OK;
}

/* The gradient of a micro-batch alone is complete; the head's tiles begin anew. */
static void
finish_micro(tp_stage *stage, int micro)
{
    const tp_slicing *slicing = stage->base.config.slicing;
    const tp_micro *cut = &slicing->micro[micro];
    finish_head(stage);
    stage->tile[0].seen = stage->tile[1].seen = 0;
    scatter_rows(stage, cut->first_seq * slicing->seq_len, (int64_t)cut->batch * slicing->seq_len);
}

tp_status
tp_stage_update_micro(tp_stage *stage, int micro, const tp_adamw *adamw, double grad_clip)
{
    tp_stage_base *base = &stage->base;
    double norm2 = 0;
    finish_micro(stage, micro);
    for (int i = 0; i < base->params; i++) {
        double sum = stage->be->ops->sumsq(stage->be, base->param[i].floats, base->param[i].grad);
        stage->squares[i] += sum;
        norm2 += sum;
    }
    if (!isfinite(norm2))
        return tp_stage_refuse_norm(base, micro, norm2);
    double scale = tp_adamw_clip(grad_clip, sqrt(norm2));
    int before = tp_stage_advance(base, micro);
    for (int i = 0; i < base->params; i++)
        update_tensor(stage, i, tp_stage_version(base, i, before), adamw, scale);
    return TP_OK;
}
