#include "csrc/comm/mpi_inbox.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/comm/region.h"

#define GIVE_NS 500000000ll /* for a receive that is being given up */

static int
is_wrong(const tp_inbox_receive *r)
{
    tp_envelope_head head;
    memcpy(&head, r->slot, sizeof head);
    return r->come && (head.tag != r->tag || head.bytes != r->bytes);
}

tp_status
tp_inbox_more_room(tp_inbox *box, const tp_comm *comm)
{
    unsigned room = box->room;
    void *items = box->items;
    TP_TRY(tp_comm_more_room(comm, &items, sizeof *box->items, &room, &box->first));
    box->items = items;
    for (; box->room < room; box->room++) {
        box->items[box->room].slot = malloc(TP_ENVELOPE);
        if (box->items[box->room].slot == NULL)
            return tp_fail(TP_EMEMORY, "no memory for more than %u receives of rank %d", box->room, comm->rank);
    }
    return TP_OK;
}

tp_status
tp_inbox_post(tp_inbox *box, const tp_comm *comm, const tp_wire *wire, int peer, int payload_tag, const tp_inbox_receive *wanted)
{
    if (box->count + box->left == box->room)
        TP_TRY(tp_inbox_more_room(box, comm));
    tp_inbox_receive *r = &box->items[(box->first + box->count) % box->room];
    r->tag = wanted->tag;
    r->data = wanted->data;
    r->bytes = wanted->bytes;
    r->payload = (tp_wire_request){0};
    if (box->left == 0) {
        r->come = 0;
        TP_TRY(tp_wire_recv(wire, peer, TP_ENVELOPES, r->slot, TP_ENVELOPE, &r->envelope));
    }
    box->left -= box->left > 0;
    box->count++;
    if (r->bytes <= TP_ENVELOPE_INLINE)
        return TP_OK;
    tp_status status = tp_wire_recv(wire, peer, payload_tag, r->data, r->bytes, &r->payload);
    box->count -= status != TP_OK;
    box->left += status != TP_OK;
    return status;
}

tp_status
tp_inbox_test(tp_inbox *box, int *done)
{
    tp_inbox_receive *r = tp_inbox_oldest(box);
    if (!r->come)
        TP_TRY(tp_wire_test(&r->envelope, &r->come));
    *done = r->come;
    return r->come && !is_wrong(r) ? tp_wire_test(&r->payload, done) : TP_OK;
}

int
tp_inbox_take(tp_inbox *box)
{
    tp_inbox_receive *r = tp_inbox_oldest(box);
    if (is_wrong(r))
        return 0;
    if (r->bytes > 0 && r->bytes <= TP_ENVELOPE_INLINE)
        memcpy(r->data, r->slot + sizeof(tp_envelope_head), r->bytes);
    box->count--;
    box->first = (box->first + 1) % box->room;
    return 1;
}

/* A receive whose message has begun to come is awaited, for a while. */
static void
give_up(tp_wire_request *request, int *stuck)
{
    int done = !request->live || *stuck;
    tp_wire_cancel(request);
    for (int64_t until = tp_clock_ns() + GIVE_NS; !done && tp_clock_ns() < until;)
        if (tp_wire_test(request, &done) != TP_OK)
            break;
    *stuck |= request->live;
}

void
tp_inbox_drop(tp_inbox *box, int *stuck)
{
    tp_inbox_receive *r = tp_inbox_oldest(box);
    give_up(&r->payload, stuck);
    if (!r->come && tp_wire_test(&r->envelope, &r->come) != TP_OK)
        r->come = 0;
    box->cut |= r->come && !is_wrong(r) && r->bytes > TP_ENVELOPE_INLINE;
    box->count--;
    for (unsigned i = 0; i < box->count; i++) { /* the envelopes stay where they are, what is expected moves up */
        tp_inbox_receive *to = &box->items[(box->first + i) % box->room], *from = &box->items[(box->first + i + 1) % box->room];
        to->payload = from->payload;
        to->tag = from->tag;
        to->data = from->data;
        to->bytes = from->bytes;
    }
    box->items[(box->first + box->count) % box->room].payload = (tp_wire_request){0};
    box->left++;
}

int
tp_inbox_end(tp_inbox *box, int *stuck)
{
    int left = box->left > 0;
    for (unsigned i = 0; i < box->count + box->left; i++) {
        tp_inbox_receive *r = &box->items[(box->first + i) % box->room];
        give_up(&r->payload, stuck);
        give_up(&r->envelope, stuck);
    }
    box->count = box->left = 0;
    return left;
}

void
tp_inbox_close(tp_inbox *box)
{
    for (unsigned i = 0; i < box->room; i++)
        free(box->items[i].slot);
    free(box->items);
}
