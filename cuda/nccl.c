#include "cuda/nccl_inside.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/comm/region.h"

enum { HELD = 4 }; /* multiprocessors, by all receives of a rank that wait */

/* ---- messages ---------------------------------------------------------------------------------------------------------------- */

static int
is_guest(uint64_t tag)
{
    return tag >> 48 == NCCL_RE_OP || tag >> 48 == NCCL_RL_OP;
}

static tp_status
channel_of(nccl_comm *c, int peer, uint64_t tag, int sends, nccl_channel **out)
{
    int up = tag >> 48 == NCCL_RB_OP || tag >> 48 == NCCL_RL_OP, keeps = is_guest(tag);
    TP_TRY(tp_comm_check_peer(&c->base.comm, peer));
    TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
    for (int i = 0; i < c->channels; i++) {
        nccl_channel *ch = &c->channel[i];
        if (ch->peer == peer && ch->up == up && ch->keeps == keeps && ch->sends == sends) {
            *out = ch;
            return TP_OK;
        }
    }
    if (c->base.device == NULL)
        return tp_fail(TP_EVALUE, "this communicator has no device yet");
    int rank = c->base.comm.rank;
    char what[TP_TAG_TEXT];
    tp_tag_print(tag, what);
    return tp_fail(TP_EVALUE, "rank %d and rank %d do not talk this way (%s): the communicator was made without this pair",
                   sends ? rank : peer, sends ? peer : rank, what);
}

/* Mark, for the watch, that the compute stream has come to here. */
static tp_status
set_mark(nccl_comm *c)
{
    nccl_marks *m = &c->marks;
    if (m->set - m->passed == NCCL_MARKS)
        return TP_OK;
    TP_TRY(tp_cuda_event_record(c->base.device, m->event[m->set % NCCL_MARKS], c->base.compute));
    m->set++;
    return TP_OK;
}

/* ---- guests: without a copy ---- */

/* Order a guest's message after all work that the compute stream has now. */
static tp_status
begin_guest(nccl_comm *c, nccl_channel *ch)
{
    int i = (int)(ch->issued % NCCL_GUESTS);
    if (ch->issued >= NCCL_GUESTS)
        TP_TRY(tp_cuda_event_wait(c->base.device, ch->done[i], c->base.compute));
    TP_TRY(set_mark(c));
    TP_TRY(tp_cuda_event_record(c->base.device, ch->ready, c->base.compute));
    return tp_cuda_event_wait(c->base.device, ch->ready, ch->stream);
}

static tp_status
end_guest(nccl_comm *c, nccl_channel *ch)
{
    TP_TRY(tp_cuda_event_record(c->base.device, ch->done[ch->issued % NCCL_GUESTS], ch->stream));
    ch->issued++;
    return TP_OK;
}

static tp_status
send_guest(nccl_comm *c, int peer, uint64_t tag, const void *data, size_t bytes, uint64_t *loan)
{
    nccl_channel *ch = NULL;
    TP_TRY(channel_of(c, peer, tag, 1, &ch));
    TP_TRY(begin_guest(c, ch));
    NCCL_CALL(c, ch->comm, ch->peer, "ncclSend", c->nccl->send(data, bytes, NC_INT8, ch->other, ch->comm, ch->stream));
    TP_TRY(end_guest(c, ch));
    *loan = (uint64_t)ch->issued;
    return TP_OK;
}

static tp_status
nccl_reclaim(tp_comm *comm, int peer, uint64_t loan, uint64_t tag, size_t bytes)
{
    nccl_comm *c = (nccl_comm *)comm;
    nccl_channel *ch = NULL;
    (void)bytes;
    TP_TRY(channel_of(c, peer, tag, 1, &ch));
    return tp_cuda_event_wait(c->base.device, ch->done[(loan - 1) % NCCL_GUESTS], c->base.compute);
}

/* Receive a guest right into the stage's memory. A guest of the other direction may have been sent from there, and this rank's
 * program has not waited for the end of that send. */
static tp_status
receive_guest(nccl_comm *c, nccl_channel *ch, void *data, size_t bytes)
{
    TP_TRY(begin_guest(c, ch));
    for (int i = 0; i < c->channels; i++) {
        const nccl_channel *back = &c->channel[i];
        if (back->keeps && back->peer == ch->peer && back->sends && back->issued > 0)
            TP_TRY(tp_cuda_event_wait(c->base.device, back->done[(back->issued - 1) % NCCL_GUESTS], ch->stream));
    }
    NCCL_CALL(c, ch->comm, ch->peer, "ncclRecv", c->nccl->recv(data, bytes, NC_INT8, ch->other, ch->comm, ch->stream));
    return end_guest(c, ch);
}

static tp_status
await_guest(nccl_comm *c, nccl_channel *ch)
{
    int i = (int)(ch->taken % NCCL_GUESTS);
    TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
    TP_TRY(tp_cuda_event_wait(c->base.device, ch->done[i], c->base.compute));
    TP_TRY(set_mark(c));
    ch->taken++;
    return tp_nccl_arrive(c, ch->comm, ch->peer, ch->issued - ch->taken);
}

/* ---- all others: through slots ---- */

static tp_status
nccl_send(tp_comm *comm, int peer, uint64_t tag, const void *data, size_t bytes)
{
    nccl_comm *c = (nccl_comm *)comm;
    nccl_channel *ch = NULL;
    uint64_t loan;
    if (is_guest(tag)) {
        TP_TRY(send_guest(c, peer, tag, data, bytes, &loan));
        return nccl_reclaim(comm, peer, loan, tag, bytes);
    }
    TP_TRY(channel_of(c, peer, tag, 1, &ch));
    TP_TRY(tp_comm_check_bytes(bytes, c->base.message_bytes));
    int i = (int)(ch->issued % c->slots);
    if (ch->issued >= c->slots)
        TP_TRY(tp_cuda_event_wait(c->base.device, ch->freed[i], c->base.compute));
    TP_TRY(tp_cuda_copy(c->base.device, c->base.compute, ch->slot[i], data, bytes, TP_CUDA_ON_DEVICE));
    TP_TRY(set_mark(c));
    TP_TRY(tp_cuda_event_record(c->base.device, ch->filled[i], c->base.compute));
    TP_TRY(tp_cuda_event_wait(c->base.device, ch->filled[i], ch->stream));
    NCCL_CALL(c, ch->comm, ch->peer, "ncclSend", c->nccl->send(ch->slot[i], bytes, NC_INT8, ch->other, ch->comm, ch->stream));
    TP_TRY(tp_cuda_event_record(c->base.device, ch->freed[i], ch->stream));
    ch->issued++;
    return TP_OK;
}

/* Lend memory for a message: only for guests, all other messages are copied into a slot. */
static tp_status
nccl_lend(tp_comm *comm, int peer, uint64_t tag, const void *data, size_t bytes, uint64_t *loan)
{
    *loan = 0;
    return is_guest(tag) ? send_guest((nccl_comm *)comm, peer, tag, data, bytes, loan) : nccl_send(comm, peer, tag, data, bytes);
}

/* Give the library as many of the posted receives as there are free slots. */
static tp_status
issue(nccl_comm *c, nccl_channel *ch)
{
    while (ch->issued < ch->posted && ch->issued - ch->taken < c->slots) {
        int i = (int)(ch->issued % c->slots);
        size_t bytes = ch->bytes[ch->issued % TP_COMM_POSTED];
        if (ch->issued >= c->slots)
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
    nccl_channel *ch = NULL;
    TP_TRY(channel_of(c, peer, tag, 0, &ch));
    if (!ch->keeps)
        TP_TRY(tp_comm_check_bytes(bytes, c->base.message_bytes));
    tp_cuda_receive *r;
    TP_TRY(tp_cuda_comm_post(&c->base, peer, data, bytes, &r));
    r->said.of = ch;
    if (ch->keeps)
        return receive_guest(c, ch, data, bytes);
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
    if (ch->keeps)
        return await_guest(c, ch);
    int i = (int)(ch->taken % c->slots);
    TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
    TP_TRY(tp_cuda_event_wait(c->base.device, ch->filled[i], c->base.compute));
    TP_TRY(tp_nccl_arrive(c, ch->comm, ch->peer, ch->issued - ch->taken - 1));
    TP_TRY(tp_cuda_copy(c->base.device, c->base.compute, oldest->data, ch->slot[i], oldest->bytes, TP_CUDA_ON_DEVICE));
    TP_TRY(tp_cuda_event_record(c->base.device, ch->freed[i], c->base.compute));
    TP_TRY(set_mark(c));
    ch->taken++;
    return issue(c, ch);
}

typedef struct {
    nc_comm comm;
    tp_stream stream;
    int other; /* rank within the communicator */
} line;

/* The communicator for an exchange with the peer: the twins' if it is a twin, else that of the first channel down between the two,
 * which is the same at both ends. */
static tp_status
line_of(nccl_comm *c, int peer, line *out)
{
    int rank = c->base.comm.rank;
    TP_TRY(tp_cuda_comm_ready(&c->base, peer));
    const nc_comm *from = NULL; /* NULL itself once the watch aborted it, which NCCL_CALL then says */
    if (c->twins.members > 1 && nccl_twin_group(c, peer) == nccl_twin_group(c, rank)) {
        *out = (line){NULL, c->twins.stream, nccl_twin_number(c, peer)};
        from = &c->twins.comm;
    }
    for (int i = 0; from == NULL && i < c->channels; i++) {
        const nccl_channel *ch = &c->channel[i];
        if (ch->peer != peer || ch->up || ch->keeps)
            continue;
        *out = (line){NULL, ch->stream, ch->other};
        from = &ch->comm;
    }
    if (from != NULL) {
        pthread_mutex_lock(&c->lock);
        out->comm = *from;
        pthread_mutex_unlock(&c->lock);
        return TP_OK;
    }
    return tp_fail(TP_EVALUE, "rank %d and rank %d do not talk: the communicator was made without this pair", rank, peer);
}

/* With the lock held: send and receive in one group, so that neither direction waits for the other. Both ends know which of them
 * has no bytes. */
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
    line to = {0};
    (void)tag;
    TP_TRY(line_of(c, peer, &to));
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
    TP_TRY(set_mark(c));
    e->peer[i] = peer;
    e->issued++;
    return tp_nccl_arrive(c, to.comm, peer, 0);
}

/* ---- opening and closing
 * ---------------------------------------------------------------------------------------------------------- */

static tp_status
nccl_bind(tp_comm *comm, void *device)
{
    nccl_comm *c = (nccl_comm *)comm;
    TP_TRY(tp_cuda_comm_bind(&c->base, device, tp_nccl_part));
    if (device == NULL)
        return TP_OK;
    c->ending = 0;
    return tp_nccl_meet(c);
}

static void
nccl_close(tp_comm *comm)
{
    nccl_comm *c = (nccl_comm *)comm;
    if (c->base.device != NULL)
        tp_nccl_part(&c->base);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c->line);
    free(c->channel);
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
                                     .caveat = nccl_caveat,
                                     .lend = nccl_lend,
                                     .reclaim = nccl_reclaim};

/* Blocks of a communicator, the same on every rank: so many that a rank's receives, one of each line, hold no more than HELD, but
 * one at least. A Hopper GPU has 132 multiprocessors, and grids of 128: 12 products of GPT's, 1024 and 4096 rows, took 1.08 times as
 * long with 124 as with 128 (the median; 0.89 to 1.22; an H200, 2026-11-26), where two receives of 4 blocks had left 124. How fast
 * messages of fewer blocks are, no machine with several GPUs has told. */
static int
share_of_held(const nccl_comm *c)
{
    int most = 1;
    for (int rank = 0; rank < c->base.comm.ranks; rank++) {
        int mine = 0;
        for (int i = 0; i < c->lines; i++)
            mine += c->line[i].from == rank || c->line[i].to == rank;
        most = mine > most ? mine : most;
    }
    return most < HELD ? HELD / most : 1;
}

tp_status
tp_comm_open_nccl(const tp_nccl_config *config, tp_comm **out)
{
    const tp_nccl *nccl;
    tp_cuda_comm *base;
    int ranks = config->control->ranks, replicas = config->replicas > 0 ? config->replicas : 1;
    int copies = config->copies > 0 ? config->copies : 1;
    if (ranks % replicas != 0)
        return tp_fail(TP_EVALUE, "%d ranks are no %d replicas: a multiple of that would be right", ranks, replicas);
    if (copies > 2 || (copies == 2 && ranks / replicas % 2 != 0))
        return tp_fail(TP_EVALUE, "%d copies of the model on %d ranks: one, or two on an even number, would be right", copies,
                       ranks / replicas);
    if (config->slots < 0 || config->slots > TP_NCCL_MOST_SLOTS)
        return tp_fail(TP_EVALUE, "slots is %d: 1 to %d, or 0 for %d, would be right", config->slots, TP_NCCL_MOST_SLOTS, TP_NCCL_SLOTS);
    TP_TRY(tp_nccl_load(&nccl));
    TP_TRY(tp_cuda_comm_open(sizeof(nccl_comm), &nccl_ops, config->control, config->region, config->message_bytes, &base));
    nccl_comm *c = (nccl_comm *)base;
    c->nccl = nccl;
    c->copies = copies;
    c->ring = ranks / replicas;
    tp_status status = tp_nccl_draw(c, config->pairs);
    c->slots = config->slots > 0 ? config->slots : TP_NCCL_SLOTS;
    c->max_ctas = config->max_ctas > 0 ? config->max_ctas : share_of_held(c);
    if (status != TP_OK) {
        free(c->line);
        free(c->channel);
        tp_cuda_comm_close(base);
        return status;
    }
    pthread_mutex_init(&c->lock, NULL);
    tp_clock_condition(&c->changed);
    *out = &base->comm;
    return TP_OK;
}
