/* One pipeline stage on the CPU (stage_ops.h is the seam through which the engine sees it): a range of blocks with their
 * parameters, the activations of the micro-batches in flight, and the forward, input-gradient and weight-gradient work of
 * one token slice.
 *
 * Slicing invariance. Every sum over tokens is a chain over "sequence ascending, token descending", whatever the slices,
 * the micro-batches, the stages and the schedule, provided that each stage sees micro-batches ascending in F, in I and in W
 * and slices ascending in F, descending in I and W (the checker's rules). LayerNorm gradients are chained per sequence
 * and then added. Where a micro-batch has several sequences AND several slices ("whole" below), the weight gradients of
 * all its slices are computed at slice 0, because only then is each sequence complete.
 *
 * The head. Logits of a tile of rows exist only while that tile is worked on; loss and d(input) of a row are done with its
 * logits. Rows at positions t % 3 == 0 are done in F, the others in I, and d(weight) of either as soon as half a tile of them
 * waits: so the head weighs on F and I as 1 to 2, and W has nothing of it, wherever the schedule puts it. Each set has its own chain of weight gradient (F rows
 * ascending, I rows descending) and the two are added at the update. */
#ifndef TP_STAGE_STAGE_H
#define TP_STAGE_STAGE_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/backend/backend.h"
#include "csrc/stage/describe.h"

/* Bytes that tp_stage_open takes from the heap. */
size_t
tp_stage_bytes(const tp_stage_config *config, const tp_backend_ops *ops);
/* Bytes of workspace the backend needs for this stage (one backend serves all stages of a rank: take the largest). */
size_t
tp_stage_workspace_bytes(const tp_stage_config *config, const tp_backend_ops *ops, int members);
/* One allocation from backend->heap. EVALUE: blocks out of range. EMEMORY. The backend must outlive the stage. */
TP_MUST_USE tp_status
tp_stage_open(const tp_stage_config *config, tp_backend *backend, tp_stage **out);
void
tp_stage_close(tp_stage *stage);

/* ---- parameters (describe.h: how many, which, of what shape) -------------------------------------------------------- */
void
tp_stage_import(tp_stage *stage, int i, tp_state state, const float *row_major);
void
tp_stage_export(const tp_stage *stage, int i, tp_state state, float *row_major);
/* Call after imports of values and before the first forward. */
void
tp_stage_pack(tp_stage *stage);

/* ---- a step -------------------------------------------------------------------------------------------------------------- */
/* tokens [batch, seq_len + 1] row-major of the whole batch: inputs and targets. Every stage must be told (first and last
 * read them). train 0: forwards compute the loss of all rows, backward is not allowed. */
void
tp_stage_begin(tp_stage *stage, const int32_t *tokens, int train);
void
tp_stage_forward(tp_stage *stage, int micro, int slice, tp_half half, int activation_slot);
void
tp_stage_input_gradient(tp_stage *stage, int micro, int slice, int activation_slot, int gradient_slot);
void
tp_stage_weight_gradient(tp_stage *stage, int micro, int slice, int activation_slot, int gradient_slot);
/* Sum of -log p over the batch in canonical order, after every F (eval) or I (training); only on the head's stage. */
double
tp_stage_loss(const tp_stage *stage);

/* ---- update ---------------------------------------------------------------------------------------------------------------- */
/* Once per step, on every stage: adds the head's two halves. */
void
tp_stage_finish_head(tp_stage *stage);
/* What the two ends of a tied wte exchange: the head's stage its weight gradient in value layout, halves added; the
 * embedding's its rows. Each takes what it lacks, then finishes. */
void
tp_stage_tied(tp_stage *stage, tp_tied *out);
/* Completes gradients: a tied or untied wte gets its embedding rows. */
void
tp_stage_finish_gradients(tp_stage *stage);
/* sums[canonical parameter index] = sum of squares of the gradient, for tensors this stage answers for (a tied wte is
 * the head's); others are left alone. */
void
tp_stage_sumsq(tp_stage *stage, double *sums);
/* AdamW on every tensor with gradients scaled by grad_scale, then tp_stage_pack. */
void
tp_stage_update(tp_stage *stage, const tp_adamw *adamw, double grad_scale);

#endif
