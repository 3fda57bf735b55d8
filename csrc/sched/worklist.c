/* The worklist's inner loop. Durations, links and readers of a stage are looked up once, and one cell holds both messages of a
 * (stage, unit), because its gradient is made after its activation has been read. The compiler makes several loops of this one
 * source, by what is known before one begins: is the program plain, as those are that planners and searches simulate, and which
 * lanes are kept. `plain` and `kept` are constants wherever they are arguments: a loop has nothing of what it has no use for. */
#include "csrc/sched/worklist.h"

#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* A cell's first double is a state of 64 bits: 0 nothing yet; above 0 the forward's arrival, its bits + 1; below 0 the backward's,
 * its bits inverted. Times are at least 0, so their bits, read as integers, are too. */
struct tp_stage_state {
    double *mine;                   /* [units] cells */
    const double *below, *above;    /* of the stage before and the one behind; NULL: none */
    int32_t below_rank, above_rank; /* who reads what this stage makes; -1: nobody */
    uint8_t far_below, far_above;   /* on another rank */
    uint8_t sends_f, sends_b;       /* by an instruction of its own */
    const double *seconds[TP_OPS];  /* at unit 0 */
    const double *weights;          /* what B adds to seconds[B]: I + W where it has no time of its own */
    const double *lag_f, *lag_b;    /* at unit 0 */
    int64_t lag_f_stride, lag_b_stride;
    double even[TP_OPS];            /* of the lane of even slices */
};

typedef tp_stage_state stage;

static const double no_time = 0.0;

/* ---- opening --------------------------------------------------------------------------------------------------------- */

/* The sets of lanes that there are loops for. */
enum { IDEAL_ONLY = TP_LANE_IDEAL, BUT_COPIED = TP_LANE_IDEAL | TP_LANE_EVEN, ALL = TP_LANE_COPIED | TP_LANE_IDEAL | TP_LANE_EVEN };

static void
choose_loop(tp_worklist *w, unsigned ops)
{
    unsigned wanted = w->lanes->wanted;
    w->plain = !(ops & (TP_SCHED_HAS_HALVES | TP_SCHED_GUESTS | TP_SCHED_HAS_BESIDE)) && !tp_sched_has_copies(w->d);
    w->kept = wanted == 0 || wanted == IDEAL_ONLY ? wanted : w->plain ? BUT_COPIED : ALL;
}

static const double *
link_of(const tp_worklist *w, int v, int remote, int back, int64_t *stride)
{
    const tp_durations *d = w->d;
    const double *units = back && d->back_comm_unit_s != NULL ? d->back_comm_unit_s : d->comm_unit_s;
    *stride = remote && units != NULL;
    if (!remote)
        return &no_time;
    return units != NULL ? units + v * w->units : d->comm_s != NULL ? d->comm_s + v : &no_time;
}

static void
fill_stage(const tp_worklist *w, int64_t room, int v)
{
    const tp_program *p = w->p;
    const tp_durations *d = w->d;
    stage *s = &w->stages[v];
    s->mine = w->cells + v * room;
    int first = tp_program_is_first(p, v), last = tp_program_is_last(p, v);
    s->below = first ? NULL : s->mine - room;
    s->above = last ? NULL : s->mine + room;
    s->below_rank = first ? -1 : p->rank_of[v - 1];
    s->above_rank = last ? -1 : p->rank_of[v + 1];
    s->far_below = (uint8_t)tp_program_remote(p, v);
    s->far_above = (uint8_t)tp_program_remote(p, v + 1);
    s->sends_f = w->lowered && s->far_above;
    s->sends_b = w->lowered && s->far_below;
    for (int op = 0; op < TP_OPS; op++) {
        s->seconds[op] = d->seconds[op] != NULL ? d->seconds[op] + v * d->stage_stride : &no_time;
        s->even[op] = tp_durations_s(&w->lanes->even, op, 0, v, 0);
    }
    s->weights = &no_time;
    if (d->seconds[TP_OP_B] == NULL) {
        s->weights = s->seconds[TP_OP_W];
        s->seconds[TP_OP_B] = s->seconds[TP_OP_I];
    }
    s->lag_f = link_of(w, v, s->far_above, 0, &s->lag_f_stride);
    s->lag_b = link_of(w, v, s->far_below, 1, &s->lag_b_stride);
}

static tp_status
open_guests(tp_worklist *w)
{
    size_t cells = (size_t)w->p->stages * (size_t)w->p->micros, links = 2 * (size_t)w->p->stages;
    w->guest = calloc(2 * cells * (size_t)tp_lane_count(w->kept), sizeof *w->guest);
    w->awaited = calloc(cells, 1);
    w->guest_free[0] = calloc(links, sizeof *w->guest_free[0]);
    w->guest_free[1] = calloc(links, sizeof *w->guest_free[1]);
    if (w->guest == NULL || w->awaited == NULL || w->guest_free[0] == NULL || w->guest_free[1] == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the guests of %d stages", w->p->stages);
    return TP_OK;
}

static tp_status
open_links(tp_worklist *w, unsigned ops)
{
    for (int i = 0; i < 2 && w->d->latency_s != NULL; i++) {
        TP_TRY(tp_sched_links_open(w->p, &w->links[i]));
        tp_sched_links_reset(&w->links[i], w->d);
    }
    TP_TRY(ops & TP_SCHED_HAS_BESIDE ? tp_sched_copiers_open(w->p, &w->copiers) : TP_OK);
    TP_TRY(tp_sched_sums_open(w->p, w->d, &w->summed));
    if (w->summed.last != NULL && (w->gone = calloc((size_t)w->p->stages, sizeof *w->gone)) == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the sums of %d stages", w->p->stages);
    TP_TRY(tp_sched_halves(w->p, ops, &w->halves));
    return ops & TP_SCHED_GUESTS ? open_guests(w) : TP_OK;
}

tp_status
tp_worklist_open(tp_worklist *w, unsigned ops)
{
    const tp_program *p = w->p;
    const tp_durations *d = w->d;
    choose_loop(w, ops);
    TP_TRY(open_links(w, ops));
    /* an odd number of cache lines a stage: with powers of two the stages would share the same few sets of every cache */
    int64_t room = ((w->units * tp_lane_count(w->kept) + 7) / 8 | 1) * 8;
    w->halved = p->stages * room;
    w->clock = calloc((size_t)(p->ranks * tp_lane_count(w->kept)), sizeof *w->clock);
    w->stages = calloc((size_t)p->stages, sizeof *w->stages);
    w->cells = calloc((size_t)w->halved * (w->halves != NULL ? 2 : 1), sizeof *w->cells);
    if (w->clock == NULL || w->stages == NULL || w->cells == NULL)
        return tp_fail(TP_EMEMORY, "no memory to simulate %lld instructions", (long long)p->begin[p->ranks]);
    for (int op = 0; op < TP_OPS; op++)
        w->stride[op] = d->seconds[op] != NULL ? d->unit_stride : 0;
    if (d->seconds[TP_OP_B] == NULL) {
        w->stride[TP_OP_B] = w->stride[TP_OP_I];
        w->weights_stride = w->stride[TP_OP_W];
    }
    for (int v = 0; v < p->stages; v++)
        fill_stage(w, room, v);
    return TP_OK;
}

void
tp_worklist_close(tp_worklist *w)
{
    for (int i = 0; i < 2; i++) {
        tp_sched_links_close(&w->links[i]);
        free(w->guest_free[i]);
    }
    tp_sched_copiers_close(&w->copiers);
    tp_sched_sums_close(&w->summed);
    free(w->gone);
    free(w->halves);
    free(w->guest);
    free(w->awaited);
    free(w->clock);
    free(w->stages);
    free(w->cells);
}

/* ---- moments --------------------------------------------------------------------------------------------------------- */

/* In registers: of the lanes that are not kept nothing is stored, so the compiler leaves out what would compute them. */
typedef struct {
    double given, copied, ideal, even;
} moment;

INLINE moment
load(const double *at, double given, const unsigned kept)
{
    moment m = {.given = given};
    if (kept & TP_LANE_COPIED)
        m.copied = at[tp_lane_at(kept, TP_LANE_COPIED)];
    if (kept & TP_LANE_IDEAL)
        m.ideal = at[tp_lane_at(kept, TP_LANE_IDEAL)];
    if (kept & TP_LANE_EVEN)
        m.even = at[tp_lane_at(kept, TP_LANE_EVEN)];
    return m;
}

INLINE void
store_others(double *at, moment m, const unsigned kept)
{
    if (kept & TP_LANE_COPIED)
        at[tp_lane_at(kept, TP_LANE_COPIED)] = m.copied;
    if (kept & TP_LANE_IDEAL)
        at[tp_lane_at(kept, TP_LANE_IDEAL)] = m.ideal;
    if (kept & TP_LANE_EVEN)
        at[tp_lane_at(kept, TP_LANE_EVEN)] = m.even;
}

INLINE double
larger(double a, double b)
{
    return a > b ? a : b;
}

INLINE moment
later(moment a, moment b)
{
    return (moment){larger(a.given, b.given), larger(a.copied, b.copied), larger(a.ideal, b.ideal), larger(a.even, b.even)};
}

/* Behind work of so many seconds, and so many if slices were even. */
INLINE moment
behind(moment m, double seconds, double even)
{
    return (moment){m.given + seconds, m.copied + seconds, m.ideal + seconds, m.even + even};
}

/* Behind what a message takes of the rank: nothing, in the lanes without messages. */
INLINE moment
behind_copy(moment m, double seconds)
{
    m.given += seconds;
    m.copied += seconds;
    return m;
}

INLINE int64_t
state_of(const double *cell)
{
    int64_t state;
    memcpy(&state, cell, sizeof state);
    return state;
}

INLINE double
seconds_of(int64_t bits)
{
    double seconds;
    memcpy(&seconds, &bits, sizeof seconds);
    return seconds;
}

INLINE int
has_forward(const double *cell)
{
    return state_of(cell) > 0;
}

INLINE int
has_backward(const double *cell)
{
    return state_of(cell) < 0;
}

INLINE moment
forward_of(const double *cell, const unsigned kept)
{
    return load(cell, seconds_of(state_of(cell) - 1), kept);
}

INLINE moment
backward_of(const double *cell, const unsigned kept)
{
    return load(cell, seconds_of(~state_of(cell)), kept);
}

INLINE void
publish(tp_worklist *w, double *cell, int back, moment there, int reader, const unsigned kept)
{
    int64_t state = state_of(&there.given);
    state = back ? ~state : state + 1;
    store_others(cell, there, kept);
    memcpy(cell, &state, sizeof state);
    if (w->waiting[reader] == cell) {
        w->waiting[reader] = NULL;
        w->stack[w->stacked++] = reader;
    }
}

/* ---- messages -------------------------------------------------------------------------------------------------------- */

/* When a message that is ready now has come. */
INLINE moment
send_on(tp_worklist *w, int back, int v, moment ready, double lag)
{
    ready.given = tp_sched_links_send(&w->links[0], back, v, ready.given, lag) + lag;
    ready.copied = tp_sched_links_send(&w->links[1], back, v, ready.copied, lag) + lag;
    return ready;
}

INLINE double
seconds_at(const tp_worklist *w, const stage *v, int op, int64_t unit)
{
    return v->seconds[op][unit * w->stride[op]];
}

/* The output of a forward leaves, or the half of it that `flags` says; returns when the rank goes on. */
INLINE moment
leave_forward(tp_worklist *w, int at, int64_t unit, unsigned flags, moment clock, const unsigned kept, const int plain)
{
    const stage *v = &w->stages[at];
    if (v->above_rank < 0)
        return clock;
    double *cell = v->mine + unit * tp_lane_count(kept);
    moment there = clock;
    if (plain) {
        double lag = v->lag_f[unit * v->lag_f_stride];
        there = v->far_above ? send_on(w, 0, at, clock, lag) : clock;
    } else if (v->far_above) {
        clock = behind_copy(clock, flags ? tp_durations_s(w->d, TP_OP_SF, flags, at, unit) : seconds_at(w, v, TP_OP_SF, unit));
        there = send_on(w, 0, at, clock,
                        flags ? tp_durations_lag_s(w->d, w->units, 0, flags, at, unit) : v->lag_f[unit * v->lag_f_stride]);
    }
    if (!plain && w->halves != NULL && !(flags & TP_HALF_SECOND) && w->halves[(at + 1) * w->units + unit]) /* read in halves */
        publish(w, cell + w->halved, 0, there, v->above_rank, kept);
    if (plain || !(flags & TP_HALF_FIRST))
        publish(w, cell, 0, there, v->above_rank, kept);
    return clock;
}

INLINE moment
leave_backward(tp_worklist *w, int at, int64_t unit, moment clock, const unsigned kept, const int plain)
{
    const stage *v = &w->stages[at];
    if (v->below_rank < 0)
        return clock;
    moment there = clock;
    if (v->far_below) {
        if (!plain)
            clock = behind_copy(clock, seconds_at(w, v, TP_OP_SB, unit));
        there = send_on(w, 1, at, clock, v->lag_b[unit * v->lag_b_stride]);
    }
    publish(w, v->mine + unit * tp_lane_count(kept), 1, there, v->below_rank, kept);
    return clock;
}

/* The cell that an F reads. */
INLINE const double *
input_of(const tp_worklist *w, const stage *v, const tp_instr *i, int64_t unit, const unsigned kept, const int plain)
{
    const double *cell = v->below + unit * tp_lane_count(kept);
    return !plain && i->flags & TP_HALF_FIRST ? cell + w->halved : cell;
}

/* What receiving its input takes of the rank of an F. */
INLINE double
receive_s(const tp_worklist *w, const stage *v, const tp_instr *i, int64_t unit)
{
    if (!v->far_below)
        return 0.0;
    if (!(i->flags & TP_HALVES))
        return seconds_at(w, v, TP_OP_RF, unit);
    unsigned flags = w->halves[(i->stage - 1) * w->units + unit] & TP_SCHED_APART ? i->flags & TP_HALVES : 0;
    int copied = !flags && i->flags & TP_HALF_SECOND; /* a whole message, which the first half has taken */
    return copied ? 0.0 : tp_durations_s(w->d, TP_OP_RF, flags, i->stage, unit);
}

/* ---- guests ---------------------------------------------------------------------------------------------------------- */

static int64_t
guest_cell(const tp_worklist *w, const tp_instr *i)
{
    return (int64_t)i->stage * w->p->micros + i->micro;
}

/* When it is at its host, or, back, home again. */
INLINE double *
guest_at(const tp_worklist *w, int back, int64_t cell, const unsigned kept)
{
    return &w->guest[((int64_t)back * w->p->stages * w->p->micros + cell) * tp_lane_count(kept)];
}

/* In the lanes without messages it has come when it is sent: those before it on its link were sent by the same rank, earlier. */
INLINE void
send_guest(tp_worklist *w, const tp_instr *i, int back, moment ready, const unsigned kept)
{
    double lag = tp_sched_guest_lag_s(w->d, w->units, i->stage, w->p->offset[i->micro]);
    int at = back * w->p->stages + i->stage;
    ready.given = tp_sched_guest_send(&w->guest_free[0][at], ready.given, lag);
    ready.copied = tp_sched_guest_send(&w->guest_free[1][at], ready.copied, lag);
    publish(w, guest_at(w, back, guest_cell(w, i), kept), 0, ready, i->peer, kept);
}

/* SE, RE, SL or RL, and what waits for an RL, up to its own work: when that may begin; blocked: waiting is set. */
INLINE moment
move_guest(tp_worklist *w, int rank, const tp_instr *i, moment clock, const unsigned kept)
{
    int64_t unit = w->p->offset[i->micro], cell = guest_cell(w, i);
    const stage *v = &w->stages[i->stage];
    int reads = tp_sched_reads_load(i->op) && w->awaited[cell];
    if (i->op == TP_OP_RL) {
        w->awaited[cell] = 1;
    } else if (i->op == TP_OP_SE) {
        clock = behind_copy(clock, seconds_at(w, v, TP_OP_SE, unit));
        send_guest(w, i, 0, clock, kept);
    } else if (reads || i->op == TP_OP_SL) {
        const double *from = guest_at(w, reads, cell, kept);
        if (!has_forward(from)) {
            w->waiting[rank] = from;
            return clock;
        }
        clock = behind_copy(later(forward_of(from, kept), clock), seconds_at(w, v, reads ? TP_OP_RL : TP_OP_RE, unit));
        if (reads) {
            w->awaited[cell] = 0;
        } else {
            clock = behind_copy(clock, seconds_at(w, v, TP_OP_SL, unit));
            send_guest(w, i, 1, clock, kept);
        }
    }
    return clock;
}

/* ---- instructions ---------------------------------------------------------------------------------------------------- */

void
tp_worklist_note(tp_worklist *w, int rank, int64_t k, double start, double end)
{
    int64_t at = w->interval[rank]++;
    w->line->start_s[at] = start;
    w->line->end_s[at] = end;
    w->line->at[at] = (int32_t)(k - w->p->begin[rank]);
}

/* When F, B or I may begin that could at `now`, for copies beside the work. They matter in one lane only: where copies take no
 * time, those that the rank has begun have ended. */
static double
behind_copies(const tp_worklist *w, const tp_instr *i, int64_t unit, double now)
{
    return tp_sched_copiers_wait(&w->copiers, i->op, i->stage, tp_sched_place(i, w->two_places), i->stage * w->units + unit, now);
}

/* SO or SI that begins a copy and goes on. */
static void
begin_copy(tp_worklist *w, int rank, int64_t k, int64_t unit, double seconds, double now)
{
    const tp_instr *i = &w->p->code[k];
    double end = tp_sched_copiers_begin(&w->copiers, rank, i->op, i->stage, tp_sched_place(i, w->two_places),
                                        i->stage * w->units + unit, now, seconds);
    if (w->line != NULL)
        tp_worklist_note(w, rank, k, end - seconds, end);
}

/* A rank's turn: of its state what every instruction changes, in registers. */
typedef struct {
    int rank;
    moment clock;
    double work;
} turn;

static void
note_gone(tp_worklist *w, const tp_instr *i, moment start, moment end)
{
    const double both[2][2] = {{start.given, end.given}, {start.copied, end.copied}};
    if (i->op == TP_OP_B || i->op == TP_OP_W)
        memcpy(w->gone[i->stage], both, sizeof both);
}

INLINE void
compute(tp_worklist *w, turn *t, int64_t k, moment start, double seconds, double even)
{
    t->clock = behind(start, seconds, even);
    t->work += seconds;
    if (w->gone != NULL)
        note_gone(w, &w->p->code[k], start, t->clock);
    if (w->line != NULL)
        tp_worklist_note(w, t->rank, k, start.given, t->clock.given);
}

/* 0: blocked, waiting is set. */
INLINE int
run_forward(tp_worklist *w, turn *t, int64_t k, int64_t unit, const unsigned kept, const int plain)
{
    const tp_instr *i = &w->p->code[k];
    const stage *v = &w->stages[i->stage];
    double seconds = seconds_at(w, v, TP_OP_F, unit), even = v->even[TP_OP_F];
    unsigned halves = plain ? 0 : i->flags & TP_HALVES, leaving = TP_HALVES;
    moment start = t->clock;
    if (v->below != NULL) {
        const double *from = input_of(w, v, i, unit, kept, plain);
        if (!has_forward(from)) {
            w->waiting[t->rank] = from;
            return 0;
        }
        start = later(forward_of(from, kept), start);
        if (!plain)
            start = behind_copy(start, receive_s(w, v, i, unit));
    }
    if (!plain && w->copiers.free_s != NULL)
        start.given = behind_copies(w, i, unit, start.given);
    if (halves) {
        seconds = tp_durations_s(w->d, TP_OP_F, halves, i->stage, unit);
        even = tp_durations_s(&w->lanes->even, TP_OP_F, halves, i->stage, 0);
        leaving = tp_sched_leaving(w->p, i);
    }
    compute(w, t, k, start, seconds, even);
    if (!v->sends_f && leaving)
        t->clock = leave_forward(w, i->stage, unit, tp_sched_message_flags(leaving), t->clock, kept, plain);
    return 1;
}

/* B or I, likewise; or R within B, which leaves the time that the message's copy takes to that. */
INLINE int
run_backward(tp_worklist *w, turn *t, int64_t k, int64_t unit, const unsigned kept, const int plain)
{
    const tp_instr *i = &w->p->code[k];
    const stage *v = &w->stages[i->stage];
    double seconds = seconds_at(w, v, i->op, unit) + (i->op == TP_OP_B ? v->weights[unit * w->weights_stride] : 0.0);
    moment start = t->clock;
    if (v->above != NULL) {
        const double *from = v->above + unit * tp_lane_count(kept);
        if (!has_backward(from)) {
            w->waiting[t->rank] = from;
            return 0;
        }
        start = later(backward_of(from, kept), start);
        if (!plain && v->far_above && i->op != TP_OP_R)
            start = behind_copy(start, seconds_at(w, v, TP_OP_RB, unit));
    }
    if (!plain && w->copiers.free_s != NULL)
        start.given = behind_copies(w, i, unit, start.given);
    if (w->first_backward[t->rank] < 0.0) {
        w->first_backward[t->rank] = start.given;
        w->work_before[t->rank] = t->work;
    }
    compute(w, t, k, start, seconds, v->even[i->op]);
    if (i->op == TP_OP_R)
        w->recompute[t->rank] += seconds;
    else if (!v->sends_b)
        t->clock = leave_backward(w, i->stage, unit, t->clock, kept, plain);
    return 1;
}

/* What neither waits for a cell nor makes one by itself. */
INLINE void
run_other(tp_worklist *w, turn *t, int64_t k, int64_t unit, const unsigned kept, const int plain)
{
    const tp_instr *i = &w->p->code[k];
    const stage *v = &w->stages[i->stage];
    double seconds = seconds_at(w, v, i->op, unit);
    if (i->op == TP_OP_SF)
        t->clock = leave_forward(w, i->stage, unit, plain ? 0 : i->flags & TP_HALVES, t->clock, kept, plain);
    else if (i->op == TP_OP_SB)
        t->clock = leave_backward(w, i->stage, unit, t->clock, kept, plain);
    else if (!plain && w->copiers.free_s != NULL && tp_sched_is_swap(i->op))
        begin_copy(w, t->rank, k, unit, seconds, t->clock.given);
    else if (!tp_sched_is_message(i->op)) { /* receives take time where they are read */
        compute(w, t, k, t->clock, seconds, v->even[i->op]);
        if (i->op == TP_OP_R)
            w->recompute[t->rank] += seconds;
        else if (tp_sched_is_swap(i->op))
            w->swap[t->rank] += seconds;
    }
}

INLINE void
run(tp_worklist *w, int rank, int64_t end, const unsigned kept, const int plain)
{
    const tp_instr *code = w->p->code;
    const int64_t *offset = w->p->offset;
    double *clock = &w->clock[rank * tp_lane_count(kept)];
    turn t = {rank, load(clock, clock[0], kept), w->work[rank]};
    int64_t k = w->next[rank];
    for (; k < end && !tp_sched_is_end(code[k].op); k++) {
        const tp_instr *i = &code[k];
        __builtin_prefetch(i + 16); /* a rank comes back after all others had a turn: its next line would be cold */
        int64_t unit = offset[i->micro] + i->slice;
        if (!plain && w->guest != NULL) {
            t.clock = move_guest(w, rank, i, t.clock, kept);
            if (w->waiting[rank] != NULL)
                break;
            if (tp_sched_is_guest(i->op))
                continue;
        }
        if (i->op == TP_OP_F) {
            if (!run_forward(w, &t, k, unit, kept, plain))
                break;
        } else if (tp_sched_goes_back(i)) {
            if (!run_backward(w, &t, k, unit, kept, plain))
                break;
        } else {
            run_other(w, &t, k, unit, kept, plain);
        }
    }
    w->next[rank] = k;
    clock[0] = t.clock.given;
    store_others(clock, t.clock, kept);
    w->work[rank] = t.work;
}

void
tp_worklist_run(tp_worklist *w, int rank, int64_t end)
{
    if (w->plain && w->kept == 0)
        run(w, rank, end, 0, 1);
    else if (w->plain && w->kept == IDEAL_ONLY)
        run(w, rank, end, IDEAL_ONLY, 1);
    else if (w->plain)
        run(w, rank, end, BUT_COPIED, 1);
    else if (w->kept == 0)
        run(w, rank, end, 0, 0);
    else if (w->kept == IDEAL_ONLY)
        run(w, rank, end, IDEAL_ONLY, 0);
    else
        run(w, rank, end, ALL, 0);
}
