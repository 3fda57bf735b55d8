/* Planning over a layer graph in Piper's form (Tarnawski, Narayanan, Phanishayee: "Piper: Multidimensional Planner for DNN
 * Parallelization", NeurIPS 2021, section 3; file format: README of github.com/msr-fiddle/piper, MIT): which nodes make a
 * stage, how many replicas (data parallel) of how many devices (tensor parallel) it gets, and which of each node's
 * variants (plain, recomputed, ...) it runs.
 *
 * Nodes of a stage S with t devices a replica and d replicas; s = d + the replicas of all later stages; y = ceil(s / d):
 *     time(S) = sum over nodes of [time_s + crossing / bandwidth] / d + 4 (d - 1) param_bytes / (d micro_batches bandwidth)
 *     memory(S) = sum of memory_a y + memory_b <= memory_bytes, on each device
 * crossing: 2 (edge_bytes + the variant's sync bytes of that edge), for each edge to or from another stage. (The factor 4 and
 * the division of the weights' exchange by the micro-batches are those of the authors' planner, getDataParallelResyncCost.)
 * A plan: stages = differences of downsets (what is closed under successors), t d devices each, sum of t d <= devices, d
 * divides micro_batches, sum of d <= micro_batches. Its time per sample is the largest time(S). */
#ifndef TP_PLAN_LAYER_GRAPH_H
#define TP_PLAN_LAYER_GRAPH_H

#include <stdint.h>

#include "csrc/base/status.h"

typedef struct {
    int nodes, edges, variants;
    int devices, micro_batches;
    double memory_bytes, bandwidth_Bps;
    const int32_t *from, *to;    /* [edges] nodes */
    const double *edge_bytes;    /* [edges] */
    const int32_t *node, *degree; /* [variants] of which node, on how many devices; ascending in (node, degree) */
    const double *time_s;        /* [variants] forward and backward of one micro-batch */
    const double *param_bytes, *memory_a, *memory_b; /* [variants] */
    const double *sync_bytes; /* for each variant in order, for each edge of its node in edge order */
} tp_layer_graph;

typedef struct {
    int data, tensor; /* d replicas of t devices */
    double time_s, memory_bytes;
} tp_layer_stage;

typedef struct {
    int stages;
    tp_layer_stage *stage; /* [nodes], the first `stages` are used */
    int *stage_of;         /* [nodes] */
    int *variant;          /* [nodes] index of the variant chosen */
    double time_per_sample_s, lower_bound_s; /* no plan is faster than the bound; 0 where the planner proves none */
    int optimal;
    int64_t downsets, pairs; /* of the graph; pairs: of a downset and one within it */
    int64_t searches;        /* exact: thresholds tried; Piper's: tables filled */
    int64_t knapsacks;       /* choices of variants solved */
    double seconds;
} tp_layer_plan;

/* EVALUE naming the node, edge or variant that is out of range, negative or not finite, or a cycle. */
TP_MUST_USE tp_status
tp_layer_graph_check(const tp_layer_graph *graph);

/* Piper's dynamic programme as published (section 4, with the authors' speed-up over the sums of replicas at which a value
 * drops) and their knapsack heuristic: from the fastest variants, the exchanges of least time per byte until it fits.
 * exhaustive: of all pairs of downsets every stage is solved, as theirs does; 0: those that are slower than the best plan, whose
 * time tp_plan_layers tells, are passed over, and like ones solved once: the same plan, sooner on all but the smallest graphs.
 * O(downsets^2 devices^2) time, O(downsets devices min(devices, micro_batches)) memory. End with tp_layer_plan_free.
 * EVALUE, EMEMORY, EINFEASIBLE naming the bytes short. */
TP_MUST_USE tp_status
tp_plan_piper(const tp_layer_graph *graph, int exhaustive, tp_layer_plan *out);

/* The least time per sample of the same model, exact, variants chosen exactly: never slower than tp_plan_piper.
 * For a threshold on the time per sample, the Pareto front of (replicas, devices) for each downset says whether a plan
 * exists: both only hurt the stages before. Bisection ends when no plan is below the one found. optimal 0 if a choice of
 * variants had more than 2048 Pareto points (then some were dropped). Same errors. */
TP_MUST_USE tp_status
tp_plan_layers(const tp_layer_graph *graph, tp_layer_plan *out);
void
tp_layer_plan_free(tp_layer_plan *plan);

#endif
