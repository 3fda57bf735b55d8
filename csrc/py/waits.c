/* Which rows wait for others (csrc/cost/waits.h), for Python: the profiler must know which rows a timed instruction did. */
#include "csrc/py/module.h"

#include <stdlib.h>

#include "csrc/cost/waits.h"

typedef struct {
    int32_t *rows; /* [2][units][3] of F and I */
    int64_t units, unit;
} rows_out;

static void
put(void *context, int forward, int32_t slice, const tp_head_rows *rows)
{
    const rows_out *out = context;
    int32_t *at = out->rows + 3 * ((forward ? 0 : out->units) + out->unit + slice);
    at[0] = (int32_t)rows->own;
    at[1] = (int32_t)rows->passed;
    at[2] = (int32_t)rows->flushed;
}

static void
walk_head(tp_head_walk *walk, const Py_buffer view[3], int32_t *rows)
{
    const int32_t *batches = view[0].buf, *slices = view[1].buf, *lengths = view[2].buf;
    rows_out out = {rows, view[2].shape[0], 0};
    for (Py_ssize_t q = 0; q < view[0].shape[0]; out.unit += slices[q++])
        tp_head_walk_on(walk, batches[q], slices[q], lengths + out.unit, put, &out);
}

static int
fits(const Py_buffer view[3])
{
    const int32_t *batches = view[0].buf, *slices = view[1].buf, *lengths = view[2].buf;
    int64_t units = 0;
    if (view[0].shape[0] != view[1].shape[0])
        return 0;
    for (Py_ssize_t q = 0; q < view[0].shape[0]; q++) {
        if (batches[q] < 1 || slices[q] < 1)
            return 0;
        units += slices[q];
    }
    for (Py_ssize_t u = 0; u < view[2].shape[0]; u++)
        if (lengths[u] < 1)
            return 0;
    return units == view[2].shape[0];
}

PyDoc_STRVAR(head_rows_doc,
             "head_rows($module, batches, slices, lengths, /)\n--\n\n"
             "(rows int32 [2, units, 3], left): of F and I of each slice the rows of its own, those passed over the head's weights, "
             "those whose d(weight) is made; and of both how many wait for the update. batches, slices int32 [micros]; lengths int32 "
             "[units].");
static PyObject *
head_rows(PyObject *module, PyObject *args)
{
    static const char *const what[] = {"batches", "slices", "lengths"};
    PyObject *arrays[3], *result = NULL;
    Py_buffer view[3];
    int held = 0;
    if (!PyArg_ParseTuple(args, "OOO:head_rows", &arrays[0], &arrays[1], &arrays[2]))
        return NULL;
    while (held < 3 && tp_py_view(arrays[held], 'i', 1, 0, what[held], &view[held]) == 0)
        held++;
    if (held == 3 && !fits(view)) {
        tp_py_invalid_value("batches, slices and lengths, all from 1 on, do not fit together");
    } else if (held == 3) {
        tp_head_walk walk = {{0, 0}, 0};
        const Py_ssize_t shape[3] = {2, view[2].shape[0], 3};
        int32_t *rows = malloc((size_t)(6 * shape[1] + 1) * sizeof *rows);
        if (rows == NULL) {
            tp_py_no_memory();
        } else {
            walk_head(&walk, view, rows);
            PyObject *array = tp_py_array(tp_py_module_state(module), rows, 'i', 3, shape);
            if (array != NULL)
                result = Py_BuildValue("N(LL)", array, (long long)walk.waiting[0], (long long)walk.waiting[1]);
        }
    }
    while (held > 0)
        PyBuffer_Release(&view[--held]);
    return result;
}

PyDoc_STRVAR(weight_rows_doc, "weight_rows($module, lengths, /)\n--\n\n"
                              "int32 [slices]: the rows whose weight gradients W of each slice of one sequence makes.");
static PyObject *
weight_rows(PyObject *module, PyObject *array)
{
    Py_buffer view;
    if (tp_py_view(array, 'i', 1, 0, "lengths", &view) < 0)
        return NULL;
    const Py_ssize_t slices = view.shape[0];
    int32_t *rows = malloc((size_t)(slices + 1) * sizeof *rows);
    if (rows != NULL)
        tp_weight_rows((int32_t)slices, view.buf, rows);
    PyBuffer_Release(&view);
    return rows == NULL ? tp_py_no_memory() : tp_py_array(tp_py_module_state(module), rows, 'i', 1, &slices);
}

static PyMethodDef methods[] = {
    {"head_rows", head_rows, METH_VARARGS, head_rows_doc},
    {"weight_rows", weight_rows, METH_O, weight_rows_doc},
    {NULL, NULL, 0, NULL},
};

int
tp_py_add_waits(PyObject *module, tp_py_state *state)
{
    (void)state;
    return PyModule_AddFunctions(module, methods);
}
