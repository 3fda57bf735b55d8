#include "csrc/stage/stage.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"
#include "csrc/base/store.h"

static const tp_stage_sizes sizes = {sizeof(tp_stage), sizeof(tp_activations), sizeof(tp_gradients), sizeof(float), 0, 0, 1,
                                     TP_ROW_GROUP, 0, 0};

/* The tables of a stage without its memory. */
static tp_status
describe(const tp_stage_config *config, const tp_backend_ops *ops, tp_stage **out)
{
    TP_TRY(tp_stage_describe(config, &sizes, out));
    const tp_stage_base *stage = &(*out)->base;
    for (int i = 0; i < stage->params; i++) {
        tp_stage_param *param = &stage->param[i];
        const tp_param *info = &param->info;
        int tied_head = tp_stage_heads(stage) && config->model.tie_weights;
        int lookup_only = param->index == 1 || (param->index == 0 && !tied_head);
        param->floats = info->is_matrix ? ops->weight_floats(info->rows, info->cols) : info->cols;
        param->copy_count = info->is_matrix && !lookup_only ? ops->weight_t_floats(info->rows, info->cols) : 0;
    }
    return TP_OK;
}

static tp_status
stage_bytes(const tp_stage_config *config, const tp_device_config *device, tp_stage_bytes *out)
{
    tp_stage *stage;
    TP_TRY(describe(config, tp_cpu_ops(device->isa), &stage));
    size_t memory = tp_stage_layout(stage, NULL);
    *out = tp_stage_bytes_of(&stage->base, memory);
    free(stage);
    return TP_OK;
}

size_t
tp_stage_workspace_bytes(const tp_stage_config *config, const tp_device_config *device)
{
    const tp_slicing *slicing = config->slicing;
    int64_t rows = slicing->max_rows > TP_HEAD_TILE ? slicing->max_rows : TP_HEAD_TILE;
    return tp_cpu_ops(device->isa)->workspace_bytes(config->model.n_embd, config->model.n_head, config->model.vocab_size,
                                                    slicing->seq_len, rows, device->threads);
}

/* Counted as the stage's, taken by whoever lends. */
static size_t
outside_bytes(const tp_stage *stage)
{
    return stage->base.config.lent == NULL ? 0 : stage->base.lent_bytes;
}

static void
stage_close(tp_stage *stage)
{
    if (stage == NULL)
        return;
    tp_heap_free(stage->be->heap, stage->memory);
    tp_heap_uncount(stage->be->heap, outside_bytes(stage));
    tp_store_close(stage->store, stage->store_bytes);
    free(stage);
}

static tp_status
stage_open(const tp_stage_config *config, tp_device *device, tp_stage **out)
{
    tp_stage *stage;
    tp_backend *backend = &((tp_cpu_device *)device)->backend;
    TP_TRY(describe(config, backend->ops, &stage));
    stage->be = backend;
    stage->store_bytes = tp_stage_store_bytes(&stage->base);
    tp_status status = tp_heap_alloc(backend->heap, tp_stage_layout(stage, NULL), stage->base.what, &stage->memory);
    if (status == TP_OK)
        status = tp_heap_count(backend->heap, outside_bytes(stage), stage->base.what);
    if (status != TP_OK) {
        tp_heap_free(backend->heap, stage->memory);
        free(stage);
        return status;
    }
    status = tp_store_open(config->store, stage->store_bytes, stage->base.what, &stage->store);
    if (status != TP_OK) {
        stage_close(stage);
        return status;
    }
    tp_stage_layout(stage, stage->memory);
    tp_stage_arena outside = {stage->store, 0, TP_ALIGN, sizes.element};
    tp_lay_store(&stage->base, &outside);
    *out = stage;
    return TP_OK;
}

/* ---- parameters ------------------------------------------------------------------------------------------------------- */

static tp_status
stage_import(tp_stage *stage, int i, tp_state state, const float *row_major)
{
    const tp_stage_param *param = &stage->base.param[i];
    TP_TRY(tp_stage_check_state(&stage->base, i, state));
    if (param->info.is_matrix)
        stage->be->ops->weight_import(stage->be, param->info.rows, param->info.cols, row_major,
                                      tp_stage_state(&stage->base, i, state));
    else
        stage->be->ops->copy(stage->be, param->floats, row_major, tp_stage_state(&stage->base, i, state));
    if (tp_stage_is_sharded(&stage->base, state))
        tp_stage_take_moments(stage, i, state);
    return TP_OK;
}

static tp_status
stage_export(const tp_stage *stage, int i, tp_state state, float *row_major)
{
    const tp_stage_param *param = &stage->base.param[i];
    TP_TRY(tp_stage_check_state(&stage->base, i, state));
    TP_TRY(tp_stage_check_whole(&stage->base, i, state));
    if (param->info.is_matrix)
        stage->be->ops->weight_export(stage->be, param->info.rows, param->info.cols, tp_stage_state(&stage->base, i, state),
                                      row_major);
    else
        stage->be->ops->copy(stage->be, param->floats, tp_stage_state(&stage->base, i, state), row_major);
    return TP_OK;
}

void
tp_stage_pack(tp_stage *stage, const tp_stage_param *param)
{
    if (param->copy != NULL)
        stage->be->ops->weight_transpose(stage->be, param->info.rows, param->info.cols, param->value, param->copy);
}

static tp_status
stage_pack(tp_stage *stage)
{
    tp_stage_select(&stage->base, -1, 0);
    for (int i = 0; i < stage->base.params && !tp_deadline_told_before(); i++)
        tp_stage_pack(stage, &stage->base.param[i]);
    return tp_deadline_check_told();
}

/* ---- a step ------------------------------------------------------------------------------------------------------------- */

static tp_status
stage_begin(tp_stage *stage, const int32_t *tokens, int train)
{
    int64_t seq_len = stage->base.config.slicing->seq_len;
    stage->train = train;
    for (int i = 0; i < 2; i++)
        stage->tile[i].rows = stage->tile[i].seen = 0;
    stage->head_from = 0;
    if (stage->squares != NULL)
        memset(stage->squares, 0, (size_t)stage->base.params * sizeof *stage->squares);
    if (stage->tokens == NULL)
        return TP_OK;
    tp_stage_order(&stage->base, tokens, stage->tokens, stage->targets, stage->positions);
    if (stage->chain_tokens == NULL)
        return TP_OK;
    for (int64_t s = 0; s < stage->base.config.slicing->batch; s++)
        for (int64_t t = 0; t < seq_len; t++) {
            int64_t canonical = s * seq_len + (seq_len - 1 - t);
            stage->chain_tokens[canonical] = tokens[s * (seq_len + 1) + t];
            stage->chain_positions[canonical] = (int32_t)t;
        }
    return TP_OK;
}

static tp_status
stage_forward(tp_stage *stage, int micro, int slice, tp_half half, int slot)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, slice, half, slot, 0);
    tp_stage_select(&stage->base, micro, slice == 0 && half != TP_SECOND_HALF);
    for (int block = 0; block < stage->base.blocks && !tp_deadline_told_before(); block++)
        tp_block_forward(stage, block, &at);
    return tp_deadline_check_told();
}

static tp_status
stage_input_gradient(tp_stage *stage, int micro, int slice, int slot, int gradient_slot)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, slice, TP_WHOLE, slot, gradient_slot);
    tp_stage_select(&stage->base, micro, 0);
    for (int block = stage->base.blocks - 1; block >= 0 && !tp_deadline_told_before(); block--)
        tp_block_input_gradient(stage, block, &at);
    return tp_deadline_check_told();
}

static tp_status
stage_recompute(tp_stage *stage, int micro, int slice, int slot, int gradient_slot)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, slice, TP_WHOLE, slot, gradient_slot);
    tp_stage_select(&stage->base, micro, 0);
    for (int block = 0; block < stage->base.blocks && !tp_deadline_told_before(); block++)
        if (stage->base.block[block].saves == TP_REMAKES)
            tp_block_recompute(stage, block, &at);
    return tp_deadline_check_told();
}

static tp_status
swap_slice(tp_stage *stage, const tp_slice_at *at, int out)
{
    tp_swap swap[TP_SWAPS_MOST];
    for (int block = 0; block < stage->base.blocks; block++)
        for (int k = tp_stage_swaps(&stage->base, &stage->base.block[block], at, out, swap) - 1; k >= 0; k--)
            memcpy(out ? swap[k].store : swap[k].device, out ? swap[k].device : swap[k].store, swap[k].bytes);
    return TP_OK;
}

static tp_status
stage_swap_out(tp_stage *stage, int micro, int slice, int slot)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, slice, TP_WHOLE, slot, 0);
    return swap_slice(stage, &at, 1);
}

static tp_status
stage_swap_in(tp_stage *stage, int micro, int slice, int slot, int gradient_slot)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, slice, TP_WHOLE, slot, gradient_slot);
    return swap_slice(stage, &at, 0);
}

/* tp_block_weight_gradient's end: see stage.h. */
static int64_t
weights_end(const tp_slice_at *at)
{
    const tp_micro *cut = at->micro;
    int64_t end = cut->start[cut->slices];
    if (at->whole) /* at slice 0, when every sequence is complete */
        return at->slice == 0 ? end : 0;
    for (int32_t s = cut->slices - 1; s > at->slice; s--)
        if (tp_weights_due(s, end - tp_stage_group_begin(cut, s)))
            end = tp_stage_group_begin(cut, s);
    return tp_weights_due(at->slice, end - tp_stage_group_begin(cut, at->slice)) ? end : 0;
}

static tp_status
stage_weight_gradient(tp_stage *stage, int micro, int slice, int slot, int gradient_slot)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, slice, TP_WHOLE, slot, gradient_slot);
    int64_t end = weights_end(&at);
    tp_stage_select(&stage->base, micro, 0);
    for (int block = stage->base.blocks - 1; block >= 0 && !tp_deadline_told_before(); block--)
        tp_block_weight_gradient(stage, block, &at, end);
    return tp_deadline_check_told();
}

static tp_status
stage_backward(tp_stage *stage, int micro, int slice, int slot, int gradient_slot)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, slice, TP_WHOLE, slot, gradient_slot);
    if (!stage->base.config.by_block) {
        TP_TRY(stage_input_gradient(stage, micro, slice, slot, gradient_slot));
        return stage_weight_gradient(stage, micro, slice, slot, gradient_slot);
    }
    tp_stage_select(&stage->base, micro, 0);
    for (int block = stage->base.blocks - 1; block >= 0 && !tp_deadline_told_before(); block--) {
        tp_block_input_gradient(stage, block, &at);
        tp_block_weight_gradient(stage, block, &at, weights_end(&at));
    }
    return tp_deadline_check_told();
}

static tp_status
stage_recompute_block(tp_stage *stage, int micro, int slot, int gradient_slot, int block)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, 0, TP_WHOLE, slot, gradient_slot);
    tp_stage_select(&stage->base, micro, 0);
    tp_block_recompute(stage, block, &at);
    return tp_deadline_check_told();
}

static tp_status
stage_backward_block(tp_stage *stage, int micro, int slot, int gradient_slot, int block)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, 0, TP_WHOLE, slot, gradient_slot);
    tp_stage_select(&stage->base, micro, 0);
    tp_block_input_gradient(stage, block, &at);
    tp_block_weight_gradient(stage, block, &at, weights_end(&at));
    return tp_deadline_check_told();
}

const tp_stage_ops tp_cpu_stage_ops = {
    .bytes = stage_bytes,
    .open = stage_open,
    .close = stage_close,
    .params = tp_stage_params,
    .param_index = tp_stage_param_index,
    .param_shape = tp_stage_param_shape,
    .import = stage_import,
    .export = stage_export,
    .pack = stage_pack,
    .begin = stage_begin,
    .forward = stage_forward,
    .input_gradient = stage_input_gradient,
    .weight_gradient = stage_weight_gradient,
    .backward = stage_backward,
    .recompute = stage_recompute,
    .recompute_block = stage_recompute_block,
    .backward_block = stage_backward_block,
    .remakes_slices = 1,
    .keeps_keys = 2,
    .swap_out = stage_swap_out,
    .swap_in = stage_swap_in,
    .guest = tp_stage_guest,
    .end = tp_stage_end,
    .tied = tp_stage_tied,
    .tied_values = tp_stage_give_tied,
    .finish = tp_stage_finish,
    .gradients = tp_stage_gradients,
    .block_gradients = tp_stage_block_gradients,
    .loss = tp_stage_loss,
    .sumsq = tp_stage_sumsq,
    .update_micro = tp_stage_update_micro,
    .update = tp_stage_update,
    .shard = tp_stage_shard,
    .shard_rows = tp_stage_shard_rows,
    .values = tp_stage_values,
    .squares = tp_stage_squares,
    .measure = tp_stage_measure,
    .spread = tp_stage_spread,
};
