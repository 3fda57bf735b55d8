/* Worklist evaluation, O(N): a rank runs until its next op reads a message that nobody has made yet; whoever makes it
 * wakes that rank. Ends are kept by (stage, unit), so neighbours read them in the order they were written. */
#include "csrc/sched/worklist.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

typedef tp_worklist sim;

static void
sim_close(sim *s)
{
    tp_plain_close(s->plain);
    tp_sched_links_close(&s->links);
    tp_sched_copiers_close(&s->copiers);
    free(s->ready_f);
    free(s->ready_b);
    free(s->halves);
    free(s->ready_half);
    free(s->guest);
    free(s->guest_free);
    free(s->clock);
    free(s->waiting);
    free(s->next);
    free(s->remote);
    free(s->stack);
    free(s->runs);
    free(s->interval);
}

static tp_status
guests_open(sim *s)
{
    size_t cells = (size_t)s->p->stages * (size_t)s->p->micros;
    s->guest = calloc(3 * cells, sizeof *s->guest);
    s->guest_free = calloc(2 * (size_t)s->p->stages, sizeof *s->guest_free);
    if (s->guest == NULL || s->guest_free == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the guests of %d stages", s->p->stages);
    for (size_t i = 0; i < 2 * cells; i++)
        s->guest[i] = TP_NOT_YET;
    return TP_OK;
}

static tp_status
cells_open(sim *s, unsigned ops)
{
    size_t cells = (size_t)s->p->stages * (size_t)s->units;
    TP_TRY(ops & TP_SCHED_HAS_HALVES ? tp_sched_halves(s->p, &s->halves) : TP_OK);
    TP_TRY(ops & TP_SCHED_GUESTS ? guests_open(s) : TP_OK);
    s->ready_f = malloc(cells * sizeof *s->ready_f);
    s->ready_b = malloc(cells * sizeof *s->ready_b);
    s->ready_half = s->halves != NULL ? malloc(cells * sizeof *s->ready_half) : NULL;
    if (s->ready_f == NULL || s->ready_b == NULL || (s->halves != NULL && s->ready_half == NULL))
        return tp_fail(TP_EMEMORY, "no memory to simulate %lld instructions", (long long)s->p->begin[s->p->ranks]);
    for (size_t i = 0; i < cells; i++)
        s->ready_f[i] = s->ready_b[i] = TP_NOT_YET;
    for (size_t i = 0; s->halves != NULL && i < cells; i++)
        s->ready_half[i] = TP_NOT_YET;
    return TP_OK;
}

static tp_status
sim_open(sim *s, const tp_program *p, const tp_durations *d, unsigned ops)
{
    size_t ranks = (size_t)p->ranks;
    *s = (sim){.p = p, .d = d, .units = tp_program_units(p), .lowered = (ops & TP_SCHED_MESSAGES) != 0,
               .two_places = (ops & TP_SCHED_HAS_TWO_PLACES) != 0};
    s->clock = calloc(7 * ranks, sizeof *s->clock);
    s->waiting = calloc(ranks, sizeof *s->waiting);
    s->next = malloc(ranks * sizeof *s->next);
    s->remote = calloc((size_t)p->stages + 1, 1);
    s->stack = malloc(ranks * sizeof *s->stack);
    s->interval = malloc(ranks * sizeof *s->interval);
    if (s->clock == NULL || s->waiting == NULL || s->next == NULL || s->remote == NULL || s->stack == NULL ||
        s->interval == NULL) {
        sim_close(s);
        return tp_fail(TP_EMEMORY, "no memory to simulate %lld instructions", (long long)p->begin[p->ranks]);
    }
    s->work = s->clock + ranks;
    s->recompute = s->work + ranks;
    s->swap = s->recompute + ranks;
    s->sums = s->swap + ranks;
    s->first_backward = s->sums + ranks;
    s->work_before = s->first_backward + ranks;
    for (int v = 0; v <= p->stages; v++)
        s->remote[v] = (uint8_t)tp_program_remote(p, v);
    for (int r = 0; r < p->ranks; r++) {
        s->next[r] = p->begin[r];
        s->first_backward[r] = TP_NOT_YET;
    }
    tp_status status = d->latency_s != NULL ? tp_sched_links_open(p, &s->links) : TP_OK;
    tp_sched_links_reset(&s->links, d);
    if (status == TP_OK && ops & TP_SCHED_HAS_BESIDE)
        status = tp_sched_copiers_open(p, &s->copiers);
    if (status == TP_OK)
        status = tp_plain_may(ops, d) ? tp_plain_open(s) : cells_open(s, ops);
    if (status != TP_OK)
        sim_close(s);
    return status;
}

/* ---- one instruction ------------------------------------------------------------------------------------------------- */

/* When the input of F, B or I is there; blocks (returns 0, waiting set) if nobody has made it. *copy_s: what the receive
 * takes of this rank. */
static inline int
input_of(sim *s, int rank, const tp_instr *i, int64_t cell, int64_t unit, double *arrival, double *copy_s)
{
    int forward = i->op == TP_OP_F, stage = i->stage, maker = forward ? stage - 1 : stage + 1;
    if (forward ? tp_program_is_first(s->p, stage) : tp_program_is_last(s->p, stage))
        return 1; /* the first stage reads data; the last one's backward follows its own forward */
    const double *from = forward ? &s->ready_f[cell - s->units] : &s->ready_b[cell + s->units];
    unsigned flags = 0;
    int copied = 0;
    if (forward && s->halves != NULL && i->flags & TP_HALVES) {
        from = i->flags & TP_HALF_FIRST ? &s->ready_half[cell - s->units] : from;
        flags = s->halves[cell - s->units] & TP_SCHED_APART ? i->flags & TP_HALVES : 0;
        copied = !flags && i->flags & TP_HALF_SECOND; /* a whole message, which the first half has taken */
    }
    if (*from < 0.0) {
        s->waiting[rank] = from;
        return 0;
    }
    *arrival = *from;
    if (s->remote[forward ? stage : maker] && !copied)
        *copy_s = tp_durations_s(s->d, forward ? TP_OP_RF : TP_OP_RB, flags, stage, unit);
    return 1;
}

static inline void
publish_to(sim *s, double *cell, int rank, double at)
{
    *cell = at;
    if (s->waiting[rank] == cell) {
        s->waiting[rank] = NULL;
        s->stack[s->stacked++] = rank;
    }
}

static inline void
publish(sim *s, double *cell, int reader_stage, double at)
{
    publish_to(s, cell, s->p->rank_of[reader_stage], at);
}

static void
leave_half(sim *s, int rank, unsigned half, int stage, int64_t cell, int64_t unit)
{
    double there = s->clock[rank];
    if (s->remote[stage + 1]) {
        double lag = tp_durations_lag_s(s->d, s->units, 0, half, stage, unit);
        s->clock[rank] += tp_durations_s(s->d, TP_OP_SF, half, stage, unit);
        there = tp_sched_links_send(&s->links, 0, stage, s->clock[rank], lag) + lag;
    }
    double *cells = half == TP_HALF_FIRST ? s->ready_half : s->ready_f;
    publish(s, &cells[cell], stage + 1, there);
}

/* Send the output (these halves of it) of F, B or I of this cell: takes copy time of the rank, then the link's. */
static inline void
leave(sim *s, int rank, int forward, unsigned halves, int stage, int64_t cell, int64_t unit)
{
    int reader = forward ? stage + 1 : stage - 1;
    if ((forward ? tp_program_is_last(s->p, stage) : tp_program_is_first(s->p, stage)) || halves == 0)
        return;
    if (halves != TP_HALVES) {
        leave_half(s, rank, halves, stage, cell, unit);
        return;
    }
    double there = s->clock[rank];
    if (s->remote[forward ? reader : stage]) {
        double lag = tp_durations_lag_s(s->d, s->units, !forward, 0, stage, unit);
        s->clock[rank] += tp_durations_s(s->d, forward ? TP_OP_SF : TP_OP_SB, 0, stage, unit);
        there = tp_sched_links_send(&s->links, !forward, stage, s->clock[rank], lag) + lag;
    }
    if (forward && s->halves != NULL)
        publish(s, &s->ready_half[cell], reader, there);
    publish(s, forward ? &s->ready_f[cell] : &s->ready_b[cell], reader, there);
}

static void
add_interval(sim *s, int rank, const tp_instr *i, double start, double end)
{
    int64_t at = s->interval[rank]++;
    s->line->start_s[at] = start;
    s->line->end_s[at] = end;
    s->line->at[at] = (int32_t)(i - s->p->code - s->p->begin[rank]);
}

static inline void
compute(sim *s, int rank, const tp_instr *i, int64_t unit)
{
    double seconds = tp_durations_s(s->d, i->op, i->flags, i->stage, unit), start = s->clock[rank];
    if (tp_sched_is_backward(i->op) && s->first_backward[rank] < 0.0) {
        s->first_backward[rank] = start;
        s->work_before[rank] = s->work[rank];
    }
    s->clock[rank] = start + seconds;
    s->work[rank] += seconds;
    if (i->op == TP_OP_R)
        s->recompute[rank] += seconds;
    else if (tp_sched_is_swap(i->op))
        s->swap[rank] += seconds;
    if (s->line != NULL)
        add_interval(s, rank, i, start, start + seconds);
}

/* SO or SI that begins a copy and goes on. */
static void
begin_copy(sim *s, int rank, const tp_instr *i, int64_t cell, int64_t unit)
{
    double seconds = tp_durations_s(s->d, i->op, 0, i->stage, unit);
    double end = tp_sched_copiers_begin(&s->copiers, rank, i->op, i->stage, tp_sched_place(i, s->two_places), cell, s->clock[rank],
                                        seconds);
    if (s->line != NULL)
        add_interval(s, rank, i, end - seconds, end);
}

static double *
guest_of(const sim *s, int which, const tp_instr *i)
{
    return &s->guest[((int64_t)which * s->p->stages + i->stage) * s->p->micros + i->micro];
}

/* What a message of these two ops, its sender's and its reader's, takes of a rank; and of its link. */
static double
guest_s(const sim *s, int op, const tp_instr *i)
{
    return tp_durations_s(s->d, op, 0, i->stage, s->p->offset[i->micro]);
}

/* When what is ready now has come. */
static double
guest_comes(sim *s, const tp_instr *i, double now)
{
    double lag = tp_sched_guest_lag_s(s->d, s->units, i->stage, s->p->offset[i->micro]);
    return tp_sched_guest_send(&s->guest_free[(i->op == TP_OP_SL) * s->p->stages + i->stage], now, lag);
}

/* SE, RE, SL or RL; 0: blocked. */
static int
step_guest(sim *s, int rank, const tp_instr *i)
{
    double *there = guest_of(s, 0, i), *home = guest_of(s, 1, i), *clock = &s->clock[rank];
    if (i->op == TP_OP_RL)
        *guest_of(s, 2, i) = 1.0;
    if (i->op == TP_OP_SE) {
        *clock += guest_s(s, TP_OP_SE, i);
        publish_to(s, there, i->peer, guest_comes(s, i, *clock));
    }
    if (i->op != TP_OP_SL)
        return 1;
    if (*there < 0.0) {
        s->waiting[rank] = there;
        return 0;
    }
    *clock = (*there > *clock ? *there : *clock) + guest_s(s, TP_OP_RE, i);
    *clock += guest_s(s, TP_OP_SL, i);
    publish_to(s, home, i->peer, guest_comes(s, i, *clock));
    return 1;
}

/* The first that reads what was loaded waits for that; 0: blocked. */
static int
await_load(sim *s, int rank, const tp_instr *i)
{
    const double *home = guest_of(s, 1, i);
    if (!tp_sched_reads_load(i->op) || *guest_of(s, 2, i) == 0.0)
        return 1;
    if (*home < 0.0) {
        s->waiting[rank] = home;
        return 0;
    }
    *guest_of(s, 2, i) = 0.0;
    s->clock[rank] = (*home > s->clock[rank] ? *home : s->clock[rank]) + guest_s(s, TP_OP_RL, i);
    return 1;
}

/* 0: blocked. */
static inline int
step(sim *s, int rank, const tp_instr *i)
{
    int64_t unit = tp_program_unit(s->p, i), cell = i->stage * s->units + unit;
    int forward = i->op == TP_OP_F;
    if (s->guest != NULL) {
        if (tp_sched_is_guest(i->op))
            return step_guest(s, rank, i);
        if (!await_load(s, rank, i))
            return 0;
    }
    if (forward || tp_sched_is_backward(i->op)) {
        double arrival = 0.0, copy_s = 0.0;
        if (!input_of(s, rank, i, cell, unit, &arrival, &copy_s))
            return 0;
        s->clock[rank] = (arrival > s->clock[rank] ? arrival : s->clock[rank]) + copy_s;
        if (s->copiers.free_s != NULL)
            s->clock[rank] = tp_sched_copiers_wait(&s->copiers, i->op, i->stage, tp_sched_place(i, s->two_places), cell,
                                                   s->clock[rank]);
        compute(s, rank, i, unit);
        if (!(s->lowered && s->remote[forward ? i->stage + 1 : i->stage]))
            leave(s, rank, forward, forward && i->flags ? tp_sched_leaving(s->p, i) : TP_HALVES, i->stage, cell, unit);
    } else if (s->copiers.free_s != NULL && tp_sched_is_swap(i->op)) {
        begin_copy(s, rank, i, cell, unit);
    } else if (i->op == TP_OP_W || i->op == TP_OP_R || tp_sched_is_beside(i->op)) {
        compute(s, rank, i, unit);
    } else if (i->op == TP_OP_SF || i->op == TP_OP_SB) {
        leave(s, rank, i->op == TP_OP_SF, tp_instr_halves(i), i->stage, cell, unit);
    }
    return 1;
}

/* ---- the run --------------------------------------------------------------------------------------------------------- */

static tp_status
record(sim *s, int rank, int64_t count)
{
    if (s->run_count == s->run_room) {
        int64_t room = s->run_room * 2 + 256;
        tp_run *runs = realloc(s->runs, (size_t)room * sizeof *runs);
        if (runs == NULL)
            return tp_fail(TP_EMEMORY, "no memory for %lld runs", (long long)room);
        s->runs = runs;
        s->run_room = room;
    }
    s->runs[s->run_count++] = (tp_run){rank, (int32_t)count};
    return TP_OK;
}

/* The rank's body: everything before its first AR or OPT. */
static inline int64_t
run_part(sim *s, int rank, int64_t end)
{
    int64_t k = s->next[rank], from = k;
    if (s->plain != NULL) {
        tp_plain_run(s, rank, end);
        return s->next[rank] - from;
    }
    while (k < end && !tp_sched_is_end(s->p->code[k].op) && step(s, rank, &s->p->code[k]))
        k++;
    s->next[rank] = k;
    return k - from;
}

/* In parts, behind which somebody is asked whether to stop: it may end early then. */
static int64_t
run_body(sim *s, int rank, int64_t end)
{
    int64_t count = 0, part = TP_SCHED_PART;
    while (part == TP_SCHED_PART) {
        int64_t until = s->next[rank] + TP_SCHED_PART;
        part = run_part(s, rank, until < end ? until : end);
        count += part;
        if (tp_deadline_told_after(&s->asked, 8 * (part + 1)))
            break;
    }
    return count;
}

static tp_status
run_bodies(sim *s)
{
    const tp_program *p = s->p;
    for (int r = p->ranks - 1; r >= 0; r--)
        s->stack[s->stacked++] = r;
    while (s->stacked > 0) {
        int rank = s->stack[--s->stacked];
        int64_t count = run_body(s, rank, p->begin[rank + 1]);
        TP_TRY(tp_deadline_check_told());
        if (count > 0)
            TP_TRY(record(s, rank, count));
    }
    for (int r = 0; r < p->ranks; r++)
        if (s->waiting[r] != NULL) {
            TP_TRY(tp_program_check(p)); /* names the cycle */
            return tp_fail(TP_EINTERNAL, "rank %d waits for ever in a program that check accepts", r);
        }
    return TP_OK;
}

/* AR: both ends meet. Then the first OPT of every rank waits for all: the gradient norm is global. */
static void
run_ends(sim *s)
{
    const tp_program *p = s->p;
    double meet = 0.0, all = 0.0;
    for (int r = 0; r < p->ranks; r++)
        if (s->next[r] < p->begin[r + 1] && p->code[s->next[r]].op == TP_OP_AR && s->clock[r] > meet)
            meet = s->clock[r];
    for (int r = 0; r < p->ranks; r++)
        for (; s->next[r] < p->begin[r + 1] && p->code[s->next[r]].op == TP_OP_AR; s->next[r]++) {
            s->clock[r] = s->clock[r] > meet ? s->clock[r] : meet;
            compute(s, r, &p->code[s->next[r]], 0);
        }
    for (int r = 0; r < p->ranks; r++)
        all = s->clock[r] > all ? s->clock[r] : all;
    for (int r = 0; r < p->ranks; r++)
        for (; s->next[r] < p->begin[r + 1]; s->next[r]++) {
            s->clock[r] = s->clock[r] > all ? s->clock[r] : all;
            compute(s, r, &p->code[s->next[r]], 0);
        }
}

/* Of rank r's work, what adds up gradients: of a weight that two stages hold, and of replicas. */
static double
sums_s(const sim *s, int r)
{
    const tp_program *p = s->p;
    const tp_durations *d = s->d;
    double total = 0.0;
    for (int64_t k = p->begin[r + 1] - 1; k >= p->begin[r] && tp_sched_is_end(p->code[k].op); k--) {
        double all = tp_durations_s(d, p->code[k].op, 0, p->code[k].stage, 0);
        double sum = d->sum_s == NULL ? 0.0 : d->sum_s[p->code[k].stage * d->stage_stride];
        total += p->code[k].op == TP_OP_AR || sum > all ? all : sum;
    }
    return total;
}

static double
makespan(const sim *s)
{
    double most = 0.0;
    for (int r = 0; r < s->p->ranks; r++)
        most = s->clock[r] > most ? s->clock[r] : most;
    return most;
}

tp_status
tp_sched_replay(const tp_program *program, const tp_durations *durations, const tp_run *runs, int64_t run_count,
                double *makespan_s)
{
    sim s;
    TP_TRY(sim_open(&s, program, durations, tp_sched_ops(program)));
    for (int64_t i = 0; i < run_count && !tp_deadline_was_told(); i++)
        run_body(&s, runs[i].rank, s.next[runs[i].rank] + runs[i].count);
    run_ends(&s);
    *makespan_s = makespan(&s);
    sim_close(&s);
    return tp_deadline_check_told();
}

/* ---- the public face --------------------------------------------------------------------------------------------------- */

/* What an instruction adds to the bytes that its rank holds. */
static double
held_bytes(const tp_program *program, const tp_instr *i, const double *bytes, int64_t stage_stride, int64_t unit_stride)
{
    int takes = i->op == TP_OP_F || i->op == TP_OP_RE || i->op == TP_OP_RL;
    if (!takes && i->op != TP_OP_B && i->op != TP_OP_W && i->op != TP_OP_SE && i->op != TP_OP_SL)
        return 0.0;
    if (i->op == TP_OP_F && i->flags & TP_HALF_SECOND)
        return 0.0; /* its slot is the whole micro-batch's, taken by the first half */
    double size = 0.0;
    int64_t unit = tp_program_unit(program, i);
    for (int s = 0; s < (tp_sched_is_guest(i->op) ? program->slices[i->micro] : 1); s++)
        size += bytes[i->stage * stage_stride + (unit + s) * unit_stride];
    return takes ? size : -size;
}

void
tp_program_peak_bytes(const tp_program *program, const double *bytes, int64_t stage_stride, int64_t unit_stride,
                      double *peak)
{
    for (int r = 0; r < program->ranks; r++) {
        double held = 0.0, most = 0.0;
        for (int64_t k = program->begin[r]; k < program->begin[r + 1]; k++) {
            held += held_bytes(program, &program->code[k], bytes, stage_stride, unit_stride);
            most = held > most ? held : most;
        }
        peak[r] = most;
    }
}

static tp_status
line_open(const tp_program *p, unsigned ops, int keep_intervals, tp_timeline **out)
{
    tp_timeline *line = calloc(1, sizeof *line);
    size_t ranks = (size_t)p->ranks;
    int whole = line != NULL;
    const unsigned silent = TP_SCHED_MESSAGES | TP_SCHED_GUESTS;
    if (whole) {
        line->begin = calloc(ranks + 1, sizeof *line->begin);
        line->busy_s = calloc(ranks, sizeof *line->busy_s);
        line->peak_bytes = calloc(ranks, sizeof *line->peak_bytes);
        whole = line->begin != NULL && line->busy_s != NULL && line->peak_bytes != NULL;
    }
    for (int r = 0; whole && r < p->ranks; r++) {
        int64_t length = p->begin[r + 1] - p->begin[r];
        line->begin[r + 1] = line->begin[r] + (ops & silent ? 0 : length);
        for (int64_t k = p->begin[r]; ops & silent && k < p->begin[r + 1]; k++)
            line->begin[r + 1] += !tp_sched_is_message(p->code[k].op) && !tp_sched_is_guest(p->code[k].op);
        line->operations = line->begin[r + 1];
    }
    if (whole && keep_intervals) {
        size_t count = (size_t)line->operations + 1;
        line->start_s = malloc(count * sizeof *line->start_s);
        line->end_s = malloc(count * sizeof *line->end_s);
        line->at = malloc(count * sizeof *line->at);
        whole = line->start_s != NULL && line->end_s != NULL && line->at != NULL;
    }
    if (!whole) {
        tp_timeline_close(line);
        return tp_fail(TP_EMEMORY, "no memory for the timeline of %lld instructions", (long long)p->begin[p->ranks]);
    }
    *out = line;
    return TP_OK;
}

void
tp_timeline_close(tp_timeline *timeline)
{
    if (timeline == NULL)
        return;
    free(timeline->begin);
    free(timeline->start_s);
    free(timeline->end_s);
    free(timeline->at);
    free(timeline->busy_s);
    free(timeline->peak_bytes);
    free(timeline);
}

static tp_status
fill(sim *s, unsigned ops, tp_timeline *line, int keep_intervals)
{
    const tp_program *p = s->p;
    if (keep_intervals) {
        s->line = line;
        for (int r = 0; r < p->ranks; r++)
            s->interval[r] = line->begin[r];
    }
    TP_TRY(run_bodies(s));
    run_ends(s);
    line->makespan_s = makespan(s);
    if (!isfinite(line->makespan_s * p->ranks))
        return tp_fail(TP_EVALUE, "the seconds of this program add up beyond what a double holds: shorter operations and "
                                  "messages would be right");
    for (int r = 0; r < p->ranks; r++) {
        s->sums[r] = sums_s(s, r);
        line->busy_s[r] = s->work[r] - s->recompute[r] - s->swap[r] - s->sums[r];
        double first = s->first_backward[r]; /* from here on: seconds idle before it */
        s->first_backward[r] = first < 0.0 ? line->makespan_s - s->work[r] : first - s->work_before[r];
    }
    tp_totals totals = {line->makespan_s, s->work, s->recompute, s->swap, s->sums, s->first_backward,
                        (ops & TP_SCHED_HAS_BESIDE) != 0};
    TP_TRY(tp_sched_bubbles(p, s->d, s->runs, s->run_count, &totals, line->bubbles_s));
    TP_TRY(tp_sched_bound(p, ops, s->d, &line->lower_bound_s));
    /* The bound adds the same seconds in another order: what rounding puts above the makespan is no bound's fault. A real
     * violation is larger, and stays to be seen. */
    if (line->lower_bound_s > line->makespan_s && line->lower_bound_s <= line->makespan_s * (1.0 + 1e-12))
        line->lower_bound_s = line->makespan_s;
    return TP_OK;
}

tp_status
tp_program_simulate(const tp_program *program, const tp_durations *durations, const double *activation_bytes,
                    int64_t bytes_stage_stride, int64_t bytes_unit_stride, int keep_intervals, tp_timeline **out)
{
    unsigned ops = tp_sched_ops(program);
    TP_TRY(tp_sched_check_order(program, ops));
    TP_TRY(tp_durations_check(program, durations));
    sim s;
    TP_TRY(sim_open(&s, program, durations, ops));
    tp_timeline *line = NULL;
    tp_status status = line_open(program, ops, keep_intervals, &line);
    if (status == TP_OK)
        status = fill(&s, ops, line, keep_intervals);
    sim_close(&s);
    if (status != TP_OK) {
        tp_timeline_close(line);
        return status;
    }
    if (activation_bytes != NULL)
        tp_program_peak_bytes(program, activation_bytes, bytes_stage_stride, bytes_unit_stride, line->peak_bytes);
    *out = line;
    return TP_OK;
}
