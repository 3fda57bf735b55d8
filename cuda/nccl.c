#include "cuda/nccl_inside.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/comm/region.h"

/* ---- messages ---------------------------------------------------------------------------------------------------------------- */

/* The place among this rank's channels of that of the edge, in the order in which tp_nccl_meet made them; -1: there is none. */
static int
place_of(const nccl_comm *c, int edge, int up)
{
    int order = 0, mine[2] = {c->base.comm.rank, nccl_before(c, c->base.comm.rank)};
    for (int class = 0; class < NCCL_CLASSES; class++)
        for (int direction = NCCL_DOWN; direction <= NCCL_UP; direction++)
            for (int i = 0; i < 2; i++)
                if (tp_nccl_is_edge(c, mine[i]) && tp_nccl_class(c, mine[i]) == class) {
                    if (mine[i] == edge && direction == up)
                        return order;
                    order++;
                }
    return -1;
}

static tp_status
channel_of(nccl_comm *c, int peer, uint64_t tag, int sends, nccl_channel **out)
{
    int up = tag >> 48 == NCCL_RB_OP, rank = c->base.comm.rank, from = sends ? rank : peer, to = sends ? peer : rank;
    TP_TRY(tp_comm_check_peer(&c->base.comm, peer));
    TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
    int good = up ? from == nccl_next(c, to) : to == nccl_next(c, from);
    int place = good ? place_of(c, up ? to : from, up) : -1;
    if (place >= 0) {
        *out = &c->channel[place];
        return place < c->channels ? TP_OK : tp_fail(TP_EVALUE, "this communicator has no device yet");
    }
    char what[TP_TAG_TEXT];
    tp_tag_print(tag, what);
    return tp_fail(TP_EVALUE, "rank %d and rank %d do not talk this way (%s): the communicator was made without this pair", from, to,
                   what);
}

static tp_status
nccl_send(tp_comm *comm, int peer, uint64_t tag, const void *data, size_t bytes)
{
    nccl_comm *c = (nccl_comm *)comm;
    nccl_channel *ch;
    TP_TRY(channel_of(c, peer, tag, 1, &ch));
    TP_TRY(tp_comm_check_bytes(bytes, c->base.message_bytes));
    int i = (int)(ch->issued % TP_NCCL_SLOTS);
    if (ch->issued >= TP_NCCL_SLOTS)
        TP_TRY(tp_cuda_event_wait(c->base.device, ch->freed[i], c->base.compute));
    TP_TRY(tp_cuda_copy(c->base.device, c->base.compute, ch->slot[i], data, bytes, TP_CUDA_ON_DEVICE));
    TP_TRY(tp_cuda_event_record(c->base.device, ch->filled[i], c->base.compute));
    TP_TRY(tp_cuda_event_wait(c->base.device, ch->filled[i], ch->stream));
    NCCL_CALL(c, ch->comm, ch->peer, "ncclSend", c->nccl->send(ch->slot[i], bytes, NC_INT8, ch->other, ch->comm, ch->stream));
    TP_TRY(tp_cuda_event_record(c->base.device, ch->freed[i], ch->stream));
    ch->issued++;
    return TP_OK;
}

/* Give the library as many of the posted receives as there are free slots. */
static tp_status
issue(nccl_comm *c, nccl_channel *ch)
{
    while (ch->issued < ch->posted && ch->issued - ch->taken < TP_NCCL_SLOTS) {
        int i = (int)(ch->issued % TP_NCCL_SLOTS);
        size_t bytes = ch->bytes[ch->issued % TP_COMM_POSTED];
        if (ch->issued >= TP_NCCL_SLOTS)
            TP_TRY(tp_cuda_event_wait(c->base.device, ch->freed[i], ch->stream));
        NCCL_CALL(c, ch->comm, ch->peer, "ncclRecv", c->nccl->recv(ch->slot[i], bytes, NC_INT8, ch->other, ch->comm, ch->stream));
        TP_TRY(tp_cuda_event_record(c->base.device, ch->filled[i], ch->stream));
        ch->issued++;
    }
    return TP_OK;
}

static tp_status
nccl_recv_post(tp_comm *comm, int peer, uint64_t tag, void *data, size_t bytes)
{
    nccl_comm *c = (nccl_comm *)comm;
    nccl_channel *ch;
    TP_TRY(channel_of(c, peer, tag, 0, &ch));
    TP_TRY(tp_comm_check_bytes(bytes, c->base.message_bytes));
    tp_cuda_receive *r;
    TP_TRY(tp_cuda_comm_post(&c->base, peer, data, bytes, &r));
    r->said.of = ch;
    ch->bytes[ch->posted++ % TP_COMM_POSTED] = bytes;
    return issue(c, ch);
}

static tp_status
nccl_recv_wait(tp_comm *comm, int peer)
{
    nccl_comm *c = (nccl_comm *)comm;
    tp_cuda_receive *oldest;
    TP_TRY(tp_cuda_comm_take(&c->base, peer, &oldest));
    nccl_channel *ch = oldest->said.of;
    int i = (int)(ch->taken % TP_NCCL_SLOTS);
    TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
    TP_TRY(tp_cuda_event_wait(c->base.device, ch->filled[i], c->base.compute));
    TP_TRY(tp_nccl_arrive(c, ch->comm, ch->peer));
    TP_TRY(tp_cuda_copy(c->base.device, c->base.compute, oldest->data, ch->slot[i], oldest->bytes, TP_CUDA_ON_DEVICE));
    TP_TRY(tp_cuda_event_record(c->base.device, ch->freed[i], c->base.compute));
    ch->taken++;
    return issue(c, ch);
}

typedef struct {
    nc_comm comm;
    tp_stream stream;
    int other; /* rank within the communicator */
} line;

/* To the peer: of a twin that of all twins, of a neighbour the same channel on both ends. */
static tp_status
line_of(nccl_comm *c, int peer, uint64_t tag, line *out)
{
    int rank = c->base.comm.rank, first = c->ring == 2 ? rank % 2 == 0 : peer == nccl_next(c, rank);
    nccl_channel *ch;
    TP_TRY(tp_cuda_comm_ready(&c->base, peer));
    if (peer / c->ring != rank / c->ring && peer % c->ring == rank % c->ring) {
        *out = (line){c->twins.comm, c->twins.stream, peer / c->ring};
        return TP_OK;
    }
    TP_TRY(channel_of(c, peer, tag >> 48 == NCCL_RB_OP ? 0 : tag, first, &ch));
    *out = (line){ch->comm, ch->stream, ch->other};
    return TP_OK;
}

/* With the lock held: one group, so that neither direction waits for the other. Both ends know where there is nothing to send. */
static int
both_ways(nccl_comm *c, const line *to, const void *out, size_t out_bytes, void *in, size_t in_bytes)
{
    int result = c->nccl->group_start();
    if (result == NC_SUCCESS && out_bytes > 0)
        result = c->nccl->send(out, out_bytes, NC_INT8, to->other, to->comm, to->stream);
    if (result == NC_SUCCESS && in_bytes > 0)
        result = c->nccl->recv(in, in_bytes, NC_INT8, to->other, to->comm, to->stream);
    int ended = c->nccl->group_end();
    return result != NC_SUCCESS ? result : ended;
}

static tp_status
nccl_exchange(tp_comm *comm, int peer, uint64_t tag, const void *out, size_t out_bytes, void *in, size_t in_bytes)
{
    nccl_comm *c = (nccl_comm *)comm;
    nccl_exchanges *e = &c->exchanges;
    line to;
    TP_TRY(line_of(c, peer, tag, &to));
    TP_TRY(tp_comm_check_idle(comm, peer, c->base.from[peer].count));
    if (out_bytes == 0 && in_bytes == 0)
        return TP_OK;
    TP_TRY(tp_nccl_await_exchange(c));
    int i = (int)(e->issued % NCCL_EXCHANGES);
    TP_TRY(tp_cuda_event_record(c->base.device, e->ready, c->base.compute));
    TP_TRY(tp_cuda_event_wait(c->base.device, e->ready, to.stream));
    NCCL_CALL(c, to.comm, peer, "ncclGroupEnd", both_ways(c, &to, out, out_bytes, in, in_bytes));
    TP_TRY(tp_cuda_event_record(c->base.device, e->done[i], to.stream));
    TP_TRY(tp_cuda_event_wait(c->base.device, e->done[i], c->base.compute));
    e->peer[i] = peer;
    e->issued++;
    return tp_nccl_arrive(c, to.comm, peer);
}

/* ---- opening and closing ---------------------------------------------------------------------------------------------------------- */

static tp_status
nccl_bind(tp_comm *comm, void *device)
{
    nccl_comm *c = (nccl_comm *)comm;
    TP_TRY(tp_cuda_comm_bind(&c->base, device, tp_nccl_part));
    if (device == NULL)
        return TP_OK;
    c->ending = 0;
    return c->base.comm.ranks == 1 ? TP_OK : tp_nccl_meet(c);
}

static void
nccl_close(tp_comm *comm)
{
    nccl_comm *c = (nccl_comm *)comm;
    if (c->base.device != NULL)
        tp_nccl_part(&c->base);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c->pairs);
    tp_cuda_comm_close(&c->base);
}

static const char *
nccl_caveat(const tp_comm *comm)
{
    return ((const nccl_comm *)comm)->plain;
}

static const tp_comm_ops nccl_ops = {.abi = TP_COMM_ABI,
                                     .name = "nccl", .most_posted = TP_COMM_POSTED,
                                     .send = nccl_send,
                                     .recv_post = nccl_recv_post,
                                     .recv_wait = nccl_recv_wait,
                                     .exchange = nccl_exchange,
                                     .allgather = tp_cuda_comm_allgather,
                                     .close = nccl_close,
                                     .bind = nccl_bind,
                                     .caveat = nccl_caveat};

tp_status
tp_comm_open_nccl(const tp_nccl_config *config, tp_comm **out)
{
    const tp_nccl *nccl;
    tp_cuda_comm *base;
    int ranks = config->control->ranks, replicas = config->replicas > 0 ? config->replicas : 1;
    if (ranks % replicas != 0)
        return tp_fail(TP_EVALUE, "%d ranks are no %d replicas: a multiple of that would be right", ranks, replicas);
    TP_TRY(tp_nccl_load(&nccl));
    TP_TRY(tp_cuda_comm_open(sizeof(nccl_comm), &nccl_ops, config->control, config->region, config->message_bytes, &base));
    nccl_comm *c = (nccl_comm *)base;
    size_t pairs = (size_t)ranks * (size_t)ranks;
    c->nccl = nccl;
    c->replicas = replicas;
    c->ring = ranks / replicas;
    c->max_ctas = config->max_ctas > 0 ? config->max_ctas : 4;
    c->pairs = malloc(pairs);
    if (c->pairs == NULL) {
        tp_cuda_comm_close(base);
        return tp_fail(TP_EMEMORY, "no memory for a communicator of %d ranks", ranks);
    }
    memcpy(c->pairs, config->pairs, pairs);
    pthread_mutex_init(&c->lock, NULL);
    tp_clock_condition(&c->changed);
    *out = &base->comm;
    return TP_OK;
}
