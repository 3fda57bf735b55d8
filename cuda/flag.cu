/* Words of device memory by which one stream tells another that it has come so far, without the host and without an event. */
#include "cuda/kernels.h"

#include "cuda/simt.h"

typedef struct {
    int64_t *word;
    int64_t value, limit_ns;
} flag_args;

#ifdef __CUDACC__
/* What the stream wrote before is there for who reads the value: a release, an acquire (PTX ISA, "Memory Consistency Model"). */
TP_DEVICE void
flag_store(int64_t *word, int64_t value)
{
    __asm__ volatile("st.release.gpu.global.s64 [%0], %1;" :: "l"(word), "l"(value) : "memory");
}

TP_DEVICE int64_t
flag_load(const int64_t *word)
{
    int64_t value;
    __asm__ volatile("ld.acquire.gpu.global.s64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

TP_DEVICE int64_t
flag_now(void)
{
    int64_t now;
    __asm__ volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

#define FLAG_PAUSE() __nanosleep(64) /* at most about twice that is lost */
#define FLAG_GIVES_UP() __trap()
#else
#define flag_store(word, value) TP_ST(word, value)
#define flag_load(word)         TP_LD(word)
#define flag_now()              ((int64_t)0)
#define FLAG_PAUSE()            ((void)0)
/* Emulated streams do their work at once: nobody could raise it any more. An address of nobody's ends the launch by an error. */
#define FLAG_GIVES_UP()         ((void)TP_LD((const int64_t *)(uintptr_t)64))
#endif

TP_KERNEL(flag_raise, flag_args)
{
    if (TP_THREAD == 0)
        flag_store(a.word, a.value);
}

TP_KERNEL(flag_await, flag_args)
{
    if (TP_THREAD != 0)
        return;
    const int64_t begun = flag_now();
    while (flag_load(a.word) < a.value) {
        FLAG_PAUSE();
        if (flag_now() - begun >= a.limit_ns)
            FLAG_GIVES_UP();
    }
}

tp_status
tp_cuda_flag_raise(tp_stream stream, int64_t *word, int64_t value)
{
    flag_args a = {word, value, 0};
    return TP_LAUNCH(flag_raise, tp_grid1(1), TP_WARP, 0, stream, a);
}

tp_status
tp_cuda_flag_await(tp_stream stream, int64_t *word, int64_t value, int64_t limit_ns)
{
    flag_args a = {word, value, limit_ns};
    return TP_LAUNCH(flag_await, tp_grid1(1), TP_WARP, 0, stream, a);
}
