#include "cuda/faults.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

static _Thread_local const char *last_kernel; /* NULL: none yet */
static const char *_Atomic newest_kernel;     /* of all threads */
static _Thread_local int in_use = -1; /* the device that this thread uses; -1: none yet */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char broken[400]; /* the first sticky error's text; "": none yet */

/* After these "any further CUDA work will return the same error; the process must be terminated" (CUDA Runtime API, error
 * codes), or the hardware itself is gone. */
static int
is_sticky(int error)
{
    static const int list[] = {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911};
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
        if (error == list[i])
            return 1;
    return 0;
}

/* What has launched a kernel names its own. NCCL's watch launches none, looks every 50 ms, and is often the first to hear. */
static const char *
told_kernel(void)
{
    const char *kernel = last_kernel != NULL ? last_kernel : atomic_load_explicit(&newest_kernel, memory_order_relaxed);
    return kernel != NULL ? kernel : "none";
}

static tp_status
fail_sticky(int error, const char *what)
{
    char text[sizeof broken], where[32] = "";
    if (in_use >= 0)
        snprintf(where, sizeof where, " on device %d", in_use);
    pthread_mutex_lock(&lock);
    if (!broken[0])
        snprintf(broken, sizeof broken, "%s%s: CUDA error %d (%s: %s) after kernel %s", what, where, error,
                 tp_cuda_error_name(error), tp_cuda_error_text(error), told_kernel());
    snprintf(text, sizeof text, "%s", broken);
    pthread_mutex_unlock(&lock);
    return tp_fail(TP_ERUNTIME, "the device is lost to this process: %s; end the process and start again from its "
                   "checkpoint (compute-sanitizer finds the access, nvidia-smi -q the hardware's errors)", text);
}

tp_status
tp_cuda_check(int error, const char *what)
{
    if (error == TP_CUDA_SUCCESS)
        return TP_OK;
    if (is_sticky(error))
        return fail_sticky(error, what);
    const char *built = error == TP_CUDA_NO_IMAGE || error == TP_CUDA_NO_FUNCTION
                            ? "; the package was built for other GPUs: with this one's compute capability x 10 in "
                              "TERAPIPE_CUDA_ARCHS, or without that, would be right"
                            : "";
    return tp_fail(error == TP_CUDA_NO_MEMORY ? TP_EMEMORY : TP_ERUNTIME, "%s: CUDA error %d (%s: %s); last kernel: %s%s",
                   what, error, tp_cuda_error_name(error), tp_cuda_error_text(error), told_kernel(), built);
}

void
tp_cuda_forget_fault(void)
{
    pthread_mutex_lock(&lock);
    broken[0] = 0;
    pthread_mutex_unlock(&lock);
}

const char *
tp_cuda_last_kernel(void)
{
    return last_kernel != NULL ? last_kernel : "none";
}

void
tp_cuda_remember_device(int index)
{
    in_use = index;
}

void
tp_cuda_remember_kernel(const char *kernel)
{
    last_kernel = kernel;
    atomic_store_explicit(&newest_kernel, kernel, memory_order_relaxed);
}

tp_status
tp_cuda_refuse_machine(int driver, int runtime, int error, const char *detail)
{
    int needed = runtime / 1000 * 1000; /* a runtime works with every driver of its major version */
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (driver == 0)
        return tp_fail(TP_ERUNTIME, "no NVIDIA driver is here (%s); a driver that supports CUDA %d.%d or newer is needed",
                       detail ? detail : "libcuda.so.1 is missing or not working", needed / 1000, needed % 1000 / 10);
    if (driver < needed)
        return tp_fail(TP_ERUNTIME,
                       "the NVIDIA driver is too old: it supports CUDA %d.%d, and %d.%d or newer is needed", driver / 1000,
                       driver % 1000 / 10, needed / 1000, needed % 1000 / 10);
    if (error == TP_CUDA_SUCCESS || error == TP_CUDA_NO_DEVICE)
        return tp_fail(TP_ERUNTIME, "the NVIDIA driver (CUDA %d.%d) shows no device%s%s%s", driver / 1000,
                       driver % 1000 / 10, visible ? " (CUDA_VISIBLE_DEVICES is \"" : "", visible ? visible : "",
                       visible ? "\")" : "");
    const char *forked = error == TP_CUDA_NOT_INITIALIZED
                             ? "; in a process forked from one that used a GPU no GPU can be used: multiprocessing's \"spawn\", "
                               "or a fork before the first use, would be right"
                             : "";
    return tp_fail(TP_ERUNTIME, "the NVIDIA driver (CUDA %d.%d) shows no device: CUDA error %d (%s: %s)%s", driver / 1000,
                   driver % 1000 / 10, error, tp_cuda_error_name(error), tp_cuda_error_text(error), forked);
}

tp_status
tp_cuda_check_index(int index, int count)
{
    if (index >= 0 && index < count)
        return TP_OK;
    return tp_fail(TP_EVALUE, "device %d: this process sees %d CUDA device%s, 0 to %d", index, count, count == 1 ? "" : "s",
                   count - 1);
}

tp_status
tp_cuda_check_capability(const tp_cuda_properties *properties)
{
    if (properties->major >= 8)
        return TP_OK;
    return tp_fail(TP_ERUNTIME,
                   "device %d (%s) has compute capability %d.%d; 8.0 (Ampere) or newer is needed: the kernels use bf16 "
                   "tensor cores", properties->index, properties->name, properties->major, properties->minor);
}

tp_status
tp_cuda_refuse_bytes(int index, const char *what, size_t bytes, uint64_t free, uint64_t total)
{
    /* cudaMemGetInfo: "CUDA is not guaranteed to be able to allocate all of the memory that the OS reports as free" */
    if (bytes <= free)
        return tp_fail(TP_EMEMORY,
                       "%s needs %zu bytes of device %d, which does not give them at once, though %llu of %llu are free; plan with "
                       "memory_bytes below %zu", what, bytes, index, (unsigned long long)free, (unsigned long long)total, bytes);
    return tp_fail(TP_EMEMORY,
                   "%s needs %zu bytes of device %d, which has %llu free of %llu: %llu short; plan with "
                   "memory_bytes=%llu or less", what, bytes, index, (unsigned long long)free, (unsigned long long)total,
                   (unsigned long long)(bytes - free), (unsigned long long)free);
}
