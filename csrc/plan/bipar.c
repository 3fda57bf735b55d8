/* BiPar, DawnPiper's own search; what the paper leaves open is decided as in PLANNERS.md 3.2.
 *
 * A segment of q stages is cut in two, q / 2 stages (of three: one) to the left. Candidates run from the compute-balanced
 * position (the first whose time is the left side's share q_left / q of the segment's) to the memory-balanced one (the
 * first whose one-micro-batch bytes are its share by Alg. 2's weights 1 / v). Each side is cut in turn down to single
 * stages, whose recomputation and swaps Capuchin chooses. The least larger side wins, the earlier candidate among equals;
 * the walk stops behind the first candidate that needs no memory optimisation on either side, because to go on only
 * worsens the balance. A candidate where no choice fits is passed over.
 *
 * With link_Bps: candidates whose message takes longer than a stage of the segment should (its time / q) are dropped,
 * less what every candidate sends (the least of them: that cannot be avoided); with cut_tensors a candidate where several
 * tensors cross moves to the nearest position between the two ends where one does.
 *
 * Nothing is examined twice: a stage or a segment met again is remembered, and a side is not looked at where the other
 * alone, or its own relaxation, is no better than what is known. None of this changes what is found. */
#include "csrc/plan/memopt.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

typedef struct {
    int64_t key;
    double time_s; /* +inf: nothing fits */
    int cut;       /* 0: a single stage */
    int empty;     /* no stage of it optimises memory */
} outcome;

typedef struct {
    tp_memopt *m;
    tp_capuchin capuchin;
    outcome *known;
    int64_t room, count, evaluations, limit;
    uint8_t *recompute; /* [n] scratch */
    double *swap_bytes, *link_s;
    int *candidates; /* [depth][n + 1] */
} bipar;

static tp_status
remember(bipar *b, outcome found)
{
    if (2 * b->count >= b->room) {
        outcome *old = b->known;
        int64_t room = b->room;
        void *memory = NULL;
        b->room = room == 0 ? 4096 : 4 * room;
        b->count = 0;
        TP_TRY(tp_arena_take(&b->m->arena, (size_t)b->room, sizeof *b->known, &memory));
        b->known = memory;
        for (int64_t k = 0; k < room; k++)
            if (old[k].key != 0)
                TP_TRY(remember(b, old[k]));
    }
    uint64_t at = (uint64_t)found.key * 0x9e3779b97f4a7c15u >> 20, mask = (uint64_t)b->room - 1;
    while (b->known[at & mask].key != 0)
        at++;
    b->known[at & mask] = found;
    b->count++;
    return TP_OK;
}

static const outcome *
recall(const bipar *b, int64_t key)
{
    if (b->room == 0)
        return NULL;
    uint64_t at = (uint64_t)key * 0x9e3779b97f4a7c15u >> 20, mask = (uint64_t)b->room - 1;
    while (b->known[at & mask].key != 0 && b->known[at & mask].key != key)
        at++;
    return b->known[at & mask].key == key ? &b->known[at & mask] : NULL;
}

/* Stages [x, x + q) on nodes [i, j): q follows from x and the depth of the cut, so it must be in the key too. */
static int64_t
key_of(const bipar *b, int x, int q, int i, int j)
{
    int64_t n = b->m->n + 1, stages = b->m->options->stages + 1;
    return 1 + j + n * (i + n * (x + stages * (int64_t)q));
}

/* The first position that gives the left side its share; at least one node a stage on both sides. */
static int
position(const bipar *b, int x, int q, int left, int i, int j, int by_memory)
{
    const tp_memopt *m = b->m;
    double share = 0.0, all = 0.0;
    for (int k = 0; k < q; k++) {
        double weight = by_memory ? 1.0 / tp_dawnpiper_copies(m->options, x + k) : 1.0;
        all += weight;
        share += k < left ? weight : 0.0;
    }
    int low = i + left, high = j - (q - left);
    while (low < high) {
        int p = low + (high - low) / 2;
        double part = tp_memopt_time(m, i, p), whole = tp_memopt_time(m, i, j);
        if (by_memory) {
            part = m->active[p] - m->active[i] + (m->fixed_param[p] - m->fixed_param[i]) + (m->fixed_state[p] - m->fixed_state[i]);
            whole = m->active[j] - m->active[i] + (m->fixed_param[j] - m->fixed_param[i]) + (m->fixed_state[j] - m->fixed_state[i]);
        }
        if (part >= share / all * whole * (1.0 - 1e-12))
            high = p;
        else
            low = p + 1;
    }
    return low;
}

/* The nearest position in [low, high] where a single tensor crosses, the earlier of two; p if there is none. */
static int
single_tensor(const bipar *b, int p, int low, int high)
{
    const double *tensors = b->m->nodes->cut_tensors;
    for (int away = 0; tensors != NULL && away <= high - low; away++)
        for (int sign = -1; sign <= 1; sign += 2) {
            int q = p + sign * away;
            if (q >= low && q <= high && tensors[q - 1] <= 1.0)
                return q;
        }
    return p;
}

/* Candidates in the order of the walk; how many. */
static int
list_candidates(const bipar *b, int x, int q, int left, int i, int j, int *out)
{
    int from = position(b, x, q, left, i, j, 0), to = position(b, x, q, left, i, j, 1), count = 0;
    int low = from < to ? from : to, high = from < to ? to : from;
    double least = INFINITY, most = tp_memopt_time(b->m, i, j) / q;
    if (b->link_s == NULL) {
        for (int p = from;; p += from < to ? 1 : -1) {
            out[count++] = p;
            if (p == to)
                return count;
        }
    }
    for (int p = low; p <= high; p++)
        least = fmin(least, b->link_s[p]);
    for (int p = from;; p += from < to ? 1 : -1) {
        int moved = single_tensor(b, p, low, high);
        if (b->link_s[moved] - least <= most * (1.0 + 1e-12) && (count == 0 || out[count - 1] != moved))
            out[count++] = moved;
        if (p == to)
            return count;
    }
}

static tp_status
stage(bipar *b, int x, int i, int j, outcome *out)
{
    double slack;
    b->evaluations++;
    out->cut = 0;
    out->empty = tp_memopt_need(b->m, x, i, j, &slack) <= slack;
    out->time_s = out->empty ? tp_memopt_time(b->m, i, j)
                             : tp_capuchin_choose(b->m, &b->capuchin, x, i, j, b->recompute, b->swap_bytes);
    return tp_deadline_check_told();
}

/* Is a less than b by more than the rounding of sums? So the earlier of equal candidates wins, whatever the unit of time. */
static int
is_less(double a, double b)
{
    return a < b * (1.0 - 1e-12);
}

/* A single stage that optimises memory and whose relaxation alone is no better than what is known. */
static int
is_hopeless(const bipar *b, int x, int q, int i, int j, double best)
{
    double slack;
    return q == 1 && isfinite(best) && tp_memopt_need(b->m, x, i, j, &slack) > slack &&
           !is_less(tp_memopt_relaxed(b->m, x, i, j).low_s, best);
}

static tp_status
segment(bipar *b, int depth, int x, int q, int i, int j, outcome *out)
{
    int64_t key = key_of(b, x, q, i, j);
    const outcome *old = recall(b, key);
    *out = old != NULL ? *old : (outcome){.key = key, .time_s = INFINITY};
    if (old != NULL)
        return TP_OK;
    TP_TRY(tp_deadline_check("dawnpiper_binary"));
    if (q == 1) {
        TP_TRY(stage(b, x, i, j, out));
        return remember(b, *out);
    }
    int left = q / 2, *list = b->candidates + (size_t)depth * (size_t)(b->m->n + 1);
    int count = list_candidates(b, x, q, left, i, j, list);
    for (int k = 0; k < count; k++) {
        outcome first, second;
        if (b->evaluations >= b->limit && isfinite(out->time_s))
            break;
        if (is_hopeless(b, x, left, i, list[k], out->time_s) ||
            is_hopeless(b, x + left, q - left, list[k], j, out->time_s))
            continue;
        TP_TRY(segment(b, depth + 1, x, left, i, list[k], &first));
        if (!is_less(first.time_s, out->time_s) && !first.empty)
            continue;
        TP_TRY(segment(b, depth + 1, x + left, q - left, list[k], j, &second));
        double time = fmax(first.time_s, second.time_s);
        if (is_less(time, out->time_s)) {
            out->time_s = time;
            out->cut = list[k];
            out->empty = first.empty && second.empty;
        }
        if (first.empty && second.empty)
            break;
    }
    return remember(b, *out);
}

static void
write_cuts(const bipar *b, int x, int q, int i, int j, int *boundary)
{
    boundary[x] = i;
    boundary[x + q] = j;
    if (q == 1)
        return;
    const outcome *found = recall(b, key_of(b, x, q, i, j));
    write_cuts(b, x, q / 2, i, found->cut, boundary);
    write_cuts(b, x + q / 2, q - q / 2, found->cut, j, boundary);
}

static tp_status
open_bipar(tp_memopt *m, bipar *b)
{
    int depth = 1;
    size_t n = (size_t)m->n;
    void *memory = NULL;
    *b = (bipar){.m = m, .limit = m->options->work_limit > 0 ? m->options->work_limit : 200000};
    for (int q = m->options->stages; q > 1; q = q - q / 2)
        depth++;
    TP_TRY(tp_capuchin_open(m, &b->capuchin));
    TP_TRY(tp_arena_take(&m->arena, (size_t)depth * (n + 1), sizeof(int), &memory));
    b->candidates = memory;
    TP_TRY(tp_arena_take(&m->arena, n, 1, &memory));
    b->recompute = memory;
    TP_TRY(tp_arena_take(&m->arena, n, sizeof(double), &memory));
    b->swap_bytes = memory;
    if (m->options->link_Bps <= 0.0)
        return TP_OK;
    TP_TRY(tp_arena_take(&m->arena, n + 1, sizeof(double), &memory));
    b->link_s = memory;
    for (size_t p = 1; p < n; p++)
        b->link_s[p] = m->nodes->cut_bytes[p - 1] / m->options->link_Bps;
    return TP_OK;
}

static tp_status
search_plan(tp_memopt *m, tp_dawnpiper_plan *plan)
{
    bipar b;
    outcome found;
    double attained;
    int stages = plan->stages;
    tp_status status = tp_dawnpiper_relax(m, plan->boundary, &plan->relaxed_s, &attained, &plan->probes);
    if (status == TP_EINFEASIBLE)
        return tp_fail(TP_EINFEASIBLE, "%s for the exact planner, dawnpiper; BiPar may need more", tp_error_message());
    TP_TRY(status);
    TP_TRY(open_bipar(m, &b));
    TP_TRY(segment(&b, 0, 0, stages, 0, plan->count, &found));
    plan->evaluations = b.evaluations;
    if (isinf(found.time_s))
        return tp_fail(TP_EINFEASIBLE,
                       "BiPar found no partition into %d stages that fits memory_bytes = %.15g, of %lld stages that it "
                       "examined; the exact planner, dawnpiper, finds one",
                       stages, m->options->memory_bytes, (long long)b.evaluations);
    write_cuts(&b, 0, stages, 0, plan->count, plan->boundary);
    for (int x = 0; x < stages; x++)
        plan->stage_s[x] = tp_capuchin_choose(m, &b.capuchin, x, plan->boundary[x], plan->boundary[x + 1],
                                              plan->recompute, plan->swap_bytes);
    TP_TRY(tp_deadline_check_told());
    TP_TRY(tp_dawnpiper_evaluate(m, plan));
    plan->lower_bound_s = plan->relaxed_s = fmin(plan->relaxed_s, plan->period_s);
    plan->optimal = plan->lower_bound_s >= plan->period_s * (1.0 - 4e-12);
    return TP_OK;
}

tp_status
tp_plan_dawnpiper_binary(const tp_nodes *nodes, const tp_dawnpiper_options *options, tp_dawnpiper_plan *out)
{
    return tp_dawnpiper_run(nodes, options, search_plan, out);
}
