/* Schedules whose stages go down the ranks and up again, by list scheduling at nominal durations: of all ranks the op that can
 * start first is placed, backward before forward before weight gradients. ZB-V where no closed rule gives it: two chunks, W
 * fills waits (zero bubble pipelines, Qi et al. 2024, sec. 3 and 6). Hanayo (Liu et al. 2023): two chunks a wave, whole
 * backwards. A few variants are tried and the best by simulation stays. */
#include "csrc/sched/earliest.h"
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

#define NOT_YET (-1.0)

typedef struct {
    double seconds[TP_OPS]; /* nominal */
    double threshold;       /* W goes where the wait is at least this share of it */
    int late;               /* of two chunks' ops that can start together, the later chunk's first */
} variant;

/* Progress of one virtual stage: the next micro-batch of each kind. */
typedef struct {
    int forward, backward, weight;
    double *ready_f, *ready_b; /* [micros] when the input is on the rank; NOT_YET */
} place;

typedef struct {
    int op, stage; /* op -1: nothing can start yet */
    double start;
} choice;

typedef struct {
    const tp_zigzag_request *r;
    int chunks, backward; /* backward: TP_OP_I, and W apart, or TP_OP_B */
    tp_program *to;
    choice *next;  /* [ranks] */
    tp_earliest first;
    place *stage;  /* [stages] */
    double *times; /* their memory */
    double *clock; /* [ranks] */
    int *held;     /* [ranks] forwards whose weights (or backward) are still to come */
    int64_t *write;
    variant v;
    int64_t asked; /* steps since somebody was asked whether to stop */
} lister;

static int
stage_of(const lister *l, int rank, int chunk)
{
    int ranks = l->r->ranks;
    return chunk * ranks + (chunk % 2 == 0 ? rank : ranks - 1 - rank);
}

static void
consider(choice *best, int op, int stage, double ready, double clock)
{
    double start = ready > clock ? ready : clock;
    if (ready < 0.0 || (best->op >= 0 && start >= best->start))
        return;
    *best = (choice){op, stage, start};
}

/* The rank's next op: the earliest start; of equals, the first considered. */
static choice
choose(const lister *l, int rank)
{
    const tp_zigzag_request *r = l->r;
    choice best = {-1, 0, 0.0};
    int weight = -1, last = l->chunks - 1;
    for (int k = 0; k <= last; k++) {
        int v = stage_of(l, rank, l->v.late ? last - k : k);
        const place *p = &l->stage[v];
        if (p->backward < p->forward)
            consider(&best, l->backward, v, p->ready_b[p->backward], l->clock[rank]);
        if (l->backward == TP_OP_I && p->weight < p->backward &&
            (weight < 0 || p->backward - p->weight > l->stage[weight].backward - l->stage[weight].weight))
            weight = v;
    }
    for (int k = 0; k <= last; k++) {
        int chunk = l->v.late ? last - k : k, v = stage_of(l, rank, chunk);
        const place *p = &l->stage[v];
        if (p->forward < r->micros && l->held[rank] < r->most - (last - chunk))
            consider(&best, TP_OP_F, v, p->ready_f[p->forward], l->clock[rank]);
    }
    double patience = l->v.threshold * l->v.seconds[TP_OP_W];
    if (weight >= 0 && (best.op < 0 || best.start > l->clock[rank] + patience))
        best = (choice){TP_OP_W, weight, l->clock[rank]};
    return best;
}

/* Slices of a micro-batch stay together: ascending in F, descending in the others. */
static void
emit(lister *l, int rank, int op, int stage, int micro)
{
    int slices = l->to->slices[micro];
    for (int s = 0; s < slices; s++)
        l->to->code[l->write[rank]++] = (tp_instr){.op = (uint16_t)op,
                                                   .stage = (uint16_t)stage,
                                                   .micro = (uint16_t)micro,
                                                   .slice = (uint16_t)(op == TP_OP_F ? s : slices - 1 - s),
                                                   .peer = -1};
}

static void
place_op(lister *l, int rank, const choice *c)
{
    place *p = &l->stage[c->stage];
    int last = l->to->stages - 1;
    int micro = c->op == TP_OP_F ? p->forward++ : c->op == TP_OP_W ? p->weight++ : p->backward++;
    double end = c->start + l->v.seconds[c->op];
    l->clock[rank] = end;
    emit(l, rank, c->op, c->stage, micro);
    if (c->op == TP_OP_F) {
        l->held[rank]++;
        *(c->stage < last ? &p[1].ready_f[micro] : &p->ready_b[micro]) = end;
        return;
    }
    if (c->op == TP_OP_W || c->op == TP_OP_B)
        l->held[rank]--;
    if (c->op != TP_OP_W && c->stage > 0)
        p[-1].ready_b[micro] = end;
}

/* Entries of a stage in `times`: an odd number of cache lines, for with powers of two the stages would share the same few sets of
 * every cache. */
static int64_t
times_a_stage(const lister *l)
{
    return (((int64_t)l->r->micros + 7) / 8 | 1) * 8;
}

static int64_t
ops_a_slice(const lister *l)
{
    return l->backward == TP_OP_I ? 3 : 2;
}

static void
choose_next(lister *l, int rank)
{
    l->next[rank] = choose(l, rank);
    tp_earliest_set(&l->first, rank, l->next[rank].op >= 0, l->next[rank].start);
}

static tp_status
fill(lister *l)
{
    const tp_zigzag_request *r = l->r;
    int stages = l->to->stages;
    int64_t row = times_a_stage(l);
    for (int64_t i = 0; i < 2 * stages * row; i++)
        l->times[i] = NOT_YET;
    for (int v = 0; v < stages; v++)
        l->stage[v] = (place){.ready_f = l->times + v * row, .ready_b = l->times + (stages + v) * row};
    memset(l->held, 0, (size_t)r->ranks * sizeof *l->held);
    for (int q = 0; q < r->micros; q++)
        l->stage[0].ready_f[q] = 0.0;
    for (int rank = 0; rank < r->ranks; rank++) {
        l->clock[rank] = 0.0;
        l->write[rank] = l->to->begin[rank];
    }
    tp_earliest_reset(&l->first);
    for (int k = 0; k < r->ranks; k++)
        choose_next(l, k);
    for (int64_t ops = ops_a_slice(l) * stages * r->micros; ops > 0; ops--) {
        TP_TRY(tp_deadline_check_after(&l->asked, 32 + 8 * (int64_t)l->chunks));
        int rank = tp_earliest_first(&l->first);
        choice best = l->next[rank];
        if (best.op < 0)
            return tp_fail(TP_EINFEASIBLE, "most is %d activations of a stage: at least %d would be right", r->most, l->chunks);
        place_op(l, rank, &best);
        int reader = best.op == TP_OP_W ? -1 : best.stage + (best.op == TP_OP_F ? 1 : -1);
        choose_next(l, rank);
        if (reader >= 0 && reader < stages && l->to->rank_of[reader] != rank) /* nobody else has anything new to choose from */
            choose_next(l, l->to->rank_of[reader]);
    }
    return TP_OK;
}

static tp_status
open_target(lister *l)
{
    const tp_zigzag_request *r = l->r;
    int stages = r->ranks * l->chunks;
    int64_t units = 0;
    for (int q = 0; q < r->micros; q++)
        units += r->slices[q];
    int64_t *counts = malloc((size_t)r->ranks * sizeof *counts);
    int32_t *rank_of = malloc((size_t)stages * sizeof *rank_of);
    tp_status status = TP_OK;
    if (counts == NULL || rank_of == NULL) {
        status = tp_fail(TP_EMEMORY, "no memory for %d stages", stages);
    } else {
        for (int k = 0; k < r->ranks; k++)
            counts[k] = ops_a_slice(l) * units * l->chunks;
        for (int v = 0; v < stages; v++)
            rank_of[v] = v / r->ranks % 2 == 0 ? v % r->ranks : r->ranks - 1 - v % r->ranks;
        status = tp_program_open(r->ranks, stages, r->micros, r->slices, rank_of, counts, &l->to);
    }
    free(counts);
    free(rank_of);
    return status;
}

/* Keep l->to if it is faster than *best. */
static tp_status
compete(lister *l, tp_program **best, double *least)
{
    tp_durations d = {.stage_stride = 0};
    for (int op = TP_OP_F; op <= TP_OP_W; op++)
        d.seconds[op] = &l->v.seconds[op];
    tp_sim *sim = NULL;
    TP_TRY(tp_sim_open(l->to, &sim));
    double makespan = 0.0;
    tp_sim_run(sim, &d, &makespan);
    tp_sim_close(sim);
    TP_TRY(tp_deadline_check_told());
    if (*best == NULL || makespan < *least) {
        tp_program_close(*best);
        *best = l->to;
        *least = makespan;
    } else {
        tp_program_close(l->to);
    }
    l->to = NULL;
    return TP_OK;
}

/* ZB-V's closed pattern; with whole backwards: each where its I stands, and no W. */
static tp_status
open_pattern(lister *l)
{
    tp_program *apart = NULL;
    if (l->backward == TP_OP_I)
        return tp_program_build(TP_ZB_V, l->r->ranks, 2, l->r->micros, l->r->slices, &l->to);
    TP_TRY(tp_program_build(TP_ZB_V, l->r->ranks, 2, l->r->micros, l->r->slices, &apart));
    tp_status status = open_target(l);
    for (int rank = 0; status == TP_OK && rank < l->r->ranks; rank++) {
        tp_instr *to = &l->to->code[l->to->begin[rank]];
        for (int64_t k = apart->begin[rank]; k < apart->begin[rank + 1]; k++) {
            if (apart->code[k].op == TP_OP_W)
                continue;
            *to = apart->code[k];
            if (to->op == TP_OP_I)
                to->op = TP_OP_B;
            to++;
        }
    }
    tp_program_close(apart);
    return status;
}

static tp_status
best_of(lister *l, tp_program **best)
{
    static const double thresholds[] = {0.0, 0.25, 0.5, 0.75, 1.0};
    const tp_zigzag_request *r = l->r;
    double least = 0.0;
    int done = 0, variants = l->backward == TP_OP_I ? 10 : 2; /* without W there is nothing to be patient with */
    if (l->chunks == 2 && r->micros >= 2 * r->ranks - 1 && r->most >= 2 * r->ranks) {
        TP_TRY(open_pattern(l));
        TP_TRY(compete(l, best, &least));
        done = l->backward == TP_OP_I && r->forward_s == r->input_s && r->input_s == r->weight_s; /* no order is faster */
    }
    for (int i = 0; i < variants && !done; i++) {
        l->v.threshold = thresholds[i / 2];
        l->v.late = i % 2 == 0;
        TP_TRY(open_target(l));
        TP_TRY(fill(l));
        TP_TRY(compete(l, best, &least));
    }
    return TP_OK;
}

static tp_status
request_ok(const tp_zigzag_request *r)
{
    if (r->ranks < 1 || r->ranks > 32767)
        return tp_fail(TP_EVALUE, "ranks is %d: 1 to 32767 would be right", r->ranks);
    if (r->micros < 1 || r->micros > 65536)
        return tp_fail(TP_EVALUE, "micro-batches is %d: 1 to 65536 would be right", r->micros);
    if (!(r->forward_s > 0 && r->forward_s < 1e300 && r->input_s > 0 && r->input_s < 1e300 && r->weight_s > 0 &&
          r->weight_s < 1e300))
        return tp_fail(TP_EVALUE, "nominal seconds are %g, %g and %g: above 0 and below 1e300 would be right", r->forward_s,
                       r->input_s, r->weight_s);
    return TP_OK;
}

static tp_status
build(lister *l, tp_program **out)
{
    TP_TRY(request_ok(l->r));
    size_t ranks = (size_t)l->r->ranks, stages = (size_t)l->chunks * ranks;
    l->v.seconds[TP_OP_F] = l->r->forward_s;
    l->v.seconds[TP_OP_I] = l->r->input_s;
    l->v.seconds[TP_OP_W] = l->r->weight_s;
    l->v.seconds[TP_OP_B] = l->r->input_s + l->r->weight_s;
    l->stage = malloc(stages * sizeof *l->stage);
    l->times = malloc(2 * stages * (size_t)times_a_stage(l) * sizeof *l->times);
    l->clock = malloc(ranks * sizeof *l->clock);
    l->next = malloc(ranks * sizeof *l->next);
    l->held = malloc(ranks * sizeof *l->held);
    l->write = malloc(ranks * sizeof *l->write);
    tp_program *best = NULL;
    tp_status status = tp_earliest_open(&l->first, l->r->ranks);
    if (status != TP_OK) {
        /* told already */
    } else if (l->stage == NULL || l->times == NULL || l->clock == NULL || l->next == NULL || l->held == NULL || l->write == NULL) {
        status = tp_fail(TP_EMEMORY, "no memory to place %zu stages", stages);
    } else {
        status = best_of(l, &best);
    }
    tp_earliest_close(&l->first);
    free(l->stage);
    free(l->times);
    free(l->clock);
    free(l->next);
    free(l->held);
    free(l->write);
    tp_program_close(l->to);
    if (status != TP_OK) {
        tp_program_close(best);
        return status;
    }
    *out = best;
    return TP_OK;
}

tp_status
tp_program_build_zb_v(const tp_zigzag_request *request, tp_program **out)
{
    lister l = {.r = request, .chunks = 2, .backward = TP_OP_I};
    return build(&l, out);
}

tp_status
tp_program_build_hanayo(const tp_zigzag_request *request, int waves, tp_program **out)
{
    if (waves < 1 || waves > 65536 / 2 / (request->ranks > 1 ? request->ranks : 1))
        return tp_fail(TP_EVALUE, "waves is %d: 1 to %d would be right with %d ranks", waves,
                       65536 / 2 / (request->ranks > 1 ? request->ranks : 1), request->ranks);
    lister l = {.r = request, .chunks = 2 * waves, .backward = TP_OP_B};
    return build(&l, out);
}
