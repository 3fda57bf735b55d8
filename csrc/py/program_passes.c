/* A Program's passes: what makes another one of it. */
#include "csrc/py/program.h"

static PyObject *
made(PyObject *self, tp_status status, tp_program *program)
{
    return tp_py_program_made_by((PyObject *)Py_TYPE(self), status, program);
}

PyObject *
tp_py_program_lower(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tied", NULL};
    PyObject *given = Py_False;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O", names, &given))
        return NULL;
    int tied = PyObject_IsTrue(given);
    if (tied < 0)
        return PyErr_ExceptionMatches(PyExc_Exception)
                   ? tp_py_invalid_type("tied is %s: True or False would be right", Py_TYPE(given)->tp_name) : NULL;
    tp_program *lowered = NULL;
    tp_py_away away;
    tp_py_leave(&away);
    tp_status status = tp_py_back(&away, tp_program_lower(tp_py_program_of(self), tied, &lowered));
    return made(self, status, lowered);
}

PyObject *
tp_py_program_strip(PyObject *self, PyObject *Py_UNUSED(none))
{
    tp_program *stripped = NULL;
    tp_py_away away;
    tp_py_leave(&away);
    tp_status status = tp_py_back(&away, tp_program_strip(tp_py_program_of(self), &stripped));
    return made(self, status, stripped);
}

/* A tp_again of each stage, as bytes. */
static int
open_flags(const tp_program *program, PyObject *given, const char *what, Py_buffer *flags)
{
    if (tp_py_view(given, 'B', 1, 0, what, flags) < 0)
        return -1;
    if (flags->len == program->stages)
        return 0;
    tp_py_invalid_value("%s has %zd entries: one for each of the %d stages would be right", what, flags->len,
                        program->stages);
    PyBuffer_Release(flags);
    return -1;
}

PyObject *
tp_py_program_save_memory(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"recompute", "swap", "ahead", "beside", NULL};
    const tp_program *program = tp_py_program_of(self);
    PyObject *first, *second, *result = NULL;
    int ahead = TP_SWAP_LATE, beside = 0;
    Py_buffer again, swapped;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|ip", names, &first, &second, &ahead, &beside) ||
        open_flags(program, first, "recompute", &again) < 0)
        return NULL;
    if (open_flags(program, second, "swap", &swapped) == 0) {
        tp_program *saved = NULL;
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_py_back(&away, tp_program_save_memory(program, again.buf, swapped.buf, ahead, beside, &saved));
        result = made(self, status, saved);
        PyBuffer_Release(&swapped);
    }
    PyBuffer_Release(&again);
    return result;
}

PyObject *
tp_py_program_remakes_apart(PyObject *self, PyObject *none)
{
    (void)none;
    const tp_program *program = tp_py_program_of(self);
    PyObject *out = PyBytes_FromStringAndSize(NULL, program->stages);
    for (int v = 0; out != NULL && v < program->stages; v++)
        PyBytes_AS_STRING(out)[v] = (char)tp_program_remakes_apart(program, v);
    return out;
}

PyObject *
tp_py_program_split_with(PyObject *self, PyObject *args)
{
    PyObject *cost;
    int pending;
    tp_py_costs costs;
    if (!PyArg_ParseTuple(args, "Oi", &cost, &pending) || tp_py_costs_open(tp_py_program_of(self), cost, &costs) < 0)
        return NULL;
    tp_program *split = NULL;
    tp_py_away away;
    tp_py_leave(&away);
    tp_status status = tp_py_back(&away, tp_program_split(tp_py_program_of(self), &costs.durations, pending, &split));
    tp_py_costs_close(&costs);
    return made(self, status, split);
}

PyObject *
tp_py_program_reorder_by(PyObject *self, PyObject *cost)
{
    tp_py_costs costs;
    if (tp_py_costs_open(tp_py_program_of(self), cost, &costs) < 0)
        return NULL;
    tp_program *reordered = NULL;
    tp_py_away away;
    tp_py_leave(&away);
    tp_status status = tp_py_back(&away, tp_program_reorder(tp_py_program_of(self), &costs.durations, &reordered));
    tp_py_costs_close(&costs);
    return made(self, status, reordered);
}
