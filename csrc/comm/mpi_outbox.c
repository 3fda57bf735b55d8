#include "csrc/comm/mpi_outbox.h"

#include <stdlib.h>

tp_status
tp_outbox_open(tp_outbox *box, size_t bytes)
{
    if (box->memory != NULL)
        return TP_OK;
    box->memory = aligned_alloc(TP_LINE, bytes);
    box->bytes = bytes;
    return box->memory != NULL ? TP_OK : tp_fail(TP_EMEMORY, "no memory for an outbox of %zu bytes", bytes);
}

tp_status
tp_outbox_test(tp_wire_request part[2], int *done)
{
    TP_TRY(tp_wire_test(&part[0], done));
    return *done ? tp_wire_test(&part[1], done) : TP_OK;
}

tp_status
tp_outbox_collect(tp_outbox *box)
{
    int done = 1;
    while (box->count > 0) {
        TP_TRY(tp_outbox_test(box->pending[box->oldest].part, &done));
        if (!done)
            return TP_OK;
        box->tail = box->pending[box->oldest].end;
        box->oldest = (box->oldest + 1) % TP_OUTBOX_PENDING;
        box->count--;
    }
    box->head = box->tail = 0; /* where the cache is warm */
    return TP_OK;
}

tp_status
tp_outbox_find_room(tp_outbox *box, size_t bytes, int *there)
{
    TP_TRY(tp_outbox_collect(box));
    size_t at = (size_t)(box->head % box->bytes), skip = at + bytes > box->bytes ? box->bytes - at : 0;
    *there = box->count < TP_OUTBOX_PENDING && box->head + skip + bytes - box->tail <= box->bytes;
    box->head += *there ? skip : 0;
    return TP_OK;
}

unsigned char *
tp_outbox_put(tp_outbox *box, size_t bytes, tp_wire_request **parts)
{
    unsigned char *at = box->memory + box->head % box->bytes;
    tp_outbox_message *message = &box->pending[(box->oldest + box->count++) % TP_OUTBOX_PENDING];
    box->head += bytes;
    *message = (tp_outbox_message){.end = box->head};
    *parts = message->part;
    return at;
}
