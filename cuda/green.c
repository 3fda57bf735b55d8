#include "cuda/green.h"

#include <stdlib.h>

enum { SM = 1, DEFAULT_STREAM = 1, NON_BLOCKING = 1, STEP = 8, MOST_PARTS = 32, SINCE = 12040, TIMED = 0, NOT_TIMED = 2 };

typedef struct {
    tp_green *green;
    void *context, *current; /* the green context; the same, to be made current */
} part;

struct tp_green {
    tp_green_driver driver;
    int parts;
    part part[MOST_PARTS];
    tp_cuda_partition partition[MOST_PARTS];
};

static tp_status
load_driver(tp_green_driver *out)
{
    void *found[11] = {NULL};
    static const struct {
        const char *name;
        int since;
    } wanted[11] = {{"cuDeviceGetDevResource", SINCE}, {"cuDevSmResourceSplitByCount", SINCE}, {"cuDevResourceGenerateDesc", SINCE},
                    {"cuGreenCtxCreate", SINCE},       {"cuGreenCtxDestroy", SINCE},           {"cuGreenCtxStreamCreate", 12050},
                    {"cuGreenCtxGetDevResource", SINCE}, {"cuCtxFromGreenCtx", SINCE}, {"cuCtxPushCurrent", SINCE},
                    {"cuCtxPopCurrent", SINCE},          {"cuEventCreate", SINCE}};
    for (int i = 0; i < 11; i++)
        TP_TRY(tp_cuda_driver_function(wanted[i].name, wanted[i].since, &found[i]));
    /* POSIX: a pointer that dlsym gave is a function's */
    *(void **)&out->device_resource = found[0];
    *(void **)&out->split = found[1];
    *(void **)&out->describe = found[2];
    *(void **)&out->create = found[3];
    *(void **)&out->destroy = found[4];
    *(void **)&out->stream = found[5];
    *(void **)&out->resource_of = found[6];
    *(void **)&out->current_of = found[7];
    *(void **)&out->push = found[8];
    *(void **)&out->pop = found[9];
    *(void **)&out->event = found[10];
    return TP_OK;
}

static tp_status
driver_failed(const char *call, int result)
{
    return tp_cuda_check(result, call); /* the runtime's numbers: a device that is lost is told as one */
}

static tp_status
part_stream(void *context, int priority, tp_stream *out)
{
    part *p = context;
    int result = p->green->driver.stream(out, p->context, NON_BLOCKING, priority);
    return result == 0 ? TP_OK : driver_failed("cuGreenCtxStreamCreate", result);
}

static tp_status
part_enter(void *context)
{
    const part *p = context;
    int result = p->green->driver.push(p->current);
    return result == 0 ? TP_OK : driver_failed("cuCtxPushCurrent", result);
}

static tp_status
part_leave(void *context)
{
    const part *p = context;
    void *left;
    int result = p->green->driver.pop(&left);
    return result == 0 ? TP_OK : driver_failed("cuCtxPopCurrent", result);
}

static tp_status
part_event(void *context, int timed, tp_cuda_event *out)
{
    const part *p = context;
    TP_TRY(part_enter(context));
    int made = p->green->driver.event(out, timed ? TIMED : NOT_TIMED);
    tp_status status = part_leave(context);
    return made == 0 ? status : driver_failed("cuEventCreate", made);
}

/* The largest size, a multiple of 8, of which the driver makes at least so many groups. */
static tp_status
split(const tp_green *green, int parts, const tp_green_resource *all, tp_green_resource groups[MOST_PARTS])
{
    unsigned total = all->is.sm.count, most = 0, largest = total / (unsigned)parts / STEP * STEP;
    int refused = 0;
    for (unsigned size = largest < STEP ? STEP : largest; size >= STEP; size -= STEP) { /* of too many, how many could be */
        unsigned count = (unsigned)parts;
        tp_green_resource rest;
        int result = green->driver.split(groups, &count, all, &rest, 0, size);
        int equal = result == 0 && count == (unsigned)parts;
        for (unsigned i = 1; equal && i < count; i++)
            equal = groups[i].is.sm.count == groups[0].is.sm.count;
        if (equal)
            return TP_OK;
        most = result == 0 && count > most ? count : most;
        refused = result != 0 ? result : refused;
    }
    if (most == 0 && refused != 0) /* of every size: no word on how large the GPU is */
        return driver_failed("cuDevSmResourceSplitByCount", refused);
    return tp_fail(TP_EINFEASIBLE, "a GPU of %u multiprocessors has no %d equal parts of at least %d: at most %u groups were made",
                   total, parts, STEP, most);
}

static tp_status
open_part(tp_green *green, int index, int i, tp_green_resource *group)
{
    void *description;
    tp_green_resource got;
    part *p = &green->part[i];
    int result = green->driver.describe(&description, group, 1);
    if (result != 0)
        return driver_failed("cuDevResourceGenerateDesc", result);
    result = green->driver.create(&p->context, description, index, DEFAULT_STREAM);
    if (result != 0)
        return driver_failed("cuGreenCtxCreate", result);
    p->green = green;
    green->parts = i + 1;
    result = green->driver.resource_of(p->context, &got, SM);
    if (result != 0)
        return driver_failed("cuGreenCtxGetDevResource", result);
    result = green->driver.current_of(&p->current, p->context);
    if (result != 0)
        return driver_failed("cuCtxFromGreenCtx", result);
    green->partition[i] = (tp_cuda_partition){
        .context = p, .stream_create = part_stream, .event_create = part_event,
        .enter = part_enter, .leave = part_leave, .multiprocessors = (int)got.is.sm.count};
    return TP_OK;
}

static tp_status
open_parts(tp_green *green, int index, int parts)
{
    tp_green_resource all, groups[MOST_PARTS];
    int result = green->driver.device_resource(index, &all, SM); /* a CUdevice is its ordinal */
    if (result != 0)
        return driver_failed("cuDeviceGetDevResource", result);
    TP_TRY(split(green, parts, &all, groups));
    for (int i = 0; i < parts; i++)
        TP_TRY(open_part(green, index, i, &groups[i]));
    return TP_OK;
}

tp_status
tp_green_open(int index, int parts, const tp_green_driver *driver, tp_green **out)
{
    tp_cuda_properties properties;
    tp_green_driver real;
    if (parts < 1 || parts > MOST_PARTS)
        return tp_fail(TP_EVALUE, "parts is %d: 1 to %d would be right", parts, MOST_PARTS);
    if (driver == NULL) {
        TP_TRY(tp_cuda_describe(index, &properties));
        TP_TRY(tp_cuda_use(index)); /* cuGreenCtxCreate wants the primary context there before */
        TP_TRY(load_driver(&real));
    }
    tp_green *green = calloc(1, sizeof *green);
    if (green == NULL)
        return tp_fail(TP_EMEMORY, "no host memory for %d parts of a GPU", parts);
    green->driver = driver == NULL ? real : *driver;
    tp_status status = open_parts(green, index, parts);
    if (status != TP_OK) {
        tp_green_close(green);
        return status;
    }
    *out = green;
    return TP_OK;
}

const tp_cuda_partition *
tp_green_part(const tp_green *green, int i)
{
    return &green->partition[i];
}

void
tp_green_close(tp_green *green)
{
    if (green == NULL)
        return;
    for (int i = 0; i < green->parts; i++)
        green->driver.destroy(green->part[i].context);
    free(green);
}
