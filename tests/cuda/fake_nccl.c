/* libnccl.so for tests: ranks are threads of one process, messages are copies between host buffers. What it is strict about is
 * what the real library is: a communicator in progress takes no other call, operations match in order and by size, all ranks
 * of a communicator must come to make it, and again to the first operation on it, which connects them; an aborted communicator
 * gives nothing but errors. Stricter: a communicator is destroyed when it was finalized and nothing is registered with it, since the
 * real library would finalize it within the call, for as long as that takes. Everything takes a few looks of ncclCommGetAsyncError to
 * be done. Faults: fake_nccl_set. What its streams
 * would do at the same time the emulator is told (cuda/emu/order.h), where the process has it. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/dl_nccl.h"
#include "tests/cuda/fake_emulator.h"

#define EXPORT __attribute__((visibility("default")))
#define FAKE(name) EXPORT int name

enum { PAGE = 4096 };

typedef struct operation {
    struct operation *next;
    void *data;
    size_t bytes;
} operation;

typedef struct { /* one direction */
    operation *sent, *wanted;
} mailbox;

typedef struct {
    int ranks, members, splits, called;
    int connected[16][16]; /* [rank][peer]: the rank has called for an operation with the peer */
    long number;
    mailbox box[16][16];
    struct nc_comm *member[16];
} group;

struct nc_comm {
    group *all;
    int rank, looks, error, dead, stuck, splitting, color, key, finalized, registered;
    struct nc_comm **child, *made; /* where a split writes what it made, when it comes to its end */
    int pending; /* receives */
    tp_stream stream; /* of the last operation */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static group *groups[4096];
static int group_count, calls, aborts, misuses, buffers, living;
static int looks_needed = 2, fail_call, fail_code, stuck_call, version = 22809;
static int no_memory, no_registration; /* what ncclMemAlloc and ncclCommRegister answer; -1 of the latter: done, no handle */
static void *given[4096];              /* by ncclMemAlloc, and not freed */
static _Thread_local int depth, grouped;
static _Thread_local nc_comm in_group[64]; /* of those that the thread's group has operations of */
static long last_id;

EXPORT void
fake_nccl_set(int fail_at, int code, int stuck_at, int looks, int new_version)
{
    fail_call = fail_at;
    fail_code = code;
    stuck_call = stuck_at;
    looks_needed = looks;
    version = new_version;
    calls = aborts = misuses = buffers = living = 0;
}

/* All communicators of so many ranks that are in use have that error from now on, which no call returns. */
EXPORT void
fake_nccl_spoil(int ranks, int error)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < group_count; i++)
        for (int r = 0; r < groups[i]->ranks && groups[i]->ranks == ranks; r++)
            if (groups[i]->member[r] != NULL)
                groups[i]->member[r]->error = error;
    pthread_mutex_unlock(&lock);
}

EXPORT void
fake_nccl_refuse(int memory, int registration)
{
    no_memory = memory;
    no_registration = registration;
}

/* which: 0 sends and receives so far, 1 aborts, 2 calls that the real library would have refused, 3 buffers given and not freed,
 * 4 buffers given, 5 communicators made and neither destroyed nor aborted */
EXPORT int
fake_nccl_count(int which)
{
    int held = 0;
    for (size_t i = 0; i < sizeof given / sizeof *given; i++)
        held += given[i] != NULL;
    const int counts[] = {calls, aborts, misuses, held, buffers, living};
    return counts[which];
}

/* ---- the emulator, if any ------------------------------------------------------------------------------------------------------ */

static char broken_order[512]; /* what it said */

/* NC_SUCCESS, or 3 (ncclInternalError) where streams would meet. */
static int
touch(tp_stream stream, const char *name, const void *data, size_t bytes, int writes)
{
    find_emulator();
    if (emulator.touch == NULL || emulator.touch(stream, name, data, bytes, writes) == TP_OK)
        return NC_SUCCESS;
    snprintf(broken_order, sizeof broken_order, "%s", emulator.message());
    return 3;
}

/* A table that is full would be written behind its end, into another one. */
static void
need_place(int taken, size_t places, const char *table)
{
    if ((size_t)taken < places)
        return;
    fprintf(stderr, "fake_nccl.c: %s has %zu places and all are taken: more would be right\n", table, places);
    abort();
}

/* ---- communicators -------------------------------------------------------------------------------------------------------------- */

static group *
group_numbered(long number, int ranks)
{
    for (int i = 0; i < group_count; i++)
        if (groups[i]->number == number)
            return groups[i];
    need_place(group_count, sizeof groups / sizeof *groups, "groups");
    group *g = calloc(1, sizeof *g);
    g->number = number;
    g->ranks = ranks;
    return groups[group_count++] = g;
}

static nc_comm
join(group *g, int rank)
{
    need_place(rank, sizeof g->member / sizeof *g->member, "member");
    nc_comm c = calloc(1, sizeof *c);
    c->all = g;
    c->rank = rank;
    g->member[rank] = c;
    g->members++;
    living++;
    return c;
}

/* A call on a communicator that is not ready for one, or that is no more. */
static int
refuse(nc_comm c)
{
    if (c->dead || c->looks > 0 || c->stuck || c->splitting || c->all->members < c->all->ranks) {
        misuses++;
        return NC_INVALID_USAGE;
    }
    return NC_SUCCESS;
}

FAKE(ncclGetVersion)(int *out)
{
    *out = version;
    return NC_SUCCESS;
}

FAKE(ncclGetUniqueId)(nc_id *out)
{
    pthread_mutex_lock(&lock);
    last_id += 1000000;
    memset(out, 0, sizeof *out);
    memcpy(out, &last_id, sizeof last_id);
    pthread_mutex_unlock(&lock);
    return NC_SUCCESS;
}

/* The bounds of CTAs are compared as numbers though one be undefined, the least: so did 2.28.9 on a GPU. */
static int
refuse_config(const nc_config *config)
{
    if (config->magic != NC_CONFIG_MAGIC || config->size != sizeof *config || config->blocking != 0)
        return NC_INVALID_USAGE;
    return config->min_ctas > config->max_ctas ? NC_INVALID_ARGUMENT : NC_SUCCESS;
}

FAKE(ncclCommInitRankConfig)(nc_comm *out, int ranks, nc_id id, int rank, nc_config *config)
{
    long number;
    memcpy(&number, &id, sizeof number);
    int refused = refuse_config(config);
    if (refused != NC_SUCCESS)
        return refused;
    pthread_mutex_lock(&lock);
    *out = join(group_numbered(number, ranks), rank);
    (*out)->looks = looks_needed;
    pthread_mutex_unlock(&lock);
    return NC_IN_PROGRESS;
}

#ifndef FAKE_WITHOUT_SPLIT
FAKE(ncclCommSplit)(nc_comm c, int color, int key, nc_comm *out, nc_config *config)
{
    int refused = refuse_config(config);
    if (refused != NC_SUCCESS)
        return refused;
    pthread_mutex_lock(&lock);
    int result = refuse(c);
    misuses += color < 0; /* where its split fails, a rank without color ends by SIGSEGV */
    misuses += config->split_share != 0; /* one would wait for the other: a send behind a receive that waits for it */
    if (result == NC_SUCCESS) {
        c->splitting = 1;
        c->color = color;
        c->key = key;
        c->child = out;
        c->made = NULL;
        c->looks = looks_needed;
        *out = NULL;
        group *g = c->all;
        group *part = group_numbered(g->number + 1000 * (g->splits + 1) + color, 0);
        part->ranks++; /* nobody uses it before everybody has come */
        c->made = join(part, key);
        c->made->looks = looks_needed;
        if (++g->called == g->ranks) { /* the last to come */
            g->called = 0;
            g->splits++;
            for (int r = 0; r < g->ranks; r++)
                g->member[r]->splitting = 0;
        }
        result = NC_IN_PROGRESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
#endif

FAKE(ncclCommGetAsyncError)(nc_comm c, int *state)
{
    pthread_mutex_lock(&lock);
    misuses += c->dead; /* its memory is freed */
    int alone = c->all->members < c->all->ranks || c->splitting;
    for (int r = 0; r < c->all->ranks; r++) /* the first operation with a rank waits for that one's first with this */
        alone |= c->all->connected[c->rank][r] && !c->all->connected[r][c->rank];
    if (c->looks > 0 && !alone)
        c->looks--;
    *state = c->error ? c->error : c->looks > 0 || c->stuck || alone ? NC_IN_PROGRESS : NC_SUCCESS;
    if (*state == NC_SUCCESS && c->child != NULL) {
        *c->child = c->made;
        c->child = NULL;
    }
    pthread_mutex_unlock(&lock);
    return NC_SUCCESS;
}

static void
append(operation **list, operation *one)
{
    while (*list != NULL)
        list = &(*list)->next;
    *list = one;
}

static void
match(group *g, mailbox *box, int source, int target)
{
    while (box->sent != NULL && box->wanted != NULL) {
        operation *from = box->sent, *to = box->wanted;
        nc_comm reader = g->member[target];
        if (from->bytes != to->bytes)
            reader->error = g->member[source]->error = NC_REMOTE_ERROR;
        else if (!reader->dead)
            memcpy(to->data, from->data, to->bytes);
        reader->pending--;
        box->sent = from->next;
        box->wanted = to->next;
        free(from->data);
        free(from);
        free(to);
    }
}

/* Is it of a communicator of this thread's group? From now on it is. */
static int
joins_group(nc_comm c)
{
    for (int i = 0; i < grouped; i++)
        if (in_group[i] == c)
            return 1;
    need_place(grouped, sizeof in_group / sizeof *in_group, "in_group");
    in_group[grouped++] = c;
    return 0;
}

static int
operate(nc_comm c, int source, int target, void *data, size_t bytes, int sends)
{
    pthread_mutex_lock(&lock);
    int result = depth > 0 && joins_group(c) ? NC_SUCCESS : refuse(c), number = ++calls;
    if (result == NC_SUCCESS && number == fail_call)
        result = fail_code;
    if (result == NC_SUCCESS) {
        operation *one = calloc(1, sizeof *one);
        one->bytes = bytes;
        one->data = sends ? memcpy(malloc(bytes + 1), data, bytes) : data;
        mailbox *box = &c->all->box[source][target];
        c->all->connected[c->rank][source == c->rank ? target : source] = 1;
        append(sends ? &box->sent : &box->wanted, one);
        c->pending += !sends;
        c->stuck |= number == stuck_call;
        match(c->all, box, source, target);
        c->looks = depth > 0 ? 0 : looks_needed;
        result = depth > 0 ? NC_SUCCESS : NC_IN_PROGRESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

FAKE(ncclSend)(const void *data, size_t count, int type, int peer, nc_comm c, tp_stream stream)
{
    c->stream = stream;
    int result = type != NC_INT8 ? NC_INVALID_USAGE : touch(stream, "ncclSend", data, count, 0);
    return result != NC_SUCCESS ? result : operate(c, c->rank, peer, (void *)(size_t)data, count, 1);
}

FAKE(ncclRecv)(void *data, size_t count, int type, int peer, nc_comm c, tp_stream stream)
{
    c->stream = stream;
    int result = type != NC_INT8 ? NC_INVALID_USAGE : touch(stream, "ncclRecv", data, count, 1);
    return result != NC_SUCCESS ? result : operate(c, peer, c->rank, data, count, 0);
}

FAKE(ncclGroupStart)(void)
{
    depth++;
    return NC_SUCCESS;
}

FAKE(ncclGroupEnd)(void)
{
    pthread_mutex_lock(&lock);
    for (; depth == 1 && grouped > 0; grouped--)
        in_group[grouped - 1]->looks = looks_needed;
    pthread_mutex_unlock(&lock);
    return --depth < 0 ? NC_INVALID_USAGE : NC_IN_PROGRESS;
}

/* 0: no more than `left` receives of this rank, the last, are under way. */
FAKE(fake_nccl_settled)(nc_comm c, int left)
{
    pthread_mutex_lock(&lock);
    int result = c->error ? c->error : c->pending > left ? NC_IN_PROGRESS : NC_SUCCESS;
    pthread_mutex_unlock(&lock);
    return result;
}

FAKE(ncclCommAbort)(nc_comm c)
{
    pthread_mutex_lock(&lock);
    aborts++;
    misuses += depth == 0 || c->dead; /* one by one, each may wait for the device and so for the kernels of the next */
    living -= !c->dead;
    c->dead = 1; /* not freed: a test's process is short */
    for (int r = 0; r < c->all->ranks; r++)
        c->all->box[r][c->rank].wanted = NULL;
    pthread_mutex_unlock(&lock);
    return NC_SUCCESS;
}

FAKE(ncclCommFinalize)(nc_comm c)
{
    pthread_mutex_lock(&lock);
    int result = refuse(c);
    c->looks = looks_needed;
    c->finalized = 1;
    pthread_mutex_unlock(&lock);
    return result == NC_SUCCESS ? NC_IN_PROGRESS : result;
}

FAKE(ncclCommDestroy)(nc_comm c)
{
    pthread_mutex_lock(&lock);
    int result = refuse(c);
    misuses += !c->finalized || c->registered > 0;
    living -= !c->dead;
    c->dead = 1;
    find_emulator();
    if (emulator.waited != NULL) /* for all that it has on its streams */
        emulator.waited(c->stream);
    pthread_mutex_unlock(&lock);
    return result;
}

#ifndef FAKE_WITHOUT_MEMORY
/* ncclMemFree does not wait for the device. After an abort, which another thread waited for, nobody is asked. */
static void
declare(const void *data, size_t bytes, int gives)
{
    find_emulator();
    int busy = emulator.foreign != NULL && emulator.foreign(data, bytes, gives);
    pthread_mutex_lock(&lock);
    misuses += busy && aborts == 0;
    pthread_mutex_unlock(&lock);
}

/* Puts `to` where `from` is. */
static int
swap_given(void *from, void *to)
{
    int found = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < sizeof given / sizeof *given && !found; i++)
        if (given[i] == from) {
            given[i] = to;
            buffers += to != NULL;
            found = 1;
        }
    misuses += !found;
    pthread_mutex_unlock(&lock);
    return found;
}

FAKE(ncclMemAlloc)(void **out, size_t bytes)
{
    if (no_memory)
        return no_memory;
    *out = aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
    if (*out == NULL || !swap_given(NULL, *out))
        return 1;
    declare(*out, bytes, 1);
    return NC_SUCCESS;
}

FAKE(ncclMemFree)(void *memory)
{
    if (!swap_given(memory, NULL)) /* not ours to free */
        return 4;
    declare(memory, 0, 0);
    free(memory);
    return NC_SUCCESS;
}
#endif

#ifndef FAKE_WITHOUT_REGISTER
FAKE(ncclCommRegister)(nc_comm c, void *data, size_t bytes, void **handle)
{
    (void)bytes;
    if (no_registration > 0)
        return no_registration;
    *handle = no_registration < 0 ? NULL : data;
    pthread_mutex_lock(&lock);
    misuses += buffers > 0 && (size_t)data % PAGE != 0; /* whole pages are: those of another's messages too */
    c->registered += *handle != NULL;
    int result = refuse(c);
    c->looks = *handle != NULL ? looks_needed : 0;
    pthread_mutex_unlock(&lock);
    return result == NC_SUCCESS && *handle != NULL ? NC_IN_PROGRESS : result;
}

FAKE(ncclCommDeregister)(nc_comm c, void *handle)
{
    (void)handle;
    pthread_mutex_lock(&lock);
    misuses += no_registration != 0;
    c->registered--;
    pthread_mutex_unlock(&lock);
    return c->dead ? NC_INVALID_USAGE : NC_SUCCESS;
}
#endif

EXPORT const char *
ncclGetErrorString(int result)
{
    static const char *const words[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                        "invalid argument", "invalid usage", "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return result >= 0 && result <= 7 ? words[result] : "unknown result code";
}

EXPORT const char *
ncclGetLastError(nc_comm c)
{
    (void)c;
    return *broken_order ? broken_order : "the fake has no more to say";
}
