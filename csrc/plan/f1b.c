#include "csrc/plan/f1b.h"

#include <math.h>
#include <string.h>

#include "csrc/base/deadline.h"

enum { POLL = 64 }; /* slots between two questions whether to stop */

/* A row holds the last end of every stage: the even stages, then the odd ones, each half with room on both sides for the
 * neighbours that stage 0 and the last stage do not have (-inf). */
static inline int
cell_of(const tp_f1b *f, int stage)
{
    return (stage & 1) * f->half + 1 + (stage >> 1);
}

static int
slots_of(const tp_f1b *f)
{
    return 2 * (f->stages + f->micros - 1);
}

static tp_status
take_doubles(tp_arena *arena, size_t count, double **out)
{
    void *memory = NULL;
    TP_TRY(tp_arena_take(arena, count, sizeof(double), &memory));
    *out = memory;
    return TP_OK;
}

tp_status
tp_f1b_open(tp_arena *arena, int stages, int micros, double comm_s, int blocking, tp_f1b *f)
{
    *f = (tp_f1b){.stages = stages, .micros = micros, .half = stages / 2 + 2, .top = stages - 1};
    f->lag_s = blocking ? 0.0 : comm_s;
    int slots = slots_of(f);
    f->width = 2 * f->half;
    f->chunk = (int)ceil(sqrt(slots));
    size_t width = (size_t)f->width, chunk = (size_t)f->chunk;
    TP_TRY(take_doubles(arena, width, &f->forward_s));
    TP_TRY(take_doubles(arena, width, &f->backward_s));
    TP_TRY(take_doubles(arena, width, &f->forward_wait_s));
    TP_TRY(take_doubles(arena, width, &f->backward_wait_s));
    for (f->mask = 1; f->mask < stages; f->mask = 2 * f->mask + 1)
        continue;
    TP_TRY(take_doubles(arena, (size_t)f->mask + 1, &f->turn));
    TP_TRY(take_doubles(arena, (chunk + 1) * width, &f->rows));
    TP_TRY(take_doubles(arena, ((size_t)slots / chunk + 1) * width, &f->kept));
    for (int k = 0; k < stages && blocking; k++) {
        f->forward_wait_s[cell_of(f, k)] = k > 0 ? comm_s : 0.0;
        f->backward_wait_s[cell_of(f, k)] = k < stages - 1 ? comm_s : 0.0;
    }
    for (int i = 0; i < f->width; i++)
        for (int r = 0; r <= f->chunk; r++)
            f->rows[r * f->width + i] = -INFINITY;
    return TP_OK;
}

void
tp_f1b_set(tp_f1b *f, int stage, double forward_s, double backward_s)
{
    f->forward_s[cell_of(f, stage)] = forward_s;
    f->backward_s[cell_of(f, stage)] = backward_s;
}

/* count stages of one parity do their op: `other` is the neighbour that each of them reads. */
static inline void
advance(double *restrict to, const double *restrict own, const double *restrict other, const double *restrict wait,
        const double *restrict seconds, double lag, int count)
{
    for (int i = 0; i < count; i++) {
        double ready = other[i] + lag, start = own[i] > ready ? own[i] : ready;
        to[i] = (start + wait[i]) + seconds[i];
    }
}

/* The stages low .. high of parity `odd` do a forward, or a backward. */
static inline void
advance_part(const tp_f1b *f, const double *restrict from, double *restrict to, int backward, int odd, int low,
             int high)
{
    int first = (low - odd + 1) >> 1, count = ((high - odd) >> 1) - first + 1;
    int at = odd * f->half + 1 + first;
    /* Before an even stage is the odd one with the index less one, behind it the one with the same. */
    int other = (1 - odd) * f->half + 1 + first + (backward ? odd : odd - 1);
    advance(to + at, from + at, from + other, (backward ? f->backward_wait_s : f->forward_wait_s) + at,
            (backward ? f->backward_s : f->forward_s) + at, f->lag_s, count);
}

static inline int
larger(int a, int b)
{
    return a > b ? a : b;
}

static inline int
smaller(int a, int b)
{
    return a < b ? a : b;
}

/* One slot: the ends before it -> the ends behind it. */
static inline void
step(const tp_f1b *f, int slot, const double *from, double *to)
{
    int p = f->stages, last = 2 * (f->micros - 1);
    if (slot < 2 * p - 1 || slot > last) /* some stages have nothing in it */
        memcpy(to, from, (size_t)f->width * sizeof *to);
    if (slot < p) {
        int low = larger(0, slot - f->micros + 1);
        advance_part(f, from, to, 0, 0, low, smaller(slot, f->top));
        advance_part(f, from, to, 0, 1, low, smaller(slot, f->top));
        return;
    }
    int odd = slot & 1, turn = 2 * p - 1 - slot;
    advance_part(f, from, to, 0, odd, larger(larger(0, turn + 1), slot - last), f->top);
    advance_part(f, from, to, 1, 1 - odd, larger(0, turn), smaller(f->top, turn + last));
}

static void
start(const tp_f1b *f, double *row)
{
    for (int k = 0; k < f->stages; k++)
        row[cell_of(f, k)] = 0.0;
}

/* Is the makespan already known to be more than the limit? Every stage still has the rest of its own ops before it, and
 * the last backward its way to stage 0. */
static int
is_late(const tp_f1b *f, int slot, const double *row, double limit)
{
    int p = f->stages, m = f->micros;
    double way = 0.0;
    for (int k = 0; k <= f->top; k++) {
        int at = cell_of(f, k), turn = 2 * p - 1 - k;
        int forwards = slot < p ? larger(0, slot - k + 1) : larger(p - k, (slot - k) / 2 + 1);
        int backwards = slot < turn ? 0 : (slot - turn) / 2 + 1;
        double f_s = f->forward_wait_s[at] + f->forward_s[at], b_s = f->backward_wait_s[at] + f->backward_s[at];
        if (row[at] + larger(0, m - forwards) * f_s + larger(0, m - backwards) * b_s + way > limit)
            return 1;
        way += b_s + f->lag_s;
    }
    return 0;
}

int
tp_f1b_op_at(int stages, int micros, int slot, int stage, tp_f1b_op *op)
{
    int turn = 2 * stages - 1 - stage;
    *op = (tp_f1b_op){.stage = stage};
    if (slot < stages) {
        op->micro = slot - stage;
    } else if (((slot - stage) & 1) == 0) {
        op->micro = (slot - stage) / 2;
        if (op->micro < stages - stage)
            return 0;
    } else {
        if (slot < turn)
            return 0;
        op->backward = 1;
        op->micro = (slot - turn) / 2;
    }
    return op->micro >= 0 && op->micro < micros;
}

/* Stages 0 .. top. A micro-batch that has left `top` for stages that are not simulated comes back rest_s later. INFINITY where the
 * thread is told to stop. */
static double
evaluate(tp_f1b *f, double rest_s, double limit_s)
{
    double *from = f->rows, *to = f->rows + f->width;
    int slots = slots_of(f), look = 2 * f->stages, top = f->top, open = top < f->stages - 1;
    limit_s += 1e-12 * limit_s; /* is_late sums in another order */
    start(f, from);
    for (int slot = 0; slot < slots; slot++) {
        tp_f1b_op op = {0};
        int turns = open && tp_f1b_op_at(f->stages, f->micros, slot, top, &op);
        if (turns && op.backward)
            from[cell_of(f, top + 1)] = f->turn[op.micro & f->mask] - f->lag_s;
        step(f, slot, from, to);
        if (turns && !op.backward)
            f->turn[op.micro & f->mask] = to[cell_of(f, top)] + rest_s;
        double *row = from;
        from = to;
        to = row;
        if (slot % POLL == POLL - 1 && tp_deadline_told_after(&f->asked, POLL / 2 * (int64_t)f->width))
            return INFINITY;
        if (slot == look && limit_s < INFINITY) {
            if (is_late(f, slot, from, limit_s))
                return INFINITY;
            look += 64;
        }
    }
    return from[cell_of(f, 0)];
}

double
tp_f1b_run(tp_f1b *f, double limit_s)
{
    return evaluate(f, 0.0, limit_s);
}

double
tp_f1b_bound(tp_f1b *f, int top, double rest_s, double limit_s)
{
    f->top = top;
    double bound = evaluate(f, rest_s, limit_s);
    f->top = f->stages - 1;
    return bound;
}

/* The stage of what held the op back: its own or a neighbour; -1 if nothing did. row: the ends before its slot. */
static int
holder_of(const tp_f1b *f, const tp_f1b_op *op, const double *row)
{
    int k = op->stage, neighbour = op->backward ? k + 1 : k - 1;
    if (neighbour < 0)
        return op->micro > 0 ? k : -1;
    if (neighbour == f->stages)
        return k;
    double own = row[cell_of(f, k)], other = row[cell_of(f, neighbour)] + f->lag_s;
    if (op->backward)
        return other >= own ? neighbour : k;
    return op->micro > 0 && own >= other ? k : neighbour;
}

/* The stage with most seconds on the path. The cells of a row serve as the sums: no memory is taken here. */
static int
master_of(tp_f1b *f, const tp_f1b_op *path, int length)
{
    int master = 0;
    start(f, f->rows);
    for (int i = 0; i < length; i++) {
        int at = cell_of(f, path[i].stage);
        f->rows[at] += path[i].backward ? f->backward_wait_s[at] + f->backward_s[at]
                                        : f->forward_wait_s[at] + f->forward_s[at];
    }
    for (int k = 1; k < f->stages; k++)
        if (f->rows[cell_of(f, k)] >= f->rows[cell_of(f, master)])
            master = k;
    return master;
}

int
tp_f1b_path(tp_f1b *f, tp_f1b_op *path, int *master)
{
    int slots = slots_of(f), length = 0, stage = 0, width = f->width;
    *master = 0;
    start(f, f->rows);
    for (int slot = 0; slot < slots; slot++) {
        double *from = f->rows + (slot & 1) * width, *to = f->rows + (1 - (slot & 1)) * width;
        if (slot % f->chunk == 0)
            memcpy(f->kept + (size_t)(slot / f->chunk) * (size_t)width, from, (size_t)width * sizeof *from);
        step(f, slot, from, to);
        if (slot % POLL == POLL - 1 && tp_deadline_told_after(&f->asked, POLL / 2 * (int64_t)width))
            return 0;
    }
    for (int part = (slots - 1) / f->chunk; part >= 0 && stage >= 0; part--) {
        int first = part * f->chunk, behind = smaller(slots, first + f->chunk);
        if (tp_deadline_told_after(&f->asked, f->chunk * (int64_t)width))
            return 0;
        memcpy(f->rows, f->kept + (size_t)part * (size_t)width, (size_t)width * sizeof *f->rows);
        for (int slot = first; slot < behind; slot++)
            step(f, slot, f->rows + (slot - first) * width, f->rows + (slot - first + 1) * width);
        for (int slot = behind - 1; slot >= first && stage >= 0; slot--)
            if (tp_f1b_op_at(f->stages, f->micros, slot, stage, &path[length]))
                stage = holder_of(f, &path[length++], f->rows + (slot - first) * width);
    }
    for (int i = 0, j = length - 1; i < j; i++, j--) {
        tp_f1b_op op = path[i];
        path[i] = path[j];
        path[j] = op;
    }
    *master = master_of(f, path, length);
    return length;
}
