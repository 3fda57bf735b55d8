/* Attention rows whose scores are so large that an lse, or a product with log2(e), has its last bit far above theirs. */
#ifndef TP_CPU_ATTENTION_WIDE_H
#define TP_CPU_ATTENTION_WIDE_H

#include "csrc/cpu/attention_tile.h"

#include <math.h>

/* A power of two, or an lse, from which on its rounding shows in P: by 1e-5 of it, and by twice that with each doubling. What is
 * smaller is what fused multiplications take. */
#define ATTENTION_WIDE 256.0f
/* From here on an lse is off by so many powers of two that no float holds P: the row is NaN, which ends a step with words. */
#define ATTENTION_MOST 0x1p29f

static inline int
is_wide(float lse)
{
    return __builtin_expect(fabsf(lse) >= ATTENTION_WIDE, 0) != 0;
}

/* A row of scores, less by one of about their size: these differences are exact where P is not nothing. */
static __attribute__((noinline, cold)) void
take_from_row(float *scores, float from)
{
    for (int64_t j = 0; j < TILE; j += VEC_LANES)
        vec_store(scores + j, vec_sub(vec_load(scores + j), vec_set1(from)));
}

/* *sum (lane i the keys = i mod 16) += P of a row as its lse gives it. The first `seen` keys are visible. */
static __attribute__((noinline, cold)) void
add_up_row(float *scores, int64_t seen, float lse, float scale, float scale2, float *sum)
{
    vf16 total = vec_load(sum);
    take_from_row(scores, lse / scale);
    for (int64_t j = 0; j < seen; j += VEC_LANES) {
        vf16 p = vec_exp2_low(vec_mul(vec_load(scores + j), vec_set1(scale2)));
        total = vec_add(total, vec_first_n(p, tile_lanes(seen, j), vec_zero()));
    }
    vec_store(sum, total);
}

#endif
