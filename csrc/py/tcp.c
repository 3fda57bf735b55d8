/* _core.tcp_comm: a communicator between processes of one or many machines. */
#include "csrc/py/comm.h"

#include <math.h>

#include "csrc/comm/tcp.h"

static int
fill(tp_tcp_config *config, double meeting_s, double timeout_s, double silent_s, Py_ssize_t gather_bytes, const Py_buffer *pairs)
{
    if (!(meeting_s > 0 && meeting_s < 1e9) || !(timeout_s >= 0 && timeout_s < 1e9)) {
        PyObject *one = PyFloat_FromDouble(meeting_s), *other = PyFloat_FromDouble(timeout_s);
        if (one != NULL && other != NULL)
            tp_py_invalid_value("meeting_s is %S and timeout_s %S: seconds above 0, and 0 (none) or more, would be right",
                                one, other);
        Py_XDECREF(one);
        Py_XDECREF(other);
        return -1;
    }
    if (!(silent_s > 0 && silent_s < 1e9)) {
        PyObject *one = PyFloat_FromDouble(silent_s);
        if (one != NULL)
            tp_py_invalid_value("silent_s is %S: seconds above 0 would be right", one);
        Py_XDECREF(one);
        return -1;
    }
    if (config->ranks < 1 || config->ranks > TP_TCP_RANKS || pairs->len != (Py_ssize_t)config->ranks * config->ranks ||
        gather_bytes < 0) {
        tp_py_invalid_value("a region of %d ranks, %zd pairs, max_gather_bytes %zd: 1 to %d ranks, ranks * ranks pairs and 0 "
                            "bytes or more would be right", config->ranks, pairs->len, gather_bytes, TP_TCP_RANKS);
        return -1;
    }
    config->pairs = pairs->buf;
    config->max_gather_bytes = (size_t)gather_bytes;
    config->meeting_ns = (int64_t)ceil(meeting_s * 1e9);
    config->timeout_ns = (int64_t)ceil(timeout_s * 1e9);
    config->silent_ns = (int64_t)ceil(silent_s * 1e9);
    return 0;
}

static PyObject *
tcp_comm(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"region", "rank", "host", "port", "pairs", "max_gather_bytes", "ports", "token", "version", "plan",
                            "meeting_s", "timeout_s", "silent_s", NULL};
    PyObject *region, *pairs;
    Py_ssize_t gather_bytes;
    double meeting_s = 60, timeout_s = 0, silent_s = TP_TCP_SILENT_NS * 1e-9;
    tp_tcp_config config = {.ports = 1, .token = "", .version = "", .plan = ""};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OisiOn|isssddd:tcp_comm", names, &region, &config.rank, &config.host,
                                     &config.port, &pairs, &gather_bytes, &config.ports, &config.token, &config.version,
                                     &config.plan, &meeting_s, &timeout_s, &silent_s))
        return NULL;
    tp_py_state *state = tp_py_module_state(module);
    if (!PyObject_TypeCheck(region, state->region)) /* nor a Comm, which has one: what is made here keeps it as its own */
        return tp_py_invalid_type("region is %s: a terapipe_c._core.Region would be right", Py_TYPE(region)->tp_name);
    tp_region *shared = tp_py_region_of(region);
    Py_buffer view;
    if (shared == NULL || tp_py_view(pairs, 'B', -1, 0, "pairs", &view) < 0)
        return NULL;
    config.ranks = tp_region_ranks(shared);
    PyObject *result = NULL;
    if (fill(&config, meeting_s, timeout_s, silent_s, gather_bytes, &view) == 0) {
        tp_comm *comm = NULL;
        tp_status status;
        Py_BEGIN_ALLOW_THREADS
        status = tp_comm_open_tcp(&config, shared, &comm);
        Py_END_ALLOW_THREADS
        if (status == TP_EABORTED)
            PyErr_CheckSignals(); /* Ctrl-C, which a watch made an abort: its exception is the one to raise, and from here */
        result = status == TP_OK ? tp_py_comm_wrap(state, region, NULL, comm) : tp_py_raise(state, status);
    }
    PyBuffer_Release(&view);
    return result;
}

static PyMethodDef functions[] = {
    {"tcp_comm", (PyCFunction)(void (*)(void))tcp_comm, METH_VARARGS | METH_KEYWORDS,
     "tcp_comm($module, /, region, rank, host, port, pairs, max_gather_bytes, ports=1, token='', version='', plan='', "
     "meeting_s=60.0, timeout_s=0.0, silent_s=30.0)\n--\n\n"
     "-> a Comm over TCP, once all ranks have met. region: this process's own, without rings. Rank 0 listens at the first\n"
     "free one of port .. port + ports - 1 of host. token, version, plan: at most 63 bytes, the same on all ranks.\n"
     "silent_s: a rank whose machine has not answered for so long ends the run."},
    {NULL, NULL, 0, NULL},
};

int
tp_py_add_tcp(PyObject *module, tp_py_state *state)
{
    (void)state;
    return PyModule_AddFunctions(module, functions);
}
