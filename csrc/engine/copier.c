/* Swaps beside the work (TP_BESIDE): the device makes the copies of a rank's SO and SI aside, in their order, while the rank goes on,
 * or where it cannot a thread of the rank does. The rank counts copies: what it has begun, what is done, and for each instruction
 * how many must be done before it. */
#include "csrc/engine/internal.h"

#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "csrc/base/clock.h"
#include "csrc/base/cpu_relax.h"

#define SPINS 4000
#define NAP_NS 100000000 /* between two looks whether the run was aborted */

struct tp_engine_copier {
    tp_engine *engine;
    int64_t number;               /* of this step's copies, the next */
    int threaded;                 /* the rest is of the thread's */
    pthread_t thread;
    _Atomic uint32_t begun, done; /* copies of all steps; they wrap */
    _Atomic int ending;
    uint32_t base;                /* done when this step began */
    _Atomic int status;           /* of the first copy that failed, once `error` says why: a tp_status */
    tp_error_state error;
};

int
tp_engine_copies(const tp_program *program, int rank)
{
    int copies = 0;
    for (int64_t i = program->begin[rank]; i < program->begin[rank + 1]; i++)
        copies += tp_engine_is_copy(&program->code[i]);
    return copies;
}

tp_status
tp_engine_check_copies(const tp_engine_config *config)
{
    if (config->provider->host_memory || config->provider->device->aside_begin != NULL || !tp_program_swaps_beside(config->program))
        return TP_OK;
    return tp_fail(TP_EVALUE, "the program swaps beside the work (&): provider %s makes copies in the order of its work, a program "
                   "without & would be right", config->provider->name);
}

tp_status
tp_engine_match_copies(tp_engine *engine, const tp_program *program)
{
    int64_t units = tp_program_units(program);
    int32_t *out, *in, copies = 0; /* copies until the last SO of a stage's places, and the SI of a slice */
    if (engine->copied == NULL)
        return TP_OK;
    out = calloc((size_t)program->stages * (size_t)(2 + units), sizeof *out);
    if (out == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the copies of %d stages", program->stages);
    in = out + 2 * program->stages;
    int two = 0;
    for (int64_t i = 0; i < engine->count; i++)
        two |= engine->code[i].op == TP_OP_SO && engine->code[i].flags & TP_TWO_PLACES;
    for (int64_t i = 0; i < engine->count; i++) {
        const tp_instr *instr = &engine->code[i];
        int odd = two && TP_SLOT_ACTIVATION(instr->slot) & 1u;
        int32_t *here = instr->op == TP_OP_F || instr->op == TP_OP_SO ? &out[2 * instr->stage + odd]
                                                                      : &in[instr->stage * units + tp_program_unit(program, instr)];
        const int reads = instr->op == TP_OP_F || instr->op == TP_OP_B || instr->op == TP_OP_I || tp_instr_is_within(instr);
        engine->copied[i] = reads ? *here : 0;
        if (!tp_engine_is_copy(instr))
            continue;
        engine->copies[copies++] = (int32_t)i;
        *here = copies;
    }
    free(out);
    return TP_OK;
}

static void
futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *most)
{
    syscall(SYS_futex, (uint32_t *)word, operation | FUTEX_PRIVATE_FLAG, value, most, NULL, 0);
}

static int
changes(_Atomic uint32_t *word, uint32_t seen)
{
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load_explicit(word, memory_order_acquire) != seen)
            return 1;
        tp_cpu_relax();
    }
    return 0;
}

static tp_status
copy(tp_engine *engine, const tp_instr *instr)
{
    const tp_stage_ops *ops = engine->config.provider->stage;
    tp_stage *stage = engine->stage[instr->stage];
    int slot = (int)TP_SLOT_ACTIVATION(instr->slot), micro = tp_engine_micro(&engine->config, instr->micro);
    return instr->op == TP_OP_SO ? ops->swap_out(stage, micro, instr->slice, slot)
                                 : ops->swap_in(stage, micro, instr->slice, slot, (int)TP_SLOT_GRADIENT(instr->slot));
}

static void
copy_one(tp_engine_copier *copier, uint32_t number)
{
    tp_engine *engine = copier->engine;
    int64_t at = engine->copies[number];
    tp_event *event = &engine->events[at];
    event->start_ns = tp_clock_ns();
    tp_status status = copy(engine, &engine->code[at]);
    event->end_ns = tp_clock_ns();
    if (status != TP_OK && atomic_load_explicit(&copier->status, memory_order_relaxed) == TP_OK) {
        tp_error_save(&copier->error);
        atomic_store_explicit(&copier->status, (int)status, memory_order_release); /* read while later copies go on */
    }
}

static void *
copier_main(void *argument)
{
    tp_engine_copier *copier = argument;
    (void)prctl(PR_SET_NAME, "tp-copier"); /* for whoever looks at the process */
    for (;;) {
        uint32_t done = atomic_load_explicit(&copier->done, memory_order_relaxed);
        while (!changes(&copier->begun, done) && !atomic_load(&copier->ending) &&
               atomic_load_explicit(&copier->begun, memory_order_acquire) == done)
            futex(&copier->begun, FUTEX_WAIT, done, NULL);
        if (atomic_load(&copier->ending))
            return NULL;
        copy_one(copier, done - copier->base);
        atomic_fetch_add_explicit(&copier->done, 1, memory_order_release);
        futex(&copier->done, FUTEX_WAKE, 1, NULL);
    }
}

tp_status
tp_engine_open_copier(tp_engine *engine)
{
    if (engine->copied == NULL || engine->durations != NULL)
        return TP_OK;
    tp_engine_copier *copier = calloc(1, sizeof *copier);
    if (copier == NULL)
        return tp_fail(TP_EMEMORY, "no memory for a copier");
    copier->engine = engine;
    engine->copier = copier;
    copier->threaded = engine->device->ops->aside_begin == NULL;
    if (!copier->threaded)
        return TP_OK;
    int failure = pthread_create(&copier->thread, NULL, copier_main, copier);
    if (failure != 0) {
        copier->threaded = 0;
        return tp_fail(TP_ERUNTIME, "the thread that swaps beside the work could not be started (%s): more memory (ulimit -v) or "
                       "processes (ulimit -u) would be right", strerror(failure));
    }
    return TP_OK;
}

void
tp_engine_close_copier(tp_engine *engine)
{
    tp_engine_copier *copier = engine->copier;
    if (copier != NULL && copier->threaded) {
        atomic_store(&copier->ending, 1);
        atomic_fetch_add_explicit(&copier->begun, 1, memory_order_release); /* a wait for another number ends */
        futex(&copier->begun, FUTEX_WAKE, 1, NULL);
        pthread_join(copier->thread, NULL);
    }
    free(copier);
    engine->copier = NULL;
}

/* Until `number` copies of all steps are done. */
static tp_status
wait_until(tp_engine_copier *copier, uint32_t number)
{
    const struct timespec nap = {.tv_nsec = NAP_NS};
    for (uint32_t done; (int32_t)(number - (done = atomic_load_explicit(&copier->done, memory_order_acquire))) > 0;) {
        if (changes(&copier->done, done))
            continue;
        futex(&copier->done, FUTEX_WAIT, done, &nap);
        TP_TRY(tp_engine_check_abort(copier->engine));
    }
    tp_status status = (tp_status)atomic_load_explicit(&copier->status, memory_order_acquire);
    if (status != TP_OK)
        tp_error_restore(&copier->error);
    return status;
}

tp_status
tp_engine_begin_copies(tp_engine *engine)
{
    tp_engine_copier *copier = engine->copier;
    if (copier == NULL)
        return TP_OK;
    copier->number = 0;
    uint32_t begun = atomic_load_explicit(&copier->begun, memory_order_relaxed);
    TP_TRY(wait_until(copier, begun)); /* of a step that failed */
    copier->base = begun;
    return TP_OK;
}

/* On the device, marks included. */
static tp_status
copy_aside(tp_engine *engine, int64_t i)
{
    const tp_device_ops *ops = engine->device->ops;
    int64_t number = engine->copier->number++;
    TP_TRY(ops->aside_begin(engine->device, number));
    tp_status status = ops->mark(engine->device, &engine->events[i].start_ns);
    if (status == TP_OK)
        status = copy(engine, &engine->code[i]);
    if (status == TP_OK)
        status = ops->mark(engine->device, &engine->events[i].end_ns);
    tp_status ended = ops->aside_end(engine->device, number);
    return status != TP_OK ? status : ended;
}

tp_status
tp_engine_begin_copy(tp_engine *engine, int64_t i)
{
    if (!engine->copier->threaded)
        return copy_aside(engine, i);
    atomic_fetch_add_explicit(&engine->copier->begun, 1, memory_order_release);
    futex(&engine->copier->begun, FUTEX_WAKE, 1, NULL);
    return TP_OK;
}

tp_status
tp_engine_wait_copies(tp_engine *engine, int64_t i)
{
    if (!engine->copier->threaded)
        return engine->device->ops->aside_wait(engine->device, engine->copied[i] - 1);
    return wait_until(engine->copier, engine->copier->base + (uint32_t)engine->copied[i]);
}
