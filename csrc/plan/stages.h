/* Partitions of blocks into stages under 1F1B: what fits, what it costs at least, and which boundaries a plan below some
 * makespan may still use. Internal to the planners of csrc/plan/autopipe.h. */
#ifndef TP_PLAN_STAGES_H
#define TP_PLAN_STAGES_H

#include "csrc/plan/autopipe.h"

/* The path bounds. Let f, b be a stage's seconds, receiving included; E(i, s) the seconds of F_{i+1} .. F_s, B_s .. B_{i+1} of
 * one micro-batch with the messages between them and stage i; head(i) the same of stages 0 .. i - 1 above stage i. For a
 * pivot i and any turns s', s in i .. p - 1 these are paths of the order of 1F1B, so that no makespan is less:
 *   m > p - i:   head(i) + [(p - s') f + E(i, s')] + b + (m - p + i) f + (m - p + i - 1) b + [E(i, s) + (p - s) b]
 *                + (floor((m - 1) / (p - i)) - 1) max(0, E(i, p - 1) - (p - 1 - i) (f + b))
 *   m <= p - i:  head(i) + E(i, s) + max(m f + min(m, p - s) b, min(m, p - s) f + m b)
 * (PLANNERS.md 2.5, LB4, with small m added and blocking messages counted where they are paid. The last term is ours: between
 * B_i(0) and F_i(m - 1) a path may leave F_i(q) for the last stage and come back to B_i(q) instead of staying for p - 1 - i
 * pairs of F_i and B_i; F_i(q + p - i) is next, so that it can do so once in p - i micro-batches.) With turns at i or p - 1 alone
 * a path depends on the stage's own interval: E(i, p - 1) is a total less a prefix. The largest of these, the stage bound,
 * never rises when a stage gives up its first or its last block: each path loses that block at least as often on the stage as
 * it wins it in head(i) or in the excursions, which are at most 2 + (m - 1) / (p - i) - 1. So "the plan of least largest stage
 * bound" is found exactly by greedy filling, and its bound is below the makespan of every plan. */
typedef struct {
    int blocks, stages, micros;
    double lag_s, wait_s;  /* comm_s and 0, or 0 and comm_s where messages block */
    double *forward_s, *backward_s; /* [blocks + 1] running sums */
    int *reach;            /* [stages][blocks]: a stage that begins at i may end there at most; NULL: no memory limit */
    /* of the last tp_stages_narrow: */
    double goal_s;
    int64_t asked;         /* steps since somebody was asked whether to stop */
    int *first, *behind;   /* [stages + 1] where boundary k may be, hull */
    int *alive;            /* [stages + 1][blocks + 2]: the next place of boundary k, from here on, from which stages k .. p - 1
                              can hold the rest within the goal; blocks + 1: none. Set from first[k] to behind[k] + 1. */
} tp_stages;

/* What stage k needs for blocks from .. to; with the problem's memory. */
double
tp_stage_bytes(const tp_stage_problem *problem, int k, int from, int to);

typedef struct {
    double forward_s, backward_s; /* receiving included */
    double head_s, rest_s;        /* head(k), E(k, p - 1) */
} tp_stage_times;

/* Memory from the arena. EVALUE, EINFEASIBLE, EMEMORY as tp_plan_autopipe. */
TP_MUST_USE tp_status
tp_stages_open(tp_arena *arena, const tp_stage_problem *problem, tp_stages *out);
/* Of blocks from .. to on stage k. */
static inline tp_stage_times
tp_stage_times_of(const tp_stages *s, int k, int from, int to)
{
    int n = s->blocks, p = s->stages;
    double forward = s->forward_s[to] - s->forward_s[from], backward = s->backward_s[to] - s->backward_s[from];
    double head = s->forward_s[from] + s->backward_s[from];
    double rest = (s->forward_s[n] - s->forward_s[to]) + (s->backward_s[n] - s->backward_s[to]);
    if (k > 0) {
        forward += s->wait_s;
        head += 2 * k * s->lag_s + (2 * k - 1) * s->wait_s;
    }
    if (k < p - 1) {
        backward += s->wait_s;
        rest += 2 * (p - 1 - k) * s->lag_s + (2 * (p - 1 - k) - 1) * s->wait_s;
    }
    return (tp_stage_times){forward, backward, head, rest};
}
double
tp_stage_bound(const tp_stages *s, int k, int from, int to);
static inline int
tp_stage_fits(const tp_stages *s, int k, int from, int to)
{
    return s->reach == NULL || to <= s->reach[(size_t)k * (size_t)s->blocks + (size_t)from];
}
/* The last end, at most what the later stages leave, of a stage k from here that fits and whose bound is within the goal;
 * `from` itself if one block is too much. */
int
tp_stage_longest(const tp_stages *s, int k, int from, double goal_s);
/* Is there a plan whose stage bounds are all within the goal? Exact. Sets goal_s, first, behind and alive. 0, and none of these to
 * be used, where the thread is told to stop. */
int
tp_stages_narrow(tp_stages *s, double goal_s);
/* After tp_stages_narrow that said yes: a plan within the goal. late: every stage as long as can be, else as short. Returns
 * its largest stage bound. */
double
tp_stages_take(const tp_stages *s, int late, int *boundary);
/* The plan of least largest stage bound (within 1e-13 of it), its stages as long as can be from the first on; the goal is
 * left narrowed to it. *bound_s: below it by that much, and above no plan's makespan but for the rounding of sums. */
void
tp_stages_pivot(tp_stages *s, int *boundary, double *bound_s);
/* Algorithm 1 (2.3) for all prefixes: parent[k * (blocks + 1) + i] is where stage k - 1 begins when stages 0 .. k - 1 hold
 * blocks 0 .. i with the least largest f + b; the least such place; -1 if nothing fits. */
TP_MUST_USE tp_status
tp_stages_balance(tp_arena *arena, const tp_stages *s, int **parent);

#endif
