#include "cuda/attention_ring.h"

#define HD 128
#define GROUPS 2
#define STAGES 4
#define TURNS 1
#define AHEAD 0
#define VARIANT 128_2
#define LOADER 56
#define COMPUTER 224
#define LOADER_KV 40
#define COMPUTER_KV 232
#include "cuda/attention_ring_backward.inc"

#define HD 128
#define GROUPS 2
#define STAGES 4
#define TURNS 0
#define AHEAD 0
#define VARIANT 128_free
#define LOADER 56
#define COMPUTER 224
#define LOADER_KV 40
#define COMPUTER_KV 232
#include "cuda/attention_ring_backward.inc"

#define HD 64
#define GROUPS 2
#define STAGES 4
#define TURNS 1
#define AHEAD 1
#define VARIANT 64_2
#define LOADER 56
#define COMPUTER 224
#define LOADER_KV 56
#define COMPUTER_KV 224
#include "cuda/attention_ring_backward.inc"

#define HD 64
#define GROUPS 2
#define STAGES 4
#define TURNS 0
#define AHEAD 0
#define VARIANT 64_free
#define LOADER 56
#define COMPUTER 224
#define LOADER_KV 56
#define COMPUTER_KV 224
#include "cuda/attention_ring_backward.inc"

#define HD 64
#define GROUPS 3
#define STAGES 4
#define TURNS 1
#define AHEAD 0
#define VARIANT 64_3
#define LOADER 32
#define COMPUTER 160
#define LOADER_KV 32
#define COMPUTER_KV 160
#include "cuda/attention_ring_backward.inc"

typedef tp_status backward_kernel(tp_stream, const tp_attention_args *, int64_t);

/* variant: 2 n, a block to each tile, or 2 n + 1, TP_CUDA_RING_BLOCKS blocks; n as below. */
tp_status
tp_attention_backward_ring(tp_stream stream, const tp_attention_args *args, int variant)
{
    static backward_kernel *const dq[2][3] = {{dq_ring_64_2, dq_ring_64_free, dq_ring_64_3},
                                              {dq_ring_128_2, dq_ring_128_free, dq_ring_128_2}};
    static backward_kernel *const dkdv[2][3] = {{dkdv_ring_64_2, dkdv_ring_64_free, dkdv_ring_64_3},
                                                {dkdv_ring_128_2, dkdv_ring_128_free, dkdv_ring_128_2}};
    int64_t blocks = variant % 2 ? TP_CUDA_RING_BLOCKS : 0;
    TP_TRY(dq[args->dim > 64][variant / 2 % 3](stream, args, blocks));
    return dkdv[args->dim > 64][variant / 2 % 3](stream, args, blocks);
}
