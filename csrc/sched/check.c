/* The proof, rule by rule. One pass over each rank's list with a count per (stage, micro-batch): slices have one order, so
 * "exactly once, in order" is a comparison with the next one expected. */
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

/* Forward messages count by halves: the whole is both. */
enum { SENT_F = TP_HALVES, POSTED_F = TP_HALVES << 2, SENT_B = 16, POSTED_B = 32, AGAIN = 64, OUT = 128, IN = 256, RENEWED = 512 };

typedef struct {
    const tp_program *p;
    int lowered;
    int32_t *forward;            /* [stages * micros] slices whose F is done */
    uint8_t *cut;                /* [stages * micros] flags of its F: halves done, joined */
    int32_t *backward, *weights; /* [stages * micros] slices whose B|I, B|W is done: the last ones */
    int64_t *messages;           /* [stages] SF, RF, SB, RB seen, in halves of a message */
    uint16_t *bits;              /* [stages * units] of the stage that the instruction names */
    uint8_t *reduced, *updated;  /* [stages] AR, OPT seen */
    int32_t *renewed;            /* [stages] U seen */
    uint8_t *within;             /* [stages] R seen: 1 within B, 2 before it */
    int halved;                  /* some F is of a half */
    unsigned ways;               /* of swaps seen: 1 by the rank, 2 beside its work; of SO: 4 from one place, 8 from two */
    int overlaps;                /* the op before was marked: 1 a forward, 2 a backward */
    int ending;                  /* the current rank has come to its AR and OPT: 1, 2 */
    int64_t asked;               /* steps since somebody was asked whether to stop */
} proof;

/* Cell of a [stages * micros] table. */
static int64_t
cell_of(const proof *x, const tp_instr *i)
{
    return (int64_t)i->stage * x->p->micros + i->micro;
}

/* Slices descend: is this one among the `done` last ones of its micro-batch? */
static int
is_done(const proof *x, const tp_instr *i, int32_t done)
{
    return i->slice >= x->p->slices[i->micro] - done;
}

static uint16_t *
bits_at(const proof *x, const tp_instr *i)
{
    return &x->bits[i->stage * tp_program_units(x->p) + tp_program_unit(x->p, i)];
}

static tp_status
rule_flags(const tp_program *p, int rank, int64_t at, const tp_instr *i)
{
    unsigned may = i->op == TP_OP_F                         ? TP_HALVES | TP_HALF_JOINED | TP_OVERLAPS
                   : i->op == TP_OP_SF || i->op == TP_OP_RF ? TP_HALVES
                   : tp_sched_is_backward(i->op)            ? TP_OVERLAPS
                   : i->op == TP_OP_SO                      ? (i->flags & TP_BESIDE ? TP_BESIDE | TP_TWO_PLACES : 0)
                   : i->op == TP_OP_SI                      ? TP_BESIDE
                   : i->op == TP_OP_R                       ? TP_WITHIN
                                                            : 0;
    if ((i->flags & ~may) || (i->flags & TP_HALVES) == TP_HALVES || (i->flags & (TP_HALVES | TP_HALF_JOINED)) == TP_HALF_JOINED)
        return tp_sched_refuse(p, rank, at, "its flags are %u: no such half of a %s", i->flags, tp_op_name(i->op));
    if ((i->flags & TP_HALVES) && p->slices[i->micro] > 1)
        return tp_sched_refuse(p, rank, at, "micro-batch %d has %d slices: halves are of a micro-batch of one", i->micro,
                               p->slices[i->micro]);
    return TP_OK;
}

static int
talks(int op)
{
    return (op >= TP_OP_SF && op <= TP_OP_RB) || tp_sched_is_guest(op) || op == TP_OP_AR;
}

/* Of two copies of the model each has its own micro-batches. */
static tp_status
rule_copy(const tp_program *p, int rank, int64_t at, const tp_instr *i)
{
    int begin = tp_program_micro_begin(p, i->stage), end = tp_program_micro_end(p, i->stage);
    if (i->op < TP_OP_AR && (i->micro < begin || i->micro >= end))
        return tp_sched_refuse(p, rank, at, "stage %d is of the %s copy of the model, which has micro-batches %d to %d", i->stage,
                               begin ? "second" : "first", begin, end - 1);
    if (i->flags & TP_HALVES)
        return tp_sched_refuse(p, rank, at, "halves of a micro-batch go through one copy of the model, not through two");
    return TP_OK;
}

static tp_status
rule_place(const proof *x, int rank, int64_t at, const tp_instr *i)
{
    const tp_program *p = x->p;
    if (i->op >= TP_OPS || i->stage >= p->stages || i->micro >= p->micros || i->slice >= p->slices[i->micro])
        return tp_sched_refuse(p, rank, at, "no such instruction in a program of %d stages and %d micro-batches",
                               p->stages, p->micros);
    if (p->rank_of[i->stage] != rank && !tp_sched_is_host(i->op))
        return tp_sched_refuse(p, rank, at, "stage %d lives on rank %d", i->stage, p->rank_of[i->stage]);
    if (p->copies > 1)
        TP_TRY(rule_copy(p, rank, at, i));
    if (i->peer != -1 && !talks(i->op))
        return tp_sched_refuse(p, rank, at, "it talks to no other rank, but its peer is %d: -1 would be right", i->peer);
    return i->flags == 0 ? TP_OK : rule_flags(p, rank, at, i);
}
/* a, then b, both joined or both apart; or the whole. */
static tp_status
rule_half(const proof *x, int rank, int64_t at, const tp_instr *i)
{
    unsigned done = x->cut[(int64_t)i->stage * x->p->micros + i->micro];
    if (done & i->flags & TP_HALVES)
        return tp_sched_refuse(x->p, rank, at, "this half of the forward is done twice");
    if (i->flags & TP_HALF_SECOND ? !(done & TP_HALF_FIRST) : done & TP_HALF_FIRST)
        return tp_sched_refuse(x->p, rank, at, "%s half of this forward comes first",
                               done & TP_HALF_FIRST ? "the second" : "the first");
    if (done && (done ^ i->flags) & TP_HALF_JOINED)
        return tp_sched_refuse(x->p, rank, at, "both halves leave as one message (+), or each has its own");
    return TP_OK;
}

static tp_status
rule_forward(proof *x, int rank, int64_t at, const tp_instr *i)
{
    int32_t *done = &x->forward[(int64_t)i->stage * x->p->micros + i->micro];
    if (i->slice < *done)
        return tp_sched_refuse(x->p, rank, at, "this forward is done twice");
    if (i->slice > *done)
        return tp_sched_refuse(x->p, rank, at, "forward slices of a micro-batch ascend: slice %d comes first", *done);
    if (x->halved || i->flags & TP_HALVES)
        TP_TRY(rule_half(x, rank, at, i));
    x->halved |= (i->flags & TP_HALVES) != 0;
    unsigned mine = tp_instr_halves(i);
    if (x->lowered && tp_program_remote(x->p, i->stage) && (*bits_at(x, i) >> 2 & mine) != mine)
        return tp_sched_refuse(x->p, rank, at, "its RF from rank %d must come before it", x->p->rank_of[i->stage - 1]);
    x->cut[(int64_t)i->stage * x->p->micros + i->micro] |= (uint8_t)i->flags;
    *done += (mine & TP_HALF_SECOND) != 0;
    return TP_OK;
}

static tp_status
rule_descends(const proof *x, int rank, int64_t at, const tp_instr *i, int32_t done, const char *what)
{
    int next = x->p->slices[i->micro] - 1 - done;
    if (i->slice > next)
        return tp_sched_refuse(x->p, rank, at, "this %s is done twice, or after a later one", what);
    if (i->slice < next)
        return tp_sched_refuse(x->p, rank, at, "%s of a micro-batch goes through slices descending: %d.%d comes first", what,
                               i->micro, next);
    return TP_OK;
}

static tp_status
rule_backward(proof *x, int rank, int64_t at, const tp_instr *i)
{
    const tp_program *p = x->p;
    int64_t cell = cell_of(x, i);
    TP_TRY(rule_descends(x, rank, at, i, x->backward[cell], "backward"));
    if (x->forward[cell] <= i->slice)
        return tp_sched_refuse(p, rank, at, "its forward must come before it");
    if (i->op == TP_OP_B)
        TP_TRY(rule_descends(x, rank, at, i, x->weights[cell], "weight gradients"));
    if (x->lowered && tp_program_remote(p, i->stage + 1) && !(*bits_at(x, i) & POSTED_B))
        return tp_sched_refuse(p, rank, at, "its RB from rank %d must come before it", p->rank_of[i->stage + 1]);
    x->backward[cell]++;
    x->weights[cell] += i->op == TP_OP_B;
    return TP_OK;
}

static tp_status
rule_weights(proof *x, int rank, int64_t at, const tp_instr *i)
{
    if (!is_done(x, i, x->backward[cell_of(x, i)]))
        return tp_sched_refuse(x->p, rank, at, "its I must come before it");
    TP_TRY(rule_descends(x, rank, at, i, x->weights[cell_of(x, i)], "weight gradients"));
    x->weights[cell_of(x, i)]++;
    return TP_OK;
}

/* R, SO, SI: once, between the forward and the backward of their slice; swapped in again once swapped out. */
static tp_status
rule_saved(proof *x, int rank, int64_t at, const tp_instr *i)
{
    uint16_t *bits = bits_at(x, i), mine = i->op == TP_OP_R ? AGAIN : i->op == TP_OP_SO ? OUT : IN;
    if (*bits & mine)
        return tp_sched_refuse(x->p, rank, at, "it is done twice");
    if (x->forward[(int64_t)i->stage * x->p->micros + i->micro] <= i->slice)
        return tp_sched_refuse(x->p, rank, at, "its forward must come before it");
    if (is_done(x, i, x->backward[cell_of(x, i)]))
        return tp_sched_refuse(x->p, rank, at, "its backward is done already");
    if (mine == IN && !(*bits & OUT))
        return tp_sched_refuse(x->p, rank, at, "its SO must come before it");
    if (mine != AGAIN)
        x->ways |= i->flags & TP_BESIDE ? 2u : 1u;
    if (mine == OUT)
        x->ways |= i->flags & TP_TWO_PLACES ? 8u : 4u;
    if ((x->ways & 3u) == 3u)
        return tp_sched_refuse(x->p, rank, at, "swaps are made beside the work (&) all or none");
    if ((x->ways & 12u) == 12u)
        return tp_sched_refuse(x->p, rank, at, "swaps leave two places (&&) all or none");
    *bits |= mine;
    return TP_OK;
}

/* U: once, behind all weight gradients of its micro-batch. */
static tp_status
rule_renewed(proof *x, int rank, int64_t at, const tp_instr *i)
{
    uint16_t *bits = bits_at(x, i);
    if (x->p->copies > 1)
        return tp_sched_refuse(x->p, rank, at, "two copies of the model add their gradients before an update: OPT alone would be right");
    if (i->slice != 0)
        return tp_sched_refuse(x->p, rank, at, "it is of the whole micro-batch: slice 0 would be right");
    if (*bits & RENEWED)
        return tp_sched_refuse(x->p, rank, at, "it is done twice");
    if (x->weights[cell_of(x, i)] != x->p->slices[i->micro])
        return tp_sched_refuse(x->p, rank, at, "every weight gradient of its micro-batch must come before it");
    if (i->micro != x->renewed[i->stage])
        return tp_sched_refuse(x->p, rank, at, "updates go through micro-batches ascending: that by micro-batch %d comes first",
                               x->renewed[i->stage]);
    *bits |= RENEWED;
    x->renewed[i->stage]++;
    return TP_OK;
}

/* The message is what its F leaves: of each half, or of the whole. */
static tp_status
rule_send_forward(const proof *x, int rank, int64_t at, const tp_instr *i)
{
    int64_t cell = (int64_t)i->stage * x->p->micros + i->micro;
    unsigned mine = tp_instr_halves(i), cut = x->cut[cell];
    if (i->flags & TP_HALVES ? !(cut & mine) : x->forward[cell] <= i->slice)
        return tp_sched_refuse(x->p, rank, at, "its F must come before it");
    if ((cut & TP_HALVES) && !(cut & TP_HALF_JOINED) != !!(i->flags & TP_HALVES))
        return tp_sched_refuse(x->p, rank, at, "its F leaves %s",
                               cut & TP_HALF_JOINED ? "both halves as one message" : "each half as a message of its own");
    return TP_OK;
}

static tp_status
rule_message(proof *x, int rank, int64_t at, const tp_instr *i)
{
    const tp_program *p = x->p;
    int upward = i->op == TP_OP_SF || i->op == TP_OP_RB; /* the neighbour is the next stage, else the one before */
    int neighbour = i->stage + (upward ? 1 : -1);
    if (neighbour < 0 || neighbour >= p->stages || !tp_program_remote(p, upward ? i->stage + 1 : i->stage))
        return tp_sched_refuse(p, rank, at, "stage %d has no neighbour on another rank on this side", i->stage);
    if (i->peer != p->rank_of[neighbour])
        return tp_sched_refuse(p, rank, at, "stage %d lives on rank %d, not on rank %d", neighbour,
                               p->rank_of[neighbour], i->peer);
    if (i->op == TP_OP_SF)
        TP_TRY(rule_send_forward(x, rank, at, i));
    if (i->op == TP_OP_SB && !is_done(x, i, x->backward[cell_of(x, i)]))
        return tp_sched_refuse(p, rank, at, "its B or I must come before it");
    unsigned halves = tp_instr_halves(i);
    uint16_t *bits = bits_at(x, i);
    uint16_t mine = (uint16_t)(i->op == TP_OP_SF   ? halves
                               : i->op == TP_OP_RF ? halves << 2
                               : i->op == TP_OP_SB ? SENT_B
                                                   : POSTED_B);
    if (*bits & mine)
        return tp_sched_refuse(p, rank, at, "it is done twice");
    *bits |= mine;
    x->messages[i->stage] += halves == TP_HALVES ? 2 : 1;
    return TP_OK;
}

/* Slices that go through a stage. */
static int64_t
units_of(const tp_program *p, int stage)
{
    return p->offset[tp_program_micro_end(p, stage)] - p->offset[tp_program_micro_begin(p, stage)];
}

static int64_t
sum(const tp_program *p, const int32_t *done, int stage)
{
    int64_t total = 0;
    for (int q = 0; q < p->micros; q++)
        total += done[(int64_t)stage * p->micros + q];
    return total;
}

static tp_status
rule_end(proof *x, int rank, int64_t at, const tp_instr *i)
{
    const tp_program *p = x->p;
    int first = tp_program_is_first(p, i->stage), each = tp_program_copy_stages(p);
    int other = i->stage / each * each + (first ? each - 1 : 0); /* end of the tie */
    uint8_t *seen = i->op == TP_OP_AR ? x->reduced : x->updated;
    if (seen[i->stage])
        return tp_sched_refuse(p, rank, at, "it is done twice");
    if (sum(p, x->weights, i->stage) != units_of(p, i->stage))
        return tp_sched_refuse(p, rank, at, "every backward of stage %d must come before it", i->stage);
    if (i->micro != 0 || i->slice != 0)
        return tp_sched_refuse(p, rank, at, "it belongs to no micro-batch: 0.0 would be right");
    if (i->op == TP_OP_AR) {
        if ((!first && !tp_program_is_last(p, i->stage)) || p->rank_of[i->stage] == p->rank_of[other])
            return tp_sched_refuse(p, rank, at, "only the first and the last stage, on two ranks, tie a weight");
        if (i->peer != p->rank_of[other])
            return tp_sched_refuse(p, rank, at, "the other end of the tie lives on rank %d", p->rank_of[other]);
        if (x->ending == 2)
            return tp_sched_refuse(p, rank, at, "it must come before every OPT of its rank");
    }
    seen[i->stage] = 1;
    x->ending = i->op == TP_OP_AR ? 1 : 2;
    return TP_OK;
}

/* A marked op overlaps with the next one that computes: one is a forward, the other a backward. */
static tp_status
rule_overlap(proof *x, int rank, int64_t at, const tp_instr *i)
{
    if (!tp_sched_is_compute(i->op))
        return TP_OK;
    int forward = i->op == TP_OP_F, backward = tp_sched_is_backward(i->op);
    if (x->overlaps != 0 && !(x->overlaps == 1 ? backward : forward))
        return tp_sched_refuse(x->p, rank, at, "the op before overlaps with this one (&): a %s would be right",
                               x->overlaps == 1 ? "backward" : "forward");
    if (x->overlaps != 0 && i->flags & TP_OVERLAPS)
        return tp_sched_refuse(x->p, rank, at, "two ops overlap, not three");
    x->overlaps = i->flags & TP_OVERLAPS ? (forward ? 1 : 2) : 0;
    return TP_OK;
}

/* Of R+: its B is next, and reads what its stage makes so every time. */
static tp_status
rule_within(proof *x, int rank, int64_t at, const tp_instr *i)
{
    const tp_program *p = x->p;
    const tp_instr *next = i + 1;
    const int way = i->flags & TP_WITHIN ? 1 : 2;
    x->within[i->stage] |= (uint8_t)way;
    if (x->within[i->stage] == 3)
        return tp_sched_refuse(p, rank, at, "a stage's R are made within B (+) all or none");
    if (way == 2)
        return TP_OK;
    if (p->begin[rank] + at + 1 >= p->begin[rank + 1] || next->op != TP_OP_B || next->stage != i->stage || next->micro != i->micro ||
        next->slice != i->slice)
        return tp_sched_refuse(p, rank, at, "%dB%d.%d must come right behind it: it is made within that (+)", i->stage, i->micro,
                               i->slice);
    if (p->slices[i->micro] > 1)
        return tp_sched_refuse(p, rank, at, "micro-batch %d has %d slices: R within B (+) is of a micro-batch of one", i->micro,
                               p->slices[i->micro]);
    return TP_OK;
}

static tp_status
check_one(proof *x, int rank, int64_t at, const tp_instr *i)
{
    TP_TRY(rule_place(x, rank, at, i));
    if (i->op == TP_OP_R)
        TP_TRY(rule_within(x, rank, at, i));
    if (x->overlaps || i->flags & TP_OVERLAPS)
        TP_TRY(rule_overlap(x, rank, at, i));
    if (x->ending && !tp_sched_is_end(i->op))
        return tp_sched_refuse(x->p, rank, at, "only AR and OPT may follow the first AR or OPT of a rank");
    switch (i->op) {
    case TP_OP_F: return rule_forward(x, rank, at, i);
    case TP_OP_B:
    case TP_OP_I: return rule_backward(x, rank, at, i);
    case TP_OP_W: return rule_weights(x, rank, at, i);
    case TP_OP_R:
    case TP_OP_SO:
    case TP_OP_SI: return rule_saved(x, rank, at, i);
    case TP_OP_U: return rule_renewed(x, rank, at, i);
    case TP_OP_AR:
    case TP_OP_OPT: return rule_end(x, rank, at, i);
    case TP_OP_SE:
    case TP_OP_RE:
    case TP_OP_SL:
    case TP_OP_RL: return TP_OK; /* tp_sched_check_guests */
    default: return rule_message(x, rank, at, i);
    }
}

/* Halves that come apart from another rank are read apart: nobody waits for two messages at once. */
static tp_status
rule_read_apart(const proof *x)
{
    const tp_program *p = x->p;
    for (int r = 0; r < p->ranks; r++)
        for (int64_t k = p->begin[r]; k < p->begin[r + 1]; k++) {
            const tp_instr *i = &p->code[k];
            if (i->op != TP_OP_F || i->flags & TP_HALVES || !tp_program_remote(p, i->stage))
                continue;
            unsigned sent = x->cut[(int64_t)(i->stage - 1) * p->micros + i->micro];
            if ((sent & TP_HALVES) && !(sent & TP_HALF_JOINED))
                return tp_sched_refuse(p, r, k - p->begin[r],
                                       "stage %d sends this micro-batch in two halves: a and b would be right",
                                       i->stage - 1);
        }
    return TP_OK;
}

/* Nothing is missing. The blame falls on the end of the rank's list. */
static tp_status
rule_complete(const proof *x, int stage)
{
    const tp_program *p = x->p;
    int rank = p->rank_of[stage];
    int64_t end = p->begin[rank + 1] - p->begin[rank], units = units_of(p, stage);
    for (int q = tp_program_micro_begin(p, stage); q < tp_program_micro_end(p, stage); q++)
        if (x->forward[(int64_t)stage * p->micros + q] != p->slices[q])
            return tp_sched_refuse(p, rank, end, "%dF%d.%d%s is missing", stage, q,
                                   x->forward[(int64_t)stage * p->micros + q],
                                   x->cut[(int64_t)stage * p->micros + q] & TP_HALVES ? "b" : "");
    int64_t backward = sum(p, x->backward, stage), weights = sum(p, x->weights, stage);
    if (backward != units)
        return tp_sched_refuse(p, rank, end, "stage %d has %lld of its %lld backwards", stage, (long long)backward,
                               (long long)units);
    if (weights != units)
        return tp_sched_refuse(p, rank, end, "stage %d has %lld of its %lld weight gradients", stage, (long long)weights,
                               (long long)units);
    int64_t messages = 2 * units * (tp_program_remote(p, stage) + tp_program_remote(p, stage + 1));
    if (x->lowered && x->messages[stage] != 2 * messages)
        return tp_sched_refuse(p, rank, end, "stage %d has %.1f of its %lld sends and receives", stage,
                               0.5 * (double)x->messages[stage], (long long)messages);
    if (x->renewed[0] == 0 && x->renewed[stage] > 0)
        return tp_sched_refuse(p, rank, end, "stage %d has updates by micro-batches (U), and stage 0 has none", stage);
    if (x->renewed[0] > 0 && x->renewed[stage] != p->micros)
        return tp_sched_refuse(p, rank, end, "stage %d has %d of its %d updates by micro-batches (U)", stage, x->renewed[stage],
                               p->micros);
    if (x->updated[stage] != x->updated[0])
        return tp_sched_refuse(p, rank, end, "OPT belongs to every stage or to none: stage %d and stage 0 differ",
                               stage);
    return TP_OK;
}

static tp_status
rule_swapped(const proof *x)
{
    const tp_program *p = x->p;
    for (int r = 0; r < p->ranks; r++)
        for (int64_t k = p->begin[r]; k < p->begin[r + 1]; k++)
            if (p->code[k].op == TP_OP_SO && !(*bits_at(x, &p->code[k]) & IN))
                return tp_sched_refuse(p, r, k - p->begin[r], "its SI is missing");
    return TP_OK;
}

static tp_status
check_all(proof *x)
{
    const tp_program *p = x->p;
    for (int r = 0; r < p->ranks; r++) {
        x->ending = 0;
        TP_TRY(tp_deadline_check_after(&x->asked, 8 * (p->begin[r + 1] - p->begin[r])));
        for (int64_t k = p->begin[r]; k < p->begin[r + 1]; k++)
            TP_TRY(check_one(x, r, k - p->begin[r], &p->code[k]));
        if (x->overlaps)
            return tp_sched_refuse(p, r, p->begin[r + 1] - p->begin[r], "the last op overlaps with none behind it");
    }
    for (int v = 0; v < p->stages; v++)
        TP_TRY(rule_complete(x, v));
    if (x->halved)
        TP_TRY(rule_read_apart(x));
    for (int v = 0; v < p->stages; v++)
        if ((tp_program_is_first(p, v) || tp_program_is_last(p, v)) && x->reduced[v] != x->reduced[0]) {
            int bare = x->reduced[v] ? 0 : v, rank = p->rank_of[bare];
            return tp_sched_refuse(p, rank, p->begin[rank + 1] - p->begin[rank], "one end of the tied weight has no AR");
        }
    return x->bits != NULL ? rule_swapped(x) : TP_OK;
}

static tp_status
proof_open(proof *x, const tp_program *p, unsigned ops)
{
    size_t stages = (size_t)p->stages;
    int tables = ops >= TP_SCHED_BIT(TP_OP_R); /* beyond F, B, I, W */
    x->p = p;
    x->lowered = (ops & TP_SCHED_MESSAGES) != 0;
    x->forward = calloc(stages * (size_t)p->micros, sizeof *x->forward);
    x->cut = calloc(stages * (size_t)p->micros, 1);
    x->backward = calloc(stages * (size_t)p->micros, sizeof *x->backward);
    x->weights = calloc(stages * (size_t)p->micros, sizeof *x->weights);
    x->messages = calloc(stages, sizeof *x->messages);
    x->bits = tables ? calloc(stages * (size_t)tp_program_units(p), sizeof *x->bits) : NULL;
    x->reduced = calloc(stages, 1);
    x->updated = calloc(stages, 1);
    x->renewed = calloc(stages, sizeof *x->renewed);
    x->within = calloc(stages, 1);
    if (x->forward == NULL || x->cut == NULL || x->backward == NULL || x->weights == NULL || x->messages == NULL ||
        (tables && x->bits == NULL) || x->reduced == NULL || x->updated == NULL || x->renewed == NULL ||
        x->within == NULL)
        return tp_fail(TP_EMEMORY, "no memory to check %d stages and %d micro-batches", p->stages, p->micros);
    return TP_OK;
}

tp_status
tp_program_check_order(const tp_program *program)
{
    return tp_sched_check_order(program, tp_sched_ops(program));
}

tp_status
tp_sched_check_order(const tp_program *program, unsigned ops)
{
    if (!tp_sched_is_dense(program)) /* before any table: nothing may be allocated in proportion to what is missing */
        return tp_sched_refuse(
            program, 0, 0,
            "the program has %lld instructions, and its %d stages x %lld slices alone need twice as many "
            "as their product: instructions are missing",
            (long long)program->begin[program->ranks], program->stages, (long long)tp_program_units(program));
    proof x = {0};
    tp_status status = proof_open(&x, program, ops);
    if (status == TP_OK)
        status = check_all(&x);
    if (status == TP_OK && ops & TP_SCHED_GUESTS)
        status = tp_sched_check_guests(program, ops);
    free(x.forward);
    free(x.cut);
    free(x.backward);
    free(x.weights);
    free(x.messages);
    free(x.bits);
    free(x.reduced);
    free(x.updated);
    free(x.renewed);
    free(x.within);
    return status;
}

/* Where micro-batches have updates: a stage sums the gradient of one at a time, and of the head's rows those of one wait together.
 * made: [stages], zeros. */
static tp_status
check_updates(const tp_program *program, int32_t *made)
{
    for (int r = 0; r < program->ranks; r++)
        for (int64_t k = program->begin[r]; k < program->begin[r + 1]; k++) {
            const tp_instr *i = &program->code[k];
            int sums = i->op == TP_OP_B || i->op == TP_OP_W || (i->op == TP_OP_F && tp_program_is_last(program, i->stage));
            if (sums && i->micro > made[i->stage])
                return tp_sched_refuse(program, r, k - program->begin[r],
                                       "it begins when the micro-batch before it has its update: %dU%d.0 comes first", i->stage,
                                       made[i->stage]);
            made[i->stage] += i->op == TP_OP_U;
        }
    return TP_OK;
}

tp_status
tp_program_check_canonical(const tp_program *program)
{
    static const char *const what[] = {"forward of the last stage", "backward", "weight gradients"};
    int32_t *last = calloc(3 * (size_t)program->stages, sizeof *last);
    if (last == NULL)
        return tp_fail(TP_EMEMORY, "no memory to check %d stages", program->stages);
    tp_status status = TP_OK;
    for (int r = 0; r < program->ranks; r++)
        for (int64_t k = program->begin[r]; status == TP_OK && k < program->begin[r + 1]; k++) {
            const tp_instr *i = &program->code[k];
            int chains[] = {i->op == TP_OP_F && tp_program_is_last(program, i->stage), tp_sched_is_backward(i->op),
                            i->op == TP_OP_B || i->op == TP_OP_W};
            for (int c = 0; status == TP_OK && c < 3; c++) {
                int32_t *before = &last[3 * i->stage + c];
                if (chains[c] && i->micro < *before)
                    status = tp_sched_refuse(program, r, k - program->begin[r],
                                             "micro-batch %d came before it, and sums have one order: %s goes through "
                                             "micro-batches ascending, or this engine's results would depend on the "
                                             "schedule",
                                             *before, what[c]);
                *before = chains[c] ? i->micro : *before;
            }
        }
    memset(last, 0, (size_t)program->stages * sizeof *last);
    if (status == TP_OK && tp_program_versions(program, program->stages - 1) > 0)
        status = check_updates(program, last);
    free(last);
    return status;
}
