#include "cuda/nccl.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "csrc/base/clock.h"
#include "csrc/comm/region.h"
#include "cuda/comm.h"
#include "cuda/dl_nccl.h"

#define POLL_NS     20000
#define TICK_NS     50000000ll
#define PATIENCE_NS 60000000000ll /* with the making and ending of communicators where there is no deadline */
#define RB_OP       8             /* "receive of the gradient" among tp_tag_print's words: what a message upstream is named by */
#define CLASSES     3             /* of pairs that share no rank: even, odd, and the last of an odd ring */

enum { DOWN, UP };

typedef struct {
    nc_comm comm;
    tp_stream stream;
    int peer, other; /* rank of the run; rank within the communicator */
    int sends;
    void *slot[TP_NCCL_SLOTS], *handle[TP_NCCL_SLOTS];
    int from_nccl[TP_NCCL_SLOTS]; /* the slot's memory; else plain device memory */
    tp_cuda_event filled[TP_NCCL_SLOTS], freed[TP_NCCL_SLOTS];
    size_t bytes[TP_COMM_POSTED];   /* of receives posted */
    int64_t posted, taken;          /* receives */
    _Atomic int64_t issued;         /* written by this rank, read by the watch */
    int64_t seen, since_ns;         /* the watch's: operations it saw end, and when the oldest other one began to count */
} channel;

typedef struct {
    tp_cuda_comm base; /* first */
    const tp_nccl *nccl;
    uint8_t *pairs;
    int max_ctas, channels, aborted, ending, watching;
    char plain[256]; /* why a slot is not what NCCL reads and writes by itself: the first reason; "": all are */
    nc_comm world, fresh; /* fresh: where a split writes when it comes to its end, be that after we have given up */
    channel channel[4];  /* [edge below or above][direction] of this rank */
    tp_cuda_event exchanged;
    pthread_t thread;
    pthread_mutex_t lock; /* NCCL's calls, `aborted`, `ending` and what the watch reads of channels */
    pthread_cond_t changed;
} nccl_comm;

/* ---- calls that do not block ---------------------------------------------------------------------------------------- */

/* With the lock held. In one group: then all are told before one is taken apart, which may wait for the device, and so for the
 * kernels of the others (NCCL issue 1013; since 2.22). */
static void
abort_all(nccl_comm *c)
{
    if (c->aborted)
        return;
    c->aborted = 1;
    (void)c->nccl->group_start();
    for (int i = 0; i < c->channels; i++)
        if (c->channel[i].comm != NULL)
            c->nccl->abort(c->channel[i].comm);
    if (c->world != NULL)
        c->nccl->abort(c->world);
    (void)c->nccl->group_end();
    for (int i = 0; i < c->channels; i++)
        c->channel[i].comm = NULL;
    c->world = NULL;
}

static tp_status
fail(nccl_comm *c, int result, nc_comm comm, const char *what)
{
    const char *more = comm != NULL && !c->aborted ? c->nccl->last_error(comm) : "";
    tp_status status = result == NC_REMOTE_ERROR ? TP_ECONNECTION : TP_ERUNTIME;
    tp_fail(status, "rank %d: NCCL's %s: %s%s%s", c->base.comm.rank, what, c->nccl->error_string(result),
            more != NULL && *more ? ": " : "", more != NULL ? more : "");
    pthread_mutex_lock(&c->lock);
    abort_all(c);
    pthread_mutex_unlock(&c->lock);
    return status;
}

/* Poll until what was begun on the communicator has its place on the stream. `result`: what the call itself gave. */
static tp_status
finish(nccl_comm *c, int result, nc_comm comm, const char *what)
{
    int64_t patience = c->base.comm.timeout_ns > 0 ? c->base.comm.timeout_ns : PATIENCE_NS, until = tp_clock_ns() + patience;
    while (result == NC_SUCCESS || result == NC_IN_PROGRESS) {
        int state = NC_SUCCESS;
        TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
        pthread_mutex_lock(&c->lock);
        int asked = c->aborted ? NC_INVALID_USAGE : c->nccl->get_async_error(comm, &state);
        pthread_mutex_unlock(&c->lock);
        result = asked != NC_SUCCESS ? asked : state;
        if (result == NC_SUCCESS)
            return TP_OK;
        if (result == NC_IN_PROGRESS && tp_clock_ns() > until) {
            tp_fail(TP_ETIMEOUT, "rank %d waited %.3g s for NCCL's %s", c->base.comm.rank, (double)patience * 1e-9, what);
            pthread_mutex_lock(&c->lock);
            abort_all(c);
            pthread_mutex_unlock(&c->lock);
            return TP_ETIMEOUT;
        }
        if (result == NC_IN_PROGRESS)
            tp_clock_sleep_until(tp_clock_ns() + POLL_NS);
    }
    TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
    return fail(c, result, comm, what);
}

#define CALL(c, communicator, what, call)                                                                              \
    do {                                                                                                               \
        pthread_mutex_lock(&(c)->lock);                                                                                \
        int result_ = (c)->aborted ? NC_INVALID_USAGE : (call);                                                        \
        pthread_mutex_unlock(&(c)->lock);                                                                              \
        TP_TRY(finish((c), result_, (communicator), (what)));                                                          \
    } while (0)

/* ---- the watch --------------------------------------------------------------------------------------------------------- */

/* With the lock held: has the channel's oldest operation moved in time? */
static void
watch_channel(nccl_comm *c, channel *ch)
{
    int state = NC_SUCCESS, done = 1;
    char text[512], doing[TP_DOING_TEXT];
    if (ch->comm != NULL && c->nccl->get_async_error(ch->comm, &state) == NC_SUCCESS && state != NC_SUCCESS &&
        state != NC_IN_PROGRESS) {
        snprintf(text, sizeof text, "rank %d: NCCL between it and rank %d: %s", c->base.comm.rank, ch->peer,
                 c->nccl->error_string(state));
        tp_region_abort(c->base.region, TP_ECONNECTION, c->base.comm.rank, text);
    }
    while (ch->seen < ch->issued) {
        tp_cuda_event last = ch->sends ? ch->freed[ch->seen % TP_NCCL_SLOTS] : ch->filled[ch->seen % TP_NCCL_SLOTS];
        if (ch->seen + TP_NCCL_SLOTS >= ch->issued && (tp_cuda_event_query(c->base.device, last, &done) != TP_OK || !done))
            break;
        ch->seen++;
        ch->since_ns = 0;
    }
    if (ch->seen == ch->issued)
        return;
    int64_t now = tp_clock_ns();
    ch->since_ns = ch->since_ns == 0 ? now : ch->since_ns;
    if (c->base.comm.timeout_ns > 0 && now - ch->since_ns > c->base.comm.timeout_ns) {
        tp_region_doing(c->base.region, ch->peer, doing);
        snprintf(text, sizeof text, "rank %d waited %.3g s %s rank %d; rank %d is %s", c->base.comm.rank,
                 (double)c->base.comm.timeout_ns * 1e-9, ch->sends ? "to send a message to" : "for a message from", ch->peer, ch->peer,
                 doing);
        tp_region_abort(c->base.region, TP_ETIMEOUT, c->base.comm.rank, text);
    }
}

static void *
watch(void *argument)
{
    nccl_comm *c = argument;
    pthread_mutex_lock(&c->lock);
    while (!c->ending && !c->aborted) {
        int64_t next = tp_clock_ns() + TICK_NS;
        struct timespec at = {(time_t)(next / 1000000000), (long)(next % 1000000000)};
        pthread_cond_timedwait(&c->changed, &c->lock, &at);
        for (int i = 0; i < c->channels && !c->aborted && !c->ending; i++)
            watch_channel(c, &c->channel[i]);
        int rank;
        char text[512];
        if (tp_region_aborted(c->base.region, &rank, text) != TP_OK)
            abort_all(c);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* Edge e goes from rank e to the next one, the last edge to rank 0. */
static int
is_edge(const nccl_comm *c, int e)
{
    int next = (e + 1) % c->base.comm.ranks;
    return next != e && (c->pairs[e * c->base.comm.ranks + next] || c->pairs[next * c->base.comm.ranks + e]);
}

static int
class_of(const nccl_comm *c, int e)
{
    return c->base.comm.ranks % 2 == 1 && e == c->base.comm.ranks - 1 ? 2 : e % 2;
}

typedef struct {
    int32_t version;
    char device[48];
    nc_id id;
} introduction;

static tp_status
introduce(nccl_comm *c, nc_id *id)
{
    int ranks = c->base.comm.ranks, rank = c->base.comm.rank, version;
    const char *path;
    introduction mine = {0}, *all = calloc((size_t)ranks, sizeof *all);
    if (all == NULL)
        return tp_fail(TP_EMEMORY, "no memory to meet %d ranks", ranks);
    tp_nccl_found(&path, &version);
    mine.version = version;
    if (getenv("NCCL_HOSTID") == NULL) /* set: one GPU plays several machines, in tests */
        snprintf(mine.device, sizeof mine.device, "%s", tp_cuda_device_properties(c->base.device)->uuid);
    tp_status status = TP_OK;
    int result = rank == 0 ? c->nccl->get_id(&mine.id) : NC_SUCCESS;
    if (result != NC_SUCCESS)
        status = fail(c, result, NULL, "ncclGetUniqueId");
    if (status == TP_OK)
        status = c->base.control->ops->allgather(c->base.control, &mine, sizeof mine, all);
    for (int a = 0; status == TP_OK && a < ranks; a++) {
        if (all[a].version != all[0].version)
            status = tp_fail(TP_EVALUE, "rank %d has NCCL %d and rank 0 has %d: the same on all would be right", a, all[a].version,
                             all[0].version);
#ifndef TP_CUDA_EMULATED
        for (int b = 0; status == TP_OK && b < a; b++)
            if (*all[a].device && memcmp(all[a].device, all[b].device, sizeof mine.device) == 0)
                status = tp_fail(TP_EVALUE, "ranks %d and %d both use GPU %s: a GPU of its own for each would be right", b, a,
                                 all[a].device);
#endif
    }
    *id = all[0].id;
    free(all);
    return status;
}

/* Messages go through plain memory too, only slower: the reason is kept for tp_comm_ops.caveat. */
static void
keep_reason(nccl_comm *c, const channel *ch, const char *what, const char *why)
{
    if (*c->plain == 0)
        snprintf(c->plain, sizeof c->plain, "messages with rank %d go through buffers that NCCL copies from and to (%s: %s)",
                 ch->peer, what, why);
}

static tp_status
take_slot(nccl_comm *c, channel *ch, int i)
{
    const tp_nccl *nccl = c->nccl;
    if (nccl->mem_alloc != NULL && nccl->mem_free != NULL) {
        int result = nccl->mem_alloc(&ch->slot[i], c->base.message_bytes);
        ch->from_nccl[i] = result == NC_SUCCESS && ch->slot[i] != NULL;
        if (ch->from_nccl[i])
            return TP_OK;
        keep_reason(c, ch, "ncclMemAlloc", result == NC_SUCCESS ? "it gave nothing" : nccl->error_string(result));
        ch->slot[i] = NULL;
    } else {
        keep_reason(c, ch, "ncclMemAlloc", "not in this NCCL");
    }
    return tp_cuda_alloc(c->base.device, c->base.message_bytes, "a buffer for messages", &ch->slot[i]);
}

/* ncclCommRegister leaves the communicator as it was where it refuses (NCCL 2.28, register.cc), and gives no handle where it is
 * switched off (NCCL_LOCAL_REGISTER=0). A communicator that is broken shows at its next call. */
static void
register_slot(nccl_comm *c, channel *ch, int i)
{
    const tp_nccl *nccl = c->nccl;
    if (nccl->register_buffer == NULL || nccl->deregister_buffer == NULL) {
        keep_reason(c, ch, "ncclCommRegister", "not in this NCCL");
        return;
    }
    pthread_mutex_lock(&c->lock);
    int result =
        c->aborted ? NC_SUCCESS : nccl->register_buffer(ch->comm, ch->slot[i], c->base.message_bytes, &ch->handle[i]);
    pthread_mutex_unlock(&c->lock);
    if (result != NC_SUCCESS && result != NC_IN_PROGRESS)
        ch->handle[i] = NULL;
    if (ch->handle[i] == NULL && result != NC_IN_PROGRESS)
        keep_reason(c, ch, "ncclCommRegister", result == NC_SUCCESS ? "it is switched off (NCCL_LOCAL_REGISTER)"
                                                                    : nccl->error_string(result));
}

/* A buffer that the library may read and write by itself, or any other. */
static tp_status
open_slot(nccl_comm *c, channel *ch, int i)
{
    TP_TRY(take_slot(c, ch, i));
    register_slot(c, ch, i);
    TP_TRY(finish(c, NC_SUCCESS, ch->comm, "ncclCommRegister"));
    TP_TRY(tp_cuda_event_create(c->base.device, 0, &ch->filled[i]));
    return tp_cuda_event_create(c->base.device, 0, &ch->freed[i]);
}

/* With the lock held: one group, so that neither direction waits for the other. */
static int
both_ways(nccl_comm *c, channel *ch, const void *out, size_t out_bytes, void *in, size_t in_bytes)
{
    int result = c->nccl->group_start();
    if (result == NC_SUCCESS)
        result = c->nccl->send(out, out_bytes, NC_INT8, ch->other, ch->comm, ch->stream);
    if (result == NC_SUCCESS)
        result = c->nccl->recv(in, in_bytes, NC_INT8, ch->other, ch->comm, ch->stream);
    int ended = c->nccl->group_end();
    return result != NC_SUCCESS ? result : ended;
}

/* The first operation between two ranks connects them, and its call goes on when the other end has made it too: here, where both
 * do, not in a step, where a receive is posted long before its send. Classes share no rank, so nobody waits in a ring. */
static tp_status
greet(nccl_comm *c, channel *ch)
{
    CALL(c, ch->comm, "first ncclGroupEnd", both_ways(c, ch, ch->slot[0], 1, ch->slot[1], 1));
    TP_TRY(tp_cuda_event_record(c->base.device, c->exchanged, ch->stream));
    return tp_cuda_event_wait(c->base.device, c->exchanged, c->base.compute);
}

/* Everybody splits the world in this order; who has no edge of the class stays out. */
static tp_status
open_class(nccl_comm *c, int class, int direction)
{
    int rank = c->base.comm.rank, ranks = c->base.comm.ranks, above = rank, below = (rank + ranks - 1) % ranks, color = NC_NO_COLOR;
    if (is_edge(c, above) && class_of(c, above) == class)
        color = above;
    else if (is_edge(c, below) && class_of(c, below) == class)
        color = below;
    int upper = color == below && color != above;
    nc_config config = NC_CONFIG(c->max_ctas);
    c->fresh = NULL;
    CALL(c, c->world, "ncclCommSplit", c->nccl->split(c->world, color, upper, &c->fresh, &config));
    if (color == NC_NO_COLOR)
        return TP_OK;
    channel *ch = &c->channel[c->channels];
    pthread_mutex_lock(&c->lock);
    *ch = (channel){.comm = c->fresh, .peer = upper ? below : (rank + 1) % ranks, .other = !upper, .sends = (direction == DOWN) != upper};
    c->channels++;
    pthread_mutex_unlock(&c->lock);
    TP_TRY(finish(c, NC_SUCCESS, ch->comm, "ncclCommSplit"));
    TP_TRY(tp_cuda_stream_create(c->base.device, 1, &ch->stream));
    for (int i = 0; i < TP_NCCL_SLOTS; i++)
        TP_TRY(open_slot(c, ch, i));
    return greet(c, ch);
}

/* ---- messages ---------------------------------------------------------------------------------------------------------------- */

static tp_status
channel_of(nccl_comm *c, int peer, uint64_t tag, int sends, channel **out)
{
    int ranks = c->base.comm.ranks, up = tag >> 48 == RB_OP, from = sends ? c->base.comm.rank : peer, to = sends ? peer : c->base.comm.rank;
    TP_TRY(tp_comm_check_peer(&c->base.comm, peer));
    TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
    int good = up ? from == (to + 1) % ranks : to == (from + 1) % ranks;
    int edge = up ? to : from, order = 0;
    for (int class = 0; good && class < CLASSES; class++) /* the order in which open_class made them */
        for (int direction = DOWN; direction <= UP; direction++) {
            int mine[2] = {c->base.comm.rank, (c->base.comm.rank + ranks - 1) % ranks};
            for (int i = 0; i < 2; i++)
                if (is_edge(c, mine[i]) && class_of(c, mine[i]) == class) {
                    if (mine[i] == edge && direction == up) {
                        *out = &c->channel[order];
                        return order < c->channels ? TP_OK : tp_fail(TP_EVALUE, "this communicator has no device yet");
                    }
                    order++;
                }
        }
    char what[TP_TAG_TEXT];
    tp_tag_print(tag, what);
    return tp_fail(TP_EVALUE, "rank %d and rank %d do not talk this way (%s): the communicator was made without this pair", from, to,
                   what);
}

/* Emulated streams have nothing that waits: do here what the stream would do. */
static tp_status
arrive(nccl_comm *c, channel *ch)
{
#ifdef TP_CUDA_EMULATED
    int64_t until = tp_clock_ns() + c->base.comm.timeout_ns;
    while (c->nccl->settled != NULL) {
        pthread_mutex_lock(&c->lock);
        int result = c->aborted ? NC_INVALID_USAGE : c->nccl->settled(ch->comm);
        pthread_mutex_unlock(&c->lock);
        if (result == NC_SUCCESS)
            break;
        TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
        if (result != NC_IN_PROGRESS)
            return fail(c, result, ch->comm, "ncclRecv");
        if (c->base.comm.timeout_ns > 0 && tp_clock_ns() > until)
            return tp_comm_too_late(&c->base.comm, c->base.region, ch->peer, 1, 0, 0, 0);
        tp_clock_sleep_until(tp_clock_ns() + POLL_NS);
    }
#else
    (void)c, (void)ch;
#endif
    return TP_OK;
}

static tp_status
nccl_send(tp_comm *comm, int peer, uint64_t tag, const void *data, size_t bytes)
{
    nccl_comm *c = (nccl_comm *)comm;
    channel *ch;
    TP_TRY(channel_of(c, peer, tag, 1, &ch));
    TP_TRY(tp_comm_check_bytes(bytes, c->base.message_bytes));
    int i = (int)(ch->issued % TP_NCCL_SLOTS);
    if (ch->issued >= TP_NCCL_SLOTS)
        TP_TRY(tp_cuda_event_wait(c->base.device, ch->freed[i], c->base.compute));
    TP_TRY(tp_cuda_copy(c->base.device, c->base.compute, ch->slot[i], data, bytes, TP_CUDA_ON_DEVICE));
    TP_TRY(tp_cuda_event_record(c->base.device, ch->filled[i], c->base.compute));
    TP_TRY(tp_cuda_event_wait(c->base.device, ch->filled[i], ch->stream));
    CALL(c, ch->comm, "ncclSend", c->nccl->send(ch->slot[i], bytes, NC_INT8, ch->other, ch->comm, ch->stream));
    TP_TRY(tp_cuda_event_record(c->base.device, ch->freed[i], ch->stream));
    ch->issued++;
    return TP_OK;
}

/* Give the library as many of the posted receives as there are free slots. */
static tp_status
issue(nccl_comm *c, channel *ch)
{
    while (ch->issued < ch->posted && ch->issued - ch->taken < TP_NCCL_SLOTS) {
        int i = (int)(ch->issued % TP_NCCL_SLOTS);
        size_t bytes = ch->bytes[ch->issued % TP_COMM_POSTED];
        if (ch->issued >= TP_NCCL_SLOTS)
            TP_TRY(tp_cuda_event_wait(c->base.device, ch->freed[i], ch->stream));
        CALL(c, ch->comm, "ncclRecv", c->nccl->recv(ch->slot[i], bytes, NC_INT8, ch->other, ch->comm, ch->stream));
        TP_TRY(tp_cuda_event_record(c->base.device, ch->filled[i], ch->stream));
        ch->issued++;
    }
    return TP_OK;
}

static tp_status
nccl_recv_post(tp_comm *comm, int peer, uint64_t tag, void *data, size_t bytes)
{
    nccl_comm *c = (nccl_comm *)comm;
    channel *ch;
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
    channel *ch = oldest->said.of;
    int i = (int)(ch->taken % TP_NCCL_SLOTS);
    TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
    TP_TRY(tp_cuda_event_wait(c->base.device, ch->filled[i], c->base.compute));
    TP_TRY(arrive(c, ch));
    TP_TRY(tp_cuda_copy(c->base.device, c->base.compute, oldest->data, ch->slot[i], oldest->bytes, TP_CUDA_ON_DEVICE));
    TP_TRY(tp_cuda_event_record(c->base.device, ch->freed[i], c->base.compute));
    ch->taken++;
    return issue(c, ch);
}

static tp_status
nccl_exchange(tp_comm *comm, int peer, uint64_t tag, const void *out, size_t out_bytes, void *in, size_t in_bytes)
{
    nccl_comm *c = (nccl_comm *)comm;
    channel *ch;
    int first = comm->ranks == 2 ? comm->rank == 0 : peer == (comm->rank + 1) % comm->ranks; /* the same channel on both ends */
    TP_TRY(channel_of(c, peer, tag >> 48 == RB_OP ? 0 : tag, first, &ch));
    TP_TRY(tp_comm_check_idle(comm, peer, c->base.from[peer].count));
    TP_TRY(tp_cuda_event_record(c->base.device, c->exchanged, c->base.compute));
    TP_TRY(tp_cuda_event_wait(c->base.device, c->exchanged, ch->stream));
    CALL(c, ch->comm, "ncclGroupEnd", both_ways(c, ch, out, out_bytes, in, in_bytes));
    TP_TRY(tp_cuda_event_record(c->base.device, c->exchanged, ch->stream));
    TP_TRY(tp_cuda_event_wait(c->base.device, c->exchanged, c->base.compute));
    return arrive(c, ch);
}

/* ---- closing ------------------------------------------------------------------------------------------------------------------ */

static void
close_channel(nccl_comm *c, channel *ch)
{
    for (int i = 0; i < TP_NCCL_SLOTS; i++) {
        tp_cuda_event_destroy(c->base.device, ch->filled[i]);
        tp_cuda_event_destroy(c->base.device, ch->freed[i]);
    }
    if (ch->comm != NULL)
        c->nccl->destroy(ch->comm);
    for (int i = 0; i < TP_NCCL_SLOTS; i++)
        if (ch->slot[i] != NULL && ch->from_nccl[i])
            c->nccl->mem_free(ch->slot[i]);
        else if (ch->slot[i] != NULL)
            tp_cuda_free(c->base.device, ch->slot[i]);
    tp_cuda_stream_destroy(c->base.device, ch->stream);
}

/* All that is the device's: before it is closed. */
static void
release(tp_cuda_comm *base)
{
    nccl_comm *c = (nccl_comm *)base;
    pthread_mutex_lock(&c->lock);
    c->ending = 1;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    if (c->watching)
        pthread_join(c->thread, NULL);
    c->watching = 0;
    for (int i = 0; i < c->channels && !c->aborted; i++) { /* no other thread is left */
        channel *ch = &c->channel[i];
        for (int k = 0; k < TP_NCCL_SLOTS; k++)
            if (ch->handle[k] != NULL)
                c->nccl->deregister_buffer(ch->comm, ch->handle[k]);
        if (finish(c, c->nccl->finalize(ch->comm), ch->comm, "ncclCommFinalize") != TP_OK)
            abort_all(c);
    }
    /* Copies from and to the slots may wait still; ncclMemFree, unlike cudaFree, does not wait for them. No message is left that
     * could hold them up. */
    (void)!tp_cuda_synchronize(c->base.device, c->base.compute);
    for (int i = 0; i < c->channels; i++)
        close_channel(c, &c->channel[i]);
    c->channels = 0;
    if (c->world != NULL && finish(c, c->nccl->finalize(c->world), c->world, "ncclCommFinalize") == TP_OK)
        c->nccl->destroy(c->world);
    else
        abort_all(c);
    c->world = NULL;
    tp_cuda_event_destroy(c->base.device, c->exchanged);
    c->exchanged = NULL;
}

static tp_status
nccl_bind(tp_comm *comm, void *device)
{
    nccl_comm *c = (nccl_comm *)comm;
    nc_config config = NC_CONFIG(c->max_ctas);
    nc_id id;
    TP_TRY(tp_cuda_comm_bind(&c->base, device, release));
    if (device == NULL)
        return TP_OK;
    c->ending = 0;
    if (c->base.comm.ranks == 1)
        return TP_OK;
    TP_TRY(tp_cuda_bind(c->base.device));
    TP_TRY(introduce(c, &id));
    TP_TRY(tp_cuda_event_create(c->base.device, 0, &c->exchanged));
    int result = c->nccl->init(&c->world, c->base.comm.ranks, id, c->base.comm.rank, &config);
    TP_TRY(finish(c, result, c->world, "ncclCommInitRankConfig"));
    for (int class = 0; class < CLASSES; class++)
        for (int direction = DOWN; direction <= UP; direction++)
            TP_TRY(open_class(c, class, direction));
    c->watching = pthread_create(&c->thread, NULL, watch, c) == 0;
    return c->watching ? TP_OK : tp_fail(TP_ERUNTIME, "the thread that watches NCCL could not be started");
}

static void
nccl_close(tp_comm *comm)
{
    nccl_comm *c = (nccl_comm *)comm;
    if (c->base.device != NULL)
        release(&c->base);
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
    TP_TRY(tp_nccl_load(&nccl));
    TP_TRY(tp_cuda_comm_open(sizeof(nccl_comm), &nccl_ops, config->control, config->region, config->message_bytes, &base));
    nccl_comm *c = (nccl_comm *)base;
    size_t pairs = (size_t)config->control->ranks * (size_t)config->control->ranks;
    c->nccl = nccl;
    c->max_ctas = config->max_ctas > 0 ? config->max_ctas : 4;
    c->pairs = malloc(pairs);
    if (c->pairs == NULL) {
        tp_cuda_comm_close(base);
        return tp_fail(TP_EMEMORY, "no memory for a communicator of %d ranks", config->control->ranks);
    }
    memcpy(c->pairs, config->pairs, pairs);
    pthread_mutex_init(&c->lock, NULL);
    tp_clock_condition(&c->changed);
    *out = &base->comm;
    return TP_OK;
}
