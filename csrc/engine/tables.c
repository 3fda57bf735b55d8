/* What an engine precomputes from its program: which messages an instruction waits for, and room for events. */
#include "csrc/engine/internal.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

engine_tables
tp_engine_tables(const tp_engine_config *config, int64_t gather_count)
{
    const tp_program *program = config->program;
    size_t count = (size_t)(program->begin[config->rank + 1] - program->begin[config->rank]), ranks = (size_t)program->ranks;
    size_t guests = (size_t)tp_engine_rank_has_guests(config), copies = (size_t)tp_engine_rank_copies(config);
    size_t replicas = (size_t)tp_engine_replicas(config), parts, begins;
    tp_engine_within_bytes(config, &parts, &begins);
    return (engine_tables){.needs = count * sizeof(int32_t),
                           .forward_needs = count * sizeof(int32_t),
                           .from = count * sizeof(int16_t),
                           .received = ranks * sizeof(int32_t),
                           .loan = count * sizeof(uint64_t),
                           .reuses = count * sizeof(int32_t),
                           .events = count * sizeof(tp_event),
                           .gather = (replicas * ranks + 1) * (size_t)gather_count * sizeof(double),
                           .slots = (size_t)program->stages * (size_t)program->micros * sizeof(uint32_t),
                           .loads = guests * count * sizeof(tp_engine_load),
                           .guests = guests * (size_t)program->stages * sizeof(tp_engine_guest),
                           .copied = copies > 0 ? count * sizeof(int32_t) : 0,
                           .copies = copies * sizeof(int32_t),
                           .within = parts,
                           .within_begins = begins,
                           .stages = (size_t)program->stages * sizeof(tp_stage *)};
}

tp_status
tp_engine_take_tables(tp_engine *engine, const tp_program *program, int rank, int64_t gather_count)
{
    engine_tables bytes = tp_engine_tables(&engine->config, gather_count);
    engine->code = program->code + program->begin[rank];
    engine->count = program->begin[rank + 1] - program->begin[rank];
    engine->gather_count = gather_count;
    TP_TRY(tp_heap_alloc(engine->heap, bytes.needs, "the engine's receive table", (void **)&engine->needs));
    TP_TRY(tp_heap_alloc(engine->heap, bytes.forward_needs, "the engine's receive table",
                         (void **)&engine->forward_needs));
    engine->needed = engine->needs;
    TP_TRY(tp_heap_alloc(engine->heap, bytes.from, "the engine's peer table", (void **)&engine->from));
    TP_TRY(tp_heap_alloc(engine->heap, bytes.received, "the engine's counters", (void **)&engine->received));
    TP_TRY(tp_heap_alloc(engine->heap, bytes.loan, "the engine's loans", (void **)&engine->loan));
    TP_TRY(tp_heap_alloc(engine->heap, bytes.reuses, "the engine's loans", (void **)&engine->reuses));
    TP_TRY(tp_heap_alloc(engine->heap, bytes.events, "the engine's event ring", (void **)&engine->events));
    TP_TRY(tp_heap_alloc(engine->heap, bytes.gather, "the engine's gather buffer", (void **)&engine->gather));
    TP_TRY(tp_heap_alloc(engine->heap, bytes.stages, "the engine's stage table", (void **)&engine->stage));
    TP_TRY(tp_heap_alloc(engine->heap, bytes.slots, "the engine's slot table", (void **)&engine->slots));
    TP_TRY(tp_heap_alloc(engine->heap, bytes.loads, "the engine's load table", (void **)&engine->load));
    TP_TRY(tp_heap_alloc(engine->heap, bytes.guests, "the engine's guest table", (void **)&engine->guest));
    TP_TRY(tp_heap_alloc(engine->heap, bytes.copied, "the engine's copies", (void **)&engine->copied));
    TP_TRY(tp_heap_alloc(engine->heap, bytes.copies, "the engine's copies", (void **)&engine->copies));
    TP_TRY(tp_heap_alloc(engine->heap, bytes.within, "the engine's times of recomputation", (void **)&engine->within));
    TP_TRY(tp_heap_alloc(engine->heap, bytes.within_begins, "the engine's times of recomputation", (void **)&engine->within_begins));
    tp_engine_place_within(engine);
    TP_TRY(tp_engine_match_copies(engine, program));
    for (int64_t i = 0; i < engine->count; i++) { /* a micro-batch that was away has another activation slot in its backward */
        const tp_instr *instr = &engine->code[i];
        uint32_t mine = instr->op == TP_OP_F                             ? TP_SLOT(TP_SLOT_ACTIVATION(instr->slot), 0)
                        : instr->op == TP_OP_I || instr->op == TP_OP_B ? TP_SLOT(0, TP_SLOT_GRADIENT(instr->slot))
                                                                       : 0;
        engine->slots[(int64_t)instr->stage * program->micros + instr->micro] |= mine;
    }
    return tp_engine_match_receives(engine, program);
}

void
tp_engine_drop_tables(tp_engine *engine)
{
    tp_heap_free(engine->heap, engine->needs);
    tp_heap_free(engine->heap, engine->forward_needs);
    tp_heap_free(engine->heap, engine->from);
    tp_heap_free(engine->heap, engine->received);
    tp_heap_free(engine->heap, engine->loan);
    tp_heap_free(engine->heap, engine->reuses);
    tp_heap_free(engine->heap, engine->events);
    tp_heap_free(engine->heap, engine->given);
    tp_heap_free(engine->heap, engine->gather);
    tp_heap_free(engine->heap, engine->stage);
    tp_heap_free(engine->heap, engine->slots);
    tp_heap_free(engine->heap, engine->load);
    tp_heap_free(engine->heap, engine->guest);
    tp_heap_free(engine->heap, engine->copied);
    tp_heap_free(engine->heap, engine->copies);
    tp_heap_free(engine->heap, engine->within);
    tp_heap_free(engine->heap, engine->within_begins);
}

/* The key of a message among those a rank receives: its reader is F (from RF, half by half); B, I (from RB); SL (from RE); the first
 * R, I or B (from RL). */
enum { KEY_FIRST_HALF, KEY_FORWARD, KEY_BACKWARD, KEY_EVICTED, KEY_LOADED, KEYS };
static int64_t
message_key(const tp_program *program, int kind, const tp_instr *instr)
{
    return ((int64_t)kind * program->stages + instr->stage) * tp_program_units(program) + tp_program_unit(program, instr);
}

/* Receives posted from one peer so far. */
typedef struct {
    int32_t all, forward;
} receive_count;

typedef struct {
    tp_engine *engine;
    const tp_program *program;
    int64_t *posted_at;    /* [KEYS * stages * units] 1 + position of the receive */
    receive_count *posted; /* [ranks] */
    receive_count *number; /* [count] of a receive: which it is of its peer */
} matching;

static int
is_receive(const tp_instr *instr)
{
    return instr->op == TP_OP_RF || instr->op == TP_OP_RB || instr->op == TP_OP_RE || instr->op == TP_OP_RL;
}

static void
note_receive(matching *m, int64_t i)
{
    const tp_instr *instr = &m->engine->code[i];
    int kind = instr->op == TP_OP_RB ? KEY_BACKWARD : instr->op == TP_OP_RE ? KEY_EVICTED : KEY_LOADED;
    if (instr->op != TP_OP_RF)
        m->posted_at[message_key(m->program, kind, instr)] = i + 1;
    else
        for (int half = KEY_FIRST_HALF; half <= KEY_FORWARD; half++)
            if (tp_instr_halves(instr) & (half == KEY_FORWARD ? TP_HALF_SECOND : TP_HALF_FIRST))
                m->posted_at[message_key(m->program, half, instr)] = i + 1;
    m->posted[instr->peer].all++;
    m->posted[instr->peer].forward += instr->op == TP_OP_RF;
    m->number[i] = m->posted[instr->peer];
}

/* The message that instruction i reads, and what was loaded for it. */
static void
find_receives(matching *m, int64_t i)
{
    tp_engine *engine = m->engine;
    const tp_instr *instr = &engine->code[i];
    int backward = instr->op == TP_OP_B || instr->op == TP_OP_I || tp_instr_is_within(instr);
    int kind = backward                                                ? KEY_BACKWARD
               : instr->op == TP_OP_SL                                 ? KEY_EVICTED
               : instr->op == TP_OP_F && instr->flags & TP_HALF_FIRST ? KEY_FIRST_HALF
                                                                       : KEY_FORWARD;
    int64_t at = backward || instr->op == TP_OP_SL || instr->op == TP_OP_F ? m->posted_at[message_key(m->program, kind, instr)] : 0;
    if (at > 0) {
        engine->from[i] = engine->code[at - 1].peer;
        engine->needs[i] = m->number[at - 1].all;
        engine->forward_needs[i] = m->number[at - 1].forward;
    }
    if (engine->load == NULL || (!backward && instr->op != TP_OP_R))
        return;
    tp_instr whole = *instr;
    whole.slice = 0;
    int64_t *loaded = &m->posted_at[message_key(m->program, KEY_LOADED, &whole)];
    if (*loaded > 0)
        engine->load[i] = (tp_engine_load){m->number[*loaded - 1].all, engine->code[*loaded - 1].peer};
    *loaded = 0; /* the first one waits for it */
}

static void
match_all(matching *m)
{
    tp_engine *engine = m->engine;
    for (int64_t i = 0; i < engine->count; i++) {
        engine->from[i] = -1;
        if (engine->load != NULL)
            engine->load[i] = (tp_engine_load){0, -1};
        if (is_receive(&engine->code[i]))
            note_receive(m, i);
        else
            find_receives(m, i);
    }
}

tp_status
tp_engine_match_receives(tp_engine *engine, const tp_program *program)
{
    int64_t keys = KEYS * (int64_t)program->stages * tp_program_units(program);
    matching m = {.engine = engine, .program = program};
    m.posted_at = calloc((size_t)keys, sizeof *m.posted_at);
    m.posted = calloc((size_t)program->ranks, sizeof *m.posted);
    m.number = calloc((size_t)engine->count + 1, sizeof *m.number);
    int there = m.posted_at != NULL && m.posted != NULL && m.number != NULL;
    if (there)
        match_all(&m);
    free(m.posted_at);
    free(m.posted);
    free(m.number);
    return there ? TP_OK : tp_fail(TP_EMEMORY, "no memory to match %lld instructions", (long long)engine->count);
}

/* What a send reads, and the send before it out of the same slot: 1 + its position, 0: there is none. */
typedef struct {
    const char *begin, *end;
    int64_t before;
} leaving;

/* What instruction i reads, if it sends, or writes, if others may still read it. 0: neither. */
static int
find_leaving(tp_engine *engine, int64_t i, leaving *out)
{
    tp_instr instr = engine->code[i];
    size_t bytes;
    if (instr.op != TP_OP_SF && instr.op != TP_OP_SB && instr.op != TP_OP_F && instr.op != TP_OP_I && instr.op != TP_OP_B)
        return 0;
    instr.op = instr.op == TP_OP_F || instr.op == TP_OP_SF ? TP_OP_SF : TP_OP_SB;
    const char *at = tp_engine_message_end(engine, &instr, &bytes);
    if (at == NULL) /* a model's end: nothing leaves it */
        return 0;
    *out = (leaving){.begin = at, .end = at + bytes};
    return 1;
}

tp_status
tp_engine_match_loans(tp_engine *engine)
{
    const tp_program *program = engine->config.program;
    int64_t *last = calloc(2 * (size_t)program->stages * (size_t)program->micros, sizeof *last); /* 1 + position, of each slot */
    leaving *sent = calloc((size_t)engine->count + 1, sizeof *sent);
    int there = last != NULL && sent != NULL;
    for (int64_t i = 0; there && i < engine->count; i++) {
        const tp_instr *instr = &engine->code[i];
        leaving own;
        engine->reuses[i] = -1;
        if (!find_leaving(engine, i, &own))
            continue;
        int gradient = instr->op != TP_OP_F && instr->op != TP_OP_SF;
        int64_t slot = gradient ? TP_SLOT_GRADIENT(instr->slot) : TP_SLOT_ACTIVATION(instr->slot);
        int64_t *newest = &last[((int64_t)gradient * program->stages + instr->stage) * program->micros + slot], at = *newest;
        if (instr->op == TP_OP_SF || instr->op == TP_OP_SB) {
            own.before = at;
            sent[i] = own;
            *newest = i + 1;
            continue;
        }
        while (at > 0 && (sent[at - 1].end <= own.begin || own.end <= sent[at - 1].begin))
            at = sent[at - 1].before;
        engine->reuses[i] = (int32_t)(at - 1);
    }
    free(last);
    free(sent);
    return there ? TP_OK : tp_fail(TP_EMEMORY, "no memory to match the loans of %lld instructions", (long long)engine->count);
}

tp_status
tp_engine_check_comm(const tp_engine_config *config)
{
    const tp_comm *comm = config->comm;
    int of_each = config->program->ranks, ranks = of_each * tp_engine_replicas(config);
    int rank = config->replica * of_each + config->rank;
    if (comm == NULL && ranks > 1)
        return tp_fail(TP_EVALUE, "a program of %d ranks needs a communicator", ranks);
    if (comm != NULL && (comm->rank != rank || comm->ranks != ranks))
        return tp_fail(TP_EVALUE, "the communicator is rank %d of %d: rank %d of %d would be right", comm->rank,
                       comm->ranks, rank, ranks);
    return TP_OK;
}

/* The most receives from `peer` that wait at once. */
static int
most_posted(const tp_engine *engine, int peer)
{
    int posted = 0, taken = 0, most = 0;
    for (int64_t i = 0; i < engine->count; i++) {
        const tp_instr *instr = &engine->code[i];
        if (is_receive(instr) && instr->peer == peer)
            posted++;
        if (engine->from[i] == peer && engine->needs[i] > taken)
            taken = engine->needs[i];
        if (engine->load != NULL && engine->load[i].from == peer && engine->load[i].needs > taken)
            taken = engine->load[i].needs;
        most = posted - taken > most ? posted - taken : most;
    }
    return most;
}

tp_status
tp_engine_reserve_posted(const tp_engine *engine)
{
    tp_comm *comm = engine->config.comm;
    for (int peer = 0; comm != NULL && peer < engine->config.program->ranks; peer++) {
        int most = most_posted(engine, peer);
        if (comm->ops->most_posted == 0 && most > 0)
            TP_TRY(comm->ops->reserve(comm, engine->first + peer, (unsigned)most));
        else if (most > comm->ops->most_posted)
            return tp_fail(TP_EVALUE,
                           "rank %d posts %d receives from rank %d at once, and %s takes %d: fewer slices or micro-batches, or a "
                           "schedule that sends less far ahead, would be right",
                           engine->config.rank, most, peer, comm->ops->name, comm->ops->most_posted);
    }
    return TP_OK;
}

static tp_status
receive_until(tp_engine *engine, int peer, int32_t needed)
{
    for (; engine->received[peer] < needed; engine->received[peer]++)
        TP_TRY(engine->config.comm->ops->recv_wait(engine->config.comm, engine->first + peer));
    return TP_OK;
}

/* Both ends name a message by the stage that reads it; a guest is its own stage's. */
static uint64_t
message_tag(const tp_instr *instr)
{
    int gradient = instr->op == TP_OP_SB || instr->op == TP_OP_RB, guest = instr->op >= TP_OP_SE && instr->op <= TP_OP_RL;
    int reader = guest || is_receive(instr) ? instr->stage : gradient ? instr->stage - 1 : instr->stage + 1;
    unsigned slice = instr->slice + (instr->flags & TP_HALF_SECOND ? 1u : 0u); /* a halved micro-batch has one slice */
    int op = !guest ? (gradient ? TP_OP_RB : TP_OP_RF) : instr->op == TP_OP_SE || instr->op == TP_OP_RE ? TP_OP_RE : TP_OP_RL;
    return tp_tag((unsigned)op, (unsigned)reader, instr->micro, slice);
}

/* Until nobody reads any more what instruction i writes over. */
static tp_status
wait_for_reader(tp_engine *engine, int64_t i)
{
    int64_t sent = engine->reuses[i];
    uint64_t loan = sent < 0 ? 0 : engine->loan[sent];
    if (loan == 0)
        return TP_OK;
    const tp_instr *instr = &engine->code[sent];
    size_t bytes;
    (void)(instr->op == TP_OP_SE ? tp_engine_guest_end : tp_engine_message_end)(engine, instr, &bytes);
    engine->loan[sent] = 0;
    return engine->config.comm->ops->reclaim(engine->config.comm, engine->first + instr->peer, loan, message_tag(instr), bytes);
}

tp_status
tp_engine_wait_inputs(tp_engine *engine, int64_t i)
{
    if (engine->lends)
        TP_TRY(wait_for_reader(engine, i));
    if (engine->load != NULL && engine->load[i].from >= 0)
        TP_TRY(receive_until(engine, engine->load[i].from, engine->load[i].needs));
    if (engine->from[i] >= 0)
        TP_TRY(receive_until(engine, engine->from[i], engine->needed[i]));
    return engine->awaited == NULL || engine->awaited[i] == 0 ? TP_OK : tp_engine_wait_copies(engine, i);
}

tp_status
tp_engine_message(tp_engine *engine, const tp_instr *instr, void *data, size_t bytes)
{
    tp_comm *comm = engine->config.comm;
    int peer = engine->first + instr->peer;
    if (is_receive(instr))
        return comm->ops->recv_post(comm, peer, message_tag(instr), data, bytes);
    if (engine->lends)
        return comm->ops->lend(comm, peer, message_tag(instr), data, bytes, &engine->loan[instr - engine->code]);
    return comm->ops->send(comm, peer, message_tag(instr), data, bytes);
}

tp_status
tp_engine_check_abort(const tp_engine *engine)
{
    int first;
    char text[512];
    if (engine->config.region == NULL || tp_region_aborted(engine->config.region, &first, text) == TP_OK)
        return TP_OK;
    if (first < 0)
        return tp_fail(TP_EABORTED, "rank %d was ended: %s", engine->first + engine->config.rank, text);
    return tp_fail(TP_EABORTED, "rank %d was ended because rank %d failed first: %s", engine->first + engine->config.rank,
                   first, text);
}

tp_status
tp_engine_check_told(const tp_engine *engine, tp_status status)
{
    if (status == TP_EABORTED && tp_deadline_was_interrupted())
        TP_TRY(tp_engine_check_abort(engine));
    return status;
}

tp_status
tp_engine_note(tp_engine *engine, const tp_instr *instr)
{
    if (engine->config.region == NULL)
        return TP_OK;
    tp_region_progress(engine->config.region, engine->first + engine->config.rank, (uint64_t)engine->step,
                       tp_tag(instr->op, instr->stage, instr->micro, instr->slice));
    return tp_engine_check_abort(engine);
}

tp_status
tp_engine_fail(tp_engine *engine, tp_status status)
{
    if (status != TP_OK && status != TP_EABORTED && engine->config.region != NULL)
        tp_region_abort(engine->config.region, status, engine->first + engine->config.rank, tp_error_message());
    tp_comm *comm = engine->config.comm;
    if (status != TP_OK)
        tp_engine_halt_sums(engine);
    if (status != TP_OK && comm != NULL && comm->ops->withdraw != NULL) { /* the engine's memory may be given back from now on */
        tp_error_state reason;
        tp_error_save(&reason);
        comm->ops->withdraw(comm);
        tp_error_restore(&reason);
    }
    return status;
}
