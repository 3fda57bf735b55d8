/* What row kernels share: how launches are cut, and sums over the threads of a row. */
#ifndef TP_CUDA_ROWS_H
#define TP_CUDA_ROWS_H

#include "cuda/kernels.h"
#include "cuda/simt.h"

#define ROWS_BLOCK  256               /* threads, unless a kernel says otherwise */
#define ROWS_WARPS  (ROWS_BLOCK / TP_WARP)
#define ROWS_BLOCKS 16384             /* of a grid at most: above it a block takes several turns */
#define ROWS_LONGEST (1 << 30)

/* Blocks for `items` items, `each` in one block. */
static inline int64_t
rows_blocks(int64_t items, int64_t each)
{
    int64_t blocks = (items + each - 1) / each;
    return blocks < ROWS_BLOCKS ? blocks : ROWS_BLOCKS;
}

/* Kernels count columns in 32 bits. EVALUE: rows, or elements of a row, out of range. */
static inline tp_status
rows_check(int64_t rows, int64_t n)
{
    if (rows < 0 || n < 1 || n > ROWS_LONGEST)
        return tp_fail(TP_EVALUE, "CUDA kernels: %lld rows of %lld elements; rows must not be negative and a row has 1 to %d",
                       (long long)rows, (long long)n, ROWS_LONGEST);
    return TP_OK;
}

/* 1 if every row of the array begins on 16 bytes. NULL: nothing is in the way. */
static inline int
rows_aligned(const void *first, int64_t stride, size_t element)
{
    return (uintptr_t)first % 16 == 0 && stride * (int64_t)element % 16 == 0;
}

/* What is left of `left` elements for one chunk, as the chunk functions want it. */
TP_DEVICE int
rows_left(int64_t left)
{
    return left < 0 ? 0 : left < 16 ? (int)left : 16;
}

/* The sum over the threads of a row, the same bits in each: butterflies within a warp (an addition commutes), then the
 * row's `warps` neighbouring warps in order. Every thread of the block comes; slots: ROWS_WARPS shared floats. */
TP_DEVICE float
rows_sum(float v, int warps, float *slots)
{
    const int warp = TP_THREAD / TP_WARP;
    TP_UNROLL
    for (int lanes = TP_WARP / 2; lanes > 0; lanes /= 2)
        v += TP_SHFL_XOR_F(v, lanes);
    if (warps == 1)
        return v;
    TP_SYNC(); /* the sum before this one has been read */
    if (TP_THREAD % TP_WARP == 0)
        slots[warp] = v;
    TP_SYNC();
    v = 0.0f;
    for (int w = warp / warps * warps, last = w + warps; w < last; w++)
        v += slots[w];
    return v;
}

#endif
