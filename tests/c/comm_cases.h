/* What must hold of any communicator: bodies that every rank of a region or network runs. test_comm.c runs them. */
#ifndef TP_TESTS_COMM_CASES_H
#define TP_TESTS_COMM_CASES_H

#include "csrc/comm/comm.h"
#include "csrc/comm/region.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/c/check.h"

#define HOLDS(text)  (strstr(tp_error_message(), (text)) != NULL)
#define RING_BYTES   16384
#define GATHER_BYTES 256
#define FAR_TOO_MUCH ((size_t)4 << 20) /* for a ring, and for what a kernel buffers of a connection */

typedef void (*case_body)(tp_comm *c, tp_region *region);

static unsigned char *
pattern(size_t bytes, uint64_t key)
{
    unsigned char *data = malloc(bytes + 1);
    MUST(data != NULL);
    for (size_t i = 0; i < bytes; i++)
        data[i] = (unsigned char)((i * 2654435761u + key * 40503u) >> 7);
    return data;
}

/* Of this process alone; its bytes. */
static size_t
local_region(const tp_region_shape *shape, void **memory, tp_region **region)
{
    size_t bytes;
    MUST(tp_region_bytes(shape, &bytes) == TP_OK && tp_local_create(bytes, memory) == TP_OK);
    MUST(tp_region_create(*memory, bytes, shape, region) == TP_OK);
    return bytes;
}

static void
barrier(tp_comm *c)
{
    MUST(c->ops->allgather(c, NULL, 0, NULL) == TP_OK);
}

static size_t
size_of_message(int i)
{
    static const size_t special[] = {
        0, 1, 47, 48, 49, 64, 65, RING_BYTES - 64, RING_BYTES, RING_BYTES + 1, 5 * RING_BYTES + 3};
    size_t specials = sizeof special / sizeof special[0];
    return (size_t)i % 3 == 0 ? special[(size_t)(i / 3) % specials] : (size_t)i * 7919u % 3000;
}

/* A ring of ranks: each sends to the next and receives from the one before, several receives posted ahead. */
static void
in_order(tp_comm *c, tp_region *region)
{
    enum { MESSAGES = 120, AHEAD = 5 };
    int next = (c->rank + 1) % c->ranks, before = (c->rank + c->ranks - 1) % c->ranks;
    unsigned char *into[MESSAGES];
    (void)region;
    for (int i = 0; i < MESSAGES + AHEAD; i++) {
        if (i < MESSAGES) {
            into[i] = calloc(1, size_of_message(i) + 1);
            MUST(c->ops->recv_post(c, before, (uint64_t)i, into[i], size_of_message(i)) == TP_OK);
        }
        if (i < AHEAD)
            continue;
        int at = i - AHEAD;
        unsigned char *data = pattern(size_of_message(at), (uint64_t)(c->rank * 1000 + at));
        unsigned char *expected = pattern(size_of_message(at), (uint64_t)(before * 1000 + at));
        for (int turn = 0; turn < 2; turn++) /* rank 0 sends first: no circle of full rings */
            if ((c->rank == 0) == (turn == 0))
                MUST(c->ops->send(c, next, (uint64_t)at, data, size_of_message(at)) == TP_OK);
            else
                MUST(c->ops->recv_wait(c, before) == TP_OK);
        MUST(memcmp(into[at], expected, size_of_message(at)) == 0);
        free(into[at]);
        free(data);
        free(expected);
    }
}

/* More receives than there is room for at first, posted when the oldest is somewhere within it; sent before any is waited for.
 * Every other rank has reserved the room. */
static void
far_ahead(tp_comm *c, tp_region *region)
{
    enum { MESSAGES = 5 * TP_COMM_POSTED + 3, EARLY = TP_COMM_POSTED / 3 };
    int next = (c->rank + 1) % c->ranks, before = (c->rank + c->ranks - 1) % c->ranks;
    uint64_t *got = calloc(MESSAGES, sizeof *got);
    (void)region;
    MUST(got != NULL);
    for (int from = 0, to = EARLY; from < MESSAGES; from = to, to = MESSAGES) {
        if (c->rank % 2 == 0 && from > 0)
            MUST(c->ops->reserve(c, before, MESSAGES) == TP_OK && c->ops->reserve(c, before, 1) == TP_OK);
        for (int i = from; i < to; i++)
            MUST(c->ops->recv_post(c, before, (uint64_t)i, &got[i], sizeof got[i]) == TP_OK);
        barrier(c);
        for (int i = from; i < to; i++) {
            uint64_t data = (uint64_t)(c->rank * 1000 + i);
            MUST(c->ops->send(c, next, (uint64_t)i, &data, sizeof data) == TP_OK);
        }
        for (int i = from; i < to; i++)
            MUST(c->ops->recv_wait(c, before) == TP_OK && got[i] == (uint64_t)(before * 1000 + i));
    }
    free(got);
}

#define SLOT_BYTES  (6 * RING_BYTES) /* of an arena: the largest message of size_of_message */
#define LENT_SLOTS  3
#define ARENA_BYTES (LENT_SLOTS * SLOT_BYTES)

/* Messages of an arena's slots, each written anew as soon as its last message is back, among others that are sent; in the last
 * rounds far more at once than a ring has lines. A transport without arenas sends them all. */
static void
lends(tp_comm *c, tp_region *region)
{
    enum { MESSAGES = 300, AHEAD = 7 };
    int next = (c->rank + 1) % c->ranks, before = (c->rank + c->ranks - 1) % c->ranks;
    uint64_t loan[LENT_SLOTS] = {0}, tag[LENT_SLOTS] = {0};
    unsigned char *into[MESSAGES + 1] = {0};
    size_t room = 0, lent = 0;
    unsigned char *arena = c->ops->arena == NULL ? NULL : c->ops->arena(c, &room);
    (void)region;
    MUST((c->ops->arena == NULL) == (c->ops->lend == NULL) && (c->ops->arena == NULL) == (c->ops->reclaim == NULL));
    if (arena == NULL)
        return;
    MUST(room >= ARENA_BYTES && (uintptr_t)arena % 4096 == 0);
    for (int i = 0; i < MESSAGES + AHEAD; i++) {
        if (i < MESSAGES) {
            into[i] = calloc(1, size_of_message(i) + 1);
            MUST(c->ops->recv_post(c, before, (uint64_t)i, into[i], size_of_message(i)) == TP_OK);
        }
        if (i < AHEAD)
            continue;
        int at = i - AHEAD, slot = at % LENT_SLOTS;
        size_t bytes = size_of_message(at);
        unsigned char *data = pattern(bytes, (uint64_t)(c->rank * 1000 + at)), *place = arena + (size_t)slot * SLOT_BYTES;
        unsigned char *expected = pattern(bytes, (uint64_t)(before * 1000 + at));
        if (loan[slot] != 0)
            MUST(c->ops->reclaim(c, next, loan[slot], tag[slot], bytes) == TP_OK);
        MUST(c->ops->reclaim(c, next, loan[slot], tag[slot], bytes) == TP_OK); /* again, or of nothing */
        memcpy(place, data, bytes);
        for (int turn = 0; turn < 2; turn++)
            if ((c->rank == 0) == (turn == 0)) {
                MUST(c->ops->lend(c, next, (uint64_t)at, at % 4 == 1 ? data : place, bytes, &loan[slot]) == TP_OK);
                MUST((at % 4 == 1) == (loan[slot] == 0));
            } else {
                MUST(c->ops->recv_wait(c, before) == TP_OK);
            }
        tag[slot] = (uint64_t)at;
        lent += loan[slot] != 0;
        MUST(memcmp(into[at], expected, bytes) == 0);
        free(into[at]);
        free(data);
        free(expected);
    }
    MUST(lent > MESSAGES / 3);
    barrier(c);
}

/* Who is asked between kernels alone takes a message too long for any buffer, and one that was lent, before it waits for either. */
static void
progresses(tp_comm *c, tp_region *region)
{
    size_t room = 0;
    unsigned char *arena = c->ops->arena == NULL ? NULL : c->ops->arena(c, &room), *expected = pattern(FAR_TOO_MUCH, 9);
    (void)region;
    MUST(c->ops->progress == NULL || c->ops->progress(c) == TP_OK); /* of nothing */
    if (c->ops->progress != NULL && c->rank == 0) {
        uint64_t loan = 0;
        MUST(c->ops->send(c, 1, 1, expected, FAR_TOO_MUCH) == TP_OK);
        if (arena != NULL) {
            memcpy(arena, expected, ARENA_BYTES);
            MUST(c->ops->lend(c, 1, 2, arena, ARENA_BYTES, &loan) == TP_OK && loan != 0);
            MUST(c->ops->reclaim(c, 1, loan, 2, ARENA_BYTES) == TP_OK);
            memset(arena, 0, ARENA_BYTES);
        }
    } else if (c->ops->progress != NULL) {
        unsigned char *in = calloc(1, FAR_TOO_MUCH), *lent = calloc(1, ARENA_BYTES);
        MUST(in != NULL && lent != NULL && c->ops->recv_post(c, 0, 1, in, FAR_TOO_MUCH) == TP_OK);
        MUST(arena == NULL || c->ops->recv_post(c, 0, 2, lent, ARENA_BYTES) == TP_OK);
        for (int turns = 0; memcmp(in, expected, FAR_TOO_MUCH) != 0 ||
                            (arena != NULL && memcmp(lent, expected, ARENA_BYTES) != 0); turns++) {
            MUST(turns < 20000 && c->ops->progress(c) == TP_OK);
            usleep(500);
        }
        MUST(c->ops->recv_wait(c, 0) == TP_OK && (arena == NULL || c->ops->recv_wait(c, 0) == TP_OK));
        MUST(memcmp(in, expected, FAR_TOO_MUCH) == 0 && (arena == NULL || memcmp(lent, expected, ARENA_BYTES) == 0));
        free(in);
        free(lent);
    }
    free(expected);
    barrier(c);
}

/* What was lent and is not taken: reclaim waits until the other end comes, the deadline or an abort. The loan of a message that is
 * so short that it went along stands for the long one before it. */
static void
kept_loans(tp_comm *c, tp_region *region)
{
    size_t room = 0;
    unsigned char *arena = c->ops->arena == NULL ? NULL : c->ops->arena(c, &room), *in = calloc(1, ARENA_BYTES);
    uint64_t loan = 0, last = 0;
    if (arena != NULL && c->rank == 0) {
        unsigned char *expected = pattern(ARENA_BYTES, 5);
        memcpy(arena, expected, ARENA_BYTES);
        MUST(c->ops->lend(c, 1, 5, arena, ARENA_BYTES, &loan) == TP_OK && loan != 0);
        MUST(c->ops->lend(c, 1, 4, arena, 8, &last) == TP_OK && last > loan);
        barrier(c);
        c->timeout_ns = 30000000;
        MUST(c->ops->reclaim(c, 1, loan, 5, ARENA_BYTES) == TP_ETIMEOUT && HOLDS("to send a message to rank 1") &&
              HOLDS("0 of 294912 bytes"));
        MUST(c->ops->reclaim(c, 1, last, 4, 8) == TP_ETIMEOUT && HOLDS("0 of 8 bytes"));
        c->timeout_ns = 0;
        MUST(memcmp(arena, expected, ARENA_BYTES) == 0);
        barrier(c);
        MUST(c->ops->reclaim(c, 1, last, 4, 8) == TP_OK && c->ops->reclaim(c, 1, loan, 5, ARENA_BYTES) == TP_OK);
        memset(arena, 0, ARENA_BYTES);
        MUST(c->ops->lend(c, 1, 6, arena, ARENA_BYTES, &loan) == TP_OK && loan != 0);
        MUST(c->ops->reclaim(c, 1, loan, 6, ARENA_BYTES) == TP_EABORTED && HOLDS("the first failure"));
        free(expected);
    } else if (arena != NULL) {
        unsigned char *expected = pattern(ARENA_BYTES, 5);
        barrier(c);
        usleep(50000);
        barrier(c);
        MUST(c->ops->recv_post(c, 0, 5, in, ARENA_BYTES) == TP_OK && c->ops->recv_wait(c, 0) == TP_OK);
        MUST(memcmp(in, expected, ARENA_BYTES) == 0);
        MUST(c->ops->recv_post(c, 0, 4, in, 8) == TP_OK && c->ops->recv_wait(c, 0) == TP_OK);
        MUST(c->ops->recv_post(c, 0, 7, in, ARENA_BYTES) == TP_OK);
        MUST(c->ops->recv_wait(c, 0) == TP_ECONNECTION && HOLDS("294912 bytes"));
        tp_region_abort(region, TP_ERUNTIME, 1, "the first failure");
        free(expected);
    }
    free(in);
}

static void
exchanges(tp_comm *c, tp_region *region)
{
    static const size_t sizes[][2] = {
        {0, 0}, {1, 3}, {40 * RING_BYTES, 2}, {0, 9 * RING_BYTES + 5}, {3000001, 3000001}};
    int peer = c->rank ^ 1;
    (void)region;
    if (peer >= c->ranks)
        return;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        size_t out_bytes = sizes[i][c->rank & 1], in_bytes = sizes[i][!(c->rank & 1)];
        unsigned char *out = pattern(out_bytes, (uint64_t)c->rank + 7 * i),
                      *expected = pattern(in_bytes, (uint64_t)peer + 7 * i);
        unsigned char *in = calloc(1, in_bytes + 1);
        MUST(c->ops->exchange(c, peer, i, out, out_bytes, in, in_bytes) == TP_OK);
        MUST(memcmp(in, expected, in_bytes) == 0);
        free(out);
        free(expected);
        free(in);
    }
}

/* Chunks long enough to be streamed past the caches: the first ones, and every TP_PACE_LOOKth, go the other way whatever is faster. */
static void
long_messages(tp_comm *c, tp_region *region)
{
    enum { MESSAGES = 40, BYTES = 8 * (int)TP_PACE_LEAST + 77 };
    int peer = c->rank ^ 1;
    unsigned char *in = calloc(1, BYTES);
    (void)region;
    MUST(in != NULL);
    for (int i = 0; i < MESSAGES; i++) {
        size_t bytes = (size_t)(BYTES - 1001 * i), odd = (size_t)i % 17; /* from any address */
        unsigned char *out = pattern(bytes + odd, (uint64_t)(c->rank + 2 * i));
        unsigned char *expected = pattern(bytes + odd, (uint64_t)(peer + 2 * i));
        MUST(c->ops->recv_post(c, peer, (uint64_t)i, in, bytes) == TP_OK);
        MUST(c->ops->send(c, peer, (uint64_t)i, out + odd, bytes) == TP_OK);
        MUST(c->ops->recv_wait(c, peer) == TP_OK);
        MUST(memcmp(in, expected + odd, bytes) == 0);
        free(out);
        free(expected);
    }
    free(in);
}

static void
gathers(tp_comm *c, tp_region *region)
{
    unsigned char mine[GATHER_BYTES], *all = malloc((size_t)c->ranks * GATHER_BYTES);
    (void)region;
    for (int round = 0; round < 300; round++) {
        size_t bytes = (size_t)round * 37 % (GATHER_BYTES + 1);
        memset(mine, c->rank * 31 + round, sizeof mine);
        MUST(c->ops->allgather(c, mine, bytes, all) == TP_OK);
        for (int rank = 0; rank < c->ranks; rank++)
            for (size_t i = 0; i < bytes; i++)
                MUST(all[(size_t)rank * bytes + i] == (unsigned char)(rank * 31 + round));
    }
    MUST(c->ops->allgather(c, mine, GATHER_BYTES + 1, all) == TP_EVALUE);
    MUST(HOLDS("257") && HOLDS("256"));
    barrier(c);
    tp_status status = c->ops->allgather(c, mine, c->rank == 0 ? 8 : 16, all);
    MUST(status == TP_ECONNECTION && HOLDS("8 bytes") + HOLDS("16 bytes") + HOLDS("gathers") >= 2);
    free(all);
}

static void
wrong_messages(tp_comm *c, tp_region *region)
{
    unsigned char data[64] = {0};
    (void)region;
    if (c->rank == 0) {
        MUST(c->ops->send(c, 1, tp_tag(5, 0, 3, 2), data, 64) == TP_OK);
        barrier(c);
        MUST(c->ops->exchange(c, 1, tp_tag(7, 0, 0, 0), data, 64, data, 32) == TP_ECONNECTION);
    } else if (c->rank == 1) {
        MUST(c->ops->recv_post(c, 0, tp_tag(5, 0, 3, 1), data, 64) == TP_OK);
        MUST(c->ops->recv_wait(c, 0) == TP_ECONNECTION);
        MUST(HOLDS("rank 0 sent send of the activation of micro-batch 3 slice 2 on stage 0 (64 bytes)"));
        MUST(HOLDS("rank 1 expected send of the activation of micro-batch 3 slice 1 on stage 0 (64 bytes)"));
        barrier(c);
        MUST(c->ops->exchange(c, 0, tp_tag(5, 0, 3, 2), data, 64, data, 64) ==
              TP_OK); /* takes the message left there */
    } else {
        barrier(c);
    }
}

static void
deadlines(tp_comm *c, tp_region *region)
{
    unsigned char *data = calloc(1, FAR_TOO_MUCH);
    c->timeout_ns = 30000000;
    if (c->rank == 0) {
        tp_region_progress(region, 0, 5, tp_tag(0, 1, 2, 3));
        MUST(c->ops->send(c, 1, tp_tag(5, 0, 0, 0), data, FAR_TOO_MUCH) == TP_ETIMEOUT);
        MUST(HOLDS("to send a message to rank 1") && HOLDS("4194304 bytes"));
    } else if (c->rank == 1) {
        MUST(c->ops->recv_post(c, 2 % c->ranks, 9, data, 8) == TP_OK);
        if (c->ranks > 2)
            MUST(c->ops->recv_wait(c, 2) == TP_ETIMEOUT && HOLDS("rank 2") && HOLDS("before its first instruction"));
    }
    c->timeout_ns = 0;
    barrier(c);
    free(data);
}

static void
bad_requests(tp_comm *c, tp_region *region)
{
    unsigned char data[8] = {0};
    tp_comm *other;
    MUST(c->ops->send(c, c->rank, 0, data, 8) == TP_EVALUE);
    MUST(c->ops->send(c, c->ranks, 0, data, 8) == TP_EVALUE && HOLDS("peer is"));
    MUST(c->ops->recv_post(c, -1, 0, data, 8) == TP_EVALUE);
    MUST(c->ops->recv_wait(c, c->ranks) == TP_EVALUE);
    int peer = (c->rank + 1) % c->ranks;
    MUST(c->ops->recv_wait(c, peer) == TP_EVALUE && HOLDS("has posted no receive"));
    MUST(c->ops->recv_post(c, peer, 0, data, 8) == TP_OK);
    MUST(c->ops->exchange(c, peer, 0, data, 8, data, 8) == TP_EVALUE && HOLDS("posted"));
    MUST(tp_comm_open_region(region, c->ranks, "thread", 0, &other) == TP_EVALUE);
    MUST(tp_comm_open_region(region, 0, "carrier pigeon", 0, &other) == TP_EVALUE && HOLDS("carrier pigeon"));
    barrier(c);
}

/* The last rank fails while the others are blocked in every kind of wait. */
static void
aborts(tp_comm *c, tp_region *region)
{
    unsigned char *data = calloc(1, FAR_TOO_MUCH);
    tp_status status;
    int last = c->ranks - 1, first = -1;
    char text[512];
    if (c->rank == last) {
        usleep(20000); /* the others sleep by now, or soon: both must end */
        tp_region_abort(region, TP_ERUNTIME, last, "the first failure");
        tp_region_abort(region, TP_EIO, 0, "a later one");
        status = c->ops->allgather(c, NULL, 0, NULL);
    } else if (c->rank == 0) {
        status = c->ops->send(c, 1, 0, data, FAR_TOO_MUCH);
    } else if (c->rank == 1) {
        status = c->ops->exchange(c, last, 0, data, 10, data, 10);
    } else {
        status = c->ops->allgather(c, NULL, 0, NULL);
    }
    MUST(status == TP_EABORTED && HOLDS("the first failure"));
    MUST(tp_region_aborted(region, &first, text) == TP_ERUNTIME && first == last &&
          strcmp(text, "the first failure") == 0);
    free(data);
}

/* A writer that begins anew at the ring's start says so before anything is there: until then nothing has come. */
static void
begins_anew(tp_comm *c, tp_region *region)
{
    tp_ring *ring = tp_region_ring(region, 0, 1);
    unsigned char sent = 7, got = 0;
    if (ring == NULL)
        return;
    barrier(c);
    if (c->rank == 0)
        atomic_store(&ring->skip, ring->capacity);
    barrier(c);
    if (c->rank == 1) {
        MUST(c->ops->recv_post(c, 0, 5, &got, 1) == TP_OK);
        MUST(c->ops->progress(c) == TP_OK);
    }
    barrier(c);
    if (c->rank == 0) {
        atomic_store(&ring->skip, 0);
        MUST(c->ops->send(c, 1, 5, &sent, 1) == TP_OK);
    } else {
        MUST(c->ops->recv_wait(c, 0) == TP_OK && got == 7);
    }
    barrier(c);
}

/* What is lent lies in the region, all of it: else the sender's memory is damaged, and nobody reads there. */
static void
lent_nowhere(tp_comm *c, tp_region *region)
{
    tp_ring *ring = tp_region_ring(region, 0, 1);
    unsigned char got[1000];
    if (ring == NULL)
        return;
    const uint64_t ends = region->bytes, places[] = {ends - 999, ends + 1, UINT64_MAX - 8};
    for (uint64_t i = 0; i < 3; i++) {
        const uint64_t line[TP_LINE / 8] = {i, sizeof got | (uint64_t)1 << 63, places[i]};
        barrier(c);
        if (c->rank == 0) {
            memcpy(ring->data + i * TP_LINE, line, sizeof line);
            atomic_store(&ring->head, (i + 1) * TP_LINE);
            atomic_store(&ring->tail, i * TP_LINE);
        }
        barrier(c);
        if (c->rank == 1) {
            MUST(c->ops->recv_post(c, 0, i, got, sizeof got) == TP_OK);
            MUST(c->ops->recv_wait(c, 0) == TP_ECONNECTION);
            MUST(HOLDS("rank 0 lent rank 1 1000 bytes from"));
        }
    }
    barrier(c);
}

/* A wait is too long where nothing comes, from whomever: not where others' messages do. All take 0.8 s, the deadline is 0.6 s. */
static void
moves_on(tp_comm *c, tp_region *region)
{
    enum { MESSAGES = 8, EVERY_US = 100000 };
    unsigned char got[MESSAGES + 1] = {0}, sent = 7;
    (void)region;
    if (strcmp(c->ops->name, "mpi") == 0)
        return; /* a wait of MPI's counts from its own beginning */
    for (int i = 0; c->rank == 0 && i < MESSAGES; i++)
        MUST(c->ops->recv_post(c, 2, (uint64_t)i, &got[i], 1) == TP_OK);
    if (c->rank == 0)
        MUST(c->ops->recv_post(c, 1, 9, &got[MESSAGES], 1) == TP_OK);
    barrier(c);
    if (c->rank == 0) {
        c->timeout_ns = 600000000;
        MUST(c->ops->recv_wait(c, 1) == TP_OK && got[MESSAGES] == 7);
        c->timeout_ns = 0;
        for (int i = 0; i < MESSAGES; i++)
            MUST(c->ops->recv_wait(c, 2) == TP_OK && got[i] == 7);
    }
    for (int i = 0; c->rank == 2 && i < MESSAGES; i++) {
        usleep(EVERY_US);
        MUST(c->ops->send(c, 0, (uint64_t)i, &sent, 1) == TP_OK);
    }
    if (c->rank == 1) {
        usleep(MESSAGES * EVERY_US);
        MUST(c->ops->send(c, 0, 9, &sent, 1) == TP_OK);
    }
    barrier(c);
}

#endif
