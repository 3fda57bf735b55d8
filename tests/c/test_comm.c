/* Conformance of the communicator: every case runs on threads of one process and on exec'ed processes.
 *   test_comm            all cases, both kinds; exit 0 if they hold
 *   test_comm thread     one kind only (TSan sees threads, not processes)
 *   test_comm shm CASE FD RANK    one rank of one case: how the test starts itself; tcp CASE PORT RANK
 * "tcp" goes over the loopback, from threads with a region each (what TSan sees) and from processes.
 *   mpiexec -n RANKS test_comm mpi PORT    every case of so many ranks; only where this was compiled with -DTP_TEST_MPI, by
 *                                          tests/mpi_module.py */
#include "csrc/comm/pace.h"
#include "csrc/comm/tcp.h"
#ifdef TP_TEST_MPI
#include "csrc/comm/mpi.h"
#endif

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s: \"%s\"\n", __FILE__, __LINE__, #condition, tp_error_message());                \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)
#define HOLDS(text)  (strstr(tp_error_message(), (text)) != NULL)
#define RING_BYTES   16384
#define GATHER_BYTES 256
#define FAR_TOO_MUCH ((size_t)4 << 20) /* for a ring, and for what a kernel buffers of a connection */

typedef void (*case_body)(tp_comm *c, tp_region *region);

static unsigned char *
pattern(size_t bytes, uint64_t key)
{
    unsigned char *data = malloc(bytes + 1);
    CHECK(data != NULL);
    for (size_t i = 0; i < bytes; i++)
        data[i] = (unsigned char)((i * 2654435761u + key * 40503u) >> 7);
    return data;
}

static void
barrier(tp_comm *c)
{
    CHECK(c->ops->allgather(c, NULL, 0, NULL) == TP_OK);
}

static size_t
size_of_message(int i)
{
    static const size_t special[] = {
        0, 1, 47, 48, 49, 64, 65, RING_BYTES - 64, RING_BYTES, RING_BYTES + 1, 5 * RING_BYTES + 3};
    size_t specials = sizeof special / sizeof special[0];
    return (size_t)i % 3 == 0 ? special[(size_t)(i / 3) % specials] : (size_t)i * 7919u % 3000;
}

/* A ring of ranks: each sends to the next and receives from the one before, several receives posted ahead. */
static void
in_order(tp_comm *c, tp_region *region)
{
    enum { MESSAGES = 120, AHEAD = 5 };
    int next = (c->rank + 1) % c->ranks, before = (c->rank + c->ranks - 1) % c->ranks;
    unsigned char *into[MESSAGES];
    (void)region;
    for (int i = 0; i < MESSAGES + AHEAD; i++) {
        if (i < MESSAGES) {
            into[i] = calloc(1, size_of_message(i) + 1);
            CHECK(c->ops->recv_post(c, before, (uint64_t)i, into[i], size_of_message(i)) == TP_OK);
        }
        if (i < AHEAD)
            continue;
        int at = i - AHEAD;
        unsigned char *data = pattern(size_of_message(at), (uint64_t)(c->rank * 1000 + at));
        unsigned char *expected = pattern(size_of_message(at), (uint64_t)(before * 1000 + at));
        for (int turn = 0; turn < 2; turn++) /* rank 0 sends first: no circle of full rings */
            if ((c->rank == 0) == (turn == 0))
                CHECK(c->ops->send(c, next, (uint64_t)at, data, size_of_message(at)) == TP_OK);
            else
                CHECK(c->ops->recv_wait(c, before) == TP_OK);
        CHECK(memcmp(into[at], expected, size_of_message(at)) == 0);
        free(into[at]);
        free(data);
        free(expected);
    }
}

/* More receives than there is room for at first, posted when the oldest is somewhere within it; sent before any is waited for.
 * Every other rank has reserved the room. */
static void
far_ahead(tp_comm *c, tp_region *region)
{
    enum { MESSAGES = 5 * TP_COMM_POSTED + 3, EARLY = TP_COMM_POSTED / 3 };
    int next = (c->rank + 1) % c->ranks, before = (c->rank + c->ranks - 1) % c->ranks;
    uint64_t *got = calloc(MESSAGES, sizeof *got);
    (void)region;
    CHECK(got != NULL);
    for (int from = 0, to = EARLY; from < MESSAGES; from = to, to = MESSAGES) {
        if (c->rank % 2 == 0 && from > 0)
            CHECK(c->ops->reserve(c, before, MESSAGES) == TP_OK && c->ops->reserve(c, before, 1) == TP_OK);
        for (int i = from; i < to; i++)
            CHECK(c->ops->recv_post(c, before, (uint64_t)i, &got[i], sizeof got[i]) == TP_OK);
        barrier(c);
        for (int i = from; i < to; i++) {
            uint64_t data = (uint64_t)(c->rank * 1000 + i);
            CHECK(c->ops->send(c, next, (uint64_t)i, &data, sizeof data) == TP_OK);
        }
        for (int i = from; i < to; i++)
            CHECK(c->ops->recv_wait(c, before) == TP_OK && got[i] == (uint64_t)(before * 1000 + i));
    }
    free(got);
}

static void
exchanges(tp_comm *c, tp_region *region)
{
    static const size_t sizes[][2] = {
        {0, 0}, {1, 3}, {40 * RING_BYTES, 2}, {0, 9 * RING_BYTES + 5}, {3000001, 3000001}};
    int peer = c->rank ^ 1;
    (void)region;
    if (peer >= c->ranks)
        return;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        size_t out_bytes = sizes[i][c->rank & 1], in_bytes = sizes[i][!(c->rank & 1)];
        unsigned char *out = pattern(out_bytes, (uint64_t)c->rank + 7 * i),
                      *expected = pattern(in_bytes, (uint64_t)peer + 7 * i);
        unsigned char *in = calloc(1, in_bytes + 1);
        CHECK(c->ops->exchange(c, peer, i, out, out_bytes, in, in_bytes) == TP_OK);
        CHECK(memcmp(in, expected, in_bytes) == 0);
        free(out);
        free(expected);
        free(in);
    }
}

/* Chunks long enough to be streamed past the caches: the first ones, and every TP_PACE_LOOKth, go the other way whatever is faster. */
static void
long_messages(tp_comm *c, tp_region *region)
{
    enum { MESSAGES = 40, BYTES = 8 * (int)TP_PACE_LEAST + 77 };
    int peer = c->rank ^ 1;
    unsigned char *in = calloc(1, BYTES);
    (void)region;
    CHECK(in != NULL);
    for (int i = 0; i < MESSAGES; i++) {
        size_t bytes = (size_t)(BYTES - 1001 * i), odd = (size_t)i % 17; /* from any address */
        unsigned char *out = pattern(bytes + odd, (uint64_t)(c->rank + 2 * i));
        unsigned char *expected = pattern(bytes + odd, (uint64_t)(peer + 2 * i));
        CHECK(c->ops->recv_post(c, peer, (uint64_t)i, in, bytes) == TP_OK);
        CHECK(c->ops->send(c, peer, (uint64_t)i, out + odd, bytes) == TP_OK);
        CHECK(c->ops->recv_wait(c, peer) == TP_OK);
        CHECK(memcmp(in, expected + odd, bytes) == 0);
        free(out);
        free(expected);
    }
    free(in);
}

static void
gathers(tp_comm *c, tp_region *region)
{
    unsigned char mine[GATHER_BYTES], *all = malloc((size_t)c->ranks * GATHER_BYTES);
    (void)region;
    for (int round = 0; round < 300; round++) {
        size_t bytes = (size_t)round * 37 % (GATHER_BYTES + 1);
        memset(mine, c->rank * 31 + round, sizeof mine);
        CHECK(c->ops->allgather(c, mine, bytes, all) == TP_OK);
        for (int rank = 0; rank < c->ranks; rank++)
            for (size_t i = 0; i < bytes; i++)
                CHECK(all[(size_t)rank * bytes + i] == (unsigned char)(rank * 31 + round));
    }
    CHECK(c->ops->allgather(c, mine, GATHER_BYTES + 1, all) == TP_EVALUE);
    CHECK(HOLDS("257") && HOLDS("256"));
    barrier(c);
    tp_status status = c->ops->allgather(c, mine, c->rank == 0 ? 8 : 16, all);
    CHECK(status == TP_ECONNECTION && HOLDS("8 bytes") + HOLDS("16 bytes") + HOLDS("gathers") >= 2);
    free(all);
}

static void
wrong_messages(tp_comm *c, tp_region *region)
{
    unsigned char data[64] = {0};
    (void)region;
    if (c->rank == 0) {
        CHECK(c->ops->send(c, 1, tp_tag(5, 0, 3, 2), data, 64) == TP_OK);
        barrier(c);
        CHECK(c->ops->exchange(c, 1, tp_tag(7, 0, 0, 0), data, 64, data, 32) == TP_ECONNECTION);
    } else if (c->rank == 1) {
        CHECK(c->ops->recv_post(c, 0, tp_tag(5, 0, 3, 1), data, 64) == TP_OK);
        CHECK(c->ops->recv_wait(c, 0) == TP_ECONNECTION);
        CHECK(HOLDS("rank 0 sent send of the activation of micro-batch 3 slice 2 on stage 0 (64 bytes)"));
        CHECK(HOLDS("rank 1 expected send of the activation of micro-batch 3 slice 1 on stage 0 (64 bytes)"));
        barrier(c);
        CHECK(c->ops->exchange(c, 0, tp_tag(5, 0, 3, 2), data, 64, data, 64) ==
              TP_OK); /* takes the message left there */
    } else {
        barrier(c);
    }
}

static void
deadlines(tp_comm *c, tp_region *region)
{
    unsigned char *data = calloc(1, FAR_TOO_MUCH);
    c->timeout_ns = 30000000;
    if (c->rank == 0) {
        tp_region_progress(region, 0, 5, tp_tag(0, 1, 2, 3));
        CHECK(c->ops->send(c, 1, tp_tag(5, 0, 0, 0), data, FAR_TOO_MUCH) == TP_ETIMEOUT);
        CHECK(HOLDS("to send a message to rank 1") && HOLDS("4194304 bytes"));
    } else if (c->rank == 1) {
        CHECK(c->ops->recv_post(c, 2 % c->ranks, 9, data, 8) == TP_OK);
        if (c->ranks > 2)
            CHECK(c->ops->recv_wait(c, 2) == TP_ETIMEOUT && HOLDS("rank 2") && HOLDS("before its first instruction"));
    }
    c->timeout_ns = 0;
    barrier(c);
    free(data);
}

static void
bad_requests(tp_comm *c, tp_region *region)
{
    unsigned char data[8] = {0};
    tp_comm *other;
    CHECK(c->ops->send(c, c->rank, 0, data, 8) == TP_EVALUE);
    CHECK(c->ops->send(c, c->ranks, 0, data, 8) == TP_EVALUE && HOLDS("peer is"));
    CHECK(c->ops->recv_post(c, -1, 0, data, 8) == TP_EVALUE);
    CHECK(c->ops->recv_wait(c, c->ranks) == TP_EVALUE);
    int peer = (c->rank + 1) % c->ranks;
    CHECK(c->ops->recv_wait(c, peer) == TP_EVALUE && HOLDS("has posted no receive"));
    CHECK(c->ops->recv_post(c, peer, 0, data, 8) == TP_OK);
    CHECK(c->ops->exchange(c, peer, 0, data, 8, data, 8) == TP_EVALUE && HOLDS("posted"));
    CHECK(tp_comm_open_region(region, c->ranks, "thread", 0, &other) == TP_EVALUE);
    CHECK(tp_comm_open_region(region, 0, "carrier pigeon", 0, &other) == TP_EVALUE && HOLDS("carrier pigeon"));
    barrier(c);
}

/* The last rank fails while the others are blocked in every kind of wait. */
static void
aborts(tp_comm *c, tp_region *region)
{
    unsigned char *data = calloc(1, FAR_TOO_MUCH);
    tp_status status;
    int last = c->ranks - 1, first = -1;
    char text[512];
    if (c->rank == last) {
        usleep(20000); /* the others sleep by now, or soon: both must end */
        tp_region_abort(region, TP_ERUNTIME, last, "the first failure");
        tp_region_abort(region, TP_EIO, 0, "a later one");
        status = c->ops->allgather(c, NULL, 0, NULL);
    } else if (c->rank == 0) {
        status = c->ops->send(c, 1, 0, data, FAR_TOO_MUCH);
    } else if (c->rank == 1) {
        status = c->ops->exchange(c, last, 0, data, 10, data, 10);
    } else {
        status = c->ops->allgather(c, NULL, 0, NULL);
    }
    CHECK(status == TP_EABORTED && HOLDS("the first failure"));
    CHECK(tp_region_aborted(region, &first, text) == TP_ERUNTIME && first == last &&
          strcmp(text, "the first failure") == 0);
    free(data);
}

static const struct {
    const char *name;
    int ranks;
    case_body body;
    size_t ring_bytes; /* 0: RING_BYTES */
} cases[] = {
    {"in_order", 2, in_order, 0},
    {"in_order of 5", 5, in_order, 0},
    {"far_ahead", 2, far_ahead, 0},
    {"far_ahead of 3", 3, far_ahead, 0},
    {"exchanges", 2, exchanges, 0},
    {"exchanges of 4", 4, exchanges, 0},
    {"long_messages", 2, long_messages, (size_t)1 << 20},
    {"gathers", 2, gathers, 0},
    {"gathers of 7", 7, gathers, 0},
    {"wrong_messages", 3, wrong_messages, 0},
    {"deadlines", 3, deadlines, 0},
    {"bad_requests", 2, bad_requests, 0},
    {"aborts", 4, aborts, 0},
    {"gathers alone", 1, gathers, 0},
};
#define CASES ((int)(sizeof cases / sizeof cases[0]))

typedef struct {
    tp_region *region; /* NULL: a region of its own, and tcp */
    int rank, number, port;
    const char *kind;
} rank_job;

static tp_comm *
open_comm(const rank_job *job, int ranks)
{
    tp_comm *comm;
    uint8_t pairs[64];
    char run[32];
    memset(pairs, 1, sizeof pairs);
    if (strcmp(job->kind, "tcp") != 0) {
        CHECK(tp_comm_open_region(job->region, job->rank, job->kind, 0, &comm) == TP_OK);
        return comm;
    }
    snprintf(run, sizeof run, "%d", job->port * 100 + job->number);
    tp_tcp_config config = {.rank = job->rank, .ranks = ranks, .host = "127.0.0.1", .port = job->port, .ports = 20,
                            .token = run, .version = "1", .plan = "a", .pairs = pairs, .max_gather_bytes = GATHER_BYTES,
                            .meeting_ns = 30000000000, .buffer_bytes = 16 * RING_BYTES};
    CHECK(tp_comm_open_tcp(&config, job->region, &comm) == TP_OK);
    return comm;
}

static void *
run_rank(void *argument)
{
    rank_job *job = argument;
    tp_comm *comm = open_comm(job, cases[job->number].ranks);
    if (cases[job->number].ranks == 1 && cases[job->number].body == gathers) { /* alone, sizes cannot differ */
        for (int i = 0; i < 10; i++)
            barrier(comm);
        comm->ops->close(comm);
        return NULL;
    }
    cases[job->number].body(comm, job->region);
    comm->ops->close(comm);
    return NULL;
}

static size_t
make_region(int number, int rings, int shared, int *fd, void **memory, tp_region **region)
{
    uint8_t pairs[64];
    size_t bytes;
    int ranks = cases[number].ranks;
    size_t ring_bytes = cases[number].ring_bytes > 0 ? cases[number].ring_bytes : RING_BYTES;
    for (int i = 0; i < 64; i++) /* rings of that size, and of a half and a quarter */
        pairs[i] = (uint8_t)(rings && cases[number].ring_bytes == 0 ? 1 + i % 3 : rings);
    CHECK(tp_region_bytes(ranks, pairs, ring_bytes, GATHER_BYTES, &bytes) == TP_OK);
    CHECK((shared ? tp_shm_create(bytes, fd, memory) : tp_local_create(bytes, memory)) == TP_OK);
    CHECK(tp_region_create(*memory, bytes, ranks, pairs, ring_bytes, GATHER_BYTES, region) == TP_OK);
    return bytes;
}

static void
run_threads(int number)
{
    pthread_t threads[8];
    rank_job jobs[8];
    void *memory;
    tp_region *region;
    int ranks = cases[number].ranks;
    size_t bytes = make_region(number, 1, 0, NULL, &memory, &region);
    for (int rank = 0; rank < ranks; rank++) {
        jobs[rank] = (rank_job){region, rank, number, 0, "thread"};
        CHECK(pthread_create(&threads[rank], NULL, run_rank, &jobs[rank]) == 0);
    }
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(threads[rank], NULL);
    tp_shm_detach(memory, bytes);
}

static pid_t
start(const char *kind, int number, int how, int rank)
{
    char words[3][16];
    snprintf(words[0], 16, "%d", number);
    snprintf(words[1], 16, "%d", how);
    snprintf(words[2], 16, "%d", rank);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        execl("/proc/self/exe", "test_comm", kind, words[0], words[1], words[2], (char *)NULL);
        _exit(99);
    }
    return pid;
}

/* `how`: the descriptor of the region, or the port. */
static void
run_processes(const char *kind, int number, int how)
{
    pid_t pids[8];
    int failed = 0;
    for (int rank = 0; rank < cases[number].ranks; rank++)
        pids[rank] = start(kind, number, how, rank);
    for (int rank = 0; rank < cases[number].ranks; rank++) {
        int status;
        waitpid(pids[rank], &status, 0);
        failed |= status != 0;
    }
    CHECK(!failed);
}

static void
run_shm(int number)
{
    void *memory;
    tp_region *region;
    int fd;
    size_t bytes = make_region(number, 1, 1, &fd, &memory, &region);
    int passed = dup(fd);        /* without close-on-exec */
    CHECK(ftruncate(fd, 0) < 0); /* sealed: nobody can turn a peer's read into a SIGBUS */
    close(fd);
    run_processes("shm", number, passed);
    close(passed);
    tp_shm_detach(memory, bytes);
}

static void *
run_tcp_rank(void *argument)
{
    rank_job *job = argument;
    void *memory;
    size_t bytes = make_region(job->number, 0, 0, NULL, &memory, &job->region);
    run_rank(job);
    tp_shm_detach(memory, bytes);
    return NULL;
}

static void
run_tcp_threads(int number, int port)
{
    pthread_t threads[8];
    rank_job jobs[8];
    for (int rank = 0; rank < cases[number].ranks; rank++) {
        jobs[rank] = (rank_job){NULL, rank, number, port, "tcp"};
        CHECK(pthread_create(&threads[rank], NULL, run_tcp_rank, &jobs[rank]) == 0);
    }
    for (int rank = 0; rank < cases[number].ranks; rank++)
        pthread_join(threads[rank], NULL);
}

#ifdef TP_TEST_MPI
static const char *
first_set(const char *one, const char *other)
{
    return getenv(one) != NULL ? getenv(one) : getenv(other);
}

/* Cases that leave MPI a message that is never taken come last of their number of ranks: no other can follow. */
static int
run_mpi_rank(int port)
{
    const char *mine = first_set("PMI_RANK", "OMPI_COMM_WORLD_RANK"), *all = first_set("PMI_SIZE", "OMPI_COMM_WORLD_SIZE");
    int rank, ranks;
    CHECK(mine != NULL && all != NULL);
    for (int number = 0; number < CASES; number++) {
        rank_job job = {NULL, atoi(mine), number, port, "tcp"};
        void *memory;
        tp_comm *comm;
        if (cases[number].ranks != atoi(all) || cases[number].ranks == 1)
            continue;
        size_t bytes = make_region(number, 0, 0, NULL, &memory, &job.region);
        tp_comm *control = open_comm(&job, atoi(all));
        CHECK(tp_mpi()->start(&rank, &ranks) == TP_OK && rank == atoi(mine) && ranks == atoi(all));
        CHECK(tp_mpi()->open(control, job.region, 4 * RING_BYTES, &comm) == TP_OK);
        cases[number].body(comm, job.region);
        comm->ops->close(comm);
        printf("rank %d: %s holds\n", rank, cases[number].name);
        fflush(stdout); /* before anybody can end, which would end the others */
        control->ops->close(control);
        tp_shm_detach(memory, bytes);
    }
    tp_mpi()->finish();
    return 0;
}
#endif

static void
run_shm_rank(int number, int fd, int rank)
{
    void *memory;
    size_t bytes;
    rank_job job = {NULL, rank, number, 0, "shm"};
    CHECK(tp_shm_attach(fd, &bytes, &memory) == TP_OK);
    CHECK(tp_region_attach(memory, bytes, &job.region) == TP_OK);
    run_rank(&job);
    tp_shm_detach(memory, bytes);
}

static void
memory_is_refused(void)
{
    void *memory;
    int fd = -1;
    size_t bytes = 0;
    uint8_t pairs[4] = {0, 1, 1, 0};
    tp_region *region;
    CHECK(tp_shm_create((size_t)1 << 45, &fd, &memory) == TP_EIO && HOLDS("35184372088832 bytes") &&
          HOLDS("available"));
    CHECK(fd == -1);
    CHECK(tp_shm_attach(STDERR_FILENO, &bytes, &memory) == TP_EIO);
    CHECK(tp_region_bytes(0, pairs, 1, 1, &bytes) == TP_EVALUE &&
          tp_region_bytes(5000, pairs, 1, 1, &bytes) == TP_EVALUE);
    CHECK(tp_region_bytes(2, pairs, (size_t)1 << 50, 1, &bytes) == TP_EVALUE);
    size_t whole, halves;
    CHECK(tp_region_bytes(2, pairs, 1 << 20, 64, &whole) == TP_OK);
    pairs[1] = pairs[2] = 4;
    CHECK(tp_region_bytes(2, pairs, 1 << 20, 64, &halves) == TP_OK && whole - halves == 2 * ((1 << 20) - (1 << 17)));
    pairs[1] = pairs[2] = 255; /* no ring is smaller than the floor */
    CHECK(tp_region_bytes(2, pairs, 1 << 20, 64, &halves) == TP_OK && whole - halves == 2 * ((1 << 20) - 4096));
    pairs[1] = pairs[2] = 1;
    CHECK(tp_local_create(1 << 16, &memory) == TP_OK);
    CHECK(tp_region_attach(memory, 1 << 16, &region) == TP_EVALUE && HOLDS("not a region"));
    CHECK(tp_region_create(memory, 1 << 10, 2, pairs, 4096, 64, &region) == TP_EVALUE);
    tp_shm_detach(memory, 1 << 16);
}

/* All sizes arrive whole from any address and nothing beyond them changes, in both ways; the way that is clearly faster is taken,
 * and the other one looked at now and then. */
static void
paces(void)
{
    enum { MOST = (int)TP_PACE_LEAST + 200 };
    unsigned char *to = aligned_alloc(64, MOST + 64 - MOST % 64), *from = pattern(MOST, 3);
    CHECK(to != NULL);
    for (int way = 0; way < TP_PACE_WAYS; way++)
        for (size_t odd = 0; odd < 70; odd++) {
            size_t bytes = odd < 2 ? odd : TP_PACE_LEAST + odd - 2;
            tp_pace pace = {.ns = {way == TP_PACE_STORED ? 1e-6F : 1e6F, way == TP_PACE_STORED ? 1e6F : 1e-6F}}, before = pace;
            memset(to, 0xA5, MOST);
            tp_pace_copy(&pace, to, from + odd, bytes);
            CHECK(memcmp(to, from + odd, bytes) == 0 && to[bytes] == 0xA5);
            CHECK((pace.ns[way] != before.ns[way]) == (bytes >= TP_PACE_LEAST));
            CHECK(pace.ns[!way] == before.ns[!way]);
        }
    tp_pace pace = {.ns = {1e-6F, 1e6F}};
    for (int i = 1; i <= TP_PACE_LOOK; i++) {
        CHECK(pace.ns[TP_PACE_STREAMED] == 1e6F);
        tp_pace_copy(&pace, to, from, TP_PACE_LEAST);
    }
    CHECK(pace.ns[TP_PACE_STREAMED] < 1e6F);
    pace = (tp_pace){.ns = {0}};
    tp_pace_copy(&pace, to, from, TP_PACE_LEAST);
    CHECK(pace.ns[TP_PACE_STORED] > 0 && pace.ns[TP_PACE_STREAMED] == 0);
    tp_pace_copy(&pace, to, from, TP_PACE_LEAST);
    CHECK(pace.ns[TP_PACE_STREAMED] > 0);
    free(to);
    free(from);
}

static int
wanted(const char *only, const char *kind)
{
    return *only == 0 || strcmp(only, kind) == 0;
}

int
main(int count, char **words)
{
    alarm(60); /* nothing here may hang */
    if (count == 5 && strcmp(words[1], "tcp") == 0) {
        rank_job job = {NULL, atoi(words[4]), atoi(words[2]), atoi(words[3]), "tcp"};
        run_tcp_rank(&job);
        return 0;
    }
#ifdef TP_TEST_MPI
    if (count == 3 && strcmp(words[1], "mpi") == 0)
        return run_mpi_rank(atoi(words[2]));
#endif
    if (count == 5) {
        run_shm_rank(atoi(words[2]), atoi(words[3]), atoi(words[4]));
        return 0;
    }
    const char *only = count > 1 ? words[1] : "";
    int port = 20000 + getpid() % 600 * 20;
    if (wanted(only, "shm"))
        memory_is_refused();
    if (wanted(only, "thread"))
        paces();
    for (int number = 0; number < CASES; number++) {
        if (wanted(only, "thread"))
            run_threads(number);
        if (wanted(only, "shm"))
            run_shm(number);
        if (wanted(only, "tcp") || wanted(only, "thread"))
            run_tcp_threads(number, port);
        if (wanted(only, "tcp"))
            run_processes("tcp", number, port);
    }
    return 0;
}
