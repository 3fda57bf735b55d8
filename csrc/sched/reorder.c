/* Forwards and backwards in another order, on the placement as it is, by list scheduling: of all ranks the op that can start first is
 * placed; of a rank's that can start together a backward before a forward, of backwards the latest stage's, of forwards the earliest
 * stage's. So micro-batches go forward breadth first, and a micro-batch goes back as soon as it can. A rank that waits does weight
 * gradients, which take no place in the result: split puts them where they are best. */
#include "csrc/sched/earliest.h"
#include "csrc/sched/internal.h"
#include "csrc/sched/links.h"

#include <math.h>
#include <stdlib.h>

#include "csrc/base/deadline.h"

#define NOT_YET (-1.0)
#define TICKS 0x1p40   /* of all work */
#define LEAST_S 1e-290 /* of all work: what is divided by it stays a number */
#define LONGEST 0x1p50 /* ticks of one duration: longer ones are cut */

/* The next slice of a kind on a stage, in canonical order. */
typedef struct {
    int32_t micro, slice;
    int64_t count; /* that are done */
} cursor;

typedef struct {
    int op, stage; /* op -1: nothing can start yet */
    double start;
} choice;

typedef struct {
    const tp_program *p;
    tp_program *to;
    const tp_durations *d;
    int64_t units, asked;         /* asked: steps since somebody was asked whether to stop */
    double *ready_f, *ready_b;    /* [stages * units] when it comes to its reader; NOT_YET */
    double *clock;                /* [ranks] */
    cursor *forward, *back, *weight; /* [stages] */
    choice *next;                 /* [ranks] */
    tp_earliest soonest;
    int64_t *write;               /* [ranks] */
    int32_t *first, *lower, *last, *upper; /* [ranks], [stages] a rank's stages, ascending and descending; -1 */
    tp_sched_links links;
    double per_s, *latency; /* ticks; [2 * stages], NULL: links carry any number of messages at once */
} lister;

/* Clocks count whole ticks, as in split: what comes at the same time does so whatever the costs are multiplied by. */
static double
in_ticks(const lister *l, double seconds)
{
    return rint(fmin(seconds * l->per_s, LONGEST));
}

static double
ticks_of(const lister *l, int op, int stage, int64_t unit)
{
    return in_ticks(l, tp_durations_s(l->d, op, 0, stage, unit));
}

static void
count_ticks(lister *l)
{
    static const int ops[] = {TP_OP_F, TP_OP_I, TP_OP_W};
    double total = 0.0;
    for (int v = 0; v < l->p->stages; v++)
        for (int64_t unit = 0; unit < l->units; unit++)
            for (int i = 0; i < 3; i++)
                total += tp_durations_s(l->d, ops[i], 0, v, unit);
    l->per_s = TICKS / fmax(total, LEAST_S);
    tp_sched_links_reset(&l->links, l->d);
    if (l->latency == NULL)
        return;
    for (int at = 0; at < 2 * l->p->stages; at++)
        l->latency[at] = in_ticks(l, l->d->latency_s[at]);
    l->links.latency_s = l->latency;
}

static void
advance(const tp_program *p, cursor *c, int forward)
{
    c->count++;
    if (forward ? ++c->slice < p->slices[c->micro] : --c->slice >= 0)
        return;
    c->micro++;
    c->slice = forward || c->micro >= p->micros ? 0 : p->slices[c->micro] - 1;
}

static int64_t
cell_of(const lister *l, int stage, const cursor *c)
{
    return stage * l->units + l->p->offset[c->micro] + c->slice;
}

static int
is_done(const lister *l, int stage, const cursor *c)
{
    return c->micro >= tp_program_micro_end(l->p, stage);
}

/* When the next forward of a stage may begin, but for its rank. */
static double
forward_ready(const lister *l, int v)
{
    const cursor *c = &l->forward[v];
    if (is_done(l, v, c))
        return NOT_YET;
    return tp_program_is_first(l->p, v) ? 0.0 : l->ready_f[cell_of(l, v - 1, c)];
}

/* The same of its next backward: all slices of the micro-batch have gone forward. */
static double
back_ready(const lister *l, int v)
{
    const cursor *c = &l->back[v];
    if (is_done(l, v, c) || c->micro >= l->forward[v].micro)
        return NOT_YET;
    return tp_program_is_last(l->p, v) ? 0.0 : l->ready_b[cell_of(l, v + 1, c)];
}

static void
consider(choice *best, int op, int stage, double ready, double clock)
{
    double start = ready > clock ? ready : clock;
    if (ready >= 0.0 && (best->op < 0 || start < best->start))
        *best = (choice){op, stage, start};
}

/* The rank's next op: the earliest start; of equals, the first considered. */
static choice
choose(const lister *l, int rank)
{
    choice best = {-1, 0, 0.0};
    double clock = l->clock[rank];
    for (int v = l->last[rank]; v >= 0; v = l->lower[v])
        consider(&best, TP_OP_B, v, back_ready(l, v), clock);
    for (int v = l->first[rank]; v >= 0; v = l->upper[v])
        consider(&best, TP_OP_F, v, forward_ready(l, v), clock);
    if (best.op >= 0 && best.start <= clock)
        return best;
    for (int v = l->last[rank]; v >= 0; v = l->lower[v])
        if (l->weight[v].count < l->back[v].count)
            return (choice){TP_OP_W, v, clock};
    return best;
}

/* An op that another stage may read: its messages, and what is ready when. Returns when the rank goes on. */
static double
pass_on(lister *l, int back, int v, const cursor *c, double start)
{
    int64_t unit = l->p->offset[c->micro] + c->slice;
    int from = back ? v + 1 : v, to = back ? v : v + 1; /* tp_program_remote's stages */
    double end = start + ticks_of(l, back ? TP_OP_I : TP_OP_F, v, unit), there;
    if (tp_program_remote(l->p, from))
        end += ticks_of(l, back ? TP_OP_RB : TP_OP_RF, v, unit);
    there = end;
    if (tp_program_remote(l->p, to)) {
        double lag = in_ticks(l, tp_durations_lag_s(l->d, l->units, back, 0, v, unit));
        end += ticks_of(l, back ? TP_OP_SB : TP_OP_SF, v, unit);
        there = tp_sched_links_send(&l->links, back, v, end, lag) + lag;
    }
    (back ? l->ready_b : l->ready_f)[v * l->units + unit] = there;
    return end;
}

static void
place_op(lister *l, int rank, const choice *best)
{
    int v = best->stage;
    cursor *c = best->op == TP_OP_F ? &l->forward[v] : best->op == TP_OP_B ? &l->back[v] : &l->weight[v];
    if (best->op == TP_OP_W)
        l->clock[rank] = best->start + ticks_of(l, TP_OP_W, v, l->p->offset[c->micro] + c->slice);
    else {
        l->clock[rank] = pass_on(l, best->op == TP_OP_B, v, c, best->start);
        l->to->code[l->write[rank]++] = (tp_instr){.op = (uint16_t)best->op,
                                                   .stage = (uint16_t)v,
                                                   .micro = (uint16_t)c->micro,
                                                   .slice = (uint16_t)c->slice,
                                                   .peer = -1};
    }
    advance(l->p, c, best->op == TP_OP_F);
}

static void
choose_next(lister *l, int rank)
{
    l->next[rank] = choose(l, rank);
    tp_earliest_set(&l->soonest, rank, l->next[rank].op >= 0, l->next[rank].start);
}

static void
begin(lister *l)
{
    const tp_program *p = l->p;
    for (int64_t i = 0; i < 2 * p->stages * l->units; i++)
        l->ready_f[i] = NOT_YET;
    for (int r = 0; r < p->ranks; r++) {
        l->clock[r] = 0.0;
        l->write[r] = l->to->begin[r];
        l->first[r] = l->last[r] = -1;
    }
    for (int v = 0; v < p->stages; v++) {
        int32_t micro = tp_program_micro_begin(p, v), *last = &l->last[p->rank_of[v]];
        l->forward[v] = (cursor){micro, 0, 0};
        l->back[v] = l->weight[v] = (cursor){micro, p->slices[micro] - 1, 0};
        l->lower[v] = *last;
        l->upper[v] = -1;
        *(*last < 0 ? &l->first[p->rank_of[v]] : &l->upper[*last]) = v;
        *last = v;
    }
    tp_earliest_reset(&l->soonest);
    for (int r = 0; r < p->ranks; r++)
        choose_next(l, r);
}

static tp_status
fill(lister *l)
{
    const tp_program *p = l->p;
    begin(l);
    for (int64_t left = l->to->begin[p->ranks]; left > 0;) {
        TP_TRY(tp_deadline_check_after(&l->asked, 32 + p->stages / p->ranks));
        int rank = tp_earliest_first(&l->soonest);
        choice best = l->next[rank];
        place_op(l, rank, &best);
        left -= best.op != TP_OP_W;
        int reader = best.op == TP_OP_W ? -1 : best.stage + (best.op == TP_OP_F ? 1 : -1);
        choose_next(l, rank);
        if (reader >= 0 && reader < p->stages && p->rank_of[reader] != rank) /* nobody else has anything new to choose from */
            choose_next(l, p->rank_of[reader]);
    }
    return TP_OK;
}

/* As many F and B on each rank as the program has. */
static tp_status
open_target(const tp_program *p, tp_program **out)
{
    int64_t *counts = calloc((size_t)p->ranks, sizeof *counts);
    if (counts == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d ranks", p->ranks);
    for (int v = 0; v < p->stages; v++)
        counts[p->rank_of[v]] += 2 * (p->offset[tp_program_micro_end(p, v)] - p->offset[tp_program_micro_begin(p, v)]);
    tp_status status = tp_program_open(p->ranks, p->stages, p->micros, p->slices, p->rank_of, counts, out);
    free(counts);
    if (status == TP_OK)
        (*out)->copies = p->copies;
    return status;
}

static tp_status
lister_open(lister *l)
{
    size_t stages = (size_t)l->p->stages, ranks = (size_t)l->p->ranks;
    int in_turn = l->d->latency_s != NULL;
    TP_TRY(tp_sched_links_open(l->p, &l->links));
    TP_TRY(open_target(l->p, &l->to));
    TP_TRY(tp_earliest_open(&l->soonest, l->p->ranks));
    l->ready_f = malloc(2 * stages * (size_t)l->units * sizeof *l->ready_f);
    l->clock = malloc(ranks * sizeof *l->clock);
    l->forward = malloc(3 * stages * sizeof *l->forward);
    l->next = malloc(ranks * sizeof *l->next);
    l->write = malloc(ranks * sizeof *l->write);
    l->first = malloc(2 * (ranks + stages) * sizeof *l->first);
    l->latency = in_turn ? malloc(2 * stages * sizeof *l->latency) : NULL;
    if (l->ready_f == NULL || l->clock == NULL || l->forward == NULL || l->next == NULL || l->write == NULL ||
        l->first == NULL || (in_turn && l->latency == NULL))
        return tp_fail(TP_EMEMORY, "no memory to order %lld instructions", (long long)l->to->begin[l->p->ranks]);
    l->ready_b = l->ready_f + stages * (size_t)l->units;
    l->back = l->forward + stages;
    l->weight = l->back + stages;
    l->last = l->first + ranks;
    l->lower = l->last + ranks;
    l->upper = l->lower + stages;
    count_ticks(l);
    return TP_OK;
}

static void
lister_close(lister *l)
{
    tp_sched_links_close(&l->links);
    tp_earliest_close(&l->soonest);
    tp_program_close(l->to);
    free(l->ready_f);
    free(l->clock);
    free(l->forward);
    free(l->next);
    free(l->write);
    free(l->first);
    free(l->latency);
}

static tp_status
reorder(const tp_program *compute, const tp_durations *durations, tp_program **out)
{
    lister l = {.p = compute, .d = durations, .units = tp_program_units(compute)};
    tp_status status = lister_open(&l);
    if (status == TP_OK)
        status = fill(&l);
    if (status == TP_OK) {
        *out = l.to;
        l.to = NULL;
    }
    lister_close(&l);
    return status;
}

tp_status
tp_program_reorder(const tp_program *program, const tp_durations *durations, tp_program **out)
{
    const unsigned other = ~(TP_SCHED_BIT(TP_OP_F) | TP_SCHED_BIT(TP_OP_B) | TP_SCHED_BIT(TP_OP_I) | TP_SCHED_BIT(TP_OP_W));
    tp_program *compute = NULL;
    if (durations->seconds[TP_OP_F] == NULL || durations->seconds[TP_OP_I] == NULL || durations->seconds[TP_OP_W] == NULL)
        return tp_fail(TP_EVALUE, "reorder needs the seconds of F, I and W");
    TP_TRY(tp_program_strip(program, &compute));
    tp_status status = tp_program_check(compute);
    for (int r = 0; r < compute->ranks && status == TP_OK && tp_sched_ops(compute) & other; r++)
        for (int64_t k = compute->begin[r]; k < compute->begin[r + 1] && status == TP_OK; k++)
            if (TP_SCHED_BIT(compute->code[k].op) & other || compute->code[k].flags & TP_HALVES)
                status = tp_sched_refuse(compute, r, k - compute->begin[r], "reorder knows whole F, B, I and W alone");
    if (status == TP_OK)
        status = tp_durations_check(compute, durations);
    if (status == TP_OK)
        status = reorder(compute, durations, out);
    tp_program_close(compute);
    return status;
}
