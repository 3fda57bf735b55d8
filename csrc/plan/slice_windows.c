/* For each start of a slice: the longest length within the thresholds (last), and up to which length every slice is within them, so
 * that a search need not compare (safe). */
#include "csrc/plan/slice_dp.h"

#include <string.h>

/* Costs rise with the start, so the last length within the threshold only falls: one pointer walks down. The windows in
 * last[] and safe[] are narrowed. */
static void
smooth_windows(const tp_slice_table *t, int cap, double threshold, int *last, int *safe)
{
    int n = t->n, high = cap, low = cap;
    const double *g = t->g1, *top = t->top;
    for (int j = 1; j < n; j++) {
        double left = threshold - t->a2 * j, slope = t->a3 * j;
        int room = cap < n - j ? cap : n - j; /* not last[j]: another limit's window may grow again */
        high = t->rising && high < room ? high : room;
        while (high > 0 && g[high] + slope * high > left)
            high--;
        last[j] = last[j] < high ? last[j] : high;
        low = low < high ? low : high;
        if (t->monotone)
            low = high;
        else
            while (low > 0 && top[low] + slope * low > left)
                low--;
        safe[j] = safe[j] < low ? safe[j] : low;
    }
}

/* The costs that decide whether the window of start j ends before w->last, and its safe part before w->blocks. */
static void
hold(const tp_slice_dp *dp, int j, tp_slice_window *w)
{
    size_t first = dp->sum.row[j];
    for (int l = 0; l < dp->limits; l++) {
        w->at_last[l] = w->last > 0 ? dp->limit[l].rows[first + (size_t)w->last - 1] : -INFINITY;
        w->peak[l] = w->blocks > 0 ? dp->limit[l].peaks[first / TP_SLICE_BLOCK + (size_t)w->blocks - 1] : -INFINITY;
    }
}

static int
is_over(const tp_slice_dp *dp, const double cost[TP_SLICE_LIMITS])
{
    int over = 0;
    for (int l = 0; l < dp->limits; l++)
        over |= cost[l] > dp->threshold[l];
    return over;
}

static void
narrow_window(const tp_slice_dp *dp, int j, tp_slice_window *w)
{
    size_t first = dp->sum.row[j];
    for (int l = 0; l < dp->limits; l++)
        while (w->last > 0 && dp->limit[l].rows[first + (size_t)w->last - 1] > dp->threshold[l])
            w->last--;
    w->blocks = w->blocks < w->last / TP_SLICE_BLOCK ? w->blocks : w->last / TP_SLICE_BLOCK;
    for (int l = 0; l < dp->limits; l++)
        while (w->blocks > 0 && dp->limit[l].peaks[first / TP_SLICE_BLOCK + (size_t)w->blocks - 1] > dp->threshold[l])
            w->blocks--;
    hold(dp, j, w);
}

/* Nothing is known of a dense table, but lower thresholds only shorten the windows of higher ones. Boxes are split into parts,
 * so the windows of the last few thresholds that fell one below the other are kept, with the costs at their ends: where those
 * are still within the thresholds, which is almost everywhere, the rows need not be touched. */
static void
dense_windows(tp_slice_dp *dp)
{
    int n = dp->n, limits = dp->limits, falls = 0;
    while (dp->levels > 0 && !falls) {
        falls = 1;
        for (int l = 0; l < limits; l++)
            falls &= dp->threshold[l] <= dp->at[dp->levels - 1][l];
        dp->levels -= !falls;
    }
    const tp_slice_window *above = dp->levels > 0 ? dp->level + (size_t)(dp->levels - 1) * (size_t)n : NULL;
    dp->levels += dp->levels < TP_SLICE_LEVELS;
    memcpy(dp->at[dp->levels - 1], dp->threshold, sizeof dp->threshold);
    tp_slice_window *own = dp->level + (size_t)(dp->levels - 1) * (size_t)n;
    for (int j = 0; j < n; j++) {
        if (above != NULL)
            own[j] = above[j];
        else {
            int room = (int)(dp->sum.row[j + 1] - dp->sum.row[j]);
            own[j].last = room < dp->last[j] ? room : dp->last[j];
            own[j].blocks = own[j].last / TP_SLICE_BLOCK;
            hold(dp, j, &own[j]);
        }
        if (is_over(dp, own[j].at_last) || is_over(dp, own[j].peak))
            narrow_window(dp, j, &own[j]);
        dp->last[j] = own[j].last;
        dp->safe[j] = own[j].blocks * TP_SLICE_BLOCK;
    }
}

void
tp_slice_windows(tp_slice_dp *dp, const double *threshold)
{
    for (int j = 0; j < dp->n; j++) {
        dp->last[j] = dp->cap < dp->n - j ? dp->cap : dp->n - j;
        dp->safe[j] = j == 0 || !dp->sum.smooth ? 0 : dp->last[j];
    }
    memcpy(dp->threshold, threshold, (size_t)dp->limits * sizeof *threshold);
    for (int l = 0; dp->sum.smooth && l < dp->limits; l++)
        smooth_windows(&dp->limit[l], dp->cap, threshold[l], dp->last, dp->safe);
    if (!dp->sum.smooth)
        dense_windows(dp);
    dp->far[0] = 0;
    for (int j = 1; j < dp->n; j++) { /* a kernel may take a slice just beyond its window: its mask compares rounded sums */
        int longest = dp->last[j] + TP_SLICE_BLOCK < dp->cap ? dp->last[j] + TP_SLICE_BLOCK : dp->cap;
        dp->far[j] = j + longest > dp->far[j - 1] ? j + longest : dp->far[j - 1];
    }
}

double
tp_slice_search_s(const tp_slice_dp *dp, const double *threshold)
{
    const double moment = 0.03, step_s = 3e-10;
    int window = 0, within = dp->limit[0].smooth;
    while (within && window < dp->cap) {
        for (int l = 0; l < dp->weighted; l++)
            within &= dp->limit[l].g1[window + 1] <= threshold[l];
        window += within;
    }
    double seconds = step_s * dp->n * (double)window;
    int queued = dp->limits == 1 && dp->cap == dp->n && window <= dp->convex;
    return seconds < moment || queued ? 0.0 : seconds;
}
