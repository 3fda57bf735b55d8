#include "csrc/comm/mpi_wire.h"

#include <limits.h>
#include <mpi.h>
#include <string.h>

#define BLOCK ((size_t)1 << 20) /* unit of messages whose bytes no int can count */

_Static_assert(MPI_SUCCESS == 0, "a request that is all zeros has not failed");
static int started; /* by us: to be finalised by us. MPI is of the process */

static tp_status
failed(int code, const char *call)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (MPI_Error_string(code, text, &length) != MPI_SUCCESS)
        text[0] = 0;
    return tp_fail(TP_ERUNTIME, "%s failed: %s", call, text);
}

#define CALL(name, ...)                                                                                                \
    do {                                                                                                               \
        int code_ = name(__VA_ARGS__);                                                                                 \
        if (code_ != MPI_SUCCESS)                                                                                      \
            return failed(code_, #name);                                                                               \
    } while (0)

/* Handles are ints or pointers, as the MPI likes. */
_Static_assert(sizeof(MPI_Comm) <= sizeof(uint64_t) && sizeof(MPI_Request) <= sizeof(uint64_t) &&
                   sizeof(MPI_Errhandler) <= sizeof(uint64_t), "a handle of this MPI does not fit in a word");

#define TO_WORD(word, handle) (*(word) = 0, (void)memcpy((word), &(handle), sizeof(handle)))
#define OF_WORD(handle, word) ((void)memcpy(&(handle), &(word), sizeof(handle)))

/* ---- the process ------------------------------------------------------------------------------------------ */

tp_status
tp_wire_start(int *rank, int *ranks)
{
    int is = 0, was = 0, level = MPI_THREAD_SINGLE;
    MPI_Finalized(&was);
    if (was)
        return tp_fail(TP_ERUNTIME, "MPI was finalised in this process, which is for ever: before that would be right");
    MPI_Initialized(&is);
    if (is)
        CALL(MPI_Query_thread, &level);
    else
        CALL(MPI_Init_thread, NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    started |= !is;
    if (level < MPI_THREAD_SERIALIZED)
        return tp_fail(TP_EVALUE, "MPI was initialised with level %d of threads%s: MPI_THREAD_SERIALIZED (%d) or more would be "
                       "right%s", level, is ? " by somebody else" : "", MPI_THREAD_SERIALIZED,
                       is ? " (with mpi4py: mpi4py.rc.thread_level = 'serialized')" : "");
    CALL(MPI_Comm_rank, MPI_COMM_WORLD, rank);
    CALL(MPI_Comm_size, MPI_COMM_WORLD, ranks);
    return TP_OK;
}

void
tp_wire_finish(void)
{
    int was = 0;
    MPI_Finalized(&was);
    if (started && !was)
        MPI_Finalize();
    started = 0;
}

const char *
tp_wire_library(void)
{
    static char text[MPI_MAX_LIBRARY_VERSION_STRING]; /* the same whenever it is asked */
    int length = 0;
    if (MPI_Get_library_version(text, &length) != MPI_SUCCESS)
        return "an unknown MPI";
    text[strcspn(text, ",\n")] = 0;
    return text;
}

/* ---- the communicator ------------------------------------------------------------------------------------- */

tp_status
tp_wire_duplicate(tp_wire *out, tp_wire_request *request, uint64_t *undo)
{
    static MPI_Comm made; /* MPI writes here when the request is done, not before */
    MPI_Request pending;
    MPI_Errhandler before;
    CALL(MPI_Comm_get_errhandler, MPI_COMM_WORLD, &before);
    TO_WORD(undo, before);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    int code = MPI_Comm_idup(MPI_COMM_WORLD, &made, &pending);
    if (code != MPI_SUCCESS) {
        tp_wire_undo(*undo);
        return failed(code, "MPI_Comm_idup");
    }
    *out = (tp_wire){(uint64_t)(uintptr_t)&made, 0};
    *request = (tp_wire_request){.live = 1};
    TO_WORD(&request->request, pending);
    return TP_OK;
}

void
tp_wire_undo(uint64_t undo)
{
    MPI_Errhandler before;
    OF_WORD(before, undo);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, before);
    MPI_Errhandler_free(&before);
}

tp_status
tp_wire_open(tp_wire *wire)
{
    int *most = NULL, found = 0;
    MPI_Comm made = *(MPI_Comm *)(uintptr_t)wire->comm;
    TO_WORD(&wire->comm, made);
    CALL(MPI_Comm_set_errhandler, made, MPI_ERRORS_RETURN);
    CALL(MPI_Comm_get_attr, made, MPI_TAG_UB, &most, &found);
    wire->most_tag = found ? *most : 32767; /* what the standard promises at least */
    return TP_OK;
}

void
tp_wire_free(tp_wire *wire)
{
    MPI_Comm comm;
    OF_WORD(comm, wire->comm);
    MPI_Comm_free(&comm);
}

/* ---- messages --------------------------------------------------------------------------------------------- */

/* Bytes as MPI counts them: an int of some type, made for the message where bytes are too many. */
static tp_status
make_type(size_t bytes, MPI_Datatype *type, int *count)
{
    *type = MPI_BYTE;
    *count = (int)bytes;
    if (bytes <= INT_MAX)
        return TP_OK;
    size_t blocks = bytes / BLOCK;
    if (blocks > INT_MAX)
        return tp_fail(TP_EVALUE, "a message has %zu bytes: at most %zu would be right", bytes, (size_t)INT_MAX * BLOCK);
    int counts[2] = {(int)blocks, (int)(bytes % BLOCK)};
    MPI_Aint at[2] = {0, (MPI_Aint)(blocks * BLOCK)};
    MPI_Datatype block, types[2] = {MPI_DATATYPE_NULL, MPI_BYTE};
    CALL(MPI_Type_contiguous, (int)BLOCK, MPI_BYTE, &block);
    types[0] = block;
    CALL(MPI_Type_create_struct, 2, counts, at, types, type);
    CALL(MPI_Type_commit, type);
    CALL(MPI_Type_free, &block);
    *count = 1;
    return TP_OK;
}

static tp_status
begin(const tp_wire *wire, int peer, int tag, int sends, void *data, size_t bytes, tp_wire_request *out)
{
    MPI_Datatype type;
    MPI_Request request;
    MPI_Comm comm;
    int count;
    OF_WORD(comm, wire->comm);
    TP_TRY(make_type(bytes, &type, &count));
    if (sends)
        CALL(MPI_Isend, data, count, type, peer, tag, comm, &request);
    else
        CALL(MPI_Irecv, data, count, type, peer, tag, comm, &request);
    *out = (tp_wire_request){.live = 1};
    TO_WORD(&out->request, request);
    if (type != MPI_BYTE)
        CALL(MPI_Type_free, &type);
    return TP_OK;
}

tp_status
tp_wire_send(const tp_wire *wire, int peer, int tag, const void *data, size_t bytes, tp_wire_request *out)
{
    return begin(wire, peer, tag, 1, (void *)(uintptr_t)data, bytes, out);
}

tp_status
tp_wire_recv(const tp_wire *wire, int peer, int tag, void *data, size_t bytes, tp_wire_request *out)
{
    return begin(wire, peer, tag, 0, data, bytes, out);
}

tp_status
tp_wire_test(tp_wire_request *request, int *done)
{
    MPI_Request pending;
    *done = !request->live && !request->failed;
    if (request->live) {
        OF_WORD(pending, request->request);
        int code = MPI_Test(&pending, done, MPI_STATUS_IGNORE);
        TO_WORD(&request->request, pending);
        *done = *done && code == MPI_SUCCESS;
        request->live = pending != MPI_REQUEST_NULL; /* of one that failed the handle may be another's from now on */
        request->failed = code;
    }
    return request->failed == MPI_SUCCESS ? TP_OK : failed(request->failed, "MPI_Test");
}

void
tp_wire_cancel(tp_wire_request *request)
{
    MPI_Request pending;
    OF_WORD(pending, request->request);
    if (request->live)
        MPI_Cancel(&pending);
}

void
tp_wire_look(const tp_wire *wire)
{
    int found;
    MPI_Comm comm;
    OF_WORD(comm, wire->comm);
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &found, MPI_STATUS_IGNORE);
}
