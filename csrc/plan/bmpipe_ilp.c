/* The integer programme of PLANNERS.md 4.2 and 4.3 as sparse rows, the makespan being bounded by path inequalities. */
#include "csrc/plan/bmpipe.h"

#include <math.h>
#include <stdlib.h>

#include "csrc/base/deadline.h"
#include "csrc/plan/bmpipe_core.h"

typedef struct {
    const tp_bmpipe *p;
    const tp_bmpipe_layers *l;
    tp_bmpipe_ilp *ilp; /* its arrays NULL: count only */
    int64_t steps;      /* since somebody was asked whether to stop */
    int is_told;        /* to stop: what is written is of no use */
} pen;

static inline int32_t
layer_column(const pen *w, int type, int strategy, int v)
{
    return (int32_t)((type * w->l->strategies + strategy) * w->p->virtuals + v);
}

static inline int32_t
done_column(const pen *w, int type, int v)
{
    return (int32_t)((w->l->types * w->l->strategies + type) * w->p->virtuals + v);
}

static void
put(pen *w, int32_t column, double value)
{
    if (value == 0.0)
        return;
    if (w->ilp->index != NULL) {
        w->ilp->index[w->ilp->entries] = column;
        w->ilp->value[w->ilp->entries] = value;
    }
    w->ilp->entries++;
}

/* All strategies of a type on virtual stages from .. to. */
static void
put_layers(pen *w, int type, int from, int to)
{
    for (int r = 0; r < w->l->choices[type] && !w->is_told; r++)
        for (int v = from; v < to; v++)
            put(w, layer_column(w, type, r, v), 1.0);
    w->is_told |= tp_deadline_told_after(&w->steps, 4 + 2 * (int64_t)w->l->choices[type] * (to - from));
}

static void
end_row(pen *w, double low, double high)
{
    if (w->ilp->index != NULL) {
        w->ilp->row_low[w->ilp->rows] = low;
        w->ilp->row_high[w->ilp->rows] = high;
        w->ilp->begin[w->ilp->rows + 1] = w->ilp->entries;
    }
    w->ilp->rows++;
}

/* C1, C2a to C2c and that no virtual stage is empty. */
static void
write_order(pen *w)
{
    int virtuals = w->p->virtuals;
    for (int t = 0; t < w->l->types; t++) {
        put_layers(w, t, 0, virtuals);
        end_row(w, w->l->count[t], w->l->count[t]);
    }
    for (int v = 0; v < virtuals; v++) {
        for (int t = 0; t < w->l->types; t++)
            put_layers(w, t, v, v + 1);
        end_row(w, 1.0, INFINITY);
    }
    for (int t = 1; t < w->l->types; t++)
        for (int v = 0; v < virtuals; v++) {
            put_layers(w, t, v, v + 1);
            put(w, done_column(w, t - 1, v), -w->l->count[t]);
            end_row(w, -INFINITY, 0.0);
            put_layers(w, t - 1, v + 1, virtuals);
            put(w, done_column(w, t - 1, v), w->l->count[t - 1]);
            end_row(w, -INFINITY, w->l->count[t - 1]);
            if (v + 1 == virtuals)
                continue;
            put(w, done_column(w, t - 1, v), 1.0);
            put(w, done_column(w, t - 1, v + 1), -1.0);
            end_row(w, -INFINITY, 0.0);
        }
}

/* C3, in units of the memory. */
static void
write_memory(pen *w)
{
    const tp_bmpipe *p = w->p;
    double unit = p->options->memory_bytes;
    if (isinf(unit))
        return;
    for (int x = 0; x < p->stages; x++)
        for (int k = p->vector_begin[x]; k < p->vector_begin[x + 1]; k++) {
            for (int i = 0; i < w->l->types * w->l->strategies; i++) {
                int t = i / w->l->strategies, r = i % w->l->strategies;
                for (int c = 0; c < p->chunks && r < w->l->choices[t] && !w->is_told; c++)
                    put(w, layer_column(w, t, r, c * p->stages + x),
                        (w->l->static_bytes[t] + p->vector[k * p->chunks + c] * w->l->activation_bytes[i]) / unit);
            }
            end_row(w, -INFINITY, 1.0);
            w->is_told |= tp_deadline_told_after(&w->steps, 4 * (int64_t)w->l->types * w->l->strategies * p->chunks);
        }
}

/* T - sum of runs * seconds >= lag. */
static void
write_path(pen *w, const int64_t *forward_runs, const int64_t *backward_runs, double lag_s)
{
    for (int i = 0; i < w->l->types * w->l->strategies; i++) {
        int t = i / w->l->strategies, r = i % w->l->strategies;
        for (int v = 0; v < w->p->virtuals && r < w->l->choices[t]; v++)
            put(w, layer_column(w, t, r, v),
                -((double)forward_runs[v] * w->l->forward_s[t] +
                  (double)backward_runs[v] * (w->l->backward_s[t] + w->l->extra_s[i])));
    }
    put(w, w->ilp->columns - 1, 1.0);
    end_row(w, lag_s, INFINITY);
}

static void
write_columns(pen *w)
{
    tp_bmpipe_ilp *ilp = w->ilp;
    for (int i = 0; i < ilp->columns; i++) {
        int type = i / (w->l->strategies * w->p->virtuals), strategy = i / w->p->virtuals % w->l->strategies;
        ilp->integer[i] = 1;
        ilp->high[i] = 1.0;
        if (type < w->l->types)
            ilp->high[i] = strategy < w->l->choices[type] ? w->l->count[type] : 0.0;
    }
    ilp->integer[ilp->columns - 1] = 0;
    ilp->high[ilp->columns - 1] = INFINITY;
    ilp->cost[ilp->columns - 1] = 1.0;
}

static void
write_rows(pen *w, int paths, const int64_t *forward_runs, const int64_t *backward_runs, const double *lag_s)
{
    w->ilp->rows = 0;
    w->ilp->entries = 0;
    write_order(w);
    write_memory(w);
    for (int k = 0; k < paths && !w->is_told; k++) {
        write_path(w, forward_runs + (int64_t)k * w->p->virtuals, backward_runs + (int64_t)k * w->p->virtuals, lag_s[k]);
        w->is_told = tp_deadline_told_after(&w->steps, 4 * (int64_t)w->ilp->columns);
    }
}

static tp_status
ilp_open(tp_bmpipe_ilp *ilp)
{
    size_t columns = (size_t)ilp->columns, rows = (size_t)ilp->rows, entries = (size_t)ilp->entries;
    ilp->cost = calloc(columns, sizeof *ilp->cost);
    ilp->low = calloc(columns, sizeof *ilp->low);
    ilp->high = calloc(columns, sizeof *ilp->high);
    ilp->integer = calloc(columns, sizeof *ilp->integer);
    ilp->begin = calloc(rows + 1, sizeof *ilp->begin);
    ilp->row_low = calloc(rows + 1, sizeof *ilp->row_low);
    ilp->row_high = calloc(rows + 1, sizeof *ilp->row_high);
    ilp->index = calloc(entries + 1, sizeof *ilp->index);
    ilp->value = calloc(entries + 1, sizeof *ilp->value);
    if (ilp->cost == NULL || ilp->low == NULL || ilp->high == NULL || ilp->integer == NULL || ilp->begin == NULL ||
        ilp->row_low == NULL || ilp->row_high == NULL || ilp->index == NULL || ilp->value == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %zu rows with %zu entries", rows, entries);
    return TP_OK;
}

void
tp_bmpipe_ilp_free(tp_bmpipe_ilp *ilp)
{
    free(ilp->cost);
    free(ilp->low);
    free(ilp->high);
    free(ilp->integer);
    free(ilp->begin);
    free(ilp->row_low);
    free(ilp->row_high);
    free(ilp->index);
    free(ilp->value);
    *ilp = (tp_bmpipe_ilp){0};
}

tp_status
tp_bmpipe_ilp_build(const tp_bmpipe_layers *layers, const tp_bmpipe_options *options, int paths,
                    const int64_t *forward_runs, const int64_t *backward_runs, const double *lag_s, tp_bmpipe_ilp *out)
{
    tp_arena arena;
    tp_bmpipe p;
    *out = (tp_bmpipe_ilp){0};
    TP_TRY(tp_bmpipe_check(layers, options));
    TP_TRY(tp_arena_open(&arena));
    tp_status status = tp_bmpipe_open(layers, options, &arena, &p);
    if (status == TP_OK) {
        pen w = {.p = &p, .l = layers, .ilp = out};
        out->columns = (layers->types * layers->strategies + layers->types - 1) * p.virtuals + 1;
        out->paths = paths;
        write_rows(&w, paths, forward_runs, backward_runs, lag_s);
        status = tp_deadline_check_told();
        if (status == TP_OK)
            status = ilp_open(out);
        if (status == TP_OK) {
            write_columns(&w);
            write_rows(&w, paths, forward_runs, backward_runs, lag_s);
            status = tp_deadline_check_told();
        }
    }
    tp_bmpipe_close(&p);
    tp_arena_close(&arena);
    return status;
}
