/* How many micro-batches a stage holds at once: every planner with a memory limit multiplies activations by it. */
#ifndef TP_PLAN_IN_FLIGHT_H
#define TP_PLAN_IN_FLIGHT_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/base/status.h"

/* Of stage k: held[k], what the order that will run says; NULL: as many as 1F1B has in flight. */
static inline int
tp_in_flight(const int32_t *held, int micros, int stages, int k)
{
    return held != NULL ? held[k] : micros < stages - k ? micros : stages - k;
}

/* EVALUE naming the first of held[stages] that is not 1 .. micros; NULL is allowed. */
TP_MUST_USE tp_status
tp_in_flight_check(const int32_t *held, int micros, int stages);

#endif
