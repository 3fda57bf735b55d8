/* The communicator "nccl": the contract of comm.h on device memory. Calls enqueue; order is that of the device's streams.
 *
 * A channel is one direction of one pair of ranks that talk: activations from r to r + 1 (the last to the first too; of a second
 * copy of the model, and of stages that come back up the ranks, to r - 1), and gradients back. Each has a communicator of two ranks
 * (ncclCommSplit; a rank that is in no pair of one has a communicator alone while ranks meet, and ends it at once), a stream, and
 * some slots, parts of the rank's one buffer from ncclMemAlloc, registered where the library can. The compute stream copies a
 * message into a slot, which is sent; it is received into a slot, which the compute stream copies out right before the reader. So a
 * sender's buffer may be written again at once, and a receive never overtakes the reader before it. But a channel also waits until
 * a slot has been read, which the program's proof under rendezvous (csrc/sched/check.c) does not know: terapipe_c/slots.py says how
 * many are enough for a program. TP_NCCL_SLOTS are, where micro-batches have few slices.
 *
 * Why not fewer communicators: with one for all activations a rank's send would stand behind the receive before it. So it would
 * among communicators that share resources (ncclConfig_t.splitShare): the library launches those one after another on one stream
 * (NCCL 2.28, enqueue.cc, ncclLaunchPrepare).
 *
 * Guests, the activations that a rank keeps for another, have two channels of their own between the two ranks, without slots: a
 * copy of them would take the memory that is to be saved. They are sent from, and received into, the stage's memory or the room itself,
 * on the channel's stream. A send begins when the compute stream has come to it; a receive also waits until the last guest of the
 * other direction, which may still lie there, has left. The compute stream waits for a guest only where its memory is written next
 * (lend, reclaim) or read (recv_wait). By the proof under rendezvous all of that happens: it is later in the rank's program.
 *
 * Twins, the same rank of several replicas (and the opposite rank, where a replica has two copies of the model), exchange gradients
 * once a step, when nothing else runs. They share one communicator with a stream of its own. An exchange is one group of a send and
 * a receive, from and to the caller's memory, between events of the compute stream. There are no tags, so both ends must come to
 * their exchanges in one order (the rounds of csrc/engine/replicas.c). The host is at most NCCL_EXCHANGES ahead of its device.
 *
 * Communicators do not block: every call is polled (ncclCommGetAsyncError) to its end, the deadline or the abort. A thread
 * looks every 50 ms for an abort of the region, for errors of the communicators and for a message that has not moved within
 * the deadline, nor this rank's device come to another, and then aborts them all, which releases a host that waits for the
 * device. Tags are not sent: the checker has proved that both ends agree (csrc/sched/check.c). */
#ifndef TP_CUDA_NCCL_H
#define TP_CUDA_NCCL_H

#include "csrc/comm/comm.h"

#define TP_NCCL_SLOTS 2
#define TP_NCCL_MOST_SLOTS 64
enum { TP_NCCL_FLOWS = 1, TP_NCCL_KEEPS = 2 };

typedef struct {
    tp_comm *control;      /* of the same ranks, on host memory: the unique id, all-gathers; borrowed */
    tp_region *region;     /* progress and aborts; borrowed */
    int replicas;          /* of equally many ranks, one behind the other; 0: 1 */
    int copies;            /* of the model in each: ranks r and last - r have gradients of the same stages; 0: 1 */
    const uint8_t *pairs;  /* [from * ranks + to]: TP_NCCL_FLOWS, activations go there and gradients back; TP_NCCL_KEEPS, guests */
    size_t message_bytes;  /* largest message but for exchange and guests, which go from and to the caller's memory */
    int slots;             /* of each channel at both ends, at most TP_NCCL_MOST_SLOTS; 0: TP_NCCL_SLOTS */
    int max_ctas;          /* of a communicator: multiprocessors that a waiting message may hold; 0: all of a rank's 4, or 1 each */
} tp_nccl_config;

/* Loads NCCL; connects when the engine binds it to its device. ERUNTIME: no NCCL, too old. Closed before `control`. */
TP_MUST_USE tp_status
tp_comm_open_nccl(const tp_nccl_config *config, tp_comm **out);

#endif
