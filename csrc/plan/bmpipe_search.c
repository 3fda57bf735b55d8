/* Several chunks (PLANNERS.md 4.4): iterated local search. A state is boundaries and, for each stage, one of the undominated
 * ways to recompute that fit; moves take a layer from one virtual stage to another (all boundaries between shift), or
 * change a stage's way. One perturbation in three moves many layers at once. Critical paths of earlier simulations are inequalities
 * for every plan, so nearly all candidates are refused by a dot product; the rest are simulated in one linear pass. Effort is
 * counted, not timed. */
#include "csrc/plan/bmpipe_chunks.h"

#include <math.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/rng.h"

static const double WORK = 1.5e9; /* multiplications for the bound, by default */

static int
draw(tp_bmpipe_search_room *s, int below)
{
    return (int)tp_rng_below(4, 4, s->drawn++, (uint64_t)below);
}

static void
copy_state(const tp_bmpipe *p, const tp_bmpipe_state *from, tp_bmpipe_state *to)
{
    memcpy(to->cut, from->cut, (size_t)(p->virtuals + 1) * sizeof *to->cut);
    memcpy(to->pick, from->pick, (size_t)p->stages * sizeof *to->pick);
    memcpy(to->load, from->load, 2 * (size_t)p->virtuals * sizeof *to->load);
    to->makespan_s = from->makespan_s;
}

static inline int
is_over(tp_bmpipe_search_room *s)
{
    return s->effort <= 0 || ((s->p->evaluations & 63) == 0 && tp_bmpipe_is_late(s->p)) || s->p->late;
}

/* s->next = s->now with a layer of v moved to u. *possible 0: v would be empty, or a stage does not fit. */
static tp_status
move_layer(tp_bmpipe_search_room *s, int v, int u, int *possible)
{
    const tp_bmpipe *p = s->p;
    int *cut = s->next.cut;
    *possible = s->now.cut[v + 1] - s->now.cut[v] > 1;
    if (!*possible)
        return TP_OK;
    copy_state(p, &s->now, &s->next);
    tp_bmpipe_shift(cut, v, u);
    tp_bmpipe_touch(s, s->now.cut, v, u);
    for (int x = 0; x < p->stages; x++) {
        if (!s->touched[x])
            continue;
        const tp_bmpipe_choice *choice = NULL;
        TP_TRY(tp_bmpipe_choices(s, cut, x, &choice));
        if (choice->count == 0) {
            *possible = 0;
            return TP_OK;
        }
        s->next.pick[x] = 0;
        tp_bmpipe_load(s, cut, x, choice->extra_s, s->next.load);
    }
    return TP_OK;
}

static void
accept(tp_bmpipe_search_room *s, double makespan_s)
{
    s->next.makespan_s = makespan_s;
    copy_state(s->p, &s->next, &s->now);
    tp_bmpipe_glance_near(s, s->now.load);
}

/* The best other way to recompute of stage x, if it is better. */
static tp_status
repick(tp_bmpipe_search_room *s, int x, int *found)
{
    const tp_bmpipe_choice *choice = NULL;
    TP_TRY(tp_bmpipe_choices(s, s->now.cut, x, &choice));
    for (int k = 0; k < choice->count; k++) {
        if (k == s->now.pick[x])
            continue;
        copy_state(s->p, &s->now, &s->next);
        s->next.pick[x] = k;
        tp_bmpipe_load(s, s->now.cut, x, choice->extra_s + k * s->p->chunks, s->next.load);
        double goal = s->now.makespan_s * (1.0 - TP_BMPIPE_SLACK), makespan = tp_bmpipe_glance(s, s->next.load, goal);
        if (makespan < goal) {
            accept(s, makespan);
            *found = 1;
        }
    }
    return TP_OK;
}

/* Moves and ways, first improvement, until none. */
static tp_status
descend(tp_bmpipe_search_room *s)
{
    int virtuals = s->p->virtuals, found = 1, start = draw(s, virtuals);
    tp_bmpipe_glance_near(s, s->now.load);
    while (found && !is_over(s)) {
        found = 0;
        for (int k = 0; k < virtuals; k++)
            for (int j = 1; j < virtuals; j++) {
                int v = (start + k) % virtuals, u = (v + j) % virtuals, possible = 0;
                if (is_over(s))
                    return TP_OK;
                TP_TRY(move_layer(s, v, u, &possible));
                if (!possible)
                    continue;
                double goal = s->now.makespan_s * (1.0 - TP_BMPIPE_SLACK);
                double makespan = tp_bmpipe_glance(s, s->next.load, goal);
                if (makespan < goal) {
                    accept(s, makespan);
                    found = 1;
                }
            }
        for (int x = 0; x < s->p->stages; x++)
            TP_TRY(repick(s, x, &found));
    }
    return TP_OK;
}

/* 2 to 7 moves whatever they cost. */
static tp_status
perturb(tp_bmpipe_search_room *s)
{
    int virtuals = s->p->virtuals, moves = 2 + draw(s, 6);
    for (int k = 0; k < moves; k++) {
        int v = draw(s, virtuals), u = (v + 1 + draw(s, virtuals - 1)) % virtuals, possible = 0;
        TP_TRY(move_layer(s, v, u, &possible));
        if (possible)
            accept(s, INFINITY);
    }
    s->now.makespan_s = tp_bmpipe_glance(s, s->now.load, INFINITY);
    return TP_OK;
}

/* The choice whose seconds exceed extra_s[virtual stage] least; NULL: the first. */
static int
nearest(const tp_bmpipe *p, const tp_bmpipe_choice *choice, int stage, const double *extra_s)
{
    int best = 0;
    double least = INFINITY;
    for (int k = 0; k < choice->count && extra_s != NULL; k++) {
        double over = 0.0;
        for (int c = 0; c < p->chunks; c++)
            over += fmax(0.0, choice->extra_s[k * p->chunks + c] - extra_s[c * p->stages + stage]);
        if (over < least) {
            least = over;
            best = k;
        }
    }
    return best;
}

/* s->now with the boundaries it has and the ways to recompute nearest to extra_s. *lacking: a stage that has none; -1. Of a plan
 * that is wanted only below a limit none is looked for once all time is up: those of one stage alone may take long. */
static tp_status
begin_at(tp_bmpipe_search_room *s, const double *extra_s, double limit_s, int *lacking)
{
    *lacking = -1;
    for (int x = 0; x < s->p->stages; x++) {
        const tp_bmpipe_choice *choice = NULL;
        int is_up = limit_s < INFINITY && s->p->end_ns != 0 && tp_clock_ns() > s->p->end_ns;
        if (!is_up)
            TP_TRY(tp_bmpipe_choices(s, s->now.cut, x, &choice));
        if (is_up || choice->count == 0) {
            *lacking = x;
            return TP_OK;
        }
        s->now.pick[x] = nearest(s->p, choice, x, extra_s);
        tp_bmpipe_load(s, s->now.cut, x, choice->extra_s + s->now.pick[x] * s->p->chunks, s->now.load);
    }
    s->now.makespan_s = tp_bmpipe_glance(s, s->now.load, limit_s);
    return TP_OK;
}

/* 2 to 7 moves of one layer or of many, whether or not they fit, then those of single layers that make them fit: far plans are not
 * reached by layers that move one at a time, each of which must fit. s->now stays where no plan that fits is found. */
static tp_status
leap(tp_bmpipe_search_room *s)
{
    int virtuals = s->p->virtuals, moves = 2 + draw(s, 6), *cut = s->next.cut, lacking = -1;
    memcpy(cut, s->now.cut, ((size_t)virtuals + 1) * sizeof *cut);
    for (int k = 0; k < moves; k++) {
        int v = draw(s, virtuals), u = (v + 1 + draw(s, virtuals - 1)) % virtuals;
        int layers = cut[v + 1] - cut[v] - 1;
        for (int left = layers > 0 ? 1 + draw(s, layers) : 0; left > 0; left--)
            tp_bmpipe_shift(cut, v, u);
    }
    if (tp_bmpipe_mend(s, cut) > 0.0)
        return TP_OK;
    memcpy(s->now.cut, cut, ((size_t)virtuals + 1) * sizeof *cut);
    TP_TRY(begin_at(s, NULL, INFINITY, &lacking));
    if (lacking >= 0)
        copy_state(s->p, &s->best, &s->now);
    return TP_OK;
}

static tp_status
start(tp_bmpipe_search_room *s)
{
    int lacking = -1;
    TP_TRY(tp_bmpipe_find_fit(s));
    TP_TRY(begin_at(s, NULL, INFINITY, &lacking));
    if (lacking >= 0)
        return tp_fail(TP_EINTERNAL, "stage %d fits but has no way to recompute", lacking);
    return TP_OK;
}

tp_status
tp_bmpipe_polish(tp_bmpipe_search_room *s, const int *cut, const double *extra_s, int *tried)
{
    double limit_s = 1.03 * s->best.makespan_s;
    int lacking = -1;
    memcpy(s->now.cut, cut, ((size_t)s->p->virtuals + 1) * sizeof *cut);
    TP_TRY(begin_at(s, extra_s, limit_s, &lacking));
    *tried = lacking < 0 && s->now.makespan_s < limit_s;
    if (!*tried)
        return TP_OK;
    s->effort = s->polish_effort;
    TP_TRY(descend(s));
    if (s->now.makespan_s < s->best.makespan_s)
        copy_state(s->p, &s->now, &s->best);
    return TP_OK;
}

/* Descend from the boundaries that were given to begin with. The search has ended before, so that no start makes it worse: what is
 * better by less than rounding times may change is not taken. */
static tp_status
from_start(tp_bmpipe_search_room *s)
{
    const tp_bmpipe *p = s->p;
    const tp_bmpipe_layers *l = p->layers;
    void *memory = NULL;
    int tried = 0;
    TP_TRY(tp_bmpipe_take(s->p, (size_t)p->virtuals + 1, sizeof(double) + sizeof(int), &memory));
    double *extra_s = memory;
    int *cut = (int *)(extra_s + p->virtuals + 1);
    for (int v = 0; v < p->virtuals; v++) {
        cut[v + 1] = cut[v];
        for (int i = 0; i < l->types * l->strategies; i++) {
            int count = p->options->start[i * p->virtuals + v];
            cut[v + 1] += count;
            extra_s[v] += count > 0 ? count * l->extra_s[i] : 0.0;
        }
    }
    double best_s = s->best.makespan_s, goal_s = best_s * (1.0 - 4.0 * TP_BMPIPE_SLACK);
    s->best.makespan_s = goal_s;
    TP_TRY(tp_bmpipe_polish(s, cut, extra_s, &tried));
    if (s->best.makespan_s >= goal_s)
        s->best.makespan_s = best_s;
    return TP_OK;
}

static tp_status
iterate(tp_bmpipe_search_room *s, int *proven)
{
    TP_TRY(start(s));
    copy_state(s->p, &s->now, &s->best);
    TP_TRY(tp_bmpipe_few(s, proven));
    if (*proven)
        return TP_OK;
    copy_state(s->p, &s->best, &s->now);
    TP_TRY(descend(s));
    for (;;) {
        if (s->now.makespan_s < s->best.makespan_s)
            copy_state(s->p, &s->now, &s->best);
        if (is_over(s) || s->p->virtuals == 1)
            return TP_OK;
        if (s->now.makespan_s > s->best.makespan_s * 1.005 || draw(s, 2) == 0)
            copy_state(s->p, &s->best, &s->now);
        if (draw(s, 3) == 0)
            TP_TRY(leap(s));
        else
            TP_TRY(perturb(s));
        TP_TRY(descend(s));
    }
}

static tp_status
room_open(tp_bmpipe_search_room *s, tp_bmpipe *p)
{
    size_t chunks = (size_t)p->chunks, stages = (size_t)p->stages, virtuals = (size_t)p->virtuals;
    *s = (tp_bmpipe_search_room){.p = p, .base_count = 1};
    double size = 4e3 * p->virtuals * p->virtuals * p->micros, most = 5e8 / p->virtuals;
    double by_default = size < most ? size : most;
    s->effort = p->options->effort > 0 ? p->options->effort : (int64_t)by_default;
    s->bound_work = (int64_t)fmin(1e18, WORK * fmax((double)s->effort / by_default, 0.01));
    s->polish_effort = s->effort / 40;
    struct {
        void **to;
        size_t count, size;
    } wanted[] = {
        {(void **)&s->table, TP_BMPIPE_HASH, sizeof *s->table},
        {(void **)&s->fronts, chunks, sizeof *s->fronts},
        {(void **)&s->key, 1 + 2 * chunks, sizeof *s->key},
        {(void **)&s->at, chunks, sizeof *s->at},
        {(void **)&s->kept, chunks, sizeof *s->kept},
        {(void **)&s->room_extra, (TP_BMPIPE_CHOICE_ROOM + 1) * chunks, sizeof *s->room_extra},
        {(void **)&s->room_point, (TP_BMPIPE_CHOICE_ROOM + 1) * chunks, sizeof *s->room_point},
        {(void **)&s->rows, TP_BMPIPE_ROWS, sizeof *s->rows},
        {(void **)&s->base_load, 2 * virtuals, sizeof(double)},
        {(void **)&s->row_base, TP_BMPIPE_ROWS, sizeof(double)},
        {(void **)&s->row_made, TP_BMPIPE_ROWS, sizeof(int64_t)},
        {(void **)&s->changed, 2 * virtuals, sizeof(int)},
        {(void **)&s->touched, stages, 1},
        {(void **)&s->lack, stages, sizeof(double)},
        {(void **)&s->now.cut, virtuals + 1, sizeof(int)},       {(void **)&s->next.cut, virtuals + 1, sizeof(int)},
        {(void **)&s->best.cut, virtuals + 1, sizeof(int)},      {(void **)&s->now.pick, stages, sizeof(int)},
        {(void **)&s->next.pick, stages, sizeof(int)},           {(void **)&s->best.pick, stages, sizeof(int)},
        {(void **)&s->now.load, 2 * virtuals, sizeof(double)},   {(void **)&s->next.load, 2 * virtuals, sizeof(double)},
        {(void **)&s->best.load, 2 * virtuals, sizeof(double)},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        TP_TRY(tp_bmpipe_take(p, wanted[i].count, wanted[i].size, wanted[i].to));
    for (int k = 0; k < TP_BMPIPE_ROWS; k++) {
        void *memory = NULL;
        TP_TRY(tp_bmpipe_take(p, 2 * virtuals, sizeof(double), &memory));
        s->rows[k].run = memory;
    }
    return TP_OK;
}

tp_status
tp_bmpipe_search(tp_bmpipe *p, int32_t *assignment, tp_bmpipe_found *found)
{
    tp_bmpipe_search_room s;
    int64_t deadline_ns = p->deadline_ns, now_ns = tp_clock_ns();
    TP_TRY(room_open(&s, p));
    if (deadline_ns != 0 && !p->options->unproven) /* half of the time is the bound's */
        p->deadline_ns = now_ns + (deadline_ns - now_ns) / 2;
    int proven = 0;
    TP_TRY(iterate(&s, &proven));
    p->deadline_ns = deadline_ns;
    p->late = 0;
    *found = (tp_bmpipe_found){.makespan_s = s.best.makespan_s, .paths = s.row_count};
    found->bound_s = found->makespan_s * (1.0 - TP_BMPIPE_SLACK);
    if (!proven && p->options->unproven)
        found->bound_s = 0.0;
    else if (!proven)
        TP_TRY(tp_bmpipe_bound(&s, &found->bound_s));
    if (p->options->start != NULL && found->bound_s < s.best.makespan_s * (1.0 - TP_BMPIPE_SLACK)) {
        p->deadline_ns = deadline_ns; /* the bound had parts of it */
        p->late = 0;
        TP_TRY(from_start(&s));
    }
    found->makespan_s = s.best.makespan_s;
    for (int v = 0; v < p->virtuals; v++) {
        const tp_bmpipe_choice *choice = NULL;
        const tp_bmpipe_front *front = NULL;
        int stage = v % p->stages;
        TP_TRY(tp_bmpipe_choices(&s, s.best.cut, stage, &choice));
        TP_TRY(tp_bmpipe_front_of(p, s.best.cut[v], s.best.cut[v + 1], &front));
        tp_bmpipe_assign(p, front, choice->point[s.best.pick[stage] * p->chunks + v / p->stages], v, assignment);
    }
    found->proven = found->bound_s >= found->makespan_s * (1.0 - TP_BMPIPE_SLACK);
    return TP_OK;
}
