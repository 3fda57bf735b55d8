/* libnccl.so for tests whose ranks are processes (fake_nccl.c has ranks that are threads, and more faults). Rank 0's unique id
 * names a memory file of its process, which holds every communicator: for each pair of ranks and direction a ring of bytes. Strict
 * as the real library: a communicator in progress takes no other call; a split, the first operation with a rank and a finalize end
 * when all ranks concerned have come to them; messages match in order and by size; the end of a peer's process is an error at once,
 * as over sockets. Faults: tests/cuda/fake_faults.h. */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cuda/dl_nccl.h"
#include "tests/cuda/fake_emulator.h"
#include "tests/cuda/fake_faults.h"

#define EXPORT __attribute__((visibility("default")))
#define FAKE(name) EXPORT int name

enum { RANKS = 8, SPLITS = 80, RING = 1 << 18, WANTED = 1024, LOOKS = 1 };
static const uint64_t FILE_BYTES = 1ull << 32, FIRST = 4096; /* it is sparse; of the first communicator */

typedef struct { /* one direction of a pair */
    _Atomic uint64_t head, tail; /* bytes written, and read */
    _Atomic int greeted;         /* the sender has called for an operation with the receiver */
    char data[RING];
} ring;

typedef struct {
    _Atomic int called, done;
    int color[RANKS], key[RANKS], rank[RANKS];
    uint64_t child[RANKS];
} split;

typedef struct { /* a communicator, in the file */
    int ranks;
    _Atomic int joined, finalized, aborted, error, pid[RANKS];
    split split[SPLITS];
    ring ring[];
} shared;

typedef struct {
    void *data;
    size_t bytes;
} message;

struct nc_comm {
    char *file;
    shared *all;
    int rank, looks, dead, splits, splitting, finalizing, pending;
    struct nc_comm **child; /* where a split writes what it made, when it comes to its end */
    int pidfd[RANKS];
    message want[RANKS][WANTED];
    unsigned first[RANKS], last[RANKS]; /* of those */
};

typedef struct {
    nc_comm comm;
    int peer, sends;
    message message;
} operation;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int depth, grouped;
static _Thread_local operation group[2 * RANKS];
static _Thread_local nc_comm aborting[4 * RANKS]; /* in this group */
static _Thread_local int aborts;
static char why[512] = "the fake has no more to say";

/* What the real library would refuse, or do wrongly without a word. */
static int
misused(const char *how)
{
    fprintf(stderr, "fake NCCL of rank %d is misused: %s\n", own_rank, how);
    return NC_INVALID_USAGE;
}

/* ---- the emulator --------------------------------------------------------------------------------------------------------- */

static void
declare(const void *data, size_t bytes, int gives)
{
    find_emulator();
    if (emulator.foreign != NULL)
        emulator.foreign(data, bytes, gives);
}

/* ---- communicators: all with the lock held -------------------------------------------------------------------------------- */

static uint64_t
size_of(int ranks)
{
    return (sizeof(shared) + (uint64_t)ranks * (uint64_t)ranks * sizeof(ring) + 63) / 64 * 64;
}

static ring *
ring_of(nc_comm c, int from, int to)
{
    return &c->all->ring[from * c->all->ranks + to];
}

static nc_comm
join(char *file, uint64_t at, int rank)
{
    nc_comm c = calloc(1, sizeof *c); /* not freed: a test's process is short */
    c->file = file;
    c->all = (shared *)(file + at);
    c->rank = rank;
    c->looks = LOOKS;
    c->all->pid[rank] = getpid();
    c->all->joined++;
    return c;
}

static int
refuse(nc_comm c, const char *call)
{
    if (c->dead || c->looks > 0 || c->splitting || c->finalizing || c->all->joined < c->all->ranks)
        return misused(call);
    return NC_SUCCESS;
}

static int
refuse_config(const nc_config *config)
{
    if (config->magic != NC_CONFIG_MAGIC || config->size != sizeof *config || config->blocking != 0 || config->split_share != 0)
        return NC_INVALID_USAGE;
    return config->min_ctas > config->max_ctas ? NC_INVALID_ARGUMENT : NC_SUCCESS;
}

/* By the last rank to come. The file's first word is how much of it is taken. */
static void
make_children(nc_comm c, split *s)
{
    for (int r = 0; r < c->all->ranks; r++) {
        int members = 0;
        for (int q = 0; q < c->all->ranks; q++)
            if (s->color[q] == s->color[r]) {
                members++;
                s->rank[r] += s->key[q] < s->key[r] || (s->key[q] == s->key[r] && q < r);
                s->child[r] = q < r ? s->child[q] : s->child[r];
            }
        if (s->child[r] == 0) {
            s->child[r] = atomic_fetch_add((_Atomic uint64_t *)c->file, size_of(members));
            ((shared *)(c->file + s->child[r]))->ranks = members;
        }
    }
    s->done = 1;
}

static int
is_gone(nc_comm c, int rank)
{
    int pid = c->all->pid[rank];
    if (pid == 0 || rank == c->rank || c->finalizing)
        return 0;
    if (c->pidfd[rank] == 0)
        c->pidfd[rank] = (int)syscall(SYS_pidfd_open, pid, 0);
    struct pollfd end = {.fd = c->pidfd[rank], .events = POLLIN};
    return c->pidfd[rank] < 0 || poll(&end, 1, 0) == 1;
}

static void
copy(ring *at, uint64_t where, void *data, size_t bytes, int writes)
{
    for (size_t i = 0; i < bytes; i++) {
        char *in_ring = &at->data[(where + i) % RING], *ours = (char *)data + i;
        *(writes ? in_ring : ours) = *(writes ? ours : in_ring);
    }
}

/* Take what has come for the receives of this rank, and look who has died. */
static void
progress(nc_comm c)
{
    for (int from = 0; from < c->all->ranks; from++) {
        ring *in = ring_of(c, from, c->rank);
        while (c->first[from] < c->last[from] && in->head > in->tail) {
            message *to = &c->want[from][c->first[from]++ % WANTED];
            uint64_t bytes;
            copy(in, in->tail, &bytes, sizeof bytes, 0);
            if (bytes != to->bytes) {
                misused("a message is received by another size");
                c->all->error = NC_INVALID_USAGE;
                return;
            }
            copy(in, in->tail + sizeof bytes, to->data, bytes, 0);
            in->tail += sizeof bytes + bytes;
            c->pending--;
        }
        if (c->all->error == NC_SUCCESS && is_gone(c, from))
            c->all->error = NC_REMOTE_ERROR;
    }
}

static int
operate(const operation *o)
{
    nc_comm c = o->comm;
    ring *out = ring_of(c, c->rank, o->peer);
    uint64_t bytes = o->message.bytes;
    out->greeted = 1;
    if (!o->sends) {
        c->want[o->peer][c->last[o->peer]++ % WANTED] = o->message;
        c->pending++;
    } else if (out->head - out->tail + sizeof bytes + bytes > RING) {
        return misused("too many bytes are under way for this fake");
    } else {
        copy(out, out->head, &bytes, sizeof bytes, 1);
        copy(out, out->head + sizeof bytes, o->message.data, bytes, 1);
        out->head += sizeof bytes + bytes;
    }
    c->looks = LOOKS;
    return NC_IN_PROGRESS;
}

/* ---- the library ---------------------------------------------------------------------------------------------------------- */

FAKE(ncclGetVersion)(int *out)
{
    *out = version_told(22809);
    return NC_SUCCESS;
}

FAKE(ncclGetUniqueId)(nc_id *out)
{
    int file = memfd_create("fake nccl", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)FILE_BYTES) != 0)
        return NC_SYSTEM_ERROR;
    snprintf(out->internal, sizeof out->internal, "/proc/%d/fd/%d", (int)getpid(), file);
    return NC_SUCCESS;
}

FAKE(ncclCommInitRankConfig)(nc_comm *out, int ranks, nc_id id, int rank, nc_config *config)
{
    own_rank = rank;
    fault("ncclCommInitRankConfig");
    int file = open(id.internal, O_RDWR | O_CLOEXEC), refused = refuse_config(config);
    if (file < 0 || refused != NC_SUCCESS)
        return file < 0 ? NC_SYSTEM_ERROR : refused;
    char *data = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (data == MAP_FAILED)
        return NC_SYSTEM_ERROR;
    uint64_t none = 0; /* the first to come sets how much is taken */
    atomic_compare_exchange_strong((_Atomic uint64_t *)data, &none, FIRST + size_of(ranks));
    ((shared *)(data + FIRST))->ranks = ranks;
    *out = join(data, FIRST, rank);
    return NC_IN_PROGRESS;
}

FAKE(ncclCommSplit)(nc_comm c, int color, int key, nc_comm *out, nc_config *config)
{
    fault("ncclCommSplit");
    pthread_mutex_lock(&lock);
    int refused = color < 0 ? misused("a rank without color ends by SIGSEGV where its split fails") : refuse(c, "ncclCommSplit");
    if (refused == NC_SUCCESS && (refused = refuse_config(config)) == NC_SUCCESS) {
        split *s = &c->all->split[c->splits++];
        s->color[c->rank] = color;
        s->key[c->rank] = key;
        c->splitting = 1;
        c->child = out;
        c->looks = LOOKS;
        if (++s->called == c->all->ranks)
            make_children(c, s);
    }
    pthread_mutex_unlock(&lock);
    return refused != NC_SUCCESS ? refused : NC_IN_PROGRESS;
}

FAKE(ncclCommGetAsyncError)(nc_comm c, int *state)
{
    pthread_mutex_lock(&lock);
    progress(c);
    split *s = c->splits > 0 ? &c->all->split[c->splits - 1] : NULL;
    c->splitting = c->splitting && !s->done;
    c->finalizing = c->finalizing && c->all->finalized < c->all->ranks;
    int alone = c->all->joined < c->all->ranks || c->splitting || c->finalizing;
    for (int r = 0; r < c->all->ranks; r++)
        alone |= ring_of(c, c->rank, r)->greeted && !ring_of(c, r, c->rank)->greeted;
    c->looks -= c->looks > 0 && !alone;
    *state = c->all->error ? c->all->error : c->looks > 0 || alone ? NC_IN_PROGRESS : NC_SUCCESS;
    if (*state == NC_SUCCESS && c->child != NULL) {
        *c->child = join(c->file, s->child[c->rank], s->rank[c->rank]);
        c->child = NULL;
    }
    pthread_mutex_unlock(&lock);
    return NC_SUCCESS;
}

static int
begin(const char *call, operation o, int type, tp_stream stream)
{
    find_emulator();
    if (emulator.touch != NULL && emulator.touch(stream, call, o.message.data, o.message.bytes, !o.sends) != TP_OK) {
        snprintf(why, sizeof why, "%s", emulator.message());
        return 3; /* ncclInternalError */
    }
    int failed = fault(call);
    if (failed != NC_SUCCESS)
        return failed;
    pthread_mutex_lock(&lock);
    int result = type != NC_INT8 ? NC_INVALID_USAGE : refuse(o.comm, call);
    if (result == NC_SUCCESS && depth == 0)
        result = operate(&o);
    else if (result == NC_SUCCESS)
        group[grouped++] = o;
    pthread_mutex_unlock(&lock);
    return result;
}

FAKE(ncclSend)(const void *data, size_t count, int type, int peer, nc_comm c, tp_stream stream)
{
    return begin("ncclSend", (operation){c, peer, 1, {(void *)(size_t)data, count}}, type, stream);
}

FAKE(ncclRecv)(void *data, size_t count, int type, int peer, nc_comm c, tp_stream stream)
{
    return begin("ncclRecv", (operation){c, peer, 0, {data, count}}, type, stream);
}

FAKE(ncclGroupStart)(void)
{
    depth++;
    return NC_SUCCESS;
}

FAKE(ncclGroupEnd)(void)
{
    fault("ncclGroupEnd");
    int result = --depth < 0 ? misused("ncclGroupEnd") : NC_SUCCESS;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < grouped && depth == 0 && (result == NC_SUCCESS || result == NC_IN_PROGRESS); i++)
        result = operate(&group[i]);
    grouped = depth == 0 ? 0 : grouped;
    pthread_mutex_unlock(&lock);
    for (; depth == 0 && aborts > 0; aborts--)
        while (is_stuck("others") && aborting[aborts - 1]->all->aborted < aborting[aborts - 1]->all->ranks)
            usleep(1000);
    return result;
}

/* 0: no more than `left` receives of this rank, the last, are under way. */
FAKE(fake_nccl_settled)(nc_comm c, int left)
{
    pthread_mutex_lock(&lock);
    progress(c);
    int result = c->pending <= left ? NC_SUCCESS : c->all->error ? c->all->error : NC_IN_PROGRESS;
    pthread_mutex_unlock(&lock);
    return result;
}

FAKE(ncclCommAbort)(nc_comm c)
{
    if (depth == 0 || c->dead)
        misused("ncclCommAbort");
    while (is_stuck("1"))
        pause();
    c->dead = 1;
    c->all->aborted++;
    aborting[aborts++] = c;
    return NC_SUCCESS;
}

FAKE(ncclCommFinalize)(nc_comm c)
{
    fault("ncclCommFinalize");
    pthread_mutex_lock(&lock);
    int result = c->pending > 0 ? misused("ncclCommFinalize before messages have come") : refuse(c, "ncclCommFinalize");
    c->finalizing = result == NC_SUCCESS;
    c->all->finalized += result == NC_SUCCESS;
    pthread_mutex_unlock(&lock);
    return result == NC_SUCCESS ? NC_IN_PROGRESS : result;
}

FAKE(ncclCommDestroy)(nc_comm c)
{
    if (c->dead || c->finalizing)
        misused("ncclCommDestroy");
    c->dead = 1;
    return NC_SUCCESS;
}

FAKE(ncclMemAlloc)(void **out, size_t bytes)
{
    *out = calloc(1, bytes);
    declare(*out, bytes, 1);
    return *out != NULL ? NC_SUCCESS : 1;
}

FAKE(ncclMemFree)(void *memory)
{
    declare(memory, 0, 0);
    free(memory);
    return NC_SUCCESS;
}

FAKE(ncclCommRegister)(nc_comm c, void *data, size_t bytes, void **handle)
{
    (void)bytes;
    *handle = data;
    return refuse(c, "ncclCommRegister");
}

FAKE(ncclCommDeregister)(nc_comm c, void *handle)
{
    (void)handle;
    return c->dead ? misused("ncclCommDeregister") : NC_SUCCESS;
}

EXPORT const char *
ncclGetErrorString(int result)
{
    return result == NC_REMOTE_ERROR ? "remote process exited or there was a network error" : "an error of the fake";
}

EXPORT const char *
ncclGetLastError(nc_comm c)
{
    (void)c;
    return why;
}
