/* Making and ending what messages go through: everybody meets, then splits into pairs and groups of twins, in one order. */
#include "cuda/nccl_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int
tp_nccl_is_edge(const nccl_comm *c, int e)
{
    int next = nccl_next(c, e);
    return next != e && (c->pairs[e * c->base.comm.ranks + next] || c->pairs[next * c->base.comm.ranks + e]);
}

int
tp_nccl_class(const nccl_comm *c, int e)
{
    int within = e % c->ring;
    return c->ring % 2 == 1 && within == c->ring - 1 ? 2 : within % 2;
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
        status = tp_nccl_fail(c, result, NULL, NCCL_EVERYBODY, "ncclGetUniqueId");
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
keep_reason(nccl_comm *c, const nccl_channel *ch, const char *what, const char *why)
{
    if (*c->plain == 0)
        snprintf(c->plain, sizeof c->plain, "messages with rank %d go through buffers that NCCL copies from and to (%s: %s)",
                 ch->peer, what, why);
}

static tp_status
take_slot(nccl_comm *c, nccl_channel *ch, int i)
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
register_slot(nccl_comm *c, nccl_channel *ch, int i)
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
open_slot(nccl_comm *c, nccl_channel *ch, int i)
{
    TP_TRY(take_slot(c, ch, i));
    register_slot(c, ch, i);
    TP_TRY(tp_nccl_finish(c, NC_SUCCESS, ch->comm, ch->peer, "ncclCommRegister"));
    TP_TRY(tp_cuda_event_create(c->base.device, 0, &ch->filled[i]));
    return tp_cuda_event_create(c->base.device, 0, &ch->freed[i]);
}

/* With the lock held: a byte to the rank of the communicator and one from it. */
static int
say_hello(nccl_comm *c, nc_comm comm, tp_stream stream, int other, void *out, void *in)
{
    int result = c->nccl->send(out, 1, NC_INT8, other, comm, stream);
    return result == NC_SUCCESS ? c->nccl->recv(in, 1, NC_INT8, other, comm, stream) : result;
}

/* With the lock held: one group, so that nobody waits for another's turn. */
static int
greet_pair(nccl_comm *c, nccl_channel *ch)
{
    int result = c->nccl->group_start();
    if (result == NC_SUCCESS)
        result = say_hello(c, ch->comm, ch->stream, ch->other, ch->slot[0], ch->slot[1]);
    int ended = c->nccl->group_end();
    return result != NC_SUCCESS ? result : ended;
}

static int
greet_twins(nccl_comm *c)
{
    nccl_twins *twins = &c->twins;
    int result = c->nccl->group_start(), self = c->base.comm.rank / c->ring;
    for (int other = 0; other < c->replicas && result == NC_SUCCESS; other++)
        if (other != self)
            result = say_hello(c, twins->comm, twins->stream, other, (char *)twins->hello + other,
                               (char *)twins->hello + c->replicas + other);
    int ended = c->nccl->group_end();
    return result != NC_SUCCESS ? result : ended;
}

/* What comes later on the compute stream comes after what the stream has now. */
static tp_status
join(nccl_comm *c, tp_stream stream)
{
    TP_TRY(tp_cuda_event_record(c->base.device, c->exchanges.ready, stream));
    return tp_cuda_event_wait(c->base.device, c->exchanges.ready, c->base.compute);
}

/* Everybody splits the world in this order; who has no edge of the class stays out. The first operation between two ranks connects
 * them, and its call goes on when the other end has made it too: here, where both do, not in a step, where a receive is posted long
 * before its send. Classes share no rank, so nobody waits in a ring. */
static tp_status
open_class(nccl_comm *c, int class, int direction)
{
    int rank = c->base.comm.rank, above = rank, below = nccl_before(c, rank), color = NC_NO_COLOR;
    if (tp_nccl_is_edge(c, above) && tp_nccl_class(c, above) == class)
        color = above;
    else if (tp_nccl_is_edge(c, below) && tp_nccl_class(c, below) == class)
        color = below;
    int upper = color == below && color != above, peer = upper ? below : nccl_next(c, rank);
    nc_config config = NC_CONFIG(c->max_ctas);
    c->fresh = NULL;
    NCCL_CALL(c, c->world, NCCL_EVERYBODY, "ncclCommSplit", c->nccl->split(c->world, color, upper, &c->fresh, &config));
    if (color == NC_NO_COLOR)
        return TP_OK;
    nccl_channel *ch = &c->channel[c->channels];
    pthread_mutex_lock(&c->lock);
    *ch = (nccl_channel){.comm = c->fresh, .peer = peer, .other = !upper, .sends = (direction == NCCL_DOWN) != upper};
    c->channels++;
    pthread_mutex_unlock(&c->lock);
    TP_TRY(tp_nccl_finish(c, NC_SUCCESS, ch->comm, peer, "ncclCommSplit"));
    TP_TRY(tp_cuda_stream_create(c->base.device, 1, &ch->stream));
    for (int i = 0; i < TP_NCCL_SLOTS; i++)
        TP_TRY(open_slot(c, ch, i));
    NCCL_CALL(c, ch->comm, peer, "first ncclGroupEnd", greet_pair(c, ch));
    return join(c, ch->stream);
}

/* After the pairs, and of as many multiprocessors as the library likes: nothing else runs while gradients are added. */
static tp_status
open_twins(nccl_comm *c)
{
    nccl_twins *twins = &c->twins;
    nc_config config = NC_CONFIG(NC_UNDEFINED);
    int rank = c->base.comm.rank;
    if (c->replicas == 1)
        return TP_OK;
    c->fresh = NULL;
    NCCL_CALL(c, c->world, NCCL_EVERYBODY, "ncclCommSplit of replicas",
              c->nccl->split(c->world, rank % c->ring, rank / c->ring, &c->fresh, &config));
    pthread_mutex_lock(&c->lock);
    twins->comm = c->fresh;
    pthread_mutex_unlock(&c->lock);
    TP_TRY(tp_nccl_finish(c, NC_SUCCESS, twins->comm, NCCL_EVERYBODY, "ncclCommSplit of replicas"));
    TP_TRY(tp_cuda_stream_create(c->base.device, 1, &twins->stream));
    TP_TRY(tp_cuda_alloc(c->base.device, 2 * (size_t)c->replicas, "messages that connect replicas", &twins->hello));
    NCCL_CALL(c, twins->comm, NCCL_EVERYBODY, "first ncclGroupEnd of replicas", greet_twins(c));
    return join(c, twins->stream);
}

static tp_status
open_events(nccl_comm *c)
{
    TP_TRY(tp_cuda_event_create(c->base.device, 0, &c->exchanges.ready));
    for (int i = 0; i < NCCL_EXCHANGES; i++)
        TP_TRY(tp_cuda_event_create(c->base.device, 0, &c->exchanges.done[i]));
    return TP_OK;
}

tp_status
tp_nccl_meet(nccl_comm *c)
{
    nc_config config = NC_CONFIG(c->max_ctas);
    nc_id id;
    TP_TRY(tp_cuda_bind(c->base.device));
    TP_TRY(introduce(c, &id));
    TP_TRY(open_events(c));
    int result = c->nccl->init(&c->world, c->base.comm.ranks, id, c->base.comm.rank, &config);
    TP_TRY(tp_nccl_finish(c, result, c->world, NCCL_EVERYBODY, "ncclCommInitRankConfig"));
    for (int class = 0; class < NCCL_CLASSES; class++)
        for (int direction = NCCL_DOWN; direction <= NCCL_UP; direction++)
            TP_TRY(open_class(c, class, direction));
    TP_TRY(open_twins(c));
    c->watching = pthread_create(&c->thread, NULL, tp_nccl_watch, c) == 0;
    return c->watching ? TP_OK : tp_fail(TP_ERUNTIME, "the thread that watches NCCL could not be started");
}

/* ---- closing ------------------------------------------------------------------------------------------------------------------ */

static void
close_channel(nccl_comm *c, nccl_channel *ch)
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

static void
close_twins(nccl_comm *c)
{
    nccl_exchanges *e = &c->exchanges;
    tp_cuda_event_destroy(c->base.device, e->ready);
    for (int i = 0; i < NCCL_EXCHANGES; i++)
        tp_cuda_event_destroy(c->base.device, e->done[i]);
    *e = (nccl_exchanges){0};
    if (c->twins.comm != NULL)
        c->nccl->destroy(c->twins.comm);
    tp_cuda_free(c->base.device, c->twins.hello);
    tp_cuda_stream_destroy(c->base.device, c->twins.stream);
    c->twins = (nccl_twins){0};
}

/* No other thread is left. */
static void
finalize(nccl_comm *c, nc_comm comm, int peer)
{
    if (comm != NULL && !c->aborted && tp_nccl_finish(c, c->nccl->finalize(comm), comm, peer, "ncclCommFinalize") != TP_OK)
        tp_nccl_abort(c);
}

void
tp_nccl_part(tp_cuda_comm *base)
{
    nccl_comm *c = (nccl_comm *)base;
    pthread_mutex_lock(&c->lock);
    c->ending = 1;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    if (c->watching)
        pthread_join(c->thread, NULL);
    c->watching = 0;
    for (int i = 0; i < c->channels && !c->aborted; i++) {
        nccl_channel *ch = &c->channel[i];
        for (int k = 0; k < TP_NCCL_SLOTS; k++)
            if (ch->handle[k] != NULL)
                c->nccl->deregister_buffer(ch->comm, ch->handle[k]);
        finalize(c, ch->comm, ch->peer);
    }
    finalize(c, c->twins.comm, NCCL_EVERYBODY);
    /* Copies from and to the slots may wait still; ncclMemFree, unlike cudaFree, does not wait for them. No message is left that
     * could hold them up. */
    (void)!tp_cuda_synchronize(c->base.device, c->base.compute);
    for (int i = 0; i < c->channels; i++)
        close_channel(c, &c->channel[i]);
    c->channels = 0;
    close_twins(c);
    finalize(c, c->world, NCCL_EVERYBODY);
    if (c->world != NULL)
        c->nccl->destroy(c->world);
    c->world = NULL;
}
