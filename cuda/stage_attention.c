/* Which kernel computes attention in a stage's forward, cuDNN's or ours, and the check of cuDNN's before it is relied on. */
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

tp_status
tp_cuda_stage_check_attention(tp_stage *stage)
{
    const tp_slicing *slicing = stage->base.config.slicing;
    const tp_stage_block *block = stage->base.block, *end = block + stage->base.blocks;
    while (block < end && block->kind != TP_ATTENTION)
        block++;
    if (stage->rank->cudnn == NULL || block == end)
        return TP_OK;
    TP_TRY(fill(stage, block->made[0].qkv));
    for (int32_t q = 0; q < slicing->micros; q++)
        for (int32_t s = 0; s < slicing->micro[q].slices; s++) {
            tp_slice_at at = tp_stage_at(&stage->base, q, s, TP_WHOLE, 0, 0);
            TP_TRY(check_slice(stage, block, &at));
        }
    return TP_OK;
}
