/* Better plans from the critical paths of a few. A path through the order of 1F1B, counted (how often each stage's forward and
 * backward are on it, and its messages), is as long in any plan as those counts say, and no makespan is less. So the longest
 * of the paths known is a model of the makespan, from below, that a boundary's move changes by a product: some 10 ns for all
 * paths, where a simulation takes 10 us. The search aims below the best plan, moves boundaries until no path known is longer
 * than that, simulates what it has then, and learns the critical path where that is too long. With few micro-batches dozens of
 * paths are nearly as long as the longest, and a descent by simulations (tp_stage_descend) ends 1 to 2 % above the best plan;
 * this finds it in 50 simulations, mostly, and the proof is ten times faster from there. */
#include "csrc/plan/stage_search.h"

#include <math.h>
#include <string.h>

#if defined(__GNUC__)
#define BODY static inline __attribute__((always_inline))
#else
#define BODY static inline
#endif

enum { PATHS = 128, LANES = 8, GROUP = 32 }; /* the oldest path is forgotten for a new one */
enum { TRIES = 40 };             /* simulations for one aim */

struct tp_stage_paths {
    int count, next, used;         /* paths known; where the next goes; in whole lanes */
    double per_s;                  /* what follows is in parts of the first best makespan, so that squares stay numbers */
    double *forwards, *backwards;  /* [stages][PATHS] of a stage on a path */
    double *fixed;                 /* [PATHS] messages; -inf: no path yet */
    double *now;                   /* [PATHS] with the plan */
    float *beyond;                 /* [PATHS] less the aim */
    float *up, *down;              /* [PATHS / GROUP][stages][GROUP] what a path gains when the boundary moves by one block */
    float *sums;                   /* [stages][LANES] squares of what paths are beyond it, boundaries up to that one moved */
    int *plan;                     /* [stages + 1] */
    tp_f1b_op *path;
};

typedef struct {
    float beyond; /* squares of what paths are longer than the aim */
    int from, to, by;
} shift;

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t masks __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* A path, more added to it; the square of what it is beyond the aim then. */
#define ADD(path, more)                                                                                                \
    do {                                                                                                               \
        path += more;                                                                                                  \
        lanes beyond_ = (lanes)((masks)path & (path > 0.0f));                                                          \
        sum += beyond_ * beyond_;                                                                                      \
    } while (0)

/* Boundaries one by one moved too, what a group's paths gain by each added to them: the squares by lanes for each. The paths are in
 * registers from the first boundary to the last. */
BODY void
add(const float *paths, const float *gain, int first, int count, float *sums)
{
    const lanes *at = (const void *)paths, *more = (const void *)gain;
    lanes *out = (void *)sums, a = at[0], b = at[1], c = at[2], d = at[3];
    for (int k = 0; k < count; k++, more += GROUP / LANES) {
        lanes sum = {0.0f};
        if (!first)
            sum = out[k];
        ADD(a, more[0]);
        ADD(b, more[1]);
        ADD(c, more[2]);
        ADD(d, more[3]);
        out[k] = sum;
    }
}

/* Do the stages fit when boundaries from .. to move, and hold a block? */
static int
may_shift(const tp_stages *s, const int *plan, int from, int to, int by)
{
    for (int k = from - 1; k <= to; k++) {
        int begin = plan[k] + (k >= from ? by : 0), end = plan[k + 1] + (k < to ? by : 0);
        if (begin >= end || !tp_stage_fits(s, k, begin, end))
            return 0;
    }
    return 1;
}

/* The move of some boundaries, one behind another, that leaves least beyond the aim. */
BODY void
find_body(const tp_stages *s, const struct tp_stage_paths *w, shift *best)
{
    for (int by = 1; by >= -1; by -= 2)
        for (int from = 1; from < s->stages; from++) {
            for (int i = 0; i < w->used; i += GROUP)
                add(w->beyond + i, (by > 0 ? w->up : w->down) + i * s->stages + from * GROUP, i == 0, s->stages - from, w->sums);
            for (int to = from; to < s->stages; to++) {
                const float *sum = w->sums + (to - from) * LANES;
                float beyond = ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
                if (beyond < best->beyond && may_shift(s, w->plan, from, to, by))
                    *best = (shift){beyond, from, to, by};
            }
        }
}

/* Compiled once more for AVX2: it adds, multiplies and compares, so that both give the same bits. */
#if defined(__x86_64__)
static __attribute__((target("avx2"))) void
find_avx2(const tp_stages *s, const struct tp_stage_paths *w, shift *best)
{
    find_body(s, w, best);
}
#define HAS_AVX2 __builtin_cpu_supports("avx2")
#else
#define HAS_AVX2 0
#define find_avx2 find_body
#endif

static void
set_moves(const tp_stages *s, struct tp_stage_paths *w, int k)
{
    const double *f0 = w->forwards + (k - 1) * PATHS, *f1 = f0 + PATHS, *b0 = w->backwards + (k - 1) * PATHS, *b1 = b0 + PATHS;
    const double *forward = s->forward_s + w->plan[k], *backward = s->backward_s + w->plan[k];
    double f_up = (forward[1] - forward[0]) * w->per_s, b_up = (backward[1] - backward[0]) * w->per_s;
    double f_down = (forward[0] - forward[-1]) * w->per_s, b_down = (backward[0] - backward[-1]) * w->per_s;
    for (int i = 0; i < w->used; i++) {
        double f = f0[i] - f1[i], b = b0[i] - b1[i];
        int place = (i / GROUP * s->stages + k) * GROUP + i % GROUP;
        w->up[place] = (float)(f_up * f + b_up * b);
        w->down[place] = (float)-(f_down * f + b_down * b);
    }
}

/* The paths with the plan. */
static void
measure(const tp_stages *s, struct tp_stage_paths *w)
{
    memcpy(w->now, w->fixed, (size_t)w->used * sizeof *w->now);
    for (int k = 0; k < s->stages; k++) {
        tp_stage_times t = tp_stage_times_of(s, k, w->plan[k], w->plan[k + 1]);
        double f = t.forward_s * w->per_s, b = t.backward_s * w->per_s;
        for (int i = 0; i < w->used; i++)
            w->now[i] += w->forwards[k * PATHS + i] * f + w->backwards[k * PATHS + i] * b;
    }
}

/* Move boundaries until no path is longer than the aim: 1, or until no move helps: 0. */
static int
approach(tp_stage_search *q, double aim)
{
    struct tp_stage_paths *w = q->paths;
    const tp_stages *s = q->stages;
    int64_t p = s->stages;
    float least = INFINITY;
    for (;;) {
        shift best = {.by = 0};
        measure(s, w);
        for (int i = 0; i < w->used; i++) {
            w->beyond[i] = (float)(w->now[i] - aim);
            best.beyond += w->beyond[i] > 0.0f ? w->beyond[i] * w->beyond[i] : 0.0f;
        }
        if (!(best.beyond > 0.0f))
            return 1;
        if (best.beyond >= least) /* the sums of a move are rounded otherwise */
            return 0;
        least = best.beyond;
        for (int k = 1; k < s->stages; k++)
            set_moves(s, w, k);
        if (HAS_AVX2)
            find_avx2(s, w, &best);
        else
            find_body(s, w, &best);
        q->effort += p * p * w->used / 32 + 1;
        if (best.by == 0 || tp_stage_stop(q))
            return 0;
        for (int k = best.from; k <= best.to; k++)
            w->plan[k] += best.by;
    }
}

/* Simulate the plan and learn its critical path. */
static double
learn(tp_stage_search *q)
{
    struct tp_stage_paths *w = q->paths;
    const tp_stages *s = q->stages;
    int at = w->next, master, place = 0;
    double makespan = tp_stage_try(q, w->plan, INFINITY), sum = 0.0;
    int length = tp_f1b_path(&q->f1b, w->path, &master);
    q->effort += 2 * tp_stage_effort(s, s->stages);
    w->next = (at + 1) % PATHS;
    w->count += w->count < PATHS;
    w->used = (w->count + LANES - 1) / LANES * LANES;
    for (int k = 0; k < s->stages; k++)
        w->forwards[k * PATHS + at] = w->backwards[k * PATHS + at] = 0.0;
    for (int i = 0; i < length; i++) {
        place = w->path[i].stage * PATHS + at;
        (w->path[i].backward ? w->backwards : w->forwards)[place] += 1.0;
    }
    for (int k = 0; k < s->stages; k++) {
        tp_stage_times t = tp_stage_times_of(s, k, w->plan[k], w->plan[k + 1]);
        sum += w->forwards[k * PATHS + at] * t.forward_s + w->backwards[k * PATHS + at] * t.backward_s;
    }
    w->fixed[at] = (makespan - sum) * w->per_s;
    return makespan;
}

static tp_status
open_paths(tp_arena *arena, tp_stage_search *q)
{
    size_t p = (size_t)q->stages->stages;
    struct tp_stage_paths *w;
    TP_ARENA_TAKE(arena, 1, w);
    TP_ARENA_TAKE(arena, p * PATHS, w->forwards);
    TP_ARENA_TAKE(arena, p * PATHS, w->backwards);
    TP_ARENA_TAKE(arena, p * PATHS, w->up);
    TP_ARENA_TAKE(arena, p * PATHS, w->down);
    TP_ARENA_TAKE(arena, PATHS, w->fixed);
    TP_ARENA_TAKE(arena, PATHS, w->now);
    TP_ARENA_TAKE(arena, PATHS, w->beyond);
    TP_ARENA_TAKE(arena, p * LANES, w->sums);
    TP_ARENA_TAKE(arena, p + 1, w->plan);
    TP_ARENA_TAKE(arena, tp_f1b_longest_path(q->stages->stages, q->stages->micros), w->path);
    for (int i = 0; i < PATHS; i++)
        w->fixed[i] = -INFINITY;
    w->per_s = 1.0 / q->best_s;
    memcpy(w->plan, q->best, (p + 1) * sizeof *w->plan);
    q->paths = w;
    learn(q);
    return TP_OK;
}

/* From a plan towards the aim: 1 if it is there. */
static int
reach(tp_stage_search *q, const int *from, double aim_s, int *simulations)
{
    struct tp_stage_paths *w = q->paths;
    memcpy(w->plan, from, ((size_t)q->stages->stages + 1) * sizeof *w->plan);
    for (int i = 0; i < TRIES && *simulations > 0 && approach(q, aim_s * w->per_s); i++) {
        --*simulations;
        if (learn(q) <= aim_s)
            return 1;
    }
    return 0;
}

tp_status
tp_stage_improve(tp_arena *arena, tp_stage_search *q, const int *from, double share, int simulations)
{
    double part = share;
    if (q->paths == NULL && (q->best_s < 1e-280 || q->best_s > 1e280)) /* its inverse would be no number */
        return TP_OK;
    if (q->paths == NULL)
        TP_TRY(open_paths(arena, q));
    while (part >= TP_STAGE_CLOSE && simulations > 0 && tp_stage_goal(q) > q->bound_s && !tp_stage_stop(q)) {
        double aim_s = q->best_s - part * (q->best_s - q->bound_s);
        if (!reach(q, from != NULL ? from : q->best, aim_s, &simulations)) {
            part *= 0.5;
        } else if (from != NULL) {
            from = NULL;
            part = share;
        }
    }
    return TP_OK;
}
