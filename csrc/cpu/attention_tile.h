/* What attention is made of: blocks of sums in registers, a thread's scratch, and rows moved into and out of lanes. */
#ifndef TP_CPU_ATTENTION_TILE_H
#define TP_CPU_ATTENTION_TILE_H

#include "csrc/cpu/cpu.h"
#include "csrc/cpu/share.h"
#include "csrc/cpu/transpose.h"
#include "csrc/cpu/vec.h"

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

/* Rows of one head lie a page apart, where the hardware does not foresee them: ask for rows [first, first + count). */
VEC_INLINE void
att_prefetch(att_run rows, int64_t first, int64_t count, int write)
{
    for (int64_t i = first; i < share_least(first + count, rows.count); i++)
        for (int64_t d = 0; d < rows.head_dim; d += VEC_LANES)
            if (write)
                __builtin_prefetch(rows.at + i * rows.stride + d, 1);
            else
                __builtin_prefetch(rows.at + i * rows.stride + d);
}

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
    for (int64_t lane = 0; lane < blocks * ATT_LANES; lane += VEC_LANES) {
        att_prefetch(from, lane + VEC_LANES, VEC_LANES, 0);
        for (int64_t d = 0; d < from.head_dim; d += VEC_LANES)
            att_transpose_square(from.at + lane * from.stride + d, from.stride, from.count - lane,
                                 share_least(VEC_LANES, from.head_dim - d), factor,
                                 chunk + lane / ATT_LANES * area + d * ATT_LANES + lane % ATT_LANES);
    }
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
        att_prefetch(to, lane + VEC_LANES, VEC_LANES, 1);
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

#endif
