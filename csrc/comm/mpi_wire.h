/* What of MPI this project uses, in types of its own: mpi.c alone sees mpi.h. Every call returns at once but start and
 * finish, and ERUNTIME with MPI's own words where MPI fails. One thread at a time. */
#ifndef TP_COMM_MPI_WIRE_H
#define TP_COMM_MPI_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/base/status.h"

typedef struct {
    uint64_t comm; /* a duplicate of MPI_COMM_WORLD */
    int most_tag;  /* tags are 0 to this */
} tp_wire;

/* A message under way; all zeros: none. */
typedef struct {
    uint64_t request;
    int live;   /* MPI may use its memory */
    int failed; /* MPI's word on why, which it says once; 0: it has not */
} tp_wire_request;

/* As tp_mpi_ops, but for what _mpi itself knows of its messages. */
TP_MUST_USE tp_status
tp_wire_start(int *rank, int *ranks);
void
tp_wire_finish(void);
const char *
tp_wire_library(void);

/* Begin to duplicate MPI_COMM_WORLD; when the request is done, tp_wire_open makes it usable: its errors are returned.
 * Meanwhile the errors of MPI_COMM_WORLD are, too, which its user may have wanted to end the process: `undo` gives that
 * back. */
TP_MUST_USE tp_status
tp_wire_duplicate(tp_wire *out, tp_wire_request *request, uint64_t *undo);
TP_MUST_USE tp_status
tp_wire_open(tp_wire *wire);
void
tp_wire_undo(uint64_t undo);
/* May wait for the other ranks. */
void
tp_wire_free(tp_wire *wire);

/* One message of any size, one request; `data` stays until it is done. A receive has room for exactly so many or for more. */
TP_MUST_USE tp_status
tp_wire_send(const tp_wire *wire, int peer, int tag, const void *data, size_t bytes, tp_wire_request *out);
TP_MUST_USE tp_status
tp_wire_recv(const tp_wire *wire, int peer, int tag, void *data, size_t bytes, tp_wire_request *out);
/* done: the message is over, or there is none. Moves whatever MPI has to move. A message that failed fails whenever it is
 * asked for. */
TP_MUST_USE tp_status
tp_wire_test(tp_wire_request *request, int *done);
/* Take a receive back, if its message has not begun to come. It is still to be tested until it is done. */
void
tp_wire_cancel(tp_wire_request *request);
/* Move whatever MPI has to move. */
void
tp_wire_look(const tp_wire *wire);

#endif
