/* The engine with kernels replaced by timed waits: order, messages and waits are real, only the work is sleep.
 *
 * Ninety-six ranks on two cores wake late, all at the same moments, which a cluster's ranks would not. So a rank's work
 * begins when its input was ready and its last work was due, not when this machine found time to wake it: messages carry
 * the time at which they were due, and lateness is measured (step time is taken from the clock), not passed on. */
#include "csrc/engine/internal.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"

#define NAP_NS 100000000

tp_status
tp_engine_open_emulated(const tp_program *program, int rank, const tp_durations *durations, tp_comm *comm,
                        tp_region *region, tp_heap *heap, tp_engine **out)
{
    if (rank < 0 || rank >= program->ranks)
        return tp_fail(TP_EVALUE, "rank is %d: 0 to %d would be right", rank, program->ranks - 1);
    tp_engine_config config = {.program = program, .rank = rank, .comm = comm, .region = region};
    TP_TRY(tp_engine_check_comm(&config));
    tp_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return tp_fail(TP_EMEMORY, "no memory for an engine");
    engine->config = config;
    engine->heap = heap;
    engine->durations = durations;
    tp_status status = tp_engine_take_tables(engine, program, rank, 1);
    if (status == TP_OK)
        status = tp_engine_reserve_posted(engine);
    if (status == TP_OK)
        status = tp_heap_alloc(heap, (size_t)engine->count * sizeof *engine->stamps, "message stamps",
                               (void **)&engine->stamps);
    if (status == TP_OK && durations->latency_s != NULL)
        status = tp_sched_links_open(program, &engine->links);
    tp_sched_links_reset(&engine->links, durations);
    if (status == TP_OK)
        status = tp_sched_sums_open(program, durations, &engine->beside);
    if (status != TP_OK) {
        tp_engine_close(engine);
        return status;
    }
    *out = engine;
    return TP_OK;
}

static double
seconds_of(const tp_engine *engine, int op, unsigned flags, const tp_instr *instr)
{
    int64_t unit = op == TP_OP_OPT || op == TP_OP_AR ? 0 : tp_program_unit(engine->config.program, instr);
    return tp_durations_s(engine->durations, op, flags, instr->stage, unit);
}

/* The receive of the guest that instruction i sends home, or that came home for it. */
static int64_t
guest_of(const tp_engine *engine, int64_t i)
{
    const tp_instr *reader = &engine->code[i];
    uint16_t wanted = reader->op == TP_OP_SL ? TP_OP_RE : TP_OP_RL;
    int64_t at = i;
    while (engine->code[--at].op != wanted || engine->code[at].stage != reader->stage || engine->code[at].micro != reader->micro) {
    }
    return at;
}

/* The receive of the message that instruction i reads. */
static int64_t
receive_of(const tp_engine *engine, int64_t i)
{
    const tp_instr *reader = &engine->code[i];
    uint16_t wanted = reader->op == TP_OP_F ? TP_OP_RF : TP_OP_RB;
    int64_t at = i;
    if (reader->op == TP_OP_SL)
        return guest_of(engine, i);
    while (engine->code[--at].op != wanted || engine->code[at].stage != reader->stage ||
           engine->code[at].micro != reader->micro || engine->code[at].slice != reader->slice ||
           !(tp_instr_halves(&engine->code[at]) & tp_instr_halves(reader))) {
    }
    return at;
}

static int64_t
guest_lag_ns(const tp_engine *engine, const tp_instr *instr)
{
    const tp_program *program = engine->config.program;
    int64_t unit = program->offset[instr->micro];
    const double *lag_s = engine->durations->guest_comm_s;
    return lag_s == NULL ? 0 : (int64_t)(lag_s[instr->stage * tp_program_units(program) + unit] * 1e9);
}

/* When the guest that instruction i sends at due_ns leaves: when the one before it has come. */
static int64_t
guest_leaves_ns(const tp_engine *engine, int64_t i, int64_t due_ns)
{
    const tp_instr *instr = &engine->code[i];
    int64_t at = i - 1;
    while (at >= 0 && (engine->code[at].op != instr->op || engine->code[at].stage != instr->stage))
        at--;
    int64_t free_ns = at < 0 ? 0 : engine->stamps[at] + guest_lag_ns(engine, &engine->code[at]);
    return free_ns > due_ns ? free_ns : due_ns;
}

/* When what was loaded for instruction i is there and its receive has taken its time; due_ns, or later. */
static int64_t
loaded(const tp_engine *engine, int64_t i, int64_t due_ns)
{
    if (engine->load == NULL || engine->load[i].from < 0)
        return due_ns;
    int64_t at = guest_of(engine, i), home_ns = engine->stamps[at] + guest_lag_ns(engine, &engine->code[at]);
    return (home_ns > due_ns ? home_ns : due_ns) + (int64_t)(1e9 * seconds_of(engine, TP_OP_RL, 0, &engine->code[at]));
}

/* When that message is there: its stamp plus the link's time. */
static int64_t
arrival(const tp_engine *engine, int64_t i)
{
    const tp_instr *reader = &engine->code[i];
    const tp_program *program = engine->config.program;
    int64_t at = receive_of(engine, i);
    if (reader->op == TP_OP_SL)
        return engine->stamps[at] + guest_lag_ns(engine, reader);
    int back = engine->code[at].op != TP_OP_RF, sender = reader->stage + (back ? 1 : -1);
    double lag = tp_durations_lag_s(engine->durations, tp_program_units(program), back, engine->code[at].flags, sender,
                                    tp_program_unit(program, reader));
    return engine->stamps[at] + (int64_t)(lag * 1e9);
}

/* A receive takes its time right before the op that reads it (sched.h): of two halves in one message, the first. */
static double
copy_s(const tp_engine *engine, int64_t i)
{
    const tp_instr *reader = &engine->code[i];
    const tp_instr *receive = engine->from[i] < 0 ? NULL : &engine->code[receive_of(engine, i)];
    if (receive == NULL || tp_instr_is_within(reader) || (reader->flags & TP_HALF_SECOND && !(receive->flags & TP_HALVES)))
        return 0;
    return seconds_of(engine, receive->op, receive->flags, receive);
}

static int
receives(const tp_instr *instr)
{
    return instr->op == TP_OP_RF || instr->op == TP_OP_RB || instr->op == TP_OP_RE || instr->op == TP_OP_RL;
}

/* Returns when every rank has come; *latest_ns: when the last one was due. */
static tp_status
meet(tp_engine *engine, int64_t due_ns, int64_t *latest_ns)
{
    double due = (double)due_ns; /* nanoseconds of uptime are exact up to 2^53: a hundred days */
    double *all = engine->gather + 1;
    tp_comm *comm = engine->config.comm;
    *latest_ns = due_ns;
    if (comm == NULL)
        return TP_OK;
    TP_TRY(comm->ops->allgather(comm, &due, sizeof due, all));
    for (int rank = 0; rank < engine->config.program->ranks; rank++)
        if ((int64_t)all[rank] > *latest_ns)
            *latest_ns = (int64_t)all[rank];
    return TP_OK;
}

/* The two ends of a tied weight begin their sum together. */
static tp_status
meet_other_end(tp_engine *engine, const tp_instr *instr, int64_t *due_ns)
{
    tp_comm *comm = engine->config.comm;
    int64_t mine_ns = *due_ns, other_ns = 0;
    TP_TRY(comm->ops->exchange(comm, engine->first + instr->peer, tp_tag(TP_OP_AR, 0, 0, 0), &mine_ns, sizeof mine_ns, &other_ns,
                               sizeof other_ns));
    *due_ns = other_ns > mine_ns ? other_ns : mine_ns;
    return TP_OK;
}

/* In naps, so that an abort ends a long one. */
static tp_status
sleep_until(const tp_engine *engine, int64_t due_ns)
{
    for (int64_t now = tp_clock_ns(); now < due_ns; now = tp_clock_ns()) {
        tp_clock_sleep_until(due_ns - now < NAP_NS ? due_ns : now + NAP_NS);
        TP_TRY(tp_engine_check_abort(engine));
    }
    return TP_OK;
}

/* When the message of instruction i leaves that is sent at due_ns: others may be on its link still. Guests have links of their own. */
static int64_t
leaves_ns(tp_engine *engine, int64_t i, int64_t due_ns)
{
    const tp_program *program = engine->config.program;
    const tp_instr *send = &engine->code[i];
    int back = send->op == TP_OP_SB;
    if (send->op == TP_OP_SE || send->op == TP_OP_SL)
        return guest_leaves_ns(engine, i, due_ns);
    double lag = tp_durations_lag_s(engine->durations, tp_program_units(program), back, send->flags, send->stage,
                                    tp_program_unit(program, send));
    return (int64_t)(1e9 * tp_sched_links_send(&engine->links, back, send->stage, 1e-9 * (double)due_ns, lag));
}

/* When instruction i may begin that could at due_ns, so that the copies that it waits for are done once it has its message; due_ns,
 * or later. */
static int64_t
copied_ns(const tp_engine *engine, int64_t i, int64_t due_ns)
{
    int32_t copied = engine->copied == NULL ? 0 : engine->copied[i];
    int64_t done_ns = copied == 0 ? 0 : engine->events[engine->copies[copied - 1]].end_ns - (int64_t)(1e9 * copy_s(engine, i));
    return done_ns > due_ns ? done_ns : due_ns;
}

/* A copy that is begun at due_ns: behind all that were begun before. */
static tp_status
emulate_copy(tp_engine *engine, int64_t i, int64_t due_ns)
{
    tp_event *event = &engine->events[i];
    event->start_ns = engine->copied_ns > due_ns ? engine->copied_ns : due_ns;
    event->end_ns = event->start_ns + (int64_t)(1e9 * seconds_of(engine, engine->code[i].op, 0, &engine->code[i]));
    engine->copied_ns = event->end_ns;
    return TP_OK;
}

/* When the sums beside the rank's work are done that goes on until due_ns; due_ns, or later. */
static int64_t
summed_ns(const tp_engine *engine, int64_t due_ns)
{
    const tp_program *program = engine->config.program;
    const tp_sched_sums *sums = &engine->beside;
    const int rank = engine->config.rank;
    double done_s = 0.0;
    for (int32_t n = sums->begin == NULL ? 0 : sums->begin[rank]; sums->begin != NULL && n < sums->begin[rank + 1]; n++) {
        const int stage = sums->stages[n];
        const int64_t at = sums->last[stage] - program->begin[rank];
        const double end_s = 1e-9 * (double)engine->events[at].end_ns;
        done_s = tp_sched_sum_beside(engine->durations, stage, engine->code[at].op == TP_OP_B, done_s,
                                     end_s - seconds_of(engine, engine->code[at].op, 0, &engine->code[at]), end_s);
    }
    int64_t done_ns = (int64_t)(1e9 * done_s);
    return done_ns > due_ns ? done_ns : due_ns;
}

/* The ranks meet when each has summed and measured its gradients; the first OPT begins so long before as that took this one. */
static tp_status
meet_for_norm(tp_engine *engine, int64_t *due_ns)
{
    double before;
    tp_program_update_s(engine->config.program, engine->durations, engine->config.rank, &before);
    int64_t before_ns = (int64_t)(1e9 * before);
    *due_ns = summed_ns(engine, *due_ns);
    TP_TRY(meet(engine, *due_ns + before_ns, due_ns));
    *due_ns -= before_ns;
    return TP_OK;
}

/* Run instruction i, whose rank is free at *due_ns; leaves when it is free again. */
static tp_status
emulate_one(tp_engine *engine, int64_t i, int64_t *due_ns, int *finished)
{
    const tp_instr *instr = &engine->code[i];
    tp_event *event = &engine->events[i];
    int64_t free_ns = *due_ns;
    TP_TRY(tp_engine_wait_inputs(engine, i));
    *due_ns = loaded(engine, i, *due_ns);
    if (engine->from[i] >= 0 && arrival(engine, i) > *due_ns)
        *due_ns = arrival(engine, i);
    *due_ns = copied_ns(engine, i, *due_ns);
    if (instr->op == TP_OP_AR)
        TP_TRY(meet_other_end(engine, instr, due_ns));
    if (instr->op == TP_OP_OPT && !(*finished)++)
        TP_TRY(meet_for_norm(engine, due_ns));
    *event = (tp_event){.position = (int32_t)i, .step = (int32_t)engine->step, .start_ns = *due_ns};
    event->wait_ns = *due_ns - free_ns;
    if (instr->op == TP_OP_OPT)
        event->start_ns = free_ns; /* its wait lies within, as in a real step */
    if (tp_engine_is_copy(instr))
        return emulate_copy(engine, i, *due_ns);
    double seconds = receives(instr) ? 0 : seconds_of(engine, instr->op, instr->flags, instr) + copy_s(engine, i);
    *due_ns += (int64_t)(1e9 * seconds);
    event->end_ns = *due_ns;
    TP_TRY(sleep_until(engine, *due_ns));
    if (instr->op != TP_OP_SF && instr->op != TP_OP_SB && instr->op != TP_OP_SE && instr->op != TP_OP_SL && !receives(instr))
        return TP_OK;
    if (!receives(instr))
        engine->stamps[i] = leaves_ns(engine, i, *due_ns);
    return tp_engine_message(engine, instr, &engine->stamps[i], sizeof *engine->stamps);
}

tp_status
tp_engine_run_emulated(tp_engine *engine, tp_step_result *result)
{
    int finished = 0;
    int64_t due_ns;
    memset(engine->received, 0, (size_t)engine->config.program->ranks * sizeof *engine->received);
    TP_TRY(meet(engine, tp_clock_ns(), &due_ns)); /* all ranks begin together, as the simulator has it */
    result->begin_ns = due_ns;
    for (int64_t i = 0; i < engine->count; i++) {
        TP_TRY(tp_engine_note(engine, &engine->code[i]));
        TP_TRY(emulate_one(engine, i, &due_ns, &finished));
    }
    result->end_ns = tp_clock_ns();
    return TP_OK;
}
