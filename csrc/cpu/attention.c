/* Causal attention in tiles with an online softmax (Milakov & Gimelshein 2018; FlashAttention-2: Dao 2023), recomputed
 * from the log-sum-exp in the backward.
 *
 * Sixteen lanes are sixteen queries (dQ and the forward) or sixteen keys (dK, dV), never parts of a sum: S^T = K Q^T and
 * O^T += V^T P^T are products whose left side is broadcast from the rows as they lie in memory and whose right side is
 * the chunk's queries, transposed once. So maxima and sums of the softmax run down the rows of a tile without any
 * horizontal step, each query is its own chain over keys 0, 1, ... ascending, and what shares its vector does not show.
 * Only the tiles of keys, whose edges are where the running maximum moves, are anchored: at multiples of ATT_TILE. */
#include "csrc/cpu/cpu.h"
#include "csrc/cpu/share.h"
#include "csrc/cpu/transpose.h"
#include "csrc/cpu/vec.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define ATT_TILE 64   /* rows broadcast per tile; part of the result of the forward */
#define ATT_CHUNK 384 /* lanes a thread works on at a time: they and their sums stay in L2 */
#define ATT_MASKED (-1e30f)
#define ATT_LOG2E 1.44269504088896340736

/* The block of sums kept in registers: ATT_ROWS x ATT_VECS vectors. */
#if defined(__AVX512F__)
#define ATT_ROWS 8
#define ATT_VECS 3
#elif defined(__AVX2__) && defined(__FMA__)
#define ATT_ROWS 6
#define ATT_VECS 1
#elif defined(__aarch64__)
#define ATT_ROWS 4
#define ATT_VECS 1
#else
#define ATT_ROWS 2
#define ATT_VECS 1
#endif
#define ATT_LANES (ATT_VECS * VEC_LANES) /* lanes of a block; a chunk is ATT_CHUNK / ATT_LANES blocks */

/* ---- the products -------------------------------------------------------------------------------------------------- */

/* c[r][lanes] = (add: c +) sum over k of a[r * a_row + k * a_step] * b[k][lanes], rows of b and c ATT_LANES apart. */
VEC_INLINE void
att_micro(int rows, int vecs, int64_t depth, const float *a, int64_t a_row, int64_t a_step, const float *b, float *c,
          int add)
{
    vf16 sum[ATT_ROWS][ATT_VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++)
            sum[r][v] = add ? vec_load(c + r * ATT_LANES + v * VEC_LANES) : vec_zero();
#pragma GCC unroll 1
    for (int64_t k = 0; k < depth; k++) {
        vf16 right[ATT_VECS];
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++)
            right[v] = vec_load(b + v * VEC_LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf16 left = vec_set1(a[r * a_row]);
#pragma GCC unroll 3
            for (int v = 0; v < vecs; v++)
                sum[r][v] = vec_fma(left, right[v], sum[r][v]);
        }
        a += a_step;
        b += ATT_LANES;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++)
            vec_store(c + r * ATT_LANES + v * VEC_LANES, sum[r][v]);
}

VEC_INLINE void
att_rows(int vecs, int64_t rows, int64_t depth, const float *a, int64_t a_row, int64_t a_step, const float *b, float *c,
         int add)
{
    int64_t r = 0;
    for (; r + ATT_ROWS <= rows; r += ATT_ROWS)
        att_micro(ATT_ROWS, vecs, depth, a + r * a_row, a_row, a_step, b, c + r * ATT_LANES, add);
#if ATT_ROWS > 4
    for (; r + 4 <= rows; r += 4)
        att_micro(4, vecs, depth, a + r * a_row, a_row, a_step, b, c + r * ATT_LANES, add);
#endif
    for (; r < rows; r++)
        att_micro(1, vecs, depth, a + r * a_row, a_row, a_step, b, c + r * ATT_LANES, add);
}

/* c[i][lanes] = sum over d of a[i][d] b[d][lanes], i in [0, rows). */
static __attribute__((noinline)) void
att_dot(int vecs, int64_t rows, int64_t head_dim, const float *a, const float *b, float *c)
{
#if ATT_VECS > 1
    if (vecs == 3) {
        att_rows(3, rows, head_dim, a, head_dim, 1, b, c, 0);
        return;
    }
    if (vecs == 2) {
        att_rows(2, rows, head_dim, a, head_dim, 1, b, c, 0);
        return;
    }
#endif
    (void)vecs;
    att_rows(1, rows, head_dim, a, head_dim, 1, b, c, 0);
}

/* c[d][lanes] += sum over i ascending of a[i][d] b[i][lanes], i in [0, rows). */
static __attribute__((noinline)) void
att_gather(int vecs, int64_t rows, int64_t head_dim, const float *a, const float *b, float *c)
{
#if ATT_VECS > 1
    if (vecs == 3) {
        att_rows(3, head_dim, rows, a, 1, head_dim, b, c, 1);
        return;
    }
    if (vecs == 2) {
        att_rows(2, head_dim, rows, a, 1, head_dim, b, c, 1);
        return;
    }
#endif
    (void)vecs;
    att_rows(1, head_dim, rows, a, 1, head_dim, b, c, 1);
}

/* ---- a thread's scratch -------------------------------------------------------------------------------------------- */

/* Chunk arrays are [block][head_dim][ATT_LANES], tile arrays [ATT_TILE][head_dim], squares [ATT_TILE][ATT_LANES]. */
typedef struct {
    float *left, *right;             /* chunk: the lanes' two operands, transposed (Q and dO; K and V) */
    float *sum, *sum2;               /* chunk: what is accumulated (O or dQ; dV and dK) */
    float *tile, *tile2;             /* tile: the rows broadcast (K and V; Q and dO) */
    float *square, *square2;         /* S then P; dP then dS */
    float *lane_stat, *lane_stat2;   /* [ATT_CHUNK]: running maximum and sum; lse and delta */
    float *row_stat, *row_stat2;     /* [ATT_TILE]: lse and delta of a tile of queries */
} att_scratch;

static size_t
att_scratch_floats(int64_t head_dim)
{
    size_t lanes = ATT_CHUNK, tile = ATT_TILE, width = (size_t)((head_dim + 15) & ~15);
    return 4 * lanes * width + 2 * tile * width + 2 * tile * ATT_LANES + 2 * lanes + 2 * tile;
}

static float *
att_take(float **at, size_t floats)
{
    float *taken = *at;
    *at += floats;
    return taken;
}

static att_scratch
att_scratch_of(const tp_backend *be, int64_t head_dim, int member)
{
    float *at = (float *)be->workspace + (size_t)member * att_scratch_floats(head_dim);
    size_t width = (size_t)((head_dim + 15) & ~15), chunk = ATT_CHUNK * width, tile = ATT_TILE * width;
    att_scratch s;
    s.left = att_take(&at, chunk), s.right = att_take(&at, chunk);
    s.sum = att_take(&at, chunk), s.sum2 = att_take(&at, chunk);
    s.tile = att_take(&at, tile), s.tile2 = att_take(&at, tile);
    s.square = att_take(&at, ATT_TILE * ATT_LANES), s.square2 = att_take(&at, ATT_TILE * ATT_LANES);
    s.lane_stat = att_take(&at, ATT_CHUNK), s.lane_stat2 = att_take(&at, ATT_CHUNK);
    s.row_stat = att_take(&at, ATT_TILE), s.row_stat2 = att_take(&at, ATT_TILE);
    return s;
}

static size_t
attention_workspace_bytes(int64_t n_embd, int64_t n_head, int64_t seq_len, int64_t rows, int members)
{
    (void)seq_len, (void)rows;
    return (size_t)members * att_scratch_floats(n_embd / n_head) * sizeof(float);
}

/* ---- moving rows --------------------------------------------------------------------------------------------------- */

/* A run of `count` rows of one head of one sequence. */
typedef struct {
    float *at;
    int64_t stride, count, head_dim;
} att_run;

static void
att_copy_rows(att_run from, float factor, float *tile)
{
    vf16 f = vec_set1(factor);
    for (int64_t i = 0; i < from.count; i++) {
        const float *row = from.at + i * from.stride;
        float *out = tile + i * from.head_dim;
        int64_t d = 0;
        for (; d + VEC_LANES <= from.head_dim; d += VEC_LANES)
            vec_store(out + d, vec_mul(f, vec_load(row + d)));
        if (d < from.head_dim)
            vec_store_n(out + d, vec_mul(f, vec_load_n(row + d, from.head_dim - d)), from.head_dim - d);
    }
}

/* Sixteen rows (`rows` of them real, the others zero) by sixteen columns (`columns` of them real), times
 * factor, into to[column * ATT_LANES + row]. */
static void
att_transpose_square(const float *from, int64_t stride, int64_t rows, int64_t columns, float factor, float *to)
{
    vf16 square[VEC_LANES], f = vec_set1(factor);
    for (int64_t i = 0; i < VEC_LANES; i++)
        square[i] = i >= rows              ? vec_zero()
                    : columns == VEC_LANES ? vec_mul(f, vec_load(from + i * stride))
                                           : vec_mul(f, vec_load_n(from + i * stride, columns));
    transpose_16(square);
    for (int64_t i = 0; i < columns; i++)
        vec_store(to + i * ATT_LANES, square[i]);
}

/* chunk = the run transposed and multiplied by factor; the lanes of the last block that have no row are zero. */
static void
att_transpose_in(att_run from, float factor, float *chunk)
{
    int64_t area = from.head_dim * ATT_LANES, blocks = (from.count + ATT_LANES - 1) / ATT_LANES;
    for (int64_t lane = 0; lane < blocks * ATT_LANES; lane += VEC_LANES)
        for (int64_t d = 0; d < from.head_dim; d += VEC_LANES)
            att_transpose_square(from.at + lane * from.stride + d, from.stride, from.count - lane,
                                 share_least(VEC_LANES, from.head_dim - d), factor,
                                 chunk + lane / ATT_LANES * area + d * ATT_LANES + lane % ATT_LANES);
}

/* The run = chunk transposed back, times factor[lane]. + 0 makes every zero positive: the sign of one would tell whether
 * masked keys shared its block. */
static void
att_transpose_out(const float *chunk, const float *factor, att_run to)
{
    int64_t area = to.head_dim * ATT_LANES;
    for (int64_t lane = 0; lane < to.count; lane += VEC_LANES) {
        int64_t lanes = share_least(VEC_LANES, to.count - lane);
        vf16 f = vec_load(factor + lane);
        for (int64_t d = 0; d < to.head_dim; d += VEC_LANES) {
            const float *from = chunk + lane / ATT_LANES * area + d * ATT_LANES + lane % ATT_LANES;
            int64_t rows = share_least(VEC_LANES, to.head_dim - d);
            vf16 square[VEC_LANES];
            for (int64_t i = 0; i < VEC_LANES; i++)
                square[i] = i < rows ? vec_add(vec_mul(vec_load(from + i * ATT_LANES), f), vec_zero()) : vec_zero();
            transpose_16(square);
            for (int64_t i = 0; i < lanes; i++)
                if (rows == VEC_LANES)
                    vec_store(to.at + (lane + i) * to.stride + d, square[i]);
                else
                    vec_store_n(to.at + (lane + i) * to.stride + d, square[i], rows);
        }
    }
}

static void
att_fill(int64_t n, float value, float *x)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = value;
}

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
    int64_t head_dim = job->shape->head_dim, end = u->first + u->count;
    att_transpose_in(att_qkv(job, u, job->q, u->first, u->count), (float)(job->scale * ATT_LOG2E), s->left);
    memset(s->sum, 0, (size_t)(ATT_CHUNK * head_dim) * sizeof(float));
    att_fill(ATT_CHUNK, ATT_MASKED, s->lane_stat);
    att_fill(ATT_CHUNK, 0.0f, s->lane_stat2);
    for (int64_t key = 0; key < end; key += ATT_TILE) {
        int64_t keys = share_least(ATT_TILE, end - key);
        att_copy_rows(att_qkv(job, u, job->k, key, keys), 1.0f, s->tile);
        att_copy_rows(att_qkv(job, u, job->v, key, keys), 1.0f, s->tile2);
        for (int64_t lane = 0; lane < u->count; lane += ATT_LANES) {
            int64_t query = u->first + lane, lanes = share_least(ATT_LANES, u->count - lane);
            int64_t rows = share_least(keys, query + lanes - key);
            if (rows > 0)
                att_forward_block(s, head_dim, lane / ATT_LANES, (int)((lanes + VEC_LANES - 1) / VEC_LANES), rows, key,
                                  query);
        }
    }
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
    int64_t head_dim = job->shape->head_dim, end = u->first + u->count;
    att_transpose_in(att_qkv(job, u, job->q, u->first, u->count), (float)(job->scale * ATT_LOG2E), s->left);
    att_transpose_in(att_output(job, u, job->d_o, u->first, u->count), 1.0f, s->right);
    memset(s->sum, 0, (size_t)(ATT_CHUNK * head_dim) * sizeof(float));
    for (int64_t i = 0; i < ATT_CHUNK; i++) {
        int64_t at = att_stat(job, u, u->first + i);
        s->lane_stat[i] = i < u->count ? (float)(job->lse_in[at] * ATT_LOG2E) : 0.0f;
        s->lane_stat2[i] = i < u->count ? job->delta[at] : 0.0f;
    }
    for (int64_t key = 0; key < end; key += ATT_TILE) {
        int64_t keys = share_least(ATT_TILE, end - key);
        att_copy_rows(att_qkv(job, u, job->k, key, keys), 1.0f, s->tile);
        att_copy_rows(att_qkv(job, u, job->v, key, keys), 1.0f, s->tile2);
        for (int64_t lane = 0; lane < u->count; lane += ATT_LANES) {
            int64_t query = u->first + lane, lanes = share_least(ATT_LANES, u->count - lane);
            int64_t rows = share_least(keys, query + lanes - key);
            if (rows > 0)
                att_dq_block(s, head_dim, lane / ATT_LANES, (int)((lanes + VEC_LANES - 1) / VEC_LANES), rows, key,
                             query);
        }
    }
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
            int64_t skip = key > query ? key - query : 0;
            if (skip < queries)
                att_dkv_block(s, head_dim, lane / ATT_LANES, (int)((lanes + VEC_LANES - 1) / VEC_LANES), skip, queries,
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
