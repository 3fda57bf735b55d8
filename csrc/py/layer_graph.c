/* Layer graphs (Piper's form) for Python: terapipe_c/planners/layers.py makes the arrays. */
#include "csrc/py/module.h"

#include <stdlib.h>

#include "csrc/plan/layer_graph.h"

enum { FROM, TO, EDGE_BYTES, NODE, DEGREE, TIME, PARAM, MEMORY_A, MEMORY_B, SYNC, ARRAYS };

static PyObject *
plan_object(const tp_layer_graph *graph, const tp_layer_plan *plan)
{
    PyObject *stages = PyList_New(plan->stages);
    for (int k = 0; stages != NULL && k < plan->stages; k++) {
        const tp_layer_stage *stage = &plan->stage[k];
        PyObject *row = Py_BuildValue("(iidd)", stage->data, stage->tensor, stage->time_s, stage->memory_bytes);
        if (row == NULL)
            Py_CLEAR(stages);
        else
            PyList_SET_ITEM(stages, k, row);
    }
    PyObject *stage_of = tp_py_ints(plan->stage_of, graph->nodes), *variant = tp_py_ints(plan->variant, graph->nodes);
    if (stages == NULL || stage_of == NULL || variant == NULL) {
        Py_XDECREF(stages);
        Py_XDECREF(stage_of);
        Py_XDECREF(variant);
        return NULL;
    }
    return Py_BuildValue("(NNNddOLLLLd)", stages, stage_of, variant, plan->time_per_sample_s, plan->lower_bound_s,
                         plan->optimal ? Py_True : Py_False, (long long)plan->downsets, (long long)plan->pairs,
                         (long long)plan->searches, (long long)plan->knapsacks, plan->seconds);
}

/* The sizes must agree, or C would read beyond them. */
static int
check_sizes(const Py_buffer *view, tp_layer_graph *graph)
{
    for (int k = FROM; k < ARRAYS; k++)
        if (view[k].shape[0] > 1 << 28 || graph->nodes < 1) {
            tp_py_invalid_value("a layer graph needs a node, and arrays of less than 2^28 values");
            return -1;
        }
    graph->edges = (int)view[FROM].shape[0];
    graph->variants = (int)view[NODE].shape[0];
    int agree = view[TO].shape[0] == graph->edges && view[EDGE_BYTES].shape[0] == graph->edges;
    for (int k = DEGREE; k <= MEMORY_B; k++)
        agree = agree && view[k].shape[0] == graph->variants;
    const int32_t *ends[] = {view[FROM].buf, view[TO].buf}, *node = view[NODE].buf;
    int *touching = calloc((size_t)graph->nodes, sizeof *touching);
    if (touching == NULL) {
        tp_py_no_memory();
        return -1;
    }
    Py_ssize_t sync = 0;
    for (int e = 0; agree && e < graph->edges; e++)
        for (int end = 0; end < 2; end++)
            if (ends[end][e] >= 0 && ends[end][e] < graph->nodes)
                touching[ends[end][e]]++;
    for (int v = 0; agree && v < graph->variants; v++)
        sync += node[v] >= 0 && node[v] < graph->nodes ? touching[node[v]] : 0;
    free(touching);
    if (agree && sync == view[SYNC].shape[0])
        return 0;
    tp_py_invalid_value("the arrays of the layer graph have sizes that do not agree");
    return -1;
}

PyDoc_STRVAR(plan_layers_doc, "plan_layers($module, /, nodes, devices, micro_batches, memory_bytes, bandwidth_Bps, arrays, published, "
                              "exhaustive=False)\n--\n\narrays: from, to, edge_bytes, node, degree, time_s, param_bytes, memory_a, memory_b, sync.");
static PyObject *
plan_layers(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"nodes", "devices", "micro_batches", "memory_bytes", "bandwidth_Bps", "arrays", "published", "exhaustive", NULL};
    static const char formats[ARRAYS + 1] = "iidiiddddd";
    static const char *const what[] = {"from", "to", "edge_bytes", "node", "degree", "time_s", "param_bytes", "memory_a",
                                       "memory_b", "sync"};
    PyObject *arrays, *result = NULL;
    int published, exhaustive = 0, open = 0;
    tp_layer_graph graph = {0};
    Py_buffer view[ARRAYS];
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiiddO!p|p:plan_layers", names, &graph.nodes, &graph.devices,
                                     &graph.micro_batches, &graph.memory_bytes, &graph.bandwidth_Bps, &PyTuple_Type, &arrays,
                                     &published, &exhaustive))
        return NULL;
    if (PyTuple_GET_SIZE(arrays) != ARRAYS)
        return tp_py_invalid_value("%zd arrays: %d are needed", PyTuple_GET_SIZE(arrays), (int)ARRAYS);
    while (open < ARRAYS && tp_py_view(PyTuple_GET_ITEM(arrays, open), formats[open], 1, 0, what[open], &view[open]) == 0)
        open++;
    if (open == ARRAYS && check_sizes(view, &graph) == 0) {
        tp_layer_plan plan = {0};
        graph.from = view[FROM].buf, graph.to = view[TO].buf, graph.edge_bytes = view[EDGE_BYTES].buf;
        graph.node = view[NODE].buf, graph.degree = view[DEGREE].buf, graph.time_s = view[TIME].buf;
        graph.param_bytes = view[PARAM].buf, graph.memory_a = view[MEMORY_A].buf, graph.memory_b = view[MEMORY_B].buf;
        graph.sync_bytes = view[SYNC].buf;
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_py_back(&away, published ? tp_plan_piper(&graph, exhaustive, &plan) : tp_plan_layers(&graph, &plan));
        result = status == TP_OK ? plan_object(&graph, &plan) : tp_py_raise(tp_py_module_state(module), status);
        tp_layer_plan_free(&plan);
    }
    while (open > 0)
        PyBuffer_Release(&view[--open]);
    return result;
}

int
tp_py_add_layer_graph(PyObject *module, tp_py_state *state)
{
    static PyMethodDef methods[] = {
        {"plan_layers", (PyCFunction)(void (*)(void))plan_layers, METH_VARARGS | METH_KEYWORDS, plan_layers_doc},
        {NULL, NULL, 0, NULL},
    };
    (void)state;
    return PyModule_AddFunctions(module, methods);
}
