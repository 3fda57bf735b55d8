#include "csrc/plan/stages.h"

#include <math.h>

#include "csrc/base/deadline.h"

double
tp_stage_bound(const tp_stages *s, int k, int from, int to)
{
    tp_stage_times t = tp_stage_times_of(s, k, from, to);
    double f = t.forward_s, b = t.backward_s, m = s->micros, turns = s->stages - k;
    if (s->micros <= s->stages - k) /* turns at k (m of each) or at the last stage (one of the other kind) */
        return t.head_s + fmax(m * (f + b), t.rest_s + fmax(m * f + b, f + m * b));
    double down = fmax(turns * f, f + t.rest_s), up = fmax(turns * b, b + t.rest_s);
    double trips = (s->micros - 1) / (s->stages - k) - 1, more = t.rest_s - (turns - 1) * (f + b);
    return t.head_s + down + up + b + (m - turns) * f + (m - turns - 1) * b + (more > 0.0 ? trips * more : 0.0);
}

int
tp_stage_longest(const tp_stages *s, int k, int from, double goal_s)
{
    int low = from, high = s->blocks - (s->stages - 1 - k);
    if (s->reach != NULL) {
        int reach = s->reach[(size_t)k * (size_t)s->blocks + (size_t)from];
        high = reach < high ? reach : high;
    }
    /* low is within the goal (or empty); double the step until high is known not to be, then halve. */
    for (int more = 1; low < high; more *= 2) {
        int to = more < high - low ? low + more : high;
        if (tp_stage_bound(s, k, from, to) <= goal_s) {
            low = to;
        } else {
            high = to - 1;
            break;
        }
    }
    while (low < high) {
        int to = low + (high - low + 1) / 2;
        if (tp_stage_bound(s, k, from, to) <= goal_s)
            low = to;
        else
            high = to - 1;
    }
    return low;
}

/* Fill every stage as far as it goes: behind[k] is the last place where boundary k may be. 1: behind is a plan. 0: there
 * is none. -1: some stage could not take the next block, and an earlier start was assumed: unknown. */
static int
fill(tp_stages *s, double goal_s)
{
    int sure = 1;
    s->behind[0] = 0;
    for (int k = 0; k < s->stages; k++) {
        int from = s->behind[k], to = tp_stage_longest(s, k, from, goal_s);
        while (to == from) {
            sure = 0;
            if (--from < k)
                return 0;
            to = tp_stage_longest(s, k, from, goal_s);
        }
        s->behind[k + 1] = to;
    }
    if (s->behind[s->stages] < s->blocks)
        return 0;
    return sure ? 1 : -1;
}

/* The first place from which stage k reaches boundary k + 1 at first[k + 1] or behind it. */
static int
earliest(const tp_stages *s, int k, double goal_s)
{
    int to = s->first[k + 1], low = k, high = to;
    while (low < high) {
        int from = low + (high - low) / 2;
        if (tp_stage_fits(s, k, from, to) && tp_stage_bound(s, k, from, to) <= goal_s)
            high = from;
        else
            low = from + 1;
    }
    while (low >= to && low <= s->behind[k] && tp_stage_longest(s, k, low, goal_s) == low)
        low++;
    return low;
}

int
tp_stages_narrow(tp_stages *s, double goal_s)
{
    int p = s->stages, n = s->blocks, width = n + 2;
    s->goal_s = goal_s;
    if (fill(s, goal_s) == 0)
        return 0;
    s->first[p] = n;
    for (int k = p - 1; k >= 0; k--)
        if ((s->first[k] = earliest(s, k, goal_s)) > s->behind[k])
            return 0;
    s->alive[(size_t)p * (size_t)width + (size_t)n] = n;
    for (int k = p - 1; k >= 0; k--) {
        int *alive = s->alive + (size_t)k * (size_t)width, *next = alive + width;
        if (tp_deadline_told_after(&s->asked, 64 * (int64_t)(s->behind[k] - s->first[k] + 1)))
            return 0;
        alive[s->behind[k] + 1] = n + 1;
        for (int i = s->behind[k]; i >= s->first[k]; i--) {
            int from = i < s->first[k + 1] ? s->first[k + 1] : i + 1;
            int usable = from <= s->behind[k + 1] && next[from] <= tp_stage_longest(s, k, i, goal_s);
            alive[i] = usable ? i : alive[i + 1];
        }
    }
    return s->first[0] == 0 && s->alive[0] == 0;
}

static double
largest_bound(const tp_stages *s, const int *boundary)
{
    double most = 0.0;
    for (int k = 0; k < s->stages; k++)
        most = fmax(most, tp_stage_bound(s, k, boundary[k], boundary[k + 1]));
    return most;
}

double
tp_stages_take(const tp_stages *s, int late, int *boundary)
{
    boundary[0] = 0;
    for (int k = 0; k < s->stages; k++) {
        const int *alive = s->alive + (size_t)(k + 1) * (size_t)(s->blocks + 2);
        int from = boundary[k] < s->first[k + 1] ? s->first[k + 1] : boundary[k] + 1;
        int to = alive[from];
        if (late) {
            int last = tp_stage_longest(s, k, boundary[k], s->goal_s);
            for (last = last < s->behind[k + 1] ? last : s->behind[k + 1]; alive[last] != last; last--)
                continue;
            to = last;
        }
        boundary[k + 1] = to;
    }
    return largest_bound(s, boundary);
}

void
tp_stages_pivot(tp_stages *s, int *boundary, double *bound_s)
{
    double low = 0.0, high = INFINITY;
    for (int round = 0; round == 0 || (round < 200 && high - low > 1e-13 * high); round++) {
        double goal = round == 0 ? INFINITY : low + 0.5 * (high - low), most = INFINITY;
        int found = fill(s, goal);
        if (found > 0)
            most = largest_bound(s, s->behind);
        else if (found < 0 && tp_stages_narrow(s, goal))
            most = tp_stages_take(s, 1, boundary);
        if (most <= goal)
            high = most;
        else
            low = goal;
    }
    *bound_s = low;
    /* The bounds fall and rise together but for their rounding. */
    for (double slack = 1e-13; !tp_stages_narrow(s, high + slack * high); slack *= 2.0)
        if (tp_deadline_was_told())
            return;
    tp_stages_take(s, 1, boundary);
}

/* Algorithm 1's row of one more stage, `stage`, from the row before it. */
typedef struct {
    const tp_stages *s;
    const double *before;
    int stage;
    double *least;
    int *parent;
} balance_row;

static inline double
load_of(const tp_stages *s, int from, int to)
{
    return (s->forward_s[to] - s->forward_s[from]) + (s->backward_s[to] - s->backward_s[from]);
}

/* One place after another, whatever the row before. */
static tp_status
balance_any(const balance_row *r, int64_t *steps)
{
    for (int i = r->stage + 1; i <= r->s->blocks; i++)
        for (int k = i - 1; k >= r->stage; k--) { /* downwards: the stage only grows */
            TP_TRY(tp_deadline_check_after(steps, 4));
            double load = load_of(r->s, k, i);
            if (load > r->least[i] || !tp_stage_fits(r->s, r->stage, k, i))
                break;
            double value = fmax(r->before[k], load);
            if (value <= r->least[i] && value < INFINITY) {
                r->least[i] = value;
                r->parent[i] = k;
            }
        }
    return TP_OK;
}

/* The first of places low .. high - 1 from which blocks up to `to` are a load within `most` and, if asked, within that of the row
 * before; high: there is none. */
static int
first_within(const balance_row *r, int low, int high, int to, double most, int before)
{
    while (low < high) {
        int k = low + (high - low) / 2;
        if (load_of(r->s, k, to) <= (before ? r->before[k] : most))
            high = k;
        else
            low = k + 1;
    }
    return low;
}

/* The same where the row before never falls: the best place is where the falling load meets it, or the one before that. */
static tp_status
balance_rising(const balance_row *r, int64_t *steps)
{
    int low = r->stage;
    for (int i = r->stage + 1; i <= r->s->blocks; i++) {
        TP_TRY(tp_deadline_check_after(steps, 64));
        while (low < i && !tp_stage_fits(r->s, r->stage, low, i)) /* the next i needs as late a place */
            low++;
        int meet = first_within(r, low, i, i, 0.0, 1);
        double least = meet < i ? r->before[meet] : INFINITY;
        if (meet > low)
            least = fmin(least, load_of(r->s, meet - 1, i));
        if (least < INFINITY) {
            r->least[i] = least;
            r->parent[i] = first_within(r, low, i, i, least, 0);
        }
    }
    return TP_OK;
}

tp_status
tp_stages_balance(tp_arena *arena, const tp_stages *s, int **out)
{
    size_t width = (size_t)s->blocks + 1;
    void *memory = NULL;
    double *least;
    int *parent;
    int64_t steps = 0;
    TP_TRY(tp_arena_take(arena, 2 * width, sizeof(double), &memory));
    least = memory;
    TP_TRY(tp_arena_take(arena, ((size_t)s->stages + 1) * width, sizeof(int), &memory));
    parent = *out = memory;
    for (size_t i = 1; i < width; i++)
        least[i] = INFINITY;
    for (int k = 0; k < s->stages; k++) {
        balance_row row = {s, least + (size_t)(k & 1) * width, k, least + (size_t)(1 - (k & 1)) * width,
                           parent + ((size_t)k + 1) * width};
        int rises = 1;
        for (int i = 0; i <= s->blocks; i++) {
            row.least[i] = INFINITY;
            row.parent[i] = -1;
            rises &= i <= k || row.before[i] >= row.before[i - 1];
        }
        TP_TRY(rises ? balance_rising(&row, &steps) : balance_any(&row, &steps));
    }
    return TP_OK;
}
