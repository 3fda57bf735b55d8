/* The head: final LayerNorm, logits, loss and both gradients of a tile of rows while its logits exist (stage.h). */
#include "csrc/stage/stage.h"

#include "csrc/base/deadline.h"

_Static_assert(TP_HEAD_TILE % TP_ROW_GROUP == 0, "a full tile is taken whole");

/* Which rows of a slice, in which order. */
typedef enum { ROWS_ALL, ROWS_FORWARD, ROWS_BACKWARD } row_set;

static int
belongs(row_set set, int64_t token)
{
    return set == ROWS_ALL || (token % 3 == 0) == (set == ROWS_FORWARD);
}

/* What is below a group goes on at the tile's begin: copying at most TP_ROW_GROUP - 1 rows of logits takes a millisecond, a pass
 * over the weights that the tile's end would cut in two takes twenty more (GPT-2 124M, Xeon). */
void
tp_head_flush(tp_stage *stage, int which, int last)
{
    const tp_stage_block *self = &stage->base.block[stage->base.blocks - 1];
    const tp_backend_ops *ops = stage->be->ops;
    head_tile *tile = &stage->tile[which];
    tp_stage_param *weight = &stage->base.param[self->in];
    int64_t width = stage->base.config.model.n_embd, stride = tp_logits_stride(&stage->base.config.model);
    int64_t left = last ? 0 : tile->rows % TP_ROW_GROUP, taken = tile->rows - left;
    if (taken == 0)
        return;
    ops->linear_w(stage->be, taken, stage->base.config.model.vocab_size, width, tile->logits, stride, tile->x, width,
                  which == 0 ? stage->head_forward : weight->grad, tile->seen);
    ops->copy(stage->be, left * stride, tile->logits + taken * stride, tile->logits);
    ops->copy(stage->be, left * width, tile->x + taken * width, tile->x);
    tile->rows = left;
    tile->seen = 1;
}

/* Whether the other ranks wait for what this slice leads to: see stage.h. */
static int
in_haste(const tp_slice_at *at)
{
    return tp_head_in_haste(at->micro->slices, at->slice);
}

/* Logits and loss of `count` rows gathered behind those that wait in the tile; d(input), unless only evaluated. */
static void
tile_work(tp_stage *stage, const tp_stage_block *self, const tp_slice_at *at, row_set set, const int64_t *row,
          int64_t count)
{
    const tp_backend_ops *ops = stage->be->ops;
    const tp_activations *mine = &self->activations[at->slot];
    const tp_stage_param *weight = &stage->base.param[self->in];
    head_tile *tile = &stage->tile[set == ROWS_BACKWARD];
    int64_t width = stage->base.config.model.n_embd, vocab = stage->base.config.model.vocab_size;
    int64_t stride = tp_logits_stride(&stage->base.config.model);
    float *x = tile->x + tile->rows * width, *logits = tile->logits + tile->rows * stride;
    int32_t targets[TP_HEAD_TILE];
    double loss[TP_HEAD_TILE];
    for (int64_t i = 0; i < count; i++) {
        ops->layernorm_apply(stage->be, 1, width, mine->input + row[i] * width, width, mine->mean + row[i],
                             mine->rstd + row[i], 1, tp_stage_value(&stage->base, self->norm),
                             tp_stage_value(&stage->base, self->norm_bias), x + i * width, width);
        targets[i] = stage->targets[at->batch_row + row[i]];
    }
    tp_linear op = {.rows = count, .n_in = vocab, .n_out = width, .x = x, .x_stride = width,
                    .weight = weight->copy, .y = logits, .y_stride = stride};
    ops->linear_t(stage->be, &op);
    if (tp_deadline_told_before())
        return;
    float each = tp_stage_token_weight(&stage->base, at->micro);
    ops->softmax_loss(stage->be, count, vocab, logits, stride, targets, each, set != ROWS_ALL, loss);
    for (int64_t i = 0; i < count; i++)
        mine->loss[row[i]] = loss[i];
    if (set == ROWS_ALL)
        return;
    op = (tp_linear){.rows = count, .n_in = vocab, .n_out = width, .x = logits, .x_stride = stride,
                     .weight = weight->value, .y = stage->head_dx, .y_stride = width};
    ops->linear(stage->be, &op);
    if (tp_deadline_told_before())
        return;
    for (int64_t i = 0; i < count; i++)
        ops->copy(stage->be, width, stage->head_dx + i * width, mine->dx + row[i] * width);
    tile->rows += count;
    if (tile->rows >= tp_head_tile_most(set == ROWS_FORWARD, in_haste(at)))
        tp_head_flush(stage, set == ROWS_BACKWARD, 0);
}

/* The rows of `set` with tokens [begin, end): sequences ascending; tokens ascending in F, descending in I. */
static void
rows_work(tp_stage *stage, const tp_stage_block *self, const tp_slice_at *at, row_set set, int64_t begin, int64_t end)
{
    int64_t row[TP_HEAD_TILE], count = 0;
    for (int64_t s = at->first; s < at->last; s++) {
        for (int64_t i = 0; i < end - begin; i++) {
            int64_t token = set == ROWS_BACKWARD ? end - 1 - i : begin + i;
            if (!belongs(set, token))
                continue;
            row[count++] = tp_stage_row(&stage->base, at, token, s);
            if (count == TP_HEAD_TILE - stage->tile[set == ROWS_BACKWARD].rows) {
                if (tp_deadline_told_before())
                    return;
                tile_work(stage, self, at, set, row, count);
                count = 0;
            }
        }
    }
    if (count > 0)
        tile_work(stage, self, at, set, row, count);
}

static void
sum_losses(tp_stage *stage, const tp_activations *mine, const tp_slice_at *at)
{
    int64_t seq_len = stage->base.config.slicing->seq_len;
    for (int64_t s = at->first; s < at->last; s++) {
        double sum = 0;
        for (int64_t t = 0; t < seq_len; t++)
            sum += mine->loss[tp_stage_row(&stage->base, at, t, s)];
        stage->sequence_loss[stage->base.config.slicing->micro[at->q].first_seq + s] = sum;
    }
}

/* The rows of F up to the end of this slice, once there are enough: few rows take as long as the head's weights take to come
 * from memory, and nobody waits for them before the sequence's backward (GPT-2 124M, Zen 3: a product of 12 rows takes 24 ms,
 * of 24 rows 29, of 48 rows 56; with AVX-512 the rows are faster, the weights are not). */
static void
forward_rows(tp_stage *stage, const tp_stage_block *self, const tp_slice_at *at)
{
    int last = at->slice == at->micro->slices - 1;
    if (!last && !in_haste(at) && (at->end - stage->head_from) / 3 < TP_HEAD_WORTH)
        return;
    rows_work(stage, self, at, ROWS_FORWARD, stage->head_from, at->end);
    stage->head_from = last ? 0 : at->end;
}

void
tp_head_forward(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_activations *mine = &self->activations[at->slot];
    int64_t width = stage->base.config.model.n_embd, seq_len = stage->base.config.slicing->seq_len;
    stage->be->ops->layernorm(stage->be, at->rows, width, mine->input + at->first_row * width, width,
                              tp_stage_value(&stage->base, self->norm),
                              tp_stage_value(&stage->base, self->norm_bias), NULL, 0, mine->mean + at->first_row,
                              mine->rstd + at->first_row);
    if (!stage->train)
        rows_work(stage, self, at, ROWS_ALL, at->begin, at->end);
    else if (!at->whole)
        forward_rows(stage, self, at);
    else if (at->end == seq_len)
        rows_work(stage, self, at, ROWS_FORWARD, 0, seq_len);
    if (!stage->train && at->end == seq_len)
        sum_losses(stage, mine, at);
}

void
tp_head_input_gradient(tp_stage *stage, int block, const tp_slice_at *at)
{
    const tp_stage_block *self = &stage->base.block[block];
    const tp_activations *mine = &self->activations[at->slot];
    int64_t seq_len = stage->base.config.slicing->seq_len;
    if (!at->whole)
        rows_work(stage, self, at, ROWS_BACKWARD, at->begin, at->end);
    else if (at->end == seq_len)
        rows_work(stage, self, at, ROWS_BACKWARD, 0, seq_len);
    if (!in_haste(at) && stage->tile[0].rows >= TP_HEAD_TILE / 2)
        tp_head_flush(stage, 0, 0);
    if (at->slice == 0)
        sum_losses(stage, mine, at);
    tp_block_norm_gradient(stage, block, at, mine->dx + at->first_row * stage->base.config.model.n_embd, NULL);
}
