/* Shortest paths over cuts. */
#include "csrc/plan/slicing_bound.h"

#include <math.h>
#include <stdlib.h>

#include "csrc/plan/slice_dp.h"

static double
cost_of(const tp_slice_path *path, int start, int length)
{
    double sum = 0.0;
    for (int t = 0; t < path->terms; t++)
        sum += path->weight[t] * tp_slice_cost_at(&path->cost[t], start, length);
    return sum;
}

tp_status
tp_slice_path_least(const tp_slice_path *path, double *least_s)
{
    int n = path->cost[0].units, cap = path->longest > 0 && path->longest < n ? path->longest : n;
    double *rest = malloc(((size_t)n + 1) * sizeof *rest);
    if (rest == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the cuts of %d units", n);
    rest[n] = 0.0;
    for (int start = n - 1; start >= 0; start--) {
        double best = INFINITY;
        for (int length = 1; length <= cap && length <= n - start; length++) {
            double s = cost_of(path, start, length) + rest[start + length];
            s += start == 0 && path->first != NULL ? path->first[length] : 0.0;
            s += start + length == n && path->last != NULL ? path->last[length] : 0.0;
            best = s < best ? s : best;
        }
        rest[start] = best;
    }
    *least_s = rest[0];
    free(rest);
    return TP_OK;
}
