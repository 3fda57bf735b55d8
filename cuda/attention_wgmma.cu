#include "cuda/attention_wgmma.h"

#define HD 64
#define FORWARD 1
#include "cuda/attention_wgmma.inc"

#define HD 128
#define FORWARD 0
#include "cuda/attention_wgmma.inc"

/* Which kernel: warpgroups of a block that multiply, 64 rows each. By TFLOP/s on an H200 of every kernel, asked for by groups,
 * 16384 tokens in sequences of 2048 to 8192, in slices of 256 to 1024 and whole, 32 heads of D = 64 and 16 of D = 128
 * (2026-11-26, benchmarks/results/h200-2026-11-26-variants.json; what the rule gives: h200-2026-11-26.json, "attention speed").
 *
 * D above 64: two that do not load, but where blocks of one, of 64 rows, are no more than the SMs: by two half of these would
 * have no work. 8192 tokens in slices of 256: forward 348 by one and 296 by two, backward 265 and 234; of 512, twice the tiles:
 * 363 and 548, 412 and 438. Four quarters of the GPU, 2048 tokens in slices of 512, us a layer of the forward, dk and dv, and dq:
 * by one 58, 61 and 53, by two 40, 67 and 44 (h200-2026-11-26-parts.json, "kernels").
 * D up to 64: blocks of one are several to an SM and the fastest where rows have few keys; of more, two that do not load; three
 * where slices are long, since tiles of 192 rows fill short ones badly. By one, two and three, forward: 2048 tokens in slices of
 * 256 330, 290 and 229; 8192 in slices of 256 270, 372 and 275, whole 421, 415 and 466. Backward: 270, 265 and 217; 292, 316 and
 * 252, whole 374, 365 and 408.
 *
 * BITS: the forward of D up to 64 has tiles of 64 keys by one warpgroup and of 128 by two or three, and a row's bits must not
 * depend on the slices: between one and more `total` alone may choose. All else shows in the time alone. */
int
tp_attention_warpgroups(int forward, int dim, int64_t rows, int64_t total, int64_t tiles128, int multiprocessors)
{
    if (dim > 64)
        return 2 * tiles128 <= multiprocessors ? 1 : 2;
    if (forward)
        return total <= 4096 ? 1 : rows < 2048 ? 2 : 3;
    if (rows >= 2048 || (rows >= 1024 && total > 2048))
        return 3;
    return total > 2048 ? 2 : 1;
}

static int
warpgroups_for(const tp_attention_args *args, int forward)
{
    if (tp_attention_forced())
        return tp_attention_forced();
    return tp_attention_warpgroups(forward, args->dim, args->last - args->first, args->total, args->items * tiles_of(args, 128),
                                   args->multiprocessors);
}

tp_status
tp_attention_forward_wgmma(tp_stream stream, const tp_attention_args *args)
{
    int warpgroups = warpgroups_for(args, 1);
    if (args->dim > 64 || warpgroups > 1)
        return tp_attention_forward_ring(stream, args, warpgroups);
    return forward_wgmma_64(stream, args);
}

tp_status
tp_attention_backward_wgmma(tp_stream stream, const tp_attention_args *args)
{
    int warpgroups = warpgroups_for(args, 0);
    if (warpgroups > 1)
        return tp_attention_backward_ring(stream, args, warpgroups);
    return args->dim > 64 ? backward_wgmma_128(stream, args) : backward_wgmma_64(stream, args);
}
