#include "cuda/attention_bf16.h"

#include "cuda/mma.h"

#define HD 64
#define GROUPS 1
#include "cuda/attention_bf16.inc"

#define HD 64
#define GROUPS 2
#include "cuda/attention_bf16.inc"

#define HD 128
#define GROUPS 1
#include "cuda/attention_bf16.inc"

/* Blocks that fill a large GPU (132 SMs, two a SM). With fewer, smaller tiles use more of it. */
#define FULL 264

static int forced_groups;

void
tp_cuda_attention_force(int groups)
{
    forced_groups = groups;
}

int
tp_attention_forced(void)
{
    return forced_groups;
}

/* The choice shows in the time alone: a row's bits are the same. */
static int
groups_for(const tp_attention_args *args)
{
    int64_t rows = args->last - args->first;
    if (forced_groups)
        return forced_groups;
    return args->items * (rows / 128) >= FULL ? 2 : 1;
}

tp_status
tp_attention_forward_bf16(tp_stream stream, const tp_attention_args *args)
{
    if (args->dim > 64)
        return forward_128_1(stream, args);
    return groups_for(args) == 2 ? forward_64_2(stream, args) : forward_64_1(stream, args);
}

tp_status
tp_attention_backward_bf16(tp_stream stream, const tp_attention_args *args)
{
    if (args->dim > 64)
        return backward_128_1(stream, args);
    return groups_for(args) == 2 ? backward_64_2(stream, args) : backward_64_1(stream, args);
}
