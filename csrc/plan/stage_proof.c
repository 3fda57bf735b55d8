/* The best plan by elimination. A plan is a path from block 0 to the last one, whose arcs are stages; plans that take longer than a
 * limit do not count. An arc is removed if even the least that any stages before it and any stages after it contribute to 1F1B
 * (each number by itself) take longer together with it: that is a lower bound for every plan through the arc
 * (csrc/plan/stage_response.h). With fewer arcs these leasts grow, so more arcs go; mostly none is left. Otherwise paths are
 * followed depth first, with the exact head of the stages so far and the leasts of those to come. Where that takes long the paths
 * are divided, into those through the first and those through the second half of a stage's places, each by elimination again.
 *
 * Why not by bounds of single critical paths: with few micro-batches the forwards wait for one stage and the backwards for another,
 * and the bounds of tp_stages_narrow know one stage at a time. Heads and tails have every path through any number of stages. */
#include "csrc/plan/stage_search.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"
#include "csrc/plan/stage_response.h"

enum { SUM = 512 };                       /* most stages and micro-batches: sums along paths of 2 SUM are right within SLACK */
enum { DIVES = 3, DIVE_SIMULATIONS = 60 }; /* a better plan is looked for before the first divisions */
static const double DIVE = 1.0 / 16.0; /* its share (tp_stage_improve) */
enum { DEPTH = 64 };                      /* of divisions: beyond it ways are followed to their end */
static const double SLACK = 5e-13;        /* half of what is a tie (tp_stage_goal) */
static const size_t ROOM = (size_t)1 << 23; /* doubles of tails */
static const int64_t ARCS = (int64_t)1 << 22; /* most of them: 40 bytes each */

typedef struct {
    int from, to; /* nodes */
    int end;      /* block */
    int live;     /* 0: no plan within the limit */
} arc;

/* Ways: nodes and arcs by stage. */
typedef struct {
    int *node;  /* [stages + 2] the first node of each place */
    int *block; /* [nodes] */
    int *slot;  /* [nodes] where the tail is */
    int *arcs;  /* [stages + 1] the first arc of each stage */
    arc *arc;
} ways;

typedef struct {
    double bound_s;
    int arc;
} child;

typedef struct {
    int found, ended, large; /* a better plan; there are no more; the tails take too much memory */
} outcome;

typedef struct {
    tp_stage_search *q;
    int stages, micros, most; /* most: nodes of one stage */
    ways all, now;            /* within the windows of the goal; what is left */
    double *bound_s;          /* of the arcs of `all`: tp_stage_bound */
    int *place, *reached;     /* [nodes] scratch: what a node becomes, 1 more; whether a way from the front reaches it */
    double *head, *scratch;   /* heads by node */
    int *set;                 /* [nodes] the head, or the tail, is there */
    double *tail[2], *kept;   /* tails of even and odd places, which take turns; or of all, by slot, if `keep` */
    int keep;
    size_t room;              /* of kept */
    int made, known;          /* times that tails were kept; arcs left then, of these ways or of more; 0: none are known */
    double limit_s;
    int brief;                /* a look at all arcs is little of what may be done */
    int64_t until;            /* nodes */
    int *boundary, *spare;    /* [stages + 1] */
    double *way;              /* [stages + 1] heads of the way followed */
    child *children;          /* [stages][most] */
    ways *apart;              /* [DEPTH] before they were divided; NULL arcs: no room was taken yet */
} proof;

static tp_response_stage
stage_of(const proof *f, int k, int from, int to)
{
    const tp_stages *s = f->q->stages;
    int p = f->stages, m = f->micros;
    tp_stage_times times = tp_stage_times_of(s, k, from, to);
    return (tp_response_stage){.micros = m,
                               .lead = tp_response_lead(p, m, k),
                               .lead_before = tp_response_lead(p, m, k - 1),
                               .lead_behind = tp_response_lead(p, m, k + 1),
                               .forward_s = times.forward_s,
                               .backward_s = times.backward_s,
                               .lag_s = s->lag_s};
}

static inline size_t
table(const proof *f)
{
    return (size_t)f->micros * (size_t)f->micros;
}

static inline double *
head_of(const proof *f, int node)
{
    return f->head + (size_t)node * tp_response_head_size(f->micros);
}

static inline double *
tail_of(const proof *f, int k, int node)
{
    if (f->keep)
        return f->kept + (size_t)f->now.slot[node] * table(f);
    return f->tail[k & 1] + (size_t)(node - f->now.node[k]) * table(f);
}

/* Steps, of some nanoseconds each (tp_autopipe_limits). */
static int64_t
tail_steps(const proof *f, int k)
{
    int64_t m = f->micros, lead = tp_response_lead(f->stages, f->micros, k), behind = m - 1 - lead;
    return (m * m + ((lead + 1) * behind * (m + lead) + behind * behind * m / 3) / 2) / 16;
}

static int64_t
path_steps(const proof *f)
{
    return (int64_t)f->micros * f->micros / 16 + f->micros;
}

/* ---- the arcs ------------------------------------------------------------------------------------------------------------ */

/* The first place of boundary k from `block` on from which the rest is within the goal; past every end if there is none. */
static inline int
next_node(const tp_stages *s, int k, int block)
{
    block = block < s->first[k] ? s->first[k] : block;
    return block > s->behind[k] ? s->blocks + 1 : s->alive[(size_t)k * (size_t)(s->blocks + 2) + (size_t)block];
}

static int
last_end(const tp_stages *s, int k, int from)
{
    int to = tp_stage_longest(s, k, from, s->goal_s);
    return to < s->behind[k + 1] ? to : s->behind[k + 1];
}

static tp_status
take_ways(tp_arena *arena, int p, int nodes, int arcs, ways *out)
{
    TP_ARENA_TAKE(arena, p + 2, out->node);
    TP_ARENA_TAKE(arena, nodes, out->block);
    TP_ARENA_TAKE(arena, nodes, out->slot);
    TP_ARENA_TAKE(arena, p + 1, out->arcs);
    TP_ARENA_TAKE(arena, arcs, out->arc);
    return TP_OK;
}

/* Would they, or one look at all of them, take too much memory, or much of the effort? Counted before there is room for them, for
 * their number is that of blocks squared. f->most, f->brief, the rooms of nodes and of arcs. */
static int
is_large(proof *f, int *nodes, int *arcs)
{
    const tp_stages *s = f->q->stages;
    int64_t steps = 0, limit = f->q->limits.effort > 0 ? f->q->limits.effort : INT64_MAX, count = 0, room = 0;
    for (int k = 0; k <= f->stages; k++) {
        int places = s->behind[k] - s->first[k] + 1;
        room += places;
        f->most = places > f->most ? places : f->most;
    }
    if ((size_t)room * tp_response_head_size(f->micros) + 2 * (size_t)f->most * table(f) > ROOM)
        return 1;
    for (int k = 0; k < f->stages; k++) {
        int64_t before = count;
        for (int i = next_node(s, k, 0); i <= s->behind[k] && count <= ARCS; i = next_node(s, k, i + 1))
            for (int to = next_node(s, k + 1, i + 1), last = last_end(s, k, i); to <= last; to = next_node(s, k + 1, to + 1))
                count++;
        steps += (count - before) * (tail_steps(f, k) + 2 * path_steps(f));
    }
    f->brief = (size_t)room * table(f) <= ROOM && steps <= limit / 32;
    *nodes = (int)room;
    *arcs = (int)count;
    return count > ARCS || steps > limit / 4;
}

static tp_status
open_ways(tp_arena *arena, proof *f, int nodes, int arcs)
{
    TP_TRY(take_ways(arena, f->stages, nodes, arcs, &f->all));
    TP_TRY(take_ways(arena, f->stages, nodes, arcs, &f->now));
    TP_ARENA_TAKE(arena, arcs, f->bound_s);
    TP_ARENA_TAKE(arena, nodes, f->place);
    TP_ARENA_TAKE(arena, nodes, f->reached);
    TP_ARENA_TAKE(arena, nodes, f->set);
    return TP_OK;
}

/* Everything within the windows of the goal. */
static void
find_arcs(proof *f)
{
    const tp_stages *s = f->q->stages;
    ways *w = &f->all;
    int p = f->stages, count = 0;
    for (int k = 0; k <= p; k++)
        w->node[k + 1] = w->node[k] + s->behind[k] - s->first[k] + 1;
    for (int k = 0; k <= p; k++) {
        w->arcs[k] = count;
        for (int i = s->first[k]; i <= s->behind[k]; i++) {
            int from = w->node[k] + i - s->first[k], last = k < p && next_node(s, k, i) == i ? last_end(s, k, i) : i;
            w->block[from] = i;
            for (int to = k < p ? next_node(s, k + 1, i + 1) : i + 1; to <= last; to = next_node(s, k + 1, to + 1)) {
                f->bound_s[count] = tp_stage_bound(s, k, i, to);
                w->arc[count++] = (arc){from, w->node[k + 1] + to - s->first[k + 1], to, 1};
            }
        }
    }
}

/* Only arcs on a way from the first block to the last stay, and their nodes. */
static void
compact(proof *f)
{
    int p = f->stages, nodes = 0, arcs = 0, old = f->now.node[p + 1];
    memset(f->reached, 0, (size_t)old * sizeof *f->reached);
    memset(f->place, 0, (size_t)old * sizeof *f->place);
    f->reached[f->now.node[0]] = 1;
    for (int a = 0; a < f->now.arcs[p]; a++)
        f->reached[f->now.arc[a].to] |= f->now.arc[a].live && f->reached[f->now.arc[a].from];
    f->place[f->now.node[p]] = f->reached[f->now.node[p]];
    for (int a = f->now.arcs[p] - 1; a >= 0; a--)
        f->place[f->now.arc[a].from] |= f->now.arc[a].live && f->reached[f->now.arc[a].from] && f->place[f->now.arc[a].to];
    for (int k = 0, at = 0; k <= p; k++) {
        int end = f->now.node[k + 1];
        for (f->now.node[k] = nodes; at < end; at++)
            if (f->place[at]) {
                f->now.block[nodes] = f->now.block[at];
                f->now.slot[nodes] = f->now.slot[at];
                f->place[at] = ++nodes;
            }
    }
    f->now.node[p + 1] = nodes;
    for (int k = 0, a = 0; k < p; k++) {
        int end = f->now.arcs[k + 1];
        for (f->now.arcs[k] = arcs; a < end; a++) {
            arc old_arc = f->now.arc[a];
            if (old_arc.live && f->place[old_arc.from] && f->place[old_arc.to])
                f->now.arc[arcs++] = (arc){f->place[old_arc.from] - 1, f->place[old_arc.to] - 1, old_arc.end, 1};
        }
    }
    f->now.arcs[p] = arcs;
}

static void
copy_ways(int p, const ways *from, ways *to)
{
    memcpy(to->node, from->node, ((size_t)p + 2) * sizeof *to->node);
    memcpy(to->arcs, from->arcs, ((size_t)p + 1) * sizeof *to->arcs);
    memcpy(to->block, from->block, (size_t)from->node[p + 1] * sizeof *to->block);
    memcpy(to->slot, from->slot, (size_t)from->node[p + 1] * sizeof *to->slot);
    memcpy(to->arc, from->arc, (size_t)from->arcs[p] * sizeof *to->arc);
}

/* All that stay within the limit by themselves. */
static void
begin(proof *f)
{
    copy_ways(f->stages, &f->all, &f->now);
    for (int a = 0; a < f->now.arcs[f->stages]; a++)
        f->now.arc[a].live = f->bound_s[a] <= f->limit_s;
    compact(f);
    f->known = 0;
}

/* ---- leasts -------------------------------------------------------------------------------------------------------------- */

/* May a plan through the arc be within the limit? By the tails known, else with a mere delay behind it. */
static int
stays(const proof *f, int k, const arc *w, const tp_response_stage *s)
{
    const double *head = head_of(f, w->from);
    if (f->known > 0)
        return tp_response_makespan(s, head, tail_of(f, k + 1, w->to), f->limit_s, f->scratch) <= f->limit_s;
    double rest = tp_stage_times_of(f->q->stages, k, f->now.block[w->from], w->end).rest_s;
    return k == f->stages - 1 || tp_response_delay(s, head, rest, f->limit_s, f->scratch) <= f->limit_s;
}

/* From the first stage on: the arcs that end here, and the heads of the rest. */
static void
find_heads(proof *f)
{
    size_t size = tp_response_head_size(f->micros);
    double *new = f->way;
    memset(f->set, 0, (size_t)f->now.node[f->stages + 1] * sizeof *f->set);
    tp_response_head_empty(f->micros, head_of(f, f->now.node[0]));
    f->set[f->now.node[0]] = 1;
    for (int k = 0; k < f->stages; k++)
        for (int a = f->now.arcs[k]; a < f->now.arcs[k + 1] && !tp_stage_stop(f->q); a++) {
            arc *w = &f->now.arc[a];
            if (!(w->live = f->set[w->from]))
                continue;
            tp_response_stage s = stage_of(f, k, f->now.block[w->from], w->end);
            double *to = head_of(f, w->to);
            f->q->effort += path_steps(f);
            if (!(w->live = stays(f, k, w, &s)) || k == f->stages - 1)
                continue;
            tp_response_head(&s, head_of(f, w->from), new, f->scratch);
            for (size_t i = 0; i < size; i++)
                to[i] = f->set[w->to] && to[i] < new[i] ? to[i] : new[i];
            f->set[w->to] = 1;
        }
}

/* From the last stage back: the arcs that end here, and the tails of the rest. */
static void
find_tails(proof *f)
{
    int p = f->stages;
    memset(f->set, 0, (size_t)f->now.node[p + 1] * sizeof *f->set);
    double *none = tail_of(f, p, f->now.node[p]);
    for (size_t i = 0; i < table(f); i++)
        none[i] = -INFINITY;
    f->set[f->now.node[p]] = 1;
    for (int k = p - 1; k >= 0; k--)
        for (int a = f->now.arcs[k]; a < f->now.arcs[k + 1] && !tp_stage_stop(f->q); a++) {
            arc *w = &f->now.arc[a];
            if (!w->live || !(w->live = f->set[w->to]))
                continue;
            tp_response_stage s = stage_of(f, k, f->now.block[w->from], w->end);
            const double *tail = tail_of(f, k + 1, w->to);
            f->q->effort += path_steps(f);
            w->live = tp_response_makespan(&s, head_of(f, w->from), tail, f->limit_s, f->scratch) <= f->limit_s;
            if (!w->live || k == 0)
                continue;
            f->q->effort += tail_steps(f, k);
            tp_response_tail(&s, tail, f->set[w->from], tail_of(f, k, w->from), f->scratch);
            f->set[w->from] = 1;
        }
}

static int
count_live(const proof *f)
{
    int count = 0;
    for (int a = 0; a < f->now.arcs[f->stages]; a++)
        count += f->now.arc[a].live;
    return count;
}

/* Heads and tails in turns. Tails take ten times as long as heads: those known serve until more than half of their arcs are
 * gone. They are kept if there is room. */
static tp_status
filter(tp_arena *arena, proof *f)
{
    int before, p = f->stages;
    do {
        size_t room = (size_t)f->now.node[p + 1] * table(f);
        before = f->now.arcs[p];
        find_heads(f);
        if (f->q->stopped)
            return TP_OK;
        if (f->known > 0 && 2 * count_live(f) > f->known) {
            compact(f);
            return TP_OK;
        }
        f->keep = room <= ROOM;
        if (f->keep && room > f->room) {
            TP_ARENA_TAKE(arena, room, f->kept);
            f->room = room;
        }
        for (int i = 0; i < f->now.node[p + 1]; i++)
            f->now.slot[i] = i;
        find_tails(f);
        if (f->q->stopped)
            return TP_OK;
        compact(f);
        f->made++;
        f->known = f->keep ? f->now.arcs[p] : 0;
    } while (f->now.arcs[p] > 0 && (f->keep || f->now.arcs[p] < before));
    return TP_OK;
}

/* ---- ways ---------------------------------------------------------------------------------------------------------------- */

static int
by_bound(const void *a, const void *b)
{
    const child *x = a, *y = b;
    if (x->bound_s != y->bound_s)
        return x->bound_s < y->bound_s ? -1 : 1;
    return y->arc - x->arc;
}

/* Stages 0 .. k - 1 end at the node. 1: a better plan was found. */
static int
follow(proof *f, int k, int node)
{
    tp_stage_search *q = f->q;
    size_t size = tp_response_head_size(f->micros);
    double *head = f->way + (size_t)k * size;
    child *children = f->children + (size_t)k * (size_t)f->most;
    int count = 0;
    if (k == f->stages) {
        double goal = tp_stage_goal(q);
        return tp_stage_try(q, f->boundary, goal) <= goal;
    }
    for (int a = f->now.arcs[k]; a < f->now.arcs[k + 1]; a++) {
        const arc *w = &f->now.arc[a];
        if (w->from != node || !w->live)
            continue;
        tp_response_stage s = stage_of(f, k, f->boundary[k], w->end);
        double bound = tp_response_makespan(&s, head, tail_of(f, k + 1, w->to), f->limit_s, f->scratch);
        q->effort += path_steps(f);
        q->nodes++;
        if (bound <= f->limit_s)
            children[count++] = (child){bound, a};
    }
    qsort(children, (size_t)count, sizeof *children, by_bound);
    for (int c = 0; c < count && q->nodes < f->until && !tp_stage_stop(q); c++) {
        const arc *w = &f->now.arc[children[c].arc];
        tp_response_stage s = stage_of(f, k, f->boundary[k], w->end);
        f->boundary[k + 1] = w->end;
        q->effort += path_steps(f);
        tp_response_head(&s, head, head + size, f->scratch);
        if (follow(f, k + 1, w->to))
            return 1;
    }
    return 0;
}

/* Into spare: from the first stage on, the arc that is best with what is behind it at the least. */
static void
dive(proof *f)
{
    size_t size = tp_response_head_size(f->micros);
    int node = f->now.node[0];
    tp_response_head_empty(f->micros, f->way);
    for (int k = 0; k < f->stages; k++) {
        double *head = f->way + (size_t)k * size, least = INFINITY;
        const arc *best = NULL;
        for (int a = f->now.arcs[k]; a < f->now.arcs[k + 1]; a++) {
            const arc *w = &f->now.arc[a];
            if (w->from != node)
                continue;
            tp_response_stage s = stage_of(f, k, f->now.block[node], w->end);
            double bound = tp_response_makespan(&s, head, tail_of(f, k + 1, w->to), INFINITY, f->scratch);
            f->q->effort += path_steps(f);
            if (best == NULL || bound < least) {
                least = bound;
                best = w;
            }
        }
        tp_response_stage s = stage_of(f, k, f->now.block[node], best->end);
        tp_response_head(&s, head, head + size, f->scratch);
        f->spare[k + 1] = best->end;
        node = best->to;
    }
}

static tp_status
open_tables(tp_arena *arena, proof *f)
{
    size_t size = tp_response_head_size(f->micros), nodes = (size_t)f->all.node[f->stages + 1];
    TP_ARENA_TAKE(arena, nodes * size, f->head);
    TP_ARENA_TAKE(arena, (size_t)f->most * table(f), f->tail[0]);
    TP_ARENA_TAKE(arena, (size_t)f->most * table(f), f->tail[1]);
    TP_ARENA_TAKE(arena, 2 * f->micros, f->scratch);
    TP_ARENA_TAKE(arena, ((size_t)f->stages + 1) * size, f->way);
    TP_ARENA_TAKE(arena, f->stages + 1, f->boundary);
    TP_ARENA_TAKE(arena, f->stages + 1, f->spare);
    TP_ARENA_TAKE(arena, (size_t)f->stages * (size_t)f->most, f->children);
    return TP_OK;
}

static tp_status
look(tp_arena *arena, proof *f, int depth, outcome *out);

/* The ways that are left, in two parts. */
static tp_status
divide(tp_arena *arena, proof *f, int depth, outcome *out)
{
    int p = f->stages, place = 0, made = f->made, known = f->known;
    ways *all = &f->apart[depth];
    if (all->arc == NULL)
        TP_TRY(take_ways(arena, p, f->all.node[p + 1], f->all.arcs[p], all));
    copy_ways(p, &f->now, all);
    for (int k = 1; k < p; k++)
        if (all->node[k + 1] - all->node[k] > all->node[place + 1] - all->node[place])
            place = k;
    int middle = all->node[place] + (all->node[place + 1] - all->node[place]) / 2;
    for (int part = 0; part < 2 && !f->q->stopped; part++) {
        copy_ways(p, all, &f->now);
        f->known = f->made == made ? known : 0; /* else the first part's are in their place */
        for (int a = f->now.arcs[place]; a < f->now.arcs[place + 1]; a++)
            f->now.arc[a].live = (f->now.arc[a].from < middle) == (part == 0);
        compact(f);
        TP_TRY(look(arena, f, depth + 1, out));
    }
    return TP_OK;
}

/* Ways within the limit, and then within what is better than the best plan found. depth < 0: only as long as none takes
 * many nodes. */
static tp_status
look(tp_arena *arena, proof *f, int depth, outcome *out)
{
    tp_stage_search *q = f->q;
    for (;;) {
        TP_TRY(filter(arena, f));
        out->ended = f->now.arcs[f->stages] == 0;
        out->large = !out->ended && !f->keep;
        if (out->ended || out->large || q->stopped)
            return TP_OK;
        if (depth >= 0 && depth < DIVES) {
            double before = q->best_s;
            dive(f);
            TP_TRY(tp_stage_improve(arena, q, f->spare, DIVE, DIVE_SIMULATIONS));
            f->limit_s = q->best_s - SLACK * q->best_s;
            out->found |= q->best_s < before;
            if (q->best_s < before)
                continue;
        }
        tp_response_head_empty(f->micros, f->way);
        f->boundary[0] = 0;
        f->until = depth < DEPTH ? q->nodes + 8 * f->stages : INT64_MAX;
        if (!follow(f, 0, f->now.node[0])) {
            out->ended = q->nodes < f->until && !q->stopped;
            return out->ended || q->stopped || depth < 0 ? TP_OK : divide(arena, f, depth, out);
        }
        out->found = 1;
        tp_stage_descend(q, f->spare, TP_STAGE_DESCENT);
        f->limit_s = q->best_s - SLACK * q->best_s;
    }
}

/* The best plan is mostly as good as any (tp_stage_improve): its own limit, kept by few, ends it at once. But where that may
 * take long, what is known by then counts: a limit that no plan keeps costs little, one that many keep much. So limits halve
 * what is between the bound and the best plan until that is little, and the best plan's own comes last. */
static tp_status
search(tp_arena *arena, proof *f, outcome *out)
{
    tp_stage_search *q = f->q;
    double low = q->bound_s, high = q->best_s, gap = high - low;
    for (int done = 0; !done && !q->stopped;) {
        int last = high - low <= 0.3 * gap || f->brief;
        double limit = last ? q->best_s - SLACK * q->best_s : low + 0.5 * (high - low);
        f->limit_s = limit;
        *out = (outcome){0};
        begin(f);
        TP_TRY(look(arena, f, last ? 0 : -1, out));
        if (out->large)
            return TP_OK;
        done = last || (out->ended && out->found);
        if (out->ended && !out->found)
            q->bound_s = fmax(q->bound_s, limit - SLACK * limit);
        if (out->found) {
            high = q->best_s;
            gap = high - low;
        } else if (out->ended) {
            low = limit;
        } else {
            high = limit;
        }
    }
    return TP_OK;
}

tp_status
tp_stage_prove(tp_arena *arena, tp_stage_search *q, int *done)
{
    proof f = {.q = q, .stages = q->stages->stages, .micros = q->stages->micros};
    outcome out = {0};
    int nodes, arcs;
    *done = 0;
    if (f.stages + f.micros > SUM)
        return TP_OK;
    if (is_large(&f, &nodes, &arcs))
        return TP_OK;
    TP_TRY(open_ways(arena, &f, nodes, arcs));
    find_arcs(&f);
    TP_TRY(open_tables(arena, &f));
    TP_ARENA_TAKE(arena, DEPTH, f.apart);
    TP_TRY(search(arena, &f, &out));
    *done = !out.large;
    return TP_OK;
}
