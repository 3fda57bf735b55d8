/* Messages over the rings of a region: the same code for threads and for processes.
 *
 * A message is a record of whole cache lines: a line with {tag, bytes} that also holds a payload of up to INLINE bytes
 * (one line to transfer: latency), else the payload follows on its own lines. It moves in chunks that are published one
 * by one, so that the two copies (in by the sender, out by the receiver) overlap and a message may exceed the ring.
 *
 * Of a message that is lent the line holds, in the payload's place, where in the region it lies: the receiver copies it from there,
 * once, and its going past the line says that it has. */
#include "csrc/comm/ring.h"

#include "csrc/base/clock.h"
#include "csrc/base/cpu_relax.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK           TP_PACE_LEAST /* fits the second-level caches of both cores beside the rest */
#define HOT             ((size_t)512 << 10) /* bytes of a ring that stay in a cache while both ends copy */
#define HOLDS           400                 /* looks, some microseconds, at a reader that is about to drain the ring */
#define INLINE          (TP_LINE - sizeof(header))
#define LENT            ((uint64_t)1 << 63) /* among a header's bytes */
#define WORD_NS         250000000 /* for the word on why a message was cut, which is better than that it was */
#define SPIN_NS         20000    /* about what a futex sleep and wake cost together */
#define SPIN_MIDWAY     10       /* times longer within a message: its other end is copying right now */
#define SPIN_CROWDED_NS 500      /* more ranks than cores: the peer needs this core to go on */
#define SLEEP_NS        50000000 /* longest sleep before another look at abort word and deadline */

enum { CUT_BY_WRITER = 1, CUT_BY_READER = 2 }; /* bits of a ring's cut */

/* ---- moving bytes ----------------------------------------------------------------------------------------- */

static int
finished(const transfer *t)
{
    return t->ring == NULL || (t->begun && t->moved == t->bytes);
}

/* Where the next chunk goes, and the room there; 0: the writer had better look again. Memory that was used just now is in a
 * cache, the rest of a large ring is not (3 MB through 4 MB of ring: 5 to 13 GB/s; through its first half megabyte: 20). So
 * beyond HOT the writer goes back to the start as soon as the reader has taken everything, and waits a moment for that if the
 * reader is at work on this very message. */
static size_t
find_room(transfer *t, size_t capacity, uint64_t *head)
{
    uint64_t tail = atomic_load(&t->ring->tail), skip = atomic_load_explicit(&t->ring->skip, memory_order_relaxed);
    size_t at = (size_t)(*head % capacity);
    if (!t->begun)
        t->tail = tail;
    if (at >= HOT && tail == *head) {
        *head += capacity - at;
        atomic_store(&t->ring->skip, *head);
        return capacity;
    }
    if (at >= HOT && at < HOT + CHUNK && tail > t->tail && t->holds++ < HOLDS)
        return 0;
    return capacity - (size_t)(*head - (tail < skip ? skip : tail));
}

/* The line that a message begins with; positions are multiples of a line: never split. */
static void
write_first(transfer *t, unsigned char *line)
{
    header first = {t->tag, t->bytes | (t->lent ? LENT : 0)};
    memcpy(line, &first, sizeof first);
    if (t->lent)
        memcpy(line + sizeof first, &t->lent, sizeof t->lent);
    else if (t->bytes <= INLINE && t->bytes > 0)
        memcpy(line + sizeof first, t->data, t->bytes);
    t->moved = t->lent || t->bytes <= INLINE ? t->bytes : 0;
    t->begun = 1;
}

/* Put the next chunk into the ring if there is room; 1 if anything moved. */
static int
push(const ring_comm *c, transfer *t)
{
    size_t capacity = t->ring->capacity;
    uint64_t head = atomic_load_explicit(&t->ring->head, memory_order_relaxed);
    size_t room = find_room(t, capacity, &head);
    if (room < TP_LINE)
        return 0;
    if (!t->begun) {
        write_first(t, t->ring->data + head % capacity);
        head += TP_LINE;
        room -= TP_LINE;
    }
    size_t now = least(least(t->bytes - t->moved, room), CHUNK);
    if (now > 0) {
        copy_in(t, capacity, head, now);
        t->moved += now;
        head += lines(now); /* only the last chunk is not of whole lines */
    }
    atomic_store(&t->ring->head, head);
    tp_region_ring_bell(t->other, c->shared);
    return 1;
}

/* ECONNECTION: it is another message than the one expected, or lies nowhere, or is the rest of one that was given up here. */
static tp_status
read_first(const ring_comm *c, transfer *t, const unsigned char *line)
{
    header first;
    if (atomic_load_explicit(&t->ring->cut, memory_order_relaxed) & CUT_BY_READER)
        return tp_comm_cut(&c->base, t->peer, 1, 0, 0, 0, 0);
    memcpy(&first, line, sizeof first);
    int lent = (first.bytes & LENT) != 0;
    first.bytes &= ~LENT;
    if (first.tag != t->tag || first.bytes != t->bytes)
        return tp_comm_wrong_message(&c->base, t->peer, first.tag, first.bytes, t->tag, t->bytes);
    if (lent)
        memcpy(&t->lent, line + sizeof first, sizeof t->lent);
    if (lent && (t->lent > c->region->bytes || t->bytes > c->region->bytes - t->lent))
        return tp_fail(TP_ECONNECTION, "rank %d lent rank %d %zu bytes from %llu on, in a region of %llu", t->peer, c->base.rank,
                       t->bytes, (unsigned long long)t->lent, (unsigned long long)c->region->bytes);
    if (lent)
        memcpy(t->data, (const unsigned char *)c->region + t->lent, t->bytes);
    else if (t->bytes <= INLINE && t->bytes > 0)
        memcpy(t->data, line + sizeof first, t->bytes);
    t->moved = lent || t->bytes <= INLINE ? t->bytes : 0;
    t->begun = 1;
    return TP_OK;
}

/* Take the next chunk from the ring if there is one; *moved = 1 if anything moved. */
static tp_status
pull(const ring_comm *c, transfer *t, int *moved)
{
    size_t capacity = t->ring->capacity;
    uint64_t tail = atomic_load_explicit(&t->ring->tail, memory_order_relaxed);
    uint64_t head = atomic_load(&t->ring->head), skip = atomic_load(&t->ring->skip);
    if (skip > tail && head > skip) /* the ring was empty at tail, and what has come since lies behind skip */
        tail = skip;
    size_t held = (size_t)(head - tail);
    if (held < TP_LINE)
        return TP_OK;
    if (!t->begun) {
        TP_TRY(read_first(c, t, t->ring->data + tail % capacity));
        tail += TP_LINE;
        held -= TP_LINE;
    }
    size_t now = least(least(t->bytes - t->moved, held), CHUNK);
    if (now > 0) {
        copy_out(t->ring, capacity, tail, t->data + t->moved, now);
        t->moved += now;
        tail += lines(now);
    }
    atomic_store(&t->ring->tail, tail);
    tp_region_ring_bell(t->other, c->shared);
    *moved = 1;
    return TP_OK;
}

/* ---- waiting ---------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t since; /* of the last progress; 0: not yet waiting */
    int64_t cut;   /* since when it is known that no progress will come */
    int turns, armed;
    uint32_t seen;
} waiting;

static void
waiting_over(const ring_comm *c, waiting *w)
{
    if (w->armed) {
        atomic_store_explicit(&c->self->asleep, 0, memory_order_relaxed);
        tp_region_await_no_more(c->region, c->base.rank + c->first);
    }
    *w = (waiting){0};
}

static tp_status
check_abort(const ring_comm *c)
{
    if (c->halted != NULL && atomic_load_explicit(c->halted, memory_order_relaxed))
        return tp_comm_halted(&c->base);
    return tp_comm_check_abort(&c->base, c->region);
}

/* NULL: an all-gather. */
static const transfer *
unfinished(const transfer *out, const transfer *in)
{
    return in != NULL && !finished(in) ? in : out != NULL && !finished(out) ? out : NULL;
}

static tp_status
too_late(const ring_comm *c, const transfer *out, const transfer *in)
{
    const transfer *t = unfinished(out, in);
    if (t == NULL)
        return tp_comm_too_late(&c->base, c->region, -1, 0, 0, 0, 0);
    return tp_comm_too_late(&c->base, c->region, t->peer, t == in, t->tag, t->moved, t->bytes);
}

static int
midway(const transfer *t)
{
    return t != NULL && t->begun && t->moved < t->bytes;
}

/* Its other end, or this one, has given up a message in the ring in its middle: this one will not come to its end either. */
static int
is_cut(const transfer *t)
{
    return t != NULL && !finished(t) && atomic_load(&t->ring->cut) != 0;
}

/* Call after a look that found nothing to do: spins, then arms the bell (the caller looks once more), then sleeps. */
static tp_status
wait_turn(const ring_comm *c, waiting *w, const transfer *out, const transfer *in)
{
    if (w->since == 0)
        w->since = tp_clock_ns();
    if (!w->armed) {
        tp_cpu_relax();
        int64_t spin_ns = midway(out) || midway(in) ? c->spin_ns * SPIN_MIDWAY : c->spin_ns;
        if (++w->turns % 16 != 0 || tp_clock_ns() - w->since < spin_ns)
            return TP_OK;
        w->seen = atomic_load(&c->self->bell);
        atomic_store(&c->self->asleep, 1);
        const transfer *t = unfinished(out, in);
        tp_region_await(c->region, c->base.rank + c->first, t == NULL ? -1 : t->peer);
        w->armed = 1;
        return check_abort(c);
    }
    const transfer *dead = is_cut(in) ? in : is_cut(out) ? out : NULL;
    if (dead != NULL && w->cut == 0) /* what was written before the cut may have come since the last look */
        w->cut = tp_clock_ns();
    else if (dead != NULL && tp_clock_ns() - w->cut > WORD_NS)
        return tp_comm_cut(&c->base, dead->peer, dead == in, dead->begun, dead->tag, dead->moved, dead->bytes);
    int64_t nap = SLEEP_NS;
    if (c->base.timeout_ns > 0) {
        int64_t left = w->since + c->base.timeout_ns - tp_clock_ns();
        if (left <= 0)
            return too_late(c, out, in);
        nap = left < nap ? left : nap;
    }
    tp_region_sleep(c->self, w->seen, nap, c->shared);
    w->seen = atomic_load(&c->self->bell);
    return check_abort(c);
}

/* Take what has come for posted receives, but none behind `in`, which is older. A posted receive lets its sender finish: two
 * ranks that send to each other through full rings would else wait for ever (the checker's rendezvous proof counts on it). */
static tp_status
take_posted(const ring_comm *c, const transfer *in, int *moved)
{
    for (int peer = 0; peer < c->base.ranks; peer++) {
        receive_queue *queue = c->posted[peer];
        for (unsigned i = 0; queue != NULL && i < queue->count && (in == NULL || in->peer != peer); i++) {
            transfer *t = &queue->items[(queue->first + i) % queue->room];
            int any = 0;
            if (!finished(t))
                TP_TRY(pull(c, t, &any));
            *moved |= any;
            if (!finished(t))
                break;
        }
    }
    return TP_OK;
}

/* What is given up in its middle has another end, which may wait for it. */
static void
cut(const ring_comm *c, tp_status status, const transfer *t, uint32_t by)
{
    if (status == TP_OK || !midway(t))
        return;
    atomic_fetch_or(&t->ring->cut, by);
    tp_region_ring_bell(t->other, c->shared);
}

/* Move `out` and `in` (either may be NULL) to their end, whichever can go on first. */
static tp_status
drive(const ring_comm *c, transfer *out, transfer *in)
{
    waiting w = {0};
    tp_status status = TP_OK;
    for (;;) {
        int moved = 0;
        if (out != NULL && !finished(out))
            moved |= push(c, out);
        if (in != NULL && !finished(in))
            status = pull(c, in, &moved);
        if (status != TP_OK || ((out == NULL || finished(out)) && (in == NULL || finished(in))))
            break;
        if (!moved && (status = take_posted(c, in, &moved)) != TP_OK)
            break;
        if (moved)
            waiting_over(c, &w);
        else if ((status = wait_turn(c, &w, out, in)) != TP_OK)
            break;
    }
    waiting_over(c, &w);
    cut(c, status, out, CUT_BY_WRITER);
    cut(c, status, in, CUT_BY_READER);
    return status;
}

/* ---- the vtable ------------------------------------------------------------------------------------------- */

static tp_status
begin(const ring_comm *c, int peer, int outward, uint64_t tag, const void *data, size_t bytes, transfer *t)
{
    int rank = c->base.rank;
    TP_TRY(tp_comm_check_peer(&c->base, peer));
    tp_ring *ring = outward ? tp_region_ring(c->region, rank, peer) : tp_region_ring(c->region, peer, rank);
    if (ring == NULL)
        return tp_fail(TP_EVALUE, "rank %d has no ring %s rank %d: the region was made without this pair", rank,
                       outward ? "to" : "from", peer);
    *t = (transfer){.ring = ring, .pace = outward ? &c->pace[peer] : NULL, .other = tp_region_rank_at(c->region, peer + c->first),
                    .peer = peer, .tag = tag, .bytes = bytes};
    memcpy(&t->data, &data, sizeof data); /* an outgoing one is only read */
    TP_TRY(check_abort(c));
    if (atomic_load_explicit(&ring->cut, memory_order_relaxed))
        return tp_comm_cut(&c->base, peer, !outward, 0, 0, 0, 0);
    return TP_OK;
}

static tp_status
ring_send(tp_comm *comm, int peer, uint64_t tag, const void *data, size_t bytes)
{
    ring_comm *c = (ring_comm *)comm;
    transfer out;
    TP_TRY(begin(c, peer, 1, tag, data, bytes, &out));
    return drive(c, &out, NULL);
}

static void *
ring_arena(tp_comm *comm, size_t *bytes)
{
    unsigned char *arena = tp_region_arena(((ring_comm *)comm)->region, comm->rank, bytes);
    return *bytes > 0 ? arena : NULL;
}

static tp_status
ring_lend(tp_comm *comm, int peer, uint64_t tag, const void *data, size_t bytes, uint64_t *loan)
{
    ring_comm *c = (ring_comm *)comm;
    size_t room;
    uintptr_t arena = (uintptr_t)tp_region_arena(c->region, comm->rank, &room), at = (uintptr_t)data;
    transfer out;
    *loan = 0;
    if (at < arena || at - arena > room || bytes > room - (at - arena))
        return ring_send(comm, peer, tag, data, bytes);
    TP_TRY(begin(c, peer, 1, tag, data, bytes, &out));
    if (bytes > INLINE) /* else it goes in the line itself, and its loan stands for those before it */
        out.lent = (uint64_t)(at - (uintptr_t)c->region);
    TP_TRY(drive(c, &out, NULL));
    *loan = atomic_load_explicit(&out.ring->head, memory_order_relaxed); /* ours alone to move */
    return TP_OK;
}

static tp_status
ring_reclaim(tp_comm *comm, int peer, uint64_t loan, uint64_t tag, size_t bytes)
{
    ring_comm *c = (ring_comm *)comm;
    transfer out;
    waiting w = {0};
    TP_TRY(begin(c, peer, 1, tag, NULL, bytes, &out));
    tp_status status = TP_OK;
    while (status == TP_OK && atomic_load(&out.ring->tail) < loan) {
        int moved = 0;
        status = take_posted(c, NULL, &moved);
        if (moved)
            waiting_over(c, &w);
        else if (status == TP_OK)
            status = wait_turn(c, &w, &out, NULL);
    }
    waiting_over(c, &w);
    return status;
}

static tp_status
ring_progress(tp_comm *comm)
{
    int moved = 0;
    return take_posted((const ring_comm *)comm, NULL, &moved);
}

static tp_status
more_room(const ring_comm *c, receive_queue *queue)
{
    void *items = queue->items;
    TP_TRY(tp_comm_more_room(&c->base, &items, sizeof *queue->items, &queue->room, &queue->first));
    queue->items = items;
    return TP_OK;
}

static tp_status
ring_reserve(tp_comm *comm, int peer, unsigned posted)
{
    ring_comm *c = (ring_comm *)comm;
    while (c->posted[peer] != NULL && c->posted[peer]->room < posted)
        TP_TRY(more_room(c, c->posted[peer]));
    return TP_OK;
}

static tp_status
ring_recv_post(tp_comm *comm, int peer, uint64_t tag, void *data, size_t bytes)
{
    ring_comm *c = (ring_comm *)comm;
    transfer in;
    TP_TRY(begin(c, peer, 0, tag, data, bytes, &in));
    receive_queue *queue = c->posted[peer];
    if (queue->count == queue->room)
        TP_TRY(more_room(c, queue));
    queue->items[(queue->first + queue->count++) % queue->room] = in;
    return TP_OK;
}

static tp_status
ring_recv_wait(tp_comm *comm, int peer)
{
    ring_comm *c = (ring_comm *)comm;
    receive_queue *queue = peer >= 0 && peer < comm->ranks ? c->posted[peer] : NULL;
    TP_TRY(tp_comm_check_posted(comm, peer, queue == NULL ? 0 : queue->count));
    transfer in = queue->items[queue->first];
    queue->first = (queue->first + 1) % queue->room;
    queue->count--;
    TP_TRY(check_abort(c));
    return drive(c, NULL, &in);
}

static tp_status
ring_exchange(tp_comm *comm, int peer, uint64_t tag, const void *out_data, size_t out_bytes, void *in_data,
              size_t in_bytes)
{
    ring_comm *c = (ring_comm *)comm;
    transfer out, in;
    TP_TRY(begin(c, peer, 1, tag, out_data, out_bytes, &out));
    TP_TRY(begin(c, peer, 0, tag, in_data, in_bytes, &in));
    TP_TRY(tp_comm_check_idle(comm, peer, c->posted[peer]->count));
    return drive(c, &out, &in);
}

/* Round n may overwrite what round n - 2 left: whoever enters n has seen n - 1 complete, so everybody has entered n - 1
 * and is done reading n - 2. The last to arrive wakes the others: ranks wakes a round, not ranks^2. */
static tp_status
ring_allgather(tp_comm *comm, const void *mine, size_t bytes, void *all)
{
    ring_comm *c = (ring_comm *)comm;
    if (bytes > c->region->gather_bytes)
        return tp_fail(TP_EVALUE, "rank %d gathers %zu bytes: the region was made for at most %llu", comm->rank, bytes,
                       (unsigned long long)c->region->gather_bytes);
    TP_TRY(check_abort(c));
    uint64_t ranks = (uint64_t)comm->ranks, round = atomic_load_explicit(&c->self->rounds, memory_order_relaxed);
    uint64_t complete = (round + 1) * ranks;
    if (atomic_load(&c->region->arrived) < complete - ranks)
        return tp_comm_gathers_again(comm);
    atomic_store_explicit(&c->self->rounds, round + 1, memory_order_relaxed); /* ours alone to move */
    unsigned char *slot = tp_region_gather(c->region, round, comm->rank);
    uint64_t size = bytes;
    memcpy(slot, &size, sizeof size);
    if (bytes > 0)
        memcpy(slot + TP_LINE, mine, bytes);
    if (atomic_fetch_add(&c->region->arrived, 1) + 1 == complete)
        for (int rank = 0; rank < comm->ranks; rank++)
            tp_region_ring_bell(tp_region_rank_at(c->region, rank), c->shared);
    waiting w = {0};
    tp_status status = TP_OK;
    while (status == TP_OK && atomic_load(&c->region->arrived) < complete)
        status = wait_turn(c, &w, NULL, NULL);
    waiting_over(c, &w);
    for (int rank = 0; status == TP_OK && rank < comm->ranks; rank++) {
        const unsigned char *theirs = tp_region_gather(c->region, round, rank);
        memcpy(&size, theirs, sizeof size);
        if (size != bytes)
            status = tp_fail(TP_ECONNECTION, "rank %d gathers %llu bytes where rank %d gathers %zu", rank,
                             (unsigned long long)size, comm->rank, bytes);
        else if (bytes > 0)
            memcpy((unsigned char *)all + (size_t)rank * bytes, theirs + TP_LINE, bytes);
    }
    return status;
}

static tp_status
ring_aside(tp_comm *comm, const _Atomic int *halted, tp_comm **out);

static void
ring_close(tp_comm *comm)
{
    ring_comm *c = (ring_comm *)comm;
    for (int rank = 0; rank < comm->ranks; rank++) {
        if (c->posted[rank] != NULL)
            free(c->posted[rank]->items);
        free(c->posted[rank]);
    }
    free(c->pace);
    free(c);
}

#define RING_OPS(word) \
    { \
        .abi = TP_COMM_ABI, .name = word, .send = ring_send, .recv_post = ring_recv_post, .recv_wait = ring_recv_wait, \
        .exchange = ring_exchange, .allgather = ring_allgather, .close = ring_close, .reserve = ring_reserve, .arena = ring_arena, \
        .lend = ring_lend, .reclaim = ring_reclaim, .progress = ring_progress, .aside = ring_aside \
    }
static const tp_comm_ops thread_ops = RING_OPS("thread");
static const tp_comm_ops shm_ops = RING_OPS("shm");

/* halted not NULL: aside. */
static tp_status
open_ring(tp_region *region, int rank, int shared, int64_t timeout_ns, const _Atomic int *halted, tp_comm **out)
{
    size_t ranks = (size_t)region->ranks;
    int first = halted != NULL ? region->ranks : 0;
    ring_comm *c = calloc(1, sizeof *c + ranks * sizeof(receive_queue *));
    tp_pace *pace = calloc(ranks, sizeof *pace);
    if (c == NULL || pace == NULL) {
        free(c);
        free(pace);
        return tp_fail(TP_EMEMORY, "no memory for a communicator of %zu ranks", ranks);
    }
    cpu_set_t cores;
    int crowded = sched_getaffinity(0, sizeof cores, &cores) == 0 && (int)ranks + first > CPU_COUNT(&cores);
    c->base = (tp_comm){shared ? &shm_ops : &thread_ops, rank, region->ranks, timeout_ns, 0, 0};
    c->region = region;
    c->pace = pace;
    c->self = tp_region_rank_at(region, rank + first);
    c->shared = shared;
    c->first = first;
    c->halted = halted;
    c->spin_ns = crowded ? SPIN_CROWDED_NS : SPIN_NS;
    for (int peer = 0; peer < region->ranks; peer++) {
        if (tp_region_ring(region, peer, rank) == NULL)
            continue;
        c->posted[peer] = calloc(1, sizeof(receive_queue));
        if (c->posted[peer] == NULL || (halted == NULL && more_room(c, c->posted[peer]) != TP_OK)) {
            ring_close(&c->base);
            return tp_fail(TP_EMEMORY, "no memory for the receives of rank %d from rank %d", rank, peer);
        }
    }
    *out = &c->base;
    return TP_OK;
}

static tp_status
ring_aside(tp_comm *comm, const _Atomic int *halted, tp_comm **out)
{
    const ring_comm *c = (const ring_comm *)comm;
    return open_ring(c->region, comm->rank, c->shared, comm->timeout_ns, halted, out);
}

tp_status
tp_comm_open_region(tp_region *region, int rank, const char *name, int64_t timeout_ns, tp_comm **out)
{
    int shared = strcmp(name, "shm") == 0;
    if (!shared && strcmp(name, "thread") != 0)
        return tp_fail(TP_EVALUE, "communicator is '%s': 'thread' or 'shm' would be right", name);
    if (rank < 0 || rank >= region->ranks)
        return tp_fail(TP_EVALUE, "rank is %d: 0 to %d would be right", rank, region->ranks - 1);
    if (timeout_ns < 0)
        return tp_fail(TP_EVALUE, "timeout is %lld ns: 0 (none) or more would be right", (long long)timeout_ns);
    return open_ring(region, rank, shared, timeout_ns, NULL, out);
}
