/* _cuda.nccl, .inproc, .partitions: communicators of device memory and parts of a GPU, in capsules. */
#include "cuda/module.h"

#include "csrc/comm/link.h"
#include "csrc/stage/stage_ops.h"
#include "cuda/green.h"
#include "cuda/inproc.h"
#include "cuda/nccl.h"

static void
drop_comm(PyObject *capsule)
{
    if (!PyCapsule_IsValid(capsule, TP_COMM_CAPSULE)) /* _core has taken it */
        return;
    tp_comm *comm = PyCapsule_GetPointer(capsule, TP_COMM_CAPSULE);
    comm->ops->close(comm);
}

static PyObject *
put(tp_status status, tp_comm *comm)
{
    if (status != TP_OK)
        return tp_cuda_raise(status);
    PyObject *capsule = PyCapsule_New(comm, TP_COMM_CAPSULE, drop_comm);
    if (capsule == NULL)
        comm->ops->close(comm);
    return capsule;
}

static const tp_link *
link_of(PyObject *capsule)
{
    const tp_link *link = PyCapsule_GetPointer(capsule, TP_LINK_CAPSULE);
    if (link == NULL || link->abi == TP_COMM_ABI)
        return link;
    PyErr_Format(PyExc_ImportError, "_core has communicators of version %u and _cuda of %u: built together would be right", link->abi,
                 TP_COMM_ABI);
    return NULL;
}

static PyObject *
nccl(PyObject *module, PyObject *args)
{
    PyObject *capsule;
    Py_buffer pairs;
    Py_ssize_t bytes;
    tp_nccl_config config = {0};
    tp_comm *comm = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oy*n|iiii:nccl", &capsule, &pairs, &bytes, &config.max_ctas, &config.replicas, &config.copies,
                          &config.slots))
        return NULL;
    PyObject *result = NULL;
    const tp_link *link = link_of(capsule);
    if (link != NULL && (bytes < 0 || pairs.len != (Py_ssize_t)link->comm->ranks * link->comm->ranks))
        PyErr_Format(PyExc_ValueError, "%zd pairs and messages of %zd bytes: ranks * ranks pairs and 0 bytes or more would be right",
                     pairs.len, bytes);
    else if (link != NULL) {
        tp_status status;
        config.control = link->comm;
        config.region = link->region;
        config.pairs = pairs.buf;
        config.message_bytes = (size_t)bytes;
        Py_BEGIN_ALLOW_THREADS
        status = tp_comm_open_nccl(&config, &comm);
        Py_END_ALLOW_THREADS
        result = put(status, comm);
    }
    PyBuffer_Release(&pairs);
    return result;
}

static PyObject *
inproc(PyObject *module, PyObject *args)
{
    PyObject *capsule;
    Py_ssize_t bytes;
    tp_comm *comm = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "On:inproc", &capsule, &bytes))
        return NULL;
    const tp_link *link = link_of(capsule);
    if (link == NULL)
        return NULL;
    tp_status status = tp_comm_open_inproc(link->comm, link->region, bytes < 0 ? 0 : (size_t)bytes, &comm);
    return put(status, comm);
}

static PyObject *
inproc_ways(PyObject *module, PyObject *args)
{
    PyObject *capsule;
    unsigned ways;
    (void)module;
    if (!PyArg_ParseTuple(args, "OI:inproc_ways", &capsule, &ways))
        return NULL;
    const tp_link *link = link_of(capsule);
    if (link == NULL)
        return NULL;
    tp_status status = tp_inproc_ways(link->comm, ways);
    if (status != TP_OK)
        return tp_cuda_raise(status);
    Py_RETURN_NONE;
}

static void
drop_green(PyObject *capsule)
{
    tp_green_close(PyCapsule_GetPointer(capsule, "terapipe_c.green"));
}

static void
drop_part(PyObject *capsule)
{
    Py_XDECREF((PyObject *)PyCapsule_GetContext(capsule));
}

static PyObject *
partitions(PyObject *module, PyObject *args)
{
    int index, parts;
    tp_green *green = NULL;
    tp_status status;
    (void)module;
    if (!PyArg_ParseTuple(args, "ii:partitions", &index, &parts))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = tp_green_open(index, parts, NULL, &green);
    Py_END_ALLOW_THREADS
    if (status != TP_OK)
        return tp_cuda_raise(status);
    PyObject *owner = PyCapsule_New(green, "terapipe_c.green", drop_green), *list = owner == NULL ? NULL : PyList_New(parts);
    if (owner == NULL)
        tp_green_close(green);
    for (int i = 0; list != NULL && i < parts; i++) {
        const tp_cuda_partition *part = tp_green_part(green, i);
        PyObject *capsule = PyCapsule_New((void *)(uintptr_t)part, TP_PARTITION_CAPSULE, drop_part);
        if (capsule != NULL)
            PyCapsule_SetContext(capsule, Py_NewRef(owner));
        PyObject *pair = capsule == NULL ? NULL : Py_BuildValue("(Ni)", capsule, part->multiprocessors);
        if (pair == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, pair);
    }
    Py_XDECREF(owner);
    return list;
}

static PyMethodDef functions[] = {
    {"nccl", nccl, METH_VARARGS,
     "nccl($module, link, pairs, message_bytes, max_ctas=0, replicas=1, copies=1, slots=0, /)\n--\n\n-> a communicator of device memory "
     "by NCCL, in a capsule; link: _core.comm_link(control); pairs: 1 where activations go from one rank to another, 2 where that "
     "keeps guests of the first; replicas: of equally many ranks, one behind the other; copies: of the model in each; slots: of each "
     "channel for messages on their way, 0: 2."},
    {"inproc", inproc, METH_VARARGS,
     "inproc($module, link, message_bytes, /)\n--\n\n-> a communicator between stages of this process, in a capsule."},
    {"inproc_ways", inproc_ways, METH_VARARGS,
     "inproc_ways($module, link, ways, /)\n--\n\nHow a communicator by inproc() waits, for measurements: 1, the host never sleeps; "
     "2, it gives the device all it can, whose stream waits for the message; 4, nothing before all that it has been given is done."},
    {"partitions", partitions, METH_VARARGS,
     "partitions($module, index, parts, /)\n--\n\n-> [(capsule, multiprocessors)] of equal parts of a GPU."},
    {NULL, NULL, 0, NULL},
};

int
tp_cuda_add_comm(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
