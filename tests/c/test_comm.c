/* Conformance of the communicator: every case runs on threads of one process and on exec'ed processes.
 *   test_comm            all cases, both kinds; exit 0 if they hold
 *   test_comm thread     one kind only (TSan sees threads, not processes)
 *   test_comm shm CASE FD RANK    one rank of one case: how the test starts itself; tcp CASE PORT RANK
 * "tcp" goes over the loopback, from threads with a region each (what TSan sees) and from processes.
 *   mpiexec -n RANKS test_comm mpi PORT    every case of so many ranks; only where this was compiled with -DTP_TEST_MPI, by
 *                                          tests/mpi_module.py */
#include "csrc/base/clock.h"
#include "csrc/comm/pace.h"
#include "csrc/comm/region.h"
#include "csrc/comm/tcp.h"
#include "tests/c/comm_cases.h"
#include "tests/c/given_up.h"
#ifdef TP_TEST_MPI
#include "csrc/comm/mpi.h"
#endif

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

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
    {"lends", 2, lends, 0},
    {"lends of 4", 4, lends, 0},
    {"progresses", 2, progresses, 0},
    {"kept_loans", 2, kept_loans, 0},
    {"begins_anew", 2, begins_anew, 0},
    {"lent_nowhere", 2, lent_nowhere, 0},
    {"long_messages", 2, long_messages, (size_t)1 << 20},
    {"gathers", 2, gathers, 0},
    {"gathers of 7", 7, gathers, 0},
    {"moves_on", 3, moves_on, 0},
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
        MUST(tp_comm_open_region(job->region, job->rank, job->kind, 0, &comm) == TP_OK);
        return comm;
    }
    snprintf(run, sizeof run, "%d", job->port * 100 + job->number);
    tp_tcp_config config = {.rank = job->rank, .ranks = ranks, .host = "127.0.0.1", .port = job->port, .ports = 20,
                            .token = run, .version = "1", .plan = "a", .pairs = pairs, .max_gather_bytes = GATHER_BYTES,
                            .meeting_ns = 30000000000, .buffer_bytes = 16 * RING_BYTES};
    MUST(tp_comm_open_tcp(&config, job->region, &comm) == TP_OK);
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
    size_t arenas[8];
    for (int rank = 0; rank < ranks; rank++)
        arenas[rank] = ARENA_BYTES;
    tp_region_shape shape = {ranks, pairs, ring_bytes, GATHER_BYTES, rings ? arenas : NULL};
    MUST(tp_region_bytes(&shape, &bytes) == TP_OK);
    MUST((shared ? tp_shm_create(bytes, fd, memory) : tp_local_create(bytes, memory)) == TP_OK);
    MUST(tp_region_create(*memory, bytes, &shape, region) == TP_OK);
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
        MUST(pthread_create(&threads[rank], NULL, run_rank, &jobs[rank]) == 0);
    }
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(threads[rank], NULL);
    tp_shm_detach(memory, bytes);
}

static void *
say_why(void *argument)
{
    tp_region *region = argument;
    tp_clock_sleep_until(tp_clock_ns() + 50000000);
    snprintf(region->text, sizeof region->text, "the words");
    atomic_store(&region->text_ready, 1);
    return NULL;
}

/* Of one that fails and loses its processor before it has written them, for longer than a turn of others takes. */
static void
words_of_a_slow_one_are_waited_for(void)
{
    pthread_t thread;
    void *memory;
    tp_region *region;
    int rank = -1;
    char text[512] = "";
    size_t bytes = make_region(0, 1, 0, NULL, &memory, &region);
    atomic_store(&region->failure, (uint64_t)TP_ERUNTIME << 32 | 2); /* of rank 1 */
    MUST(pthread_create(&thread, NULL, say_why, region) == 0);
    MUST(tp_region_aborted(region, &rank, text) == TP_ERUNTIME && rank == 1 && strcmp(text, "the words") == 0);
    pthread_join(thread, NULL);
    tp_shm_detach(memory, bytes);
}

/* Of one that died between its failure and its words: who asks twenty times, as the end of a run does, waits once. */
static void
words_that_never_come_are_waited_for_once(void)
{
    void *memory;
    tp_region *region;
    int rank = -1;
    char text[512] = "";
    size_t bytes = make_region(0, 1, 0, NULL, &memory, &region);
    atomic_store(&region->failure, (uint64_t)TP_ERUNTIME << 32 | 2);
    int64_t since = tp_clock_ns();
    for (int i = 0; i < 20; i++)
        MUST(tp_region_aborted(region, &rank, text) == TP_ERUNTIME && rank == 1 && strstr(text, "died before it could say why"));
    MUST(tp_clock_ns() - since < 15000000000ll); /* not twenty times a second */
    say_why(region); /* it was only slow */
    MUST(tp_region_aborted(region, &rank, text) == TP_ERUNTIME && strcmp(text, "the words") == 0);
    tp_shm_detach(memory, bytes);
}

/* A writer that goes back to the ring's start says so first, and then what it has written there: a reader who looks in between has
 * nothing to take, and not what was there long ago. */
static void
a_writer_that_goes_back_has_written_nothing_yet(void)
{
    enum { BYTES = 1 << 17, MESSAGES = 4 };
    const uint8_t pairs[4] = {0, 1, 1, 0};
    const tp_region_shape shape = {2, pairs, 1 << 20, 64, NULL};
    void *memory;
    tp_region *region;
    tp_comm *from, *to;
    size_t bytes = local_region(&shape, &memory, &region);
    MUST(tp_comm_open_region(region, 0, "thread", 0, &from) == TP_OK && tp_comm_open_region(region, 1, "thread", 0, &to) == TP_OK);
    unsigned char *data = pattern(BYTES, 1), *into = calloc(1, BYTES);
    tp_ring *ring = tp_region_ring(region, 0, 1);
    MUST(into != NULL);
    for (uint64_t i = 0; i <= MESSAGES; i++) {
        memset(into, 0, BYTES);
        MUST(to->ops->recv_post(to, 0, i, into, BYTES) == TP_OK);
        if (i == MESSAGES) {
            uint64_t tail = ring->tail;
            ring->skip = ring->head + ring->capacity - ring->head % ring->capacity;
            MUST(to->ops->progress(to) == TP_OK && ring->tail == tail);
        }
        MUST(from->ops->send(from, 1, i, data, BYTES) == TP_OK && to->ops->recv_wait(to, 0) == TP_OK);
        MUST(memcmp(data, into, BYTES) == 0);
    }
    MUST(ring->head < ring->skip + 2 * BYTES && ring->head > ring->skip); /* it did go back */
    free(data);
    free(into);
    from->ops->close(from);
    to->ops->close(to);
    tp_shm_detach(memory, bytes);
}

/* A device's wait, of which its region has no word, does not lead on to the very rank that waits: its peer's host may be ahead. */
static void
nobody_is_told_of_itself(void)
{
    const tp_region_shape shape = {3, (const uint8_t[9]){0}, 0, 64, NULL};
    char text[TP_HELD_TEXT];
    void *memory;
    tp_region *region;
    tp_comm *comm;
    size_t bytes = local_region(&shape, &memory, &region);
    MUST(tp_comm_open_region(region, 0, "thread", 0, &comm) == TP_OK);
    tp_region_rank_at(region, 1)->rounds = tp_region_rank_at(region, 2)->rounds = 1;
    tp_region_await(region, 1, -1);
    tp_comm_say_who_holds_up(comm, region, 1, text);
    MUST(strcmp(text, "; rank 1 is before its first instruction") == 0);
    tp_region_rank_at(region, 2)->rounds = 0;
    tp_region_await(region, 1, 2);
    tp_comm_say_who_holds_up(comm, region, 1, text);
    MUST(strstr(text, ", and in the end waits for rank 2, which is before") != NULL);
    comm->ops->close(comm);
    tp_shm_detach(memory, bytes);
}

/* Who was stopped itself has not listened meanwhile: that it has heard nothing of rank 0 is not for that one's silence. */
static void
one_that_was_stopped_blames_not_rank_0(int port)
{
    enum { LONGEST = 500000000 };
    tp_region *region;
    void *memory;
    char text[TP_HELD_TEXT];
    int status;
    size_t bytes = make_region(0, 0, 0, NULL, &memory, &region);
    pid_t pid = fork();
    MUST(pid >= 0);
    const rank_job job = {region, pid == 0, CASES, port, "tcp"};
    tp_comm *comm = open_comm(&job, 2);
    if (pid == 0) {
        region->silent_ns = LONGEST;
        while (region->unheard_ns == 0 || region->unheard_ns > LONGEST / 5)
            tp_clock_sleep_until(tp_clock_ns() + 1000000);
        raise(SIGSTOP);
        tp_comm_say_who_holds_up(comm, region, 0, text);
        _exit(strcmp(text, "; rank 0 is before its first instruction") != 0);
    }
    MUST(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
    tp_clock_sleep_until(tp_clock_ns() + LONGEST + LONGEST / 5);
    MUST(kill(pid, SIGCONT) == 0 && waitpid(pid, &status, 0) == pid && status == 0);
    comm->ops->close(comm);
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
    MUST(pid >= 0);
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
    MUST(!failed);
}

static void
run_shm(int number)
{
    void *memory;
    tp_region *region;
    int fd;
    size_t bytes = make_region(number, 1, 1, &fd, &memory, &region);
    int passed = dup(fd);        /* without close-on-exec */
    MUST(ftruncate(fd, 0) < 0); /* sealed: nobody can turn a peer's read into a SIGBUS */
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
        MUST(pthread_create(&threads[rank], NULL, run_tcp_rank, &jobs[rank]) == 0);
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
    MUST(mine != NULL && all != NULL);
    for (int number = 0; number < CASES; number++) {
        rank_job job = {NULL, atoi(mine), number, port, "tcp"};
        void *memory;
        tp_comm *comm;
        if (cases[number].ranks != atoi(all) || cases[number].ranks == 1)
            continue;
        size_t bytes = make_region(number, 0, 0, NULL, &memory, &job.region);
        tp_comm *control = open_comm(&job, atoi(all));
        MUST(tp_mpi()->start(&rank, &ranks) == TP_OK && rank == atoi(mine) && ranks == atoi(all));
        MUST(tp_mpi()->open(control, job.region, 4 * RING_BYTES, &comm) == TP_OK);
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
    MUST(tp_shm_attach(fd, &bytes, &memory) == TP_OK);
    MUST(tp_region_attach(memory, bytes, &job.region) == TP_OK);
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
    MUST(tp_shm_create((size_t)1 << 45, &fd, &memory) == TP_EIO && HOLDS("35184372088832 bytes") &&
          HOLDS("available"));
    MUST(fd == -1);
    MUST(tp_shm_attach(STDERR_FILENO, &bytes, &memory) == TP_EIO);
    for (int bad = 0; bad < 4; bad++) {
        const size_t arenas[2] = {0, (size_t)1 << 50};
        tp_region_shape shape = {bad == 0 ? 0 : bad == 1 ? 5000 : 2, pairs, bad == 2 ? (size_t)1 << 50 : 1, 1, bad == 3 ? arenas : NULL};
        MUST(tp_region_bytes(&shape, &bytes) == TP_EVALUE && HOLDS("would be right"));
    }
    const size_t arenas[2] = {3 * 4096, 1};
    tp_region_shape shape = {2, pairs, 1 << 20, 64, arenas};
    size_t whole, halves;
    MUST(tp_region_bytes(&shape, &halves) == TP_OK);
    shape.arena_bytes = NULL;
    MUST(tp_region_bytes(&shape, &whole) == TP_OK && halves - whole == 4 * 4096);
    pairs[1] = pairs[2] = 4;
    MUST(tp_region_bytes(&shape, &halves) == TP_OK && whole - halves == 2 * ((1 << 20) - (1 << 17)));
    pairs[1] = pairs[2] = 255; /* no ring is smaller than the floor */
    MUST(tp_region_bytes(&shape, &halves) == TP_OK && whole - halves == 2 * ((1 << 20) - 4096));
    pairs[1] = pairs[2] = 1;
    MUST(tp_local_create(1 << 16, &memory) == TP_OK);
    MUST(tp_region_attach(memory, 1 << 16, &region) == TP_EVALUE && HOLDS("not a region"));
    MUST(tp_region_create(memory, 1 << 10, &shape, &region) == TP_EVALUE);
    tp_shm_detach(memory, 1 << 16);
}

/* Whatever word of its head, of its table, or before a ring is not what it was, nobody attaches to it: a rank died of SIGSEGV in it. */
static void
a_damaged_region_is_refused(void)
{
    const uint8_t pairs[4] = {0, 1, 2, 0};
    const size_t arenas[2] = {4096, 1};
    const tp_region_shape shape = {2, pairs, 1 << 14, 64, arenas};
    const uint64_t wrong[] = {0, 1, 5000, (uint64_t)1 << 31, (uint64_t)1 << 40, UINT64_MAX};
    void *memory;
    tp_region *region, *found;
    size_t bytes = local_region(&shape, &memory, &region);
    uint64_t *words[] = {&region->ranks_at, &region->table_at, &region->places_at, &region->gather_at, &region->rings_at,
                         &region->arenas_at, &region->gather_bytes, &region->bytes, &tp_region_ring(region, 0, 1)->capacity,
                         &tp_region_ring(region, 1, 0)->capacity, (uint64_t *)((uintptr_t)region + region->places_at) + 1,
                         (uint64_t *)((uintptr_t)region + region->arenas_at), (uint64_t *)((uintptr_t)region + region->arenas_at) + 2,
                         (uint64_t *)((uintptr_t)region + region->table_at)};
    MUST(tp_region_attach(memory, bytes, &found) == TP_OK && found == region);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        for (size_t k = 0; k < sizeof wrong / sizeof *wrong; k++) {
            uint64_t before = *words[i];
            *words[i] = wrong[k];
            MUST(tp_region_attach(memory, bytes, &found) == TP_EVALUE && (HOLDS("is damaged") || HOLDS("its memory only")));
            *words[i] = before;
        }
    for (int32_t ranks = -1; ranks < 5000; ranks += 2) {
        region->ranks = ranks;
        MUST(tp_region_attach(memory, bytes, &found) == TP_EVALUE && HOLDS("is damaged"));
    }
    tp_shm_detach(memory, bytes);
}

/* All sizes arrive whole from any address and nothing beyond them changes, in both ways; the way that is clearly faster is taken,
 * and the other one looked at now and then. */
static void
paces(void)
{
    enum { MOST = (int)TP_PACE_LEAST + 200 };
    unsigned char *to = aligned_alloc(64, MOST + 64 - MOST % 64), *from = pattern(MOST, 3);
    MUST(to != NULL);
    for (int way = 0; way < TP_PACE_WAYS; way++)
        for (size_t odd = 0; odd < 70; odd++) {
            size_t bytes = odd < 2 ? odd : TP_PACE_LEAST + odd - 2;
            tp_pace pace = {.ns = {way == TP_PACE_STORED ? 1e-6F : 1e6F, way == TP_PACE_STORED ? 1e6F : 1e-6F}}, before = pace;
            memset(to, 0xA5, MOST);
            tp_pace_copy(&pace, to, from + odd, bytes);
            MUST(memcmp(to, from + odd, bytes) == 0 && to[bytes] == 0xA5);
            MUST((pace.ns[way] != before.ns[way]) == (bytes >= TP_PACE_LEAST));
            MUST(pace.ns[!way] == before.ns[!way]);
        }
    tp_pace pace = {.ns = {1e-6F, 1e6F}};
    for (int i = 1; i <= TP_PACE_LOOK; i++) {
        MUST(pace.ns[TP_PACE_STREAMED] == 1e6F);
        tp_pace_copy(&pace, to, from, TP_PACE_LEAST);
    }
    MUST(pace.ns[TP_PACE_STREAMED] < 1e6F);
    pace = (tp_pace){.ns = {0}};
    tp_pace_copy(&pace, to, from, TP_PACE_LEAST);
    MUST(pace.ns[TP_PACE_STORED] > 0 && pace.ns[TP_PACE_STREAMED] == 0);
    tp_pace_copy(&pace, to, from, TP_PACE_LEAST);
    MUST(pace.ns[TP_PACE_STREAMED] > 0);
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
    if (wanted(only, "thread")) {
        a_damaged_region_is_refused();
        paces();
        words_of_a_slow_one_are_waited_for();
        words_that_never_come_are_waited_for_once();
        a_writer_that_goes_back_has_written_nothing_yet();
        nothing_follows_what_was_given_up_both_ways();
        who_waits_for_what_was_given_up_is_told();
        nobody_is_told_of_itself();
    }
    if (wanted(only, "tcp"))
        one_that_was_stopped_blames_not_rank_0(port);
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
