/* Messages over MPI. Each begins with an envelope, {tag, bytes}, that carries the payload too where it is short; a longer one
 * follows by itself. Envelopes are what keeps order and is checked; the payload's MPI tag is a hash of the envelope, so that
 * the payload of another message does not land where this one's is awaited.
 *
 * MPI_Send of a long message returns when it has been received: a pipeline whose ranks compute meanwhile would stand still.
 * So messages go out of an outbox, into which they are copied, as long as they fit; longer ones go from where they are. And
 * MPI moves messages only while somebody is in it, on both sides: a thread looks in every now and then while this rank is
 * elsewhere. */
#include "csrc/comm/mpi.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "csrc/base/clock.h"
#include "csrc/comm/mpi_inbox.h"
#include "csrc/comm/mpi_outbox.h"
#include "csrc/comm/region.h"

#define ENVELOPE TP_ENVELOPE
#define INLINE   TP_ENVELOPE_INLINE
#define SPIN_NS  50000 /* a wait looks without a pause at first, */
#define FLUSH_NS 20000 /* between looks at the end */
#define LONG_NAP_NS 200000 /* then between naps, the longer the longer it waits: other ranks may need this core */
#define OUT_NS   100000 /* between two looks of the thread while an outbox holds anything, */
#define IN_NS    400000 /* while a receive is posted */
#define IDLE_NS  1000000 /* and while neither is */
#define WORD_NS  1000000000ll /* for the word on why MPI failed */

typedef tp_envelope_head header;

typedef struct {
    tp_inbox inbox;
    tp_outbox outbox;
} mpi_link;

typedef struct {
    tp_comm base; /* first: a tp_comm * is an mpi_comm * */
    tp_comm *control;
    tp_region *region;
    tp_wire wire;
    size_t outbox_bytes;
    pid_t owner;
    pthread_mutex_t lock; /* of MPI, and of all that follows */
    pthread_t thread;
    int open, helped; /* there is the wire; the thread */
    _Atomic int closing, wanted; /* by the rank: the lock, which the thread would else take again before it wakes */
    unsigned char envelope[ENVELOPE]; /* of what does not go through an outbox */
    mpi_link *link;                   /* [ranks] */
} mpi_comm;

/* What a call waits for. */
typedef struct {
    int to; /* -1: it sends nothing */
    uint64_t tag;
    size_t bytes, need; /* room in the outbox; 0: it goes from where it is */
    tp_wire_request part[2];
    int from; /* -1: it receives nothing */
} transfer;

/* Of this process, whose MPI is used up by either. */
static int stuck;   /* a message of ours is under way for ever, in memory that is no longer ours */
static int untaken; /* some message, by us or by others: MPI would end the process that frees it */

/* If a rank is lost, MPI may see it before the word on why has come. */
static tp_status
heard(const mpi_comm *c, tp_status status)
{
    int64_t until = tp_clock_ns() + WORD_NS;
    while (status != TP_OK && tp_clock_ns() < until) {
        TP_TRY(tp_comm_check_abort(&c->base, c->region));
        tp_clock_sleep_until(tp_clock_ns() + 1000000);
    }
    return status;
}

/* ---- sending ---------------------------------------------------------------------------------------------- */

static int
payload_tag(const mpi_comm *c, uint64_t tag, size_t bytes)
{
    uint64_t mixed = (tag ^ (uint64_t)bytes * 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    return TP_PAYLOADS + (int)((mixed >> 33) % (uint64_t)(c->wire.most_tag - TP_PAYLOADS));
}

/* envelope: room for it, payload included where that is short; both stay until the parts are done. */
static tp_status
start_parts(const mpi_comm *c, const transfer *t, unsigned char *envelope, const void *payload, tp_wire_request part[2])
{
    header head = {t->tag, t->bytes};
    size_t with = t->bytes <= INLINE ? t->bytes : 0;
    part[0] = part[1] = (tp_wire_request){0};
    memcpy(envelope, &head, sizeof head);
    if (with > 0)
        memcpy(envelope + sizeof head, payload, with);
    TP_TRY(tp_wire_send(&c->wire, t->to, TP_ENVELOPES, envelope, sizeof head + with, &part[0]));
    return with == t->bytes ? TP_OK
                            : tp_wire_send(&c->wire, t->to, payload_tag(c, t->tag, t->bytes), payload, t->bytes, &part[1]);
}

/* There is room. */
static tp_status
put(mpi_comm *c, const transfer *t, const void *data)
{
    tp_wire_request *parts;
    unsigned char *at = tp_outbox_put(&c->link[t->to].outbox, t->need, &parts);
    if (t->bytes > INLINE)
        memcpy(at + TP_LINE, data, t->bytes);
    return start_parts(c, t, at, t->bytes > INLINE ? at + TP_LINE : data, parts);
}

/* ---- waiting ---------------------------------------------------------------------------------------------- */

/* Nothing has moved: the abort, the deadline, or a pause. */
static tp_status
pause_for(const mpi_comm *c, const transfer *t, int sent, int64_t since)
{
    int64_t timeout = c->base.timeout_ns, waited = tp_clock_ns() - since;
    TP_TRY(tp_comm_check_abort(&c->base, c->region));
    if (timeout > 0 && waited >= timeout) {
        const tp_inbox_receive *r = sent ? tp_inbox_oldest(&c->link[t->from].inbox) : NULL;
        return tp_comm_too_late(&c->base, c->region, r ? t->from : t->to, r != NULL, r ? r->tag : t->tag, 0, r ? r->bytes : t->bytes);
    }
    int64_t nap = waited / 16 > LONG_NAP_NS ? LONG_NAP_NS : waited / 16;
    tp_region_await(c->region, c->base.rank, sent ? t->from : t->to);
    if (waited > SPIN_NS)
        nanosleep(&(struct timespec){0, nap}, NULL);
    tp_region_await_no_more(c->region, c->base.rank);
    return TP_OK;
}

static tp_status
drive(mpi_comm *c, transfer *t)
{
    int64_t since = 0;
    for (;;) {
        int sent = 1, came = 1;
        if (t->to >= 0)
            TP_TRY(heard(c, t->need > 0 ? tp_outbox_find_room(&c->link[t->to].outbox, t->need, &sent)
                                        : tp_outbox_test(t->part, &sent)));
        if (t->from >= 0)
            TP_TRY(heard(c, tp_inbox_test(&c->link[t->from].inbox, &came)));
        if (sent && came)
            return TP_OK;
        if (since == 0)
            since = tp_clock_ns();
        TP_TRY(pause_for(c, t, sent, since));
    }
}

/* ---- the thread ------------------------------------------------------------------------------------------- */

/* Gives how long the next look may wait, ns. Errors are reported by the call that waits for the message. */
static int64_t
look_in_passing(mpi_comm *c)
{
    int done = 1;
    int64_t nap = IDLE_NS;
    if (stuck) /* what MPI would move may be into memory that is gone */
        return nap;
    for (int peer = 0; peer < c->base.ranks; peer++) {
        mpi_link *l = &c->link[peer];
        (void)!tp_outbox_collect(&l->outbox);
        if (l->inbox.count > 0)
            (void)!tp_inbox_test(&l->inbox, &done);
        if (l->inbox.count > 0 && !done && tp_inbox_oldest(&l->inbox)->come)
            return 0; /* its payload comes in pieces, and the next can be moved at once */
        if (l->outbox.count > 0)
            nap = OUT_NS;
        else if (l->inbox.count > 0 && nap > IN_NS)
            nap = IN_NS;
    }
    tp_wire_look(&c->wire);
    return nap;
}

static void *
help(void *argument)
{
    mpi_comm *c = argument;
    while (!atomic_load_explicit(&c->closing, memory_order_relaxed)) {
        int64_t nap = IN_NS;
        if (!atomic_load(&c->wanted) && pthread_mutex_trylock(&c->lock) == 0) { /* else the rank looks itself */
            for (nap = 0; nap == 0 && !atomic_load(&c->wanted) && !atomic_load(&c->closing);)
                nap = look_in_passing(c);
            pthread_mutex_unlock(&c->lock);
        }
        if (nap > 0)
            nanosleep(&(struct timespec){0, nap}, NULL);
    }
    return NULL;
}

/* ---- the vtable ------------------------------------------------------------------------------------------- */

static void
take_lock(mpi_comm *c)
{
    atomic_store(&c->wanted, 1);
    pthread_mutex_lock(&c->lock);
    atomic_store(&c->wanted, 0);
}

/* With the lock on success. */
static tp_status
begin(mpi_comm *c, int peer)
{
    TP_TRY(tp_comm_check_owner(c->owner));
    TP_TRY(tp_comm_check_peer(&c->base, peer));
    TP_TRY(tp_comm_check_abort(&c->base, c->region));
    if (stuck)
        return tp_fail(TP_ETIMEOUT, "rank %d has an earlier message that was never taken: none can follow it", c->base.rank);
    if (c->link[peer].inbox.cut)
        return tp_comm_cut(&c->base, peer, 1, 0, 0, 0, 0);
    take_lock(c);
    return TP_OK;
}

static tp_status
leave(mpi_comm *c, tp_status status)
{
    pthread_mutex_unlock(&c->lock);
    return status;
}

/* It is done with, well or not (driven: how it went). */
static tp_status
take_oldest(mpi_comm *c, int peer, tp_status driven)
{
    tp_inbox *box = &c->link[peer].inbox;
    header sent;
    char why[1024];
    if (box->count == 0 || (driven == TP_OK && tp_inbox_take(box)))
        return driven;
    const tp_inbox_receive expected = *tp_inbox_oldest(box);
    snprintf(why, sizeof why, "%s", tp_error_message()); /* others may fail on the way */
    memcpy(&sent, expected.slot, sizeof sent);
    untaken |= driven == TP_OK;
    tp_inbox_drop(box, &stuck);
    return driven != TP_OK ? tp_fail(driven, "%s", why)
                           : tp_comm_wrong_message(&c->base, peer, sent.tag, sent.bytes, expected.tag, expected.bytes);
}

/* Wait for what has begun well. Otherwise the caller has its memory back though MPI may read it still. */
static tp_status
complete(mpi_comm *c, tp_status begun, transfer *t)
{
    tp_status status = begun == TP_OK ? drive(c, t) : begun;
    if (t->from >= 0)
        status = take_oldest(c, t->from, status);
    stuck |= t->part[0].live || t->part[1].live;
    return status;
}

static tp_status
mpi_send(tp_comm *comm, int peer, uint64_t tag, const void *data, size_t bytes)
{
    mpi_comm *c = (mpi_comm *)comm;
    transfer t = {.to = peer, .from = -1, .tag = tag, .bytes = bytes};
    TP_TRY(begin(c, peer));
    if (bytes > c->outbox_bytes - TP_LINE) {
        tp_status begun = heard(c, start_parts(c, &t, c->envelope, data, t.part));
        return leave(c, complete(c, begun, &t));
    }
    t.need = TP_LINE + tp_outbox_lines(bytes);
    tp_status status = tp_outbox_open(&c->link[peer].outbox, c->outbox_bytes);
    if (status == TP_OK)
        status = drive(c, &t);
    if (status == TP_OK)
        status = heard(c, put(c, &t, data));
    return leave(c, status);
}

static tp_status
mpi_reserve(tp_comm *comm, int peer, unsigned posted)
{
    mpi_comm *c = (mpi_comm *)comm;
    TP_TRY(begin(c, peer));
    tp_status status = tp_outbox_open(&c->link[peer].outbox, c->outbox_bytes); /* who receives from a rank sends to it */
    while (status == TP_OK && c->link[peer].inbox.room < posted)
        status = tp_inbox_more_room(&c->link[peer].inbox, comm);
    return leave(c, status);
}

static tp_status
post(mpi_comm *c, int peer, uint64_t tag, void *data, size_t bytes)
{
    const tp_inbox_receive wanted = {.tag = tag, .data = data, .bytes = bytes};
    return tp_inbox_post(&c->link[peer].inbox, &c->base, &c->wire, peer, payload_tag(c, tag, bytes), &wanted);
}

static tp_status
mpi_recv_post(tp_comm *comm, int peer, uint64_t tag, void *data, size_t bytes)
{
    mpi_comm *c = (mpi_comm *)comm;
    TP_TRY(begin(c, peer));
    return leave(c, heard(c, post(c, peer, tag, data, bytes)));
}

static tp_status
mpi_recv_wait(tp_comm *comm, int peer)
{
    mpi_comm *c = (mpi_comm *)comm;
    transfer t = {.to = -1, .from = peer};
    TP_TRY(tp_comm_check_posted(comm, peer, peer < 0 || peer >= comm->ranks ? 0 : c->link[peer].inbox.count));
    TP_TRY(begin(c, peer));
    return leave(c, complete(c, TP_OK, &t));
}

static tp_status
mpi_exchange(tp_comm *comm, int peer, uint64_t tag, const void *out_data, size_t out_bytes, void *in_data, size_t in_bytes)
{
    mpi_comm *c = (mpi_comm *)comm;
    transfer t = {.to = peer, .from = peer, .tag = tag, .bytes = out_bytes};
    TP_TRY(tp_comm_check_peer(comm, peer));
    TP_TRY(tp_comm_check_idle(comm, peer, c->link[peer].inbox.count));
    TP_TRY(begin(c, peer));
    tp_status status = post(c, peer, tag, in_data, in_bytes);
    if (status == TP_OK)
        status = start_parts(c, &t, c->envelope, out_data, t.part);
    return leave(c, complete(c, heard(c, status), &t));
}

static tp_status
mpi_allgather(tp_comm *comm, const void *mine, size_t bytes, void *all)
{
    tp_comm *control = ((mpi_comm *)comm)->control;
    return control->ops->allgather(control, mine, bytes, all);
}

/* ---- opening and closing ---------------------------------------------------------------------------------- */

/* What is in an outbox goes, as long as a send may take; unless the run has failed. */
static void
flush_outbox(mpi_comm *c, mpi_link *l)
{
    int64_t timeout = c->base.timeout_ns, until = timeout > 0 ? tp_clock_ns() + timeout : INT64_MAX;
    while (l->outbox.count > 0 && !stuck) {
        tp_status status = tp_outbox_collect(&l->outbox);
        if (l->outbox.count > 0 && status == TP_OK)
            tp_clock_sleep_until(tp_clock_ns() + FLUSH_NS);
        stuck |= l->outbox.count > 0 &&
                 (status != TP_OK || tp_clock_ns() > until || tp_comm_check_abort(&c->base, c->region) != TP_OK);
    }
}

/* Whether all ranks may free what is MPI's: all do, or none. MPI may wait for the others in that; and it ends a process that
 * frees a communicator, or MPI, over a message that nobody took. */
static int
agree(mpi_comm *c)
{
    size_t ranks = (size_t)c->base.ranks;
    unsigned char *good = calloc(ranks, 1), mine = good != NULL && !stuck && !untaken;
    int all = good != NULL && !c->base.alone && mpi_allgather(&c->base, &mine, 1, good) == TP_OK && memchr(good, 0, ranks) == NULL;
    untaken |= !all;
    free(good);
    return all;
}

static void
mpi_withdraw(tp_comm *comm)
{
    mpi_comm *c = (mpi_comm *)comm;
    if (c->owner != getpid())
        return;
    take_lock(c);
    for (int peer = 0; peer < comm->ranks; peer++)
        while (c->link[peer].inbox.count > 0)
            tp_inbox_drop(&c->link[peer].inbox, &stuck);
    pthread_mutex_unlock(&c->lock);
}

static void
give_memory(mpi_comm *c)
{
    for (int peer = 0; peer < c->base.ranks; peer++) {
        mpi_link *l = &c->link[peer];
        tp_inbox_close(&l->inbox);
        free(l->outbox.memory);
    }
    free(c->link);
    free(c);
}

/* The thread goes last: what MPI has taken of us may not have left yet, and moves only while somebody looks. */
static void
mpi_close(tp_comm *comm)
{
    mpi_comm *c = (mpi_comm *)comm;
    if (c->owner != getpid()) /* a fork: what is under way is the rank's, and so is MPI */
        return;
    take_lock(c);
    for (int peer = 0; peer < comm->ranks; peer++) {
        flush_outbox(c, &c->link[peer]);
        untaken |= tp_inbox_end(&c->link[peer].inbox, &stuck);
    }
    pthread_mutex_unlock(&c->lock);
    int good = c->open && agree(c);
    atomic_store(&c->closing, 1);
    if (c->helped)
        pthread_join(c->thread, NULL);
    if (good)
        tp_wire_free(&c->wire);
    pthread_mutex_destroy(&c->lock);
    if (!stuck) /* else MPI may use it still */
        give_memory(c);
}

static const tp_comm_ops mpi_ops = {.abi = TP_COMM_ABI,
                                    .name = "mpi",
                                    .send = mpi_send,
                                    .recv_post = mpi_recv_post,
                                    .recv_wait = mpi_recv_wait,
                                    .exchange = mpi_exchange,
                                    .allgather = mpi_allgather,
                                    .close = mpi_close,
                                    .reserve = mpi_reserve,
                                    .withdraw = mpi_withdraw};

/* As all ranks do, which may not come: it ends with the abort and the deadline, too. */
static tp_status
open_wire(mpi_comm *c)
{
    int done = 0;
    uint64_t undo;
    int64_t since = tp_clock_ns();
    tp_wire_request request = {0};
    TP_TRY(heard(c, tp_wire_duplicate(&c->wire, &request, &undo)));
    tp_status status = TP_OK;
    while (status == TP_OK && !done) {
        status = heard(c, tp_wire_test(&request, &done));
        if (status == TP_OK && !done)
            status = tp_comm_check_abort(&c->base, c->region);
        if (status == TP_OK && !done && c->base.timeout_ns > 0 && tp_clock_ns() - since > c->base.timeout_ns)
            status = tp_comm_too_late(&c->base, c->region, -1, 0, 0, 0, 0);
    }
    tp_wire_undo(undo);
    stuck |= !done;
    c->open = status == TP_OK;
    return status == TP_OK ? heard(c, tp_wire_open(&c->wire)) : status;
}

static tp_status
mpi_open(tp_comm *control, tp_region *region, size_t outbox_bytes, tp_comm **out)
{
    mpi_comm *c = calloc(1, sizeof *c);
    mpi_link *links = calloc((size_t)control->ranks, sizeof *links);
    if (c == NULL || links == NULL) {
        free(c);
        free(links);
        return tp_fail(TP_EMEMORY, "no memory for a communicator of %d ranks", control->ranks);
    }
    c->base = (tp_comm){&mpi_ops, control->rank, control->ranks, control->timeout_ns, 0, 0};
    c->control = control;
    c->region = region;
    c->owner = getpid();
    c->outbox_bytes = tp_outbox_lines(outbox_bytes < ENVELOPE ? ENVELOPE : outbox_bytes);
    c->link = links;
    pthread_mutex_init(&c->lock, NULL);
    tp_status status = open_wire(c);
    if (status == TP_OK)
        status = tp_comm_start_thread(&c->thread, help, c);
    c->helped = status == TP_OK;
    if (status != TP_OK) { /* of this rank alone, it may be: the others do not gather with it */
        c->open = 0;
        untaken = 1;
        mpi_close(&c->base);
        return status;
    }
    *out = &c->base;
    return TP_OK;
}

/* ---- what the module gives --------------------------------------------------------------------------------- */

static tp_status
start(int *rank, int *ranks)
{
    if (stuck)
        return tp_fail(TP_ERUNTIME, "an earlier run of this process failed with messages under way in MPI: a new process would "
                                    "be right");
    return tp_wire_start(rank, ranks);
}

static int
finish(void)
{
    if (!stuck && !untaken)
        tp_wire_finish();
    return !stuck && !untaken;
}

static void
attach(tp_fail_function fail_at)
{
    tp_error_mirror(fail_at);
}

const tp_mpi_ops *
tp_mpi(void)
{
    static const tp_mpi_ops ops = {TP_MPI_ABI,      TP_COMM_ABI, sizeof(tp_mpi_ops), attach,
                                   tp_wire_library, start,       mpi_open,           finish};
    return &ops;
}
