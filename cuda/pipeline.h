/* Warps of one block that work at different times: barriers in shared memory (mbarrier), barriers of some of a block's threads,
 * and registers that one warpgroup leaves to another. PTX of sm_90 (setmaxnreg: sm_90a) on the device, cuda/emu/pipeline.c in
 * the emulator (PTX ISA 9.0, sections 9.7.13.15, 9.7.13.1, 9.7.9.25.2.3 and 9.7.20.5).
 *
 * A barrier of shared memory, 8 bytes, counts `count` arrivals and then begins its next phase with as many again. Phases are
 * numbered from 0; TP_PHASE_WAIT(barrier, p) returns once the last phase of parity p is over, so at once for p = 1 in the first
 * phase. TP_PHASE_COPIES arrives for this thread when all asynchronous copies that it has begun are there: one of `count`.
 * What was done before an arrival is seen behind the wait; products, which read by another proxy, see what cp.async wrote if
 * TP_FENCE_ASYNC stands between (8.6, "proxy-preserved base causality order": a fence anywhere on the path, here the reader's).
 *
 * A named barrier, 0 to 15 (0 is TP_SYNC's), is over when `threads` threads have come: who waits comes by TP_NAMED_SYNC, who does
 * not by TP_NAMED_ARRIVE; whole warps. */
#ifndef TP_CUDA_PIPELINE_H
#define TP_CUDA_PIPELINE_H

#include "cuda/mma.h"

#ifdef __CUDACC__

#define TP_PHASE_INIT(barrier, count) \
    __asm__ volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(tp_shared_address(barrier)), "r"(count) : "memory")
#define TP_PHASE_ARRIVE(barrier) \
    __asm__ volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(tp_shared_address(barrier)) : "memory")
#define TP_PHASE_COPIES(barrier) \
    __asm__ volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(tp_shared_address(barrier)) : "memory")
#define TP_PHASE_WAIT(barrier, parity) tp_phase_wait(tp_shared_address(barrier), (parity))
#define TP_NAMED_SYNC(name, threads) __asm__ volatile("bar.sync %0, %1;" ::"r"(name), "n"(threads) : "memory")
#define TP_NAMED_ARRIVE(name, threads) __asm__ volatile("bar.arrive %0, %1;" ::"r"(name), "n"(threads) : "memory")
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TP_FEWER_REGISTERS(count) __asm__ volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count))
#define TP_MORE_REGISTERS(count) __asm__ volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count))
#else
#define TP_FEWER_REGISTERS(count) ((void)0)
#define TP_MORE_REGISTERS(count) ((void)0)
#endif

TP_DEVICE int
tp_phase_over(uint32_t barrier, int parity)
{
    int over;
    __asm__ volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                     : "=r"(over)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    return over;
}

/* A wait of 2^34 cycles, some ten seconds, ends the launch with an error, an illegal address: a kernel that would hang costs more.
 * Not by __trap, or a branch: behind one ptxas keeps the registers of the whole kernel's launch, and serializes products. */
TP_DEVICE void
tp_phase_wait(uint32_t barrier, int parity)
{
    int over = tp_phase_over(barrier, parity);
    if (!over) {
        long long begin = clock64();
        do
            over = tp_phase_over(barrier, parity);
        while (!over && clock64() - begin < 1LL << 34);
        __asm__ volatile("{ .reg .pred p; setp.eq.b32 p, %0, 0; @p st.global.b32 [%1], %0; }" ::"r"(over), "l"(0LL) : "memory");
    }
}

#else

void
tp_simt_phase_init(const char *site, uint64_t *barrier, int count);
void
tp_simt_phase_arrive(const char *site, uint64_t *barrier);
void
tp_simt_phase_copies(const char *site, uint64_t *barrier);
void
tp_simt_phase_wait(const char *site, uint64_t *barrier, int parity);
void
tp_simt_named(const char *site, int name, int threads, int waits);

#define TP_PHASE_INIT(barrier, count) tp_simt_phase_init(TP_SITE, (barrier), (count))
#define TP_PHASE_ARRIVE(barrier) tp_simt_phase_arrive(TP_SITE, (barrier))
#define TP_PHASE_COPIES(barrier) tp_simt_phase_copies(TP_SITE, (barrier))
#define TP_PHASE_WAIT(barrier, parity) tp_simt_phase_wait(TP_SITE, (barrier), (parity))
#define TP_NAMED_SYNC(name, threads) tp_simt_named(TP_SITE, (name), (threads), 1)
#define TP_NAMED_ARRIVE(name, threads) tp_simt_named(TP_SITE, (name), (threads), 0)
#define TP_FEWER_REGISTERS(count) ((void)0)
#define TP_MORE_REGISTERS(count) ((void)0)

#endif

#endif
