/* The inner loops of the slice searches, once per instruction set. All of them give the same bits: a kernel only adds,
 * compares and takes minima, and never fuses a multiplication.
 *
 * Why additions alone: with q[e] = a3 e^2 / 2, h[i] = g1[i] - a3 i^2 / 2 and u[e] = S[e] - q[e], the product in the
 * cost telescopes, because i j = (e^2 - j^2 - i^2) / 2 for e = i + j:
 *     S[j] + g1[i] + a2 j + a3 i j = (u[j] + a2 j) + h[i] + q[e].
 * Every search is then a windowed (min, +) product with one vector h. A dense table is the case q = 0, a2 = 0 with one
 * h per source. */
#ifndef TP_PLAN_SLICE_KERNEL_H
#define TP_PLAN_SLICE_KERNEL_H

#include <stdint.h>

#include "csrc/plan/plan.h"

#define TP_SLICE_BLOCK 8   /* sources relaxed at once */
#define TP_SLICE_LIMITS 4  /* of a mask */
#define TP_SLICE_PAD 16    /* doubles that every array has beyond its end, because kernels round up to whole vectors */

/* An edge counts only if h[l][k] <= theta[l] - q[l][k] for every l < limits. */
typedef struct {
    int limits; /* 0 .. TP_SLICE_LIMITS */
    const double *h[TP_SLICE_LIMITS], *q[TP_SLICE_LIMITS];
    double theta[TP_SLICE_LIMITS][TP_SLICE_BLOCK];
} tp_slice_mask;

typedef struct {
    /* u[k] = min(u[k], p[a] + h[k - a]) for a < 8, 0 <= k < count rounded up to whole vectors. */
    void (*relax_block)(double *u, const double *h, const double *p, const tp_slice_mask *mask, int64_t count);
    /* u[k] = min(u[k], p + h[k]); theta[l][0] alone is used. */
    void (*relax)(double *u, const double *h, double p, const tp_slice_mask *mask, int64_t count);
    /* min over k of h[k] + w[k]. */
    double (*least)(const double *h, const double *w, const tp_slice_mask *mask, int64_t count);
    /* u[k] = min(u[k], p + c (s + n[k])) with c = g[k] + b + d (k + 1), where c <= t. */
    void (*relax_weighted)(double *u, const double *g, const double *n, const double *pbdst, int64_t count);
    /* The k + 1 with h[k] + w[k] < below, ascending, into out; returns how many. w is +inf beyond the count. */
    int (*pick)(const double *h, const double *w, double below, int count, int *out);
    int lanes;
} tp_slice_kernels;

/* NULL if this machine lacks it. */
const tp_slice_kernels *
tp_slice_kernels_for(tp_slice_isa isa);

#endif
