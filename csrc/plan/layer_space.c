/* Downsets of a layer graph, the stages between them, and the choice of variants within a stage. */
#include "csrc/plan/layer_space.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

enum { MOST_DOWNSETS = 20000, TABLE_BITS = 16 };

static int
has(const uint64_t *set, int v)
{
    return (int)(set[v >> 6] >> (v & 63) & 1);
}

static tp_status
check_value(double value, const char *what, int index, int node)
{
    if (value >= 0.0 && value <= 1e300)
        return TP_OK;
    return tp_fail(TP_EVALUE, "%s of variant %d (node %d) is %g: a value of 0 to 1e300 is needed", what, index, node, value);
}

static tp_status
check_variants(const tp_layer_graph *g)
{
    for (int v = 0; v < g->variants; v++) {
        if (g->node[v] < 0 || g->node[v] >= g->nodes)
            return tp_fail(TP_EVALUE, "variant %d is of node %d: nodes are 0 to %d", v, g->node[v], g->nodes - 1);
        if (g->degree[v] < 1)
            return tp_fail(TP_EVALUE, "variant %d (node %d) is for %d devices: at least 1 is needed", v, g->node[v],
                           g->degree[v]);
        if (v > 0 && (g->node[v] < g->node[v - 1] ||
                      (g->node[v] == g->node[v - 1] && g->degree[v] < g->degree[v - 1])))
            return tp_fail(TP_EVALUE, "variant %d is out of order: ascending node and degree are needed", v);
        TP_TRY(check_value(g->time_s[v], "time", v, g->node[v]));
        TP_TRY(check_value(g->param_bytes[v], "parameter size", v, g->node[v]));
        TP_TRY(check_value(g->memory_a[v], "memory a", v, g->node[v]));
        TP_TRY(check_value(g->memory_b[v], "memory b", v, g->node[v]));
    }
    int at = 0;
    for (int n = 0; n < g->nodes; n++) {
        if (at == g->variants || g->node[at] != n)
            return tp_fail(TP_EVALUE, "node %d has no variant: at least one is needed", n);
        while (at < g->variants && g->node[at] == n)
            at++;
    }
    return TP_OK;
}

static tp_status
check_edges(const tp_layer_graph *g)
{
    int *degree = calloc(2 * (size_t)g->nodes, sizeof *degree), found = 0, *queue = degree + g->nodes;
    if (degree == NULL)
        return tp_fail(TP_EMEMORY, "no memory to check %d nodes", g->nodes);
    tp_status status = TP_OK;
    for (int e = 0; e < g->edges && status == TP_OK; e++) {
        if (g->from[e] < 0 || g->from[e] >= g->nodes || g->to[e] < 0 || g->to[e] >= g->nodes)
            status = tp_fail(TP_EVALUE, "edge %d goes from node %d to node %d: nodes are 0 to %d", e, g->from[e], g->to[e],
                             g->nodes - 1);
        else if (!(g->edge_bytes[e] >= 0.0 && g->edge_bytes[e] <= 1e300))
            status = tp_fail(TP_EVALUE, "edge %d (node %d to node %d) has %g bytes: a size of 0 to 1e300 is needed", e,
                             g->from[e], g->to[e], g->edge_bytes[e]);
        else
            degree[g->to[e]]++;
    }
    for (int v = 0; v < g->nodes && status == TP_OK; v++)
        if (degree[v] == 0)
            queue[found++] = v;
    for (int at = 0; at < found && status == TP_OK; at++)
        for (int e = 0; e < g->edges; e++)
            if (g->from[e] == queue[at] && --degree[g->to[e]] == 0)
                queue[found++] = g->to[e];
    for (int v = 0; v < g->nodes && status == TP_OK && found < g->nodes; v++)
        if (degree[v] > 0)
            status = tp_fail(TP_EVALUE, "the graph has a cycle: node %d is on one or behind one", v);
    free(degree);
    return status;
}

tp_status
tp_layer_graph_check(const tp_layer_graph *g)
{
    if (g->nodes < 1)
        return tp_fail(TP_EVALUE, "the graph has no node: at least one is needed");
    if (g->devices < 1 || g->devices > 10000)
        return tp_fail(TP_EVALUE, "devices is %d: 1 to 10000 are possible", g->devices);
    if (g->micro_batches < 1)
        return tp_fail(TP_EVALUE, "micro_batches is %d: at least 1 is needed", g->micro_batches);
    if (!(g->memory_bytes > 0.0 && g->memory_bytes <= 1e300))
        return tp_fail(TP_EVALUE, "memory_bytes is %g: more than 0, and at most 1e300, is needed", g->memory_bytes);
    if (!(g->bandwidth_Bps > 0.0))
        return tp_fail(TP_EVALUE, "bandwidth_Bps is %g: more than 0 is needed", g->bandwidth_Bps);
    TP_TRY(check_variants(g));
    return check_edges(g);
}

static tp_status
open_variants(tp_layer_space *s)
{
    const tp_layer_graph *g = s->graph;
    TP_ARENA_TAKE(s->arena, g->variants, s->degree);
    for (int v = 0; v < g->variants; v++) {
        int at = 0;
        while (at < s->degrees && s->degree[at] < g->degree[v])
            at++;
        if (at < s->degrees && s->degree[at] == g->degree[v])
            continue;
        memmove(s->degree + at + 1, s->degree + at, (size_t)(s->degrees - at) * sizeof *s->degree);
        s->degree[at] = g->degree[v];
        s->degrees++;
    }
    while (s->degrees > 0 && s->degree[s->degrees - 1] > g->devices)
        s->degrees--; /* no stage can use them */
    if (s->degrees > 32)
        return tp_fail(TP_EVALUE, "%d tensor degrees: at most 32 are possible", s->degrees);
    TP_ARENA_TAKE(s->arena, (int64_t)g->nodes * s->degrees, s->begin);
    TP_ARENA_TAKE(s->arena, (int64_t)g->nodes * s->degrees, s->end);
    int at = 0;
    for (int n = 0; n < g->nodes; n++) {
        for (int t = 0; t < s->degrees; t++) {
            s->begin[n * s->degrees + t] = at;
            while (at < g->variants && g->node[at] == n && g->degree[at] == s->degree[t])
                at++;
            s->end[n * s->degrees + t] = at;
        }
        while (at < g->variants && g->node[at] == n)
            at++;
    }
    return TP_OK;
}

static tp_status
open_edges(tp_layer_space *s)
{
    const tp_layer_graph *g = s->graph;
    TP_ARENA_TAKE(s->arena, g->nodes, s->edge_begin);
    TP_ARENA_TAKE(s->arena, 2 * (int64_t)g->edges, s->edge_of);
    TP_ARENA_TAKE(s->arena, g->variants, s->sync);
    int at = 0;
    for (int n = 0; n < g->nodes; n++) {
        s->edge_begin[n] = at;
        for (int e = 0; e < g->edges; e++)
            if (g->from[e] == n || g->to[e] == n)
                s->edge_of[at++] = e;
    }
    s->edge_begin[g->nodes] = at;
    int64_t sync = 0;
    for (int v = 0; v < g->variants; v++) {
        s->sync[v] = sync;
        sync += s->edge_begin[g->node[v] + 1] - s->edge_begin[g->node[v]];
    }
    return TP_OK;
}

/* May v join the downset: are all its successors in it? */
static int
may_join(const tp_layer_space *s, const uint64_t *set, int v)
{
    if (has(set, v))
        return 0;
    for (int at = s->edge_begin[v]; at < s->edge_begin[v + 1]; at++) {
        int e = s->edge_of[at];
        if (s->graph->from[e] == v && !has(set, s->graph->to[e]))
            return 0;
    }
    return 1;
}

/* The cell of the table where a downset is, or would be. */
static int
cell_of(const tp_layer_space *s, const int *table, const uint64_t *set)
{
    uint64_t hash = 0;
    for (int w = 0; w < s->words; w++)
        hash = (hash ^ set[w]) * 0x9E3779B97F4A7C15u;
    int cell = (int)(hash >> (64 - TABLE_BITS));
    while (table[cell] != 0 &&
           memcmp(s->set + (int64_t)table[cell] * s->words, set, (size_t)s->words * sizeof *set) != 0)
        cell = (cell + 1) & ((1 << TABLE_BITS) - 1);
    return cell;
}

/* Level by level, so that they come by size. table: [1 << TABLE_BITS] zeros. */
static tp_status
grow_downsets(tp_layer_space *s, int *table)
{
    s->count = 1;
    int level = 0, next = 1;
    int64_t steps = 0;
    for (int size = 0; size < s->graph->nodes; size++) {
        for (int i = level; i < next; i++)
            for (int v = 0; v < s->graph->nodes; v++) {
                TP_TRY(tp_deadline_check_after(&steps, 8 * (s->edge_begin[v + 1] - s->edge_begin[v] + 1)));
                if (!may_join(s, s->set + (int64_t)i * s->words, v))
                    continue;
                uint64_t *made = s->set + (int64_t)s->count * s->words;
                memcpy(made, s->set + (int64_t)i * s->words, (size_t)s->words * sizeof *made);
                made[v >> 6] |= (uint64_t)1 << (v & 63);
                int cell = cell_of(s, table, made);
                if (table[cell] != 0)
                    continue;
                table[cell] = s->count;
                s->smaller[s->count] = i;
                s->added[s->count] = v;
                if (++s->count > MOST_DOWNSETS)
                    return tp_fail(TP_EVALUE, "the graph has more than %d downsets: it branches too much to plan; merge nodes",
                                   MOST_DOWNSETS);
            }
        level = next;
        next = s->count;
    }
    return TP_OK;
}

tp_status
tp_layer_space_open(const tp_layer_graph *graph, tp_arena *arena, tp_layer_space *s)
{
    *s = (tp_layer_space){.graph = graph, .arena = arena, .words = (graph->nodes + 63) / 64};
    s->reach = graph->devices < graph->micro_batches ? graph->devices : graph->micro_batches;
    TP_TRY(open_variants(s));
    TP_TRY(open_edges(s));
    TP_ARENA_TAKE(arena, s->reach, s->replica);
    for (int d = 1; d <= s->reach; d++)
        if (graph->micro_batches % d == 0)
            s->replica[s->replicas++] = d;
    TP_ARENA_TAKE(arena, (int64_t)(MOST_DOWNSETS + 1) * s->words, s->set);
    TP_ARENA_TAKE(arena, MOST_DOWNSETS + 1, s->smaller);
    TP_ARENA_TAKE(arena, MOST_DOWNSETS + 1, s->added);
    int *table = NULL;
    TP_ARENA_TAKE(arena, 1 << TABLE_BITS, table);
    return grow_downsets(s, table);
}

tp_status
tp_layer_pair_open(const tp_layer_space *s, tp_layer_pair *pair)
{
    TP_ARENA_TAKE(s->arena, s->graph->nodes, pair->node);
    TP_ARENA_TAKE(s->arena, s->graph->variants, pair->crossing);
    return TP_OK;
}

tp_status
tp_layer_pack_open(const tp_layer_space *s, tp_layer_pack *pack)
{
    pack->memory_bytes = s->graph->memory_bytes;
    TP_ARENA_TAKE(s->arena, s->graph->nodes, pack->begin);
    TP_ARENA_TAKE(s->arena, s->graph->nodes, pack->choice);
    TP_ARENA_TAKE(s->arena, s->graph->nodes, pack->fastest);
    TP_ARENA_TAKE(s->arena, s->graph->variants, pack->variant);
    TP_ARENA_TAKE(s->arena, s->graph->variants, pack->time);
    TP_ARENA_TAKE(s->arena, s->graph->variants, pack->a);
    TP_ARENA_TAKE(s->arena, s->graph->variants, pack->b);
    TP_ARENA_TAKE(s->arena, s->graph->variants, pack->ratio);
    TP_ARENA_TAKE(s->arena, 2 * (int64_t)s->graph->variants, pack->exchange);
    return TP_OK;
}

int
tp_layer_within(const tp_layer_space *s, int j, int i)
{
    const uint64_t *a = s->set + (int64_t)j * s->words, *b = s->set + (int64_t)i * s->words;
    for (int w = 0; w < s->words; w++)
        if (a[w] & ~b[w])
            return 0;
    return i != j;
}

/* The first node from n on that is in one set and not in the other; past the last one where there is none. */
static int
next_of(const tp_layer_space *s, const uint64_t *all, const uint64_t *later, int n)
{
    while (n < s->graph->nodes) {
        uint64_t left = (all[n >> 6] & ~later[n >> 6]) >> (n & 63);
        if (left & 1)
            return n;
        n = left == 0 ? (n | 63) + 1 : n + 1;
    }
    return n;
}

void
tp_layer_pair_fill(const tp_layer_space *s, int i, int j, tp_layer_pair *pair)
{
    const tp_layer_graph *g = s->graph;
    const uint64_t *all = s->set + (int64_t)i * s->words, *later = s->set + (int64_t)j * s->words;
    pair->nodes = 0;
    pair->degrees = s->degrees < 32 ? (1u << s->degrees) - 1u : ~0u;
    for (int n = next_of(s, all, later, 0); n < g->nodes; n = next_of(s, all, later, n + 1)) {
        pair->node[pair->nodes++] = n;
        for (int t = 0; t < s->degrees; t++) {
            int end = s->end[n * s->degrees + t];
            if (end == s->begin[n * s->degrees + t])
                pair->degrees &= ~(1u << t);
            for (int v = s->begin[n * s->degrees + t]; v < end; v++)
                pair->crossing[v] = 0.0;
            for (int at = s->edge_begin[n]; at < s->edge_begin[n + 1]; at++) {
                int e = s->edge_of[at], other = g->from[e] == n ? g->to[e] : g->from[e];
                if (has(all, other) && !has(later, other))
                    continue;
                for (int v = s->begin[n * s->degrees + t]; v < end; v++)
                    pair->crossing[v] += 2.0 * (g->edge_bytes[e] + g->sync_bytes[s->sync[v] + at - s->edge_begin[n]]);
            }
        }
    }
}

static double
seconds_of(const tp_layer_space *s, double crossing, int v, int d)
{
    const tp_layer_graph *g = s->graph;
    double resync = 4.0 * (d - 1) * g->param_bytes[v] / d / g->micro_batches;
    return (crossing / d + resync) / g->bandwidth_Bps + g->time_s[v] / d;
}

static double
weigh(const tp_layer_space *s, double seconds)
{
    return s->tick_s > 0.0 ? rint(seconds / s->tick_s) : seconds;
}

double
tp_layer_time(const tp_layer_space *s, int v, double crossing, int d)
{
    return weigh(s, seconds_of(s, crossing, v, d));
}

void
tp_layer_pack_fill(const tp_layer_space *s, const tp_layer_pair *pair, int t, int d, tp_layer_pack *pack)
{
    const tp_layer_graph *g = s->graph;
    int at = 0;
    pack->nodes = pair->nodes;
    for (int n = 0; n < pair->nodes; n++) {
        int end = s->end[pair->node[n] * s->degrees + t];
        pack->begin[n] = at;
        for (int v = s->begin[pair->node[n] * s->degrees + t]; v < end; v++, at++) {
            pack->variant[at] = v;
            pack->time[at] = tp_layer_time(s, v, pair->crossing[v], d);
            pack->a[at] = g->memory_a[v];
            pack->b[at] = g->memory_b[v];
        }
    }
    pack->begin[pair->nodes] = at;
}

tp_status
tp_layer_plan_open(const tp_layer_space *s, tp_layer_plan *plan)
{
    size_t nodes = (size_t)s->graph->nodes;
    plan->stage = calloc(nodes, sizeof *plan->stage);
    plan->stage_of = calloc(nodes, sizeof *plan->stage_of);
    plan->variant = calloc(nodes, sizeof *plan->variant);
    if (plan->stage == NULL || plan->stage_of == NULL || plan->variant == NULL)
        return tp_fail(TP_EMEMORY, "no memory for a plan of %zu nodes", nodes);
    plan->downsets = s->count;
    return TP_OK;
}

void
tp_layer_plan_put(const tp_layer_space *s, const tp_layer_pair *pair, const tp_layer_pack *pack, int t, int d,
                  tp_layer_plan *plan)
{
    tp_layer_stage *stage = &plan->stage[plan->stages];
    *stage = (tp_layer_stage){.data = d, .tensor = s->degree[t]};
    for (int n = 0; n < pair->nodes; n++) {
        int l = pack->choice[n];
        plan->stage_of[pair->node[n]] = plan->stages;
        plan->variant[pair->node[n]] = pack->variant[l];
        stage->time_s += seconds_of(s, pair->crossing[pack->variant[l]], pack->variant[l], d);
    }
    plan->time_per_sample_s = fmax(plan->time_per_sample_s, stage->time_s);
    plan->stages++;
}

void
tp_layer_plan_finish(const tp_layer_space *s, tp_layer_plan *plan)
{
    const tp_layer_graph *g = s->graph;
    int replicas = 0;
    for (int k = plan->stages - 1; k >= 0; k--) {
        tp_layer_stage *stage = &plan->stage[k];
        replicas += stage->data;
        int y = (replicas + stage->data - 1) / stage->data;
        stage->memory_bytes = 0.0;
        for (int n = 0; n < g->nodes; n++)
            if (plan->stage_of[n] == k)
                stage->memory_bytes += g->memory_a[plan->variant[n]] * y + g->memory_b[plan->variant[n]];
    }
}

void
tp_layer_plan_free(tp_layer_plan *plan)
{
    free(plan->stage);
    free(plan->stage_of);
    free(plan->variant);
    plan->stage = NULL;
    plan->stage_of = plan->variant = NULL;
}
