#include "cuda/gemm_algo.h"

enum { TILE = 64 };

size_t
tp_gemm_workspace_bytes(const tp_cuda_device *device)
{
    /* what cuBLAS takes for itself: 32 MiB from Hopper on, 4 MiB before (cuBLAS documentation, cublasSetWorkspace) */
    return tp_cuda_device_properties(device)->major >= 9 ? (size_t)32 << 20 : (size_t)4 << 20;
}

/* Besides counts there is -2, tiles taken by whoever is free ("stream-K"): then parts follow from all of the product's sizes. */
int
tp_gemm_is_one_sum(const tp_cublaslt *lt, const lt_algo *algo)
{
    int32_t parts = 1;
    return lt->algo_get(algo, LT_ALGO_SPLITK, &parts, sizeof parts, NULL) != LT_SUCCESS || parts == 0 || parts == 1;
}

int
tp_gemm_ragged(const tp_gemm_op *op)
{
    int64_t depth = op->kind == TP_GEMM_LINEAR ? op->n_in : op->kind == TP_GEMM_LINEAR_T ? op->n_out : op->rows;
    return depth % TILE != 0;
}

void
tp_gemm_sift(const tp_cublaslt *lt, const tp_gemm_op *op, int one_sum, size_t workspace, lt_heuristic *found, int *count)
{
    int good = 0, whole = 0;
    for (int i = 0; i < *count; i++)
        if (found[i].state == LT_SUCCESS && found[i].workspace <= workspace)
            found[good++] = found[i];
    *count = good;
    if (!one_sum && !tp_gemm_ragged(op))
        return;
    for (int i = 0; i < good; i++)
        whole += tp_gemm_is_one_sum(lt, &found[i].algo);
    for (int i = 0, to = 0; whole > 0 && i < good; i++)
        if (tp_gemm_is_one_sum(lt, &found[i].algo))
            found[to++] = found[i];
    *count = whole > 0 ? whole : good;
}
