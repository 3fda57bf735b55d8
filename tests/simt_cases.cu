/* Kernels, right and wrong, that test_cuda_attention.py runs on the emulator: what must work, and what must be found. */
#include "cuda/pipeline.h"
#include "cuda/wgmma.h"

typedef struct {
    int fault;
    const float *x;
    float *y;
    const tp_bf16 *a, *b;
} case_args;

tp_status
simt_case(const char *name, int fault, int threads, const float *x, float *y, const tp_bf16 *a, const tp_bf16 *b);

/* Which mistake the block's meetings kernel makes. */
enum { NONE, ENDED, OTHER_BARRIER, WARP_ENDED, WARP_ELSEWHERE, OVERRUN, UNDERRUN, UNWRITTEN, NO_BARRIER, MISALIGNED, OUTSIDE };

/* y[i] = the sum of x over the block, twice by different ways. */
TP_KERNEL(case_sum, case_args)
{
    TP_SHARED(float, part, 32);
    TP_SHARED_DYNAMIC(shared);
    float *all = (float *)(void *)shared, sum = 0.0f, v = TP_LD(a.x + TP_THREAD);
    int odd = TP_THREAD == 37;
    if (a.fault == ENDED && odd)
        return;
    if (a.fault == OTHER_BARRIER && odd)
        TP_SYNC();
    if (a.fault == WARP_ENDED && TP_THREAD / TP_WARP == 1 && !odd)
        v += TP_SHFL_F(v, 0);
    if (a.fault == WARP_ELSEWHERE && TP_THREAD / TP_WARP == 1)
        v += odd ? TP_SHFL_F(v, 0)
                 : TP_SHFL_F(v, 1);
    if (a.fault == OVERRUN && odd)
        all[TP_THREADS] = 0.0f;
    if (a.fault == UNDERRUN && odd)
        part[-1] = 0.0f;
    if (a.fault == MISALIGNED && odd)
        tp_store16(a.y + 1, tp_load16(a.x + 1));
    if (a.fault == OUTSIDE && odd)
        TP_ST(a.y + TP_THREADS, 1.0f);
    if (a.fault != UNWRITTEN || !odd)
        all[TP_THREAD] = v;
    if (a.fault != NO_BARRIER)
        TP_SYNC();
    for (int i = 0; i < TP_THREADS; i++)
        sum += all[i];
    for (int lanes = TP_WARP / 2; lanes; lanes /= 2)
        v += TP_SHFL_XOR_F(v, lanes);
    if (TP_THREAD % TP_WARP == 0)
        part[TP_THREAD / TP_WARP] = v;
    TP_SYNC();
    for (int i = 0; i < TP_THREADS / TP_WARP; i++)
        sum += part[i];
    TP_ST(a.y + TP_THREAD, sum);
}

/* y[0]: 1 where of thread 0 and the last one, one has come before the one in the middle: in every order but some by chance. */
TP_KERNEL(case_middle, case_args)
{
    TP_SHARED_DYNAMIC(shared);
    float *come = (float *)(void *)shared;
    int last = TP_THREADS - 1;
    come[TP_THREAD] = 1.0f; /* else NaN */
    if (TP_THREAD == last / 2)
        TP_ST(a.y, (come[0] == 1.0f) != (come[last] == 1.0f) ? 1.0f : 0.0f);
}

/* y[0]: the block that has come last. fault 1: with more shared memory than there is. */
#define BOUNDED_SHARED (220 * 1024)

TP_KERNEL_BOUNDS(case_bounded, case_args, 64, 1)
{
    TP_SHARED_DYNAMIC(shared);
    ((float *)(void *)shared)[TP_THREAD] = (float)TP_BLOCK_X;
    if (a.fault == 1) {
        TP_SHARED(float, more, 2048);
        more[TP_THREAD] = 0.0f;
    }
    if (TP_THREAD == 0)
        TP_ST(a.y, ((float *)(void *)shared)[0]);
}

/* y[lane] = lane's view of every shuffle. */
TP_KERNEL(case_shuffle, case_args)
{
    int lane = TP_THREAD % TP_WARP;
    float v = TP_LD(a.x + TP_THREAD);
    double d = TP_SHFL_XOR_D(1.0 / 3.0 * v, 5) + TP_SHFL_D((double)v, 3);
    int i = TP_SHFL_XOR_I(1000000007 + lane, 16) + TP_SHFL_I(lane, 31);
    TP_SYNC_WARP();
    TP_ST(a.y + TP_THREAD, (float)d + TP_SHFL_XOR_F(v, 1) + TP_SHFL_F(v, (lane + 1) % TP_WARP) + (float)(i - 1000000007));
}

/* y (16 x 8, fp32) = a (16 x 16) b, b given as 16 x 8 (fault 0: transposed by ldmatrix) or as its transpose 8 x 16 (fault 1),
 * both copied asynchronously; fault 2: read before the copies are there; 3: which nobody waits for. */
TP_KERNEL(case_mma, case_args)
{
    TP_SHARED(tp_bf16, sa, 256);
    TP_SHARED(tp_bf16, sb, 128);
    int lane = TP_THREAD, g = lane / 4, c = lane % 4 * 2;
    uint32_t fa[4], fb[4];
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    TP_COPY16(sa + 8 * lane, a.a + 8 * lane, 16);
    TP_COPY16(sb + 8 * (lane % 16), a.b + 8 * (lane % 16), 16);
    TP_COPY_COMMIT();
    if (a.fault >= 2)
        TP_COPY_WAIT(1);
    else
        TP_COPY_WAIT(0);
    TP_SYNC();
    TP_LDMATRIX(fa, sa + lane % 16 * 16 + lane / 16 * 8);
    if (a.fault == 1)
        TP_LDMATRIX(fb, sb + lane % 8 * 16 + lane / 8 % 2 * 8);
    else
        TP_LDMATRIX_TRANSPOSED(fb, sb + lane % 16 * 8);
    TP_MMA(d, fa, fb);
    TP_UNROLL
    for (int i = 0; i < 4; i++)
        TP_ST(a.y + (g + i / 2 * 8) * 8 + c + i % 2, d[i]);
    if (a.fault != 3)
        TP_COPY_WAIT(0);
}

/* Which two threads the kernel of races lets meet in the dark; 0: none. */
enum { LATE_BARRIER = 1, NO_WARP_BARRIER, OTHER_WARP, REUSED, BLOCKS_WRITE, BLOCKS_READ, IN_FLIGHT, NOT_MET, NOT_WRITTEN, BEHIND };

/* y of a block: rows of x, passed through shared memory from thread to thread, three times. */
TP_KERNEL(case_race, case_args)
{
    TP_SHARED(float, all, 64);
    TP_SHARED(float, copied, 64);
    int i = TP_THREAD, other = i ^ (a.fault == OTHER_WARP ? 32 : 1);
    float v;
    if (a.fault != NOT_WRITTEN || i != 3)
        all[i] = TP_LD(a.x + i);
    if (a.fault != LATE_BARRIER)
        TP_SYNC();
    v = all[63 - i];
    if (a.fault != REUSED)
        TP_SYNC();
    all[i] = v;
    if (a.fault != NO_WARP_BARRIER)
        TP_SYNC_WARP();
    v += all[other];
    TP_COPY4(copied + i, a.x + i, 4);
    TP_COPY_COMMIT();
    if (a.fault == IN_FLIGHT)
        TP_SYNC();
    if (a.fault != IN_FLIGHT)
        TP_COPY_WAIT(0);
    if (a.fault != NOT_MET)
        TP_SYNC();
    v += copied[other];
    if (a.fault == BEHIND && i == 37)
        v += a.x[64];
    TP_COPY_WAIT(0);
    TP_ST(a.y + (a.fault == BLOCKS_WRITE ? i : 64 * TP_BLOCK_X + i), v);
    if (a.fault == BLOCKS_READ && TP_BLOCK_X == 1)
        TP_ST(a.y + 64 + i, v + TP_LD(a.y + i));
}

/* What is wrong with the kernel of a warpgroup's products. */
enum {
    NO_REGISTER_FENCE = 1, NO_COMMIT, EARLY, OVERWRITTEN, OTHER_TILE, GROUP_ENDED, NO_PROXY_FENCE, NO_BLOCK_BARRIER,
    LATE_PROXY_FENCE, FEW_PINNED, CHANGED, UNPINNED,
};
#define CASE_SHARED (48 * 1024)

/* y (64 x n) = 1 + the sum of products; `words` is n, their count, whether A is in registers, and of each A's and B's descriptor.
 * Shared memory is `image`; A in registers are matrices of 64 x 16 at x. */
TP_KERNEL(case_wgmma, case_args)
{
    TP_SHARED_TILES(shared);
    const uint64_t *words = (const uint64_t *)(const void *)a.b;
    const tp_bf16 *matrix = (const tp_bf16 *)(const void *)a.x;
    int n = (int)TP_LD(words), count = (int)TP_LD(words + 1), registers = (int)TP_LD(words + 2), lane = TP_THREAD % TP_WARP;
    int row = TP_THREAD % TP_WARPGROUP / TP_WARP * 16 + lane / 4, odd = TP_THREAD == 37;
    uint32_t fa[4][4];
    float d[64];
    for (int i = 0; i < 64; i++)
        d[i] = 1.0f;
    for (int i = TP_THREAD; i < CASE_SHARED / 16; i += TP_THREADS) {
        TP_COPY16(shared + 16 * i, a.a + 8 * i, 16);
        TP_COPY_COMMIT();
        TP_COPY_WAIT(0);
    }
    if (a.fault != NO_PROXY_FENCE && a.fault != LATE_PROXY_FENCE)
        TP_FENCE_ASYNC();
    if (a.fault != NO_BLOCK_BARRIER)
        TP_SYNC();
    if (a.fault == LATE_PROXY_FENCE)
        TP_FENCE_ASYNC();
    if (a.fault == GROUP_ENDED && odd)
        return;
    for (int p = 0; p < count && registers; p++)
        for (int i = 0; i < 4; i++)
            fa[p][i] = TP_LD((const uint32_t *)(const void *)(matrix + p * 1024 + (row + 8 * (i & 1)) * 16 + 2 * (lane % 4) +
                                                              4 * (i & 2)));
    TP_WGMMA_PIN(d, a.fault == FEW_PINNED && odd ? n / 2 - 1 : n / 2);
    if (registers)
        TP_WGMMA_PIN_WORDS(fa[0], 4 * count);
    if (a.fault != NO_REGISTER_FENCE)
        TP_WGMMA_FENCE();
    if (a.fault == CHANGED && odd && registers)
        fa[count - 1][3] ^= 1;
    else if (a.fault == CHANGED && odd)
        d[3] = 2.0f;
    for (int p = 0; p < count; p++) {
        uint64_t at = TP_LD(words + 3 + 2 * p) + (a.fault == OTHER_TILE && odd ? 2 : 0), bt = TP_LD(words + 4 + 2 * p);
        if (registers && n == 64)
            TP_WGMMA_RS(64, d, fa[p], bt);
        else if (registers)
            TP_WGMMA_RS(128, d, fa[p], bt);
        else if (n == 64)
            TP_WGMMA_SS(64, d, at, bt);
        else
            TP_WGMMA_SS(128, d, at, bt);
    }
    if (a.fault != NO_COMMIT)
        TP_WGMMA_COMMIT();
    if (a.fault == OVERWRITTEN) {
        TP_SYNC();
        ((float *)(void *)shared)[TP_THREAD] = 0.0f;
    }
    if (a.fault != EARLY)
        TP_WGMMA_WAIT(0);
    if (a.fault != EARLY && a.fault != UNPINNED)
        TP_WGMMA_PIN(d, n / 2);
    for (int i = 0; i < n / 2; i++)
        TP_ST(a.y + (row + 4 * (i & 2)) * n + i / 4 * 8 + 2 * (lane % 4) + (i & 1), d[i]);
    TP_WGMMA_WAIT(0);
}

/* What is wrong where one warp loads and another reads. */
enum { NO_FULL = 1, NO_FREE, MANY, TWICE, LEFT, OTHER_COUNT, NO_INIT, NO_LANES, SEVEN, OTHER_WARPS };

/* Four rows of 32 of x, each reversed, are y: warp 0 loads them into two stages, warp 1 reads; then both meet at barrier 1. */
TP_KERNEL(case_pipeline, case_args)
{
    TP_SHARED(float, stages, 64);
    TP_SHARED(uint64_t, full, 2);
    TP_SHARED(uint64_t, is_free, 2);
    int lane = TP_THREAD % TP_WARP, count = a.fault == MANY ? 33 : 32;
    for (int i = 0; i < 2 && TP_THREAD == 0; i++) {
        TP_PHASE_INIT(full + i, count);
        if (a.fault != NO_INIT)
            TP_PHASE_INIT(is_free + i, 1);
    }
    TP_SYNC();
    for (int n = 0; n < 4 && TP_THREAD < TP_WARP; n++) {
        if (a.fault != NO_FREE)
            TP_PHASE_WAIT(is_free + n % 2, (n / 2 & 1) ^ 1);
        TP_COPY4(stages + n % 2 * 32 + lane, a.x + 32 * n + lane, 4);
        TP_PHASE_COPIES(full + n % 2);
    }
    for (int n = 0; n < 4 && TP_THREAD >= TP_WARP; n++) {
        if (a.fault != NO_FULL)
            TP_PHASE_WAIT(full + n % 2, n / 2 & 1);
        TP_ST(a.y + 32 * n + lane, stages[n % 2 * 32 + 31 - lane]);
        if (a.fault != NO_LANES)
            TP_SYNC_WARP();
        if (lane == 0)
            TP_PHASE_ARRIVE(is_free + n % 2);
    }
    if (TP_THREAD < TP_WARP) {
        TP_COPY_COMMIT();
        TP_COPY_WAIT(0);
    }
    if (TP_THREAD >= TP_WARP && a.fault != OTHER_COUNT)
        TP_NAMED_ARRIVE(1, 64);
    if (TP_THREAD >= TP_WARP && (a.fault == TWICE || a.fault == OTHER_COUNT))
        TP_NAMED_ARRIVE(1, (a.fault == TWICE ? 64 : 32));
    if (TP_THREAD < TP_WARP && a.fault != LEFT)
        TP_NAMED_SYNC(1, 64);
    if (a.fault == SEVEN)
        TP_NAMED_SYNC(16, 64);
    if (a.fault == OTHER_WARPS)
        TP_NAMED_SYNC(2, 32); /* each warp by itself */
}

tp_status
simt_case(const char *name, int fault, int threads, const float *x, float *y, const tp_bf16 *a, const tp_bf16 *b)
{
    case_args args;
    args.fault = fault;
    args.x = x;
    args.y = y;
    args.a = a;
    args.b = b;
    if (strcmp(name, "sum") == 0)
        return TP_LAUNCH(case_sum, tp_grid1(2), threads, 4 * threads, NULL, args);
    if (strcmp(name, "middle") == 0)
        return TP_LAUNCH(case_middle, tp_grid1(1), threads, 4 * threads, NULL, args);
    if (strcmp(name, "bounded") == 0)
        return TP_LAUNCH(case_bounded, tp_grid1(5), threads, BOUNDED_SHARED, NULL, args);
    if (strcmp(name, "shuffle") == 0)
        return TP_LAUNCH(case_shuffle, tp_grid1(1), threads, 0, NULL, args);
    if (strcmp(name, "race") == 0)
        return TP_LAUNCH(case_race, tp_grid1(2), 64, 0, NULL, args);
    if (strcmp(name, "wgmma") == 0)
        return TP_LAUNCH(case_wgmma, tp_grid1(1), threads, CASE_SHARED, NULL, args);
    if (strcmp(name, "pipeline") == 0)
        return TP_LAUNCH(case_pipeline, tp_grid1(1), 64, 0, NULL, args);
    return TP_LAUNCH(case_mma, tp_grid1(1), threads, 0, NULL, args);
}
