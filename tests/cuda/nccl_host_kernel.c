/* NCCL's kernel for sends and receives, by host threads, and the calls of ours to NCCL, with faults (fake_faults.h). Where its
 * structs keep what is a header that tests/nccl_host.py makes of NCCL's own. Only the protocol "simple", between machines: an
 * operation is cut into chunks, each of which takes one of NCCL_STEPS parts of a connection's buffer (NCCL's sendrecv.h,
 * prims_simple.h). All operations of a launch run at once, where NCCL runs a channel's batches of eight one after another. Data to be
 * sent is read when the kernel is launched: emulated streams write over it at once. */
#include "tests/cuda/nccl_host.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda/dl_nccl.h"
#include "nccl_host_layout.h"
#include "tests/cuda/fake_emulator.h"
#include "tests/cuda/fake_faults.h"

#define EXPORT __attribute__((visibility("default")))
#define FIELD(type, object, field) (*(type *)(void *)((char *)(object) + (field)))

enum { INTERNAL_ERROR = 3 }; /* ncclResult_t */
enum { COMMUNICATORS = 256, OPERATIONS = 64, BUFFERS_GIVEN = 64 };

typedef struct {
    char *connection, *data, *copy;
    size_t bytes, at, chunk;
    int sends, over;
} operation;

typedef struct launch {
    struct launch *next;
    host_job *job;
    int device;
    const volatile uint32_t *aborted;
    int count, receives;
    operation operation[OPERATIONS];
} launch;

typedef struct { /* of one communicator, by its struct on the device: its launches, one after another */
    const char *device;
    launch *first, **last;
    int receives; /* that are not over */
    pthread_t thread;
} queue;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static queue queues[COMMUNICATORS];
static _Atomic int running[HOST_DEVICES];

static void
stop_at(int wrong, const char *why)
{
    if (!wrong)
        return;
    fprintf(stderr, "nccl_host_kernel.c: %s\n", why);
    abort();
}

/* With the lock held. */
static queue *
queue_of(const char *device)
{
    int i = 0;
    while (i < COMMUNICATORS && queues[i].device != NULL && queues[i].device != device)
        i++;
    stop_at(i == COMMUNICATORS, "a larger COMMUNICATORS would be right");
    queues[i].device = device;
    return &queues[i];
}

/* ---- moving ------------------------------------------------------------------------------------------------------------------ */

/* The part of the connection's buffer that is next. */
static char *
part_of(const operation *o, uint64_t step)
{
    char *buffer = FIELD(char *, o->connection, CONNECTION_BUFFERS + SIMPLE * sizeof(char *));
    char *fifo = FIELD(char *, o->connection, CONNECTION_FIFO);
    char *entry = fifo != NULL ? fifo + step % STEPS * FIFO_BYTES : NULL;
    if (entry != NULL && FIELD(volatile int, entry, FIFO_MODE) == FIFO_MODE_OFFSET)
        return buffer + FIELD(volatile int, entry, FIFO_OFFSET);
    return buffer + step % STEPS * (size_t)FIELD(int, o->connection, CONNECTION_STEP_BYTES);
}

/* The next chunk, if the other end has come so far. */
static int
move(operation *o)
{
    uint64_t step = FIELD(uint64_t, o->connection, CONNECTION_STEP);
    _Atomic uint64_t *head = FIELD(_Atomic uint64_t *, o->connection, CONNECTION_HEAD);
    _Atomic uint64_t *tail = FIELD(_Atomic uint64_t *, o->connection, CONNECTION_TAIL);
    size_t bytes = o->bytes - o->at < o->chunk ? o->bytes - o->at : o->chunk;
    if (o->sends ? *head + STEPS < step + 1 : *tail < step + 1)
        return 0;
    char *part = part_of(o, step), *fifo = FIELD(char *, o->connection, CONNECTION_FIFO);
    if (o->sends && fifo != NULL)
        FIELD(volatile ssize_t, fifo + step % STEPS * FIFO_BYTES, FIFO_SIZE) = (ssize_t)bytes;
    memcpy(o->sends ? part : o->data + o->at, o->sends ? o->data + o->at : part, bytes);
    FIELD(uint64_t, o->connection, CONNECTION_STEP) = step + 1;
    *(o->sends ? tail : head) = step + 1;
    o->at += bytes;
    o->over = o->at >= o->bytes;
    return 1;
}

/* One round over the operations; those of a connection are in order. -1: all are over. */
static int
move_all(launch *l)
{
    int moved = 0, left = 0;
    for (int i = 0; i < l->count; i++) {
        int behind = 0;
        for (int j = 0; j < i; j++)
            behind |= !l->operation[j].over && l->operation[j].connection == l->operation[i].connection;
        moved |= !l->operation[i].over && !behind && move(&l->operation[i]);
        left += !l->operation[i].over;
    }
    return left == 0 ? -1 : moved;
}

static void *
work(void *argument)
{
    queue *q = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (q->first == NULL)
            pthread_cond_wait(&changed, &lock);
        launch *l = q->first;
        q->first = l->next;
        q->last = q->first == NULL ? &q->first : q->last;
        pthread_mutex_unlock(&lock);
        for (int moved = 0; moved >= 0 && !*l->aborted;)
            if ((moved = move_all(l)) == 0)
                usleep(100);
        for (int i = 0; i < l->count; i++)
            free(l->operation[i].copy);
        pthread_mutex_lock(&lock);
        q->receives -= l->receives;
        l->job->done = 1;
        running[l->device]--;
        free(l);
    }
    return NULL;
}

/* ---- launching --------------------------------------------------------------------------------------------------------------- */

static size_t
decode_chunk(uint8_t x) /* u32fp8Decode: five bits of exponent, three of mantissa */
{
    uint32_t exponent = x >> 3, mantissa = x & 7;
    return exponent == 0 ? mantissa : (size_t)(8 | mantissa) << (exponent - 1);
}

/* The channel's part of one direction of a work. */
static void
add(launch *l, char *device, int channel, char *work, int sends)
{
    int parts = FIELD(uint8_t, work, sends ? WORK_SEND_CHANNELS : WORK_RECV_CHANNELS);
    int part = (channel - FIELD(uint8_t, work, WORK_BASE)) & (FIELD(uint8_t, work, WORK_CHANNELS) - 1);
    int peer = FIELD(int, work, sends ? WORK_SEND_RANK : WORK_RECV_RANK);
    int ways = FIELD(uint8_t, work, WORK_RECV_CHUNK + 1) >> !sends; /* bits by turns: sends, receives */
    size_t bytes = FIELD(size_t, work, sends ? WORK_SEND_BYTES : WORK_RECV_BYTES);
    if (part >= parts)
        return;
    stop_at(ways & 0x15, "only the protocol simple, of buffers that are not registered (NCCL_P2P_LL_THRESHOLD=0)");
    stop_at(FIELD(int, work, WORK_SEND_RANK) == FIELD(int, device, DEVICE_RANK), "a rank sends to itself");
    stop_at(l->count == OPERATIONS, "a larger OPERATIONS would be right");
    size_t each = ((bytes + (size_t)parts - 1) / (size_t)parts + 4095) / 4096 * 4096, begin = each * (size_t)part;
    begin = begin < bytes ? begin : bytes;
    operation *o = &l->operation[l->count++];
    char *peers = FIELD(char *, device + WHOLE_DEVICE_CHANNELS + channel * CHANNEL_BYTES, CHANNEL_PEERS);
    *o = (operation){.connection = FIELD(char *, peers, peer * sizeof(char *)) + (sends ? PEER_SEND : PEER_RECV) + CONNECTION_BYTES,
                     .data = FIELD(char *, work, sends ? WORK_SEND_DATA : WORK_RECV_DATA) + begin,
                     .bytes = bytes - begin < each ? bytes - begin : each,
                     .chunk = decode_chunk(FIELD(uint8_t, work, sends ? WORK_SEND_CHUNK : WORK_RECV_CHUNK)),
                     .sends = sends};
    if (sends) {
        o->copy = malloc(o->bytes + 1);
        o->data = memcpy(o->copy, o->data, o->bytes);
    }
    l->receives += !sends && part == 0;
}

/* The works of a channel's batches. In a batch: 14 bits, how far it is to the channel's next (0: none); one, whether that extends
 * this; two, the type of its works, 0 for sends and receives (ncclDevWorkBatch). */
static void
add_channel(launch *l, const char *args, int block, int channel)
{
    char *device = FIELD(char *, (size_t)args, ARGS_DEVICE), *buffer = FIELD(char *, (size_t)args, ARGS_BUFFER);
    int in_args = FIELD(uint8_t, (size_t)args, ARGS_STORAGE) == 0;
    for (uint32_t at = (uint32_t)block, next = 1; next != 0; at += next) {
        const char *batch = args + ARGS_BYTES + at * BATCH_BYTES;
        uint32_t flags = FIELD(uint32_t, (size_t)batch, 0);
        uint64_t set = FIELD(uint64_t, (size_t)batch, BATCH_SET);
        next = flags & 0x3fff;
        stop_at((flags >> 15 & 3) != 0, "only sends and receives");
        for (uint32_t i = 0; i < 64; i++) {
            char work[WORK_BYTES];
            uint32_t where = FIELD(uint32_t, (size_t)batch, BATCH_BASE) + i * WORK_BYTES;
            if (!(set >> i & 1))
                continue;
            memcpy(work, in_args ? args + where : buffer + (where & FIELD(uint32_t, (size_t)args, ARGS_MASK)), sizeof work);
            add(l, device, channel, work, 0);
            add(l, device, channel, work, 1);
        }
    }
}

host_job *
tp_host_launch(unsigned blocks, const void *args)
{
    launch *l = calloc(1, sizeof *l);
    host_job *job = calloc(1, sizeof *job);
    const char *device = FIELD(char *, (size_t)args, ARGS_DEVICE);
    l->job = job;
    l->device = tp_host_device;
    running[l->device]++;
    l->aborted = FIELD(const volatile uint32_t *, (size_t)device, DEVICE_ABORTED);
    for (int channel = 0, block = 0; channel < 64; channel++)
        if (FIELD(uint64_t, (size_t)args, ARGS_CHANNELS) >> channel & 1 && (unsigned)block < blocks)
            add_channel(l, args, block++, channel);
    pthread_mutex_lock(&lock);
    queue *q = queue_of(device);
    if (q->last == NULL) {
        q->last = &q->first;
        stop_at(pthread_create(&q->thread, NULL, work, q) != 0, "no thread could be started");
    }
    q->receives += l->receives;
    *q->last = l;
    q->last = &l->next;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return job;
}

int
tp_host_running(void)
{
    return running[tp_host_device];
}

/* ---- our calls: those of the same name in libnccl are weak, and stand behind theirs with a p -------------------------------- */

nc_init pncclCommInitRankConfig;
nc_split pncclCommSplit;
nc_group pncclGroupEnd;
nc_send pncclSend;
nc_recv pncclRecv;
nc_on_comm pncclCommFinalize, pncclCommAbort, pncclCommDestroy;
nc_mem_alloc pncclMemAlloc;
nc_mem_free pncclMemFree;
nc_get_version pncclGetVersion;
nc_get_async_error pncclCommGetAsyncError;

/* As fake_nccl.c counts: sends and receives; aborts; misuses, none, which NCCL sees itself or does not; buffers that were not given
 * back; buffers; communicators that live. */
enum { CALLS, ABORTS, MISUSES, HELD, BUFFERS, LIVING, COUNTS };
static _Atomic int counted[COUNTS];

EXPORT int
fake_nccl_count(int which)
{
    return counted[which];
}

/* Of those of ranks that are threads, no faults. */
EXPORT void
fake_nccl_set(int fail_at, int code, int stuck_at, int looks, int version)
{
    (void)looks, (void)version;
    stop_at(fail_at != 0 || code != 0 || stuck_at != 0, "such faults are fake_nccl.c's");
    for (int i = 0; i < COUNTS; i++)
        counted[i] = i == HELD ? counted[i] : 0;
}

EXPORT void
fake_nccl_refuse(int memory, int registration)
{
    stop_at(memory != 0 || registration != 0, "such faults are fake_nccl.c's");
}

/* What the call answers, unless it is to fail. */
#define UNLESS_FAULT(name, ...)                                                                                                \
    int failed = fault(#name);                                                                                                 \
    return failed != NC_SUCCESS ? failed : p##name(__VA_ARGS__)

/* The emulator is told what the stream reads or writes, and may see that another one would meanwhile (cuda/emu/order.h). */
#define TOUCH(name, writes)                                                                                                    \
    counted[CALLS]++;                                                                                                          \
    find_emulator();                                                                                                           \
    if (emulator.touch != NULL && emulator.touch(stream, #name, data, count, writes) != TP_OK) {                               \
        fprintf(stderr, "%s\n", emulator.message());                                                                           \
        return INTERNAL_ERROR;                                                                                                 \
    }                                                                                                                          \
    stop_at(type != NC_INT8, "only bytes")

EXPORT int
ncclGetVersion(int *out)
{
    int result = pncclGetVersion(out);
    *out = version_told(*out);
    return result;
}

EXPORT int
ncclCommInitRankConfig(nc_comm *out, int ranks, nc_id id, int rank, nc_config *config)
{
    own_rank = rank;
    tp_host_device = getenv("NCCL_HOST_THREADS") != NULL ? rank % HOST_DEVICES : tp_host_device;
    counted[LIVING]++; /* one that is refused ends the test otherwise */
    UNLESS_FAULT(ncclCommInitRankConfig, out, ranks, id, rank, config);
}

EXPORT int
ncclCommSplit(nc_comm c, int color, int key, nc_comm *out, nc_config *config)
{
    counted[LIVING]++;
    UNLESS_FAULT(ncclCommSplit, c, color, key, out, config);
}

EXPORT int
ncclGroupEnd(void)
{
    UNLESS_FAULT(ncclGroupEnd);
}

EXPORT int
ncclSend(const void *data, size_t count, int type, int peer, nc_comm c, tp_stream stream)
{
    TOUCH(ncclSend, 0);
    UNLESS_FAULT(ncclSend, data, count, type, peer, c, stream);
}

EXPORT int
ncclRecv(void *data, size_t count, int type, int peer, nc_comm c, tp_stream stream)
{
    TOUCH(ncclRecv, 1);
    UNLESS_FAULT(ncclRecv, data, count, type, peer, c, stream);
}

EXPORT int
ncclCommFinalize(nc_comm c)
{
    UNLESS_FAULT(ncclCommFinalize, c);
}

EXPORT int
ncclCommAbort(nc_comm c)
{
    while (is_stuck("1"))
        pause();
    counted[ABORTS]++;
    counted[LIVING]--;
    return pncclCommAbort(c);
}

EXPORT int
ncclCommDestroy(nc_comm c)
{
    counted[LIVING]--;
    return pncclCommDestroy(c);
}

static void *given[BUFFERS_GIVEN]; /* by ncclMemAlloc, and not given back */

/* Put `to` where `from` is. */
static void
note(const void *from, void *to, int change)
{
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < BUFFERS_GIVEN && given[i] != from)
        i++;
    stop_at(i == BUFFERS_GIVEN && change > 0, "a larger BUFFERS_GIVEN would be right");
    if (i < BUFFERS_GIVEN) {
        given[i] = to;
        counted[HELD] += change;
    }
    pthread_mutex_unlock(&lock);
}

EXPORT int
ncclMemAlloc(void **out, size_t bytes)
{
    int result = pncclMemAlloc(out, bytes);
    if (result == NC_SUCCESS)
        note(NULL, *out, 1);
    counted[BUFFERS]++;
    return result;
}

/* NCCL calls it itself too, for what it has. */
EXPORT int
ncclMemFree(void *memory)
{
    if (memory != NULL)
        note(memory, NULL, -1);
    return pncclMemFree(memory);
}

/* 0: no more than `left` receives of this rank, the last, are under way. */
EXPORT int
fake_nccl_settled(nc_comm c, int left)
{
    int state = NC_SUCCESS, asked;
    pthread_mutex_lock(&lock);
    int over = queue_of(FIELD(char *, c, COMMUNICATOR_DEVICE))->receives <= left;
    pthread_mutex_unlock(&lock);
    if (over)
        return NC_SUCCESS;
    asked = pncclCommGetAsyncError(c, &state);
    return asked != NC_SUCCESS ? asked : state != NC_SUCCESS ? state : NC_IN_PROGRESS;
}
