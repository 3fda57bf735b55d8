/* Why has a layer graph no plan? The least memory_bytes in which one would fit, or too few devices or micro-batches.
 *
 * As in layer_exact.c earlier stages depend on those of a downset only by (s, k), the replicas and devices of these: only
 * Pareto-minimal ones matter, and for one of them and a tensor degree only the least d with which a stage fits. So one pass decides
 * whether a limit of memory is enough. If it is, the limit is lowered to what the plan found needs, and so on until a limit just
 * below that is not enough. */
#include "csrc/plan/layer_space.h"

#include <math.h>

#include "csrc/base/deadline.h"

enum { CELLS = 4000000, DOWNSETS = 2000 }; /* for larger graphs the error names a limit that is enough, not the least */

typedef struct {
    int32_t s, k;    /* replicas and devices of this downset's stages */
    int32_t j, from; /* the rest: entry `from` of downset j */
    int32_t t, d;
} entry;

typedef struct {
    const tp_layer_space *space;
    tp_layer_pair *pair;
    tp_layer_pack *pack;
    int devices, reach;
    double *least; /* [count][degrees][space->reach + 1]: least bytes of a downset's nodes at y micro-batches a replica */
    double *node;  /* [nodes][degrees][space->reach + 1]: of each node */
    int *lacking;  /* [count][degrees] its nodes without a variant of the degree */
    entry *front;  /* [count][reach + 1] by s ascending, k descending */
    int *fronts;   /* [count] */
    entry *at;     /* [reach + 1] scratch */
    int64_t asked;
} space_search;

/* The stage that needs most bytes in the plan that a pass found. */
typedef struct {
    double bytes;
    int stage, stages, nodes, data, tensor;
    int is_endless; /* a stage of it takes more seconds than there are numbers for */
} fullest;

/* Least bytes of a node by degree and micro-batches; a degree that it lacks has INFINITY at 0. */
static void
weigh_node(const tp_layer_space *s, int n, double *rows)
{
    const tp_layer_graph *g = s->graph;
    for (int t = 0; t < s->degrees; t++) {
        double *row = rows + (int64_t)t * (s->reach + 1);
        int begin = s->begin[n * s->degrees + t], end = begin;
        while (end < g->variants && g->node[end] == n && g->degree[end] == s->degree[t])
            end++;
        row[0] = end > begin ? 0.0 : INFINITY;
        for (int y = 1; y <= s->reach && end > begin; y++) {
            double least = INFINITY;
            for (int v = begin; v < end; v++)
                least = fmin(least, g->memory_a[v] * y + g->memory_b[v]);
            row[y] = least;
        }
    }
}

static tp_status
sum_bytes(space_search *x)
{
    const tp_layer_space *s = x->space;
    int64_t rows = (int64_t)s->degrees * (s->reach + 1);
    TP_ARENA_TAKE(s->arena, s->graph->nodes * rows, x->node);
    for (int n = 0; n < s->graph->nodes; n++)
        weigh_node(s, n, x->node + n * rows);
    for (int i = 0; i < s->count; i++)
        for (int n = 0; n < s->graph->nodes; n++) {
            if (!(s->set[(int64_t)i * s->words + (n >> 6)] >> (n & 63) & 1))
                continue;
            TP_TRY(tp_deadline_check_after(&x->asked, rows));
            for (int t = 0; t < s->degrees; t++) {
                const double *row = x->node + n * rows + (int64_t)t * (s->reach + 1);
                double *sum = x->least + i * rows + (int64_t)t * (s->reach + 1);
                x->lacking[i * s->degrees + t] += isinf(row[0]);
                for (int y = 1; y <= s->reach && !isinf(row[0]); y++)
                    sum[y] += row[y];
            }
        }
    return TP_OK;
}

/* Least bytes of stage i \ j of degree t at y micro-batches a replica. Beside a node of later stages that has far more, such as a
 * variant that shall not be taken, the difference of sums has lost the stage's own. */
static double
bytes_of(const space_search *x, int i, int j, int t, int y)
{
    const tp_layer_space *s = x->space;
    int64_t row = s->reach + 1, rows = s->degrees * row;
    double all = x->least[i * rows + t * row + y], bytes = all - x->least[j * rows + t * row + y];
    if (bytes >= 1e-3 * all)
        return bytes;
    bytes = 0.0;
    for (int n = 0; n < s->graph->nodes; n++) {
        uint64_t in = s->set[(int64_t)i * s->words + (n >> 6)] & ~s->set[(int64_t)j * s->words + (n >> 6)];
        bytes += in >> (n & 63) & 1 ? x->node[n * rows + t * row + y] : 0.0;
    }
    return bytes;
}

/* The most micro-batches a replica at which stage i \ j of degree t fits into the limit. */
static int
most_in_flight(const space_search *x, int i, int j, int t, double limit)
{
    int low = 0, high = isinf(limit) ? x->reach : x->space->reach;
    while (low < high) {
        int y = low + (high - low + 1) / 2;
        if (isinf(limit) || bytes_of(x, i, j, t, y) <= limit)
            low = y;
        else
            high = y - 1;
    }
    return low;
}

/* Put stage i \ j before each entry of downset j, for each tensor degree with the least d with which it fits. */
static void
extend(space_search *x, int i, int j, double limit)
{
    const tp_layer_space *s = x->space;
    for (int t = 0; t < s->degrees; t++) {
        if (x->lacking[i * s->degrees + t] != x->lacking[j * s->degrees + t])
            continue;
        int most = most_in_flight(x, i, j, t, limit);
        for (int e = 0; e < x->fronts[j] && most > 0; e++) {
            const entry *rest = &x->front[(int64_t)j * (x->reach + 1) + e];
            for (int r = 0; r < s->replicas; r++) {
                int d = s->replica[r], to = rest->s + d;
                if (to > x->reach || d > (x->devices - rest->k) / s->degree[t])
                    break;
                if ((to + d - 1) / d > most)
                    continue;
                if (rest->k + d * s->degree[t] < x->at[to].k)
                    x->at[to] = (entry){to, rest->k + d * s->degree[t], j, e, t, d};
                break; /* more replicas add to both */
            }
        }
    }
}

static void
keep_front(space_search *x, int i)
{
    entry *front = x->front + (int64_t)i * (x->reach + 1);
    x->fronts[i] = 0;
    for (int to = 0; to <= x->reach; to++)
        if (x->at[to].k <= x->devices && (x->fronts[i] == 0 || x->at[to].k < front[x->fronts[i] - 1].k))
            front[x->fronts[i]++] = x->at[to];
}

/* Is there a plan within the limit? 0 too where the thread is told to stop. */
static int
pass(space_search *x, double limit)
{
    const tp_layer_space *s = x->space;
    x->front[0] = (entry){0};
    x->fronts[0] = 1;
    for (int i = 1; i < s->count; i++) {
        if (tp_deadline_told_after(&x->asked, 16 * (int64_t)i))
            return 0;
        for (int to = 0; to <= x->reach; to++)
            x->at[to].k = INT32_MAX;
        for (int j = 0; j < i; j++)
            if (x->fronts[j] > 0 && tp_layer_within(s, j, i))
                extend(x, i, j, limit);
        keep_front(x, i);
    }
    return x->fronts[s->count - 1] > 0;
}

/* The fullest stage of the plan of the last pass, its bytes summed as the planners sum them. */
static fullest
look(space_search *x)
{
    fullest most = {.bytes = -1.0};
    int i = x->space->count - 1, at = x->fronts[i] - 1, stages = 0, is_endless = 0;
    for (; i > 0; stages++) {
        const entry *e = &x->front[(int64_t)i * (x->reach + 1) + at];
        tp_layer_pair_fill(x->space, i, e->j, x->pair);
        tp_layer_pack_fill(x->space, x->pair, e->t, e->d, x->pack);
        double bytes = tp_layer_pack_least_bytes(x->pack, (e->s + e->d - 1) / e->d);
        double a = 0.0, b = 0.0;
        is_endless |= isinf(tp_layer_pack_fastest(x->pack, &a, &b));
        if (bytes > most.bytes)
            most = (fullest){bytes, stages, 0, x->pair->nodes, e->d, x->space->degree[e->t], 0};
        i = e->j;
        at = e->from;
    }
    most.stages = stages;
    most.is_endless = is_endless;
    return most;
}

/* The error where no plan exists whatever the memory: names what else is short. */
static tp_status
refuse_any(space_search *x)
{
    const tp_layer_graph *g = x->space->graph;
    for (int n = 0, v = 0; n < g->nodes; n++) {
        int least = INT32_MAX;
        for (; v < g->variants && g->node[v] == n; v++)
            least = g->degree[v] < least ? g->degree[v] : least;
        if (least > g->devices)
            return tp_fail(TP_EINFEASIBLE,
                           "no plan on %d devices: nodes[%d] has no tensor degree of at most %d devices, and of %d the least",
                           g->devices, n, g->devices, least);
    }
    x->devices = INT32_MAX - 1; /* INT32_MAX: no entry */
    if (pass(x, INFINITY)) {
        const entry *front = x->front + (int64_t)(x->space->count - 1) * (x->reach + 1);
        return tp_fail(TP_EINFEASIBLE,
                       "no plan on %d devices, whatever memory_bytes: no tensor degree of at most %d devices has a variant for "
                       "every node, and stages of several of them need %d devices",
                       g->devices, g->devices, front[x->fronts[x->space->count - 1] - 1].k);
    }
    TP_TRY(tp_deadline_check_told());
    return tp_fail(TP_EINFEASIBLE,
                   "no plan with micro_batches %d, whatever memory_bytes: no tensor degree of at most %d devices has a variant for "
                   "every node, and stages of several of them, each with a micro-batch at least, are more",
                   g->micro_batches, g->devices);
}

static tp_status
find_least(space_search *x)
{
    const tp_layer_graph *g = x->space->graph;
    double limit = g->memory_bytes, low = limit;
    if (!pass(x, INFINITY)) {
        TP_TRY(tp_deadline_check_told());
        return refuse_any(x);
    }
    fullest best = look(x);
    for (int step = 0; best.bytes > low; step++) {
        double below = nextafter(best.bytes * (1.0 - 1e-12), 0.0), middle = step % 3 ? low + 0.5 * (best.bytes - low) : below;
        if (pass(x, fmin(middle, below))) {
            fullest found = look(x);
            best = found.bytes < best.bytes ? found : best;
            if (found.bytes > below)
                break; /* what rounding hides */
        } else if (middle >= below) {
            break;
        } else {
            low = middle;
        }
    }
    TP_TRY(tp_deadline_check_told());
    if (best.bytes <= limit && best.is_endless)
        return tp_fail(TP_EINFEASIBLE,
                       "no plan on %d devices that fits memory_bytes, %.15g, takes so few seconds that there is a number for them: "
                       "bandwidth_Bps is %g, and more would be right",
                       g->devices, limit, g->bandwidth_Bps);
    if (best.bytes <= limit)
        return tp_fail(TP_EINFEASIBLE,
                       "Piper's programme found no plan on %d devices that fits memory_bytes, %.15g, though there is one, of "
                       "%.15g bytes, which planners.parallel_layers finds",
                       g->devices, limit, ceil(best.bytes));
    return tp_fail(TP_EINFEASIBLE,
                   "no plan on %d devices fits memory_bytes, %.15g: the one that needs least has %.15g bytes on each device of "
                   "stage %d of %d (%d nodes on %d x %d devices), %.15g more",
                   g->devices, limit, ceil(best.bytes), best.stage, best.stages, best.nodes, best.data, best.tensor,
                   ceil(best.bytes) - limit);
}

/* The error with the bytes of one stage of all nodes: enough, if not the least, and found at once. */
static tp_status
refuse_one_stage(const tp_layer_space *s, tp_layer_pair *pair, tp_layer_pack *pack)
{
    double best = INFINITY;
    int degree = 0;
    tp_layer_pair_fill(s, s->count - 1, 0, pair);
    for (int t = 0; t < s->degrees; t++) {
        if (!(pair->degrees >> t & 1))
            continue;
        tp_layer_pack_fill(s, pair, t, 1, pack);
        double bytes = tp_layer_pack_least_bytes(pack, 1);
        degree = bytes < best ? s->degree[t] : degree;
        best = fmin(best, bytes);
    }
    if (degree == 0)
        return tp_fail(TP_EINFEASIBLE,
                       "no plan: no tensor degree of at most %d devices has a variant for every node, and no split into stages was "
                       "found that fits memory_bytes, %.15g",
                       s->graph->devices, s->graph->memory_bytes);
    return tp_fail(TP_EINFEASIBLE,
                   "no plan on %d devices fits memory_bytes, %.15g: one stage on %d devices would fit in %.15g, %.15g more",
                   s->graph->devices, s->graph->memory_bytes, degree, ceil(best), ceil(best) - s->graph->memory_bytes);
}

/* *small 0: the graph is too large for the search. */
static tp_status
open_search(const tp_layer_space *s, tp_layer_pair *pair, tp_layer_pack *pack, space_search *x, int *small)
{
    const tp_layer_graph *g = s->graph;
    int stages = g->nodes < g->micro_batches ? g->nodes : g->micro_batches, reach = s->reach > stages ? s->reach : stages;
    int64_t cells = (int64_t)s->count * s->degrees * (reach + 1);
    *x = (space_search){.space = s, .pair = pair, .pack = pack, .devices = g->devices, .reach = reach};
    *small = cells <= CELLS && s->count <= DOWNSETS;
    if (!*small)
        return TP_OK;
    TP_ARENA_TAKE(s->arena, cells, x->least);
    TP_ARENA_TAKE(s->arena, s->count * s->degrees, x->lacking);
    TP_ARENA_TAKE(s->arena, (int64_t)s->count * (reach + 1), x->front);
    TP_ARENA_TAKE(s->arena, s->count, x->fronts);
    TP_ARENA_TAKE(s->arena, reach + 1, x->at);
    return sum_bytes(x);
}

tp_status
tp_layer_infeasible(const tp_layer_space *s, tp_layer_pair *pair, tp_layer_pack *pack)
{
    space_search x;
    int small = 0;
    TP_TRY(open_search(s, pair, pack, &x, &small));
    return small ? find_least(&x) : refuse_one_stage(s, pair, pack);
}
