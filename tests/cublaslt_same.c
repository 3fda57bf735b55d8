/* cuda/dl_cublaslt.h against the real cublasLt.h: compiled (not run) by tests/test_cuda_gemm.py where that header is. */
#include <cublasLt.h>

#include "cuda/dl_cublaslt.h"

#define SAME(ours, theirs) _Static_assert((long long)(ours) == (long long)(theirs), #ours " is not " #theirs)
SAME(LT_SUCCESS, CUBLAS_STATUS_SUCCESS);
SAME(LT_NOT_SUPPORTED, CUBLAS_STATUS_NOT_SUPPORTED);
SAME(LT_R_32F, CUDA_R_32F);
SAME(LT_R_16BF, CUDA_R_16BF);
SAME(LT_COMPUTE_32F, CUBLAS_COMPUTE_32F);
SAME(LT_OP_N, CUBLAS_OP_N);
SAME(LT_OP_T, CUBLAS_OP_T);
SAME(LT_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSA);
SAME(LT_DESC_TRANSB, CUBLASLT_MATMUL_DESC_TRANSB);
SAME(LT_DESC_EPILOGUE, CUBLASLT_MATMUL_DESC_EPILOGUE);
SAME(LT_DESC_BIAS_POINTER, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
SAME(LT_DESC_EPILOGUE_AUX_POINTER, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
SAME(LT_DESC_EPILOGUE_AUX_LD, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
SAME(LT_DESC_SM_COUNT_TARGET, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET);
SAME(LT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_DEFAULT);
SAME(LT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_BIAS);
SAME(LT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
SAME(LT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_DGELU);
SAME(LT_PREF_MAX_WORKSPACE_BYTES, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
SAME(LT_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
SAME(LT_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
SAME(LT_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
SAME(LT_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
SAME(LT_PREF_MIN_ALIGNMENT_D_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
SAME(LT_REDUCTION_NONE, CUBLASLT_REDUCTION_SCHEME_NONE);
SAME(LT_REDUCTION_ALL, CUBLASLT_REDUCTION_SCHEME_MASK);
SAME(LT_ALGO_ID, CUBLASLT_ALGO_CONFIG_ID);
SAME(LT_ALGO_TILE_ID, CUBLASLT_ALGO_CONFIG_TILE_ID);
SAME(LT_ALGO_SPLITK, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
SAME(LT_ALGO_STAGES_ID, CUBLASLT_ALGO_CONFIG_STAGES_ID);
SAME(sizeof(lt_algo), sizeof(cublasLtMatmulAlgo_t));
SAME(sizeof(lt_heuristic), sizeof(cublasLtMatmulHeuristicResult_t));
SAME(offsetof(lt_heuristic, workspace), offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
SAME(offsetof(lt_heuristic, state), offsetof(cublasLtMatmulHeuristicResult_t, state));
SAME(offsetof(lt_heuristic, waves), offsetof(cublasLtMatmulHeuristicResult_t, wavesCount));
SAME(sizeof(cublasStatus_t), sizeof(int));
SAME(sizeof(cudaDataType_t), sizeof(int));
SAME(sizeof(cublasComputeType_t), sizeof(int));
SAME(sizeof(cublasLtMatmulDescAttributes_t), sizeof(int));
SAME(sizeof(cublasLtMatmulPreferenceAttributes_t), sizeof(int));
SAME(sizeof(cublasLtMatmulAlgoConfigAttributes_t), sizeof(int));

/* The number and the sizes of arguments: each real prototype written out with the types it has in the header, and beside it
 * ours, which differs from it in names of pointers and enums only. */
#define TAKES(type, ...) _Static_assert(__builtin_types_compatible_p(__typeof__(type), __typeof__(__VA_ARGS__)), #type)
TAKES(cublasLtCreate, cublasStatus_t(cublasLtHandle_t *));
TAKES(cublasLtGetVersion, lt_version);
TAKES(cublasLtGetStatusString, const char *(cublasStatus_t));
TAKES(cublasLtMatmulDescCreate, cublasStatus_t(cublasLtMatmulDesc_t *, cublasComputeType_t, cudaDataType_t));
TAKES(cublasLtMatmulDescSetAttribute, cublasStatus_t(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *, size_t));
TAKES(cublasLtMatrixLayoutCreate, cublasStatus_t(cublasLtMatrixLayout_t *, cudaDataType, uint64_t, uint64_t, int64_t));
TAKES(cublasLtMatmulPreferenceCreate, cublasStatus_t(cublasLtMatmulPreference_t *));
TAKES(cublasLtMatmulPreferenceSetAttribute,
      cublasStatus_t(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void *, size_t));
TAKES(cublasLtMatmulAlgoGetHeuristic,
      cublasStatus_t(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                     cublasLtMatmulHeuristicResult_t *, int *));
TAKES(cublasLtMatmulAlgoCheck,
      cublasStatus_t(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *,
                     cublasLtMatmulHeuristicResult_t *));
TAKES(cublasLtMatmulAlgoConfigGetAttribute,
      cublasStatus_t(const cublasLtMatmulAlgo_t *, cublasLtMatmulAlgoConfigAttributes_t, void *, size_t, size_t *));
TAKES(cublasLtMatmul,
      cublasStatus_t(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *, cublasLtMatrixLayout_t, const void *,
                     cublasLtMatrixLayout_t, const void *, const void *, cublasLtMatrixLayout_t, void *,
                     cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t));
