/* _core.Region (memory that ranks share) and _core.Comm (one rank's end of it). */
#include "csrc/py/comm.h"

#include "csrc/sched/sched.h"

#include <limits.h>
#include <math.h>
#include <structmember.h>
#include <string.h>
#include <unistd.h>

_Static_assert(TP_TAG_OPS == TP_OPS, "csrc/comm/region.c has one word per instruction, in the order of TP_OP_MAP");

typedef struct {
    PyObject_HEAD tp_region *region;
    void *memory;
    size_t bytes;
    int fd;     /* -1: none, or closed */
    int shared; /* a memfd: other processes may see it */
    int ranks;
} region_object;

typedef struct {
    PyObject_HEAD tp_comm *comm;
    region_object *region;
    PyObject *beneath; /* the Comm that this one stands on, which goes after it; NULL */
    int rank, ranks;
    int busy; /* a call is under way without the GIL; a communicator serves one thread at a time */
} comm_object;

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

/* ---- Region ----------------------------------------------------------------------------------------------- */

static region_object *
region_new(PyTypeObject *type)
{
    region_object *self = (region_object *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->fd = -1;
    return self;
}

static tp_status
region_fill(region_object *self, int ranks, const uint8_t *pairs, size_t ring_bytes, size_t gather_bytes, int shared)
{
    size_t bytes;
    TP_TRY(tp_region_bytes(ranks, pairs, ring_bytes, gather_bytes, &bytes));
    self->shared = shared;
    self->ranks = ranks;
    if (shared)
        TP_TRY(tp_shm_create(bytes, &self->fd, &self->memory));
    else
        TP_TRY(tp_local_create(bytes, &self->memory));
    self->bytes = bytes; /* with memory: what dealloc gives back */
    return tp_region_create(self->memory, bytes, ranks, pairs, ring_bytes, gather_bytes, &self->region);
}

PyDoc_STRVAR(region_create_doc,
             "create($type, ranks, pairs, ring_bytes, max_gather_bytes, shared)\n--\n\n"
             "Make a region. pairs: uint8 [ranks * ranks], pairs[src * ranks + dst] 1 gives that pair a ring of\n"
             "ring_bytes, 1 + h one whose bytes are halved h times. shared: a memfd (.fd) that other processes attach to.");

static PyObject *
region_create(PyObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ranks", "pairs", "ring_bytes", "max_gather_bytes", "shared", NULL};
    int ranks, shared;
    PyObject *pairs;
    Py_ssize_t ring_bytes, gather_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOnnp:create", names, &ranks, &pairs, &ring_bytes, &gather_bytes,
                                     &shared))
        return NULL;
    Py_buffer view;
    if (tp_py_view(pairs, 'B', -1, 0, "pairs", &view) < 0)
        return NULL;
    region_object *self = NULL;
    if (ranks < 1 || ranks > 4096 || view.len != (Py_ssize_t)ranks * ranks)
        tp_py_invalid_value("ranks is %d and pairs has %zd elements: 1 to 4096 ranks and ranks * ranks would be right", ranks,
                            view.len);
    else if (ring_bytes < 0 || gather_bytes < 0)
        tp_py_invalid_value("ring_bytes is %zd and max_gather_bytes %zd: 0 or more would be right",
                            ring_bytes, gather_bytes);
    else
        self = region_new((PyTypeObject *)type);
    if (self != NULL) {
        tp_status status;
        Py_BEGIN_ALLOW_THREADS status =
            region_fill(self, ranks, view.buf, (size_t)ring_bytes, (size_t)gather_bytes, shared);
        Py_END_ALLOW_THREADS if (status != TP_OK)
        {
            tp_py_raise(tp_py_state_of((PyObject *)self), status);
            Py_CLEAR(self);
        }
    }
    PyBuffer_Release(&view);
    return (PyObject *)self;
}

static PyObject *
region_attach(PyObject *type, PyObject *argument)
{
    int fd = as_int(argument);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    region_object *self = region_new((PyTypeObject *)type);
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
    region_object *self = (region_object *)object;
    if (self->fd >= 0)
        close(self->fd);
    self->fd = -1;
    Py_RETURN_NONE;
}

static void
region_dealloc(PyObject *object)
{
    region_object *self = (region_object *)object;
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
    region_object *self = (region_object *)object;
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
    tp_status code = tp_region_aborted(((region_object *)object)->region, &rank, text);
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
    if (((region_object *)object)->shared)
        return tp_py_invalid_value("this region is of several processes: one of this process alone would be right");
    tp_region_tell(((region_object *)object)->region, fd);
    Py_RETURN_NONE;
}

static int
rank_of(PyObject *argument, const region_object *self)
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
    region_object *self = (region_object *)object;
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
    region_object *self = (region_object *)object;
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
    region_object *self = (region_object *)object;
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
    const region_object *self = (region_object *)object;
    return self->fd < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(self->fd);
}

static PyObject *
region_get_ranks(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromLong(((region_object *)object)->ranks);
}

static PyObject *
region_get_bytes(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(((region_object *)object)->bytes);
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
static PyType_Spec region_spec = {"terapipe_c._core.Region", sizeof(region_object), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
                                  region_slots};

/* ---- Comm ------------------------------------------------------------------------------------------------- */

static PyObject *
comm_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"region", "rank", "timeout_s", NULL};
    tp_py_state *state = tp_py_module_state(PyType_GetModule(type));
    PyObject *region;
    int rank;
    double timeout_s = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!i|d:Comm", names, state->region, &region, &rank, &timeout_s))
        return NULL;
    if (!(timeout_s >= 0 && timeout_s < 1e9)) {
        PyObject *value = PyFloat_FromDouble(timeout_s);
        tp_py_invalid_value("timeout_s is %S: 0 (none) or a number of seconds would be right", value);
        Py_XDECREF(value);
        return NULL;
    }
    comm_object *self = (comm_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->region = (region_object *)Py_NewRef(region);
    const char *name = self->region->shared ? "shm" : "thread";
    tp_status status =
        tp_comm_open_region(self->region->region, rank, name, (int64_t)ceil(timeout_s * 1e9), &self->comm);
    self->rank = rank;
    self->ranks = self->region->ranks;
    if (status == TP_OK)
        return (PyObject *)self;
    tp_py_raise(state, status);
    Py_DECREF(self);
    return NULL;
}

PyObject *
tp_py_comm_wrap(tp_py_state *state, PyObject *region, PyObject *beneath, tp_comm *comm)
{
    comm_object *self = (comm_object *)state->comm->tp_alloc(state->comm, 0);
    if (self == NULL) {
        comm->ops->close(comm);
        return NULL;
    }
    self->region = (region_object *)Py_NewRef(region);
    self->beneath = Py_XNewRef(beneath);
    self->comm = comm;
    self->rank = comm->rank;
    self->ranks = comm->ranks;
    return (PyObject *)self;
}

static void
close_comm(comm_object *self)
{
    tp_comm *comm = self->comm;
    self->comm = NULL;
    if (comm != NULL) { /* a TCP communicator's goodbye waits for the others' */
        Py_BEGIN_ALLOW_THREADS comm->ops->close(comm);
        Py_END_ALLOW_THREADS
    }
}

static void
comm_dealloc(PyObject *object)
{
    comm_object *self = (comm_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    close_comm(self);
    Py_XDECREF(self->beneath);
    Py_XDECREF((PyObject *)self->region);
    type->tp_free(object);
    Py_DECREF(type);
}

static tp_comm *
open_one(const comm_object *self)
{
    if (self->comm == NULL)
        tp_py_invalid_value("this communicator is closed");
    return self->comm;
}

static int
enter(comm_object *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this communicator is in use by another thread: one thread at a time would be right");
        return -1;
    }
    self->busy = open_one(self) != NULL;
    return self->busy ? 0 : -1;
}

static PyObject *
leave(comm_object *self, tp_status status)
{
    self->busy = 0;
    if (status != TP_OK)
        return tp_py_raise(tp_py_state_of((PyObject *)self), status);
    Py_RETURN_NONE;
}

static PyObject *
message(PyObject *object, PyObject *args, const char *format, int outward)
{
    comm_object *self = (comm_object *)object;
    int peer;
    unsigned long long tag;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, format, &peer, &tag, &data))
        return NULL;
    PyObject *result = NULL;
    if (enter(self) == 0) {
        tp_comm *comm = self->comm;
        tp_status status;
        Py_BEGIN_ALLOW_THREADS status = outward ? comm->ops->send(comm, peer, tag, data.buf, (size_t)data.len)
                                                : comm->ops->recv_post(comm, peer, tag, data.buf, (size_t)data.len);
        if (status == TP_OK && !outward)
            status = comm->ops->recv_wait(comm, peer);
        Py_END_ALLOW_THREADS result = leave(self, status);
    }
    PyBuffer_Release(&data);
    return result;
}

static PyObject *
comm_send(PyObject *object, PyObject *args)
{
    return message(object, args, "iKy*:send", 1);
}

static PyObject *
comm_recv(PyObject *object, PyObject *args)
{
    return message(object, args, "iKw*:recv", 0);
}

static PyObject *
comm_exchange(PyObject *object, PyObject *args)
{
    comm_object *self = (comm_object *)object;
    int peer;
    unsigned long long tag;
    Py_buffer out, in;
    if (!PyArg_ParseTuple(args, "iKy*w*:exchange", &peer, &tag, &out, &in))
        return NULL;
    PyObject *result = NULL;
    if (enter(self) == 0) {
        tp_status status;
        Py_BEGIN_ALLOW_THREADS status =
            self->comm->ops->exchange(self->comm, peer, tag, out.buf, (size_t)out.len, in.buf, (size_t)in.len);
        Py_END_ALLOW_THREADS result = leave(self, status);
    }
    PyBuffer_Release(&out);
    PyBuffer_Release(&in);
    return result;
}

static PyObject *
comm_allgather(PyObject *object, PyObject *argument)
{
    comm_object *self = (comm_object *)object;
    Py_buffer mine;
    if (PyObject_GetBuffer(argument, &mine, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *all = PyBytes_FromStringAndSize(NULL, mine.len * self->ranks), *result = NULL;
    if (all != NULL && enter(self) == 0) {
        tp_status status;
        char *into = PyBytes_AS_STRING(all);
        Py_BEGIN_ALLOW_THREADS status = self->comm->ops->allgather(self->comm, mine.buf, (size_t)mine.len, into);
        Py_END_ALLOW_THREADS result = leave(self, status);
    }
    PyBuffer_Release(&mine);
    Py_XSETREF(all, result == NULL ? NULL : Py_NewRef(all));
    Py_XDECREF(result);
    return all;
}

static PyObject *
comm_barrier(PyObject *object, PyObject *unused)
{
    (void)unused;
    comm_object *self = (comm_object *)object;
    tp_status status;
    if (enter(self) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS status = self->comm->ops->allgather(self->comm, NULL, 0, NULL);
    Py_END_ALLOW_THREADS return leave(self, status);
}

static PyObject *
comm_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    comm_object *self = (comm_object *)object;
    if (self->comm != NULL && enter(self) < 0)
        return NULL;
    close_comm(self);
    return leave(self, TP_OK);
}

static PyMemberDef comm_members[] = {
    {"rank", T_INT, offsetof(comm_object, rank), READONLY, "This end's rank."},
    {"region", T_OBJECT_EX, offsetof(comm_object, region), READONLY, "The region it stands on."},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef comm_methods[] = {
    {"send", comm_send, METH_VARARGS, "send($self, peer, tag, data, /)\n--\n\nSend a buffer; blocks while the ring is full."},
    {"recv", comm_recv, METH_VARARGS,
     "recv($self, peer, tag, into, /)\n--\n\nReceive the next message, of exactly this tag and size."},
    {"exchange", comm_exchange, METH_VARARGS,
     "exchange($self, peer, tag, out, into, /)\n--\n\nBoth directions at once, any size."},
    {"allgather", comm_allgather, METH_O,
     "allgather($self, mine, /)\n--\n\nThe bytes of every rank, in order of ranks."},
    {"close", comm_close, METH_NOARGS,
     "close($self)\n--\n\nSay goodbye to the other ranks; no call but this one is possible any more. An engine may not outlive "
     "it."},
    {"barrier", comm_barrier, METH_NOARGS, "barrier($self)\n--\n\nReturn when every rank has called it."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot comm_slots[] = {
    {Py_tp_new, comm_new},
    {Py_tp_dealloc, comm_dealloc},
    {Py_tp_methods, comm_methods},
    {Py_tp_members, comm_members},
    {Py_tp_doc, "Comm(region, rank, timeout_s=0)\n--\n\nOne rank's end of a region; one thread at a time. timeout_s of "
                "one wait, 0: none."},
    {0, NULL},
};
static PyType_Spec comm_spec = {"terapipe_c._core.Comm", sizeof(comm_object), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, comm_slots};

/* ---- for engine.c ------------------------------------------------------------------------------------------- */

static int
is_a(PyObject *object, size_t offset)
{
    PyObject *module = PyType_GetModuleByDef(Py_TYPE(object), &tp_py_module);
    if (module == NULL) {
        PyErr_Clear();
        return 0;
    }
    return Py_TYPE(object) == *(PyTypeObject **)((char *)tp_py_module_state(module) + offset);
}

tp_comm *
tp_py_comm_of(PyObject *object)
{
    if (is_a(object, offsetof(tp_py_state, comm)))
        return open_one((comm_object *)object);
    tp_py_invalid_type("comm is %s: a terapipe_c._core.Comm would be right", Py_TYPE(object)->tp_name);
    return NULL;
}

tp_region *
tp_py_region_of(PyObject *object)
{
    if (is_a(object, offsetof(tp_py_state, region)))
        return ((region_object *)object)->region;
    if (is_a(object, offsetof(tp_py_state, comm)))
        return ((comm_object *)object)->region->region;
    tp_py_invalid_type("region is %s: a terapipe_c._core.Region would be right", Py_TYPE(object)->tp_name);
    return NULL;
}

int
tp_py_add_comm(PyObject *module, tp_py_state *state)
{
    state->region = (PyTypeObject *)PyType_FromModuleAndSpec(module, &region_spec, NULL);
    if (state->region == NULL || PyModule_AddType(module, state->region) < 0)
        return -1;
    state->comm = (PyTypeObject *)PyType_FromModuleAndSpec(module, &comm_spec, NULL);
    return state->comm == NULL ? -1 : PyModule_AddType(module, state->comm);
}
