/* One stage with several chunks: which recomputation fits. The chunks share the stage's memory, each with its own number of
 * micro-batches in flight, so there is no single least extra time but a front over the chunks. */
#include "csrc/plan/bmpipe_chunks.h"

#include <math.h>
#include <string.h>

enum { ENUMERATED = 4096 };

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

/* Keep a vector unless one that is kept is no worse in every chunk; drop those that it beats. */
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

/* From no recomputation on: where the worst vector saves most bytes a second, one point further, until it fits. Returns the
 * new count of choices; 0 if even the fewest bytes do not fit. */
static int
greedy(tp_bmpipe_search_room *s, int stage, double room, int *exact)
{
    const tp_bmpipe *p = s->p;
    int chunks = p->chunks;
    double *extra = s->room_extra + TP_BMPIPE_CHOICE_ROOM * chunks, held = 0.0;
    for (int c = 0; c < chunks; c++)
        s->at[c] = s->fronts[c]->count - 1;
    for (;;) {
        for (int c = 0; c < chunks; c++) {
            s->kept[c] = s->fronts[c]->point[s->at[c]].bytes;
            extra[c] = s->fronts[c]->point[s->at[c]].extra_s;
        }
        int worst = worst_vector(p, stage, s->kept, &held), best = -1;
        double best_rate = -1.0;
        if (held <= room)
            break;
        for (int c = 0; c < chunks; c++) {
            if (s->at[c] == 0 || p->vector[worst * chunks + c] == 0)
                continue;
            const tp_bmpipe_point *from = &s->fronts[c]->point[s->at[c]];
            double rate = p->vector[worst * chunks + c] * (from->bytes - from[-1].bytes) /
                          (from[-1].extra_s - from->extra_s + 1e-300);
            if (rate > best_rate) {
                best_rate = rate;
                best = c;
            }
        }
        if (best < 0)
            return 0;
        s->at[best]--;
    }
    double found[TP_BMPIPE_LAYERS];
    memcpy(found, extra, (size_t)chunks * sizeof *found);
    return add_choice(s, 0, found, s->at, exact);
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

/* All points of the first chunks, evenly thinned to `width` each, with the best of the last. */
static int
enumerate(tp_bmpipe_search_room *s, int stage, double room, int width, int count, int *exact)
{
    const tp_bmpipe *p = s->p;
    int last = p->chunks - 1;
    double extra[TP_BMPIPE_LAYERS];
    int32_t step[TP_BMPIPE_LAYERS] = {0};
    for (;;) {
        for (int c = 0; c < last; c++) {
            int all = s->fronts[c]->count, some = all < width ? all : width;
            s->at[c] = some < all ? (int)((int64_t)step[c] * (all - 1) / (some - 1)) : step[c];
            s->kept[c] = s->fronts[c]->point[s->at[c]].bytes;
            extra[c] = s->fronts[c]->point[s->at[c]].extra_s;
        }
        s->at[last] = tp_bmpipe_front_find(s->fronts[last], last_room(p, stage, s->kept, room));
        if (s->at[last] >= 0) {
            extra[last] = s->fronts[last]->point[s->at[last]].extra_s;
            count = add_choice(s, count, extra, s->at, exact);
        }
        int c = 0;
        for (; c < last; c++) {
            int all = s->fronts[c]->count, some = all < width ? all : width;
            *exact &= some == all;
            if (++step[c] < some)
                break;
            step[c] = 0;
        }
        if (c == last)
            return count;
    }
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
    count = greedy(s, stage, room, &exact);
    int width = product <= ENUMERATED ? TP_BMPIPE_POINTS : (int)pow(ENUMERATED, 1.0 / (chunks - 1));
    if (count > 0 && width > 2)
        count = enumerate(s, stage, room, width, count, &exact);
    else
        exact &= count == 0;
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
    s->effort -= 500 + (int64_t)fmin(product, ENUMERATED);
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

double
tp_bmpipe_glance(tp_bmpipe_search_room *s, const double *load, double limit_s)
{
    tp_bmpipe *p = s->p;
    double most = 0.0;
    p->evaluations++;
    for (int k = 0; k < s->row_count; k++) {
        double value = tp_bmpipe_row_value(p, &s->rows[k], load);
        s->effort--;
        if (value >= limit_s) {
            tp_bmpipe_row row = s->rows[k];
            s->rows[k] = s->rows[k / 2];
            s->rows[k / 2] = row;
            return value;
        }
        most = value > most ? value : most;
    }
    memcpy(p->load, load, 2 * (size_t)p->virtuals * sizeof *load);
    double makespan = tp_bmpipe_simulate(p);
    s->effort -= 25 * (int64_t)p->micros;
    if (makespan > most * (1.0 + TP_BMPIPE_SLACK)) {
        if (s->row_count < TP_BMPIPE_ROWS)
            s->row_count++;
        tp_bmpipe_row row = s->rows[s->row_count - 1]; /* a new one, or the one that cut off longest ago */
        tp_bmpipe_last_path(p, &row);
        s->rows[s->row_count - 1] = s->rows[0];
        s->rows[0] = row;
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
