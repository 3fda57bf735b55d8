/* Single moves from a plan to its neighbours. Internal to the descent of csrc/plan/judge.h. */
#ifndef TP_PLAN_DESCEND_MOVES_H
#define TP_PLAN_DESCEND_MOVES_H

#include "csrc/plan/arena.h"
#include "csrc/plan/judge.h"

/* BOUNDARY: boundaries at + 1 .. at + to of the stages, each by `by` blocks. Of micro-batches of one pattern (as many
 * sequences, the same slices): SHIFT: slice `at` gets `by` tokens of slice `to`. BEND: all of its boundaries move together, slices
 * that grow or shrink along the sequence (at 0) or towards its middle (at 1), by to / 100: a pipeline fills and drains through its
 * first and last slices, and single moves cross that valley badly. RECOUNT: slices `at` and at + 1 are one (by 0), or slice `at`
 * is two. */
typedef enum { TP_MOVE_NONE, TP_MOVE_BOUNDARY, TP_MOVE_SHIFT, TP_MOVE_BEND, TP_MOVE_RECOUNT } tp_move_kind;
typedef struct {
    tp_move_kind kind;
    int32_t pattern, at, to, by;
} tp_move;

/* A plan by the patterns of its micro-batches, in the order in which they come first. */
typedef struct {
    int patterns;
    int32_t *boundary;       /* [stages + 1] */
    int32_t *size, *slices;  /* [patterns] */
    int32_t *lengths;        /* [patterns][room] */
    int32_t *pattern_of;     /* [micros] */
} tp_move_plan;

typedef struct {
    int order, pending, stages, unit, most; /* most: patterns of the start, and so of every plan */
    int32_t micros, room;                   /* room: slices that a micro-batch may have */
    int64_t trial_units;                    /* of the last plan that was made */
    tp_move_plan plan;
    int32_t *boundary, *batches, *slices, *lengths, *changed; /* of what a move makes; changed: [room] */
    tp_move *move;                                            /* malloc'ed */
    int64_t count, moves;                                     /* moves: room of it */
} tp_move_room;

/* unit 0: slices are not moved. */
TP_MUST_USE tp_status
tp_move_open(tp_arena *arena, const tp_candidate *start, int stages, int unit, tp_move_room *out);
void
tp_move_close(tp_move_room *room);
TP_MUST_USE tp_status
tp_move_plan_open(tp_arena *arena, const tp_move_room *room, tp_move_plan *out);
void
tp_move_copy(const tp_move_room *room, tp_move_plan *to, const tp_move_plan *from);
/* All moves of a kind that the plan allows, in room->move. step: of SHIFT, tokens; of BOUNDARY, how many move together at most. */
TP_MUST_USE tp_status
tp_move_list(tp_move_room *room, tp_move_kind kind, int step);
/* What the move makes of the plan, in the room's arrays, until the next call. */
tp_candidate
tp_move_make(tp_move_room *room, const tp_move *move);
/* The plan itself, likewise. */
tp_candidate
tp_move_start(tp_move_room *room);
/* The plan is what the move makes. */
void
tp_move_accept(tp_move_room *room, const tp_move *move);
/* Tokens of the longest slice. */
int32_t
tp_move_longest(const tp_move_room *room);

#endif
