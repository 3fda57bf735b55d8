/* _core.Region: memory that ranks share. */
#include "csrc/py/region.h"

#include "csrc/sched/sched.h"

#include <limits.h>
#include <unistd.h>

/* PyLong_AsInt is public from Python 3.13 on only. */
static int
as_int(PyObject *number)
{
    long value = PyLong_AsLong(number);
    if (value < INT_MIN || value > INT_MAX) {
        PyErr_Format(PyExc_OverflowError, "%ld does not fit in 32 bits", value);
        return -1;
    }
    return (int)value;
}

static tp_py_region *
region_new(PyTypeObject *type)
{
    tp_py_region *self = (tp_py_region *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->fd = -1;
    return self;
}

static tp_status
region_fill(tp_py_region *self, const tp_region_shape *shape, int shared)
{
    size_t bytes;
    TP_TRY(tp_region_bytes(shape, &bytes));
    self->shared = shared;
    self->ranks = shape->ranks;
    if (shared)
        TP_TRY(tp_shm_create(bytes, &self->fd, &self->memory));
    else
        TP_TRY(tp_local_create(bytes, &self->memory));
    self->bytes = bytes; /* with memory: what dealloc gives back */
    return tp_region_create(self->memory, bytes, shape, &self->region);
}

/* [ranks] of a sequence of whole numbers; NULL and no exception: None. */
static size_t *
arena_sizes(PyObject *given, int ranks)
{
    if (given == Py_None)
        return NULL;
    PyObject *tuple = PySequence_Tuple(given); /* ours: what __index__ of a number does to the caller's is nothing to us */
    size_t *sizes = tuple == NULL ? NULL : PyMem_Calloc((size_t)ranks, sizeof *sizes);
    if (tuple == NULL && PyErr_ExceptionMatches(PyExc_TypeError))
        PyErr_SetString(PyExc_TypeError, "arena_bytes: a sequence of whole numbers would be right");
    else if (tuple != NULL && sizes == NULL)
        tp_py_no_memory();
    else if (tuple != NULL && PyTuple_GET_SIZE(tuple) != ranks)
        tp_py_invalid_value("arena_bytes has %zd elements: %d, one a rank, would be right", PyTuple_GET_SIZE(tuple), ranks);
    for (int rank = 0; tuple != NULL && !PyErr_Occurred() && rank < ranks; rank++) {
        Py_ssize_t bytes = PyNumber_AsSsize_t(PyTuple_GET_ITEM(tuple, rank), PyExc_OverflowError);
        if (bytes < 0 && !PyErr_Occurred())
            tp_py_invalid_value("arena_bytes of rank %d is %zd: 0 or more would be right", rank, bytes);
        sizes[rank] = (size_t)bytes;
    }
    Py_XDECREF(tuple);
    if (PyErr_Occurred()) {
        PyMem_Free(sizes);
        return NULL;
    }
    return sizes;
}

PyDoc_STRVAR(region_create_doc,
             "create($type, ranks, pairs, ring_bytes, max_gather_bytes, shared, arena_bytes=None)\n--\n\n"
             "Make a region. pairs: uint8 [ranks * ranks], pairs[src * ranks + dst] 1 gives that pair a ring of\n"
             "ring_bytes, 1 + h one whose bytes are halved h times. shared: a memfd (.fd) that other processes attach to.\n"
             "arena_bytes: of each rank, what its peers may read in place; None: nothing.");

static PyObject *
region_create(PyObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ranks", "pairs", "ring_bytes", "max_gather_bytes", "shared", "arena_bytes", NULL};
    int ranks, shared;
    PyObject *pairs, *arenas = Py_None;
    Py_ssize_t ring_bytes, gather_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOnnp|O:create", names, &ranks, &pairs, &ring_bytes, &gather_bytes,
                                     &shared, &arenas))
        return NULL;
    Py_buffer view;
    if (tp_py_view(pairs, 'B', -1, 0, "pairs", &view) < 0)
        return NULL;
    tp_py_region *self = NULL;
    size_t *sizes = NULL;
    if (ranks < 1 || ranks > 4096 || view.len != (Py_ssize_t)ranks * ranks)
        tp_py_invalid_value("ranks is %d and pairs has %zd elements: 1 to 4096 ranks and ranks * ranks would be right", ranks,
                            view.len);
    else if (ring_bytes < 0 || gather_bytes < 0)
        tp_py_invalid_value("ring_bytes is %zd and max_gather_bytes %zd: 0 or more would be right",
                            ring_bytes, gather_bytes);
    else if ((sizes = arena_sizes(arenas, ranks)) != NULL || !PyErr_Occurred())
        self = region_new((PyTypeObject *)type);
    if (self != NULL) {
        tp_region_shape shape = {ranks, view.buf, (size_t)ring_bytes, (size_t)gather_bytes, sizes};
        tp_status status;
        Py_BEGIN_ALLOW_THREADS status = region_fill(self, &shape, shared);
        Py_END_ALLOW_THREADS if (status != TP_OK)
        {
            tp_py_raise(tp_py_state_of((PyObject *)self), status);
            Py_CLEAR(self);
        }
    }
    PyMem_Free(sizes);
    PyBuffer_Release(&view);
    return (PyObject *)self;
}

static PyObject *
region_attach(PyObject *type, PyObject *argument)
{
    int fd = as_int(argument);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    tp_py_region *self = region_new((PyTypeObject *)type);
    if (self == NULL)
        return NULL;
    self->shared = 1;
    tp_status status = tp_shm_attach(fd, &self->bytes, &self->memory);
    if (status == TP_OK)
        status = tp_region_attach(self->memory, self->bytes, &self->region);
    if (status == TP_OK) {
        self->ranks = tp_region_ranks(self->region);
        return (PyObject *)self;
    }
    tp_py_raise(tp_py_state_of((PyObject *)self), status);
    Py_DECREF(self);
    return NULL;
}

static PyObject *
region_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    tp_py_region *self = (tp_py_region *)object;
    if (self->fd >= 0)
        close(self->fd);
    self->fd = -1;
    Py_RETURN_NONE;
}

static void
region_dealloc(PyObject *object)
{
    tp_py_region *self = (tp_py_region *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->fd >= 0)
        close(self->fd);
    tp_shm_detach(self->memory, self->bytes);
    type->tp_free(object);
    Py_DECREF(type);
}

static tp_status
status_named(const char *name)
{
    for (int code = TP_OK + 1; code < TP_STATUS_COUNT; code++)
        if (strcmp(name, tp_status_name((tp_status)code)) == 0)
            return (tp_status)code;
    return TP_OK;
}

static PyObject *
region_abort(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"code", "rank", "text", NULL};
    const char *name, *text;
    int rank;
    tp_py_region *self = (tp_py_region *)object;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sis:abort", names, &name, &rank, &text))
        return NULL;
    tp_status code = status_named(name);
    if (code == TP_OK)
        return tp_py_invalid_value("code is '%s': the name of a status, such as 'ERUNTIME', would be right",
                                   name);
    tp_region_abort(self->region, code, rank, text);
    Py_RETURN_NONE;
}

static PyObject *
region_aborted(PyObject *object, PyObject *unused)
{
    (void)unused;
    int rank;
    char text[512];
    tp_status code = tp_region_aborted(((tp_py_region *)object)->region, &rank, text);
    if (code == TP_OK)
        Py_RETURN_NONE;
    /* a text cut at 511 bytes may end inside a character */
    return Py_BuildValue("(siN)", tp_status_name(code), rank,
                         PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace"));
}

static PyObject *
region_tell(PyObject *object, PyObject *argument)
{
    int fd = as_int(argument);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    if (((tp_py_region *)object)->shared)
        return tp_py_invalid_value("this region is of several processes: one of this process alone would be right");
    tp_region_tell(((tp_py_region *)object)->region, fd);
    Py_RETURN_NONE;
}

static int
rank_of(PyObject *argument, const tp_py_region *self)
{
    int rank = as_int(argument);
    if (rank == -1 && PyErr_Occurred())
        return -1;
    if (rank >= 0 && rank < self->ranks)
        return rank;
    tp_py_invalid_value("rank is %d: 0 to %d would be right", rank, self->ranks - 1);
    return -1;
}

PyDoc_STRVAR(
    region_progress_doc,
    "progress($self, rank, /)\n--\n\n(step, op, stage, micro, slice) that the rank runs; op is None where it is\n"
    "between instructions.");

static PyObject *
region_progress(PyObject *object, PyObject *argument)
{
    static const char *const ops[TP_OPS] = {
#define NAME(name) #name,
        TP_OP_MAP(NAME)
#undef NAME
    };
    tp_py_region *self = (tp_py_region *)object;
    int rank = rank_of(argument, self);
    if (rank < 0)
        return NULL;
    uint64_t step, word;
    tp_region_read_progress(self->region, rank, &step, &word);
    return Py_BuildValue("(KzIII)", (unsigned long long)step, word >> 48 < TP_OPS ? ops[word >> 48] : NULL,
                         (unsigned)(word >> 32 & 0xffff), (unsigned)(word >> 16 & 0xffff), (unsigned)(word & 0xffff));
}

static PyObject *
region_set_progress(PyObject *object, PyObject *args)
{
    tp_py_region *self = (tp_py_region *)object;
    PyObject *rank_argument;
    unsigned long long step, instruction = UINT64_MAX;
    if (!PyArg_ParseTuple(args, "OK|K:set_progress", &rank_argument, &step, &instruction))
        return NULL;
    int rank = rank_of(rank_argument, self);
    if (rank < 0)
        return NULL;
    tp_region_progress(self->region, rank, step, instruction);
    Py_RETURN_NONE;
}

static PyObject *
region_doing(PyObject *object, PyObject *argument)
{
    tp_py_region *self = (tp_py_region *)object;
    char text[TP_DOING_TEXT];
    int rank = rank_of(argument, self);
    if (rank < 0)
        return NULL;
    tp_region_doing(self->region, rank, text);
    return PyUnicode_FromString(text);
}

static PyObject *
region_get_fd(PyObject *object, void *unused)
{
    (void)unused;
    const tp_py_region *self = (tp_py_region *)object;
    return self->fd < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(self->fd);
}

static PyObject *
region_get_ranks(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromLong(((tp_py_region *)object)->ranks);
}

static PyObject *
region_get_bytes(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(((tp_py_region *)object)->bytes);
}

static PyGetSetDef region_getset[] = {
    {"fd", region_get_fd, NULL, "The memfd, for pass_fds; None where there is none or after close().", NULL},
    {"ranks", region_get_ranks, NULL, "Number of ranks.", NULL},
    {"nbytes", region_get_bytes, NULL, "Bytes of the whole region.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
#define KEYWORDS(function) ((PyCFunction)(void (*)(void))(function))
static PyMethodDef region_methods[] = {
    {"create", KEYWORDS(region_create), METH_VARARGS | METH_KEYWORDS | METH_CLASS, region_create_doc},
    {"attach", region_attach, METH_O | METH_CLASS, "attach($type, fd, /)\n--\n\nThe region in a memfd, which stays the caller's."},
    {"close", region_close, METH_NOARGS,
     "close($self)\n--\n\nClose the descriptor; the memory lives as long as the object."},
    {"abort", KEYWORDS(region_abort), METH_VARARGS | METH_KEYWORDS,
     "abort($self, code, rank, text)\n--\n\nEnd everybody; the first call's words are kept. rank -1: no rank, the "
     "launcher."},
    {"tell", region_tell, METH_O, "tell($self, fd, /)\n--\n\nWrite the first failure's words there at once; -1: no more."},
    {"aborted", region_aborted, METH_NOARGS, "aborted($self)\n--\n\nNone, or (code, rank, text) of the first failure."},
    {"progress", region_progress, METH_O, region_progress_doc},
    {"set_progress", region_set_progress, METH_VARARGS,
     "set_progress($self, rank, step, instruction=0xffffffffffffffff, /)\n--\n\ninstruction: op << 48 | stage << 32 | "
     "micro << 16 | slice; omitted: none; 2^64 - 2: a checkpoint is written."},
    {"doing", region_doing, METH_O, "doing($self, rank, /)\n--\n\nWhat the rank is doing, in words."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot region_slots[] = {
    {Py_tp_dealloc, region_dealloc},
    {Py_tp_methods, region_methods},
    {Py_tp_getset, region_getset},
    {Py_tp_doc,
     "Memory that the ranks of a run share: rings, all-gathers, progress, and one abort that ends everybody."},
    {0, NULL},
};
static PyType_Spec region_spec = {"terapipe_c._core.Region", sizeof(tp_py_region), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
                                  region_slots};

static PyObject *
message_time(PyObject *module, PyObject *args)
{
    Py_ssize_t ring, exchange, lent;
    double seconds[3];
    if (!PyArg_ParseTuple(args, "nnn:message_time", &ring, &exchange, &lent))
        return NULL;
    if (ring < 1 || exchange < 1 || lent < 1)
        return tp_py_invalid_value("%zd, %zd and %zd bytes: at least 1 of each would be right", ring, exchange, lent);
    tp_status status;
    Py_BEGIN_ALLOW_THREADS
    status = tp_comm_measure((size_t)ring, (size_t)exchange, (size_t)lent, seconds);
    Py_END_ALLOW_THREADS
    if (status != TP_OK)
        return tp_py_raise(tp_py_module_state(module), status), NULL;
    return Py_BuildValue("(ddd)", seconds[0], seconds[1], seconds[2]);
}

static PyMethodDef functions[] = {
    {"message_time", message_time, METH_VARARGS,
     "message_time($module, ring_bytes, exchange_bytes, lent_bytes, /)\n--\n\n-> seconds of a small message between two threads, of a "
     "byte of an exchange through a ring, of a byte that is read out of an arena."},
    {NULL, NULL, 0, NULL},
};

int
tp_py_add_region(PyObject *module, tp_py_state *state)
{
    state->region = (PyTypeObject *)PyType_FromModuleAndSpec(module, &region_spec, NULL);
    if (state->region == NULL || PyModule_AddType(module, state->region) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
