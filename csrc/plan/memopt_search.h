/* What the searches of one stage share: memopt_core.c expands a core, memopt_pairs.c joins two lists of changes,
 * memopt_four.c four of them. Internal to the plan room. */
#ifndef TP_PLAN_MEMOPT_SEARCH_H
#define TP_PLAN_MEMOPT_SEARCH_H

#include <math.h>

#include "csrc/plan/memopt.h"

#define TP_MEMOPT_LOOSE 1e-6

/* A stage that must save `need` bytes, tensors in m->item[0 .. count) by rising seconds per byte. */
typedef struct {
    tp_memopt *m;
    int first, end; /* its nodes */
    int count;
    double time, need, width, slack;
    double enough, cutoff; /* as of tp_memopt_decide */
    double within;         /* a set that takes no longer will do, too, where it is at most TP_MEMOPT_LOOSE above low; 0: none */
    double best, low;      /* the best set known, in m->chosen; no set is below low */
} tp_memopt_stage;

/* A set of tensors that the next ones change: those before `start`, or those with in[] set. */
static inline double
tp_memopt_missing(const tp_memopt_stage *t, double r, double s)
{
    return t->need - s - t->width * (t->time + r);
}

static inline double
tp_memopt_value(const tp_memopt_stage *t, double r, double s)
{
    if (tp_memopt_missing(t, r, s) <= t->slack)
        return t->time + r;
    return t->width > 0.0 ? (t->need - s) / t->width : INFINITY;
}

static inline double
tp_memopt_seconds(const tp_memopt_stage *t, int k)
{
    return t->m->nodes->recompute_s[t->m->item[k]];
}

static inline double
tp_memopt_bytes(const tp_memopt_stage *t, int k)
{
    return t->m->nodes->activation_bytes[t->m->item[k]];
}

/* Seconds for a byte, of the tensors and of the bus together, that tensors of `ratio` seconds a byte free; +inf where there is no
 * bus and they are more than a double holds. */
static inline double
tp_memopt_rate(const tp_memopt_stage *t, double ratio)
{
    double hidden = t->width > 0.0 ? t->width * ratio : 0.0;
    return isinf(hidden) ? 1.0 / t->width : ratio / (1.0 + hidden);
}

/* May the search stop? A set is good enough, or proved best, or no set can be below the cutoff. */
static inline int
tp_memopt_settled(const tp_memopt_stage *t)
{
    return t->best <= t->enough || t->low >= fmin(t->best, t->cutoff) * (1.0 - 1e-12) ||
           (t->best <= t->within && t->best <= t->low * (1.0 + TP_MEMOPT_LOOSE));
}

/* A change of one tensor against a base: what it costs at least (a relaxation's reduced cost, 0 or more). */
typedef struct {
    double cost;
    int k, far; /* far: from the base's end */
} tp_memopt_change;

/* A set to change, by a price of a byte and, where only sets of as many tensors count, one of a tensor. */
typedef struct {
    double r, s, bound; /* its sums; no set that counts is below bound */
    double rate, mu;    /* the prices; mu is 0 unless counted */
    int counted, size, listed;
    uint8_t *in;              /* [n] by position in m->item */
    double *price;            /* [2 n] scratch */
    tp_memopt_change *change; /* [listed] those that may pay, cheapest first */
} tp_memopt_base;

TP_MUST_USE tp_status
tp_memopt_base_open(tp_memopt *m, tp_memopt_base *out);
/* The linear relaxation's base. 0: all tensors are too few, or a byte's price is more than a double holds. */
int
tp_memopt_base_linear(const tp_memopt_stage *t, tp_memopt_base *base);
/* That of sets of `size` tensors, at the price that bounds them best (it looks no further once that is `limit`), from rate on. */
void
tp_memopt_base_counted(const tp_memopt_stage *t, int size, double rate, double limit, tp_memopt_base *base);
/* Fills change[] with what may lead to less than limit. */
void
tp_memopt_base_list(const tp_memopt_stage *t, double limit, tp_memopt_base *base);

/* Which search should go on where this one ran out of room: the core (its bound is the better one), the pairs (theirs is), or the
 * four lists (all tensors cost the same per byte, so that no bound tells sets apart). */
typedef enum { TP_MEMOPT_CORE, TP_MEMOPT_PAIRS, TP_MEMOPT_TIED } tp_memopt_outlook;

/* Improves t->best, t->low and m->chosen from what the core search left; far != 0: with longer lists. */
TP_MUST_USE tp_status
tp_memopt_pairs(tp_memopt_stage *t, int far, tp_memopt_outlook *outlook);
/* Looks for a set that meets the bound of `base` to rounding, where tensors cost nearly the same per byte: t->best, m->chosen. */
TP_MUST_USE tp_status
tp_memopt_four(tp_memopt_stage *t, const tp_memopt_base *base);

#endif
