/* The error texts of a machine without a usable GPU, and the record of the first error that broke a device. Shared by the CUDA
 * runtime and the emulator, which both report CUDA's error numbers here. Sees no CUDA header. */
#ifndef TP_CUDA_FAULTS_H
#define TP_CUDA_FAULTS_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/base/status.h"
#include "cuda/device.h"

/* cudaError_t values used here (driver_types.h of CUDA 13.0; cuda/device.c asserts them). */
enum {
    TP_CUDA_SUCCESS = 0,
    TP_CUDA_INVALID_VALUE = 1,
    TP_CUDA_NO_MEMORY = 2,
    TP_CUDA_NOT_INITIALIZED = 3,
    TP_CUDA_OLD_DRIVER = 35,
    TP_CUDA_NO_FUNCTION = 98,
    TP_CUDA_NO_DEVICE = 100,
    TP_CUDA_NO_IMAGE = 209,
    TP_CUDA_BAD_HANDLE = 400,
    TP_CUDA_NOT_READY = 600,
    TP_CUDA_ILLEGAL_ADDRESS = 700,
    TP_CUDA_CAPTURE_UNSUPPORTED = 900,
    TP_CUDA_CAPTURE_INVALIDATED = 901,
    TP_CUDA_CAPTURE_UNJOINED = 904,
    TP_CUDA_CAPTURE_ISOLATION = 905,
    TP_CUDA_CAPTURED_EVENT = 907
};

/* The name and description of an error number, e.g. "cudaErrorIllegalAddress: an illegal memory access was encountered".
 * One definition in cuda/device.c, one in cuda/emu/device.c. */
const char *
tp_cuda_error_name(int error);
const char *
tp_cuda_error_text(int error);

/* ERUNTIME: what is wrong with a machine that shows no device. `driver` as tp_cuda_versions gives it; `error` what asking
 * for devices returned; `detail` more about a missing driver, or NULL. */
tp_status
tp_cuda_refuse_machine(int driver, int runtime, int error, const char *detail);
/* EVALUE unless 0 <= index < count. */
TP_MUST_USE tp_status
tp_cuda_check_index(int index, int count);
/* ERUNTIME unless the device has compute capability 8.0 or more (bf16 mma, cp.async: kernels are built for sm_80 on). */
TP_MUST_USE tp_status
tp_cuda_check_capability(const tp_cuda_properties *properties);
/* EMEMORY: `what` needs `bytes`, the device has `free` of `total`, which may be as much: not all of it need be had. */
tp_status
tp_cuda_refuse_bytes(int index, const char *what, size_t bytes, uint64_t free, uint64_t total);
/* Name the kernel that the calling thread launched last. */
void
tp_cuda_remember_kernel(const char *kernel);
/* Which device the calling thread uses from now on: one that breaks is named, of several. */
void
tp_cuda_remember_device(int index);
/* Forget what broke: for the emulator, whose devices can be healed. */
void
tp_cuda_forget_fault(void);

#endif
