#include "cuda/stage.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/groups.h"

/* ---- sizes and opening ------------------------------------------------------------------------------------------------------ */

static tp_status
stage_bytes(const tp_stage_config *config, const tp_device_config *device, tp_stage_bytes *out)
{
    tp_stage *stage;
    TP_TRY(tp_cuda_stage_describe(config, device->dtype, &stage));
    size_t memory = tp_cuda_stage_layout(stage, NULL);
    *out = tp_stage_bytes_of(&stage->base, memory);
    out->lent = 0; /* NCCL takes its messages where the stage has them */
    free(stage);
    return TP_OK;
}

static int64_t
most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

size_t
tp_cuda_workspace_bytes(const tp_stage_config *config, const tp_device_config *device)
{
    (void)device;
    int64_t rows = (int64_t)config->slicing->max_batch * config->slicing->seq_len;
    return TP_CUDA_GEMM_BYTES + sizeof(float) * (size_t)tp_cuda_partial_floats(rows, 4 * (int64_t)config->model.n_embd);
}

/* Refuse what the kernels cannot do, before any memory is taken. */
static tp_status
check(const tp_stage_config *config, tp_dtype dtype)
{
    int head_dim = config->model.n_embd / config->model.n_head;
    if (dtype == TP_BF16 && (head_dim % 8 != 0 || head_dim > 128))
        return tp_fail(TP_EVALUE, "n_embd / n_head is %d: on CUDA with dtype \"bf16\" a multiple of 8 up to 128 would be right",
                       head_dim);
    if (head_dim > 128)
        return tp_fail(TP_EVALUE, "n_embd / n_head is %d: on CUDA at most 128 would be right", head_dim);
    return TP_OK;
}

static void
stage_close(tp_stage *stage)
{
    if (stage == NULL)
        return;
    (void)!tp_cuda_synchronize(stage->rank->cuda, stage->rank->stream); /* pageless memory goes: nobody may read it still */
    if (stage->rank->aside != NULL)
        (void)!tp_cuda_synchronize(stage->rank->cuda, stage->rank->aside);
    tp_cuda_host_free(stage->rank->cuda, stage->pinned);
    tp_cuda_host_free(stage->rank->cuda, stage->store);
    tp_heap_free(stage->rank->base.heap, stage->memory);
    free(stage->counts);
    free(stage->token_groups);
    free(stage->position_groups);
    free(stage);
}

/* Group the rows of the host's `values` by value, separately for each sum of gradients. */
static tp_status
group_rows(tp_stage *stage, const int32_t *values, int64_t height, const row_groups *all, int64_t *counts)
{
    for (int i = 0; i < tp_cuda_sums(&stage->base); i++) {
        stage_sum sum = tp_cuda_sum(&stage->base, i);
        row_groups to = tp_cuda_groups(all, sum, i);
        TP_TRY(tp_cuda_group_rows(sum.count, values + sum.first, height, stage->counts, to.index, to.start, to.rows, &counts[i]));
    }
    return TP_OK;
}

/* Group the rows by position: known from the slicing alone. */
static tp_status
lay_positions(tp_stage *stage)
{
    const stage_ints *ints = &stage->on_host;
    if (ints->positions == NULL)
        return TP_OK;
    tp_stage_order(&stage->base, NULL, NULL, NULL, ints->positions);
    return group_rows(stage, ints->positions, stage->base.config.slicing->seq_len, &ints->by_position, stage->position_groups);
}

static tp_status
take_store(tp_stage *stage)
{
    size_t bytes = tp_stage_store_bytes(&stage->base);
    if (bytes == 0)
        return TP_OK;
    TP_TRY(tp_cuda_host_alloc(stage->rank->cuda, bytes, stage->base.what, &stage->store));
    tp_stage_arena from = {stage->store, 0, TP_ALIGN, stage->base.sizes.element};
    tp_lay_store(&stage->base, &from);
    return TP_OK;
}

static tp_status
take_memory(tp_stage *stage)
{
    tp_cuda_device *cuda = stage->rank->cuda;
    TP_TRY(tp_heap_alloc(stage->rank->base.heap, tp_cuda_stage_layout(stage, NULL), stage->base.what, &stage->memory));
    tp_cuda_stage_layout(stage, stage->memory);
    TP_TRY(tp_cuda_memset(cuda, stage->rank->stream, stage->memory, 0, stage->zeroed_bytes));
    TP_TRY(tp_cuda_stage_list(stage));
    size_t pinned = tp_cuda_stage_layout_host(stage, NULL);
    TP_TRY(tp_cuda_host_alloc(cuda, pinned, stage->base.what, &stage->pinned));
    memset(stage->pinned, 0, pinned);
    tp_cuda_stage_layout_host(stage, stage->pinned);
    TP_TRY(take_store(stage));
    int64_t height = most(stage->base.config.model.vocab_size, stage->base.config.slicing->seq_len);
    stage->counts = calloc((size_t)height, sizeof *stage->counts);
    int sums = tp_cuda_sums(&stage->base);
    stage->token_groups = calloc((size_t)sums, sizeof *stage->token_groups);
    stage->position_groups = calloc((size_t)sums, sizeof *stage->position_groups);
    if (stage->counts == NULL || stage->token_groups == NULL || stage->position_groups == NULL)
        return tp_fail(TP_EMEMORY, "no host memory to sort %lld tokens by", (long long)height);
    return lay_positions(stage);
}

static tp_status
stage_open(const tp_stage_config *config, tp_device *device, tp_stage **out)
{
    tp_stage *stage;
    tp_cuda_rank *rank = tp_cuda_rank_of(device);
    TP_TRY(check(config, rank->config.dtype));
    TP_TRY(tp_cuda_stage_describe(config, rank->config.dtype, &stage));
    stage->rank = rank;
    tp_status status = take_memory(stage);
    if (status != TP_OK) {
        stage_close(stage);
        return status;
    }
    *out = stage;
    return TP_OK;
}

/* ---- parameters -------------------------------------------------------------------------------------------------- */

static tp_status
stage_import(tp_stage *stage, int i, tp_state state, const float *row_major)
{
    const tp_stage_param *param = &stage->base.param[i];
    size_t bytes = (size_t)(param->info.rows * param->info.cols) * sizeof(float);
    TP_TRY(tp_stage_check_state(&stage->base, i, state));
    TP_TRY(tp_cuda_bind(stage->rank->cuda));
    TP_TRY(tp_cuda_copy(stage->rank->cuda, stage->rank->stream, tp_stage_state(&stage->base, i, state), row_major, bytes,
                        TP_CUDA_TO_DEVICE));
    if (tp_stage_is_sharded(&stage->base, state))
        TP_TRY(tp_cuda_stage_take_moments(stage, i, state));
    return tp_cuda_synchronize(stage->rank->cuda, stage->rank->stream);
}

static tp_status
stage_export(const tp_stage *stage, int i, tp_state state, float *row_major)
{
    const tp_stage_param *param = &stage->base.param[i];
    size_t bytes = (size_t)(param->info.rows * param->info.cols) * sizeof(float);
    TP_TRY(tp_stage_check_state(&stage->base, i, state));
    TP_TRY(tp_stage_check_whole(&stage->base, i, state));
    TP_TRY(tp_cuda_bind(stage->rank->cuda));
    TP_TRY(tp_cuda_copy(stage->rank->cuda, stage->rank->stream, row_major, tp_stage_state(&stage->base, i, state), bytes,
                        TP_CUDA_TO_HOST));
    return tp_cuda_synchronize(stage->rank->cuda, stage->rank->stream);
}

/* ---- a step ------------------------------------------------------------------------------------------------------ */

static tp_status
stage_forward(tp_stage *stage, int micro, int slice, tp_half half, int slot)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, slice, half, slot, 0);
    int begins = stage->train && slice == 0 && half != TP_SECOND_HALF; /* an evaluation leaves what steps read: graphs do not tell */
    const tp_slicing *slicing = stage->base.config.slicing;
    int clears = stage->train && micro == slicing->micros - 1 && slice == slicing->micro[micro].slices - 1 && half != TP_FIRST_HALF;
    tp_stage_select(&stage->base, stage->train ? micro : -1, begins);
    for (int block = 0; block < stage->base.blocks; block++)
        TP_TRY(tp_cuda_block_forward(stage, block, &at));
    return clears ? tp_cuda_stage_clear(stage) : TP_OK;
}

static tp_status
stage_input_gradient(tp_stage *stage, int micro, int slice, int slot, int gslot)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, slice, TP_WHOLE, slot, gslot);
    tp_stage_select(&stage->base, micro, 0);
    for (int block = stage->base.blocks - 1; block >= 0; block--)
        TP_TRY(tp_cuda_block_input_gradient(stage, block, &at));
    return TP_OK;
}

static tp_status
stage_recompute(tp_stage *stage, int micro, int slice, int slot, int gslot)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, slice, TP_WHOLE, slot, gslot);
    tp_stage_select(&stage->base, micro, 0);
    for (int block = 0; block < stage->base.blocks; block++)
        if (stage->base.block[block].saves == TP_REMAKES)
            TP_TRY(tp_cuda_block_recompute(stage, block, &at));
    return TP_OK;
}

/* In the order of the rank's stream; beside its work that is another one (rank.c). */
static tp_status
swap_slice(tp_stage *stage, const tp_slice_at *at, int out)
{
    tp_swap swap[TP_SWAPS_MOST];
    for (int block = 0; block < stage->base.blocks; block++)
        for (int k = tp_stage_swaps(&stage->base, &stage->base.block[block], at, out, swap) - 1; k >= 0; k--)
            TP_TRY(tp_cuda_copy(stage->rank->cuda, stage->rank->stream, out ? swap[k].store : swap[k].device,
                                out ? swap[k].device : swap[k].store, swap[k].bytes,
                                out ? TP_CUDA_TO_HOST : TP_CUDA_TO_DEVICE));
    return TP_OK;
}

static tp_status
stage_swap_out(tp_stage *stage, int micro, int slice, int slot)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, slice, TP_WHOLE, slot, 0);
    return swap_slice(stage, &at, 1);
}

static tp_status
stage_swap_in(tp_stage *stage, int micro, int slice, int slot, int gslot)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, slice, TP_WHOLE, slot, gslot);
    return swap_slice(stage, &at, 0);
}

static tp_status
stage_weight_gradient(tp_stage *stage, int micro, int slice, int slot, int gslot)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, slice, TP_WHOLE, slot, gslot);
    tp_stage_select(&stage->base, micro, 0);
    for (int block = stage->base.blocks - 1; block >= 0; block--)
        TP_TRY(tp_cuda_block_weight_gradient(stage, block, &at));
    return TP_OK;
}

static tp_status
stage_backward(tp_stage *stage, int micro, int slice, int slot, int gslot)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, slice, TP_WHOLE, slot, gslot);
    if (!stage->base.config.by_block) {
        TP_TRY(stage_input_gradient(stage, micro, slice, slot, gslot));
        return stage_weight_gradient(stage, micro, slice, slot, gslot);
    }
    tp_stage_select(&stage->base, micro, 0);
    for (int block = stage->base.blocks - 1; block >= 0; block--) {
        TP_TRY(tp_cuda_block_input_gradient(stage, block, &at));
        TP_TRY(tp_cuda_block_weight_gradient(stage, block, &at));
    }
    return TP_OK;
}

static tp_status
stage_recompute_block(tp_stage *stage, int micro, int slot, int gslot, int block)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, 0, TP_WHOLE, slot, gslot);
    tp_stage_select(&stage->base, micro, 0);
    return tp_cuda_block_recompute(stage, block, &at);
}

static tp_status
stage_backward_block(tp_stage *stage, int micro, int slot, int gslot, int block)
{
    tp_slice_at at = tp_stage_at(&stage->base, micro, 0, TP_WHOLE, slot, gslot);
    tp_stage_select(&stage->base, micro, 0);
    TP_TRY(tp_cuda_block_input_gradient(stage, block, &at));
    return tp_cuda_block_weight_gradient(stage, block, &at);
}

/* Fill all buffers that a step writes before it reads them with copies of the largest weights, as data on which products are tried
 * and timed. Fresh memory is mostly zeros: on these all GELUs agree, and a GPU multiplies zeros faster than data (it draws less
 * power), with some algorithms more than with others. */
static tp_status
make_up_data(tp_stage *stage)
{
    const tp_stage_param *largest = &stage->base.param[0];
    for (int i = 1; i < stage->base.params; i++)
        if (stage->base.param[i].floats > largest->floats)
            largest = &stage->base.param[i];
    const void *from = largest->copy != NULL ? largest->copy : (const void *)largest->value;
    size_t size = (size_t)largest->floats * (largest->copy != NULL ? stage->base.sizes.element : sizeof(float));
    size_t end = tp_cuda_stage_layout(stage, stage->memory), more;
    for (size_t at = stage->zeroed_bytes; at < end; at += more) {
        more = size < end - at ? size : end - at;
        TP_TRY(tp_cuda_copy(stage->rank->cuda, stage->rank->stream, (char *)stage->memory + at, from, more, TP_CUDA_ON_DEVICE));
    }
    return TP_OK;
}

/* Choose the algorithm of every product that a step will ask for before the first step, so that within a step nothing is searched
 * or timed. */
static tp_status
prepare(tp_stage *stage)
{
    const tp_slicing *slicing = stage->base.config.slicing;
    tp_status status = make_up_data(stage);
    stage->preparing = stage->train = 1;
    for (int32_t q = 0; q < slicing->micros && status == TP_OK; q++)
        for (int32_t s = 0; s < slicing->micro[q].slices && status == TP_OK; s++) {
            status = stage_forward(stage, q, s, TP_WHOLE, 0);
            for (int half = TP_FIRST_HALF; half <= TP_SECOND_HALF && status == TP_OK && slicing->micro[q].half > 0; half++)
                status = stage_forward(stage, q, s, (tp_half)half, 0);
            if (status == TP_OK && stage->base.config.gradient_slots > 0)
                status = stage_recompute(stage, q, s, 0, 0); /* its rows may lie otherwise than forward's */
            if (status == TP_OK && stage->base.config.gradient_slots > 0)
                status = stage_input_gradient(stage, q, s, 0, 0);
            if (status == TP_OK && stage->base.config.gradient_slots > 0)
                status = stage_weight_gradient(stage, q, s, 0, 0);
        }
    stage->preparing = 0;
    stage->prepared = 1;
    return status == TP_OK ? tp_cuda_stage_check_attention(stage) : status;
}

static tp_status
stage_pack(tp_stage *stage)
{
    TP_TRY(tp_cuda_bind(stage->rank->cuda));
    tp_stage_select(&stage->base, -1, 0);
    for (int i = 0; i < stage->base.params; i++) {
        const tp_stage_param *param = &stage->base.param[i];
        if (param->copy != NULL)
            TP_TRY(tp_cuda_cast(stage->rank->stream, stage->dtype, param->floats, param->value, param->copy));
    }
    if (!stage->prepared && stage->base.config.activation_slots > 0)
        TP_TRY(prepare(stage));
    return tp_cuda_synchronize(stage->rank->cuda, stage->rank->stream);
}

static tp_status
stage_begin(tp_stage *stage, const int32_t *tokens, int train)
{
    stage_ints *ints = &stage->on_host;
    stage->train = train;
    TP_TRY(tp_cuda_stage_settle_versions(stage));
    if (stage->ints_bytes == 0)
        return TP_OK;
    tp_stage_order(&stage->base, tokens, ints->tokens, ints->targets, NULL);
    if (ints->by_token.index != NULL)
        TP_TRY(group_rows(stage, ints->tokens, stage->base.config.model.vocab_size, &ints->by_token, stage->token_groups));
    /* the first array of either: they lie in one order */
    return tp_cuda_copy(stage->rank->cuda, stage->rank->stream,
                        ints->targets != NULL ? stage->on_device.targets : stage->on_device.tokens, stage->pinned,
                        stage->ints_bytes, TP_CUDA_TO_DEVICE);
}

static tp_status
stage_tied(tp_stage *stage, tp_tied *out)
{
    tp_stage_tied_ends(&stage->base, out);
    return TP_OK;
}

/* What lookups read: in the stage's dtype. */
static tp_status
stage_tied_values(tp_stage *stage, tp_tied *out)
{
    const tp_stage_param *wte = tp_stage_is_tied_apart(&stage->base) ? tp_stage_vocabulary(&stage->base) : NULL;
    void *values = wte == NULL ? NULL : wte->copy != NULL ? wte->copy : (void *)wte->value;
    tp_stage_tied_values(&stage->base, values, wte == NULL ? 0 : (size_t)wte->floats * tp_dtype_bytes(stage->dtype), out);
    return TP_OK;
}

const tp_stage_ops tp_cuda_stage_ops = {
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
    .remakes_slices = 2,
    .keeps_keys = 3,
    .swap_out = stage_swap_out,
    .swap_in = stage_swap_in,
    .guest = tp_stage_guest,
    .end = tp_stage_end,
    .tied = stage_tied,
    .tied_values = stage_tied_values,
    .finish = tp_cuda_stage_finish,
    .gradients = tp_stage_gradients,
    .loss = tp_cuda_stage_loss,
    .measure = tp_cuda_stage_measure,
    .sumsq = tp_cuda_stage_sumsq,
    .update_micro = tp_cuda_stage_update_micro,
    .update = tp_cuda_stage_update,
    .shard = tp_stage_shard,
    .shard_rows = tp_stage_shard_rows,
    .values = tp_stage_values,
    .squares = tp_stage_squares,
    .spread = tp_cuda_stage_spread,
};
