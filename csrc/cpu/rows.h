/* What the row-wise and element-wise kernels share: the walk over a row in vectors, and when a team is worth waking. */
#ifndef TP_CPU_ROWS_H
#define TP_CPU_ROWS_H

#include "csrc/cpu/cpu.h"
#include "csrc/cpu/vec.h"

#define ROWS_WORTH_A_TEAM 32768 /* elements: below, waking a thread costs more than it saves */

VEC_INLINE tp_team *
rows_team(const tp_backend *be, int64_t elements)
{
    return elements >= ROWS_WORTH_A_TEAM ? be->team : NULL;
}

/* Lanes of the vector at i of n: loops take whole vectors first, then one step with this. */
VEC_INLINE int64_t
rows_lanes(int64_t n, int64_t i)
{
    return n - i < VEC_LANES ? n - i : VEC_LANES;
}

/* Inlined with the constant VEC_LANES these are plain loads and stores: one body serves whole vectors and the last. */
VEC_INLINE vf16
rows_load(const float *p, int64_t lanes)
{
    return lanes == VEC_LANES ? vec_load(p) : vec_load_n(p, lanes);
}

VEC_INLINE void
rows_store(float *p, vf16 v, int64_t lanes)
{
    if (lanes == VEC_LANES)
        vec_store(p, v);
    else
        vec_store_n(p, v, lanes);
}

VEC_INLINE vf16
rows_first(vf16 v, int64_t lanes)
{
    return lanes == VEC_LANES ? v : vec_first_n(v, lanes, vec_zero());
}

#endif
