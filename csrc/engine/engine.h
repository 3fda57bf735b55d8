/* One rank's executor: runs a program over its stages and a communicator. Allocates nothing in a step. */
#ifndef TP_ENGINE_ENGINE_H
#define TP_ENGINE_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/comm/comm.h"
#include "csrc/sched/sched.h"
#include "csrc/stage/stage_ops.h"

typedef struct tp_engine tp_engine;

/* What the sizes of a program's engines depend on, counted once. */
typedef struct {
    tp_stage_counts *stage; /* [stages] */
    int32_t *copies;        /* [ranks] swaps beside the work */
    int32_t *guests;        /* [ranks] 1: it sends guests or keeps some */
} tp_engine_counts;

typedef struct {
    const tp_program *program; /* lowered and checked; borrowed */
    const tp_engine_counts *counts; /* of the program, borrowed, for callers that ask for many sizes; NULL: counted when asked */
    int rank;                  /* of the program */
    /* Data parallelism: so many copies of the program's ranks train together, each on its own sequences (the slicing is of one
     * of them), and add their gradients before the update. 0: one. This rank is in copy `replica`, 0 to replicas - 1; the
     * communicator is of all, copy after copy. */
    int replicas, replica;
    int shards;      /* 1: each of the replicas has AdamW's moments of a part of each block, and updates that alone; of one: 0 */
    int sums_beside; /* 1: a thread beside the rank's, which wants a core, adds them up while it goes on, where that can be (summer.c) */
    tp_model model;
    /* Of a program with two copies of the model (sched.h) slicing and partition are of one of them: the copies are replicas too,
     * of sequences [copy * batch, (copy + 1) * batch), whose gradients are added as if each had ranks of its own. */
    const tp_slicing *slicing; /* borrowed */
    const int32_t *partition;  /* [stages + 1] block boundaries; stage v has blocks [partition[v], partition[v + 1]) */
    const uint8_t *saves;      /* [blocks] of tp_saves, borrowed; NULL: all keep everything */
    const char *store;         /* tp_stage_config.store; borrowed until open returns */
    const tp_provider *provider; /* borrowed: tp_cpu_provider(), or a module's */
    tp_device_config device;
    tp_comm *comm;     /* borrowed; NULL where one rank is all; of the device's memory or the host's (staged.c) */
    int staged;        /* 1: messages go through the host's memory even where they need not */
    tp_region *region; /* borrowed; progress and abort; NULL: none */
} tp_engine_config;

typedef struct {
    int32_t position;         /* in the rank's program */
    int32_t step;             /* from 0 */
    int64_t start_ns, end_ns; /* monotonic clock; the wait for a message is not in it */
    int64_t wait_ns;          /* before start: for the message that the instruction reads, or who reads what it writes over; OPT:
                                 within, for all ranks */
} tp_event;

typedef struct {
    double loss;      /* mean over the batch of all replicas; the same on every rank */
    double grad_norm; /* before clipping; of updates by micro-batches (U) the root of their mean square; 0 in evaluation */
    int stop;         /* some rank asked to stop after this step */
    int64_t begin_ns, end_ns;
} tp_step_result;

typedef struct {
    tp_adamw adamw;   /* adamw.step counts from 1 */
    double grad_clip; /* 0: none */
    int update;       /* 0: leave gradients complete and parameters alone */
    int stop;         /* this rank asks to stop after the step */
} tp_step_options;

/* Mark in the slicing the micro-batches whose forward the program does in halves; before the slicing goes into a config.
 * EVALUE as tp_slicing_halve. */
TP_MUST_USE tp_status
tp_engine_halve(const tp_program *program, tp_slicing *slicing);
/* The caller closes them. EMEMORY. */
TP_MUST_USE tp_status
tp_engine_count(const tp_program *program, tp_engine_counts *counts);
void
tp_engine_counts_close(tp_engine_counts *counts);
/* EVALUE, ESCHEDULE: model, program, partition, slicing and saves that do not fit together; comm is not looked at. */
TP_MUST_USE tp_status
tp_engine_check(const tp_engine_config *config);
/* Bytes of the device that a rank's engine takes from its heap: what tp_engine_open will take, exactly. The config has been
 * checked. EMEMORY: of the host's, for tables that are gone on return. */
TP_MUST_USE tp_status
tp_engine_bytes(const tp_engine_config *config, size_t *bytes);
/* Of these, what the rank's messages leave from: where the communicator's arena (tp_comm_ops.arena) has as much, they lie there and go
 * by one copy. 0: one rank, or the provider does not place them. EMEMORY. */
TP_MUST_USE tp_status
tp_engine_lent_bytes(const tp_engine_config *config, size_t *bytes);
/* What the rank takes outside the device's memory for what it swaps: of a disk (CPU), or page-locked of the host (CUDA). EMEMORY. */
TP_MUST_USE tp_status
tp_engine_store_bytes(const tp_engine_config *config, size_t *bytes);
/* *bytes that a micro-batch of `batch` sequences of seq_len tokens on a stage of blocks [first, end) takes in another rank's memory;
 * of the config its model, provider, device and saves are read. EVALUE: the provider keeps no guests, no such blocks. EMEMORY. */
TP_MUST_USE tp_status
tp_engine_size_guest(const tp_engine_config *config, int first, int end, int32_t batch, int32_t seq_len, int64_t *bytes);
/* Of the partitions with at most `limit` bytes on each rank, one whose longest stage is shortest: boundary [stages + 1].
 * seconds: [blocks] whole numbers, so that sums are exact. *found 0: none was found; boundary is then undefined.
 * Exact where each rank has one stage and keeps no guests. Otherwise a descent: blocks move between stages while that lowers the
 * fullest rank's bytes, then while it shortens the step, so that a shorter partition may exist. But if any partition fits it finds
 * one where no rank has more than two stages, in pairs (pairs.c), or there are few partitions (exact.c).
 * by_pairs: of such pairs the partition whose slowest rank (its stages, and what the longest of them adds to the step) is fastest,
 * if the evenest stages do not lead to one as fast; *found 0 otherwise.
 * The config's partition is not read; a program that depends on it (R) is taken as it is.
 * EVALUE: as tp_engine_check; seconds that are negative, no whole numbers or sum to more than 2^53; fewer blocks than stages.
 * EMEMORY. */
TP_MUST_USE tp_status
tp_engine_cut(const tp_engine_config *config, int64_t limit, const double *seconds, int by_pairs, int32_t *boundary, int *found);
/* A partition within the least limit in (low, high] bytes a rank that has one, found by bisection until the limit is known to the
 * fraction `close`, or a few bytes; *found 0: none was found. Where ranks have several stages the answer may need less than `low`,
 * and the limit is the least only as far as tp_engine_cut misses no partition. All else as there. */
TP_MUST_USE tp_status
tp_engine_cut_least(const tp_engine_config *config, int64_t low, int64_t high, double close, int32_t *boundary, int *found);
/* ---- least.c: of a program that is not there yet ---- */
typedef struct {
    tp_model model;
    const tp_provider *provider; /* borrowed, as all below */
    tp_device_config device;
    const tp_slicing *slicing;   /* of one copy of one replica */
    int32_t unit, batch;         /* unit > 0: slices are open, in units of so many tokens, of `batch` sequences: of the slicing no more
                                    than its largest micro-batch and length count */
    int ranks, stages;           /* of one copy; as many on each rank */
    int replicas, copies;
    int shards;                  /* as tp_engine_config's */
    const int32_t *rank_of;      /* [stages] of the first copy */
    const int32_t *slots;        /* [stages] of activations, at least */
    int apart;                   /* 1: its backwards are I and W, never B */
    const uint8_t *saves;        /* [blocks] of tp_saves; NULL: all keep everything, or may do as they like: */
    const uint8_t *all_saved;    /* [blocks] TP_REMAKES where a block may keep its input alone; NULL: none may */
    const int32_t *partition;    /* [stages + 1] boundaries; NULL: open */
} tp_engine_least_asked;
/* *bytes of the fullest rank, no more than tp_engine_bytes says of any program and partition (and slicing, where that is open) that
 * are so; 0 where to know more would take long. EVALUE: what does not fit together. EMEMORY. */
TP_MUST_USE tp_status
tp_engine_least(const tp_engine_least_asked *asked, int64_t *bytes);
/* EVALUE: program, partition and slicing that do not fit together; replicas of a provider that has none. EMEMORY. What the
 * device says of itself. heap is borrowed: the account of the device's memory. */
TP_MUST_USE tp_status
tp_engine_open(const tp_engine_config *config, tp_heap *heap, tp_engine **out);
void
tp_engine_close(tp_engine *engine);
/* Before that, where the communicator is still open: it gives back what it has of the device. */
void
tp_engine_unbind(tp_engine *engine);
int
tp_engine_is_bound(const tp_engine *engine);
/* EABORTED once the region is aborted, in its words. A call of this room that is told to stop (csrc/base/deadline.h) meanwhile ends
 * as soon, with EABORTED; the stages are good for nothing then. */
TP_MUST_USE tp_status
tp_engine_check_abort(const tp_engine *engine);

/* The i-th stage of this rank, by ascending virtual number; NULL past the last. Its functions are the provider's: */
tp_stage *
tp_engine_stage(tp_engine *engine, int i, int *virtual_stage);
const tp_stage_ops *
tp_engine_stage_ops(const tp_engine *engine);

/* Run the program once on tokens [copies * batch, seq_len + 1]. ERUNTIME: the gradient norm is not finite (parameters are left as
 * they were). After a failure of its own the rank has told the region; EABORTED: another rank failed first. */
TP_MUST_USE tp_status
tp_engine_step(tp_engine *engine, const int32_t *tokens, const tp_step_options *options, tp_step_result *result);
/* Where replicas share the moments (config.shards): all of M or V of this rank's stages into the places of their gradients, whence
 * TP_STATE_GRAD exports them. All ranks call it between two steps. EVALUE: they are not shared; what a message failed with. */
TP_MUST_USE tp_status
tp_engine_gather_moments(tp_engine *engine, tp_state state);
/* Forwards only: the mean loss, the same on every rank. */
TP_MUST_USE tp_status
tp_engine_evaluate(tp_engine *engine, const int32_t *tokens, double *loss);
/* Events of the last step, one per instruction: [instructions of the rank]. */
const tp_event *
tp_engine_events(const tp_engine *engine, int64_t *count);
/* For each of them times by the host's clock alone: wait_ns when the host came to the instruction, 0 where that waits for nothing
 * (OPT: always); start_ns and end_ns when it began and ended to give it to the device, of a graph with all that it launches. Swaps
 * beside the work have none. Kept from the first call on, which takes the room for it: not within a step. EMEMORY. */
TP_MUST_USE tp_status
tp_engine_given(tp_engine *engine, const tp_event **events, int64_t *count);
/* What was done otherwise than by default so far, and why: of messages (i 0), of the device (1); "": nothing. */
const char *
tp_engine_caveat(const tp_engine *engine, int i);

/* ---- the same engine with kernels replaced by timed waits: any cluster on one machine -------------------------------- */

/* durations as tp_program_simulate reads them (borrowed). Messages carry the time at which they were ready; the receiver
 * takes them comm_s later. Use tp_engine_step with tokens NULL. */
TP_MUST_USE tp_status
tp_engine_open_emulated(const tp_program *program, int rank, const tp_durations *durations, tp_comm *comm,
                        tp_region *region, tp_heap *heap, tp_engine **out);

#endif
