/* Chooses the instruction set at run time and holds a backend's workspace. */
#include "csrc/cpu/cpu.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static const tp_backend_ops *const all_ops[] = {
#if defined(__x86_64__)
    &tp_cpu_ops_amx,
    &tp_cpu_ops_avx512,
    &tp_cpu_ops_avx2,
#endif
    &tp_cpu_ops_portable,
};
enum { ISAS = sizeof all_ops / sizeof all_ops[0] };

#if defined(__x86_64__)
/* Linux gives a process the tiles' registers only if it asks (arch/x86/xstate in the kernel's documentation), and refuses where
 * a thread's alternative signal stack is too small for them. Asked once: what was refused might be granted when that thread is
 * gone, and a stage's memory is predicted for the set that it will be opened with. */
static int amx_granted;

static void
ask_for_amx(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    const unsigned tile_and_bf16 = 1u << 24 | 1u << 22;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & tile_and_bf16) == tile_and_bf16)
        amx_granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

static int
amx_runs_here(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, ask_for_amx);
    return amx_granted;
}
#endif

/* Exactly the sets that setup.py compiles isa_<name>.c for. The check includes the operating system's saving of the
 * registers (libgcc reads XGETBV). */
static int
isa_runs_here(const char *name)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (strcmp(name, "avx2") == 0)
        return avx2;
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (strcmp(name, "avx512") == 0)
        return avx512;
    if (strcmp(name, "amx") == 0)
        return avx512 && amx_runs_here();
#endif
    return strcmp(name, "portable") == 0;
}

static const tp_backend_ops *
ops_by_name(const char *name)
{
    for (int i = 0; i < ISAS; i++)
        if (strcmp(all_ops[i]->name, name) == 0)
            return isa_runs_here(name) ? all_ops[i] : NULL;
    return NULL;
}

static const char *
isa_of_environment(void)
{
    const char *isa = getenv("TERAPIPE_ISA");
    return isa != NULL && isa[0] != '\0' ? isa : NULL;
}

static const tp_backend_ops *
best_ops(void)
{
    for (int i = 0; i < ISAS; i++)
        if (isa_runs_here(all_ops[i]->name))
            return all_ops[i];
    return &tp_cpu_ops_portable;
}

const tp_backend_ops *
tp_cpu_ops(const char *isa)
{
    if (isa != NULL)
        return ops_by_name(isa);
    const char *asked = isa_of_environment();
    const tp_backend_ops *ops = asked == NULL ? NULL : ops_by_name(asked);
    return ops == NULL ? best_ops() : ops;
}

tp_status
tp_cpu_open(const char *isa, tp_heap *heap, tp_team *team, tp_backend *be)
{
    const char *source = isa != NULL ? "isa" : "TERAPIPE_ISA", *asked = isa != NULL ? isa : isa_of_environment();
    const tp_backend_ops *ops = asked == NULL ? best_ops() : ops_by_name(asked);
    if (ops == NULL) {
        char right[64] = "";
        for (int i = 0; i < ISAS; i++)
            if (isa_runs_here(all_ops[i]->name)) {
                strcat(right, right[0] == '\0' ? "" : ", ");
                strcat(right, all_ops[i]->name);
            }
        return tp_fail(TP_EVALUE, "%s is \"%.40s\": on this processor one of %s would be right", source, asked, right);
    }
    *be = (tp_backend){.ops = ops, .heap = heap, .team = team};
    return TP_OK;
}

tp_status
tp_backend_reserve(tp_backend *be, size_t bytes)
{
    if (be->workspace != NULL && be->workspace_bytes >= bytes)
        return TP_OK;
    void *workspace = NULL;
    TP_TRY(tp_heap_alloc(be->heap, bytes, "workspace of the kernels", &workspace));
    tp_heap_free(be->heap, be->workspace);
    be->workspace = workspace;
    be->workspace_bytes = bytes;
    return TP_OK;
}

void
tp_backend_close(tp_backend *be)
{
    if (be == NULL || be->heap == NULL)
        return;
    tp_heap_free(be->heap, be->workspace);
    be->workspace = NULL;
    be->workspace_bytes = 0;
}
