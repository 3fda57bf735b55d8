/* The judge of plans (csrc/plan/judge.h) for Python: a capsule with its costs and with what the engine needs to count a program's
 * bytes. terapipe_c/planning/judge.py is the only user. */
#include "csrc/py/cost.h"

#include <stdlib.h>

#include "csrc/base/deadline.h"
#include "csrc/engine/engine.h"
#include "csrc/plan/judge.h"
#include "csrc/py/device.h"
#include "csrc/py/model.h"
#include "csrc/py/program.h"

#define CAPSULE "terapipe_c._core.judge"

typedef struct {
    tp_py_pack pack;
    Py_buffer kinds, recompute, far;
    PyObject *provider; /* kept alive */
    tp_judge_request request;
    tp_judge *judge;
    int busy;
    /* Memory: what tp_engine_bytes is asked with; of the latest descent, its limit and nearest miss. */
    tp_engine_config config;
    int64_t limit, short_bytes, needed;
    int32_t rank;
    int missed;
    int64_t *bytes; /* [ranks] */
} holder;

static void
holder_close(holder *h)
{
    tp_judge_close(h->judge);
    if (h->kinds.obj != NULL)
        PyBuffer_Release(&h->kinds);
    if (h->recompute.obj != NULL)
        PyBuffer_Release(&h->recompute);
    if (h->far.obj != NULL)
        PyBuffer_Release(&h->far);
    tp_py_pack_close(&h->pack);
    Py_XDECREF(h->provider);
    free(h->bytes);
    free(h);
}

static void
capsule_close(PyObject *capsule)
{
    holder_close(PyCapsule_GetPointer(capsule, CAPSULE));
}

/* (model, provider or None, dtype or None, replicas, shards, at_once) */
static int
memory_open(tp_py_state *state, PyObject *tuple, holder *h)
{
    PyObject *model, *provider;
    const char *dtype;
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 6)
        return tp_py_invalid_type("memory: a tuple of six would be right"), -1;
    if (!PyArg_ParseTuple(tuple, "OOzipp", &model, &provider, &dtype, &h->config.replicas, &h->config.shards, &h->request.at_once))
        return -1;
    h->config.device.threads = 1;
    if (tp_py_model(state, model, &h->config.model) < 0 ||
        tp_py_device(provider, dtype, &h->config.provider, &h->config.device) < 0)
        return -1;
    if (tp_model_blocks(&h->config.model) != h->request.blocks)
        return tp_py_invalid_value("the model has %d blocks, kinds are of %d", tp_model_blocks(&h->config.model),
                                   h->request.blocks), -1;
    h->provider = Py_NewRef(provider);
    h->request.keeps_keys = h->config.provider->stage->keeps_keys;
    return 0;
}

/* tp_judge_guest of a holder, as the engine would send it. */
static tp_status
size_guest(void *context, int first, int end, int32_t batch, int32_t seq_len, const uint8_t *recompute, int64_t *bytes)
{
    tp_engine_config config = ((const holder *)context)->config;
    config.saves = recompute;
    return tp_engine_size_guest(&config, first, end, batch, seq_len, bytes);
}

static int
request_open(tp_py_state *state, PyObject *args, holder *h)
{
    PyObject *pack, *kinds, *memory, *recompute, *apart;
    tp_judge_costs *c = &h->request.costs;
    if (!PyArg_ParseTuple(args, "O(ddddddddpp)(dddd)(dd)(dd)(ddd)(ddd)p(dddd)OiipOO(ddO):judge_open", &pack, &c->latency_s, &c->byte_s,
                          &c->copy_byte_s, &c->read_byte_s, &c->row_bytes, &c->tied_latency_s, &c->tied_row_s,
                          &c->tied_values_s, &c->whole_weights, &c->lent,
                          &c->update_s, &c->update_param_s,
                          &c->update_head_s, &c->copied, &c->ring_s[0], &c->ring_param_s[0], &c->ring_s[1], &c->ring_param_s[1],
                          &c->gather_s[0], &c->gather_param_s[0], &c->spared_param_s[0],
                          &c->gather_s[1], &c->gather_param_s[1], &c->spared_param_s[1], &c->beside,
                          &c->params[0], &c->params[1], &c->params[2], &c->params[3], &kinds, &h->request.ranks,
                          &h->request.chunks, &h->request.tied, &memory, &recompute, &c->far_latency_s, &c->far_byte_s, &apart))
        return -1;
    if (tp_py_pack_open(state, pack, &h->pack) < 0 || tp_py_view(kinds, 'i', 1, 0, "kinds", &h->kinds) < 0)
        return -1;
    c->cost = &h->pack.cost;
    h->request.kind = h->kinds.buf;
    h->request.blocks = h->kinds.shape[0] > INT32_MAX ? INT32_MAX : (int)h->kinds.shape[0];
    if (recompute != Py_None) {
        if (PyObject_GetBuffer(recompute, &h->recompute, PyBUF_SIMPLE) < 0)
            return -1;
        if (h->recompute.len != h->kinds.shape[0])
            return tp_py_invalid_value("recompute: a byte for each block would be right"), -1;
        h->request.recompute = h->recompute.buf;
    }
    if (apart != Py_None) {
        if (PyObject_GetBuffer(apart, &h->far, PyBUF_SIMPLE) < 0)
            return -1;
        if (h->far.len != h->request.ranks)
            return tp_py_invalid_value("apart: a byte for each rank would be right"), -1;
        c->far = h->far.buf;
    }
    h->request.guest = size_guest;
    h->request.context = h;
    return memory_open(state, memory, h);
}

PyDoc_STRVAR(open_doc, "judge_open($module, pack, messages, updates, ring, ring_of_copies, shards, shards_of_copies, beside, params,\n"
                       "           kinds, ranks, chunks, tied, memory, recompute, apart, /)\n"
                       "--\n\nA judge of plans. messages: (latency_s, byte_s, copy_byte_s, "
                       "read_byte_s, row_bytes, tied_latency_s, tied_row_s, tied_values_s, whole_weights, lent); "
                       "updates: (s, param_s, head_s, copied); ring: (s, param_s) of the replicas' sum, and where each has two copies of the "
                       "model; shards: (s, param_s) of values that replicas gather who shard the optimizer, and by parameter what others update; beside: those of one copy go beside the work, but for embedding and head; params of a block of each kind; kinds "
                       "int32 [blocks]; memory: (model, provider, dtype, replicas, shards, at_once); recompute: None or a byte for each block; apart: "
                       "(latency_s, byte_s) of messages between nodes, and None or a byte for each rank, 1 where the next one is on another.");
static PyObject *
judge_open(PyObject *module, PyObject *args)
{
    tp_py_state *state = tp_py_module_state(module);
    holder *h = calloc(1, sizeof *h);
    if (h == NULL)
        return tp_py_no_memory();
    tp_status status = TP_OK;
    PyObject *capsule = NULL;
    if (request_open(state, args, h) == 0) {
        status = tp_judge_open(&h->request, &h->judge);
        if (status == TP_OK && (h->bytes = calloc((size_t)h->request.ranks, sizeof *h->bytes)) == NULL)
            status = tp_fail(TP_EMEMORY, "no memory for a judge of %d ranks", h->request.ranks);
        if (status == TP_OK)
            capsule = PyCapsule_New(h, CAPSULE, capsule_close);
        else
            tp_py_raise(state, status);
    }
    if (capsule == NULL)
        holder_close(h);
    return capsule;
}

/* ---- candidates ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    Py_buffer view[5]; /* boundary, batches, slices, lengths, recompute */
    tp_candidate c;
} given;

/* (order, pending, boundary, batches, slices, lengths); 0, or -1 with an exception. Ended by tp_py_end_views. */
static int
candidate_open(const holder *h, PyObject *tuple, given *g)
{
    static const char *const what[] = {"boundary", "batches", "slices", "lengths"};
    PyObject *array[4];
    if (!PyTuple_Check(tuple))
        return tp_py_invalid_type("candidate: a tuple would be right"), -1;
    if (!PyArg_ParseTuple(tuple, "iiOOOO", &g->c.order, &g->c.pending, &array[0], &array[1], &array[2], &array[3]))
        return -1;
    for (int i = 0; i < 4; i++)
        if (tp_py_view(array[i], 'i', 1, 0, what[i], &g->view[i]) < 0)
            return -1;
    Py_ssize_t micros = g->view[1].shape[0];
    const int32_t *slices = g->view[2].buf;
    int64_t units = 0;
    for (Py_ssize_t q = 0; q < g->view[2].shape[0]; q++)
        units += slices[q] > 0 ? slices[q] : 0;
    if (g->view[0].shape[0] != (Py_ssize_t)h->request.ranks * h->request.chunks + 1 || g->view[2].shape[0] != micros ||
        units != g->view[3].shape[0] || micros > INT32_MAX)
        return tp_py_invalid_value("boundary, batches, slices and lengths do not fit together"), -1;
    g->c.micros = (int32_t)micros;
    g->c.boundary = g->view[0].buf;
    g->c.batches = g->view[1].buf;
    g->c.slices = slices;
    g->c.lengths = g->view[3].buf;
    return 0;
}

/* The candidate's own blocks that are made again; None: the request's. */
static int
recompute_open(const holder *h, PyObject *again, given *g)
{
    if (again == Py_None)
        return 0;
    if (PyObject_GetBuffer(again, &g->view[4], PyBUF_SIMPLE) < 0)
        return -1;
    if (g->view[4].len != h->request.blocks)
        return tp_py_invalid_value("recompute: a byte for each block would be right"), -1;
    g->c.recompute = g->view[4].buf;
    return 0;
}

/* The judge, for this call alone; NULL with an exception. */
static holder *
claim(PyObject *capsule)
{
    holder *h = PyCapsule_GetPointer(capsule, CAPSULE);
    if (h != NULL && h->busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is using this judge: one of each thread's own would be right");
        return NULL;
    }
    if (h != NULL)
        h->busy = 1;
    return h;
}

/* ---- memory -------------------------------------------------------------------------------------------------------------- */

/* bytes[ranks] as the engine would size them: soon, so a program that is there is not given up for it. */
static tp_status
rank_bytes(const holder *h, const tp_program *program, const tp_candidate *c, int64_t *bytes)
{
    tp_slicing *cut = NULL;
    tp_engine_counts counts;
    int32_t batch = 0, seq_len = 0, micros = tp_program_copy_micros(program); /* of the first copy of the model */
    for (int32_t q = 0; q < micros; q++)
        batch += c->batches[q];
    for (int32_t s = 0; s < c->slices[0]; s++)
        seq_len += c->lengths[s];
    TP_TRY(tp_slicing_open(seq_len, batch, micros, c->batches, c->slices, c->lengths, &cut));
    int abandons = tp_deadline_abandon(0);
    tp_engine_config config = h->config;
    config.program = program;
    config.slicing = cut;
    config.partition = c->boundary;
    config.saves = c->recompute != NULL ? c->recompute : h->request.recompute;
    tp_status status = tp_engine_halve(program, cut);
    if (status == TP_OK)
        status = tp_engine_count(program, &counts);
    if (status == TP_OK) {
        config.counts = &counts;
        for (config.rank = 0; status == TP_OK && config.rank < program->ranks; config.rank++) {
            size_t found = 0;
            status = tp_engine_bytes(&config, &found);
            bytes[config.rank] = (int64_t)found;
        }
        tp_engine_counts_close(&counts);
    }
    tp_deadline_abandon(abandons);
    tp_slicing_close(cut);
    return status;
}

/* tp_judge_over of a holder; the fullest rank is the miss. */
static tp_status
over_limit(void *context, const tp_program *program, const tp_candidate *c, int64_t *over)
{
    holder *h = context;
    int64_t most = -1;
    int32_t fullest = 0;
    *over = 0;
    TP_TRY(rank_bytes(h, program, c, h->bytes));
    for (int32_t rank = 0; rank < program->ranks; rank++) {
        *over += h->bytes[rank] > h->limit ? h->bytes[rank] - h->limit : 0;
        if (h->bytes[rank] > most) {
            most = h->bytes[rank];
            fullest = rank;
        }
    }
    if (*over > 0 && (!h->missed || most - h->limit < h->short_bytes)) {
        h->missed = 1;
        h->short_bytes = most - h->limit;
        h->needed = most;
        h->rank = fullest;
    }
    return TP_OK;
}

/* h->bytes as a list; NULL with an exception. */
static PyObject *
bytes_out(const holder *h)
{
    PyObject *list = PyList_New(h->request.ranks);
    for (int r = 0; list != NULL && r < h->request.ranks; r++) {
        PyObject *bytes = PyLong_FromLongLong(h->bytes[r]);
        if (bytes == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, r, bytes);
    }
    return list;
}

/* The call that judge_run and judge_compute are. */
static PyObject *
program_of(PyObject *module, PyObject *args, int whole)
{
    PyObject *capsule, *tuple, *again = Py_None, *result = NULL;
    holder *h;
    given g = {0};
    if (!PyArg_ParseTuple(args, whole ? "OO|Op:judge_run" : "OO:judge_compute", &capsule, &tuple, &again, &g.c.at_once) ||
        (h = claim(capsule)) == NULL)
        return NULL;
    tp_py_state *state = tp_py_module_state(module);
    if (candidate_open(h, tuple, &g) == 0 && recompute_open(h, again, &g) == 0) {
        tp_program *program = NULL;
        double seconds = 0.0;
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = whole ? tp_judge_run(h->judge, &g.c, &program, &seconds) : tp_judge_compute(h->judge, &g.c, &program);
        if (whole && status == TP_OK)
            status = rank_bytes(h, program, &g.c, h->bytes);
        status = tp_py_back(&away, status);
        if (status != TP_OK) {
            tp_program_close(program); /* a signal's handler may have raised in spite of it */
            tp_py_raise(state, status);
        } else if (whole)
            result = Py_BuildValue("NdNL", tp_py_program_wrap(state, program), seconds, bytes_out(h),
                                   (long long)tp_judge_work(h->judge));
        else
            result = tp_py_program_wrap(state, program);
    }
    tp_py_end_views(g.view, 5);
    h->busy = 0;
    return result;
}

PyDoc_STRVAR(run_doc, "judge_run($module, judge, candidate, recompute=None, at_once=False, /)\n--\n\n"
                      "(the program that the engine would run, its seconds, bytes of each rank, the judge's work so far). "
                      "candidate: (order, pending, boundary [stages + 1], batches [micros], slices [micros], lengths [units]), arrays "
                      "int32. recompute: a byte for each block, and at_once, instead of what judge_open was given.");
static PyObject *
judge_run(PyObject *module, PyObject *args)
{
    return program_of(module, args, 1);
}

PyDoc_STRVAR(compute_doc, "judge_compute($module, judge, candidate, /)\n--\n\nThe candidate's schedule alone.");
static PyObject *
judge_compute(PyObject *module, PyObject *args)
{
    return program_of(module, args, 0);
}

/* ---- descent ------------------------------------------------------------------------------------------------------------- */

static PyObject *
slicing_out(const tp_candidate *c)
{
    PyObject *list = PyList_New(c->micros);
    const int32_t *lengths = c->lengths;
    for (int32_t q = 0; list != NULL && q < c->micros; lengths += c->slices[q++]) {
        PyObject *one = PyTuple_New(c->slices[q]);
        for (int32_t s = 0; one != NULL && s < c->slices[q]; s++) {
            PyObject *length = PyLong_FromLong(lengths[s]);
            if (length == NULL)
                Py_CLEAR(one);
            else
                PyTuple_SET_ITEM(one, s, length);
        }
        PyObject *micro = one == NULL ? NULL : Py_BuildValue("iN", (int)c->batches[q], one);
        if (micro == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, q, micro);
    }
    return list;
}

static PyObject *
descended_out(const holder *h, const tp_descended *end)
{
    PyObject *miss = Py_None;
    if (h->missed)
        miss = Py_BuildValue("LiL", (long long)h->short_bytes, (int)h->rank, (long long)h->needed);
    return Py_BuildValue("NNdNLLN", tp_py_ints(end->plan.boundary, h->request.ranks * h->request.chunks + 1),
                         slicing_out(&end->plan), end->makespan_s, bytes_out(h), (long long)end->over,
                         (long long)tp_judge_work(h->judge), h->missed ? miss : Py_NewRef(miss));
}

PyDoc_STRVAR(descend_doc, "judge_descend($module, judge, candidate, seconds, limit, unit, fixed_stages, fixed_slices, work, "
                          "beside, /)\n--\n\n"
                          "Down by single moves from a candidate that takes so many seconds, within limit bytes a rank (-1: any): "
                          "(boundary, slicing, seconds, bytes of each rank, bytes over the limit, the judge's work so far, None or the nearest miss: "
                          "bytes short, rank, bytes needed).");
static PyObject *
judge_descend(PyObject *module, PyObject *args)
{
    PyObject *capsule, *tuple, *result = NULL;
    double seconds;
    long long limit, work, beside;
    tp_descent descent = {0};
    holder *h;
    if (!PyArg_ParseTuple(args, "OOdLippLL:judge_descend", &capsule, &tuple, &seconds, &limit, &descent.unit, &descent.fixed_stages,
                          &descent.fixed_slices, &work, &beside) ||
        (h = claim(capsule)) == NULL)
        return NULL;
    tp_py_state *state = tp_py_module_state(module);
    given g = {0};
    descent.work = work;
    descent.beside = beside;
    descent.over = limit >= 0 ? over_limit : NULL;
    h->limit = limit;
    h->missed = 0;
    descent.context = h;
    if (candidate_open(h, tuple, &g) == 0) {
        tp_descended end = {0};
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_judge_descend(h->judge, &g.c, seconds, &descent, &end);
        if (status == TP_OK)
            status = rank_bytes(h, end.program, &end.plan, h->bytes);
        status = tp_py_back(&away, status);
        if (status != TP_OK)
            tp_py_raise(state, status);
        else
            result = descended_out(h, &end);
        tp_descended_close(&end);
    }
    tp_py_end_views(g.view, 5);
    h->busy = 0;
    return result;
}

int
tp_py_add_judge(PyObject *module, tp_py_state *state)
{
    static PyMethodDef methods[] = {
        {"judge_open", judge_open, METH_VARARGS, open_doc},
        {"judge_run", judge_run, METH_VARARGS, run_doc},
        {"judge_compute", judge_compute, METH_VARARGS, compute_doc},
        {"judge_descend", judge_descend, METH_VARARGS, descend_doc},
        {NULL, NULL, 0, NULL},
    };
    (void)state;
    return PyModule_AddFunctions(module, methods);
}
