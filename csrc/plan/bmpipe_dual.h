/* What the parts of BMPipe's bound for several chunks share: weights give a bound (bmpipe_dual.c), a linear programme gives
 * weights (bmpipe_relax.c), whole layers are branched on (bmpipe_bound.c). Internal to those. */
#ifndef TP_PLAN_BMPIPE_DUAL_H
#define TP_PLAN_BMPIPE_DUAL_H

#include "csrc/plan/bmpipe_chunks.h"
#include "csrc/plan/bmpipe_lp.h"

enum { TP_BMPIPE_PATHS = 3072 };

/* Layers of a type with a strategy on a virtual stage: where that can be, and no other strategy is as quick with as few bytes. */
typedef struct {
    int type, strategy, v;
} tp_bmpipe_column;

/* At least (sign 1) or at most (-1) `count` layers: of the set on a stage, all of them or with one strategy (of = stage *
 * strategies + strategy), of any type on a virtual stage, or of one column. */
typedef enum { TP_BMPIPE_ON_STAGE, TP_BMPIPE_STRATEGY, TP_BMPIPE_ON_VIRTUAL, TP_BMPIPE_IN_COLUMN } tp_bmpipe_where;
typedef struct tp_bmpipe_limit {
    const struct tp_bmpipe_limit *before; /* also holds; NULL: no more */
    tp_bmpipe_where where;
    int of, sign, count;
} tp_bmpipe_limit;

/* What a row of a linear programme says. */
typedef enum { TP_BMPIPE_ALL, TP_BMPIPE_NOT_EMPTY, TP_BMPIPE_MEMORY, TP_BMPIPE_PATH, TP_BMPIPE_LIMIT } tp_bmpipe_kind;
typedef struct {
    tp_bmpipe_kind kind;
    int32_t of; /* type (-1 - type: at most), virtual stage, vector or path */
    const tp_bmpipe_limit *limit;
} tp_bmpipe_name;
typedef struct {
    tp_bmpipe_lp lp;
    tp_bmpipe_name *name; /* [lp.room] by row number */
} tp_bmpipe_relax;

typedef struct {
    tp_bmpipe_search_room *s;
    tp_bmpipe *p;
    int vectors, virtuals, types, columns, room; /* columns: and one for the makespan, the last */
    double unit;                    /* seconds: the best makespan at first */
    tp_bmpipe_column *column;       /* [columns] */
    tp_bmpipe_row *rows;            /* [TP_BMPIPE_PATHS] */
    int64_t *row_used;              /* [TP_BMPIPE_PATHS] when the path last was in a programme: the oldest is replaced */
    int row_count;
    int64_t now;                    /* rounds so far */
    double *lambda, *mu;            /* [TP_BMPIPE_PATHS], [vectors] in units */
    double *bonus;                  /* [columns] seconds a layer, of limits */
    double *weight;                 /* [2 * virtuals] runs, combined */
    double *byte_price, *static_price; /* [virtuals] seconds a byte kept, a static byte */
    double *cost;                   /* [types][virtuals] of a layer */
    double *reach;                  /* [virtuals + 1] */
    double *dense, *x, *multiplier; /* [columns], [columns], [room] */
    double *load, *center;          /* [2 * virtuals] seconds of x, and the mean of late ones */
    int is_exact;                   /* to the last round, to the last digits */
    int is_first;                   /* center: none yet */
    double *total, *extra;          /* [virtuals] layers of x, their extra seconds */
    uint8_t *may_drop, *in_use;     /* [room], [TP_BMPIPE_PATHS + vectors + virtuals] scratch */
    uint8_t *set;                   /* [types] that ON_STAGE counts */
    int64_t work, reserve;          /* multiplications left: now, and later */
    int kept_rows;                  /* of the programme when rows were dropped last */
    int64_t end_ns;                 /* the caller's deadline; 0: none */
} tp_bmpipe_dual;

/* ---- bmpipe_dual.c ------------------------------------------------------------------------------------------------------ */
/* The Lagrangian bound of lambda, mu, bonus and `constant`, the limits' part. */
double
tp_bmpipe_dual_value(tp_bmpipe_dual *d, double constant);
/* Does the limit count the layers of this column? */
static inline int
tp_bmpipe_counts(const tp_bmpipe_dual *d, const tp_bmpipe_limit *limit, int column)
{
    const tp_bmpipe_column *c = &d->column[column];
    int stage = c->v % d->p->stages, strategies = d->p->layers->strategies;
    switch (limit->where) {
    case TP_BMPIPE_ON_STAGE:
        return d->set[c->type] && stage == limit->of;
    case TP_BMPIPE_STRATEGY:
        return d->set[c->type] && stage * strategies + c->strategy == limit->of;
    case TP_BMPIPE_ON_VIRTUAL:
        return c->v == limit->of;
    default:
        return column == limit->of;
    }
}

/* ---- bmpipe_relax.c ----------------------------------------------------------------------------------------------------- */
TP_MUST_USE tp_status
tp_bmpipe_relax_open(tp_bmpipe_dual *d, tp_bmpipe_relax *r);
void
tp_bmpipe_relax_copy(const tp_bmpipe_relax *from, tp_bmpipe_relax *to);
void
tp_bmpipe_relax_base(tp_bmpipe_dual *d, tp_bmpipe_relax *r); /* all layers, and the paths known */
void
tp_bmpipe_relax_limit(tp_bmpipe_dual *d, tp_bmpipe_relax *r, const tp_bmpipe_limit *limit);
void
tp_bmpipe_relax_path(tp_bmpipe_dual *d, tp_bmpipe_relax *r, int path);
/* Its paths are never replaced. */
void
tp_bmpipe_relax_pin(tp_bmpipe_dual *d, const tp_bmpipe_relax *r);
/* p->load's critical path among d->rows; which one. */
int
tp_bmpipe_new_path(tp_bmpipe_dual *d);
/* Solve and add what the solution violates, at most `rounds` times; a proven bound, at most the best makespan known. d->x and
 * d->total are the last solution. */
double
tp_bmpipe_tighten(tp_bmpipe_dual *d, tp_bmpipe_relax *r, int rounds);

#endif
