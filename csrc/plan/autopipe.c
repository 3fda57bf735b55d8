#include "csrc/plan/autopipe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"
#include "csrc/plan/stage_search.h"

void
tp_stage_plan_free(tp_stage_plan *plan)
{
    free(plan->boundary);
    free(plan->forward_s);
    free(plan->backward_s);
    free(plan->bytes);
    free(plan->path);
    *plan = (tp_stage_plan){0};
}

static tp_status
open_plan(const tp_stage_problem *q, tp_stage_plan *plan)
{
    size_t p = (size_t)q->stages, ops = (size_t)tp_f1b_longest_path(q->stages, q->micros);
    *plan = (tp_stage_plan){.stages = q->stages};
    plan->boundary = calloc(p + 1, sizeof *plan->boundary);
    plan->forward_s = calloc(p, sizeof *plan->forward_s);
    plan->backward_s = calloc(p, sizeof *plan->backward_s);
    plan->bytes = calloc(p, sizeof *plan->bytes);
    plan->path = calloc(ops, sizeof *plan->path);
    if (plan->boundary == NULL || plan->forward_s == NULL || plan->backward_s == NULL || plan->bytes == NULL ||
        plan->path == NULL)
        return tp_fail(TP_EMEMORY, "no memory for a plan of %d stages and %d micro-batches", q->stages, q->micros);
    return TP_OK;
}

/* The search worked with differences of running sums: here every stage is summed by itself. */
static void
finish(const tp_stage_problem *problem, tp_stage_search *q, tp_stage_plan *plan)
{
    memcpy(plan->boundary, q->best, ((size_t)plan->stages + 1) * sizeof *q->best);
    for (int k = 0; k < plan->stages; k++) {
        for (int i = plan->boundary[k]; i < plan->boundary[k + 1]; i++) {
            plan->forward_s[k] += problem->forward_s[i];
            plan->backward_s[k] += problem->backward_s[i];
        }
        if (problem->memory != NULL)
            plan->bytes[k] = tp_stage_bytes(problem, k, plan->boundary[k], plan->boundary[k + 1]);
        tp_f1b_set(&q->f1b, k, plan->forward_s[k], plan->backward_s[k]);
    }
    plan->step_time_s = tp_f1b_run(&q->f1b, INFINITY);
    plan->path_length = tp_f1b_path(&q->f1b, plan->path, &plan->master_stage);
    plan->optimal = q->bound_s >= tp_stage_goal(q);
    plan->lower_bound_s = fmin(plan->step_time_s, q->bound_s * (1.0 - 1e-12));
    plan->simulations = q->simulations;
    plan->nodes = q->nodes;
}

static tp_status
search_exact(tp_arena *arena, tp_stage_search *q, int *boundary)
{
    tp_stages_take(q->stages, 0, boundary); /* the goal is the pivot's: its other end */
    tp_stage_try(q, boundary, q->best_s);
    tp_stage_descend(q, boundary, TP_STAGE_DESCENT);
    return tp_stage_branch(arena, q);
}

/* In whole numbers of a small unit: what ties in one unit of time ties in every other. */
static tp_status
in_ticks(tp_arena *arena, const tp_stage_problem *problem, tp_stage_problem *out)
{
    int n = problem->blocks;
    double total = 0.0;
    void *memory = NULL;
    *out = *problem;
    for (int i = 0; i < n; i++)
        total += problem->forward_s[i] + problem->backward_s[i];
    double unit = ldexp(total, -36); /* with thousands of micro-batches sums stay exact */
    double messages = 2.0 * problem->stages * problem->comm_s;
    if (!(unit >= 1e-290) || !((total + messages) / unit * problem->micros <= 1e299)) /* one would leave the range of a double */
        return TP_OK;
    TP_TRY(tp_arena_take(arena, 2 * (size_t)n, sizeof(double), &memory));
    double *forward = memory, *backward = forward + n;
    for (int i = 0; i < n; i++) {
        forward[i] = rint(problem->forward_s[i] / unit);
        backward[i] = rint(problem->backward_s[i] / unit);
    }
    out->forward_s = forward;
    out->backward_s = backward;
    out->comm_s = rint(problem->comm_s / unit);
    return TP_OK;
}

static tp_status
search_balanced(tp_arena *arena, tp_stage_search *q, int *boundary)
{
    size_t width = (size_t)q->stages->blocks + 1;
    int *parent;
    TP_TRY(tp_stages_balance(arena, q->stages, &parent));
    for (int k = q->stages->stages; k > 0; k--)
        boundary[k - 1] = parent[(size_t)k * width + (size_t)boundary[k]];
    tp_stage_try(q, boundary, INFINITY);
    return TP_OK;
}

/* The paper's choices hang on ties: of critical paths, of places for a boundary. */
static tp_status
search_published(tp_arena *arena, const tp_stage_problem *problem, tp_autopipe_method method, tp_stage_search *q, int *boundary)
{
    tp_stage_problem ticks;
    tp_stages stages;
    tp_stage_search in = {.stages = &stages, .best = q->best, .best_s = INFINITY, .limits = q->limits, .start_ns = q->start_ns};
    TP_TRY(in_ticks(arena, problem, &ticks));
    TP_TRY(tp_stages_open(arena, &ticks, &stages));
    TP_TRY(tp_f1b_open(arena, ticks.stages, ticks.micros, ticks.comm_s, ticks.blocking, &in.f1b));
    if (method == TP_AUTOPIPE_HEURISTIC)
        TP_TRY(tp_stage_heuristic(arena, &in));
    else
        TP_TRY(search_balanced(arena, &in, boundary));
    memcpy(boundary, in.best, ((size_t)problem->stages + 1) * sizeof *boundary);
    q->simulations = in.simulations - 1;
    tp_stage_try(q, boundary, INFINITY);
    return TP_OK;
}

static tp_status
search(tp_arena *arena, const tp_stage_problem *problem, tp_autopipe_method method,
       const tp_autopipe_limits *limits, tp_stage_plan *plan)
{
    tp_stages stages;
    tp_stage_search q = {.stages = &stages, .best_s = INFINITY, .start_ns = tp_clock_ns()};
    void *memory = NULL;
    if (limits != NULL)
        q.limits = *limits;
    TP_TRY(tp_stages_open(arena, problem, &stages));
    TP_TRY(tp_f1b_open(arena, problem->stages, problem->micros, problem->comm_s, problem->blocking, &q.f1b));
    TP_TRY(tp_arena_take(arena, 2 * ((size_t)problem->stages + 1), sizeof(int), &memory));
    q.best = memory;
    int *boundary = q.best + problem->stages + 1;
    tp_stages_pivot(&stages, boundary, &q.bound_s);
    TP_TRY(tp_deadline_check_told());
    if (method == TP_AUTOPIPE_EXACT || method == TP_AUTOPIPE_PIVOT)
        tp_stage_try(&q, boundary, INFINITY);
    if (method == TP_AUTOPIPE_EXACT)
        TP_TRY(search_exact(arena, &q, boundary));
    else if (method != TP_AUTOPIPE_PIVOT)
        TP_TRY(search_published(arena, problem, method, &q, boundary));
    TP_TRY(tp_deadline_check_told());
    TP_TRY(open_plan(problem, plan));
    finish(problem, &q, plan);
    TP_TRY(tp_deadline_check_told());
    plan->seconds = 1e-9 * (double)(tp_clock_ns() - q.start_ns);
    return TP_OK;
}

tp_status
tp_plan_autopipe(const tp_stage_problem *problem, tp_autopipe_method method, const tp_autopipe_limits *limits,
                 tp_stage_plan *out)
{
    tp_arena arena;
    *out = (tp_stage_plan){0};
    TP_TRY(tp_arena_open(&arena));
    tp_status status = search(&arena, problem, method, limits, out);
    tp_arena_close(&arena);
    return status;
}
