#include "csrc/plan/descend_moves.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the plan ------------------------------------------------------------------------------------------------------------ */

tp_status
tp_move_plan_open(tp_arena *arena, const tp_move_room *room, tp_move_plan *out)
{
    TP_ARENA_TAKE(arena, room->stages + 1, out->boundary);
    TP_ARENA_TAKE(arena, room->most, out->size);
    TP_ARENA_TAKE(arena, room->most, out->slices);
    TP_ARENA_TAKE(arena, (int64_t)room->most * room->room, out->lengths);
    TP_ARENA_TAKE(arena, room->micros, out->pattern_of);
    out->patterns = 0;
    return TP_OK;
}

void
tp_move_copy(const tp_move_room *room, tp_move_plan *to, const tp_move_plan *from)
{
    to->patterns = from->patterns;
    memcpy(to->boundary, from->boundary, ((size_t)room->stages + 1) * sizeof *to->boundary);
    memcpy(to->size, from->size, (size_t)room->most * sizeof *to->size);
    memcpy(to->slices, from->slices, (size_t)room->most * sizeof *to->slices);
    memcpy(to->lengths, from->lengths, (size_t)room->most * (size_t)room->room * sizeof *to->lengths);
    memcpy(to->pattern_of, from->pattern_of, (size_t)room->micros * sizeof *to->pattern_of);
}

static int
is_pattern(const tp_move_room *room, int p, int32_t size, int32_t slices, const int32_t *lengths)
{
    const tp_move_plan *plan = &room->plan;
    return plan->size[p] == size && plan->slices[p] == slices &&
           memcmp(plan->lengths + (size_t)p * (size_t)room->room, lengths, (size_t)slices * sizeof *lengths) == 0;
}

/* Which of the first `count` patterns it is; `count` if none. */
static int
find(const tp_move_room *room, int count, int32_t size, int32_t slices, const int32_t *lengths)
{
    int p = 0;
    while (p < count && !is_pattern(room, p, size, slices, lengths))
        p++;
    return p;
}

/* Runs of equal micro-batches: no fewer than patterns. */
static int
count_patterns(const tp_candidate *start)
{
    int count = 0;
    const int32_t *lengths = start->lengths;
    for (int32_t q = 0; q < start->micros; lengths += start->slices[q++])
        count += q == 0 || start->batches[q] != start->batches[q - 1] || start->slices[q] != start->slices[q - 1] ||
                 memcmp(lengths, lengths - start->slices[q], (size_t)start->slices[q] * sizeof *lengths) != 0;
    return count;
}

tp_status
tp_move_open(tp_arena *arena, const tp_candidate *start, int stages, int unit, tp_move_room *out)
{
    int64_t units = 0, tokens = 0, longest = 0;
    for (int32_t q = 0; q < start->micros; q++) {
        int64_t sum = 0;
        for (int32_t s = 0; s < start->slices[q]; s++)
            sum += start->lengths[units + s];
        units += start->slices[q];
        tokens = sum > tokens ? sum : tokens;
        longest = start->slices[q] > longest ? start->slices[q] : longest;
    }
    int64_t room = longest + (unit > 0 ? tokens / unit : 0);
    if (room > 65536) /* tp_instr.slice */
        room = 65536;
    *out = (tp_move_room){.order = start->order, .pending = start->pending, .stages = stages, .unit = unit,
                          .micros = start->micros, .room = (int32_t)room, .most = count_patterns(start)};
    TP_TRY(tp_move_plan_open(arena, out, &out->plan));
    TP_ARENA_TAKE(arena, stages + 1, out->boundary);
    TP_ARENA_TAKE(arena, start->micros, out->batches);
    TP_ARENA_TAKE(arena, start->micros, out->slices);
    TP_ARENA_TAKE(arena, start->micros * room, out->lengths);
    TP_ARENA_TAKE(arena, room, out->changed);
    memcpy(out->plan.boundary, start->boundary, ((size_t)stages + 1) * sizeof *start->boundary);
    const int32_t *lengths = start->lengths;
    for (int32_t q = 0; q < start->micros; lengths += start->slices[q++]) {
        int p = find(out, out->plan.patterns, start->batches[q], start->slices[q], lengths);
        if (p == out->plan.patterns) {
            out->plan.patterns++;
            out->plan.size[p] = start->batches[q];
            out->plan.slices[p] = start->slices[q];
            memcpy(out->plan.lengths + (size_t)p * (size_t)room, lengths, (size_t)start->slices[q] * sizeof *lengths);
        }
        out->plan.pattern_of[q] = p;
    }
    return TP_OK;
}

void
tp_move_close(tp_move_room *room)
{
    free(room->move);
    room->move = NULL;
}

static int32_t *
lengths_of(const tp_move_room *room, int p)
{
    return room->plan.lengths + (size_t)p * (size_t)room->room;
}

int32_t
tp_move_longest(const tp_move_room *room)
{
    int32_t longest = 0;
    for (int p = 0; p < room->plan.patterns; p++)
        for (int32_t s = 0; s < room->plan.slices[p]; s++)
            longest = lengths_of(room, p)[s] > longest ? lengths_of(room, p)[s] : longest;
    return longest;
}

/* ---- what a move makes --------------------------------------------------------------------------------------------------- */

/* New slices of the pattern, in room->changed; how many. */
static int32_t
change(tp_move_room *room, const tp_move *move)
{
    const int32_t *old = lengths_of(room, move->pattern);
    int32_t *new = room->changed, count = room->plan.slices[move->pattern];
    memcpy(new, old, (size_t)count * sizeof *new);
    if (move->kind == TP_MOVE_SHIFT) {
        new[move->at] += move->by;
        new[move->to] -= move->by;
    } else if (move->kind == TP_MOVE_BEND) {
        double total = 0.0, x = 0.0;
        int32_t before = 0, tokens = 0;
        for (int32_t s = 0; s < count; s++)
            total += old[s];
        for (int32_t s = 0; s < count; s++) {
            tokens += old[s];
            x = tokens / total;
            double bend = move->at == 0 ? x * (1.0 - x) : x * (1.0 - x) * (1.0 - 2.0 * x);
            double units = rint((x + move->to / 100.0 * bend) * (total / room->unit));
            int32_t end = s == count - 1 ? (int32_t)total : (int32_t)units * room->unit;
            new[s] = end - before;
            before = end;
        }
    } else if (move->by == 0) {
        new[move->at] += new[move->at + 1];
        memmove(new + move->at + 1, old + move->at + 2, (size_t)(count - move->at - 2) * sizeof *new);
        count--;
    } else {
        int32_t part = old[move->at] / 2 / room->unit * room->unit;
        new[move->at] -= part;
        memmove(new + move->at + 2, old + move->at + 1, (size_t)(count - move->at - 1) * sizeof *new);
        new[move->at + 1] = part;
        count++;
    }
    return count;
}

tp_candidate
tp_move_make(tp_move_room *room, const tp_move *move)
{
    const tp_move_plan *plan = &room->plan;
    int changes = move->kind > TP_MOVE_BOUNDARY;
    int32_t count = changes ? change(room, move) : 0;
    memcpy(room->boundary, plan->boundary, ((size_t)room->stages + 1) * sizeof *room->boundary);
    if (move->kind == TP_MOVE_BOUNDARY)
        for (int32_t k = move->at + 1; k <= move->at + move->to; k++)
            room->boundary[k] += move->by;
    int64_t unit = 0;
    for (int32_t q = 0; q < room->micros; q++) {
        int p = plan->pattern_of[q], mine = changes && p == move->pattern;
        room->batches[q] = plan->size[p];
        room->slices[q] = mine ? count : plan->slices[p];
        memcpy(room->lengths + unit, mine ? room->changed : lengths_of(room, p), (size_t)room->slices[q] * sizeof *room->lengths);
        unit += room->slices[q];
    }
    room->trial_units = unit;
    return (tp_candidate){.order = room->order,     .pending = room->pending, .micros = room->micros, .boundary = room->boundary,
                          .batches = room->batches, .slices = room->slices,   .lengths = room->lengths};
}

tp_candidate
tp_move_start(tp_move_room *room)
{
    return tp_move_make(room, &(tp_move){.kind = TP_MOVE_NONE});
}

void
tp_move_accept(tp_move_room *room, const tp_move *move)
{
    tp_move_plan *plan = &room->plan;
    if (move->kind == TP_MOVE_BOUNDARY) {
        for (int32_t k = move->at + 1; k <= move->at + move->to; k++)
            plan->boundary[k] += move->by;
        return;
    }
    int32_t count = change(room, move);
    int p = move->pattern, same = find(room, plan->patterns, plan->size[p], count, room->changed);
    if (same == plan->patterns) {
        plan->slices[p] = count;
        memcpy(lengths_of(room, p), room->changed, (size_t)count * sizeof *room->changed);
        return;
    }
    int gone = same < p ? p : same, stays = same < p ? same : p; /* they are alike from now on: the earlier one's place */
    if (stays == p) {
        plan->slices[p] = count;
        memcpy(lengths_of(room, p), room->changed, (size_t)count * sizeof *room->changed);
    }
    plan->patterns--;
    for (int at = gone; at < plan->patterns; at++) {
        plan->size[at] = plan->size[at + 1];
        plan->slices[at] = plan->slices[at + 1];
        memcpy(lengths_of(room, at), lengths_of(room, at + 1), (size_t)plan->slices[at] * sizeof *plan->lengths);
    }
    for (int32_t q = 0; q < room->micros; q++) {
        if (plan->pattern_of[q] == gone)
            plan->pattern_of[q] = stays;
        else if (plan->pattern_of[q] > gone)
            plan->pattern_of[q]--;
    }
}

/* ---- which moves there are ----------------------------------------------------------------------------------------------- */

static tp_status
add(tp_move_room *room, tp_move move)
{
    if (room->count == room->moves) {
        int64_t more = room->moves > 0 ? 2 * room->moves : 256;
        tp_move *moves = realloc(room->move, (size_t)more * sizeof *moves);
        if (moves == NULL)
            return tp_fail(TP_EMEMORY, "no memory for %lld moves", (long long)more);
        room->move = moves;
        room->moves = more;
    }
    room->move[room->count++] = move;
    return TP_OK;
}

/* Every boundary one block to either side, and every run of so many boundaries together. */
static tp_status
list_boundaries(tp_move_room *room, int run)
{
    const int32_t *b = room->plan.boundary;
    for (int width = 1; width <= run && width < room->stages; width++)
        for (int at = 0; at + width < room->stages; at++)
            for (int by = 1; by >= -1; by -= 2)
                if (b[at + 1] + by > b[at] && b[at + width] + by < b[at + width + 1])
                    TP_TRY(add(room, (tp_move){TP_MOVE_BOUNDARY, 0, at, width, by}));
    return TP_OK;
}

static tp_status
list_shifts(tp_move_room *room, int p, int step)
{
    const int32_t *lengths = lengths_of(room, p);
    int32_t last = room->plan.slices[p] - 1;
    for (int32_t i = 0; i < last; i++) {
        const int32_t far[] = {i + 1, i + 2 < last ? i + 2 : last, i + 4 < last ? i + 4 : last, last};
        for (int n = 0; n < 4; n++)
            for (int32_t by = step; by >= -step && (n == 0 || far[n] > far[n - 1]); by -= 2 * step)
                if (lengths[i] + by >= room->unit && lengths[far[n]] - by >= room->unit)
                    TP_TRY(add(room, (tp_move){TP_MOVE_SHIFT, p, i, far[n], by}));
    }
    return TP_OK;
}

static int
is_good(tp_move_room *room, const tp_move *move)
{
    int32_t count = change(room, move), least = room->changed[0];
    for (int32_t s = 1; s < count; s++)
        least = room->changed[s] < least ? room->changed[s] : least;
    return least >= room->unit &&
           memcmp(room->changed, lengths_of(room, move->pattern), (size_t)count * sizeof *room->changed) != 0;
}

static tp_status
list_bends(tp_move_room *room, int p)
{
    static const int percents[] = {2, 5, 10, 20, 40};
    for (int shape = 0; shape < 2 && room->plan.slices[p] > 1; shape++)
        for (size_t n = 0; n < sizeof percents / sizeof percents[0]; n++)
            for (int sign = 1; sign >= -1; sign -= 2) {
                tp_move move = {TP_MOVE_BEND, p, shape, sign * percents[n], 0};
                if (is_good(room, &move))
                    TP_TRY(add(room, move));
            }
    return TP_OK;
}

static tp_status
list_recounts(tp_move_room *room, int p)
{
    int32_t count = room->plan.slices[p];
    for (int32_t i = 0; i + 1 < count; i++)
        TP_TRY(add(room, (tp_move){TP_MOVE_RECOUNT, p, i, 0, 0}));
    for (int32_t i = 0; i < count && count < room->room; i++)
        if (lengths_of(room, p)[i] / 2 >= room->unit)
            TP_TRY(add(room, (tp_move){TP_MOVE_RECOUNT, p, i, 0, 1}));
    return TP_OK;
}

tp_status
tp_move_list(tp_move_room *room, tp_move_kind kind, int step)
{
    room->count = 0;
    if (kind == TP_MOVE_BOUNDARY)
        return list_boundaries(room, step);
    for (int p = 0; p < room->plan.patterns; p++) {
        if (kind == TP_MOVE_SHIFT)
            TP_TRY(list_shifts(room, p, step));
        else if (kind == TP_MOVE_BEND)
            TP_TRY(list_bends(room, p));
        else
            TP_TRY(list_recounts(room, p));
    }
    return TP_OK;
}
