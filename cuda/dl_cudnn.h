/* What we use of cuDNN's backend API, declared here because its headers are not where packages are built. Values are those of
 * cudnn_graph_v9.h, which keeps them within a major version; tests/cudnn_same.c asserts each against the real header where one
 * is installed. Source: cuDNN 9 documentation, "Backend API".
 *
 * Names of constants and types are ours (DN_, dn_): where the real header is seen too, as in that test, nothing clashes. */
#ifndef TP_CUDA_DL_CUDNN_H
#define TP_CUDA_DL_CUDNN_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/base/status.h"
#include "cuda/device.h"

enum { DN_SUCCESS = 0, DN_BAD_PARAM = 2000, DN_NOT_SUPPORTED = 3000, DN_EXECUTION_FAILED = 5000 }; /* cudnnStatus_t */
enum { DN_FLOAT = 0, DN_INT32 = 4, DN_BFLOAT16 = 9, DN_BOOLEAN = 11 };                             /* cudnnDataType_t */
enum { DN_REDUCE_ADD = 0, DN_REDUCE_MAX = 3 };                                                     /* cudnnReduceTensorOp_t */
enum { DN_HEUR_MODE_A = 3 };                                                                       /* cudnnBackendHeurMode_t */
enum { DN_NOTE_NONDETERMINISTIC = 4, DN_NOTES = 10 };          /* cudnnBackendNumericalNote_t */
enum {                                                         /* cudnnPointwiseMode_t */
    DN_ADD = 0,
    DN_MUL = 1,
    DN_DIV = 6,
    DN_SUB = 9,
    DN_EXP = 13,
    DN_LOG = 15,
    DN_CMP_GE = 303,
    DN_GEN_INDEX = 501,
    DN_BINARY_SELECT = 601
};
enum {                                                         /* cudnnBackendAttributeType_t */
    DN_TYPE_HANDLE = 0,
    DN_TYPE_DATA_TYPE = 1,
    DN_TYPE_BOOLEAN = 2,
    DN_TYPE_INT64 = 3,
    DN_TYPE_FLOAT = 4,
    DN_TYPE_VOID_PTR = 6,
    DN_TYPE_HEUR_MODE = 8,
    DN_TYPE_NUMERICAL_NOTE = 11,
    DN_TYPE_POINTWISE_MODE = 14,
    DN_TYPE_BACKEND_DESCRIPTOR = 15,
    DN_TYPE_REDUCTION_OPERATOR_TYPE = 18,
    DN_TYPE_CHAR = 24
};
enum {                                                         /* cudnnBackendDescriptorType_t */
    DN_POINTWISE = 0,
    DN_ENGINE = 2,
    DN_ENGINECFG = 3,
    DN_ENGINEHEUR = 4,
    DN_EXECUTION_PLAN = 5,
    DN_OPERATION_POINTWISE = 13,
    DN_OPERATIONGRAPH = 15,
    DN_VARIANT_PACK = 16,
    DN_TENSOR = 17,
    DN_MATMUL = 18,
    DN_OPERATION_MATMUL = 19,
    DN_REDUCTION = 21,
    DN_OPERATION_REDUCTION = 22,
    DN_DEVICEPROP = 38
};
enum {                                                         /* cudnnBackendAttributeName_t */
    DN_POINTWISE_MODE = 0,
    DN_POINTWISE_MATH_PREC = 1,
    DN_POINTWISE_AXIS = 9,
    DN_ENGINEHEUR_MODE = 200,
    DN_ENGINEHEUR_OPERATION_GRAPH = 201,
    DN_ENGINEHEUR_RESULTS = 202,
    DN_ENGINEHEUR_DEVICEPROP = 204,
    DN_ENGINECFG_ENGINE = 300,
    DN_EXECUTION_PLAN_HANDLE = 400,
    DN_EXECUTION_PLAN_ENGINE_CONFIG = 401,
    DN_EXECUTION_PLAN_WORKSPACE_SIZE = 402,
    DN_EXECUTION_PLAN_DEVICEPROP = 407,
    DN_OPERATION_POINTWISE_PW_DESCRIPTOR = 750,
    DN_OPERATION_POINTWISE_XDESC = 751,
    DN_OPERATION_POINTWISE_BDESC = 752,
    DN_OPERATION_POINTWISE_YDESC = 753,
    DN_OPERATION_POINTWISE_TDESC = 758,
    DN_OPERATIONGRAPH_HANDLE = 800,
    DN_OPERATIONGRAPH_OPS = 801,
    DN_TENSOR_BYTE_ALIGNMENT = 900,
    DN_TENSOR_DATA_TYPE = 901,
    DN_TENSOR_DIMENSIONS = 902,
    DN_TENSOR_STRIDES = 903,
    DN_TENSOR_UNIQUE_ID = 906,
    DN_TENSOR_IS_VIRTUAL = 907,
    DN_TENSOR_IS_BY_VALUE = 908,
    DN_VARIANT_PACK_UNIQUE_IDS = 1000,
    DN_VARIANT_PACK_DATA_POINTERS = 1001,
    DN_VARIANT_PACK_WORKSPACE = 1003,
    DN_ENGINE_GLOBAL_INDEX = 1301,
    DN_ENGINE_NUMERICAL_NOTE = 1303,
    DN_MATMUL_COMP_TYPE = 1500,
    DN_OPERATION_MATMUL_ADESC = 1520,
    DN_OPERATION_MATMUL_BDESC = 1521,
    DN_OPERATION_MATMUL_CDESC = 1522,
    DN_OPERATION_MATMUL_DESC = 1523,
    DN_REDUCTION_OPERATOR = 1600,
    DN_REDUCTION_COMP_TYPE = 1601,
    DN_OPERATION_REDUCTION_XDESC = 1610,
    DN_OPERATION_REDUCTION_YDESC = 1611,
    DN_OPERATION_REDUCTION_DESC = 1612,
    DN_DEVICEPROP_JSON_REPRESENTATION = 2702
};

typedef struct dn_context *dn_handle;
typedef void *dn_descriptor;

typedef size_t dn_get_version(void);
typedef const char *dn_error_string(int status);
typedef void dn_last_error(char *text, size_t size);
typedef int dn_create(dn_handle *);
typedef int dn_destroy(dn_handle);
typedef int dn_set_stream(dn_handle, tp_stream);
typedef int dn_create_descriptor(int type, dn_descriptor *);
typedef int dn_on_descriptor(dn_descriptor);
typedef int dn_set(dn_descriptor, int attribute, int type, int64_t count, const void *elements);
typedef int dn_get(dn_descriptor, int attribute, int type, int64_t asked, int64_t *count, void *elements);
typedef int dn_execute(dn_handle, dn_descriptor plan, dn_descriptor variant_pack);

/* X(our member, our type, the library's name) */
#define TP_CUDNN_TABLE(X)                                                                                              \
    X(get_version, dn_get_version, cudnnGetVersion)                                                                    \
    X(error_string, dn_error_string, cudnnGetErrorString)                                                              \
    X(last_error, dn_last_error, cudnnGetLastErrorString)                                                              \
    X(create, dn_create, cudnnCreate)                                                                                  \
    X(destroy, dn_destroy, cudnnDestroy)                                                                               \
    X(set_stream, dn_set_stream, cudnnSetStream)                                                                       \
    X(create_descriptor, dn_create_descriptor, cudnnBackendCreateDescriptor)                                           \
    X(destroy_descriptor, dn_on_descriptor, cudnnBackendDestroyDescriptor)                                             \
    X(set, dn_set, cudnnBackendSetAttribute)                                                                           \
    X(get, dn_get, cudnnBackendGetAttribute)                                                                           \
    X(finalize, dn_on_descriptor, cudnnBackendFinalize)                                                                \
    X(execute, dn_execute, cudnnBackendExecute)

typedef struct {
#define TP_CUDNN_MEMBER(member, type, name) type *member;
    TP_CUDNN_TABLE(TP_CUDNN_MEMBER)
#undef TP_CUDNN_MEMBER
} tp_cudnn_library;

/* The table, loaded once per process; 9.6.0 or newer (before, sequences were multiples of 64), but not 9.10.0 or 9.10.1, whose
 * attention is known to be wrong. ERUNTIME as tp_dl_load. */
TP_MUST_USE tp_status
tp_cudnn_load(const tp_cudnn_library **out);
/* The file it came from and its version as 10000 * major + 100 * minor + patch; "" and 0 before it was loaded. */
void
tp_cudnn_found(const char **path, int *version);

#endif
