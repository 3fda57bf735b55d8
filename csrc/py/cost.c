/* Costs for Python: pure functions of packed arrays. A pack is the tuple
 * (coefficients float64 [16, 7], starts int64 [17], rows float64 [p], seconds float64 [p], tables float64 [t, n+1,
 * n+1], granularity, overhead_s, (row_s, least, flush_s) of tp_cost_waits); coefficient columns: table's index or -1, its scale,
 * pair_s, a0, a1, a2, a3; row 3 * kind + phase, then those of tp_cost_remade; curve k has points starts[k]..starts[k + 1]. */
#include "csrc/py/cost.h"

#include <stdlib.h>

enum { CURVES = TP_COST_CURVES, ALL_CURVES = CURVES + (int)TP_COST_REMADE, COLUMNS = 7 };

void
tp_py_pack_close(tp_py_pack *p)
{
    while (p->held > 0)
        PyBuffer_Release(&p->view[--p->held]);
}

static int
pack_take(tp_py_pack *p, PyObject *array, char format, int ndim, const char *what)
{
    if (tp_py_view(array, format, ndim, 0, what, &p->view[p->held]) < 0)
        return -1;
    p->held++;
    return 0;
}

static tp_cost_curve *
curve_of(tp_cost *cost, int k)
{
    return k < CURVES ? &cost->curve[k / TP_COST_PHASES][k % TP_COST_PHASES] : &cost->remade[k - CURVES];
}

static int
pack_fill(tp_py_pack *p, double granularity)
{
    const double *coefficients = p->view[0].buf, *rows = p->view[2].buf, *seconds = p->view[3].buf;
    const int64_t *starts = p->view[1].buf;
    Py_ssize_t points = p->view[2].shape[0], tables = p->view[4].shape[0], side = p->view[4].shape[1];
    if (p->view[0].shape[0] != ALL_CURVES || p->view[0].shape[1] != COLUMNS || p->view[1].shape[0] != ALL_CURVES + 1 ||
        p->view[3].shape[0] != points || p->view[4].shape[2] != side)
        return tp_py_invalid_value("cost pack: the shapes of its arrays do not fit together"), -1;
    for (int k = 0; k < ALL_CURVES; k++) {
        const double *c = coefficients + k * COLUMNS;
        tp_cost_curve *curve = curve_of(&p->cost, k);
        int64_t count = starts[k + 1] - starts[k];
        if (starts[k] < 0 || count < 0 || starts[k + 1] > points || !(c[0] >= -1.0 && c[0] < (double)tables))
            return tp_py_invalid_value("cost pack: curve %d points outside its arrays", k), -1;
        *curve = (tp_cost_curve){.points = (int32_t)count,
                                 .units = (int32_t)(side - 1),
                                 .rows = rows + starts[k],
                                 .seconds = seconds + starts[k],
                                 .granularity = granularity,
                                 .scale = c[1],
                                 .pair_s = c[2],
                                 .a0 = c[3],
                                 .a1 = c[4],
                                 .a2 = c[5],
                                 .a3 = c[6]};
        if (c[0] >= 0.0)
            curve->table = (const double *)p->view[4].buf + (Py_ssize_t)c[0] * side * side;
    }
    return 0;
}

int
tp_py_pack_open(tp_py_state *state, PyObject *tuple, tp_py_pack *p)
{
    PyObject *arrays[5];
    double granularity;
    static const char *const what[] = {"coefficients", "starts", "rows", "seconds", "tables"};
    static const char formats[] = "dqddd";
    static const int ndims[] = {2, 1, 1, 1, 3};
    p->held = 0;
    if (!PyTuple_Check(tuple))
        return tp_py_invalid_type("cost pack: a tuple would be right"), -1;
    p->cost.known = NULL;
    tp_cost_waits *waits = &p->cost.waits;
    if (!PyArg_ParseTuple(tuple, "OOOOOdd(ddd)", &arrays[0], &arrays[1], &arrays[2], &arrays[3], &arrays[4], &granularity,
                          &p->cost.overhead_s, &waits->row_s, &waits->least, &waits->flush_s))
        return -1;
    for (int i = 0; i < 5; i++)
        if (pack_take(p, arrays[i], formats[i], ndims[i], what[i]) < 0)
            return -1;
    if (pack_fill(p, granularity) < 0)
        return -1;
    tp_status status = tp_cost_check(&p->cost);
    if (status != TP_OK)
        return tp_py_raise(state, status), -1;
    return 0;
}

static double *
doubles(Py_ssize_t count)
{
    double *memory = malloc((size_t)(count > 0 ? count : 1) * sizeof(double));
    if (memory == NULL)
        tp_py_no_memory();
    return memory;
}

PyDoc_STRVAR(seconds_doc, "cost_seconds($module, pack, curve, slices, contexts, batches, /)\n--\n\n"
                          "Seconds of one curve (a row of the pack's coefficients); float64 [n] each, returns float64 [n].");
static PyObject *
cost_seconds(PyObject *module, PyObject *args)
{
    PyObject *tuple, *arrays[3];
    int curve;
    if (!PyArg_ParseTuple(args, "OiOOO:cost_seconds", &tuple, &curve, &arrays[0], &arrays[1], &arrays[2]))
        return NULL;
    if (curve < 0 || curve >= ALL_CURVES)
        return tp_py_invalid_value("curve is %d: 0 to %d would be right", curve, ALL_CURVES - 1);
    tp_py_state *state = tp_py_module_state(module);
    PyObject *result = NULL;
    Py_buffer view[3];
    int held = 0;
    tp_py_pack p;
    int opened = tp_py_pack_open(state, tuple, &p);
    static const char *const what[] = {"slices", "contexts", "batches"};
    while (opened == 0 && held < 3 && tp_py_view(arrays[held], 'd', 1, 0, what[held], &view[held]) == 0)
        held++;
    if (held == 3 && (view[0].shape[0] != view[1].shape[0] || view[0].shape[0] != view[2].shape[0])) {
        tp_py_invalid_value("slices, contexts and batches must have one length");
    } else if (held == 3) {
        Py_ssize_t n = view[0].shape[0];
        double *out = doubles(n);
        const double *s = view[0].buf, *c = view[1].buf, *b = view[2].buf;
        if (out != NULL) {
            int64_t steps = 0;
            tp_py_away away;
            tp_py_leave(&away);
            for (Py_ssize_t i = 0; i < n && !tp_deadline_told_after(&steps, 8); i++)
                out[i] = tp_cost_seconds(curve_of(&p.cost, curve), s[i], c[i], b[i]);
            if (tp_py_back(&away, TP_OK) == TP_OK)
                result = tp_py_array(state, out, 'd', 1, &n);
            else
                free(out);
        }
    }
    while (held > 0)
        PyBuffer_Release(&view[--held]);
    tp_py_pack_close(&p);
    return result;
}

/* The arguments that both tables take: (pack, weights float64 [4, 3], batch, granularity, units). */
typedef struct {
    tp_py_pack p;
    Py_buffer weights;
    double batch, granularity;
    Py_ssize_t units;
} table_request;

static int
table_open(tp_py_state *state, PyObject *args, table_request *request)
{
    PyObject *tuple, *array;
    request->p.held = 0;
    if (!PyArg_ParseTuple(args, "OOddn", &tuple, &array, &request->batch, &request->granularity, &request->units))
        return -1;
    if (request->units < 1 || request->units > 1 << 24)
        return tp_py_invalid_value("units is %zd: 1 to 2^24 would be right", request->units), -1;
    if (tp_py_pack_open(state, tuple, &request->p) < 0 || tp_py_view(array, 'd', 2, 0, "weights", &request->weights) < 0) {
        tp_py_pack_close(&request->p);
        return -1;
    }
    if (request->weights.shape[0] == TP_BLOCK_KINDS && request->weights.shape[1] == TP_COST_PHASES)
        return 0;
    tp_py_invalid_value("weights must be [%d, %d]", TP_BLOCK_KINDS, TP_COST_PHASES);
    PyBuffer_Release(&request->weights);
    tp_py_pack_close(&request->p);
    return -1;
}

static void
table_close(table_request *request)
{
    PyBuffer_Release(&request->weights);
    tp_py_pack_close(&request->p);
}

PyDoc_STRVAR(slices_doc, "cost_slices($module, pack, weights, batch, granularity, units, /)\n--\n\n"
                         "(G0 float64 [units + 1], G1, a2, a3): c(j, i) = G0[i] if j == 0 else G1[i] + a2 j + a3 i j.");
static PyObject *
cost_slices(PyObject *module, PyObject *args)
{
    tp_py_state *state = tp_py_module_state(module);
    table_request r;
    if (table_open(state, args, &r) < 0)
        return NULL;
    Py_ssize_t shape = r.units + 1;
    tp_cost_slices out = {.G0 = doubles(shape), .G1 = doubles(shape)};
    tp_status status = TP_OK;
    int ready = out.G0 != NULL && out.G1 != NULL;
    if (ready) {
        tp_py_away away;
        tp_py_leave(&away);
        status = tp_py_back(&away, tp_cost_slice_tables(&r.p.cost, r.weights.buf, r.batch, r.granularity, r.units, &out));
    }
    table_close(&r);
    if (!ready || status != TP_OK) {
        free(out.G0);
        free(out.G1);
        return ready ? tp_py_raise(state, status) : NULL;
    }
    PyObject *G0 = tp_py_array(state, out.G0, 'd', 1, &shape), *G1 = tp_py_array(state, out.G1, 'd', 1, &shape);
    if (G0 != NULL && G1 != NULL)
        return Py_BuildValue("NNdd", G0, G1, out.a2, out.a3);
    Py_XDECREF(G0);
    Py_XDECREF(G1);
    return NULL;
}

PyDoc_STRVAR(table_doc, "cost_table($module, pack, weights, batch, granularity, units, /)\n--\n\n"
                        "float64 [units + 1, units + 1], t[s, c] seconds; 0 where s + c > units.");
static PyObject *
cost_table(PyObject *module, PyObject *args)
{
    tp_py_state *state = tp_py_module_state(module);
    table_request r;
    if (table_open(state, args, &r) < 0)
        return NULL;
    Py_ssize_t shape[2] = {r.units + 1, r.units + 1};
    double *out = r.units > 1 << 14 ? NULL : doubles(shape[0] * shape[1]);
    tp_status status = TP_OK;
    if (out != NULL) {
        tp_py_away away;
        tp_py_leave(&away);
        status = tp_py_back(&away, tp_cost_full_table(&r.p.cost, r.weights.buf, r.batch, r.granularity, r.units, out));
    } else if (!PyErr_Occurred()) {
        tp_py_invalid_value("a table of %zd units is too large: a coarser granularity would be right",
                            r.units);
    }
    table_close(&r);
    if (out == NULL)
        return NULL;
    if (status == TP_OK)
        return tp_py_array(state, out, 'd', 2, shape);
    free(out);
    return tp_py_raise(state, status);
}

/* ---- durations of a plan --------------------------------------------------------------------------------------------
 */

/* The first array, or all of F, I, W and left_s as a tuple. */
static PyObject *
durations_out(tp_py_state *state, double *const out[TP_COST_PHASES + 1], int count, const Py_ssize_t shape[2], Py_ssize_t copies)
{
    PyObject *arrays[TP_COST_PHASES + 1] = {NULL};
    int good = 1;
    for (int i = 0; i < count; i++)
        good &= (arrays[i] = i == TP_COST_PHASES ? tp_py_array(state, out[i], 'd', 1, &copies)
                                                 : tp_py_array(state, out[i], 'd', 2, shape)) != NULL;
    if (good)
        return count == 1 ? arrays[0] : Py_BuildValue("NNNN", arrays[0], arrays[1], arrays[2], arrays[3]);
    for (int i = 0; i < count; i++)
        Py_XDECREF(arrays[i]);
    return NULL;
}

/* view: blocks [stages, kinds], batches [micros], slices [micros], lengths [sum of slices], all int32; then, or not, prompt. */
static PyObject *
durations_run(tp_py_state *state, const tp_py_pack *p, const Py_buffer *view, int views, int copies, int again)
{
    const int32_t *slices = view[2].buf, *blocks = view[0].buf, *batches = view[1].buf, *lengths = view[3].buf;
    const int32_t *prompt = views > 4 && !again ? view[4].buf : NULL;
    const uint8_t *kept = views > 4 && again ? view[4].buf : NULL;
    Py_ssize_t units = view[3].shape[0];
    int32_t stages = (int32_t)view[0].shape[0], micros = (int32_t)view[1].shape[0];
    int64_t sum = 0;
    for (Py_ssize_t q = 0; q < view[2].shape[0]; q++)
        sum += slices[q] > 0 ? slices[q] : 0;
    if (view[0].shape[1] != TP_BLOCK_KINDS || view[2].shape[0] != view[1].shape[0] || sum != units || micros < 1 ||
        (views > 4 && view[4].shape[0] != stages) || (prompt != NULL && view[4].shape[1] != TP_BLOCK_KINDS))
        return tp_py_invalid_value("blocks, batches, slices and lengths do not fit together"), NULL;
    const Py_ssize_t shape[2] = {stages, units};
    double *out[TP_COST_PHASES + 1] = {NULL}; /* the last: left_s, of as many copies as there are micro-batches at most */
    int ready = 1, count = again ? 1 : TP_COST_PHASES + 1;
    for (int i = 0; i < count; i++)
        ready &= (out[i] = doubles(i == TP_COST_PHASES ? micros : shape[0] * shape[1])) != NULL;
    tp_status status = TP_OK;
    if (ready) {
        tp_py_away away;
        tp_py_leave(&away);
        if (again)
            status = tp_cost_recompute(&p->cost, stages, blocks, kept, micros, batches, slices, lengths, out[0]);
        else
            status = tp_cost_durations(&p->cost, stages, blocks, prompt, copies, micros, batches, slices, lengths, out[0], out[1],
                                       out[2], out[TP_COST_PHASES]);
        status = tp_py_back(&away, status);
        if (status == TP_OK)
            return durations_out(state, out, count, shape, copies);
    }
    for (int i = 0; i < count; i++)
        free(out[i]);
    return ready ? tp_py_raise(state, status) : NULL;
}

static PyObject *
durations_of(PyObject *module, PyObject *args, int again)
{
    PyObject *tuple, *arrays[5] = {NULL}, *result = NULL;
    int copies = 1;
    if (!PyArg_ParseTuple(args, "OOOOO|Oi", &tuple, &arrays[0], &arrays[1], &arrays[2], &arrays[3], &arrays[4],
                          &copies))
        return NULL;
    tp_py_state *state = tp_py_module_state(module);
    const char *const what[] = {"blocks", "batches", "slices", "lengths", again ? "kept" : "prompt"};
    Py_buffer view[5];
    int held = 0, views = arrays[4] == NULL || arrays[4] == Py_None ? 4 : 5;
    tp_py_pack p;
    if (tp_py_pack_open(state, tuple, &p) == 0)
        while (held < views && tp_py_view(arrays[held], again && held == 4 ? 'B' : 'i', held == 0 || (held == 4 && !again) ? 2 : 1, 0,
                                          what[held], &view[held]) == 0)
            held++;
    if (held == views)
        result = durations_run(state, &p, view, views, copies, again);
    while (held > 0)
        PyBuffer_Release(&view[--held]);
    tp_py_pack_close(&p);
    return result;
}

PyDoc_STRVAR(durations_doc, "cost_durations($module, pack, blocks, batches, slices, lengths, prompt=None, copies=1, /)\n--\n\n"
                            "(F, I, W, left_s): float64 [stages, units] each, and [copies] what the head adds to its stage's update. "
                            "blocks int32 [stages, 4]: how many of each kind, prompt those whose W does not wait; "
                            "batches, slices int32 [micros]; lengths int32 [units]; copies: of the model, which share them.");
static PyObject *
cost_durations(PyObject *module, PyObject *args)
{
    return durations_of(module, args, 0);
}

PyDoc_STRVAR(recompute_doc, "cost_recompute($module, pack, blocks, batches, slices, lengths, kept=None, /)\n--\n\n"
                            "R of these attention and FFN blocks, float64 [stages, units]; arguments as of cost_durations. kept: bytes "
                            "[stages], columns of queries, keys and values that their attentions keep.");
static PyObject *
cost_recompute(PyObject *module, PyObject *args)
{
    return durations_of(module, args, 1);
}

static PyMethodDef methods[] = {
    {"cost_seconds", cost_seconds, METH_VARARGS, seconds_doc},
    {"cost_slices", cost_slices, METH_VARARGS, slices_doc},
    {"cost_table", cost_table, METH_VARARGS, table_doc},
    {"cost_durations", cost_durations, METH_VARARGS, durations_doc},
    {"cost_recompute", cost_recompute, METH_VARARGS, recompute_doc},
    {NULL, NULL, 0, NULL},
};

int
tp_py_add_cost(PyObject *module, tp_py_state *state)
{
    (void)state;
    return PyModule_AddFunctions(module, methods);
}
