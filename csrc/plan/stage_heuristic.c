/* AutoPipe's search (Liu et al., CLUSTER 2022, section III-B) as PLANNERS.md 2.4 resolves it: from Algorithm 1's plan, take
 * blocks off the master stage (the stage with most time on the critical path) and move them towards either end. */
#include "csrc/plan/stage_search.h"

#include <string.h>

enum { PLANS = 4096 }; /* most plans followed: the paper gives no limit, and its search need not end early */

typedef struct {
    tp_stage_search *q;
    const int *parent; /* Algorithm 1, of all prefixes */
    tp_f1b_op *path;
    int *plans;        /* [PLANS][stages + 1]: the plans seen; those from `done` on wait */
    int *table;        /* [2 * PLANS] index into plans + 1, by hash */
    int count, done;
} paper;

/* Its master stage; its makespan is tried. */
static int
master_of(paper *h, const int *boundary)
{
    int master = 0;
    tp_stage_try(h->q, boundary, 1.0 / 0.0);
    tp_f1b_path(&h->q->f1b, h->path, &master);
    h->q->effort += 2 * tp_stage_effort(h->q->stages, h->q->stages->stages);
    return master;
}

/* Remember a plan; 0 if it was there, or there is no room. */
static int
remember(paper *h, const int *boundary)
{
    size_t places = (size_t)h->q->stages->stages + 1;
    uint64_t hash = 1469598103934665603u; /* FNV-1a */
    for (size_t k = 0; k < places; k++)
        hash = (hash ^ (uint64_t)boundary[k]) * 1099511628211u;
    int at = (int)(hash % (2 * PLANS));
    for (; h->table[at] != 0; at = (at + 1) % (2 * PLANS))
        if (memcmp(h->plans + (size_t)(h->table[at] - 1) * places, boundary, places * sizeof *boundary) == 0)
            return 0;
    if (h->count == PLANS)
        return 0;
    memcpy(h->plans + (size_t)h->count * places, boundary, places * sizeof *boundary);
    h->table[at] = ++h->count;
    return 1;
}

/* Algorithm 1 on the first `stages` stages, which hold the blocks up to boundary[stages]. 0: nothing fits. */
static int
rebalance(const paper *h, int stages, int *boundary)
{
    size_t width = (size_t)h->q->stages->blocks + 1;
    for (int k = stages; k > 0; k--) {
        int from = h->parent[(size_t)k * width + (size_t)boundary[k]];
        if (from < 0)
            return 0;
        boundary[k - 1] = from;
    }
    return 1;
}

/* Take blocks off the stages behind the master while stage s is in the way of its cooldown (eq. 1: it is not if
 * sum_{i+1..s} (f + b) + 2 c (s - i) <= (s - i) b_i) and the master stays. Returns the master. */
static int
relieve_cooldown(paper *h, int *boundary, int master)
{
    const tp_stages *s = h->q->stages;
    int at = master;
    double own = tp_stage_times_of(s, at, boundary[at], boundary[at + 1]).backward_s;
    for (int k = at + 1; k < s->stages - 1; k++)
        for (;;) {
            double rest = tp_stage_times_of(s, at, boundary[at], boundary[at + 1]).rest_s;
            double beyond = tp_stage_times_of(s, k, boundary[k], boundary[k + 1]).rest_s;
            if (tp_stage_stop(h->q) || rest - beyond <= (k - at) * own || boundary[k + 1] - boundary[k] < 2 ||
                !tp_stage_fits(s, k + 1, boundary[k + 1] - 1, boundary[k + 2]))
                break;
            boundary[k + 1]--;
            master = master_of(h, boundary);
            if (master != at)
                return master;
        }
    return master;
}

/* One block of the master to the stage before it (by < 0) or behind it, the stages up to there balanced anew or not. A plan
 * whose master is not further back is followed. */
static void
move_block(paper *h, const int *from, int master, int by, int again, int *boundary)
{
    const tp_stages *s = h->q->stages;
    int p = s->stages, k = by < 0 ? master : master + 1; /* the boundary that moves */
    if (k < 1 || k >= p || from[master + 1] - from[master] < 2)
        return;
    memcpy(boundary, from, ((size_t)p + 1) * sizeof *boundary);
    boundary[k] += by < 0 ? 1 : -1;
    if (again && !rebalance(h, k, boundary))
        return;
    for (int x = 0; x < p; x++)
        if (!tp_stage_fits(s, x, boundary[x], boundary[x + 1]))
            return;
    if (master_of(h, boundary) <= master)
        remember(h, boundary);
}

static void
follow(paper *h, int *now, int *scratch)
{
    size_t places = (size_t)h->q->stages->stages + 1;
    while (h->done < h->count && !tp_stage_stop(h->q)) {
        memcpy(now, h->plans + (size_t)h->done++ * places, places * sizeof *now);
        int master = relieve_cooldown(h, now, master_of(h, now));
        for (int kind = 0; kind < 4 && master > 0; kind++)
            move_block(h, now, master, kind < 2 ? -1 : 1, kind & 1, scratch);
    }
}

tp_status
tp_stage_heuristic(tp_arena *arena, tp_stage_search *q)
{
    const tp_stages *s = q->stages;
    size_t places = (size_t)s->stages + 1;
    int *parent;
    void *path = NULL, *plans = NULL, *table = NULL, *two = NULL;
    TP_TRY(tp_stages_balance(arena, s, &parent));
    TP_TRY(tp_arena_take(arena, (size_t)tp_f1b_longest_path(s->stages, s->micros), sizeof(tp_f1b_op), &path));
    TP_TRY(tp_arena_take(arena, PLANS * places, sizeof(int), &plans));
    TP_TRY(tp_arena_take(arena, 2 * PLANS, sizeof(int), &table));
    TP_TRY(tp_arena_take(arena, 2 * places, sizeof(int), &two));
    paper h = {.q = q, .parent = parent, .path = path, .plans = plans, .table = table};
    int *now = two;
    now[s->stages] = s->blocks;
    if (!rebalance(&h, s->stages, now))
        return tp_fail(TP_EINTERNAL, "Algorithm 1 found nothing that fits where something does");
    remember(&h, now);
    follow(&h, now, now + places);
    if (q->simulations == 0) /* stopped before the first */
        tp_stage_try(q, h.plans, 1.0 / 0.0);
    return TP_OK;
}
