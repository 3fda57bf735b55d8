/* Which of the algorithms that cublasLt offers a product may have. */
#ifndef TP_CUDA_GEMM_ALGO_H
#define TP_CUDA_GEMM_ALGO_H

#include "cuda/dl_cublaslt.h"
#include "cuda/gemm.h"

/* 1 if every number of the product is one sum over all of its depth. */
int
tp_gemm_is_one_sum(const tp_cublaslt *lt, const lt_algo *algo);
/* 1 where an algorithm with split sums may lose the end of them. cublasLt 12.8 and 13.1 leave out the last k % b of k products,
 * where b is the algorithm's tile (64 at most for what we ask), on three architectures, H100 among them, if k / b is a multiple
 * of the parts and these are more than k % b (facebookexperimental/triton, pull request 2767). */
int
tp_gemm_ragged(const tp_gemm_op *op);
/* Keep what can run in `workspace` bytes, and of that, where one_sum or the product is ragged, what is one sum, if there is any;
 * *count is how many are left, the first first. */
void
tp_gemm_sift(const tp_cublaslt *lt, const tp_gemm_op *op, int one_sum, size_t workspace, lt_heuristic *found, int *count);

#endif
