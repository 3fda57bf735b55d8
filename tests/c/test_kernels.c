/* The kernels of one instruction set against references in double, and against themselves: cut into slices, shared by
 * teams of 1 to 3. Compiled once per set by tests/test_kernels.py with -DSHARE_ALONE=0. Prints a digest of every output
 * so that two sets can be compared bit by bit. Exit 77: this processor lacks the set. */
#include "csrc/cpu/attention.c"
#include "csrc/cpu/norm.c"
#include "csrc/cpu/optim.c"
#include "csrc/cpu/pointwise.c"
#include "csrc/cpu/vocab.c"

#include <stdio.h>
#include <stdlib.h>

#define TOLERANCE 1e-5

static int failures;
static uint64_t digest = 14695981039346656037u, state = 88172645463325252u;
static tp_team *teams[4];

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            failures++;                                                                                                \
            printf("FAIL %s:%d %s: ", __FILE__, __LINE__, #condition);                                                 \
            printf(__VA_ARGS__);                                                                                       \
            printf("\n");                                                                                              \
        }                                                                                                              \
    } while (0)

static float
uniform(void)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (float)(int32_t)(state >> 32) * 0x1p-31f;
}

static float *
floats(int64_t n)
{
    float *x = malloc((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++)
        x[i] = NAN;
    return x;
}

static float *
randoms(int64_t n, float scale)
{
    float *x = floats(n);
    for (int64_t i = 0; i < n; i++)
        x[i] = uniform() * scale;
    return x;
}

static void
note(const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        digest = (digest ^ ((const unsigned char *)data)[i]) * 1099511628211u;
}

static double
error_of(int64_t n, const float *x, const double *reference)
{
    double square = 0, total = 1e-30;
    for (int64_t i = 0; i < n; i++) {
        double d = (double)x[i] - reference[i];
        square += d * d;
        total += reference[i] * reference[i];
    }
    return sqrt(square / total);
}

static int
same(int64_t n, const float *x, const float *y)
{
    return memcmp(x, y, (size_t)n * sizeof(float)) == 0;
}

static tp_backend
backend(int members, size_t bytes)
{
    tp_backend be = {.team = teams[members], .workspace_bytes = bytes};
    be.workspace = bytes == 0 ? NULL : floats((int64_t)(bytes / sizeof(float)));
    return be;
}

/* ---- attention ----------------------------------------------------------------------------------------------------- */

enum { Q, K, V, O, DO, DQ, DK, DV, LSE, ARRAYS };
typedef struct {
    int64_t batch, heads, head_dim, total;
    float *array[ARRAYS];
    double *reference[ARRAYS];
} attention_case;

static int64_t
index_of(const attention_case *c, int64_t t, int64_t b, int64_t h, int64_t d)
{
    return ((t * c->batch + b) * c->heads + h) * c->head_dim + d;
}

static int64_t
size_of(const attention_case *c, int which)
{
    return c->total * c->batch * c->heads * (which == LSE ? 1 : c->head_dim);
}

/* One query of one head in double: textbook softmax and its derivative. */
static void
reference_query(attention_case *c, int64_t b, int64_t h, int64_t t, double *p)
{
    double **r = c->reference, most = -INFINITY, sum = 0, delta = 0, scale = 1 / sqrt((double)c->head_dim);
    for (int64_t k = 0; k <= t; k++) {
        p[k] = 0;
        for (int64_t d = 0; d < c->head_dim; d++)
            p[k] += scale * r[Q][index_of(c, t, b, h, d)] * r[K][index_of(c, k, b, h, d)];
        most = fmax(most, p[k]);
    }
    for (int64_t k = 0; k <= t; k++)
        sum += p[k] = exp(p[k] - most);
    r[LSE][(b * c->heads + h) * c->total + t] = most + log(sum);
    for (int64_t k = 0; k <= t; k++)
        for (int64_t d = 0; d < c->head_dim; d++)
            r[O][index_of(c, t, b, h, d)] += p[k] / sum * r[V][index_of(c, k, b, h, d)];
    for (int64_t d = 0; d < c->head_dim; d++)
        delta += r[O][index_of(c, t, b, h, d)] * r[DO][index_of(c, t, b, h, d)];
    for (int64_t k = 0; k <= t; k++) {
        double dp = -delta;
        for (int64_t d = 0; d < c->head_dim; d++)
            dp += r[DO][index_of(c, t, b, h, d)] * r[V][index_of(c, k, b, h, d)];
        for (int64_t d = 0; d < c->head_dim; d++) {
            int64_t at = index_of(c, t, b, h, d), of = index_of(c, k, b, h, d);
            r[DV][of] += p[k] / sum * r[DO][at];
            r[DQ][at] += scale * p[k] / sum * dp * r[K][of];
            r[DK][of] += scale * p[k] / sum * dp * r[Q][at];
        }
    }
}

static attention_case
attention_open(int64_t batch, int64_t heads, int64_t head_dim, int64_t total)
{
    attention_case c = {.batch = batch, .heads = heads, .head_dim = head_dim, .total = total};
    for (int i = 0; i < ARRAYS; i++) {
        int64_t n = size_of(&c, i);
        c.array[i] = i < O || i == DO ? randoms(n, i < V ? 3.0f : 1.0f) : floats(n);
        c.reference[i] = calloc((size_t)n, sizeof(double));
        for (int64_t j = 0; j < n && (i < O || i == DO); j++)
            c.reference[i][j] = (double)c.array[i][j];
    }
    double *p = calloc((size_t)total, sizeof(double));
    for (int64_t b = 0; b < batch; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t t = 0; t < total; t++)
                reference_query(&c, b, h, t, p);
    free(p);
    return c;
}

/* Rows with a gap between them that must stay NaN, as a stage sees them: q, k, v interleaved. */
typedef struct {
    tp_attention shape;
    float *qkv, *o, *d_o, *d_qkv, *lse, *delta;
} attention_buffers;

static void
put_rows(const attention_case *c, const attention_buffers *a, int64_t from, int64_t to, int backward)
{
    int64_t width = c->heads * c->head_dim;
    for (int64_t r = from * c->batch; r < to * c->batch; r++) {
        for (int i = 0; i < 3 && !backward; i++)
            memcpy(a->qkv + r * a->shape.qkv_stride + i * width, c->array[i] + r * width, (size_t)width * 4);
        if (backward)
            memcpy(a->d_o + r * a->shape.o_stride, c->array[DO] + r * width, (size_t)width * 4);
    }
}

static void
take_rows(const attention_case *c, const attention_buffers *a, float **out)
{
    int64_t width = c->heads * c->head_dim;
    for (int64_t r = 0; r < c->total * c->batch; r++) {
        memcpy(out[O] + r * width, a->o + r * a->shape.o_stride, (size_t)width * 4);
        CHECK(isnan(a->o[r * a->shape.o_stride + width]), "o is written beyond its row %ld", (long)r);
        CHECK(isnan(a->d_qkv[r * a->shape.qkv_stride + 3 * width]), "dqkv is written beyond row %ld", (long)r);
        for (int i = 0; i < 3; i++)
            memcpy(out[DQ + i] + r * width, a->d_qkv + r * a->shape.qkv_stride + i * width, (size_t)width * 4);
    }
    memcpy(out[LSE], a->lse, (size_t)size_of(c, LSE) * 4);
}

/* Forward slice by slice upwards, backward downwards; what has not arrived yet is NaN, so reading it would show. */
static void
run_attention(const attention_case *c, int slices, const int64_t *lengths, int members, float **out)
{
    int64_t width = c->heads * c->head_dim, rows = c->total * c->batch, at = 0;
    attention_buffers a = {.shape = {.batch = c->batch, .heads = c->heads, .head_dim = c->head_dim}};
    a.shape.total = c->total, a.shape.qkv_stride = 3 * width + 3, a.shape.o_stride = width + 1;
    a.qkv = floats(rows * a.shape.qkv_stride), a.d_qkv = floats(rows * a.shape.qkv_stride);
    a.o = floats(rows * a.shape.o_stride), a.d_o = floats(rows * a.shape.o_stride);
    a.lse = floats(size_of(c, LSE)), a.delta = floats(size_of(c, LSE));
    tp_backend be = backend(members, attention_workspace_bytes(width, c->heads, c->total, rows, members));
    for (int i = 0; i < slices; at += lengths[i++]) {
        a.shape.context = at, a.shape.slice = lengths[i];
        put_rows(c, &a, at, at + lengths[i], 0);
        cpu_attention_forward(&be, &a.shape, a.qkv, a.qkv + width, a.qkv + 2 * width, a.o, a.lse);
    }
    for (int i = slices; i-- > 0;) {
        at -= lengths[i];
        a.shape.context = at, a.shape.slice = lengths[i];
        put_rows(c, &a, at, at + lengths[i], 1);
        cpu_attention_backward(&be, &a.shape, a.qkv, a.qkv + width, a.qkv + 2 * width, a.o, a.d_o, a.lse, a.delta,
                               a.d_qkv, a.d_qkv + width, a.d_qkv + 2 * width);
    }
    take_rows(c, &a, out);
    free(a.qkv), free(a.d_qkv), free(a.o), free(a.d_o), free(a.lse), free(a.delta), free(be.workspace);
}

static void
test_attention(int64_t batch, int64_t heads, int64_t head_dim, int slices, const int64_t *lengths)
{
    static const int written[] = {O, DQ, DK, DV, LSE};
    int64_t total = 0, ones[256];
    for (int i = 0; i < slices; i++)
        total += lengths[i];
    for (int i = 0; i < 256; i++)
        ones[i] = 1;
    attention_case c = attention_open(batch, heads, head_dim, total);
    float *other[ARRAYS] = {0};
    for (size_t i = 0; i < 5; i++)
        other[written[i]] = floats(size_of(&c, written[i]));
    run_attention(&c, 1, &total, 1, c.array);
    for (size_t i = 0; i < 5; i++) {
        int64_t n = size_of(&c, written[i]);
        double error = error_of(n, c.array[written[i]], c.reference[written[i]]);
        CHECK(error <= TOLERANCE, "array %d, head_dim %ld, total %ld: error %g", written[i], (long)head_dim,
              (long)total, error);
        note(c.array[written[i]], (size_t)n * 4);
    }
    for (int members = 1; members <= 4; members++) {
        int by_ones = members == 4;
        run_attention(&c, by_ones ? (int)total : slices, by_ones ? ones : lengths, by_ones ? 1 : members, other);
        for (size_t i = 0; i < 5; i++)
            CHECK(same(size_of(&c, written[i]), c.array[written[i]], other[written[i]]),
                  "array %d, head_dim %ld, %d slices, %d members differs from one slice", written[i], (long)head_dim,
                  slices, members);
    }
    for (int i = 0; i < ARRAYS; i++)
        free(c.array[i]), free(c.reference[i]), free(other[i]);
}

/* ---- LayerNorm ----------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t rows, n;
    float *x, *dy, *residual, *gamma, *beta, *mean, *rstd, *y, *dx, *dgamma, *dbeta;
} norm_case;

static void
check_norm(const norm_case *c, const float *dgamma_old)
{
    int64_t rows = c->rows, n = c->n;
    double *y = calloc((size_t)(rows * n), 8), *dx = calloc((size_t)(rows * n), 8), *dgamma = calloc((size_t)n, 8);
    double *dbeta = calloc((size_t)n, 8);
    for (int64_t i = 0; i < n; i++)
        dgamma[i] = dbeta[i] = (double)dgamma_old[i];
    for (int64_t r = 0; r < rows; r++) {
        double mean = 0, variance = 0, sum = 0, dot = 0;
        for (int64_t i = 0; i < n; i++)
            mean += (double)c->x[r * n + i] / (double)n;
        for (int64_t i = 0; i < n; i++)
            variance += pow((double)c->x[r * n + i] - mean, 2) / (double)n;
        double rstd = 1 / sqrt(variance + 1e-5);
        for (int64_t i = 0; i < n; i++) {
            double hat = ((double)c->x[r * n + i] - mean) * rstd, dy = (double)c->dy[r * n + i];
            y[r * n + i] = hat * (double)c->gamma[i] + (double)c->beta[i];
            sum += dy * (double)c->gamma[i] / (double)n;
            dot += dy * (double)c->gamma[i] * hat / (double)n;
            dgamma[i] += dy * hat;
            dbeta[i] += dy;
        }
        for (int64_t i = 0; i < n; i++) {
            double hat = ((double)c->x[r * n + i] - mean) * rstd;
            double g = (double)c->dy[r * n + i] * (double)c->gamma[i];
            dx[r * n + i] = (double)c->residual[r * n + i] + rstd * (g - sum - hat * dot);
        }
    }
    CHECK(error_of(rows * n, c->y, y) <= TOLERANCE, "n %ld: %g", (long)n, error_of(rows * n, c->y, y));
    CHECK(error_of(rows * n, c->dx, dx) <= TOLERANCE, "n %ld: %g", (long)n, error_of(rows * n, c->dx, dx));
    CHECK(error_of(n, c->dgamma, dgamma) <= TOLERANCE, "n %ld: %g", (long)n, error_of(n, c->dgamma, dgamma));
    CHECK(error_of(n, c->dbeta, dbeta) <= TOLERANCE, "n %ld: %g", (long)n, error_of(n, c->dbeta, dbeta));
    free(y), free(dx), free(dgamma), free(dbeta);
}

/* The same rows walked downwards and one by one: dx may be its residual, and the sums keep the caller's order. */
static void
check_norm_cuts(const norm_case *c, const float *old, int members)
{
    int64_t rows = c->rows, n = c->n;
    tp_backend be = backend(members, 0);
    float *y = floats(rows * n), *dx = floats(rows * n), *dgamma = floats(n), *dbeta = floats(n);
    float *mean = floats(rows), *rstd = floats(rows);
    for (int64_t r = 0; r < rows; r++)
        cpu_layernorm(&be, 1, n, c->x + r * n, n, c->gamma, c->beta, NULL, 0, mean + r, rstd + r);
    CHECK(same(rows, mean, c->mean) && same(rows, rstd, c->rstd), "n %ld: statistics of single rows", (long)n);
    cpu_layernorm_apply(&be, rows, n, c->x + (rows - 1) * n, -n, mean + rows - 1, rstd + rows - 1, -1, c->gamma,
                        c->beta, y + (rows - 1) * n, -n);
    CHECK(same(rows * n, y, c->y), "n %ld, %d members: apply differs", (long)n, members);
    memcpy(dx, c->residual, (size_t)(rows * n) * 4), memcpy(dgamma, old, (size_t)n * 4);
    memcpy(dbeta, old, (size_t)n * 4);
    int64_t half = rows / 2; /* rows [half, rows) were last to come and are first here: the order of c */
    for (int part = 0; part < 2; part++) {
        int64_t top = part == 0 ? rows - 1 : half - 1, count = part == 0 ? rows - half : half;
        if (count > 0)
            cpu_layernorm_backward(&be, count, n, c->dy + top * n, -n, c->x + top * n, -n, mean + top, rstd + top, -1,
                                   c->gamma, dx + top * n, -n, dx + top * n, -n, dgamma, dbeta);
    }
    CHECK(same(rows * n, dx, c->dx), "n %ld, %d members: dx differs", (long)n, members);
    CHECK(same(n, dgamma, c->dgamma) && same(n, dbeta, c->dbeta), "n %ld, %d members: dgamma or dbeta", (long)n,
          members);
    free(y), free(dx), free(dgamma), free(dbeta), free(mean), free(rstd);
}

static void
test_norm(int64_t rows, int64_t n)
{
    norm_case c = {rows, n, randoms(rows * n, 2), randoms(rows * n, 1), randoms(rows * n, 1), randoms(n, 1),
                   randoms(n, 1), floats(rows), floats(rows), floats(rows * n), floats(rows * n), floats(n), floats(n)};
    float *old = randoms(n, 1);
    tp_backend be = backend(1, 0);
    memcpy(c.dgamma, old, (size_t)n * 4), memcpy(c.dbeta, old, (size_t)n * 4);
    for (int64_t i = 0; i < rows * n; i++)
        c.x[i] += 5.0f; /* far from zero: a one-pass variance would fail */
    cpu_layernorm(&be, rows, n, c.x, n, c.gamma, c.beta, c.y, n, c.mean, c.rstd);
    int64_t end = (rows - 1) * n;
    cpu_layernorm_backward(&be, rows, n, c.dy + end, -n, c.x + end, -n, c.mean + rows - 1, c.rstd + rows - 1, -1,
                           c.gamma, c.residual + end, -n, c.dx + end, -n, c.dgamma, c.dbeta);
    if (n > 1)
        check_norm(&c, old);
    note(c.y, (size_t)(rows * n) * 4), note(c.dx, (size_t)(rows * n) * 4), note(c.dgamma, (size_t)n * 4);
    for (int members = 1; members <= 3; members++)
        check_norm_cuts(&c, old, members);
    cpu_layernorm(&be, rows, n, c.x, n, c.gamma, NULL, c.y, n, c.mean, c.rstd);
    for (int64_t i = 0; i < rows * n; i++) {
        float hat = (c.x[i] - c.mean[i / n]) * c.rstd[i / n];
        CHECK(fabsf(c.y[i] - hat * c.gamma[i % n]) <= 1e-5f, "no beta: row %ld", (long)(i / n));
    }
    float **all[] = {&c.x, &c.dy, &c.residual, &c.gamma, &c.beta, &c.mean, &c.rstd, &c.y, &c.dx, &c.dgamma, &c.dbeta};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(*all[i]);
    free(old);
}

/* ---- vocabulary ---------------------------------------------------------------------------------------------------- */

static float *
packed(int64_t rows, int64_t cols, const float *row_major)
{
    int64_t n = (cols + TP_PANEL - 1) / TP_PANEL * TP_PANEL * rows;
    float *value = calloc((size_t)n, 4);
    for (int64_t i = 0; i < rows * cols; i++)
        value[panel_index(rows, i / cols, i % cols)] = row_major[i];
    return value;
}

static void
test_embedding(int64_t rows, int64_t n, int members)
{
    enum { VOCAB = 7, POSITIONS = 11 };
    tp_backend be = backend(members, 0);
    int64_t padded = (n + TP_PANEL - 1) / TP_PANEL * TP_PANEL * VOCAB, stride = n + 2;
    float *wte = randoms(VOCAB * n, 1), *wpe = randoms(POSITIONS * n, 1), *y = floats(rows * stride);
    float *wte_value = packed(VOCAB, n, wte), *wpe_value = packed(POSITIONS, n, wpe);
    int32_t *tokens = calloc((size_t)rows, 4), *positions = calloc((size_t)rows, 4);
    for (int64_t r = 0; r < rows; r++)
        tokens[r] = (int32_t)(r * r % VOCAB), positions[r] = (int32_t)(r % POSITIONS);
    cpu_embedding(&be, rows, n, VOCAB, POSITIONS, tokens, positions, wte_value, wpe_value, y, stride);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < n; i++)
            CHECK(y[r * stride + i] == wte[tokens[r] * n + i] + wpe[positions[r] * n + i], "row %ld", (long)r);
        CHECK(isnan(y[r * stride + n]), "row %ld is written beyond its end", (long)r);
    }
    cpu_scatter_add(&be, rows, n, VOCAB, tokens, y, stride, wte_value);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i++)
            wte[tokens[r] * n + i] += y[r * stride + i];
    float *expected = packed(VOCAB, n, wte);
    CHECK(same(padded, wte_value, expected), "scatter_add n %ld members %d", (long)n, members);
    free(wte), free(wpe), free(y), free(wte_value), free(wpe_value), free(tokens), free(positions), free(expected);
}

static void
test_loss(int64_t rows, int64_t vocab, int members)
{
    tp_backend be = backend(members, 0);
    int64_t stride = vocab + 1;
    float *logits = randoms(rows * stride, 20), *copy = floats(rows * stride);
    double *loss = calloc((size_t)rows, 8), *again = calloc((size_t)rows, 8), *d = calloc((size_t)vocab, 8);
    int32_t *targets = calloc((size_t)rows, 4);
    for (int64_t r = 0; r < rows; r++)
        logits[r * stride + vocab] = NAN, targets[r] = (int32_t)((r * 7919 + vocab - 1) % vocab);
    memcpy(copy, logits, (size_t)(rows * stride) * 4);
    cpu_softmax_loss(&be, rows, vocab, logits, stride, targets, 0.25f, 0, loss);
    CHECK(same(rows * stride, logits, copy), "logits changed though dlogits was 0");
    cpu_softmax_loss(&be, rows, vocab, logits, stride, targets, 0.25f, 1, again);
    CHECK(memcmp(loss, again, (size_t)rows * 8) == 0, "loss depends on dlogits");
    for (int64_t r = 0; r < rows; r++) {
        double most = -INFINITY, sum = 0;
        const float *x = copy + r * stride;
        for (int64_t i = 0; i < vocab; i++)
            most = fmax(most, (double)x[i]);
        for (int64_t i = 0; i < vocab; i++)
            sum += exp((double)x[i] - most);
        for (int64_t i = 0; i < vocab; i++)
            d[i] = 0.25 * (exp((double)x[i] - most) / sum - (i == targets[r]));
        double expected = log(sum) + most - (double)x[targets[r]];
        CHECK(fabs(loss[r] - expected) <= 1e-6 * (1 + expected), "loss %.9g, reference %.9g", loss[r], expected);
        CHECK(error_of(vocab, logits + r * stride, d) <= TOLERANCE, "dlogits of row %ld", (long)r);
        CHECK(isnan(logits[r * stride + vocab]), "row %ld is written beyond its end", (long)r);
    }
    note(loss, (size_t)rows * 8), note(logits, (size_t)(rows * stride) * 4);
    free(logits), free(copy), free(loss), free(again), free(d), free(targets);
}

/* ---- element-wise -------------------------------------------------------------------------------------------------- */

static void
test_pointwise(int64_t n)
{
    float *x = randoms(n, 1), *y = floats(n + 1), *z = randoms(n, 1);
    double expected = 0, sums[4];
    for (int64_t i = 0; i < n; i++)
        expected += (double)x[i] * (double)x[i];
    for (int members = 1; members <= 3; members++) {
        tp_backend be = backend(members, 0);
        cpu_copy(&be, n, z, y);
        CHECK(same(n, y, z), "copy of %ld", (long)n);
        cpu_add(&be, n, x, y);
        for (int64_t i = 0; i < n; i++)
            CHECK(y[i] == x[i] + z[i], "add at %ld of %ld", (long)i, (long)n);
        cpu_zero(&be, n, y);
        for (int64_t i = 0; i < n; i++)
            CHECK(y[i] == 0, "zero at %ld of %ld", (long)i, (long)n);
        CHECK(isnan(y[n]), "written beyond the end");
        sums[members] = cpu_sumsq(&be, n, x);
        CHECK(fabs(sums[members] - expected) <= 1e-13 * expected, "sumsq %g, reference %g", sums[members], expected);
        CHECK(memcmp(&sums[members], &sums[1], 8) == 0, "sumsq depends on the team");
    }
    note(&sums[1], 8);
    free(x), free(y), free(z);
}

static void
test_adamw(int64_t n, int members)
{
    tp_backend be = backend(members, 0);
    float *p = randoms(n + 1, 1), *g = randoms(n, 3), *m = randoms(n + 1, 1), *v = randoms(n + 1, 1);
    double *ep = calloc((size_t)n, 8), *em = calloc((size_t)n, 8), *ev = calloc((size_t)n, 8);
    for (int64_t i = 0; i < n; i++) {
        v[i] = fabsf(v[i]);
        double gs = (double)g[i] * 0.5;
        em[i] = 0.9 * (double)m[i] + 0.1 * gs;
        ev[i] = 0.95 * (double)v[i] + 0.05 * gs * gs;
        ep[i] = (double)p[i] - 0.01 * (em[i] / 0.271 / (sqrt(ev[i] / 0.143) + 1e-8) + 0.1 * (double)p[i]);
    }
    p[n] = m[n] = v[n] = NAN;
    cpu_adamw(&be, n, p, g, m, v, 0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.271f, 0.143f, 0.5f);
    CHECK(error_of(n, p, ep) <= 1e-6 && error_of(n, m, em) <= 1e-6 && error_of(n, v, ev) <= 1e-6,
          "adamw n %ld: errors %g %g %g", (long)n, error_of(n, p, ep), error_of(n, m, em), error_of(n, v, ev));
    CHECK(isnan(p[n]) && isnan(m[n]) && isnan(v[n]), "written beyond the end");
    note(p, (size_t)n * 4), note(m, (size_t)n * 4), note(v, (size_t)n * 4);
    memset(p, 0, (size_t)n * 4), memset(g, 0, (size_t)n * 4), memset(m, 0, (size_t)n * 4), memset(v, 0, (size_t)n * 4);
    cpu_adamw(&be, n, p, g, m, v, 0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.271f, 0.143f, 0.5f);
    for (int64_t i = 0; i < n; i++)
        CHECK(p[i] == 0 && m[i] == 0 && v[i] == 0, "padding does not stay zero");
    free(p), free(g), free(m), free(v), free(ep), free(em), free(ev);
}

static void
test_functions(void)
{
    float in[VEC_LANES], out[VEC_LANES], slope[VEC_LANES];
    for (float x = -12.0f; x <= 12.0f; x += 0.003f) {
        for (int i = 0; i < VEC_LANES; i++)
            in[i] = x + 0.0001f * (float)i;
        vec_store(out, vec_gelu(vec_load(in)));
        vec_store(slope, vec_dgelu(vec_load(in)));
        note(out, sizeof out), note(slope, sizeof slope);
        for (int i = 0; i < VEC_LANES; i++) {
            double d = (double)in[i], u = sqrt(2 / M_PI) * (d + 0.044715 * d * d * d), s = 1 / (1 + exp(-2 * u));
            double expected = s + d * s * (1 - s) * 2 * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * d * d);
            CHECK(fabs((double)out[i] - d * s) <= 1e-6 * fmax(1, fabs(d)), "gelu(%g) = %g", d, (double)out[i]);
            CHECK(fabs((double)slope[i] - expected) <= 1e-6, "gelu'(%g) = %g, not %g", d, (double)slope[i], expected);
        }
    }
}

static int
supported(void)
{
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

int
main(void)
{
    static const int64_t ragged[] = {1, 1, 62, 5, 70, 49}, even[] = {48, 48}, few[] = {3, 1, 2}, whole[] = {130};
    if (!supported())
        return 77;
    for (int members = 2; members <= 3; members++)
        if (tp_team_open(members, &teams[members]) != TP_OK)
            return 99;
    test_functions();
    test_attention(2, 2, 16, 6, ragged);
    test_attention(1, 2, 64, 6, ragged);
    test_attention(1, 1, 80, 6, ragged);
    test_attention(3, 1, 5, 6, ragged);
    test_attention(1, 3, 128, 2, even);
    test_attention(2, 1, 1, 3, few);
    test_attention(1, 2, 33, 1, whole);
    static const int64_t widths[] = {1, 5, 16, 33, 64, 100, 768};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        test_norm(9, widths[i]);
        test_norm(1, widths[i]);
        for (int members = 1; members <= 3; members++)
            test_embedding(23, widths[i], members);
    }
    static const int64_t sizes[] = {1, 15, 16, 17, 255, 4096, 70001};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        test_pointwise(sizes[i]);
        for (int members = 1; members <= 3; members++)
            test_adamw(sizes[i], members), test_loss(3, sizes[i], members);
    }
    for (int members = 2; members <= 3; members++)
        tp_team_close(teams[members]);
    printf("digest %016llx, %d failures\n", (unsigned long long)digest, failures);
    return failures != 0;
}
