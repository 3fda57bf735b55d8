/* The inside of a stage, shared by the files of this room. R = rows of a micro-batch = seq_len * batch. */
#ifndef TP_STAGE_PARTS_H
#define TP_STAGE_PARTS_H

#include "csrc/stage/stage.h"


typedef struct {
    tp_param info;
    int index;     /* canonical */
    int needs_t;   /* is multiplied transposed too */
    int64_t floats, t_floats;
    float *value, *grad, *m, *v, *packed_t;
} stage_param;

/* Buffers of one micro-batch in flight, of one block. NULL where the kind has none. */
typedef struct {
    float *input;           /* [R, E] residual stream into the block */
    float *mean, *rstd;     /* [R] */
    float *qkv, *o, *lse;   /* attention: [R, 3E], [R, E], [B, H, T] */
    float *h, *g;           /* ffn: [R, 4E] before and after GELU; h becomes its gradient in I */
    float *dx;              /* head: [R, E] gradient of the normalised input */
    double *loss;           /* head: [R] */
} block_activations;

typedef struct {
    float *d_input;            /* [R, E] */
    float *dqkv, *d_o, *delta; /* attention: [R, 3E], [R, E], [B, H, T] */
    float *dnorm;              /* [max_batch, 2, E]: LayerNorm gradients of each sequence */
} block_gradients;

typedef struct {
    tp_block_kind kind;
    int norm, norm_bias;             /* indices into stage->params, -1: none */
    int in, in_bias, out, out_bias;  /* c_attn / c_fc, c_proj; head: in = wte or lm_head; embedding: in = wte, out = wpe */
    block_activations *activations;  /* [activation_slots] */
    block_gradients *gradients;      /* [gradient_slots] */
} stage_block;

/* Rows of the head whose logits exist: after the loss, their d(logits), until d(weight) has taken them. */
typedef struct {
    float *logits, *x; /* [tile, V], [tile, E] normalised input */
    int64_t rows;      /* waiting for d(weight) */
    int seen;          /* the chain of this step has begun */
} head_tile;

struct tp_stage {
    tp_stage_config config;
    tp_backend *be;
    void *memory;
    int blocks, params;
    stage_block *block;
    stage_param *param;
    float **output, **d_output; /* [slots] [R, E] of the last block; NULL on the head's stage */
    float *scratch;             /* [max_rows, E] */
    head_tile tile[2];          /* head: rows done in F; rows done in I */
    int64_t head_from;          /* head: first token whose row of F has not been done, of the micro-batch now in F */
    float *head_dx;             /* head: [tile, E] */
    float *head_forward;        /* head: the F rows' chain of d(weight) */
    float *embedding_rows;      /* [batch * T, E] gradient of the embedding's output in canonical order (sequence, token
                                   descending), or the other end's */
    int32_t *tokens, *targets, *positions;      /* [batch * T] in row order of the micro-batches */
    int32_t *chain_tokens, *chain_positions;    /* [batch * T] in canonical order */
    double *sequence_loss;                 /* [batch] */
    int train;
};

typedef struct {
    int q, slice, slot, gslot;
    const tp_micro *micro;
    int64_t first, last;        /* sequences [first, last) of the micro-batch */
    int64_t begin, end;         /* tokens [begin, end) of this slice */
    int64_t first_row, rows;    /* of the slice in the micro-batch's buffers */
    int64_t batch_row;          /* first row of the micro-batch in tokens, targets, positions */
    int whole;                  /* several sequences and several slices */
} slice_at;

slice_at
tp_stage_at(const tp_stage *stage, int micro, int slice, tp_half half, int slot, int gslot);
/* Row in the micro-batch's buffers. */
static inline int64_t
tp_stage_row(const tp_stage *stage, const slice_at *at, int64_t token, int64_t sequence)
{
    return tp_micro_row(at->micro, stage->config.slicing->seq_len, token, sequence);
}

/* Parts of a stage in an arena; base NULL counts only. */
size_t
tp_stage_layout(tp_stage *stage, char *base);

void
tp_block_forward(tp_stage *stage, int block, const slice_at *at);
void
tp_block_input_gradient(tp_stage *stage, int block, const slice_at *at);
void
tp_block_weight_gradient(tp_stage *stage, int block, const slice_at *at);

void
tp_head_forward(tp_stage *stage, int block, const slice_at *at);
void
tp_head_input_gradient(tp_stage *stage, int block, const slice_at *at);
/* d(weight) of the rows of tile 0 (F) or 1 (I) that wait for it, in the order in which they came. */
void
tp_head_flush(tp_stage *stage, int which);

/* dx of LayerNorm for the slice's rows, each sequence's gradient chain walked downwards. dy: [rows, E] of the slice. */
void
tp_block_norm_gradient(tp_stage *stage, int block, const slice_at *at, const float *dy, const float *dresidual);

static inline int64_t
tp_logits_stride(const tp_model *model)
{
    return (model->vocab_size + 15) / 16 * 16; /* floats: rows begin on a cache line */
}

static inline float *
tp_stage_value(const tp_stage *stage, int param)
{
    return param < 0 ? NULL : stage->param[param].value;
}

/* Buffer that the block's output goes to, its gradient comes from. */
static inline float *
tp_block_output(const tp_stage *stage, int block, int slot)
{
    return block + 1 < stage->blocks ? stage->block[block + 1].activations[slot].input : stage->output[slot];
}
static inline float *
tp_block_d_output(const tp_stage *stage, int block, int gslot)
{
    return block + 1 < stage->blocks ? stage->block[block + 1].gradients[gslot].d_input : stage->d_output[gslot];
}

#endif
