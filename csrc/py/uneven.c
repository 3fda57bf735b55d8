/* Slices for uneven stages, for Python; terapipe_c/planners/uneven.py gives them their names. */
#include "csrc/py/module.h"

#include "csrc/plan/uneven.h"

typedef struct {
    tp_uneven_request request;
    Py_buffer view[2];
    int views;
} tables_view;

static void
end_tables(tables_view *tables)
{
    for (int k = 0; k < tables->views; k++)
        PyBuffer_Release(&tables->view[k]);
}

static int
view_tables(PyObject *forward, PyObject *backward, tables_view *out)
{
    PyObject *parts[2] = {forward, backward};
    static const char *const names[2] = {"t", "bwd"};
    for (int k = 0; k < (backward == Py_None ? 1 : 2); k++) {
        Py_buffer *view = &out->view[k];
        if (tp_py_view(parts[k], 'd', 3, 0, names[k], view) < 0)
            return -1;
        out->views = k + 1;
        if (view->shape[0] < 1 || view->shape[1] < 2 || view->shape[1] != view->shape[2] || view->shape[1] > 1 << 20 ||
            view->shape[0] > 1 << 20 || (k == 1 && (view->shape[0] != out->view[0].shape[0] ||
                                                   view->shape[1] != out->view[0].shape[1]))) {
            PyErr_Format(PyExc_ValueError,
                         "%s has shape [%zd, %zd, %zd]: [stages, n + 1, n + 1] with n >= 1, the same for t and bwd, would "
                         "be right",
                         names[k], view->shape[0], view->shape[1], view->shape[2]);
            return -1;
        }
    }
    out->request.stages = (int)out->view[0].shape[0];
    out->request.units = (int)out->view[0].shape[1] - 1;
    out->request.forward = out->view[0].buf;
    out->request.backward = out->views == 2 ? out->view[1].buf : NULL;
    return 0;
}

static PyObject *
plan_tuple(const tp_uneven_plan *plan)
{
    PyObject *lengths = PyList_New(plan->slices);
    for (int k = 0; lengths != NULL && k < plan->slices; k++) {
        PyObject *length = PyLong_FromLong(plan->length[k]);
        if (length == NULL)
            Py_CLEAR(lengths);
        else
            PyList_SET_ITEM(lengths, k, length);
    }
    if (lengths == NULL)
        return NULL;
    return Py_BuildValue("(NddOLLLd)", lengths, plan->latency_s, plan->lower_bound_s, plan->optimal ? Py_True : Py_False,
                         (long long)plan->labels, (long long)plan->work, (long long)plan->evaluations, plan->seconds);
}

PyDoc_STRVAR(plan_uneven_doc, "plan_uneven($module, /, forward, backward=None, longest=0, work=0)\n--\n\n"
                              "forward, backward: float64 [stages, n + 1, n + 1] -> (lengths, latency_s, lower_bound_s, "
                              "optimal, labels, work, evaluations, seconds).");
static PyObject *
plan_uneven(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"forward", "backward", "longest", "work", NULL};
    PyObject *forward, *backward = Py_None, *result = NULL;
    int longest = 0;
    long long work = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|OiL:plan_uneven", names, &forward, &backward, &longest, &work))
        return NULL;
    tables_view tables = {0};
    if (view_tables(forward, backward, &tables) == 0) {
        tp_uneven_plan plan = {0};
        tp_status status;
        tables.request.longest = longest;
        tables.request.work = work;
        Py_BEGIN_ALLOW_THREADS
        status = tp_uneven_check(&tables.request);
        if (status == TP_OK)
            status = tp_plan_uneven(&tables.request, &plan);
        Py_END_ALLOW_THREADS
        result = status == TP_OK ? plan_tuple(&plan) : tp_py_raise(tp_py_module_state(module), status);
        tp_uneven_plan_free(&plan);
    }
    end_tables(&tables);
    return result;
}

PyDoc_STRVAR(flow_shop_doc, "flow_shop($module, /, forward, lengths, backward=None)\n--\n\n"
                            "Seconds of int32 lengths [M] through float64 [stages, n + 1, n + 1] times.");
static PyObject *
flow_shop(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"forward", "lengths", "backward", NULL};
    PyObject *forward, *lengths, *backward = Py_None, *result = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO|O:flow_shop", names, &forward, &lengths, &backward))
        return NULL;
    Py_buffer cuts;
    if (tp_py_view(lengths, 'i', 1, 0, "lengths", &cuts) < 0)
        return NULL;
    tables_view tables = {0};
    if (view_tables(forward, backward, &tables) == 0) {
        double seconds = 0.0;
        tp_status status;
        Py_BEGIN_ALLOW_THREADS
        status = tp_uneven_check(&tables.request);
        if (status == TP_OK)
            status = tp_uneven_latency(&tables.request, cuts.buf, (int)cuts.shape[0], &seconds);
        Py_END_ALLOW_THREADS
        result = status == TP_OK ? PyFloat_FromDouble(seconds) : tp_py_raise(tp_py_module_state(module), status);
    }
    end_tables(&tables);
    PyBuffer_Release(&cuts);
    return result;
}

int
tp_py_add_uneven(PyObject *module, tp_py_state *state)
{
    static PyMethodDef methods[] = {
        {"plan_uneven", (PyCFunction)(void (*)(void))plan_uneven, METH_VARARGS | METH_KEYWORDS, plan_uneven_doc},
        {"flow_shop", (PyCFunction)(void (*)(void))flow_shop, METH_VARARGS | METH_KEYWORDS, flow_shop_doc},
        {NULL, NULL, 0, NULL},
    };
    (void)state;
    return PyModule_AddFunctions(module, methods);
}
