/* The least time W of a stage within its memory (memopt.h): prefix sums over nodes, the linear relaxation by a wavelet matrix, and
 * a memo of answers. */
#include "csrc/plan/memopt_search.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    double ratio;
    long double beyond; /* it, where a double holds no such number */
    int node;
} ranked;

static int
by_ratio(const void *a, const void *b)
{
    const ranked *p = a, *q = b;
    if (p->ratio != q->ratio)
        return p->ratio < q->ratio ? -1 : 1;
    if (p->beyond != q->beyond)
        return p->beyond < q->beyond ? -1 : 1;
    return p->node - q->node;
}

static tp_status
take(tp_memopt *m, size_t count, size_t size, void *out)
{
    void *memory = NULL;
    TP_TRY(tp_arena_take(&m->arena, count, size, &memory));
    memcpy(out, &memory, sizeof memory);
    return TP_OK;
}

/* Prefix sums, added in long double: so each is the double nearest to the true sum, and a difference of two has two roundings. */
static void
sum_before(const double *values, const double *more, int n, double *sums)
{
    long double sum = 0.0L;
    for (int k = 0; k < n; k++) {
        sums[k] = (double)sum;
        sum += (long double)values[k] + (more == NULL ? 0.0L : (long double)more[k]);
    }
    sums[n] = (double)sum;
}

static tp_status
rank_nodes(tp_memopt *m)
{
    ranked *rows = NULL;
    TP_TRY(take(m, (size_t)m->n, sizeof *rows, &rows));
    for (int k = 0; k < m->n; k++) {
        double bytes = m->nodes->activation_bytes[k];
        long double beyond = bytes > 0.0 ? (long double)m->nodes->recompute_s[k] / (long double)bytes : (long double)INFINITY;
        m->ratio[k] = bytes > 0.0 ? m->nodes->recompute_s[k] / bytes : INFINITY;
        rows[k] = (ranked){m->ratio[k], isinf(m->ratio[k]) ? beyond : 0.0L, k};
    }
    qsort(rows, (size_t)m->n, sizeof *rows, by_ratio);
    for (int k = 0; k < m->n; k++)
        m->order[k] = rows[k].node;
    return TP_OK;
}

/* Add to a sum of two doubles, the second of which has what rounding took from the first. */
static void
add_exactly(double sum[2], double more)
{
    double all = sum[0] + more, added = all - sum[0];
    sum[1] += (sum[0] - (all - added)) + (more - added);
    sum[0] = all;
}

/* The seconds between two places of a level: right, too, beside those of nodes that are so large that they must not be
 * recomputed, as long as what these lose when they are added up is not itself that much larger than the others. */
static double
seconds_between(const tp_memopt *m, size_t from, size_t to)
{
    double less = -m->zero_s[from], all = m->zero_s[to] + less, added = all - m->zero_s[to];
    double lost = (m->zero_s[to] - (all - added)) + (less - added);
    return all + (lost + (m->zero_lost_s[to] - m->zero_lost_s[from]));
}

/* Level by level from the highest bit of the rank: stable partition by that bit, zeros to the front. */
static tp_status
build_matrix(tp_memopt *m)
{
    int n = m->n, *rank = NULL, *at = NULL, *after = NULL;
    TP_TRY(take(m, (size_t)n, sizeof *rank, &rank));
    TP_TRY(take(m, (size_t)n, sizeof *at, &at));
    TP_TRY(take(m, (size_t)n, sizeof *after, &after));
    for (int k = 0; k < n; k++)
        rank[m->order[k]] = k;
    for (int k = 0; k < n; k++)
        at[k] = k;
    for (int level = 0; level < m->levels; level++) {
        int bit = m->levels - 1 - level, *zeros = m->zeros + (size_t)level * (size_t)(n + 1), count = 0, next;
        double *bytes = m->zero_bytes + (size_t)level * (size_t)(n + 1), *seconds = m->zero_s + (bytes - m->zero_bytes);
        double *lost = m->zero_lost_s + (bytes - m->zero_bytes), s[2] = {0.0, 0.0};
        long double b = 0.0L;
        for (int k = 0; k < n; k++) {
            zeros[k] = count;
            bytes[k] = (double)b;
            seconds[k] = s[0];
            lost[k] = s[1];
            if (rank[at[k]] >> bit & 1)
                continue;
            b += (long double)m->nodes->activation_bytes[at[k]];
            add_exactly(s, m->nodes->recompute_s[at[k]]);
            after[count++] = at[k];
        }
        zeros[n] = next = count;
        bytes[n] = (double)b;
        seconds[n] = s[0];
        lost[n] = s[1];
        for (int k = 0; k < n; k++)
            if (rank[at[k]] >> bit & 1)
                after[next++] = at[k];
        int *swap = at;
        at = after;
        after = swap;
    }
    return TP_OK;
}

static tp_status
build_working(tp_memopt *m)
{
    size_t n = (size_t)m->n;
    if (m->nodes->working_bytes == NULL)
        return TP_OK;
    TP_TRY(take(m, (size_t)(m->levels + 1) * n, sizeof(double), &m->working));
    memcpy(m->working, m->nodes->working_bytes, n * sizeof(double));
    for (int level = 1; level <= m->levels; level++) {
        double *row = m->working + (size_t)level * n, *below = row - n;
        for (size_t k = 0; k < n; k++) {
            size_t other = k + ((size_t)1 << (level - 1));
            row[k] = other < n ? fmax(below[k], below[other]) : below[k];
        }
    }
    return TP_OK;
}

static double
working_of(const tp_memopt *m, int i, int j)
{
    int level = 0;
    if (m->working == NULL || j <= i)
        return 0.0;
    while ((2 << level) <= j - i)
        level++;
    const double *row = m->working + (size_t)level * (size_t)m->n;
    return fmax(row[i], row[j - (1 << level)]);
}

/* Bytes above which doubles hold no halves of a byte of what a copy may have. */
#define MOST_WHOLE 0x1p50

/* Whole numbers; *sum grows by them. */
static int
are_whole(const double *bytes, int count, double *sum)
{
    int whole = 1;
    for (int k = 0; bytes != NULL && k < count; k++) {
        whole &= bytes[k] == floor(bytes[k]);
        *sum += bytes[k];
    }
    return whole;
}

static int
has_whole_bytes(const tp_nodes *nodes, const tp_dawnpiper_options *options)
{
    double sum = options->memory_bytes, copies = tp_dawnpiper_copies(options, 0) + 1.0; /* no stage has more; of weights one more */
    int whole = are_whole(&options->memory_bytes, 1, &sum);
    whole &= are_whole(nodes->activation_bytes, nodes->count, &sum) & are_whole(nodes->param_bytes, nodes->count, &sum);
    whole &= are_whole(nodes->optimizer_bytes, nodes->count, &sum) & are_whole(nodes->working_bytes, nodes->count, &sum);
    return whole && sum * copies <= MOST_WHOLE;
}

tp_status
tp_memopt_open(const tp_nodes *nodes, const tp_dawnpiper_options *options, tp_memopt *out)
{
    *out = (tp_memopt){.nodes = nodes, .options = options, .n = nodes->count, .whole = has_whole_bytes(nodes, options)};
    size_t n = (size_t)nodes->count;
    TP_TRY(tp_arena_open(&out->arena));
    while ((1 << out->levels) < nodes->count)
        out->levels++;
    size_t cells = (size_t)out->levels * (n + 1);
    TP_TRY(take(out, n + 1, sizeof(double), &out->time_s));
    TP_TRY(take(out, n + 1, sizeof(double), &out->active));
    TP_TRY(take(out, n + 1, sizeof(double), &out->fixed_param));
    TP_TRY(take(out, n + 1, sizeof(double), &out->fixed_state));
    TP_TRY(take(out, n, sizeof(double), &out->ratio));
    TP_TRY(take(out, n, sizeof(int), &out->order));
    TP_TRY(take(out, n, sizeof(int), &out->item));
    TP_TRY(take(out, n, 1, &out->chosen));
    TP_TRY(take(out, cells, sizeof(int), &out->zeros));
    TP_TRY(take(out, cells, sizeof(double), &out->zero_bytes));
    TP_TRY(take(out, cells, sizeof(double), &out->zero_s));
    TP_TRY(take(out, cells, sizeof(double), &out->zero_lost_s));
    sum_before(nodes->forward_s, nodes->backward_s, nodes->count, out->time_s);
    sum_before(nodes->activation_bytes, NULL, nodes->count, out->active);
    sum_before(nodes->param_bytes, NULL, nodes->count, out->fixed_param);
    sum_before(nodes->optimizer_bytes, NULL, nodes->count, out->fixed_state);
    out->limit = options->work_limit > 0 ? options->work_limit : 4000000;
    TP_TRY(build_working(out));
    TP_TRY(rank_nodes(out));
    return build_matrix(out);
}

void
tp_memopt_close(tp_memopt *m)
{
    if (m->arena.heap != NULL)
        tp_arena_close(&m->arena);
    m->arena.heap = NULL;
}

double
tp_memopt_fixed(const tp_memopt *m, int x, int i, int j)
{
    double param = m->fixed_param[j] - m->fixed_param[i], state = m->fixed_state[j] - m->fixed_state[i];
    double copies = tp_dawnpiper_copies(m->options, x), working = working_of(m, i, j);
    if (m->options->paper)
        return copies * (param + state) + working;
    return (m->options->flight == TP_FLIGHT_PIPEDREAM ? copies + 1.0 : 2.0) * param + state + working;
}

double
tp_memopt_need(const tp_memopt *m, int x, int i, int j, double *slack)
{
    double fixed = tp_memopt_fixed(m, x, i, j), limit = m->options->memory_bytes;
    double copies = tp_dawnpiper_copies(m->options, x), active = m->active[j] - m->active[i];
    *slack = 1e-13 * limit / copies + 4.0 * DBL_EPSILON * m->active[m->n];
    if (m->whole) /* a byte too many is 1 / copies more */
        *slack = fmin(*slack, 0.5 / copies);
    if (fixed > (m->whole ? limit : limit * (1.0 + 1e-13)))
        return INFINITY;
    double need = active + (fixed - limit) / copies;
    return !m->options->optimise && need > *slack ? INFINITY : need;
}

tp_memopt_range
tp_memopt_relaxed(tp_memopt *m, int x, int i, int j)
{
    double slack, time = tp_memopt_time(m, i, j), width = m->options->swap_Bps;
    double need = tp_memopt_need(m, x, i, j, &slack), bytes = 0.0, seconds = 0.0;
    m->evaluations++;
    if (isinf(need))
        return (tp_memopt_range){INFINITY, INFINITY};
    if (need - width * time <= slack)
        return (tp_memopt_range){time, time};
    int from = i, to = j, rank = 0;
    size_t row = 0;
    need -= width * time + slack;
    for (int level = 0; level < m->levels; level++, row += (size_t)(m->n + 1)) {
        const int *zeros = m->zeros + row;
        int left = zeros[from], right = zeros[to];
        double b = m->zero_bytes[row + (size_t)to] - m->zero_bytes[row + (size_t)from];
        double s = seconds_between(m, row + (size_t)from, row + (size_t)to);
        rank *= 2;
        if (right > left && bytes + b + width * (seconds + s) >= need) {
            from = left;
            to = right;
            continue;
        }
        bytes += b;
        seconds += s;
        rank++;
        from += zeros[m->n] - left;
        to += zeros[m->n] - right;
    }
    if (from >= to) /* all of them, and only rounding is missing */
        return (tp_memopt_range){time + seconds * (1.0 - 1e-13), time + seconds};
    int node = m->order[rank];
    double b = m->nodes->activation_bytes[node], s = m->nodes->recompute_s[node], grown = b + width * s;
    double part = grown > 0.0 ? fmin(1.0, (need - bytes - width * seconds) / grown) : 1.0;
    tp_memopt_range range = {fmax(time, (time + seconds + part * s) * (1.0 - 1e-13)), time + seconds + s};
    if (width > 0.0) /* need was less the bytes that `time` hides */
        range.high_s = fmin(range.high_s, fmax(time + seconds, time + (need + slack - bytes) / width));
    return range;
}

/* ---- what is remembered ------------------------------------------------------------------------------------------ */

static tp_status
grow_known(tp_memopt *m)
{
    tp_memopt_known *old = m->known;
    int64_t room = m->known_room;
    m->known_room = room == 0 ? 1024 : 4 * room;
    TP_TRY(take(m, (size_t)m->known_room, sizeof *m->known, &m->known));
    for (int64_t k = 0; k < room; k++) {
        if (old[k].key == 0)
            continue;
        uint64_t at = (uint64_t)old[k].key * 0x9e3779b97f4a7c15u >> 20;
        while (m->known[at & (uint64_t)(m->known_room - 1)].key != 0)
            at++;
        m->known[at & (uint64_t)(m->known_room - 1)] = old[k];
    }
    return TP_OK;
}

static tp_status
find_known(tp_memopt *m, int x, int i, int j, tp_memopt_known **out)
{
    if (2 * m->known_count >= m->known_room)
        TP_TRY(grow_known(m));
    int64_t key = 1 + j + (int64_t)(m->n + 1) * (i + (int64_t)(m->n + 1) * x);
    uint64_t at = (uint64_t)key * 0x9e3779b97f4a7c15u >> 20;
    tp_memopt_known *entry = &m->known[at & (uint64_t)(m->known_room - 1)];
    while (entry->key != 0 && entry->key != key)
        entry = &m->known[++at & (uint64_t)(m->known_room - 1)];
    if (entry->key == 0) {
        *entry = (tp_memopt_known){key, {0.0, INFINITY}, INFINITY, NULL, 0};
        m->known_count++;
    }
    *out = entry;
    return TP_OK;
}

/* The memo's entry of a stage, with the relaxation's bound in it. */
static tp_status
known_of(tp_memopt *m, int x, int i, int j, const tp_memopt_range *relaxed, tp_memopt_known **out)
{
    TP_TRY(find_known(m, x, i, j, out));
    tp_memopt_range *range = &(*out)->range;
    range->low_s = fmax(relaxed->low_s, range->low_s);
    range->high_s = fmin(relaxed->high_s, range->high_s);
    return TP_OK;
}

tp_status
tp_memopt_low(tp_memopt *m, int x, int i, int j, double *low_s)
{
    tp_memopt_known *known;
    tp_memopt_range relaxed = tp_memopt_relaxed(m, x, i, j);
    TP_TRY(known_of(m, x, i, j, &relaxed, &known));
    *low_s = known->range.low_s;
    return TP_OK;
}

/* Search until W is known to be at most `enough` or more than that, a second time to the end, and keep the result in the memo: a
 * set in any case. */
static tp_status
learn(tp_memopt *m, int x, int i, int j, double enough, double cutoff, double within, tp_memopt_known *known)
{
    double best;
    if (known->chosen != NULL && (known->spent || m->states >= m->limit))
        return TP_OK;
    if (known->chosen != NULL)
        enough = fmin(enough, known->range.low_s);
    TP_TRY(tp_memopt_knapsack(m, x, i, j, enough, cutoff, within, known, &best));
    if (best >= known->chosen_s)
        return TP_OK;
    if (known->chosen == NULL)
        TP_TRY(take(m, (size_t)(j - i), 1, &known->chosen));
    memcpy(known->chosen, m->chosen + i, (size_t)(j - i));
    known->chosen_s = best;
    return TP_OK;
}

tp_status
tp_memopt_decide(tp_memopt *m, int x, int i, int j, double enough, double cutoff, tp_memopt_range *out)
{
    tp_memopt_known *known;
    *out = tp_memopt_relaxed(m, x, i, j);
    if (out->high_s <= enough || out->low_s > enough)
        return TP_OK;
    TP_TRY(known_of(m, x, i, j, out, &known));
    if (known->range.high_s > enough && known->range.low_s <= enough)
        TP_TRY(learn(m, x, i, j, enough, cutoff, 0.0, known));
    *out = known->range;
    return TP_OK;
}

/* Choose the bytes to swap that recomputation leaves over, from the first node on: the earliest tensor has the longest time to go
 * out and come back. */
static void
swap_rest(const tp_memopt *m, int i, int j, double rest, const uint8_t *recompute, double *swap_bytes)
{
    for (int k = i; k < j && rest > 0.0; k++) {
        if (recompute[k])
            continue;
        swap_bytes[k] = fmin(rest, m->nodes->activation_bytes[k]);
        rest -= swap_bytes[k];
    }
}

tp_status
tp_memopt_choose(tp_memopt *m, int x, int i, int j, double period, uint8_t *recompute, double *swap_bytes, double *time_s)
{
    double slack, width = m->options->swap_Bps, time = tp_memopt_time(m, i, j), need = tp_memopt_need(m, x, i, j, &slack);
    long double bytes = 0.0L, seconds = 0.0L;
    memset(recompute + i, 0, (size_t)(j - i));
    memset(swap_bytes + i, 0, (size_t)(j - i) * sizeof *swap_bytes);
    *time_s = isinf(need) ? INFINITY : time;
    if (isinf(need) || need <= slack)
        return TP_OK;
    if (need - width * time > slack) {
        tp_memopt_known *known;
        tp_memopt_range range = tp_memopt_relaxed(m, x, i, j);
        TP_TRY(known_of(m, x, i, j, &range, &known));
        double low = known->range.low_s, enough = low * (1.0 + 1e-12);
        if (known->chosen_s > enough && (known->chosen_s > period || known->chosen_s > low * (1.0 + TP_MEMOPT_LOOSE)))
            TP_TRY(learn(m, x, i, j, enough, INFINITY, period, known));
        for (int k = i; k < j; k++)
            if (known->chosen[k - i]) {
                recompute[k] = 1;
                bytes += (long double)m->nodes->activation_bytes[k];
                seconds += (long double)m->nodes->recompute_s[k];
            }
    }
    double rest = need - (double)bytes, hidden;
    *time_s = time + (double)seconds;
    hidden = width * *time_s;
    if (rest - hidden <= 1.5 * slack) /* as the searches have it, whose sums are rounded otherwise */
        rest = fmin(rest, hidden);
    else if (width > 0.0)
        *time_s = fmax(*time_s, rest / width);
    if (width > 0.0 && rest > 0.0)
        swap_rest(m, i, j, rest, recompute, swap_bytes);
    return TP_OK;
}
