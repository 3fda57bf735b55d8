/* Between Python's description of a model, a partition, a slicing and C's. */
#ifndef TP_PY_MODEL_H
#define TP_PY_MODEL_H

#include "csrc/model/model.h"
#include "csrc/py/module.h"

/* (n_layer, n_head, n_embd, vocab_size, block_size, bias, tie_weights); 0, or -1 with an exception. */
int
tp_py_model(tp_py_state *state, PyObject *object, tp_model *out);
/* (seq_len, batch, [(sequences, [slice lengths]), ...]). Ended by tp_slicing_close. */
int
tp_py_slicing(tp_py_state *state, PyObject *object, tp_slicing **out);
/* None, or how each block of the model saves memory (tp_saves), as bytes: 0 with a view that PyBuffer_Release ends, or -1 with an
 * exception. */
int
tp_py_saves(PyObject *saves, const tp_model *model, Py_buffer *view);
/* Sequence of ints -> malloc'ed int32 [*count]. */
int32_t *
tp_py_int32s(PyObject *object, const char *what, Py_ssize_t *count);

#endif
