/* How a row kernel meets its team: small work stays with the caller, for waking threads costs microseconds. */
#ifndef TP_CPU_SHARE_H
#define TP_CPU_SHARE_H

#include "csrc/backend/backend.h"

#ifndef SHARE_ALONE
#define SHARE_ALONE 16384 /* floats touched below which one thread is faster than waking the others */
#endif

static inline void
share_run(const tp_backend *be, int64_t floats, tp_team_work work, void *argument)
{
    tp_team_run(floats < SHARE_ALONE ? NULL : be->team, work, argument);
}

static inline int64_t
share_least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

#endif
