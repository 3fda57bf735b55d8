#include "cuda/attention_ring.h"

#define HD 128
#define KEYS 128
#define GROUPS 2
#define STAGES 2
#define BLOCKS 1
#define TURNS 1
#define VARIANT 128_2
#define LOADER 56
#define COMPUTER 224
#include "cuda/attention_ring.inc"

#define HD 128
#define KEYS 128
#define GROUPS 2
#define STAGES 2
#define BLOCKS 1
#define TURNS 0
#define VARIANT 128_free
#define LOADER 56
#define COMPUTER 224
#include "cuda/attention_ring.inc"

#define HD 128
#define KEYS 128
#define GROUPS 1
#define STAGES 2
#define BLOCKS 1
#define TURNS 0
#define VARIANT 128_1
#define LOADER 64
#define COMPUTER 248
#include "cuda/attention_ring.inc"

#define HD 64
#define KEYS 128
#define GROUPS 3
#define STAGES 2
#define BLOCKS 1
#define TURNS 1
#define VARIANT 64_3
#define LOADER 32
#define COMPUTER 160
#include "cuda/attention_ring.inc"

#define HD 64
#define KEYS 128
#define GROUPS 2
#define STAGES 4
#define BLOCKS 1
#define TURNS 1
#define VARIANT 64_2
#define LOADER 56
#define COMPUTER 224
#include "cuda/attention_ring.inc"

#define HD 64
#define KEYS 64
#define GROUPS 3
#define STAGES 4
#define BLOCKS 1
#define TURNS 1
#define VARIANT 64_short
#define LOADER 32
#define COMPUTER 160
#include "cuda/attention_ring.inc"

/* variant: 2 n, a block to each tile, or 2 n + 1, TP_CUDA_RING_BLOCKS blocks; n as below. */
tp_status
tp_attention_forward_ring(tp_stream stream, const tp_attention_args *args, int variant)
{
    static tp_status (*const kernels[2][3])(tp_stream, const tp_attention_args *, int64_t) = {
        {forward_ring_64_3, forward_ring_64_2, forward_ring_64_short},
        {forward_ring_128_2, forward_ring_128_free, forward_ring_128_1},
    };
    return kernels[args->dim > 64][variant / 2 % 3](stream, args, variant % 2 ? TP_CUDA_RING_BLOCKS : 0);
}
