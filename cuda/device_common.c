#include "cuda/device_common.h"

#include <stdio.h>
#include <stdlib.h>

#include "cuda/faults.h"

/* Before there is work: see cuda/green.h. */
static tp_status
try_part(tp_cuda_device *device)
{
    char why[512];
    if (!device->partition.stream_create || tp_cuda_try_launches(device) == TP_OK)
        return TP_OK;
    snprintf(why, sizeof why, "%s", tp_error_message());
    return tp_fail(TP_ERUNTIME, "a stream of a part of GPU %d (a green context's) takes no work from this driver: %s; the GPU as a whole, "
                   "which processes may share, needs no parts", device->properties.index, why);
}

static tp_status
try_event(tp_cuda_device *device)
{
    tp_cuda_event event;
    TP_TRY(tp_cuda_event_create(device, 0, &event));
    tp_status status = tp_cuda_event_record(device, event, device->compute);
    if (status == TP_OK)
        status = tp_cuda_event_wait(device, event, device->communication);
    if (status == TP_OK)
        status = tp_cuda_synchronize(device, device->communication);
    tp_cuda_event_destroy(device, event);
    return status;
}

/* cuEventRecord wants an event of the stream's context. Whether a part's stream is of the part or of the device to it is the
 * driver's to say: where it refuses the one, the other. */
static tp_status
choose_events(tp_cuda_device *device)
{
    if (!device->partition.event_create || try_event(device) == TP_OK)
        return TP_OK;
    device->partition.event_create = NULL;
    return try_event(device);
}

static tp_status
open_streams(tp_cuda_device *device)
{
    TP_TRY(tp_cuda_bind(device));
    TP_TRY(tp_cuda_ask_priorities(device));
    TP_TRY(tp_cuda_stream_create(device, 0, &device->compute));
    TP_TRY(tp_cuda_stream_create(device, 1, &device->communication));
    TP_TRY(try_part(device));
    return choose_events(device);
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
    tp_status status = open_streams(device);
    if (status != TP_OK) {
        tp_cuda_close(device);
        return status;
    }
    *out = device;
    return TP_OK;
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

tp_status
tp_cuda_enter(tp_cuda_device *device)
{
    return device->partition.enter ? device->partition.enter(device->partition.context) : TP_OK;
}

tp_status
tp_cuda_leave(tp_cuda_device *device)
{
    return device->partition.leave ? device->partition.leave(device->partition.context) : TP_OK;
}

void
tp_cuda_hold(tp_cuda_device *device, int multiprocessors)
{
    device->held = multiprocessors;
}

int
tp_cuda_held(const tp_cuda_device *device)
{
    int most = tp_cuda_multiprocessors(device) / 2;
    return device->held < most ? device->held : most;
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
tp_cuda_library_launched(tp_cuda_device *device, tp_stream stream, const char *call, int failed)
{
    int done;
    tp_cuda_remember_kernel(call);
    return failed && !tp_cuda_capturing(device, stream) ? tp_cuda_query(device, stream, &done) : TP_OK;
}

void
tp_cuda_note(tp_cuda_device *device, tp_cuda_allocation *entry, void *memory, size_t bytes)
{
    *entry = (tp_cuda_allocation){memory, bytes, device->allocated};
    device->allocated = entry;
}

size_t
tp_cuda_unnote(tp_cuda_device *device, const void *memory)
{
    for (tp_cuda_allocation **at = &device->allocated; *at; at = &(*at)->next)
        if ((*at)->memory == memory) {
            tp_cuda_allocation *entry = *at;
            size_t bytes = entry->bytes;
            *at = entry->next;
            free(entry);
            return bytes;
        }
    return 0;
}

tp_status
tp_cuda_refuse_pinned(const char *what, size_t bytes)
{
    /* RLIMIT_MEMLOCK (ulimit -l) is no limit of it: the driver pins the pages itself (open-gpu-kernel-modules, os-mlock.c) */
    return tp_fail(TP_EMEMORY, "%s needs %zu bytes of page-locked host memory, which this machine does not give: more free memory, or a "
                   "container's higher limit, would be right", what, bytes);
}
