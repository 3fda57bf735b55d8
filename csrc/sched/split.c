/* B into I and W by time-driven list scheduling: the order of all other ops is kept; a W goes where its rank would wait,
 * if the wait is at least a fraction of the W (zero bubble pipelines, Qi et al. 2024, fill bubbles with W in this way).
 * Nine fractions are tried, of a large program three, and W right behind I; the best by simulation stays. A rank decides when it is
 * known how long it waits: what its input is made of waits for none of its W. Most fractions are spared without another answer:
 * those by which every rank would decide as by the one before, and those whose clocks say that they are slower. */
#include "csrc/sched/filled.h"
#include "csrc/sched/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

#define NOT_YET TP_FILLED_NOT_YET
#define EIGHTHS 8                     /* of a W: the largest threshold */
#define AT_ONCE_EIGHTHS (EIGHTHS + 1) /* what stands for AT_ONCE among them */
#define LARGE 50000                   /* instructions, from which on not every eighth is tried, but every STEP-th */
#define STEP 4
#define AT_ONCE (-1.0)                /* threshold: W right behind its I */
#define TABLES 7                      /* operations whose ticks are in tables */
#define TICKS 0x1p40                  /* of all work */
#define APART (1.0 + 1e-6)            /* so many times slower is slower, whichever of equal ones were kept */
#define LEAST_S 1e-290                /* of all work: what is divided by it stays a number */
#define LONGEST 0x1p50                /* ticks of one duration: longer ones are cut */
#define ROUNDS 0x1p52                 /* added to a double from 0 on and taken away again: to the nearest whole number */

typedef struct {
    int32_t micro, slice; /* the next in canonical order */
    int64_t count;
} cursor;

typedef struct {
    const tp_program *from; /* compute only, F and B */
    tp_program *to;
    unsigned ops;           /* tp_sched_ops, whose bits for guests, copies and halves splitting leaves alone */
    const tp_durations *d;
    int64_t units;
    int pending;
    double threshold;
    int alike;                      /* eighths up to which everybody would have decided the same */
    double *work, *left;            /* [ranks] ticks of all that the rank works but for copies of messages; of what is to come */
    double most;                    /* ticks: a program that takes longer is no better than what is known */
    double goal;                    /* ticks: nobody wants to know more of one that takes longer: the OPTs behind it, whichever ranks
                                       they are of, end later than is wanted. The same of every rank, or what is left would depend on it */
    double *limit;                  /* [ranks] within both, what its clock and `left` may be */
    double *tail;                   /* [ranks] ticks from its last I, less what the rank may do later, to the end */
    double *ready_f, *ready_b;      /* [stages * units] when it comes to its reader */
    double *ready_half;             /* the same of the first half of a forward */
    tp_filled_given given;
    int32_t *orders, *order, *spare; /* tp_filled's: room for both; of what is filled; of the best, or nobody's */
    int64_t filled;                 /* instructions */
    uint8_t *halves;                /* tp_sched_halves */
    tp_sched_links links;
    double *clock;                  /* [ranks] */
    const double **waiting;         /* [ranks] */
    int64_t *next, *write;          /* [ranks] */
    cursor *input, *weight;         /* [stages] next I, next W */
    int32_t *stage_of, *next_stage; /* [ranks], [stages] the stages of a rank as a list; -1 ends it */
    int32_t *stack;                 /* [ranks] that may go on */
    int stacked;
    const double *table[TP_OPS];    /* [stages * units] ticks of each operation on a whole slice; NULL: in no table */
    const double *lag[2];           /* the same of messages forward and back */
    double per_s, *latency;         /* ticks; [2 * stages] of links, NULL: they carry any number of messages at once */
    int64_t asked;                  /* steps since somebody was asked whether to stop */
} filler;

/* Clocks count whole ticks, a small part of all work: their sums are exact, so that what comes at the same time does so whatever the
 * costs are multiplied by, and ranks decide by their rule, not by rounding. */
static double
in_ticks(const filler *f, double seconds)
{
    double ticks = seconds * f->per_s;
    return (ticks < LONGEST ? ticks : LONGEST) + ROUNDS - ROUNDS;
}

static double
ticks_of(const filler *f, int op, unsigned flags, int stage, int64_t unit)
{
    if (f->table[op] != NULL && flags == 0)
        return f->table[op][stage * f->units + unit];
    return in_ticks(f, tp_durations_s(f->d, op, flags, stage, unit));
}

static double
lag_of(const filler *f, int back, unsigned flags, int stage, int64_t unit)
{
    if (flags == 0)
        return f->lag[back][stage * f->units + unit];
    return in_ticks(f, tp_durations_lag_s(f->d, f->units, back, flags, stage, unit));
}

/* Of whole slices, once for all fractions. table: [(TABLES + 2) * stages * units]. */
static void
fill_tables(filler *f, double *table)
{
    static const int ops[TABLES] = {TP_OP_F, TP_OP_I, TP_OP_W, TP_OP_SF, TP_OP_RF, TP_OP_SB, TP_OP_RB};
    for (int k = 0; k < TABLES + 2; k++) {
        int op = k < TABLES ? ops[k] : -1, back = k - TABLES;
        if (op >= 0 && f->d->seconds[op] == NULL)
            continue;
        double *at = table + k * f->from->stages * f->units;
        for (int v = 0; v < f->from->stages; v++)
            for (int64_t unit = 0; unit < f->units; unit++)
                at[v * f->units + unit] = in_ticks(f, op >= 0 ? tp_durations_s(f->d, op, 0, v, unit)
                                                              : tp_durations_lag_s(f->d, f->units, back, 0, v, unit));
        *(op >= 0 ? &f->table[op] : &f->lag[back]) = at;
    }
}

static tp_status
count_ticks(filler *f)
{
    static const int ops[] = {TP_OP_F, TP_OP_I, TP_OP_W};
    int stages = f->from->stages;
    double total = 0.0;
    for (int v = 0; v < stages; v++)
        for (int64_t unit = 0; unit < f->units; unit++) {
            for (int i = 0; i < 3; i++)
                total += tp_durations_s(f->d, ops[i], 0, v, unit);
            total += tp_durations_lag_s(f->d, f->units, 0, 0, v, unit);
        }
    f->per_s = TICKS / fmax(total, LEAST_S);
    if (f->d->latency_s == NULL)
        return TP_OK;
    f->latency = malloc(2 * (size_t)stages * sizeof *f->latency);
    if (f->latency == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the latencies of %d stages", stages);
    for (int at = 0; at < 2 * stages; at++)
        f->latency[at] = in_ticks(f, f->d->latency_s[at]);
    return TP_OK;
}

/* What comes behind a rank's last I: those of the same slice down to the first stage, and a W there. Of its own W those of the latest
 * `pending` micro-batches may come behind it, too; where each is at once, only that of this I; and what its list has behind it, an
 * update by micro-batches. */
static void
count_tail(filler *f, int rank)
{
    const tp_program *p = f->from;
    int64_t k = p->begin[rank + 1] - 1;
    double ticks = 0.0;
    f->tail[rank] = 0.0;
    for (; k >= p->begin[rank] && p->code[k].op != TP_OP_B; k--)
        ticks -= ticks_of(f, p->code[k].op, p->code[k].flags, p->code[k].stage, tp_program_unit(p, &p->code[k]));
    if (!f->given.exact || p->copies > 1 || k < p->begin[rank])
        return;
    int stage = p->code[k].stage;
    int64_t unit = tp_program_unit(p, &p->code[k]);
    for (; !tp_program_is_first(p, stage); stage--)
        ticks += (p->rank_of[stage] != p->rank_of[stage - 1] ? lag_of(f, 1, 0, stage, unit) : 0.0) +
                 ticks_of(f, TP_OP_I, 0, stage - 1, unit);
    if (stage < p->code[k].stage)
        ticks += ticks_of(f, TP_OP_W, 0, stage, unit);
    if (f->pending == 0)
        ticks -= ticks_of(f, TP_OP_W, 0, p->code[k].stage, unit);
    for (int v = f->pending == 0 ? -1 : f->stage_of[rank]; v >= 0; v = f->next_stage[v])
        for (int q = p->micros > f->pending ? p->micros - f->pending : 0; q < p->micros; q++)
            for (int slice = 0; slice < p->slices[q]; slice++)
                ticks -= ticks_of(f, TP_OP_W, 0, v, p->offset[q] + slice);
    f->tail[rank] = ticks;
}

/* Of the step's end: what every rank has before they meet, and what some rank has behind that. */
static double
ends(const filler *f)
{
    const tp_program *p = f->from;
    double least = INFINITY, most = 0.0;
    for (int r = 0; r < p->ranks; r++) {
        double before = 0.0, after = 0.0, part;
        for (int v = f->stage_of[r]; v >= 0; v = f->next_stage[v]) {
            after += tp_durations_update_s(f->d, v, &part) - part;
            before += part;
        }
        least = fmin(least, before);
        most = fmax(most, after);
    }
    return (least + most) * f->per_s;
}

/* Of each rank, with the W that it is to have, and what comes behind. */
static void
count_work(filler *f, double goal_s)
{
    const tp_program *p = f->from;
    f->goal = f->given.exact ? goal_s * APART * f->per_s - ends(f) + 4.0 * tp_filled_slack(p) : INFINITY;
    for (int r = 0; r < p->ranks; r++) {
        f->work[r] = 0.0;
        for (int64_t k = p->begin[r]; k < p->begin[r + 1]; k++) {
            const tp_instr *i = &p->code[k];
            int64_t unit = tp_program_unit(p, i);
            f->work[r] += ticks_of(f, i->op == TP_OP_B ? TP_OP_I : i->op, i->flags, i->stage, unit);
            f->work[r] += i->op == TP_OP_B ? ticks_of(f, TP_OP_W, 0, i->stage, unit) : 0.0;
        }
        count_tail(f, r);
    }
}

static void
advance(const tp_program *p, cursor *c)
{
    c->count++;
    if (--c->slice < 0 && ++c->micro < p->micros)
        c->slice = p->slices[c->micro] - 1;
}

/* Micro-batches of a stage whose I has begun and whose W is not complete. */
static int
open_micros(const filler *f, int stage)
{
    const cursor *i = &f->input[stage];
    int begun = i->micro + (i->micro < f->from->micros && i->slice < f->from->slices[i->micro] - 1);
    return begun - f->weight[stage].micro;
}

static void
emit(filler *f, int rank, int op, int stage, int micro, int slice, unsigned flags)
{
    f->order[f->filled++] = (int32_t)f->write[rank];
    f->to->code[f->write[rank]++] = (tp_instr){.op = (uint16_t)op,
                                               .stage = (uint16_t)stage,
                                               .micro = (uint16_t)micro,
                                               .slice = (uint16_t)slice,
                                               .peer = -1,
                                               .flags = (uint16_t)(tp_sched_is_swap(op) ? flags : flags & ~TP_OVERLAPS)};
    /* a W may come between two that overlapped */
}

static double
weight_s(const filler *f, int stage)
{
    const cursor *w = &f->weight[stage];
    return ticks_of(f, TP_OP_W, 0, stage, f->from->offset[w->micro] + w->slice);
}

/* The rank works for so many ticks, after a copy. */
static void
work_for(filler *f, int rank, double copy, double ticks)
{
    f->clock[rank] += copy + ticks;
    f->left[rank] -= ticks;
}

static void
run_weight(filler *f, int rank, int stage)
{
    cursor *w = &f->weight[stage];
    work_for(f, rank, 0.0, weight_s(f, stage));
    emit(f, rank, TP_OP_W, stage, w->micro, w->slice, 0);
    advance(f->from, w);
}

/* The stage of this rank with most W's waiting (the lowest of equals); -1: none waits. */
static int
fullest(const filler *f, int rank)
{
    int best = -1;
    int64_t most = 0;
    for (int v = f->stage_of[rank]; v >= 0; v = f->next_stage[v])
        if (f->input[v].count - f->weight[v].count > most) {
            most = f->input[v].count - f->weight[v].count;
            best = v;
        }
    return best;
}

/* Flags of the message that brings the input of a forward. */
static unsigned
message_in(const filler *f, const tp_instr *i, int64_t unit)
{
    int apart = f->halves != NULL && f->halves[(i->stage - 1) * f->units + unit] & TP_SCHED_APART;
    return apart ? i->flags & TP_HALVES : 0;
}

/* Ticks until the input of `i` is there. *cell: where that will be told, NULL if it is known already or there is none. */
static double
wait_of(const filler *f, int rank, const tp_instr *i, const double **cell, double *copy_s)
{
    const tp_program *p = f->from;
    int forward = i->op == TP_OP_F, backward = i->op == TP_OP_B, maker = forward ? i->stage - 1 : i->stage + 1;
    *cell = NULL;
    *copy_s = 0.0;
    if ((!forward && !backward) || (forward ? tp_program_is_first(p, i->stage) : tp_program_is_last(p, i->stage)))
        return 0.0;
    int64_t unit = tp_program_unit(p, i);
    int first = forward && i->flags & TP_HALF_FIRST;
    unsigned in = forward ? message_in(f, i, unit) : 0;
    const double *from = (first ? f->ready_half : forward ? f->ready_f : f->ready_b) + maker * f->units + unit;
    if (*from < 0.0) {
        *cell = from;
        return 0.0;
    }
    if (p->rank_of[maker] != rank && (in || !(i->flags & TP_HALF_SECOND))) /* a whole message comes with the first half */
        *copy_s = ticks_of(f, forward ? TP_OP_RF : TP_OP_RB, in, i->stage, unit);
    return *from - f->clock[rank];
}

/* The output of an op leaves: its reader may sleep until it is known when. */
static void
leave(filler *f, int rank, const tp_instr *i, int64_t unit)
{
    const tp_program *p = f->from;
    int forward = i->op == TP_OP_F, stage = i->stage, reader = forward ? stage + 1 : stage - 1;
    unsigned halves = forward ? tp_sched_leaving(p, i) : TP_HALVES, flags = tp_sched_message_flags(halves);
    if ((forward ? tp_program_is_last(p, stage) : tp_program_is_first(p, stage)) || halves == 0)
        return;
    int other = p->rank_of[reader];
    double there = f->clock[rank];
    if (other != rank) {
        double lag = lag_of(f, !forward, flags, stage, unit);
        f->clock[rank] += ticks_of(f, forward ? TP_OP_SF : TP_OP_SB, flags, stage, unit);
        there = tp_sched_links_send(&f->links, !forward, stage, f->clock[rank], lag) + lag;
    }
    double *cells[] = {f->ready_half, forward ? f->ready_f : f->ready_b};
    for (int k = forward && halves & TP_HALF_FIRST ? 0 : 1; k < (halves & TP_HALF_SECOND ? 2 : 1); k++) {
        double *cell = cells[k] + stage * f->units + unit;
        *cell = there;
        if (f->waiting[other] == cell) {
            f->waiting[other] = NULL;
            f->stack[f->stacked++] = other;
        }
    }
}

static void
run_op(filler *f, int rank, const tp_instr *i, double copy_s)
{
    const tp_program *p = f->from;
    int forward = i->op == TP_OP_F, backward = i->op == TP_OP_B, op = backward ? TP_OP_I : i->op;
    int64_t unit = tp_program_unit(p, i);
    work_for(f, rank, copy_s, ticks_of(f, op, i->flags, i->stage, unit));
    emit(f, rank, op, i->stage, i->micro, i->slice, i->flags & ~TP_WITHIN); /* there is no B that it is within */
    f->to->code[f->write[rank] - 1].peer = i->peer;
    f->next[rank]++;
    if (backward)
        advance(p, &f->input[i->stage]);
    if (forward || backward)
        leave(f, rank, i, unit);
}

/* One decision of one rank; 0: it is at its end, or sleeps until `waiting` is told. */
static int
decide(filler *f, int rank)
{
    const tp_program *p = f->from;
    int full = fullest(f, rank);
    if (f->next[rank] == p->begin[rank + 1]) {
        if (full < 0)
            return 0;
        run_weight(f, rank, full);
        return 1;
    }
    const tp_instr *i = &p->code[f->next[rank]];
    if (full >= 0 && f->threshold == AT_ONCE) {
        run_weight(f, rank, full);
        return 1;
    }
    if (i->op == TP_OP_U && f->weight[i->stage].micro <= i->micro) {
        run_weight(f, rank, i->stage);
        return 1;
    }
    int begins = i->op == TP_OP_B && i->slice == p->slices[i->micro] - 1;
    if (begins && open_micros(f, i->stage) >= f->pending && f->input[i->stage].count > f->weight[i->stage].count) {
        run_weight(f, rank, i->stage);
        return 1;
    }
    const double *cell;
    double copy_s, wait = wait_of(f, rank, i, &cell, &copy_s);
    if (cell != NULL) {
        f->waiting[rank] = cell;
        return 0;
    }
    if (wait > 0.0 && full >= 0) {
        double weight = weight_s(f, full);
        if (wait >= f->threshold * weight) {
            while (wait < f->alike / 8.0 * weight)
                f->alike--;
            run_weight(f, rank, full);
            return 1;
        }
    }
    f->clock[rank] += wait > 0.0 ? wait : 0.0;
    run_op(f, rank, i, copy_s);
    return 1;
}

/* *slower: it was left where it was known to take more than `most`. */
static tp_status
fill(filler *f, int *slower)
{
    const tp_program *p = f->from;
    *slower = 0;
    f->alike = f->threshold == AT_ONCE ? AT_ONCE_EIGHTHS : EIGHTHS;
    for (int64_t c = 0; c < (f->halves == NULL ? 2 : 3) * p->stages * f->units; c++)
        f->ready_f[c] = NOT_YET; /* and of ready_b and ready_half, behind it */
    for (int v = 0; v < p->stages; v++) {
        int first = tp_program_micro_begin(p, v);
        f->input[v] = f->weight[v] = (cursor){first, p->slices[first] - 1, 0};
    }
    tp_sched_links_reset(&f->links, f->d);
    f->links.latency_s = f->latency;
    f->stacked = 0;
    f->filled = 0;
    for (int r = 0; r < p->ranks; r++) {
        f->limit[r] = fmin(f->most, f->goal) - fmax(0.0, f->tail[r]);
        f->next[r] = p->begin[r];
        f->write[r] = f->to->begin[r];
        f->clock[r] = 0.0;
        f->left[r] = f->work[r];
        f->waiting[r] = NULL;
        f->stack[f->stacked++] = r;
    }
    while (f->stacked > 0) {
        int rank = f->stack[--f->stacked];
        do {
            TP_TRY(tp_deadline_check_after(&f->asked, 16));
            *slower = f->clock[rank] + f->left[rank] > f->limit[rank];
        } while (!*slower && decide(f, rank));
        if (*slower)
            return TP_OK;
    }
    for (int r = 0; r < p->ranks; r++)
        if (f->next[r] < p->begin[r + 1])
            return tp_fail(TP_EINTERNAL, "rank %d waits for ever in a program that check accepts", r);
    return TP_OK;
}

static tp_status
target_open(const tp_program *p, tp_program **out)
{
    int64_t *counts = malloc((size_t)p->ranks * sizeof *counts);
    if (counts == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d ranks", p->ranks);
    for (int r = 0; r < p->ranks; r++) {
        counts[r] = p->begin[r + 1] - p->begin[r];
        for (int64_t k = p->begin[r]; k < p->begin[r + 1]; k++)
            counts[r] += p->code[k].op == TP_OP_B;
    }
    tp_status status = tp_sched_open_like(p, counts, out);
    free(counts);
    return status;
}

/* The threshold behind those by which all would decide as by the one before. */
static int
next_eighths(const filler *f)
{
    int next = f->alike + 1, step = f->from->begin[f->from->ranks] < LARGE ? 1 : STEP;
    return next > EIGHTHS ? next : (next + step - 1) / step * step;
}

static tp_status
best_of(filler *f, tp_filled *best)
{
    for (int eighths = f->pending == 0 ? AT_ONCE_EIGHTHS : 0; eighths <= AT_ONCE_EIGHTHS; eighths = next_eighths(f)) {
        int slower, better = 0;
        if (f->to == NULL)
            TP_TRY(target_open(f->from, &f->to));
        f->threshold = eighths <= EIGHTHS ? eighths / 8.0 : AT_ONCE;
        f->most = best->program != NULL && tp_filled_is_known(&f->given, best) ? best->ticks + 2.0 * tp_filled_slack(f->to)
                                                                               : INFINITY;
        TP_TRY(fill(f, &slower));
        tp_filled x = {f->to, f->order, 0.0, NOT_YET};
        for (int r = 0; r < f->from->ranks; r++)
            x.ticks = fmax(x.ticks, f->clock[r]);
        if (!slower)
            TP_TRY(tp_filled_is_better(&f->given, &x, best, &better));
        if (better) {
            f->to = best->program;
            *best = x;
            f->order = f->spare;
            f->spare = x.order;
        }
    }
    return TP_OK;
}

static tp_status
request_ok(const tp_program *p, const tp_durations *d, int pending)
{
    if (pending < 0)
        return tp_fail(TP_EVALUE, "pending is %d: 0 (W right behind I) or more would be right", pending);
    if (d->seconds[TP_OP_I] == NULL || d->seconds[TP_OP_W] == NULL)
        return tp_fail(TP_EVALUE, "split needs the seconds of I and W");
    TP_TRY(tp_program_check(p));
    TP_TRY(tp_program_check_canonical(p));
    for (int r = 0; r < p->ranks; r++)
        for (int64_t k = p->begin[r]; k < p->begin[r + 1]; k++)
            if (p->code[k].op == TP_OP_I)
                return tp_sched_refuse(p, r, k - p->begin[r], "the program is split already");
    return tp_durations_check(p, d);
}

/* Room for all of f's tables. After check: cells are in proportion to the code. */
static tp_status
room_open(filler *f)
{
    const tp_program *p = f->from;
    size_t cells = (size_t)p->stages * (size_t)f->units, ranks = (size_t)p->ranks, stages = (size_t)p->stages;
    size_t length = 2 * (size_t)p->begin[p->ranks]; /* I and W of every B at most */
    f->ready_f = malloc((3 + TABLES + 2 + 2) * cells * sizeof *f->ready_f);
    f->clock = malloc(5 * ranks * sizeof *f->clock);
    f->waiting = malloc(ranks * sizeof *f->waiting);
    f->next = malloc(2 * ranks * sizeof *f->next);
    f->input = malloc(2 * stages * sizeof *f->input);
    f->stack = malloc(ranks * sizeof *f->stack);
    f->stage_of = malloc((ranks + stages) * sizeof *f->stage_of);
    f->orders = malloc(2 * length * sizeof *f->orders);
    if (f->ready_f == NULL || f->clock == NULL || f->waiting == NULL || f->next == NULL || f->input == NULL || f->stack == NULL ||
        f->stage_of == NULL || f->orders == NULL)
        return tp_fail(TP_EMEMORY, "no memory to split %lld instructions", (long long)p->begin[p->ranks]);
    f->ready_b = f->ready_f + cells;
    f->ready_half = f->ready_b + cells;
    f->given.ready_s = f->ready_half + cells;
    f->work = f->clock + ranks;
    f->left = f->work + ranks;
    f->limit = f->left + ranks;
    f->tail = f->limit + ranks;
    f->write = f->next + ranks;
    f->weight = f->input + stages;
    f->next_stage = f->stage_of + ranks;
    f->order = f->orders;
    f->spare = f->orders + length;
    memset(f->stage_of, -1, ranks * sizeof *f->stage_of);
    for (int v = p->stages - 1; v >= 0; v--) {
        f->next_stage[v] = f->stage_of[p->rank_of[v]];
        f->stage_of[p->rank_of[v]] = v;
    }
    return TP_OK;
}

static void
room_close(filler *f)
{
    tp_sched_links_close(&f->links);
    free(f->latency);
    free(f->ready_f);
    free(f->halves);
    free(f->clock);
    free(f->waiting);
    free(f->next);
    free(f->input);
    free(f->stack);
    free(f->stage_of);
    free(f->orders);
    tp_program_close(f->to);
}

static tp_status
split(filler *f, double goal_s, tp_filled *best)
{
    TP_TRY(tp_sched_halves(f->from, f->ops, &f->halves));
    if (f->d->latency_s != NULL)
        TP_TRY(tp_sched_links_open(f->from, &f->links));
    TP_TRY(room_open(f));
    f->given.replays = f->given.exact && f->halves == NULL;
    TP_TRY(count_ticks(f));
    fill_tables(f, f->given.ready_s + 2 * f->from->stages * f->units);
    count_work(f, goal_s);
    return best_of(f, best);
}

tp_status
tp_sched_split(const tp_program *compute, unsigned ops, const tp_durations *durations, int pending, double goal_s, tp_program **out)
{
    tp_filled best = {NULL, NULL, 0.0, NOT_YET};
    filler f = {.from = compute, .ops = ops, .d = durations, .units = tp_program_units(compute), .pending = pending};
    f.given = (tp_filled_given){.ops = ops, .d = durations, .units = f.units, .longest = LONGEST, .links = &f.links};
    f.given.exact = !(ops & (TP_SCHED_GUESTS | TP_SCHED_HAS_BESIDE)); /* of those the clocks here are not the simulator's */
    tp_status status = split(&f, goal_s, &best);
    room_close(&f);
    if (status != TP_OK) {
        tp_program_close(best.program);
        return status;
    }
    *out = best.program;
    return TP_OK;
}

tp_status
tp_program_split(const tp_program *program, const tp_durations *durations, int pending, tp_program **out)
{
    tp_program *compute = NULL;
    TP_TRY(tp_program_strip(program, &compute));
    tp_status status = request_ok(compute, durations, pending);
    if (status == TP_OK)
        status = tp_sched_split(compute, tp_sched_ops(compute), durations, pending, INFINITY, out);
    tp_program_close(compute);
    return status;
}
