#include "csrc/plan/slice_kernel.h"

#include <math.h>
#include <stddef.h>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF /* the same bits on every instruction set; gcc -std=c11 has it off */
#endif

#if defined(__x86_64__)
#include <immintrin.h>

#define FN(name) name##_avx512
#define TARGET __attribute__((target("avx512f")))
#define VEC __m512d
#define LANES 8
#define LOAD(p) _mm512_loadu_pd(p)
#define STORE(p, v) _mm512_storeu_pd(p, v)
#define SET1(x) _mm512_set1_pd(x)
#define ADD(a, b) _mm512_add_pd(a, b)
#define SUB(a, b) _mm512_sub_pd(a, b)
#define MUL(a, b) _mm512_mul_pd(a, b)
#define MIN(a, b) _mm512_min_pd(a, b)
#define WHERE_LE(a, b, x) _mm512_mask_mov_pd(_mm512_set1_pd(INFINITY), _mm512_cmp_pd_mask(a, b, _CMP_LE_OQ), x)
#define BITS_LT(a, b) (unsigned)_mm512_cmp_pd_mask(a, b, _CMP_LT_OQ)
#define LEAST(v) _mm512_reduce_min_pd(v)
#define STEPS _mm512_set_pd(8, 7, 6, 5, 4, 3, 2, 1)
#include "csrc/plan/slice_kernel.inc"
static const tp_slice_kernels avx512 = {relax_block_avx512, relax_avx512, least_avx512, relax_weighted_avx512, pick_avx512, 8};

static inline __attribute__((target("avx2"))) double
least_of_four(__m256d v)
{
    __m128d low = _mm_min_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_min_sd(low, _mm_unpackhi_pd(low, low)));
}

#define FN(name) name##_avx2
#define TARGET __attribute__((target("avx2")))
#define VEC __m256d
#define LANES 4
#define LOAD(p) _mm256_loadu_pd(p)
#define STORE(p, v) _mm256_storeu_pd(p, v)
#define SET1(x) _mm256_set1_pd(x)
#define ADD(a, b) _mm256_add_pd(a, b)
#define SUB(a, b) _mm256_sub_pd(a, b)
#define MUL(a, b) _mm256_mul_pd(a, b)
#define MIN(a, b) _mm256_min_pd(a, b)
#define WHERE_LE(a, b, x) _mm256_blendv_pd(_mm256_set1_pd(INFINITY), x, _mm256_cmp_pd(a, b, _CMP_LE_OQ))
#define BITS_LT(a, b) (unsigned)_mm256_movemask_pd(_mm256_cmp_pd(a, b, _CMP_LT_OQ))
#define LEAST(v) least_of_four(v)
#define STEPS _mm256_set_pd(4, 3, 2, 1)
#include "csrc/plan/slice_kernel.inc"
static const tp_slice_kernels avx2 = {relax_block_avx2, relax_avx2, least_avx2, relax_weighted_avx2, pick_avx2, 4};
#endif

#define FN(name) name##_portable
#define TARGET
#define VEC double
#define LANES 1
#define LOAD(p) (*(p))
#define STORE(p, v) (*(p) = (v))
#define SET1(x) (x)
#define ADD(a, b) ((a) + (b))
#define SUB(a, b) ((a) - (b))
#define MUL(a, b) ((a) * (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define WHERE_LE(a, b, x) ((a) <= (b) ? (x) : INFINITY)
#define BITS_LT(a, b) (unsigned)((a) < (b))
#define LEAST(v) (v)
#define STEPS 1.0
#include "csrc/plan/slice_kernel.inc"
static const tp_slice_kernels portable = {relax_block_portable,    relax_portable, least_portable,
                                          relax_weighted_portable, pick_portable,  1};

const tp_slice_kernels *
tp_slice_kernels_for(tp_slice_isa isa)
{
#if defined(__x86_64__)
    int has512 = __builtin_cpu_supports("avx512f"), has2 = __builtin_cpu_supports("avx2");
    if (isa == TP_SLICE_ISA_AVX512 || (isa == TP_SLICE_ISA_AUTO && has512))
        return has512 ? &avx512 : NULL;
    if (isa == TP_SLICE_ISA_AVX2 || (isa == TP_SLICE_ISA_AUTO && has2))
        return has2 ? &avx2 : NULL;
#endif
    return isa == TP_SLICE_ISA_AUTO || isa == TP_SLICE_ISA_PORTABLE ? &portable : NULL;
}
