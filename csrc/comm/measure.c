/* What messages between two ranks of one machine take, for the cost model: two threads, so that nothing but the communicator is
 * measured. */
#include "csrc/comm/comm.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/cpu_relax.h"

enum { SMALL = 400, ROUNDS = 5, LENT = 24 };
#define PATIENCE_NS 60000000000

typedef struct {
    tp_region *region;
    size_t bytes;      /* of the exchange, to rank 1 */
    size_t lent_bytes; /* of a lent message */
    char *data[2];     /* [bytes] of each rank */
    _Atomic int lent;  /* how many messages lie in the arena to be read */
    double *seconds;   /* [3] */
} experiment;

static int
compare(const void *a, const void *b)
{
    const int64_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static double
median(int64_t *ns, int count)
{
    qsort(ns, (size_t)count, sizeof *ns, compare);
    return (double)ns[count / 2] * 1e-9;
}

static tp_status
receive(tp_comm *comm, int peer, uint64_t tag, void *data, size_t bytes)
{
    TP_TRY(comm->ops->recv_post(comm, peer, tag, data, bytes));
    return comm->ops->recv_wait(comm, peer);
}

/* Rank 0: answers, and writes every message anew, as a stage does. */
static tp_status
give(experiment *x, tp_comm *comm)
{
    char small[8] = {0};
    for (int i = 0; i < SMALL; i++) {
        TP_TRY(receive(comm, 1, (uint64_t)i, small, sizeof small));
        TP_TRY(comm->ops->send(comm, 1, (uint64_t)i, small, sizeof small));
    }
    for (int i = 0; i < ROUNDS; i++) {
        memset(x->data[0], i, x->bytes);
        TP_TRY(comm->ops->exchange(comm, 1, (uint64_t)i, x->data[0], x->bytes, small, sizeof small));
    }
    size_t room;
    char *arena = comm->ops->arena(comm, &room);
    for (int i = 0; i < 2 * LENT; i++) { /* the first of each place touch pages */
        uint64_t loan;
        char *rows = arena + (size_t)(i % LENT) * x->lent_bytes;
        for (size_t at = 0; at < x->lent_bytes; at += sizeof(float)) /* memset of so much may go past the caches */
            *(float *)(void *)(rows + at) = (float)i;
        TP_TRY(comm->ops->lend(comm, 1, (uint64_t)i, rows, x->lent_bytes, &loan));
        atomic_store(&x->lent, i + 1);
        TP_TRY(comm->ops->reclaim(comm, 1, loan, (uint64_t)i, x->lent_bytes));
    }
    return TP_OK;
}

static tp_status
take(experiment *x, tp_comm *comm)
{
    char small[8] = {0};
    int64_t ns[SMALL];
    for (int i = 0; i < SMALL; i++) {
        int64_t start = tp_clock_ns();
        TP_TRY(comm->ops->send(comm, 0, (uint64_t)i, small, sizeof small));
        TP_TRY(receive(comm, 0, (uint64_t)i, small, sizeof small));
        ns[i] = tp_clock_ns() - start;
    }
    x->seconds[0] = 0.5 * median(ns, SMALL);
    for (int i = 0; i < ROUNDS; i++) {
        int64_t start = tp_clock_ns();
        TP_TRY(comm->ops->exchange(comm, 0, (uint64_t)i, small, sizeof small, x->data[1], x->bytes));
        ns[i] = tp_clock_ns() - start;
    }
    x->seconds[1] = median(ns, ROUNDS) / (double)x->bytes;
    for (int i = 0; i < 2 * LENT; i++) {
        while (atomic_load(&x->lent) <= i && !tp_region_is_aborted(x->region))
            tp_cpu_relax(); /* what is timed is the copy */
        int64_t start = tp_clock_ns();
        TP_TRY(receive(comm, 0, (uint64_t)i, x->data[1] + (size_t)(i % LENT) * x->lent_bytes, x->lent_bytes));
        ns[i] = tp_clock_ns() - start;
    }
    x->seconds[2] = median(ns + LENT, LENT) / (double)x->lent_bytes;
    return TP_OK;
}

static tp_status
run(experiment *x, int rank)
{
    tp_comm *comm;
    tp_status status = tp_comm_open_region(x->region, rank, "thread", PATIENCE_NS, &comm);
    if (status == TP_OK) {
        status = (rank == 0 ? give : take)(x, comm);
        comm->ops->close(comm);
    }
    if (status != TP_OK)
        tp_region_abort(x->region, status, rank, tp_error_message());
    return status;
}

static void *
run_giver(void *argument)
{
    return run(argument, 0) == TP_OK ? argument : NULL; /* the region says why not */
}

static tp_status
run_both(experiment *x)
{
    pthread_t giver;
    if (pthread_create(&giver, NULL, run_giver, x) != 0)
        return tp_fail(TP_EMEMORY, "no thread can be started to measure messages with; fewer threads, or a larger limit of them "
                                   "(ulimit -u, ulimit -v), would be right");
    tp_status status = run(x, 1);
    pthread_join(giver, NULL);
    return status;
}

tp_status
tp_comm_measure(size_t ring_bytes, size_t exchange_bytes, size_t lent_bytes, double seconds[3])
{
    if (exchange_bytes < LENT * lent_bytes || lent_bytes == 0 || lent_bytes % sizeof(float) != 0)
        return tp_fail(TP_EVALUE, "%zu bytes to exchange and %zu to lend: a few floats to lend, and %d times as many bytes, would be right",
                       exchange_bytes, lent_bytes, LENT);
    const size_t arena[2] = {LENT * lent_bytes, 0};
    const tp_region_shape shape = {2, (const uint8_t[]){0, 1, 1, 0}, ring_bytes, 8, arena};
    experiment x = {.bytes = exchange_bytes, .lent_bytes = lent_bytes, .seconds = seconds};
    void *memory = NULL;
    size_t bytes;
    TP_TRY(tp_region_bytes(&shape, &bytes));
    TP_TRY(tp_local_create(bytes, &memory));
    tp_status status = tp_region_create(memory, bytes, &shape, &x.region);
    x.data[0] = calloc(2, exchange_bytes);
    x.data[1] = x.data[0] == NULL ? NULL : x.data[0] + exchange_bytes;
    if (status == TP_OK)
        status = x.data[0] == NULL ? tp_fail(TP_EMEMORY, "no memory to measure messages with") : run_both(&x);
    free(x.data[0]);
    tp_shm_detach(memory, bytes);
    return status;
}
