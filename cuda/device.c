#include "cuda/device_common.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/dl.h"
#include "cuda/faults.h"
#include "cuda/kernels.h"
#include "cuda/properties.h"

#define DRIVER "libcuda.so.1"

#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), "faults.h repeats CUDA's numbers")
SAME(TP_CUDA_INVALID_VALUE, cudaErrorInvalidValue);
SAME(TP_CUDA_NO_MEMORY, cudaErrorMemoryAllocation);
SAME(TP_CUDA_NOT_INITIALIZED, cudaErrorInitializationError);
SAME(TP_CUDA_OLD_DRIVER, cudaErrorInsufficientDriver);
SAME(TP_CUDA_NO_FUNCTION, cudaErrorInvalidDeviceFunction);
SAME(TP_CUDA_NO_DEVICE, cudaErrorNoDevice);
SAME(TP_CUDA_NO_IMAGE, cudaErrorNoKernelImageForDevice);
SAME(TP_CUDA_BAD_HANDLE, cudaErrorInvalidResourceHandle);
SAME(TP_CUDA_NOT_READY, cudaErrorNotReady);
SAME(TP_CUDA_ILLEGAL_ADDRESS, cudaErrorIllegalAddress);
SAME(TP_CUDA_CAPTURE_UNSUPPORTED, cudaErrorStreamCaptureUnsupported);
SAME(TP_CUDA_CAPTURE_INVALIDATED, cudaErrorStreamCaptureInvalidated);
SAME(TP_CUDA_CAPTURE_UNJOINED, cudaErrorStreamCaptureUnjoined);
SAME(TP_CUDA_CAPTURE_ISOLATION, cudaErrorStreamCaptureIsolation);
SAME(TP_CUDA_CAPTURED_EVENT, cudaErrorCapturedEvent);

/* A call of the runtime; its text is the name in the error. */
#define CUDA_TRY(call)                                                                                                 \
    do {                                                                                                               \
        cudaError_t cuda_error_ = (call);                                                                              \
        if (cuda_error_ != cudaSuccess) {                                                                              \
            (void)cudaGetLastError(); /* an error that is not sticky ends here */                                      \
            return tp_cuda_check((int)cuda_error_, #call);                                                             \
        }                                                                                                              \
    } while (0)

const char *
tp_cuda_error_name(int error)
{
    return cudaGetErrorName((cudaError_t)error);
}

const char *
tp_cuda_error_text(int error)
{
    return cudaGetErrorString((cudaError_t)error);
}

/* ---- the machine ---------------------------------------------------------------------------------------------------- */

int
tp_cuda_device_count(void)
{
    int count = 0;
    if (tp_dl_cut(DRIVER)) /* the runtime's first call would load it */
        return 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess)
        return count;
    (void)cudaGetLastError();
    return 0;
}

void
tp_cuda_versions(int *driver, int *runtime)
{
    int cut = tp_dl_cut(DRIVER) != NULL;
    if (cut || cudaDriverGetVersion(driver) != cudaSuccess)
        *driver = 0;
    if (cut || cudaRuntimeGetVersion(runtime) != cudaSuccess)
        *runtime = CUDART_VERSION;
}

tp_status
tp_cuda_available(void)
{
    int count = 0, driver, runtime;
    const char *detail = tp_dl_cut(DRIVER);
    if (detail)
        return tp_cuda_refuse_machine(0, CUDART_VERSION, 0, detail);
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count > 0)
        return TP_OK;
    (void)cudaGetLastError();
    tp_cuda_versions(&driver, &runtime);
    if (driver == 0) {
        (void)dlerror();
        if (!dlopen(DRIVER, RTLD_NOW | RTLD_LOCAL)) /* never closed where it is there after all */
            detail = dlerror();
    }
    return tp_cuda_refuse_machine(driver, runtime, (int)error, detail);
}

tp_status
tp_cuda_describe(int index, tp_cuda_properties *out)
{
    TP_TRY(tp_cuda_available());
    TP_TRY(tp_cuda_check_index(index, tp_cuda_device_count()));
    return tp_properties_ask(index, NULL, NULL, out);
}

tp_status
tp_cuda_use(int index)
{
    tp_cuda_remember_device(index);
    CUDA_TRY(cudaSetDevice(index)); /* since CUDA 12 it makes the primary context (Programming Guide, "Initialization") */
    return TP_OK;
}

/* ---- a device ------------------------------------------------------------------------------------------------------- */

tp_status
tp_cuda_bind(tp_cuda_device *device)
{
    return tp_cuda_use(device->properties.index);
}

tp_status
tp_cuda_stream_create(tp_cuda_device *device, int higher, tp_stream *out)
{
    int priority = device->priorities[higher != 0];
    *out = NULL;
    TP_TRY(tp_cuda_bind(device));
    if (device->partition.stream_create)
        return device->partition.stream_create(device->partition.context, priority, out);
    CUDA_TRY(cudaStreamCreateWithPriority((cudaStream_t *)out, cudaStreamNonBlocking, priority));
    return TP_OK;
}

void
tp_cuda_stream_destroy(tp_cuda_device *device, tp_stream stream)
{
    if (stream && tp_cuda_bind(device) == TP_OK)
        (void)cudaStreamDestroy(stream);
}

static tp_cuda_kernel *known;

void
tp_cuda_know(tp_cuda_kernel *kernel)
{
    kernel->next = known;
    known = kernel;
}

static tp_status
load_kernels(void)
{
    struct cudaFuncAttributes unused;
    for (const tp_cuda_kernel *k = known; k; k = k->next)
        CUDA_TRY(cudaFuncGetAttributes(&unused, k->kernel));
    return TP_OK;
}

/* The driver's own too, which fill and copy: whole words and ragged ends, and rows at a pitch. */
static tp_status
load_fills_and_copies(char *memory)
{
    enum { HALF = 4096 };
    for (size_t bytes = HALF; bytes >= HALF - 3; bytes--) {
        CUDA_TRY(cudaMemsetAsync(memory, 0, bytes, NULL));
        CUDA_TRY(cudaMemcpyAsync(memory + HALF, memory, bytes, cudaMemcpyDeviceToDevice, NULL));
    }
    CUDA_TRY(cudaMemcpy2DAsync(memory + HALF, 64, memory, 128, 48, 32, cudaMemcpyDeviceToDevice, NULL));
    CUDA_TRY(cudaStreamSynchronize(NULL));
    return TP_OK;
}

static tp_status
load_drivers(void)
{
    void *memory;
    CUDA_TRY(cudaMalloc(&memory, 8192));
    tp_status status = load_fills_and_copies(memory);
    (void)cudaFree(memory);
    return status;
}

tp_status
tp_cuda_ask_priorities(tp_cuda_device *device)
{
    TP_TRY(load_kernels());
    TP_TRY(load_drivers());
    CUDA_TRY(cudaDeviceGetStreamPriorityRange(&device->priorities[0], &device->priorities[1]));
    return TP_OK;
}

tp_status
tp_cuda_try_launches(tp_cuda_device *device)
{
    enum { NUMBERS = 64 };
    tp_stream streams[] = {device->compute, device->communication};
    tp_status status = TP_OK;
    float *memory;
    CUDA_TRY(cudaMalloc((void **)&memory, 2 * NUMBERS * sizeof *memory));
    for (int i = 0; i < 2 && status == TP_OK; i++) {
        status = tp_cuda_memset(device, streams[i], memory, 0, 2 * NUMBERS * sizeof *memory);
        if (status == TP_OK)
            status = tp_cuda_add(streams[i], TP_F32, NUMBERS, memory, memory + NUMBERS);
        if (status == TP_OK)
            status = tp_cuda_synchronize(device, streams[i]);
    }
    (void)cudaFree(memory);
    return status;
}

void
tp_cuda_close(tp_cuda_device *device)
{
    if (!device)
        return;
    tp_stream streams[] = {device->compute, device->communication};
    for (int i = 0; i < 2; i++) {
        if (streams[i])
            (void)cudaStreamSynchronize(streams[i]);
        tp_cuda_stream_destroy(device, streams[i]);
    }
    while (device->allocated)
        tp_cuda_unnote(device, device->allocated->memory);
    free(device);
}

tp_status
tp_cuda_driver_function(const char *name, int version, void **out)
{
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    int driver, runtime;
    *out = NULL;
    cudaError_t error = cudaGetDriverEntryPointByVersion(name, out, (unsigned)version, cudaEnableDefault, &found);
    if (error == cudaSuccess && found == cudaDriverEntryPointSuccess && *out)
        return TP_OK;
    (void)cudaGetLastError();
    *out = NULL;
    tp_cuda_versions(&driver, &runtime);
    return tp_fail(TP_ERUNTIME, "the NVIDIA driver (CUDA %d.%d) has no %s of CUDA %d.%d", driver / 1000, driver % 1000 / 10,
                   name, version / 1000, version % 1000 / 10);
}

tp_status
tp_cuda_launched(const char *kernel)
{
    tp_cuda_remember_kernel(kernel);
    cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? TP_OK : tp_cuda_check((int)error, kernel);
}

/* ---- memory --------------------------------------------------------------------------------------------------------- */

tp_status
tp_cuda_alloc(tp_cuda_device *device, size_t bytes, const char *what, void **out)
{
    *out = NULL;
    if (bytes == 0)
        return TP_OK;
    TP_TRY(tp_cuda_bind(device));
    tp_cuda_allocation *entry = malloc(sizeof *entry);
    if (!entry)
        return tp_fail(TP_EMEMORY, "no host memory to note %s", what);
    cudaError_t error = cudaMalloc(out, bytes);
    if (error != cudaSuccess) {
        size_t free_bytes = 0, total_bytes = 0;
        free(entry);
        *out = NULL;
        (void)cudaGetLastError();
        if (error != cudaErrorMemoryAllocation || cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess)
            return tp_cuda_check((int)error, what);
        return tp_cuda_refuse_bytes(device->properties.index, what, bytes, free_bytes, total_bytes);
    }
    tp_cuda_note(device, entry, *out, bytes);
    return TP_OK;
}

void
tp_cuda_free(tp_cuda_device *device, void *memory)
{
    if (!memory)
        return;
    tp_cuda_unnote(device, memory);
    if (tp_cuda_bind(device) == TP_OK)
        (void)cudaFree(memory);
}

tp_status
tp_cuda_host_alloc(tp_cuda_device *device, size_t bytes, const char *what, void **out)
{
    *out = NULL;
    if (bytes == 0)
        return TP_OK;
    TP_TRY(tp_cuda_bind(device));
    cudaError_t error = cudaHostAlloc(out, bytes, cudaHostAllocDefault);
    if (error == cudaSuccess)
        return TP_OK;
    (void)cudaGetLastError();
    *out = NULL;
    if (error == cudaErrorMemoryAllocation)
        return tp_cuda_refuse_pinned(what, bytes);
    return tp_cuda_check((int)error, what);
}

void
tp_cuda_host_free(tp_cuda_device *device, void *memory)
{
    if (memory && tp_cuda_bind(device) == TP_OK)
        (void)cudaFreeHost(memory);
}

static enum cudaMemcpyKind
kind_of(tp_cuda_direction direction)
{
    return direction == TP_CUDA_TO_DEVICE ? cudaMemcpyHostToDevice
           : direction == TP_CUDA_TO_HOST ? cudaMemcpyDeviceToHost
                                          : cudaMemcpyDeviceToDevice;
}

tp_status
tp_cuda_copy(tp_cuda_device *device, tp_stream stream, void *to, const void *from, size_t bytes,
             tp_cuda_direction direction)
{
    if (bytes == 0)
        return TP_OK;
    TP_TRY(tp_cuda_bind(device));
    CUDA_TRY(cudaMemcpyAsync(to, from, bytes, kind_of(direction), stream));
    return TP_OK;
}

tp_status
tp_cuda_copy_rows(tp_cuda_device *device, tp_stream stream, void *to, size_t to_pitch, const void *from,
                  size_t from_pitch, size_t row_bytes, size_t rows, tp_cuda_direction direction)
{
    if (row_bytes == 0 || rows == 0)
        return TP_OK;
    TP_TRY(tp_cuda_bind(device));
    CUDA_TRY(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, row_bytes, rows, kind_of(direction), stream));
    return TP_OK;
}

tp_status
tp_cuda_memset(tp_cuda_device *device, tp_stream stream, void *memory, int byte, size_t bytes)
{
    if (bytes == 0)
        return TP_OK;
    TP_TRY(tp_cuda_bind(device));
    CUDA_TRY(cudaMemsetAsync(memory, byte, bytes, stream));
    return TP_OK;
}

/* ---- streams and events --------------------------------------------------------------------------------------------- */

tp_status
tp_cuda_synchronize(tp_cuda_device *device, tp_stream stream)
{
    TP_TRY(tp_cuda_bind(device));
    CUDA_TRY(cudaStreamSynchronize(stream));
    return TP_OK;
}

static tp_status
done_of(cudaError_t error, const char *what, int *done)
{
    *done = error == cudaSuccess;
    if (error == cudaSuccess)
        return TP_OK;
    (void)cudaGetLastError();
    return error == cudaErrorNotReady ? TP_OK : tp_cuda_check((int)error, what);
}

tp_status
tp_cuda_query(tp_cuda_device *device, tp_stream stream, int *done)
{
    TP_TRY(tp_cuda_bind(device));
    return done_of(cudaStreamQuery(stream), "cudaStreamQuery", done);
}

tp_status
tp_cuda_event_create(tp_cuda_device *device, int timed, tp_cuda_event *out)
{
    *out = NULL;
    TP_TRY(tp_cuda_bind(device));
    if (device->partition.event_create)
        return device->partition.event_create(device->partition.context, timed, out);
    CUDA_TRY(cudaEventCreateWithFlags((cudaEvent_t *)out, timed ? cudaEventDefault : cudaEventDisableTiming));
    return TP_OK;
}

void
tp_cuda_event_destroy(tp_cuda_device *device, tp_cuda_event event)
{
    if (event && tp_cuda_bind(device) == TP_OK)
        (void)cudaEventDestroy(event);
}

tp_status
tp_cuda_event_record(tp_cuda_device *device, tp_cuda_event event, tp_stream stream)
{
    TP_TRY(tp_cuda_bind(device));
    CUDA_TRY(cudaEventRecord(event, stream));
    return TP_OK;
}

tp_status
tp_cuda_event_mark(tp_cuda_device *device, tp_cuda_event event, tp_stream stream)
{
    TP_TRY(tp_cuda_bind(device));
    /* outside a capture the external flag is an error */
    unsigned flags = tp_cuda_capturing(device, stream) ? cudaEventRecordExternal : cudaEventRecordDefault;
    CUDA_TRY(cudaEventRecordWithFlags(event, stream, flags));
    return TP_OK;
}

tp_status
tp_cuda_event_wait(tp_cuda_device *device, tp_cuda_event event, tp_stream stream)
{
    TP_TRY(tp_cuda_bind(device));
    CUDA_TRY(cudaStreamWaitEvent(stream, event, cudaEventWaitDefault));
    return TP_OK;
}

tp_status
tp_cuda_event_synchronize(tp_cuda_device *device, tp_cuda_event event)
{
    TP_TRY(tp_cuda_bind(device));
    CUDA_TRY(cudaEventSynchronize(event));
    return TP_OK;
}

tp_status
tp_cuda_event_query(tp_cuda_device *device, tp_cuda_event event, int *done)
{
    TP_TRY(tp_cuda_bind(device));
    return done_of(cudaEventQuery(event), "cudaEventQuery", done);
}

tp_status
tp_cuda_event_elapsed(tp_cuda_device *device, tp_cuda_event from, tp_cuda_event to, double *seconds)
{
    float milliseconds;
    TP_TRY(tp_cuda_bind(device));
    CUDA_TRY(cudaEventElapsedTime(&milliseconds, from, to));
    *seconds = 1e-3 * (double)milliseconds;
    return TP_OK;
}

/* ---- graphs --------------------------------------------------------------------------------------------------------- */

tp_status
tp_cuda_capture_begin(tp_cuda_device *device, tp_stream stream)
{
    TP_TRY(tp_cuda_bind(device));
    CUDA_TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    return TP_OK;
}

int
tp_cuda_capturing(tp_cuda_device *device, tp_stream stream)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    (void)device;
    if (cudaStreamIsCapturing(stream, &status) != cudaSuccess)
        (void)cudaGetLastError();
    return status != cudaStreamCaptureStatusNone;
}

typedef struct {
    cudaGraph_t captured;   /* NULL once it is ready */
    cudaGraphExec_t launch; /* NULL before */
} graph;

void
tp_cuda_graph_destroy(tp_cuda_device *device, tp_cuda_graph object)
{
    graph *g = object;
    if (g && g->captured)
        (void)cudaGraphDestroy(g->captured);
    if (g && g->launch && tp_cuda_bind(device) == TP_OK)
        (void)cudaGraphExecDestroy(g->launch);
    free(g);
}

tp_status
tp_cuda_capture_end(tp_cuda_device *device, tp_stream stream, tp_cuda_graph *out)
{
    graph *g = calloc(1, sizeof *g);
    cudaGraph_t captured = NULL;
    *out = NULL;
    (void)!tp_cuda_bind(device); /* the capture ends whatever is wrong */
    cudaError_t error = cudaStreamEndCapture(stream, &captured);
    if (error == cudaSuccess && g) {
        g->captured = captured;
        *out = g;
        return TP_OK;
    }
    if (captured)
        (void)cudaGraphDestroy(captured);
    free(g);
    (void)cudaGetLastError();
    return error == cudaSuccess ? tp_fail(TP_EMEMORY, "no host memory to note a graph")
                                : tp_cuda_check((int)error, "capturing a graph");
}

tp_status
tp_cuda_graph_ready(tp_cuda_device *device, tp_cuda_graph object, tp_stream stream)
{
    graph *g = object;
    TP_TRY(tp_cuda_bind(device));
    if (!g->launch) {
        CUDA_TRY(cudaGraphInstantiate(&g->launch, g->captured, 0));
        (void)cudaGraphDestroy(g->captured);
        g->captured = NULL;
    }
    CUDA_TRY(cudaGraphUpload(g->launch, stream));
    return TP_OK;
}

tp_status
tp_cuda_graph_launch(tp_cuda_device *device, tp_cuda_graph object, tp_stream stream)
{
    const graph *g = object;
    TP_TRY(tp_cuda_bind(device));
    tp_cuda_remember_kernel("of a graph");
    CUDA_TRY(cudaGraphLaunch(g->launch, stream));
    return TP_OK;
}
