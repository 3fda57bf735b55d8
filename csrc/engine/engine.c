#include "csrc/engine/engine.h"

#include <math.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/fpu.h"
#include "csrc/engine/internal.h"

/* ---- what it tells ------------------------------------------------------------------------------------------------- */

const tp_event *
tp_engine_events(const tp_engine *engine, int64_t *count)
{
    *count = engine->count;
    return engine->events;
}

tp_status
tp_engine_given(tp_engine *engine, const tp_event **events, int64_t *count)
{
    *count = engine->count;
    if (engine->given == NULL)
        TP_TRY(tp_heap_alloc(engine->heap, (size_t)engine->count * sizeof *engine->given, "the times of what the device is given",
                             (void **)&engine->given));
    *events = engine->given;
    return TP_OK;
}

const char *
tp_engine_caveat(const tp_engine *engine, int i)
{
    const tp_comm *comm = engine->config.comm;
    if (i == 0)
        return comm != NULL && comm->ops->caveat != NULL ? comm->ops->caveat(comm) : "";
    return engine->device != NULL && engine->device->ops->caveat != NULL ? engine->device->ops->caveat(engine->device) : "";
}

static int
slot_for(uint32_t slot, int gradient)
{
    return (int)(gradient ? TP_SLOT_GRADIENT(slot) : TP_SLOT_ACTIVATION(slot));
}

static tp_half
half_of(const tp_instr *instr)
{
    return instr->flags & TP_HALF_FIRST ? TP_FIRST_HALF : instr->flags & TP_HALF_SECOND ? TP_SECOND_HALF : TP_WHOLE;
}

/* ---- a step ------------------------------------------------------------------------------------------------------------------ */

/* Between two stages of one rank there is no message: the reader takes the residual stream, or its gradient, by copy. */
static tp_status
take_over(tp_engine *engine, const tp_instr *instr)
{
    int gradient = instr->op != TP_OP_F, other = instr->stage + (gradient ? 1 : -1);
    const tp_program *program = engine->config.program;
    const tp_stage_ops *ops = engine->config.provider->stage;
    if ((gradient ? tp_program_is_last(program, instr->stage) : tp_program_is_first(program, instr->stage)) ||
        engine->stage[other] == NULL)
        return TP_OK;
    size_t bytes;
    uint32_t slot = engine->slots[(int64_t)other * program->micros + instr->micro];
    tp_half half = half_of(instr);
    int micro = tp_engine_micro(&engine->config, instr->micro);
    const void *from = ops->end(engine->stage[other], gradient ? TP_END_INPUT_GRADIENT : TP_END_OUTPUT, micro,
                                instr->slice, half, slot_for(slot, gradient), &bytes);
    void *to = ops->end(engine->stage[instr->stage], gradient ? TP_END_OUTPUT_GRADIENT : TP_END_INPUT, micro,
                        instr->slice, half, slot_for(instr->slot, gradient), &bytes);
    return engine->device->ops->copy(engine->device, to, from, bytes);
}

void *
tp_engine_message_end(tp_engine *engine, const tp_instr *instr, size_t *bytes)
{
    static const tp_end ends[TP_OPS] = {[TP_OP_SF] = TP_END_OUTPUT,
                                        [TP_OP_RF] = TP_END_INPUT,
                                        [TP_OP_SB] = TP_END_INPUT_GRADIENT,
                                        [TP_OP_RB] = TP_END_OUTPUT_GRADIENT};
    int gradient = instr->op == TP_OP_SB || instr->op == TP_OP_RB, micro = tp_engine_micro(&engine->config, instr->micro);
    return engine->config.provider->stage->end(engine->stage[instr->stage], ends[instr->op], micro, instr->slice, half_of(instr),
                                               slot_for(instr->slot, gradient), bytes);
}

static tp_status
pass_message(tp_engine *engine, const tp_instr *instr)
{
    size_t bytes;
    void *data = tp_engine_message_end(engine, instr, &bytes);
    return tp_engine_message(engine, instr, data, bytes);
}

static tp_status
exchange_tied(tp_engine *engine, const tp_instr *instr)
{
    tp_comm *comm = engine->config.comm;
    tp_tied mine;
    TP_TRY(engine->config.provider->stage->tied(engine->stage[instr->stage], &mine));
    return comm->ops->exchange(comm, engine->first + instr->peer, tp_tag(TP_OP_AR, 0, 0, 0), mine.out, mine.out_bytes, mine.in,
                               mine.in_bytes);
}

static tp_status
copy_some(tp_engine *engine, void *to, const void *from, size_t bytes)
{
    return bytes == 0 ? TP_OK : engine->device->ops->copy(engine->device, to, from, bytes);
}

/* The tied ends on two stages of this very rank: of two copies they never are. */
static tp_status
join_tied(tp_engine *engine)
{
    int last = engine->config.program->stages - 1;
    const tp_stage_ops *ops = engine->config.provider->stage;
    if (last == 0 || engine->config.program->copies > 1 || engine->stage[0] == NULL || engine->stage[last] == NULL)
        return TP_OK;
    tp_tied first, head;
    TP_TRY(ops->tied(engine->stage[0], &first));
    TP_TRY(ops->tied(engine->stage[last], &head));
    return copy_some(engine, head.in, first.out, first.out_bytes);
}

/* The host's communicators: until the other end is there, too; a device's wait is in the order of its own work. */
static tp_status
meet_tied(tp_engine *engine, int peer, int64_t *waited_ns)
{
    tp_comm *comm = engine->config.comm;
    unsigned char here = 0, there = 0;
    int64_t before = tp_clock_ns();
    if (engine->bound || engine->staged != NULL)
        return TP_OK;
    TP_TRY(comm->ops->exchange(comm, peer, tp_tag(TP_OP_AR, 0, 0, 2), &here, sizeof here, &there, sizeof there));
    *waited_ns += tp_clock_ns() - before;
    return TP_OK;
}

/* New values of a tied weight from the head's stage, when this rank has updated all of its own; copies of the model in ascending
 * order, on both ranks. */
static tp_status
give_tied(tp_engine *engine, int64_t *waited_ns)
{
    const tp_program *program = engine->config.program;
    const tp_stage_ops *ops = engine->config.provider->stage;
    tp_comm *comm = engine->config.comm;
    int each = tp_program_copy_stages(program);
    for (int stage = 0; stage < program->stages; stage++) {
        int first = stage / each * each, other = stage == first ? first + each - 1 : first;
        tp_tied mine = {0}, theirs = {0};
        if (engine->stage[stage] != NULL)
            TP_TRY(ops->tied_values(engine->stage[stage], &mine));
        if (mine.out == NULL && mine.in == NULL)
            continue;
        if (engine->stage[other] == NULL) {
            int peer = engine->first + program->rank_of[other];
            TP_TRY(meet_tied(engine, peer, waited_ns));
            TP_TRY(comm->ops->exchange(comm, peer, tp_tag(TP_OP_AR, 0, 0, 1), mine.out, mine.out_bytes, mine.in, mine.in_bytes));
        } else if (stage == first) {
            TP_TRY(ops->tied_values(engine->stage[other], &theirs));
            TP_TRY(copy_some(engine, mine.in, theirs.out, theirs.out_bytes));
        }
    }
    return TP_OK;
}

static tp_status
complete_gradients(tp_engine *engine)
{
    TP_TRY(join_tied(engine));
    for (int stage = 0; stage < engine->config.program->stages; stage++)
        if (engine->stage[stage] != NULL)
            TP_TRY(engine->config.provider->stage->finish(engine->stage[stage]));
    return TP_OK;
}

/* The end of a step: every rank learns the loss, the norm and whether to stop. */
static tp_status
gather(tp_engine *engine, double loss, int stop, tp_step_result *result)
{
    int64_t n = engine->gather_count, params = n - TP_GATHER_EXTRA;
    double *mine = engine->gather, *all = engine->gather + n;
    mine[params + TP_GATHER_LOSS] = loss;
    mine[params + TP_GATHER_STOP] = stop;
    if (engine->config.comm == NULL)
        memcpy(all, mine, (size_t)n * sizeof *all);
    else
        TP_TRY(engine->config.comm->ops->allgather(engine->config.comm, mine, (size_t)n * sizeof *mine, all));
    int ranks = engine->config.program->ranks, replicas = tp_engine_replicas(&engine->config);
    double norm2 = 0, total = 0;
    for (int64_t i = 0; i < params; i++) /* exactly one rank of a replica answers for each tensor */
        for (int rank = 0; rank < ranks; rank++)
            norm2 += all[rank * n + i];
    result->stop = 0;
    for (int rank = 0; rank < replicas * ranks; rank++)
        result->stop |= all[rank * n + params + TP_GATHER_STOP] != 0;
    const tp_program *program = engine->config.program;
    for (int replica = 0; replica < replicas; replica++) /* in the order of the sequences, wherever the heads are */
        for (int stage = 0; stage < program->stages; stage++)
            if (tp_program_is_last(program, stage))
                total += all[(replica * ranks + program->rank_of[stage]) * n + params + TP_GATHER_LOSS];
    const tp_slicing *slicing = engine->config.slicing;
    result->loss = total / ((double)tp_engine_members(&engine->config) * slicing->batch * slicing->seq_len);
    result->grad_norm = sqrt(norm2);
    return TP_OK;
}

static tp_status
my_loss(tp_engine *engine, double *loss)
{
    const tp_program *program = engine->config.program;
    *loss = 0;
    for (int stage = 0; stage < program->stages; stage++) /* a rank has one head at most */
        if (tp_program_is_last(program, stage) && engine->stage[stage] != NULL)
            return engine->config.provider->stage->loss(engine->stage[stage], loss);
    return TP_OK;
}

/* x86's own NaN has a sign, which says nothing and reads as if it did. */
static double
unsigned_nan(double value)
{
    return isnan(value) ? NAN : value;
}

/* Complete gradients' sums of squares, this rank's part of the gather: of updates by micro-batches their mean; *waited_ns: for
 * replicas. */
static tp_status
sum_squares(tp_engine *engine, int64_t *waited_ns)
{
    *waited_ns = 0;
    if (engine->updates == 0) {
        TP_TRY(complete_gradients(engine));
        TP_TRY(tp_engine_sum_replicas(engine, waited_ns));
    }
    memset(engine->gather, 0, (size_t)engine->gather_count * sizeof *engine->gather);
    const tp_stage_ops *ops = engine->config.provider->stage;
    const int stages = tp_program_copy_stages(engine->config.program); /* the other copy has the same, unless of each its shards */
    const int measured = engine->config.shards ? engine->config.program->stages : stages;
    for (int stage = 0; ops->measure != NULL && stage < measured; stage++)
        if (engine->stage[stage] != NULL)
            TP_TRY(ops->measure(engine->stage[stage]));
    TP_TRY(tp_engine_gather(engine, TP_GATHER_SQUARES, waited_ns));
    for (int stage = 0; stage < stages; stage++)
        if (engine->stage[stage] != NULL)
            TP_TRY(ops->sumsq(engine->stage[stage], engine->gather));
    for (int64_t i = 0; engine->updates > 0 && i < engine->gather_count - TP_GATHER_EXTRA; i++)
        engine->gather[i] /= engine->updates;
    return TP_OK;
}

/* At the first OPT: gradients complete, norm known everywhere, every stage of the rank updated. */
static tp_status
finish_step(tp_engine *engine, const tp_step_options *options, tp_step_result *result, int64_t *waited_ns)
{
    double loss;
    int64_t met_ns;
    TP_TRY(sum_squares(engine, &met_ns));
    TP_TRY(my_loss(engine, &loss));
    int64_t before = tp_clock_ns();
    TP_TRY(gather(engine, loss, options->stop, result));
    *waited_ns = met_ns + tp_clock_ns() - before;
    if (!isfinite(result->grad_norm) || !isfinite(result->loss))
        return tp_fail(TP_ERUNTIME,
                       "step %lld: the loss is %g and the gradient norm %g; %s. A smaller lr, a longer warm-up or grad_clip may help",
                       (long long)engine->step, unsigned_nan(result->loss), unsigned_nan(result->grad_norm),
                       engine->updates > 0 ? "what its micro-batches updated stays so" : "the parameters are as before this step");
    return options->update ? TP_OK : tp_engine_gather(engine, TP_GATHER_GRADIENTS, waited_ns);
}

static tp_status
update(tp_engine *engine, int stage, const tp_step_options *options, const tp_step_result *result)
{
    double scale = tp_adamw_clip(options->grad_clip, result->grad_norm);
    return engine->config.provider->stage->update(engine->stage[stage], &options->adamw, scale);
}

/* Where each replica has updated a part. */
static tp_status
take_values(tp_engine *engine, int64_t *waited_ns)
{
    TP_TRY(tp_engine_gather(engine, TP_GATHER_VALUES, waited_ns));
    for (int stage = 0; engine->config.shards && stage < engine->config.program->stages; stage++)
        if (engine->stage[stage] != NULL)
            TP_TRY(engine->config.provider->stage->pack(engine->stage[stage]));
    return TP_OK;
}

/* adamw.step counts the updates: so many in each step. */
static tp_status
update_micro(tp_engine *engine, const tp_instr *instr, const tp_step_options *options)
{
    tp_adamw adamw = options->adamw;
    if (!options->update)
        return tp_fail(TP_EVALUE, "the program updates by micro-batches (U): it leaves no gradient of the batch");
    adamw.step = (adamw.step - 1) * engine->updates + instr->micro + 1;
    return engine->config.provider->stage->update_micro(engine->stage[instr->stage], instr->micro, &adamw, options->grad_clip);
}

static tp_status
run_one(tp_engine *engine, const tp_instr *instr)
{
    tp_stage *stage = engine->stage[instr->stage];
    const tp_stage_ops *ops = engine->config.provider->stage;
    int slot = slot_for(instr->slot, 0), gslot = slot_for(instr->slot, 1), micro = tp_engine_micro(&engine->config, instr->micro);
    switch (instr->op) {
    case TP_OP_F:
        TP_TRY(take_over(engine, instr));
        return ops->forward(stage, micro, instr->slice, half_of(instr), slot);
    case TP_OP_I:
    case TP_OP_B:
        TP_TRY(take_over(engine, instr));
        if (instr > engine->code && tp_instr_is_within(instr - 1))
            return tp_engine_go_back_within(engine, instr - engine->code);
        if (tp_engine_sums_within(engine, instr - engine->code))
            return tp_engine_go_back_summing(engine, instr - engine->code);
        if (instr->op == TP_OP_B && ops->backward != NULL)
            return ops->backward(stage, micro, instr->slice, slot, gslot);
        TP_TRY(ops->input_gradient(stage, micro, instr->slice, slot, gslot));
        return instr->op == TP_OP_I ? TP_OK : ops->weight_gradient(stage, micro, instr->slice, slot, gslot);
    case TP_OP_R: return tp_instr_is_within(instr) ? TP_OK : ops->recompute(stage, micro, instr->slice, slot, gslot);
    case TP_OP_SO: return ops->swap_out(stage, micro, instr->slice, slot);
    case TP_OP_SI: return ops->swap_in(stage, micro, instr->slice, slot, gslot);
    case TP_OP_W: return ops->weight_gradient(stage, micro, instr->slice, slot, gslot);
    case TP_OP_SF:
    case TP_OP_SB:
    case TP_OP_RF:
    case TP_OP_RB: return pass_message(engine, instr);
    case TP_OP_SE:
    case TP_OP_RE:
    case TP_OP_SL:
    case TP_OP_RL: return tp_engine_guest_message(engine, instr);
    case TP_OP_AR: return exchange_tied(engine, instr);
    default: return tp_fail(TP_EINTERNAL, "%s has come past the engine's door", tp_op_name(instr->op));
    }
}

static int
evaluates(uint16_t op)
{
    return op == TP_OP_F || op == TP_OP_SF || op == TP_OP_RF;
}

/* The kernels index by them. */
static tp_status
check_tokens(const tp_engine *engine, const int32_t *tokens)
{
    int64_t width = engine->config.slicing->seq_len + 1;
    int64_t count = engine->config.program->copies * engine->config.slicing->batch * width;
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= engine->config.model.vocab_size)
            return tp_fail(TP_EVALUE, "tokens[%lld, %lld] is %d: 0 to %d would be right", (long long)(i / width),
                           (long long)(i % width), tokens[i], engine->config.model.vocab_size - 1);
    return TP_OK;
}

/* A step or, with options NULL, an evaluation, which leaves no events: the trace is of the last step. */
typedef struct {
    const tp_step_options *options;
    tp_step_result *result;
    int finished;
} running;

/* *at is a time of engine->events: the same one of engine->given becomes the host's. */
static void
note_given(tp_engine *engine, const int64_t *at)
{
    if (engine->given != NULL)
        *(int64_t *)((char *)engine->given + ((const char *)at - (const char *)engine->events)) = tp_clock_ns();
}

static tp_status
mark(tp_engine *engine, const running *now, int64_t *at)
{
    if (now->options == NULL)
        return TP_OK;
    note_given(engine, at);
    return engine->device->ops->mark(engine->device, at);
}

/* A posted receive gives a device with work of its own nothing: marks would only hold that up (3 us each on an H200). Its times are
 * the end of what is before it (settle_events). */
static int
is_unmarked(const tp_engine *engine, int64_t i)
{
    uint16_t op = engine->code[i].op;
    return i > 0 && (op == TP_OP_RF || op == TP_OP_RB) && engine->device->ops->stretch_begin != NULL && !tp_engine_waits(engine, i) &&
           (engine->copier == NULL || !tp_engine_is_copy(&engine->code[i - 1]));
}

static int
computes(uint16_t op)
{
    return op == TP_OP_F || op == TP_OP_B || op == TP_OP_I || op == TP_OP_W || op == TP_OP_R;
}

/* Until instruction i may begin; its wait_ns holds the beginning of the wait until the step is over. */
static tp_status
arrive(tp_engine *engine, int64_t i, const running *now)
{
    tp_comm *comm = engine->config.comm;
    TP_TRY(tp_engine_note(engine, &engine->code[i]));
    if (computes(engine->code[i].op) && comm != NULL && comm->ops->progress != NULL)
        TP_TRY(comm->ops->progress(comm));
    if (!tp_engine_waits(engine, i))
        return TP_OK;
    TP_TRY(mark(engine, now, &engine->events[i].wait_ns));
    return tp_engine_wait_inputs(engine, i);
}

static void
name_event(tp_engine *engine, int64_t i, const running *now)
{
    if (now->options == NULL)
        return;
    engine->events[i].position = (int32_t)i;
    engine->events[i].step = (int32_t)engine->step;
}

static tp_status
work(tp_engine *engine, int64_t i, running *now)
{
    const tp_instr *instr = &engine->code[i];
    tp_event *event = &engine->events[i];
    name_event(engine, i, now);
    if (engine->copier != NULL && tp_engine_is_copy(instr))
        return tp_engine_begin_copy(engine, i);
    if (now->options != NULL && is_unmarked(engine, i)) {
        note_given(engine, &event->start_ns);
        TP_TRY(run_one(engine, instr));
        note_given(engine, &event->end_ns);
        return TP_OK;
    }
    TP_TRY(mark(engine, now, &event->start_ns));
    if (instr->op == TP_OP_U) {
        TP_TRY(update_micro(engine, instr, now->options));
    } else if (instr->op != TP_OP_OPT) {
        TP_TRY(run_one(engine, instr));
    } else {
        event->wait_ns = 0;
        if (!now->finished++)
            TP_TRY(finish_step(engine, now->options, now->result, &event->wait_ns));
        if (now->options->update && engine->updates == 0)
            TP_TRY(update(engine, instr->stage, now->options, now->result));
        if (now->options->update && engine->updates == 0 && i == engine->count - 1) {
            TP_TRY(take_values(engine, &event->wait_ns));
            TP_TRY(give_tied(engine, &event->wait_ns));
        }
    }
    return mark(engine, now, &event->end_ns);
}

/* Instructions i, which has arrived, to end - 1. */
static tp_status
work_through(tp_engine *engine, int64_t i, int64_t end, running *now)
{
    TP_TRY(work(engine, i, now));
    for (int64_t k = i + 1; k < end; k++) {
        TP_TRY(arrive(engine, k, now));
        TP_TRY(work(engine, k, now));
    }
    return TP_OK;
}

/* What begins with i, which has arrived, and goes on until a message: the device may know it from the last step. */
static tp_status
run_stretch(tp_engine *engine, int64_t i, running *now, int64_t *end)
{
    const tp_device_ops *ops = engine->device->ops;
    int64_t before = engine->given == NULL ? 0 : tp_clock_ns();
    int replayed, again = 0;
    for (*end = i + 1; *end < engine->count && computes(engine->code[*end].op) && !tp_engine_waits(engine, *end);)
        ++*end;
    TP_TRY(ops->stretch_begin(engine->device, i, &replayed));
    if (replayed) {
        int64_t after = engine->given == NULL ? 0 : tp_clock_ns();
        for (int64_t k = i; k < *end; k++) {
            name_event(engine, k, now);
            if (engine->given != NULL)
                engine->given[k] = (tp_event){.start_ns = before, .end_ns = after, .wait_ns = engine->given[k].wait_ns};
        }
        return TP_OK;
    }
    tp_status done = work_through(engine, i, *end, now);
    TP_TRY(ops->stretch_end(engine->device, i, done, &again));
    return again ? work_through(engine, i, *end, now) : TP_OK;
}

/* Every mark is there: waits become durations. */
static tp_status
settle_events(tp_engine *engine)
{
    TP_TRY(engine->device->ops->collect(engine->device));
    for (int64_t i = 0; i < engine->count; i++) {
        tp_event *event = &engine->events[i];
        if (is_unmarked(engine, i))
            event->start_ns = event->end_ns = event[-1].end_ns;
        if (tp_engine_waits(engine, i))
            event->wait_ns = event->start_ns - event->wait_ns;
    }
    tp_engine_settle_within(engine);
    return TP_OK;
}

static tp_status
run_all(tp_engine *engine, const int32_t *tokens, const tp_step_options *options, tp_step_result *result)
{
    const tp_device_ops *device = engine->device->ops;
    running now = {.options = options, .result = result};
    int64_t share = (int64_t)engine->config.slicing->batch * (engine->config.slicing->seq_len + 1); /* of a copy's tokens */
    TP_TRY(check_tokens(engine, tokens));
    engine->needed = options == NULL ? engine->forward_needs : engine->needs;
    engine->awaited = options == NULL ? NULL : engine->copied;
    TP_TRY(device->begin(engine->device));
    for (int stage = 0; stage < engine->config.program->stages; stage++)
        if (engine->stage[stage] != NULL)
            TP_TRY(engine->config.provider->stage->begin(engine->stage[stage], tokens + tp_engine_copy(&engine->config, stage) * share,
                                                         options != NULL));
    memset(engine->gather, 0, (size_t)engine->gather_count * sizeof *engine->gather);
    TP_TRY(tp_engine_begin_copies(engine));
    TP_TRY(tp_engine_begin_sums(engine));
    memset(engine->received, 0, (size_t)engine->config.program->ranks * sizeof *engine->received);
    memset(engine->loan, 0, (size_t)engine->count * sizeof *engine->loan); /* the last step's gather ended when all had been read */
    for (int64_t i = 0, next; i < engine->count; i = next) {
        next = i + 1;
        if (options == NULL && !evaluates(engine->code[i].op))
            continue;
        TP_TRY(arrive(engine, i, &now));
        if (options != NULL && device->stretch_begin != NULL && computes(engine->code[i].op) && !tp_instr_is_within(&engine->code[i]))
            TP_TRY(run_stretch(engine, i, &now, &next));
        else
            TP_TRY(work(engine, i, &now));
        if (computes(engine->code[i].op) && options != NULL)
            tp_engine_went_back(engine, i, 0);
    }
    return options == NULL ? TP_OK : settle_events(engine);
}

static tp_status
run(tp_engine *engine, const int32_t *tokens, const tp_step_options *options, tp_step_result *result)
{
    uint64_t before = tp_fpu_flush_subnormals();
    tp_status status = run_all(engine, tokens, options, result);
    tp_fpu_restore(before);
    return tp_engine_check_told(engine, status);
}

tp_status
tp_engine_step(tp_engine *engine, const int32_t *tokens, const tp_step_options *options, tp_step_result *result)
{
    engine->step = options->adamw.step - 1;
    if (engine->durations != NULL)
        return tp_engine_fail(engine, tp_engine_run_emulated(engine, result));
    result->begin_ns = tp_clock_ns();
    TP_TRY(tp_engine_fail(engine, run(engine, tokens, options, result)));
    result->end_ns = tp_clock_ns();
    return TP_OK;
}

tp_status
tp_engine_evaluate(tp_engine *engine, const int32_t *tokens, double *loss)
{
    tp_step_result result;
    TP_TRY(tp_engine_fail(engine, run(engine, tokens, NULL, &result)));
    double mine;
    TP_TRY(tp_engine_fail(engine, my_loss(engine, &mine)));
    memset(engine->gather, 0, (size_t)engine->gather_count * sizeof *engine->gather);
    TP_TRY(tp_engine_fail(engine, gather(engine, mine, 0, &result)));
    *loss = result.loss;
    return TP_OK;
}
