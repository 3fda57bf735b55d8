/* DawnPiper for Python: plain arrays in, tuples out; terapipe_c/planners/dawnpiper.py gives them their names. */
#include "csrc/py/module.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/plan/dawnpiper.h"
#include "csrc/plan/graph.h"

enum { ARRAYS = 9 };

typedef struct {
    tp_nodes nodes;
    Py_buffer view[ARRAYS];
} nodes_view;

/* A tuple of 9 float64 [n] arrays, the last three of which may be None. */
static int
view_nodes(PyObject *tuple, nodes_view *out)
{
    static const char *const names[ARRAYS] = {"fwd_s", "bwd_s", "recompute_s", "activation_bytes", "param_bytes",
                                              "optimizer_bytes", "cut_bytes", "cut_tensors", "working_bytes"};
    const double *arrays[ARRAYS] = {NULL};
    memset(out, 0, sizeof *out);
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != ARRAYS) {
        tp_py_invalid_type("nodes: a tuple of 9 arrays would be right");
        return -1;
    }
    for (int k = 0; k < ARRAYS; k++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, k);
        if (item == Py_None && k >= 6)
            continue;
        if (tp_py_view(item, 'd', 1, 0, names[k], &out->view[k]) < 0)
            return -1;
        arrays[k] = out->view[k].buf;
        if (out->view[k].shape[0] != out->view[0].shape[0] || out->view[k].shape[0] > 1 << 24) {
            tp_py_invalid_value("%s has %zd values and fwd_s %zd: one a node, at most 2^24, would be right",
                                names[k], out->view[k].shape[0], out->view[0].shape[0]);
            return -1;
        }
    }
    out->nodes = (tp_nodes){(int)out->view[0].shape[0], arrays[0], arrays[1], arrays[2], arrays[3],
                            arrays[4],                  arrays[5], arrays[6], arrays[7], arrays[8]};
    return 0;
}

static void *
copy_of(const void *values, size_t bytes)
{
    void *copy = malloc(bytes > 0 ? bytes : 1);
    if (copy == NULL)
        tp_py_no_memory();
    else
        memcpy(copy, values, bytes);
    return copy;
}

static PyObject *
array_of(tp_py_state *state, const void *values, char format, size_t size, Py_ssize_t count)
{
    void *copy = copy_of(values, size * (size_t)count);
    return copy == NULL ? NULL : tp_py_array(state, copy, format, 1, &count);
}

static PyObject *
plan_object(tp_py_state *state, const tp_dawnpiper_plan *plan)
{
    PyObject *arrays[5] = {
        array_of(state, plan->recompute, 'B', 1, plan->count), array_of(state, plan->swap_bytes, 'd', 8, plan->count),
        array_of(state, plan->stage_s, 'd', 8, plan->stages), array_of(state, plan->peak_bytes, 'd', 8, plan->stages),
        array_of(state, plan->link_s, 'd', 8, plan->stages),
    };
    PyObject *boundary = tp_py_ints(plan->boundary, plan->stages + 1);
    int whole = boundary != NULL;
    for (int k = 0; k < 5; k++)
        whole = whole && arrays[k] != NULL;
    if (!whole) {
        for (int k = 0; k < 5; k++)
            Py_XDECREF(arrays[k]);
        Py_XDECREF(boundary);
        return NULL;
    }
    return Py_BuildValue("(NNNNNNddddOLLLLd)", boundary, arrays[0], arrays[1], arrays[2], arrays[3], arrays[4],
                         plan->period_s, plan->step_s, plan->lower_bound_s, plan->relaxed_s,
                         plan->optimal ? Py_True : Py_False, (long long)plan->probes, (long long)plan->evaluations,
                         (long long)plan->knapsacks, (long long)plan->states, plan->seconds);
}

static int
check_flight(int flight)
{
    if (flight >= 0 && flight < TP_FLIGHTS)
        return 0;
    tp_py_invalid_value("flight is %d: 0 to %d would be right", flight, TP_FLIGHTS - 1);
    return -1;
}

PyDoc_STRVAR(plan_dawnpiper_doc,
             "plan_dawnpiper($module, /, nodes, stages, memory_bytes, micros, flight, paper=False, optimise=True, "
             "swap_Bps=0.0, link_Bps=0.0, work_limit=0, boundaries=None, binary=False, in_flight=None)\n--\n\n"
             "nodes: 9 float64 [n] arrays, the last three (cut_bytes, cut_tensors, working_bytes) may be None.");
static PyObject *
plan_dawnpiper(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"nodes",    "stages",     "memory_bytes", "micros", "flight", "paper", "optimise", "swap_Bps",
                            "link_Bps", "work_limit", "boundaries",   "binary", "in_flight", NULL};
    PyObject *tuple, *boundary = Py_None, *in_flight = Py_None, *result = NULL;
    tp_dawnpiper_options options = {.optimise = 1};
    int flight, binary = 0;
    long long work = 0;
    nodes_view view;
    Py_buffer given[2] = {{0}, {0}};
    const void *cuts = NULL, *held = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "Oidii|ppddLOpO:plan_dawnpiper", names, &tuple, &options.stages,
                                     &options.memory_bytes, &options.micros, &flight, &options.paper, &options.optimise,
                                     &options.swap_Bps, &options.link_Bps, &work, &boundary, &binary, &in_flight) ||
        check_flight(flight) < 0)
        return NULL;
    options.flight = (tp_flight)flight;
    options.work_limit = work;
    if (view_nodes(tuple, &view) == 0 &&
        tp_py_view_optional(boundary, 'i', (Py_ssize_t)options.stages + 1, "boundaries", &given[0], &cuts) == 0 &&
        tp_py_view_optional(in_flight, 'i', options.stages, "in_flight", &given[1], &held) == 0) {
        options.boundary = cuts;
        options.in_flight = held;
        tp_dawnpiper_plan plan = {0};
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_py_back(&away, binary ? tp_plan_dawnpiper_binary(&view.nodes, &options, &plan)
                                                    : tp_plan_dawnpiper(&view.nodes, &options, &plan));
        tp_py_state *state = tp_py_module_state(module);
        result = status == TP_OK ? plan_object(state, &plan) : tp_py_raise(state, status);
        tp_dawnpiper_plan_free(&plan);
    }
    tp_py_end_views(given, 2);
    tp_py_end_views(view.view, ARRAYS);
    return result;
}

PyDoc_STRVAR(dawnpiper_balance_doc,
             "dawnpiper_balance($module, /, nodes, stages, micros, flight, by_memory)\n--\n\n"
             "Boundaries of equal times, or of Alg. 2's shares of memory.");
static PyObject *
dawnpiper_balance(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"nodes", "stages", "micros", "flight", "by_memory", NULL};
    PyObject *tuple, *result = NULL;
    tp_dawnpiper_options options = {.optimise = 1};
    int flight, by_memory;
    nodes_view view;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "Oiiip:dawnpiper_balance", names, &tuple, &options.stages,
                                     &options.micros, &flight, &by_memory) ||
        check_flight(flight) < 0)
        return NULL;
    options.flight = (tp_flight)flight;
    if (view_nodes(tuple, &view) == 0) {
        size_t room = options.stages > 0 && options.stages <= view.nodes.count ? (size_t)options.stages + 1 : 1;
        int *boundary = calloc(room, sizeof *boundary);
        tp_status status = boundary == NULL
                               ? tp_fail(TP_EMEMORY, "no memory for %d stages", options.stages)
                               : tp_plan_dawnpiper_balance(&view.nodes, &options, by_memory, boundary);
        result = status == TP_OK ? tp_py_ints(boundary, options.stages + 1)
                                 : tp_py_raise(tp_py_module_state(module), status);
        free(boundary);
    }
    tp_py_end_views(view.view, ARRAYS);
    return result;
}

PyDoc_STRVAR(dawnpiper_weights_doc, "dawnpiper_weights($module, /, stages, micros, flight)\n--\n\n"
                                    "float64 [stages]: copies of stage 0 over copies of each stage (Alg. 2).");
static PyObject *
dawnpiper_weights(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"stages", "micros", "flight", NULL};
    tp_dawnpiper_options options = {.optimise = 1};
    int flight;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iii:dawnpiper_weights", names, &options.stages, &options.micros,
                                     &flight) ||
        check_flight(flight) < 0)
        return NULL;
    options.flight = (tp_flight)flight;
    if (options.stages < 1 || options.stages > 32767 || options.micros < 1)
        return tp_py_invalid_value("stages is %d and micro_batches %d: 1 to 32767 stages, and 1 micro-batch or more, are needed",
                                   options.stages, options.micros);
    Py_ssize_t count = options.stages;
    double *weight = malloc((size_t)count * sizeof *weight);
    if (weight == NULL)
        return tp_py_no_memory();
    tp_dawnpiper_weights(&options, weight);
    return tp_py_array(tp_py_module_state(module), weight, 'd', 1, &count);
}

typedef struct {
    tp_graph graph;
    Py_buffer from, to, bytes;
} graph_view;

static void
end_graph(graph_view *view)
{
    Py_buffer *views[] = {&view->from, &view->to, &view->bytes};
    for (int k = 0; k < 3; k++)
        if (views[k]->obj != NULL)
            PyBuffer_Release(views[k]);
}

static int
view_graph(int count, PyObject *from, PyObject *to, PyObject *bytes, graph_view *out)
{
    memset(out, 0, sizeof *out);
    if (tp_py_view(from, 'i', 1, 0, "from", &out->from) < 0 || tp_py_view(to, 'i', 1, 0, "to", &out->to) < 0 ||
        tp_py_view(bytes, 'd', 1, 0, "bytes", &out->bytes) < 0)
        return -1;
    Py_ssize_t edges = out->from.shape[0];
    if (out->to.shape[0] != edges || out->bytes.shape[0] != edges || edges > 1 << 28 || count < 1 || count > 1 << 24) {
        tp_py_invalid_value("from, to and bytes have %zd, %zd and %zd values for %d nodes: one an edge would be right",
                            edges, out->to.shape[0], out->bytes.shape[0], count);
        return -1;
    }
    out->graph = (tp_graph){count, (int)edges, out->from.buf, out->to.buf, out->bytes.buf};
    return 0;
}

PyDoc_STRVAR(graph_order_doc, "graph_order($module, source, target, bytes, forward_s, /)\n--\n\n"
                              "(order int32, False), or (the nodes of a cycle, True).");
static PyObject *
graph_order(PyObject *module, PyObject *args)
{
    PyObject *from, *to, *bytes, *forward, *result = NULL;
    Py_buffer seconds;
    graph_view view;
    if (!PyArg_ParseTuple(args, "OOOO:graph_order", &from, &to, &bytes, &forward) ||
        tp_py_view(forward, 'd', 1, 0, "forward_s", &seconds) < 0)
        return NULL;
    if (view_graph((int)seconds.shape[0], from, to, bytes, &view) == 0) {
        int cycle = 0;
        int32_t *order = malloc((size_t)view.graph.count * sizeof *order);
        tp_status status = order == NULL ? tp_fail(TP_EMEMORY, "no memory for %d nodes", view.graph.count)
                                         : tp_graph_order(&view.graph, seconds.buf, order, &cycle);
        Py_ssize_t length = cycle > 0 ? cycle : view.graph.count;
        PyObject *array = status == TP_OK ? array_of(tp_py_module_state(module), order, 'i', 4, length)
                                          : tp_py_raise(tp_py_module_state(module), status);
        result = array == NULL ? NULL : Py_BuildValue("(NO)", array, cycle > 0 ? Py_True : Py_False);
        free(order);
    }
    end_graph(&view);
    PyBuffer_Release(&seconds);
    return result;
}

PyDoc_STRVAR(graph_cuts_doc, "graph_cuts($module, count, source, target, bytes, /)\n--\n\n"
                             "(cut_bytes, cut_tensors), float64 [count], of nodes in order.");
static PyObject *
graph_cuts(PyObject *module, PyObject *args)
{
    PyObject *from, *to, *bytes, *result = NULL;
    int count;
    graph_view view;
    if (!PyArg_ParseTuple(args, "iOOO:graph_cuts", &count, &from, &to, &bytes))
        return NULL;
    if (view_graph(count, from, to, bytes, &view) == 0) {
        tp_py_state *state = tp_py_module_state(module);
        double *cuts = malloc(2 * (size_t)count * sizeof *cuts);
        tp_status status = cuts == NULL ? tp_fail(TP_EMEMORY, "no memory for %d nodes", count)
                                        : tp_graph_cuts(&view.graph, cuts, cuts + count);
        if (status != TP_OK)
            tp_py_raise(state, status);
        else {
            PyObject *crossing = array_of(state, cuts, 'd', 8, count), *tensors = array_of(state, cuts + count, 'd', 8, count);
            if (crossing != NULL && tensors != NULL)
                result = PyTuple_Pack(2, crossing, tensors);
            Py_XDECREF(crossing);
            Py_XDECREF(tensors);
        }
        free(cuts);
    }
    end_graph(&view);
    return result;
}

int
tp_py_add_dawnpiper(PyObject *module, tp_py_state *state)
{
    static PyMethodDef methods[] = {
        {"plan_dawnpiper", (PyCFunction)(void (*)(void))plan_dawnpiper, METH_VARARGS | METH_KEYWORDS, plan_dawnpiper_doc},
        {"dawnpiper_balance", (PyCFunction)(void (*)(void))dawnpiper_balance, METH_VARARGS | METH_KEYWORDS,
         dawnpiper_balance_doc},
        {"dawnpiper_weights", (PyCFunction)(void (*)(void))dawnpiper_weights, METH_VARARGS | METH_KEYWORDS,
         dawnpiper_weights_doc},
        {"graph_order", graph_order, METH_VARARGS, graph_order_doc},
        {"graph_cuts", graph_cuts, METH_VARARGS, graph_cuts_doc},
        {NULL, NULL, 0, NULL},
    };
    (void)state;
    return PyModule_AddFunctions(module, methods);
}
