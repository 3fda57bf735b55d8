#include "csrc/base/deadline.h"

#include <stddef.h>

#include "csrc/base/clock.h"

int64_t tp_deadline_steps = 1 << 18, tp_deadline_listen_ns = 20000000;

/* Questions may come much faster than a clock is read: where the last look was less than QUICK_NS ago, SKIPPED questions do not
 * look. Where they get slow all of a sudden, that many of them is how late a listener is called, once. */
enum { SKIPPED = 16, QUICK_NS = 200000 };

static _Thread_local int64_t at, step, counted;
static _Thread_local int passed, abandons;
static _Thread_local tp_listener listener;
static _Thread_local const _Atomic unsigned char *stop;

int64_t
tp_deadline_set(int64_t at_ns)
{
    int64_t before = at;
    at = at_ns;
    passed = 0;
    return before;
}

int64_t
tp_deadline_get(void)
{
    return at;
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

static int
has_passed(void)
{
    if (at != 0 && !passed)
        passed = tp_deadline_now() >= at;
    return passed;
}

int
tp_deadline_late(void)
{
    return has_passed() || tp_deadline_told();
}

int
tp_deadline_abandon(int on)
{
    int before = abandons;
    abandons = on;
    return before;
}

tp_status
tp_deadline_check(const char *who)
{
    if (!tp_deadline_late())
        return TP_OK;
    if (tp_deadline_was_interrupted())
        return tp_deadline_check_told();
    return tp_fail(TP_ETIMEOUT, "planner %s was stopped by the time limit before it had a plan: more time would be right", who);
}

void
tp_deadline_listen(int (*heard)(void *context), void *context, tp_listener *before)
{
    if (before != NULL)
        *before = listener;
    listener = (tp_listener){.heard = heard, .context = context, .next_ns = tp_clock_ns() + tp_deadline_listen_ns};
}

void
tp_deadline_unlisten(const tp_listener *before)
{
    listener = *before;
}

void
tp_deadline_stop_by(const _Atomic unsigned char *flag)
{
    stop = flag;
}

/* The listener may plan: it does so without our limit, finds nobody listening, and may fail without taking the place of an error
 * that we are about to report. */
static int
listen(void)
{
    tp_listener mine = listener;
    int64_t mine_at = at;
    int mine_passed = passed, mine_abandons = abandons;
    tp_error_state mine_error;
    tp_error_save(&mine_error);
    listener = (tp_listener){.heard = NULL};
    at = 0;
    passed = abandons = 0;
    int answer = mine.heard(mine.context);
    mine.told = answer > 0;
    mine.heard = answer < 0 ? NULL : mine.heard;
    mine.next_ns = tp_clock_ns() + tp_deadline_listen_ns;
    listener = mine;
    at = mine_at;
    passed = mine_passed;
    abandons = mine_abandons;
    tp_error_restore(&mine_error);
    return mine.told;
}

int
tp_deadline_told(void)
{
    if ((abandons && has_passed()) || listener.heard == NULL || tp_deadline_was_told())
        return tp_deadline_was_told();
    if (listener.skip > 0) {
        listener.skip--;
        return 0;
    }
    int64_t now = tp_clock_ns();
    int quick = now - listener.looked_ns < QUICK_NS && tp_deadline_listen_ns > 0;
    listener.looked_ns = now;
    listener.skip = quick ? SKIPPED : 0;
    return now >= listener.next_ns && listen();
}

int
tp_deadline_told_before(void)
{
    listener.skip = 0;
    return tp_deadline_told();
}

int
tp_deadline_was_interrupted(void)
{
    return listener.told || (stop != NULL && atomic_load_explicit(stop, memory_order_relaxed));
}

int
tp_deadline_was_told(void)
{
    return (abandons && passed) || tp_deadline_was_interrupted();
}

tp_status
tp_deadline_check_told(void)
{
    if (tp_deadline_was_interrupted())
        return tp_fail(TP_EABORTED, "interrupted");
    if (abandons && passed)
        return tp_fail(TP_ETIMEOUT, "the time limit stopped what had begun: more time would be right");
    return TP_OK;
}
