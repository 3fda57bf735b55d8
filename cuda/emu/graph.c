#include "cuda/emu/graph.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/emu/apart.h"
#include "cuda/emu/emu.h"
#include "cuda/emu/order.h"
#include "cuda/faults.h"

enum { BRANCHES = 8 };

typedef struct operation {
    struct operation *next;
    tp_emu_run *run;
    const char *name;
    size_t bytes;
    _Alignas(16) char body[];
} operation;

typedef struct {
    operation *first, **last;
} graph;

typedef struct capture {
    struct capture *next;
    uint64_t number;
    pthread_t owner;
    graph *into;
    int spoiled, branches;
    struct {
        tp_stream stream;
        int64_t done, joined; /* operations noted on it, and those that the first branch waits for */
    } branch[BRANCHES];
} capture;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* the list, the trace and the counts; a capture is its thread's own */
static capture *open_captures;
static _Atomic int open_count;
static uint64_t numbers;
static _Thread_local int mine; /* captures that this thread has open */

static _Atomic int fault;
static int64_t begun, launched;

/* ---- the trace ---------------------------------------------------------------------------------------------------------- */

static tp_emu_traced *trace;
static int64_t traced, trace_room;
static _Atomic int tracing;

void
tp_emu_trace(int on)
{
    pthread_mutex_lock(&lock);
    atomic_store(&tracing, on);
    traced = 0;
    pthread_mutex_unlock(&lock);
}

int64_t
tp_emu_traced_count(void)
{
    return traced;
}

tp_emu_traced
tp_emu_traced_at(int64_t i)
{
    return trace[i];
}

static void
note(const char *name, const void *body, size_t bytes)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    if (!atomic_load(&tracing))
        return;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)body)[i]) * 1099511628211u;
    pthread_mutex_lock(&lock);
    if (traced == trace_room) {
        int64_t room = trace_room == 0 ? 1024 : 2 * trace_room;
        tp_emu_traced *more = realloc(trace, (size_t)room * sizeof *more);
        if (more != NULL) {
            trace = more;
            trace_room = room;
        }
    }
    if (traced < trace_room)
        trace[traced++] = (tp_emu_traced){name, hash};
    pthread_mutex_unlock(&lock);
}

void
tp_emu_set_graphs(int wanted)
{
    pthread_mutex_lock(&lock);
    fault = wanted;
    begun = launched = 0;
    pthread_mutex_unlock(&lock);
}

void
tp_emu_graph_calls(int64_t *captures, int64_t *launches)
{
    pthread_mutex_lock(&lock);
    *captures = begun;
    *launches = launched;
    pthread_mutex_unlock(&lock);
}

/* ---- capturing ------------------------------------------------------------------------------------------------------------ */

/* The capture that the stream takes part in, and as which branch; NULL: none. */
static capture *
capture_of(tp_stream stream, int *branch)
{
    capture *found = NULL;
    if (stream == NULL || atomic_load(&open_count) == 0)
        return NULL;
    pthread_mutex_lock(&lock);
    for (capture *c = open_captures; c != NULL && found == NULL; c = c->next)
        for (int i = 0; i < c->branches && found == NULL; i++)
            if (c->branch[i].stream == stream) {
                found = c;
                *branch = i;
            }
    pthread_mutex_unlock(&lock);
    return found;
}

static capture *
capture_numbered(uint64_t number)
{
    pthread_mutex_lock(&lock);
    capture *c = open_captures;
    while (c != NULL && c->number != number)
        c = c->next;
    pthread_mutex_unlock(&lock);
    return c;
}

static tp_status
spoil(capture *c, int error, const char *call)
{
    if (c != NULL)
        c->spoiled = 1;
    return tp_cuda_check(error, call);
}

int
tp_emu_captures(void)
{
    return mine > 0;
}

tp_status
tp_emu_outside(const char *call)
{
    if (mine == 0)
        return TP_OK;
    pthread_mutex_lock(&lock);
    for (capture *c = open_captures; c != NULL; c = c->next)
        c->spoiled |= pthread_equal(c->owner, pthread_self());
    pthread_mutex_unlock(&lock);
    return tp_cuda_check(TP_CUDA_CAPTURE_UNSUPPORTED, call);
}

tp_status
tp_emu_outside_of(tp_stream stream, const char *call)
{
    int branch;
    capture *c = capture_of(stream, &branch);
    return c == NULL ? TP_OK : spoil(c, TP_CUDA_CAPTURE_UNSUPPORTED, call);
}

static tp_status
run_inside(tp_emu_run *run, const void *body)
{
    tp_emu_enter();
    tp_status status = run(body);
    tp_emu_leave();
    return status;
}

tp_status
tp_emu_do(tp_stream stream, const char *name, tp_emu_run *run, const void *body, size_t bytes)
{
    int branch;
    capture *c = capture_of(stream, &branch);
    if (c == NULL) {
        note(name, body, bytes);
        TP_TRY(tp_emu_order_do(stream, name, body, bytes));
        return run_inside(run, body);
    }
    if (c->spoiled)
        return tp_cuda_check(TP_CUDA_CAPTURE_INVALIDATED, name);
    if (fault == TP_EMU_CAPTURE_BREAKS && c->branch[0].done == 1)
        return spoil(c, TP_CUDA_CAPTURE_UNSUPPORTED, name);
    operation *one = malloc(sizeof *one + bytes);
    if (one == NULL)
        return tp_fail(TP_EMEMORY, "no host memory for an emulated graph");
    *one = (operation){.run = run, .name = name, .bytes = bytes};
    memcpy(one->body, body, bytes);
    *c->into->last = one;
    c->into->last = &one->next;
    c->branch[branch].done++;
    return TP_OK;
}

int
tp_emu_point_record(tp_stream stream, tp_emu_point *point)
{
    int branch;
    capture *c = capture_of(stream, &branch);
    *point = c == NULL ? (tp_emu_point){0} : (tp_emu_point){c->number, branch, c->branch[branch].done};
    return c != NULL;
}

tp_status
tp_emu_point_wait(tp_stream stream, const tp_emu_point *point)
{
    int branch;
    capture *waits = capture_of(stream, &branch), *of = point->capture == 0 ? NULL : capture_numbered(point->capture);
    if (waits == NULL && point->capture == 0)
        return TP_OK;
    if (waits != NULL && waits != of)
        return spoil(waits, TP_CUDA_CAPTURE_ISOLATION, "cudaStreamWaitEvent of an event from outside of the capture");
    if (of == NULL)
        return tp_cuda_check(TP_CUDA_CAPTURED_EVENT, "cudaStreamWaitEvent of an event of a capture that has ended");
    if (waits != NULL) {
        if (branch == 0 && of->branch[point->branch].joined < point->at)
            of->branch[point->branch].joined = point->at;
        return TP_OK;
    }
    if (of->branches == BRANCHES)
        return tp_fail(TP_EINTERNAL, "an emulated capture has room for %d streams", BRANCHES);
    pthread_mutex_lock(&lock);
    of->branch[of->branches].stream = stream;
    of->branch[of->branches].done = of->branch[of->branches].joined = 0;
    of->branches++;
    pthread_mutex_unlock(&lock);
    return TP_OK;
}

tp_status
tp_emu_point_read(const tp_emu_point *point, const char *call)
{
    return point->capture == 0 ? TP_OK : tp_cuda_check(TP_CUDA_CAPTURED_EVENT, call);
}

/* ---- device.h: graphs ----------------------------------------------------------------------------------------------------- */

tp_status
tp_cuda_capture_begin(tp_cuda_device *device, tp_stream stream)
{
    TP_TRY(tp_cuda_bind(device));
    TP_TRY(tp_emu_outside_of(stream, "cudaStreamBeginCapture"));
    if (fault == TP_EMU_NO_BEGIN)
        return tp_cuda_check(TP_CUDA_CAPTURE_UNSUPPORTED, "cudaStreamBeginCapture");
    capture *c = calloc(1, sizeof *c);
    graph *g = calloc(1, sizeof *g);
    if (c == NULL || g == NULL) {
        free(c);
        free(g);
        return tp_fail(TP_EMEMORY, "no host memory for an emulated graph");
    }
    g->last = &g->first;
    c->into = g;
    c->owner = pthread_self();
    c->branches = 1;
    c->branch[0].stream = stream;
    pthread_mutex_lock(&lock);
    c->number = ++numbers;
    c->next = open_captures;
    open_captures = c;
    begun++;
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&open_count, 1);
    mine++;
    return TP_OK;
}

int
tp_cuda_capturing(tp_cuda_device *device, tp_stream stream)
{
    int branch;
    (void)device;
    return capture_of(stream, &branch) != NULL;
}

void
tp_cuda_graph_destroy(tp_cuda_device *device, tp_cuda_graph object)
{
    graph *g = object;
    (void)device;
    for (operation *one = g == NULL ? NULL : g->first, *next; one != NULL; one = next) {
        next = one->next;
        free(one);
    }
    free(g);
}

/* What ending the capture says; the capture is over. */
static int
end(capture *c)
{
    int error = c->spoiled ? TP_CUDA_CAPTURE_INVALIDATED : TP_CUDA_SUCCESS;
    for (int i = 1; i < c->branches && error == TP_CUDA_SUCCESS; i++)
        if (c->branch[i].joined < c->branch[i].done)
            error = TP_CUDA_CAPTURE_UNJOINED;
    pthread_mutex_lock(&lock);
    capture **at = &open_captures;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    pthread_mutex_unlock(&lock);
    atomic_fetch_sub(&open_count, 1);
    mine--;
    return error;
}

tp_status
tp_cuda_capture_end(tp_cuda_device *device, tp_stream stream, tp_cuda_graph *out)
{
    int branch;
    capture *c = capture_of(stream, &branch);
    *out = NULL;
    tp_status bound = tp_cuda_bind(device);
    if (c == NULL || branch != 0)
        return tp_cuda_check(TP_CUDA_INVALID_VALUE, "cudaStreamEndCapture of a stream that began no capture");
    graph *g = c->into;
    int error = end(c);
    free(c);
    if (bound == TP_OK && error == TP_CUDA_SUCCESS) {
        *out = g;
        return TP_OK;
    }
    tp_cuda_graph_destroy(device, g);
    return bound != TP_OK ? bound : tp_cuda_check(error, "capturing a graph");
}

tp_status
tp_cuda_graph_ready(tp_cuda_device *device, tp_cuda_graph object, tp_stream stream)
{
    (void)object;
    TP_TRY(tp_cuda_bind(device));
    TP_TRY(tp_emu_outside_of(stream, "cudaGraphUpload"));
    return tp_cuda_check(fault == TP_EMU_NO_GRAPH ? TP_CUDA_NO_MEMORY : TP_CUDA_SUCCESS, "cudaGraphInstantiate");
}

tp_status
tp_cuda_graph_launch(tp_cuda_device *device, tp_cuda_graph object, tp_stream stream)
{
    const graph *g = object;
    TP_TRY(tp_cuda_bind(device));
    TP_TRY(tp_emu_outside_of(stream, "cudaGraphLaunch"));
    tp_cuda_remember_kernel("of a graph");
    if (fault == TP_EMU_NO_LAUNCH)
        return tp_cuda_check(TP_CUDA_NO_MEMORY, "cudaGraphLaunch");
    pthread_mutex_lock(&lock);
    launched++;
    pthread_mutex_unlock(&lock);
    for (const operation *one = g->first; one != NULL; one = one->next) {
        note(one->name, one->body, one->bytes);
        TP_TRY(tp_emu_order_do(stream, one->name, one->body, one->bytes));
        TP_TRY(run_inside(one->run, one->body));
    }
    return TP_OK;
}
