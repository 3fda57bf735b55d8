/* Several chunks a stage: what the search, the bound and the proof share. Internal to csrc/plan/bmpipe_*.c. */
#ifndef TP_PLAN_BMPIPE_CHUNKS_H
#define TP_PLAN_BMPIPE_CHUNKS_H

#include "csrc/plan/bmpipe_core.h"

/* How one stage's layers may recompute: undominated vectors of extra seconds by chunk that fit, least sum first. */
typedef struct tp_bmpipe_choice {
    struct tp_bmpipe_choice *next; /* of the same hash */
    int32_t *key;                  /* [1 + 2 * chunks] stage, canonical start and length by chunk */
    int count, exact;              /* exact: no undominated vector is missing */
    double *extra_s;               /* [count][chunks] */
    int32_t *point;                /* [count][chunks] of the fronts */
} tp_bmpipe_choice;

enum { TP_BMPIPE_CHOICE_ROOM = 32, TP_BMPIPE_HASH = 1 << 15, TP_BMPIPE_ROWS = 1024 };

typedef struct {
    int *cut;     /* [virtuals + 1] */
    int *pick;    /* [stages] which of the stage's choices */
    double *load; /* [2 * virtuals] */
    double makespan_s;
} tp_bmpipe_state;

typedef struct {
    tp_bmpipe *p;
    tp_bmpipe_choice **table; /* [TP_BMPIPE_HASH] */
    const tp_bmpipe_front **fronts; /* [chunks] scratch */
    int32_t *key, *at;        /* [1 + 2 * chunks], [chunks] scratch */
    double *kept;             /* [chunks] scratch */
    double *room_extra;       /* [TP_BMPIPE_CHOICE_ROOM + 1][chunks] scratch */
    int32_t *room_point;
    tp_bmpipe_row *rows;      /* [TP_BMPIPE_ROWS], those that cut off lately first */
    int row_count;
    double *base_load;        /* [2 * virtuals] loads near which candidates are */
    double *row_base;         /* [TP_BMPIPE_ROWS] the inequality there, if row_made is base_count */
    int64_t *row_made, base_count;
    int *changed;             /* [2 * virtuals] scratch */
    int64_t effort;           /* left */
    int64_t bound_work;       /* multiplications for the bound */
    int64_t polish_effort;    /* of a descent that the bound asks for */
    uint64_t drawn;           /* random numbers so far */
    tp_bmpipe_state now, next, best;
    uint8_t *touched;         /* [stages] scratch */
    double *lack;             /* [stages] scratch */
} tp_bmpipe_search_room;

/* The choices of a stage under these boundaries. */
TP_MUST_USE tp_status
tp_bmpipe_choices(tp_bmpipe_search_room *s, const int *cut, int stage, const tp_bmpipe_choice **out);
/* Sets the stage's loads. */
void
tp_bmpipe_load(const tp_bmpipe_search_room *s, const int *cut, int stage, const double *extra_s, double *load);
/* The makespan, or as soon as an inequality shows that it is at least limit_s, something from there on. */
double
tp_bmpipe_glance(tp_bmpipe_search_room *s, const double *load, double limit_s);
/* The loads that the next candidates differ little from: makes tp_bmpipe_glance quick. */
void
tp_bmpipe_glance_near(tp_bmpipe_search_room *s, const double *load);
/* Bytes that a stage lacks with the fewest kept; <= 0: it fits. */
double
tp_bmpipe_lack(const tp_bmpipe_search_room *s, const int *cut, int stage);
/* Moves a layer from virtual stage v to u: all boundaries between them shift. */
void
tp_bmpipe_shift(int *cut, int v, int u);
/* s->touched: the stages that get other layers, by type and number, when a layer of v moves to u. */
void
tp_bmpipe_touch(tp_bmpipe_search_room *s, const int *cut, int v, int u);
/* The best single move of a layer, for fewest bytes lacking, until none helps or time is up: bytes still lacking. */
double
tp_bmpipe_mend(tp_bmpipe_search_room *s, int *cut);
/* Boundaries that fit into s->now.cut. EINFEASIBLE as tp_plan_bmpipe. */
TP_MUST_USE tp_status
tp_bmpipe_find_fit(tp_bmpipe_search_room *s);

/* bmpipe_search.c: descend from these boundaries and the ways to recompute nearest to extra_s[virtual stage], if they fit and
 * their makespan is close to the best; s->now is spoilt. *tried: it did. */
TP_MUST_USE tp_status
tp_bmpipe_polish(tp_bmpipe_search_room *s, const int *cut, const double *extra_s, int *tried);

/* bmpipe_few.c: where there are at most 4000 partitions (and no more than s->effort), look at all of them, from s->best on; leaves
 * s->effort as it was. *proven: s->best is the best plan of all. s->now is spoilt. */
TP_MUST_USE tp_status
tp_bmpipe_few(tp_bmpipe_search_room *s, int *proven);

/* bmpipe_bound.c: a proven lower bound on every plan; a better one that it finds on the way becomes s->best. */
TP_MUST_USE tp_status
tp_bmpipe_bound(tp_bmpipe_search_room *s, double *bound_s);

#endif
