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

/* Columns of n_embd. What an attention that is remade has for itself and shares with the others, all slices at once, going forward,
 * and shares where it keeps keys and values; what it has to go back in, of which it has then one slice (inner), or none (dropped).
 * What an FFN that is remade has to go back in, with rows that a W leaves, and without. Gradients of either of which there is then
 * one slice. */
typedef struct {
    int own, shared, sliced, inner, dropped, ffn_inner, ffn_h, grads, ffn_grads;
    int64_t group_rows;
} columns_of;

static const columns_of of_cpu = {3, 1, 4, 4, 0, 8, 0, 0, 0, TP_ROW_GROUP};
static const columns_of of_gpu = {3, 2, 2, 2, 3, 5, 4, 4, 5, TP_CUDA_WEIGHT_ROWS};

static rows_of
measure(const tp_again_asked *asked, const columns_of *of)
{
    rows_of rows = {0, 0, 0, 0};
    int64_t left = 0, own = 0, most;
    const int32_t *lengths = asked->lengths;
    for (int32_t q = 0; q < asked->micros; lengths += asked->slices[q++]) {
        int64_t total = 0, begin = 0, before = 0, batch = asked->batches[q];
        for (int32_t s = 0; s < asked->slices[q]; s++) {
            total += lengths[s];
            rows.longest = batch * lengths[s] > rows.longest ? batch * lengths[s] : rows.longest;
        }
        for (int32_t s = 0; s <= asked->slices[q]; s++) {
            int64_t from = s < asked->slices[q] ? tp_groups_begin(of->group_rows, total, s, begin) : total;
            left = from - begin > left ? from - begin : left;
            own = batch * (from - before) > own ? batch * (from - before) : own;
            before = begin;
            begin += s < asked->slices[q] ? lengths[s] : 0;
        }
        rows.all = batch * total > rows.all ? batch * total : rows.all;
        rows.at_once |= batch > 1 && asked->slices[q] > 1;
    }
    most = of == &of_gpu && own < rows.longest + left ? own : rows.longest + left; /* whose W moves them seldom */
    rows.slice = most < rows.all ? most : rows.all;
    return rows;
}

/* The most micro-batches held at once with which the stage takes no more, if its attentions keep keys and values of all of them, 2
 * columns of n_embd, on a GPU queries too, and R comes slice by slice, than if it makes all of a micro-batch at once: for what goes
 * forward, what comes back, and gradients (tp_stage_config.slice_gradients), of which there is 1 between blocks. Of d(q, k, v) of an
 * attention on a CPU there are then 2 of all rows and 3 of a slice. apart: what goes back has room for all slices nevertheless. */
static int
keys_most(const columns_of *of, int kept, int blocks, const int number[2], const int remade[2], rows_of rows, int apart)
{
    int64_t fewer = apart ? 0 : rows.all - rows.slice, d_qkv = apart || of == &of_gpu ? 0 : rows.all - 3 * rows.slice;
    int64_t less = ((of->own + of->dropped) * remade[0] + of->shared) * rows.all - of->sliced * rows.longest;
    less += (of->inner * remade[0] + of->ffn_inner * remade[1] + of->grads * number[0] + of->ffn_grads * number[1]) * fewer;
    less += of->ffn_h * remade[1] * (apart ? 0 : rows.all - rows.longest);
    less += (blocks - 1) * fewer + number[0] * (d_qkv > 0 ? d_qkv : 0);
    int64_t most = less / (kept * remade[0] * rows.all), bound = apart ? kept - 1 : TP_AGAIN_MOST_KEYS;
    return less < 0 ? 0 : most > bound ? (int)bound : (int)most;
}

void
tp_again_ways(const tp_again_asked *asked, uint8_t *ways)
{
    const columns_of *of = asked->keeps_keys == 3 ? &of_gpu : &of_cpu;
    rows_of rows = measure(asked, of);
    for (int v = 0; v < asked->stages; v++) {
        int number[2] = {0, 0}, remade[2] = {0, 0}; /* attentions, FFNs */
        for (int32_t i = asked->boundary[v]; i < asked->boundary[v + 1]; i++) {
            int kind = asked->kind[i] == TP_ATTENTION ? 0 : 1, block = asked->kind[i] == TP_ATTENTION || asked->kind[i] == TP_FFN;
            number[kind] += block;
            remade[kind] += block && asked->recompute[i] != 0;
        }
        int blocks = asked->boundary[v + 1] - asked->boundary[v], apart = asked->waits || rows.at_once;
        ways[v] = remade[0] + remade[1] == 0 ? TP_AGAIN_NOT : remade[0] == 0 ? TP_AGAIN_SLICES : TP_AGAIN_ALL;
        if (remade[0] > 0 && asked->keeps_keys)
            ways[v] = (uint8_t)(TP_AGAIN_KEYS + keys_most(of, asked->keeps_keys, blocks, number, remade, rows, apart));
    }
}
