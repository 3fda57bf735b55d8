/* What the kernels of attention by wgmma with warpgroups apart share, forward (attention_ring.cu) and backward
 * (attention_ring_backward.cu). */
#ifndef TP_CUDA_ATTENTION_RING_H
#define TP_CUDA_ATTENTION_RING_H

#include "cuda/attention_bf16.h"

#include "cuda/pipeline.h"
#include "cuda/wgmma.h"

/* Blocks that go from tile to tile: one to an SM of an H100 or H200. */
#ifndef TP_CUDA_RING_BLOCKS
#define TP_CUDA_RING_BLOCKS 132
#endif

/* Products begin, behind all that was done to their sums d[n] and to the words f[m] of an A operand; all products are there. */
#define BEGIN(d, n, f, m)      \
    TP_WGMMA_PIN(d, n);        \
    TP_WGMMA_PIN_WORDS(f, m);  \
    TP_WGMMA_FENCE()
#define END(d, n, f, m)   \
    TP_WGMMA_WAIT(0);     \
    TP_WGMMA_PIN(d, n);   \
    TP_WGMMA_PIN_WORDS(f, m)

/* Works are numbered as blocks of attention_grid begin: across, then tiles, then groups. There are at most TP_ATTENTION_RING_WORKS. */
typedef struct {
    tp_attention_args a;
    int across, tiles, works;
} ring_args;

/* rows: that every tile of a head reads, of two arrays. */
static inline int64_t
ring_fill(ring_args *w, const tp_attention_args *args, int64_t tiles, int64_t rows)
{
    tp_grid grid = attention_grid(args, tiles, rows);
    memset(w, 0, sizeof *w);
    w->a = *args;
    w->across = (int)grid.x;
    w->tiles = (int)grid.y;
    w->works = (int)(grid.x * grid.y * grid.z);
    return w->works;
}

/* The (sequence, head) and the tile of `work`, of those that a block does; 0: there is none. */
TP_DEVICE int
ring_work(const ring_args *w, int work, int *item, int *tile)
{
    int at = work / w->across;
    *item = at / w->tiles * w->across + work % w->across;
    *tile = at % w->tiles;
    return *item < w->a.items;
}

/* A block's next work: every second round in the other direction, so that no block always has the longer ones. */
TP_DEVICE int
ring_next(int work)
{
    int blocks = TP_BLOCKS_X, round = work / blocks;
    return (round + 1) * blocks + (blocks - 1 - work % blocks);
}

TP_DEVICE void
clear(float *sums, int n)
{
    TP_UNROLL
    for (int i = 0; i < n; i++)
        sums[i] = 0.0f;
}

/* The warp's products of what the barrier guards are over. */
TP_DEVICE void
ring_release(uint64_t *is_free)
{
    if (TP_THREAD % TP_WARP == 0)
        TP_PHASE_ARRIVE(is_free);
}

#endif
