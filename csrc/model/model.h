/* A GPT-2 as a list of blocks, its parameters by name, and how a batch is cut into micro-batches and token slices.
 *
 * Blocks in order: Embedding (index 0), then Attention and FFN of each layer, then Head (final LayerNorm, logits, loss).
 * A pipeline stage is a range of blocks; only the residual stream [tokens][sequences][E] crosses a boundary. */
#ifndef TP_MODEL_MODEL_H
#define TP_MODEL_MODEL_H

#include <stdint.h>

#include "csrc/base/status.h"

#define TP_MODEL_LAYERS 16000 /* most: stages and blocks are 16-bit in the IR */
/* Most, so that no sum of bytes is beyond 64 bits: parameters, of 16 bytes and more each; and numbers that all slots of a step hold
 * between the model's blocks, with each of which come 19 more of an FFN's. */
#define TP_MODEL_PARAMS 0x1p53
#define TP_MODEL_NUMBERS 0x1p53

typedef enum { TP_EMBEDDING, TP_ATTENTION, TP_FFN, TP_HEAD, TP_BLOCK_KINDS } tp_block_kind;

typedef struct {
    int32_t n_layer, n_head, n_embd, vocab_size, block_size;
    int32_t bias;         /* 0 or 1: biases in linear layers and LayerNorms */
    int32_t tie_weights;  /* 0 or 1: the head multiplies with wte */
} tp_model;

/* EVALUE naming the field, its value and what would be right (n_head divides n_embd, all >= 1, no more than TP_MODEL_PARAMS). */
TP_MUST_USE tp_status
tp_model_check(const tp_model *model);
int
tp_model_blocks(const tp_model *model); /* 2 n_layer + 2 */
tp_block_kind
tp_model_block_kind(const tp_model *model, int block);

/* ---- parameters: names and shapes of Hugging Face's GPT2LMHeadModel ------------------------------------------------ */

typedef enum { TP_INIT_NORMAL, TP_INIT_RESIDUAL, TP_INIT_ZERO, TP_INIT_ONE } tp_init;

typedef struct {
    char name[64];        /* "transformer.h.0.attn.c_attn.weight"; an untied head is "lm_head.weight" */
    int32_t length;       /* of the name */
    int64_t rows, cols;   /* a vector is rows = 1; Conv1D weights are [in, out]; wte, wpe, lm_head [V or T, E] */
    int32_t is_matrix;    /* matrices take weight decay, vectors do not */
    int32_t block;        /* the block it belongs to (a tied wte: Embedding) */
    tp_init init;         /* normal 0.02; residual projections 0.02 / sqrt(2 n_layer) */
} tp_param;

int
tp_model_params(const tp_model *model); /* how many tensors, canonical order: wte, wpe, layer 0.., ln_f, lm_head */
void
tp_model_param(const tp_model *model, int index, tp_param *out);
/* Index of the first tensor of `block`; of one past the last block, the number of tensors. */
int
tp_model_first_param(const tp_model *model, int block);
/* Philox values of a parameter, row-major: a function of (seed, name, index) alone. */
void
tp_model_init_param(const tp_model *model, const tp_param *param, uint64_t seed, float *out);

/* ---- slicing -------------------------------------------------------------------------------------------------------- */

typedef struct {
    int32_t batch;        /* sequences in this micro-batch */
    int32_t slices;
    int32_t first_seq;    /* index in the batch of its first sequence */
    int32_t half;         /* sequences of the first half where forward may be done in halves, else 0 */
    const int32_t *start; /* [slices + 1] token offsets; start[0] = 0, start[slices] = seq_len */
} tp_micro;

typedef struct {
    int32_t seq_len, batch, micros, max_batch;
    int64_t max_rows; /* most rows (tokens x sequences) of a slice */
    tp_micro *micro;  /* [micros] */
    int32_t *starts;  /* storage of every start */
} tp_slicing;

/* batches[micros], slices[micros]; lengths: all micro-batches' slice lengths in order. EVALUE: a length < 1, lengths
 * that do not sum to seq_len, micro-batches that do not sum to batch. Ended by tp_slicing_close. */
TP_MUST_USE tp_status
tp_slicing_open(int32_t seq_len, int32_t batch, int32_t micros, const int32_t *batches, const int32_t *slices,
                const int32_t *lengths, tp_slicing **out);
/* Let the forward of a micro-batch be done in two halves along the batch, the first not the smaller; its rows are then
 * laid out half by half. EVALUE: it has one sequence, or several slices. */
TP_MUST_USE tp_status
tp_slicing_halve(tp_slicing *slicing, int micro);
/* EVALUE where a step of this model has more than TP_MODEL_NUMBERS. */
TP_MUST_USE tp_status
tp_slicing_check(const tp_slicing *slicing, const tp_model *model);
/* Row of token t of sequence s in the buffers of a micro-batch, and the rows from there to the sequence's next token. */
static inline int64_t
tp_micro_row_step(const tp_micro *micro, int64_t s)
{
    return s < micro->half ? micro->half : micro->batch - micro->half;
}
static inline int64_t
tp_micro_row(const tp_micro *micro, int64_t seq_len, int64_t t, int64_t s)
{
    int64_t before = s < micro->half ? 0 : micro->half; /* sequences of the part before */
    return before * seq_len + t * tp_micro_row_step(micro, s) + s - before;
}
void
tp_slicing_close(tp_slicing *slicing);

#endif
