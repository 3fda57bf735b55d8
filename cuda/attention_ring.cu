#include "cuda/attention_bf16.h"

#include "cuda/pipeline.h"
#include "cuda/wgmma.h"

/* Products begin, behind all that was done to their sums d[n] and to the words f[m] of an A operand; all products are there. */
#define BEGIN(d, n, f, m)      \
    TP_WGMMA_PIN(d, n);        \
    TP_WGMMA_PIN_WORDS(f, m);  \
    TP_WGMMA_FENCE()
#define END(d, n, f, m)   \
    TP_WGMMA_WAIT(0);     \
    TP_WGMMA_PIN(d, n);   \
    TP_WGMMA_PIN_WORDS(f, m)

/* Works are numbered as blocks of attention_grid begin: across, then tiles, then groups. */
typedef struct {
    tp_attention_args a;
    int across, tiles, works;
} ring_args;

static inline int64_t
ring_fill(ring_args *w, const tp_attention_args *args, int64_t tiles)
{
    tp_grid grid = attention_grid(args, tiles, args->last);
    memset(w, 0, sizeof *w);
    w->a = *args;
    w->across = (int)grid.x;
    w->tiles = (int)grid.y;
    w->works = (int)(grid.x * grid.y * grid.z);
    return w->works;
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

#define HD 128
#define KEYS 128
#define GROUPS 2
#define STAGES 2
#define BLOCKS 1
#define TURNS 1
#define VARIANT 128_2
#define LOADER 56
#define COMPUTER 224
#include "cuda/attention_ring.inc"

#define HD 128
#define KEYS 128
#define GROUPS 2
#define STAGES 2
#define BLOCKS 1
#define TURNS 0
#define VARIANT 128_free
#define LOADER 56
#define COMPUTER 224
#include "cuda/attention_ring.inc"

#define HD 128
#define KEYS 128
#define GROUPS 1
#define STAGES 2
#define BLOCKS 1
#define TURNS 0
#define VARIANT 128_1
#define LOADER 64
#define COMPUTER 248
#include "cuda/attention_ring.inc"

#define HD 64
#define KEYS 128
#define GROUPS 3
#define STAGES 2
#define BLOCKS 1
#define TURNS 1
#define VARIANT 64_3
#define LOADER 32
#define COMPUTER 160
#include "cuda/attention_ring.inc"

#define HD 64
#define KEYS 128
#define GROUPS 2
#define STAGES 4
#define BLOCKS 1
#define TURNS 1
#define VARIANT 64_2
#define LOADER 56
#define COMPUTER 224
#include "cuda/attention_ring.inc"

#define HD 64
#define KEYS 64
#define GROUPS 3
#define STAGES 4
#define BLOCKS 1
#define TURNS 1
#define VARIANT 64_short
#define LOADER 32
#define COMPUTER 160
#include "cuda/attention_ring.inc"

/* Blocks that go from tile to tile: one to an SM of an H100 or H200. */
#ifndef TP_CUDA_RING_BLOCKS
#define TP_CUDA_RING_BLOCKS 132
#endif

/* variant: 2 n, a block to each tile, or 2 n + 1, TP_CUDA_RING_BLOCKS blocks; n as below. */
tp_status
tp_attention_forward_ring(tp_stream stream, const tp_attention_args *args, int variant)
{
    static tp_status (*const kernels[2][3])(tp_stream, const tp_attention_args *, int64_t) = {
        {forward_ring_64_3, forward_ring_64_2, forward_ring_64_short},
        {forward_ring_128_2, forward_ring_128_free, forward_ring_128_1},
    };
    return kernels[args->dim > 64][variant / 2 % 3](stream, args, variant % 2 ? TP_CUDA_RING_BLOCKS : 0);
}
