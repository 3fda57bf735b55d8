/* After the last backward: complete the gradients, measure them, update. */
#include "cuda/stage.h"

#include <math.h>

static tp_status
scatter(tp_stage *stage, const tp_stage_param *param, const row_groups *groups, int64_t count)
{
    int64_t width = stage->base.config.model.n_embd;
    return tp_cuda_embedding_gradient(stage->rank->stream, stage->dtype, width, count, groups->index, groups->start,
                                      groups->rows, stage->base.embedding_rows, width, param->grad, width);
}

static tp_status
clear_gradient(tp_stage *stage, const tp_stage_param *param)
{
    return tp_cuda_memset(stage->rank->cuda, stage->rank->stream, param->grad, 0,
                          (size_t)param->floats * sizeof(float));
}

tp_status
tp_cuda_stage_finish(tp_stage *stage)
{
    const tp_stage_param *wte = tp_stage_scatters(&stage->base) ? tp_stage_vocabulary(&stage->base) : NULL;
    if (wte != NULL && wte->grad != NULL) {
        if (!stage->base.config.model.tie_weights)
            TP_TRY(clear_gradient(stage, wte));
        TP_TRY(scatter(stage, wte, &stage->on_device.by_token, stage->token_groups));
    }
    if (tp_stage_embeds(&stage->base)) {
        const tp_stage_param *positions = &stage->base.param[stage->base.block[0].out];
        TP_TRY(clear_gradient(stage, positions));
        TP_TRY(scatter(stage, positions, &stage->on_device.by_position, stage->position_groups));
    }
    return TP_OK;
}

tp_status
tp_cuda_stage_loss(tp_stage *stage, double *out)
{
    const tp_slicing *slicing = stage->base.config.slicing;
    int64_t seq_len = slicing->seq_len;
    *out = 0;
    if (!tp_stage_heads(&stage->base))
        return TP_OK;
    TP_TRY(tp_cuda_copy(stage->rank->cuda, stage->rank->stream, stage->host_loss, stage->loss,
                        (size_t)tp_stage_tokens(&stage->base) * sizeof(float), TP_CUDA_TO_HOST));
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
    for (int i = 0; i < stage->base.params; i++) {
        const tp_stage_param *param = &stage->base.param[i];
        if (!tp_stage_answers_for(&stage->base, i))
            continue;
        TP_TRY(tp_cuda_sumsq(stage->rank->stream, param->info.rows * param->info.cols, param->grad, stage->sums + i,
                             stage->rank->partial));
    }
    TP_TRY(tp_cuda_copy(stage->rank->cuda, stage->rank->stream, stage->host_sums, stage->sums,
                        (size_t)stage->base.params * sizeof(double), TP_CUDA_TO_HOST));
    TP_TRY(tp_cuda_synchronize(stage->rank->cuda, stage->rank->stream));
    for (int i = 0; i < stage->base.params; i++)
        if (tp_stage_answers_for(&stage->base, i))
            sums[stage->base.param[i].index] = stage->host_sums[i];
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
    for (int i = 0; i < stage->base.params; i++) {
        const tp_stage_param *param = &stage->base.param[i];
        if (!tp_stage_answers_for(&stage->base, i))
            continue;
        args.weight_decay = (float)(param->info.is_matrix ? adamw->weight_decay : 0);
        TP_TRY(tp_cuda_adamw(stage->rank->stream, stage->dtype, param->info.rows * param->info.cols, param->value,
                             param->grad, param->m, param->v, param->copy, &args, NULL));
    }
    return TP_OK;
}
