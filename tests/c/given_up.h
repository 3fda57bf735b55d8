/* What becomes of a ring in which a message was given up in its middle. test_comm.c runs it. */
#ifndef TP_TESTS_GIVEN_UP_H
#define TP_TESTS_GIVEN_UP_H

#include "csrc/base/clock.h"
#include "tests/c/comm_cases.h"

#include <pthread.h>

/* Of an exchange that is given up in the middle of both messages none can follow either: the rest of what came was taken for a message
 * of its own. */
static void
nothing_follows_what_was_given_up_both_ways(void)
{
    enum { BYTES = 1 << 20 };
    const uint8_t pairs[4] = {0, 1, 1, 0};
    const tp_region_shape shape = {2, pairs, 1 << 14, 64, NULL};
    const uint64_t header[2] = {7, BYTES};
    void *memory;
    tp_region *region;
    tp_comm *comm;
    size_t bytes = local_region(&shape, &memory, &region);
    MUST(tp_comm_open_region(region, 0, "thread", 20000000, &comm) == TP_OK);
    unsigned char *data = pattern(BYTES, 1), *into = calloc(1, BYTES);
    tp_ring *ring = tp_region_ring(region, 1, 0); /* in which rank 1 has begun */
    MUST(into != NULL);
    memcpy(ring->data, header, sizeof header);
    ring->head = 2 * TP_LINE;
    MUST(comm->ops->exchange(comm, 1, 7, data, BYTES, into, BYTES) == TP_ETIMEOUT && ring->tail == ring->head);
    ring->head += TP_LINE; /* it goes on, with zeros: a message of tag 0 and no bytes */
    MUST(comm->ops->recv_post(comm, 1, 0, into, 0) == TP_ECONNECTION);
    MUST(comm->ops->send(comm, 1, 0, data, 0) == TP_ECONNECTION);
    free(data);
    free(into);
    comm->ops->close(comm);
    tp_shm_detach(memory, bytes);
}

static void *
cut_soon(void *ring)
{
    tp_clock_sleep_until(tp_clock_ns() + 10000000);
    atomic_store(&((tp_ring *)ring)->cut, 2);
    return NULL;
}

static void *
give_up_an_exchange(void *argument)
{
    tp_comm *comm = argument;
    unsigned char *data = pattern(FAR_TOO_MUCH, 1), *into = calloc(1, FAR_TOO_MUCH);
    MUST(into != NULL && comm->ops->exchange(comm, 1, 7, data, FAR_TOO_MUCH, into, 8) == TP_ECONNECTION);
    free(data);
    free(into);
    return NULL;
}

/* Who waits for the rest of a message, or to be rid of it, or for a message that was posted behind it, hears that it was given up: it
 * has no limit of time here. */
static void
who_waits_for_what_was_given_up_is_told(void)
{
    const uint8_t pairs[4] = {0, 1, 1, 0};
    const size_t arenas[2] = {4096, 4096};
    const tp_region_shape shape = {2, pairs, 1 << 14, 64, arenas};
    const uint64_t header[2] = {7, FAR_TOO_MUCH};
    void *memory;
    tp_region *region;
    tp_comm *comm[2];
    pthread_t other;
    size_t room, bytes = local_region(&shape, &memory, &region);
    uint64_t loan;
    unsigned char *data = pattern(FAR_TOO_MUCH, 1), *into = calloc(1, FAR_TOO_MUCH), byte;
    MUST(into != NULL);
    for (int rank = 0; rank < 2; rank++)
        MUST(tp_comm_open_region(region, rank, "thread", 0, &comm[rank]) == TP_OK);
    MUST(pthread_create(&other, NULL, give_up_an_exchange, comm[0]) == 0);
    MUST(comm[1]->ops->exchange(comm[1], 0, 7, data, FAR_TOO_MUCH, into, FAR_TOO_MUCH) == TP_ECONNECTION);
    MUST(HOLDS("rank 0 gave up a message to rank 1 in its middle: forward of micro-batch 0 slice 7 on stage 0, of whose 4194304 bytes"));
    pthread_join(other, NULL);
    comm[0]->ops->close(comm[0]);
    comm[1]->ops->close(comm[1]);
    MUST(tp_region_create(memset(memory, 0, bytes), bytes, &shape, &region) == TP_OK);
    MUST(tp_comm_open_region(region, 0, "thread", 20000000, &comm[0]) == TP_OK);
    tp_ring *ring = tp_region_ring(region, 1, 0);
    memcpy(ring->data, header, sizeof header);
    ring->head = 2 * TP_LINE;
    MUST(comm[0]->ops->recv_post(comm[0], 1, 7, into, FAR_TOO_MUCH) == TP_OK);
    for (int i = 0; i < 2; i++)
        MUST(comm[0]->ops->recv_post(comm[0], 1, 0, &byte, 0) == TP_OK);
    MUST(comm[0]->ops->recv_wait(comm[0], 1) == TP_ETIMEOUT);
    comm[0]->timeout_ns = 0;
    MUST(comm[0]->ops->recv_wait(comm[0], 1) == TP_ECONNECTION && HOLDS("an earlier message from rank 1"));
    ring->head += TP_LINE; /* it goes on, with zeros: a message of tag 0 and no bytes */
    MUST(comm[0]->ops->recv_wait(comm[0], 1) == TP_ECONNECTION && HOLDS("an earlier message from rank 1"));
    MUST(comm[0]->ops->lend(comm[0], 1, 0, comm[0]->ops->arena(comm[0], &room), 4096, &loan) == TP_OK && loan > 0);
    MUST(pthread_create(&other, NULL, cut_soon, tp_region_ring(region, 0, 1)) == 0);
    MUST(comm[0]->ops->reclaim(comm[0], 1, loan, 0, 4096) == TP_ECONNECTION && HOLDS("an earlier message to rank 1"));
    pthread_join(other, NULL);
    comm[0]->ops->close(comm[0]);
    free(data);
    free(into);
    tp_shm_detach(memory, bytes);
}

#endif
