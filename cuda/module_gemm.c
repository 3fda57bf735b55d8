/* The three products from Python: for tests of their numbers, and for tables of their times. Nothing else calls this. */
#include "cuda/module.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/gemm.h"

typedef struct {
    tp_cuda_device *device;
    void *workspace;
    tp_gemm *gemm;
} bench;

static void
bench_close(bench *b)
{
    tp_gemm_close(b->gemm);
    if (b->device)
        tp_cuda_free(b->device, b->workspace);
    tp_cuda_close(b->device);
}

static tp_status
bench_open(bench *b, int index, const tp_gemm_options *options)
{
    TP_TRY(tp_cuda_open(index, NULL, &b->device));
    TP_TRY(tp_cuda_alloc(b->device, tp_gemm_workspace_bytes(b->device), "the workspace of cublasLt", &b->workspace));
    return tp_gemm_open(b->device, tp_cuda_compute(b->device), options, b->workspace, &b->gemm);
}

enum { X, W, Y, BIAS, AUX, MATRICES };

typedef struct {
    void *host[MATRICES], *device[MATRICES];
    size_t bytes[MATRICES];
} matrices;

static tp_status
take(bench *b, matrices *m)
{
    static const char *const names[] = {"x", "w", "y", "bias", "aux"};
    for (int i = 0; i < MATRICES; i++)
        TP_TRY(tp_cuda_alloc(b->device, m->bytes[i], names[i], &m->device[i]));
    return TP_OK;
}

static tp_status
upload(bench *b, matrices *m)
{
    for (int i = 0; i < MATRICES; i++)
        if (m->device[i])
            TP_TRY(tp_cuda_copy(b->device, tp_cuda_compute(b->device), m->device[i], m->host[i], m->bytes[i],
                                TP_CUDA_TO_DEVICE));
    return tp_cuda_synchronize(b->device, tp_cuda_compute(b->device));
}

static void
give_back(bench *b, matrices *m)
{
    for (int i = 0; b->device && i < MATRICES; i++)
        tp_cuda_free(b->device, m->device[i]);
}

static void
point(tp_gemm_op *op, const matrices *m)
{
    op->x = m->device[X];
    op->w = m->device[W];
    op->y = m->device[Y];
    op->bias = m->device[BIAS];
    op->aux = m->device[AUX];
}

static tp_status
multiply(bench *b, matrices *m, tp_gemm_op *op, char *text, size_t size)
{
    tp_stream stream = tp_cuda_compute(b->device);
    TP_TRY(take(b, m));
    point(op, m);
    TP_TRY(upload(b, m)); /* what is prepared may be run: on numbers, not on memory that nobody wrote */
    TP_TRY(tp_gemm_prepare(b->gemm, op)); /* may write y and aux */
    TP_TRY(upload(b, m));
    TP_TRY(tp_gemm_run(b->gemm, op));
    for (int i = Y; i < MATRICES; i++)
        if (m->device[i] && i != BIAS)
            TP_TRY(tp_cuda_copy(b->device, stream, m->host[i], m->device[i], m->bytes[i], TP_CUDA_TO_HOST));
    TP_TRY(tp_cuda_synchronize(b->device, stream));
    tp_gemm_describe(b->gemm, op, text, size);
    return TP_OK;
}

/* Bytes that a matrix of `rows` rows takes must be there. */
static int
enough(const char *name, const Py_buffer *view, int64_t rows, int64_t width, int64_t stride, size_t element)
{
    int64_t needed = rows > 0 ? ((rows - 1) * stride + width) * (int64_t)element : 0;
    if (!view->buf || view->len >= needed)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes; %lld are needed", name, view->len, (long long)needed);
    return 0;
}

static int
all_enough(const tp_gemm_op *op, const Py_buffer *views)
{
    int weight = op->kind == TP_GEMM_LINEAR_W;
    int64_t width = tp_gemm_width(op);
    size_t element = tp_dtype_bytes(op->dtype);
    return enough("x", &views[X], op->rows, op->kind == TP_GEMM_LINEAR_T ? op->n_out : op->n_in, op->x_stride, element) &&
           enough("w", &views[W], weight ? op->rows : op->n_in, op->n_out, op->w_stride, element) &&
           enough("y", &views[Y], weight ? op->n_in : op->rows, width, op->y_stride, weight ? 4 : element) &&
           enough("bias", &views[BIAS], 1, op->n_out, op->n_out, element) &&
           enough("aux", &views[AUX], op->rows, width, op->aux_stride, element);
}

static PyObject *
gemm(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"kind", "dtype", "epilogue", "accumulate", "rows", "n_in", "n_out", "x", "x_stride", "w",
                            "w_stride", "y", "y_stride", "bias", "aux", "aux_stride", "device", "candidates",
                            "reproducible", "fuse", NULL};
    Py_buffer views[MATRICES];
    tp_gemm_op op = {0};
    tp_gemm_options options = {0, 0, 0};
    bench b = {NULL, NULL, NULL};
    matrices m;
    char text[256] = "";
    int kind, dtype, epilogue, index = 0;
    long long rows, n_in, n_out, x_stride, w_stride, y_stride, aux_stride = 0;
    (void)module;
    memset(views, 0, sizeof views);
    memset(&m, 0, sizeof m);
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiiiLLLy*Ly*Lw*L|z*z*Liiii:gemm", names, &kind, &dtype, &epilogue,
                                     &op.accumulate, &rows, &n_in, &n_out, &views[X], &x_stride, &views[W], &w_stride,
                                     &views[Y], &y_stride, &views[BIAS], &views[AUX], &aux_stride, &index,
                                     &options.candidates, &options.reproducible, &options.fuse))
        return NULL;
    op.kind = (tp_gemm_kind)kind, op.dtype = (tp_dtype)dtype, op.epilogue = (tp_gemm_epilogue)epilogue;
    op.rows = rows, op.n_in = n_in, op.n_out = n_out;
    op.x_stride = x_stride, op.w_stride = w_stride, op.y_stride = y_stride, op.aux_stride = aux_stride;
    for (int i = 0; i < MATRICES; i++) {
        m.host[i] = views[i].buf;
        m.bytes[i] = views[i].buf ? (size_t)views[i].len : 0;
    }
    int right = all_enough(&op, views);
    tp_status status = TP_OK;
    Py_BEGIN_ALLOW_THREADS
    if (right) {
        status = bench_open(&b, index, &options);
        if (status == TP_OK)
            status = multiply(&b, &m, &op, text, sizeof text);
    }
    give_back(&b, &m);
    bench_close(&b);
    Py_END_ALLOW_THREADS
    for (int i = 0; i < MATRICES; i++)
        if (views[i].obj)
            PyBuffer_Release(&views[i]);
    if (!right)
        return NULL;
    return status == TP_OK ? PyUnicode_FromString(text) : tp_cuda_raise(status);
}

/* ---- times ---------------------------------------------------------------------------------------------------------- */

#define LONG_ENOUGH  3e-4
#define MOST_AT_ONCE 32
#define MADE_UP      ((size_t)(4 << 20) - 20) /* bytes made by the host; not a divisor of rows, so that these differ */

/* Numbers in (-1, 1), in dtype: a GPU multiplies zeros faster than it ever will data. */
static void
fill(tp_dtype dtype, void *to, size_t bytes, uint32_t seed)
{
    size_t count = bytes / tp_dtype_bytes(dtype);
    uint32_t state = seed * 2654435761u + 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        float x = (float)((int32_t)state >> 8) * (1.0f / 8388608.0f);
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        if (dtype == TP_F32)
            ((float *)to)[i] = x;
        else
            ((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
    }
}

static tp_status
make_up(matrices *m, const tp_gemm_op *op)
{
    int weight = op->kind == TP_GEMM_LINEAR_W;
    size_t element = tp_dtype_bytes(op->dtype), rows = (size_t)op->rows, width = (size_t)tp_gemm_width(op);
    m->bytes[X] = rows * (size_t)op->x_stride * element;
    m->bytes[W] = (weight ? rows : (size_t)op->n_in) * (size_t)op->n_out * element;
    m->bytes[Y] = (weight ? (size_t)op->n_in * 4 : rows * element) * width;
    int has_bias = op->epilogue >= TP_GEMM_BIAS && op->epilogue <= TP_GEMM_BIAS_RESIDUAL;
    m->bytes[BIAS] = has_bias ? (size_t)op->n_out * element : 0;
    m->bytes[AUX] = op->epilogue >= TP_GEMM_BIAS_GELU_AUX ? rows * width * element : 0;
    for (int i = 0; i < MATRICES; i++) {
        size_t made = m->bytes[i] < MADE_UP ? m->bytes[i] : MADE_UP;
        m->host[i] = made ? malloc(made) : NULL;
        if (made && !m->host[i])
            return tp_fail(TP_EMEMORY, "no host memory for %zu bytes of random numbers", made);
        fill(i == Y && weight ? TP_F32 : op->dtype, m->host[i], made, (uint32_t)i + 1);
    }
    return TP_OK;
}

/* What was made up, over and over. */
static tp_status
spread(bench *b, const matrices *m)
{
    tp_stream stream = tp_cuda_compute(b->device);
    for (int i = 0; i < MATRICES; i++) {
        char *to = m->device[i];
        size_t bytes = m->bytes[i], done = bytes < MADE_UP ? bytes : MADE_UP;
        TP_TRY(tp_cuda_copy(b->device, stream, to, m->host[i], done, TP_CUDA_TO_DEVICE));
        for (size_t more; done < bytes; done += more) {
            more = done < bytes - done ? done : bytes - done;
            TP_TRY(tp_cuda_copy(b->device, stream, to + done, to, more, TP_CUDA_ON_DEVICE));
        }
    }
    return tp_cuda_synchronize(b->device, stream);
}

/* Seconds of one of `times` products that run one behind the other, and behind one more: the host is ahead when they begin. */
static tp_status
time_products(bench *b, const tp_gemm_op *op, int times, const tp_cuda_event events[2], double *seconds)
{
    tp_stream stream = tp_cuda_compute(b->device);
    TP_TRY(tp_gemm_run(b->gemm, op));
    TP_TRY(tp_cuda_event_record(b->device, events[0], stream));
    for (int i = 0; i < times; i++)
        TP_TRY(tp_gemm_run(b->gemm, op));
    TP_TRY(tp_cuda_event_record(b->device, events[1], stream));
    TP_TRY(tp_cuda_event_synchronize(b->device, events[1]));
    TP_TRY(tp_cuda_event_elapsed(b->device, events[0], events[1], seconds));
    *seconds /= times;
    return TP_OK;
}

/* As many at once as fill LONG_ENOUGH: a short one alone takes as long as the host takes to ask for it. */
static tp_status
measure(bench *b, const tp_gemm_op *op, int repeats, double *seconds)
{
    tp_cuda_event events[2] = {NULL, NULL};
    tp_status status = tp_gemm_prepare(b->gemm, op);
    for (int i = 0; status == TP_OK && i < 2; i++)
        status = tp_cuda_event_create(b->device, 1, &events[i]);
    double one = 0;
    for (int i = 0; status == TP_OK && i < 2; i++) /* two to warm up */
        status = time_products(b, op, 1, events, &one);
    int times = one > LONG_ENOUGH ? 1 : one < LONG_ENOUGH / MOST_AT_ONCE ? MOST_AT_ONCE : (int)(LONG_ENOUGH / one);
    for (int i = 0; status == TP_OK && i < repeats; i++)
        status = time_products(b, op, times, events, &seconds[i]);
    for (int i = 0; i < 2; i++)
        tp_cuda_event_destroy(b->device, events[i]);
    return status;
}

static tp_status
time_op(bench *b, matrices *m, tp_gemm_op *op, int repeats, double *seconds, char *text, size_t size)
{
    TP_TRY(make_up(m, op));
    TP_TRY(take(b, m));
    TP_TRY(spread(b, m));
    point(op, m);
    TP_TRY(measure(b, op, repeats, seconds));
    tp_gemm_describe(b->gemm, op, text, size);
    return TP_OK;
}

static PyObject *
listed(const double *seconds, int count, const char *text)
{
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++)
        PyList_SET_ITEM(list, i, PyFloat_FromDouble(seconds[i]));
    return list ? Py_BuildValue("(Ns)", list, text) : NULL;
}

static PyObject *
gemm_seconds(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"kind", "dtype", "epilogue", "accumulate", "rows", "n_in", "n_out", "repeats", "device",
                            "candidates", "reproducible", "fuse", NULL};
    double seconds[256];
    tp_gemm_op op = {0};
    tp_gemm_options options = {0, 0, 0};
    bench b = {NULL, NULL, NULL};
    matrices m;
    char text[256] = "";
    int kind, dtype, epilogue, repeats = 10, index = 0;
    long long rows, n_in, n_out;
    (void)module;
    memset(&m, 0, sizeof m);
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiiiLLL|iiiii:gemm_seconds", names, &kind, &dtype, &epilogue,
                                     &op.accumulate, &rows, &n_in, &n_out, &repeats, &index, &options.candidates,
                                     &options.reproducible, &options.fuse))
        return NULL;
    if (repeats < 1 || repeats > 256 || rows < 1 || n_in < 1 || n_out < 1 || rows > 1 << 20 || n_in > 1 << 20 || n_out > 1 << 20)
        return PyErr_Format(PyExc_ValueError, "repeats is %d, rows %lld, n_in %lld, n_out %lld; 1 to 256 and 1 to 2^20 are right",
                            repeats, rows, n_in, n_out);
    op.kind = (tp_gemm_kind)kind, op.dtype = (tp_dtype)dtype, op.epilogue = (tp_gemm_epilogue)epilogue;
    op.rows = rows, op.n_in = n_in, op.n_out = n_out, op.w_stride = n_out;
    op.x_stride = op.kind == TP_GEMM_LINEAR_T ? n_out : n_in;
    op.y_stride = op.aux_stride = tp_gemm_width(&op);
    tp_status status;
    Py_BEGIN_ALLOW_THREADS
    status = bench_open(&b, index, &options);
    if (status == TP_OK)
        status = time_op(&b, &m, &op, repeats, seconds, text, sizeof text);
    for (int i = 0; i < MATRICES; i++)
        free(m.host[i]);
    give_back(&b, &m);
    bench_close(&b);
    Py_END_ALLOW_THREADS
    return status == TP_OK ? listed(seconds, repeats, text) : tp_cuda_raise(status);
}

static PyMethodDef methods[] = {
    {"gemm", (PyCFunction)(void (*)(void))gemm, METH_VARARGS | METH_KEYWORDS,
     "One product of host buffers on a device (cuda/gemm.h); y and aux are written. How it was done, as text."},
    {"gemm_seconds", (PyCFunction)(void (*)(void))gemm_seconds, METH_VARARGS | METH_KEYWORDS,
     "(seconds of each run by the device's clock, how it is done) of one product on random numbers."},
    {NULL, NULL, 0, NULL},
};

int
tp_cuda_add_gemm(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
