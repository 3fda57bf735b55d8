/* The communicator: ordered, blocking messages between ranks, small all-gathers, and one abort that ends everybody.
 *
 * One implementation of rings, arenas and control block (comm.c) serves threads of one process (memory of the process) and
 * processes of one machine (a memfd that the launcher passes by fd); TCP and MPI between machines (tcp.c,
 * mpi_messages.c), the host's staging of a device's messages (csrc/engine/staged.c), threads on one GPU and NCCL
 * (cuda/inproc.c, nccl.c) implement the same vtable.
 * Messages between an ordered pair of ranks keep their order and carry a tag that the receiver checks. No call blocks for
 * ever: each rechecks the abort word and the deadline; a failure names the first failed rank and what it was doing. */
#ifndef TP_COMM_COMM_H
#define TP_COMM_COMM_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "csrc/base/status.h"

typedef struct tp_comm tp_comm;

typedef struct {
    uint32_t abi; /* TP_COMM_ABI */
    const char *name; /* "thread", "shm", "tcp", "mpi", "staged", "inproc", "nccl" */
    /* Returns when `data` may be reused: eager while the ring has room, else as the receiver drains it. */
    tp_status (*send)(tp_comm *comm, int peer, uint64_t tag, const void *data, size_t bytes);
    /* Announce the next receive from peer (in order). Never blocks. At most `most_posted` outstanding a peer; where that is 0
     * allocates only beyond what was reserved. */
    tp_status (*recv_post)(tp_comm *comm, int peer, uint64_t tag, void *data, size_t bytes);
    /* Wait for the oldest posted receive from peer; ECONNECTION if its tag or size differs from what was sent. */
    tp_status (*recv_wait)(tp_comm *comm, int peer);
    /* Both directions at once with one peer, any size, no deadlock. Not while receives from it are posted. */
    tp_status (*exchange)(tp_comm *comm, int peer, uint64_t tag, const void *out, size_t out_bytes, void *in, size_t in_bytes);
    /* all[rank * bytes ...] of every rank; bytes equal on all, at most max_gather_bytes of the region. */
    tp_status (*allgather)(tp_comm *comm, const void *mine, size_t bytes, void *all);
    void (*close)(tp_comm *comm);
    /* The messages are of this device's memory (a tp_device of csrc/stage/stage_ops.h), in the order of its work: told once,
     * before the first, by the one who set `bound`. device NULL: it goes away now; give back all that is of it, in whatever
     * state. bind itself NULL: the messages are of the host's memory. */
    tp_status (*bind)(tp_comm *comm, void *device);
    /* What is done otherwise than by default, mostly slower, and why, for readers of a report; "": nothing. Valid until close.
     * NULL: nothing ever is. */
    const char *(*caveat)(const tp_comm *comm);
    int most_posted; /* 0: any number */
    /* Room for so many receives from peer that wait at once, so that no step allocates; EMEMORY. NULL where most_posted is
     * not 0. */
    tp_status (*reserve)(tp_comm *comm, int peer, unsigned posted);
    /* This rank's arena: page-aligned memory of *bytes that its peers may read. NULL, or the op itself NULL: there is none. */
    void *(*arena)(tp_comm *comm, size_t *bytes);
    /* As send, but data in the arena is not copied here: the receiver copies from there. The call does not wait for it, and the
     * data must not change until a reclaim of *loan has returned. One reclaim covers the message and all lent before it to that
     * peer, so every message from the arena, however short, gets a loan. *loan 0: the data lies elsewhere, and was sent.
     * Where arena is NULL and lend is not, guests (csrc/sched/sched.h) are lent, from wherever they lie; then no receive of a guest
     * is written before the last guest lent to that peer has left. Both NULL: nothing is lent. */
    tp_status (*lend)(tp_comm *comm, int peer, uint64_t tag, const void *data, size_t bytes, uint64_t *loan);
    /* Return when the peer has what was lent to it up to that loan. tag and bytes are the message's, for the words of a timeout. */
    tp_status (*reclaim)(tp_comm *comm, int peer, uint64_t loan, uint64_t tag, size_t bytes);
    /* Take what has come for posted receives by now; never waits. Called between a rank's kernels, so that the sender can go on
     * before the message is needed here. NULL: messages come by themselves (MPI's helper thread, a device), or are staged. */
    tp_status (*progress)(tp_comm *comm);
    /* Give up whatever receive is posted: its memory is about to go away. What comes for it stays for later ones. NULL: outside of
     * calls nothing is written, or to a device's memory (bind). */
    void (*withdraw)(tp_comm *comm);
    /* A second communicator of this rank over the same connections, for another thread: it exchanges and closes, no more, and only with
     * peers with whom `comm` has nothing under way meanwhile; both ends of such an exchange are aside. Closed before comm. Its waits end
     * with EABORTED once *halted is not 0. NULL: a rank has one thread for its messages. */
    tp_status (*aside)(tp_comm *comm, const _Atomic int *halted, tp_comm **out);
} tp_comm_ops;

#define TP_COMM_ABI 11u
#define TP_COMM_POSTED 64 /* most_posted of what exchanges a device's memory */

struct tp_comm {
    const tp_comm_ops *ops;
    int rank, ranks;
    int64_t timeout_ns; /* of one wait; 0: none (abort still ends it) */
    int bound;          /* an engine has told it its device: that engine's alone to say, until it unbinds */
    int alone;          /* at its close: what it stands on is closed already, and may not be called */
};

/* ---- the shared region: control block, one ring per ordered pair that talks, an arena of each rank ------------------- */

typedef struct tp_region tp_region;

typedef struct {
    int ranks;
    /* [ranks * ranks], pairs[src * ranks + dst] is 0 where there is no ring, 1 where there is one of ring_bytes, and where it is 1 + h
     * one whose capacity is that halved h times. */
    const uint8_t *pairs;
    size_t ring_bytes, max_gather_bytes; /* the last: largest allgather contribution */
    const size_t *arena_bytes;           /* [ranks] of each rank's arena; NULL: there are none */
} tp_region_shape;

/* Bytes of such a region; EVALUE. The shape is not kept. */
TP_MUST_USE tp_status
tp_region_bytes(const tp_region_shape *shape, size_t *out);
/* Initialise memory (page-aligned, zeroed, of that size) as a region; or attach to one that was initialised. */
TP_MUST_USE tp_status
tp_region_create(void *memory, size_t bytes, const tp_region_shape *shape, tp_region **out);
TP_MUST_USE tp_status
tp_region_attach(void *memory, size_t bytes, tp_region **out);

int
tp_region_ranks(const tp_region *region);

/* The first abort wins: code, rank, instruction words and text are kept, all waiters wake. Async-signal-safe. */
void
tp_region_abort(tp_region *region, tp_status code, int rank, const char *text);
int
tp_region_is_aborted(const tp_region *region);
/* Status of the abort (TP_OK: none); text (up to 512 bytes) and rank of the first failure. May wait for its words, a second at most. */
tp_status
tp_region_aborted(const tp_region *region, int *rank, char text[512]);
/* From now on the words of the first failure are written to this descriptor as soon as they are known: the process may be killed
 * before a wait could return them. For a region that is this process's own. */
void
tp_region_tell(tp_region *region, int fd);
/* A rank's progress, for "what was it doing": step and packed instruction (op, stage, micro, slice). Relaxed store. */
void
tp_region_progress(tp_region *region, int rank, uint64_t step, uint64_t instruction);
void
tp_region_read_progress(const tp_region *region, int rank, uint64_t *step, uint64_t *instruction);

#define TP_WRITING (UINT64_MAX - 1) /* no instruction: the rank writes its part of a checkpoint */

/* What a rank is doing, in words: "at step 5 while running forward of micro-batch 0 slice 2 on stage 1", or "before its
 * first instruction". */
#define TP_DOING_TEXT 192
void
tp_region_doing(const tp_region *region, int rank, char text[TP_DOING_TEXT]);

/* A communicator of `rank` over a region that outlives it. name "thread" or "shm" (they differ in the kind of futex). */
TP_MUST_USE tp_status
tp_comm_open_region(tp_region *region, int rank, const char *name, int64_t timeout_ns, tp_comm **out);
/* Page-aligned zeroed memory of this process, for a region of threads; ended by tp_shm_detach. */
TP_MUST_USE tp_status
tp_local_create(size_t bytes, void **memory);
/* memfd of `bytes`, fallocated (full tmpfs: EIO, not SIGBUS), mapped. EIO names bytes and limit. */
TP_MUST_USE tp_status
tp_shm_create(size_t bytes, int *fd, void **memory);
TP_MUST_USE tp_status
tp_shm_attach(int fd, size_t *bytes, void **memory);
void
tp_shm_detach(void *memory, size_t bytes);

/* Seconds that messages take between two ranks of this process: [0] of a few bytes from end to end; [1] of a byte of an exchange
 * of exchange_bytes through a ring, both ends at work; [2] of a byte of lent_bytes that its reader copies out of an arena. Medians.
 * EVALUE, EMEMORY, EIO. */
TP_MUST_USE tp_status
tp_comm_measure(size_t ring_bytes, size_t exchange_bytes, size_t lent_bytes, double seconds[3]);

static inline uint64_t
tp_tag(unsigned op, unsigned stage, unsigned micro, unsigned slice)
{
    return (uint64_t)op << 48 | (uint64_t)stage << 32 | (uint64_t)micro << 16 | slice;
}

/* A tag or a progress word in words: "forward of micro-batch 0 slice 2 on stage 1". The words stand in the order of
 * sched.h's TP_OP_MAP, which this room may not see; csrc/py/comm.c asserts that the counts agree. */
#define TP_TAG_TEXT 128
#define TP_TAG_OPS 18
void
tp_tag_print(uint64_t tag, char text[TP_TAG_TEXT]);

#endif
