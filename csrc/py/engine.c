/* _core.Engine: one rank's stages and program, driven from Python a step at a time. */
#include "csrc/py/comm.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/engine/engine.h"
#include "csrc/py/device.h"
#include "csrc/py/model.h"
#include "csrc/py/program.h"
#include "csrc/stage/stage.h"

typedef struct {
    PyObject_HEAD PyObject *program, *comm, *provider, *part; /* kept alive */
    tp_py_costs *costs; /* an emulated engine's; it has no slicing */
    tp_slicing *slicing;
    int32_t *partition;
    Py_buffer saves;     /* [blocks] of tp_saves; obj NULL: none */
    PyObject *store;     /* bytes: the folder for what is swapped; NULL: none */
    tp_heap *heap;
    tp_engine *engine;
    tp_region *region; /* the engine's: whose abort ends what it does; NULL: none */
    int sequences; /* of a step: of all copies of the model */
    int busy;       /* a step is running without the GIL */
} engine_object;

/* A path as the file system has it, bytes; None stays out. */
static int
view_store(PyObject *path, void *bytes)
{
    return path == Py_None ? 1 : PyUnicode_FSConverter(path, bytes);
}

static PyObject *
engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"program", "rank", "model",   "partition", "slicing", "comm",
                            "isa",     "threads", "memory_bytes", "provider", "device", "dtype", "eager", "reproducible",
                            "candidates", "staged", "part", "saves", "store", "replicas", "replica", "sums_beside",
                            "shards", NULL};
    PyObject *program, *model, *partition, *slicing, *comm = Py_None, *provider = Py_None, *part = Py_None;
    PyObject *saves = Py_None, *store = NULL;
    const char *dtype = NULL;
    unsigned long long memory = 0;
    tp_engine_config config = {.device = {.threads = 1}};
    tp_py_state *state = PyType_GetModuleState(type);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OiOOO|OziKOizppipOOO&iipp", names, &program, &config.rank, &model, &partition,
                                     &slicing, &comm, &config.device.isa, &config.device.threads, &memory, &provider,
                                     &config.device.device, &dtype, &config.device.eager, &config.device.reproducible,
                                     &config.device.candidates, &config.staged, &part, &saves, view_store, &store,
                                     &config.replicas, &config.replica, &config.sums_beside, &config.shards))
        return NULL;
    engine_object *self = (engine_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_XDECREF(store);
        return NULL;
    }
    self->store = store;
    config.store = store == NULL ? NULL : PyBytes_AS_STRING(store);
    Py_ssize_t boundaries;
    config.program = tp_py_program_get(state, program, "program");
    if (config.program == NULL || tp_py_model(state, model, &config.model) < 0 ||
        tp_py_slicing(state, slicing, &self->slicing) < 0 ||
        (self->partition = tp_py_int32s(partition, "the partition's boundaries", &boundaries)) == NULL ||
        tp_py_saves(saves, &config.model, &self->saves) < 0)
        goto failed;
    config.saves = self->saves.buf;
    int stages = tp_program_copy_stages(config.program);
    if (boundaries != stages + 1) {
        tp_py_invalid_value("the partition has %zd boundaries: %d would be right for %d stages", boundaries, stages + 1, stages);
        goto failed;
    }
    tp_status status = tp_engine_halve(config.program, self->slicing);
    if (status != TP_OK) {
        tp_py_raise(state, status);
        goto failed;
    }
    config.slicing = self->slicing;
    config.partition = self->partition;
    if (comm != Py_None && ((config.comm = tp_py_comm_of(comm)) == NULL || (config.region = tp_py_region_of(comm)) == NULL))
        goto failed;
    if (tp_py_device(provider, dtype, &config.provider, &config.device) < 0 ||
        (part != Py_None && (config.device.partition = PyCapsule_GetPointer(part, TP_PARTITION_CAPSULE)) == NULL))
        goto failed;
    self->part = Py_NewRef(part);
    self->program = Py_NewRef(program);
    self->comm = Py_NewRef(comm);
    self->provider = Py_NewRef(provider);
    self->sequences = config.program->copies * self->slicing->batch;
    status = tp_heap_open(memory, &self->heap);
    if (status == TP_OK) {
        tp_py_away away;
        self->region = config.region;
        if (comm != Py_None && tp_py_comm_hold(comm) < 0)
            goto failed;
        tp_py_leave_rank(&away, config.region);
        status = tp_py_back(&away, tp_engine_open(&config, self->heap, &self->engine));
        if (comm != Py_None)
            tp_py_comm_let_go(comm);
    }
    if (status == TP_OK)
        return (PyObject *)self;
    tp_py_raise(state, status);
failed:
    Py_DECREF(self);
    return NULL;
}

/* A communicator that is closed has let go of the device by itself. */
static void
unbind(engine_object *self)
{
    PyObject *type, *value, *traceback;
    if (self->engine == NULL || !tp_engine_is_bound(self->engine))
        return;
    PyErr_Fetch(&type, &value, &traceback);
    if (tp_py_comm_hold_in_turn(self->comm) == 0) { /* what ends NCCL's communicators waits for other ranks, and may hang */
        Py_BEGIN_ALLOW_THREADS
        tp_engine_unbind(self->engine);
        Py_END_ALLOW_THREADS
        tp_py_comm_let_go(self->comm);
    }
    PyErr_Restore(type, value, traceback);
}

static void
engine_dealloc(PyObject *object)
{
    engine_object *self = (engine_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    unbind(self);
    Py_BEGIN_ALLOW_THREADS /* it may wait for a GPU */
    tp_engine_close(self->engine);
    Py_END_ALLOW_THREADS
    tp_heap_close(self->heap);
    tp_slicing_close(self->slicing);
    free(self->partition);
    PyBuffer_Release(&self->saves);
    Py_XDECREF(self->store);
    if (self->costs != NULL)
        tp_py_costs_close(self->costs);
    free(self->costs);
    Py_XDECREF(self->program);
    Py_XDECREF(self->comm);
    Py_XDECREF(self->provider);
    Py_XDECREF(self->part);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *
engine_emulated(PyObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"program", "rank", "durations", "comm", NULL};
    PyObject *program, *durations, *comm = Py_None;
    int rank;
    tp_py_state *state = PyType_GetModuleState((PyTypeObject *)type);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OiO|O", names, &program, &rank, &durations, &comm))
        return NULL;
    const tp_program *code = tp_py_program_get(state, program, "program");
    engine_object *self = code == NULL ? NULL : (engine_object *)((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
    if (self == NULL)
        return NULL;
    self->costs = calloc(1, sizeof *self->costs);
    if (self->costs == NULL || tp_py_costs_open(code, durations, self->costs) < 0) {
        free(self->costs);
        self->costs = NULL;
        Py_DECREF(self);
        return PyErr_Occurred() ? NULL : tp_py_no_memory();
    }
    self->program = Py_NewRef(program);
    self->comm = Py_NewRef(comm);
    tp_comm *link = comm == Py_None ? NULL : tp_py_comm_of(comm);
    tp_region *region = comm == Py_None ? NULL : tp_py_region_of(comm);
    tp_status status = PyErr_Occurred() || (link != NULL && tp_py_comm_hold(comm) < 0) ? TP_ETYPE : tp_heap_open(0, &self->heap);
    self->region = region;
    if (status == TP_OK)
        status = tp_engine_open_emulated(code, rank, &self->costs->durations, link, region, self->heap, &self->engine);
    if (link != NULL && !PyErr_Occurred())
        tp_py_comm_let_go(comm);
    if (status == TP_OK)
        return (PyObject *)self;
    tp_py_raise(state, status);
    Py_DECREF(self);
    return NULL;
}

static int
engine_claim(engine_object *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "this engine is running a step in another thread");
        return -1;
    }
    self->busy = 1;
    return 0;
}

/* For what talks with other ranks: the engine knows its communicator by a pointer, which closing it frees, as another thread may. */
static int
engine_claim_ranks(engine_object *self)
{
    if (engine_claim(self) < 0)
        return -1;
    if (self->comm == Py_None || tp_py_comm_hold(self->comm) == 0)
        return 0;
    self->busy = 0;
    return -1;
}

static void
engine_leave_ranks(engine_object *self)
{
    self->busy = 0;
    if (self->comm != Py_None)
        tp_py_comm_let_go(self->comm);
}

/* tokens: int32 [batch, seq_len + 1]; None only for an emulated engine. */
static int
view_tokens(engine_object *self, PyObject *tokens, Py_buffer *view)
{
    *view = (Py_buffer){0};
    if (self->slicing == NULL)
        return 0;
    if (tp_py_view(tokens, 'i', 2, 0, "tokens", view) < 0)
        return -1;
    if (view->shape[0] != self->sequences || view->shape[1] != self->slicing->seq_len + 1) {
        tp_py_invalid_value("tokens have shape (%zd, %zd): (%d, %d) would be right", view->shape[0],
                            view->shape[1], self->sequences, self->slicing->seq_len + 1);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

static PyObject *
engine_step(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tokens", "step", "lr", "beta1", "beta2", "eps", "weight_decay", "grad_clip", "update", "stop", NULL};
    engine_object *self = (engine_object *)object;
    PyObject *tokens;
    long long step = 1;
    tp_step_options options = {.adamw = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8}, .update = 1};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|Lddddddpp", names, &tokens, &step, &options.adamw.lr,
                                     &options.adamw.beta1, &options.adamw.beta2, &options.adamw.eps,
                                     &options.adamw.weight_decay, &options.grad_clip, &options.update, &options.stop))
        return NULL;
    options.adamw.step = step;
    Py_buffer view;
    if (view_tokens(self, tokens, &view) < 0)
        return NULL;
    if (engine_claim_ranks(self) < 0) {
        PyBuffer_Release(&view);
        return NULL;
    }
    tp_step_result result = {0};
    tp_py_away away;
    tp_py_leave_rank(&away, self->region);
    tp_status status = tp_py_back(&away, tp_engine_step(self->engine, view.buf, &options, &result));
    engine_leave_ranks(self);
    PyBuffer_Release(&view);
    if (status != TP_OK)
        return tp_py_raise(tp_py_state_of(object), status);
    return Py_BuildValue("(ddOLL)", result.loss, result.grad_norm, result.stop ? Py_True : Py_False,
                         (long long)result.begin_ns, (long long)result.end_ns);
}

static PyObject *
engine_evaluate(PyObject *object, PyObject *tokens)
{
    engine_object *self = (engine_object *)object;
    Py_buffer view;
    double loss = 0;
    tp_py_away away;
    if (self->slicing == NULL)
        return PyErr_Format(PyExc_RuntimeError, "an emulated engine has no loss");
    if (view_tokens(self, tokens, &view) < 0)
        return NULL;
    if (engine_claim_ranks(self) < 0) {
        PyBuffer_Release(&view);
        return NULL;
    }
    tp_py_leave_rank(&away, self->region);
    tp_status status = tp_py_back(&away, tp_engine_evaluate(self->engine, view.buf, &loss));
    engine_leave_ranks(self);
    PyBuffer_Release(&view);
    return status == TP_OK ? PyFloat_FromDouble(loss) : tp_py_raise(tp_py_state_of(object), status);
}

/* ---- parameters --------------------------------------------------------------------------------------------------------------- */

static PyObject *
engine_params(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyObject *list = PyList_New(0);
    tp_engine *engine = ((engine_object *)object)->engine;
    const tp_stage_ops *ops = tp_engine_stage_ops(engine);
    tp_stage *stage;
    int number = 0;
    for (int k = 0; list != NULL && (stage = tp_engine_stage(engine, k, &number)) != NULL; k++)
        for (int i = 0; list != NULL && i < ops->params(stage); i++) {
            PyObject *row = Py_BuildValue("(iii)", number, i, ops->param_index(stage, i));
            if (row == NULL || PyList_Append(list, row) < 0)
                Py_CLEAR(list);
            Py_XDECREF(row);
        }
    return list;
}

static tp_stage *
stage_numbered(PyObject *object, int wanted, int i)
{
    tp_engine *engine = ((engine_object *)object)->engine;
    tp_stage *stage;
    int number;
    for (int k = 0; (stage = tp_engine_stage(engine, k, &number)) != NULL; k++)
        if (number == wanted && i >= 0 && i < tp_engine_stage_ops(engine)->params(stage))
            return stage;
    PyErr_Format(PyExc_IndexError, "this engine holds no tensor %d of stage %d", i, wanted);
    return NULL;
}

static int
parse_state(const char *name, tp_state *out)
{
    static const char *const names[] = {"value", "m", "v", "grad"};
    for (int i = 0; i < 4; i++)
        if (strcmp(name, names[i]) == 0) {
            *out = (tp_state)i;
            return 0;
        }
    tp_py_invalid_value("state is '%s': value, m, v or grad would be right", name);
    return -1;
}

static PyObject *
engine_load(PyObject *object, PyObject *args)
{
    int number, i;
    const char *name;
    PyObject *array;
    tp_state what;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "iisO", &number, &i, &name, &array) || parse_state(name, &what) < 0)
        return NULL;
    tp_stage *stage = stage_numbered(object, number, i);
    if (stage == NULL || tp_py_view(array, 'f', -1, 0, "the tensor", &view) < 0)
        return NULL;
    const tp_stage_ops *ops = tp_engine_stage_ops(((engine_object *)object)->engine);
    int64_t rows, cols;
    tp_status status;
    ops->param_shape(stage, i, &rows, &cols);
    if (view.len != rows * cols * (Py_ssize_t)sizeof(float)) {
        tp_py_invalid_value("the tensor has %zd bytes: %lld x %lld float32 would be right", view.len,
                            (long long)rows, (long long)cols);
        PyBuffer_Release(&view);
        return NULL;
    }
    if (engine_claim((engine_object *)object) < 0) {
        PyBuffer_Release(&view);
        return NULL;
    }
    status = tp_engine_check_abort(((engine_object *)object)->engine);
    Py_BEGIN_ALLOW_THREADS
    if (status == TP_OK)
        status = ops->import(stage, i, what, view.buf);
    Py_END_ALLOW_THREADS
    ((engine_object *)object)->busy = 0;
    PyBuffer_Release(&view);
    if (status != TP_OK)
        return tp_py_raise(tp_py_state_of(object), status);
    Py_RETURN_NONE;
}

static PyObject *
engine_read(PyObject *object, PyObject *args)
{
    int number, i;
    const char *name;
    tp_state what;
    if (!PyArg_ParseTuple(args, "iis", &number, &i, &name) || parse_state(name, &what) < 0)
        return NULL;
    tp_stage *stage = stage_numbered(object, number, i);
    if (stage == NULL)
        return NULL;
    int64_t rows, cols;
    const tp_stage_ops *ops = tp_engine_stage_ops(((engine_object *)object)->engine);
    tp_status status;
    int matrix = ops->param_shape(stage, i, &rows, &cols);
    float *values = malloc((size_t)(rows * cols) * sizeof *values);
    if (values == NULL)
        return tp_py_no_memory();
    if (engine_claim((engine_object *)object) < 0) {
        free(values);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ops->export(stage, i, what, values);
    Py_END_ALLOW_THREADS
    ((engine_object *)object)->busy = 0;
    if (status != TP_OK) {
        free(values);
        return tp_py_raise(tp_py_state_of(object), status);
    }
    Py_ssize_t shape[2] = {rows, cols};
    return tp_py_array(tp_py_state_of(object), values, 'f', matrix ? 2 : 1, matrix ? shape : shape + 1);
}

static PyObject *
engine_pack(PyObject *object, PyObject *unused)
{
    (void)unused;
    tp_engine *engine = ((engine_object *)object)->engine;
    tp_stage *stage;
    int number;
    tp_status status = TP_OK;
    tp_py_away away;
    if (engine_claim((engine_object *)object) < 0)
        return NULL;
    tp_py_leave_rank(&away, ((engine_object *)object)->region);
    for (int k = 0; status == TP_OK && (stage = tp_engine_stage(engine, k, &number)) != NULL; k++)
        status = tp_engine_stage_ops(engine)->pack(stage);
    status = tp_py_back(&away, status);
    ((engine_object *)object)->busy = 0;
    if (status != TP_OK)
        return tp_py_raise(tp_py_state_of(object), status);
    Py_RETURN_NONE;
}

static PyObject *
rows_of(PyObject *object, const tp_event *events, int64_t count)
{
    int64_t *rows = malloc((size_t)(5 * count + 1) * sizeof *rows);
    if (rows == NULL)
        return tp_py_no_memory();
    for (int64_t i = 0; i < count; i++) {
        int64_t row[5] = {events[i].position, events[i].step, events[i].start_ns, events[i].end_ns, events[i].wait_ns};
        memcpy(rows + 5 * i, row, sizeof row);
    }
    Py_ssize_t shape[2] = {(Py_ssize_t)count, 5};
    return tp_py_array(tp_py_state_of(object), rows, 'q', 2, shape);
}

static PyObject *
engine_events(PyObject *object, PyObject *unused)
{
    (void)unused;
    int64_t count;
    const tp_event *events = tp_engine_events(((engine_object *)object)->engine, &count);
    return rows_of(object, events, count);
}

static PyObject *
engine_given(PyObject *object, PyObject *unused)
{
    (void)unused;
    int64_t count;
    const tp_event *events = NULL;
    if (engine_claim((engine_object *)object) < 0)
        return NULL;
    tp_status status = tp_engine_given(((engine_object *)object)->engine, &events, &count);
    ((engine_object *)object)->busy = 0;
    return status == TP_OK ? rows_of(object, events, count) : tp_py_raise(tp_py_state_of(object), status);
}

static PyObject *
engine_memory(PyObject *object, PyObject *unused)
{
    (void)unused;
    tp_heap *heap = ((engine_object *)object)->heap;
    return Py_BuildValue("(KKK)", (unsigned long long)tp_heap_bytes(heap), (unsigned long long)tp_heap_peak_bytes(heap),
                         (unsigned long long)tp_heap_allocations(heap));
}

/* M or V, of which each replica has a part. */
static PyObject *
engine_gather(PyObject *object, PyObject *name)
{
    engine_object *self = (engine_object *)object;
    const char *text = PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : "";
    tp_state what;
    if (text == NULL || parse_state(text, &what) < 0)
        return NULL;
    if (what != TP_STATE_M && what != TP_STATE_V)
        return tp_py_invalid_value("state is %s: m or v would be right", text);
    if (engine_claim(self) < 0)
        return NULL;
    tp_status status;
    Py_BEGIN_ALLOW_THREADS
    status = tp_engine_gather_moments(self->engine, what);
    Py_END_ALLOW_THREADS
    self->busy = 0;
    if (status != TP_OK)
        return tp_py_raise(tp_py_state_of(object), status);
    Py_RETURN_NONE;
}

static PyObject *
engine_caveats(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < 2; i++) {
        const char *text = tp_engine_caveat(((engine_object *)object)->engine, i);
        PyObject *one = *text == 0 ? NULL : PyUnicode_FromString(text);
        if (*text != 0 && (one == NULL || PyList_Append(list, one) < 0))
            Py_CLEAR(list);
        Py_XDECREF(one);
    }
    return list;
}

static PyMethodDef engine_methods[] = {
    {"emulated", (PyCFunction)(void (*)(void))engine_emulated, METH_CLASS | METH_VARARGS | METH_KEYWORDS,
     "emulated($type, /, program, rank, durations, comm=None)\n--\n\nKernels are timed waits; order, messages and waits are "
     "real."},
    {"step", (PyCFunction)(void (*)(void))engine_step, METH_VARARGS | METH_KEYWORDS,
     "step($self, /, tokens, step=1, lr=0.0, beta1=0.9, beta2=0.95, eps=1e-08, weight_decay=0.0, grad_clip=0.0, "
     "update=True, stop=False)\n--\n\n-> (loss, grad_norm, stop, begin_ns, end_ns). tokens: int32 [batch, seq_len + 1]; "
     "None for an emulated engine. step counts from 1."},
    {"evaluate", engine_evaluate, METH_O, "evaluate($self, tokens, /)\n--\n\n-> the mean loss; forwards only."},
    {"params", engine_params, METH_NOARGS,
     "params($self, /)\n--\n\n-> [(virtual stage, i, canonical index), ...] of this rank."},
    {"load", engine_load, METH_VARARGS,
     "load($self, stage, i, state, array, /)\n--\n\nstate: value, m, v or grad; array: float32. pack() after values."},
    {"read", engine_read, METH_VARARGS, "read($self, stage, i, state, /)\n--\n\n-> a float32 array; state as in load."},
    {"gather", engine_gather, METH_O,
     "gather($self, state, /)\n--\n\nSharded moments m or v of all replicas into the gradients' places, where read(.., 'grad') finds "
     "them. All ranks call it between two steps."},
    {"pack", engine_pack, METH_NOARGS,
     "pack($self, /)\n--\n\nMake the layouts that backward multiplies with; after load of values."},
    {"events", engine_events, METH_NOARGS,
     "events($self, /)\n--\n\n-> int64 [instructions, 5] of the last step: position, step, start_ns, end_ns, wait_ns before "
     "start (OPT: within)."},
    {"given", engine_given, METH_NOARGS,
     "given($self, /)\n--\n\n-> int64 [instructions, 5], the last three by the host's clock: when it began and ended to give each to "
     "the device, and when it came to it, 0 where that waits for nothing; kept from the first call on."},
    {"caveats", engine_caveats, METH_NOARGS,
     "caveats($self, /)\n--\n\n-> what works otherwise than it was meant to on this rank, and why, in sentences."},
    {"memory", engine_memory, METH_NOARGS,
     "memory($self, /)\n--\n\n-> (bytes held, high-water mark, allocations so far)."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_methods, engine_methods},
    {Py_tp_doc, "Engine(program, rank, model, partition, slicing, comm=None, isa=None, threads=1, memory_bytes=0, "
                "provider=None, device=0, dtype=None, eager=False, reproducible=False, candidates=0, staged=False, part=None, "
                "saves=None, store=None, replicas=1, replica=0, sums_beside=False, shards=False)\n--\n\n"
                "One rank: its stages, its list of instructions, its memory. provider: a backend module's capsule, None: the "
                "CPU; device: number among the visible ones; dtype: float32 or bf16; eager: capture no graphs; "
                "reproducible: products give a row the same bits whatever is multiplied with it; candidates: algorithms timed "
                "for each product; staged: messages go through the host's memory; part: a " TP_PARTITION_CAPSULE " capsule, a part of the GPU; "
                "saves: a byte for each block: 0 it keeps what its backward needs, 1 makes it again, 2 swaps it to a "
                "file in the folder `store`; replicas: copies of the program on a communicator of all their ranks, copy after copy, "
                "which add their gradients; replica: which of them this rank is in; sums_beside: a thread beside the rank's adds them up; "
                "shards: each has AdamW's moments of a part, and updates that."},
    {0, NULL},
};
static PyType_Spec engine_spec = {"terapipe_c._core.Engine", sizeof(engine_object), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, engine_slots};

int
tp_py_add_engine(PyObject *module, tp_py_state *state)
{
    state->engine = (PyTypeObject *)PyType_FromModuleAndSpec(module, &engine_spec, NULL);
    if (state->engine == NULL || PyModule_AddType(module, state->engine) < 0)
        return -1;
    if (PyModule_AddIntConstant(module, "HEAD_TILE", TP_HEAD_TILE) < 0 ||
        PyModule_AddIntConstant(module, "HEAD_WORTH", TP_HEAD_WORTH) < 0 ||
        PyModule_AddIntConstant(module, "HEAD_HASTE", TP_HEAD_HASTE) < 0 ||
        PyModule_AddIntConstant(module, "WEIGHT_ROWS", TP_WEIGHT_ROWS) < 0 ||
        PyModule_AddIntConstant(module, "ROW_GROUP", TP_ROW_GROUP) < 0)
        return -1;
    return 0;
}
