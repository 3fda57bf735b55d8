/* Making and ending communicators: all ranks join one, then split it, in the same order, into pairs and groups of twins
 * (and ranks alone, which are in no pair of that split). */
#include "cuda/nccl_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/comm/region.h"

#define SLOT_ALIGN 4096 /* NCCL registers whole pages (register.cc): of none two channels' slots */

/* Lines that share no rank are made at the same time: put a line in the first class in which neither of its ranks is. */
static tp_status
put_in_class(nccl_comm *c, uint32_t *taken, nccl_line *line)
{
    while (line->class < NCCL_CLASSES && (taken[line->from] | taken[line->to]) >> line->class & 1)
        line->class++;
    if (line->class == NCCL_CLASSES)
        return tp_fail(TP_EVALUE, "rank %d or %d talks with too many ranks: fewer than %d would be right", line->from, line->to,
                       NCCL_CLASSES / 2);
    taken[line->from] |= 1u << line->class;
    taken[line->to] |= 1u << line->class;
    c->classes = line->class < c->classes ? c->classes : line->class + 1;
    return TP_OK;
}

static tp_status
draw_lines(nccl_comm *c, const uint8_t *pairs, uint32_t *taken)
{
    int ranks = c->base.comm.ranks;
    for (int keeps = 0; keeps < 2; keeps++)
        for (int from = 0; from < ranks; from++)
            for (int to = 0; to < ranks; to++) {
                if (from == to || !(pairs[from * ranks + to] & (keeps ? TP_NCCL_KEEPS : TP_NCCL_FLOWS)))
                    continue;
                nccl_line *line = &c->line[c->lines++];
                *line = (nccl_line){from, to, keeps, 0};
                TP_TRY(put_in_class(c, taken, line));
            }
    return TP_OK;
}

tp_status
tp_nccl_draw(nccl_comm *c, const uint8_t *pairs)
{
    int ranks = c->base.comm.ranks, most = 0, own = 0;
    for (int i = 0; i < ranks * ranks; i++)
        most += (pairs[i] & TP_NCCL_FLOWS ? 1 : 0) + (pairs[i] & TP_NCCL_KEEPS ? 1 : 0);
    c->line = calloc((size_t)most + 1, sizeof *c->line);
    uint32_t *taken = calloc((size_t)ranks, sizeof *taken);
    tp_status status = c->line == NULL || taken == NULL ? tp_fail(TP_EMEMORY, "no memory for %d pairs of ranks", most) : TP_OK;
    if (status == TP_OK)
        status = draw_lines(c, pairs, taken);
    free(taken);
    TP_TRY(status);
    for (int i = 0; i < c->lines; i++)
        own += c->line[i].from == c->base.comm.rank || c->line[i].to == c->base.comm.rank;
    c->channel = calloc(2 * (size_t)own + 1, sizeof *c->channel);
    return c->channel != NULL ? TP_OK : tp_fail(TP_EMEMORY, "no memory for %d channels", 2 * own);
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

/* Keep why slots are plain memory, where messages are only slower, for tp_comm_ops.caveat. */
static void
keep_reason(nccl_comm *c, const char *what, const char *why)
{
    if (*c->plain == 0)
        snprintf(c->plain, sizeof c->plain, "messages go through buffers that NCCL copies from and to (%s: %s)", what, why);
}

/* Allocate the slots of all channels at once: ncclMemAlloc gives a multiple of 2 MiB, and where GPUs have a switch, in versions
 * before 2.29 (allocator.cc; 2.19: init.cc), of the multicast granularity that CUDA recommends, up to 512 MiB. Memory that NCCL can
 * read and write by itself if possible, else plain device memory. */
static tp_status
open_memory(nccl_comm *c)
{
    const tp_nccl *nccl = c->nccl;
    int own = 0;
    for (int i = 0; i < c->lines; i++)
        own += !c->line[i].keeps && (c->line[i].from == c->base.comm.rank || c->line[i].to == c->base.comm.rank);
    c->slot_bytes = (c->base.message_bytes + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN;
    size_t bytes = 2 * (size_t)own * (size_t)c->slots * c->slot_bytes;
    if (bytes == 0)
        return TP_OK;
    if (nccl->mem_alloc != NULL && nccl->mem_free != NULL) {
        int result = nccl->mem_alloc(&c->memory, bytes);
        c->from_nccl = result == NC_SUCCESS && c->memory != NULL;
        if (c->from_nccl)
            return TP_OK;
        keep_reason(c, "ncclMemAlloc", result == NC_SUCCESS ? "it gave nothing" : nccl->error_string(result));
        c->memory = NULL;
    } else {
        keep_reason(c, "ncclMemAlloc", "not in this NCCL");
    }
    return tp_cuda_alloc(c->base.device, bytes, "the buffers for messages", &c->memory);
}

/* ncclCommRegister leaves the communicator as it was where it refuses (NCCL 2.28, register.cc), and gives no handle where it is
 * switched off (NCCL_LOCAL_REGISTER=0). A communicator that is broken shows at its next call. */
static void
register_slots(nccl_comm *c, nccl_channel *ch)
{
    const tp_nccl *nccl = c->nccl;
    if (nccl->register_buffer == NULL || nccl->deregister_buffer == NULL) {
        keep_reason(c, "ncclCommRegister", "not in this NCCL");
        return;
    }
    pthread_mutex_lock(&c->lock);
    int result = c->aborted ? NC_SUCCESS
                            : nccl->register_buffer(ch->comm, ch->slot[0], (size_t)c->slots * c->slot_bytes, &ch->handle);
    pthread_mutex_unlock(&c->lock);
    if (result != NC_SUCCESS && result != NC_IN_PROGRESS)
        ch->handle = NULL;
    if (ch->handle == NULL && result != NC_IN_PROGRESS)
        keep_reason(c, "ncclCommRegister", result == NC_SUCCESS ? "it is switched off (NCCL_LOCAL_REGISTER)"
                                                                : nccl->error_string(result));
}

/* With the lock held: exchange a byte with that rank of the communicator, which connects the two. */
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
        result = say_hello(c, ch->comm, ch->stream, ch->other, ch->slot[0], (char *)ch->slot[0] + 1);
    int ended = c->nccl->group_end();
    return result != NC_SUCCESS ? result : ended;
}

static int
greet_twins(nccl_comm *c)
{
    nccl_twins *twins = &c->twins;
    int result = c->nccl->group_start(), self = nccl_twin_number(c, c->base.comm.rank);
    for (int other = 0; other < twins->members && result == NC_SUCCESS; other++)
        if (other != self)
            result = say_hello(c, twins->comm, twins->stream, other, (char *)twins->hello + other,
                               (char *)twins->hello + twins->members + other);
    int ended = c->nccl->group_end();
    return result != NC_SUCCESS ? result : ended;
}

/* Order later work of the compute stream after all work that `stream` has now. */
static tp_status
join(nccl_comm *c, tp_stream stream)
{
    TP_TRY(tp_cuda_event_record(c->base.device, c->exchanges.ready, stream));
    return tp_cuda_event_wait(c->base.device, c->exchanges.ready, c->base.compute);
}

/* Open a channel for guests, which are sent from and received into the stages' memory: there is no room for copies. */
static tp_status
open_guests(nccl_comm *c, nccl_channel *ch)
{
    TP_TRY(tp_cuda_alloc(c->base.device, 2, "messages that connect ranks", &ch->slot[0]));
    TP_TRY(tp_cuda_event_create(c->base.device, 0, &ch->ready));
    for (int i = 0; i < NCCL_GUESTS; i++)
        TP_TRY(tp_cuda_event_create(c->base.device, 0, &ch->done[i]));
    return TP_OK;
}

static tp_status
open_slots(nccl_comm *c, nccl_channel *ch)
{
    for (int i = 0; i < c->slots; i++) {
        ch->slot[i] = (char *)c->memory + (size_t)c->slots_taken++ * c->slot_bytes;
        TP_TRY(tp_cuda_event_create(c->base.device, 0, &ch->filled[i]));
        TP_TRY(tp_cuda_event_create(c->base.device, 0, &ch->freed[i]));
    }
    register_slots(c, ch);
    return tp_nccl_finish(c, NC_SUCCESS, ch->comm, ch->peer, "ncclCommRegister");
}

/* This rank's line of the class; -1: it has none. */
static int
line_in(const nccl_comm *c, int class)
{
    int rank = c->base.comm.rank;
    for (int i = 0; i < c->lines; i++)
        if (c->line[i].class == class && (c->line[i].from == rank || c->line[i].to == rank))
            return i;
    return -1;
}

/* End the communicator that the last split made for this rank alone, when no greeting of an earlier class is on the device any more:
 * a communicator that is destroyed gives memory back, which waits for the device's kernels (cudaFree), and a greeting for a rank that
 * may have died. */
static tp_status
end_alone(nccl_comm *c)
{
    pthread_mutex_lock(&c->lock);
    c->alone = c->fresh;
    pthread_mutex_unlock(&c->lock);
    TP_TRY(tp_nccl_finish(c, NC_SUCCESS, c->alone, NCCL_EVERYBODY, "ncclCommSplit"));
    NCCL_CALL(c, c->alone, NCCL_EVERYBODY, "ncclCommFinalize", c->nccl->finalize(c->alone));
    TP_TRY(tp_cuda_event_record(c->base.device, c->exchanges.ready, c->base.compute));
    TP_TRY(tp_nccl_await_event(c, c->exchanges.ready, "first messages"));
    pthread_mutex_lock(&c->lock);
    if (c->alone != NULL)
        c->nccl->destroy(c->alone);
    c->alone = NULL;
    pthread_mutex_unlock(&c->lock);
    return TP_OK;
}

/* Make the channels of a class in one direction. All ranks split the world in the same order; a rank without a line in the class
 * gets a communicator of its own and ends it at once. (Without a color, for no communicator, it would end by SIGSEGV where the split
 * fails, as it does when a rank dies meanwhile: NCCL 2.29.7, init.cc, ncclCommInitRankFunc, at "fail".) The first operation between
 * two ranks connects them and returns only when the other end has called it, too: so it is made here, where both ends call it, and
 * not in a step, where a receive is posted long before its send. Lines of a class share no rank, so ranks cannot wait for each other
 * in a ring. */
static tp_status
open_class(nccl_comm *c, int class, int direction)
{
    int rank = c->base.comm.rank, i = line_in(c, class);
    const nccl_line *line = i < 0 ? NULL : &c->line[i];
    int second = line != NULL && line->to == rank;
    nc_config config = NC_CONFIG(c->max_ctas);
    c->fresh = NULL;
    NCCL_CALL(c, c->world, NCCL_EVERYBODY, "ncclCommSplit",
              c->nccl->split(c->world, line != NULL ? i : c->lines + rank, second, &c->fresh, &config));
    if (line == NULL)
        return end_alone(c);
    nccl_channel *ch = &c->channel[c->channels];
    int peer = second ? line->from : line->to;
    pthread_mutex_lock(&c->lock);
    *ch = (nccl_channel){.comm = c->fresh, .peer = peer, .other = !second, .sends = (direction == NCCL_DOWN) != second,
                         .up = direction == NCCL_UP, .keeps = line->keeps};
    c->channels++;
    pthread_mutex_unlock(&c->lock);
    TP_TRY(tp_nccl_finish(c, NC_SUCCESS, ch->comm, peer, "ncclCommSplit"));
    TP_TRY(tp_cuda_stream_create(c->base.device, 1, &ch->stream));
    TP_TRY(ch->keeps ? open_guests(c, ch) : open_slots(c, ch));
    NCCL_CALL(c, ch->comm, peer, "first ncclGroupEnd", greet_pair(c, ch));
    return join(c, ch->stream);
}

/* Make the twins' communicator, after the pairs'. It may use as many multiprocessors as NCCL likes: nothing else runs while
 * gradients are summed. */
static tp_status
open_twins(nccl_comm *c)
{
    nccl_twins *twins = &c->twins;
    nc_config config = NC_CONFIG(NC_UNDEFINED);
    int rank = c->base.comm.rank;
    twins->members = c->base.comm.ranks / c->ring * c->copies;
    if (twins->members == 1)
        return TP_OK;
    c->fresh = NULL;
    NCCL_CALL(c, c->world, NCCL_EVERYBODY, "ncclCommSplit of replicas",
              c->nccl->split(c->world, nccl_twin_group(c, rank), nccl_twin_number(c, rank), &c->fresh, &config));
    pthread_mutex_lock(&c->lock);
    twins->comm = c->fresh;
    pthread_mutex_unlock(&c->lock);
    TP_TRY(tp_nccl_finish(c, NC_SUCCESS, twins->comm, NCCL_EVERYBODY, "ncclCommSplit of replicas"));
    TP_TRY(tp_cuda_stream_create(c->base.device, 1, &twins->stream));
    TP_TRY(tp_cuda_alloc(c->base.device, 2 * (size_t)twins->members, "messages that connect replicas", &twins->hello));
    NCCL_CALL(c, twins->comm, NCCL_EVERYBODY, "first ncclGroupEnd of replicas", greet_twins(c));
    return join(c, twins->stream);
}

static tp_status
open_events(nccl_comm *c)
{
    TP_TRY(tp_cuda_event_create(c->base.device, 0, &c->exchanges.ready));
    for (int i = 0; i < NCCL_EXCHANGES; i++)
        TP_TRY(tp_cuda_event_create(c->base.device, 0, &c->exchanges.done[i]));
    for (int i = 0; i < NCCL_MARKS; i++)
        TP_TRY(tp_cuda_event_create(c->base.device, 0, &c->marks.event[i]));
    return TP_OK;
}

/* Tell the device how many multiprocessors may be held by waiting kernels: receives are posted long before their messages are sent
 * and wait on the device, and so may, for each pair, one receive of a guest. */
static void
hold(const nccl_comm *c)
{
    int receives = 0;
    for (int i = 0; i < c->channels; i++)
        receives += !c->channel[i].sends;
    tp_cuda_hold(c->base.device, receives * c->max_ctas);
}

tp_status
tp_nccl_meet(nccl_comm *c)
{
    nc_config config = NC_CONFIG(c->max_ctas);
    nc_id id;
    TP_TRY(tp_cuda_bind(c->base.device));
    TP_TRY(introduce(c, &id));
    TP_TRY(open_events(c));
    TP_TRY(open_memory(c));
    int result = c->nccl->init(&c->world, c->base.comm.ranks, id, c->base.comm.rank, &config);
    TP_TRY(tp_nccl_finish(c, result, c->world, NCCL_EVERYBODY, "ncclCommInitRankConfig"));
    for (int class = 0; class < c->classes; class++)
        for (int direction = NCCL_DOWN; direction <= NCCL_UP; direction++)
            TP_TRY(open_class(c, class, direction));
    TP_TRY(open_twins(c));
    hold(c);
    c->watching = pthread_create(&c->thread, NULL, tp_nccl_watch, c) == 0;
    return c->watching ? TP_OK : tp_fail(TP_ERUNTIME, "the thread that watches NCCL could not be started");
}

/* ---- closing ----------------------------------------------------------------------------------------------------- */

static void
close_channel(nccl_comm *c, nccl_channel *ch)
{
    for (int i = 0; i < c->slots; i++) {
        tp_cuda_event_destroy(c->base.device, ch->filled[i]);
        tp_cuda_event_destroy(c->base.device, ch->freed[i]);
    }
    for (int i = 0; i < NCCL_GUESTS; i++)
        tp_cuda_event_destroy(c->base.device, ch->done[i]);
    tp_cuda_event_destroy(c->base.device, ch->ready);
    if (ch->comm != NULL)
        c->nccl->destroy(ch->comm);
    if (ch->keeps)
        tp_cuda_free(c->base.device, ch->slot[0]);
    tp_cuda_stream_destroy(c->base.device, ch->stream);
}

static void
close_memory(nccl_comm *c)
{
    if (c->from_nccl)
        c->nccl->mem_free(c->memory);
    else
        tp_cuda_free(c->base.device, c->memory);
    c->memory = NULL;
    c->from_nccl = c->slots_taken = 0;
}

static void
close_twins(nccl_comm *c)
{
    nccl_exchanges *e = &c->exchanges;
    tp_cuda_event_destroy(c->base.device, e->ready);
    for (int i = 0; i < NCCL_EXCHANGES; i++)
        tp_cuda_event_destroy(c->base.device, e->done[i]);
    *e = (nccl_exchanges){0};
    for (int i = 0; i < NCCL_MARKS; i++)
        tp_cuda_event_destroy(c->base.device, c->marks.event[i]);
    c->marks = (nccl_marks){0};
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
    if (tp_region_is_aborted(c->base.region))
        tp_nccl_abort(c); /* a call may be under way, as when ranks meet: until it ends a communicator takes no other */
    for (int i = 0; i < c->channels && !c->aborted; i++) {
        nccl_channel *ch = &c->channel[i];
        if (ch->handle != NULL)
            c->nccl->deregister_buffer(ch->comm, ch->handle);
        finalize(c, ch->comm, ch->peer);
    }
    finalize(c, c->twins.comm, NCCL_EVERYBODY);
    /* Copies from and to the slots may wait still; ncclMemFree, unlike cudaFree, does not wait for them. No message is left that
     * could hold them up. */
    (void)!tp_cuda_synchronize(c->base.device, c->base.compute);
    for (int i = 0; i < c->channels; i++)
        close_channel(c, &c->channel[i]);
    c->channels = 0;
    close_memory(c);
    tp_cuda_hold(c->base.device, 0);
    close_twins(c);
    finalize(c, c->world, NCCL_EVERYBODY);
    if (c->world != NULL)
        c->nccl->destroy(c->world);
    c->world = NULL;
}
