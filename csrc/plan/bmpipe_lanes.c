/* The inequalities of a long search side by side in memory, so that vector instructions weigh all of them at once; before that the
 * one that ended the last branch at this stage is tried. Which of several inequalities ends a branch matters only for the choice
 * of one to replace when there are too many: then the search begins anew without lanes (bmpipe_exact.c). */
#include "csrc/plan/bmpipe_exact.h"

#include <string.h>

enum { ROWS = TP_EXACT_ROWS };

struct tp_exact_lanes {
    double *forward, *backward; /* [stages][ROWS] runs */
    double *before;             /* [stages + 1][ROWS] */
    double *rest;               /* [stages + 1][n + 1][ROWS] */
    int *hot;                   /* [stages] the last that ended a branch there */
};

static void
put_lane(tp_exact *e, int k, int depth)
{
    const tp_exact_row *q = &e->rows[k];
    tp_exact_lanes *l = e->lanes;
    for (int x = 0; x < e->stages; x++) {
        l->forward[x * ROWS + k] = q->row.run[x];
        l->backward[x * ROWS + k] = q->row.run[e->stages + x];
    }
    for (int x = 0; x <= depth; x++)
        l->before[x * ROWS + k] = q->before[x];
    for (int at = 0; at < (e->stages + 1) * (e->n + 1); at++)
        l->rest[(int64_t)at * ROWS + k] = q->rest[at];
}

tp_status
tp_exact_lanes_open(tp_exact *e, int depth)
{
    size_t stages = (size_t)e->stages, row = ROWS * sizeof(double);
    void *memory = NULL;
    TP_TRY(tp_bmpipe_take(e->p, 1, sizeof *e->lanes, &memory));
    tp_exact_lanes *l = memory;
    struct {
        void **to;
        size_t count, size;
    } wanted[] = {
        {(void **)&l->forward, stages, row},
        {(void **)&l->backward, stages, row},
        {(void **)&l->before, stages + 1, row},
        {(void **)&l->rest, (stages + 1) * (size_t)(e->n + 1), row},
        {(void **)&l->hot, stages, sizeof *l->hot},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        TP_TRY(tp_bmpipe_take(e->p, wanted[i].count, wanted[i].size, wanted[i].to));
    e->lanes = l;
    for (int k = 0; k < e->row_count; k++)
        put_lane(e, k, depth);
    return TP_OK;
}

void
tp_exact_lanes_add(tp_exact *e)
{
    put_lane(e, e->row_count - 1, e->stages);
}

/* before[] of the stages up to here, of all, and whether one of them ends the branch. count: of both loops whole vectors. */
static int
weigh_all(const double *restrict forward, const double *restrict backward, const double *restrict before,
          const double *restrict rest, double forward_s, double backward_s, double goal_s, int count, double *restrict after)
{
    int ends = 0;
    for (int k = 0; k < count; k++) {
        after[k] = before[k] + (forward[k] * forward_s + backward[k] * backward_s);
        ends |= after[k] + rest[k] >= goal_s;
    }
    return ends;
}

int
tp_exact_lanes_end(tp_exact *e, int stage, int to)
{
    tp_exact_lanes *l = e->lanes;
    int from = e->cut[stage], at = stage * ROWS, hot = l->hot[stage];
    double forward_s = tp_bmpipe_between(e->p->forward_s, from, to), goal_s = tp_exact_goal(e);
    double backward_s = tp_bmpipe_between(e->p->backward_s, from, to) + tp_exact_extra(e, stage, from, to);
    const double *rest = l->rest + ((int64_t)(stage + 1) * (e->n + 1) + to) * ROWS;
    double sum = l->before[at + hot] + (l->forward[at + hot] * forward_s + l->backward[at + hot] * backward_s);
    if (sum + rest[hot] >= goal_s)
        return 1;
    if (!weigh_all(l->forward + at, l->backward + at, l->before + at, rest, forward_s, backward_s, goal_s, e->row_count,
                   l->before + at + ROWS))
        return 0;
    for (int k = 0; k < e->row_count; k++)
        if (l->before[at + ROWS + k] + rest[k] >= goal_s)
            l->hot[stage] = k;
    return 1;
}
