/* What both DawnPiper planners share: checks, copies in flight, the plan's memory and its judgement by simulation. */
#include "csrc/plan/memopt.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"
#include "csrc/plan/f1b.h"
#include "csrc/plan/in_flight.h"

int
tp_dawnpiper_copies(const tp_dawnpiper_options *options, int x)
{
    if (options->in_flight == NULL && options->flight == TP_FLIGHT_GPIPE)
        return options->micros;
    if (options->in_flight == NULL && options->flight == TP_FLIGHT_PIPEDREAM)
        return options->stages - x;
    return tp_in_flight(options->in_flight, options->micros, options->stages, x);
}

void
tp_dawnpiper_weights(const tp_dawnpiper_options *options, double *weight)
{
    for (int x = 0; x < options->stages; x++)
        weight[x] = (double)tp_dawnpiper_copies(options, 0) / tp_dawnpiper_copies(options, x);
}

static const char *
word_of(double value)
{
    return isnan(value) ? "nan" : value < 0.0 ? "negative" : "inf";
}

static tp_status
check_array(const double *values, int n, const char *name)
{
    double total = 0.0;
    if (values == NULL)
        return TP_OK;
    for (int k = 0; k < n; k++) {
        if (!(values[k] >= 0.0 && values[k] <= DBL_MAX))
            return tp_fail(TP_EVALUE, "%s of node %d is %s: a finite number of 0 or more is needed", name, k,
                           word_of(values[k]));
        total += values[k];
    }
    if (total > 1e300)
        return tp_fail(TP_EVALUE, "%s sums to %g: at most 1e300 is possible", name, total);
    return TP_OK;
}

tp_status
tp_nodes_check(const tp_nodes *nodes)
{
    if (nodes->count < 1)
        return tp_fail(TP_EVALUE, "nodes is empty: at least 1 node is needed");
    TP_TRY(check_array(nodes->forward_s, nodes->count, "fwd_s"));
    TP_TRY(check_array(nodes->backward_s, nodes->count, "bwd_s"));
    TP_TRY(check_array(nodes->recompute_s, nodes->count, "recompute_s"));
    TP_TRY(check_array(nodes->activation_bytes, nodes->count, "activation_bytes"));
    TP_TRY(check_array(nodes->param_bytes, nodes->count, "param_bytes"));
    TP_TRY(check_array(nodes->optimizer_bytes, nodes->count, "optimizer_bytes"));
    TP_TRY(check_array(nodes->cut_bytes, nodes->count, "cut_bytes"));
    TP_TRY(check_array(nodes->cut_tensors, nodes->count, "cut_tensors"));
    return check_array(nodes->working_bytes, nodes->count, "working_bytes");
}

static tp_status
check_boundary(const tp_nodes *nodes, const tp_dawnpiper_options *options)
{
    const int *b = options->boundary;
    if (b == NULL)
        return TP_OK;
    if (b[0] != 0 || b[options->stages] != nodes->count)
        return tp_fail(TP_EVALUE, "boundaries go from %d to %d: 0 to %d would be right", b[0], b[options->stages],
                       nodes->count);
    for (int x = 0; x < options->stages; x++)
        if (b[x + 1] <= b[x])
            return tp_fail(TP_EVALUE, "boundaries[%d] is %d after %d: a stage holds at least one node", x + 1, b[x + 1],
                           b[x]);
    return TP_OK;
}

static tp_status
check_in_flight(const tp_dawnpiper_options *options)
{
    const int32_t *held = options->in_flight;
    TP_TRY(tp_in_flight_check(held, options->micros, options->stages));
    for (int x = 1; held != NULL && x < options->stages; x++)
        if (held[x] > held[x - 1])
            return tp_fail(TP_EVALUE, "in_flight[%d] is %d: 1 to %d, what the stage before it holds, is possible", x, held[x],
                           held[x - 1]);
    return TP_OK;
}

tp_status
tp_dawnpiper_check(const tp_nodes *nodes, const tp_dawnpiper_options *options)
{
    TP_TRY(tp_nodes_check(nodes));
    if (options->stages < 1 || options->stages > 32767)
        return tp_fail(TP_EVALUE, "stages is %d: 1 to 32767 is possible", options->stages);
    if (options->stages > nodes->count)
        return tp_fail(TP_EVALUE, "stages is %d for %d nodes: at most one stage a node, %d, is possible",
                       options->stages, nodes->count, nodes->count);
    if (options->micros < 1 || options->micros > 65536)
        return tp_fail(TP_EVALUE, "micro_batches is %d: 1 to 65536 is possible", options->micros);
    if (!(options->memory_bytes >= 0.0 && options->memory_bytes <= 1e300))
        return tp_fail(TP_EVALUE, "memory_bytes is %g: a number of 0 to 1e300 is needed", options->memory_bytes);
    if (!(options->swap_Bps >= 0.0 && options->swap_Bps <= 1e300))
        return tp_fail(TP_EVALUE, "swap_bandwidth_Bps is %g: a number of 0 to 1e300 is needed", options->swap_Bps);
    if (!(options->link_Bps >= 0.0 && options->link_Bps <= 1e300))
        return tp_fail(TP_EVALUE, "link_bandwidth_Bps is %g: a number above 0 and up to 1e300 is needed", options->link_Bps);
    if (options->link_Bps > 0.0 && nodes->cut_bytes == NULL)
        return tp_fail(TP_EVALUE, "link_bandwidth_Bps is given, but the nodes have no cut_bytes");
    TP_TRY(check_in_flight(options));
    return check_boundary(nodes, options);
}

tp_status
tp_dawnpiper_plan_open(const tp_nodes *nodes, const tp_dawnpiper_options *options, tp_dawnpiper_plan *out)
{
    size_t n = (size_t)nodes->count, stages = (size_t)options->stages;
    *out = (tp_dawnpiper_plan){.count = nodes->count, .stages = options->stages};
    out->swap_bytes = calloc(n + 3 * stages, sizeof(double)); /* one block: doubles, then ints, then bytes */
    out->boundary = calloc(stages + 1, sizeof(int));
    out->recompute = calloc(n, 1);
    if (out->swap_bytes == NULL || out->boundary == NULL || out->recompute == NULL) {
        tp_dawnpiper_plan_free(out);
        return tp_fail(TP_EMEMORY, "no memory for a plan of %d nodes", nodes->count);
    }
    out->stage_s = out->swap_bytes + n;
    out->peak_bytes = out->stage_s + stages;
    out->link_s = out->peak_bytes + stages;
    return TP_OK;
}

void
tp_dawnpiper_plan_free(tp_dawnpiper_plan *plan)
{
    free(plan->swap_bytes);
    free(plan->boundary);
    free(plan->recompute);
    *plan = (tp_dawnpiper_plan){0};
}

static double
peak_of(const tp_memopt *m, const tp_dawnpiper_plan *plan, int x)
{
    int i = plan->boundary[x], j = plan->boundary[x + 1];
    long double kept = 0.0L;
    for (int k = i; k < j; k++)
        if (!plan->recompute[k])
            kept += (long double)m->nodes->activation_bytes[k] - (long double)plan->swap_bytes[k];
    double limit = m->options->memory_bytes, copies = tp_dawnpiper_copies(m->options, x);
    double peak = tp_memopt_fixed(m, x, i, j) + copies * (double)kept;
    double rounding = 1e-12 * limit + copies * 8.0 * DBL_EPSILON * m->active[m->n];
    return peak > limit && peak <= limit + rounding ? limit : peak;
}

/* Thousands of stages with as many micro-batches are billions of operations, and a plan is of no use without its step. */
static tp_status
ask(int64_t *steps, int more)
{
    *steps += 4 * (int64_t)more;
    if (*steps < tp_deadline_steps)
        return TP_OK;
    *steps = 0;
    return tp_deadline_check("dawnpiper");
}

/* ---- a step: end[x] is when stage x ended what it did last; the message between stages x and x + 1 takes link_s[x] either way
 * (of comm_s in csrc/sched/sched.h a stage has one, whichever way it sends) ---------------------------------------------- */
static tp_status
gpipe(const tp_dawnpiper_plan *plan, int micros, const double *forward, const double *backward, double *end)
{
    int last = plan->stages - 1;
    int64_t steps = 0;
    for (int q = 0; q < micros; q++) {
        TP_TRY(ask(&steps, plan->stages));
        for (int x = 0; x <= last; x++)
            end[x] = fmax(end[x], x > 0 ? end[x - 1] + plan->link_s[x - 1] : 0.0) + forward[x];
    }
    for (int q = 0; q < micros; q++) {
        TP_TRY(ask(&steps, plan->stages));
        for (int x = last; x >= 0; x--)
            end[x] = fmax(end[x], x < last ? end[x + 1] + plan->link_s[x] : 0.0) + backward[x];
    }
    return TP_OK;
}

/* Slots as csrc/plan/f1b.h has them: `before` is where the neighbours were before the slot. */
static tp_status
one_f_one_b(const tp_dawnpiper_plan *plan, int micros, const double *forward, const double *backward, double *end, double *before)
{
    int stages = plan->stages;
    int64_t steps = 0;
    tp_f1b_op op;
    for (int slot = 0; slot < 2 * (stages + micros - 1); slot++) {
        TP_TRY(ask(&steps, stages));
        memcpy(before, end, (size_t)stages * sizeof *end);
        for (int x = 0; x < stages; x++) {
            if (!tp_f1b_op_at(stages, micros, slot, x, &op))
                continue;
            int from = op.backward ? x + 1 : x - 1, link = op.backward ? x : x - 1;
            double ready = from < 0 || from == stages ? 0.0 : before[from] + plan->link_s[link];
            end[x] = fmax(before[x], ready) + (op.backward ? backward[x] : forward[x]);
        }
    }
    return TP_OK;
}

/* F is the forward time, B the rest of W: recomputation and waits for the bus are paid in backward. */
static tp_status
simulate(const tp_memopt *m, const tp_dawnpiper_plan *plan, double *seconds)
{
    size_t stages = (size_t)plan->stages;
    double *forward = calloc(4 * stages, sizeof *forward);
    if (forward == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d stages", plan->stages);
    double *backward = forward + stages, *end = backward + stages, *before = end + stages;
    for (int x = 0; x < plan->stages; x++) {
        for (int k = plan->boundary[x]; k < plan->boundary[x + 1]; k++)
            forward[x] += m->nodes->forward_s[k];
        backward[x] = fmax(0.0, plan->stage_s[x] - forward[x]);
    }
    tp_status status = m->options->flight == TP_FLIGHT_GPIPE
                           ? gpipe(plan, m->options->micros, forward, backward, end)
                           : one_f_one_b(plan, m->options->micros, forward, backward, end, before);
    *seconds = 0.0;
    for (size_t x = 0; x < stages; x++)
        *seconds = fmax(*seconds, end[x]);
    free(forward);
    return status;
}

tp_status
tp_dawnpiper_evaluate(const tp_memopt *m, tp_dawnpiper_plan *plan)
{
    plan->period_s = 0.0;
    for (int x = 0; x < plan->stages; x++) {
        plan->peak_bytes[x] = peak_of(m, plan, x);
        plan->link_s[x] = 0.0;
        if (m->options->link_Bps > 0.0 && x < plan->stages - 1)
            plan->link_s[x] = m->nodes->cut_bytes[plan->boundary[x + 1] - 1] / m->options->link_Bps;
        plan->period_s = fmax(plan->period_s, fmax(plan->stage_s[x], plan->link_s[x]));
    }
    plan->step_s = plan->period_s;
    return m->options->flight == TP_FLIGHT_PIPEDREAM ? TP_OK : simulate(m, plan, &plan->step_s);
}

tp_status
tp_plan_dawnpiper_balance(const tp_nodes *nodes, const tp_dawnpiper_options *options, int by_memory, int *boundary)
{
    TP_TRY(tp_dawnpiper_check(nodes, options));
    int n = nodes->count, stages = options->stages, at = 0;
    double total = 0.0, shares = 0.0, share = 0.0, sum = 0.0, weight = 1.0;
    for (int k = 0; k < n; k++)
        total += by_memory ? nodes->activation_bytes[k] + nodes->param_bytes[k] + nodes->optimizer_bytes[k]
                           : nodes->forward_s[k] + nodes->backward_s[k];
    for (int x = 0; x < stages; x++)
        shares += by_memory ? 1.0 / tp_dawnpiper_copies(options, x) : 1.0;
    boundary[0] = 0;
    for (int x = 0; x < stages - 1; x++) {
        weight = by_memory ? 1.0 / tp_dawnpiper_copies(options, x) : 1.0;
        share = total * weight / shares * (1.0 - 1e-12); /* a share that is met is met, however it was rounded */
        sum = 0.0;
        do { /* the stage starts from nothing, whatever the one before took too much: Alg. 2 */
            sum += by_memory ? nodes->activation_bytes[at] + nodes->param_bytes[at] + nodes->optimizer_bytes[at]
                             : nodes->forward_s[at] + nodes->backward_s[at];
            at++;
        } while (sum < share && at < n - (stages - 1 - x));
        boundary[x + 1] = at;
    }
    boundary[stages] = n;
    return TP_OK;
}

tp_status
tp_dawnpiper_run(const tp_nodes *nodes, const tp_dawnpiper_options *options,
                 tp_status (*planner)(tp_memopt *m, tp_dawnpiper_plan *plan), tp_dawnpiper_plan *out)
{
    int64_t start = tp_clock_ns();
    tp_memopt m = {0};
    *out = (tp_dawnpiper_plan){0};
    TP_TRY(tp_dawnpiper_check(nodes, options));
    TP_TRY(tp_dawnpiper_plan_open(nodes, options, out));
    tp_status status = tp_memopt_open(nodes, options, &m);
    if (status == TP_OK)
        status = planner(&m, out);
    tp_memopt_close(&m);
    if (status != TP_OK)
        tp_dawnpiper_plan_free(out);
    else
        out->seconds = (double)(tp_clock_ns() - start) * 1e-9;
    return status;
}
