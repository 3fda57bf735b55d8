/* Decides whether a partition fits a limit of memory where ranks have several stages: depth first over the stages in order, leaving
 * out what a bound excludes. Two bounds on what the ranks take of the blocks that are still to be cut, over all partitions of
 * these: the least of each rank alone; and the least weighted sum over all ranks (Lagrangian relaxation of their limits; weights by
 * multiplicative updates: Arora, Hazan and Kale 2012). Each is a shortest path through the blocks, over stages that fit their ranks
 * by themselves. tests/test_lean.py holds the answers against all partitions there are. */
#include "csrc/engine/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

#define MOST_SIZES 1000000 /* that an answer may ask for */
#define FEW_SIZES 30000    /* that are asked for before what takes longer and answers at once (chunks.c) */
#define ROUNDS 40          /* of weights */
#define WHOLE 4096.0       /* the sum of weights, about, or less: no sum of weighted bytes is beyond NEVER */
#define NEVER TP_ENGINE_NEVER
#define FEW_SUMS ((int64_t)1 << 20) /* of matrices (chunks.c), which are less work than weights */
#define MOST_SUMS ((int64_t)1 << 27)
#define MOST_CELLS ((size_t)1 << 25) /* of all bounds: 256 MiB */

/* A weighted sum of the ranks' limits and of what stages take of them. */
typedef struct {
    int32_t *weight; /* [ranks] */
    int64_t *rest;   /* [parts + 1][blocks + 1] the least sum of stages [part, parts) on blocks [from, blocks); NEVER: none fit */
    int64_t room;    /* the sum of what is left of the limits */
} relaxation;

typedef struct {
    tp_engine_sizes *sizes;
    relaxation *bound;     /* [ranks + 1] of each rank alone, and of all by the weights that exclude most */
    tp_engine_size *least; /* [stages] of one block, wherever that may be */
    int64_t *single;       /* [ranks] the least that all its stages and guests take */
    int64_t *workspace;    /* [ranks] the most of any stage until here; no less than the least of any */
    int64_t *before;       /* [stages] of its rank, before that stage */
    int64_t *bytes;        /* [ranks] of a partition */
    double *share;         /* [ranks] weights before they are whole numbers */
    int32_t *furthest;     /* [parts][blocks + 1] the last end of a stage from there that leaves its ranks room for their others */
    int32_t *boundary;     /* [parts + 1] */
    int64_t limit, work, most;
    double whole; /* the sum of weights, at most */
    int stages, parts, ranks, blocks;
} prover;

static int
rank_of(const prover *x, int stage)
{
    return x->sizes->config.program->rank_of[stage];
}

static size_t
at(const prover *x, int part, int block)
{
    return (size_t)part * ((size_t)x->blocks + 1) + (size_t)block;
}

static tp_engine_size
size_of(prover *x, int stage, int from, int to)
{
    x->work++;
    return tp_engine_size_of(x->sizes, stage, from, to);
}

static int
is_too_much(const prover *x)
{
    return x->work > x->most || tp_deadline_late();
}

/* The last block where a part may begin, so that one is left for it and for each part behind it; the first is block `part`. */
static int
last_of(const prover *x, int part)
{
    return part == 0 ? 0 : x->blocks - (x->parts - part);
}

/* ---- what any partition needs, and how far stages may go ----------------------------------------------------------------- */

static void
look_at_singles(prover *x)
{
    for (int stage = 0; stage < x->stages; stage++) {
        int part = tp_engine_part(&x->sizes->config, stage), r = rank_of(x, stage), host = x->sizes->host[stage];
        tp_engine_size least = {NEVER, NEVER, NEVER};
        for (int from = part + 1 == x->parts ? x->blocks - 1 : part; from <= last_of(x, part); from++)
            least = tp_engine_lesser_size(least, size_of(x, stage, from, from + 1));
        x->least[stage] = least;
        x->single[r] += least.stage;
        x->workspace[r] = least.workspace > x->workspace[r] ? least.workspace : x->workspace[r];
        if (host >= 0)
            x->single[host] += least.guests;
    }
}

static int64_t
room_of(const prover *x, int rank)
{
    return x->limit - x->sizes->beside[rank] - x->workspace[rank];
}

static int
fits(prover *x, int part, int from, int to)
{
    for (int stage = part; stage < x->stages; stage += x->parts) {
        tp_engine_size size = size_of(x, stage, from, to), least = x->least[stage];
        int r = rank_of(x, stage), host = x->sizes->host[stage];
        int64_t workspace = size.workspace > x->workspace[r] ? size.workspace - x->workspace[r] : 0;
        if (x->single[r] - least.stage + size.stage + workspace > room_of(x, r))
            return 0;
        if (host >= 0 && x->single[host] - least.guests + size.guests > room_of(x, host))
            return 0;
    }
    return 1;
}

static void
look_how_far(prover *x)
{
    for (int part = 0; part < x->parts && !is_too_much(x); part++)
        for (int from = part; from <= last_of(x, part); from++) {
            int to = from;
            while (to < x->blocks - (x->parts - 1 - part) && fits(x, part, from, to + 1))
                to++;
            x->furthest[at(x, part, from)] = to;
        }
}

/* ---- bounds -------------------------------------------------------------------------------------------------------------- */

static int64_t
weigh(prover *x, const int32_t *weight, int part, int from, int to)
{
    int64_t sum = 0;
    for (int stage = part; stage < x->stages; stage += x->parts) {
        int32_t own = weight[rank_of(x, stage)], of_host = x->sizes->host[stage] < 0 ? 0 : weight[x->sizes->host[stage]];
        if (own == 0 && of_host == 0)
            continue;
        tp_engine_size size = size_of(x, stage, from, to);
        sum += own * size.stage + of_host * size.guests;
    }
    return sum;
}

/* The shortest ways from everywhere to the end. */
static void
relax(prover *x, relaxation *bound)
{
    bound->room = 0;
    for (int r = 0; r < x->ranks; r++)
        bound->room += bound->weight[r] * room_of(x, r);
    for (size_t i = 0; i < at(x, x->parts + 1, 0); i++)
        bound->rest[i] = NEVER;
    bound->rest[at(x, x->parts, x->blocks)] = 0;
    for (int part = x->parts - 1; part >= 0; part--)
        for (int from = part; from <= last_of(x, part); from++) {
            int64_t *least = &bound->rest[at(x, part, from)];
            for (int to = from + 1; to <= x->furthest[at(x, part, from)]; to++) {
                int64_t rest = bound->rest[at(x, part + 1, to)];
                rest += rest < *least ? weigh(x, bound->weight, part, from, to) : 0;
                *least = rest < *least ? rest : *least;
            }
        }
}

/* The partition of the shortest way. */
static void
trace(prover *x, const relaxation *bound)
{
    x->boundary[0] = 0;
    for (int part = 0; part < x->parts; part++) {
        int from = x->boundary[part], to = from + 1;
        int64_t left = bound->rest[at(x, part, from)];
        while (bound->rest[at(x, part + 1, to)] == NEVER ||
               bound->rest[at(x, part + 1, to)] + weigh(x, bound->weight, part, from, to) != left)
            to++;
        x->boundary[part + 1] = to;
    }
}

static void
make_whole(const prover *x, const double *share, int32_t *weight)
{
    for (int r = 0; r < x->ranks; r++)
        weight[r] = (int32_t)(share[r] * x->whole);
}

/* More weight on what the last partition filled too much. */
static void
share_anew(prover *x, int round)
{
    double most = 1.0, sum = 0.0;
    for (int r = 0; r < x->ranks; r++)
        most = fmax(most, fabs((double)(x->bytes[r] - x->limit)));
    for (int r = 0; r < x->ranks; r++)
        sum += x->share[r] *= exp((double)(x->bytes[r] - x->limit) / most / sqrt(1.0 + round));
    for (int r = 0; r < x->ranks; r++)
        x->share[r] /= sum;
}

/* Look for weights under which the ranks have too little room for any partition (TP_NO), or else exclude as many as they can.
 * TP_YES: a partition that is least under some weights fits. */
static tp_answer
look_for_weights(prover *x, double *best)
{
    relaxation *bound = &x->bound[x->ranks];
    double most = 0.0;
    for (int r = 0; r < x->ranks; r++)
        x->share[r] = best[r] = 1.0 / x->ranks;
    for (int round = 0; round < ROUNDS && !is_too_much(x); round++) {
        make_whole(x, x->share, bound->weight);
        relax(x, bound);
        int64_t rest = bound->rest[0];
        if (rest > bound->room)
            return TP_NO;
        trace(x, bound);
        if (tp_engine_sizes_count(x->sizes, x->boundary, x->bytes) <= x->limit)
            return TP_YES;
        if ((double)rest > most * (double)bound->room) {
            most = (double)rest / (double)bound->room;
            memcpy(best, x->share, (size_t)x->ranks * sizeof *best);
        }
        share_anew(x, round);
    }
    make_whole(x, best, bound->weight);
    relax(x, bound);
    return TP_UNKNOWN;
}

static void
bound_ranks(prover *x)
{
    for (int r = 0; r < x->ranks && !is_too_much(x); r++) {
        memset(x->bound[r].weight, 0, (size_t)x->ranks * sizeof *x->bound[r].weight);
        x->bound[r].weight[r] = 1;
        relax(x, &x->bound[r]);
    }
}

/* ---- all partitions that no bound excludes ------------------------------------------------------------------------------- */

static void
pay(prover *x, int rank, int64_t bytes)
{
    x->bound[rank].room -= bytes;
    x->bound[x->ranks].room -= x->bound[x->ranks].weight[rank] * bytes;
}

static void
take(prover *x, int part, int from, int to)
{
    for (int stage = part; stage < x->stages; stage += x->parts) {
        tp_engine_size size = size_of(x, stage, from, to);
        int r = rank_of(x, stage);
        x->before[stage] = x->workspace[r];
        if (size.workspace > x->workspace[r])
            x->workspace[r] = size.workspace;
        pay(x, r, size.stage + x->workspace[r] - x->before[stage]);
        if (x->sizes->host[stage] >= 0)
            pay(x, x->sizes->host[stage], size.guests);
    }
}

static void
give_back(prover *x, int part, int from, int to)
{
    for (int stage = part + (x->stages - x->parts); stage >= 0; stage -= x->parts) {
        tp_engine_size size = size_of(x, stage, from, to);
        int r = rank_of(x, stage);
        pay(x, r, -size.stage - x->workspace[r] + x->before[stage]);
        x->workspace[r] = x->before[stage];
        if (x->sizes->host[stage] >= 0)
            pay(x, x->sizes->host[stage], -size.guests);
    }
}

static int
leads_on(const prover *x, int part, int block)
{
    for (int i = x->ranks; i >= 0; i--)
        if (x->bound[i].rest[at(x, part, block)] > x->bound[i].room)
            return 0;
    return 1;
}

static tp_answer
go_on(prover *x, int part)
{
    tp_answer answer = TP_NO;
    int from = x->boundary[part];
    if (part == x->parts)
        return TP_YES;
    for (int to = x->furthest[at(x, part, from)]; to > from && answer == TP_NO; to--) {
        x->boundary[part + 1] = to;
        take(x, part, from, to);
        if (leads_on(x, part + 1, to))
            answer = is_too_much(x) ? TP_UNKNOWN : go_on(x, part + 1);
        give_back(x, part, from, to);
    }
    return answer;
}

/* By bounds alone, and what they come by. */
static tp_answer
exclude(prover *x, double *best)
{
    look_at_singles(x);
    for (int r = 0; r < x->ranks; r++)
        if (x->single[r] > room_of(x, r))
            return TP_NO;
    look_how_far(x);
    if (is_too_much(x))
        return TP_UNKNOWN;
    tp_answer answer = look_for_weights(x, best);
    if (answer != TP_UNKNOWN)
        return answer;
    bound_ranks(x);
    return is_too_much(x) || leads_on(x, 0, 0) ? TP_UNKNOWN : TP_NO;
}

static tp_answer
go_on_for(prover *x, int64_t sizes)
{
    x->boundary[0] = 0;
    x->most = sizes < MOST_SIZES ? sizes : MOST_SIZES;
    return is_too_much(x) ? TP_UNKNOWN : go_on(x, 0);
}

static tp_status
prove(prover *x, double *best, tp_answer *answer)
{
    *answer = exclude(x, best);
    if (*answer == TP_UNKNOWN)
        *answer = go_on_for(x, x->work + FEW_SIZES);
    if (*answer == TP_UNKNOWN)
        TP_TRY(tp_engine_find_chunks(x->sizes, x->limit, MOST_SUMS, x->boundary, answer));
    if (*answer == TP_UNKNOWN)
        *answer = go_on_for(x, MOST_SIZES);
    return TP_OK;
}

/* ---- room for it --------------------------------------------------------------------------------------------------------- */

static void
prover_close(prover *x)
{
    for (int i = 0; x->bound != NULL && i <= x->ranks; i++) {
        free(x->bound[i].weight);
        free(x->bound[i].rest);
    }
    free(x->bound);
    free(x->least);
    free(x->single);
    free(x->share);
    free(x->furthest);
}

static int
take_room(prover *x)
{
    size_t ranks = (size_t)x->ranks, stages = (size_t)x->stages, cells = at(x, x->parts + 1, 0);
    x->bound = calloc(ranks + 1, sizeof *x->bound);
    x->least = calloc(stages, sizeof *x->least);
    x->single = calloc(3 * ranks + stages, sizeof *x->single);
    x->share = calloc(2 * ranks, sizeof *x->share);
    x->furthest = calloc(cells, sizeof *x->furthest);
    if (x->bound == NULL || x->least == NULL || x->single == NULL || x->share == NULL || x->furthest == NULL)
        return 0;
    x->workspace = x->single + ranks;
    x->bytes = x->workspace + ranks;
    x->before = x->bytes + ranks;
    for (size_t i = 0; i <= ranks; i++) {
        x->bound[i].weight = calloc(ranks, sizeof *x->bound[i].weight);
        x->bound[i].rest = calloc(cells, sizeof *x->bound[i].rest);
        if (x->bound[i].weight == NULL || x->bound[i].rest == NULL)
            return 0;
    }
    return 1;
}

tp_status
tp_engine_find_within(tp_engine_sizes *sizes, int64_t limit, int32_t *boundary, tp_answer *answer)
{
    const tp_program *program = sizes->config.program;
    prover x = {.sizes = sizes, .boundary = boundary, .limit = limit, .blocks = sizes->blocks, .ranks = program->ranks, .most = MOST_SIZES,
                .stages = program->stages, .parts = tp_program_copy_stages(program)};
    tp_status status = tp_engine_find_chunks(sizes, limit, FEW_SUMS, boundary, answer);
    if (status == TP_OK && *answer == TP_UNKNOWN)
        status = tp_engine_find_pairs(sizes, limit, NULL, INFINITY, boundary, answer);
    if (status != TP_OK || *answer != TP_UNKNOWN)
        return status;
    x.whole = fmin(WHOLE, (double)NEVER / (2.0 * x.stages * (double)limit)); /* a stage weighs on its rank and on its host */
    if (x.whole < 1.0 || at(&x, x.parts + 1, 0) > MOST_CELLS / ((size_t)x.ranks + 1))
        return TP_OK;
    status = take_room(&x) ? prove(&x, x.share + x.ranks, answer)
                           : tp_fail(TP_EMEMORY, "no memory to look for stages of %d ranks", x.ranks);
    prover_close(&x);
    return status == TP_OK ? tp_deadline_check_told() : status;
}
