/* The communicator over MPI, on host memory: what the module _mpi offers to _core. No mpi.h here: mpi.c alone sees that.
 *
 * Ranks have met over TCP before (tcp.h). That communicator stays beneath this one: all-gathers, progress and aborts are its
 * business, so that a rank that dies is noticed and named whatever MPI makes of it. Messages alone go over MPI. */
#ifndef TP_COMM_MPI_H
#define TP_COMM_MPI_H

#include "csrc/comm/comm.h"

#define TP_MPI_CAPSULE "terapipe_c.mpi" /* of a const tp_mpi_ops * that is good for ever */
#define TP_MPI_ABI     2u

/* What a module built with some MPI's mpicc can do. One thread at a time may be in it; but while a communicator is open, a
 * thread of its own calls MPI too, so MPI_THREAD_SERIALIZED is what it needs of MPI, and nobody else may call MPI meanwhile
 * unless that was initialised with MPI_THREAD_MULTIPLE. */
typedef struct {
    uint32_t abi, comm_abi, size; /* TP_MPI_ABI, TP_COMM_ABI, sizeof(tp_mpi_ops) */
    /* Where errors are told besides; before all else. */
    void (*attach)(tp_fail_function fail_at);
    /* Which MPI this is, in its own words, one line; before start too. */
    const char *(*library)(void);
    /* This process's rank in MPI_COMM_WORLD and how many there are. Initialises MPI if nobody has, which waits for all of
     * them. EVALUE: initialised by others with too low a level of threads. ERUNTIME: finalised before, or an earlier run of
     * this process left a message in it. */
    tp_status (*start)(int *rank, int *ranks);
    /* A communicator of all ranks of MPI_COMM_WORLD, on a duplicate of it, as every rank calls this. control: of the same
     * ranks in the same order, as `start` told; outlives it. region: control's. Waits end as control's do. outbox_bytes: of
     * messages to one peer that are on their way while this rank goes on; a longer one is waited for. */
    tp_status (*open)(tp_comm *control, tp_region *region, size_t outbox_bytes, tp_comm **out);
    /* MPI_Finalize, if start initialised it; not where a run left a message that nobody took, since MPI would wait for it
     * or end the process: then that ends without, and this is 0. */
    int (*finish)(void);
} tp_mpi_ops;

const tp_mpi_ops *
tp_mpi(void);

#endif
