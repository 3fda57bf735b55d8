/* Programs that split has filled with W, compared. Internal to csrc/sched/split.c. */
#ifndef TP_SCHED_FILLED_H
#define TP_SCHED_FILLED_H

#include "csrc/sched/links.h"
#include "csrc/sched/sched.h"

#define TP_FILLED_SLIGHT (1.0 - 1e-9) /* less than this much better is rounding */
#define TP_FILLED_NOT_YET (-1.0)

/* A filled program, the latest of its clocks, and its seconds by simulation; NOT_YET: nobody had to know. */
typedef struct {
    tp_program *program;
    int32_t *order; /* of its instructions, by index: one in which all is made before it is read */
    double ticks, seconds;
} tp_filled;

/* What all of them have in common. */
typedef struct {
    unsigned ops;
    const tp_durations *d;
    int64_t units;
    int exact;       /* the clocks are the simulator's, but for rounding */
    int replays;     /* the simulator's seconds are those of one pass in the order of filling */
    double longest;  /* ticks: of more the clocks say less than the simulator */
    double *ready_s; /* [2][stages * units] when an output comes to its reader, forward and back */
    tp_sched_links *links;
} tp_filled_given;

/* By how much clocks may be off: every instruction rounds what it takes, its copies and its link to whole ticks. */
double
tp_filled_slack(const tp_program *program);
/* Do the clocks say what the simulator would? Not where a duration had to be cut. */
int
tp_filled_is_known(const tp_filled_given *given, const tp_filled *x);
/* Is x faster than best (whose program may be NULL: there is none yet)? Finds what seconds it has to know. */
TP_MUST_USE tp_status
tp_filled_is_better(const tp_filled_given *given, tp_filled *x, tp_filled *best, int *better);

#endif
