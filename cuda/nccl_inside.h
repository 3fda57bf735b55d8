/* What the files of the communicator "nccl" share: nccl_meet.c makes and ends its communicators, nccl.c moves messages,
 * nccl_wait.c sees to it that no call and no message waits for ever. */
#ifndef TP_CUDA_NCCL_INSIDE_H
#define TP_CUDA_NCCL_INSIDE_H

#include "cuda/nccl.h"

#include <pthread.h>

#include "cuda/comm.h"
#include "cuda/dl_nccl.h"

#define NCCL_POLL_NS   20000
#define NCCL_IDLE_NS   1000000 /* between polls of what takes long, as when ranks meet */
#define NCCL_RB_OP     8  /* number of "receive of the gradient" among tp_tag_print's words: errors name messages upstream by it */
#define NCCL_RE_OP     14 /* the same for guests: "receive of the evicted activations" */
#define NCCL_RL_OP     16 /* and for guests that come home */
#define NCCL_CLASSES   32 /* most classes of lines; lines of a class share no rank */
#define NCCL_EXCHANGES 8 /* exchanges by which the host may be ahead of the device */
#define NCCL_MARKS     1024 /* of the compute stream, at messages: a stream takes no more work ahead than that, by far */
#define NCCL_GUESTS    TP_COMM_POSTED /* most guests under way in a channel */
#define NCCL_EVERYBODY (-1)

enum { NCCL_DOWN, NCCL_UP };

/* Two ranks that exchange messages: over a channel down (activations, or guests that leave) and a channel up. A guest is what one
 * rank keeps of another's activations (schedule bpipe). */
typedef struct {
    int from, to, keeps; /* keeps: `to` has guests of `from` */
    int class;
} nccl_line;

/* One direction of a line, at this rank. */
typedef struct {
    nc_comm comm;
    tp_stream stream;
    int peer, other; /* the peer's rank in the run, and in `comm` */
    int sends, up, keeps;
    void *slot[TP_NCCL_MOST_SLOTS], *handle; /* parts of nccl_comm.memory, their registration; guests: [0], for the greeting only */
    tp_cuda_event filled[TP_NCCL_MOST_SLOTS], freed[TP_NCCL_MOST_SLOTS];
    tp_cuda_event ready, done[NCCL_GUESTS]; /* for guests */
    size_t bytes[TP_COMM_POSTED];   /* of the receives posted */
    int64_t posted, taken;          /* counts of receives */
    _Atomic int64_t issued;         /* operations given to NCCL; written by this rank, read by the watch */
    int64_t seen, since_ns;         /* the watch's: operations that it saw end, and since when it waits for the oldest other one */
} nccl_channel;

/* This rank's twins, with which it sums gradients: the same rank of the other replicas, and, with two copies of the model, the
 * opposite rank of every replica. They have one communicator, with one of its ranks for each. */
typedef struct {
    nc_comm comm; /* NULL: this rank has no twins */
    tp_stream stream;
    int members;
    void *hello;  /* [2 * members] bytes for the messages that connect them */
} nccl_twins;

/* The exchanges of this rank with any peer (tp_comm_ops.exchange), one after another. */
typedef struct {
    tp_cuda_event ready, done[NCCL_EXCHANGES];
    int peer[NCCL_EXCHANGES];
    _Atomic int64_t issued; /* these three as in nccl_channel */
    int64_t seen, since_ns;
} nccl_exchanges;

/* By which the watch sees that this rank's device goes on from message to message, wherever the host is. Where all marks are ahead
 * of the device a message gets none. */
typedef struct {
    tp_cuda_event event[NCCL_MARKS];
    _Atomic int64_t set, passed; /* written by this rank; by the watch */
    int64_t since_ns;            /* the watch's: when it last saw one passed */
} nccl_marks;

typedef struct {
    tp_cuda_comm base; /* first */
    const tp_nccl *nccl;
    nccl_line *line; /* [lines] of all ranks */
    int lines, classes;
    int copies, ring; /* copies of the model in a replica; ranks of a replica */
    int slots; /* of a channel, at this end */
    void *memory; /* of all channels' slots, slot_bytes apart */
    size_t slot_bytes;
    int slots_taken, from_nccl; /* given to channels; the memory is ncclMemAlloc's; 0: plain device memory */
    int max_ctas, channels, aborted, ending, watching;
    char plain[256]; /* the first reason why a slot is no memory that NCCL reads and writes by itself; "": all slots are */
    nc_comm world, fresh; /* fresh: where a split writes its communicator when it ends, which may be after we have given up */
    nc_comm alone;        /* of this rank alone, while a class in which it has no line is made */
    nccl_channel *channel;    /* [channels] of this rank, in the order in which all ranks make them */
    nccl_twins twins;
    nccl_exchanges exchanges;
    nccl_marks marks;
    int64_t lost_ns; /* the watch's: since when it knows of a communicator's error */
    pthread_t thread;
    pthread_mutex_t lock; /* NCCL's calls, `aborted`, `ending` and what the watch reads of the others */
    pthread_cond_t changed;
} nccl_comm;

/* ---- nccl_meet.c ------------------------------------------------------------------------------------------------------------ */

/* The number of a rank's group of twins; nccl_twin_number: the rank's own number within the group. */
static inline int
nccl_twin_group(const nccl_comm *c, int rank)
{
    int own = rank % c->ring, opposite = c->ring - 1 - own;
    return c->copies > 1 && opposite < own ? opposite : own;
}

static inline int
nccl_twin_number(const nccl_comm *c, int rank)
{
    return rank / c->ring * c->copies + (rank % c->ring != nccl_twin_group(c, rank));
}

/* Make the lines, and their classes, from the config's pairs of ranks. EVALUE: too many lines of one rank. EMEMORY. */
TP_MUST_USE tp_status
tp_nccl_draw(nccl_comm *c, const uint8_t *pairs);
/* Make all communicators on the device that the base is bound to; all ranks call it and make them in the same order. */
TP_MUST_USE tp_status
tp_nccl_meet(nccl_comm *c);
/* Give back everything on the device, before that is closed. */
void
tp_nccl_part(tp_cuda_comm *base);

/* ---- nccl_wait.c ------------------------------------------------------------------------------------------------------------ */

/* With the lock held: abort all communicators, once. */
void
tp_nccl_abort(nccl_comm *c);
/* The status and words for a call's result; tells the region and aborts everything. peer: the call's peer, or NCCL_EVERYBODY.
 * EABORTED: the words of who failed first, which it waits for where a rank may be lost; nothing is aborted yet. */
tp_status
tp_nccl_fail(nccl_comm *c, int result, nc_comm comm, int peer, const char *what);
/* Poll until the operation begun on the communicator is enqueued on its stream. result: what the call itself returned. ETIMEOUT,
 * EABORTED, ERUNTIME, ECONNECTION. */
TP_MUST_USE tp_status
tp_nccl_finish(nccl_comm *c, int result, nc_comm comm, int peer, const char *what);
/* Poll until the device is past the event, by the same deadline. */
TP_MUST_USE tp_status
tp_nccl_await_event(nccl_comm *c, tp_cuda_event event, const char *what);
/* The watch thread: until `ending` it looks for errors, and for operations that do not end in time. argument: the nccl_comm. */
void *
tp_nccl_watch(void *argument);
/* Wait until the exchange before the next NCCL_EXCHANGES is over. */
TP_MUST_USE tp_status
tp_nccl_await_exchange(nccl_comm *c);
/* Only for emulated streams, on which nothing can wait: do what the stream would do, until all receives but the last `left` have
 * arrived. */
TP_MUST_USE tp_status
tp_nccl_arrive(nccl_comm *c, nc_comm comm, int peer, int64_t left);

#define NCCL_CALL(c, communicator, peer, what, call)                                                                   \
    do {                                                                                                               \
        pthread_mutex_lock(&(c)->lock);                                                                                \
        int result_ = (c)->aborted ? NC_INVALID_USAGE : (call);                                                        \
        pthread_mutex_unlock(&(c)->lock);                                                                              \
        TP_TRY(tp_nccl_finish((c), result_, (communicator), (peer), (what)));                                          \
    } while (0)

#endif
