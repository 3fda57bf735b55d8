/* mpiexec -n 2 mpi_wire_rank: what a message that failed leaves behind (csrc/comm/mpi_wire.h). tests/test_mpi.py runs it. */
#include "csrc/comm/mpi_wire.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/c/check.h"

static void
finish_one(tp_wire_request *request)
{
    for (int done = 0; !done;)
        MUST(tp_wire_test(request, &done) == TP_OK);
}

/* A message is longer than its receive has room for. Who asks again hears of it again, though MPI has given the request's place
 * to the next one by then; that one comes whole. */
static void
receive(const tp_wire *wire)
{
    char little[8], next[8] = "";
    tp_wire_request failed, other;
    tp_status status = TP_OK;
    int done = 0;
    MUST(tp_wire_recv(wire, 0, 1, little, sizeof little, &failed) == TP_OK);
    while (status == TP_OK && !done)
        status = tp_wire_test(&failed, &done);
    MUST(status == TP_ERUNTIME && !done && !failed.live);
    MUST(tp_wire_recv(wire, 0, 2, next, sizeof next, &other) == TP_OK);
    for (int i = 0; i < 3; i++)
        MUST(tp_wire_test(&failed, &done) == TP_ERUNTIME && !done && strstr(tp_error_message(), "MPI_Test failed"));
    MUST(tp_wire_send(wire, 0, 3, NULL, 0, &failed) == TP_OK); /* now the other is sent; and the request is as new */
    finish_one(&failed);
    finish_one(&other);
    MUST(strcmp(next, "whole") == 0);
}

static void
send(const tp_wire *wire)
{
    static char much[1000];
    tp_wire_request request;
    MUST(tp_wire_send(wire, 1, 1, much, sizeof much, &request) == TP_OK);
    finish_one(&request);
    MUST(tp_wire_recv(wire, 1, 3, much, 0, &request) == TP_OK);
    finish_one(&request);
    MUST(tp_wire_send(wire, 1, 2, "whole\0\0", 8, &request) == TP_OK);
    finish_one(&request);
}

int
main(void)
{
    int rank, ranks;
    uint64_t undo;
    tp_wire wire;
    tp_wire_request request = {0};
    MUST(tp_wire_start(&rank, &ranks) == TP_OK && ranks == 2);
    MUST(tp_wire_duplicate(&wire, &request, &undo) == TP_OK);
    finish_one(&request);
    tp_wire_undo(undo);
    MUST(tp_wire_open(&wire) == TP_OK);
    (rank == 0 ? send : receive)(&wire);
    tp_wire_free(&wire);
    tp_wire_finish();
    return 0;
}
