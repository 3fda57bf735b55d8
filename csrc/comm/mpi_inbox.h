/* Receives from one rank over MPI that are posted, oldest first, and what of their messages has come. */
#ifndef TP_COMM_MPI_INBOX_H
#define TP_COMM_MPI_INBOX_H

#include "csrc/comm/comm.h"
#include "csrc/comm/mpi_wire.h"

typedef struct {
    uint64_t tag, bytes;
} tp_envelope_head;

#define TP_ENVELOPE        ((size_t)4096) /* bytes: what MPIs send at once, whether it is awaited or not */
#define TP_ENVELOPE_INLINE (TP_ENVELOPE - sizeof(tp_envelope_head))

enum { TP_ENVELOPES, TP_PAYLOADS }; /* tags of MPI; a payload's is TP_PAYLOADS or more */

/* A receive that was posted, and the envelope that is awaited for it. */
typedef struct {
    unsigned char *slot; /* TP_ENVELOPE bytes */
    tp_wire_request envelope, payload;
    int come; /* the envelope has */
    uint64_t tag;
    void *data;
    size_t bytes;
} tp_inbox_receive;

/* All zeros: none is posted. */
typedef struct {
    tp_inbox_receive *items; /* [room] a ring */
    unsigned room, first, count;
    unsigned left; /* envelopes after these: of receives that are over, for which other messages came, or none */
    int cut; /* a message had begun to come for one that was given up: what follows would be taken for its rest */
} tp_inbox;

static inline tp_inbox_receive *
tp_inbox_oldest(const tp_inbox *box)
{
    return &box->items[box->first];
}

/* Twice the room (words.c); EMEMORY. */
TP_MUST_USE tp_status
tp_inbox_more_room(tp_inbox *box, const tp_comm *comm);
/* A receive of wanted->tag, data and bytes. payload_tag: of MPI. */
TP_MUST_USE tp_status
tp_inbox_post(tp_inbox *box, const tp_comm *comm, const tp_wire *wire, int peer, int payload_tag, const tp_inbox_receive *wanted);
/* done: the oldest receive is complete, or shown to be wrong. */
TP_MUST_USE tp_status
tp_inbox_test(tp_inbox *box, int *done);
/* The oldest receive, which is done, has its message: 1; 0: another one has come, which stays for the next receive. */
int
tp_inbox_take(tp_inbox *box);
/* The oldest receive is over without its message: its memory is the caller's again, or *stuck is 1, and MPI may write there still. What
 * has come, or will, stays for the next one; but of a message that has begun to come the payload has nowhere to go (cut). */
void
tp_inbox_drop(tp_inbox *box, int *stuck);
/* Give all up; 1: messages may be left that nobody takes. */
int
tp_inbox_end(tp_inbox *box, int *stuck);
void
tp_inbox_close(tp_inbox *box);

#endif
