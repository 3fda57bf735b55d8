/* The innermost product of gemm_chain.h: C[rows, TP_PANEL] from A[rows, depth] B[depth, TP_PANEL], one chain of fused
 * multiply-adds per element, k ascending. B is one panel (row k at b + k * TP_PANEL), C has rows of TP_PANEL floats.
 *
 * The accumulators fill the register file as in Goto & van de Geijn, "Anatomy of High-Performance Matrix
 * Multiplication" (ACM TOMS 34(3), 2008): AVX-512 14 x 32 (28 of 32 registers), AVX2 6 x 16 (12 of 16). Strides of A
 * are compile-time constants of each instance, so that one register addresses all rows. */
#ifndef TP_CPU_GEMM_TILE_H
#define TP_CPU_GEMM_TILE_H

#include "csrc/cpu/cpu.h"

#include "csrc/cpu/vec.h"

#include <math.h>
#include <string.h>

/* Most k of one tile call: a panel of B is then 24 KiB, and stays in a level-1 cache of 32 KiB or more. It shows in the results
 * (backend.h), so it is the same for all instruction sets that sum chains. */
#define GEMM_DEPTH   192
#define GEMM_W_DEPTH 128 /* where both operands are packed, as linear_w does: a tile of A and the panel fit together */
/* A block of A is kept as its rows (k contiguous) or as its columns (rows of C contiguous), whichever makes packing a
 * plain copy. A cache line or two are added to whatever is walked in parallel, lest it fall into one cache set. */
#define GEMM_ROW_LD   (GEMM_DEPTH + 16)
#define GEMM_TILE_LD  (GEMM_W_DEPTH * GEMM_COLUMN_LD + 16)
#define GEMM_PANEL_LD (GEMM_W_DEPTH * TP_PANEL + 32)

#if defined(__AVX512F__)
#define GEMM_ROWS      14
#define GEMM_COLUMN_LD 16
#define GEMM_LANES     16
typedef __m512 gemm_vec;
#define gemm_zero()       _mm512_setzero_ps()
#define gemm_load(p)      _mm512_loadu_ps(p)
#define gemm_store(p, v)  _mm512_storeu_ps((p), (v))
#define gemm_fma(x, b, c) _mm512_fmadd_ps((x), (b), (c))
#define gemm_add(a, b)    _mm512_add_ps((a), (b))
#elif defined(__AVX2__) && defined(__FMA__)
#define GEMM_ROWS         6
#define GEMM_COLUMN_LD    8
#define GEMM_LANES        8
typedef __m256 gemm_vec;
#define gemm_zero()       _mm256_setzero_ps()
#define gemm_load(p)      _mm256_loadu_ps(p)
#define gemm_store(p, v)  _mm256_storeu_ps((p), (v))
#define gemm_fma(x, b, c) _mm256_fmadd_ps((x), (b), (c))
#define gemm_add(a, b)    _mm256_add_ps((a), (b))
#else
#define GEMM_ROWS      6
#define GEMM_COLUMN_LD 8
#define GEMM_LANES     4
typedef float gemm_vec __attribute__((vector_size(16)));

VEC_INLINE gemm_vec
gemm_zero(void)
{
    return (gemm_vec){0.0f};
}

VEC_INLINE gemm_vec
gemm_load(const float *p)
{
    gemm_vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

VEC_INLINE void
gemm_store(float *p, gemm_vec v)
{
    memcpy(p, &v, sizeof v);
}

VEC_INLINE gemm_vec
gemm_fma(gemm_vec x, gemm_vec b, gemm_vec c)
{
    gemm_vec v;
    for (int i = 0; i < GEMM_LANES; i++)
        v[i] = fmaf(x[i], b[i], c[i]);
    return v;
}

VEC_INLINE gemm_vec
gemm_add(gemm_vec a, gemm_vec b)
{
    return a + b;
}
#endif

/* One broadcast for two products. The compiler would fold it into both, and loads would be the bottleneck. */
VEC_INLINE gemm_vec
gemm_broadcast(float x)
{
#if GEMM_LANES == 16
    gemm_vec v = _mm512_set1_ps(x);
    VEC_OPAQUE(v);
#elif GEMM_LANES == 8
    gemm_vec v = _mm256_set1_ps(x);
#else
    gemm_vec v = {x, x, x, x};
#endif
    return v;
}

#define GEMM_UNROLL 8
#define GEMM_WIDTH (2 * GEMM_LANES) /* columns of one strip: two registers */

typedef enum {
    GEMM_BEGIN, /* c = a chain from +0 */
    GEMM_GO_ON, /* c = the chain that c holds, longer by this */
    GEMM_ADD    /* c = c + a chain from +0 */
} gemm_chain;

/* What one tile call works on. a is packed by gemm_pack_rows or gemm_pack_columns. Two streams are fetched on the
 * side: next, two lines every fourth k, next_step bytes apart, into the level-2 cache (rows: the panel that follows); soon,
 * two lines every eighth k, soon_step floats apart, into the level-1 cache (rows about to be written). They are
 * spread over the tile, so that they never take many line-fill buffers from the product at once. */
typedef struct {
    int64_t depth;
    const float *a, *b;
    float *c;
    gemm_chain chain;
    const char *next;
    int64_t next_step;
    const float *soon;
    int64_t soon_step;
} gemm_tile;

/* One k of every chain. */
VEC_INLINE void
tile_step(const int rows, const int64_t row_stride, const float *restrict a, const float *restrict b,
          gemm_vec acc[GEMM_ROWS][2])
{
    gemm_vec b0 = gemm_load(b), b1 = gemm_load(b + GEMM_LANES);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        gemm_vec x = gemm_broadcast(a[r * row_stride]);
        acc[r][0] = gemm_fma(x, b0, acc[r][0]);
        acc[r][1] = gemm_fma(x, b1, acc[r][1]);
    }
}

/* GEMM_UNROLL steps in a row, without a counter or a branch between them: where a neighbour's hyperthread shares the core,
 * it is the number of instructions that decides, not the multiplications (Zen 3, contended: 47 to 65 GFLOP/s). */
VEC_INLINE void
tile_strip(const int rows, const int64_t row_stride, const int64_t k_stride, const gemm_tile *t, const int64_t column)
{
    const float *restrict a = t->a, *restrict b = t->b + column, *soon = t->soon;
    float *restrict c = t->c + column;
    const char *next = t->next;
    const int64_t depth = t->depth, next_step = t->next_step, soon_step = t->soon_step;
    const gemm_chain chain = t->chain;
    gemm_vec acc[GEMM_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        acc[r][0] = chain == GEMM_GO_ON ? gemm_load(c + r * TP_PANEL) : gemm_zero();
        acc[r][1] = chain == GEMM_GO_ON ? gemm_load(c + r * TP_PANEL + GEMM_LANES) : gemm_zero();
    }
    int64_t k = 0;
    for (; k + GEMM_UNROLL <= depth; k += GEMM_UNROLL) {
        __builtin_prefetch(soon, 1, 3);
        __builtin_prefetch(soon + 16, 1, 3);
        soon += soon_step;
#pragma GCC unroll 8
        for (int i = 0; i < GEMM_UNROLL; i++) {
            if (k_stride == 1 && i % 4 == 0) {
                __builtin_prefetch(next, 0, 2);
                __builtin_prefetch(next + 64, 0, 2);
                next += next_step;
            }
            if (GEMM_LANES == 16 && k_stride > 1) /* a line of A a k: it outruns the hardware's prefetcher */
                __builtin_prefetch(a + (8 + i) * k_stride, 0, 3);
            tile_step(rows, row_stride, a + i * k_stride, b + i * TP_PANEL, acc);
        }
        a += GEMM_UNROLL * k_stride;
        b += GEMM_UNROLL * TP_PANEL;
    }
    for (; k < depth; k++, a += k_stride, b += TP_PANEL)
        tile_step(rows, row_stride, a, b, acc);
    if (chain == GEMM_ADD) {
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            acc[r][0] = gemm_add(gemm_load(c + r * TP_PANEL), acc[r][0]);
            acc[r][1] = gemm_add(gemm_load(c + r * TP_PANEL + GEMM_LANES), acc[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        gemm_store(c + r * TP_PANEL, acc[r][0]);
        gemm_store(c + r * TP_PANEL + GEMM_LANES, acc[r][1]);
    }
}

VEC_INLINE void
tile_rows(const int rows, const int by_rows, const gemm_tile *t)
{
    for (int j = 0; j < TP_PANEL; j += GEMM_WIDTH)
        tile_strip(rows, by_rows ? GEMM_ROW_LD : 1, by_rows ? 1 : GEMM_COLUMN_LD, t, j);
}

VEC_INLINE void
tile_any(const int by_rows, int rows, const gemm_tile *t)
{
    switch (rows) {
    case 1: tile_rows(1, by_rows, t); break;
    case 2: tile_rows(2, by_rows, t); break;
    case 3: tile_rows(3, by_rows, t); break;
    case 4: tile_rows(4, by_rows, t); break;
    case 5: tile_rows(5, by_rows, t); break;
    case 6: tile_rows(6, by_rows, t); break;
#if GEMM_ROWS == 14
    case 7: tile_rows(7, by_rows, t); break;
    case 8: tile_rows(8, by_rows, t); break;
    case 9: tile_rows(9, by_rows, t); break;
    case 10: tile_rows(10, by_rows, t); break;
    case 11: tile_rows(11, by_rows, t); break;
    case 12: tile_rows(12, by_rows, t); break;
    case 13: tile_rows(13, by_rows, t); break;
    case 14: tile_rows(14, by_rows, t); break;
#endif
    default: break;
    }
}

static __attribute__((noinline)) void
gemm_tile_rows(int rows, const gemm_tile *t)
{
    tile_any(1, rows, t);
}

static __attribute__((noinline)) void
gemm_tile_columns(int rows, const gemm_tile *t)
{
    tile_any(0, rows, t);
}

#endif
