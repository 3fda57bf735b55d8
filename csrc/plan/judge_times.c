/* The durations of a candidate's program (csrc/plan/judge.h), from the cost tables. */
#include "csrc/plan/judge_core.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/model/waits.h"

enum { F, I, W, UPDATE, SUMS, GATHER, BESIDE, LAST, EXCHANGE, LINK, LINK_BACK, COPY, AGAIN, WHOLE };
/* Of the halves of forwards, behind the whole's; or of guests. */
enum { F_FIRST = WHOLE, F_SECOND, LINK_FIRST, LINK_SECOND, COPY_FIRST, COPY_SECOND, SPARE_I, SPARE_W, ALL };
enum { GUEST = WHOLE, GUEST_COPY, WITH_GUESTS };

static double *
table_of(const tp_judge *judge, int table)
{
    return judge->table + table * judge->cells;
}

/* Stages of all copies of the model. */
static int
rows_of(const tp_judge *judge, int order)
{
    return tp_judge_copies(order) * judge->stages;
}

/* ---- what is asked ------------------------------------------------------------------------------------------------------- */

/* Refuse a candidate whose copies of the model have different micro-batches. */
static tp_status
check_copies(const tp_candidate *c)
{
    int32_t half = c->micros / 2;
    int64_t units = 0, at = 0;
    for (int32_t q = 0; q < half; q++)
        units += c->slices[q];
    for (int32_t q = 0; q < half; at += c->slices[q++])
        if (c->batches[q] != c->batches[half + q] || c->slices[q] != c->slices[half + q] ||
            memcmp(c->lengths + at, c->lengths + units + at, (size_t)c->slices[q] * sizeof *c->lengths) != 0)
            return tp_fail(TP_EVALUE, "micro-batches %d and %d differ: the copies of the model have the same", (int)q, (int)(half + q));
    return TP_OK;
}

/* *units: all slices. */
static tp_status
check_candidate(const tp_judge *judge, const tp_candidate *c, int64_t *units)
{
    *units = 0;
    if (c->order < 0 || c->order >= TP_ORDERS || c->order == TP_ZB_V)
        return tp_fail(TP_EVALUE, "order is %d: 0 to %d would be right", c->order, TP_ORDERS - 1);
    if (c->micros < 1 || c->micros > 65536)
        return tp_fail(TP_EVALUE, "%d micro-batches: 1 to 65536 would be right", (int)c->micros);
    for (int32_t q = 0; q < c->micros; q++) {
        if (c->slices[q] < 1 || (c->order == TP_ORDER_SLICED && c->slices[q] > 1))
            return tp_fail(TP_EVALUE, "micro-batch %d has %d slices", (int)q, (int)c->slices[q]);
        *units += c->slices[q];
    }
    if (c->boundary[0] != 0 || c->boundary[judge->stages] != judge->asked.blocks)
        return tp_fail(TP_EVALUE, "the stages cover blocks [%d, %d): [0, %d) would be right", (int)c->boundary[0],
                       (int)c->boundary[judge->stages], judge->asked.blocks);
    for (int k = 0; k < judge->stages; k++)
        if (c->boundary[k + 1] <= c->boundary[k])
            return tp_fail(TP_EVALUE, "stage %d has no block", k);
    if (c->pending <= TP_JUDGE_WITHIN)
        return tp_judge_copies(c->order) > 1 ? check_copies(c) : TP_OK;
    if (c->pending < 0 && c->order != TP_LOOPED_BFS)
        return tp_fail(TP_EVALUE, "pending is %d: 0 (W right behind I) or more would be right", c->pending);
    if (c->order == TP_ORDER_BPIPE && c->pending != 0)
        return tp_fail(TP_EVALUE, "pending is %d: 0 would be right where activations are another rank's guests", c->pending);
    if (c->order == TP_ORDER_PIPEDREAM && c->pending != 0)
        return tp_fail(TP_EVALUE, "pending is %d: 0 would be right where each micro-batch has its update", c->pending);
    return tp_judge_copies(c->order) > 1 ? check_copies(c) : TP_OK;
}

static tp_status
make_room(tp_judge *judge, int64_t units, const tp_candidate *c)
{
    int64_t cells = units * rows_of(judge, c->order);
    int tables = c->order == TP_ORDER_SLICED ? ALL : c->order == TP_ORDER_BPIPE ? WITH_GUESTS : WHOLE;
    if (cells > judge->cells || tables > judge->tables) {
        cells = cells > judge->cells ? cells : judge->cells;
        tables = tables > judge->tables ? tables : judge->tables;
        double *memory = calloc((size_t)cells * (size_t)tables, sizeof *memory);
        if (memory == NULL)
            return tp_fail(TP_EMEMORY, "no memory for the durations of %lld operations", (long long)cells);
        free(judge->table);
        judge->table = memory;
        judge->cells = cells;
        judge->tables = tables;
    }
    if (c->micros > judge->micros) {
        free(judge->halved);
        free(judge->left_s);
        judge->micros = 0;
        judge->halved = malloc((size_t)c->micros * sizeof *judge->halved);
        judge->left_s = malloc((size_t)c->micros * sizeof *judge->left_s);
        if (judge->halved == NULL || judge->left_s == NULL)
            return tp_fail(TP_EMEMORY, "no memory for %d micro-batches", (int)c->micros);
        judge->micros = c->micros;
    }
    return TP_OK;
}

/* ---- work ---------------------------------------------------------------------------------------------------------------- */

/* The replicas' ring over so many parameters. */
static double
ring_s(const tp_judge_costs *costs, int more, double params)
{
    return params > 0.0 ? costs->ring_s[more] + costs->ring_param_s[more] * params : 0.0;
}

/* Of the stage's block that goes back last, of those that are no embedding and no head. */
static double
last_params(const tp_judge *judge, const tp_candidate *c, int stage)
{
    for (int32_t i = c->boundary[stage]; i < c->boundary[stage + 1]; i++)
        if (judge->asked.kind[i] == TP_ATTENTION || judge->asked.kind[i] == TP_FFN)
            return judge->asked.costs.params[judge->asked.kind[i]];
    return 0.0;
}

static void
time_updates(tp_judge *judge, const tp_candidate *c, int64_t units)
{
    const tp_judge_costs *costs = &judge->asked.costs;
    int more = tp_judge_copies(c->order) - 1;
    double rows = 0.0;
    int64_t u = 0;
    for (int32_t q = 0; q < c->micros / (more + 1); q++)
        for (int32_t s = 0; s < c->slices[q]; s++)
            rows += (double)c->batches[q] * (double)c->lengths[u++];
    memset(judge->blocks, 0, (size_t)judge->stages * TP_BLOCK_KINDS * sizeof *judge->blocks);
    for (int k = 0; k < judge->stages; k++) {
        int32_t *count = judge->blocks + k * TP_BLOCK_KINDS;
        for (int32_t i = c->boundary[k]; i < c->boundary[k + 1]; i++)
            count[judge->asked.kind[i]]++;
        double params = 0.0;
        for (int kind = 0; kind < TP_BLOCK_KINDS; kind++)
            params += count[kind] * costs->params[kind];
        int ends = count[TP_HEAD] - count[TP_EMBEDDING]; /* 1, -1: the two of a tied weight */
        params += ends * costs->copied;
        double inner = count[TP_ATTENTION] * costs->params[TP_ATTENTION] + count[TP_FFN] * costs->params[TP_FFN];
        int beside = costs->beside && more == 0;
        double ring = ring_s(costs, more, beside ? params - inner : params);
        double gather = params > 0.0 ? costs->gather_s[more] + costs->gather_param_s[more] * params : 0.0;
        table_of(judge, BESIDE)[k * units] = beside ? ring_s(costs, more, inner) : 0.0;
        table_of(judge, LAST)[k * units] = beside ? ring_s(costs, more, last_params(judge, c, k)) : 0.0;
        /* Only a stage's first cell of UPDATE, SUMS, GATHER, BESIDE, LAST and EXCHANGE is ever read, but where it is U's. */
        table_of(judge, UPDATE)[k * units] =
            costs->update_s + (costs->update_param_s - costs->spared_param_s[more]) * params +
            (count[TP_HEAD] > 0 ? costs->update_head_s : 0.0) + ring + gather;
        table_of(judge, SUMS)[k * units] = ring;
        table_of(judge, GATHER)[k * units] = gather;
        table_of(judge, EXCHANGE)[k * units] = costs->tied_latency_s + costs->tied_row_s * rows + costs->tied_values_s;
    }
}

/* Whether weight gradients of one sequence are made in groups (cuda/stage.h): blocks are made again. */
static int
sums_groups(const tp_judge *judge, const int32_t *remade)
{
    int64_t blocks = 0;
    for (int k = 0; remade != NULL && k < judge->stages; k++)
        blocks += remade[k * TP_BLOCK_KINDS + TP_ATTENTION] + remade[k * TP_BLOCK_KINDS + TP_FFN];
    return blocks > 0;
}

/* W of a unit, of `rows` rows, and of `heads` of the head; what `times` instructions cost besides. */
static void
put_weights(const tp_judge *judge, const tp_candidate *c, int32_t q, double times, double rows, double heads, int64_t unit,
            int64_t units)
{
    const tp_cost *cost = judge->asked.costs.cost;
    double seconds[TP_BLOCK_KINDS];
    for (int kind = 0; kind < TP_BLOCK_KINDS; kind++) {
        double own = kind == TP_HEAD ? heads : rows;
        seconds[kind] = own > 0.0 ? tp_cost_seconds(&cost->curve[kind][TP_COST_W], own, 0.0, c->batches[q]) : 0.0;
    }
    for (int k = 0; k < judge->stages; k++) {
        double *w = table_of(judge, W) + k * units + unit;
        *w = times * cost->overhead_s;
        for (int kind = 0; kind < TP_BLOCK_KINDS; kind++)
            *w += judge->blocks[k * TP_BLOCK_KINDS + kind] * seconds[kind];
    }
}

/* W of a micro-batch is made with its first slice, of all its rows at once; of one sequence in groups with those that they begin in,
 * but for the head's. */
static void
gather_weights(const tp_judge *judge, const tp_candidate *c, int64_t units, int groups)
{
    const int32_t *length = c->lengths;
    int64_t unit = 0;
    for (int32_t q = 0; q < c->micros; length += c->slices[q++]) {
        int apart = groups && c->batches[q] == 1 && c->slices[q] > 1;
        int64_t total = 0, begin = 0, from = 0;
        for (int32_t s = 0; s < c->slices[q]; s++)
            total += length[s];
        for (int32_t s = 0; s < c->slices[q]; s++, unit++) {
            begin += length[s];
            int64_t end = s + 1 < c->slices[q] ? tp_groups_begin(TP_CUDA_WEIGHT_ROWS, total, s + 1, begin) : total;
            double all = s == 0 ? (double)total : 0.0, times = s == 0 ? (double)c->slices[q] : 0.0;
            put_weights(judge, c, q, apart ? 1.0 : times, apart ? (double)(end - from) : all, all, unit, units);
            from = end;
        }
    }
}

const uint8_t *
tp_judge_again(const tp_judge *judge, const tp_candidate *c)
{
    return c->recompute != NULL ? c->recompute : judge->asked.recompute;
}

/* NULL: of no block. */
static const int32_t *
count_remade(tp_judge *judge, const tp_candidate *c)
{
    const uint8_t *again = tp_judge_again(judge, c);
    if (again == NULL)
        return NULL;
    memset(judge->remade, 0, (size_t)judge->stages * TP_BLOCK_KINDS * sizeof *judge->remade);
    for (int k = 0; k < judge->stages; k++)
        for (int32_t i = c->boundary[k]; i < c->boundary[k + 1]; i++)
            judge->remade[k * TP_BLOCK_KINDS + judge->asked.kind[i]] += again[i] != 0;
    return judge->remade;
}

void
tp_judge_look(tp_judge *judge, const tp_program *program)
{
    judge->looked = NULL;
    if (program == NULL || judge->asked.recompute == NULL || !judge->asked.keeps_keys)
        return;
    for (int v = 0; v < program->stages; v++)
        judge->apart[v] = (uint8_t)tp_program_remakes_apart(program, v);
    judge->looked = program;
}

/* NULL: nothing is kept. */
static const uint8_t *
find_keys(tp_judge *judge, const tp_candidate *c, const tp_program *program)
{
    int stages = rows_of(judge, c->order), attentions = 0;
    for (int k = 0; k < judge->stages; k++)
        attentions += judge->remade[k * TP_BLOCK_KINDS + TP_ATTENTION];
    if (attentions == 0 || !judge->asked.keeps_keys)
        return NULL;
    for (int v = 0; v < stages; v++)
        judge->keys[v] = (uint8_t)((program == judge->looked ? judge->apart[v] : tp_program_remakes_apart(program, v))
                                       ? judge->asked.keeps_keys
                                       : 0);
    return judge->keys;
}

tp_status
tp_judge_time_again(tp_judge *judge, const tp_candidate *c, const tp_program *program, tp_durations *out)
{
    if (tp_judge_again(judge, c) == NULL)
        return TP_OK;
    const uint8_t *keys = find_keys(judge, c, program);
    int64_t units = 0;
    out->seconds[TP_OP_R] = table_of(judge, AGAIN);
    for (int32_t q = 0; q < c->micros; q++)
        units += c->slices[q];
    for (int copy = 0; copy < tp_judge_copies(c->order); copy++)
        TP_TRY(tp_cost_recompute(judge->asked.costs.cost, judge->stages, judge->remade, keys == NULL ? NULL : keys + copy * judge->stages,
                                 c->micros, c->batches, c->slices, c->lengths,
                                 table_of(judge, AGAIN) + copy * judge->stages * units));
    return TP_OK;
}

/* To every micro-batch, with the head's rows that wait for its own update. */
static void
repeat_updates(const tp_judge *judge, const tp_candidate *c, int64_t units)
{
    for (int k = 0; k < judge->stages; k++) {
        double *update = table_of(judge, UPDATE) + k * units, each = update[0];
        int heads = judge->blocks[k * TP_BLOCK_KINDS + TP_HEAD] > 0;
        for (int32_t q = 0; q < c->micros; q++)
            for (int32_t s = 0; s < c->slices[q]; s++)
                *update++ = each + (heads ? judge->left_s[q] : 0.0);
    }
}

/* Seconds of the engine's work on the stages of one copy of the model. */
static tp_status
time_work(tp_judge *judge, const tp_candidate *c, int64_t units, tp_durations *out)
{
    static const struct {
        int op, table;
    } ops[] = {{TP_OP_F, F}, {TP_OP_I, I}, {TP_OP_W, W}, {TP_OP_OPT, UPDATE}, {TP_OP_AR, EXCHANGE}};
    time_updates(judge, c, units);
    const int32_t *remade = count_remade(judge, c);
    int apart = c->order == TP_ORDER_PIPEDREAM, copies = apart ? (int)c->micros : tp_judge_copies(c->order);
    TP_TRY(tp_cost_durations(judge->asked.costs.cost, judge->stages, judge->blocks, remade, copies, c->micros, c->batches, c->slices,
                             c->lengths, table_of(judge, F), table_of(judge, I), table_of(judge, W), judge->left_s));
    if (apart)
        repeat_updates(judge, c, units);
    for (int k = 0; k < judge->stages && !apart; k++)
        if (judge->blocks[k * TP_BLOCK_KINDS + TP_HEAD] > 0)
            table_of(judge, UPDATE)[k * units] += judge->left_s[0];
    if (judge->asked.costs.whole_weights)
        gather_weights(judge, c, units, sums_groups(judge, remade));
    for (size_t n = 0; n < sizeof ops / sizeof ops[0]; n++)
        out->seconds[ops[n].op] = table_of(judge, ops[n].table);
    if (apart) {
        out->seconds[TP_OP_U] = out->seconds[TP_OP_OPT];
        out->seconds[TP_OP_OPT] = NULL;
    } else {
        out->sum_s = table_of(judge, SUMS);
        out->gather_s = table_of(judge, GATHER);
        if (judge->asked.costs.beside && tp_judge_copies(c->order) == 1) {
            out->beside_s = table_of(judge, BESIDE);
            out->last_s = table_of(judge, LAST);
        }
    }
    return TP_OK;
}

/* The second copy's stages take as long as the first's. */
static void
repeat_work(const tp_judge *judge, int64_t units)
{
    static const int tables[] = {F, I, W, UPDATE, SUMS, GATHER, EXCHANGE};
    int64_t cells = judge->stages * units;
    for (size_t n = 0; n < sizeof tables / sizeof tables[0]; n++)
        memcpy(table_of(judge, tables[n]) + cells, table_of(judge, tables[n]), (size_t)cells * sizeof(double));
}

/* ---- messages ------------------------------------------------------------------------------------------------------------ */

static int
home(const tp_judge *judge, int order, int stage)
{
    int ranks = judge->asked.ranks, turn = stage % (2 * ranks);
    if (order == TP_ORDER_ZB_V || order == TP_ORDER_DUALPIPE_V || order == TP_ORDER_HANAYO || order == TP_ORDER_CHIMERA)
        return turn < ranks ? turn : 2 * ranks - 1 - turn;
    return stage % ranks;
}

/* Do messages between this stage and the next leave the node? */
static int
is_far(const tp_judge *judge, int order, int stage)
{
    if (judge->asked.costs.far == NULL || (stage + 1) % judge->stages == 0)
        return 0;
    int here = home(judge, order, stage), there = home(judge, order, stage + 1), least = here < there ? here : there;
    if (here == there)
        return 0;
    return judge->asked.costs.far[abs(here - there) > 1 ? judge->asked.ranks - 1 : least];
}

static void
time_row(const tp_judge *judge, const tp_candidate *c, const int32_t *batches, int far, double *link, double *copy)
{
    const tp_judge_costs *costs = &judge->asked.costs;
    double latency_s = far ? costs->far_latency_s : costs->latency_s, byte_s = far ? costs->far_byte_s : costs->byte_s;
    int64_t u = 0;
    for (int32_t q = 0; q < c->micros; q++)
        for (int32_t s = 0; s < c->slices[q]; s++, u++) {
            double bytes = costs->row_bytes * (double)batches[q] * (double)c->lengths[u];
            link[u] = latency_s + byte_s * bytes;
            copy[u] = costs->read_byte_s * bytes;
        }
}

static void
time_messages(const tp_judge *judge, const tp_candidate *c, const int32_t *batches, int64_t units, double *link, double *copy)
{
    int like[2] = {-1, -1}; /* a stage whose messages stay, and one whose leave */
    for (int k = 0; k < rows_of(judge, c->order); k++) {
        int far = is_far(judge, c->order, k);
        if (like[far] < 0) {
            like[far] = k;
            time_row(judge, c, batches, far, link + k * units, copy + k * units);
        } else {
            memcpy(link + k * units, link + like[far] * units, (size_t)units * sizeof *link);
            memcpy(copy + k * units, copy + like[far] * units, (size_t)units * sizeof *copy);
        }
    }
}

/* Links carry one message at a time, unless a message's bytes take no time. */
static void
time_links(tp_judge *judge, int order, tp_durations *out)
{
    const tp_judge_costs *costs = &judge->asked.costs;
    int rows = rows_of(judge, order);
    if (!(costs->byte_s > 0.0) && costs->far == NULL)
        return;
    for (int k = 0; k < rows; k++)
        judge->latency_s[k] = is_far(judge, order, k) ? costs->far_latency_s : costs->latency_s;
    for (int k = 0; k < rows; k++) /* back over the same link */
        judge->latency_s[rows + k] = k > 0 && costs->far != NULL ? judge->latency_s[k - 1] : costs->latency_s;
    out->latency_s = judge->latency_s;
}

static void
time_way(tp_judge *judge, const tp_candidate *c, int64_t units, tp_durations *out)
{
    double *link = table_of(judge, LINK), *back = table_of(judge, LINK_BACK);
    time_messages(judge, c, c->batches, units, link, table_of(judge, COPY));
    out->comm_unit_s = link;
    time_links(judge, c->order, out);
    if (judge->asked.costs.far != NULL) { /* a first stage's are never read */
        memcpy(back + units, link, (size_t)(units * (rows_of(judge, c->order) - 1)) * sizeof *back);
        out->back_comm_unit_s = back;
    }
    const double *copy = judge->asked.costs.read_byte_s > 0.0 ? table_of(judge, COPY) : NULL;
    out->seconds[TP_OP_RF] = out->seconds[TP_OP_RB] = copy;
    out->seconds[TP_OP_SF] = out->seconds[TP_OP_SB] = judge->asked.costs.lent ? NULL : copy;
}

/* Which of their rows wait for d(weight) goes by how many forwards are halved: each half pays for its own. */
static tp_status
time_halves(tp_judge *judge, const tp_candidate *c, int64_t units, tp_durations *out)
{
    tp_cost cost = *judge->asked.costs.cost;
    cost.waits.flush_s = 0.0;
    for (int half = 0; half < 2; half++) {
        double *forward = table_of(judge, F_FIRST + half), *copy = table_of(judge, COPY_FIRST + half);
        for (int32_t q = 0; q < c->micros; q++) {
            int32_t size = (c->batches[q] + 1 - half) / 2;
            judge->halved[q] = size > 1 ? size : 1;
        }
        TP_TRY(tp_cost_durations(&cost, judge->stages, judge->blocks, NULL, 1, c->micros, judge->halved, c->slices, c->lengths,
                                 forward, table_of(judge, SPARE_I), table_of(judge, SPARE_W), NULL));
        time_messages(judge, c, judge->halved, units, table_of(judge, LINK_FIRST + half), copy);
        out->half_s[half][TP_OP_F] = forward;
        out->half_comm_s[half] = table_of(judge, LINK_FIRST + half);
        copy = judge->asked.costs.read_byte_s > 0.0 ? copy : NULL;
        out->half_s[half][TP_OP_RF] = copy;
        out->half_s[half][TP_OP_SF] = judge->asked.costs.lent ? NULL : copy;
    }
    return TP_OK;
}

/* ---- guests -------------------------------------------------------------------------------------------------------------- */

/* Bytes of a micro-batch's activations of a stage as they go to another rank and back. */
static tp_status
size_guest(tp_judge *judge, const tp_candidate *c, int stage, int64_t *bytes)
{
    tp_judge_size asked = {.first = c->boundary[stage], .end = c->boundary[stage + 1]};
    for (int32_t q = 0; q < c->micros; q++)
        asked.batch = c->batches[q] > asked.batch ? c->batches[q] : asked.batch;
    for (int32_t s = 0; s < c->slices[0]; s++)
        asked.seq_len += c->lengths[s];
    tp_judge_size *known = &judge->size[(31 * asked.first + asked.end) % TP_JUDGE_SIZES];
    if (c->recompute == NULL && known->end == asked.end && known->first == asked.first && known->batch == asked.batch &&
        known->seq_len == asked.seq_len) {
        *bytes = known->bytes;
        return TP_OK;
    }
    TP_TRY(judge->asked.guest(judge->asked.context, asked.first, asked.end, asked.batch, asked.seq_len, tp_judge_again(judge, c),
                              &asked.bytes));
    *bytes = asked.bytes;
    if (c->recompute == NULL)
        *known = asked;
    return TP_OK;
}

/* Does the way from this rank to the one that keeps its guests leave the node? */
static int
guests_are_far(const tp_judge *judge, int rank)
{
    const uint8_t *far = judge->asked.costs.far;
    for (int hop = rank; far != NULL && hop < judge->asked.ranks - 1 - rank; hop++)
        if (far[hop])
            return 1;
    return 0;
}

static tp_status
time_guests(tp_judge *judge, const tp_candidate *c, int64_t units, tp_durations *out)
{
    const tp_judge_costs *costs = &judge->asked.costs;
    double *link = table_of(judge, GUEST), *copy = table_of(judge, GUEST_COPY);
    for (int k = 0; k < judge->asked.ranks / 2; k++) { /* others have none */
        int64_t bytes, u = k * units;
        int far = guests_are_far(judge, k);
        TP_TRY(size_guest(judge, c, k, &bytes));
        double latency_s = far ? costs->far_latency_s : costs->latency_s, byte_s = far ? costs->far_byte_s : costs->byte_s;
        for (int32_t q = 0; q < c->micros; u += c->slices[q++]) {
            link[u] = bytes > 0 ? latency_s + byte_s * (double)bytes : 0.0;
            copy[u] = costs->copy_byte_s * (double)bytes;
        }
    }
    out->guest_comm_s = link;
    if (costs->copy_byte_s > 0.0)
        out->seconds[TP_OP_SE] = out->seconds[TP_OP_RE] = out->seconds[TP_OP_SL] = out->seconds[TP_OP_RL] = copy;
    return TP_OK;
}

tp_status
tp_judge_time(tp_judge *judge, const tp_candidate *c, const tp_program *program, tp_durations *out)
{
    int64_t units;
    TP_TRY(check_candidate(judge, c, &units));
    TP_TRY(make_room(judge, units, c));
    *out = (tp_durations){.stage_stride = units, .unit_stride = 1};
    TP_TRY(time_work(judge, c, units, out));
    if (program != NULL)
        TP_TRY(tp_judge_time_again(judge, c, program, out));
    if (tp_judge_copies(c->order) > 1)
        repeat_work(judge, units);
    time_way(judge, c, units, out);
    if (c->order == TP_ORDER_BPIPE)
        return time_guests(judge, c, units, out);
    return c->order == TP_ORDER_SLICED ? time_halves(judge, c, units, out) : TP_OK;
}
