/* The engine's own time: steps of a program whose kernels do nothing; everything else is real (order, waits, messages between
 * threads, slots, trace). engine.py builds and runs it. Prints instructions of a rank's step, then seconds of each step.
 *
 *     engine RANKS MICROS SLICES STEPS */
#include "csrc/engine/engine.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/comm/region.h"
#include "csrc/stage/stage.h"

enum { SLICE = 4, MOST_RANKS = 8, MOST_MICROS = 64, MOST_UNITS = 1024 };
#define SECONDS 1000000000ll

static void
must(int truth, const char *what)
{
    if (!truth) {
        fprintf(stderr, "%s: %s\n", what, tp_error_message());
        exit(1);
    }
}

static tp_status
no_forward(tp_stage *stage, int micro, int slice, tp_half half, int slot)
{
    (void)stage, (void)micro, (void)slice, (void)half, (void)slot;
    return TP_OK;
}

static tp_status
no_gradient(tp_stage *stage, int micro, int slice, int slot, int gradient_slot)
{
    (void)stage, (void)micro, (void)slice, (void)slot, (void)gradient_slot;
    return TP_OK;
}

static tp_status
no_finish(tp_stage *stage)
{
    (void)stage;
    return TP_OK;
}

static tp_status
no_sumsq(tp_stage *stage, double *sums)
{
    (void)stage, (void)sums;
    return TP_OK;
}

static tp_status
no_update(tp_stage *stage, const tp_adamw *adamw, double grad_scale)
{
    (void)stage, (void)adamw, (void)grad_scale;
    return TP_OK;
}

typedef struct {
    tp_engine_config config;
    tp_region *region;
    const int32_t *tokens;
    int rank, ranks, steps;
    double *seconds; /* [steps] of rank 0 */
} member;

static void *
run_rank(void *argument)
{
    member *self = argument;
    tp_heap *heap;
    tp_engine *engine;
    tp_step_options options = {.adamw = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8}, .update = 1};
    must(tp_heap_open(0, &heap) == TP_OK, "heap");
    if (self->ranks > 1)
        must(tp_comm_open_region(self->region, self->rank, "thread", 60 * SECONDS, &self->config.comm) == TP_OK, "comm");
    must(tp_engine_open(&self->config, heap, &engine) == TP_OK, "engine");
    for (int step = 0; step < self->steps; step++) {
        tp_step_result result;
        options.adamw.step = step + 1;
        must(tp_engine_step(engine, self->tokens, &options, &result) == TP_OK, "step");
        if (self->rank == 0)
            self->seconds[step] = 1e-9 * (double)(result.end_ns - result.begin_ns);
    }
    tp_engine_close(engine);
    if (self->config.comm != NULL)
        self->config.comm->ops->close(self->config.comm);
    tp_heap_close(heap);
    return NULL;
}

static tp_region *
open_region(const tp_engine_config *config, int ranks, int64_t tensors)
{
    uint8_t pairs[MOST_RANKS * MOST_RANKS];
    size_t arenas[MOST_RANKS], bytes;
    void *memory;
    tp_region *region;
    for (int i = 0; i < ranks * ranks; i++)
        pairs[i] = i / ranks != i % ranks;
    for (int rank = 0; rank < ranks; rank++) {
        tp_engine_config one = *config;
        one.rank = rank;
        must(tp_engine_lent_bytes(&one, &arenas[rank]) == TP_OK, "bytes");
    }
    tp_region_shape shape = {ranks, pairs, 1 << 16, ((size_t)tensors + 2) * sizeof(double), arenas};
    must(tp_region_bytes(&shape, &bytes) == TP_OK && tp_local_create(bytes, &memory) == TP_OK, "memory");
    must(tp_region_create(memory, bytes, &shape, &region) == TP_OK, "region");
    return region;
}

int
main(int argc, char **argv)
{
    int ranks = argc > 4 ? atoi(argv[1]) : 0, micros = argc > 4 ? atoi(argv[2]) : 0, slices = argc > 4 ? atoi(argv[3]) : 0;
    int steps = argc > 4 ? atoi(argv[4]) : 0;
    if (ranks < 1 || ranks > MOST_RANKS || micros < 1 || micros > MOST_MICROS || slices < 1 || micros * slices > MOST_UNITS || steps < 1)
        return 2;
    const tp_model model = {.n_layer = MOST_RANKS, .n_head = 1, .n_embd = 16, .vocab_size = 16, .block_size = slices * SLICE, .bias = 1};
    int32_t batches[MOST_MICROS], counts[MOST_MICROS], lengths[MOST_UNITS], partition[MOST_RANKS + 1];
    for (int q = 0; q < micros; q++)
        batches[q] = 1, counts[q] = slices;
    for (int u = 0; u < micros * slices; u++)
        lengths[u] = SLICE;
    for (int v = 0; v <= ranks; v++)
        partition[v] = v * tp_model_blocks(&model) / ranks;
    tp_slicing *slicing;
    tp_program *built, *program;
    must(tp_slicing_open(slices * SLICE, micros, micros, batches, counts, lengths, &slicing) == TP_OK, "slicing");
    must(tp_program_build(TP_SEQ1F1B, ranks, 1, micros, counts, &built) == TP_OK, "program");
    must(tp_program_lower(built, 0, &program) == TP_OK, "lowered");
    tp_stage_ops stage = tp_cpu_stage_ops;
    stage.forward = no_forward;
    stage.input_gradient = stage.weight_gradient = stage.backward = no_gradient;
    stage.finish = no_finish;
    stage.sumsq = no_sumsq;
    stage.update = no_update;
    tp_provider provider = *tp_cpu_provider();
    provider.stage = &stage;
    const tp_engine_config config = {.program = program, .model = model, .slicing = slicing, .partition = partition,
                                     .provider = &provider, .device = {.threads = 1}};
    tp_region *region = ranks > 1 ? open_region(&config, ranks, tp_model_params(&model)) : NULL;
    int32_t *tokens = calloc((size_t)micros * (size_t)(slices * SLICE + 1), sizeof *tokens);
    double *seconds = calloc((size_t)steps, sizeof *seconds);
    must(tokens != NULL && seconds != NULL, "tokens");
    member members[MOST_RANKS];
    pthread_t threads[MOST_RANKS];
    for (int rank = 0; rank < ranks; rank++) {
        members[rank] = (member){config, region, tokens, rank, ranks, steps, seconds};
        members[rank].config.rank = rank;
        members[rank].config.region = region;
        must(pthread_create(&threads[rank], NULL, run_rank, &members[rank]) == 0, "thread");
    }
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(threads[rank], NULL);
    printf("%lld\n", (long long)(program->begin[1] - program->begin[0]));
    for (int step = 0; step < steps; step++)
        printf("%.9f\n", seconds[step]);
    return 0;
}
