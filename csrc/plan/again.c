#include "csrc/plan/again.h"

#include "csrc/model/model.h"
#include "csrc/model/waits.h"
#include "csrc/sched/sched.h"

/* Rows of the largest micro-batch, and of what has room for one slice: its own and those that a W leaves to the next. */
typedef struct {
    int64_t all, slice;
    int at_once; /* of several sequences in several slices, whose sums are made at once */
} rows_of;

static rows_of
measure(const tp_again_asked *asked)
{
    rows_of rows = {0, 0, 0};
    int64_t left = 0;
    const int32_t *lengths = asked->lengths;
    for (int32_t q = 0; q < asked->micros; lengths += asked->slices[q++]) {
        int64_t total = 0, begin = 0, batch = asked->batches[q];
        for (int32_t s = 0; s < asked->slices[q]; s++) {
            total += lengths[s];
            rows.slice = batch * lengths[s] > rows.slice ? batch * lengths[s] : rows.slice;
        }
        for (int32_t s = 0; s < asked->slices[q]; begin += lengths[s++]) {
            int64_t leaves = tp_group_begin(total, s, begin) - begin;
            left = s > 0 && leaves > left ? leaves : left;
        }
        rows.all = batch * total > rows.all ? batch * total : rows.all;
        rows.at_once |= batch > 1 && asked->slices[q] > 1;
    }
    rows.slice += left;
    return rows;
}

/* The most micro-batches held at once with which the stage takes no more, if its attentions keep keys and values of all of them, 2
 * columns of n_embd, and R comes slice by slice, than if it makes all of a micro-batch at once: 3 columns of queries, keys and values
 * going forward and 4 going back, 8 of an FFN, and gradients (tp_stage_config.slice_gradients): 1 between blocks, and 3 of an
 * attention, for which there are then 2 of all rows and 3 of a slice. */
static int
keys_most(const int counts[2], const int remade[2], rows_of rows)
{
    int64_t fewer = rows.all - rows.slice, d_qkv = rows.all - 3 * rows.slice;
    int64_t less = remade[0] * (7 * rows.all - 4 * rows.slice) + remade[1] * 8 * fewer + (counts[0] + counts[1]) * fewer;
    less += counts[0] * (d_qkv > 0 ? d_qkv : 0);
    int64_t most = less / (2 * remade[0] * rows.all);
    return most < 0 ? 0 : most > TP_AGAIN_MOST_KEYS ? TP_AGAIN_MOST_KEYS : (int)most;
}

void
tp_again_ways(const tp_again_asked *asked, uint8_t *ways)
{
    rows_of rows = measure(asked);
    for (int v = 0; v < asked->stages; v++) {
        int counts[2] = {0, 0}, remade[2] = {0, 0}; /* attentions, FFNs */
        for (int32_t i = asked->boundary[v]; i < asked->boundary[v + 1]; i++) {
            int kind = asked->kind[i] == TP_ATTENTION ? 0 : 1, block = asked->kind[i] == TP_ATTENTION || asked->kind[i] == TP_FFN;
            counts[kind] += block;
            remade[kind] += asked->recompute[i] != 0;
        }
        ways[v] = remade[0] + remade[1] == 0 ? TP_AGAIN_NOT : remade[0] == 0 ? TP_AGAIN_SLICES : TP_AGAIN_ALL;
        if (remade[0] > 0 && asked->keeps_keys)
            ways[v] = (uint8_t)(TP_AGAIN_KEYS + (asked->waits || rows.at_once ? 1 : keys_most(counts, remade, rows)));
    }
}
