/* The reduced graph: near the optimum only 10^2 .. 10^4 of the O(n^2) slices can be part of a better plan. */
#include "csrc/plan/slice_dp.h"

#include <math.h>

#include "csrc/base/deadline.h"

tp_status
tp_slice_edges_open(tp_arena *arena, int n, int64_t room, int64_t all, tp_slice_edges *edges)
{
    void *memory;
    edges->room = room;
    edges->count = 0;
    all = all > room ? all : room;
    TP_TRY(tp_arena_take(arena, (size_t)all, sizeof(int), &memory));
    edges->from = memory;
    TP_TRY(tp_arena_take(arena, (size_t)all, sizeof(int), &memory));
    edges->to = memory;
    double **columns[] = {&edges->sum, &edges->limit[0], &edges->limit[1], &edges->key, &edges->order};
    int own = edges->key == NULL ? 5 : 3;
    for (int c = 0; c < own; c++) {
        TP_TRY(tp_arena_take(arena, (size_t)(c < 3 ? all : room), sizeof(double), &memory));
        *columns[c] = memory;
    }
    TP_TRY(tp_arena_take(arena, (size_t)n + 1, sizeof(double), &memory));
    edges->dist = memory;
    TP_TRY(tp_arena_take(arena, (size_t)n + 1, sizeof(double), &memory));
    edges->tail = memory;
    TP_TRY(tp_arena_take(arena, (size_t)n + 1, sizeof(int64_t), &memory));
    edges->parent = memory;
    TP_TRY(tp_arena_take(arena, (size_t)n + 1, sizeof(int), &memory));
    edges->pick = memory;
    return TP_OK;
}

static inline double
most_of_both(const double cost[2], const double floor[3])
{
    double most = (cost[0] > floor[0] ? cost[0] : floor[0]) + (cost[1] > floor[1] ? cost[1] : floor[1]);
    return most > floor[2] ? most : floor[2];
}

static double
most_of(const tp_slice_dp *dp, const double cost[2], const double floor[3])
{
    if (dp->weighted == 2)
        return most_of_both(cost, floor);
    return cost[0] > floor[0] ? cost[0] : floor[0];
}

static double
rest_of(const tp_slice_dp *dp, int start, double goal)
{
    return goal - (dp->u[start] + (start > 0 ? dp->sum.a2 * start : 0.0));
}

/* The value of 0-based rank `at`; value[] is put in another order. */
static double
select_value(double *value, int64_t count, int64_t at)
{
    int64_t low = 0, high = count - 1;
    while (low < high) {
        double pivot = value[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (value[i] < pivot)
                i++;
            while (value[j] > pivot)
                j--;
            if (i <= j) {
                double swap = value[i];
                value[i++] = value[j];
                value[j--] = swap;
            }
        }
        if (at > j && at < i)
            break;
        low = at >= i ? i : low;
        high = at <= j ? j : high;
    }
    return value[at];
}

/* No room left: raise the floor to where half of the edges are no longer needed and drop those. The edges of starts passed with
 * the lower floor are more than the higher one needs. */
static int
raise_floor(const tp_slice_dp *dp, double floor[3], double ceiling, tp_slice_edges *edges)
{
    int64_t kept = 0, count = edges->count;
    for (int64_t k = 0; k < count; k++)
        edges->order[k] = edges->key[k];
    double raised = select_value(edges->order, count, count / 2);
    if (ceiling - raised < 1e-6 * ceiling)
        return 0;
    floor[dp->weighted == 1 ? 0 : 2] = raised;
    for (int64_t k = 0; k < count; k++) {
        edges->from[kept] = edges->from[k];
        edges->to[kept] = edges->to[k];
        edges->sum[kept] = edges->sum[k];
        edges->limit[0][kept] = edges->limit[0][k];
        edges->limit[1][kept] = edges->limit[1][k];
        edges->key[kept] = edges->key[k];
        kept += edges->key[k] > raised;
    }
    edges->count = kept;
    return 1;
}

static int
keep_of_start(const tp_slice_dp *dp, int j, double floor[3], const double *ceiling, double goal, tp_slice_edges *edges)
{
    const double none[2] = {0.0, 0.0}, *h = tp_slice_row(&dp->sum, j), *w = dp->w + j;
    double rest = rest_of(dp, j, goal), first = rest - dp->weight * most_of(dp, none, floor);
    int picked = dp->kernels->pick(h + 1, w + 1, first, dp->last[j], edges->pick);
    for (int k = 0; k < picked; k++) {
        int i = edges->pick[k], within = 1;
        double cost[TP_SLICE_LIMITS] = {0.0};
        for (int l = 0; l < dp->limits; l++) {
            cost[l] = tp_slice_at(&dp->limit[l], j, i);
            within &= cost[l] <= dp->threshold[l];
        }
        if (!within || h[i] + w[i] + dp->weight * most_of(dp, cost, floor) >= rest)
            continue;
        if (edges->count == edges->room && (ceiling == NULL || !raise_floor(dp, floor, *ceiling, edges)))
            return 0;
        int64_t at = edges->count++;
        edges->from[at] = j;
        edges->to[at] = j + i;
        edges->sum[at] = tp_slice_at(&dp->sum, j, i);
        edges->limit[0][at] = cost[0];
        edges->limit[1][at] = cost[1];
        edges->key[at] = (rest - (h[i] + w[i])) / dp->weight;
    }
    return 1;
}

int
tp_slice_edges_keep(const tp_slice_dp *dp, double floor[3], const double *ceiling, double goal, tp_slice_edges *edges)
{
    const double none[2] = {0.0, 0.0};
    int64_t steps = 0;
    edges->count = 0;
    for (int j = 0; j < dp->n; j++)
        if (tp_deadline_told_after(&steps, dp->last[j]))
            return 0;
        else if (dp->u[j] + dp->w[j] + dp->weight * most_of(dp, none, floor) < goal &&
            !keep_of_start(dp, j, floor, ceiling, goal, edges))
            return 0;
    return 1;
}

double
tp_slice_edges_search(tp_slice_edges *edges, int n, int limits, const double *threshold)
{
    double *dist = edges->dist, first = threshold[0], second = limits > 1 ? threshold[1] : INFINITY;
    double both = limits > 2 ? threshold[2] : INFINITY;
    dist[0] = 0.0;
    for (int e = 1; e <= n; e++)
        dist[e] = INFINITY;
    for (int64_t k = 0; k < edges->count; k++) {
        double x = dist[edges->from[k]] + edges->sum[k];
        if (edges->limit[0][k] <= first && edges->limit[1][k] <= second && edges->sum[k] <= both && x < dist[edges->to[k]]) {
            dist[edges->to[k]] = x;
            edges->parent[edges->to[k]] = k;
        }
    }
    return dist[n];
}

int
tp_slice_edges_path(const tp_slice_edges *edges, int n, int *length)
{
    int count = 0;
    for (int e = n; e > 0; e = edges->from[edges->parent[e]])
        length[count++] = e - edges->from[edges->parent[e]];
    return count;
}

static void
fill_tail(const tp_slice_edges *edges, int n, const double threshold[3])
{
    double *tail = edges->tail;
    tail[n] = 0.0;
    for (int e = 0; e < n; e++)
        tail[e] = INFINITY;
    for (int64_t k = edges->count - 1; k >= 0; k--) {
        double x = edges->sum[k] + tail[edges->to[k]];
        if (edges->limit[0][k] <= threshold[0] && edges->limit[1][k] <= threshold[1] && edges->sum[k] <= threshold[2] &&
            x < tail[edges->from[k]])
            tail[edges->from[k]] = x;
    }
}

int
tp_slice_edges_narrow(const tp_slice_edges *edges, int n, const double threshold[3], const double floor[3], double weight,
                      double goal, tp_slice_edges *out)
{
    int64_t kept = 0, count = edges->count;
    *out = *edges;
    if (edges->room < 2 * count)
        return 0;
    fill_tail(edges, n, threshold);
    out->room -= count;
    out->from += count;
    out->to += count;
    out->sum += count;
    for (int l = 0; l < 2; l++)
        out->limit[l] += count;
    for (int64_t k = 0; k < count; k++) {
        const double cost[2] = {edges->limit[0][k], edges->limit[1][k]};
        double path = edges->dist[edges->from[k]] + edges->sum[k] + edges->tail[edges->to[k]];
        out->from[kept] = edges->from[k];
        out->to[kept] = edges->to[k];
        out->sum[kept] = edges->sum[k];
        out->limit[0][kept] = cost[0];
        out->limit[1][kept] = cost[1];
        kept += (cost[0] <= threshold[0]) & (cost[1] <= threshold[1]) & (edges->sum[k] <= threshold[2]) &
                (path + weight * most_of_both(cost, floor) < goal);
    }
    out->count = kept;
    return 1;
}
