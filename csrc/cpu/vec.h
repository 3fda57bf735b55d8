/* Sixteen floats, whatever the instruction set: one register of AVX-512, two of AVX2, four of the portable build.
 *
 * AVX-512 and AVX2 give the same bits: every function is the same sequence of correctly rounded operations on each lane,
 * sums across lanes have one fixed tree, and a multiply-add is fused only where vec_fma says so. The portable build has
 * the same algorithms; its vec_fma rounds twice where the machine has no fused multiply-add.
 * vf16 is a struct of registers rather than a GCC vector of 64 bytes, which gcc 12 lowers through the stack on AVX2.
 * Several instruction sets include this file: everything is static. */
#ifndef TP_CPU_VEC_H
#define TP_CPU_VEC_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__clang__)
#pragma clang fp contract(off) /* gcc -std=c11 already contracts nothing */
#endif

#define VEC_LANES 16
#define VEC_INLINE static inline __attribute__((always_inline, unused))

#if defined(__AVX512F__)
/* ---- AVX-512 ----------------------------------------------------------------------------------------------------- */

typedef __m512 vf16;

/* The compiler no longer knows what v holds: a broadcast stays in its register instead of being loaded at each use. */
#if !defined(VEC_OPAQUE) /* tests emulate AVX-512, and have no such register */
#define VEC_OPAQUE(v) __asm__("" : "+v"(v))
#endif

VEC_INLINE vf16
vec_set1(float x)
{
    return _mm512_set1_ps(x);
}
VEC_INLINE vf16
vec_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
VEC_INLINE void
vec_store(float *p, vf16 v)
{
    _mm512_storeu_ps(p, v);
}
VEC_INLINE vf16
vec_load_n(const float *p, int64_t n)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
}
VEC_INLINE void
vec_store_n(float *p, vf16 v, int64_t n)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), v);
}
VEC_INLINE vf16
vec_first_n(vf16 v, int64_t n, vf16 other)
{
    return _mm512_mask_blend_ps((__mmask16)((1u << n) - 1u), other, v);
}
VEC_INLINE vf16
vec_add(vf16 a, vf16 b)
{
    return _mm512_add_ps(a, b);
}
VEC_INLINE vf16
vec_sub(vf16 a, vf16 b)
{
    return _mm512_sub_ps(a, b);
}
VEC_INLINE vf16
vec_mul(vf16 a, vf16 b)
{
    return _mm512_mul_ps(a, b);
}
VEC_INLINE vf16
vec_div(vf16 a, vf16 b)
{
    return _mm512_div_ps(a, b);
}
VEC_INLINE vf16
vec_sqrt(vf16 a)
{
    return _mm512_sqrt_ps(a);
}
VEC_INLINE vf16
vec_max(vf16 a, vf16 b)
{
    return _mm512_max_ps(a, b);
}
VEC_INLINE vf16
vec_min(vf16 a, vf16 b)
{
    return _mm512_min_ps(a, b);
}
VEC_INLINE vf16
vec_fma(vf16 a, vf16 b, vf16 c)
{
    return _mm512_fmadd_ps(a, b, c);
}
VEC_INLINE vf16
vec_fnma(vf16 a, vf16 b, vf16 c)
{
    return _mm512_fnmadd_ps(a, b, c);
}
VEC_INLINE vf16
vec_shift_exponent(vf16 a, vf16 bits)
{
    __m512i shift = _mm512_slli_epi32(_mm512_castps_si512(bits), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), shift));
}
VEC_INLINE vf16
vec_keep(vf16 a, vf16 least)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(a), least, _CMP_NLT_UQ), a);
}
VEC_INLINE int
vec_all_equal(vf16 a, vf16 b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ) == 0xffff;
}
VEC_INLINE __m256
vec_high_half_(vf16 v)
{
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
}
VEC_INLINE void
vec_halves_(vf16 v, __m256 *low, __m256 *high)
{
    *low = _mm512_castps512_ps256(v), *high = vec_high_half_(v);
}

#elif defined(__AVX2__) && defined(__FMA__)
/* ---- AVX2 + FMA -------------------------------------------------------------------------------------------------- */

typedef struct {
    __m256 low, high;
} vf16;

static const int32_t vec_lanes_on_[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};

VEC_INLINE vf16
vec_of_(__m256 low, __m256 high)
{
    vf16 v = {low, high};
    return v;
}
VEC_INLINE __m256i
vec_mask_(int64_t n, int64_t from)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)(vec_lanes_on_ + VEC_LANES - n + from));
}
VEC_INLINE vf16
vec_set1(float x)
{
    return vec_of_(_mm256_set1_ps(x), _mm256_set1_ps(x));
}
VEC_INLINE vf16
vec_load(const float *p)
{
    return vec_of_(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8));
}
VEC_INLINE void
vec_store(float *p, vf16 v)
{
    _mm256_storeu_ps(p, v.low);
    _mm256_storeu_ps(p + 8, v.high);
}
VEC_INLINE vf16
vec_load_n(const float *p, int64_t n)
{
    return vec_of_(_mm256_maskload_ps(p, vec_mask_(n, 0)), _mm256_maskload_ps(p + 8, vec_mask_(n, 8)));
}
VEC_INLINE void
vec_store_n(float *p, vf16 v, int64_t n)
{
    _mm256_maskstore_ps(p, vec_mask_(n, 0), v.low);
    _mm256_maskstore_ps(p + 8, vec_mask_(n, 8), v.high);
}
VEC_INLINE vf16
vec_first_n(vf16 v, int64_t n, vf16 other)
{
    return vec_of_(_mm256_blendv_ps(other.low, v.low, _mm256_castsi256_ps(vec_mask_(n, 0))),
                   _mm256_blendv_ps(other.high, v.high, _mm256_castsi256_ps(vec_mask_(n, 8))));
}
VEC_INLINE vf16
vec_add(vf16 a, vf16 b)
{
    return vec_of_(_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high));
}
VEC_INLINE vf16
vec_sub(vf16 a, vf16 b)
{
    return vec_of_(_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high));
}
VEC_INLINE vf16
vec_mul(vf16 a, vf16 b)
{
    return vec_of_(_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high));
}
VEC_INLINE vf16
vec_div(vf16 a, vf16 b)
{
    return vec_of_(_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high));
}
VEC_INLINE vf16
vec_sqrt(vf16 a)
{
    return vec_of_(_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high));
}
VEC_INLINE vf16
vec_max(vf16 a, vf16 b)
{
    return vec_of_(_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high));
}
VEC_INLINE vf16
vec_min(vf16 a, vf16 b)
{
    return vec_of_(_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high));
}
VEC_INLINE vf16
vec_fma(vf16 a, vf16 b, vf16 c)
{
    return vec_of_(_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high));
}
VEC_INLINE vf16
vec_fnma(vf16 a, vf16 b, vf16 c)
{
    return vec_of_(_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high));
}
VEC_INLINE __m256
vec_shift_exponent_half_(__m256 a, __m256 bits)
{
    __m256i shift = _mm256_slli_epi32(_mm256_castps_si256(bits), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), shift));
}
VEC_INLINE vf16
vec_shift_exponent(vf16 a, vf16 bits)
{
    return vec_of_(vec_shift_exponent_half_(a.low, bits.low), vec_shift_exponent_half_(a.high, bits.high));
}
VEC_INLINE __m256
vec_keep_half_(__m256 a, __m256 least)
{
    __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
    return _mm256_and_ps(a, _mm256_cmp_ps(size, least, _CMP_NLT_UQ));
}
VEC_INLINE vf16
vec_keep(vf16 a, vf16 least)
{
    return vec_of_(vec_keep_half_(a.low, least.low), vec_keep_half_(a.high, least.high));
}
VEC_INLINE int
vec_all_equal(vf16 a, vf16 b)
{
    __m256 both = _mm256_and_ps(_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ));
    return _mm256_movemask_ps(both) == 0xff;
}
VEC_INLINE void
vec_halves_(vf16 v, __m256 *low, __m256 *high)
{
    *low = v.low, *high = v.high;
}

#else
/* ---- portable: GCC vectors of 16 bytes, which every target has or emulates ------------------------------------------ */

typedef float vec4_ __attribute__((vector_size(16)));
typedef int32_t vec4i_ __attribute__((vector_size(16)));
typedef uint32_t vec4u_ __attribute__((vector_size(16)));
typedef struct {
    vec4_ a, b, c, d;
} vf16;
#define VEC_MAP_(f, ...)                                                                                               \
    (vf16)                                                                                                             \
    {                                                                                                                  \
        f(a, __VA_ARGS__), f(b, __VA_ARGS__), f(c, __VA_ARGS__), f(d, __VA_ARGS__)                                     \
    }

VEC_INLINE vf16
vec_set1(float x)
{
    vec4_ q = {x, x, x, x};
    return (vf16){q, q, q, q};
}
VEC_INLINE vf16
vec_load(const float *p)
{
    vf16 v;
    memcpy(&v.a, p, 16), memcpy(&v.b, p + 4, 16), memcpy(&v.c, p + 8, 16), memcpy(&v.d, p + 12, 16);
    return v;
}
VEC_INLINE void
vec_store(float *p, vf16 v)
{
    memcpy(p, &v.a, 16), memcpy(p + 4, &v.b, 16), memcpy(p + 8, &v.c, 16), memcpy(p + 12, &v.d, 16);
}
VEC_INLINE vf16
vec_load_n(const float *p, int64_t n)
{
    float lanes[VEC_LANES] = {0};
    for (int64_t i = 0; i < n; i++)
        lanes[i] = p[i];
    return vec_load(lanes);
}
VEC_INLINE void
vec_store_n(float *p, vf16 v, int64_t n)
{
    float lanes[VEC_LANES];
    vec_store(lanes, v);
    for (int64_t i = 0; i < n; i++)
        p[i] = lanes[i];
}
VEC_INLINE vf16
vec_first_n(vf16 v, int64_t n, vf16 other)
{
    float lanes[VEC_LANES];
    vec_store(lanes, other);
    vec_store_n(lanes, v, n);
    return vec_load(lanes);
}
VEC_INLINE vf16
vec_add(vf16 x, vf16 y)
{
    return (vf16){x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d};
}
VEC_INLINE vf16
vec_sub(vf16 x, vf16 y)
{
    return (vf16){x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d};
}
VEC_INLINE vf16
vec_mul(vf16 x, vf16 y)
{
    return (vf16){x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d};
}
VEC_INLINE vf16
vec_div(vf16 x, vf16 y)
{
    return (vf16){x.a / y.a, x.b / y.b, x.c / y.c, x.d / y.d};
}
VEC_INLINE vec4_
vec_sqrt_4_(vec4_ x)
{
    return (vec4_){__builtin_sqrtf(x[0]), __builtin_sqrtf(x[1]), __builtin_sqrtf(x[2]), __builtin_sqrtf(x[3])};
}
VEC_INLINE vf16
vec_sqrt(vf16 x)
{
    return (vf16){vec_sqrt_4_(x.a), vec_sqrt_4_(x.b), vec_sqrt_4_(x.c), vec_sqrt_4_(x.d)};
}
VEC_INLINE vec4_
vec_choose_4_(vec4i_ mask, vec4_ x, vec4_ y)
{
    return (vec4_)(((vec4i_)x & mask) | ((vec4i_)y & ~mask));
}
/* Like x86: where either is NaN the result is y. */
#define VEC_MAX_(q, x, y) vec_choose_4_((x).q > (y).q, (x).q, (y).q)
#define VEC_MIN_(q, x, y) vec_choose_4_((x).q < (y).q, (x).q, (y).q)
VEC_INLINE vf16
vec_max(vf16 x, vf16 y)
{
    return VEC_MAP_(VEC_MAX_, x, y);
}
VEC_INLINE vf16
vec_min(vf16 x, vf16 y)
{
    return VEC_MAP_(VEC_MIN_, x, y);
}
VEC_INLINE vec4_
vec_fma_4_(vec4_ x, vec4_ y, vec4_ z)
{
#if defined(__aarch64__)
    return (vec4_)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#elif defined(__FP_FAST_FMAF)
    return (vec4_){__builtin_fmaf(x[0], y[0], z[0]), __builtin_fmaf(x[1], y[1], z[1]),
                   __builtin_fmaf(x[2], y[2], z[2]), __builtin_fmaf(x[3], y[3], z[3])};
#else
    return x * y + z;
#endif
}
#define VEC_FMA_(q, x, y, z) vec_fma_4_((x).q, (y).q, (z).q)
#define VEC_FNMA_(q, x, y, z) vec_fma_4_(-(x).q, (y).q, (z).q)
VEC_INLINE vf16
vec_fma(vf16 x, vf16 y, vf16 z)
{
    return VEC_MAP_(VEC_FMA_, x, y, z);
}
VEC_INLINE vf16
vec_fnma(vf16 x, vf16 y, vf16 z)
{
    return VEC_MAP_(VEC_FNMA_, x, y, z);
}
#define VEC_SHIFT_(q, x, bits) (vec4_)((vec4u_)(x).q + ((vec4u_)(bits).q << 23)) /* unsigned: a NaN's bits may run over */
VEC_INLINE vf16
vec_shift_exponent(vf16 x, vf16 bits)
{
    return VEC_MAP_(VEC_SHIFT_, x, bits);
}
#define VEC_KEEP_(q, x, y) (vec4_)((vec4i_)(x).q & ~(((x).q < (y).q) & (-(x).q < (y).q)))
VEC_INLINE vf16
vec_keep(vf16 x, vf16 least)
{
    return VEC_MAP_(VEC_KEEP_, x, least);
}
VEC_INLINE int
vec_all_equal(vf16 x, vf16 y)
{
    vec4i_ all = (x.a == y.a) & (x.b == y.b) & (x.c == y.c) & (x.d == y.d);
    return (all[0] & all[1] & all[2] & all[3]) != 0;
}
#endif

/* ---- the same everywhere ------------------------------------------------------------------------------------------ *
 * vec_load_n, vec_store_n: the first n lanes (0..16), nothing else is touched, the others load as zero.
 * vec_first_n(v, n, other): v in the lanes below n, other above. vec_max, vec_min: NaN in the second operand wins.
 * vec_keep(a, least): a where |a| is not below `least` (NaN stays), zero in the other lanes.
 * vec_shift_exponent(a, bits): a * 2^(low bits of `bits` as an integer), for normal results. */

VEC_INLINE vf16
vec_zero(void)
{
    return vec_set1(0.0f);
}

/* Sum and largest of the lanes: lane i with i + 8, then + 4, + 2, + 1. */
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
VEC_INLINE float
vec_sum(vf16 v)
{
    __m256 low, high;
    vec_halves_(v, &low, &high);
    __m256 eight = _mm256_add_ps(low, high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
VEC_INLINE float
vec_max_lane(vf16 v)
{
    __m256 low, high;
    vec_halves_(v, &low, &high);
    __m256 eight = _mm256_max_ps(low, high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
VEC_INLINE float
vec_sum(vf16 v)
{
    vec4_ four = (v.a + v.c) + (v.b + v.d);
    return (four[0] + four[2]) + (four[1] + four[3]);
}
VEC_INLINE float
vec_max_lane(vf16 v)
{
    vec4_ ac = vec_choose_4_(v.a > v.c, v.a, v.c), bd = vec_choose_4_(v.b > v.d, v.b, v.d);
    vec4_ four = vec_choose_4_(ac > bd, ac, bd);
    float even = four[0] > four[2] ? four[0] : four[2], odd = four[1] > four[3] ? four[1] : four[3];
    return even > odd ? even : odd;
}
#endif

/* Adding then subtracting 1.5 * 2^23 rounds to an integer, left in the low bits. */
#define VEC_ROUNDER 12582912.0f

/* 2^n (1 + f P(f)), |f| <= 1/2: a minimax fit of our own in relative error, 1.6e-8 before rounding; rounder holds n in
 * its low bits. */
VEC_INLINE vf16
vec_exp2_reduced_(vf16 f, vf16 rounded)
{
    vf16 p = vec_set1(0x1.41fbbcp-13f);
    p = vec_fma(p, f, vec_set1(0x1.5f3e52p-10f));
    p = vec_fma(p, f, vec_set1(0x1.3b2d4cp-7f));
    p = vec_fma(p, f, vec_set1(0x1.c6aee8p-5f));
    p = vec_fma(p, f, vec_set1(0x1.ebfbdcp-3f));
    p = vec_fma(p, f, vec_set1(0x1.62e430p-1f));
    p = vec_fma(p, f, vec_set1(1.0f));
    return vec_shift_exponent(p, rounded);
}

/* 2^x; x is held to [-126, 126], so that every result is a normal number. NaN stays NaN. */
VEC_INLINE vf16
vec_exp2(vf16 x)
{
    x = vec_min(vec_set1(126.0f), vec_max(vec_set1(-126.0f), x));
    vf16 rounded = vec_add(x, vec_set1(VEC_ROUNDER));
    return vec_exp2_reduced_(vec_sub(x, vec_sub(rounded, vec_set1(VEC_ROUNDER))), rounded);
}

/* 2^x for x <= 126, without the upper limit: softmax's. */
VEC_INLINE vf16
vec_exp2_low(vf16 x)
{
    x = vec_max(vec_set1(-126.0f), x);
    vf16 rounded = vec_add(x, vec_set1(VEC_ROUNDER));
    return vec_exp2_reduced_(vec_sub(x, vec_sub(rounded, vec_set1(VEC_ROUNDER))), rounded);
}

/* e^x; x is held to [-87.3, 87.3]. log2(e) in two parts keeps the relative error near one unit for large |x| too. */
VEC_INLINE vf16
vec_exp(vf16 x)
{
    x = vec_min(vec_set1(87.3f), vec_max(vec_set1(-87.3f), x));
    vf16 rounded = vec_fma(x, vec_set1(0x1.715476p+0f), vec_set1(VEC_ROUNDER));
    vf16 f = vec_fma(x, vec_set1(0x1.715476p+0f), vec_sub(vec_set1(VEC_ROUNDER), rounded));
    return vec_exp2_reduced_(vec_fma(x, vec_set1(0x1.4ae0c0p-26f), f), rounded);
}

/* GELU's tanh form (Hendrycks & Gimpel 2016): x (1 + tanh u) / 2 = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3).
 * VEC_GELU_* are -2 u's coefficients in log2: sqrt(8/pi) log2(e), and the same * 0.044715. */
#define VEC_GELU_1 2.302208198f
#define VEC_GELU_3 0.1029432396f
#define VEC_LN2 0.6931471806f

VEC_INLINE vf16
vec_gelu(vf16 x)
{
    vf16 slope = vec_fma(vec_mul(x, x), vec_set1(-VEC_GELU_3), vec_set1(-VEC_GELU_1));
    return vec_div(x, vec_add(vec_exp2(vec_mul(x, slope)), vec_set1(1.0f)));
}

/* GELU's derivative: s + x s (1 - s) 2u', s = 1 / (1 + e), 1 - s = e s, e = e^-2u. x is held to where e has long been at its
 * limit, and the second term is below 1e-24: it grows as x^3, to infinity. */
VEC_INLINE vf16
vec_dgelu(vf16 x)
{
    x = vec_min(vec_set1(65536.0f), vec_max(vec_set1(-65536.0f), x));
    vf16 xx = vec_mul(x, x);
    vf16 e = vec_exp2(vec_mul(x, vec_fma(xx, vec_set1(-VEC_GELU_3), vec_set1(-VEC_GELU_1))));
    vf16 s = vec_div(vec_set1(1.0f), vec_add(e, vec_set1(1.0f)));
    vf16 twice = vec_fma(xx, vec_set1(3.0f * VEC_GELU_3 * VEC_LN2), vec_set1(VEC_GELU_1 * VEC_LN2));
    vf16 weight = vec_mul(vec_mul(e, s), vec_mul(s, x));
    return vec_fma(weight, twice, s);
}

#endif
