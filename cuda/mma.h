/* Tensor cores and asynchronous copies, sm_80 and later: bf16 m16n8k16, ldmatrix, cp.async. PTX on the device; in the emulator
 * (cuda/emu/mma.c) the same fragments, exchanged among the 32 lanes (PTX ISA 9.0, sections 9.7.14.5.8 and 9.7.14.5.15).
 *
 * With g = lane / 4 and c = 2 (lane % 4), a lane holds of m16n8k16
 *   A 16 x 16: a[0] (g, c..c+1)  a[1] (g+8, c..c+1)  a[2] (g, c+8..c+9)  a[3] (g+8, c+8..c+9), two bf16 each, the first low
 *   B 16 x 8:  b[0] (c..c+1, g)  b[1] (c+8..c+9, g)
 *   C 16 x 8:  d[0] d[1] (g, c..c+1)  d[2] d[3] (g+8, c..c+1), fp32
 * so two C fragments side by side, rounded, are one A fragment.
 *
 * Limits of the emulator:
 *  - Inside one mma it adds the 16 products over k, ascending, before it adds them to d, so that a tile which does not begin at an
 *    absolute multiple shows in the bits. The hardware has an order and a precision of its own: bits differ between emulator and
 *    GPU, but not between slicings on either.
 *  - An asynchronous copy is done at the wait that covers it, or at once under tp_simt_set_order(4). A missing wait, or a buffer
 *    overwritten while it is read, shows in one of the two; a missing barrier between warps shows in the build that looks for
 *    races (cuda/emu/race.c). */
#ifndef TP_CUDA_MMA_H
#define TP_CUDA_MMA_H

#include "cuda/simt.h"

#ifdef __CUDACC__

/* d += a b */
#define TP_MMA(d, a, b)                                                                                                \
    __asm__("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
            : "+f"((d)[0]), "+f"((d)[1]), "+f"((d)[2]), "+f"((d)[3])                                                   \
            : "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "r"((b)[0]), "r"((b)[1]))

TP_DEVICE uint32_t
tp_shared_address(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* Four 8 x 8 matrices of 16-bit elements: row r of matrix i is the 16 bytes at `row` of lane 8 i + r. f[i] is the pair at
 * (lane / 4, 2 (lane % 4)) of matrix i, or, transposed, of its transpose. */
#define TP_LDMATRIX(f, row)                                                                             \
    __asm__ volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"                    \
                     : "=r"((f)[0]), "=r"((f)[1]), "=r"((f)[2]), "=r"((f)[3])                           \
                     : "r"(tp_shared_address(row))                                                      \
                     : "memory")
#define TP_LDMATRIX_TRANSPOSED(f, row)                                                                  \
    __asm__ volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"              \
                     : "=r"((f)[0]), "=r"((f)[1]), "=r"((f)[2]), "=r"((f)[3])                           \
                     : "r"(tp_shared_address(row))                                                      \
                     : "memory")

/* A pair of 16-bit elements (lane / 4, 2 (lane % 4)) of an 8 x 8 matrix -> that of its transpose. Every lane of the warp comes. */
TP_DEVICE uint32_t
tp_transpose8x8(uint32_t pair)
{
    uint32_t other;
    __asm__ volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
    return other;
}
#define TP_TRANSPOSE(pair) tp_transpose8x8(pair)

/* Begin to copy `bytes` (0 to 16, 0 to 4) of global to shared memory, zeros behind them up to 16 (4). */
#define TP_COPY16(shared, global, bytes)                                                                          \
    __asm__ volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(tp_shared_address(shared)), "l"(global), \
                     "r"(bytes)                                                                                   \
                     : "memory")
#define TP_COPY4(shared, global, bytes)                                                                           \
    __asm__ volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(tp_shared_address(shared)), "l"(global), \
                     "r"(bytes)                                                                                   \
                     : "memory")
/* Close the group of the copies that this thread began since the last; wait until all groups but the last `left` are there:
 * for this thread, so a barrier follows before others read. */
#define TP_COPY_COMMIT() __asm__ volatile("cp.async.commit_group;" ::: "memory")
#define TP_COPY_WAIT(left) __asm__ volatile("cp.async.wait_group %0;" ::"n"(left) : "memory")

#else

void
tp_simt_mma(const char *site, float *d, const uint32_t *a, const uint32_t *b);
void
tp_simt_ldmatrix(const char *site, uint32_t *f, const void *row, int transposed);
uint32_t
tp_simt_transpose(const char *site, uint32_t pair);

#define TP_MMA(d, a, b) tp_simt_mma(TP_SITE, (d), (a), (b))
#define TP_LDMATRIX(f, row) tp_simt_ldmatrix(TP_SITE, (f), (row), 0)
#define TP_LDMATRIX_TRANSPOSED(f, row) tp_simt_ldmatrix(TP_SITE, (f), (row), 1)
#define TP_TRANSPOSE(pair) tp_simt_transpose(TP_SITE, (pair))
#define TP_COPY16(shared, global, bytes) tp_simt_copy_async(TP_SITE, (shared), (global), (size_t)(bytes), 16)
#define TP_COPY4(shared, global, bytes) tp_simt_copy_async(TP_SITE, (shared), (global), (size_t)(bytes), 4)
#define TP_COPY_COMMIT() tp_simt_copy_commit()
#define TP_COPY_WAIT(left) tp_simt_copy_wait(left)

#endif
#endif
