/* The searches over the boundaries of stages; see csrc/plan/autopipe.h. Internal to it. */
#ifndef TP_PLAN_STAGE_SEARCH_H
#define TP_PLAN_STAGE_SEARCH_H

#include "csrc/plan/stages.h"

/* One plan and what is known of all. */
typedef struct {
    tp_stages *stages;
    tp_f1b f1b;
    int *best;      /* [stages + 1] */
    double best_s;  /* +inf before the first */
    double bound_s; /* no plan is faster */
    tp_autopipe_limits limits;
    int64_t start_ns, effort, look, simulations, nodes; /* look: the effort at which the clock is read again */
    int stopped;
    struct tp_stage_paths *paths; /* of tp_stage_improve; NULL before the first */
} tp_stage_search;

/* What a better plan must stay within: what is closer than this is a tie. */
static inline double
tp_stage_goal(const tp_stage_search *q)
{
    return q->best_s - 1e-12 * q->best_s;
}
/* Of an evaluation of the first `stages` stages: a slot costs some steps whatever is in it. */
static inline int64_t
tp_stage_effort(const tp_stages *s, int stages)
{
    return (int64_t)2 * (s->stages + s->micros) * (stages / 4 + 8);
}

/* Steps of a descent before there is a proof: what is better still, the proof finds sooner than more of it would. */
enum { TP_STAGE_DESCENT = 100000 };
#define TP_STAGE_CLOSE (1.0 / 256.0) /* of what the best plan is above the bound: no less is looked for without a proof */

/* The makespan; +inf where it is more than limit_s. A strictly better one becomes the best plan. */
double
tp_stage_try(tp_stage_search *q, const int *boundary, double limit_s);
/* Has a limit been reached? */
int
tp_stage_stop(tp_stage_search *q);
/* From the best plan: boundaries a .. b together one block up or down, for all a <= b, until none helps
 * or so many steps are done. boundary: [stages + 1] scratch. */
void
tp_stage_descend(tp_stage_search *q, int *boundary, int64_t steps);
/* From a plan (NULL: the best) towards a makespan that is less than the best one by `share` of what that is above the bound,
 * then by half of that and so on down to TP_STAGE_CLOSE; so many simulations at most (csrc/plan/stage_paths.c). */
TP_MUST_USE tp_status
tp_stage_improve(tp_arena *arena, tp_stage_search *q, const int *from, double share, int simulations);
/* Branch and bound from the best plan: bound_s is the best makespan, less ties, unless a limit stopped it. */
TP_MUST_USE tp_status
tp_stage_branch(tp_arena *arena, tp_stage_search *q);
/* On from the best plan, within the windows of its goal (tp_stages_narrow): the best there is, unless a limit stopped it.
 * *done 0: it gave up, for the problem is too large; what it has found is right all the same. bound_s rises to what it knows
 * by then (csrc/plan/stage_proof.c). */
TP_MUST_USE tp_status
tp_stage_prove(tp_arena *arena, tp_stage_search *q, int *done);
/* The paper's search (csrc/plan/stage_heuristic.c). */
TP_MUST_USE tp_status
tp_stage_heuristic(tp_arena *arena, tp_stage_search *q);

#endif
