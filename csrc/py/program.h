/* Programs between C and Python, for the files of csrc/py that take or make one. */
#ifndef TP_PY_PROGRAM_H
#define TP_PY_PROGRAM_H

#include "csrc/py/module.h"
#include "csrc/sched/sched.h"

/* A terapipe_c._core.Program around `program`, which it takes over (and closes on failure). */
PyObject *
tp_py_program_wrap(tp_py_state *state, tp_program *program);
/* Borrowed from the object; NULL with a TypeError that names `what`. */
const tp_program *
tp_py_program_get(tp_py_state *state, PyObject *object, const char *what);

/* Of an object that is one. */
const tp_program *
tp_py_program_of(PyObject *self);
/* Methods of a stage's number: program_stage.c. */
PyObject *
tp_py_program_activation_slots(PyObject *self, PyObject *stage);
PyObject *
tp_py_program_gradient_slots(PyObject *self, PyObject *stage);
PyObject *
tp_py_program_versions(PyObject *self, PyObject *stage);
/* Passes: program_passes.c. */
PyObject *
tp_py_program_lower(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *
tp_py_program_strip(PyObject *self, PyObject *none);
PyObject *
tp_py_program_save_memory(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *
tp_py_program_remakes_apart(PyObject *self, PyObject *none);
PyObject *
tp_py_program_split_with(PyObject *self, PyObject *args);
PyObject *
tp_py_program_reorder_by(PyObject *self, PyObject *cost);

/* What a class method returns: `self` there is the class (of a static type of ours, so never a heap type's metatype). The
 * program is taken over, or the status raised. */
PyObject *
tp_py_program_made_by(PyObject *type, tp_status status, tp_program *program);
/* Class methods: (schedule, ranks, chunks, slices), (ranks, micro-batches, split), (ranks, slices, most, F, I, W seconds). */
PyObject *
tp_py_program_build(PyObject *type, PyObject *args);
PyObject *
tp_py_program_build_sliced(PyObject *type, PyObject *args);
PyObject *
tp_py_program_build_zb_v(PyObject *type, PyObject *args);
PyObject *
tp_py_program_build_hanayo(PyObject *type, PyObject *args);
PyObject *
tp_py_program_build_dualpipe_v(PyObject *type, PyObject *args); /* (ranks, slices) */
PyObject *
tp_py_program_build_chimera(PyObject *type, PyObject *args); /* likewise */
PyObject *
tp_py_program_build_bpipe(PyObject *type, PyObject *args); /* (ranks, slices) */
PyObject *
tp_py_program_build_pipedream(PyObject *type, PyObject *args); /* (ranks, slices) */

/* What one cost may be of: a table of each operation, of six halves, of OPT's three sums and its norm, six arrays of messages' seconds and one
 * of their latency, and bytes. */
enum { TP_PY_COST_VIEWS = TP_OPS + 6 + 4 + 7 + 1 };

/* Durations from Python: `tables` maps operation names to float64 arrays that the strides index. */
typedef struct {
    tp_durations durations;
    const double *bytes; /* NULL: none */
    int64_t bytes_stage_stride, bytes_unit_stride;
    Py_buffer views[TP_PY_COST_VIEWS];
    int count;
} tp_py_costs;
/* cost: (tables, stage_stride, unit_stride, comm or None, comm per unit or None, bytes or None, bytes_stage_stride,
 * bytes_unit_stride, comm of a first half per unit or None, of a second), what terapipe_c.schedule.tables makes. 0, or -1 with an exception. */
int
tp_py_costs_open(const tp_program *program, PyObject *cost, tp_py_costs *costs);
void
tp_py_costs_close(tp_py_costs *costs);
/* (makespan_s, lower_bound_s, {cause: seconds}, busy_s [ranks], peak bytes [ranks]) */
PyObject *
tp_py_timeline_totals(tp_py_state *state, const tp_program *program, const tp_timeline *line);
/* uint8 array of one 32-byte record per interval: rank op stage micro slice (uint16), 6 bytes, start_s end_s (float64). */
PyObject *
tp_py_timeline_intervals(tp_py_state *state, const tp_program *program, const tp_timeline *line);

#endif
