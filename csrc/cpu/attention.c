/* Causal attention in tiles with an online softmax (Milakov & Gimelshein 2018; FlashAttention-2: Dao 2023), recomputed
 * from the log-sum-exp in the backward.
 *
 * Sixteen lanes are sixteen queries (dQ and the forward) or sixteen keys (dK, dV), never parts of a sum: S^T = K Q^T and
 * O^T += V^T P^T are products whose left side is broadcast from the rows as they lie in memory and whose right side is
 * the chunk's queries, transposed once. So maxima and sums of the softmax run down the rows of a tile without any
 * horizontal step, each query is its own chain over keys 0, 1, ... ascending, and what shares its vector does not show.
 * Only the tiles of keys, whose edges are where the running maximum moves, are anchored: at multiples of ATT_TILE. */
#include "csrc/cpu/attention_tile.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

/* ---- units of work ------------------------------------------------------------------------------------------------- */

typedef struct {
    const tp_backend *be;
    const tp_attention *shape;
    const float *q, *k, *v, *o, *d_o, *lse_in;
    float *out, *lse, *delta, *dq, *dk, *dv;
    float scale;
    int64_t lanes, chunks; /* of a chunk; chunks of the slice */
    _Atomic int64_t next;  /* the next unit nobody has; who computes a unit does not show */
} att_job;

/* One sequence, one head, lanes [first, first + count) as positions in the sequence. */
typedef struct {
    int64_t b, h, first, count;
} att_unit;

static att_unit
att_unit_of(const att_job *job, int64_t index)
{
    const tp_attention *s = job->shape;
    int64_t chunk = index / (s->batch * s->heads), pair = index % (s->batch * s->heads);
    int64_t first = s->context + chunk * job->lanes;
    return (att_unit){pair / s->heads, pair % s->heads, first, share_least(job->lanes, s->context + s->slice - first)};
}

/* Chunks as long as leaves every thread some four of them to even out the triangle. */
static void
att_cut(att_job *job)
{
    const tp_attention *s = job->shape;
    int64_t units = 4 * tp_team_members(job->be->team), pairs = s->batch * s->heads;
    int64_t lanes = (s->slice * pairs + units - 1) / units;
    job->scale = (float)(1.0 / sqrt((double)s->head_dim));
    job->lanes = share_least((lanes + ATT_LANES - 1) / ATT_LANES * ATT_LANES, ATT_CHUNK);
    job->chunks = (s->slice + job->lanes - 1) / job->lanes;
}

static att_run
att_run_of(const att_job *job, const att_unit *u, const float *base, int64_t stride, int64_t first, int64_t count)
{
    const tp_attention *s = job->shape;
    const float *at = base + (first * s->batch + u->b) * stride + u->h * s->head_dim;
    return (att_run){(float *)(uintptr_t)at, stride * s->batch, count, s->head_dim};
}

static att_run
att_qkv(const att_job *job, const att_unit *u, const float *base, int64_t first, int64_t count)
{
    return att_run_of(job, u, base, job->shape->qkv_stride, first, count);
}

static att_run
att_output(const att_job *job, const att_unit *u, const float *base, int64_t first, int64_t count)
{
    return att_run_of(job, u, base, job->shape->o_stride, first, count);
}

static int64_t
att_stat(const att_job *job, const att_unit *u, int64_t t)
{
    return (u->b * job->shape->heads + u->h) * job->shape->total + t;
}

static int64_t
att_clamp_lanes(int64_t n)
{
    return n < 0 ? 0 : share_least(n, VEC_LANES);
}

/* Set square[i][lane] to `value` where key `key + i` comes after query `query + lane`. */
static void
att_mask_queries(int vecs, int64_t rows, int64_t key, int64_t query, float value, float *square)
{
    for (int64_t i = query - key + 1 > 0 ? query - key + 1 : 0; i < rows; i++)
        for (int v = 0; v < vecs; v++) {
            float *at = square + i * ATT_LANES + v * VEC_LANES;
            int64_t cut = att_clamp_lanes(key + i - query - v * VEC_LANES);
            vec_store(at, vec_first_n(vec_set1(value), cut, vec_load(at)));
        }
}

/* Walk the keys that lanes' queries see, tile by tile; block(...) for each block of lanes with at least one of them. */
typedef void (*att_block)(const att_scratch *s, int64_t head_dim, int64_t block, int vecs, int64_t rows, int64_t key,
                          int64_t query);

static void
att_sweep_keys(const att_job *job, const att_unit *u, const att_scratch *s, att_block block)
{
    int64_t end = u->first + u->count;
    for (int64_t key = 0; key < end; key += ATT_TILE) {
        int64_t keys = share_least(ATT_TILE, end - key);
        att_copy_rows(att_qkv(job, u, job->k, key, keys), 1.0f, s->tile);
        att_copy_rows(att_qkv(job, u, job->v, key, keys), 1.0f, s->tile2);
        for (int64_t lane = 0; lane < u->count; lane += ATT_LANES) {
            int64_t query = u->first + lane, lanes = share_least(ATT_LANES, u->count - lane);
            int64_t rows = share_least(keys, query + lanes - key), index = lane / ATT_LANES;
            if (rows > 0)
                block(s, job->shape->head_dim, index, (int)((lanes + VEC_LANES - 1) / VEC_LANES), rows, key, query);
        }
    }
}

/* ---- forward ------------------------------------------------------------------------------------------------------- */

/* square: S in log2 -> P = 2^(S - m). m, l: the running maximum and sum of each lane; sum (O^T) is rescaled to the new
 * maximum. */
VEC_INLINE void
att_softmax_vec(int64_t rows, int64_t head_dim, float *square, float *m, float *l, float *sum)
{
    vf16 old = vec_load(m), high = old, high2 = old;
    int64_t i = 0;
    for (; i + 2 <= rows; i += 2) {
        high = vec_max(high, vec_load(square + i * ATT_LANES));
        high2 = vec_max(high2, vec_load(square + (i + 1) * ATT_LANES));
    }
    if (i < rows)
        high = vec_max(high, vec_load(square + i * ATT_LANES));
    high = vec_max(high, high2);
    vf16 total = vec_load(l);
    if (!vec_all_equal(high, old)) {
        vf16 shrink = vec_exp2_low(vec_sub(old, high));
        total = vec_mul(total, shrink);
        for (int64_t d = 0; d < head_dim; d++)
            vec_store(sum + d * ATT_LANES, vec_mul(shrink, vec_load(sum + d * ATT_LANES)));
        vec_store(m, high);
    }
#pragma GCC unroll 4
    for (i = 0; i < rows; i++) {
        vf16 p = vec_exp2_low(vec_sub(vec_load(square + i * ATT_LANES), high));
        total = vec_add(total, p);
        vec_store(square + i * ATT_LANES, p);
    }
    vec_store(l, total);
}

static void
att_forward_block(const att_scratch *s, int64_t head_dim, int64_t block, int vecs, int64_t rows, int64_t key,
                  int64_t query)
{
    int64_t area = head_dim * ATT_LANES;
    int diagonal = key + rows - 1 > query;
    att_dot(vecs, rows, head_dim, s->tile, s->left + block * area, s->square);
    if (diagonal)
        att_mask_queries(vecs, rows, key, query, ATT_MASKED, s->square);
    for (int v = 0; v < vecs; v++) {
        int64_t lane = v * VEC_LANES;
        att_softmax_vec(rows, head_dim, s->square + lane, s->lane_stat + block * ATT_LANES + lane,
                        s->lane_stat2 + block * ATT_LANES + lane, s->sum + block * area + lane);
    }
    if (diagonal)
        att_mask_queries(vecs, rows, key, query, 0.0f, s->square);
    att_gather(vecs, rows, head_dim, s->tile2, s->square, s->sum + block * area);
}

static void
att_forward_unit(const att_job *job, const att_unit *u, const att_scratch *s)
{
    int64_t head_dim = job->shape->head_dim;
    att_transpose_in(att_qkv(job, u, job->q, u->first, u->count), (float)(job->scale * ATT_LOG2E), s->left);
    memset(s->sum, 0, (size_t)(ATT_CHUNK * head_dim) * sizeof(float));
    att_fill(ATT_CHUNK, ATT_MASKED, s->lane_stat);
    att_fill(ATT_CHUNK, 0.0f, s->lane_stat2);
    att_sweep_keys(job, u, s, att_forward_block);
    for (int64_t i = 0; i < u->count; i++) {
        double total = s->lane_stat2[i];
        job->lse[att_stat(job, u, u->first + i)] = (float)((s->lane_stat[i] + log2(total)) / ATT_LOG2E);
        s->lane_stat2[i] = (float)(1.0 / total);
    }
    att_transpose_out(s->sum, s->lane_stat2, att_output(job, u, job->out, u->first, u->count));
}

static void
att_forward_work(void *argument, int member, int members)
{
    att_job *job = argument;
    att_scratch s = att_scratch_of(job->be, job->shape->head_dim, member);
    int64_t units = job->chunks * job->shape->batch * job->shape->heads;
    (void)members;
    for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < units;) {
        att_unit u = att_unit_of(job, units - 1 - i); /* the longest first: they cannot straggle */
        att_forward_unit(job, &u, &s);
    }
}

static void
cpu_attention_forward(tp_backend *be, const tp_attention *shape, const float *q, const float *k, const float *v,
                      float *o, float *lse)
{
    att_job job = {.be = be, .shape = shape, .q = q, .k = k, .v = v, .out = o, .lse = lse};
    att_cut(&job);
    share_run(be, shape->batch * shape->slice * (shape->context + shape->slice) * shape->heads, att_forward_work, &job);
}

/* ---- backward ------------------------------------------------------------------------------------------------------ */

static float
att_row_dot(int64_t n, const float *x, const float *y)
{
    vf16 sum = vec_zero();
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES)
        sum = vec_fma(vec_load(x + i), vec_load(y + i), sum);
    if (i < n)
        sum = vec_fma(vec_load_n(x + i, n - i), vec_load_n(y + i, n - i), sum);
    return vec_sum(sum);
}

static void
att_delta_work(void *argument, int member, int members)
{
    att_job *job = argument;
    const tp_attention *s = job->shape;
    int64_t first, last;
    tp_team_share(s->slice, 1, member, members, &first, &last);
    for (int64_t t = s->context + first; t < s->context + last; t++)
        for (int64_t b = 0; b < s->batch; b++)
            for (int64_t h = 0; h < s->heads; h++) {
                int64_t at = (t * s->batch + b) * s->o_stride + h * s->head_dim;
                job->delta[(b * s->heads + h) * s->total + t] =
                    att_row_dot(s->head_dim, job->o + at, job->d_o + at);
            }
}

/* Lanes are queries: P = 2^(S - lse), dS = P (dP - delta); square2 becomes dS. */
static void
att_dq_block(const att_scratch *s, int64_t head_dim, int64_t block, int vecs, int64_t rows, int64_t key, int64_t query)
{
    int64_t area = head_dim * ATT_LANES;
    att_dot(vecs, rows, head_dim, s->tile, s->left + block * area, s->square);
    att_dot(vecs, rows, head_dim, s->tile2, s->right + block * area, s->square2);
    for (int v = 0; v < vecs; v++) {
        int64_t lane = block * ATT_LANES + v * VEC_LANES;
        vf16 lse = vec_load(s->lane_stat + lane), delta = vec_load(s->lane_stat2 + lane);
#pragma GCC unroll 4
        for (int64_t i = 0; i < rows; i++) {
            float *dp = s->square2 + i * ATT_LANES + v * VEC_LANES;
            vf16 p = vec_exp2_low(vec_sub(vec_load(s->square + i * ATT_LANES + v * VEC_LANES), lse));
            vec_store(dp, vec_mul(p, vec_sub(vec_load(dp), delta)));
        }
    }
    if (key + rows - 1 > query)
        att_mask_queries(vecs, rows, key, query, 0.0f, s->square2);
    att_gather(vecs, rows, head_dim, s->tile, s->square2, s->sum + block * area);
}

static void
att_dq_unit(const att_job *job, const att_unit *u, const att_scratch *s)
{
    int64_t head_dim = job->shape->head_dim;
    att_transpose_in(att_qkv(job, u, job->q, u->first, u->count), (float)(job->scale * ATT_LOG2E), s->left);
    att_transpose_in(att_output(job, u, job->d_o, u->first, u->count), 1.0f, s->right);
    memset(s->sum, 0, (size_t)(ATT_CHUNK * head_dim) * sizeof(float));
    for (int64_t i = 0; i < ATT_CHUNK; i++) {
        int64_t at = att_stat(job, u, u->first + i);
        s->lane_stat[i] = i < u->count ? (float)(job->lse_in[at] * ATT_LOG2E) : 0.0f;
        s->lane_stat2[i] = i < u->count ? job->delta[at] : 0.0f;
    }
    att_sweep_keys(job, u, s, att_dq_block);
    att_fill(ATT_CHUNK, job->scale, s->lane_stat);
    att_transpose_out(s->sum, s->lane_stat, att_qkv(job, u, job->dq, u->first, u->count));
}

/* Lanes are keys, rows [skip, rows) of the tile queries: square becomes P, square2 dS; keys after the query get zero. */
static void
att_dkv_block(const att_scratch *s, int64_t head_dim, int64_t block, int vecs, int64_t skip, int64_t rows, int64_t query,
              int64_t key)
{
    int64_t area = head_dim * ATT_LANES, from = skip * head_dim, last = key + vecs * VEC_LANES - 1;
    float *p_at = s->square, *ds_at = s->square2;
    rows -= skip;
    att_dot(vecs, rows, head_dim, s->tile + from, s->left + block * area, p_at);
    att_dot(vecs, rows, head_dim, s->tile2 + from, s->right + block * area, ds_at);
    for (int64_t i = 0; i < rows; i++) {
        vf16 lse = vec_set1(s->row_stat[skip + i]), delta = vec_set1(s->row_stat2[skip + i]);
        int64_t position = query + skip + i;
        for (int v = 0; v < vecs; v++) {
            float *pv = p_at + i * ATT_LANES + v * VEC_LANES, *dv = ds_at + i * ATT_LANES + v * VEC_LANES;
            vf16 p = vec_exp2_low(vec_sub(vec_load(pv), lse));
            vf16 ds = vec_mul(p, vec_sub(vec_load(dv), delta));
            if (position < last) {
                int64_t seen = att_clamp_lanes(position - key - v * VEC_LANES + 1);
                p = vec_first_n(p, seen, vec_zero());
                ds = vec_first_n(ds, seen, vec_zero());
            }
            vec_store(pv, p);
            vec_store(dv, ds);
        }
    }
    att_gather(vecs, rows, head_dim, s->tile2 + from, p_at, s->sum + block * area);
    att_gather(vecs, rows, head_dim, s->tile + from, ds_at, s->sum2 + block * area);
}

static void
att_dkv_unit(const att_job *job, const att_unit *u, const att_scratch *s)
{
    int64_t head_dim = job->shape->head_dim, total = job->shape->total;
    att_transpose_in(att_qkv(job, u, job->k, u->first, u->count), 1.0f, s->left);
    att_transpose_in(att_qkv(job, u, job->v, u->first, u->count), 1.0f, s->right);
    memset(s->sum, 0, (size_t)(ATT_CHUNK * head_dim) * sizeof(float));
    memset(s->sum2, 0, (size_t)(ATT_CHUNK * head_dim) * sizeof(float));
    for (int64_t query = u->first; query < total; query += ATT_TILE) {
        int64_t queries = share_least(ATT_TILE, total - query);
        att_copy_rows(att_qkv(job, u, job->q, query, queries), (float)(job->scale * ATT_LOG2E), s->tile);
        att_copy_rows(att_output(job, u, job->d_o, query, queries), 1.0f, s->tile2);
        for (int64_t i = 0; i < queries; i++) {
            int64_t at = att_stat(job, u, query + i);
            s->row_stat[i] = (float)(job->lse_in[at] * ATT_LOG2E);
            s->row_stat2[i] = job->delta[at];
        }
        for (int64_t lane = 0; lane < u->count; lane += ATT_LANES) {
            int64_t key = u->first + lane, lanes = share_least(ATT_LANES, u->count - lane);
            int64_t skip = key > query ? key - query : 0, index = lane / ATT_LANES;
            if (skip < queries)
                att_dkv_block(s, head_dim, index, (int)((lanes + VEC_LANES - 1) / VEC_LANES), skip, queries,
                              query, key);
        }
    }
    att_fill(ATT_CHUNK, 1.0f, s->lane_stat);
    att_transpose_out(s->sum, s->lane_stat, att_qkv(job, u, job->dv, u->first, u->count));
    /* the rows of Q came multiplied by scale * log2(e) */
    att_fill(ATT_CHUNK, (float)(1.0 / ATT_LOG2E), s->lane_stat);
    att_transpose_out(s->sum2, s->lane_stat, att_qkv(job, u, job->dk, u->first, u->count));
}

static void
att_backward_work(void *argument, int member, int members)
{
    att_job *job = argument;
    att_scratch s = att_scratch_of(job->be, job->shape->head_dim, member);
    int64_t half = job->chunks * job->shape->batch * job->shape->heads;
    (void)members;
    for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < 2 * half;) {
        if (i < half) {
            att_unit u = att_unit_of(job, i); /* the first keys are seen by the most queries */
            att_dkv_unit(job, &u, &s);
        } else {
            att_unit u = att_unit_of(job, 2 * half - 1 - i);
            att_dq_unit(job, &u, &s);
        }
    }
}

static void
cpu_attention_backward(tp_backend *be, const tp_attention *shape, const float *q, const float *k, const float *v,
                       const float *o, const float *d_o, const float *lse, float *delta, float *dq, float *dk, float *dv)
{
    att_job job = {.be = be, .shape = shape, .q = q, .k = k, .v = v, .o = o, .d_o = d_o, .lse_in = lse};
    job.delta = delta, job.dq = dq, job.dk = dk, job.dv = dv;
    att_cut(&job);
    share_run(be, shape->batch * shape->slice * shape->heads * shape->head_dim, att_delta_work, &job);
    share_run(be, shape->batch * shape->slice * shape->total * shape->heads, att_backward_work, &job);
}
