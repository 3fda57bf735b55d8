/* AutoPipe's planners: the evaluation of 1F1B bit for bit against a fixed point over the stages, the bound of its first
 * stages, heads and tails cut anywhere, plans and proofs against enumeration with and without memory, and every allocation
 * failing once. */
#include "csrc/plan/autopipe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "csrc/base/deadline.h"
#include "csrc/base/mem.h"
#include "csrc/plan/stage_response.h"
#include "csrc/plan/stage_search.h"
#include "tests/c/check.h"

enum { P = 9, M = 14, N = 10 };

static uint64_t seed = 1;
/* Of check_proof: how many were asked for; where the pivot's plan is not the best; where a better one was found before. */
static int proofs, better, improved;

static int
pick(int count)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (int)((seed >> 33) % (uint64_t)count);
}

typedef struct {
    int p, m, blocking;
    double f[P], b[P], c;
} pipeline;

/* The end of op number `at` of stage k; -1 if what it needs is not made yet. */
static double
try_op(const pipeline *x, int k, int at, double clock, double (*f_end)[M], double (*b_end)[M])
{
    int warm = x->m < x->p - 1 - k ? x->m : x->p - 1 - k, steady = at - warm, backward, q;
    backward = at < warm ? 0 : steady < 2 * (x->m - warm) ? steady & 1 : 1;
    q = at < warm ? at : steady >= 2 * (x->m - warm) ? at - x->m : backward ? steady / 2 : warm + steady / 2;
    int remote = backward ? k < x->p - 1 : k > 0;
    double ready = !remote ? 0.0 : backward ? b_end[k + 1][q] : f_end[k - 1][q];
    if (ready < 0.0)
        return -1.0;
    if (remote && !x->blocking)
        ready += x->c;
    double end = ready > clock ? ready : clock;
    if (remote && x->blocking)
        end += x->c;
    end += backward ? x->b[k] : x->f[k];
    (backward ? b_end : f_end)[k][q] = end;
    return end;
}

static double
fixed_point(const pipeline *x)
{
    double f_end[P][M], b_end[P][M], clock[P] = {0.0}, last = 0.0;
    int at[P] = {0};
    for (int k = 0; k < P; k++)
        for (int q = 0; q < M; q++)
            f_end[k][q] = b_end[k][q] = -1.0;
    for (int done = 0; done < 2 * x->p * x->m;)
        for (int k = 0; k < x->p; k++)
            for (double end; at[k] < 2 * x->m && (end = try_op(x, k, at[k], clock[k], f_end, b_end)) >= 0.0; done++) {
                clock[k] = end;
                last = fmax(last, end);
                at[k]++;
            }
    return last;
}

/* A stage's rest: the seconds behind it, receiving, and the messages. */
static double
rest_of(const pipeline *x, int top)
{
    double rest = 0.0;
    for (int k = top + 1; k < x->p; k++)
        rest += x->f[k] + x->b[k] + 2.0 * x->c;
    return x->blocking ? rest - x->c : rest; /* stage top itself pays for what it receives */
}

static void
check_evaluation(void)
{
    pipeline x = {.p = 1 + pick(P), .m = 1 + pick(M), .blocking = pick(2), .c = 0.37 * pick(3)};
    tp_f1b_op path[2 * (P + M)];
    tp_arena arena;
    tp_f1b f;
    int master = -1;
    for (int k = 0; k < x.p; k++) {
        x.f[k] = 0.1 * pick(30);
        x.b[k] = 0.13 * pick(30);
    }
    double want = fixed_point(&x), sum = 0.0, row[3 * P];
    if (tp_arena_open(&arena) != TP_OK || tp_f1b_open(&arena, x.p, x.m, x.c, x.blocking, &f) != TP_OK)
        abort();
    for (int k = 0; k < x.p; k++)
        tp_f1b_set(&f, k, x.f[k], x.b[k]);
    CHECK(tp_f1b_run(&f, INFINITY) == want);
    double limit = want * (0.8 + 0.01 * pick(30)), limited = tp_f1b_run(&f, limit);
    CHECK(limited == want || (isinf(limited) && want > limit));
    for (int top = 0; top < x.p - 1; top++)
        CHECK(tp_f1b_bound(&f, top, rest_of(&x, top), INFINITY) <= want * (1.0 + 1e-14));
    CHECK(x.blocking || tp_sliced_f1b(x.p, x.m, 0, x.f, x.b, x.c, row) == want);
    int length = tp_f1b_path(&f, path, &master);
    for (int i = 0; i < length; i++) {
        int k = path[i].stage;
        sum += path[i].backward ? x.b[k] : x.f[k];
        if (x.blocking ? (path[i].backward ? k < x.p - 1 : k > 0) : i > 0 && k != path[i - 1].stage)
            sum += x.c;
    }
    CHECK(fabs(sum - want) <= 1e-12 * want && master >= 0 && master < x.p);
    CHECK(tp_f1b_run(&f, INFINITY) == want); /* nothing is left behind */
    tp_arena_close(&arena);
}

/* A head, a stage and a tail make the makespan, wherever the stage is; with what they do at least, no more. */
static void
check_responses(void)
{
    pipeline x = {.p = 1 + pick(P), .m = 1 + pick(M), .blocking = pick(2), .c = 0.37 * pick(3)};
    double heads[P + 1][3 * M + 1], tails[P + 1][M * M], scratch[2 * M];
    tp_response_stage s[P];
    for (int k = 0; k < x.p; k++) {
        x.f[k] = 0.1 * pick(30);
        x.b[k] = 0.13 * pick(30);
        s[k] = (tp_response_stage){.micros = x.m,
                                   .lead = tp_response_lead(x.p, x.m, k),
                                   .lead_before = tp_response_lead(x.p, x.m, k - 1),
                                   .lead_behind = tp_response_lead(x.p, x.m, k + 1),
                                   .forward_s = x.f[k] + (x.blocking && k > 0 ? x.c : 0.0),
                                   .backward_s = x.b[k] + (x.blocking && k < x.p - 1 ? x.c : 0.0),
                                   .lag_s = x.blocking ? 0.0 : x.c};
    }
    tp_response_head_empty(x.m, heads[0]);
    for (int k = 0; k < x.p - 1; k++)
        tp_response_head(&s[k], heads[k], heads[k + 1], scratch);
    for (int i = 0; i < x.m * x.m; i++)
        tails[x.p][i] = -INFINITY;
    for (int k = x.p - 1; k > 0; k--)
        tp_response_tail(&s[k], tails[k + 1], 0, tails[k], scratch);
    double want = fixed_point(&x), share = 0.5 + 0.05 * pick(10);
    for (int k = 0; k < x.p; k++) {
        double got = tp_response_makespan(&s[k], heads[k], tails[k + 1], INFINITY, scratch);
        CHECK(fabs(got - want) <= 1e-13 * want);
        got = tp_response_makespan(&s[k], heads[k], tails[k + 1], share * want, scratch);
        CHECK(got >= share * want && got <= want * (1.0 + 1e-13));
        if (k < x.p - 1) /* a mere delay behind it is no more than the tail */
            CHECK(tp_response_delay(&s[k], heads[k], rest_of(&x, k), INFINITY, scratch) <= want * (1.0 + 1e-13));
        s[k].forward_s *= share;
        if (k > 0) { /* the lesser of two tails */
            tp_response_tail(&s[k], tails[k + 1], 1, tails[k], scratch);
            CHECK(tp_response_makespan(&s[k - 1], heads[k - 1], tails[k], INFINITY, scratch) <= want * (1.0 + 1e-13));
        }
    }
}

typedef struct {
    double f[N], b[N], fixed[N], kept[N], transient[N], limit[P];
    tp_stage_memory memory;
    tp_stage_problem problem;
} instance;

static void
make_instance(instance *x)
{
    int n = 1 + pick(N), p = 1 + pick(n < 5 ? n : 5);
    for (int i = 0; i < n; i++) {
        x->f[i] = pick(30);
        x->b[i] = pick(60);
        x->fixed[i] = pick(9);
        x->kept[i] = pick(9);
        x->transient[i] = pick(9);
    }
    for (int k = 0; k < p; k++)
        x->limit[k] = 20 + pick(80);
    x->memory = (tp_stage_memory){x->fixed, x->kept, x->transient, x->limit, NULL};
    x->problem = (tp_stage_problem){n, p, 1 + pick(M), x->f, x->b, pick(3), pick(2), pick(2) ? &x->memory : NULL};
}

/* The least makespan of stages k .. p - 1 over blocks from .. n; +inf if nothing fits. */
static double
enumerate(const instance *x, pipeline *line, int k, int from)
{
    const tp_stage_problem *q = &x->problem;
    double best = INFINITY, fixed = 0.0, kept = 0.0, most = 0.0;
    int copies = q->micros < q->stages - k ? q->micros : q->stages - k;
    if (k == q->stages)
        return from == q->blocks ? fixed_point(line) : INFINITY;
    line->f[k] = line->b[k] = 0.0;
    for (int to = from + 1; to <= q->blocks; to++) {
        fixed += x->fixed[to - 1];
        kept += x->kept[to - 1];
        most = fmax(most, x->transient[to - 1]);
        line->f[k] += x->f[to - 1];
        line->b[k] += x->b[to - 1];
        double f = line->f[k], b = line->b[k];
        if (q->memory == NULL || fixed + copies * kept + most <= x->limit[k])
            best = fmin(best, enumerate(x, line, k + 1, to));
        line->f[k] = f;
        line->b[k] = b;
    }
    return best;
}

static void
check_plans(void)
{
    instance x;
    make_instance(&x);
    const tp_stage_problem *q = &x.problem;
    pipeline line = {.p = q->stages, .m = q->micros, .blocking = q->blocking, .c = q->comm_s};
    double want = enumerate(&x, &line, 0, 0);
    for (int method = TP_AUTOPIPE_EXACT; method <= TP_AUTOPIPE_BALANCED; method++) {
        tp_stage_plan plan;
        tp_status status = tp_plan_autopipe(q, (tp_autopipe_method)method, NULL, &plan);
        CHECK(status == (isinf(want) ? TP_EINFEASIBLE : TP_OK));
        if (status == TP_OK) {
            CHECK(method != TP_AUTOPIPE_EXACT || (plan.step_time_s == want && plan.optimal));
            CHECK(plan.step_time_s >= want && plan.lower_bound_s <= want);
            for (int k = 0; k < q->stages && q->memory != NULL; k++)
                CHECK(plan.bytes[k] <= x.limit[k]);
        }
        tp_stage_plan_free(&plan);
    }
}

/* tp_stage_prove finds the best plan from the pivot's, which is mostly worse, and says so of it. */
static void
check_proof(void)
{
    instance x;
    tp_arena arena;
    tp_stages stages;
    int boundary[N + 1], best[N + 1], done = 0;
    tp_stage_search q = {.stages = &stages, .best = best, .best_s = INFINITY};
    make_instance(&x);
    const tp_stage_problem *p = &x.problem;
    pipeline line = {.p = p->stages, .m = p->micros, .blocking = p->blocking, .c = p->comm_s};
    double want = enumerate(&x, &line, 0, 0);
    if (isinf(want))
        return;
    MUST(tp_arena_open(&arena) == TP_OK && tp_stages_open(&arena, p, &stages) == TP_OK);
    MUST(tp_f1b_open(&arena, p->stages, p->micros, p->comm_s, p->blocking, &q.f1b) == TP_OK);
    tp_stages_pivot(&stages, boundary, &q.bound_s);
    double pivot_s = tp_stage_try(&q, boundary, INFINITY), bound_s = q.bound_s;
    if (pick(2)) { /* from another plan at times, as the proof asks for it */
        for (int k = 0; k <= p->stages; k++)
            boundary[k] = best[k];
        CHECK(tp_stage_improve(&arena, &q, pick(2) ? boundary : NULL, 0.5, 20) == TP_OK);
        CHECK(q.best_s <= pivot_s && q.best_s >= want && q.bound_s == bound_s);
        improved += q.best_s < pivot_s;
    }
    if (tp_stage_goal(&q) > q.bound_s && tp_stages_narrow(&stages, tp_stage_goal(&q))) {
        CHECK(tp_stage_prove(&arena, &q, &done) == TP_OK && done);
        CHECK(q.bound_s >= bound_s && q.bound_s <= want);
    }
    CHECK(q.best_s == want && pivot_s >= want);
    proofs += done;
    better += pivot_s > want;
    tp_arena_close(&arena);
}

static void
check_faults(void)
{
    instance x;
    tp_slicer_plan slicer;
    make_instance(&x);
    for (int method = TP_AUTOPIPE_EXACT; method <= TP_AUTOPIPE_BALANCED; method++) {
        tp_status status = TP_EMEMORY;
        for (int fault = 1; status == TP_EMEMORY && fault < 100; fault++) {
            tp_stage_plan plan;
            tp_heap_fail_after(fault);
            status = tp_plan_autopipe(&x.problem, (tp_autopipe_method)method, NULL, &plan);
            tp_stage_plan_free(&plan);
        }
        CHECK(status == TP_OK || status == TP_EINFEASIBLE);
        for (int stop = 1; stop < 6; stop++) { /* the time is up at the first questions: there is a plan all the same */
            tp_stage_plan plan;
            tp_heap_fail_after(0);
            tp_deadline_count(1);
            tp_deadline_set(stop);
            tp_status ended = tp_plan_autopipe(&x.problem, (tp_autopipe_method)method, NULL, &plan);
            tp_deadline_set(0);
            tp_deadline_count(0);
            CHECK(ended == status && (ended != TP_OK || plan.boundary[x.problem.stages] == x.problem.blocks));
            tp_stage_plan_free(&plan);
        }
    }
    tp_heap_fail_after(1);
    CHECK(tp_plan_slicer(x.problem.stages, 4, x.f, x.b, 1.0, &slicer) == TP_EMEMORY);
    tp_heap_fail_after(0);
    CHECK(tp_plan_slicer(x.problem.stages, 4, x.f, x.b, 1.0, &slicer) == TP_OK);
}

int
main(void)
{
    for (int i = 0; i < 3000; i++)
        check_evaluation();
    for (int i = 0; i < 1500; i++)
        check_plans();
    for (int i = 0; i < 2000; i++)
        check_responses();
    for (int i = 0; i < 5000; i++)
        check_proof();
    CHECK(proofs > 400 && better > 150 && improved > 30);
    for (int i = 0; i < 20; i++)
        check_faults();
    if (failures > 0)
        fprintf(stderr, "%d failures\n", failures);
    return failures > 0;
}
