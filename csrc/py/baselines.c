#include "csrc/py/module.h"
int
tp_py_add_baselines(PyObject *module, tp_py_state *state)
{
    (void)module;
    (void)state;
    return 0;
}
