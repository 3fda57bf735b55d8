/* Which recomputation fits on one stage with several chunks? The chunks share the stage's memory, each with its own number of
 * micro-batches in flight, so the answer is no single least extra time but a Pareto front over the chunks. */
#include "csrc/plan/bmpipe_chunks.h"

#include <math.h>
#include <string.h>

#include "csrc/base/deadline.h"

enum { ENUMERATED = 4096, VARIED = 8 }; /* most products of points, most chunks with more than one greedy choice */

static uint64_t
hash_of(const int32_t *key, int length)
{
    uint64_t h = 1469598103934665603u;
    for (int i = 0; i < length; i++)
        h = (h ^ (uint32_t)key[i]) * 1099511628211u;
    return h ^ h >> 29;
}

static void
make_key(tp_bmpipe_search_room *s, const int *cut, int stage)
{
    const tp_bmpipe *p = s->p;
    s->key[0] = stage;
    for (int c = 0; c < p->chunks; c++) {
        int v = c * p->stages + stage;
        s->key[1 + 2 * c] = tp_bmpipe_canonical(p, cut[v], cut[v + 1]);
        s->key[2 + 2 * c] = cut[v + 1] - cut[v];
    }
}

/* Keep a vector of extra times unless a kept one is no worse in every chunk; drop those that it dominates. */
static int
add_choice(tp_bmpipe_search_room *s, int count, const double *extra_s, const int32_t *point, int *exact)
{
    int chunks = s->p->chunks, kept = 0;
    double sum = 0.0;
    for (int c = 0; c < chunks; c++)
        sum += extra_s[c];
    for (int i = 0; i < count; i++) {
        int below = 1, above = 1;
        for (int c = 0; c < chunks; c++) {
            below &= s->room_extra[i * chunks + c] <= extra_s[c];
            above &= s->room_extra[i * chunks + c] >= extra_s[c];
        }
        if (below)
            return count;
        if (above)
            continue;
        memmove(s->room_extra + kept * chunks, s->room_extra + i * chunks, (size_t)chunks * sizeof(double));
        memmove(s->room_point + kept * chunks, s->room_point + i * chunks, (size_t)chunks * sizeof(int32_t));
        kept++;
    }
    int place = kept; /* least sum first, what came first before equals */
    for (; place > 0; place--) {
        double before = 0.0;
        for (int c = 0; c < chunks; c++)
            before += s->room_extra[(place - 1) * chunks + c];
        if (before <= sum)
            break;
        memmove(s->room_extra + place * chunks, s->room_extra + (place - 1) * chunks, (size_t)chunks * sizeof(double));
        memmove(s->room_point + place * chunks, s->room_point + (place - 1) * chunks, (size_t)chunks * sizeof(int32_t));
    }
    memcpy(s->room_extra + place * chunks, extra_s, (size_t)chunks * sizeof(double));
    memcpy(s->room_point + place * chunks, point, (size_t)chunks * sizeof(int32_t));
    if (kept < TP_BMPIPE_CHOICE_ROOM)
        return kept + 1;
    *exact = 0;
    return kept;
}

/* The worst vector in flight and the bytes it holds, static ones not counted. */
static int
worst_vector(const tp_bmpipe *p, int stage, const double *kept, double *bytes)
{
    int worst = p->vector_begin[stage];
    *bytes = -1.0;
    for (int k = p->vector_begin[stage]; k < p->vector_begin[stage + 1]; k++) {
        double sum = 0.0;
        for (int c = 0; c < p->chunks; c++)
            sum += p->vector[k * p->chunks + c] * kept[c];
        if (sum > *bytes) {
            *bytes = sum;
            worst = k;
        }
    }
    return worst;
}

/* s->kept and extra of the points s->at; the worst vector in flight and what it holds. */
static int
look(tp_bmpipe_search_room *s, int stage, double *extra, double *held)
{
    for (int c = 0; c < s->p->chunks; c++) {
        s->kept[c] = s->fronts[c]->point[s->at[c]].bytes;
        extra[c] = s->fronts[c]->point[s->at[c]].extra_s;
    }
    int64_t products = (int64_t)(s->p->vector_begin[stage + 1] - s->p->vector_begin[stage]) * s->p->chunks;
    s->effort -= 1 + products / (2 * s->p->virtuals);
    return worst_vector(s->p, stage, s->kept, held);
}

/* Start without recomputation and move one point further where that saves most bytes a second of the worst vector, until it fits;
 * then move back wherever it still fits. A second of chunk `dear` counts `times` as much. Returns the new count of choices; 0 if
 * even the fewest bytes do not fit. */
static int
greedy(tp_bmpipe_search_room *s, int stage, double room, int dear, double times, int count, int *exact)
{
    const tp_bmpipe *p = s->p;
    int chunks = p->chunks;
    double extra[TP_BMPIPE_LAYERS], held = 0.0;
    for (int c = 0; c < chunks; c++)
        s->at[c] = s->fronts[c]->count - 1;
    for (;;) {
        int worst = look(s, stage, extra, &held), best = -1;
        double best_rate = -1.0;
        if (held <= room)
            break;
        for (int c = 0; c < chunks; c++) {
            if (s->at[c] == 0 || p->vector[worst * chunks + c] == 0)
                continue;
            const tp_bmpipe_point *from = &s->fronts[c]->point[s->at[c]];
            double rate = p->vector[worst * chunks + c] * (from->bytes - from[-1].bytes) /
                          ((from[-1].extra_s - from->extra_s) * (c == dear ? times : 1.0) + 1e-300);
            if (rate > best_rate) {
                best_rate = rate;
                best = c;
            }
        }
        if (best < 0)
            return 0;
        s->at[best]--;
    }
    for (int k = 0; k < chunks && chunks <= VARIED; k++) { /* what is dear first */
        int c = dear < 0 ? k : (dear + k) % chunks;
        while (s->at[c] + 1 < s->fronts[c]->count) {
            s->at[c]++;
            look(s, stage, extra, &held);
            if (held <= room)
                continue;
            s->at[c]--;
            break;
        }
    }
    look(s, stage, extra, &held);
    return add_choice(s, count, extra, s->at, exact);
}

/* The most bytes that the last chunk may keep, given the others. */
static double
last_room(const tp_bmpipe *p, int stage, const double *kept, double room)
{
    double least = INFINITY;
    int last = p->chunks - 1;
    for (int k = p->vector_begin[stage]; k < p->vector_begin[stage + 1]; k++) {
        double left = room;
        for (int c = 0; c < last; c++)
            left -= p->vector[k * p->chunks + c] * kept[c];
        int held = p->vector[k * p->chunks + last];
        double here = held > 0 ? left / held : left >= 0.0 ? INFINITY : -INFINITY;
        least = here < least ? here : least;
    }
    return least;
}

/* All points of the first chunks with the best of the last. */
static int
enumerate(tp_bmpipe_search_room *s, int stage, double room, int count, int *exact)
{
    const tp_bmpipe *p = s->p;
    int last = p->chunks - 1;
    double extra[TP_BMPIPE_LAYERS];
    memset(s->at, 0, (size_t)p->chunks * sizeof *s->at);
    for (;;) {
        for (int c = 0; c < last; c++) {
            s->kept[c] = s->fronts[c]->point[s->at[c]].bytes;
            extra[c] = s->fronts[c]->point[s->at[c]].extra_s;
        }
        s->at[last] = tp_bmpipe_front_find(s->fronts[last], last_room(p, stage, s->kept, room));
        if (s->at[last] >= 0) {
            extra[last] = s->fronts[last]->point[s->at[last]].extra_s;
            count = add_choice(s, count, extra, s->at, exact);
        }
        int c = 0;
        while (c < last && ++s->at[c] == s->fronts[c]->count)
            s->at[c++] = 0;
        if (c == last)
            return count;
    }
}

/* Into s->room_extra and s->room_point; returns how many. */
static int
find_choices(tp_bmpipe_search_room *s, int stage, double room, double product, int *exact)
{
    int chunks = s->p->chunks, recomputes = 0, count = greedy(s, stage, room, -1, 1.0, 0, exact);
    for (int c = 0; c < chunks && count > 0; c++)
        recomputes |= s->at[c] + 1 < s->fronts[c]->count;
    s->effort -= 500;
    if (!recomputes) /* nothing fits, or all fits without recomputation */
        return count;
    if (product <= (double)ENUMERATED) {
        s->effort -= (int64_t)product * (1 + s->p->chunks / 2);
        return enumerate(s, stage, room, count, exact);
    }
    *exact = 0;
    for (int c = 0; c < chunks && chunks <= VARIED; c++) {
        count = greedy(s, stage, room, c, 4.0, count, exact);
        count = greedy(s, stage, room, c, 0.25, count, exact);
    }
    return count;
}

static tp_status
make_choice(tp_bmpipe_search_room *s, const int *cut, int stage, tp_bmpipe_choice **out)
{
    tp_bmpipe *p = s->p;
    int chunks = p->chunks, exact = 1, count = 0;
    size_t keys = 1 + 2 * (size_t)chunks;
    double room = p->options->memory_bytes * (1.0 + TP_BMPIPE_SLACK), product = 1.0;
    void *memory = NULL;
    for (int c = 0; c < chunks; c++) {
        int v = c * p->stages + stage;
        TP_TRY(tp_bmpipe_front_of(p, cut[v], cut[v + 1], &s->fronts[c]));
        room -= tp_bmpipe_between(p->static_bytes, cut[v], cut[v + 1]);
        exact &= s->fronts[c]->exact;
        product *= c < chunks - 1 ? s->fronts[c]->count : 1;
    }
    int64_t before = s->effort;
    count = find_choices(s, stage, room, product, &exact);
    TP_TRY(tp_deadline_check_after(&p->asked, 2 * (before - s->effort) * p->virtuals));
    TP_TRY(tp_bmpipe_take(p, 1, sizeof(tp_bmpipe_choice), &memory));
    tp_bmpipe_choice *choice = memory;
    size_t cells = (size_t)count * (size_t)chunks;
    TP_TRY(tp_bmpipe_take(p, cells * (sizeof(double) + sizeof(int32_t)) + keys * sizeof(int32_t), 1, &memory));
    choice->extra_s = memory;
    choice->point = (int32_t *)(choice->extra_s + cells);
    choice->key = choice->point + cells;
    choice->count = count;
    choice->exact = exact;
    memcpy(choice->extra_s, s->room_extra, cells * sizeof(double));
    memcpy(choice->point, s->room_point, cells * sizeof(int32_t));
    memcpy(choice->key, s->key, keys * sizeof(int32_t));
    *out = choice;
    return TP_OK;
}

tp_status
tp_bmpipe_choices(tp_bmpipe_search_room *s, const int *cut, int stage, const tp_bmpipe_choice **out)
{
    int keys = 1 + 2 * s->p->chunks;
    make_key(s, cut, stage);
    tp_bmpipe_choice **place = &s->table[hash_of(s->key, keys) % TP_BMPIPE_HASH];
    for (tp_bmpipe_choice *c = *place; c != NULL; c = c->next)
        if (memcmp(c->key, s->key, (size_t)keys * sizeof(int32_t)) == 0) {
            *out = c;
            return TP_OK;
        }
    tp_bmpipe_choice *made = NULL;
    TP_TRY(make_choice(s, cut, stage, &made));
    made->next = *place;
    *place = made;
    *out = made;
    return TP_OK;
}

void
tp_bmpipe_load(const tp_bmpipe_search_room *s, const int *cut, int stage, const double *extra_s, double *load)
{
    const tp_bmpipe *p = s->p;
    for (int c = 0; c < p->chunks; c++) {
        int v = c * p->stages + stage;
        load[v] = tp_bmpipe_between(p->forward_s, cut[v], cut[v + 1]);
        load[p->virtuals + v] = tp_bmpipe_between(p->backward_s, cut[v], cut[v + 1]) + extra_s[c];
    }
}

void
tp_bmpipe_glance_near(tp_bmpipe_search_room *s, const double *load)
{
    memcpy(s->base_load, load, 2 * (size_t)s->p->virtuals * sizeof *load);
    s->base_count++;
}

/* Where the loads differ from s->base_load: s->changed; how many. */
static int
differences(tp_bmpipe_search_room *s, const double *load)
{
    int count = 0;
    for (int i = 0; i < 2 * s->p->virtuals; i++) {
        s->changed[count] = i;
        count += load[i] != s->base_load[i];
    }
    return count;
}

static double
row_value(tp_bmpipe_search_room *s, int row, const double *load, int changes)
{
    if (s->row_made[row] != s->base_count) {
        s->row_base[row] = tp_bmpipe_row_value(s->p, &s->rows[row], s->base_load);
        s->row_made[row] = s->base_count;
        s->effort--;
    }
    double sum = s->row_base[row];
    for (int k = 0; k < changes; k++)
        sum += s->rows[row].run[s->changed[k]] * (load[s->changed[k]] - s->base_load[s->changed[k]]);
    return sum;
}

static void
swap_rows(tp_bmpipe_search_room *s, int a, int b)
{
    tp_bmpipe_row row = s->rows[a];
    double base = s->row_base[a];
    int64_t made = s->row_made[a];
    s->rows[a] = s->rows[b];
    s->row_base[a] = s->row_base[b];
    s->row_made[a] = s->row_made[b];
    s->rows[b] = row;
    s->row_base[b] = base;
    s->row_made[b] = made;
}

double
tp_bmpipe_glance(tp_bmpipe_search_room *s, const double *load, double limit_s)
{
    tp_bmpipe *p = s->p;
    double most = 0.0;
    int changes = differences(s, load), few = 2 * changes < p->virtuals, k = 0;
    p->evaluations++;
    for (; k < s->row_count && most < limit_s; k++) {
        double value = few ? row_value(s, k, load, changes) : tp_bmpipe_row_value(p, &s->rows[k], load);
        most = value > most ? value : most;
    }
    s->effort -= few ? 1 + (int64_t)k * (changes + 4) / (2 * p->virtuals) : k;
    if (k > 0 && most >= limit_s) {
        swap_rows(s, k - 1, (k - 1) / 2);
        return most;
    }
    memcpy(p->load, load, 2 * (size_t)p->virtuals * sizeof *load);
    double makespan = tp_bmpipe_simulate(p);
    s->effort -= 25 * (int64_t)p->micros;
    if (makespan > most * (1.0 + TP_BMPIPE_SLACK)) {
        if (s->row_count < TP_BMPIPE_ROWS)
            s->row_count++;
        int last = s->row_count - 1; /* a new one, or the one that cut off longest ago */
        tp_bmpipe_last_path(p, &s->rows[last]);
        s->row_made[last] = -1;
        swap_rows(s, 0, last);
    }
    return makespan;
}

double
tp_bmpipe_lack(const tp_bmpipe_search_room *s, const int *cut, int stage)
{
    const tp_bmpipe *p = s->p;
    double still = 0.0;
    for (int c = 0; c < p->chunks; c++) {
        int v = c * p->stages + stage;
        still += tp_bmpipe_between(p->static_bytes, cut[v], cut[v + 1]);
        s->kept[c] = tp_bmpipe_between(p->least_bytes, cut[v], cut[v + 1]);
    }
    double bytes = tp_bmpipe_bytes(p, stage, still, s->kept);
    return tp_bmpipe_fits(p, bytes) ? 0.0 : bytes - p->options->memory_bytes;
}
