/* terapipe_c._core.Program: an immutable list of instructions per rank. What needs NumPy or draws is in Python
 * (terapipe_c/schedule.py, terapipe_c/view.py): methods here hand over to it. */
#include "csrc/py/program.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    PyObject_HEAD tp_program *program;
    Py_hash_t hash; /* -1: not computed yet */
} object;

const tp_program *
tp_py_program_of(PyObject *self)
{
    return ((object *)self)->program;
}

static PyObject *
wrap(PyTypeObject *type, tp_program *program)
{
    object *self = (object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        tp_program_close(program);
        return NULL;
    }
    self->program = program;
    self->hash = -1;
    return (PyObject *)self;
}

PyObject *
tp_py_program_wrap(tp_py_state *state, tp_program *program)
{
    return wrap(state->program, program);
}

const tp_program *
tp_py_program_get(tp_py_state *state, PyObject *given, const char *what)
{
    if (PyObject_TypeCheck(given, state->program))
        return tp_py_program_of(given);
    tp_py_invalid_type("%s is %s: a Program would be right", what, Py_TYPE(given)->tp_name);
    return NULL;
}

PyObject *
tp_py_program_made_by(PyObject *type, tp_status status, tp_program *program)
{
    if (status == TP_OK)
        return wrap((PyTypeObject *)type, program);
    tp_program_close(program); /* a signal's handler may have raised in spite of it */
    return tp_py_raise(PyModule_GetState(PyType_GetModuleByDef((PyTypeObject *)type, &tp_py_module)), status);
}

/* terapipe_c.<module>.<function>(self, *args, **kwargs) */
static PyObject *
hand_over(const char *module, const char *function, PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *home = PyImport_ImportModule(module), *result = NULL;
    PyObject *callee = home == NULL ? NULL : PyObject_GetAttrString(home, function);
    PyObject *first = callee == NULL ? NULL : PyTuple_Pack(1, self);
    PyObject *all = first == NULL ? NULL : args == NULL ? Py_NewRef(first) : PySequence_Concat(first, args);
    if (all != NULL)
        result = PyObject_Call(callee, all, kwargs);
    Py_XDECREF(home);
    Py_XDECREF(callee);
    Py_XDECREF(first);
    Py_XDECREF(all);
    return result;
}

/* ---- making ------------------------------------------------------------------------------------------------------------ */

/* What UTF-8 has no bytes for. */
static void
name_surrogate(PyObject *text)
{
    Py_ssize_t at = 0;
    while (at < PyUnicode_GET_LENGTH(text) && (PyUnicode_READ_CHAR(text, at) & ~0x7ffu) != 0xd800)
        at++;
    tp_py_invalid_value("text has a lone surrogate at %zd, which is half of a character: text in UTF-8 would be right", at);
}

static PyObject *
from_text(PyObject *type, PyObject *args, PyObject *kwargs, tp_status (*parse)(const char *, size_t, tp_program **))
{
    static char *names[] = {"text", NULL};
    PyObject *text;
    Py_ssize_t length;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &text))
        return NULL;
    const char *utf8 = PyUnicode_Check(text) ? PyUnicode_AsUTF8AndSize(text, &length) : NULL;
    if (utf8 == NULL) {
        if (!PyErr_Occurred())
            tp_py_invalid_type("text is %s: str would be right", Py_TYPE(text)->tp_name);
        else if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError))
            name_surrogate(text);
        return NULL;
    }
    size_t mark = length >= 3 && memcmp(utf8, "\xef\xbb\xbf", 3) == 0 ? 3 : 0; /* a byte order mark, as spreadsheets write it */
    tp_program *program = NULL;
    tp_py_away away;
    tp_py_leave(&away);
    tp_status status = tp_py_back(&away, parse(utf8 + mark, (size_t)length - mark, &program));
    return tp_py_program_made_by(type, status, program);
}

static PyObject *
program_parse(PyObject *type, PyObject *args, PyObject *kwargs)
{
    return from_text(type, args, kwargs, tp_program_parse);
}

static PyObject *
program_from_csv(PyObject *type, PyObject *args, PyObject *kwargs)
{
    return from_text(type, args, kwargs, tp_program_parse_csv);
}

static PyObject *
program_from_code(PyObject *type, PyObject *args)
{
    PyObject *counts, *code;
    int keep_slots;
    Py_buffer count, bytes;
    if (!PyArg_ParseTuple(args, "OOp", &counts, &code, &keep_slots) ||
        tp_py_view(counts, 'q', 1, 0, "counts", &count) < 0)
        return NULL;
    if (tp_py_view(code, 'B', 1, 0, "code", &bytes) < 0) {
        PyBuffer_Release(&count);
        return NULL;
    }
    int64_t total = 0, ranks = count.shape[0], whole = bytes.len / (Py_ssize_t)sizeof(tp_instr);
    for (int64_t r = 0; total >= 0 && r < ranks; r++) {
        int64_t one = ((const int64_t *)count.buf)[r];
        total = one < 0 || one > whole - total ? -1 : total + one;
    }
    PyObject *result = NULL;
    tp_program *program = NULL;
    if (total != whole || ranks > 32767) {
        tp_py_invalid_value("counts of %lld ranks do not sum to the %lld instructions", (long long)ranks,
                            (long long)whole);
    } else {
        tp_status status = tp_program_from_code((int)ranks, count.buf, bytes.buf, keep_slots, &program);
        result = tp_py_program_made_by(type, status, program);
    }
    PyBuffer_Release(&count);
    PyBuffer_Release(&bytes);
    return result;
}

static PyObject *
program_from_instructions(PyObject *type, PyObject *args, PyObject *kwargs)
{
    return hand_over("terapipe_c.schedule", "_from_instructions", type, args, kwargs);
}

/* ---- text -------------------------------------------------------------------------------------------------------------- */

static PyObject *
print(PyObject *self, size_t (*printer)(const tp_program *, char *, size_t))
{
    char *text;
    size_t length;
    tp_py_away away;
    tp_py_leave(&away);
    length = printer(tp_py_program_of(self), NULL, 0);
    text = malloc(length + 1);
    if (text != NULL)
        printer(tp_py_program_of(self), text, length + 1);
    PyObject *result = NULL;
    if (tp_py_back(&away, TP_OK) == TP_OK)
        result = text == NULL ? tp_py_no_memory() : PyUnicode_FromStringAndSize(text, (Py_ssize_t)length);
    free(text);
    return result;
}

static PyObject *
program_str(PyObject *self)
{
    return print(self, tp_program_print);
}

static PyObject *
program_to_csv(PyObject *self, PyObject *Py_UNUSED(none))
{
    tp_status status = tp_program_can_csv(tp_py_program_of(self));
    return status == TP_OK ? print(self, tp_program_print_csv) : tp_py_raise(tp_py_state_of(self), status);
}

static PyObject *
program_repr(PyObject *self)
{
    const tp_program *p = tp_py_program_of(self);
    return PyUnicode_FromFormat("Program(ranks=%d, stages=%d, micro_batches=%d, slices=%s%d, instructions=%lld)",
                                p->ranks, p->stages, p->micros,
                                tp_program_units(p) == (int64_t)p->micros * p->max_slices ? "" : "<=", p->max_slices,
                                (long long)p->begin[p->ranks]);
}

/* ---- proof and timing ----------------------------------------------------------------------------------------------------------- */

static PyObject *
program_check(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"canonical", NULL};
    int canonical = 0;
    tp_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|p", names, &canonical))
        return NULL;
    tp_py_away away;
    tp_py_leave(&away);
    status = tp_program_check(tp_py_program_of(self));
    if (status == TP_OK && canonical)
        status = tp_program_check_canonical(tp_py_program_of(self));
    status = tp_py_back(&away, status);
    if (status != TP_OK)
        return tp_py_raise(tp_py_state_of(self), status);
    Py_RETURN_NONE;
}

/* [ranks] */
static PyObject *
program_stuck(PyObject *self, PyObject *args)
{
    const tp_program *program = tp_py_program_of(self);
    int slots, guests_have_slots;
    if (!PyArg_ParseTuple(args, "ip", &slots, &guests_have_slots))
        return NULL;
    if (slots < 1)
        return tp_py_invalid_value("%d slots: at least 1 would be right", slots);
    const Py_ssize_t ranks = program->ranks;
    int64_t *at = malloc((size_t)ranks * sizeof *at);
    if (at == NULL)
        return tp_py_no_memory();
    tp_py_away away;
    tp_py_leave(&away);
    tp_status status = tp_py_back(&away, tp_program_stuck(program, slots, guests_have_slots, at));
    if (status == TP_OK)
        return tp_py_array(tp_py_state_of(self), at, 'q', 1, &ranks);
    free(at);
    return tp_py_raise(tp_py_state_of(self), status);
}

/* ---- timing ------------------------------------------------------------------------------------------------------------ */

static PyObject *
program_time(PyObject *self, PyObject *args)
{
    PyObject *cost, *result = NULL;
    int keep;
    tp_py_costs costs;
    const tp_program *program = tp_py_program_of(self);
    if (!PyArg_ParseTuple(args, "Op", &cost, &keep) || tp_py_costs_open(program, cost, &costs) < 0)
        return NULL;
    tp_timeline *line = NULL;
    tp_py_away away;
    tp_py_leave(&away);
    tp_status status = tp_py_back(&away, tp_program_simulate(program, &costs.durations, costs.bytes, costs.bytes_stage_stride,
                                                             costs.bytes_unit_stride, keep, &line));
    tp_py_costs_close(&costs);
    tp_py_state *state = tp_py_state_of(self);
    if (status != TP_OK)
        tp_py_raise(state, status);
    else
        result = keep ? tp_py_timeline_intervals(state, program, line) : tp_py_timeline_totals(state, program, line);
    tp_timeline_close(line);
    return result;
}

/* One tp_sim, `rows` times: makespans of several cost tables, float64 [rows]. */
static PyObject *
program_makespans(PyObject *self, PyObject *args)
{
    PyObject *list;
    tp_sim *sim = NULL;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &list))
        return NULL;
    tp_py_state *state = tp_py_state_of(self);
    tp_py_away away;
    tp_py_leave(&away);
    tp_status status = tp_py_back(&away, tp_sim_open(tp_py_program_of(self), &sim));
    if (status != TP_OK) {
        tp_sim_close(sim);
        return tp_py_raise(state, status);
    }
    Py_ssize_t count = PyList_GET_SIZE(list);
    double *made_s = malloc((size_t)count * sizeof *made_s + 1);
    int good = made_s != NULL || tp_py_no_memory() != NULL;
    for (Py_ssize_t i = 0; good && i < count; i++) {
        tp_py_costs costs;
        good = tp_py_costs_open(tp_py_program_of(self), PyList_GET_ITEM(list, i), &costs) == 0;
        if (!good)
            break;
        tp_py_leave(&away);
        tp_sim_run(sim, &costs.durations, &made_s[i]);
        status = tp_py_back(&away, tp_deadline_check_told());
        good = status == TP_OK || tp_py_raise(state, status) != NULL;
        tp_py_costs_close(&costs);
    }
    tp_sim_close(sim);
    if (good)
        return tp_py_array(state, made_s, 'd', 1, &count);
    free(made_s);
    return NULL;
}

#define HAND_OVER(method, module, function)                                                                            \
    static PyObject *program_##method(PyObject *self, PyObject *args, PyObject *kwargs)                                \
    {                                                                                                                  \
        return hand_over("terapipe_c." module, function, self, args, kwargs);                                          \
    }
HAND_OVER(simulate, "schedule", "_simulate")
HAND_OVER(makespan, "schedule", "_makespan")
HAND_OVER(split, "schedule", "_split")
HAND_OVER(reorder, "schedule", "_reorder")
HAND_OVER(instructions, "schedule", "_instructions")
HAND_OVER(repr_html, "view", "program_html")

/* ---- looking ----------------------------------------------------------------------------------------------------------- */

static Py_ssize_t
program_len(PyObject *self)
{
    return (Py_ssize_t)tp_py_program_of(self)->begin[tp_py_program_of(self)->ranks];
}

static PyObject *
program_compare(PyObject *self, PyObject *other, int how)
{
    if ((how != Py_EQ && how != Py_NE) || !PyObject_TypeCheck(other, tp_py_state_of(self)->program))
        Py_RETURN_NOTIMPLEMENTED;
    return PyBool_FromLong(tp_program_equal(tp_py_program_of(self), tp_py_program_of(other)) == (how == Py_EQ));
}

/* FNV-1a over eight bytes at a time: equal programs have equal code and equal boundaries. */
static Py_hash_t
program_hash(PyObject *self)
{
    object *o = (object *)self;
    if (o->hash != -1)
        return o->hash;
    const tp_program *p = o->program;
    uint64_t hash = 0xcbf29ce484222325u, word;
    for (int r = 0; r <= p->ranks; r++)
        hash = (hash ^ (uint64_t)p->begin[r]) * 0x100000001b3u;
    for (int64_t i = 0; i < 2 * p->begin[p->ranks]; i++) {
        memcpy(&word, (const char *)p->code + 8 * i, sizeof word);
        hash = (hash ^ word) * 0x100000001b3u;
        hash ^= hash >> 29;
    }
    o->hash = (Py_hash_t)hash == -1 ? -2 : (Py_hash_t)hash;
    return o->hash;
}

static int
program_buffer(PyObject *self, Py_buffer *view, int flags)
{
    const tp_program *p = tp_py_program_of(self);
    return PyBuffer_FillInfo(view, self, p->code, (Py_ssize_t)(p->begin[p->ranks] * (int64_t)sizeof *p->code), 1,
                             flags);
}

static PyObject *
program_bounds(PyObject *self, PyObject *number)
{
    long rank = PyLong_AsLong(number);
    if (rank == -1 && PyErr_Occurred())
        return NULL;
    const tp_program *p = tp_py_program_of(self);
    if (rank < 0 || rank >= p->ranks)
        return PyErr_Format(PyExc_IndexError, "rank is %ld: 0 to %d would be right", rank, p->ranks - 1);
    return Py_BuildValue("(LL)", (long long)p->begin[rank], (long long)p->begin[rank + 1]);
}

static PyObject *
numbers(const int32_t *from, int count)
{
    PyObject *list = tp_py_ints(from, count), *tuple = list == NULL ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return tuple;
}

static PyObject *
program_get(PyObject *self, void *what)
{
    const tp_program *p = tp_py_program_of(self);
    switch (*(const char *)what) {
    case 'r': return PyLong_FromLong(p->ranks);
    case 's': return PyLong_FromLong(p->stages);
    case 'm': return PyLong_FromLong(p->micros);
    case 'k': return PyLong_FromLong(p->copies);
    case 'b': return PyBool_FromLong(tp_program_swaps_beside(p));
    case 'c': {
        int64_t counts[TP_OPS] = {0};
        for (int64_t i = 0; i < p->begin[p->ranks]; i++)
            counts[p->code[i].op]++;
        PyObject *dict = PyDict_New();
        for (int op = 0; dict != NULL && op < TP_OPS; op++) {
            PyObject *count = PyLong_FromLongLong(counts[op]);
            if (count == NULL || (counts[op] > 0 && PyDict_SetItemString(dict, tp_op_name(op), count) < 0))
                Py_CLEAR(dict);
            Py_XDECREF(count);
        }
        return dict;
    }
    case 'n': return numbers(p->slices, p->micros);
    default: return numbers(p->rank_of, p->stages);
    }
}

static PyObject *
program_reduce(PyObject *self, PyObject *Py_UNUSED(none))
{
    PyObject *text = program_str(self), *parse = text == NULL ? NULL : PyObject_GetAttrString(self, "parse");
    if (parse == NULL) {
        Py_XDECREF(text);
        return NULL;
    }
    return Py_BuildValue("(N(N))", parse, text);
}

static void
program_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    tp_program_close(((object *)self)->program);
    type->tp_free(self);
    Py_DECREF(type);
}

#define CALL(f) ((PyCFunction)(void (*)(void))(f))
static PyMethodDef methods[] = {
    {"parse", CALL(program_parse), METH_VARARGS | METH_KEYWORDS | METH_CLASS,
     "parse($type, text)\n--\n\nThe program that a text says: one line per rank (an empty one is a rank without work, "
     "but at the end), words "
     "`<stage><OP><micro>.<slice>[half][@peer]`. ValueError names rank and word."},
    {"from_csv", CALL(program_from_csv), METH_VARARGS | METH_KEYWORDS | METH_CLASS,
     "from_csv($type, text)\n--\n\nThe program of a schedule CSV of torch.distributed.pipelining: compute_only, or compute_comms, "
     "whose sends, receives, UNSHARD, RESHARD and REDUCE_GRAD are checked and left out (`lower` adds messages)."},
    {"from_instructions", CALL(program_from_instructions), METH_VARARGS | METH_KEYWORDS | METH_CLASS,
     "from_instructions($type, ranks, keep_slots=False)\n--\n\nThe program of one structured array per rank, fields as "
     "in `instructions`."},
    {"_build", tp_py_program_build, METH_VARARGS | METH_CLASS, NULL},
    {"_build_sliced", tp_py_program_build_sliced, METH_VARARGS | METH_CLASS, NULL},
    {"_build_hanayo", tp_py_program_build_hanayo, METH_VARARGS | METH_CLASS, NULL},
    {"_build_zb_v", tp_py_program_build_zb_v, METH_VARARGS | METH_CLASS, NULL},
    {"_build_dualpipe_v", tp_py_program_build_dualpipe_v, METH_VARARGS | METH_CLASS, NULL},
    {"_build_chimera", tp_py_program_build_chimera, METH_VARARGS | METH_CLASS, NULL},
    {"_build_bpipe", tp_py_program_build_bpipe, METH_VARARGS | METH_CLASS, NULL},
    {"_build_pipedream", tp_py_program_build_pipedream, METH_VARARGS | METH_CLASS, NULL},
    {"_from_code", program_from_code, METH_VARARGS | METH_CLASS, NULL},
    {"to_csv", program_to_csv, METH_NOARGS,
     "to_csv($self, /)\n--\n\ntorch.distributed.pipelining's compute-only CSV. ScheduleError "
     "where it has no word for what the program has (token slices, R, SO, SI)."},
    {"lower", CALL(tp_py_program_lower), METH_VARARGS | METH_KEYWORDS,
     "lower($self, tied=False)\n--\n\nWith sends, receives, slots, one OPT "
     "per stage, and (tied) one AR on the ranks of the first and last stage. Cannot deadlock on any transport."},
    {"save_memory", CALL(tp_py_program_save_memory), METH_VARARGS | METH_KEYWORDS,
     "save_memory($self, /, recompute, swap, ahead=0, beside=False)\n--\n\nThe compute program with R, SO and SI on the stages that save memory so; "
     "each a byte for every stage: 0 they do not, 1 all R (SI) of a micro-batch stand before its first backward, 2 each before its "
     "own; 255 R is within the whole backward, of a micro-batch of one slice, that it stands right before (+). ahead 1: SI stand right behind the backward before that one on their stage, 2: right before it (a gradient slot more), "
     "so that copies may be made beside what is between; never before their SO. beside: the rank's copier makes them so (&), with "
     "ahead 3 out of two places in turn (&&), so that a forward need not wait for the copy of the one before it."},
    {"remakes_apart", tp_py_program_remakes_apart, METH_NOARGS,
     "remakes_apart($self, /)\n--\n\nBytes [stages]: 1 where R come slice by slice, so that attentions may keep their keys and values."},
    {"strip", tp_py_program_strip, METH_NOARGS, "strip($self, /)\n--\n\nWithout comms, slots, AR and OPT."},
    {"split", CALL(program_split), METH_VARARGS | METH_KEYWORDS,
     "split($self, cost=None, pending=1, comm_s=0.0)\n--\n\nB into I and "
     "W, with W where its rank would wait; at most `pending` micro-batches of a stage wait for their W (0: W right "
     "behind I). cost as in simulate; None: every op takes 1 s."},
    {"reorder", CALL(program_reorder), METH_VARARGS | METH_KEYWORDS,
     "reorder($self, cost=None, comm_s=0.0)\n--\n\nF and B (of I and W, too) by list scheduling, each stage on its rank: a rank does "
     "what can start first, a backward before a forward, of backwards the latest stage's, of forwards the earliest stage's. split "
     "it, as it counts on weight gradients to fill waits. Of looped_bfs with several sequences often faster; simulate both. cost as "
     "in simulate; None: every op takes 1 s."},
    {"check", CALL(program_check), METH_VARARGS | METH_KEYWORDS,
     "check($self, /, canonical=False)\n--\n\nRaises ScheduleError (with .rank and .position) or proves the program: every "
     "instruction once, in order, messages matched, no deadlock, no slot rewritten in use. canonical: also that sums go "
     "through micro-batches in the one order that this engine executes."},
    {"simulate", CALL(program_simulate), METH_VARARGS | METH_KEYWORDS,
     "simulate($self, cost, comm_s=0.0, activation_bytes=None)\n"
     "--\n\nThe Timeline of this program. cost: {\"F\": s, \"B\": s, \"I\": s, \"W\": s, ...} with scalars or float64 "
     "[stage], [stage, slice] or [stage, units], or an object with durations(program) -> such a dict. comm_s: seconds of a "
     "message, a scalar or [stage] by the stage that sends it (activations to the next, gradients to the one before), while "
     "the ranks work; on one rank there is none. activation_bytes: what a stage holds from F to B, or W, a scalar or [stage], "
     "[stage, slice]; None: no memory is told."},
    {"makespan", CALL(program_makespan), METH_VARARGS | METH_KEYWORDS,
     "makespan($self, costs, comm_s=0.0)\n--\n\nThe makespan alone, "
     "seconds: for one cost, or float64 [len(costs)] for a list of them, each one linear pass."},
    {"instructions", CALL(program_instructions), METH_VARARGS | METH_KEYWORDS,
     "instructions($self, rank)\n--\n\nRead-only structured "
     "array (no copy), fields op stage micro slice peer flags slot; op is an index into schedules.OPS."},
    {"activation_slots", tp_py_program_activation_slots, METH_O,
     "activation_slots($self, stage, /)\n--\n\nBuffers that a lowered stage needs."},
    {"gradient_slots", tp_py_program_gradient_slots, METH_O,
     "gradient_slots($self, stage, /)\n--\n\nBuffers that a lowered stage needs."},
    {"versions", tp_py_program_versions, METH_O,
     "versions($self, stage, /)\n--\n\nOf its weights that a stage has at once at most; 0: it has no updates by micro-batches (U)."},
    {"_bounds", program_bounds, METH_O, NULL},
    {"_stuck", program_stuck, METH_VARARGS, NULL},
    {"_time", program_time, METH_VARARGS, NULL},
    {"_makespans", program_makespans, METH_VARARGS, NULL},
    {"_split_with", tp_py_program_split_with, METH_VARARGS, NULL},
    {"_reorder_by", tp_py_program_reorder_by, METH_O, NULL},
    {"_repr_html_", CALL(program_repr_html), METH_VARARGS | METH_KEYWORDS, NULL},
    {"__reduce__", program_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getters[] = {
    {"num_ranks", program_get, NULL, "Ranks: one list of instructions each.", "r"},
    {"num_stages", program_get, NULL, "Virtual stages.", "s"},
    {"swaps_beside", program_get, NULL, "Are swaps made beside the work, by each rank's copier?", "b"},
    {"copies", program_get, NULL, "Copies of the model: 1, or 2 (chimera), each half of the stages and of the micro-batches.", "k"},
    {"num_micro_batches", program_get, NULL, "Micro-batches of a step.", "m"},
    {"counts", program_get, NULL, "How many instructions of each operation it has: {name: count}.", "c"},
    {"slices", program_get, NULL, "Token slices of each micro-batch: tuple [num_micro_batches].", "n"},
    {"rank_of", program_get, NULL, "The rank of each stage: tuple [num_stages].", "o"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots_of_type[] = {
    {Py_tp_dealloc, program_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {Py_tp_repr, program_repr},
    {Py_tp_str, program_str},
    {Py_tp_richcompare, program_compare},
    {Py_tp_hash, program_hash},
    {Py_sq_length, program_len},
    {Py_bf_getbuffer, program_buffer},
    {Py_tp_doc, "An immutable pipeline program: one list of 16-byte instructions per rank."},
    {0, NULL},
};
static PyType_Spec spec = {"terapipe_c._core.Program", sizeof(object), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
                           slots_of_type};

int
tp_py_add_program(PyObject *module, tp_py_state *state)
{
    state->program = (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
    if (state->program == NULL || PyModule_AddObjectRef(module, "Program", (PyObject *)state->program) < 0)
        return -1;
    PyObject *names = PyTuple_New(TP_OPS);
    for (int op = 0; names != NULL && op < TP_OPS; op++) {
        PyObject *name = PyUnicode_FromString(tp_op_name(op));
        if (name == NULL)
            Py_CLEAR(names);
        else
            PyTuple_SET_ITEM(names, op, name);
    }
    int result = names == NULL ? -1 : PyModule_AddObjectRef(module, "OPS", names);
    Py_XDECREF(names);
    return result;
}
