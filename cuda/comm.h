/* What the communicators of device memory ("nccl", "inproc") have in common: the host's communicator beneath them, the device
 * they are bound to, and the receives that are posted. */
#ifndef TP_CUDA_COMM_H
#define TP_CUDA_COMM_H

#include "csrc/comm/comm.h"
#include "cuda/device.h"

typedef struct {
    void *of; /* whose slot it comes in: a channel, or a sender's outbox, as the sender says */
    int64_t number;
    size_t bytes;
} tp_cuda_note;

typedef struct {
    void *data;
    size_t bytes;
    tp_cuda_note said; /* where it is until it is taken: control may write it */
} tp_cuda_receive;

/* Of one peer, the oldest first. */
typedef struct {
    tp_cuda_receive items[TP_COMM_POSTED];
    unsigned first, count;
} tp_cuda_receives;

typedef struct tp_cuda_comm {
    tp_comm comm; /* first */
    tp_comm *control;
    tp_region *region;
    tp_cuda_device *device; /* NULL: not bound */
    tp_stream compute;
    size_t message_bytes;   /* at least 1 */
    tp_cuda_receives *from; /* [ranks] */
} tp_cuda_comm;

/* A communicator of `bytes`, zeroed, that begins with a tp_cuda_comm: control's rank, ranks and deadline. EMEMORY. Ended by
 * tp_cuda_comm_close. */
TP_MUST_USE tp_status
tp_cuda_comm_open(size_t bytes, const tp_comm_ops *ops, tp_comm *control, tp_region *region, size_t message_bytes,
                  tp_cuda_comm **out);
/* Frees it; what is the device's has been given back. */
void
tp_cuda_comm_close(tp_cuda_comm *c);
/* tp_comm_ops.bind up to what each makes on the device: takes the device and its compute stream; device NULL: calls `release`
 * if there is a device, which gives back all that is its. EVALUE: it has one already. */
TP_MUST_USE tp_status
tp_cuda_comm_bind(tp_cuda_comm *c, void *device, void (*release)(tp_cuda_comm *));
/* Before a message: EVALUE, no such peer or no device yet; EABORTED. */
TP_MUST_USE tp_status
tp_cuda_comm_ready(const tp_cuda_comm *c, int peer);
/* Note one more receive from the peer, the last; EVALUE: no more fit. */
TP_MUST_USE tp_status
tp_cuda_comm_post(tp_cuda_comm *c, int peer, void *data, size_t bytes, tp_cuda_receive **out);
/* Take the note of the oldest: it is good until the next is posted. EVALUE: there is none. */
TP_MUST_USE tp_status
tp_cuda_comm_take(tp_cuda_comm *c, int peer, tp_cuda_receive **out);
/* tp_comm_ops.allgather: control's. */
TP_MUST_USE tp_status
tp_cuda_comm_allgather(tp_comm *comm, const void *mine, size_t bytes, void *all);

#endif
