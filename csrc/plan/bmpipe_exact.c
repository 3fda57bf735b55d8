/* One chunk, exactly (PLANNERS.md 2.5 and 9.4, with recomputation). The makespan of 1F1B never falls when a stage takes
 * longer, so each interval of layers on each stage takes the least extra time that fits: a plan is its boundaries. For
 * every stage x (P stages, m micro-batches) some path gives
 *     makespan >= F + B + E + 2 (P - 1) c + w_x,   w_x = (m - 1) b_x + max(0, m - P + x) f_x
 * with F, B fixed sums and E the extra seconds of all stages. Depth first over the boundaries; a branch ends where one of
 * these is not below the best plan:
 *   - the least of E + max w over all ways to go on, from labels (E, max w) of every suffix, undominated ones;
 *   - a critical path of an earlier simulation, an inequality for all plans, with its least sum over all ways to go on.
 * A leaf is simulated and its critical path is kept if no inequality had ended it. */
#include "csrc/plan/bmpipe_exact.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"

enum { LABELS = 64, ROWS = TP_EXACT_ROWS, PATIENCE = 4096 }; /* PATIENCE: nodes before a proof is tried */

/* Is the time limit past? What comes before the branches takes seconds where there are many stages, layers and strategies. (Effort
 * is of the branches alone: it ends nothing here.) */
static int
out_of_time(tp_exact *e)
{
    int past = e->p->deadline_ns != 0 && tp_clock_ns() > e->p->deadline_ns;
    e->p->late |= past;
    return past;
}

/* Bytes that the interval may keep of one micro-batch. */
static double
room_bytes(const tp_exact *e, int stage, int from, int to)
{
    int held = e->p->vector[e->p->vector_begin[stage]];
    double left = e->p->options->memory_bytes * (1.0 + TP_BMPIPE_SLACK) -
                  tp_bmpipe_between(e->p->static_bytes, from, to);
    return left / held;
}

/* The interval's least extra time on a stage. real 1: that of a plan; 0: a lower bound (they differ only where fronts were
 * thinned). */
static tp_status
least_extra(tp_exact *e, int stage, int from, int to, int real, double *extra_s)
{
    const tp_bmpipe_front *front = NULL;
    double room = room_bytes(e, stage, from, to);
    *extra_s = INFINITY;
    if (room < tp_bmpipe_between(e->p->least_bytes, from, to) * (1.0 - TP_BMPIPE_SLACK))
        return TP_OK;
    TP_TRY(tp_bmpipe_front_of(e->p, from, to, &front));
    int point = tp_bmpipe_front_find(front, room);
    if (point >= 0)
        *extra_s = front->point[point].extra_s;
    if (!real && !front->exact)
        *extra_s = tp_bmpipe_fractional(e->p, from, to, room);
    return TP_OK;
}

/* ---- does anything fit? -------------------------------------------------------------------------------------------------- */

static double
excess(const tp_exact *e, int stage, int from, int to)
{
    double kept = tp_bmpipe_between(e->p->least_bytes, from, to);
    return tp_bmpipe_bytes(e->p, stage, tp_bmpipe_between(e->p->static_bytes, from, to), &kept) -
           e->p->options->memory_bytes;
}

/* The boundaries whose worst stage lacks the fewest bytes when everything is recomputed. EINFEASIBLE if it lacks any. */
static tp_status
find_fit(tp_exact *e)
{
    int n = e->n, stages = e->stages, *next = NULL;
    void *memory = NULL;
    TP_TRY(tp_bmpipe_take(e->p, (size_t)(stages + 1) * (size_t)(n + 1), sizeof(double), &memory));
    double *least = memory;
    TP_TRY(tp_bmpipe_take(e->p, (size_t)(stages + 1) * (size_t)(n + 1), sizeof(int), &memory));
    next = memory;
    for (int i = 0; i <= n; i++)
        least[stages * (n + 1) + i] = i == n ? -INFINITY : INFINITY;
    for (int x = stages - 1; x >= 0; x--)
        for (int i = 0; i < n; i++) {
            double best = INFINITY;
            TP_TRY(tp_deadline_check_after(&e->p->asked, 8 * (int64_t)(n - i)));
            for (int j = i + 1; j <= n - (stages - 1 - x); j++) {
                double rest = least[(x + 1) * (n + 1) + j], here = excess(e, x, i, j), worst = here > rest ? here : rest;
                if (here >= best)
                    break; /* a longer interval lacks no less */
                if (worst < best) {
                    best = worst;
                    next[x * (n + 1) + i] = j;
                }
            }
            least[x * (n + 1) + i] = best;
        }
    int binding = 0;
    for (int x = 0; x < stages; x++) {
        e->cut[x + 1] = next[x * (n + 1) + e->cut[x]];
        if (excess(e, x, e->cut[x], e->cut[x + 1]) > excess(e, binding, e->cut[binding], e->cut[binding + 1]))
            binding = x;
    }
    double bytes = e->p->options->memory_bytes;
    if (least[0] > bytes * TP_BMPIPE_SLACK)
        return tp_fail(TP_EINFEASIBLE,
                       "no plan fits: stage %d is %.0f bytes short of memory_bytes %.0f with everything recomputed; "
                       "%.0f would fit", binding, ceil(least[0]), bytes, ceil(bytes + least[0]));
    return TP_OK;
}

/* ---- plans -------------------------------------------------------------------------------------------------------------- */

tp_status
tp_exact_load(tp_exact *e, int stage, int from, int to, double *forward_s, double *backward_s)
{
    double extra = 0.0;
    TP_TRY(least_extra(e, stage, from, to, 1, &extra));
    *forward_s = tp_bmpipe_between(e->p->forward_s, from, to);
    *backward_s = tp_bmpipe_between(e->p->backward_s, from, to) + extra;
    return TP_OK;
}

tp_status
tp_exact_simulate(tp_exact *e, double *makespan_s)
{
    tp_bmpipe *p = e->p;
    for (int x = 0; x < e->stages; x++) {
        TP_TRY(tp_exact_load(e, x, e->cut[x], e->cut[x + 1], &p->load[x], &p->load[e->stages + x]));
        if (isinf(p->load[e->stages + x])) {
            *makespan_s = INFINITY;
            return TP_OK;
        }
    }
    *makespan_s = tp_bmpipe_simulate(p);
    return tp_deadline_check_told();
}

void
tp_exact_keep(tp_exact *e, double makespan_s)
{
    if (makespan_s >= e->best_s)
        return;
    e->best_s = makespan_s;
    e->prove_at = e->p->nodes + PATIENCE;
    memcpy(e->best_cut, e->cut, (size_t)(e->stages + 1) * sizeof *e->cut);
}

/* ---- what a better plan may use ------------------------------------------------------------------------------------------- */

static tp_status
find_reach(tp_exact *e)
{
    int n = e->n, stages = e->stages;
    void *memory = NULL;
    for (int x = 0; x < stages; x++)
        for (int i = x; i < n && (x > 0 || i == 0) && !out_of_time(e); i++) {
            int first = tp_exact_first_end(e, x, i), last = n - (stages - 1 - x), count = 0;
            e->reach[tp_exact_cell(e, x, i)] = first - 1;
            for (int j = first; j <= last; j++, count++)
                if (e->constant_s + tp_exact_weight(e, x, i, j, 0.0) >= tp_exact_goal(e))
                    break;
            TP_TRY(tp_deadline_check_after(&e->p->asked, 16 * (int64_t)(count + 1)));
            if (count == 0)
                continue;
            TP_TRY(tp_bmpipe_take(e->p, (size_t)count, sizeof(double), &memory));
            e->extra[tp_exact_cell(e, x, i)] = memory;
            for (int k = 0; k < count; k++) {
                double extra = 0.0;
                TP_TRY(least_extra(e, x, i, first + k, 0, &extra));
                if (!(e->constant_s + extra + tp_exact_weight(e, x, i, first + k, extra) < tp_exact_goal(e)))
                    break; /* a longer interval needs no less */
                e->extra[tp_exact_cell(e, x, i)][k] = extra;
                e->whole &= extra == floor(extra);
                e->reach[tp_exact_cell(e, x, i)] = first + k;
            }
        }
    return TP_OK;
}

/* Insert a label into at[count], which is sorted by rising most and falling extra, and drop dominated ones. Beyond LABELS of them
 * the two neighbours that lose least are replaced by the minimum of both in each coordinate: still a lower bound. */
static int
add_label(tp_exact_label *at, int count, tp_exact_label new)
{
    int place = count;
    while (place > 0 && at[place - 1].most_s > new.most_s)
        place--;
    if (place > 0 && at[place - 1].extra_s <= new.extra_s)
        return count;
    int end = place;
    while (end < count && at[end].extra_s >= new.extra_s)
        end++;
    memmove(at + place + 1, at + end, (size_t)(count - end) * sizeof *at);
    at[place] = new;
    count += 1 - (end - place);
    if (count <= LABELS)
        return count;
    int merged = 1;
    double least = INFINITY;
    for (int k = 1; k < count; k++) {
        double loss = (at[k].most_s - at[k - 1].most_s) + (at[k - 1].extra_s - at[k].extra_s);
        if (loss < least) {
            least = loss;
            merged = k;
        }
    }
    at[merged - 1].extra_s = at[merged].extra_s;
    memmove(at + merged, at + merged + 1, (size_t)(count - merged - 1) * sizeof *at);
    return count - 1;
}

static tp_status
label_cell(tp_exact *e, int stage, int from)
{
    tp_exact_labels *here = &e->suffix[(size_t)stage * (size_t)(e->n + 1) + (size_t)from];
    int count = 0;
    here->count = 0;
    for (int to = tp_exact_first_end(e, stage, from); to <= e->reach[tp_exact_cell(e, stage, from)]; to++) {
        double extra = tp_exact_extra(e, stage, from, to), own = tp_exact_weight(e, stage, from, to, extra);
        const tp_exact_labels *rest = &e->suffix[(size_t)(stage + 1) * (size_t)(e->n + 1) + (size_t)to];
        TP_TRY(tp_deadline_check_after(&e->p->asked, 8 * (int64_t)rest->count));
        for (int k = 0; k < rest->count; k++) {
            tp_exact_label new = {extra + rest->at[k].extra_s, own > rest->at[k].most_s ? own : rest->at[k].most_s};
            if (e->constant_s + new.extra_s + new.most_s < tp_exact_goal(e))
                count = add_label(e->scratch, count, new);
        }
    }
    if (count == 0)
        return TP_OK;
    void *memory = NULL;
    TP_TRY(tp_bmpipe_take(e->p, (size_t)count, sizeof(tp_exact_label), &memory));
    *here = (tp_exact_labels){memory, count};
    memcpy(here->at, e->scratch, (size_t)count * sizeof(tp_exact_label));
    return TP_OK;
}

static tp_status
find_labels(tp_exact *e)
{
    static tp_exact_label nothing = {0.0, 0.0};
    e->suffix[(size_t)e->stages * (size_t)(e->n + 1) + (size_t)e->n] = (tp_exact_labels){&nothing, 1};
    for (int x = e->stages - 1; x >= 0; x--)
        for (int i = x; i < e->n && (x > 0 || i == 0) && !out_of_time(e); i++)
            TP_TRY(label_cell(e, x, i));
    return TP_OK;
}

/* ---- critical paths as inequalities --------------------------------------------------------------------------------------- */

void
tp_exact_row_before(const tp_exact *e, tp_exact_row *q, int depth)
{
    q->before[0] = q->row.lag_s;
    for (int x = 0; x < depth; x++)
        q->before[x + 1] = q->before[x] + tp_exact_cost(e, q, x, e->cut[x], e->cut[x + 1]);
}

tp_status
tp_exact_row_open(tp_exact *e, tp_exact_row *q)
{
    size_t stages = (size_t)e->stages;
    void *memory = NULL;
    TP_TRY(tp_bmpipe_take(e->p, 2 * stages + (stages + 1) * (size_t)(e->n + 2), sizeof(double), &memory));
    q->row.run = memory;
    q->before = q->row.run + 2 * stages;
    q->rest = q->before + stages + 1;
    return TP_OK;
}

tp_status
tp_exact_row_fill(tp_exact *e, tp_exact_row *q)
{
    int n = e->n, stages = e->stages;
    tp_bmpipe_last_path(e->p, &q->row);
    for (int i = 0; i <= n; i++)
        q->rest[stages * (n + 1) + i] = i == n ? 0.0 : INFINITY;
    for (int x = stages - 1; x >= 0; x--)
        for (int i = x; i < n && (x > 0 || i == 0); i++) {
            double least = INFINITY;
            TP_TRY(tp_deadline_check_after(&e->p->asked, 8 * (int64_t)(e->reach[tp_exact_cell(e, x, i)] + 1 - i)));
            for (int j = tp_exact_first_end(e, x, i); j <= e->reach[tp_exact_cell(e, x, i)]; j++)
                least = fmin(least, tp_exact_cost(e, q, x, i, j) + q->rest[(x + 1) * (n + 1) + j]);
            q->rest[x * (n + 1) + i] = least;
        }
    return TP_OK;
}

/* Add the critical path of the last simulation as an inequality. depth: stages of the present branch that are set. */
static tp_status
add_row(tp_exact *e, int depth)
{
    tp_exact_row *q = &e->rows[0];
    e->anew = e->lanes != NULL && e->row_count == ROWS;
    if (e->anew)
        return TP_OK;
    if (e->row_count < ROWS) {
        q = &e->rows[e->row_count++];
        TP_TRY(tp_exact_row_open(e, q));
    } else {
        for (int k = 1; k < ROWS; k++)
            if (e->rows[k].used < q->used)
                q = &e->rows[k];
    }
    q->used = e->p->nodes;
    TP_TRY(tp_exact_row_fill(e, q));
    tp_exact_row_before(e, q, depth);
    if (e->lanes != NULL)
        tp_exact_lanes_add(e);
    return TP_OK;
}

/* Paths through each stage: what a simulation with that stage twice as slow waits for. */
static tp_status
seed_rows(tp_exact *e)
{
    double ignored = 0.0;
    for (int x = 0; x < e->stages && !out_of_time(e); x++) {
        memcpy(e->cut, e->best_cut, (size_t)(e->stages + 1) * sizeof *e->cut);
        TP_TRY(tp_exact_simulate(e, &ignored));
        e->p->load[x] *= 2.0;
        e->p->load[e->stages + x] *= 2.0;
        tp_bmpipe_simulate(e->p);
        TP_TRY(add_row(e, 0));
    }
    return TP_OK;
}

/* ---- the search ------------------------------------------------------------------------------------------------------------ */

/* 1: some inequality ends the branch where stages 0 .. stage are set. */
static int
is_cut_off(tp_exact *e, int stage, int to)
{
    if (e->lanes != NULL)
        return tp_exact_lanes_end(e, stage, to);
    for (int k = 0; k < e->row_count; k++) {
        tp_exact_row *q = &e->rows[k];
        q->before[stage + 1] = q->before[stage] + tp_exact_cost(e, q, stage, e->cut[stage], to);
        if (q->before[stage + 1] + q->rest[(stage + 1) * (e->n + 1) + to] >= tp_exact_goal(e)) {
            q->used = e->p->nodes;
            return 1;
        }
    }
    return 0;
}

static tp_status
visit_leaf(tp_exact *e)
{
    double makespan = 0.0;
    e->p->evaluations++;
    TP_TRY(tp_exact_simulate(e, &makespan));
    tp_exact_keep(e, makespan);
    for (int x = 0; x < e->stages; x++) {
        double bound = 0.0, real = 0.0;
        TP_TRY(least_extra(e, x, e->cut[x], e->cut[x + 1], 0, &bound));
        TP_TRY(least_extra(e, x, e->cut[x], e->cut[x + 1], 1, &real));
        e->unsure |= real > bound;
    }
    return isinf(makespan) ? TP_OK : add_row(e, e->stages);
}

/* Called when the search has found no better plan for a while. Where seconds are whole numbers, try to prove that there is none
 * (bmpipe_proof.c), which ends the search; if that fails weigh the inequalities in lanes from now on (bmpipe_lanes.c). */
static tp_status
go_on(tp_exact *e, int depth)
{
    e->prove_at = INT64_MAX;
    if (e->whole)
        TP_TRY(tp_exact_prove(e, &e->done));
    if (e->done || e->strict || e->lanes != NULL || e->row_count == ROWS)
        return TP_OK;
    return tp_exact_lanes_open(e, depth);
}

static tp_status
branch(tp_exact *e, int stage, double extra_s, double most_s)
{
    if (stage == e->stages)
        return visit_leaf(e);
    int from = e->cut[stage], count = 0;
    tp_exact_child *children = e->children + tp_exact_cell(e, stage, 0);
    for (int to = tp_exact_first_end(e, stage, from); to <= e->reach[tp_exact_cell(e, stage, from)]; to++) {
        double extra = tp_exact_extra(e, stage, from, to), own = tp_exact_weight(e, stage, from, to, extra);
        double bound = tp_exact_bound(e, stage + 1, to, extra_s + extra, own > most_s ? own : most_s);
        if (bound < tp_exact_goal(e))
            children[count++] = (tp_exact_child){bound, to};
    }
    qsort(children, (size_t)count, sizeof *children, tp_exact_by_bound);
    for (int k = 0; k < count && children[k].bound_s < tp_exact_goal(e); k++) {
        int to = children[k].to;
        if ((++e->p->nodes & 255) == 0 && tp_bmpipe_is_late(e->p))
            return TP_OK;
        if (e->p->nodes >= e->prove_at) {
            TP_TRY(go_on(e, stage));
            if (e->done)
                return TP_OK;
        }
        e->cut[stage + 1] = to;
        if (is_cut_off(e, stage, to))
            continue;
        double extra = tp_exact_extra(e, stage, from, to), own = tp_exact_weight(e, stage, from, to, extra);
        TP_TRY(branch(e, stage + 1, extra_s + extra, own > most_s ? own : most_s));
        if (e->p->late || e->done || e->anew)
            return TP_OK;
        e->cut[stage + 1] = to;
    }
    return TP_OK;
}

static tp_status
search_once(tp_exact *e)
{
    for (int k = 0; k < e->row_count; k++)
        e->rows[k].before[0] = e->rows[k].row.lag_s;
    memset(e->cut, 0, (size_t)(e->stages + 1) * sizeof *e->cut);
    return branch(e, 0, 0.0, 0.0);
}

/* Search all branches, beginning with the inequalities known so far; start anew, with the best plan so far, without lanes where these
 * have no room for more. */
static tp_status
search(tp_exact *e)
{
    tp_exact before = *e;
    int64_t evaluations = e->p->evaluations;
    TP_TRY(search_once(e));
    if (!e->anew || e->p->late)
        return TP_OK;
    before.best_s = e->best_s; /* its cut is in before.best_cut */
    *e = before;
    e->strict = 1;
    e->p->nodes = 0;
    e->p->evaluations = evaluations;
    for (int k = 0; k < e->row_count; k++)
        e->rows[k].used = 0;
    return search_once(e);
}

/* A first plan: the least largest w among the boundaries that fit, with everything recomputed. */
static tp_status
first_plan(tp_exact *e)
{
    int n = e->n, stages = e->stages;
    double makespan = 0.0;
    void *memory = NULL;
    TP_TRY(tp_exact_simulate(e, &makespan)); /* the boundaries that fit best */
    tp_exact_keep(e, makespan);
    TP_TRY(tp_bmpipe_take(e->p, (size_t)(stages + 1) * (size_t)(n + 1), sizeof(double), &memory));
    double *least = memory;
    TP_TRY(tp_bmpipe_take(e->p, (size_t)(stages + 1) * (size_t)(n + 1), sizeof(int), &memory));
    int *next = memory;
    for (int i = 0; i <= n; i++)
        least[stages * (n + 1) + i] = i == n ? 0.0 : INFINITY;
    for (int x = stages - 1; x >= 0; x--)
        for (int i = 0; i < n; i++) {
            least[x * (n + 1) + i] = INFINITY;
            TP_TRY(tp_deadline_check_after(&e->p->asked, 8 * (int64_t)(n - i)));
            for (int j = i + 1; j <= n - (stages - 1 - x); j++) {
                if (excess(e, x, i, j) > e->p->options->memory_bytes * TP_BMPIPE_SLACK)
                    break;
                double own = tp_exact_weight(e, x, i, j, 0.0), worst = fmax(own, least[(x + 1) * (n + 1) + j]);
                if (own >= least[x * (n + 1) + i])
                    break; /* a longer interval takes no less */
                if (worst < least[x * (n + 1) + i]) {
                    least[x * (n + 1) + i] = worst;
                    next[x * (n + 1) + i] = j;
                }
            }
        }
    e->least_most_s = least[0];
    for (int x = 0; x < stages; x++)
        e->cut[x + 1] = next[x * (n + 1) + e->cut[x]];
    TP_TRY(tp_exact_simulate(e, &makespan));
    tp_exact_keep(e, makespan);
    return tp_exact_improve(e);
}

/* The bound where time ran out: that of the root, before any branch. */
static double
root_bound(const tp_exact *e, double label_s)
{
    double bound = label_s;
    for (int k = 0; k < e->row_count; k++)
        bound = fmax(bound, e->rows[k].row.lag_s + e->rows[k].rest[0]);
    return fmin(bound, e->best_s);
}

static tp_status
exact_open(tp_exact *e, tp_bmpipe *p)
{
    *e = (tp_exact){.p = p, .n = p->n, .stages = p->stages, .best_s = INFINITY};
    size_t cells = (size_t)e->stages * (size_t)e->n, suffixes = (size_t)(e->stages + 1) * (size_t)(e->n + 1);
    e->constant_s = p->forward_s[p->n] + p->backward_s[p->n] + 2 * (e->stages - 1) * p->options->comm_s;
    struct {
        void **to;
        size_t count, size;
    } wanted[] = {
        {(void **)&e->reach, cells, sizeof *e->reach},
        {(void **)&e->extra, cells, sizeof *e->extra},
        {(void **)&e->suffix, suffixes, sizeof *e->suffix},
        {(void **)&e->scratch, LABELS + 1, sizeof *e->scratch},
        {(void **)&e->rows, ROWS, sizeof *e->rows},
        {(void **)&e->children, cells, sizeof *e->children},
        {(void **)&e->cut, (size_t)e->stages + 1, sizeof *e->cut},
        {(void **)&e->best_cut, (size_t)e->stages + 1, sizeof *e->best_cut},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        TP_TRY(tp_bmpipe_take(p, wanted[i].count, wanted[i].size, wanted[i].to));
    return TP_OK;
}

/* Are all seconds whole numbers, and sums of them, and half of one more, exact? */
static int
is_whole(const tp_bmpipe *p)
{
    const tp_bmpipe_layers *l = p->layers;
    double all = 4.0 * p->stages * p->options->comm_s;
    int whole = p->options->comm_s == floor(p->options->comm_s);
    for (int t = 0; t < l->types; t++) {
        double most = 0.0;
        whole &= l->forward_s[t] == floor(l->forward_s[t]) && l->backward_s[t] == floor(l->backward_s[t]);
        for (int r = 0; r < l->choices[t]; r++) {
            double extra = l->extra_s[t * l->strategies + r];
            whole &= extra == floor(extra);
            most = fmax(most, extra);
        }
        all += l->count[t] * (l->forward_s[t] + l->backward_s[t] + most);
    }
    return whole && 4.0 * all * p->micros < 4503599627370496.0;
}

/* What the labels say of all plans; where the time ends before there are any, what is known without extra seconds. */
static tp_status
label_all(tp_exact *e, double *labels_s)
{
    TP_TRY(find_reach(e));
    if (!out_of_time(e))
        TP_TRY(find_labels(e));
    *labels_s = out_of_time(e) ? e->constant_s + e->least_most_s : tp_exact_bound(e, 0, 0, 0.0, 0.0);
    *labels_s = fmin(*labels_s, e->best_s);
    return TP_OK;
}

tp_status
tp_bmpipe_exact(tp_bmpipe *p, int32_t *assignment, tp_bmpipe_found *found)
{
    tp_exact e;
    double labels_s = 0.0;
    TP_TRY(exact_open(&e, p));
    e.whole = is_whole(p);
    TP_TRY(find_fit(&e));
    TP_TRY(first_plan(&e));
    TP_TRY(label_all(&e, &labels_s));
    if (labels_s < tp_exact_goal(&e) && !out_of_time(&e)) {
        TP_TRY(seed_rows(&e));
        TP_TRY(search(&e));
    }
    if (isinf(e.best_s))
        return tp_fail(TP_EINTERNAL, "boundaries fit but have no way to recompute");
    for (int x = 0; x < e.stages; x++) {
        const tp_bmpipe_front *front = NULL;
        int from = e.best_cut[x], to = e.best_cut[x + 1];
        TP_TRY(tp_bmpipe_front_of(p, from, to, &front));
        tp_bmpipe_assign(p, front, tp_bmpipe_front_find(front, room_bytes(&e, x, from, to)), x, assignment);
    }
    *found = (tp_bmpipe_found){.makespan_s = e.best_s, .proven = !p->late && !e.unsure, .paths = e.row_count};
    found->bound_s = !found->proven ? root_bound(&e, labels_s) * (1.0 - TP_BMPIPE_SLACK) : tp_exact_goal(&e);
    return TP_OK;
}
