/* Proves that no plan of one chunk is better, or gives up. The branches are those of bmpipe_exact.c, but when all ways to go on
 * from (stage, first layer) have been ended, what that took is kept as a lesson: the least E, w and path sums of the earlier stages
 * with which each of them is ended. Another branch that comes there with no less of any is ended at once. A leaf is ended by its
 * own critical path, so no way to go on is simulated twice; sums that no bound used are not in the lesson. Exact where seconds are
 * whole numbers. */
#include "csrc/plan/bmpipe_exact.h"

#include <stdlib.h>
#include <string.h>

enum { ROWS = 256, NODES = 200000, LESSONS = 100000 };

/* The least sum that a row must have over the earlier stages. */
typedef struct {
    int row;
    double least;
} need;

typedef struct lesson {
    struct lesson *next;
    double extra_s, most_s; /* -INFINITY: whatever they are */
    int needs;
    need *of;
} lesson;

/* Of a branch: the same, by row. */
typedef struct {
    double extra_s, most_s;
    double row[ROWS];
} reason;

typedef struct {
    tp_exact *e;
    double goal_s;
    tp_exact_row *rows;
    int row_count;
    lesson **known;  /* [stages + 1][n + 1] */
    reason *why;     /* [stages + 1] of the branch at hand */
    tp_exact_child *children; /* [stages][n] */
    int64_t nodes, lessons;
} proof;

static inline void
raise_to(double *least, double to)
{
    if (to > *least)
        *least = to;
}

/* A child of the branch whose bound by labels ends it. */
static void
blame_labels(const proof *f, int stage, int to, double extra_s, double own_s, double most_s, double bound_s, reason *why)
{
    const tp_exact *e = f->e;
    double extra = tp_exact_extra(e, stage, e->cut[stage], to);
    double without = tp_exact_bound(e, stage + 1, to, extra_s + extra, own_s);
    if (without < f->goal_s)
        raise_to(&why->most_s, most_s);
    else
        bound_s = without;
    raise_to(&why->extra_s, extra_s - (bound_s - f->goal_s));
}

/* Does a path end the child? The one that asks for least more than is asked for already. */
static int
is_ended_by_row(const proof *f, int stage, int to, reason *why)
{
    const tp_exact *e = f->e;
    int best = -1;
    double most = 0.0;
    for (int k = 0; k < f->row_count; k++) {
        const tp_exact_row *q = &f->rows[k];
        double over = q->before[stage + 1] + q->rest[(stage + 1) * (e->n + 1) + to] - f->goal_s;
        if (!(over >= 0.0))
            continue;
        if (q->before[stage] - over <= why->row[k])
            return 1;
        if (best < 0 || over > most) {
            best = k;
            most = over;
        }
    }
    if (best >= 0)
        why->row[best] = f->rows[best].before[stage] - most;
    return best >= 0;
}

/* Add to `why` what lesson l, which ends a child, asks of the branch, less what the child's stage adds itself. */
static void
blame(const proof *f, int stage, double extra_s, double own_s, const lesson *l, reason *why)
{
    raise_to(&why->extra_s, l->extra_s - extra_s);
    if (l->most_s > own_s)
        raise_to(&why->most_s, l->most_s);
    for (int i = 0; i < l->needs; i++) {
        const double *before = f->rows[l->of[i].row].before;
        raise_to(&why->row[l->of[i].row], l->of[i].least - (before[stage + 1] - before[stage]));
    }
}

static lesson *
find_lesson(const proof *f, int stage, int from, double extra_s, double most_s)
{
    for (lesson *l = f->known[stage * (f->e->n + 1) + from]; l != NULL; l = l->next) {
        int ends = extra_s >= l->extra_s && most_s >= l->most_s;
        for (int i = 0; i < l->needs && ends; i++)
            ends = f->rows[l->of[i].row].before[stage] >= l->of[i].least;
        if (ends)
            return l;
    }
    return NULL;
}

static tp_status
learn(proof *f, int stage, int from, lesson **out)
{
    const reason *why = &f->why[stage];
    void *memory = NULL;
    int needs = 0;
    for (int k = 0; k < f->row_count; k++)
        needs += why->row[k] > -INFINITY;
    TP_TRY(tp_bmpipe_take(f->e->p, 1, sizeof(lesson) + (size_t)needs * sizeof(need), &memory));
    lesson *l = memory, **place = &f->known[stage * (f->e->n + 1) + from];
    *l = (lesson){*place, why->extra_s, why->most_s, 0, (need *)(l + 1)};
    for (int k = 0; k < f->row_count; k++)
        if (why->row[k] > -INFINITY)
            l->of[l->needs++] = (need){k, why->row[k]};
    *place = l;
    f->lessons++;
    *out = l;
    return TP_OK;
}

/* Simulate a plan that no bound has ended: its own critical path ends it, or it is better and there is no proof. */
static tp_status
look_at_leaf(proof *f, lesson **out)
{
    tp_exact *e = f->e;
    double makespan = 0.0;
    TP_TRY(tp_exact_simulate(e, &makespan));
    if (makespan < f->goal_s || !(makespan < INFINITY) || f->row_count == ROWS)
        return TP_OK;
    tp_exact_row *q = &f->rows[f->row_count];
    TP_TRY(tp_exact_row_open(e, q));
    TP_TRY(tp_exact_row_fill(e, q));
    tp_exact_row_before(e, q, e->stages);
    if (q->before[e->stages] < f->goal_s) /* it takes longer than its bounds know of */
        return TP_OK;
    f->why[e->stages].row[f->row_count++] = f->goal_s;
    return learn(f, e->stages, e->n, out);
}

/* *out: why no way to go on from here is better; NULL: one is, or the proof takes too long. */
static tp_status
prove(proof *f, int stage, double extra_s, double most_s, lesson **out)
{
    tp_exact *e = f->e;
    reason *why = &f->why[stage];
    int from = e->cut[stage], count = 0;
    tp_exact_child *children = f->children + (size_t)stage * (size_t)e->n;
    *out = NULL;
    why->extra_s = why->most_s = -INFINITY;
    for (int k = 0; k < ROWS; k++)
        why->row[k] = -INFINITY;
    if (stage == e->stages)
        return look_at_leaf(f, out);
    for (int to = tp_exact_first_end(e, stage, from); to <= e->reach[tp_exact_cell(e, stage, from)]; to++) {
        double extra = tp_exact_extra(e, stage, from, to), own = tp_exact_weight(e, stage, from, to, extra);
        double bound = tp_exact_bound(e, stage + 1, to, extra_s + extra, own > most_s ? own : most_s);
        if (bound < f->goal_s)
            children[count++] = (tp_exact_child){bound, to};
        else
            blame_labels(f, stage, to, extra_s, own, most_s, bound, why);
    }
    qsort(children, (size_t)count, sizeof *children, tp_exact_by_bound);
    for (int c = 0; c < count; c++) {
        int to = children[c].to;
        double extra = tp_exact_extra(e, stage, from, to), own = tp_exact_weight(e, stage, from, to, extra);
        double most = own > most_s ? own : most_s;
        if (++f->nodes > NODES || f->lessons > LESSONS || ((f->nodes & 255) == 0 && tp_bmpipe_is_late(e->p)))
            return TP_OK;
        e->cut[stage + 1] = to;
        for (int k = 0; k < f->row_count; k++)
            f->rows[k].before[stage + 1] = f->rows[k].before[stage] + tp_exact_cost(e, &f->rows[k], stage, from, to);
        if (is_ended_by_row(f, stage, to, why))
            continue;
        lesson *l = find_lesson(f, stage + 1, to, extra_s + extra, most);
        if (l == NULL)
            TP_TRY(prove(f, stage + 1, extra_s + extra, most, &l));
        if (l == NULL)
            return TP_OK;
        e->cut[stage + 1] = to;
        for (int k = 0; k < f->row_count; k++)
            f->rows[k].before[stage + 1] = f->rows[k].before[stage] + tp_exact_cost(e, &f->rows[k], stage, from, to);
        blame(f, stage, extra, own, l, why);
    }
    return learn(f, stage, from, out);
}

static tp_status
proof_open(proof *f, tp_exact *e)
{
    size_t stages = (size_t)e->stages, n = (size_t)e->n;
    struct {
        void **to;
        size_t count, size;
    } wanted[] = {
        {(void **)&f->rows, ROWS, sizeof *f->rows},
        {(void **)&f->known, (stages + 1) * (n + 1), sizeof *f->known},
        {(void **)&f->why, stages + 1, sizeof *f->why},
        {(void **)&f->children, stages * n, sizeof *f->children},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        TP_TRY(tp_bmpipe_take(e->p, wanted[i].count, wanted[i].size, wanted[i].to));
    for (int k = 0; k < e->row_count; k++) {
        void *memory = NULL;
        TP_TRY(tp_bmpipe_take(e->p, stages + 1, sizeof(double), &memory));
        f->rows[k] = e->rows[k];
        f->rows[k].before = memory;
        f->rows[k].before[0] = e->rows[k].row.lag_s;
    }
    f->row_count = e->row_count;
    return TP_OK;
}

tp_status
tp_exact_prove(tp_exact *e, int *proven)
{
    proof f = {.e = e, .goal_s = fmax(tp_exact_goal(e), e->best_s - 0.5)};
    size_t bytes = (size_t)(e->stages + 1) * sizeof *e->cut;
    lesson *l = NULL;
    void *memory = NULL;
    TP_TRY(proof_open(&f, e));
    TP_TRY(tp_bmpipe_take(e->p, bytes, 1, &memory));
    memcpy(memory, e->cut, bytes);
    TP_TRY(prove(&f, 0, 0.0, 0.0, &l));
    memcpy(e->cut, memory, bytes);
    *proven = l != NULL;
    return TP_OK;
}
