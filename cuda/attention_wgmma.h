/* What the kernels of attention by wgmma share: those whose one warpgroup loads and multiplies (attention_wgmma.cu), and those
 * whose warpgroups are apart, one that loads and up to three that multiply (attention_ring.cu, attention_ring_backward.cu). */
#ifndef TP_CUDA_ATTENTION_WGMMA_H
#define TP_CUDA_ATTENTION_WGMMA_H

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

TP_DEVICE void
clear(float *sums, int n)
{
    TP_UNROLL
    for (int i = 0; i < n; i++)
        sums[i] = 0.0f;
}

/* This thread's two rows of lse (as exponents of two) and delta; rows that are not of the slice have none. */
TP_DEVICE void
load_statistics(float *less, float *delta, const tp_attention_args *a, int64_t stat, int first)
{
    TP_UNROLL
    for (int i = 0; i < 2; i++) {
        int t = first + 8 * i, mine = t >= a->first && t < a->last;
        less[i] = mine ? TP_LD(a->lse + stat + t) * TP_ATTENTION_LOG2E : 0.0f;
        delta[i] = mine ? TP_LD(a->delta + stat + t) : 0.0f;
    }
}

/* The warp's products of what the barrier guards are over. */
TP_DEVICE void
ring_release(uint64_t *is_free)
{
    if (TP_THREAD % TP_WARP == 0)
        TP_PHASE_ARRIVE(is_free);
}

/* Tiles of `rows` that the slice lies in. */
static inline int64_t
tiles_of(const tp_attention_args *args, int rows)
{
    return (args->last - 1) / rows - args->first / rows + 1;
}

#endif
