/* gemm.h by loops: y[i, :] = sum over k ascending of a(i, k) b[k, :], in fp32, b first brought to rows of floats. */
#include "cuda/gemm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tp_gemm {
    tp_cuda_device *device;
    tp_stream stream;
    int64_t plans;
};

size_t
tp_gemm_workspace_bytes(const tp_cuda_device *device)
{
    (void)device;
    return 4096; /* not used: a caller that forgets it is found by its NULL */
}

tp_status
tp_gemm_open(tp_cuda_device *device, tp_stream stream, const tp_gemm_options *options, void *workspace, tp_gemm **out)
{
    (void)options;
    *out = NULL;
    if (!workspace)
        return tp_fail(TP_EVALUE, "gemm: the workspace is NULL; it takes %zu bytes", tp_gemm_workspace_bytes(device));
    *out = calloc(1, sizeof **out);
    if (!*out)
        return tp_fail(TP_EMEMORY, "no host memory for a gemm handle");
    (*out)->device = device;
    (*out)->stream = stream;
    return TP_OK;
}

void
tp_gemm_close(tp_gemm *gemm)
{
    free(gemm);
}

static float
load(tp_dtype dtype, const void *from, int64_t at)
{
    float x;
    if (dtype == TP_F32)
        return ((const float *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void
store(tp_dtype dtype, void *to, int64_t at, float x)
{
    uint32_t bits;
    if (dtype == TP_F32) {
        ((float *)to)[at] = x;
        return;
    }
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    ((uint16_t *)to)[at] = (uint16_t)rounded;
}

/* tanh form: gelu(h) and its derivative. */
static float
gelu(float h)
{
    float t = tanhf(0.7978845608f * (h + 0.044715f * h * h * h));
    return 0.5f * h * (1.0f + t);
}

static float
dgelu(float h)
{
    float t = tanhf(0.7978845608f * (h + 0.044715f * h * h * h));
    return 0.5f * (1.0f + t) + 0.5f * h * (1.0f - t * t) * 0.7978845608f * (1.0f + 3.0f * 0.044715f * h * h);
}

static void
finish_row(const tp_gemm_op *op, int64_t row, const float *sums)
{
    int64_t width = tp_gemm_width(op);
    if (op->kind == TP_GEMM_LINEAR_W) {
        float *y = (float *)op->y + row * op->y_stride;
        for (int64_t j = 0; j < width; j++)
            y[j] = op->accumulate ? y[j] + sums[j] : sums[j];
        return;
    }
    for (int64_t j = 0; j < width; j++) {
        int64_t aux = row * op->aux_stride + j;
        float h = sums[j] + (op->bias && op->epilogue != TP_GEMM_NONE ? load(op->dtype, op->bias, j) : 0.0f);
        if (op->epilogue == TP_GEMM_BIAS_GELU_AUX) {
            store(op->dtype, op->aux, aux, h);
            h = gelu(h);
        } else if (op->epilogue == TP_GEMM_BIAS_RESIDUAL) {
            h = load(op->dtype, op->aux, aux) + h;
        } else if (op->epilogue == TP_GEMM_DGELU) {
            h = h * dgelu(load(op->dtype, op->aux, aux));
        }
        store(op->dtype, op->y, row * op->y_stride + j, h);
    }
}

/* b[depth, width] as floats. */
static void
spread(const tp_gemm_op *op, int64_t depth, int64_t width, float *b)
{
    int transposed = op->kind == TP_GEMM_LINEAR_T;
    for (int64_t k = 0; k < depth; k++)
        for (int64_t j = 0; j < width; j++)
            b[k * width + j] = load(op->dtype, op->w, transposed ? j * op->w_stride + k : k * op->w_stride + j);
}

static tp_status
multiply(const tp_gemm_op *op)
{
    int weight = op->kind == TP_GEMM_LINEAR_W;
    int64_t height = weight ? op->n_in : op->rows, width = tp_gemm_width(op);
    int64_t depth = weight ? op->rows : op->kind == TP_GEMM_LINEAR_T ? op->n_out : op->n_in;
    float *b = malloc((size_t)(depth * width + width) * sizeof *b), *sums = b + depth * width;
    if (!b)
        return tp_fail(TP_EMEMORY, "the emulated product needs %lld bytes of host memory, which there are not",
                       (long long)(depth * width * 4));
    spread(op, depth, width, b);
    for (int64_t i = 0; i < height; i++) {
        memset(sums, 0, (size_t)width * sizeof *sums);
        for (int64_t k = 0; k < depth; k++) {
            float a = load(op->dtype, op->x, weight ? k * op->x_stride + i : i * op->x_stride + k);
            const float *row = b + k * width;
            for (int64_t j = 0; j < width; j++)
                sums[j] += a * row[j];
        }
        finish_row(op, i, sums);
    }
    free(b);
    return TP_OK;
}

tp_status
tp_gemm_prepare(tp_gemm *gemm, const tp_gemm_op *op)
{
    TP_TRY(tp_gemm_check(op));
    gemm->plans++;
    return TP_OK;
}

tp_status
tp_gemm_run(tp_gemm *gemm, const tp_gemm_op *op)
{
    TP_TRY(tp_gemm_check(op));
    if (op->rows > 0 || (op->kind == TP_GEMM_LINEAR_W && !op->accumulate))
        TP_TRY(multiply(op));
    (void)gemm;
    return tp_cuda_launched("gemm");
}

int64_t
tp_gemm_plans(const tp_gemm *gemm)
{
    return gemm->plans;
}

void
tp_gemm_describe(tp_gemm *gemm, const tp_gemm_op *op, char *text, size_t size)
{
    (void)gemm, (void)op;
    snprintf(text, size, "loops on the host");
}
