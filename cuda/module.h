/* The parts of the Python module terapipe_c._cuda (and _cuda_emu, the same over cuda/emu). Only cuda/module*.c see Python.h. */
#ifndef TP_CUDA_MODULE_H
#define TP_CUDA_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "csrc/base/status.h"

/* Raise terapipe_c's exception of `status` with the thread's message; returns NULL. */
PyObject *
tp_cuda_raise(tp_status status);
/* Each adds its functions to the module: 0, or -1 with an exception set. */
int
tp_cuda_add_comm(PyObject *module);
int
tp_cuda_add_gemm(PyObject *module);
int
tp_cuda_add_attention(PyObject *module);
int
tp_cuda_add_device(PyObject *module);
/* cuda/emu: switches for tests. */
int
tp_cuda_add_emu(PyObject *module);

#endif
