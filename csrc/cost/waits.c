#include "csrc/cost/waits.h"

#include "csrc/model/waits.h"

/* d(weight) of what waits, but for rows below a group, if there is as much as `most`. */
static int64_t
flush(int64_t *waiting, int64_t most)
{
    int64_t flushed = *waiting >= most ? *waiting - *waiting % TP_ROW_GROUP : 0;
    *waiting -= flushed;
    return flushed;
}

static int64_t
pass(int64_t *waiting, int64_t rows, int64_t most)
{
    int64_t flushed = 0;
    while (rows > 0) {
        if (*waiting == 0) { /* whole tiles, however many */
            flushed += rows - rows % TP_HEAD_TILE;
            rows %= TP_HEAD_TILE;
        }
        int64_t room = TP_HEAD_TILE - *waiting, some = rows < room ? rows : room;
        *waiting += some;
        rows -= some;
        flushed += flush(waiting, most);
    }
    return flushed;
}

/* A slice of a micro-batch: tokens [begin, end). */
typedef struct {
    int32_t batch, slices, slice;
    int64_t begin, end;
} head_cut;

/* Several sequences in several slices have their head done as one slice, with the last. */
static tp_head_rows
rows_of(const head_cut *cut, int forward)
{
    int whole = cut->batch > 1 && cut->slices > 1;
    if (whole && cut->slice < cut->slices - 1)
        return (tp_head_rows){0, 0, 0};
    int64_t begin = whole ? 0 : cut->begin, early = tp_head_forward_rows(cut->end) - tp_head_forward_rows(begin);
    int64_t own = cut->batch * (forward ? early : cut->end - begin - early);
    return (tp_head_rows){.own = own, .passed = own};
}

static tp_head_rows
walk_forward(tp_head_walk *walk, const head_cut *cut)
{
    int haste = tp_head_in_haste(cut->slices, cut->slice), last = cut->slice == cut->slices - 1;
    tp_head_rows rows = rows_of(cut, 1);
    if (cut->slice == 0)
        walk->from = 0;
    if (cut->batch == 1) {
        int waits = !last && !haste && (cut->end - walk->from) / 3 < TP_HEAD_WORTH;
        rows.passed = waits ? 0 : tp_head_forward_rows(cut->end) - tp_head_forward_rows(walk->from);
        walk->from = waits ? walk->from : cut->end;
    }
    rows.flushed = pass(&walk->waiting[0], rows.passed, tp_head_tile_most(1, haste));
    return rows;
}

static tp_head_rows
walk_backward(tp_head_walk *walk, const head_cut *cut)
{
    tp_head_rows rows = rows_of(cut, 0);
    rows.flushed = pass(&walk->waiting[1], rows.passed, tp_head_tile_most(0, 0));
    if (!tp_head_in_haste(cut->slices, cut->slice))
        rows.flushed += flush(&walk->waiting[0], TP_HEAD_TILE / 2);
    return rows;
}

void
tp_head_walk_on(tp_head_walk *walk, int32_t batch, int32_t slices, const int32_t *lengths, tp_head_put put, void *context)
{
    head_cut cut = {batch, slices, 0, 0, 0};
    for (; cut.slice < slices; cut.slice++) {
        cut.begin = cut.end;
        cut.end += lengths[cut.slice];
        tp_head_rows rows = walk_forward(walk, &cut);
        put(context, 1, cut.slice, &rows);
    }
    while (cut.slice-- > 0) {
        cut.begin = cut.end - lengths[cut.slice];
        tp_head_rows rows = walk_backward(walk, &cut);
        put(context, 0, cut.slice, &rows);
        cut.end = cut.begin;
    }
}

/* Down the slices of one sequence: tokens [begin, end) wait. */
typedef struct {
    int64_t total, begin, end;
} weight_walk;

static weight_walk
weights_from_end(int32_t slices, const int32_t *lengths)
{
    int64_t total = 0;
    for (int32_t s = 0; s < slices; s++)
        total += lengths[s];
    return (weight_walk){total, total, total};
}

/* The rows that W of the next slice makes. */
static int64_t
weights_made(weight_walk *walk, int32_t slice, int32_t length)
{
    walk->begin -= length;
    int64_t from = tp_group_begin(walk->total, slice, walk->begin), rows = walk->end - from;
    if (rows <= 0 || !tp_weights_due(slice, rows))
        return 0;
    walk->end = from;
    return rows;
}

void
tp_weight_rows(int32_t slices, const int32_t *lengths, int32_t *rows)
{
    weight_walk walk = weights_from_end(slices, lengths);
    for (int32_t s = slices - 1; s >= 0; s--)
        rows[s] = (int32_t)weights_made(&walk, s, lengths[s]);
}

void
tp_weights_wait(int32_t slices, const int32_t *lengths, double *W)
{
    weight_walk walk = weights_from_end(slices, lengths);
    double waiting_s = 0.0;
    for (int32_t s = slices - 1; s >= 0; s--) {
        int64_t made = weights_made(&walk, s, lengths[s]), left = walk.end - walk.begin;
        waiting_s += W[s];
        /* What is left for the slice before, less than a group, at the mean of those that waited with it. */
        W[s] = left == 0 ? waiting_s : waiting_s * ((double)made / (double)(made + left));
        waiting_s -= W[s];
    }
}

double
tp_head_waits_s(const tp_cost_waits *waits, const tp_head_rows *rows, int forward)
{
    double least = waits->least, own = (double)rows->own, passed = (double)rows->passed;
    double fair = !forward && own > 0.0 && own < least ? least : own;
    double pass = passed > 0.0 && passed < least ? least : passed;
    return waits->row_s * (pass - fair) + waits->flush_s * ((double)rows->flushed - own);
}

double
tp_head_left_s(const tp_cost_waits *waits, const tp_head_walk *walk)
{
    double seconds = 0.0;
    for (int set = 0; set < 2; set++) {
        double rows = (double)walk->waiting[set];
        seconds += rows > 0.0 ? waits->flush_s * (rows > waits->least ? rows : waits->least) : 0.0;
    }
    return seconds;
}
