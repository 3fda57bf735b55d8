/* Forward, input-gradient and weight-gradient work of one slice in one block, on a GPU. Formulas: GPT-2 (Radford et al.
 * 2019), pre-LayerNorm: x += attention(LN(x)); x += W2 gelu(W1 LN(x)). */
#include "cuda/stage.h"

tp_status
tp_cuda_stage_product(tp_stage *stage, const tp_gemm_op *op)
{
    return stage->preparing ? tp_gemm_prepare(stage->rank->gemm, op) : tp_gemm_run(stage->rank->gemm, op);
}

/* y[rows, cols] = x[rows, rows of the weight] W + bias, in rows of these widths from row `row` of either array on. */
static tp_gemm_op
linear(const tp_stage *stage, int param, int bias, const tp_slice_at *at, const void *x, void *y)
{
    const tp_param *info = &stage->base.param[param].info;
    return (tp_gemm_op){.kind = TP_GEMM_LINEAR,
                        .dtype = stage->dtype,
                        .epilogue = bias < 0 ? TP_GEMM_NONE : TP_GEMM_BIAS,
                        .rows = at->rows,
                        .n_in = info->rows,
                        .n_out = info->cols,
                        .x = tp_cuda_row(stage, x, at->first_row, info->rows),
                        .x_stride = info->rows,
                        .w = tp_cuda_weight(stage, param),
                        .w_stride = info->cols,
                        .y = tp_cuda_row(stage, y, at->first_row, info->cols),
                        .y_stride = info->cols,
                        .bias = tp_cuda_weight(stage, bias)};
}

/* The way back: dx[rows, rows of the weight] = dy W^T. */
static tp_gemm_op
linear_t(const tp_stage *stage, int param, const tp_slice_at *at, const void *dy, void *dx)
{
    const tp_param *info = &stage->base.param[param].info;
    return (tp_gemm_op){.kind = TP_GEMM_LINEAR_T,
                        .dtype = stage->dtype,
                        .rows = at->rows,
                        .n_in = info->rows,
                        .n_out = info->cols,
                        .x = tp_cuda_row(stage, dy, at->first_row, info->cols),
                        .x_stride = info->cols,
                        .w = tp_cuda_weight(stage, param),
                        .w_stride = info->cols,
                        .y = tp_cuda_row(stage, dx, at->first_row, info->rows),
                        .y_stride = info->rows};
}

/* ---- forward --------------------------------------------------------------------------------------------------------------- */

static tp_status
normalise(tp_stage *stage, const tp_stage_block *self, const tp_slice_at *at, void *norm)
{
    const tp_activations *mine = &self->activations[at->slot];
    int64_t width = stage->base.config.model.n_embd, row = at->first_row;
    STAGE_RUN(stage, tp_cuda_layernorm(stage->rank->stream, stage->dtype, at->rows, width,
                                       tp_cuda_row(stage, mine->input, row, width), width,
                                       tp_stage_value(&stage->base, self->norm),
                                       tp_stage_value(&stage->base, self->norm_bias),
                                       tp_cuda_row(stage, norm, row, width), width, mine->mean + row, mine->rstd + row));
    return TP_OK;
}

/* output = input + x W + b: the second product of both kinds of block. */
static tp_status
project(tp_stage *stage, int block, const tp_slice_at *at, const void *x)
{
    const tp_stage_block *self = &stage->base.block[block];
    int64_t width = stage->base.config.model.n_embd;
    tp_gemm_op op = linear(stage, self->out, self->out_bias, at, x, tp_cuda_block_output(stage, block, at->slot));
    op.epilogue = TP_GEMM_BIAS_RESIDUAL;
    op.aux = tp_cuda_row(stage, self->activations[at->slot].input, at->first_row, width);
    op.aux_stride = width;
    return tp_cuda_stage_product(stage, &op);
}

static tp_status
attend(tp_stage *stage, int block, const tp_slice_at *at, const tp_inner *inner)
{
    const tp_stage_block *self = &stage->base.block[block];
    int64_t width = stage->base.config.model.n_embd;
    TP_TRY(normalise(stage, self, at, inner->norm));
    tp_gemm_op op = linear(stage, self->in, self->in_bias, at, inner->norm, inner->qkv);
    TP_TRY(tp_cuda_stage_product(stage, &op));
    tp_stage_part part[2];
    for (int k = 0, count = tp_stage_parts(&stage->base, at, part); k < count; k++) {
        const void *qkv = tp_cuda_row(stage, inner->qkv, part[k].row, 3 * width);
        TP_TRY(tp_cuda_stage_attention(stage, &part[k], qkv, tp_cuda_row(stage, inner->o, part[k].row, width),
                                       self->activations[at->slot].lse + part[k].lse));
    }
    return TP_OK;
}

static tp_status
expand(tp_stage *stage, int block, const tp_slice_at *at, const tp_inner *inner)
{
    const tp_stage_block *self = &stage->base.block[block];
    int64_t hidden = 4 * (int64_t)stage->base.config.model.n_embd;
    TP_TRY(normalise(stage, self, at, inner->norm));
    tp_gemm_op op = linear(stage, self->in, self->in_bias, at, inner->norm, inner->g);
    op.epilogue = TP_GEMM_BIAS_GELU_AUX;
    op.aux = tp_cuda_row(stage, inner->h, at->first_row, hidden);
    op.aux_stride = hidden;
    return tp_cuda_stage_product(stage, &op);
}

/* All that lies between a block's input and its second product. */
static tp_status
make_inner(tp_stage *stage, int block, const tp_slice_at *at, const tp_inner *inner)
{
    return stage->base.block[block].kind == TP_ATTENTION ? attend(stage, block, at, inner)
                                                         : expand(stage, block, at, inner);
}

tp_status
tp_cuda_block_recompute(tp_stage *stage, int block, const tp_slice_at *at)
{
    return make_inner(stage, block, at, &stage->base.block[block].remade[at->gslot]);
}

static tp_status
layer_forward(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_inner *inner = &self->made[at->slot];
    TP_TRY(make_inner(stage, block, at, inner));
    return project(stage, block, at, self->kind == TP_ATTENTION ? inner->o : inner->g);
}

static tp_status
embed(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    int64_t width = stage->base.config.model.n_embd, row = at->batch_row + at->first_row;
    STAGE_RUN(stage, tp_cuda_embedding(stage->rank->stream, stage->dtype, at->rows, width,
                                       stage->on_device.tokens + row, stage->on_device.positions + row,
                                       tp_cuda_weight(stage, self->in), tp_cuda_weight(stage, self->out),
                                       tp_cuda_row(stage, tp_cuda_block_output(stage, block, at->slot), at->first_row,
                                                   width),
                                       width));
    return TP_OK;
}

tp_status
tp_cuda_block_forward(tp_stage *stage, int block, const tp_slice_at *at)
{
    switch (stage->base.block[block].kind) {
    case TP_EMBEDDING: return embed(stage, block, at);
    case TP_ATTENTION:
    case TP_FFN: return layer_forward(stage, block, at);
    default: return tp_cuda_head_forward(stage, at);
    }
}

/* ---- input gradient --------------------------------------------------------------------------------------------------------- */

/* d_input = dresidual + LayerNorm's gradient of d_norm; all of [R, E]. */
static tp_status
norm_gradient(tp_stage *stage, int block, const tp_slice_at *at, const void *d_norm, const void *dresidual)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_activations *mine = &self->activations[at->slot];
    int64_t width = stage->base.config.model.n_embd, row = at->first_row;
    STAGE_RUN(stage,
              tp_cuda_layernorm_backward(stage->rank->stream, stage->dtype, at->rows, width,
                                         tp_cuda_row(stage, d_norm, row, width), width,
                                         tp_cuda_row(stage, mine->input, row, width), width, mine->mean + row,
                                         mine->rstd + row, tp_stage_value(&stage->base, self->norm),
                                         dresidual == NULL ? NULL : tp_cuda_row(stage, dresidual, row, width), width,
                                         tp_cuda_row(stage, self->gradients[at->gslot].d_input, row, width), width));
    return TP_OK;
}

static tp_status
attention_input_gradient(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_inner *inner = tp_stage_inner(self, at);
    const tp_gradients *grads = &self->gradients[at->gslot];
    const void *dy = tp_cuda_block_d_output(stage, block, at->gslot);
    tp_gemm_op back = linear_t(stage, self->out, at, dy, grads->d_o);
    TP_TRY(tp_cuda_stage_product(stage, &back));
    tp_stage_part part[2];
    for (int k = 0, count = tp_stage_parts(&stage->base, at, part); k < count; k++)
        STAGE_RUN(stage, tp_cuda_stage_attention_backward(stage, &part[k], inner, self->activations[at->slot].lse, grads));
    back = linear_t(stage, self->in, at, grads->dqkv, grads->d_norm);
    TP_TRY(tp_cuda_stage_product(stage, &back));
    return norm_gradient(stage, block, at, grads->d_norm, dy);
}

static tp_status
ffn_input_gradient(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_gradients *grads = &self->gradients[at->gslot];
    int64_t hidden = 4 * (int64_t)stage->base.config.model.n_embd;
    const void *dy = tp_cuda_block_d_output(stage, block, at->gslot);
    tp_gemm_op back = linear_t(stage, self->out, at, dy, grads->dh);
    back.epilogue = TP_GEMM_DGELU;
    back.aux = tp_cuda_row(stage, tp_stage_inner(self, at)->h, at->first_row, hidden);
    back.aux_stride = hidden;
    TP_TRY(tp_cuda_stage_product(stage, &back));
    back = linear_t(stage, self->in, at, grads->dh, grads->d_norm);
    TP_TRY(tp_cuda_stage_product(stage, &back));
    return norm_gradient(stage, block, at, grads->d_norm, dy);
}

tp_status
tp_cuda_block_input_gradient(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    switch (self->kind) {
    case TP_ATTENTION: return attention_input_gradient(stage, block, at);
    case TP_FFN: return ffn_input_gradient(stage, block, at);
    case TP_HEAD: return norm_gradient(stage, block, at, self->activations[at->slot].d_norm, NULL);
    default: return TP_OK; /* nothing below the embedding */
    }
}

/* ---- weight gradient: the whole micro-batch, at its slice 0 ---------------------------------------------------------------------- */

static tp_status
weight_and_bias(tp_stage *stage, int param, int bias, const tp_slice_at *at, const void *x, const void *dy)
{
    const tp_param *info = &stage->base.param[param].info;
    int later = !tp_stage_sums_from(&stage->base, at->q);
    tp_gemm_op op = {.kind = TP_GEMM_LINEAR_W,
                     .dtype = stage->dtype,
                     .accumulate = later,
                     .rows = at->all_rows,
                     .n_in = info->rows,
                     .n_out = info->cols,
                     .x = x,
                     .x_stride = info->rows,
                     .w = dy,
                     .w_stride = info->cols,
                     .y = stage->base.param[param].grad,
                     .y_stride = info->cols};
    TP_TRY(tp_cuda_stage_product(stage, &op));
    if (bias >= 0)
        STAGE_RUN(stage, tp_cuda_bias_gradient(stage->rank->stream, stage->dtype, at->all_rows, info->cols, dy,
                                               info->cols, stage->base.param[bias].grad, later, stage->rank->partial));
    return TP_OK;
}

static tp_status
norm_params(tp_stage *stage, const tp_stage_block *self, const tp_slice_at *at, const void *d_norm)
{
    const tp_activations *mine = &self->activations[at->slot];
    int64_t width = stage->base.config.model.n_embd;
    STAGE_RUN(stage, tp_cuda_layernorm_param_gradient(stage->rank->stream, stage->dtype, at->all_rows, width, d_norm,
                                                      width, mine->input, width, mine->mean, mine->rstd,
                                                      tp_cuda_grad(stage, self->norm),
                                                      tp_cuda_grad(stage, self->norm_bias),
                                                      !tp_stage_sums_from(&stage->base, at->q),
                                                      stage->rank->partial));
    return TP_OK;
}

/* Its rows wait for the update, when those of one token are added in one order. */
static tp_status
keep_rows(tp_stage *stage, int block, const tp_slice_at *at)
{
    int64_t width = stage->base.config.model.n_embd;
    STAGE_RUN(stage, tp_cuda_copy(stage->rank->cuda, stage->rank->stream,
                                  tp_cuda_row(stage, stage->base.embedding_rows, at->batch_row, width),
                                  tp_cuda_block_d_output(stage, block, at->gslot),
                                  (size_t)(at->all_rows * width) * stage->base.sizes.element, TP_CUDA_ON_DEVICE));
    return TP_OK;
}

tp_status
tp_cuda_block_weight_gradient(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_inner *inner = tp_stage_inner(self, at);
    const tp_gradients *grads = &self->gradients[at->gslot];
    int attention = self->kind == TP_ATTENTION;
    if (at->slice > 0)
        return TP_OK;
    if (self->kind == TP_EMBEDDING)
        return keep_rows(stage, block, at);
    if (self->kind == TP_HEAD) {
        TP_TRY(tp_cuda_head_weight_gradient(stage, at));
        return norm_params(stage, self, at, self->activations[at->slot].d_norm);
    }
    TP_TRY(weight_and_bias(stage, self->in, self->in_bias, at, inner->norm, attention ? grads->dqkv : grads->dh));
    TP_TRY(weight_and_bias(stage, self->out, self->out_bias, at, attention ? inner->o : inner->g,
                           tp_cuda_block_d_output(stage, block, at->gslot)));
    return norm_params(stage, self, at, grads->d_norm);
}
