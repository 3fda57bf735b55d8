/* What the files of the communicator "nccl" share: nccl_meet.c makes and ends its communicators, nccl.c moves messages,
 * nccl_wait.c sees to it that no call and no message waits for ever. */
#ifndef TP_CUDA_NCCL_INSIDE_H
#define TP_CUDA_NCCL_INSIDE_H

#include "cuda/nccl.h"

#include <pthread.h>

#include "cuda/comm.h"
#include "cuda/dl_nccl.h"

#define NCCL_POLL_NS   20000
#define NCCL_RB_OP     8  /* "receive of the gradient" among tp_tag_print's words: what a message upstream is named by */
#define NCCL_RE_OP     14 /* "receive of the evicted activations", and of those that come home */
#define NCCL_RL_OP     16
#define NCCL_CLASSES   32 /* of lines that share no rank, at most */
#define NCCL_EXCHANGES 8 /* that the host may be ahead of the device */
#define NCCL_GUESTS    TP_COMM_POSTED /* under way in a channel */
#define NCCL_EVERYBODY (-1)

enum { NCCL_DOWN, NCCL_UP };

/* Two ranks that talk, by a channel down (of activations, or of guests that leave) and one up. */
typedef struct {
    int from, to, keeps; /* keeps: `to` has guests of `from` */
    int class;
} nccl_line;

typedef struct {
    nc_comm comm;
    tp_stream stream;
    int peer, other; /* rank of the run; rank within the communicator */
    int sends, up, keeps;
    void *slot[TP_NCCL_SLOTS], *handle[TP_NCCL_SLOTS]; /* of guests: what connects them, no handle */
    int from_nccl[TP_NCCL_SLOTS]; /* the slot's memory; else plain device memory */
    tp_cuda_event filled[TP_NCCL_SLOTS], freed[TP_NCCL_SLOTS];
    tp_cuda_event ready, done[NCCL_GUESTS]; /* of guests */
    size_t bytes[TP_COMM_POSTED];   /* of receives posted */
    int64_t posted, taken;          /* receives */
    _Atomic int64_t issued;         /* written by this rank, read by the watch */
    int64_t seen, since_ns;         /* the watch's: operations it saw end, and when the oldest other one began to count */
} nccl_channel;

/* This rank's twins, which exchange gradients: the same rank of the other replicas, and of two copies of the model the opposite
 * one of each. One communicator, a rank in it for each of them. */
typedef struct {
    nc_comm comm; /* NULL: it has none */
    tp_stream stream;
    int members;
    void *hello;  /* [2 * members] bytes, of the messages that connect them */
} nccl_twins;

/* The exchanges of this rank with anybody, one after another. */
typedef struct {
    tp_cuda_event ready, done[NCCL_EXCHANGES];
    int peer[NCCL_EXCHANGES];
    _Atomic int64_t issued; /* as a channel's */
    int64_t seen, since_ns;
} nccl_exchanges;

typedef struct {
    tp_cuda_comm base; /* first */
    const tp_nccl *nccl;
    nccl_line *line; /* [lines] of all ranks */
    int lines, classes;
    int copies, ring; /* of the model in a replica; ranks of a replica */
    int max_ctas, channels, aborted, ending, watching;
    char plain[256]; /* why a slot is not what NCCL reads and writes by itself: the first reason; "": all are */
    nc_comm world, fresh; /* fresh: where a split writes when it comes to its end, be that after we have given up */
    nccl_channel *channel;    /* [channels] of this rank, in the order in which everybody made them */
    nccl_twins twins;
    nccl_exchanges exchanges;
    pthread_t thread;
    pthread_mutex_t lock; /* NCCL's calls, `aborted`, `ending` and what the watch reads of the others */
    pthread_cond_t changed;
} nccl_comm;

/* ---- nccl_meet.c ------------------------------------------------------------------------------------------------------------ */

/* The number of a rank's group of twins, and its own number within. */
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

/* Who talks, in lines and classes of these, from the config's pairs. EVALUE: too many with one rank. EMEMORY. */
TP_MUST_USE tp_status
tp_nccl_draw(nccl_comm *c, const uint8_t *pairs);
/* With the device that the base is bound to: everybody in the same order. */
TP_MUST_USE tp_status
tp_nccl_meet(nccl_comm *c);
/* All that is the device's: before it is closed. */
void
tp_nccl_part(tp_cuda_comm *base);

/* ---- nccl_wait.c ------------------------------------------------------------------------------------------------------------ */

/* With the lock held: ends everything, once. */
void
tp_nccl_abort(nccl_comm *c);
/* What a call gave, in words; ends everything. peer: with whom it was, or NCCL_EVERYBODY. */
tp_status
tp_nccl_fail(nccl_comm *c, int result, nc_comm comm, int peer, const char *what);
/* Poll until what was begun on the communicator has its place on the stream. `result`: what the call itself gave. ETIMEOUT,
 * EABORTED, ERUNTIME, ECONNECTION. */
TP_MUST_USE tp_status
tp_nccl_finish(nccl_comm *c, int result, nc_comm comm, int peer, const char *what);
/* The thread that looks for what does not move, until `ending`. argument: the nccl_comm. */
void *
tp_nccl_watch(void *argument);
/* Wait until the exchange before the next NCCL_EXCHANGES is over. */
TP_MUST_USE tp_status
tp_nccl_await_exchange(nccl_comm *c);
/* Emulated streams have nothing that waits: does there what the stream would do, until all receives but the last `left` are
 * there. */
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
