/* Messages over MPI (csrc/comm/mpi_messages.c) with a fake MPI in this file, whose messages arrive and fail when the test says so,
 * which no real MPI can be made to do. tests/test_mpi.py tests the real ones. */
#include "csrc/comm/mpi_inbox.c"
#include "csrc/comm/mpi_messages.c"
#include "csrc/comm/mpi_outbox.c"

#include <stdio.h>
#include <unistd.h>

#include "tests/c/check.h"

enum { LONG = 2 * ENVELOPE, SENDS = 30 };

/* A receive of an envelope finds `next` and `text` at once, or when it is not silent any more; a payload comes when it is let; sends are
 * done at once. */
static header next;
static char text[9] = "the word";
static _Atomic int let, looks, silent;
static int fails, gathers, finished, cancelled;

tp_status
tp_wire_start(int *rank, int *ranks)
{
    *rank = 0;
    *ranks = 2;
    return TP_OK;
}

void
tp_wire_finish(void)
{
    finished = 1;
}

const char *
tp_wire_library(void)
{
    return "the false MPI";
}

tp_status
tp_wire_duplicate(tp_wire *out, tp_wire_request *request, uint64_t *undo)
{
    *out = (tp_wire){0, 32767};
    *request = (tp_wire_request){0};
    *undo = 0;
    return TP_OK;
}

tp_status
tp_wire_open(tp_wire *wire)
{
    (void)wire;
    return fails ? tp_fail(TP_ERUNTIME, "no tags") : TP_OK;
}

void
tp_wire_undo(uint64_t undo)
{
    (void)undo;
}

void
tp_wire_free(tp_wire *wire)
{
    (void)wire;
}

tp_status
tp_wire_send(const tp_wire *wire, int peer, int tag, const void *data, size_t bytes, tp_wire_request *out)
{
    (void)wire, (void)peer, (void)tag, (void)data, (void)bytes;
    *out = (tp_wire_request){0};
    return TP_OK;
}

static void
come(uint64_t envelope)
{
    unsigned char *slot = (unsigned char *)(uintptr_t)envelope;
    if (atomic_load(&silent))
        return;
    memcpy(slot, &next, sizeof next);
    memcpy(slot + sizeof next, text, 8);
}

tp_status
tp_wire_recv(const tp_wire *wire, int peer, int tag, void *data, size_t bytes, tp_wire_request *out)
{
    (void)wire, (void)peer, (void)bytes;
    *out = (tp_wire_request){0};
    out->live = tag != TP_ENVELOPES || atomic_load(&silent);
    if (tag == TP_ENVELOPES)
        come(out->request = (uint64_t)(uintptr_t)data);
    return TP_OK;
}

tp_status
tp_wire_test(tp_wire_request *request, int *done)
{
    if (request->live && request->request != 0) {
        come(request->request);
        *done = !(request->live = atomic_load(&silent));
        return TP_OK;
    }
    if (request->live && !atomic_load(&let)) { /* a piece takes a while, so that whoever waits for its end is asleep */
        atomic_fetch_add(&looks, 1);
        nanosleep(&(struct timespec){0, 100000}, NULL);
    }
    request->live = request->live && !atomic_load(&let);
    *done = !request->live;
    return TP_OK;
}

void
tp_wire_cancel(tp_wire_request *request)
{
    cancelled += request->live;
    request->live = 0;
}

void
tp_wire_look(const tp_wire *wire)
{
    (void)wire;
}

/* ---- what is beneath: the other rank is always there and always content ------------------------------------------- */

static tp_status
gather(tp_comm *comm, const void *mine, size_t bytes, void *all)
{
    gathers++;
    for (int rank = 0; rank < comm->ranks; rank++)
        memcpy((unsigned char *)all + (size_t)rank * bytes, mine, bytes);
    return TP_OK;
}

static const tp_comm_ops beneath = {.abi = TP_COMM_ABI, .name = "beneath", .allgather = gather};
static tp_comm control = {&beneath, 0, 2, 0, 0, 0};

/* While a payload comes in pieces the thread looks again and again; but a rank that wants to send gets its turn at once. */
static void
test_a_rank_gets_its_turn(tp_region *region)
{
    tp_comm *c;
    static unsigned char data[LONG];
    MUST(mpi_open(&control, region, 1 << 20, &c) == TP_OK);
    next = (header){7, LONG};
    MUST(c->ops->recv_post(c, 1, 7, data, LONG) == TP_OK);
    int quick = 0;
    for (int i = 0; i < SENDS; i++) {
        for (int seen = atomic_load(&looks); atomic_load(&looks) < seen + 2;) { /* the thread is at it */
        }
        int before = atomic_load(&looks);
        MUST(c->ops->send(c, 1, 8, data, 8) == TP_OK);
        quick += atomic_load(&looks) - before <= 2; /* what it was at */
    }
    MUST(quick > SENDS / 2); /* the machine may give a core to somebody else at any time */
    atomic_store(&let, 1);
    MUST(c->ops->recv_wait(c, 1) == TP_OK);
    c->ops->close(c);
}

/* The others are at work, and would take this rank's all-gather for one of theirs; or wait for it in MPI_Finalize. */
static void
test_a_rank_that_cannot_open_ends_alone(tp_region *region)
{
    tp_comm *c;
    gathers = 0;
    fails = 1;
    MUST(mpi_open(&control, region, 1 << 20, &c) == TP_ERUNTIME && gathers == 0);
    finish();
    MUST(!finished);
}

/* Its message, where one comes after all, is the next receive's: the memory was given back, and MPI would write there still. Where the
 * message had begun to come its rest has nowhere to go. */
static void
test_a_receive_that_is_given_up_gives_its_memory_back(tp_region *region)
{
    tp_comm *c;
    static unsigned char early[LONG], late[LONG];
    MUST(mpi_open(&control, region, 1 << 20, &c) == TP_OK);
    c->timeout_ns = 10000000;
    for (size_t bytes = 8; bytes <= LONG; bytes += LONG - 8) {
        atomic_store(&silent, 1);
        cancelled = 0;
        MUST(c->ops->recv_post(c, 1, 7, early, bytes) == TP_OK && c->ops->recv_wait(c, 1) == TP_ETIMEOUT);
        MUST(strstr(tp_error_message(), "for a message from rank 1") != NULL && cancelled == (bytes == LONG));
        next = (header){7, bytes};
        atomic_store(&silent, 0);
        MUST(c->ops->recv_post(c, 1, 7, late, bytes) == TP_OK && c->ops->recv_wait(c, 1) == TP_OK);
        MUST(early[0] == 0 && (bytes > 8 || memcmp(late, text, 8) == 0));
    }
    atomic_store(&silent, 1);
    for (uint64_t i = 0; i < 3; i++)
        MUST(c->ops->recv_post(c, 1, i, early, LONG) == TP_OK);
    cancelled = 0;
    c->ops->withdraw(c);
    MUST(cancelled == 3 && c->ops->recv_wait(c, 1) == TP_EVALUE);
    next = (header){0, LONG};
    atomic_store(&silent, 0);
    atomic_store(&let, 0);
    MUST(c->ops->recv_post(c, 1, 0, early, LONG) == TP_OK && c->ops->recv_wait(c, 1) == TP_ETIMEOUT && cancelled == 4);
    MUST(c->ops->send(c, 1, 8, text, 8) == TP_ECONNECTION && strstr(tp_error_message(), "an earlier message from rank 1") != NULL);
    c->ops->close(c);
    MUST(untaken);
}

int
main(void)
{
    const tp_region_shape shape = {2, (uint8_t[4]){0}, 4096, 64, NULL};
    size_t bytes;
    void *memory;
    tp_region *region;
    MUST(tp_region_bytes(&shape, &bytes) == TP_OK);
    MUST(tp_local_create(bytes, &memory) == TP_OK);
    MUST(tp_region_create(memory, bytes, &shape, &region) == TP_OK);
    test_a_rank_gets_its_turn(region);
    test_a_receive_that_is_given_up_gives_its_memory_back(region);
    test_a_rank_that_cannot_open_ends_alone(region);
    tp_shm_detach(memory, bytes);
    return 0;
}
