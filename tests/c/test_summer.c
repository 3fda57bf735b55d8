/* What a rank's helper thread does beside its work: sums of replicas' gradients leave the bits of those behind it; a run that ends
 * while they are under way ends everywhere, and why is said; and of a copy that failed the next step knows nothing. */
#define JOB_BATCH 6
#include "tests/c/engine_job.h"

#include <sys/prctl.h>
#include <time.h>

enum { CHUNKED = 1 };
#define MOST_NAPS 3000 /* of 10 ms: what never comes is a failure long before the test's deadline, and never a hang */

/* Two replicas of ranks: stages whose gradients are complete at once, one after the other, and with a W long after their I. */
static const layout replicated[] = {
    {"1F1B of three ranks", TP_1F1B, 3, 1, 1, 0, 3, {1, 1, 1}, {1, 1, 1}, {20, 20, 20}, 2, NULL},
    {"interleaved, two ranks of two chunks", TP_INTERLEAVED, 2, 2, 1, 0, 2, {2, 1}, {2, 1}, {3, 17, 20}, 2, NULL},
    {"interleaved of two ranks, weight gradients apart", TP_INTERLEAVED, 2, 2, 1, 1, 2, {1, 2}, {2, 1}, {6, 14, 20}, 2, NULL},
    {"ZB-H1 of two ranks", TP_ZB_H1, 2, 1, 2, 0, 3, {1, 1, 1}, {1, 1, 1}, {20, 20, 20}, 2, NULL},
    {"one rank", TP_GPIPE, 1, 1, 1, 0, 3, {1, 1, 1}, {1, 1, 1}, {20, 20, 20}, 2, NULL},
};

static const layout swapping = {
    "one rank that swaps beside its work", TP_GPIPE, 1, 1, 1, 0, 3, {2, 2, 2}, {1, 1, 1}, {20, 20, 20}, 1,
    "0F0.0 0SO0.0& 0F1.0 0SO1.0& 0F2.0 0SO2.0& 0SI0.0& 0B0.0 0SI1.0& 0B1.0 0SI2.0& 0B2.0\n"};

/* ---- a provider of short messages, whose sums and backwards can be held up ------------------------------------------------ */

static tp_device_ops device;
static tp_stage_ops stage;
static tp_provider provider;
static _Atomic int adds, beside_adds;   /* sums that have begun, and those of them in a thread of their own */
static _Atomic int holding, gone;       /* do they wait until `gone`? */
static _Atomic int refuses_add, refuses_copy;

static int
comes(_Atomic int *what)
{
    const struct timespec nap = {.tv_nsec = 10000000};
    for (int naps = 0; atomic_load(what) == 0 && naps < MOST_NAPS; naps++)
        nanosleep(&nap, NULL);
    return atomic_load(what) != 0;
}

static tp_status
open_device(const tp_device_config *config, tp_heap *heap, tp_device **out)
{
    TP_TRY(tp_cpu_provider()->device->open(config, heap, out));
    (*out)->ops = &device;
    return TP_OK;
}

static tp_status
add(tp_device *of, float *to, const float *from, int64_t floats)
{
    char thread[16] = "";
    int before = atomic_fetch_add(&adds, 1);
    MUST(prctl(PR_GET_NAME, thread) == 0);
    atomic_fetch_add(&beside_adds, strcmp(thread, "tp-summer") == 0);
    if (atomic_load(&refuses_add) && before == 2)
        return tp_fail(TP_EIO, "a sum cannot be made");
    if (atomic_load(&holding))
        MUST(comes(&gone));
    return tp_cpu_provider()->device->add(of, to, from, floats);
}

/* Ends one rank, which has begun to sum a stage's pieces and goes back through its next one, in the middle of somebody's sum. */
static tp_status
fails_going_back(tp_stage *of, int micro, int slot, int gradient_slot, int block)
{
    static _Thread_local int sums, before = -1;
    sums += block >= before; /* from a stage's last block on */
    before = block;
    if (sums < 2)
        return tp_cpu_provider()->stage->backward_block(of, micro, slot, gradient_slot, block);
    MUST(comes(&adds));
    if (atomic_exchange(&gone, 1) == 0)
        return tp_fail(TP_EIO, "this rank goes no further");
    return tp_cpu_provider()->stage->backward_block(of, micro, slot, gradient_slot, block);
}

static tp_status
copies_in(tp_stage *of, int micro, int slice, int slot, int gradient_slot)
{
    if (atomic_exchange(&refuses_copy, 0))
        return tp_fail(TP_EIO, "the disk does not answer");
    return tp_cpu_provider()->stage->swap_in(of, micro, slice, slot, gradient_slot);
}

static void
make_provider(void)
{
    device = *tp_cpu_provider()->device;
    stage = *tp_cpu_provider()->stage;
    provider = *tp_cpu_provider();
    device.open = open_device;
    device.add = add;
    device.message_floats = device.waiting_floats = 64; /* so that every block is a piece, and more than one message */
    stage.swap_in = copies_in;
    provider.device = &device;
    provider.stage = &stage;
}

/* ---- the tests ----------------------------------------------------------------------------------------------------------- */

static void
sum_beside_as_behind(const tp_model *model, const int32_t *tokens)
{
    for (size_t k = 0; k < sizeof replicated / sizeof replicated[0]; k++) {
        const int ranks = replicated[k].ranks * replicated[k].replicas;
        outcome left[2] = {0};
        for (int beside = 0; beside < 2; beside++) {
            job j;
            open_job(&j, model, &replicated[k], tokens, &left[beside]);
            j.provider = &provider;
            j.sums_beside = beside;
            atomic_store(&adds, 0);
            atomic_store(&beside_adds, 0);
            run_job(&j);
            MUST(adds > 0 && beside_adds == (beside ? adds : 0));
            for (int rank = 0; rank < ranks; rank++) {
                if (j.status[rank] != TP_OK)
                    fprintf(stderr, "%s, rank %d: %s\n", replicated[k].name, rank, j.message[rank]);
                MUST(j.status[rank] == TP_OK);
            }
            close_job(&j);
        }
        same(model, &left[1], &left[0], replicated[k].name);
        MUST(left[0].loss[1] < left[0].loss[0]);
        drop(&left[0]);
        drop(&left[1]);
    }
}

/* Who fails says why, and all others that they were ended for it. */
static void
ended_by_one(const job *j, const char *why)
{
    int failed = 0;
    for (int rank = 0; rank < j->cut->ranks * j->cut->replicas; rank++) {
        MUST(j->status[rank] == TP_EIO || j->status[rank] == TP_EABORTED);
        MUST(strstr(j->message[rank], why) != NULL);
        failed += j->status[rank] == TP_EIO;
    }
    MUST(failed > 0);
}

/* A rank fails in its backward while others' sums, and its own, are in the middle of one. */
static void
ends_while_sums_are_under_way(const tp_model *model, const int32_t *tokens)
{
    outcome out = {0};
    job j;
    open_job(&j, model, &replicated[CHUNKED], tokens, &out);
    j.provider = &provider;
    j.sums_beside = 1;
    stage.backward_block = fails_going_back;
    atomic_store(&adds, 0);
    atomic_store(&gone, 0);
    atomic_store(&holding, 1);
    run_job(&j);
    MUST(atomic_load(&adds) > 0);
    ended_by_one(&j, "this rank goes no further");
    atomic_store(&holding, 0);
    stage.backward_block = tp_cpu_provider()->stage->backward_block;
    close_job(&j);
}

static void
ends_with_the_sum_that_failed(const tp_model *model, const int32_t *tokens)
{
    outcome out = {0};
    job j;
    open_job(&j, model, &replicated[CHUNKED], tokens, &out);
    j.provider = &provider;
    j.sums_beside = 1;
    atomic_store(&adds, 0);
    atomic_store(&refuses_add, 1);
    run_job(&j);
    ended_by_one(&j, "a sum cannot be made");
    atomic_store(&refuses_add, 0);
    close_job(&j);
}

/* Of an engine alone, which no other rank's end keeps from its next step. */
static void
steps_again_after_a_copy_that_failed(const tp_model *model, const int32_t *tokens)
{
    tp_step_result result[2];
    for (int fails = 0; fails < 2; fails++) {
        job j;
        tp_heap *heap;
        tp_engine *engine;
        tp_step_options mine = options;
        open_job(&j, model, &swapping, tokens, NULL);
        j.provider = &provider;
        tp_engine_config config = config_of(&j, 0, NULL);
        MUST(tp_heap_open(0, &heap) == TP_OK && tp_engine_open(&config, heap, &engine) == TP_OK);
        load(engine, &j, 0);
        mine.adamw.step = 1;
        atomic_store(&refuses_copy, fails);
        if (fails) {
            MUST(tp_engine_step(engine, tokens, &mine, &result[1]) == TP_EIO);
            MUST(strstr(tp_error_message(), "the disk does not answer") != NULL);
        }
        MUST(tp_engine_step(engine, tokens, &mine, &result[fails]) == TP_OK);
        tp_engine_close(engine);
        MUST(tp_heap_bytes(heap) == 0);
        tp_heap_close(heap);
        close_job(&j);
    }
    MUST(result[0].loss == result[1].loss && result[0].grad_norm == result[1].grad_norm);
}

int
main(void)
{
    static const tp_model models[] = {
        {.n_layer = 2, .n_head = 2, .n_embd = 16, .vocab_size = 61, .block_size = 24, .bias = 1, .tie_weights = 1},
        {.n_layer = 3, .n_head = 3, .n_embd = 12, .vocab_size = 40, .block_size = 20, .bias = 0, .tie_weights = 0},
    };
    int32_t tokens[BATCH * (SEQ + 1)];
    uint32_t state = 1;
    for (int i = 0; i < BATCH * (SEQ + 1); i++) {
        state = state * 1664525u + 1013904223u;
        tokens[i] = (int32_t)((state >> 16) % 40);
    }
    make_provider();
    for (size_t m = 0; m < sizeof models / sizeof models[0]; m++) {
        sum_beside_as_behind(&models[m], tokens);
        ends_while_sums_are_under_way(&models[m], tokens);
        ends_with_the_sum_that_failed(&models[m], tokens);
        steps_again_after_a_copy_that_failed(&models[m], tokens);
    }
    return 0;
}
