/* Messages over connections, one for each pair: {tag, bytes}, then the payload. What has been posted is read as it comes,
 * during any wait; what has not stays in the kernel's buffers, which are this transport's ring. */
#include "csrc/comm/tcp.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "csrc/base/clock.h"
#include "csrc/comm/control.h"
#include "csrc/comm/meet.h"
#include "csrc/comm/parting.h"
#include "csrc/comm/region.h"
#include "csrc/comm/socket.h"

#define HALTED_MS 50 /* between two looks whether what goes on aside was halted */

typedef struct {
    uint64_t tag, bytes;
} header;

typedef struct {
    uint64_t tag;
    void *data;
    size_t bytes;
} receive;

typedef struct {
    int fd, gone, error; /* gone: closed, or failed with that errno */
    receive *items; /* [room] a ring */
    unsigned room, first, count, ready; /* `ready` of them, the oldest, are complete */
    union {
        header head;
        unsigned char bytes[sizeof(header)];
    } next; /* of the message under way */
    size_t got, moved; /* bytes of its header, of its payload */
} tcp_link;

typedef struct {
    tp_comm base; /* first: a tp_comm * is a tcp_comm * */
    tp_region *region;
    tp_links links;
    tp_control *control;
    pid_t owner;
    int64_t silent_ns;
    struct pollfd *polled; /* [ranks + 1] */
    const _Atomic int *halted; /* aside: ends its waits; NULL */
    tcp_link *link;        /* [ranks]; fd -1: no connection */
} tcp_comm;

typedef struct {
    int peer; /* -1: nothing to send */
    header head;
    const unsigned char *data;
    size_t moved; /* header included */
} sending;

/* ---- moving bytes ----------------------------------------------------------------------------------------- */

static int
is_sent(const sending *out)
{
    return out->peer < 0 || out->moved == sizeof(header) + out->head.bytes;
}

static void
lose(tcp_link *l, int error)
{
    l->gone = 1;
    l->error = error;
}

/* Given up in the middle of a message, whose other end would wait for the rest. */
static void
hang_up(tcp_link *l)
{
    lose(l, ETIMEDOUT);
    shutdown(l->fd, SHUT_RDWR);
}

/* What can be done at once; 1 if anything moved. */
static int
push(tcp_comm *c, sending *out)
{
    int moved = 0;
    tcp_link *l = &c->link[out->peer];
    while (!is_sent(out) && !l->gone) {
        struct iovec part[2] = {{0}};
        size_t head = out->moved < sizeof(header) ? sizeof(header) - out->moved : 0;
        size_t body = out->moved < sizeof(header) ? 0 : out->moved - sizeof(header);
        part[0] = (struct iovec){(unsigned char *)&out->head + (sizeof(header) - head), head};
        memcpy(&part[1].iov_base, &(const void *){out->data + body}, sizeof(void *)); /* only read */
        part[1].iov_len = out->head.bytes - body;
        struct msghdr message = {.msg_iov = head > 0 ? part : part + 1, .msg_iovlen = head > 0 ? 2 : 1};
        ssize_t sent = sendmsg(l->fd, &message, MSG_NOSIGNAL);
        if (sent >= 0) {
            out->moved += (size_t)sent;
            moved = 1;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            break;
        } else if (errno != EINTR) {
            lose(l, errno);
        }
    }
    return moved;
}

static int
is_wrong(const tcp_link *l)
{
    if (l->ready == l->count || l->got < sizeof(header))
        return 0;
    const receive *r = &l->items[(l->first + l->ready) % l->room];
    return l->next.head.tag != r->tag || l->next.head.bytes != r->bytes;
}

/* Read into what is posted, as far as there is something to read; 1 if anything moved. */
static int
pull(tcp_link *l)
{
    int moved = 0;
    while (l->ready < l->count && !l->gone && !is_wrong(l)) {
        receive *r = &l->items[(l->first + l->ready) % l->room];
        if (l->got == sizeof(header) && l->moved == r->bytes) {
            l->ready++;
            l->got = l->moved = 0;
            continue;
        }
        int in_head = l->got < sizeof(header);
        unsigned char *into = in_head ? l->next.bytes + l->got : (unsigned char *)r->data + l->moved;
        ssize_t got = recv(l->fd, into, in_head ? sizeof(header) - l->got : r->bytes - l->moved, 0);
        if (got > 0) {
            *(in_head ? &l->got : &l->moved) += (size_t)got;
            moved = 1;
        } else if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
            lose(l, got < 0 ? errno : 0);
        } else if (errno != EINTR) {
            break;
        }
    }
    return moved;
}

/* ---- waiting ---------------------------------------------------------------------------------------------- */

static tp_status
too_late(const tcp_comm *c, const sending *out, int from)
{
    if (from >= 0) {
        const tcp_link *l = &c->link[from];
        const receive *r = &l->items[(l->first + l->ready) % l->room];
        if (l->ready == 0)
            return tp_comm_too_late(&c->base, c->region, from, 1, r->tag, l->moved, r->bytes);
    }
    size_t moved = out->moved > sizeof(header) ? out->moved - sizeof(header) : 0;
    return tp_comm_too_late(&c->base, c->region, out->peer, 0, out->head.tag, moved, out->head.bytes);
}

static tp_status
check_abort(const tcp_comm *c)
{
    if (c->halted != NULL && atomic_load_explicit(c->halted, memory_order_relaxed))
        return tp_comm_halted(&c->base);
    return tp_comm_check_abort(&c->base, c->region);
}

/* As the region counts the threads of the ranks. */
static int
own_record(const tcp_comm *c)
{
    return c->base.rank + (c->halted != NULL ? c->base.ranks : 0);
}

/* Sleep until something can move, the abort, or the deadline. */
static tp_status
doze(tcp_comm *c, const sending *out, int from, int64_t since)
{
    nfds_t count = 1;
    int64_t timeout = c->base.timeout_ns, left = since + timeout - tp_clock_ns();
    if (timeout > 0 && left <= 0)
        return too_late(c, out, from);
    c->polled[0] = (struct pollfd){.fd = tp_control_alarm(c->control), .events = POLLIN};
    for (int peer = 0; peer < c->base.ranks; peer++) {
        const tcp_link *l = &c->link[peer];
        short in = l->ready < l->count && !is_wrong(l) ? POLLIN : 0;
        short both = (short)(in | (peer == out->peer && !is_sent(out) ? POLLOUT : 0));
        if (l->fd >= 0 && !l->gone && both)
            c->polled[count++] = (struct pollfd){.fd = l->fd, .events = both};
    }
    int64_t ms = (left + 999999) / 1000000, look = c->halted != NULL ? HALTED_MS : c->silent_ns / 6000000 + 1;
    tp_region_await(c->region, own_record(c), from >= 0 && c->link[from].ready == 0 ? from : out->peer);
    int ready = poll(c->polled, count, (int)(timeout == 0 || ms > look ? look : ms));
    tp_region_await_no_more(c->region, own_record(c));
    if (ready < 0 && errno != EINTR)
        return tp_fail(TP_EIO, "poll: %s", strerror(errno));
    for (int peer = 0; ready == 0 && peer < c->base.ranks; peer++)
        if (c->link[peer].fd >= 0 && !c->link[peer].gone && tp_socket_is_silent(c->link[peer].fd, c->silent_ns))
            lose(&c->link[peer], ETIMEDOUT);
    return check_abort(c);
}

/* Send `out` whole, and have the oldest receive from rank `from` (-1: none) complete or shown to be wrong. */
static tp_status
go_on(tcp_comm *c, sending *out, int from)
{
    int64_t since = 0;
    for (;;) {
        int moved = out->peer >= 0 && push(c, out);
        if (is_sent(out) && from < 0)
            return TP_OK;
        for (int peer = 0; peer < c->base.ranks; peer++)
            if (c->link[peer].fd >= 0)
                moved |= pull(&c->link[peer]);
        if (is_sent(out) && (c->link[from].ready > 0 || is_wrong(&c->link[from])))
            return TP_OK;
        if (!is_sent(out) && c->link[out->peer].gone)
            return tp_control_lost(c->control, out->peer, c->link[out->peer].error);
        if (from >= 0 && c->link[from].ready == 0 && c->link[from].gone)
            return tp_control_lost(c->control, from, c->link[from].error);
        if (moved || since == 0)
            since = tp_clock_ns();
        if (!moved)
            TP_TRY(doze(c, out, from, since));
    }
}

/* What was sent in part has no end any more: another message would be taken for its rest. */
static tp_status
drive(tcp_comm *c, sending *out, int from)
{
    tp_status status = go_on(c, out, from);
    if (status != TP_OK && !is_sent(out) && out->moved > 0)
        hang_up(&c->link[out->peer]);
    return status;
}

/* ---- the vtable ------------------------------------------------------------------------------------------- */

static tp_status
begin(const tcp_comm *c, int peer)
{
    TP_TRY(tp_comm_check_owner(c->owner));
    TP_TRY(tp_comm_check_peer(&c->base, peer));
    if (c->link[peer].fd < 0)
        return tp_fail(TP_EVALUE, "rank %d has no connection with rank %d: the communicator was made without this pair",
                       c->base.rank, peer);
    return check_abort(c);
}

static tp_status
tcp_send(tp_comm *comm, int peer, uint64_t tag, const void *data, size_t bytes)
{
    tcp_comm *c = (tcp_comm *)comm;
    TP_TRY(begin(c, peer));
    sending out = {.peer = peer, .head = {tag, bytes}, .data = data};
    return drive(c, &out, -1);
}

static tp_status
more_room(const tcp_comm *c, tcp_link *l)
{
    void *items = l->items;
    TP_TRY(tp_comm_more_room(&c->base, &items, sizeof *l->items, &l->room, &l->first));
    l->items = items;
    return TP_OK;
}

static tp_status
tcp_reserve(tp_comm *comm, int peer, unsigned posted)
{
    tcp_comm *c = (tcp_comm *)comm;
    while (c->link[peer].room < posted)
        TP_TRY(more_room(c, &c->link[peer]));
    return TP_OK;
}

static tp_status
tcp_recv_post(tp_comm *comm, int peer, uint64_t tag, void *data, size_t bytes)
{
    tcp_comm *c = (tcp_comm *)comm;
    TP_TRY(begin(c, peer));
    tcp_link *l = &c->link[peer];
    if (l->count == l->room)
        TP_TRY(more_room(c, l));
    l->items[(l->first + l->count++) % l->room] = (receive){tag, data, bytes};
    return TP_OK;
}

/* The oldest receive is done with, well or not (driven: how it went): its memory is the caller's again. A message that was not the
 * expected one, or has yet to come, stays for the next receive; of one that has come in part the rest has nowhere to go. */
static tp_status
take_oldest(tcp_comm *c, int peer, tp_status driven)
{
    tcp_link *l = &c->link[peer];
    receive oldest = l->items[l->first];
    int good = l->ready > 0;
    if (!good && l->moved > 0)
        hang_up(l);
    l->first = (l->first + 1) % l->room;
    l->count--;
    l->ready -= (unsigned)good;
    if (driven != TP_OK)
        return driven;
    if (good)
        return TP_OK;
    return tp_comm_wrong_message(&c->base, peer, l->next.head.tag, l->next.head.bytes, oldest.tag, oldest.bytes);
}

static tp_status
tcp_recv_wait(tp_comm *comm, int peer)
{
    tcp_comm *c = (tcp_comm *)comm;
    sending none = {.peer = -1};
    TP_TRY(tp_comm_check_posted(comm, peer, peer < 0 || peer >= comm->ranks ? 0 : c->link[peer].count));
    TP_TRY(begin(c, peer));
    return take_oldest(c, peer, drive(c, &none, peer));
}

static tp_status
tcp_exchange(tp_comm *comm, int peer, uint64_t tag, const void *out_data, size_t out_bytes, void *in_data, size_t in_bytes)
{
    tcp_comm *c = (tcp_comm *)comm;
    TP_TRY(begin(c, peer));
    TP_TRY(tp_comm_check_idle(comm, peer, c->link[peer].count));
    TP_TRY(tcp_recv_post(comm, peer, tag, in_data, in_bytes));
    sending out = {.peer = peer, .head = {tag, out_bytes}, .data = out_data};
    return take_oldest(c, peer, drive(c, &out, peer));
}

static tp_status
tcp_allgather(tp_comm *comm, const void *mine, size_t bytes, void *all)
{
    const tcp_comm *c = (const tcp_comm *)comm;
    TP_TRY(tp_comm_check_owner(c->owner));
    return tp_control_gather(c->control, mine, bytes, all);
}

static void
tcp_close(tp_comm *comm)
{
    tcp_comm *c = (tcp_comm *)comm;
    if (c->owner != getpid()) /* a fork has no thread to end and no connection to say goodbye over */
        return;
    if (c->halted == NULL) {
        tp_control_close(c->control);
        tp_links_close(&c->links);
    }
    for (int peer = 0; peer < comm->ranks; peer++)
        free(c->link[peer].items);
    free(c->polled);
    free(c->link);
    free(c);
}

/* A sender whose message fills the sockets' buffers goes on. */
static tp_status
tcp_progress(tp_comm *comm)
{
    tcp_comm *c = (tcp_comm *)comm;
    for (int peer = 0; peer < comm->ranks; peer++)
        (void)pull(&c->link[peer]);
    return TP_OK;
}

static tp_status
tcp_aside(tp_comm *comm, const _Atomic int *halted, tp_comm **out);

static const tp_comm_ops tcp_ops = {TP_COMM_ABI,   "tcp",        tcp_send,      tcp_recv_post,
                                    tcp_recv_wait, tcp_exchange, tcp_allgather, tcp_close,     NULL,         NULL, 0,
                                    tcp_reserve,   NULL,         NULL,          NULL,          tcp_progress,  NULL, tcp_aside};

/* A link has its messages' state in each; a pair of ranks talks by one of the two at a time. */
static tp_status
tcp_aside(tp_comm *comm, const _Atomic int *halted, tp_comm **out)
{
    const tcp_comm *of = (const tcp_comm *)comm;
    size_t ranks = (size_t)comm->ranks;
    tcp_comm *c = calloc(1, sizeof *c);
    if (c != NULL) {
        c->polled = calloc(ranks + 1, sizeof *c->polled);
        c->link = calloc(ranks, sizeof *c->link);
    }
    if (c == NULL || c->polled == NULL || c->link == NULL) {
        if (c != NULL) {
            free(c->polled);
            free(c->link);
        }
        free(c);
        return tp_fail(TP_EMEMORY, "no memory for a communicator of %zu ranks", ranks);
    }
    c->base = (tp_comm){&tcp_ops, comm->rank, comm->ranks, comm->timeout_ns, 0, 0};
    c->region = of->region;
    c->owner = of->owner;
    c->control = of->control;
    c->silent_ns = of->silent_ns;
    c->halted = halted;
    tp_status status = TP_OK;
    for (size_t peer = 0; peer < ranks && status == TP_OK; peer++) {
        c->link[peer].fd = of->link[peer].fd;
        status = c->link[peer].fd < 0 ? TP_OK : more_room(c, &c->link[peer]);
    }
    if (status != TP_OK)
        tcp_close(&c->base);
    else
        *out = &c->base;
    return status;
}

static tp_status
check(const tp_tcp_config *config, const tp_region *region)
{
    const char *const words[] = {config->token, config->version, config->plan};
    if (config->ranks < 1 || config->ranks > TP_TCP_RANKS || config->rank < 0 || config->rank >= config->ranks)
        return tp_fail(TP_EVALUE, "rank is %d of %d: 0 to one less than 1 to %d ranks would be right", config->rank,
                       config->ranks, TP_TCP_RANKS);
    if (tp_region_ranks(region) != config->ranks)
        return tp_fail(TP_EVALUE, "the region has %d ranks, the communicator %d", tp_region_ranks(region), config->ranks);
    if (config->ports < 1 || config->port < 1 || config->port > 65536 - config->ports)
        return tp_fail(TP_EVALUE, "port is %d: 1 to 65535 would be right", config->port);
    if (config->timeout_ns < 0 || config->meeting_ns < 1)
        return tp_fail(TP_EVALUE, "timeouts are %lld and %lld ns: 0 (none) or more, and 1 or more, would be right",
                       (long long)config->timeout_ns, (long long)config->meeting_ns);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strlen(words[i]) >= TP_TCP_WORD)
            return tp_fail(TP_EVALUE, "'%s' has %zu bytes: at most %d would be right", words[i], strlen(words[i]),
                           TP_TCP_WORD - 1);
    return TP_OK;
}

tp_status
tp_comm_open_tcp(const tp_tcp_config *config, tp_region *region, tp_comm **out)
{
    TP_TRY(check(config, region));
    size_t ranks = (size_t)config->ranks;
    tcp_comm *c = calloc(1, sizeof *c);
    if (c == NULL)
        return tp_fail(TP_EMEMORY, "no memory for a communicator of %zu ranks", ranks);
    c->base = (tp_comm){&tcp_ops, config->rank, config->ranks, config->timeout_ns, 0, 0};
    c->region = region;
    c->owner = getpid();
    c->silent_ns = tp_tcp_silent_ns(config);
    c->polled = calloc(ranks + 1, sizeof *c->polled);
    c->link = calloc(ranks, sizeof *c->link);
    tp_status status = c->polled == NULL || c->link == NULL ? tp_fail(TP_EMEMORY, "no memory for a communicator of %zu ranks", ranks)
                                                            : tp_links_open(config, region, &c->links);
    if (status == TP_OK) {
        status = tp_control_open(&c->base, c->links.control, config->max_gather_bytes, c->silent_ns, region, &c->control);
        if (status != TP_OK)
            tp_parting_say(c->links.control, config->ranks, config->rank, status);
    }
    if (status != TP_OK) {
        tp_links_close(&c->links);
        free(c->polled);
        free(c->link);
        free(c);
        return status;
    }
    for (size_t peer = 0; peer < ranks; peer++)
        c->link[peer].fd = c->links.data[peer];
    *out = &c->base;
    return TP_OK;
}
