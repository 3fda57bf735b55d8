/* Cutting planes: the programme's solution, a partition with divided layers, is simulated. Its critical path gives an inequality
 * that holds for every partition; it is added to the programme, which is solved again. */
#include "csrc/plan/partition_bound.h"

#include <math.h>
#include <string.h>

#include "csrc/base/deadline.h"
#include "csrc/plan/arena.h"
#include "csrc/plan/bmpipe_lp.h"

enum { PATHS = 256, PHASES = TP_COST_PHASES };
enum { WIDEST = 96 };                 /* stages, of which it is said that each has a block */
enum { MOST = 4096, SIMULATED = 10 }; /* stages; multiplications that take as long as an operation of a simulation */
static const int64_t WORK = 400000000; /* multiplications */
static const double CLOSE = 1e-3;     /* relative: between the programme and the best makespan simulated */
static const int OP[PHASES] = {TP_OP_F, TP_OP_I, TP_OP_W};

typedef struct {
    const tp_partition_question *asked;
    int stages, columns, count; /* columns: attention, FFN of each stage, and the makespan; count: of paths */
    tp_sim *sim;
    tp_durations durations;
    double *load, *comm_s; /* [PHASES][stages], [stages] */
    int64_t *path;         /* [TP_OPS][stages] */
    double *run, lag_s[PATHS]; /* [PATHS][PHASES][stages] */
    tp_bmpipe_lp lp;
    int row[PATHS], *holds;   /* the programme's rows; holds: [stages] "has a block", -1: none */
    double unit;              /* seconds: of the first makespan */
    double *dense, *x, *best, *multiplier, *weight; /* [columns] three times, [room], [PHASES][stages] */
} bound;

static double
of_kind(const bound *b, tp_block_kind kind, int phase)
{
    return b->asked->seconds[kind][phase];
}

/* What a stage does whatever the partition. */
static double
always(const bound *b, int stage, int phase)
{
    return b->asked->fixed_s + (stage == 0 ? of_kind(b, TP_EMBEDDING, phase) : 0.0) +
           (stage == b->stages - 1 ? of_kind(b, TP_HEAD, phase) : 0.0);
}

static tp_status
check(const tp_partition_question *q)
{
    const double *seconds = &q->seconds[0][0];
    for (int i = 0; i < (int)TP_BLOCK_KINDS * PHASES; i++)
        if (!isfinite(seconds[i]) || seconds[i] < 0.0 || seconds[i] > 1e100)
            return tp_fail(TP_EVALUE, "a block takes %g seconds: 0 or more, and at most 1e100, would be right", seconds[i]);
    if (!(q->fixed_s >= 0.0 && q->fixed_s <= 1e100) || !(q->comm_s >= 0.0 && q->comm_s <= 1e100))
        return tp_fail(TP_EVALUE, "fixed_s and comm_s are %g and %g: 0 or more, and at most 1e100, would be right", q->fixed_s,
                       q->comm_s);
    if (q->schedule == TP_ZB_H1 || q->schedule == TP_ZB_H2 || q->schedule == TP_ZB_V)
        return tp_fail(TP_EVALUE, "schedule is %d: one that places no W would be right", (int)q->schedule);
    if (q->ranks < 1 || q->chunks < 1 || (q->chunks > 1 && q->schedule != TP_INTERLEAVED && q->schedule != TP_LOOPED_BFS))
        return tp_fail(TP_EVALUE, "%d ranks of %d chunks in schedule %d: 1 or more, several interleaved or in looped BFS, would be right",
                       q->ranks, q->chunks, (int)q->schedule);
    if (q->micros < 1 || q->micros > 65536)
        return tp_fail(TP_EVALUE, "%d micro-batches: 1 to 65536 would be right", q->micros);
    if (q->layers < 0 || q->layers > 1 << 20 || (int64_t)q->ranks * q->chunks > 2 + 2 * (int64_t)q->layers)
        return tp_fail(TP_EVALUE, "%d ranks of %d chunks and %d layers: a block for every stage would be right", q->ranks, q->chunks,
                       q->layers);
    return TP_OK;
}

static tp_status
open_order(bound *b, tp_arena *arena)
{
    const tp_partition_question *q = b->asked;
    tp_program *whole = NULL, *split = NULL;
    int32_t *slices;
    TP_ARENA_TAKE(arena, q->micros, slices);
    for (int i = 0; i < q->micros; i++)
        slices[i] = 1;
    TP_TRY(tp_program_build(q->schedule, q->ranks, q->chunks, q->micros, slices, &whole));
    tp_status status = tp_program_split(whole, &b->durations, 0, &split);
    if (status == TP_OK)
        status = tp_sim_open(split, &b->sim);
    tp_program_close(split);
    tp_program_close(whole);
    return status;
}

static tp_status
open_room(bound *b, tp_arena *arena)
{
    int stages = b->stages, room = 2 + (stages > WIDEST ? 0 : stages) + PATHS;
    TP_ARENA_TAKE(arena, PHASES * stages, b->load);
    TP_ARENA_TAKE(arena, PHASES * stages, b->weight);
    TP_ARENA_TAKE(arena, stages, b->comm_s);
    TP_ARENA_TAKE(arena, (size_t)TP_OPS * (size_t)stages, b->path);
    TP_ARENA_TAKE(arena, (size_t)PATHS * PHASES * (size_t)stages, b->run);
    TP_ARENA_TAKE(arena, stages, b->holds);
    TP_ARENA_TAKE(arena, b->columns, b->dense);
    TP_ARENA_TAKE(arena, b->columns, b->x);
    TP_ARENA_TAKE(arena, b->columns, b->best);
    TP_ARENA_TAKE(arena, room, b->multiplier);
    for (int v = 0; v < stages; v++)
        b->comm_s[v] = b->asked->comm_s;
    b->durations = (tp_durations){.stage_stride = 1, .comm_s = b->comm_s};
    for (int i = 0; i < PHASES; i++)
        b->durations.seconds[OP[i]] = b->load + i * stages;
    void *memory = NULL;
    TP_TRY(tp_arena_take(arena, tp_bmpipe_lp_bytes(b->columns, room), 1, &memory));
    for (int j = 0; j < b->columns - 1; j++) /* without ties the method does not stall */
        b->dense[j] = 1e-7 * (1.0 + (double)(j * 7919 % 1009) / 1009.0) / (1 + b->asked->layers);
    b->dense[b->columns - 1] = 1.0;
    tp_bmpipe_lp_open(&b->lp, memory, b->columns, room, b->dense);
    b->lp.work = WORK;
    memset(b->dense, 0, (size_t)b->columns * sizeof *b->dense);
    return TP_OK;
}

/* All layers are somewhere, and every stage has a block. */
static void
add_layers(bound *b)
{
    for (int kind = 0; kind < 2; kind++) {
        for (int v = 0; v < b->stages; v++)
            b->dense[kind * b->stages + v] = 1.0;
        tp_bmpipe_lp_add(&b->lp, b->dense, b->asked->layers);
        memset(b->dense, 0, (size_t)b->columns * sizeof *b->dense);
    }
    for (int v = 0; v < b->stages; v++) {
        b->holds[v] = -1;
        if (v == 0 || v == b->stages - 1 || b->stages > WIDEST)
            continue;
        b->dense[v] = b->dense[b->stages + v] = 1.0;
        b->holds[v] = tp_bmpipe_lp_add(&b->lp, b->dense, 1.0);
        b->dense[v] = b->dense[b->stages + v] = 0.0;
    }
}

/* The makespan with these blocks, and its critical path's inequality. */
static double
add_path(bound *b, const double *x)
{
    int stages = b->stages, k = b->count;
    double makespan = 0.0, sum;
    for (int i = 0; i < PHASES; i++)
        for (int v = 0; v < stages; v++)
            b->load[i * stages + v] = always(b, v, i) + x[v] * of_kind(b, TP_ATTENTION, i) + x[stages + v] * of_kind(b, TP_FFN, i);
    tp_sim_run(b->sim, &b->durations, &makespan);
    b->lp.work -= (int64_t)SIMULATED * PHASES * stages * b->asked->micros;
    if (k == PATHS || tp_deadline_was_told())
        return makespan;
    tp_sim_path(b->sim, &b->durations, b->path, &b->lag_s[k]);
    b->unit = k == 0 ? fmax(makespan, 1e-280) : b->unit;
    sum = b->lag_s[k];
    double *run = b->run + (size_t)k * PHASES * (size_t)stages;
    for (int i = 0; i < PHASES; i++)
        for (int v = 0; v < stages; v++) {
            double runs = run[i * stages + v] = (double)b->path[(size_t)OP[i] * (size_t)stages + (size_t)v];
            sum += runs * always(b, v, i);
            b->dense[v] -= runs * of_kind(b, TP_ATTENTION, i) / b->unit;
            b->dense[stages + v] -= runs * of_kind(b, TP_FFN, i) / b->unit;
        }
    b->dense[b->columns - 1] = 1.0;
    b->row[k] = tp_bmpipe_lp_add(&b->lp, b->dense, sum / b->unit);
    memset(b->dense, 0, (size_t)b->columns * sizeof *b->dense);
    b->count += b->row[k] >= 0;
    return makespan;
}

/* The bound of the programme's multipliers, whatever they are: a mix of paths, each layer where the mix has it cheapest, and a
 * price of each stage for its first block, which the layers there are paid. */
static double
evaluate(const bound *b)
{
    int stages = b->stages;
    double all = 0.0, total = 0.0;
    for (int k = 0; k < b->count; k++)
        all += b->multiplier[b->row[k]];
    if (!(all > 0.0))
        return 0.0;
    memset(b->weight, 0, (size_t)PHASES * (size_t)stages * sizeof *b->weight);
    for (int k = 0; k < b->count; k++) {
        double share = b->multiplier[b->row[k]] / all;
        const double *run = b->run + (size_t)k * PHASES * (size_t)stages;
        total += share * b->lag_s[k];
        for (int i = 0; share > 0.0 && i < PHASES * stages; i++)
            b->weight[i] += share * run[i];
    }
    double least[2] = {INFINITY, INFINITY};
    for (int v = 0; v < stages; v++) {
        double cost[2] = {0.0, 0.0}, price = b->holds[v] < 0 ? 0.0 : b->multiplier[b->holds[v]] / all * b->unit;
        for (int i = 0; i < PHASES; i++) {
            double weight = b->weight[i * stages + v];
            total += weight * always(b, v, i);
            cost[0] += weight * of_kind(b, TP_ATTENTION, i);
            cost[1] += weight * of_kind(b, TP_FFN, i);
        }
        total += price;
        for (int kind = 0; kind < 2; kind++)
            least[kind] = fmin(least[kind], cost[kind] - price);
    }
    return total + b->asked->layers * (least[0] + least[1]);
}

static double
tighten(bound *b)
{
    double found = 0.0, best_s;
    int values = b->columns - 1;
    for (int j = 0; j < values; j++)
        b->best[j] = (double)b->asked->layers / b->stages;
    best_s = add_path(b, b->best);
    while (b->count > 0 && b->count < PATHS && !tp_deadline_late()) {
        if (tp_bmpipe_lp_solve(&b->lp) != 1)
            break;
        tp_bmpipe_lp_read(&b->lp, b->x, b->multiplier);
        found = fmax(found, evaluate(b));
        double makespan = add_path(b, b->x);
        for (int j = 0; j < values; j++) /* halfway back paths are of more use than those of corners */
            b->x[j] = makespan < best_s ? b->x[j] : 0.5 * (b->x[j] + b->best[j]);
        makespan = makespan < best_s ? makespan : add_path(b, b->x);
        if (makespan < best_s) {
            best_s = makespan;
            memcpy(b->best, b->x, (size_t)values * sizeof *b->x);
        }
        if (tp_deadline_was_told() || found >= best_s * (1.0 - CLOSE))
            break;
    }
    return found * (1.0 - 1e-12);
}

tp_status
tp_partition_bound(const tp_partition_question *question, double *bound_s)
{
    tp_arena arena;
    bound b = {.asked = question};
    *bound_s = 0.0;
    TP_TRY(check(question));
    b.stages = question->ranks * question->chunks;
    b.columns = 2 * b.stages + 1;
    if (b.stages > MOST)
        return TP_OK;
    TP_TRY(tp_arena_open(&arena));
    tp_status status = open_room(&b, &arena);
    if (status == TP_OK)
        status = open_order(&b, &arena);
    if (status == TP_OK) {
        add_layers(&b);
        *bound_s = tighten(&b);
        if (tp_deadline_was_told())
            *bound_s = 0.0;
    }
    tp_sim_close(b.sim);
    tp_arena_close(&arena);
    return status;
}
