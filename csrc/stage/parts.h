/* The inside of a stage, shared by the files of this room. R = rows of a micro-batch = seq_len * batch. */
#ifndef TP_STAGE_PARTS_H
#define TP_STAGE_PARTS_H

#include "csrc/stage/describe.h"
#include "csrc/stage/stage.h"

#define TP_HEAD_TILE 256 /* rows of logits that exist at once */

/* NULL where the kind of block has none. */
struct tp_activations {
    float *input;           /* [R, E] residual stream into the block */
    float *mean, *rstd;     /* [R] */
    float *qkv, *o, *lse;   /* attention: [R, 3E], [R, E], [B, H, T] */
    float *h, *g;           /* ffn: [R, 4E] before and after GELU; h becomes its gradient in I */
    float *dx;              /* head: [R, E] gradient of the normalised input */
    double *loss;           /* head: [R] */
};

struct tp_gradients {
    float *d_input;            /* [R, E] */
    float *dqkv, *d_o, *delta; /* attention: [R, 3E], [R, E], [B, H, T] */
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
    void *memory;
    float *scratch;             /* [max_rows, E] */
    head_tile tile[2];          /* head: rows done in F; rows done in I */
    float *head_dx;             /* head: [tile, E] */
    float *head_forward;        /* head: the F rows' chain of d(weight) */
    int32_t *tokens, *targets, *positions;      /* [batch * T] in row order of the micro-batches */
    int32_t *chain_tokens, *chain_positions;    /* [batch * T] in canonical order */
    double *sequence_loss;                 /* [batch] */
    int train;
};

/* Parts of a stage in an arena; base NULL counts only. */
size_t
tp_stage_layout(tp_stage *stage, char *base);

void
tp_block_forward(tp_stage *stage, int block, const tp_slice_at *at);
void
tp_block_input_gradient(tp_stage *stage, int block, const tp_slice_at *at);
void
tp_block_weight_gradient(tp_stage *stage, int block, const tp_slice_at *at);

void
tp_head_forward(tp_stage *stage, int block, const tp_slice_at *at);
void
tp_head_input_gradient(tp_stage *stage, int block, const tp_slice_at *at);
/* d(weight) of the rows of tile 0 (F) or 1 (I) that wait for it, in the order in which they came. */
void
tp_head_flush(tp_stage *stage, int which);

/* dx of LayerNorm for the slice's rows, each sequence's gradient chain walked downwards. dy: [rows, E] of the slice. */
void
tp_block_norm_gradient(tp_stage *stage, int block, const tp_slice_at *at, const float *dy, const float *dresidual);

static inline int64_t
tp_logits_stride(const tp_model *model)
{
    return (model->vocab_size + 15) / 16 * 16; /* floats: rows begin on a cache line */
}

/* Buffer that the block's output goes to, its gradient comes from. */
static inline float *
tp_block_output(const tp_stage *stage, int block, int slot)
{
    return block + 1 < stage->base.blocks ? stage->base.block[block + 1].activations[slot].input
                                          : stage->base.end[TP_END_OUTPUT][slot];
}
static inline float *
tp_block_d_output(const tp_stage *stage, int block, int gslot)
{
    return block + 1 < stage->base.blocks ? stage->base.block[block + 1].gradients[gslot].d_input
                                          : stage->base.end[TP_END_OUTPUT_GRADIENT][gslot];
}

#endif
