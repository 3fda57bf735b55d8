/* The meeting. Rank 0 listens; every other rank connects to it, gets an ack, and waits for the verdict: all ranks are here with the
 * same plan, version and token, or what is wrong. Then rank 0 sends the table of all addresses with a fresh random token; each
 * rank connects to the lower ranks that it exchanges messages with, and accepts those of higher ones. */
#include "csrc/comm/meet.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "csrc/base/clock.h"
#include "csrc/comm/host.h"
#include "csrc/comm/parting.h"
#include "csrc/comm/socket.h"

#define MAGIC     0x31706374705f7074ull /* read by a machine of the other byte order it is another number */
#define GUESTS    64                    /* callers who have not yet said all of their greeting */
#define SECOND    1000000000ll
#define PATIENCE  (5 * SECOND)  /* with a caller who says nothing */
#define CROWDED   (SECOND / 2) /* the same where others wait for room: longer than TCP takes to send a lost packet again */
#define ACK_NS    (3 * SECOND)  /* for rank 0's ack; it is quick unless the port is somebody else's */
#define RETRY_NS  (SECOND / 20)
#define TICK_NS   (SECOND / 4)  /* between two looks at the abort */
#define LATE_NS   (2 * SECOND)  /* after one rank is found wrong: for the others to come and hear it */

enum { GREET_CONTROL, GREET_DATA };

typedef struct {
    uint64_t magic;
    int32_t kind, rank, ranks;
    uint16_t port, pad;
    char token[TP_TCP_WORD], version[TP_TCP_WORD], plan[TP_TCP_WORD];
} greeting;

typedef struct {
    uint64_t magic;
    int32_t status, pad;
    char text[512];
} verdict;

typedef struct {
    uint8_t family, pad; /* 4, 6; 0: rank 0's own machine, at whatever address the reader knows it by */
    uint16_t port;
    uint8_t address[16];
} entry;

typedef struct {
    char token[TP_TCP_WORD];
    entry entries[];
} table;

typedef struct {
    int fd;
    size_t got;
    int64_t until;
    greeting said;
} guest;

typedef struct {
    int listener, count;
    guest guests[GUESTS];
} lobby;

typedef struct {
    const tp_tcp_config *config;
    const tp_region *region;
    tp_links *links;
    lobby lobby;
    int64_t deadline;
    int port, who; /* of our listener; the rank over which this one fails */
    greeting own;
    greeting *heard; /* [ranks] rank 0: what each said */
    verdict word;    /* rank 0: the first thing found wrong, or OK */
    table *table;
} meeting;

/* ---- hearing who calls ------------------------------------------------------------------------------------------ */

static void
dismiss(lobby *l, int i, int hang_up)
{
    if (hang_up)
        close(l->guests[i].fd);
    l->guests[i] = l->guests[--l->count];
}

/* Whom there is no room for waits outside: who calls with a word and is sent away for others would not know. Called where somebody
 * waits; -1: there is no descriptor for them. */
static int
admit(lobby *l)
{
    int fd = 0, before = l->count;
    while (l->count < GUESTS && (fd = tp_socket_accept(l->listener)) >= 0)
        l->guests[l->count++] = (guest){.fd = fd, .until = tp_clock_ns() + PATIENCE};
    return l->count == before && fd < 0 && (errno == EMFILE || errno == ENFILE) ? -1 : 0;
}

/* Read what a guest says: 1 when its greeting is whole, 0 when more must come, -1 when it is a stranger. */
static int
listen_to(guest *g)
{
    ssize_t got = recv(g->fd, (char *)&g->said + g->got, sizeof g->said - g->got, 0);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return 0;
    if (got <= 0)
        return -1;
    g->got += (size_t)got;
    if (g->got >= sizeof g->said.magic && g->said.magic != MAGIC)
        return -1;
    g->said.version[TP_TCP_WORD - 1] = g->said.plan[TP_TCP_WORD - 1] = 0; /* they come without an end, perhaps */
    return g->got == sizeof g->said;
}

/* The next whole greeting before `until`, with its connection; *fd = -1: none came. */
static tp_status
next_greeting(meeting *m, int64_t until, greeting *said, int *fd)
{
    lobby *l = &m->lobby;
    struct pollfd wanted[GUESTS + 1];
    *fd = -1;
    do {
        wanted[0] = (struct pollfd){.fd = l->count < GUESTS ? l->listener : -1, .events = POLLIN};
        for (int i = 0; i < l->count; i++)
            wanted[i + 1] = (struct pollfd){.fd = l->guests[i].fd, .events = POLLIN};
        if (poll(wanted, (nfds_t)l->count + 1, tp_socket_ms(until)) < 0 && errno != EINTR)
            return tp_fail(TP_EIO, "poll: %s", strerror(errno));
        int64_t now = tp_clock_ns() + (l->count < GUESTS ? 0 : PATIENCE - CROWDED);
        for (int i = l->count - 1; i >= 0; i--) {
            int heard = wanted[i + 1].revents ? listen_to(&l->guests[i]) : 0;
            if (heard > 0) {
                *said = l->guests[i].said;
                *fd = l->guests[i].fd;
                dismiss(l, i, 0);
                return TP_OK;
            }
            if (heard < 0 || now > l->guests[i].until)
                dismiss(l, i, 1);
        }
        if (wanted[0].revents && admit(l) < 0)
            return tp_fail(TP_EIO, "rank %d cannot take one more connection (%s): more open files (ulimit -n) would be right",
                           m->config->rank, strerror(errno));
    } while (tp_clock_ns() < until);
    return TP_OK;
}

/* Whether nobody has called the meeting off: this rank was interrupted while it waited for others. */
static tp_status
is_on(const meeting *m)
{
    int rank;
    char text[512];
    return tp_region_aborted(m->region, &rank, text) == TP_OK ? TP_OK : tp_fail(TP_EABORTED, "%s", text);
}

static int64_t
sooner(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Until there is something to read, or the deadline, or the abort. */
static tp_status
await_word(const meeting *m, int fd, int64_t until)
{
    struct pollfd one = {.fd = fd, .events = POLLIN};
    int ready = 0;
    while (ready <= 0 && tp_clock_ns() < until) {
        TP_TRY(is_on(m));
        ready = poll(&one, 1, tp_socket_ms(sooner(until, tp_clock_ns() + TICK_NS)));
    }
    return is_on(m);
}

/* ---- rank 0: everybody here, and of one mind --------------------------------------------------------------------- */

static const char *
missing_ranks(const meeting *m, char text[160])
{
    size_t used = 0;
    int left = 0;
    for (int rank = 1; rank < m->config->ranks; rank++)
        if (m->links->control[rank] < 0 && left++ < 8)
            used += (size_t)snprintf(text + used, 160 - used, "%s%d", left > 1 ? ", " : "", rank);
    if (left > 8)
        snprintf(text + used, 160 - used, " and %d more", left - 8);
    return text;
}

static int
agree(const greeting *a, const greeting *b)
{
    return a->ranks == b->ranks && strcmp(a->version, b->version) == 0 && strcmp(a->plan, b->plan) == 0;
}

static void
say_what(const greeting *g, const greeting *other, char text[128])
{
    if (g->ranks != other->ranks)
        snprintf(text, 128, "%d ranks", g->ranks);
    else if (strcmp(g->version, other->version) != 0)
        snprintf(text, 128, "version %s of terapipe_c", g->version);
    else
        snprintf(text, 128, "plan %s", g->plan);
}

/* The odd one is the first that differs from rank 0, unless most agree against rank 0. */
static tp_status
judge(const meeting *m)
{
    int others = 0, odd = -1, with_odd = 0;
    for (int rank = 1; rank < m->config->ranks; rank++) {
        if (m->links->control[rank] < 0)
            continue;
        others++;
        if (!agree(&m->heard[rank], &m->own)) {
            odd = odd < 0 ? rank : odd;
            with_odd += agree(&m->heard[rank], &m->heard[odd]);
        }
    }
    if (odd < 0)
        return TP_OK;
    char theirs[128], ours[128];
    say_what(&m->heard[odd], &m->own, theirs);
    say_what(&m->own, &m->heard[odd], ours);
    const char *right = strncmp(ours, "plan", 4) == 0 ? "one that was planned once, saved and loaded by each" : "the same on all";
    if (2 * with_odd > others + 1)
        return tp_fail(TP_EVALUE, "rank 0 was started with %s where %d others have %s: %s would be right", ours, with_odd, theirs,
                       right);
    return tp_fail(TP_EVALUE, "rank %d was started with %s where rank 0 has %s: %s would be right", m->heard[odd].rank, theirs,
                   ours, right);
}

static void
note_wrong(meeting *m, tp_status status)
{
    if (status == TP_OK || m->word.status != TP_OK)
        return;
    m->word.status = (int32_t)status;
    snprintf(m->word.text, sizeof m->word.text, "%s", tp_error_message());
}

static int
tell_guest(int fd, const verdict *word)
{
    const uint64_t ack = MAGIC;
    int64_t until = tp_clock_ns() + ACK_NS;
    if (tp_socket_write(fd, &ack, sizeof ack, until) < 0)
        return -1;
    return word == NULL ? 0 : tp_socket_write(fd, word, sizeof *word, until);
}

/* Give one caller its place; a stranger is sent away, and who has given up waiting to be heard will call again. */
static void
place(meeting *m, const greeting *said, int fd)
{
    int rank = said->rank, larger = rank >= m->config->ranks, *control = m->links->control;
    if (said->kind != GREET_CONTROL || memcmp(said->token, m->own.token, TP_TCP_WORD) != 0 || rank < 0 || tp_socket_hung_up(fd)) {
        close(fd);
        return;
    }
    if (!larger && control[rank] >= 0 && tp_socket_hung_up(control[rank])) { /* it grew impatient and called again */
        close(control[rank]);
        control[rank] = -1;
    }
    if (larger || rank == 0 || control[rank] >= 0) {
        if (larger) /* it has no place here, but must hear why; whose place is whose the others will see */
            note_wrong(m, tp_fail(TP_EVALUE, "rank %d was started with %d ranks where rank 0 has %d ranks: the same on all would "
                                             "be right", rank, said->ranks, m->config->ranks));
        else
            note_wrong(m, tp_fail(TP_EVALUE, "two processes say that they are rank %d: a rank of its own for each would be right",
                                  rank));
        tell_guest(fd, &m->word);
        close(fd);
        return;
    }
    tp_socket_tune(fd, tp_tcp_silent_ns(m->config), 0);
    if (tell_guest(fd, NULL) < 0) {
        close(fd);
        return;
    }
    control[rank] = fd;
    m->heard[rank] = *said;
}

static tp_status
gather_ranks(meeting *m)
{
    int missing = m->config->ranks - 1, fine = 1;
    int64_t until = m->deadline;
    while (missing > 0 && tp_clock_ns() < until) {
        greeting said;
        int fd;
        TP_TRY(is_on(m));
        TP_TRY(next_greeting(m, sooner(until, tp_clock_ns() + TICK_NS), &said, &fd));
        if (fd < 0)
            continue;
        place(m, &said, fd);
        if (fine && (m->word.status != TP_OK || judge(m) != TP_OK)) {
            fine = 0;
            until = sooner(until, tp_clock_ns() + LATE_NS);
        }
        missing = 0;
        for (int rank = 1; rank < m->config->ranks; rank++)
            missing += m->links->control[rank] < 0;
    }
    char who[160];
    note_wrong(m, judge(m)); /* now that most have spoken: who is the odd one? */
    if (m->word.status != TP_OK)
        return tp_fail((tp_status)m->word.status, "%s", m->word.text);
    if (missing > 0)
        return tp_fail(TP_ETIMEOUT, "%d of %d ranks did not come to %s:%d within %.3g s: %s", missing, m->config->ranks,
                       m->config->host, m->port, (double)m->config->meeting_ns * 1e-9, missing_ranks(m, who));
    return TP_OK;
}

static entry
address_of(int fd, uint16_t port)
{
    struct sockaddr_storage at = {0};
    socklen_t bytes = sizeof at;
    entry found = {.port = port};
    if (getpeername(fd, (struct sockaddr *)&at, &bytes) < 0)
        return found;
    static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    if (at.ss_family == AF_INET6) {
        memcpy(found.address, (char *)&at + offsetof(struct sockaddr_in6, sin6_addr), 16);
        int v4 = memcmp(found.address, mapped, sizeof mapped) == 0;
        if (v4)
            memmove(found.address, found.address + 12, 4);
        found.family = v4 ? 4 : 6;
    } else {
        memcpy(found.address, (char *)&at + offsetof(struct sockaddr_in, sin_addr), 4);
        found.family = 4;
    }
    static const uint8_t one[16] = {[15] = 1};
    if (found.family == 4 ? found.address[0] == 127 : memcmp(found.address, one, 16) == 0)
        found.family = 0;
    return found;
}

static size_t
table_bytes(int ranks)
{
    return sizeof(table) + (size_t)ranks * sizeof(entry);
}

static tp_status
make_table(meeting *m)
{
    if (getrandom(m->table->token, TP_TCP_WORD, 0) != TP_TCP_WORD)
        return tp_fail(TP_EIO, "getrandom: %s", strerror(errno));
    m->table->entries[0] = (entry){.port = (uint16_t)m->port};
    for (int rank = 1; rank < m->config->ranks; rank++)
        m->table->entries[rank] = address_of(m->links->control[rank], m->heard[rank].port);
    return TP_OK;
}

static tp_status
receive_all(meeting *m)
{
    tp_status status = gather_ranks(m);
    if (status == TP_OK)
        status = make_table(m);
    note_wrong(m, status);
    for (int rank = 1; rank < m->config->ranks; rank++) {
        int fd = m->links->control[rank];
        int64_t until = tp_clock_ns() + SECOND;
        if (fd < 0)
            continue;
        int failed = tp_socket_write(fd, &m->word, sizeof m->word, until) < 0;
        if (!failed && status == TP_OK)
            failed = tp_socket_write(fd, m->table, table_bytes(m->config->ranks), until) < 0;
        if (failed && status == TP_OK)
            return tp_fail(TP_ECONNECTION, "rank %d left during the meeting: %s", rank, strerror(errno));
    }
    return status;
}

/* ---- the others: call rank 0 -------------------------------------------------------------------------------------- */

/* Call, greet and be heard: the connection, or -1 with a word on why. */
static int
call_and_greet(const meeting *m, const struct addrinfo *address, int port, const char **why)
{
    struct sockaddr_storage at = {0};
    uint64_t ack = 0;
    memcpy(&at, address->ai_addr, address->ai_addrlen);
    tp_socket_with_port(&at, port);
    int64_t until = sooner(m->deadline, tp_clock_ns() + ACK_NS);
    int fd = tp_socket_call((struct sockaddr *)&at, address->ai_addrlen, until);
    if (fd < 0) {
        *why = strerror(errno);
        return -1;
    }
    tp_socket_tune(fd, tp_tcp_silent_ns(m->config), 0);
    if (tp_socket_write(fd, &m->own, sizeof m->own, until) == 0 && await_word(m, fd, until) == TP_OK &&
        tp_socket_read(fd, &ack, sizeof ack, until) == 0 && ack == MAGIC)
        return fd;
    *why = "who listens there did not know us: another run's port, or another token";
    close(fd);
    return -1;
}

/* A name may get its address, or another one, while we wait: where containers start, as their first one does. */
static tp_status
try_rank_0(const meeting *m, tp_host **asked, struct addrinfo **addresses, const char **why)
{
    int *fd = &m->links->control[0];
    for (int64_t look_again = 0; *fd < 0;) {
        if (*asked == NULL && tp_clock_ns() >= look_again)
            TP_TRY(tp_host_ask(m->config->host, asked));
        int64_t until = *addresses == NULL ? sooner(m->deadline, tp_clock_ns() + TICK_NS) : 0;
        if (*asked != NULL && tp_host_answer(*asked, until, addresses, why)) {
            *asked = NULL;
            look_again = tp_clock_ns() + (*addresses == NULL ? SECOND : 10 * SECOND);
        }
        for (int port = m->config->port; *fd < 0 && port < m->config->port + m->config->ports; port++)
            for (const struct addrinfo *a = *addresses; *fd < 0 && a != NULL; a = a->ai_next)
                *fd = call_and_greet(m, a, port, why);
        if (*fd >= 0 || is_on(m) != TP_OK || tp_clock_ns() + RETRY_NS > m->deadline)
            break;
        tp_clock_sleep_until(tp_clock_ns() + RETRY_NS);
    }
    return is_on(m);
}

static tp_status
call_rank_0(meeting *m)
{
    const tp_tcp_config *config = m->config;
    struct addrinfo *addresses = NULL;
    tp_host *asked = NULL;
    const char *why = "who serves names has not said what address that is";
    tp_status status = try_rank_0(m, &asked, &addresses, &why);
    int known = addresses != NULL;
    tp_host_forget(asked);
    if (known)
        freeaddrinfo(addresses);
    TP_TRY(status);
    if (m->links->control[0] < 0)
        return tp_fail(TP_ETIMEOUT, "rank %d did not reach rank 0 at %s:%d within %.3g s: %s%s", config->rank, config->host,
                       config->port, (double)config->meeting_ns * 1e-9, why,
                       known ? "" : "; in MASTER_ADDR, an address or a name that this machine knows would be right");
    return TP_OK;
}

static tp_status
hear_verdict(meeting *m)
{
    verdict word;
    int64_t until = m->deadline + 2 * LATE_NS; /* rank 0's clock began earlier or later than ours: its word is better */
    int fd = m->links->control[0];
    TP_TRY(await_word(m, fd, until));
    if (tp_socket_read(fd, &word, sizeof word, until) < 0 || word.magic != MAGIC)
        return tp_fail(errno == ETIMEDOUT ? TP_ETIMEOUT : TP_ECONNECTION, "rank %d was heard by rank 0, which then %s",
                       m->config->rank, errno == ETIMEDOUT ? "said no more" : "left the meeting");
    word.text[sizeof word.text - 1] = 0;
    if (word.status != TP_OK)
        return tp_fail(word.status > 0 && word.status < TP_STATUS_COUNT ? (tp_status)word.status : TP_ECONNECTION, "%s",
                       word.text);
    if (tp_socket_read(fd, m->table, table_bytes(m->config->ranks), until) < 0)
        return tp_fail(TP_ECONNECTION, "rank 0 left during the meeting: %s", strerror(errno));
    return TP_OK;
}

/* ---- everybody: the connections that carry messages ------------------------------------------------------------------ */

static tp_status
call_peer(meeting *m, int peer)
{
    struct sockaddr_storage at = {0};
    socklen_t bytes = sizeof at;
    const entry *e = &m->table->entries[peer];
    if (e->family == 0) {
        if (getpeername(m->links->control[0], (struct sockaddr *)&at, &bytes) < 0)
            return tp_fail(TP_EIO, "getpeername: %s", strerror(errno));
    } else {
        at.ss_family = e->family == 6 ? AF_INET6 : AF_INET;
        size_t offset = e->family == 6 ? offsetof(struct sockaddr_in6, sin6_addr) : offsetof(struct sockaddr_in, sin_addr);
        memcpy((char *)&at + offset, e->address, e->family == 6 ? 16 : 4);
        bytes = e->family == 6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
        tp_socket_take_scope(&at, m->links->control[0]);
    }
    tp_socket_with_port(&at, e->port);
    greeting hello = m->own;
    hello.kind = GREET_DATA;
    memcpy(hello.token, m->table->token, TP_TCP_WORD);
    int fd = tp_socket_call((struct sockaddr *)&at, bytes, m->deadline + LATE_NS);
    if (fd >= 0 && tp_socket_write(fd, &hello, sizeof hello, m->deadline + LATE_NS) == 0) {
        tp_socket_tune(fd, tp_tcp_silent_ns(m->config), m->config->buffer_bytes);
        m->links->data[peer] = fd;
        return TP_OK;
    }
    int reason = errno;
    if (fd >= 0)
        close(fd);
    return tp_fail(TP_ECONNECTION, "rank %d cannot connect to rank %d (port %d): %s", m->config->rank, peer, e->port,
                   strerror(reason));
}

static tp_status
not_called(const meeting *m, int wanted)
{
    const tp_tcp_config *config = m->config;
    int peer = config->rank + 1;
    while (m->links->data[peer] >= 0 || !tp_tcp_talk(config, config->rank, peer))
        peer++;
    return tp_fail(TP_ETIMEOUT, "rank %d still waits for %d ranks to connect after %.3g s, rank %d first of all", config->rank,
                   wanted, (double)config->meeting_ns * 1e-9, peer);
}

static tp_status
wait_for_callers(meeting *m)
{
    const tp_tcp_config *config = m->config;
    int wanted = 0;
    for (int peer = config->rank + 1; peer < config->ranks; peer++)
        wanted += tp_tcp_talk(config, config->rank, peer);
    while (wanted > 0) {
        greeting said;
        int fd;
        TP_TRY(is_on(m));
        TP_TRY(next_greeting(m, tp_clock_ns() + TICK_NS, &said, &fd));
        if (fd >= 0 && said.kind == GREET_DATA && memcmp(said.token, m->table->token, TP_TCP_WORD) == 0 &&
            said.rank > config->rank && said.rank < config->ranks && m->links->data[said.rank] < 0 &&
            tp_tcp_talk(config, config->rank, said.rank)) {
            tp_socket_tune(fd, tp_tcp_silent_ns(config), config->buffer_bytes);
            m->links->data[said.rank] = fd;
            wanted--;
            continue;
        }
        if (fd >= 0)
            close(fd);
        TP_TRY(tp_parting_hear(m->links->control, config->ranks, &m->who));
        if (tp_clock_ns() > m->deadline + 2 * LATE_NS)
            return not_called(m, wanted);
    }
    return TP_OK;
}

static tp_status
hold(meeting *m)
{
    const tp_tcp_config *config = m->config;
    int first = config->rank == 0;
    TP_TRY(tp_socket_listen(config->host, first ? config->port : 0, first ? config->ports : 1, &m->lobby.listener, &m->port));
    m->own.port = (uint16_t)m->port;
    if (first) {
        TP_TRY(receive_all(m));
    } else {
        TP_TRY(call_rank_0(m));
        TP_TRY(hear_verdict(m));
    }
    for (int peer = 0; peer < config->rank; peer++)
        if (tp_tcp_talk(config, config->rank, peer))
            TP_TRY(call_peer(m, peer));
    return wait_for_callers(m);
}

tp_status
tp_links_open(const tp_tcp_config *config, const tp_region *region, tp_links *out)
{
    size_t ranks = (size_t)config->ranks;
    meeting m = {.config = config, .region = region, .links = out, .lobby.listener = -1, .who = config->rank};
    m.deadline = tp_clock_ns() + config->meeting_ns;
    m.own = (greeting){.magic = MAGIC, .kind = GREET_CONTROL, .rank = config->rank, .ranks = config->ranks};
    memcpy(m.own.token, config->token, strlen(config->token)); /* shorter than a word: the caller has looked */
    memcpy(m.own.version, config->version, strlen(config->version));
    memcpy(m.own.plan, config->plan, strlen(config->plan));
    m.word = (verdict){.magic = MAGIC};
    TP_TRY(tp_links_make(config->ranks, out));
    m.heard = calloc(ranks, sizeof *m.heard);
    m.table = calloc(1, table_bytes(config->ranks));
    tp_status status = TP_OK;
    if (m.heard == NULL || m.table == NULL)
        status = tp_fail(TP_EMEMORY, "no memory to meet %d ranks", config->ranks);
    if (status == TP_OK && ranks > 1)
        status = hold(&m);
    if (status != TP_OK && m.table != NULL && m.table->entries[0].port != 0) /* they have met: no verdict tells of it any more */
        tp_parting_say(out->control, config->ranks, m.who, status);
    while (m.lobby.count > 0)
        dismiss(&m.lobby, 0, 1);
    if (m.lobby.listener >= 0)
        close(m.lobby.listener);
    free(m.heard);
    free(m.table);
    if (status != TP_OK)
        tp_links_close(out);
    return status;
}
