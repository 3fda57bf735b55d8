/* The tp_provider (csrc/stage/stage_ops.h) that the modules _cuda and _cuda_emu hand to _core. */
#ifndef TP_CUDA_PROVIDER_H
#define TP_CUDA_PROVIDER_H

#include "csrc/stage/stage_ops.h"

/* "cuda", or "cuda_emu" in the emulated build (TP_CUDA_EMULATED). */
const tp_provider *
tp_cuda_provider(void);

#endif
