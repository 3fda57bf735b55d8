/* A forward search in O(n log n) where the costs are Monge (PLANNERS.md 1.3, 9.2). With source(j) = u[j] + a2 j, the value of
 * a slice from j to e is source(j) + h[e - j] (slice_kernel.h). If h is convex, then for j < j' and e < e'
 *     h[e - j] + h[e' - j'] <= h[e' - j] + h[e - j'],
 * and if windows end no earlier for later starts, infinities stand only where the inequality allows them. The best start then
 * never falls with e, so a queue of (start, first end where it is the best) with bisection finds all of them (the queue of
 * Galil and Giancarlo, 1989, for concave costs). Only what was seen to hold is used: h as it is stored, in these doubles. */
#include "csrc/plan/slice_dp.h"

#include <math.h>

#include "csrc/base/deadline.h"

/* The last length up to which h is convex. */
int
tp_slice_convex(const tp_slice_table *t, int n)
{
    int i = 2;
    if (!t->rising || !t->monotone)
        return 0;
    /* Two roundings of neighbouring differences would let a bend of one unit pass: long double has bits to spare. */
    while (i < n && ((long double)t->h[i + 1] - t->h[i]) >= ((long double)t->h[i] - t->h[i - 1]))
        i++;
    return i < n ? i : n;
}

int
tp_slice_monge_fits(const tp_slice_dp *dp)
{
    int reach = 0, longest = 0;
    if (dp->limits != 1 || dp->cap < dp->n || dp->convex == 0)
        return 0;
    for (int j = 1; j < dp->n; j++) {
        if (dp->last[j] > 0 && j + dp->last[j] < reach)
            return 0;
        if (dp->last[j] > 0)
            reach = j + dp->last[j];
        longest = dp->last[j] > longest ? dp->last[j] : longest;
    }
    return longest <= dp->convex;
}

typedef struct {
    const tp_slice_dp *dp;
    double *source;
} values;

static double
value(const values *v, int j, int e)
{
    return e - j <= v->dp->last[j] ? v->source[j] + v->dp->sum.h[e - j] : INFINITY;
}

/* The first end from low on where the later start is no worse; high if none is before. */
static int
first_no_worse(const values *v, int later, int before, int low, int high)
{
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (value(v, later, middle) <= value(v, before, middle))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static int
lesser(int a, int b)
{
    return a < b ? a : b;
}

/* Add start j at the back; ends from e on count. */
static void
append(const values *v, int j, int e, int front, int *back)
{
    int n = v->dp->n, *start = v->dp->queue, *first = start + n + 1;
    while (*back > front) {
        int old = start[*back - 1], at = first[*back - 1] > e ? first[*back - 1] : e;
        if (at > n || value(v, j, at) > value(v, old, at))
            break;
        --*back;
    }
    int from = e;
    if (*back > front) {
        int old = start[*back - 1], low = (first[*back - 1] > e ? first[*back - 1] : e) + 1;
        int high = lesser(j + v->dp->last[j], old + v->dp->last[old]) + 1;
        from = low < high ? first_no_worse(v, j, old, low, high) : low;
    }
    if (from > n || from > j + v->dp->last[j])
        return;
    start[*back] = j;
    first[(*back)++] = from;
}

void
tp_slice_monge_forward(tp_slice_dp *dp)
{
    const values v = {.dp = dp, .source = dp->source};
    int n = dp->n, front = 0, back = 0, *start = dp->queue, *first = start + n + 1;
    for (int e = 1; e <= n && !tp_deadline_told_after(&dp->asked, 16); e++) {
        int j = e - 1;
        if (j >= 1 && dp->u[j] < INFINITY && dp->last[j] > 0) {
            dp->source[j] = dp->u[j] + dp->sum.a2 * j;
            append(&v, j, e, front, &back);
        }
        while (front + 1 < back && first[front + 1] <= e)
            front++;
        if (front < back && first[front] <= e)
            dp->u[e] = fmin(dp->u[e], value(&v, start[front], e)); /* u[e] had the slice from 0 */
    }
}
