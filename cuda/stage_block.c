/* Forward, input-gradient and weight-gradient work of one slice in one block, on a GPU. Formulas: GPT-2 (Radford et al.
 * 2019), pre-LayerNorm: x += attention(LN(x)); x += W2 gelu(W1 LN(x)). */
#include "cuda/stage.h"

tp_status
tp_cuda_stage_product(tp_stage *stage, const tp_gemm_op *op)
{
    return stage->preparing ? tp_gemm_prepare(stage->rank->gemm, op) : tp_gemm_run(stage->rank->gemm, op);
}

/* y[rows, cols] = x[rows, rows of the weight] W + bias, in rows of these widths; x and y: the slice's. */
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
                        .x = x,
                        .x_stride = info->rows,
                        .w = tp_cuda_weight(stage, param),
                        .w_stride = info->cols,
                        .y = y,
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
                        .x = dy,
                        .x_stride = info->cols,
                        .w = tp_cuda_weight(stage, param),
                        .w_stride = info->cols,
                        .y = dx,
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
                                       tp_stage_value(&stage->base, self->norm_bias), norm, width, mine->mean + row,
                                       mine->rstd + row));
    return TP_OK;
}

/* output = input + x W + b: the second product of both kinds of block. x: of the slice's rows. */
static tp_status
project(tp_stage *stage, int block, const tp_slice_at *at, const void *x)
{
    const tp_stage_block *self = &stage->base.block[block];
    int64_t width = stage->base.config.model.n_embd;
    void *output = tp_cuda_row(stage, tp_cuda_block_output(stage, block, at->slot), at->first_row, width);
    tp_gemm_op op = linear(stage, self->out, self->out_bias, at, x, output);
    op.epilogue = TP_GEMM_BIAS_RESIDUAL;
    op.aux = tp_cuda_row(stage, self->activations[at->slot].input, at->first_row, width);
    op.aux_stride = width;
    return tp_cuda_stage_product(stage, &op);
}

/* Into rows of norm and o from `row` on. kept: the slice's queries, keys and values are those of its forward. */
static tp_status
attend(tp_stage *stage, const tp_stage_block *self, const tp_slice_at *at, const tp_inner *inner, int64_t row, int kept)
{
    int64_t width = stage->base.config.model.n_embd;
    void *norm = tp_cuda_row(stage, inner->norm, row, width), *all = kept ? tp_cuda_qkv(stage, self, at) : inner->qkv;
    TP_TRY(normalise(stage, self, at, norm));
    tp_gemm_op op = linear(stage, self->in, self->in_bias, at, norm, tp_cuda_row(stage, all, at->first_row, 3 * width));
    if (!kept)
        TP_TRY(tp_cuda_stage_product(stage, &op));
    tp_stage_part part[2];
    for (int k = 0, count = tp_stage_parts(&stage->base, at, part); k < count; k++) {
        const void *qkv = tp_cuda_row(stage, all, part[k].row, 3 * width);
        void *o = tp_cuda_row_before(stage, inner->o, row + part[k].row - at->first_row, width);
        TP_TRY(tp_cuda_stage_attention(stage, &part[k], qkv, o, self->activations[at->slot].lse + part[k].lse));
    }
    return TP_OK;
}

/* Into rows of norm and g from `row` on, and of h from `h_row`. */
static tp_status
expand(tp_stage *stage, int block, const tp_slice_at *at, const tp_inner *inner, int64_t row, int64_t h_row)
{
    const tp_stage_block *self = &stage->base.block[block];
    int64_t width = stage->base.config.model.n_embd, hidden = 4 * width;
    void *norm = tp_cuda_row(stage, inner->norm, row, width);
    TP_TRY(normalise(stage, self, at, norm));
    tp_gemm_op op = linear(stage, self->in, self->in_bias, at, norm, tp_cuda_row(stage, inner->g, row, hidden));
    op.epilogue = TP_GEMM_BIAS_GELU_AUX;
    op.aux = tp_cuda_row(stage, inner->h, h_row, hidden);
    op.aux_stride = hidden;
    return tp_cuda_stage_product(stage, &op);
}

tp_status
tp_cuda_block_recompute(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_inner *inner = &self->remade[at->gslot];
    int64_t row = at->first_row - tp_stage_inner_begin(&stage->base, self, at);
    int64_t h_row = at->first_row - tp_stage_h_begin(&stage->base, self, at);
    return self->kind == TP_ATTENTION ? attend(stage, self, at, inner, row, tp_stage_keeps_keys(&stage->base, self))
                                      : expand(stage, block, at, inner, row, h_row);
}

static tp_status
layer_forward(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_inner *inner = &self->made[at->slot];
    int64_t width = stage->base.config.model.n_embd, row = at->first_row - tp_stage_made_begin(&stage->base, self, at);
    if (self->kind == TP_ATTENTION) {
        TP_TRY(attend(stage, self, at, inner, row, 0));
        return project(stage, block, at, tp_cuda_row(stage, inner->o, row, width));
    }
    TP_TRY(expand(stage, block, at, inner, row, row));
    return project(stage, block, at, tp_cuda_row(stage, inner->g, row, 4 * width));
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

/* d_input = dresidual + LayerNorm's gradient of d_norm; d_norm and dresidual: the slice's. */
static tp_status
norm_gradient(tp_stage *stage, int block, const tp_slice_at *at, const void *d_norm, const void *dresidual)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_activations *mine = &self->activations[at->slot];
    int64_t width = stage->base.config.model.n_embd, row = at->first_row;
    STAGE_RUN(stage,
              tp_cuda_layernorm_backward(stage->rank->stream, stage->dtype, at->rows, width,
                                         d_norm, width, tp_cuda_row(stage, mine->input, row, width), width, mine->mean + row,
                                         mine->rstd + row, tp_stage_value(&stage->base, self->norm), dresidual, width,
                                         tp_cuda_block_d_input(stage, block, at, row), width));
    return TP_OK;
}

static tp_status
attention_input_gradient(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_gradients *grads = &self->gradients[at->gslot];
    int64_t width = stage->base.config.model.n_embd, begin = tp_stage_slice_begin(&stage->base, at), row = at->first_row;
    const void *dy = tp_cuda_block_d_output(stage, block, at, row);
    void *d_norm = tp_cuda_row(stage, grads->d_norm, row - begin, width);
    tp_gemm_op back = linear_t(stage, self->out, at, dy, tp_cuda_row(stage, grads->d_o, row, width));
    TP_TRY(tp_cuda_stage_product(stage, &back));
    tp_stage_part part[2];
    for (int k = 0, count = tp_stage_parts(&stage->base, at, part); k < count; k++)
        STAGE_RUN(stage, tp_cuda_stage_attention_backward(stage, self, at, &part[k]));
    back = linear_t(stage, self->in, at, tp_cuda_row(stage, grads->dqkv, row - begin, 3 * width), d_norm);
    TP_TRY(tp_cuda_stage_product(stage, &back));
    return norm_gradient(stage, block, at, d_norm, dy);
}

static tp_status
ffn_input_gradient(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_gradients *grads = &self->gradients[at->gslot];
    int64_t width = stage->base.config.model.n_embd, hidden = 4 * width;
    int64_t row = at->first_row - tp_stage_slice_begin(&stage->base, at);
    const void *dy = tp_cuda_block_d_output(stage, block, at, at->first_row);
    void *dh = tp_cuda_row(stage, grads->dh, row, hidden), *d_norm = tp_cuda_row(stage, grads->d_norm, row, width);
    tp_gemm_op back = linear_t(stage, self->out, at, dy, dh);
    back.epilogue = TP_GEMM_DGELU;
    back.aux = tp_cuda_row(stage, tp_stage_inner(self, at)->h, at->first_row - tp_stage_h_begin(&stage->base, self, at), hidden);
    back.aux_stride = hidden;
    TP_TRY(tp_cuda_stage_product(stage, &back));
    back = linear_t(stage, self->in, at, dh, d_norm);
    TP_TRY(tp_cuda_stage_product(stage, &back));
    return norm_gradient(stage, block, at, d_norm, dy);
}

tp_status
tp_cuda_block_input_gradient(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    switch (self->kind) {
    case TP_ATTENTION: return attention_input_gradient(stage, block, at);
    case TP_FFN: return ffn_input_gradient(stage, block, at);
    case TP_HEAD:
        return norm_gradient(stage, block, at, tp_cuda_row(stage, self->activations[at->slot].d_norm, at->first_row,
                                                           stage->base.config.model.n_embd), NULL);
    default: return TP_OK; /* nothing below the embedding */
    }
}

/* ---- weight gradient: the whole micro-batch at its slice 0, or whole groups (stage.h) -------------------------------------------- */

/* Rows of a micro-batch that are summed together, [begin, end). */
typedef struct {
    int64_t begin, end;
    int accumulate; /* 0: the first of the gradient */
} stretch;

/* x and dy: from the part's first row on. */
static tp_status
weight_and_bias(tp_stage *stage, int param, int bias, const stretch *part, const void *x, const void *dy)
{
    const tp_param *info = &stage->base.param[param].info;
    int64_t rows = part->end - part->begin;
    tp_gemm_op op = {.kind = TP_GEMM_LINEAR_W,
                     .dtype = stage->dtype,
                     .accumulate = part->accumulate,
                     .rows = rows,
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
        STAGE_RUN(stage, tp_cuda_bias_gradient(stage->rank->stream, stage->dtype, rows, info->cols, dy, info->cols,
                                               stage->base.param[bias].grad, part->accumulate, stage->rank->partial));
    return TP_OK;
}

/* d_norm: from the part's first row on. */
static tp_status
norm_params(tp_stage *stage, const tp_stage_block *self, const tp_slice_at *at, const stretch *part, const void *d_norm)
{
    const tp_activations *mine = &self->activations[at->slot];
    int64_t width = stage->base.config.model.n_embd, row = part->begin;
    STAGE_RUN(stage, tp_cuda_layernorm_param_gradient(stage->rank->stream, stage->dtype, part->end - row, width, d_norm, width,
                                                      tp_cuda_row(stage, mine->input, row, width), width, mine->mean + row,
                                                      mine->rstd + row, tp_cuda_grad(stage, self->norm),
                                                      tp_cuda_grad(stage, self->norm_bias), part->accumulate,
                                                      stage->rank->partial));
    return TP_OK;
}

/* Its rows wait for the update, when those of one token are added in one order. */
static tp_status
keep_rows(tp_stage *stage, int block, const tp_slice_at *at, int64_t begin, int64_t end)
{
    int64_t width = stage->base.config.model.n_embd;
    STAGE_RUN(stage, tp_cuda_copy(stage->rank->cuda, stage->rank->stream,
                                  tp_cuda_row(stage, stage->base.embedding_rows, at->batch_row + begin, width),
                                  tp_cuda_block_d_output(stage, block, at, begin),
                                  (size_t)((end - begin) * width) * stage->base.sizes.element, TP_CUDA_ON_DEVICE));
    return TP_OK;
}

static tp_status
stretch_gradient(tp_stage *stage, int block, const tp_slice_at *at, const stretch *part)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_inner *inner = tp_stage_inner(self, at);
    const tp_gradients *grads = &self->gradients[at->gslot];
    int attention = self->kind == TP_ATTENTION;
    int64_t width = stage->base.config.model.n_embd, row = part->begin - tp_stage_inner_begin(&stage->base, self, at);
    int64_t grads_row = part->begin - tp_stage_slice_begin(&stage->base, at);
    TP_TRY(weight_and_bias(stage, self->in, self->in_bias, part, tp_cuda_row(stage, inner->norm, row, width),
                           attention ? tp_cuda_row(stage, grads->dqkv, grads_row, 3 * width)
                                     : tp_cuda_row(stage, grads->dh, grads_row, 4 * width)));
    TP_TRY(weight_and_bias(stage, self->out, self->out_bias, part,
                           attention ? tp_cuda_row(stage, inner->o, row, width) : tp_cuda_row(stage, inner->g, row, 4 * width),
                           tp_cuda_block_d_output(stage, block, at, part->begin)));
    return norm_params(stage, self, at, part, tp_cuda_row(stage, grads->d_norm, grads_row, width));
}

/* Move `rows` rows of an array `up` rows up: on from above where none is overwritten that is still to move, else by way of the
 * workspace, which no product is using. */
static tp_status
put_by(tp_stage *stage, void *first, int64_t width, int64_t rows, int64_t up)
{
    tp_cuda_device *cuda = stage->rank->cuda;
    size_t row = (size_t)width * stage->base.sizes.element;
    int64_t fit = (int64_t)(TP_CUDA_GEMM_BYTES / row), most = up < rows && up < fit ? fit : up;
    for (int64_t end = up > 0 ? rows : 0, now; end > 0; end -= now) {
        now = most < end ? most : end;
        char *from = tp_cuda_row(stage, first, end - now, width), *to = from + (size_t)up * row;
        void *by = now > up ? stage->rank->workspace : to;
        STAGE_RUN(stage, tp_cuda_copy(cuda, stage->rank->stream, by, from, (size_t)now * row, TP_CUDA_ON_DEVICE));
        if (by != to)
            STAGE_RUN(stage, tp_cuda_copy(cuda, stage->rank->stream, to, by, (size_t)now * row, TP_CUDA_ON_DEVICE));
    }
    return TP_OK;
}

/* What this block's W has been the last to read, and leaves to that of the slice before, to where that has it: the first rows of this
 * slice and those that wait behind them. */
static tp_status
put_block_by(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_gradients *grads = &self->gradients[at->gslot];
    int64_t width = stage->base.config.model.n_embd, rows = tp_stage_groups_begin(&stage->base, at->micro, at->slice) - at->begin;
    const tp_slice_at before = tp_stage_at(&stage->base, at->q, at->slice - 1, TP_WHOLE, at->slot, at->gslot);
    int64_t up = at->room_begin - before.room_begin, row = at->begin - at->room_begin;
    if (rows > 0 && self->saves && stage->base.config.remake_slices) { /* nobody reads h again */
        const tp_inner *inner = tp_stage_inner(self, at);
        TP_TRY(put_by(stage, tp_cuda_row(stage, inner->norm, row, width), width, rows, up));
        TP_TRY(self->kind == TP_ATTENTION ? put_by(stage, tp_cuda_row(stage, inner->o, row, width), width, rows, up)
                                          : put_by(stage, tp_cuda_row(stage, inner->g, row, 4 * width), 4 * width, rows, up));
    }
    int64_t wide = (self->kind == TP_ATTENTION ? 3 : 4) * width;
    up = at->gradients_begin - before.gradients_begin;
    row = at->begin - at->gradients_begin;
    TP_TRY(put_by(stage, tp_cuda_row(stage, self->kind == TP_ATTENTION ? grads->dqkv : grads->dh, row, wide), wide, rows, up));
    TP_TRY(put_by(stage, tp_cuda_row(stage, grads->d_norm, row, width), width, rows, up));
    if (block + 1 == stage->base.blocks)
        return TP_OK;
    return put_by(stage, tp_cuda_row(stage, self[1].gradients[at->gslot].d_input, row, width), width, rows, up);
}

static tp_status
head_gradient(tp_stage *stage, const tp_stage_block *self, const tp_slice_at *at)
{
    const stretch all = {0, at->all_rows, !tp_stage_sums_from(&stage->base, at->q)};
    TP_TRY(tp_cuda_head_weight_gradient(stage, at));
    return norm_params(stage, self, at, &all, self->activations[at->slot].d_norm);
}

tp_status
tp_cuda_block_weight_gradient(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    int groups = at->micro->batch == 1 && stage->group_rows > 0, sliced = groups && at->micro->slices > 1;
    int64_t begin = 0, end = at->all_rows, most = groups ? stage->group_rows : end;
    if (at->slice > 0 && (!sliced || self->kind == TP_HEAD))
        return TP_OK;
    if (self->kind == TP_HEAD)
        return head_gradient(stage, self, at);
    if (self->kind == TP_EMBEDDING)
        return sliced ? keep_rows(stage, block, at, at->begin, at->end) : keep_rows(stage, block, at, begin, end);
    if (sliced) {
        begin = tp_stage_groups_begin(&stage->base, at->micro, at->slice);
        end = tp_stage_groups_begin(&stage->base, at->micro, at->slice + 1);
    }
    while (end > begin) {
        stretch part = {end - begin > most ? end - most : begin, end, end < at->all_rows || !tp_stage_sums_from(&stage->base, at->q)};
        TP_TRY(stretch_gradient(stage, block, at, &part));
        end = part.begin;
    }
    return sliced && at->slice > 0 ? put_block_by(stage, block, at) : TP_OK;
}
