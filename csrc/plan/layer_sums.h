/* Time and bytes of a stage with each node's fastest variant, without looking at all its nodes: a difference of sums over two
 * downsets, plus the messages of the nodes at its rim (those with an edge to another stage). This decides most stages, too slow or
 * fast enough, before a pack (layer_choice.h) is filled for them. A margin covers rounding: within it the pack's own sum decides.
 * Internal to the layer-graph planners. */
#ifndef TP_PLAN_LAYER_SUMS_H
#define TP_PLAN_LAYER_SUMS_H

#include "csrc/plan/layer_space.h"

typedef struct {
    double time_s, a, b; /* of a downset's nodes by their fastest variants; a node without one of the degree adds nothing */
} tp_layer_sum;

typedef struct {
    double *alone_s;    /* [replicas][variants] a variant's time in a stage that sends nothing */
    double *time_s;     /* [degrees][count][replicas] sums of tp_layer_sum's fields, of stages that send nothing */
    double *a, *b;      /* the same */
    int *lacking;       /* [degrees][count] nodes without a variant of the degree */
    int *faster;        /* [degrees] with more replicas no variant is slower, and so no sum */
    uint64_t *fed;      /* [count][words] its nodes with an edge from outside */
    uint64_t *feeding;  /* [count][words] nodes outside with an edge to it */
    int *rim;           /* scratch: [nodes] */
    double *rim_s;      /* scratch: [variants] */
    double slack;       /* what a sum may have lost in rounding is at most this part of it, four times over */
} tp_layer_sums;

TP_MUST_USE tp_status
tp_layer_sums_open(const tp_layer_space *space, tp_layer_sums *sums, int64_t *asked);

/* The fastest of the variants from `begin`, the first of equals: tp_layer_pack_fastest's. */
static inline int
tp_layer_fastest_of(const double *time_s, int begin, int end)
{
    int best = begin;
    for (int v = begin + 1; v < end; v++)
        if (time_s[v] < time_s[best])
            best = v;
    return best;
}

/* Where the sums of downset i are. */
static inline int64_t
tp_layer_sums_at(const tp_layer_space *s, int i, int t, int r)
{
    return ((int64_t)t * s->count + i) * s->replicas + r;
}

/* Has every node of stage i \ j a variant of this degree? */
static inline int
tp_layer_sums_has(const tp_layer_space *s, const tp_layer_sums *sums, int i, int j, int t)
{
    return sums->lacking[(int64_t)t * s->count + i] == sums->lacking[(int64_t)t * s->count + j];
}

/* Is stage i \ j slower than tau, whatever it sends? */
static inline int
tp_layer_sums_slower(const tp_layer_space *s, const tp_layer_sums *sums, int i, int j, int t, int r, double tau)
{
    double whole_s = sums->time_s[tp_layer_sums_at(s, i, t, r)];
    return whole_s - sums->time_s[tp_layer_sums_at(s, j, t, r)] - sums->slack * whole_s > tau;
}

/* The fastest variants of stage i \ j of replica[r] replicas of degree[t], as tp_layer_pack_fastest has them but for rounding, and
 * by how much that may be off. The stage must have the degree. */
void
tp_layer_sums_fastest(const tp_layer_space *space, const tp_layer_sums *sums, int i, int j, int t, int r, tp_layer_sum *sum,
                      tp_layer_sum *margin);

/* The nodes of the stage that send or receive, and at their variants' places what those take. How many nodes. */
int
tp_layer_sums_rim(const tp_layer_space *space, const tp_layer_sums *sums, int i, int j, int t, int r, int *node, double *time_s);

#endif
