/* NCCL's own host code without a GPU (tests/nccl_host.py builds it): what nccl_host.c, the CUDA runtime and driver that it asks for,
 * and nccl_host_kernel.c, its kernel for sends and receives, know of each other. */
#ifndef TP_TESTS_NCCL_HOST_H
#define TP_TESTS_NCCL_HOST_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* The device that the thread has chosen. Ranks that are threads of one process, which NCCL tells apart by their devices, begin with
 * the one of their number. */
extern _Thread_local int tp_host_device;
#define HOST_DEVICES 16

/* A kernel that was launched; never freed. */
typedef struct {
    _Atomic int done;
} host_job;

/* Launch NCCL's kernel of so many blocks with these arguments (ncclDevKernelArgs and what follows). Never NULL. */
host_job *
tp_host_launch(unsigned blocks, const void *args);
/* Kernels of the thread's device that are not over. */
int
tp_host_running(void);
/* What is given to that stream later comes after the job. */
void
tp_host_stream_add(const void *stream, host_job *job);

#endif
