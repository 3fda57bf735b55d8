/* The inside of a stage on a GPU (stage_ops.h is its seam; csrc/stage the CPU's). R = rows of a micro-batch.
 *
 * Numbers. Activations, their gradients and what products read of the weights are of the device's dtype; masters, their
 * gradients, moments, statistics and losses fp32. A float32 stage has no copies: products read the masters.
 *
 * Slicing invariance. All that is summed over tokens is summed over whole micro-batches: W does its work at slice 0, over
 * every row of the micro-batch. Where blocks of the model are made again or swapped, but no attention swapped, a micro-batch of one
 * sequence is summed in groups of TP_CUDA_WEIGHT_ROWS rows, counted from its end, each of which is one product whatever the slices,
 * stages and schedule. So W of a slice takes the whole groups that begin in it, and slice 0's all that is left: where there is room
 * for one slice alone (config.slice_gradients), what is below the groups is put by for that. Attention's q, k, v, d_o, delta and lse
 * stay whole: I of earlier slices reads them. Of one that is made again slice by slice q, k, v stay in the activation slot
 * (config.keep_keys), and R makes what the slice's own I and W read besides: the normalised input, and o.
 *
 * The head does a row's logits, loss and d(input) in F; normalised inputs and d(logits) wait in a tile of
 * TP_CUDA_HEAD_TILE rows, counted from row 0 of the batch, and d(weight) takes whole tiles: in F, where the next rows need the tile;
 * the batch's last in W, so that no stage waits for it. Embedding rows wait for the end of the step. The last stage sees rows ascending
 * in F, every stage micro-batches ascending in W (tp_program_check_canonical).
 *
 * Graphs. What a call does follows from its arguments alone, so that a graph may stand for it. This holds of stages with versions
 * of their weights too, as each micro-batch reads the same version in every step (csrc/stage/versions.c). Such stages update after
 * every micro-batch, outside the graphs and without the host's waiting: the device clips, or refuses, by what it has measured.
 * For them read "micro-batch" for "batch" above: the head's tiles begin with it (their last, too, is taken in F), and embedding rows
 * wait for its update.
 *
 * Padding. The vocabulary's weight and logits have rows padded with zeros to a multiple of 64, as products like whole tiles. */
#ifndef TP_CUDA_STAGE_H
#define TP_CUDA_STAGE_H

#include "csrc/stage/describe.h"
#include "cuda/kernels.h"
#include "cuda/rank.h"

#ifndef TP_CUDA_COMPARED_BYTES
#define TP_CUDA_COMPARED_BYTES (1 << 22) /* of the host's memory, about, where gradients are compared before the first step */
#endif
#ifndef TP_CUDA_HEAD_TILE
#define TP_CUDA_HEAD_TILE 8192 /* rows of logits that exist at once: d(weight) in fp32 is read and written for each tile */
#endif

/* NULL where the kind of block has none. */
struct tp_activations {
    void *input;        /* [R, E] residual stream into the block */
    float *mean, *rstd; /* [R] */
    float *lse;         /* attention: [B, H, T] */
    void *d_norm;       /* head: [R, E] */
};

struct tp_gradients {
    void *d_input;    /* [slice_rows, E]; of the stage's first block, from where it is sent, [R, E] */
    void *d_norm;     /* [slice_rows, E] gradient of the normalised input, until W */
    void *dqkv, *d_o; /* attention: [slice_rows, 3E], [R, E] */
    float *delta;     /* attention: [B, H, T] */
    void *dh;         /* ffn: [slice_rows, 4E] */
};

/* Rows whose gradients are summed together: the batch's, or those of a micro-batch that has its update. */
typedef struct {
    int64_t first, count;
} stage_sum;

/* Rows sorted by an index, of each sum one behind another (tp_cuda_group_rows). */
typedef struct {
    int32_t *index, *start, *rows; /* of a sum [min(count, height)], one more, [count] */
} row_groups;

/* What a step's tokens become: once on the host, page-locked, and once on the device, in the same order. */
typedef struct {
    int32_t *tokens, *targets, *positions; /* [batch * T] in row order of the micro-batches */
    row_groups by_token, by_position;
} stage_ints;

struct tp_stage {
    tp_stage_base base; /* embedding_rows in row order; a tensor's copy is of dtype, NULL where its value is read */
    tp_cuda_rank *rank;
    tp_dtype dtype;
    void *memory;               /* the arena */
    size_t zeroed_bytes;        /* of its beginning: parameters, their states, and the tables of them */
    int64_t group_rows;         /* TP_CUDA_WEIGHT_ROWS, or 0: sums over one sequence are of all its rows, too */
    int64_t tile_rows;
    void *tile_logits, *tile_x; /* head: [tile_rows, V padded], [tile_rows, E] */
    float *loss;                /* head: [batch * T] in row order */
    tp_cuda_tensor *tensors;    /* [versions, 1 without][params] what is measured and updated, with the values of a version */
    int64_t leaves;
    int32_t *owner;             /* [leaves] (tp_cuda_tensors) */
    double *partial;            /* [leaves] of sums of squares */
    double *sums;               /* [params]; 0 of what another stage answers for */
    double *squares;            /* [params] of micro-batches that have their updates, so far; NULL: they have none */
    tp_cuda_clipped *clipped;   /* the last update's; NULL likewise */
    stage_ints on_device;
    size_t ints_bytes;

    void *pinned;               /* page-locked: ints, then losses, then sums */
    void *store;                /* page-locked: what is swapped out; NULL: nothing is */
    stage_ints on_host;
    float *host_loss;
    double *host_sums;
    double *host_squares, *host_leaves; /* config.shards: tp_stage_base's squares, and [leaves] in order */
    tp_cuda_clipped *host_clipped;
    int32_t *counts;            /* [max(vocabulary, T)] scratch of sorting */
    int64_t *token_groups, *position_groups; /* [tp_cuda_sums] */
    int train;
    int preparing;              /* products are chosen, nothing runs */
    int prepared;
};

/* Parts of a stage in an arena; base NULL counts only. */
size_t
tp_cuda_stage_layout(tp_stage *stage, char *base);
/* The same of the page-locked memory. */
size_t
tp_cuda_stage_layout_host(tp_stage *stage, char *base);
/* The tables of a stage without its memory; ended by free. */
TP_MUST_USE tp_status
tp_cuda_stage_describe(const tp_stage_config *config, tp_dtype dtype, tp_stage **out);
/* How many versions of its tensors are listed. */
static inline int
tp_cuda_lists(const tp_stage_base *stage)
{
    return stage->config.versions > 0 ? stage->config.versions : 1;
}
/* How many sums a step has, and the rows of one. */
static inline int
tp_cuda_sums(const tp_stage_base *stage)
{
    return stage->config.versions > 0 ? stage->config.slicing->micros : 1;
}
static inline stage_sum
tp_cuda_sum(const tp_stage_base *stage, int micro)
{
    const tp_micro *cut = &stage->config.slicing->micro[micro];
    int64_t seq_len = stage->config.slicing->seq_len;
    return stage->config.versions > 0 ? (stage_sum){cut->first_seq * seq_len, cut->batch * seq_len}
                                      : (stage_sum){0, tp_stage_tokens(stage)};
}
/* The part of groups that one sum has, the i-th. */
static inline row_groups
tp_cuda_groups(const row_groups *all, stage_sum sum, int i)
{
    return (row_groups){all->index + sum.first, all->start + sum.first + i, all->rows + sum.first};
}
static inline int64_t
tp_cuda_padded_vocab(const tp_model *model)
{
    return (model->vocab_size + 63) / 64 * 64;
}

TP_MUST_USE tp_status
tp_cuda_block_forward(tp_stage *stage, int block, const tp_slice_at *at);
TP_MUST_USE tp_status
tp_cuda_block_input_gradient(tp_stage *stage, int block, const tp_slice_at *at);
TP_MUST_USE tp_status
tp_cuda_block_weight_gradient(tp_stage *stage, int block, const tp_slice_at *at);
/* Of a block that recomputes: its inner once more, into the gradient slot. */
TP_MUST_USE tp_status
tp_cuda_block_recompute(tp_stage *stage, int block, const tp_slice_at *at);
TP_MUST_USE tp_status
tp_cuda_head_forward(tp_stage *stage, const tp_slice_at *at);
/* d(weight) of the head's last tile of the batch, in W of the last micro-batch; nothing in W of others. */
TP_MUST_USE tp_status
tp_cuda_head_weight_gradient(tp_stage *stage, const tp_slice_at *at);

/* The attention of one part of a slice's forward, by cuDNN where it was asked for and can: planned while the stage prepares, else
 * run. qkv and o from the part's row (0, 0) on; of o, which has the slice's rows alone in room for these, that may be before it. */
TP_MUST_USE tp_status
tp_cuda_stage_attention(tp_stage *stage, const tp_stage_part *part, const void *qkv, void *o, float *lse);
/* The attention of one part of the slice's input gradient, our kernel's: of what a step keeps, d(q), d(k), d(v). */
TP_MUST_USE tp_status
tp_cuda_stage_attention_backward(tp_stage *stage, const tp_stage_block *block, const tp_slice_at *at, const tp_stage_part *part);
/* After all plans are made: each is run once beside our kernel, on numbers of its own, in memory that a step writes before it
 * reads it; and our backward with and without what it keeps, which must not show in the bits. */
TP_MUST_USE tp_status
tp_cuda_stage_check_attention(tp_stage *stage);
/* A product of the stage: chosen while it prepares, else run. */
TP_MUST_USE tp_status
tp_cuda_stage_product(tp_stage *stage, const tp_gemm_op *op);
/* A kernel of the stage: nothing while it prepares. */
#define STAGE_RUN(stage, call)                                                                                         \
    do {                                                                                                               \
        if (!(stage)->preparing)                                                                                       \
            TP_TRY(call);                                                                                              \
    } while (0)

/* Writes `tensors` and `owner`, once its memory is laid out. */
TP_MUST_USE tp_status
tp_cuda_stage_list(tp_stage *stage);
/* Clear the gradients that `finish` scatters into: with the last forward, when a pipeline's first rank is about to wait, and not with
 * `finish`, when the others wait for it (0.24 ms for a vocabulary of 412 MB on a quarter of an H200). */
TP_MUST_USE tp_status
tp_cuda_stage_clear(tp_stage *stage);

TP_MUST_USE tp_status
tp_cuda_stage_finish(tp_stage *stage);
TP_MUST_USE tp_status
tp_cuda_stage_loss(tp_stage *stage, double *out);
TP_MUST_USE tp_status
tp_cuda_stage_measure(tp_stage *stage);
TP_MUST_USE tp_status
tp_cuda_stage_sumsq(tp_stage *stage, double *sums);
/* This replica's shards of the i-th tensor's moments, out of the gradient's place or (spread) of all tensors into them. */
TP_MUST_USE tp_status
tp_cuda_stage_take_moments(tp_stage *stage, int i, tp_state state);
TP_MUST_USE tp_status
tp_cuda_stage_spread(tp_stage *stage, tp_state state);
TP_MUST_USE tp_status
tp_cuda_stage_update(tp_stage *stage, const tp_adamw *adamw, double grad_scale);
TP_MUST_USE tp_status
tp_cuda_stage_update_micro(tp_stage *stage, int micro, const tp_adamw *adamw, double grad_clip);
/* Before a step: after one that ended half way the newest version may be elsewhere than where steps find it. */
TP_MUST_USE tp_status
tp_cuda_stage_settle_versions(tp_stage *stage);

static inline float *
tp_cuda_grad(const tp_stage *stage, int param)
{
    return param < 0 ? NULL : stage->base.param[param].grad;
}
/* What products read. */
static inline const void *
tp_cuda_weight(const tp_stage *stage, int param)
{
    if (param < 0)
        return NULL;
    return stage->base.param[param].copy != NULL ? stage->base.param[param].copy : stage->base.param[param].value;
}
/* Row `row` of an array of `width` columns of the stage's dtype. */
static inline void *
tp_cuda_row(const tp_stage *stage, const void *array, int64_t row, int64_t width)
{
    return (char *)(uintptr_t)array + (size_t)(row * width) * stage->base.sizes.element;
}
/* The same of a row before an array of later rows alone, which kernels are told of and do not touch. */
static inline void *
tp_cuda_row_before(const tp_stage *stage, const void *array, int64_t row, int64_t width)
{
    return (void *)((uintptr_t)array + (uintptr_t)(row * width) * stage->base.sizes.element);
}
/* Queries, keys and values that the backward of an attention's slices reads, of the whole micro-batch. */
static inline void *
tp_cuda_qkv(const tp_stage *stage, const tp_stage_block *block, const tp_slice_at *at)
{
    return tp_stage_keeps_keys(&stage->base, block) ? block->made[at->slot].qkv : tp_stage_inner(block, at)->qkv;
}
static inline void *
tp_cuda_block_output(const tp_stage *stage, int block, int slot)
{
    return block + 1 < stage->base.blocks ? stage->base.block[block + 1].activations[slot].input
                                          : stage->base.end[TP_END_OUTPUT][slot];
}
/* `row` of the micro-batch, of this slice or put by for its W, in the gradient of the block's input, or of its output. */
static inline void *
tp_cuda_block_d_input(const tp_stage *stage, int block, const tp_slice_at *at, int64_t row)
{
    int64_t begin = block > 0 ? tp_stage_slice_begin(&stage->base, at) : 0;
    return tp_cuda_row(stage, stage->base.block[block].gradients[at->gslot].d_input, row - begin, stage->base.config.model.n_embd);
}
static inline void *
tp_cuda_block_d_output(const tp_stage *stage, int block, const tp_slice_at *at, int64_t row)
{
    return block + 1 < stage->base.blocks
               ? tp_cuda_block_d_input(stage, block + 1, at, row)
               : tp_cuda_row(stage, stage->base.end[TP_END_OUTPUT_GRADIENT][at->gslot], row, stage->base.config.model.n_embd);
}

#endif
