/* Finds stages that are alike, so that what is known of one holds for the other: their nodes, one by one in order, have the same
 * variants, and edges to both sides that send the same. Only for chains: there nothing else enters a planner's sums, so it adds
 * the same numbers in the same order for both. */
#include "csrc/plan/layer_alike.h"

#include <math.h>
#include <string.h>

#include "csrc/base/deadline.h"

enum { NODES = 1024, AT_ONCE = 1 << 16 }; /* AT_ONCE: doubles to take from the arena at a time, at least */

/* Is the graph a chain: each node n has one edge from n - 1 and one to n + 1, and every downset is a suffix? */
static int
is_chain(const tp_layer_space *s)
{
    const tp_layer_graph *g = s->graph;
    if (g->nodes > NODES || s->count != g->nodes + 1 || g->edges != g->nodes - 1)
        return 0;
    for (int e = 0; e < g->edges; e++)
        if (g->to[e] != g->from[e] + 1)
            return 0;
    for (int n = 0; n < g->nodes; n++)
        if (s->edge_begin[n + 1] - s->edge_begin[n] != (n > 0) + (n + 1 < g->nodes))
            return 0;
    return 1;
}

/* What variant v of node n sends to and gets from the node on either side; -1: there is no such node. */
static void
sides(const tp_layer_space *s, int n, int v, double side[4])
{
    const tp_layer_graph *g = s->graph;
    for (int k = 0; k < 4; k++)
        side[k] = -1.0;
    for (int at = s->edge_begin[n]; at < s->edge_begin[n + 1]; at++) {
        int e = s->edge_of[at], to = g->from[e] == n;
        side[2 * to] = g->edge_bytes[e];
        side[2 * to + 1] = g->sync_bytes[s->sync[v] + at - s->edge_begin[n]];
    }
}

static int
variants_of(const tp_layer_graph *g, int n, int begin)
{
    int end = begin;
    while (end < g->variants && g->node[end] == n)
        end++;
    return end - begin;
}

/* begin: [nodes] each node's first variant. */
static int
nodes_are_alike(const tp_layer_space *s, const int *begin, int a, int b)
{
    const tp_layer_graph *g = s->graph;
    int count = variants_of(g, a, begin[a]);
    if (variants_of(g, b, begin[b]) != count)
        return 0;
    for (int k = 0; k < count; k++) {
        int v = begin[a] + k, w = begin[b] + k;
        double one[8] = {g->time_s[v], g->param_bytes[v], g->memory_a[v], g->memory_b[v]};
        double other[8] = {g->time_s[w], g->param_bytes[w], g->memory_a[w], g->memory_b[w]};
        sides(s, a, v, one + 4);
        sides(s, b, w, other + 4);
        if (g->degree[v] != g->degree[w] || memcmp(one, other, sizeof one) != 0)
            return 0;
    }
    return 1;
}

/* The kind of each node is the number of the first node that is like it. */
static tp_status
find_kinds(const tp_layer_space *s, int *kind, int64_t *asked)
{
    const tp_layer_graph *g = s->graph;
    int *begin = NULL, *seen = NULL, kinds = 0;
    TP_ARENA_TAKE(s->arena, g->nodes, begin);
    TP_ARENA_TAKE(s->arena, g->nodes, seen);
    for (int v = g->variants - 1; v >= 0; v--)
        begin[g->node[v]] = v;
    for (int n = 0; n < g->nodes; n++) {
        int k = 0;
        TP_TRY(tp_deadline_check_after(asked, 16 * (int64_t)kinds));
        while (k < kinds && !nodes_are_alike(s, begin, seen[k], n))
            k++;
        if (k == kinds)
            seen[kinds++] = n;
        kind[n] = seen[k];
    }
    return TP_OK;
}

tp_status
tp_layer_alike_open(const tp_layer_space *s, int values, int64_t most, tp_layer_alike *alike)
{
    int n = s->graph->nodes, *kind = NULL, *same = NULL;
    int64_t asked = 0;
    *alike = (tp_layer_alike){.values = values, .most = most};
    if (!is_chain(s))
        return TP_OK;
    alike->nodes = n;
    TP_ARENA_TAKE(s->arena, n, kind);
    TP_ARENA_TAKE(s->arena, (n + 1) * (n + 1), same); /* of how many nodes stages from a and from b are alike */
    TP_ARENA_TAKE(s->arena, n * n, alike->first);
    TP_ARENA_TAKE(s->arena, n * n, alike->times);
    TP_TRY(find_kinds(s, kind, &asked));
    for (int a = n - 1; a >= 0; a--) {
        TP_TRY(tp_deadline_check_after(&asked, n));
        for (int b = n - 1; b >= 0; b--)
            same[a * (n + 1) + b] = kind[a] == kind[b] ? same[(a + 1) * (n + 1) + b + 1] + 1 : 0;
    }
    for (int begin = 0; begin < n; begin++) {
        TP_TRY(tp_deadline_check_after(&asked, 2 * n));
        for (int length = 1, first = 0; begin + length <= n; length++) {
            while (same[first * (n + 1) + begin] < length)
                first++;
            alike->first[begin * n + length - 1] = first;
        }
    }
    return TP_OK;
}

tp_status
tp_layer_alike_of(const tp_layer_space *s, tp_layer_alike *alike, int i, int j, double **values)
{
    int n = alike->nodes, begin = n - i, length = i - j;
    *values = NULL;
    if (n == 0)
        return TP_OK;
    double **times = &alike->times[alike->first[begin * n + length - 1] * n + length - 1];
    if (*times == NULL) {
        if (alike->left < alike->values) {
            int64_t room = alike->values > AT_ONCE ? alike->values : AT_ONCE;
            if (alike->most < room)
                return TP_OK;
            TP_ARENA_TAKE(s->arena, room, alike->room);
            alike->most -= room;
            alike->left = room;
        }
        *times = alike->room;
        alike->room += alike->values;
        alike->left -= alike->values;
        for (int k = 0; k < alike->values; k++)
            (*times)[k] = NAN;
    }
    *values = *times;
    return TP_OK;
}
