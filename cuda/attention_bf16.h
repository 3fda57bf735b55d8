/* What the two kinds of bf16 attention kernel share, mma.sync (attention_bf16.cu) and wgmma (attention_wgmma.cu): the order of
 * blocks, and the arithmetic on accumulators. In both a lane holds the accumulators of a warp's 16 rows by n columns as
 * [n / 8][4], the C fragments of cuda/mma.h. */
#ifndef TP_CUDA_ATTENTION_BF16_H
#define TP_CUDA_ATTENTION_BF16_H

#include "cuda/attention.h"

/* Bytes of the L2 cache in which to keep what all tiles of a head read again, K and V or Q and dO: 32 MB of a 50 MB cache (as in
 * Dao-AILab/flash-attention, hopper/tile_scheduler.hpp). Blocks begin in the order x, y, z: a group of as many heads as fit (x),
 * their longest tiles first (y), then the next group (z). All heads at once would stream theirs from memory for every tile: 2 x 64
 * rows of 128 bf16 for 64 queries are 64 FLOP a byte. */
#ifndef TP_CUDA_CACHED_BYTES
#define TP_CUDA_CACHED_BYTES (32 << 20)
#endif

static inline tp_grid
attention_grid(const tp_attention_args *args, int64_t tiles, int64_t rows)
{
    int64_t fit = (int64_t)TP_CUDA_CACHED_BYTES / (rows * args->dim * 4), most = fit < 1 ? 1 : fit;
    int64_t groups = (args->items + most - 1) / most;
    groups = groups < 65535 ? groups : 65535;
    return tp_grid3((args->items + groups - 1) / groups, tiles, groups);
}

/* The (sequence, head) of this block; in the last group it may be beyond the last one. */
TP_DEVICE int
attention_item(void)
{
    return TP_BLOCK_Z * TP_BLOCKS_X + TP_BLOCK_X;
}

/* f: an m16 group's accumulators [n / 8][4], rounded, as A fragments [n / 16][4]. */
TP_DEVICE void
attention_round(uint32_t *f, const float *acc, int n)
{
    TP_UNROLL
    for (int i = 0; i < n / 4; i++)
        f[i] = tp_pack_bf16(acc[2 * i], acc[2 * i + 1]);
}

/* One m16 group, a step of the online softmax: scores s [n / 8][4] become probabilities relative to the rows' new maxima. The
 * caller multiplies earlier sums of outputs by factor[2], as is done here with sum. */
TP_DEVICE void
attention_softmax(float *s, int n, float *top, float *sum, float *factor, float scale2)
{
    TP_UNROLL
    for (int i = 0; i < 2; i++) {
        float m = top[i], total = 0.0f;
        TP_UNROLL
        for (int b = 0; b < n / 8; b++)
            m = tp_maxf(m, tp_maxf(s[b * 4 + 2 * i], s[b * 4 + 2 * i + 1]));
        m = tp_maxf(m, TP_SHFL_XOR_F(m, 1));
        m = tp_maxf(m, TP_SHFL_XOR_F(m, 2));
        float less = m * scale2;
        factor[i] = tp_exp2f((top[i] - m) * scale2);
        TP_UNROLL
        for (int b = 0; b < n / 8; b++)
            TP_UNROLL
            for (int j = 0; j < 2; j++) {
                float *x = s + b * 4 + 2 * i + j;
                *x = tp_exp2f(tp_fmaf(*x, scale2, -less));
                total += *x;
            }
        top[i] = m;
        sum[i] = tp_fmaf(sum[i], factor[i], total);
    }
}

/* An m16 group's accumulators [n / 8][4] times its rows' factors. */
TP_DEVICE void
attention_rescale(float *out, int n, const float *factor)
{
    TP_UNROLL
    for (int i = 0; i < n / 2; i++)
        out[i] *= factor[i >> 1 & 1];
}

/* One m16 group of queries from t, after its last key: writes lse for those of the slice, and to factor what the caller multiplies
 * out by. */
TP_DEVICE void
attention_finish(float *factor, const tp_attention_args *a, int64_t stat, int t, const float *top, const float *sum)
{
    int lane = TP_THREAD % TP_WARP;
    TP_UNROLL
    for (int i = 0; i < 2; i++) {
        float total = sum[i], lse;
        int mine = t + 8 * i + lane / 4;
        total += TP_SHFL_XOR_F(total, 1);
        total += TP_SHFL_XOR_F(total, 2);
        lse = tp_attention_lse(top[i], a->scale, total);
        factor[i] = lse == lse ? 1.0f / total : NAN;
        if (lane % 4 == 0 && mine >= a->first && mine < a->last)
            TP_ST(a->lse_out + stat + mine, lse);
    }
}

/* s[n / 8][4] of keys [key, key + n) and queries from t: keys after their query become `hidden`. */
TP_DEVICE void
attention_mask(float *s, int t, int key, int n, float hidden)
{
    int lane = TP_THREAD % TP_WARP, query = t + lane / 4, first = key + 2 * (lane % 4);
    TP_UNROLL
    for (int i = 0; i < n / 2; i++)
        if (first + i / 4 * 8 + (i & 1) > query + (i & 2) * 4)
            s[i] = hidden;
}

/* One m16 group of queries (rows): scores s become P. less: the rows' log2 of the sums of exponentials. */
TP_DEVICE void
attention_probabilities_rows(float *s, int n, const float *less, float scale2)
{
    TP_UNROLL
    for (int i = 0; i < n / 2; i++)
        s[i] = tp_exp2f(tp_fmaf(s[i], scale2, -less[i >> 1 & 1]));
}

/* P -> dS = P (dP - delta). */
TP_DEVICE void
attention_gradient_rows(float *p, const float *dp, int n, const float *delta)
{
    TP_UNROLL
    for (int i = 0; i < n / 2; i++)
        p[i] *= dp[i] - delta[i >> 1 & 1];
}

/* The same for keys (rows) and queries (columns), at whose lse and delta the pointers stand; dS replaces dP. */
TP_DEVICE void
attention_probabilities_columns(float *s, int n, const float *lse, float scale2)
{
    int column = 2 * (TP_THREAD % 4);
    TP_UNROLL
    for (int b = 0; b < n / 8; b++)
        TP_UNROLL
        for (int j = 0; j < 2; j++) {
            float less = lse[8 * b + column + j] * TP_ATTENTION_LOG2E;
            TP_UNROLL
            for (int i = b * 4 + j; i < b * 4 + 4; i += 2)
                s[i] = tp_exp2f(tp_fmaf(s[i], scale2, -less));
        }
}

TP_DEVICE void
attention_gradient_columns(const float *p, float *dp, int n, const float *delta)
{
    int column = 2 * (TP_THREAD % 4);
    TP_UNROLL
    for (int b = 0; b < n / 8; b++)
        TP_UNROLL
        for (int j = 0; j < 2; j++) {
            float d = delta[8 * b + column + j];
            TP_UNROLL
            for (int i = b * 4 + j; i < b * 4 + 4; i += 2)
                dp[i] = p[i] * (dp[i] - d);
        }
}

/* p[n / 8][4] of keys (rows) from key and queries (columns) from t: 0 where the key is after the query. */
TP_DEVICE void
attention_mask_columns(float *p, int key, int t, int n)
{
    int lane = TP_THREAD % TP_WARP, query = t + 2 * (lane % 4), mine = key + lane / 4;
    TP_UNROLL
    for (int i = 0; i < n / 2; i++)
        if (mine + (i & 2) * 4 > query + i / 4 * 8 + (i & 1))
            p[i] = 0.0f;
}

#endif
