#include "cuda/attention.h"

#include "cuda/mma.h"

#define HD 64
#define GROUPS 1
#include "cuda/attention_bf16.inc"

#define HD 128
#define GROUPS 1
#include "cuda/attention_bf16.inc"

tp_status
tp_attention_forward_bf16(tp_stream stream, const tp_attention_args *args)
{
    return args->dim <= 64 ? forward_64(stream, args) : forward_128(stream, args);
}

tp_status
tp_attention_backward_bf16(tp_stream stream, const tp_attention_args *args)
{
    return args->dim <= 64 ? backward_64(stream, args) : backward_128(stream, args);
}
