/* One shape of attention, timed: attention.py builds and runs it. Prints, for each round, processor seconds of: a matrix
 * product, forward over all slices, backward over all slices.
 *
 *     attention ISA H D T S ROUNDS */
#include "csrc/backend/backend.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define GEMM_ROWS 1024
#define GEMM_WIDTH 768

static double
now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static float *
numbers(int64_t n, uint32_t seed)
{
    float *v = malloc((size_t)n * sizeof *v);
    if (v == NULL)
        exit(1);
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        v[i] = (float)(int32_t)(seed ^ seed >> 15) * 0x1p-31f;
    }
    return v;
}

static double
time_product(tp_backend *be)
{
    static float *x, *w, *y;
    if (x == NULL) {
        x = numbers(GEMM_ROWS * GEMM_WIDTH, 1);
        y = numbers(GEMM_ROWS * GEMM_WIDTH, 2);
        w = numbers(be->ops->weight_floats(GEMM_WIDTH, GEMM_WIDTH), 3);
    }
    tp_linear op = {.rows = GEMM_ROWS, .n_in = GEMM_WIDTH, .n_out = GEMM_WIDTH, .x = x, .x_stride = GEMM_WIDTH,
                    .weight = w, .y = y, .y_stride = GEMM_WIDTH};
    double start = now();
    be->ops->linear(be, &op);
    return now() - start;
}

static void
time_attention(tp_backend *be, tp_attention shape, int rounds)
{
    int64_t width = shape.heads * shape.head_dim, total = shape.total, stats = shape.heads * total;
    float *qkv = numbers(total * 3 * width, 4), *grad = numbers(total * 3 * width, 5), *o = numbers(total * width, 6);
    float *d_o = numbers(total * width, 7), *lse = numbers(stats, 8), *delta = numbers(stats, 9);
    for (int i = 0; i <= rounds; i++) {
        double product = time_product(be), start = now();
        for (shape.context = 0; shape.context < total; shape.context += shape.slice)
            be->ops->attention_forward(be, &shape, qkv + shape.context * 3 * width, qkv + width, qkv + 2 * width, 3 * width,
                                       o + shape.context * width, lse);
        double middle = now();
        for (shape.context = total - shape.slice; shape.context >= 0; shape.context -= shape.slice)
            be->ops->attention_backward(be, &shape, qkv + shape.context * 3 * width, qkv + width, qkv + 2 * width, 3 * width,
                                        o + shape.context * width, d_o + shape.context * width, lse, delta,
                                        grad + shape.context * 3 * width, grad + width, grad + 2 * width, 3 * width);
        if (i > 0) /* the first round touches the memory */
            printf("%.9f %.9f %.9f\n", product, middle - start, now() - middle);
    }
    free(qkv), free(grad), free(o), free(d_o), free(lse), free(delta);
}

int
main(int count, char **words)
{
    tp_heap *heap = NULL;
    tp_backend be;
    if (count != 7)
        return 2;
    int64_t heads = atoll(words[2]), dim = atoll(words[3]), total = atoll(words[4]), slice = atoll(words[5]);
    if (total % slice != 0 || tp_heap_open(0, &heap) != TP_OK || tp_cpu_open(words[1], heap, NULL, &be) != TP_OK ||
        tp_backend_reserve(&be, be.ops->workspace_bytes(heads * dim, heads, 64, total, GEMM_ROWS > slice ? GEMM_ROWS : slice, 1)))
        return 1;
    tp_attention shape = {.batch = 1, .heads = heads, .head_dim = dim, .slice = slice, .total = total,
                          .qkv_stride = 3 * heads * dim, .o_stride = heads * dim};
    time_attention(&be, shape, atoi(words[6]));
    tp_backend_close(&be);
    tp_heap_close(heap);
    return 0;
}
