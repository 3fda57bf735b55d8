/* What the files of csrc/engine share: not for other folders. */
#ifndef TP_ENGINE_INTERNAL_H
#define TP_ENGINE_INTERNAL_H

#include "csrc/engine/engine.h"
#include "csrc/sched/links.h"
#include "csrc/sched/sums.h"

/* Behind the per-parameter sums of squares, each rank's contribution to the gather that ends a step. */
enum { TP_GATHER_LOSS, TP_GATHER_STOP, TP_GATHER_EXTRA };

/* Rooms of guests of a stage on this rank, one after another, and the bytes of one. */
typedef struct {
    char *rooms;
    size_t bytes;
} tp_engine_guest;

/* What an instruction that is the first to read loaded activations waits for besides its own message: that `needs` receives from
 * `from` are complete, as tp_engine.needs and .from. */
typedef struct {
    int32_t needs, from; /* from -1: nothing */
} tp_engine_load;

typedef struct tp_engine_copier tp_engine_copier;
typedef struct tp_engine_summer tp_engine_summer;

/* When a B made one of its blocks again. */
typedef struct {
    int64_t begin, end;
} tp_engine_part_ns;

struct tp_engine {
    tp_engine_config config;
    int first; /* rank 0 of this replica, as the communicator and the region count */
    tp_device *device;
    tp_heap *heap;    /* of the tables */
    int bound;        /* config.comm knows the device */
    tp_comm *staged;  /* ours, in the place of config.comm; NULL: that is the caller's */
    tp_heap *private; /* that heap where the device's account is another's; else NULL */
    tp_heap *account; /* of the device's memory */
    float *sums;      /* there: [members - 1][tp_engine_message_floats] of other replicas' gradients */
    tp_stage **stage;     /* [program->stages], NULL where another rank holds it; NULL when emulated */
    const tp_instr *code; /* [count] of this rank */
    int64_t count;
    int32_t *needs;         /* [count] the number of receives from `from` that must be complete before it runs */
    int32_t *forward_needs; /* [count] the same in an evaluation, where only activations are received */
    const int32_t *needed;  /* one of the two */
    uint32_t *slots;        /* [stages, micros] slots of the micro-batches on this rank's stages */
    int16_t *from;          /* [count] peer whose messages it reads, -1: none */
    tp_engine_load *load;   /* [count]; NULL: no guests */
    tp_engine_guest *guest; /* [program->stages]; NULL: no guests */
    void *rooms;            /* of the device: guests' */
    int32_t *received;      /* [ranks] receives completed in this step */
    int lends;              /* messages may leave without a copy: its stages' ends are in the communicator's arena, or it sends
                               guests from the device's memory */
    uint64_t *loan;         /* [count] of a send: what tp_comm_ops.lend gave; 0: nothing is lent */
    int32_t *reuses;        /* [count] if it lends, of what writes over something lent: the last send of that, -1: none */
    int32_t *copied;        /* [count] copies of this step that must be done before it; NULL: none is made beside the work */
    const int32_t *awaited; /* that, or NULL in an evaluation, which swaps nothing */
    int32_t *copies;        /* positions of the copies */
    tp_engine_copier *copier; /* NULL: none is, or it is emulated */
    tp_engine_summer *summer; /* NULL: gradients are summed behind the work, or there is nothing to sum */
    tp_event *events;       /* [count] */
    tp_engine_part_ns *within; /* [R within B, by stage and micro-batch][blocks of the model that remake], of each R the first; NULL:
                                  it has none */
    int64_t *within_begins;    /* [program->stages] where a stage's begin there */
    tp_event *given;        /* [count] of tp_engine_given; NULL: not kept */
    double *gather;         /* [all ranks + 1][gather_count] of the all-gather that ends a step */
    int64_t gather_count;
    int updates;            /* of each stage by micro-batches (U) in a step; 0: none, but one at its end */
    int64_t step; /* 0-based, as people count them: one less than tp_adamw's */
    /* emulated */
    const tp_durations *durations;
    int64_t *stamps; /* [count] when the message of a receive or send left */
    int64_t copied_ns; /* when all copies are done that were begun */
    tp_sched_links links;
    tp_sched_sums beside;
};

/* Bytes of each table, in the order they are taken; see tp_engine_bytes. */
typedef struct {
    size_t needs, forward_needs, from, received, loan, reuses, events, gather, stages, slots, loads, guests, copied, copies, within,
        within_begins;
} engine_tables;
engine_tables
tp_engine_tables(const tp_engine_config *config, int64_t gather_count);
TP_MUST_USE tp_status
tp_engine_take_tables(tp_engine *engine, const tp_program *program, int rank, int64_t gather_count);
void
tp_engine_drop_tables(tp_engine *engine);

/* Fill needs[] and from[]: which receives, in posting order of each peer, an instruction reads. */
TP_MUST_USE tp_status
tp_engine_match_receives(tp_engine *engine, const tp_program *program);

/* Fill reuses[] once the stages are open, by the memory that each instruction reads or writes. A slice waits for the reader of its
 * own rows alone: if it waited for those of the whole slot, a rank could get no further ahead of the next one. */
TP_MUST_USE tp_status
tp_engine_match_loans(tp_engine *engine);

/* Does instruction i wait for a message, for the reader of one, or for a copy? */
static inline int
tp_engine_waits(const tp_engine *engine, int64_t i)
{
    return engine->from[i] >= 0 || (engine->load != NULL && engine->load[i].from >= 0) ||
           (engine->lends && engine->reuses[i] >= 0) || (engine->copied != NULL && engine->copied[i] > 0);
}

/* ---- counts.c: of config->counts, or counted now ---- */
tp_stage_counts
tp_engine_stage_counts(const tp_engine_config *config, int stage);
/* Of config->rank. */
int
tp_engine_rank_copies(const tp_engine_config *config);
int
tp_engine_rank_has_guests(const tp_engine_config *config);

/* ---- copier.c ---- */
/* An SO or SI beside the work? */
static inline int
tp_engine_is_copy(const tp_instr *instr)
{
    return (instr->op == TP_OP_SO || instr->op == TP_OP_SI) && instr->flags & TP_BESIDE;
}
/* How many of them a rank has. */
int
tp_engine_copies(const tp_program *program, int rank);
/* EVALUE: a provider that makes no copies aside, and whose memory another thread cannot copy. */
TP_MUST_USE tp_status
tp_engine_check_copies(const tp_engine_config *config);
/* Fill copied[] and copies[], where the rank has any. EMEMORY. */
TP_MUST_USE tp_status
tp_engine_match_copies(tp_engine *engine, const tp_program *program);
/* Who makes them, once the stages are there; EMEMORY, ERUNTIME. It is ended before they are closed. */
TP_MUST_USE tp_status
tp_engine_open_copier(tp_engine *engine);
void
tp_engine_close_copier(tp_engine *engine);
/* A step begins. */
TP_MUST_USE tp_status
tp_engine_begin_copies(tp_engine *engine);
/* Instruction i, the next of them; its event's times are the copy's. */
TP_MUST_USE tp_status
tp_engine_begin_copy(tp_engine *engine, int64_t i);
/* Until those that instruction i waits for are done. EABORTED, or what a copy failed with. */
TP_MUST_USE tp_status
tp_engine_wait_copies(tp_engine *engine, int64_t i);

/* ---- within.c ---- */
/* Of the table of when, and of where in it stages begin, for config->rank. */
void
tp_engine_within_bytes(const tp_engine_config *config, size_t *parts, size_t *begins);
/* Fill within_begins. */
void
tp_engine_place_within(tp_engine *engine);
/* EVALUE: a provider that does not make again within B. */
TP_MUST_USE tp_status
tp_engine_check_within(const tp_engine_config *config);
/* The B at i, behind such an R. */
TP_MUST_USE tp_status
tp_engine_go_back_within(tp_engine *engine, int64_t i);
/* Once all marks are there: the events of R and B take turns. */
void
tp_engine_settle_within(tp_engine *engine);

/* ---- guests.c ---- */
/* Does this rank keep activations elsewhere, or another's? */
int
tp_engine_has_guests(const tp_program *program, int rank);
/* EVALUE: a provider that cannot. */
TP_MUST_USE tp_status
tp_engine_check_guests(const tp_engine_config *config);
/* Bytes of the device for all guests that the rank keeps; and take them, after the tables were taken. EMEMORY. */
TP_MUST_USE tp_status
tp_engine_guests_bytes(const tp_engine_config *config, size_t *bytes);
TP_MUST_USE tp_status
tp_engine_take_guests(tp_engine *engine, tp_heap *account);
/* EVALUE: a communicator of the device's memory that does not lend (comm.h), through which a guest would need a copy. */
TP_MUST_USE tp_status
tp_engine_check_guests_way(const tp_engine *engine);
/* Fill reuses[] where a communicator of the device's memory lends guests: who writes next over what an SE sends waits until that
 * has left. What a RE or RL writes over the communicator knows by itself. Sets `lends`. */
void
tp_engine_match_guests(tp_engine *engine);
/* Where the guest of an SE, RE, SL or RL lies, and its bytes. */
void *
tp_engine_guest_end(tp_engine *engine, const tp_instr *instr, size_t *bytes);
/* SE, RE, SL or RL. */
TP_MUST_USE tp_status
tp_engine_guest_message(tp_engine *engine, const tp_instr *instr);
/* open.c's: what the stage is opened with, on whatever rank. */
TP_MUST_USE tp_status
tp_engine_stage_config(const tp_engine_config *config, int stage, tp_stage_config *out);

/* tp_engine_check, but for the partition and what depends on it. */
TP_MUST_USE tp_status
tp_engine_check_shape(const tp_engine_config *config);
/* What tp_engine_bytes adds up besides tp_engine_guests_bytes: beside the rank's stages; of a stage; and what all stages of a rank
 * share, one after another, so that the most of any is what they take. */
size_t
tp_engine_table_bytes(const tp_engine_config *config);
TP_MUST_USE tp_status
tp_engine_stage_bytes(const tp_engine_config *config, int stage, tp_stage_bytes *bytes, size_t *workspace);
/* ---- sizes.c: of a stage by its blocks, remembered ---- */
typedef struct {
    int64_t stage, workspace; /* tp_stage_bytes.memory; tp_device_ops.workspace_bytes, aligned */
    int64_t guests;           /* on its host */
} tp_engine_size;
#define TP_ENGINE_NEVER (INT64_MAX / 4) /* more bytes than anything takes */
/* The lesser of each. */
static inline tp_engine_size
tp_engine_lesser_size(tp_engine_size a, tp_engine_size b)
{
    return (tp_engine_size){a.stage < b.stage ? a.stage : b.stage, a.workspace < b.workspace ? a.workspace : b.workspace,
                            a.guests < b.guests ? a.guests : b.guests};
}
typedef struct {
    tp_engine_config config; /* its partition is `boundary` */
    int32_t *boundary;       /* [parts + 1] around the stage that is asked for */
    int32_t *host;           /* [stages] the rank that keeps guests of it; -1: none does */
    int32_t *rooms;          /* [stages] for how many */
    int32_t *held;           /* the stages that a rank has or keeps guests of, rank after rank, from first_held on */
    int32_t *first_held;     /* [ranks + 1] */
    int64_t *beside;         /* [ranks] tp_engine_table_bytes */
    tp_engine_size *known;   /* by stage, shape (or first block, where layers are not alike) and blocks; 0: not known yet */
    int blocks, parts, alike;
    tp_status failed;        /* of the first size that could not be had, since when all that was counted means nothing */
} tp_engine_sizes;
/* What the config borrows it borrows, too. EMEMORY. */
TP_MUST_USE tp_status
tp_engine_sizes_open(const tp_engine_config *config, tp_engine_sizes *out);
void
tp_engine_sizes_close(tp_engine_sizes *sizes);
/* Searches ask for many: once one cannot be had, none is asked for any more, each new one is more than a stage takes, and
 * sizes->failed says so, which whoever opened them looks at. */
tp_engine_size
tp_engine_size_of(tp_engine_sizes *sizes, int stage, int from, int to);
/* Bytes of a rank by this partition, as tp_engine_bytes counts them. */
int64_t
tp_engine_sizes_of_rank(tp_engine_sizes *sizes, const int32_t *boundary, int rank);
/* bytes [ranks] of all; returns the most of any. */
int64_t
tp_engine_sizes_count(tp_engine_sizes *sizes, const int32_t *boundary, int64_t *bytes);

/* ---- exact.c ---- */
typedef enum { TP_NO, TP_YES, TP_UNKNOWN } tp_answer;
/* Is there a partition within `limit` bytes a rank? TP_YES: boundary [parts + 1] is one; otherwise it says nothing. TP_UNKNOWN: that
 * would be too much work, or time is up. EMEMORY. */
TP_MUST_USE tp_status
tp_engine_find_within(tp_engine_sizes *sizes, int64_t limit, int32_t *boundary, tp_answer *answer);

/* ---- chunks.c: the same, exactly, where layers are alike and every rank has a stage in each of a few rows of them; otherwise
 * TP_UNKNOWN ---- */
/* sums: at most so many are taken of matrices: 8 for each further row. */
TP_MUST_USE tp_status
tp_engine_find_chunks(tp_engine_sizes *sizes, int64_t limit, int64_t sums, int32_t *boundary, tp_answer *answer);

/* ---- pairs.c: the same, exactly, where no rank holds of more than two stages, which come in pairs; otherwise TP_UNKNOWN ---- */
/* About the seconds of a step: the slowest rank's, and of the longest stage what fills the pipeline. */
typedef struct {
    const double *until; /* [blocks + 1] running sums of seconds */
    double waits;        /* stages that fill the pipeline, of a whole step */
} tp_engine_pace;
double
tp_engine_filling(const tp_program *program);
/* pace: NULL, or the partition whose slowest rank, with what its own longest stage adds, is fastest; TP_NO: none is faster than
 * `less` seconds. */
TP_MUST_USE tp_status
tp_engine_find_pairs(tp_engine_sizes *sizes, int64_t limit, const tp_engine_pace *pace, double less, int32_t *boundary,
                     tp_answer *answer);

/* ---- shift.c: boundary [parts + 1] is of stages that are there, and then of better ones ---- */
/* The bytes of the fullest rank, and of those next to it, as few as blocks that go elsewhere make them, or at most `enough`; *most:
 * of that rank. EMEMORY. */
TP_MUST_USE tp_status
tp_engine_shift_least(tp_engine_sizes *sizes, int64_t enough, int32_t *boundary, int64_t *most);
/* *seconds, about those of a step (the slowest rank's, and of the longest stage what fills the pipeline), as few as they make them
 * within `limit` bytes a rank, which it must be in before. until: [blocks + 1] running sums of seconds. EMEMORY. */
TP_MUST_USE tp_status
tp_engine_shift_even(tp_engine_sizes *sizes, int64_t limit, const double *until, int32_t *boundary, double *seconds);

/* EVALUE: blocks that cannot remake or swap, or a provider that cannot. ESCHEDULE: R, SO or SI is missing,
 * late or of a stage that has no such block; micro-batches that go forward through each other on a stage where an attention does
 * not keep its own, or its keys. Partition and slices fit. */
TP_MUST_USE tp_status
tp_engine_check_saving(const tp_engine_config *config);
/* *one: tp_stage_config.remake_slices of a stage of a config that has passed that check. EMEMORY. */
TP_MUST_USE tp_status
tp_engine_remakes_slices(const tp_engine_config *config, int stage, int *one);
/* The same of tp_stage_config.keep_keys: where R are slice by slice. */
int
tp_engine_keeps_keys(const tp_engine_config *config, int stage);
/* The same of slice_gradients: where blocks are remade or swapped slice by slice, on this stage or on others. */
int
tp_engine_slices_gradients(const tp_engine_config *config, int stage);
/* tp_stage_config.by_block of a stage whose program has these counts. */
int
tp_engine_goes_by_block(const tp_engine_config *config, const tp_stage_counts *counts);

/* *one: tp_stage_config.one_room, likewise. */
TP_MUST_USE tp_status
tp_engine_has_one_room(const tp_engine_config *config, int stage, int *one);

/* EVALUE where the communicator is missing, or another rank's, or of another number of ranks. */
TP_MUST_USE tp_status
tp_engine_check_comm(const tp_engine_config *config);

/* Does the program update by micro-batches (U)? */
int
tp_engine_updates(const tp_engine_config *config);

/* ---- copies of the model: stage and micro-batch as one copy counts them ---- */
static inline int
tp_engine_part(const tp_engine_config *config, int stage)
{
    return stage % tp_program_copy_stages(config->program);
}
static inline int
tp_engine_copy(const tp_engine_config *config, int stage)
{
    return stage / tp_program_copy_stages(config->program);
}
static inline int
tp_engine_micro(const tp_engine_config *config, int micro)
{
    return micro % tp_program_copy_micros(config->program);
}

/* ---- replicas.c ---- */
static inline int
tp_engine_replicas(const tp_engine_config *config)
{
    return config->replicas > 1 ? config->replicas : 1;
}
/* All copies of a stage that train together: a replica's own, replica after replica. */
static inline int
tp_engine_members(const tp_engine_config *config)
{
    return tp_engine_replicas(config) * config->program->copies;
}
/* Of these a stage's. */
static inline int
tp_engine_member(const tp_engine_config *config, int stage)
{
    return config->replica * config->program->copies + tp_engine_copy(config, stage);
}
/* Of a message of gradients between two replicas, at most; and bytes of the device where those that came wait to be added. */
int64_t
tp_engine_message_floats(const tp_engine_config *config);
size_t
tp_engine_sums_bytes(const tp_engine_config *config);
/* EVALUE: a provider, or a program, whose moments are not sharded. */
TP_MUST_USE tp_status
tp_engine_check_shards(const tp_engine_config *config);
/* EVALUE: a replica that is out of range, or a provider without replicas. */
TP_MUST_USE tp_status
tp_engine_check_replicas(const tp_engine_config *config);
/* Once this rank's gradients are complete: those of the same stages in all replicas (and their copies), added in ascending order
 * of replicas, so that every replica goes on with the same bits, whatever its program. *waited_ns: until those that it sums with had
 * come to here, and of the sums: no work of this rank's (the simulator's "comm"). */
TP_MUST_USE tp_status
tp_engine_sum_replicas(tp_engine *engine, int64_t *waited_ns);

/* Of a stage's gradients `count` floats from `from` on, by this communicator and device. */
TP_MUST_USE tp_status
tp_engine_sum_some(tp_engine *engine, tp_comm *comm, tp_device *device, int stage, int64_t from, int64_t count);

/* Where moments are sharded (config.shards): what each member has alone, to all. Gradients once they are summed, which otherwise are
 * whole; values after the update, before pack; leaves of sums of squares, once measured. *waited_ns: more by what that takes, no work of
 * this rank's. Elsewhere nothing. */
typedef enum { TP_GATHER_GRADIENTS, TP_GATHER_VALUES, TP_GATHER_SQUARES } tp_engine_gathered;
TP_MUST_USE tp_status
tp_engine_gather(tp_engine *engine, tp_engine_gathered what, int64_t *waited_ns);

/* ---- summer.c: sums of gradients beside the work ---- */
TP_MUST_USE tp_status
tp_engine_open_summer(tp_engine *engine);
void
tp_engine_close_summer(tp_engine *engine);
TP_MUST_USE tp_status
tp_engine_begin_sums(tp_engine *engine);
/* Is instruction i a B that goes back block by block, so that sums of some begin while others go back? */
int
tp_engine_sums_within(const tp_engine *engine, int64_t i);
/* That B. */
TP_MUST_USE tp_status
tp_engine_go_back_summing(tp_engine *engine, int64_t i);
/* Instruction i is done, or of a B that goes back block by block the blocks of the stage from `block` on are. */
void
tp_engine_went_back(tp_engine *engine, int64_t i, int block);
/* All gradients are complete: returns when all are summed. */
TP_MUST_USE tp_status
tp_engine_end_sums(tp_engine *engine);
/* Of a step that failed: returns when nothing goes on any more. */
void
tp_engine_halt_sums(tp_engine *engine);

/* A communicator that takes the device's messages through the host's memory and `inner`; ended by its close. */
TP_MUST_USE tp_status
tp_engine_stage_comm(tp_comm *inner, tp_device *device, tp_comm **out);

/* Room for the receives that the program posts from one rank at once, after the tables were taken. EVALUE: more than the
 * communicator takes. EMEMORY. */
TP_MUST_USE tp_status
tp_engine_reserve_posted(const tp_engine *engine);

/* Wait until instruction i may run: what it reads has come, and what it overwrites has been read. */
TP_MUST_USE tp_status
tp_engine_wait_inputs(tp_engine *engine, int64_t i);
/* Where the message of an SF, RF, SB or RB lies, and its bytes. */
void *
tp_engine_message_end(tp_engine *engine, const tp_instr *instr, size_t *bytes);
/* Run RF, RB, RE, RL (post), SF, SB, SE, SL (send). data, bytes: where the message lies. */
TP_MUST_USE tp_status
tp_engine_message(tp_engine *engine, const tp_instr *instr, void *data, size_t bytes);

TP_MUST_USE tp_status
tp_engine_run_emulated(tp_engine *engine, tp_step_result *result);

/* Tell the region that this rank failed first; returns status. */
tp_status
tp_engine_fail(tp_engine *engine, tp_status status);
/* Before an instruction: note it as this rank's progress. EABORTED once the region is: a rank that waits for nobody would
 * not hear of it otherwise. */
TP_MUST_USE tp_status
tp_engine_note(tp_engine *engine, const tp_instr *instr);
/* Of what ended with `status`: where the thread was told to stop (csrc/base/deadline.h), EABORTED in the words of the region's abort
 * if there is one. */
TP_MUST_USE tp_status
tp_engine_check_told(const tp_engine *engine, tp_status status);

#endif
