/* ZB-V where no closed rule gives it, by list scheduling at nominal durations: of all ranks the op that can start first is
 * placed, backward before forward before weight gradients; W fills waits (zero bubble pipelines, Qi et al. 2024, sec. 3 and
 * 6). A few variants are tried and the best by simulation stays. */
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

#define NOT_YET (-1.0)

enum { CHUNKS = 2 };

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
    const tp_zb_v_request *r;
    tp_program *to;
    place *stage;  /* [stages] */
    double *times; /* their memory */
    double *clock; /* [ranks] */
    int *held;     /* [ranks] forwards whose weights (or backward) are still to come */
    int64_t *write;
    variant v;
} lister;

typedef struct {
    int op, stage; /* op -1: nothing can start yet */
    double start;
} choice;

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
    const tp_zb_v_request *r = l->r;
    choice best = {-1, 0, 0.0};
    int weight = -1;
    for (int k = 0; k < CHUNKS; k++) {
        int v = stage_of(l, rank, l->v.late ? CHUNKS - 1 - k : k);
        const place *p = &l->stage[v];
        if (p->backward < p->forward)
            consider(&best, TP_OP_I, v, p->ready_b[p->backward], l->clock[rank]);
        if (p->weight < p->backward &&
            (weight < 0 || p->backward - p->weight > l->stage[weight].backward - l->stage[weight].weight))
            weight = v;
    }
    for (int k = 0; k < CHUNKS; k++) {
        int chunk = l->v.late ? CHUNKS - 1 - k : k, v = stage_of(l, rank, chunk);
        const place *p = &l->stage[v];
        if (p->forward < r->micros && l->held[rank] < r->most - (CHUNKS - 1 - chunk))
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
    if (c->op == TP_OP_W)
        l->held[rank]--;
    if (c->op != TP_OP_W && c->stage > 0)
        p[-1].ready_b[micro] = end;
}

static tp_status
fill(lister *l)
{
    const tp_zb_v_request *r = l->r;
    int stages = l->to->stages;
    for (int64_t i = 0; i < 2 * (int64_t)stages * r->micros; i++)
        l->times[i] = NOT_YET;
    for (int v = 0; v < stages; v++)
        l->stage[v] = (place){.ready_f = l->times + (int64_t)v * r->micros,
                              .ready_b = l->times + ((int64_t)stages + v) * r->micros};
    memset(l->held, 0, (size_t)r->ranks * sizeof *l->held);
    for (int q = 0; q < r->micros; q++)
        l->stage[0].ready_f[q] = 0.0;
    for (int rank = 0; rank < r->ranks; rank++) {
        l->clock[rank] = 0.0;
        l->write[rank] = l->to->begin[rank];
    }
    for (int64_t ops = 3 * (int64_t)stages * r->micros; ops > 0; ops--) {
        choice best = {-1, 0, 0.0};
        int rank = 0;
        for (int k = 0; k < r->ranks; k++) {
            choice mine = choose(l, k);
            if (mine.op >= 0 && (best.op < 0 || mine.start < best.start)) {
                best = mine;
                rank = k;
            }
        }
        if (best.op < 0)
            return tp_fail(TP_EINFEASIBLE, "most is %d activations of a stage: at least 2 would be right", r->most);
        place_op(l, rank, &best);
    }
    return TP_OK;
}

static tp_status
open_target(const tp_zb_v_request *r, tp_program **out)
{
    int stages = r->ranks * CHUNKS;
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
            counts[k] = 3 * units * CHUNKS;
        for (int v = 0; v < stages; v++)
            rank_of[v] = v / r->ranks % 2 == 0 ? v % r->ranks : r->ranks - 1 - v % r->ranks;
        status = tp_program_open(r->ranks, stages, r->micros, r->slices, rank_of, counts, out);
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

static tp_status
best_of(lister *l, tp_program **best)
{
    static const double thresholds[] = {0.0, 0.25, 0.5, 0.75, 1.0};
    const tp_zb_v_request *r = l->r;
    double least = 0.0;
    int done = 0;
    if (r->micros >= 2 * r->ranks - 1 && r->most >= 2 * r->ranks) {
        TP_TRY(tp_program_build(TP_ZB_V, r->ranks, 2, r->micros, r->slices, &l->to));
        TP_TRY(compete(l, best, &least));
        done = r->forward_s == r->input_s && r->input_s == r->weight_s; /* no order is faster */
    }
    for (int i = 0; i < 10 && !done; i++) {
        l->v.threshold = thresholds[i / 2];
        l->v.late = i % 2 == 0;
        TP_TRY(open_target(r, &l->to));
        TP_TRY(fill(l));
        TP_TRY(compete(l, best, &least));
    }
    return TP_OK;
}

static tp_status
request_ok(const tp_zb_v_request *r)
{
    if (r->ranks < 1 || r->ranks > 32767)
        return tp_fail(TP_EVALUE, "ranks is %d: 1 to 32767 would be right", r->ranks);
    if (r->micros < 1 || r->micros > 65536)
        return tp_fail(TP_EVALUE, "micro-batches is %d: 1 to 65536 would be right", r->micros);
    if (!(r->forward_s > 0 && r->forward_s < 1e300 && r->input_s > 0 && r->input_s < 1e300 && r->weight_s > 0 &&
          r->weight_s < 1e300))
        return tp_fail(TP_EVALUE, "nominal seconds are %g, %g and %g: finite and above 0 would be right", r->forward_s,
                       r->input_s, r->weight_s);
    return TP_OK;
}

tp_status
tp_program_build_zb_v(const tp_zb_v_request *request, tp_program **out)
{
    TP_TRY(request_ok(request));
    size_t ranks = (size_t)request->ranks, stages = CHUNKS * ranks;
    lister l = {.r = request};
    l.v.seconds[TP_OP_F] = request->forward_s;
    l.v.seconds[TP_OP_I] = request->input_s;
    l.v.seconds[TP_OP_W] = request->weight_s;
    l.stage = malloc(stages * sizeof *l.stage);
    l.times = malloc(2 * stages * (size_t)request->micros * sizeof *l.times);
    l.clock = malloc(ranks * sizeof *l.clock);
    l.held = malloc(ranks * sizeof *l.held);
    l.write = malloc(ranks * sizeof *l.write);
    tp_program *best = NULL;
    tp_status status = TP_OK;
    if (l.stage == NULL || l.times == NULL || l.clock == NULL || l.held == NULL || l.write == NULL)
        status = tp_fail(TP_EMEMORY, "no memory to place %zu stages", stages);
    else
        status = best_of(&l, &best);
    free(l.stage);
    free(l.times);
    free(l.clock);
    free(l.held);
    free(l.write);
    tp_program_close(l.to);
    if (status != TP_OK) {
        tp_program_close(best);
        return status;
    }
    *out = best;
    return TP_OK;
}
