/* Which buffer each instruction uses: slots are assigned here, and counted for those who allocate them. */
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

/* A slot number of one kind on one stage: taken by a micro-batch at its first use, free behind its last; of an activation that is
 * evicted, free behind its SE and taken anew by its RL. */
typedef struct {
    int32_t *slot_of; /* [stages * micros]; -1 before the first use */
    int32_t *uses;    /* [stages * micros] instructions that use it and are still to come */
    int32_t *later;   /* [stages * micros] of these, behind its SE; NULL: nothing is evicted */
    uint8_t *taken;   /* [stages * micros]: taken[stage * micros + slot] */
    int32_t *lowest;  /* [stages] no slot below is free */
} pool;

int
tp_sched_reads_next(const tp_program *program, const tp_instr *instr)
{
    return (instr->op == TP_OP_B || instr->op == TP_OP_I) && !tp_program_is_last(program, instr->stage) &&
           !tp_program_remote(program, instr->stage + 1);
}

static tp_status
pool_open(pool *p, int stages, int micros, int evicted)
{
    size_t cells = (size_t)stages * (size_t)micros;
    p->slot_of = malloc(cells * sizeof *p->slot_of);
    p->uses = calloc((evicted ? 2 : 1) * cells, sizeof *p->uses);
    p->taken = calloc(cells, 1);
    p->lowest = calloc((size_t)stages, sizeof *p->lowest);
    if (p->slot_of == NULL || p->uses == NULL || p->taken == NULL || p->lowest == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the slots of %d stages and %d micro-batches", stages, micros);
    memset(p->slot_of, -1, cells * sizeof *p->slot_of);
    p->later = evicted ? p->uses + cells : NULL;
    return TP_OK;
}

static void
pool_close(pool *p)
{
    free(p->slot_of);
    free(p->uses);
    free(p->taken);
    free(p->lowest);
}

static int
pool_use(pool *p, int stage, int64_t micros, int micro)
{
    int64_t cell = stage * micros + micro;
    int32_t slot = p->slot_of[cell];
    if (slot < 0) {
        slot = p->lowest[stage];
        while (p->taken[stage * micros + slot]) /* at most `micros` are ever taken, so one is free */
            slot++;
        p->lowest[stage] = slot + 1;
        p->taken[stage * micros + slot] = 1;
        p->slot_of[cell] = slot;
    }
    if (--p->uses[cell] == 0) {
        p->taken[stage * micros + slot] = 0;
        p->lowest[stage] = slot < p->lowest[stage] ? slot : p->lowest[stage];
        if (p->later != NULL) {
            p->slot_of[cell] = -1;
            p->uses[cell] = p->later[cell];
            p->later[cell] = 0;
        }
    }
    return slot;
}

/* What count_uses counted for activations, where some are evicted: what is behind their SE apart, and what hosts do. slot_of is 0
 * behind an SE here. */
static void
count_guests(const tp_program *program, pool *activation, pool *guest)
{
    size_t cells = (size_t)program->stages * (size_t)program->micros;
    memset(activation->uses, 0, cells * sizeof *activation->uses);
    for (int64_t i = 0; i < program->begin[program->ranks]; i++) {
        const tp_instr *instr = &program->code[i];
        int64_t cell = (int64_t)instr->stage * program->micros + instr->micro;
        int32_t *uses = activation->slot_of[cell] < 0 ? activation->uses : activation->later;
        guest->uses[cell] += tp_sched_is_host(instr->op);
        uses[cell] += tp_sched_uses_activation(instr->op);
        if (instr->op == TP_OP_SE)
            activation->slot_of[cell] = 0;
    }
    memset(activation->slot_of, -1, cells * sizeof *activation->slot_of);
}

static void
count_uses(const tp_program *program, pool *activation, pool *gradient, pool *guest)
{
    int64_t length = program->begin[program->ranks], micros = program->micros;
    for (int64_t i = 0; i < length; i++) {
        const tp_instr *instr = &program->code[i];
        activation->uses[instr->stage * micros + instr->micro] += tp_sched_uses_activation(instr->op);
        gradient->uses[instr->stage * micros + instr->micro] += tp_sched_uses_gradient(instr->op);
        if (tp_sched_reads_next(program, instr))
            gradient->uses[(instr->stage + 1) * micros + instr->micro]++;
    }
    if (activation->later != NULL)
        count_guests(program, activation, guest);
}

static void
assign(tp_program *program, pool *activation, pool *gradient, pool *guest)
{
    int64_t length = program->begin[program->ranks], micros = program->micros;
    count_uses(program, activation, gradient, guest);
    for (int64_t i = 0; i < length; i++) {
        if (i % TP_SCHED_PART == 0 && tp_deadline_told())
            return;
        tp_instr *instr = &program->code[i];
        int a = tp_sched_uses_activation(instr->op) ? pool_use(activation, instr->stage, micros, instr->micro)
                : tp_sched_is_host(instr->op)       ? pool_use(guest, instr->stage, micros, instr->micro)
                                                    : 0;
        int g = tp_sched_uses_gradient(instr->op) ? pool_use(gradient, instr->stage, micros, instr->micro) : 0;
        if (tp_sched_reads_next(program, instr))
            pool_use(gradient, instr->stage + 1, micros, instr->micro);
        instr->slot = TP_SLOT(a, g);
    }
}

tp_status
tp_sched_assign_slots(tp_program *program, unsigned ops)
{
    int guests = (ops & TP_SCHED_GUESTS) != 0;
    pool activation = {0}, gradient = {0}, guest = {0};
    tp_status status = pool_open(&activation, program->stages, program->micros, guests);
    if (status == TP_OK)
        status = pool_open(&gradient, program->stages, program->micros, 0);
    if (status == TP_OK && guests)
        status = pool_open(&guest, program->stages, program->micros, 0);
    if (status == TP_OK) {
        assign(program, &activation, &gradient, &guest);
        status = tp_deadline_check_told();
    }
    pool_close(&guest);
    pool_close(&activation);
    pool_close(&gradient);
    return status;
}

tp_status
tp_program_assign_slots(tp_program *program)
{
    if (!tp_sched_is_dense(program))
        return tp_program_check_order(program); /* refuses: instructions are missing */
    return tp_sched_assign_slots(program, tp_sched_ops(program));
}

/* Messages, AR or OPT? From the end, where OPT is: asked once a stage. */
static int
is_slotted(const tp_program *program)
{
    for (int64_t i = program->begin[program->ranks] - 1; i >= 0; i--)
        if (TP_SCHED_BIT(program->code[i].op & 31) & TP_SCHED_SLOTTED)
            return 1;
    return 0;
}

static int
slots_of(const tp_program *program, int stage, int gradient)
{
    if (stage < 0 || stage >= program->stages || !is_slotted(program))
        return 0;
    int rank = program->rank_of[stage], most = -1;
    for (int64_t i = program->begin[rank]; i < program->begin[rank + 1]; i++) {
        const tp_instr *instr = &program->code[i];
        if (instr->stage != stage || !(gradient ? tp_sched_uses_gradient(instr->op) : tp_sched_uses_activation(instr->op)))
            continue;
        int slot = (int)(gradient ? TP_SLOT_GRADIENT(instr->slot) : TP_SLOT_ACTIVATION(instr->slot));
        most = slot > most ? slot : most;
    }
    return most + 1;
}

int
tp_program_activation_slots(const tp_program *program, int stage)
{
    return slots_of(program, stage, 0);
}

int
tp_program_gradient_slots(const tp_program *program, int stage)
{
    return slots_of(program, stage, 1);
}

int
tp_program_versions(const tp_program *program, int stage)
{
    int rank = program->rank_of[stage], made = 0, before = 0, most = 0;
    int64_t oldest = program->begin[rank]; /* forward of the micro-batches without their U, and `before`: U in front of it */
    for (int64_t i = program->begin[rank]; i < program->begin[rank + 1]; i++) {
        const tp_instr *update = &program->code[i];
        if (update->stage != stage || update->op != TP_OP_U)
            continue;
        made++;
        for (; oldest < i; oldest++) {
            const tp_instr *instr = &program->code[oldest];
            if (instr->stage == stage && instr->op == TP_OP_F && instr->micro > update->micro)
                break;
            before += instr->stage == stage && instr->op == TP_OP_U;
        }
        int versions = oldest < i ? made - before + 1 : 1;
        most = versions > most ? versions : most;
    }
    return most;
}

static int
is_apart(const tp_instr *instr)
{
    return instr->op == TP_OP_I || instr->op == TP_OP_W;
}

int
tp_program_has_apart(const tp_program *program, int stage)
{
    int rank = program->rank_of[stage];
    for (int64_t i = program->begin[rank]; i < program->begin[rank + 1]; i++)
        if (program->code[i].stage == stage && is_apart(&program->code[i]))
            return 1;
    return 0;
}

int
tp_program_within(const tp_program *program, int stage)
{
    int rank = program->rank_of[stage], within = 0;
    for (int64_t i = program->begin[rank]; i < program->begin[rank + 1]; i++)
        within += program->code[i].stage == stage && tp_instr_is_within(&program->code[i]);
    return within;
}

void
tp_program_count(const tp_program *program, tp_stage_counts *counts)
{
    int slotted = is_slotted(program), updates = 0;
    for (int v = 0; v < program->stages; v++)
        counts[v] = (tp_stage_counts){.two_places = -1};
    for (int r = 0; r < program->ranks; r++)
        for (int64_t i = program->begin[r]; i < program->begin[r + 1]; i++) {
            const tp_instr *instr = &program->code[i];
            tp_stage_counts *c = &counts[instr->stage];
            int32_t activation = slotted && tp_sched_uses_activation(instr->op) ? (int32_t)TP_SLOT_ACTIVATION(instr->slot) + 1 : 0;
            int32_t gradient = slotted && tp_sched_uses_gradient(instr->op) ? (int32_t)TP_SLOT_GRADIENT(instr->slot) + 1 : 0;
            if (program->rank_of[instr->stage] != r)
                continue;
            c->activation_slots = activation > c->activation_slots ? activation : c->activation_slots;
            c->gradient_slots = gradient > c->gradient_slots ? gradient : c->gradient_slots;
            if (instr->op == TP_OP_SO && c->two_places < 0)
                c->two_places = (instr->flags & TP_TWO_PLACES) != 0;
            c->apart |= is_apart(instr);
            c->within += tp_instr_is_within(instr);
            updates |= instr->op == TP_OP_U;
        }
    for (int v = 0; v < program->stages; v++) {
        counts[v].two_places = counts[v].two_places > 0;
        counts[v].versions = updates ? tp_program_versions(program, v) : 0;
    }
}
