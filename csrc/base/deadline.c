#include "csrc/base/deadline.h"

#include "csrc/base/clock.h"

static _Thread_local int64_t at, step, counted;
static _Thread_local int passed;

int64_t
tp_deadline_set(int64_t at_ns)
{
    int64_t before = at;
    at = at_ns;
    passed = 0;
    return before;
}

void
tp_deadline_count(int64_t step_ns)
{
    step = step_ns;
    counted = 0;
}

int64_t
tp_deadline_now(void)
{
    if (step <= 0)
        return tp_clock_ns();
    counted += step;
    return counted;
}

int
tp_deadline_late(void)
{
    if (at != 0 && !passed)
        passed = tp_deadline_now() >= at;
    return passed;
}

tp_status
tp_deadline_check(const char *who)
{
    if (!tp_deadline_late())
        return TP_OK;
    return tp_fail(TP_ETIMEOUT, "planner %s was stopped by the time limit before it had a plan: more time would be right", who);
}
