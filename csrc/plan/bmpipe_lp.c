#include "csrc/plan/bmpipe_lp.h"

#include <math.h>
#include <string.h>

#define TINY 1e-9

size_t
tp_bmpipe_lp_bytes(int columns, int room)
{
    size_t n = (size_t)columns, m = (size_t)room;
    return (m * n + m + n) * sizeof(double) + (2 * m + n) * sizeof(int32_t);
}

void
tp_bmpipe_lp_open(tp_bmpipe_lp *lp, void *memory, int columns, int room, const double *cost)
{
    size_t n = (size_t)columns, m = (size_t)room;
    *lp = (tp_bmpipe_lp){.columns = columns, .room = room, .table = memory};
    lp->right = lp->table + m * n;
    lp->cost = lp->right + m;
    lp->basic = (int32_t *)(lp->cost + n);
    lp->nonbasic = lp->basic + m;
    lp->vacant = lp->nonbasic + n;
    for (int i = 0; i < room; i++)
        lp->vacant[i] = room - 1 - i;
    for (int j = 0; j < columns; j++) {
        lp->cost[j] = cost[j];
        lp->nonbasic[j] = j;
    }
}

void
tp_bmpipe_lp_copy(const tp_bmpipe_lp *from, tp_bmpipe_lp *to)
{
    size_t n = (size_t)from->columns, m = (size_t)from->rows;
    to->rows = from->rows;
    to->value = from->value;
    memcpy(to->table, from->table, m * n * sizeof(double));
    memcpy(to->right, from->right, m * sizeof(double));
    memcpy(to->cost, from->cost, n * sizeof(double));
    memcpy(to->basic, from->basic, m * sizeof(int32_t));
    memcpy(to->nonbasic, from->nonbasic, n * sizeof(int32_t));
    memcpy(to->vacant, from->vacant, (size_t)from->room * sizeof(int32_t));
}

int
tp_bmpipe_lp_add(tp_bmpipe_lp *lp, const double *a, double low)
{
    int n = lp->columns, row = lp->rows;
    if (row == lp->room)
        return -1;
    double *at = lp->table + (size_t)row * (size_t)n, right = -low;
    /* slack = a . x - low, with every basic x replaced by its row. */
    for (int j = 0; j < n; j++)
        at[j] = lp->nonbasic[j] < n ? -a[lp->nonbasic[j]] : 0.0;
    for (int i = 0; i < row; i++) {
        if (lp->basic[i] >= n || a[lp->basic[i]] == 0.0)
            continue;
        double factor = a[lp->basic[i]];
        const double *from = lp->table + (size_t)i * (size_t)n;
        right += factor * lp->right[i];
        for (int j = 0; j < n; j++)
            at[j] += factor * from[j];
        lp->work -= n;
    }
    int number = lp->vacant[lp->room - 1 - row];
    lp->right[row] = right;
    lp->basic[row] = (int32_t)(n + number);
    lp->rows++;
    return number;
}

void
tp_bmpipe_lp_drop(tp_bmpipe_lp *lp, double above, const uint8_t *may)
{
    int n = lp->columns;
    for (int i = lp->rows - 1; i >= 0; i--) {
        if (lp->basic[i] < n || lp->right[i] <= above || !may[lp->basic[i] - n])
            continue;
        int last = --lp->rows;
        lp->vacant[lp->room - 1 - last] = lp->basic[i] - n;
        if (i == last)
            continue;
        lp->basic[i] = lp->basic[last];
        lp->right[i] = lp->right[last];
        memcpy(lp->table + (size_t)i * (size_t)n, lp->table + (size_t)last * (size_t)n, (size_t)n * sizeof(double));
        lp->work -= n;
    }
}

static void
pivot(tp_bmpipe_lp *lp, int row, int column)
{
    int n = lp->columns;
    double *at = lp->table + (size_t)row * (size_t)n, inverse = 1.0 / at[column], factor = 0.0;
    for (int j = 0; j < n; j++)
        at[j] *= inverse;
    at[column] = inverse;
    lp->right[row] *= inverse;
    for (int i = 0; i < lp->rows; i++) {
        double *other = lp->table + (size_t)i * (size_t)n;
        if (i == row || other[column] == 0.0)
            continue;
        factor = other[column];
        other[column] = 0.0;
        for (int j = 0; j < n; j++)
            other[j] -= factor * at[j];
        lp->right[i] -= factor * lp->right[row];
        lp->work -= n;
    }
    factor = lp->cost[column];
    lp->cost[column] = 0.0;
    lp->value += factor * lp->right[row];
    for (int j = 0; j < n; j++) {
        lp->cost[j] -= factor * at[j];
        lp->cost[j] = lp->cost[j] > 0.0 ? lp->cost[j] : 0.0; /* below 0 is rounding */
    }
    lp->work -= 2 * n;
    int32_t leaves = lp->basic[row];
    lp->basic[row] = lp->nonbasic[column];
    lp->nonbasic[column] = leaves;
}

static double
squares(const double *at, int count)
{
    double sum[4] = {0.0, 0.0, 0.0, 0.0};
    int j = 0;
    for (; j + 4 <= count; j += 4)
        for (int i = 0; i < 4; i++)
            sum[i] += at[j + i] * at[j + i];
    for (; j < count; j++)
        sum[0] += at[j] * at[j];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* The row that lacks most for its length; -1: none lacks. */
static int
leaving(const tp_bmpipe_lp *lp)
{
    int best = -1;
    double most = 0.0;
    for (int i = 0; i < lp->rows; i++) {
        if (lp->right[i] >= -TINY)
            continue;
        const double *at = lp->table + (size_t)i * (size_t)lp->columns;
        double norm = 1.0 + squares(at, lp->columns);
        double lack = lp->right[i] * lp->right[i] / norm;
        if (lack > most) {
            most = lack;
            best = i;
        }
    }
    return best;
}

/* The least ratio of cost and entry, the largest entry among equals; -1: none. */
static int
entering(const tp_bmpipe_lp *lp, int row)
{
    const double *at = lp->table + (size_t)row * (size_t)lp->columns;
    int best = -1;
    double least = INFINITY;
    for (int j = 0; j < lp->columns; j++) {
        if (at[j] >= -TINY)
            continue;
        double ratio = lp->cost[j] / -at[j];
        if (best < 0 || ratio < least * (1.0 - 1e-9) || (ratio <= least * (1.0 + 1e-9) && at[j] < at[best])) {
            least = ratio < least ? ratio : least;
            best = j;
        }
    }
    return best;
}

int
tp_bmpipe_lp_solve(tp_bmpipe_lp *lp)
{
    while (lp->work > 0) {
        int row = leaving(lp);
        lp->work -= (int64_t)lp->rows * lp->columns;
        if (row < 0)
            return 1;
        int column = entering(lp, row);
        if (column < 0) {
            lp->stuck = row;
            return -1;
        }
        pivot(lp, row, column);
    }
    return 0;
}

void
tp_bmpipe_lp_read(const tp_bmpipe_lp *lp, double *x, double *multiplier)
{
    for (int j = 0; j < lp->columns; j++)
        x[j] = 0.0;
    for (int i = 0; i < lp->room; i++)
        multiplier[i] = 0.0;
    for (int i = 0; i < lp->rows; i++)
        if (lp->basic[i] < lp->columns && lp->right[i] > 0.0)
            x[lp->basic[i]] = lp->right[i];
    for (int j = 0; j < lp->columns; j++)
        if (lp->nonbasic[j] >= lp->columns)
            multiplier[lp->nonbasic[j] - lp->columns] = lp->cost[j];
}

void
tp_bmpipe_lp_read_ray(const tp_bmpipe_lp *lp, double *multiplier)
{
    const double *at = lp->table + (size_t)lp->stuck * (size_t)lp->columns;
    for (int i = 0; i < lp->room; i++)
        multiplier[i] = 0.0;
    if (lp->basic[lp->stuck] >= lp->columns)
        multiplier[lp->basic[lp->stuck] - lp->columns] = 1.0;
    for (int j = 0; j < lp->columns; j++)
        if (lp->nonbasic[j] >= lp->columns && at[j] > 0.0)
            multiplier[lp->nonbasic[j] - lp->columns] = at[j];
}
