/* The CPU as a provider: a team, a workspace and the clock as the device, csrc/stage as the stage. Nothing is enqueued. */
#include "csrc/stage/stage_ops.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/stage/stage.h"

typedef struct {
    tp_device base;
    tp_backend backend;
    tp_team *team;
} cpu_device;

/* ---- the device ---------------------------------------------------------------------------------------------------------- */

static void
device_close(tp_device *base)
{
    cpu_device *device = (cpu_device *)base;
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
    const tp_backend_ops *ops = tp_cpu_ops(config->isa);
    if (ops == NULL)
        return tp_fail(TP_EVALUE, "isa is '%s': not one that this processor has", config->isa);
    cpu_device *device = calloc(1, sizeof *device);
    if (device == NULL)
        return tp_fail(TP_EMEMORY, "no memory for a device");
    tp_status status = config->threads > 1 ? tp_team_open(config->threads, &device->team) : TP_OK;
    if (status != TP_OK) {
        free(device);
        return status;
    }
    device->base = (tp_device){.ops = tp_cpu_provider()->device, .heap = heap};
    device->backend = (tp_backend){.ops = ops, .heap = heap, .team = device->team};
    *out = &device->base;
    return TP_OK;
}

static size_t
device_workspace_bytes(const tp_stage_config *stage, const tp_device_config *config)
{
    return tp_stage_workspace_bytes(stage, tp_cpu_ops(config->isa), config->threads);
}

static tp_status
device_reserve(tp_device *device, size_t bytes)
{
    return tp_backend_reserve(&((cpu_device *)device)->backend, bytes);
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
device_mark(tp_device *device, int64_t *at)
{
    (void)device;
    *at = tp_clock_ns();
    return TP_OK;
}

/* ---- the stage: csrc/stage's functions, which never fail once a stage is open ------------------------------------------------ */

static size_t
stage_bytes(const tp_stage_config *config, const tp_device_config *device)
{
    return tp_stage_bytes(config, tp_cpu_ops(device->isa));
}

static tp_status
stage_open(const tp_stage_config *config, tp_device *device, tp_stage **out)
{
    return tp_stage_open(config, &((cpu_device *)device)->backend, out);
}

static tp_status
stage_import(tp_stage *stage, int i, tp_state state, const float *row_major)
{
    tp_stage_import(stage, i, state, row_major);
    return TP_OK;
}

static tp_status
stage_export(const tp_stage *stage, int i, tp_state state, float *row_major)
{
    tp_stage_export(stage, i, state, row_major);
    return TP_OK;
}

static tp_status
stage_pack(tp_stage *stage)
{
    tp_stage_pack(stage);
    return TP_OK;
}

static tp_status
stage_begin(tp_stage *stage, const int32_t *tokens, int train)
{
    tp_stage_begin(stage, tokens, train);
    return TP_OK;
}

static tp_status
stage_forward(tp_stage *stage, int micro, int slice, tp_half half, int slot)
{
    tp_stage_forward(stage, micro, slice, half, slot);
    return TP_OK;
}

static tp_status
stage_input_gradient(tp_stage *stage, int micro, int slice, int slot, int gradient_slot)
{
    tp_stage_input_gradient(stage, micro, slice, slot, gradient_slot);
    return TP_OK;
}

static tp_status
stage_weight_gradient(tp_stage *stage, int micro, int slice, int slot, int gradient_slot)
{
    tp_stage_weight_gradient(stage, micro, slice, slot, gradient_slot);
    return TP_OK;
}

static tp_status
stage_tied(tp_stage *stage, tp_tied *out)
{
    tp_stage_tied(stage, out);
    return TP_OK;
}

static tp_status
stage_finish(tp_stage *stage)
{
    if (!tp_stage_is_tied_apart((tp_stage_base *)stage)) /* else stage_tied has */
        tp_stage_finish_head(stage);
    tp_stage_finish_gradients(stage);
    return TP_OK;
}

static tp_status
stage_loss(tp_stage *stage, double *out)
{
    *out = tp_stage_loss(stage);
    return TP_OK;
}

static tp_status
stage_sumsq(tp_stage *stage, double *sums)
{
    tp_stage_sumsq(stage, sums);
    return TP_OK;
}

static tp_status
stage_update(tp_stage *stage, const tp_adamw *adamw, double grad_scale)
{
    tp_stage_update(stage, adamw, grad_scale);
    return TP_OK;
}

const tp_provider *
tp_cpu_provider(void)
{
    static const tp_device_ops device = {
        .open = device_open,       .close = device_close, .workspace_bytes = device_workspace_bytes,
        .reserve = device_reserve, .begin = device_nothing, .copy = device_copy,
        .read = device_copy,       .write = device_copy,
        .mark = device_mark,       .collect = device_nothing,
    };
    static const tp_stage_ops stage = {
        .bytes = stage_bytes,
        .open = stage_open,
        .close = tp_stage_close,
        .params = tp_stage_params,
        .param_index = tp_stage_param_index,
        .param_shape = tp_stage_param_shape,
        .import = stage_import,
        .export = stage_export,
        .pack = stage_pack,
        .begin = stage_begin,
        .forward = stage_forward,
        .input_gradient = stage_input_gradient,
        .weight_gradient = stage_weight_gradient,
        .end = tp_stage_end,
        .tied = stage_tied,
        .finish = stage_finish,
        .loss = stage_loss,
        .sumsq = stage_sumsq,
        .update = stage_update,
    };
    static const tp_provider cpu = {.abi = TP_PROVIDER_ABI,
                                    .size = sizeof(tp_provider),
                                    .name = "cpu",
                                    .host_memory = 1,
                                    .counts_tables = 1,
                                    .device = &device,
                                    .stage = &stage};
    return &cpu;
}
