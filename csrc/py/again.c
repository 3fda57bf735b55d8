/* How stages make again what they do not keep (csrc/plan/again.h), for the plans that Python puts together. */
#include "csrc/py/module.h"

#include "csrc/plan/again.h"

enum { BOUNDARY, KINDS, BATCHES, SLICES, LENGTHS, ARRAYS };

static int
fits(const Py_buffer view[ARRAYS], const Py_buffer *recompute)
{
    const int32_t *boundary = view[BOUNDARY].buf, *slices = view[SLICES].buf, *lengths = view[LENGTHS].buf;
    int64_t units = 0, stages = view[BOUNDARY].shape[0] - 1, blocks = view[KINDS].shape[0];
    if (stages < 1 || boundary[0] != 0 || boundary[stages] != blocks || recompute->len != blocks ||
        view[BATCHES].shape[0] != view[SLICES].shape[0])
        return 0;
    for (int64_t v = 0; v < stages; v++)
        if (boundary[v + 1] < boundary[v])
            return 0;
    for (Py_ssize_t q = 0; q < view[SLICES].shape[0]; units += slices[q++])
        if (slices[q] < 1 || ((const int32_t *)view[BATCHES].buf)[q] < 1)
            return 0;
    for (Py_ssize_t u = 0; u < view[LENGTHS].shape[0]; u++)
        if (lengths[u] < 1)
            return 0;
    return units == view[LENGTHS].shape[0];
}

PyDoc_STRVAR(again_ways_doc,
             "again_ways($module, boundaries, kinds, recompute, batches, slices, lengths, keeps_keys, waits, /)\n--\n\n"
             "Bytes [stages] for Program.save_memory: which R stand where. boundaries int32 [stages + 1], kinds int32 [blocks], recompute "
             "bytes [blocks]; the slicing; how many columns attentions may keep, of keys and values (2; 0: none) or with queries (3); "
             "and whether W will wait.");
static PyObject *
again_ways(PyObject *module, PyObject *args)
{
    static const char *const what[ARRAYS] = {"boundaries", "kinds", "batches", "slices", "lengths"};
    PyObject *array[ARRAYS], *flags, *ways = NULL;
    Py_buffer view[ARRAYS], recompute;
    int held = 0, keeps_keys, waits;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOSOOOip:again_ways", &array[BOUNDARY], &array[KINDS], &flags, &array[BATCHES], &array[SLICES],
                          &array[LENGTHS], &keeps_keys, &waits) ||
        PyObject_GetBuffer(flags, &recompute, PyBUF_SIMPLE) < 0)
        return NULL;
    while (held < ARRAYS && tp_py_view(array[held], 'i', 1, 0, what[held], &view[held]) == 0)
        held++;
    if (held == ARRAYS && !fits(view, &recompute)) {
        tp_py_invalid_value("boundaries, kinds, recompute and the slicing do not fit together");
    } else if (held == ARRAYS) {
        const tp_again_asked asked = {(int)view[BOUNDARY].shape[0] - 1, view[BOUNDARY].buf, view[KINDS].buf, recompute.buf,
                                      (int32_t)view[BATCHES].shape[0], view[BATCHES].buf, view[SLICES].buf, view[LENGTHS].buf,
                                      keeps_keys, waits};
        ways = PyBytes_FromStringAndSize(NULL, asked.stages);
        if (ways != NULL)
            tp_again_ways(&asked, (uint8_t *)PyBytes_AS_STRING(ways));
    }
    while (held > 0)
        PyBuffer_Release(&view[--held]);
    PyBuffer_Release(&recompute);
    return ways;
}

static PyMethodDef methods[] = {{"again_ways", again_ways, METH_VARARGS, again_ways_doc}, {NULL, NULL, 0, NULL}};

int
tp_py_add_again(PyObject *module, tp_py_state *state)
{
    (void)state;
    return PyModule_AddFunctions(module, methods);
}
