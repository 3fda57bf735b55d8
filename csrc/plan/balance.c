/* Contiguous min-max partition, exact: the answer is a sum of consecutive times, and only such sums are tried. */
#include "csrc/plan/plan.h"

#include <float.h>
#include <math.h>
#include <stddef.h>

/* Greedy: the longest prefix within the limit for every part. Returns the parts used and the least sum that would have
 * let some part grow: no limit below it changes anything. parts + 1 if more are needed. */
static int
fill_parts(const double *time_s, int n, int parts, double limit, int *boundary, double *largest, double *next)
{
    int used = 0, at = 0;
    *largest = 0.0;
    *next = INFINITY;
    while (at < n && used < parts) {
        double sum = 0.0;
        int first = at;
        while (at < n && (at == first || sum + time_s[at] <= limit))
            sum += time_s[at++];
        if (at < n)
            *next = fmin(*next, sum + time_s[at]);
        *largest = fmax(*largest, sum);
        boundary[++used] = at;
    }
    return at < n ? parts + 1 : used;
}

/* Parts left over: split off single items from parts of several, which makes no part larger. */
static void
use_all_parts(int parts, int used, int *boundary)
{
    for (int k = used; k < parts; k++)
        boundary[k + 1] = boundary[used];
    for (int k = parts; k > 1; k--)
        if (boundary[k - 1] >= boundary[k])
            boundary[k - 1] = boundary[k] - 1;
}

tp_status
tp_plan_balance(const double *time_s, int n, int parts, int *boundary)
{
    double total = 0.0, low = 0.0, largest, next;
    if (parts < 1)
        return tp_fail(TP_EVALUE, "stages is %d: at least 1 is needed", parts);
    if (parts > n)
        return tp_fail(TP_EVALUE, "stages is %d for %d blocks: at most one stage a block, %d, is possible", parts, n,
                       n);
    for (int i = 0; i < n; i++) {
        if (!(time_s[i] >= 0.0 && time_s[i] <= 1e300))
            return tp_fail(TP_EVALUE, "times[%d] is %g: a finite time from 0 to 1e300 is needed", i,
                           isnan(time_s[i]) ? NAN : time_s[i]);
        total += time_s[i];
        low = fmax(low, time_s[i]);
    }
    /* Invariant: no limit below `low` is enough; `high` is attained by a partition. */
    low = fmax(low, total / parts * (1.0 - 1e-15 * n));
    double high = INFINITY;
    int used = fill_parts(time_s, n, parts, total, boundary, &high, &next);
    while (low < high) {
        double middle = low + 0.5 * (high - low);
        if (fill_parts(time_s, n, parts, middle < high ? middle : low, boundary, &largest, &next) <= parts)
            high = largest;
        else
            low = next; /* the greedy fill is the same for every limit in between */
    }
    boundary[0] = 0;
    /* Parts as large as the largest are filled alike, whatever the rounding of their sums. */
    used = fill_parts(time_s, n, parts, high * (1.0 + DBL_EPSILON * n), boundary, &largest, &next);
    use_all_parts(parts, used, boundary);
    return TP_OK;
}
