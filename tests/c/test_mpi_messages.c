/* Messages over MPI (csrc/comm/mpi_messages.c) with a fake MPI in this file, whose messages arrive and fail when the test says so,
 * which no real MPI can be made to do. tests/test_mpi.py tests the real ones. */
#include "csrc/comm/mpi_messages.c"
#include "csrc/comm/mpi_outbox.c"

#include <stdio.h>
#include <unistd.h>

#include "tests/c/check.h"

enum { LONG = 2 * ENVELOPE, SENDS = 30 };

/* A receive of an envelope finds `next` at once; a payload comes when it is let; sends are done at once. */
static header next;
static _Atomic int let, looks;
static int fails, gathers, finished;

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

tp_status
tp_wire_recv(const tp_wire *wire, int peer, int tag, void *data, size_t bytes, tp_wire_request *out)
{
    (void)wire, (void)peer, (void)bytes;
    *out = (tp_wire_request){0};
    if (tag == ENVELOPES)
        memcpy(data, &next, sizeof next);
    else
        out->live = 1;
    return TP_OK;
}

tp_status
tp_wire_test(tp_wire_request *request, int *done)
{
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
    test_a_rank_that_cannot_open_ends_alone(region);
    tp_shm_detach(memory, bytes);
    return 0;
}
