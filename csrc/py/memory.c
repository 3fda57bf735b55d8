/* Bytes of engines and stages, before anything is allocated. */
#include "csrc/py/model.h"

#include <stdlib.h>

#include "csrc/base/room.h"
#include "csrc/base/store.h"
#include "csrc/engine/engine.h"
#include "csrc/py/device.h"
#include "csrc/py/program.h"

int
tp_py_saves(PyObject *saves, const tp_model *model, Py_buffer *view)
{
    *view = (Py_buffer){0};
    if (saves == Py_None)
        return 0;
    if (PyObject_GetBuffer(saves, view, PyBUF_SIMPLE) < 0)
        return -1;
    if (view->len == tp_model_blocks(model))
        return 0;
    tp_py_invalid_value("saves has %zd entries: one for each of the %d blocks would be right", view->len,
                        tp_model_blocks(model));
    PyBuffer_Release(view);
    return -1;
}

/* What an engine is asked about its bytes, but its partition. */
typedef struct {
    PyObject *program, *model, *slicing, *provider, *saves;
    const char *dtype;
    tp_engine_config config;
    tp_slicing *cut;
    Py_buffer ways;
} question;

static int
question_open(tp_py_state *state, question *q)
{
    tp_engine_config *config = &q->config;
    config->program = tp_py_program_get(state, q->program, "program");
    if (config->program == NULL || tp_py_model(state, q->model, &config->model) < 0 ||
        tp_py_device(q->provider, q->dtype, &config->provider, &config->device) < 0 ||
        tp_py_saves(q->saves, &config->model, &q->ways) < 0)
        return -1;
    config->saves = q->ways.buf;
    if (tp_py_slicing(state, q->slicing, &q->cut) < 0)
        return -1;
    config->slicing = q->cut;
    tp_status status = tp_engine_halve(config->program, q->cut);
    if (status == TP_OK)
        return 0;
    tp_py_raise(state, status);
    return -1;
}

static void
question_close(question *q)
{
    PyBuffer_Release(&q->ways);
    tp_slicing_close(q->cut);
}

typedef tp_status (*engine_figure)(const tp_engine_config *, size_t *bytes);

/* [ranks]; of a large model each takes its time. */
static PyObject *
figures(tp_py_state *state, tp_engine_config *config, engine_figure figure)
{
    int ranks = config->program->ranks;
    size_t *bytes = malloc((size_t)ranks * sizeof *bytes);
    if (bytes == NULL)
        return tp_py_no_memory();
    tp_status status = TP_OK;
    tp_py_away away;
    tp_py_leave(&away);
    for (config->rank = 0; status == TP_OK && config->rank < ranks; config->rank++)
        status = tp_deadline_told() ? tp_deadline_check_told() : figure(config, &bytes[config->rank]);
    status = tp_py_back(&away, status);
    PyObject *result = status == TP_OK ? PyList_New(ranks) : tp_py_raise(state, status);
    for (int rank = 0; result != NULL && rank < ranks; rank++) {
        PyObject *one = PyLong_FromSize_t(bytes[rank]);
        if (one == NULL)
            Py_CLEAR(result);
        else
            PyList_SET_ITEM(result, rank, one);
    }
    free(bytes);
    return result;
}

/* Of a figure of the engine. */
static PyObject *
of_each_rank(PyObject *module, PyObject *args, PyObject *kwargs, engine_figure figure)
{
    static char *names[] = {"program", "model", "partition", "slicing", "isa", "threads", "provider", "dtype", "saves",
                            "replicas", "shards", NULL};
    PyObject *partition, *result = NULL;
    question q = {.provider = Py_None, .saves = Py_None, .config = {.device = {.threads = 1}}};
    tp_engine_config *config = &q.config;
    int32_t *bounds = NULL;
    Py_ssize_t boundaries;
    tp_py_state *state = tp_py_module_state(module);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO|ziOzOip", names, &q.program, &q.model, &partition, &q.slicing,
                                     &config->device.isa, &config->device.threads, &q.provider, &q.dtype, &q.saves,
                                     &config->replicas, &config->shards))
        return NULL;
    if (question_open(state, &q) < 0 || (bounds = tp_py_int32s(partition, "the partition's boundaries", &boundaries)) == NULL)
        goto done;
    if (boundaries != tp_program_copy_stages(config->program) + 1) {
        tp_py_invalid_value("partition of %zd boundaries: %d would be right", boundaries,
                            tp_program_copy_stages(config->program) + 1);
        goto done;
    }
    config->partition = bounds;
    tp_status status = tp_engine_check(config);
    if (status != TP_OK) {
        tp_py_raise(state, status);
        goto done;
    }
    result = figures(state, config, figure);
done:
    free(bounds);
    question_close(&q);
    return result;
}

static PyObject *
rank_memory(PyObject *module, PyObject *args, PyObject *kwargs)
{
    return of_each_rank(module, args, kwargs, tp_engine_bytes);
}

static PyObject *
lent_bytes(PyObject *module, PyObject *args, PyObject *kwargs)
{
    return of_each_rank(module, args, kwargs, tp_engine_lent_bytes);
}

static PyObject *
swap_bytes(PyObject *module, PyObject *args, PyObject *kwargs)
{
    return of_each_rank(module, args, kwargs, tp_engine_store_bytes);
}

/* Within `high` bytes a rank, the most even; or, where `even` is NULL, what needs least of (low, high]. */
typedef struct {
    const double *even; /* seconds */
    int by_pairs;
    long long low, high;
    double close;
} cut_asked;

static PyObject *
cut_of(tp_py_state *state, const question *q, const cut_asked *asked)
{
    int stages = tp_program_copy_stages(q->config.program), found = 0;
    int32_t *boundary = calloc((size_t)stages + 1, sizeof *boundary);
    if (boundary == NULL)
        return tp_py_no_memory();
    tp_py_away away;
    tp_py_leave(&away);
    tp_status status = asked->even != NULL
                           ? tp_engine_cut(&q->config, asked->high, asked->even, asked->by_pairs, boundary, &found)
                           : tp_engine_cut_least(&q->config, asked->low, asked->high, asked->close, boundary, &found);
    status = tp_py_back(&away, status);
    PyObject *result = status != TP_OK ? tp_py_raise(state, status)
                       : found         ? tp_py_ints(boundary, stages + 1)
                                       : Py_NewRef(Py_None);
    free(boundary);
    return result;
}

static PyObject *
cut_stages(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"program", "model", "slicing", "limit", "seconds", "provider", "dtype", "saves", "replicas", "by_pairs",
                            "shards", NULL};
    PyObject *seconds, *result = NULL;
    question q = {.provider = Py_None, .saves = Py_None, .config = {.device = {.threads = 1}}};
    Py_buffer times = {0};
    cut_asked asked = {0};
    tp_py_state *state = tp_py_module_state(module);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOLO|OzOipp", names, &q.program, &q.model, &q.slicing, &asked.high, &seconds,
                                     &q.provider, &q.dtype, &q.saves, &q.config.replicas, &asked.by_pairs, &q.config.shards))
        return NULL;
    if (question_open(state, &q) < 0 || tp_py_view(seconds, 'd', 1, 0, "seconds", &times) < 0)
        goto done;
    int blocks = tp_model_blocks(&q.config.model);
    asked.even = times.buf;
    if (times.shape[0] != blocks || asked.high < 0)
        tp_py_invalid_value("%zd seconds and a limit of %lld bytes: %d seconds, and bytes from 0 on, would be right", times.shape[0],
                            asked.high, blocks);
    else
        result = cut_of(state, &q, &asked);
done:
    if (times.obj != NULL)
        PyBuffer_Release(&times);
    question_close(&q);
    return result;
}

static PyObject *
cut_least(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"program", "model", "slicing", "low", "high", "close", "provider", "dtype", "saves", "replicas", "shards",
                            NULL};
    PyObject *result = NULL;
    question q = {.provider = Py_None, .saves = Py_None, .config = {.device = {.threads = 1}}};
    cut_asked asked = {0};
    tp_py_state *state = tp_py_module_state(module);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOLLd|OzOip", names, &q.program, &q.model, &q.slicing, &asked.low, &asked.high,
                                     &asked.close, &q.provider, &q.dtype, &q.saves, &q.config.replicas, &q.config.shards))
        return NULL;
    if (question_open(state, &q) == 0)
        result = cut_of(state, &q, &asked);
    question_close(&q);
    return result;
}

static PyObject *
stage_memory(PyObject *module, PyObject *args)
{
    PyObject *model, *slicing, *capsule = Py_None, *saves = Py_None;
    Py_buffer ways = {0};
    const char *dtype = NULL;
    const tp_provider *provider;
    tp_device_config device = {.threads = 1};
    tp_stage_config config = {0};
    tp_slicing *cut = NULL;
    tp_py_state *state = tp_py_module_state(module);
    if (!PyArg_ParseTuple(args, "OOiiii|OzO", &model, &slicing, &config.first_block, &config.last_block,
                          &config.activation_slots, &config.gradient_slots, &capsule, &dtype, &saves))
        return NULL;
    if (tp_py_model(state, model, &config.model) < 0 || tp_py_device(capsule, dtype, &provider, &device) < 0)
        return NULL;
    int blocks = tp_model_blocks(&config.model);
    if (config.first_block < 0 || config.last_block <= config.first_block || config.last_block > blocks ||
        config.activation_slots < 0 || config.gradient_slots < 0) {
        tp_py_invalid_value("blocks [%d, %d) with %d and %d slots: a range within [0, %d) and slots from 0 on would "
                            "be right", config.first_block, config.last_block, config.activation_slots, config.gradient_slots,
                            blocks);
        return NULL;
    }
    if (tp_py_saves(saves, &config.model, &ways) < 0 || tp_py_slicing(state, slicing, &cut) < 0) {
        PyBuffer_Release(&ways);
        return NULL;
    }
    config.slicing = cut;
    config.saves = ways.buf;
    tp_stage_bytes bytes;
    tp_status status = tp_slicing_check(cut, &config.model);
    if (status == TP_OK)
        status = provider->stage->bytes(&config, &device, &bytes);
    PyBuffer_Release(&ways);
    tp_slicing_close(cut);
    return status == TP_OK ? PyLong_FromSize_t(bytes.memory) : tp_py_raise(state, status);
}

static PyObject *
guest_bytes(PyObject *module, PyObject *args)
{
    PyObject *model, *capsule = Py_None, *saves = Py_None;
    Py_buffer ways = {0};
    const char *dtype = NULL;
    tp_engine_config config = {.device = {.threads = 1}};
    tp_py_state *state = tp_py_module_state(module);
    int first, end, batch, seq_len;
    int64_t bytes = 0;
    if (!PyArg_ParseTuple(args, "Oiiii|OzO:guest_bytes", &model, &first, &end, &batch, &seq_len, &capsule, &dtype, &saves))
        return NULL;
    if (tp_py_model(state, model, &config.model) < 0 || tp_py_device(capsule, dtype, &config.provider, &config.device) < 0 ||
        tp_py_saves(saves, &config.model, &ways) < 0)
        return NULL;
    config.saves = ways.buf;
    tp_status status = tp_engine_size_guest(&config, first, end, batch, seq_len, &bytes);
    PyBuffer_Release(&ways);
    if (status != TP_OK)
        return tp_py_raise(state, status), NULL;
    return PyLong_FromLongLong((long long)bytes);
}

static PyObject *
store_time(PyObject *module, PyObject *args)
{
    PyObject *folder;
    Py_ssize_t bytes;
    int rounds;
    tp_py_state *state = tp_py_module_state(module);
    if (!PyArg_ParseTuple(args, "O&ni", PyUnicode_FSConverter, &folder, &bytes, &rounds))
        return NULL;
    const Py_ssize_t shape[] = {rounds, 2};
    double *seconds = rounds > 0 ? calloc(2 * (size_t)rounds, sizeof *seconds) : NULL;
    PyObject *result = NULL;
    if (bytes < 1 || rounds < 1)
        tp_py_invalid_value("%d rounds of %zd bytes: at least one of each would be right", rounds, bytes);
    else if (seconds == NULL)
        tp_py_no_memory();
    else {
        const char *path = PyBytes_AS_STRING(folder);
        tp_status status;
        Py_BEGIN_ALLOW_THREADS
        status = tp_store_time(path, (size_t)bytes, rounds, seconds);
        Py_END_ALLOW_THREADS
        if (status == TP_OK) {
            result = tp_py_array(state, seconds, 'd', 2, shape);
            seconds = NULL;
        } else
            tp_py_raise(state, status);
    }
    free(seconds);
    Py_DECREF(folder);
    return result;
}

static PyObject *
bytes_or_none(size_t bytes)
{
    return bytes == SIZE_MAX ? Py_NewRef(Py_None) : PyLong_FromSize_t(bytes);
}

static PyObject *
memory_room(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *root = NULL;
    tp_room room;
    if (!PyArg_ParseTuple(args, "|O&", PyUnicode_FSConverter, &root))
        return NULL;
    tp_room_look(root == NULL ? "" : PyBytes_AS_STRING(root), &room);
    Py_XDECREF(root);
    return Py_BuildValue("(NNO)", bytes_or_none(room.total), bytes_or_none(room.available), room.grouped ? Py_True : Py_False);
}

/* [stages] of an argument, or NULL with an exception. */
static int32_t *
of_stages(PyObject *object, const char *what, int count)
{
    Py_ssize_t found;
    int32_t *values = tp_py_int32s(object, what, &found);
    if (values == NULL || found == count)
        return values;
    tp_py_invalid_value("%s are %zd: %d would be right", what, found, count);
    free(values);
    return NULL;
}

static PyObject *
least_of(tp_py_state *state, const tp_engine_least_asked *asked)
{
    int64_t bytes = 0;
    tp_py_away away;
    tp_py_leave(&away);
    tp_status status = tp_py_back(&away, tp_engine_least(asked, &bytes));
    return status == TP_OK ? PyLong_FromLongLong((long long)bytes) : tp_py_raise(state, status);
}

static PyObject *
least_memory(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"model", "slicing", "unit", "batch", "ranks", "rank_of", "slots", "replicas", "copies", "saves", "all_saved",
                            "partition", "provider", "dtype", "apart", "shards", NULL};
    PyObject *model, *slicing, *rank_of, *slots, *saves = Py_None, *all = Py_None, *cut = Py_None, *capsule = Py_None, *result = NULL;
    const char *dtype = NULL;
    int32_t *homes = NULL, *held = NULL, *bounds = NULL;
    Py_buffer ways = {0}, most = {0};
    tp_slicing *micros = NULL;
    tp_engine_least_asked asked = {.device = {.threads = 1}};
    Py_ssize_t stages;
    tp_py_state *state = tp_py_module_state(module);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOiiiOOii|OOOOzpp", names, &model, &slicing, &asked.unit, &asked.batch, &asked.ranks,
                                     &rank_of, &slots, &asked.replicas, &asked.copies, &saves, &all, &cut, &capsule, &dtype,
                                     &asked.apart, &asked.shards))
        return NULL;
    if (tp_py_model(state, model, &asked.model) < 0 || tp_py_device(capsule, dtype, &asked.provider, &asked.device) < 0 ||
        tp_py_saves(saves, &asked.model, &ways) < 0 || tp_py_saves(all, &asked.model, &most) < 0 ||
        tp_py_slicing(state, slicing, &micros) < 0 || (homes = tp_py_int32s(rank_of, "the stages' ranks", &stages)) == NULL)
        goto done;
    asked.stages = stages > INT32_MAX ? INT32_MAX : (int)stages;
    if ((held = of_stages(slots, "the stages' slots", asked.stages)) == NULL ||
        (cut != Py_None && (bounds = of_stages(cut, "the partition's boundaries", asked.stages + 1)) == NULL))
        goto done;
    asked.slicing = micros, asked.rank_of = homes, asked.slots = held, asked.partition = bounds;
    asked.saves = ways.buf, asked.all_saved = most.buf;
    result = least_of(state, &asked);
done:
    free(homes), free(held), free(bounds);
    PyBuffer_Release(&ways);
    PyBuffer_Release(&most);
    tp_slicing_close(micros);
    return result;
}

static PyMethodDef functions[] = {
    {"memory_room", memory_room, METH_VARARGS,
     "memory_room($module, root=\"\", /)\n--\n\n-> (bytes that this process could have at any time, bytes now, whether its control "
     "group leaves less than the machine); None where nobody says. root: where proc and sys are."},
    {"store_time", store_time, METH_VARARGS,
     "store_time($module, folder, bytes, rounds, /)\n--\n\n-> float64 [rounds, 2]: seconds of a copy of so many bytes to a file "
     "in folder, as an engine swaps, and back."},
    {"rank_memory", (PyCFunction)(void (*)(void))rank_memory, METH_VARARGS | METH_KEYWORDS,
     "rank_memory($module, /, program, model, partition, slicing, isa=None, threads=1, provider=None, dtype=None, "
     "saves=None, replicas=1, shards=False)\n--\n\n-> [bytes of each rank's engine on its device], exact; nothing is allocated. "
     "replicas: copies of the program that add their gradients; shards: each has a part of AdamW's moments."},
    {"lent_bytes", (PyCFunction)(void (*)(void))lent_bytes, METH_VARARGS | METH_KEYWORDS,
     "lent_bytes($module, /, program, model, partition, slicing, isa=None, threads=1, provider=None, dtype=None, "
     "saves=None, replicas=1, shards=False)\n--\n\n-> [bytes of each rank that its messages leave from], part of rank_memory: the arena that it "
     "has use for."},
    {"swap_bytes", (PyCFunction)(void (*)(void))swap_bytes, METH_VARARGS | METH_KEYWORDS,
     "swap_bytes($module, /, program, model, partition, slicing, isa=None, threads=1, provider=None, dtype=None, "
     "saves=None, replicas=1, shards=False)\n--\n\n-> [bytes that each rank's engine takes outside the device's memory for what it swaps]."},
    {"cut_stages", (PyCFunction)(void (*)(void))cut_stages, METH_VARARGS | METH_KEYWORDS,
     "cut_stages($module, /, program, model, slicing, limit, seconds, provider=None, dtype=None, saves=None, replicas=1, "
     "by_pairs=False, shards=False)\n--\n\n-> [stages + 1] boundaries of the partition within `limit` bytes a rank whose longest stage takes least, or None: there is none. "
     "seconds: float64 [blocks], whole numbers. As exact as tp_engine_cut is."},
    {"cut_least", (PyCFunction)(void (*)(void))cut_least, METH_VARARGS | METH_KEYWORDS,
     "cut_least($module, /, program, model, slicing, low, high, close, provider=None, dtype=None, saves=None, replicas=1, shards=False)\n--\n\n"
     "-> [stages + 1] boundaries of the partition that needs least of a rank, of limits in (low, high], looked for by halves until "
     "they are within `close` of the limit or 64 bytes; None: none was within any limit that was tried."},
    {"least_memory", (PyCFunction)(void (*)(void))least_memory, METH_VARARGS | METH_KEYWORDS,
     "least_memory($module, /, model, slicing, unit, batch, ranks, rank_of, slots, replicas, copies, saves=None, all_saved=None, "
     "partition=None, provider=None, dtype=None, apart=False, shards=False)\n--\n\n-> bytes that the fullest rank takes at least: tp_engine_least of "
     "csrc/engine/engine.h, with its arguments."},
    {"stage_memory", stage_memory, METH_VARARGS,
     "stage_memory($module, model, slicing, first, last, activation_slots, gradient_slots, provider=None, dtype=None, "
     "saves=None, /)\n--\n\n-> bytes that a stage of blocks [first, last) takes, exact, workspace not counted; nothing is allocated."},
    {"guest_bytes", guest_bytes, METH_VARARGS,
     "guest_bytes($module, model, first, last, batch, seq_len, provider=None, dtype=None, saves=None, /)\n--\n\n"
     "-> bytes of a micro-batch's activations on a stage of blocks [first, last), as they go to another rank and back."},
    {NULL, NULL, 0, NULL},
};

int
tp_py_add_memory(PyObject *module, tp_py_state *state)
{
    (void)state;
    return PyModule_AddFunctions(module, functions);
}
