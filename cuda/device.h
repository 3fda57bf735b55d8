/* A rank's GPU: memory, streams, events, copies and graphs, with errors that say what is wrong with the machine.
 *
 * Two implementations, one meaning: cuda/device.c over the CUDA runtime, and cuda/emu/device.c on host memory, where all
 * work is done before the call returns (cuda/emu/emu.h has its test switches). Source of the calls: CUDA Runtime API 13.0.
 *
 * Every call that touches a device makes it current on the calling thread; one thread at a time uses one tp_cuda_device.
 * Statuses: EMEMORY (bytes asked, free, total), EVALUE (no such device), ERUNTIME (all else: no driver, driver too old,
 * device too old, device lost). After a sticky error every call fails with the first one's text: the process has to end.  */
#ifndef TP_CUDA_DEVICE_H
#define TP_CUDA_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "csrc/backend/dtype.h"
#include "csrc/base/status.h"

typedef void *tp_stream;     /* cudaStream_t */
typedef void *tp_cuda_event; /* cudaEvent_t */
typedef void *tp_cuda_graph; /* each implementation its own */
typedef struct tp_cuda_device tp_cuda_device;

__attribute__((unused)) static inline size_t
tp_dtype_bytes(tp_dtype dtype)
{
    return dtype == TP_BF16 ? 2 : 4;
}

/* ---- the machine ---------------------------------------------------------------------------------------------------- */

typedef struct {
    int index, major, minor; /* number of the device; its compute capability is major.minor */
    int multiprocessors, clock_khz, memory_clock_khz, memory_bus_bits;
    uint64_t total_bytes, free_bytes; /* of device memory, when it was asked; free: as far as NVML says */
    uint64_t shared_bytes;            /* a block's shared memory, opted in */
    uint64_t l2_bytes;
    char name[128], bus_id[32], uuid[48];
} tp_cuda_properties;

/* Devices that the driver shows; 0 where there is none or it cannot be asked. Never fails. */
int
tp_cuda_device_count(void);
/* OK if there is a device to open. ERUNTIME: no driver; driver older than needed (both versions); no device. */
TP_MUST_USE tp_status
tp_cuda_available(void);
/* CUDA versions as 1000 * major + 10 * minor: what the driver supports (0: no driver), and the runtime linked here. */
void
tp_cuda_versions(int *driver, int *runtime);
/* EVALUE: no such device (index, count). Makes no context on it. */
TP_MUST_USE tp_status
tp_cuda_describe(int index, tp_cuda_properties *out);
/* From now on the thread's calls are for this device, whose primary context is made where there is none. */
TP_MUST_USE tp_status
tp_cuda_use(int index);

/* ---- a device ------------------------------------------------------------------------------------------------------- */

/* Where streams come from when the device is shared (green contexts: cuda/green.c). The hook outlives the device. */
typedef struct {
    void *context;
    /* A non-blocking stream of this part of the device. */
    tp_status (*stream_create)(void *context, int priority, tp_stream *out);
    /* An event of this part: one is recorded on streams of the context that it was created in alone (cuEventRecord). NULL, or where
     * the part's streams refuse it when the device is opened: the device's. */
    tp_status (*event_create)(void *context, int timed, tp_cuda_event *out);
    /* Make the part the thread's current context, and what was current before: see tp_cuda_enter. Both NULL: neither. */
    tp_status (*enter)(void *context);
    tp_status (*leave)(void *context);
    int multiprocessors; /* of this part, as read back */
} tp_cuda_partition;

/* Open device `index` (partition NULL: all of it) with a compute stream and a communication stream of higher priority.
 * ERUNTIME: see tp_cuda_available; compute capability below 8.0. EVALUE: no such device. */
TP_MUST_USE tp_status
tp_cuda_open(int index, const tp_cuda_partition *partition, tp_cuda_device **out);
typedef struct tp_cuda_kernel {
    const void *kernel;
    struct tp_cuda_kernel *next;
} tp_cuda_kernel;
/* A kernel of ours, kept for good: tp_cuda_open loads those that are known, so that a step loads none. CUDA loads a kernel when it
 * is first launched, and may then wait for all that runs, a kernel that waits for a message too (CUDA Programming Guide, "Lazy
 * Loading", concurrent execution). Not in the emulated build, which has nothing to load. */
void
tp_cuda_know(tp_cuda_kernel *kernel);
/* Waits for the streams; NULL is allowed. What was allocated is the caller's to free before. */
void
tp_cuda_close(tp_cuda_device *device);
const tp_cuda_properties *
tp_cuda_device_properties(const tp_cuda_device *device);
/* Multiprocessors that this device's streams run on: the partition's, or all. */
int
tp_cuda_multiprocessors(const tp_cuda_device *device);
/* Around calls of a library that asks the current context how many multiprocessors there are: those of the device's part, where it
 * is one. Within, no call of this header; each tp_cuda_enter that succeeds needs its tp_cuda_leave. */
TP_MUST_USE tp_status
tp_cuda_enter(tp_cuda_device *device);
TP_MUST_USE tp_status
tp_cuda_leave(tp_cuda_device *device);
/* Say how many of these multiprocessors may be held by kernels that wait for messages while others run: a communicator does; 0 at
 * first. tp_cuda_held gives it back, at most half of them. */
void
tp_cuda_hold(tp_cuda_device *device, int multiprocessors);
int
tp_cuda_held(const tp_cuda_device *device);
tp_stream
tp_cuda_compute(tp_cuda_device *device);
tp_stream
tp_cuda_communication(tp_cuda_device *device);
/* Make the device current on the calling thread: before kernels are launched by anything but these functions. */
TP_MUST_USE tp_status
tp_cuda_bind(tp_cuda_device *device);

/* A function of the driver as of CUDA `version` (1000 * major + 10 * minor), e.g. ("cuGreenCtxCreate", 12040). ERUNTIME: this
 * driver has none; always so in the emulator. */
TP_MUST_USE tp_status
tp_cuda_driver_function(const char *name, int version, void **out);

/* ---- errors --------------------------------------------------------------------------------------------------------- */

/* What `what` returned (a cudaError_t), as a status; a sticky error names the last kernel launched by this thread, or
 * where it has launched none by any. */
TP_MUST_USE tp_status
tp_cuda_check(int error, const char *what);
/* After a launch: remembers `kernel` (a literal) as the thread's last, and checks that the launch was taken. */
TP_MUST_USE tp_status
tp_cuda_launched(const char *kernel);
/* After a call of a library that launches kernels: remembers it likewise, and where it `failed` asks the device, unless the stream
 * captures: a lost device says more than "execution failed". The library has a CUDA runtime of its own, of whose errors ours knows
 * nothing (cudaGetLastError: "in the same instance of the CUDA Runtime library"). OK: the failure is the library's. */
TP_MUST_USE tp_status
tp_cuda_library_launched(tp_cuda_device *device, tp_stream stream, const char *call, int failed);
/* The calling thread's last kernel; "none" before the first. */
const char *
tp_cuda_last_kernel(void);

/* ---- memory: zeroed nowhere, aligned to 512 bytes ------------------------------------------------------------------- */

/* One arena, before the first step. EMEMORY: `what`, bytes asked, free and total. bytes 0 gives NULL. */
TP_MUST_USE tp_status
tp_cuda_alloc(tp_cuda_device *device, size_t bytes, const char *what, void **out);
void
tp_cuda_free(tp_cuda_device *device, void *memory);
/* Page-locked host memory: what asynchronous copies go from and to. */
TP_MUST_USE tp_status
tp_cuda_host_alloc(tp_cuda_device *device, size_t bytes, const char *what, void **out);
void
tp_cuda_host_free(tp_cuda_device *device, void *memory);

typedef enum { TP_CUDA_TO_DEVICE, TP_CUDA_TO_HOST, TP_CUDA_ON_DEVICE } tp_cuda_direction;

/* Asynchronous where the host's side is page-locked. */
TP_MUST_USE tp_status
tp_cuda_copy(tp_cuda_device *device, tp_stream stream, void *to, const void *from, size_t bytes,
             tp_cuda_direction direction);
/* `rows` rows of row_bytes at these pitches in bytes. */
TP_MUST_USE tp_status
tp_cuda_copy_rows(tp_cuda_device *device, tp_stream stream, void *to, size_t to_pitch, const void *from,
                  size_t from_pitch, size_t row_bytes, size_t rows, tp_cuda_direction direction);
TP_MUST_USE tp_status
tp_cuda_memset(tp_cuda_device *device, tp_stream stream, void *memory, int byte, size_t bytes);

/* ---- streams and events --------------------------------------------------------------------------------------------- */

/* Another stream of the device or its partition; higher 1: the communication stream's priority. */
TP_MUST_USE tp_status
tp_cuda_stream_create(tp_cuda_device *device, int higher, tp_stream *out);
void
tp_cuda_stream_destroy(tp_cuda_device *device, tp_stream stream);
/* Wait on the host for everything enqueued; sticky errors of that work show here. */
TP_MUST_USE tp_status
tp_cuda_synchronize(tp_cuda_device *device, tp_stream stream);
/* *done 1 if nothing is left to do. Never blocks. */
TP_MUST_USE tp_status
tp_cuda_query(tp_cuda_device *device, tp_stream stream, int *done);

/* timed 0: for ordering only (cheaper). */
TP_MUST_USE tp_status
tp_cuda_event_create(tp_cuda_device *device, int timed, tp_cuda_event *out);
void
tp_cuda_event_destroy(tp_cuda_device *device, tp_cuda_event event);
/* In a capture this joins streams; the host cannot read such a record. */
TP_MUST_USE tp_status
tp_cuda_event_record(tp_cuda_device *device, tp_cuda_event event, tp_stream stream);
/* A record that the host or an uncaptured stream reads, in a capture too (an external event node). */
TP_MUST_USE tp_status
tp_cuda_event_mark(tp_cuda_device *device, tp_cuda_event event, tp_stream stream);
/* The stream's later work waits for the event. An event never recorded does not hold it: CUDA's meaning (trap). */
TP_MUST_USE tp_status
tp_cuda_event_wait(tp_cuda_device *device, tp_cuda_event event, tp_stream stream);
/* The host waits. */
TP_MUST_USE tp_status
tp_cuda_event_synchronize(tp_cuda_device *device, tp_cuda_event event);
TP_MUST_USE tp_status
tp_cuda_event_query(tp_cuda_device *device, tp_cuda_event event, int *done);
/* Seconds from `from` to `to`, both timed and done. Resolution about half a microsecond. */
TP_MUST_USE tp_status
tp_cuda_event_elapsed(tp_cuda_device *device, tp_cuda_event from, tp_cuda_event to, double *seconds);

/* ---- graphs --------------------------------------------------------------------------------------------------------- */

/* Between begin and end the stream (and those joined to it by events) records work instead of doing it. Nothing may be
 * allocated, synchronised or asked of cublasLt's heuristics between. */
TP_MUST_USE tp_status
tp_cuda_capture_begin(tp_cuda_device *device, tp_stream stream);
/* 1 between begin and end. */
int
tp_cuda_capturing(tp_cuda_device *device, tp_stream stream);
/* The graph, to be made ready; on failure the capture is ended and *out NULL. */
TP_MUST_USE tp_status
tp_cuda_capture_end(tp_cuda_device *device, tp_stream stream, tp_cuda_graph *out);
/* Before the first launch, which then takes no memory. May wait for all that runs on the device, as taking memory may: not where
 * something runs that waits for what this thread is still to do. */
TP_MUST_USE tp_status
tp_cuda_graph_ready(tp_cuda_device *device, tp_cuda_graph graph, tp_stream stream);
TP_MUST_USE tp_status
tp_cuda_graph_launch(tp_cuda_device *device, tp_cuda_graph graph, tp_stream stream);
void
tp_cuda_graph_destroy(tp_cuda_device *device, tp_cuda_graph graph);

#ifdef __cplusplus
}
#endif

#endif
