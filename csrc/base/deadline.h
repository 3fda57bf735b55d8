/* When what the calling thread plans must end. Whoever plans sets it (csrc/py/deadline.c); loops that may run long ask whether it
 * has passed. It is the thread's and no planner's argument: one limit holds for all that a plan takes, and without one nothing
 * reads a clock, so that the same question has the same answer. */
#ifndef TP_BASE_DEADLINE_H
#define TP_BASE_DEADLINE_H

#include <stdint.h>

#include "csrc/base/status.h"

/* at_ns on tp_deadline_now's clock; 0: none. Returns the one before. */
int64_t
tp_deadline_set(int64_t at_ns);
/* 0: tp_clock_ns is the clock of this thread's deadlines. More: for tests, one on which so much passes with every question, and
 * nothing else. */
void
tp_deadline_count(int64_t step_ns);
int64_t
tp_deadline_now(void);
/* Has it passed? Once it has, the answer stays until another is set. */
int
tp_deadline_late(void);
/* ETIMEOUT where it has, for planners that have nothing to give before they are done; `who` is their name. */
TP_MUST_USE tp_status
tp_deadline_check(const char *who);

#endif
