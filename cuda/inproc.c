#include "cuda/inproc.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "csrc/base/clock.h"
#include "csrc/comm/region.h"
#include "cuda/comm.h"

#define POLL_NS 5000 /* a moment of a stage is hundreds of microseconds */
#define SPIN_NS 2000 /* between two looks that do not sleep: a look at the device takes the driver's lock from who launches */

/* The message slots that a sender keeps for one receiver. */
typedef struct {
    void *slot[TP_INPROC_SLOTS];
    tp_cuda_event filled[TP_INPROC_SLOTS]; /* recorded by the sender, so its device's */
    tp_cuda_event freed[TP_INPROC_SLOTS];  /* recorded by the receiver, which makes them when first used */
    int64_t sent;
    _Atomic int64_t taken; /* the receiver has recorded freed[] of so many */
} outbox;

typedef struct {
    tp_cuda_comm base; /* first */
    outbox **to;       /* [ranks], made when first used: before the first step is through */
    tp_cuda_event ready, copied;
    unsigned ways; /* of tp_inproc_way */
} inproc_comm;

/* Held for reading by ranks that give their devices copies from another rank's memory, for writing by one that failed before its own
 * is freed: a free waits for the copies that the device has, and would not for one that it is given later. */
static pthread_rwlock_t copying = PTHREAD_RWLOCK_INITIALIZER;

static void
close_box(inproc_comm *c, outbox *box)
{
    if (box == NULL)
        return;
    for (int i = 0; i < TP_INPROC_SLOTS; i++) {
        tp_cuda_free(c->base.device, box->slot[i]);
        if (box->filled[i] != NULL)
            tp_cuda_event_destroy(c->base.device, box->filled[i]);
        if (box->freed[i] != NULL)
            tp_cuda_event_destroy(c->base.device, box->freed[i]);
    }
    free(box);
}

/* Give back everything on the device. A run that ends without error has ended with an all-gather, which comes after every copy.
 * After an abort nobody knows which peer still reads a slot or waits for an event, those of an exchange too: they end with the
 * process. */
static void
release(tp_cuda_comm *base)
{
    inproc_comm *c = (inproc_comm *)base;
    int ended = !tp_region_is_aborted(c->base.region);
    if (!ended) { /* whoever copies from this rank's memory has enqueued that, or does not any more */
        pthread_rwlock_wrlock(&copying);
        pthread_rwlock_unlock(&copying);
    }
    for (int rank = 0; rank < c->base.comm.ranks; rank++) {
        if (ended)
            close_box(c, c->to[rank]);
        c->to[rank] = NULL;
    }
    if (ended && c->ready != NULL)
        tp_cuda_event_destroy(c->base.device, c->ready);
    if (ended && c->copied != NULL)
        tp_cuda_event_destroy(c->base.device, c->copied);
    c->ready = c->copied = NULL;
}

static tp_status
inproc_bind(tp_comm *comm, void *device)
{
    inproc_comm *c = (inproc_comm *)comm;
    TP_TRY(tp_cuda_comm_bind(&c->base, device, release));
    if (device == NULL)
        return TP_OK;
    TP_TRY(tp_cuda_event_create(c->base.device, 0, &c->ready));
    return tp_cuda_event_create(c->base.device, 0, &c->copied);
}

static tp_status
open_box(inproc_comm *c, int peer, outbox **out)
{
    outbox *box = c->to[peer];
    if (box == NULL) {
        tp_status status = TP_OK;
        box = calloc(1, sizeof *box);
        if (box == NULL)
            return tp_fail(TP_EMEMORY, "no memory for messages to rank %d", peer);
        for (int i = 0; i < TP_INPROC_SLOTS && status == TP_OK; i++) {
            status = tp_cuda_alloc(c->base.device, c->base.message_bytes, "a buffer for messages", &box->slot[i]);
            if (status == TP_OK)
                status = tp_cuda_event_create(c->base.device, 0, &box->filled[i]);
        }
        if (status != TP_OK) { /* the next step tries again */
            close_box(c, box);
            return status;
        }
        c->to[peer] = box;
    }
    *out = box;
    return TP_OK;
}

/* What the host waits for, by looking at it. */
typedef struct {
    int64_t since; /* 0: not looked yet */
    int peer, inward;
    uint64_t tag;
    size_t bytes;
} waiting;

/* After a look that found it not there. */
static tp_status
look_again(inproc_comm *c, waiting *w)
{
    int64_t now = tp_clock_ns();
    w->since = w->since > 0 ? w->since : now;
    TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
    if (c->base.comm.timeout_ns > 0 && now - w->since > c->base.comm.timeout_ns)
        return tp_comm_too_late(&c->base.comm, c->base.region, w->peer, w->inward, w->tag, 0, w->bytes);
    tp_region_await(c->base.region, c->base.comm.rank, w->peer);
    if (!(c->ways & TP_INPROC_SPINS))
        tp_clock_sleep_until(now + POLL_NS);
    else
        while (tp_clock_ns() < now + SPIN_NS)
            sched_yield();
    tp_region_await_no_more(c->base.region, c->base.comm.rank);
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
await_device(inproc_comm *c, tp_cuda_event filled, int peer, const tp_cuda_receive *r)
{
    waiting w = {.peer = peer, .inward = 1, .tag = r->tag, .bytes = r->bytes};
    int arrived = (c->ways & TP_INPROC_QUEUES) != 0, settled = !(c->ways & TP_INPROC_SETTLES);
    for (;;) {
        if (!settled)
            TP_TRY(tp_cuda_query(c->base.device, c->base.compute, &settled));
        if (!arrived)
            TP_TRY(tp_cuda_event_query(c->base.device, filled, &arrived));
        if (settled && arrived)
            return TP_OK;
        TP_TRY(look_again(c, &w));
    }
}

/* Copy the message of a posted receive, whose word is here, out of its slot. */
static tp_status
take_out(inproc_comm *c, int peer, const tp_cuda_receive *r)
{
    TP_TRY(check_same(&c->base.comm, peer, r->said.bytes, r->bytes));
    outbox *box = r->said.of;
    int i = (int)(r->said.number % TP_INPROC_SLOTS);
    TP_TRY(await_device(c, box->filled[i], peer, r));
    TP_TRY(tp_cuda_event_wait(c->base.device, box->filled[i], c->base.compute));
    TP_TRY(tp_cuda_copy(c->base.device, c->base.compute, r->data, box->slot[i], r->bytes, TP_CUDA_ON_DEVICE));
    if (box->freed[i] == NULL)
        TP_TRY(tp_cuda_event_create(c->base.device, 0, &box->freed[i]));
    TP_TRY(tp_cuda_event_record(c->base.device, box->freed[i], c->base.compute));
    atomic_store(&box->taken, r->said.number + 1);
    return TP_OK;
}

/* Take out what is here of what was posted, though nobody reads it yet: its memory is free since it was posted. A rank that waits
 * must, since a peer may wait for one of the slots that hold its messages to this rank: what passes all micro-batches through a
 * stage sends more of them ahead of their readers than there are slots. */
static tp_status
take_out_early(inproc_comm *c)
{
    tp_comm *control = c->base.control;
    if (control->ops->progress != NULL)
        TP_TRY(control->ops->progress(control));
    for (int peer = 0; peer < c->base.comm.ranks; peer++) {
        tp_cuda_receives *queue = &c->base.from[peer];
        for (unsigned k = 0; k < queue->count; k++) {
            tp_cuda_receive *r = &queue->items[(queue->first + k) % TP_COMM_POSTED];
            if (!r->is_out && r->said.of == NULL)
                break;
            if (r->is_out)
                continue;
            TP_TRY(control->ops->recv_wait(control, peer));
            TP_TRY(take_out(c, peer, r));
            r->is_out = 1;
        }
    }
    return TP_OK;
}

/* Until the receiver has recorded that it has read what the slot held. */
static tp_status
await_slot(inproc_comm *c, outbox *box, int peer, uint64_t tag)
{
    waiting w = {.peer = peer, .tag = tag, .bytes = c->base.message_bytes};
    while (box->sent - atomic_load(&box->taken) >= TP_INPROC_SLOTS) {
        TP_TRY(take_out_early(c));
        TP_TRY(look_again(c, &w));
    }
    return TP_OK;
}

static tp_status
inproc_send(tp_comm *comm, int peer, uint64_t tag, const void *data, size_t bytes)
{
    inproc_comm *c = (inproc_comm *)comm;
    outbox *box = NULL;
    TP_TRY(tp_cuda_comm_ready(&c->base, peer));
    TP_TRY(tp_comm_check_bytes(bytes, c->base.message_bytes));
    TP_TRY(open_box(c, peer, &box));
    TP_TRY(await_slot(c, box, peer, tag));
    int i = (int)(box->sent % TP_INPROC_SLOTS);
    if (box->sent >= TP_INPROC_SLOTS)
        TP_TRY(tp_cuda_event_wait(c->base.device, box->freed[i], c->base.compute));
    TP_TRY(tp_cuda_copy(c->base.device, c->base.compute, box->slot[i], data, bytes, TP_CUDA_ON_DEVICE));
    TP_TRY(tp_cuda_event_record(c->base.device, box->filled[i], c->base.compute));
    tp_cuda_note said = {box, box->sent++, bytes};
    return c->base.control->ops->send(c->base.control, peer, tag, &said, sizeof said);
}

static tp_status
inproc_recv_post(tp_comm *comm, int peer, uint64_t tag, void *data, size_t bytes)
{
    inproc_comm *c = (inproc_comm *)comm;
    TP_TRY(tp_cuda_comm_ready(&c->base, peer));
    tp_cuda_receive *r;
    TP_TRY(tp_cuda_comm_post(&c->base, peer, data, bytes, &r));
    r->tag = tag;
    return c->base.control->ops->recv_post(c->base.control, peer, tag, &r->said, sizeof r->said);
}

/* The oldest posted receive's word of the sender, without sleep. */
static tp_status
spin_for_word(inproc_comm *c, int peer)
{
    tp_comm *control = c->base.control;
    const tp_cuda_receives *queue = &c->base.from[peer];
    const tp_cuda_receive *r = &queue->items[queue->first];
    waiting w = {.peer = peer, .inward = 1, .tag = r->tag, .bytes = r->bytes};
    while (control->ops->progress != NULL && queue->count > 0 && r->said.of == NULL) {
        TP_TRY(control->ops->progress(control));
        if (r->said.of == NULL)
            TP_TRY(look_again(c, &w));
    }
    return TP_OK;
}

/* Has more been posted from another peer than it has slots? It may wait for one, and this rank's peer for what it does then. */
static int
may_hold_up_others(const inproc_comm *c, int peer)
{
    for (int other = 0; other < c->base.comm.ranks && c->base.control->ops->progress != NULL; other++) {
        const tp_cuda_receives *queue = &c->base.from[other];
        unsigned posted = 0;
        for (unsigned k = 0; other != peer && k < queue->count; k++)
            posted += !queue->items[(queue->first + k) % TP_COMM_POSTED].is_out;
        if (posted > TP_INPROC_SLOTS)
            return 1;
    }
    return 0;
}

/* Until the oldest posted receive has been taken out. */
static tp_status
await_and_take_out(inproc_comm *c, int peer)
{
    const tp_cuda_receives *queue = &c->base.from[peer];
    const tp_cuda_receive *r = &queue->items[queue->first];
    waiting w = {.peer = peer, .inward = 1, .tag = r->tag, .bytes = r->bytes};
    for (;;) {
        TP_TRY(take_out_early(c));
        if (r->is_out)
            return TP_OK;
        TP_TRY(look_again(c, &w));
    }
}

static tp_status
inproc_recv_wait(tp_comm *comm, int peer)
{
    inproc_comm *c = (inproc_comm *)comm;
    tp_cuda_receive *r;
    const tp_cuda_receives *queue = peer >= 0 && peer < comm->ranks ? &c->base.from[peer] : NULL;
    if (queue != NULL && queue->count > 0) {
        const tp_cuda_receive *oldest = &queue->items[queue->first];
        if (!oldest->is_out && may_hold_up_others(c, peer))
            TP_TRY(await_and_take_out(c, peer));
        if (oldest->is_out)
            return tp_cuda_comm_take(&c->base, peer, &r);
    }
    if (c->ways & TP_INPROC_SPINS && peer >= 0 && peer < comm->ranks)
        TP_TRY(spin_for_word(c, peer));
    TP_TRY(c->base.control->ops->recv_wait(c->base.control, peer));
    TP_TRY(tp_cuda_comm_take(&c->base, peer, &r));
    return take_out(c, peer, r);
}

/* Unless the run is aborted: then what is there may have been freed. */
static tp_status
copy_theirs(inproc_comm *c, tp_cuda_event ready, void *in, const void *theirs, size_t bytes)
{
    pthread_rwlock_rdlock(&copying);
    tp_status status = tp_comm_check_abort(&c->base.comm, c->base.region);
    if (status == TP_OK)
        status = tp_cuda_event_wait(c->base.device, ready, c->base.compute);
    if (status == TP_OK && bytes > 0)
        status = tp_cuda_copy(c->base.device, c->base.compute, in, theirs, bytes, TP_CUDA_ON_DEVICE);
    pthread_rwlock_unlock(&copying);
    return status;
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
    TP_TRY(tp_cuda_comm_ready(&c->base, peer));
    mine.event = c->ready;
    TP_TRY(tp_cuda_event_record(c->base.device, c->ready, c->base.compute));
    TP_TRY(c->base.control->ops->exchange(c->base.control, peer, tag, &mine, sizeof mine, &theirs, sizeof theirs));
    TP_TRY(check_same(comm, peer, theirs.bytes, in_bytes));
    TP_TRY(copy_theirs(c, theirs.event, in, theirs.data, in_bytes));
    TP_TRY(tp_cuda_event_record(c->base.device, c->copied, c->base.compute));
    mine.event = c->copied;
    TP_TRY(c->base.control->ops->exchange(c->base.control, peer, tag, &mine, sizeof mine, &theirs, sizeof theirs));
    return tp_cuda_event_wait(c->base.device, theirs.event, c->base.compute);
}

static void
inproc_close(tp_comm *comm)
{
    inproc_comm *c = (inproc_comm *)comm;
    if (c->base.device != NULL)
        release(&c->base);
    free(c->to);
    tp_cuda_comm_close(&c->base);
}

static const tp_comm_ops inproc_ops = {.abi = TP_COMM_ABI,
                                       .name = "inproc",
                                       .most_posted = TP_COMM_POSTED,
                                       .send = inproc_send,
                                       .recv_post = inproc_recv_post,
                                       .recv_wait = inproc_recv_wait,
                                       .exchange = inproc_exchange,
                                       .allgather = tp_cuda_comm_allgather,
                                       .close = inproc_close,
                                       .bind = inproc_bind};

tp_status
tp_comm_open_inproc(tp_comm *control, tp_region *region, size_t message_bytes, tp_comm **out)
{
    tp_cuda_comm *base;
    TP_TRY(tp_cuda_comm_open(sizeof(inproc_comm), &inproc_ops, control, region, message_bytes, &base));
    inproc_comm *c = (inproc_comm *)base;
    c->to = calloc((size_t)control->ranks, sizeof(outbox *));
    if (c->to == NULL) {
        tp_cuda_comm_close(base);
        return tp_fail(TP_EMEMORY, "no memory for a communicator of %d ranks", control->ranks);
    }
    *out = &base->comm;
    return TP_OK;
}

tp_status
tp_inproc_ways(tp_comm *comm, unsigned ways)
{
    if (comm->ops != &inproc_ops)
        return tp_fail(TP_EVALUE, "a communicator by %s waits in one way: one of stages of a process would be right", comm->ops->name);
    const unsigned all = TP_INPROC_SPINS | TP_INPROC_QUEUES | TP_INPROC_SETTLES;
    if (ways > all)
        return tp_fail(TP_EVALUE, "ways is %u: 0 to %u would be right", ways, all);
    ((inproc_comm *)comm)->ways = ways;
    return TP_OK;
}
