#include "csrc/plan/graph.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int32_t *begin, *reader, *missing, *depth, *queue; /* readers of node k: reader[begin[k] .. begin[k + 1]) */
    double *start_s;
} room;

typedef struct {
    int32_t depth, node;
    double start_s;
} place;

static tp_status
check_edges(const tp_graph *graph)
{
    for (int e = 0; e < graph->edges; e++) {
        int from = graph->from[e], to = graph->to[e];
        if (from < 0 || from >= graph->count || to < 0 || to >= graph->count)
            return tp_fail(TP_EVALUE, "edge %d goes from node %d to node %d: 0 to %d would be right", e, from, to,
                           graph->count - 1);
        if (!(graph->bytes[e] >= 0.0 && graph->bytes[e] <= 1e300))
            return tp_fail(TP_EVALUE, "edge %d (node %d to node %d) has %g bytes: a number of 0 to 1e300 is needed", e,
                           from, to, graph->bytes[e]);
    }
    return TP_OK;
}

static void
close_room(room *r)
{
    free(r->begin);
    free(r->start_s);
}

static tp_status
open_room(const tp_graph *graph, room *r)
{
    size_t n = (size_t)graph->count, edges = (size_t)graph->edges;
    *r = (room){.begin = calloc(4 * n + 2 + edges, sizeof(int32_t)), .start_s = calloc(n, sizeof(double))};
    if (r->begin == NULL || r->start_s == NULL) {
        close_room(r);
        return tp_fail(TP_EMEMORY, "no memory for a graph of %d nodes", graph->count);
    }
    r->missing = r->begin + n + 2;
    r->depth = r->missing + n;
    r->queue = r->depth + n;
    r->reader = r->queue + n;
    int32_t *fill = r->begin + 1; /* begin[k + 1] moves from the start of k's readers to their end */
    for (int e = 0; e < graph->edges; e++) {
        fill[graph->from[e] + 1]++;
        r->missing[graph->to[e]]++;
    }
    for (int k = 1; k <= graph->count; k++)
        fill[k] += fill[k - 1];
    for (int e = 0; e < graph->edges; e++)
        r->reader[fill[graph->from[e]]++] = graph->to[e];
    return TP_OK;
}

/* Every node left over waits for one that is left over: go back along such sources until one comes again. */
static int
write_cycle(const tp_graph *graph, const room *r, int32_t *order)
{
    int32_t *source = r->queue, at = 0, length = 0;
    for (int k = 0; k < graph->count; k++)
        source[k] = -1;
    for (int e = 0; e < graph->edges; e++)
        if (r->missing[graph->from[e]] > 0 && r->missing[graph->to[e]] > 0 && source[graph->to[e]] < 0)
            source[graph->to[e]] = graph->from[e];
    while (r->missing[at] == 0)
        at++;
    for (int k = 0; k < graph->count; k++) /* after count steps back it is on a cycle */
        at = source[at];
    for (int32_t k = at; length == 0 || k != at; k = source[k])
        order[length++] = k;
    for (int32_t k = 0; k < length / 2; k++) { /* sources came first to last: turn them */
        int32_t other = order[length - 1 - k];
        order[length - 1 - k] = order[k];
        order[k] = other;
    }
    return length;
}

static int
by_place(const void *a, const void *b)
{
    const place *p = a, *q = b;
    if (p->depth != q->depth)
        return p->depth < q->depth ? -1 : 1;
    if (p->start_s != q->start_s)
        return p->start_s < q->start_s ? -1 : 1;
    return p->node < q->node ? -1 : 1;
}

static int
by_node(const void *a, const void *b)
{
    return ((const place *)a)->node < ((const place *)b)->node ? -1 : 1;
}

/* Starts that differ by no more than rounding are one: else the unit of time would decide the order, and so would a factor on all
 * times, with which a chain that is saved would be read back in another order. */
static void
settle_ties(place *places, int count)
{
    for (int k = 0, end; k < count; k = end) {
        for (end = k + 1; end < count && places[end].depth == places[k].depth &&
                          places[end].start_s - places[end - 1].start_s <= 1e-12 * places[end].start_s;
             end++)
            continue;
        qsort(places + k, (size_t)(end - k), sizeof *places, by_node);
    }
}

tp_status
tp_graph_order(const tp_graph *graph, const double *forward_s, int32_t *order, int *cycle)
{
    room r;
    int done = 0, queued = 0;
    *cycle = 0;
    TP_TRY(check_edges(graph));
    place *places = malloc((size_t)graph->count * sizeof *places);
    if (places == NULL)
        return tp_fail(TP_EMEMORY, "no memory for a graph of %d nodes", graph->count);
    tp_status status = open_room(graph, &r);
    if (status != TP_OK) {
        free(places);
        return status;
    }
    for (int k = 0; k < graph->count; k++)
        if (r.missing[k] == 0)
            r.queue[queued++] = k;
    for (; done < queued; done++) {
        int k = r.queue[done];
        double end = r.start_s[k] + forward_s[k];
        places[done] = (place){r.depth[k], k, r.start_s[k]};
        for (int32_t e = r.begin[k]; e < r.begin[k + 1]; e++) {
            int to = r.reader[e];
            r.depth[to] = r.depth[to] > r.depth[k] + 1 ? r.depth[to] : r.depth[k] + 1;
            r.start_s[to] = fmax(r.start_s[to], end);
            if (--r.missing[to] == 0)
                r.queue[queued++] = to;
        }
    }
    if (done < graph->count)
        *cycle = write_cycle(graph, &r, order);
    else {
        qsort(places, (size_t)graph->count, sizeof *places, by_place);
        settle_ties(places, graph->count);
        for (int k = 0; k < graph->count; k++)
            order[k] = places[k].node;
    }
    close_room(&r);
    free(places);
    return TP_OK;
}

tp_status
tp_graph_cuts(const tp_graph *graph, double *cut_bytes, double *cut_tensors)
{
    size_t n = (size_t)graph->count;
    TP_TRY(check_edges(graph));
    for (int e = 0; e < graph->edges; e++)
        if (graph->from[e] >= graph->to[e])
            return tp_fail(TP_EVALUE, "edge %d goes back, from node %d to node %d", e, graph->from[e], graph->to[e]);
    double *bytes = calloc(n, sizeof *bytes);
    int32_t *last = calloc(n, sizeof *last);
    if (bytes == NULL || last == NULL) {
        free(bytes);
        free(last);
        return tp_fail(TP_EMEMORY, "no memory for a graph of %d nodes", graph->count);
    }
    for (int e = 0; e < graph->edges; e++) {
        bytes[graph->from[e]] = fmax(bytes[graph->from[e]], graph->bytes[e]);
        if (last[graph->from[e]] < graph->to[e])
            last[graph->from[e]] = graph->to[e];
    }
    memset(cut_bytes, 0, n * sizeof *cut_bytes);
    memset(cut_tensors, 0, n * sizeof *cut_tensors);
    for (int k = 0; k < graph->count; k++)
        for (int p = k; p < last[k]; p++) { /* tensors are short-lived: the sum of their lives, not n^2 */
            cut_bytes[p] += bytes[k];
            cut_tensors[p] += 1.0;
        }
    free(bytes);
    free(last);
    return TP_OK;
}
