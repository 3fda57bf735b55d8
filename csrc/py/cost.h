/* Costs out of Python's arrays (csrc/py/cost.c says what a pack is). */
#ifndef TP_PY_COST_H
#define TP_PY_COST_H

#include "csrc/cost/cost.h"
#include "csrc/py/module.h"

typedef struct {
    Py_buffer view[5];
    int held;
    tp_cost cost; /* points into the views */
} tp_py_pack;

/* 0, or -1 with an exception set; tp_py_pack_close in both cases. */
int
tp_py_pack_open(tp_py_state *state, PyObject *tuple, tp_py_pack *pack);
void
tp_py_pack_close(tp_py_pack *pack);

#endif
