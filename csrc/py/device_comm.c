/* Communicators of device memory come from another module (cuda/module_comm.c), in capsules. */
#include "csrc/py/comm.h"

#include <stdlib.h>

#include "csrc/comm/link.h"

static void
drop_link(PyObject *capsule)
{
    tp_link *link = PyCapsule_GetPointer(capsule, TP_LINK_CAPSULE);
    free(link);
    Py_XDECREF((PyObject *)PyCapsule_GetContext(capsule));
}

static PyObject *
comm_link(PyObject *module, PyObject *object)
{
    (void)module;
    tp_comm *comm = tp_py_comm_of(object);
    if (comm == NULL)
        return NULL;
    tp_link *link = malloc(sizeof *link);
    if (link == NULL)
        return tp_py_no_memory();
    *link = (tp_link){TP_COMM_ABI, comm, tp_py_region_of(object)};
    PyObject *capsule = PyCapsule_New(link, TP_LINK_CAPSULE, drop_link);
    if (capsule == NULL)
        free(link);
    else
        PyCapsule_SetContext(capsule, Py_NewRef(object));
    return capsule;
}

static PyObject *
device_comm(PyObject *module, PyObject *args)
{
    PyObject *control, *capsule;
    if (!PyArg_ParseTuple(args, "OO:device_comm", &control, &capsule) || tp_py_comm_of(control) == NULL)
        return NULL;
    tp_comm *comm = PyCapsule_GetPointer(capsule, TP_COMM_CAPSULE);
    PyObject *region = comm == NULL ? NULL : PyObject_GetAttrString(control, "region");
    if (region == NULL)
        return NULL;
    PyObject *result = NULL;
    if (PyCapsule_SetName(capsule, "terapipe_c.comm, taken") == 0) /* nobody takes it twice */
        result = tp_py_comm_wrap(tp_py_module_state(module), region, control, comm);
    Py_DECREF(region);
    return result;
}

static PyMethodDef functions[] = {
    {"comm_link", comm_link, METH_O, "comm_link($module, comm, /)\n--\n\n-> a capsule of the communicator and its region, which "
                                     "keeps both."},
    {"device_comm", device_comm, METH_VARARGS,
     "device_comm($module, control, capsule, /)\n--\n\n-> a Comm of the communicator in a capsule, which keeps control; that is closed after it."},
    {NULL, NULL, 0, NULL},
};

int
tp_py_add_device_comm(PyObject *module, tp_py_state *state)
{
    (void)state;
    return PyModule_AddFunctions(module, functions);
}
