#include "csrc/py/module.h"

tp_py_state *
tp_py_module_state(PyObject *module)
{
    return PyModule_GetState(module);
}

tp_py_state *
tp_py_state_of(PyObject *self)
{
    return PyModule_GetState(PyType_GetModuleByDef(Py_TYPE(self), &tp_py_module));
}

static int
module_exec(PyObject *module)
{
    tp_py_state *state = tp_py_module_state(module);
    int (*const parts[])(PyObject *, tp_py_state *) = {
        tp_py_add_exceptions, tp_py_add_buffer,  tp_py_add_model,  tp_py_add_program,
        tp_py_add_planners,   tp_py_add_comm,    tp_py_add_tcp,  tp_py_add_device_comm,    tp_py_add_mpi, tp_py_add_engine, tp_py_add_memory,
        tp_py_add_kernels,    tp_py_add_shop,
        tp_py_add_cost,       tp_py_add_waits,      tp_py_add_autopipe, tp_py_add_layer_graph, tp_py_add_baselines,
        tp_py_add_dawnpiper,  tp_py_add_slicing_bound, tp_py_add_partition_bound, tp_py_add_judge, tp_py_add_again,
        tp_py_add_bmpipe,     tp_py_add_deadline,
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (parts[i](module, state) < 0)
            return -1;
    return 0;
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    tp_py_state *state = tp_py_module_state(module);
    Py_VISIT(state->error);
    for (int i = 0; i < TP_STATUS_COUNT; i++)
        Py_VISIT(state->exceptions[i]);
    Py_VISIT(state->program);
    Py_VISIT(state->timeline);
    Py_VISIT(state->engine);
    Py_VISIT(state->region);
    Py_VISIT(state->comm);
    Py_VISIT(state->buffer);
    return 0;
}

static int
module_clear(PyObject *module)
{
    tp_py_state *state = tp_py_module_state(module);
    Py_CLEAR(state->error);
    for (int i = 0; i < TP_STATUS_COUNT; i++)
        Py_CLEAR(state->exceptions[i]);
    Py_CLEAR(state->program);
    Py_CLEAR(state->timeline);
    Py_CLEAR(state->engine);
    Py_CLEAR(state->region);
    Py_CLEAR(state->comm);
    Py_CLEAR(state->buffer);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

struct PyModuleDef tp_py_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "terapipe_c._core",
    .m_doc = "The C core of terapipe_c.",
    .m_size = sizeof(tp_py_state),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC
PyInit__core(void); /* no header declares it, and -Wmissing-prototypes wants one to */

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&tp_py_module);
}
