/* Sums over a stage's nodes as a difference of sums over two downsets, i less j; except for messages, which only nodes at its rim
 * have. */
#include "csrc/plan/layer_sums.h"

#include <float.h>
#include <math.h>

#include "csrc/base/deadline.h"

static void
add_node(const tp_layer_space *s, const tp_layer_sums *sums, int i)
{
    const tp_layer_graph *g = s->graph;
    int n = s->added[i], smaller = s->smaller[i];
    for (int t = 0; t < s->degrees; t++) {
        int begin = s->begin[n * s->degrees + t], end = s->end[n * s->degrees + t];
        int *lacking = sums->lacking + (int64_t)t * s->count;
        lacking[i] = lacking[smaller] + (begin == end);
        for (int r = 0; r < s->replicas; r++) {
            const double *alone_s = sums->alone_s + (int64_t)r * g->variants;
            int64_t to = tp_layer_sums_at(s, i, t, r), from = tp_layer_sums_at(s, smaller, t, r);
            int v = tp_layer_fastest_of(alone_s, begin, end), there = begin < end;
            sums->time_s[to] = sums->time_s[from] + (there ? alone_s[v] : 0.0);
            sums->a[to] = sums->a[from] + (there ? g->memory_a[v] : 0.0);
            sums->b[to] = sums->b[from] + (there ? g->memory_b[v] : 0.0);
        }
    }
}

static void
mark_rim(const tp_layer_space *s, const tp_layer_sums *sums, int i)
{
    const tp_layer_graph *g = s->graph;
    const uint64_t *set = s->set + (int64_t)i * s->words;
    for (int e = 0; e < g->edges; e++) {
        int from = g->from[e], to = g->to[e];
        if ((set[to >> 6] >> (to & 63) & 1) && !(set[from >> 6] >> (from & 63) & 1)) {
            sums->fed[(int64_t)i * s->words + (to >> 6)] |= (uint64_t)1 << (to & 63);
            sums->feeding[(int64_t)i * s->words + (from >> 6)] |= (uint64_t)1 << (from & 63);
        }
    }
}

static int
more_is_faster(const tp_layer_space *s, const tp_layer_sums *sums, int t)
{
    const tp_layer_graph *g = s->graph;
    for (int r = 1; r < s->replicas; r++)
        for (int v = 0; v < g->variants; v++)
            if (g->degree[v] == s->degree[t] && !(sums->alone_s[(int64_t)r * g->variants + v] <=
                                                  sums->alone_s[(int64_t)(r - 1) * g->variants + v]))
                return 0;
    return 1;
}

tp_status
tp_layer_sums_open(const tp_layer_space *s, tp_layer_sums *sums, int64_t *asked)
{
    int variants = s->graph->variants;
    sums->slack = 4.0 * (s->graph->nodes + 16) * DBL_EPSILON;
    TP_ARENA_TAKE(s->arena, (int64_t)s->replicas * variants, sums->alone_s);
    TP_ARENA_TAKE(s->arena, (int64_t)s->degrees * s->replicas * s->count, sums->time_s);
    TP_ARENA_TAKE(s->arena, (int64_t)s->degrees * s->replicas * s->count, sums->a);
    TP_ARENA_TAKE(s->arena, (int64_t)s->degrees * s->replicas * s->count, sums->b);
    TP_ARENA_TAKE(s->arena, (int64_t)s->degrees * s->count, sums->lacking);
    TP_ARENA_TAKE(s->arena, (int64_t)s->count * s->words, sums->fed);
    TP_ARENA_TAKE(s->arena, (int64_t)s->count * s->words, sums->feeding);
    TP_ARENA_TAKE(s->arena, s->degrees, sums->faster);
    TP_ARENA_TAKE(s->arena, s->graph->nodes, sums->rim);
    TP_ARENA_TAKE(s->arena, variants, sums->rim_s);
    for (int r = 0; r < s->replicas; r++) {
        TP_TRY(tp_deadline_check_after(asked, 8 * (int64_t)variants));
        for (int v = 0; v < variants; v++)
            sums->alone_s[(int64_t)r * variants + v] = tp_layer_time(s, v, 0.0, s->replica[r]);
    }
    for (int t = 0; t < s->degrees; t++)
        sums->faster[t] = more_is_faster(s, sums, t);
    for (int i = 1; i < s->count; i++) {
        TP_TRY(tp_deadline_check_after(asked, 8 * ((int64_t)s->degrees * s->replicas + s->graph->edges)));
        add_node(s, sums, i);
        mark_rim(s, sums, i);
    }
    return TP_OK;
}

/* Seconds that each variant of node n takes in stage i \ j. */
static void
weigh_node(const tp_layer_space *s, int i, int j, int n, int t, int d, double *time_s)
{
    const tp_layer_graph *g = s->graph;
    const uint64_t *all = s->set + (int64_t)i * s->words, *later = s->set + (int64_t)j * s->words;
    int begin = s->begin[n * s->degrees + t], end = s->end[n * s->degrees + t];
    for (int v = begin; v < end; v++)
        time_s[v] = 0.0; /* bytes, so far */
    for (int at = s->edge_begin[n]; at < s->edge_begin[n + 1]; at++) {
        int e = s->edge_of[at], other = g->from[e] == n ? g->to[e] : g->from[e];
        if ((all[other >> 6] & ~later[other >> 6]) >> (other & 63) & 1)
            continue;
        for (int v = begin; v < end; v++)
            time_s[v] += 2.0 * (g->edge_bytes[e] + g->sync_bytes[s->sync[v] + at - s->edge_begin[n]]);
    }
    for (int v = begin; v < end; v++)
        time_s[v] = tp_layer_time(s, v, time_s[v], d);
}

int
tp_layer_sums_rim(const tp_layer_space *s, const tp_layer_sums *sums, int i, int j, int t, int r, int *node, double *time_s)
{
    int count = 0;
    for (int w = 0; w < s->words; w++) {
        int64_t at_i = (int64_t)i * s->words + w, at_j = (int64_t)j * s->words + w;
        uint64_t rim = s->set[at_i] & ~s->set[at_j] & (sums->fed[at_i] | sums->feeding[at_j]);
        for (; rim != 0; rim &= rim - 1) {
            node[count] = 64 * w + __builtin_ctzll(rim);
            weigh_node(s, i, j, node[count++], t, s->replica[r], time_s);
        }
    }
    return count;
}

void
tp_layer_sums_fastest(const tp_layer_space *s, const tp_layer_sums *sums, int i, int j, int t, int r, tp_layer_sum *sum,
                      tp_layer_sum *margin)
{
    const tp_layer_graph *g = s->graph;
    int64_t all = tp_layer_sums_at(s, i, t, r), later = tp_layer_sums_at(s, j, t, r);
    const double *alone_s = sums->alone_s + (int64_t)r * g->variants;
    int rim = tp_layer_sums_rim(s, sums, i, j, t, r, sums->rim, sums->rim_s);
    *sum = (tp_layer_sum){sums->time_s[all] - sums->time_s[later], sums->a[all] - sums->a[later], sums->b[all] - sums->b[later]};
    for (int at = 0; at < rim; at++) {
        int n = sums->rim[at], begin = s->begin[n * s->degrees + t], end = s->end[n * s->degrees + t];
        int alone = tp_layer_fastest_of(alone_s, begin, end), here = tp_layer_fastest_of(sums->rim_s, begin, end);
        sum->time_s += sums->rim_s[here] - alone_s[alone];
        sum->a += g->memory_a[here] - g->memory_a[alone];
        sum->b += g->memory_b[here] - g->memory_b[alone];
    }
    /* a node's variant at the rim may need less than the one alone, so that both sums count */
    *margin = (tp_layer_sum){sums->slack * (sums->time_s[all] + sum->time_s), sums->slack * (2.0 * sums->a[all] + sum->a),
                             sums->slack * (2.0 * sums->b[all] + sum->b)};
}
