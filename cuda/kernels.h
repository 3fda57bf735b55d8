/* Launchers of every kernel. All are asynchronous on `stream`, allocate nothing, and return an error of an argument, of the
 * launch, or (later than its cause) of an earlier kernel. Matrices are row-major; strides and leading dimensions are in
 * elements; activations are sequence-major, row (t, b) = t * B + b. Where `dtype` is given, void pointers are of that type. */
#ifndef TP_CUDA_KERNELS_H
#define TP_CUDA_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "csrc/backend/backend.h"

/* A cudaStream_t; NULL: the default stream. */
typedef void *tp_stream;
/* The type of activations, of their gradients, and of the weight copies that products read. */
typedef enum { TP_F32 = 0, TP_BF16 = 1 } tp_dtype;

#ifdef __cplusplus
}
#endif

#endif
