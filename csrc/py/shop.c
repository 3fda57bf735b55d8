/* Token slices through unequal stages, for terapipe_c/planners/uneven.py. */
#include "csrc/py/slices.h"

#include <stdlib.h>

#include "csrc/plan/shop.h"

static PyObject *
shop_object(const tp_shop_plan *plan)
{
    PyObject *lengths = tp_py_ints(plan->length, plan->slices);
    if (lengths == NULL)
        return NULL;
    return Py_BuildValue("(NddOLLLd)", lengths, plan->latency_s, plan->lower_bound_s, plan->optimal ? Py_True : Py_False,
                         (long long)plan->labels, (long long)plan->moves, (long long)plan->bounds, plan->seconds);
}

static tp_status
check_and_plan(const tp_shop *shop, const char *const *names, const tp_shop_options *options, tp_shop_plan *plan)
{
    for (int c = 0; c < shop->costs; c++)
        TP_TRY(tp_slice_cost_check(&shop->cost[c], names[c]));
    return tp_plan_shop(shop, options, plan);
}

static int
check_machines(const Py_buffer *view, int chains, Py_ssize_t costs, tp_shop *shop)
{
    const int *of = view->buf;
    if (chains < 1 || chains > 2 || view->shape[0] < chains || view->shape[0] % chains || view->shape[0] > 1 << 14) {
        tp_py_invalid_value("%zd machines in %d chains: as many in each would be right", view->shape[0], chains);
        return -1;
    }
    for (Py_ssize_t q = 0; q < view->shape[0]; q++)
        if (of[q] < 0 || of[q] >= costs) {
            tp_py_invalid_value("machine %zd has cost %d of %zd", q, of[q], costs);
            return -1;
        }
    shop->chains = chains;
    shop->machines = (int)(view->shape[0] / chains);
    shop->cost_of = of;
    return 0;
}

/* What messages call the costs: borrowed from the list. */
static int
take_names(PyObject *list, const char **names, Py_ssize_t count)
{
    if (PyList_GET_SIZE(list) != count) {
        tp_py_invalid_value("%zd names: %zd, one a cost, would be right", PyList_GET_SIZE(list), count);
        return -1;
    }
    for (Py_ssize_t c = 0; c < count; c++)
        if ((names[c] = PyUnicode_AsUTF8(PyList_GET_ITEM(list, c))) == NULL)
            return -1;
    return 0;
}

PyDoc_STRVAR(plan_shop_doc,
             "plan_shop($module, /, costs, names, cost_of, chains=1, longest=0, memory=None, work=0)\n--\n\n"
             "costs: distinct ones; names: what messages call them; cost_of: int32 [machines of all chains].");
static PyObject *
plan_shop(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *keys[] = {"costs", "names", "cost_of", "chains", "longest", "memory", "work", NULL};
    PyObject *list, *called, *machines, *memory = NULL, *result = NULL;
    int chains = 1;
    long long work = 0;
    tp_shop_options options = {0};
    tp_shop shop = {0};
    Py_buffer of;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O!O|iiOL:plan_shop", keys, &PyList_Type, &list, &PyList_Type, &called,
                                     &machines, &chains, &options.longest, &memory, &work) ||
        tp_py_slice_memory(memory, &options.memory) < 0 || tp_py_view(machines, 'i', 1, 0, "cost_of", &of) < 0)
        return NULL;
    options.work = work;
    Py_ssize_t count = PyList_GET_SIZE(list);
    tp_py_cost *views = calloc((size_t)count + 1, sizeof *views);
    tp_slice_cost *costs = calloc((size_t)count + 1, sizeof *costs);
    const char **names = calloc((size_t)count + 1, sizeof *names);
    if (views == NULL || costs == NULL || names == NULL)
        tp_py_no_memory();
    else if (check_machines(&of, chains, count, &shop) == 0 && take_names(called, names, count) == 0 &&
             tp_py_view_costs(list, names, views, costs, count) == 0) {
        tp_shop_plan plan = {0};
        shop.units = costs[0].units;
        shop.costs = (int)count;
        shop.cost = costs;
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_py_back(&away, check_and_plan(&shop, names, &options, &plan));
        result = status == TP_OK ? shop_object(&plan) : tp_py_raise(tp_py_module_state(module), status);
        tp_shop_plan_free(&plan);
    }
    for (Py_ssize_t b = 0; views != NULL && b < count; b++)
        tp_py_end_cost(&views[b]);
    free(views);
    free(costs);
    free(names);
    PyBuffer_Release(&of);
    return result;
}

PyDoc_STRVAR(flow_shop_doc, "flow_shop($module, /, times)\n--\n\ntimes: float64 [jobs, machines], seconds -> the makespan.");
static PyObject *
flow_shop(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"times", NULL};
    PyObject *times, *result = NULL;
    Py_buffer view;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O:flow_shop", names, &times) ||
        tp_py_view(times, 'd', 2, 0, "times", &view) < 0)
        return NULL;
    double *clock = view.shape[1] > 0 ? calloc((size_t)view.shape[1], sizeof *clock) : NULL;
    if (view.shape[1] < 1)
        tp_py_invalid_value("times has no machines: [jobs, machines] with at least one would be right");
    else if (clock == NULL)
        tp_py_no_memory();
    else {
        tp_py_away away;
        tp_py_leave(&away);
        double makespan = tp_flow_shop(view.buf, view.shape[0], view.shape[1], clock);
        if (tp_py_back(&away, TP_OK) == TP_OK)
            result = PyFloat_FromDouble(makespan);
    }
    free(clock);
    PyBuffer_Release(&view);
    return result;
}

int
tp_py_add_shop(PyObject *module, tp_py_state *state)
{
    static PyMethodDef methods[] = {
        {"plan_shop", (PyCFunction)(void (*)(void))plan_shop, METH_VARARGS | METH_KEYWORDS, plan_shop_doc},
        {"flow_shop", (PyCFunction)(void (*)(void))flow_shop, METH_VARARGS | METH_KEYWORDS, flow_shop_doc},
        {NULL, NULL, 0, NULL},
    };
    (void)state;
    return PyModule_AddFunctions(module, methods);
}
