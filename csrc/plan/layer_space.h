/* What both planners over layer graphs search: downsets, stages between two of them, and a stage's choices. Internal. */
#ifndef TP_PLAN_LAYER_SPACE_H
#define TP_PLAN_LAYER_SPACE_H

#include "csrc/plan/arena.h"
#include "csrc/plan/layer_graph.h"

typedef struct {
    const tp_layer_graph *graph;
    tp_arena *arena;
    int words, count;   /* downsets: count of them, words 64-bit words each, by size: 0 is empty, count - 1 is all */
    uint64_t *set;      /* [count * words] */
    int *smaller, *added; /* [count] of all but the empty one: a downset that is it but for one node, and that node */
    int degrees;        /* different tensor degrees, ascending */
    int *degree;        /* [degrees] */
    int *begin, *end;   /* [nodes * degrees] first variant of (node, degree), and behind its last */
    int reach;          /* most replicas in all: min(devices, micro_batches) */
    int replicas;       /* numbers of replicas a stage may have, ascending */
    int *replica;       /* [replicas] */
    int *edge_begin, *edge_of; /* [nodes + 1]: edges of a node, in order */
    int64_t *sync;      /* [variants] where its sync_bytes begin */
    double tick_s;      /* more than 0: choices are weighed in whole numbers of it, so that what ties in one unit of time ties
                           in every other; 0: in seconds */
} tp_layer_space;

/* A stage between two downsets: its nodes, and the bytes that each of their variants sends and receives. */
typedef struct {
    int nodes, *node;
    double *crossing; /* [variants] of the stage's nodes */
    unsigned degrees; /* bit: every node has a variant of this degree */
} tp_layer_pair;

/* The choices of a stage for given t and d: of each node one variant. */
typedef struct {
    int nodes;
    int *begin; /* [nodes + 1] */
    int *variant;
    double *time, *a, *b; /* time: seconds, or ticks */
    int *choice; /* [nodes] into the arrays above: what the last solution took */
    int *fastest; /* [nodes] scratch of the heuristic at every y */
    double memory_bytes;
    double price;  /* time a byte of the heuristic's last exchange; 0: none was needed */
    double *ratio; /* scratch of the heuristic */
    int *exchange;
} tp_layer_pack;

/* Everything lives in the arena; tick_s is 0. EVALUE if there are more than 20000 downsets (the graph is too branched). */
TP_MUST_USE tp_status
tp_layer_space_open(const tp_layer_graph *graph, tp_arena *arena, tp_layer_space *space);
TP_MUST_USE tp_status
tp_layer_pair_open(const tp_layer_space *space, tp_layer_pair *pair);
TP_MUST_USE tp_status
tp_layer_pack_open(const tp_layer_space *space, tp_layer_pack *pack);

/* Is downset j a proper part of downset i? */
int
tp_layer_within(const tp_layer_space *space, int j, int i);
void
tp_layer_pair_fill(const tp_layer_space *space, int i, int j, tp_layer_pair *pair);
/* t: index of the tensor degree; d: replicas. The pair must have the degree. */
void
tp_layer_pack_fill(const tp_layer_space *space, const tp_layer_pair *pair, int t, int d, tp_layer_pack *pack);

/* What variant v takes in a stage of d replicas of which it sends and receives so many bytes: 0 is the least. As time in a pack. */
double
tp_layer_time(const tp_layer_space *space, int v, double crossing, int d);

/* Piper's heuristic at y micro-batches in flight a replica: the time, or INFINITY if nothing fits; choice is set. */
double
tp_layer_pack_greedy(tp_layer_pack *pack, int y);
/* The same at y = 1 .. most, INFINITY from where nothing fits; choice and price are no solution's. */
void
tp_layer_pack_greedy_each(tp_layer_pack *pack, int most, double *time);
/* No choice that fits takes less: Lagrange's bound at the heuristic's price. */
double
tp_layer_pack_bound(const tp_layer_pack *pack, int y);
/* The fastest variants, whatever they need: time, and memory a y + b. */
double
tp_layer_pack_fastest(tp_layer_pack *pack, double *a, double *b);
/* Bytes of a choice [nodes] at y, added up node by node as those of a plan's stages are: to the last bit what must fit, where bytes
 * are fractions, as no a y + b of sums is. */
double
tp_layer_pack_bytes(const tp_layer_pack *pack, const int *choice, int y);
/* Bytes of the variants that need least at y, as there: no choice has fewer. */
double
tp_layer_pack_least_bytes(const tp_layer_pack *pack, int y);

TP_MUST_USE tp_status
tp_layer_plan_open(const tp_layer_space *space, tp_layer_plan *plan);
/* Write the next stage: its pack's choice, in seconds. */
void
tp_layer_plan_put(const tp_layer_space *space, const tp_layer_pair *pair, const tp_layer_pack *pack, int t, int d,
                  tp_layer_plan *plan);
/* All stages are there: set their bytes. */
void
tp_layer_plan_finish(const tp_layer_space *space, tp_layer_plan *plan);
/* EINFEASIBLE: what the limit is, and the least under which there is a plan, or, of large graphs, one under which a plan is known;
 * where no memory would do, the devices or micro-batches that are short. (layer_least.c) */
tp_status
tp_layer_infeasible(const tp_layer_space *space, tp_layer_pair *pair, tp_layer_pack *pack);

#endif
