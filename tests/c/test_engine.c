/* One rank's engine without Python: ranks as threads over a region train what one rank alone trains, bit for bit; replicas of
 * them train the same bits whatever their stages; updates by micro-batches are the same wherever stages are; and opening an engine
 * survives the failure of each of its allocations. */
#include "tests/c/engine_job.h"

#include <time.h>

enum { TWO = 3, THREE = 5, SLICED = 7, BESIDE = 11 }; /* layouts of so many ranks; of two that cut all sequences alike; that swap */

static const layout layouts[] = {
    {"one rank, one slice a sequence", TP_GPIPE, 1, 1, 1, 0, 3, {1, 1, 1}, {1, 1, 1}, {20, 20, 20}, 1, NULL},
    {"one rank of two threads, the batch in ragged slices", TP_GPIPE, 1, 1, 2, 0, 1, {3}, {3}, {1, 14, 5}, 1, NULL},
    {"one rank of three chunks: no message, a tied weight on both ends",
     TP_INTERLEAVED,
     1,
     3,
     1,
     0,
     2,
     {2, 1},
     {2, 1},
     {3, 17, 20}, 1, NULL},
    {"two ranks, GPipe", TP_GPIPE, 2, 1, 1, 0, 2, {1, 2}, {2, 1}, {7, 13, 20}, 1, NULL},
    {"two ranks, 1F1B", TP_1F1B, 2, 1, 1, 0, 3, {1, 1, 1}, {1, 1, 1}, {20, 20, 20}, 1, NULL},
    {"three ranks, sequence 1F1B", TP_SEQ1F1B, 3, 1, 1, 0, 3, {1, 1, 1}, {3, 3, 3}, {9, 1, 10, 2, 17, 1, 10, 5, 5}, 1, NULL},
    {"three ranks, sequence 1F1B, weight gradients apart",
     TP_SEQ1F1B,
     3,
     1,
     1,
     1,
     3,
     {1, 1, 1},
     {2, 2, 2},
     {9, 11, 9, 11, 9, 11}, 1, NULL},
    {"two ranks, first slices of one token", TP_1F1B, 2, 1, 1, 0, 3, {1, 1, 1}, {2, 2, 2}, {1, 19, 1, 19, 1, 19}, 1, NULL},
    {"two ranks of two chunks, interleaved", TP_INTERLEAVED, 2, 2, 1, 0, 2, {2, 1}, {1, 1}, {20, 20}, 1, NULL},
    {"two ranks of two threads, interleaved, weight gradients apart",
     TP_INTERLEAVED,
     2,
     2,
     2,
     1,
     2,
     {1, 2},
     {2, 2},
     {6, 14, 19, 1}, 1, NULL},
    {"three ranks, the last of which keeps activations of the first", TP_1F1B, 3, 1, 1, 0, 3, {1, 1, 1}, {1, 1, 1}, {20, 20, 20}, 1,
     "0F0.0 0F1.0 0SE1.0@2 0F2.0 0B0.0 0RL1.0@2 0B1.0 0B2.0\n1F0.0 1F1.0 1B0.0 1F2.0 1B1.0 1B2.0\n"
     "0RE1.0@0 2F0.0 2B0.0 2F1.0 2B1.0 2F2.0 0SL1.0@0 2B2.0\n"},
    {"two ranks that swap beside their work, out of two places", TP_1F1B, 2, 1, 1, 0, 3, {1, 1, 1}, {1, 1, 1}, {20, 20, 20}, 1,
     "0F0.0 0SO0.0&& 0F1.0 0SO1.0&& 0SI0.0& 0SI1.0& 0B0.0 0F2.0 0SO2.0&& 0SI2.0& 0B1.0 0B2.0\n"
     "1F0.0 1SO0.0&& 1SI0.0& 1B0.0 1F1.0 1SO1.0&& 1SI1.0& 1B1.0 1F2.0 1SO2.0&& 1SI2.0& 1B2.0\n"},
};

static const layout replicated[] = {
    {"three replicas of one rank", TP_GPIPE, 1, 1, 1, 0, 1, {1}, {1}, {20}, 3, NULL},
    {"three replicas of one rank of two threads, sliced", TP_GPIPE, 1, 1, 2, 0, 1, {1}, {4}, {3, 8, 1, 8}, 3, NULL},
    {"three replicas of two ranks", TP_SEQ1F1B, 2, 1, 1, 1, 1, {1}, {3}, {9, 1, 10}, 3, NULL},
    {"three replicas of one rank of two chunks", TP_INTERLEAVED, 1, 2, 1, 0, 1, {1}, {2}, {15, 5}, 3, NULL},
};

/* Updates by micro-batches: the same instructions of each stage, on three ranks and on one. */
static const layout updating[] = {
    {"three ranks, each micro-batch with its update", TP_1F1B, 3, 1, 1, 0, 3, {1, 1, 1}, {1, 1, 1}, {20, 20, 20}, 1,
     "0F0.0 0F1.0 0F2.0 0B0.0 0U0.0 0B1.0 0U1.0 0B2.0 0U2.0\n1F0.0 1F1.0 1B0.0 1U0.0 1F2.0 1B1.0 1U1.0 1B2.0 1U2.0\n"
     "2F0.0 2B0.0 2U0.0 2F1.0 2B1.0 2U1.0 2F2.0 2B2.0 2U2.0\n"},
    {"the same of two slices", TP_1F1B, 3, 1, 2, 0, 3, {1, 1, 1}, {1, 2, 1}, {20, 3, 17, 20}, 1,
     "0F0.0 0F1.0 0F1.1 0F2.0 0B0.0 0U0.0 0B1.1 0B1.0 0U1.0 0B2.0 0U2.0\n"
     "1F0.0 1F1.0 1F1.1 1B0.0 1U0.0 1F2.0 1B1.1 1B1.0 1U1.0 1B2.0 1U2.0\n"
     "2F0.0 2B0.0 2U0.0 2F1.0 2F1.1 2B1.1 2B1.0 2U1.0 2F2.0 2B2.0 2U2.0\n"},
    {"one rank of three stages", TP_1F1B, 1, 3, 1, 0, 3, {1, 1, 1}, {1, 1, 1}, {20, 20, 20}, 1,
     "0F0.0 1F0.0 2F0.0 2B0.0 2U0.0 0F1.0 1F1.0 1B0.0 1U0.0 2F1.0 2B1.0 2U1.0 0F2.0 0B0.0 0U0.0 1F2.0 1B1.0 1U1.0 0B1.0 0U1.0 "
     "2F2.0 2B2.0 2U2.0 1B2.0 1U2.0 0B2.0 0U2.0\n"},
};

static void
trains_like_one_rank(const tp_model *model, const int32_t *tokens)
{
    outcome alone = {0};
    for (size_t n = 0; n < 3 * (sizeof layouts / sizeof layouts[0]); n++) {
        size_t k = n / 3;
        outcome mine = {0};
        job j;
        if (n % 3 != NO_ARENA && layouts[k].ranks == 1)
            continue;
        open_job(&j, model, &layouts[k], tokens, n == 0 ? &alone : &mine);
        j.arena = (arena_kind)(n % 3);
        j.lends = k == SLICED && j.arena == ARENA ? 3u : 0u;
        run_job(&j);
        for (int rank = 0; rank < layouts[k].ranks; rank++) {
            if (j.status[rank] != TP_OK)
                fprintf(stderr, "%s, rank %d: %s\n", layouts[k].name, rank, j.message[rank]);
            MUST(j.status[rank] == TP_OK);
        }
        if (n > 0)
            same(model, &mine, &alone, layouts[k].name);
        drop(&mine);
        close_job(&j);
    }
    MUST(fabs(alone.loss[0] - log(model->vocab_size)) < 0.1); /* near uniform before training */
    MUST(alone.loss[1] < alone.loss[0] && alone.evaluated < alone.loss[1]);
    drop(&alone);
}

/* All replicas' sequences together are the batch that one rank trains on; the order of the sums is another. */
static void
replicas_train_alike(const tp_model *model, const int32_t *tokens)
{
    outcome alone = {0}, first = {0};
    job j;
    open_job(&j, model, &layouts[0], tokens, &alone);
    run_job(&j);
    close_job(&j);
    for (size_t k = 0; k < sizeof replicated / sizeof replicated[0]; k++) {
        outcome mine = {0};
        open_job(&j, model, &replicated[k], tokens, k == 0 ? &first : &mine);
        j.arena = k % 2 == 0 ? ARENA : NO_ARENA;
        run_job(&j);
        for (int rank = 0; rank < replicated[k].ranks * replicated[k].replicas; rank++)
            MUST(j.status[rank] == TP_OK);
        if (k > 0)
            same(model, &mine, &first, replicated[k].name);
        drop(&mine);
        close_job(&j);
    }
    MUST(first.loss[0] == alone.loss[0]);
    MUST(fabs(first.norm[0] / alone.norm[0] - 1) < 1e-6 && fabs(first.evaluated / alone.evaluated - 1) < 1e-6);
    MUST(memcmp(first.state[TP_STATE_GRAD][0], alone.state[TP_STATE_GRAD][0], 64) != 0); /* it would prove nothing */
    drop(&alone);
    drop(&first);
}

/* A loss that is not finite is every rank's error, and no parameter moves. */
static void
refuses_what_is_not_finite(const tp_model *model, const int32_t *tokens)
{
    outcome out = {0};
    job j;
    open_job(&j, model, &layouts[THREE], tokens, &out);
    j.poison = 1;
    j.arena = ARENA;
    run_job(&j);
    for (int rank = 0; rank < layouts[THREE].ranks; rank++) {
        MUST(j.status[rank] == TP_ERUNTIME || j.status[rank] == TP_EABORTED); /* whoever came second was told */
        MUST(strstr(j.message[rank], "step 0: the loss is nan") != NULL);
    }
    close_job(&j);
}

static void
ends_with_the_rank_that_failed(const tp_model *model, const int32_t *tokens)
{
    outcome out = {0};
    job j;
    open_job(&j, model, &layouts[THREE], tokens, &out);
    j.quits = 1;
    j.arena = ARENA;
    run_job(&j);
    for (int rank = 0; rank < layouts[THREE].ranks; rank++) {
        MUST(j.status[rank] == (rank == 1 ? TP_EIO : TP_EABORTED));
        MUST(rank == 1 || strstr(j.message[rank], "the disk of rank 1 is full") != NULL);
    }
    close_job(&j);
}

static tp_status
no_way_in(tp_stage *stage, int micro, int slice, int slot, int gradient_slot)
{
    const struct timespec nap = {.tv_nsec = 10000000}; /* so that the rank has gone on with what came before */
    if (micro == 1 && nanosleep(&nap, NULL) == 0)
        return tp_fail(TP_EIO, "the disk does not answer");
    return tp_cpu_provider()->stage->swap_in(stage, micro, slice, slot, gradient_slot);
}

/* Made while the rank asks after the copy before it: its end is the run's, and says why. */
static void
ends_with_the_copy_that_failed(const tp_model *model, const int32_t *tokens)
{
    outcome out = {0};
    job j;
    tp_stage_ops stage = *tp_cpu_provider()->stage;
    tp_provider failing = *tp_cpu_provider();
    stage.swap_in = no_way_in;
    failing.stage = &stage;
    open_job(&j, model, &layouts[BESIDE], tokens, &out);
    j.provider = &failing;
    run_job(&j);
    int told = 0;
    for (int rank = 0; rank < layouts[BESIDE].ranks; rank++) {
        MUST(j.status[rank] == TP_EIO || j.status[rank] == TP_EABORTED);
        MUST(strstr(j.message[rank], "the disk does not answer") != NULL);
        told += j.status[rank] == TP_EIO;
    }
    MUST(told > 0);
    close_job(&j);
}

static void *
some_arena(tp_comm *comm, size_t *bytes)
{
    static _Alignas(64) char memory[1 << 20];
    (void)comm;
    *bytes = sizeof memory;
    return memory;
}

/* Opening sends nothing. */
static const tp_comm_ops silent = {.abi = TP_COMM_ABI, .most_posted = TP_COMM_POSTED},
                         lending = {.abi = TP_COMM_ABI, .most_posted = TP_COMM_POSTED, .arena = some_arena};

/* The N-th allocation fails, for all N: EMEMORY, and nothing stays behind (ASan looks at what is outside the account). */
static void
survives_every_failed_allocation(const tp_model *model, const int32_t *tokens, const layout *cut, int lends)
{
    int last = cut->ranks * cut->replicas - 1;
    job j;
    open_job(&j, model, cut, tokens, NULL);
    tp_comm nobody = {lends ? &lending : &silent, last, last + 1, 0, 0, 0};
    tp_engine_config config = config_of(&j, last, &nobody);
    tp_heap *heap;
    MUST(tp_heap_open(0, &heap) == TP_OK);
    int64_t n = 0;
    for (tp_status status = TP_EMEMORY; status != TP_OK;) {
        tp_engine *engine = NULL;
        tp_heap_fail_after(++n);
        status = tp_engine_open(&config, heap, &engine);
        tp_heap_fail_after(0);
        MUST(status == TP_OK || (status == TP_EMEMORY && engine == NULL && tp_heap_bytes(heap) == 0));
        MUST(status == TP_OK || strstr(tp_error_message(), "the system refused") != NULL);
        if (status == TP_OK)
            tp_engine_close(engine);
    }
    MUST(n > 8 + cut->chunks); /* every table, the workspace and each stage were refused once */
    MUST(tp_heap_bytes(heap) == 0);
    tp_heap_close(heap);
    close_job(&j);
}

/* A heap one byte too small refuses, and says how much is short; one that fits exactly does not. */
static void
fits_to_the_byte(const tp_model *model, const int32_t *tokens, const layout *cut)
{
    job j;
    open_job(&j, model, cut, tokens, NULL);
    tp_comm nobody = {&lending, 0, cut->ranks, 0, 0, 0};
    tp_engine_config config = config_of(&j, 0, &nobody);
    size_t bytes;
    MUST(tp_engine_bytes(&config, &bytes) == TP_OK);
    for (size_t less = 0; less < 2; less++) {
        tp_heap *heap;
        tp_engine *engine = NULL;
        MUST(tp_heap_open(bytes - less, &heap) == TP_OK);
        tp_status status = tp_engine_open(&config, heap, &engine);
        MUST(status == (less ? TP_EMEMORY : TP_OK));
        MUST(!less || strstr(tp_error_message(), ": 1 bytes short of the limit") != NULL);
        tp_engine_close(engine);
        MUST(tp_heap_bytes(heap) == 0);
        tp_heap_close(heap);
    }
    close_job(&j);
}

static void
updates_alike_wherever_stages_are(const tp_model *model, const int32_t *tokens)
{
    outcome first = {0}, whole = {0};
    job j;
    open_job(&j, model, &layouts[0], tokens, &whole);
    run_job(&j);
    close_job(&j);
    for (size_t k = 0; k < sizeof updating / sizeof updating[0]; k++) {
        outcome mine = {0};
        open_job(&j, model, &updating[k], tokens, k == 0 ? &first : &mine);
        j.arena = k % 2 == 0 ? ARENA : NO_ARENA;
        run_job(&j);
        for (int rank = 0; rank < updating[k].ranks; rank++)
            MUST(j.status[rank] == TP_OK);
        if (k > 0)
            same(model, &mine, &first, updating[k].name);
        drop(&mine);
        close_job(&j);
        survives_every_failed_allocation(model, tokens, &updating[k], 0);
        fits_to_the_byte(model, tokens, &updating[k]);
    }
    MUST(first.loss[0] != whole.loss[0] && fabs(first.loss[1] / whole.loss[1] - 1) < 0.1); /* three updates, not one */
    drop(&first);
    drop(&whole);
}

static void
refuses_parts_that_do_not_fit(const tp_model *model, const int32_t *tokens)
{
    job j;
    tp_heap *heap;
    tp_engine *engine = NULL;
    open_job(&j, model, &layouts[TWO], tokens, NULL);
    MUST(tp_heap_open(0, &heap) == TP_OK);
    tp_engine_config good = config_of(&j, 0, NULL), bad = good;
    MUST(tp_engine_open(&good, heap, &engine) == TP_EVALUE); /* two ranks, no communicator */
    bad.rank = 2;
    MUST(tp_engine_check(&bad) == TP_EVALUE && strstr(tp_error_message(), "0 to 1") != NULL);
    bad = good;
    bad.model.n_layer++;
    MUST(tp_engine_check(&bad) == TP_EVALUE && strstr(tp_error_message(), "cover blocks") != NULL);
    bad = good;
    bad.model.block_size = SEQ - 1;
    MUST(tp_engine_check(&bad) == TP_EVALUE && strstr(tp_error_message(), "block_size") != NULL);
    int32_t empty[3] = {0, 0, tp_model_blocks(model)};
    bad = good;
    bad.partition = empty;
    MUST(tp_engine_check(&bad) == TP_EVALUE && strstr(tp_error_message(), "no block") != NULL);
    job other;
    open_job(&other, model, &layouts[0], tokens, NULL);
    bad = good;
    bad.slicing = other.slicing;
    MUST(tp_engine_check(&bad) == TP_EVALUE && strstr(tp_error_message(), "micro-batches") != NULL);
    bad = config_of(&j, 0, NULL);
    bad.replicas = 3;
    bad.replica = 3;
    MUST(tp_engine_open(&bad, heap, &engine) == TP_EVALUE && strstr(tp_error_message(), "replica is 3: 0 to 2") != NULL);
    tp_stage_ops stage = *good.provider->stage;
    tp_provider provider = *good.provider;
    stage.gradients = NULL;
    provider.stage = &stage;
    bad.replica = 2;
    bad.provider = &provider;
    MUST(tp_engine_open(&bad, heap, &engine) == TP_EVALUE && strstr(tp_error_message(), "3 replicas: backend cpu") != NULL);
    MUST(tp_heap_bytes(heap) == 0);
    tp_heap_close(heap);
    close_job(&other);
    close_job(&j);
}

int
main(void)
{
    static const tp_model models[] = {
        {.n_layer = 2, .n_head = 2, .n_embd = 16, .vocab_size = 61, .block_size = 24, .bias = 1, .tie_weights = 1},
        {.n_layer = 1, .n_head = 3, .n_embd = 27, .vocab_size = 40, .block_size = 20, .bias = 0, .tie_weights = 0},
        /* one token's row fits beside a message's header */
        {.n_layer = 2, .n_head = 2, .n_embd = 12, .vocab_size = 40, .block_size = 20, .bias = 1, .tie_weights = 0},
    };
    int32_t tokens[BATCH * (SEQ + 1)];
    uint32_t state = 1;
    for (int i = 0; i < BATCH * (SEQ + 1); i++) {
        state = state * 1664525u + 1013904223u;
        tokens[i] = (int32_t)((state >> 16) % 40);
    }
    for (size_t m = 0; m < sizeof models / sizeof models[0]; m++) {
        trains_like_one_rank(&models[m], tokens);
        replicas_train_alike(&models[m], tokens);
        refuses_what_is_not_finite(&models[m], tokens);
        ends_with_the_rank_that_failed(&models[m], tokens);
        ends_with_the_copy_that_failed(&models[m], tokens);
        for (size_t k = 0; k < sizeof layouts / sizeof layouts[0]; k++)
            for (int lends = 0; lends < 2; lends++)
                survives_every_failed_allocation(&models[m], tokens, &layouts[k], lends);
        survives_every_failed_allocation(&models[m], tokens, &replicated[2], 1);
        fits_to_the_byte(&models[m], tokens, &layouts[1]);
        fits_to_the_byte(&models[m], tokens, &layouts[THREE]);
        fits_to_the_byte(&models[m], tokens, &layouts[BESIDE]);
        refuses_parts_that_do_not_fit(&models[m], tokens);
        if (!models[m].tie_weights)
            updates_alike_wherever_stages_are(&models[m], tokens);
    }
    return 0;
}
