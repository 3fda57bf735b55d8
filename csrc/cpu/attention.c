/* Causal attention of a slice over its context, tile by tile (FlashAttention: Dao et al. 2022), forward and push backward.
 *
 * Keys are taken in tiles of TILE anchored at absolute multiples, so what a row computes does not depend on the slice that
 * contains it: each score, output and gradient element is one chain of fused multiply-adds in absolute order, and masked
 * entries enter as exact zeros. Threads share (sequence, head) pairs.
 *
 * The key tile is the outer loop: its K and V are packed once, and the queries (packed once per call) stream by in groups of
 * TILE. */
#include "csrc/cpu/cpu.h"

#include "csrc/cpu/attention_tile.h"
#include "csrc/cpu/attention_wide.h"
#include "csrc/cpu/vec.h"

#include <math.h>
#include <string.h>

#define ATTENTION_LOG2E 1.4426950408889634f
/* A row's reference moves only when a score passes it by this many powers of two; until then exp2 gives at most 2^8, which
 * costs no precision, and nothing need be reduced across lanes or rescaled. */
#define ATTENTION_SLACK 8.0f

typedef struct {
    const tp_attention *shape;
    const float *q, *k, *v, *d_o_in;
    const float *o_in, *lse_in;
    float *o, *lse, *delta, *dq, *dk, *dv;
    int64_t kv_stride, dkv_stride;
    float *workspace;
    size_t member_floats;
} attention_job;

/* One (sequence, head). */
typedef struct {
    int64_t head_dim, depth, first, last, total; /* rows [first, last) of the slice, [0, total) of the sequence */
    int64_t row, kv_row, o_row, dkv_row;         /* floats between tokens */
    int64_t at, o_at;                            /* offsets of the slice's first token in q, in o */
    int64_t kv_at, dkv_at, stat;                 /* of token 0 in k/v, in dk/dv, in lse and delta */
    float scale, scale2;                         /* 1/sqrt(D), in log2 */
} head_view;

static inline int64_t
attention_depth(int64_t head_dim)
{
    return (head_dim + VEC_LANES - 1) / VEC_LANES * VEC_LANES;
}

static inline int64_t
attention_least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t
attention_most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static head_view
view_head(const tp_attention *shape, int64_t kv_stride, int64_t dkv_stride, int64_t item)
{
    int64_t b = item / shape->heads, h = item % shape->heads;
    float scale = 1.0f / sqrtf((float)shape->head_dim);
    return (head_view){.head_dim = shape->head_dim,
                       .depth = attention_depth(shape->head_dim),
                       .first = shape->context,
                       .last = shape->context + shape->slice,
                       .total = shape->total,
                       .row = shape->batch * shape->qkv_stride,
                       .kv_row = shape->batch * kv_stride,
                       .o_row = shape->batch * shape->o_stride,
                       .dkv_row = shape->batch * dkv_stride,
                       .at = b * shape->qkv_stride + h * shape->head_dim,
                       .kv_at = b * kv_stride + h * shape->head_dim,
                       .o_at = b * shape->o_stride + h * shape->head_dim,
                       .dkv_at = b * dkv_stride + h * shape->head_dim,
                       .stat = item * shape->total,
                       .scale = scale,
                       .scale2 = scale * ATTENTION_LOG2E};
}

/* ---- forward ------------------------------------------------------------------------------------------------------- */

typedef struct {
    float *query, *out; /* [slice][depth] */
    float *sum;         /* [slice][16]: lane i sums the keys = i mod 16 */
    float *reference;   /* [slice]: what is subtracted from the row's scores */
    float *key_t;       /* [D][TILE] */
    float *value;       /* [TILE][depth] */
    float *scores;      /* [TILE][TILE] */
} forward_space;

static int64_t
forward_floats(int64_t head_dim, int64_t slice)
{
    int64_t depth = attention_depth(head_dim), rows = slice * (2 * depth + VEC_LANES) + attention_depth(slice);
    return rows + TILE * (head_dim + depth + TILE) + 7 * TILE_PAD;
}

static forward_space
forward_divide(const head_view *head, float *w)
{
    int64_t rows = head->last - head->first;
    forward_space s;
    s.query = w;
    s.out = s.query + rows * head->depth + TILE_PAD;
    s.sum = s.out + rows * head->depth + TILE_PAD;
    s.reference = s.sum + rows * VEC_LANES + TILE_PAD;
    s.key_t = s.reference + attention_depth(rows) + TILE_PAD;
    s.value = s.key_t + head->head_dim * TILE + TILE_PAD;
    s.scores = s.value + TILE * head->depth + TILE_PAD;
    return s;
}

/* A score passed the row's reference: `top` holds the new one among its lanes. */
static __attribute__((noinline)) void
raise_reference(const head_view *head, vf16 top, float *reference, float *sum, float *out)
{
    float now = vec_max_lane(top);
    vf16 factor = vec_exp2_low(vec_set1((*reference - now) * head->scale2));
    vec_store(sum, vec_mul(vec_load(sum), factor));
    for (int64_t d = 0; d < head->depth; d += VEC_LANES)
        vec_store(out + d, vec_mul(vec_load(out + d), factor));
    *reference = now;
}

/* One row of scores -> exp2 of what they exceed the reference by. The first `seen` keys are visible; masked: not all. */
VEC_INLINE void
softmax_row(const int masked, const head_view *head, float *scores, int64_t seen, float *reference, float *sum, float *out)
{
    vf16 s[TILE_VECTORS], limit = vec_set1(*reference + ATTENTION_SLACK / head->scale2), top = limit;
#pragma GCC unroll 4
    for (int j = 0; j < TILE_VECTORS; j++) {
        s[j] = vec_load(scores + j * VEC_LANES);
        if (masked)
            s[j] = vec_first_n(s[j], tile_lanes(seen, j * VEC_LANES), vec_set1(-INFINITY));
        top = vec_max(top, s[j]);
    }
    if (__builtin_expect(!vec_all_equal(top, limit), 0))
        raise_reference(head, top, reference, sum, out);
    float from = -*reference * head->scale2;
    if (is_wide(from)) {
        for (int j = 0; j < TILE_VECTORS; j++)
            s[j] = vec_sub(s[j], vec_set1(*reference));
        from = 0.0f;
    }
    vf16 factor = vec_set1(head->scale2), shift = vec_set1(from), total = vec_load(sum);
#pragma GCC unroll 4
    for (int j = 0; j < TILE_VECTORS; j++) {
        vf16 p = vec_exp2_low(vec_fma(s[j], factor, shift));
        if (masked)
            p = vec_first_n(p, tile_lanes(seen, j * VEC_LANES), vec_zero());
        vec_store(scores + j * VEC_LANES, p);
        total = vec_add(total, p);
    }
    vec_store(sum, total);
}

/* `count` queries from t, `keys` keys from `key`, whose values are [keys][value_row]. */
static void
forward_tile(const head_view *head, const forward_space *w, const float *value, int64_t value_row, int64_t t, int64_t count,
             int64_t key, int64_t keys, tile_ahead *ahead)
{
    int64_t at = t - head->first, depth = head->depth;
    int whole = keys == TILE && t >= key + TILE - 1;
    for (int64_t i = 0; i < count; i += BLOCK_ROWS) {
        int64_t rows = attention_least(count - i, BLOCK_ROWS), seen = attention_least(t + i + rows - key, keys);
        tile_product qk = {.a = w->query + (at + i) * depth, .a_step = depth, .b = w->key_t, .ldb = TILE,
                           .c = w->scores + i * TILE, .ldc = TILE, .columns = attention_depth(seen),
                           .depth = head->head_dim};
        tile_multiply(rows, &qk);
        for (int64_t r = i; r < i + rows; r++) {
            ahead_fetch(ahead, head->head_dim);
            float *scores = w->scores + r * TILE, *sum = w->sum + (at + r) * VEC_LANES, *out = w->out + (at + r) * depth;
            if (whole)
                softmax_row(0, head, scores, TILE, &w->reference[at + r], sum, out);
            else
                softmax_row(1, head, scores, attention_least(t + r + 1 - key, keys), &w->reference[at + r], sum, out);
        }
    }
    tile_product pv = {.a = w->scores, .a_step = TILE, .b = value, .ldb = value_row, .c = w->out + at * depth, .ldc = depth,
                       .columns = depth, .depth = TILE, .accumulate = 1};
    if (whole) {
        tile_multiply(count, &pv);
        return;
    }
    for (int64_t i = 0; i < count; i += BLOCK_ROWS, pv.a += BLOCK_ROWS * TILE, pv.c += BLOCK_ROWS * depth) {
        int64_t rows = attention_least(count - i, BLOCK_ROWS);
        pv.depth = attention_least(t + i + rows - key, keys);
        tile_multiply(rows, &pv);
    }
}

static void
forward_begin(const attention_job *job, const head_view *head, const forward_space *w, int64_t t, int64_t count)
{
    int64_t at = t - head->first, depth = head->depth;
    pack_rows(job->q + head->at + at * head->row, head->row, count, head->head_dim, depth, w->query + at * depth);
    memset(w->out + at * depth, 0, (size_t)(count * depth) * sizeof *w->out);
    memset(w->sum + at * VEC_LANES, 0, (size_t)(count * VEC_LANES) * sizeof *w->sum);
    for (int64_t r = at; r < at + count; r++)
        w->reference[r] = -INFINITY;
}

static void
forward_end(const attention_job *job, const head_view *head, const forward_space *w, int64_t t, int64_t count)
{
    int64_t depth = head->depth, at = t - head->first;
    for (int64_t r = at; r < at + count; r++) {
        float sum = vec_sum(vec_load(w->sum + r * VEC_LANES)), *out = w->out + r * depth;
        sum = fabsf(w->reference[r] * head->scale) < ATTENTION_MOST ? sum : NAN;
        for (int64_t d = 0; d < depth; d += VEC_LANES)
            vec_store(out + d, vec_div(vec_load(out + d), vec_set1(sum)));
        job->lse[head->stat + head->first + r] = w->reference[r] * head->scale + logf(sum);
    }
    unpack_rows(w->out + at * depth, count, head->head_dim, depth, job->o + head->o_at + at * head->o_row, head->o_row);
}

/* What forward_item will need next after the group [t, next) of the tile at `key`. */
static tile_ahead
forward_ahead(const attention_job *job, const head_view *head, int64_t t, int64_t next, int64_t key)
{
    tile_ahead ahead = {.streams = 0};
    int64_t row = head->kv_row, keys = attention_least(head->last - key - TILE, TILE);
    int64_t begin = attention_most(key, head->first), count = next - t;
    if (keys > 0) {
        ahead_add(&ahead, job->k + head->kv_at + (key + TILE) * row, row, keys, t - begin, head->last - begin);
        ahead_add(&ahead, job->v + head->kv_at + (key + TILE) * row, row, keys, t - begin, head->last - begin);
    }
    if (key == 0 && next < head->last)
        ahead_add(&ahead, job->q + head->at + (next - head->first) * head->row, head->row,
                  attention_least(head->last - next, TILE), 0, count);
    if (next <= key + TILE)
        ahead_add(&ahead, job->o + head->o_at + (t - head->first) * head->o_row, head->o_row, count, 0, count);
    return ahead;
}

static void
forward_item(const attention_job *job, const head_view *head, float *workspace)
{
    forward_space w = forward_divide(head, workspace);
    int64_t depth = head->depth, row = head->kv_row;
    /* A few rows would read each value about once: packing would cost more than it saves. */
    int packed = head->last - head->first > 2 * BLOCK_ROWS || depth != head->head_dim;
    for (int64_t key = 0; key < head->last; key += TILE) {
        int64_t keys = attention_least(head->last - key, TILE);
        const float *value = job->v + head->kv_at + key * row;
        pack_transposed(job->k + head->kv_at + key * row, row, keys, head->head_dim, w.key_t);
        if (packed)
            pack_rows(value, row, keys, head->head_dim, depth, w.value);
        for (int64_t t = attention_most(key, head->first), next; t < head->last; t = next) { /* earlier rows: not this tile */
            next = attention_least((t / TILE + 1) * TILE, head->last);
            tile_ahead ahead = forward_ahead(job, head, t, next, key);
            if (key == 0)
                forward_begin(job, head, &w, t, next - t);
            forward_tile(head, &w, packed ? w.value : value, packed ? depth : row, t, next - t, key, keys, &ahead);
            if (next <= key + TILE)
                forward_end(job, head, &w, t, next - t);
        }
    }
}

/* ---- backward ------------------------------------------------------------------------------------------------------- */

typedef struct {
    float *query, *d_o, *dq;      /* [slice][depth] */
    float *key_t, *value_t;       /* [D][TILE] */
    float *key;                   /* [TILE][depth] */
    float *dk, *dv;               /* [TILE][depth] */
    float *p, *ds;                /* [queries][keys] of TILE each */
} backward_space;

static int64_t
backward_floats(int64_t head_dim, int64_t slice)
{
    int64_t depth = attention_depth(head_dim);
    return 3 * slice * depth + TILE * (2 * head_dim + 3 * depth + 2 * TILE) + 10 * TILE_PAD;
}

static backward_space
backward_divide(const head_view *head, float *w)
{
    int64_t depth = head->depth, rows = head->last - head->first, tile = TILE * depth + TILE_PAD;
    backward_space s;
    s.query = w;
    s.d_o = s.query + rows * depth + TILE_PAD;
    s.dq = s.d_o + rows * depth + TILE_PAD;
    s.key_t = s.dq + rows * depth + TILE_PAD;
    s.value_t = s.key_t + head->head_dim * TILE + TILE_PAD;
    s.key = s.value_t + head->head_dim * TILE + TILE_PAD;
    s.dk = s.key + tile;
    s.dv = s.dk + tile;
    s.p = s.dv + tile;
    s.ds = s.p + TILE * TILE + TILE_PAD;
    return s;
}

/* Which queries meet which keys: `count` queries from t; `keys` keys from `key`. */
typedef struct {
    int64_t t, count, key, keys;
    tile_ahead ahead;
} backward_tile;

/* p: scores -> P; ds: products -> dS, of one row. Columns that no product wrote become zero. */
VEC_INLINE void
gradient_row(const int masked, int64_t seen, float scale, float scale2, float lse, float delta, float *p,
             float *ds)
{
    if (is_wide(lse)) {
        take_from_row(p, lse / scale);
        lse = 0.0f;
    }
    vf16 factor = vec_set1(scale2), shift = vec_set1(-lse * ATTENTION_LOG2E), less = vec_set1(delta), times = vec_set1(scale);
#pragma GCC unroll 4
    for (int64_t j = 0; j < TILE; j += VEC_LANES) {
        vf16 prob = vec_exp2_low(vec_fma(vec_load(p + j), factor, shift));
        vf16 grad = vec_mul(vec_mul(prob, vec_sub(vec_load(ds + j), less)), times);
        if (masked) {
            prob = vec_first_n(prob, tile_lanes(seen, j), vec_zero());
            grad = vec_first_n(grad, tile_lanes(seen, j), vec_zero());
        }
        vec_store(p + j, prob);
        vec_store(ds + j, grad);
    }
}

/* The rounding of a row's lse makes all of its P too large or too small by one factor, and so its sum, which should be 1, is that.
 * Where it is more than a little the first float of the row's dq becomes its reciprocal, for backward_begin. */
static void
measure_wide_rows(const attention_job *job, const head_view *head, const backward_space *w, int64_t t, int64_t count)
{
    int64_t depth = head->depth, dim = head->head_dim, row = t - head->first, at = row * depth;
    const float *lse = job->lse_in + head->stat + t;
    tile_product qk = {.a = w->query + at, .a_step = depth, .b = w->key_t, .ldb = TILE, .c = w->p, .ldc = TILE, .columns = TILE,
                       .depth = dim};
    pack_rows(job->q + head->at + row * head->row, head->row, count, dim, depth, w->query + at);
    memset(w->dq + at, 0, (size_t)(count * depth) * sizeof *w->dq);
    for (int64_t key = 0; key < t + count; key += TILE) {
        int64_t keys = attention_least(head->last - key, TILE);
        pack_transposed(job->k + head->kv_at + key * head->kv_row, head->kv_row, keys, dim, w->key_t);
        tile_multiply(count, &qk);
        for (int64_t r = 0; r < count; r++)
            if (is_wide(lse[r]))
                add_up_row(w->p + r * TILE, attention_least(t + r + 1 - key, keys), lse[r], head->scale, head->scale2,
                           w->dq + at + r * depth);
    }
    for (int64_t r = 0; r < count; r++)
        w->dq[at + r * depth] = 1.0f / vec_sum(vec_load(w->dq + at + r * depth));
}

/* When rows are first met: packs them; their delta and a zero dq. What P has too much, d_o has less. */
static void
backward_begin(const attention_job *job, const head_view *head, const backward_space *w, int64_t t, int64_t count)
{
    int64_t depth = head->depth, dim = head->head_dim, row = t - head->first, at = row * depth;
    int64_t o_at = head->o_at + row * head->o_row;
    pack_rows(job->q + head->at + row * head->row, head->row, count, dim, depth, w->query + at);
    pack_rows(job->d_o_in + o_at, head->o_row, count, dim, depth, w->d_o + at);
    for (int64_t r = 0; r < count; r++) {
        const float *o = job->o_in + o_at + r * head->o_row;
        float *d = w->d_o + at + r * depth;
        vf16 sum = vec_zero();
        for (int64_t i = 0; is_wide(job->lse_in[head->stat + t + r]) && i < depth; i += VEC_LANES)
            vec_store(d + i, vec_mul(vec_load(d + i), vec_set1(w->dq[at + r * depth])));
        for (int64_t i = 0; i < depth; i += VEC_LANES)
            sum = vec_fma(vec_load_n(o + i, tile_lanes(dim, i)), vec_load(d + i), sum);
        job->delta[head->stat + t + r] = vec_sum(sum);
    }
    memset(w->dq + at, 0, (size_t)(count * depth) * sizeof *w->dq);
}

/* P and dS of a tile. */
static void
backward_scores(const attention_job *job, const head_view *head, const backward_space *w, backward_tile *x)
{
    int64_t at = x->t - head->first, depth = head->depth;
    int whole = x->keys == TILE && x->t >= x->key + TILE - 1;
    const float *lse = job->lse_in + head->stat + x->t, *delta = job->delta + head->stat + x->t;
    for (int64_t i = 0; i < x->count; i += BLOCK_ROWS) {
        int64_t rows = attention_least(x->count - i, BLOCK_ROWS);
        int64_t columns = attention_depth(attention_least(x->t + i + rows - x->key, x->keys));
        tile_product qk = {.a = w->query + (at + i) * depth, .a_step = depth, .b = w->key_t, .ldb = TILE,
                           .c = w->p + i * TILE, .ldc = TILE, .columns = columns, .depth = head->head_dim};
        tile_product dp = qk;
        dp.a = w->d_o + (at + i) * depth, dp.b = w->value_t, dp.c = w->ds + i * TILE;
        tile_multiply(rows, &qk);
        tile_multiply(rows, &dp);
        for (int64_t r = i; r < i + rows; r++) {
            ahead_fetch(&x->ahead, head->head_dim);
            if (whole)
                gradient_row(0, TILE, head->scale, head->scale2, lse[r], delta[r], w->p + r * TILE, w->ds + r * TILE);
            else
                gradient_row(1, attention_least(x->t + r + 1 - x->key, x->keys), head->scale, head->scale2, lse[r],
                             delta[r], w->p + r * TILE, w->ds + r * TILE);
        }
    }
}

static void
backward_query(const head_view *head, const backward_space *w, const backward_tile *x)
{
    int64_t depth = head->depth;
    tile_product dq = {.a = w->ds, .a_step = TILE, .b = w->key, .ldb = depth, .c = w->dq + (x->t - head->first) * depth,
                       .ldc = depth, .columns = depth, .depth = x->keys, .accumulate = 1};
    if (x->t >= x->key + x->keys - 1) {
        tile_multiply(x->count, &dq);
        return;
    }
    for (int64_t i = 0; i < x->count; i += BLOCK_ROWS, dq.a += BLOCK_ROWS * TILE, dq.c += BLOCK_ROWS * depth) {
        int64_t rows = attention_least(x->count - i, BLOCK_ROWS);
        dq.depth = attention_least(x->t + i + rows - x->key, x->keys);
        tile_multiply(rows, &dq);
    }
}

/* dk or dv (out) += the transpose of ds or p (a) times query or d_o (b), queries descending: the chain of a key goes on where
 * the slice above left it, whatever the slices are. */
static void
backward_key(const head_view *head, const backward_tile *x, const float *a, const float *b, float *out)
{
    int64_t depth = head->depth, last = x->count - 1;
    tile_product product = {.a = a + last * TILE, .a_step = -TILE, .b = b + last * depth, .ldb = -depth, .c = out,
                            .ldc = depth, .columns = depth, .depth = x->count, .accumulate = 1};
    if (x->t >= x->key + x->keys - 1) {
        tile_multiply_transposed(x->keys, &product);
        return;
    }
    for (int64_t i = 0; i < x->keys; i += BLOCK_ROWS, product.a += BLOCK_ROWS, product.c += BLOCK_ROWS * depth) {
        product.depth = x->count - attention_most(x->key + i - x->t, 0); /* not the queries before the block's first key */
        if (product.depth <= 0)
            return;
        tile_multiply_transposed(attention_least(x->keys - i, BLOCK_ROWS), &product);
    }
}

/* What backward_keys will need next. */
static tile_ahead
backward_ahead(const attention_job *job, const head_view *head, int64_t t, int64_t next, int64_t key)
{
    tile_ahead ahead = {.streams = 0};
    int64_t row = head->row, begin = attention_most(key, head->first), count = next - t;
    int64_t keys = attention_least(head->last - key - TILE, TILE), done = head->last - next, all = head->last - begin;
    int64_t at = head->kv_at + (key + TILE) * head->kv_row, dkv_at = head->dkv_at + (key + TILE) * head->dkv_row;
    const float *wanted[] = {job->k + at, job->v + at, job->dk + dkv_at, job->dv + dkv_at};
    for (int i = 0; i < (head->last < head->total ? 4 : 2) && keys > 0; i++)
        ahead_add(&ahead, wanted[i], i < 2 ? head->kv_row : head->dkv_row, keys, done, all);
    if (key == 0 && t > begin) {
        int64_t from = attention_most((t - 1) / TILE * TILE, begin), o_at = head->o_at + (from - head->first) * head->o_row;
        ahead_add(&ahead, job->q + head->at + (from - head->first) * row, row, t - from, 0, count);
        ahead_add(&ahead, job->d_o_in + o_at, head->o_row, t - from, 0, count);
        ahead_add(&ahead, job->o_in + o_at, head->o_row, t - from, 0, count);
    }
    if (next <= key + TILE)
        ahead_add(&ahead, job->dq + head->at + (t - head->first) * row, row, count, 0, count);
    return ahead;
}

/* All that one group of queries takes part in with the keys of one tile: three gradients from one P and dS. */
static void
backward_group(const attention_job *job, const head_view *head, const backward_space *w, backward_tile *x)
{
    int64_t at = (x->t - head->first) * head->depth;
    backward_scores(job, head, w, x);
    backward_query(head, w, x);
    if (x->t + x->count <= x->key + TILE)
        unpack_rows(w->dq + at, x->count, head->head_dim, head->depth, job->dq + head->at + (x->t - head->first) * head->row,
                    head->row);
    backward_key(head, x, w->p, w->d_o + at, w->dv);
    backward_key(head, x, w->ds, w->query + at, w->dk);
}

/* dk and dv of a tile of keys, as the slices above left them; the last slice begins. */
static void
backward_resume(const attention_job *job, const head_view *head, const backward_space *w, int64_t at, int64_t keys)
{
    int64_t depth = head->depth, dim = head->head_dim;
    if (head->last == head->total) {
        memset(w->dk, 0, (size_t)(keys * depth) * sizeof *w->dk);
        memset(w->dv, 0, (size_t)(keys * depth) * sizeof *w->dv);
    } else {
        pack_rows(job->dk + at, head->dkv_row, keys, dim, depth, w->dk);
        pack_rows(job->dv + at, head->dkv_row, keys, dim, depth, w->dv);
    }
}

static void
backward_keys(const attention_job *job, const head_view *head, const backward_space *w, int64_t key)
{
    int64_t depth = head->depth, dim = head->head_dim, row = head->kv_row, keys = attention_least(head->last - key, TILE);
    int64_t begin = attention_most(key, head->first), at = head->kv_at + key * row, dkv_at = head->dkv_at + key * head->dkv_row;
    pack_transposed(job->k + at, row, keys, dim, w->key_t);
    pack_transposed(job->v + at, row, keys, dim, w->value_t);
    pack_rows(job->k + at, row, keys, dim, depth, w->key);
    backward_resume(job, head, w, dkv_at, keys);
    for (int64_t next = head->last, t; next > begin; next = t) {
        t = attention_most((next - 1) / TILE * TILE, begin);
        if (key == 0)
            backward_begin(job, head, w, t, next - t);
        backward_tile x = {.t = t, .count = next - t, .key = key, .keys = keys,
                           .ahead = backward_ahead(job, head, t, next, key)};
        backward_group(job, head, w, &x);
    }
    unpack_rows(w->dk, keys, dim, depth, job->dk + dkv_at, head->dkv_row);
    unpack_rows(w->dv, keys, dim, depth, job->dv + dkv_at, head->dkv_row);
}

static void
backward_item(const attention_job *job, const head_view *head, float *workspace)
{
    backward_space w = backward_divide(head, workspace);
    for (int64_t next = head->last, t; next > head->first; next = t) {
        int wide = 0;
        t = attention_most((next - 1) / TILE * TILE, head->first);
        for (int64_t i = t; i < next; i++)
            wide |= is_wide(job->lse_in[head->stat + i]);
        if (wide)
            measure_wide_rows(job, head, &w, t, next - t);
    }
    for (int64_t key = 0; key < head->last; key += TILE)
        backward_keys(job, head, &w, key);
}

/* ---- the operations ------------------------------------------------------------------------------------------------- */

static size_t
attention_member_floats(int64_t head_dim, int64_t slice)
{
    return (size_t)attention_depth(attention_most(forward_floats(head_dim, slice), backward_floats(head_dim, slice)));
}

/* Runs one (sequence, head) after another of this member's. */
static void
attention_items(const attention_job *job, int member, int members,
                void (*item)(const attention_job *job, const head_view *head, float *workspace))
{
    int64_t first, last;
    tp_team_share(job->shape->batch * job->shape->heads, 1, member, members, &first, &last);
    for (int64_t i = first; i < last; i++) {
        head_view head = view_head(job->shape, job->kv_stride, job->dkv_stride, i);
        item(job, &head, job->workspace + (size_t)member * job->member_floats);
    }
}

static void
attention_forward_work(void *argument, int member, int members)
{
    attention_items(argument, member, members, forward_item);
}

static void
attention_backward_work(void *argument, int member, int members)
{
    attention_items(argument, member, members, backward_item);
}

static void
cpu_attention_forward(tp_backend *be, const tp_attention *shape, const float *q, const float *k, const float *v, int64_t kv_stride,
                      float *o, float *lse)
{
    attention_job job = {.shape = shape, .q = q, .k = k, .v = v, .kv_stride = kv_stride, .o = o, .lse = lse,
                         .workspace = be->workspace,
                         .member_floats = attention_member_floats(shape->head_dim, shape->slice)};
    tp_team_run(be->team, attention_forward_work, &job);
}

static void
cpu_attention_backward(tp_backend *be, const tp_attention *shape, const float *q, const float *k, const float *v,
                       int64_t kv_stride, const float *o, const float *d_o, const float *lse, float *delta, float *dq, float *dk,
                       float *dv, int64_t dkv_stride)
{
    attention_job job = {.shape = shape, .q = q, .k = k, .v = v, .kv_stride = kv_stride, .o_in = o, .d_o_in = d_o,
                         .lse_in = lse, .delta = delta, .dq = dq, .dk = dk, .dv = dv, .dkv_stride = dkv_stride,
                         .workspace = be->workspace,
                         .member_floats = attention_member_floats(shape->head_dim, shape->slice)};
    tp_team_run(be->team, attention_backward_work, &job);
}

/* rows bounds the slice: the most rows (tokens x sequences) of one. */
static size_t
attention_workspace_bytes(int64_t n_embd, int64_t n_head, int64_t seq_len, int64_t rows, int members)
{
    int64_t slice = rows < seq_len ? rows : seq_len;
    return (size_t)members * attention_member_floats(n_embd / n_head, slice) * sizeof(float);
}

#undef TILE
#undef TILE_VECTORS
#undef TILE_PAD
#undef BLOCK_ROWS
#undef BLOCK_VECTORS
