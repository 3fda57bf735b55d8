/* The bound of a step over all partitions, for Python; terapipe_c/planning/bounds.py asks for it. */
#include "csrc/py/module.h"

#include <string.h>

#include "csrc/plan/partition_bound.h"

PyDoc_STRVAR(partition_bound_doc,
             "partition_bound($module, /, schedule, ranks, chunks, micros, layers, seconds, fixed_s, comm_s)\n--\n\n"
             "Seconds that no partition beats in this order. seconds: float64 [4, 3], F, I, W of a block of each kind.");
static PyObject *
partition_bound(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"schedule", "ranks", "chunks", "micros", "layers", "seconds", "fixed_s", "comm_s", NULL};
    tp_partition_question q;
    PyObject *seconds;
    Py_buffer view;
    int schedule;
    double bound = 0.0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiiiiOdd:partition_bound", names, &schedule, &q.ranks, &q.chunks, &q.micros,
                                     &q.layers, &seconds, &q.fixed_s, &q.comm_s) ||
        tp_py_view(seconds, 'd', 2, 0, "seconds", &view) < 0)
        return NULL;
    if (view.shape[0] != TP_BLOCK_KINDS || view.shape[1] != TP_COST_PHASES) {
        PyBuffer_Release(&view);
        return tp_py_invalid_value("seconds is [%zd, %zd]: [%d, %d] would be right", view.shape[0], view.shape[1],
                                   (int)TP_BLOCK_KINDS, (int)TP_COST_PHASES);
    }
    memcpy(q.seconds, view.buf, sizeof q.seconds);
    PyBuffer_Release(&view);
    q.schedule = (tp_schedule)schedule;
    tp_py_away away;
    tp_py_leave(&away);
    tp_status status = tp_py_back(&away, tp_partition_bound(&q, &bound));
    return status == TP_OK ? PyFloat_FromDouble(bound) : tp_py_raise(tp_py_module_state(module), status);
}

int
tp_py_add_partition_bound(PyObject *module, tp_py_state *state)
{
    static PyMethodDef methods[] = {
        {"partition_bound", (PyCFunction)(void (*)(void))partition_bound, METH_VARARGS | METH_KEYWORDS, partition_bound_doc},
        {NULL, NULL, 0, NULL},
    };
    (void)state;
    return PyModule_AddFunctions(module, methods);
}
