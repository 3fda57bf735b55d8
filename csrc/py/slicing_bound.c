/* The bound of a step over all slicings, for Python; terapipe_c/planners/slicing_bound.py makes its arrays from costs. */
#include "csrc/py/module.h"

#include <stdlib.h>

#include "csrc/plan/slicing_bound.h"

enum { TABLES = 4 };

static const char *const names_of_tables[TABLES] = {"all", "core", "head", "tail"};

/* all, core: [ranks, n + 1, n + 1] tables, or [ranks, 2, n + 1] G0, G1 with `slope` [ranks, 4]: a2, a3 of all, of core. */
typedef struct {
    Py_buffer table[TABLES], fixed, slope;
    int views; /* of table; then fixed, slope */
    tp_slicing_rank *rank;
} size_view;

static void
end_size(size_view *v)
{
    for (int k = 0; k < v->views; k++)
        PyBuffer_Release(k < TABLES ? &v->table[k] : k == TABLES ? &v->fixed : &v->slope);
    free(v->rank);
}

static tp_slice_cost
cost_at(const Py_buffer *view, Py_ssize_t rank, const double *slope)
{
    Py_ssize_t n = view->shape[2];
    const double *at = (const double *)view->buf + rank * view->shape[1] * n;
    if (slope == NULL)
        return (tp_slice_cost){.units = (int)n - 1, .table = at};
    return (tp_slice_cost){.units = (int)n - 1, .g0 = at, .g1 = at + n, .a2 = slope[0], .a3 = slope[1]};
}

static int
view_size(PyObject *item, Py_ssize_t ranks, Py_ssize_t cells, size_view *v, tp_slicing_micro *out)
{
    PyObject *part[TABLES], *fixed, *slope;
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "iOOOOOO", &out->count, &part[0], &part[1], &part[2], &part[3], &fixed,
                                                  &slope))
        return PyErr_Occurred() ? -1 : (tp_py_invalid_type("a size is no tuple"), -1);
    for (int k = 0; k < TABLES; k++, v->views++)
        if (tp_py_view(part[k], 'd', k < 2 ? 3 : 2, 0, names_of_tables[k], &v->table[k]) < 0)
            return -1;
    if (tp_py_view(fixed, 'd', 2, 0, "fixed", &v->fixed) < 0)
        return -1;
    v->views++;
    int smooth = slope != Py_None;
    if (smooth && tp_py_view(slope, 'd', 2, 0, "slope", &v->slope) < 0)
        return -1;
    v->views += smooth;
    int right = out->count >= 1 && v->fixed.shape[0] == ranks && v->fixed.shape[1] == 2 &&
                (!smooth || (v->slope.shape[0] == ranks && v->slope.shape[1] == 4));
    for (int k = 0; k < TABLES; k++) {
        const Py_ssize_t *shape = v->table[k].shape;
        right = right && shape[0] == ranks && shape[k < 2 ? 2 : 1] == cells &&
                (k >= 2 || shape[1] == (smooth ? 2 : cells));
    }
    if (!right) {
        tp_py_invalid_value("a size's count or shapes do not fit %zd ranks and %zd units", ranks, cells - 1);
        return -1;
    }
    v->rank = calloc((size_t)ranks, sizeof *v->rank);
    if (v->rank == NULL)
        return tp_py_no_memory(), -1;
    for (Py_ssize_t r = 0; r < ranks; r++) {
        const double *a = smooth ? (const double *)v->slope.buf + 4 * r : NULL, *more = (const double *)v->fixed.buf + 2 * r;
        v->rank[r] = (tp_slicing_rank){
            .all = cost_at(&v->table[0], r, a), .core = cost_at(&v->table[1], r, a == NULL ? NULL : a + 2),
            .all_s = more[0], .core_s = more[1], .head = (const double *)v->table[2].buf + r * cells,
            .tail = (const double *)v->table[3].buf + r * cells};
    }
    out->rank = v->rank;
    return 0;
}

PyDoc_STRVAR(slicing_bound_doc, "slicing_bound($module, /, sizes, ranks, units, update_s)\n--\n\n"
                                "Seconds that no slicing and no order beats. sizes: [(count, all, core, head, tail, fixed, slope)].");
static PyObject *
slicing_bound(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"sizes", "ranks", "units", "update_s", NULL};
    PyObject *list, *result = NULL;
    int ranks, units;
    double update_s, bound = 0.0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!iid:slicing_bound", names, &PyList_Type, &list, &ranks, &units,
                                     &update_s))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(list), seen = 0;
    if (count < 1 || ranks < 1 || units < 1 || units > 1 << 24)
        return tp_py_invalid_value("%zd sizes, %d ranks, %d units: at least 1 of each is needed", count, ranks,
                                   units);
    size_view *views = calloc((size_t)count, sizeof *views);
    tp_slicing_micro *micro = calloc((size_t)count, sizeof *micro);
    if (views == NULL || micro == NULL)
        tp_py_no_memory();
    else
        while (seen < count &&
               view_size(PyList_GET_ITEM(list, seen), ranks, (Py_ssize_t)units + 1, &views[seen], &micro[seen]) == 0)
            seen++;
    if (views != NULL && micro != NULL && seen == count) {
        tp_py_away away;
        tp_py_leave(&away);
        tp_status status = tp_py_back(&away, tp_slicing_bound(ranks, (int)count, micro, update_s, &bound));
        result = status == TP_OK ? PyFloat_FromDouble(bound) : tp_py_raise(tp_py_module_state(module), status);
    }
    for (Py_ssize_t q = 0; views != NULL && q < count; q++)
        end_size(&views[q]);
    free(views);
    free(micro);
    return result;
}

int
tp_py_add_slicing_bound(PyObject *module, tp_py_state *state)
{
    static PyMethodDef methods[] = {
        {"slicing_bound", (PyCFunction)(void (*)(void))slicing_bound, METH_VARARGS | METH_KEYWORDS, slicing_bound_doc},
        {NULL, NULL, 0, NULL},
    };
    (void)state;
    return PyModule_AddFunctions(module, methods);
}
