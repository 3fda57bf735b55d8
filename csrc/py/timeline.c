/* Timings between C and Python: durations in, totals and intervals out. */
#include "csrc/py/program.h"

#include <stdlib.h>
#include <string.h>

/* Entries that strides reach: stages and units count from 0. More than any array has where that is beyond 64 bits. */
static int64_t
entries(const tp_program *program, int64_t stage_stride, int64_t unit_stride)
{
    int64_t stages, units, sum;
    if (__builtin_mul_overflow((int64_t)program->stages - 1, stage_stride, &stages) ||
        __builtin_mul_overflow(tp_program_units(program) - 1, unit_stride, &units) ||
        __builtin_add_overflow(stages, units, &sum) || sum == INT64_MAX)
        return INT64_MAX;
    return sum + 1;
}

static const double *
take(tp_py_costs *costs, PyObject *array, int64_t least, const char *what)
{
    if (costs->count == TP_PY_COST_VIEWS) { /* a dict may have two keys of one text: of str's subclasses */
        tp_py_invalid_value("%s: a cost has more arrays than there are names for them", what);
        return NULL;
    }
    Py_buffer *view = &costs->views[costs->count];
    if (tp_py_view(array, 'd', -1, 0, what, view) < 0)
        return NULL;
    costs->count++;
    if (view->len / (Py_ssize_t)sizeof(double) < least) {
        tp_py_invalid_value("%s has %zd entries: %lld would be right", what,
                            view->len / (Py_ssize_t)sizeof(double), (long long)least);
        return NULL;
    }
    return view->buf;
}

/* Where the table of this name belongs; NULL: no operation is called so. */
static const double **
table_of(tp_durations *d, const char *name)
{
    size_t length = strcspn(name, ".");
    if (strcmp(name, "OPT.sum") == 0)
        return &d->sum_s;
    if (strcmp(name, "OPT.norm") == 0)
        return &d->norm_s;
    if (strcmp(name, "OPT.gather") == 0)
        return &d->gather_s;
    if (strcmp(name, "OPT.beside") == 0)
        return &d->beside_s;
    if (strcmp(name, "OPT.last") == 0)
        return &d->last_s;
    for (int op = 0; op < TP_OPS; op++)
        if (strlen(tp_op_name(op)) == length && strncmp(tp_op_name(op), name, length) == 0) {
            if (name[length] == 0)
                return &d->seconds[op];
            int half = strcmp(name + length, ".a") == 0 ? 0 : strcmp(name + length, ".b") == 0 ? 1 : -1;
            return half < 0 || (op != TP_OP_F && op != TP_OP_SF && op != TP_OP_RF) ? NULL : &d->half_s[half][op];
        }
    return NULL;
}

static int
take_tables(const tp_program *program, PyObject *tables, tp_py_costs *costs)
{
    tp_durations *d = &costs->durations;
    PyObject *name, *array;
    Py_ssize_t at = 0;
    while (PyDict_Next(tables, &at, &name, &array)) {
        const char *text = PyUnicode_AsUTF8(name);
        if (text == NULL)
            return -1;
        const double **table = table_of(d, text);
        if (table == NULL) {
            tp_py_invalid_value("cost has %R: the operations are F B I W R SF RF SB RB SO SI AR OPT SE RE SL RL U, and F.a F.b "
                                                  "SF.a SF.b RF.a RF.b for halves, OPT.sum, OPT.beside, OPT.last, OPT.gather for replicas, OPT.norm", name);
            return -1;
        }
        *table = take(costs, array, entries(program, d->stage_stride, d->unit_stride), text);
        if (*table == NULL)
            return -1;
    }
    return 0;
}

int
tp_py_costs_open(const tp_program *program, PyObject *cost, tp_py_costs *costs)
{
    PyObject *tables, *comm, *comm_units, *bytes, *half_comm[2] = {Py_None, Py_None}, *back = Py_None,
             *latency = Py_None, *guest = Py_None;
    long long stage_stride, unit_stride, bytes_stage_stride, bytes_unit_stride;
    *costs = (tp_py_costs){.count = 0};
    if (!PyTuple_Check(cost)) {
        tp_py_invalid_type("cost is %s: the tuple that terapipe_c.schedule.tables makes would be right", Py_TYPE(cost)->tp_name);
        return -1;
    }
    if (!PyArg_ParseTuple(cost, "O!LLOOOLL|OOOOO", &PyDict_Type, &tables, &stage_stride, &unit_stride, &comm, &comm_units,
                          &bytes, &bytes_stage_stride, &bytes_unit_stride, &half_comm[0], &half_comm[1], &back, &latency,
                          &guest))
        return -1;
    if (stage_stride < 0 || unit_stride < 0 || bytes_stage_stride < 0 || bytes_unit_stride < 0) {
        tp_py_invalid_value("a stride is negative");
        return -1;
    }
    tp_durations *d = &costs->durations;
    d->stage_stride = stage_stride;
    d->unit_stride = unit_stride;
    costs->bytes_stage_stride = bytes_stage_stride;
    costs->bytes_unit_stride = bytes_unit_stride;
    int64_t units = tp_program_units(program);
    if (take_tables(program, tables, costs) < 0 ||
        (comm != Py_None && (d->comm_s = take(costs, comm, program->stages, "comm_s")) == NULL) ||
        (comm_units != Py_None &&
         (d->comm_unit_s = take(costs, comm_units, program->stages * units, "comm_s")) == NULL) ||
        (half_comm[0] != Py_None &&
         (d->half_comm_s[0] = take(costs, half_comm[0], program->stages * units, "comm.a")) == NULL) ||
        (half_comm[1] != Py_None &&
         (d->half_comm_s[1] = take(costs, half_comm[1], program->stages * units, "comm.b")) == NULL) ||
        (back != Py_None &&
         (d->back_comm_unit_s = take(costs, back, program->stages * units, "comm.back")) == NULL) ||
        (latency != Py_None &&
         (d->latency_s = take(costs, latency, 2 * (int64_t)program->stages, "comm.latency")) == NULL) ||
        (guest != Py_None && (d->guest_comm_s = take(costs, guest, program->stages * units, "comm.guest")) == NULL) ||
        (bytes != Py_None && (costs->bytes = take(costs, bytes, entries(program, bytes_stage_stride, bytes_unit_stride),
                                                  "activation_bytes")) == NULL)) {
        tp_py_costs_close(costs);
        return -1;
    }
    return 0;
}

void
tp_py_costs_close(tp_py_costs *costs)
{
    while (costs->count > 0)
        PyBuffer_Release(&costs->views[--costs->count]);
}

static PyObject *
doubles(tp_py_state *state, const double *from, Py_ssize_t count)
{
    double *memory = malloc((size_t)count * sizeof *memory + 1);
    if (memory == NULL)
        return tp_py_no_memory();
    memcpy(memory, from, (size_t)count * sizeof *memory);
    return tp_py_array(state, memory, 'd', 1, &count);
}

PyObject *
tp_py_timeline_totals(tp_py_state *state, const tp_program *program, const tp_timeline *line)
{
    static const char *const causes[] = {
#define NAME(name) #name,
        TP_BUBBLE_MAP(NAME)
#undef NAME
    };
    PyObject *bubbles = PyDict_New();
    for (int i = 0; bubbles != NULL && i < TP_BUBBLES; i++) {
        PyObject *seconds = PyFloat_FromDouble(line->bubbles_s[i]);
        if (seconds == NULL || PyDict_SetItemString(bubbles, causes[i], seconds) < 0)
            Py_CLEAR(bubbles);
        Py_XDECREF(seconds);
    }
    if (bubbles == NULL)
        return NULL;
    PyObject *busy = doubles(state, line->busy_s, program->ranks);
    PyObject *peak = busy == NULL ? NULL : doubles(state, line->peak_bytes, program->ranks);
    if (peak == NULL) {
        Py_DECREF(bubbles);
        Py_XDECREF(busy);
        return NULL;
    }
    return Py_BuildValue("(ddNNN)", line->makespan_s, line->lower_bound_s, bubbles, busy, peak);
}

typedef struct {
    uint16_t rank, op, stage, micro, slice, unused[3];
    double start_s, end_s;
} record;

PyObject *
tp_py_timeline_intervals(tp_py_state *state, const tp_program *program, const tp_timeline *line)
{
    Py_ssize_t bytes = (Py_ssize_t)line->operations * (Py_ssize_t)sizeof(record);
    record *records = malloc((size_t)bytes + 1);
    if (records == NULL)
        return tp_py_no_memory();
    int64_t steps = 0;
    tp_py_away away;
    tp_py_leave(&away);
    for (int r = 0; r < program->ranks; r++)
        for (int64_t k = line->begin[r]; k < line->begin[r + 1] && !tp_deadline_told_after(&steps, 8); k++) {
            const tp_instr *i = &program->code[program->begin[r] + line->at[k]];
            records[k] =
                (record){(uint16_t)r, i->op, i->stage, i->micro, i->slice, {0}, line->start_s[k], line->end_s[k]};
        }
    if (tp_py_back(&away, TP_OK) != TP_OK) {
        free(records);
        return NULL;
    }
    return tp_py_array(state, records, 'B', 1, &bytes);
}
