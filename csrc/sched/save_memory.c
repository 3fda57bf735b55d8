/* The passes that save memory: they add R on stages that recompute their activations, SO and SI on stages that swap them out. */
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

/* What SI brings at once on a stage: all slices of a micro-batch, or one. */
typedef struct {
    int64_t first, last; /* of the stage's newest such group: positions of its backwards until now; -1: none yet */
} group;

typedef struct {
    const tp_program *from;
    const uint8_t *again, *swapped;
    int ahead, beside;
    tp_instr *to;
    group *newest;  /* [stages] */
    int64_t *made;  /* [stages * units] position of its forward, within the rank */
    int32_t *list;  /* [positions of a rank] the first that SI brings in front of it, by the position of its backward; -1 */
    int32_t *chain; /* [positions of a rank] the next one there */
} saving;

static void
put(saving *x, const tp_instr *like, int op, int slice)
{
    unsigned flags = x->beside && op != TP_OP_R ? TP_BESIDE : 0;
    flags |= flags != 0 && op == TP_OP_SO && x->ahead == TP_SWAP_TWO ? TP_TWO_PLACES : 0;
    flags |= op == TP_OP_R && x->again[like->stage] == TP_AGAIN_WITHIN ? TP_WITHIN : 0;
    *x->to++ = (tp_instr){.op = (uint16_t)op, .stage = like->stage, .micro = like->micro, .slice = (uint16_t)slice, .peer = -1,
                          .flags = (uint16_t)flags};
}

/* What of R or SI stands before the backward `instr`. */
static void
put_all(saving *x, const tp_instr *instr, int op, int when)
{
    int first = when == TP_AGAIN_ALL ? 0 : instr->slice;
    for (int s = first; s <= instr->slice; s++)
        put(x, instr, op, s);
}

static int
begins_group(const saving *x, const tp_instr *instr, int when)
{
    return when == TP_AGAIN_SLICES || when == TP_AGAIN_WITHIN || (when == TP_AGAIN_ALL && instr->slice == x->from->slices[instr->micro] - 1);
}

/* Where SI of the group that begins at position k may stand: not before its SO. */
static int64_t
place_of(const saving *x, const tp_instr *instr, int64_t k)
{
    const group *newest = &x->newest[instr->stage];
    int64_t made = x->made[instr->stage * tp_program_units(x->from) + tp_program_unit(x->from, instr)] + 1;
    int64_t at = newest->first < 0 || x->ahead == TP_SWAP_LATE ? k
                 : x->ahead == TP_SWAP_BEHIND                  ? newest->last + 1
                                                               : newest->first;
    return at > made ? at : made;
}

/* Of a rank: which SI stand in front of which position. */
static void
place_all(saving *x, const tp_instr *code, int64_t length)
{
    memset(x->list, -1, (size_t)length * sizeof *x->list);
    for (int64_t k = 0; k < length; k++) {
        const tp_instr *i = &code[k];
        if (i->op == TP_OP_F)
            x->made[i->stage * tp_program_units(x->from) + tp_program_unit(x->from, i)] = k;
        if (!tp_sched_is_backward(i->op) || x->swapped[i->stage] == TP_AGAIN_NOT)
            continue;
        group *newest = &x->newest[i->stage];
        if (begins_group(x, i, x->swapped[i->stage])) {
            int32_t *at = &x->list[place_of(x, i, k)];
            while (*at >= 0)
                at = &x->chain[*at];
            *at = (int32_t)k;
            x->chain[k] = -1;
            newest->first = k;
        }
        newest->last = k;
    }
}

static void
save_around(saving *x, const tp_instr *code, int64_t k)
{
    const tp_instr *instr = &code[k];
    for (int32_t at = x->list[k]; at >= 0; at = x->chain[at])
        put_all(x, &code[at], TP_OP_SI, x->swapped[code[at].stage]);
    if (tp_sched_is_backward(instr->op) && begins_group(x, instr, x->again[instr->stage]))
        put_all(x, instr, TP_OP_R, x->again[instr->stage]);
    *x->to = *instr;
    x->to++->flags &= (uint16_t)~TP_OVERLAPS; /* with what may now stand between */
    if (instr->op == TP_OP_F && tp_instr_halves(instr) & TP_HALF_SECOND && x->swapped[instr->stage])
        put(x, instr, TP_OP_SO, instr->slice);
}

static tp_status
save_all(saving *x)
{
    const tp_program *p = x->from;
    int64_t longest = 1;
    for (int r = 0; r < p->ranks; r++)
        longest = p->begin[r + 1] - p->begin[r] > longest ? p->begin[r + 1] - p->begin[r] : longest;
    x->newest = malloc((size_t)p->stages * sizeof *x->newest);
    x->made = malloc((size_t)p->stages * (size_t)tp_program_units(p) * sizeof *x->made);
    x->list = malloc(2 * (size_t)longest * sizeof *x->list);
    tp_status status = TP_OK;
    if (x->newest == NULL || x->made == NULL || x->list == NULL)
        status = tp_fail(TP_EMEMORY, "no memory to save memory in %lld instructions", (long long)p->begin[p->ranks]);
    for (int v = 0; status == TP_OK && v < p->stages; v++)
        x->newest[v] = (group){.first = -1, .last = -1};
    for (int r = 0; status == TP_OK && r < p->ranks; r++) {
        const tp_instr *code = &p->code[p->begin[r]];
        int64_t length = p->begin[r + 1] - p->begin[r];
        x->chain = x->list + longest;
        place_all(x, code, length);
        for (int64_t k = 0; k < length; k++)
            save_around(x, code, k);
    }
    free(x->newest);
    free(x->made);
    free(x->list);
    return status;
}

int
tp_program_has_two_places(const tp_program *program, int stage)
{
    int rank = program->rank_of[stage];
    for (int64_t i = program->begin[rank]; i < program->begin[rank + 1]; i++)
        if (program->code[i].op == TP_OP_SO && program->code[i].stage == stage)
            return (program->code[i].flags & TP_TWO_PLACES) != 0;
    return 0;
}

int
tp_program_swaps_beside(const tp_program *program)
{
    return (tp_sched_ops(program) & TP_SCHED_HAS_BESIDE) != 0;
}

/* The most micro-batches that the stage holds at once, and whether a W waits there. begun: [micros] scratch. */
static int
held_at_once(const tp_program *program, int stage, uint8_t *begun, int *waits)
{
    int rank = program->rank_of[stage], held = 0, most = 0;
    const tp_instr *last = NULL; /* I, whose W is to come next */
    memset(begun, 0, (size_t)program->micros);
    *waits = 0;
    for (int64_t i = program->begin[rank]; i < program->begin[rank + 1]; i++) {
        const tp_instr *instr = &program->code[i];
        if (instr->stage != stage)
            continue;
        if (instr->op == TP_OP_F && !begun[instr->micro]) {
            begun[instr->micro] = 1;
            most = ++held > most ? held : most;
        }
        *waits |= last != NULL && (instr->op != TP_OP_W || instr->micro != last->micro || instr->slice != last->slice);
        last = instr->op == TP_OP_I ? instr : NULL;
        held -= (instr->op == TP_OP_B || instr->op == TP_OP_W) && instr->slice == 0;
    }
    return most;
}

static tp_status
choose_ways(const tp_program *program, const uint8_t *again, uint8_t *ways)
{
    int most = 1, waits;
    uint8_t *begun = malloc((size_t)program->micros);
    if (begun == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d micro-batches", program->micros);
    for (int q = 0; q < program->micros; q++)
        most = program->slices[q] > most ? program->slices[q] : most;
    for (int v = 0; v < program->stages; v++) {
        ways[v] = again[v];
        if (again[v] < TP_AGAIN_KEYS || again[v] == TP_AGAIN_WITHIN)
            continue;
        int held = held_at_once(program, v, begun, &waits), keys = again[v] - TP_AGAIN_KEYS;
        ways[v] = most > 1 && held <= (waits && keys > 1 ? 1 : keys) ? TP_AGAIN_SLICES : TP_AGAIN_ALL;
    }
    free(begun);
    return TP_OK;
}

static tp_status
check(const tp_program *program, const uint8_t *again, const uint8_t *swapped, int ahead)
{
    for (int v = 0; v < program->stages; v++) {
        if (swapped[v] > TP_AGAIN_SLICES)
            return tp_fail(TP_EVALUE, "stage %d swaps in way %d: 0 to %d would be right", v, swapped[v], TP_AGAIN_SLICES);
        if (again[v] == TP_AGAIN_WITHIN && (program->max_slices > 1 || tp_program_has_apart(program, v)))
            return tp_fail(TP_EVALUE, "stage %d recomputes within B (%d): B that are whole, of micro-batches of one slice, would be right",
                           v, TP_AGAIN_WITHIN);
    }
    if (ahead < TP_SWAP_LATE || ahead > TP_SWAP_TWO)
        return tp_fail(TP_EVALUE, "ahead is %d: 0 to %d would be right", ahead, TP_SWAP_TWO);
    return TP_OK;
}

tp_status
tp_program_save_memory(const tp_program *program, const uint8_t *again, const uint8_t *swapped, int ahead, int beside,
                       tp_program **out)
{
    tp_program *compute = NULL, *p = NULL;
    TP_TRY(check(program, again, swapped, ahead));
    TP_TRY(tp_program_strip(program, &compute));
    tp_status status = tp_program_check(compute);
    if (status == TP_OK && tp_sched_ops(compute) & (TP_SCHED_BIT(TP_OP_R) | TP_SCHED_BIT(TP_OP_SO) | TP_SCHED_BIT(TP_OP_SI)))
        status = tp_fail(TP_ESCHEDULE, "the program saves memory already: one without R, SO and SI would be right");
    int64_t *counts = calloc((size_t)compute->ranks + (size_t)compute->stages, sizeof *counts);
    uint8_t *ways = counts == NULL ? NULL : (uint8_t *)(counts + compute->ranks);
    if (status == TP_OK)
        status = ways == NULL ? tp_fail(TP_EMEMORY, "no memory for %d ranks", compute->ranks) : choose_ways(compute, again, ways);
    for (int i = 0; status == TP_OK && i < compute->ranks; i++)
        counts[i] = compute->begin[i + 1] - compute->begin[i];
    for (int v = 0; status == TP_OK && v < compute->stages; v++)
        counts[compute->rank_of[v]] += ((again[v] != 0) + 2 * (swapped[v] != 0)) *
                                       (compute->offset[tp_program_micro_end(compute, v)] -
                                        compute->offset[tp_program_micro_begin(compute, v)]);
    if (status == TP_OK)
        status = tp_sched_open_like(compute, counts, &p);
    if (status == TP_OK) {
        saving x = {.from = compute, .again = ways, .swapped = swapped, .ahead = ahead, .beside = beside, .to = p->code};
        status = save_all(&x);
    }
    if (status == TP_OK)
        *out = p;
    else
        tp_program_close(p);
    free(counts);
    tp_program_close(compute);
    return status;
}

int
tp_program_remakes_apart(const tp_program *program, int stage)
{
    const tp_instr *last = NULL;
    int rank = program->rank_of[stage];
    if (program->max_slices == 1)
        return 0;
    for (int64_t i = program->begin[rank]; i < program->begin[rank + 1]; i++) {
        const tp_instr *instr = &program->code[i];
        if (instr->stage != stage || (instr->op != TP_OP_R && instr->op != TP_OP_B && instr->op != TP_OP_I))
            continue;
        if (instr->op == TP_OP_R && instr->slice > 0 &&
            (last == NULL || last->op != TP_OP_R || last->micro != instr->micro || last->slice != instr->slice - 1))
            return 1;
        last = instr;
    }
    return 0;
}
