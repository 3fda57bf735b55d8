/* Do ranks wait for each other for ever, where messages go through slots? A channel is one direction of one pair of ranks, and has
 * `slots` of them at both ends (cuda/nccl.h): a message is copied into one, sent, received into one, and copied out right before it is
 * read. So a message also waits until the one as many before as there are slots has been read, which the checker's proof
 * (progress.c) does not know. Programs are run here by these rules alone, until none moves: what becomes possible stays so, whatever
 * else moves first, so that a rank is tried again only where a message of its own has come over. */
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

/* What reads a message: a first half of a forward, the rest of it or all, a backward, and the two ways of a guest. */
enum { FIRST_HALF, FORWARD, BACKWARD, EVICTED, LOADED, READERS };
enum { OF_FORWARDS, OF_BACKWARDS, OF_EVICTED, OF_LOADED, CHANNELS }; /* of a pair, each with slots of its own */

typedef struct {
    int32_t pair, number; /* from one rank to another; of its channel's */
    int32_t channel;
    int32_t place;        /* 1 + how many that rank had announced of the pair before it */
    int32_t behind;       /* a guest's: the message that must have left before this may be written; -1 */
    uint8_t guest, sent, posted, over, read;
} message;

typedef struct {
    const tp_program *p;
    tp_pairs pairs;
    int slots, direct;
    int64_t units;
    message *all;
    int32_t *made;        /* [READERS][stages][units] which message that is; -1: none */
    int32_t *in_channel;  /* the messages of one channel after the other, in the order in which they are sent */
    int32_t *begin, *next; /* [pairs * CHANNELS + 1] of a channel in it; [pairs * CHANNELS] the first that is not over */
    int32_t *posted, *list, *seen, *there, *count; /* [pairs + 1] where a pair's begin in `list`, as their reader announces them;
                                                      [pairs] how many of these it has read, are over, and are announced */
    int32_t *left;        /* [pairs] the last guest that left by it; -1 */
    int32_t *away;        /* [stages][held] the guest that left a slot, whose next forward waits for that; -1 */
    int32_t *home;        /* [stages][micros] the guest that came back, until it is read; -1 */
    int64_t *at;          /* [ranks] */
    int32_t *stack;       /* ranks that may go on */
    uint8_t *queued;      /* [ranks] */
    int stacked;
    int64_t asked;        /* steps since somebody was asked whether to stop */
    int32_t messages, held; /* held: slots that guests leave */
} machine;

static int
reader_of(const tp_instr *instr)
{
    switch (instr->op) {
    case TP_OP_F:
    case TP_OP_SF:
    case TP_OP_RF:
        return instr->flags & TP_HALF_FIRST ? FIRST_HALF : FORWARD;
    case TP_OP_SE:
    case TP_OP_RE:
        return EVICTED;
    case TP_OP_SL:
    case TP_OP_RL:
        return LOADED;
    default:
        return BACKWARD;
    }
}

static int32_t *
made_for(const machine *m, int reader, int stage, const tp_instr *instr)
{
    return &m->made[((int64_t)reader * m->p->stages + stage) * m->units + tp_program_unit(m->p, instr)];
}

static int
is_receive(int op)
{
    return op == TP_OP_RF || op == TP_OP_RB || op == TP_OP_RE || op == TP_OP_RL;
}

static int
read_at(const tp_instr *instr) /* the stage */
{
    return instr->stage + (instr->op == TP_OP_SF) - (instr->op == TP_OP_SB);
}

/* ---- messages ------------------------------------------------------------------------------------------------------------ */

static tp_status
take(machine *m)
{
    const tp_program *p = m->p;
    size_t pairs = (size_t)m->pairs.count, stages = (size_t)p->stages, most = (size_t)m->messages + 1;
    size_t ints = 2 * most + (2 * CHANNELS + 5) * pairs + 2 + stages * ((size_t)m->held + (size_t)p->micros + READERS * (size_t)m->units);
    m->all = calloc(most, sizeof *m->all);
    m->made = calloc(ints, sizeof *m->made);
    m->at = malloc((size_t)p->ranks * sizeof *m->at);
    m->stack = malloc((size_t)p->ranks * sizeof *m->stack);
    m->queued = calloc((size_t)p->ranks, 1);
    if (m->all == NULL || m->made == NULL || m->at == NULL || m->stack == NULL || m->queued == NULL)
        return tp_fail(TP_EMEMORY, "no memory to follow %d messages", m->messages);
    m->away = m->made + READERS * stages * (size_t)m->units;
    m->home = m->away + stages * (size_t)m->held;
    m->left = m->home + stages * (size_t)p->micros;
    m->in_channel = m->left + pairs;
    for (int32_t *none = m->made; none < m->in_channel; none++)
        *none = -1;
    m->list = m->in_channel + most;
    m->begin = m->list + most;
    m->next = m->begin + CHANNELS * pairs + 1;
    m->posted = m->next + CHANNELS * pairs;
    m->seen = m->posted + pairs + 1;
    m->there = m->seen + pairs;
    m->count = m->there + pairs;
    return TP_OK;
}

/* All that are sent, in the order of each rank. */
static tp_status
make_messages(machine *m)
{
    const tp_program *p = m->p;
    int32_t made = 0;
    for (int64_t i = 0; i < p->begin[p->ranks]; i++) {
        const tp_instr *instr = &p->code[i];
        if (!tp_sched_is_send(instr->op))
            continue;
        int reader = reader_of(instr), stage = read_at(instr);
        int32_t pair = tp_pairs_of(&m->pairs, instr);
        if (pair < 0)
            return tp_fail(TP_ESCHEDULE, "%d%s%d.%d goes to no other rank: a program that passes check would be right", instr->stage,
                           tp_op_name(instr->op), instr->micro, instr->slice);
        int32_t channel = pair * CHANNELS + (reader == FIRST_HALF ? OF_FORWARDS : reader - FORWARD);
        m->all[made] = (message){.pair = pair, .number = m->next[channel]++, .channel = channel, .behind = -1,
                                 .guest = m->direct && reader >= EVICTED};
        *made_for(m, reader, stage, instr) = made;
        if (instr->op == TP_OP_SF && !(instr->flags & TP_HALVES)) /* the first half of a forward may read it, too */
            *made_for(m, FIRST_HALF, stage, instr) = made;
        made++;
    }
    for (int32_t c = 0; c < m->pairs.count * CHANNELS; c++) {
        m->begin[c + 1] = m->begin[c] + m->next[c];
        m->next[c] = m->begin[c];
        m->posted[c / CHANNELS + 1] = m->begin[c + 1]; /* as many are announced as are sent */
    }
    for (int32_t k = 0; k < made; k++)
        m->in_channel[m->begin[m->all[k].channel] + m->all[k].number] = k;
    return TP_OK;
}

/* Each receive has its message, and each message one receive; what goes back came. */
static tp_status
match(const machine *m)
{
    const tp_program *p = m->p;
    int32_t found = 0;
    for (int64_t i = 0; i < p->begin[p->ranks]; i++) {
        const tp_instr *instr = &p->code[i];
        if (instr->op == TP_OP_SL && *made_for(m, EVICTED, instr->stage, instr) < 0)
            return tp_fail(TP_ESCHEDULE, "%dSL%d sends what was not received: a program that passes check would be right", instr->stage,
                           instr->micro);
        if (!is_receive(instr->op))
            continue;
        int32_t k = *made_for(m, reader_of(instr), instr->stage, instr);
        found++;
        if (k < 0 || m->all[k].read++)
            return tp_fail(TP_ESCHEDULE, "%d%s%d.%d does not receive one message: a program that passes check would be right",
                           instr->stage, tp_op_name(instr->op), instr->micro, instr->slice);
    }
    for (int32_t k = 0; k < m->messages; k++)
        m->all[k].read = 0;
    return found == m->messages ? TP_OK : tp_fail(TP_ESCHEDULE, "%d messages are sent and %d received: a program that passes check "
                                                  "would be right", m->messages, found);
}

/* ---- running ------------------------------------------------------------------------------------------------------------- */

static message *
before_by_slots(const machine *m, const message *one)
{
    return &m->all[m->in_channel[m->begin[one->channel] + one->number - m->slots]];
}

/* Can it be over, where the one before is? Into a slot that has been read, or where a guest has left. */
static int
moves(const machine *m, const message *one)
{
    int room = one->guest || one->number < m->slots || before_by_slots(m, one)->read;
    return one->sent && one->posted && room && (one->behind < 0 || m->all[one->behind].over);
}

static void
wake(machine *m, int rank)
{
    if (!m->queued[rank]) {
        m->queued[rank] = 1;
        m->stack[m->stacked++] = rank;
    }
}

/* Something of this channel's messages has changed. What goes the other way behind one of them is over by a change of its own: its
 * reader had sent that one before it announced this, and in a program that passes check the other rank, which takes messages of a
 * pair in their order and waits for none that waits for it, had announced that one before it sent this. */
static void
carry(machine *m, int32_t channel)
{
    int32_t *next = &m->next[channel], from = *next, pair = channel / CHANNELS;
    while (*next < m->begin[channel + 1] && moves(m, &m->all[m->in_channel[*next]]))
        m->all[m->in_channel[(*next)++]].over = 1;
    if (*next == from)
        return;
    wake(m, m->pairs.source[pair]); /* a slot is free to be written, or to compute in */
    wake(m, m->pairs.target[pair]);
}

/* Up to this message all that its reader announced of the pair must be there: it takes them in their order. */
static int
is_there(const machine *m, const message *one)
{
    int32_t *there = &m->there[one->pair];
    while (*there < one->place && m->all[m->list[m->posted[one->pair] + *there]].over)
        ++*there;
    return *there >= one->place;
}

static void
read_to(machine *m, const message *one)
{
    while (m->seen[one->pair] < one->place) {
        message *next = &m->all[m->list[m->posted[one->pair] + m->seen[one->pair]++]];
        next->read = 1;
        carry(m, next->channel);
    }
}

/* By the pair the other way, what left last. */
static int32_t
left_before(const machine *m, const tp_instr *instr)
{
    return m->left[(instr->op == TP_OP_RL ? m->pairs.evict : m->pairs.load)[instr->stage]];
}

static void
announce(machine *m, const tp_instr *instr)
{
    int32_t k = *made_for(m, reader_of(instr), instr->stage, instr);
    message *one = &m->all[k];
    one->posted = 1;
    m->list[m->posted[one->pair] + m->count[one->pair]] = k;
    one->place = ++m->count[one->pair];
    if (one->guest)
        one->behind = left_before(m, instr);
    if (instr->op == TP_OP_RL)
        m->home[(int64_t)instr->stage * m->p->micros + instr->micro] = k;
    carry(m, one->channel);
}

/* 0: it waits. */
static int
send(machine *m, const tp_instr *instr)
{
    int32_t k = *made_for(m, reader_of(instr), read_at(instr), instr);
    message *one = &m->all[k];
    if (!one->guest && one->number >= m->slots && !before_by_slots(m, one)->over) /* that has not left the slot */
        return 0;
    if (instr->op == TP_OP_SL) {
        message *kept = &m->all[*made_for(m, EVICTED, instr->stage, instr)];
        if (!is_there(m, kept))
            return 0;
        read_to(m, kept);
    }
    one->sent = 1;
    if (one->guest)
        m->left[one->pair] = k;
    if (instr->op == TP_OP_SE)
        m->away[(int64_t)instr->stage * m->held + TP_SLOT_ACTIVATION(instr->slot)] = k;
    carry(m, one->channel);
    return 1;
}

static int
compute(machine *m, const tp_instr *instr)
{
    int32_t none = -1, *home = &none, *away = &none, own = -1;
    if (tp_sched_reads_load(instr->op))
        home = &m->home[(int64_t)instr->stage * m->p->micros + instr->micro];
    if (instr->op == TP_OP_F && TP_SLOT_ACTIVATION(instr->slot) < (uint32_t)m->held)
        away = &m->away[(int64_t)instr->stage * m->held + TP_SLOT_ACTIVATION(instr->slot)];
    if (instr->op == TP_OP_F || tp_sched_is_backward(instr->op))
        own = *made_for(m, reader_of(instr), instr->stage, instr);
    if ((*away >= 0 && !m->all[*away].over) || (own >= 0 && !is_there(m, &m->all[own])) ||
        (*home >= 0 && !is_there(m, &m->all[*home])))
        return 0;
    if (own >= 0)
        read_to(m, &m->all[own]);
    if (*home >= 0)
        read_to(m, &m->all[*home]);
    *home = *away = -1;
    return 1;
}

static void
run(machine *m, int rank)
{
    for (; m->at[rank] < m->p->begin[rank + 1]; m->at[rank]++) {
        const tp_instr *instr = &m->p->code[m->at[rank]];
        if (is_receive(instr->op))
            announce(m, instr);
        else if (!(tp_sched_is_send(instr->op) ? send : compute)(m, instr))
            break;
    }
}

static tp_status
follow(machine *m)
{
    const tp_program *p = m->p;
    memcpy(m->at, p->begin, (size_t)p->ranks * sizeof *m->at);
    for (int rank = p->ranks - 1; rank >= 0; rank--)
        wake(m, rank);
    while (m->stacked > 0) {
        int rank = m->stack[--m->stacked];
        int64_t from = m->at[rank];
        run(m, rank);
        m->queued[rank] = 0; /* not before: it saw what it did itself */
        TP_TRY(tp_deadline_check_after(&m->asked, 16 * (m->at[rank] + 1 - from)));
    }
    return TP_OK;
}

tp_status
tp_program_stuck(const tp_program *program, int slots, int guests_have_slots, int64_t *at)
{
    machine m = {.p = program, .slots = slots, .direct = !guests_have_slots, .units = tp_program_units(program)};
    unsigned ops = 0;
    int64_t sends = 0;
    for (int64_t i = 0; i < program->begin[program->ranks]; i++) {
        const tp_instr *instr = &program->code[i];
        ops |= TP_SCHED_BIT(instr->op);
        sends += tp_sched_is_send(instr->op);
        if (instr->op == TP_OP_SE && (int32_t)TP_SLOT_ACTIVATION(instr->slot) >= m.held)
            m.held = (int32_t)TP_SLOT_ACTIVATION(instr->slot) + 1;
    }
    m.messages = (int32_t)sends;
    TP_TRY(tp_pairs_open(program, ops, &m.pairs));
    tp_status status = take(&m);
    if (status == TP_OK)
        status = make_messages(&m);
    if (status == TP_OK)
        status = match(&m);
    if (status == TP_OK)
        status = follow(&m);
    for (int rank = 0; status == TP_OK && rank < program->ranks; rank++)
        at[rank] = m.at[rank] - program->begin[rank];
    free(m.all);
    free(m.made);
    free(m.at);
    free(m.stack);
    free(m.queued);
    tp_pairs_close(&m.pairs);
    return status;
}
