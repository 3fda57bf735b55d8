/* Base sets of recomputed tensors, and the reduced cost of every change to them, by the linear bound of memopt_pairs.c. */
#include "csrc/plan/memopt_search.h"

#include <stdlib.h>
#include <string.h>

tp_status
tp_memopt_base_open(tp_memopt *m, tp_memopt_base *out)
{
    *out = (tp_memopt_base){0};
    TP_ARENA_TAKE(&m->arena, m->n, out->in);
    TP_ARENA_TAKE(&m->arena, 2 * (size_t)m->n, out->price);
    TP_ARENA_TAKE(&m->arena, m->n, out->change);
    return TP_OK;
}

static double
bound_of(const tp_memopt_stage *t, double rate, double r, double s)
{
    return (t->time + r + rate * (t->need - t->slack - s)) / (1.0 + t->width * rate);
}

static void
price_all(const tp_memopt_stage *t, double rate, double *price)
{
    double whole = 1.0 / (1.0 + t->width * rate);
    for (int k = 0; k < t->count; k++)
        price[k] = (tp_memopt_seconds(t, k) - rate * tp_memopt_bytes(t, k)) * whole;
}

int
tp_memopt_base_linear(const tp_memopt_stage *t, tp_memopt_base *base)
{
    int at = 0;
    base->r = base->s = base->mu = 0.0;
    base->counted = 0;
    for (; at < t->count; at++) {
        double r = base->r + tp_memopt_seconds(t, at), s = base->s + tp_memopt_bytes(t, at);
        if (tp_memopt_missing(t, r, s) <= t->slack)
            break;
        base->r = r;
        base->s = s;
    }
    if (at == t->count)
        return 0;
    base->size = at;
    base->rate = t->m->ratio[t->m->item[at]];
    if (isinf(base->rate) || isinf(t->width * base->rate))
        return 0;
    base->bound = bound_of(t, base->rate, base->r, base->s);
    memset(base->in, 1, (size_t)at);
    memset(base->in + at, 0, (size_t)(t->count - at));
    price_all(t, base->rate, base->price);
    return 1;
}

/* The k-th least of values (from 0), which end in another order. */
static double
select_least(double *values, int count, int k)
{
    int low = 0, high = count - 1;
    while (low < high) {
        double pivot = values[low + (high - low) / 2];
        int i = low - 1, j = high + 1;
        for (;;) {
            do
                i++;
            while (values[i] < pivot);
            do
                j--;
            while (values[j] > pivot);
            if (i >= j)
                break;
            double swap = values[i];
            values[i] = values[j];
            values[j] = swap;
        }
        if (k <= j)
            high = j;
        else
            low = j + 1;
    }
    return values[k];
}

/* The base of `size` tensors that a price of a byte makes cheapest. */
static void
take_cheapest(const tp_memopt_stage *t, double rate, tp_memopt_base *base)
{
    double *parted = base->price + t->count, most = -INFINITY, least = INFINITY, edge = -INFINITY;
    int left = base->size;
    price_all(t, rate, base->price);
    if (base->size > 0) {
        memcpy(parted, base->price, (size_t)t->count * sizeof *parted);
        edge = select_least(parted, t->count, base->size - 1);
    }
    for (int k = 0; k < t->count; k++) {
        base->in[k] = base->price[k] < edge;
        left -= base->in[k];
    }
    base->r = base->s = 0.0;
    for (int k = 0; k < t->count; k++) {
        if (base->price[k] == edge && left > 0) {
            base->in[k] = 1;
            left--;
        }
        if (base->in[k]) {
            base->r += tp_memopt_seconds(t, k);
            base->s += tp_memopt_bytes(t, k);
            most = fmax(most, base->price[k]);
        } else
            least = fmin(least, base->price[k]);
    }
    base->rate = rate;
    base->mu = isinf(most) ? least : isinf(least) ? most : 0.5 * (most + least);
    base->bound = bound_of(t, rate, base->r, base->s);
}

void
tp_memopt_base_counted(const tp_memopt_stage *t, int size, double rate, double limit, tp_memopt_base *base)
{
    double low = 0.0, high = INFINITY, best = -INFINITY, best_rate = rate;
    base->counted = 1;
    base->size = size;
    for (int turn = 0; turn < 60 && (isinf(high) || high - low > 1e-8 * high); turn++) {
        take_cheapest(t, rate, base);
        if (base->bound > best) {
            best = base->bound;
            best_rate = rate;
        }
        if (best >= limit)
            break;
        if (tp_memopt_missing(t, base->r, base->s) > t->slack)
            low = rate;
        else
            high = rate;
        rate = isinf(high) ? 2.0 * low : 0.5 * (low + high);
    }
    if (base->rate != best_rate)
        take_cheapest(t, best_rate, base);
}

static int
by_cost(const void *a, const void *b)
{
    const tp_memopt_change *p = a, *q = b;
    if (p->cost != q->cost)
        return p->cost < q->cost ? -1 : 1;
    return p->far != q->far ? p->far - q->far : p->k - q->k;
}

void
tp_memopt_base_list(const tp_memopt_stage *t, double limit, tp_memopt_base *base)
{
    base->listed = 0;
    for (int k = 0; k < t->count; k++) {
        double cost = fmax(0.0, base->in[k] ? base->mu - base->price[k] : base->price[k] - base->mu);
        if (cost < 1e-14 * base->bound) /* rounding: such ones take turns, one that is in and one that is not */
            cost = 0.0;
        if (base->bound + cost < limit)
            base->change[base->listed++] = (tp_memopt_change){cost, k, k < base->size ? base->size - 1 - k : k - base->size};
    }
    qsort(base->change, (size_t)base->listed, sizeof *base->change, by_cost);
}
