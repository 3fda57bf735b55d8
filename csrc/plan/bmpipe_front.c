/* The Pareto front of (bytes kept, extra time) of an interval of layers, a multiple-choice knapsack for all limits of memory at
 * once: built from the front of the interval without its last layer. Equal layers give equal fronts, so few are made. */
#include "csrc/plan/bmpipe_core.h"

#include <math.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"

/* Points of a front; after MANY points in all, or once time is up, when only some plan that fits is wanted; and LATE: steps of a
 * merge then. */
enum { MOST = TP_BMPIPE_POINTS, MOST_LATER = 256, MANY = 1 << 22, LATE = 1 << 17 };

static const double SAME = 1e-15; /* relative */

/* Is a point of extra_s worth keeping after one of last_s, which has next fewer bytes? Sums of the same numbers in another order
 * count as the same point. */
static int
is_better(double last_s, double extra_s)
{
    return extra_s < last_s * (1.0 - 1e-13);
}

/* The next sum of a strategy and the parent's points. */
typedef struct {
    double bytes, extra_s;
    int strategy, at;
} sum;

static int
comes_first(const sum *x, const sum *y)
{
    return x->bytes != y->bytes       ? x->bytes < y->bytes
           : x->extra_s != y->extra_s ? x->extra_s < y->extra_s
                                      : x->strategy < y->strategy;
}

/* Make a heap of `count` one again, whose top may come too early. */
static void
sink(sum *heap, int count, int at)
{
    sum moved = heap[at];
    for (int child = 2 * at + 1; child < count; child = 2 * at + 1) {
        child += child + 1 < count && comes_first(&heap[child + 1], &heap[child]);
        if (comes_first(&moved, &heap[child]))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

/* All sums of a parent's point and a strategy, by bytes, dominated ones left out: into p->merge; returns how many. A better point
 * takes the place of one with the same bytes but for the rounding of sums, other than the first, with which an interval is known to
 * fit: so TP_BMPIPE_LAYERS merges move no point by more than TP_BMPIPE_SLACK. What is no better than the last point is no better
 * than later ones, either, so that the heap does not see it. */
static int
merge(const tp_bmpipe *p, const tp_bmpipe_front *parent, int type)
{
    const tp_bmpipe_layers *l = p->layers;
    const double *bytes = l->activation_bytes + (size_t)type * (size_t)l->strategies;
    const double *extra = l->extra_s + (size_t)type * (size_t)l->strategies;
    sum heap[TP_BMPIPE_CHOICES];
    int count = 0, open = l->choices[type];
    for (int r = 0; r < open; r++)
        heap[r] = (sum){parent->point[0].bytes + bytes[r], parent->point[0].extra_s + extra[r], r, 0};
    for (int at = open / 2 - 1; at >= 0; at--)
        sink(heap, open, at);
    while (open > 0) {
        sum *top = heap;
        const tp_bmpipe_point next = {top->bytes, top->extra_s, top->at, top->strategy};
        if (count == 0 || is_better(p->merge[count - 1].extra_s, next.extra_s)) {
            count -= count > 1 && next.bytes <= p->merge[count - 1].bytes * (1.0 + SAME);
            p->merge[count++] = next;
        }
        const tp_bmpipe_point *base = parent->point + top->at + 1, *end = parent->point + parent->count;
        while (base < end && !is_better(p->merge[count - 1].extra_s, base->extra_s + extra[top->strategy]))
            base++;
        if (base < end)
            *top = (sum){base->bytes + bytes[top->strategy], base->extra_s + extra[top->strategy], top->strategy,
                         (int)(base - parent->point)};
        else
            *top = heap[--open];
        if (open > 0)
            sink(heap, open, 0);
    }
    return count;
}

/* How many points a front may have; its first, with the fewest bytes, always stays. */
static int
most_points(const tp_bmpipe *p, int type)
{
    int choices = p->layers->choices[type], late = LATE / (choices * choices);
    if (p->end_ns != 0 && tp_clock_ns() > p->end_ns)
        return late < MOST_LATER ? late : MOST_LATER;
    return p->points > MANY ? MOST_LATER : MOST;
}

static tp_status
extend(tp_bmpipe *p, const tp_bmpipe_front *parent, int type, tp_bmpipe_front **out)
{
    int count = merge(p, parent, type), most = most_points(p, type), kept = count < most ? count : most;
    void *memory = NULL;
    TP_TRY(tp_deadline_check_after(&p->asked, 4 * (int64_t)parent->count * p->layers->choices[type]));
    TP_TRY(tp_bmpipe_take(p, 1, sizeof(tp_bmpipe_front), &memory));
    tp_bmpipe_front *front = memory;
    TP_TRY(tp_bmpipe_take(p, (size_t)kept, sizeof(tp_bmpipe_point), &memory));
    *front = (tp_bmpipe_front){parent, memory, kept, type, parent->exact && kept == count};
    for (int i = 0; i < kept; i++)
        front->point[i] = p->merge[kept == count ? i : (int)((int64_t)i * (count - 1) / (kept - 1))];
    p->points += kept;
    *out = front;
    return TP_OK;
}

tp_status
tp_bmpipe_front_of(tp_bmpipe *p, int from, int to, const tp_bmpipe_front **out)
{
    int known = to;
    const tp_bmpipe_front *front = NULL;
    for (; known > from; known--) {
        int start = tp_bmpipe_canonical(p, from, known);
        front = p->front[(size_t)start * (size_t)(p->n + 1) + (size_t)(start + known - from)];
        if (front != NULL)
            break;
    }
    if (front == NULL)
        front = p->nothing;
    while (known < to) {
        tp_bmpipe_front *next = NULL;
        TP_TRY(extend(p, front, p->type_of[known], &next));
        known++;
        int start = tp_bmpipe_canonical(p, from, known);
        p->front[(size_t)start * (size_t)(p->n + 1) + (size_t)(start + known - from)] = next;
        front = next;
    }
    *out = front;
    return TP_OK;
}

int
tp_bmpipe_front_find(const tp_bmpipe_front *front, double bytes)
{
    int low = -1, high = front->count;
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (front->point[middle].bytes <= bytes)
            low = middle;
        else
            high = middle;
    }
    return low;
}

void
tp_bmpipe_assign(const tp_bmpipe *p, const tp_bmpipe_front *front, int point, int virtual_stage, int32_t *assignment)
{
    for (; front != p->nothing; front = front->parent) {
        const tp_bmpipe_point *at = &front->point[point];
        assignment[((size_t)front->type * (size_t)p->layers->strategies + (size_t)at->strategy) * (size_t)p->virtuals +
                   (size_t)virtual_stage]++;
        point = at->parent;
    }
}

/* ---- fractional strategies ----------------------------------------------------------------------------------------------- */

/* The next strategy of the type's lower convex hull: of those with fewer bytes than `at`, the one with the least seconds a
 * byte, the one with fewest bytes among equals; -1. *rate: seconds a byte. */
static int
next_on_hull(const tp_bmpipe_layers *l, int type, int at, double *rate)
{
    const double *bytes = l->activation_bytes + (size_t)type * (size_t)l->strategies;
    const double *extra = l->extra_s + (size_t)type * (size_t)l->strategies;
    int next = -1;
    for (int r = 0; r < l->choices[type]; r++) {
        if (bytes[r] >= bytes[at])
            continue;
        double slope = (extra[r] - extra[at]) / (bytes[at] - bytes[r]);
        if (next < 0 || slope < *rate || (slope == *rate && bytes[r] < bytes[next])) {
            next = r;
            *rate = slope;
        }
    }
    return next;
}

/* The strategy of least extra time, of fewest bytes among equals: where the hull begins. */
static int
hull_start(const tp_bmpipe_layers *l, int type)
{
    size_t row = (size_t)type * (size_t)l->strategies;
    int start = 0;
    for (int r = 1; r < l->choices[type]; r++)
        if (l->extra_s[row + (size_t)r] < l->extra_s[row + (size_t)start] ||
            (l->extra_s[row + (size_t)r] == l->extra_s[row + (size_t)start] &&
             l->activation_bytes[row + (size_t)r] < l->activation_bytes[row + (size_t)start]))
            start = r;
    return start;
}

double
tp_bmpipe_fractional(const tp_bmpipe *p, int from, int to, double bytes)
{
    const tp_bmpipe_layers *l = p->layers;
    int32_t *at = (int32_t *)p->merge; /* [types] where each type stands on its hull */
    double kept = 0.0, extra = 0.0;
    for (int i = from; i < to; i++) {
        int t = p->type_of[i];
        at[t] = hull_start(l, t);
        kept += l->activation_bytes[t * l->strategies + at[t]];
        extra += l->extra_s[t * l->strategies + at[t]];
    }
    while (kept > bytes) { /* the cheapest byte first: the optimum of the linear relaxation */
        int best = -1, best_next = -1;
        double best_rate = INFINITY;
        for (int t = p->type_of[from]; t <= p->type_of[to - 1]; t++) {
            double rate = INFINITY;
            int next = next_on_hull(l, t, at[t], &rate);
            if (next >= 0 && rate < best_rate) {
                best = t;
                best_next = next;
                best_rate = rate;
            }
        }
        if (best < 0)
            return INFINITY;
        int layers = 0;
        for (int i = from; i < to; i++)
            layers += p->type_of[i] == best;
        double saved = layers * (l->activation_bytes[best * l->strategies + at[best]] -
                                 l->activation_bytes[best * l->strategies + best_next]);
        double part = kept - bytes < saved ? kept - bytes : saved;
        kept -= saved;
        extra += part * best_rate;
        at[best] = best_next;
    }
    return extra;
}
