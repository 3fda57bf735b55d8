/* What a Program says of one of its stages. */
#include "csrc/py/program.h"

static PyObject *
of_stage(PyObject *self, PyObject *number, int (*count)(const tp_program *, int))
{
    long stage = PyLong_AsLong(number);
    if (stage == -1 && PyErr_Occurred())
        return NULL;
    if (stage < 0 || stage >= tp_py_program_of(self)->stages)
        return PyErr_Format(PyExc_IndexError, "stage is %ld: 0 to %d would be right", stage,
                            tp_py_program_of(self)->stages - 1);
    return PyLong_FromLong(count(tp_py_program_of(self), (int)stage));
}

PyObject *
tp_py_program_activation_slots(PyObject *self, PyObject *stage)
{
    return of_stage(self, stage, tp_program_activation_slots);
}

PyObject *
tp_py_program_gradient_slots(PyObject *self, PyObject *stage)
{
    return of_stage(self, stage, tp_program_gradient_slots);
}

PyObject *
tp_py_program_versions(PyObject *self, PyObject *stage)
{
    return of_stage(self, stage, tp_program_versions);
}
