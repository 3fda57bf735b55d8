/* Which tensors a stage recomputes, exactly: an expanding core (Pisinger, "A minimal algorithm for the 0-1 knapsack
 * problem", Operations Research 45, 1997) for the value max(T + r, (D - s) / swap_Bps) of dawnpiper.h.
 *
 * Tensors are ordered by rising seconds per byte. The base takes them until D is reached; then, in turn, the next tensor is
 * added or the last one removed, or neither, in every remaining state. A state is dropped if another has no more seconds
 * and no fewer bytes, or if its relaxation (further bytes at the rate of the next tensor, bytes given back at the rate of
 * the last) is not below what is known. When none is left, what is known is the optimum. */
#include "csrc/plan/memopt_search.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "csrc/base/deadline.h"

enum {
    CORE = 1000,  /* states after which meeting in the middle (memopt_pairs.c) is quicker */
    WIDE = 8192, /* where tensors tie: with more states at once the search goes on only while dominance drops a quarter of all */
    CHANGED = 2,  /* the list of states with a change */
};

typedef struct {
    tp_memopt_stage *t;
    tp_memopt *m;
    int start, turn, low, high; /* start: the base is the items before it; [low + 1, high) have been decided */
    int best_state;
    int64_t used, dominated;  /* states made, and those that another made needless */
    int length, now, changed; /* the list that counts; of the third */
} core;

static double
bound_of(const core *c, double r, double s)
{
    double time = c->t->time + r, slack = c->t->slack, missing = tp_memopt_missing(c->t, r, s);
    if (missing > slack) {
        if (c->high >= c->t->count)
            return tp_memopt_value(c->t, r, s);
        return time + fmin(DBL_MAX, tp_memopt_rate(c->t, c->m->ratio[c->m->item[c->high]])) * (missing - slack);
    }
    if (c->low < 0 || missing == slack)
        return time;
    return time - tp_memopt_rate(c->t, c->m->ratio[c->m->item[c->low]]) * (slack - missing);
}

static double
limit_of(const core *c)
{
    return fmin(c->t->best, c->t->cutoff) * (1.0 - 1e-13);
}

/* Room for so many states more, `length` in a list. */
static tp_status
grow(core *c, int64_t more, int64_t length)
{
    tp_memopt *m = c->m;
    if (c->used + more > m->pool_room) {
        void *pool = NULL;
        m->pool_room = 2 * (c->used + more) + 512;
        TP_TRY(tp_arena_take(&m->arena, (size_t)m->pool_room, sizeof *m->pool, &pool));
        if (c->used > 0)
            memcpy(pool, m->pool, (size_t)c->used * sizeof *m->pool);
        m->pool = pool;
    }
    if (length <= m->list_room)
        return TP_OK;
    m->list_room = 2 * length + 512;
    for (int k = 0; k < 3; k++) {
        void *list = NULL;
        TP_TRY(tp_arena_take(&m->arena, (size_t)m->list_room, sizeof *m->list[k], &list));
        int kept = k == c->now ? c->length : k == CHANGED ? c->changed : 0;
        if (kept > 0)
            memcpy(list, m->list[k], (size_t)kept * sizeof *m->list[k]);
        m->list[k] = list;
    }
    return TP_OK;
}

static int
push(core *c, double r, double s, int parent, int item)
{
    int at = (int)c->used++;
    c->m->pool[at] = (tp_memopt_state){r, s, parent, item};
    double value = tp_memopt_value(c->t, r, s);
    if (value < c->t->best) {
        c->t->best = value;
        c->best_state = at;
    }
    return at;
}

/* The terms of bound_of after the core has grown: what bytes that are missing, or too many, cost. */
typedef struct {
    double goal, width, most, up, down, limit; /* up, down: seconds of a byte more and less; +inf and 0 where no tensor is left */
} prospect;

static prospect
look_ahead(const core *c)
{
    const tp_memopt *m = c->m;
    double width = c->t->width, more = INFINITY, less = 0.0;
    if (c->high < c->t->count)
        more = fmin(DBL_MAX, tp_memopt_rate(c->t, m->ratio[m->item[c->high]]));
    if (c->low >= 0)
        less = tp_memopt_rate(c->t, m->ratio[m->item[c->low]]);
    return (prospect){c->t->need - c->t->slack - width * c->t->time, width, c->t->time, more, less, limit_of(c)};
}

/* May the state (r, s) lead to less than the best known value? */
static inline int
leads_on(const core *c, const prospect *o, double r, double s)
{
    double missing = o->goal - s - o->width * r;
    if (missing > 0.0 && c->high >= c->t->count)
        return tp_memopt_value(c->t, r, s) < o->limit;
    if (missing == 0.0) /* of which an infinite price is none */
        return o->most + r < o->limit;
    return o->most + r + (missing > 0.0 ? o->up : o->down) * missing < o->limit;
}

/* List the states with an item changed that may still count; their `at` is the parent's. */
static void
change_all(core *c, const prospect *o, double dr, double ds)
{
    const tp_memopt_live *in = c->m->list[c->now];
    tp_memopt_live *out = c->m->list[CHANGED];
    int length = 0;
    for (int k = 0; k < c->length; k++) {
        out[length] = (tp_memopt_live){in[k].r + dr, in[k].s + ds, in[k].at};
        length += leads_on(c, o, out[length].r, out[length].s) || tp_memopt_value(c->t, out[length].r, out[length].s) < c->t->best;
    }
    c->changed = length;
}

/* Merge these with the states without the change, leaving out dominated ones. */
static void
merge(core *c, prospect *o, int item)
{
    const tp_memopt_live *in = c->m->list[c->now], *changed = c->m->list[CHANGED];
    tp_memopt_live *out = c->m->list[1 - c->now];
    int length = 0, p = 0, more = c->changed;
    double most = -INFINITY;
    for (int q = 0; q <= more; q++) {
        const tp_memopt_live *next = &changed[q];
        for (; p < c->length && (q == more || in[p].r < next->r || (in[p].r == next->r && in[p].s >= next->s)); p++) {
            if (in[p].s > most && leads_on(c, o, in[p].r, in[p].s))
                out[length++] = in[p];
            most = in[p].s > most ? in[p].s : most;
        }
        if (q == more)
            break;
        if (next->s <= most) {
            c->dominated++;
            continue;
        }
        most = next->s;
        int at = push(c, next->r, next->s, next->at, item);
        o->limit = limit_of(c);
        if (leads_on(c, o, next->r, next->s))
            out[length++] = (tp_memopt_live){next->r, next->s, at};
    }
    c->length = length;
    c->now = 1 - c->now;
}

/* Decide item k: every state with it changed (sign 1: added, -1: removed), and every state without the change. */
static tp_status
expand(core *c, int k, int sign)
{
    tp_memopt *m = c->m;
    prospect o = look_ahead(c);
    int node = m->item[k];
    c->changed = 0;
    TP_TRY(grow(c, 0, c->length + 1));
    change_all(c, &o, sign * m->nodes->recompute_s[node], sign * m->nodes->activation_bytes[node]);
    TP_TRY(grow(c, c->changed, c->length + c->changed + 1));
    merge(c, &o, k);
    return TP_OK;
}

/* The base, and what one exchange makes of it. */
static int
begin(core *c)
{
    const tp_nodes *nodes = c->m->nodes;
    const int *item = c->m->item;
    double r = 0.0, s = 0.0, more_r = 0.0, more_s = 0.0;
    int at = 0, first = -1;
    while (at < c->t->count && tp_memopt_missing(c->t, more_r, more_s) > c->t->slack) {
        r = more_r;
        s = more_s;
        more_r += nodes->recompute_s[item[at]];
        more_s += nodes->activation_bytes[item[at]];
        at++;
    }
    if (at == 0)
        return push(c, 0.0, 0.0, -1, -1), 0;
    at--; /* the last one made it: the base is without. Taken off again it might leave nothing, as beside 1e18 seconds */
    first = push(c, r, s, -1, -1);
    double best = INFINITY;
    int pick = at;
    for (int k = at; k < c->t->count; k++) {
        double value = tp_memopt_value(c->t, r + nodes->recompute_s[item[k]], s + nodes->activation_bytes[item[k]]);
        if (value < best) {
            best = value;
            pick = k;
        }
    }
    push(c, r + nodes->recompute_s[item[pick]], s + nodes->activation_bytes[item[pick]], first, pick);
    if (isinf(c->t->best)) { /* all of them, short by the rounding of sums alone */
        c->t->best = c->t->time + c->m->pool[c->used - 1].r;
        c->best_state = (int)c->used - 1;
    }
    return at;
}

/* The set of the best state: the base [0, start), changed along its parents. */
static void
write_chosen(const core *c, int start)
{
    const tp_memopt *m = c->m;
    memset(m->chosen + c->t->first, 0, (size_t)(c->t->end - c->t->first));
    for (int k = 0; k < start; k++)
        m->chosen[m->item[k]] = 1;
    for (int at = c->best_state; at >= 0 && m->pool[at].item >= 0; at = m->pool[at].parent)
        m->chosen[m->item[m->pool[at].item]] ^= 1;
}

/* Expand until the core holds all items, or the question is answered, or `states` states were seen. tied: no bound tells sets
 * apart, only dominance can: where sizes are whole numbers sums meet, otherwise never. */
static tp_status
expand_core(core *c, int64_t states, int tied)
{
    tp_memopt_stage *t = c->t;
    tp_memopt *m = t->m;
    double before = t->best, low = INFINITY;
    int64_t room = m->limit / 64 + 8 < states ? m->limit / 64 + 8 : states, used = c->used; /* no one stage takes all there is */
    if (c->start < 0) {
        TP_TRY(grow(c, 8, 8));
        c->start = begin(c);
        c->low = c->start - 1;
        c->high = c->start;
        m->list[0][0] = (tp_memopt_live){m->pool[0].r, m->pool[0].s, 0};
        c->length = bound_of(c, m->pool[0].r, m->pool[0].s) < limit_of(c);
    }
    while (c->length > 0 && t->best > t->enough && (c->low >= 0 || c->high < t->count)) {
        if (c->used > room || (tied && c->length > WIDE && 4 * c->dominated < c->used) || m->states + c->used - used > m->limit)
            break;
        TP_TRY(tp_deadline_check_after(&m->asked, 16 * (int64_t)(c->length + 1)));
        if (c->high < t->count && (c->turn++ % 2 == 0 || c->low < 0)) {
            c->high++;
            TP_TRY(expand(c, c->high - 1, 1));
        } else {
            c->low--;
            TP_TRY(expand(c, c->low + 1, -1));
        }
    }
    if (c->low >= 0 || c->high < t->count)
        for (int k = 0; k < c->length; k++)
            low = fmin(low, bound_of(c, m->list[c->now][k].r, m->list[c->now][k].s) * (1.0 - 1e-13));
    t->low = fmax(t->low, fmin(low, fmin(t->best, t->cutoff)));
    m->states += c->used - used;
    if (t->best < before)
        write_chosen(c, c->start);
    return TP_OK;
}

/* The core search for easy stages; then whichever search bounds better, as far as the limit allows. */
static tp_status
search_stage(tp_memopt_stage *t)
{
    tp_memopt *m = t->m;
    core c = {.t = t, .m = m, .best_state = -1, .start = -1};
    tp_memopt_outlook outlook;
    TP_TRY(expand_core(&c, CORE, 0));
    if (tp_memopt_settled(t) || m->limit / 64 < CORE)
        return TP_OK;
    TP_TRY(tp_memopt_pairs(t, 0, &outlook));
    if (outlook == TP_MEMOPT_CORE && !tp_memopt_settled(t))
        TP_TRY(expand_core(&c, 16 * CORE, 0));
    if (outlook != TP_MEMOPT_TIED && !tp_memopt_settled(t))
        TP_TRY(tp_memopt_pairs(t, 1, &outlook));
    if (tp_memopt_settled(t) || (outlook == TP_MEMOPT_TIED && t->best <= t->low * (1.0 + 1e-9)))
        return TP_OK;
    return expand_core(&c, m->limit, outlook == TP_MEMOPT_TIED);
}

tp_status
tp_memopt_knapsack(tp_memopt *m, int x, int i, int j, double enough, double cutoff, double within, tp_memopt_known *known,
                   double *best_s)
{
    tp_memopt_range *range = &known->range;
    tp_memopt_stage t = {.m = m, .first = i, .end = j, .time = tp_memopt_time(m, i, j), .width = m->options->swap_Bps,
                         .enough = enough, .cutoff = cutoff, .within = within, .best = known->chosen_s, .low = range->low_s};
    t.need = tp_memopt_need(m, x, i, j, &t.slack);
    m->knapsacks++;
    TP_TRY(tp_deadline_check_after(&m->asked, 4 * (int64_t)m->n));
    for (int k = 0; k < m->n; k++)
        if (m->order[k] >= i && m->order[k] < j && m->nodes->activation_bytes[m->order[k]] > 0.0)
            m->item[t.count++] = m->order[k];
    if (known->chosen != NULL) /* it goes on from what an earlier search found */
        memcpy(m->chosen + i, known->chosen, (size_t)(j - i));
    TP_TRY(search_stage(&t));
    known->spent = !tp_memopt_settled(&t);
    *best_s = t.best;
    range->high_s = fmin(range->high_s, t.best);
    range->low_s = fmin(fmax(range->low_s, t.low), range->high_s);
    return TP_OK;
}
