/* Where emulated device memory lies: among the host's, which kernels, copies and products of the emulator then are; or, with
 * TERAPIPE_EMU_APART=1 in the environment, in pages that can be touched only while one of these runs. A host that reads a
 * device's pointer dies there as it would with a GPU. One rank's work opens the pages to all threads: it finds most, not all. */
#ifndef TP_CUDA_EMU_APART_H
#define TP_CUDA_EMU_APART_H

#include <stddef.h>

int
tp_emu_apart(void);
/* Memory on 512 bytes, writable until the next tp_emu_leave; NULL: none. Between enter and leave. */
void *
tp_emu_take(size_t bytes);
void
tp_emu_give(void *memory);
/* What touches device memory lies between these; they nest, over all threads. */
void
tp_emu_enter(void);
void
tp_emu_leave(void);

#endif
