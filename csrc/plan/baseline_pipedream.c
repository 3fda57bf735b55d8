/* PipeDream (SOSP 2019, section 3.1). With T(i, j, m) = max(time of blocks [i, j), 2 (m - 1) weights / bandwidth) / m,
 *     A(j, m) = min(T(0, j, m), min over i, m' of max(A(i, m - m'), 2 message, T(i, j, m'))),
 * answer A(blocks, devices). Each term of the maximum depends on (i, j, m, m') alone, so the programme is exact in this
 * objective. Chosen where the paper leaves it open:
 *  - one level of bandwidth (the paper repeats the programme per level of its machine; our tables have one comm_s);
 *  - every cut's message takes comm_s, so 2 message = 2 comm_s;
 *  - the paper's maximum of work and exchange (its optimiser's code adds the two, and counts the exchange twice);
 *  - all devices are used; fewer blocks than devices is fine, a stage may have several;
 *  - memory: a stage whose devices and those behind it are s holds ceil(s / m') micro-batches on each device (its NOAM rule,
 *    section 3.2), here at most micro_batches; weights once, as our 1F1B has no weight versions;
 *  - the step is judged in synchronous 1F1B: a stage of m' replicas takes its time / m', and weights are exchanged once. */
#include "csrc/plan/baseline_chain.h"

#include <math.h>

#include "csrc/base/deadline.h"

typedef struct {
    const tp_chain_sums *sums;
    int devices, straight;
    double *best; /* [blocks + 1][devices + 1] */
    int *cut, *used;
    int64_t steps, asked; /* asked: steps since somebody was asked whether to stop */
} dream;

static double
stage_s(const dream *p, int i, int j, int m, int before)
{
    const tp_chain_sums *s = p->sums;
    int copies = (p->devices - before + m - 1) / m;
    copies = s->chain->in_flight != NULL ? s->chain->in_flight[before] : copies < s->chain->micros ? copies : s->chain->micros;
    if (s->chain->limit_bytes > 0.0 && tp_chain_bytes(s, i, j, copies, 0) > s->chain->limit_bytes)
        return INFINITY;
    double work = s->forward[j] - s->forward[i] + s->backward[j] - s->backward[i];
    double exchange = 2.0 * (m - 1) * (s->params[j] - s->params[i]) / s->chain->bandwidth_Bps;
    return fmax(work, exchange) / m;
}

static tp_status
fill_cell(dream *p, int j, int m)
{
    int64_t stride = p->devices + 1, at = j * stride + m;
    double message = 2.0 * p->sums->chain->comm_s;
    p->best[at] = p->straight && m > 1 ? INFINITY : stage_s(p, 0, j, m, 0);
    p->cut[at] = 0;
    p->used[at] = m;
    for (int i = 1; i < j; i++) {
        TP_TRY(tp_deadline_check_after(&p->asked, p->straight ? 4 : 4 * (int64_t)m));
        for (int last = 1; last < m && !(p->straight && last > 1); last++) {
            double value = fmax(p->best[i * stride + m - last], message);
            p->steps++;
            if (!tp_chain_is_less(value, p->best[at]))
                continue;
            value = fmax(value, stage_s(p, i, j, last, m - last));
            if (tp_chain_is_less(value, p->best[at])) {
                p->best[at] = value;
                p->cut[at] = i;
                p->used[at] = last;
            }
        }
    }
    return TP_OK;
}

static tp_status
run(const tp_chain_sums *s, tp_arena *arena, int stages, const void *options, tp_chain_plan *plan)
{
    const dream *given = options;
    dream p = {.sums = s, .devices = given->devices, .straight = given->straight};
    int n = s->chain->blocks, count = 0;
    int64_t stride = p.devices + 1, cells = (n + 1) * stride;
    (void)stages;
    TP_ARENA_TAKE(arena, cells, p.best);
    TP_ARENA_TAKE(arena, cells, p.cut);
    TP_ARENA_TAKE(arena, cells, p.used);
    for (int j = 1; j <= n; j++)
        for (int m = 1; m <= p.devices; m++) {
            TP_TRY(tp_deadline_check("pipedream"));
            TP_TRY(fill_cell(&p, j, m));
        }
    plan->objective_s = p.best[cells - 1];
    plan->steps = p.steps;
    if (!(plan->objective_s < INFINITY))
        return tp_chain_infeasible(s, p.devices < n ? p.devices : n, 0, 1);
    for (int j = n, m = p.devices; j > 0; count++) { /* backwards, then turned round */
        int64_t at = j * stride + m;
        plan->boundary[count] = j;
        plan->replica[count] = p.used[at];
        m -= p.used[at];
        j = p.cut[at];
    }
    plan->boundary[count] = 0;
    plan->stages = count;
    for (int a = 0, b = count; a < b; a++, b--) {
        int swap = plan->boundary[a];
        plan->boundary[a] = plan->boundary[b];
        plan->boundary[b] = swap;
    }
    for (int a = 0, b = count - 1; a < b; a++, b--) {
        int swap = plan->replica[a];
        plan->replica[a] = plan->replica[b];
        plan->replica[b] = swap;
    }
    return TP_OK;
}

tp_status
tp_plan_pipedream(const tp_chain *chain, int devices, int straight, tp_chain_plan *out)
{
    dream options = {.devices = devices, .straight = straight};
    *out = (tp_chain_plan){0};
    if (devices < 1 || devices > 4096)
        return tp_fail(TP_EVALUE, "devices is %d: 1 to 4096 are possible", devices);
    if (chain->in_flight != NULL && !straight)
        return tp_fail(TP_EVALUE, "in_flight is of stages without replicas: straight would be right beside it");
    tp_replicas sharing = straight ? TP_REPLICAS_NONE : TP_REPLICAS_TURN;
    return tp_chain_run(chain, straight ? devices : 1, devices, sharing, run, &options, out);
}
