/* fp32 attention with fused multiply-adds, for tests and small models: any D up to 128. Tiles of 32 x 32 (queries x keys) at
 * absolute multiples; four threads share a row. A score, an output and a gradient are each one chain, over the head's columns or
 * over keys or queries ascending. */
#include "cuda/attention.h"

#define TILE 32
#define LANES 4            /* threads of a row */
#define OWN (128 / LANES)  /* columns of the head that a thread may own: lane, lane + 4, ... */
#define SCORES (TILE / LANES)
#define PITCH(dim) ((dim) | 1) /* floats between rows: odd, so rows lie in different banks */

/* Rows [t0, t0 + TILE) of a head; rows outside [low, high) become zero. */
TP_DEVICE void
load_tile(float *tile, const float *head, int64_t stride, int t0, int low, int high, int dim)
{
    for (int i = TP_THREAD; i < TILE * dim; i += TP_ATTENTION_THREADS) {
        int r = i / dim, d = i % dim, t = t0 + r;
        tile[r * PITCH(dim) + d] = t >= low && t < high ? TP_LD(head + t * stride + d) : 0.0f;
    }
}

/* s[j] = row x . row (lane + LANES j) of y */
TP_DEVICE void
multiply_t(float *s, const float *x, const float *y, int lane, int dim)
{
    TP_UNROLL
    for (int j = 0; j < SCORES; j++)
        s[j] = 0.0f;
    for (int d = 0; d < dim; d++) {
        TP_UNROLL
        for (int j = 0; j < SCORES; j++)
            s[j] = tp_fmaf(x[d], y[(lane + LANES * j) * PITCH(dim) + d], s[j]);
    }
}

/* out[i] of column lane + LANES i += sum over the tile's rows r of p[r] y[r][column] */
TP_DEVICE void
multiply_add(float *out, const float *p, const float *y, int lane, int dim)
{
    for (int r = 0; r < TILE; r++) {
        const float *row = y + r * PITCH(dim) + lane;
        TP_UNROLL
        for (int i = 0; i < OWN; i++)
            if (lane + LANES * i < dim)
                out[i] = tp_fmaf(p[r], row[LANES * i], out[i]);
    }
}

TP_DEVICE void
store_row(const float *out, float factor, float *row, int lane, int dim)
{
    TP_UNROLL
    for (int i = 0; i < OWN; i++)
        if (lane + LANES * i < dim)
            TP_ST(row + lane + LANES * i, out[i] * factor);
}

TP_KERNEL_BOUNDS(attention_forward_f32, tp_attention_args, TP_ATTENTION_THREADS, 2)
{
    TP_SHARED(float, shared_p, TILE * (TILE + 1));
    TP_SHARED_DYNAMIC(shared);
    int size = TILE * PITCH(a.dim), lane = TP_THREAD % LANES, row = TP_THREAD / LANES;
    float *query = (float *)(void *)shared, *key = query + size, *value = key + size, *p = shared_p + row * (TILE + 1);
    tp_attention_head head = tp_attention_head_of(&a, TP_BLOCK_X);
    int t0 = ((a.last - 1) / TILE - TP_BLOCK_Y) * TILE, t = t0 + row, end = t0 + TILE < a.last ? t0 + TILE : a.last;
    float s[SCORES], out[OWN], top = -INFINITY, sum = 0.0f, lse;
    TP_UNROLL
    for (int i = 0; i < OWN; i++)
        out[i] = 0.0f;
    load_tile(query, (const float *)a.q + head.at, a.row, t0, a.first, a.last, a.dim);
    for (int k0 = 0; k0 < end; k0 += TILE) {
        float m = top, total = 0.0f, factor;
        TP_SYNC();
        load_tile(key, (const float *)a.k + head.at, a.row, k0, 0, a.last, a.dim);
        load_tile(value, (const float *)a.v + head.at, a.row, k0, 0, a.last, a.dim);
        TP_SYNC();
        multiply_t(s, query + row * PITCH(a.dim), key, lane, a.dim);
        TP_UNROLL
        for (int j = 0; j < SCORES; j++) {
            s[j] = k0 + lane + LANES * j > t ? -INFINITY : s[j];
            m = tp_maxf(m, s[j]);
        }
        m = tp_maxf(m, TP_SHFL_XOR_F(m, 1));
        m = tp_maxf(m, TP_SHFL_XOR_F(m, 2));
        factor = tp_exp2f((top - m) * a.scale2);
        TP_UNROLL
        for (int j = 0; j < SCORES; j++) {
            s[j] = tp_exp2f((s[j] - m) * a.scale2);
            p[lane + LANES * j] = s[j];
            total += s[j];
        }
        top = m;
        sum = tp_fmaf(sum, factor, total);
        TP_UNROLL
        for (int i = 0; i < OWN; i++)
            out[i] *= factor;
        TP_SYNC_WARP();
        multiply_add(out, p, value, lane, a.dim);
    }
    sum += TP_SHFL_XOR_F(sum, 1);
    sum += TP_SHFL_XOR_F(sum, 2);
    if (t < a.first || t >= a.last)
        return;
    lse = tp_attention_lse(top, a.scale, sum);
    store_row(out, lse == lse ? 1.0f / sum : NAN, (float *)a.out + head.o_at + t * a.o_row, lane, a.dim);
    if (lane == 0)
        TP_ST(a.lse_out + head.stat + t, lse);
}

TP_KERNEL_BOUNDS(attention_dq_f32, tp_attention_args, TP_ATTENTION_THREADS, 2)
{
    TP_SHARED(float, shared_ds, TILE * (TILE + 1));
    TP_SHARED_DYNAMIC(shared);
    int size = TILE * PITCH(a.dim), lane = TP_THREAD % LANES, row = TP_THREAD / LANES;
    float *query = (float *)(void *)shared, *d_o = query + size, *key = d_o + size, *value = key + size;
    float *ds = shared_ds + row * (TILE + 1);
    tp_attention_head head = tp_attention_head_of(&a, TP_BLOCK_X);
    int t0 = ((a.last - 1) / TILE - TP_BLOCK_Y) * TILE, t = t0 + row, end = t0 + TILE < a.last ? t0 + TILE : a.last;
    int mine = t >= a.first && t < a.last;
    float s[SCORES], dp[SCORES], dq[OWN];
    float lse = mine ? TP_LD(a.lse + head.stat + t) : 0.0f, delta = mine ? TP_LD(a.delta + head.stat + t) : 0.0f;
    TP_UNROLL
    for (int i = 0; i < OWN; i++)
        dq[i] = 0.0f;
    load_tile(query, (const float *)a.q + head.at, a.row, t0, a.first, a.last, a.dim);
    load_tile(d_o, (const float *)a.d_o + head.o_at, a.o_row, t0, a.first, a.last, a.dim);
    for (int k0 = 0; k0 < end; k0 += TILE) {
        TP_SYNC();
        load_tile(key, (const float *)a.k + head.at, a.row, k0, 0, a.last, a.dim);
        load_tile(value, (const float *)a.v + head.at, a.row, k0, 0, a.last, a.dim);
        TP_SYNC();
        multiply_t(s, query + row * PITCH(a.dim), key, lane, a.dim);
        multiply_t(dp, d_o + row * PITCH(a.dim), value, lane, a.dim);
        TP_UNROLL
        for (int j = 0; j < SCORES; j++) {
            float prob = tp_exp2f(tp_fmaf(s[j], a.scale, -lse) * TP_ATTENTION_LOG2E);
            ds[lane + LANES * j] = k0 + lane + LANES * j > t ? 0.0f : prob * (dp[j] - delta);
        }
        TP_SYNC_WARP();
        multiply_add(dq, ds, key, lane, a.dim);
    }
    if (mine)
        store_row(dq, a.scale, (float *)a.dq + head.at + t * a.row, lane, a.dim);
}

TP_KERNEL_BOUNDS(attention_dkdv_f32, tp_attention_args, TP_ATTENTION_THREADS, 2)
{
    TP_SHARED(float, shared_p, TILE * (TILE + 1));
    TP_SHARED(float, shared_ds, TILE * (TILE + 1));
    TP_SHARED_DYNAMIC(shared);
    int size = TILE * PITCH(a.dim), lane = TP_THREAD % LANES, row = TP_THREAD / LANES;
    float *query = (float *)(void *)shared, *d_o = query + size, *key = d_o + size, *value = key + size;
    float *p = shared_p + row * (TILE + 1), *ds = shared_ds + row * (TILE + 1);
    tp_attention_head head = tp_attention_head_of(&a, TP_BLOCK_X);
    int k0 = (a.first / TILE + TP_BLOCK_Y) * TILE, mine = k0 + row;
    float s[SCORES], dp[SCORES], dk[OWN], dv[OWN];
    TP_UNROLL
    for (int i = 0; i < OWN; i++)
        dk[i] = dv[i] = 0.0f;
    load_tile(key, (const float *)a.k + head.at, a.row, k0, a.first, a.last, a.dim);
    load_tile(value, (const float *)a.v + head.at, a.row, k0, a.first, a.last, a.dim);
    for (int t0 = k0; t0 < a.total; t0 += TILE) {
        TP_SYNC();
        load_tile(query, (const float *)a.q + head.at, a.row, t0, a.first, a.total, a.dim);
        load_tile(d_o, (const float *)a.d_o + head.o_at, a.o_row, t0, a.first, a.total, a.dim);
        TP_SYNC();
        multiply_t(s, key + row * PITCH(a.dim), query, lane, a.dim);
        multiply_t(dp, value + row * PITCH(a.dim), d_o, lane, a.dim);
        TP_UNROLL
        for (int j = 0; j < SCORES; j++) {
            int i = lane + LANES * j, t = t0 + i, seen = t >= a.first && t < a.total && mine <= t;
            float lse = seen ? TP_LD(a.lse + head.stat + t) : 0.0f, delta = seen ? TP_LD(a.delta + head.stat + t) : 0.0f;
            float prob = seen ? tp_exp2f(tp_fmaf(s[j], a.scale, -lse) * TP_ATTENTION_LOG2E) : 0.0f;
            p[i] = prob;
            ds[i] = prob * (dp[j] - delta);
        }
        TP_SYNC_WARP();
        multiply_add(dv, p, d_o, lane, a.dim);
        multiply_add(dk, ds, query, lane, a.dim);
    }
    if (mine < a.first || mine >= a.last)
        return;
    store_row(dk, a.scale, (float *)a.dk + head.at + mine * a.row, lane, a.dim);
    store_row(dv, 1.0f, (float *)a.dv + head.at + mine * a.row, lane, a.dim);
}

/* Bytes of so many tiles: all that any head takes where the launch must ask for it (simt.h, TP_LAUNCH). */
static size_t
shared_bytes(int tiles, int dim)
{
    size_t bytes = (size_t)(tiles * TILE * PITCH(dim) * 4);
    return bytes <= TP_SHARED_PLAIN ? bytes : (size_t)(tiles * TILE * PITCH(128) * 4);
}

tp_status
tp_attention_forward_f32(tp_stream stream, const tp_attention_args *args)
{
    int64_t tiles = (args->last - 1) / TILE - args->first / TILE + 1;
    return TP_LAUNCH(attention_forward_f32, tp_grid2(args->items, tiles), TP_ATTENTION_THREADS, shared_bytes(3, args->dim), stream,
                     *args);
}

tp_status
tp_attention_backward_f32(tp_stream stream, const tp_attention_args *args)
{
    int64_t tiles = (args->last - 1) / TILE - args->first / TILE + 1;
    size_t smem = shared_bytes(4, args->dim);
    TP_TRY(TP_LAUNCH(attention_dq_f32, tp_grid2(args->items, tiles), TP_ATTENTION_THREADS, smem, stream, *args));
    return TP_LAUNCH(attention_dkdv_f32, tp_grid2(args->items, tiles), TP_ATTENTION_THREADS, smem, stream, *args);
}
