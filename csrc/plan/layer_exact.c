/* The exact planner over a layer graph (`parallel_layers`).
 *
 * Question: is there a plan with no stage slower than tau? Earlier stages depend on the stages of a downset J only by (s, k), the
 * replicas and devices of these: an earlier stage with d replicas has y = ceil((s + d) / d) micro-batches in flight, which rises
 * with s, and k must stay within `devices`. So only Pareto-minimal (s, k) matter, and for one (s, k) and tensor degree only the
 * least d that is fast enough: a larger d adds to both. By induction over downsets by size the answer is exact. Entries are dropped
 * where too few devices are left for the earlier stages, even with memory for their fastest variants (look_back).
 * The least tau: bisection; then the plan in hand is best if the question for just below its time has the answer no.
 *
 * Is a stage within tau? Most stages are decided by sums over downsets: too slow with their fastest variants, or fast enough and
 * small enough (layer_sums.h). Most of those that must give up time for memory are decided by bounds at a handful of prices of a
 * byte (layer_prices.h). Then come the heuristic and the Lagrangian bound at its price; what is left is solved exactly
 * (layer_choice.h). Stages of like nodes are decided once (layer_alike.h). */
#include "csrc/plan/layer_alike.h"
#include "csrc/plan/layer_choice.h"
#include "csrc/plan/layer_prices.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"

enum { MOST_CACHE_BITS = 16, LISTS = 1 << 23 }; /* LISTS: bytes, where the fastest variants take less */
static const uint64_t COARSE = (uint64_t)1 << 63;

/* What is known of a stage at tau_s: with replica[r], r < first, no choice of variants is within it; found: with replica[first] the
 * fastest one is. */
typedef struct {
    double tau_s;
    int16_t first, found;
} blocked;

enum { UNKNOWN, NEARLY, EXACT };
typedef struct {
    double time_s; /* but for rounding, until it is EXACT */
    int32_t fits;  /* largest y at which the fastest variants fit */
    int32_t known;
} fastest;

typedef struct {
    int16_t s, k;    /* replicas and devices of this downset's stages */
    int16_t j, from; /* the rest: entry `from` of downset j; -1 */
    int32_t pair;
    int16_t t, r;    /* indices of tensor degree and replicas of the stage before the rest */
} entry;

typedef struct {
    uint64_t key;       /* 0: free; COARSE besides: by prices, no pack was filled */
    double low_s, high_s; /* the least time is between them */
} cached;

typedef struct {
    tp_layer_space space;
    tp_layer_pair pair;
    tp_layer_pack pack;
    int pairs;
    int *inner, *pair_begin;     /* [pairs] the downset within; [count + 1] */
    fastest *fast;               /* [pairs][degrees][replicas] */
    tp_layer_sums sums;
    tp_layer_prices prices;
    tp_layer_alike alike;
    blocked *slow;               /* [pairs][degrees] */
    int32_t *unfit;              /* [pairs][degrees] least y known at which nothing fits; 0: none is */
    int filled;                  /* the pair that `pair` holds; -1 */
    int64_t packed;              /* the stage that `pack` holds: index into fast; -1 */
    int *need;                   /* [count] devices that the stages before those of a downset need at least */
    entry *front;                /* [count][reach + 1], by s ascending, k descending */
    int *fronts;                 /* [count] */
    int *replicas_to;            /* [reach + 1] how many numbers of replicas are at most that */
    entry *at;                   /* [reach + 1] scratch: least k by s */
    entry *stage;                /* [nodes] of the last plan found, the first stage first */
    int *whole;                  /* [nodes] the downset that each begins */
    int stages;
    tp_layer_choice choice;
    cached *cache;               /* [1 << cache_bits] */
    int cache_bits;
    int64_t searches;
    int64_t asked; /* steps since the last look whether the thread is told to stop */
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

/* The fastest variants of a stage, with time and bytes as a plan's are summed, to the last bit. */
static void
solve_fastest(search *x, int i, int p, int t, int r, fastest *fast)
{
    double a, b;
    fill_pack(x, i, p, t, r);
    fast->time_s = tp_layer_pack_fastest(&x->pack, &a, &b);
    double limit = x->space.graph->memory_bytes;
    int y = largest_fit(a, b, limit, x->space.reach);
    while (y > 0 && tp_layer_pack_bytes(&x->pack, x->pack.choice, y) > limit)
        y--;
    while (y < x->space.reach && tp_layer_pack_bytes(&x->pack, x->pack.choice, y + 1) <= limit)
        y++;
    fast->fits = y;
    fast->known = EXACT;
}

/* The fastest variants of a stage by differences of sums, up to rounding; made when first asked for, which most never are. */
static void
weigh_fastest(search *x, int i, int p, int t, int r, fastest *fast)
{
    const tp_layer_space *s = &x->space;
    double limit = s->graph->memory_bytes;
    tp_layer_sum sum, margin;
    tp_layer_sums_fastest(s, &x->sums, i, x->inner[p], t, r, &sum, &margin);
    fast->time_s = sum.time_s;
    fast->fits = largest_fit(sum.a + margin.a, sum.b + margin.b, limit, s->reach);
    fast->known = NEARLY;
    if (largest_fit(fmax(sum.a - margin.a, 0.0), fmax(sum.b - margin.b, 0.0), limit, s->reach) != fast->fits)
        solve_fastest(x, i, p, t, r, fast);
}

/* The largest y at which the fastest variants of a stage fit; -1 if even they are not within tau. */
static int
fastest_within(search *x, int i, int p, int t, int r, double tau)
{
    const tp_layer_space *s = &x->space;
    fastest *fast = &x->fast[((int64_t)p * s->degrees + t) * s->replicas + r];
    if (fast->known == UNKNOWN) {
        if (tp_layer_sums_slower(s, &x->sums, i, x->inner[p], t, r, tau))
            return -1;
        weigh_fastest(x, i, p, t, r, fast);
    }
    if (fast->known == NEARLY) {
        double margin = x->sums.slack * (x->sums.time_s[tp_layer_sums_at(s, i, t, r)] + fast->time_s);
        if (fast->time_s - margin > tau)
            return -1;
        if (!(fast->time_s + margin <= tau))
            solve_fastest(x, i, p, t, r, fast);
    }
    return fast->known == NEARLY || fast->time_s <= tau ? fast->fits : -1;
}

/* The pack's least time at y, or more than `most`, and its choice. */
static double
solve_pack(search *x, int y, double most)
{
    x->asked += (int64_t)x->pack.nodes * TP_LAYER_POINTS;
    return tp_layer_choice_solve(&x->choice, &x->pack, y, most);
}

/* Is the stage's least time within tau? Its heuristic or its bound mostly says so; if not, the choice is solved. */
static int
within(search *x, int i, int p, int t, int r, int y, double tau)
{
    const tp_layer_space *s = &x->space;
    int32_t *unfit = &x->unfit[(int64_t)p * s->degrees + t];
    int fits = fastest_within(x, i, p, t, r, tau);
    if (fits < 0 || y <= fits)
        return fits >= 0;
    if (*unfit > 0 && y >= *unfit)
        return 0;
    uint64_t key = ((((uint64_t)p * 32 + (uint64_t)t) << 12 | (uint64_t)r) << 14 | (uint64_t)y) + 1;
    cached *cell = &x->cache[(key * 0x9E3779B97F4A7C15u) >> (64 - x->cache_bits)];
    if ((cell->key & ~COARSE) != key) {
        *cell = (cached){key | COARSE, 0.0, INFINITY};
        tp_layer_prices_bound(s, &x->sums, &x->prices, i, x->inner[p], t, r, y, &cell->low_s, &cell->high_s);
    }
    if ((cell->key & COARSE) && cell->low_s <= tau && cell->high_s > tau) {
        fill_pack(x, i, p, t, r);
        *cell = (cached){key, INFINITY, INFINITY};
        if (tp_layer_pack_least_bytes(&x->pack, y) <= s->graph->memory_bytes) {
            cell->high_s = tp_layer_pack_greedy(&x->pack, y);
            cell->low_s = fmin(tp_layer_pack_bound(&x->pack, y), cell->high_s);
        }
    }
    if (cell->low_s == INFINITY)
        *unfit = y;
    if (cell->high_s <= tau || cell->low_s > tau)
        return cell->high_s <= tau;
    fill_pack(x, i, p, t, r);
    double found = solve_pack(x, y, tau);
    cell->low_s = found <= tau ? found : nextafter(tau, INFINITY);
    cell->high_s = found <= tau ? found : cell->high_s;
    return found <= tau;
}

/* The first stage that is like stage p of downset *i, and in *i its downset. */
static int
like_of(const search *x, int *i, int p)
{
    int n = x->alike.nodes, length = *i - x->inner[p];
    if (n == 0)
        return p;
    *i = n - x->alike.first[(n - *i) * n + length - 1];
    return x->pair_begin[*i] + *i - length;
}

/* The index of the first number of replicas, at most `most`, with which the fastest variants of a stage are within tau; a larger
 * index where there is none. */
static int
first_within(search *x, int i, int p, int t, double tau, int most)
{
    const tp_layer_space *s = &x->space;
    blocked *slow = &x->slow[(int64_t)p * s->degrees + t];
    int first = tau <= slow->tau_s ? slow->first : 0, end = x->replicas_to[most], high = end;
    if (tau == slow->tau_s && (slow->found || first >= end))
        return first < end ? first : s->replicas;
    if (tau > slow->tau_s && slow->found && slow->first < end)
        high = slow->first;
    else if (x->sums.faster[t] && first < end && tp_layer_sums_slower(s, &x->sums, i, x->inner[p], t, end - 1, tau))
        first = end;
    while (x->sums.faster[t] && first < high) { /* the sums fall with r */
        int r = (first + high) / 2;
        if (tp_layer_sums_slower(s, &x->sums, i, x->inner[p], t, r, tau))
            first = r + 1;
        else
            high = r;
    }
    while (first < end && fastest_within(x, i, p, t, first, tau) < 0)
        first++;
    *slow = (blocked){tau, (int16_t)first, first < end};
    return first < end ? first : s->replicas;
}

/* Put stage i \ j before each entry of downset j, for each tensor degree with the least d that is fast enough. */
static void
extend(search *x, int i, int p, double tau, int most_devices)
{
    const tp_layer_space *s = &x->space;
    int j = x->inner[p], like_i = i, like = like_of(x, &like_i, p);
    const entry *rests = x->front + (int64_t)j * (s->reach + 1);
    for (int t = 0; t < s->degrees; t++) {
        int tensor = s->degree[t], most = (most_devices - rests[x->fronts[j] - 1].k) / tensor;
        if (most < 1 || !tp_layer_sums_has(s, &x->sums, i, j, t))
            continue;
        int first = first_within(x, like_i, like, t, tau, most < s->reach ? most : s->reach), e = 0;
        for (int end = x->fronts[j]; e < end && first < s->replicas;) { /* to the first that leaves it the devices */
            int middle = (e + end) / 2;
            if (rests[middle].k + s->replica[first] * tensor > most_devices)
                e = middle + 1;
            else
                end = middle;
        }
        for (; e < x->fronts[j] && first < s->replicas; e++) {
            const entry *rest = &rests[e];
            for (int r = first; r < s->replicas; r++) {
                int d = s->replica[r], to = rest->s + d, k = rest->k + d * tensor;
                if (tp_deadline_told_after(&x->asked, 64))
                    return;
                if (to > s->reach || k > most_devices)
                    break;
                if (x->at[to].k <= k)
                    break; /* known as good: it beats every larger d too */
                if (!within(x, like_i, like, t, r, (to + d - 1) / d, tau)) {
                    first = r + 1; /* with more replicas behind it, as of the next entries, it is no faster */
                    continue;
                }
                x->at[to] = (entry){(int16_t)to, (int16_t)k, (int16_t)j, (int16_t)e, p, (int16_t)t, (int16_t)r};
                break;
            }
        }
    }
}

/* Fill need[]: the devices that the stages before those of each downset take at least, as if memory always sufficed for the fastest
 * variants. 0 if all stages together need more than there are. */
static int
look_back(search *x, double tau)
{
    const tp_layer_space *s = &x->space;
    int devices = s->graph->devices;
    for (int j = 0; j < s->count - 1; j++)
        x->need[j] = devices + 1;
    x->need[s->count - 1] = 0;
    for (int i = s->count - 1; i > 0; i--)
        for (int p = x->pair_begin[i]; p < x->pair_begin[i + 1] && x->need[i] < devices; p++) {
            int *need = &x->need[x->inner[p]], like_i = i, like = like_of(x, &like_i, p);
            if (tp_deadline_told_after(&x->asked, 64))
                return 0;
            for (int t = 0; t < s->degrees; t++) {
                int most = (*need - 1 - x->need[i]) / s->degree[t];
                if (most < 1)
                    break; /* degrees ascend */
                if (!tp_layer_sums_has(s, &x->sums, i, x->inner[p], t))
                    continue;
                int first = first_within(x, like_i, like, t, tau, most < s->reach ? most : s->reach);
                if (first < s->replicas)
                    *need = x->need[i] + s->replica[first] * s->degree[t];
            }
        }
    return x->need[0] <= devices;
}

static int
keep_front(search *x, int i)
{
    const tp_layer_space *s = &x->space;
    int kept = 0, least = s->graph->devices + 1;
    entry *front = x->front + (int64_t)i * (s->reach + 1);
    for (int to = 0; to <= s->reach; to++)
        if (x->at[to].k < least) {
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
    return solve_pack(x, y, INFINITY);
}

/* The largest time of a plan with none above tau: of the one on the fewest devices, which is kept as x->stage; INFINITY if there
 * is none, or if the thread is told to stop. */
static double
probe(search *x, double tau)
{
    const tp_layer_space *s = &x->space;
    x->searches++;
    if (!look_back(x, tau))
        return INFINITY;
    x->front[0] = (entry){0, 0, -1, -1, -1, 0, 0};
    x->fronts[0] = 1;
    for (int i = 1; i < s->count; i++) {
        for (int to = 0; to <= s->reach; to++)
            x->at[to].k = INT16_MAX;
        int most = s->graph->devices - x->need[i];
        for (int p = x->pair_begin[i]; p < x->pair_begin[i + 1] && !tp_deadline_was_told(); p++)
            if (x->fronts[x->inner[p]] > 0)
                extend(x, i, p, tau, most);
        if (tp_deadline_was_told())
            return INFINITY;
        keep_front(x, i);
    }
    int i = s->count - 1, at = x->fronts[i] - 1;
    if (at < 0)
        return INFINITY;
    double most = 0.0;
    for (x->stages = 0; i > 0; x->stages++) {
        const entry *e = &x->front[(int64_t)i * (s->reach + 1) + at];
        x->stage[x->stages] = *e;
        x->whole[x->stages] = i;
        most = fmax(most, solve_entry(x, i, e));
        i = e->j;
        at = e->from;
    }
    return most;
}

/* The least device seconds of all nodes, by any degree. */
static double
sum_work(const tp_layer_graph *g)
{
    double sum = 0.0;
    for (int n = 0, v = 0; n < g->nodes; n++) {
        double least = INFINITY;
        for (; v < g->variants && g->node[v] == n; v++)
            least = fmin(least, g->degree[v] * g->time_s[v]);
        sum += least;
    }
    return sum;
}

static tp_status
open_pairs(search *x)
{
    const tp_layer_space *s = &x->space;
    int64_t pairs = 0;
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
    TP_ARENA_TAKE(s->arena, pairs * s->degrees, x->unfit);
    TP_ARENA_TAKE(s->arena, pairs * s->degrees, x->slow);
    for (int i = 0; i < s->count; i++) {
        TP_TRY(tp_deadline_check_after(&x->asked, 4 * (int64_t)i * s->words));
        x->pair_begin[i] = x->pairs;
        for (int j = 0; j < i; j++)
            if (tp_layer_within(s, j, i))
                x->inner[x->pairs++] = j;
    }
    x->pair_begin[s->count] = x->pairs;
    return TP_OK;
}

static tp_status
open_search(search *x, const tp_layer_graph *g, tp_arena *arena)
{
    tp_layer_space *s = &x->space;
    TP_TRY(tp_layer_space_open(g, arena, s));
    TP_TRY(tp_layer_pair_open(s, &x->pair));
    TP_TRY(tp_layer_pack_open(s, &x->pack));
    TP_ARENA_TAKE(arena, s->count, x->need);
    TP_TRY(open_pairs(x));
    TP_TRY(tp_layer_sums_open(s, &x->sums, &x->asked));
    int64_t most = (int64_t)x->pairs * s->degrees * s->replicas * (int64_t)sizeof *x->fast;
    TP_TRY(tp_layer_prices_open(s, most > LISTS ? most : LISTS, &x->prices));
    TP_TRY(tp_layer_alike_open(s, 0, 0, &x->alike));
    x->filled = -1;
    x->packed = -1;
    TP_ARENA_TAKE(arena, (int64_t)s->count * (s->reach + 1), x->front);
    TP_ARENA_TAKE(arena, s->count, x->fronts);
    TP_ARENA_TAKE(arena, s->reach, x->at);
    TP_ARENA_TAKE(arena, s->reach, x->replicas_to);
    TP_ARENA_TAKE(arena, g->nodes, x->stage);
    TP_ARENA_TAKE(arena, g->nodes, x->whole);
    for (int d = 1, r = 0; d <= s->reach; d++)
        x->replicas_to[d] = r += r < s->replicas && s->replica[r] == d;
    TP_TRY(tp_layer_choice_open(s, x->sums.slack, &x->choice));
    for (x->cache_bits = 8; x->cache_bits < MOST_CACHE_BITS && 1 << x->cache_bits < 2 * x->pairs * s->degrees; x->cache_bits++)
        ;
    TP_ARENA_TAKE(arena, (int64_t)1 << x->cache_bits, x->cache);
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

/* The least time per sample and a bound that no plan is below. Bisection halves the open interval; it ends when there is no plan
 * just below the best one's time. */
static tp_status
find_least(search *x, tp_layer_plan *plan)
{
    double low = sum_work(x->space.graph) / x->space.graph->devices * (1.0 - 1e-9), work = low, high = first_plan(x, &low);
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
    plan->optimal = !x->choice.capped;
    plan->lower_bound_s = plan->optimal ? high * (1.0 - 1e-12) : work;
    return tp_deadline_check_told();
}

static void
write_plan(search *x, tp_layer_plan *plan)
{
    for (int k = 0; k < x->stages; k++) {
        const entry *e = &x->stage[k];
        fill_pair(x, x->whole[k], e->pair);
        solve_entry(x, x->whole[k], e);
        tp_layer_plan_put(&x->space, &x->pair, &x->pack, e->t, x->space.replica[e->r], plan);
    }
    tp_layer_plan_finish(&x->space, plan);
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
    out->knapsacks = x.choice.knapsacks;
    tp_arena_close(&arena);
    out->seconds = (double)(tp_clock_ns() - start) * 1e-9;
    return status;
}
