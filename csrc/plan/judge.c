#include "csrc/plan/judge.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/plan/judge_core.h"

enum { F, I, W, UPDATE, EXCHANGE, LINK, LINK_BACK, COPY, AGAIN, WHOLE };
/* Of the halves of forwards, behind the whole's. */
enum { F_FIRST = WHOLE, F_SECOND, LINK_FIRST, LINK_SECOND, COPY_FIRST, COPY_SECOND, SPARE_I, SPARE_W, ALL };
enum { KEPT = 16 }; /* orders that depend on times and are kept: list scheduling costs more than all else */
#define SLIGHT (1.0 - 1e-9) /* less than this much better is rounding */

typedef struct {
    int order;
    double input_s, weight_s;
    tp_program *program;
} kept;

struct tp_judge {
    tp_judge_request asked;
    int stages;
    int64_t work, cells; /* cells: room of a table */
    int tables;
    double *table[ALL]; /* [stages][units]; one block of memory */
    double *latency_s;  /* [2 * stages] */
    int32_t *blocks;    /* [stages][TP_BLOCK_KINDS] */
    int32_t *remade;    /* the same of those that are made again */
    int32_t *halved;    /* [micros] */
    int32_t micros;     /* room of it */
    kept list[KEPT];
    int next;
};

void
tp_judge_close(tp_judge *judge)
{
    if (judge == NULL)
        return;
    for (int i = 0; i < KEPT; i++)
        tp_program_close(judge->list[i].program);
    free(judge->table[0]);
    free(judge->blocks);
    free(judge->latency_s);
    free(judge->halved);
    free(judge);
}

tp_status
tp_judge_open(const tp_judge_request *request, tp_judge **out)
{
    if (request->ranks < 1 || request->chunks < 1 || (int64_t)request->ranks * request->chunks > request->blocks)
        return tp_fail(TP_EVALUE, "%d ranks of %d chunks for %d blocks: at least 1 of each, and a block for each would be right",
                       request->ranks, request->chunks, request->blocks);
    for (int i = 0; i < request->blocks; i++)
        if (request->kind[i] < 0 || request->kind[i] >= TP_BLOCK_KINDS)
            return tp_fail(TP_EVALUE, "block %d is of kind %d: 0 to %d would be right", i, (int)request->kind[i],
                           TP_BLOCK_KINDS - 1);
    tp_judge *judge = calloc(1, sizeof *judge);
    if (judge != NULL)
        judge->blocks = calloc(2 * (size_t)(request->ranks * request->chunks) * TP_BLOCK_KINDS, sizeof *judge->blocks);
    if (judge != NULL)
        judge->latency_s = calloc(2 * (size_t)(request->ranks * request->chunks), sizeof *judge->latency_s);
    if (judge == NULL || judge->blocks == NULL || judge->latency_s == NULL) {
        tp_judge_close(judge);
        return tp_fail(TP_EMEMORY, "no memory for a judge of %d stages", request->ranks * request->chunks);
    }
    judge->asked = *request;
    judge->stages = request->ranks * request->chunks;
    judge->remade = judge->blocks + (ptrdiff_t)judge->stages * TP_BLOCK_KINDS;
    *out = judge;
    return TP_OK;
}

int64_t
tp_judge_work(const tp_judge *judge)
{
    return judge->work;
}

void
tp_judge_count(tp_judge *judge, int64_t work)
{
    judge->work += work;
}

const tp_judge_request *
tp_judge_asked(const tp_judge *judge)
{
    return &judge->asked;
}

/* ---- durations ----------------------------------------------------------------------------------------------------------- */

/* *units: all slices. */
static tp_status
check_candidate(const tp_judge *judge, const tp_candidate *c, int64_t *units)
{
    *units = 0;
    if (c->order < 0 || c->order >= TP_ORDERS || c->order == TP_ZB_V)
        return tp_fail(TP_EVALUE, "order is %d: 0 to %d would be right", c->order, TP_ORDERS - 1);
    if (c->micros < 1 || c->micros > 65536)
        return tp_fail(TP_EVALUE, "%d micro-batches: 1 to 65536 would be right", (int)c->micros);
    for (int32_t q = 0; q < c->micros; q++) {
        if (c->slices[q] < 1 || (c->order == TP_ORDER_SLICED && c->slices[q] > 1))
            return tp_fail(TP_EVALUE, "micro-batch %d has %d slices", (int)q, (int)c->slices[q]);
        *units += c->slices[q];
    }
    if (c->boundary[0] != 0 || c->boundary[judge->stages] != judge->asked.blocks)
        return tp_fail(TP_EVALUE, "the stages cover blocks [%d, %d): [0, %d) would be right", (int)c->boundary[0],
                       (int)c->boundary[judge->stages], judge->asked.blocks);
    for (int k = 0; k < judge->stages; k++)
        if (c->boundary[k + 1] <= c->boundary[k])
            return tp_fail(TP_EVALUE, "stage %d has no block", k);
    return TP_OK;
}

static tp_status
make_room(tp_judge *judge, int64_t units, const tp_candidate *c)
{
    int64_t cells = units * judge->stages;
    int tables = c->order == TP_ORDER_SLICED ? ALL : WHOLE;
    if (cells > judge->cells || tables > judge->tables) {
        cells = cells > judge->cells ? cells : judge->cells;
        tables = tables > judge->tables ? tables : judge->tables;
        double *memory = calloc((size_t)cells * (size_t)tables, sizeof *memory);
        if (memory == NULL)
            return tp_fail(TP_EMEMORY, "no memory for the durations of %lld operations", (long long)cells);
        free(judge->table[0]);
        for (int t = 0; t < tables; t++)
            judge->table[t] = memory + t * cells;
        judge->cells = cells;
        judge->tables = tables;
    }
    if (c->order == TP_ORDER_SLICED && c->micros > judge->micros) {
        free(judge->halved);
        judge->micros = 0;
        judge->halved = malloc((size_t)c->micros * sizeof *judge->halved);
        if (judge->halved == NULL)
            return tp_fail(TP_EMEMORY, "no memory for %d micro-batches", (int)c->micros);
        judge->micros = c->micros;
    }
    return TP_OK;
}

static void
time_updates(tp_judge *judge, const tp_candidate *c, int64_t units)
{
    const tp_judge_costs *costs = &judge->asked.costs;
    memset(judge->blocks, 0, (size_t)judge->stages * TP_BLOCK_KINDS * sizeof *judge->blocks);
    for (int k = 0; k < judge->stages; k++) {
        int32_t *count = judge->blocks + k * TP_BLOCK_KINDS;
        for (int32_t i = c->boundary[k]; i < c->boundary[k + 1]; i++)
            count[judge->asked.kind[i]]++;
        double params = 0.0;
        for (int kind = 0; kind < TP_BLOCK_KINDS; kind++)
            params += count[kind] * costs->params[kind];
        double ring = costs->ring_s + costs->ring_param_s * params;
        if (count[TP_HEAD] > 0 && count[TP_EMBEDDING] == 0)
            params += costs->copied;
        /* Only a stage's first cell of UPDATE and EXCHANGE is ever read. */
        judge->table[UPDATE][k * units] =
            costs->update_s + costs->update_param_s * params + (count[TP_HEAD] > 0 ? costs->update_head_s : 0.0) + ring;
        judge->table[EXCHANGE][k * units] = costs->exchange_s;
    }
}

static int
home(const tp_judge *judge, int order, int stage)
{
    int ranks = judge->asked.ranks, turn = stage % (2 * ranks);
    if (order == TP_ORDER_ZB_V || order == TP_ORDER_DUALPIPE_V || order == TP_ORDER_HANAYO)
        return turn < ranks ? turn : 2 * ranks - 1 - turn;
    return stage % ranks;
}

/* Do messages between this stage and the next leave the node? */
static int
is_far(const tp_judge *judge, int order, int stage)
{
    if (judge->asked.costs.far == NULL || stage + 1 == judge->stages)
        return 0;
    int here = home(judge, order, stage), there = home(judge, order, stage + 1), least = here < there ? here : there;
    if (here == there)
        return 0;
    return judge->asked.costs.far[abs(here - there) > 1 ? judge->asked.ranks - 1 : least];
}

static void
time_row(const tp_judge *judge, const tp_candidate *c, const int32_t *batches, int far, double *link, double *copy)
{
    const tp_judge_costs *costs = &judge->asked.costs;
    double latency_s = far ? costs->far_latency_s : costs->latency_s, byte_s = far ? costs->far_byte_s : costs->byte_s;
    int64_t u = 0;
    for (int32_t q = 0; q < c->micros; q++)
        for (int32_t s = 0; s < c->slices[q]; s++, u++) {
            double bytes = costs->row_bytes * (double)batches[q] * (double)c->lengths[u];
            link[u] = latency_s + byte_s * bytes;
            copy[u] = costs->copy_byte_s * bytes;
        }
}

static void
time_messages(const tp_judge *judge, const tp_candidate *c, const int32_t *batches, int64_t units, double *link, double *copy)
{
    int like[2] = {-1, -1}; /* a stage whose messages stay, and one whose leave */
    for (int k = 0; k < judge->stages; k++) {
        int far = is_far(judge, c->order, k);
        if (like[far] < 0) {
            like[far] = k;
            time_row(judge, c, batches, far, link + k * units, copy + k * units);
        } else {
            memcpy(link + k * units, link + like[far] * units, (size_t)units * sizeof *link);
            memcpy(copy + k * units, copy + like[far] * units, (size_t)units * sizeof *copy);
        }
    }
}

/* Links carry one message at a time, unless a message's bytes take no time. */
static void
time_links(tp_judge *judge, int order, tp_durations *out)
{
    const tp_judge_costs *costs = &judge->asked.costs;
    if (!(costs->byte_s > 0.0) && costs->far == NULL)
        return;
    for (int k = 0; k < judge->stages; k++)
        judge->latency_s[k] = is_far(judge, order, k) ? costs->far_latency_s : costs->latency_s;
    for (int k = 0; k < judge->stages; k++) /* back over the same link */
        judge->latency_s[judge->stages + k] = k > 0 && costs->far != NULL ? judge->latency_s[k - 1] : costs->latency_s;
    out->latency_s = judge->latency_s;
}

/* W of all slices of a micro-batch to its first. */
static void
gather_weights(const tp_judge *judge, const tp_candidate *c, int64_t units)
{
    for (int k = 0; k < judge->stages; k++) {
        double *w = judge->table[W] + k * units;
        for (int32_t q = 0; q < c->micros; w += c->slices[q++])
            for (int32_t s = 1; s < c->slices[q]; s++) {
                w[0] += w[s];
                w[s] = 0.0;
            }
    }
}

static tp_status
time_halves(tp_judge *judge, const tp_candidate *c, int64_t units, tp_durations *out)
{
    for (int half = 0; half < 2; half++) {
        for (int32_t q = 0; q < c->micros; q++) {
            int32_t size = (c->batches[q] + 1 - half) / 2;
            judge->halved[q] = size > 1 ? size : 1;
        }
        TP_TRY(tp_cost_durations(judge->asked.costs.cost, judge->stages, judge->blocks, c->micros, judge->halved, c->slices,
                                 c->lengths, judge->table[F_FIRST + half], judge->table[SPARE_I], judge->table[SPARE_W]));
        time_messages(judge, c, judge->halved, units, judge->table[LINK_FIRST + half], judge->table[COPY_FIRST + half]);
        out->half_s[half][TP_OP_F] = judge->table[F_FIRST + half];
        out->half_comm_s[half] = judge->table[LINK_FIRST + half];
        if (judge->asked.costs.copy_byte_s > 0.0)
            out->half_s[half][TP_OP_SF] = out->half_s[half][TP_OP_RF] = judge->table[COPY_FIRST + half];
    }
    return TP_OK;
}

/* What is made again: the candidate's own or the request's; NULL: nothing. */
static const uint8_t *
again_of(const tp_judge *judge, const tp_candidate *c)
{
    return c->recompute != NULL ? c->recompute : judge->asked.recompute;
}

static tp_status
time_again(tp_judge *judge, const tp_candidate *c, tp_durations *out)
{
    const uint8_t *again = again_of(judge, c);
    memset(judge->remade, 0, (size_t)judge->stages * TP_BLOCK_KINDS * sizeof *judge->remade);
    for (int k = 0; k < judge->stages; k++)
        for (int32_t i = c->boundary[k]; i < c->boundary[k + 1]; i++)
            judge->remade[k * TP_BLOCK_KINDS + judge->asked.kind[i]] += again[i] != 0;
    out->seconds[TP_OP_R] = judge->table[AGAIN];
    return tp_cost_recompute(judge->asked.costs.cost, judge->stages, judge->remade, c->micros, c->batches, c->slices, c->lengths,
                             judge->table[AGAIN]);
}

tp_status
tp_judge_time(tp_judge *judge, const tp_candidate *c, tp_durations *out)
{
    int64_t units;
    TP_TRY(check_candidate(judge, c, &units));
    TP_TRY(make_room(judge, units, c));
    time_updates(judge, c, units);
    TP_TRY(tp_cost_durations(judge->asked.costs.cost, judge->stages, judge->blocks, c->micros, c->batches, c->slices, c->lengths,
                             judge->table[F], judge->table[I], judge->table[W]));
    if (judge->asked.costs.whole_weights)
        gather_weights(judge, c, units);
    time_messages(judge, c, c->batches, units, judge->table[LINK], judge->table[COPY]);
    *out = (tp_durations){.stage_stride = units, .unit_stride = 1};
    out->seconds[TP_OP_F] = judge->table[F];
    out->seconds[TP_OP_I] = judge->table[I];
    out->seconds[TP_OP_W] = judge->table[W];
    out->seconds[TP_OP_OPT] = judge->table[UPDATE];
    out->seconds[TP_OP_AR] = judge->table[EXCHANGE];
    out->comm_unit_s = judge->table[LINK];
    time_links(judge, c->order, out);
    if (judge->asked.costs.far != NULL) {
        memset(judge->table[LINK_BACK], 0, (size_t)units * sizeof(double));
        memcpy(judge->table[LINK_BACK] + units, judge->table[LINK], (size_t)(units * (judge->stages - 1)) * sizeof(double));
        out->back_comm_unit_s = judge->table[LINK_BACK];
    }
    if (judge->asked.costs.copy_byte_s > 0.0)
        out->seconds[TP_OP_SF] = out->seconds[TP_OP_SB] = out->seconds[TP_OP_RF] = out->seconds[TP_OP_RB] = judge->table[COPY];
    if (again_of(judge, c) != NULL)
        TP_TRY(time_again(judge, c, out));
    return c->order == TP_ORDER_SLICED ? time_halves(judge, c, units, out) : TP_OK;
}

/* ---- the program --------------------------------------------------------------------------------------------------------- */

/* Seconds of I or W of a mean stage, in sixteenths of a forward: plans that differ little share one order. */
static double
nominal(const double *table, int64_t cells, double forward_s)
{
    double sum = 0.0;
    for (int64_t i = 0; i < cells; i++)
        sum += table[i];
    double sixteenths = rint(16.0 * fmax(sum / (double)cells, 1e-12) / forward_s);
    return fmax(1.0, sixteenths) / 16.0;
}

static int
is_kept(const kept *k, const tp_candidate *c, double input_s, double weight_s)
{
    return k->program != NULL && k->order == c->order && k->input_s == input_s && k->weight_s == weight_s &&
           k->program->micros == c->micros &&
           memcmp(k->program->slices, c->slices, (size_t)c->micros * sizeof *c->slices) == 0;
}

/* Borrowed from the judge. */
static tp_status
zigzag(tp_judge *judge, const tp_candidate *c, const tp_durations *d, const tp_program **out)
{
    int64_t cells = judge->stages * d->stage_stride;
    double forward_s = 0.0;
    for (int64_t i = 0; i < cells; i++)
        forward_s += judge->table[F][i];
    forward_s = fmax(forward_s / (double)cells, 1e-12);
    double input_s = nominal(judge->table[I], cells, forward_s), weight_s = nominal(judge->table[W], cells, forward_s);
    for (int i = 0; i < KEPT; i++)
        if (is_kept(&judge->list[i], c, input_s, weight_s)) {
            *out = judge->list[i].program;
            return TP_OK;
        }
    tp_zigzag_request request = {.ranks = judge->asked.ranks, .micros = c->micros, .most = judge->stages, .slices = c->slices,
                                 .forward_s = 1.0, .input_s = input_s, .weight_s = weight_s};
    tp_program *program = NULL;
    if (c->order == TP_ORDER_ZB_V)
        TP_TRY(tp_program_build_zb_v(&request, &program));
    else
        TP_TRY(tp_program_build_hanayo(&request, judge->asked.chunks / 2, &program));
    judge->work += 20 * program->begin[program->ranks];
    kept *place = &judge->list[judge->next++ % KEPT];
    tp_program_close(place->program);
    *place = (kept){c->order, input_s, weight_s, program};
    *out = program;
    return TP_OK;
}

static tp_status
measure(const tp_program *program, const tp_durations *d, tp_sim **sim, double *makespan_s)
{
    TP_TRY(tp_sim_open(program, sim));
    tp_sim_run(*sim, d, makespan_s);
    return TP_OK;
}

/* As many of the first micro-batches halved as are fastest with whole backwards, the fewest of equals. */
static tp_status
sliced(tp_judge *judge, const tp_candidate *c, const tp_durations *d, tp_program **out)
{
    int most = 0, splits = 0;
    double least = INFINITY;
    while (most < c->micros && most < judge->asked.ranks - 1 && c->batches[most] >= 2)
        most++;
    double *seconds = malloc(((size_t)most + 1) * sizeof *seconds);
    if (seconds == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d splits", most);
    tp_status status = TP_OK;
    for (; splits <= most && status == TP_OK; splits++) {
        tp_program *program = NULL;
        tp_sim *sim = NULL;
        status = tp_program_build_sliced(judge->asked.ranks, c->micros, splits, &program);
        if (status == TP_OK)
            status = measure(program, d, &sim, &seconds[splits]);
        tp_sim_close(sim);
        tp_program_close(program);
        if (status == TP_OK)
            least = fmin(least, seconds[splits]);
    }
    judge->work += 4 * (int64_t)c->micros * judge->asked.ranks * splits;
    int split = 0;
    while (status == TP_OK && seconds[split] * SLIGHT > least)
        split++;
    free(seconds);
    TP_TRY(status);
    return tp_program_build_sliced(judge->asked.ranks, c->micros, split, out);
}

/* F and B, or F, I and W; *made is the caller's, or NULL where *out is the judge's own. */
static tp_status
build(tp_judge *judge, const tp_candidate *c, const tp_durations *d, const tp_program **out, tp_program **made)
{
    *made = NULL;
    if (c->order == TP_ORDER_ZB_V || c->order == TP_ORDER_HANAYO)
        return zigzag(judge, c, d, out);
    if (c->order == TP_ORDER_SLICED)
        TP_TRY(sliced(judge, c, d, made));
    else if (c->order == TP_ORDER_DUALPIPE_V)
        TP_TRY(tp_program_build_dualpipe_v(judge->asked.ranks, c->micros, c->slices, made));
    else
        TP_TRY(tp_program_build((tp_schedule)c->order, judge->asked.ranks, judge->asked.chunks, c->micros, c->slices, made));
    *out = *made;
    return TP_OK;
}

tp_status
tp_judge_compute(tp_judge *judge, const tp_candidate *c, tp_program **program)
{
    tp_durations d;
    const tp_program *compute = NULL;
    tp_program *made = NULL;
    TP_TRY(tp_judge_time(judge, c, &d));
    TP_TRY(build(judge, c, &d, &compute, &made));
    if (made == NULL)
        return tp_program_strip(compute, program);
    *program = made;
    return TP_OK;
}

/* The program with R where something is made again; *made is replaced. */
static tp_status
make_again(tp_judge *judge, const tp_candidate *c, const tp_program **compute, tp_program **made)
{
    const uint8_t *recompute = again_of(judge, c);
    uint8_t *flags = calloc(2 * (size_t)judge->stages, 1);
    if (flags == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the flags of %d stages", judge->stages);
    for (int k = 0; k < judge->stages; k++)
        for (int32_t i = c->boundary[k]; i < c->boundary[k + 1]; i++)
            if (recompute[i] && flags[k] != TP_AGAIN_ALL)
                flags[k] = judge->asked.kind[i] == TP_ATTENTION ? TP_AGAIN_ALL : TP_AGAIN_SLICES;
    tp_program *again = NULL;
    tp_status status = TP_OK;
    if (memchr(flags, TP_AGAIN_ALL, (size_t)judge->stages) != NULL || memchr(flags, TP_AGAIN_SLICES, (size_t)judge->stages) != NULL)
        status = tp_program_save_memory(*compute, flags, flags + judge->stages, &again);
    free(flags);
    TP_TRY(status);
    if (again == NULL)
        return TP_OK;
    tp_program_close(*made);
    *compute = *made = again;
    return TP_OK;
}

static int
places_weights(int order)
{
    return order == TP_ZB_H1 || order == TP_ZB_H2 || order == TP_ORDER_ZB_V || order == TP_ORDER_DUALPIPE_V;
}

tp_status
tp_judge_make(tp_judge *judge, const tp_candidate *c, tp_program **program, tp_sim **sim, double *makespan_s)
{
    tp_durations d;
    const tp_program *compute = NULL;
    tp_program *made = NULL, *split = NULL;
    *program = NULL;
    *sim = NULL;
    TP_TRY(tp_judge_time(judge, c, &d));
    tp_status status = build(judge, c, &d, &compute, &made);
    if (status == TP_OK && compute->stages != judge->stages)
        status = tp_fail(TP_EVALUE, "the schedule has %d stages: %d would be right", compute->stages, judge->stages);
    if (status == TP_OK && again_of(judge, c) != NULL)
        status = make_again(judge, c, &compute, &made);
    if (status == TP_OK && !places_weights(c->order)) {
        status = tp_program_split(compute, &d, c->pending, &split);
        compute = split;
    }
    if (status == TP_OK)
        status = tp_program_lower(compute, judge->asked.tied && judge->stages > 1, program);
    if (status == TP_OK)
        status = measure(*program, &d, sim, makespan_s);
    tp_program_close(made);
    tp_program_close(split);
    if (status != TP_OK) {
        tp_sim_close(*sim);
        tp_program_close(*program);
        *program = NULL;
        *sim = NULL;
        return status;
    }
    judge->work += 80 * (*program)->begin[(*program)->ranks] + 2000;
    return TP_OK;
}

tp_status
tp_judge_run(tp_judge *judge, const tp_candidate *candidate, tp_program **program, double *makespan_s)
{
    tp_sim *sim;
    TP_TRY(tp_judge_make(judge, candidate, program, &sim, makespan_s));
    tp_sim_close(sim);
    return TP_OK;
}
