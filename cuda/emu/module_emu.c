/* The emulated device's switches from Python: _cuda_emu alone has them. */
#include "cuda/module.h"

#include "cuda/emu/emu.h"

static PyObject *
emu_machine(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"devices", "total_bytes", "major", "minor", "driver", "multiprocessors", NULL};
    tp_status status = tp_emu_set_machine(NULL);
    tp_emu_machine m = tp_emu_get_machine();
    unsigned long long total = m.total_bytes;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$iKiiii:emu_machine", names, &m.devices, &total, &m.major, &m.minor,
                                     &m.driver, &m.multiprocessors))
        return NULL;
    m.total_bytes = total;
    status = tp_emu_set_machine(&m);
    if (status != TP_OK)
        return tp_cuda_raise(status);
    Py_RETURN_NONE;
}

static PyObject *
emu_break(PyObject *module, PyObject *argument)
{
    long long calls = PyLong_AsLongLong(argument);
    (void)module;
    if (calls == -1 && PyErr_Occurred())
        return NULL;
    tp_emu_break(calls);
    Py_RETURN_NONE;
}

static PyObject *
emu_contexts(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    return PyLong_FromLong(tp_emu_contexts());
}

static PyObject *
emu_graphs(PyObject *module, PyObject *args)
{
    int64_t captures, launches;
    int fault = -1;
    (void)module;
    if (!PyArg_ParseTuple(args, "|i:emu_graphs", &fault))
        return NULL;
    tp_emu_graph_calls(&captures, &launches);
    if (fault >= 0)
        tp_emu_set_graphs(fault);
    return Py_BuildValue("(LL)", (long long)captures, (long long)launches);
}

static PyObject *
emu_trace(PyObject *module, PyObject *argument)
{
    int on = PyObject_IsTrue(argument);
    (void)module;
    if (on < 0)
        return NULL;
    PyObject *list = PyList_New((Py_ssize_t)tp_emu_traced_count());
    for (Py_ssize_t i = 0; list != NULL && i < PyList_GET_SIZE(list); i++) {
        tp_emu_traced one = tp_emu_traced_at(i);
        PyObject *pair = Py_BuildValue("(sK)", one.name, (unsigned long long)one.hash);
        if (pair == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, pair);
    }
    tp_emu_trace(on);
    return list;
}

static PyMethodDef methods[] = {
    {"emu_machine", (PyCFunction)(void (*)(void))emu_machine, METH_VARARGS | METH_KEYWORDS,
     "emu_machine(*, devices, total_bytes, major, minor, driver, multiprocessors): what is not given is as usual."},
    {"emu_break", emu_break, METH_O, "emu_break(calls): that device call breaks the devices; 0 heals them."},
    {"emu_contexts", emu_contexts, METH_NOARGS, "Devices on which this process has made a context."},
    {"emu_graphs", emu_graphs, METH_VARARGS,
     "emu_graphs(fault=-1): (captures begun, graphs launched) so far. fault 0 or more: count anew, and graphs go wrong so "
     "(emu.h)."},
    {"emu_trace", emu_trace, METH_O,
     "emu_trace(on): [(what, hash of its arguments)] of all that devices did since it was put on; then it is on or off."},
    {NULL, NULL, 0, NULL},
};

int
tp_cuda_add_emu(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
