/* A graph of nodes as a chain: an order, and what crosses each cut of it. */
#ifndef TP_PLAN_GRAPH_H
#define TP_PLAN_GRAPH_H

#include <stdint.h>

#include "csrc/base/status.h"

/* from[e] makes bytes[e] that to[e] reads; several edges of one `from` are one tensor, of the largest of their bytes. */
typedef struct {
    int count, edges;
    const int32_t *from, *to; /* [edges] 0 .. count - 1 */
    const double *bytes;      /* [edges] finite, not negative */
} tp_graph;

/* order[count]: nodes by depth (the longest path of edges from a source), then by the start of their forward where every
 * node starts as soon as its sources end, then by index (DawnPiper's order; PLANNERS.md 3.1): starts within 1e-12 are one. A cycle:
 * *cycle > 0 nodes, written to order[] in the direction of the edges, and TP_OK. EVALUE naming an edge out of range. */
TP_MUST_USE tp_status
tp_graph_order(const tp_graph *graph, const double *forward_s, int32_t *order, int *cycle);

/* Of nodes that stand in order already: what crosses the boundary behind each, cut_bytes[count] and cut_tensors[count] (a
 * tensor counts once, from its maker to its last reader; behind the last node 0). EVALUE naming an edge that goes back. */
TP_MUST_USE tp_status
tp_graph_cuts(const tp_graph *graph, double *cut_bytes, double *cut_tensors);

#endif
