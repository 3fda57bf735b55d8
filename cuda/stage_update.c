/* After the last backward: complete the gradients, measure them, update. */
#include "cuda/stage.h"

#include <math.h>

static stage_param *
vocabulary_weight(tp_stage *stage)
{
    return &stage->param[tp_cuda_stage_embeds(stage) ? stage->block[0].in : stage->block[stage->blocks - 1].in];
}

tp_status
tp_cuda_stage_tied(tp_stage *stage, tp_tied *out)
{
    const tp_slicing *slicing = stage->config.slicing;
    *out = (tp_tied){0};
    if (!stage->config.model.tie_weights || tp_cuda_stage_embeds(stage) == tp_cuda_stage_heads(stage))
        return TP_OK;
    size_t rows = (size_t)slicing->batch * (size_t)slicing->seq_len * (size_t)stage->config.model.n_embd;
    tp_tied head = {.out = vocabulary_weight(stage)->grad,
                    .in = stage->embedding_rows,
                    .out_bytes = (size_t)vocabulary_weight(stage)->floats * sizeof(float),
                    .in_bytes = rows * tp_dtype_bytes(stage->dtype)};
    *out = tp_cuda_stage_heads(stage) ? head : (tp_tied){head.in, head.out, head.in_bytes, head.out_bytes};
    return TP_OK;
}

static tp_status
scatter(tp_stage *stage, stage_param *param, const row_groups *groups, int64_t count)
{
    int64_t width = stage->config.model.n_embd;
    return tp_cuda_embedding_gradient(stage->rank->stream, stage->dtype, width, count, groups->index, groups->start,
                                      groups->rows, stage->embedding_rows, width, param->grad, width);
}

static tp_status
clear_gradient(tp_stage *stage, stage_param *param)
{
    return tp_cuda_memset(stage->rank->cuda, stage->rank->stream, param->grad, 0,
                          (size_t)param->floats * sizeof(float));
}

tp_status
tp_cuda_stage_finish(tp_stage *stage)
{
    if (tp_cuda_stage_scatters(stage)) {
        if (!stage->config.model.tie_weights)
            TP_TRY(clear_gradient(stage, vocabulary_weight(stage)));
        TP_TRY(scatter(stage, vocabulary_weight(stage), &stage->on_device.by_token, stage->token_groups));
    }
    if (tp_cuda_stage_embeds(stage)) {
        stage_param *positions = &stage->param[stage->block[0].out];
        TP_TRY(clear_gradient(stage, positions));
        TP_TRY(scatter(stage, positions, &stage->on_device.by_position, stage->position_groups));
    }
    return TP_OK;
}

tp_status
tp_cuda_stage_loss(tp_stage *stage, double *out)
{
    const tp_slicing *slicing = stage->config.slicing;
    int64_t seq_len = slicing->seq_len, all = slicing->batch * seq_len;
    *out = 0;
    if (!tp_cuda_stage_heads(stage))
        return TP_OK;
    TP_TRY(tp_cuda_copy(stage->rank->cuda, stage->rank->stream, stage->host_loss, stage->loss,
                        (size_t)all * sizeof(float), TP_CUDA_TO_HOST));
    TP_TRY(tp_cuda_synchronize(stage->rank->cuda, stage->rank->stream));
    double total = 0;
    for (int32_t q = 0; q < slicing->micros; q++) {
        const tp_micro *micro = &slicing->micro[q];
        for (int64_t s = 0; s < micro->batch; s++) {
            double sum = 0;
            for (int64_t t = 0; t < seq_len; t++)
                sum += (double)stage->host_loss[micro->first_seq * seq_len + tp_micro_row(micro, seq_len, t, s)];
            total += sum;
        }
    }
    *out = total;
    return TP_OK;
}

tp_status
tp_cuda_stage_sumsq(tp_stage *stage, double *sums)
{
    int copy = tp_cuda_stage_embeds(stage) && !tp_cuda_stage_heads(stage) && stage->config.model.tie_weights;
    for (int i = 0; i < stage->params; i++) {
        const stage_param *param = &stage->param[i];
        TP_TRY(tp_cuda_sumsq(stage->rank->stream, param->info.rows * param->info.cols, param->grad, stage->sums + i,
                             stage->rank->partial));
    }
    TP_TRY(tp_cuda_copy(stage->rank->cuda, stage->rank->stream, stage->host_sums, stage->sums,
                        (size_t)stage->params * sizeof(double), TP_CUDA_TO_HOST));
    TP_TRY(tp_cuda_synchronize(stage->rank->cuda, stage->rank->stream));
    for (int i = 0; i < stage->params; i++)
        if (!(copy && stage->param[i].index == 0))
            sums[stage->param[i].index] = stage->host_sums[i];
    return TP_OK;
}

tp_status
tp_cuda_stage_update(tp_stage *stage, const tp_adamw *adamw, double grad_scale)
{
    tp_adamw_args args = {.lr = (float)adamw->lr,
                          .beta1 = (float)adamw->beta1,
                          .beta2 = (float)adamw->beta2,
                          .eps = (float)adamw->eps,
                          .bias1 = (float)(1 - pow(adamw->beta1, (double)adamw->step)),
                          .bias2 = (float)(1 - pow(adamw->beta2, (double)adamw->step)),
                          .grad_scale = (float)grad_scale};
    for (int i = 0; i < stage->params; i++) {
        stage_param *param = &stage->param[i];
        args.weight_decay = (float)(param->info.is_matrix ? adamw->weight_decay : 0);
        TP_TRY(tp_cuda_adamw(stage->rank->stream, stage->dtype, param->info.rows * param->info.cols, param->value,
                             param->grad, param->m, param->v, param->copy, &args, NULL));
    }
    return TP_OK;
}
