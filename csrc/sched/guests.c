/* Activations that a rank keeps for another (SE, RE, SL, RL): where they are, and the checker's rules for one stage and
 * micro-batch. The rules for pairs of ranks, and for deadlock, are in progress.c. */
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

void
tp_sched_hosts(const tp_program *program, int32_t *hosts)
{
    memset(hosts, -1, (size_t)program->stages * sizeof *hosts);
    for (int64_t k = 0; k < program->begin[program->ranks]; k++) {
        const tp_instr *i = &program->code[k];
        if (i->op == TP_OP_SE && hosts[i->stage] < 0 && i->peer >= 0 && i->peer < program->ranks)
            hosts[i->stage] = i->peer;
    }
}

int
tp_program_host(const tp_program *program, int stage)
{
    if (stage < 0 || stage >= program->stages)
        return -1;
    int rank = program->rank_of[stage];
    for (int64_t k = program->begin[rank]; k < program->begin[rank + 1]; k++)
        if (program->code[k].op == TP_OP_SE && program->code[k].stage == stage)
            return program->code[k].peer;
    return -1;
}

int
tp_program_guest_slots(const tp_program *program, int stage)
{
    int rank = tp_program_host(program, stage), most = -1;
    for (int64_t k = rank < 0 ? 0 : program->begin[rank]; rank >= 0 && k < program->begin[rank + 1]; k++) {
        const tp_instr *i = &program->code[k];
        int slot = (int)TP_SLOT_ACTIVATION(i->slot);
        most = tp_sched_is_host(i->op) && i->stage == stage && slot > most ? slot : most;
    }
    return most + 1;
}

/* ---- the rules ----------------------------------------------------------------------------------------------------------- */

/* On its way: evicted, back; on the other rank: held, given back; and what of it is swapped to the host's memory instead. */
enum { OUT = 1, BACK = 2, HELD = 4, GIVEN = 8, SWAPPED = 16 };

typedef struct {
    const tp_program *p;
    int lowered;
    int32_t *hosts;            /* [stages] */
    int32_t *forward, *backward; /* [stages * micros] slices whose F, B or I is done */
    int32_t *sent;             /* [stages * micros] SF, in halves of a slice's message */
    uint8_t *state;            /* [stages * micros] */
} guests;

static int64_t
cell_of(const guests *x, const tp_instr *i)
{
    return (int64_t)i->stage * x->p->micros + i->micro;
}

static tp_status
rule_both(const guests *x, int rank, int64_t at, const tp_instr *i)
{
    int own = x->p->rank_of[i->stage], host = x->hosts[i->stage], hosting = tp_sched_is_host(i->op);
    if (i->slice != 0)
        return tp_sched_refuse(x->p, rank, at, "activations go and come by whole micro-batches: %d.0 would be right", i->micro);
    if (i->peer < 0 || i->peer >= x->p->ranks || i->peer == rank)
        return tp_sched_refuse(x->p, rank, at, "its peer is %d: another rank would be right", i->peer);
    if (hosting && i->peer != own)
        return tp_sched_refuse(x->p, rank, at, "stage %d lives on rank %d, not on rank %d", i->stage, own, i->peer);
    if (host < 0)
        return tp_sched_refuse(x->p, rank, at, "stage %d evicts nothing: its SE is missing", i->stage);
    if ((hosting ? rank : i->peer) != host)
        return tp_sched_refuse(x->p, rank, at, "a stage keeps its guests on one rank: those of stage %d are on rank %d", i->stage,
                               host);
    return TP_OK;
}

static tp_status
rule_evict(guests *x, int rank, int64_t at, const tp_instr *i)
{
    int64_t cell = cell_of(x, i);
    int slices = x->p->slices[i->micro];
    if (x->state[cell] & OUT)
        return tp_sched_refuse(x->p, rank, at, "it is done twice");
    if (x->forward[cell] < slices)
        return tp_sched_refuse(x->p, rank, at, "every forward of its micro-batch must come before it");
    if (x->backward[cell] > 0)
        return tp_sched_refuse(x->p, rank, at, "its backward has begun already");
    if (x->state[cell] & SWAPPED)
        return tp_sched_refuse(x->p, rank, at, "its micro-batch is swapped to the host (SO): one of both would be right");
    if (x->lowered && tp_program_remote(x->p, i->stage + 1) && x->sent[cell] < (int32_t)TP_HALVES * slices)
        return tp_sched_refuse(x->p, rank, at, "its SF must come before it, which sends from what is evicted");
    if (!tp_program_is_last(x->p, i->stage) && !tp_program_remote(x->p, i->stage + 1) && x->forward[cell + x->p->micros] < slices)
        return tp_sched_refuse(x->p, rank, at, "%dF%d.%d must come before it, which reads on this rank from what is evicted",
                               i->stage + 1, i->micro, x->forward[cell + x->p->micros]);
    x->state[cell] |= OUT;
    return TP_OK;
}

/* RL behind SE, SL behind RE: `before` is there and `mine` is not. */
static tp_status
rule_once(guests *x, int rank, int64_t at, const tp_instr *i, uint8_t before, uint8_t mine, const char *first)
{
    int64_t cell = cell_of(x, i);
    if (x->state[cell] & mine)
        return tp_sched_refuse(x->p, rank, at, "it is done twice");
    if (before != 0 && !(x->state[cell] & before))
        return tp_sched_refuse(x->p, rank, at, "its %s must come before it", first);
    x->state[cell] |= mine;
    return TP_OK;
}

/* What reads or writes the activations of a micro-batch finds them on its rank. */
static tp_status
rule_here(guests *x, int rank, int64_t at, const tp_instr *i)
{
    int64_t cell = cell_of(x, i);
    if (tp_sched_is_end(i->op))
        return TP_OK;
    if (tp_sched_uses_activation(i->op) && x->state[cell] & OUT && !(x->state[cell] & BACK))
        return tp_sched_refuse(x->p, rank, at, "what it reads is on rank %d: its RL must come before it", x->hosts[i->stage]);
    if (tp_sched_is_swap(i->op) && x->state[cell] & OUT)
        return tp_sched_refuse(x->p, rank, at, "its micro-batch is evicted (SE): one of both would be right");
    x->state[cell] |= tp_sched_is_swap(i->op) ? SWAPPED : 0;
    x->forward[cell] += i->op == TP_OP_F && tp_instr_halves(i) & TP_HALF_SECOND;
    x->backward[cell] += tp_sched_is_backward(i->op);
    x->sent[cell] += i->op == TP_OP_SF ? (int32_t)tp_instr_halves(i) : 0;
    return TP_OK;
}

static tp_status
rule_one(guests *x, int rank, int64_t at, const tp_instr *i)
{
    if (!tp_sched_is_guest(i->op))
        return rule_here(x, rank, at, i);
    TP_TRY(rule_both(x, rank, at, i));
    switch (i->op) {
    case TP_OP_SE: return rule_evict(x, rank, at, i);
    case TP_OP_RE: return rule_once(x, rank, at, i, 0, HELD, "");
    case TP_OP_SL: return rule_once(x, rank, at, i, HELD, GIVEN, "RE");
    default: return rule_once(x, rank, at, i, OUT, BACK, "SE");
    }
}

/* One of the four is there: all are. */
static tp_status
rule_whole(const guests *x, int rank, int64_t at, const tp_instr *i)
{
    static const struct {
        uint8_t bit;
        const char *name;
    } parts[] = {{OUT, "SE"}, {HELD, "RE"}, {GIVEN, "SL"}, {BACK, "RL"}};
    uint8_t state = x->state[cell_of(x, i)];
    for (int k = 0; k < 4; k++)
        if (!(state & parts[k].bit))
            return tp_sched_refuse(x->p, rank, at, "its %s on rank %d is missing", parts[k].name,
                                   k == 0 || k == 3 ? x->p->rank_of[i->stage] : x->hosts[i->stage]);
    return TP_OK;
}

static tp_status
rule_all(guests *x)
{
    const tp_program *p = x->p;
    for (int r = 0; r < p->ranks; r++)
        for (int64_t k = p->begin[r]; k < p->begin[r + 1]; k++)
            TP_TRY(rule_one(x, r, k - p->begin[r], &p->code[k]));
    for (int r = 0; r < p->ranks; r++)
        for (int64_t k = p->begin[r]; k < p->begin[r + 1]; k++)
            if (tp_sched_is_guest(p->code[k].op))
                TP_TRY(rule_whole(x, r, k - p->begin[r], &p->code[k]));
    return TP_OK;
}

tp_status
tp_sched_check_guests(const tp_program *program, unsigned ops)
{
    size_t stages = (size_t)program->stages, cells = stages * (size_t)program->micros;
    guests x = {.p = program, .lowered = (ops & TP_SCHED_MESSAGES) != 0};
    x.hosts = malloc(stages * sizeof *x.hosts);
    x.forward = calloc(3 * cells, sizeof *x.forward);
    x.state = calloc(cells, 1);
    tp_status status = TP_OK;
    if (x.hosts == NULL || x.forward == NULL || x.state == NULL) {
        status = tp_fail(TP_EMEMORY, "no memory to check the guests of %d stages", program->stages);
    } else {
        x.backward = x.forward + cells;
        x.sent = x.backward + cells;
        tp_sched_hosts(program, x.hosts);
        status = rule_all(&x);
    }
    free(x.hosts);
    free(x.forward);
    free(x.state);
    return status;
}
