/* _core.Comm: one rank's end of a _core.Region, or of another transport. */
#include "csrc/py/comm.h"

#include "csrc/base/clock.h"
#include "csrc/py/region.h"
#include "csrc/sched/sched.h"

#include <math.h>
#include <structmember.h>

_Static_assert(TP_TAG_OPS == TP_OPS, "csrc/comm/region.c has one word per instruction, in the order of TP_OP_MAP");

#define TURN_NS 1000000ll /* between two looks at what another thread uses */

typedef struct {
    PyObject_HEAD tp_comm *comm;
    tp_py_region *region;
    PyObject *beneath; /* the Comm that this one stands on, which goes after it; NULL */
    int rank, ranks;
    int busy; /* a call is under way without the GIL; a communicator serves one thread at a time */
} comm_object;

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
    self->region = (tp_py_region *)Py_NewRef(region);
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
    self->region = (tp_py_region *)Py_NewRef(region);
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
        comm->alone = self->beneath != NULL && ((comm_object *)self->beneath)->comm == NULL;
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

static void
mark(comm_object *self, int busy)
{
    for (; self != NULL; self = (comm_object *)self->beneath)
        self->busy = busy;
}

static int
is_busy(const comm_object *self)
{
    int busy = 0;
    for (; self != NULL; self = (comm_object *)self->beneath)
        busy |= self->busy;
    return busy;
}

/* It, and what it stands on, for this thread alone. */
static int
take(comm_object *self)
{
    if (is_busy(self)) {
        PyErr_SetString(PyExc_RuntimeError, "this communicator is in use by another thread: one thread at a time would be right");
        return -1;
    }
    mark(self, 1);
    return 0;
}

/* The same, for a call: it calls what it stands on by a pointer, and nobody closes either meanwhile. */
static int
enter(comm_object *self)
{
    if (open_one(self) == NULL)
        return -1;
    for (comm_object *one = (comm_object *)self->beneath; one != NULL; one = (comm_object *)one->beneath)
        if (one->comm == NULL) {
            tp_py_invalid_value("the communicator that this one stands on is closed: to close this one first would be right");
            return -1;
        }
    return take(self);
}

static PyObject *
leave(comm_object *self, tp_status status)
{
    mark(self, 0);
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

/* The arena, which lives as long as the region does: what the view keeps. */
static int
comm_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    comm_object *self = (comm_object *)object;
    tp_comm *comm = open_one(self);
    size_t bytes = 0;
    void *arena = comm == NULL || comm->ops->arena == NULL ? NULL : comm->ops->arena(comm, &bytes);
    if (arena == NULL) {
        if (comm != NULL)
            PyErr_SetString(PyExc_BufferError, "this communicator has no arena");
        view->obj = NULL;
        return -1;
    }
    return PyBuffer_FillInfo(view, object, arena, (Py_ssize_t)bytes, 0, flags);
}

static PyObject *
comm_lend(PyObject *object, PyObject *args)
{
    comm_object *self = (comm_object *)object;
    int peer;
    unsigned long long tag;
    uint64_t loan = 0;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "iKy*:lend", &peer, &tag, &data))
        return NULL;
    PyObject *result = NULL;
    if (enter(self) == 0) {
        tp_comm *comm = self->comm;
        tp_status status;
        Py_BEGIN_ALLOW_THREADS status = comm->ops->lend != NULL ? comm->ops->lend(comm, peer, tag, data.buf, (size_t)data.len, &loan)
                                                                : comm->ops->send(comm, peer, tag, data.buf, (size_t)data.len);
        Py_END_ALLOW_THREADS result = leave(self, status);
    }
    PyBuffer_Release(&data);
    Py_XSETREF(result, result == NULL ? NULL : PyLong_FromUnsignedLongLong(loan));
    return result;
}

static PyObject *
comm_reclaim(PyObject *object, PyObject *args)
{
    comm_object *self = (comm_object *)object;
    int peer;
    unsigned long long loan, tag;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "iKKn:reclaim", &peer, &loan, &tag, &bytes))
        return NULL;
    if (bytes < 0)
        return tp_py_invalid_value("bytes is %zd: those of the message that was lent would be right", bytes);
    if (enter(self) < 0)
        return NULL;
    tp_comm *comm = self->comm;
    tp_status status = TP_OK;
    Py_BEGIN_ALLOW_THREADS
    if (loan != 0 && comm->ops->reclaim != NULL)
        status = comm->ops->reclaim(comm, peer, loan, tag, (size_t)bytes);
    Py_END_ALLOW_THREADS
    return leave(self, status);
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
    if (self->comm == NULL) /* or another thread is about to have closed it */
        Py_RETURN_NONE;
    if (take(self) < 0)
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
    {"lend", comm_lend, METH_VARARGS,
     "lend($self, peer, tag, data, /)\n--\n\nSend; what lies in the arena, memoryview(self), is not copied here, and must stay as it is "
     "until reclaim of\nthe loan that is returned; 0: nothing was lent."},
    {"reclaim", comm_reclaim, METH_VARARGS,
     "reclaim($self, peer, loan, tag, bytes, /)\n--\n\nReturn when the peer has what was lent to it up to that loan. tag and "
     "bytes: the message's,\nfor what a DeadlineError says."},
    {"exchange", comm_exchange, METH_VARARGS,
     "exchange($self, peer, tag, out, into, /)\n--\n\nBoth directions at once, any size."},
    {"allgather", comm_allgather, METH_O,
     "allgather($self, mine, /)\n--\n\nThe bytes of every rank, in order of ranks."},
    {"close", comm_close, METH_NOARGS,
     "close($self)\n--\n\nSay goodbye to the other ranks; no call but this one is possible any more. An engine may not outlive "
     "it, and a\ncommunicator that stands on it can only be closed any more."},
    {"barrier", comm_barrier, METH_NOARGS, "barrier($self)\n--\n\nReturn when every rank has called it."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot comm_slots[] = {
    {Py_tp_new, comm_new},
    {Py_tp_dealloc, comm_dealloc},
    {Py_tp_methods, comm_methods},
    {Py_tp_members, comm_members},
    {Py_bf_getbuffer, comm_getbuffer},
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

int
tp_py_comm_hold(PyObject *object)
{
    return tp_py_comm_of(object) == NULL ? -1 : enter((comm_object *)object);
}

int
tp_py_comm_hold_in_turn(PyObject *object)
{
    comm_object *self = (comm_object *)object;
    while (self->comm != NULL && is_busy(self)) {
        Py_BEGIN_ALLOW_THREADS
        tp_clock_sleep_until(tp_clock_ns() + TURN_NS);
        Py_END_ALLOW_THREADS
    }
    if (self->comm == NULL)
        return -1;
    mark(self, 1);
    return 0;
}

void
tp_py_comm_let_go(PyObject *object)
{
    mark((comm_object *)object, 0);
}

tp_region *
tp_py_region_of(PyObject *object)
{
    if (is_a(object, offsetof(tp_py_state, region)))
        return ((tp_py_region *)object)->region;
    if (is_a(object, offsetof(tp_py_state, comm)))
        return ((comm_object *)object)->region->region;
    tp_py_invalid_type("region is %s: a terapipe_c._core.Region would be right", Py_TYPE(object)->tp_name);
    return NULL;
}

int
tp_py_add_comm(PyObject *module, tp_py_state *state)
{
    if (tp_py_add_region(module, state) < 0)
        return -1;
    state->comm = (PyTypeObject *)PyType_FromModuleAndSpec(module, &comm_spec, NULL);
    return state->comm == NULL ? -1 : PyModule_AddType(module, state->comm);
}
