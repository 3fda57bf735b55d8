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
tp_cuda_stage_attention_backward(tp_stage *stage, const tp_stage_block *block, const tp_slice_at *at, const tp_stage_part *part)
{
    const tp_cuda_rank *rank = stage->rank;
    const tp_gradients *grads = &block->gradients[at->gslot];
    const float *lse = block->activations[at->slot].lse;
    int64_t width = stage->base.config.model.n_embd, row = part->row;
    const void *q = tp_cuda_row(stage, tp_cuda_qkv(stage, block, at), row, 3 * width);
    /* of o and d(q, k, v) the kernels read and write the slice's rows alone, which may be all that there are */
    int64_t o_row = row - tp_stage_inner_begin(&stage->base, block, at);
    const void *o = tp_cuda_row_before(stage, tp_stage_inner(block, at)->o, o_row, width);
    void *dq = tp_cuda_row_before(stage, grads->dqkv, row - tp_stage_slice_begin(&stage->base, at), 3 * width);
    return tp_cuda_attention_backward(rank->stream, stage->dtype, rank->attention, tp_cuda_multiprocessors(rank->cuda), &part->shape,
                                      q, tp_cuda_row(stage, q, 1, width), tp_cuda_row(stage, q, 2, width),
                                      o, tp_cuda_row(stage, grads->d_o, row, width),
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
    /* all rows are asked of */
    void *o = tp_stage_keeps_keys(&stage->base, block) ? block->gradients[0].d_o : block->made[0].o;
    for (int k = 0, count = tp_stage_parts(&stage->base, at, part); k < count; k++) {
        const void *qkv = tp_cuda_row(stage, block->made[0].qkv, part[k].row, 3 * width);
        TP_TRY(tp_cudnn_check(stage->rank->cudnn, &part[k].shape, qkv, tp_cuda_row(stage, qkv, 1, width),
                              tp_cuda_row(stage, qkv, 2, width), tp_cuda_row(stage, o, part[k].row, width),
                              block->activations[0].lse + part[k].lse));
    }
    return TP_OK;
}

static tp_status
check_cudnn(tp_stage *stage, const tp_stage_block *block)
{
    const tp_slicing *slicing = stage->base.config.slicing;
    TP_TRY(fill(stage, block->made[0].qkv));
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

/* Of a slice. */
typedef struct {
    tp_slice_at at;
    tp_stage_part part;
} part_at;

/* The part of a slice that keeps most; its bytes. */
static int64_t
most_kept(tp_stage *stage, part_at *most)
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
                    *most = (part_at){at, part[k]};
                }
        }
    return bytes;
}

/* d(q), d(k), d(v) of the slice's rows. */
static void *
own_rows(const tp_stage *stage, const tp_stage_block *block, const part_at *of)
{
    int64_t row = of->part.row + of->part.shape.context * of->part.shape.batch - tp_stage_slice_begin(&stage->base, &of->at);
    return tp_cuda_row(stage, block->gradients[0].dqkv, row, 3 * (int64_t)stage->base.config.model.n_embd);
}

/* The backward into memory that has been cleared. */
static tp_status
gradients_of(tp_stage *stage, const tp_stage_block *block, const part_at *of, int keeps)
{
    tp_cuda_rank *rank = stage->rank;
    int64_t rows = of->part.shape.slice * of->part.shape.batch;
    rank->keeps = keeps;
    TP_TRY(tp_cuda_memset(rank->cuda, rank->stream, own_rows(stage, block, of), 0,
                          (size_t)(rows * 3 * stage->base.config.model.n_embd) * stage->base.sizes.element));
    return tp_cuda_stage_attention_backward(stage, block, &of->at, &of->part);
}

/* Whether rows of `row` bytes are those at three times that pitch; through `host`, which has room for `fit` of either. */
static tp_status
compare_rows(const tp_cuda_rank *rank, const char *one, const char *other, size_t row, int64_t rows, int64_t fit, char *host,
             int *same)
{
    for (int64_t at = 0, now; at < rows && *same; at += now) {
        now = fit < rows - at ? fit : rows - at;
        size_t bytes = (size_t)now * row;
        TP_TRY(tp_cuda_copy(rank->cuda, rank->stream, host, one + (size_t)at * row, bytes, TP_CUDA_TO_HOST));
        TP_TRY(tp_cuda_copy_rows(rank->cuda, rank->stream, host + bytes, row, other + 3 * (size_t)at * row, 3 * row, row,
                                 (size_t)now, TP_CUDA_TO_HOST));
        TP_TRY(tp_cuda_synchronize(rank->cuda, rank->stream));
        *same = memcmp(host, host + bytes, bytes) == 0;
    }
    return TP_OK;
}

/* d(q) both ways, the one beside the other in the gradient of the norm's output; the host has some of it at a time. */
static tp_status
compare_kept(tp_stage *stage, const tp_stage_block *block, const part_at *of)
{
    tp_cuda_rank *rank = stage->rank;
    size_t row = (size_t)stage->base.config.model.n_embd * stage->base.sizes.element;
    int64_t rows = of->part.shape.slice * of->part.shape.batch, fit = TP_CUDA_COMPARED_BYTES / (2 * (int64_t)row) + 1;
    int same = 1;
    fit = fit < rows ? fit : rows;
    TP_TRY(gradients_of(stage, block, of, 0));
    TP_TRY(tp_cuda_copy_rows(rank->cuda, rank->stream, block->gradients[0].d_norm, row, own_rows(stage, block, of), 3 * row, row,
                             (size_t)rows, TP_CUDA_ON_DEVICE));
    TP_TRY(gradients_of(stage, block, of, 1));
    char *host = malloc(2 * (size_t)fit * row);
    if (host == NULL)
        return tp_fail(TP_EMEMORY, "no host memory to compare %lld rows of attention's gradients", (long long)fit);
    tp_status status = compare_rows(rank, block->gradients[0].d_norm, own_rows(stage, block, of), row, rows, fit, host, &same);
    free(host);
    rank->keeps = same;
    if (!same)
        rank->unkept = "attention's backward makes the scores of a slice's own pairs twice: on this device the product of keys and "
                       "queries has other bits than that of queries and keys";
    return status;
}

/* That dS is the same whichever operand has the rows follows from no document of wgmma's. Asked once of a rank: its stages have one
 * slicing and heads alike, and the numbers are the same. */
static tp_status
check_kept(tp_stage *stage, const tp_stage_block *block)
{
    tp_cuda_rank *rank = stage->rank;
    int64_t width = stage->base.config.model.n_embd;
    part_at of;
    if (most_kept(stage, &of) == 0)
        return TP_OK;
    rank->kept_is_checked = 1;
    const tp_stage_part *part = &of.part;
    void *all = tp_cuda_qkv(stage, block, &of.at), *qkv = tp_cuda_row(stage, all, part->row, 3 * width);
    int64_t o_row = part->row - tp_stage_inner_begin(&stage->base, block, &of.at);
    TP_TRY(fill(stage, all));
    TP_TRY(tp_cuda_attention_forward(rank->stream, stage->dtype, rank->attention, tp_cuda_multiprocessors(rank->cuda), &part->shape,
                                     qkv, tp_cuda_row(stage, qkv, 1, width), tp_cuda_row(stage, qkv, 2, width),
                                     tp_cuda_row_before(stage, tp_stage_inner(block, &of.at)->o, o_row, width),
                                     block->activations[0].lse + part->lse));
    TP_TRY(tp_cuda_copy(rank->cuda, rank->stream, block->gradients[0].d_o, all,
                        (size_t)(tp_stage_rows(&stage->base) * width) * stage->base.sizes.element, TP_CUDA_ON_DEVICE));
    return compare_kept(stage, block, &of);
}

tp_status
tp_cuda_stage_check_attention(tp_stage *stage)
{
    const tp_cuda_rank *rank = stage->rank;
    const tp_stage_block *block = stage->base.block, *end = block + stage->base.blocks;
    int asks = rank->keeps && !rank->kept_is_checked && stage->base.config.gradient_slots > 0;
    while (block < end && block->kind != TP_ATTENTION)
        block++;
    if (block == end || (rank->cudnn == NULL && !asks))
        return TP_OK;
    if (rank->cudnn != NULL)
        TP_TRY(check_cudnn(stage, block));
    return asks ? check_kept(stage, block) : TP_OK;
}
