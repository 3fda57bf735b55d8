/* What a stage is, whatever computes it: its blocks, their parameters, where a slice's rows are, in which order memory is
 * carved. A provider's stage (csrc/stage over csrc/cpu, cuda/) begins with a tp_stage_base, gives each tensor its size and
 * its own activations and gradients, and does the work. R = rows of a micro-batch at most = seq_len * max_batch. */
#ifndef TP_STAGE_DESCRIBE_H
#define TP_STAGE_DESCRIBE_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/backend/backend.h"
#include "csrc/model/waits.h"
#include "csrc/stage/stage_ops.h"

/* Buffers of one micro-batch in flight, of one block: each provider has its own. */
typedef struct tp_activations tp_activations;
typedef struct tp_gradients tp_gradients;

/* What an attention or FFN block computes between its input and its second product: elements of the provider. It lasts until the
 * weight gradient; of a block that remakes or swaps until the next forward, and then from R or SI on. NULL where the kind has
 * none. */
typedef struct {
    void *norm;    /* [R, E] the normalised input, where the provider keeps it */
    void *qkv, *o; /* attention: [R, 3E], [R, E] */
    void *kv;      /* attention, of `made` where tp_stage_keeps_keys: [R, 2E] a copy of keys and values, which lasts with the slot; NULL
                      where the provider keeps_queries: qkv itself does, and nothing that is remade has it */
    void *h, *g;   /* ffn: [R, 4E] before and after GELU */
} tp_inner;

typedef struct {
    tp_param info;
    int index;           /* canonical */
    int64_t floats;      /* of value and of each state, as the provider lays them out, padding included */
    int64_t copy_count;  /* elements of copy; 0: none */
    float *value, *grad, *m, *v; /* m, v: NULL where they are sharded */
    int64_t grad_at;     /* floats before it in the stage's gradients, and in the values of tensors that have some */
    int row;             /* of shards, in which it is */
    void *copy;          /* the value in the other form that products read: transposed, or of the stage's dtype */
    float *first_value;  /* value and copy are those of the version that is selected: version 0's, and where in another's they are */
    void *first_copy;
    size_t value_at, copy_at;
} tp_stage_param;

typedef struct {
    tp_block_kind kind;
    tp_saves saves;
    int norm, norm_bias;            /* indices into param, -1: none */
    int in, in_bias, out, out_bias; /* c_attn / c_fc, c_proj; head: in = wte or lm_head; embedding: in = wte, out = wpe */
    tp_activations *activations;    /* [activation_slots] */
    tp_gradients *gradients;        /* [gradient_slots] */
    tp_inner *made;                 /* [activation_slots] what forward makes; where it does not keep it, slots share it */
    tp_inner *remade;               /* [gradient_slots] what R makes or SI brings */
    tp_inner *stored;               /* [activation_slots] where it swaps: outside the device's memory */
} tp_stage_block;

/* Bytes of the provider's tp_stage, tp_activations and tp_gradients, and of an element. */
typedef struct {
    size_t stage, activations, gradients, element;
    int keeps_norm; /* tp_inner.norm */
    int keeps_queries; /* 1: what tp_stage_keeps_keys keeps queries, too, as I of earlier slices reads them */
    int slice_room; /* 1: `made` of an FFN that does not keep, or of what tp_stage_keeps_keys, has room for one slice alone, whose rows are
                       always its first ones */
    int64_t group_rows; /* of weight gradients, which no slicing moves, in a micro-batch of one sequence */
    int leaves_h;       /* 1: h is read by I alone: nothing of it is put by, and where it has room for one slice these are its first rows */
    int moves_seldom;   /* 1: what a W puts by stays where it is as long as the slices before have room below it (tp_slice_at) */
} tp_stage_sizes;

/* Every stage begins with this. */
typedef struct {
    tp_stage_config config;
    tp_stage_sizes sizes;
    int blocks, params;
    tp_stage_block *block;
    tp_stage_param *param;
    void **end[4];        /* [tp_end][slot]: [R, E] where messages land and leave; NULL: no such end */
    char *slots;          /* activation slots, slot_bytes apart; the first guest_bytes of each are all that backward reads of it */
    size_t slot_bytes, guest_bytes;
    size_t lent_bytes;    /* of the ends that messages leave from */
    int64_t slice_rows;   /* room of what one slice's I brings to its W: R, but where config.slice_gradients as many as a slice has
                             and, behind them, as many as a W leaves to the next; where W moves_seldom, the most of a slice with
                             those that are left to it */
    int64_t remade_rows;  /* the same of R and SI, where config.remake_slices; as if W moved them always, where forward takes the first
                             rows of it between two slices (config.one_room) */
    void *embedding_rows; /* [batch * T, E] gradient of the embedding's output in the provider's order, or the other end's;
                             NULL unless tp_stage_scatters */
    float *moments[2];    /* config.shards: m and v of the member's shards, row by row */
    double *squares;      /* config.shards: [replicas][squares_each] leaves of sums of squares, each member's tensor by tensor */
    int64_t squares_each, leaves; /* leaves: of all tensors */
    int64_t *leaves_of;   /* config.shards: [replicas] scratch of those that put them in order */
    int rows;             /* config.shards: of blocks that are shared together, and row 0 of a tied weight before them */
    int32_t *row_block;   /* [rows + 1] first block of each from row 1 on, and behind the last */
    int64_t *row_at;      /* [rows] floats of the member's moments before those of the row */
    char *versions;       /* values and copies of version 1 and up, version_bytes each */
    size_t version_bytes;
    int newest, selected; /* versions */
    int32_t *version_of;  /* [micros] that its forward reads; NULL: config.versions is 0 */
    char what[64];        /* "the stage of blocks [0, 3)", for errors */
} tp_stage_base;

/* ---- the tables ---------------------------------------------------------------------------------------------------------- */

/* A stage's tables without its tensors, zero but for what is known here: the provider sets floats and copy_count of each
 * param. Ended by free. EVALUE: blocks out of range. EMEMORY. */
TP_MUST_USE tp_status
tp_stage_describe(const tp_stage_config *config, const tp_stage_sizes *sizes, tp_stage **out);

static inline int
tp_stage_embeds(const tp_stage_base *stage)
{
    return stage->block[0].kind == TP_EMBEDDING;
}
static inline int
tp_stage_heads(const tp_stage_base *stage)
{
    return stage->block[stage->blocks - 1].kind == TP_HEAD;
}
/* Whether it sums rows of d(embedding output) into wte: it embeds, or its head is tied. */
static inline int
tp_stage_scatters(const tp_stage_base *stage)
{
    return tp_stage_embeds(stage) || (tp_stage_heads(stage) && stage->config.model.tie_weights);
}
/* Whether it is one of the two ends of a tied wte that are on two stages. */
static inline int
tp_stage_is_tied_apart(const tp_stage_base *stage)
{
    return stage->config.model.tie_weights && tp_stage_embeds(stage) != tp_stage_heads(stage);
}
/* Whether it answers for its i-th tensor: has its gradient and moments, and updates it. A tied wte at the embedding is the head's
 * business, which gives its values after each update. */
static inline int
tp_stage_answers_for(const tp_stage_base *stage, int i)
{
    return !(stage->param[i].index == 0 && tp_stage_embeds(stage) && tp_stage_is_tied_apart(stage));
}
/* wte of a stage that embeds, else the head's weight. */
static inline tp_stage_param *
tp_stage_vocabulary(const tp_stage_base *stage)
{
    return &stage->param[tp_stage_embeds(stage) ? stage->block[0].in : stage->block[stage->blocks - 1].in];
}
/* The most rows of a micro-batch, and all rows of the batch. */
static inline int64_t
tp_stage_rows(const tp_stage_base *stage)
{
    return (int64_t)stage->config.slicing->max_batch * stage->config.slicing->seq_len;
}
static inline int64_t
tp_stage_tokens(const tp_stage_base *stage)
{
    return (int64_t)stage->config.slicing->batch * stage->config.slicing->seq_len;
}
static inline float *
tp_stage_value(const tp_stage_base *stage, int param)
{
    return param < 0 ? NULL : stage->param[param].value;
}
/* Moments of which each replica has a part. */
static inline int
tp_stage_is_sharded(const tp_stage_base *stage, tp_state state)
{
    return stage->config.shards && (state == TP_STATE_M || state == TP_STATE_V);
}
/* Of its i-th tensor; values: of the newest version; sharded moments: where they are imported, the gradient's place. */
float *
tp_stage_state(const tp_stage_base *stage, int i, tp_state state);
/* Does a sum over micro-batches begin with this one? */
static inline int
tp_stage_sums_from(const tp_stage_base *stage, int micro)
{
    return micro == 0 || stage->config.versions > 0;
}
/* Of a token in the mean loss of all replicas; of one of this micro-batch, where each has its update. */
static inline float
tp_stage_token_weight(const tp_stage_base *stage, const tp_micro *micro)
{
    const tp_stage_config *config = &stage->config;
    double replicas = config->replicas > 1 ? config->replicas : 1;
    int32_t sequences = config->versions > 0 ? micro->batch : config->slicing->batch;
    return 1.0f / (float)(replicas * sequences * config->slicing->seq_len);
}

/* What the embedding's stage of a tied wte gives the head's (tp_stage_ops.tied): embedding_rows. */
void
tp_stage_tied_ends(const tp_stage_base *stage, tp_tied *out);
/* What the head's stage gives the embedding's (tp_stage_ops.tied_values): `bytes` of what lookups read, which are at `values` here. */
void
tp_stage_tied_values(const tp_stage_base *stage, void *values, size_t bytes, tp_tied *out);

/* ---- memory: an arena is walked once to count and once to carve, so that plan and stage are the same code ------------------ */

typedef struct {
    char *base;         /* NULL: counts only */
    size_t used, align; /* bytes; each array begins at a multiple of align */
    size_t element;     /* bytes of a number of the activations */
} tp_stage_arena;

void *
tp_lay(tp_stage_arena *from, int64_t count, size_t size);
static inline float *
tp_lay_floats(tp_stage_arena *from, int64_t count)
{
    return tp_lay(from, count, sizeof(float));
}
static inline void *
tp_lay_elements(tp_stage_arena *from, int64_t count)
{
    return tp_lay(from, count, from->element);
}
/* Values, states and copies of all tensors. */
void
tp_lay_params(tp_stage_base *stage, tp_stage_arena *from);

/* ---- shards.c: moments that replicas share (tp_stage_config.shards) ---- */
/* The member's moments and squares: behind tp_lay_params' gradients, whose places say what is whose. */
void
tp_lay_shards(tp_stage_base *stage, tp_stage_arena *from);
tp_shard
tp_stage_shard_of(const tp_stage_base *stage, int row, int member);
/* What a tensor has in a shard. */
typedef struct {
    int64_t begin, floats; /* of the tensor; floats 0: nothing */
    int64_t at;            /* of the member's moments */
} tp_shard_part;
/* Of the i-th tensor in this member's shards. */
tp_shard_part
tp_stage_shard_part(const tp_stage_base *stage, int i);
/* Leaves of sums of squares in so many floats. */
static inline int64_t
tp_stage_leaves(int64_t floats)
{
    return (floats + TP_SUMSQ_LEAF - 1) / TP_SUMSQ_LEAF;
}
/* ordered [leaves]: of `squares` (on the host) each tensor's leaves in their order, tensor by tensor, of those that it answers for. */
void
tp_stage_order_leaves(const tp_stage_base *stage, const double *squares, double *ordered);
/* One slot's buffers of a block, but its inner (not of an embedding: it has none). Gives the block's input; d_input is there. */
typedef void *tp_lay_activations(const tp_stage_base *stage, const tp_stage_block *block, tp_activations *out,
                                 tp_stage_arena *from);
typedef void tp_lay_gradients(const tp_stage_base *stage, const tp_stage_block *block, void *d_input, tp_gradients *out,
                              tp_stage_arena *from);
/* Every activation slot, one behind another: that of all blocks with their inner, then the output (none on the head's stage). Then
 * the gradients' in the same way, and where blocks that keep nothing go forward. What messages leave from is config.lent's, if there
 * is any. Sets `end`, `slots` and their bytes, and slice_rows and remade_rows before all else. */
void
tp_lay_slots(tp_stage_base *stage, tp_stage_arena *from, tp_lay_activations *activations, tp_lay_gradients *gradients);

/* ---- versions of the values (versions.c) ---- */
/* Counted, or carved, behind all that is there without them. */
void
tp_lay_versions(tp_stage_base *stage, tp_stage_arena *from);
/* Before the work of a micro-batch: value and copy of each tensor become those of its version; `begins`: of the newest, from now on.
 * micro -1: of the newest, whatever micro-batches read. */
void
tp_stage_select(tp_stage_base *stage, int micro, int begins);
/* Behind the backward of `micro`: the version after the newest becomes the newest, and selected; it is still to be written. Gives the
 * one that was, which may be the same. */
int
tp_stage_advance(tp_stage_base *stage, int micro);
/* ERUNTIME: the gradient of `micro` has this square of a norm, which is not finite. */
TP_MUST_USE tp_status
tp_stage_refuse_norm(const tp_stage_base *stage, int micro, double norm2);
/* The i-th tensor's value in a version. */
float *
tp_stage_version(const tp_stage_base *stage, int i, int version);
/* Its copy there; NULL: it has none. */
void *
tp_stage_version_copy(const tp_stage_base *stage, int i, int version);

/* What all blocks that swap have outside the device's memory: sets `stored`. */
void
tp_lay_store(tp_stage_base *stage, tp_stage_arena *from);
/* Its bytes; `stored` is undefined until tp_lay_store. */
size_t
tp_stage_store_bytes(tp_stage_base *stage);
/* What a stage takes that was laid out without memory, in `memory` bytes. */
tp_stage_bytes
tp_stage_bytes_of(tp_stage_base *stage, size_t memory);

/* ---- a slice --------------------------------------------------------------------------------------------------------------- */

typedef struct {
    int q, slice, slot, gslot;
    const tp_micro *micro;
    int64_t first, last;     /* sequences [first, last) of the micro-batch */
    int64_t begin, end;      /* tokens [begin, end) of this slice */
    int64_t first_row, rows; /* of the slice in the micro-batch's buffers */
    int64_t batch_row;       /* first row of the micro-batch among all rows of the batch */
    int64_t all_rows;        /* of the micro-batch */
    int64_t gradients_begin; /* which row of the micro-batch is the first of buffers that hold one slice alone, and what is put by for its
                                W: negative where the first is before the micro-batch. The slice's last row is always row max_rows - 1,
                                so that the rows which later slices put by follow at a fixed place; where W moves_seldom, see
                                describe.c */
    int64_t room_begin;      /* the same of what R and SI bring: another where forward takes the first rows of it between two slices */
    int whole;               /* several sequences and several slices */
} tp_slice_at;

/* Does this attention keep keys and values (and queries) alone, for R of one slice after another? */
static inline int
tp_stage_keeps_keys(const tp_stage_base *stage, const tp_stage_block *block)
{
    return stage->config.keep_keys && block->kind == TP_ATTENTION && block->saves == TP_REMAKES;
}
/* Where it keeps them. */
static inline void **
tp_stage_kept_keys(const tp_stage_base *stage, tp_inner *made)
{
    return stage->sizes.keeps_queries ? &made->qkv : &made->kv;
}
/* What forward kept, R made again or SI brought back. */
static inline const tp_inner *
tp_stage_inner(const tp_stage_block *block, const tp_slice_at *at)
{
    return block->saves ? &block->remade[at->gslot] : &block->made[at->slot];
}
/* Which row of the micro-batch the first row of buffers of slice_rows is. 0 where they hold the whole micro-batch. */
static inline int64_t
tp_stage_slice_begin(const tp_stage_base *stage, const tp_slice_at *at)
{
    return stage->config.slice_gradients ? at->gradients_begin : 0;
}
/* The same for that inner's buffers. */
static inline int64_t
tp_stage_inner_begin(const tp_stage_base *stage, const tp_stage_block *block, const tp_slice_at *at)
{
    return block->saves && stage->config.remake_slices ? at->room_begin : 0;
}
/* The same for its h. */
static inline int64_t
tp_stage_h_begin(const tp_stage_base *stage, const tp_stage_block *block, const tp_slice_at *at)
{
    return block->saves && stage->config.remake_slices && stage->sizes.leaves_h ? at->first_row : tp_stage_inner_begin(stage, block, at);
}
/* The same for the buffers that forward writes (tp_stage_block.made). */
static inline int64_t
tp_stage_made_begin(const tp_stage_base *stage, const tp_stage_block *block, const tp_slice_at *at)
{
    int one = block->saves && (block->kind == TP_FFN || tp_stage_keeps_keys(stage, block)) && stage->sizes.slice_room;
    return one ? at->begin * at->micro->batch : 0;
}

/* The first token whose weight gradients W of this slice makes. */
static inline int64_t
tp_stage_group_begin(const tp_micro *micro, int slice)
{
    return tp_group_begin(micro->start[micro->slices], slice, micro->start[slice]);
}

/* The same of the provider's groups: where W of this slice, of one sequence, begins. That of the slice behind the last: its end. */
static inline int64_t
tp_stage_groups_begin(const tp_stage_base *stage, const tp_micro *micro, int slice)
{
    return tp_groups_begin(stage->sizes.group_rows, micro->start[micro->slices], slice, micro->start[slice]);
}

/* Of one array of a block that swaps: the rows of a slice in the device's memory and outside. */
typedef struct {
    void *device, *store;
    size_t bytes;
} tp_swap;
#define TP_SWAPS_MOST 3 /* arrays of an inner */
/* What of a slice goes out, or comes in; how many. */
int
tp_stage_swaps(const tp_stage_base *stage, const tp_stage_block *block, const tp_slice_at *at, int out, tp_swap swap[TP_SWAPS_MOST]);

tp_slice_at
tp_stage_at(const tp_stage_base *stage, int micro, int slice, tp_half half, int slot, int gslot);
/* Row in the micro-batch's buffers. */
static inline int64_t
tp_stage_row(const tp_stage_base *stage, const tp_slice_at *at, int64_t token, int64_t sequence)
{
    return tp_micro_row(at->micro, stage->config.slicing->seq_len, token, sequence);
}

/* Sequences whose rows interleave: the micro-batch, or one half of it. */
typedef struct {
    int64_t row;         /* the first in the micro-batch's buffers */
    int64_t lse;         /* where its lse and delta begin, floats */
    tp_attention shape;  /* of this slice */
} tp_stage_part;

/* The parts of this work; at most 2. */
int
tp_stage_parts(const tp_stage_base *stage, const tp_slice_at *at, tp_stage_part part[2]);

/* In row order of the micro-batches, each [batch * T], NULL where it is not wanted: every token, the one after it, its
 * position. tokens [batch, seq_len + 1]; not read for positions alone. */
void
tp_stage_order(const tp_stage_base *stage, const int32_t *tokens, int32_t *inputs, int32_t *targets, int32_t *positions);

/* ---- of tp_stage_ops, the same for every provider ---------------------------------------------------------------------------- */

int
tp_stage_params(const tp_stage *stage);
int
tp_stage_param_index(const tp_stage *stage, int i);
int
tp_stage_param_shape(const tp_stage *stage, int i, int64_t *rows, int64_t *cols);
/* EVALUE: another stage answers for the tensor, and this state is there alone. */
TP_MUST_USE tp_status
tp_stage_check_state(const tp_stage_base *stage, int i, tp_state state);
/* EVALUE: moments of which this replica has a part. */
TP_MUST_USE tp_status
tp_stage_check_whole(const tp_stage_base *stage, int i, tp_state state);
float *
tp_stage_gradients(tp_stage *stage, int64_t *floats);
tp_shard
tp_stage_shard(const tp_stage *stage, int row, int member);
int
tp_stage_shard_rows(const tp_stage *stage);
float *
tp_stage_values(tp_stage *stage);
double *
tp_stage_squares(tp_stage *stage, int64_t *each);
int64_t
tp_stage_block_gradients(const tp_stage *stage, int block, int64_t *first);
void *
tp_stage_guest(tp_stage *stage, int slot, size_t *bytes);
void *
tp_stage_end(tp_stage *stage, tp_end end, int micro, int slice, tp_half half, int slot, size_t *bytes);

#endif
