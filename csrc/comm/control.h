/* The control plane of a TCP communicator: all-gathers, progress and aborts go through rank 0. */
#ifndef TP_COMM_CONTROL_H
#define TP_COMM_CONTROL_H

#include "csrc/comm/comm.h"

typedef struct tp_control tp_control;

/* fds: [ranks], as tp_links.control; borrowed. Starts the thread that listens to them. A rank whose machine has not answered for
 * silent_ns ends the run. */
TP_MUST_USE tp_status
tp_control_open(const tp_comm *comm, const int *fds, size_t max_gather_bytes, int64_t silent_ns, tp_region *region,
                tp_control **out);
/* As tp_comm_ops.allgather. */
TP_MUST_USE tp_status
tp_control_gather(tp_control *control, const void *mine, size_t bytes, void *all);
/* A descriptor that is readable from the abort on. */
int
tp_control_alarm(const tp_control *control);
/* The connection that carries messages with `rank` is closed (error 0), or failed with that errno: waits for the word on why, which
 * the rank or rank 0 will have sent, and ends the run by itself if none comes. EABORTED. */
TP_MUST_USE tp_status
tp_control_lost(tp_control *control, int rank, int error);
/* Says goodbye, or why this rank failed, and ends the thread. Takes NULL. */
void
tp_control_close(tp_control *control);

#endif
