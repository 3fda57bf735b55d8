/* A proven lower bound for several chunks that is stronger than the linear relaxation, because layers are whole. For any u[x] of
 * sum N - 1, some stage x has at least u[x] + 1 of the N layers of a set: so the least over x of the bounds given "stage x has at
 * least u[x] + 1" holds for every plan; u is chosen greedily, growing where that bound is least. Taking the stages in turn, each
 * with "and none of the stages before it has", makes these cases the first branches of a tree. The case of least bound is divided
 * further, by the number of layers on a stage or a virtual stage, of all strategies or of one. A case's bound is Lagrangian
 * (bmpipe_dual.c), the tree's is the least of its open cases; rounded solutions of the relaxation are plans to descend from. */
#include "csrc/plan/bmpipe_dual.h"

#include <math.h>
#include <string.h>

#include "csrc/base/clock.h"

enum { ROUNDS = 400, PROBES = 8, PROBE_ROUNDS = 2, NODES = 4096, DESCENTS = 24, SHARES = 6, LEAST_WORK = 100000 };
static const double ROOM = 5e8;   /* bytes for all tableaus */
static const double WHOLE = 1e-5; /* layers: a number this close to a whole one is whole */

/* A case of the tree: its limits, and the solution and paths at which its bound was taken. */
typedef struct {
    const tp_bmpipe_limit *limits;
    double bound_s;
    int paths;
    int32_t *path; /* [paths] */
    double *x;     /* [columns] */
} node;

typedef struct {
    tp_bmpipe_dual *d;
    tp_bmpipe_relax base, now, child, probe;
    node *open;      /* [NODES] */
    int count;
    double closed_s; /* least bound of the cases that cannot be divided */
    int *cut;        /* [virtuals + 1] scratch */
    double *x;       /* [columns] scratch */
    int descents;
} tree;

/* The bound by work alone: the mean over stages, and the work of a stage with its share, rounded up, of a type's layers. */
static double
work_bound(const tp_bmpipe *p)
{
    const tp_bmpipe_layers *l = p->layers;
    double most = (p->forward_s[p->n] + p->backward_s[p->n]) / p->stages;
    for (int t = 0; t < l->types; t++)
        most = fmax(most, (l->count[t] + p->stages - 1) / p->stages * (l->forward_s[t] + l->backward_s[t]));
    return p->micros * most;
}

/* The Lagrangian bound of the mean of the paths known, without prices. */
static double
evaluate_mean(tp_bmpipe_dual *d)
{
    for (int q = 0; q < d->row_count; q++)
        d->lambda[q] = 1.0 / d->row_count;
    return fmin(tp_bmpipe_dual_value(d, 0.0), d->unit);
}

/* Allow what comes next 1 / parts of the work and of the time that are left. */
static void
allot(tp_bmpipe_dual *d, int parts)
{
    int64_t now_ns = tp_clock_ns(), work = d->work + d->reserve;
    d->work = work / parts;
    d->reserve = work - d->work;
    if (d->end_ns == 0)
        return;
    d->p->deadline_ns = now_ns + (d->end_ns > now_ns ? (d->end_ns - now_ns) / parts : 0);
    d->p->late = 0;
}

/* Begin with the critical paths of the best plan, as it is and with each stage slower in turn. */
static void
seed_paths(tp_bmpipe_dual *d)
{
    tp_bmpipe *p = d->p;
    for (int x = -1; x < p->stages && (x < 0 || !tp_bmpipe_is_late(p)); x++) {
        memcpy(p->load, d->s->best.load, 2 * (size_t)d->virtuals * sizeof *p->load);
        for (int v = x; v < d->virtuals && x >= 0; v += p->stages) {
            p->load[v] *= 2.0;
            p->load[d->virtuals + v] *= 2.0;
        }
        tp_bmpipe_simulate(p);
        tp_bmpipe_new_path(d);
    }
}

/* ---- plans from solutions ------------------------------------------------------------------------------------------------ */

/* Round the boundaries of the solution d->total to a plan and descend from it. */
static tp_status
descend_from(tree *t)
{
    const tp_bmpipe_dual *d = t->d;
    int virtuals = d->virtuals, n = d->p->n;
    double sum = 0.0;
    if (t->descents <= 0)
        return TP_OK;
    t->cut[0] = 0;
    for (int v = 1; v <= virtuals; v++) {
        sum += d->total[v - 1];
        int at = v == virtuals ? n : (int)lround(fmin(sum, n)), most = n - (virtuals - v);
        at = at > most ? most : at;
        t->cut[v] = at > t->cut[v - 1] ? at : t->cut[v - 1] + 1;
    }
    int tried = 0;
    TP_TRY(tp_bmpipe_polish(d->s, t->cut, d->extra, &tried));

    t->descents -= tried;
    return TP_OK;
}

/* ---- the tree ------------------------------------------------------------------------------------------------------------ */

static tp_status
make_limit(tree *t, const tp_bmpipe_limit *before, tp_bmpipe_where where, int of, int sign, int count,
           const tp_bmpipe_limit **out)
{
    void *memory = NULL;
    TP_TRY(tp_bmpipe_take(t->d->p, 1, sizeof(tp_bmpipe_limit), &memory));
    tp_bmpipe_limit *limit = memory;
    *limit = (tp_bmpipe_limit){before, where, of, sign, count};
    *out = limit;
    return TP_OK;
}

/* Add the case of relaxation `r`, with solution d->x, to the open ones, unless it can hold no better plan. */
static tp_status
keep(tree *t, const tp_bmpipe_relax *r, const tp_bmpipe_limit *limits, double bound_s)
{
    tp_bmpipe_dual *d = t->d;
    void *memory = NULL;
    int paths = 0;
    if (bound_s >= d->s->best.makespan_s)
        return TP_OK;
    if (t->count == NODES) {
        t->closed_s = fmin(t->closed_s, bound_s);
        return TP_OK;
    }
    TP_TRY(tp_bmpipe_take(d->p, (size_t)d->columns, sizeof(double) + sizeof(int32_t), &memory));
    node *made = &t->open[t->count++];
    *made = (node){.limits = limits, .bound_s = bound_s, .x = memory};
    made->path = (int32_t *)(made->x + d->columns);
    memcpy(made->x, d->x, (size_t)d->columns * sizeof *d->x);
    for (int j = 0; j < d->columns; j++) { /* those whose slack is 0 */
        int row = r->lp.nonbasic[j] - d->columns;
        if (row >= 0 && r->name[row].kind == TP_BMPIPE_PATH)
            made->path[paths++] = r->name[row].of;
    }
    made->paths = paths;
    return TP_OK;
}

/* Make t->now the base relaxation with the case's limits and paths. */
static void
rebuild(tree *t, const node *from)
{
    tp_bmpipe_relax_copy(&t->base, &t->now);
    for (const tp_bmpipe_limit *limit = from->limits; limit != NULL; limit = limit->before)
        tp_bmpipe_relax_limit(t->d, &t->now, limit);
    for (int k = 0; k < from->paths; k++)
        tp_bmpipe_relax_path(t->d, &t->now, from->path[k]);
}

typedef struct {
    tp_bmpipe_where where;
    int of;
    double value, score;
} cut_at;

/* A number of layers that is not whole, among the PROBES of highest score. */
static int
note(cut_at *best, int count, tp_bmpipe_where where, int of, double value, double weight)
{
    double part = value - floor(value), score = fmin(part, 1.0 - part);
    if (score < WHOLE)
        return count;
    score *= weight;
    if (count == PROBES && score <= best[PROBES - 1].score)
        return count;
    int at = count < PROBES ? count : PROBES - 1;
    for (; at > 0 && best[at - 1].score < score; at--)
        best[at] = best[at - 1];
    best[at] = (cut_at){where, of, value, score};
    return count < PROBES ? count + 1 : count;
}

/* The sums that limits of a kind count, `many` of them. */
static int
note_sums(tree *t, cut_at *best, int count, tp_bmpipe_where where, int many, double weight)
{
    const tp_bmpipe_dual *d = t->d;
    for (int of = 0; of < many; of++) {
        tp_bmpipe_limit limit = {NULL, where, of, 1, 0};
        double sum = 0.0;
        for (int j = 0; j < d->columns - 1; j++)
            sum += tp_bmpipe_counts(d, &limit, j) ? t->x[j] : 0.0;
        count = note(best, count, where, of, sum, weight);
    }
    return count;
}

/* List the numbers of layers to branch on, the coarse ones first: where memory binds, how many layers of a stage recompute matters
 * more than which ones. */
static int
candidates(tree *t, cut_at *best)
{
    const tp_bmpipe_dual *d = t->d;
    int stages = d->p->stages, count = note_sums(t, best, 0, TP_BMPIPE_ON_STAGE, stages, 2.0);
    if (isfinite(d->p->options->memory_bytes))
        count = note_sums(t, best, count, TP_BMPIPE_STRATEGY, stages * d->p->layers->strategies, 1.2);
    count = note_sums(t, best, count, TP_BMPIPE_ON_VIRTUAL, d->virtuals, 1.0);
    for (int j = 0; j < d->columns - 1; j++)
        count = note(best, count, TP_BMPIPE_IN_COLUMN, j, t->x[j], 0.1);
    t->d->work -= (int64_t)d->columns * (stages * (1 + d->p->layers->strategies) + d->virtuals);
    return count;
}

/* The bound of t->now with one limit more, in `into`. */
static double
bound_of(tree *t, tp_bmpipe_relax *into, const tp_bmpipe_limit *limit, int rounds)
{
    tp_bmpipe_relax_copy(&t->now, into);
    t->d->work -= (int64_t)t->now.lp.rows * t->d->columns / 4;
    tp_bmpipe_relax_limit(t->d, into, limit);
    return tp_bmpipe_tighten(t->d, into, rounds);
}

/* The candidate to branch on: both sides are tried for a few rounds, and the one with the largest product of gains is taken. */
static int
choose(tree *t, const cut_at *at, int count, double from_s)
{
    double most = -1.0;
    int best = 0;
    for (int k = 0; k < count && count > 1 && t->d->work > 0; k++) {
        tp_bmpipe_limit low = {NULL, at[k].where, at[k].of, -1, (int)floor(at[k].value)}, high = low;
        high.sign = 1;
        high.count++;
        double down = bound_of(t, &t->probe, &low, PROBE_ROUNDS) - from_s;
        double up = bound_of(t, &t->probe, &high, PROBE_ROUNDS) - from_s;
        double gain = fmax(down, 1e-7 * from_s) * fmax(up, 1e-7 * from_s);
        if (gain > most) {
            most = gain;
            best = k;
        }
    }
    return best;
}

/* Tighten t->now, raise *here_s to its bound, and list the numbers of layers to branch on. */
static tp_status
look_into(tree *t, double *here_s, cut_at *at, int *count)
{
    tp_bmpipe_dual *d = t->d;
    *count = 0;
    *here_s = fmax(*here_s, tp_bmpipe_tighten(d, &t->now, ROUNDS));
    if (*here_s >= d->s->best.makespan_s)
        return TP_OK;
    memcpy(t->x, d->x, (size_t)d->columns * sizeof *t->x);
    *count = candidates(t, at);
    return descend_from(t);
}

static tp_status
divide(tree *t, const node *from)
{
    tp_bmpipe_dual *d = t->d;
    cut_at at[PROBES];
    int count = 0;
    double here_s = from->bound_s;
    rebuild(t, from);
    TP_TRY(look_into(t, &here_s, at, &count));
    if (count == 0 && here_s < d->s->best.makespan_s) { /* a whole solution: it is the case's best once no path is missing */
        d->is_exact = 1;
        t->descents += t->descents == 0;
        TP_TRY(look_into(t, &here_s, at, &count));
        d->is_exact = 0;
    }
    if (here_s >= d->s->best.makespan_s)
        return TP_OK;
    if (count == 0) {
        t->closed_s = fmin(t->closed_s, here_s);
        return TP_OK;
    }
    const cut_at *best = &at[choose(t, at, count, here_s)];
    for (int sign = -1; sign <= 1; sign += 2) {
        const tp_bmpipe_limit *limit = NULL;
        TP_TRY(make_limit(t, from->limits, best->where, best->of, sign, (int)floor(best->value) + (sign > 0), &limit));
        double bound_s = fmax(here_s, bound_of(t, &t->child, limit, ROUNDS));
        TP_TRY(keep(t, &t->child, limit, bound_s));
    }
    return TP_OK;
}

static tp_status
grow(tree *t, double *bound_s)
{
    tp_bmpipe_dual *d = t->d;
    for (;;) {
        int least = -1;
        for (int k = 0; k < t->count; k++)
            if (least < 0 || t->open[k].bound_s < t->open[least].bound_s)
                least = k;
        double open_s = least < 0 ? d->s->best.makespan_s : t->open[least].bound_s;
        double now_s = fmin(fmin(open_s, t->closed_s), d->s->best.makespan_s);
        *bound_s = fmax(*bound_s, now_s);
        if (least < 0 || now_s < open_s || open_s >= d->s->best.makespan_s || d->work < LEAST_WORK || tp_bmpipe_is_late(d->p))
            return TP_OK;
        allot(d, SHARES);
        node from = t->open[least];
        t->open[least] = t->open[--t->count];
        d->p->nodes++;
        TP_TRY(divide(t, &from));
    }
}

/* ---- whole layers on stages ---------------------------------------------------------------------------------------------- */

/* The bound of "stage x has at least `count` of the set". */
static tp_status
stage_bound(tree *t, int x, int count, int parts, double *bound_s)
{
    const tp_bmpipe_limit *limit = NULL;
    allot(t->d, parts);
    TP_TRY(make_limit(t, NULL, TP_BMPIPE_ON_STAGE, x, 1, count, &limit));
    *bound_s = fmax(*bound_s, bound_of(t, &t->child, limit, ROUNDS));
    return TP_OK;
}

/* u of sum total - 1, found greedily from the base's solution, and the bound of each stage's u[x] + 1. */
static tp_status
share_out(tree *t, double floor_s, int *u, double *bound)
{
    tp_bmpipe_dual *d = t->d;
    int stages = d->p->stages, total = 0, sum = 0;
    for (int i = 0; i < d->p->n; i++)
        total += d->set[d->p->type_of[i]];
    for (int x = 0; x < stages; x++) {
        double layers = 0.0;
        for (int j = 0; j < d->columns - 1; j++)
            if (d->set[d->column[j].type] && d->column[j].v % stages == x)
                layers += t->x[j];
        u[x] = (int)fmin(floor(layers + WHOLE), total - 1 - sum);
        sum += u[x];
        bound[x] = floor_s;
    }
    int left = 2 * (stages + total - 1 - sum);
    for (int x = 0; x < stages; x++)
        TP_TRY(stage_bound(t, x, u[x] + 1, left--, &bound[x]));
    for (; sum < total - 1; sum++) {
        int least = 0;
        for (int x = 1; x < stages; x++)
            if (bound[x] < bound[least])
                least = x;
        if (bound[least] >= d->s->best.makespan_s)
            break; /* a smaller sum says more */
        TP_TRY(stage_bound(t, least, ++u[least] + 1, left > 1 ? left-- : 1, &bound[least]));
    }
    return TP_OK;
}

/* The stages' cases, greatest bound first, each without those before. */
static tp_status
first_cases(tree *t, const int *u, double *bound)
{
    tp_bmpipe_dual *d = t->d;
    const tp_bmpipe_limit *others = NULL, *limit = NULL;
    int stages = d->p->stages;
    for (int k = 0; k < stages; k++) {
        int most = -1;
        for (int x = 0; x < stages; x++)
            if (bound[x] >= 0.0 && (most < 0 || bound[x] > bound[most]))
                most = x;
        if (bound[most] < d->s->best.makespan_s) {
            node made = {0};
            TP_TRY(make_limit(t, others, TP_BMPIPE_ON_STAGE, most, 1, u[most] + 1, &made.limits));
            rebuild(t, &made);
            allot(d, 2 * (stages - k));
            double bound_s = fmax(bound[most], tp_bmpipe_tighten(d, &t->now, ROUNDS));
            TP_TRY(keep(t, &t->now, made.limits, bound_s));
            TP_TRY(descend_from(t));
        }
        TP_TRY(make_limit(t, others, TP_BMPIPE_ON_STAGE, most, -1, u[most], &limit));
        others = limit;
        bound[most] = -1.0;
    }
    return TP_OK;
}

static tp_status
whole_layers(tree *t, double *bound_s)
{
    tp_bmpipe_dual *d = t->d;
    size_t stages = (size_t)d->p->stages;
    void *memory = NULL;
    double floor_s = *bound_s, least_s = INFINITY;
    TP_TRY(tp_bmpipe_take(d->p, stages, sizeof(double) + sizeof(int), &memory));
    double *bound = memory;
    int *u = (int *)(bound + stages);
    tp_bmpipe_relax_copy(&t->base, &t->now);
    TP_TRY(share_out(t, floor_s, u, bound));
    for (size_t x = 0; x < stages; x++)
        least_s = fmin(least_s, bound[x]);
    *bound_s = fmax(*bound_s, fmin(least_s, d->s->best.makespan_s));
    TP_TRY(first_cases(t, u, bound));
    return grow(t, bound_s);
}

/* ---- rooms --------------------------------------------------------------------------------------------------------------- */

/* Can a layer of the type be on this virtual stage, if none is empty? */
static int
is_allowed(const tp_bmpipe *p, int type, int first, int v)
{
    int last = first + p->layers->count[type] - 1, low = v, high = p->n - p->virtuals + v;
    return last >= low && first <= high;
}

/* Is another strategy of the type no slower with no more bytes? The first of equals is kept. */
static int
is_dominated(const tp_bmpipe *p, int type, int strategy)
{
    const double *extra = p->layers->extra_s + (size_t)type * (size_t)p->layers->strategies;
    const double *bytes = p->layers->activation_bytes + (size_t)type * (size_t)p->layers->strategies;
    int unlimited = !isfinite(p->options->memory_bytes);
    for (int k = 0; k < p->layers->choices[type]; k++) {
        int equal = extra[k] == extra[strategy] && (unlimited || bytes[k] == bytes[strategy]);
        if (extra[k] <= extra[strategy] && (unlimited || bytes[k] <= bytes[strategy]) && (!equal || k < strategy))
            return 1;
    }
    return 0;
}

static tp_status
make_columns(tp_bmpipe_dual *d)
{
    const tp_bmpipe *p = d->p;
    void *memory = NULL;
    TP_TRY(tp_bmpipe_take(d->p, (size_t)d->types * (size_t)p->layers->strategies * (size_t)d->virtuals + 1,
                          sizeof *d->column, &memory));
    d->column = memory;
    for (int t = 0, first = 0; t < d->types; first += p->layers->count[t++])
        for (int r = 0; r < p->layers->choices[t]; r++)
            for (int v = 0; v < d->virtuals && !is_dominated(p, t, r); v++)
                if (is_allowed(p, t, first, v))
                    d->column[d->columns++] = (tp_bmpipe_column){t, r, v};
    d->columns++;
    d->room = 2 * d->columns + 64 < 1500 ? 2 * d->columns + 64 : 1500;
    return TP_OK;
}

static tp_status
dual_open(tp_bmpipe_dual *d, tp_bmpipe_search_room *s)
{
    tp_bmpipe *p = s->p;
    size_t virtuals = (size_t)p->virtuals, types = (size_t)p->layers->types;
    *d = (tp_bmpipe_dual){.s = s, .p = p, .virtuals = p->virtuals, .types = p->layers->types, .unit = s->best.makespan_s,
                          .vectors = p->vector_begin[p->stages], .end_ns = p->deadline_ns, .work = s->bound_work};
    TP_TRY(make_columns(d));
    size_t columns = (size_t)d->columns, marks = TP_BMPIPE_PATHS + (size_t)d->vectors + virtuals;
    struct {
        void **to;
        size_t count, size;
    } wanted[] = {
        {(void **)&d->rows, TP_BMPIPE_PATHS, sizeof *d->rows},
        {(void **)&d->row_used, TP_BMPIPE_PATHS, sizeof(int64_t)},
        {(void **)&d->lambda, TP_BMPIPE_PATHS, sizeof(double)},
        {(void **)&d->mu, (size_t)d->vectors, sizeof(double)},
        {(void **)&d->bonus, columns, sizeof(double)},
        {(void **)&d->weight, 2 * virtuals, sizeof(double)},
        {(void **)&d->byte_price, virtuals, sizeof(double)},
        {(void **)&d->static_price, virtuals, sizeof(double)},
        {(void **)&d->cost, types * virtuals, sizeof(double)},
        {(void **)&d->reach, virtuals + 1, sizeof(double)},
        {(void **)&d->dense, columns, sizeof(double)},
        {(void **)&d->x, columns, sizeof(double)},
        {(void **)&d->multiplier, (size_t)d->room, sizeof(double)},
        {(void **)&d->total, virtuals, sizeof(double)},
        {(void **)&d->extra, virtuals, sizeof(double)},
        {(void **)&d->load, 2 * virtuals, sizeof(double)},
        {(void **)&d->center, 2 * virtuals, sizeof(double)},
        {(void **)&d->may_drop, (size_t)d->room, 1},
        {(void **)&d->in_use, marks, 1},
        {(void **)&d->set, types, 1},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        TP_TRY(tp_bmpipe_take(p, wanted[i].count, wanted[i].size, wanted[i].to));
    void *memory = NULL;
    TP_TRY(tp_bmpipe_take(p, 2 * virtuals * TP_BMPIPE_PATHS, sizeof(double), &memory));
    for (size_t q = 0; q < TP_BMPIPE_PATHS; q++)
        d->rows[q].run = (double *)memory + 2 * virtuals * q;
    return TP_OK;
}

static tp_status
tree_open(tree *t, tp_bmpipe_dual *d)
{
    void *memory = NULL;
    *t = (tree){.d = d, .closed_s = INFINITY, .descents = DESCENTS};
    TP_TRY(tp_bmpipe_relax_open(d, &t->base));
    TP_TRY(tp_bmpipe_relax_open(d, &t->now));
    TP_TRY(tp_bmpipe_relax_open(d, &t->child));
    TP_TRY(tp_bmpipe_relax_open(d, &t->probe));
    TP_TRY(tp_bmpipe_take(d->p, NODES, sizeof *t->open, &memory));
    t->open = memory;
    TP_TRY(tp_bmpipe_take(d->p, (size_t)d->virtuals + 1, sizeof *t->cut, &memory));
    t->cut = memory;
    TP_TRY(tp_bmpipe_take(d->p, (size_t)d->columns, sizeof *t->x, &memory));
    t->x = memory;
    return TP_OK;
}

/* The set of layers to share out: the most common type's, or all. */
static void
choose_set(tp_bmpipe_dual *d)
{
    const int32_t *count = d->p->layers->count;
    int most = 0;
    for (int t = 1; t < d->types; t++)
        most = count[t] > count[most] ? t : most;
    memset(d->set, 2 * count[most] < d->p->n, (size_t)d->types);
    d->set[most] = 1;
}

tp_status
tp_bmpipe_bound(tp_bmpipe_search_room *s, double *bound_s)
{
    tp_bmpipe_dual d;
    tree t;
    *bound_s = 0.0;
    if (!(s->best.makespan_s > 0.0))
        return TP_OK;
    TP_TRY(dual_open(&d, s));
    seed_paths(&d);
    double first_rows = (double)d.virtuals * d.virtuals * d.columns; /* multiplications to add them */
    int is_large = 4.0 * (double)tp_bmpipe_lp_bytes(d.columns, d.room) > ROOM || 6.0 * first_rows > (double)d.work;
    if (is_large || tp_bmpipe_is_late(s->p)) {
        *bound_s = fmax(evaluate_mean(&d), work_bound(s->p)) * (1.0 - TP_BMPIPE_SLACK);
        return TP_OK;
    }
    choose_set(&d);
    TP_TRY(tree_open(&t, &d));
    tp_bmpipe_relax_base(&d, &t.base);
    allot(&d, 3);
    *bound_s = tp_bmpipe_tighten(&d, &t.base, ROUNDS);
    tp_bmpipe_relax_pin(&d, &t.base); /* they are in every copy */
    memcpy(t.x, d.x, (size_t)d.columns * sizeof *t.x);
    TP_TRY(descend_from(&t));
    if (*bound_s < s->best.makespan_s)
        TP_TRY(whole_layers(&t, bound_s));
    *bound_s = fmax(*bound_s, work_bound(s->p));
    *bound_s = fmin(*bound_s * (1.0 - TP_BMPIPE_SLACK), s->best.makespan_s);
    return TP_OK;
}
