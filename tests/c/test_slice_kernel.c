/* The inner loops of the slice searches against plain loops, bit for bit, on every instruction set, in arrays that end where
 * the kernels may read no further: run it under ASan. Then whole plans, which are the same on each. */
#include "csrc/base/deadline.h"
#include "csrc/plan/plan.h"
#include "csrc/plan/slice_dp.h"
#include "csrc/plan/slice_kernel.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 70, ROUNDS = 400, PLANS = 150 };
static int failures;
static uint64_t seed = 1;

static double
next(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(seed >> 11) * 0x1p-53;
}

/* [behind + n], the first `behind` before what is returned; some are infinite, and few values are common. */
static double *
numbers(int behind, int n, double infinite)
{
    double *v = malloc((size_t)(behind + n) * sizeof *v);
    for (int i = 0; i < behind + n; i++) {
        double x = next();
        v[i] = next() < infinite ? INFINITY : next() < 0.5 ? x : floor(4.0 * x);
    }
    return v + behind;
}

/* A bound that is sometimes met exactly. */
static double
bound(void)
{
    return next() < 0.5 ? 2.0 * next() : floor(4.0 * next());
}

static void
release(double *v, int behind)
{
    free(v - behind);
}

static void
expect_same(const char *what, int isa, int count, const void *a, const void *b, size_t bytes)
{
    if (memcmp(a, b, bytes) == 0)
        return;
    failures++;
    fprintf(stderr, "%s of %d on instruction set %d differs from the plain loop\n", what, count, isa);
}

static int
allowed(const tp_slice_mask *mask, int a, int k)
{
    for (int l = 0; l < mask->limits; l++)
        if (!(mask->h[l][k - a] <= mask->theta[l][a] - mask->q[l][k]))
            return 0;
    return 1;
}

static void
check_relax(const tp_slice_kernels *kernels, int isa, int count, const tp_slice_mask *mask, const double *h)
{
    int whole = (count + kernels->lanes - 1) / kernels->lanes * kernels->lanes;
    double *p = numbers(0, TP_SLICE_BLOCK, 0.2), *u = numbers(0, whole, 0.3), *one = malloc((size_t)(whole + 1) * sizeof *u);
    double *want = malloc((size_t)(whole + 1) * sizeof *want);
    for (int sources = 1; sources <= TP_SLICE_BLOCK; sources += TP_SLICE_BLOCK - 1) {
        for (int k = 0; k < whole; k++) {
            want[k] = one[k] = u[k];
            for (int a = 0; a < sources; a++)
                if (allowed(mask, a, k) && p[a] + h[k - a] < want[k])
                    want[k] = p[a] + h[k - a];
        }
        if (sources == 1)
            kernels->relax(one, h, p[0], mask, count);
        else
            kernels->relax_block(one, h, p, mask, count);
        expect_same(sources == 1 ? "relax" : "relax_block", isa, count, one, want, (size_t)whole * sizeof *want);
    }
    release(p, 0), release(u, 0), free(one), free(want);
}

static void
check_least(const tp_slice_kernels *kernels, int isa, int count, const tp_slice_mask *mask, const double *h)
{
    int whole = (count + kernels->lanes - 1) / kernels->lanes * kernels->lanes, picked = 0, out[MOST + 2 * 16];
    double *w = numbers(0, whole, 0.2), below = bound(), least = INFINITY;
    for (int k = 0; k < whole; k++)
        if (allowed(mask, 0, k) && h[k] + w[k] < least)
            least = h[k] + w[k];
    double got = kernels->least(h, w, mask, count);
    expect_same("least", isa, count, &got, &least, sizeof got);
    int many = kernels->pick(h, w, below, count, out);
    for (int k = 0; k < whole; k++)
        if (h[k] + w[k] < below && (picked >= many || out[picked] != k + 1))
            picked = many + 1;
        else
            picked += h[k] + w[k] < below;
    if (picked != many) {
        failures++;
        fprintf(stderr, "pick of %d on instruction set %d takes others\n", count, isa);
    }
    release(w, 0);
}

static void
check_weighted(const tp_slice_kernels *kernels, int isa, int count)
{
    int whole = (count + kernels->lanes - 1) / kernels->lanes * kernels->lanes;
    double *u = numbers(0, whole, 0.3), *g = numbers(0, whole, 0.1), *n = numbers(0, whole, 0.0);
    double *want = malloc((size_t)(whole + 1) * sizeof *want), set[5];
    for (int i = 0; i < 5; i++)
        set[i] = i == 4 ? 1.0 + 20.0 * next() : next();
    for (int k = 0; k < whole; k++) {
        volatile double rise = set[2] * (k + 1); /* rounded, not fused */
        double c = g[k] + set[1] + rise;
        volatile double weighted = c * (set[3] + n[k]);
        want[k] = c <= set[4] && set[0] + weighted < u[k] ? set[0] + weighted : u[k];
    }
    kernels->relax_weighted(u, g, n, set, count);
    expect_same("relax_weighted", isa, count, u, want, (size_t)whole * sizeof *want);
    release(u, 0), release(g, 0), release(n, 0), free(want);
}

static void
check_kernels(const tp_slice_kernels *kernels, int isa)
{
    const int behind = TP_SLICE_BLOCK - 1;
    for (int round = 0; round < ROUNDS; round++) {
        int count = 1 + (int)(next() * (double)MOST), whole = (count + kernels->lanes - 1) / kernels->lanes * kernels->lanes;
        double *h = numbers(behind, whole, 0.2), *limit[TP_SLICE_LIMITS], *q[TP_SLICE_LIMITS];
        tp_slice_mask mask = {.limits = round % (TP_SLICE_LIMITS + 1)};
        for (int l = 0; l < TP_SLICE_LIMITS; l++) {
            mask.h[l] = limit[l] = numbers(behind, whole, 0.2);
            mask.q[l] = q[l] = numbers(0, whole, 0.0);
            for (int a = 0; a < TP_SLICE_BLOCK; a++)
                mask.theta[l][a] = bound();
        }
        check_relax(kernels, isa, count, &mask, h);
        check_least(kernels, isa, count, &mask, h);
        check_weighted(kernels, isa, count);
        release(h, behind);
        for (int l = 0; l < TP_SLICE_LIMITS; l++)
            release(limit[l], behind), release(q[l], 0);
    }
}

/* One random cost, planned on every instruction set. */
static void
check_plan(int i)
{
    int units = 1 + (int)(next() * 2.0 * (double)MOST);
    double *g = numbers(0, units + 1, 0.0), first = 0.0;
    for (int k = 0; k <= units; k++)
        g[k] = 0.3 + 0.01 * k + (i % 2 ? 0.05 * g[k] : 0.0);
    tp_slice_cost cost = {.units = units, .g0 = g, .g1 = g, .a2 = 0.001 * next(), .a3 = 1e-4 * next()};
    tp_slice_cost backward = {.units = units, .g0 = g, .g1 = g, .a2 = 0.002 * next(), .a3 = 2e-4 * next()};
    tp_slice_options options = {.stages = 1 + (int)(next() * 60), .longest = i % 4 ? 0 : 1 + units / 2};
    for (int isa = TP_SLICE_ISA_PORTABLE; isa <= TP_SLICE_ISA_AVX512; isa++) {
        tp_slice_plan plan;
        options.isa = (tp_slice_isa)isa;
        if (tp_slice_kernels_for(options.isa) == NULL)
            continue;
        if ((i % 3 ? tp_plan_slices(&cost, 1, &options, &plan) : tp_plan_slices_apart(&cost, &backward, &options, &plan)) !=
            TP_OK) {
            failures++;
            fprintf(stderr, "plan of %d units on instruction set %d: %s\n", units, isa, tp_error_message());
            continue;
        }
        if (isa == TP_SLICE_ISA_PORTABLE)
            first = plan.latency_s;
        expect_same("the plan's latency", isa, units, &plan.latency_s, &first, sizeof first);
        tp_slice_plan_free(&plan);
    }
    release(g, 0);
}

/* Another thread may write NaN into a table that has been checked: what comes out means nothing, but the search ends, within its
 * memory. */
static void
check_torn_table(void)
{
    enum { UNITS = 40 };
    static double table[(UNITS + 1) * (UNITS + 1)];
    const double any[TP_SLICE_LIMITS] = {INFINITY, INFINITY};
    tp_slice_cost cost = {.units = UNITS, .table = table};
    tp_slice_options options = {.stages = 4};
    tp_arena arena;
    tp_slice_dp dp;
    int length[UNITS + 1], sum = 0;
    for (int k = 0; k < (UNITS + 1) * (UNITS + 1); k++)
        table[k] = 1.0 + 0.01 * k;
    if (tp_arena_open(&arena) != TP_OK || tp_slice_dp_open(&arena, &cost, NULL, &options, INFINITY, &dp) != TP_OK) {
        failures++;
        return;
    }
    for (size_t at = 0; at < dp.sum.row[UNITS]; at++)
        dp.sum.rows[at] = NAN;
    tp_slice_dp_forward(&dp, any);
    int count = tp_slice_dp_path(&dp, length);
    for (int k = 0; k < count; k++)
        sum += length[k];
    if (count < 1 || sum != UNITS) {
        failures++;
        fprintf(stderr, "of a torn table %d slices sum to %d units\n", count, sum);
    }
    tp_arena_close(&arena);
}

/* Of a limit that is up at once: a long bound ends and is a true one, and units so fine that one search of them takes long are not
 * searched. */
static void
check_limit(void)
{
    enum { MANY = 16384 };
    double *g = numbers(0, MANY + 1, 0.0), *eighth = numbers(0, MANY / 8 + 1, 0.0), ends[2] = {0.0, 0.0};
    int64_t before = tp_deadline_steps, asked[2];
    int whole = MANY;
    tp_slice_options options = {.stages = 2};
    const tp_slice_cost fine = {.units = MANY, .g0 = g, .g1 = g, .a3 = 2e-10};
    const tp_slice_cost coarse = {.units = MANY / 8, .g0 = eighth, .g1 = eighth, .a3 = 64 * 2e-10};
    tp_slice_plan plan[2] = {0};
    for (int i = 0; i <= MANY; i++)
        g[i] = 1e-5 + 1e-6 * i;
    for (int i = 0; i <= MANY / 8; i++)
        eighth[i] = g[8 * i];
    tp_deadline_steps = 256;
    for (int hurried = 0; hurried < 2; hurried++) {
        options.time_limit_s = hurried ? 1e-9 : 0.0;
        tp_deadline_count(1);
        tp_deadline_set(INT64_MAX);
        int abandons = tp_deadline_abandon(1);
        failures += tp_slice_bound(&fine, &options, &whole, 1, &ends[hurried]) != TP_OK;
        tp_deadline_abandon(abandons);
        asked[hurried] = tp_deadline_now();
        tp_deadline_set(0);
        tp_deadline_count(0);
    }
    tp_deadline_steps = before;
    if (asked[0] < 20 * asked[1] || !(ends[1] > 0.4 * ends[0] && ends[1] <= ends[0])) {
        failures++;
        fprintf(stderr, "bounds of %g and %g s asked %lld and %lld times\n", ends[0], ends[1], (long long)asked[0],
                (long long)asked[1]);
    }
    for (int apart = 0; apart < 2; apart++) {
        tp_status first = apart ? tp_plan_slices_apart(&fine, &fine, &options, &plan[0]) : tp_plan_slices(&fine, 1, &options, &plan[0]);
        tp_status second =
            apart ? tp_plan_slices_apart(&coarse, &coarse, &options, &plan[1]) : tp_plan_slices(&coarse, 1, &options, &plan[1]);
        if (first != TP_OK || second != TP_OK || plan[0].searches > plan[1].searches || plan[0].slices != plan[1].slices ||
            plan[0].length[0] != 8 * plan[1].length[0] || plan[0].lower_bound_s > plan[0].latency_s || plan[0].optimal) {
            failures++;
            fprintf(stderr, "%lld searches, %lld of coarse units\n", (long long)plan[0].searches, (long long)plan[1].searches);
        }
        tp_slice_plan_free(&plan[0]);
        tp_slice_plan_free(&plan[1]);
    }
    release(eighth, 0);
    release(g, 0);
}

/* Of a limit that is up at once, where the fastest plan is known: units that cost the same take their sum and, K - 1 times, one;
 * where each slice takes as long as a quarter of them more, and K is 2, two halves are it, which are not of coarse units here. */
static void
check_bounds_at_the_limit(void)
{
    enum { MANY = 16392, K = 8 };
    const double unit_s = 1e-6, fastest_s = unit_s * (double)(MANY + K - 1), halved_s = 2.0 * unit_s * (double)MANY * 2.25;
    double *g = numbers(0, MANY + 1, 0.0), bound_s = 0.0;
    int64_t before = tp_deadline_steps;
    int whole = MANY;
    tp_slice_options options = {.stages = K, .time_limit_s = 1e-9};
    const tp_slice_cost cost = {.units = MANY, .g0 = g, .g1 = g};
    tp_slice_plan plan = {0};
    for (int i = 0; i <= MANY; i++)
        g[i] = unit_s * i;
    tp_deadline_steps = 256; /* a bound may end after 2^21 of the 2^27 steps of all */
    failures += tp_slice_bound(&cost, &options, &whole, 1, &bound_s) != TP_OK;
    tp_deadline_steps = before;
    for (int i = 0; i <= MANY; i++)
        g[i] += 0.25 * unit_s * (double)MANY;
    options.stages = 2;
    failures += tp_plan_slices_apart(&cost, &cost, &options, &plan) != TP_OK;
    if (bound_s > fastest_s || bound_s < 0.9 * fastest_s || plan.lower_bound_s > halved_s * (1.0 + 1e-12) ||
        plan.latency_s < halved_s * (1.0 + 1e-6)) {
        failures++;
        fprintf(stderr, "bounds of %g and %.9g s where %g and %.9g are possible\n", bound_s, plan.lower_bound_s, fastest_s,
                halved_s);
    }
    tp_slice_plan_free(&plan);
    release(g, 0);
}

int
main(void)
{
    check_torn_table();
    check_limit();
    check_bounds_at_the_limit();
    for (int isa = TP_SLICE_ISA_PORTABLE; isa <= TP_SLICE_ISA_AVX512; isa++) {
        const tp_slice_kernels *kernels = tp_slice_kernels_for((tp_slice_isa)isa);
        if (kernels != NULL)
            check_kernels(kernels, isa);
    }
    for (int i = 0; i < PLANS; i++)
        check_plan(i);
    return failures != 0;
}
