#include "cuda/attention_wgmma.h"

#define HD 128
#define GROUPS 2
#define TURNS 0
#define AHEAD 0
#define LOADER 56
#define COMPUTER 224
#define LOADER_KV 40
#define COMPUTER_KV 232
#include "cuda/attention_ring_backward.inc"

#define HD 64
#define GROUPS 2
#define TURNS 1
#define AHEAD 1
#define LOADER 56
#define COMPUTER 224
#define LOADER_KV 56
#define COMPUTER_KV 224
#include "cuda/attention_ring_backward.inc"

#define HD 64
#define GROUPS 3
#define TURNS 1
#define AHEAD 0
#define LOADER 32
#define COMPUTER 160
#define LOADER_KV 32
#define COMPUTER_KV 160
#include "cuda/attention_ring_backward.inc"

tp_status
tp_attention_backward_ring(tp_stream stream, const tp_attention_args *args, int warpgroups)
{
    if (args->dim > 64)
        return backward_ring_128_2(stream, args);
    return warpgroups > 2 ? backward_ring_64_3(stream, args) : backward_ring_64_2(stream, args);
}
