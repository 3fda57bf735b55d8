/* Forward, input-gradient and weight-gradient work of one slice in one block. Formulas: GPT-2 (Radford et al. 2019),
 * pre-LayerNorm: x += attention(LN(x)); x += W2 gelu(W1 LN(x)). */
#include "csrc/stage/stage.h"

#include <string.h>

static tp_linear
product(const tp_stage *stage, int param, const float *x, int64_t x_stride, float *y, int64_t y_stride, int64_t rows)
{
    const tp_stage_param *weight = &stage->base.param[param];
    return (tp_linear){.rows = rows,
                       .n_in = weight->info.rows,
                       .n_out = weight->info.cols,
                       .x = x,
                       .x_stride = x_stride,
                       .weight = weight->value,
                       .y = y,
                       .y_stride = y_stride};
}

static tp_linear
transposed(const tp_stage *stage, int param, const float *x, int64_t x_stride, float *y, int64_t y_stride, int64_t rows)
{
    tp_linear op = product(stage, param, x, x_stride, y, y_stride, rows);
    op.weight = stage->base.param[param].copy;
    return op;
}

/* ---- forward ------------------------------------------------------------------------------------------------------------ */

/* forward: the statistics are new; R has them, as B reads them too. */
static void
normalise(tp_stage *stage, const tp_stage_block *self, const tp_activations *mine, const tp_slice_at *at, int forward)
{
    int64_t width = stage->base.config.model.n_embd;
    const float *x = mine->input + at->first_row * width, *gamma = tp_stage_value(&stage->base, self->norm);
    const float *beta = tp_stage_value(&stage->base, self->norm_bias);
    float *mean = mine->mean + at->first_row, *rstd = mine->rstd + at->first_row;
    if (forward)
        stage->be->ops->layernorm(stage->be, at->rows, width, x, width, gamma, beta, stage->scratch, width, mean, rstd);
    else
        stage->be->ops->layernorm_apply(stage->be, at->rows, width, x, width, mean, rstd, 1, gamma, beta, stage->scratch, width);
}

/* y = input + x W + b: the second product of both kinds of block. x: of the slice's rows. */
static void
project(tp_stage *stage, int block, const tp_slice_at *at, const float *x, int64_t x_width)
{
    const tp_stage_block *self = &stage->base.block[block];
    int64_t width = stage->base.config.model.n_embd, row = at->first_row;
    tp_linear op = product(stage, self->out, x, x_width,
                           tp_block_output(stage, block, at->slot) + row * width, width, at->rows);
    op.bias = tp_stage_value(&stage->base, self->out_bias);
    op.epilogue = TP_EPILOGUE_RESIDUAL;
    op.aux = self->activations[at->slot].input + row * width;
    op.aux_stride = width;
    stage->be->ops->linear(stage->be, &op);
}

/* Keys and values of a micro-batch, from its row 0 on. */
typedef struct {
    float *k, *v;
    int64_t stride;
} key_rows;

static key_rows
keys_of(const tp_stage *stage, const tp_stage_block *self, const tp_slice_at *at, const tp_inner *inner)
{
    int64_t width = stage->base.config.model.n_embd;
    int kept = tp_stage_keeps_keys(&stage->base, self);
    float *k = kept ? (float *)self->made[at->slot].kv : (float *)inner->qkv + width;
    return (key_rows){k, k + width, kept ? 2 * width : 3 * width};
}

/* Into rows of q, k, v and o from `row` on. forward: the keys are new. */
static void
attend(tp_stage *stage, const tp_stage_block *self, const tp_slice_at *at, const tp_inner *inner, int64_t row, int forward)
{
    const tp_activations *mine = &self->activations[at->slot];
    int64_t width = stage->base.config.model.n_embd;
    float *qkv = (float *)inner->qkv + row * 3 * width, *o = (float *)inner->o + row * width;
    key_rows keys = keys_of(stage, self, at, inner);
    int kept = tp_stage_keeps_keys(&stage->base, self);
    normalise(stage, self, mine, at, forward);
    tp_linear op = product(stage, self->in, stage->scratch, width, qkv, 3 * width, at->rows);
    op.bias = tp_stage_value(&stage->base, self->in_bias);
    op.n_out = kept && !forward ? width : op.n_out; /* the queries': the first columns, and so the first panels */
    stage->be->ops->linear(stage->be, &op);
    for (int64_t r = 0; forward && kept && r < at->rows; r++)
        memcpy(keys.k + (at->first_row + r) * keys.stride, qkv + r * 3 * width + width, (size_t)(2 * width) * sizeof(float));
    tp_stage_part part[2];
    for (int k = 0, count = tp_stage_parts(&stage->base, at, part); k < count; k++) {
        int64_t of_slice = part[k].row - part[0].row, first = part[k].row * keys.stride;
        stage->be->ops->attention_forward(stage->be, &part[k].shape, qkv + of_slice * 3 * width, keys.k + first, keys.v + first,
                                          keys.stride, o + of_slice * width, mine->lse + part[k].lse);
    }
}

/* Into rows of h and g from `row` on. forward: as in attend. */
static void
expand(tp_stage *stage, const tp_stage_block *self, const tp_slice_at *at, const tp_inner *inner, int64_t row, int forward)
{
    int64_t width = stage->base.config.model.n_embd, hidden = 4 * width;
    float *h = inner->h, *g = inner->g;
    normalise(stage, self, &self->activations[at->slot], at, forward);
    tp_linear op = product(stage, self->in, stage->scratch, width, g + row * hidden, hidden, at->rows);
    op.bias = tp_stage_value(&stage->base, self->in_bias);
    op.epilogue = TP_EPILOGUE_GELU;
    op.aux = h + row * hidden;
    op.aux_stride = hidden;
    stage->be->ops->linear(stage->be, &op);
}

void
tp_block_recompute(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_inner *inner = &self->remade[at->gslot];
    int64_t row = at->first_row - tp_stage_inner_begin(&stage->base, self, at);
    if (self->kind == TP_ATTENTION)
        attend(stage, self, at, inner, row, 0);
    else
        expand(stage, self, at, inner, row, 0);
}

static void
layer_forward(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_inner *inner = &self->made[at->slot];
    int64_t width = stage->base.config.model.n_embd, row = at->first_row - tp_stage_made_begin(&stage->base, self, at);
    if (self->kind == TP_ATTENTION) {
        attend(stage, self, at, inner, row, 1);
        project(stage, block, at, (float *)inner->o + row * width, width);
    } else {
        expand(stage, self, at, inner, row, 1);
        project(stage, block, at, (float *)inner->g + row * 4 * width, 4 * width);
    }
}

void
tp_block_forward(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_model *model = &stage->base.config.model;
    switch (self->kind) {
    case TP_EMBEDDING:
        stage->be->ops->embedding(stage->be, at->rows, model->n_embd, model->vocab_size, model->block_size,
                                  stage->tokens + at->batch_row + at->first_row,
                                  stage->positions + at->batch_row + at->first_row,
                                  tp_stage_value(&stage->base, self->in), tp_stage_value(&stage->base, self->out),
                                  tp_block_output(stage, block, at->slot) + at->first_row * model->n_embd,
                                  model->n_embd);
        break;
    case TP_ATTENTION:
    case TP_FFN: layer_forward(stage, block, at); break;
    default: tp_head_forward(stage, block, at); break;
    }
}

/* ---- input gradient ------------------------------------------------------------------------------------------------------ */

void
tp_block_norm_gradient(tp_stage *stage, int block, const tp_slice_at *at, const float *dy, const float *dresidual)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_activations *mine = &self->activations[at->slot];
    const tp_gradients *grads = &self->gradients[at->gslot];
    int64_t width = stage->base.config.model.n_embd, tokens = at->end - at->begin;
    for (int64_t s = at->first; s < at->last; s++) {
        int64_t row = tp_stage_row(&stage->base, at, at->end - 1, s); /* of the micro-batch */
        int64_t last = row - at->first_row;                           /* of the slice */
        int64_t step = tp_micro_row_step(at->micro, s), down = -step * width;
        float *dnorm = grads->dnorm + s * 2 * width;
        if (at->end == stage->base.config.slicing->seq_len) /* the chain of this sequence begins */
            stage->be->ops->zero(stage->be, 2 * width, dnorm);
        stage->be->ops->layernorm_backward(stage->be, tokens, width, dy + last * width, down, mine->input + row * width,
                                           down, mine->mean + row, mine->rstd + row, -step,
                                           tp_stage_value(&stage->base, self->norm),
                                           dresidual == NULL ? NULL : dresidual + last * width, down,
                                           tp_block_d_input(stage, block, at, row), down, dnorm,
                                           self->norm_bias < 0 ? NULL : dnorm + width);
    }
}

/* Which row of the micro-batch an attention's first of dqkv is. */
static int64_t
dqkv_begin(const tp_stage *stage, const tp_gradients *grads, const tp_slice_at *at)
{
    return grads->dkv != NULL ? tp_stage_slice_begin(&stage->base, at) : 0;
}

static void
attention_input_gradient(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_inner *inner = tp_stage_inner(self, at);
    const tp_gradients *grads = &self->gradients[at->gslot];
    const float *all_lse = self->activations[at->slot].lse;
    int64_t width = stage->base.config.model.n_embd, row = at->first_row;
    const float *dy = tp_block_d_output(stage, block, at, row);
    float *dqkv = grads->dqkv + (row - dqkv_begin(stage, grads, at)) * 3 * width;
    float *all_dkv = grads->dkv != NULL ? grads->dkv : grads->dqkv + width;
    int64_t dkv_stride = grads->dkv != NULL ? 2 * width : 3 * width, inner_row = row - tp_stage_inner_begin(&stage->base, self, at);
    const float *q = (float *)inner->qkv + inner_row * 3 * width, *o = (float *)inner->o + inner_row * width;
    key_rows keys = keys_of(stage, self, at, inner);
    tp_linear back = transposed(stage, self->out, dy, width, stage->scratch, width, at->rows); /* d(o) */
    stage->be->ops->linear_t(stage->be, &back);
    tp_stage_part part[2];
    for (int k = 0, count = tp_stage_parts(&stage->base, at, part); k < count; k++) {
        int64_t lse = part[k].lse, of_slice = (part[k].row - part[0].row) * width, first = part[k].row * keys.stride;
        float *dkv = all_dkv + part[k].row * dkv_stride;
        stage->be->ops->attention_backward(stage->be, &part[k].shape, q + 3 * of_slice, keys.k + first, keys.v + first, keys.stride,
                                           o + of_slice, stage->scratch + of_slice, all_lse + lse, grads->delta + lse,
                                           dqkv + 3 * of_slice, dkv, dkv + width, dkv_stride);
    }
    for (int64_t r = 0; grads->dkv != NULL && r < at->rows; r++)
        memcpy(dqkv + r * 3 * width + width, grads->dkv + (row + r) * 2 * width, (size_t)(2 * width) * sizeof(float));
    back = transposed(stage, self->in, dqkv, 3 * width, stage->scratch, width, at->rows);
    stage->be->ops->linear_t(stage->be, &back);
    tp_block_norm_gradient(stage, block, at, stage->scratch, dy);
}

static void
ffn_input_gradient(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    int64_t width = stage->base.config.model.n_embd, hidden = 4 * width, row = at->first_row;
    const float *dy = tp_block_d_output(stage, block, at, row);
    int64_t inner_row = row - tp_stage_inner_begin(&stage->base, self, at);
    float *h = (float *)tp_stage_inner(self, at)->h + inner_row * hidden; /* becomes dh: nothing else reads h again */
    tp_linear back = transposed(stage, self->out, dy, width, h, hidden, at->rows);
    back.epilogue = TP_EPILOGUE_DGELU;
    back.aux = h;
    back.aux_stride = hidden;
    stage->be->ops->linear_t(stage->be, &back);
    back = transposed(stage, self->in, h, hidden, stage->scratch, width, at->rows);
    stage->be->ops->linear_t(stage->be, &back);
    tp_block_norm_gradient(stage, block, at, stage->scratch, dy);
}

void
tp_block_input_gradient(tp_stage *stage, int block, const tp_slice_at *at)
{
    switch (stage->base.block[block].kind) {
    case TP_ATTENTION: attention_input_gradient(stage, block, at); break;
    case TP_FFN: ffn_input_gradient(stage, block, at); break;
    case TP_HEAD: tp_head_input_gradient(stage, block, at); break;
    default: break; /* nothing below the embedding */
    }
}

/* ---- weight gradient ------------------------------------------------------------------------------------------------------ */

/* Tokens [begin, end) of one sequence, walked downwards. */
typedef struct {
    int64_t sequence, begin, end;
    int accumulate; /* 0: the first chain of the gradient begins here */
} stretch;

/* First row (of the micro-batch) of the walk, and the step to the next. */
static int64_t
walk_row(const tp_stage *stage, const tp_slice_at *at, const stretch *part)
{
    return tp_stage_row(&stage->base, at, part->end - 1, part->sequence);
}
static int64_t
walk_step(const tp_slice_at *at, const stretch *part)
{
    return -tp_micro_row_step(at->micro, part->sequence);
}

/* d(W_in) from the normalised input, made anew in pieces that fit the scratch rows; d(b_in). dy begins with row dy_begin. */
static void
in_gradient(tp_stage *stage, const tp_stage_block *self, const tp_slice_at *at, const stretch *part, const float *dy,
            int64_t dy_width, int64_t dy_begin)
{
    const tp_activations *mine = &self->activations[at->slot];
    const tp_backend_ops *ops = stage->be->ops;
    int64_t width = stage->base.config.model.n_embd, tokens = part->end - part->begin, step = walk_step(at, part);
    int64_t room = tp_stage_scratch_rows(stage->base.config.slicing);
    int64_t piece = tokens <= room ? tokens : room / TP_ROW_GROUP * TP_ROW_GROUP;
    for (int64_t done = 0; done < tokens; done += piece) {
        int64_t rows = tokens - done < piece ? tokens - done : piece, row = walk_row(stage, at, part) + done * step;
        const float *from = dy + (row - dy_begin) * dy_width;
        int accumulate = part->accumulate || done > 0;
        ops->layernorm_apply(stage->be, rows, width, mine->input + row * width, step * width, mine->mean + row,
                             mine->rstd + row, step, tp_stage_value(&stage->base, self->norm),
                             tp_stage_value(&stage->base, self->norm_bias), stage->scratch, width);
        ops->linear_w(stage->be, rows, width, dy_width, stage->scratch, width, from, step * dy_width,
                      stage->base.param[self->in].grad, accumulate);
        if (self->in_bias >= 0)
            ops->bias_w(stage->be, rows, dy_width, from, step * dy_width,
                        stage->base.param[self->in_bias].grad, accumulate);
    }
}

/* d(W_out), d(b_out). x begins with row x_begin, dy with the walk's first. */
static void
out_gradient(tp_stage *stage, const tp_stage_block *self, const tp_slice_at *at, const stretch *part, const float *x,
             int64_t x_width, int64_t x_begin, const float *dy)
{
    int64_t width = stage->base.config.model.n_embd, row = walk_row(stage, at, part), rows = part->end - part->begin;
    int64_t step = walk_step(at, part);
    stage->be->ops->linear_w(stage->be, rows, x_width, width, x + (row - x_begin) * x_width, step * x_width, dy, step * width,
                             stage->base.param[self->out].grad, part->accumulate);
    if (self->out_bias >= 0)
        stage->be->ops->bias_w(stage->be, rows, width, dy, step * width, stage->base.param[self->out_bias].grad, part->accumulate);
}

static void
embedding_gradient(tp_stage *stage, int block, const tp_slice_at *at, const stretch *part)
{
    int64_t width = stage->base.config.model.n_embd, seq_len = stage->base.config.slicing->seq_len;
    float *rows = stage->base.embedding_rows;
    int64_t sequence = stage->base.config.slicing->micro[at->q].first_seq + part->sequence;
    for (int64_t t = part->begin; t < part->end; t++) {
        int64_t row = tp_stage_row(&stage->base, at, t, part->sequence);
        stage->be->ops->copy(stage->be, width, tp_block_d_output(stage, block, at, row),
                             rows + (sequence * seq_len + seq_len - 1 - t) * width);
    }
}

static void
add_norm_gradient(tp_stage *stage, const tp_stage_block *self, const tp_slice_at *at)
{
    int64_t width = stage->base.config.model.n_embd;
    float *norm = stage->base.param[self->norm].grad;
    for (int64_t s = at->first; s < at->last; s++) {
        const float *dnorm = self->gradients[at->gslot].dnorm + s * 2 * width;
        int first = tp_stage_sums_from(&stage->base, at->q) && s == 0;
        (first ? stage->be->ops->copy : stage->be->ops->add)(stage->be, width, dnorm, norm);
        if (self->norm_bias >= 0)
            (first ? stage->be->ops->copy : stage->be->ops->add)(stage->be, width, dnorm + width,
                                                                 stage->base.param[self->norm_bias].grad);
    }
}

static void
stretch_gradient(tp_stage *stage, int block, const tp_slice_at *at, const stretch *part)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_inner *inner = tp_stage_inner(self, at);
    const tp_gradients *grads = &self->gradients[at->gslot];
    int64_t width = stage->base.config.model.n_embd, begin = tp_stage_inner_begin(&stage->base, self, at);
    const float *dy = self->kind == TP_HEAD ? NULL : tp_block_d_output(stage, block, at, walk_row(stage, at, part));
    if (self->kind == TP_EMBEDDING) {
        embedding_gradient(stage, block, at, part);
    } else if (self->kind == TP_ATTENTION) {
        in_gradient(stage, self, at, part, grads->dqkv, 3 * width, dqkv_begin(stage, grads, at));
        out_gradient(stage, self, at, part, inner->o, width, begin, dy);
    } else if (self->kind == TP_FFN) {
        in_gradient(stage, self, at, part, inner->h, 4 * width, begin);
        out_gradient(stage, self, at, part, inner->g, 4 * width, begin, dy);
    }
}

/* Move this slice's first `rows` rows, whose weight gradients are left to W of the slice before, behind the buffers' slice
 * (tp_stage_slice_begin): what is brought of that slice overwrites all else. */
static void
put_by(const tp_stage *stage, const tp_slice_at *at, float *array, int64_t width, int64_t rows)
{
    int64_t to = stage->base.config.slicing->max_rows, from = to - at->rows;
    memmove(array + to * width, array + from * width, (size_t)(rows * width) * sizeof(float));
}

/* What this block's W has been the last to read. */
static void
put_block_by(const tp_stage *stage, int block, const tp_slice_at *at, int64_t rows)
{
    const tp_stage_block *self = &stage->base.block[block];
    int64_t width = stage->base.config.model.n_embd;
    if (self->saves && stage->base.config.remake_slices && self->kind == TP_ATTENTION)
        put_by(stage, at, tp_stage_inner(self, at)->o, width, rows);
    if (self->saves && stage->base.config.remake_slices && self->kind == TP_FFN) {
        put_by(stage, at, tp_stage_inner(self, at)->h, 4 * width, rows);
        put_by(stage, at, tp_stage_inner(self, at)->g, 4 * width, rows);
    }
    if (self->kind == TP_ATTENTION && self->gradients[at->gslot].dkv != NULL)
        put_by(stage, at, self->gradients[at->gslot].dqkv, 3 * width, rows);
    if (stage->base.config.slice_gradients && block + 1 < stage->base.blocks)
        put_by(stage, at, self[1].gradients[at->gslot].d_input, width, rows);
}

void
tp_block_weight_gradient(tp_stage *stage, int block, const tp_slice_at *at, int64_t end)
{
    const tp_stage_block *self = &stage->base.block[block];
    int64_t seq_len = stage->base.config.slicing->seq_len, begin = tp_stage_group_begin(at->micro, at->slice);
    int sliced = stage->base.config.slice_gradients;
    if ((self->saves || sliced) && !at->whole)
        end = tp_stage_group_begin(at->micro, at->slice + 1);
    for (int64_t s = at->first; s < at->last && begin < end; s++) {
        stretch part = {s, begin, end, 1};
        part.accumulate = !(tp_stage_sums_from(&stage->base, at->q) && s == 0 && end == seq_len);
        stretch_gradient(stage, block, at, &part);
    }
    if ((sliced || stage->base.config.remake_slices) && begin > at->begin)
        put_block_by(stage, block, at, begin - at->begin);
    if (at->slice == 0 && self->norm >= 0)
        add_norm_gradient(stage, self, at);
}
