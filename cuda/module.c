#include "cuda/module.h"

#include <string.h>

#include "cuda/device.h"
#include "cuda/dl.h"
#include "cuda/dl_cublaslt.h"
#include "cuda/dl_cudnn.h"
#include "cuda/dl_nccl.h"
#include "cuda/provider.h"
#ifdef TP_CUDA_EMULATED
#define MODULE_NAME "_cuda_emu"
#define MODULE_INIT PyInit__cuda_emu
#else
#define MODULE_NAME "terapipe_c._cuda"
#define MODULE_INIT PyInit__cuda
#endif

/* As Python's text: it may quote a path that is no UTF-8, or end within a character. */
static PyObject *
text_of(const char *words)
{
    return PyUnicode_DecodeUTF8(words, (Py_ssize_t)strlen(words), "backslashreplace");
}

PyObject *
tp_cuda_raise(tp_status status)
{
    static const char *const classes[] = {
#define CLASS(name, python, builtin, doc) #python,
        TP_STATUS_MAP(CLASS)
#undef CLASS
    };
    PyObject *core = PyImport_ImportModule("terapipe_c._core");
    PyObject *class = core ? PyObject_GetAttrString(core, classes[status]) : NULL;
    PyObject *text = class ? text_of(tp_error_message()) : NULL;
    if (text)
        PyErr_SetObject(class, text);
    Py_XDECREF(text);
    Py_XDECREF(class);
    Py_XDECREF(core);
    return NULL;
}

static PyObject *
device_count(PyObject *module, PyObject *none)
{
    int count;
    (void)module, (void)none;
    Py_BEGIN_ALLOW_THREADS
    count = tp_cuda_device_count();
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(count);
}

static PyObject *
why_not(PyObject *module, PyObject *none)
{
    tp_status status;
    (void)module, (void)none;
    Py_BEGIN_ALLOW_THREADS
    status = tp_cuda_available();
    Py_END_ALLOW_THREADS
    return text_of(status == TP_OK ? "" : tp_error_message());
}

static PyObject *
describe(PyObject *module, PyObject *args)
{
    tp_cuda_properties p;
    tp_status status;
    int index;
    (void)module;
    if (!PyArg_ParseTuple(args, "i:describe", &index))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = tp_cuda_describe(index, &p);
    Py_END_ALLOW_THREADS
    if (status != TP_OK)
        return tp_cuda_raise(status);
    return Py_BuildValue("{s:i,s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:K,s:K,s:K,s:K,s:s,s:s}", "index", p.index, "name", p.name,
                         "major", p.major, "minor", p.minor, "multiprocessors", p.multiprocessors, "clock_khz",
                         p.clock_khz, "memory_clock_khz", p.memory_clock_khz, "memory_bus_bits", p.memory_bus_bits,
                         "total_bytes", (unsigned long long)p.total_bytes, "free_bytes",
                         (unsigned long long)p.free_bytes, "shared_bytes", (unsigned long long)p.shared_bytes,
                         "l2_bytes", (unsigned long long)p.l2_bytes, "bus_id", p.bus_id, "uuid", p.uuid);
}

static PyObject *
versions(PyObject *module, PyObject *none)
{
    int driver, runtime;
    (void)module, (void)none;
    Py_BEGIN_ALLOW_THREADS
    tp_cuda_versions(&driver, &runtime);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(ii)", driver, runtime);
}

/* (path, version, why not, what it lacks) of a library that was, or was not, loaded with `status`. */
static PyObject *
library(tp_status status, void (*found)(const char **path, int *version), const char *lacks)
{
    const char *path;
    int version;
    found(&path, &version);
    if (status != TP_OK) { /* one that loads may be refused, too (cuDNN 9.10.0): why not tells where it is */
        path = "";
        version = 0;
    }
    PyObject *number = version ? PyUnicode_FromFormat("%d.%d.%d", version / 10000, version % 10000 / 100, version % 100)
                               : PyUnicode_FromString("");
    return Py_BuildValue("(NNNs)", text_of(path), number, text_of(status == TP_OK ? "" : tp_error_message()), lacks);
}

/* {library: (path, version, why not, what it lacks)}; loads what can be loaded. */
static PyObject *
libraries(PyObject *module, PyObject *none)
{
    const tp_cublaslt *cublaslt;
    const tp_nccl *nccl;
    const tp_cudnn_library *cudnn;
    tp_status status;
    (void)module, (void)none;
    Py_BEGIN_ALLOW_THREADS
    status = tp_cublaslt_load(&cublaslt);
    Py_END_ALLOW_THREADS
    PyObject *first = library(status, tp_cublaslt_found, "");
    Py_BEGIN_ALLOW_THREADS
    status = tp_nccl_load(&nccl);
    Py_END_ALLOW_THREADS
    PyObject *second = library(status, tp_nccl_found, tp_nccl_lacks());
    Py_BEGIN_ALLOW_THREADS
    status = tp_cudnn_load(&cudnn);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("{s:N,s:N,s:N}", "cublasLt", first, "NCCL", second, "cuDNN", library(status, tp_cudnn_found, ""));
}

static PyObject *
set_folders(PyObject *module, PyObject *argument)
{
    PyObject *folders; /* bytes: a folder's name need be no UTF-8 */
    (void)module;
    if (!PyUnicode_FSConverter(argument, &folders))
        return NULL;
    tp_status status = tp_dl_set_folders(PyBytes_AS_STRING(folders));
    Py_DECREF(folders);
    if (status != TP_OK)
        return tp_cuda_raise(status);
    Py_RETURN_NONE;
}

/* Open, take `bytes`, touch them, give all back. */
static tp_status
try_device(int index, size_t bytes)
{
    tp_cuda_device *device;
    void *memory = NULL;
    TP_TRY(tp_cuda_open(index, NULL, &device));
    tp_status status = tp_cuda_alloc(device, bytes, "the memory asked for", &memory);
    if (status == TP_OK)
        status = tp_cuda_memset(device, tp_cuda_compute(device), memory, 0, bytes);
    if (status == TP_OK)
        status = tp_cuda_synchronize(device, tp_cuda_compute(device));
    tp_cuda_free(device, memory);
    tp_cuda_close(device);
    return status;
}

static PyObject *
check(PyObject *module, PyObject *args)
{
    int index;
    Py_ssize_t bytes;
    tp_status status;
    (void)module;
    if (!PyArg_ParseTuple(args, "in:check", &index, &bytes))
        return NULL;
    if (bytes < 0) {
        PyErr_Format(PyExc_ValueError, "bytes is %zd; it must be 0 or more", bytes);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = try_device(index, (size_t)bytes);
    Py_END_ALLOW_THREADS
    if (status != TP_OK)
        return tp_cuda_raise(status);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"device_count", device_count, METH_NOARGS, "CUDA devices that this process sees; 0 where there is no driver."},
    {"why_not", why_not, METH_NOARGS, "Why no device can be opened; '' if one can."},
    {"describe", describe, METH_VARARGS, "describe(index): what a device is, as a dict."},
    {"versions", versions, METH_NOARGS, "(driver, runtime) as 1000 * major + 10 * minor; driver 0: none."},
    {"libraries", libraries, METH_NOARGS, "{library: (path, version, why not, what it lacks)}."},
    {"set_folders", set_folders, METH_O, "set_folders('a:b'): where libraries are looked for, before the loader's own."},
    {"check", check, METH_VARARGS, "check(index, bytes): open a device, take and touch that much of it, give it back."},
    {NULL, NULL, 0, NULL},
};

static int
module_exec(PyObject *module)
{
    PyObject *provider = PyCapsule_New((void *)(uintptr_t)tp_cuda_provider(), TP_PROVIDER_CAPSULE, NULL);
    int added = provider ? PyModule_AddObjectRef(module, "provider", provider) : -1;
    Py_XDECREF(provider);
    if (added < 0 || tp_cuda_add_device(module) < 0 || tp_cuda_add_comm(module) < 0 || tp_cuda_add_gemm(module) < 0)
        return -1;
#ifdef TP_CUDA_EMULATED
    if (tp_cuda_add_emu(module) < 0)
        return -1;
#endif
    return tp_cuda_add_attention(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = MODULE_NAME,
    .m_doc = "The CUDA backend of terapipe_c; loads where there is no GPU, and says so.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
MODULE_INIT(void); /* no header declares it, and -Wmissing-prototypes wants one to */

PyMODINIT_FUNC
MODULE_INIT(void)
{
    return PyModuleDef_Init(&definition);
}
