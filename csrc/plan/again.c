#include "csrc/plan/again.h"

#include "csrc/model/model.h"
#include "csrc/model/waits.h"
#include "csrc/sched/sched.h"

/* Rows of the largest micro-batch and of the longest slice, and of what has room for one slice: its own and those that a W leaves to
 * the next, if that is less than all. */
typedef struct {
    int64_t all, longest, slice;
    int at_once; /* of several sequences in several slices, whose sums are made at once */
} rows_of;

static rows_of
measure(const tp_again_asked *asked)
{
    rows_of rows = {0, 0, 0, 0};
    int64_t left = 0;
    const int32_t *lengths = asked->lengths;
    for (int32_t q = 0; q < asked->micros; lengths += asked->slices[q++]) {
        int64_t total = 0, begin = 0, batch = asked->batches[q];
        for (int32_t s = 0; s < asked->slices[q]; s++) {
            total += lengths[s];
            rows.longest = batch * lengths[s] > rows.longest ? batch * lengths[s] : rows.longest;
        }
        for (int32_t s = 0; s < asked->slices[q]; begin += lengths[s++]) {
            int64_t leaves = tp_group_begin(total, s, begin) - begin;
            left = s > 0 && leaves > left ? leaves : left;
        }
        rows.all = batch * total > rows.all ? batch * total : rows.all;
        rows.at_once |= batch > 1 && asked->slices[q] > 1;
    }
    rows.slice = rows.longest + left < rows.all ? rows.longest + left : rows.all;
    return rows;
}

/* The most micro-batches held at once with which the stage takes no more, if its attentions keep keys and values of all of them, 2
 * columns of n_embd, and R comes slice by slice, than if it makes all of a micro-batch at once: going forward 3 columns of queries,
 * keys and values, and 1 of outputs for all attentions, where there are then these 4 of one slice for all; going back 4 of an
 * attention, 8 of an FFN, and gradients (tp_stage_config.slice_gradients): 1 between blocks, and 3 of an attention, for which there
 * are then 2 of all rows and 3 of a slice. apart: what goes back has room for all slices nevertheless. */
static int
keys_most(int blocks, int attentions, const int remade[2], rows_of rows, int apart)
{
    int64_t fewer = apart ? 0 : rows.all - rows.slice, d_qkv = apart ? 0 : rows.all - 3 * rows.slice;
    int64_t less = (3 * remade[0] + 1) * rows.all - 4 * rows.longest + (4 * remade[0] + 8 * remade[1]) * fewer;
    less += (blocks - 1) * fewer + attentions * (d_qkv > 0 ? d_qkv : 0);
    int64_t most = less / (2 * remade[0] * rows.all), bound = apart ? 1 : TP_AGAIN_MOST_KEYS;
    return less < 0 ? 0 : most > bound ? (int)bound : (int)most;
}

void
tp_again_ways(const tp_again_asked *asked, uint8_t *ways)
{
    rows_of rows = measure(asked);
    for (int v = 0; v < asked->stages; v++) {
        int attentions = 0, remade[2] = {0, 0}; /* attentions, FFNs */
        for (int32_t i = asked->boundary[v]; i < asked->boundary[v + 1]; i++) {
            int kind = asked->kind[i] == TP_ATTENTION ? 0 : 1, block = asked->kind[i] == TP_ATTENTION || asked->kind[i] == TP_FFN;
            attentions += kind == 0;
            remade[kind] += block && asked->recompute[i] != 0;
        }
        int blocks = asked->boundary[v + 1] - asked->boundary[v], apart = asked->waits || rows.at_once;
        ways[v] = remade[0] + remade[1] == 0 ? TP_AGAIN_NOT : remade[0] == 0 ? TP_AGAIN_SLICES : TP_AGAIN_ALL;
        if (remade[0] > 0 && asked->keeps_keys)
            ways[v] = (uint8_t)(TP_AGAIN_KEYS + keys_most(blocks, attentions, remade, rows, apart));
    }
}
