/* Which tensors a stage recomputes where the core search (memopt_core.c) has too many states: meet in the middle.
 *
 * For any price `rate` of a byte, value(R) >= L(R) = (T + r(R) + rate (D - s(R))) / (1 + swap_Bps rate): linear, so that a base
 * set minimises it and every change of a tensor adds its reduced cost, 0 or more. A set below base + gamma is made of changes
 * of a cost up to gamma together. Two lists take every other change each, all their subsets up to gamma, less what another
 * dominates (no more seconds, no fewer bytes); for each subset of one list the best of the other lies where the two sides of
 * max(T + r, (D - s) / swap_Bps) cross, which moves one way. So n^2 sets cost n. What is below base + gamma is then known, and
 * gamma grows until that is all that counts.
 *
 * Where tensors are of nearly one size, how many of them are taken is what the linear relaxation misses. Then the sets of k
 * tensors are bounded for each k apart, with a price of a tensor beside that of a byte (the bound is convex in k, so that the
 * first k on either side that is too dear ends it; Martello and Toth, "Upper bounds and algorithms for hard 0-1 knapsack
 * problems", Operations Research 45, 1997), and a subset of either list meets those of the other that keep the count. */
#include "csrc/plan/memopt_search.h"

#include <limits.h>
#include <string.h>

#include "csrc/base/deadline.h"

enum { FEW = 512, MANY = 8192, FIRST = 8, MORE = 4, TIED = 20 };

typedef struct {
    double r, s;
    int count, id; /* tensors more than the base has; its last change in `made` */
} entry;

typedef struct {
    int parent, item;
} link;

struct tp_memopt_pairs_room {
    tp_memopt_base linear, counted;
    entry *list[4]; /* [room] */
    link *made;     /* [4 room] */
    int room;
};

typedef struct {
    tp_memopt_stage *t;
    tp_memopt_base *base;
    entry *list[2], *spare, *changed;
    link *made;
    double gamma;
    int length[2], used, room, cut; /* cut: a list was full, so that not all was seen */
} pairs;

/* List the entries with a change added that may still count: the dearer the change, the fewer. */
static int
change_all(const pairs *p, const entry *in, int of, tp_memopt_change c, entry *out)
{
    const tp_memopt_base *base = p->base;
    int sign = base->in[c.k] ? -1 : 1, more = base->counted ? sign : 0, length = 0;
    double dr = sign * tp_memopt_seconds(p->t, c.k), ds = sign * tp_memopt_bytes(p->t, c.k);
    double whole = 1.0 / (1.0 + p->t->width * base->rate), limit = p->gamma + 1e-15 * base->bound;
    for (int k = 0; k < of; k++) {
        entry next = {in[k].r + dr, in[k].s + ds, in[k].count + more, in[k].id};
        out[length] = next;
        length += (next.r - base->rate * next.s) * whole - base->mu * next.count <= limit;
    }
    return length;
}

static inline int
comes_first(const entry *x, const entry *y)
{
    return x->count != y->count ? x->count < y->count : x->r != y->r ? x->r < y->r : x->s >= y->s;
}

/* Merge a list with itself plus the change, leaving out dominated entries. */
static void
expand(pairs *p, int which, tp_memopt_change c)
{
    entry *in = p->list[which], *out = p->spare;
    int a = 0, length = 0, last = INT_MIN, of = p->length[which], more = change_all(p, in, of, c, p->changed);
    double most = -INFINITY;
    in[of] = (entry){INFINITY, 0.0, INT_MAX, -1}; /* the end: it comes after all */
    p->changed[more] = in[of];
    for (int b = 0; b <= more; b++) {
        const entry *y = &p->changed[b];
        for (; a < of && comes_first(&in[a], y); a++) {
            most = in[a].count != last ? -INFINITY : most;
            last = in[a].count;
            out[length] = in[a];
            length += in[a].s > most;
            most = in[a].s > most ? in[a].s : most;
        }
        if (b == more || (y->count == last && y->s <= most))
            continue;
        out[length] = *y;
        out[length++].id = p->used;
        p->made[p->used++] = (link){y->id, c.k};
        last = y->count;
        most = y->s;
    }
    p->spare = in;
    p->list[which] = out;
    p->length[which] = length;
}

/* The best of a's entries [0, na) with b's [0, nb), whose counts even out. */
static void
join_run(pairs *p, const entry *a, int na, const entry *b, int nb, int *pick)
{
    tp_memopt_stage *t = p->t;
    double width = t->width;
    int q = nb;
    for (int k = 0; k < na; k++) {
        double r = t->time + p->base->r + a[k].r, need = t->need - p->base->s - a[k].s;
        while (q > 0 && need - b[q - 1].s - width * (r + b[q - 1].r) <= t->slack)
            q--;
        if (q < nb && r + b[q].r < t->best) {
            t->best = r + b[q].r;
            pick[0] = a[k].id;
            pick[1] = b[q].id;
        }
        if (q > 0 && need - b[q - 1].s < width * t->best && (need - b[q - 1].s) / width < t->best) {
            t->best = (need - b[q - 1].s) / width;
            pick[0] = a[k].id;
            pick[1] = b[q - 1].id;
        }
    }
}

static void
join(pairs *p)
{
    const entry *a = p->list[0], *b = p->list[1];
    tp_memopt *m = p->t->m;
    double before = p->t->best;
    int pick[2] = {-1, -1}, from = 0, to, low, high = p->length[1];
    for (; from < p->length[0]; from = to) {
        for (to = from + 1; to < p->length[0] && a[to].count == a[from].count; to++)
            ;
        while (high > 0 && b[high - 1].count > -a[from].count)
            high--;
        for (low = high; low > 0 && b[low - 1].count == -a[from].count; low--)
            ;
        if (low < high)
            join_run(p, a + from, to - from, b + low, high - low, pick);
    }
    if (p->t->best >= before)
        return;
    memset(m->chosen + p->t->first, 0, (size_t)(p->t->end - p->t->first));
    for (int k = 0; k < p->t->count; k++)
        m->chosen[m->item[k]] = p->base->in[k];
    for (int side = 0; side < 2; side++)
        for (int at = pick[side]; at >= 0; at = p->made[at].parent)
            m->chosen[m->item[p->made[at].item]] ^= 1;
}

static void
look(pairs *p)
{
    p->cut = p->used = 0;
    for (int side = 0; side < 2; side++) {
        p->list[side][0] = (entry){0.0, 0.0, 0, -1};
        p->length[side] = 1;
    }
    for (int k = 0; k < p->base->listed && p->base->change[k].cost <= p->gamma; k++) {
        int side = k & 1;
        p->cut = 2 * p->length[side] > p->room || p->used + p->length[side] > 4 * p->room;
        if (p->cut)
            break;
        expand(p, side, p->base->change[k]);
    }
    join(p);
    p->t->m->states += p->used;
}

/* Search with growing gamma until a set is good enough, or no other can count, or a list is full. *low: no set of this base is
 * below it. */
static tp_status
deepen(pairs *p, double *low)
{
    tp_memopt_stage *t = p->t;
    tp_memopt_base *base = p->base;
    int reach = FIRST;
    tp_memopt_base_list(t, fmin(t->best, t->cutoff), base);
    *low = fmax(*low, fmin(base->bound * (1.0 - 1e-13), fmin(t->best, t->cutoff)));
    p->gamma = fmax(0.0, *low - base->bound); /* sets nearer to the base are known */
    for (;;) {
        double limit = fmin(t->best, t->cutoff), all = fmax(0.0, limit - base->bound);
        if (tp_memopt_settled(t) || *low >= limit * (1.0 - 1e-12))
            return TP_OK;
        double next = fmax(reach < base->listed ? base->change[reach].cost : 0.0, fmax(1.35 * p->gamma, 1e-3 * all));
        p->gamma = 1.1 * next > all ? all : next;
        reach += MORE;
        TP_TRY(tp_deadline_check_after(&t->m->asked, 64 * (int64_t)p->room));
        look(p);
        if (p->cut || t->m->states > t->m->limit)
            return TP_OK;
        *low = fmax(*low, fmin((base->bound + p->gamma) * (1.0 - 1e-13), fmin(t->best, t->cutoff)));
    }
}

typedef struct {
    int size, step;
    double rate, bound;
} tally;

/* The bound of sets with as many tensors as `side` says; +inf where there are none, or none that counts. */
static void
weigh(const pairs *p, tally *side)
{
    const tp_memopt_stage *t = p->t;
    side->bound = INFINITY;
    if (side->size < 0 || side->size > t->count)
        return;
    tp_memopt_base_counted(t, side->size, side->rate, fmin(t->best, t->cutoff), p->base);
    side->rate = p->base->rate;
    side->bound = p->base->bound;
}

/* Search the sets of each number of tensors apart, from the linear relaxation's number outwards, the least bound first; not at all
 * where that would leave the open gap about as wide as it is. */
static tp_status
count_apart(pairs *p, double *low)
{
    tp_memopt_stage *t = p->t;
    tally side[2] = {{p->base->size, -1, p->base->rate, 0.0}, {p->base->size + 1, 1, p->base->rate, 0.0}};
    double least = INFINITY;
    p->base = &t->m->pairs_room->counted;
    weigh(p, &side[0]);
    weigh(p, &side[1]);
    if (fmin(side[0].bound, side[1].bound) - *low < 0.1 * (fmin(t->best, t->cutoff) - *low))
        return TP_OK;
    for (;;) {
        tally *next = &side[side[1].bound < side[0].bound];
        double own = 0.0;
        if (next->bound >= fmin(t->best, t->cutoff))
            break;
        tp_memopt_base_counted(t, next->size, next->rate, -INFINITY, p->base);
        TP_TRY(deepen(p, &own));
        least = fmin(least, own);
        if (t->best <= t->enough)
            return TP_OK;
        next->size += next->step;
        weigh(p, next);
    }
    *low = fmax(*low, fmin(least, fmin(t->best, t->cutoff)));
    return TP_OK;
}

static tp_status
open_room(tp_memopt *m, int wanted)
{
    struct tp_memopt_pairs_room *room = m->pairs_room;
    if (room == NULL) {
        TP_ARENA_TAKE(&m->arena, 1, room);
        TP_TRY(tp_memopt_base_open(m, &room->linear));
        TP_TRY(tp_memopt_base_open(m, &room->counted));
        m->pairs_room = room;
    }
    if (room->room >= wanted)
        return TP_OK;
    for (int k = 0; k < 4; k++)
        TP_ARENA_TAKE(&m->arena, wanted, room->list[k]);
    TP_ARENA_TAKE(&m->arena, 4 * wanted, room->made);
    room->room = wanted;
    return TP_OK;
}

tp_status
tp_memopt_pairs(tp_memopt_stage *t, int far, tp_memopt_outlook *outlook)
{
    TP_TRY(open_room(t->m, far ? MANY : FEW));
    struct tp_memopt_pairs_room *room = t->m->pairs_room;
    pairs p = {.t = t, .base = &room->linear, .list = {room->list[0], room->list[1]}, .spare = room->list[2],
               .changed = room->list[3], .made = room->made, .room = far ? MANY : FEW};
    double low = t->low;
    *outlook = TP_MEMOPT_CORE;
    if (!tp_memopt_base_linear(t, p.base))
        return TP_OK;
    if (!far)
        TP_TRY(count_apart(&p, &t->low));
    if (tp_memopt_settled(t))
        return TP_OK;
    p.base = &room->linear;
    TP_TRY(deepen(&p, &t->low));
    if (p.base->listed > TIED && p.base->change[TIED].cost <= 1e-13 * p.base->bound)
        *outlook = TP_MEMOPT_TIED;
    else if (t->low > low)
        *outlook = TP_MEMOPT_PAIRS;
    return *outlook == TP_MEMOPT_TIED && !tp_memopt_settled(t) ? tp_memopt_four(t, p.base) : TP_OK;
}
