/* A proven lower bound for several chunks. Every critical path is an inequality, makespan >= sum of runs * seconds + lag, and
 * so is every convex combination of them, with weights lambda. Memory (for stage x and each vector n in flight, static bytes +
 * sum n_c kept bytes <= M) is priced with mu >= 0, and "stage x has at least k layers of some set of types" with nu >= 0.
 * For given weights, what is left is a sum over layers: each layer takes the cheapest strategy of the virtual stage it is on,
 * and the cheapest consecutive partition is a dynamic programme over (layer, virtual stage). Its value is a lower bound
 * whatever the weights (weak Lagrangian duality), so nothing depends on where they come from: they are the multipliers of
 * the linear relaxation of PLANNERS.md 4.3, whose path inequalities are added as its own solutions' critical paths.
 *
 * Then layers are whole: for any u[x] of sum N - 1, some stage x has at least u[x] + 1 of the N layers of a set. So the least
 * over x of the bound "stage x has at least u[x] + 1" holds for every plan; u grows where that bound is least. */
#include "csrc/plan/bmpipe_chunks.h"

#include <math.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/plan/bmpipe_lp.h"

enum { PATHS = 1024, CUTS = 200, CUTS_LATER = 40 };
static const double ROOM = 5e8; /* bytes for all tableaus */
static const int64_t WORK = 1000000000, WORK_LATER = 100000000, PORTION = 4000000; /* multiplications */

/* What a row of a linear programme says. */
typedef enum { LAYERS, NOT_EMPTY, MEMORY, PATH, AT_LEAST } row_kind;
typedef struct {
    row_kind kind;
    int32_t of; /* vector or path */
} row_name;

typedef struct {
    tp_bmpipe_lp lp;
    row_name *name; /* [room] */
    int at_least;   /* the row of that kind; -1: none yet */
    int k;
} relaxation;

typedef struct {
    tp_bmpipe_search_room *s;
    tp_bmpipe *p;
    int vectors, virtuals, types, columns, room;
    double unit;                   /* seconds: the best makespan */
    tp_bmpipe_row *rows;           /* [PATHS] */
    int row_count;
    double *lambda, *mu;           /* [PATHS], [vectors] in units */
    double *weight;                /* [2 * virtuals] runs, combined */
    double *byte_price, *static_price; /* [virtuals] seconds a byte kept, a static byte */
    double *cost;                  /* [types][virtuals] of a layer */
    double *reach;                 /* [virtuals + 1] */
    double *dense, *x, *multiplier; /* [columns], [columns], [room] */
    const uint8_t *set;            /* [types] counted for nu */
    double nu;
    int stage, least;              /* at least `least` of the set on `stage`; -1: no such row */
    int64_t end_ns;                /* the caller's deadline; 0: none */
    relaxation base, *branch;      /* [stages] */
} dual;

static double
price_layers(dual *d)
{
    const tp_bmpipe *p = d->p;
    const tp_bmpipe_layers *l = p->layers;
    double unit = d->unit, memory = p->options->memory_bytes, constant = 0.0;
    memset(d->weight, 0, 2 * (size_t)d->virtuals * sizeof *d->weight);
    memset(d->byte_price, 0, (size_t)d->virtuals * sizeof *d->byte_price);
    memset(d->static_price, 0, (size_t)d->virtuals * sizeof *d->static_price);
    for (int q = 0; q < d->row_count; q++) {
        if (d->lambda[q] <= 0.0)
            continue;
        constant += d->lambda[q] * d->rows[q].lag_s;
        for (int v = 0; v < 2 * d->virtuals; v++)
            d->weight[v] += d->lambda[q] * d->rows[q].run[v];
    }
    for (int x = 0; x < p->stages && isfinite(memory); x++)
        for (int k = p->vector_begin[x]; k < p->vector_begin[x + 1]; k++) {
            if (d->mu[k] <= 0.0)
                continue;
            double price = d->mu[k] * unit / memory;
            constant -= d->mu[k] * unit * (1.0 + TP_BMPIPE_SLACK);
            for (int c = 0; c < p->chunks; c++) {
                d->static_price[c * p->stages + x] += price;
                d->byte_price[c * p->stages + x] += price * p->vector[k * p->chunks + c];
            }
        }
    for (int t = 0; t < d->types; t++)
        for (int v = 0; v < d->virtuals; v++) {
            double forward = d->weight[v], backward = d->weight[d->virtuals + v], least = INFINITY;
            for (int r = 0; r < l->choices[t]; r++) {
                double cost = backward * l->extra_s[t * l->strategies + r] +
                              d->byte_price[v] * l->activation_bytes[t * l->strategies + r];
                least = cost < least ? cost : least;
            }
            d->cost[t * d->virtuals + v] = least + forward * l->forward_s[t] + backward * l->backward_s[t] +
                                           d->static_price[v] * l->static_bytes[t];
            if (d->stage >= 0 && v % p->stages == d->stage && d->set[t])
                d->cost[t * d->virtuals + v] -= d->nu;
        }
    return d->stage >= 0 ? constant + d->nu * d->least : constant;
}

/* The cheapest consecutive partition without an empty virtual stage. */
static double
cheapest(dual *d)
{
    const tp_bmpipe *p = d->p;
    int virtuals = d->virtuals;
    double *reach = d->reach + 1; /* [-1]: never */
    for (int v = -1; v < virtuals; v++)
        reach[v] = INFINITY;
    reach[0] = d->cost[p->type_of[0] * virtuals];
    for (int i = 1; i < p->n; i++) {
        const double *cost = d->cost + p->type_of[i] * virtuals;
        for (int v = virtuals - 1; v >= 0; v--)
            reach[v] = (reach[v - 1] < reach[v] ? reach[v - 1] : reach[v]) + cost[v];
    }
    return reach[virtuals - 1];
}

/* ---- the linear programme: columns l[type, strategy, virtual stage], then the makespan, in units -------------------------- */

static inline int
column(const dual *d, int type, int strategy, int v)
{
    return (type * d->p->layers->strategies + strategy) * d->virtuals + v;
}

/* Can a layer of the type be on this virtual stage, if none is empty? */
static int
is_allowed(const tp_bmpipe *p, int type, int first, int v)
{
    int last = first + p->layers->count[type] - 1, low = v, high = p->n - p->virtuals + v;
    return last >= low && first <= high;
}

/* dense[column] = value for all strategies of the types (set NULL: all) on virtual stages from, from + step, ... */
static void
fill(dual *d, const uint8_t *set, int only, int from, int step, double value)
{
    for (int t = 0; t < d->types; t++)
        for (int r = 0; r < d->p->layers->choices[t]; r++)
            for (int v = from; v < d->virtuals && (only < 0 || t == only) && (set == NULL || set[t]); v += step)
                d->dense[column(d, t, r, v)] = value;
}

static int
add_row(dual *d, relaxation *r, row_kind kind, int of, double low)
{
    int row = tp_bmpipe_lp_add(&r->lp, d->dense, low);
    if (row >= 0)
        r->name[row] = (row_name){kind, of};
    memset(d->dense, 0, (size_t)d->columns * sizeof *d->dense);
    return row;
}

static int
add_path(dual *d, relaxation *r, int path)
{
    const tp_bmpipe_layers *l = d->p->layers;
    for (int t = 0; t < d->types; t++)
        for (int k = 0; k < l->choices[t]; k++)
            for (int v = 0; v < d->virtuals; v++)
                d->dense[column(d, t, k, v)] =
                    -(d->rows[path].run[v] * l->forward_s[t] +
                      d->rows[path].run[d->virtuals + v] * (l->backward_s[t] + l->extra_s[t * l->strategies + k])) /
                    d->unit;
    d->dense[d->columns - 1] = 1.0;
    return add_row(d, r, PATH, path, d->rows[path].lag_s / d->unit);
}

static void
add_memory(dual *d, relaxation *r, int stage, int vector)
{
    const tp_bmpipe *p = d->p;
    const tp_bmpipe_layers *l = p->layers;
    for (int t = 0; t < d->types; t++)
        for (int k = 0; k < l->choices[t]; k++)
            for (int c = 0; c < p->chunks; c++)
                d->dense[column(d, t, k, c * p->stages + stage)] =
                    -(l->static_bytes[t] + p->vector[vector * p->chunks + c] * l->activation_bytes[t * l->strategies + k]) /
                    p->options->memory_bytes;
    add_row(d, r, MEMORY, vector, -1.0);
}

/* The critical path of p->load as a new path; -1: no room. */
static int
new_path(dual *d)
{
    if (d->row_count == PATHS)
        return -1;
    tp_bmpipe_last_path(d->p, &d->rows[d->row_count]);
    return d->row_count++;
}

/* Loads of the relaxation's solution, in seconds. */
static void
loads_of(dual *d)
{
    const tp_bmpipe_layers *l = d->p->layers;
    memset(d->p->load, 0, 2 * (size_t)d->virtuals * sizeof *d->p->load);
    for (int t = 0; t < d->types; t++)
        for (int r = 0; r < l->choices[t]; r++)
            for (int v = 0; v < d->virtuals; v++) {
                double layers = d->x[column(d, t, r, v)];
                d->p->load[v] += layers * l->forward_s[t];
                d->p->load[d->virtuals + v] += layers * (l->backward_s[t] + l->extra_s[t * l->strategies + r]);
            }
}

/* Work alone: the mean over stages, and a stage that has its share, rounded up, of a type's layers. */
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
evaluate_mean(dual *d)
{
    for (int q = 0; q < d->row_count; q++)
        d->lambda[q] = 1.0 / d->row_count;
    double constant = price_layers(d);
    return fmin(constant + cheapest(d), d->unit);
}

/* The Lagrangian bound with the relaxation's multipliers. */
static double
evaluate(dual *d, const relaxation *r)
{
    double sum = 0.0;
    memset(d->lambda, 0, PATHS * sizeof *d->lambda);
    memset(d->mu, 0, (size_t)d->vectors * sizeof *d->mu);
    d->nu = 0.0;
    for (int i = 0; i < r->lp.rows; i++) {
        if (r->name[i].kind == PATH) {
            d->lambda[r->name[i].of] = d->multiplier[i];
            sum += d->multiplier[i];
        } else if (r->name[i].kind == MEMORY) {
            d->mu[r->name[i].of] = d->multiplier[i];
        } else if (r->name[i].kind == AT_LEAST) {
            d->nu = d->multiplier[i] * d->unit;
        }
    }
    for (int q = 0; q < d->row_count && sum > 0.0; q++) /* weights of sum 1 */
        d->lambda[q] /= sum;
    double constant = price_layers(d), value = constant + cheapest(d);
    if (sum > 0.0)
        return value;
    /* Without a path: more than 0 for every plan that fits says that there is none. */
    return value > 1e-9 * d->unit ? d->unit : 0.0;
}

/* Until its end, what comes next has 1 / parts of the time that is left. */
static void
allot(dual *d, int parts)
{
    int64_t now_ns = tp_clock_ns();
    if (d->end_ns == 0)
        return;
    d->p->deadline_ns = now_ns + (d->end_ns > now_ns ? (d->end_ns - now_ns) / parts : 0);
    d->p->late = 0;
}

/* In portions, so that the time limit is looked at. */
static int
solve(dual *d, relaxation *r, int64_t *work)
{
    int solved = 0;
    while (solved == 0 && *work > 0 && !tp_bmpipe_is_late(d->p)) {
        int64_t portion = *work < PORTION ? *work : PORTION;
        r->lp.work = portion;
        solved = tp_bmpipe_lp_solve(&r->lp);
        *work -= portion - r->lp.work;
    }
    return solved;
}

/* Solve, add the critical path of the solution while it is violated; the best bound on the way, at most one unit. */
static double
tighten(dual *d, relaxation *r, int64_t work, int cuts)
{
    double best = 0.0;
    for (int i = 0; i <= cuts; i++) {
        int solved = solve(d, r, &work);
        if (solved < 0) {
            tp_bmpipe_lp_read_ray(&r->lp, d->multiplier);
            return fmax(best, evaluate(d, r));
        }
        tp_bmpipe_lp_read(&r->lp, d->x, d->multiplier);
        if (i % 8 == 0 || i == cuts)
            best = fmax(best, evaluate(d, r));
        if (best >= d->unit || !solved || tp_bmpipe_is_late(d->p))
            break;
        loads_of(d);
        double makespan = tp_bmpipe_simulate(d->p);
        if (makespan <= d->x[d->columns - 1] * d->unit * (1.0 + 1e-6))
            break;
        int path = new_path(d);
        if (path < 0 || add_path(d, r, path) < 0)
            break;
    }
    return fmin(fmax(best, evaluate(d, r)), d->unit);
}

static tp_status
relaxation_open(dual *d, relaxation *r)
{
    void *memory = NULL;
    TP_TRY(tp_bmpipe_take(d->p, tp_bmpipe_lp_bytes(d->columns, d->room), 1, &memory));
    memset(d->dense, 0, (size_t)d->columns * sizeof *d->dense);
    d->dense[d->columns - 1] = 1.0;
    for (int j = 0; j < d->columns - 1; j++) /* without ties the method does not stall */
        d->dense[j] = 1e-7 * (1.0 + (double)(j * 7919 % 1009) / 1009.0) / d->p->n;
    tp_bmpipe_lp_open(&r->lp, memory, d->columns, d->room, d->dense);
    memset(d->dense, 0, (size_t)d->columns * sizeof *d->dense);
    TP_TRY(tp_bmpipe_take(d->p, (size_t)d->room, sizeof *r->name, &memory));
    r->name = memory;
    r->at_least = -1;
    return TP_OK;
}

/* Paths of the best plan and of it with one stage slower. */
static void
seed_paths(dual *d, int with_rows)
{
    tp_bmpipe *p = d->p;
    for (int x = -1; x < p->stages; x++) {
        memcpy(p->load, d->s->best.load, 2 * (size_t)d->virtuals * sizeof *p->load);
        for (int v = x; v < d->virtuals && x >= 0; v += p->stages) {
            p->load[v] *= 2.0;
            p->load[d->virtuals + v] *= 2.0;
        }
        tp_bmpipe_simulate(p);
        int path = new_path(d);
        if (path >= 0 && with_rows)
            add_path(d, &d->base, path);
    }
}

static void
open_base(dual *d)
{
    const tp_bmpipe *p = d->p;
    int first = 0;
    for (int t = 0; t < d->types; t++) {
        for (int r = 0; r < p->layers->choices[t]; r++)
            for (int v = 0; v < d->virtuals; v++)
                d->dense[column(d, t, r, v)] = is_allowed(p, t, first, v);
        add_row(d, &d->base, LAYERS, t, p->layers->count[t]);
        first += p->layers->count[t];
    }
    for (int v = 0; v < d->virtuals; v++) {
        fill(d, NULL, -1, v, d->virtuals, 1.0);
        add_row(d, &d->base, NOT_EMPTY, v, 1.0);
    }
    for (int x = 0; x < p->stages && isfinite(p->options->memory_bytes); x++)
        for (int k = p->vector_begin[x]; k < p->vector_begin[x + 1]; k++)
            add_memory(d, &d->base, x, k);
    seed_paths(d, 1);
}

/* ---- whole layers ---------------------------------------------------------------------------------------------------------- */

/* The bound of "stage has at least k layers of the set". */
static tp_status
branch_bound(dual *d, int stage, int k, double *bound_s)
{
    relaxation *r = &d->branch[stage];
    if (r->lp.table == NULL) {
        TP_TRY(relaxation_open(d, r));
        r->at_least = -1;
    }
    if (r->at_least < 0) {
        tp_bmpipe_lp_copy(&d->base.lp, &r->lp);
        memcpy(r->name, d->base.name, (size_t)d->base.lp.rows * sizeof *r->name);
        fill(d, d->set, -1, stage, d->p->stages, 1.0);
        r->at_least = add_row(d, r, AT_LEAST, 0, k);
        r->k = k;
    } else {
        tp_bmpipe_lp_raise(&r->lp, r->at_least, k - r->k);
        r->k = k;
    }
    if (r->at_least < 0)
        return TP_OK;
    d->stage = stage;
    d->least = k;
    *bound_s = fmax(*bound_s, tighten(d, r, WORK_LATER, CUTS_LATER));
    d->stage = -1;
    return TP_OK;
}

/* "Some stage has at least u[x] + 1 layers of the set", u of sum N - 1 found greedily. */
static tp_status
whole_layers(dual *d, const uint8_t *set, double floor_s, double *bound_s)
{
    tp_bmpipe *p = d->p;
    int stages = p->stages, total = 0, sum = 0, left = 0;
    void *memory = NULL;
    TP_TRY(tp_bmpipe_take(p, (size_t)stages, sizeof(double) + sizeof(int), &memory));
    double *bound = memory;
    int *u = (int *)(bound + stages);
    for (int i = 0; i < p->n; i++)
        total += set[p->type_of[i]];
    d->set = set;
    for (int x = 0; x < stages; x++) {
        u[x] = total / stages - 1 > 0 ? total / stages - 1 : 0;
        sum += u[x];
        bound[x] = floor_s;
    }
    left = stages + total - 1 - sum;
    for (int x = 0; x < stages; x++) {
        allot(d, left--);
        TP_TRY(branch_bound(d, x, u[x] + 1, &bound[x]));
    }
    while (sum < total - 1) {
        int least = 0;
        for (int x = 1; x < stages; x++)
            if (bound[x] < bound[least])
                least = x;
        if (bound[least] >= d->unit)
            break; /* a smaller sum says more */
        u[least]++;
        sum++;
        allot(d, left > 1 ? left : 1);
        left--;
        TP_TRY(branch_bound(d, least, u[least] + 1, &bound[least]));
    }
    double least_s = INFINITY;
    for (int x = 0; x < stages; x++)
        least_s = fmin(least_s, bound[x]);
    *bound_s = fmax(*bound_s, least_s);
    return TP_OK;
}

static tp_status
dual_open(dual *d, tp_bmpipe_search_room *s)
{
    tp_bmpipe *p = s->p;
    size_t virtuals = (size_t)p->virtuals, types = (size_t)p->layers->types;
    *d = (dual){.s = s, .p = p, .virtuals = p->virtuals, .types = p->layers->types, .stage = -1,
                .vectors = p->vector_begin[p->stages], .unit = s->best.makespan_s, .end_ns = p->deadline_ns};
    d->columns = d->types * p->layers->strategies * d->virtuals + 1;
    d->room = d->types + d->virtuals + d->vectors + p->stages + 2 + CUTS + 4 * CUTS_LATER;
    size_t columns = (size_t)d->columns;
    struct {
        void **to;
        size_t count, size;
    } wanted[] = {
        {(void **)&d->rows, PATHS, sizeof *d->rows},
        {(void **)&d->lambda, PATHS, sizeof(double)},
        {(void **)&d->mu, (size_t)d->vectors, sizeof(double)},
        {(void **)&d->weight, 2 * virtuals, sizeof(double)},
        {(void **)&d->byte_price, virtuals, sizeof(double)},
        {(void **)&d->static_price, virtuals, sizeof(double)},
        {(void **)&d->cost, types * virtuals, sizeof(double)},
        {(void **)&d->reach, virtuals + 1, sizeof(double)},
        {(void **)&d->dense, columns, sizeof(double)},
        {(void **)&d->x, columns, sizeof(double)},
        {(void **)&d->multiplier, (size_t)d->room, sizeof(double)},
        {(void **)&d->branch, (size_t)p->stages, sizeof *d->branch},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        TP_TRY(tp_bmpipe_take(p, wanted[i].count, wanted[i].size, wanted[i].to));
    for (int q = 0; q < PATHS; q++) {
        void *memory = NULL;
        TP_TRY(tp_bmpipe_take(p, 2 * virtuals, sizeof(double), &memory));
        d->rows[q].run = memory;
    }
    return TP_OK;
}

tp_status
tp_bmpipe_bound(tp_bmpipe_search_room *s, double *bound_s)
{
    dual d;
    void *memory = NULL;
    *bound_s = 0.0;
    if (!(s->best.makespan_s > 0.0))
        return TP_OK;
    TP_TRY(dual_open(&d, s));
    if ((double)tp_bmpipe_lp_bytes(d.columns, d.room) * (s->p->stages + 1) > ROOM) {
        seed_paths(&d, 0);
        *bound_s = fmax(evaluate_mean(&d), work_bound(s->p)) * (1.0 - TP_BMPIPE_SLACK);
        return TP_OK;
    }
    TP_TRY(relaxation_open(&d, &d.base));
    open_base(&d);
    allot(&d, 2);
    double floor_s = tighten(&d, &d.base, WORK, CUTS);
    *bound_s = floor_s;
    TP_TRY(tp_bmpipe_take(s->p, (size_t)d.types, 1, &memory));
    uint8_t *set = memory;
    int most = 0;
    for (int t = 1; t < d.types; t++)
        if (s->p->layers->count[t] > s->p->layers->count[most])
            most = t;
    memset(set, 2 * s->p->layers->count[most] < s->p->n, (size_t)d.types); /* the type that most layers are of, or all */
    set[most] = 1;
    TP_TRY(whole_layers(&d, set, floor_s, bound_s));
    *bound_s = fmax(*bound_s, work_bound(s->p));
    *bound_s = fmin(*bound_s * (1.0 - TP_BMPIPE_SLACK), s->best.makespan_s);
    return TP_OK;
}
