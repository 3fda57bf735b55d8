/* Internal to sim.c and sim_ends.c: one program, many durations. */
#ifndef TP_SCHED_SIM_H
#define TP_SCHED_SIM_H

#include "csrc/sched/copier.h"
#include "csrc/sched/internal.h"
#include "csrc/sched/links.h"
#include "csrc/sched/sums.h"

typedef struct {
    int32_t previous, maker; /* indices in this order; -1 */
    int32_t unit;
    uint16_t stage;
    uint8_t op, flags;
} node; /* 16 bytes */

/* FIRST, SECOND: of which half the node is, as TP_HALF_*; *_APART: so is its message; COPIED: with the first half, or for the B that R
 * is within. */
enum { FIRST = TP_HALF_FIRST, SECOND = TP_HALF_SECOND, IN_REMOTE = 4, OUT_REMOTE = 8, IN_APART = 16, OUT_APART = 32, COPIED = 64,
       GUEST = 128 }; /* SE, SL, or RL where what was loaded is read */
enum { AHEAD = 48 }; /* nodes between asking for the seconds of one and reading them */

struct tp_sim {
    int64_t count, units;
    int32_t ranks, stages;
    int two_places, halved;
    int32_t *last;       /* [ranks] last node of the rank's body; -1 */
    node *nodes;         /* bodies: F B I W R, SO and SI; SF and SB that are not right behind what they send */
    node *ends;          /* AR, OPT: stage and op; grouped by rank */
    int32_t *ends_begin; /* [ranks + 1] */
    double *end;         /* [count] */
    double *there;       /* [count] when its message has come: a guest's, and where links carry one at a time any */
    double *guest_free;  /* [2 * stages] of tp_sched_guest_send, there and back; NULL: there are no guests */
    tp_sched_links links;
    tp_sched_copiers copiers; /* of a program that swaps beside its work */
    int32_t *rank_of;         /* [stages]; NULL: it does not */
    uint8_t *place;           /* [count] of an F or SO: tp_sched_place; NULL likewise */
    tp_sched_sums sums;
    int32_t *gone;       /* [stages] node of its last gradients; -1: none */
    uint8_t *whole;      /* [stages] 1: that is a B */
    double *clock;       /* [ranks] */
    int64_t asked;       /* steps since somebody was asked whether to stop */
};

/* Which nodes the sums of gradients beside the work wait for. EMEMORY. */
TP_MUST_USE tp_status
tp_sim_find_sums(const tp_program *program, tp_sim *sim);
/* AR, for which both ends meet at meet_s, then OPT, from each rank's clock on; leaves when the last ends: csrc/sched/simulate.c,
 * run_ends. */
double
tp_sim_run_ends(const tp_sim *sim, const tp_durations *durations, double meet_s);

#endif
