/* Piper's dynamic programme (NeurIPS 2021, section 4 and appendix; https://github.com/msr-fiddle/piper, MIT, read for its
 * choices, not copied): best[I][k][s], the least time per sample of downset I on at most k devices with at most s replicas
 * in all its stages, is the least over the first stage I \ J, its tensor degree t and replicas d, of
 *     max(best[J][k - t d][s - d], time(I \ J, t, d, s)).
 * The first is a falling staircase in s and the second rises, so only the s at which the first drops are tried (the authors'
 * FASTER_DP_IMPLEMENTATION), and the result is made a staircase again. */
#include "csrc/plan/layer_space.h"

#include <math.h>
#include <stdlib.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"

typedef struct {
    tp_layer_space space;
    tp_layer_pair pair;
    tp_layer_pack pack;
    int k_stride, s_stride; /* devices + 1, reach + 1 */
    double *best;           /* [count][k_stride][s_stride] */
    uint16_t *drop;         /* the same: where best falls, ascending; drops of them */
    uint16_t *drops;        /* [count][k_stride] */
    double *time;           /* [reach + 2] by y, in ticks */
    int64_t pairs, knapsacks, asked; /* asked: steps since somebody was asked whether to stop */
} piper;

static double *
row_of(const piper *p, int i, int k)
{
    return p->best + ((int64_t)i * p->k_stride + k) * p->s_stride;
}

/* The time of the stage at every y, INFINITY from where nothing fits. */
static void
solve_stage(piper *p, int t, int d)
{
    int most = p->space.reach / d + 1, fits = 1;
    tp_layer_pack_fill(&p->space, &p->pair, t, d, &p->pack);
    for (int y = 1; y <= most; y++) {
        p->time[y] = fits ? tp_layer_pack_greedy(&p->pack, y) : INFINITY;
        fits = fits && p->time[y] < INFINITY;
        p->knapsacks += fits;
    }
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

static tp_status
fill_table(piper *p)
{
    const tp_layer_space *s = &p->space;
    for (int64_t cell = 0; cell < (int64_t)s->count * p->k_stride * p->s_stride; cell++)
        p->best[cell] = cell < (int64_t)p->k_stride * p->s_stride ? 0.0 : INFINITY;
    make_staircase(p, 0);
    for (int i = 1; i < s->count; i++) {
        for (int j = 0; j < i; j++) {
            if (!tp_layer_within(s, j, i))
                continue;
            TP_TRY(tp_deadline_check("piper"));
            p->pairs++;
            tp_layer_pair_fill(s, i, j, &p->pair);
            for (int t = 0; t < s->degrees; t++)
                for (int r = 0; (p->pair.degrees >> t & 1) && r < s->replicas; r++) {
                    int d = s->replica[r];
                    if (d * s->degree[t] > s->graph->devices)
                        break;
                    solve_stage(p, t, d);
                    extend(p, i, j, s->degree[t], d);
                }
        }
        make_staircase(p, i);
    }
    return TP_OK;
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
        tp_layer_pair_fill(space, i, j, &p->pair);
        for (int t = 0; t < space->degrees; t++)
            for (int r = 0; (p->pair.degrees >> t & 1) && r < space->replicas; r++) {
                int d = space->replica[r], left = *k - d * space->degree[t], y = (*s + d - 1) / d;
                if (d > *s || left < 0)
                    break;
                tp_layer_pack_fill(space, &p->pair, t, d, &p->pack);
                double time = tp_layer_pack_greedy(&p->pack, y);
                if (fmax(time, row_of(p, j, left)[*s - d]) != value)
                    continue;
                tp_layer_plan_put(space, &p->pair, &p->pack, t, d, plan);
                *k = left;
                *s -= d;
                return j;
            }
    }
    return -1;
}

/* Seconds of a tick, in which sums stay exact. Weights do not count, since their exchange may take longer by any factor. 0: it
 * would leave the range of a double, or nothing takes time. */
static double
tick_of(const tp_layer_graph *g)
{
    double bytes = 0.0, work = 0.0;
    for (int e = 0; e < g->edges; e++)
        bytes += g->edge_bytes[e];
    for (int v = 0; v < g->variants; v++)
        work += g->time_s[v];
    double tick = ldexp(work + bytes / g->bandwidth_Bps, -46);
    return tick >= 1e-290 && tick <= 1e290 ? tick : 0.0;
}

static tp_status
piper_in(tp_arena *arena, const tp_layer_graph *graph, tp_layer_plan *plan)
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
    p.time = memory;
    TP_TRY(fill_table(&p));
    plan->pairs = p.pairs;
    plan->knapsacks = p.knapsacks;
    int i = p.space.count - 1, k = graph->devices, s = p.space.reach;
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
tp_plan_piper(const tp_layer_graph *graph, tp_layer_plan *out)
{
    int64_t start = tp_clock_ns();
    *out = (tp_layer_plan){0};
    TP_TRY(tp_layer_graph_check(graph));
    tp_arena arena;
    TP_TRY(tp_arena_open(&arena));
    tp_status status = piper_in(&arena, graph, out);
    tp_arena_close(&arena);
    out->seconds = (double)(tp_clock_ns() - start) * 1e-9;
    return status;
}
