/* Epilogues that cublasLt does not fuse with a product: kernels of ours do them after it. */
#include "cuda/gemm_inside.h"

#include "cuda/kernels.h"

/* Before the product, which writes aux by the stride of y. */
static tp_status
check_gaps(const tp_gemm_op *op)
{
    int64_t n = tp_gemm_width(op);
    if (op->aux_stride != n || op->y_stride != n)
        return tp_fail(TP_EVALUE, "gemm: a GELU that is not fused takes rows without gaps: the strides of y and aux are %lld "
                       "and %lld, the width %lld", (long long)op->y_stride, (long long)op->aux_stride, (long long)n);
    return TP_OK;
}

int
tp_gemm_may_add_bias(const tp_gemm_op *op)
{
    return op->bias != NULL && op->dtype == TP_F32 && op->kind == TP_GEMM_LINEAR && op->epilogue >= TP_GEMM_BIAS &&
           op->epilogue <= TP_GEMM_BIAS_RESIDUAL && op->y_stride == tp_gemm_width(op);
}

tp_status
tp_gemm_before(const plan *p, const tp_gemm_op *op, void **y)
{
    int separate = tp_gemm_is_gelu(op->epilogue) && !p->fused;
    if (separate)
        TP_TRY(check_gaps(op));
    *y = separate && op->epilogue == TP_GEMM_BIAS_GELU_AUX ? op->aux : op->y;
    return TP_OK;
}

tp_status
tp_gemm_behind(const tp_gemm *gemm, const plan *p, const tp_gemm_op *op, void *y)
{
    int64_t n = tp_gemm_width(op);
    if (p->bias_apart)
        TP_TRY(tp_cuda_add_bias(gemm->stream, op->dtype, op->rows, n, y, op->bias, NULL));
    if (p->fused || !tp_gemm_is_gelu(op->epilogue))
        return TP_OK;
    if (op->epilogue == TP_GEMM_DGELU)
        return tp_cuda_dgelu(gemm->stream, op->dtype, op->rows, n, op->aux, op->y, op->y);
    return tp_cuda_gelu(gemm->stream, op->dtype, op->rows, n, op->aux, op->y);
}
