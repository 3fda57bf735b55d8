#include "csrc/plan/slice_dp.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "csrc/base/deadline.h"

#define QUEUE_UNITS 16384 /* below, kernels are as fast as the queue of Monge costs */
#define LEAD 7 /* index 1 of u, w, h, q lies on a cache line */

static_assert(TP_SLICE_PAD * sizeof(double) <= TP_ARENA_PAD, "kernels round up beyond the arena's arrays");

/* [n + 1] doubles with index 1 aligned and padding behind. */
static tp_status
take_vector(tp_arena *arena, int n, double **out)
{
    void *memory;
    TP_TRY(tp_arena_take(arena, (size_t)n + 1 + LEAD + TP_SLICE_PAD, sizeof(double), &memory));
    *out = (double *)memory + LEAD;
    return TP_OK;
}

static tp_status
take_ints(tp_arena *arena, int n, int **out)
{
    void *memory;
    TP_TRY(tp_arena_take(arena, (size_t)n + 1, sizeof(int), &memory));
    *out = memory;
    return TP_OK;
}

static tp_status
open_smooth(tp_arena *arena, const tp_slice_cost *a, const tp_slice_cost *b, int cap, tp_slice_table *t)
{
    int n = t->n;
    double *g0, *g1, top = 0.0;
    TP_TRY(take_vector(arena, n, &g0));
    TP_TRY(take_vector(arena, n, &g1));
    TP_TRY(take_vector(arena, n, &t->top));
    TP_TRY(take_vector(arena, n, &t->h0));
    TP_TRY(take_vector(arena, n, &t->h));
    TP_TRY(take_vector(arena, n, &t->q));
    t->a2 = a->a2 + (b != NULL ? b->a2 : 0.0);
    t->a3 = a->a3 + (b != NULL ? b->a3 : 0.0);
    t->rising = t->monotone = t->a2 >= 0.0 && t->a3 >= 0.0;
    t->shortest = INFINITY;
    for (int i = 0; i < n + 1 + TP_SLICE_PAD; i++) {
        double q = 0.5 * t->a3 * ((double)i * i);
        int known = i >= 1 && i <= n;
        g0[i] = known ? a->g0[i] + (b != NULL ? b->g0[i] : 0.0) : 0.0;
        g1[i] = known ? a->g1[i] + (b != NULL ? b->g1[i] : 0.0) : 0.0;
        t->monotone &= !known || g1[i] >= top;
        top = g1[i] > top ? g1[i] : top;
        t->top[i] = t->rising ? top : INFINITY;
        t->q[i] = q;
        t->h0[i] = known && i <= cap ? g0[i] - q : INFINITY;
        t->h[i] = known && i <= cap ? g1[i] - q : INFINITY;
        if (i < TP_SLICE_BLOCK && t->h[i] < t->shortest)
            t->shortest = t->h[i];
    }
    t->g0 = g0;
    t->g1 = g1;
    return TP_OK;
}

/* reach[start]: the longest slice from there that costs at most `most`. */
static void
reach_of(const tp_slice_cost *a, const tp_slice_cost *b, int cap, double most, int *reach)
{
    int n = a->units;
    size_t width = (size_t)n + 1;
    memset(reach, 0, (size_t)n * sizeof *reach);
    int64_t steps = 0;
    for (int i = 1; i <= cap && !tp_deadline_told_after(&steps, n); i++) { /* along the rows of the caller's tables */
        if (a->least != NULL && (b == NULL || b->least != NULL) && a->least[i] + (b != NULL ? b->least[i] : 0.0) > most)
            continue;
        const double *x = a->table + (size_t)i * width, *y = b != NULL ? b->table + (size_t)i * width : NULL;
        for (int j = 0; j <= n - i; j++)
            reach[j] = x[j] + (y != NULL ? y[j] : 0.0) <= most ? i : reach[j];
    }
}

/* Lay out the rows of the dense tables: where each begins. */
static tp_status
open_rows(tp_arena *arena, const tp_slice_cost *a, const tp_slice_cost *b, int cap, double most, const size_t **out)
{
    void *memory;
    int n = a->units, *reach;
    TP_TRY(tp_arena_take(arena, (size_t)n + 1, sizeof **out, &memory));
    size_t *row = memory;
    TP_TRY(take_ints(arena, n, &reach));
    for (int j = 0; j < n; j++)
        reach[j] = cap < n - j ? cap : n - j;
    if (most < INFINITY && a->table != NULL && (b == NULL || b->table != NULL))
        reach_of(a, b, cap, most, reach);
    row[0] = 0;
    for (int j = 0; j < n; j++) /* at least one entry more than the row's length: kernels round up */
        row[j + 1] = row[j] + ((size_t)reach[j] / TP_SLICE_BLOCK + 1) * TP_SLICE_BLOCK;
    *out = row;
    return TP_OK;
}

/* Fill the rows, one for each start. A caller's table is by length, the rows are by start: a transpose by tiles that stay in
 * cache. */
static void
fill_rows(const tp_slice_cost *cost, tp_slice_table *t)
{
    enum { TILE = 32 };
    int n = t->n, width = n + 1;
    int64_t steps = 0;
    for (int j0 = 0, more; j0 < n && !tp_deadline_told_after(&steps, TILE * (int64_t)n); j0 += TILE)
        for (int i0 = 1; i0 == 1 || more; i0 += TILE) {
            more = 0;
            for (int j = j0; j < j0 + TILE && j < n; j++) {
                double *row = t->rows + t->row[j] - 1;
                int end = (int)(t->row[j + 1] - t->row[j]), most = end < n - j ? end : n - j;
                int last = most < i0 + TILE - 1 ? most : i0 + TILE - 1;
                if (cost->table != NULL)
                    for (int i = i0; i <= last; i++)
                        row[i] = cost->table[(size_t)i * (size_t)width + (size_t)j];
                else
                    for (int i = i0; i <= last; i++)
                        row[i] = tp_slice_cost_at(cost, j, i);
                more |= end >= i0 + TILE;
            }
        }
}

/* Set costs beyond the cap, the end of the sequence, and the memory to +inf. */
static void
close_rows(const tp_slice_memory *memory, int cap, tp_slice_table *t)
{
    int64_t steps = 0;
    for (int j = 0; j < t->n && !tp_deadline_told_after(&steps, t->n - j); j++) {
        double *row = t->rows + t->row[j] - 1;
        int end = (int)(t->row[j + 1] - t->row[j]), last = cap < t->n - j ? cap : t->n - j;
        for (int i = 1; memory->limit_bytes > 0.0 && i <= last && i <= end; i++)
            row[i] = tp_slice_held(memory, j, i) ? row[i] : INFINITY;
        for (int i = last + 1; i <= end; i++)
            row[i] = INFINITY;
    }
}

/* The largest cost up to the end of each block of lengths. */
static void
fill_peaks(tp_slice_table *t)
{
    int64_t steps = 0;
    for (int j = 0; j < t->n && !tp_deadline_told_after(&steps, t->n - j); j++) {
        double most = 0.0;
        for (size_t at = t->row[j]; at < t->row[j + 1]; at++) {
            most = t->rows[at] > most ? t->rows[at] : most;
            if (at % TP_SLICE_BLOCK == TP_SLICE_BLOCK - 1)
                t->peaks[at / TP_SLICE_BLOCK] = most;
        }
    }
}

static tp_status
take_rows(tp_arena *arena, tp_slice_table *t)
{
    size_t count = t->row[t->n];
    void *memory;
    TP_TRY(take_vector(arena, t->n, &t->q));
    TP_TRY(tp_arena_take(arena, count + TP_SLICE_PAD, sizeof(double), &memory));
    t->rows = memory;
    TP_TRY(tp_arena_take(arena, count / TP_SLICE_BLOCK, sizeof(double), &memory));
    t->peaks = memory;
    return TP_OK;
}

static tp_status
open_dense(tp_arena *arena, const tp_slice_cost *a, const tp_slice_cost *b, int cap, const tp_slice_memory *memory,
           tp_slice_table *t)
{
    size_t count = t->row[t->n];
    TP_TRY(take_rows(arena, t));
    fill_rows(a, t);
    if (b != NULL) {
        tp_slice_table other = *t;
        void *rows;
        TP_TRY(tp_arena_take(arena, count, sizeof(double), &rows));
        other.rows = rows;
        fill_rows(b, &other);
        for (size_t at = 0; at < count; at++)
            t->rows[at] += other.rows[at];
    }
    close_rows(memory, cap, t);
    fill_peaks(t);
    return tp_deadline_check_told();
}

static tp_status
open_table(tp_arena *arena, const tp_slice_dp *dp, const tp_slice_cost *a, const tp_slice_cost *b,
           const tp_slice_memory *memory, tp_slice_table *t)
{
    t->n = a->units;
    t->smooth = dp->sum.smooth;
    t->row = dp->sum.row;
    return t->smooth ? open_smooth(arena, a, b, dp->cap, t) : open_dense(arena, a, b, dp->cap, memory, t);
}

/* Open the sum of two dense tables that are open already, so that the caller's costs are not read again. */
static tp_status
open_dense_sum(tp_arena *arena, tp_slice_dp *dp)
{
    tp_slice_table *t = &dp->sum;
    t->n = dp->n;
    TP_TRY(take_rows(arena, t));
    for (size_t at = 0; at < t->row[t->n]; at++)
        t->rows[at] = dp->limit[0].rows[at] + dp->limit[1].rows[at];
    fill_peaks(t);
    return TP_OK;
}

/* Bytes have the form of a cost: (row + context) i + pair i^2 + context j + pair i j. */
static tp_status
open_memory(tp_arena *arena, const tp_slice_memory *memory, tp_slice_dp *dp)
{
    double *g;
    TP_TRY(take_vector(arena, dp->n, &g));
    for (int i = 1; i <= dp->n; i++)
        g[i] = (memory->row_bytes + memory->context_bytes) * i + memory->pair_bytes * ((double)i * i);
    const tp_slice_cost bytes = {
        .units = dp->n, .g0 = g, .g1 = g, .a2 = memory->context_bytes, .a3 = memory->pair_bytes};
    tp_slice_table *limit = &dp->limit[dp->limits++];
    TP_TRY(open_table(arena, dp, &bytes, NULL, memory, limit));
    dp->most_bytes = memory->limit_bytes * (1.0 + 1e-12) + 1e-15 * limit->q[dp->n];
    return TP_OK;
}

tp_status
tp_slice_dp_open(tp_arena *arena, const tp_slice_cost *cost, const tp_slice_cost *backward,
                 const tp_slice_options *options, double most, tp_slice_dp *dp)
{
    memset(dp, 0, sizeof *dp);
    const tp_slice_cost *message = options->message;
    int n = cost->units, cap = options->longest > 0 && options->longest < n ? options->longest : n;
    int smooth = cost->table == NULL && (message == NULL || message->table == NULL) &&
                 (backward == NULL || backward->table == NULL);
    tp_slice_memory memory = options->memory;
    if (tp_slice_held(&memory, n - cap, cap)) /* the slice that needs most fits: the limit never binds */
        memory.limit_bytes = 0.0;
    dp->n = n;
    dp->sum.smooth = smooth;
    dp->most_bytes = INFINITY;
    dp->cap = cap;
    dp->weight = (double)options->stages - 1.0;
    dp->weighted = backward == NULL ? 1 : 2;
    dp->limits = backward == NULL ? 1 : 3;
    dp->kernels = tp_slice_kernels_for(options->isa);
    if (dp->kernels == NULL)
        return tp_fail(TP_EVALUE, "instruction set %d is not on this machine: 0 chooses one", (int)options->isa);
    if (!smooth)
        TP_TRY(open_rows(arena, cost, backward, dp->cap, most, &dp->sum.row));
    int later = !smooth && backward != NULL && message == NULL;
    if (!later)
        TP_TRY(open_table(arena, dp, cost, backward, &memory, &dp->sum));
    if (backward == NULL && message == NULL)
        dp->limit[0] = dp->sum;
    else
        TP_TRY(open_table(arena, dp, cost, message, &memory, &dp->limit[0]));
    if (backward != NULL) {
        TP_TRY(open_table(arena, dp, backward, message, &memory, &dp->limit[1]));
        if (later)
            TP_TRY(open_dense_sum(arena, dp));
        dp->limit[2] = dp->sum; /* f + b of a plan's slice is at most its max f + max b */
    }
    if (smooth && memory.limit_bytes > 0.0)
        TP_TRY(open_memory(arena, &memory, dp));
    if (smooth && options->queue >= 0 && (options->queue > 0 || n >= QUEUE_UNITS))
        dp->convex = tp_slice_convex(&dp->sum, n);
    if (dp->convex > 0) {
        TP_TRY(take_ints(arena, 2 * n + 1, &dp->queue));
        TP_TRY(take_vector(arena, n, &dp->source));
    }
    TP_TRY(take_vector(arena, n, &dp->u));
    TP_TRY(take_vector(arena, n, &dp->w));
    TP_TRY(take_ints(arena, n, &dp->last));
    TP_TRY(take_ints(arena, n, &dp->far));
    if (!smooth) {
        void *levels;
        TP_TRY(tp_arena_take(arena, TP_SLICE_LEVELS * (size_t)n, sizeof(tp_slice_window), &levels));
        dp->level = levels;
    }
    return take_ints(arena, n, &dp->safe);
}

/* ---- searches ---------------------------------------------------------------------------------------------------- */

/* The mask of lengths from..: ends are start + from... */
static void
mask_at(const tp_slice_dp *dp, int start, int from, tp_slice_mask *mask)
{
    for (int l = 0; l < dp->limits; l++) {
        const tp_slice_table *t = &dp->limit[l];
        mask->h[l] = tp_slice_row(t, start) + from;
        mask->q[l] = t->q + start + from;
        mask->theta[l][0] = start == 0 ? dp->threshold[l] : dp->threshold[l] - t->a2 * start + t->q[start];
    }
    mask->limits = dp->limits;
}

static void
relax_one(tp_slice_dp *dp, int start)
{
    tp_slice_mask mask = {0};
    double reached = dp->u[start] + (start > 0 ? dp->sum.a2 * start : 0.0);
    if (dp->last[start] < 1 || reached == INFINITY)
        return;
    int whole = dp->sum.smooth ? 0 : dp->safe[start];
    double *u = dp->u + start + 1;
    const double *h = tp_slice_row(&dp->sum, start) + 1;
    if (whole > 0)
        dp->kernels->relax(u, h, reached, &mask, whole);
    if (whole == dp->last[start])
        return;
    mask_at(dp, start, 1 + whole, &mask);
    dp->kernels->relax(u + whole, h + whole, reached, &mask, dp->last[start] - whole);
}

/* Edges between the sources of one block, in order: after it, source[] holds their final values. 0: none reached. */
static int
relax_inside(tp_slice_dp *dp, int start, double source[TP_SLICE_BLOCK])
{
    double *u = dp->u + start, least = INFINITY, most = 0.0;
    const double *h = dp->sum.h;
    for (int a = 0; a < TP_SLICE_BLOCK; a++) {
        source[a] = u[a] + dp->sum.a2 * (start + a);
        least = source[a] < least ? source[a] : least;
        most = a == 0 || u[a] > most ? u[a] : most;
    }
    if (least == INFINITY || least + dp->sum.shortest >= most)
        return least < INFINITY; /* almost always: no slice shorter than a block is worth its overhead */
    for (int a = 0; a < TP_SLICE_BLOCK; a++) {
        int j = start + a;
        source[a] = u[a] + dp->sum.a2 * j;
        for (int i = 1; a + i < TP_SLICE_BLOCK && i <= dp->last[j]; i++) {
            int allowed = source[a] + h[i] < u[a + i];
            for (int l = 0; allowed && i > dp->safe[j] && l < dp->limits; l++)
                allowed = tp_slice_at(&dp->limit[l], j, i) <= dp->threshold[l];
            if (allowed)
                u[a + i] = source[a] + h[i];
        }
    }
    return 1;
}

static void
relax_block(tp_slice_dp *dp, int start)
{
    double source[TP_SLICE_BLOCK];
    tp_slice_mask none = {0}, mask = {0};
    if (!relax_inside(dp, start, source))
        return;
    int safe_end = dp->n, last_end = 0, first = start + TP_SLICE_BLOCK;
    for (int a = 0; a < TP_SLICE_BLOCK; a++) {
        int j = start + a;
        safe_end = j + dp->safe[j] < safe_end ? j + dp->safe[j] : safe_end;
        last_end = j + dp->last[j] > last_end ? j + dp->last[j] : last_end;
        for (int l = 0; l < dp->limits; l++)
            mask.theta[l][a] = dp->threshold[l] - dp->limit[l].a2 * j + dp->limit[l].q[j];
    }
    int64_t whole = safe_end >= first ? (safe_end - first + 1) / dp->kernels->lanes * dp->kernels->lanes : 0;
    if (whole > 0)
        dp->kernels->relax_block(dp->u + first, dp->sum.h + TP_SLICE_BLOCK, source, &none, whole);
    if (last_end >= first + whole) {
        mask.limits = dp->limits;
        for (int l = 0; l < dp->limits; l++) {
            mask.h[l] = dp->limit[l].h + TP_SLICE_BLOCK + whole;
            mask.q[l] = dp->limit[l].q + first + whole;
        }
        dp->kernels->relax_block(dp->u + first + whole, dp->sum.h + TP_SLICE_BLOCK + whole, source, &mask,
                                 last_end - first - whole + 1);
    }
}

double
tp_slice_dp_forward(tp_slice_dp *dp, const double *threshold)
{
    int n = dp->n, j = 1;
    if (tp_deadline_was_told())
        return INFINITY;
    tp_slice_windows(dp, threshold);
    dp->u[0] = 0.0;
    for (int e = 1; e < n + 1 + TP_SLICE_PAD; e++)
        dp->u[e] = INFINITY;
    relax_one(dp, 0);
    if (tp_slice_monge_fits(dp)) {
        tp_slice_monge_forward(dp);
        return tp_deadline_was_told() ? INFINITY : dp->u[n] + dp->sum.q[n];
    }
    if (dp->sum.smooth)
        for (; j + TP_SLICE_BLOCK <= n; j += TP_SLICE_BLOCK) {
            relax_block(dp, j);
            if (tp_deadline_told_after(&dp->asked, dp->last[j]))
                return INFINITY;
        }
    for (; j < n; j++) {
        relax_one(dp, j);
        if (tp_deadline_told_after(&dp->asked, dp->last[j]))
            return INFINITY;
    }
    return dp->u[n] + dp->sum.q[n];
}

void
tp_slice_dp_backward(tp_slice_dp *dp)
{
    int n = dp->n;
    dp->w[n] = dp->sum.q[n];
    for (int e = n + 1; e < n + 1 + TP_SLICE_PAD; e++)
        dp->w[e] = INFINITY;
    for (int j = n - 1; j >= 0 && !tp_deadline_told_after(&dp->asked, dp->last[j]); j--) {
        tp_slice_mask none = {0}, mask = {0};
        const double *h = tp_slice_row(&dp->sum, j);
        int whole = dp->safe[j] / dp->kernels->lanes * dp->kernels->lanes;
        double best = whole > 0 ? dp->kernels->least(h + 1, dp->w + j + 1, &none, whole) : INFINITY;
        if (dp->last[j] > whole) {
            mask_at(dp, j, 1 + whole, &mask);
            best = fmin(best, dp->kernels->least(h + 1 + whole, dp->w + j + 1 + whole, &mask, dp->last[j] - whole));
        }
        dp->w[j] = best + (j > 0 ? dp->sum.a2 * j : 0.0);
    }
}

/* A summand of tp_slice_row, for any length. */
static double
summand_at(const tp_slice_table *t, int start, int length)
{
    return t->smooth ? tp_slice_row(t, start)[length] : tp_slice_at(t, start, length);
}

/* Is the slice within the thresholds of the last search, up to the rounding of the sums that a kernel compares? */
static int
is_within(const tp_slice_dp *dp, int start, int length)
{
    int within = 1;
    for (int l = 0; l < dp->limits; l++) {
        double room = 1e-12 * fabs(dp->threshold[l]) + 1e-15 * dp->limit[l].q[dp->n];
        within &= tp_slice_at(&dp->limit[l], start, length) <= dp->threshold[l] + room;
    }
    return within;
}

/* The next start from j >= 1 on whose slice to e gives a sum of at most `most`; e: there is none. */
static int
next_start(const tp_slice_dp *dp, int j, int e, double most)
{
    const double *u = dp->u, *h = dp->sum.smooth ? dp->sum.h + e : NULL, a2 = dp->sum.a2;
    if (h != NULL)
        while (j < e && u[j] + a2 * j + h[-j] > most)
            j++;
    else
        while (j < e && u[j] + tp_slice_at(&dp->sum, j, e - j) > most)
            j++;
    return j;
}

int
tp_slice_dp_path(const tp_slice_dp *dp, int *length)
{
    int count = 0, first = dp->n;
    const double a2 = dp->sum.a2;
    for (int e = dp->n; e > 0;) {
        while (first > 1 && dp->far[first - 1] >= e) /* ends only fall: so do the starts from which they are reached */
            first--;
        double slack = 1e-15 * (fabs(dp->u[e]) + dp->sum.q[e]), cheapest = INFINITY;
        int best = 0, beyond = 1;
        for (int j = e <= dp->cap ? 0 : first; j < e;
             j = next_start(dp, j == 0 ? first : j + 1, e, dp->u[e] + slack)) {
            /* The search came from j only if this is zero, to the bit; `slack` is for compilers that fuse. */
            double apart = dp->u[j] + (j > 0 ? a2 * j : 0.0) + summand_at(&dp->sum, j, e - j) - dp->u[e];
            if (apart > slack || apart < -slack)
                continue;
            double c = tp_slice_at(&dp->sum, j, e - j);
            int out = !is_within(dp, j, e - j); /* has the same sum, but is not allowed */
            if (out < beyond || (out == beyond && (c < cheapest || (c == cheapest && best < e))))
                cheapest = c, best = e - j, beyond = out;
        }
        if (best == 0) /* NaN, of a table that another thread wrote to since it was checked: end all the same */
            best = 1;
        length[count++] = best;
        e -= best;
    }
    return count;
}

double
tp_slice_dp_last_slice(const tp_slice_dp *dp, int l)
{
    double least = INFINITY;
    for (int i = 1; i <= dp->cap; i++)
        least = fmin(least, tp_slice_at(&dp->limit[l], dp->n - i, i));
    return least;
}
