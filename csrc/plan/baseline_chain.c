#include "csrc/plan/baseline_chain.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"
#include "csrc/plan/in_flight.h"
#include "csrc/sched/sched.h"

static tp_status
check_array(const double *values, int count, const char *name)
{
    for (int i = 0; values != NULL && i < count; i++)
        if (!(values[i] >= 0.0 && values[i] <= 1e300))
            return tp_fail(TP_EVALUE, "%s[%d] is %g: a value of 0 to 1e300 is needed", name, i, values[i]);
    return TP_OK;
}

tp_status
tp_chain_check(const tp_chain *c, int stages)
{
    if (c->blocks < 1)
        return tp_fail(TP_EVALUE, "there are no blocks: at least one is needed");
    if (stages < 1)
        return tp_fail(TP_EVALUE, "stages is %d: at least 1 is needed", stages);
    if (stages > c->blocks)
        return tp_fail(TP_EVALUE, "stages is %d for %d blocks: at most one stage a block, %d, is possible", stages, c->blocks,
                       c->blocks);
    if (c->micros < 1 || c->micros > 65536)
        return tp_fail(TP_EVALUE, "micro_batches is %d: 1 to 65536 are possible", c->micros);
    if (!(c->comm_s >= 0.0 && c->comm_s <= 1e300))
        return tp_fail(TP_EVALUE, "comm_s is %g: a time of 0 to 1e300 s is needed", c->comm_s);
    if (!(c->limit_bytes >= 0.0 && c->limit_bytes <= 1e300))
        return tp_fail(TP_EVALUE, "limit_bytes is %g: a size of 0 to 1e300 is needed", c->limit_bytes);
    if (!(c->bandwidth_Bps > 0.0))
        return tp_fail(TP_EVALUE, "bandwidth_Bps is %g: more than 0 is needed", c->bandwidth_Bps);
    TP_TRY(tp_in_flight_check(c->in_flight, c->micros, stages));
    TP_TRY(check_array(c->forward_s, c->blocks, "fwd"));
    TP_TRY(check_array(c->backward_s, c->blocks, "bwd"));
    double seconds = 2.0 * stages * c->comm_s;
    for (int i = 0; i < c->blocks; i++)
        seconds += c->forward_s[i] + c->backward_s[i];
    if (!(seconds * c->micros <= 1e300))
        return tp_fail(TP_EVALUE, "%d micro-batches take %g seconds one by one: at most 1e300 would be right", c->micros,
                       seconds * c->micros);
    TP_TRY(check_array(c->static_bytes, c->blocks, "static_bytes"));
    TP_TRY(check_array(c->activation_bytes, c->blocks, "activation_bytes"));
    TP_TRY(check_array(c->transient_bytes, c->blocks, "transient_bytes"));
    TP_TRY(check_array(c->recompute_s, c->blocks, "recompute_s"));
    return check_array(c->param_bytes, c->blocks, "param_bytes");
}

static tp_status
sum_up(tp_arena *arena, const double *values, int count, double **out)
{
    TP_ARENA_TAKE(arena, count, *out);
    for (int i = 0; values != NULL && i < count; i++)
        (*out)[i + 1] = (*out)[i] + values[i];
    return TP_OK;
}

tp_status
tp_chain_sums_open(const tp_chain *c, tp_arena *arena, tp_chain_sums *sums)
{
    sums->chain = c;
    TP_TRY(sum_up(arena, c->forward_s, c->blocks, &sums->forward));
    TP_TRY(sum_up(arena, c->backward_s, c->blocks, &sums->backward));
    TP_TRY(sum_up(arena, c->limit_bytes > 0.0 ? c->static_bytes : NULL, c->blocks, &sums->fixed));
    const double *kept = c->limit_bytes > 0.0 ? c->activation_bytes : NULL;
    TP_ARENA_TAKE(arena, c->blocks, sums->kept);
    TP_ARENA_TAKE(arena, c->blocks, sums->huge);
    for (int i = 0; i < c->blocks; i++) { /* a replica keeps a 4096th at least */
        int huge = kept != NULL && kept[i] > 4096.0 * c->limit_bytes;
        sums->huge[i + 1] = sums->huge[i] + huge;
        sums->kept[i + 1] = sums->kept[i] + (huge || kept == NULL ? 0.0 : kept[i]);
    }
    return sum_up(arena, c->param_bytes, c->blocks, &sums->params);
}

tp_status
tp_chain_plan_open(const tp_chain *c, int stages, tp_chain_plan *plan)
{
    size_t room = (size_t)stages;
    plan->pivot = -1;
    plan->boundary = calloc(room + 1, sizeof *plan->boundary);
    plan->replica = calloc(room, sizeof *plan->replica);
    plan->action = calloc((size_t)c->blocks, sizeof *plan->action);
    plan->time_s = calloc(room, sizeof *plan->time_s);
    plan->peak_bytes = calloc(room, sizeof *plan->peak_bytes);
    if (plan->boundary == NULL || plan->replica == NULL || plan->action == NULL || plan->time_s == NULL ||
        plan->peak_bytes == NULL)
        return tp_fail(TP_EMEMORY, "no memory for a plan of %d stages", stages);
    for (int k = 0; k < stages; k++)
        plan->replica[k] = 1;
    return TP_OK;
}

void
tp_chain_plan_free(tp_chain_plan *plan)
{
    free(plan->boundary);
    free(plan->replica);
    free(plan->action);
    free(plan->time_s);
    free(plan->peak_bytes);
    *plan = (tp_chain_plan){0};
}

static int
smaller(int a, int b)
{
    return a < b ? a : b;
}

int
tp_chain_copies(const tp_chain *c, int stages, int k)
{
    return tp_in_flight(c->in_flight, c->micros, stages, k);
}

double
tp_chain_transient(const tp_chain *c, int first, int end)
{
    double most = 0.0;
    for (int i = first; i < end && c->transient_bytes != NULL && c->limit_bytes > 0.0; i++)
        most = fmax(most, c->transient_bytes[i]);
    return most;
}

double
tp_chain_kept(const tp_chain_sums *s, int first, int end)
{
    double kept = 0.0;
    if (s->huge[end] == s->huge[first])
        return s->kept[end] - s->kept[first];
    for (int i = first; i < end; i++) /* of running sums the difference might be none, too: behind one that is larger still */
        kept += s->chain->activation_bytes[i];
    return kept;
}

double
tp_chain_bytes(const tp_chain_sums *s, int first, int end, double copies, int recompute)
{
    double kept = recompute ? 0.0 : copies * tp_chain_kept(s, first, end);
    return s->fixed[end] - s->fixed[first] + kept + tp_chain_transient(s->chain, first, end);
}

double
tp_chain_bytes_kept(const tp_chain_sums *s, int first, int end, double copies, const uint8_t *action)
{
    const tp_chain *c = s->chain;
    double kept = 0.0;
    int all = 1;
    for (int i = first; i < end && c->limit_bytes > 0.0; i++) {
        kept += action[i] == TP_BLOCK_KEEP ? c->activation_bytes[i] : 0.0;
        all &= action[i] == TP_BLOCK_KEEP;
    }
    if (all) /* added up as elsewhere: fractions of bytes would be an ulp off */
        return tp_chain_bytes(s, first, end, copies, 0);
    return s->fixed[end] - s->fixed[first] + copies * kept + tp_chain_transient(c, first, end);
}

/* Longest prefixes within tau; 0 if the blocks do not fit into the stages. */
static int
fill(int blocks, int stages, tp_chain_weight weight, const void *context, double tau, int *boundary)
{
    int at = 0;
    boundary[0] = 0;
    for (int k = 0; k < stages; k++) {
        int most = blocks - (stages - 1 - k), low = at + 1; /* each later stage needs a block */
        if (!(weight(context, k, at, low) <= tau))
            return 0;
        while (low < most) {
            int end = (low + most + 1) / 2;
            if (weight(context, k, at, end) <= tau)
                low = end;
            else
                most = end - 1;
        }
        at = boundary[k + 1] = low;
    }
    return at == blocks;
}

/* The same by all ends that can be reached; 0 too where the thread is told to stop. reached: [stages + 1, blocks + 1] scratch. A
 * later start reaches as far or further, so one pointer serves all starts of a stage. */
static int
fill_all(int blocks, int stages, tp_chain_weight weight, const void *context, double tau, char *reached, int64_t *steps,
         int *boundary)
{
    size_t row = (size_t)blocks + 1;
    memset(reached, 0, ((size_t)stages + 1) * row);
    reached[0] = 1;
    for (int k = 0; k < stages; k++) {
        if (tp_deadline_told_after(steps, 8 * (int64_t)blocks))
            return 0;
        const char *from = reached + (size_t)k * row;
        char *into = reached + ((size_t)k + 1) * row;
        for (int at = k, end = 0, marked = 0; at <= blocks - (stages - k); at++) {
            if (!from[at])
                continue;
            end = end > at ? end : at;
            while (end < blocks - (stages - 1 - k) && weight(context, k, at, end + 1) <= tau)
                end++;
            marked = marked > at ? marked : at;
            for (; marked < end; marked++)
                into[marked + 1] = 1;
        }
    }
    if (!reached[(size_t)stages * row + (size_t)blocks])
        return 0;
    boundary[stages] = blocks;
    for (int k = stages - 1; k >= 0; k--) { /* of the starts that can be reached, the nearest weighs least */
        boundary[k] = boundary[k + 1] - 1;
        while (!reached[(size_t)k * row + (size_t)boundary[k]])
            boundary[k]--;
    }
    return 1;
}

tp_status
tp_chain_least_largest(int blocks, int stages, tp_chain_weight weight, int rising, const void *context, int *boundary,
                       double *largest)
{
    double low = 0.0, high = 0.0;
    char *reached = malloc(((size_t)stages + 1) * ((size_t)blocks + 1));
    if (reached == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d stages of %d blocks", stages, blocks);
    for (int k = 0; k < stages; k++)
        high = fmax(high, weight(context, k, 0, blocks));
    int64_t steps = 0;
    for (int zero = 1; !tp_deadline_was_told() && (zero || high - low > 1e-13 * high); zero = 0) { /* 0 is asked first: bisection would never come to it */
        double middle = zero ? 0.0 : low + 0.5 * (high - low);
        if (!zero && (middle <= low || middle >= high))
            break;
        if (fill(blocks, stages, weight, context, middle, boundary) ||
            (!rising && fill_all(blocks, stages, weight, context, middle, reached, &steps, boundary)))
            high = middle;
        else
            low = middle;
    }
    if (!fill(blocks, stages, weight, context, high, boundary) && !rising)
        fill_all(blocks, stages, weight, context, high, reached, &steps, boundary);
    free(reached);
    *largest = high;
    return tp_deadline_check_told();
}

tp_status
tp_chain_must_fit(const tp_chain_sums *s, const tp_chain_plan *plan)
{
    double limit = s->chain->limit_bytes, most = limit;
    int worst = -1;
    for (int k = 0; k < plan->stages && limit > 0.0; k++) {
        double bytes = tp_chain_bytes(s, plan->boundary[k], plan->boundary[k + 1], tp_chain_copies(s->chain, plan->stages, k), 0);
        if (bytes > most) {
            most = bytes;
            worst = k;
        }
    }
    if (worst < 0)
        return TP_OK;
    return tp_fail(TP_EINFEASIBLE,
                   "stage %d of %d (blocks %d to %d, %d micro-batches in flight) needs %.15g bytes, %.15g more than "
                   "limit_bytes, %.15g; no stage needs more",
                   worst, plan->stages, plan->boundary[worst], plan->boundary[worst + 1] - 1,
                   tp_chain_copies(s->chain, plan->stages, worst), ceil(most), ceil(most) - limit, limit);
}

typedef struct {
    const tp_chain_sums *sums;
    int stages, recompute;
    double share;
} need;

static double
weigh_bytes(const void *context, int k, int first, int end)
{
    const need *n = context;
    return tp_chain_bytes(n->sums, first, end, tp_chain_copies(n->sums->chain, n->stages, k) / n->share, n->recompute);
}

tp_status
tp_chain_infeasible(const tp_chain_sums *s, int stages, int recompute, int replicas)
{
    need n = {s, stages, recompute, replicas};
    double limit = s->chain->limit_bytes, largest;
    int *boundary = calloc((size_t)stages + 1, sizeof *boundary), worst = 0;
    if (boundary == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d stages", stages);
    tp_status status = tp_chain_least_largest(s->chain->blocks, stages, weigh_bytes, 0, &n, boundary, &largest);
    if (status != TP_OK) {
        free(boundary);
        return status;
    }
    for (int k = 0; k < stages; k++)
        if (weigh_bytes(&n, k, boundary[k], boundary[k + 1]) > weigh_bytes(&n, worst, boundary[worst], boundary[worst + 1]))
            worst = k;
    double least = ceil(weigh_bytes(&n, worst, boundary[worst], boundary[worst + 1]));
    status = tp_fail(TP_EINFEASIBLE,
                     "no plan fits limit_bytes, %.15g: the one of %d stages%s that needs least has %.15g bytes on stage %d "
                     "(blocks %d to %d), %.15g more",
                     limit, stages, recompute ? " that keeps nothing" : "", least, worst, boundary[worst],
                     boundary[worst + 1] - 1, least - limit);
    free(boundary);
    return status;
}

/* ---- judging ------------------------------------------------------------------------------------------------------- */

/* PLANNERS.md 2.5, LB2: the path down, back to stage k, and all that stage k still has to do; the stage's part of it. With
 * blocking messages the last stage, which awaits none on the way back, may weigh less than the one before it. */
static double
weigh_pivot(const void *context, int k, int first, int end)
{
    const need *n = context;
    const tp_chain_sums *s = n->sums;
    double in_f = s->chain->blocking && k > 0 ? s->chain->comm_s : 0.0;
    double in_b = s->chain->blocking && k < n->stages - 1 ? s->chain->comm_s : 0.0;
    int micros = s->chain->micros, early = micros - (n->stages - k);
    return (micros - 1) * (s->backward[end] - s->backward[first] + in_b) +
           (early > 0 ? early : 0) * (s->forward[end] - s->forward[first] + in_f);
}

/* Without replicas: the pivot bound over all partitions. Where there may be some, as this plan has or not, another plan could
 * do all work on all devices at once. */
static tp_status
find_bound(const tp_chain_sums *s, int devices, tp_replicas sharing, tp_chain_plan *plan)
{
    int n = s->chain->blocks;
    double all = s->forward[n] + s->backward[n];
    if (sharing != TP_REPLICAS_NONE) {
        plan->lower_bound_s = s->chain->micros * all / devices * (1.0 - 1e-12);
        return TP_OK;
    }
    int *boundary = calloc((size_t)plan->stages + 1, sizeof *boundary);
    if (boundary == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d stages", plan->stages);
    need context = {s, plan->stages, 0, 1.0};
    double least = 0.0;
    tp_status status = tp_chain_least_largest(n, plan->stages, weigh_pivot, !s->chain->blocking, &context, boundary, &least);
    if (status == TP_OK)
        plan->lower_bound_s = (all + 2.0 * (plan->stages - 1) * s->chain->comm_s + least) * (1.0 - 1e-12);
    free(boundary);
    return status;
}

/* 1F1B of the plan's stages; forward, backward, exchange: [stages]. */
static tp_status
simulate(const tp_chain *c, int stages, const double *table, double *step_s)
{
    const double *forward = table, *backward = table + stages, *message = table + 2 * stages, *exchange = table + 3 * stages;
    int32_t *slices = malloc((size_t)c->micros * sizeof *slices);
    tp_program *program = NULL;
    tp_timeline *timeline = NULL;
    if (slices == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d micro-batches", c->micros);
    for (int q = 0; q < c->micros; q++)
        slices[q] = 1;
    tp_status status = tp_program_build(TP_1F1B, stages, 1, c->micros, slices, &program);
    if (status == TP_OK) {
        tp_durations d = {.stage_stride = 1, .comm_s = c->blocking ? NULL : message};
        d.seconds[TP_OP_F] = forward;
        d.seconds[TP_OP_B] = backward;
        if (c->blocking)
            d.seconds[TP_OP_RF] = d.seconds[TP_OP_RB] = message;
        status = tp_program_simulate(program, &d, NULL, 0, 0, 1, &timeline);
    }
    *step_s = 0.0;
    for (int k = 0; k < stages && status == TP_OK; k++)
        *step_s = fmax(*step_s, timeline->end_s[timeline->begin[k + 1] - 1] + exchange[k]);
    tp_timeline_close(timeline);
    tp_program_close(program);
    free(slices);
    return status;
}

/* Time and bytes of stage k; `behind`: devices of it and of the stages behind it. */
static void
measure(const tp_chain_sums *s, tp_replicas sharing, int k, int behind, double *table, tp_chain_plan *plan)
{
    const tp_chain *c = s->chain;
    int first = plan->boundary[k], end = plan->boundary[k + 1], stages = plan->stages, r = plan->replica[k];
    double forward = s->forward[end] - s->forward[first], backward = s->backward[end] - s->backward[first];
    for (int i = first; i < end; i++)
        backward += plan->action[i] == TP_BLOCK_RECOMPUTE ? c->recompute_s[i] : 0.0;
    double copies = c->in_flight != NULL         ? (double)c->in_flight[k]
                    : sharing == TP_REPLICAS_SPLIT ? (double)smaller(c->micros, stages - k) / r
                                                   : (double)smaller(c->micros, (behind + r - 1) / r);
    plan->time_s[k] = (forward + backward) / r;
    plan->peak_bytes[k] = tp_chain_bytes_kept(s, first, end, copies, plan->action);
    table[k] = forward / r;
    table[stages + k] = backward / r;
    table[2 * stages + k] = c->comm_s;
    table[3 * stages + k] = 2.0 * (r - 1) / r * (s->params[end] - s->params[first]) / c->bandwidth_Bps;
}

tp_status
tp_chain_judge(const tp_chain_sums *s, int devices, tp_replicas sharing, tp_chain_plan *plan)
{
    double *table = calloc(4 * (size_t)plan->stages, sizeof *table);
    int behind = 0;
    if (table == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d stages", plan->stages);
    for (int k = plan->stages - 1; k >= 0; k--) {
        behind += plan->replica[k];
        measure(s, sharing, k, behind, table, plan);
    }
    tp_status status = simulate(s->chain, plan->stages, table, &plan->step_time_s);
    free(table);
    return status == TP_OK ? find_bound(s, devices, sharing, plan) : status;
}

tp_status
tp_chain_run(const tp_chain *chain, int stages, int devices, tp_replicas sharing, tp_chain_planner planner, const void *options,
             tp_chain_plan *out)
{
    int64_t start = tp_clock_ns();
    tp_arena arena;
    tp_chain_sums sums = {0};
    *out = (tp_chain_plan){0};
    TP_TRY(tp_chain_check(chain, stages));
    TP_TRY(tp_arena_open(&arena));
    tp_status status = tp_chain_sums_open(chain, &arena, &sums);
    if (status == TP_OK)
        status = tp_chain_plan_open(chain, smaller(devices, chain->blocks), out);
    if (status == TP_OK)
        status = planner(&sums, &arena, stages, options, out);
    out->seconds = (double)(tp_clock_ns() - start) * 1e-9;
    if (status == TP_OK)
        status = tp_chain_judge(&sums, devices, sharing, out);
    tp_arena_close(&arena);
    return status;
}
