/* Internal to comm.c: what a message through a ring is, and its copies in and out. */
#ifndef TP_COMM_RING_H
#define TP_COMM_RING_H

#include "csrc/comm/pace.h"
#include "csrc/comm/region.h"

#include <string.h>

typedef struct {
    uint64_t tag, bytes;
} header;

/* One direction of one message under way. */
typedef struct {
    tp_ring *ring; /* NULL: this direction is not wanted */
    tp_pace *pace; /* of an outgoing one */
    tp_region_rank *other;
    int peer;
    uint64_t tag;
    unsigned char *data;
    size_t bytes, moved;
    uint64_t tail; /* where the reader was when this end began */
    uint64_t lent; /* where in the region it lies; 0: it goes through the ring */
    int begun, holds;
} transfer;

typedef struct {
    transfer *items; /* [room] a ring */
    unsigned room, first, count;
} receive_queue;

typedef struct {
    tp_comm base; /* first: a tp_comm * is a ring_comm * */
    tp_region *region;
    tp_region_rank *self;
    int shared;
    int first;                  /* of the records of the ranks' threads: 0, or aside the number of ranks */
    const _Atomic int *halted;  /* aside: ends its waits; NULL */
    int64_t spin_ns;
    tp_pace *pace;           /* [ranks] of our copies into the ring to each */
    receive_queue *posted[]; /* [ranks]; NULL where the peer has no ring to us */
} ring_comm;

static inline size_t
least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t
lines(size_t bytes)
{
    return (bytes + (TP_LINE - 1)) & ~(size_t)(TP_LINE - 1);
}

static inline void
copy_in(const transfer *t, size_t capacity, uint64_t position, size_t bytes)
{
    const unsigned char *data = t->data + t->moved;
    size_t at = (size_t)(position % capacity), whole = least(bytes, capacity - at);
    tp_pace_copy(t->pace, t->ring->data + at, data, whole);
    tp_pace_copy(t->pace, t->ring->data, data + whole, bytes - whole);
}

static inline void
copy_out(const tp_ring *ring, size_t capacity, uint64_t position, unsigned char *data, size_t bytes)
{
    size_t at = (size_t)(position % capacity), whole = least(bytes, capacity - at);
    memcpy(data, ring->data + at, whole);
    memcpy(data + whole, ring->data, bytes - whole);
}

#endif
