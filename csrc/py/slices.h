/* Slice costs as Python hands them over. */
#ifndef TP_PY_SLICES_H
#define TP_PY_SLICES_H

#include "csrc/plan/plan.h"
#include "csrc/py/module.h"

/* One cost: a float64 [n + 1, n + 1] array, or (G0, G1, a2, a3). */
typedef struct {
    tp_slice_cost cost;
    Py_buffer view[2];
    int views;
} tp_py_cost;

/* All return 0, or -1 with an exception set. */
int
tp_py_view_cost(PyObject *object, const char *name, tp_py_cost *out);
void
tp_py_end_cost(tp_py_cost *view);
/* Views of all items, by these names in messages (NULL: t, or t[1] ..). The caller ends `count` views either way. */
int
tp_py_view_costs(PyObject *list, const char *const *names, tp_py_cost *views, tp_slice_cost *costs, Py_ssize_t count);
/* None, or (limit, row, pair, context) bytes. */
int
tp_py_slice_memory(PyObject *memory, tp_slice_memory *m);

#endif
