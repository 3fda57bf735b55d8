#include "cuda/rank.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "cuda/faults.h"
#include "cuda/kernels.h"

/* ---- the account's memory ------------------------------------------------------------------------------------------------ */

static tp_status
heap_take(void *context, size_t bytes, const char *what, void **out)
{
    return tp_cuda_alloc(((tp_cuda_rank *)context)->cuda, bytes, what, out);
}

static void
heap_give(void *context, void *memory)
{
    tp_cuda_free(((tp_cuda_rank *)context)->cuda, memory);
}

/* ---- marks ----------------------------------------------------------------------------------------------------------------- */

static tp_status
add_mark(tp_cuda_rank *rank, tp_cuda_marks *marks, int64_t *at)
{
    if (marks->count == marks->room) {
        int64_t room = marks->room == 0 ? 64 : 2 * marks->room;
        tp_cuda_mark *mark = realloc(marks->mark, (size_t)room * sizeof *mark);
        if (mark == NULL)
            return tp_fail(TP_EMEMORY, "no memory for %lld marks of a step", (long long)room);
        marks->mark = mark;
        for (; marks->room < room; marks->room++) {
            marks->mark[marks->room] = (tp_cuda_mark){0};
            TP_TRY(tp_cuda_event_create(rank->cuda, 1, &marks->mark[marks->room].event));
        }
    }
    tp_cuda_mark *mark = &marks->mark[marks->count];
    mark->at = at;
    TP_TRY(tp_cuda_event_mark(rank->cuda, mark->event, rank->stream));
    marks->count++;
    return TP_OK;
}

static void
drop_marks(tp_cuda_rank *rank, tp_cuda_marks *marks)
{
    for (int64_t i = 0; i < marks->room; i++)
        tp_cuda_event_destroy(rank->cuda, marks->mark[i].event);
    free(marks->mark);
    *marks = (tp_cuda_marks){0};
}

static tp_status
read_marks(tp_cuda_rank *rank, const tp_cuda_marks *marks)
{
    for (int64_t i = 0; i < marks->count; i++) {
        double seconds;
        TP_TRY(tp_cuda_event_elapsed(rank->cuda, rank->origin, marks->mark[i].event, &seconds));
        *marks->mark[i].at = rank->origin_ns + (int64_t)(seconds * 1e9);
    }
    return TP_OK;
}

static tp_status
device_mark(tp_device *device, int64_t *at)
{
    tp_cuda_rank *rank = tp_cuda_rank_of(device);
    return add_mark(rank, rank->capturing != NULL ? &rank->capturing->marks : &rank->marks, at);
}

/* ---- swaps beside the work --------------------------------------------------------------------------------------- */

static tp_status
open_aside(tp_cuda_rank *rank, int64_t number)
{
    if (rank->aside == NULL)
        TP_TRY(tp_cuda_stream_create(rank->cuda, 0, &rank->aside));
    if (rank->given == NULL)
        TP_TRY(tp_cuda_event_create(rank->cuda, 0, &rank->given));
    if (number < rank->copies)
        return TP_OK;
    int64_t room = 2 * number + 16;
    tp_cuda_event *copied = realloc(rank->copied, (size_t)room * sizeof *copied);
    if (copied == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %lld copies of a step", (long long)room);
    rank->copied = copied;
    for (; rank->copies < room; rank->copies++)
        TP_TRY(tp_cuda_event_create(rank->cuda, 0, &copied[rank->copies]));
    return TP_OK;
}

static void
close_aside(tp_cuda_rank *rank)
{
    for (int64_t i = 0; i < rank->copies; i++)
        tp_cuda_event_destroy(rank->cuda, rank->copied[i]);
    free(rank->copied);
    if (rank->given != NULL)
        tp_cuda_event_destroy(rank->cuda, rank->given);
    tp_cuda_stream_destroy(rank->cuda, rank->aside);
}

static tp_status
device_aside_begin(tp_device *device, int64_t number)
{
    tp_cuda_rank *rank = tp_cuda_rank_of(device);
    TP_TRY(open_aside(rank, number));
    TP_TRY(tp_cuda_event_record(rank->cuda, rank->given, rank->stream));
    TP_TRY(tp_cuda_event_wait(rank->cuda, rank->given, rank->aside));
    rank->stream = rank->aside;
    return TP_OK;
}

static tp_status
device_aside_end(tp_device *device, int64_t number)
{
    tp_cuda_rank *rank = tp_cuda_rank_of(device);
    rank->stream = tp_cuda_compute(rank->cuda);
    return number < rank->copies ? tp_cuda_event_record(rank->cuda, rank->copied[number], rank->aside) : TP_OK;
}

static tp_status
device_aside_wait(tp_device *device, int64_t number)
{
    tp_cuda_rank *rank = tp_cuda_rank_of(device);
    return tp_cuda_event_wait(rank->cuda, rank->copied[number], rank->stream);
}

/* ---- opening and closing ----------------------------------------------------------------------------------------------------- */

static void
device_close(tp_device *device)
{
    tp_cuda_rank *rank = tp_cuda_rank_of(device);
    if (rank == NULL)
        return;
    if (rank->capturing != NULL) { /* a step failed within: nothing of it runs */
        tp_cuda_graph unused = NULL;
        if (tp_cuda_capture_end(rank->cuda, rank->stream, &unused) == TP_OK)
            tp_cuda_graph_destroy(rank->cuda, unused);
    }
    for (int64_t i = 0; i < rank->stretches; i++) {
        if (rank->stretch[i].graph != NULL)
            tp_cuda_graph_destroy(rank->cuda, rank->stretch[i].graph);
        drop_marks(rank, &rank->stretch[i].marks);
    }
    free(rank->stretch);
    drop_marks(rank, &rank->marks);
    if (rank->origin != NULL)
        tp_cuda_event_destroy(rank->cuda, rank->origin);
    close_aside(rank);
    tp_gemm_close(rank->gemm);
    tp_cudnn_close(rank->cudnn);
    tp_heap_free(rank->base.heap, rank->workspace);
    tp_heap_use(rank->base.heap, NULL);
    tp_cuda_close(rank->cuda);
    free(rank);
}

static tp_status
device_open(const tp_device_config *config, tp_heap *heap, tp_device **out)
{
    tp_cuda_rank *rank = calloc(1, sizeof *rank);
    if (rank == NULL)
        return tp_fail(TP_EMEMORY, "no memory for a device");
    tp_status status = tp_cuda_open(config->device, config->partition, &rank->cuda);
    if (status != TP_OK) {
        free(rank);
        return status;
    }
    rank->base = (tp_device){.ops = &tp_cuda_device_ops, .heap = heap};
    rank->config = *config;
    rank->stream = tp_cuda_compute(rank->cuda);
    rank->asked = rank->unkept = "";
    tp_heap_use(heap, &(tp_heap_hook){.context = rank, .take = heap_take, .give = heap_give});
    status = tp_cuda_event_create(rank->cuda, 1, &rank->origin);
    if (status != TP_OK) {
        device_close(&rank->base);
        return status;
    }
    *out = &rank->base;
    return TP_OK;
}

enum { OWN, MMA, WGMMA, CUDNN };

/* Read TERAPIPE_ATTENTION. */
static tp_status
attention_asked(int *asked)
{
    static const char *const names[] = {"own", "mma", "wgmma", "cudnn"};
    const char *told = getenv("TERAPIPE_ATTENTION");
    *asked = OWN;
    if (told == NULL || *told == 0)
        return TP_OK;
    for (; *asked <= CUDNN; ++*asked)
        if (strcmp(told, names[*asked]) == 0)
            return TP_OK;
    return tp_fail(TP_EVALUE, "TERAPIPE_ATTENTION is \"%s\": \"own\" (or nothing), \"mma\", \"wgmma\" or \"cudnn\" would be right",
                   told);
}

tp_status
tp_cuda_attention_choose(const tp_cuda_properties *properties, tp_dtype dtype, tp_attention_kernel *out)
{
    int asked;
    TP_TRY(attention_asked(&asked));
    TP_TRY(tp_cuda_check_capability(properties)); /* where nothing has opened the device yet */
    *out = TP_ATTENTION_MMA;
    if (dtype != TP_BF16 || asked == MMA)
        return TP_OK;
    if (asked == WGMMA)
        TP_TRY(tp_cuda_attention_check(TP_ATTENTION_WGMMA, properties));
    if (asked == WGMMA || tp_cuda_has_wgmma(properties))
        *out = TP_ATTENTION_WGMMA;
    return TP_OK;
}

/* What is worth saying of our kernels, where cuDNN is not asked for. */
static const char *
told_of_own(const tp_cuda_rank *rank, int asked)
{
    if (asked == WGMMA && rank->config.dtype != TP_BF16)
        return "TERAPIPE_ATTENTION=wgmma is without effect: attention by wgmma is of dtype \"bf16\", this is float32";
    if (asked == MMA && rank->config.dtype == TP_BF16 && tp_cuda_has_wgmma(tp_cuda_device_properties(rank->cuda)))
        return "attention is computed by mma.sync, as TERAPIPE_ATTENTION asks: slower than by wgmma, and other bits";
    return "";
}

/* Workspace is what products have: so a plan's memory is the same where there is no cuDNN. After products, since cuDNN finds the
 * cublasLt that is loaded (9.28 ends the process where it finds none). */
static tp_status
open_attention(tp_cuda_rank *rank)
{
    int asked;
    TP_TRY(tp_cuda_attention_choose(tp_cuda_device_properties(rank->cuda), rank->config.dtype, &rank->attention));
    rank->keeps = rank->attention == TP_ATTENTION_WGMMA;
    TP_TRY(attention_asked(&asked));
    rank->asked = told_of_own(rank, asked);
    if (asked != CUDNN)
        return TP_OK;
    if (rank->config.reproducible)
        rank->asked = "TERAPIPE_ATTENTION=cudnn is without effect: the bits of cuDNN's attention depend on the slices, and "
                      "reproducible=True keeps the package's own";
    else if (rank->config.dtype != TP_BF16)
        rank->asked = "TERAPIPE_ATTENTION=cudnn is without effect: cuDNN's attention is of dtype \"bf16\", this is float32";
    if (*rank->asked != 0)
        return TP_OK;
    return tp_cudnn_open(rank->cuda, rank->stream, rank->workspace, TP_CUDA_GEMM_BYTES, &rank->cudnn);
}

static tp_status
device_reserve(tp_device *device, size_t bytes)
{
    tp_cuda_rank *rank = tp_cuda_rank_of(device);
    tp_gemm_options options = {.candidates = rank->config.candidates, .reproducible = rank->config.reproducible};
    if (tp_gemm_workspace_bytes(rank->cuda) > TP_CUDA_GEMM_BYTES)
        return tp_fail(TP_EINTERNAL, "products want %zu bytes of workspace: at most %zu were foreseen",
                       tp_gemm_workspace_bytes(rank->cuda), TP_CUDA_GEMM_BYTES);
    TP_TRY(tp_heap_alloc(rank->base.heap, bytes, "workspace of the kernels", &rank->workspace));
    rank->partial = (char *)rank->workspace + TP_CUDA_GEMM_BYTES;
    TP_TRY(tp_gemm_open(rank->cuda, rank->stream, &options, rank->workspace, &rank->gemm));
    return open_attention(rank);
}

/* ---- a step ------------------------------------------------------------------------------------------------------ */

static tp_status
device_begin(tp_device *device)
{
    tp_cuda_rank *rank = tp_cuda_rank_of(device);
    TP_TRY(tp_cuda_bind(rank->cuda));
    rank->marks.count = 0;
    if (rank->aside != NULL) /* a step that failed half way may have left copies there */
        TP_TRY(tp_cuda_synchronize(rank->cuda, rank->aside));
    for (int64_t i = 0; i < rank->stretches; i++)
        rank->stretch[i].seen &= ~2;
    TP_TRY(tp_cuda_event_mark(rank->cuda, rank->origin, rank->stream));
    TP_TRY(tp_cuda_event_synchronize(rank->cuda, rank->origin));
    rank->origin_ns = tp_clock_ns();
    return TP_OK;
}

static tp_status
device_copy(tp_device *device, void *to, const void *from, size_t bytes)
{
    tp_cuda_rank *rank = tp_cuda_rank_of(device);
    return tp_cuda_copy(rank->cuda, rank->stream, to, from, bytes, TP_CUDA_ON_DEVICE);
}

static tp_status
device_add(tp_device *device, float *to, const float *from, int64_t floats)
{
    return tp_cuda_add(tp_cuda_rank_of(device)->stream, TP_F32, floats, from, to);
}

static tp_status
device_settle(tp_device *device)
{
    tp_cuda_rank *rank = tp_cuda_rank_of(device);
    return tp_cuda_synchronize(rank->cuda, rank->stream);
}

static tp_status
move(tp_device *device, void *to, const void *from, size_t bytes, tp_cuda_direction direction)
{
    tp_cuda_rank *rank = tp_cuda_rank_of(device);
    TP_TRY(tp_cuda_copy(rank->cuda, rank->stream, to, from, bytes, direction));
    return tp_cuda_synchronize(rank->cuda, rank->stream);
}

static tp_status
device_read(tp_device *device, void *host, const void *from, size_t bytes)
{
    return move(device, host, from, bytes, TP_CUDA_TO_HOST);
}

static tp_status
device_write(tp_device *device, void *to, const void *host, size_t bytes)
{
    return move(device, to, host, bytes, TP_CUDA_TO_DEVICE);
}

/* ---- stretches: graphs ------------------------------------------------------------------------------------------- */

/* The stretch of this position, a new one if need be. They come in order in the first step, so the search is a bisection. */
static tp_status
find_stretch(tp_cuda_rank *rank, int64_t position, tp_cuda_stretch **out)
{
    int64_t low = 0, high = rank->stretches;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (rank->stretch[middle].position < position)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == rank->stretches || rank->stretch[low].position != position) {
        if (rank->stretches == rank->room) {
            int64_t room = rank->room == 0 ? 32 : 2 * rank->room;
            tp_cuda_stretch *more = realloc(rank->stretch, (size_t)room * sizeof *more);
            if (more == NULL)
                return tp_fail(TP_EMEMORY, "no memory for the graphs of a step");
            rank->stretch = more;
            rank->room = room;
        }
        memmove(&rank->stretch[low + 1], &rank->stretch[low], (size_t)(rank->stretches - low) * sizeof *rank->stretch);
        rank->stretch[low] = (tp_cuda_stretch){.position = position};
        rank->stretches++;
    }
    *out = &rank->stretch[low];
    return TP_OK;
}

/* Not every stretch can be captured everywhere: from now on this one runs without a graph. */
static void
give_up(tp_cuda_rank *rank, tp_cuda_stretch *stretch)
{
    stretch->gave_up = 1;
    if (*rank->caveat == 0)
        snprintf(rank->caveat, sizeof rank->caveat, "steps are enqueued anew, not launched as graphs (%s)", tp_error_message());
    tp_cuda_graph_destroy(rank->cuda, stretch->graph);
    stretch->graph = NULL;
    stretch->ready = 0;
}

/* seen: 1 the stretch has run, 2 its graph runs in this step (its marks are to be read). */
static tp_status
device_stretch_begin(tp_device *device, int64_t position, int *replayed)
{
    tp_cuda_rank *rank = tp_cuda_rank_of(device);
    tp_cuda_stretch *stretch = NULL;
    *replayed = 0;
    if (rank->config.eager)
        return TP_OK;
    TP_TRY(find_stretch(rank, position, &stretch));
    int eager = !(stretch->seen & 1) || stretch->gave_up || (stretch->graph != NULL && !stretch->ready);
    stretch->seen |= 1;
    if (eager)
        return TP_OK;
    tp_status status = stretch->ready ? tp_cuda_graph_launch(rank->cuda, stretch->graph, rank->stream)
                                      : tp_cuda_capture_begin(rank->cuda, rank->stream);
    if (status != TP_OK) {
        give_up(rank, stretch);
        return TP_OK;
    }
    if (stretch->ready) {
        stretch->seen |= 2;
        rank->replayed++;
        *replayed = 1;
        return TP_OK;
    }
    stretch->marks.count = 0;
    rank->capturing = stretch;
    return TP_OK;
}

/* End the capture, whatever its calls returned; nothing of it has run yet. */
static tp_status
device_stretch_end(tp_device *device, int64_t position, tp_status done, int *again)
{
    tp_cuda_rank *rank = tp_cuda_rank_of(device);
    tp_cuda_stretch *stretch = rank->capturing;
    (void)position;
    *again = 0;
    if (stretch == NULL)
        return done;
    rank->capturing = NULL;
    if (done != TP_OK)
        give_up(rank, stretch); /* its reason, not that of the end which follows from it */
    tp_status ended = tp_cuda_capture_end(rank->cuda, rank->stream, &stretch->graph);
    if (done != TP_OK || ended != TP_OK)
        give_up(rank, stretch);
    *again = done != TP_EABORTED;
    return *again ? TP_OK : done;
}

static tp_status
device_collect(tp_device *device)
{
    tp_cuda_rank *rank = tp_cuda_rank_of(device);
    TP_TRY(tp_cuda_synchronize(rank->cuda, rank->stream));
    TP_TRY(read_marks(rank, &rank->marks));
    for (int64_t i = 0; i < rank->stretches; i++)
        if (rank->stretch[i].seen & 2)
            TP_TRY(read_marks(rank, &rank->stretch[i].marks));
    for (int64_t i = 0; i < rank->stretches; i++) {
        tp_cuda_stretch *stretch = &rank->stretch[i];
        if (stretch->graph == NULL || stretch->ready)
            continue;
        stretch->ready = tp_cuda_graph_ready(rank->cuda, stretch->graph, rank->stream) == TP_OK;
        if (!stretch->ready)
            give_up(rank, stretch);
    }
    return TP_OK;
}

static const char *
device_caveat(const tp_device *device)
{
    tp_cuda_rank *rank = tp_cuda_rank_of((tp_device *)(uintptr_t)device);
    const char *const part[] = {rank->caveat, rank->gemm != NULL ? tp_gemm_caveat(rank->gemm) : "", rank->asked,
                                rank->cudnn != NULL ? tp_cudnn_caveat(rank->cudnn) : "", rank->unkept};
    size_t used = 0;
    rank->told[0] = 0;
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        if (*part[i] != 0 && used < sizeof rank->told)
            used += (size_t)snprintf(rank->told + used, sizeof rank->told - used, "%s%s", used > 0 ? "; " : "", part[i]);
    return rank->told;
}

const tp_device_ops tp_cuda_device_ops = {
    .open = device_open,
    .close = device_close,
    .workspace_bytes = tp_cuda_workspace_bytes,
    .reserve = device_reserve,
    .begin = device_begin,
    .copy = device_copy,
    .add = device_add,
    .message_floats = TP_CUDA_SUM_FLOATS,
    .waiting_floats = 8 * TP_CUDA_SUM_FLOATS,
    .settle = device_settle,
    .read = device_read,
    .write = device_write,
    .mark = device_mark,
    .aside_begin = device_aside_begin,
    .aside_end = device_aside_end,
    .aside_wait = device_aside_wait,
    .collect = device_collect,
    .stretch_begin = device_stretch_begin,
    .stretch_end = device_stretch_end,
    .caveat = device_caveat,
};
