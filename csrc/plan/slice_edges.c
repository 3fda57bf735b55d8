/* The reduced graph: near the optimum only 10^2 .. 10^4 of the O(n^2) slices can be part of a better plan. */
#include "csrc/plan/slice_dp.h"

#include <math.h>

tp_status
tp_slice_edges_open(tp_slice_arena *arena, int n, int64_t room, tp_slice_edges *edges)
{
    void *memory;
    edges->room = room;
    edges->count = 0;
    TP_TRY(tp_slice_arena_take(arena, (size_t)room, sizeof(int), &memory));
    edges->from = memory;
    TP_TRY(tp_slice_arena_take(arena, (size_t)room, sizeof(int), &memory));
    edges->to = memory;
    double **columns[] = {&edges->sum, &edges->limit[0], &edges->limit[1]};
    for (int c = 0; c < 3; c++) {
        TP_TRY(tp_slice_arena_take(arena, (size_t)room, sizeof(double), &memory));
        *columns[c] = memory;
    }
    TP_TRY(tp_slice_arena_take(arena, (size_t)n + 1, sizeof(double), &memory));
    edges->dist = memory;
    TP_TRY(tp_slice_arena_take(arena, (size_t)n + 1, sizeof(int64_t), &memory));
    edges->parent = memory;
    TP_TRY(tp_slice_arena_take(arena, (size_t)n + 1, sizeof(int), &memory));
    edges->pick = memory;
    return TP_OK;
}

static int
keep_of_start(const tp_slice_dp *dp, int j, const double floor[2], double goal, tp_slice_edges *edges)
{
    double reached = dp->u[j] + (j > 0 ? dp->sum.a2 * j : 0.0);
    double least = dp->limits > 1 ? floor[0] + floor[1] : floor[0], rest = goal - reached, first = rest - dp->weight * least;
    const double *h = dp->sum.smooth ? (j == 0 ? dp->sum.h0 : dp->sum.h) : dp->sum.rows + tp_slice_row(dp->n, j) - 1;
    const double *w = dp->w + j;
    int picked = 0;
    for (int i = 1; i <= dp->last[j]; i++) { /* without a branch: about one cycle a slice */
        edges->pick[picked] = i;
        picked += h[i] + w[i] < first;
    }
    for (int k = 0; k < picked; k++) {
        int i = edges->pick[k], within = 1;
        double cost[2] = {0.0, 0.0}, most = 0.0;
        for (int l = 0; l < dp->limits; l++) {
            cost[l] = tp_slice_at(&dp->limit[l], j, i);
            within &= cost[l] <= dp->threshold[l];
            most += cost[l] > floor[l] ? cost[l] : floor[l];
        }
        if (!within || h[i] + w[i] + dp->weight * most >= rest)
            continue;
        if (edges->count == edges->room)
            return 0;
        int64_t at = edges->count++;
        edges->from[at] = j;
        edges->to[at] = j + i;
        edges->sum[at] = dp->limits == 1 ? cost[0] : tp_slice_at(&dp->sum, j, i);
        edges->limit[0][at] = cost[0];
        edges->limit[1][at] = cost[1];
    }
    return 1;
}

int
tp_slice_edges_keep(const tp_slice_dp *dp, const double floor[2], double goal, tp_slice_edges *edges)
{
    double least = dp->limits > 1 ? floor[0] + floor[1] : floor[0];
    edges->count = 0;
    for (int j = 0; j < dp->n; j++)
        if (dp->u[j] + dp->w[j] + dp->weight * least < goal && !keep_of_start(dp, j, floor, goal, edges))
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
