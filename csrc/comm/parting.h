/* Frames of the control connections, and the last word over one that has no thread: of a rank that fails while the ranks, who have
 * met, connect to each other. */
#ifndef TP_COMM_PARTING_H
#define TP_COMM_PARTING_H

#include <stdint.h>

#include "csrc/base/status.h"

enum { TP_FRAME_GATHER, TP_FRAME_RESULT, TP_FRAME_PROGRESS, TP_FRAME_TABLE, TP_FRAME_ABORT, TP_FRAME_BYE };

typedef struct {
    uint64_t kind, bytes, a, b; /* bytes that follow; a, b: by the kind; of an abort its status, and the rank and one */
} tp_frame;

/* Tell all at control[ranks] (-1: none) that `rank` has failed, with this status and the message that there is. */
void
tp_parting_say(const int *control, int ranks, int rank, tp_status status);
/* ECONNECTION where one of control[ranks] has hung up, in the words that it left, if any; *who: the rank that these are of. */
TP_MUST_USE tp_status
tp_parting_hear(const int *control, int ranks, int *who);

#endif
