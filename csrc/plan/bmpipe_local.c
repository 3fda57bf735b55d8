/* Descends from a first plan of one chunk, so that the exact search begins with a good one. A neighbour differs from the plan in a
 * few stages, and critical paths of earlier simulations rule out most neighbours for a fraction of a simulation's time. */
#include "csrc/plan/bmpipe_exact.h"

#include <string.h>

#include "csrc/base/deadline.h"

enum { LOCAL = 4096, PATHS = 48 };

typedef struct {
    tp_exact *e;
    double *load;        /* [2 * stages] of the best plan */
    int *changed;        /* [2 * stages] what differs in the neighbour, and by how much */
    double *by;
    int changes;
    tp_bmpipe_row path[PATHS];
    double of_best[PATHS]; /* what the path says of the best plan */
    int paths, next;
    double margin;       /* of sums, that rounding may take */
} local;

static double
sum_of(const local *l, const tp_bmpipe_row *row)
{
    double sum = row->lag_s;
    for (int i = 0; i < 2 * l->e->stages; i++)
        sum += row->run[i] * l->load[i];
    return sum;
}

/* The path of the last simulation, of a neighbour or of the best plan. */
static tp_status
keep_path(local *l)
{
    void *memory = NULL;
    if (l->paths == l->next) {
        TP_TRY(tp_bmpipe_take(l->e->p, 2 * (size_t)l->e->stages, sizeof(double), &memory));
        l->path[l->paths++].run = memory;
    }
    tp_bmpipe_last_path(l->e->p, &l->path[l->next]);
    l->of_best[l->next] = sum_of(l, &l->path[l->next]);
    l->next = (l->next + 1) % PATHS;
    return TP_OK;
}

/* e->cut is the best plan now, as simulated last. */
static tp_status
begin_there(local *l)
{
    memcpy(l->load, l->e->p->load, 2 * (size_t)l->e->stages * sizeof *l->load);
    for (int k = 0; k < l->paths; k++)
        l->of_best[k] = sum_of(l, &l->path[k]);
    return keep_path(l);
}

/* Where the stages first .. last of e->cut differ from the best plan's; *fits 0: one of them has no strategy that fits. */
static tp_status
find_changes(local *l, int first, int last, int *fits)
{
    tp_exact *e = l->e;
    l->changes = 0;
    *fits = 0;
    for (int x = first; x <= last; x++) {
        double load[2];
        TP_TRY(tp_exact_load(e, x, e->cut[x], e->cut[x + 1], &load[0], &load[1]));
        if (!(load[1] < INFINITY))
            return TP_OK;
        for (int side = 0; side < 2; side++) {
            int at = side * e->stages + x;
            l->changed[l->changes] = at;
            l->by[l->changes] = load[side] - l->load[at];
            l->changes += load[side] != l->load[at];
        }
    }
    *fits = 1;
    return tp_deadline_check_after(&e->p->asked, 8 * (int64_t)(last - first) + PATHS);
}

/* Does a known path rule the neighbour out? That path is tried earlier the next time. */
static int
is_no_better(local *l)
{
    double enough = l->e->best_s * (1.0 + l->margin);
    for (int k = 0; k < l->paths; k++) {
        double sum = l->of_best[k];
        for (int c = 0; c < l->changes; c++)
            sum += l->path[k].run[l->changed[c]] * l->by[c];
        if (sum < enough)
            continue;
        tp_bmpipe_row row = l->path[k];
        l->path[k] = l->path[k / 2];
        l->path[k / 2] = row;
        sum = l->of_best[k];
        l->of_best[k] = l->of_best[k / 2];
        l->of_best[k / 2] = sum;
        return 1;
    }
    return 0;
}

/* Boundaries a .. b by `step`. */
static tp_status
try_move(local *l, int a, int b, int step, int *found)
{
    tp_exact *e = l->e;
    double makespan = 0.0;
    int fits = 1;
    memcpy(e->cut, e->best_cut, (size_t)(e->stages + 1) * sizeof *e->cut);
    for (int k = a; k <= b; k++)
        e->cut[k] += step;
    if (e->cut[a] <= e->cut[a - 1] || e->cut[b] >= e->cut[b + 1])
        return TP_OK;
    e->p->evaluations++;
    TP_TRY(find_changes(l, a - 1, b, &fits));
    if (!fits || is_no_better(l))
        return TP_OK;
    TP_TRY(tp_exact_simulate(e, &makespan));
    *found |= makespan < tp_exact_goal(e);
    if (!(makespan < e->best_s))
        return keep_path(l);
    tp_exact_keep(e, makespan);
    return begin_there(l);
}

static tp_status
local_open(local *l)
{
    size_t loads = 2 * (size_t)l->e->stages;
    const tp_bmpipe *p = l->e->p;
    void *memory = NULL;
    TP_TRY(tp_bmpipe_take(l->e->p, 2 * loads, sizeof(double), &memory));
    l->load = memory;
    l->by = l->load + loads;
    TP_TRY(tp_bmpipe_take(l->e->p, loads, sizeof(int), &memory));
    l->changed = memory;
    l->margin = l->e->whole ? 0.0 : 1e-15 * (8.0 * (p->micros + 2.0 * p->stages) + 100.0);
    return TP_OK;
}

tp_status
tp_exact_improve(tp_exact *e)
{
    local l = {.e = e};
    double makespan = 0.0;
    int tries = 0, found = e->best_s < INFINITY;
    TP_TRY(local_open(&l));
    if (found) {
        memcpy(e->cut, e->best_cut, (size_t)(e->stages + 1) * sizeof *e->cut);
        TP_TRY(tp_exact_simulate(e, &makespan));
        TP_TRY(begin_there(&l));
    }
    while (found) {
        found = 0;
        for (int a = 1; a < e->stages; a++)
            for (int b = a; b < e->stages; b++)
                for (int step = -1; step <= 1; step += 2) {
                    if (++tries > LOCAL || ((tries & 15) == 0 && tp_bmpipe_is_late(e->p)))
                        return TP_OK;
                    TP_TRY(try_move(&l, a, b, step, &found));
                }
    }
    return TP_OK;
}
