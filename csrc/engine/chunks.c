/* Decides exactly whether a partition fits a limit of memory where layers are alike and each rank has one stage in every row of
 * stages (chunks in turn, or that turn back); in polynomial time for a given number of rows. What a stage takes depends on how many
 * blocks it has and on the kind of the first, so that neighbours need only know whether the boundary between them cuts a layer: a
 * mask has that for all rows. For each rank: the most blocks that fit, by the mask that its stages begin with and the one that they
 * end with (min-plus knapsack); rank after rank is joined by masks (max-plus product of matrices). A stage takes no less with one
 * more block, so fewer blocks fit too: for one choice of masks every number between the fewest and the most is possible. Where it
 * would take two choices, the answer may be TP_UNKNOWN. */
#include "csrc/engine/internal.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

#define NEVER TP_ENGINE_NEVER
#define NONE (-INT16_MAX / 2)
#define MOST_BLOCKS (INT16_MAX / 4) /* twice as many for each stage, or NONE and all, are within 16 bits */
#define MOST_ROWS 10
#define MOST_CELLS ((int64_t)1 << 24) /* of matrices */
#define MOST_WORK 20000000           /* sums of bytes */
#define MOST_WORKSPACES 16           /* of a rank, one for each kind of stage that it may have */

/* A mask has a bit for each row: does a layer go on where the row crosses from one rank to the next? At its ends, too. */
typedef struct {
    tp_engine_sizes *sizes;
    int16_t *most;    /* [ranks][masks before][masks behind] blocks that fit a rank; below 0: not even the fewest do */
    int16_t *fit;     /* [masks * masks] the same of one rank by the ways of its stages, two bits each */
    int16_t *reach;   /* [ranks + 1][masks] the most of the ranks before, from the mask that is asked for; below 0: none lead there */
    int16_t *fewest;  /* [ranks + 1][masks] the fewest; 0: they are no question */
    int16_t *least;   /* [masks before][masks behind] the fewest blocks of a rank: two of a stage that begins as it ends, one of others */
    int64_t *held;    /* [rows + 1][blocks + 1] the least bytes of so many blocks in the rows before, up to `top` */
    int64_t *behind;  /* [rows + 1] the least of the rows from one on */
    int32_t *length;  /* [stages] */
    int32_t *named;   /* [masks before][masks behind] by which ways of its stages a rank leads there */
    int64_t workspace[MOST_WORKSPACES];
    int64_t limit, work;
    int32_t *boundary;
    int top[MOST_ROWS + 1]; /* the most blocks in the rows before that fit; below 0: none do */
    int turns[MOST_ROWS];   /* does the row go from the last rank to the first? */
    int rows, ranks, blocks, stages, masks, workspaces, ways, named_ways; /* ways: that are told apart */
} chunker;

static int
stage_of(const chunker *x, int rank, int row)
{
    return row * x->ranks + (x->turns[row] ? x->ranks - 1 - rank : rank);
}

/* Is every row once over the ranks, up or down? */
static int
look_at_rows(chunker *x)
{
    const tp_program *program = x->sizes->config.program;
    for (int row = 0; row < x->rows; row++) {
        x->turns[row] = x->ranks > 1 && program->rank_of[row * x->ranks] > 0;
        for (int rank = 0; rank < x->ranks; rank++) {
            int stage = stage_of(x, rank, row);
            if (program->rank_of[stage] != rank || x->sizes->host[stage] >= 0)
                return 0;
        }
    }
    return 1;
}

/* Of so many blocks from an even or an odd one on, wherever that is; NEVER: a stage that has an end does not begin, or stop, there. */
static tp_engine_size
size_of(chunker *x, int stage, int odd, int blocks)
{
    int last = stage == x->stages - 1, from = stage == 0 ? 0 : last ? x->blocks - blocks : odd ? 1 : 2;
    if (from % 2 != odd || from + blocks > x->blocks - !last)
        return (tp_engine_size){NEVER, NEVER, NEVER};
    return tp_engine_size_of(x->sizes, stage, from, from + blocks);
}

static int
fits(const chunker *x, int rank, int64_t bytes, int64_t workspace)
{
    return bytes < NEVER && (int64_t)tp_align_bytes((size_t)(x->sizes->beside[rank] + bytes)) + workspace <= x->limit;
}

static int
is_too_much(const chunker *x)
{
    return x->work > MOST_WORK || tp_deadline_late();
}

/* ---- one rank ------------------------------------------------------------------------------------------------------------ */

static int64_t
least_of(chunker *x, int stage)
{
    return tp_engine_lesser_size(size_of(x, stage, 0, 1), size_of(x, stage, 1, 1)).stage;
}

static void
look_behind(chunker *x, int rank)
{
    x->behind[x->rows] = 0;
    for (int row = x->rows - 1; row >= 0; row--)
        x->behind[row] = x->behind[row + 1] + least_of(x, stage_of(x, rank, row));
}

/* 0: there are more than are looked at. */
static int
keep_workspace(chunker *x, int64_t workspace)
{
    int at = 0;
    while (at < x->workspaces && x->workspace[at] < workspace)
        at++;
    if (at < x->workspaces && x->workspace[at] == workspace)
        return 1;
    if (x->workspaces == MOST_WORKSPACES)
        return 0;
    memmove(&x->workspace[at + 1], &x->workspace[at], (size_t)(x->workspaces - at) * sizeof *x->workspace);
    x->workspace[at] = workspace;
    x->workspaces++;
    return 1;
}

/* All workspaces that its stages may have, sorted, and whether an even number of blocks takes as much wherever it begins. 0: there
 * are more than are looked at. */
static int
look_at_stages(chunker *x, int rank)
{
    x->workspaces = 0;
    x->ways = 3;
    for (int i = 0; i < 2 * x->rows; i++) {
        int stage = stage_of(x, rank, i / 2), odd = i % 2;
        int64_t others = x->behind[0] - least_of(x, stage);
        for (int blocks = 1; blocks <= x->blocks - x->stages + 1; blocks++) {
            tp_engine_size size = size_of(x, stage, odd, blocks), other = size_of(x, stage, !odd, blocks);
            if (size.stage >= NEVER)
                continue;
            if (!fits(x, rank, others + size.stage, size.workspace))
                break;
            if (!keep_workspace(x, size.workspace))
                return 0;
            if (blocks % 2 == 0 && other.stage < NEVER && (other.stage != size.stage || other.workspace != size.workspace))
                x->ways = 4;
        }
    }
    return 1;
}

static int64_t *
held_by(const chunker *x, int row)
{
    return &x->held[(size_t)row * ((size_t)x->blocks + 1)];
}

static int64_t
held(const chunker *x, int row, int blocks)
{
    return blocks <= x->top[row] ? held_by(x, row)[blocks] : NEVER;
}

/* These bytes, too. */
static void
hold(chunker *x, int row, int blocks, int64_t bytes)
{
    int64_t *least = held_by(x, row);
    for (int n = x->top[row] < 0 ? 0 : x->top[row] + 1; n <= blocks; n++)
        least[n] = NEVER;
    x->top[row] = blocks > x->top[row] ? blocks : x->top[row];
    least[blocks] = bytes < least[blocks] ? bytes : least[blocks];
}

/* The least bytes with one row more, whose stage begins and ends as is said. 0: nothing fits. */
static int
add_row(chunker *x, int rank, int row, int begin, int end, int64_t workspace)
{
    const int64_t *before = held_by(x, row);
    int stage = stage_of(x, rank, row), most = x->blocks - x->stages + x->rows;
    x->top[row + 1] = NONE;
    for (int blocks = begin == end ? 2 : 1; blocks <= x->blocks - x->stages + 1; blocks += 2) {
        tp_engine_size size = size_of(x, stage, begin, blocks);
        int fit = 0, n = row;
        for (; size.workspace <= workspace && n <= x->top[row] && n + blocks <= most; n++) {
            if (before[n] >= NEVER)
                continue;
            if (!fits(x, rank, before[n] + size.stage + x->behind[row + 1], workspace))
                break; /* more take more */
            hold(x, row + 1, n + blocks, before[n] + size.stage);
            fit = 1; /* where others take less, too: what a stage remakes shares room, and a longer one may take less than they do */
        }
        x->work += n - row + 1;
        if (!fit && size.stage < NEVER)
            break;
    }
    return x->top[row + 1] > 0;
}

/* Ways in which a stage begins and ends: as it began, whatever that is (if its bytes do not depend on it), or from one to the other. */
enum { EVEN, FROM_EVEN, FROM_ODD, EVEN_FROM_ODD };
static int
begin_of(const chunker *x, int stage, int way)
{
    if (way != EVEN)
        return way >= FROM_ODD;
    return stage == x->stages - 1 ? x->blocks % 2 : stage > 0; /* behind the first block there is room for one more than elsewhere */
}

static void
add_rows(chunker *x, int rank, int row, int ways, int64_t workspace)
{
    if (row == x->rows) {
        x->fit[ways] = x->top[row] > x->fit[ways] ? (int16_t)x->top[row] : x->fit[ways];
        return;
    }
    for (int way = 0; way < x->ways && !is_too_much(x); way++) {
        int begin = begin_of(x, stage_of(x, rank, row), way), end = way == EVEN || way == EVEN_FROM_ODD ? begin : !begin;
        if (add_row(x, rank, row, begin, end, workspace))
            add_rows(x, rank, row + 1, ways | way << 2 * row, workspace);
    }
}

/* By which ways of all rows a rank leads from mask to mask. What begins where no first stage does, or ends where no last one may, is
 * as one that does: closes() leaves it out. */
static void
name_ways(chunker *x, int row, int before, int behind, int ways)
{
    if (row == x->rows) {
        x->named[before * x->masks + behind] = ways;
        return;
    }
    for (int i = 0; i < 4; i++) {
        int begin = i & 1, end = i >> 1, way = begin != end ? FROM_EVEN + begin : begin && x->named_ways > 3 ? EVEN_FROM_ODD : EVEN;
        name_ways(x, row + 1, before | (x->turns[row] ? end : begin) << row, behind | (x->turns[row] ? begin : end) << row,
                  ways | way << 2 * row);
    }
}

static void
spread(chunker *x, int rank)
{
    int cells = x->masks * x->masks;
    int16_t *most = &x->most[(size_t)rank * (size_t)cells];
    if (x->named_ways != x->ways) {
        x->named_ways = x->ways;
        name_ways(x, 0, 0, 0, 0);
    }
    for (int i = 0; i < cells; i++)
        most[i] = x->fit[x->named[i]];
}

static void
start_rows(chunker *x)
{
    x->top[0] = 0;
    x->held[0] = 0;
}

/* The most blocks of the rank for all masks. TP_NO: it has room for none. */
static tp_answer
look_at_rank(chunker *x, int rank)
{
    int16_t most = NONE;
    look_behind(x, rank);
    if (!look_at_stages(x, rank))
        return TP_UNKNOWN;
    start_rows(x);
    for (int i = 0; i < x->masks * x->masks; i++)
        x->fit[i] = NONE;
    for (int i = 0; i < x->workspaces; i++)
        add_rows(x, rank, 0, 0, x->workspace[i]);
    for (int i = 0; i < x->masks * x->masks; i++)
        most = x->fit[i] > most ? x->fit[i] : most;
    spread(x, rank);
    return most > 0 ? TP_YES : TP_NO;
}

/* ---- all ranks ----------------------------------------------------------------------------------------------------------- */

static void
join_most(size_t masks, int16_t all, const int16_t *restrict most, int16_t *restrict reached)
{
    for (size_t behind = 0; behind < masks; behind++) {
        int16_t sum = (int16_t)(all + most[behind]);
        reached[behind] = sum > reached[behind] ? sum : reached[behind];
    }
}

static void
join_fewest(size_t masks, int16_t all, const int16_t *restrict most, const int16_t *restrict least, int16_t *restrict few)
{
    for (size_t behind = 0; behind < masks; behind++) {
        int16_t sum = (int16_t)(all + least[behind]);
        sum = most[behind] < 0 ? -NONE : sum;
        few[behind] = sum < few[behind] ? sum : few[behind];
    }
}

/* One rank more. */
static void
join(chunker *x, int rank)
{
    size_t masks = (size_t)x->masks, at = (size_t)rank * masks;
    int16_t *reached = &x->reach[at + masks], *few = &x->fewest[at + masks];
    int scarce = x->blocks < 2 * x->stages;
    for (size_t i = 0; i < masks; i++) {
        reached[i] = NONE;
        few[i] = scarce ? -NONE : 0;
    }
    for (size_t before = 0; before < masks; before++) {
        const int16_t *most = &x->most[(at + before) * masks];
        if (x->reach[at + before] < 0)
            continue;
        join_most(masks, x->reach[at + before], most, reached);
        if (scarce)
            join_fewest(masks, x->fewest[at + before], most, &x->least[before * masks], few);
    }
    for (size_t i = 0; i < masks; i++) /* more is as good, odd or even as it is */
        if (reached[i] > x->blocks + 1)
            reached[i] = (int16_t)(x->blocks + ((reached[i] ^ x->blocks) & 1));
}

static void
join_all(chunker *x, int first)
{
    for (int i = 0; i < x->masks; i++)
        x->reach[i] = i == first ? 0 : NONE;
    memset(x->fewest, 0, (size_t)x->masks * sizeof *x->fewest);
    for (int rank = 0; rank < x->ranks; rank++)
        join(x, rank);
}

/* Does each row begin as the one before it ends, the first with the first block, and does the last one end with the last block? */
static int
closes(const chunker *x, int first, int last)
{
    int ended = 0;
    for (int row = 0; row < x->rows; row++) {
        int begins = (x->turns[row] ? last : first) >> row & 1;
        if (begins != ended)
            return 0;
        ended = (x->turns[row] ? first : last) >> row & 1;
    }
    return ended == x->blocks % 2;
}

/* ---- the stages ---------------------------------------------------------------------------------------------------------- */

/* So many blocks of one rank, by the way of least bytes. */
static int
fill_rank(chunker *x, int rank, int before, int behind, int blocks)
{
    look_behind(x, rank);
    if (!look_at_stages(x, rank))
        return 0;
    start_rows(x);
    for (int i = 0; i < x->workspaces; i++) {
        int row = 0, left = blocks;
        for (int go = 1; go && row < x->rows; row += go) {
            int here = before >> row & 1, there = behind >> row & 1;
            go = add_row(x, rank, row, x->turns[row] ? there : here, x->turns[row] ? here : there, x->workspace[i]);
        }
        if (row < x->rows || held(x, row, blocks) >= NEVER)
            continue;
        while (row-- > 0) {
            int stage = stage_of(x, rank, row), begin = (x->turns[row] ? behind : before) >> row & 1, n = 1;
            while (n < left && held(x, row, left - n) + size_of(x, stage, begin, n).stage != held(x, row + 1, left))
                n++;
            x->length[stage] = n;
            left -= n;
        }
        return left == 0;
    }
    return 0;
}

/* So many blocks of the ranks before this one, as even as their masks let them be. */
static int
fill_ranks(chunker *x, int ranks, int behind, int blocks)
{
    size_t masks = (size_t)x->masks;
    if (ranks == 0)
        return blocks == 0 && x->reach[behind] == 0;
    for (int before = 0; before < x->masks && !is_too_much(x); before++) {
        size_t at = ((size_t)ranks - 1) * masks + (size_t)before;
        int most = x->most[at * masks + (size_t)behind], few = x->least[(size_t)before * masks + (size_t)behind], share = blocks / ranks;
        if (most < 0 || x->reach[at] < 0)
            continue;
        int low = blocks - x->reach[at] > few ? blocks - x->reach[at] : few;
        int high = blocks - x->fewest[at] < most ? blocks - x->fewest[at] : most;
        share = share < low ? low : share > high ? high : share;
        share -= (share ^ few) & 1; /* all numbers between that fit are odd, or even */
        if (low <= high && fill_rank(x, ranks - 1, before, behind, share) &&
            fill_ranks(x, ranks - 1, before, blocks - share))
            return 1;
    }
    return 0;
}

static int
trace(chunker *x, int last, int64_t *bytes)
{
    if (!fill_ranks(x, x->ranks, last, x->blocks))
        return 0;
    x->boundary[0] = 0;
    for (int stage = 0; stage < x->stages; stage++)
        x->boundary[stage + 1] = x->boundary[stage] + x->length[stage];
    return tp_engine_sizes_count(x->sizes, x->boundary, bytes) <= x->limit;
}

static tp_answer
look_from(chunker *x, int first, int64_t *bytes)
{
    size_t masks = (size_t)x->masks;
    tp_answer answer = TP_NO;
    int joined = 0;
    for (int last = 0; last < x->masks && answer != TP_YES; last++) {
        size_t end = (size_t)x->ranks * masks + (size_t)last;
        if (!closes(x, first, last))
            continue;
        if (!joined)
            join_all(x, first);
        joined = 1;
        if (x->reach[end] >= x->blocks && x->fewest[end] <= x->blocks)
            answer = trace(x, last, bytes) ? TP_YES : TP_UNKNOWN;
    }
    return is_too_much(x) && answer != TP_YES ? TP_UNKNOWN : answer;
}

static tp_answer
look(chunker *x, int64_t *bytes)
{
    tp_answer answer = TP_NO;
    for (int rank = 0; rank < x->ranks; rank++) {
        answer = look_at_rank(x, rank);
        if (answer != TP_YES)
            return is_too_much(x) ? TP_UNKNOWN : answer;
    }
    answer = is_too_much(x) ? TP_UNKNOWN : TP_NO;
    for (int first = 0; first < x->masks && answer == TP_NO; first++)
        answer = look_from(x, first, bytes);
    return answer;
}

/* Of products, over all masks from which any row can begin. */
static int64_t
sums_of(const chunker *x)
{
    int64_t sums = 0;
    for (int first = 0; first < x->masks; first++)
        for (int last = 0; last < x->masks; last++)
            if (closes(x, first, last)) {
                sums += (int64_t)x->ranks << 2 * x->rows;
                break;
            }
    return sums;
}

static int
count_bits(size_t mask)
{
    int bits = 0;
    for (; mask != 0; mask &= mask - 1)
        bits++;
    return bits;
}

static int
take_room(chunker *x)
{
    size_t ranks = (size_t)x->ranks, rows = (size_t)x->rows, blocks = (size_t)x->blocks, masks = (size_t)x->masks;
    size_t cells = (ranks + 2) * masks * masks;
    x->most = malloc((cells + 2 * (ranks + 1) * masks) * sizeof *x->most);
    x->held = malloc(((rows + 1) * (blocks + 1) + rows + 1) * sizeof *x->held);
    x->length = malloc(((size_t)x->stages + masks * masks) * sizeof *x->length);
    if (x->most == NULL || x->held == NULL || x->length == NULL)
        return 0;
    x->named = x->length + x->stages;
    x->fit = x->most + ranks * masks * masks;
    x->least = x->fit + masks * masks;
    for (size_t before = 0; before < masks; before++)
        for (size_t behind = 0; behind < masks; behind++)
            x->least[before * masks + behind] = (int16_t)(2 * x->rows - count_bits(before ^ behind));
    x->reach = x->most + cells;
    x->fewest = x->reach + (ranks + 1) * masks;
    x->behind = x->held + (rows + 1) * (blocks + 1);
    return 1;
}

tp_status
tp_engine_find_chunks(tp_engine_sizes *sizes, int64_t limit, int64_t sums, int32_t *boundary, tp_answer *answer)
{
    const tp_program *program = sizes->config.program;
    chunker x = {.sizes = sizes, .limit = limit, .boundary = boundary, .blocks = sizes->blocks, .ranks = program->ranks,
                 .stages = program->stages, .rows = program->stages / program->ranks};
    *answer = TP_UNKNOWN;
    if (!sizes->alike || tp_program_copy_stages(program) != x.stages || x.stages % x.ranks != 0 || x.rows > MOST_ROWS ||
        x.stages < 3 || x.blocks > MOST_BLOCKS || ((int64_t)x.ranks << 2 * x.rows) > MOST_CELLS || !look_at_rows(&x))
        return TP_OK;
    x.masks = 1 << x.rows;
    if (sums_of(&x) > sums)
        return TP_OK;
    int64_t *bytes = malloc((size_t)x.ranks * sizeof *bytes);
    tp_status status = TP_OK;
    if (bytes != NULL && take_room(&x))
        *answer = look(&x, bytes);
    else
        status = tp_fail(TP_EMEMORY, "no memory to look for stages of %d ranks", x.ranks);
    free(bytes);
    free(x.most);
    free(x.held);
    free(x.length);
    return status == TP_OK ? tp_deadline_check_told() : status;
}
