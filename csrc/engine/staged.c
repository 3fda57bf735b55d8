/* Messages of a device's memory over a communicator of the host's: each is read out before it is sent, and written in when
 * it has come. It waits for the device at every message, which a communicator of the device's own does not; it needs
 * nothing but a network. */
#include "csrc/engine/internal.h"

#include <stdlib.h>

typedef struct {
    void *to, *host;
    size_t bytes, room;
} landing;

typedef struct {
    tp_comm base;
    tp_comm *inner;
    tp_device *device;
    landing *posted;       /* [ranks][TP_COMM_POSTED]: receives in order, in a ring */
    uint32_t *first, *last; /* [ranks] oldest posted, next to post */
    landing out, in;       /* of a send, and of an exchange */
} staged_comm;

/* Grown in the first step, there from then on. */
static tp_status
make_room(landing *at, size_t bytes)
{
    if (at->room >= bytes)
        return TP_OK;
    void *host = realloc(at->host, bytes);
    if (host == NULL)
        return tp_fail(TP_EMEMORY, "no host memory for a message of %zu bytes", bytes);
    at->host = host;
    at->room = bytes;
    return TP_OK;
}

static tp_status
read_out(staged_comm *self, const void *data, size_t bytes)
{
    if (bytes == 0)
        return TP_OK;
    TP_TRY(make_room(&self->out, bytes));
    return self->device->ops->read(self->device, self->out.host, data, bytes);
}

static tp_status
staged_send(tp_comm *comm, int peer, uint64_t tag, const void *data, size_t bytes)
{
    staged_comm *self = (staged_comm *)comm;
    TP_TRY(read_out(self, data, bytes));
    return self->inner->ops->send(self->inner, peer, tag, self->out.host, bytes);
}

static tp_status
staged_recv_post(tp_comm *comm, int peer, uint64_t tag, void *data, size_t bytes)
{
    staged_comm *self = (staged_comm *)comm;
    landing *at = &self->posted[peer * TP_COMM_POSTED + (int)(self->last[peer] % TP_COMM_POSTED)];
    if (self->last[peer] - self->first[peer] == TP_COMM_POSTED)
        return tp_fail(TP_EINTERNAL, "more than %d receives from rank %d are posted", TP_COMM_POSTED, peer);
    TP_TRY(make_room(at, bytes));
    TP_TRY(self->inner->ops->recv_post(self->inner, peer, tag, at->host, bytes));
    at->to = data;
    at->bytes = bytes;
    self->last[peer]++;
    return TP_OK;
}

static tp_status
staged_recv_wait(tp_comm *comm, int peer)
{
    staged_comm *self = (staged_comm *)comm;
    const landing *at = &self->posted[peer * TP_COMM_POSTED + (int)(self->first[peer] % TP_COMM_POSTED)];
    TP_TRY(self->inner->ops->recv_wait(self->inner, peer));
    self->first[peer]++;
    return self->device->ops->write(self->device, at->to, at->host, at->bytes);
}

static tp_status
staged_exchange(tp_comm *comm, int peer, uint64_t tag, const void *out, size_t out_bytes, void *in, size_t in_bytes)
{
    staged_comm *self = (staged_comm *)comm;
    TP_TRY(read_out(self, out, out_bytes));
    TP_TRY(make_room(&self->in, in_bytes));
    TP_TRY(self->inner->ops->exchange(self->inner, peer, tag, self->out.host, out_bytes, self->in.host, in_bytes));
    return in_bytes == 0 ? TP_OK : self->device->ops->write(self->device, in, self->in.host, in_bytes);
}

static tp_status
staged_allgather(tp_comm *comm, const void *mine, size_t bytes, void *all)
{
    staged_comm *self = (staged_comm *)comm;
    return self->inner->ops->allgather(self->inner, mine, bytes, all);
}

static void
staged_withdraw(tp_comm *comm)
{
    tp_comm *inner = ((staged_comm *)comm)->inner;
    if (inner->ops->withdraw != NULL)
        inner->ops->withdraw(inner);
}

static void
staged_close(tp_comm *comm)
{
    staged_comm *self = (staged_comm *)comm;
    for (int i = 0; self->posted != NULL && i < self->base.ranks * TP_COMM_POSTED; i++)
        free(self->posted[i].host);
    free(self->posted);
    free(self->first);
    free(self->out.host);
    free(self->in.host);
    free(self);
}

tp_status
tp_engine_stage_comm(tp_comm *inner, tp_device *device, tp_comm **out)
{
    static const tp_comm_ops ops = {.abi = TP_COMM_ABI,
                                    .name = "staged",
                                    .most_posted = TP_COMM_POSTED,
                                    .send = staged_send,
                                    .recv_post = staged_recv_post,
                                    .recv_wait = staged_recv_wait,
                                    .exchange = staged_exchange,
                                    .allgather = staged_allgather,
                                    .close = staged_close,
                                    .withdraw = staged_withdraw};
    staged_comm *self = calloc(1, sizeof *self);
    if (self == NULL)
        return tp_fail(TP_EMEMORY, "no memory for a communicator");
    self->base = *inner;
    self->base.ops = &ops;
    self->inner = inner;
    self->device = device;
    size_t ranks = (size_t)inner->ranks;
    self->posted = calloc(ranks * TP_COMM_POSTED, sizeof *self->posted);
    self->first = calloc(2 * ranks, sizeof *self->first);
    if (self->posted == NULL || self->first == NULL) {
        staged_close(&self->base);
        return tp_fail(TP_EMEMORY, "no memory for a communicator");
    }
    self->last = self->first + ranks;
    *out = &self->base;
    return TP_OK;
}
