/* The communicator "inproc": stages of one process on one GPU (green contexts), or on several that see each other's memory.
 *
 * One thread issues each stage, as on several machines, so that the program, the engine and the abort stay what they are. A
 * message is copied into a slot on the sender's compute stream; then its place and its event go to the receiver through
 * `control`, a host communicator between threads: order, tag, size, deadline and abort are that one's, and the event that the
 * receiver waits for has certainly been recorded (a wait for one that has not is no wait: GPU.md 4.3). The reverse, that a slot
 * may be written again, is a counter: the sender waits until the receiver has recorded its event.
 * Meanwhile it takes its own messages out of their slots, as does a receiver that waits while more of another rank's have been posted
 * than it has slots: what passes many slices through one stage before the next sends more of them ahead of their readers than there
 * are slots, and two ranks, or a ring of them, would wait for ever.
 *
 * The receiver's host gives the device nothing before the message is there. Where it gave all at once, and a stream waited for
 * another's event, operations that are graphs began or stopped up to 1.6 ms late a few times a step, some of them long after
 * their message: a step of four stages took 55.7 ms and not 52.2, or 44.4 and not 41.9 (H200, 2026-11-26, medians of one run
 * each; benchmarks/results/h200-2026-11-26-late.json, -parts.json). Operations enqueued call by call were never late. With 8
 * hardware queues for the 32 that the package asks for (CUDA_DEVICE_MAX_CONNECTIONS) it was the other way round: 65.2 ms and 81.6.
 * A stream that waits in a kernel for a word of the sender's, and for no event, was no better: 43.8 ms, by events 41.9 to 42.8, as it
 * is 39.9 and 40.0 (2026-11-27, -tried.json). */
#ifndef TP_CUDA_INPROC_H
#define TP_CUDA_INPROC_H

#include "csrc/comm/comm.h"

#define TP_INPROC_SLOTS 4 /* messages on their way between two ranks, each direction */

/* control: between threads of this process, with rings for the pairs that talk; both borrowed. Messages of up to message_bytes
 * but for exchange. Bound to its device by the engine. */
TP_MUST_USE tp_status
tp_comm_open_inproc(tp_comm *control, tp_region *region, size_t message_bytes, tp_comm **out);

/* For measurements (benchmarks/gpu/late.py): otherwise than by default, from the next message on.
 * SPINS: the host never sleeps while it waits for another rank's, since a processor that has gone to sleep may wake up late.
 * QUEUES: a receiver's host gives the device all that it can, and its stream waits for the message.
 * SETTLES: it gives nothing before all that it has been given is done. */
typedef enum { TP_INPROC_SPINS = 1, TP_INPROC_QUEUES = 2, TP_INPROC_SETTLES = 4 } tp_inproc_way;

/* EVALUE: no communicator by tp_comm_open_inproc, or ways that there are not. */
TP_MUST_USE tp_status
tp_inproc_ways(tp_comm *comm, unsigned ways);

#endif
