/* One rank's engine without Python: ranks as threads over a region train what one rank alone trains, bit for bit; replicas of
 * them train the same bits whatever their stages; and
 * opening an engine survives the failure of each of its allocations. */
#include "csrc/engine/engine.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/stage/stage_ops.h"

#include "tests/c/watched_comm.h"
#include "tests/c/check.h"

enum { STEPS = 2, BATCH = 3, SEQ = 20, MOST_RANKS = 6, MOST_CUTS = 64 };
enum { TWO = 3, THREE = 5, SLICED = 7 }; /* layouts of so many ranks; of two that cut all sequences alike */
#define SECONDS 1000000000ll

/* How a batch is cut and who runs what. */
typedef struct {
    const char *name;
    tp_schedule schedule;
    int ranks, chunks, threads, split;
    int micros;
    int32_t batches[BATCH], slices[BATCH], lengths[MOST_CUTS];
    int replicas; /* each of `ranks` */
    const char *text; /* the program; NULL: the schedule's */
} layout;

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
};

static const layout replicated[] = {
    {"three replicas of one rank", TP_GPIPE, 1, 1, 1, 0, 1, {1}, {1}, {20}, 3, NULL},
    {"three replicas of one rank of two threads, sliced", TP_GPIPE, 1, 1, 2, 0, 1, {1}, {4}, {3, 8, 1, 8}, 3, NULL},
    {"three replicas of two ranks", TP_SEQ1F1B, 2, 1, 1, 1, 1, {1}, {3}, {9, 1, 10}, 3, NULL},
    {"three replicas of one rank of two chunks", TP_INTERLEAVED, 1, 2, 1, 0, 1, {1}, {2}, {15, 5}, 3, NULL},
};

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
    const int32_t *tokens;
    tp_region *region;
    arena_kind arena; /* what there is for the messages of each rank */
    int poison; /* rank whose first tensor gets a NaN; -1: none */
    int quits;  /* rank that fails before it has trained; -1: none */
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
                              .model = j->model,
                              .slicing = j->slicing,
                              .partition = j->partition,
                              .provider = tp_cpu_provider(),
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
    MUST(tp_heap_bytes(heap) == tp_engine_bytes(&config));
    uint64_t allocations = tp_heap_allocations(heap);
    if (rank == j->quits) {
        tp_region_abort(j->region, TP_EIO, rank, "the disk of rank 1 is full");
        j->status[rank] = TP_EIO;
    } else {
        j->status[rank] = train(engine, j, rank);
        snprintf(j->message[rank], sizeof j->message[rank], "%s", tp_error_message());
    }
    MUST(tp_heap_allocations(heap) == allocations); /* a step allocates nothing */
    MUST(tp_heap_peak_bytes(heap) == tp_engine_bytes(&config));
    if (j->status[rank] == TP_OK)
        leave(engine, j);
    if (watched != NULL && j->cut->ranks > 1 && j->status[rank] == TP_OK) /* each slice waits for the reader of its own rows */
        MUST(watched->lent > 0 && (j->cut != &layouts[SLICED] || watched->slices == 3));
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
            size_t needed = j->cut->ranks > 1 ? tp_engine_lent_bytes(&config) : 4096;
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
    tp_comm nobody = {lends ? &lending : &silent, last, last + 1, 0};
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
    tp_comm nobody = {&lending, 0, cut->ranks, 0};
    tp_engine_config config = config_of(&j, 0, &nobody);
    size_t bytes = tp_engine_bytes(&config);
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
        for (size_t k = 0; k < sizeof layouts / sizeof layouts[0]; k++)
            for (int lends = 0; lends < 2; lends++)
                survives_every_failed_allocation(&models[m], tokens, &layouts[k], lends);
        survives_every_failed_allocation(&models[m], tokens, &replicated[2], 1);
        fits_to_the_byte(&models[m], tokens, &layouts[1]);
        fits_to_the_byte(&models[m], tokens, &layouts[THREE]);
        refuses_parts_that_do_not_fit(&models[m], tokens);
    }
    return 0;
}
