/* The CPU as a provider: a team, a workspace and the clock as the device, csrc/stage as the stage. Nothing is enqueued. */
#include "csrc/stage/stage_ops.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/stage/stage.h"

static void
device_close(tp_device *base)
{
    tp_cpu_device *device = (tp_cpu_device *)base;
    if (device == NULL)
        return;
    tp_backend_close(&device->backend);
    tp_team_close(device->team);
    free(device);
}

static tp_status
device_open(const tp_device_config *config, tp_heap *heap, tp_device **out)
{
    if (config->dtype != TP_F32)
        return tp_fail(TP_EVALUE, "the CPU computes in float32: dtype \"float32\" would be right");
    tp_backend backend;
    TP_TRY(tp_cpu_open(config->isa, heap, NULL, &backend));
    tp_cpu_device *device = calloc(1, sizeof *device);
    if (device == NULL)
        return tp_fail(TP_EMEMORY, "no memory for a device");
    tp_status status = config->threads > 1 ? tp_team_open(config->threads, &device->team) : TP_OK;
    if (status != TP_OK) {
        free(device);
        return status;
    }
    device->base = (tp_device){.ops = tp_cpu_provider()->device, .heap = heap};
    device->backend = backend;
    device->backend.team = device->team;
    *out = &device->base;
    return TP_OK;
}

static tp_status
device_reserve(tp_device *device, size_t bytes)
{
    return tp_backend_reserve(&((tp_cpu_device *)device)->backend, bytes);
}

static tp_status
device_nothing(tp_device *device)
{
    (void)device;
    return TP_OK;
}

static tp_status
device_copy(tp_device *device, void *to, const void *from, size_t bytes)
{
    (void)device;
    memcpy(to, from, bytes);
    return TP_OK;
}

static tp_status
device_add(tp_device *device, float *to, const float *from, int64_t floats)
{
    tp_backend *backend = &((tp_cpu_device *)device)->backend;
    backend->ops->add(backend, floats, from, to);
    return TP_OK;
}

static tp_status
device_mark(tp_device *device, int64_t *at)
{
    (void)device;
    *at = tp_clock_ns();
    return TP_OK;
}

const tp_provider *
tp_cpu_provider(void)
{
    static const tp_device_ops device = {
        .open = device_open,       .close = device_close, .workspace_bytes = tp_stage_workspace_bytes,
        .reserve = device_reserve, .begin = device_nothing, .copy = device_copy,
        .add = device_add,         .message_floats = 65536, .waiting_floats = 16 << 20,
        .settle = device_nothing,  .read = device_copy,     .write = device_copy,
        .mark = device_mark,       .collect = device_nothing,
    };
    static const tp_provider cpu = {.abi = TP_PROVIDER_ABI,
                                    .size = sizeof(tp_provider),
                                    .name = "cpu",
                                    .host_memory = 1,
                                    .counts_tables = 1,
                                    .device = &device,
                                    .stage = &tp_cpu_stage_ops};
    return &cpu;
}
