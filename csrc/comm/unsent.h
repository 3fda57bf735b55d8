/* Frames to one rank over a control connection whose writer never waits: what the kernel does not take stays here, in order. */
#ifndef TP_COMM_UNSENT_H
#define TP_COMM_UNSENT_H

#include <stddef.h>

#include "csrc/comm/parting.h"

#define TP_UNSENT_PIECES 8 /* a table, a gathering's result, an abort and a goodbye */

typedef struct {
    const unsigned char *data;
    size_t bytes;
    int lasts; /* until it has gone */
} tp_piece;

typedef struct {
    tp_piece piece[TP_UNSENT_PIECES];
    int count; /* 0: all has gone */
    unsigned char *words; /* [room] copies of pieces that would not last; `used` of them */
    size_t room, used;
} tp_unsent;

/* Send a frame behind what has still to go. lasts: the payload stays as it is until it has gone, and is not copied. 0, or -1 with
 * errno; ENOBUFS: more than room has to wait. */
int
tp_unsent_put(tp_unsent *box, int fd, const tp_frame *head, const void *payload, int lasts);
/* Send what the kernel takes now: 0, or -1 with errno. */
int
tp_unsent_flush(tp_unsent *box, int fd);
/* Whether all has gone, and come where it goes. */
int
tp_unsent_is_idle(const tp_unsent *box, int fd);

#endif
