/* fp32 products on Intel's AMX, whose tiles multiply bf16 into fp32 sums, sixteen times as many a cycle as AVX-512's FMA.
 *
 * A float is the exact sum of three bf16 (8 bits each of its 24), x = x1 + x2 + x3, each the nearest to what is left. Of the nine
 * products of two such sums six are taken: a1 b3, a1 b2, a2 b2, a2 b1, a3 b1, a1 b1. What is left out is below 2^-24 of the whole,
 * an fp32 product's rounding, and 2^-27 as a rule; sums are rounded seldomer than in a chain of FMAs: against double, errors are
 * no larger than AVX-512's (tests/test_gemm.py). The method: Henry, Tang, Heinecke, "Leveraging the bfloat16 Artificial
 * Intelligence Datatype For Higher-Precision Computations" (ARITH 2019).
 *
 * At the ends of fp32's range. Infinity becomes NaN, as inf - inf is, and so does a number that bf16 rounds to it, above 3.396e38;
 * a product may become infinity from 2^-7 below 2^128 on. Factors and products below 2^-103 lose last bits, as AMX takes
 * subnormals as zero.
 *
 * What one instruction computes (Intel SDM, TDPBF16PS): over 32 k's, even and odd ones are chains of FMAs from zero; their sum is
 * added to the tile. So k's come in groups of AMX_GROUP, and which k's form a group shows in the bits.
 *
 * Packed operands. A tile is 16 rows of 64 bytes. A: of a strip of 32 rows, [group][part][2 tiles of 16 rows][32 k]. B: of a panel,
 * [group][part][2 tiles of 16 columns], a tile's row i holding k = 2 i and 2 i + 1 of each column beside each other. */
#ifndef TP_CPU_AMX_TILE_H
#define TP_CPU_AMX_TILE_H

#include "csrc/cpu/cpu.h"

#include "csrc/cpu/vec.h"

#define AMX_GROUP  TP_ROW_GROUP /* k's of one instruction */
_Static_assert(AMX_GROUP == 32, "a tile's row is 64 bytes");
#define AMX_STRIP  32 /* rows of C of one product, TP_PANEL columns */
#define AMX_PART   2048
#define AMX_BYTES  (3 * AMX_PART) /* of one group of a strip or a panel */
#define AMX_PAIRS  (AMX_GROUP / 2)
#define AMX_RATE   65536 /* one pair of rows, in amx_panel's due */

/* Three bf16, each in the upper half of its float. */
typedef struct {
    __m512i part[3];
} amx_parts;

/* Half of the last place is added to the magnitude and the rest cut off: ties go away from zero, NaN stays NaN (in part 3 at least). */
VEC_INLINE amx_parts
amx_split(__m512 x)
{
    const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32((int)0xffff0000u);
    amx_parts out;
    out.part[0] = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x), half), upper);
    __m512 rest = _mm512_sub_ps(x, _mm512_castsi512_ps(out.part[0]));
    out.part[1] = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(rest), half), upper);
    out.part[2] = _mm512_castps_si512(_mm512_sub_ps(rest, _mm512_castsi512_ps(out.part[1])));
    return out;
}

/* The upper halves of two k's, the first one in the lower half. */
VEC_INLINE __m512i
amx_pair(__m512i first, __m512i second)
{
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(first, 16), second);
}

VEC_INLINE __mmask16
amx_mask(int64_t count)
{
    return (__mmask16)(count >= 16 ? 0xffffu : count <= 0 ? 0u : (1u << count) - 1);
}

/* ---- B ------------------------------------------------------------------------------------------------------------------- */

/* A panel on its way into tiles: [depth] rows `step` floats apart, of which `width` columns exist. Pairs of rows, done one after
 * another while tiles multiply. */
typedef struct {
    const float *from;
    int64_t step, depth, width;
    int64_t fetch; /* floats from a row to the one that is fetched into the cache with it */
    char *to;
    int64_t pair, pairs; /* done, all */
    int64_t due;         /* to be done by now, times AMX_RATE */
} amx_panel;

VEC_INLINE void
amx_panel_pair(const amx_panel *p, int64_t pair)
{
    const int64_t k = 2 * pair;
    const float *row = p->from + k * p->step;
    char *to = p->to + pair / AMX_PAIRS * AMX_BYTES + pair % AMX_PAIRS * 64;
    for (int i = 0; i < 4; i++)
        __builtin_prefetch(row + i / 2 * p->step + p->fetch + i % 2 * 16, 0, 2);
    const __mmask16 first = k < p->depth ? 0xffff : 0, second = k + 1 < p->depth ? 0xffff : 0;
    for (int tile = 0; tile < 2; tile++) {
        const __mmask16 columns = amx_mask(p->width - 16 * tile);
        amx_parts a = amx_split(_mm512_maskz_loadu_ps(columns & first, row + 16 * tile));
        amx_parts b = amx_split(_mm512_maskz_loadu_ps(columns & second, row + p->step + 16 * tile));
        for (int part = 0; part < 3; part++)
            _mm512_store_si512(to + part * AMX_PART + tile * 1024, amx_pair(a.part[part], b.part[part]));
    }
}

static void
amx_panel_finish(amx_panel *p)
{
    for (; p->pair < p->pairs; p->pair++)
        amx_panel_pair(p, p->pair);
}

/* ---- A ------------------------------------------------------------------------------------------------------------------- */

VEC_INLINE int64_t
amx_groups(int64_t k)
{
    return (k + AMX_GROUP - 1) / AMX_GROUP;
}

/* Where row r of a block of A has its first part of its first group. */
VEC_INLINE char *
amx_row_of(char *a, int64_t groups, int64_t r)
{
    return a + r / AMX_STRIP * groups * AMX_BYTES + r % AMX_STRIP * 64;
}

VEC_INLINE void
amx_pack_group(__m512 low, __m512 high, char *to)
{
    const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19,
                                           17, 15, 13, 11, 9, 7, 5, 3, 1);
    amx_parts a = amx_split(low), b = amx_split(high);
    for (int part = 0; part < 3; part++)
        _mm512_store_si512(to + part * AMX_PART, _mm512_permutex2var_epi16(a.part[part], upper, b.part[part]));
}

/* Rows of x, k contiguous; rows and k's that are missing become zero. */
static void
amx_pack_rows(int64_t rows, int64_t depth, const float *x, int64_t x_stride, char *restrict a)
{
    const int64_t groups = amx_groups(depth), padded = (rows + AMX_STRIP - 1) / AMX_STRIP * AMX_STRIP;
    for (int64_t r = 0; r < padded; r++) {
        const float *row = x + (r < rows ? r : 0) * x_stride;
        const int64_t exist = r < rows ? depth : 0;
        char *to = amx_row_of(a, groups, r);
        for (int64_t g = 0, k = 0; g < groups; g++, k += AMX_GROUP)
            amx_pack_group(_mm512_maskz_loadu_ps(amx_mask(exist - k), row + k),
                           _mm512_maskz_loadu_ps(amx_mask(exist - k - 16), row + k + 16), to + g * AMX_BYTES);
    }
}

/* to[i] + 64 j... of a 16 x 16 matrix of pairs: row i of `from` becomes column i. */
VEC_INLINE void
amx_transpose(const __m512i from[AMX_PAIRS], char *to)
{
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(from[i], from[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(from[i], from[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; i++) { /* b[4 m + i]: columns i, 4 + i, 8 + i, 12 + i of rows 4 m to 4 m + 3 */
        a[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
        a[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
        a[8 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
        a[12 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_store_si512(to + 64 * i, _mm512_shuffle_i32x4(a[i], a[8 + i], 0x88));
        _mm512_store_si512(to + 64 * (4 + i), _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0x88));
        _mm512_store_si512(to + 64 * (8 + i), _mm512_shuffle_i32x4(a[i], a[8 + i], 0xdd));
        _mm512_store_si512(to + 64 * (12 + i), _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0xdd));
    }
}

/* One tile of x^T: 16 of its rows (columns of x, of which `columns` exist), one group of k (rows of x, of which `rows` exist). */
static void
amx_pack_tile(int64_t rows, const __mmask16 columns, const float *x, int64_t x_stride, char *to)
{
    __m512i part[3][AMX_PAIRS];
    for (int64_t i = 0, k = 0; i < AMX_PAIRS; i++, k += 2) {
        amx_parts a = amx_split(_mm512_maskz_loadu_ps(k < rows ? columns : 0, x + k * x_stride));
        amx_parts b = amx_split(_mm512_maskz_loadu_ps(k + 1 < rows ? columns : 0, x + (k + 1) * x_stride));
        for (int p = 0; p < 3; p++)
            part[p][i] = amx_pair(a.part[p], b.part[p]);
    }
    for (int p = 0; p < 3; p++)
        amx_transpose(part[p], to + p * AMX_PART);
}

/* `count` columns of x as rows of A; k: the `depth` rows of x. */
static void
amx_pack_columns(int64_t count, int64_t depth, const float *x, int64_t x_stride, char *restrict a)
{
    const int64_t groups = amx_groups(depth), padded = (count + AMX_STRIP - 1) / AMX_STRIP * AMX_STRIP;
    for (int64_t g = 0; g < groups; g++)
        for (int64_t r = 0; r < padded; r += 16)
            amx_pack_tile(depth - g * AMX_GROUP, amx_mask(count - r), x + g * AMX_GROUP * x_stride + r, x_stride,
                          amx_row_of(a, groups, r) + g * AMX_BYTES);
}

/* ---- the product --------------------------------------------------------------------------------------------------------- */

/* Work that the vector units do while tiles multiply: one(what) does the next piece of it. */
typedef struct {
    void (*one)(void *what);
    void *what;
    int64_t left;
    int64_t due, rate; /* pieces owed, and for a third of a group, times AMX_RATE */
} amx_company;

/* `pieces` spread evenly over `groups` of strips. */
VEC_INLINE amx_company
amx_company_of(void (*one)(void *what), void *what, int64_t pieces, int64_t groups)
{
    const int64_t pauses = groups > 0 ? 3 * groups : 1;
    return (amx_company){.one = one, .what = what, .left = pieces, .rate = (pieces * AMX_RATE + pauses - 1) / pauses};
}

VEC_INLINE void
amx_company_keep(amx_company *with)
{
    for (with->due += with->rate; with->due >= AMX_RATE && with->left > 0; with->due -= AMX_RATE, with->left--)
        with->one(with->what);
}

static void
amx_company_finish(amx_company *with)
{
    for (; with->left > 0; with->left--)
        with->one(with->what);
}

typedef struct {
    int64_t groups;
    const char *a, *b;  /* a strip, a panel */
    float *c;           /* AMX_STRIP rows of TP_PANEL floats */
    int go_on;          /* c = c + A B, not A B */
    const float *soon;  /* soon_rows rows of TP_PANEL floats that are gone on with next */
    int64_t soon_rows;
    amx_panel *ahead;   /* packed meanwhile */
    int64_t ahead_rate; /* its pairs for a third of a group, times AMX_RATE */
    amx_company *with;
} amx_product;

/* Must be open around products, on this thread. */
VEC_INLINE void
amx_open(void)
{
    /* Static: gcc's intrinsic says that it reads 8 bytes, and stores of the others might be dropped. */
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1,
               .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
               .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&shape);
}

VEC_INLINE void
amx_close(void)
{
    _tile_release();
}

#define AMX_A(from)                           \
    do {                                      \
        _tile_loadd(4, (from), 64);           \
        if (tiles == 2)                       \
            _tile_loadd(5, (from) + 1024, 64); \
    } while (0)
#define AMX_B(from)                        \
    do {                                   \
        _tile_loadd(6, (from), 64);        \
        _tile_loadd(7, (from) + 1024, 64); \
    } while (0)
#define AMX_MULTIPLY()                \
    do {                              \
        _tile_dpbf16ps(0, 4, 6);      \
        _tile_dpbf16ps(1, 4, 7);      \
        if (tiles == 2) {             \
            _tile_dpbf16ps(2, 5, 6);  \
            _tile_dpbf16ps(3, 5, 7);  \
        }                             \
    } while (0)
#define AMX_MEANWHILE()                                    \
    do {                                                   \
        due += rate;                                       \
        for (; pair < due / AMX_RATE && pair < pairs; pair++) \
            amx_panel_pair(ahead, pair);                   \
        if (with->left > 0)                                \
            amx_company_keep(with);                        \
    } while (0)

/* In an order in which each step loads one operand anew. tiles: 1 where only the first 16 rows of the strip exist. */
VEC_INLINE void
amx_strip(const int tiles, const amx_product *t)
{
    const int64_t row = TP_PANEL * sizeof(float);
    __asm__ volatile("" ::: "memory"); /* gcc's tile loads do not say that they read memory: -O3 drops stores before one */
    float *c = t->c;
    const char *a = t->a, *b = t->b;
    const float *soon = t->soon;
    amx_panel *const ahead = t->ahead; /* not copied: a copy would wait for all stores of the strip before */
    int64_t pair = ahead->pair, due = ahead->due;
    const int64_t pairs = ahead->pairs;
    amx_company *const with = t->with;
    const int64_t rate = t->ahead_rate;
    int64_t fetched = 0;
    if (t->go_on) {
        _tile_loadd(0, c, row);
        _tile_loadd(1, c + 16, row);
        if (tiles == 2) {
            _tile_loadd(2, c + 16 * TP_PANEL, row);
            _tile_loadd(3, c + 16 * TP_PANEL + 16, row);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t g = 0; g < t->groups; g++, a += AMX_BYTES, b += AMX_BYTES) {
        AMX_A(a);
        AMX_B(b + 2 * AMX_PART);
        AMX_MULTIPLY();
        AMX_B(b + AMX_PART);
        AMX_MULTIPLY();
        AMX_MEANWHILE();
        AMX_A(a + AMX_PART);
        AMX_MULTIPLY();
        AMX_B(b);
        AMX_MULTIPLY();
        AMX_MEANWHILE();
        AMX_A(a + 2 * AMX_PART);
        AMX_MULTIPLY();
        AMX_A(a);
        AMX_MULTIPLY();
        AMX_MEANWHILE();
        for (int64_t end = (g + 1) * t->soon_rows / t->groups; fetched < end; fetched++, soon += TP_PANEL) {
            __builtin_prefetch(soon, 1, 3);
            __builtin_prefetch(soon + 16, 1, 3);
        }
    }
    _tile_stored(0, c, row);
    _tile_stored(1, c + 16, row);
    if (tiles == 2) {
        _tile_stored(2, c + 16 * TP_PANEL, row);
        _tile_stored(3, c + 16 * TP_PANEL + 16, row);
    }
    ahead->pair = pair;
    ahead->due = due;
}

static void
amx_multiply(int64_t rows, const amx_product *t)
{
    if (rows <= 16)
        amx_strip(1, t);
    else
        amx_strip(2, t);
}

#endif
