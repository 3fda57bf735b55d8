/* What the engine asks of a stage and of the device that a rank computes on: the one seam between it and the CPU's stage
 * (csrc/stage), a GPU's (cuda/) or another's.
 *
 * Calls may enqueue: data that a call reads or writes on the device is in the order of the calls of one device. What comes
 * back to the host (tp_stage_ops.loss and .sumsq, export, the times of mark after collect) is complete when the call
 * returns. Pointers that `end` and `tied` give are the device's: the engine hands them to the device's copy and to the
 * communicator alone. A step allocates nothing. */
#ifndef TP_STAGE_STAGE_OPS_H
#define TP_STAGE_STAGE_OPS_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/backend/dtype.h"
#include "csrc/base/mem.h"
#include "csrc/base/status.h"
#include "csrc/model/model.h"

typedef struct tp_stage tp_stage; /* each provider has its own */

/* What an attention or FFN block does with what its forward computes besides its output, until its backward reads that. */
typedef enum {
    TP_KEEPS,
    TP_REMAKES, /* drops it and computes it again (R): recomputation */
    TP_SWAPS    /* copies it out of the device's memory (SO) and back in (SI) */
} tp_saves;

enum { TP_ROOM_BETWEEN_MICROS = 1, TP_ROOM_BETWEEN_SLICES }; /* tp_stage_config.one_room */

typedef struct {
    tp_model model;
    const tp_slicing *slicing;    /* borrowed for the stage's life */
    int first_block, last_block;  /* [first, last) */
    int activation_slots, gradient_slots;
    const uint8_t *saves;         /* [blocks of the model] of tp_saves, borrowed; NULL: all keep everything */
    int keep_keys;                /* 1: R of a slice comes before its own backward, not all R of a micro-batch before its first, so that
                                     attentions which are remade keep keys and values (and queries: tp_stage_ops.keeps_keys). Only
                                     where the provider keeps_keys */
    int remake_slices;            /* 1: R or SI of a slice comes only when I and W have read what that of the last one brought, so
                                     that the buffers have room for one slice (and the rows that W puts by). Only where the provider
                                     remakes_slices, no attention is swapped, or remade but with keep_keys, and no micro-batch has
                                     several sequences and several slices */
    int slice_gradients;          /* 1: the same of I, so that the gradients between two blocks have such room. Only where remake_slices
                                     may be, or the stage keeps everything */
    int by_block;                 /* 1: every backward is of a whole micro-batch, by `backward` alone, both gradients of a block before
                                     the next one's: blocks share the room of theirs. Only where the provider has `backward` */
    int remake_within;            /* 1, with by_block: R are within B (TP_WITHIN of csrc/sched/sched.h), by recompute_block and
                                     backward_block: the stage's blocks share room for what one of them makes again, and makes
                                     forward. Only where the provider has backward_block */
    int one_room;                 /* not 0: what forward made is swapped out before anything is swapped in, and what was swapped in
                                     has been read before the next forward, of the whole micro-batch, or else with remake_slices
                                     of that slice, so that what W puts by is still there: one buffer serves both */
    int two_places;               /* 1: what forward makes and SO copies out has two buffers: of even and of odd activation slots */
    int versions;                 /* of the values, at most at once, where U makes them (csrc/sched/sched.h); 0: no U, and gradients
                                     are summed over all micro-batches */
    int replicas;                 /* each with a batch like this one: the gradient is of the mean over all; 0: 1 */
    int shards;                   /* 1: AdamW's moments are sharded over the replicas: this stage, of replica `member`, has and updates
                                     those of its shards alone (tp_stage_ops.shard). Only where the provider has `shard` */
    int member;
    const char *store;            /* folder on a disk for what is swapped, where it does not go to the host's memory; borrowed
                                     until open returns */
    void *lent;                   /* memory of tp_stage_bytes.lent for the buffers that messages leave from, borrowed for the
                                     stage's life and counted as its own; NULL: it allocates them itself */
} tp_stage_config;

typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    int64_t step; /* 1-based: bias correction */
} tp_adamw;

/* What gradients of this norm are multiplied by; grad_clip 0: any norm is right. PyTorch's clip_grad_norm_, whose 1e-6 tells from
 * a little below grad_clip on, and is most of what a norm as small is divided by. */
static inline double
tp_adamw_clip(double grad_clip, double norm)
{
    return grad_clip > 0 && grad_clip < norm + 1e-6 ? grad_clip / (norm + 1e-6) : 1;
}

typedef enum { TP_STATE_VALUE, TP_STATE_M, TP_STATE_V, TP_STATE_GRAD } tp_state;
/* What one of the replicas that share a stage's moments has of a row of them, in floats of the stage's gradients
 * (tp_stage_ops.gradients). */
typedef struct {
    int block;             /* the first one of the row, which goes back last of them; -1: a tied weight before all blocks */
    int64_t row, row_end;  /* the whole row: of some blocks of the stage, an embedding or a head always alone */
    int64_t first, floats; /* of these the member's; cut where sums of squares may be */
} tp_shard;
/* Of which sequences: all, or those of one half, where the slicing has halves (tp_slicing_halve); the first half first. */
typedef enum { TP_WHOLE, TP_FIRST_HALF, TP_SECOND_HALF } tp_half;
typedef enum { TP_END_INPUT, TP_END_OUTPUT, TP_END_OUTPUT_GRADIENT, TP_END_INPUT_GRADIENT } tp_end;

/* ---- the device ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *isa; /* CPU: tp_cpu_ops; NULL: the best */
    int threads;     /* CPU: of the rank */
    int device;      /* GPU: number among the visible ones */
    tp_dtype dtype;  /* CPU: TP_F32 */
    int eager;       /* GPU: 1: never capture a graph */
    int reproducible; /* GPU: 1: products give a row the same bits however many rows there are */
    int candidates;  /* GPU: algorithms timed for each product before the first step; 0: none are */
    const void *partition; /* GPU: a part of it (tp_cuda_partition); NULL: all */
} tp_device_config;

typedef struct tp_device_ops tp_device_ops;
/* Every device begins with this. */
typedef struct {
    const tp_device_ops *ops;
    tp_heap *heap; /* borrowed: the account of the device's memory */
} tp_device;

struct tp_device_ops {
    /* Open the rank's device; its memory, from now until close, is counted by `heap`. ERUNTIME, EVALUE: it is not there or
     * cannot do what the config says. */
    tp_status (*open)(const tp_device_config *config, tp_heap *heap, tp_device **out);
    /* Returns when the device has ended all it was given. Stages are closed before. */
    void (*close)(tp_device *device);
    /* Bytes that all stages of a rank share: the largest of what each needs; and take them from the heap. */
    size_t (*workspace_bytes)(const tp_stage_config *stage, const tp_device_config *config);
    tp_status (*reserve)(tp_device *device, size_t bytes);
    /* A step, or an evaluation, begins. */
    tp_status (*begin)(tp_device *device);
    /* Between two stages of one rank. */
    tp_status (*copy)(tp_device *device, void *to, const void *from, size_t bytes);
    /* to[i] += from[i], i < floats: how replicas add up gradients. NULL: the device has no replicas. */
    tp_status (*add)(tp_device *device, float *to, const float *from, int64_t floats);
    /* Floats of gradients in one message between two replicas, at most (long enough that latency does not matter, short enough to
     * need little room), and in all messages that wait to be added at once. 0 where add is NULL. */
    int64_t message_floats, waiting_floats;
    /* Returns when the device has done all it was given. NULL where add is. */
    tp_status (*settle)(tp_device *device);
    /* Between the host's memory and the device's; done on return. */
    tp_status (*read)(tp_device *device, void *host, const void *from, size_t bytes);
    tp_status (*write)(tp_device *device, void *to, const void *host, size_t bytes);
    /* *at: when the device comes to this point, nanoseconds of the host's monotonic clock; written at the latest by
     * collect, until which it must stay where it is. */
    tp_status (*mark)(tp_device *device, int64_t *at);
    /* Swaps beside the work. Calls between aside_begin and aside_end (marks too) are one copy: it runs after all earlier calls and
     * after earlier copies, and of later calls only those after aside_wait(number) wait for it. number: of the copy, from 0 in each
     * step. aside_end follows aside_begin whatever happens between. NULL: a thread of the host makes the copies, where it can read
     * and write the memory (tp_provider.host_memory). */
    tp_status (*aside_begin)(tp_device *device, int64_t number);
    tp_status (*aside_end)(tp_device *device, int64_t number);
    tp_status (*aside_wait)(tp_device *device, int64_t number);
    /* Wait for all that was given; then every mark is there. ERUNTIME: the device failed meanwhile. */
    tp_status (*collect)(tp_device *device);
    /* For CUDA graphs. A stretch of instructions without message or update makes the same calls, with the same arguments, in every
     * training step. Call stretch_begin before it; `position` identifies the stretch. *replayed 1: the device does all of it by
     * itself, marks included: make no calls. 0: make them, then call stretch_end with their status, even a failure; if it sets
     * *again 1, nothing was done: make the calls once more, without another stretch_end. NULL where a device has no graphs. */
    tp_status (*stretch_begin)(tp_device *device, int64_t position, int *replayed);
    tp_status (*stretch_end)(tp_device *device, int64_t position, tp_status done, int *again);
    /* What is done otherwise than by default, mostly slower, and why, for readers of a report; "": nothing. Valid until close.
     * NULL: nothing ever is. */
    const char *(*caveat)(const tp_device *device);
};

/* ---- a stage ------------------------------------------------------------------------------------------------------------- */

/* A tied wte whose ends are on two stages: what an end gives the other, or where it takes the other's. */
typedef struct {
    void *out, *in; /* NULL: nothing; both: not such a stage */
    size_t out_bytes, in_bytes;
} tp_tied;

typedef struct {
    size_t memory; /* that open takes from the device's heap, workspace not counted; a multiple of TP_ALIGN */
    size_t lent;   /* of these, of its outputs and input gradients, from which messages leave: tp_stage_config.lent is such memory, that
                      their readers may map. 0: this provider does not place them */
    size_t store;  /* that open takes outside the device's memory for what is swapped; 0 also: this provider does not swap */
    size_t guest;  /* of a guest of it (tp_stage_ops.guest) on any rank, a multiple of TP_ALIGN; 0: this provider keeps none */
} tp_stage_bytes;

typedef struct {
    /* What a stage takes, before it is opened. EVALUE: blocks out of range. EMEMORY: of the host's, for its tables. */
    tp_status (*bytes)(const tp_stage_config *config, const tp_device_config *device, tp_stage_bytes *out);
    /* EVALUE: blocks out of range. EMEMORY. The device must outlive the stage. */
    tp_status (*open)(const tp_stage_config *config, tp_device *device, tp_stage **out);
    void (*close)(tp_stage *stage); /* NULL is allowed */

    int (*params)(const tp_stage *stage);
    /* Canonical index (tp_model_param) of the stage's i-th tensor. A tied wte is on the first and on the last stage. */
    int (*param_index)(const tp_stage *stage, int i);
    /* Its logical shape; 1 for a matrix, 0 for a vector (rows 1). */
    int (*param_shape)(const tp_stage *stage, int i, int64_t *rows, int64_t *cols);
    /* EVALUE: a state of a tensor that another stage answers for; export of moments that are sharded. An import of these takes the
     * shards, and the gradient's place. */
    tp_status (*import)(tp_stage *stage, int i, tp_state state, const float *row_major);
    tp_status (*export)(const tp_stage *stage, int i, tp_state state, float *row_major);
    /* After imports of values and before the first forward. */
    tp_status (*pack)(tp_stage *stage);

    /* tokens [batch, seq_len + 1] of the whole batch: inputs and targets. Every stage must be told. train 0: forwards compute
     * the loss of all rows, backward is not allowed. */
    tp_status (*begin)(tp_stage *stage, const int32_t *tokens, int train);
    tp_status (*forward)(tp_stage *stage, int micro, int slice, tp_half half, int slot);
    tp_status (*input_gradient)(tp_stage *stage, int micro, int slice, int slot, int gradient_slot);
    tp_status (*weight_gradient)(tp_stage *stage, int micro, int slice, int slot, int gradient_slot);
    /* B: both, with the same bits in less room where config.by_block. NULL: this provider does one after the other, and does not
     * know that. */
    tp_status (*backward)(tp_stage *stage, int micro, int slice, int slot, int gradient_slot);
    /* Make again what the blocks that remake did not keep, into the gradient slot; the same bits as in forward. Before
     * the slice's input_gradient; where an attention is made again, but with keep_keys, before the first one of the micro-batch,
     * slices ascending.
     * NULL: this provider keeps everything. */
    tp_status (*recompute)(tp_stage *stage, int micro, int slice, int slot, int gradient_slot);
    /* With config.remake_within, in the place of R and B, of each block of the stage, from the last: make it again, if it remakes, and
     * then both its gradients. block: of the stage, from 0. NULL: this provider does not. */
    tp_status (*recompute_block)(tp_stage *stage, int micro, int slot, int gradient_slot, int block);
    tp_status (*backward_block)(tp_stage *stage, int micro, int slot, int gradient_slot, int block);
    int remakes_slices; /* 1: it knows config.remake_slices; 2: where it is with config.slice_gradients alone, and no attention of the
                           model swaps */
    int keeps_keys;     /* not 0: and config.keep_keys: columns of n_embd that are kept, 2 of keys and values, 3 with queries */
    /* What the blocks that swap computed of a slice: out of the device's memory, after its forward and before the next forward of
     * the stage; back in, into the gradient slot, when recompute would be called. NULL: this provider does not. */
    tp_status (*swap_out)(tp_stage *stage, int micro, int slice, int slot);
    tp_status (*swap_in)(tp_stage *stage, int micro, int slice, int slot, int gradient_slot);
    /* All that a slot keeps from a micro-batch's forward to its backward, in one piece, which another rank may keep meanwhile: no input
     * of a message that is still to be sent is in it. NULL: this provider keeps no guests. */
    void *(*guest)(tp_stage *stage, int slot, size_t *bytes);
    /* Where messages land and leave: that slice's rows (of one half: those sequences'). NULL: no such end. */
    void *(*end)(tp_stage *stage, tp_end end, int micro, int slice, tp_half half, int slot, size_t *bytes);

    /* After every backward: what the embedding's stage of a tied weight gives the head's, who alone has its gradient and moments; on
     * all other stages nothing. And after the update the new values, the other way. */
    tp_status (*tied)(tp_stage *stage, tp_tied *out);
    tp_status (*tied_values)(tp_stage *stage, tp_tied *out);
    /* After the exchange: every gradient is complete. */
    tp_status (*finish)(tp_stage *stage);
    /* The gradients of all the stage's tensors, one after another in an array of the device that depends on the stage's config alone
     * (what stands between them means nothing): replicas add them up after finish. NULL: this provider has no replicas. */
    float *(*gradients)(tp_stage *stage, int64_t *floats);
    /* Of these the floats of a block of the stage that is no embedding and no head, and where they begin: complete once the block has
     * gone back last, not to be touched by finish. Of other blocks 0. Blocks' lie in their order. NULL: replicas add up after finish. */
    int64_t (*block_gradients)(const tp_stage *stage, int block, int64_t *first);
    /* Sum of -log p over the batch in canonical order; 0 where the stage has no head. */
    tp_status (*loss)(tp_stage *stage, double *out);
    /* Before sumsq of the first of a rank's stages, of each: what sumsq will read is on its way, so that the device has the work of all.
     * NULL: sumsq does all of it. */
    tp_status (*measure)(tp_stage *stage);
    /* sums[canonical parameter index] = sum of squares of the gradient, for tensors this stage answers for (a tied wte is
     * the head's); others are left alone. After updates by micro-batches: of the gradients of all of them in this step. ERUNTIME: one
     * of these was not finite, where update_micro did not say so. */
    tp_status (*sumsq)(tp_stage *stage, double *sums);
    /* U: AdamW on every tensor by the gradient of this micro-batch alone, clipped to grad_clip (0: not) by the stage's own norm, into
     * the newest version. Where the norm is not finite nothing is updated, by this micro-batch or by later ones of the step: ERUNTIME,
     * at the latest from sumsq. NULL: this provider has one version. Between updates `forward` reads the newest version, and what
     * follows it the same. */
    tp_status (*update_micro)(tp_stage *stage, int micro, const tp_adamw *adamw, double grad_clip);
    /* AdamW on every tensor that the stage answers for, with gradients scaled by grad_scale, then pack. With config.shards on its
     * shards alone, without pack, which is to follow once values are gathered. */
    tp_status (*update)(tp_stage *stage, const tp_adamw *adamw, double grad_scale);

    /* ---- config.shards (ZeRO's first stage: Rajbhandari et al., SC 2020; Megatron-LM's distributed optimizer). NULL: this provider
     * keeps all moments on every replica ---- */
    /* Rows 0 to shard_rows - 1; floats 0: the member has nothing of it. */
    tp_shard (*shard)(const tp_stage *stage, int row, int member);
    int (*shard_rows)(const tp_stage *stage);
    /* The values of the tensors that have gradients: that of gradient i is values[i]. */
    float *(*values)(tp_stage *stage);
    /* Room for the sums of squares of all members' shards, [replicas][*each] of the device: measure leaves this member's row there, and
     * sumsq reads all. */
    double *(*squares)(tp_stage *stage, int64_t *each);
    /* This member's moments into the places of their gradients, which are gone then: whoever gathers these has all moments, by
     * export of TP_STATE_GRAD. TP_STATE_M or TP_STATE_V. */
    tp_status (*spread)(tp_stage *stage, tp_state state);
} tp_stage_ops;

/* ---- a provider: what a module that is loaded brings ------------------------------------------------------------------------ */

/* What _core lends to it: so that an error first seen there is told here. */
typedef struct {
    uint32_t abi, size;
    tp_fail_function fail_at;
} tp_host;

#define TP_PROVIDER_ABI 17u
#define TP_PROVIDER_CAPSULE "terapipe_c.provider"
#define TP_PARTITION_CAPSULE "terapipe_c.partition" /* of tp_device_config.partition */

typedef struct {
    uint32_t abi, size;  /* TP_PROVIDER_ABI, sizeof(tp_provider): checked before anything else is read */
    const char *name;    /* "cpu", "cuda", "cuda_emu" */
    int host_memory;     /* 1: the host may read and write its memory, so that messages may be the host's */
    int counts_tables;   /* 1: the engine's tables are counted in the device's account: it is the host's memory */
    void (*attach)(const tp_host *host); /* once, before any call; NULL: it lives in _core */
    const tp_device_ops *device;
    const tp_stage_ops *stage;
} tp_provider;

/* The CPU's: csrc/stage over csrc/cpu. Engines count their tables in its heap too. */
const tp_provider *
tp_cpu_provider(void);

#endif
