/* Functions on a model: its parameters, initial values, counts. */
#include "csrc/py/comm.h"
#include "csrc/py/model.h"

#include <stdlib.h>

/* A tuple that is ours: __index__ of an item may change the caller's list. */
static PyObject *
own_items(PyObject *object, const char *what)
{
    PyObject *items = PySequence_Tuple(object);
    if (items == NULL && PyErr_ExceptionMatches(PyExc_TypeError))
        PyErr_SetString(PyExc_TypeError, what);
    return items;
}

int32_t *
tp_py_int32s(PyObject *object, const char *what, Py_ssize_t *count)
{
    PyObject *items = own_items(object, what);
    if (items == NULL)
        return NULL;
    *count = PyTuple_GET_SIZE(items);
    int32_t *values = malloc((size_t)(*count + 1) * sizeof *values);
    if (values == NULL)
        tp_py_no_memory();
    for (Py_ssize_t i = 0; values != NULL && i < *count; i++) {
        long value = PyLong_AsLong(PyTuple_GET_ITEM(items, i));
        if (value == -1 && PyErr_Occurred()) {
            free(values);
            values = NULL;
        } else if (value < INT32_MIN || value > INT32_MAX) {
            tp_py_invalid_value("%s: %ld does not fit 32 bits", what, value);
            free(values);
            values = NULL;
        } else {
            values[i] = (int32_t)value;
        }
    }
    Py_DECREF(items);
    return values;
}

int
tp_py_model(tp_py_state *state, PyObject *object, tp_model *out)
{
    Py_ssize_t count;
    int32_t *field = tp_py_int32s(object, "the model's dimensions", &count);
    if (field == NULL)
        return -1;
    if (count != 7) {
        tp_py_invalid_value("a model has 7 dimensions, not %zd", count);
        free(field);
        return -1;
    }
    *out = (tp_model){field[0], field[1], field[2], field[3], field[4], field[5] != 0, field[6] != 0};
    free(field);
    tp_status status = tp_model_check(out);
    return status == TP_OK ? 0 : (tp_py_raise(state, status), -1);
}

/* Micro-batches into flat arrays of counts and lengths. */
static int
flatten(PyObject *micros, int32_t **batches, int32_t **slices, int32_t **lengths)
{
    Py_ssize_t count = PyTuple_GET_SIZE(micros), total = 0;
    *batches = malloc((size_t)(count + 1) * sizeof **batches);
    *slices = malloc((size_t)(count + 1) * sizeof **slices);
    *lengths = NULL;
    if (*batches == NULL || *slices == NULL)
        return tp_py_no_memory(), -1;
    for (Py_ssize_t q = 0; q < count; q++) {
        PyObject *cut;
        Py_ssize_t parts;
        PyObject *pair = PyTuple_GET_ITEM(micros, q);
        if (!PyTuple_Check(pair))
            return tp_py_invalid_type("a micro-batch of a slicing is (sequences, [slice lengths])"), -1;
        if (!PyArg_ParseTuple(pair, "iO", &(*batches)[q], &cut))
            return -1;
        int32_t *part = tp_py_int32s(cut, "slice lengths", &parts);
        int32_t *grown = part == NULL ? NULL : realloc(*lengths, (size_t)(total + parts + 1) * sizeof *grown);
        if (grown == NULL) {
            free(part);
            return PyErr_Occurred() ? -1 : (tp_py_no_memory(), -1);
        }
        *lengths = grown;
        for (Py_ssize_t s = 0; s < parts; s++)
            grown[total++] = part[s];
        (*slices)[q] = (int32_t)parts;
        free(part);
    }
    return 0;
}

int
tp_py_slicing(tp_py_state *state, PyObject *object, tp_slicing **out)
{
    int seq_len, batch, failed = -1;
    PyObject *list;
    if (!PyTuple_Check(object))
        return tp_py_invalid_type("a slicing is (seq_len, batch, [(sequences, [lengths]), ...])"), -1;
    if (!PyArg_ParseTuple(object, "iiO;a slicing is (seq_len, batch, [(sequences, [lengths]), ...])", &seq_len, &batch,
                          &list))
        return -1;
    PyObject *micros = own_items(list, "a slicing's micro-batches are a list");
    if (micros == NULL)
        return -1;
    int32_t *batches = NULL, *slices = NULL, *lengths = NULL;
    if (flatten(micros, &batches, &slices, &lengths) == 0) {
        tp_status status = tp_slicing_open(seq_len, batch, (int32_t)PyTuple_GET_SIZE(micros), batches, slices,
                                           lengths, out);
        if (status == TP_OK)
            failed = 0;
        else
            tp_py_raise(state, status);
    }
    free(batches);
    free(slices);
    free(lengths);
    Py_DECREF(micros);
    return failed;
}

/* ---- module functions ----------------------------------------------------------------------------------------------------- */

static PyObject *
model_params(PyObject *module, PyObject *dimensions)
{
    tp_model model;
    if (tp_py_model(tp_py_module_state(module), dimensions, &model) < 0)
        return NULL;
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < tp_model_params(&model); i++) {
        tp_param param;
        tp_model_param(&model, i, &param);
        PyObject *row = Py_BuildValue("(sLLOi)", param.name, (long long)param.rows, (long long)param.cols,
                                      param.is_matrix ? Py_True : Py_False, param.block);
        if (row == NULL || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *
model_init_param(PyObject *module, PyObject *args)
{
    tp_py_state *state = tp_py_module_state(module);
    PyObject *dimensions, *of = Py_None;
    const tp_region *region = NULL;
    int index;
    unsigned long long seed;
    tp_model model;
    if (!PyArg_ParseTuple(args, "OiK|O", &dimensions, &index, &seed, &of) || tp_py_model(state, dimensions, &model) < 0 ||
        (of != Py_None && (region = tp_py_region_of(of)) == NULL))
        return NULL;
    if (index < 0 || index >= tp_model_params(&model))
        return PyErr_Format(PyExc_IndexError, "parameter %d of %d", index, tp_model_params(&model));
    tp_param param;
    tp_model_param(&model, index, &param);
    float *values = malloc((size_t)(param.rows * param.cols) * sizeof *values);
    if (values == NULL)
        return tp_py_no_memory();
    tp_py_away away;
    tp_py_leave_rank(&away, region);
    tp_model_init_param(&model, &param, seed, values);
    tp_status status = tp_py_back(&away, tp_deadline_check_told());
    if (status != TP_OK) {
        free(values);
        return tp_py_raise(state, status);
    }
    Py_ssize_t shape[2] = {param.rows, param.cols};
    return param.is_matrix ? tp_py_array(state, values, 'f', 2, shape) : tp_py_array(state, values, 'f', 1, shape + 1);
}

static PyMethodDef functions[] = {
    {"model_params", model_params, METH_O,
     "model_params($module, model, /)\n--\n\n-> [(name, rows, cols, is_matrix, block), ...] in canonical order; vectors have "
     "rows 1."},
    {"model_init_param", model_init_param, METH_VARARGS,
     "model_init_param($module, model, index, seed, region=None, /)\n--\n\n-> a float32 array: Philox keyed by (seed, name, "
     "index). region: whose abort ends it; None: a signal does."},
    {NULL, NULL, 0, NULL},
};

int
tp_py_add_model(PyObject *module, tp_py_state *state)
{
    (void)state;
    if (PyModule_AddIntConstant(module, "MODEL_LAYERS", TP_MODEL_LAYERS) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
