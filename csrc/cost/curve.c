/* One curve: its check, its seconds, and the planners' tables of a weighted sum of curves (cost.h). */
#include "csrc/cost/cost.h"

#include <math.h>
#include <stddef.h>

#include "csrc/base/deadline.h"

static tp_status
check_curve(const tp_cost_curve *curve, int kind, int phase)
{
    for (int32_t i = 0; i < curve->points; i++)
        if (!isfinite(curve->rows[i]) || !isfinite(curve->seconds[i]) || (i && curve->rows[i] <= curve->rows[i - 1]))
            return tp_fail(TP_EVALUE,
                           "cost curve %d.%d: point %d (%g rows, %g s) must be finite and after the one before", kind,
                           phase, (int)i, curve->rows[i], curve->seconds[i]);
    if (curve->table != NULL && (curve->units < 1 || !(curve->granularity >= 1.0)))
        return tp_fail(TP_EVALUE, "cost curve %d.%d: a table of %d units of %g tokens: at least 1 and 1 would be right",
                       kind, phase, (int)curve->units, curve->granularity);
    return TP_OK;
}

tp_status
tp_cost_check(const tp_cost *cost)
{
    for (int kind = 0; kind < TP_BLOCK_KINDS; kind++)
        for (int phase = 0; phase < TP_COST_PHASES; phase++)
            TP_TRY(check_curve(&cost->curve[kind][phase], kind, phase));
    for (int what = 0; what < TP_COST_REMADE; what++)
        TP_TRY(check_curve(&cost->remade[what], TP_BLOCK_KINDS, what));
    const tp_cost_waits *waits = &cost->waits;
    if (!(waits->row_s >= 0.0 && waits->least >= 0.0 && waits->flush_s >= 0.0) ||
        !isfinite(waits->row_s + waits->least + waits->flush_s))
        return tp_fail(TP_EVALUE, "a pass of the head has %g s a row, %g rows at least, %g s a row of its weight: finite ones from 0 on "
                       "would be right", waits->row_s, waits->least, waits->flush_s);
    return TP_OK;
}

/* P at `rows`; *piece is where the last call ended, so that ascending calls cost O(1). */
static double
pieces(const tp_cost_curve *curve, double rows, int32_t *piece)
{
    const double *x = curve->rows, *y = curve->seconds;
    int32_t last = curve->points - 2, at = *piece;
    if (curve->points == 0)
        return 0.0;
    if (curve->points == 1)
        return y[0];
    while (at > 0 && rows < x[at])
        at--;
    while (at < last && rows > x[at + 1])
        at++;
    *piece = at;
    return y[at] + (y[at + 1] - y[at]) * ((rows - x[at]) / (x[at + 1] - x[at]));
}

static double
look_up(const tp_cost_curve *curve, double slice, double context)
{
    double s = slice / curve->granularity, c = context / curve->granularity, units = (double)curve->units;
    s = fmin(s, units);
    c = fmin(c, units - s);
    double s_whole = floor(s), c_whole = floor(c), right = s - s_whole, up = c - c_whole;
    const double *corner = curve->table + (int64_t)s_whole * (curve->units + 1) + (int64_t)c_whole;
    int64_t row = curve->units + 1;
    if (right + up <= 1.0) {
        double value = corner[0];
        if (right > 0.0)
            value += right * (corner[row] - corner[0]);
        if (up > 0.0)
            value += up * (corner[1] - corner[0]);
        return value;
    }
    double far = corner[row + 1];
    return far + (1.0 - right) * (corner[1] - far) + (1.0 - up) * (corner[row] - far);
}

static double
curve_seconds(const tp_cost_curve *curve, double slice, double context, double batch, int32_t *piece)
{
    if (slice <= 0.0)
        return 0.0;
    if (curve->table != NULL)
        return fmax(0.0, batch * curve->scale * look_up(curve, slice, context));
    double seconds = pieces(curve, batch * slice, piece) + 0.5 * batch * curve->pair_s * slice * slice;
    if (context > 0.0)
        seconds += curve->a0 + batch * (curve->a1 * slice + curve->a2 * context + curve->a3 * slice * context);
    return fmax(0.0, seconds);
}

double
tp_cost_seconds(const tp_cost_curve *curve, double slice, double context, double batch)
{
    int32_t piece = 0;
    return curve_seconds(curve, slice, context, batch, &piece);
}

static tp_status
check_units(double batch, double granularity, int64_t units)
{
    if (!(batch >= 1.0) || !(granularity >= 1.0) || units < 1)
        return tp_fail(TP_EVALUE,
                       "slice table: batch %g, granularity %g, %lld units: at least 1 of each would be right", batch,
                       granularity, (long long)units);
    return TP_OK;
}

/* G[i] += weight * t(i granularity, 0), piece by piece of P: one division a piece. */
static void
add_without_context(const tp_cost_curve *curve, double weight, double batch, double granularity, int64_t units,
                    double *G)
{
    const double *x = curve->rows, *y = curve->seconds, pair = 0.5 * batch * curve->pair_s * granularity * granularity;
    int32_t last = curve->points > 1 ? curve->points - 2 : 0;
    int64_t i = 1;
    for (int32_t at = 0; at <= last; at++) {
        double slope = curve->points > 1 ? (y[at + 1] - y[at]) / (x[at + 1] - x[at]) : 0.0;
        double start = curve->points > 0 ? y[at] - slope * x[at] : 0.0, per_unit = slope * batch * granularity;
        double limit = at < last ? x[at + 1] / (batch * granularity) : (double)units;
        int64_t end = limit < (double)units ? (int64_t)limit : units;
        for (; i <= end; i++)
            G[i] += weight * fmax(0.0, start + per_unit * (double)i + pair * (double)i * (double)i);
    }
}

tp_status
tp_cost_slice_tables(const tp_cost *cost, const double *weights, double batch, double granularity, int64_t units,
                     tp_cost_slices *out)
{
    TP_TRY(check_units(batch, granularity, units));
    double a0 = 0.0, a1 = 0.0, a2 = 0.0, a3 = 0.0;
    for (int64_t i = 0; i <= units; i++)
        out->G0[i] = 0.0;
    for (int k = 0; k < TP_COST_CURVES; k++) {
        const tp_cost_curve *curve = &cost->curve[k / TP_COST_PHASES][k % TP_COST_PHASES];
        if (weights[k] == 0.0)
            continue;
        if (curve->table != NULL)
            return tp_fail(TP_EVALUE, "slice table: cost curve %d is a table: tp_cost_full_table would be right", k);
        add_without_context(curve, weights[k], batch, granularity, units, out->G0);
        a0 += weights[k] * curve->a0;
        a1 += weights[k] * batch * granularity * curve->a1;
        a2 += weights[k] * batch * granularity * curve->a2;
        a3 += weights[k] * batch * granularity * granularity * curve->a3;
    }
    out->G1[0] = 0.0;
    for (int64_t i = 1; i <= units; i++)
        out->G1[i] = fmax(0.0, out->G0[i] + a0 + a1 * (double)i);
    out->a2 = a2;
    out->a3 = a3;
    return TP_OK;
}

tp_status
tp_cost_full_table(const tp_cost *cost, const double *weights, double batch, double granularity, int64_t units,
                   double *table)
{
    TP_TRY(check_units(batch, granularity, units));
    int64_t row = units + 1, steps = 0;
    for (int64_t s = 0; s < row; s++) {
        TP_TRY(tp_deadline_check_after(&steps, row));
        for (int64_t c = 0; c < row; c++)
            table[s * row + c] = 0.0;
    }
    for (int k = 0; k < TP_COST_CURVES; k++) {
        const tp_cost_curve *curve = &cost->curve[k / TP_COST_PHASES][k % TP_COST_PHASES];
        for (int64_t s = 1; s <= units && weights[k] != 0.0; s++) {
            int32_t piece = 0;
            TP_TRY(tp_deadline_check_after(&steps, 4 * row));
            for (int64_t c = 0; s + c <= units; c++)
                table[s * row + c] +=
                    weights[k] * curve_seconds(curve, granularity * (double)s, granularity * (double)c, batch, &piece);
        }
    }
    return TP_OK;
}
