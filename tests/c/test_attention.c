/* Attention against float64, and against itself: the same bits for every slicing, team and x86 instruction set; nothing
 * read before it was there or after it went, nothing written where it may not be. What a call may not read is NaN, and so
 * are the workspace and the outputs before it. Prints one line per failure; exit code 1 if there was one. */
#include "csrc/backend/backend.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOLERANCE 1e-5 /* of the norm */
#define QKV_GAP 3      /* floats between rows that belong to nobody */
#define O_GAP 1

static int failures;

typedef struct {
    int64_t batch, heads, dim, total;
    float rise; /* late keys are this much longer: 0, or enough to make running maxima move */
} problem;

typedef struct {
    float *o, *lse, *dqkv; /* as the backend lays them out, and delta */
    float *delta;
} answer;

typedef struct {
    const char *isa;
    int threads;
    const int64_t *ends; /* of the slices; the last is total */
    const char *what;
} setting;

static int64_t
o_stride(const problem *p)
{
    return p->heads * p->dim + O_GAP;
}

static int64_t
qkv_stride(const problem *p)
{
    return 3 * p->heads * p->dim + QKV_GAP;
}

static int64_t
rows_of(const problem *p)
{
    return p->batch * p->total;
}

/* All bits set is a NaN; and a sanitizer sees one call, not a store per float. */
static void
poison(void *v, size_t bytes)
{
    memset(v, 0xff, bytes);
}

static float *
poisoned(int64_t n)
{
    float *v = malloc((size_t)(n > 0 ? n : 1) * sizeof *v);
    if (v == NULL)
        exit(99);
    poison(v, (size_t)n * sizeof *v);
    return v;
}

static float *
numbers(int64_t n, uint32_t seed)
{
    float *v = poisoned(n);
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        v[i] = (float)(int32_t)(seed ^ seed >> 15) * 0x1p-30f;
    }
    return v;
}

static void
fail(const problem *p, const setting *s, const char *what, double value)
{
    failures++;
    fprintf(stderr, "%s, %d threads, %s, B %" PRId64 " H %" PRId64 " D %" PRId64 " T %" PRId64 " rise %g: %s (%g)\n", s->isa,
            s->threads, s->what, p->batch, p->heads, p->dim, p->total, (double)p->rise, what, value);
}

/* Only the rows of tokens [first, last) are copied: the rest stays NaN. */
static void
arrive(const problem *p, int64_t stride, int64_t first, int64_t last, const float *from, float *to)
{
    int64_t at = first * p->batch * stride;
    memcpy(to + at, from + at, (size_t)((last - first) * p->batch * stride) * sizeof *to);
}

/* ---- float64 ------------------------------------------------------------------------------------------------------------ */

/* Adds one head's gradients; every pointer at token 0 of the sequence and head. */
static void
reference_head(const problem *p, const float *qkv, const float *d_out, double *o, double *lse, double *dqkv, double *weights)
{
    int64_t n = p->total, dim = p->dim, row = p->batch * qkv_stride(p), o_row = p->batch * o_stride(p);
    int64_t k_at = p->heads * dim, v_at = 2 * p->heads * dim;
    double scale = 1.0 / sqrt((double)dim);
    for (int64_t t = 0; t < n; t++) {
        double most = -INFINITY, sum = 0.0, delta = 0.0;
        for (int64_t j = 0; j <= t; j++) {
            double s = 0.0;
            for (int64_t d = 0; d < dim; d++)
                s += (double)qkv[t * row + d] * (double)qkv[j * row + k_at + d];
            weights[j] = s * scale;
            most = fmax(most, weights[j]);
        }
        for (int64_t j = 0; j <= t; j++)
            sum += weights[j] = exp(weights[j] - most);
        lse[t] = most + log(sum);
        for (int64_t j = 0; j <= t; j++)
            for (int64_t d = 0; d < dim; d++)
                o[t * o_row + d] += weights[j] / sum * (double)qkv[j * row + v_at + d];
        for (int64_t d = 0; d < dim; d++)
            delta += o[t * o_row + d] * (double)d_out[t * o_row + d];
        for (int64_t j = 0; j <= t; j++) {
            double product = 0.0, w = weights[j] / sum;
            for (int64_t d = 0; d < dim; d++)
                product += (double)d_out[t * o_row + d] * (double)qkv[j * row + v_at + d];
            double ds = w * (product - delta) * scale;
            for (int64_t d = 0; d < dim; d++) {
                dqkv[t * row + d] += ds * (double)qkv[j * row + k_at + d];
                dqkv[j * row + k_at + d] += ds * (double)qkv[t * row + d];
                dqkv[j * row + v_at + d] += w * (double)d_out[t * o_row + d];
            }
        }
    }
}

/* NaN where the backend wrote what is nobody's; the relative error of the norm elsewhere. width: floats of a row in use. */
static void
compare(const problem *p, const setting *s, const char *what, int64_t first, int64_t width, int64_t stride, int64_t rows,
        const float *got, const double *expected)
{
    double error = 0.0, norm = 0.0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = first; i < first + width; i++) {
            double e = (double)got[r * stride + i] - expected[r * stride + i];
            error += e * e;
            norm += expected[r * stride + i] * expected[r * stride + i];
        }
    if (!(sqrt(error) <= TOLERANCE * sqrt(norm) + 1e-12))
        fail(p, s, what, sqrt(error / norm));
    if (getenv("TEST_ATTENTION_ERRORS") != NULL)
        printf("%s %s D %" PRId64 " T %" PRId64 " rise %g: %.2e\n", s->isa, what, p->dim, p->total, (double)p->rise,
               sqrt(error / norm));
}

static void
check_reference(const problem *p, const setting *s, const float *qkv, const float *d_out, const answer *got)
{
    int64_t rows = rows_of(p), width = p->heads * p->dim, stats = rows * p->heads;
    double *o = calloc((size_t)(rows * o_stride(p)), sizeof *o), *dqkv = calloc((size_t)(rows * qkv_stride(p)), sizeof *dqkv);
    double *lse = calloc((size_t)stats, sizeof *lse), *weights = calloc((size_t)p->total, sizeof *weights);
    if (o == NULL || dqkv == NULL || lse == NULL || weights == NULL)
        exit(99);
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t h = 0; h < p->heads; h++) {
            int64_t at = b * qkv_stride(p) + h * p->dim, o_at = b * o_stride(p) + h * p->dim;
            reference_head(p, qkv + at, d_out + o_at, o + o_at, lse + (b * p->heads + h) * p->total, dqkv + at, weights);
        }
    compare(p, s, "o", 0, width, o_stride(p), rows, got->o, o);
    compare(p, s, "lse", 0, 1, 1, stats, got->lse, lse);
    compare(p, s, "dq", 0, width, qkv_stride(p), rows, got->dqkv, dqkv);
    compare(p, s, "dk", width, width, qkv_stride(p), rows, got->dqkv, dqkv);
    compare(p, s, "dv", 2 * width, width, qkv_stride(p), rows, got->dqkv, dqkv);
    free(o), free(dqkv), free(lse), free(weights);
}

/* ---- the backend ---------------------------------------------------------------------------------------------------------- */

/* Outside tokens [first, last) columns [begin, end) of `now` must have `before`'s bits. */
static void
check_untouched(const problem *p, const setting *s, const char *what, int64_t stride, int64_t begin, int64_t end, int64_t first,
                int64_t last, const float *before, const float *now)
{
    for (int64_t r = 0; r < rows_of(p); r++) {
        int64_t t = r / p->batch, at = r * stride + begin;
        if ((t < first || t >= last) && memcmp(before + at, now + at, (size_t)(end - begin) * sizeof *now) != 0) {
            fail(p, s, what, (double)t);
            return;
        }
    }
}

static void
check_untouched_stats(const problem *p, const setting *s, const char *what, int64_t first, int64_t last, const float *before,
                      const float *now)
{
    for (int64_t i = 0; i < rows_of(p) * p->heads; i++)
        if ((i % p->total < first || i % p->total >= last) && memcmp(before + i, now + i, sizeof *now) != 0) {
            fail(p, s, what, (double)(i % p->total));
            return;
        }
}

static float *
copy_of(const float *v, int64_t n)
{
    float *copy = poisoned(n);
    memcpy(copy, v, (size_t)n * sizeof *v);
    return copy;
}

static tp_attention
shape_of(const problem *p, int64_t first, int64_t last)
{
    return (tp_attention){.batch = p->batch, .heads = p->heads, .head_dim = p->dim, .slice = last - first, .context = first,
                          .total = p->total, .qkv_stride = qkv_stride(p), .o_stride = o_stride(p)};
}

/* Columns [at, at + columns) of rows [first, last) of q, k and v, in an array of their own. */
static float *
apart(const problem *p, const float *from, int64_t first, int64_t last, int64_t at, int64_t columns, int64_t stride)
{
    float *to = poisoned((last - first) * stride);
    for (int64_t r = first; r < last; r++)
        memcpy(to + (r - first) * stride, from + r * qkv_stride(p) + at, (size_t)columns * sizeof *to);
    return to;
}

/* q is in an array of the slice, keys and values in another one, with other strides. */
static void
run_forward(tp_backend *be, const problem *p, const setting *s, const float *qkv, answer *out)
{
    int64_t rows = rows_of(p), width = p->heads * p->dim;
    float *here = poisoned(rows * qkv_stride(p));
    for (int64_t first = 0, i = 0; first < p->total; first = s->ends[i++]) {
        tp_attention shape = shape_of(p, first, s->ends[i]);
        float *o = copy_of(out->o, rows * o_stride(p)), *lse = copy_of(out->lse, rows * p->heads);
        arrive(p, qkv_stride(p), first, s->ends[i], qkv, here);
        float *q = apart(p, here, first * p->batch, s->ends[i] * p->batch, 0, width, qkv_stride(p));
        float *kv = apart(p, here, 0, rows, width, 2 * width, 2 * width + 3);
        poison(be->workspace, be->workspace_bytes);
        be->ops->attention_forward(be, &shape, q, kv, kv + width, 2 * width + 3, out->o + first * p->batch * o_stride(p), out->lse);
        check_untouched(p, s, "o outside the slice", o_stride(p), 0, width, first, s->ends[i], o, out->o);
        check_untouched(p, s, "behind a row of o", o_stride(p), width, o_stride(p), 0, 0, o, out->o);
        check_untouched_stats(p, s, "lse outside the slice", first, s->ends[i], lse, out->lse);
        free(o), free(lse), free(q), free(kv);
    }
    free(here);
}

/* Columns [0, `columns`) of `rows` rows go to the columns of `to` from `at` on; behind them `from` must be what poison left. */
static void
take_columns(const problem *p, const setting *s, const float *from, int64_t stride, int64_t columns, int64_t rows, float *to,
             int64_t at)
{
    float *blank = poisoned(stride);
    for (int64_t r = 0; r < rows; r++) {
        memcpy(to + r * qkv_stride(p) + at, from + r * stride, (size_t)columns * sizeof *to);
        if (memcmp(blank, from + r * stride + columns, (size_t)(stride - columns) * sizeof *blank) != 0) {
            fail(p, s, "behind a row of gradients", (double)r);
            break;
        }
    }
    free(blank);
}

/* k and v, and dk and dv, are in arrays of their own, q, d_o and dq in arrays of the slice. */
static void
run_backward(tp_backend *be, const problem *p, const setting *s, const float *qkv, const float *d_out, answer *out)
{
    int64_t rows = rows_of(p), width = p->heads * p->dim, slices = 1, stride = qkv_stride(p), dkv_stride = 2 * width + 5;
    float *dkv = poisoned(rows * dkv_stride);
    while (s->ends[slices - 1] < p->total)
        slices++;
    for (int64_t i = slices - 1; i >= 0; i--) {
        int64_t first = i > 0 ? s->ends[i - 1] : 0, row = first * p->batch, count = s->ends[i] * p->batch - row;
        tp_attention shape = shape_of(p, first, s->ends[i]);
        float *before = copy_of(dkv, rows * dkv_stride), *delta = copy_of(out->delta, rows * p->heads);
        float *d_o = copy_of(d_out + row * o_stride(p), count * o_stride(p)), *dq = poisoned(count * stride);
        float *here = poisoned(rows * stride);
        arrive(p, stride, 0, s->ends[i], qkv, here);
        float *q = apart(p, here, row, row + count, 0, width, stride);
        float *kv = apart(p, here, 0, rows, width, 2 * width, 2 * width + 3);
        poison(be->workspace, be->workspace_bytes);
        be->ops->attention_backward(be, &shape, q, kv, kv + width, 2 * width + 3, out->o + row * o_stride(p), d_o, out->lse,
                                    out->delta, dq, dkv, dkv + width, dkv_stride);
        check_untouched(p, s, "dk, dv of later rows", dkv_stride, 0, 2 * width, 0, s->ends[i], before, dkv);
        check_untouched_stats(p, s, "delta outside the slice", first, s->ends[i], delta, out->delta);
        take_columns(p, s, dq, stride, width, count, out->dqkv + row * stride, 0);
        free(before), free(delta), free(d_o), free(dq), free(here), free(q), free(kv);
    }
    take_columns(p, s, dkv, dkv_stride, 2 * width, rows, out->dqkv, width);
    free(dkv);
}

/* The backend has exactly the workspace it asks for, for the longest slice of the setting. */
static answer
run(const problem *p, const setting *s, const float *qkv, const float *d_out)
{
    int64_t rows = rows_of(p), longest = s->ends[0], stats = rows * p->heads;
    answer out = {.o = poisoned(rows * o_stride(p)), .lse = poisoned(stats), .dqkv = poisoned(rows * qkv_stride(p)),
                  .delta = poisoned(stats)};
    tp_heap *heap = NULL;
    tp_team *team = NULL;
    tp_backend be;
    for (int64_t i = 0; s->ends[i] < p->total; i++)
        longest = s->ends[i + 1] - s->ends[i] > longest ? s->ends[i + 1] - s->ends[i] : longest;
    if (tp_heap_open(0, &heap) != TP_OK || tp_team_open(s->threads, &team) != TP_OK ||
        tp_cpu_open(s->isa, heap, team, &be) != TP_OK ||
        tp_backend_reserve(&be, be.ops->workspace_bytes(p->heads * p->dim, p->heads, 64, p->total, longest * p->batch,
                                                        s->threads)) != TP_OK) {
        fprintf(stderr, "%s\n", tp_error_message());
        exit(99);
    }
    run_forward(&be, p, s, qkv, &out);
    run_backward(&be, p, s, qkv, d_out, &out);
    tp_backend_close(&be);
    tp_team_close(team);
    tp_heap_close(heap);
    return out;
}

static void
discard(answer *a)
{
    free(a->o), free(a->lse), free(a->dqkv), free(a->delta);
}

static void
check_same(const problem *p, const setting *s, const answer *a, const answer *b)
{
    size_t stats = (size_t)(rows_of(p) * p->heads) * sizeof(float);
    if (memcmp(a->o, b->o, (size_t)(rows_of(p) * o_stride(p)) * sizeof(float)) != 0)
        fail(p, s, "o has other bits", 0);
    if (memcmp(a->lse, b->lse, stats) != 0)
        fail(p, s, "lse has other bits", 0);
    if (memcmp(a->delta, b->delta, stats) != 0)
        fail(p, s, "delta has other bits", 0);
    if (memcmp(a->dqkv, b->dqkv, (size_t)(rows_of(p) * qkv_stride(p)) * sizeof(float)) != 0)
        fail(p, s, "gradients have other bits", 0);
}

/* ---- problems ----------------------------------------------------------------------------------------------------------- */

#define MOST_TOKENS 256

/* Slices of `step` tokens, or of lengths 1, 2, 3, ... times an odd stride where step is 0. */
static const int64_t *
slices(int64_t total, int64_t step)
{
    static int64_t ends[MOST_TOKENS + 1];
    int64_t n = 0;
    for (int64_t at = 0; at < total; n++) {
        at += step > 0 ? step : 1 + n * 37 % 23 + (n == 3 ? 70 : 0);
        ends[n] = at < total ? at : total;
    }
    return ends;
}

static void
check_slicings(const char *isa, const problem *p, const float *qkv, const float *d_out, const answer *whole)
{
    static const int64_t steps[] = {1, 7, 16, 64, 100, 0};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        char what[32];
        if (steps[i] == 1 && p->total > 70)
            continue;
        snprintf(what, sizeof what, "slices of %" PRId64, steps[i]);
        setting s = {isa, 1 + (int)(i % 3), slices(p->total, steps[i]), what};
        answer sliced = run(p, &s, qkv, d_out);
        check_same(p, &s, whole, &sliced);
        discard(&sliced);
    }
}

static void
check_problem(const problem *p, int fully)
{
    static const char *const isas[] = {"avx512", "avx2", "portable", "amx"};
    int64_t rows = rows_of(p), width = p->heads * p->dim;
    float *qkv = numbers(rows * qkv_stride(p), 1), *d_out = numbers(rows * o_stride(p), 2);
    answer first = {NULL, NULL, NULL, NULL};
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < width; d++)
            qkv[r * qkv_stride(p) + width + d] *= 1.0f + p->rise * (float)(r / p->batch);
    for (int i = 0; i < 4; i++) {
        if (tp_cpu_ops(isas[i]) == NULL)
            continue;
        setting s = {isas[i], 1 + i, slices(p->total, p->total), "one slice"};
        answer whole = run(p, &s, qkv, d_out);
        check_reference(p, &s, qkv, d_out, &whole);
        if (fully)
            check_slicings(isas[i], p, qkv, d_out, &whole);
        if (first.o == NULL) {
            first = whole;
            continue;
        }
        s.what = "against avx512";
        if (strcmp(isas[i], "avx2") == 0)
            check_same(p, &s, &first, &whole);
        discard(&whole);
    }
    discard(&first);
    free(qkv), free(d_out);
}

/* Scores that differ by up to 18 in a row and are about 2^power / 2, all exact: an lse has its last bit far above theirs. */
static void
check_large(const char *isa, int power)
{
    const problem p = {2, 1, 4, 97, 0.0f};
    int64_t rows = rows_of(&p), stride = qkv_stride(&p);
    float *qkv = numbers(rows * stride, 1), *d_out = numbers(rows * o_stride(&p), 2);
    float far = power > 0 ? ldexpf(1.0f, power) : 0.0f;
    for (int64_t r = 0; r < rows; r++) {
        float *q = qkv + r * stride, *k = q + p.dim;
        const float query[] = {1.0f, r % 7 == 3 ? -far : far, 0.0f, 0.0f}, key[] = {(float)(r * 37 % 289) / 8.0f, 1.0f, 0.5f, 0.5f};
        memcpy(q, query, sizeof query);
        memcpy(k, key, sizeof key);
    }
    setting s = {isa, 2, slices(p.total, p.total), "large scores"};
    answer whole = run(&p, &s, qkv, d_out);
    if (power >= 30) {
        if (!isnan(whole.o[0]) || !isnan(whole.lse[0]) || !isnan(whole.dqkv[0]))
            fail(&p, &s, "no NaN where an lse does not give P back", (double)whole.o[0]);
    } else {
        check_reference(&p, &s, qkv, d_out, &whole);
        check_slicings(isa, &p, qkv, d_out, &whole);
    }
    discard(&whole);
    free(qkv), free(d_out);
}

int
main(void)
{
    static const problem problems[] = {
        {1, 1, 1, 1, 0.0f},   {1, 2, 5, 67, 0.0f},    {2, 3, 8, 130, 0.05f}, {3, 1, 16, 65, 0.0f},   {1, 2, 20, 97, 0.2f},
        {2, 2, 32, 64, 0.0f}, {2, 1, 64, 200, 0.02f}, {1, 3, 80, 129, 0.0f}, {1, 1, 128, 193, 0.1f}, {3, 3, 1, 33, 0.5f},
    };
    static const int64_t dims[] = {1, 5, 8, 16, 20, 32, 64, 80, 128};
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++)
        check_problem(&problems[i], 1);
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++)
        for (int64_t total = 2; total <= 128; total = total * 3 - 1) {
            problem p = {1 + (int64_t)i % 3, 1 + (int64_t)i % 2, dims[i], total, 0.0f};
            check_problem(&p, 0);
        }
    static const char *const isas[] = {"avx512", "avx2", "portable", "amx"};
    static const int powers[] = {0, 9, 10, 12, 16, 20, 30, 35, 60};
    for (size_t i = 0; i < sizeof isas / sizeof isas[0]; i++)
        for (size_t k = 0; tp_cpu_ops(isas[i]) != NULL && k < sizeof powers / sizeof powers[0]; k++)
            if (powers[k] != 9 || strcmp(isas[i], "portable") != 0) /* of 9 some rows are not wide: it rounds each product */
                check_large(isas[i], powers[k]);
    return failures != 0;
}
