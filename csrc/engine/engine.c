#include "csrc/engine/engine.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/fpu.h"
#include "csrc/engine/internal.h"

/* Behind the per-parameter sums of squares, each rank's contribution to the gather that ends a step. */
enum { GATHER_LOSS, GATHER_STOP, GATHER_EXTRA };

/* ---- opening -------------------------------------------------------------------------------------------------------------- */

static tp_stage_config
stage_config(const tp_engine_config *config, int stage)
{
    int gradient = tp_program_gradient_slots(config->program, stage);
    return (tp_stage_config){.model = config->model,
                             .slicing = config->slicing,
                             .first_block = config->partition[stage],
                             .last_block = config->partition[stage + 1],
                             .activation_slots = tp_program_activation_slots(config->program, stage),
                             .gradient_slots = gradient};
}

static int64_t
gather_count(const tp_engine_config *config)
{
    return tp_model_params(&config->model) + GATHER_EXTRA;
}

static size_t
workspace_bytes(const tp_engine_config *config)
{
    size_t most = 0;
    for (int stage = 0; stage < config->program->stages; stage++) {
        if (config->program->rank_of[stage] != config->rank)
            continue;
        tp_stage_config part = stage_config(config, stage);
        size_t bytes = tp_stage_workspace_bytes(&part, config->ops, config->threads);
        most = bytes > most ? bytes : most;
    }
    return most;
}

size_t
tp_engine_bytes(const tp_engine_config *config)
{
    engine_tables tables = tp_engine_tables(config->program, config->rank, gather_count(config));
    size_t total = tp_align_bytes(tables.needs) + tp_align_bytes(tables.forward_needs) + tp_align_bytes(tables.from) +
                   tp_align_bytes(tables.received) + tp_align_bytes(tables.events) + tp_align_bytes(tables.gather) +
                   tp_align_bytes(tables.stages) + tp_align_bytes(tables.slots);
    for (int stage = 0; stage < config->program->stages; stage++) {
        if (config->program->rank_of[stage] != config->rank)
            continue;
        tp_stage_config part = stage_config(config, stage);
        total += tp_align_bytes(tp_stage_bytes(&part, config->ops));
    }
    return total + tp_align_bytes(workspace_bytes(config));
}

static int
is_halved(const tp_instr *instr)
{
    return instr->op == TP_OP_F && instr->flags & TP_HALVES;
}

tp_status
tp_engine_check(const tp_engine_config *config)
{
    const tp_program *program = config->program;
    int blocks = tp_model_blocks(&config->model);
    TP_TRY(tp_model_check(&config->model));
    if (config->rank < 0 || config->rank >= program->ranks)
        return tp_fail(TP_EVALUE, "rank is %d: 0 to %d would be right", config->rank, program->ranks - 1);
    if (config->threads < 1 || config->threads > TP_TEAM_MOST)
        return tp_fail(TP_EVALUE, "threads per rank is %d: 1 to %d would be right", config->threads, TP_TEAM_MOST);
    if (config->slicing->seq_len > config->model.block_size)
        return tp_fail(TP_EVALUE, "seq_len is %d: at most block_size = %d would be right", config->slicing->seq_len,
                       config->model.block_size);
    if (config->partition[0] != 0 || config->partition[program->stages] != blocks)
        return tp_fail(TP_EVALUE, "the stages cover blocks [%d, %d): [0, %d) would be right", config->partition[0],
                       config->partition[program->stages], blocks);
    for (int stage = 0; stage < program->stages; stage++)
        if (config->partition[stage + 1] <= config->partition[stage])
            return tp_fail(TP_EVALUE, "stage %d has no block", stage);
    if (program->micros != config->slicing->micros)
        return tp_fail(TP_EVALUE, "the program has %d micro-batches, the slicing %d", program->micros,
                       config->slicing->micros);
    for (int q = 0; q < program->micros; q++)
        if (program->slices[q] != config->slicing->micro[q].slices)
            return tp_fail(TP_EVALUE, "micro-batch %d has %d slices in the program, %d in the slicing", q,
                           program->slices[q], config->slicing->micro[q].slices);
    for (int64_t i = 0; i < program->begin[program->ranks]; i++)
        if (is_halved(&program->code[i]) && config->slicing->micro[program->code[i].micro].half == 0)
            return tp_fail(TP_EVALUE, "micro-batch %d is halved in the program and not in the slicing",
                           program->code[i].micro);
    return TP_OK;
}

tp_status
tp_engine_halve(const tp_program *program, tp_slicing *slicing)
{
    for (int64_t i = 0; i < program->begin[program->ranks]; i++) {
        const tp_instr *instr = &program->code[i];
        if (is_halved(instr) && instr->micro < slicing->micros && slicing->micro[instr->micro].half == 0)
            TP_TRY(tp_slicing_halve(slicing, instr->micro));
    }
    return TP_OK;
}

static tp_status
open_parts(tp_engine *engine, const tp_engine_config *config)
{
    TP_TRY(tp_engine_take_tables(engine, config->program, config->rank, gather_count(config)));
    if (config->threads > 1)
        TP_TRY(tp_team_open(config->threads, &engine->team));
    engine->backend = (tp_backend){.ops = config->ops, .heap = engine->heap, .team = engine->team};
    TP_TRY(tp_backend_reserve(&engine->backend, workspace_bytes(config)));
    for (int stage = 0; stage < config->program->stages; stage++) {
        if (config->program->rank_of[stage] != config->rank)
            continue;
        tp_stage_config part = stage_config(config, stage);
        TP_TRY(tp_stage_open(&part, &engine->backend, &engine->stage[stage]));
        engine->stages++;
    }
    return TP_OK;
}

/* What a proven program must have besides, to be trained by: messages, one OPT a stage, and an AR exactly where the two
 * ends of a tied embedding are apart. */
static tp_status
check_program(const tp_program *program, int tied)
{
    static const tp_op later[] = {TP_OP_R, TP_OP_SO, TP_OP_SI};
    int64_t count[TP_OPS] = {0};
    int remote = 0, last = program->stages - 1;
    TP_TRY(tp_program_check(program));
    TP_TRY(tp_program_check_canonical(program));
    for (int64_t i = 0; i < program->begin[program->ranks]; i++)
        count[program->code[i].op]++;
    for (int stage = 1; stage <= last; stage++)
        remote |= tp_program_remote(program, stage);
    if (count[TP_OP_OPT] == 0 || (remote && count[TP_OP_SF] == 0))
        return tp_fail(TP_EVALUE, "the program has no %s: a lowered one would be right",
                       count[TP_OP_OPT] == 0 ? "optimizer updates" : "messages");
    for (size_t i = 0; i < sizeof later / sizeof *later; i++)
        if (count[later[i]] > 0)
            return tp_fail(TP_EVALUE, "this engine does not execute %s yet", tp_op_name((int)later[i]));
    if ((count[TP_OP_AR] > 0) != (tied && program->rank_of[0] != program->rank_of[last]))
        return tp_fail(
            TP_EVALUE, "the program has %lld AR, but the model's head is %s and its ends are on ranks %d and %d",
            (long long)count[TP_OP_AR], tied ? "tied" : "not tied", program->rank_of[0], program->rank_of[last]);
    return TP_OK;
}

tp_status
tp_engine_open(const tp_engine_config *config, tp_heap *heap, tp_engine **out)
{
    TP_TRY(tp_engine_check(config));
    TP_TRY(check_program(config->program, config->model.tie_weights));
    TP_TRY(tp_engine_check_comm(config->program, config->rank, config->comm));
    tp_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return tp_fail(TP_EMEMORY, "no memory for an engine");
    engine->config = *config;
    engine->heap = heap;
    tp_status status = open_parts(engine, config);
    if (status != TP_OK) {
        tp_engine_close(engine);
        return status;
    }
    *out = engine;
    return TP_OK;
}

void
tp_engine_close(tp_engine *engine)
{
    if (engine == NULL)
        return;
    if (engine->durations == NULL && engine->stage != NULL) {
        for (int stage = 0; stage < engine->config.program->stages; stage++)
            tp_stage_close(engine->stage[stage]);
        tp_backend_close(&engine->backend);
    }
    tp_team_close(engine->team);
    tp_heap_free(engine->heap, engine->stamps);
    tp_engine_drop_tables(engine);
    free(engine);
}

tp_stage *
tp_engine_stage(tp_engine *engine, int i, int *virtual_stage)
{
    for (int stage = 0; engine->durations == NULL && stage < engine->config.program->stages; stage++)
        if (engine->stage[stage] != NULL && i-- == 0) {
            *virtual_stage = stage;
            return engine->stage[stage];
        }
    return NULL;
}

const tp_event *
tp_engine_events(const tp_engine *engine, int64_t *count)
{
    *count = engine->count;
    return engine->events;
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
static void
take_over(tp_engine *engine, const tp_instr *instr)
{
    int gradient = instr->op != TP_OP_F, other = instr->stage + (gradient ? 1 : -1);
    const tp_program *program = engine->config.program;
    if (other < 0 || other >= program->stages || engine->stage[other] == NULL)
        return;
    size_t bytes;
    uint32_t slot = engine->slots[(int64_t)other * program->micros + instr->micro];
    tp_half half = half_of(instr);
    const float *from = tp_stage_end(engine->stage[other], gradient ? TP_END_INPUT_GRADIENT : TP_END_OUTPUT,
                                     instr->micro, instr->slice, half, slot_for(slot, gradient), &bytes);
    float *to = tp_stage_end(engine->stage[instr->stage], gradient ? TP_END_OUTPUT_GRADIENT : TP_END_INPUT,
                             instr->micro, instr->slice, half, slot_for(instr->slot, gradient), &bytes);
    memcpy(to, from, bytes);
}

static tp_status
pass_message(tp_engine *engine, const tp_instr *instr)
{
    static const tp_end ends[TP_OPS] = {[TP_OP_SF] = TP_END_OUTPUT,
                                        [TP_OP_RF] = TP_END_INPUT,
                                        [TP_OP_SB] = TP_END_INPUT_GRADIENT,
                                        [TP_OP_RB] = TP_END_OUTPUT_GRADIENT};
    int gradient = instr->op == TP_OP_SB || instr->op == TP_OP_RB;
    size_t bytes;
    void *data = tp_stage_end(engine->stage[instr->stage], ends[instr->op], instr->micro, instr->slice,
                              half_of(instr), slot_for(instr->slot, gradient), &bytes);
    return tp_engine_message(engine, instr, data, bytes);
}

static tp_status
exchange_tied(tp_engine *engine, const tp_instr *instr)
{
    tp_stage *stage = engine->stage[instr->stage];
    size_t head_bytes, row_bytes;
    tp_stage_finish_head(stage);
    void *head = tp_stage_tied_head(stage, &head_bytes), *rows = tp_stage_tied_rows(stage, &row_bytes);
    int has_head = tp_stage_is_tied_apart(stage) == 2;
    uint64_t tag = tp_tag(TP_OP_AR, 0, 0, 0);
    tp_comm *comm = engine->config.comm;
    return has_head ? comm->ops->exchange(comm, instr->peer, tag, head, head_bytes, rows, row_bytes)
                    : comm->ops->exchange(comm, instr->peer, tag, rows, row_bytes, head, head_bytes);
}

/* The tied ends on two stages of this very rank. */
static void
join_tied(tp_engine *engine)
{
    int last = engine->config.program->stages - 1;
    tp_stage *first = engine->stage[0], *head = engine->stage[last];
    if (last == 0 || first == NULL || head == NULL || tp_stage_is_tied_apart(first) != 1)
        return;
    size_t bytes;
    tp_stage_finish_head(head);
    float *to = tp_stage_tied_head(first, &bytes);
    memcpy(to, tp_stage_tied_head(head, &bytes), bytes);
    float *rows = tp_stage_tied_rows(head, &bytes);
    memcpy(rows, tp_stage_tied_rows(first, &bytes), bytes);
}

static void
complete_gradients(tp_engine *engine)
{
    join_tied(engine);
    for (int stage = 0; stage < engine->config.program->stages; stage++) {
        if (engine->stage[stage] == NULL)
            continue;
        if (tp_stage_is_tied_apart(engine->stage[stage]) == 0) /* else the exchange or join_tied has done it */
            tp_stage_finish_head(engine->stage[stage]);
        tp_stage_finish_gradients(engine->stage[stage]);
    }
}

/* The end of a step: every rank learns the loss, the norm and whether to stop. */
static tp_status
gather(tp_engine *engine, double loss, int stop, tp_step_result *result)
{
    int64_t n = engine->gather_count, params = n - GATHER_EXTRA;
    double *mine = engine->gather, *all = engine->gather + n;
    mine[params + GATHER_LOSS] = loss;
    mine[params + GATHER_STOP] = stop;
    if (engine->config.comm == NULL)
        memcpy(all, mine, (size_t)n * sizeof *all);
    else
        TP_TRY(engine->config.comm->ops->allgather(engine->config.comm, mine, (size_t)n * sizeof *mine, all));
    int ranks = engine->config.program->ranks;
    double norm2 = 0, total = 0;
    for (int64_t i = 0; i < params; i++) /* exactly one rank answers for each tensor */
        for (int rank = 0; rank < ranks; rank++)
            norm2 += all[rank * n + i];
    result->stop = 0;
    for (int rank = 0; rank < ranks; rank++) {
        total += all[rank * n + params + GATHER_LOSS];
        result->stop |= all[rank * n + params + GATHER_STOP] != 0;
    }
    const tp_slicing *slicing = engine->config.slicing;
    result->loss = total / ((double)slicing->batch * slicing->seq_len);
    result->grad_norm = sqrt(norm2);
    return TP_OK;
}

static double
my_loss(tp_engine *engine)
{
    tp_stage *last = engine->stage[engine->config.program->stages - 1];
    return last == NULL ? 0 : tp_stage_loss(last);
}

/* At the first OPT: gradients complete, norm known everywhere, every stage of the rank updated. */
static tp_status
finish_step(tp_engine *engine, const tp_step_options *options, tp_step_result *result, int64_t *waited_ns)
{
    complete_gradients(engine);
    memset(engine->gather, 0, (size_t)engine->gather_count * sizeof *engine->gather);
    for (int stage = 0; stage < engine->config.program->stages; stage++)
        if (engine->stage[stage] != NULL)
            tp_stage_sumsq(engine->stage[stage], engine->gather);
    int64_t before = tp_clock_ns();
    TP_TRY(gather(engine, my_loss(engine), options->stop, result));
    *waited_ns = tp_clock_ns() - before;
    if (!isfinite(result->grad_norm) || !isfinite(result->loss))
        return tp_fail(TP_ERUNTIME,
                       "step %lld: the loss is %g and the gradient norm %g; the parameters are as before this step. A "
                       "smaller lr, a longer warm-up or grad_clip may help",
                       (long long)engine->step, result->loss, result->grad_norm);
    return TP_OK;
}

static void
update(tp_engine *engine, int stage, const tp_step_options *options, const tp_step_result *result)
{
    double scale = 1;
    if (options->grad_clip > 0 && result->grad_norm > options->grad_clip)
        scale = options->grad_clip / (result->grad_norm + 1e-6); /* PyTorch's clip_grad_norm_ */
    tp_stage_update(engine->stage[stage], &options->adamw, scale);
}

static tp_status
run_one(tp_engine *engine, const tp_instr *instr)
{
    tp_stage *stage = engine->stage[instr->stage];
    int slot = slot_for(instr->slot, 0), gslot = slot_for(instr->slot, 1);
    switch (instr->op) {
    case TP_OP_F:
        take_over(engine, instr);
        tp_stage_forward(stage, instr->micro, instr->slice, half_of(instr), slot);
        return TP_OK;
    case TP_OP_I:
    case TP_OP_B:
        take_over(engine, instr);
        tp_stage_input_gradient(stage, instr->micro, instr->slice, slot, gslot);
        if (instr->op == TP_OP_B)
            tp_stage_weight_gradient(stage, instr->micro, instr->slice, slot, gslot);
        return TP_OK;
    case TP_OP_W: tp_stage_weight_gradient(stage, instr->micro, instr->slice, slot, gslot); return TP_OK;
    case TP_OP_SF:
    case TP_OP_SB:
    case TP_OP_RF:
    case TP_OP_RB: return pass_message(engine, instr);
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
    int64_t width = engine->config.slicing->seq_len + 1, count = engine->config.slicing->batch * width;
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= engine->config.model.vocab_size)
            return tp_fail(TP_EVALUE, "tokens[%lld, %lld] is %d: 0 to %d would be right", (long long)(i / width),
                           (long long)(i % width), tokens[i], engine->config.model.vocab_size - 1);
    return TP_OK;
}

static tp_status
run_all(tp_engine *engine, const int32_t *tokens, const tp_step_options *options, tp_step_result *result)
{
    int finished = 0;
    TP_TRY(check_tokens(engine, tokens));
    engine->needed = options == NULL ? engine->forward_needs : engine->needs;
    for (int stage = 0; stage < engine->config.program->stages; stage++)
        if (engine->stage[stage] != NULL)
            tp_stage_begin(engine->stage[stage], tokens, options != NULL);
    memset(engine->received, 0, (size_t)engine->config.program->ranks * sizeof *engine->received);
    for (int64_t i = 0; i < engine->count; i++) {
        const tp_instr *instr = &engine->code[i];
        tp_event unheeded, *event = options == NULL ? &unheeded : &engine->events[i]; /* the trace is of the last step */
        if (options == NULL && !evaluates(instr->op))
            continue;
        TP_TRY(tp_engine_note(engine, instr));
        int64_t before = tp_clock_ns(), waited = 0;
        TP_TRY(tp_engine_wait_inputs(engine, i));
        *event = (tp_event){.position = (int32_t)i, .step = (int32_t)engine->step, .start_ns = tp_clock_ns()};
        if (instr->op != TP_OP_OPT) {
            TP_TRY(run_one(engine, instr));
        } else {
            if (!finished++)
                TP_TRY(finish_step(engine, options, result, &waited));
            if (options->update)
                update(engine, instr->stage, options, result);
        }
        event->wait_ns = instr->op == TP_OP_OPT ? waited : event->start_ns - before;
        event->end_ns = tp_clock_ns();
    }
    return TP_OK;
}

static tp_status
run(tp_engine *engine, const int32_t *tokens, const tp_step_options *options, tp_step_result *result)
{
    uint64_t before = tp_fpu_flush_subnormals();
    tp_status status = run_all(engine, tokens, options, result);
    tp_fpu_restore(before);
    return status;
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
    memset(engine->gather, 0, (size_t)engine->gather_count * sizeof *engine->gather);
    TP_TRY(tp_engine_fail(engine, gather(engine, my_loss(engine), 0, &result)));
    *loss = result.loss;
    return TP_OK;
}
