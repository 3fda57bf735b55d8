/* The exact choice of a stage's variants: all Pareto points of (time, bytes), node by node, without those that cannot fit or cannot
 * beat the best choice known. */
#include "csrc/plan/layer_choice.h"

#include <math.h>
#include <string.h>

enum { POINTS = TP_LAYER_POINTS };

/* The least that the nodes after a given one take. priced_s: time plus the heuristic's price for each byte. */
typedef struct {
    double time_s, bytes, priced_s;
} behind;

tp_status
tp_layer_choice_open(const tp_layer_space *s, double slack, tp_layer_choice *x)
{
    const tp_layer_graph *g = s->graph;
    int widest = 1;
    *x = (tp_layer_choice){.slack = slack};
    for (int v = 0, same = 0; v < g->variants; v++) {
        same = v > 0 && g->node[v] == g->node[v - 1] && g->degree[v] == g->degree[v - 1] ? same + 1 : 1;
        widest = same > widest ? same : widest;
    }
    TP_ARENA_TAKE(s->arena, (int64_t)POINTS * widest, x->points);
    TP_ARENA_TAKE(s->arena, (int64_t)POINTS * widest, x->merged);
    TP_ARENA_TAKE(s->arena, (int64_t)POINTS * widest, x->spare);
    TP_ARENA_TAKE(s->arena, (int64_t)POINTS * g->nodes, x->kept);
    return TP_OK;
}

/* Add (sign 1) the least that node n takes, by every measure, to the rest, or subtract it (sign -1). */
static void
leave_node(const tp_layer_pack *pack, int n, int y, behind *rest, double sign)
{
    double time_s = INFINITY, bytes = INFINITY, priced_s = INFINITY;
    for (int l = pack->begin[n]; l < pack->begin[n + 1]; l++) {
        double here = pack->a[l] * y + pack->b[l], priced = pack->time[l] + pack->price * here;
        time_s = pack->time[l] < time_s ? pack->time[l] : time_s;
        bytes = here < bytes ? here : bytes;
        priced_s = priced < priced_s ? priced : priced_s;
    }
    rest->time_s += sign * time_s;
    rest->bytes += sign * bytes;
    rest->priced_s += sign * priced_s;
}

/* Append a point to a list that is sorted by (time, bytes), unless a point before it is better in both. */
static int
append(tp_layer_point *list, int count, tp_layer_point value)
{
    if (count > 0 && list[count - 1].bytes <= value.bytes)
        return count;
    list[count] = value;
    return count + 1;
}

/* Add variant l of a node to every Pareto point, merged with the `made` points of its other variants in x->merged. Points that
 * cannot fit or cannot beat `best`, whatever the nodes after it choose, are left out; with a price on each byte above memory few
 * can. */
static int
add_variant(tp_layer_choice *x, const tp_layer_pack *pack, int l, int y, int count, int made, const behind *rest, double best)
{
    double time = pack->time[l], size = pack->a[l] * y + pack->b[l], price = pack->price;
    double more = 1.0 + x->slack; /* what rounding may have added */
    double memory = pack->memory_bytes * more, time_best = best * more, priced_best = (best + price * pack->memory_bytes) * more;
    int kept = 0, other = 0;
    for (int c = 0; c < count; c++) {
        tp_layer_point to = {x->points[c].time_s + time, x->points[c].bytes + size, c, l};
        if (to.bytes + rest->bytes > memory)
            continue;
        if (to.time_s + rest->time_s > time_best)
            break;
        if (to.time_s + price * to.bytes + rest->priced_s > priced_best)
            continue;
        while (other < made && (x->merged[other].time_s < to.time_s ||
                                (x->merged[other].time_s == to.time_s && x->merged[other].bytes <= to.bytes)))
            kept = append(x->spare, kept, x->merged[other++]);
        kept = append(x->spare, kept, to);
    }
    while (other < made)
        kept = append(x->spare, kept, x->merged[other++]);
    tp_layer_point *swap = x->merged;
    x->merged = x->spare;
    x->spare = swap;
    return kept;
}

/* All Pareto points with node n added. */
static int
add_node(tp_layer_choice *x, const tp_layer_pack *pack, int n, int y, int count, const behind *rest, double best)
{
    int made = 0;
    for (int l = pack->begin[n]; l < pack->begin[n + 1]; l++)
        made = add_variant(x, pack, l, y, count, made, rest, best);
    if (made > POINTS) {
        x->capped = 1;
        made = POINTS;
    }
    tp_layer_point *swap = x->points;
    x->points = x->merged;
    x->merged = swap;
    for (int c = 0; c < made; c++)
        x->kept[(int64_t)n * POINTS + c] = (tp_layer_origin){x->points[c].from, x->points[c].l};
    return made;
}

double
tp_layer_choice_solve(tp_layer_choice *x, tp_layer_pack *pack, int y, double most)
{
    double best = tp_layer_pack_greedy(pack, y);
    behind rest = {0.0, 0.0, 0.0};
    int count = 1, found = -1;
    if (pack->price == 0.0 || !(best < INFINITY))
        return best; /* the fastest variants fit, or none do */
    best = fmin(best, nextafter(most, INFINITY));
    x->knapsacks++;
    for (int n = 0; n < pack->nodes; n++)
        leave_node(pack, n, y, &rest, 1.0);
    x->points[0] = (tp_layer_point){0.0, 0.0, -1, -1};
    for (int n = 0; n < pack->nodes && count > 0; n++) {
        leave_node(pack, n, y, &rest, -1.0);
        count = add_node(x, pack, n, y, count, &rest, best);
    }
    for (int c = 0; c < count; c++)
        if (x->points[c].bytes <= pack->memory_bytes && x->points[c].time_s < best) {
            best = x->points[c].time_s;
            found = c;
        }
    for (int n = pack->nodes - 1; n >= 0 && found >= 0; n--) {
        const tp_layer_origin *last = &x->kept[(int64_t)n * POINTS + found];
        pack->choice[n] = last->l;
        found = last->from;
    }
    return best;
}
