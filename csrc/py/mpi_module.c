/* terapipe_c._mpi: a module that is one capsule, of what csrc/comm/mpi.h says. Built by itself, where mpicc is. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "csrc/comm/mpi.h"

static int
module_exec(PyObject *module)
{
    PyObject *capsule = PyCapsule_New((void *)(uintptr_t)tp_mpi(), TP_MPI_CAPSULE, NULL);
    int added = capsule == NULL ? -1 : PyModule_AddObjectRef(module, "transport", capsule);
    Py_XDECREF(capsule);
    return added;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "terapipe_c._mpi",
    .m_doc = "Messages over the MPI that this module was built with; terapipe_c.mpi is its face.",
    .m_size = 0,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__mpi(void); /* no header declares it, and -Wmissing-prototypes wants one to */

PyMODINIT_FUNC
PyInit__mpi(void)
{
    return PyModuleDef_Init(&definition);
}
