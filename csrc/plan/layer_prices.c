/* Lagrangian bounds on the times of all stages at once, at a handful of prices of a byte.
 *
 * At price p let stage S choose for each node the variant of least time + p bytes: T(p) seconds and M(p) bytes in all. Then
 *     no choice within `memory` takes less than T(p) + p (M(p) - memory), at any p;
 * and between two prices p < q with M(p) > memory >= M(q) let nodes change from their choice at p to that at q, one by one, until
 * the stage fits. Each change costs at most q seconds a byte saved, and all but the last save less than M(p) - memory, so
 *     some choice takes no more than T(p) + q (M(p) - memory) + what the last change adds, nor more than T(q).
 * T and M are differences of sums over downsets, except for nodes at the stage's rim, whose times include messages. */
#include "csrc/plan/layer_prices.h"

#include <math.h>
#include <stdlib.h>

enum { PRICES = 8 }; /* 0 and INFINITY among them: the fastest choice, and that of least bytes */

typedef struct {
    double time_s, bytes;
} amount;

struct tp_layer_price_list {
    int prices;
    double price[PRICES];  /* ascending, seconds a byte */
    double most_s[PRICES]; /* what one node adds at most from a price to the next, if it is not at a rim */
    amount *sum;           /* [count][PRICES] of downsets, alone */
};

tp_status
tp_layer_prices_open(const tp_layer_space *s, int64_t most, tp_layer_prices *prices)
{
    *prices = (tp_layer_prices){.most = most, .worth = 8 + s->count / 4}; /* sums over all downsets */
    TP_ARENA_TAKE(s->arena, s->replicas, prices->place);
    for (int r = 0; r < s->replicas; r++) {
        prices->place[r] = prices->places;
        prices->places += s->reach / s->replica[r] + 2;
    }
    TP_ARENA_TAKE(s->arena, s->degrees * prices->places, prices->lists);
    TP_ARENA_TAKE(s->arena, s->degrees * prices->places, prices->asked);
    TP_ARENA_TAKE(s->arena, s->graph->nodes, prices->rim);
    TP_ARENA_TAKE(s->arena, s->graph->variants, prices->rim_s);
    TP_ARENA_TAKE(s->arena, s->graph->variants, prices->ratio);
    return TP_OK;
}

static double
bytes_of(const tp_layer_graph *g, int v, int y)
{
    return g->memory_a[v] * y + g->memory_b[v];
}

/* The choice of one node, of its variants from `begin`, at a price. */
static amount
choose(const tp_layer_graph *g, const double *time_s, int begin, int end, int y, double price)
{
    amount best = {0.0, 0.0};
    double least = INFINITY;
    for (int v = begin; v < end; v++) {
        double bytes = bytes_of(g, v, y), cost = isinf(price) ? bytes : time_s[v] + price * bytes;
        if (cost < least || (cost == least && time_s[v] < best.time_s)) {
            least = cost;
            best = (amount){time_s[v], bytes};
        }
    }
    return best;
}

static int
by_value(const void *x, const void *y)
{
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

/* Set the prices so that from one to the next about the same number of nodes leave their fastest variant. */
static void
set_prices(const tp_layer_space *s, tp_layer_prices *prices, const double *alone_s, int t, int y, tp_layer_price_list *list)
{
    const tp_layer_graph *g = s->graph;
    int count = 0;
    for (int n = 0; n < g->nodes; n++) {
        int begin = s->begin[n * s->degrees + t], end = s->end[n * s->degrees + t];
        int fastest = tp_layer_fastest_of(alone_s, begin, end);
        for (int v = begin; v < end; v++) {
            double saved = bytes_of(g, fastest, y) - bytes_of(g, v, y);
            if (saved > 0.0)
                prices->ratio[count++] = (alone_s[v] - alone_s[fastest]) / saved;
        }
    }
    qsort(prices->ratio, (size_t)count, sizeof *prices->ratio, by_value);
    list->price[list->prices++] = 0.0;
    for (int k = 0; k < PRICES - 2 && count > 0; k++) {
        double price = prices->ratio[(int64_t)k * (count - 1) / (PRICES - 3)] * (1.0 + 1e-9); /* what costs just that goes over */
        if (price > list->price[list->prices - 1] && price < INFINITY)
            list->price[list->prices++] = price;
    }
    list->price[list->prices++] = INFINITY;
}

static void
sum_list(const tp_layer_space *s, const double *alone_s, int t, int y, tp_layer_price_list *list)
{
    for (int i = 1; i < s->count; i++) {
        int n = s->added[i], begin = s->begin[n * s->degrees + t], end = s->end[n * s->degrees + t];
        const amount *from = list->sum + (int64_t)s->smaller[i] * PRICES;
        amount *to = list->sum + (int64_t)i * PRICES, before = {0.0, 0.0};
        for (int k = 0; k < list->prices; k++) {
            amount one = choose(s->graph, alone_s, begin, end, y, list->price[k]);
            to[k] = (amount){from[k].time_s + one.time_s, from[k].bytes + one.bytes};
            if (k > 0)
                list->most_s[k - 1] = fmax(list->most_s[k - 1], one.time_s - before.time_s);
            before = one;
        }
    }
}

/* The prices for (tensor degree, replicas, y), made when first asked for. NULL: there are none. Where memory for lists runs out no
 * more are made; that costs only time, as the packs decide everything that prices do. */
static const tp_layer_price_list *
list_of(const tp_layer_space *s, const tp_layer_sums *sums, tp_layer_prices *prices, int t, int r, int y)
{
    int64_t place = t * prices->places + prices->place[r] + y, bytes = (int64_t)s->count * PRICES * (int64_t)sizeof(amount);
    void *memory = NULL;
    if (prices->lists[place] != NULL || prices->asked[place]++ < prices->worth || prices->most < bytes)
        return prices->lists[place];
    prices->most -= bytes;
    if (tp_arena_take(s->arena, 1, sizeof(tp_layer_price_list), &memory) != TP_OK) {
        prices->most = 0;
        return NULL;
    }
    tp_layer_price_list *list = memory;
    if (tp_arena_take(s->arena, (size_t)s->count, PRICES * sizeof(amount), &memory) != TP_OK) {
        prices->most = 0;
        return NULL;
    }
    list->sum = memory;
    const double *alone_s = sums->alone_s + (int64_t)r * s->graph->variants;
    set_prices(s, prices, alone_s, t, y, list);
    sum_list(s, alone_s, t, y, list);
    prices->lists[place] = list;
    return list;
}

/* What the stage chooses at price k, and what a node at its rim then has. */
static amount
choice_at(const tp_layer_space *s, const double *alone_s, const tp_layer_prices *prices, const tp_layer_price_list *list, int k,
          int i, int j, int t, int y, int rim)
{
    const amount *all = &list->sum[(int64_t)i * PRICES + k], *later = &list->sum[(int64_t)j * PRICES + k];
    amount sum = {all->time_s - later->time_s, all->bytes - later->bytes};
    for (int at = 0; at < rim; at++) {
        int n = prices->rim[at], begin = s->begin[n * s->degrees + t], end = s->end[n * s->degrees + t];
        amount alone = choose(s->graph, alone_s, begin, end, y, list->price[k]);
        amount here = choose(s->graph, prices->rim_s, begin, end, y, list->price[k]);
        sum.time_s += here.time_s - alone.time_s;
        sum.bytes += here.bytes - alone.bytes;
    }
    return sum;
}

/* What a node at the rim adds from price k to the next. */
static double
added_at(const tp_layer_space *s, const tp_layer_prices *prices, const tp_layer_price_list *list, int k, int at, int t, int y)
{
    int n = prices->rim[at], begin = s->begin[n * s->degrees + t], end = s->end[n * s->degrees + t];
    return choose(s->graph, prices->rim_s, begin, end, y, list->price[k + 1]).time_s -
           choose(s->graph, prices->rim_s, begin, end, y, list->price[k]).time_s;
}

void
tp_layer_prices_bound(const tp_layer_space *s, const tp_layer_sums *sums, tp_layer_prices *prices, int i, int j, int t, int r,
                      int y, double *low_s, double *high_s)
{
    const tp_layer_price_list *list = list_of(s, sums, prices, t, r, y);
    *low_s = 0.0;
    *high_s = INFINITY;
    if (list == NULL)
        return;
    const double *alone_s = sums->alone_s + (int64_t)r * s->graph->variants;
    double limit = s->graph->memory_bytes, slack = 4.0 * sums->slack;
    int rim = tp_layer_sums_rim(s, sums, i, j, t, r, prices->rim, prices->rim_s), low = 0, high = list->prices - 1;
    amount under = choice_at(s, alone_s, prices, list, high, i, j, t, y, rim), over = {0.0, 0.0};
    double bytes_slack = slack * (list->sum[(int64_t)i * PRICES].bytes + under.bytes + limit);
    if (under.bytes - bytes_slack > limit) {
        *low_s = INFINITY;
        return;
    }
    while (high - low > 1) { /* the least price at which it fits, or seems to */
        int k = (low + high) / 2;
        amount here = choice_at(s, alone_s, prices, list, k, i, j, t, y, rim);
        if (here.bytes <= limit) {
            high = k;
            under = here;
        } else {
            low = k;
        }
    }
    over = choice_at(s, alone_s, prices, list, low, i, j, t, y, rim);
    double from = list->price[low], to = list->price[high], most_s = list->most_s[low];
    for (int at = 0; at < rim; at++)
        most_s = fmax(most_s, added_at(s, prices, list, low, at, t, y));
    double margin_s = slack * (list->sum[(int64_t)i * PRICES + high].time_s + under.time_s + most_s +
                               (to < INFINITY ? to : from) * (list->sum[(int64_t)i * PRICES].bytes + over.bytes + limit));
    if (!(margin_s < INFINITY))
        return;
    double at_from = over.time_s + from * (over.bytes - limit);
    *low_s = (to < INFINITY ? fmax(at_from, under.time_s + to * (under.bytes - limit)) : at_from) - margin_s;
    if (under.bytes + bytes_slack <= limit) {
        double step_s = over.time_s + to * fmax(over.bytes - limit, 0.0) + most_s;
        *high_s = (to < INFINITY ? fmin(step_s, under.time_s) : under.time_s) + margin_s;
    }
}
