#include "cuda/attention_wgmma.h"

#define HD 128
#define GROUPS 1
#define STAGES 2
#define TURNS 0
#define LOADER 0
#define COMPUTER 0
#include "cuda/attention_ring.inc"

#define HD 128
#define GROUPS 2
#define STAGES 2
#define TURNS 0
#define LOADER 56
#define COMPUTER 224
#include "cuda/attention_ring.inc"

#define HD 64
#define GROUPS 2
#define STAGES 4
#define TURNS 1
#define LOADER 56
#define COMPUTER 224
#include "cuda/attention_ring.inc"

#define HD 64
#define GROUPS 3
#define STAGES 2
#define TURNS 1
#define LOADER 32
#define COMPUTER 160
#include "cuda/attention_ring.inc"

tp_status
tp_attention_forward_ring(tp_stream stream, const tp_attention_args *args, int warpgroups)
{
    if (args->dim > 64)
        return warpgroups > 1 ? forward_ring_128_2(stream, args) : forward_ring_128_1(stream, args);
    return warpgroups > 2 ? forward_ring_64_3(stream, args) : forward_ring_64_2(stream, args);
}
