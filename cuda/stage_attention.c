/* Which kernel computes attention in a stage, cuDNN's or ours, and with what room; and the checks of cuDNN's, and of what ours keeps,
 * before either is relied on. */
#include "cuda/stage.h"

#include <stdlib.h>
#include <string.h>

tp_status
tp_cuda_stage_attention(tp_stage *stage, const tp_stage_part *part, const void *qkv, void *o, float *lse)
{
    const tp_cuda_rank *rank = stage->rank;
    int64_t width = stage->base.config.model.n_embd;
    const void *k = tp_cuda_row(stage, qkv, 1, width), *v = tp_cuda_row(stage, qkv, 2, width);
    if (stage->preparing)
        return rank->cudnn != NULL ? tp_cudnn_prepare(rank->cudnn, &part->shape) : TP_OK;
    if (rank->cudnn != NULL && tp_cudnn_has(rank->cudnn, &part->shape))
        return tp_cudnn_forward(rank->cudnn, &part->shape, qkv, k, v, o, lse);
    return tp_cuda_attention_forward(rank->stream, stage->dtype, rank->attention, tp_cuda_multiprocessors(rank->cuda),
                                     &part->shape, qkv, k, v, o, lse);
}

tp_status
tp_cuda_stage_attention_backward(tp_stage *stage, const tp_stage_part *part, const tp_inner *inner, const float *lse,
                                 const tp_gradients *grads)
{
    const tp_cuda_rank *rank = stage->rank;
    int64_t width = stage->base.config.model.n_embd, row = part->row;
    const void *q = tp_cuda_row(stage, inner->qkv, row, 3 * width);
    void *dq = tp_cuda_row(stage, grads->dqkv, row, 3 * width);
    return tp_cuda_attention_backward(rank->stream, stage->dtype, rank->attention, tp_cuda_multiprocessors(rank->cuda), &part->shape,
                                      q, tp_cuda_row(stage, q, 1, width), tp_cuda_row(stage, q, 2, width),
                                      tp_cuda_row(stage, inner->o, row, width), tp_cuda_row(stage, grads->d_o, row, width),
                                      lse + part->lse, grads->delta + part->lse, dq, tp_cuda_row(stage, dq, 1, width),
                                      tp_cuda_row(stage, dq, 2, width), rank->keeps ? rank->workspace : NULL,
                                      rank->keeps ? TP_CUDA_GEMM_BYTES : 0);
}

/* ---- what is computed beside our kernel ----------------------------------------------------------------------------------- */

enum { NUMBERS = 1048573 }; /* prime: what is repeated begins anew at another place of a row each time */

/* Numbers of the device's bf16 in [-2, 2), of a generator of Lehmer's: the high half of an fp32. */
static void
make_up(uint16_t *to)
{
    uint32_t state = 1;
    for (int64_t i = 0; i < NUMBERS; i++) {
        state = (uint32_t)((uint64_t)state * 48271 % 2147483647);
        float x = 4.0f * (float)state / 2147483647.0f - 2.0f;
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        to[i] = (uint16_t)(bits >> 16);
    }
}

static tp_status
spread(tp_stage *stage, void *qkv, const uint16_t *numbers)
{
    size_t end = (size_t)(tp_stage_rows(&stage->base) * 3 * stage->base.config.model.n_embd) * sizeof *numbers, more;
    for (size_t at = 0; at < end; at += more) {
        more = NUMBERS * sizeof *numbers < end - at ? NUMBERS * sizeof *numbers : end - at;
        TP_TRY(tp_cuda_copy(stage->rank->cuda, stage->rank->stream, (char *)qkv + at, numbers, more, TP_CUDA_TO_DEVICE));
    }
    return tp_cuda_synchronize(stage->rank->cuda, stage->rank->stream);
}

static tp_status
fill(tp_stage *stage, void *qkv)
{
    uint16_t *numbers = malloc(NUMBERS * sizeof *numbers);
    if (numbers == NULL)
        return tp_fail(TP_EMEMORY, "no host memory for %d numbers to try attention on", NUMBERS);
    make_up(numbers);
    tp_status status = spread(stage, qkv, numbers);
    free(numbers);
    return status;
}

static tp_status
check_slice(tp_stage *stage, const tp_stage_block *block, const tp_slice_at *at)
{
    int64_t width = stage->base.config.model.n_embd;
    tp_stage_part part[2];
    for (int k = 0, count = tp_stage_parts(&stage->base, at, part); k < count; k++) {
        const void *qkv = tp_cuda_row(stage, block->made[0].qkv, part[k].row, 3 * width);
        TP_TRY(tp_cudnn_check(stage->rank->cudnn, &part[k].shape, qkv, tp_cuda_row(stage, qkv, 1, width),
                              tp_cuda_row(stage, qkv, 2, width), tp_cuda_row(stage, block->made[0].o, part[k].row, width),
                              block->activations[0].lse + part[k].lse));
    }
    return TP_OK;
}

static tp_status
check_cudnn(tp_stage *stage, const tp_stage_block *block)
{
    const tp_slicing *slicing = stage->base.config.slicing;
    for (int32_t q = 0; q < slicing->micros; q++)
        for (int32_t s = 0; s < slicing->micro[q].slices; s++) {
            tp_slice_at at = tp_stage_at(&stage->base, q, s, TP_WHOLE, 0, 0);
            TP_TRY(check_slice(stage, block, &at));
        }
    return TP_OK;
}

/* ---- what is kept ---------------------------------------------------------------------------------------------------------- */

/* Bytes that are kept of a part: of as many heads as the workspace has room for. */
static int64_t
kept_bytes(const tp_attention *shape)
{
    int64_t all = tp_cuda_attention_kept_bytes(shape), each = all / (shape->batch * shape->heads);
    int64_t most = (int64_t)TP_CUDA_GEMM_BYTES;
    return all <= most ? all : most / each * each;
}

/* The part of a slice that keeps most; its bytes. */
static int64_t
most_kept(tp_stage *stage, tp_stage_part *most)
{
    const tp_slicing *slicing = stage->base.config.slicing;
    int64_t bytes = 0;
    for (int32_t q = 0; q < slicing->micros; q++)
        for (int32_t s = 0; s < slicing->micro[q].slices; s++) {
            tp_stage_part part[2];
            tp_slice_at at = tp_stage_at(&stage->base, q, s, TP_WHOLE, 0, 0);
            for (int k = 0, count = tp_stage_parts(&stage->base, &at, part); k < count; k++)
                if (kept_bytes(&part[k].shape) > bytes) {
                    bytes = kept_bytes(&part[k].shape);
                    *most = part[k];
                }
        }
    return bytes;
}

/* The gradients of the slice's rows, as the backward makes them in memory that has been cleared, to the host. */
static tp_status
gradients_of(tp_stage *stage, const tp_stage_block *block, const tp_stage_part *part, void *to, size_t bytes)
{
    const tp_cuda_rank *rank = stage->rank;
    const tp_gradients *grads = &block->gradients[0];
    int64_t width = 3 * stage->base.config.model.n_embd;
    void *mine = tp_cuda_row(stage, grads->dqkv, part->row + part->shape.context * part->shape.batch, width);
    TP_TRY(tp_cuda_memset(rank->cuda, rank->stream, mine, 0, bytes));
    TP_TRY(tp_cuda_stage_attention_backward(stage, part, &block->made[0], block->activations[0].lse, grads));
    TP_TRY(tp_cuda_copy(rank->cuda, rank->stream, to, mine, bytes, TP_CUDA_TO_HOST));
    return tp_cuda_synchronize(rank->cuda, rank->stream);
}

static tp_status
compare_kept(tp_stage *stage, const tp_stage_block *block, const tp_stage_part *part, void *host, size_t bytes)
{
    tp_cuda_rank *rank = stage->rank;
    rank->keeps = 0;
    TP_TRY(gradients_of(stage, block, part, host, bytes));
    rank->keeps = 1;
    TP_TRY(gradients_of(stage, block, part, (char *)host + bytes, bytes));
    rank->keeps = memcmp(host, (char *)host + bytes, bytes) == 0;
    if (!rank->keeps)
        rank->unkept = "attention's backward makes the scores of a slice's own pairs twice: on this device the product of keys and "
                       "queries has other bits than that of queries and keys";
    return TP_OK;
}

/* That dS is the same whichever operand has the rows follows from no document of wgmma's. */
static tp_status
check_kept(tp_stage *stage, const tp_stage_block *block)
{
    const tp_cuda_rank *rank = stage->rank;
    int64_t width = stage->base.config.model.n_embd;
    tp_stage_part part;
    if (!rank->keeps || stage->base.config.gradient_slots == 0 || most_kept(stage, &part) == 0)
        return TP_OK;
    void *qkv = tp_cuda_row(stage, block->made[0].qkv, part.row, 3 * width);
    size_t bytes = (size_t)(part.shape.slice * part.shape.batch * 3 * width) * stage->base.sizes.element;
    TP_TRY(tp_cuda_attention_forward(rank->stream, stage->dtype, rank->attention, tp_cuda_multiprocessors(rank->cuda), &part.shape,
                                     qkv, tp_cuda_row(stage, qkv, 1, width), tp_cuda_row(stage, qkv, 2, width),
                                     tp_cuda_row(stage, block->made[0].o, part.row, width),
                                     block->activations[0].lse + part.lse));
    TP_TRY(tp_cuda_copy(rank->cuda, rank->stream, block->gradients[0].d_o, block->made[0].qkv,
                        (size_t)(tp_stage_rows(&stage->base) * width) * stage->base.sizes.element, TP_CUDA_ON_DEVICE));
    void *host = malloc(2 * bytes);
    if (host == NULL)
        return tp_fail(TP_EMEMORY, "no host memory to compare %zu bytes of attention's gradients", 2 * bytes);
    tp_status status = compare_kept(stage, block, &part, host, bytes);
    free(host);
    return status;
}

tp_status
tp_cuda_stage_check_attention(tp_stage *stage)
{
    const tp_stage_block *block = stage->base.block, *end = block + stage->base.blocks;
    while (block < end && block->kind != TP_ATTENTION)
        block++;
    if (block == end || (stage->rank->cudnn == NULL && !stage->rank->keeps))
        return TP_OK;
    TP_TRY(fill(stage, block->made[0].qkv));
    if (stage->rank->cudnn != NULL)
        TP_TRY(check_cudnn(stage, block));
    return check_kept(stage, block);
}
