/* An algorithm is run once when it is chosen, for three reasons. The product may refuse what cublasLt's heuristics and check
 * allowed. A fused GELU may be another GELU than ours. And running loads the kernel: loaded within a step, it could have to wait for a
 * kernel that itself waits for a message (CUDA Programming Guide, "Lazy Loading", concurrent execution). */
#include "cuda/gemm_inside.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void
tp_gemm_say(tp_gemm *gemm, int what, const char *format, ...)
{
    size_t used = strlen(gemm->caveat);
    if (gemm->said & what)
        return;
    gemm->said |= what;
    if (used > 0 && used + 3 < sizeof gemm->caveat)
        used += (size_t)snprintf(gemm->caveat + used, sizeof gemm->caveat - used, "; ");
    va_list list;
    va_start(list, format);
    vsnprintf(gemm->caveat + used, sizeof gemm->caveat - used, format, list);
    va_end(list);
}

int
tp_gemm_was_refused(const tp_gemm *gemm, const lt_algo *algo)
{
    for (int i = 0; i < gemm->refusals; i++)
        if (memcmp(&gemm->refused[i], algo, sizeof *algo) == 0)
            return 1;
    return 0;
}

void
tp_gemm_drop_refused(const tp_gemm *gemm, lt_heuristic *found, int *count)
{
    int kept = 0;
    for (int i = 0; i < *count; i++)
        if (!tp_gemm_was_refused(gemm, &found[i].algo))
            found[kept++] = found[i];
    *count = kept;
}

/* ---- rows to tell a GELU by ------------------------------------------------------------------------------------------- */

enum { ENDS = 8 }; /* rows from either end */

/* Relative, over all of these: bf16 is rounded once more in one way than in the other, 2^-9 each; fp32 sums differ in order. */
#define OFF_BF16 1e-2
#define OFF_F32  1e-5
#define SPREAD   2.0f /* of what GELU is tried on, RMS: where it bends */

/* Rows of y and aux as floats, of the fused way and of the other; NULL until taken. */
typedef struct {
    float *y[2], *aux[2];
    void *raw;
    int64_t ends, count; /* rows from either end; elements of both */
} samples;

static tp_status
open_samples(const tp_gemm_op *op, samples *s)
{
    int failed = 0;
    s->ends = op->rows < ENDS ? op->rows : ENDS;
    s->count = 2 * s->ends * tp_gemm_width(op);
    for (int i = 0; i < 2; i++) {
        failed |= (s->y[i] = malloc((size_t)s->count * sizeof(float))) == NULL;
        failed |= (s->aux[i] = malloc((size_t)s->count * sizeof(float))) == NULL;
    }
    failed |= (s->raw = malloc((size_t)s->count * sizeof(float))) == NULL;
    return failed ? tp_fail(TP_EMEMORY, "no host memory to try a GELU on %lld numbers", (long long)s->count) : TP_OK;
}

static void
close_samples(samples *s)
{
    for (int i = 0; i < 2; i++) {
        free(s->y[i]);
        free(s->aux[i]);
    }
    free(s->raw);
}

/* The sampled rows of a matrix without gaps, to or from `raw`. */
static tp_status
move(const tp_gemm *gemm, const tp_gemm_op *op, const samples *s, void *matrix, tp_cuda_direction direction)
{
    size_t bytes = (size_t)(s->count / 2) * tp_dtype_bytes(op->dtype);
    size_t behind = (size_t)((op->rows - s->ends) * tp_gemm_width(op)) * tp_dtype_bytes(op->dtype);
    for (int end = 0; end < 2; end++) {
        void *device = (char *)matrix + (end ? behind : 0), *host = (char *)s->raw + (end ? bytes : 0);
        int up = direction == TP_CUDA_TO_DEVICE;
        TP_TRY(tp_cuda_copy(gemm->device, gemm->stream, up ? device : host, up ? host : device, bytes, direction));
    }
    return tp_cuda_synchronize(gemm->device, gemm->stream);
}

static tp_status
read(const tp_gemm *gemm, const tp_gemm_op *op, const samples *s, void *matrix, float *to)
{
    TP_TRY(move(gemm, op, s, matrix, TP_CUDA_TO_HOST));
    if (op->dtype == TP_F32) {
        memcpy(to, s->raw, (size_t)s->count * sizeof *to);
        return TP_OK;
    }
    for (int64_t i = 0; i < s->count; i++) {
        uint32_t bits = (uint32_t)((const uint16_t *)s->raw)[i] << 16;
        memcpy(&to[i], &bits, sizeof bits);
    }
    return TP_OK;
}

/* aux where it is read: numbers in [-4, 4) of a generator of Lehmer's, in either type. */
static tp_status
make_up_aux(const tp_gemm *gemm, const tp_gemm_op *op, const samples *s)
{
    uint32_t state = 1;
    for (int64_t i = 0; i < s->count; i++) {
        state = (uint32_t)((uint64_t)state * 48271 % 2147483647);
        float x = 8.0f * (float)state / 2147483647.0f - 4.0f;
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        if (op->dtype == TP_F32)
            ((float *)s->raw)[i] = x;
        else
            ((uint16_t *)s->raw)[i] = (uint16_t)(bits >> 16);
    }
    return move(gemm, op, s, op->aux, TP_CUDA_TO_DEVICE);
}

/* ---- is it ours? --------------------------------------------------------------------------------------------------------- */

static double
size_of(const float *x, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (double)x[i] * (double)x[i];
    return sqrt(sum);
}

static double
off_by(const float *x, const float *right, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        double d = (double)x[i] - (double)right[i];
        sum += d * d;
    }
    return sqrt(sum) / size_of(right, count);
}

static tp_status
run_and_read(const tp_gemm *gemm, const plan *p, const tp_gemm_op *op, float alpha, samples *s, int which)
{
    TP_TRY(tp_gemm_set_pointers(gemm, p, op));
    TP_TRY(tp_gemm_execute(gemm, p, op, &p->algo, alpha));
    TP_TRY(read(gemm, op, s, op->y, s->y[which]));
    return read(gemm, op, s, op->aux, s->aux[which]);
}

/* *off: how far the fused way is from the other; 0 where memory holds nothing to tell it by (zeros, what is no number). */
static tp_status
compare(const tp_gemm *gemm, const plan *p, const plan *apart, const tp_gemm_op *op, samples *s, double *off)
{
    int forward = op->epilogue == TP_GEMM_BIAS_GELU_AUX;
    *off = 0;
    if (!forward)
        TP_TRY(make_up_aux(gemm, op, s));
    TP_TRY(run_and_read(gemm, apart, op, 1.0f, s, 1));
    double size = size_of(forward ? s->aux[1] : s->y[1], s->count);
    if (!(size > 1e-30 && size < 1e30))
        return TP_OK;
    float alpha = forward ? SPREAD * (float)(sqrt((double)s->count) / size) : 1.0f;
    TP_TRY(run_and_read(gemm, p, op, alpha, s, 0));
    TP_TRY(run_and_read(gemm, apart, op, alpha, s, 1));
    double y = off_by(s->y[0], s->y[1], s->count), aux = off_by(s->aux[0], s->aux[1], s->count);
    *off = y > aux || isnan(y) ? y : aux; /* what is no number wins */
    return TP_OK;
}

/* *ran 0: the library refuses its algorithm after all, which is kept in mind. Fails as a lost device does, or by the library's word
 * where that was so often. */
static tp_status
run(tp_gemm *gemm, const plan *p, const tp_gemm_op *op, int *ran)
{
    TP_TRY(tp_gemm_set_pointers(gemm, p, op));
    tp_status status = tp_gemm_execute(gemm, p, op, &p->algo, 1.0f);
    *ran = status == TP_OK;
    if (status != TP_ERUNTIME || gemm->refusals == GEMM_REFUSALS)
        return status;
    TP_TRY(tp_cuda_synchronize(gemm->device, gemm->stream));
    gemm->refused[gemm->refusals++] = p->algo;
    return TP_OK;
}

/* The other way to do the same, which runs; NULL: there is none. */
static tp_status
open_apart(tp_gemm *gemm, const plan *p, const tp_gemm_op *op, plan **out)
{
    int ran = 0;
    while (!ran) {
        TP_TRY(tp_gemm_try_plan(gemm, &p->key, op, GEMM_APART, NULL, out));
        tp_status status = *out == NULL ? TP_OK : run(gemm, *out, op, &ran);
        if (*out == NULL || (status == TP_OK && ran))
            return TP_OK;
        tp_gemm_plan_free(gemm, *out);
        TP_TRY(status);
    }
    return TP_OK;
}

/* *right 0: it is not the GELU that our kernel is. */
static tp_status
check_gelu(tp_gemm *gemm, const plan *p, const tp_gemm_op *op, int *right)
{
    plan *apart;
    samples s = {0};
    double off = 0, most = op->dtype == TP_BF16 ? OFF_BF16 : OFF_F32;
    *right = 1;
    if (op->aux_stride != tp_gemm_width(op) || op->y_stride != op->aux_stride)
        return TP_OK; /* the other way takes no gaps */
    TP_TRY(open_apart(gemm, p, op, &apart));
    if (apart == NULL)
        return TP_OK;
    tp_status status = open_samples(op, &s);
    if (status == TP_OK)
        status = compare(gemm, p, apart, op, &s, &off);
    close_samples(&s);
    tp_gemm_plan_free(gemm, apart);
    TP_TRY(status);
    *right = off <= most;
    if (!*right)
        tp_gemm_say(gemm, GEMM_OTHER_GELU, "GELU is a kernel of its own (for %lld rows, n_in %lld, n_out %lld cublasLt's fused one is off by "
                    "%.1e)", (long long)op->rows, (long long)op->n_in, (long long)op->n_out, off);
    return TP_OK;
}

tp_status
tp_gemm_prove(tp_gemm *gemm, const tp_gemm_op *op, plan *p)
{
    for (;;) {
        int right = 1, ran;
        TP_TRY(run(gemm, p, op, &ran));
        if (ran && p->fused && tp_gemm_is_gelu(op->epilogue))
            TP_TRY(check_gelu(gemm, p, op, &right));
        if (ran && right)
            return TP_OK;
        if (ran)
            gemm->options.fuse = 1;
        TP_TRY(tp_gemm_replan(gemm, op, &p));
    }
}
