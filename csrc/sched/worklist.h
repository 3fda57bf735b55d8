/* The state of one worklist evaluation: what simulate.c and its short cut for plain programs (plain.c) share. */
#ifndef TP_SCHED_WORKLIST_H
#define TP_SCHED_WORKLIST_H

#include "csrc/sched/copier.h"
#include "csrc/sched/internal.h"
#include "csrc/sched/links.h"

typedef struct tp_plain tp_plain;

typedef struct {
    const tp_program *p;
    const tp_durations *d;
    int64_t units;
    int lowered, two_places;
    tp_plain *plain;           /* NULL: the general path, and then the four below */
    double *ready_f, *ready_b; /* [stages * units] when the stage's output has come to its reader; TP_NOT_YET */
    uint8_t *halves;           /* tp_sched_halves */
    double *ready_half;        /* [stages * units] the same of the first half of the forward's; NULL: nothing is halved */
    double *guest_free; /* [2 * stages] when the link of its guests, there and back, has carried all that was sent */
    double *guest; /* [3][stages * micros] when it is at its host, when it is home, 1: its reader is to wait; NULL: no guests */
    double *clock, *work, *recompute, *swap, *sums, *first_backward, *work_before; /* [ranks] */
    const void **waiting; /* [ranks] the cell that a blocked rank waits for; NULL */
    int64_t *next;        /* [ranks] */
    tp_sched_links links;
    tp_sched_copiers copiers;
    uint8_t *remote;      /* [stages + 1] does F of this stage read from another rank? */
    int32_t *stack;
    int stacked;
    tp_run *runs; /* NULL: not recorded */
    int64_t run_count, run_room;
    tp_timeline *line; /* NULL: no intervals */
    int64_t *interval; /* [ranks] where the rank's next interval goes */
    int64_t asked;     /* steps since somebody was asked whether to stop */
} tp_worklist;

#define TP_NOT_YET (-1.0)

/* Is the program without halves, guests, U and copies beside the work, and do messages' copies take none of a rank's time? */
int
tp_plain_may(unsigned ops, const tp_durations *durations);
/* Fills worklist->plain; remote must be there. EMEMORY. */
TP_MUST_USE tp_status
tp_plain_open(tp_worklist *worklist);
void
tp_plain_close(tp_plain *plain);
/* As run_body of simulate.c, to the bit: the rank runs until `end`, its AR or OPT, or a message that nobody has made yet. */
void
tp_plain_run(tp_worklist *worklist, int rank, int64_t end);

#endif
