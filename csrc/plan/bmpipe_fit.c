/* Is there a partition with several chunks that fits at all, with everything recomputed? First a descent from balanced boundaries;
 * where that ends short of memory, a search of all boundaries (up to NODES nodes). */
#include "csrc/plan/bmpipe_chunks.h"

#include <math.h>
#include <string.h>

#include "csrc/base/deadline.h"
#include "csrc/plan/plan.h"

enum { NODES = 1 << 21, LATE = 1 << 28 }; /* LATE: steps of about a nanosecond */

/* And s->lack. */
static double
total_lack(tp_bmpipe_search_room *s, const int *cut, int *worst)
{
    double sum = 0.0, most = 0.0;
    for (int x = 0; x < s->p->stages; x++) {
        s->lack[x] = tp_bmpipe_lack(s, cut, x);
        sum += s->lack[x];
        if (s->lack[x] > most) {
            most = s->lack[x];
            *worst = x;
        }
    }
    return sum;
}

void
tp_bmpipe_touch(tp_bmpipe_search_room *s, const int *cut, int v, int u)
{
    const tp_bmpipe *p = s->p;
    int low = v < u ? v : u, high = v < u ? u : v, step = v < u ? -1 : 1;
    memset(s->touched, 0, (size_t)p->stages);
    for (int w = low; w <= high; w++) {
        int from = cut[w] + (w > low ? step : 0), to = cut[w + 1] + (w < high ? step : 0);
        if (to - from != cut[w + 1] - cut[w] || tp_bmpipe_canonical(p, from, to) != tp_bmpipe_canonical(p, cut[w], cut[w + 1]))
            s->touched[w % p->stages] = 1;
    }
}

void
tp_bmpipe_shift(int *cut, int v, int u)
{
    int low = v < u ? v : u, high = v < u ? u : v, step = v < u ? -1 : 1;
    for (int k = low + 1; k <= high; k++)
        cut[k] += step;
}

/* Bytes lacking once a layer of v has moved to u, or, where they are `enough`, at least as many: only stages that get other layers
 * are looked at again. *steps: what that took. */
static double
lack_after(tp_bmpipe_search_room *s, int *cut, int v, int u, double enough, int64_t *steps)
{
    const tp_bmpipe *p = s->p;
    double sum = 0.0;
    tp_bmpipe_touch(s, cut, v, u);
    tp_bmpipe_shift(cut, v, u);
    *steps = 8 + 2 * (v < u ? u - v : v - u);
    for (int x = 0; x < p->stages && sum < enough; x++) {
        sum += s->touched[x] ? tp_bmpipe_lack(s, cut, x) : s->lack[x];
        *steps += s->touched[x] ? (int64_t)(p->vector_begin[x + 1] - p->vector_begin[x] + 4) * p->chunks : 1;
    }
    tp_bmpipe_shift(cut, u, v);
    return sum;
}

/* The best single move of a layer between two virtual stages, until none helps, or the thread is told to stop, or `late` steps have
 * been taken after time was up. */
static double
downhill(tp_bmpipe_search_room *s, int *cut, int64_t late, int *worst)
{
    int virtuals = s->p->virtuals;
    double now = total_lack(s, cut, worst);
    while (now > 0.0) {
        double best = now;
        int from = -1, to = -1;
        for (int v = 0; v < virtuals; v++) {
            int is_late = tp_bmpipe_is_late(s->p);
            for (int u = 0; u < virtuals; u++) {
                int64_t steps = 0;
                if (is_late && late <= 0)
                    return now;
                if (u == v || cut[v + 1] - cut[v] < 2)
                    continue;
                s->effort--;
                double lack = lack_after(s, cut, v, u, best, &steps);
                late -= is_late ? steps : 0;
                if (tp_deadline_told_after(&s->p->asked, steps))
                    return now;
                if (lack < best * (1.0 - 1e-9)) {
                    best = lack;
                    from = v;
                    to = u;
                }
            }
        }
        if (from < 0)
            break;
        tp_bmpipe_shift(cut, from, to);
        now = total_lack(s, cut, worst);
    }
    return now;
}

double
tp_bmpipe_mend(tp_bmpipe_search_room *s, int *cut)
{
    int ignored = 0;
    return downhill(s, cut, 0, &ignored);
}

/* Depth first: a branch ends where a stage's chunks so far do not fit. 1: found, 0: there is none, -1: too many nodes. */
static int
search(tp_bmpipe_search_room *s, int *cut, int v, int64_t *nodes)
{
    tp_bmpipe *p = s->p;
    int n = p->n, virtuals = p->virtuals, stage = v % p->stages;
    if (v == virtuals)
        return 1;
    for (int to = v == virtuals - 1 ? n : cut[v] + 1; to <= n - (virtuals - 1 - v); to++) {
        if (++*nodes > NODES || ((*nodes & 1023) == 0 && tp_bmpipe_is_late(p)))
            return -1;
        cut[v + 1] = to;
        double still = 0.0;
        for (int c = 0; c < p->chunks; c++) {
            int w = c * p->stages + stage;
            still += w <= v ? tp_bmpipe_between(p->static_bytes, cut[w], cut[w + 1]) : 0.0;
            s->kept[c] = w <= v ? tp_bmpipe_between(p->least_bytes, cut[w], cut[w + 1]) : 0.0;
        }
        if (!tp_bmpipe_fits(p, tp_bmpipe_bytes(p, stage, still, s->kept)))
            return 0; /* nor does a longer interval */
        int found = search(s, cut, v + 1, nodes);
        if (found != 0)
            return found;
    }
    return 0;
}

/* ---- where nothing was found: what would fit ----------------------------------------------------------------------------- */

/* Bytes of the fullest stage. */
static double
fullest(tp_bmpipe_search_room *s, const int *cut, int *stage)
{
    const tp_bmpipe_options *asked = s->p->options;
    tp_bmpipe_options none = *asked;
    double most = -1.0;
    none.memory_bytes = 0.0;
    s->p->options = &none;
    for (int x = 0; x < s->p->stages; x++) {
        double bytes = tp_bmpipe_lack(s, cut, x);
        if (bytes > most) {
            most = bytes;
            *stage = x;
        }
    }
    s->p->options = asked;
    return most;
}

/* Boundaries that keep to the limit, from those of s->next.cut on: 1, 0 where there are none, -1 where none
 * were found. nodes NULL: a descent, else the search of all. */
static int
keep_to(tp_bmpipe_search_room *s, double limit, int64_t *nodes)
{
    const tp_bmpipe_options *asked = s->p->options;
    tp_bmpipe_options other = *asked;
    int ignored = 0, found;
    other.memory_bytes = limit;
    s->p->options = &other;
    if (nodes == NULL)
        found = downhill(s, s->next.cut, 0, &ignored) <= 0.0 ? 1 : -1;
    else
        found = search(s, s->next.cut, 0, nodes);
    s->p->options = asked;
    return found;
}

/* Lower the bytes of the fullest stage as far as possible: by descents within lower and lower limits, and, as far as NODES nodes
 * go, by searches of all boundaries. */
static void
lower_fullest(tp_bmpipe_search_room *s, int *cut, int proven, int64_t *nodes)
{
    size_t size = (size_t)(s->p->virtuals + 1) * sizeof *cut;
    double asked = s->p->options->memory_bytes;
    int stage = 0;
    for (double part = 0.05; part > 1e-4 && !tp_bmpipe_is_late(s->p);) {
        double limit = fullest(s, cut, &stage) * (1.0 - part);
        memcpy(s->next.cut, cut, size);
        if (keep_to(s, limit, NULL) > 0)
            memcpy(cut, s->next.cut, size);
        else
            part *= 0.25;
    }
    double low = asked, high = fullest(s, cut, &stage);
    for (int step = 0; proven && low < high; step++) {
        double below = high * (1.0 - 4.0 * TP_BMPIPE_SLACK), middle = fmin(below, step % 3 ? low + 0.5 * (high - low) : below);
        int found = middle > low ? keep_to(s, middle, nodes) : -1;
        if (found > 0) {
            memcpy(cut, s->next.cut, size);
            high = fmin(fullest(s, cut, &stage), middle);
        } else if (found < 0 || middle >= below) {
            break;
        } else {
            low = middle;
        }
    }
}

/* bytes: of the layers, to begin from stages of as many. TP_OK where what it looks for fits after all. */
static tp_status
refuse(tp_bmpipe_search_room *s, const double *bytes, int proven, int64_t *nodes)
{
    tp_bmpipe *p = s->p;
    int stage = 0, *cut = s->now.cut;
    double asked = p->options->memory_bytes;
    TP_TRY(tp_plan_balance(bytes, p->n, p->virtuals, cut));
    lower_fullest(s, cut, proven, nodes);
    TP_TRY(tp_deadline_check_told());
    double least = fullest(s, cut, &stage);
    if (tp_bmpipe_fits(p, least))
        return TP_OK;
    return tp_fail(TP_EINFEASIBLE,
                   "%s: stage %d is %.0f bytes short of memory_bytes %.0f with everything recomputed; %.0f would fit",
                   proven ? "no plan fits" : "no plan that fits was found", stage, ceil(least - asked), asked, ceil(least));
}

/* No boundaries fit: all stages together hold what is static and, of every layer, at least the mean of a stage's vectors in
 * flight. */
static int
is_too_much(const tp_bmpipe *p)
{
    double mean = INFINITY, all = p->stages * p->options->memory_bytes * (1.0 + TP_BMPIPE_SLACK);
    for (int x = 0; x < p->stages; x++)
        for (int c = 0; c < p->chunks; c++) {
            double sum = 0.0;
            int first = p->vector_begin[x], end = p->vector_begin[x + 1];
            for (int v = first; v < end; v++)
                sum += p->vector[v * p->chunks + c];
            mean = fmin(mean, end > first ? sum / (end - first) : 0.0);
        }
    return p->static_bytes[p->n] + mean * p->least_bytes[p->n] * (1.0 - 1e-9) > all;
}

tp_status
tp_bmpipe_find_fit(tp_bmpipe_search_room *s)
{
    tp_bmpipe *p = s->p;
    int worst = 0, *cut = s->now.cut;
    void *memory = NULL;
    int64_t nodes = 0;
    TP_TRY(tp_bmpipe_take(p, 2 * (size_t)p->n, sizeof(double), &memory));
    double *time_s = memory, *bytes = time_s + p->n;
    int held = p->vector[p->vector_begin[0]] + 1;
    for (int i = 0; i < p->n; i++) {
        time_s[i] = tp_bmpipe_between(p->forward_s, i, i + 1) + tp_bmpipe_between(p->backward_s, i, i + 1);
        bytes[i] = tp_bmpipe_between(p->static_bytes, i, i + 1) + held * tp_bmpipe_between(p->least_bytes, i, i + 1);
    }
    s->next.cut[0] = 0;
    if (is_too_much(p))
        return refuse(s, bytes, 1, &nodes);
    TP_TRY(tp_plan_balance(time_s, p->n, p->virtuals, cut));
    if (downhill(s, cut, 0, &worst) <= 0.0)
        return TP_OK;
    TP_TRY(tp_plan_balance(bytes, p->n, p->virtuals, cut));
    if (downhill(s, cut, LATE, &worst) <= 0.0) /* so that there is a plan even where there is no time */
        return TP_OK;
    TP_TRY(tp_deadline_check_told());
    memcpy(s->next.cut, cut, (size_t)(p->virtuals + 1) * sizeof *cut);
    s->next.cut[0] = 0;
    int found = search(s, s->next.cut, 0, &nodes);
    if (found <= 0)
        return refuse(s, bytes, found == 0, &nodes);
    memcpy(cut, s->next.cut, (size_t)(p->virtuals + 1) * sizeof *cut);
    return TP_OK;
}
