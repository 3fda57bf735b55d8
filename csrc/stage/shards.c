/* Moments that replicas share, each with those of a part of every block's gradients, which it alone updates: ZeRO's first stage
 * (Rajbhandari et al., SC 2020, section 5.1), as Megatron-LM's distributed optimizer does it.
 *
 * A row, the gradients of one block or of several that make messages worth their while, is cut into as many parts as there are members,
 * as even as leaves of sums of squares allow, so that a norm has the bits of one that is measured whole; member m has part m + row, so
 * that no member has all the larger ones. What a member has room for is the largest part of each row: all members take as much memory,
 * and none needs to know which it is. */
#include "csrc/stage/describe.h"

#define ROOM 64 /* floats: rows of moments begin where kernels read widest */
#define WORTH ((int64_t)65536) /* floats of each member in a row, from which on it needs no other block */

static int
first_param(const tp_stage_base *stage, int block)
{
    const tp_stage_block *of = &stage->block[block];
    return block == stage->blocks ? stage->params : of->kind == TP_EMBEDDING ? of->in : of->norm;
}

static int
is_inner(const tp_stage_base *stage, int block)
{
    return stage->block[block].kind == TP_ATTENTION || stage->block[block].kind == TP_FFN;
}

/* From the last block on, as they go back: the first block of the row that ends before `end`. */
static int
row_before(const tp_stage_base *stage, int end)
{
    const int64_t worth = WORTH * stage->config.replicas;
    int block = end - 1, high = first_param(stage, end) - 1;
    while (block > 0 && is_inner(stage, block) && is_inner(stage, block - 1) &&
           stage->param[high].grad_at + stage->param[high].floats - stage->param[first_param(stage, block)].grad_at < worth)
        block--;
    return block;
}

static void
cut_rows(tp_stage_base *stage)
{
    stage->rows = 1;
    for (int end = stage->blocks; end > 0; end = row_before(stage, end))
        stage->rows++;
    int row = stage->rows;
    stage->row_block[row] = stage->blocks;
    while (row > 1) {
        row--;
        stage->row_block[row] = row_before(stage, stage->row_block[row + 1]);
    }
    stage->row_block[0] = 0;
}

/* Tensors [*low, *high) of the row: row 0 is what lies before the first block, a tied weight of the head's. */
static void
row_params(const tp_stage_base *stage, int row, int *low, int *high)
{
    *low = row == 0 ? 0 : first_param(stage, stage->row_block[row]);
    *high = first_param(stage, stage->row_block[row + 1]);
    while (*low < *high && !tp_stage_answers_for(stage, *low)) /* a tied embedding's */
        ++*low;
}

/* The place nearest to `at` where the row may be cut. */
static int64_t
cut_at(const tp_stage_base *stage, int low, int high, int64_t at)
{
    int i = low;
    while (i + 1 < high && stage->param[i + 1].grad_at <= at)
        i++;
    const tp_stage_param *param = &stage->param[i];
    int64_t end = param->grad_at + param->floats, next = i + 1 < high ? stage->param[i + 1].grad_at : end;
    int64_t before = param->grad_at + (at - param->grad_at) / TP_SUMSQ_LEAF * TP_SUMSQ_LEAF, after = before + TP_SUMSQ_LEAF;
    if (before >= end)
        return next;
    after = after < end ? after : next;
    return after - at < at - before ? after : before;
}

/* Of the row's parts, from the first on. */
static tp_shard
part_of(const tp_stage_base *stage, int row, int part)
{
    int low, high, members = stage->config.replicas;
    row_params(stage, row, &low, &high);
    const int block = row == 0 ? -1 : stage->row_block[row];
    if (low == high)
        return (tp_shard){.block = block};
    int64_t begin = stage->param[low].grad_at, end = stage->param[high - 1].grad_at + stage->param[high - 1].floats, all = end - begin;
    int64_t from = part == 0 ? begin : cut_at(stage, low, high, begin + all / members * part + all % members * part / members);
    int64_t to = part + 1 == members ? end
                                     : cut_at(stage, low, high, begin + all / members * (part + 1) + all % members * (part + 1) / members);
    return (tp_shard){block, begin, end, from, to - from};
}

tp_shard
tp_stage_shard_of(const tp_stage_base *stage, int row, int member)
{
    return part_of(stage, row, (member + row) % stage->config.replicas);
}

static int64_t
common(int64_t begin, int64_t end, int64_t from, int64_t to, int64_t *first)
{
    *first = begin > from ? begin : from;
    int64_t last = end < to ? end : to;
    return last > *first ? last - *first : 0;
}

/* Leaves of tensors [low, high) in the shard. */
static int64_t
leaves_in(const tp_stage_base *stage, const tp_shard *shard, int low, int high)
{
    int64_t leaves = 0, first;
    for (int i = low; i < high; i++) {
        const tp_stage_param *param = &stage->param[i];
        leaves += tp_stage_leaves(common(param->grad_at, param->grad_at + param->floats, shard->first, shard->first + shard->floats, &first));
    }
    return leaves;
}

/* Floats that a member has of the row, at most; each one's leaves are counted, too. */
static int64_t
count_row(tp_stage_base *stage, int row)
{
    int low, high;
    int64_t most = 0;
    row_params(stage, row, &low, &high);
    for (int i = low; i < high; i++) {
        stage->param[i].row = row;
        stage->leaves += tp_stage_leaves(stage->param[i].floats);
    }
    for (int member = 0; member < stage->config.replicas; member++) {
        tp_shard shard = tp_stage_shard_of(stage, row, member);
        stage->leaves_of[member] += leaves_in(stage, &shard, low, high);
        most = shard.floats > most ? shard.floats : most;
    }
    return (most + ROOM - 1) / ROOM * ROOM;
}

void
tp_lay_shards(tp_stage_base *stage, tp_stage_arena *from)
{
    const int members = stage->config.replicas;
    int64_t floats = 0;
    stage->leaves = stage->squares_each = 0;
    for (int member = 0; member < members; member++)
        stage->leaves_of[member] = 0;
    cut_rows(stage);
    for (int row = 0; row < stage->rows; row++) {
        stage->row_at[row] = floats;
        floats += count_row(stage, row);
    }
    for (int member = 0; member < members; member++)
        if (stage->leaves_of[member] > stage->squares_each)
            stage->squares_each = stage->leaves_of[member];
    stage->moments[0] = tp_lay_floats(from, floats);
    stage->moments[1] = tp_lay_floats(from, floats);
    stage->squares = tp_lay(from, members * stage->squares_each, sizeof *stage->squares);
}

tp_shard_part
tp_stage_shard_part(const tp_stage_base *stage, int i)
{
    const tp_stage_param *param = &stage->param[i];
    tp_shard shard = tp_stage_shard_of(stage, param->row, stage->config.member);
    int64_t first, floats = common(param->grad_at, param->grad_at + param->floats, shard.first, shard.first + shard.floats, &first);
    if (!tp_stage_answers_for(stage, i) || floats == 0)
        return (tp_shard_part){0};
    return (tp_shard_part){first - param->grad_at, floats, stage->row_at[param->row] + first - shard.first};
}

void
tp_stage_order_leaves(const tp_stage_base *stage, const double *squares, double *ordered)
{
    const int members = stage->config.replicas;
    for (int member = 0; member < members; member++)
        stage->leaves_of[member] = 0;
    for (int row = 0; row < stage->rows; row++) {
        int low, high;
        row_params(stage, row, &low, &high);
        for (int part = 0; low < high && part < members; part++) { /* in the order of the leaves, as cuts are */
            tp_shard shard = part_of(stage, row, part);
            const int member = ((part - row) % members + members) % members;
            const double *its = squares + member * stage->squares_each + stage->leaves_of[member];
            int64_t leaves = leaves_in(stage, &shard, low, high);
            for (int64_t n = 0; n < leaves; n++)
                *ordered++ = its[n];
            stage->leaves_of[member] += leaves;
        }
    }
}

/* ---- of tp_stage_ops --------------------------------------------------------------------------------------------------- */

static const tp_stage_base *
base_of(const tp_stage *stage)
{
    return (const tp_stage_base *)(const void *)stage;
}

tp_shard
tp_stage_shard(const tp_stage *stage, int row, int member)
{
    return tp_stage_shard_of(base_of(stage), row, member);
}

int
tp_stage_shard_rows(const tp_stage *stage)
{
    return base_of(stage)->rows;
}

float *
tp_stage_values(tp_stage *stage)
{
    const tp_stage_base *base = base_of(stage);
    return base->param[tp_stage_answers_for(base, 0) ? 0 : 1].value;
}

double *
tp_stage_squares(tp_stage *stage, int64_t *each)
{
    *each = base_of(stage)->squares_each;
    return base_of(stage)->squares;
}
