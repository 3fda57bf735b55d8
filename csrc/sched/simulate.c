/* Worklist evaluation, O(N): a rank runs until its next op reads a message that nobody has made yet; whoever makes it
 * wakes that rank. Ends are kept by (stage, unit), so neighbours read them in the order they were written. */
#include "csrc/sched/worklist.h"

#include <math.h>
#include <stdlib.h>

#include "csrc/base/deadline.h"

typedef tp_worklist sim;

static void
sim_close(sim *s)
{
    tp_worklist_close(s);
    free(s->work);
    free(s->waiting);
    free(s->next);
    free(s->stack);
    free(s->interval);
}

static tp_status
sim_open(sim *s, const tp_program *p, const tp_durations *d, const tp_lanes *lanes, unsigned ops)
{
    size_t ranks = (size_t)p->ranks;
    *s = (sim){.p = p, .d = d, .lanes = lanes, .units = tp_program_units(p), .lowered = (ops & TP_SCHED_MESSAGES) != 0,
               .two_places = (ops & TP_SCHED_HAS_TWO_PLACES) != 0};
    s->work = calloc(6 * ranks, sizeof *s->work);
    s->waiting = calloc(ranks, sizeof *s->waiting);
    s->next = malloc(ranks * sizeof *s->next);
    s->stack = malloc(ranks * sizeof *s->stack);
    s->interval = malloc(ranks * sizeof *s->interval);
    if (s->work == NULL || s->waiting == NULL || s->next == NULL || s->stack == NULL || s->interval == NULL) {
        sim_close(s);
        return tp_fail(TP_EMEMORY, "no memory to simulate %lld instructions", (long long)p->begin[p->ranks]);
    }
    s->recompute = s->work + ranks;
    s->swap = s->recompute + ranks;
    s->sums = s->swap + ranks;
    s->first_backward = s->sums + ranks;
    s->work_before = s->first_backward + ranks;
    for (int r = 0; r < p->ranks; r++) {
        s->next[r] = p->begin[r];
        s->first_backward[r] = TP_NOT_YET;
    }
    tp_status status = tp_worklist_open(s, ops);
    if (status != TP_OK)
        sim_close(s);
    return status;
}

/* ---- the run --------------------------------------------------------------------------------------------------------- */

/* In parts, behind which somebody is asked whether to stop: it may end early then. */
static void
run_body(sim *s, int rank)
{
    int64_t end = s->p->begin[rank + 1], part = TP_SCHED_PART;
    while (part == TP_SCHED_PART) {
        int64_t from = s->next[rank], until = from + TP_SCHED_PART;
        tp_worklist_run(s, rank, until < end ? until : end);
        part = s->next[rank] - from;
        if (tp_deadline_told_after(&s->asked, 8 * (part + 1)))
            break;
    }
}

static tp_status
run_bodies(sim *s)
{
    const tp_program *p = s->p;
    for (int r = p->ranks - 1; r >= 0; r--)
        s->stack[s->stacked++] = r;
    while (s->stacked > 0) {
        run_body(s, s->stack[--s->stacked]);
        TP_TRY(tp_deadline_check_told());
    }
    for (int r = 0; r < p->ranks; r++)
        if (s->waiting[r] != NULL) {
            TP_TRY(tp_program_check(p)); /* names the cycle */
            return tp_fail(TP_EINTERNAL, "rank %d waits for ever in a program that check accepts", r);
        }
    return TP_OK;
}

/* Of what AR or OPT takes, what adds up gradients, of a weight that two stages hold or of replicas; *gathers: what follows the
 * meeting and is no work either. */
static double
sum_s(const sim *s, const tp_instr *i, double *gathers)
{
    double all = tp_durations_s(s->d, i->op, 0, i->stage, 0);
    int64_t at = i->stage * s->d->stage_stride;
    double sum = s->d->sum_s == NULL ? 0.0 : s->d->sum_s[at], gather = s->d->gather_s == NULL ? 0.0 : s->d->gather_s[at];
    sum = i->op == TP_OP_AR || sum > all ? all : sum;
    *gathers = gather > all - sum ? all - sum : gather;
    return sum;
}

/* The same of rank r's ends, none of them before instruction `from`. */
static double
sums_s(const sim *s, int r, int64_t from, double *gathers)
{
    double total = 0.0, gather;
    *gathers = 0.0;
    for (int64_t k = s->p->begin[r + 1] - 1; k >= from && tp_sched_is_end(s->p->code[k].op); k--) {
        total += sum_s(s, &s->p->code[k], &gather);
        *gathers += gather;
    }
    return total;
}

/* Whether in this lane messages, and with them sums, take no time. */
static int
is_ideal(const sim *s, int lane)
{
    return lane >= tp_lane_at(s->kept, TP_LANE_IDEAL);
}

/* AR or OPT, in every lane not before `from`. */
static void
run_end(sim *s, int rank, const double *from)
{
    const tp_instr *i = &s->p->code[s->next[rank]];
    double seconds = tp_durations_s(s->d, i->op, 0, i->stage, 0), *clock = &s->clock[rank * tp_lane_count(s->kept)];
    double gathers, ideal = seconds - sum_s(s, i, &gathers) - gathers;
    if (s->line != NULL) {
        double start = clock[0] > from[0] ? clock[0] : from[0];
        tp_worklist_note(s, rank, s->next[rank], start, start + seconds);
    }
    for (int l = 0; l < tp_lane_count(s->kept); l++)
        clock[l] = (clock[l] > from[l] ? clock[l] : from[l]) + (is_ideal(s, l) ? ideal : seconds);
    s->work[rank] += seconds;
    s->next[rank]++;
}

/* By lanes: what rank r, at its first OPT, does before the ranks meet. */
static void
before_meeting(const sim *s, int r, double before[TP_LANES])
{
    double all, gathers, sums = sums_s(s, r, s->next[r], &gathers);
    tp_program_update_s(s->p, s->d, r, &all);
    for (int l = 0; l < tp_lane_count(s->kept); l++)
        before[l] = !is_ideal(s, l) ? all : all > sums ? all - sums : 0.0;
}

/* Ranks whose sums beside the work are not done when they come to their OPT begin it then. */
static void
wait_for_sums(const sim *s)
{
    const int lanes = tp_lane_count(s->kept), copied = s->kept & TP_LANE_COPIED ? tp_lane_at(s->kept, TP_LANE_COPIED) : 0;
    for (int r = 0; s->gone != NULL && r < s->p->ranks; r++) {
        double done[2] = {0.0, 0.0};
        if (s->next[r] == s->p->begin[r + 1])
            continue;
        for (int32_t n = s->summed.begin[r]; n < s->summed.begin[r + 1]; n++) {
            int v = s->summed.stages[n], whole = s->p->code[s->summed.last[v]].op == TP_OP_B;
            for (int i = 0; i < 2; i++)
                done[i] = tp_sched_sum_beside(s->d, v, whole, done[i], s->gone[v][i][0], s->gone[v][i][1]);
        }
        double *clock = &s->clock[r * lanes];
        clock[0] = done[0] > clock[0] ? done[0] : clock[0];
        if (copied > 0)
            clock[copied] = done[1] > clock[copied] ? done[1] : clock[copied];
    }
}

/* By lanes: the latest of the ranks, of one that stands at its OPT when it has measured its gradients; or of those at an AR. */
static void
latest(const sim *s, int at_sums, double most[TP_LANES])
{
    const tp_program *p = s->p;
    int lanes = tp_lane_count(s->kept);
    for (int l = 0; l < lanes; l++)
        most[l] = 0.0;
    if (!at_sums)
        wait_for_sums(s);
    for (int r = 0; r < p->ranks; r++) {
        if (at_sums && !(s->next[r] < p->begin[r + 1] && p->code[s->next[r]].op == TP_OP_AR))
            continue;
        double before[TP_LANES] = {0.0};
        if (s->next[r] < p->begin[r + 1] && !at_sums)
            before_meeting(s, r, before);
        for (int l = 0; l < lanes; l++)
            most[l] = s->clock[r * lanes + l] + before[l] > most[l] ? s->clock[r * lanes + l] + before[l] : most[l];
    }
}

/* AR: both ends meet. Then the first OPT of every rank waits for all to have summed and measured their gradients, whose norm is
 * global: it begins so long before they meet as its own take, as a measured one does without its wait. */
static void
run_ends(sim *s)
{
    const tp_program *p = s->p;
    double from[TP_LANES], mine[TP_LANES];
    latest(s, 1, from);
    for (int r = 0; r < p->ranks; r++)
        while (s->next[r] < p->begin[r + 1] && p->code[s->next[r]].op == TP_OP_AR)
            run_end(s, r, from);
    latest(s, 0, from);
    for (int r = 0; r < p->ranks; r++) {
        before_meeting(s, r, mine);
        for (int l = 0; l < tp_lane_count(s->kept); l++)
            mine[l] = from[l] - mine[l];
        while (s->next[r] < p->begin[r + 1])
            run_end(s, r, mine);
    }
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

static double
lane_of(const sim *s, const double *moment, unsigned lane)
{
    return s->kept & lane ? moment[tp_lane_at(s->kept, lane)] : 0.0;
}

static tp_status
fill(sim *s, unsigned ops, tp_timeline *line, int keep_intervals)
{
    const tp_program *p = s->p;
    double most[TP_LANES];
    if (keep_intervals) {
        s->line = line;
        for (int r = 0; r < p->ranks; r++)
            s->interval[r] = line->begin[r];
    }
    TP_TRY(run_bodies(s));
    run_ends(s);
    latest(s, 0, most);
    line->makespan_s = most[0];
    if (!isfinite(line->makespan_s * p->ranks))
        return tp_fail(TP_EVALUE, "the seconds of this program add up beyond what a double holds: shorter operations and "
                                  "messages would be right");
    for (int r = 0; r < p->ranks; r++) {
        double gathers, sums = sums_s(s, r, p->begin[r], &gathers);
        s->sums[r] = sums + gathers;
        line->busy_s[r] = s->work[r] - s->recompute[r] - s->swap[r] - s->sums[r];
        double first = s->first_backward[r]; /* from here on: seconds idle before it */
        s->first_backward[r] = first < 0.0 ? line->makespan_s - s->work[r] : first - s->work_before[r];
    }
    tp_totals totals = {line->makespan_s, s->work, s->recompute, s->swap, s->sums, s->first_backward,
                        lane_of(s, most, TP_LANE_COPIED), lane_of(s, most, TP_LANE_IDEAL), lane_of(s, most, TP_LANE_EVEN)};
    tp_sched_bubbles(p, s->lanes, &totals, line->bubbles_s);
    TP_TRY(tp_sched_bound(p, ops, s->d, &line->lower_bound_s));
    /* The bound adds the same seconds in another order: what rounding puts above the makespan is no bound's fault. A real
     * violation is larger, and stays to be seen. */
    if (line->lower_bound_s > line->makespan_s && line->lower_bound_s <= line->makespan_s * (1.0 + 1e-12))
        line->lower_bound_s = line->makespan_s;
    return TP_OK;
}

static tp_status
simulate(const tp_program *program, const tp_durations *durations, const tp_lanes *lanes, unsigned ops, int keep_intervals,
         tp_timeline **line)
{
    sim s;
    TP_TRY(sim_open(&s, program, durations, lanes, ops));
    tp_status status = line_open(program, ops, keep_intervals, line);
    if (status == TP_OK)
        status = fill(&s, ops, *line, keep_intervals);
    sim_close(&s);
    return status;
}

tp_status
tp_program_simulate(const tp_program *program, const tp_durations *durations, const double *activation_bytes,
                    int64_t bytes_stage_stride, int64_t bytes_unit_stride, int keep_intervals, tp_timeline **out)
{
    unsigned ops = tp_sched_ops(program);
    TP_TRY(tp_sched_check_order(program, ops));
    TP_TRY(tp_durations_check(program, durations));
    tp_lanes lanes;
    tp_timeline *line = NULL;
    tp_status status = tp_sched_lanes_open(program, durations, (ops & TP_SCHED_HAS_BESIDE) != 0, &lanes);
    if (status == TP_OK)
        status = simulate(program, durations, &lanes, ops, keep_intervals, &line);
    tp_sched_lanes_close(&lanes);
    if (status != TP_OK) {
        tp_timeline_close(line);
        return status;
    }
    if (activation_bytes != NULL)
        tp_program_peak_bytes(program, activation_bytes, bytes_stage_stride, bytes_unit_stride, line->peak_bytes);
    *out = line;
    return TP_OK;
}
