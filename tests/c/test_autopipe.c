/* AutoPipe's planners: the evaluation of 1F1B bit for bit against a fixed point over the stages, the bound of its first
 * stages, plans against enumeration with and without memory, and every allocation failing once. */
#include "csrc/plan/autopipe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "csrc/base/deadline.h"
#include "csrc/base/mem.h"
#include "tests/c/check.h"

enum { P = 9, M = 14, N = 10 };

static uint64_t seed = 1;

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
    for (int i = 0; i < 20; i++)
        check_faults();
    if (failures > 0)
        fprintf(stderr, "%d failures\n", failures);
    return failures > 0;
}
