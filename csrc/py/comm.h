/* What csrc/py/engine.c needs of a Python communicator. */
#ifndef TP_PY_COMM_H
#define TP_PY_COMM_H

#include "csrc/comm/comm.h"
#include "csrc/py/module.h"

/* The communicator in a _core.Comm, which the caller keeps alive; NULL with TypeError if it is something else. */
tp_comm *
tp_py_comm_of(PyObject *object);
/* From now on it, and all that it stands on, is this caller's alone, and no other thread can close it: 0; -1 with InvalidValueError
 * (closed) or RuntimeError (in use by another thread). */
int
tp_py_comm_hold(PyObject *object);
/* The same for who has its device, and goes away: it waits for the other thread, and it may be alone (comm.h). -1: it is closed, and no
 * exception. */
int
tp_py_comm_hold_in_turn(PyObject *object);
void
tp_py_comm_let_go(PyObject *object);
/* The region in a _core.Region, or in the one a _core.Comm stands on; NULL with TypeError. */
tp_region *
tp_py_region_of(PyObject *object);
/* A _core.Comm of `comm`, which it closes, and of `region` (a _core.Region), which it keeps; as it keeps `beneath`, the
 * _core.Comm that `comm` stands on, or NULL. Closes comm on failure. */
PyObject *
tp_py_comm_wrap(tp_py_state *state, PyObject *region, PyObject *beneath, tp_comm *comm);

#endif
