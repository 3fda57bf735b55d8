/* A lower bound on the makespan. The first work must reach a rank (head), the rank must do all its work, and the last result must
 * travel back (tail); no step is shorter than the longest path of one micro-batch alone; and jackson.c, where it knows all operations,
 * has heads and tails for each. Only data dependencies and slice order are used, so the bound holds for every legal order on the
 * placement. */
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

typedef struct {
    const tp_program *p;
    const tp_durations *d;
    int64_t units;
    unsigned ops;                             /* tp_sched_ops */
    int has_b, has_i, even;                   /* even: no duration depends on the slice */
    int free;                                 /* messages take no time of a rank */
    double *forward_end;                      /* [stages * max_slices] of one micro-batch */
    double *backward_end, *next_backward_end; /* [max_slices] of one stage and of the stage behind it */
    double *head, *tail, *work, *late;        /* [ranks] late: U, which may all come behind what travels back */
    double *copies;                           /* [ranks] beside the work */
    int64_t asked;                            /* steps since somebody was asked whether to stop */
    uint8_t *halves;                          /* tp_sched_halves */
    uint8_t *cut;                             /* [micros] some forward of it is halved; NULL: of none */
} bound;

static int
halves_at(const bound *b, int v, int64_t u)
{
    return b->halves == NULL || v < 0 ? 0 : b->halves[v * b->units + u];
}

/* Seconds of the op (of one half of it) with the copy of its message in. That of the message out may stand anywhere behind it, so
 * the next slice need not wait for it. */
static double
forward_s(const bound *b, int v, int64_t u, unsigned half)
{
    double seconds = tp_durations_s(b->d, TP_OP_F, half, v, u);
    unsigned in = halves_at(b, v - 1, u) & TP_SCHED_APART ? half : 0;
    if (!b->free && tp_program_remote(b->p, v) && (in || half != TP_HALF_SECOND)) /* a whole message comes with the first half */
        seconds += tp_durations_s(b->d, TP_OP_RF, in, v, u);
    return seconds;
}

/* Of the copy out. half: of a message of its own. */
static double
sent_s(const bound *b, int v, int64_t u, unsigned half)
{
    return b->free || !tp_program_remote(b->p, v + 1) ? 0.0 : tp_durations_s(b->d, TP_OP_SF, half, v, u);
}

/* Both halves, where there are two, with all copies. */
static double
whole_forward_s(const bound *b, int v, int64_t u)
{
    int halves = halves_at(b, v, u);
    double seconds = halves ? forward_s(b, v, u, TP_HALF_FIRST) + forward_s(b, v, u, TP_HALF_SECOND) : forward_s(b, v, u, 0);
    if (halves & TP_SCHED_APART)
        return seconds + sent_s(b, v, u, TP_HALF_FIRST) + sent_s(b, v, u, TP_HALF_SECOND);
    return seconds + sent_s(b, v, u, 0);
}

/* whole: with the weight half, wherever it is done. A program may have B for some slices and I, W for others. */
static double
backward_s(const bound *b, int v, int64_t u, int whole)
{
    double one = tp_durations_s(b->d, TP_OP_B, 0, v, u), half = tp_durations_s(b->d, TP_OP_I, 0, v, u);
    if (whole)
        half += tp_durations_s(b->d, TP_OP_W, 0, v, u);
    double seconds = !b->has_i ? one : !b->has_b || half < one ? half : one;
    return b->free || !tp_program_remote(b->p, v + 1) ? seconds : seconds + tp_durations_s(b->d, TP_OP_RB, 0, v, u);
}

static double
returned_s(const bound *b, int v, int64_t u)
{
    return b->free || !tp_program_remote(b->p, v) ? 0.0 : tp_durations_s(b->d, TP_OP_SB, 0, v, u);
}

static double
lag_s(const bound *b, int from, int to, int64_t u, unsigned half)
{
    return b->p->rank_of[from] == b->p->rank_of[to] ? 0.0 : tp_durations_lag_s(b->d, b->units, to < from, half, from, u);
}

static double
larger(double a, double b)
{
    return a > b ? a : b;
}

/* The shortest way of a gradient to the stage before: whichever leaves its rank last, where copies out may change places. */
static double
least_lag_s(const bound *b, int v, int64_t u, int slices)
{
    double least = lag_s(b, v, v - 1, u, 0);
    for (int s = 1; !b->free && s < slices; s++) {
        double lag = lag_s(b, v, v - 1, u + s, 0);
        least = lag < least ? lag : least;
    }
    return least;
}

/* Ends of the halves of a micro-batch of one slice on stage v, from those on the stage before: end[0], end[1]; equal where
 * the output leaves whole. *reach: the first moment at which the rank can be reached. */
static void
forward_halves(const bound *b, int v, int64_t u, double end[2], double *reach)
{
    int before = halves_at(b, v - 1, u), mine = halves_at(b, v, u);
    for (int h = 0; h < 2 && v > 0; h++) {
        unsigned half = before & TP_SCHED_APART ? (h ? TP_HALF_SECOND : TP_HALF_FIRST) : 0;
        end[h] += sent_s(b, v - 1, u, half) + lag_s(b, v - 1, v, u, half);
    }
    *reach = end[0];
    if (mine) {
        end[0] += forward_s(b, v, u, TP_HALF_FIRST);
        end[1] = larger(end[0], end[1]) + forward_s(b, v, u, TP_HALF_SECOND);
    } else {
        end[1] = larger(end[0], end[1]) + forward_s(b, v, u, 0);
    }
    if (!(mine & TP_SCHED_APART))
        end[0] = end[1];
}

/* Longest path of micro-batch q; also lowers heads and tails of the ranks by its first and last slice 0. */
static double
one_micro(bound *b, int q)
{
    const tp_program *p = b->p;
    int slices = p->slices[q], each = tp_program_copy_stages(p);
    int first = q / tp_program_copy_micros(p) * each, last = first + each - 1;
    double reach = 0.0, home = 0.0, onward = 0.0, half[2] = {0.0, 0.0}; /* onward: home, once slice 0 has left */
    for (int v = first; v <= last; v++) {
        double *end = b->forward_end + (int64_t)v * p->max_slices;
        for (int s = 0; s < slices; s++) {
            int64_t u = p->offset[q] + s;
            double start = v > first ? end[s - p->max_slices] + sent_s(b, v - 1, u, 0) + lag_s(b, v - 1, v, u, 0) : 0.0;
            end[s] = larger(start, s > 0 ? end[s - 1] : 0.0) + forward_s(b, v, u, 0);
        }
        int rank = p->rank_of[v];
        int64_t u = p->offset[q];
        if (v > first) {
            reach += sent_s(b, v - 1, u, 0) + lag_s(b, v - 1, v, u, 0);
            onward += backward_s(b, v - 1, u, 0) + returned_s(b, v - 1, u);
            home = least_lag_s(b, v, u, slices) + onward;
            onward += lag_s(b, v, v - 1, u, 0);
        }
        if (b->halves != NULL && slices == 1) {
            forward_halves(b, v, u, half, &reach);
            end[0] = half[1];
        }
        b->head[rank] = reach < b->head[rank] ? reach : b->head[rank];
        b->tail[rank] = b->has_i ? 0.0 : home < b->tail[rank] ? home : b->tail[rank];
        reach += forward_s(b, v, u, 0);
    }
    double longest = 0.0;
    for (int v = last; v >= first; v--) {
        double weights = 0.0;
        for (int s = slices - 1; s >= 0; s--) {
            int64_t u = p->offset[q] + s;
            double start = b->forward_end[(int64_t)v * p->max_slices + s];
            if (v < last)
                start = larger(start, b->next_backward_end[s] + returned_s(b, v + 1, u) + lag_s(b, v + 1, v, u, 0));
            if (s < slices - 1)
                start = larger(start, b->backward_end[s + 1]);
            b->backward_end[s] = start + backward_s(b, v, u, 0);
            if (b->has_i && !b->has_b)
                weights = larger(weights, b->backward_end[s]) + tp_durations_s(b->d, TP_OP_W, 0, v, u);
        }
        longest = larger(longest, larger(weights, b->backward_end[0]));
        double *swap = b->next_backward_end;
        b->next_backward_end = b->backward_end;
        b->backward_end = swap;
    }
    return longest;
}

/* All that stage v does with a slice of the batch. */
static double
unit_s(const bound *b, int v, int64_t u)
{
    return whole_forward_s(b, v, u) + backward_s(b, v, u, 1) + returned_s(b, v, u);
}

static void
add_work(bound *b)
{
    const tp_program *p = b->p;
    for (int v = 0; v < p->stages; v++) {
        int64_t begin = p->offset[tp_program_micro_begin(p, v)], end = p->offset[tp_program_micro_end(p, v)];
        double *work = &b->work[p->rank_of[v]], same = forward_s(b, v, begin, 0) + sent_s(b, v, begin, 0) +
                                                       backward_s(b, v, begin, 1) + returned_s(b, v, begin); /* of all that are whole */
        if (b->even && b->halves == NULL) {
            *work += same * (double)(end - begin);
            continue;
        }
        for (int64_t u = begin; u < end && !tp_deadline_told_after(&b->asked, 32); u++)
            *work += b->even && !halves_at(b, v, u) ? same : unit_s(b, v, u);
    }
    if (!(b->ops & (TP_SCHED_BIT(TP_OP_R) | TP_SCHED_BIT(TP_OP_SO) | TP_SCHED_BIT(TP_OP_SI) | TP_SCHED_BIT(TP_OP_U))))
        return;
    for (int r = 0; r < p->ranks; r++)
        for (int64_t k = p->begin[r]; k < p->begin[r + 1]; k++)
            if (p->code[k].op == TP_OP_R || tp_sched_is_beside(p->code[k].op)) {
                double seconds = tp_durations_s(b->d, p->code[k].op, 0, p->code[k].stage, tp_program_unit(p, &p->code[k]));
                double *where = p->code[k].op == TP_OP_U ? b->late : tp_sched_goes_beside(&p->code[k]) ? b->copies : b->work;
                where[r] += seconds;
            }
}

/* Sums beside the work, one after another: none begins before some stage of the rank goes back for the last time, whatever else it does
 * before that. From when the rank begins until all are done, and the norm of what it sums is measured. */
static double
sums_s(bound *b, int r)
{
    const tp_program *p = b->p;
    double early = 1e300, sums = 0.0, before;
    for (int v = 0; b->d->beside_s != NULL && v < p->stages; v++) {
        int64_t begin = p->offset[tp_program_micro_begin(p, v)], end = p->offset[tp_program_micro_end(p, v)];
        double all = 0.0, last = 0.0;
        if (p->rank_of[v] != r)
            continue;
        for (int64_t u = begin; u < end && !tp_deadline_told_after(&b->asked, 32); u++) {
            all += unit_s(b, v, u);
            last = larger(last, backward_s(b, v, u, 1) + returned_s(b, v, u));
        }
        early = all - last < early ? all - last : early;
        sums += b->d->beside_s[v * b->d->stage_stride];
    }
    tp_program_update_s(p, b->d, r, &before);
    return sums > 0.0 ? early + sums + before : 0.0;
}

/* The step's end: what of OPT follows the norm starts on no rank before all have met. */
static double
update_s(const bound *b)
{
    const tp_program *p = b->p;
    double most = 0.0;
    for (int r = 0; r < p->ranks; r++) {
        double before, seconds = tp_program_update_s(p, b->d, r, &before);
        most = larger(most, seconds - before);
    }
    return most;
}

/* *bound_s: what is known already of the step without its end. */
static void
find(bound *b, uint8_t *done, double *bound_s)
{
    const tp_program *p = b->p;
    unsigned ops = b->ops;
    b->has_b = (ops & TP_SCHED_BIT(TP_OP_B)) != 0;
    b->has_i = (ops & TP_SCHED_BIT(TP_OP_I)) != 0;
    for (int r = 0; r < p->ranks; r++)
        b->head[r] = b->tail[r] = 1e300;
    double most = *bound_s;
    for (int q = 0; q < p->micros && !tp_deadline_told_after(&b->asked, 64 * (int64_t)p->stages); q++) {
        if (q == tp_program_copy_micros(p))
            memset(done, 0, (size_t)p->max_slices + 1);
        int whole = b->cut == NULL || !b->cut[q];
        if (b->even && whole && done[p->slices[q]])
            continue; /* micro-batches of as many slices are the same on a copy of the stages */
        done[p->slices[q]] |= (uint8_t)whole;
        most = larger(most, one_micro(b, q));
    }
    add_work(b);
    for (int r = 0; r < p->ranks; r++) {
        double late = b->late[r] + tp_sched_before_meeting_s(p, b->d, r);
        if (b->work[r] > 0.0)
            most = larger(most, b->head[r] + larger(larger(b->work[r] + larger(b->tail[r], late), b->copies[r] + b->tail[r]),
                                                    sums_s(b, r)));
    }
    *bound_s = most + update_s(b);
}

static tp_status
find_halves(bound *b)
{
    const tp_program *p = b->p;
    TP_TRY(tp_sched_halves(p, b->ops, &b->halves));
    b->cut = calloc((size_t)p->micros, 1);
    if (b->cut == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the halves of %d micro-batches", p->micros);
    for (int v = 0; v < p->stages; v++)
        for (int q = 0; q < p->micros; q++)
            b->cut[q] |= b->halves[v * b->units + p->offset[q]]; /* halves are of a micro-batch of one slice */
    return TP_OK;
}

tp_status
tp_program_bound(const tp_program *program, const tp_durations *durations, double *bound_s)
{
    return tp_sched_bound(program, tp_sched_ops(program), durations, bound_s);
}

tp_status
tp_sched_bound(const tp_program *program, unsigned ops, const tp_durations *durations, double *bound_s)
{
    size_t ranks = (size_t)program->ranks, slices = (size_t)program->max_slices;
    bound b = {.p = program,
               .d = durations,
               .units = tp_program_units(program),
               .even = durations->unit_stride == 0 && durations->comm_unit_s == NULL && durations->back_comm_unit_s == NULL};
    b.free = !tp_sched_has_copies(durations);
    double *cells = calloc(((size_t)program->stages + 2) * slices, sizeof *cells);
    double *rows = calloc(5 * ranks, sizeof *rows);
    uint8_t *done = calloc(slices + 1, 1);
    b.ops = ops;
    tp_status status = ops & TP_SCHED_HAS_HALVES ? find_halves(&b) : TP_OK;
    if (status == TP_OK)
        status = tp_sched_jackson(program, ops, durations, bound_s);
    if (status != TP_OK) {
        /* told already */
    } else if (cells == NULL || rows == NULL || done == NULL) {
        status = tp_fail(TP_EMEMORY, "no memory for the bound of %d stages", program->stages);
    } else {
        b.forward_end = cells;
        b.backward_end = cells + (size_t)program->stages * slices;
        b.next_backward_end = b.backward_end + slices;
        b.head = rows;
        b.tail = rows + ranks;
        b.work = rows + 2 * ranks;
        b.late = rows + 3 * ranks;
        b.copies = rows + 4 * ranks;
        find(&b, done, bound_s);
        status = tp_deadline_check_told();
    }
    free(cells);
    free(rows);
    free(done);
    free(b.halves);
    free(b.cut);
    return status;
}
