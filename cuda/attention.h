/* Inside the attention kernels: attention.cu checks the arguments and chooses; attention_bf16.cu, attention_wgmma.cu and
 * attention_f32.cu run.
 *
 * Causal attention of a slice over its context, tile by tile (Dao et al. 2022; Dao 2023), backward by pulling: dQ of the slice
 * from keys [0, C + S), dK and dV of the slice from queries [C, T). No atomics, and no sum whose order a slicing could change:
 * tiles of keys and of queries begin at absolute multiples of their size, a row always has the same place in its tile, and
 * what a row may not see enters as exact zeros. So a row's bits are the same in every slice that contains it. */
#ifndef TP_CUDA_ATTENTION_H
#define TP_CUDA_ATTENTION_H

#include "cuda/simt.h"

#define TP_ATTENTION_LOG2E 1.4426950408889634f
#define TP_ATTENTION_THREADS 128
#define TP_ATTENTION_KEPT_BYTES (64 * 64 * 2) /* of a tile of dS */
#define TP_ATTENTION_MOST 0x1p22f /* an lse, less than */

typedef struct {
    int heads, dim, first, last, total; /* the slice's rows [first, last) of [0, total) tokens */
    int multiprocessors;
    int64_t items;                      /* sequences x heads */
    int64_t row, o_row;                 /* elements between tokens of q, k, v, and of o */
    int64_t sequence, o_sequence;       /* elements between sequences */
    float scale, scale2;                /* 1 / sqrt(dim); for exponents of two */
    const void *q, *k, *v, *o, *d_o;
    const float *lse, *delta;
    void *out, *dq, *dk, *dv;
    float *lse_out, *delta_out;
    uint32_t *ds; /* of heads [0, kept): dS of the slice's own pairs, once made for d(k) and then read for d(q) (attention_wgmma.h) */
    int64_t kept;
} tp_attention_args;

/* Row 0 of a (sequence, head): elements from the tensors' begin, and its row of lse and delta. */
typedef struct {
    int64_t at, o_at, stat;
} tp_attention_head;

TP_DEVICE tp_attention_head
tp_attention_head_of(const tp_attention_args *a, int item)
{
    int b = item / a->heads, h = item % a->heads;
    tp_attention_head head;
    head.at = b * a->sequence + (int64_t)h * a->dim;
    head.o_at = b * a->o_sequence + (int64_t)h * a->dim;
    head.stat = (int64_t)item * a->total;
    return head;
}

/* A row's lse, or NaN where it is so large that P is not to be had back from it: the rounding of an lse, and of its product with
 * log2(e), makes P of bf16 too large or too small by a 50th at scores of 2^18 and by a quarter at 2^22 (fp32: by a 200th and a 12th),
 * by twice that with each doubling; at 1e9 dV was 1e24 times too large, and finite. o is NaN then, too, and the step ends with words. */
TP_DEVICE float
tp_attention_lse(float top, float scale, float sum)
{
    const float lse = tp_fmaf(top, scale, tp_logf(sum));
    return fabsf(lse) < TP_ATTENTION_MOST ? lse : NAN;
}

/* The launchers of one type; the arguments are sound. Backward expects delta written. */
tp_status
tp_attention_forward_bf16(tp_stream stream, const tp_attention_args *args);
tp_status
tp_attention_backward_bf16(tp_stream stream, const tp_attention_args *args);
tp_status
tp_attention_forward_wgmma(tp_stream stream, const tp_attention_args *args);
tp_status
tp_attention_backward_wgmma(tp_stream stream, const tp_attention_args *args);
/* By warpgroups of a block that multiply beside one that loads: 1 or 2 forward and 2 backward for D above 64; else 2 or 3. More
 * or fewer are as the most or fewest. */
tp_status
tp_attention_forward_ring(tp_stream stream, const tp_attention_args *args, int warpgroups);
tp_status
tp_attention_backward_ring(tp_stream stream, const tp_attention_args *args, int warpgroups);
/* Of wgmma, where nothing is forced: how many multiply, for a slice of `rows` and so many tiles of 128 rows in all its heads on
 * so many multiprocessors. */
int
tp_attention_warpgroups(int forward, int dim, int64_t rows, int64_t total, int64_t tiles128, int multiprocessors);
/* The last argument of tp_cuda_attention_force. */
int
tp_attention_forced(void);
tp_status
tp_attention_forward_f32(tp_stream stream, const tp_attention_args *args);
tp_status
tp_attention_backward_f32(tp_stream stream, const tp_attention_args *args);

#endif
