/* The state of one evaluation by worklist: a rank runs until it needs what nobody has made yet, and whoever makes that wakes it.
 * simulate.c drives it, worklist.c runs instructions.
 *
 * Which instruction runs next does not depend on how long any takes. So the makespans that say what idle time is due to (bubble.c)
 * are found in the same pass, at the price of a few additions: a moment is kept in lanes, as it is, and as it would be if copies,
 * messages or uneven slices did not matter. */
#ifndef TP_SCHED_WORKLIST_H
#define TP_SCHED_WORKLIST_H

#include "csrc/sched/copier.h"
#include "csrc/sched/internal.h"
#include "csrc/sched/links.h"
#include "csrc/sched/sums.h"

typedef struct tp_stage_state tp_stage_state;

typedef struct {
    const tp_program *p;
    const tp_durations *d;
    const tp_lanes *lanes;
    unsigned kept; /* TP_LANE_*: lanes->wanted, and those that a loop for these has besides */
    int plain;     /* no halves, guests, copies beside the work, nor messages that take time of a rank */
    int64_t units;
    int lowered, two_places;
    tp_stage_state *stages;
    double *cells;       /* by stage and unit, moments: what the stage has made of it */
    int64_t halved;      /* from such a cell to that of the first half of its forward */
    uint8_t *halves;     /* tp_sched_halves; NULL: nothing is halved */
    int64_t stride[TP_OPS], weights_stride;
    double *guest;       /* [2][stages * micros] moments: at its host, and home; NULL: no guests */
    uint8_t *awaited;    /* [stages * micros] what reads it next is to wait until it is home */
    double *guest_free[2]; /* given, copied: [2 * stages] when the link of its guests, there and back, has carried all of them */
    double *clock;       /* [ranks] moments */
    double *work, *recompute, *swap, *sums, *first_backward, *work_before; /* [ranks] */
    const void **waiting; /* [ranks] the cell that a blocked rank waits for; NULL */
    int64_t *next;        /* [ranks] */
    tp_sched_links links[2]; /* given, copied */
    tp_sched_copiers copiers;
    int32_t *stack;
    int stacked;
    tp_sched_sums summed;
    double (*gone)[2][2]; /* [stages][given, copied] when its last gradients so far began and ended; NULL: no sums beside the work */
    tp_timeline *line; /* NULL: no intervals */
    int64_t *interval; /* [ranks] where the rank's next interval goes */
    int64_t asked;     /* steps since somebody was asked whether to stop */
} tp_worklist;

#define TP_NOT_YET (-1.0)
enum { TP_LANES = 4 };

/* A moment in memory: a double for each lane kept, the given one first. */
static inline int
tp_lane_at(unsigned kept, unsigned lane)
{
    return 1 + __builtin_popcount(kept & (lane - 1));
}
static inline int
tp_lane_count(unsigned kept)
{
    return 1 + __builtin_popcount(kept);
}

/* Fills kept, plain, clock and all that running instructions needs beyond what simulate.c has set: p, d, lanes, units, lowered and
 * two_places must be there. To be closed even where it fails. EMEMORY. */
TP_MUST_USE tp_status
tp_worklist_open(tp_worklist *worklist, unsigned ops);
void
tp_worklist_close(tp_worklist *worklist);
/* The rank runs until `end`, its AR or OPT, or what nobody has made yet: then waiting is set. */
void
tp_worklist_run(tp_worklist *worklist, int rank, int64_t end);
/* Instruction k of the program, which the rank does next, took from start to end. */
void
tp_worklist_note(tp_worklist *worklist, int rank, int64_t k, double start, double end);

#endif
