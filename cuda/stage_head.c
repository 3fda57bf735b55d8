/* The head on a GPU: final LayerNorm, logits, loss and d(input) of rows while their logits exist (stage.h). */
#include "cuda/stage.h"

/* Rows from `row` of the batch on, that lie in one tile. */
typedef struct {
    int64_t row, rows;    /* of the batch */
    int64_t micro_row;    /* the first in the micro-batch's buffers */
    int64_t offset;       /* in the tile */
    stage_sum sum;        /* whose tiles these are */
} tile_rows;

static tp_status
weight_gradient(tp_stage *stage, const tile_rows *part)
{
    int64_t vocab = tp_cuda_padded_vocab(&stage->base.config.model), width = stage->base.config.model.n_embd;
    tp_gemm_op op = {.kind = TP_GEMM_LINEAR_W,
                     .dtype = stage->dtype,
                     .accumulate = part->row - part->offset > part->sum.first,
                     .rows = part->offset + part->rows,
                     .n_in = vocab,
                     .n_out = width,
                     .x = stage->tile_logits,
                     .x_stride = vocab,
                     .w = stage->tile_x,
                     .w_stride = width,
                     .y = stage->base.param[stage->base.block[stage->base.blocks - 1].in].grad,
                     .y_stride = width};
    return tp_cuda_stage_product(stage, &op);
}

static tp_status
tile_work(tp_stage *stage, const tp_slice_at *at, const tile_rows *part)
{
    const tp_stage_block *self = &stage->base.block[stage->base.blocks - 1];
    const tp_activations *mine = &self->activations[at->slot];
    int64_t width = stage->base.config.model.n_embd, vocab = tp_cuda_padded_vocab(&stage->base.config.model);
    void *x = tp_cuda_row(stage, stage->tile_x, part->offset, width);
    void *logits = tp_cuda_row(stage, stage->tile_logits, part->offset, vocab);
    STAGE_RUN(stage, tp_cuda_layernorm(stage->rank->stream, stage->dtype, part->rows, width,
                                       tp_cuda_row(stage, mine->input, part->micro_row, width), width,
                                       tp_stage_value(&stage->base, self->norm),
                                       tp_stage_value(&stage->base, self->norm_bias), x, width,
                                       mine->mean + part->micro_row, mine->rstd + part->micro_row));
    tp_gemm_op op = {.kind = TP_GEMM_LINEAR_T, .dtype = stage->dtype, .rows = part->rows, .n_in = vocab, .n_out = width,
                     .x = x, .x_stride = width, .w = tp_cuda_weight(stage, self->in), .w_stride = width,
                     .y = logits, .y_stride = vocab};
    TP_TRY(tp_cuda_stage_product(stage, &op));
    STAGE_RUN(stage, tp_cuda_softmax_loss(stage->rank->stream, stage->dtype, part->rows,
                                          stage->base.config.model.vocab_size, logits, vocab,
                                          stage->on_device.targets + part->row, tp_stage_token_weight(&stage->base, at->micro),
                                          stage->train, stage->loss + part->row));
    if (!stage->train)
        return TP_OK;
    op = (tp_gemm_op){.kind = TP_GEMM_LINEAR, .dtype = stage->dtype, .rows = part->rows, .n_in = vocab, .n_out = width,
                      .x = logits, .x_stride = vocab, .w = tp_cuda_weight(stage, self->in), .w_stride = width,
                      .y = tp_cuda_row(stage, mine->d_norm, part->micro_row, width), .y_stride = width};
    TP_TRY(tp_cuda_stage_product(stage, &op));
    int last = part->row + part->rows == part->sum.first + part->sum.count;
    if (last ? tp_cuda_sums(&stage->base) > 1 : part->offset + part->rows == stage->tile_rows)
        return weight_gradient(stage, part);
    return TP_OK;
}

tp_status
tp_cuda_head_weight_gradient(tp_stage *stage, const tp_slice_at *at)
{
    stage_sum sum = tp_cuda_sum(&stage->base, at->q);
    int64_t offset = (sum.count - 1) % stage->tile_rows; /* of the last row */
    if (tp_cuda_sums(&stage->base) > 1 || at->q != stage->base.config.slicing->micros - 1)
        return TP_OK;
    return weight_gradient(stage, &(tile_rows){.row = sum.count - 1, .rows = 1, .offset = offset, .sum = sum});
}

tp_status
tp_cuda_head_forward(tp_stage *stage, const tp_slice_at *at)
{
    for (int64_t done = 0; done < at->rows;) {
        tile_rows part = {.row = at->batch_row + at->first_row + done, .micro_row = at->first_row + done,
                          .sum = tp_cuda_sum(&stage->base, at->q)};
        part.offset = (part.row - part.sum.first) % stage->tile_rows;
        part.rows = at->rows - done;
        if (part.rows > stage->tile_rows - part.offset)
            part.rows = stage->tile_rows - part.offset;
        TP_TRY(tile_work(stage, at, &part));
        done += part.rows;
    }
    return TP_OK;
}
