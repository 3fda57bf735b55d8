/* Which device an engine computes on, out of Python's arguments. */
#ifndef TP_PY_DEVICE_H
#define TP_PY_DEVICE_H

#include "csrc/py/module.h"
#include "csrc/stage/stage_ops.h"

/* What Python gives: a provider's capsule (None or NULL: the CPU), and the dtype's name (NULL: float32). 0, or -1 with an
 * exception that says what would be right. config->isa has been filled in. */
int
tp_py_device(PyObject *provider, const char *dtype, const tp_provider **out, tp_device_config *config);

#endif
