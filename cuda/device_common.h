/* The inside of a tp_cuda_device, and what its two implementations (device.h) share. Sees no CUDA header. */
#ifndef TP_CUDA_DEVICE_COMMON_H
#define TP_CUDA_DEVICE_COMMON_H

#include "cuda/device.h"

/* A note of memory that tp_cuda_alloc gave. */
typedef struct tp_cuda_allocation {
    void *memory;
    size_t bytes;
    struct tp_cuda_allocation *next;
} tp_cuda_allocation;

struct tp_cuda_device {
    tp_cuda_properties properties;
    tp_cuda_partition partition; /* stream_create NULL: the whole device */
    int priorities[2];           /* of ordinary and of higher streams: smaller is higher */
    int held; /* multiprocessors, by what waits for messages */
    tp_stream compute, communication;
    tp_cuda_allocation *allocated;
};

/* Fill device->priorities: each implementation's. */
TP_MUST_USE tp_status
tp_cuda_ask_priorities(tp_cuda_device *device);

/* A fill and a kernel on each of its streams, waited for: each implementation's. */
TP_MUST_USE tp_status
tp_cuda_try_launches(tp_cuda_device *device);

/* Remember memory; `entry`, from malloc, is the note of it from now on. */
void
tp_cuda_note(tp_cuda_device *device, tp_cuda_allocation *entry, void *memory, size_t bytes);
/* Free the note of the memory: its bytes, or 0 where there is no note of it. */
size_t
tp_cuda_unnote(tp_cuda_device *device, const void *memory);
/* EMEMORY: page-locked memory. */
tp_status
tp_cuda_refuse_pinned(const char *what, size_t bytes);

#endif
