/* When what the calling thread plans must end: at a time, or when somebody tells it to. Whoever plans sets both
 * (csrc/py/deadline.c, csrc/py/away.c), and who runs a rank the second; loops that may run long ask. They are the thread's and no
 * planner's argument: one limit holds for all that a plan takes, and what is told is no part of any answer. Without a limit a clock is
 * read for listening alone, so that the same question has the same answer. */
#ifndef TP_BASE_DEADLINE_H
#define TP_BASE_DEADLINE_H

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

/* From now on; *before, unless it is NULL, is the one there was, which tp_deadline_unlisten brings back. */
void
tp_deadline_listen(int (*heard)(void *context), void *context, tp_listener *before);
void
tp_deadline_unlisten(const tp_listener *before);
/* Is the thread told to stop? Unlike tp_deadline_late for what must be whole, and not just as good as time allows. */
int
tp_deadline_told(void);
/* The same of who asks before work that takes long, whatever was asked before: it looks at the clock each time. */
int
tp_deadline_told_before(void);
/* Was it, the last time that it asked? And EABORTED where it was: what it has made since need not make sense. */
int
tp_deadline_was_told(void);
TP_MUST_USE tp_status
tp_deadline_check_told(void);

/* In loops that are quicker than a clock: asked once all `more` steps, of some nanoseconds each, are many. *steps is the caller's,
 * 0 at first. */
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
