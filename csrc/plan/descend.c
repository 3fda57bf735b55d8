/* The descent of csrc/plan/judge.h. */
#include "csrc/plan/judge_core.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"
#include "csrc/plan/arena.h"
#include "csrc/plan/descend_moves.h"

#define SLIGHT (1.0 - 1e-9)  /* less than this much better is rounding, not an improvement */
#define HOPE 1.003           /* a glance, in the order of another plan, may make a better plan look this many times as slow */
enum { TRIES = 6,            /* moves to judge, of those that a glance likes best */
       GLANCE = 500000,      /* instructions in one round of glances: milliseconds */
       RUN = 4,              /* boundaries of stages that move together: up to so many, or more where there is work for them */
       NEIGHBOURS = 4 };

/* A plan that was judged already: its fingerprint and its seconds. */
typedef struct {
    uint64_t key;
    double seconds;
    int longer; /* or longer: it was judged for this goal alone */
} seen;

typedef struct {
    tp_judge *judge;
    const tp_descent *q;
    tp_move_room room; /* the plan in hand, and the one that a move makes of it */
    double best_s;
    tp_completed hand; /* of the plan in hand */
    seen *table;
    int64_t seen_count, seen_room;
    double *glance_s; /* [moves] */
    int64_t glances;  /* room of it */
    int64_t width, stop;
    int ended; /* 1: the program in hand is the answer's */
} descent;

/* FNV-1a over the words of a plan. Should two plans share a fingerprint, the second is not looked at: that is all it costs. */
static uint64_t
fingerprint(const tp_candidate *c, int stages, int64_t units)
{
    const int32_t *part[] = {c->boundary, c->batches, c->slices, c->lengths};
    const int64_t count[] = {stages + 1, c->micros, c->micros, units};
    uint64_t hash = 14695981039346656037u;
    for (int p = 0; p < 4; p++)
        for (int64_t i = 0; i < count[p]; i++)
            hash = (hash ^ (uint32_t)part[p][i]) * 1099511628211u;
    return hash == 0 ? 1 : hash;
}

static seen *
place_of(seen *table, int64_t room, uint64_t key)
{
    uint64_t at = (key ^ key >> 29) & (uint64_t)(room - 1);
    while (table[at].key != 0 && table[at].key != key)
        at = (at + 1) & (uint64_t)(room - 1);
    return &table[at];
}

static tp_status
remember(descent *d, uint64_t key, double seconds, int longer)
{
    if (2 * d->seen_count >= d->seen_room) {
        int64_t room = d->seen_room > 0 ? 2 * d->seen_room : 256;
        seen *table = calloc((size_t)room, sizeof *table);
        if (table == NULL)
            return tp_fail(TP_EMEMORY, "no memory to remember %lld plans", (long long)room);
        for (int64_t i = 0; i < d->seen_room; i++)
            if (d->table[i].key != 0)
                *place_of(table, room, d->table[i].key) = d->table[i];
        free(d->table);
        d->table = table;
        d->seen_room = room;
    }
    seen *place = place_of(d->table, d->seen_room, key);
    d->seen_count += place->key == 0;
    *place = (seen){key, seconds, longer};
    return TP_OK;
}

static void
hold(descent *d, const tp_judge_timed *made)
{
    tp_completed_close(&d->hand, &made->of);
    d->hand = made->of;
    d->best_s = made->seconds;
}

static tp_status
over_limit(descent *d, const tp_program *program, const tp_candidate *c, int64_t *over)
{
    *over = 0;
    if (d->q->over == NULL)
        return TP_OK;
    tp_judge_count(d->judge, 20 * program->begin[program->ranks]);
    return d->q->over(d->q->context, program, c, over);
}

/* *again: it was judged before, but whether it takes longer than goal_s is not known. 1: that is known. */
static int
is_slower(const descent *d, uint64_t key, double goal_s, int *again)
{
    const seen *place = d->seen_room > 0 ? place_of(d->table, d->seen_room, key) : NULL;
    *again = 0;
    if (place == NULL || place->key != key)
        return 0;
    *again = place->longer && place->seconds < goal_s;
    return place->seconds >= goal_s;
}

/* Judge the plan that the move makes. *taken: it fits and is faster than goal_s, and is now the plan in hand. */
static tp_status
take(descent *d, const tp_move *move, double goal_s, int *taken)
{
    tp_judge_timed made;
    int64_t over = 1, before = tp_judge_work(d->judge);
    int again;
    *taken = 0;
    tp_candidate trial = tp_move_make(&d->room, move);
    uint64_t key = fingerprint(&trial, d->room.stages, d->room.trial_units);
    if (is_slower(d, key, goal_s, &again))
        return TP_OK;
    TP_TRY(tp_judge_make(d->judge, &trial, &d->hand, goal_s, &made));
    int longer = made.of.program == NULL;
    tp_status status = TP_OK;
    if (made.seconds < goal_s)
        status = over_limit(d, made.of.program, &trial, &over);
    else if (again) /* work counts what must be judged, not what was left on the way before */
        tp_judge_count(d->judge, before - tp_judge_work(d->judge));
    if (status == TP_OK)
        status = remember(d, key, longer ? goal_s : made.seconds < goal_s && over > 0 ? INFINITY : made.seconds, longer);
    if (status == TP_OK && over == 0) {
        tp_move_accept(&d->room, move);
        hold(d, &made);
        *taken = 1;
        return TP_OK;
    }
    tp_completed_close(&made.of, &d->hand);
    return status;
}

static int64_t
instructions(const descent *d)
{
    return d->hand.program->begin[d->hand.program->ranks];
}

static int
spent(const descent *d)
{
    return tp_judge_work(d->judge) >= d->stop || tp_deadline_late();
}

static tp_status
glance_each(descent *d, const tp_move *move, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        tp_durations durations;
        tp_candidate trial = tp_move_make(&d->room, &move[i]);
        TP_TRY(tp_judge_time(d->judge, &trial, d->hand.program, &durations));
        tp_sim_run(d->hand.sim, &durations, &d->glance_s[i]);
        TP_TRY(tp_deadline_check_told());
    }
    return TP_OK;
}

/* Estimate these moves into glance_s[0 .. count): their seconds if the order stays that of the plan in hand. */
static tp_status
glance(descent *d, const tp_move *move, int64_t count)
{
    if (count > d->glances) {
        free(d->glance_s);
        d->glances = 0;
        d->glance_s = malloc((size_t)count * sizeof *d->glance_s);
        if (d->glance_s == NULL)
            return tp_fail(TP_EMEMORY, "no memory for %lld moves", (long long)count);
        d->glances = count;
    }
    tp_judge_look(d->judge, d->hand.program);
    tp_status status = glance_each(d, move, count);
    tp_judge_look(d->judge, NULL);
    TP_TRY(status);
    tp_judge_count(d->judge, (10 + count) * instructions(d) + 100 * count);
    return TP_OK;
}

/* The next best move at a glance, the first of equal ones; moves with infinite seconds are done. -1: none is left. */
static int64_t
pick(const descent *d, int64_t count)
{
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (d->glance_s[i] < INFINITY && (best < 0 || d->glance_s[i] < d->glance_s[best] * SLIGHT))
            best = i;
    return best;
}

/* Try the moves of a kind round and round until none helps: in portions that a glance estimates quickly, the best of each
 * judged. */
static tp_status
go_round(descent *d, tp_move_kind kind, int step, int *helped)
{
    int64_t at = 0, tried = 0;
    TP_TRY(tp_move_list(&d->room, kind, step));
    while (tried < d->room.count && !spent(d)) {
        int taken = 0;
        at %= d->room.count;
        int64_t some = d->room.count - at < d->width ? d->room.count - at : d->width;
        TP_TRY(glance(d, d->room.move + at, some));
        for (int n = 0; n < TRIES && !taken && !spent(d); n++) {
            int64_t i = pick(d, some);
            if (i < 0 || !(d->glance_s[i] < d->best_s * HOPE))
                break;
            d->glance_s[i] = INFINITY;
            TP_TRY(take(d, &d->room.move[at + i], d->best_s * SLIGHT, &taken));
        }
        if (taken) {
            *helped = 1;
            tried = 0;
            TP_TRY(tp_move_list(&d->room, kind, step));
        } else {
            at += some;
            tried += some;
        }
    }
    return TP_OK;
}

/* Try other numbers of slices; a glance cannot estimate them, because the order changes. */
static tp_status
recount(descent *d, int *helped)
{
    int taken = 0;
    TP_TRY(tp_move_list(&d->room, TP_MOVE_RECOUNT, 0));
    for (int64_t i = 0; i < d->room.count && !taken && !spent(d); i++)
        TP_TRY(take(d, &d->room.move[i], d->best_s * SLIGHT, &taken));
    *helped |= taken;
    return TP_OK;
}

/* The most boundaries that move together: as many as can be tried with a quarter of the work. */
static int
longest_run(const descent *d, int64_t work)
{
    int64_t glances = work / 4 / (instructions(d) + 1), run = glances / (2 * d->room.stages);
    return run < RUN ? RUN : run < d->room.stages ? (int)run : d->room.stages;
}

static tp_status
descend(descent *d, int64_t work)
{
    int helped = 1, run = longest_run(d, work);
    d->stop = tp_judge_work(d->judge) + work;
    while (helped && !spent(d)) {
        helped = 0;
        if (!d->q->fixed_stages && d->room.stages > 1)
            TP_TRY(go_round(d, TP_MOVE_BOUNDARY, run, &helped));
        if (d->q->fixed_slices)
            continue;
        TP_TRY(go_round(d, TP_MOVE_BEND, 0, &helped));
        int step = d->q->unit;
        while (step <= tp_move_longest(&d->room) / 4)
            step *= 2;
        for (; step >= d->q->unit; step /= 2)
            TP_TRY(go_round(d, TP_MOVE_SHIFT, step, &helped));
        TP_TRY(recount(d, &helped));
    }
    return TP_OK;
}

/* Escape a local optimum: from each of the best neighbours of the plan in hand, base, descend. *top: the best of all ends. */
static tp_status
look_beside(descent *d, const tp_move_plan *base, tp_move_plan *top, double *top_s)
{
    int64_t near[NEIGHBOURS], count = 0;
    tp_move moves[NEIGHBOURS];
    TP_TRY(tp_move_list(&d->room, TP_MOVE_BOUNDARY, RUN));
    TP_TRY(glance(d, d->room.move, d->room.count));
    for (; count < NEIGHBOURS && (near[count] = pick(d, d->room.count)) >= 0; count++) {
        moves[count] = d->room.move[near[count]];
        d->glance_s[near[count]] = INFINITY;
    }
    for (int64_t i = 0; i < count; i++) {
        int taken;
        tp_move_copy(&d->room, &d->room.plan, base);
        TP_TRY(take(d, &moves[i], INFINITY, &taken));
        if (taken)
            TP_TRY(descend(d, d->q->beside));
        if (taken && d->best_s < *top_s * SLIGHT) {
            *top_s = d->best_s;
            tp_move_copy(&d->room, top, &d->room.plan);
        }
    }
    return TP_OK;
}

/* A move, with its plan's program, seconds, and bytes over the limit, to be compared with others. */
typedef struct {
    tp_move move;
    tp_judge_timed made;
    int64_t over;
} weighed;

static void
put_down(const descent *d, weighed *w)
{
    tp_completed_close(&w->made.of, &d->hand);
}

static tp_status
weigh(descent *d, const tp_move *move, weighed *out)
{
    tp_candidate trial = tp_move_make(&d->room, move);
    *out = (weighed){.move = *move};
    TP_TRY(tp_judge_make(d->judge, &trial, &d->hand, INFINITY, &out->made));
    tp_status status = over_limit(d, out->made.of.program, &trial, &out->over);
    if (status != TP_OK)
        put_down(d, out);
    return status;
}

/* The lightest of these moves and *best. */
static tp_status
weigh_all(descent *d, tp_move_kind kind, weighed *best)
{
    TP_TRY(tp_move_list(&d->room, kind, RUN));
    for (int64_t i = 0; i < d->room.count && !spent(d); i++) {
        weighed w;
        TP_TRY(weigh(d, &d->room.move[i], &w));
        if (w.over < best->over ||
            (w.over == best->over && best->made.of.program != NULL && w.made.seconds < best->made.seconds)) {
            put_down(d, best);
            *best = w;
        } else {
            put_down(d, &w);
        }
    }
    return TP_OK;
}

/* Bring the plan in hand under the limit, by the moves that leave the fewest bytes over it; or as near as they get. */
static tp_status
mend(descent *d, int64_t *over)
{
    d->stop = tp_judge_work(d->judge) + d->q->work;
    while (*over > 0 && !spent(d)) {
        weighed best = {.over = *over};
        tp_status status = TP_OK;
        if (!d->q->fixed_stages && d->room.stages > 1)
            status = weigh_all(d, TP_MOVE_BOUNDARY, &best);
        if (status == TP_OK && !d->q->fixed_slices)
            status = weigh_all(d, TP_MOVE_RECOUNT, &best);
        if (status != TP_OK || best.made.of.program == NULL) {
            put_down(d, &best);
            return status;
        }
        tp_move_accept(&d->room, &best.move);
        hold(d, &best.made);
        *over = best.over;
    }
    return TP_OK;
}

/* What is in hand is good even where there was no time to judge the next plan. */
static tp_status
unless_late(tp_status status)
{
    return status == TP_ETIMEOUT ? TP_OK : status;
}

static tp_status
run(descent *d, tp_arena *arena, tp_move_plan *top, double *top_s, int64_t *over)
{
    tp_move_plan base;
    TP_TRY(tp_move_plan_open(arena, &d->room, top));
    TP_TRY(tp_move_plan_open(arena, &d->room, &base));
    weighed start;
    TP_TRY(weigh(d, &(tp_move){.kind = TP_MOVE_NONE}, &start));
    *over = start.over;
    hold(d, &start.made);
    d->best_s = *top_s;
    d->width = GLANCE / (instructions(d) + 1);
    d->width = d->width < 8 ? 8 : d->width;
    TP_TRY(unless_late(mend(d, over)));
    if (*over == 0)
        TP_TRY(unless_late(descend(d, d->q->work)));
    *top_s = d->best_s;
    tp_move_copy(&d->room, top, &d->room.plan);
    d->ended = *over > 0 || d->q->beside <= 0 || d->q->fixed_stages || d->q->fixed_slices || d->room.stages < 2;
    if (d->ended)
        return TP_OK;
    tp_move_copy(&d->room, &base, top);
    return look_beside(d, &base, top, top_s);
}

static tp_status
give(descent *d, const tp_move_plan *top, double makespan_s, int64_t over, tp_descended *out)
{
    tp_move_copy(&d->room, &d->room.plan, top);
    tp_candidate c = tp_move_start(&d->room);
    int64_t stages = d->room.stages + 1, units = d->room.trial_units;
    size_t words = (size_t)(stages + 2 * c.micros + units);
    int32_t *memory = malloc(words * sizeof *memory);
    if (memory == NULL)
        return tp_fail(TP_EMEMORY, "no memory for a plan of %lld slices", (long long)units);
    memcpy(memory, c.boundary, (size_t)stages * sizeof *memory);
    memcpy(memory + stages, c.batches, (size_t)c.micros * sizeof *memory);
    memcpy(memory + stages + c.micros, c.slices, (size_t)c.micros * sizeof *memory);
    memcpy(memory + stages + 2 * c.micros, c.lengths, (size_t)units * sizeof *memory);
    c.boundary = memory;
    c.batches = memory + stages;
    c.slices = c.batches + c.micros;
    c.lengths = c.slices + c.micros;
    *out = (tp_descended){c, makespan_s, over, NULL, memory};
    if (d->ended) {
        out->program = d->hand.program;
        d->hand.program = NULL;
        return TP_OK;
    }
    tp_status status = tp_judge_run(d->judge, &out->plan, &out->program, &makespan_s);
    if (status != TP_OK)
        tp_descended_close(out);
    return status;
}

tp_status
tp_judge_descend(tp_judge *judge, const tp_candidate *start, double makespan_s, const tp_descent *q, tp_descended *out)
{
    const tp_judge_request *asked = tp_judge_asked(judge);
    tp_durations durations;
    tp_arena arena;
    tp_move_plan top;
    int64_t over = 0;
    descent d = {.judge = judge, .q = q};
    if (q->unit < 1)
        return tp_fail(TP_EVALUE, "unit is %d tokens: at least 1 would be right", q->unit);
    TP_TRY(tp_judge_time(judge, start, NULL, &durations)); /* refuses what does not fit together */
    TP_TRY(tp_arena_open(&arena));
    tp_status status = tp_move_open(&arena, start, asked->ranks * asked->chunks, q->fixed_slices ? 0 : q->unit, &d.room);
    if (status == TP_OK)
        status = run(&d, &arena, &top, &makespan_s, &over);
    if (status == TP_OK)
        status = give(&d, &top, makespan_s, over, out);
    tp_completed_close(&d.hand, NULL);
    free(d.table);
    free(d.glance_s);
    tp_move_close(&d.room);
    tp_arena_close(&arena);
    return status;
}

void
tp_descended_close(tp_descended *descended)
{
    tp_program_close(descended->program);
    free(descended->memory);
    descended->program = NULL;
    descended->memory = NULL;
}
