/* The attention kernels from Python, on addresses: for benchmarks/gpu/attention.py and tests. Nothing else calls this. */
#include "cuda/module.h"

#include "cuda/kernels.h"

enum { Q, K, V, O, LSE, FORWARD, D_O = FORWARD, DELTA, DQ, DK, DV, BACKWARD };

static PyObject *
attention(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"dtype", "shape", "arrays", "groups", "stream", NULL};
    tp_attention s;
    long long n[8];
    unsigned long long stream = 0;
    void *array[BACKWARD] = {0};
    int dtype, groups = 0;
    PyObject *addresses;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "i(LLLLLLLL)O!|iK:attention", names, &dtype, &n[0], &n[1], &n[2], &n[3],
                                     &n[4], &n[5], &n[6], &n[7], &PyTuple_Type, &addresses, &groups, &stream))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(addresses);
    if ((dtype != TP_F32 && dtype != TP_BF16) || groups < 0 || groups > 2 || (count != FORWARD && count != BACKWARD))
        return PyErr_Format(PyExc_ValueError, "dtype is %d, groups %d, with %zd arrays; dtype 0 or 1, groups 0 to 2, and q, k, v, "
                            "o, lse (forward) or these with d_o, delta, dq, dk, dv (backward) are right", dtype, groups, count);
    for (Py_ssize_t i = 0; i < count; i++) {
        array[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, i));
        if (PyErr_Occurred())
            return NULL;
    }
    s.batch = n[0], s.heads = n[1], s.head_dim = n[2], s.slice = n[3];
    s.context = n[4], s.total = n[5], s.qkv_stride = n[6], s.o_stride = n[7];
    tp_stream on = (void *)(uintptr_t)stream;
    tp_cuda_attention_force(groups);
    tp_status status =
        count == FORWARD
            ? tp_cuda_attention_forward(on, (tp_dtype)dtype, &s, array[Q], array[K], array[V], array[O], array[LSE])
            : tp_cuda_attention_backward(on, (tp_dtype)dtype, &s, array[Q], array[K], array[V], array[O], array[D_O],
                                         array[LSE], array[DELTA], array[DQ], array[DK], array[DV]);
    tp_cuda_attention_force(0);
    if (status != TP_OK)
        return tp_cuda_raise(status);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"attention", (PyCFunction)(void (*)(void))attention, METH_VARARGS | METH_KEYWORDS,
     "attention(dtype, (batch, heads, head_dim, slice, context, total, qkv_stride, o_stride), addresses, groups=0, stream=0): "
     "enqueue the forward (five addresses) or the backward (ten) pass of a slice (cuda/kernels.h). Addresses are not checked."},
    {NULL, NULL, 0, NULL},
};

int
tp_cuda_add_attention(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
