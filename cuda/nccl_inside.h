/* Inside the communicator "nccl": what its files share. nccl_meet.c makes and ends what messages go through, nccl.c moves them,
 * nccl_wait.c sees to it that no call and no message waits for ever. */
#ifndef TP_CUDA_NCCL_INSIDE_H
#define TP_CUDA_NCCL_INSIDE_H

#include "cuda/nccl.h"

#include <pthread.h>

#include "cuda/comm.h"
#include "cuda/dl_nccl.h"

#define NCCL_POLL_NS   20000
#define NCCL_RB_OP     8 /* "receive of the gradient" among tp_tag_print's words: what a message upstream is named by */
#define NCCL_CLASSES   3 /* of pairs that share no rank: even, odd, and the last of an odd ring */
#define NCCL_EXCHANGES 8 /* that the host may be ahead of the device */
#define NCCL_EVERYBODY (-1)

enum { NCCL_DOWN, NCCL_UP };

typedef struct {
    nc_comm comm;
    tp_stream stream;
    int peer, other; /* rank of the run; rank within the communicator */
    int sends;
    void *slot[TP_NCCL_SLOTS], *handle[TP_NCCL_SLOTS];
    int from_nccl[TP_NCCL_SLOTS]; /* the slot's memory; else plain device memory */
    tp_cuda_event filled[TP_NCCL_SLOTS], freed[TP_NCCL_SLOTS];
    size_t bytes[TP_COMM_POSTED];   /* of receives posted */
    int64_t posted, taken;          /* receives */
    _Atomic int64_t issued;         /* written by this rank, read by the watch */
    int64_t seen, since_ns;         /* the watch's: operations it saw end, and when the oldest other one began to count */
} nccl_channel;

/* This rank's twins in the other replicas, which exchange gradients: one communicator, a rank in it for each replica. */
typedef struct {
    nc_comm comm; /* NULL: there is one replica */
    tp_stream stream;
    void *hello;  /* [2 * replicas] bytes, of the messages that connect them */
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
    uint8_t *pairs;
    int replicas, ring; /* ranks of a replica */
    int max_ctas, channels, aborted, ending, watching;
    char plain[256]; /* why a slot is not what NCCL reads and writes by itself: the first reason; "": all are */
    nc_comm world, fresh; /* fresh: where a split writes when it comes to its end, be that after we have given up */
    nccl_channel channel[4];  /* [edge below or above][direction] of this rank */
    nccl_twins twins;
    nccl_exchanges exchanges;
    pthread_t thread;
    pthread_mutex_t lock; /* NCCL's calls, `aborted`, `ending` and what the watch reads of the others */
    pthread_cond_t changed;
} nccl_comm;

/* ---- nccl_meet.c ------------------------------------------------------------------------------------------------------------ */

/* Edge e goes from rank e to the next one of its replica, the last edge to the first. */
static inline int
nccl_next(const nccl_comm *c, int e)
{
    return e / c->ring * c->ring + (e + 1) % c->ring;
}

static inline int
nccl_before(const nccl_comm *c, int e)
{
    return e / c->ring * c->ring + (e + c->ring - 1) % c->ring;
}

/* Does anybody talk along it? */
int
tp_nccl_is_edge(const nccl_comm *c, int e);
int
tp_nccl_class(const nccl_comm *c, int e);
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
/* Emulated streams have nothing that waits: does there what the stream would do. */
TP_MUST_USE tp_status
tp_nccl_arrive(nccl_comm *c, nc_comm comm, int peer);

#define NCCL_CALL(c, communicator, peer, what, call)                                                                   \
    do {                                                                                                               \
        pthread_mutex_lock(&(c)->lock);                                                                                \
        int result_ = (c)->aborted ? NC_INVALID_USAGE : (call);                                                        \
        pthread_mutex_unlock(&(c)->lock);                                                                              \
        TP_TRY(tp_nccl_finish((c), result_, (communicator), (peer), (what)));                                          \
    } while (0)

#endif
