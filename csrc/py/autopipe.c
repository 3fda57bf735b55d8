/* AutoPipe's planners for Python: plain arrays in, tuples out; terapipe_c/planners/autopipe.py gives them their names. */
#include "csrc/py/module.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/plan/autopipe.h"

enum { FORWARD, BACKWARD, STATIC, ACTIVATION, TRANSIENT, LIMIT, HELD, VIEWS };

typedef struct {
    Py_buffer view[VIEWS];
} views;

/* float64 [length]; what says what fits may be None. */
static int
view_list(PyObject *object, const char *name, Py_ssize_t length, views *v, int which)
{
    if (object == Py_None && which >= STATIC)
        return 0;
    if (tp_py_view(object, 'd', 1, 0, name, &v->view[which]) < 0)
        return -1;
    if (v->view[which].shape[0] == length)
        return 0;
    tp_py_invalid_value("%s has %zd values: %zd would be right", name, v->view[which].shape[0], length);
    return -1;
}

/* fwd and bwd: float64, equally long. Returns how many values, -1 with an exception set. */
static int
view_times(PyObject *forward, PyObject *backward, views *v)
{
    if (tp_py_view(forward, 'd', 1, 0, "fwd", &v->view[FORWARD]) < 0)
        return -1;
    Py_ssize_t n = v->view[FORWARD].shape[0];
    if (n > 1 << 24) {
        tp_py_invalid_value("fwd has %zd values: at most %d are possible", n, 1 << 24);
        return -1;
    }
    return view_list(backward, "bwd", n, v, BACKWARD) < 0 ? -1 : (int)n;
}

static int
view_memory(PyObject *memory, int blocks, int stages, views *v, tp_stage_memory *out)
{
    PyObject *parts[5];
    const void *held = NULL;
    if (!PyTuple_Check(memory)) {
        tp_py_invalid_type("memory is %s: None or a tuple of 5 would be right", Py_TYPE(memory)->tp_name);
        return -1;
    }
    if (!PyArg_ParseTuple(memory, "OOOOO", &parts[0], &parts[1], &parts[2], &parts[3], &parts[4]) ||
        view_list(parts[0], "static_bytes", blocks, v, STATIC) < 0 ||
        view_list(parts[1], "activation_bytes", blocks, v, ACTIVATION) < 0 ||
        view_list(parts[2], "transient_bytes", blocks, v, TRANSIENT) < 0 ||
        view_list(parts[3], "limit_bytes", stages, v, LIMIT) < 0 ||
        tp_py_view_optional(parts[4], 'i', stages, "in_flight", &v->view[HELD], &held) < 0)
        return -1;
    *out = (tp_stage_memory){v->view[STATIC].buf, v->view[ACTIVATION].buf, v->view[TRANSIENT].buf, v->view[LIMIT].buf,
                             held};
    return 0;
}

/* [(op, stage, micro), ...] */
static PyObject *
path_object(const tp_stage_plan *plan)
{
    PyObject *list = PyList_New(plan->path_length);
    for (int i = 0; list != NULL && i < plan->path_length; i++) {
        const tp_f1b_op *op = &plan->path[i];
        PyObject *item = Py_BuildValue("(sii)", op->backward ? "B" : "F", (int)op->stage, (int)op->micro);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, item);
    }
    return list;
}

/* Takes the plan's array. */
static PyObject *
seconds_object(tp_py_state *state, double **list, int stages)
{
    Py_ssize_t shape[] = {stages};
    double *memory = *list;
    *list = NULL;
    return tp_py_array(state, memory, 'd', 1, shape);
}

static PyObject *
plan_object(tp_py_state *state, tp_stage_plan *plan)
{
    PyObject *parts[] = {tp_py_ints(plan->boundary, plan->stages + 1),
                         seconds_object(state, &plan->forward_s, plan->stages),
                         seconds_object(state, &plan->backward_s, plan->stages),
                         seconds_object(state, &plan->bytes, plan->stages), path_object(plan)};
    PyObject *result = NULL;
    if (parts[0] != NULL && parts[1] != NULL && parts[2] != NULL && parts[3] != NULL && parts[4] != NULL)
        result = Py_BuildValue("(OOOOOddOiLLd)", parts[0], parts[1], parts[2], parts[3], parts[4], plan->step_time_s,
                               plan->lower_bound_s, plan->optimal ? Py_True : Py_False, plan->master_stage,
                               (long long)plan->simulations, (long long)plan->nodes, plan->seconds);
    for (int i = 0; i < 5; i++)
        Py_XDECREF(parts[i]);
    return result;
}

PyDoc_STRVAR(plan_autopipe_doc,
             "plan_autopipe($module, /, fwd, bwd, stages, micro_batches, comm_s, blocking, memory, method, "
             "time_limit_s=0.0, effort=0)\n--\n\n"
             "fwd, bwd: float64 [n]. memory: None or (static_bytes [n], activation_bytes [n], transient_bytes [n], "
             "limit_bytes [stages], in_flight [stages]), the first three None or float64, the last None or int32. method: 0 exact, 1 the paper's, 2 pivot, "
             "3 balanced.");
static PyObject *
plan_autopipe(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"fwd",    "bwd",    "stages",       "micro_batches", "comm_s", "blocking",
                            "memory", "method", "time_limit_s", "effort",        NULL};
    PyObject *forward, *backward, *memory;
    int method, blocks;
    long long effort = 0;
    tp_stage_problem problem = {0};
    tp_stage_memory limits;
    tp_autopipe_limits stop = {0};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOiidpOi|dL:plan_autopipe", names, &forward, &backward,
                                     &problem.stages, &problem.micros, &problem.comm_s, &problem.blocking, &memory,
                                     &method, &stop.time_limit_s, &effort))
        return NULL;
    if (method < TP_AUTOPIPE_EXACT || method > TP_AUTOPIPE_BALANCED)
        return tp_py_invalid_value("method is %d: 0 to %d would be right", method, TP_AUTOPIPE_BALANCED);
    stop.effort = effort;
    views v = {0};
    PyObject *result = NULL;
    if ((blocks = view_times(forward, backward, &v)) >= 0 &&
        (memory == Py_None || view_memory(memory, blocks, problem.stages, &v, &limits) == 0)) {
        tp_stage_plan plan;
        problem.blocks = blocks;
        problem.forward_s = v.view[FORWARD].buf;
        problem.backward_s = v.view[BACKWARD].buf;
        problem.memory = memory == Py_None ? NULL : &limits;
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_py_back(&away, tp_plan_autopipe(&problem, (tp_autopipe_method)method, &stop, &plan));
        tp_py_state *state = tp_py_module_state(module);
        result = status == TP_OK ? plan_object(state, &plan) : tp_py_raise(state, status);
        tp_stage_plan_free(&plan);
    }
    tp_py_end_views(v.view, VIEWS);
    return result;
}

PyDoc_STRVAR(plan_slicer_doc, "plan_slicer($module, /, fwd, bwd, micro_batches, comm_s=0.0)\n--\n\n"
                              "fwd, bwd: float64 [stages].");
static PyObject *
plan_slicer(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"fwd", "bwd", "micro_batches", "comm_s", NULL};
    PyObject *forward, *backward, *result = NULL;
    int micros, stages;
    double comm_s = 0.0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOi|d:plan_slicer", names, &forward, &backward, &micros, &comm_s))
        return NULL;
    views v = {0};
    if ((stages = view_times(forward, backward, &v)) >= 0) {
        tp_slicer_plan plan;
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_py_back(&away, tp_plan_slicer(stages, micros, v.view[FORWARD].buf, v.view[BACKWARD].buf, comm_s,
                                                            &plan));
        if (status == TP_OK)
            result = Py_BuildValue("(iddidd)", plan.split, plan.step_time_s, plan.whole_s, plan.algorithm2_split,
                                   plan.algorithm2_s, plan.seconds);
        else
            result = tp_py_raise(tp_py_module_state(module), status);
    }
    tp_py_end_views(v.view, VIEWS);
    return result;
}

PyDoc_STRVAR(sliced_f1b_doc, "sliced_f1b($module, /, fwd, bwd, micro_batches, split, comm_s=0.0)\n--\n\n"
                             "The makespan of 1F1B whose first `split` micro-batches run forward in halves. "
                             "fwd, bwd: float64 [stages].");
static PyObject *
sliced_f1b(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"fwd", "bwd", "micro_batches", "split", "comm_s", NULL};
    PyObject *forward, *backward, *result = NULL;
    int micros, split, stages;
    double comm_s = 0.0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOii|d:sliced_f1b", names, &forward, &backward, &micros, &split,
                                     &comm_s))
        return NULL;
    views v = {0};
    if ((stages = view_times(forward, backward, &v)) >= 0) {
        double makespan;
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_py_back(&away, tp_plan_sliced_f1b(stages, micros, split, v.view[FORWARD].buf,
                                                                v.view[BACKWARD].buf, comm_s, &makespan));
        result = status == TP_OK ? PyFloat_FromDouble(makespan) : tp_py_raise(tp_py_module_state(module), status);
    }
    tp_py_end_views(v.view, VIEWS);
    return result;
}

int
tp_py_add_autopipe(PyObject *module, tp_py_state *state)
{
    static PyMethodDef methods[] = {
        {"plan_autopipe", (PyCFunction)(void (*)(void))plan_autopipe, METH_VARARGS | METH_KEYWORDS, plan_autopipe_doc},
        {"plan_slicer", (PyCFunction)(void (*)(void))plan_slicer, METH_VARARGS | METH_KEYWORDS, plan_slicer_doc},
        {"sliced_f1b", (PyCFunction)(void (*)(void))sliced_f1b, METH_VARARGS | METH_KEYWORDS, sliced_f1b_doc},
        {NULL, NULL, 0, NULL},
    };
    (void)state;
    return PyModule_AddFunctions(module, methods);
}
