/* Which tensors a stage recomputes where all of them cost nearly the same per byte. Then any set whose bytes add up to the target
 * is best and no bound tells sets apart: the search is for a set that meets the target to rounding. Four lists of subsets are
 * joined (Wagner, "A generalized birthday problem", CRYPTO 2002): pairs of the first two lists whose bytes fall into a window are
 * put into buckets, and each pair of the other two looks into the bucket that would complete it to the target. From four lists of
 * n sets one join sees some n^3 of the n^4 unions; the next window sees others. */
#include "csrc/plan/memopt_search.h"

#include <string.h>

#include "csrc/base/deadline.h"

enum { LISTS = 4, DEPTH = 14, SETS = 1 << 10, BUCKETS = 1 << 13, PAIRS = 2 * BUCKETS, WINDOWS = 9, CLOSE = 40, LEAST = 20 };

typedef struct {
    double key, r, s; /* key: bytes saved, and hidden by the seconds */
    int mask;
} subset;

typedef struct {
    double r, s;
    int first, second; /* their places in two lists */
} pair;

struct tp_memopt_four_room {
    subset *list[LISTS], *spare; /* [2 SETS] */
    pair *found, *placed;        /* [PAIRS] */
    int *bucket, *start;         /* [PAIRS], [BUCKETS + 1] */
};

typedef struct {
    tp_memopt_stage *t;
    const tp_memopt_base *base;
    struct tp_memopt_four_room *room;
    int item[LISTS][DEPTH], depth[LISTS], length[LISTS];
    double target, low, window; /* keys of pairs of the first two lists: window from low on */
    int count;
} four;

static tp_status
open_room(tp_memopt *m)
{
    struct tp_memopt_four_room *room;
    if (m->four_room != NULL)
        return TP_OK;
    TP_ARENA_TAKE(&m->arena, 1, room);
    for (int k = 0; k < LISTS; k++)
        TP_ARENA_TAKE(&m->arena, 2 * SETS, room->list[k]);
    TP_ARENA_TAKE(&m->arena, 2 * SETS, room->spare);
    TP_ARENA_TAKE(&m->arena, PAIRS, room->found);
    TP_ARENA_TAKE(&m->arena, PAIRS, room->placed);
    TP_ARENA_TAKE(&m->arena, PAIRS, room->bucket);
    TP_ARENA_TAKE(&m->arena, BUCKETS, room->start);
    m->four_room = room;
    return TP_OK;
}

/* Deal the cheapest changes to the lists in turn: CLOSE of them, and those that are as cheap up to rounding. */
static int
deal(four *f)
{
    int taken = 0;
    for (; taken < f->base->listed && taken < LISTS * DEPTH; taken++) {
        tp_memopt_change c = f->base->change[taken];
        if (taken >= CLOSE && c.cost > 1e-13 * f->base->bound)
            break;
        int which = taken / 2 % LISTS; /* additions and removals take turns, and a list wants both */
        f->item[which][f->depth[which]++] = c.k;
    }
    return taken;
}

/* List the subsets of a list's items by rising key; where they are more than SETS, only those near a fourth of the target. */
static void
list_subsets(four *f, int which)
{
    subset *in = f->room->list[which], *out = f->room->spare;
    int length = 1;
    in[0] = (subset){0};
    for (int k = 0; k < f->depth[which]; k++) {
        int item = f->item[which][k], sign = f->base->in[item] ? -1 : 1, a = 0, b = 0, from = 0;
        double dr = sign * tp_memopt_seconds(f->t, item), ds = sign * tp_memopt_bytes(f->t, item), key = ds + f->t->width * dr;
        for (int to = 0; to < 2 * length; to++) {
            if (b == length || (a < length && in[a].key <= in[b].key + key)) {
                out[to] = in[a++];
            } else {
                out[to] = (subset){in[b].key + key, in[b].r + dr, in[b].s + ds, in[b].mask | 1 << k};
                b++;
            }
        }
        for (length *= 2; length > SETS; length--) /* the farther end goes */
            from += out[from + length - 1].key - 0.25 * f->target < 0.25 * f->target - out[from].key;
        memmove(out, out + from, (size_t)length * sizeof *out);
        subset *swap = in;
        in = out;
        out = swap;
    }
    f->room->list[which] = in;
    f->room->spare = out;
    f->length[which] = length;
}

/* Pairs of the first two lists in the window, by bucket. */
static void
fill_buckets(four *f)
{
    struct tp_memopt_four_room *room = f->room;
    const subset *a = room->list[0], *b = room->list[1];
    int na = f->length[0], nb = f->length[1], from = nb;
    double scale = (double)BUCKETS / f->window;
    f->count = 0;
    memset(room->start, 0, (BUCKETS + 1) * sizeof *room->start);
    for (int k = 0; k < na; k++) {
        while (from > 0 && a[k].key + b[from - 1].key >= f->low)
            from--;
        for (int q = from; q < nb && f->count < PAIRS; q++) {
            double at = (a[k].key + b[q].key - f->low) * scale;
            if (at >= (double)BUCKETS)
                break;
            if (at < 0.0)
                continue;
            room->bucket[f->count] = (int)at;
            room->start[(int)at + 1]++;
            room->found[f->count++] = (pair){a[k].r + b[q].r, a[k].s + b[q].s, k, q};
        }
    }
    for (int k = 0; k < BUCKETS; k++)
        room->start[k + 1] += room->start[k];
    for (int k = f->count - 1; k >= 0; k--) /* start[b + 1] ends as the start of b */
        room->placed[--room->start[room->bucket[k] + 1]] = room->found[k];
}

/* The entries of bucket b: start[b + 1] up to the start of the next. */
static int
end_of(const four *f, int b)
{
    return b + 1 < BUCKETS ? f->room->start[b + 2] : f->count;
}

/* Look up each pair of the third and the fourth list in the buckets. */
static void
look(four *f, int best[LISTS])
{
    struct tp_memopt_four_room *room = f->room;
    tp_memopt_stage *t = f->t;
    const subset *a = room->list[2], *b = room->list[3];
    int na = f->length[2], nb = f->length[3], from = nb, seen = 0;
    double high = f->target - f->low, scale = (double)BUCKETS / f->window;
    for (int k = 0; k < na && seen < PAIRS; k++) {
        while (from > 0 && a[k].key + b[from - 1].key > high - f->window)
            from--;
        for (int q = from; q < nb && a[k].key + b[q].key <= high; q++, seen++) {
            int at = (int)((high - a[k].key - b[q].key) * scale);
            int first = at > 0 ? at - 1 : 0, last = at + 1 < BUCKETS ? at + 1 : BUCKETS - 1;
            double r = f->base->r + a[k].r + b[q].r, s = f->base->s + a[k].s + b[q].s;
            if (at >= BUCKETS)
                continue;
            for (int p = room->start[first + 1]; p < end_of(f, last); p++) {
                double value = tp_memopt_value(t, r + room->placed[p].r, s + room->placed[p].s);
                if (value >= t->best)
                    continue;
                t->best = value;
                best[0] = room->list[0][room->placed[p].first].mask;
                best[1] = room->list[1][room->placed[p].second].mask;
                best[2] = a[k].mask;
                best[3] = b[q].mask;
            }
        }
    }
}

/* The width of a window with about BUCKETS pairs in it, by how far apart the middle half of a list lies. */
static double
window_of(const four *f)
{
    const subset *a = f->room->list[0], *b = f->room->list[1];
    int na = f->length[0], nb = f->length[1];
    double apart = a[3 * na / 4].key - a[na / 4].key + b[3 * nb / 4].key - b[nb / 4].key;
    return (double)BUCKETS * apart / ((double)na * nb);
}

tp_status
tp_memopt_four(tp_memopt_stage *t, const tp_memopt_base *base)
{
    four f = {.t = t, .base = base};
    tp_memopt *m = t->m;
    if (deal(&f) < LEAST)
        return TP_OK;
    TP_TRY(open_room(m));
    f.room = m->four_room;
    f.target = tp_memopt_missing(t, base->r, base->s) - t->slack;
    for (int k = 0; k < LISTS; k++)
        list_subsets(&f, k);
    f.window = window_of(&f);
    double middle = 0.5 * (f.target - f.window), before = t->best;
    int best[LISTS] = {0};
    for (int turn = 0; turn < WINDOWS && f.window > 0.0 && !tp_memopt_settled(t); turn++) {
        TP_TRY(tp_deadline_check_after(&m->asked, 8 * (int64_t)PAIRS));
        f.low = middle + (turn % 2 ? -1 : 1) * ((turn + 1) / 2) * f.window;
        fill_buckets(&f);
        if (turn == 0 && f.count < BUCKETS / 4) { /* they are rare about here */
            f.window *= fmin(64.0, (double)BUCKETS / (f.count + 1.0));
            middle = f.low = 0.5 * (f.target - f.window);
            fill_buckets(&f);
        }
        look(&f, best);
        m->states += f.count;
    }
    if (t->best >= before)
        return TP_OK;
    memset(m->chosen + t->first, 0, (size_t)(t->end - t->first));
    for (int k = 0; k < t->count; k++)
        m->chosen[m->item[k]] = base->in[k];
    for (int which = 0; which < LISTS; which++)
        for (int k = 0; k < f.depth[which]; k++)
            m->chosen[m->item[f.item[which][k]]] ^= (uint8_t)(best[which] >> k & 1);
    return TP_OK;
}
