/* The deadline of what this thread plans (csrc/base/deadline.h) for Python; terapipe_c/planning/deadline.py is the only user. */
#include "csrc/py/module.h"

#include "csrc/base/deadline.h"

PyDoc_STRVAR(set_doc, "deadline_set($module, at_ns, /)\n--\n\nWhen planning of this thread must end, on the clock of deadline_now; "
                      "0: never. The one before.");
static PyObject *
deadline_set(PyObject *module, PyObject *value)
{
    (void)module;
    long long at = PyLong_AsLongLong(value);
    if (at == -1 && PyErr_Occurred())
        return NULL;
    return PyLong_FromLongLong(tp_deadline_set(at));
}

PyDoc_STRVAR(get_doc, "deadline_get($module, /)\n--\n\nWhen planning of this thread must end; 0: never.");
static PyObject *
deadline_get(PyObject *module, PyObject *none)
{
    (void)module;
    (void)none;
    return PyLong_FromLongLong(tp_deadline_get());
}

PyDoc_STRVAR(count_doc, "deadline_count($module, step_ns, /)\n--\n\nFor tests: on this thread's clock for deadlines so much passes "
                        "with every question, and nothing else; 0: the clock again.");
static PyObject *
deadline_count(PyObject *module, PyObject *value)
{
    (void)module;
    long long step = PyLong_AsLongLong(value);
    if (step == -1 && PyErr_Occurred())
        return NULL;
    tp_deadline_count(step);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(now_doc, "deadline_now($module, /)\n--\n\nNanoseconds of the clock for deadlines.");
static PyObject *
deadline_now(PyObject *module, PyObject *none)
{
    (void)module;
    (void)none;
    return PyLong_FromLongLong(tp_deadline_now());
}

PyDoc_STRVAR(late_doc, "deadline_late($module, /)\n--\n\nWhether this thread's deadline has passed.");
static PyObject *
deadline_late(PyObject *module, PyObject *none)
{
    (void)module;
    (void)none;
    return PyBool_FromLong(tp_deadline_late());
}

PyDoc_STRVAR(abandon_doc, "deadline_abandon($module, on, /)\n--\n\nWhether calls of this thread that are of no use unless they are "
                          "complete end at the deadline, too, with DeadlineError. The setting before.");
static PyObject *
deadline_abandon(PyObject *module, PyObject *value)
{
    (void)module;
    int on = PyObject_IsTrue(value);
    return on < 0 ? NULL : PyBool_FromLong(tp_deadline_abandon(on));
}

PyDoc_STRVAR(stop_by_doc, "deadline_stop_by($module, flag, /)\n--\n\nThis thread is late, and told to stop, once another sets the "
                          "byte flag[0]; None: no longer.");
static PyObject *
deadline_stop_by(PyObject *module, PyObject *flag)
{
    static _Thread_local Py_buffer view;
    (void)module;
    tp_deadline_stop_by(NULL);
    if (view.obj != NULL)
        PyBuffer_Release(&view);
    if (flag == Py_None)
        Py_RETURN_NONE;
    if (PyObject_GetBuffer(flag, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    if (view.len < 1) {
        PyBuffer_Release(&view);
        return tp_py_invalid_value("flag has no byte: one would be right"), NULL;
    }
    tp_deadline_stop_by(view.buf);
    Py_RETURN_NONE;
}

int
tp_py_add_deadline(PyObject *module, tp_py_state *state)
{
    static PyMethodDef methods[] = {
        {"deadline_set", deadline_set, METH_O, set_doc},
        {"deadline_get", deadline_get, METH_NOARGS, get_doc},
        {"deadline_count", deadline_count, METH_O, count_doc},
        {"deadline_now", deadline_now, METH_NOARGS, now_doc},
        {"deadline_abandon", deadline_abandon, METH_O, abandon_doc},
        {"deadline_stop_by", deadline_stop_by, METH_O, stop_by_doc},
        {"deadline_late", deadline_late, METH_NOARGS, late_doc},
        {NULL, NULL, 0, NULL},
    };
    (void)state;
    return PyModule_AddFunctions(module, methods);
}
