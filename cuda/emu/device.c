/* device.h on host memory: every call has done its work when it returns, unless it was captured (cuda/emu/graph.h). Stricter than a
 * GPU's memory: fresh memory is full of NaN, and the bytes right before and behind each allocation are checked for writes. */
#include "cuda/device_common.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "cuda/emu/apart.h"
#include "cuda/emu/emu.h"
#include "cuda/emu/graph.h"
#include "cuda/emu/order.h"
#include "cuda/faults.h"
#include "cuda/simt.h"

enum { GUARD = 512, GUARD_BYTE = 0xA5, FRESH_BYTE = 0xFF, MAX_DEVICES = 16, RUNTIME = 13000 };

static const tp_emu_machine usual = {1, (uint64_t)4 << 30, 9, 0, RUNTIME, 132};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tp_emu_machine machine = {1, (uint64_t)4 << 30, 9, 0, RUNTIME, 132};
static uint64_t taken[MAX_DEVICES]; /* by all tp_cuda_devices of the process */
static _Atomic int64_t breaks_at;   /* calls left before the process's devices break; 0: never */
static _Atomic int is_broken, refuses_parts;
static _Atomic int contexts[MAX_DEVICES]; /* 1: this process has made one */

struct stream {
    int higher;
};

static _Atomic int lags, events; /* events: of no part of a GPU, made and not destroyed */

struct event {
    int timed, recorded, computes; /* computes: of the compute stream */
    int64_t ns;
    tp_emu_point point;
    tp_emu_clock clock;
};

tp_status
tp_emu_set_machine(const tp_emu_machine *wanted)
{
    const tp_emu_machine *m = wanted ? wanted : &usual;
    if (m->devices < 0 || m->devices > MAX_DEVICES)
        return tp_fail(TP_EVALUE, "emulated devices is %d; it must be 0 to %d", m->devices, MAX_DEVICES);
    if (m->multiprocessors < 1 || m->driver < 0)
        return tp_fail(TP_EVALUE, "emulated multiprocessors is %d and driver %d; they must be at least 1 and 0",
                       m->multiprocessors, m->driver);
    pthread_mutex_lock(&lock);
    machine = *m;
    pthread_mutex_unlock(&lock);
    return TP_OK;
}

tp_emu_machine
tp_emu_get_machine(void)
{
    pthread_mutex_lock(&lock);
    tp_emu_machine now = machine;
    pthread_mutex_unlock(&lock);
    return now;
}

void
tp_emu_break(int64_t calls)
{
    atomic_store(&breaks_at, calls);
    if (calls == 0) {
        atomic_store(&is_broken, 0);
        tp_cuda_forget_fault();
    }
}

const char *
tp_cuda_error_name(int error)
{
    switch (error) {
    case TP_CUDA_NO_MEMORY: return "cudaErrorMemoryAllocation";
    case TP_CUDA_BAD_HANDLE: return "cudaErrorInvalidResourceHandle";
    case TP_CUDA_NOT_READY: return "cudaErrorNotReady";
    case TP_CUDA_ILLEGAL_ADDRESS: return "cudaErrorIllegalAddress";
    case TP_CUDA_CAPTURE_UNSUPPORTED: return "cudaErrorStreamCaptureUnsupported";
    case TP_CUDA_CAPTURE_INVALIDATED: return "cudaErrorStreamCaptureInvalidated";
    case TP_CUDA_CAPTURE_UNJOINED: return "cudaErrorStreamCaptureUnjoined";
    case TP_CUDA_CAPTURE_ISOLATION: return "cudaErrorStreamCaptureIsolation";
    case TP_CUDA_CAPTURED_EVENT: return "cudaErrorCapturedEvent";
    default: return "cudaErrorUnknown";
    }
}

const char *
tp_cuda_error_text(int error)
{
    return error == TP_CUDA_ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "emulated";
}

/* What every device call begins with: the injected break. */
int
tp_emu_breaks(void)
{
    int64_t left = atomic_load(&breaks_at);
    while (left > 0 && !atomic_compare_exchange_weak(&breaks_at, &left, left - 1))
        ;
    if (left == 1)
        atomic_store(&is_broken, 1);
    return atomic_load(&is_broken);
}

static tp_status
enter(const char *what)
{
    return tp_emu_breaks() ? tp_cuda_check(TP_CUDA_ILLEGAL_ADDRESS, what) : TP_OK;
}

/* ---- the machine ---------------------------------------------------------------------------------------------------- */

int
tp_cuda_device_count(void)
{
    tp_emu_machine m = tp_emu_get_machine();
    return m.driver >= RUNTIME ? m.devices : 0;
}

void
tp_cuda_versions(int *driver, int *runtime)
{
    *driver = tp_emu_get_machine().driver;
    *runtime = RUNTIME;
}

tp_status
tp_cuda_available(void)
{
    tp_emu_machine m = tp_emu_get_machine();
    if (m.driver >= RUNTIME && m.devices > 0)
        return TP_OK;
    return tp_cuda_refuse_machine(m.driver, RUNTIME, m.driver < RUNTIME ? TP_CUDA_OLD_DRIVER : TP_CUDA_NO_DEVICE,
                                  "emulated");
}

tp_status
tp_cuda_describe(int index, tp_cuda_properties *out)
{
    tp_emu_machine m = tp_emu_get_machine();
    TP_TRY(tp_cuda_available());
    TP_TRY(tp_cuda_check_index(index, m.devices));
    *out = (tp_cuda_properties){
        .index = index, .major = m.major, .minor = m.minor, .multiprocessors = m.multiprocessors, .clock_khz = 1000000,
        .memory_clock_khz = 1000000, .memory_bus_bits = 64, .total_bytes = m.total_bytes, .shared_bytes = 227 * 1024,
        .l2_bytes = 1 << 20,
    };
    pthread_mutex_lock(&lock);
    out->free_bytes = m.total_bytes > taken[index] ? m.total_bytes - taken[index] : 0;
    pthread_mutex_unlock(&lock);
    snprintf(out->name, sizeof out->name, "emulated GPU");
    snprintf(out->bus_id, sizeof out->bus_id, "emu:%d", index);
    snprintf(out->uuid, sizeof out->uuid, "emu-%d", index);
    return TP_OK;
}

/* ---- a device ------------------------------------------------------------------------------------------------------- */

tp_status
tp_cuda_use(int index)
{
    tp_cuda_remember_device(index);
    TP_TRY(enter("cudaSetDevice"));
    atomic_store(&contexts[index], 1);
    return TP_OK;
}

int
tp_emu_contexts(void)
{
    int count = 0;
    for (int i = 0; i < MAX_DEVICES; i++)
        count += atomic_load(&contexts[i]);
    return count;
}

tp_status
tp_cuda_bind(tp_cuda_device *device)
{
    return tp_cuda_use(device->properties.index);
}

tp_status
tp_cuda_stream_create(tp_cuda_device *device, int higher, tp_stream *out)
{
    *out = NULL;
    TP_TRY(enter("cudaStreamCreateWithPriority"));
    if (device->partition.stream_create)
        return device->partition.stream_create(device->partition.context, device->priorities[higher != 0], out);
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return tp_fail(TP_EMEMORY, "no host memory for an emulated stream");
    stream->higher = higher != 0;
    tp_emu_order_stream(stream, 1);
    *out = stream;
    return TP_OK;
}

void
tp_cuda_stream_destroy(tp_cuda_device *device, tp_stream stream)
{
    (void)device;
    tp_emu_order_stream(stream, 0);
    free(stream);
}

/* Memory lies between two guards. */
static char *
block_of(void *memory)
{
    return (char *)memory - GUARD;
}

tp_status
tp_cuda_ask_priorities(tp_cuda_device *device)
{
    device->priorities[0] = 0;
    device->priorities[1] = -1;
    return TP_OK;
}

void
tp_emu_refuse_parts(int on)
{
    atomic_store(&refuses_parts, on);
}

tp_status
tp_cuda_try_launches(tp_cuda_device *device)
{
    if (device->partition.stream_create && atomic_load(&refuses_parts))
        return tp_cuda_check(TP_CUDA_BAD_HANDLE, "cudaLaunchKernel");
    return enter("cudaLaunchKernel");
}

static void
give_back(const tp_cuda_device *device, void *memory, size_t bytes)
{
    tp_simt_range_remove(memory);
    pthread_mutex_lock(&lock);
    taken[device->properties.index] -= bytes;
    pthread_mutex_unlock(&lock);
    tp_emu_give(block_of(memory));
}

void
tp_cuda_close(tp_cuda_device *device)
{
    if (!device)
        return;
    tp_cuda_stream_destroy(device, device->compute);
    tp_cuda_stream_destroy(device, device->communication);
    while (device->allocated)
        tp_cuda_free(device, device->allocated->memory);
    free(device);
}

tp_status
tp_cuda_driver_function(const char *name, int version, void **out)
{
    *out = NULL;
    return tp_fail(TP_ERUNTIME, "the emulated driver has no %s of CUDA %d.%d", name, version / 1000, version % 1000 / 10);
}

tp_status
tp_cuda_launched(const char *kernel)
{
    tp_cuda_remember_kernel(kernel);
    return enter(kernel);
}

/* ---- memory --------------------------------------------------------------------------------------------------------- */

/* Reserve `bytes` of the device's size, all ranks of the process together. */
static tp_status
reserve(tp_cuda_device *device, size_t bytes, const char *what)
{
    int index = device->properties.index;
    uint64_t total = device->properties.total_bytes;
    pthread_mutex_lock(&lock);
    uint64_t left = total > taken[index] ? total - taken[index] : 0;
    int fits = bytes <= left;
    if (fits)
        taken[index] += bytes;
    pthread_mutex_unlock(&lock);
    return fits ? TP_OK : tp_cuda_refuse_bytes(index, what, bytes, left, total);
}

tp_status
tp_cuda_alloc(tp_cuda_device *device, size_t bytes, const char *what, void **out)
{
    *out = NULL;
    if (bytes == 0)
        return TP_OK;
    TP_TRY(enter("cudaMalloc"));
    TP_TRY(tp_emu_outside("cudaMalloc"));
    TP_TRY(reserve(device, bytes, what));
    size_t whole = (bytes + 2 * GUARD + GUARD - 1) / GUARD * GUARD;
    tp_cuda_allocation *entry = malloc(sizeof *entry);
    char *block = entry ? tp_emu_take(whole) : NULL;
    tp_status status = block ? tp_simt_range_add(block + GUARD, bytes) : TP_OK;
    if (!block || status != TP_OK) {
        tp_emu_give(block);
        free(entry);
        pthread_mutex_lock(&lock);
        taken[device->properties.index] -= bytes;
        pthread_mutex_unlock(&lock);
        TP_TRY(status);
        return tp_fail(TP_EMEMORY, "%s needs %zu bytes, which the host of the emulated device does not have", what, bytes);
    }
    tp_emu_enter();
    memset(block, GUARD_BYTE, GUARD);
    memset(block + GUARD, FRESH_BYTE, bytes);
    memset(block + GUARD + bytes, GUARD_BYTE, whole - GUARD - bytes);
    tp_emu_leave();
    tp_cuda_note(device, entry, block + GUARD, bytes);
    *out = block + GUARD;
    return TP_OK;
}

void
tp_cuda_free(tp_cuda_device *device, void *memory)
{
    size_t bytes = tp_cuda_unnote(device, memory);
    if (bytes > 0)
        give_back(device, memory, bytes);
}

/* ERUNTIME if anything wrote right before or behind an allocation. */
static tp_status
check_guards(const tp_cuda_device *device)
{
    for (const tp_cuda_allocation *entry = device->allocated; entry; entry = entry->next) {
        const unsigned char *block = (const unsigned char *)block_of(entry->memory);
        for (size_t i = 0; i < GUARD; i++) {
            if (block[GUARD - 1 - i] != GUARD_BYTE)
                return tp_fail(TP_ERUNTIME, "something wrote %zu bytes before an allocation of %zu bytes; last kernel: %s",
                               i + 1, entry->bytes, tp_cuda_last_kernel());
            if (block[GUARD + entry->bytes + i] != GUARD_BYTE)
                return tp_fail(TP_ERUNTIME, "something wrote %zu bytes behind an allocation of %zu bytes; last kernel: %s",
                               i + 1, entry->bytes, tp_cuda_last_kernel());
        }
    }
    return TP_OK;
}

tp_status
tp_cuda_host_alloc(tp_cuda_device *device, size_t bytes, const char *what, void **out)
{
    (void)device;
    *out = NULL;
    if (bytes == 0)
        return TP_OK;
    TP_TRY(enter("cudaHostAlloc"));
    TP_TRY(tp_emu_outside("cudaHostAlloc"));
    *out = malloc(bytes);
    if (!*out)
        return tp_cuda_refuse_pinned(what, bytes);
    memset(*out, FRESH_BYTE, bytes);
    return TP_OK;
}

void
tp_cuda_host_free(tp_cuda_device *device, void *memory)
{
    (void)device;
    free(memory);
}

tp_status
tp_cuda_copy(tp_cuda_device *device, tp_stream stream, void *to, const void *from, size_t bytes,
             tp_cuda_direction direction)
{
    return tp_cuda_copy_rows(device, stream, to, bytes, from, bytes, bytes, 1, direction);
}

static tp_status
run_copy(const void *body)
{
    const tp_emu_copy *c = body;
    for (size_t r = 0; r < c->rows; r++)
        memmove((char *)c->to + r * c->to_pitch, (const char *)c->from + r * c->from_pitch, c->row_bytes);
    return TP_OK;
}

/* Are both ends where the direction says? A GPU's driver looks, and refuses. Of two on the device one may be another library's
 * (the false libnccl's), which is not known here. */
static tp_status
check_places(const void *to, const void *from, tp_cuda_direction direction)
{
    uintptr_t unused[2];
    int to_device = tp_simt_range_of(to, 1, unused), from_device = tp_simt_range_of(from, 1, unused);
    int right = direction == TP_CUDA_ON_DEVICE ? to_device || from_device
                                               : to_device == (direction == TP_CUDA_TO_DEVICE) && from_device != to_device;
    return right ? TP_OK : tp_cuda_check(TP_CUDA_INVALID_VALUE, "cudaMemcpyAsync");
}

tp_status
tp_cuda_copy_rows(tp_cuda_device *device, tp_stream stream, void *to, size_t to_pitch, const void *from,
                  size_t from_pitch, size_t row_bytes, size_t rows, tp_cuda_direction direction)
{
    const tp_emu_copy body = {to, from, to_pitch, from_pitch, row_bytes, rows};
    (void)device;
    if (row_bytes == 0 || rows == 0)
        return TP_OK;
    TP_TRY(enter("cudaMemcpyAsync"));
    TP_TRY(check_places(to, from, direction));
    return tp_emu_do(stream, "copy", run_copy, &body, sizeof body);
}

static tp_status
run_fill(const void *body)
{
    const tp_emu_fill *f = body;
    memset(f->memory, (int)f->byte, f->bytes);
    return TP_OK;
}

tp_status
tp_cuda_memset(tp_cuda_device *device, tp_stream stream, void *memory, int byte, size_t bytes)
{
    const tp_emu_fill body = {memory, bytes, (unsigned char)byte};
    (void)device;
    if (bytes == 0)
        return TP_OK;
    TP_TRY(enter("cudaMemsetAsync"));
    return tp_emu_do(stream, "fill", run_fill, &body, sizeof body);
}

/* ---- streams and events --------------------------------------------------------------------------------------------- */

tp_status
tp_cuda_synchronize(tp_cuda_device *device, tp_stream stream)
{
    TP_TRY(enter("cudaStreamSynchronize"));
    TP_TRY(tp_emu_outside_of(stream, "cudaStreamSynchronize"));
    tp_emu_order_host_stream(stream);
    tp_emu_enter();
    tp_status status = check_guards(device);
    tp_emu_leave();
    return status;
}

tp_status
tp_cuda_query(tp_cuda_device *device, tp_stream stream, int *done)
{
    (void)device;
    *done = 1;
    TP_TRY(enter("cudaStreamQuery"));
    tp_emu_order_host_stream(stream);
    return tp_emu_outside_of(stream, "cudaStreamQuery");
}

tp_status
tp_cuda_event_create(tp_cuda_device *device, int timed, tp_cuda_event *out)
{
    *out = NULL;
    TP_TRY(enter("cudaEventCreateWithFlags"));
    if (device->partition.event_create)
        return device->partition.event_create(device->partition.context, timed, out);
    struct event *event = calloc(1, sizeof *event);
    if (!event)
        return tp_fail(TP_EMEMORY, "no host memory for an emulated event");
    event->timed = timed != 0;
    *out = event;
    atomic_fetch_add(&events, 1);
    return TP_OK;
}

void
tp_cuda_event_destroy(tp_cuda_device *device, tp_cuda_event event)
{
    if (event != NULL && !device->partition.event_create)
        atomic_fetch_sub(&events, 1);
    free(event);
}

int
tp_emu_events(void)
{
    return atomic_load(&events);
}

static tp_status
run_record(const void *body)
{
    struct event *e = *(struct event *const *)body;
    e->ns = tp_clock_ns();
    e->recorded = 1;
    return TP_OK;
}

tp_status
tp_cuda_event_record(tp_cuda_device *device, tp_cuda_event event, tp_stream stream)
{
    struct event *e = event;
    (void)device;
    TP_TRY(enter("cudaEventRecord"));
    e->computes = stream == device->compute;
    tp_emu_order_record(stream, &e->clock);
    return tp_emu_point_record(stream, &e->point) ? TP_OK : run_record(&e);
}

tp_status
tp_cuda_event_mark(tp_cuda_device *device, tp_cuda_event event, tp_stream stream)
{
    struct event *e = event;
    (void)device;
    TP_TRY(enter("cudaEventRecord"));
    e->point = (tp_emu_point){0};
    tp_emu_order_record(stream, &e->clock);
    return tp_emu_do(stream, "mark", run_record, &e, sizeof e);
}

tp_status
tp_cuda_event_wait(tp_cuda_device *device, tp_cuda_event event, tp_stream stream)
{
    (void)device;
    TP_TRY(enter("cudaStreamWaitEvent"));
    tp_emu_order_wait(stream, &((struct event *)event)->clock);
    return tp_emu_point_wait(stream, &((struct event *)event)->point);
}

tp_status
tp_cuda_event_synchronize(tp_cuda_device *device, tp_cuda_event event)
{
    (void)device;
    TP_TRY(enter("cudaEventSynchronize"));
    tp_emu_order_host_event(&((struct event *)event)->clock);
    return tp_emu_point_read(&((struct event *)event)->point, "cudaEventSynchronize");
}

void
tp_emu_lag(int on)
{
    atomic_store(&lags, on);
}

tp_status
tp_cuda_event_query(tp_cuda_device *device, tp_cuda_event event, int *done)
{
    (void)device;
    *done = !atomic_load(&lags) || (atomic_load(&lags) == 3 && ((struct event *)event)->computes);
    TP_TRY(enter("cudaEventQuery"));
    if (atomic_load(&lags) == 2)
        return tp_cuda_check(TP_CUDA_BAD_HANDLE, "cudaEventQuery");
    if (*done)
        tp_emu_order_host_event(&((struct event *)event)->clock);
    return tp_emu_point_read(&((struct event *)event)->point, "cudaEventQuery");
}

tp_status
tp_cuda_event_elapsed(tp_cuda_device *device, tp_cuda_event from, tp_cuda_event to, double *seconds)
{
    const struct event *a = from, *b = to;
    (void)device;
    TP_TRY(enter("cudaEventElapsedTime"));
    TP_TRY(tp_emu_point_read(&a->point, "cudaEventElapsedTime"));
    TP_TRY(tp_emu_point_read(&b->point, "cudaEventElapsedTime"));
    if (!a->timed || !b->timed || !a->recorded || !b->recorded)
        return tp_cuda_check(TP_CUDA_BAD_HANDLE, "cudaEventElapsedTime of an event not timed or never recorded");
    *seconds = 1e-9 * (double)(b->ns - a->ns);
    return TP_OK;
}
