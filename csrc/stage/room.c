/* The memory of a stage, whatever computes it: arenas walked once to count and once to carve. */
#include "csrc/stage/describe.h"

void *
tp_lay(tp_stage_arena *from, int64_t count, size_t size)
{
    void *at = from->base == NULL ? NULL : from->base + from->used;
    from->used += ((size_t)count * size + from->align - 1) / from->align * from->align;
    return at;
}

void
tp_lay_params(tp_stage_base *stage, tp_stage_arena *from)
{
    const size_t before = from->used;
    for (int i = 0; i < stage->params; i++) { /* together: replicas add them as one array */
        stage->param[i].grad_at = (int64_t)((from->used - before) / sizeof(float));
        if (tp_stage_answers_for(stage, i))
            stage->param[i].grad = tp_lay_floats(from, stage->param[i].floats);
    }
    for (int i = 0; i < stage->params; i++) /* in the same order: of a sharded stage replicas gather them */
        stage->param[i].value = stage->param[i].first_value = tp_lay_floats(from, stage->param[i].floats);
    if (stage->config.shards)
        tp_lay_shards(stage, from);
    for (int i = 0; i < stage->params; i++) {
        tp_stage_param *param = &stage->param[i];
        if (tp_stage_answers_for(stage, i) && !stage->config.shards) {
            param->m = tp_lay_floats(from, param->floats);
            param->v = tp_lay_floats(from, param->floats);
        }
        param->copy = param->first_copy = param->copy_count > 0 ? tp_lay_elements(from, param->copy_count) : NULL;
    }
}

static tp_activations *
activations_of(const tp_stage_base *stage, int block, int slot)
{
    char *first = (char *)stage->block[block].activations;
    return (tp_activations *)(void *)(first + (size_t)slot * stage->sizes.activations);
}

static tp_gradients *
gradients_of(const tp_stage_base *stage, int block, int slot)
{
    char *first = (char *)stage->block[block].gradients;
    return (tp_gradients *)(void *)(first + (size_t)slot * stage->sizes.gradients);
}

static tp_inner
lay_inner(const tp_stage_base *stage, const tp_stage_block *block, int64_t rows, int64_t h_rows, tp_stage_arena *from)
{
    int64_t width = stage->config.model.n_embd;
    tp_inner out = {0};
    if (stage->sizes.keeps_norm)
        out.norm = tp_lay_elements(from, rows * width);
    if (block->kind == TP_ATTENTION) {
        if (!stage->sizes.keeps_queries || !tp_stage_keeps_keys(stage, block)) /* else the slot has them */
            out.qkv = tp_lay_elements(from, rows * 3 * width);
        out.o = tp_lay_elements(from, rows * width);
    } else {
        out.h = tp_lay_elements(from, h_rows * 4 * width);
        out.g = tp_lay_elements(from, rows * 4 * width);
    }
    return out;
}

static int
has_inner(const tp_stage_block *block)
{
    return block->kind == TP_ATTENTION || block->kind == TP_FFN;
}

static void
lay_activation_slot(tp_stage_base *stage, int slot, tp_stage_arena *from, tp_lay_activations *activations)
{
    for (int i = 0; i < stage->blocks; i++) {
        tp_stage_block *block = &stage->block[i];
        if (block->kind == TP_EMBEDDING)
            continue;
        void *input = activations(stage, block, activations_of(stage, i, slot), from);
        if (has_inner(block) && !block->saves)
            block->made[slot] = lay_inner(stage, block, tp_stage_rows(stage), tp_stage_rows(stage), from);
        if (tp_stage_keeps_keys(stage, block))
            *tp_stage_kept_keys(stage, &block->made[slot]) = tp_lay_elements(
                from, tp_stage_rows(stage) * (2 + stage->sizes.keeps_queries) * stage->config.model.n_embd);
        if (i == 0)
            stage->end[TP_END_INPUT][slot] = input;
    }
}

/* What messages leave from. */
static void *
lay_leaving(tp_stage_base *stage, tp_stage_arena *ends)
{
    size_t begin = ends->used;
    void *end = tp_lay_elements(ends, tp_stage_rows(stage) * stage->config.model.n_embd);
    stage->lent_bytes += ends->used - begin;
    return end;
}

/* Rows of one slice alone, with behind them the most that a W leaves to the next; where it moves them seldom, the most of a slice with
 * its own. Not so where forward takes the first rows while there are such (`between`). */
static int64_t
rows_of_slice(const tp_stage_base *stage, int between)
{
    const tp_slicing *slicing = stage->config.slicing;
    int64_t left = 0, own = 0;
    for (int32_t q = 0; q < slicing->micros; q++) {
        const tp_micro *cut = &slicing->micro[q];
        int64_t whole = (int64_t)cut->batch * slicing->seq_len;
        own = cut->slices == 1 && whole > own ? whole : own;
        for (int32_t s = 0; s < cut->slices && cut->slices > 1; s++) {
            int64_t mine = tp_stage_groups_begin(stage, cut, s) - cut->start[s];
            int64_t with = tp_stage_groups_begin(stage, cut, s + 1) - cut->start[s];
            left = mine > left ? mine : left;
            own = with > own ? with : own;
        }
    }
    int64_t most = slicing->max_rows + left;
    return stage->sizes.moves_seldom && !between && own < most ? own : most;
}

static int
is_within(const tp_stage_base *stage, const tp_stage_block *block)
{
    return stage->config.remake_within && block->saves == TP_REMAKES;
}

/* What backwards by blocks share, whatever the slot, as one ends before the next begins: room for the gradients, and what is made again
 * right before them, of whichever block of the stage takes most; and two places in turn for what I of a block leaves to the block below:
 * W of a block reads the one when its I has written the other. */
typedef struct {
    char *block;
    void *turn[2];
} back_room;

static back_room
lay_back_room(const tp_stage_base *stage, tp_stage_arena *from, tp_lay_gradients *gradients)
{
    back_room room = {NULL, {NULL, NULL}};
    size_t most = 0;
    for (int i = 0; i < stage->blocks; i++) {
        tp_stage_arena one = {NULL, 0, from->align, from->element};
        if (stage->block[i].kind != TP_EMBEDDING)
            gradients(stage, &stage->block[i], NULL, gradients_of(stage, i, 0), &one);
        if (is_within(stage, &stage->block[i]))
            lay_inner(stage, &stage->block[i], stage->remade_rows, stage->remade_rows, &one);
        most = one.used > most ? one.used : most;
    }
    room.block = tp_lay(from, (int64_t)most, 1);
    for (int i = 1; i < stage->blocks && i <= 2; i++)
        room.turn[i % 2] = tp_lay_elements(from, stage->slice_rows * stage->config.model.n_embd);
    return room;
}

/* What one block's I leaves to the block below is as short-lived as what R brings; what messages bring and take is the whole
 * micro-batch's. */
static void
lay_gradient_slot(tp_stage_base *stage, int slot, tp_stage_arena *from, tp_stage_arena *ends, tp_lay_gradients *gradients,
                  const back_room *shared)
{
    int by_block = stage->config.by_block;
    tp_stage_arena room = {shared->block, 0, from->align, from->element};
    int64_t rows = stage->remade_rows, one = stage->config.slicing->max_rows;
    int64_t h_rows = stage->config.remake_slices && stage->sizes.leaves_h ? one : rows;
    for (int i = 0; i < stage->blocks; i++) {
        tp_stage_block *block = &stage->block[i];
        if (block->kind == TP_EMBEDDING)
            continue;
        void *d_input = shared->turn[i % 2];
        if (i == 0)
            d_input = lay_leaving(stage, ends);
        else if (!by_block)
            d_input = tp_lay_elements(from, stage->slice_rows * stage->config.model.n_embd);
        room.used = 0;
        gradients(stage, block, d_input, gradients_of(stage, i, slot), by_block ? &room : from);
        if (is_within(stage, block))
            block->remade[slot] = lay_inner(stage, block, rows, rows, &room);
        else if (has_inner(block) && block->saves)
            block->remade[slot] = lay_inner(stage, block, rows, h_rows, from);
        if (i == 0)
            stage->end[TP_END_INPUT_GRADIENT][slot] = d_input;
    }
}

static int
is_sliced(const tp_slicing *slicing)
{
    int most = 1;
    for (int32_t q = 0; q < slicing->micros; q++)
        most = slicing->micro[q].slices > most ? slicing->micro[q].slices : most;
    return most > 1;
}

/* Where blocks that keep nothing for their backward go forward: one place for all that remake of a kind, but where later slices
 * read the keys and values of earlier ones, of the micro-batch that is going forward, each attention that does not keep these has
 * its own. What is swapped leaves after all blocks of the stage: each has its own, where it will be brought back if that cannot
 * meet, or two, so that one may leave beside the work in the other. What is made again within B goes forward in its room. */
static void
lay_forward_room(tp_stage_base *stage, tp_stage_arena *from)
{
    tp_inner room[TP_BLOCK_KINDS + 1]; /* the last: of the block that swaps */
    int begun[TP_BLOCK_KINDS] = {0}, sliced = is_sliced(stage->config.slicing), one = stage->sizes.slice_room;
    int64_t slice = stage->config.slicing->max_rows;
    for (int i = 0; i < stage->blocks; i++) {
        tp_stage_block *block = &stage->block[i];
        int keys = tp_stage_keeps_keys(stage, block);
        int64_t rows = one && (block->kind == TP_FFN || keys) ? slice : tp_stage_rows(stage);
        if (block->saves == TP_KEEPS)
            continue;
        tp_inner *mine = &room[block->saves == TP_SWAPS ? TP_BLOCK_KINDS : block->kind];
        if ((block->saves == TP_SWAPS && stage->config.one_room) || is_within(stage, block))
            *mine = block->remade[0];
        else if (block->saves == TP_SWAPS || !begun[block->kind])
            *mine = lay_inner(stage, block, rows, rows, from);
        else if (sliced && block->kind == TP_ATTENTION && !keys)
            mine->qkv = tp_lay_elements(from, tp_stage_rows(stage) * 3 * stage->config.model.n_embd);
        begun[block->kind] |= block->saves == TP_REMAKES;
        tp_inner other = *mine;
        if (block->saves == TP_SWAPS && stage->config.two_places && stage->config.activation_slots > 1)
            other = lay_inner(stage, block, rows, rows, from);
        for (int slot = 0; slot < stage->config.activation_slots; slot++) {
            void *kept = *tp_stage_kept_keys(stage, &block->made[slot]);
            block->made[slot] = slot % 2 ? other : *mine;
            if (keys)
                *tp_stage_kept_keys(stage, &block->made[slot]) = kept;
        }
    }
}

/* Of an arena that only counts, the slots behind the first, which takes what there is since `begin`: all take as much, and planners
 * ask often. Gives the last. */
static int
count_others(tp_stage_base *stage, tp_stage_arena *from, size_t begin, size_t lent_begin, int slots)
{
    from->used += (size_t)(slots - 1) * (from->used - begin);
    stage->lent_bytes += (size_t)(slots - 1) * (stage->lent_bytes - lent_begin);
    return slots - 1;
}

void
tp_lay_slots(tp_stage_base *stage, tp_stage_arena *from, tp_lay_activations *activations, tp_lay_gradients *gradients)
{
    int64_t count = tp_stage_rows(stage) * stage->config.model.n_embd;
    int heads = tp_stage_heads(stage);
    tp_stage_arena lent = {stage->config.lent, 0, from->align, from->element}, *ends = lent.base == NULL ? from : &lent;
    stage->lent_bytes = 0;
    int between = stage->config.one_room == TP_ROOM_BETWEEN_SLICES, keeps_place = stage->sizes.moves_seldom || stage->config.one_room;
    int one = stage->config.slice_gradients || stage->config.remake_slices;
    if (one && !keeps_place && rows_of_slice(stage, 0) >= tp_stage_rows(stage)) /* room for all takes no more */
        stage->config.slice_gradients = stage->config.remake_slices = 0;
    stage->slice_rows = stage->config.slice_gradients ? rows_of_slice(stage, 0) : tp_stage_rows(stage);
    stage->remade_rows = stage->slice_rows;
    if (between || stage->config.remake_slices != stage->config.slice_gradients)
        stage->remade_rows = stage->config.remake_slices ? rows_of_slice(stage, between) : tp_stage_rows(stage);
    stage->slots = from->base == NULL ? NULL : from->base + from->used;
    for (int slot = 0; slot < stage->config.activation_slots; slot++) {
        size_t begin = from->used, lent_begin = stage->lent_bytes;
        lay_activation_slot(stage, slot, from, activations);
        stage->guest_bytes = from->used - begin;
        if (!heads) /* it has been sent before the backward: no part of what that reads */
            stage->end[TP_END_OUTPUT][slot] = lay_leaving(stage, ends);
        stage->slot_bytes = from->used - begin;
        if (from->base == NULL)
            slot = count_others(stage, from, begin, lent_begin, stage->config.activation_slots);
    }
    back_room shared = {NULL, {NULL, NULL}};
    if (stage->config.by_block && stage->config.gradient_slots > 0)
        shared = lay_back_room(stage, from, gradients);
    for (int slot = 0; slot < stage->config.gradient_slots; slot++) {
        size_t begin = from->used, lent_begin = stage->lent_bytes;
        lay_gradient_slot(stage, slot, from, ends, gradients, &shared);
        if (!heads)
            stage->end[TP_END_OUTPUT_GRADIENT][slot] = tp_lay_elements(from, count);
        if (from->base == NULL)
            slot = count_others(stage, from, begin, lent_begin, stage->config.gradient_slots);
    }
    lay_forward_room(stage, from);
}

void
tp_lay_store(tp_stage_base *stage, tp_stage_arena *from)
{
    for (int i = 0; i < stage->blocks; i++)
        for (int slot = 0; stage->block[i].saves == TP_SWAPS && slot < stage->config.activation_slots; slot++)
            stage->block[i].stored[slot] = lay_inner(stage, &stage->block[i], tp_stage_rows(stage), tp_stage_rows(stage), from);
}

size_t
tp_stage_store_bytes(tp_stage_base *stage)
{
    tp_stage_arena from = {NULL, 0, TP_ALIGN, stage->sizes.element};
    tp_lay_store(stage, &from);
    return from.used;
}

tp_stage_bytes
tp_stage_bytes_of(tp_stage_base *stage, size_t memory)
{
    return (tp_stage_bytes){tp_align_bytes(memory), stage->lent_bytes, tp_stage_store_bytes(stage), stage->guest_bytes};
}
