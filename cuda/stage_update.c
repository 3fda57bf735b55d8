/* After the last backward: complete the gradients, measure their norm, update the weights. */
#include "cuda/stage.h"

#include <math.h>
#include <stdlib.h>

/* ---- tensors in lists ---------------------------------------------------------------------------------------------------------- */

/* This replica's: products read what is copied once all values are gathered. */
static tp_cuda_tensor
shard_of(const tp_stage_base *base, int i)
{
    const tp_stage_param *param = &base->param[i];
    const tp_shard_part part = tp_stage_shard_part(base, i);
    if (part.floats == 0)
        return (tp_cuda_tensor){0};
    return (tp_cuda_tensor){.n = part.floats,
                            .grad = param->grad + part.begin,
                            .value = param->value + part.begin,
                            .m = base->moments[0] + part.at,
                            .v = base->moments[1] + part.at,
                            .decays = param->info.is_matrix};
}

static tp_cuda_tensor
tensor_of(const tp_stage_base *base, int i, int version)
{
    const tp_stage_param *param = &base->param[i];
    if (base->config.shards)
        return shard_of(base, i);
    if (!tp_stage_answers_for(base, i))
        return (tp_cuda_tensor){0};
    return (tp_cuda_tensor){.n = param->info.rows * param->info.cols,
                            .grad = param->grad,
                            .value = tp_stage_version(base, i, version),
                            .m = param->m,
                            .v = param->v,
                            .copy = tp_stage_version_copy(base, i, version),
                            .decays = param->info.is_matrix};
}

/* With the values of a version. */
static tp_cuda_tensors
list_of(const tp_stage *stage, int version)
{
    return (tp_cuda_tensors){stage->base.params, stage->leaves, stage->tensors + (int64_t)version * stage->base.params, stage->owner};
}

static tp_status
list_tensors(tp_stage *stage, tp_cuda_tensor *tensor, int32_t *owner)
{
    const tp_stage_base *base = &stage->base;
    const int lists = tp_cuda_lists(base);
    for (int version = 0; version < lists; version++) {
        tp_cuda_tensor *of = tensor + (int64_t)version * base->params;
        for (int i = 0; i < base->params; i++)
            of[i] = tensor_of(base, i, version);
        tp_cuda_list_tensors(base->params, of, owner);
    }
    TP_TRY(tp_cuda_copy(stage->rank->cuda, stage->rank->stream, stage->tensors, tensor,
                        (size_t)lists * (size_t)base->params * sizeof *tensor, TP_CUDA_TO_DEVICE));
    TP_TRY(tp_cuda_copy(stage->rank->cuda, stage->rank->stream, stage->owner, owner, (size_t)stage->leaves * sizeof *owner,
                        TP_CUDA_TO_DEVICE));
    return tp_cuda_synchronize(stage->rank->cuda, stage->rank->stream);
}

tp_status
tp_cuda_stage_list(tp_stage *stage)
{
    const size_t rows = (size_t)tp_cuda_lists(&stage->base) * (size_t)stage->base.params;
    tp_cuda_tensor *tensor = calloc(rows, sizeof *tensor);
    int32_t *owner = calloc((size_t)stage->leaves + 1, sizeof *owner);
    tp_status status = tensor != NULL && owner != NULL
                           ? list_tensors(stage, tensor, owner)
                           : tp_fail(TP_EMEMORY, "no host memory to list %zu tensors of %lld leaves", rows, (long long)stage->leaves);
    free(tensor);
    free(owner);
    return status;
}

/* ---- a step -------------------------------------------------------------------------------------------------------------------- */

/* Add the rows of the i-th sum to the parameter's gradient. */
static tp_status
scatter(tp_stage *stage, const tp_stage_param *param, const row_groups *all, const int64_t *counts, int i)
{
    int64_t width = stage->base.config.model.n_embd;
    stage_sum sum = tp_cuda_sum(&stage->base, i);
    row_groups groups = tp_cuda_groups(all, sum, i);
    return tp_cuda_embedding_gradient(stage->rank->stream, stage->dtype, width, counts[i], groups.index, groups.start, groups.rows,
                                      tp_cuda_row(stage, stage->base.embedding_rows, sum.first, width), width, param->grad, width);
}

static tp_status
clear_gradient(tp_stage *stage, const tp_stage_param *param)
{
    return tp_cuda_memset(stage->rank->cuda, stage->rank->stream, param->grad, 0,
                          (size_t)param->floats * sizeof(float));
}

/* What scatter adds to. A tied vocabulary has the head's part. */
static tp_status
clear_scattered(tp_stage *stage)
{
    const tp_stage_param *wte = tp_stage_scatters(&stage->base) ? tp_stage_vocabulary(&stage->base) : NULL;
    if (wte != NULL && wte->grad != NULL && !stage->base.config.model.tie_weights)
        TP_TRY(clear_gradient(stage, wte));
    return tp_stage_embeds(&stage->base) ? clear_gradient(stage, &stage->base.param[stage->base.block[0].out]) : TP_OK;
}

static tp_status
scatter_all(tp_stage *stage, int i)
{
    const tp_stage_param *wte = tp_stage_scatters(&stage->base) ? tp_stage_vocabulary(&stage->base) : NULL;
    if (wte != NULL && wte->grad != NULL)
        TP_TRY(scatter(stage, wte, &stage->on_device.by_token, stage->token_groups, i));
    if (tp_stage_embeds(&stage->base))
        TP_TRY(scatter(stage, &stage->base.param[stage->base.block[0].out], &stage->on_device.by_position, stage->position_groups, i));
    return TP_OK;
}

/* By micro-batches: gradients are cleared, measured and used for each, behind its backward. */
static int
by_micros(const tp_stage *stage)
{
    return stage->base.config.versions > 0;
}

tp_status
tp_cuda_stage_clear(tp_stage *stage)
{
    return by_micros(stage) || stage->preparing ? TP_OK : clear_scattered(stage);
}

tp_status
tp_cuda_stage_finish(tp_stage *stage)
{
    return scatter_all(stage, 0);
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

/* Sums of squares of the gradients, for their norm, into stage->sums. */
static tp_status
measure(tp_stage *stage)
{
    const tp_cuda_tensors list = list_of(stage, 0); /* all versions have one gradient */
    const tp_stage_base *base = &stage->base;
    if (base->config.shards)
        return tp_cuda_sumsq_leaves(stage->rank->stream, &list, base->squares + base->config.member * base->squares_each);
    return tp_cuda_sumsq(stage->rank->stream, &list, stage->sums, stage->partial);
}

tp_status
tp_cuda_stage_measure(tp_stage *stage)
{
    if (!by_micros(stage))
        TP_TRY(measure(stage));
    if (stage->base.config.shards) /* the other replicas' are to come */
        return TP_OK;
    if (by_micros(stage))
        TP_TRY(tp_cuda_copy(stage->rank->cuda, stage->rank->stream, stage->host_clipped, stage->clipped, sizeof *stage->clipped,
                            TP_CUDA_TO_HOST));
    return tp_cuda_copy(stage->rank->cuda, stage->rank->stream, stage->host_sums, by_micros(stage) ? stage->squares : stage->sums,
                        (size_t)stage->base.params * sizeof(double), TP_CUDA_TO_HOST);
}

static tp_status
sum_leaves(tp_stage *stage, double *sums)
{
    const tp_stage_base *base = &stage->base;
    const double *leaf = stage->host_leaves;
    TP_TRY(tp_cuda_copy(stage->rank->cuda, stage->rank->stream, stage->host_squares, base->squares,
                        (size_t)(base->config.replicas * base->squares_each) * sizeof(double), TP_CUDA_TO_HOST));
    TP_TRY(tp_cuda_synchronize(stage->rank->cuda, stage->rank->stream));
    tp_stage_order_leaves(base, stage->host_squares, stage->host_leaves);
    for (int i = 0; i < base->params; i++) {
        if (!tp_stage_answers_for(base, i))
            continue;
        const int64_t leaves = tp_stage_leaves(base->param[i].floats);
        sums[base->param[i].index] = tp_cuda_sum_leaves(leaves, leaf);
        leaf += leaves;
    }
    return TP_OK;
}

tp_status
tp_cuda_stage_sumsq(tp_stage *stage, double *sums)
{
    if (stage->base.config.shards)
        return sum_leaves(stage, sums);
    TP_TRY(tp_cuda_synchronize(stage->rank->cuda, stage->rank->stream));
    if (by_micros(stage) && stage->host_clipped->refused != 0)
        return tp_stage_refuse_norm(&stage->base, stage->host_clipped->refused - 1, stage->host_clipped->norm2);
    for (int i = 0; i < stage->base.params; i++)
        if (tp_stage_answers_for(&stage->base, i))
            sums[stage->base.param[i].index] = stage->host_sums[i];
    return TP_OK;
}

static tp_adamw_args
args_of(const tp_adamw *adamw, double grad_scale)
{
    return (tp_adamw_args){.beta1 = adamw->beta1,
                           .beta2 = adamw->beta2,
                           .lr = (float)adamw->lr,
                           .eps = (float)adamw->eps,
                           .weight_decay = (float)adamw->weight_decay,
                           .bias1 = (float)(1 - pow(adamw->beta1, (double)adamw->step)),
                           .bias2 = (float)(1 - pow(adamw->beta2, (double)adamw->step)),
                           .grad_scale = (float)grad_scale};
}

tp_status
tp_cuda_stage_update(tp_stage *stage, const tp_adamw *adamw, double grad_scale)
{
    const tp_adamw_args args = args_of(adamw, grad_scale);
    const tp_cuda_tensors list = list_of(stage, stage->base.selected);
    return tp_cuda_adamw(stage->rank->stream, stage->dtype, &list, list.tensor, &args, NULL);
}

/* Of the i-th tensor, between its shard's moments and the gradient's place. */
static tp_status
move_moments(tp_stage *stage, int i, tp_state state, int out)
{
    const tp_stage_base *base = &stage->base;
    const tp_shard_part part = tp_stage_shard_part(base, i);
    if (part.floats == 0)
        return TP_OK;
    float *moments = base->moments[state == TP_STATE_V] + part.at, *place = base->param[i].grad + part.begin;
    return tp_cuda_copy(stage->rank->cuda, stage->rank->stream, out ? place : moments, out ? moments : place,
                        (size_t)part.floats * sizeof(float), TP_CUDA_ON_DEVICE);
}

tp_status
tp_cuda_stage_take_moments(tp_stage *stage, int i, tp_state state)
{
    return move_moments(stage, i, state, 0);
}

tp_status
tp_cuda_stage_spread(tp_stage *stage, tp_state state)
{
    TP_TRY(tp_cuda_bind(stage->rank->cuda));
    for (int i = 0; i < stage->base.params; i++)
        TP_TRY(move_moments(stage, i, state, 1));
    return TP_OK;
}

/* ---- updates by micro-batches ------------------------------------------------------------------------------------------------ */

tp_status
tp_cuda_stage_update_micro(tp_stage *stage, int micro, const tp_adamw *adamw, double grad_clip)
{
    const tp_adamw_args args = args_of(adamw, 1);
    TP_TRY(clear_scattered(stage));
    TP_TRY(scatter_all(stage, micro));
    TP_TRY(measure(stage));
    TP_TRY(tp_cuda_clip(stage->rank->stream, stage->base.params, micro, stage->sums, stage->squares, grad_clip, &args,
                        stage->clipped));
    const tp_cuda_tensors before = list_of(stage, tp_stage_advance(&stage->base, micro)), list = list_of(stage, stage->base.newest);
    return tp_cuda_adamw(stage->rank->stream, stage->dtype, &list, before.tensor, NULL, &stage->clipped->args);
}

tp_status
tp_cuda_stage_settle_versions(tp_stage *stage)
{
    const tp_stage_base *base = &stage->base;
    if (base->newest == 0)
        return TP_OK;
    tp_stage_select(&stage->base, -1, 0);
    for (int i = 0; i < base->params; i++) {
        const tp_stage_param *param = &base->param[i];
        TP_TRY(tp_cuda_copy(stage->rank->cuda, stage->rank->stream, param->first_value, param->value,
                            (size_t)param->floats * sizeof(float), TP_CUDA_ON_DEVICE));
        if (param->copy != NULL)
            TP_TRY(tp_cuda_copy(stage->rank->cuda, stage->rank->stream, param->first_copy, param->copy,
                                (size_t)param->copy_count * base->sizes.element, TP_CUDA_ON_DEVICE));
    }
    stage->base.newest = 0;
    tp_stage_select(&stage->base, -1, 0);
    return TP_OK;
}
