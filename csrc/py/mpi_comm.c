/* _core.mpi_library, .mpi_start, .mpi_comm, .mpi_finish: messages over the MPI of another module, which is a capsule here. */
#include "csrc/py/comm.h"

#include <string.h>

#include "csrc/comm/mpi.h"

/* A module's transport, told where its errors are heard. */
static const tp_mpi_ops *
transport_of(PyObject *capsule)
{
    if (!PyCapsule_IsValid(capsule, TP_MPI_CAPSULE)) {
        tp_py_invalid_type("transport is %.100s: a capsule \"" TP_MPI_CAPSULE "\", as _mpi has, would be right",
                           Py_TYPE(capsule)->tp_name);
        return NULL;
    }
    const tp_mpi_ops *mpi = PyCapsule_GetPointer(capsule, TP_MPI_CAPSULE);
    if (mpi->abi != TP_MPI_ABI || mpi->comm_abi != TP_COMM_ABI || mpi->size != sizeof *mpi) {
        PyErr_Format(PyExc_ImportError, "_mpi has version %u of its transport and %u of communicators (%u bytes), this package "
                     "%u and %u (%zu bytes): both of one build would be right", mpi->abi, mpi->comm_abi, mpi->size, TP_MPI_ABI,
                     TP_COMM_ABI, sizeof *mpi);
        return NULL;
    }
    mpi->attach(tp_fail_at);
    return mpi;
}

static PyObject *
mpi_library(PyObject *module, PyObject *capsule)
{
    (void)module;
    const tp_mpi_ops *mpi = transport_of(capsule);
    return mpi == NULL ? NULL : PyUnicode_DecodeUTF8(mpi->library(), (Py_ssize_t)strlen(mpi->library()), "replace");
}

static PyObject *
mpi_start(PyObject *module, PyObject *capsule)
{
    const tp_mpi_ops *mpi = transport_of(capsule);
    int rank = 0, ranks = 0;
    tp_status status;
    if (mpi == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = mpi->start(&rank, &ranks);
    Py_END_ALLOW_THREADS
    return status == TP_OK ? Py_BuildValue("(ii)", rank, ranks) : tp_py_raise(tp_py_module_state(module), status);
}

static PyObject *
mpi_comm(PyObject *module, PyObject *args)
{
    PyObject *capsule, *control;
    Py_ssize_t outbox_bytes;
    if (!PyArg_ParseTuple(args, "OOn:mpi_comm", &capsule, &control, &outbox_bytes))
        return NULL;
    const tp_mpi_ops *mpi = transport_of(capsule);
    tp_comm *beneath = mpi == NULL ? NULL : tp_py_comm_of(control), *comm = NULL;
    PyObject *region = beneath == NULL ? NULL : PyObject_GetAttrString(control, "region");
    if (region == NULL)
        return NULL;
    tp_region *shared = tp_py_region_of(region);
    tp_status status;
    Py_BEGIN_ALLOW_THREADS
    status = mpi->open(beneath, shared, outbox_bytes < 0 ? 0 : (size_t)outbox_bytes, &comm);
    Py_END_ALLOW_THREADS
    tp_py_state *state = tp_py_module_state(module);
    PyObject *result = status == TP_OK ? tp_py_comm_wrap(state, region, control, comm) : tp_py_raise(state, status);
    Py_DECREF(region);
    return result;
}

static PyObject *
mpi_finish(PyObject *module, PyObject *capsule)
{
    (void)module;
    const tp_mpi_ops *mpi = transport_of(capsule);
    int able;
    if (mpi == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    able = mpi->finish();
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(able);
}

static PyMethodDef functions[] = {
    {"mpi_library", mpi_library, METH_O, "mpi_library($module, transport, /)\n--\n\nWhich MPI it is, in its own words."},
    {"mpi_start", mpi_start, METH_O,
     "mpi_start($module, transport, /)\n--\n\n-> (rank, ranks) of MPI_COMM_WORLD; initialises MPI if nobody has, which waits "
     "for all ranks."},
    {"mpi_comm", mpi_comm, METH_VARARGS,
     "mpi_comm($module, transport, control, outbox_bytes, /)\n--\n\n-> a Comm whose messages go over MPI, as every rank calls "
     "this; which keeps control; that is closed after it."},
    {"mpi_finish", mpi_finish, METH_O,
     "mpi_finish($module, transport, /)\n--\n\nMPI_Finalize, if mpi_start initialised it. False: not where a run left a message "
     "that nobody took."},
    {NULL, NULL, 0, NULL},
};

int
tp_py_add_mpi(PyObject *module, tp_py_state *state)
{
    (void)state;
    return PyModule_AddFunctions(module, functions);
}
