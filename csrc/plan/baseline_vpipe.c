/* vPipe (Zhao et al., "vPipe: A Virtualized Acceleration System for Achieving Efficient and Scalable Pipeline Parallel DNN
 * Training", TPDS 33(3), 2022): swap and recompute are chosen within a stage, and blocks move between neighbouring stages as
 * Kernighan and Lin's search moves nodes. Of the paper's text only the abstract was found. Reported by its readers, and so here:
 *  - partition first, then a plan of swap and recompute for each stage; swap may fill the host link, and does not reckon with
 *    the messages between stages (notes of a reading group at Imperial College London, 9 June 2022, session 1);
 *  - blocks move, step by step, from a stage that has too much to the one next to it (a week's report on the paper from
 *    PaddlePaddle's training camp);
 *  - its repository (hku-systems/vpipe, no licence: read for facts, nothing taken) holds a runtime and finished plans, no
 *    search and no swap. Its plans, sizes of stages and the part of each that is recomputed, have fewer blocks where more is
 *    recomputed, so recomputation counts in the balance, and ours are no slower (tests/test_baselines_published.py). It
 *    recomputes the last blocks of a stage.
 * NOT HELD AGAINST THE PAPER: the order of moves, when a pass ends, which blocks are swapped or recomputed. Chosen:
 *  - within a stage, first swap, from the first block on (its activation waits longest for its backward), as long as the
 *    bytes swapped fit through the link while the stage computes one micro-batch (each way has a link), so that swap costs no
 *    time; then recompute, least seconds per byte first; both only until the stage fits; then what is not needed after all is
 *    kept again, the largest recomputation first;
 *  - the search starts from the min-max partition of forward + backward; a move gives the block at a boundary to the
 *    neighbour; every move of a pass is the best of those left, worse ones too, each block moves once a pass, and the best
 *    partition seen ends the pass; passes until none helps;
 *  - best: fewest bytes short in all, then the least time of the slowest stage (recomputation included), then the sum of
 *    squares of the stage times, so that a pass has a direction where the slowest stage stays. */
#include "csrc/plan/baseline_chain.h"

#include <math.h>
#include <string.h>

#include "csrc/base/deadline.h"
#include "csrc/plan/plan.h"

typedef struct {
    double short_bytes, slowest_s, squares;
} merit;

/* A boundary one block away: the stages on both sides. */
typedef struct {
    double time_s[2], short_bytes[2], square[2];
    int known;
} trial;

typedef struct {
    const tp_chain_sums *sums;
    int stages;
    double swap_Bps, work_s; /* work_s: of all blocks */
    uint8_t *action, *moved; /* [blocks] */
    int *boundary, *best;    /* [stages + 1] */
    double *time_s, *short_bytes, *square; /* [stages] of the present partition */
    trial *trials;                /* [stages][2] of boundary k + 1 back, forth */
    merit *before;                /* [stages] of the present partition's stages before k */
    int64_t steps, asked; /* asked: steps since somebody was asked whether to stop */
} vpipe;

static int
better(const merit *a, const merit *b)
{
    if (a->short_bytes != b->short_bytes)
        return a->short_bytes < b->short_bytes;
    if (tp_chain_is_less(a->slowest_s, b->slowest_s) || tp_chain_is_less(b->slowest_s, a->slowest_s))
        return a->slowest_s < b->slowest_s;
    return tp_chain_is_less(a->squares, b->squares);
}

/* The block that is kept and costs least to recompute per byte; -1. */
static int
cheapest(const vpipe *v, int first, int end)
{
    const tp_chain *c = v->sums->chain;
    int best = -1;
    for (int i = first; i < end && c->recompute_s != NULL; i++)
        if (v->action[i] == TP_BLOCK_KEEP && c->activation_bytes[i] > 0.0 &&
            (best < 0 ||
             tp_chain_is_less(c->recompute_s[i] * c->activation_bytes[best], c->recompute_s[best] * c->activation_bytes[i])))
            best = i;
    return best;
}

/* The recomputation that takes longest of those that fit into `room` bytes; -1. */
static int
spare(const vpipe *v, int first, int end, double room)
{
    const tp_chain *c = v->sums->chain;
    int best = -1;
    for (int i = first; i < end; i++)
        if (v->action[i] == TP_BLOCK_RECOMPUTE && c->activation_bytes[i] <= room &&
            (best < 0 || tp_chain_is_less(c->recompute_s[best], c->recompute_s[i])))
            best = i;
    return best;
}

/* Bytes that the stage is short, `needed` having been counted down to by block i's: again from the start where that may be
 * rounding. */
static double
settled(const vpipe *v, int first, int end, int copies, double needed, int i)
{
    double limit = v->sums->chain->limit_bytes, step = copies * v->sums->chain->activation_bytes[i];
    return fabs(needed) > 1e-9 * fmax(limit, step) ? needed : tp_chain_bytes_kept(v->sums, first, end, copies, v->action) - limit;
}

/* Swap and recompute of stage k on [first, end): sets action, its time and the bytes it is short. */
static void
fit_stage(vpipe *v, int k, int first, int end, double *time_s, double *short_bytes)
{
    const tp_chain_sums *s = v->sums;
    const tp_chain *c = s->chain;
    int copies = tp_chain_copies(c, v->stages, k);
    double work = s->forward[end] - s->forward[first] + s->backward[end] - s->backward[first], swapped = 0.0;
    double needed = tp_chain_bytes(s, first, end, copies, 0) - c->limit_bytes; /* to save, of all micro-batches in flight */
    memset(v->action + first, TP_BLOCK_KEEP, (size_t)(end - first));
    v->steps++;
    *time_s = work;
    *short_bytes = 0.0;
    if (c->limit_bytes <= 0.0 || needed <= 0.0)
        return;
    for (int i = first; i < end && needed > 0.0 && v->swap_Bps > 0.0; i++)
        if (c->activation_bytes[i] > 0.0 && !tp_chain_is_less(v->swap_Bps * work, swapped + c->activation_bytes[i])) {
            v->action[i] = TP_BLOCK_SWAP;
            swapped += c->activation_bytes[i];
            needed = settled(v, first, end, copies, needed - copies * c->activation_bytes[i], i);
        }
    for (int i; needed > 0.0 && !tp_deadline_told_after(&v->asked, end - first) && (i = cheapest(v, first, end)) >= 0;) {
        v->action[i] = TP_BLOCK_RECOMPUTE;
        needed = settled(v, first, end, copies, needed - copies * c->activation_bytes[i], i);
    }
    for (int i; needed < 0.0 && !tp_deadline_told_after(&v->asked, end - first) &&
                (i = spare(v, first, end, -needed / copies)) >= 0;) {
        v->action[i] = TP_BLOCK_KEEP;
        double before = needed;
        needed = settled(v, first, end, copies, needed + copies * c->activation_bytes[i], i);
        if (needed > 0.0) { /* by an ulp it has no room */
            v->action[i] = TP_BLOCK_RECOMPUTE;
            needed = before;
            break;
        }
    }
    for (int i = first; i < end; i++)
        *time_s += v->action[i] == TP_BLOCK_RECOMPUTE ? c->recompute_s[i] : 0.0;
    *short_bytes = fmax(needed, 0.0);
}

/* Squares of seconds may leave a double's range. */
static double
square_of(const vpipe *v, double time_s)
{
    double share = time_s > 0.0 ? time_s / v->work_s : 0.0;
    return share * share;
}

static inline merit
add_stage(merit m, double time_s, double short_bytes, double square)
{
    m.short_bytes += short_bytes;
    m.slowest_s = time_s > m.slowest_s ? time_s : m.slowest_s;
    m.squares += square;
    return m;
}

/* Of the present partition; before: of its first stages, too. */
static merit
judge(const vpipe *v)
{
    merit m = {0.0, 0.0, 0.0};
    for (int k = 0; k < v->stages; k++) {
        v->before[k] = m;
        m = add_stage(m, v->time_s[k], v->short_bytes[k], v->square[k]);
    }
    return m;
}

/* Boundary k + 1 moved by `step`: of the stages, only k and k + 1 change, and what they are then is known until they or their other
 * neighbours change. */
static merit
judge_moved(vpipe *v, int k, int step)
{
    trial *t = &v->trials[2 * k + (step > 0)];
    int at = v->boundary[k + 1] + step;
    if (!t->known) {
        fit_stage(v, k, v->boundary[k], at, &t->time_s[0], &t->short_bytes[0]);
        fit_stage(v, k + 1, at, v->boundary[k + 2], &t->time_s[1], &t->short_bytes[1]);
        for (int side = 0; side < 2; side++)
            t->square[side] = square_of(v, t->time_s[side]);
        t->known = 1;
    }
    merit m = add_stage(v->before[k], t->time_s[0], t->short_bytes[0], t->square[0]);
    m = add_stage(m, t->time_s[1], t->short_bytes[1], t->square[1]);
    for (int x = k + 2; x < v->stages; x++)
        m = add_stage(m, v->time_s[x], v->short_bytes[x], v->square[x]);
    return m;
}

static void
move(vpipe *v, int k, int step)
{
    const trial *t = &v->trials[2 * k + (step > 0)];
    v->boundary[k + 1] += step;
    for (int side = 0; side < 2; side++) {
        v->time_s[k + side] = t->time_s[side];
        v->short_bytes[k + side] = t->short_bytes[side];
        v->square[k + side] = t->square[side];
    }
    for (int x = k > 0 ? k - 1 : 0; x <= k + 1 && x < v->stages; x++)
        v->trials[2 * x].known = v->trials[2 * x + 1].known = 0;
    judge(v);
}

/* Of the boundaries as they are, and no trial known. */
static merit
fit_all(vpipe *v)
{
    for (int k = 0; k < v->stages; k++) {
        fit_stage(v, k, v->boundary[k], v->boundary[k + 1], &v->time_s[k], &v->short_bytes[k]);
        v->square[k] = square_of(v, v->time_s[k]);
        v->trials[2 * k].known = v->trials[2 * k + 1].known = 0;
    }
    return judge(v);
}

static int
may_move(const vpipe *v, int k, int step)
{
    int block = step > 0 ? v->boundary[k + 1] : v->boundary[k + 1] - 1;
    int giver = step > 0 ? k + 1 : k;
    return !v->moved[block] && v->boundary[giver + 1] - v->boundary[giver] > 1;
}

/* One pass; the best partition seen is left in best and boundary. Past the deadline it ends with that. */
static int
pass(vpipe *v, merit *best)
{
    int improved = 0;
    size_t bytes = (size_t)(v->stages + 1) * sizeof *v->boundary;
    memset(v->moved, 0, (size_t)v->sums->chain->blocks);
    while (!tp_deadline_late()) {
        int chosen = -1, way = 0;
        merit least = {INFINITY, INFINITY, INFINITY};
        for (int k = 0; k + 1 < v->stages && !tp_deadline_was_told(); k++)
            for (int step = -1; step <= 1; step += 2) {
                if (!may_move(v, k, step))
                    continue;
                merit m = judge_moved(v, k, step);
                if (chosen < 0 || better(&m, &least)) {
                    least = m;
                    chosen = k;
                    way = step;
                }
            }
        if (chosen < 0)
            break;
        v->moved[way > 0 ? v->boundary[chosen + 1] : v->boundary[chosen + 1] - 1] = 1;
        move(v, chosen, way);
        if (better(&least, best)) {
            *best = least;
            memcpy(v->best, v->boundary, bytes);
            improved = 1;
        }
    }
    memcpy(v->boundary, v->best, bytes);
    fit_all(v);
    return improved;
}

/* From the min-max partition on; 0: a stage of the best one does not fit. */
static int
search(vpipe *v, merit *best)
{
    *best = fit_all(v);
    while (pass(v, best))
        ;
    return best->short_bytes <= 0.0;
}

/* Which stage is short in the best partition, and a limit that this search keeps to: one that its best partition would keep to need
 * not do, since another limit leads it elsewhere. */
static tp_status
refuse(vpipe *v, const int *even, double limit)
{
    const tp_chain *asked = v->sums->chain;
    int worst = 0, stages = v->stages;
    for (int k = 0; k < stages; k++)
        worst = v->short_bytes[k] > v->short_bytes[worst] ? k : worst;
    int first = v->boundary[worst], last = v->boundary[worst + 1] - 1;
    double lack = ceil(v->short_bytes[worst]), more = lack;
    tp_chain larger = *asked;
    tp_chain_sums sums = *v->sums;
    sums.chain = &larger;
    v->sums = &sums;
    merit best;
    for (;; more *= 2.0) {
        larger.limit_bytes = ceil(limit + more);
        memcpy(v->boundary, even, (size_t)(stages + 1) * sizeof *even);
        memcpy(v->best, even, (size_t)(stages + 1) * sizeof *even);
        if (search(v, &best))
            break;
        TP_TRY(tp_deadline_check("vpipe"));
    }
    return tp_fail(TP_EINFEASIBLE,
                   "vPipe's search found no partition that fits limit_bytes, %.15g: in its best, stage %d of %d (blocks %d to %d) "
                   "is %.15g bytes short; limit_bytes = %.15g would do%s",
                   limit, worst, stages, first, last, lack, larger.limit_bytes,
                   asked->recompute_s == NULL ? ", recompute_s would let it recompute" : "");
}

static tp_status
run(const tp_chain_sums *s, tp_arena *arena, int stages, const void *options, tp_chain_plan *plan)
{
    vpipe v = {.sums = s, .stages = stages, .swap_Bps = *(const double *)options, .action = plan->action,
               .boundary = plan->boundary};
    int n = s->chain->blocks, *even = NULL;
    double *both = NULL;
    merit best;
    TP_ARENA_TAKE(arena, n, both);
    TP_ARENA_TAKE(arena, n, v.moved);
    TP_ARENA_TAKE(arena, stages + 1, v.best);
    TP_ARENA_TAKE(arena, stages + 1, even);
    TP_ARENA_TAKE(arena, stages, v.time_s);
    TP_ARENA_TAKE(arena, stages, v.short_bytes);
    TP_ARENA_TAKE(arena, stages, v.square);
    TP_ARENA_TAKE(arena, 2 * stages, v.trials);
    TP_ARENA_TAKE(arena, stages, v.before);
    for (int i = 0; i < n; i++)
        both[i] = s->chain->forward_s[i] + s->chain->backward_s[i];
    v.work_s = s->forward[n] + s->backward[n];
    TP_TRY(tp_plan_balance(both, n, stages, even));
    memcpy(v.boundary, even, (size_t)(stages + 1) * sizeof *even);
    memcpy(v.best, even, (size_t)(stages + 1) * sizeof *even);
    int fits = search(&v, &best);
    plan->stages = stages;
    plan->steps = v.steps;
    plan->objective_s = best.slowest_s;
    TP_TRY(tp_deadline_check_told());
    if (fits)
        return TP_OK;
    TP_TRY(tp_deadline_check("vpipe"));
    return refuse(&v, even, s->chain->limit_bytes);
}

tp_status
tp_plan_vpipe(const tp_chain *chain, int stages, double swap_Bps, tp_chain_plan *out)
{
    *out = (tp_chain_plan){0};
    if (!(swap_Bps >= 0.0 && swap_Bps <= 1e300))
        return tp_fail(TP_EVALUE, "swap_bandwidth_Bps is %g: a bandwidth of 0 to 1e300 is needed", swap_Bps);
    return tp_chain_run(chain, stages, stages, TP_REPLICAS_NONE, run, &swap_Bps, out);
}
