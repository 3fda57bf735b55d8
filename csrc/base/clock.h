/* The monotonic clock, in nanoseconds. The same clock in every process of a machine, so traces line up. */
#ifndef TP_BASE_CLOCK_H
#define TP_BASE_CLOCK_H

#include <pthread.h>
#include <stdint.h>

int64_t
tp_clock_ns(void);
/* Sleep until tp_clock_ns() >= deadline_ns, to within a few microseconds; returns at once if it has passed. */
void
tp_clock_sleep_until(int64_t deadline_ns);
/* Open a condition whose timed waits are of this clock. The caller ends it with pthread_cond_destroy. */
void
tp_clock_condition(pthread_cond_t *condition);

#endif
