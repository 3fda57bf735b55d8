/* _core.Kernels: the matrix products of the CPU backend on NumPy arrays, for tests and benchmarks. Weights are packed
 * once (`weight`), so that a call costs what it costs inside a training step. */
#include "csrc/py/module.h"

#include <string.h>

#include "csrc/backend/backend.h"
#include "csrc/base/fpu.h"

/* This thread does its part as the team's threads and the engine do: the same bits for every number of threads. */
#define BEGIN_KERNEL \
    Py_BEGIN_ALLOW_THREADS; \
    uint64_t fpu_before = tp_fpu_flush_subnormals()
#define END_KERNEL \
    tp_fpu_restore(fpu_before); \
    Py_END_ALLOW_THREADS

#define WEIGHT_NAME "terapipe_c.weight"

typedef struct {
    PyObject_HEAD tp_backend be;
    int busy; /* a call is running without the GIL: the workspace is taken */
} kernels;

typedef struct {
    tp_heap *heap;
    const tp_backend_ops *ops;
    int64_t rows, cols;
    float *value, *value_t, *grad;
} weight;

/* ---- arguments --------------------------------------------------------------------------------------------------- */

/* A float32 matrix whose rows are contiguous; any distance between rows, also negative (x[::-1]). */
typedef struct {
    Py_buffer view;
    float *data;
    int64_t rows, cols, stride;
} matrix;

static int
is_float32(const Py_buffer *view)
{
    const char *format = view->format == NULL ? "B" : view->format;
    return view->itemsize == 4 &&
           strcmp(format[0] == '<' || format[0] == '@' || format[0] == '=' ? format + 1 : format, "f") == 0;
}

static int
matrix_of(PyObject *object, int writable, const char *what, matrix *out)
{
    if (PyObject_GetBuffer(object, &out->view, PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) < 0) {
        tp_py_invalid_type("%s is %s: a%s float32 array would be right", what, Py_TYPE(object)->tp_name,
                           writable ? " writable" : "");
        return -1;
    }
    const Py_buffer *view = &out->view;
    if (!is_float32(view) || view->ndim != 2)
        tp_py_invalid_value("%s has format '%s' and %d dimensions: float32 and 2 would be right", what,
                            view->format, view->ndim);
    else if ((view->shape[1] > 1 && view->strides[1] != 4) || view->strides[0] % 4 != 0)
        tp_py_invalid_value("%s has strides (%zd, %zd) bytes: (any multiple of 4, 4) would be right", what,
                            view->strides[0], view->strides[1]);
    else {
        out->data = view->buf;
        out->rows = view->shape[0];
        out->cols = view->shape[1];
        out->stride = view->strides[0] / 4;
        return 0;
    }
    PyBuffer_Release(&out->view);
    return -1;
}

static int
matrix_shape(const matrix *m, const char *what, int64_t rows, int64_t cols)
{
    if (m->rows == rows && m->cols == cols)
        return 0;
    tp_py_invalid_value("%s is [%lld, %lld]: [%lld, %lld] would be right", what, (long long)m->rows,
                        (long long)m->cols, (long long)rows, (long long)cols);
    return -1;
}

/* An optional argument: absent leaves *out empty. */
static int
optional_matrix(PyObject *object, int writable, const char *what, int64_t rows, int64_t cols, matrix *out)
{
    if (object == NULL || object == Py_None)
        return 0;
    if (matrix_of(object, writable, what, out) < 0)
        return -1;
    if (matrix_shape(out, what, rows, cols) == 0)
        return 0;
    PyBuffer_Release(&out->view);
    return -1;
}

static int
optional_vector(PyObject *object, const char *what, int64_t n, Py_buffer *view)
{
    if (object == NULL || object == Py_None)
        return 0;
    if (tp_py_view(object, 'f', 1, 0, what, view) < 0)
        return -1;
    if (view->shape[0] == n)
        return 0;
    tp_py_invalid_value("%s has length %zd: %lld would be right", what, view->shape[0], (long long)n);
    PyBuffer_Release(view);
    return -1;
}

static int
epilogue_of(const char *name, int transposed, tp_epilogue *out)
{
    static const char *const names[] = {
        [TP_EPILOGUE_NONE] = "none",
        [TP_EPILOGUE_RESIDUAL] = "residual",
        [TP_EPILOGUE_GELU] = "gelu",
        [TP_EPILOGUE_DGELU] = "dgelu",
    };
    for (int i = 0; i < (int)(sizeof names / sizeof names[0]); i++) {
        int known = transposed ? i == TP_EPILOGUE_NONE || i == TP_EPILOGUE_DGELU : i != TP_EPILOGUE_DGELU;
        if (known && strcmp(name, names[i]) == 0) {
            *out = (tp_epilogue)i;
            return 0;
        }
    }
    tp_py_invalid_value("epilogue is \"%s\": %s would be right", name,
                        transposed ? "none or dgelu" : "none, residual or gelu");
    return -1;
}

static int
begin(kernels *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "these Kernels run on another thread now: one Kernels a thread would be right");
        return -1;
    }
    self->busy = 1;
    return 0;
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

static void
weight_end(weight *w)
{
    tp_heap_free(w->heap, w->value);
    tp_heap_free(w->heap, w->value_t);
    tp_heap_free(w->heap, w->grad);
    tp_heap_close(w->heap);
    PyMem_Free(w);
}

static void
weight_capsule_end(PyObject *capsule)
{
    weight_end(PyCapsule_GetPointer(capsule, WEIGHT_NAME));
}

static tp_status
weight_fill(weight *w)
{
    size_t bytes = (size_t)w->ops->weight_floats(w->rows, w->cols) * sizeof(float);
    size_t bytes_t = (size_t)w->ops->weight_t_floats(w->rows, w->cols) * sizeof(float);
    TP_TRY(tp_heap_open(0, &w->heap));
    TP_TRY(tp_heap_alloc(w->heap, bytes, "weight", (void **)&w->value));
    TP_TRY(tp_heap_alloc(w->heap, bytes, "gradient of the weight", (void **)&w->grad));
    return tp_heap_alloc(w->heap, bytes_t, "transposed weight", (void **)&w->value_t);
}

static PyObject *
kernels_weight(PyObject *object, PyObject *array)
{
    kernels *self = (kernels *)object;
    Py_buffer view;
    if (tp_py_view(array, 'f', 2, 0, "weight", &view) < 0)
        return NULL;
    weight *w = PyMem_Calloc(1, sizeof *w);
    if (w == NULL || begin(self) < 0) {
        PyMem_Free(w);
        PyBuffer_Release(&view);
        return w == NULL ? tp_py_no_memory() : NULL;
    }
    *w = (weight){.ops = self->be.ops, .rows = view.shape[0], .cols = view.shape[1]};
    tp_status status = weight_fill(w);
    if (status == TP_OK) {
        Py_BEGIN_ALLOW_THREADS;
        w->ops->weight_import(&self->be, w->rows, w->cols, view.buf, w->value);
        w->ops->weight_transpose(&self->be, w->rows, w->cols, w->value, w->value_t);
        Py_END_ALLOW_THREADS;
    }
    self->busy = 0;
    PyBuffer_Release(&view);
    PyObject *capsule = status == TP_OK ? PyCapsule_New(w, WEIGHT_NAME, weight_capsule_end) : NULL;
    if (capsule == NULL)
        weight_end(w);
    return status == TP_OK ? capsule : tp_py_raise(tp_py_state_of(object), status);
}

static weight *
weight_of(kernels *self, PyObject *object)
{
    if (!PyCapsule_IsValid(object, WEIGHT_NAME)) {
        tp_py_invalid_type("weight is %s: what Kernels.weight returned would be right",
                           Py_TYPE(object)->tp_name);
        return NULL;
    }
    weight *w = PyCapsule_GetPointer(object, WEIGHT_NAME);
    if (w->ops == self->be.ops)
        return w;
    tp_py_invalid_value("weight was packed for %s: one packed by these Kernels (%s) would be right",
                        w->ops->name, self->be.ops->name);
    return NULL;
}

/* value or grad of a weight, row-major */
static PyObject *
weight_array(PyObject *object, PyObject *capsule, int grad)
{
    kernels *self = (kernels *)object;
    weight *w = weight_of(self, capsule);
    if (w == NULL)
        return NULL;
    const Py_ssize_t shape[2] = {(Py_ssize_t)w->rows, (Py_ssize_t)w->cols};
    float *out = malloc((size_t)(w->rows * w->cols) * sizeof *out + 1);
    if (out == NULL || begin(self) < 0) {
        free(out);
        return out == NULL ? tp_py_no_memory() : NULL;
    }
    w->ops->weight_export(&self->be, w->rows, w->cols, grad ? w->grad : w->value, out);
    self->busy = 0;
    return tp_py_array(tp_py_state_of(object), out, 'f', 2, shape);
}

static PyObject *
kernels_weight_array(PyObject *self, PyObject *capsule)
{
    return weight_array(self, capsule, 0);
}

static PyObject *
kernels_weight_grad(PyObject *self, PyObject *capsule)
{
    return weight_array(self, capsule, 1);
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

typedef struct {
    matrix x, y, aux;
    Py_buffer bias;
} linear_views;

static void
release(linear_views *v)
{
    matrix *all[] = {&v->x, &v->y, &v->aux};
    for (int i = 0; i < 3; i++)
        if (all[i]->data != NULL)
            PyBuffer_Release(&all[i]->view);
    if (v->bias.obj != NULL)
        PyBuffer_Release(&v->bias);
}

/* Views of the arguments of linear (transposed 0) or linear_t, checked against each other. */
static int
linear_views_of(const weight *w, int transposed, tp_epilogue epilogue, PyObject *const *objects, linear_views *v)
{
    int64_t in = transposed ? w->cols : w->rows, out = transposed ? w->rows : w->cols;
    if (matrix_of(objects[0], 0, "x", &v->x) < 0 || matrix_shape(&v->x, "x", v->x.rows, in) < 0)
        return -1;
    if (matrix_of(objects[1], 1, "y", &v->y) < 0 || matrix_shape(&v->y, "y", v->x.rows, out) < 0)
        return -1;
    if (optional_vector(objects[2], "bias", out, &v->bias) < 0)
        return -1;
    if (optional_matrix(objects[3], epilogue == TP_EPILOGUE_GELU, "aux", v->x.rows, out, &v->aux) < 0)
        return -1;
    if (epilogue != TP_EPILOGUE_NONE && v->aux.data == NULL) {
        tp_py_invalid_value("aux is missing: this epilogue needs a float32 array of y's shape");
        return -1;
    }
    return 0;
}

static PyObject *
run_linear(PyObject *object, int transposed, PyObject *capsule, PyObject *const *objects, const char *epilogue_name)
{
    kernels *self = (kernels *)object;
    linear_views v;
    memset(&v, 0, sizeof v);
    tp_linear op = {0};
    weight *w = weight_of(self, capsule);
    if (w == NULL || epilogue_of(epilogue_name, transposed, &op.epilogue) < 0)
        return NULL;
    if (linear_views_of(w, transposed, op.epilogue, objects, &v) < 0 || begin(self) < 0) {
        release(&v);
        return NULL;
    }
    op.rows = v.x.rows, op.n_in = w->rows, op.n_out = w->cols;
    op.x = v.x.data, op.x_stride = v.x.stride;
    op.weight = transposed ? w->value_t : w->value;
    op.bias = v.bias.buf;
    op.y = v.y.data, op.y_stride = v.y.stride;
    op.aux = v.aux.data, op.aux_stride = v.aux.stride;
    BEGIN_KERNEL;
    (transposed ? self->be.ops->linear_t : self->be.ops->linear)(&self->be, &op);
    END_KERNEL;
    self->busy = 0;
    release(&v);
    return Py_NewRef(objects[1]);
}

static PyObject *
kernels_linear(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"x", "weight", "y", "bias", "epilogue", "aux", NULL};
    PyObject *objects[4] = {NULL}, *capsule;
    const char *epilogue = "none";
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|OsO:linear", names, &objects[0], &capsule, &objects[1],
                                     &objects[2], &epilogue, &objects[3]))
        return NULL;
    return run_linear(self, 0, capsule, objects, epilogue);
}

static PyObject *
kernels_linear_t(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"x", "weight", "y", "epilogue", "aux", NULL};
    PyObject *objects[4] = {NULL}, *capsule;
    const char *epilogue = "none";
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|sO:linear_t", names, &objects[0], &capsule, &objects[1],
                                     &epilogue, &objects[3]))
        return NULL;
    return run_linear(self, 1, capsule, objects, epilogue);
}

static PyObject *
kernels_linear_w(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"x", "dy", "weight", "accumulate", NULL};
    kernels *self = (kernels *)object;
    PyObject *x_object, *dy_object, *capsule;
    int accumulate = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|p:linear_w", names, &x_object, &dy_object, &capsule,
                                     &accumulate))
        return NULL;
    weight *w = weight_of(self, capsule);
    linear_views v;
    memset(&v, 0, sizeof v);
    if (w == NULL || matrix_of(x_object, 0, "x", &v.x) < 0 || matrix_of(dy_object, 0, "dy", &v.y) < 0 ||
        matrix_shape(&v.x, "x", v.x.rows, w->rows) < 0 || matrix_shape(&v.y, "dy", v.x.rows, w->cols) < 0 ||
        begin(self) < 0) {
        release(&v);
        return NULL;
    }
    BEGIN_KERNEL;
    self->be.ops->linear_w(&self->be, v.x.rows, w->rows, w->cols, v.x.data, v.x.stride, v.y.data, v.y.stride, w->grad,
                           accumulate);
    END_KERNEL;
    self->busy = 0;
    release(&v);
    Py_RETURN_NONE;
}

static PyObject *
kernels_bias_w(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"dy", "grad", "accumulate", NULL};
    kernels *self = (kernels *)object;
    PyObject *dy_object, *grad_object;
    int accumulate = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|p:bias_w", names, &dy_object, &grad_object, &accumulate))
        return NULL;
    matrix dy;
    Py_buffer grad;
    if (matrix_of(dy_object, 0, "dy", &dy) < 0)
        return NULL;
    int ready = tp_py_view(grad_object, 'f', 1, 1, "grad", &grad) == 0;
    if (ready && (grad.shape[0] != dy.cols || begin(self) < 0)) {
        if (!PyErr_Occurred())
            tp_py_invalid_value("grad has length %zd: %lld would be right", grad.shape[0],
                                (long long)dy.cols);
        PyBuffer_Release(&grad);
        ready = 0;
    }
    if (ready) {
        BEGIN_KERNEL;
        self->be.ops->bias_w(&self->be, dy.rows, dy.cols, dy.data, dy.stride, grad.buf, accumulate);
        END_KERNEL;
        self->busy = 0;
        PyBuffer_Release(&grad);
    }
    PyBuffer_Release(&dy.view);
    return ready ? Py_NewRef(Py_None) : NULL;
}

/* ---- the type ---------------------------------------------------------------------------------------------------- */

static void
kernels_dealloc(PyObject *object)
{
    kernels *self = (kernels *)object;
    PyTypeObject *type = Py_TYPE(object);
    tp_heap *heap = self->be.heap;
    tp_backend_close(&self->be);
    tp_team_close(self->be.team);
    if (heap != NULL)
        tp_heap_close(heap);
    type->tp_free(object);
    Py_DECREF(type);
}

static tp_status
kernels_open(kernels *self, const char *isa, int threads)
{
    TP_TRY(tp_heap_open(0, &self->be.heap));
    TP_TRY(tp_team_open(threads, &self->be.team));
    TP_TRY(tp_cpu_open(isa, self->be.heap, self->be.team, &self->be));
    /* the matrix products need the same workspace for any sizes */
    return tp_backend_reserve(&self->be, self->be.ops->workspace_bytes(64, 1, 64, 64, 64, threads));
}

static PyObject *
kernels_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"isa", "threads", NULL};
    const char *isa = NULL;
    int threads = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|zi:Kernels", names, &isa, &threads))
        return NULL;
    PyObject *object = type->tp_alloc(type, 0);
    if (object == NULL)
        return NULL;
    tp_status status = kernels_open((kernels *)object, isa, threads);
    if (status == TP_OK)
        return object;
    tp_py_raise(tp_py_state_of(object), status);
    Py_DECREF(object);
    return NULL;
}

static PyObject *
kernels_isa(PyObject *self, void *closure)
{
    (void)closure;
    return PyUnicode_FromString(((kernels *)self)->be.ops->name);
}

static PyObject *
kernels_threads(PyObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromLong(tp_team_members(((kernels *)self)->be.team));
}

static PyObject *
kernels_workspace(PyObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromSize_t(((kernels *)self)->be.workspace_bytes);
}

static PyGetSetDef kernels_getset[] = {
    {"isa", kernels_isa, NULL, "Instruction set in use.", NULL},
    {"threads", kernels_threads, NULL, "Threads that share each call.", NULL},
    {"workspace_bytes", kernels_workspace, NULL, "Bytes of scratch memory held.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define WITH_KEYWORDS(function) ((PyCFunction)(void (*)(void))(function)), METH_VARARGS | METH_KEYWORDS

static PyMethodDef kernels_methods[] = {
    {"weight", kernels_weight, METH_O,
     "weight($self, array, /)\n--\n\nPack a float32 [n_in, n_out] matrix; also transposed."},
    {"weight_array", kernels_weight_array, METH_O, "weight_array($self, weight, /)\n--\n\nThe matrix that was packed."},
    {"weight_grad", kernels_weight_grad, METH_O,
     "weight_grad($self, weight, /)\n--\n\nThe gradient that linear_w wrote."},
    {"linear", WITH_KEYWORDS(kernels_linear),
     "linear($self, /, x, weight, y, bias=None, epilogue='none', aux=None)\n--\n\n"
     "y[rows, n_out] = x[rows, n_in] W + bias, then residual (y = aux + ...) or gelu (aux = ..., y = gelu(aux)). "
     "Returns y."},
    {"linear_t", WITH_KEYWORDS(kernels_linear_t),
     "linear_t($self, /, x, weight, y, epilogue='none', aux=None)\n--\n\n"
     "y[rows, n_in] = x[rows, n_out] W^T, then dgelu (y = ... * gelu'(aux)). Returns y."},
    {"linear_w", WITH_KEYWORDS(kernels_linear_w),
     "linear_w($self, /, x, dy, weight, accumulate=False)\n--\n\n"
     "Gradient of the weight: x[rows, n_in]^T dy[rows, n_out], rows ascending; accumulate adds to the last one."},
    {"bias_w", WITH_KEYWORDS(kernels_bias_w),
     "bias_w($self, /, dy, grad, accumulate=False)\n--\n\ngrad[n] = sum of dy[rows, n] over rows ascending."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kernels_slots[] = {
    {Py_tp_new, kernels_new},
    {Py_tp_dealloc, kernels_dealloc},
    {Py_tp_methods, kernels_methods},
    {Py_tp_getset, kernels_getset},
    {Py_tp_doc,
     "Kernels(isa=None, threads=1)\n--\n\nMatrix products of one instruction set: 'amx', 'avx512', 'avx2' or 'portable'."},
    {0, NULL},
};
static PyType_Spec kernels_spec = {"terapipe_c._core.Kernels", sizeof(kernels), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, kernels_slots};

static PyObject *
kernel_isas(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    static const char *const names[] = {"amx", "avx512", "avx2", "portable"};
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < sizeof names / sizeof *names; i++) {
        if (tp_cpu_ops(names[i]) == NULL)
            continue;
        PyObject *name = PyUnicode_FromString(names[i]);
        if (name == NULL || PyList_Append(list, name) < 0)
            Py_CLEAR(list);
        Py_XDECREF(name);
    }
    PyObject *result = list == NULL ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return result;
}

static PyMethodDef functions[] = {
    {"kernel_isas", kernel_isas, METH_NOARGS,
     "kernel_isas($module, /)\n--\n\nInstruction sets that this processor can run, the best one first."},
    {NULL, NULL, 0, NULL},
};

int
tp_py_add_kernels(PyObject *module, tp_py_state *state)
{
    (void)state;
    PyObject *type = PyType_FromModuleAndSpec(module, &kernels_spec, NULL);
    int added = type == NULL ? -1 : PyModule_AddObjectRef(module, "Kernels", type);
    Py_XDECREF(type);
    return added < 0 ? -1 : PyModule_AddFunctions(module, functions);
}
