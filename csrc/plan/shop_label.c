/* Label setting for token slices through unequal stages (PLANNERS.md 1.8, 9.3). */
#include "csrc/plan/shop_search.h"

#include <math.h>
#include <string.h>

#include "csrc/base/deadline.h"

#define LABEL_DOUBLES ((int64_t)48 << 20) /* of all labels: 384 MiB, then the search ends as if its work were done */

/* The labels after `token` tokens. */
typedef struct {
    int count, room;
    double *clock;         /* [room][width] */
    double *bound;         /* [room] latency that no continuation is below */
    int *from, *parent;    /* [room] where its last slice began, and the label there */
} place;

typedef struct {
    const tp_shop *shop;
    tp_shop_line *line;
    const tp_shop_bound *mean;
    tp_arena *arena;
    int width, capped;
    place *places;    /* [units + 1] */
    double *rest;     /* [width][units + 1] least seconds from a token on if the critical path stays on machine q */
    double *mass;     /* [units + 1][width] of the mean path on machine q at a token */
    double *clock;    /* scratch [width] */
    double best, goal;
    int best_from, best_parent; /* the last slice of the best slicing found here; -1: none */
    int64_t work, held, labels;
} search;

/* rest_q(j) = min over slicings of [j, n) of sum c_q + what the last slice does behind machine q. */
static void
set_rests(search *s)
{
    const tp_shop *shop = s->shop;
    int n = shop->units;
    for (int j = n; j >= 0; j--)
        for (int q = 0; q < s->width; q++)
            s->rest[(size_t)q * ((size_t)n + 1) + (size_t)j] = j == n ? 0.0 : INFINITY;
    for (int j = n - 1; j >= 0 && !tp_deadline_told_after(&s->line->asked, (int64_t)(n - j) * s->width); j--)
        for (int i = 1; i <= n - j && i <= s->capped; i++) {
            if (!tp_shop_allowed(shop, s->line->options, j, i))
                continue;
            double behind = 0.0;
            for (int c = 0; c < shop->costs; c++)
                s->line->time[c] = tp_slice_cost_at(&shop->cost[c], j, i);
            for (int q = s->width - 1; q >= 0; q--) {
                double *rest = s->rest + (size_t)q * ((size_t)n + 1), c = s->line->time[shop->cost_of[q]];
                if ((q + 1) % shop->machines == 0)
                    behind = 0.0;
                double through = j + i == n ? c + behind : c + rest[j + i];
                rest[j] = through < rest[j] ? through : rest[j];
                behind += c;
            }
        }
}

static void
set_masses(search *s)
{
    int n = s->shop->units;
    size_t row = (size_t)n + 1;
    for (int j = 0; j <= n; j++)
        for (int q = 0; q < s->width; q++) {
            const double *share = s->mean->best_share + (size_t)q * row + j;
            double before = q % s->shop->machines == 0 ? 1.0 : share[-(int64_t)row];
            s->mass[(size_t)j * (size_t)s->width + (size_t)q] =
                before - ((q + 1) % s->shop->machines == 0 ? 0.0 : share[0]);
        }
}

static tp_status
open_search(search *s)
{
    size_t n = (size_t)s->shop->units, width = (size_t)s->width;
    void *memory;
    TP_TRY(tp_arena_take(s->arena, n + 1, sizeof(place), &memory));
    s->places = memory;
    TP_TRY(tp_arena_take(s->arena, 2 * width * (n + 1) + width, sizeof(double), &memory));
    s->rest = memory;
    s->mass = s->rest + width * (n + 1);
    s->clock = s->mass + width * (n + 1);
    set_rests(s);
    TP_TRY(tp_deadline_check_told());
    if (s->mean != NULL)
        set_masses(s);
    return TP_OK;
}

static tp_status
grow(search *s, place *p)
{
    int room = p->room > 0 ? 2 * p->room : 16;
    size_t width = (size_t)s->width, count = (size_t)p->count;
    void *clock, *ints;
    TP_TRY(tp_arena_take(s->arena, (size_t)room * (width + 1), sizeof(double), &clock));
    TP_TRY(tp_arena_take(s->arena, 2 * (size_t)room, sizeof(int), &ints));
    double *clocks = clock, *bound = clocks + (size_t)room * width;
    int *from = ints, *parent = from + room;
    if (count > 0) {
        memcpy(clocks, p->clock, count * width * sizeof(double));
        memcpy(bound, p->bound, count * sizeof(double));
        memcpy(from, p->from, count * sizeof(int));
        memcpy(parent, p->parent, count * sizeof(int));
    }
    s->held += (int64_t)room * (s->width + 2);
    *p = (place){p->count, room, clocks, bound, from, parent};
    return TP_OK;
}

/* A lower bound on the latency of every continuation from these clocks at token j. */
static double
bound_of(const search *s, int j, const double *clock)
{
    const tp_shop *shop = s->shop;
    size_t row = (size_t)shop->units + 1;
    double sum = 0.0, mean = s->mean != NULL ? s->mean->rest[j] : 0.0;
    const double *rest = s->rest + j;
    for (int chain = 0, q = 0; chain < shop->chains; chain++) {
        double longest = 0.0;
        for (int k = 0; k < shop->machines; k++, q++) {
            double x = clock[q] + rest[(size_t)q * row];
            longest = x > longest ? x : longest;
        }
        sum += longest;
    }
    if (s->mean == NULL)
        return sum;
    const double *mass = s->mass + (size_t)j * (size_t)s->width;
    for (int q = 0; q < s->width; q++)
        mean += mass[q] * clock[q];
    mean *= 1.0 - 1e-11;
    return mean > sum ? mean : sum;
}

static int
nowhere_later(const double *a, const double *b, int width)
{
    int q = 0;
    for (; q + 8 <= width; q += 8) {
        int later = 0;
        for (int k = 0; k < 8; k++)
            later |= a[q + k] > b[q + k];
        if (later)
            return 0;
    }
    for (; q < width; q++)
        if (a[q] > b[q])
            return 0;
    return 1;
}

/* Insert the scratch clock as a label unless another label is later on no machine; drop labels that are earlier on none. */
static tp_status
insert(search *s, int token, int from, int parent, double bound)
{
    place *p = &s->places[token];
    size_t width = (size_t)s->width;
    for (int a = 0; a < p->count; a++) {
        s->work -= 8;
        if (nowhere_later(p->clock + (size_t)a * width, s->clock, s->width))
            return TP_OK;
    }
    for (int a = 0; a < p->count;) {
        s->work -= 8;
        if (!nowhere_later(s->clock, p->clock + (size_t)a * width, s->width)) {
            a++;
            continue;
        }
        int last = --p->count;
        memmove(p->clock + (size_t)a * width, p->clock + (size_t)last * width, width * sizeof(double));
        p->bound[a] = p->bound[last];
        p->from[a] = p->from[last];
        p->parent[a] = p->parent[last];
    }
    if (p->count == p->room)
        TP_TRY(grow(s, p));
    memcpy(p->clock + (size_t)p->count * width, s->clock, width * sizeof(double));
    p->bound[p->count] = bound;
    p->from[p->count] = from;
    p->parent[p->count++] = parent;
    s->labels++;
    return TP_OK;
}

/* Extend label a of token j by every slice that is allowed. */
static tp_status
extend(search *s, int j, int a)
{
    const tp_shop *shop = s->shop;
    int n = shop->units;
    for (int i = 1; i <= n - j && i <= s->capped; i++) {
        if (!tp_shop_allowed(shop, s->line->options, j, i))
            continue;
        memcpy(s->clock, s->places[j].clock + (size_t)a * (size_t)s->width, (size_t)s->width * sizeof(double));
        tp_shop_advance(shop, j, i, s->line->time, s->clock);
        s->work -= 2 * s->width;
        if (j + i == n) {
            double latency = tp_shop_latency(shop, s->clock);
            if (latency < s->goal) {
                s->best = latency;
                s->goal = latency * (1.0 - 1e-12);
                s->best_from = j;
                s->best_parent = a;
            }
            continue;
        }
        double bound = bound_of(s, j + i, s->clock);
        if (bound < s->goal)
            TP_TRY(insert(s, j + i, j, a, bound));
    }
    return TP_OK;
}

/* Write the best slicing found here into the line. */
static void
keep_best(search *s)
{
    int count = 0, *order = s->line->order;
    if (s->best_from < 0)
        return;
    int token = s->best_from, a = s->best_parent;
    order[count++] = s->shop->units - token;
    while (token > 0) {
        int from = s->places[token].from[a];
        order[count++] = token - from;
        a = s->places[token].parent[a];
        token = from;
    }
    for (int k = 0; k < count / 2; k++) {
        int swap = order[k];
        order[k] = order[count - 1 - k];
        order[count - 1 - k] = swap;
    }
    tp_shop_line_set(s->line, order, count);
}

tp_status
tp_shop_labels(tp_arena *arena, tp_shop_line *line, const tp_shop_bound *bound, int64_t work, int64_t *labels,
               double *bound_s)
{
    const tp_shop *shop = line->shop;
    int n = shop->units, longest = line->options->longest;
    search s = {.shop = shop, .line = line, .mean = bound, .arena = arena, .width = line->width, .work = work};
    s.capped = longest > 0 && longest < n ? longest : n;
    s.best = line->latency;
    s.goal = s.best * (1.0 - 1e-12);
    s.best_from = -1;
    TP_TRY(open_search(&s));
    memset(s.clock, 0, (size_t)s.width * sizeof(double));
    TP_TRY(insert(&s, 0, 0, 0, 0.0));
    double open = INFINITY; /* of labels that were not extended for want of work */
    for (int j = 0; j < n; j++)
        for (int a = 0; a < s.places[j].count; a++) {
            double least = s.places[j].bound[a];
            int64_t before = s.work;
            if (least >= s.goal)
                continue;
            if (s.work <= 0 || s.held > LABEL_DOUBLES)
                open = fmin(open, least);
            else
                TP_TRY(extend(&s, j, a));
            TP_TRY(tp_deadline_check_after(&line->asked, before - s.work));
        }
    keep_best(&s);
    *labels += s.labels;
    *bound_s = fmin(open, line->latency * (1.0 - 2e-12)); /* the goal's margin, and that of sums */
    return TP_OK;
}
