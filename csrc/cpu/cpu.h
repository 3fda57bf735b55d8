/* What the kernel files of the CPU share: the layout of weights and the vtables of the instruction sets.
 *
 * value layout of a [rows, cols] weight: panels of TP_PANEL columns; element (r, c) is
 * value[(c / TP_PANEL) * rows * TP_PANEL + r * TP_PANEL + c % TP_PANEL]; the last panel is padded with zeros.
 * transposed layout: the value layout of the [cols, rows] matrix. */
#ifndef TP_CPU_CPU_H
#define TP_CPU_CPU_H

#include "csrc/backend/backend.h"

#define TP_PANEL 32

extern const tp_backend_ops tp_cpu_ops_portable;
#if defined(__x86_64__)
extern const tp_backend_ops tp_cpu_ops_avx2, tp_cpu_ops_avx512, tp_cpu_ops_amx;
#endif

static inline int64_t
panel_index(int64_t rows, int64_t r, int64_t c)
{
    return (c / TP_PANEL) * rows * TP_PANEL + r * TP_PANEL + c % TP_PANEL;
}

#endif
