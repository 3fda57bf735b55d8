/* The matrix products against plain loops, of fmaf or of what AMX documents, bit for bit, in buffers of the exact size:
 * run it under ASan, UBSan and TSan. Prints one line per failure; exit code 1 if there was one.
 *
 *   cc -std=c11 -D_GNU_SOURCE -g -fsanitize=address,undefined -I. tests/c/test_gemm.c <objects of csrc/base, cpu> */
#include "csrc/backend/backend.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures;
static int amx; /* what is tested sums by tiles */

static float *
numbers(int64_t n, uint32_t seed)
{
    float *v = malloc((size_t)n * sizeof *v);
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        v[i] = ldexpf((float)(int32_t)seed, (int)(seed >> 9 & 7u) - 34);
    }
    return v;
}

static void
expect_same(const char *isa, const char *what, int64_t m, int64_t k, int64_t n, const float *a, const float *b,
            int64_t count)
{
    if (memcmp(a, b, (size_t)count * sizeof *a) == 0)
        return;
    failures++;
    fprintf(stderr, "%s %s of %" PRId64 " x %" PRId64 " x %" PRId64 " differs from its sums\n", isa, what, m, k, n);
}

/* Part 0, 1 or 2 of x as the sum of three bf16. */
static float
third(float x, int part)
{
    for (;; part--) {
        uint32_t bits;
        float upper;
        memcpy(&bits, &x, sizeof bits);
        bits = (bits + 0x8000u) & 0xffff0000u;
        memcpy(&upper, &bits, sizeof upper);
        if (part == 0)
            return upper;
        x -= upper;
    }
}

/* What one instruction adds: products of two parts, at `count` k's. */
static float
tile_sum(int64_t count, const float *a, int64_t ap, int a_part, const float *b, int64_t bp, int b_part)
{
    float sum[2] = {0.0f, 0.0f};
    for (int64_t p = 0; p < count; p++)
        sum[p % 2] = fmaf(third(a[p * ap], a_part), third(b[p * bp], b_part), sum[p % 2]);
    return sum[0] + sum[1];
}

static float
tiles(int64_t depth, const float *a, int64_t ap, const float *b, int64_t bp, float acc)
{
    static const int order[6][2] = {{0, 2}, {0, 1}, {1, 1}, {1, 0}, {2, 0}, {0, 0}};
    for (int64_t p = 0; p < depth; p += 32)
        for (int i = 0; i < 6; i++)
            acc += tile_sum(depth - p < 32 ? depth - p : 32, a + p * ap, ap, order[i][0], b + p * bp, bp, order[i][1]);
    return acc;
}

/* c[i, j] = sum over p ascending of a[i * ai + p * ap] * b[p * bp + j * bj], from c where it goes on: a chain, or AMX's tiles. */
static void
chains(int64_t m, int64_t depth, int64_t n, const float *a, int64_t ai, int64_t ap, const float *b, int64_t bp,
       int64_t bj, float *c, int go_on)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            float acc = go_on ? c[i * n + j] : 0.0f;
            if (amx)
                acc = tiles(depth, a + i * ai, ap, b + j * bj, bp, acc);
            for (int64_t p = 0; p < depth && !amx; p++)
                acc = fmaf(a[i * ai + p * ap], b[p * bp + j * bj], acc);
            c[i * n + j] = acc;
        }
}

/* The same in the pieces of backend.h, each a sum from +0. */
static void
pieces(int64_t m, int64_t depth, int64_t n, const float *a, int64_t ai, const float *b, int64_t bp, int64_t bj, float *c)
{
    float *one = malloc((size_t)(m * n) * sizeof *one);
    int64_t grain = amx ? 32 : 1, units = (depth + grain - 1) / grain, most = amx ? 12 : 192, count = (units + most - 1) / most;
    memset(c, 0, (size_t)(m * n) * sizeof *c);
    for (int64_t p = 0; p < count; p++) {
        int64_t first = units * p / count * grain, last = units * (p + 1) / count * grain;
        last = last < depth ? last : depth;
        chains(m, last - first, n, a + first, ai, 1, b + first * bp, bp, bj, one, 0);
        for (int64_t i = 0; i < m * n; i++)
            c[i] = p == 0 ? one[i] : c[i] + one[i];
    }
    free(one);
}

static void
check_forward(tp_backend *be, int64_t m, int64_t k, int64_t n, const float *x, const float *w, const float *value)
{
    float *y = numbers(m * n, 5), *bias = numbers(n, 6), *expected = malloc((size_t)(m * n) * sizeof *expected);
    tp_linear op = {.rows = m,
                    .n_in = k,
                    .n_out = n,
                    .x = x,
                    .x_stride = k,
                    .weight = value,
                    .bias = bias,
                    .y = y,
                    .y_stride = n,
                    .epilogue = TP_EPILOGUE_RESIDUAL,
                    .aux = y,
                    .aux_stride = n};
    pieces(m, k, n, x, k, w, n, 1, expected);
    for (int64_t i = 0; i < m * n; i++)
        expected[i] = y[i] + (expected[i] + bias[i % n]);
    be->ops->linear(be, &op);
    expect_same(be->ops->name, "linear", m, k, n, y, expected, m * n);
    free(y), free(bias), free(expected);
}

static void
check_gradients(tp_backend *be, int64_t m, int64_t k, int64_t n, const float *x, const float *w, const float *value)
{
    float *dy = numbers(m * n, 7), *dx = numbers(m * k, 8),
          *expected = malloc((size_t)(m * k + k * n) * sizeof *expected);
    float *value_t = numbers(be->ops->weight_t_floats(k, n), 9), *grad = numbers(be->ops->weight_floats(k, n), 10);
    float *row_major = malloc((size_t)(k * n) * sizeof *row_major);
    be->ops->weight_transpose(be, k, n, value, value_t);
    tp_linear op = {
        .rows = m, .n_in = k, .n_out = n, .x = dy, .x_stride = n, .weight = value_t, .y = dx, .y_stride = k};
    pieces(m, n, k, dy, n, w, 1, n, expected);
    be->ops->linear_t(be, &op);
    expect_same(be->ops->name, "linear_t", m, k, n, dx, expected, m * k);
    /* rows upwards, then downwards onto that */
    chains(k, m, n, x, 1, k, dy, n, 1, expected, 0);
    chains(k, m, n, x + (m - 1) * k, 1, -k, dy + (m - 1) * n, -n, 1, expected, 1);
    be->ops->linear_w(be, m, k, n, x, k, dy, n, grad, 0);
    be->ops->linear_w(be, m, k, n, x + (m - 1) * k, -k, dy + (m - 1) * n, -n, grad, 1);
    be->ops->weight_export(be, k, n, grad, row_major);
    expect_same(be->ops->name, "linear_w", m, k, n, row_major, expected, k * n);
    for (int64_t i = 0; i < k; i++)
        for (int64_t j = n; j < (n + 31) / 32 * 32; j++)
            if (grad[j / 32 * k * 32 + i * 32 + j % 32] != 0.0f) {
                failures++;
                fprintf(stderr, "%s linear_w: the padding is not zero\n", be->ops->name);
                i = k, j = n + 32;
            }
    free(dy), free(dx), free(expected), free(value_t), free(grad), free(row_major);
}

static void
check_shape(tp_backend *be, int64_t m, int64_t k, int64_t n)
{
    float *x = numbers(m * k, 1), *w = numbers(k * n, 2), *back = malloc((size_t)(k * n) * sizeof *back);
    float *value = numbers(be->ops->weight_floats(k, n), 3);
    be->ops->weight_import(be, k, n, w, value);
    be->ops->weight_export(be, k, n, value, back);
    expect_same(be->ops->name, "import and export", m, k, n, back, w, k * n);
    check_forward(be, m, k, n, x, w, value);
    check_gradients(be, m, k, n, x, w, value);
    free(x), free(w), free(back), free(value);
}

static tp_status
check_isa(const char *isa, int threads)
{
    static const int64_t shapes[][3] = {{1, 1, 1},     {2, 3, 33},   {14, 192, 32}, {15, 193, 31}, {27, 65, 97},
                                        {230, 17, 40}, {5, 600, 65}, {3, 20, 801},  {197, 50, 5},
                                        {390, 1600, 3}}; /* the last: several of AMX's blocks and chunks */
    tp_heap *heap = NULL;
    tp_team *team = NULL;
    tp_backend be;
    amx = strcmp(isa, "amx") == 0;
    TP_TRY(tp_heap_open(0, &heap));
    TP_TRY(tp_team_open(threads, &team));
    TP_TRY(tp_cpu_open(isa, heap, team, &be));
    TP_TRY(tp_backend_reserve(&be, be.ops->workspace_bytes(64, 1, 64, 64, 64, threads)));
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        check_shape(&be, shapes[i][0], shapes[i][1], shapes[i][2]);
    tp_backend_close(&be);
    if (tp_heap_bytes(heap) != 0) {
        failures++;
        fprintf(stderr, "%s: %zu bytes are still held after tp_backend_close\n", isa, tp_heap_bytes(heap));
    }
    tp_team_close(team);
    tp_heap_close(heap);
    return TP_OK;
}

int
main(void)
{
    static const char *const isas[] = {"amx", "avx512", "avx2", "portable"};
    for (int i = 0; i < 4; i++)
        for (int threads = 1; threads <= 3; threads++)
            if (tp_cpu_ops(isas[i]) != NULL && check_isa(isas[i], threads) != TP_OK) {
                failures++;
                fprintf(stderr, "%s: %s\n", isas[i], tp_error_message());
            }
    return failures != 0;
}
