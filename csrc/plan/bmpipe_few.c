/* Enumerates all partitions into virtual stages where there are few. A partition leaves each stage a list of undominated ways to
 * recompute (bmpipe_choices.c). A makespan never falls as loads grow: so with undecided stages at their least load by chunk it is
 * a bound, and branches that reach the best known plan's are left out. If no list was cut short the best plan is proven. */
#include "csrc/plan/bmpipe_chunks.h"

#include <math.h>
#include <string.h>

enum { PARTITIONS = 4000, GLANCES = 200000 };

typedef struct {
    tp_bmpipe_search_room *s;
    const tp_bmpipe_choice **choice; /* [stages] of this partition */
    double *least;                   /* [chunks] scratch */
    int64_t glances;                 /* left */
    int complete;
} few;

/* How many partitions there are, as far as it matters: C(n - 1, virtuals - 1). */
static double
partitions(int n, int virtuals)
{
    double ways = 1.0;
    for (int i = 1; i < virtuals && ways <= 1e15; i++)
        ways = ways * (n - virtuals + i) / i;
    return ways;
}

/* The next partition in lexical order; 0: that was the last. cut[0] and cut[virtuals] stay. */
static int
next_partition(int *cut, int virtuals)
{
    int at = virtuals - 1;
    while (at > 0 && cut[at] == cut[virtuals] - (virtuals - at))
        at--;
    if (at <= 0)
        return 0;
    cut[at]++;
    for (int v = at + 1; v < virtuals; v++)
        cut[v] = cut[v - 1] + 1;
    return 1;
}

/* Loads of the stage at the least of its choices, chunk by chunk. */
static void
load_least(few *f, int stage)
{
    const tp_bmpipe_choice *choice = f->choice[stage];
    int chunks = f->s->p->chunks;
    memcpy(f->least, choice->extra_s, (size_t)chunks * sizeof *f->least);
    for (int k = 1; k < choice->count; k++)
        for (int c = 0; c < chunks; c++)
            if (choice->extra_s[k * chunks + c] < f->least[c])
                f->least[c] = choice->extra_s[k * chunks + c];
    tp_bmpipe_load(f->s, f->s->now.cut, stage, f->least, f->s->now.load);
}

static double
glance(few *f)
{
    f->glances--;
    return tp_bmpipe_glance(f->s, f->s->now.load, f->s->best.makespan_s);
}

/* s->now is a whole plan that is better. */
static void
keep(few *f, double makespan_s)
{
    const tp_bmpipe *p = f->s->p;
    memcpy(f->s->best.cut, f->s->now.cut, ((size_t)p->virtuals + 1) * sizeof *f->s->best.cut);
    memcpy(f->s->best.pick, f->s->now.pick, (size_t)p->stages * sizeof *f->s->best.pick);
    memcpy(f->s->best.load, f->s->now.load, 2 * (size_t)p->virtuals * sizeof *f->s->best.load);
    f->s->best.makespan_s = makespan_s;
}

/* Try every combination of choices, depth first over the stages, with later stages at their least: pick[stage] counts up, -1: none
 * yet. */
static void
try_picks(few *f)
{
    tp_bmpipe_state *now = &f->s->now;
    int stage = 0, stages = f->s->p->stages, chunks = f->s->p->chunks;
    now->pick[0] = -1;
    while (stage >= 0 && f->glances > 0 && !f->s->p->late) { /* late: told to stop */
        if (++now->pick[stage] == f->choice[stage]->count) {
            load_least(f, stage--);
            continue;
        }
        tp_bmpipe_load(f->s, now->cut, stage, f->choice[stage]->extra_s + now->pick[stage] * chunks, now->load);
        double makespan_s = glance(f);
        if (makespan_s >= f->s->best.makespan_s)
            continue;
        if (stage + 1 < stages)
            now->pick[++stage] = -1;
        else
            keep(f, makespan_s);
    }
}

static tp_status
try_partition(few *f)
{
    for (int x = 0; x < f->s->p->stages; x++) {
        TP_TRY(tp_bmpipe_choices(f->s, f->s->now.cut, x, &f->choice[x]));
        f->complete &= f->choice[x]->exact;
        if (f->choice[x]->count == 0)
            return TP_OK;
        load_least(f, x);
    }
    if (glance(f) < f->s->best.makespan_s)
        try_picks(f);
    return TP_OK;
}

tp_status
tp_bmpipe_few(tp_bmpipe_search_room *s, int *proven)
{
    tp_bmpipe *p = s->p;
    few f = {.s = s, .glances = GLANCES, .complete = 1};
    void *memory = NULL;
    *proven = 0;
    if (partitions(p->n, p->virtuals) > fmin(PARTITIONS, (double)s->effort))
        return TP_OK;
    TP_TRY(tp_bmpipe_take(p, (size_t)p->stages, sizeof *f.choice, &memory));
    f.choice = memory;
    TP_TRY(tp_bmpipe_take(p, (size_t)p->chunks, sizeof *f.least, &memory));
    f.least = memory;
    int64_t effort = s->effort;
    for (int v = 0; v < p->virtuals; v++)
        s->now.cut[v] = v;
    s->now.cut[p->virtuals] = p->n;
    int more = 1;
    while (more && f.complete && f.glances > 0 && !tp_bmpipe_is_late(p)) {
        TP_TRY(try_partition(&f));
        more = next_partition(s->now.cut, p->virtuals);
    }
    s->effort = effort;
    *proven = !more && f.complete && f.glances > 0;
    return TP_OK;
}
