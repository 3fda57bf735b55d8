/* What the communicators of device memory ("nccl", "inproc") have in common: the host's communicator beneath them, the device
 * they are bound to, and the receives that are posted. */
#ifndef TP_CUDA_COMM_H
#define TP_CUDA_COMM_H

#include "csrc/comm/comm.h"
#include "cuda/device.h"

typedef struct {
    void *of; /* owner of the slot that it comes in: a channel ("nccl"), or a sender's outbox ("inproc") */
    int64_t number;
    size_t bytes;
} tp_cuda_note;

typedef struct {
    void *data;
    size_t bytes;
    uint64_t tag; /* "inproc": for errors */
    int is_out;   /* "inproc": its message has been copied to `data` before its reader waits for it */
    tp_cuda_note said; /* the sender's note about the message; the host's communicator may write it until the message is taken */
} tp_cuda_receive;

/* The receives posted from one peer, the oldest first. */
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
/* Free it, after everything on the device has been given back. */
void
tp_cuda_comm_close(tp_cuda_comm *c);
/* The common part of tp_comm_ops.bind: take the device and its compute stream. device NULL: unbind, which calls `release`, if there
 * is a device, to give back everything on it. */
TP_MUST_USE tp_status
tp_cuda_comm_bind(tp_cuda_comm *c, void *device, void (*release)(tp_cuda_comm *));
/* Check before a message: EVALUE: no such peer, or no device yet; EABORTED. */
TP_MUST_USE tp_status
tp_cuda_comm_ready(const tp_cuda_comm *c, int peer);
/* Append a receive to those posted from the peer. EVALUE: there is no room for more. */
TP_MUST_USE tp_status
tp_cuda_comm_post(tp_cuda_comm *c, int peer, void *data, size_t bytes, tp_cuda_receive **out);
/* Take the oldest receive posted from the peer; *out is good until the next is posted. EVALUE: there is none. */
TP_MUST_USE tp_status
tp_cuda_comm_take(tp_cuda_comm *c, int peer, tp_cuda_receive **out);
/* tp_comm_ops.allgather: control's. */
TP_MUST_USE tp_status
tp_cuda_comm_allgather(tp_comm *comm, const void *mine, size_t bytes, void *all);

#endif
