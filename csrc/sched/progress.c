/* The second half of the proof: messages match at both ends, every rank comes to its end, no slot is rewritten in use. */
#include "csrc/sched/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

/* ---- the same order at both ends of every pair ---------------------------------------------------------------------- */

static int
same_message(const tp_instr *send, const tp_instr *receive)
{
    int forward = send->op == TP_OP_SF;
    if (tp_sched_is_guest(send->op))
        return receive->op == (send->op == TP_OP_SE ? TP_OP_RE : TP_OP_RL) && receive->stage == send->stage &&
               receive->micro == send->micro;
    return receive->op == (forward ? TP_OP_RF : TP_OP_RB) && receive->stage == send->stage + (forward ? 1 : -1) &&
           receive->micro == send->micro && receive->slice == send->slice && receive->flags == send->flags;
}

/* check_order has counted both ends; here the n-th receive must be of the n-th message sent. */
static tp_status
rule_pairs(const tp_program *p, const tp_pairs *pairs)
{
    int64_t length = p->begin[p->ranks];
    int64_t *begin = calloc((size_t)pairs->count + 2, sizeof *begin),
            *next = calloc((size_t)pairs->count + 1, sizeof *next);
    int32_t *send = malloc(((size_t)length + 1) * sizeof *send);
    tp_status status = TP_OK;
    int64_t steps = 0;
    if (begin == NULL || next == NULL || send == NULL)
        status = tp_fail(TP_EMEMORY, "no memory for the messages of %lld instructions", (long long)length);
    for (int64_t k = 0; status == TP_OK && k < length; k++)
        if (tp_sched_is_send(p->code[k].op))
            begin[tp_pairs_of(pairs, &p->code[k]) + 1]++;
    for (int i = 0; status == TP_OK && i < pairs->count; i++) {
        begin[i + 1] += begin[i];
        next[i] = begin[i];
    }
    for (int64_t k = 0; status == TP_OK && k < length; k++)
        if (tp_sched_is_send(p->code[k].op))
            send[next[tp_pairs_of(pairs, &p->code[k])]++] = (int32_t)k;
    for (int i = 0; status == TP_OK && i < pairs->count; i++)
        next[i] = begin[i];
    for (int r = 0; status == TP_OK && r < p->ranks; r++) {
        status = tp_deadline_check_after(&steps, 8 * (p->begin[r + 1] - p->begin[r]));
        for (int64_t k = p->begin[r]; status == TP_OK && k < p->begin[r + 1]; k++) {
            int pair = tp_sched_is_send(p->code[k].op) ? -1 : tp_pairs_of(pairs, &p->code[k]);
            if (pair < 0)
                continue;
            char word[TP_WORD] = "nothing";
            if (next[pair] < begin[pair + 1]) {
                if (same_message(&p->code[send[next[pair]]], &p->code[k])) {
                    next[pair]++;
                    continue;
                }
                tp_instr_print(&p->code[send[next[pair]]], word);
            }
            status = tp_sched_refuse(p, r, k - p->begin[r],
                                     "messages of a pair of ranks keep their order: rank %d sends %s next",
                                     pairs->source[pair], word);
        }
    }
    free(begin);
    free(next);
    free(send);
    return status;
}

/* ---- progress: abstract execution, once with rendezvous sends and once with eager ones ------------------------------- */

/* The output of (stage, unit) is where its reader lives; of F by halves. At slice 0: the guest is at its host; what reads it next
 * waits for its way back; it is home. */
enum { READY_F = TP_HALVES, READY_B = 4, EVICTED = 8, AWAITED = 16, LOADED = 32 };

typedef struct {
    const tp_program *p;
    const tp_pairs *pairs;
    int lowered, guests, rendezvous;
    uint8_t *ready;         /* [stages * units] */
    int64_t *next;          /* [ranks] */
    int64_t *posted, *sent; /* [pairs] */
    int32_t *stack;
    uint8_t *queued;
    int stacked;
    int64_t asked; /* steps since somebody was asked whether to stop */
} machine;

static void
wake(machine *m, int rank)
{
    if (!m->queued[rank]) {
        m->queued[rank] = 1;
        m->stack[m->stacked++] = rank;
    }
}

static uint8_t *
guest_at(const machine *m, const tp_instr *i)
{
    return &m->ready[i->stage * tp_program_units(m->p) + m->p->offset[i->micro]];
}

/* The rank that an instruction waits for; -1: it can run now. */
static int
waits_for(const machine *m, const tp_instr *i)
{
    const tp_program *p = m->p;
    int64_t at = i->stage * tp_program_units(p) + tp_program_unit(p, i), units = tp_program_units(p);
    unsigned halves = tp_instr_halves(i);
    if (m->guests && i->op == TP_OP_SL && !(*guest_at(m, i) & EVICTED))
        return i->peer;
    if (m->guests && tp_sched_reads_load(i->op) && (*guest_at(m, i) & (AWAITED | LOADED)) == AWAITED)
        return m->pairs->source[m->pairs->load[i->stage]];
    if (i->op == TP_OP_F && !tp_program_is_first(p, i->stage))
        return (m->ready[at - units] & halves) == halves ? -1 : p->rank_of[i->stage - 1];
    if (tp_sched_is_backward(i->op) && !tp_program_is_last(p, i->stage))
        return m->ready[at + units] & READY_B ? -1 : p->rank_of[i->stage + 1];
    if (m->rendezvous && tp_sched_is_send(i->op)) {
        int pair = tp_pairs_of(m->pairs, i);
        return m->posted[pair] > m->sent[pair] ? -1 : m->pairs->target[pair];
    }
    return -1;
}

static void
take_effect(machine *m, const tp_instr *i)
{
    const tp_program *p = m->p;
    uint8_t *ready = &m->ready[i->stage * tp_program_units(p) + tp_program_unit(p, i)];
    int forward = i->op == TP_OP_F || i->op == TP_OP_SF;
    int pair = tp_pairs_of(m->pairs, i);
    if (m->guests && tp_sched_is_guest(i->op)) {
        (tp_sched_is_send(i->op) ? m->sent : m->posted)[pair]++;
        *guest_at(m, i) |= i->op == TP_OP_SE ? EVICTED : i->op == TP_OP_SL ? LOADED : i->op == TP_OP_RL ? AWAITED : 0;
        wake(m, i->peer);
    } else if (tp_sched_is_send(i->op)) {
        m->sent[pair]++;
        *ready |= (uint8_t)(forward ? tp_instr_halves(i) : READY_B);
        wake(m, m->pairs->target[pair]);
    } else if (pair >= 0) {
        m->posted[pair]++;
        wake(m, m->pairs->source[pair]);
    } else if (forward || tp_sched_is_backward(i->op)) {
        int reader = i->stage + (forward ? 1 : -1);
        if (forward ? tp_program_is_last(p, i->stage) : tp_program_is_first(p, i->stage))
            return;
        if (m->lowered && p->rank_of[reader] != p->rank_of[i->stage])
            return; /* its send makes it ready */
        *ready |= (uint8_t)(forward ? tp_sched_leaving(p, i) : READY_B);
        wake(m, p->rank_of[reader]);
    }
}

/* Follow who waits for whom from the first unfinished rank into the cycle, and blame a rank of the cycle. */
static tp_status
refuse_deadlock(const machine *m, int rank)
{
    const tp_program *p = m->p;
    for (int i = 0; i < p->ranks; i++) /* after as many steps as there are ranks we stand on the cycle, or at an end */
        if (m->next[rank] < p->begin[rank + 1] && waits_for(m, &p->code[m->next[rank]]) >= 0)
            rank = waits_for(m, &p->code[m->next[rank]]);
    char chain[200];
    size_t used = 0;
    int at = rank;
    for (int i = 0; i < 4 && used < sizeof chain - 60 && m->next[at] < p->begin[at + 1]; i++) {
        char word[TP_WORD];
        tp_instr_print(&p->code[m->next[at]], word);
        int other = waits_for(m, &p->code[m->next[at]]);
        used += (size_t)snprintf(chain + used, sizeof chain - used, "%srank %d at %s waits for rank %d", i ? ", " : "",
                                 at, word, other);
        at = other;
        if (at == rank || at < 0)
            break;
    }
    return tp_sched_refuse(p, rank, m->next[rank] - p->begin[rank], "deadlock%s: %s",
                           m->rendezvous ? " with rendezvous sends"
                           : !m->lowered ? ""
                                         : " even with eager sends",
                           chain);
}

static tp_status
rule_progress(machine *m)
{
    const tp_program *p = m->p;
    memset(m->ready, 0, (size_t)p->stages * (size_t)tp_program_units(p));
    memset(m->posted, 0, ((size_t)m->pairs->count + 1) * sizeof *m->posted);
    memset(m->sent, 0, ((size_t)m->pairs->count + 1) * sizeof *m->sent);
    for (int r = p->ranks - 1; r >= 0; r--) {
        m->next[r] = p->begin[r];
        wake(m, r);
    }
    while (m->stacked > 0) {
        int rank = m->stack[--m->stacked];
        m->queued[rank] = 0;
        int64_t from = m->next[rank];
        for (; m->next[rank] < p->begin[rank + 1]; m->next[rank]++) {
            const tp_instr *i = &p->code[m->next[rank]];
            if (waits_for(m, i) >= 0)
                break;
            take_effect(m, i);
        }
        TP_TRY(tp_deadline_check_after(&m->asked, 16 * (m->next[rank] + 1 - from)));
    }
    for (int r = 0; r < p->ranks; r++)
        if (m->next[r] < p->begin[r + 1])
            return refuse_deadlock(m, r);
    return TP_OK;
}

static tp_status
check_progress(const tp_program *p, const tp_pairs *pairs, int messages, int guests)
{
    size_t ranks = (size_t)p->ranks, count = (size_t)pairs->count + 1;
    machine m = {.p = p, .pairs = pairs, .lowered = messages, .guests = guests};
    m.ready = malloc((size_t)p->stages * (size_t)tp_program_units(p));
    m.next = malloc(ranks * sizeof *m.next);
    m.posted = malloc(count * sizeof *m.posted);
    m.sent = malloc(count * sizeof *m.sent);
    m.stack = malloc(ranks * sizeof *m.stack);
    m.queued = calloc(ranks, 1);
    tp_status status = TP_OK;
    if (m.ready == NULL || m.next == NULL || m.posted == NULL || m.sent == NULL || m.stack == NULL || m.queued == NULL)
        status = tp_fail(TP_EMEMORY, "no memory to follow %lld instructions", (long long)p->begin[p->ranks]);
    if (status == TP_OK)
        status = rule_progress(&m); /* eager; a compute-only program has data dependencies alone */
    if (status == TP_OK && (m.lowered || m.guests)) {
        m.rendezvous = 1;
        status = rule_progress(&m);
    }
    free(m.ready);
    free(m.next);
    free(m.posted);
    free(m.sent);
    free(m.stack);
    free(m.queued);
    return status;
}

/* ---- slots ----------------------------------------------------------------------------------------------------------- */

enum { ACTIVATION, GRADIENT, GUEST };

typedef struct {
    const char *name;
    int kind;         /* ACTIVATION, GRADIENT, GUEST */
    int32_t *owner;   /* [stages * micros] micro-batch + 1 that holds a slot; 0: free */
    int32_t *slot_of; /* [stages * micros] slot + 1 of a micro-batch; 0: none yet */
    int32_t *uses;    /* [stages * micros] to come */
    int32_t *later;   /* [stages * micros] of these, behind its SE; NULL: nothing is evicted */
} ledger;

static int
touches(int op, int kind)
{
    return kind == GUEST      ? tp_sched_is_host(op)
           : kind == GRADIENT ? tp_sched_uses_gradient(op)
                              : tp_sched_uses_activation(op);
}

/* One use less is to come: behind the last the slot is free. */
static void
used(ledger *l, int64_t stage, int64_t micro, int64_t micros)
{
    int64_t cell = stage * micros + micro;
    if (--l->uses[cell] > 0 || l->slot_of[cell] == 0)
        return;
    l->owner[stage * micros + l->slot_of[cell] - 1] = 0;
    if (l->later == NULL || l->later[cell] == 0)
        return;
    l->uses[cell] = l->later[cell];
    l->slot_of[cell] = 0;
    l->later[cell] = 0;
}

static tp_status
rule_slot(ledger *l, const tp_program *p, int rank, int64_t k)
{
    const tp_instr *i = &p->code[k];
    int32_t slot = (int32_t)(l->kind == GRADIENT ? TP_SLOT_GRADIENT(i->slot) : TP_SLOT_ACTIVATION(i->slot));
    int64_t row = (int64_t)i->stage * p->micros, cell = row + i->micro;
    if (slot >= p->micros)
        return tp_sched_refuse(p, rank, k - p->begin[rank],
                               "%s slot %d: below the number of micro-batches, %d, would be right", l->name, slot,
                               p->micros);
    if (l->slot_of[cell] == 0) {
        if (l->owner[row + slot] != 0)
            return tp_sched_refuse(p, rank, k - p->begin[rank],
                                   "%s slot %d of stage %d is rewritten while micro-batch %d "
                                   "still uses it",
                                   l->name, slot, i->stage, l->owner[row + slot] - 1);
        l->owner[row + slot] = i->micro + 1;
        l->slot_of[cell] = slot + 1;
    } else if (l->slot_of[cell] != slot + 1) {
        return tp_sched_refuse(p, rank, k - p->begin[rank], "%s slot %d: its micro-batch lives in slot %d", l->name,
                               slot, l->slot_of[cell] - 1);
    }
    used(l, i->stage, i->micro, p->micros);
    if (l->kind == GRADIENT && tp_sched_reads_next(p, i))
        used(l, i->stage + 1, i->micro, p->micros);
    return TP_OK;
}

static void
count_uses(ledger *l, const tp_program *p)
{
    for (int64_t k = 0; k < p->begin[p->ranks]; k++) {
        const tp_instr *i = &p->code[k];
        int64_t cell = (int64_t)i->stage * p->micros + i->micro;
        int32_t *uses = l->later != NULL && l->slot_of[cell] ? l->later : l->uses; /* slot_of here: its SE has been */
        uses[cell] += touches(i->op, l->kind);
        if (l->later != NULL)
            l->slot_of[cell] |= i->op == TP_OP_SE;
        if (l->kind == GRADIENT && tp_sched_reads_next(p, i))
            l->uses[cell + p->micros]++;
    }
    if (l->later != NULL)
        memset(l->slot_of, 0, (size_t)p->stages * (size_t)p->micros * sizeof *l->slot_of);
}

static tp_status
rule_slots(const tp_program *p, const char *name, int kind, int guests)
{
    size_t cells = (size_t)p->stages * (size_t)p->micros;
    int evicted = guests && kind == ACTIVATION;
    ledger l = {name, kind, calloc(cells, sizeof *l.owner), calloc(cells, sizeof *l.slot_of), calloc(cells, sizeof *l.uses),
                evicted ? calloc(cells, sizeof *l.later) : NULL};
    tp_status status = TP_OK;
    if (l.owner == NULL || l.slot_of == NULL || l.uses == NULL || (evicted && l.later == NULL))
        status = tp_fail(TP_EMEMORY, "no memory for the slots of %d stages and %d micro-batches", p->stages, p->micros);
    else
        count_uses(&l, p);
    int64_t steps = 0;
    for (int r = 0; status == TP_OK && r < p->ranks; r++) {
        status = tp_deadline_check_after(&steps, 8 * (p->begin[r + 1] - p->begin[r]));
        for (int64_t k = p->begin[r]; status == TP_OK && k < p->begin[r + 1]; k++)
            if (touches(p->code[k].op, kind))
                status = rule_slot(&l, p, r, k);
    }
    free(l.owner);
    free(l.slot_of);
    free(l.uses);
    free(l.later);
    return status;
}

tp_status
tp_program_check(const tp_program *program)
{
    TP_TRY(tp_program_check_order(program));
    tp_pairs pairs = {0};
    unsigned ops = tp_sched_ops(program);
    TP_TRY(tp_pairs_open(program, ops, &pairs));
    int messages = (ops & TP_SCHED_MESSAGES) != 0, slots = (ops & TP_SCHED_SLOTTED) != 0, guests = (ops & TP_SCHED_GUESTS) != 0;
    tp_status status = messages || guests ? rule_pairs(program, &pairs) : TP_OK;
    if (status == TP_OK && slots && !messages && pairs.count > 0)
        status = tp_sched_refuse(program, pairs.source[0], 0,
                                 "it has OPT or AR, and no sends to rank %d: lower() adds them", pairs.target[0]);
    if (status == TP_OK)
        status = check_progress(program, &pairs, messages, guests);
    tp_pairs_close(&pairs);
    TP_TRY(status);
    if (!slots)
        return TP_OK;
    TP_TRY(rule_slots(program, "activation", ACTIVATION, guests));
    TP_TRY(rule_slots(program, "gradient", GRADIENT, guests));
    return guests ? rule_slots(program, "guest", GUEST, guests) : TP_OK;
}
