/* The row-wise and element-wise kernels against float64, in buffers of the exact size whose gaps are poisoned: every
 * instruction set, teams of one to three. What is a chain is compared bit for bit with a scalar one; all that the teams
 * give, and all that AVX2 and AVX-512 give, must be the same bits. Prints one line per failure; exit code 1 if there
 * was one. */
#include "csrc/backend/backend.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POISON       0x7fc12345u /* a quiet NaN that no operation makes */
#define MOST_DIGESTS 4096

static int failures;
static tp_backend be;
static int fused; /* vec_fma rounds once: always, but in the portable build of a machine without it */

/* ---- digests: what one instruction set and team gave, in the order of the checks -------------------------------- */

typedef struct {
    int count;
    uint64_t value[MOST_DIGESTS];
    char what[MOST_DIGESTS][64];
} digests;
static digests *now;

static void
fail(const char *what, const char *why, double got, double wanted)
{
    if (++failures <= 40)
        fprintf(stderr, "%s: %s: %s: got %.9g, wanted %.9g\n", be.ops->name, what, why, got, wanted);
}

static void
digest(const char *what, const void *bytes, size_t size)
{
    uint64_t hash = 1469598103934665603u; /* FNV-1a */
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
    if (now->count == MOST_DIGESTS) {
        fail(what, "more digests than there is room for", MOST_DIGESTS + 1, MOST_DIGESTS);
        return;
    }
    snprintf(now->what[now->count], sizeof now->what[0], "%s", what);
    now->value[now->count++] = hash;
}

static void
expect_same_digests(const digests *a, const digests *b, const char *names)
{
    int shown = 0;
    if (a->count != b->count)
        fail(names, "number of digests", a->count, b->count);
    for (int i = 0; i < a->count && i < b->count; i++)
        if (a->value[i] != b->value[i] && shown++ < 5) {
            failures++;
            fprintf(stderr, "%s: digest %d, %s: the bits differ\n", names, i, a->what[i]);
        }
}

/* ---- matrices with poisoned gaps -------------------------------------------------------------------------------- */

typedef struct {
    float *base, *row; /* row 0, wherever it lies */
    int64_t rows, n, stride, size;
} matrix;

static float
poison(void)
{
    uint32_t bits = POISON;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static int
is_poison(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits == POISON;
}

static uint32_t state;

static float
uniform(void) /* [-1, 1) */
{
    state = state * 1664525u + 1013904223u;
    return ldexpf((float)(int32_t)state, -31);
}

static matrix
matrix_empty(int64_t rows, int64_t n, int64_t stride)
{
    int64_t pitch = stride < 0 ? -stride : stride, size = (rows - 1) * pitch + n;
    matrix m = {.base = malloc((size_t)size * sizeof(float)), .rows = rows, .n = n, .stride = stride, .size = size};
    m.row = stride < 0 ? m.base + (rows - 1) * pitch : m.base;
    for (int64_t i = 0; i < size; i++)
        m.base[i] = poison();
    return m;
}

static matrix
matrix_random(int64_t rows, int64_t n, int64_t stride, float scale, float shift)
{
    matrix m = matrix_empty(rows, n, stride);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i++)
            m.row[r * stride + i] = shift + scale * uniform();
    return m;
}

static matrix
matrix_copy(const matrix *from)
{
    matrix m = matrix_empty(from->rows, from->n, from->stride);
    memcpy(m.base, from->base, (size_t)from->size * sizeof(float));
    return m;
}

static float *
row_of(const matrix *m, int64_t r)
{
    return m->row + r * m->stride;
}

/* Rows are all written, gaps are not touched; the bits join the digests. */
static void
expect_whole(const char *what, const matrix *m)
{
    int64_t pitch = m->stride < 0 ? -m->stride : m->stride;
    for (int64_t i = 0; i < m->size; i++)
        if (is_poison(m->base[i]) != (i % pitch >= m->n)) {
            fail(what, i % pitch >= m->n ? "a gap between rows was written" : "an element was not written", (double)i,
                 -1);
            break;
        }
    digest(what, m->base, (size_t)m->size * sizeof(float));
}

/* |got - wanted| <= tolerance * the largest |wanted| of the row. */
static void
expect_near(const char *what, const float *got, const double *wanted, int64_t n, double tolerance)
{
    double most = 1e-30;
    for (int64_t i = 0; i < n; i++)
        most = fmax(most, fabs(wanted[i]));
    for (int64_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - wanted[i]) <= tolerance * most)) {
            fail(what, "too far from float64", (double)got[i], wanted[i]);
            return;
        }
}

static void
expect_bits(const char *what, const float *got, const float *wanted, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(got + i, wanted + i, sizeof *got) != 0) {
            fail(what, "not the same bits", (double)got[i], (double)wanted[i]);
            return;
        }
}

/* ---- LayerNorm -------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t rows, n, stride;
    int beta, residual; /* residual 0: none; 1: apart; 2: it is dx */
    float shift, scale;
} norm_case;

static void
norm_reference(const float *x, int64_t n, const float *gamma, const float *beta, double *y, double *mean, double *rstd)
{
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)x[i];
    *mean = sum / (double)n;
    for (int64_t i = 0; i < n; i++)
        squares += ((double)x[i] - *mean) * ((double)x[i] - *mean);
    *rstd = 1 / sqrt(squares / (double)n + 1e-5);
    for (int64_t i = 0; i < n; i++)
        y[i] = ((double)x[i] - *mean) * *rstd * (double)gamma[i] + (beta != NULL ? (double)beta[i] : 0);
}

static void
check_norm_forward(const norm_case *c)
{
    matrix x = matrix_random(c->rows, c->n, c->stride, c->scale, c->shift), gamma = matrix_random(1, c->n, c->n, 1, 0.5f);
    matrix beta = matrix_random(1, c->n, c->n, 1, 0), y = matrix_empty(c->rows, c->n, c->n + 5);
    matrix again = matrix_empty(c->rows, c->n, -c->n - 1), mean = matrix_empty(c->rows, 1, 1),
           rstd = matrix_empty(c->rows, 1, 1);
    matrix mean2 = matrix_empty(c->rows, 1, 1), rstd2 = matrix_empty(c->rows, 1, 1);
    const float *b = c->beta ? beta.row : NULL;
    double *wanted = malloc((size_t)c->n * sizeof *wanted), m, s;
    be.ops->layernorm(&be, c->rows, c->n, x.row, c->stride, gamma.row, b, y.row, y.stride, mean.row, rstd.row);
    be.ops->layernorm(&be, c->rows, c->n, x.row, c->stride, gamma.row, b, NULL, 0, mean2.row, rstd2.row);
    expect_bits("mean without y", mean2.row, mean.row, c->rows);
    expect_bits("rstd without y", rstd2.row, rstd.row, c->rows);
    for (int64_t r = 0; r < c->rows; r++) {
        norm_reference(row_of(&x, r), c->n, gamma.row, b, wanted, &m, &s);
        expect_near("layernorm", row_of(&y, r), wanted, c->n, 1e-5);
        expect_near("layernorm rstd", rstd.row + r, &s, 1, 1e-5);
        if (!(fabs((double)mean.row[r] - m) <= 1e-6 * (0.5 * (double)c->scale + fabs((double)c->shift))))
            fail("layernorm mean", "too far from float64", (double)mean.row[r], m);
    }
    /* rows and statistics walked downwards give the rows that were walked upwards */
    int64_t last = c->rows - 1;
    be.ops->layernorm_apply(&be, c->rows, c->n, row_of(&x, last), -c->stride, mean.row + last, rstd.row + last, -1,
                            gamma.row, b, again.row, again.stride);
    for (int64_t r = 0; r < c->rows; r++)
        expect_bits("layernorm_apply", row_of(&again, last - r), row_of(&y, r), c->n);
    expect_whole("layernorm", &y), expect_whole("layernorm mean", &mean), expect_whole("layernorm rstd", &rstd);
    expect_whole("layernorm_apply", &again);
    free(x.base), free(gamma.base), free(beta.base), free(y.base), free(again.base), free(mean.base), free(rstd.base);
    free(mean2.base), free(rstd2.base), free(wanted);
}

static void
norm_dx_reference(const float *dy, const float *x, double mean, double rstd, const float *gamma, const float *residual,
                  int64_t n, double *dx)
{
    double sum = 0, along = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += (double)dy[i] * (double)gamma[i];
        along += (double)dy[i] * (double)gamma[i] * ((double)x[i] - mean) * rstd;
    }
    for (int64_t i = 0; i < n; i++) {
        double unit = ((double)x[i] - mean) * rstd;
        dx[i] = rstd * ((double)dy[i] * (double)gamma[i] - sum / (double)n - unit * along / (double)n);
        dx[i] += residual != NULL ? (double)residual[i] : 0;
    }
}

/* dgamma and dbeta as the chains that backend.h promises; exact only where vec_fma is fused. */
static void
expect_norm_chains(const norm_case *c, const matrix *dy, const matrix *x, const float *mean, const float *rstd,
                   const float *old, const matrix *dgamma, const matrix *dbeta)
{
    for (int64_t i = 0; i < c->n; i++) {
        float g = old[i], b = old[i];
        for (int64_t r = 0; r < c->rows; r++) {
            float unit = (row_of(x, r)[i] - mean[r]) * rstd[r], d = row_of(dy, r)[i];
            g = fused ? fmaf(d, unit, g) : d * unit + g;
            b += d;
        }
        expect_bits("layernorm dgamma", dgamma->row + i, &g, 1);
        if (c->beta)
            expect_bits("layernorm dbeta", dbeta->row + i, &b, 1);
    }
}

static void
check_norm_backward(const norm_case *c)
{
    matrix x = matrix_random(c->rows, c->n, c->stride, c->scale, c->shift), gamma = matrix_random(1, c->n, c->n, 1, 0.5f);
    matrix dy = matrix_random(c->rows, c->n, -c->stride, 1, 0.1f),
           residual = matrix_random(c->rows, c->n, c->n + 2, 1, 0);
    matrix dx = c->residual == 2 ? matrix_copy(&residual) : matrix_empty(c->rows, c->n, -c->n - 4);
    matrix old = matrix_random(1, c->n, c->n, 1, 0), dgamma = matrix_copy(&old), dbeta = matrix_copy(&old);
    matrix mean = matrix_empty(c->rows, 1, 1), rstd = matrix_empty(c->rows, 1, 1);
    const float *added = c->residual == 0 ? NULL : c->residual == 1 ? residual.row : dx.row;
    double *wanted = malloc((size_t)c->n * sizeof *wanted);
    be.ops->layernorm(&be, c->rows, c->n, x.row, c->stride, gamma.row, NULL, NULL, 0, mean.row, rstd.row);
    /* statistics are handed over downwards */
    matrix mean_down = matrix_empty(c->rows, 1, -1), rstd_down = matrix_empty(c->rows, 1, -1);
    for (int64_t r = 0; r < c->rows; r++)
        *row_of(&mean_down, r) = mean.row[r], *row_of(&rstd_down, r) = rstd.row[r];
    be.ops->layernorm_backward(&be, c->rows, c->n, dy.row, dy.stride, x.row, x.stride, mean_down.row, rstd_down.row, -1,
                               gamma.row, added, c->residual == 2 ? dx.stride : residual.stride, dx.row, dx.stride,
                               dgamma.row, c->beta ? dbeta.row : NULL);
    for (int64_t r = 0; r < c->rows; r++) {
        norm_dx_reference(row_of(&dy, r), row_of(&x, r), (double)mean.row[r], (double)rstd.row[r], gamma.row,
                          c->residual != 0 ? row_of(&residual, r) : NULL, c->n, wanted);
        if (c->n > 2) /* of one or two elements only rounding is left */
            expect_near("layernorm dx", row_of(&dx, r), wanted, c->n, 1e-5);
    }
    expect_norm_chains(c, &dy, &x, mean.row, rstd.row, old.row, &dgamma, &dbeta);
    if (!c->beta)
        expect_bits("layernorm dbeta NULL", dbeta.row, old.row, c->n);
    expect_whole("layernorm dx", &dx), expect_whole("layernorm dgamma", &dgamma),
        expect_whole("layernorm dbeta", &dbeta);
    free(x.base), free(gamma.base), free(dy.base), free(residual.base), free(dx.base), free(old.base),
        free(dgamma.base);
    free(dbeta.base), free(mean.base), free(rstd.base), free(mean_down.base), free(rstd_down.base), free(wanted);
}

static void
check_norms(void)
{
    static const int64_t shapes[][2] = {{1, 1},   {3, 7},    {5, 16},   {8, 31},   {9, 33},
                                        {17, 65}, {50, 768}, {67, 801}, {2, 20000}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int variant = 0; variant < 4; variant++) { /* the last one's squares overflow */
            norm_case c = {.rows = shapes[i][0],
                           .n = shapes[i][1],
                           .beta = variant != 1,
                           .residual = variant % 3,
                           .shift = variant == 2 ? 8 : 0,
                           .scale = variant == 3 ? 1e20f : 2};
            c.stride = variant == 0 ? -c.n - 3 : c.n + variant;
            check_norm_forward(&c);
            check_norm_backward(&c);
        }
}

/* ---- embedding -------------------------------------------------------------------------------------------------- */

static int32_t *
indices(int64_t rows, int64_t height)
{
    int32_t *index = malloc((size_t)rows * sizeof *index);
    for (int64_t r = 0; r < rows; r++) /* a few of them over and over, among them the first and the last */
        index[r] = (int32_t)(r % 3 == 0 ? (r % 2 == 0 ? 0 : height - 1) : (r * r + 7 * r) % height);
    return index;
}

static void
check_embedding(int64_t rows, int64_t n, int64_t height, int64_t places)
{
    matrix wte = matrix_random(height, n, n, 1, 0), wpe = matrix_random(places, n, n, 1, 0);
    matrix token = matrix_empty(1, be.ops->weight_floats(height, n), 1),
           place = matrix_empty(1, be.ops->weight_floats(places, n), 1);
    matrix y = matrix_empty(rows, n, rows % 2 == 0 ? n + 3 : -n - 3);
    int32_t *tokens = indices(rows, height), *positions = indices(rows, places);
    be.ops->weight_import(&be, height, n, wte.row, token.row);
    be.ops->weight_import(&be, places, n, wpe.row, place.row);
    be.ops->embedding(&be, rows, n, height, places, tokens, positions, token.row, place.row, y.row, y.stride);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i++) {
            float sum = row_of(&wte, tokens[r])[i] + row_of(&wpe, positions[r])[i];
            expect_bits("embedding", row_of(&y, r) + i, &sum, 1);
        }
    expect_whole("embedding", &y);
    free(wte.base), free(wpe.base), free(token.base), free(place.base), free(y.base), free(tokens), free(positions);
}

static void
check_scatter(int64_t rows, int64_t n, int64_t height)
{
    int64_t floats = be.ops->weight_floats(height, n), padded = floats / height;
    matrix grad = matrix_random(height, n, n, 1, 0), value = matrix_empty(1, floats, floats);
    matrix dy = matrix_random(rows, n, rows % 2 == 0 ? n + 3 : -n - 3, 1, 0), back = matrix_empty(height, n, n);
    int32_t *index = indices(rows, height);
    be.ops->weight_import(&be, height, n, grad.row, value.row);
    be.ops->scatter_add(&be, rows, n, height, index, dy.row, dy.stride, value.row);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i++)
            row_of(&grad, index[r])[i] += row_of(&dy, r)[i];
    be.ops->weight_export(&be, height, n, value.row, back.row);
    expect_bits("scatter_add", back.row, grad.row, height * n);
    int64_t zeros = 0, other = 0; /* the padding, found without its layout: what the rows do not hold is zero */
    for (int64_t i = 0; i < floats; i++)
        zeros += value.row[i] == 0;
    for (int64_t i = 0; i < height * n; i++)
        other += grad.row[i] == 0;
    if (zeros != other + height * (padded - n))
        fail("scatter_add", "zeros of the padding", (double)zeros, (double)(other + height * (padded - n)));
    expect_whole("scatter_add", &value);
    free(grad.base), free(value.base), free(dy.base), free(back.base), free(index);
}

/* ---- loss ------------------------------------------------------------------------------------------------------- */

typedef enum { LOGITS_USUAL, LOGITS_EXTREME, LOGITS_RISING, LOGITS_FALLING, LOGITS_EQUAL, LOGITS_KINDS } logits_kind;

static matrix
logits_of(logits_kind kind, int64_t rows, int64_t vocab)
{
    matrix x = matrix_random(rows, vocab, vocab + 7, kind == LOGITS_USUAL ? 12 : 1, 0);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < vocab; i++) {
            float *at = row_of(&x, r) + i, share = (float)i / (float)vocab;
            if (kind == LOGITS_EXTREME)
                *at = i % 5 == 0 ? 1e4f * *at : i % 97 == 3 ? -1e4f : *at;
            else if (kind == LOGITS_RISING || kind == LOGITS_FALLING) /* over 200: some gradients are below any float */
                *at += 200 * (kind == LOGITS_RISING ? share : 1 - share);
            else if (kind == LOGITS_EQUAL)
                *at = -3;
        }
    return x;
}

static void
expect_loss_row(const float *x, const float *d, int64_t vocab, int32_t target, float scale, double loss)
{
    double top = (double)x[0], sum = 0;
    for (int64_t i = 0; i < vocab; i++)
        top = fmax(top, (double)x[i]);
    for (int64_t i = 0; i < vocab; i++)
        sum += exp((double)x[i] - top);
    double wanted = log(sum) + top - (double)x[target];
    if (!(fabs(loss - wanted) <= 1e-6 * fmax(1, fabs(wanted))))
        fail("softmax_loss", "loss", loss, wanted);
    for (int64_t i = 0; i < vocab; i++) {
        double p = exp((double)x[i] - top) / sum, dlogit = (p - (i == target)) * (double)scale;
        double room = i == target ? 3e-7 * (double)scale : 1e-5 * dlogit + 0x1p-99;
        if (!(fabs((double)d[i] - dlogit) <= room) || (d[i] != 0 && fabsf(d[i]) < 0x1p-101f)) {
            fail("softmax_loss", "dlogits", (double)d[i], dlogit);
            return;
        }
    }
}

static void
check_loss(logits_kind kind, int64_t rows, int64_t vocab)
{
    matrix x = logits_of(kind, rows, vocab), d = matrix_copy(&x), alone = matrix_copy(&x);
    int32_t *targets = malloc((size_t)rows * sizeof *targets);
    double *loss = malloc((size_t)rows * sizeof *loss), *only = malloc((size_t)rows * sizeof *only);
    const float scale = rows % 2 == 0 ? 1.0f / 8192 : 1.0f;
    for (int64_t r = 0; r < rows; r++)
        targets[r] = (int32_t)(r == 0 ? vocab - 1 : (r * 7919) % vocab);
    be.ops->softmax_loss(&be, rows, vocab, d.row, d.stride, targets, scale, 0, only);
    expect_bits("softmax_loss without gradient", d.base, x.base, x.size);
    be.ops->softmax_loss(&be, rows, vocab, d.row, d.stride, targets, scale, 1, loss);
    for (int64_t r = 0; r < rows; r++)
        expect_loss_row(row_of(&x, r), row_of(&d, r), vocab, targets[r], scale, loss[r]);
    if (memcmp(loss, only, (size_t)rows * sizeof *loss) != 0)
        fail("softmax_loss", "loss with and without gradient", loss[0], only[0]);
    for (int64_t r = rows - 1; r >= 0; r--) /* a row depends on itself alone */
        be.ops->softmax_loss(&be, 1, vocab, row_of(&alone, r), 0, targets + r, scale, 1, only + r);
    expect_bits("softmax_loss row by row", alone.base, d.base, d.size);
    expect_whole("softmax_loss", &d);
    digest("loss", loss, (size_t)rows * sizeof *loss);
    free(x.base), free(d.base), free(alone.base), free(targets), free(loss), free(only);
}

/* ---- element-wise ------------------------------------------------------------------------------------------------ */

static void
check_pointwise(int64_t n)
{
    /* two rows, of which the kernels get the first: the second is behind it untouched */
    matrix x = matrix_random(2, n, n + 1, 1, 0), y = matrix_copy(&x), z = matrix_copy(&x), o = matrix_copy(&x);
    matrix first = matrix_random(1, n, n, 3, 0), wanted = matrix_copy(&x);
    for (int64_t i = 0; i < n; i++)
        wanted.row[i] += first.row[i];
    be.ops->add(&be, n, first.row, y.row);
    expect_bits("add", y.base, wanted.base, y.size);
    memcpy(wanted.row, first.row, (size_t)n * sizeof(float));
    be.ops->copy(&be, n, first.row, z.row);
    expect_bits("copy", z.base, wanted.base, z.size);
    memset(wanted.row, 0, (size_t)n * sizeof(float));
    be.ops->zero(&be, n, o.row);
    expect_bits("zero", o.base, wanted.base, o.size);
    first.row[n / 2] *= 1e18f; /* its square is beyond floats */
    long double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (long double)first.row[i] * (long double)first.row[i];
    double got = be.ops->sumsq(&be, n, first.row);
    if (!(fabsl((long double)got - sum) <= 1e-14L * sum))
        fail("sumsq", "too far from long double", got, (double)sum);
    first.row[n / 2] = 0;
    double small = be.ops->sumsq(&be, n, first.row);
    sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (long double)first.row[i] * (long double)first.row[i];
    if (!(fabsl((long double)small - sum) <= 1e-14L * sum))
        fail("sumsq", "too far from long double", small, (double)sum);
    digest("sumsq", &got, sizeof got), digest("sumsq", &small, sizeof small);
    expect_whole("add", &y);
    free(x.base), free(y.base), free(z.base), free(o.base), free(first.base), free(wanted.base);
}

static void
check_adamw(int64_t n, float decay, float grad_scale)
{
    const float lr = 1e-2f, eps = 1e-8f;
    const double beta1 = 0.9, beta2 = 0.99999; /* which no float is */
    matrix p = matrix_random(2, n, n + 1, 1, 0), g = matrix_random(1, n, n, 1, 0), m = matrix_random(2, n, n + 1, 0, 0);
    matrix v = matrix_copy(&m), start = matrix_copy(&p), next = matrix_copy(&p);
    double *dp = malloc((size_t)n * sizeof *dp), *dm = calloc((size_t)n, sizeof *dm),
           *dv = calloc((size_t)n, sizeof *dv);
    for (int64_t i = 0; i < n; i++)
        dp[i] = (double)p.row[i];
    g.row[0] = p.row[0] = 0, dp[0] = 0; /* padding: stays zero */
    for (int step = 1; step <= 3; step++) {
        double bias1 = 1 - pow(beta1, step), bias2 = 1 - pow(beta2, step);
        float *to = step == 2 ? next.row : p.row; /* another version */
        be.ops->adamw(&be, n, p.row, to, g.row, m.row, v.row, lr, beta1, beta2, eps, decay, (float)bias1, (float)bias2, grad_scale);
        memmove(p.row, to, (size_t)n * sizeof *to);
        for (int64_t i = 0; i < n; i++) {
            double d = (double)g.row[i] * (double)grad_scale;
            dm[i] = beta1 * dm[i] + (1 - beta1) * d;
            dv[i] = beta2 * dv[i] + (1 - beta2) * d * d;
            dp[i] -= (double)lr * (dm[i] / bias1 / (sqrt(dv[i] / bias2) + (double)eps) + (double)decay * dp[i]);
            g.row[i] = -0.7f * g.row[i];
        }
    }
    expect_near("adamw p", p.row, dp, n, 1e-6);
    expect_near("adamw m", m.row, dm, n, 1e-6);
    expect_near("adamw v", v.row, dv, n, 1e-6);
    if (p.row[0] != 0 || m.row[0] != 0 || v.row[0] != 0)
        fail("adamw", "the padding moved", (double)p.row[0], 0);
    expect_bits("adamw behind the end", row_of(&p, 1), row_of(&start, 1), n);
    expect_whole("adamw p", &p), expect_whole("adamw m", &m), expect_whole("adamw v", &v);
    free(p.base), free(g.base), free(m.base), free(v.base), free(start.base), free(next.base), free(dp), free(dm), free(dv);
}

/* Moments whose gradient stays zero come to rest at zero, and tiny gradients leave no subnormal number; with eps 0
 * nothing is hidden. */
static void
check_adamw_at_rest(void)
{
    float p[20], g[20] = {0}, m[20], v[20];
    for (int i = 0; i < 20; i++)
        p[i] = 1, m[i] = (i % 2 == 0 ? 1e-37f : -1e-37f), v[i] = 1e-37f;
    for (int step = 0; step < 100; step++)
        be.ops->adamw(&be, 20, p, p, g, m, v, 1e-3f, 0.9f, 0.9f, 1e-8f, 0, 1, 1, 1);
    for (int i = 0; i < 20; i++) {
        if (m[i] != 0 || v[i] != 0 || p[i] != 1)
            fail("adamw", "a moment does not come to rest", (double)m[i], 0);
        g[i] = 1e-21f, m[i] = v[i] = 0;
    }
    be.ops->adamw(&be, 20, p, p, g, m, v, 1e-3f, 0.9f, 0.9f, 1e-8f, 0, 1, 1, 1);
    for (int i = 0; i < 20; i++) {
        if (v[i] != 0 || fabsf(m[i] - 1e-22f) > 1e-28f)
            fail("adamw", "the square of a tiny gradient", (double)v[i], 0);
        g[i] = 1e-18f, m[i] = v[i] = 0;
    }
    be.ops->adamw(&be, 20, p, p, g, m, v, 0.5f, 0.0f, 0.0f, 0, 0, 1, 1, 1);
    for (int i = 0; i < 20; i++)
        if (!(fabsf(p[i] - 0.5f) < 1e-5f))
            fail("adamw", "a step with eps 0", (double)p[i], 0.5);
}

/* ---- all of it -------------------------------------------------------------------------------------------------- */

static void
check_all(void)
{
    static const int64_t vocabs[] = {1, 2, 15, 17, 100, 4096, 4097, 8200},
                         lengths[] = {1, 15, 17, 1000, 40003, 16384 * 5 + 37};
    state = 1;
    check_norms();
    check_embedding(7, 33, 11, 5), check_embedding(60, 768, 211, 64), check_embedding(2, 16, 3, 2);
    check_scatter(9, 33, 11), check_scatter(60, 801, 37), check_scatter(4, 16, 3), check_scatter(1, 1, 1);
    for (int kind = 0; kind < LOGITS_KINDS; kind++) {
        for (size_t i = 0; i < sizeof vocabs / sizeof vocabs[0]; i++)
            check_loss((logits_kind)kind, 5 + (int64_t)i % 2, vocabs[i]);
        check_loss((logits_kind)kind, 3, 50257);
    }
    check_loss(LOGITS_RISING, 1, 300007); /* longer parts */
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        check_pointwise(lengths[i]);
        check_adamw(lengths[i], i % 2 == 0 ? 0.1f : 0, i % 3 == 0 ? 1 : 0.37f);
    }
    check_adamw_at_rest();
}

static tp_status
check_isa(const char *isa, int threads, digests *into)
{
    tp_heap *heap = NULL;
    tp_team *team = NULL;
    TP_TRY(tp_heap_open(0, &heap));
    TP_TRY(tp_team_open(threads, &team));
    TP_TRY(tp_cpu_open(isa, heap, team, &be));
#if defined(__x86_64__)
    fused = strcmp(isa, "portable") != 0;
#else
    fused = 1;
#endif
    now = into;
    now->count = 0;
    check_all();
    tp_backend_close(&be);
    tp_team_close(team);
    tp_heap_close(heap);
    return TP_OK;
}

int
main(void)
{
    static const char *const isas[] = {"avx512", "avx2", "portable", "amx"};
    static digests given[4][3];
    for (int i = 0; i < 4; i++)
        for (int threads = 1; threads <= 3; threads++) {
            if (tp_cpu_ops(isas[i]) == NULL)
                continue;
            if (check_isa(isas[i], threads, &given[i][threads - 1]) != TP_OK) {
                failures++;
                fprintf(stderr, "%s: %s\n", isas[i], tp_error_message());
                return 1;
            }
            expect_same_digests(&given[i][threads - 1], &given[i][0], isas[i]);
        }
    if (given[0][0].count > 0)
        expect_same_digests(&given[0][0], &given[1][0], "avx512 and avx2");
    return failures != 0;
}
