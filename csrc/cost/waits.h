/* How rows that wait for others (csrc/model/waits.h) change the seconds of instructions: one instruction puts off its rows, a later
 * one does the rows of several. */
#ifndef TP_COST_WAITS_H
#define TP_COST_WAITS_H

#include <stdint.h>

#include "csrc/base/status.h"

/* Of the head: a row's pass over its weights (logits and d(input)), the rows that a pass costs at least, a row's d(weight). */
typedef struct {
    double row_s, least, flush_s; /* row_s 0: no row waits, nor does a weight gradient */
} tp_cost_waits;

/* What an instruction does for the head, in rows. */
typedef struct {
    int64_t own;     /* of its slice, of those that F or I does */
    int64_t passed;  /* logits and d(input): more than its own, or none, where F waits for rows */
    int64_t flushed; /* d(weight) */
} tp_head_rows;

/* A walk over a step's micro-batches in order, each with all its F (slices ascending) and then all its I (descending). That is
 * an approximation: where a schedule interleaves micro-batches, another instruction may make d(weight) of some rows. Begins as
 * zeros. */
typedef struct {
    int64_t waiting[2]; /* rows in F's tile and in I's; behind the last micro-batch: the update's to make d(weight) of */
    int64_t from;       /* the first token whose row of F has not been passed */
} tp_head_walk;

/* Of the next micro-batch, of `batch` sequences: `put` is given what F (forward 1) and I of each slice does. */
typedef void (*tp_head_put)(void *context, int forward, int32_t slice, const tp_head_rows *rows);
void
tp_head_walk_on(tp_head_walk *walk, int32_t batch, int32_t slices, const int32_t *lengths, tp_head_put put, void *context);

/* rows: [slices] those whose weight gradients W of each slice makes of one sequence, written. */
void
tp_weight_rows(int32_t slices, const int32_t *lengths, int32_t *rows);

/* W: [slices] seconds of a micro-batch of one sequence where each slice makes its own, in place: where they wait. */
void
tp_weights_wait(int32_t slices, const int32_t *lengths, double *W);

/* Seconds more (or less) than an instruction's own rows take. */
double
tp_head_waits_s(const tp_cost_waits *waits, const tp_head_rows *rows, int forward);
/* And of the update. */
double
tp_head_left_s(const tp_cost_waits *waits, const tp_head_walk *walk);

#endif
