/* Training by one engine or several, each rank a thread over a region: what a layout leaves, for tests to compare. */
#ifndef TESTS_C_ENGINE_JOB_H
#define TESTS_C_ENGINE_JOB_H

#include "csrc/engine/engine.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/stage/stage_ops.h"

#include "tests/c/watched_comm.h"
#include "tests/c/check.h"

#ifndef JOB_BATCH
#define JOB_BATCH 3 /* sequences, of all replicas */
#endif
enum { STEPS = 2, BATCH = JOB_BATCH, SEQ = 20, MOST_RANKS = 6, MOST_CUTS = 64 };
#define SECONDS 1000000000ll

/* How a batch is cut and who runs what. */
typedef struct {
    const char *name;
    tp_schedule schedule;
    int ranks, chunks, threads, split;
    int micros;
    int32_t batches[BATCH], slices[BATCH], lengths[MOST_CUTS];
    int replicas; /* each of `ranks` */
    const char *text; /* the program; NULL: the schedule's. With SO in it all attentions and FFNs swap */
} layout;

/* What a run leaves: losses and norms of each step, the loss of an evaluation, and every parameter and moment. */
typedef struct {
    double loss[STEPS], norm[STEPS], evaluated;
    float *state[4][64]; /* [tp_state][canonical index] */
} outcome;

typedef enum { NO_ARENA, ARENA_TOO_SMALL, ARENA } arena_kind;

typedef struct {
    tp_model model;
    const layout *cut;
    tp_program *program;
    tp_slicing *slicing;
    int32_t partition[8];
    uint8_t saves[16]; /* of the blocks */
    const int32_t *tokens;
    tp_region *region;
    arena_kind arena; /* what there is for the messages of each rank */
    int poison; /* rank whose first tensor gets a NaN; -1: none */
    int quits;  /* rank that fails before it has trained; -1: none */
    const tp_provider *provider; /* NULL: the CPU's */
    int sums_beside; /* of the work, by each rank's summer */
    unsigned lends; /* slices that a rank lends at once; 0: whatever it does */
    outcome *out;
    tp_status status[MOST_RANKS];
    char message[MOST_RANKS][256];
    pthread_mutex_t lock; /* a tied weight is written by two ranks */
} job;

typedef struct {
    job *all;
    int rank;
} member;

static const tp_step_options options = {
    .adamw = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1},
    .grad_clip = 0.5,
    .update = 1};

static void *
take(size_t bytes)
{
    void *memory = calloc(1, bytes + 1);
    MUST(memory != NULL);
    return memory;
}

static void
open_job(job *j, const tp_model *model, const layout *cut, const int32_t *tokens, outcome *out)
{
    *j = (job){.model = *model, .cut = cut, .tokens = tokens, .poison = -1, .quits = -1, .out = out};
    pthread_mutex_init(&j->lock, NULL);
    tp_program *built, *split = NULL;
    MUST(tp_slicing_open(SEQ, BATCH / cut->replicas, cut->micros, cut->batches, cut->slices, cut->lengths, &j->slicing) == TP_OK);
    if (cut->text != NULL)
        MUST(tp_program_parse(cut->text, strlen(cut->text), &built) == TP_OK);
    else
        MUST(tp_program_build(cut->schedule, cut->ranks, cut->chunks, cut->micros, cut->slices, &built) == TP_OK);
    if (cut->split) {
        static const double one = 1.0;
        tp_durations seconds = {.seconds = {[TP_OP_F] = &one, [TP_OP_I] = &one, [TP_OP_W] = &one}};
        MUST(tp_program_split(built, &seconds, 2, &split) == TP_OK);
    }
    MUST(tp_program_lower(split == NULL ? built : split, model->tie_weights, &j->program) == TP_OK);
    MUST(tp_program_check(j->program) == TP_OK);
    tp_program_close(built);
    tp_program_close(split);
    int stages = j->program->stages, blocks = tp_model_blocks(model);
    MUST(blocks <= (int)sizeof j->saves);
    for (int block = 1; block < blocks - 1; block++)
        j->saves[block] = cut->text != NULL && strstr(cut->text, "SO") != NULL ? TP_SWAPS : TP_KEEPS;
    for (int v = 0; v <= stages; v++)
        j->partition[v] = v * blocks / stages;
}

static void
close_job(job *j)
{
    tp_program_close(j->program);
    tp_slicing_close(j->slicing);
    pthread_mutex_destroy(&j->lock);
}

static tp_engine_config
config_of(const job *j, int rank, tp_comm *comm)
{
    return (tp_engine_config){.program = j->program,
                              .rank = rank % j->cut->ranks,
                              .replicas = j->cut->replicas,
                              .replica = rank / j->cut->ranks,
                              .sums_beside = j->sums_beside,
                              .model = j->model,
                              .slicing = j->slicing,
                              .partition = j->partition,
                              .saves = j->saves,
                              .store = "/tmp",
                              .provider = j->provider != NULL ? j->provider : tp_cpu_provider(),
                              .device = {.threads = j->cut->threads},
                              .comm = comm,
                              .region = j->region};
}

static void
load(tp_engine *engine, const job *j, int rank)
{
    const tp_stage_ops *ops = tp_cpu_provider()->stage;
    tp_stage *stage;
    int number;
    for (int k = 0; (stage = tp_engine_stage(engine, k, &number)) != NULL; k++) {
        for (int i = 0; i < ops->params(stage); i++) {
            tp_param param;
            tp_model_param(&j->model, ops->param_index(stage, i), &param);
            float *values = take((size_t)(param.rows * param.cols) * sizeof *values);
            tp_model_init_param(&j->model, &param, 11, values);
            if (rank == j->poison && k == 0 && i == 0)
                values[0] = NAN;
            MUST(ops->import(stage, i, TP_STATE_VALUE, values) == TP_OK);
            free(values);
        }
        MUST(ops->pack(stage) == TP_OK);
    }
}

/* A tensor that another rank has left too (a tied wte) must be the same there. */
static void
leave(tp_engine *engine, job *j)
{
    const tp_stage_ops *ops = tp_cpu_provider()->stage;
    tp_stage *stage;
    int number;
    for (int k = 0; (stage = tp_engine_stage(engine, k, &number)) != NULL; k++)
        for (int i = 0; i < ops->params(stage); i++)
            for (int state = TP_STATE_VALUE; state <= TP_STATE_GRAD; state++) {
                int64_t rows, cols;
                ops->param_shape(stage, i, &rows, &cols);
                size_t bytes = (size_t)(rows * cols) * sizeof(float);
                float *values = take(bytes), **home = &j->out->state[state][ops->param_index(stage, i)];
                if (ops->export(stage, i, (tp_state)state, values) != TP_OK) { /* a tied wte's at the embedding */
                    MUST(state != TP_STATE_VALUE && ops->param_index(stage, i) == 0 && number == 0);
                    free(values);
                    continue;
                }
                pthread_mutex_lock(&j->lock);
                if (*home == NULL) {
                    *home = values;
                } else {
                    MUST(memcmp(*home, values, bytes) == 0);
                    free(values);
                }
                pthread_mutex_unlock(&j->lock);
            }
}

static tp_status
train(tp_engine *engine, job *j, int rank)
{
    const int32_t *tokens = j->tokens + rank / j->cut->ranks * (BATCH / j->cut->replicas) * (SEQ + 1);
    for (int step = 0; step < STEPS; step++) {
        tp_step_options mine = options;
        tp_step_result result;
        mine.adamw.step = step + 1;
        mine.stop = rank == j->cut->ranks * j->cut->replicas - 1 && step == 1;
        TP_TRY(tp_engine_step(engine, tokens, &mine, &result));
        MUST(result.stop == (step == 1)); /* one rank asked, all know */
        if (rank == 0) {
            j->out->loss[step] = result.loss;
            j->out->norm[step] = result.grad_norm;
        }
    }
    double loss;
    TP_TRY(tp_engine_evaluate(engine, tokens, &loss));
    if (rank == 0)
        j->out->evaluated = loss;
    return TP_OK;
}

static void *
run_rank(void *argument)
{
    member *self = argument;
    job *j = self->all;
    int rank = self->rank;
    tp_comm *comm = NULL;
    tp_heap *heap;
    tp_engine *engine;
    MUST(tp_heap_open(0, &heap) == TP_OK);
    if (j->region != NULL)
        MUST(tp_comm_open_region(j->region, rank, "thread", 60 * SECONDS, &comm) == TP_OK);
    watched_comm *watched = j->region != NULL && j->arena == ARENA ? watch(comm) : NULL;
    comm = watched != NULL ? &watched->base : comm;
    tp_engine_config config = config_of(j, rank, comm);
    MUST(tp_engine_check(&config) == TP_OK);
    MUST(tp_engine_open(&config, heap, &engine) == TP_OK);
    load(engine, j, rank);
    size_t bytes;
    MUST(tp_engine_bytes(&config, &bytes) == TP_OK && tp_heap_bytes(heap) == bytes);
    uint64_t allocations = tp_heap_allocations(heap);
    if (rank == j->quits) {
        tp_region_abort(j->region, TP_EIO, rank, "the disk of rank 1 is full");
        j->status[rank] = TP_EIO;
    } else {
        j->status[rank] = train(engine, j, rank);
        snprintf(j->message[rank], sizeof j->message[rank], "%s", tp_error_message());
    }
    MUST(tp_heap_allocations(heap) == allocations); /* a step allocates nothing */
    MUST(tp_heap_peak_bytes(heap) == bytes);
    if (j->status[rank] == TP_OK)
        leave(engine, j);
    /* a rank that fails gives up what it has posted while its memory is there, unless it failed outside its engine */
    MUST(watched == NULL || rank == j->quits || (watched->withdrawn > 0) == (j->status[rank] != TP_OK));
    if (watched != NULL && j->cut->ranks > 1 && j->status[rank] == TP_OK) /* each slice waits for the reader of its own rows */
        MUST(watched->lent > 0 && (j->lends == 0 || watched->slices == j->lends));
    tp_engine_close(engine);
    MUST(tp_heap_bytes(heap) == 0);
    if (comm != NULL)
        comm->ops->close(comm);
    tp_heap_close(heap);
    return NULL;
}

/* All ranks of a job, each in a thread of its own. */
static void
run_job(job *j)
{
    int ranks = j->cut->ranks * j->cut->replicas;
    uint8_t pairs[MOST_RANKS * MOST_RANKS] = {0};
    void *memory = NULL;
    size_t bytes = 0;
    if (ranks > 1) {
        for (int a = 0; a < ranks; a++)
            for (int b = 0; b < ranks; b++)
                pairs[a * ranks + b] = a != b;
        size_t gather = ((size_t)tp_model_params(&j->model) + 2) * sizeof(double);
        size_t arenas[MOST_RANKS];
        for (int rank = 0; rank < ranks; rank++) {
            tp_engine_config config = config_of(j, rank, NULL);
            size_t needed = 4096;
            MUST(j->cut->ranks == 1 || tp_engine_lent_bytes(&config, &needed) == TP_OK);
            MUST(needed > 0 && needed % 64 == 0);
            arenas[rank] = j->arena == ARENA ? needed : j->arena == NO_ARENA ? 0 : needed > 4096 ? needed - 4096 : 0;
        }
        tp_region_shape shape = {ranks, pairs, 4096, gather, arenas};
        MUST(tp_region_bytes(&shape, &bytes) == TP_OK);
        MUST(tp_local_create(bytes, &memory) == TP_OK);
        MUST(tp_region_create(memory, bytes, &shape, &j->region) == TP_OK);
    }
    pthread_t threads[MOST_RANKS];
    member members[MOST_RANKS];
    for (int rank = 0; rank < ranks; rank++) {
        members[rank] = (member){j, rank};
        MUST(pthread_create(&threads[rank], NULL, run_rank, &members[rank]) == 0);
    }
    for (int rank = 0; rank < ranks; rank++)
        MUST(pthread_join(threads[rank], NULL) == 0);
    if (memory != NULL)
        tp_shm_detach(memory, bytes);
    j->region = NULL;
}

static void
drop(outcome *out)
{
    for (int state = 0; state < 4; state++)
        for (int i = 0; i < 64; i++)
            free(out->state[state][i]);
}

static void
same(const tp_model *model, const outcome *mine, const outcome *theirs, const char *name)
{
    int equal = memcmp(mine->loss, theirs->loss, sizeof mine->loss) == 0 &&
                memcmp(mine->norm, theirs->norm, sizeof mine->norm) == 0 && mine->evaluated == theirs->evaluated;
    if (!equal)
        fprintf(stderr, "%s: loss %.17g, %.17g; norm %.17g, %.17g\n", name, mine->loss[0], mine->loss[1], mine->norm[0],
                mine->norm[1]);
    MUST(equal);
    for (int i = 0; i < tp_model_params(model); i++) {
        tp_param param;
        tp_model_param(model, i, &param);
        for (int state = 0; state < 4; state++) {
            MUST(mine->state[state][i] != NULL);
            equal = memcmp(mine->state[state][i], theirs->state[state][i],
                           (size_t)(param.rows * param.cols) * sizeof(float)) == 0;
            if (!equal)
                fprintf(stderr, "%s: state %d of %s differs\n", name, state, param.name);
            MUST(equal);
        }
    }
}

#endif
