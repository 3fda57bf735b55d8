/* Between C and Python: exceptions from statuses, borrowed views of arrays in, owned arrays out. */
#include "csrc/py/module.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

int
tp_py_add_exceptions(PyObject *module, tp_py_state *state)
{
    state->error = PyErr_NewExceptionWithDoc("terapipe_c.Error", "Base of every error that terapipe_c defines.", NULL, NULL);
    if (state->error == NULL || PyModule_AddObjectRef(module, "Error", state->error) < 0)
        return -1;
    static const struct {
        const char *name, *builtin, *doc;
    } classes[] = {
#define ROW(code, python, builtin, doc) {#python, #builtin, doc},
        TP_STATUS_MAP(ROW)
#undef ROW
    };
    PyObject *builtins = PyEval_GetBuiltins();
    for (int i = TP_OK + 1; i < TP_STATUS_COUNT; i++) {
        PyObject *builtin = PyDict_GetItemString(builtins, classes[i].builtin);
        char name[64];
        PyOS_snprintf(name, sizeof name, "terapipe_c.%s", classes[i].name);
        PyObject *bases = builtin == NULL ? NULL : PyTuple_Pack(2, state->error, builtin);
        state->exceptions[i] = bases == NULL ? NULL : PyErr_NewExceptionWithDoc(name, classes[i].doc, bases, NULL);
        Py_XDECREF(bases);
        if (state->exceptions[i] == NULL || PyModule_AddObjectRef(module, classes[i].name, state->exceptions[i]) < 0)
            return -1;
    }
    PyObject *schedule_error = state->exceptions[TP_ESCHEDULE];
    return PyObject_SetAttrString(schedule_error, "rank", Py_None) < 0 ||
                   PyObject_SetAttrString(schedule_error, "position", Py_None) < 0 ||
                   PyObject_SetAttrString(state->exceptions[TP_EINFEASIBLE], "memory_bytes", Py_None) < 0
               ? -1
               : 0;
}

PyObject *
tp_py_raise(tp_py_state *state, tp_status status)
{
    if (PyErr_Occurred())
        return NULL;
    if (status <= TP_OK || status >= TP_STATUS_COUNT)
        return PyErr_Format(PyExc_SystemError, "status %d is no error", (int)status);
    const char *message = tp_error_message(); /* may quote a path that is no UTF-8, or end within a character */
    PyObject *text = PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "backslashreplace");
    PyObject *raised = text == NULL ? NULL : PyObject_CallOneArg(state->exceptions[status], text);
    Py_XDECREF(text);
    if (raised == NULL)
        return NULL;
    if (status == TP_EINTERNAL) { /* a bug's reporter has the source line to quote */
        PyObject *noted = PyObject_CallMethod(raised, "add_note", "s", tp_error_where());
        Py_XDECREF(noted);
        if (noted == NULL)
            PyErr_Clear();
    }
    if (status == TP_ESCHEDULE && tp_error_rank() >= 0) {
        PyObject *rank = PyLong_FromLong(tp_error_rank()), *position = PyLong_FromLong(tp_error_position());
        if (rank != NULL && position != NULL) {
            PyObject_SetAttrString(raised, "rank", rank);
            PyObject_SetAttrString(raised, "position", position);
        }
        Py_XDECREF(rank);
        Py_XDECREF(position);
    }
    PyErr_SetObject(state->exceptions[status], raised);
    Py_DECREF(raised);
    return NULL;
}

/* A new reference, to `builtin` where there is none. The helpers that check arguments know no module: the class is looked up
 * where everybody finds it. */
static PyObject *
class_named(const char *name, PyObject *builtin)
{
    PyErr_Clear();
    PyObject *module = PyDict_GetItemString(PyImport_GetModuleDict(), "terapipe_c._core");
    PyObject *found = module == NULL ? NULL : PyObject_GetAttrString(module, name);
    if (found == NULL)
        PyErr_Clear();
    return found == NULL ? Py_NewRef(builtin) : found;
}

static PyObject *
raise_named(const char *name, PyObject *builtin, const char *format, va_list values)
{
    PyObject *found = class_named(name, builtin);
    PyErr_FormatV(found, format, values);
    Py_DECREF(found);
    return NULL;
}

PyObject *
tp_py_invalid_value(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    raise_named("InvalidValueError", PyExc_ValueError, format, values);
    va_end(values);
    return NULL;
}

PyObject *
tp_py_invalid_type(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    raise_named("InvalidTypeError", PyExc_TypeError, format, values);
    va_end(values);
    return NULL;
}

PyObject *
tp_py_no_memory(void)
{
    PyObject *found = class_named("OutOfMemoryError", PyExc_MemoryError);
    PyErr_SetString(found, "the host has no memory left for what this call takes and gives: more of it would be right");
    Py_DECREF(found);
    return NULL;
}

static const char *
format_name(char format)
{
    switch (format) {
    case 'd': return "float64";
    case 'f': return "float32";
    case 'i': return "int32";
    case 'q': return "int64";
    default: return "uint8";
    }
}

static int
same_format(const char *theirs, Py_ssize_t itemsize, char ours)
{
    if (theirs == NULL)
        return ours == 'B';
    if (theirs[0] == '@' || theirs[0] == '=' || theirs[0] == '<')
        theirs++;
    if (ours == 'q')
        return (theirs[0] == 'q' || theirs[0] == 'l') && itemsize == 8 && theirs[1] == 0;
    if (ours == 'i')
        return (theirs[0] == 'i' || theirs[0] == 'l') && itemsize == 4 && theirs[1] == 0;
    if (ours == 'B')
        return (theirs[0] == 'B' || theirs[0] == '?') && theirs[1] == 0;
    return theirs[0] == ours && theirs[1] == 0;
}

int
tp_py_view(PyObject *object, char format, int ndim, int writable, const char *what, Py_buffer *view)
{
    int flags = PyBUF_FORMAT | PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, flags) < 0) {
        tp_py_invalid_type("%s is %s: a%s %s array would be right", what, Py_TYPE(object)->tp_name,
                           writable ? " writable" : "", format_name(format));
        return -1;
    }
    if (!same_format(view->format, view->itemsize, format))
        tp_py_invalid_value("%s has format '%s': %s would be right", what, view->format, format_name(format));
    else if (ndim >= 0 && view->ndim != ndim)
        tp_py_invalid_value("%s has %d dimensions: %d would be right", what, view->ndim, ndim);
    else if (!PyBuffer_IsContiguous(view, 'C'))
        tp_py_invalid_value("%s is not C-contiguous: numpy.ascontiguousarray(...) makes it so", what);
    else
        return 0;
    PyBuffer_Release(view);
    return -1;
}

int
tp_py_view_optional(PyObject *object, char format, Py_ssize_t count, const char *what, Py_buffer *view, const void **out)
{
    if (object == Py_None)
        return 0;
    if (tp_py_view(object, format, 1, 0, what, view) < 0)
        return -1;
    *out = view->buf;
    if (view->shape[0] == count)
        return 0;
    tp_py_invalid_value("%s has %zd values: %zd would be right", what, view->shape[0], count);
    return -1;
}

/* ---- memory of ours that NumPy can stand on ------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD void *memory;
    Py_ssize_t bytes;
} buffer;

static int
buffer_get(PyObject *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, self, ((buffer *)self)->memory, ((buffer *)self)->bytes, 0, flags);
}

static void
buffer_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    free(((buffer *)self)->memory);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot buffer_slots[] = {
    {Py_tp_dealloc, buffer_dealloc},
    {Py_bf_getbuffer, buffer_get},
    {Py_tp_doc, "Memory of the C core that an array stands on."},
    {0, NULL},
};
static PyType_Spec buffer_spec = {"terapipe_c._core.Buffer", sizeof(buffer), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
                                  buffer_slots};

int
tp_py_add_buffer(PyObject *module, tp_py_state *state)
{
    state->buffer = (PyTypeObject *)PyType_FromModuleAndSpec(module, &buffer_spec, NULL);
    return state->buffer == NULL ? -1 : 0;
}

void
tp_py_end_views(Py_buffer *view, int count)
{
    for (int k = 0; k < count; k++)
        PyBuffer_Release(&view[k]); /* a zero one: nothing */
}

PyObject *
tp_py_array(tp_py_state *state, void *memory, char format, int ndim, const Py_ssize_t *shape)
{
    Py_ssize_t count = 1, itemsize = format == 'd' || format == 'q' ? 8 : format == 'B' ? 1 : 4;
    PyObject *dims = PyErr_Occurred() ? NULL : PyTuple_New(ndim);
    for (int i = 0; dims != NULL && i < ndim; i++) {
        count *= shape[i];
        PyObject *dim = PyLong_FromSsize_t(shape[i]);
        if (dim == NULL)
            Py_CLEAR(dims);
        else
            PyTuple_SET_ITEM(dims, i, dim);
    }
    buffer *owner = dims == NULL ? NULL : (buffer *)state->buffer->tp_alloc(state->buffer, 0);
    if (owner == NULL) {
        free(memory);
        Py_XDECREF(dims);
        return NULL;
    }
    owner->memory = memory;
    owner->bytes = count * itemsize;
    PyObject *numpy = PyImport_ImportModule("numpy"), *flat = NULL, *shaped = NULL;
    if (numpy != NULL && count > 0)
        flat = PyObject_CallMethod(numpy, "frombuffer", "Os", (PyObject *)owner, format_name(format));
    else if (numpy != NULL) /* frombuffer refuses an empty buffer */
        flat = PyObject_CallMethod(numpy, "empty", "is", 0, format_name(format));
    if (flat != NULL)
        shaped = PyObject_CallMethod(flat, "reshape", "O", dims);
    Py_XDECREF(flat);
    Py_XDECREF(numpy);
    Py_DECREF((PyObject *)owner);
    Py_DECREF(dims);
    return shaped;
}

PyObject *
tp_py_ints(const int *values, int count)
{
    PyObject *list = PyList_New(count);
    for (int k = 0; list != NULL && k < count; k++) {
        PyObject *value = PyLong_FromLong(values[k]);
        if (value == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, k, value);
    }
    return list;
}
