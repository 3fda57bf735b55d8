/* One turn of a spin loop. */
#ifndef TP_BASE_CPU_RELAX_H
#define TP_BASE_CPU_RELAX_H

static inline void
tp_cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
