/* Messages to one rank that are on their way over MPI while their sender goes on: copies in one ring of memory. */
#ifndef TP_COMM_MPI_OUTBOX_H
#define TP_COMM_MPI_OUTBOX_H

#include "csrc/comm/mpi_wire.h"
#include "csrc/comm/region.h"

#define TP_OUTBOX_PENDING 64 /* most messages in one */

typedef struct {
    uint64_t end;
    tp_wire_request part[2];
} tp_outbox_message;

typedef struct {
    unsigned char *memory; /* NULL: not yet */
    size_t bytes;
    uint64_t head, tail; /* bytes ever put in and taken out, what was skipped at the end of the memory included */
    tp_outbox_message pending[TP_OUTBOX_PENDING];
    unsigned oldest, count;
} tp_outbox;

/* So many bytes, in whole lines. */
static inline size_t
tp_outbox_lines(size_t bytes)
{
    return (bytes + (TP_LINE - 1)) & ~(size_t)(TP_LINE - 1);
}

/* Memory, a multiple of a line, if there is none yet; EMEMORY. Freed by whoever closes it. */
TP_MUST_USE tp_status
tp_outbox_open(tp_outbox *box, size_t bytes);
/* done: both parts of a message are. */
TP_MUST_USE tp_status
tp_outbox_test(tp_wire_request part[2], int *done);
/* Take out what has gone. */
TP_MUST_USE tp_status
tp_outbox_collect(tp_outbox *box);
/* Take out what has gone. there: one block of so many bytes, at most box->bytes, is free for tp_outbox_put. */
TP_MUST_USE tp_status
tp_outbox_find_room(tp_outbox *box, size_t bytes, int *there);
/* Take the block that was found. parts: of the message, both none. */
unsigned char *
tp_outbox_put(tp_outbox *box, size_t bytes, tp_wire_request **parts);

#endif
