/* The inside of a stage on the CPU (stage_ops.h is its seam; cuda/stage.h a GPU's): a range of blocks with their parameters,
 * the activations of the micro-batches in flight, and the forward, input-gradient and weight-gradient work of one token
 * slice. Once a stage is open, its calls fail only with EABORTED, when the thread is told to stop (csrc/base/deadline.h): they ask
 * before each block, and before each tile of the head and its products. The stage's contents are then undefined.
 * R = rows of a micro-batch = seq_len * batch.
 *
 * Slicing invariance. Every sum over tokens is a chain over "sequence ascending, token descending", whatever the slices,
 * the micro-batches, the stages and the schedule, provided that each stage sees micro-batches ascending in F, in I and in W
 * and slices ascending in F, descending in I and W (the checker's rules). LayerNorm gradients are chained per sequence
 * and then added. Where a micro-batch has several sequences AND several slices ("whole" in tp_slice_at), the weight gradients of
 * all its slices are computed at slice 0, because only then is each sequence complete. Those of one sequence's slices wait until
 * TP_WEIGHT_ROWS of them make a product worth its packing, but for the last two slices that it goes back through: the step may be
 * waiting for those. A block that does not keep what its forward made has no rows but the slice's, and does not wait for so many.
 * How a group of TP_ROW_GROUP rows is summed is the instruction set's: the rows of a weight gradient are in groups that no slicing
 * moves. A sequence's are counted from its end, and W of a slice takes whole groups alone, leaving what is below them to W of the
 * slice before; W of slice 0 takes all. What there is of one slice alone is put by for that (tp_stage_slice_begin). Where the
 * gradients that one block hands to the next are such, no block's weight gradients wait for more rows.
 *
 * The head. Logits of a tile of rows exist only while that tile is worked on; loss and d(input) of a row are done with its
 * logits. Rows at positions t % 3 == 0 are done in F, the others in I, and d(weight) of either as soon as half a tile of them
 * waits: so the head weighs on F and I as 1 to 2, and W has nothing of it, wherever the schedule puts it. F rows wait until
 * TP_HEAD_WORTH of them are worth a pass over the weights. Not so in the last TP_HEAD_HASTE slices of a sequence, as the other
 * ranks wait for its first d(input): F passes what it has, and d(weight) of F's rows stays for a later slice's I.
 * Each set has its own chain of weight gradient (F rows ascending, I rows descending), in groups counted from its first row of the
 * step: what is below a group stays in the tile for the next. At the update that is taken too, and the two are added.
 * csrc/model/waits.h has the rules, by which csrc/cost/waits.c counts what an instruction does for the head. */
#ifndef TP_STAGE_STAGE_H
#define TP_STAGE_STAGE_H

#include "csrc/stage/describe.h"

/* A rank's device: its stages share the backend. */
typedef struct {
    tp_device base;
    tp_backend backend;
    tp_team *team;
} tp_cpu_device;

/* NULL where the kind of block has none. tp_inner: floats, without norm; h becomes its gradient in I. */
struct tp_activations {
    float *input;       /* [R, E] residual stream into the block */
    float *mean, *rstd; /* [R] */
    float *lse;         /* attention: [B, H, T] */
    float *dx;          /* head: [R, E] gradient of the normalised input */
    double *loss;       /* head: [R] */
};

struct tp_gradients {
    float *d_input;            /* [slice_rows, E]; of the stage's first block, from where it is sent, [R, E] */
    float *dqkv, *delta;       /* attention: [R, 3E], [B, H, T] */
    float *dkv;                /* attention: NULL; or [R, 2E], where later queries' I add to those of earlier keys. dqkv is then
                                  [slice_rows, 3E], to which I copies the slice's */
    float *dnorm;              /* [max_batch, 2, E]: LayerNorm gradients of each sequence */
};

/* Rows of the head whose logits exist: after the loss, their d(logits), until d(weight) has taken them. */
typedef struct {
    float *logits, *x; /* [tile, V], [tile, E] normalised input */
    int64_t rows;      /* waiting for d(weight) */
    int seen;          /* the chain of this step has begun */
} head_tile;

struct tp_stage {
    tp_stage_base base;         /* embedding_rows in canonical order: sequence, token descending */
    tp_backend *be;
    void *memory, *store;       /* store: what is swapped out, behind a file */
    size_t store_bytes;
    float *scratch;             /* [tp_stage_scratch_rows, E] */
    head_tile tile[2];          /* head: rows done in F; rows done in I */
    int64_t head_from;          /* head: first token whose row of F has not been done, of the micro-batch now in F */
    float *head_dx;             /* head: [tile, E] */
    float *head_forward;        /* head: the F rows' chain of d(weight) */
    int32_t *tokens, *targets, *positions;      /* [batch * T] in row order of the micro-batches */
    int32_t *chain_tokens, *chain_positions;    /* [batch * T] in canonical order */
    double *sequence_loss;                 /* [batch] */
    double *leaves;                        /* of sums of squares of all replicas' shards, in their order; NULL: there are none */
    double *squares;                       /* [params] of the gradients of micro-batches so far; NULL: they have no updates */
    int train;
};

extern const tp_stage_ops tp_cpu_stage_ops;

/* Bytes of workspace the backend needs for this stage: what tp_device_ops.workspace_bytes says. */
size_t
tp_stage_workspace_bytes(const tp_stage_config *config, const tp_device_config *device);

/* Rows that are normalised anew at once: a group of TP_ROW_GROUP, or a sequence, at least. */
int64_t
tp_stage_scratch_rows(const tp_slicing *slicing);
/* Parts of a stage in an arena; base NULL counts only. */
size_t
tp_stage_layout(tp_stage *stage, char *base);

void
tp_block_forward(tp_stage *stage, int block, const tp_slice_at *at);
void
tp_block_input_gradient(tp_stage *stage, int block, const tp_slice_at *at);
/* Of the tokens from this slice's first whole group on to `end`: those of later slices whose W left them to this one. end 0: it
 * leaves all. */
void
tp_block_weight_gradient(tp_stage *stage, int block, const tp_slice_at *at, int64_t end);
/* Of a block that recomputes: its inner once more, into the gradient slot. */
void
tp_block_recompute(tp_stage *stage, int block, const tp_slice_at *at);

void
tp_head_forward(tp_stage *stage, int block, const tp_slice_at *at);
void
tp_head_input_gradient(tp_stage *stage, int block, const tp_slice_at *at);
/* d(weight) of the rows of tile 0 (F) or 1 (I) that wait for it, in the order in which they came: of whole groups of TP_ROW_GROUP,
 * counted from the first of the step; `last`: of all, as no more will come. */
void
tp_head_flush(tp_stage *stage, int which, int last);

/* dx of LayerNorm for the slice's rows, each sequence's gradient chain walked downwards. dy, dresidual: [rows, E] of the slice. */
void
tp_block_norm_gradient(tp_stage *stage, int block, const tp_slice_at *at, const float *dy, const float *dresidual);

/* Of tp_cpu_stage_ops: what comes after the last backward. */
TP_MUST_USE tp_status
tp_stage_tied(tp_stage *stage, tp_tied *out);
TP_MUST_USE tp_status
tp_stage_give_tied(tp_stage *stage, tp_tied *out);
TP_MUST_USE tp_status
tp_stage_finish(tp_stage *stage);
TP_MUST_USE tp_status
tp_stage_loss(tp_stage *stage, double *out);
TP_MUST_USE tp_status
tp_stage_sumsq(tp_stage *stage, double *sums);
/* Of shards: this member's leaves. */
TP_MUST_USE tp_status
tp_stage_measure(tp_stage *stage);
TP_MUST_USE tp_status
tp_stage_spread(tp_stage *stage, tp_state state);
/* This member's part of a moment that lies whole in the gradient's place. */
void
tp_stage_take_moments(tp_stage *stage, int i, tp_state state);
TP_MUST_USE tp_status
tp_stage_update_micro(tp_stage *stage, int micro, const tp_adamw *adamw, double grad_clip);
TP_MUST_USE tp_status
tp_stage_update(tp_stage *stage, const tp_adamw *adamw, double grad_scale);
/* Lay out anew what linear_t reads of a weight. */
void
tp_stage_pack(tp_stage *stage, const tp_stage_param *param);

static inline int64_t
tp_logits_stride(const tp_model *model)
{
    return (model->vocab_size + 15) / 16 * 16; /* floats: rows begin on a cache line */
}

/* Buffer that the block's output goes to. */
static inline float *
tp_block_output(const tp_stage *stage, int block, int slot)
{
    return block + 1 < stage->base.blocks ? stage->base.block[block + 1].activations[slot].input
                                          : stage->base.end[TP_END_OUTPUT][slot];
}
/* `row` of the micro-batch, of this slice or put by for its W, in the gradient of the block's input, or of its output. */
static inline float *
tp_block_d_input(const tp_stage *stage, int block, const tp_slice_at *at, int64_t row)
{
    int64_t begin = block > 0 ? tp_stage_slice_begin(&stage->base, at) : 0;
    return stage->base.block[block].gradients[at->gslot].d_input + (row - begin) * stage->base.config.model.n_embd;
}
static inline float *
tp_block_d_output(const tp_stage *stage, int block, const tp_slice_at *at, int64_t row)
{
    return block + 1 < stage->base.blocks
               ? tp_block_d_input(stage, block + 1, at, row)
               : (float *)stage->base.end[TP_END_OUTPUT_GRADIENT][at->gslot] + row * stage->base.config.model.n_embd;
}

#endif
