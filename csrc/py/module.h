/* The Python room: the only one that sees Python.h. Types are heap types, state is per module, the GIL is released
 * around all work. */
#ifndef TP_PY_MODULE_H
#define TP_PY_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "csrc/base/deadline.h"
#include "csrc/base/status.h"
#include "csrc/comm/comm.h"

typedef struct {
    PyObject *error;                        /* terapipe_c.Error */
    PyObject *exceptions[TP_STATUS_COUNT];  /* one class per status; [TP_OK] NULL */
    PyTypeObject *program, *timeline, *engine, *region, *comm, *buffer;
} tp_py_state;

extern struct PyModuleDef tp_py_module;

tp_py_state *
tp_py_module_state(PyObject *module);
/* Of an object of one of our heap types. */
tp_py_state *
tp_py_state_of(PyObject *self);

/* Raise the exception of `status` with the thread's message; returns NULL. Call with the GIL held, on the thread that
 * failed. */
PyObject *
tp_py_raise(tp_py_state *state, tp_status status);
/* Around a call in C that may take long: it runs without the GIL, and handlers of signals run within it (every 20 ms at most, in
 * the main thread). What one raises ends it soon, and takes the place of whatever it gives: tp_py_back, with the status of the
 * call, is then EABORTED, with that exception set, which tp_py_raise leaves alone. Free what the call made as after any error, but
 * it may have ended well. */
typedef struct {
    PyThreadState *thread;
    tp_listener before;
} tp_py_away;
void
tp_py_leave(tp_py_away *away);
/* The same for a call in C of a rank, which often is on a thread that no signal comes to: what ends it is its region's abort, and
 * tp_py_back is EABORTED then, too, without an exception. Of a rank without a region (NULL): tp_py_leave. */
void
tp_py_leave_rank(tp_py_away *away, const tp_region *region);
TP_MUST_USE tp_status
tp_py_back(tp_py_away *away, tp_status status);

/* Raise InvalidValueError or InvalidTypeError; return NULL. format: as PyErr_Format's. For what is wrong before C sees it. */
PyObject *
tp_py_invalid_value(const char *format, ...);
PyObject *
tp_py_invalid_type(const char *format, ...);
/* The same of OutOfMemoryError, with words: PyErr_NoMemory has none. For what a call's arguments and results take. */
PyObject *
tp_py_no_memory(void);
int
tp_py_add_exceptions(PyObject *module, tp_py_state *state);

/* Each file adds its functions and types to the module: 0, or -1 with an exception set. */
int
tp_py_add_model(PyObject *module, tp_py_state *state);
int
tp_py_add_program(PyObject *module, tp_py_state *state);
int
tp_py_add_planners(PyObject *module, tp_py_state *state);
int
tp_py_add_shop(PyObject *module, tp_py_state *state);
int
tp_py_add_autopipe(PyObject *module, tp_py_state *state);
int
tp_py_add_comm(PyObject *module, tp_py_state *state);
int
tp_py_add_device_comm(PyObject *module, tp_py_state *state);
int
tp_py_add_tcp(PyObject *module, tp_py_state *state);
int
tp_py_add_mpi(PyObject *module, tp_py_state *state);
int
tp_py_add_engine(PyObject *module, tp_py_state *state);
int
tp_py_add_memory(PyObject *module, tp_py_state *state);
int
tp_py_add_kernels(PyObject *module, tp_py_state *state);
int
tp_py_add_cost(PyObject *module, tp_py_state *state);
int
tp_py_add_waits(PyObject *module, tp_py_state *state);
int
tp_py_add_again(PyObject *module, tp_py_state *state);
int
tp_py_add_bmpipe(PyObject *module, tp_py_state *state);
int
tp_py_add_layer_graph(PyObject *module, tp_py_state *state);
int
tp_py_add_baselines(PyObject *module, tp_py_state *state);
int
tp_py_add_dawnpiper(PyObject *module, tp_py_state *state);
int
tp_py_add_judge(PyObject *module, tp_py_state *state);
int
tp_py_add_slicing_bound(PyObject *module, tp_py_state *state);
int
tp_py_add_partition_bound(PyObject *module, tp_py_state *state);
int
tp_py_add_deadline(PyObject *module, tp_py_state *state);

/* ---- arrays (buffer protocol: NumPy is not needed to build) -------------------------------------------------------- */

/* A C-contiguous, aligned view of `object` with exactly this format ('d' float64, 'f' float32, 'i' int32, 'q' int64,
 * 'B' uint8) and ndim (-1: any). ValueError / TypeError naming `what`. End with PyBuffer_Release. No silent copy. */
int
tp_py_view(PyObject *object, char format, int ndim, int writable, const char *what, Py_buffer *view);
/* The same of `count` values in a row, which *out points at; None: nothing is viewed and *out stays. */
int
tp_py_view_optional(PyObject *object, char format, Py_ssize_t count, const char *what, Py_buffer *view, const void **out);
/* Ends those of `count` views that are open: those never opened are zero. */
void
tp_py_end_views(Py_buffer *view, int count);
/* A NumPy array (numpy is imported lazily through Python) over memory that `free` ends: numpy.frombuffer on one of our
 * buffer objects, so `base` keeps it alive. format as above; takes ownership of memory (malloc'ed) even on failure, as which an
 * exception that is set already counts: of several arrays in a row the first that fails is told. */
PyObject *
tp_py_array(tp_py_state *state, void *memory, char format, int ndim, const Py_ssize_t *shape);
/* A list of int. */
PyObject *
tp_py_ints(const int *values, int count);
int
tp_py_add_buffer(PyObject *module, tp_py_state *state);

#endif
