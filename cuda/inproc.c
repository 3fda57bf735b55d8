#include "cuda/inproc.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "csrc/base/clock.h"
#include "csrc/comm/region.h"
#include "cuda/rank.h"

#define POLL_NS 5000 /* a moment of a stage is hundreds of microseconds */

/* What a sender keeps for one receiver. */
typedef struct {
    void *slot[TP_INPROC_SLOTS];
    tp_cuda_event filled[TP_INPROC_SLOTS]; /* recorded by the sender, so its device's */
    tp_cuda_event freed[TP_INPROC_SLOTS];  /* recorded by the receiver, which makes them when first used */
    int64_t sent;
    _Atomic int64_t taken; /* the receiver has recorded freed[] of so many */
} outbox;

/* What goes through control. */
typedef struct {
    outbox *box;
    int64_t number;
    size_t bytes;
} note;

typedef struct {
    void *data;
    size_t bytes;
    note said;
} receive;

typedef struct {
    receive items[TP_COMM_POSTED];
    unsigned first, count;
} receive_queue;

typedef struct {
    tp_comm base; /* first */
    tp_comm *control;
    tp_region *region;
    tp_cuda_device *device;
    tp_stream compute;
    size_t message_bytes;
    outbox **to;         /* [ranks], made when first used: before the first step is through */
    receive_queue *from; /* [ranks] */
    tp_cuda_event ready, copied;
} inproc_comm;

static void
close_box(inproc_comm *c, outbox *box)
{
    int rank;
    char text[512];
    if (box == NULL || tp_region_aborted(c->region, &rank, text) != TP_OK)
        return; /* after an abort nobody knows who still reads it: it ends with the process */
    for (int i = 0; i < TP_INPROC_SLOTS; i++) {
        tp_cuda_free(c->device, box->slot[i]);
        if (box->filled[i] != NULL)
            tp_cuda_event_destroy(c->device, box->filled[i]);
        if (box->freed[i] != NULL)
            tp_cuda_event_destroy(c->device, box->freed[i]);
    }
    free(box);
}

/* All that is the device's. Whoever ends a run in peace has had the last all-gather, which came after every copy. */
static void
release(inproc_comm *c)
{
    for (int rank = 0; rank < c->base.ranks; rank++) {
        close_box(c, c->to[rank]);
        c->to[rank] = NULL;
    }
    if (c->ready != NULL)
        tp_cuda_event_destroy(c->device, c->ready);
    if (c->copied != NULL)
        tp_cuda_event_destroy(c->device, c->copied);
    c->ready = c->copied = NULL;
    c->device = NULL;
}

static tp_status
inproc_bind(tp_comm *comm, void *device)
{
    inproc_comm *c = (inproc_comm *)comm;
    tp_cuda_rank *rank = tp_cuda_rank_of(device);
    if (device == NULL) {
        if (c->device != NULL)
            release(c);
        return TP_OK;
    }
    if (c->device != NULL)
        return tp_fail(TP_EVALUE, "this communicator has a device already");
    c->device = rank->cuda;
    c->compute = rank->stream;
    TP_TRY(tp_cuda_event_create(c->device, 0, &c->ready));
    return tp_cuda_event_create(c->device, 0, &c->copied);
}

static tp_status
begin(const inproc_comm *c, int peer)
{
    TP_TRY(tp_comm_check_peer(&c->base, peer));
    if (c->device == NULL)
        return tp_fail(TP_EVALUE, "this communicator has no device yet");
    return tp_comm_check_abort(&c->base, c->region);
}

static tp_status
open_box(inproc_comm *c, int peer, outbox **out)
{
    outbox *box = c->to[peer];
    if (box == NULL) {
        box = c->to[peer] = calloc(1, sizeof *box);
        if (box == NULL)
            return tp_fail(TP_EMEMORY, "no memory for messages to rank %d", peer);
        for (int i = 0; i < TP_INPROC_SLOTS; i++) {
            TP_TRY(tp_cuda_alloc(c->device, c->message_bytes, "a buffer for messages", &box->slot[i]));
            TP_TRY(tp_cuda_event_create(c->device, 0, &box->filled[i]));
        }
    }
    *out = box;
    return TP_OK;
}

/* Until the receiver has recorded that it has read what the slot held. */
static tp_status
await_slot(inproc_comm *c, outbox *box, int peer, uint64_t tag)
{
    int64_t since = tp_clock_ns();
    while (box->sent - atomic_load(&box->taken) >= TP_INPROC_SLOTS) {
        TP_TRY(tp_comm_check_abort(&c->base, c->region));
        if (c->base.timeout_ns > 0 && tp_clock_ns() - since > c->base.timeout_ns)
            return tp_comm_too_late(&c->base, c->region, peer, 0, tag, 0, c->message_bytes);
        tp_clock_sleep_until(tp_clock_ns() + POLL_NS);
    }
    return TP_OK;
}

static tp_status
inproc_send(tp_comm *comm, int peer, uint64_t tag, const void *data, size_t bytes)
{
    inproc_comm *c = (inproc_comm *)comm;
    outbox *box = NULL;
    TP_TRY(begin(c, peer));
    TP_TRY(tp_comm_check_bytes(bytes, c->message_bytes));
    TP_TRY(open_box(c, peer, &box));
    TP_TRY(await_slot(c, box, peer, tag));
    int i = (int)(box->sent % TP_INPROC_SLOTS);
    if (box->sent >= TP_INPROC_SLOTS)
        TP_TRY(tp_cuda_event_wait(c->device, box->freed[i], c->compute));
    TP_TRY(tp_cuda_copy(c->device, c->compute, box->slot[i], data, bytes, TP_CUDA_ON_DEVICE));
    TP_TRY(tp_cuda_event_record(c->device, box->filled[i], c->compute));
    note said = {box, box->sent++, bytes};
    return c->control->ops->send(c->control, peer, tag, &said, sizeof said);
}

static tp_status
inproc_recv_post(tp_comm *comm, int peer, uint64_t tag, void *data, size_t bytes)
{
    inproc_comm *c = (inproc_comm *)comm;
    TP_TRY(begin(c, peer));
    receive_queue *queue = &c->from[peer];
    TP_TRY(tp_comm_check_room(comm, peer, queue->count));
    receive *r = &queue->items[(queue->first + queue->count) % TP_COMM_POSTED];
    *r = (receive){.data = data, .bytes = bytes};
    TP_TRY(c->control->ops->recv_post(c->control, peer, tag, &r->said, sizeof r->said));
    queue->count++;
    return TP_OK;
}

static tp_status
check_same(const tp_comm *comm, int peer, size_t sent, size_t expected)
{
    return sent == expected ? TP_OK
                            : tp_fail(TP_ECONNECTION, "rank %d sent %zu bytes where rank %d expected %zu", peer, sent,
                                      comm->rank, expected);
}

static tp_status
inproc_recv_wait(tp_comm *comm, int peer)
{
    inproc_comm *c = (inproc_comm *)comm;
    TP_TRY(c->control->ops->recv_wait(c->control, peer));
    receive_queue *queue = &c->from[peer];
    receive *r = &queue->items[queue->first];
    queue->first = (queue->first + 1) % TP_COMM_POSTED;
    queue->count--;
    TP_TRY(check_same(comm, peer, r->said.bytes, r->bytes));
    outbox *box = r->said.box;
    int i = (int)(r->said.number % TP_INPROC_SLOTS);
    TP_TRY(tp_cuda_event_wait(c->device, box->filled[i], c->compute));
    TP_TRY(tp_cuda_copy(c->device, c->compute, r->data, box->slot[i], r->bytes, TP_CUDA_ON_DEVICE));
    if (box->freed[i] == NULL)
        TP_TRY(tp_cuda_event_create(c->device, 0, &box->freed[i]));
    TP_TRY(tp_cuda_event_record(c->device, box->freed[i], c->compute));
    atomic_store(&box->taken, r->said.number + 1);
    return TP_OK;
}

/* Each copies from the other's memory, and goes on when the other has copied from its own. */
static tp_status
inproc_exchange(tp_comm *comm, int peer, uint64_t tag, const void *out, size_t out_bytes, void *in, size_t in_bytes)
{
    typedef struct {
        const void *data;
        size_t bytes;
        tp_cuda_event event;
    } place;
    inproc_comm *c = (inproc_comm *)comm;
    place mine = {out, out_bytes, NULL}, theirs;
    TP_TRY(begin(c, peer));
    mine.event = c->ready;
    TP_TRY(tp_cuda_event_record(c->device, c->ready, c->compute));
    TP_TRY(c->control->ops->exchange(c->control, peer, tag, &mine, sizeof mine, &theirs, sizeof theirs));
    TP_TRY(check_same(comm, peer, theirs.bytes, in_bytes));
    TP_TRY(tp_cuda_event_wait(c->device, theirs.event, c->compute));
    TP_TRY(tp_cuda_copy(c->device, c->compute, in, theirs.data, in_bytes, TP_CUDA_ON_DEVICE));
    TP_TRY(tp_cuda_event_record(c->device, c->copied, c->compute));
    mine.event = c->copied;
    TP_TRY(c->control->ops->exchange(c->control, peer, tag, &mine, sizeof mine, &theirs, sizeof theirs));
    return tp_cuda_event_wait(c->device, theirs.event, c->compute);
}

static tp_status
inproc_allgather(tp_comm *comm, const void *mine, size_t bytes, void *all)
{
    inproc_comm *c = (inproc_comm *)comm;
    return c->control->ops->allgather(c->control, mine, bytes, all);
}

static void
inproc_close(tp_comm *comm)
{
    inproc_comm *c = (inproc_comm *)comm;
    if (c->device != NULL)
        release(c);
    free(c->to);
    free(c->from);
    free(c);
}

static const tp_comm_ops inproc_ops = {TP_COMM_ABI,      "inproc",        inproc_send,      inproc_recv_post,
                                       inproc_recv_wait, inproc_exchange, inproc_allgather, inproc_close,
                                       inproc_bind};

tp_status
tp_comm_open_inproc(tp_comm *control, tp_region *region, size_t message_bytes, tp_comm **out)
{
    size_t ranks = (size_t)control->ranks;
    inproc_comm *c = calloc(1, sizeof *c);
    if (c != NULL) {
        c->to = calloc(ranks, sizeof(outbox *));
        c->from = calloc(ranks, sizeof *c->from);
    }
    if (c == NULL || c->to == NULL || c->from == NULL) {
        if (c != NULL) {
            free(c->to);
            free(c->from);
        }
        free(c);
        return tp_fail(TP_EMEMORY, "no memory for a communicator of %zu ranks", ranks);
    }
    c->base = (tp_comm){&inproc_ops, control->rank, control->ranks, control->timeout_ns};
    c->control = control;
    c->region = region;
    c->message_bytes = message_bytes > 0 ? message_bytes : 1;
    *out = &c->base;
    return TP_OK;
}
