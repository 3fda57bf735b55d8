/* Two ranks with posted receives send to each other more than the rings hold: both must finish (comm.c, take_posted). `make demo`
 * once hung here, where the planner chose two chunks a rank. */
#include "csrc/comm/comm.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTES = 300000, RING = 16384, ROUNDS = 50 };

static tp_region *region;

static int
crosses(tp_comm *comm, unsigned char *in, unsigned char *out)
{
    const tp_comm_ops *ops = comm->ops;
    int other = !comm->rank;
    memset(in, 0, 2 * BYTES);
    memset(out, comm->rank + 1, BYTES);
    if (ops->recv_post(comm, other, 7, in, BYTES) != TP_OK || ops->recv_post(comm, other, 8, in + BYTES, BYTES) != TP_OK ||
        ops->send(comm, other, 7, out, BYTES) != TP_OK || ops->send(comm, other, 8, out, BYTES) != TP_OK ||
        ops->recv_wait(comm, other) != TP_OK || ops->recv_wait(comm, other) != TP_OK)
        return 0;
    for (int i = 0; i < 2 * BYTES; i++)
        if (in[i] != other + 1)
            return 0;
    return 1;
}

static void *
run_rank(void *number)
{
    tp_comm *comm;
    int rank = (int)(intptr_t)number, good = 0;
    unsigned char *in = malloc(2 * BYTES), *out = malloc(BYTES);
    if (in != NULL && out != NULL && tp_comm_open_region(region, rank, "thread", 20000000000, &comm) == TP_OK) {
        good = 1;
        for (int round = 0; round < ROUNDS && good; round++)
            good = crosses(comm, in, out);
        if (!good)
            fprintf(stderr, "rank %d: %s\n", rank, tp_error_message());
        comm->ops->close(comm);
    }
    free(in);
    free(out);
    return good ? NULL : number == NULL ? (void *)1 : number;
}

int
main(void)
{
    const uint8_t pairs[4] = {0, 1, 1, 0};
    const tp_region_shape shape = {2, pairs, RING, 64, NULL};
    size_t bytes;
    void *memory;
    if (tp_region_bytes(&shape, &bytes) != TP_OK || tp_local_create(bytes, &memory) != TP_OK ||
        tp_region_create(memory, bytes, &shape, &region) != TP_OK)
        return 99;
    pthread_t ranks[2];
    int failed = 0;
    for (intptr_t i = 0; i < 2; i++)
        if (pthread_create(&ranks[i], NULL, run_rank, (void *)i) != 0)
            return 99;
    for (int i = 0; i < 2; i++) {
        void *result = NULL;
        pthread_join(ranks[i], &result);
        failed |= result != NULL;
    }
    tp_shm_detach(memory, bytes);
    return failed;
}
