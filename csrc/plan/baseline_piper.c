/* Piper's dynamic programme (NeurIPS 2021, section 4 and appendix; https://github.com/msr-fiddle/piper, MIT, read for its
 * choices, not copied): best[I][k][s], the least time per sample of downset I on at most k devices with at most s replicas
 * in all its stages, is the least over the first stage I \ J, its tensor degree t and replicas d, of
 *     max(best[J][k - t d][s - d], time(I \ J, t, d, s)).
 * The first is a falling staircase in s and the second rises, so only the s at which the first drops are tried (the authors'
 * FASTER_DP_IMPLEMENTATION), and the result is made a staircase again.
 *
 * Ours is what spares pairs, where not all are asked for: stages that take longer than a cap, by a floor under their times, are
 * passed over. A plan within the cap is what the whole table would have given: none of its stages, nor of those that tie with
 * them, was passed over. The cap begins at the least that any plan takes, which the exact planner finds in a fraction of the
 * time; the heuristic seldom needs more, and where there is no plan within the cap it grows. Of K stages of a chain about one
 * pair in K / 2 is left, and those are the short ones; stages of like nodes are solved once. */
#include "csrc/plan/layer_alike.h"

#include <math.h>
#include <stdlib.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"

enum { ROUNDS = 4, KEPT = 1 << 20 }; /* KEPT: doubles of stages' times, where the table is smaller */
static const double cap_of_round[ROUNDS] = {1.0 + 1e-9, 1.02, 1.2, 2.0}; /* of the least that any plan takes */

typedef struct {
    tp_layer_space space;
    tp_layer_pair pair;
    tp_layer_pack pack;
    tp_layer_alike alike;
    int k_stride, s_stride; /* devices + 1, reach + 1 */
    double *best;           /* [count][k_stride][s_stride] */
    uint16_t *drop;         /* the same: where best falls, ascending; drops of them */
    uint16_t *drops;        /* [count][k_stride] */
    double *time, *own_time; /* [reach + 2] by y, in ticks */
    double *floor;          /* [degrees][replicas][count] no choice of a downset's nodes takes less */
    int *lacking;           /* [degrees][count] a downset's nodes that lack the degree */
    double cap;             /* stages that take longer are passed over; passed: some were */
    int passed;
    int64_t pairs, knapsacks, asked; /* asked: steps since somebody was asked whether to stop */
} piper;

static double *
row_of(const piper *p, int i, int k)
{
    return p->best + ((int64_t)i * p->k_stride + k) * p->s_stride;
}

/* p->time: of stage i \ j at every y, INFINITY from where nothing fits. *filled: p->pair is the stage's. */
static tp_status
solve_stage(piper *p, int i, int j, int t, int r, int *filled)
{
    int d = p->space.replica[r], most = p->space.reach / d + 1;
    double *known = NULL;
    TP_TRY(tp_layer_alike_of(&p->space, &p->alike, i, j, &known));
    p->time = known == NULL ? p->own_time : known + (int64_t)(t * p->space.replicas + r) * (p->space.reach + 2);
    if (known != NULL && !isnan(p->time[1]))
        return TP_OK;
    if (!*filled)
        tp_layer_pair_fill(&p->space, i, j, &p->pair);
    *filled = 1;
    tp_layer_pack_fill(&p->space, &p->pair, t, d, &p->pack);
    tp_layer_pack_greedy_each(&p->pack, most, p->time);
    for (int y = 1; y <= most; y++)
        p->knapsacks += p->time[y] < INFINITY;
    return TP_OK;
}

static void
lower(double *value, double to)
{
    if (to < *value)
        *value = to;
}

/* best[i] by a first stage i \ j of d replicas of `tensor` devices, for every k. */
static void
extend(piper *p, int i, int j, int tensor, int d)
{
    int reach = p->space.reach, devices = p->space.graph->devices;
    for (int k = d * tensor; k <= devices; k++) {
        const double *rest = row_of(p, j, k - d * tensor);
        const uint16_t *drop = p->drop + (rest - p->best);
        double *to = row_of(p, i, k);
        int low = 0, high = p->drops[(int64_t)j * p->k_stride + k - d * tensor];
        while (low < high) { /* the first drop from which on the stage itself is what takes longest */
            int middle = (low + high) / 2, f = drop[middle];
            if (f + d <= reach && rest[f] > p->time[(f + d + d - 1) / d])
                low = middle + 1;
            else
                high = middle;
        }
        for (int u = 0; u < low; u++)
            lower(&to[drop[u] + d], rest[drop[u]]);
        if (low < p->drops[(int64_t)j * p->k_stride + k - d * tensor] && drop[low] + d <= reach)
            lower(&to[drop[low] + d], fmax(rest[drop[low]], p->time[(drop[low] + d + d - 1) / d]));
    }
}

static void
make_staircase(piper *p, int i)
{
    for (int k = 0; k < p->k_stride; k++) {
        double *row = row_of(p, i, k);
        uint16_t *drop = p->drop + (row - p->best);
        int drops = 0;
        for (int s = 0; s < p->s_stride; s++) {
            if (k > 0)
                lower(&row[s], row[s - p->s_stride]);
            if (s > 0)
                lower(&row[s], row[s - 1]);
            if (row[s] < (s > 0 ? row[s - 1] : INFINITY))
                drop[drops++] = (uint16_t)s;
        }
        p->drops[(int64_t)i * p->k_stride + k] = (uint16_t)drops;
    }
}

/* The least time of one node, whatever is around it: crossing bytes come on top. INFINITY: it lacks the degree. */
static double
least_of_node(const tp_layer_space *s, int n, int t, int d)
{
    double least = INFINITY;
    for (int v = s->begin[n * s->degrees + t]; v < s->graph->variants; v++) {
        if (s->graph->node[v] != n || s->graph->degree[v] != s->degree[t])
            break;
        least = fmin(least, tp_layer_time(s, v, 0.0, d));
    }
    return least;
}

static int
lacks(const tp_layer_space *s, int n, int t)
{
    int v = s->begin[n * s->degrees + t];
    return v == s->graph->variants || s->graph->node[v] != n || s->graph->degree[v] != s->degree[t];
}

/* Bit: every node of stage i \ j has a variant of this degree. */
static unsigned
degrees_of(const piper *p, int i, int j)
{
    const tp_layer_space *s = &p->space;
    unsigned degrees = 0;
    for (int t = 0; t < s->degrees; t++)
        degrees |= (unsigned)(p->lacking[t * s->count + i] == p->lacking[t * s->count + j]) << t;
    return degrees;
}

static tp_status
lay_floor(piper *p)
{
    const tp_layer_space *s = &p->space;
    double *node = NULL;
    int64_t asked = 0;
    TP_ARENA_TAKE(s->arena, s->graph->nodes, node);
    TP_ARENA_TAKE(s->arena, (int64_t)s->degrees * s->replicas * s->count, p->floor);
    TP_ARENA_TAKE(s->arena, (int64_t)s->degrees * s->count, p->lacking);
    for (int t = 0; t < s->degrees; t++)
        for (int r = 0; r < s->replicas; r++) {
            double *row = p->floor + (int64_t)(t * s->replicas + r) * s->count;
            for (int n = 0; n < s->graph->nodes; n++) {
                double least = least_of_node(s, n, t, s->replica[r]);
                node[n] = least < INFINITY ? least : 0.0;
            }
            for (int i = 0; i < s->count; i++) {
                TP_TRY(tp_deadline_check_after(&asked, s->graph->nodes));
                for (int n = 0; n < s->graph->nodes; n++) {
                    int within = (int)(s->set[(int64_t)i * s->words + (n >> 6)] >> (n & 63) & 1);
                    row[i] += within ? node[n] : 0.0;
                    p->lacking[t * s->count + i] += r == 0 && within && lacks(s, n, t);
                }
            }
        }
    return TP_OK;
}

/* May stage i \ j take no more than that? The margin is for the sums' rounding. */
static int
may_take(const piper *p, int i, int j, int t, int r, double most)
{
    const double *row = p->floor + (int64_t)(t * p->space.replicas + r) * p->space.count;
    return !(row[i] - row[j] - 1e-12 * row[i] > most);
}

static int
may_take_anyhow(const piper *p, int i, int j, double most)
{
    const tp_layer_space *s = &p->space;
    for (int t = 0; t < s->degrees; t++)
        for (int r = 0; r < s->replicas && s->replica[r] * s->degree[t] <= s->graph->devices; r++)
            if (may_take(p, i, j, t, r, most))
                return 1;
    return 0;
}

/* In ticks, a little more than no plan takes less than. It need not be right: with too small a cap there is another round, with
 * too large a one fewer stages are passed over. */
static tp_status
least_plan(const piper *p, double *least)
{
    tp_layer_plan exact;
    tp_status status = tp_plan_layers(p->space.graph, &exact);
    double tick = p->space.tick_s;
    *least = exact.time_per_sample_s / (tick > 0.0 ? tick : 1.0) + (tick > 0.0 ? p->space.graph->nodes : 0);
    tp_layer_plan_free(&exact);
    return status;
}

static tp_status
try_stage(piper *p, int i, int j)
{
    const tp_layer_space *s = &p->space;
    unsigned degrees = degrees_of(p, i, j);
    int filled = 0;
    for (int t = 0; t < s->degrees; t++)
        for (int r = 0; (degrees >> t & 1) && r < s->replicas; r++) {
            int d = s->replica[r];
            if (d * s->degree[t] > s->graph->devices)
                break;
            if (!may_take(p, i, j, t, r, p->cap)) {
                p->passed = 1;
                continue;
            }
            TP_TRY(solve_stage(p, i, j, t, r, &filled));
            extend(p, i, j, s->degree[t], d);
        }
    return TP_OK;
}

static tp_status
fill_table(piper *p)
{
    const tp_layer_space *s = &p->space;
    p->pairs = p->passed = 0;
    for (int64_t cell = 0; cell < (int64_t)s->count * p->k_stride * p->s_stride; cell++)
        p->best[cell] = cell < (int64_t)p->k_stride * p->s_stride ? 0.0 : INFINITY;
    make_staircase(p, 0);
    for (int i = 1; i < s->count; i++) {
        for (int j = 0; j < i; j++) {
            if (!tp_layer_within(s, j, i))
                continue;
            TP_TRY(tp_deadline_check("piper"));
            p->pairs++;
            if (may_take_anyhow(p, i, j, p->cap))
                TP_TRY(try_stage(p, i, j));
            else
                p->passed = 1;
        }
        make_staircase(p, i);
    }
    return TP_OK;
}

/* The time of stage i \ j at y, where it is known, or else -1. */
static double
known_time(const piper *p, int i, int j, int t, int r, int y)
{
    const double *known = tp_layer_alike_known(&p->alike, i, j);
    double time = known == NULL ? NAN : known[(int64_t)(t * p->space.replicas + r) * (p->space.reach + 2) + y];
    return time < INFINITY ? time : -1.0;
}

/* Did best[i][k][s] come about by a first stage i \ j? Writes it, and k and s of the rest. */
static int
is_stage(piper *p, int i, int j, int *k, int *s, tp_layer_plan *plan)
{
    const tp_layer_space *space = &p->space;
    double value = row_of(p, i, *k)[*s];
    unsigned degrees = degrees_of(p, i, j);
    for (int t = 0; t < space->degrees; t++)
        for (int r = 0; (degrees >> t & 1) && r < space->replicas; r++) {
            int d = space->replica[r], left = *k - d * space->degree[t], y = (*s + d - 1) / d;
            if (d > *s || left < 0)
                break;
            double rest = row_of(p, j, left)[*s - d], known = known_time(p, i, j, t, r, y);
            if (rest > value || !may_take(p, i, j, t, r, value) || (known >= 0.0 && fmax(known, rest) != value))
                continue;
            tp_layer_pair_fill(space, i, j, &p->pair);
            tp_layer_pack_fill(space, &p->pair, t, d, &p->pack);
            if (fmax(tp_layer_pack_greedy(&p->pack, y), rest) != value)
                continue;
            tp_layer_plan_put(space, &p->pair, &p->pack, t, d, plan);
            *k = left;
            *s -= d;
            return 1;
        }
    return 0;
}

/* The stage by which best[i][k][s] came about, where no smaller k or s has the same value; its downset j, or -1, also where the
 * thread is told to stop. */
static int
find_stage(piper *p, int i, int *k, int *s, tp_layer_plan *plan)
{
    const tp_layer_space *space = &p->space;
    double value = row_of(p, i, *k)[*s];
    while (*k > 0 && row_of(p, i, *k - 1)[*s] == value)
        (*k)--;
    while (*s > 0 && row_of(p, i, *k)[*s - 1] == value)
        (*s)--;
    for (int j = 0; j < i; j++) {
        if (!tp_layer_within(space, j, i))
            continue;
        if (tp_deadline_told_after(&p->asked, 16 * (int64_t)space->graph->variants * (1 + space->replicas)))
            return -1;
        if (may_take_anyhow(p, i, j, value) && is_stage(p, i, j, k, s, plan))
            return j;
    }
    return -1;
}

/* Seconds of a tick, in which sums stay exact up to 128 times all that counts. Weights do not count, since their exchange may take
 * longer by any factor; nor what an edge or a variant takes beyond all nodes at their fastest, since it may be there to forbid a
 * cut or that variant: in ticks of it the others would take no time. 0: it would leave the range of a double, or nothing takes
 * time. */
static double
tick_of(const tp_layer_graph *g)
{
    double least = 0.0, work = 0.0;
    for (int n = 0, v = 0; n < g->nodes; n++) {
        double fastest = INFINITY;
        for (; v < g->variants && g->node[v] == n; v++)
            fastest = fmin(fastest, g->time_s[v]);
        least += fastest;
    }
    double most = least > 0.0 ? least : INFINITY;
    for (int v = 0; v < g->variants; v++)
        work += fmin(g->time_s[v], most);
    for (int e = 0; e < g->edges; e++)
        work += fmin(g->edge_bytes[e] / g->bandwidth_Bps, most);
    double tick = ldexp(work, -46);
    return tick >= 1e-290 && tick <= 1e290 ? tick : 0.0;
}

static tp_status
piper_in(tp_arena *arena, const tp_layer_graph *graph, int exhaustive, tp_layer_plan *plan)
{
    piper p = {0};
    void *memory = NULL;
    TP_TRY(tp_layer_space_open(graph, arena, &p.space));
    p.space.tick_s = tick_of(graph);
    TP_TRY(tp_layer_pair_open(&p.space, &p.pair));
    TP_TRY(tp_layer_pack_open(&p.space, &p.pack));
    TP_TRY(tp_layer_plan_open(&p.space, plan));
    p.k_stride = graph->devices + 1;
    p.s_stride = p.space.reach + 1;
    size_t rows = (size_t)p.space.count * (size_t)p.k_stride;
    TP_TRY(tp_arena_take(arena, rows * (size_t)p.s_stride, sizeof *p.best, &memory));
    p.best = memory;
    TP_TRY(tp_arena_take(arena, rows * (size_t)p.s_stride, sizeof *p.drop, &memory));
    p.drop = memory;
    TP_TRY(tp_arena_take(arena, rows, sizeof *p.drops, &memory));
    p.drops = memory;
    TP_TRY(tp_arena_take(arena, (size_t)p.space.reach + 2, sizeof *p.time, &memory));
    p.own_time = memory;
    int64_t cells = (int64_t)rows * p.s_stride;
    if (!exhaustive)
        TP_TRY(tp_layer_alike_open(&p.space, p.space.degrees * p.space.replicas * (p.space.reach + 2), cells > KEPT ? cells : KEPT,
                                   &p.alike));
    TP_TRY(lay_floor(&p));
    int i = p.space.count - 1, k = graph->devices, s = p.space.reach;
    double least = INFINITY;
    if (!exhaustive)
        TP_TRY(least_plan(&p, &least));
    int round = 0;
    for (; round == 0 || (p.passed && !(row_of(&p, i, k)[s] <= p.cap)); round++) {
        p.cap = round < ROUNDS && !exhaustive ? cap_of_round[round] * least : INFINITY;
        TP_TRY(fill_table(&p));
    }
    plan->pairs = p.pairs;
    plan->searches = round;
    plan->knapsacks = p.knapsacks;
    if (!(row_of(&p, i, k)[s] < INFINITY))
        return tp_layer_infeasible(&p.space, &p.pair, &p.pack);
    while (i > 0) {
        i = find_stage(&p, i, &k, &s, plan);
        TP_TRY(tp_deadline_check_told());
        if (i < 0)
            return tp_fail(TP_EINTERNAL, "Piper's table has a value that no stage explains");
    }
    tp_layer_plan_finish(&p.space, plan);
    return TP_OK;
}

tp_status
tp_plan_piper(const tp_layer_graph *graph, int exhaustive, tp_layer_plan *out)
{
    int64_t start = tp_clock_ns();
    *out = (tp_layer_plan){0};
    TP_TRY(tp_layer_graph_check(graph));
    tp_arena arena;
    TP_TRY(tp_arena_open(&arena));
    tp_status status = piper_in(&arena, graph, exhaustive, out);
    tp_arena_close(&arena);
    out->seconds = (double)(tp_clock_ns() - start) * 1e-9;
    return status;
}
