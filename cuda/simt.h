/* One kernel source, two compilers: nvcc builds it for GPUs, gcc (as C11) for the emulator in cuda/emu/simt.c.
 *
 * A kernel takes one struct by value, `a`, and is written in what C11 and CUDA C++ share: no templates, references, VLAs or
 * compound literals; explicit casts from void *. Variants are made by including a body with macros set.
 *
 *     typedef struct { int64_t n; const float *x; float *y; } double_args;
 *     TP_KERNEL(double_f32, double_args)
 *     {
 *         for (int64_t i = (int64_t)TP_BLOCK_X * TP_THREADS + TP_THREAD; i < a.n; i += (int64_t)TP_BLOCKS_X * TP_THREADS)
 *             TP_ST(a.y + i, 2.0f * TP_LD(a.x + i));
 *     }
 *     return TP_LAUNCH(double_f32, tp_grid1(blocks), 256, 0, stream, args);
 *
 * Rules that the emulator holds a kernel to, each an error that names the kernel and the block (TP_ERUNTIME):
 *  - every thread of a block comes to every TP_SYNC, and every thread of a warp to every shuffle, TP_SYNC_WARP and matrix
 *    operation, at the same line of the source and before it ends; blocks are 1-D, of a multiple of 32 threads, of no more than
 *    TP_KERNEL_BOUNDS says;
 *  - shared memory is written inside its bounds (guard bytes), and begins as NaN (0xFF), not zero;
 *  - what goes through TP_LD, TP_ST, tp_load16, tp_store16 and cp.async is aligned, and lies inside an allocation where the
 *    device's allocations are registered (tp_simt_range_add).
 * Threads of a block run one after another between these meetings, blocks one after another: races are found by a build of
 * its own (cuda/emu/race.c). What it cannot see: bank conflicts, time. */
#ifndef TP_CUDA_SIMT_H
#define TP_CUDA_SIMT_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cuda/kernels.h"

#define TP_TEXT_(x) #x
#define TP_TEXT(x) TP_TEXT_(x)
#define TP_WARP 32
/* Dynamic shared memory that a launch need not ask to be allowed: static arrays count too in CUDA's 48 KB. */
#define TP_SHARED_PLAIN (32 * 1024)

typedef struct {
    uint16_t bits;
} tp_bf16;

/* A grid; every count is at least 0, and a grid of no block launches nothing. */
typedef struct {
    int64_t x, y, z;
} tp_grid;

#ifdef __CUDACC__
/* ---- nvcc ------------------------------------------------------------------------------------------------------------- */

#include <cuda_runtime_api.h>

#define TP_DEVICE static __device__ __forceinline__
#define TP_ALIGN16 __align__(16)
#define TP_MAY_ALIAS
#define TP_RESTRICT __restrict__
#define TP_UNROLL _Pragma("unroll")
#define TP_UNROLL_BY(n) _Pragma(TP_TEXT(unroll n))
#define TP_KEEP_LOOP TP_UNROLL_BY(1)
/* The compiler may not tell what the int is: it computes anew what it would else keep in registers. */
#define TP_OPAQUE(x) __asm__ volatile("" : "+r"(x))
/* Before main: tp_cuda_open loads every kernel, none is loaded in a step. */
#define TP_KNOWN(name)                                       \
    static void __attribute__((constructor)) name##_known(void) \
    {                                                        \
        static tp_cuda_kernel known;                         \
        known.kernel = (const void *)(name);                 \
        tp_cuda_know(&known);                                \
    }
#define TP_KERNEL(name, type)                    \
    static __global__ void name(const type a);   \
    TP_KNOWN(name)                               \
    static __global__ void name(const type a)
/* The compiler keeps to registers that let `blocks` blocks of `threads` live on one SM. */
#define TP_KERNEL_BOUNDS(name, type, threads, blocks)                             \
    static __global__ void __launch_bounds__(threads, blocks) name(const type a); \
    TP_KNOWN(name)                                                                \
    static __global__ void __launch_bounds__(threads, blocks) name(const type a)
/* Above TP_SHARED_PLAIN `smem` is the same at each launch of a kernel: what it may have is the kernel's, so that another thread's
 * launch may change it between our asking and our launch. */
#define TP_LAUNCH(kernel, grid, block, smem, stream, a) \
    tp_simt_launch((const void *)(kernel), TP_TEXT(kernel), (grid), (block), (size_t)(smem), (stream), (void *)&(a))

#define TP_THREAD ((int)threadIdx.x)
#define TP_THREADS ((int)blockDim.x)
#define TP_BLOCK_X ((int)blockIdx.x)
#define TP_BLOCK_Y ((int)blockIdx.y)
#define TP_BLOCK_Z ((int)blockIdx.z)
#define TP_BLOCKS_X ((int)gridDim.x)
#define TP_BLOCKS_Y ((int)gridDim.y)
#define TP_BLOCKS_Z ((int)gridDim.z)

#define TP_SYNC() __syncthreads()
#define TP_SYNC_WARP() __syncwarp()
#define TP_SHFL_XOR_F(v, lanes) __shfl_xor_sync(0xffffffffu, (float)(v), (lanes))
#define TP_SHFL_F(v, lane) __shfl_sync(0xffffffffu, (float)(v), (lane))
#define TP_SHFL_XOR_D(v, lanes) __shfl_xor_sync(0xffffffffu, (double)(v), (lanes))
#define TP_SHFL_D(v, lane) __shfl_sync(0xffffffffu, (double)(v), (lane))
#define TP_SHFL_XOR_I(v, lanes) __shfl_xor_sync(0xffffffffu, (int)(v), (lanes))
#define TP_SHFL_I(v, lane) __shfl_sync(0xffffffffu, (int)(v), (lane))

/* An array of a constant count, shared by the block; take no sizeof of it. */
#define TP_SHARED(type, name, count) __shared__ __align__(16) type name[count]
/* The launch's dynamic shared memory: char *, 16-byte aligned. Launches may ask for up to 227 KB where the GPU has them. */
#define TP_SHARED_DYNAMIC(name) extern __shared__ __align__(16) char name[]
/* The same on 1024 bytes, as tiles that wgmma reads must be; in a file that has no other. */
#define TP_SHARED_TILES(name) extern __shared__ __align__(1024) char name[]

#define TP_LD(pointer) (*(pointer))
#define TP_ST(pointer, value) ((void)(*(pointer) = (value)))
#define TP_CHECKED(pointer, bytes, align) ((void)0)
/* The compiler may know that the pointer, which it finds in memory, is one to global memory. */
#define TP_GLOBAL(pointer) __builtin_assume(__isGlobal(pointer))
/* tp_store16 to global memory by one instruction in any case: nvcc stores a struct word by word here and there. */
#define tp_store16_global(pointer, vec)                                                                           \
    __asm__ volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"                                                   \
                     :: "l"((void *)(pointer)), "r"((vec).word[0]), "r"((vec).word[1]), "r"((vec).word[2]), "r"((vec).word[3]) \
                     : "memory")

TP_DEVICE float
tp_bits_float(uint32_t bits)
{
    return __uint_as_float(bits);
}

TP_DEVICE uint32_t
tp_float_bits(float x)
{
    return __float_as_uint(x);
}

/* Two floats as bf16, to nearest even, the first in the low half. */
TP_DEVICE uint32_t
tp_pack_bf16(float low, float high)
{
    uint32_t both;
    __asm__("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

/* 2^x to about 2 ulp; subnormal results are 0, 2^-inf is 0. */
TP_DEVICE float
tp_exp2f(float x)
{
    float y;
    __asm__("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

TP_DEVICE float
tp_rsqrtf(float x)
{
    return rsqrtf(x);
}

/* 1 / x to 1 ulp, by one instruction where a division takes ten; x and 1 / x normal. */
TP_DEVICE float
tp_reciprocal(float x)
{
    float y;
    __asm__("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The next launch reaches device memory by pointers in this table, and not by its arguments alone. */
#define TP_REACHES(stream, kernel, table, bytes) TP_OK

/* Asynchronous. The error of an earlier kernel of this device shows here too, as the runtime reports it. */
static inline tp_status
tp_simt_launch(const void *kernel, const char *name, tp_grid grid, int block, size_t smem, tp_stream stream, void *args)
{
    cudaError_t error = cudaSuccess;
    void *arguments[1];
    arguments[0] = args;
    if (grid.x <= 0 || grid.y <= 0 || grid.z <= 0)
        return TP_OK;
    if (grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535 || block < TP_WARP || block > 1024 || block % TP_WARP)
        return tp_fail(TP_EVALUE, "CUDA kernel %s: a grid of %lld x %lld x %lld blocks of %d threads cannot be launched",
                       name, (long long)grid.x, (long long)grid.y, (long long)grid.z, block);
    if (smem > TP_SHARED_PLAIN)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (error == cudaSuccess)
        error = cudaLaunchKernel(kernel, dim3((unsigned)grid.x, (unsigned)grid.y, (unsigned)grid.z), dim3((unsigned)block),
                                 arguments, smem, (cudaStream_t)stream);
    if (error == cudaSuccess)
        return tp_cuda_launched(name);
    (void)cudaGetLastError();
    return tp_cuda_check((int)error, name);
}

#else
/* ---- gcc: cuda/emu/simt.c --------------------------------------------------------------------------------------------- */

#define TP_DEVICE static inline
#define TP_ALIGN16 _Alignas(16)
#define TP_MAY_ALIAS __attribute__((may_alias))
#define TP_RESTRICT restrict
#define TP_UNROLL
#define TP_UNROLL_BY(n)
#define TP_KEEP_LOOP
#define TP_OPAQUE(x) ((void)(x))
#if defined(__has_builtin)
#if __has_builtin(__builtin_clear_padding)
#define TP_CLEAR_GAPS(pointer) __builtin_clear_padding(pointer)
#endif
#endif
#ifndef TP_CLEAR_GAPS
#define TP_CLEAR_GAPS(pointer) ((void)(pointer))
#endif
/* Called by no thread of a grid it clears what lies between the arguments' members: a trace tells them by their bytes. */
#define TP_KERNEL(name, type) TP_KERNEL_(name, type, 1024)
#define TP_KERNEL_BOUNDS(name, type, threads, blocks) TP_KERNEL_(name, type, threads)
#define TP_KERNEL_(name, type, most)                     \
    static void name##_body(const type a);               \
    static void name(const void *arguments)              \
    {                                                    \
        if (tp_simt_self == NULL) {                      \
            TP_CLEAR_GAPS((type *)(uintptr_t)arguments); \
        } else {                                         \
            tp_simt_bounds(most);                        \
            name##_body(*(const type *)arguments);       \
        }                                                \
    }                                                    \
    static void name##_body(const type a)
#define TP_LAUNCH(kernel, grid, block, smem, stream, a) \
    tp_simt_launch((kernel), TP_TEXT(kernel), (grid), (block), (size_t)(smem), (stream), &(a), sizeof(a))

/* The order of streams (cuda/emu/order.h) looks at a table's words as at arguments. */
#define TP_REACHES(stream, kernel, table, bytes) tp_simt_reaches((stream), (kernel), (table), (bytes))

/* What a running thread is; the emulator sets tp_simt_self before it runs one. */
typedef struct {
    int thread, threads, block[3], blocks[3];
} tp_simt_thread;
extern __thread tp_simt_thread *tp_simt_self __attribute__((visibility("hidden")));

tp_status
tp_simt_launch(void (*kernel)(const void *), const char *name, tp_grid grid, int block, size_t smem, tp_stream stream,
               const void *args, size_t args_bytes);
tp_status
tp_simt_reaches(tp_stream stream, const char *kernel, const void *table, size_t bytes);
/* Ends the launch with an error if blocks have more threads than the kernel is compiled for. */
void
tp_simt_bounds(int most);
/* The block's shared array of the declaration `site`; the same for every thread. */
void *
tp_simt_shared(const void *site, size_t bytes, const char *name);
void *
tp_simt_dynamic(void);
void
tp_simt_sync(const char *site);
/* Meets the other threads of the warp; the last to come runs work(lanes), lanes[i] being what lane i brought. */
void
tp_simt_meet(const char *site, void (*work)(void **lanes), void *mine);
double
tp_simt_shuffle(const char *site, double value, int lane);
/* Ends the launch with an error unless the address is aligned and lies in a registered range (if any is registered). */
void
tp_simt_check(const char *site, const void *pointer, size_t bytes, size_t align);
/* The calling thread's asynchronous copies (cuda/mma.h): queued, done at the wait (or at once, by tp_simt_set_order). */
void
tp_simt_copy_async(const char *site, void *shared, const void *global, size_t bytes, size_t size);
void
tp_simt_copy_commit(void);
void
tp_simt_copy_wait(int groups_left);

/* For the emulated device: valid device memory. Once one range is registered, accesses outside all of them are errors. */
TP_MUST_USE tp_status
tp_simt_range_add(const void *pointer, size_t bytes);
void
tp_simt_range_remove(const void *pointer);
/* 1 if the bytes lie in one range, which is then [range[0], range[1]), or if there is none at all. */
int
tp_simt_range_of(const void *pointer, size_t bytes, uintptr_t range[2]);
/* How the process's next launches run: 0, or the sum of 1 (blocks from the last), 2 (threads from the last), 4 (asynchronous
 * copies and products done at once); or 8 + 16 seed: who of a block goes on, and which copies and products are done at once, is by
 * chance, the same for the same seed, and so are blocks. A correct kernel gives the same bits in every order. */
void
tp_simt_set_order(int order);

#define TP_SITE __FILE__ ":" TP_TEXT(__LINE__)
#define TP_THREAD (tp_simt_self->thread)
#define TP_THREADS (tp_simt_self->threads)
#define TP_BLOCK_X (tp_simt_self->block[0])
#define TP_BLOCK_Y (tp_simt_self->block[1])
#define TP_BLOCK_Z (tp_simt_self->block[2])
#define TP_BLOCKS_X (tp_simt_self->blocks[0])
#define TP_BLOCKS_Y (tp_simt_self->blocks[1])
#define TP_BLOCKS_Z (tp_simt_self->blocks[2])

#define TP_SYNC() tp_simt_sync(TP_SITE)
#define TP_SYNC_WARP() tp_simt_meet(TP_SITE, 0, 0)
#define TP_SHFL_XOR_F(v, lanes) ((float)tp_simt_shuffle(TP_SITE, (double)(float)(v), TP_THREAD % TP_WARP ^ (lanes)))
#define TP_SHFL_F(v, lane) ((float)tp_simt_shuffle(TP_SITE, (double)(float)(v), (lane)))
#define TP_SHFL_XOR_D(v, lanes) tp_simt_shuffle(TP_SITE, (double)(v), TP_THREAD % TP_WARP ^ (lanes))
#define TP_SHFL_D(v, lane) tp_simt_shuffle(TP_SITE, (double)(v), (lane))
#define TP_SHFL_XOR_I(v, lanes) ((int)tp_simt_shuffle(TP_SITE, (double)(int)(v), TP_THREAD % TP_WARP ^ (lanes)))
#define TP_SHFL_I(v, lane) ((int)tp_simt_shuffle(TP_SITE, (double)(int)(v), (lane)))

#define TP_SHARED(type, name, count)  \
    static const char name##_site = 0; \
    type *const name = (type *)tp_simt_shared(&name##_site, sizeof(type) * (size_t)(count), #name)
#define TP_SHARED_DYNAMIC(name) char *const name = (char *)tp_simt_dynamic()
#define TP_SHARED_TILES(name) TP_SHARED_DYNAMIC(name)

#define TP_CHECKED(pointer, bytes, align) tp_simt_check(TP_SITE, (pointer), (bytes), (align))
#define TP_LD(pointer) (*(TP_CHECKED((pointer), sizeof *(pointer), sizeof *(pointer)), (pointer)))
#define TP_GLOBAL(pointer) ((void)(pointer))
#define tp_store16_global(pointer, vec) tp_store16((pointer), (vec))
#define TP_ST(pointer, value) \
    ((void)(*(TP_CHECKED((pointer), sizeof *(pointer), sizeof *(pointer)), (pointer)) = (value)))

TP_DEVICE float
tp_bits_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

TP_DEVICE uint32_t
tp_float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

TP_DEVICE uint32_t
tp_round_bf16(float x)
{
    uint32_t bits = tp_float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0x7fff; /* what cvt.rn.bf16 gives for NaN */
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

TP_DEVICE uint32_t
tp_pack_bf16(float low, float high)
{
    return tp_round_bf16(low) | tp_round_bf16(high) << 16;
}

TP_DEVICE float
tp_exp2f(float x)
{
    float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}

TP_DEVICE float
tp_rsqrtf(float x)
{
    return 1.0f / sqrtf(x);
}

TP_DEVICE float
tp_reciprocal(float x)
{
    return 1.0f / x;
}

#endif
/* ---- both --------------------------------------------------------------------------------------------------------------- */

static inline tp_grid
tp_grid3(int64_t x, int64_t y, int64_t z)
{
    tp_grid grid;
    grid.x = x;
    grid.y = y;
    grid.z = z;
    return grid;
}

static inline tp_grid
tp_grid1(int64_t x)
{
    return tp_grid3(x, 1, 1);
}

static inline tp_grid
tp_grid2(int64_t x, int64_t y)
{
    return tp_grid3(x, y, 1);
}

TP_DEVICE float
tp_from_bf16(tp_bf16 x)
{
    return tp_bits_float((uint32_t)x.bits << 16);
}

/* To nearest, ties to even. */
TP_DEVICE tp_bf16
tp_to_bf16(float x)
{
    tp_bf16 y;
    y.bits = (uint16_t)(tp_pack_bf16(x, 0.0f) & 0xffffu);
    return y;
}

/* 16 bytes in registers: four floats, or eight bf16. Pointers to 16-byte boundaries. */
typedef struct TP_MAY_ALIAS {
    TP_ALIGN16 uint32_t word[4];
} tp_vec16;

TP_DEVICE float
tp_fmaf(float x, float y, float z)
{
    return fmaf(x, y, z);
}

TP_DEVICE float
tp_expf(float x)
{
    return expf(x);
}

TP_DEVICE float
tp_logf(float x)
{
    return logf(x);
}

TP_DEVICE float
tp_tanhf(float x)
{
    return tanhf(x);
}

TP_DEVICE float
tp_maxf(float x, float y)
{
    return fmaxf(x, y);
}

#define tp_load16(pointer) (*(const tp_vec16 *)(TP_CHECKED((pointer), 16, 16), (const void *)(pointer)))
#define tp_store16(pointer, vec) \
    ((void)(*(tp_vec16 *)(TP_CHECKED((pointer), 16, 16), (void *)(pointer)) = (vec)))

TP_DEVICE float
tp_vec_float(const tp_vec16 *v, int i)
{
    return tp_bits_float(v->word[i]);
}

TP_DEVICE void
tp_vec_set_float(tp_vec16 *v, int i, float x)
{
    v->word[i] = tp_float_bits(x);
}

/* Elements 2 i and 2 i + 1 of eight bf16. */
TP_DEVICE float
tp_vec_low(const tp_vec16 *v, int i)
{
    return tp_bits_float(v->word[i] << 16);
}

TP_DEVICE float
tp_vec_high(const tp_vec16 *v, int i)
{
    return tp_bits_float(v->word[i] & 0xffff0000u);
}

TP_DEVICE void
tp_vec_set_bf16(tp_vec16 *v, int i, float low, float high)
{
    v->word[i] = tp_pack_bf16(low, high);
}

#endif
