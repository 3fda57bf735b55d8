/* The BMPipe planner for Python: terapipe_c/planners/bmpipe.py gives the numbers their names. */
#include "csrc/py/module.h"

#include <stdlib.h>

#include "csrc/plan/bmpipe.h"

enum { COUNT, CHOICES, FORWARD, BACKWARD, STATIC, EXTRA, KEPT, VIEWS };

typedef struct {
    tp_bmpipe_layers layers;
    Py_buffer view[VIEWS];
    int views;
} layer_view;

static void
end_layers(layer_view *v)
{
    for (int k = 0; k < v->views; k++)
        PyBuffer_Release(&v->view[k]);
    v->views = 0;
}

/* (count, choices, fwd_s, bwd_s, static_bytes, extra_bwd_s, activation_bytes). 0, or -1 with an exception set and nothing
 * held. */
static int
view_layers(PyObject *tuple, layer_view *out)
{
    static const char *const names[VIEWS] = {"count",        "choices",     "fwd_s",           "bwd_s",
                                             "static_bytes", "extra_bwd_s", "activation_bytes"};
    PyObject *part[VIEWS];
    out->views = 0;
    if (!PyArg_ParseTuple(tuple, "OOOOOOO", &part[0], &part[1], &part[2], &part[3], &part[4], &part[5], &part[6]))
        return -1;
    for (int k = 0; k < VIEWS; k++) {
        if (tp_py_view(part[k], k < FORWARD ? 'i' : 'd', k < EXTRA ? 1 : 2, 0, names[k], &out->view[k]) < 0)
            goto refuse;
        out->views = k + 1;
        if (out->view[k].shape[0] != out->view[0].shape[0] || out->view[k].shape[0] > 1 << 20 ||
            (k == KEPT && out->view[k].shape[1] != out->view[EXTRA].shape[1]) ||
            (k >= EXTRA && out->view[k].shape[1] > 1 << 10)) {
            tp_py_invalid_value("%s has %zd rows: %zd, one a layer type, would be right", names[k],
                                out->view[k].shape[0], out->view[0].shape[0]);
            goto refuse;
        }
    }
    out->layers = (tp_bmpipe_layers){
        .types = (int)out->view[0].shape[0], .strategies = (int)out->view[EXTRA].shape[1], .count = out->view[COUNT].buf,
        .choices = out->view[CHOICES].buf, .forward_s = out->view[FORWARD].buf, .backward_s = out->view[BACKWARD].buf,
        .static_bytes = out->view[STATIC].buf, .extra_s = out->view[EXTRA].buf, .activation_bytes = out->view[KEPT].buf};
    return 0;
refuse:
    end_layers(out);
    return -1;
}

/* int32 [types, strategies, chunks, stages]: 0, or -1 with an exception set and nothing held. */
static int
view_assignment(PyObject *object, const char *what, const layer_view *v, const tp_bmpipe_options *o, Py_buffer *out)
{
    if (tp_py_view(object, 'i', 4, 0, what, out) < 0)
        return -1;
    const Py_ssize_t *shape = out->shape;
    if (shape[0] == v->layers.types && shape[1] == v->layers.strategies && shape[2] == o->chunks && shape[3] == o->stages)
        return 0;
    tp_py_invalid_value("%s has shape [%zd, %zd, %zd, %zd]: [%d, %d, %d, %d] would be right", what, shape[0], shape[1], shape[2],
                        shape[3], v->layers.types, v->layers.strategies, o->chunks, o->stages);
    PyBuffer_Release(out);
    return -1;
}

static PyObject *
plan_object(tp_py_state *state, const layer_view *v, const tp_bmpipe_options *o, tp_bmpipe_plan *plan)
{
    const Py_ssize_t shape[4] = {v->layers.types, v->layers.strategies, o->chunks, o->stages}, stages = o->stages;
    PyObject *assignment = tp_py_array(state, plan->assignment, 'i', 4, shape);
    PyObject *peak = tp_py_array(state, plan->peak_bytes, 'd', 1, &stages);
    plan->assignment = NULL; /* the arrays own them, made or not */
    plan->peak_bytes = NULL;
    if (assignment == NULL || peak == NULL) {
        Py_XDECREF(assignment);
        Py_XDECREF(peak);
        return NULL;
    }
    return Py_BuildValue("(NNdddddOLLLLd)", assignment, peak, plan->step_time_s, plan->lower_bound_s, plan->recompute_s,
                         plan->imbalance_s, plan->preparation_s, plan->optimal ? Py_True : Py_False,
                         (long long)plan->evaluations, (long long)plan->simulations, (long long)plan->nodes,
                         (long long)plan->paths, plan->seconds);
}

PyDoc_STRVAR(plan_bmpipe_doc,
             "plan_bmpipe($module, /, layers, stages, micro_batches, memory_bytes, chunks=1, comm_s=0.0,\n"
             "            time_limit_s=0.0, effort=0, prove=True, in_flight=None, start=None)\n--\n\n"
             "layers: (count, choices, fwd_s, bwd_s, static_bytes, extra_bwd_s, activation_bytes) by type.");
static PyObject *
plan_bmpipe(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"layers", "stages", "micro_batches", "memory_bytes", "chunks", "comm_s", "time_limit_s",
                            "effort", "prove", "in_flight", "start", NULL};
    PyObject *tuple, *in_flight = Py_None, *start = Py_None, *result = NULL;
    tp_bmpipe_options o = {.chunks = 1};
    int prove = 1;
    long long effort = 0;
    layer_view v;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!iid|iddLpOO:plan_bmpipe", names, &PyTuple_Type, &tuple, &o.stages,
                                     &o.micros, &o.memory_bytes, &o.chunks, &o.comm_s, &o.time_limit_s, &effort, &prove,
                                     &in_flight, &start) ||
        view_layers(tuple, &v) < 0)
        return NULL;
    o.effort = effort;
    o.unproven = !prove;
    Py_buffer given[2] = {0};
    const void *held = NULL;
    if (o.stages < 1 || o.chunks < 1)
        in_flight = start = Py_None; /* what follows refuses these */
    Py_ssize_t virtuals = (Py_ssize_t)o.stages * o.chunks;
    if (tp_py_view_optional(in_flight, 'i', virtuals, "in_flight", &given[0], &held) == 0 &&
        (start == Py_None || view_assignment(start, "start", &v, &o, &given[1]) == 0)) {
        tp_bmpipe_plan plan;
        o.in_flight = held;
        o.start = given[1].buf;
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_py_back(&away, tp_plan_bmpipe(&v.layers, &o, &plan));
        tp_py_state *state = tp_py_module_state(module);
        result = status == TP_OK ? plan_object(state, &v, &o, &plan) : tp_py_raise(state, status);
        tp_bmpipe_plan_free(&plan);
    }
    tp_py_end_views(given, 2);
    end_layers(&v);
    return result;
}

PyDoc_STRVAR(bmpipe_judge_doc,
             "bmpipe_judge($module, /, layers, stages, micro_batches, assignment, chunks=1, comm_s=0.0)\n--\n\n"
             "What an assignment is worth; assignment: int32 [types, strategies, chunks, stages].");
static PyObject *
bmpipe_judge(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"layers", "stages", "micro_batches", "assignment", "chunks", "comm_s", NULL};
    PyObject *tuple, *assignment, *result = NULL;
    tp_bmpipe_options o = {.chunks = 1, .memory_bytes = Py_HUGE_VAL};
    layer_view v;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!iiO|id:bmpipe_judge", names, &PyTuple_Type, &tuple, &o.stages,
                                     &o.micros, &assignment, &o.chunks, &o.comm_s) ||
        view_layers(tuple, &v) < 0)
        return NULL;
    Py_buffer given;
    if (view_assignment(assignment, "assignment", &v, &o, &given) == 0) {
        tp_bmpipe_plan plan;
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_py_back(&away, tp_bmpipe_judge(&v.layers, &o, given.buf, &plan));
        tp_py_state *state = tp_py_module_state(module);
        result = status == TP_OK ? plan_object(state, &v, &o, &plan) : tp_py_raise(state, status);
        tp_bmpipe_plan_free(&plan);
        PyBuffer_Release(&given);
    }
    end_layers(&v);
    return result;
}

/* Takes over both runs, [virtuals]. */
static PyObject *
path_object(tp_py_state *state, tp_status status, int64_t *runs[2], Py_ssize_t virtuals, double makespan, double lag)
{
    PyObject *result = NULL;
    if (status != TP_OK) {
        free(runs[0]);
        free(runs[1]);
        return tp_py_raise(state, status);
    }
    PyObject *up = tp_py_array(state, runs[0], 'q', 1, &virtuals);
    PyObject *down = tp_py_array(state, runs[1], 'q', 1, &virtuals);
    if (up != NULL && down != NULL)
        result = Py_BuildValue("(dOOd)", makespan, up, down, lag);
    Py_XDECREF(up);
    Py_XDECREF(down);
    return result;
}

PyDoc_STRVAR(bmpipe_path_doc,
             "bmpipe_path($module, /, forward_s, backward_s, stages, micro_batches, chunks=1, comm_s=0.0)\n--\n\n"
             "(makespan, runs of each forward, of each backward, seconds on links) of one critical path.");
static PyObject *
bmpipe_path(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"forward_s", "backward_s", "stages", "micro_batches", "chunks", "comm_s", NULL};
    PyObject *forward, *backward, *result = NULL;
    tp_bmpipe_options o = {.chunks = 1, .memory_bytes = Py_HUGE_VAL};
    Py_buffer f, b;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOii|id:bmpipe_path", names, &forward, &backward, &o.stages,
                                     &o.micros, &o.chunks, &o.comm_s) ||
        tp_py_view(forward, 'd', 1, 0, "forward_s", &f) < 0)
        return NULL;
    if (tp_py_view(backward, 'd', 1, 0, "backward_s", &b) < 0) {
        PyBuffer_Release(&f);
        return NULL;
    }
    Py_ssize_t virtuals = (Py_ssize_t)o.stages * o.chunks;
    int64_t *runs[2] = {NULL, NULL};
    if (virtuals < 1 || f.shape[0] != virtuals || b.shape[0] != virtuals) {
        tp_py_invalid_value("forward_s has %zd values and backward_s %zd: stages x chunks = %zd would be right",
                            f.shape[0], b.shape[0], virtuals);
    } else {
        for (int k = 0; k < 2; k++)
            runs[k] = calloc((size_t)virtuals, sizeof(int64_t));
        if (runs[0] == NULL || runs[1] == NULL) {
            tp_py_no_memory();
            free(runs[0]);
            free(runs[1]);
        } else {
            double makespan = 0.0, lag = 0.0;
            tp_py_away away;
            tp_py_leave(&away);
            tp_status status = tp_py_back(&away, tp_bmpipe_path(&o, f.buf, b.buf, &makespan, runs[0], runs[1], &lag));
            result = path_object(tp_py_module_state(module), status, runs, virtuals, makespan, lag);
        }
    }
    PyBuffer_Release(&f);
    PyBuffer_Release(&b);
    return result;
}

/* The arrays of the programme, in the order of the tuple; each is handed over. */
static PyObject *
ilp_object(tp_py_state *state, tp_bmpipe_ilp *ilp)
{
    struct {
        const char *name;
        void **memory;
        char format;
        Py_ssize_t length;
    } parts[] = {
        {"cost", (void **)&ilp->cost, 'd', ilp->columns},       {"low", (void **)&ilp->low, 'd', ilp->columns},
        {"high", (void **)&ilp->high, 'd', ilp->columns},       {"integer", (void **)&ilp->integer, 'B', ilp->columns},
        {"begin", (void **)&ilp->begin, 'q', ilp->rows + 1},    {"index", (void **)&ilp->index, 'i', ilp->entries},
        {"value", (void **)&ilp->value, 'd', ilp->entries},     {"row_low", (void **)&ilp->row_low, 'd', ilp->rows},
        {"row_high", (void **)&ilp->row_high, 'd', ilp->rows},
    };
    PyObject *result = PyDict_New();
    for (size_t i = 0; result != NULL && i < sizeof parts / sizeof parts[0]; i++) {
        PyObject *array = tp_py_array(state, *parts[i].memory, parts[i].format, 1, &parts[i].length);
        *parts[i].memory = NULL;
        if (array == NULL || PyDict_SetItemString(result, parts[i].name, array) < 0)
            Py_CLEAR(result);
        Py_XDECREF(array);
    }
    return result;
}

PyDoc_STRVAR(bmpipe_ilp_doc,
             "bmpipe_ilp($module, /, layers, stages, micro_batches, memory_bytes, forward_runs, backward_runs, lag_s,\n"
             "           chunks=1, comm_s=0.0)\n--\n\n"
             "Sparse rows of the integer programme; runs: int64 [paths, stages * chunks], lag_s: float64 [paths].");
static PyObject *
bmpipe_ilp(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"layers", "stages", "micro_batches", "memory_bytes", "forward_runs", "backward_runs", "lag_s",
                            "chunks", "comm_s", NULL};
    PyObject *tuple, *part[3], *result = NULL;
    tp_bmpipe_options o = {.chunks = 1};
    layer_view v;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!iidOOO|id:bmpipe_ilp", names, &PyTuple_Type, &tuple, &o.stages,
                                     &o.micros, &o.memory_bytes, &part[0], &part[1], &part[2], &o.chunks, &o.comm_s) ||
        view_layers(tuple, &v) < 0)
        return NULL;
    Py_buffer view[3];
    int views = 0;
    for (; views < 3; views++)
        if (tp_py_view(part[views], views < 2 ? 'q' : 'd', views < 2 ? 2 : 1, 0, names[4 + views], &view[views]) < 0)
            break;
    Py_ssize_t virtuals = (Py_ssize_t)o.stages * o.chunks;
    if (views == 3 && (view[0].shape[0] != view[2].shape[0] || view[1].shape[0] != view[2].shape[0] ||
                       view[2].shape[0] > 1 << 20 || view[0].shape[1] != virtuals || view[1].shape[1] != virtuals)) {
        tp_py_invalid_value("forward_runs has shape [%zd, %zd], backward_runs [%zd, %zd]: [%zd, %zd] would be right",
                            view[0].shape[0], view[0].shape[1], view[1].shape[0], view[1].shape[1], view[2].shape[0], virtuals);
    } else if (views == 3) {
        tp_bmpipe_ilp ilp;
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_py_back(&away, tp_bmpipe_ilp_build(&v.layers, &o, (int)view[2].shape[0], view[0].buf, view[1].buf,
                                                                 view[2].buf, &ilp));
        tp_py_state *state = tp_py_module_state(module);
        result = status == TP_OK ? ilp_object(state, &ilp) : tp_py_raise(state, status);
        tp_bmpipe_ilp_free(&ilp);
    }
    for (int k = 0; k < views; k++)
        PyBuffer_Release(&view[k]);
    end_layers(&v);
    return result;
}

int
tp_py_add_bmpipe(PyObject *module, tp_py_state *state)
{
    static PyMethodDef methods[] = {
        {"plan_bmpipe", (PyCFunction)(void (*)(void))plan_bmpipe, METH_VARARGS | METH_KEYWORDS, plan_bmpipe_doc},
        {"bmpipe_judge", (PyCFunction)(void (*)(void))bmpipe_judge, METH_VARARGS | METH_KEYWORDS, bmpipe_judge_doc},
        {"bmpipe_path", (PyCFunction)(void (*)(void))bmpipe_path, METH_VARARGS | METH_KEYWORDS, bmpipe_path_doc},
        {"bmpipe_ilp", (PyCFunction)(void (*)(void))bmpipe_ilp, METH_VARARGS | METH_KEYWORDS, bmpipe_ilp_doc},
        {NULL, NULL, 0, NULL},
    };
    (void)state;
    if (PyModule_AddIntConstant(module, "BMPIPE_LAYERS", TP_BMPIPE_LAYERS) < 0)
        return -1;
    return PyModule_AddFunctions(module, methods);
}
