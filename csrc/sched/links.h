/* The links of a pipeline, one from each rank to each that it sends to. A link carries one message at a time, in the order in
 * which they are sent (a stream of NCCL's, a socket): the next one waits for the bytes of the one before, not for its latency. */
#ifndef TP_SCHED_LINKS_H
#define TP_SCHED_LINKS_H

#include "csrc/sched/sched.h"

typedef struct {
    int stages;
    int32_t *of;             /* [2 * stages] the link of each stage's messages, forward and back; -1: it sends none */
    double *free_s;          /* [2 * stages] by link: when its last message's bytes have gone */
    const double *latency_s; /* of the durations; NULL: a message waits for none */
} tp_sched_links;

TP_MUST_USE tp_status
tp_sched_links_open(const tp_program *program, tp_sched_links *links);
void
tp_sched_links_close(tp_sched_links *links);
/* Nothing has been sent yet. */
void
tp_sched_links_reset(tp_sched_links *links, const tp_durations *durations);

/* A message of this stage (forward, or back != 0) is ready, and takes lag_s on its link: when it leaves, ready_s or later.
 * Of each link in the order of sending. */
static inline double
tp_sched_links_send(tp_sched_links *links, int back, int stage, double ready_s, double lag_s)
{
    if (links->latency_s == NULL)
        return ready_s;
    int at = back * links->stages + stage;
    double *free_s = &links->free_s[links->of[at]], leaves_s = ready_s > *free_s ? ready_s : *free_s;
    double bytes_s = lag_s - links->latency_s[at];
    *free_s = leaves_s + (bytes_s > 0.0 ? bytes_s : 0.0);
    return leaves_s;
}

#endif
