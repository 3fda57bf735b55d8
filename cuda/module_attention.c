/* Which attention kernel a device has, for ranks to agree; and the kernels and cuDNN's from Python, on addresses, for
 * benchmarks/gpu/attention.py and tests alone. */
#include "cuda/module.h"

#include <stdlib.h>

#include "cuda/cudnn.h"
#include "cuda/kernels.h"
#include "cuda/rank.h"

enum { Q, K, V, O, LSE, FORWARD, D_O = FORWARD, DELTA, DQ, DK, DV, BACKWARD };

static PyObject *
attention(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"dtype", "shape", "arrays", "groups", "stream", "wgmma", "multiprocessors", "kept", NULL};
    tp_attention s;
    long long n[8];
    unsigned long long stream = 0, kept = 0, kept_bytes = 0;
    void *array[BACKWARD] = {0};
    int dtype, groups = 0, wgmma = 0, multiprocessors = 132; /* an H100's or H200's */
    PyObject *addresses;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "i(LLLLLLLL)O!|iKpi(KK):attention", names, &dtype, &n[0], &n[1], &n[2], &n[3],
                                     &n[4], &n[5], &n[6], &n[7], &PyTuple_Type, &addresses, &groups, &stream, &wgmma,
                                     &multiprocessors, &kept, &kept_bytes))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(addresses);
    if ((dtype != TP_F32 && dtype != TP_BF16) || groups < 0 || groups > 3 || (count != FORWARD && count != BACKWARD))
        return PyErr_Format(PyExc_ValueError, "dtype is %d, groups %d, with %zd arrays; dtype 0 or 1, groups 0 to 3, and q, k, v, "
                            "o, lse (forward) or these with d_o, delta, dq, dk, dv (backward) are right", dtype, groups, count);
    for (Py_ssize_t i = 0; i < count; i++) {
        array[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, i));
        if (PyErr_Occurred())
            return NULL;
    }
    s.batch = n[0], s.heads = n[1], s.head_dim = n[2], s.slice = n[3];
    s.context = n[4], s.total = n[5], s.qkv_stride = n[6], s.o_stride = n[7];
    tp_stream on = (void *)(uintptr_t)stream;
    tp_attention_kernel kernel = wgmma ? TP_ATTENTION_WGMMA : TP_ATTENTION_MMA;
    tp_cuda_attention_force(groups);
    tp_status status =
        count == FORWARD
            ? tp_cuda_attention_forward(on, (tp_dtype)dtype, kernel, multiprocessors, &s, array[Q], array[K], array[V], array[O],
                                        array[LSE])
            : tp_cuda_attention_backward(on, (tp_dtype)dtype, kernel, multiprocessors, &s, array[Q], array[K], array[V], array[O],
                                         array[D_O], array[LSE], array[DELTA], array[DQ], array[DK], array[DV],
                                         (void *)(uintptr_t)kept, (size_t)kept_bytes);
    tp_cuda_attention_force(0);
    if (status != TP_OK)
        return tp_cuda_raise(status);
    Py_RETURN_NONE;
}

/* ---- cuDNN's ---------------------------------------------------------------------------------------------------------------- */

#define CAPSULE "terapipe_c.cudnn"

typedef struct {
    tp_cuda_device *device;
    tp_cudnn *cudnn;
} bench;

static void
bench_close(bench *b)
{
    tp_cudnn_close(b->cudnn);
    tp_cuda_close(b->device);
    free(b);
}

static void
bench_end(PyObject *capsule)
{
    bench_close(PyCapsule_GetPointer(capsule, CAPSULE));
}

static tp_status
bench_open(bench *b, int device, tp_stream stream, void *workspace, size_t bytes)
{
    TP_TRY(tp_cuda_open(device, NULL, &b->device));
    return tp_cudnn_open(b->device, stream, workspace, bytes, &b->cudnn);
}

static PyObject *
cudnn(PyObject *module, PyObject *args)
{
    unsigned long long workspace, stream = 0;
    Py_ssize_t bytes;
    int device = 0;
    tp_status status;
    (void)module;
    if (!PyArg_ParseTuple(args, "Kn|iK:cudnn", &workspace, &bytes, &device, &stream))
        return NULL;
    bench *b = calloc(1, sizeof *b);
    if (b == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    status = bench_open(b, device, (void *)(uintptr_t)stream, (void *)(uintptr_t)workspace, (size_t)bytes);
    Py_END_ALLOW_THREADS
    PyObject *capsule = status == TP_OK ? PyCapsule_New(b, CAPSULE, bench_end) : tp_cuda_raise(status);
    if (capsule == NULL)
        bench_close(b);
    return capsule;
}

static PyObject *
cudnn_attention(PyObject *module, PyObject *args)
{
    unsigned long long at[FORWARD];
    long long n[8];
    PyObject *capsule;
    tp_status status;
    (void)module;
    if (!PyArg_ParseTuple(args, "O(LLLLLLLL)(KKKKK):cudnn_attention", &capsule, &n[0], &n[1], &n[2], &n[3], &n[4], &n[5], &n[6],
                          &n[7], &at[Q], &at[K], &at[V], &at[O], &at[LSE]))
        return NULL;
    bench *b = PyCapsule_GetPointer(capsule, CAPSULE);
    if (b == NULL)
        return NULL;
    tp_attention s = {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7]};
    Py_BEGIN_ALLOW_THREADS
    status = tp_cudnn_prepare(b->cudnn, &s);
    if (status == TP_OK && tp_cudnn_has(b->cudnn, &s))
        status = tp_cudnn_forward(b->cudnn, &s, (void *)(uintptr_t)at[Q], (void *)(uintptr_t)at[K], (void *)(uintptr_t)at[V],
                                  (void *)(uintptr_t)at[O], (void *)(uintptr_t)at[LSE]);
    else if (status == TP_OK)
        status = tp_fail(TP_ERUNTIME, "%s", tp_cudnn_caveat(b->cudnn));
    Py_END_ALLOW_THREADS
    if (status != TP_OK)
        return tp_cuda_raise(status);
    return PyUnicode_FromString(tp_cudnn_caveat(b->cudnn));
}

static PyObject *
attention_kernel(PyObject *module, PyObject *args)
{
    tp_cuda_properties properties;
    tp_attention_kernel kernel;
    int device, dtype;
    (void)module;
    if (!PyArg_ParseTuple(args, "ii:attention_kernel", &device, &dtype))
        return NULL;
    tp_status status = tp_cuda_describe(device, &properties);
    if (status == TP_OK)
        status = tp_cuda_attention_choose(&properties, (tp_dtype)dtype, &kernel);
    return status == TP_OK ? PyUnicode_FromString(kernel == TP_ATTENTION_WGMMA ? "wgmma" : "mma") : tp_cuda_raise(status);
}

static PyMethodDef methods[] = {
    {"attention_kernel", attention_kernel, METH_VARARGS,
     "attention_kernel(device, dtype): \"wgmma\" or \"mma\", which of the package's kernels computes attention there (cuda/rank.h)."},
    {"cudnn", cudnn, METH_VARARGS,
     "cudnn(workspace, bytes, device=0, stream=0): plans of cuDNN for that stream, as a capsule. The workspace is the device's, on "
     "256 bytes, and there for as long; its address is not checked."},
    {"cudnn_attention", cudnn_attention, METH_VARARGS,
     "cudnn_attention(capsule, shape, addresses): as attention's forward in bf16, by cuDNN (cuda/cudnn.h); a shape that is new has "
     "its plan made first. Text about all shapes so far. ExecutionError: cuDNN has no plan. Addresses are not checked."},
    {"attention", (PyCFunction)(void (*)(void))attention, METH_VARARGS | METH_KEYWORDS,
     "attention(dtype, (batch, heads, head_dim, slice, context, total, qkv_stride, o_stride), addresses, groups=0, stream=0, "
     "wgmma=False, multiprocessors=132, kept=(0, 0)): enqueue the forward (five addresses) or the backward (ten) pass of a slice "
     "(cuda/kernels.h). groups 1 to 3 ask for tiles of 64 x groups rows where the shape would not (tp_cuda_attention_force); kept, an "
     "address and bytes, is what the backward pass may overwrite. Neither addresses nor whether the device has wgmma are checked."},
    {NULL, NULL, 0, NULL},
};

int
tp_cuda_add_attention(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
