#include "cuda/gemm.h"

int64_t
tp_gemm_width(const tp_gemm_op *op)
{
    return op->kind == TP_GEMM_LINEAR_T ? op->n_in : op->n_out;
}

static tp_status
check_matrix(const char *name, const void *memory, int64_t stride, int64_t width)
{
    if (stride < width)
        return tp_fail(TP_EVALUE, "gemm: the stride of %s is %lld, less than its width %lld", name, (long long)stride,
                       (long long)width);
    if (!memory)
        return tp_fail(TP_EVALUE, "gemm: %s is NULL", name);
    return TP_OK;
}

/* cublasLt's row counts and leading dimensions are taken as int32 by many of its kernels. */
static tp_status
check_size(const char *name, int64_t size, int64_t least)
{
    if (size < least || size > INT32_MAX)
        return tp_fail(TP_EVALUE, "gemm: %s is %lld; it must be %lld to %d", name, (long long)size, (long long)least,
                       INT32_MAX);
    return TP_OK;
}

static tp_status
check_epilogue(const tp_gemm_op *op)
{
    static const char *const kinds[] = {"linear", "linear_t", "linear_w"};
    int fits = op->epilogue == TP_GEMM_NONE || (op->epilogue == TP_GEMM_DGELU && op->kind == TP_GEMM_LINEAR_T) ||
               (op->epilogue >= TP_GEMM_BIAS && op->epilogue <= TP_GEMM_BIAS_RESIDUAL && op->kind == TP_GEMM_LINEAR);
    if (!fits)
        return tp_fail(TP_EVALUE, "gemm: epilogue %d does not belong to %s", (int)op->epilogue, kinds[op->kind]);
    if (op->accumulate && op->kind != TP_GEMM_LINEAR_W)
        return tp_fail(TP_EVALUE, "gemm: only linear_w accumulates, not %s", kinds[op->kind]);
    if (op->epilogue >= TP_GEMM_BIAS_GELU_AUX)
        return check_matrix("aux", op->aux, op->aux_stride, tp_gemm_width(op));
    return TP_OK;
}

tp_status
tp_gemm_check(const tp_gemm_op *op)
{
    if ((unsigned)op->kind > TP_GEMM_LINEAR_W)
        return tp_fail(TP_EVALUE, "gemm: there is no kind %d", (int)op->kind);
    if (op->dtype != TP_F32 && op->dtype != TP_BF16)
        return tp_fail(TP_EVALUE, "gemm: there is no dtype %d", (int)op->dtype);
    TP_TRY(check_size("rows", op->rows, 0));
    TP_TRY(check_size("n_in", op->n_in, 1));
    TP_TRY(check_size("n_out", op->n_out, 1));
    TP_TRY(check_matrix("y", op->y, op->y_stride, tp_gemm_width(op)));
    if (op->rows == 0)
        return TP_OK;
    TP_TRY(check_matrix("x", op->x, op->x_stride, op->kind == TP_GEMM_LINEAR_T ? op->n_out : op->n_in));
    TP_TRY(check_matrix("w", op->w, op->w_stride, op->n_out));
    return check_epilogue(op);
}
