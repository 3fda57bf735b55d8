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

/* For one stream of the device. workspace [bytes], on the device, aligned to 256 bytes: may be shared with what else runs on
 * the stream. ERUNTIME: cuDNN is missing, too old, or cannot be begun with (says where it was looked for). */
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
/* Run a shape that cuDNN has beside our kernel, once for each, and leave it to ours if they differ by more than rounding: a
 * graph that is taken may yet be computed otherwise. q, k, v: numbers about 1; all of o [T, B, H D] and lse is overwritten, with
 * poison around the slice. ERUNTIME: the device failed. */
TP_MUST_USE tp_status
tp_cudnn_check(tp_cudnn *cudnn, const tp_attention *shape, const void *q, const void *k, const void *v, void *o, float *lse);
/* What computes attention, and of which shapes and why not cuDNN. Good until the next prepare or check. */
const char *
tp_cudnn_caveat(const tp_cudnn *cudnn);

#endif
