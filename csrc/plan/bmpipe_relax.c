/* Finds the weights of BMPipe's Lagrangian bound as multipliers of the linear relaxation of PLANNERS.md 4.3. Its rows (path
 * inequalities, memory, "no virtual stage is empty") are added when a solution violates them, and dropped when they have slack. */
#include "csrc/plan/bmpipe_dual.h"

#include <math.h>
#include <string.h>

enum { ADDED = 8, SPARE = 24 };          /* known paths to add in a round; rows to add before some are dropped again */
static const int64_t PORTION = 4000000;  /* multiplications between two looks at the clock */
static const double CLOSE = 1e-6;        /* relative: a violation that counts */
static const double EXACT = 1e-11;       /* the same where d->is_exact */
static const double IDLE = 1e-7;         /* a row with more to spare may be dropped */
static const double CENTERED = 0.8, LATELY = 0.2; /* see add_critical */
static const double PATIENCE = 0.01;     /* eight rounds that gain less than this part of what is left to gain are the last */

tp_status
tp_bmpipe_relax_open(tp_bmpipe_dual *d, tp_bmpipe_relax *r)
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
    return TP_OK;
}

void
tp_bmpipe_relax_copy(const tp_bmpipe_relax *from, tp_bmpipe_relax *to)
{
    tp_bmpipe_lp_copy(&from->lp, &to->lp);
    memcpy(to->name, from->name, (size_t)from->lp.room * sizeof *to->name);
}

/* d->dense . x >= low; d->dense is zero again. 0: no room or time. */
static int
add_row(tp_bmpipe_dual *d, tp_bmpipe_relax *r, tp_bmpipe_name name, double low)
{
    r->lp.work = d->work;
    int row = tp_bmpipe_is_late(d->p) ? -1 : tp_bmpipe_lp_add(&r->lp, d->dense, low);
    d->work = r->lp.work - d->columns;
    if (row >= 0)
        r->name[row] = name;
    memset(d->dense, 0, (size_t)d->columns * sizeof *d->dense);
    return row >= 0;
}

static double
seconds_of(const tp_bmpipe_dual *d, const double *run, int j)
{
    const tp_bmpipe_layers *l = d->p->layers;
    const tp_bmpipe_column *c = &d->column[j];
    return run[c->v] * l->forward_s[c->type] +
           run[d->virtuals + c->v] * (l->backward_s[c->type] + l->extra_s[c->type * l->strategies + c->strategy]);
}

static int
add_path(tp_bmpipe_dual *d, tp_bmpipe_relax *r, int path)
{
    for (int j = 0; j < d->columns - 1; j++)
        d->dense[j] = -seconds_of(d, d->rows[path].run, j) / d->unit;
    d->dense[d->columns - 1] = 1.0;
    return add_row(d, r, (tp_bmpipe_name){TP_BMPIPE_PATH, path, NULL}, d->rows[path].lag_s / d->unit);
}

void
tp_bmpipe_relax_path(tp_bmpipe_dual *d, tp_bmpipe_relax *r, int path)
{
    add_path(d, r, path);
}

static int
add_memory(tp_bmpipe_dual *d, tp_bmpipe_relax *r, int stage, int vector)
{
    const tp_bmpipe *p = d->p;
    const tp_bmpipe_layers *l = p->layers;
    for (int j = 0; j < d->columns - 1; j++) {
        const tp_bmpipe_column *at = &d->column[j];
        if (at->v % p->stages == stage)
            d->dense[j] = -(l->static_bytes[at->type] + p->vector[vector * p->chunks + at->v / p->stages] *
                                                            l->activation_bytes[at->type * l->strategies + at->strategy]) /
                          p->options->memory_bytes;
    }
    return add_row(d, r, (tp_bmpipe_name){TP_BMPIPE_MEMORY, vector, NULL}, -1.0);
}

void
tp_bmpipe_relax_limit(tp_bmpipe_dual *d, tp_bmpipe_relax *r, const tp_bmpipe_limit *limit)
{
    for (int j = 0; j < d->columns - 1; j++)
        d->dense[j] = limit->sign * tp_bmpipe_counts(d, limit, j);
    add_row(d, r, (tp_bmpipe_name){TP_BMPIPE_LIMIT, 0, limit}, limit->sign * limit->count);
}

int
tp_bmpipe_new_path(tp_bmpipe_dual *d)
{
    int at = d->row_count;
    if (at < TP_BMPIPE_PATHS)
        d->row_count++;
    else
        at = 0;
    for (int q = 1; q < TP_BMPIPE_PATHS && d->row_count == TP_BMPIPE_PATHS; q++)
        at = d->row_used[q] < d->row_used[at] ? q : at;
    tp_bmpipe_last_path(d->p, &d->rows[at]);
    d->row_used[at] = d->now;
    return at;
}

void
tp_bmpipe_relax_base(tp_bmpipe_dual *d, tp_bmpipe_relax *r)
{
    for (int t = 0; t < d->types; t++)
        for (int sign = 1; sign >= -1; sign -= 2) {
            for (int j = 0; j < d->columns - 1; j++)
                d->dense[j] = d->column[j].type == t ? sign : 0.0;
            add_row(d, r, (tp_bmpipe_name){TP_BMPIPE_ALL, sign > 0 ? t : -1 - t, NULL}, sign * d->p->layers->count[t]);
        }
    for (int q = 0; q < d->row_count; q++)
        add_path(d, r, q);
}

/* ---- what a solution violates -------------------------------------------------------------------------------------------- */

/* Which paths, vectors and virtual stages have a row. */
static void
mark_rows(tp_bmpipe_dual *d, const tp_bmpipe_relax *r)
{
    const tp_bmpipe_lp *lp = &r->lp;
    memset(d->in_use, 0, (size_t)(TP_BMPIPE_PATHS + d->vectors + d->virtuals));
    for (int k = 0; k < lp->rows + lp->columns; k++) {
        int code = k < lp->rows ? lp->basic[k] : lp->nonbasic[k - lp->rows];
        const tp_bmpipe_name *name = code < lp->columns ? NULL : &r->name[code - lp->columns];
        if (name != NULL && name->kind == TP_BMPIPE_PATH) {
            d->in_use[name->of] = 1;
            d->row_used[name->of] = d->now > d->row_used[name->of] ? d->now : d->row_used[name->of];
        } else if (name != NULL && name->kind == TP_BMPIPE_MEMORY)
            d->in_use[TP_BMPIPE_PATHS + name->of] = 1;
        else if (name != NULL && name->kind == TP_BMPIPE_NOT_EMPTY)
            d->in_use[TP_BMPIPE_PATHS + d->vectors + name->of] = 1;
    }
}

void
tp_bmpipe_relax_pin(tp_bmpipe_dual *d, const tp_bmpipe_relax *r)
{
    mark_rows(d, r);
    for (int q = 0; q < TP_BMPIPE_PATHS; q++)
        if (d->in_use[q])
            d->row_used[q] = INT64_MAX;
}

/* Loads of the solution, in seconds, and layers by virtual stage. */
static void
read_solution(tp_bmpipe_dual *d)
{
    const tp_bmpipe_layers *l = d->p->layers;
    memset(d->load, 0, 2 * (size_t)d->virtuals * sizeof *d->load);
    memset(d->total, 0, (size_t)d->virtuals * sizeof *d->total);
    memset(d->extra, 0, (size_t)d->virtuals * sizeof *d->extra);
    for (int j = 0; j < d->columns - 1; j++) {
        const tp_bmpipe_column *c = &d->column[j];
        if (d->x[j] == 0.0)
            continue;
        d->total[c->v] += d->x[j];
        d->extra[c->v] += d->x[j] * l->extra_s[c->type * l->strategies + c->strategy];
        d->load[c->v] += d->x[j] * l->forward_s[c->type];
        d->load[d->virtuals + c->v] +=
            d->x[j] * (l->backward_s[c->type] + l->extra_s[c->type * l->strategies + c->strategy]);
    }
}

static int
add_not_empty(tp_bmpipe_dual *d, tp_bmpipe_relax *r)
{
    int added = 0;
    for (int v = 0; v < d->virtuals; v++) {
        if (d->total[v] >= 1.0 - CLOSE || d->in_use[TP_BMPIPE_PATHS + d->vectors + v])
            continue;
        for (int j = 0; j < d->columns - 1; j++)
            d->dense[j] = d->column[j].v == v;
        added += add_row(d, r, (tp_bmpipe_name){TP_BMPIPE_NOT_EMPTY, v, NULL}, 1.0);
    }
    return added;
}

/* The most violated vector of every stage. */
static int
add_vectors(tp_bmpipe_dual *d, tp_bmpipe_relax *r)
{
    const tp_bmpipe *p = d->p;
    const tp_bmpipe_layers *l = p->layers;
    double memory = p->options->memory_bytes, *kept = d->byte_price; /* free until the next bound */
    int added = 0;
    for (int x = 0; x < p->stages && isfinite(memory); x++) {
        double still = 0.0, most = memory * (1.0 + CLOSE);
        int worst = -1;
        memset(kept, 0, (size_t)p->chunks * sizeof *kept);
        for (int j = 0; j < d->columns - 1; j++) {
            const tp_bmpipe_column *at = &d->column[j];
            if (at->v % p->stages != x)
                continue;
            still += d->x[j] * l->static_bytes[at->type];
            kept[at->v / p->stages] += d->x[j] * l->activation_bytes[at->type * l->strategies + at->strategy];
        }
        for (int k = p->vector_begin[x]; k < p->vector_begin[x + 1]; k++) {
            double bytes = still;
            for (int c = 0; c < p->chunks; c++)
                bytes += p->vector[k * p->chunks + c] * kept[c];
            if (bytes > most && !d->in_use[TP_BMPIPE_PATHS + k]) {
                most = bytes;
                worst = k;
            }
        }
        added += worst >= 0 ? add_memory(d, r, x, worst) : 0;
    }
    d->work -= (int64_t)p->stages * d->columns + (int64_t)d->vectors * p->chunks;
    return added;
}

/* Known paths that the loads violate most. */
static int
add_known(tp_bmpipe_dual *d, tp_bmpipe_relax *r, double limit_s)
{
    double most[ADDED];
    int which[ADDED], found = 0, added = 0;
    for (int q = 0; q < d->row_count; q++) {
        if (d->in_use[q])
            continue;
        double value = tp_bmpipe_row_value(d->p, &d->rows[q], d->load);
        if (value <= limit_s || (found == ADDED && value <= most[ADDED - 1]))
            continue;
        int at = found < ADDED ? found++ : ADDED - 1;
        for (; at > 0 && most[at - 1] < value; at--) {
            most[at] = most[at - 1];
            which[at] = which[at - 1];
        }
        most[at] = value;
        which[at] = q;
    }
    d->work -= 2 * (int64_t)d->row_count * d->virtuals;
    for (int k = 0; k < found; k++)
        added += add_path(d, r, which[k]);
    return added;
}

/* The critical path of d->load, taken `part` of the way to d->center, if the solution violates it. */
static int
add_critical_of(tp_bmpipe_dual *d, tp_bmpipe_relax *r, double part, double limit_s)
{
    tp_bmpipe *p = d->p;
    for (int v = 0; v < 2 * d->virtuals; v++)
        p->load[v] = d->load[v] + part * (d->center[v] - d->load[v]);
    tp_bmpipe_simulate(p);
    d->work -= 40 * (int64_t)d->virtuals * p->micros;
    int path = tp_bmpipe_new_path(d);
    if (tp_bmpipe_row_value(p, &d->rows[path], d->load) > limit_s)
        return add_path(d, r, path);
    d->row_used[path] = -1; /* says nothing here: the next one may have its place */
    return 0;
}

/* Solutions of a relaxation with few rows are corners far apart, and their critical paths cut off little but themselves. So a
 * second path is taken at a point near the mean of late solutions: half as many paths give the same bound. */
static int
add_critical(tp_bmpipe_dual *d, tp_bmpipe_relax *r, double limit_s)
{
    for (int v = 0; v < 2 * d->virtuals; v++)
        d->center[v] = d->is_first ? d->load[v] : d->center[v] + LATELY * (d->load[v] - d->center[v]);
    d->is_first = 0;
    int added = add_critical_of(d, r, 0.0, limit_s);
    return added > 0 ? added + add_critical_of(d, r, CENTERED, limit_s) : 0;
}

/* ---- bounds -------------------------------------------------------------------------------------------------------------- */

/* The Lagrangian bound with the multipliers read; is_ray: they prove that there is no solution, and no path has a part in it
 * (what has is rounding). */
static double
evaluate(tp_bmpipe_dual *d, const tp_bmpipe_relax *r, int is_ray)
{
    double sum = 0.0, constant = 0.0, length = 0.0;
    memset(d->lambda, 0, TP_BMPIPE_PATHS * sizeof *d->lambda);
    memset(d->mu, 0, (size_t)d->vectors * sizeof *d->mu);
    memset(d->bonus, 0, (size_t)d->columns * sizeof *d->bonus);
    for (int i = 0; i < d->room; i++) {
        double multiplier = d->multiplier[i];
        if (multiplier <= 0.0)
            continue;
        if (r->name[i].kind == TP_BMPIPE_PATH && !is_ray) {
            d->lambda[r->name[i].of] += multiplier;
            sum += multiplier;
        } else if (r->name[i].kind == TP_BMPIPE_MEMORY) {
            d->mu[r->name[i].of] += multiplier;
            length += multiplier * d->unit;
        } else if (r->name[i].kind == TP_BMPIPE_LIMIT) {
            const tp_bmpipe_limit *limit = r->name[i].limit;
            double each = multiplier * d->unit * limit->sign;
            constant += each * limit->count;
            length += multiplier * d->unit * (limit->count + 1);
            for (int j = 0; j < d->columns - 1; j++)
                d->bonus[j] += each * tp_bmpipe_counts(d, limit, j);
        }
    }
    for (int q = 0; q < d->row_count && sum > 0.0; q++) /* weights of sum 1 */
        d->lambda[q] /= sum;
    double value = tp_bmpipe_dual_value(d, constant), best = d->s->best.makespan_s;
    if (sum > 0.0)
        return fmin(value, best);
    /* Without a path: more than 0 for every plan that fits says that there is none. A ray may have any length, and rounding is a
     * part of that. */
    return value > 1e-12 * length ? best : 0.0;
}

/* 1: solved, 0: out of work or time, -1: no solution. In portions, so that the time limit is looked at. */
static int
solve(tp_bmpipe_dual *d, tp_bmpipe_relax *r)
{
    int solved = 0;
    while (solved == 0 && d->work > 0 && !tp_bmpipe_is_late(d->p)) {
        int64_t portion = d->work < PORTION ? d->work : PORTION;
        r->lp.work = portion;
        solved = tp_bmpipe_lp_solve(&r->lp);
        d->work -= portion - r->lp.work;
    }
    if (solved < 0)
        tp_bmpipe_lp_read_ray(&r->lp, d->multiplier);
    else
        tp_bmpipe_lp_read(&r->lp, d->x, d->multiplier);
    return solved;
}

static void
drop_idle(tp_bmpipe_dual *d, tp_bmpipe_relax *r)
{
    if (r->lp.rows <= d->kept_rows + SPARE)
        return;
    for (int i = 0; i < d->room; i++)
        d->may_drop[i] = r->name[i].kind != TP_BMPIPE_ALL && r->name[i].kind != TP_BMPIPE_LIMIT;
    tp_bmpipe_lp_drop(&r->lp, IDLE, d->may_drop);
    d->kept_rows = r->lp.rows;
}

static int
separate(tp_bmpipe_dual *d, tp_bmpipe_relax *r)
{
    double limit_s = d->x[d->columns - 1] * d->unit * (1.0 + (d->is_exact ? EXACT : CLOSE));
    drop_idle(d, r);
    d->now++;
    mark_rows(d, r);
    int added = add_not_empty(d, r) + add_vectors(d, r) + add_known(d, r, limit_s);
    return added > 0 ? added : add_critical(d, r, limit_s);
}

double
tp_bmpipe_tighten(tp_bmpipe_dual *d, tp_bmpipe_relax *r, int rounds)
{
    double best = d->s->best.makespan_s, mark = 0.0;
    d->is_first = 1;
    d->kept_rows = r->lp.rows;
    for (int i = 0;; i++) {
        int solved = solve(d, r);
        if (solved < 0)
            return evaluate(d, r, 1);
        read_solution(d);
        double now = d->x[d->columns - 1] * d->unit;
        int last = i >= rounds || solved == 0 || now >= best;
        if (i % 8 == 7 && !d->is_exact) { /* little gained lately, for what is left to gain */
            last |= now - mark < PATIENCE * (best - now);
            mark = now;
        }
        if (last || separate(d, r) == 0)
            return evaluate(d, r, 0);
    }
}
