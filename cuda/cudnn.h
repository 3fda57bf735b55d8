/* The forward of attention by cuDNN, where TERAPIPE_ATTENTION asks for it: a rank's plans, made before the first step, one for
 * each shape of a slice. A shape that cuDNN cannot do, or does with another result than our kernel, is left to our kernel, and the
 * caveat says so.
 *
 * It computes what tp_cuda_attention_forward does, lse included, so the backward is our kernel's in either case. Its bits depend on
 * how tokens are cut into slices: not for reproducible runs. Only deterministic engines are taken, so that two runs of a plan give
 * the same bits. */
#ifndef TP_CUDA_CUDNN_H
#define TP_CUDA_CUDNN_H

#include "cuda/cudnn_graph.h"
#include "cuda/device.h"

typedef struct tp_cudnn tp_cudnn;

/* Open cuDNN for one stream of the device. workspace: [bytes] on the device, aligned to 256 bytes; other work on the stream may
 * share it. ERUNTIME: cuDNN is missing, too old, or does not start (says where it was looked for). */
TP_MUST_USE tp_status
tp_cudnn_open(tp_cuda_device *device, tp_stream stream, void *workspace, size_t bytes, tp_cudnn **out);
/* NULL is allowed. */
void
tp_cudnn_close(tp_cudnn *cudnn);
/* Make the plan of a shape, if there is none and cuDNN has one. EMEMORY: of the host. */
TP_MUST_USE tp_status
tp_cudnn_prepare(tp_cudnn *cudnn, const tp_attention *shape);
/* 1 if this shape was prepared and is cuDNN's. */
int
tp_cudnn_has(const tp_cudnn *cudnn, const tp_attention *shape);
/* As tp_cuda_attention_forward in bf16, of a shape that cuDNN has. */
TP_MUST_USE tp_status
tp_cudnn_forward(tp_cudnn *cudnn, const tp_attention *shape, const void *q, const void *k, const void *v, void *o, float *lse);
/* Run a shape that cuDNN has once by cuDNN and once by our kernel, and leave it to ours if the results differ by more than
 * rounding: cuDNN may accept a graph and yet compute something else. q, k, v: numbers about 1; all of o [T, B, H D] and lse is
 * overwritten, with poison around the slice. ERUNTIME: the device failed. */
TP_MUST_USE tp_status
tp_cudnn_check(tp_cudnn *cudnn, const tp_attention *shape, const void *q, const void *k, const void *v, void *o, float *lse);
/* Text: what computes attention, for which shapes it is not cuDNN, and why. Good until the next prepare or check. */
const char *
tp_cudnn_caveat(const tp_cudnn *cudnn);

#endif
