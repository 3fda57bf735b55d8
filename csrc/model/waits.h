/* Which rows wait for others on the CPU: a product of few rows takes as long as its weights take to come from memory, so rows are
 * put off until enough of them are there. One set of rules for the stage that does so (csrc/stage/stage.h) and for the cost model
 * of its instructions (csrc/cost/waits.h). */
#ifndef TP_MODEL_WAITS_H
#define TP_MODEL_WAITS_H

#include <stdint.h>

#include "csrc/base/row_group.h"

#define TP_HEAD_TILE 256   /* rows of logits that exist at once; half of them are enough for d(weight) */
#define TP_HEAD_WORTH 40   /* F rows from which on a pass over the head's weights is no slower than the products alone */
#define TP_HEAD_HASTE 3    /* last slices of a sequence whose head the other ranks wait for */
#define TP_WEIGHT_ROWS 128 /* a product of 64 rows reaches 131 to 146 GFLOP/s, of 96 rows 150, of 128 and more 155 (AVX-512, Xeon) */

/* Of `tokens` positions from 0 on, those whose head is done in F: the others' is done in I. */
static inline int64_t
tp_head_forward_rows(int64_t tokens)
{
    return (tokens + 2) / 3;
}

static inline int
tp_head_in_haste(int32_t slices, int32_t slice)
{
    return slices > TP_HEAD_HASTE && slices - slice <= TP_HEAD_HASTE;
}

/* As soon as this many rows wait in the tile, d(weight) is made of them. */
static inline int64_t
tp_head_tile_most(int forward, int haste)
{
    return forward && haste ? TP_HEAD_TILE : TP_HEAD_TILE / 2;
}

#define TP_CUDA_WEIGHT_ROWS 1024 /* on a GPU, of one product for weight gradients: 2 operations a row on each weight, whose sum is read
                                    and written in fp32 for each product (8 bytes): 256 operations a byte, about what a GPU has, so with
                                    fewer it waits for its memory; with more, there is room for as many more rows that a W puts by */

/* Where weight gradients of one sequence of `total` tokens are cut: the first token of the slice beginning with `begin` that leaves
 * whole groups of `group` rows, counted from the sequence's end, above it. Those below are left to W of the slice before; slice 0
 * has none to leave them to. */
static inline int64_t
tp_groups_begin(int64_t group, int64_t total, int32_t slice, int64_t begin)
{
    return slice == 0 ? 0 : begin + (total - begin) % group;
}
static inline int64_t
tp_group_begin(int64_t total, int32_t slice, int64_t begin)
{
    return tp_groups_begin(TP_ROW_GROUP, total, slice, begin);
}

/* Does W of this slice make the weight gradients of the `rows` rows that wait? Once they are worth a product; and always in slices
 * 1 and 0, the last ones of a backward, for which the whole step may be waiting. */
static inline int
tp_weights_due(int32_t slice, int64_t rows)
{
    return slice < 2 || rows >= TP_WEIGHT_ROWS;
}

#endif
