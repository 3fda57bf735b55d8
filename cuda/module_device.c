/* Everything of device.h once, on a device: copies, streams that wait for each other, times, a graph. For tests and
 * `terapipe doctor`; training does not come here. */
#include "cuda/module.h"

#include <stdio.h>
#include <string.h>

#include "csrc/stage/stage_ops.h"
#include "cuda/device.h"

enum { BYTES = 1 << 20, PITCH = 4096, ROW = 1024, ROWS = 64 };

typedef struct {
    tp_cuda_device *device;
    unsigned char *memory, *host; /* BYTES each: on the device, page-locked */
    tp_cuda_event ready, begin, end;
    tp_cuda_graph graph;
    double seconds; /* of the last fill by the device's clock */
    int launches;   /* of the graph */
} trial;

static tp_status
expect(const trial *t, size_t at, int byte, const char *what)
{
    if (t->host[at] == byte)
        return TP_OK;
    return tp_fail(TP_ERUNTIME, "%s: byte %zu came back as %d, not %d", what, at, t->host[at], byte);
}

static tp_status
open_trial(trial *t, int index, const tp_cuda_partition *part)
{
    TP_TRY(tp_cuda_open(index, part, &t->device));
    TP_TRY(tp_cuda_alloc(t->device, BYTES, "a trial", (void **)&t->memory));
    TP_TRY(tp_cuda_host_alloc(t->device, BYTES, "a trial", (void **)&t->host));
    TP_TRY(tp_cuda_event_create(t->device, 0, &t->ready));
    TP_TRY(tp_cuda_event_create(t->device, 1, &t->begin));
    return tp_cuda_event_create(t->device, 1, &t->end);
}

static void
close_trial(trial *t)
{
    if (!t->device)
        return;
    tp_cuda_graph_destroy(t->device, t->graph);
    tp_cuda_event events[] = {t->ready, t->begin, t->end};
    for (int i = 0; i < 3; i++)
        tp_cuda_event_destroy(t->device, events[i]);
    tp_cuda_host_free(t->device, t->host);
    tp_cuda_free(t->device, t->memory);
    tp_cuda_close(t->device);
}

/* Filled on one stream, read on the other after an event; then rows at a pitch. */
static tp_status
try_streams(trial *t)
{
    tp_stream compute = tp_cuda_compute(t->device), other = tp_cuda_communication(t->device);
    TP_TRY(tp_cuda_event_record(t->device, t->begin, compute));
    TP_TRY(tp_cuda_memset(t->device, compute, t->memory, 0x11, BYTES));
    TP_TRY(tp_cuda_event_mark(t->device, t->end, compute));
    TP_TRY(tp_cuda_event_record(t->device, t->ready, compute));
    TP_TRY(tp_cuda_event_wait(t->device, t->ready, other));
    TP_TRY(tp_cuda_copy(t->device, other, t->host, t->memory, BYTES, TP_CUDA_TO_HOST));
    TP_TRY(tp_cuda_synchronize(t->device, other));
    TP_TRY(expect(t, BYTES - 1, 0x11, "a copy on the communication stream"));
    TP_TRY(tp_cuda_event_elapsed(t->device, t->begin, t->end, &t->seconds));
    memset(t->host, 0x22, ROW * ROWS);
    TP_TRY(tp_cuda_copy_rows(t->device, compute, t->memory, PITCH, t->host, ROW, ROW, ROWS, TP_CUDA_TO_DEVICE));
    TP_TRY(tp_cuda_copy(t->device, compute, t->host, t->memory, BYTES, TP_CUDA_TO_HOST));
    TP_TRY(tp_cuda_synchronize(t->device, compute));
    TP_TRY(expect(t, PITCH * (ROWS - 1) + ROW - 1, 0x22, "the last byte of the last row"));
    return expect(t, PITCH * (ROWS - 1) + ROW, 0x11, "the byte behind it");
}

/* A captured fork and join, launched twice. */
static tp_status
try_graph(trial *t)
{
    tp_stream compute = tp_cuda_compute(t->device), other = tp_cuda_communication(t->device);
    TP_TRY(tp_cuda_capture_begin(t->device, compute));
    tp_status status = tp_cuda_event_mark(t->device, t->begin, compute);
    if (status == TP_OK)
        status = tp_cuda_memset(t->device, compute, t->memory, 0x33, BYTES);
    if (status == TP_OK)
        status = tp_cuda_event_record(t->device, t->ready, compute);
    if (status == TP_OK)
        status = tp_cuda_event_wait(t->device, t->ready, other);
    if (status == TP_OK)
        status = tp_cuda_copy(t->device, other, t->host, t->memory, BYTES, TP_CUDA_TO_HOST);
    if (status == TP_OK)
        status = tp_cuda_event_record(t->device, t->ready, other);
    if (status == TP_OK)
        status = tp_cuda_event_wait(t->device, t->ready, compute);
    if (status == TP_OK)
        status = tp_cuda_event_mark(t->device, t->end, compute);
    char why[512];
    snprintf(why, sizeof why, "%s", tp_error_message());
    tp_status ended = tp_cuda_capture_end(t->device, compute, &t->graph);
    if (status != TP_OK) /* the end of a capture that went wrong says only that */
        return tp_fail(status, "%s", why);
    TP_TRY(ended);
    TP_TRY(tp_cuda_graph_ready(t->device, t->graph, compute));
    for (int i = 0; i < 2; i++) {
        memset(t->host, 0, BYTES);
        TP_TRY(tp_cuda_graph_launch(t->device, t->graph, compute));
        t->launches++;
        TP_TRY(tp_cuda_synchronize(t->device, compute));
        TP_TRY(expect(t, BYTES / 2, 0x33, "a launched graph"));
        TP_TRY(tp_cuda_event_elapsed(t->device, t->begin, t->end, &t->seconds));
    }
    return TP_OK;
}

static tp_status
run_trial(trial *t, int index, const tp_cuda_partition *part)
{
    TP_TRY(open_trial(t, index, part));
    TP_TRY(try_streams(t));
    return try_graph(t);
}

static PyObject *
exercise(PyObject *module, PyObject *args)
{
    trial t;
    tp_status status;
    int index;
    PyObject *capsule = Py_None;
    const tp_cuda_partition *part = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "i|O:exercise", &index, &capsule))
        return NULL;
    if (capsule != Py_None && (part = PyCapsule_GetPointer(capsule, TP_PARTITION_CAPSULE)) == NULL)
        return NULL;
    memset(&t, 0, sizeof t);
    Py_BEGIN_ALLOW_THREADS
    status = run_trial(&t, index, part);
    close_trial(&t);
    Py_END_ALLOW_THREADS
    if (status != TP_OK)
        return tp_cuda_raise(status);
    return Py_BuildValue("{s:i,s:d,s:i}", "graphs", t.launches, "seconds", t.seconds, "bytes", BYTES);
}

static PyMethodDef methods[] = {
    {"exercise", exercise, METH_VARARGS,
     "exercise(index, part=None): copies, streams, events and a graph of a device, or of a part of it; what was seen, or the "
     "exception of what was wrong."},
    {NULL, NULL, 0, NULL},
};

int
tp_cuda_add_device(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
