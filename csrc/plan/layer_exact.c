/* The exact planner over a layer graph.
 *
 * Does a plan with no stage slower than tau exist? What the stages of a downset J leave to those before it is (s, k), their
 * replicas and devices: a stage before has y = ceil((s + d) / d), which rises with s, and k must stay within `devices`. So
 * only Pareto-minimal (s, k) matter, and for one (s, k) and tensor degree only the least d that is fast enough: a larger d
 * adds to both. Complete by induction over downsets by size, so the answer is exact. Pruned, soundly: work that is left
 * needs devices, (sum over nodes left of the least t time_s) / tau of them, because t d time(S) >= t sum time_s.
 * The least tau is the time of the plan found when none is faster: bisection first, then the question just below it. */
#include "csrc/plan/layer_space.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"

enum { POINTS = 2048, CACHE_BITS = 16 };

typedef struct {
    double time_s;
    int32_t fits; /* largest y at which the fastest variants fit */
    int32_t known;
} fastest;

typedef struct {
    double work_s;    /* least time of the variants on one replica, without messages */
    int32_t feasible; /* largest y at which anything fits; -1: not known */
    int32_t has;      /* every node has a variant of this degree */
} limits;

typedef struct {
    int32_t s, k;       /* replicas and devices of this downset's stages */
    int32_t j, from;    /* the rest: entry `from` of downset j; -1 */
    int32_t pair;
    int16_t t, r;       /* indices of tensor degree and replicas of the stage before the rest */
} entry;

typedef struct {
    double time_s, bytes;
    int32_t from, l; /* the point before, the variant added */
} point;

typedef struct {
    uint64_t key;       /* 0: free */
    double low_s, high_s; /* the least time is between them */
} cached;

typedef struct {
    tp_layer_space space;
    tp_layer_pair pair;
    tp_layer_pack pack;
    int pairs;
    int *inner, *pair_begin;     /* [pairs] the downset within; [count + 1] */
    fastest *fast;               /* [pairs][degrees][replicas] */
    limits *limit;               /* [pairs][degrees] */
    int filled;                  /* the pair that `pair` holds; -1 */
    int64_t packed;              /* the stage that `pack` holds: index into fast; -1 */
    double *left_s;              /* [count] device seconds of the nodes outside */
    entry *front;                /* [count][reach + 1], by s ascending, k descending */
    int *fronts;                 /* [count] */
    entry *at;                   /* [reach + 1] scratch: least k by s */
    point *points, *merged, *spare; /* [POINTS * most variants] */
    point *kept;                 /* [nodes * POINTS] the last choice's points, node by node */
    cached *cache;
    int64_t searches, knapsacks;
    int64_t asked; /* steps since somebody was asked whether to stop */
    int capped;
} search;

static int
largest_fit(double a, double b, double limit, int most)
{
    if (a + b > limit)
        return 0;
    if (a * most + b <= limit)
        return most;
    int y = (int)((limit - b) / a);
    while (y > 0 && a * y + b > limit)
        y--;
    while (y < most && a * (y + 1) + b <= limit)
        y++;
    return y;
}

static void
fill_pair(search *x, int i, int p)
{
    if (x->filled != p)
        tp_layer_pair_fill(&x->space, i, x->inner[p], &x->pair);
    x->filled = p;
}

static void
fill_pack(search *x, int i, int p, int t, int r)
{
    int64_t stage = ((int64_t)p * x->space.degrees + t) * x->space.replicas + r;
    if (x->packed == stage)
        return;
    fill_pair(x, i, p);
    tp_layer_pack_fill(&x->space, &x->pair, t, x->space.replica[r], &x->pack);
    x->packed = stage;
}

/* The fastest variants of a stage: found when first asked for, most never are. */
static const fastest *
fastest_of(search *x, int i, int p, int t, int r)
{
    const tp_layer_space *s = &x->space;
    fastest *fast = &x->fast[((int64_t)p * s->degrees + t) * s->replicas + r];
    if (!fast->known) {
        double a, b;
        fill_pack(x, i, p, t, r);
        fast->time_s = tp_layer_pack_fastest(&x->pack, &a, &b);
        fast->fits = largest_fit(a, b, s->graph->memory_bytes, s->reach);
        fast->known = 1;
    }
    return fast;
}

/* The pack must hold the stage. */
static int
feasible_of(search *x, limits *limit)
{
    int low = 0, high = x->space.reach;
    while (limit->feasible < 0 && low < high) {
        int y = (low + high + 1) / 2;
        if (tp_layer_pack_least_bytes(&x->pack, y) <= x->space.graph->memory_bytes)
            low = y;
        else
            high = y - 1;
    }
    if (limit->feasible < 0)
        limit->feasible = low;
    return limit->feasible;
}

/* work_s: the downset's less that of the downset within, and less what their rounding may amount to. */
static void
note_pair(search *x, int p, int i, int j, const double *work, const int *lacking)
{
    int degrees = x->space.degrees;
    for (int t = 0; t < degrees; t++) {
        double work_s = work[i * degrees + t] - work[j * degrees + t];
        x->limit[p * degrees + t] =
            (limits){work_s - 1e-12 * work[i * degrees + t], -1, lacking[i * degrees + t] == lacking[j * degrees + t]};
    }
}

/* Keep a point at the end of a list by (time, bytes) if none before it beats it in both. */
static int
append(point *list, int count, point value)
{
    if (count > 0 && list[count - 1].bytes <= value.bytes)
        return count;
    list[count] = value;
    return count + 1;
}

/* The Pareto points with variant l of a node added, merged with `made` of its other variants in x->merged. rest_*: the least
 * that the nodes behind it take; what cannot fit or cannot beat `best` with them is left out. */
static int
add_variant(search *x, int l, int y, int count, int made, double rest_time, double rest_bytes, double best)
{
    const tp_layer_pack *pack = &x->pack;
    double time = pack->time[l], size = pack->a[l] * y + pack->b[l];
    int kept = 0, other = 0;
    for (int c = 0; c < count; c++) {
        point to = {x->points[c].time_s + time, x->points[c].bytes + size, c, l};
        if (to.bytes + rest_bytes * (1.0 - 1e-12) > pack->memory_bytes)
            continue;
        if (to.time_s + rest_time * (1.0 - 1e-12) >= best)
            break;
        while (other < made && (x->merged[other].time_s < to.time_s ||
                                (x->merged[other].time_s == to.time_s && x->merged[other].bytes <= to.bytes)))
            kept = append(x->spare, kept, x->merged[other++]);
        kept = append(x->spare, kept, to);
    }
    while (other < made)
        kept = append(x->spare, kept, x->merged[other++]);
    point *swap = x->merged;
    x->merged = x->spare;
    x->spare = swap;
    return kept;
}

/* All Pareto points with node n added. */
static int
add_node(search *x, int n, int y, int count, double rest_time, double rest_bytes, double best)
{
    int made = 0;
    for (int l = x->pack.begin[n]; l < x->pack.begin[n + 1]; l++)
        made = add_variant(x, l, y, count, made, rest_time, rest_bytes, best);
    if (made > POINTS) {
        x->capped = 1;
        made = POINTS;
    }
    point *swap = x->points;
    x->points = x->merged;
    x->merged = swap;
    memcpy(x->kept + (int64_t)n * POINTS, x->points, (size_t)made * sizeof *x->points);
    return made;
}

/* The least time of one variant a node within memory at y, and the pack's choice of it: all Pareto points of (time, bytes),
 * node by node, less those that cannot fit or cannot beat the heuristic's choice. */
static double
solve_pack(search *x, int y)
{
    tp_layer_pack *pack = &x->pack;
    double best = tp_layer_pack_greedy(pack, y), rest_bytes = tp_layer_pack_least_bytes(pack, y), rest_time = 0.0;
    int count = 1, found = -1;
    if (pack->price == 0.0 || !(best < INFINITY))
        return best; /* the fastest fit, or nothing does */
    x->knapsacks++;
    x->asked += (int64_t)pack->nodes * POINTS;
    for (int l = 0, n = 0; n < pack->nodes; n++) {
        double least = INFINITY;
        for (; l < pack->begin[n + 1]; l++)
            least = fmin(least, pack->time[l]);
        rest_time += least;
    }
    x->points[0] = (point){0.0, 0.0, -1, -1};
    for (int n = 0; n < pack->nodes && count > 0; n++) {
        double least_time = INFINITY, least_bytes = INFINITY;
        for (int l = pack->begin[n]; l < pack->begin[n + 1]; l++) {
            least_time = fmin(least_time, pack->time[l]);
            least_bytes = fmin(least_bytes, pack->a[l] * y + pack->b[l]);
        }
        rest_time -= least_time;
        rest_bytes -= least_bytes;
        count = add_node(x, n, y, count, rest_time, rest_bytes, best);
    }
    for (int c = 0; c < count; c++)
        if (x->points[c].bytes <= pack->memory_bytes && x->points[c].time_s < best) {
            best = x->points[c].time_s;
            found = c;
        }
    for (int n = pack->nodes - 1; n >= 0 && found >= 0; n--) {
        const point *last = &x->kept[(int64_t)n * POINTS + found];
        pack->choice[n] = last->l;
        found = last->from;
    }
    return best;
}

/* Is the stage's least time within tau? Its heuristic or its bound mostly says so; if not, the choice is solved. */
static int
within(search *x, int i, int p, int t, int r, int y, double tau)
{
    const tp_layer_space *s = &x->space;
    const fastest *fast = fastest_of(x, i, p, t, r);
    limits *limit = &x->limit[(int64_t)p * s->degrees + t];
    if (fast->time_s > tau || y <= fast->fits)
        return fast->time_s <= tau;
    if (limit->feasible >= 0 && y > limit->feasible)
        return 0;
    uint64_t key = ((((uint64_t)p * 32 + (uint64_t)t) << 12 | (uint64_t)r) << 14 | (uint64_t)y) + 1;
    cached *cell = &x->cache[(key * 0x9E3779B97F4A7C15u) >> (64 - CACHE_BITS)];
    if (cell->key != key) {
        fill_pack(x, i, p, t, r);
        *cell = (cached){key, INFINITY, INFINITY};
        if (y <= feasible_of(x, limit)) {
            cell->high_s = tp_layer_pack_greedy(&x->pack, y);
            cell->low_s = fmin(tp_layer_pack_bound(&x->pack, y), cell->high_s);
        }
    }
    if (cell->high_s <= tau || cell->low_s > tau)
        return cell->high_s <= tau;
    fill_pack(x, i, p, t, r);
    cell->low_s = cell->high_s = solve_pack(x, y);
    return cell->high_s <= tau;
}

/* Stages i \ j before each entry of j: the least d that is fast enough, for each tensor degree. */
static void
extend(search *x, int i, int p, double tau)
{
    const tp_layer_space *s = &x->space;
    int j = x->inner[p];
    for (int t = 0; t < s->degrees; t++) {
        const limits *limit = &x->limit[(int64_t)p * s->degrees + t];
        int tensor = s->degree[t], most = s->graph->devices / tensor, first = 0;
        if (!limit->has)
            continue;
        while (first < s->replicas && s->replica[first] <= most &&
               (limit->work_s > tau * s->replica[first] || fastest_of(x, i, p, t, first)->time_s > tau))
            first++;
        for (int e = 0; e < x->fronts[j]; e++) {
            const entry *rest = &x->front[(int64_t)j * (s->reach + 1) + e];
            for (int r = first; r < s->replicas; r++) {
                int d = s->replica[r], to = rest->s + d, k = rest->k + d * tensor;
                if (tp_deadline_told_after(&x->asked, 64))
                    return;
                if (d > most || to > s->reach || k > s->graph->devices)
                    break;
                if (x->at[to].k <= k)
                    break; /* known as good: it beats every larger d too */
                if (limit->work_s > tau * d || !within(x, i, p, t, r, (to + d - 1) / d, tau)) {
                    first = r + 1; /* with more replicas behind it, as of the next entries, it is no faster */
                    continue;
                }
                x->at[to] = (entry){to, k, j, e, p, (int16_t)t, (int16_t)r};
                break;
            }
        }
    }
}

static int
keep_front(search *x, int i, double tau)
{
    const tp_layer_space *s = &x->space;
    double needed = x->left_s[i] > 0.0 ? x->left_s[i] / tau * (1.0 - 1e-9) : 0.0; /* tau may be 0 */
    int kept = 0, least = s->graph->devices + 1;
    entry *front = x->front + (int64_t)i * (s->reach + 1);
    for (int to = 0; to <= s->reach; to++)
        if (x->at[to].k < least && x->at[to].k + needed <= s->graph->devices) {
            front[kept++] = x->at[to];
            least = x->at[to].k;
        }
    x->fronts[i] = kept;
    return kept;
}

/* The least time of the stage of an entry of i; the pack holds its choice. */
static double
solve_entry(search *x, int i, const entry *e)
{
    int d = x->space.replica[e->r], y = (e->s + d - 1) / d;
    fill_pack(x, i, e->pair, e->t, e->r);
    return solve_pack(x, y);
}

/* The largest time of a plan with none above tau: of the one on the fewest devices; INFINITY if there is none, or if the thread is
 * told to stop. */
static double
probe(search *x, double tau)
{
    const tp_layer_space *s = &x->space;
    x->searches++;
    x->front[0] = (entry){0, 0, -1, -1, -1, 0, 0};
    x->fronts[0] = 1;
    for (int i = 1; i < s->count; i++) {
        for (int to = 0; to <= s->reach; to++)
            x->at[to].k = INT32_MAX;
        for (int p = x->pair_begin[i]; p < x->pair_begin[i + 1] && !tp_deadline_was_told(); p++)
            if (x->fronts[x->inner[p]] > 0)
                extend(x, i, p, tau);
        if (tp_deadline_was_told())
            return INFINITY;
        keep_front(x, i, tau);
    }
    int i = s->count - 1, at = x->fronts[i] - 1;
    if (at < 0)
        return INFINITY;
    double most = 0.0;
    while (i > 0) {
        const entry *e = &x->front[(int64_t)i * (s->reach + 1) + at];
        most = fmax(most, solve_entry(x, i, e));
        i = e->j;
        at = e->from;
    }
    return most;
}

/* Of downset i, by degree: the least times of its nodes, and how many of them lack the degree. And of the nodes outside it,
 * by any degree, the least device seconds. */
static void
sum_work(search *x, int i, double *work, int *lacking)
{
    const tp_layer_space *s = &x->space;
    const tp_layer_graph *g = s->graph;
    for (int n = 0, v = 0; n < g->nodes; n++) {
        int inside = s->set[(int64_t)i * s->words + (n >> 6)] >> (n & 63) & 1;
        double device = INFINITY;
        for (int t = 0; t < s->degrees; t++)
            lacking[t] += inside;
        while (v < g->variants && g->node[v] == n) {
            int degree = g->degree[v], t = 0;
            double least = INFINITY;
            for (; v < g->variants && g->node[v] == n && g->degree[v] == degree; v++)
                least = fmin(least, g->time_s[v]);
            device = fmin(device, degree * least);
            while (t < s->degrees && s->degree[t] != degree)
                t++;
            if (inside && t < s->degrees) {
                work[t] += least;
                lacking[t]--;
            }
        }
        x->left_s[i] += inside ? 0.0 : device;
    }
}

static tp_status
open_pairs(search *x)
{
    const tp_layer_space *s = &x->space;
    int64_t pairs = 0;
    double *work = NULL;
    int *lacking = NULL;
    for (int i = 0; i < s->count; i++) {
        TP_TRY(tp_deadline_check_after(&x->asked, 4 * (int64_t)i * s->words));
        for (int j = 0; j < i; j++)
            pairs += tp_layer_within(s, j, i);
    }
    if (pairs * s->degrees * s->replicas > 200000000)
        return tp_fail(TP_EVALUE, "the graph has %lld possible stages of %d ways each: too many to plan; merge nodes",
                       (long long)pairs, s->degrees * s->replicas);
    TP_ARENA_TAKE(s->arena, pairs, x->inner);
    TP_ARENA_TAKE(s->arena, s->count, x->pair_begin);
    TP_ARENA_TAKE(s->arena, pairs * s->degrees * s->replicas, x->fast);
    TP_ARENA_TAKE(s->arena, pairs * s->degrees, x->limit);
    TP_ARENA_TAKE(s->arena, (int64_t)s->count * s->degrees, work);
    TP_ARENA_TAKE(s->arena, (int64_t)s->count * s->degrees, lacking);
    for (int i = 0; i < s->count; i++) {
        TP_TRY(tp_deadline_check_after(&x->asked, 16 * ((int64_t)i + s->graph->variants)));
        sum_work(x, i, work + i * s->degrees, lacking + i * s->degrees);
        x->pair_begin[i] = x->pairs;
        for (int j = 0; j < i; j++)
            if (tp_layer_within(s, j, i)) {
                x->inner[x->pairs] = j;
                note_pair(x, x->pairs++, i, j, work, lacking);
            }
    }
    x->pair_begin[s->count] = x->pairs;
    return TP_OK;
}

static tp_status
open_search(search *x, const tp_layer_graph *g, tp_arena *arena)
{
    tp_layer_space *s = &x->space;
    int widest = 1;
    TP_TRY(tp_layer_space_open(g, arena, s));
    TP_TRY(tp_layer_pair_open(s, &x->pair));
    TP_TRY(tp_layer_pack_open(s, &x->pack));
    TP_ARENA_TAKE(arena, s->count, x->left_s);
    TP_TRY(open_pairs(x));
    x->filled = -1;
    x->packed = -1;
    for (int v = 0, same = 0; v < g->variants; v++) {
        same = v > 0 && g->node[v] == g->node[v - 1] && g->degree[v] == g->degree[v - 1] ? same + 1 : 1;
        widest = same > widest ? same : widest;
    }
    TP_ARENA_TAKE(arena, (int64_t)s->count * (s->reach + 1), x->front);
    TP_ARENA_TAKE(arena, s->count, x->fronts);
    TP_ARENA_TAKE(arena, s->reach, x->at);
    TP_ARENA_TAKE(arena, (int64_t)POINTS * widest, x->points);
    TP_ARENA_TAKE(arena, (int64_t)POINTS * widest, x->merged);
    TP_ARENA_TAKE(arena, (int64_t)POINTS * widest, x->spare);
    TP_ARENA_TAKE(arena, (int64_t)POINTS * g->nodes, x->kept);
    TP_ARENA_TAKE(arena, (int64_t)1 << CACHE_BITS, x->cache);
    return TP_OK;
}

/* A plan to begin with: the bound by work is close in most graphs. */
static double
first_plan(search *x, double *low)
{
    double time = INFINITY, tau = *low * 1.1;
    for (int step = 0; step < 12 && tau > 0.0 && !(time < INFINITY); step++, tau *= 1.4) {
        time = probe(x, tau);
        *low = time < INFINITY ? *low : tau;
    }
    return time < INFINITY ? time : probe(x, DBL_MAX);
}

/* The least time per sample, and a bound that no plan is below. Bisection halves what is open; the question just below the
 * best plan ends it. */
static tp_status
find_least(search *x, tp_layer_plan *plan)
{
    double low = x->left_s[0] / x->space.graph->devices * (1.0 - 1e-9), work = low, high = first_plan(x, &low);
    TP_TRY(tp_deadline_check_told());
    if (!(high < INFINITY))
        return tp_layer_infeasible(&x->space, &x->pair, &x->pack);
    for (int step = 0; high > 0.0; step++) {
        double below = fmin(high * (1.0 - 1e-12), nextafter(high, 0.0)); /* denormal times have no 1e-12 */
        double tau = low >= below                               ? below
                     : step % 4 < 3 && high > low * (1.0 + 5e-3) ? (low > 0.0 ? sqrt(low) * sqrt(high) : 0.25 * high)
                     : step % 2                                  ? below
                                                                 : low + 0.5 * (high - low);
        double time = probe(x, tau < below ? tau : below);
        if (time < INFINITY)
            high = time;
        else if (tau >= below)
            break;
        else
            low = tau;
    }
    plan->optimal = !x->capped;
    plan->lower_bound_s = plan->optimal ? high * (1.0 - 1e-12) : work;
    probe(x, high); /* the fronts of the plan itself */
    return tp_deadline_check_told();
}

static void
write_plan(search *x, tp_layer_plan *plan)
{
    const tp_layer_space *s = &x->space;
    int i = s->count - 1, at = x->fronts[i] - 1;
    while (i > 0) {
        const entry *e = &x->front[(int64_t)i * (s->reach + 1) + at];
        fill_pair(x, i, e->pair);
        solve_entry(x, i, e);
        tp_layer_plan_put(s, &x->pair, &x->pack, e->t, s->replica[e->r], plan);
        i = e->j;
        at = e->from;
    }
    tp_layer_plan_finish(s, plan);
}

tp_status
tp_plan_layers(const tp_layer_graph *graph, tp_layer_plan *out)
{
    int64_t start = tp_clock_ns();
    tp_arena arena;
    search x = {0};
    *out = (tp_layer_plan){0};
    TP_TRY(tp_layer_graph_check(graph));
    TP_TRY(tp_arena_open(&arena));
    tp_status status = open_search(&x, graph, &arena);
    if (status == TP_OK)
        status = tp_layer_plan_open(&x.space, out);
    if (status == TP_OK)
        status = find_least(&x, out);
    if (status == TP_OK)
        write_plan(&x, out);
    out->pairs = x.pairs;
    out->searches = x.searches;
    out->knapsacks = x.knapsacks;
    tp_arena_close(&arena);
    out->seconds = (double)(tp_clock_ns() - start) * 1e-9;
    return status;
}
