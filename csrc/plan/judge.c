#include "csrc/plan/judge.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"
#include "csrc/plan/again.h"
#include "csrc/plan/judge_core.h"

#define SLIGHT (1.0 - 1e-9) /* less than this much better is rounding */

void
tp_judge_close(tp_judge *judge)
{
    if (judge == NULL)
        return;
    for (int i = 0; i < TP_JUDGE_KEPT; i++)
        tp_program_close(judge->kept[i].program);
    free(judge->table);
    free(judge->cost.known);
    free(judge->blocks);
    free(judge->latency_s);
    free(judge->keys);
    free(judge->halved);
    free(judge->left_s);
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
    size_t stages = (size_t)(request->ranks * request->chunks);
    if (judge != NULL)
        judge->blocks = calloc(2 * stages * TP_BLOCK_KINDS, sizeof *judge->blocks);
    if (judge != NULL)
        judge->latency_s = calloc(2 * 2 * stages, sizeof *judge->latency_s); /* both ways, of two copies of the model */
    if (judge != NULL)
        judge->keys = calloc(2 * 2 * stages, sizeof *judge->keys);
    if (judge != NULL) {
        judge->cost = *request->costs.cost;
        judge->cost.known = calloc(TP_COST_KNOWN, sizeof *judge->cost.known);
    }
    if (judge == NULL || judge->blocks == NULL || judge->latency_s == NULL || judge->keys == NULL || judge->cost.known == NULL) {
        tp_judge_close(judge);
        return tp_fail(TP_EMEMORY, "no memory for a judge of %d stages", request->ranks * request->chunks);
    }
    judge->asked = *request;
    judge->asked.costs.cost = &judge->cost;
    judge->stages = request->ranks * request->chunks;
    judge->apart = judge->keys + 2 * (ptrdiff_t)judge->stages;
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

/* ---- the program --------------------------------------------------------------------------------------------------------- */

/* Mean seconds of an op over stages and units. */
static double
mean(const tp_judge *judge, const tp_durations *d, int op)
{
    int64_t cells = judge->stages * d->stage_stride;
    double sum = 0.0;
    for (int64_t i = 0; i < cells; i++)
        sum += d->seconds[op][i];
    return fmax(sum / (double)cells, 1e-12);
}

/* Round to sixteenths of a forward, so that plans that differ little share one order. */
static double
nominal(double seconds, double forward_s)
{
    return fmax(1.0, rint(16.0 * seconds / forward_s)) / 16.0;
}

static int
is_kept(const tp_judge_kept *k, const tp_candidate *c, double input_s, double weight_s)
{
    return k->program != NULL && k->order == c->order && k->input_s == input_s && k->weight_s == weight_s &&
           k->program->micros == c->micros &&
           memcmp(k->program->slices, c->slices, (size_t)c->micros * sizeof *c->slices) == 0;
}

static int
is_scheduled(int order) /* by its operations' times */
{
    return order == TP_ORDER_ZB_V || order == TP_ORDER_HANAYO;
}

static tp_status
find_order(const tp_judge *judge, const tp_candidate *c, double input_s, double weight_s, tp_program **out)
{
    int ranks = judge->asked.ranks;
    tp_zigzag_request request = {.ranks = ranks, .micros = c->micros, .most = judge->stages, .slices = c->slices,
                                 .forward_s = 1.0, .input_s = input_s, .weight_s = weight_s};
    if (c->order == TP_ORDER_ZB_V)
        return tp_program_build_zb_v(&request, out);
    if (c->order == TP_ORDER_HANAYO)
        return tp_program_build_hanayo(&request, judge->asked.chunks / 2, out);
    return tp_program_build_bpipe(ranks, c->micros, c->slices, out);
}

/* An order that takes long to find, from the judge's cache; the judge owns it. No work is counted for finding it: that of a candidate
 * must not depend on which others were judged before. */
static tp_status
kept_order(tp_judge *judge, const tp_candidate *c, const tp_durations *d, const tp_program **out)
{
    double input_s = 0.0, weight_s = 0.0;
    if (is_scheduled(c->order)) {
        double forward_s = mean(judge, d, TP_OP_F);
        input_s = nominal(mean(judge, d, TP_OP_I), forward_s);
        weight_s = nominal(mean(judge, d, TP_OP_W), forward_s);
    }
    for (int i = 0; i < TP_JUDGE_KEPT; i++)
        if (is_kept(&judge->kept[i], c, input_s, weight_s)) {
            *out = judge->kept[i].program;
            return TP_OK;
        }
    tp_program *program = NULL;
    TP_TRY(find_order(judge, c, input_s, weight_s, &program));
    tp_judge_kept *place = &judge->kept[judge->next++ % TP_JUDGE_KEPT];
    tp_program_close(place->program);
    *place = (tp_judge_kept){c->order, input_s, weight_s, program};
    *out = program;
    return TP_OK;
}

static tp_status
measure(const tp_program *program, const tp_durations *d, tp_sim **sim, double *makespan_s)
{
    TP_TRY(tp_sim_open(program, sim));
    tp_sim_run(*sim, d, makespan_s);
    return tp_deadline_check_told();
}

/* Sliced 1F1B with the number of halved micro-batches that is fastest with whole backwards, the fewest of equals. */
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

/* Build the program of F and B, or of F, I and W. *made: what the caller frees; NULL where *out is the judge's own. */
static tp_status
build(tp_judge *judge, const tp_candidate *c, const tp_durations *d, const tp_program **out, tp_program **made)
{
    *made = NULL;
    if (is_scheduled(c->order) || c->order == TP_ORDER_BPIPE)
        return kept_order(judge, c, d, out);
    if (c->order == TP_ORDER_SLICED)
        TP_TRY(sliced(judge, c, d, made));
    else if (c->order == TP_ORDER_CHIMERA)
        TP_TRY(tp_program_build_chimera(judge->asked.ranks, c->micros, c->slices, made));
    else if (c->order == TP_ORDER_PIPEDREAM)
        TP_TRY(tp_program_build_pipedream(judge->asked.ranks, c->micros, c->slices, made));
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
    TP_TRY(tp_judge_time(judge, c, NULL, &d));
    TP_TRY(build(judge, c, &d, &compute, &made));
    if (made == NULL)
        return tp_program_strip(compute, program);
    *program = made;
    return TP_OK;
}

static int
places_weights(int order)
{
    return order == TP_ZB_H1 || order == TP_ZB_H2 || order == TP_ORDER_ZB_V || order == TP_ORDER_DUALPIPE_V;
}

/* *again: the program with R where blocks are recomputed; NULL: nowhere. waits: W will. */
static tp_status
make_again(tp_judge *judge, const tp_candidate *c, int waits, const tp_program *compute, tp_program **again)
{
    int stages = compute->stages, any = 0;
    uint8_t *flags = calloc(2 * (size_t)stages, 1);
    if (flags == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the flags of %d stages", stages);
    const int at_once = c->recompute != NULL ? c->at_once : judge->asked.at_once;
    const int none = at_once || c->order == TP_ORDER_BPIPE; /* whose guests are the larger with them */
    const int keeps_keys = none ? 0 : judge->asked.keeps_keys;
    const int within = c->pending == TP_JUDGE_WITHIN && compute->max_slices == 1; /* descents cut into slices, too */
    tp_again_ways(&(tp_again_asked){judge->stages, c->boundary, judge->asked.kind, tp_judge_again(judge, c), c->micros, c->batches,
                                    c->slices, c->lengths, keeps_keys, waits}, flags);
    for (int k = 0; k < stages; k++) {
        flags[k] = flags[k % judge->stages]; /* the copies of the model are alike */
        if (flags[k] != TP_AGAIN_NOT && within)
            flags[k] = TP_AGAIN_WITHIN;
        any |= flags[k];
    }
    tp_status status = TP_OK;
    *again = NULL;
    if (any)
        status = tp_program_save_memory(compute, flags, flags + stages, TP_SWAP_LATE, 0, again);
    free(flags);
    return status;
}

/* Ticks of finishing a program of so many instructions, whether or not it was left on the way. */
static int64_t
work_of(int64_t length)
{
    return 80 * length + 2000;
}

/* From the schedule with its R to what the engine runs. */
static tp_status
complete(tp_judge *judge, const tp_candidate *c, tp_durations *d, const tp_program *compute, int pending, const tp_completed *known,
         double goal_s, tp_judge_timed *out)
{
    const int tied = judge->asked.tied && judge->stages > 1;
    TP_TRY(tp_judge_time_again(judge, c, compute, d));
    TP_TRY(tp_program_complete(compute, d, pending, tied, known, goal_s, &out->of));
    if (out->of.program == NULL) {
        judge->work += work_of(tp_program_complete_length(compute, pending, tied));
        return TP_OK;
    }
    tp_sim_run(out->of.sim, d, &out->seconds);
    tp_status status = tp_deadline_check_told();
    if (status != TP_OK)
        tp_completed_close(&out->of, known);
    else
        judge->work += work_of(out->of.program->begin[out->of.program->ranks]);
    return status;
}

/* The same from the schedule alone. */
static tp_status
finish(tp_judge *judge, const tp_candidate *c, tp_durations *d, const tp_program *compute, const tp_completed *known, double goal_s,
       tp_judge_timed *out)
{
    const int whole = c->pending <= TP_JUDGE_WITHIN;
    const int pending = places_weights(c->order) || whole ? -1 : c->pending < 0 ? TP_JUDGE_AS_BUILT(c->pending) : c->pending;
    tp_program *again = NULL;
    *out = (tp_judge_timed){.seconds = INFINITY};
    if (tp_judge_again(judge, c) != NULL)
        TP_TRY(make_again(judge, c, pending != 0 && !whole, compute, &again));
    tp_status status = complete(judge, c, d, again != NULL ? again : compute, pending, known, goal_s, out);
    tp_program_close(again);
    return status;
}

/* `finish`, where that is faster than *best. */
static tp_status
finish_faster(tp_judge *judge, const tp_candidate *c, tp_durations *d, const tp_program *compute, const tp_completed *known,
              double goal_s, tp_judge_timed *best)
{
    tp_judge_timed other;
    TP_TRY(finish(judge, c, d, compute, known, goal_s, &other));
    if (other.seconds < best->seconds * SLIGHT) {
        tp_judge_timed swap = *best;
        *best = other;
        other = swap;
    }
    tp_completed_close(&other.of, known);
    return TP_OK;
}

/* Whether its B may stay whole, and be the faster for it: behind I and W the replicas' sums beside the work begin later. */
static int
may_gain_whole(const tp_judge *judge, const tp_candidate *c)
{
    const tp_judge_costs *costs = &judge->asked.costs;
    int may = costs->beside && (costs->ring_s[0] > 0.0 || costs->ring_param_s[0] > 0.0) && tp_judge_copies(c->order) == 1 &&
              c->pending >= 0 && !places_weights(c->order);
    for (int32_t q = 0; q < c->micros && may; q++)
        may = c->slices[q] == 1;
    return may;
}

/* Of the ways in which the engine may run the schedule the fastest. */
static tp_status
finish_all(tp_judge *judge, const tp_candidate *c, tp_durations *d, const tp_program *compute, const tp_completed *known,
           double goal_s, tp_judge_timed *best)
{
    tp_program *early = NULL;
    if (c->order == TP_LOOPED_BFS && c->micros > 1 && c->pending >= 0) {
        /* By list scheduling: of several micro-batches one goes back as soon as it can, while others are on their way forward. */
        TP_TRY(tp_program_reorder(compute, d, &early));
        judge->work += 40 * compute->begin[compute->ranks];
    }
    tp_status status = finish(judge, c, d, compute, known, goal_s, best);
    if (status == TP_OK && early != NULL)
        status = finish_faster(judge, c, d, early, known, goal_s, best);
    if (status == TP_OK && may_gain_whole(judge, c)) {
        tp_candidate whole = *c;
        whole.pending = TP_JUDGE_WHOLE;
        status = finish_faster(judge, &whole, d, compute, known, goal_s, best);
    }
    tp_program_close(early);
    return status;
}

tp_status
tp_judge_make(tp_judge *judge, const tp_candidate *c, const tp_completed *known, double goal_s, tp_judge_timed *out)
{
    tp_durations d;
    const tp_program *compute = NULL;
    tp_program *made = NULL;
    tp_judge_timed best = {.seconds = 0.0};
    *out = best;
    TP_TRY(tp_judge_time(judge, c, NULL, &d));
    tp_status status = build(judge, c, &d, &compute, &made);
    if (status == TP_OK && compute->stages != tp_judge_copies(c->order) * judge->stages)
        status = tp_fail(TP_EVALUE, "the schedule has %d stages: %d would be right", compute->stages,
                         tp_judge_copies(c->order) * judge->stages);
    if (status == TP_OK)
        status = finish_all(judge, c, &d, compute, known, goal_s, &best);
    tp_program_close(made);
    if (status != TP_OK)
        tp_completed_close(&best.of, known);
    else
        *out = best;
    return status;
}

tp_status
tp_judge_run(tp_judge *judge, const tp_candidate *candidate, tp_program **program, double *makespan_s)
{
    tp_judge_timed made;
    TP_TRY(tp_judge_make(judge, candidate, NULL, INFINITY, &made));
    *program = made.of.program;
    *makespan_s = made.seconds;
    made.of.program = NULL;
    tp_completed_close(&made.of, NULL);
    return TP_OK;
}
