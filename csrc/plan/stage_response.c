#include "csrc/plan/stage_response.h"

#include <math.h>
#include <string.h>

/* The bodies below are compiled once more for AVX2: they add and compare, so that all give the same bits. */
#if defined(__GNUC__)
#define BODY static inline __attribute__((always_inline))
#else
#define BODY static inline
#endif

BODY double
later(double a, double b)
{
    return a > b ? a : b;
}

/* at[i] is at least from_s + more[i]. */
BODY void
push(double *restrict at, const double *restrict more, double from_s, int count)
{
    for (int i = 0; i < count; i++) {
        double value = from_s + more[i];
        at[i] = at[i] > value ? at[i] : value;
    }
}

/* What F(r), which ends at end_s, means for the B that its tail gives back. */
BODY void
push_tail(const tp_response_stage *s, const double *restrict tail, int r, double end_s, double *restrict back)
{
    int from = r > s->lead_behind ? r - s->lead_behind : 0;
    if (from < s->micros)
        push(back + from, tail + (size_t)r * (size_t)s->micros + from, end_s, s->micros - from);
}

/* What B(q), which ends at end_s, means for the F that its head gives back. */
BODY void
push_head(const tp_response_stage *s, const double *restrict turn, int q, double end_s, double *restrict down)
{
    int from = q + s->lead_before + 1;
    if (from < s->micros)
        push(down + from, turn, end_s, s->micros - from);
}

BODY void
fill(double *row, int count)
{
    for (int i = 0; i < count; i++)
        row[i] = -INFINITY;
}

void
tp_response_head_empty(int micros, double *head)
{
    for (int q = 0; q < micros; q++)
        head[q] = 0.0;
    fill(head + micros, 2 * micros + 1);
    head[2 * micros - 1] = 0.0;
}

/* From the beginning on; the makespan of the head and the stage alone. */
BODY double
walk_start(const tp_response_stage *s, const double *head, double *start, double *down)
{
    int m = s->micros;
    double now = 0.0, through = head[3 * m];
    memcpy(down, head, (size_t)m * sizeof *down);
    for (int r = 0; r <= s->lead; r++)
        start[r] = (now = later(now, down[r]) + s->forward_s) + s->lag_s;
    for (int q = 0; q < m; q++) {
        int r = s->lead + 1 + q;
        now += s->backward_s;
        through = later(through, now + head[m + q]);
        if (r >= m)
            continue;
        push_head(s, head + 2 * m, q, now, down);
        start[r] = (now = later(now, down[r]) + s->forward_s) + s->lag_s;
    }
    return through;
}

/* The same from the end back. */
BODY void
walk_end(const tp_response_stage *s, const double *head, double *end, double *left)
{
    int m = s->micros;
    const double *turn = head + 2 * m;
    double now = -INFINITY;
    memcpy(left, head + m, (size_t)m * sizeof *left);
    for (int q = m - 1; q >= 0; q--) {
        int r = s->lead + 1 + q, count = r - s->lead_before;
        if (r < m) {
            now += s->forward_s;
            for (int i = 0; i < count; i++)
                left[i] = later(left[i], turn[count - 1 - i] + now);
        }
        now = later(now, left[q]) + s->backward_s;
        end[q] = s->lag_s + now;
    }
}

BODY void
head_body(const tp_response_stage *s, const double *head, double *out, double *scratch)
{
    int m = s->micros, turns = m - 1 - s->lead;
    double *turn = out + 2 * m, now = 0.0;
    out[3 * m] = walk_start(s, head, out, scratch);
    walk_end(s, head, out + m, scratch);
    fill(scratch, m);
    fill(turn, m);
    for (int d = 0; d < turns; d++) { /* L_(k - 1) is L_k + 1 */
        now += s->backward_s;
        push(scratch + d + 1, head + 2 * m, now, turns - 1 - d);
        now = later(now, scratch[d]) + s->forward_s;
        turn[d] = s->lag_s + now + s->lag_s;
    }
}

/* From the end of F(q + lead) on, the B before `q` left out: row[q] becomes the lesser. */
BODY void
walk_tail(const tp_response_stage *s, const double *tail, int q, double now, double *back, int set, double *row)
{
    int m = s->micros;
    for (; q < m; q++) {
        int r = s->lead + 1 + q;
        now = later(now, back[q]) + s->backward_s;
        double value = s->lag_s + now + s->lag_s;
        row[q] = set && row[q] < value ? row[q] : value;
        if (r < m)
            push_tail(s, tail, r, now += s->forward_s, back);
    }
}

BODY void
tail_body(const tp_response_stage *s, const double *tail, int set, double *out, double *scratch)
{
    int m = s->micros;
    double *back = scratch, *warm = scratch + m;
    fill(warm, m);
    for (int r = s->lead; r >= 0; r--) { /* F(r) .. F(lead) one behind another */
        push_tail(s, tail, r, 0.0, warm);
        for (int q = 0; q < m; q++)
            back[q] = warm[q] += s->forward_s;
        walk_tail(s, tail, 0, (s->lead - r + 1) * s->forward_s, back, set, out + (size_t)r * (size_t)m);
    }
    for (int r = s->lead + 1; r < m; r++) {
        fill(back, m);
        push_tail(s, tail, r, s->forward_s, back);
        walk_tail(s, tail, r - s->lead, s->forward_s, back, set, out + (size_t)r * (size_t)m);
    }
}

/* What is behind the stage: a tail, or (NULL) a mere delay. */
BODY void
push_behind(const tp_response_stage *s, const double *tail, double rest_s, int r, double now, double *back)
{
    if (tail != NULL)
        push_tail(s, tail, r, now, back);
    else
        back[r] = now + rest_s;
}

BODY double
makespan_body(const tp_response_stage *s, const double *head, const double *tail, double rest_s, double limit_s, double *scratch)
{
    int m = s->micros;
    double *down = scratch, *back = scratch + m, now = 0.0, end = head[3 * m];
    memcpy(down, head, (size_t)m * sizeof *down);
    fill(back, m);
    for (int r = 0; r <= s->lead; r++)
        push_behind(s, tail, rest_s, r, now = later(now, down[r]) + s->forward_s, back);
    for (int q = 0; q < m; q++) {
        int r = s->lead + 1 + q;
        now = later(now, back[q]) + s->backward_s;
        end = later(end, now + head[m + q]);
        if (end > limit_s)
            break;
        if (r >= m)
            continue;
        push_head(s, head + 2 * m, q, now, down);
        push_behind(s, tail, rest_s, r, now = later(now, down[r]) + s->forward_s, back);
    }
    return end;
}

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
static AVX2 void
head_avx2(const tp_response_stage *s, const double *head, double *out, double *scratch)
{
    head_body(s, head, out, scratch);
}
static AVX2 void
tail_avx2(const tp_response_stage *s, const double *tail, int set, double *out, double *scratch)
{
    tail_body(s, tail, set, out, scratch);
}
static AVX2 double
makespan_avx2(const tp_response_stage *s, const double *head, const double *tail, double limit_s, double *scratch)
{
    return makespan_body(s, head, tail, 0.0, limit_s, scratch);
}
static AVX2 double
delay_avx2(const tp_response_stage *s, const double *head, double rest_s, double limit_s, double *scratch)
{
    return makespan_body(s, head, NULL, rest_s, limit_s, scratch);
}
#define HAS_AVX2 __builtin_cpu_supports("avx2")
#else
#define HAS_AVX2 0
#define head_avx2 head_body
#define tail_avx2 tail_body
#define makespan_avx2(s, head, tail, limit_s, scratch) makespan_body(s, head, tail, 0.0, limit_s, scratch)
#define delay_avx2(s, head, rest_s, limit_s, scratch) makespan_body(s, head, NULL, rest_s, limit_s, scratch)
#endif

void
tp_response_head(const tp_response_stage *s, const double *head, double *out, double *scratch)
{
    if (HAS_AVX2)
        head_avx2(s, head, out, scratch);
    else
        head_body(s, head, out, scratch);
}

void
tp_response_tail(const tp_response_stage *s, const double *tail, int set, double *out, double *scratch)
{
    if (HAS_AVX2)
        tail_avx2(s, tail, set, out, scratch);
    else
        tail_body(s, tail, set, out, scratch);
}

double
tp_response_makespan(const tp_response_stage *s, const double *head, const double *tail, double limit_s,
                     double *scratch)
{
    return HAS_AVX2 ? makespan_avx2(s, head, tail, limit_s, scratch) : makespan_body(s, head, tail, 0.0, limit_s, scratch);
}

double
tp_response_delay(const tp_response_stage *s, const double *head, double rest_s, double limit_s, double *scratch)
{
    return HAS_AVX2 ? delay_avx2(s, head, rest_s, limit_s, scratch) : makespan_body(s, head, NULL, rest_s, limit_s, scratch);
}
