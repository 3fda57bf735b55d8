/* AVX-512 and AMX where they are not: the intrinsics that csrc uses, each on two AVX2 registers. Given to the compiler with
 * -include for the sources that hold such code (tests/c/run --avx512), which then believe in it, as does their check of
 * the processor. It has to be AVX2 with FMA.
 *
 * The types are structs that do not convert, memory under a zero bit of a mask is not touched (ASan sees what is), and what
 * a processor leaves undefined is NaN here. An intrinsic that is missing here does not compile: add it. */
#ifndef TP_TESTS_AVX512_EMULATED_H
#define TP_TESTS_AVX512_EMULATED_H
#pragma GCC system_header /* the compiler has macros of some of these names */

#include <cpuid.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define __AVX512F__                 1
#define __builtin_cpu_supports(name) 1
#define target(features)             /* the compiler would use what it allows */
#define VEC_OPAQUE(v)                ((void)(v)) /* no register holds a struct */
#define EMU                          static inline __attribute__((always_inline, unused))

typedef struct {
    __m256 half[2];
} emu_ps;
typedef struct {
    __m256d half[2];
} emu_pd;
typedef struct {
    __m256i half[2];
} emu_i;
#define __m512  emu_ps
#define __m512d emu_pd
#define __m512i emu_i

/* _mm512_<op>_<type>(v, w) of the instruction of AVX2 that works on halves. */
#define EMU_1(name, to, from, of)                                                                                      \
    EMU to emu_##name(from a)                                                                                          \
    {                                                                                                                  \
        return (to){{of(a.half[0]), of(a.half[1])}};                                                                   \
    }
#define EMU_2(name, t, of)                                                                                             \
    EMU t emu_##name(t a, t b)                                                                                         \
    {                                                                                                                  \
        return (t){{of(a.half[0], b.half[0]), of(a.half[1], b.half[1])}};                                              \
    }
#define EMU_3(name, t, of)                                                                                             \
    EMU t emu_##name(t a, t b, t c)                                                                                    \
    {                                                                                                                  \
        return (t){{of(a.half[0], b.half[0], c.half[0]), of(a.half[1], b.half[1], c.half[1])}};                        \
    }

EMU_1(castps_si512, emu_i, emu_ps, _mm256_castps_si256)
EMU_1(castsi512_ps, emu_ps, emu_i, _mm256_castsi256_ps)
EMU_1(castps_pd, emu_pd, emu_ps, _mm256_castps_pd)
EMU_1(castpd_ps, emu_ps, emu_pd, _mm256_castpd_ps)
EMU_1(sqrt_ps, emu_ps, emu_ps, _mm256_sqrt_ps)
EMU_2(add_ps, emu_ps, _mm256_add_ps)
EMU_2(sub_ps, emu_ps, _mm256_sub_ps)
EMU_2(mul_ps, emu_ps, _mm256_mul_ps)
EMU_2(div_ps, emu_ps, _mm256_div_ps)
EMU_2(max_ps, emu_ps, _mm256_max_ps)
EMU_2(min_ps, emu_ps, _mm256_min_ps)
EMU_2(add_pd, emu_pd, _mm256_add_pd)
EMU_2(sub_pd, emu_pd, _mm256_sub_pd)
EMU_2(mul_pd, emu_pd, _mm256_mul_pd)
EMU_2(min_pd, emu_pd, _mm256_min_pd)
EMU_2(add_epi32, emu_i, _mm256_add_epi32)
EMU_2(unpacklo_ps, emu_ps, _mm256_unpacklo_ps)
EMU_2(unpackhi_ps, emu_ps, _mm256_unpackhi_ps)
EMU_2(unpacklo_pd, emu_pd, _mm256_unpacklo_pd)
EMU_2(unpackhi_pd, emu_pd, _mm256_unpackhi_pd)
EMU_3(fmadd_ps, emu_ps, _mm256_fmadd_ps)
EMU_3(fnmadd_ps, emu_ps, _mm256_fnmadd_ps)

EMU emu_ps
emu_set1_ps(float x)
{
    return (emu_ps){{_mm256_set1_ps(x), _mm256_set1_ps(x)}};
}
EMU emu_pd
emu_set1_pd(double x)
{
    return (emu_pd){{_mm256_set1_pd(x), _mm256_set1_pd(x)}};
}
EMU emu_ps
emu_abs_ps(emu_ps a)
{
    __m256 sign = _mm256_set1_ps(-0.0f);
    return (emu_ps){{_mm256_andnot_ps(sign, a.half[0]), _mm256_andnot_ps(sign, a.half[1])}};
}

/* ---- memory -------------------------------------------------------------------------------------------------------- */

EMU emu_ps
emu_loadu_ps(const void *p)
{
    const float *x = p;
    return (emu_ps){{_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}};
}
EMU emu_pd
emu_loadu_pd(const void *p)
{
    const double *x = p;
    return (emu_pd){{_mm256_loadu_pd(x), _mm256_loadu_pd(x + 4)}};
}
EMU void
emu_storeu_ps(void *p, emu_ps v)
{
    float *x = p;
    _mm256_storeu_ps(x, v.half[0]), _mm256_storeu_ps(x + 8, v.half[1]);
}
EMU void
emu_storeu_pd(void *p, emu_pd v)
{
    double *x = p;
    _mm256_storeu_pd(x, v.half[0]), _mm256_storeu_pd(x + 4, v.half[1]);
}
EMU emu_ps
emu_maskz_loadu_ps(__mmask16 mask, const void *p)
{
    float lane[16] = {0};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            lane[i] = ((const float *)p)[i];
    return emu_loadu_ps(lane);
}
EMU void
emu_mask_storeu_ps(void *p, __mmask16 mask, emu_ps v)
{
    float lane[16];
    emu_storeu_ps(lane, v);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            ((float *)p)[i] = lane[i];
}

/* ---- masks --------------------------------------------------------------------------------------------------------- */

/* b where the mask has a one, else a */
EMU emu_ps
emu_mask_blend_ps(__mmask16 mask, emu_ps a, emu_ps b)
{
    float lane[16];
    emu_storeu_ps(lane, a);
    emu_mask_storeu_ps(lane, mask, b);
    return emu_loadu_ps(lane);
}
EMU emu_ps
emu_maskz_mov_ps(__mmask16 mask, emu_ps a)
{
    return emu_mask_blend_ps(mask, emu_set1_ps(0.0f), a);
}
EMU emu_pd
emu_mask_mov_pd(emu_pd other, __mmask8 mask, emu_pd a)
{
    double lane[8], from[8];
    emu_storeu_pd(lane, other), emu_storeu_pd(from, a);
    for (int i = 0; i < 8; i++)
        lane[i] = mask >> i & 1 ? from[i] : lane[i];
    return emu_loadu_pd(lane);
}
#define emu_cmp_ps_mask(a, b, predicate)                                                                               \
    ((__mmask16)(_mm256_movemask_ps(_mm256_cmp_ps((a).half[0], (b).half[0], predicate)) |                              \
                 _mm256_movemask_ps(_mm256_cmp_ps((a).half[1], (b).half[1], predicate)) << 8))
#define emu_cmp_pd_mask(a, b, predicate)                                                                               \
    ((__mmask8)(_mm256_movemask_pd(_mm256_cmp_pd((a).half[0], (b).half[0], predicate)) |                               \
                _mm256_movemask_pd(_mm256_cmp_pd((a).half[1], (b).half[1], predicate)) << 4))

/* ---- across lanes -------------------------------------------------------------------------------------------------- */

EMU emu_i
emu_slli_epi32(emu_i a, int bits)
{
    return (emu_i){{_mm256_slli_epi32(a.half[0], bits), _mm256_slli_epi32(a.half[1], bits)}};
}
EMU emu_ps
emu_castps128_ps512(__m128 a)
{
    __m256 unknown = _mm256_set1_ps(NAN);
    return (emu_ps){{_mm256_insertf128_ps(unknown, a, 0), unknown}};
}
EMU emu_ps
emu_insertf32x4(emu_ps a, __m128 b, int quarter)
{
    float lane[16];
    emu_storeu_ps(lane, a);
    _mm_storeu_ps(lane + 4 * (quarter & 3), b);
    return emu_loadu_ps(lane);
}
EMU __m256d
emu_extractf64x4_pd(emu_pd a, int which)
{
    return a.half[which & 1];
}
EMU __m256
emu_castps512_ps256(emu_ps a)
{
    return a.half[0];
}
EMU double
emu_reduce_min_pd(emu_pd a)
{
    double lane[8];
    emu_storeu_pd(lane, a);
    for (int i = 1; i < 8; i++)
        lane[0] = lane[i] < lane[0] ? lane[i] : lane[0];
    return lane[0];
}
EMU emu_pd
emu_set_pd(double h, double g, double f, double e, double d, double c, double b, double a)
{
    return (emu_pd){{_mm256_set_pd(d, c, b, a), _mm256_set_pd(h, g, f, e)}};
}

/* ---- integers ------------------------------------------------------------------------------------------------------ */

EMU_2(and_si512, emu_i, _mm256_and_si256)
EMU_2(unpacklo_epi32, emu_i, _mm256_unpacklo_epi32)
EMU_2(unpackhi_epi32, emu_i, _mm256_unpackhi_epi32)
EMU_2(unpacklo_epi64, emu_i, _mm256_unpacklo_epi64)
EMU_2(unpackhi_epi64, emu_i, _mm256_unpackhi_epi64)

EMU emu_i
emu_set1_epi32(int x)
{
    return (emu_i){{_mm256_set1_epi32(x), _mm256_set1_epi32(x)}};
}
EMU emu_i
emu_srli_epi32(emu_i a, int bits)
{
    return (emu_i){{_mm256_srli_epi32(a.half[0], bits), _mm256_srli_epi32(a.half[1], bits)}};
}
EMU void
emu_store_si512(void *p, emu_i v)
{
    _mm256_store_si256(p, v.half[0]), _mm256_store_si256((__m256i *)p + 1, v.half[1]);
}
EMU emu_i
emu_load_words(const uint16_t *p)
{
    emu_i v;
    memcpy(&v, p, sizeof v);
    return v;
}
EMU emu_i
emu_mask_blend_epi16(__mmask32 mask, emu_i a, emu_i b)
{
    uint16_t of_a[32], of_b[32];
    memcpy(of_a, &a, sizeof a), memcpy(of_b, &b, sizeof b);
    for (int i = 0; i < 32; i++)
        of_a[i] = mask >> i & 1 ? of_b[i] : of_a[i];
    return emu_load_words(of_a);
}
EMU emu_i
emu_permutex2var_epi16(emu_i a, emu_i index, emu_i b)
{
    uint16_t from[64], which[32], to[32];
    memcpy(from, &a, sizeof a), memcpy(from + 32, &b, sizeof b), memcpy(which, &index, sizeof index);
    for (int i = 0; i < 32; i++)
        to[i] = from[which[i] & 63];
    return emu_load_words(to);
}
EMU emu_i
emu_shuffle_i32x4(emu_i a, emu_i b, int lanes)
{
    uint16_t of_a[32], of_b[32], to[32];
    memcpy(of_a, &a, sizeof a), memcpy(of_b, &b, sizeof b);
    for (int i = 0; i < 4; i++)
        memcpy(to + 8 * i, (i < 2 ? of_a : of_b) + 8 * (lanes >> 2 * i & 3), 16);
    return emu_load_words(to);
}
#define emu_words(...) emu_load_words((const uint16_t[32]){__VA_ARGS__})
#define emu_set_epi16(x31, x30, x29, x28, x27, x26, x25, x24, x23, x22, x21, x20, x19, x18, x17, x16, x15, x14, x13, x12,    \
                      x11, x10, x9, x8, x7, x6, x5, x4, x3, x2, x1, x0)                                                     \
    emu_words(x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15, x16, x17, x18, x19, x20, x21, x22, x23, \
              x24, x25, x26, x27, x28, x29, x30, x31)

/* ---- AMX: tiles of 16 rows of 64 bytes, each thread's own; TDPBF16PS as the Intel SDM writes it ----------------------- */

typedef struct {
    _Alignas(64) char row[16][64];
} emu_tile;
static __thread emu_tile emu_tiles[8] __attribute__((unused));

EMU void
emu_tile_load(int tile, const void *from, long step)
{
    for (int i = 0; i < 16; i++)
        memcpy(emu_tiles[tile].row[i], (const char *)from + i * step, 64);
}
EMU void
emu_tile_store(int tile, void *to, long step)
{
    for (int i = 0; i < 16; i++)
        memcpy((char *)to + i * step, emu_tiles[tile].row[i], 64);
}
EMU float
emu_bf16(const char *row, int i)
{
    uint16_t half;
    memcpy(&half, row + 2 * i, sizeof half);
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline __attribute__((unused)) void
emu_tile_multiply(int to, int a, int b)
{
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float sum[2] = {0.0f, 0.0f}, *c = (float *)(void *)emu_tiles[to].row[m] + n;
            for (int k = 0; k < 32; k++)
                sum[k % 2] = fmaf(emu_bf16(emu_tiles[a].row[m], k), emu_bf16(emu_tiles[b].row[k / 2], 2 * n + k % 2), sum[k % 2]);
            *c += sum[0] + sum[1];
        }
}
EMU int
emu_cpuid(unsigned *d)
{
    *d = ~0u;
    return 1;
}
#define __get_cpuid_count(leaf, part, a, b, c, d) (*(a) = *(b) = *(c) = 0, emu_cpuid(d))
#define syscall(...)                              0 /* arch_prctl: permission for the tiles */
#define _tile_loadconfig(shape)                   ((void)(shape))
#define _tile_release()                           ((void)0)
#define _tile_zero(tile)                          memset(&emu_tiles[tile], 0, sizeof(emu_tile))
#define _tile_loadd(tile, from, step)             emu_tile_load(tile, from, (long)(step))
#define _tile_stored(tile, to, step)              emu_tile_store(tile, to, (long)(step))
#define _tile_dpbf16ps(to, a, b)                  emu_tile_multiply(to, a, b)

#define _mm512_abs_ps          emu_abs_ps
#define _mm512_add_epi32       emu_add_epi32
#define _mm512_add_pd          emu_add_pd
#define _mm512_add_ps          emu_add_ps
#define _mm512_and_si512       emu_and_si512
#define _mm512_castpd_ps       emu_castpd_ps
#define _mm512_castps128_ps512 emu_castps128_ps512
#define _mm512_castps512_ps256 emu_castps512_ps256
#define _mm512_castps_pd       emu_castps_pd
#define _mm512_castps_si512    emu_castps_si512
#define _mm512_castsi512_ps    emu_castsi512_ps
#define _mm512_cmp_pd_mask     emu_cmp_pd_mask
#define _mm512_cmp_ps_mask     emu_cmp_ps_mask
#define _mm512_div_ps          emu_div_ps
#define _mm512_extractf64x4_pd emu_extractf64x4_pd
#define _mm512_fmadd_ps        emu_fmadd_ps
#define _mm512_fnmadd_ps       emu_fnmadd_ps
#define _mm512_insertf32x4     emu_insertf32x4
#define _mm512_loadu_pd        emu_loadu_pd
#define _mm512_loadu_ps        emu_loadu_ps
#define _mm512_mask_blend_epi16 emu_mask_blend_epi16
#define _mm512_mask_blend_ps   emu_mask_blend_ps
#define _mm512_mask_mov_pd     emu_mask_mov_pd
#define _mm512_mask_storeu_ps  emu_mask_storeu_ps
#define _mm512_maskz_loadu_ps  emu_maskz_loadu_ps
#define _mm512_maskz_mov_ps    emu_maskz_mov_ps
#define _mm512_max_ps          emu_max_ps
#define _mm512_min_pd          emu_min_pd
#define _mm512_min_ps          emu_min_ps
#define _mm512_mul_pd          emu_mul_pd
#define _mm512_mul_ps          emu_mul_ps
#define _mm512_permutex2var_epi16 emu_permutex2var_epi16
#define _mm512_reduce_min_pd   emu_reduce_min_pd
#define _mm512_set1_epi32      emu_set1_epi32
#define _mm512_set1_pd         emu_set1_pd
#define _mm512_set1_ps         emu_set1_ps
#define _mm512_set_epi16       emu_set_epi16
#define _mm512_set_pd          emu_set_pd
#define _mm512_setzero_ps()    emu_set1_ps(0.0f)
#define _mm512_shuffle_i32x4   emu_shuffle_i32x4
#define _mm512_slli_epi32      emu_slli_epi32
#define _mm512_sqrt_ps         emu_sqrt_ps
#define _mm512_srli_epi32      emu_srli_epi32
#define _mm512_store_si512     emu_store_si512
#define _mm512_storeu_pd       emu_storeu_pd
#define _mm512_storeu_ps       emu_storeu_ps
#define _mm512_sub_pd          emu_sub_pd
#define _mm512_sub_ps          emu_sub_ps
#define _mm512_unpackhi_epi32  emu_unpackhi_epi32
#define _mm512_unpackhi_epi64  emu_unpackhi_epi64
#define _mm512_unpackhi_pd     emu_unpackhi_pd
#define _mm512_unpackhi_ps     emu_unpackhi_ps
#define _mm512_unpacklo_epi32  emu_unpacklo_epi32
#define _mm512_unpacklo_epi64  emu_unpacklo_epi64
#define _mm512_unpacklo_pd     emu_unpacklo_pd
#define _mm512_unpacklo_ps     emu_unpacklo_ps

#endif
