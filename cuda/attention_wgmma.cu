#include "cuda/attention_bf16.h"

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

TP_DEVICE void
clear(float *sums, int n)
{
    TP_UNROLL
    for (int i = 0; i < n; i++)
        sums[i] = 0.0f;
}

#define HD 64
#define KEYS 64
#define BLOCKS 2
#define GROUPS 1
#include "cuda/attention_wgmma.inc"

#define HD 64
#define KEYS 64
#define BLOCKS 2
#define GROUPS 2
#include "cuda/attention_wgmma.inc"

#define HD 128
#define KEYS 128
#define BLOCKS 1
#define GROUPS 1
#include "cuda/attention_wgmma.inc"

#define HD 128
#define KEYS 128
#define BLOCKS 1
#define GROUPS 2
#include "cuda/attention_wgmma.inc"

/* Blocks that are one to an SM of an H100 or H200. Two warpgroups share what they multiply and fill each other's gaps; but where
 * twice as many blocks of one would be no more than that, half of the SMs would have no work: short slices of few sequences. */
#define SMS 132

/* The choice shows in the time alone: a row's bits are the same. */
static int
groups_for(const tp_attention_args *args)
{
    int64_t tiles = (args->last - 1) / 128 - args->first / 128 + 1;
    if (tp_attention_forced() == 1 || tp_attention_forced() == 2)
        return tp_attention_forced();
    return 2 * args->items * tiles <= SMS ? 1 : 2;
}

/* Which variant with warpgroups apart is asked for; below 0: none. */
static int
ring_for(const tp_attention_args *args)
{
    int64_t tiles = (args->last - 1) / 64 - args->first / 64 + 1;
    return 2 * args->items * tiles <= TP_ATTENTION_RING_WORKS ? tp_attention_forced() - TP_ATTENTION_RING : -1;
}

tp_status
tp_attention_forward_wgmma(tp_stream stream, const tp_attention_args *args)
{
    if (ring_for(args) >= 0)
        return tp_attention_forward_ring(stream, args, ring_for(args));
    if (args->dim > 64)
        return groups_for(args) == 2 ? forward_wgmma_128_2(stream, args) : forward_wgmma_128_1(stream, args);
    return groups_for(args) == 2 ? forward_wgmma_64_2(stream, args) : forward_wgmma_64_1(stream, args);
}

tp_status
tp_attention_backward_wgmma(tp_stream stream, const tp_attention_args *args)
{
    if (ring_for(args) >= 0)
        return tp_attention_backward_ring(stream, args, ring_for(args));
    if (args->dim > 64)
        return groups_for(args) == 2 ? backward_wgmma_128_2(stream, args) : backward_wgmma_128_1(stream, args);
    return groups_for(args) == 2 ? backward_wgmma_64_2(stream, args) : backward_wgmma_64_1(stream, args);
}
