/* Class methods of _core.Program that build one schedule or another; terapipe_c/schedules.py calls them. */
#include "csrc/py/program.h"

PyObject *
tp_py_program_build(PyObject *type, PyObject *args)
{
    int schedule, ranks, chunks;
    PyObject *slices;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "iiiO", &schedule, &ranks, &chunks, &slices) ||
        tp_py_view(slices, 'i', 1, 0, "slices", &view) < 0)
        return NULL;
    tp_program *program = NULL;
    Py_ssize_t micros = view.shape[0];
    tp_py_away away;
    tp_py_leave(&away);
    tp_status status = tp_py_back(&away, tp_program_build((tp_schedule)schedule, ranks, chunks,
                                                          micros > 65537 ? 65537 : (int)micros, view.buf, &program));
    PyBuffer_Release(&view);
    return tp_py_program_made_by(type, status, program);
}

PyObject *
tp_py_program_build_sliced(PyObject *type, PyObject *args)
{
    int ranks, micros, split;
    if (!PyArg_ParseTuple(args, "iii", &ranks, &micros, &split))
        return NULL;
    tp_program *program = NULL;
    tp_py_away away;
    tp_py_leave(&away);
    tp_status status = tp_py_back(&away, tp_program_build_sliced(ranks, micros, split, &program));
    return tp_py_program_made_by(type, status, program);
}

static PyObject *
build_zigzag(PyObject *type, PyObject *args, int with_waves)
{
    tp_zigzag_request request = {0};
    int waves = 0;
    PyObject *slices;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "iOiddd|i", &request.ranks, &slices, &request.most, &request.forward_s,
                          &request.input_s, &request.weight_s, &waves) ||
        tp_py_view(slices, 'i', 1, 0, "slices", &view) < 0)
        return NULL;
    request.slices = view.buf;
    request.micros = view.shape[0] > 65537 ? 65537 : (int)view.shape[0];
    tp_program *program = NULL;
    tp_py_away away;
    tp_py_leave(&away);
    tp_status status = tp_py_back(&away, with_waves ? tp_program_build_hanayo(&request, waves, &program)
                                                    : tp_program_build_zb_v(&request, &program));
    PyBuffer_Release(&view);
    return tp_py_program_made_by(type, status, program);
}

PyObject *
tp_py_program_build_zb_v(PyObject *type, PyObject *args)
{
    return build_zigzag(type, args, 0);
}

PyObject *
tp_py_program_build_hanayo(PyObject *type, PyObject *args)
{
    return build_zigzag(type, args, 1);
}

/* Of (ranks, slices) alone. */
static PyObject *
build_from_slices(PyObject *type, PyObject *args, tp_status (*build)(int, int, const int32_t *, tp_program **))
{
    int ranks;
    PyObject *slices;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "iO", &ranks, &slices) || tp_py_view(slices, 'i', 1, 0, "slices", &view) < 0)
        return NULL;
    tp_program *program = NULL;
    int micros = view.shape[0] > 65537 ? 65537 : (int)view.shape[0];
    tp_py_away away;
    tp_py_leave(&away);
    tp_status status = tp_py_back(&away, build(ranks, micros, view.buf, &program));
    PyBuffer_Release(&view);
    return tp_py_program_made_by(type, status, program);
}

PyObject *
tp_py_program_build_dualpipe_v(PyObject *type, PyObject *args)
{
    return build_from_slices(type, args, tp_program_build_dualpipe_v);
}

PyObject *
tp_py_program_build_chimera(PyObject *type, PyObject *args)
{
    return build_from_slices(type, args, tp_program_build_chimera);
}

PyObject *
tp_py_program_build_pipedream(PyObject *type, PyObject *args)
{
    return build_from_slices(type, args, tp_program_build_pipedream);
}

PyObject *
tp_py_program_build_bpipe(PyObject *type, PyObject *args)
{
    return build_from_slices(type, args, tp_program_build_bpipe);
}
