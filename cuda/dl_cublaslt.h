/* What we use of cublasLt, declared here because its headers are not where packages are built. Values are those of cublasLt.h
 * 13.x, which keeps them within a major version; tests/cublaslt_same.c asserts each against the real header where one is
 * installed. Source: cuBLAS 13.1 documentation, "Using the cuBLASLt API".
 *
 * Names of constants and types are ours (LT_, lt_): where the real header is seen too, as in that test, nothing clashes. */
#ifndef TP_CUDA_DL_CUBLASLT_H
#define TP_CUDA_DL_CUBLASLT_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/base/status.h"
#include "cuda/device.h"

enum { LT_SUCCESS = 0, LT_NOT_SUPPORTED = 15 };       /* cublasStatus_t */
enum { LT_R_32F = 0, LT_R_16BF = 14 };                /* cudaDataType */
enum { LT_COMPUTE_32F = 68 };                         /* cublasComputeType_t */
enum { LT_OP_N = 0, LT_OP_T = 1 };                    /* cublasOperation_t */
enum {                                                /* cublasLtMatmulDescAttributes_t */
    LT_DESC_TRANSA = 3,                               /* int32_t */
    LT_DESC_TRANSB = 4,                               /* int32_t */
    LT_DESC_EPILOGUE = 7,                             /* uint32_t */
    LT_DESC_BIAS_POINTER = 8,                         /* const void * */
    LT_DESC_EPILOGUE_AUX_POINTER = 11,                /* void * */
    LT_DESC_EPILOGUE_AUX_LD = 12,                     /* int64_t, a multiple of 8 */
    LT_DESC_SM_COUNT_TARGET = 15                      /* int32_t */
};
enum {                                                /* cublasLtEpilogue_t */
    LT_EPILOGUE_DEFAULT = 1,
    LT_EPILOGUE_BIAS = 4,
    LT_EPILOGUE_GELU_AUX_BIAS = 164,                  /* GELU 32, AUX 128, BIAS 4 */
    LT_EPILOGUE_DGELU = 192                           /* 64, AUX 128 */
};
enum {                                                /* cublasLtMatmulPreferenceAttributes_t */
    LT_PREF_MAX_WORKSPACE_BYTES = 1,                  /* uint64_t */
    LT_PREF_REDUCTION_SCHEME_MASK = 3,                /* uint32_t */
    LT_PREF_MIN_ALIGNMENT_A_BYTES = 5,                /* uint32_t; B, C, D follow */
    LT_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    LT_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    LT_PREF_MIN_ALIGNMENT_D_BYTES = 8
};
enum { LT_REDUCTION_NONE = 0, LT_REDUCTION_ALL = 7 }; /* cublasLtReductionScheme_t */
enum {                                                /* cublasLtMatmulAlgoConfigAttributes_t */
    LT_ALGO_ID = 0,                                   /* int32_t */
    LT_ALGO_TILE_ID = 1,                              /* uint32_t */
    LT_ALGO_SPLITK = 2,                               /* int32_t */
    LT_ALGO_STAGES_ID = 6                             /* uint32_t */
};

typedef struct {
    uint64_t data[8];
} lt_algo;

typedef struct {
    lt_algo algo;
    size_t workspace;
    int state; /* cublasStatus_t */
    float waves;
    int reserved[4];
} lt_heuristic;

typedef void *lt_handle, *lt_desc, *lt_layout, *lt_preference;

typedef int lt_create(lt_handle *);
typedef int lt_destroy(lt_handle);
typedef size_t lt_version(void);
typedef const char *lt_status_string(int status);
typedef int lt_desc_create(lt_desc *, int compute, int scale);
typedef int lt_desc_destroy(lt_desc);
typedef int lt_desc_set(lt_desc, int attribute, const void *value, size_t bytes);
typedef int lt_layout_create(lt_layout *, int type, uint64_t rows, uint64_t columns, int64_t stride);
typedef int lt_layout_destroy(lt_layout);
typedef int lt_preference_create(lt_preference *);
typedef int lt_preference_destroy(lt_preference);
typedef int lt_preference_set(lt_preference, int attribute, const void *value, size_t bytes);
typedef int lt_get_heuristic(lt_handle, lt_desc, lt_layout a, lt_layout b, lt_layout c, lt_layout d, lt_preference, int wanted,
                             lt_heuristic results[], int *count);
typedef int lt_algo_check(lt_handle, lt_desc, lt_layout a, lt_layout b, lt_layout c, lt_layout d, const lt_algo *,
                          lt_heuristic *result);
typedef int lt_algo_get(const lt_algo *, int attribute, void *value, size_t bytes, size_t *written);
typedef int lt_matmul(lt_handle, lt_desc, const void *alpha, const void *a, lt_layout, const void *b, lt_layout,
                      const void *beta, const void *c, lt_layout, void *d, lt_layout, const lt_algo *, void *workspace,
                      size_t workspace_bytes, tp_stream stream);

/* X(our member, our type, the library's name) */
#define TP_CUBLASLT_TABLE(X)                                                                                           \
    X(create, lt_create, cublasLtCreate)                                                                               \
    X(destroy, lt_destroy, cublasLtDestroy)                                                                            \
    X(version, lt_version, cublasLtGetVersion)                                                                         \
    X(status_string, lt_status_string, cublasLtGetStatusString)                                                        \
    X(desc_create, lt_desc_create, cublasLtMatmulDescCreate)                                                           \
    X(desc_destroy, lt_desc_destroy, cublasLtMatmulDescDestroy)                                                        \
    X(desc_set, lt_desc_set, cublasLtMatmulDescSetAttribute)                                                           \
    X(layout_create, lt_layout_create, cublasLtMatrixLayoutCreate)                                                     \
    X(layout_destroy, lt_layout_destroy, cublasLtMatrixLayoutDestroy)                                                  \
    X(preference_create, lt_preference_create, cublasLtMatmulPreferenceCreate)                                         \
    X(preference_destroy, lt_preference_destroy, cublasLtMatmulPreferenceDestroy)                                      \
    X(preference_set, lt_preference_set, cublasLtMatmulPreferenceSetAttribute)                                         \
    X(get_heuristic, lt_get_heuristic, cublasLtMatmulAlgoGetHeuristic)                                                 \
    X(algo_check, lt_algo_check, cublasLtMatmulAlgoCheck)                                                              \
    X(algo_get, lt_algo_get, cublasLtMatmulAlgoConfigGetAttribute)                                                     \
    X(matmul, lt_matmul, cublasLtMatmul)

typedef struct {
#define TP_CUBLASLT_MEMBER(member, type, name) type *member;
    TP_CUBLASLT_TABLE(TP_CUBLASLT_MEMBER)
#undef TP_CUBLASLT_MEMBER
} tp_cublaslt;

/* The table, loaded once per process; 13.0 or newer. ERUNTIME as tp_dl_load. */
TP_MUST_USE tp_status
tp_cublaslt_load(const tp_cublaslt **out);
/* The file it came from and its version as 10000 * major + 100 * minor + patch; "" and 0 before it was loaded. */
void
tp_cublaslt_found(const char **path, int *version);

#endif
