#include "cuda/attention.h"

#include "cuda/mma.h"

/* What the tiles of a head read over and over, K and V or Q and dO, shall stay in the L2 cache, of which 32 MB are right for 50
 * (Dao-AILab/flash-attention, hopper/tile_scheduler.hpp). Blocks begin in the order x, y, z: of so many heads as fit (x) the
 * longest tiles first (y), then of the next (z). All heads at once would stream theirs from memory for every tile: 2 x 64 rows of
 * 128 bf16 for 64 queries are 64 FLOP a byte. */
#ifndef TP_CUDA_CACHED_BYTES
#define TP_CUDA_CACHED_BYTES (32 << 20)
#endif

static tp_grid
grid_of(const tp_attention_args *args, int64_t tiles, int64_t rows)
{
    int64_t fit = (int64_t)TP_CUDA_CACHED_BYTES / (rows * args->dim * 4), most = fit < 1 ? 1 : fit;
    int64_t groups = (args->items + most - 1) / most;
    groups = groups < 65535 ? groups : 65535;
    return tp_grid3((args->items + groups - 1) / groups, tiles, groups);
}

/* Of the last group some may be too many. */
TP_DEVICE int
block_item(void)
{
    return TP_BLOCK_Z * TP_BLOCKS_X + TP_BLOCK_X;
}

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
