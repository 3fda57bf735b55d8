/* The planners for Python: plain arrays in, tuples out; terapipe_c/planners gives them their names. */
#include "csrc/py/slices.h"

#include <stdlib.h>


int
tp_py_view_cost(PyObject *object, const char *name, tp_py_cost *out)
{
    char what[64];
    if (!PyTuple_Check(object)) {
        if (tp_py_view(object, 'd', 2, 0, name, &out->view[0]) < 0)
            return -1;
        out->views = 1;
        if (out->view[0].shape[0] != out->view[0].shape[1] || out->view[0].shape[0] < 2 ||
            out->view[0].shape[0] > 1 << 24) {
            tp_py_invalid_value("%s has shape [%zd, %zd]: [n + 1, n + 1] with n >= 1 would be right", name,
                                out->view[0].shape[0], out->view[0].shape[1]);
            return -1;
        }
        out->cost = (tp_slice_cost){.units = (int)out->view[0].shape[0] - 1, .table = out->view[0].buf};
        return 0;
    }
    PyObject *parts[2];
    if (!PyArg_ParseTuple(object, "OOdd", &parts[0], &parts[1], &out->cost.a2, &out->cost.a3))
        return -1;
    for (int k = 0; k < 2; k++) {
        PyOS_snprintf(what, sizeof what, "%s.G%d", name, k);
        if (tp_py_view(parts[k], 'd', 1, 0, what, &out->view[k]) < 0)
            return -1;
        out->views = k + 1;
    }
    Py_ssize_t values = out->view[0].shape[0];
    if (values != out->view[1].shape[0] || values < 2 || values > 1 << 24) {
        tp_py_invalid_value("%s.G0 has %zd values and %s.G1 %zd: the same n + 1 >= 2 would be right", name,
                            out->view[0].shape[0], name, out->view[1].shape[0]);
        return -1;
    }
    out->cost.units = (int)out->view[0].shape[0] - 1;
    out->cost.g0 = out->view[0].buf;
    out->cost.g1 = out->view[1].buf;
    return 0;
}

void
tp_py_end_cost(tp_py_cost *view)
{
    for (int k = 0; k < view->views; k++)
        PyBuffer_Release(&view->view[k]);
    view->views = 0;
}

/* message: None, or a cost of as many units. -1 with an exception set. */
static int
view_message(PyObject *message, const tp_py_cost *of, tp_py_cost *view, tp_slice_options *options)
{
    if (message == NULL || message == Py_None)
        return 0;
    if (tp_py_view_cost(message, "comm", view) < 0)
        return -1;
    if (view->cost.units != of->cost.units) {
        tp_py_invalid_value("comm has %d units: %d, as t, would be right", view->cost.units, of->cost.units);
        return -1;
    }
    options->message = &view->cost;
    return 0;
}

int
tp_py_slice_memory(PyObject *memory, tp_slice_memory *m)
{
    if (memory == NULL || memory == Py_None)
        return 0;
    return PyArg_ParseTuple(memory, "dddd:memory", &m->limit_bytes, &m->row_bytes, &m->pair_bytes, &m->context_bytes) ? 0 : -1;
}

static PyObject *
plan_object(const tp_slice_plan *plan)
{
    PyObject *groups = PyList_New(plan->groups);
    for (int g = 0; groups != NULL && g < plan->groups; g++) {
        const tp_slice_group *group = &plan->group[g];
        PyObject *lengths = tp_py_ints(plan->length + group->first, group->slices);
        PyObject *pair = lengths == NULL ? NULL : Py_BuildValue("(iN)", group->batch, lengths);
        if (pair == NULL)
            Py_CLEAR(groups);
        else
            PyList_SET_ITEM(groups, g, pair);
    }
    if (groups == NULL)
        return NULL;
    return Py_BuildValue("(NddddOLLLLd)", groups, plan->total_s, plan->max_s, plan->latency_s, plan->lower_bound_s,
                         plan->optimal ? Py_True : Py_False, (long long)plan->searches, (long long)plan->small_searches,
                         (long long)plan->edges, (long long)plan->boxes, plan->seconds);
}

static int
check_options(int isa)
{
    if (isa >= TP_SLICE_ISA_AUTO && isa <= TP_SLICE_ISA_AVX512)
        return 0;
    tp_py_invalid_value("isa is %d: 0 (automatic) would be right", isa);
    return -1;
}

int
tp_py_view_costs(PyObject *list, const char *const *names, tp_py_cost *views, tp_slice_cost *costs, Py_ssize_t count)
{
    char place[32];
    for (Py_ssize_t b = 0; b < count; b++) {
        PyOS_snprintf(place, sizeof place, count == 1 ? "t" : "t[%zd]", b + 1);
        const char *name = names != NULL ? names[b] : place;
        if (tp_py_view_cost(PyList_GET_ITEM(list, b), name, &views[b]) < 0)
            return -1;
        if (views[b].cost.units != views[0].cost.units) {
            tp_py_invalid_value("%s has %d units: %d, as %s, would be right", name, views[b].cost.units,
                                views[0].cost.units, names != NULL ? names[0] : "t[1]");
            return -1;
        }
        costs[b] = views[b].cost;
    }
    return 0;
}

/* Of `count` costs, n + 1 doubles each for tp_slice_cost_check_least; NULL where there is no memory: then without. */
static double *
take_least(const tp_slice_cost *costs, Py_ssize_t count)
{
    return costs[0].table == NULL ? NULL : malloc((size_t)count * ((size_t)costs[0].units + 1) * sizeof(double));
}

static tp_status
check_and_plan(tp_slice_cost *costs, double *least, Py_ssize_t count, int batch, int flush, const tp_slice_options *options,
               tp_slice_plan *plan, int *flush_of, int *flushes)
{
    char name[32];
    for (Py_ssize_t b = 0; b < count; b++) {
        PyOS_snprintf(name, sizeof name, count == 1 ? "t" : "t[%zd]", b + 1);
        if (least != NULL)
            TP_TRY(tp_slice_cost_check_least(&costs[b], name, least + (size_t)b * ((size_t)costs[0].units + 1)));
        else
            TP_TRY(tp_slice_cost_check(&costs[b], name));
    }
    if (options->message != NULL)
        TP_TRY(tp_slice_cost_check(options->message, "comm"));
    if (flushes != NULL)
        return tp_plan_slices_flushed(costs, batch, flush, options, plan, flush_of, flushes);
    return tp_plan_slices(costs, batch, options, plan);
}

PyDoc_STRVAR(plan_slices_doc,
             "plan_slices($module, /, costs, batch, stages, longest=0, widest=0, time_limit_s=0.0, isa=0, comm=None,\n"
             "            memory=None, gap=0.0, flush=0)\n--\n\n"
             "costs: one cost per group size, each a float64 [n + 1, n + 1] array or (G0, G1, a2, a3).\n"
             "comm: the same of the link, batch 1 only. memory: (limit, row, pair, context) bytes. flush: most sequences in\n"
             "flight; 0: all, else the result is a pair of it and the list of sequences in each flush.");
static PyObject *
plan_slices(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"costs", "batch", "stages", "longest", "widest", "time_limit_s",
                            "isa",   "comm",  "memory", "gap",     "flush",  NULL};
    PyObject *list, *comm = NULL, *memory = NULL;
    int batch, isa = 0, flush = 0, flushes = 0;
    tp_slice_options options = {0};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!ii|iidiOOdi:plan_slices", names, &PyList_Type, &list, &batch,
                                     &options.stages, &options.longest, &options.widest, &options.time_limit_s, &isa, &comm,
                                     &memory, &options.gap, &flush) ||
        check_options(isa) < 0 || tp_py_slice_memory(memory, &options.memory) < 0)
        return NULL;
    options.isa = (tp_slice_isa)isa;
    Py_ssize_t count = PyList_GET_SIZE(list), needed = batch;
    if (options.widest > 0 && options.widest < needed)
        needed = options.widest;
    if (flush > 0 && flush < needed)
        needed = flush;
    if (comm != NULL && comm != Py_None && batch != 1)
        return tp_py_invalid_value("batch is %d: with comm, 1 would be right", batch);
    if (count < 1 || count < needed)
        return tp_py_invalid_value("%zd costs: one for each group of 1 to %zd sequences is needed", count,
                                   needed);
    tp_py_cost *views = calloc((size_t)count, sizeof *views);
    tp_slice_cost *costs = calloc((size_t)count, sizeof *costs);
    int *flush_of = calloc(flush > 0 && batch > 0 ? (size_t)batch : 1, sizeof *flush_of);
    tp_py_cost message = {0};
    PyObject *result = NULL;
    if (views == NULL || costs == NULL || flush_of == NULL)
        tp_py_no_memory();
    else if (tp_py_view_costs(list, NULL, views, costs, count) == 0 && view_message(comm, &views[0], &message, &options) == 0) {
        tp_slice_plan plan = {0};
        double *least = take_least(costs, count);
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_py_back(&away, check_and_plan(costs, least, count, batch, flush, &options, &plan, flush_of,
                                                            flush > 0 ? &flushes : NULL));
        free(least);
        result = status == TP_OK ? plan_object(&plan) : tp_py_raise(tp_py_module_state(module), status);
        if (result != NULL && flush > 0)
            result = Py_BuildValue("(NN)", result, tp_py_ints(flush_of, flushes));
        tp_slice_plan_free(&plan);
    }
    tp_py_end_cost(&message);
    free(flush_of);
    for (Py_ssize_t b = 0; views != NULL && b < count; b++)
        tp_py_end_cost(&views[b]);
    free(views);
    free(costs);
    return result;
}

static tp_status
check_and_plan_apart(tp_slice_cost costs[2], double *least, const tp_slice_options *options, tp_slice_plan *plan)
{
    static const char *const names[2] = {"t", "bwd"};
    for (int b = 0; b < 2; b++) /* of other units only where the planner will say so */
        if (least != NULL && costs[0].units == costs[1].units)
            TP_TRY(tp_slice_cost_check_least(&costs[b], names[b], least + (size_t)b * ((size_t)costs[0].units + 1)));
        else
            TP_TRY(tp_slice_cost_check(&costs[b], names[b]));
    if (options->message != NULL)
        TP_TRY(tp_slice_cost_check(options->message, "comm"));
    return tp_plan_slices_apart(&costs[0], &costs[1], options, plan);
}

PyDoc_STRVAR(plan_slices_apart_doc,
             "plan_slices_apart($module, /, forward, backward, stages, longest=0, time_limit_s=0.0, isa=0, comm=None,\n"
             "                  memory=None, gap=0.0)\n--\n\n"
             "Least sum (f + b) + (stages - 1) (max f + max b).");
static PyObject *
plan_slices_apart(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"forward", "backward", "stages", "longest", "time_limit_s", "isa", "comm", "memory",
                            "gap", NULL};
    PyObject *forward, *backward, *comm = NULL, *memory = NULL, *result = NULL;
    int isa = 0;
    tp_slice_options options = {0};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOi|idiOOd:plan_slices_apart", names, &forward, &backward,
                                     &options.stages, &options.longest, &options.time_limit_s, &isa, &comm, &memory,
                                     &options.gap) ||
        check_options(isa) < 0 || tp_py_slice_memory(memory, &options.memory) < 0)
        return NULL;
    options.isa = (tp_slice_isa)isa;
    tp_py_cost views[3] = {0};
    if (tp_py_view_cost(forward, "t", &views[0]) == 0 && tp_py_view_cost(backward, "bwd", &views[1]) == 0 &&
        view_message(comm, &views[0], &views[2], &options) == 0) {
        tp_slice_plan plan = {0};
        tp_slice_cost costs[2] = {views[0].cost, views[1].cost};
        double *least = take_least(costs, 2);
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_py_back(&away, check_and_plan_apart(costs, least, &options, &plan));
        free(least);
        result = status == TP_OK ? plan_object(&plan) : tp_py_raise(tp_py_module_state(module), status);
        tp_slice_plan_free(&plan);
    }
    for (int k = 0; k < 3; k++)
        tp_py_end_cost(&views[k]);
    return result;
}

PyDoc_STRVAR(plan_slice_bound_doc, "plan_slice_bound($module, /, cost, lengths, stages, longest=0, isa=0)\n--\n\n"
                                   "A lower bound on the latency of every slicing; lengths: int32 [M], in units.");
static PyObject *
plan_slice_bound(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"cost", "lengths", "stages", "longest", "isa", NULL};
    PyObject *cost, *lengths, *result = NULL;
    int isa = 0;
    tp_slice_options options = {0};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOi|ii:plan_slice_bound", names, &cost, &lengths, &options.stages,
                                     &options.longest, &isa) ||
        check_options(isa) < 0)
        return NULL;
    options.isa = (tp_slice_isa)isa;
    tp_py_cost view = {0};
    Py_buffer cuts;
    if (tp_py_view(lengths, 'i', 1, 0, "lengths", &cuts) < 0)
        return NULL;
    if (tp_py_view_cost(cost, "t", &view) == 0) {
        double bound = 0.0;
        tp_status status;
        tp_py_away away;
        tp_py_leave(&away);
        status = tp_slice_cost_check(&view.cost, "t");
        if (status == TP_OK)
            status = tp_slice_bound(&view.cost, &options, cuts.buf, (int)cuts.shape[0], &bound);
        status = tp_py_back(&away, status);
        result = status == TP_OK ? PyFloat_FromDouble(bound) : tp_py_raise(tp_py_module_state(module), status);
    }
    tp_py_end_cost(&view);
    PyBuffer_Release(&cuts);
    return result;
}

PyDoc_STRVAR(slice_least_doc, "slice_least($module, /, cost, threshold, queue=0, isa=0)\n--\n\n"
                              "Least sum of slices of at most threshold seconds each, their lengths, and whether the\n"
                              "queue of Monge costs was used (queue: 0 where it pays, 1 where it can be, -1 never).");
static PyObject *
slice_least(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"cost", "threshold", "queue", "isa", NULL};
    PyObject *cost, *result = NULL;
    double threshold, least = 0.0;
    int isa = 0, slices = 0, queued = 0;
    tp_slice_options options = {.stages = 1};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "Od|ii:slice_least", names, &cost, &threshold, &options.queue, &isa) ||
        check_options(isa) < 0)
        return NULL;
    options.isa = (tp_slice_isa)isa;
    tp_py_cost view = {0};
    int *length = NULL;
    if (tp_py_view_cost(cost, "t", &view) == 0) {
        tp_status status;
        length = calloc((size_t)view.cost.units, sizeof *length);
        tp_py_away away;
        tp_py_leave(&away);
        status = length == NULL ? tp_fail(TP_EMEMORY, "no memory for %d slices", view.cost.units)
                                : tp_slice_cost_check(&view.cost, "t");
        if (status == TP_OK)
            status = tp_slice_least(&view.cost, &options, threshold, &least, length, &slices, &queued);
        status = tp_py_back(&away, status);
        result = status == TP_OK ? Py_BuildValue("(dNO)", least, tp_py_ints(length, slices), queued ? Py_True : Py_False)
                                 : tp_py_raise(tp_py_module_state(module), status);
    }
    free(length);
    tp_py_end_cost(&view);
    return result;
}

PyDoc_STRVAR(plan_balance_doc,
             "plan_balance($module, /, times, stages)\n--\n\ntimes: float64 [n], seconds -> [stages + 1] boundaries.");
static PyObject *
plan_balance(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"times", "stages", NULL};
    PyObject *times, *result = NULL;
    Py_buffer view;
    int stages;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "Oi:plan_balance", names, &times, &stages) ||
        tp_py_view(times, 'd', 1, 0, "times", &view) < 0)
        return NULL;
    Py_ssize_t room = stages < view.shape[0] ? stages : view.shape[0]; /* more stages than blocks are refused */
    int *boundary = calloc(room > 0 ? (size_t)room + 1 : 1, sizeof *boundary);
    if (boundary == NULL)
        tp_py_no_memory();
    else if (view.shape[0] > INT32_MAX)
        tp_py_invalid_value("times has more than 2^31 - 1 values");
    else {
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_py_back(&away, tp_plan_balance(view.buf, (int)view.shape[0], stages, boundary));
        if (status != TP_OK)
            tp_py_raise(tp_py_module_state(module), status);
        else
            result = tp_py_ints(boundary, stages + 1);
    }
    free(boundary);
    PyBuffer_Release(&view);
    return result;
}

int
tp_py_add_planners(PyObject *module, tp_py_state *state)
{
    static PyMethodDef methods[] = {
        {"plan_slices", (PyCFunction)(void (*)(void))plan_slices, METH_VARARGS | METH_KEYWORDS, plan_slices_doc},
        {"plan_slices_apart", (PyCFunction)(void (*)(void))plan_slices_apart, METH_VARARGS | METH_KEYWORDS,
         plan_slices_apart_doc},
        {"plan_slice_bound", (PyCFunction)(void (*)(void))plan_slice_bound, METH_VARARGS | METH_KEYWORDS,
         plan_slice_bound_doc},
        {"slice_least", (PyCFunction)(void (*)(void))slice_least, METH_VARARGS | METH_KEYWORDS, slice_least_doc},
        {"plan_balance", (PyCFunction)(void (*)(void))plan_balance, METH_VARARGS | METH_KEYWORDS, plan_balance_doc},
        {NULL, NULL, 0, NULL},
    };
    (void)state;
    return PyModule_AddFunctions(module, methods);
}
