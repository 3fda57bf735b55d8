/* device.h on host memory: every call has done its work when it returns. Memory is what a GPU's is, only stricter: fresh
 * memory is full of NaN, and what lies right before and behind each allocation must stay as it is. */
#include "cuda/device.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "cuda/emu/emu.h"
#include "cuda/faults.h"
#include "cuda/simt.h"

enum { GUARD = 512, GUARD_BYTE = 0xA5, FRESH_BYTE = 0xFF, MAX_DEVICES = 16, RUNTIME = 13000 };

static const tp_emu_machine usual = {1, (uint64_t)4 << 30, 9, 0, RUNTIME, 132};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tp_emu_machine machine = {1, (uint64_t)4 << 30, 9, 0, RUNTIME, 132};
static uint64_t taken[MAX_DEVICES]; /* by all tp_cuda_devices of the process */
static _Atomic int64_t breaks_at;   /* calls left before the process's devices break; 0: never */
static _Atomic int is_broken;

struct allocation {
    char *block; /* GUARD bytes, the memory, GUARD bytes */
    size_t bytes;
    struct allocation *next;
};

struct tp_cuda_device {
    tp_cuda_properties properties;
    tp_cuda_partition partition;
    tp_stream compute, communication;
    size_t bytes;
    uint64_t allocations;
    struct allocation *allocated;
};

struct stream {
    int higher;
};

struct event {
    int timed, recorded;
    int64_t ns;
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
    default: return "cudaErrorUnknown";
    }
}

const char *
tp_cuda_error_text(int error)
{
    return error == TP_CUDA_ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "emulated";
}

/* What every device call begins with: the injected break. */
static tp_status
enter(const char *what)
{
    int64_t left = atomic_load(&breaks_at);
    while (left > 0 && !atomic_compare_exchange_weak(&breaks_at, &left, left - 1))
        ;
    if (left == 1)
        atomic_store(&is_broken, 1);
    return atomic_load(&is_broken) ? tp_cuda_check(TP_CUDA_ILLEGAL_ADDRESS, what) : TP_OK;
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
tp_cuda_bind(tp_cuda_device *device)
{
    (void)device;
    return enter("cudaSetDevice");
}

tp_status
tp_cuda_stream_create(tp_cuda_device *device, int higher, tp_stream *out)
{
    *out = NULL;
    TP_TRY(enter("cudaStreamCreateWithPriority"));
    if (device->partition.stream_create)
        return device->partition.stream_create(device->partition.context, -(higher != 0), out);
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return tp_fail(TP_EMEMORY, "no host memory for an emulated stream");
    stream->higher = higher != 0;
    *out = stream;
    return TP_OK;
}

void
tp_cuda_stream_destroy(tp_cuda_device *device, tp_stream stream)
{
    (void)device;
    free(stream);
}

tp_status
tp_cuda_open(int index, const tp_cuda_partition *partition, tp_cuda_device **out)
{
    tp_cuda_properties properties;
    *out = NULL;
    TP_TRY(tp_cuda_describe(index, &properties));
    TP_TRY(tp_cuda_check_capability(&properties));
    tp_cuda_device *device = calloc(1, sizeof *device);
    if (!device)
        return tp_fail(TP_EMEMORY, "no host memory for the description of device %d", index);
    device->properties = properties;
    if (partition)
        device->partition = *partition;
    tp_status status = tp_cuda_stream_create(device, 0, &device->compute);
    if (status == TP_OK)
        status = tp_cuda_stream_create(device, 1, &device->communication);
    if (status != TP_OK) {
        tp_cuda_close(device);
        return status;
    }
    *out = device;
    return TP_OK;
}

static void
give_back(tp_cuda_device *device, struct allocation *entry)
{
    tp_simt_range_remove(entry->block + GUARD);
    pthread_mutex_lock(&lock);
    taken[device->properties.index] -= entry->bytes;
    pthread_mutex_unlock(&lock);
    device->bytes -= entry->bytes;
    free(entry->block);
    free(entry);
}

void
tp_cuda_close(tp_cuda_device *device)
{
    if (!device)
        return;
    tp_cuda_stream_destroy(device, device->compute);
    tp_cuda_stream_destroy(device, device->communication);
    while (device->allocated) {
        struct allocation *entry = device->allocated;
        device->allocated = entry->next;
        give_back(device, entry);
    }
    free(device);
}

const tp_cuda_properties *
tp_cuda_device_properties(const tp_cuda_device *device)
{
    return &device->properties;
}

int
tp_cuda_multiprocessors(const tp_cuda_device *device)
{
    return device->partition.stream_create ? device->partition.multiprocessors : device->properties.multiprocessors;
}

tp_stream
tp_cuda_compute(tp_cuda_device *device)
{
    return device->compute;
}

tp_stream
tp_cuda_communication(tp_cuda_device *device)
{
    return device->communication;
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
    TP_TRY(reserve(device, bytes, what));
    size_t whole = (bytes + 2 * GUARD + GUARD - 1) / GUARD * GUARD;
    struct allocation *entry = calloc(1, sizeof *entry);
    if (entry)
        *entry = (struct allocation){aligned_alloc(GUARD, whole), bytes, device->allocated};
    tp_status status = entry && entry->block ? tp_simt_range_add(entry->block + GUARD, bytes) : TP_OK;
    if (!entry || !entry->block || status != TP_OK) {
        if (entry)
            free(entry->block);
        free(entry);
        pthread_mutex_lock(&lock);
        taken[device->properties.index] -= bytes;
        pthread_mutex_unlock(&lock);
        TP_TRY(status);
        return tp_fail(TP_EMEMORY, "%s needs %zu bytes, which the host of the emulated device does not have", what, bytes);
    }
    memset(entry->block, GUARD_BYTE, whole);
    memset(entry->block + GUARD, FRESH_BYTE, bytes);
    device->allocated = entry;
    device->bytes += bytes;
    device->allocations++;
    *out = entry->block + GUARD;
    return TP_OK;
}

void
tp_cuda_free(tp_cuda_device *device, void *memory)
{
    for (struct allocation **at = &device->allocated; memory && *at; at = &(*at)->next)
        if ((*at)->block + GUARD == (char *)memory) {
            struct allocation *entry = *at;
            *at = entry->next;
            give_back(device, entry);
            return;
        }
}

/* ERUNTIME if anything wrote right before or behind an allocation. */
static tp_status
check_guards(const tp_cuda_device *device)
{
    for (const struct allocation *entry = device->allocated; entry; entry = entry->next)
        for (size_t i = 0; i < GUARD; i++) {
            if ((unsigned char)entry->block[GUARD - 1 - i] != GUARD_BYTE)
                return tp_fail(TP_ERUNTIME, "something wrote %zu bytes before an allocation of %zu bytes; last kernel: %s",
                               i + 1, entry->bytes, tp_cuda_last_kernel());
            if ((unsigned char)entry->block[GUARD + entry->bytes + i] != GUARD_BYTE)
                return tp_fail(TP_ERUNTIME, "something wrote %zu bytes behind an allocation of %zu bytes; last kernel: %s",
                               i + 1, entry->bytes, tp_cuda_last_kernel());
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
    *out = malloc(bytes);
    if (!*out)
        return tp_fail(TP_EMEMORY, "%s needs %zu bytes of page-locked host memory, which there are not (ulimit -l)", what,
                       bytes);
    memset(*out, FRESH_BYTE, bytes);
    return TP_OK;
}

void
tp_cuda_host_free(tp_cuda_device *device, void *memory)
{
    (void)device;
    free(memory);
}

size_t
tp_cuda_bytes(const tp_cuda_device *device)
{
    return device->bytes;
}

uint64_t
tp_cuda_allocations(const tp_cuda_device *device)
{
    return device->allocations;
}

tp_status
tp_cuda_copy(tp_cuda_device *device, tp_stream stream, void *to, const void *from, size_t bytes,
             tp_cuda_direction direction)
{
    return tp_cuda_copy_rows(device, stream, to, bytes, from, bytes, bytes, 1, direction);
}

tp_status
tp_cuda_copy_rows(tp_cuda_device *device, tp_stream stream, void *to, size_t to_pitch, const void *from,
                  size_t from_pitch, size_t row_bytes, size_t rows, tp_cuda_direction direction)
{
    (void)device, (void)stream, (void)direction;
    if (row_bytes == 0 || rows == 0)
        return TP_OK;
    TP_TRY(enter("cudaMemcpyAsync"));
    for (size_t r = 0; r < rows; r++)
        memmove((char *)to + r * to_pitch, (const char *)from + r * from_pitch, row_bytes);
    return TP_OK;
}

tp_status
tp_cuda_memset(tp_cuda_device *device, tp_stream stream, void *memory, int byte, size_t bytes)
{
    (void)device, (void)stream;
    if (bytes == 0)
        return TP_OK;
    TP_TRY(enter("cudaMemsetAsync"));
    memset(memory, byte, bytes);
    return TP_OK;
}

/* ---- streams and events --------------------------------------------------------------------------------------------- */

tp_status
tp_cuda_synchronize(tp_cuda_device *device, tp_stream stream)
{
    (void)stream;
    TP_TRY(enter("cudaStreamSynchronize"));
    return check_guards(device);
}

tp_status
tp_cuda_query(tp_cuda_device *device, tp_stream stream, int *done)
{
    (void)device, (void)stream;
    *done = 1;
    return enter("cudaStreamQuery");
}

tp_status
tp_cuda_event_create(tp_cuda_device *device, int timed, tp_cuda_event *out)
{
    (void)device;
    *out = NULL;
    TP_TRY(enter("cudaEventCreateWithFlags"));
    struct event *event = calloc(1, sizeof *event);
    if (!event)
        return tp_fail(TP_EMEMORY, "no host memory for an emulated event");
    event->timed = timed != 0;
    *out = event;
    return TP_OK;
}

void
tp_cuda_event_destroy(tp_cuda_device *device, tp_cuda_event event)
{
    (void)device;
    free(event);
}

tp_status
tp_cuda_event_record(tp_cuda_device *device, tp_cuda_event event, tp_stream stream)
{
    struct event *e = event;
    (void)device, (void)stream;
    TP_TRY(enter("cudaEventRecord"));
    e->ns = tp_clock_ns();
    e->recorded = 1;
    return TP_OK;
}

tp_status
tp_cuda_event_mark(tp_cuda_device *device, tp_cuda_event event, tp_stream stream)
{
    return tp_cuda_event_record(device, event, stream);
}

tp_status
tp_cuda_event_wait(tp_cuda_device *device, tp_cuda_event event, tp_stream stream)
{
    (void)device, (void)event, (void)stream;
    return enter("cudaStreamWaitEvent");
}

tp_status
tp_cuda_event_synchronize(tp_cuda_device *device, tp_cuda_event event)
{
    (void)device, (void)event;
    return enter("cudaEventSynchronize");
}

tp_status
tp_cuda_event_query(tp_cuda_device *device, tp_cuda_event event, int *done)
{
    (void)device, (void)event;
    *done = 1;
    return enter("cudaEventQuery");
}

tp_status
tp_cuda_event_elapsed(tp_cuda_device *device, tp_cuda_event from, tp_cuda_event to, double *seconds)
{
    const struct event *a = from, *b = to;
    (void)device;
    TP_TRY(enter("cudaEventElapsedTime"));
    if (!a->timed || !b->timed || !a->recorded || !b->recorded)
        return tp_cuda_check(TP_CUDA_BAD_HANDLE, "cudaEventElapsedTime of an event not timed or never recorded");
    *seconds = 1e-9 * (double)(b->ns - a->ns);
    return TP_OK;
}

/* ---- graphs: none, since work here is done at once ------------------------------------------------------------------ */

int
tp_cuda_has_graphs(const tp_cuda_device *device)
{
    (void)device;
    return 0;
}

static tp_status
no_graphs(void)
{
    return tp_fail(TP_ERUNTIME, "the emulated device has no graphs (tp_cuda_has_graphs is 0): enqueue the step anew");
}

tp_status
tp_cuda_capture_begin(tp_cuda_device *device, tp_stream stream)
{
    (void)device, (void)stream;
    return no_graphs();
}

int
tp_cuda_capturing(tp_cuda_device *device, tp_stream stream)
{
    (void)device, (void)stream;
    return 0;
}

tp_status
tp_cuda_capture_end(tp_cuda_device *device, tp_stream stream, tp_cuda_graph *out)
{
    (void)device, (void)stream;
    *out = NULL;
    return no_graphs();
}

tp_status
tp_cuda_graph_launch(tp_cuda_device *device, tp_cuda_graph graph, tp_stream stream)
{
    (void)device, (void)graph, (void)stream;
    return no_graphs();
}

void
tp_cuda_graph_destroy(tp_cuda_device *device, tp_cuda_graph graph)
{
    (void)device, (void)graph;
}
