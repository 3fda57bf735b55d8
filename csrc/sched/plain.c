/* The worklist's inner loop for plain programs: no halves, and messages that take no time of a rank but its link's. That is
 * what planners and searches simulate, so it is kept free of everything that they have no use for: durations, links and
 * readers of a stage are looked up once, and one cell holds both messages of a (stage, unit), because its gradient is made
 * after its activation has been read. */
#include "csrc/sched/worklist.h"

#include <stdlib.h>
#include <string.h>

/* A cell: 0 nothing yet; above 0 the forward's arrival, its bits + 1; below 0 the backward's, its bits inverted. Times are
 * at least 0, so their bits, read as integers, are too. */
typedef struct {
    int64_t *mine;                 /* [units] */
    const int64_t *below, *above;  /* of the stage before and the one behind; NULL: none */
    int32_t below_rank, above_rank; /* who reads what this stage makes; -1: nobody */
    uint8_t sends_f, sends_b;      /* by an instruction of its own */
    const double *seconds[TP_OPS]; /* at unit 0 */
    const double *weights;         /* what B adds to seconds[B]: I + W where it has no time of its own */
    const double *lag_f, *lag_b;   /* at unit 0 */
    int64_t lag_f_stride, lag_b_stride;
} plain_stage;

struct tp_plain {
    plain_stage *stages; /* [stages] */
    int64_t *cells;
    int64_t stride[TP_OPS], weights_stride;
};

static const double no_time = 0.0;

int
tp_plain_may(unsigned ops, const tp_durations *durations)
{
    static const int copies[] = {TP_OP_SF, TP_OP_RF, TP_OP_SB, TP_OP_RB};
    for (int i = 0; i < 4; i++)
        if (durations->seconds[copies[i]] != NULL)
            return 0;
    return !(ops & (TP_SCHED_HAS_HALVES | TP_SCHED_GUESTS | TP_SCHED_HAS_BESIDE | TP_SCHED_BIT(TP_OP_U)));
}

static const double *
link_of(const tp_worklist *w, int stage, int remote, int back, int64_t *stride)
{
    const tp_durations *d = w->d;
    const double *units = back && d->back_comm_unit_s != NULL ? d->back_comm_unit_s : d->comm_unit_s;
    *stride = remote && units != NULL;
    if (!remote)
        return &no_time;
    return units != NULL ? units + stage * w->units : d->comm_s != NULL ? d->comm_s + stage : &no_time;
}

static void
fill_stage(const tp_worklist *w, tp_plain *x, int64_t room, int v)
{
    const tp_program *p = w->p;
    const tp_durations *d = w->d;
    plain_stage *s = &x->stages[v];
    s->mine = x->cells + v * room;
    int first = tp_program_is_first(p, v), last = tp_program_is_last(p, v);
    s->below = first ? NULL : s->mine - room;
    s->above = last ? NULL : s->mine + room;
    s->below_rank = first ? -1 : p->rank_of[v - 1];
    s->above_rank = last ? -1 : p->rank_of[v + 1];
    s->sends_f = w->lowered && w->remote[v + 1];
    s->sends_b = w->lowered && w->remote[v];
    for (int op = 0; op < TP_OPS; op++)
        s->seconds[op] = d->seconds[op] != NULL ? d->seconds[op] + v * d->stage_stride : &no_time;
    s->weights = &no_time;
    if (d->seconds[TP_OP_B] == NULL) {
        s->weights = s->seconds[TP_OP_W];
        s->seconds[TP_OP_B] = s->seconds[TP_OP_I];
    }
    s->lag_f = link_of(w, v, w->remote[v + 1], 0, &s->lag_f_stride);
    s->lag_b = link_of(w, v, w->remote[v], 1, &s->lag_b_stride);
}

tp_status
tp_plain_open(tp_worklist *worklist)
{
    const tp_program *p = worklist->p;
    const tp_durations *d = worklist->d;
    tp_plain *x = calloc(1, sizeof *x);
    /* an odd number of cache lines a stage: with powers of two the stages would share the same few sets of every cache */
    int64_t room = ((worklist->units + 7) / 8 | 1) * 8;
    if (x != NULL) {
        x->stages = calloc((size_t)p->stages, sizeof *x->stages);
        x->cells = calloc((size_t)p->stages * (size_t)room, sizeof *x->cells);
    }
    worklist->plain = x;
    if (x == NULL || x->stages == NULL || x->cells == NULL)
        return tp_fail(TP_EMEMORY, "no memory to simulate %lld instructions", (long long)p->begin[p->ranks]);
    for (int op = 0; op < TP_OPS; op++)
        x->stride[op] = d->seconds[op] != NULL ? d->unit_stride : 0;
    if (d->seconds[TP_OP_B] == NULL) {
        x->stride[TP_OP_B] = x->stride[TP_OP_I];
        x->weights_stride = x->stride[TP_OP_W];
    }
    for (int v = 0; v < p->stages; v++)
        fill_stage(worklist, x, room, v);
    return TP_OK;
}

void
tp_plain_close(tp_plain *plain)
{
    if (plain == NULL)
        return;
    free(plain->stages);
    free(plain->cells);
    free(plain);
}

static inline int64_t
bits_of(double seconds)
{
    int64_t bits;
    memcpy(&bits, &seconds, sizeof bits);
    return bits;
}

static inline double
seconds_of(int64_t bits)
{
    double seconds;
    memcpy(&seconds, &bits, sizeof seconds);
    return seconds;
}

static inline void
publish(tp_worklist *w, int64_t *cell, int64_t value, int reader)
{
    *cell = value;
    if (w->waiting[reader] == cell) {
        w->waiting[reader] = NULL;
        w->stack[w->stacked++] = reader;
    }
}

static inline void
leave_forward(tp_worklist *w, int stage, int64_t unit, double clock)
{
    const plain_stage *v = &w->plain->stages[stage];
    if (v->above_rank < 0)
        return;
    double lag = v->lag_f[unit * v->lag_f_stride];
    if (w->remote[stage + 1])
        clock = tp_sched_links_send(&w->links, 0, stage, clock, lag);
    publish(w, &v->mine[unit], bits_of(clock + lag) + 1, v->above_rank);
}

static inline void
leave_backward(tp_worklist *w, int stage, int64_t unit, double clock)
{
    const plain_stage *v = &w->plain->stages[stage];
    if (v->below_rank < 0)
        return;
    double lag = v->lag_b[unit * v->lag_b_stride];
    if (w->remote[stage])
        clock = tp_sched_links_send(&w->links, 1, stage, clock, lag);
    publish(w, &v->mine[unit], ~bits_of(clock + lag), v->below_rank);
}

static inline void
note(tp_worklist *w, int rank, int64_t k, double start, double end)
{
    int64_t at = w->interval[rank]++;
    w->line->start_s[at] = start;
    w->line->end_s[at] = end;
    w->line->at[at] = (int32_t)(k - w->p->begin[rank]);
}

/* Ops of a plain program that neither read nor make a cell by themselves. */
static inline void
run_other(tp_worklist *w, int rank, const tp_instr *i, const plain_stage *v, int64_t unit, double clock)
{
    double seconds = v->seconds[i->op][unit * w->plain->stride[i->op]];
    if (i->op == TP_OP_SF)
        leave_forward(w, i->stage, unit, clock);
    else if (i->op == TP_OP_SB)
        leave_backward(w, i->stage, unit, clock);
    else if (i->op == TP_OP_R)
        w->recompute[rank] += seconds;
    else if (tp_sched_is_swap(i->op))
        w->swap[rank] += seconds;
}

void
tp_plain_run(tp_worklist *w, int rank, int64_t end)
{
    const tp_plain *x = w->plain;
    const tp_instr *code = w->p->code;
    const int64_t *offset = w->p->offset;
    int64_t k = w->next[rank];
    double clock = w->clock[rank], work = w->work[rank];
    for (; k < end && code[k].op < TP_OP_AR; k++) {
        const tp_instr *i = &code[k];
        __builtin_prefetch(i + 16); /* a rank comes back after all others had a turn: its next line would be cold */
        const plain_stage *v = &x->stages[i->stage];
        int64_t unit = offset[i->micro] + i->slice;
        double seconds = v->seconds[i->op][unit * x->stride[i->op]], start = clock;
        if (i->op == TP_OP_F) {
            if (v->below != NULL) {
                int64_t made = v->below[unit];
                if (made <= 0) {
                    w->waiting[rank] = &v->below[unit];
                    break;
                }
                double ready = seconds_of(made - 1);
                start = ready > clock ? ready : clock;
            }
            clock = start + seconds;
            if (!v->sends_f)
                leave_forward(w, i->stage, unit, clock);
        } else if (tp_sched_is_backward(i->op)) {
            if (v->above != NULL) {
                int64_t made = v->above[unit];
                if (made >= 0) {
                    w->waiting[rank] = &v->above[unit];
                    break;
                }
                double ready = seconds_of(~made);
                start = ready > clock ? ready : clock;
            }
            if (i->op == TP_OP_B)
                seconds += v->weights[unit * x->weights_stride];
            if (w->first_backward[rank] < 0.0) {
                w->first_backward[rank] = start;
                w->work_before[rank] = work;
            }
            clock = start + seconds;
            if (!v->sends_b)
                leave_backward(w, i->stage, unit, clock);
        } else if (i->op <= TP_OP_R || tp_sched_is_swap(i->op)) {
            clock += seconds;
            run_other(w, rank, i, v, unit, clock);
        } else {
            run_other(w, rank, i, v, unit, clock);
            continue;
        }
        work += seconds;
        if (w->line != NULL)
            note(w, rank, k, start, clock);
    }
    w->next[rank] = k;
    w->clock[rank] = clock;
    w->work[rank] = work;
}
