/* _core.Region: memory that ranks share. */
#ifndef TP_PY_REGION_H
#define TP_PY_REGION_H

#include "csrc/comm/comm.h"
#include "csrc/py/module.h"

typedef struct {
    PyObject_HEAD tp_region *region;
    void *memory;
    size_t bytes;
    int fd;     /* -1: none, or closed */
    int shared; /* a memfd: other processes may see it */
    int ranks;
} tp_py_region;

int
tp_py_add_region(PyObject *module, tp_py_state *state);

#endif
