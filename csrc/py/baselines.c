/* The baselines for Python: arrays in, one tuple out; terapipe_c/planners/baselines.py gives the fields their names. */
#include "csrc/py/module.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/plan/baselines.h"

enum { FORWARD, BACKWARD, STATIC, ACTIVATION, TRANSIENT, RECOMPUTE, PARAMS, ARRAYS };

static PyObject *
doubles(tp_py_state *state, const double *values, int count)
{
    Py_ssize_t shape = count;
    double *copy = malloc((size_t)(count > 0 ? count : 1) * sizeof *copy);
    if (copy == NULL)
        return tp_py_no_memory();
    memcpy(copy, values, (size_t)count * sizeof *copy);
    return tp_py_array(state, copy, 'd', 1, &shape);
}

static PyObject *
plan_object(tp_py_state *state, const tp_chain *chain, const tp_chain_plan *plan)
{
    PyObject *parts[] = {
        tp_py_ints(plan->boundary, plan->stages + 1),
        tp_py_ints(plan->replica, plan->stages),
        PyBytes_FromStringAndSize((const char *)plan->action, chain->blocks),
        doubles(state, plan->time_s, plan->stages),
        doubles(state, plan->peak_bytes, plan->stages),
    };
    int whole = 1;
    for (size_t k = 0; k < sizeof parts / sizeof parts[0]; k++)
        whole = whole && parts[k] != NULL;
    if (whole)
        return Py_BuildValue("(NNNNNidddLd)", parts[0], parts[1], parts[2], parts[3], parts[4], plan->pivot,
                             plan->objective_s, plan->step_time_s, plan->lower_bound_s, (long long)plan->steps,
                             plan->seconds);
    for (size_t k = 0; k < sizeof parts / sizeof parts[0]; k++)
        Py_XDECREF(parts[k]);
    return NULL;
}

static tp_status
plan_by(const char *planner, const tp_chain *chain, int stages, int option, double swap_Bps, tp_chain_plan *plan)
{
    if (strcmp(planner, "uniform") == 0)
        return tp_plan_uniform(chain, stages, plan);
    if (strcmp(planner, "merak") == 0)
        return tp_plan_merak(chain, stages, option, plan);
    if (strcmp(planner, "pipedream") == 0)
        return tp_plan_pipedream(chain, stages, option, plan);
    if (strcmp(planner, "dapple") == 0)
        return tp_plan_dapple(chain, stages, option, plan);
    if (strcmp(planner, "vpipe") == 0)
        return tp_plan_vpipe(chain, stages, swap_Bps, plan);
    if (strcmp(planner, "adapipe") == 0)
        return tp_plan_adapipe(chain, stages, plan);
    return tp_fail(TP_EVALUE, "planner is '%s': uniform, merak, pipedream, dapple, vpipe or adapipe would be right", planner);
}

/* Views of the arrays that are not None, all of as many values. */
static int
view_arrays(PyObject *tuple, Py_buffer view[ARRAYS], const double *values[ARRAYS], int *blocks)
{
    static const char *const names[] = {"fwd", "bwd", "static_bytes", "activation_bytes", "transient_bytes", "recompute_s",
                                        "param_bytes"};
    for (int k = 0; k < ARRAYS; k++) {
        PyObject *object = PyTuple_GET_ITEM(tuple, k);
        values[k] = NULL;
        if (k > BACKWARD && object == Py_None)
            continue;
        if (tp_py_view(object, 'd', 1, 0, names[k], &view[k]) < 0)
            return -1;
        values[k] = view[k].buf;
        if (view[k].shape[0] > 1 << 20 || (k > FORWARD && view[k].shape[0] != *blocks)) {
            if (k == FORWARD)
                tp_py_invalid_value("fwd has %zd values: at most 2^20 are possible", view[k].shape[0]);
            else
                tp_py_invalid_value("%s has %zd values: %d, as many as fwd, would be right", names[k], view[k].shape[0],
                                    *blocks);
            return -1;
        }
        *blocks = (int)view[k].shape[0];
    }
    return 0;
}

PyDoc_STRVAR(plan_baseline_doc,
             "plan_baseline($module, /, planner, arrays, stages, micros, comm_s, blocking, limit_bytes, bandwidth_Bps, option, "
             "swap_Bps, in_flight)\n--\n\n"
             "arrays: fwd, bwd, static_bytes, activation_bytes, transient_bytes, recompute_s, param_bytes; from the third on "
             "None is possible. option: Merak's shards; straight, of PipeDream and DAPPLE.");
static PyObject *
plan_baseline(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"planner", "arrays", "stages", "micros", "comm_s", "blocking", "limit_bytes", "bandwidth_Bps",
                            "option", "swap_Bps", "in_flight", NULL};
    const char *planner;
    PyObject *arrays, *in_flight, *result = NULL;
    tp_chain chain = {0};
    Py_buffer view[ARRAYS + 1] = {0};
    const void *held = NULL;
    const double *values[ARRAYS];
    int stages, option;
    double swap_Bps;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "sO!iidpddidO:plan_baseline", names, &planner, &PyTuple_Type, &arrays,
                                     &stages, &chain.micros, &chain.comm_s, &chain.blocking, &chain.limit_bytes,
                                     &chain.bandwidth_Bps, &option, &swap_Bps, &in_flight))
        return NULL;
    if (PyTuple_GET_SIZE(arrays) != ARRAYS)
        return tp_py_invalid_value("%zd arrays: %d are needed", PyTuple_GET_SIZE(arrays), (int)ARRAYS);
    if (view_arrays(arrays, view, values, &chain.blocks) == 0 &&
        tp_py_view_optional(in_flight, 'i', stages, "in_flight", &view[ARRAYS], &held) == 0) {
        tp_chain_plan plan = {0};
        chain.forward_s = values[FORWARD], chain.backward_s = values[BACKWARD];
        chain.static_bytes = values[STATIC], chain.activation_bytes = values[ACTIVATION];
        chain.transient_bytes = values[TRANSIENT], chain.recompute_s = values[RECOMPUTE];
        chain.param_bytes = values[PARAMS];
        chain.in_flight = held;
        if (chain.static_bytes == NULL || chain.activation_bytes == NULL)
            chain.limit_bytes = 0.0;
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_py_back(&away, plan_by(planner, &chain, stages, option, swap_Bps, &plan));
        tp_py_state *state = tp_py_module_state(module);
        result = status == TP_OK ? plan_object(state, &chain, &plan) : tp_py_raise(state, status);
        tp_chain_plan_free(&plan);
    }
    tp_py_end_views(view, ARRAYS + 1);
    return result;
}

int
tp_py_add_baselines(PyObject *module, tp_py_state *state)
{
    static PyMethodDef methods[] = {
        {"plan_baseline", (PyCFunction)(void (*)(void))plan_baseline, METH_VARARGS | METH_KEYWORDS, plan_baseline_doc},
        {NULL, NULL, 0, NULL},
    };
    (void)state;
    return PyModule_AddFunctions(module, methods);
}
