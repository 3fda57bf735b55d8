/* One thread a rank sleeps on its control connections: a rank has one, rank 0 one to each. It looks up every TICK_NS for an
 * abort of this very process and for progress to tell, and otherwise wakes for what comes, and for what can go. Nobody waits for a
 * reader: one that is stopped would hold up the words to all others. */
#include "csrc/comm/control.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "csrc/base/clock.h"
#include "csrc/comm/parting.h"
#include "csrc/comm/region.h"
#include "csrc/comm/socket.h"
#include "csrc/comm/unsent.h"

#define TICK_NS  50000000ll
#define TABLE_TICKS 4             /* between two looks at everybody's progress */
#define STILL_TABLES 2            /* after so many looks it is told again though it is as it was: rank 0 is there */
#define SILENT_NS 1000000000ll    /* so it is heard more often than that */
#define PACE_RANKS 64             /* with each so many more words are as much rarer: rank 0 hears all, and tells all */
#define LINGER_NS 1000000000ll    /* at the end, for the others' goodbye */
#define LONG_NS  5000000000ll     /* the same where one has still to read, who may have been stopped meanwhile */
#define WORD_MS  1000             /* for the word on why a connection closed */
#define KILLED_NS 200000000l      /* for a launcher that ends all ranks, one by one, when any has died */

typedef struct {
    uint64_t step, instruction, rounds, awaited; /* the last two: as of tp_region_rank */
} progress;

typedef struct {
    int fd, rank; /* fd -1: ended */
    int left;     /* said goodbye */
    int gathered; /* rank 0: has contributed to the gather under way */
    size_t got;
    unsigned char *in; /* [capacity] */
    tp_unsent unsent;
} line;

struct tp_control {
    const tp_comm *comm;
    tp_region *region;
    int alarm, stir, told, closing, awake;
    pthread_t thread;
    pthread_mutex_t lock; /* all that follows */
    pthread_cond_t changed;
    int lines;
    line *line;
    int64_t silent_ns;
    size_t max_bytes, slot_bytes, capacity; /* of a contribution; with its size; of the payload of a frame that comes */
    unsigned char *slots, *result;          /* [ranks][slot_bytes] each */
    int gathered;                           /* rank 0: contributions of the gather under way */
    uint64_t entered, complete, result_slot;
    int pace, still; /* of PACE_RANKS; looks since everybody's progress was told */
    progress *seen, *sent; /* [ranks] */
};

/* ---- sending (with the lock held) ---------------------------------------------------------------------------------- */

static void
drop_line(tp_control *c, line *l, int error)
{
    if (l->fd < 0)
        return;
    l->fd = -1;
    l->unsent.count = 0;
    if (l->left || c->closing)
        return;
    if (c->comm->rank != 0 && c->comm->ranks > 2 && error != ETIMEDOUT && !tp_region_is_aborted(c->region))
        nanosleep(&(struct timespec){.tv_nsec = KILLED_NS}, NULL); /* rank 0 may not be the first to end, and told of who was */
    tp_comm_mourn(c->comm, c->region, l->rank, error, "ended without a word (its connection closed)");
}

static void
wake(int event)
{
    uint64_t one = 1;
    if (write(event, &one, sizeof one) < 0) { /* it is up already, or its reader wakes at its next tick */
    }
}

/* Of a gathering the payload stays as it is: in `slots` and `result`, until all have read the result. */
static void
post(tp_control *c, line *l, tp_frame head, const void *payload)
{
    int lasts = head.kind == TP_FRAME_GATHER || head.kind == TP_FRAME_RESULT;
    if (l->fd >= 0 && tp_unsent_put(&l->unsent, l->fd, &head, payload, lasts) < 0)
        drop_line(c, l, errno);
    if (l->unsent.count > 0)
        wake(c->stir); /* so that the thread looks for when it can go */
}

/* What has waited; behind the last word of all, the end. */
static void
flush_line(tp_control *c, line *l)
{
    if (l->fd < 0)
        return;
    if (tp_unsent_flush(&l->unsent, l->fd) < 0)
        drop_line(c, l, errno);
    else if (c->closing && l->unsent.count == 0)
        shutdown(l->fd, SHUT_WR);
}

/* Only where it cannot wait: what comes later says it better. 0: it is to be said again. */
static int
post_if_idle(tp_control *c, line *l, tp_frame head, const void *payload)
{
    int idle = l->fd < 0 || l->left || tp_unsent_is_idle(&l->unsent, l->fd);
    if (idle && !l->left)
        post(c, l, head, payload);
    return idle;
}

static void
wake_main(tp_control *c)
{
    wake(c->alarm);
    pthread_cond_broadcast(&c->changed);
}

/* Tell everybody of the abort, once. */
static void
tell_abort(tp_control *c)
{
    int rank;
    char text[512];
    tp_status code = tp_region_aborted(c->region, &rank, text);
    if (code == TP_OK || c->awake)
        return;
    c->awake = 1;
    if (!c->told)
        for (int i = 0; i < c->lines; i++)
            if (!c->line[i].left)
                post(c, &c->line[i], (tp_frame){TP_FRAME_ABORT, strlen(text), (uint64_t)code, (uint64_t)(rank + 1)}, text);
    c->told = 1;
    wake_main(c);
}

/* This process's region has no rings, whose rounds these would be: who waits in vain reads there whom it waits for. */
static _Atomic uint64_t *
rounds_of(const tp_control *c, int rank)
{
    return &tp_region_rank_at(c->region, rank)->rounds;
}

static void
tell_progress(tp_control *c, int ticks)
{
    int ranks = c->comm->ranks, own = c->comm->rank, first = own == 0 ? 0 : own, end = own == 0 ? ranks : own + 1;
    if ((ticks + own) % (own == 0 ? c->pace * TABLE_TICKS : c->pace) != 0)
        return;
    for (int rank = first; rank < end; rank++) {
        tp_region_read_progress(c->region, rank, &c->seen[rank].step, &c->seen[rank].instruction);
        c->seen[rank].rounds = own == 0 ? *rounds_of(c, rank) : 0; /* rank 0 knows them by what it has gathered */
        c->seen[rank].awaited = atomic_load_explicit(&tp_region_rank_at(c->region, rank)->awaited, memory_order_relaxed);
    }
    size_t bytes = (size_t)(end - first) * sizeof *c->seen;
    int told = 1; /* else at the next turn: ranks that wait change nothing any more, and their last word is what counts */
    if (memcmp(c->seen + first, c->sent + first, bytes) == 0 && (own != 0 || ++c->still < STILL_TABLES))
        return;
    c->still = 0;
    if (own == 0)
        for (int i = 0; i < c->lines; i++)
            told &= post_if_idle(c, &c->line[i], (tp_frame){TP_FRAME_TABLE, bytes, 0, 0}, c->seen);
    else
        told = post_if_idle(c, &c->line[0], (tp_frame){TP_FRAME_PROGRESS, sizeof *c->seen, 0, 0}, c->seen + own);
    if (told)
        memcpy(c->sent + first, c->seen + first, bytes);
}

/* ---- all-gathers (with the lock held) -------------------------------------------------------------------------------- */

/* A round is complete: everybody has entered it. */
static void
complete_round(tp_control *c)
{
    c->complete++;
    for (int rank = 0; rank < c->comm->ranks; rank++)
        if (*rounds_of(c, rank) < c->complete)
            *rounds_of(c, rank) = c->complete;
    pthread_cond_broadcast(&c->changed);
}

/* Where it is. */
static const unsigned char *
put_slot(tp_control *c, int rank, const void *data, uint64_t bytes)
{
    unsigned char *slot = c->slots + (size_t)rank * c->slot_bytes;
    memcpy(slot, &bytes, sizeof bytes);
    if (bytes > 0)
        memcpy(slot + sizeof bytes, data, bytes);
    return slot + sizeof bytes;
}

static void
finish_gather(tp_control *c)
{
    int ranks = c->comm->ranks;
    uint64_t most = 0, bytes, stride;
    for (int rank = 0; rank < ranks; rank++) {
        memcpy(&bytes, c->slots + (size_t)rank * c->slot_bytes, sizeof bytes);
        most = bytes > most ? bytes : most;
    }
    stride = sizeof bytes + ((most + 7) & ~7ull);
    for (int rank = 0; rank < ranks; rank++)
        memcpy(c->result + (size_t)rank * stride, c->slots + (size_t)rank * c->slot_bytes, stride);
    c->result_slot = stride;
    c->gathered = 0;
    for (int i = 0; i < c->lines; i++) {
        c->line[i].gathered = 0;
        post(c, &c->line[i], (tp_frame){TP_FRAME_RESULT, (uint64_t)ranks * stride, stride, 0}, c->result);
    }
    complete_round(c);
}

/* Somebody waits for a rank that has gone in peace. */
static void
miss_nobody(tp_control *c)
{
    for (int i = 0; c->gathered > 0 && i < c->lines; i++)
        if (c->line[i].left && !c->line[i].gathered && !c->closing) {
            char text[128];
            snprintf(text, sizeof text, "rank %d has left while others wait for it", c->line[i].rank);
            tp_region_abort(c->region, TP_ECONNECTION, c->line[i].rank, text);
        }
}

/* ---- hearing (with the lock held) --------------------------------------------------------------------------------------- */

/* What a rank says of itself has no rounds. */
static void
hear_progress(tp_control *c, int rank, const unsigned char *payload)
{
    progress p;
    memcpy(&p, payload, sizeof p);
    tp_region_progress(c->region, rank, p.step, p.instruction);
    atomic_store_explicit(&tp_region_rank_at(c->region, rank)->awaited, p.awaited, memory_order_relaxed);
    if (*rounds_of(c, rank) < p.rounds)
        *rounds_of(c, rank) = p.rounds;
}

static void
hear_table(tp_control *c, const unsigned char *payload)
{
    for (int rank = 0; rank < c->comm->ranks; rank++)
        if (rank != c->comm->rank)
            hear_progress(c, rank, payload + (size_t)rank * sizeof(progress));
}

static void
hear_abort(tp_control *c, const tp_frame *head, const unsigned char *payload)
{
    char text[512];
    size_t length = head->bytes < sizeof text ? head->bytes : sizeof text - 1;
    memcpy(text, payload, length);
    text[length] = 0;
    tp_region_abort(c->region, head->a > 0 && head->a < TP_STATUS_COUNT ? (tp_status)head->a : TP_ECONNECTION, (int)head->b - 1,
                    text);
    c->told |= c->comm->rank != 0; /* the others have it from rank 0 too */
}

static int
is_sound(const tp_control *c, const tp_frame *head)
{
    size_t ranks = (size_t)c->comm->ranks;
    int first = c->comm->rank == 0;
    switch (head->kind) {
    case TP_FRAME_GATHER: return first && head->bytes <= c->max_bytes;
    case TP_FRAME_PROGRESS: return first && head->bytes == sizeof(progress);
    case TP_FRAME_RESULT: return !first && head->a >= 8 && head->a <= c->slot_bytes && head->bytes == ranks * head->a;
    case TP_FRAME_TABLE: return !first && head->bytes == ranks * sizeof(progress);
    case TP_FRAME_ABORT: return head->bytes <= 512;
    default: return head->kind == TP_FRAME_BYE && head->bytes == 0;
    }
}

static void
hear(tp_control *c, line *l, const tp_frame *head, const unsigned char *payload)
{
    switch (head->kind) {
    case TP_FRAME_GATHER:
        (void)put_slot(c, l->rank, payload, head->bytes);
        l->gathered = 1;
        ++*rounds_of(c, l->rank);
        if (++c->gathered == c->comm->ranks)
            finish_gather(c);
        return;
    case TP_FRAME_RESULT:
        memcpy(c->result, payload, head->bytes);
        c->result_slot = head->a;
        complete_round(c);
        return;
    case TP_FRAME_PROGRESS: hear_progress(c, l->rank, payload); return;
    case TP_FRAME_TABLE: hear_table(c, payload); return;
    case TP_FRAME_ABORT: hear_abort(c, head, payload); return;
    default:
        l->left = 1;
        l->unsent.count = 0; /* it waits for nothing more */
        atomic_store_explicit(&c->region->unheard_ns, 0, memory_order_relaxed);
        shutdown(l->fd, SHUT_WR);
    }
}

static void
read_line(tp_control *c, line *l)
{
    while (l->fd >= 0) {
        ssize_t got = recv(l->fd, l->in + l->got, sizeof(tp_frame) + c->capacity - l->got, 0);
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            return;
        if (got <= 0) {
            drop_line(c, l, got < 0 ? errno : 0);
            return;
        }
        l->got += (size_t)got;
        atomic_store_explicit(&c->region->unheard_ns, 0, memory_order_relaxed);
        size_t at = 0;
        tp_frame head;
        while (l->got - at >= sizeof head) {
            memcpy(&head, l->in + at, sizeof head);
            if (!is_sound(c, &head)) {
                drop_line(c, l, 0);
                return;
            }
            if (l->got - at < sizeof head + head.bytes)
                break;
            hear(c, l, &head, l->in + at + sizeof head);
            at += sizeof head + head.bytes;
        }
        memmove(l->in, l->in + at, l->got -= at);
    }
}

/* Count for how long rank 0 says nothing, before a look at what has come: this rank's own time, of which there is none while it is
 * stopped itself. */
static void
count_silence(tp_control *c, int64_t *looked)
{
    int64_t now = tp_clock_ns(), past = now - *looked, most = 2 * TICK_NS;
    *looked = now;
    if (c->comm->rank != 0 && !c->line[0].left)
        atomic_fetch_add_explicit(&c->region->unheard_ns, past < most ? past : most, memory_order_relaxed);
}

static void
drop_silent(tp_control *c)
{
    for (int i = 0; i < c->lines; i++)
        if (c->line[i].fd >= 0 && tp_socket_is_silent(c->line[i].fd, c->silent_ns))
            drop_line(c, &c->line[i], ETIMEDOUT);
}

/* ---- the thread ------------------------------------------------------------------------------------------------------------- */

static int
all_ended(const tp_control *c)
{
    for (int i = 0; i < c->lines; i++)
        if (c->line[i].fd >= 0)
            return 0;
    return 1;
}

/* At the end, since *closing, and since *rest with nothing unsent. Who has not yet read what was gathered is to have it, the words
 * behind it, and then time for a goodbye: to speak to what is closed would take from it what it has still to read. */
static int
is_over(const tp_control *c, int64_t *closing, int64_t *rest)
{
    int64_t now = tp_clock_ns();
    *closing = *closing == 0 ? now : *closing;
    *rest = *rest == 0 ? now : *rest;
    for (int i = 0; i < c->lines; i++)
        *rest = c->line[i].unsent.count > 0 && now - *closing <= LONG_NS ? now : *rest;
    return all_ended(c) || now - *rest > LINGER_NS;
}

static void *
listen_on(void *argument)
{
    tp_control *c = argument;
    struct pollfd *fds = calloc((size_t)c->lines + 1, sizeof *fds);
    int64_t last = 0, looked = tp_clock_ns(), closing = 0, rest = 0;
    int over = fds == NULL;
    pthread_mutex_lock(&c->lock);
    for (int ticks = 0; !over;) {
        fds[0] = (struct pollfd){.fd = c->stir, .events = POLLIN};
        for (int i = 0; i < c->lines; i++)
            fds[i + 1] = (struct pollfd){c->line[i].fd, c->line[i].unsent.count > 0 ? POLLIN | POLLOUT : POLLIN, 0};
        pthread_mutex_unlock(&c->lock);
        poll(fds, (nfds_t)c->lines + 1, (int)(TICK_NS / 1000000));
        pthread_mutex_lock(&c->lock);
        if (fds[0].revents && read(c->stir, &(uint64_t){0}, sizeof(uint64_t)) < 0) { /* nothing to do */
        }
        count_silence(c, &looked);
        for (int i = 0; i < c->lines; i++)
            if (fds[i + 1].revents) {
                read_line(c, &c->line[i]);
                flush_line(c, &c->line[i]);
            }
        miss_nobody(c);
        tell_abort(c);
        if (tp_clock_ns() - last >= TICK_NS && !c->closing) {
            last = tp_clock_ns();
            tell_progress(c, ++ticks);
            if (ticks % TABLE_TICKS == 0)
                drop_silent(c);
        }
        over = c->closing && is_over(c, &closing, &rest);
    }
    pthread_mutex_unlock(&c->lock);
    free(fds);
    return NULL;
}

/* ---- opening, gathering, closing ----------------------------------------------------------------------------------------------- */

static tp_status
take_memory(tp_control *c, int ranks, const int *fds)
{
    size_t all = (size_t)ranks * c->slot_bytes, table = (size_t)ranks * sizeof(progress), words = table + 1024;
    size_t largest = c->comm->rank == 0 ? c->slot_bytes : all;
    c->capacity = largest > words ? largest : words;
    c->line = calloc((size_t)ranks, sizeof *c->line);
    c->slots = calloc(1, all);
    c->result = calloc(1, all);
    c->seen = calloc(1, table);
    c->sent = calloc(1, table);
    int missing = c->line == NULL || c->slots == NULL || c->result == NULL || c->seen == NULL || c->sent == NULL;
    for (int rank = 0; !missing && rank < ranks; rank++) {
        if (fds[rank] < 0)
            continue;
        line *l = &c->line[c->lines++];
        *l = (line){.fd = fds[rank], .rank = rank, .in = malloc(sizeof(tp_frame) + c->capacity)};
        l->unsent.words = malloc(l->unsent.room = words);
        missing = l->in == NULL || l->unsent.words == NULL;
    }
    return missing ? tp_fail(TP_EMEMORY, "no memory for a communicator of %d ranks", ranks) : TP_OK;
}

static void
give_memory(tp_control *c)
{
    for (int i = 0; i < c->lines; i++) {
        free(c->line[i].in);
        free(c->line[i].unsent.words);
    }
    free(c->line);
    free(c->slots);
    free(c->result);
    free(c->seen);
    free(c->sent);
    if (c->alarm >= 0)
        close(c->alarm);
    if (c->stir >= 0)
        close(c->stir);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->changed);
    free(c);
}

tp_status
tp_control_open(const tp_comm *comm, const int *fds, size_t max_gather_bytes, int64_t silent_ns, tp_region *region,
                tp_control **out)
{
    tp_control *c = calloc(1, sizeof *c);
    if (c == NULL)
        return tp_fail(TP_EMEMORY, "no memory for a communicator");
    c->comm = comm;
    c->region = region;
    c->silent_ns = silent_ns;
    c->pace = 1 + (comm->ranks - 1) / PACE_RANKS;
    region->unheard_ns = 0;
    region->silent_ns = SILENT_NS * c->pace;
    c->max_bytes = max_gather_bytes;
    c->slot_bytes = sizeof(uint64_t) + ((max_gather_bytes + 7) & ~(size_t)7);
    pthread_mutex_init(&c->lock, NULL);
    tp_clock_condition(&c->changed);
    c->alarm = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    c->stir = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    tp_status status = take_memory(c, comm->ranks, fds);
    if (status == TP_OK && (c->alarm < 0 || c->stir < 0))
        status = tp_fail(TP_EIO, "eventfd: %s", strerror(errno));
    if (status == TP_OK)
        status = tp_comm_start_thread(&c->thread, listen_on, c);
    if (status != TP_OK) {
        give_memory(c);
        return status;
    }
    *out = c;
    return TP_OK;
}

/* With the lock held: until the round is complete, or the abort, or too late. */
static tp_status
await_round(tp_control *c, uint64_t round)
{
    int64_t timeout = c->comm->timeout_ns, until = timeout > 0 ? tp_clock_ns() + timeout : INT64_MAX;
    while (c->complete <= round) {
        TP_TRY(tp_comm_check_abort(c->comm, c->region));
        int64_t now = tp_clock_ns(), next = until < now + TICK_NS ? until : now + TICK_NS;
        if (now >= until)
            return tp_comm_too_late(c->comm, c->region, -1, 0, 0, 0, 0);
        struct timespec at = {(time_t)(next / 1000000000), (long)(next % 1000000000)};
        pthread_cond_timedwait(&c->changed, &c->lock, &at);
    }
    return TP_OK;
}

static tp_status
take_result(const tp_control *c, size_t bytes, void *all)
{
    for (int rank = 0; rank < c->comm->ranks; rank++) {
        const unsigned char *theirs = c->result + (size_t)rank * c->result_slot;
        uint64_t size;
        memcpy(&size, theirs, sizeof size);
        if (size != bytes)
            return tp_fail(TP_ECONNECTION, "rank %d gathers %llu bytes where rank %d gathers %zu", rank,
                           (unsigned long long)size, c->comm->rank, bytes);
        if (bytes > 0)
            memcpy((unsigned char *)all + (size_t)rank * bytes, theirs + sizeof size, bytes);
    }
    return TP_OK;
}

tp_status
tp_control_gather(tp_control *c, const void *mine, size_t bytes, void *all)
{
    if (bytes > c->max_bytes)
        return tp_fail(TP_EVALUE, "rank %d gathers %zu bytes: the communicator was made for at most %zu", c->comm->rank, bytes,
                       c->max_bytes);
    TP_TRY(tp_comm_check_abort(c->comm, c->region));
    pthread_mutex_lock(&c->lock);
    if (c->entered > c->complete) {
        pthread_mutex_unlock(&c->lock);
        return tp_comm_gathers_again(c->comm);
    }
    uint64_t round = c->entered++;
    *rounds_of(c, c->comm->rank) = c->entered;
    if (c->comm->rank != 0) {
        if (c->line[0].left)
            tp_region_abort(c->region, TP_ECONNECTION, 0, "rank 0 has left while others wait for it");
        else
            post(c, &c->line[0], (tp_frame){TP_FRAME_GATHER, bytes, round, 0}, put_slot(c, c->comm->rank, mine, bytes));
    } else {
        (void)put_slot(c, 0, mine, bytes);
        if (++c->gathered == c->comm->ranks)
            finish_gather(c);
        miss_nobody(c);
    }
    tp_region_await(c->region, c->comm->rank, -1);
    tp_status status = await_round(c, round);
    tp_region_await_no_more(c->region, c->comm->rank);
    if (status == TP_OK)
        status = take_result(c, bytes, all);
    pthread_mutex_unlock(&c->lock);
    return status;
}

int
tp_control_alarm(const tp_control *c)
{
    return c->alarm;
}

tp_status
tp_control_lost(tp_control *c, int rank, int error)
{
    struct pollfd one = {.fd = c->alarm, .events = POLLIN};
    while (poll(&one, 1, WORD_MS) < 0 && errno == EINTR) {
    }
    char closed[64];
    snprintf(closed, sizeof closed, "closed its connection to rank %d without a word", c->comm->rank);
    tp_comm_mourn(c->comm, c->region, rank, error, closed);
    return tp_comm_check_abort(c->comm, c->region);
}

void
tp_control_close(tp_control *c)
{
    if (c == NULL)
        return;
    pthread_mutex_lock(&c->lock);
    tell_abort(c);
    c->closing = 1;
    for (int i = 0; i < c->lines; i++) {
        if (!c->line[i].left)
            post(c, &c->line[i], (tp_frame){TP_FRAME_BYE, 0, 0, 0}, NULL);
        flush_line(c, &c->line[i]);
    }
    pthread_mutex_unlock(&c->lock);
    wake(c->stir);
    pthread_join(c->thread, NULL);
    give_memory(c);
}
