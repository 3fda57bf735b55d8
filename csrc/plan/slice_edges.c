/* The reduced graph: near the optimum only 10^2 .. 10^4 of the O(n^2) slices can be part of a better plan. */
#include "csrc/plan/slice_dp.h"

#include <math.h>

tp_status
tp_slice_edges_open(tp_arena *arena, int n, int64_t room, tp_slice_edges *edges)
{
    void *memory;
    edges->room = room;
    edges->count = 0;
    TP_TRY(tp_arena_take(arena, (size_t)room, sizeof(int), &memory));
    edges->from = memory;
    TP_TRY(tp_arena_take(arena, (size_t)room, sizeof(int), &memory));
    edges->to = memory;
    double **columns[] = {&edges->sum, &edges->limit[0], &edges->limit[1]};
    for (int c = 0; c < 3; c++) {
        TP_TRY(tp_arena_take(arena, (size_t)room, sizeof(double), &memory));
        *columns[c] = memory;
    }
    TP_TRY(tp_arena_take(arena, (size_t)n + 1, sizeof(double), &memory));
    edges->dist = memory;
    TP_TRY(tp_arena_take(arena, (size_t)n + 1, sizeof(int64_t), &memory));
    edges->parent = memory;
    TP_TRY(tp_arena_take(arena, (size_t)n + 1, sizeof(int), &memory));
    edges->pick = memory;
    return TP_OK;
}

static double
most_of(const tp_slice_dp *dp, const double cost[2], const double floor[2])
{
    double most = cost[0] > floor[0] ? cost[0] : floor[0];
    return dp->weighted == 1 ? most : most + (cost[1] > floor[1] ? cost[1] : floor[1]);
}

static double
rest_of(const tp_slice_dp *dp, int start, double goal)
{
    return goal - (dp->u[start] + (start > 0 ? dp->sum.a2 * start : 0.0));
}

/* No room left: raise the floor half way and drop the edges that need a lower one. The edges of starts passed with the
 * lower floor are more than the higher one needs. */
static int
raise_floor(const tp_slice_dp *dp, double floor[2], double ceiling, double goal, tp_slice_edges *edges)
{
    int64_t kept = 0;
    while (kept == 0 || kept > edges->room - edges->room / 4) {
        floor[0] += 0.5 * (ceiling - floor[0]);
        if (ceiling - floor[0] < 1e-6 * ceiling)
            return 0;
        kept = 0;
        for (int64_t k = 0; k < edges->count; k++) {
            int j = edges->from[k], i = edges->to[k] - j;
            const double cost[2] = {edges->limit[0][k], edges->limit[1][k]};
            edges->from[kept] = j;
            edges->to[kept] = j + i;
            edges->sum[kept] = edges->sum[k];
            edges->limit[0][kept] = cost[0];
            edges->limit[1][kept] = cost[1];
            kept += tp_slice_row(&dp->sum, j)[i] + dp->w[j + i] + dp->weight * most_of(dp, cost, floor) < rest_of(dp, j, goal);
        }
        edges->count = kept;
    }
    return 1;
}

static int
keep_of_start(const tp_slice_dp *dp, int j, double floor[2], const double *ceiling, double goal, tp_slice_edges *edges)
{
    const double none[2] = {0.0, 0.0}, *h = tp_slice_row(&dp->sum, j), *w = dp->w + j;
    double rest = rest_of(dp, j, goal), first = rest - dp->weight * most_of(dp, none, floor);
    int picked = dp->kernels->pick(h + 1, w + 1, first, dp->last[j], edges->pick);
    for (int k = 0; k < picked; k++) {
        int i = edges->pick[k], within = 1;
        double cost[2] = {0.0, 0.0};
        for (int l = 0; l < dp->limits; l++) {
            cost[l] = tp_slice_at(&dp->limit[l], j, i);
            within &= cost[l] <= dp->threshold[l];
        }
        if (!within || h[i] + w[i] + dp->weight * most_of(dp, cost, floor) >= rest)
            continue;
        if (edges->count == edges->room && (ceiling == NULL || !raise_floor(dp, floor, *ceiling, goal, edges)))
            return 0;
        int64_t at = edges->count++;
        edges->from[at] = j;
        edges->to[at] = j + i;
        edges->sum[at] = tp_slice_at(&dp->sum, j, i);
        edges->limit[0][at] = cost[0];
        edges->limit[1][at] = cost[1];
    }
    return 1;
}

int
tp_slice_edges_keep(const tp_slice_dp *dp, double floor[2], const double *ceiling, double goal, tp_slice_edges *edges)
{
    const double none[2] = {0.0, 0.0};
    edges->count = 0;
    for (int j = 0; j < dp->n; j++)
        if (dp->u[j] + dp->w[j] + dp->weight * most_of(dp, none, floor) < goal &&
            !keep_of_start(dp, j, floor, ceiling, goal, edges))
            return 0;
    return 1;
}

double
tp_slice_edges_search(tp_slice_edges *edges, int n, int limits, const double threshold[2])
{
    double *dist = edges->dist, first = threshold[0], second = limits > 1 ? threshold[1] : INFINITY;
    dist[0] = 0.0;
    for (int e = 1; e <= n; e++)
        dist[e] = INFINITY;
    for (int64_t k = 0; k < edges->count; k++) {
        double x = dist[edges->from[k]] + edges->sum[k];
        if (edges->limit[0][k] <= first && edges->limit[1][k] <= second && x < dist[edges->to[k]]) {
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
