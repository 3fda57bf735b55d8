/* Causal attention of a slice over its context, tile by tile (FlashAttention: Dao et al. 2022), forward and pull backward.
 *
 * Keys are taken in tiles of TILE anchored at absolute multiples, so what a row computes does not depend on the slice that
 * contains it: each score, output and gradient element is one chain of fused multiply-adds in absolute order, and masked
 * entries enter as exact zeros. Threads share (sequence, head) pairs. */
#include <math.h>
#include <string.h>

#include "csrc/cpu/cpu.h"
#include "csrc/cpu/vec.h"

#define TILE 64            /* keys, and queries in the dK, dV pass */
#define TILE_VECTORS (TILE / VEC_LANES)
#define ATTENTION_LOG2E 1.4426950408889634f
#if defined(__AVX512F__)
#define BLOCK_VECTORS 4    /* 6 x 4 accumulators, 4 of B and a broadcast fill 29 of 32 registers */
#else
#define BLOCK_VECTORS 1    /* two registers a vector: 12 accumulators of 16 */
#endif
#define BLOCK_ROWS 6

typedef struct {
    const tp_attention *shape;
    const float *q, *k, *v, *d_o_in;
    const float *o_in, *lse_in;
    float *o, *lse, *delta, *dq, *dk, *dv;
    float *workspace;
    size_t member_floats;
} attention_job;

static inline int64_t
attention_depth(int64_t head_dim)
{
    return (head_dim + VEC_LANES - 1) / VEC_LANES * VEC_LANES;
}

/* ---- C[rows, 16 vectors] (+)= A[rows, k] B[k, .]: A by strides, B and C in workspace, 16-padded ---------------------- */

VEC_INLINE void
block_product(int rows, int vectors, int64_t depth, const float *a, int64_t a_row, int64_t a_k, const float *b, int64_t ldb,
              float *c, int64_t ldc, int accumulate)
{
    vf16 sum[BLOCK_ROWS][BLOCK_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++)
            sum[r][j] = accumulate ? vec_load(c + r * ldc + j * VEC_LANES) : vec_zero();
    for (int64_t k = 0; k < depth; k++) {
        vf16 bk[BLOCK_VECTORS];
        for (int j = 0; j < vectors; j++)
            bk[j] = vec_load(b + k * ldb + j * VEC_LANES);
        for (int r = 0; r < rows; r++) {
            vf16 x = vec_set1(a[r * a_row + k * a_k]);
            for (int j = 0; j < vectors; j++)
                sum[r][j] = vec_fma(x, bk[j], sum[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++)
            vec_store(c + r * ldc + j * VEC_LANES, sum[r][j]);
}

VEC_INLINE void
block_columns(int rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, int64_t a_k, const float *b,
              int64_t ldb, float *c, int64_t ldc, int accumulate)
{
    int64_t j = 0;
    for (; j + BLOCK_VECTORS * VEC_LANES <= columns; j += BLOCK_VECTORS * VEC_LANES)
        block_product(rows, BLOCK_VECTORS, depth, a, a_row, a_k, b + j, ldb, c + j, ldc, accumulate);
    for (; j < columns; j += VEC_LANES)
        block_product(rows, 1, depth, a, a_row, a_k, b + j, ldb, c + j, ldc, accumulate);
}

/* columns: a multiple of 16. */
static void
product(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, int64_t a_k, const float *b,
        int64_t ldb, float *c, int64_t ldc, int accumulate)
{
    int64_t r = 0;
    for (; r + BLOCK_ROWS <= rows; r += BLOCK_ROWS)
        block_columns(BLOCK_ROWS, columns, depth, a + r * a_row, a_row, a_k, b, ldb, c + r * ldc, ldc, accumulate);
    a += r * a_row;
    c += r * ldc;
    switch (rows - r) {
    case 5: block_columns(5, columns, depth, a, a_row, a_k, b, ldb, c, ldc, accumulate); break;
    case 4: block_columns(4, columns, depth, a, a_row, a_k, b, ldb, c, ldc, accumulate); break;
    case 3: block_columns(3, columns, depth, a, a_row, a_k, b, ldb, c, ldc, accumulate); break;
    case 2: block_columns(2, columns, depth, a, a_row, a_k, b, ldb, c, ldc, accumulate); break;
    case 1: block_columns(1, columns, depth, a, a_row, a_k, b, ldb, c, ldc, accumulate); break;
    default: break;
    }
}

/* ---- packing ------------------------------------------------------------------------------------------------------------- */

/* out[TILE][depth]: `rows` rows of D floats, zeros elsewhere. */
static void
pack_rows(const float *x, int64_t stride, int64_t rows, int64_t head_dim, int64_t depth, float *out)
{
    for (int64_t r = 0; r < TILE; r++)
        for (int64_t d = 0; d < depth; d += VEC_LANES) {
            int64_t lanes = r >= rows || d >= head_dim ? 0 : head_dim - d < VEC_LANES ? head_dim - d : VEC_LANES;
            vec_store(out + r * depth + d, vec_load_n(x + (lanes > 0 ? r * stride + d : 0), lanes));
        }
}

/* out[D][TILE]: transposed, zeros beyond `rows`. */
static void
pack_transposed(const float *x, int64_t stride, int64_t rows, int64_t head_dim, float *out)
{
    for (int64_t d = 0; d < head_dim; d++) {
        for (int64_t r = 0; r < rows; r++)
            out[d * TILE + r] = x[r * stride + d];
        for (int64_t r = rows; r < TILE; r++)
            out[d * TILE + r] = 0;
    }
}

/* Copies of a tile's first `rows` rows from workspace to the model's layout. */
static void
unpack_rows(const float *x, int64_t depth, int64_t rows, int64_t head_dim, float *out, int64_t stride)
{
    for (int64_t r = 0; r < rows; r++)
        memcpy(out + r * stride, x + r * depth, (size_t)head_dim * sizeof(float));
}

/* ---- one (sequence, head) -------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t head_dim, depth, first, last, total; /* rows [first, last) of the slice, [0, total) of the sequence */
    int64_t row, o_row;                          /* floats between tokens */
    int64_t at, o_at, stat;                      /* offsets of token 0 in q/k/v, in o, in lse and delta */
    float scale, scale2;                         /* 1/sqrt(D), in log2 */
} head_view;

static head_view
view_head(const tp_attention *shape, int64_t item)
{
    int64_t b = item / shape->heads, h = item % shape->heads;
    float scale = 1.0f / sqrtf((float)shape->head_dim);
    return (head_view){.head_dim = shape->head_dim,
                       .depth = attention_depth(shape->head_dim),
                       .first = shape->context,
                       .last = shape->context + shape->slice,
                       .total = shape->total,
                       .row = shape->batch * shape->qkv_stride,
                       .o_row = shape->batch * shape->o_stride,
                       .at = b * shape->qkv_stride + h * shape->head_dim,
                       .o_at = b * shape->o_stride + h * shape->head_dim,
                       .stat = item * shape->total,
                       .scale = scale,
                       .scale2 = scale * ATTENTION_LOG2E};
}

/* One row of scores -> probabilities; rescales the row's running sum and output. keys: how many lanes are visible. */
static void
softmax_row(float *scores, int64_t keys, float scale2, float *max, float *sum, float *out, int64_t depth)
{
    vf16 top = vec_set1(*max);
    for (int64_t j = 0; j < TILE; j += VEC_LANES) {
        int64_t lanes = keys <= j ? 0 : keys - j < VEC_LANES ? keys - j : VEC_LANES;
        top = vec_max(vec_first_n(vec_load(scores + j), lanes, top), top);
    }
    float now = vec_max_lane(top);
    vf16 factor = vec_set1(scale2), shift = vec_set1(now * scale2), total = vec_zero();
    for (int64_t j = 0; j < TILE; j += VEC_LANES) {
        int64_t lanes = keys <= j ? 0 : keys - j < VEC_LANES ? keys - j : VEC_LANES;
        vf16 p = vec_exp2_low(vec_sub(vec_mul(vec_load(scores + j), factor), shift));
        p = vec_first_n(p, lanes, vec_zero());
        vec_store(scores + j, p);
        total = vec_add(total, p);
    }
    if (now != *max) {
        float alpha = exp2f((*max - now) * scale2); /* 0 for the first tile */
        *sum *= alpha;
        for (int64_t d = 0; d < depth; d += VEC_LANES)
            vec_store(out + d, vec_mul(vec_load(out + d), vec_set1(alpha)));
        *max = now;
    }
    *sum += vec_sum(total);
}

static void
forward_item(const attention_job *job, int64_t item, float *w)
{
    head_view head = view_head(job->shape, item);
    int64_t depth = head.depth, rows = head.last - head.first;
    float *key_t = w, *value = key_t + head.head_dim * TILE, *scores = value + TILE * depth;
    float *out = scores + BLOCK_ROWS * TILE, *max = out + rows * depth, *sum = max + rows;
    for (int64_t r = 0; r < rows; r++)
        max[r] = -INFINITY;
    memset(sum, 0, (size_t)rows * sizeof *sum);
    memset(out, 0, (size_t)(rows * depth) * sizeof *out);
    for (int64_t key = 0; key < head.last; key += TILE) {
        int64_t keys = head.last - key < TILE ? head.last - key : TILE;
        pack_transposed(job->k + head.at + key * head.row, head.row, keys, head.head_dim, key_t);
        pack_rows(job->v + head.at + key * head.row, head.row, keys, head.head_dim, depth, value);
        int64_t begin = key > head.first ? key : head.first; /* earlier rows do not see this tile */
        for (int64_t t = begin; t < head.last; t += BLOCK_ROWS) {
            int64_t count = head.last - t < BLOCK_ROWS ? head.last - t : BLOCK_ROWS, r = t - head.first;
            int64_t seen = t + count - key < keys ? t + count - key : keys;
            product(count, (seen + VEC_LANES - 1) / VEC_LANES * VEC_LANES, head.head_dim, job->q + head.at + t * head.row,
                    head.row, 1, key_t, TILE, scores, TILE, 0);
            for (int64_t i = 0; i < count; i++)
                softmax_row(scores + i * TILE, t + i + 1 - key < keys ? t + i + 1 - key : keys, head.scale2, &max[r + i],
                            &sum[r + i], out + (r + i) * depth, depth);
            product(count, depth, seen, scores, TILE, 1, value, depth, out + r * depth, depth, 1);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t d = 0; d < depth; d += VEC_LANES)
            vec_store(out + r * depth + d, vec_div(vec_load(out + r * depth + d), vec_set1(sum[r])));
        job->lse[head.stat + head.first + r] = max[r] * head.scale + logf(sum[r]);
    }
    unpack_rows(out, depth, rows, head.head_dim, job->o + head.o_at + head.first * head.o_row, head.o_row);
}

/* scores -> P, products -> dS of `count` queries from t over the keys of a tile (backward; both passes). */
static void
gradient_rows(const attention_job *job, const head_view *head, int64_t t, int64_t count, int64_t key, int64_t keys,
              float *scores, float *products)
{
    vf16 factor = vec_set1(head->scale2), scale = vec_set1(head->scale);
    for (int64_t i = 0; i < count; i++) {
        int64_t seen = t + i + 1 - key < keys ? t + i + 1 - key : keys;
        vf16 shift = vec_set1(job->lse_in[head->stat + t + i] * ATTENTION_LOG2E);
        vf16 delta = vec_set1(job->delta[head->stat + t + i]);
        for (int64_t j = 0; j < TILE; j += VEC_LANES) {
            int64_t lanes = seen <= j ? 0 : seen - j < VEC_LANES ? seen - j : VEC_LANES;
            float *s = scores + i * TILE + j, *d = products + i * TILE + j;
            vf16 p = vec_exp2_low(vec_sub(vec_mul(vec_load(s), factor), shift));
            p = vec_first_n(p, lanes, vec_zero());
            vec_store(s, p);
            vf16 ds = vec_mul(vec_mul(p, vec_sub(vec_load(d), delta)), scale);
            vec_store(d, vec_first_n(ds, lanes, vec_zero()));
        }
    }
}

static void
delta_rows(const attention_job *job, const head_view *head)
{
    for (int64_t t = head->first; t < head->last; t++) {
        const float *o = job->o_in + head->o_at + t * head->o_row, *d = job->d_o_in + head->o_at + t * head->o_row;
        vf16 sum = vec_zero();
        for (int64_t i = 0; i < head->head_dim; i += VEC_LANES) {
            int64_t lanes = head->head_dim - i < VEC_LANES ? head->head_dim - i : VEC_LANES;
            sum = vec_fma(vec_load_n(o + i, lanes), vec_load_n(d + i, lanes), sum);
        }
        job->delta[head->stat + t] = vec_sum(sum);
    }
}

static void
query_gradient_item(const attention_job *job, const head_view *head, float *w)
{
    int64_t depth = head->depth, rows = head->last - head->first, dim = head->head_dim;
    float *key_t = w, *value_t = key_t + dim * TILE, *key_rows = value_t + dim * TILE;
    float *scores = key_rows + TILE * depth, *products = scores + BLOCK_ROWS * TILE, *out = products + BLOCK_ROWS * TILE;
    memset(out, 0, (size_t)(rows * depth) * sizeof *out);
    for (int64_t key = 0; key < head->last; key += TILE) {
        int64_t keys = head->last - key < TILE ? head->last - key : TILE;
        pack_transposed(job->k + head->at + key * head->row, head->row, keys, dim, key_t);
        pack_transposed(job->v + head->at + key * head->row, head->row, keys, dim, value_t);
        pack_rows(job->k + head->at + key * head->row, head->row, keys, dim, depth, key_rows);
        int64_t begin = key > head->first ? key : head->first;
        for (int64_t t = begin; t < head->last; t += BLOCK_ROWS) {
            int64_t count = head->last - t < BLOCK_ROWS ? head->last - t : BLOCK_ROWS;
            int64_t seen = t + count - key < keys ? t + count - key : keys;
            int64_t columns = (seen + VEC_LANES - 1) / VEC_LANES * VEC_LANES;
            product(count, columns, dim, job->q + head->at + t * head->row, head->row, 1, key_t, TILE, scores, TILE, 0);
            product(count, columns, dim, job->d_o_in + head->o_at + t * head->o_row, head->o_row, 1, value_t, TILE,
                    products, TILE, 0);
            gradient_rows(job, head, t, count, key, keys, scores, products);
            product(count, depth, seen, products, TILE, 1, key_rows, depth, out + (t - head->first) * depth, depth, 1);
        }
    }
    unpack_rows(out, depth, rows, dim, job->dq + head->at + head->first * head->row, head->row);
}

static void
key_gradient_item(const attention_job *job, const head_view *head, float *w)
{
    int64_t depth = head->depth, dim = head->head_dim;
    float *key_t = w, *value_t = key_t + dim * TILE, *query = value_t + dim * TILE, *d_o = query + TILE * depth;
    float *scores = d_o + TILE * depth, *products = scores + TILE * TILE;
    float *dk = products + TILE * TILE, *dv = dk + TILE * depth;
    for (int64_t key = head->first, next; key < head->last; key = next) {
        next = (key / TILE + 1) * TILE < head->last ? (key / TILE + 1) * TILE : head->last;
        int64_t keys = next - key;
        pack_transposed(job->k + head->at + key * head->row, head->row, keys, dim, key_t);
        pack_transposed(job->v + head->at + key * head->row, head->row, keys, dim, value_t);
        memset(dk, 0, (size_t)(TILE * depth) * sizeof *dk);
        memset(dv, 0, (size_t)(TILE * depth) * sizeof *dv);
        for (int64_t t = key, end; t < head->total; t = end) { /* earlier queries do not see these keys */
            end = (t / TILE + 1) * TILE < head->total ? (t / TILE + 1) * TILE : head->total;
            int64_t count = end - t, columns = (keys + VEC_LANES - 1) / VEC_LANES * VEC_LANES;
            pack_rows(job->q + head->at + t * head->row, head->row, count, dim, depth, query);
            pack_rows(job->d_o_in + head->o_at + t * head->o_row, head->o_row, count, dim, depth, d_o);
            product(count, columns, dim, query, depth, 1, key_t, TILE, scores, TILE, 0);
            product(count, columns, dim, d_o, depth, 1, value_t, TILE, products, TILE, 0);
            gradient_rows(job, head, t, count, key, keys, scores, products);
            product(keys, depth, count, scores, 1, TILE, d_o, depth, dv, depth, 1);
            product(keys, depth, count, products, 1, TILE, query, depth, dk, depth, 1);
        }
        unpack_rows(dk, depth, keys, dim, job->dk + head->at + key * head->row, head->row);
        unpack_rows(dv, depth, keys, dim, job->dv + head->at + key * head->row, head->row);
    }
}

/* ---- the operations ---------------------------------------------------------------------------------------------------------- */

static size_t
attention_member_floats(int64_t head_dim, int64_t slice)
{
    int64_t depth = attention_depth(head_dim);
    int64_t tiles = 2 * head_dim * TILE + 4 * TILE * depth + 2 * TILE * TILE; /* the most that a pass has of them */
    return (size_t)(tiles + 2 * BLOCK_ROWS * TILE + slice * (depth + 2) + VEC_LANES) / VEC_LANES * VEC_LANES;
}

static void
attention_forward_work(void *argument, int member, int members)
{
    const attention_job *job = argument;
    int64_t first, last;
    tp_team_share(job->shape->batch * job->shape->heads, 1, member, members, &first, &last);
    for (int64_t item = first; item < last; item++)
        forward_item(job, item, job->workspace + (size_t)member * job->member_floats);
}

static void
cpu_attention_forward(tp_backend *be, const tp_attention *shape, const float *q, const float *k, const float *v, float *o,
                      float *lse)
{
    attention_job job = {.shape = shape, .q = q, .k = k, .v = v, .o = o, .lse = lse, .workspace = be->workspace,
                         .member_floats = attention_member_floats(shape->head_dim, shape->slice)};
    tp_team_run(be->team, attention_forward_work, &job);
}

static void
attention_backward_work(void *argument, int member, int members)
{
    const attention_job *job = argument;
    int64_t first, last;
    float *w = job->workspace + (size_t)member * job->member_floats;
    tp_team_share(job->shape->batch * job->shape->heads, 1, member, members, &first, &last);
    for (int64_t item = first; item < last; item++) {
        head_view head = view_head(job->shape, item);
        delta_rows(job, &head);
        query_gradient_item(job, &head, w);
        key_gradient_item(job, &head, w);
    }
}

static void
cpu_attention_backward(tp_backend *be, const tp_attention *shape, const float *q, const float *k, const float *v,
                       const float *o, const float *d_o, const float *lse, float *delta, float *dq, float *dk, float *dv)
{
    attention_job job = {.shape = shape, .q = q, .k = k, .v = v, .o_in = o, .d_o_in = d_o, .lse_in = lse, .delta = delta,
                         .dq = dq, .dk = dk, .dv = dv, .workspace = be->workspace,
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
#undef BLOCK_ROWS
#undef BLOCK_VECTORS
