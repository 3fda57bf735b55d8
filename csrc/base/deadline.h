/* When the calling thread must stop: at a point in time (its deadline), or as soon as its listener (a callback, for signals and
 * aborts) says so. Loops that may run long ask here. A thread that plans has both (csrc/py/deadline.c, csrc/py/away.c), one that
 * runs a rank has a listener only. Both are the thread's and not arguments of planners, so that one limit holds for everything that
 * a plan takes. Without a deadline the clock only says when to call the listener: the same request has the same answer. */
#ifndef TP_BASE_DEADLINE_H
#define TP_BASE_DEADLINE_H

#include <stdatomic.h>
#include <stdint.h>

#include "csrc/base/status.h"

/* at_ns on tp_deadline_now's clock; 0: none. Returns the one before. */
int64_t
tp_deadline_set(int64_t at_ns);
int64_t
tp_deadline_get(void);
/* 0: tp_clock_ns is the clock of this thread's deadlines. More: for tests, one on which so much passes with every question, and
 * nothing else. */
void
tp_deadline_count(int64_t step_ns);
int64_t
tp_deadline_now(void);
/* Has it passed, or was the thread told to stop? Once it has, the answer stays until another is set. */
int
tp_deadline_late(void);
/* ETIMEOUT where it has passed, EABORTED where the thread was told to stop, for planners that have nothing to give before they
 * are done; `who` is their name. */
TP_MUST_USE tp_status
tp_deadline_check(const char *who);

/* ---- being told to stop -------------------------------------------------------------------------------------------------- */

/* heard: 1 if the thread shall stop, 0 if not, -1 if nobody can ever tell it. It is called within questions of that thread, every
 * 20 ms at most, and may do whatever it likes, plan too: what it sets here ends with it. After 1 it is not called again, and the
 * answer stays until there is another listener. NULL: nobody can tell it. */
typedef struct {
    int (*heard)(void *context);
    void *context;
    int64_t next_ns, looked_ns; /* on tp_clock_ns: it is to be called; the last look at that clock */
    int told, skip;             /* skip: questions to come that do not look */
} tp_listener;

/* Set the thread's listener. *before, unless NULL, gets the one that was set, which tp_deadline_unlisten brings back. */
void
tp_deadline_listen(int (*heard)(void *context), void *context, tp_listener *before);
void
tp_deadline_unlisten(const tp_listener *before);
/* Besides, whoever listens: once another thread has set *flag this one is told to stop, and is late. It must last until another, or
 * NULL, takes its place. */
void
tp_deadline_stop_by(const _Atomic unsigned char *flag);
/* on: work that is of no use unless it is complete (tp_deadline_told) ends at the deadline, too, with ETIMEOUT: for what need not be
 * there in any case. Of this thread; the setting before. */
int
tp_deadline_abandon(int on);
/* Has the listener told the thread to stop? For work that is of no use unless it is complete; work that is as good as time
 * allows asks tp_deadline_late. */
int
tp_deadline_told(void);
/* The same before a long piece of work: it looks at the clock on every call, where tp_deadline_told skips some. */
int
tp_deadline_told_before(void);
/* The last answer again, without asking. tp_deadline_check_told: EABORTED, or ETIMEOUT, where it was yes; results made since may be
 * garbage. tp_deadline_was_interrupted: not only by the deadline. */
int
tp_deadline_was_told(void);
int
tp_deadline_was_interrupted(void);
TP_MUST_USE tp_status
tp_deadline_check_told(void);

/* For loops whose steps take less time than reading a clock: count `more` steps (of some nanoseconds each), and ask once
 * tp_deadline_steps have come together. *steps is the caller's, 0 at first. */
extern int64_t tp_deadline_steps;     /* how many: 2^18; tests make it less, before anything is asked */
extern int64_t tp_deadline_listen_ns; /* between two times that a listener is called: 20 ms; the same */

static inline int
tp_deadline_told_after(int64_t *steps, int64_t more)
{
    *steps += more;
    if (*steps < tp_deadline_steps)
        return 0;
    *steps = 0;
    return tp_deadline_told();
}

static inline tp_status
tp_deadline_check_after(int64_t *steps, int64_t more)
{
    return tp_deadline_told_after(steps, more) ? tp_deadline_check_told() : TP_OK;
}

#endif
