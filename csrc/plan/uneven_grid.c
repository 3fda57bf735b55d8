/* Slices for uneven stages: the grid of cuts, first plans on it, and moves of cuts. */
#include "csrc/plan/uneven_core.h"

#include <math.h>
#include <string.h>

enum { THRESHOLDS = 60 };

/* From the end: a machine's shortest way, which ends with the last slice on the machines behind it. */
static void
fill_rest(tp_uneven *u, int a)
{
    int K = u->stages, V = u->width;
    double *rest = u->rest + (size_t)a * (size_t)V, *least = u->least + (size_t)a * (size_t)V;
    double *both = u->both + (size_t)a * (size_t)K;
    for (int k = 0; k < V; k++)
        rest[k] = least[k] = INFINITY;
    for (int k = 0; k < K; k++)
        both[k] = INFINITY;
    for (int b = a + 1; b <= u->cuts && u->at[b] - u->at[a] <= u->cap; b++) {
        const double *slice = tp_uneven_edge(u, a, b), *after = u->rest + (size_t)b * (size_t)V;
        double behind[2] = {0.0, 0.0};
        for (int k = K - 1; k >= 0; k--) {
            double pair = u->both[(size_t)b * (size_t)K + (size_t)k];
            for (int v = k, shop = 0; v < V; v += K, shop++) {
                double s = slice[v] + (b == u->cuts ? behind[shop] : after[v]);
                rest[v] = s < rest[v] ? s : rest[v];
                least[v] = slice[v] < least[v] ? slice[v] : least[v];
                pair += slice[v] + (b == u->cuts ? behind[shop] : 0.0);
                behind[shop] += slice[v];
            }
            both[k] = pair < both[k] ? pair : both[k];
        }
    }
}

tp_status
tp_uneven_open(tp_uneven *u, int factor)
{
    int n = u->request->units;
    u->cuts = (n - 1) / factor + 1;
    size_t m = (size_t)u->cuts, V = (size_t)u->width;
    void *memory;
    TP_TRY(tp_slice_arena_take(u->arena, m + 1, sizeof(int), &memory));
    u->at = memory;
    for (int a = 0; a <= u->cuts; a++)
        u->at[a] = a < u->cuts ? a * factor : n;
    TP_TRY(tp_slice_arena_take(u->arena, m * (m + 1) / 2 * V, sizeof(double), &memory));
    u->edge = memory;
    for (int a = 0; a < u->cuts; a++)
        for (int b = a + 1; b <= u->cuts; b++) {
            double *slice = tp_uneven_edge(u, a, b);
            for (int v = 0; v < u->width; v++)
                slice[v] = tp_uneven_at(u->request, v, u->at[a], u->at[b] - u->at[a]);
        }
    TP_TRY(tp_slice_arena_take(u->arena, (m + 1) * (2 * V + (size_t)u->stages), sizeof(double), &memory));
    u->rest = memory;
    u->least = u->rest + (m + 1) * V;
    u->both = u->least + (m + 1) * V;
    for (int a = u->cuts - 1; a >= 0; a--)
        fill_rest(u, a);
    return TP_OK;
}

/* ---- first plans -------------------------------------------------------------------------------------------------------- */

typedef struct {
    double *largest, *mean; /* [a < b]: as if all stages took so long */
    double *sum;            /* [cuts + 1] */
    int *from, *length;     /* [cuts + 1] */
} surrogate;

static size_t
pair_of(const tp_uneven *u, int a, int b)
{
    return (size_t)(tp_uneven_edge(u, a, b) - u->edge) / (size_t)u->width;
}

static void
fill_surrogate(const tp_uneven *u, surrogate *s)
{
    for (int a = 0; a < u->cuts; a++)
        for (int b = a + 1; b <= u->cuts; b++) {
            const double *slice = tp_uneven_edge(u, a, b);
            double largest = 0.0, mean = 0.0;
            for (int first = 0; first < u->width; first += u->stages) {
                double most = 0.0;
                for (int k = first; k < first + u->stages; k++) {
                    most = slice[k] > most ? slice[k] : most;
                    mean += slice[k];
                }
                largest += most;
            }
            s->largest[pair_of(u, a, b)] = largest;
            s->mean[pair_of(u, a, b)] = mean;
        }
}

/* The least `cost` with no slice above the threshold; offered if there is one. */
static tp_status
offer_within(tp_uneven *u, surrogate *s, const double *cost, double threshold)
{
    int slices = 0;
    s->sum[0] = 0.0;
    for (int b = 1; b <= u->cuts; b++) {
        s->sum[b] = INFINITY;
        for (int a = b - 1; a >= 0 && u->at[b] - u->at[a] <= u->cap; a--) {
            size_t pair = pair_of(u, a, b);
            if (s->largest[pair] <= threshold && s->sum[a] + cost[pair] < s->sum[b]) {
                s->sum[b] = s->sum[a] + cost[pair];
                s->from[b] = a;
            }
        }
    }
    if (!(s->sum[u->cuts] < INFINITY))
        return TP_OK;
    for (int b = u->cuts; b > 0; b = s->from[b])
        slices++;
    for (int b = u->cuts, i = slices - 1; b > 0; b = s->from[b], i--)
        s->length[i] = u->at[b] - u->at[s->from[b]];
    return tp_uneven_offer(u, s->length, slices);
}

/* The least threshold that admits a plan. */
static double
bottleneck(const tp_uneven *u, surrogate *s)
{
    s->sum[0] = 0.0;
    for (int b = 1; b <= u->cuts; b++) {
        s->sum[b] = INFINITY;
        for (int a = b - 1; a >= 0 && u->at[b] - u->at[a] <= u->cap; a--) {
            double most = s->largest[pair_of(u, a, b)];
            most = most > s->sum[a] ? most : s->sum[a];
            s->sum[b] = most < s->sum[b] ? most : s->sum[b];
        }
    }
    return s->sum[u->cuts];
}

tp_status
tp_uneven_surrogate(tp_uneven *u)
{
    size_t m = (size_t)u->cuts, pairs = m * (m + 1) / 2;
    void *numbers, *whole;
    TP_TRY(tp_slice_arena_take(u->arena, 2 * pairs + m + 1, sizeof(double), &numbers));
    TP_TRY(tp_slice_arena_take(u->arena, 2 * (m + 1), sizeof(int), &whole));
    surrogate s = {.largest = numbers, .from = whole};
    s.mean = s.largest + pairs;
    s.sum = s.mean + pairs;
    s.length = s.from + m + 1;
    fill_surrogate(u, &s);
    double low = bottleneck(u, &s), high = low;
    for (size_t p = 0; p < pairs; p++)
        high = s.largest[p] > high ? s.largest[p] : high;
    for (int i = 0; i < THRESHOLDS; i++) {
        double x = (double)i / (THRESHOLDS - 1), threshold = low + (high - low) * x * x;
        TP_TRY(offer_within(u, &s, s.largest, threshold));
        TP_TRY(offer_within(u, &s, s.mean, threshold));
    }
    return TP_OK;
}

/* ---- moves -------------------------------------------------------------------------------------------------------------- */

/* Offer the plan's slicing with `by` units moved from slice j to slice i. */
static tp_status
try_shift(tp_uneven *u, int *length, int i, int j, int by)
{
    tp_uneven_plan *plan = u->plan;
    if (plan->length[i] + by < 1 || plan->length[i] + by > u->cap || plan->length[j] - by < 1 || plan->length[j] - by > u->cap)
        return TP_OK;
    memcpy(length, plan->length, (size_t)plan->slices * sizeof *length);
    length[i] += by;
    length[j] -= by;
    return tp_uneven_offer(u, length, plan->slices);
}

/* Slice i halved, or joined with the next. */
static tp_status
try_recount(tp_uneven *u, int *length, int i)
{
    const tp_uneven_plan *plan = u->plan;
    int slices = plan->slices, half = plan->length[i] / 2;
    size_t behind = (size_t)(slices - i - 1) * sizeof *length;
    memcpy(length, plan->length, (size_t)slices * sizeof *length);
    if (half > 0) {
        length[i] -= half;
        length[i + 1] = half;
        memcpy(length + i + 2, plan->length + i + 1, behind);
        TP_TRY(tp_uneven_offer(u, length, slices + 1));
    }
    if (plan->slices != slices || i + 1 >= slices || plan->length[i] + plan->length[i + 1] > u->cap)
        return TP_OK;
    memcpy(length, plan->length, (size_t)slices * sizeof *length);
    length[i] += length[i + 1];
    memcpy(length + i + 1, plan->length + i + 2, behind - sizeof *length);
    return tp_uneven_offer(u, length, slices - 1);
}

tp_status
tp_uneven_improve(tp_uneven *u, int step)
{
    tp_uneven_plan *plan = u->plan;
    void *memory;
    TP_TRY(tp_slice_arena_take(u->arena, (size_t)u->request->units + 1, sizeof(int), &memory));
    int64_t end = plan->work + u->limit / 20;
    double before = INFINITY;
    while (plan->latency_s < before && plan->work < end) {
        before = plan->latency_s;
        for (int by = step; by >= 1; by = by > 1 ? (by + 1) / 2 : 0)
            for (int i = 0; i < plan->slices && plan->work < end; i++)
                for (int far = 1; far <= 4 && i + far < plan->slices; far *= 2) {
                    TP_TRY(try_shift(u, memory, i, i + far, by));
                    TP_TRY(try_shift(u, memory, i, i + far, -by));
                }
        for (int i = 0; i < plan->slices && plan->work < end; i++)
            TP_TRY(try_recount(u, memory, i));
    }
    return TP_OK;
}
