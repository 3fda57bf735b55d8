#include "cuda/attention_bf16.h"

#include "cuda/wgmma.h"

#define THREADS (2 * TP_WARPGROUP)
#define ROWS 128

/* Products begin, behind all that was done to their sums d[n] and to the words f[m] of an A operand; all products are there. */
#define BEGIN(d, n, f, m)      \
    TP_WGMMA_PIN(d, n);        \
    TP_WGMMA_PIN_WORDS(f, m);  \
    TP_WGMMA_FENCE()
#define END(d, n, f, m)   \
    TP_WGMMA_WAIT(0);     \
    TP_WGMMA_PIN(d, n);   \
    TP_WGMMA_PIN_WORDS(f, m)

TP_DEVICE void
clear(float *sums, int n)
{
    TP_UNROLL
    for (int i = 0; i < n; i++)
        sums[i] = 0.0f;
}

#define HD 64
#define KEYS 64
#define BLOCKS 2
#include "cuda/attention_wgmma.inc"

#define HD 128
#define KEYS 128
#define BLOCKS 1
#include "cuda/attention_wgmma.inc"

tp_status
tp_attention_forward_wgmma(tp_stream stream, const tp_attention_args *args)
{
    return args->dim > 64 ? forward_wgmma_128(stream, args) : forward_wgmma_64(stream, args);
}

tp_status
tp_attention_backward_wgmma(tp_stream stream, const tp_attention_args *args)
{
    return args->dim > 64 ? backward_wgmma_128(stream, args) : backward_wgmma_64(stream, args);
}
