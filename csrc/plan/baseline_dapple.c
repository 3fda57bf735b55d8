/* DAPPLE (PPoPP 2021, section 4.2 and 4.3; arXiv 2007.01045). Latency of a pipeline whose messages count as stages of their
 * own: with pivot stage Q,
 *     warm-up  sum over a <= Q of F_a
 *     steady   (M - 1) (F_Q + B_Q)
 *     ending   max over s of exchange_s + (s <= Q: sum over s..Q of B; s > Q: - sum over Q+1..s-1 of B)
 * with pivot Q starting as the last stage and moving to an earlier s where (M - 1) (F_s + B_s) exceeds the steady phase of the
 * pivot plus F + B of the stages between them. The programme: for each (blocks j in front, devices m of them) the prefix of
 * stages for which the plan (prefix, all blocks left as one stage on all devices left) has the least latency; each is extended
 * by every stage [j, j') on m' devices. One prefix is kept for each (j, m), as published, so the result is not always the
 * optimum of the model. Where the sieve below can tell what is less, a latency is about right only, and what is chosen the same.
 *
 * Held against, the paper's own page not being among what could be read:
 *  - phases, messages as stages, both sides of the pivot's inequality, the order of the scan and the programme: a reader's
 *    summary of the paper's section 4 (DicardoX/Notes_for_Papers, DAPPLE);
 *  - ending: that summary only calls the term for s > Q negative. The slides of the planner's author (LER0ever/HPGO,
 *    docs/presentation, Var. 6) let stage i end sum over s < i of B before the pipeline does, which is the term above, and
 *    his code adds the exchange to the end of each stage's last backward (sync_pipeline_speedup_recursive). The printed sum
 *    may begin one stage earlier: not seen;
 *  - a stage's time divided by its replicas, the ring's 2 (m' - 1) / m' weights / bandwidth, a message's time paid forward and
 *    backward: the same author's code (HPGO, BSD-3-Clause, src/layerwise/parallelism). The planner that was released with the
 *    paper (AlibabaPAI/DAPPLE, BSD-3-Clause, planner/src/orchestration/orchestrate.rs) is not the paper's programme: for each
 *    number of groups it minimises the slowest stage or message as PipeDream does, scores the results by (M - 1) slowest + one
 *    micro-batch's way + what exchange sticks out, tries every two-stage plan besides, and looks at no memory;
 *  - published plans (HPGO, examples/vs_pipedream.rs, with AlibabaPAI/DAPPLE's profiles): tests/test_baselines_published.py.
 *
 * Chosen: the three placements of section 4.4 (fresh, append, scatter first) make no difference on devices that are all
 * connected alike; replicas split each micro-batch, so activation is divided by m' as time is; every message takes comm_s, each
 * way. Memory (the slides prune by 2 weights + micro-batches in flight * activation): stages in front must fit with
 * min(M, K - k) in flight, by the summary the first of the runtime's two policies (the second: min(M, 2 (K - k) - 1)); the
 * rest as one stage need not, where it is still to be cut. */
#include "csrc/plan/baseline_chain.h"

#include <math.h>

#include "csrc/base/deadline.h"

/* Of the pipeline with its messages: even v is stage v / 2, odd v the message behind it. */
static double
part(const double *values, double comm_s, int v)
{
    return v % 2 ? comm_s : values[v / 2];
}

double
tp_dapple_latency(const double *forward_s, const double *backward_s, const double *exchange_s, int stages, int micros,
                  double comm_s, int *pivot)
{
    int last = 2 * (stages - 1), q = last;
    double between = 0.0; /* F + B of what lies between s and the pivot */
    for (int s = last - 1; s >= 0; s--) {
        double f = part(forward_s, comm_s, s), b = part(backward_s, comm_s, s);
        double steady = (micros - 1) * (part(forward_s, comm_s, q) + part(backward_s, comm_s, q));
        if (tp_chain_is_less(steady + between, (micros - 1) * (f + b))) {
            q = s;
            between = 0.0;
        } else {
            between += f + b;
        }
    }
    double latency = (micros - 1) * (part(forward_s, comm_s, q) + part(backward_s, comm_s, q)), ending = 0.0, back = 0.0;
    for (int s = 0; s <= q; s++)
        latency += part(forward_s, comm_s, s);
    for (int s = q; s >= 0; s--) {
        back += part(backward_s, comm_s, s);
        ending = fmax(ending, part(exchange_s, 0.0, s) + back);
    }
    back = 0.0;
    for (int s = q + 1; s <= last; s++) { /* they have done their last backward before the pivot begins its own */
        ending = fmax(ending, part(exchange_s, 0.0, s) - back);
        back += part(backward_s, comm_s, s);
    }
    *pivot = q;
    return latency + ending;
}

/* A prefix with its messages, v as above: what sifts its extensions. All but for rounding, of `doubt` a part. */
typedef struct {
    int count;                /* of v */
    double doubt;
    double *work, *forward, *backward; /* [count] sums up to v; work: of both */
    double *steady, *over;    /* [count] of v as pivot; over: a pivot behind loses to v where its steady phase + work up to
                                 itself, itself not counted, is below that */
    int *final;               /* [count] where the pivot ends once it is v; -1: too close to tell */
    int *record, records;     /* v of larger `over` than any behind it, the last v first */
} sieve;

typedef struct {
    const tp_chain_sums *sums;
    int devices, straight, sifts;
    int64_t stride;
    sieve sieve;
    double *best;            /* [blocks + 1][devices + 1] of (blocks in front, devices of them); INFINITY: none */
    uint8_t *whole;          /* the rest of the blocks, as one stage, fits too */
    int *from_j, *from_m;    /* the prefix before its last stage */
    double *forward, *backward, *exchange; /* [blocks] scratch, from the last stage back */
    int stages;
    int64_t steps, asked;
} dapple;

/* Stage `at` is [i, j) on m devices. */
static void
put_stage(dapple *p, int at, int i, int j, int m)
{
    const tp_chain_sums *s = p->sums;
    p->forward[at] = (s->forward[j] - s->forward[i]) / m;
    p->backward[at] = (s->backward[j] - s->backward[i]) / m;
    p->exchange[at] = 2.0 * (m - 1) / m * (s->params[j] - s->params[i]) / s->chain->bandwidth_Bps;
}

/* Does [i, j) fit on m devices as stage `at`, with `later` stages behind it? Straight, one stage a device is behind it in the
 * end, however many there are now. */
static int
fits(const dapple *p, int i, int j, int m, int at, int later)
{
    const tp_chain *c = p->sums->chain;
    int copies = p->straight ? tp_chain_copies(c, p->devices, at) : c->micros < later + 1 ? c->micros : later + 1;
    return c->limit_bytes <= 0.0 || tp_chain_bytes(p->sums, i, j, (double)copies / m, 0) <= c->limit_bytes;
}

/* Number of stages of the prefix (j, m). */
static int
depth_of(const dapple *p, int j, int m)
{
    int depth = p->straight ? m : 0;
    while (j > 0 && !p->straight) {
        int64_t at = j * p->stride + m;
        j = p->from_j[at];
        m = p->from_m[at];
        depth++;
    }
    return depth;
}

/* Latency of the prefix (i, m0), then [i, j) on m devices, then the rest of the blocks on the rest of the devices; INFINITY if
 * a stage of the front does not fit, or devices are left without blocks. *whole: does the rest fit too? */
static double
evaluate(dapple *p, int i, int m0, int j, int m, uint8_t *whole)
{
    int n = p->sums->chain->blocks, left = p->devices - m0 - m, rest = j < n, pivot;
    int last = depth_of(p, i, m0), end = i, devices = m0;
    p->stages = last + 1 + rest;
    *whole = 1;
    if (rest ? left < 1 : left > 0)
        return INFINITY;
    if (rest) {
        put_stage(p, last + 1, j, n, left);
        *whole = (uint8_t)fits(p, j, n, left, last + 1, 0);
    }
    put_stage(p, last, i, j, m);
    if (!fits(p, i, j, m, last, rest))
        return INFINITY;
    for (int at = last - 1; at >= 0 && !p->sifts; at--) { /* what sifts has them there, and they fit as they did before */
        int64_t cell = end * p->stride + devices;
        int first = p->from_j[cell], before = p->from_m[cell];
        put_stage(p, at, first, end, devices - before);
        if (!fits(p, first, end, devices - before, at, p->stages - 1 - at))
            return INFINITY;
        end = first;
        devices = before;
    }
    return tp_dapple_latency(p->forward, p->backward, p->exchange, p->stages, p->sums->chain->micros, p->sums->chain->comm_s,
                             &pivot);
}

/* ---- the sieve ------------------------------------------------------------------------------------------------------------ */
/* Straight, without weights to exchange, latency is steady phase + F + B up to the pivot, and the pivot's way through the prefix
 * is known for every v of it. So one look at the last stages says of most extensions that they are not better. */

/* The first record from `from` on that a pivot loses to whose steady phase + work before it is that; `records` if to none, -1 where
 * it is too close to tell. */
static int
loses_to(const sieve *f, int from, double steady)
{
    int low = from, high = f->records;
    while (low < high) {
        int middle = (low + high) / 2;
        if (f->over[f->record[middle]] > steady * (1.0 - f->doubt))
            high = middle;
        else
            low = middle + 1;
    }
    return low < f->records && !(f->over[f->record[low]] > steady * (1.0 + f->doubt)) ? -1 : low;
}

/* record[]: of v, those before it. */
static void
put_part(sieve *f, double forward_s, double backward_s, int micros)
{
    int v = f->count++;
    double before = v > 0 ? f->work[v - 1] : 0.0;
    f->forward[v] = forward_s + (v > 0 ? f->forward[v - 1] : 0.0);
    f->backward[v] = backward_s + (v > 0 ? f->backward[v - 1] : 0.0);
    f->work[v] = before + (forward_s + backward_s);
    f->steady[v] = (micros - 1) * (forward_s + backward_s);
    f->over[v] = f->steady[v] * (1.0 - 1e-12) + f->work[v];
    f->final[v] = v;
    for (int k = f->records - 1; k >= 0; k--) { /* the last first: from here they rise */
        double over = f->over[f->record[k]], steady = f->steady[v] + before;
        if (over > steady * (1.0 + f->doubt)) {
            f->final[v] = f->final[f->record[k]];
            break;
        }
        if (over > steady * (1.0 - f->doubt)) {
            f->final[v] = -1;
            break;
        }
    }
    while (f->records > 0 && f->over[f->record[f->records - 1]] <= f->over[v])
        f->records--;
    f->record[f->records++] = v;
}

/* Of the prefix (i, m0), with the message behind it. */
static void
make_sieve(dapple *p, int i, int m0)
{
    sieve *f = &p->sieve;
    const tp_chain *c = p->sums->chain;
    int depth = depth_of(p, i, m0);
    f->count = f->records = 0;
    f->doubt = 4e-16 * (2 * p->devices + 16);
    for (int at = depth - 1, end = i, devices = m0; at >= 0; at--) {
        int64_t cell = end * p->stride + devices;
        int first = p->from_j[cell];
        put_stage(p, at, first, end, 1);
        devices = p->from_m[cell];
        end = first;
    }
    for (int at = 0; at < depth; at++) {
        put_part(f, p->forward[at], p->backward[at], c->micros);
        put_part(f, c->comm_s, c->comm_s, c->micros);
    }
    for (int k = 0; k < f->records / 2; k++) {
        int v = f->record[k];
        f->record[k] = f->record[f->records - 1 - k];
        f->record[f->records - 1 - k] = v;
    }
}

/* About the latency of the prefix, [i, j) on one device, and the rest; 0 where it is too close to tell. */
static double
about(const dapple *p, int i, int j)
{
    const sieve *f = &p->sieve;
    const tp_chain_sums *s = p->sums;
    int n = s->chain->blocks, left = p->devices - f->count / 2 - 1, micros = s->chain->micros;
    double comm = s->chain->comm_s, work = f->count > 0 ? f->work[f->count - 1] : 0.0;
    double own = s->forward[j] - s->forward[i] + (s->backward[j] - s->backward[i]);
    double steady = (micros - 1) * own, pivot = steady, before = work, rest = 0.0; /* before: work before the pivot */
    if (j < n) {
        rest = (s->forward[n] - s->forward[j] + (s->backward[n] - s->backward[j])) / left;
        double parts[2] = {2.0 * comm, own}, between = 0.0;
        pivot = (micros - 1) * rest;
        before = work + own + 2.0 * comm;
        for (int k = 0; k < 2; k++) {
            double other = (micros - 1) * parts[k] * (1.0 - 1e-12);
            if (fabs(pivot + between - other) <= f->doubt * (pivot + between + other))
                return 0.0;
            if (pivot + between < other) {
                pivot = (micros - 1) * parts[k];
                before = k == 0 ? work + own : work;
                rest = parts[k];
                between = 0.0;
            } else
                between += parts[k];
        }
    } else
        rest = own;
    int k = loses_to(f, 0, pivot + before);
    if (k < 0 || (k < f->records && f->final[f->record[k]] < 0))
        return 0.0;
    if (k == f->records)
        return pivot + before + rest;
    int v = f->final[f->record[k]];
    return f->steady[v] + f->work[v];
}

static tp_status
open_sieve(tp_arena *arena, int parts, sieve *f)
{
    TP_ARENA_TAKE(arena, parts, f->work);
    TP_ARENA_TAKE(arena, parts, f->forward);
    TP_ARENA_TAKE(arena, parts, f->backward);
    TP_ARENA_TAKE(arena, parts, f->steady);
    TP_ARENA_TAKE(arena, parts, f->over);
    TP_ARENA_TAKE(arena, parts, f->final);
    TP_ARENA_TAKE(arena, parts, f->record);
    return TP_OK;
}

/* Latency of cell `to` as its prefix has it, to the last bit; the sieve stays, what it is made of is another's. */
static double
exactly(dapple *p, int64_t to)
{
    uint8_t whole;
    int sifts = p->sifts;
    p->sifts = 0;
    double latency = evaluate(p, p->from_j[to], p->from_m[to], (int)(to / p->stride), (int)(to % p->stride) - p->from_m[to], &whole);
    p->sifts = sifts;
    return latency;
}

static void
take(dapple *p, int64_t to, double latency, int whole, int i, int m0)
{
    p->best[to] = latency;
    p->whole[to] = (uint8_t)whole;
    p->from_j[to] = i;
    p->from_m[to] = m0;
}

/* Is [i, j) behind its prefix better than the cell has? What p->best has of a cell is about its latency; where that does not
 * tell, both are computed. */
static int
is_better(dapple *p, int i, int m0, int64_t to, double *latency)
{
    uint8_t whole;
    double doubt = 1e-13 + 2.0 * p->sieve.doubt, other = p->best[to] * (1.0 - 1e-12);
    *latency = about(p, i, (int)(to / p->stride));
    if (*latency * (1.0 - doubt) >= other && *latency > 0.0)
        return 0;
    if (*latency * (1.0 + doubt) < other && *latency > 0.0)
        return 1;
    if (p->best[to] < INFINITY)
        p->best[to] = exactly(p, to);
    make_sieve(p, i, m0);
    *latency = evaluate(p, i, m0, (int)(to / p->stride), 1, &whole);
    return tp_chain_is_less(*latency, p->best[to]);
}

static tp_status
sift(dapple *p, int i, int m0)
{
    int n = p->sums->chain->blocks, left = p->devices - m0 - 1;
    TP_TRY(tp_deadline_check("dapple"));
    make_sieve(p, i, m0);
    for (int j = i + 1; j <= n; j++) {
        int64_t to = j * p->stride + m0 + 1;
        double latency;
        p->steps++;
        if ((j < n ? left < 1 : left > 0) || !fits(p, i, j, 1, m0, j < n))
            continue;
        TP_TRY(tp_deadline_check_after(&p->asked, 8));
        if (is_better(p, i, m0, to, &latency))
            take(p, to, latency, j == n || fits(p, j, n, left, m0 + 1, 0), i, m0);
    }
    return TP_OK;
}

static tp_status
extend(dapple *p, int i, int m0)
{
    int n = p->sums->chain->blocks;
    if (p->sifts)
        return sift(p, i, m0);
    for (int j = i + 1; j <= n; j++) {
        TP_TRY(tp_deadline_check("dapple"));
        for (int m = 1; m <= (p->straight ? 1 : p->devices - m0); m++) {
            int64_t to = j * p->stride + m0 + m;
            uint8_t whole;
            p->steps++;
            double latency = evaluate(p, i, m0, j, m, &whole);
            if (tp_chain_is_less(latency, p->best[to]))
                take(p, to, latency, whole, i, m0);
        }
    }
    return TP_OK;
}

static void
write_plan(dapple *p, int j, int m, tp_chain_plan *plan)
{
    int n = p->sums->chain->blocks, rest = j < n;
    plan->stages = depth_of(p, j, m) + rest;
    plan->boundary[plan->stages] = n;
    if (rest) {
        plan->replica[plan->stages - 1] = p->devices - m;
        plan->boundary[plan->stages - 1] = j;
    }
    for (int k = plan->stages - 1 - rest; k >= 0; k--) {
        int64_t at = j * p->stride + m;
        plan->replica[k] = m - p->from_m[at];
        plan->boundary[k] = p->from_j[at];
        j = p->from_j[at];
        m = p->from_m[at];
    }
    for (int k = 0; k < plan->stages; k++)
        put_stage(p, k, plan->boundary[k], plan->boundary[k + 1], plan->replica[k]);
    plan->objective_s = tp_dapple_latency(p->forward, p->backward, p->exchange, plan->stages, p->sums->chain->micros,
                                          p->sums->chain->comm_s, &plan->pivot);
}

/* Straight, the rest of the blocks is a stage of one device. */
static int
is_finished(const dapple *p, int64_t cell)
{
    return !p->straight || p->devices - cell % p->stride == (cell / p->stride < p->sums->chain->blocks);
}

static tp_status
run(const tp_chain_sums *s, tp_arena *arena, int stages, const void *options, tp_chain_plan *plan)
{
    const dapple *given = options;
    dapple p = {.sums = s, .devices = given->devices, .stride = given->devices + 1, .straight = given->straight};
    int n = s->chain->blocks;
    int64_t cells = (n + 1) * p.stride, best = -1;
    p.sifts = p.straight && !(s->params[n] > 0.0);
    (void)stages;
    TP_ARENA_TAKE(arena, cells, p.best);
    TP_ARENA_TAKE(arena, cells, p.whole);
    TP_ARENA_TAKE(arena, cells, p.from_j);
    TP_ARENA_TAKE(arena, cells, p.from_m);
    TP_ARENA_TAKE(arena, n + 1, p.forward);
    TP_ARENA_TAKE(arena, n + 1, p.backward);
    TP_ARENA_TAKE(arena, n + 1, p.exchange);
    TP_TRY(open_sieve(arena, 2 * n, &p.sieve));
    for (int64_t at = 0; at < cells; at++)
        p.best[at] = INFINITY;
    p.best[0] = 0.0;
    for (int i = 0; i < n; i++)
        for (int m = 0; m < p.devices; m++)
            if (p.best[i * p.stride + m] < INFINITY && (i > 0) == (m > 0))
                TP_TRY(extend(&p, i, m));
    p.best[0] = INFINITY;
    for (int64_t at = 0; at < cells; at++) {
        if (!p.whole[at] || !(p.best[at] < INFINITY) || !is_finished(&p, at))
            continue;
        if (p.sifts)
            p.best[at] = exactly(&p, at);
        if (best < 0 || tp_chain_is_less(p.best[at], p.best[best]))
            best = at;
    }
    plan->steps = p.steps;
    if (best < 0) {
        int even = p.devices < n ? p.devices : n;
        while (p.devices % even != 0)
            even--;
        return tp_chain_infeasible(s, even, 0, p.devices / even);
    }
    write_plan(&p, (int)(best / p.stride), (int)(best % p.stride), plan);
    return TP_OK;
}

tp_status
tp_plan_dapple(const tp_chain *chain, int devices, int straight, tp_chain_plan *out)
{
    dapple options = {.devices = devices, .straight = straight};
    *out = (tp_chain_plan){0};
    if (devices < 1 || devices > 4096)
        return tp_fail(TP_EVALUE, "devices is %d: 1 to 4096 are possible", devices);
    if (chain->in_flight != NULL && !straight)
        return tp_fail(TP_EVALUE, "in_flight is of stages without replicas: straight would be right beside it");
    tp_replicas sharing = straight ? TP_REPLICAS_NONE : TP_REPLICAS_SPLIT;
    return tp_chain_run(chain, straight ? devices : 1, devices, sharing, run, &options, out);
}
