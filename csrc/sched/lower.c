/* Comms by zero-buffer execution: the compute program is run abstractly with rendezvous sends. A rank announces the
 * receives of its next op before it sends what its last op made; where all ranks are stuck all the same, the receive of
 * the first stuck send is announced where its reader stands. So the result cannot deadlock, on any transport, and
 * receives are announced (and slots taken) no earlier than that needs. */
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

/* ---- strip --------------------------------------------------------------------------------------------------------------- */

static int
survives(int op)
{
    return !tp_sched_is_message(op) && !tp_sched_is_end(op);
}

tp_status
tp_program_strip(const tp_program *program, tp_program **out)
{
    int64_t *counts = calloc((size_t)program->ranks, sizeof *counts);
    if (counts == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d ranks", program->ranks);
    for (int r = 0; r < program->ranks; r++)
        for (int64_t i = program->begin[r]; i < program->begin[r + 1]; i++)
            counts[r] += survives(program->code[i].op);
    tp_program *p = NULL;
    tp_status status = tp_sched_open_like(program, counts, &p);
    free(counts);
    TP_TRY(status);
    tp_instr *to = p->code;
    for (int64_t i = 0; i < program->begin[program->ranks]; i++)
        if (survives(program->code[i].op)) {
            *to = program->code[i];
            to->slot = 0;
            to->peer = tp_sched_is_guest(to->op) ? to->peer : -1;
            to++;
        }
    *out = p;
    return TP_OK;
}

/* Is a tied weight on two ranks? */
static int
ends_apart(const tp_program *p, int tied)
{
    return tied && p->rank_of[0] != p->rank_of[tp_program_copy_stages(p) - 1];
}

int64_t
tp_program_complete_length(const tp_program *compute, int pending, int tied)
{
    const tp_program *p = compute;
    int64_t length = p->begin[p->ranks] + p->stages;
    for (int64_t k = 0; k < p->begin[p->ranks]; k++) {
        const tp_instr *i = &p->code[k];
        int forward = i->op == TP_OP_F, backward = tp_sched_is_backward(i->op);
        length += pending >= 0 && i->op == TP_OP_B;
        if ((forward && tp_program_remote(p, i->stage + 1) && tp_sched_leaving(p, i)) || (backward && tp_program_remote(p, i->stage)))
            length += 2; /* both ends of its message */
    }
    if (ends_apart(p, tied))
        length += 2 * (p->stages / tp_program_copy_stages(p));
    return length;
}

/* ---- lower --------------------------------------------------------------------------------------------------------------- */

/* Of a guest: announced at its host, sent there, announced at home, its first reader waits for it, sent home. */
enum { POSTED_E = 1, SENT_E = 2, POSTED_L = 4, AWAITED = 8, SENT_L = 16 };

/* Of the forward by halves. */
enum { POSTED_F = TP_HALVES, ARRIVED_F = TP_HALVES << 2, POSTED_B = 16, ARRIVED_B = 32 };

typedef struct {
    const tp_program *from;
    tp_program *to;
    tp_pairs pairs;
    int64_t *message_begin; /* [pairs + 1] */
    int32_t *message;       /* per pair: index in from->code of the op that makes its n-th message */
    int32_t *behind;        /* as message: guests that leave the maker's rank on the pair before it */
    int64_t *posted, *sent; /* [pairs] messages announced, sent */
    int64_t *hosted;        /* [pairs] guests announced */
    uint8_t *bits;          /* [stages * units] of the stage that reads */
    uint8_t *guest;         /* [stages * micros] */
    int64_t *next, *write;  /* [ranks] cursors in from->code, to->code */
    int32_t *sending;       /* [ranks] index of the op whose message waits to be sent; -1 */
    uint64_t *waits;        /* [2][LEVELS][words]: a bit for each rank whose message waits to be sent, and above them one for each
                             * word that has some; apart those that take a slot for an activation */
    int64_t words;          /* of the ranks' bits */
    int32_t *stack;         /* ranks that may go on */
    uint8_t *queued;
    int stacked, guests; /* guests: there are some */
    int64_t asked;       /* steps since somebody was asked whether to stop */
} lowering;

enum { RANKS, WORDS, LEVELS };

/* Of two ranks that are stuck: whose message is announced. One that takes no slot for an activation before one that does: of a
 * gradient, or of a later slice of a micro-batch that has its slot; else the lower rank's. */
static uint64_t *
waits_with(const lowering *l, const tp_instr *maker)
{
    int takes = maker->op == TP_OP_F && maker->slice == 0;
    return l->waits + takes * LEVELS * l->words;
}

static void
begin_to_send(lowering *l, int rank, int64_t at)
{
    uint64_t *waits = waits_with(l, &l->from->code[at]), *words = waits + WORDS * l->words;
    l->sending[rank] = (int32_t)at;
    waits[rank / 64] |= (uint64_t)1 << rank % 64;
    words[rank / 64 / 64] |= (uint64_t)1 << rank / 64 % 64;
}

static void
has_sent(lowering *l, int rank)
{
    uint64_t *waits = waits_with(l, &l->from->code[l->sending[rank]]), *words = waits + WORDS * l->words;
    l->sending[rank] = -1;
    waits[rank / 64] &= ~((uint64_t)1 << rank % 64);
    if (waits[rank / 64] == 0)
        words[rank / 64 / 64] &= ~((uint64_t)1 << rank / 64 % 64);
}

/* The rank whose message is announced where all are stuck; -1: none waits to send. */
static int
first_stuck(const lowering *l)
{
    for (int takes = 0; takes < 2; takes++) {
        const uint64_t *waits = l->waits + takes * LEVELS * l->words, *words = waits + WORDS * l->words;
        for (int64_t k = 0; k * 64 < l->words; k++)
            if (words[k] != 0) {
                int64_t word = k * 64 + __builtin_ctzll(words[k]);
                return (int)(word * 64 + __builtin_ctzll(waits[word]));
            }
    }
    return -1;
}

/* The pair that the output of `instr` crosses; -1: it stays on the rank, or it has none. */
static int
pair_out(const lowering *l, const tp_instr *instr)
{
    if (instr->op == TP_OP_F)
        return tp_sched_leaving(l->from, instr) ? l->pairs.forward[instr->stage] : -1;
    return tp_sched_is_backward(instr->op) ? l->pairs.backward[instr->stage] : -1;
}

static int
pair_in(const lowering *l, const tp_instr *instr)
{
    if (instr->op == TP_OP_F)
        return tp_program_remote(l->from, instr->stage) ? l->pairs.forward[instr->stage - 1] : -1;
    if (tp_sched_goes_back(instr) && tp_program_remote(l->from, instr->stage + 1))
        return l->pairs.backward[instr->stage + 1];
    return -1;
}

static uint8_t *
bits_of(lowering *l, int stage, const tp_instr *instr)
{
    return &l->bits[stage * tp_program_units(l->from) + tp_program_unit(l->from, instr)];
}

static int
reader_stage(const tp_instr *maker)
{
    return maker->op == TP_OP_F ? maker->stage + 1 : maker->stage - 1;
}

static void
wake(lowering *l, int rank)
{
    if (!l->queued[rank]) {
        l->queued[rank] = 1;
        l->stack[l->stacked++] = rank;
    }
}

static void
emit(lowering *l, int rank, const tp_instr *like, int op, int stage, int peer)
{
    tp_instr *to = &l->to->code[l->write[rank]++];
    *to = *like;
    to->op = (uint16_t)op;
    to->stage = (uint16_t)stage;
    to->peer = (int16_t)peer;
    to->slot = 0;
    if (op != like->op) /* a message of it */
        to->flags = 0;
    if (op == TP_OP_SF || op == TP_OP_RF)
        to->flags = (uint16_t)tp_sched_message_flags(tp_sched_leaving(l->from, like));
}

/* The bits of `all` that the message of this op stands for, or that this reader needs. */
static uint8_t
mask(unsigned all, unsigned halves)
{
    return (uint8_t)(all == POSTED_F ? halves : all == ARRIVED_F ? halves << 2 : all);
}

/* Announce the pair's next message at its target. */
static void
post(lowering *l, int pair)
{
    const tp_instr *maker = &l->from->code[l->message[l->message_begin[pair] + l->posted[pair]++]];
    int forward = maker->op == TP_OP_F, stage = reader_stage(maker);
    emit(l, l->pairs.target[pair], maker, forward ? TP_OP_RF : TP_OP_RB, stage, l->pairs.source[pair]);
    *bits_of(l, stage, maker) |=
        forward ? mask(POSTED_F, tp_sched_leaving(l->from, maker)) : mask(POSTED_B, TP_HALVES);
    wake(l, l->pairs.source[pair]);
}

/* Does the pair's next message leave its source before the pair's next guest does? Both ends keep one order. */
static int
is_next(const lowering *l, int pair)
{
    int64_t next = l->message_begin[pair] + l->posted[pair];
    return next < l->message_begin[pair + 1] && l->behind[next] <= l->hosted[pair];
}

/* Announce what the pair sends before the guest that is announced now. */
static void
announce_before_guest(lowering *l, const tp_instr *instr)
{
    int pair = tp_pairs_of(&l->pairs, instr);
    while (is_next(l, pair))
        post(l, pair);
    l->hosted[pair]++;
}

/* Takes the place of run_rank's next op where that is of a guest, or reads what a guest brings back; 0: it waits. */
static int
run_guest(lowering *l, const tp_instr *instr)
{
    uint8_t *state = &l->guest[(int64_t)instr->stage * l->from->micros + instr->micro];
    unsigned needs = 0, gives = 0;
    switch (instr->op) {
    case TP_OP_SE: needs = POSTED_E, gives = SENT_E; break;
    case TP_OP_RE: gives = POSTED_E; break;
    case TP_OP_SL: needs = SENT_E | POSTED_L, gives = SENT_L; break;
    case TP_OP_RL: gives = POSTED_L | AWAITED; break;
    default: needs = tp_sched_reads_load(instr->op) && *state & AWAITED ? SENT_L : 0;
    }
    if ((*state & needs) != needs)
        return 0;
    *state |= (uint8_t)gives;
    if (instr->op == TP_OP_RE || instr->op == TP_OP_RL)
        announce_before_guest(l, instr);
    if (tp_sched_is_guest(instr->op))
        wake(l, instr->peer);
    return 1;
}

/* Post what the rank's next op reads; guests on the way there are no reason to do so later, but an eviction that leaves a forward
 * its slot, and guests that leave the same rank before it. */
static void
announce(lowering *l, int rank)
{
    const tp_program *p = l->from;
    int64_t k = l->next[rank];
    int evicts = 0;
    for (; k < p->begin[rank + 1] && tp_sched_is_guest(p->code[k].op); k++)
        evicts |= p->code[k].op == TP_OP_SE;
    const tp_instr *instr = &p->code[k];
    int in = k < p->begin[rank + 1] && !(evicts && instr->op == TP_OP_F) ? pair_in(l, instr) : -1;
    uint8_t posted = in < 0 ? 0 : mask(instr->op == TP_OP_F ? POSTED_F : POSTED_B, tp_instr_halves(instr));
    while (in >= 0 && (*bits_of(l, instr->stage, instr) & posted) != posted && is_next(l, in))
        post(l, in);
}

static void
run_rank(lowering *l, int rank)
{
    const tp_program *p = l->from;
    for (;;) {
        const tp_instr *instr = l->next[rank] < p->begin[rank + 1] ? &p->code[l->next[rank]] : NULL;
        int in = instr == NULL ? -1 : pair_in(l, instr), forward = instr != NULL && instr->op == TP_OP_F;
        uint8_t arrived = instr == NULL ? 0 : mask(forward ? ARRIVED_F : ARRIVED_B, tp_instr_halves(instr));
        uint8_t posted = instr == NULL ? 0 : mask(forward ? POSTED_F : POSTED_B, tp_instr_halves(instr));
        if (l->guests)
            announce(l, rank);
        /* not for R within B before what the rank sends has left: else each gradient on its way would have a slot of its own */
        int waits = instr != NULL && instr->op == TP_OP_R && l->sending[rank] >= 0;
        while (in >= 0 && !waits && (*bits_of(l, instr->stage, instr) & posted) != posted)
            post(l, in);
        if (l->sending[rank] >= 0) {
            const tp_instr *maker = &p->code[l->sending[rank]];
            int pair = pair_out(l, maker);
            if (l->posted[pair] <= l->sent[pair])
                return;
            l->sent[pair]++;
            emit(l, rank, maker, maker->op == TP_OP_F ? TP_OP_SF : TP_OP_SB, maker->stage, l->pairs.target[pair]);
            *bits_of(l, reader_stage(maker), maker) |=
                maker->op == TP_OP_F ? mask(ARRIVED_F, tp_sched_leaving(p, maker)) : mask(ARRIVED_B, TP_HALVES);
            wake(l, l->pairs.target[pair]);
            has_sent(l, rank);
            if (waits)
                continue;
        }
        if (instr == NULL || (in >= 0 && (*bits_of(l, instr->stage, instr) & arrived) != arrived))
            return;
        if (l->guests && !run_guest(l, instr))
            return;
        emit(l, rank, instr, instr->op, instr->stage, instr->peer); /* -1, but of a guest */
        if (pair_out(l, instr) >= 0)
            begin_to_send(l, rank, l->next[rank]);
        l->next[rank]++;
    }
}

static tp_status
run_all(lowering *l)
{
    const tp_program *p = l->from;
    for (int r = p->ranks - 1; r >= 0; r--)
        wake(l, r);
    for (;;) {
        while (l->stacked > 0) {
            int rank = l->stack[--l->stacked];
            l->queued[rank] = 0;
            int64_t from = l->next[rank];
            run_rank(l, rank);
            TP_TRY(tp_deadline_check_after(&l->asked, 16 * (l->next[rank] + 1 - from)));
        }
        int stuck = first_stuck(l);
        if (stuck < 0)
            break;
        post(l, pair_out(l, &p->code[l->sending[stuck]]));
    }
    for (int r = 0; r < p->ranks; r++)
        if (l->next[r] < p->begin[r + 1])
            return tp_sched_refuse(p, r, l->next[r] - p->begin[r], "deadlock: the message it reads is never sent");
    return TP_OK;
}

static tp_status
list_messages(lowering *l)
{
    const tp_program *p = l->from;
    int64_t length = p->begin[p->ranks];
    for (int64_t i = 0; i < length; i++) {
        int pair = pair_out(l, &p->code[i]);
        if (pair >= 0)
            l->message_begin[pair + 1]++;
    }
    for (int i = 0; i < l->pairs.count; i++)
        l->message_begin[i + 1] += l->message_begin[i];
    size_t messages = (size_t)l->message_begin[l->pairs.count];
    l->message = malloc((2 * messages + 1) * sizeof *l->message);
    if (l->message == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %lld messages", (long long)messages);
    l->behind = l->message + messages;
    for (int64_t i = 0; i < length; i++) { /* `sent` and `hosted` count for a moment here */
        const tp_instr *instr = &p->code[i];
        int pair = pair_out(l, instr);
        if (instr->op == TP_OP_SE || instr->op == TP_OP_SL)
            l->hosted[tp_pairs_of(&l->pairs, instr)]++;
        if (pair < 0)
            continue;
        int64_t at = l->message_begin[pair] + l->sent[pair]++;
        l->message[at] = (int32_t)i;
        l->behind[at] = (int32_t)l->hosted[pair];
    }
    memset(l->sent, 0, ((size_t)l->pairs.count + 1) * sizeof *l->sent);
    memset(l->hosted, 0, ((size_t)l->pairs.count + 1) * sizeof *l->hosted);
    return TP_OK;
}

static tp_status
open_target(lowering *l, int tied)
{
    const tp_program *p = l->from;
    int64_t *counts = calloc((size_t)p->ranks, sizeof *counts);
    if (counts == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d ranks", p->ranks);
    for (int r = 0; r < p->ranks; r++)
        counts[r] = p->begin[r + 1] - p->begin[r];
    for (int i = 0; i < l->pairs.count; i++) {
        counts[l->pairs.source[i]] += l->message_begin[i + 1] - l->message_begin[i];
        counts[l->pairs.target[i]] += l->message_begin[i + 1] - l->message_begin[i];
    }
    for (int v = 0; v < p->stages; v++)
        counts[p->rank_of[v]]++;
    for (int v = 0; v < p->stages; v++)
        counts[p->rank_of[v]] += tied && (tp_program_is_first(p, v) || tp_program_is_last(p, v));
    tp_status status = tp_sched_open_like(p, counts, &l->to);
    free(counts);
    return status;
}

static void
finish(lowering *l, int tied)
{
    const tp_program *p = l->from;
    const tp_instr end = {.op = TP_OP_OPT, .peer = -1};
    int each = tp_program_copy_stages(p);
    for (int first = 0; tied && first < p->stages; first += each) {
        int last = first + each - 1;
        emit(l, p->rank_of[first], &end, TP_OP_AR, first, p->rank_of[last]);
        emit(l, p->rank_of[last], &end, TP_OP_AR, last, p->rank_of[first]);
    }
    for (int v = 0; v < p->stages; v++)
        emit(l, p->rank_of[v], &end, TP_OP_OPT, v, -1);
}

static tp_status
lower(lowering *l, unsigned ops, int tied)
{
    const tp_program *p = l->from;
    l->guests = (ops & TP_SCHED_GUESTS) != 0;
    TP_TRY(tp_pairs_open(p, ops, &l->pairs));
    size_t pairs = (size_t)l->pairs.count + 1, ranks = (size_t)p->ranks;
    l->message_begin = calloc(pairs, sizeof *l->message_begin);
    l->posted = calloc(pairs, sizeof *l->posted);
    l->sent = calloc(pairs, sizeof *l->sent);
    l->hosted = calloc(pairs, sizeof *l->hosted);
    l->bits = calloc((size_t)p->stages * (size_t)tp_program_units(p), 1);
    l->guest = calloc(l->guests ? (size_t)p->stages * (size_t)p->micros : 1, 1);
    l->next = malloc(ranks * sizeof *l->next);
    l->write = malloc(ranks * sizeof *l->write);
    l->sending = malloc(ranks * sizeof *l->sending);
    l->words = p->ranks / 64 + 1;
    l->waits = calloc(2 * LEVELS * (size_t)l->words, sizeof *l->waits);
    l->stack = malloc(ranks * sizeof *l->stack);
    l->queued = calloc(ranks, 1);
    if (l->message_begin == NULL || l->posted == NULL || l->sent == NULL || l->hosted == NULL || l->bits == NULL || l->guest == NULL ||
        l->next == NULL || l->write == NULL || l->sending == NULL || l->waits == NULL || l->stack == NULL || l->queued == NULL)
        return tp_fail(TP_EMEMORY, "no memory to lower %lld instructions", (long long)p->begin[p->ranks]);
    TP_TRY(list_messages(l));
    TP_TRY(open_target(l, tied));
    for (int r = 0; r < p->ranks; r++) {
        l->next[r] = p->begin[r];
        l->write[r] = l->to->begin[r];
        l->sending[r] = -1;
    }
    TP_TRY(run_all(l));
    finish(l, tied);
    return tp_sched_assign_slots(l->to, ops);
}

tp_status
tp_sched_lower(const tp_program *compute, unsigned ops, int tied, tp_program **out)
{
    lowering l = {.from = compute};
    tp_status status = lower(&l, ops, ends_apart(compute, tied));
    tp_pairs_close(&l.pairs);
    free(l.message_begin);
    free(l.message);
    free(l.posted);
    free(l.sent);
    free(l.hosted);
    free(l.bits);
    free(l.guest);
    free(l.next);
    free(l.write);
    free(l.sending);
    free(l.waits);
    free(l.stack);
    free(l.queued);
    if (status != TP_OK) {
        tp_program_close(l.to);
        return status;
    }
    *out = l.to;
    return TP_OK;
}

tp_status
tp_program_lower(const tp_program *program, int tied, tp_program **out)
{
    tp_program *compute = NULL;
    TP_TRY(tp_program_strip(program, &compute));
    tp_status status = tp_program_check(compute);
    if (status == TP_OK)
        status = tp_sched_lower(compute, tp_sched_ops(compute), tied, out);
    tp_program_close(compute);
    return status;
}
