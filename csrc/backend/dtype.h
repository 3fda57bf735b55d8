/* Types of numbers on a device. Plain C that nvcc reads too. */
#ifndef TP_BACKEND_DTYPE_H
#define TP_BACKEND_DTYPE_H

/* Of activations, their gradients, and the copies of weights that products read; masters, weight gradients, moments and
 * statistics are fp32 always. */
typedef enum { TP_F32 = 0, TP_BF16 = 1 } tp_dtype;

#endif
