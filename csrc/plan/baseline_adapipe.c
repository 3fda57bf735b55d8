/* AdaPipe (Sun et al., ASPLOS 2024), NOT HELD AGAINST THE PAPER: of its text only the abstract was found (openreview.net,
 * T4q1IUGWgq, and pacman.cs.tsinghua.edu.cn), of its code nothing. The abstract names the two parts below, recomputation that
 * fills each stage's memory and stages that balance what it costs; papers that cite it say as much and no more (layers are
 * distributed, and recomputed, by cost and memory). The knapsack, the three phases and one best suffix for each state are
 * recalled, the equations are derived here for 1F1B, and that is what the tests hold.
 *
 * Recomputation: for blocks [i, j) on stage k, bytes (limit - static - transient) / copies may be kept for a micro-batch; a
 * 0/1 knapsack over the blocks keeps those that avoid most recomputation. Sizes count in units of their greatest common
 * divisor where that makes at most UNITS of them (then it is exact), else of total / UNITS, rounded up (then it is safe);
 * what is over the limit by itself is no part of it. One table for each i, extended over j, serves every stage, and every
 * later i as far as its blocks are the same. A model of like layers has few of those, but for the last block, which is
 * another: one table from there back serves all [i, blocks).
 *
 * Partition: with W_k the seconds until stage k begins its first backward, E_k the seconds from its last forward's start to
 * its last backward's end on the way down, and M_k the slowest stage from k on,
 *     W_k = F_k + max(W_{k+1} + B_{k+1} + 2 c, (K - k - 1) F_k)
 *     E_k = B_k + max(E_{k+1} + F_{k+1} + 2 c, (K - k - 1) B_k)
 *     M_k = max(M_{k+1}, F_k + B_k)
 *     step = W_0 + E_0 + (m - K) M_0,   which is (m + K - 1) (F + B) for equal stages without messages.
 * For m < K the last factor is negative, as in the closed form. For each (k, i) the suffix of least
 * W_k + E_k + (m - (K - k)) M_k is kept, one each: near-optimal. */
#include "csrc/plan/baseline_chain.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

enum { UNITS = 4096 };

typedef struct {
    double w, e, m, f, b; /* of a suffix; f, b: of its first stage */
    double cost;
    int cut;              /* its first stage ends here; 0: there is no such plan */
} suffix;

typedef struct {
    const tp_chain_sums *sums;
    int stages, units;
    double unit;
    int *size;       /* [blocks] in units */
    double *again;   /* [blocks] seconds to recompute, huge ones less (lower_huge); NULL: none can be */
    int lowered;
    int *known;      /* [blocks] extra[i][j] is there for j up to known[i] */
    int *like;       /* [blocks] of how many blocks the table that is made is i's, too */
    int *kind, kinds; /* [stages] neighbours that hold as many micro-batches are of a kind */
    double *extra;   /* [blocks][kinds][blocks - i]: least recomputation of [i, j), j > i, by stage, INFINITY: it does not fit */
    int taken;       /* gain[] is of blocks `from` up to here */
    double *gain;    /* [units + 1] seconds avoided */
    double *next;    /* [units + 1] scratch */
    suffix *best;    /* [stages + 1][blocks + 1] */
    int64_t steps;
} ada;

static int
by_seconds(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Beside seconds that forbid a recomputation others would be none in a sum: what is over 2^20 times all that is less is more than
 * a step of that can be, and so is what is larger still, of that in turn: no more, or a few in turn would be too much in a sum. */
static tp_status
lower_huge(ada *p, tp_arena *arena)
{
    const tp_chain_sums *s = p->sums;
    const double *given = s->chain->recompute_s;
    int n = s->chain->blocks;
    double *sorted, below = s->forward[n] + s->backward[n], factor = 1.0;
    double most = fmin(0x1p20, 4.0 * ((double)s->chain->micros + p->stages));
    if (given == NULL)
        return TP_OK;
    TP_ARENA_TAKE(arena, n, p->again);
    TP_ARENA_TAKE(arena, n, sorted);
    memcpy(p->again, given, (size_t)n * sizeof *given);
    memcpy(sorted, given, (size_t)n * sizeof *given);
    qsort(sorted, (size_t)n, sizeof *sorted, by_seconds);
    for (int i = 0; i < n; i++) {
        if (below > 0.0 && sorted[i] * factor > 0x1p20 * below) {
            factor = most * below / sorted[i];
            p->lowered = 1;
            for (int k = 0; k < n; k++)
                p->again[k] = given[k] >= sorted[i] ? given[k] * factor : p->again[k];
        }
        below += sorted[i] * factor;
    }
    return TP_OK;
}

static double
common_divisor(double a, double b)
{
    while (b > 0.0) {
        double rest = fmod(a, b);
        a = b;
        b = rest;
    }
    return a;
}

/* Else it is recomputed wherever it is, and no unit is made of it. */
static int
may_keep(const tp_chain *c, int i)
{
    return c->activation_bytes[i] <= c->limit_bytes;
}

static void
choose_unit(ada *p)
{
    const tp_chain *c = p->sums->chain;
    double total = 0.0, divisor = 0.0;
    for (int i = 0; i < c->blocks; i++)
        total += may_keep(c, i) ? c->activation_bytes[i] : 0.0;
    int whole = total <= 9e15;
    for (int i = 0; i < c->blocks && whole; i++) {
        if (!may_keep(c, i))
            continue;
        whole = c->activation_bytes[i] == floor(c->activation_bytes[i]);
        divisor = common_divisor(c->activation_bytes[i], divisor);
    }
    p->unit = whole && divisor > 0.0 && total / divisor <= (double)UNITS ? divisor : total / (double)UNITS;
    for (int i = 0; i < c->blocks; i++) {
        if (!may_keep(c, i)) {
            p->size[i] = INT_MAX;
            continue;
        }
        p->size[i] = p->unit > 0.0 ? (int)ceil(c->activation_bytes[i] / p->unit * (1.0 - 1e-12)) : 0;
        p->units += p->size[i];
    }
}

/* Units that a stage of `copies` micro-batches may keep of one where so many bytes are left without any; -1 if it does not even fit
 * without. */
static int
room_of(const ada *p, double left, int copies)
{
    if (left < 0.0)
        return -1;
    double units = p->unit > 0.0 ? left / copies / p->unit * (1.0 + 1e-14) : 0.0;
    return units < p->units ? (int)units : p->units;
}

static double
left_of(const ada *p, int i, int j)
{
    return p->sums->chain->limit_bytes - tp_chain_bytes(p->sums, i, j, 0.0, 1);
}

/* next[0 .. count) of gain[] and of what is gained with the item: from one array to another, so that it is done with vectors. */
static void
take_in(const double *restrict gain, const double *restrict before, double value, int count, double *restrict next)
{
    for (int u = 0; u < count; u++) {
        double with = before[u] + value;
        next[u] = tp_chain_is_less(gain[u], with) ? with : gain[u];
    }
}

/* gain[] with block i taken in. */
static void
add_item(ada *p, int i)
{
    int size = p->size[i];
    double *next = p->next;
    if (size > p->units)
        return;
    memcpy(next, p->gain, (size_t)size * sizeof *next);
    take_in(p->gain + size, p->gain, p->again[i], p->units + 1 - size, next + size);
    p->next = p->gain;
    p->gain = next;
}

/* How many blocks from i on are, to the bit, those from `from` on. */
static int
same_from(const ada *p, int from, int i)
{
    const double *again = p->again;
    int same = 0;
    while (i + same < p->sums->chain->blocks && p->size[from + same] == p->size[i + same] &&
           (again == NULL || again[from + same] == again[i + same]))
        same++;
    return same;
}

static double *
extra_at(const ada *p, int k, int i, int j)
{
    int64_t n = p->sums->chain->blocks, before = i * n - (int64_t)i * (i - 1) / 2; /* of earlier i, of a kind */
    return &p->extra[before * p->kinds + p->kind[k] * (n - i) + (j - i - 1)];
}

/* gain[] of all blocks up to `end`: only where somebody asks. step: 1, or -1 from the last one back. */
static void
take_until(ada *p, int end, int step)
{
    for (; p->taken != end; p->taken += step)
        add_item(p, step > 0 ? p->taken : p->taken - 1);
}

/* extra[i][j] of the stages that may have [i, j); gain[] shall be of blocks like it, up to `end`, `all` the seconds to make them
 * all again. */
static void
put_extra(ada *p, int i, int j, int end, int step, double all)
{
    const tp_chain *c = p->sums->chain;
    int first = p->stages - 1 - (c->blocks - j), last = i < p->stages ? i : p->stages - 1;
    double fixed = p->sums->fixed[j] - p->sums->fixed[i], kept = tp_chain_kept(p->sums, i, j);
    double transient = tp_chain_transient(c, i, j), left = left_of(p, i, j);
    p->steps += p->stages;
    for (int k = first > 0 ? first : 0; k <= last; k++) {
        if (k > first && k > 0 && p->kind[k] == p->kind[k - 1])
            continue;
        int copies = tp_chain_copies(c, p->stages, k), room;
        double *extra = extra_at(p, k, i, j);
        *extra = INFINITY;
        if (c->limit_bytes <= 0.0 || fixed + copies * kept + transient <= c->limit_bytes)
            *extra = 0.0;
        else if (c->recompute_s != NULL && (room = room_of(p, left, copies)) >= 0) {
            take_until(p, end, step);
            *extra = fmax(all - p->gain[room], 0.0);
        }
    }
}

/* One table for block `from`, and for every later one as far as its blocks are the same: known[i] says how far that is done. */
static tp_status
solve_from(ada *p, int from)
{
    const tp_chain *c = p->sums->chain;
    int n = c->blocks;
    double all = 0.0;
    memset(p->gain, 0, (size_t)(p->units + 1) * sizeof *p->gain);
    p->taken = from;
    for (int i = from; i < n; i++)
        p->like[i] = p->known[i] < n ? same_from(p, from, i) : 0;
    for (int j = from + 1; j <= n; j++) {
        TP_TRY(tp_deadline_check("adapipe"));
        all += p->again != NULL ? p->again[j - 1] : 0.0;
        for (int i = from; i + j - from <= n; i++)
            if (p->like[i] >= j - from && p->known[i] < i + j - from) {
                put_extra(p, i, i + j - from, j, 1, all);
                p->known[i] = i + j - from;
            }
    }
    return TP_OK;
}

static tp_status
solve_knapsacks(ada *p)
{
    const tp_chain *c = p->sums->chain;
    int n = c->blocks;
    double all = 0.0;
    for (int i = 0; i < n; i++)
        p->known[i] = i;
    for (int i = 0; i < n; i++)
        if (p->known[i] < (i == 0 ? n : n - 1))
            TP_TRY(solve_from(p, i));
    memset(p->gain, 0, (size_t)(p->units + 1) * sizeof *p->gain);
    p->taken = n;
    for (int i = n - 1; i >= 0; i--) {
        TP_TRY(tp_deadline_check("adapipe"));
        all += p->again != NULL ? p->again[i] : 0.0;
        if (p->known[i] < n)
            put_extra(p, i, n, i, -1, all);
    }
    return TP_OK;
}

static double
extra_of(const ada *p, int k, int i, int j)
{
    return *extra_at(p, k, i, j);
}

static inline double
larger(double a, double b)
{
    return a > b ? a : b;
}

/* Stage k on [i, j) in front of the suffix that begins at j. */
static inline suffix
put_before(const ada *p, int k, int i, int j, double extra, const suffix *rest)
{
    const tp_chain_sums *s = p->sums;
    int behind = p->stages - 1 - k;
    double comm = 2.0 * s->chain->comm_s;
    suffix x = {.f = s->forward[j] - s->forward[i], .b = s->backward[j] - s->backward[i] + extra, .cut = j};
    x.w = x.f;
    x.e = x.b;
    x.m = x.f + x.b;
    if (behind > 0) {
        x.w += larger(rest->w + rest->b + comm, behind * x.f);
        x.e += larger(rest->e + rest->f + comm, behind * x.b);
        x.m = larger(x.m, rest->m);
    }
    x.cost = x.w + x.e + (s->chain->micros - (behind + 1)) * x.m;
    return x;
}

/* The best of stage k from block i on: what does not fit does not with more blocks either. */
static suffix
best_from(ada *p, int k, int i)
{
    int n = p->sums->chain->blocks, last = k == p->stages - 1, end = n - (p->stages - 1 - k);
    const suffix *behind = &p->best[(k + 1) * (n + 1)];
    const double *extra = extra_at(p, k, i, i + 1); /* by j - i - 1 */
    suffix best = {0};
    for (int j = last ? n : i + 1; j <= end && extra[j - i - 1] < INFINITY; j++) {
        if (!last && behind[j].cut == 0)
            continue;
        suffix x = put_before(p, k, i, j, extra[j - i - 1], &behind[j]);
        p->steps++;
        if (best.cut == 0 || x.cost < best.cost - 1e-12 * (best.w + best.e)) /* the cost may be negative */
            best = x;
    }
    return best;
}

static tp_status
fill_suffixes(ada *p)
{
    int n = p->sums->chain->blocks;
    for (int k = p->stages - 1; k >= 0; k--) {
        TP_TRY(tp_deadline_check("adapipe"));
        for (int i = k; i < (k == 0 ? 1 : n - (p->stages - 1 - k)); i++)
            p->best[k * (n + 1) + i] = best_from(p, k, i);
    }
    return TP_OK;
}

/* Which blocks of [i, j) stage k recomputes: the knapsack again, with what it took. */
static tp_status
mark_recomputed(ada *p, tp_arena *arena, int k, int i, int j, uint8_t *action)
{
    uint8_t *took = NULL;
    int room, width = p->units + 1;
    if (extra_of(p, k, i, j) <= 0.0 && (p->sums->chain->limit_bytes <= 0.0 ||
                                        tp_chain_bytes(p->sums, i, j, tp_chain_copies(p->sums->chain, p->stages, k), 0) <=
                                            p->sums->chain->limit_bytes))
        return TP_OK;
    room = room_of(p, left_of(p, i, j), tp_chain_copies(p->sums->chain, p->stages, k));
    TP_ARENA_TAKE(arena, (int64_t)(j - i) * width, took);
    memset(p->gain, 0, (size_t)width * sizeof *p->gain);
    for (int x = i; x < j; x++)
        for (int u = p->units, size = p->size[x]; u >= size; u--) {
            double value = p->gain[u - size] + p->again[x];
            /* a block that costs nothing to keep is kept, one that saves nothing too while it fits for nothing */
            if (tp_chain_is_less(p->gain[u], value) || (size == 0 && value >= p->gain[u])) {
                p->gain[u] = value;
                took[(int64_t)(x - i) * width + u] = 1;
            }
        }
    for (int x = j - 1, u = room; x >= i; x--) {
        action[x] = took[(int64_t)(x - i) * width + u] ? TP_BLOCK_KEEP : TP_BLOCK_RECOMPUTE;
        u -= action[x] == TP_BLOCK_KEEP ? p->size[x] : 0;
    }
    return TP_OK;
}

/* The plan's cost by the seconds given. */
static double
cost_of(const ada *p, const tp_chain_plan *plan)
{
    suffix rest = {0};
    for (int k = p->stages - 1; k >= 0; k--) {
        double extra = 0.0;
        for (int i = plan->boundary[k]; i < plan->boundary[k + 1]; i++)
            extra += plan->action[i] == TP_BLOCK_RECOMPUTE ? p->sums->chain->recompute_s[i] : 0.0;
        rest = put_before(p, k, plan->boundary[k], plan->boundary[k + 1], extra, &rest);
    }
    return rest.cost;
}

static tp_status
run(const tp_chain_sums *s, tp_arena *arena, int stages, const void *options, tp_chain_plan *plan)
{
    ada p = {.sums = s, .stages = stages};
    int n = s->chain->blocks;
    (void)options;
    TP_ARENA_TAKE(arena, n, p.size);
    TP_ARENA_TAKE(arena, n, p.known);
    TP_ARENA_TAKE(arena, n, p.like);
    TP_TRY(lower_huge(&p, arena));
    if (s->chain->limit_bytes > 0.0)
        choose_unit(&p);
    TP_ARENA_TAKE(arena, p.units, p.gain);
    TP_ARENA_TAKE(arena, p.units, p.next);
    TP_ARENA_TAKE(arena, stages, p.kind);
    for (int k = 1; k < stages; k++)
        p.kind[k] = p.kind[k - 1] + (tp_chain_copies(s->chain, stages, k) != tp_chain_copies(s->chain, stages, k - 1));
    p.kinds = p.kind[stages - 1] + 1;
    TP_ARENA_TAKE(arena, (int64_t)n * (n + 1) / 2 * p.kinds, p.extra);
    TP_ARENA_TAKE(arena, (int64_t)(stages + 1) * (n + 1), p.best);
    TP_TRY(solve_knapsacks(&p));
    TP_TRY(fill_suffixes(&p));
    plan->steps = p.steps;
    if (p.best[0].cut == 0)
        return tp_chain_infeasible(s, stages, s->chain->recompute_s != NULL, 1);
    plan->stages = stages;
    plan->objective_s = p.best[0].cost;
    for (int k = 0; k < stages; k++) {
        plan->boundary[k + 1] = p.best[k * (n + 1) + plan->boundary[k]].cut;
        TP_TRY(mark_recomputed(&p, arena, k, plan->boundary[k], plan->boundary[k + 1], plan->action));
    }
    if (p.lowered)
        plan->objective_s = cost_of(&p, plan);
    return TP_OK;
}

tp_status
tp_plan_adapipe(const tp_chain *chain, int stages, tp_chain_plan *out)
{
    return tp_chain_run(chain, stages, stages, TP_REPLICAS_NONE, run, NULL, out);
}
