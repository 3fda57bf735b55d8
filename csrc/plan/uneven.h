/* Token slices for stages that are not equal (PLANNERS.md 1.8): slices 1 .. M pass the stages in order, each stage in the
 * same order, so that the latency is the makespan of a permutation flow shop and depends on every stage's own times. */
#ifndef TP_PLAN_UNEVEN_H
#define TP_PLAN_UNEVEN_H

#include <stdint.h>

#include "csrc/base/status.h"

#define TP_UNEVEN_EXACT 256       /* units up to which the search is exact */
#define TP_UNEVEN_WORK 50000000   /* steps unless told otherwise: some tens of seconds with 50 stages, most often none */

/* Seconds of a slice of s units after c units of context on stage k: forward[(k (units + 1) + s) (units + 1) + c], 1 <= s,
 * s + c <= units; only these are read. backward alike, or NULL. Backward slices go through the stages in reverse, the last
 * slice first, when the last stage has ended its forwards; reversed in time that is a second flow shop with the same
 * order, so that the latency is the sum of both makespans. */
typedef struct {
    int stages, units;
    const double *forward, *backward;
    int longest;  /* no slice of more units; 0: none */
    int64_t work; /* labels extended or compared before the search gives up; 0: TP_UNEVEN_WORK */
} tp_uneven_request;

typedef struct {
    double latency_s;     /* of length[], exact */
    double lower_bound_s; /* no slicing is faster */
    int optimal;
    int slices, *length; /* [slices], units */
    int64_t labels;      /* partial slicings that were kept */
    int64_t work;        /* labels extended or compared */
    int64_t evaluations; /* whole slicings timed by the local search */
    double seconds;
} tp_uneven_plan;

/* EVALUE: no stage, no unit; a cell, named t[k, s, c] or bwd[k, s, c], that is NaN, infinite or negative. */
TP_MUST_USE tp_status
tp_uneven_check(const tp_uneven_request *request);
/* The latency of length[slices], which must add up to `units` (EVALUE). */
TP_MUST_USE tp_status
tp_uneven_latency(const tp_uneven_request *request, const int *length, int slices, double *latency_s);
/* The slicing of least latency. Labels (Martins' multi-objective shortest path): at each position, the vectors of times at
 * which the stages are free after some slicing of what is before; a vector is dropped only if another is nowhere later or
 * if no completion of it beats the best slicing known. Hence exact up to TP_UNEVEN_EXACT units, unless `work` ends it; then
 * the bound is the least of what was still open. With more units: exact on a grid of at most half as many cuts, then moves
 * of single cuts, splits and joins; the bound is over all slicings, one dynamic programme a stage. Among plans of equal
 * latency the first found is kept: the order is fixed. The request must have passed tp_uneven_check. End *plan with
 * tp_uneven_plan_free. EVALUE, EMEMORY. */
TP_MUST_USE tp_status
tp_plan_uneven(const tp_uneven_request *request, tp_uneven_plan *plan);
void
tp_uneven_plan_free(tp_uneven_plan *plan);

#endif
