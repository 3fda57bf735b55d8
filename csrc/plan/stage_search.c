#include "csrc/plan/stage_search.h"

#include <math.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"

int
tp_stage_stop(tp_stage_search *q)
{
    if (q->limits.effort > 0 && q->effort > q->limits.effort)
        q->stopped = 1;
    if (q->effort >= q->look) { /* the clock is read now and then */
        q->look = q->effort + 20000;
        q->stopped |= tp_deadline_late();
        if (q->limits.time_limit_s > 0.0)
            q->stopped |= (double)(tp_clock_ns() - q->start_ns) > 1e9 * q->limits.time_limit_s;
    }
    return q->stopped;
}

static void
set_stages(tp_stage_search *q, const int *boundary, int stages)
{
    const tp_stages *s = q->stages;
    for (int k = 0; k < stages; k++)
        tp_f1b_set(&q->f1b, k, s->forward_s[boundary[k + 1]] - s->forward_s[boundary[k]],
                   s->backward_s[boundary[k + 1]] - s->backward_s[boundary[k]]);
}

double
tp_stage_try(tp_stage_search *q, const int *boundary, double limit_s)
{
    const tp_stages *s = q->stages;
    set_stages(q, boundary, s->stages);
    double makespan = tp_f1b_run(&q->f1b, limit_s);
    q->simulations++;
    q->effort += tp_stage_effort(s, s->stages);
    if (makespan < q->best_s) {
        q->best_s = makespan;
        memcpy(q->best, boundary, ((size_t)s->stages + 1) * sizeof *boundary);
    }
    return makespan;
}

static int
within(const tp_stages *s, int k, const int *boundary, double goal)
{
    return tp_stage_fits(s, k, boundary[k], boundary[k + 1]) &&
           tp_stage_bound(s, k, boundary[k], boundary[k + 1]) <= goal;
}

/* Move boundaries a .. b by `by`; keep it if that is better. */
static int
shift(tp_stage_search *q, int *boundary, int a, int b, int by)
{
    const tp_stages *s = q->stages;
    double goal = tp_stage_goal(q);
    int grows = by > 0 ? a - 1 : b, shrinks = by > 0 ? b : a - 1;
    if (boundary[shrinks + 1] - boundary[shrinks] < 2)
        return 0;
    for (int k = a; k <= b; k++)
        boundary[k] += by;
    int good = within(s, grows, boundary, goal) && within(s, shrinks, boundary, goal);
    for (int k = a; good && k < b; k++)
        good = within(s, k, boundary, goal);
    if (good && tp_stage_try(q, boundary, goal) <= goal)
        return 1;
    for (int k = a; k <= b; k++)
        boundary[k] -= by;
    return 0;
}

void
tp_stage_descend(tp_stage_search *q, int *boundary, int64_t steps)
{
    int p = q->stages->stages, better = 1;
    int64_t until = q->effort + steps;
    memcpy(boundary, q->best, ((size_t)p + 1) * sizeof *boundary);
    while (better) {
        better = 0;
        for (int run = 1; run < p; run++)
            for (int a = 1; a + run <= p; a++) {
                if (tp_stage_goal(q) <= q->bound_s || q->effort >= until || tp_stage_stop(q))
                    return;
                q->effort += 2;
                while (shift(q, boundary, a, a + run - 1, 1))
                    better = 1;
                while (shift(q, boundary, a, a + run - 1, -1))
                    better = 1;
            }
    }
}

/* ---- branch and bound ---------------------------------------------------------------------------------------------------- */

enum { IMPROVE = 200 };     /* simulations for a better plan before the proof */
enum { PATIENCE = 300000 }; /* steps before a proof is tried: where few branches are left, they are done by then */

typedef struct {
    tp_stage_search *q;
    double goal;
    int64_t steps; /* of a descent */
    int *boundary, *next, *scratch; /* [stages + 1]: the plan so far; the next end to try for each stage */
    /* [stages][stages] by depth and pivot: E(pivot, depth); the largest first and second excursion so far (m <= p - pivot:
     * the largest whole, and 0) */
    double *between_s, *down_s, *up_s;
    double *forward_s, *backward_s, *base_s; /* [stages] of the pivots; base: head(i) + b + what stage i does in between */
} tree;

/* Stage k from boundary[k] to boundary[k + 1]: a new pivot, and a new turn for the pivots before it. 1 if all paths stay
 * within the goal. */
static int
add_stage(tree *t, int k)
{
    const tp_stages *s = t->q->stages;
    int p = s->stages, m = s->micros;
    tp_stage_times now = tp_stage_times_of(s, k, t->boundary[k], t->boundary[k + 1]);
    double more = now.forward_s + now.backward_s + 2.0 * s->lag_s, turns = p - k, few = m < p - k ? m : p - k;
    double *between = t->between_s + (size_t)k * (size_t)p, *down = t->down_s + (size_t)k * (size_t)p;
    double *up = t->up_s + (size_t)k * (size_t)p, worst = 0.0;
    int i = 0;
    for (; i < k && i < p - m + 1; i++) { /* m <= p - i */
        double f = t->forward_s[i], b = t->backward_s[i], e = between[i - p] + more;
        between[i] = e;
        down[i] = fmax(down[i - p], e + fmax(m * f + few * b, few * f + m * b));
        up[i] = 0.0;
        worst = fmax(worst, t->base_s[i] + down[i]);
    }
    for (; i < k; i++) {
        double e = between[i - p] + more, a = e + turns * t->forward_s[i], c = e + turns * t->backward_s[i];
        between[i] = e;
        down[i] = down[i - p] > a ? down[i - p] : a;
        up[i] = up[i - p] > c ? up[i - p] : c;
        double path = t->base_s[i] + down[i] + up[i];
        worst = worst > path ? worst : path;
    }
    double f = now.forward_s, b = now.backward_s, rest = now.rest_s;
    t->forward_s[k] = f;
    t->backward_s[k] = b;
    between[k] = up[k] = 0.0;
    if (m <= p - k) {
        t->base_s[k] = now.head_s;
        down[k] = fmax(m * (f + b), rest + fmax(m * f + b, f + m * b));
    } else {
        double trips = (m - 1) / (p - k) - 1, gain = rest - (turns - 1.0) * (f + b);
        t->base_s[k] = now.head_s + b + (m - turns) * f + (m - turns - 1.0) * b;
        t->base_s[k] += gain > 0.0 ? trips * gain : 0.0;
        down[k] = fmax(turns * f, f + rest);
        up[k] = fmax(turns * b, b + rest);
    }
    t->q->nodes++;
    t->q->effort += k + 1;
    return worst <= t->goal && t->base_s[k] + down[k] + up[k] <= t->goal;
}

static void
set_goal(tree *t)
{
    t->goal = tp_stage_goal(t->q);
    if (t->goal <= t->q->bound_s || !tp_stages_narrow(t->q->stages, t->goal))
        t->goal = -1.0; /* nothing is left */
}

/* The last end for stage k, within the windows. */
static void
enter(tree *t, int k)
{
    const tp_stages *s = t->q->stages;
    int to = tp_stage_longest(s, k, t->boundary[k], t->goal);
    t->next[k] = to < s->behind[k + 1] ? to : s->behind[k + 1];
}

/* No path through stages 0 .. k, the rest a delay, is beyond the goal: what add_stage looks at, and all others. */
static int
prefix_stays(tree *t, int k)
{
    const tp_stages *s = t->q->stages;
    set_stages(t->q, t->boundary, k + 1);
    t->q->effort += tp_stage_effort(s, k + 1);
    double rest = tp_stage_times_of(s, k, t->boundary[k], t->boundary[k + 1]).rest_s;
    return tp_f1b_bound(&t->q->f1b, k, rest, t->goal) <= t->goal;
}

/* On from stage k, the branch at hand, until there are no more or so many steps are done: the stage then, -1 for none. */
static int
branch(tree *t, int k, int64_t steps)
{
    const tp_stages *s = t->q->stages;
    int64_t until = t->q->effort + steps;
    while (k >= 0 && t->goal >= 0.0 && t->q->effort < until && !tp_stage_stop(t->q)) {
        int to = t->next[k];
        if (to <= t->boundary[k] || to < s->first[k + 1]) {
            k--;
            continue;
        }
        t->next[k]--;
        if (to > s->behind[k + 1] || s->alive[(size_t)(k + 1) * (size_t)(s->blocks + 2) + (size_t)to] != to)
            continue;
        t->boundary[k + 1] = to;
        if (!add_stage(t, k))
            continue;
        if (k + 1 < s->stages) {
            if (prefix_stays(t, k))
                enter(t, ++k);
        } else if (tp_stage_try(t->q, t->boundary, t->goal) <= t->goal) {
            tp_stage_descend(t->q, t->scratch, t->steps);
            set_goal(t);
        }
    }
    return t->goal >= 0.0 ? k : -1;
}

tp_status
tp_stage_branch(tp_arena *arena, tp_stage_search *q)
{
    size_t p = (size_t)q->stages->stages;
    tree t = {.q = q, .steps = TP_STAGE_DESCENT};
    void *ints = NULL, *doubles = NULL;
    set_goal(&t);
    if (t.goal >= 0.0) {
        TP_TRY(tp_arena_take(arena, 3 * (p + 1), sizeof(int), &ints));
        TP_TRY(tp_arena_take(arena, 3 * p * p + 3 * p, sizeof(double), &doubles));
        t.boundary = ints;
        t.next = t.boundary + p + 1;
        t.scratch = t.next + p + 1;
        t.between_s = doubles;
        t.down_s = t.between_s + p * p;
        t.up_s = t.down_s + p * p;
        t.forward_s = t.up_s + p * p;
        t.backward_s = t.forward_s + p;
        t.base_s = t.backward_s + p;
        int done = 0;
        enter(&t, 0);
        int k = branch(&t, 0, PATIENCE);
        if (k >= 0 && !q->stopped) {
            TP_TRY(tp_stage_improve(arena, q, NULL, 0.5, IMPROVE));
            set_goal(&t);
            k = t.goal >= 0.0 ? k : -1;
        }
        if (k >= 0 && !q->stopped)
            TP_TRY(tp_stage_prove(arena, q, &done));
        if (k >= 0 && !done) { /* too large for that: all of the descent, and the branches left */
            t.steps = INT64_MAX / 2;
            tp_stage_descend(q, t.scratch, t.steps);
            set_goal(&t);
            branch(&t, k, INT64_MAX / 2);
        }
    }
    if (!q->stopped)
        q->bound_s = fmax(q->bound_s, tp_stage_goal(q));
    return TP_OK;
}
