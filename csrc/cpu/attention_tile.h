/* What attention computes tiles with: small products on the registers and copies between the model's rows and tiles. */
#ifndef TP_CPU_ATTENTION_TILE_H
#define TP_CPU_ATTENTION_TILE_H

#include "csrc/cpu/cpu.h"

#include "csrc/cpu/vec.h"

#include <string.h>

#define TILE 64 /* keys of a tile and queries of a group */
#define TILE_VECTORS (TILE / VEC_LANES)
#define TILE_PAD 32 /* floats between buffers of whole KiB, so that they do not fall on one another in a cache */
#if defined(__AVX512F__)
#define BLOCK_VECTORS 4 /* 6 x 4 accumulators, 4 of B and a broadcast fill 29 of 32 registers */
#else
#define BLOCK_VECTORS 1 /* two registers a vector: 12 accumulators of 16 */
#endif
#define BLOCK_ROWS 6

/* C[rows, columns] (+)= A[rows, depth] B[depth, columns], one chain of fused multiply-adds per element, k ascending.
 * A is rows (element (r, k) at a[r * a_step + k]) or, where it is a tile's transpose, columns (a[r + k * a_step]).
 * columns: a multiple of 16. */
typedef struct {
    const float *a;
    int64_t a_step;
    const float *b;
    int64_t ldb;
    float *c;
    int64_t ldc;
    int64_t columns, depth;
    int accumulate; /* 0: chains start from +0 */
} tile_product;

/* One broadcast for all products of a row. The compiler would fold it into each, and loads would be the bottleneck. */
VEC_INLINE vf16
tile_broadcast(float x)
{
    vf16 v = vec_set1(x);
#if defined(__AVX512F__)
    VEC_OPAQUE(v);
#endif
    return v;
}

VEC_INLINE void
tile_block(const int rows, const int vectors, const int transposed, const tile_product *t, int64_t row, int64_t column)
{
    const int64_t a_row = transposed ? 1 : t->a_step, a_k = transposed ? t->a_step : 1, ldb = t->ldb, ldc = t->ldc;
    const float *a = t->a + row * a_row, *b = t->b + column;
    float *c = t->c + row * ldc + column;
    vf16 sum[BLOCK_ROWS][BLOCK_VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            sum[r][j] = t->accumulate ? vec_load(c + r * ldc + j * VEC_LANES) : vec_zero();
#pragma GCC unroll 4 /* as in gemm_tile.h: where a neighbour's hyperthread shares the core, instructions decide */
    for (int64_t k = t->depth; k > 0; k--) {
        vf16 bk[BLOCK_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            bk[j] = vec_load(b + j * VEC_LANES);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vf16 x = tile_broadcast(a[r * a_row]);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++)
                sum[r][j] = vec_fma(x, bk[j], sum[r][j]);
        }
        a += a_k;
        b += ldb;
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            vec_store(c + r * ldc + j * VEC_LANES, sum[r][j]);
}

VEC_INLINE void
tile_columns(const int rows, const int transposed, const tile_product *t, int64_t row)
{
    int64_t j = 0;
    for (; j + BLOCK_VECTORS * VEC_LANES <= t->columns; j += BLOCK_VECTORS * VEC_LANES)
        tile_block(rows, BLOCK_VECTORS, transposed, t, row, j);
#if BLOCK_VECTORS > 1
    switch ((t->columns - j) / VEC_LANES) {
    case 3: tile_block(rows, 3, transposed, t, row, j); break;
    case 2: tile_block(rows, 2, transposed, t, row, j); break;
    case 1: tile_block(rows, 1, transposed, t, row, j); break;
    default: break;
    }
#endif
}

VEC_INLINE void
tile_product_rows(const int transposed, int64_t rows, const tile_product *t)
{
    int64_t r = 0;
    for (; r + BLOCK_ROWS <= rows; r += BLOCK_ROWS)
        tile_columns(BLOCK_ROWS, transposed, t, r);
    switch (rows - r) {
    case 5: tile_columns(5, transposed, t, r); break;
    case 4: tile_columns(4, transposed, t, r); break;
    case 3: tile_columns(3, transposed, t, r); break;
    case 2: tile_columns(2, transposed, t, r); break;
    case 1: tile_columns(1, transposed, t, r); break;
    default: break;
    }
}

static __attribute__((noinline)) void
tile_multiply(int64_t rows, const tile_product *t)
{
    tile_product_rows(0, rows, t);
}

static __attribute__((noinline)) void
tile_multiply_transposed(int64_t rows, const tile_product *t)
{
    tile_product_rows(1, rows, t);
}

/* ---- fetching ahead ---------------------------------------------------------------------------------------------------- */

/* Rows that will be packed or written soon. They lie a model's width apart, where no hardware prefetcher follows. They are
 * asked for while tiles are multiplied, a few at each query: more at once take the line-fill buffers from the product. */
#define AHEAD_STREAMS 8
typedef struct {
    int streams;
    struct {
        const float *from;
        int64_t stride, at, step; /* rows in units of 2^-32: done, and at each query */
    } stream[AHEAD_STREAMS];
} tile_ahead;

/* `rows` rows over `queries` queries, `done` of which are over. */
static inline void
ahead_add(tile_ahead *ahead, const float *from, int64_t stride, int64_t rows, int64_t done, int64_t queries)
{
    int i = ahead->streams++;
    ahead->stream[i].from = from;
    ahead->stream[i].stride = stride;
    ahead->stream[i].step = ((rows << 32) + queries - 1) / queries; /* rounded up: the last query reaches the last row */
    ahead->stream[i].at = ahead->stream[i].step * done;
}

static inline void
ahead_fetch(tile_ahead *ahead, int64_t width)
{
    for (int i = 0; i < ahead->streams; i++) {
        int64_t row = ahead->stream[i].at >> 32;
        ahead->stream[i].at += ahead->stream[i].step;
        for (; row < ahead->stream[i].at >> 32; row++)
            for (int64_t d = 0; d < width; d += VEC_LANES)
                __builtin_prefetch(ahead->stream[i].from + row * ahead->stream[i].stride + d, 0, 2);
    }
}

/* ---- copies -------------------------------------------------------------------------------------------------------- */

static inline int64_t
tile_lanes(int64_t count, int64_t from)
{
    return count <= from ? 0 : count - from < VEC_LANES ? count - from : VEC_LANES;
}

/* out[rows][depth]: rows of `width` floats, zeros from there to depth. */
static void
pack_rows(const float *x, int64_t stride, int64_t rows, int64_t width, int64_t depth, float *out)
{
    int64_t whole = width / VEC_LANES * VEC_LANES;
    for (int64_t r = 0; r < rows; r++, x += stride, out += depth) {
        for (int64_t d = 0; d < whole; d += VEC_LANES)
            vec_store(out + d, vec_load(x + d));
        if (whole < depth)
            vec_store(out + whole, vec_load_n(x + whole, width - whole));
    }
}

static void
unpack_rows(const float *x, int64_t rows, int64_t width, int64_t depth, float *out, int64_t stride)
{
    int64_t whole = width / VEC_LANES * VEC_LANES;
    for (int64_t r = 0; r < rows; r++, x += depth, out += stride) {
        for (int64_t d = 0; d < whole; d += VEC_LANES)
            vec_store(out + d, vec_load(x + d));
        if (whole < depth)
            vec_store_n(out + whole, vec_load(x + whole), width - whole);
    }
}

typedef float tile_quad __attribute__((vector_size(16)));

/* out[4][.] = the transpose of 16 rows of 4 floats. */
VEC_INLINE void
transpose_quads(const float *x, int64_t stride, float *out)
{
#if defined(__AVX512F__)
    __m512 row[4]; /* row[i]: rows i, i + 4, i + 8, i + 12 */
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(x + i * stride));
        v = _mm512_insertf32x4(v, _mm_loadu_ps(x + (i + 4) * stride), 1);
        v = _mm512_insertf32x4(v, _mm_loadu_ps(x + (i + 8) * stride), 2);
        row[i] = _mm512_insertf32x4(v, _mm_loadu_ps(x + (i + 12) * stride), 3);
    }
    __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(row[0], row[1]));
    __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(row[2], row[3]));
    __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(row[0], row[1]));
    __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(row[2], row[3]));
    _mm512_storeu_ps(out, _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23)));
    _mm512_storeu_ps(out + TILE, _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23)));
    _mm512_storeu_ps(out + 2 * TILE, _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23)));
    _mm512_storeu_ps(out + 3 * TILE, _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23)));
#else
    for (int r = 0; r < VEC_LANES; r += 4) {
        tile_quad v[4];
        for (int i = 0; i < 4; i++)
            memcpy(&v[i], x + (r + i) * stride, sizeof v[i]);
        tile_quad low01 = __builtin_shufflevector(v[0], v[1], 0, 4, 1, 5);
        tile_quad low23 = __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5);
        tile_quad high01 = __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7);
        tile_quad high23 = __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7);
        v[0] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
        v[1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
        v[2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
        v[3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
        for (int i = 0; i < 4; i++)
            memcpy(out + i * TILE + r, &v[i], sizeof v[i]);
    }
#endif
}

/* out[width][TILE]: rows transposed; columns from `rows` to the next multiple of 16 are zero, those behind are not written. */
static void
pack_transposed(const float *x, int64_t stride, int64_t rows, int64_t width, float *out)
{
    int64_t r = 0, quads = width / 4 * 4;
    for (; r + VEC_LANES <= rows; r += VEC_LANES) {
        const float *from = x + r * stride;
        for (int64_t d = 0; d < quads; d += 4)
            transpose_quads(from + d, stride, out + d * TILE + r);
        for (int64_t d = quads; d < width; d++)
            for (int64_t i = 0; i < VEC_LANES; i++)
                out[d * TILE + r + i] = from[i * stride + d];
    }
    if (r < rows)
        for (int64_t d = 0; d < width; d++)
            for (int64_t i = 0; i < VEC_LANES; i++)
                out[d * TILE + r + i] = r + i < rows ? x[(r + i) * stride + d] : 0.0f;
}

#endif
