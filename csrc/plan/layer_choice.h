/* The exact choice of one variant for each node of a stage: least time within memory. Internal to the layer-graph planners. */
#ifndef TP_PLAN_LAYER_CHOICE_H
#define TP_PLAN_LAYER_CHOICE_H

#include "csrc/plan/layer_space.h"

enum { TP_LAYER_POINTS = 2048 }; /* of a node that are kept at most */

typedef struct {
    double time_s, bytes;
    int32_t from, l; /* the point before, the variant added */
} tp_layer_point;

typedef struct {
    int32_t from, l;
} tp_layer_origin;

typedef struct {
    tp_layer_point *points, *merged, *spare; /* [TP_LAYER_POINTS * most variants] */
    tp_layer_origin *kept;                   /* [nodes * TP_LAYER_POINTS] how the last choice's points came about, node by node */
    double slack;                            /* the part of a sum that rounding may have taken */
    int64_t knapsacks;                       /* choices solved so */
    int capped;                              /* a node had more points, and some were left out */
} tp_layer_choice;

TP_MUST_USE tp_status
tp_layer_choice_open(const tp_layer_space *space, double slack, tp_layer_choice *choice);

/* The least time within memory at y micro-batches in flight, and the pack's choice of it, where that is no more than `most`;
 * otherwise more than `most`, and some choice. INFINITY if the heuristic finds nothing that fits. */
double
tp_layer_choice_solve(tp_layer_choice *choice, tp_layer_pack *pack, int y, double most);

#endif
