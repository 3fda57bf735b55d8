/* Copies beside the work: each rank has one copier, which makes the copies of its SO and SI one after another, in the order in
 * which they were begun (TP_BESIDE). */
#ifndef TP_SCHED_COPIER_H
#define TP_SCHED_COPIER_H

#include <stdlib.h>
#include <string.h>

#include "csrc/sched/internal.h"

typedef struct {
    double *free_s; /* [ranks] when the copier has made all that was begun; NULL: nothing is copied beside the work */
    double *out_s;  /* [stages][2] when the last copy out of the stage has ended, of even and of odd slots */
    double *in_s;   /* [stages * units] when the copy in has; 0: there was none */
    size_t count;   /* of all three */
} tp_sched_copiers;

/* EMEMORY. */
TP_MUST_USE static inline tp_status
tp_sched_copiers_open(const tp_program *program, tp_sched_copiers *out)
{
    size_t ranks = (size_t)program->ranks, stages = (size_t)program->stages;
    out->count = ranks + stages * (2 + (size_t)tp_program_units(program));
    out->free_s = calloc(out->count, sizeof *out->free_s);
    if (out->free_s == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the copies of %zu stages", stages);
    out->out_s = out->free_s + ranks;
    out->in_s = out->out_s + 2 * stages;
    return TP_OK;
}

static inline void
tp_sched_copiers_close(tp_sched_copiers *copiers)
{
    free(copiers->free_s);
}

static inline void
tp_sched_copiers_reset(tp_sched_copiers *copiers)
{
    if (copiers->free_s != NULL)
        memset(copiers->free_s, 0, copiers->count * sizeof *copiers->free_s);
}

/* Of an F or SO: which place of its stage; all of a program that has one place each, or no slots yet, are of the first. */
static inline int
tp_sched_place(const tp_instr *instr, int two)
{
    return two ? (int)(TP_SLOT_ACTIVATION(instr->slot) & 1u) : 0;
}

/* The copy of SO or SI begins as soon as the copier is free; returns when it ends. place: tp_sched_place. */
static inline double
tp_sched_copiers_begin(tp_sched_copiers *copiers, int rank, int op, int stage, int place, int64_t cell, double now_s, double seconds)
{
    double *free_s = &copiers->free_s[rank];
    *free_s = (now_s > *free_s ? now_s : *free_s) + seconds;
    *(op == TP_OP_SO ? &copiers->out_s[2 * stage + place] : &copiers->in_s[cell]) = *free_s;
    return *free_s;
}

/* When F, B or I may begin that could at now_s. */
static inline double
tp_sched_copiers_wait(const tp_sched_copiers *copiers, int op, int stage, int place, int64_t cell, double now_s)
{
    double there_s = op == TP_OP_F ? copiers->out_s[2 * stage + place] : copiers->in_s[cell];
    return there_s > now_s ? there_s : now_s;
}

#endif
