/* Stages of a chain with the same nodes at different places: a value that takes long to compute is computed for the first of them
 * and kept for all. Internal to the layer-graph planners. */
#ifndef TP_PLAN_LAYER_ALIKE_H
#define TP_PLAN_LAYER_ALIKE_H

#include "csrc/plan/layer_space.h"

typedef struct {
    int nodes;      /* 0: the graph is no chain of nodes in order, or too long: every stage is its own */
    int *first;     /* [nodes][nodes] of stage (begin, length - 1) the first node of the first stage like it */
    double **times; /* [nodes][nodes] of (first, length - 1); NULL: not known */
    int values;     /* of each */
    int64_t most;   /* that are still to be taken */
    double *room;   /* for `left` more of them */
    int64_t left;
} tp_layer_alike;

/* values: doubles that are kept of a stage. most: of all stages, about: where nodes differ there are as many kinds of
 * stages as stages, and more memory would go into them than planners take for the rest. */
TP_MUST_USE tp_status
tp_layer_alike_open(const tp_layer_space *space, int values, int64_t most, tp_layer_alike *alike);
/* What is kept of stage i \ j: NANs at first. NULL where every stage is its own, or there is too much already. */
TP_MUST_USE tp_status
tp_layer_alike_of(const tp_layer_space *space, tp_layer_alike *alike, int i, int j, double **values);
/* The same; NULL too where nothing is kept yet. */
static inline const double *
tp_layer_alike_known(const tp_layer_alike *alike, int i, int j)
{
    int n = alike->nodes, begin = n - i, last = i - j - 1;
    return n == 0 ? NULL : alike->times[alike->first[begin * n + last] * n + last];
}

#endif
