/* After the last backward: complete the gradients, measure them, update. */
#include "csrc/stage/parts.h"

#include <math.h>

static stage_block *
head_of(tp_stage *stage)
{
    stage_block *last = &stage->block[stage->blocks - 1];
    return last->kind == TP_HEAD ? last : NULL;
}

static stage_block *
embedding_of(tp_stage *stage)
{
    return stage->block[0].kind == TP_EMBEDDING ? &stage->block[0] : NULL;
}

int
tp_stage_is_tied_apart(const tp_stage *stage)
{
    int embedding = stage->block[0].kind == TP_EMBEDDING, head = stage->block[stage->blocks - 1].kind == TP_HEAD;
    if (!stage->config.model.tie_weights || embedding == head)
        return 0;
    return embedding ? 1 : 2;
}

static stage_param *
tied_param(tp_stage *stage)
{
    return &stage->param[embedding_of(stage) ? embedding_of(stage)->in : head_of(stage)->in];
}

float *
tp_stage_tied_head(tp_stage *stage, size_t *bytes)
{
    *bytes = (size_t)tied_param(stage)->floats * sizeof(float);
    return tied_param(stage)->grad;
}

float *
tp_stage_tied_rows(tp_stage *stage, size_t *bytes)
{
    const tp_slicing *slicing = stage->config.slicing;
    *bytes = (size_t)slicing->batch * (size_t)slicing->seq_len * (size_t)stage->config.model.n_embd * sizeof(float);
    return stage->embedding_rows;
}

void
tp_stage_finish_head(tp_stage *stage)
{
    stage_block *head = head_of(stage);
    if (head == NULL)
        return;
    stage_param *weight = &stage->param[head->in];
    tp_head_flush(stage, 0);
    tp_head_flush(stage, 1);
    if (!stage->tile[1].seen) /* sequences of one token have no backward rows */
        stage->be->ops->zero(stage->be, weight->floats, weight->grad);
    stage->be->ops->add(stage->be, weight->floats, stage->head_forward, weight->grad);
}

void
tp_stage_finish_gradients(tp_stage *stage)
{
    const tp_backend_ops *ops = stage->be->ops;
    const tp_model *model = &stage->config.model;
    stage_block *embedding = embedding_of(stage), *head = head_of(stage);
    int64_t rows = (int64_t)stage->config.slicing->batch * stage->config.slicing->seq_len, width = model->n_embd;
    if (embedding != NULL || (head != NULL && model->tie_weights)) {
        stage_param *wte = tied_param(stage);
        if (!model->tie_weights)
            ops->zero(stage->be, wte->floats, wte->grad);
        ops->scatter_add(stage->be, rows, width, model->vocab_size, stage->chain_tokens, stage->embedding_rows, width,
                         wte->grad);
    }
    if (embedding != NULL) {
        stage_param *wpe = &stage->param[embedding->out];
        ops->zero(stage->be, wpe->floats, wpe->grad);
        ops->scatter_add(stage->be, rows, width, model->block_size, stage->chain_positions, stage->embedding_rows,
                         width, wpe->grad);
    }
}

void
tp_stage_sumsq(tp_stage *stage, double *sums)
{
    int copy = tp_stage_is_tied_apart(stage) == 1;
    for (int i = 0; i < stage->params; i++)
        if (!(copy && stage->param[i].index == 0))
            sums[stage->param[i].index] = stage->be->ops->sumsq(stage->be, stage->param[i].floats, stage->param[i].grad);
}

void
tp_stage_update(tp_stage *stage, const tp_adamw *adamw, double grad_scale)
{
    double bias1 = 1 - pow(adamw->beta1, (double)adamw->step), bias2 = 1 - pow(adamw->beta2, (double)adamw->step);
    for (int i = 0; i < stage->params; i++) {
        stage_param *param = &stage->param[i];
        stage->be->ops->adamw(stage->be, param->floats, param->value, param->grad, param->m, param->v, (float)adamw->lr,
                              (float)adamw->beta1, (float)adamw->beta2, (float)adamw->eps,
                              (float)(param->info.is_matrix ? adamw->weight_decay : 0), (float)bias1, (float)bias2,
                              (float)grad_scale);
    }
    tp_stage_pack(stage);
}
