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

/* ---- dS of the slice's own pairs, kept ---------------------------------------------------------------------------------------
 *
 * Both dQ and dK, dV of a slice pass over the pairs of its queries and its own keys, and both would make S and dP of them. Who
 * computes dK and dV keeps dS of these, rounded as the product takes it, and dQ reads it: 5 products of 7. The bits are the same:
 * each number of dS comes of the same products in the same order, whichever operand has the rows, and tiles of keys are added to dQ
 * in the same order, from registers or from memory.
 *
 * Tiles of 64 queries and 64 keys at absolute multiples of 64; of keys from `own` on, as those of a tile that begins before the slice
 * are not all the slice's. Head by head, of tiles (i, j <= i) the i (i + 1) / 2 + j th. A tile as who reads it has it in registers,
 * A fragments of wgmma: [4 warps, 16 queries each][4 of 16 keys][32 lanes][4 words]. */
TP_DEVICE int
kept_own(const tp_attention_args *a)
{
    return (a->first + 63) / 64 * 64;
}

/* Of a block's queries, which end before `end`: the first key whose dS is kept. */
TP_DEVICE int
kept_from(const tp_attention_args *a, int end)
{
    int own = kept_own(a);
    return attention_item() < a->kept && own < end ? own : end;
}

TP_DEVICE uint32_t *
kept_tile(const tp_attention_args *a, int t, int key)
{
    int own = kept_own(a), n = (a->last + 63) / 64 - own / 64, i = (t - own) / 64, j = (key - own) / 64, item = attention_item();
    TP_OPAQUE(item); /* nothing made of it takes registers during the loops */
    int64_t tile = item * ((int64_t)n * (n + 1) / 2) + i * (i + 1) / 2 + j;
    return a->ds + tile * (TP_ATTENTION_KEPT_BYTES / 4);
}

/* A warpgroup's dS of 64 keys (rows) and 64 queries from t, as A fragments p[16]; transposed for who reads. */
TP_DEVICE void
keep_gradient(const tp_attention_args *a, int t, int key, const uint32_t *p)
{
    if (attention_item() >= a->kept || key < kept_own(a) || t < key || t >= a->last)
        return;
    int thread = TP_THREAD % TP_WARPGROUP;
    TP_OPAQUE(thread);
    uint32_t *tile = kept_tile(a, t, key) + thread * 4;
    TP_UNROLL
    for (int j = 0; j < 4; j++) {
        tp_vec16 part;
        part.word[0] = TP_TRANSPOSE(p[4 * j]);
        part.word[1] = TP_TRANSPOSE(p[4 * j + 2]);
        part.word[2] = TP_TRANSPOSE(p[4 * j + 1]);
        part.word[3] = TP_TRANSPOSE(p[4 * j + 3]);
        tp_store16_global(tile + 512 * j, part);
    }
}

/* The other way, of 64 queries from t (rows): zeros where the keys are all behind them or from `end` on, or the queries behind the
 * slice. */
TP_DEVICE void
kept_gradient(const tp_attention_args *a, int t, int key, int end, uint32_t *ds)
{
    int is_kept = key <= t && key < end && t < a->last;
    const uint32_t *tile = kept_tile(a, t, is_kept ? key : t) + TP_THREAD / TP_WARP % 4 * 512 + TP_THREAD % TP_WARP * 4;
    TP_UNROLL
    for (int j = 0; j < 4; j++) {
        tp_vec16 part = {{0, 0, 0, 0}};
        if (is_kept)
            part = tp_load16(tile + 128 * j);
        TP_UNROLL
        for (int i = 0; i < 4; i++)
            ds[4 * j + i] = part.word[i];
    }
}

/* Tiles of it that dQ fetches ahead of the one that is multiplied, 16 registers each: where warpgroups are apart, and where one
 * does all. Others are timed by benchmarks/gpu/kept.py. */
#ifndef TP_CUDA_KEPT_AHEAD
#define TP_CUDA_KEPT_AHEAD 3
#endif
#ifndef TP_CUDA_KEPT_AHEAD_ALONE
#define TP_CUDA_KEPT_AHEAD_ALONE 0
#endif
/* 1: fetched behind a tile's products, not before them. (ptxas 13.0 counts all of these loads by one scoreboard, so that the first
 * product of every TP_CUDA_KEPT_AHEAD + 1 waits for the last of them, begun just before it. And it makes MEMBAR.ALL.CTA and
 * FENCE.VIEW.ASYNC of TP_FENCE_ASYNC, which stands between: whether the former waits for loads no document says.) With one tile
 * ahead at least. */
#ifndef TP_CUDA_KEPT_BEHIND
#define TP_CUDA_KEPT_BEHIND 0
#endif

/* Tiles of `rows` that the slice lies in. */
static inline int64_t
tiles_of(const tp_attention_args *args, int rows)
{
    return (args->last - 1) / rows - args->first / rows + 1;
}

#endif
