/* Products of a warpgroup: wgmma of sm_90a. PTX on the device; in the emulator (cuda/emu/wgmma.c) what the PTX ISA says of the
 * same words (PTX ISA 9.0, section 9.7.15; the fields of a descriptor and the canonical layouts also from NVIDIA/cutlass,
 * cute/arch/mma_sm90_desc.hpp and cute/atom/mma_traits_sm90_gmma.hpp, and the words for one tile that is read both ways from
 * HazyResearch/ThunderKittens, its descriptors of 128-byte tiles).
 *
 * 128 threads, four warps that begin at a multiple of four, compute d += a b of m64 n(N) k16 together. The warp's 16 rows of d lie
 * in its lanes as [N / 8][4] of mma.h's C fragments, and those of a, where it comes from registers, as its A fragment.
 * In shared memory an operand is a tile whose rows of 128 bytes, 64 bf16, lie one behind the other from a multiple of 1024 bytes
 * on, the 16 bytes c of row r at place c ^ (r % 8) ("128-byte swizzle": bits 4 to 6 of an address are changed by bits 7 to 9).
 * What is wider than 64 continues in another such panel. One tile serves twice:
 *   - as A or B whose k runs along the rows ("K-major"): eight rows of m or n are 1024 bytes. The next k16 of a row begins 32
 *     bytes further, and the descriptor's begin with it.
 *   - as B whose n runs along the rows ("MN-major"): eight rows of k are 1024 bytes, the next 64 of n in the panel that lies
 *     `panel` bytes further.
 *
 * Everything is asynchronous. Of registers (d, and a) that a thread has touched, TP_WGMMA_FENCE tells the products that follow;
 * of what it wrote to shared memory, by cp.async too, TP_FENCE_ASYNC does, before the barrier behind which others multiply it
 * (9.7.15.4: products read by the asynchronous proxy; cp.async writes by the generic one). TP_WGMMA_COMMIT closes a group,
 * TP_WGMMA_WAIT(left) waits for all but the last `left`. A compiler sees no more in that than words: TP_WGMMA_PIN(x, n) has it
 * compute what it takes of, or gives to, floats x[n] (_WORDS: words) on the side of the line where it stands. */
#ifndef TP_CUDA_WGMMA_H
#define TP_CUDA_WGMMA_H

#include "cuda/mma.h"

#define TP_WARPGROUP 128

#ifdef __CUDACC__

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TP_HAS_WGMMA 1
#else
#define TP_HAS_WGMMA 0 /* a GPU that cannot: the kernel must not be launched */
#endif

#define TP_WGMMA_D8(kind, d)                                                                                           \
    kind((d)[0]), kind((d)[1]), kind((d)[2]), kind((d)[3]), kind((d)[4]), kind((d)[5]), kind((d)[6]), kind((d)[7])
#define TP_WGMMA_SS_64_(kind, d, a, b, add)                                                                            \
    __asm__ volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; "                                                         \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"                                          \
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                          \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                  \
                     "}, %32, %33, p, 1, 1, 0, 0; }"                                                                   \
                     : TP_WGMMA_D8(kind, (d) + 0), TP_WGMMA_D8(kind, (d) + 8), TP_WGMMA_D8(kind, (d) + 16), TP_WGMMA_D8(kind, (d) + 24)\
                     : "l"(a), "l"(b), "r"(add))
#define TP_WGMMA_SS_128_(kind, d, a, b, add)                                                                           \
    __asm__ volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; "                                                         \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"                                         \
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                          \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                \
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                \
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                  \
                     "}, %64, %65, p, 1, 1, 0, 0; }"                                                                   \
                     : TP_WGMMA_D8(kind, (d) + 0), TP_WGMMA_D8(kind, (d) + 8), TP_WGMMA_D8(kind, (d) + 16), TP_WGMMA_D8(kind, (d) + 24),\
                       TP_WGMMA_D8(kind, (d) + 32), TP_WGMMA_D8(kind, (d) + 40), TP_WGMMA_D8(kind, (d) + 48), TP_WGMMA_D8(kind, (d) + 56)\
                     : "l"(a), "l"(b), "r"(add))
#define TP_WGMMA_RS_64_(kind, d, a, b, add)                                                                            \
    __asm__ volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; "                                                         \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"                                          \
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                          \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                  \
                     "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"                                                     \
                     : TP_WGMMA_D8(kind, (d) + 0), TP_WGMMA_D8(kind, (d) + 8), TP_WGMMA_D8(kind, (d) + 16), TP_WGMMA_D8(kind, (d) + 24)\
                     : "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "l"(b), "r"(add))
#define TP_WGMMA_RS_128_(kind, d, a, b, add)                                                                           \
    __asm__ volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; "                                                         \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"                                         \
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                          \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                \
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                \
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                  \
                     "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"                                                     \
                     : TP_WGMMA_D8(kind, (d) + 0), TP_WGMMA_D8(kind, (d) + 8), TP_WGMMA_D8(kind, (d) + 16), TP_WGMMA_D8(kind, (d) + 24),\
                       TP_WGMMA_D8(kind, (d) + 32), TP_WGMMA_D8(kind, (d) + 40), TP_WGMMA_D8(kind, (d) + 48), TP_WGMMA_D8(kind, (d) + 56)\
                     : "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "l"(b), "r"(add))

/* A first product writes d and does not read it: else ptxas would keep what d was before, and products one after another. */
#define TP_WGMMA_FIRST_64(d, a, b) TP_WGMMA_SS_64_("=f", d, a, b, 0)
#define TP_WGMMA_FIRST_128(d, a, b) TP_WGMMA_SS_128_("=f", d, a, b, 0)
#define TP_WGMMA_SS_64(d, a, b) TP_WGMMA_SS_64_("+f", d, a, b, 1)
#define TP_WGMMA_SS_128(d, a, b) TP_WGMMA_SS_128_("+f", d, a, b, 1)
#define TP_WGMMA_RS_64(d, a, b) TP_WGMMA_RS_64_("+f", d, a, b, 1)
#define TP_WGMMA_RS_128(d, a, b) TP_WGMMA_RS_128_("+f", d, a, b, 1)
#define TP_WGMMA_FENCE() __asm__ volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define TP_WGMMA_COMMIT() __asm__ volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define TP_WGMMA_WAIT(left) __asm__ volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory")
#define TP_FENCE_ASYNC() __asm__ volatile("fence.proxy.async.shared::cta;" ::: "memory")

TP_DEVICE void
tp_wgmma_pin(float *x, int n)
{
    TP_UNROLL
    for (int i = 0; i < n; i++)
        __asm__ volatile("" : "+f"(x[i])::"memory");
}

TP_DEVICE void
tp_wgmma_pin_words(uint32_t *x, int n)
{
    TP_UNROLL
    for (int i = 0; i < n; i++)
        __asm__ volatile("" : "+r"(x[i])::"memory");
}

/* x, which is not below 0, is computed before the waits that follow, of which ptxas would else do those first that stand behind it
 * (as its SASS shows): whoever is below 0 sleeps, and nobody is. */
#define TP_WGMMA_NOT_LATER(x) \
    __asm__ volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p nanosleep.u32 1; }" ::"f"(x) : "memory")
#define TP_WGMMA_PIN(x, n) tp_wgmma_pin((x), (n))
#define TP_WGMMA_PIN_WORDS(x, n) tp_wgmma_pin_words((x), (n))

#else

#define TP_HAS_WGMMA 1

uint32_t
tp_shared_address(const void *shared);
/* One of 128 lanes: a NULL: by its descriptor. */
void
tp_simt_wgmma(const char *site, int n, float *d, const uint32_t *a, uint64_t a_tile, uint64_t b_tile, int add);
void
tp_simt_wgmma_fence(const char *site);
void
tp_simt_wgmma_commit(const char *site);
void
tp_simt_wgmma_wait(const char *site, int left);
/* n words of this lane's registers. */
void
tp_simt_wgmma_pin(const void *x, int n);
void
tp_simt_fence_async(void);

#define TP_WGMMA_FIRST_64(d, a, b) tp_simt_wgmma(TP_SITE, 64, (d), NULL, (a), (b), 0)
#define TP_WGMMA_FIRST_128(d, a, b) tp_simt_wgmma(TP_SITE, 128, (d), NULL, (a), (b), 0)
#define TP_WGMMA_SS_64(d, a, b) tp_simt_wgmma(TP_SITE, 64, (d), NULL, (a), (b), 1)
#define TP_WGMMA_SS_128(d, a, b) tp_simt_wgmma(TP_SITE, 128, (d), NULL, (a), (b), 1)
#define TP_WGMMA_RS_64(d, a, b) tp_simt_wgmma(TP_SITE, 64, (d), (a), 0, (b), 1)
#define TP_WGMMA_RS_128(d, a, b) tp_simt_wgmma(TP_SITE, 128, (d), (a), 0, (b), 1)
#define TP_WGMMA_FENCE() tp_simt_wgmma_fence(TP_SITE)
#define TP_WGMMA_COMMIT() tp_simt_wgmma_commit(TP_SITE)
#define TP_WGMMA_WAIT(left) tp_simt_wgmma_wait(TP_SITE, (left))
#define TP_FENCE_ASYNC() tp_simt_fence_async()
#define TP_WGMMA_NOT_LATER(x) ((void)(x))
#define TP_WGMMA_PIN(x, n) tp_simt_wgmma_pin((x), (n))
#define TP_WGMMA_PIN_WORDS(x, n) tp_simt_wgmma_pin((x), (n))

#endif

#define TP_WGMMA_NAME_(kind, n) TP_WGMMA_##kind##_##n
#define TP_WGMMA_NAME(kind, n) TP_WGMMA_NAME_(kind, n)
/* m64 n(n) k16. FIRST: d = a b, SS: d += a b, a and b descriptors, both K-major. RS: d += a b, a four words, b a descriptor,
 * MN-major. */
#define TP_WGMMA_FIRST(n, d, a, b) TP_WGMMA_NAME(FIRST, n)(d, a, b)
#define TP_WGMMA_SS(n, d, a, b) TP_WGMMA_NAME(SS, n)(d, a, b)
#define TP_WGMMA_RS(n, d, a, b) TP_WGMMA_NAME(RS, n)(d, a, b)

/* The warpgroup of this thread, as lane 0 has it: so a compiler knows that a warp has one, and keeps descriptors made of it in
 * uniform registers, where products read them. Of TP_THREAD it fetched both words anew for every product (R2UR in its SASS). Every
 * lane comes. (cutlass/cutlass.h, canonical_warp_group_idx.) */
TP_DEVICE int
tp_warpgroup(void)
{
    return TP_SHFL_I(TP_THREAD / TP_WARPGROUP, 0);
}

/* Of the operand that begins at `tile`. Bits 0 to 13: its address; 16 to 29: bytes to the next panel (MN-major alone; 1 stands in
 * for none); 32 to 45: bytes to the next eight rows; all without their last four bits. 49 to 51: where in a pattern of 1024 bytes
 * it begins, 0 here. 62 to 63: 1, swizzled by 128 bytes. */
TP_DEVICE uint64_t
tp_wgmma_tile(const void *tile, int panel)
{
    uint32_t at = tp_shared_address(tile);
    return (at & 0x3ffff) >> 4 | (uint64_t)(panel ? panel >> 4 : 1) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* The same, so many bytes further. */
TP_DEVICE uint64_t
tp_wgmma_further(uint64_t tile, int bytes)
{
    return tile + (uint64_t)(bytes >> 4);
}

#endif
