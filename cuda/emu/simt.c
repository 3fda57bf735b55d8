/* The emulator behind cuda/simt.h: runs a grid's blocks one after another, a block's threads as fibers that yield where they
 * meet. A thread runs until it comes to a barrier, to an operation of its warp, or to its end; then the next thread of the same
 * warp that can run continues, and when none can, the first of the block. The last thread to come to a meeting does its work
 * and goes on. Deterministic; state is per operating-system thread, so ranks in threads emulate side by side. */
#include "cuda/simt.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "cuda/emu/apart.h"
#include "cuda/emu/graph.h"
#include "cuda/emu/machine.h"
#include "cuda/emu/order.h"

__thread tp_simt_thread *tp_simt_self __attribute__((visibility("hidden")));
__thread simt_machine *tp_simt_machine __attribute__((visibility("hidden")));
static pthread_key_t machine_key;
static pthread_once_t machine_once = PTHREAD_ONCE_INIT;
static atomic_int launch_order;

/* ---- switching ---------------------------------------------------------------------------------------------------------- */

#if !SIMT_UCONTEXT
void
tp_simt_switch(void **save, void *load) __attribute__((visibility("hidden")));
__asm__(".text\n"
        ".p2align 4\n"
        ".globl tp_simt_switch\n"
        ".hidden tp_simt_switch\n"
        ".type tp_simt_switch, @function\n"
        "tp_simt_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  ret\n"
        ".size tp_simt_switch, .-tp_simt_switch\n");
#endif

static char *
fiber_stack(const simt_machine *m, int i)
{
    return m->stacks + (size_t)i * (SIMT_STACK + SIMT_PAGE) + SIMT_PAGE;
}

static void
check_guards(simt_machine *m);

/* Leave the current fiber (for ever, if it ended) for fiber `to`; SIMT_THREADS is the launching thread. */
static void
switch_to(simt_machine *m, int to)
{
    check_guards(m);
    if (m->failed)
        to = SIMT_THREADS;
    simt_fiber *from = &m->fiber[m->current], *next = &m->fiber[to];
    m->current = to;
    tp_simt_self = &next->self;
#if SIMT_ASAN
    __sanitizer_start_switch_fiber(from->state == SIMT_ENDED ? NULL : &from->fake_stack,
                                   to == SIMT_THREADS ? m->host_stack : fiber_stack(m, to),
                                   to == SIMT_THREADS ? m->host_stack_bytes : SIMT_STACK);
#endif
#if SIMT_UCONTEXT
    swapcontext(&from->context, &next->context);
#else
    tp_simt_switch(&from->stack_pointer, next->stack_pointer);
#endif
#if SIMT_ASAN
    __sanitizer_finish_switch_fiber(from->fake_stack, NULL, NULL);
#endif
}

/* A thread of the block that can run, the first or one by chance; m->threads: there is none. */
static int
who_runs(simt_machine *m)
{
    int from = m->order & SIMT_BY_CHANCE ? tp_simt_chance(m, m->threads) : 0;
    for (int i = 0; i < m->threads; i++) {
        int at = from + i < m->threads ? from + i : from + i - m->threads;
        if (m->fiber[at].state == SIMT_RUNS)
            return at;
    }
    return m->threads;
}

void
tp_simt_yield(simt_machine *m)
{
    int to = m->order & SIMT_BY_CHANCE ? who_runs(m) : m->current;
    if (to != m->current)
        switch_to(m, to);
}

/* Whoever of the same warp can run, else the launching thread, which looks further. */
static void
switch_away(simt_machine *m)
{
    int warp = m->current & ~(TP_WARP - 1);
    if (m->order & SIMT_BY_CHANCE) {
        switch_to(m, SIMT_THREADS);
        return;
    }
    for (int i = 1; i < TP_WARP; i++) {
        int other = warp | ((m->current + i) & (TP_WARP - 1));
        if (m->fiber[other].state == SIMT_RUNS) {
            switch_to(m, other);
            return;
        }
    }
    switch_to(m, SIMT_THREADS);
}

static void
fiber_main(void)
{
    simt_machine *m = tp_simt_machine;
#if SIMT_ASAN
    const void *bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(NULL, &bottom, &bytes);
    if (m->host_stack == NULL)
        m->host_stack = bottom, m->host_stack_bytes = bytes;
#endif
    m->kernel(m->arguments);
    m->fiber[m->current].state = SIMT_ENDED;
    m->ended++;
    switch_away(m);
    abort(); /* an ended fiber never runs again */
}

static void
fiber_begin(simt_machine *m, int i)
{
    simt_fiber *fiber = &m->fiber[i];
    char *stack = fiber_stack(m, i);
    fiber->state = SIMT_RUNS;
    fiber->site = NULL;
    fiber->copies = fiber->first_copy = fiber->group = fiber->groups_done = 0;
    memset(fiber->named_phase, 0, sizeof fiber->named_phase);
    fiber->fake_stack = NULL;
#if SIMT_ASAN
    __asan_unpoison_memory_region(stack, SIMT_STACK); /* frames of a launch that failed */
#endif
#if SIMT_UCONTEXT
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stack;
    fiber->context.uc_stack.ss_size = SIMT_STACK;
    fiber->context.uc_link = NULL;
    makecontext(&fiber->context, fiber_main, 0);
#else
    /* As after a call: 8 bytes off a multiple of 16 once popped. Not at the same place of its page as the fibers beside it: what
     * they all use at once would share a few lines of a cache. */
    void **top = (void **)(void *)(stack + SIMT_STACK - (size_t)(i % SIMT_COLOURS) * (SIMT_PAGE / SIMT_COLOURS)) - 2;
    void (*entry)(void) = fiber_main;
    memset(top - 6, 0, 8 * sizeof *top);
    memcpy(top, &entry, sizeof entry);
    fiber->stack_pointer = top - 6;
#endif
}

/* ---- errors ------------------------------------------------------------------------------------------------------------- */

/* The first error of a launch stands. */
static void TP_PRINTF(3, 4)
machine_fail(simt_machine *m, int thread, const char *format, ...)
{
    char text[640], who[32] = "";
    const int *block = m->fiber[0].self.block;
    va_list arguments;
    if (m->failed)
        return;
    m->failed = 1;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (thread >= 0)
        snprintf(who, sizeof who, ", thread %d", m->fiber[thread].self.thread);
    (void)tp_fail(TP_ERUNTIME, "CUDA kernel %s, block (%d, %d, %d)%s: %s", m->name, block[0], block[1], block[2], who, text);
}

void
tp_simt_fail(simt_machine *m, const char *format, ...)
{
    char text[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    machine_fail(m, m->current, "%s", text);
    switch_to(m, SIMT_THREADS);
}

static int
guard_whole(const char *guard)
{
    typedef uint64_t words __attribute__((vector_size(16), may_alias)); /* as words, in turn, it took a tenth of all time */
    const words *half = (const words *)(const void *)guard;
    words off = ((half[0] ^ 0xa5a5a5a5a5a5a5a5u) | (half[1] ^ 0xa5a5a5a5a5a5a5a5u)) |
                ((half[2] ^ 0xa5a5a5a5a5a5a5a5u) | (half[3] ^ 0xa5a5a5a5a5a5a5a5u));
    return (off[0] | off[1]) == 0;
}

/* What ran last wrote outside a shared array, if a guard has changed. */
static void
check_guards(simt_machine *m)
{
    if (m->failed || m->current == SIMT_THREADS)
        return;
    for (int i = 0; i < m->arrays; i++) {
        const simt_array *array = &m->array[i];
        const char *begin = m->shared + array->offset;
        if (!guard_whole(begin - SIMT_GUARD))
            machine_fail(m, m->current, "wrote before shared array %s (of %zu bytes)", array->name, array->bytes);
        else if (!guard_whole(begin + (array->bytes + 15) / 16 * 16))
            machine_fail(m, m->current, "wrote behind shared array %s (of %zu bytes)", array->name, array->bytes);
    }
}

/* No thread can run and not all have ended: say who waits where. Who waits for its warp is nearer to the cause than who waits for
 * its warpgroup, and that one than who waits for the block. */
static void
fail_divergent(simt_machine *m)
{
    static const char *const what[] = {"operation of a warp", "operation of a warpgroup", "barrier", "named barrier", "phase"};
    int first = -1, other = -1, state = SIMT_AT_WARP;
    for (; first < 0; state++)
        for (int i = 0; i < m->threads && first < 0; i++)
            first = m->fiber[i].state == (simt_state)state ? i : -1;
    state = (int)m->fiber[first].state;
    int span = state == SIMT_AT_WARP ? TP_WARP : state == SIMT_AT_WARPGROUP ? SIMT_WARPGROUP : SIMT_THREADS;
    int from = first / span * span, end = from + span < m->threads ? from + span : m->threads;
    for (int i = from; i < end && other < 0; i++)
        if (m->fiber[i].state != m->fiber[first].state)
            other = i;
    const simt_fiber *a = &m->fiber[first], *b = &m->fiber[other < 0 ? first : other];
    machine_fail(m, first, "divergent %s: it waits at %s, thread %d %s%s", what[state - SIMT_AT_WARP], a->site, b->self.thread,
                 b->state == SIMT_ENDED ? "has ended" : "waits at ", b->state == SIMT_ENDED ? "" : b->site);
}

void
tp_simt_sleep(simt_machine *m, simt_state state, const char *site)
{
    simt_fiber *fiber = &m->fiber[m->current];
    fiber->site = site;
    fiber->state = state;
    switch_away(m);
}

/* ---- meetings ----------------------------------------------------------------------------------------------------------- */

void
tp_simt_sync(const char *site)
{
    simt_machine *m = tp_simt_machine;
    simt_fiber *fiber = &m->fiber[m->current];
    fiber->site = site;
    if (++m->at_block < m->threads) {
        fiber->state = SIMT_AT_BLOCK;
        switch_away(m);
        return;
    }
    for (int i = 0; i < m->threads; i++)
        if (m->fiber[i].site != site && strcmp(m->fiber[i].site, site) != 0)
            tp_simt_fail(m, "divergent barrier: it waits at %s, thread %d waits at %s", site, m->fiber[i].self.thread,
                        m->fiber[i].site);
    m->at_block = 0;
    for (int i = 0; i < m->threads; i++)
        m->fiber[i].state = SIMT_RUNS;
    tp_race_met();
    tp_simt_yield(m);
}

/* Of `count` threads, which lie side by side; *met of them have come. */
static void
meet(const char *site, int count, int *met, simt_state state, void (*work)(void **lanes), void *mine)
{
    simt_machine *m = tp_simt_machine;
    simt_fiber *fiber = &m->fiber[m->current];
    int from = m->current / count * count;
    void *lanes[SIMT_WARPGROUP];
    fiber->site = site;
    fiber->work = work;
    fiber->mine = mine;
    if (++*met < count) {
        fiber->state = state;
        switch_away(m);
        return;
    }
    for (int i = from; i < from + count; i++) {
        simt_fiber *other = &m->fiber[i];
        if (other->work != work || (other->site != site && strcmp(other->site, site) != 0))
            tp_simt_fail(m, "divergent operation of a warp%s: it is at %s, thread %d at %s", count > TP_WARP ? "group" : "", site,
                         other->self.thread, other->site);
        lanes[other->self.thread % count] = other->mine;
        other->state = SIMT_RUNS;
    }
    *met = 0;
    if (work)
        work(lanes);
    else
        tp_race_met_warp(from / TP_WARP); /* shuffles and matrix operations order no memory (PTX ISA, shfl.sync) */
    tp_simt_yield(m);
}

void
tp_simt_meet(const char *site, void (*work)(void **lanes), void *mine)
{
    simt_machine *m = tp_simt_machine;
    meet(site, TP_WARP, &m->at_warp[m->current / TP_WARP], SIMT_AT_WARP, work, mine);
}

void
tp_simt_meet_warpgroup(const char *site, void (*work)(void **lanes), void *mine)
{
    simt_machine *m = tp_simt_machine;
    if (m->threads % SIMT_WARPGROUP)
        tp_simt_fail(m, "%s: an operation of a warpgroup in a block of %d threads, no multiple of %d", site, m->threads,
                     SIMT_WARPGROUP);
    meet(site, SIMT_WARPGROUP, &m->at_warpgroup[m->current / SIMT_WARPGROUP], SIMT_AT_WARPGROUP, work, mine);
}

typedef struct {
    double value, result;
    int lane;
} simt_shuffle;

static void
shuffle_work(void **lanes)
{
    for (int i = 0; i < TP_WARP; i++) {
        simt_shuffle *mine = lanes[i];
        mine->result = ((const simt_shuffle *)lanes[mine->lane & (TP_WARP - 1)])->value;
    }
}

double
tp_simt_shuffle(const char *site, double value, int lane)
{
    simt_shuffle mine = {value, 0.0, lane};
    tp_simt_meet(site, shuffle_work, &mine);
    return mine.result;
}

/* ---- shared memory -------------------------------------------------------------------------------------------------------- */

void
tp_simt_bounds(int most)
{
    simt_machine *m = tp_simt_machine;
    if (m->threads > most)
        tp_simt_fail(m, "it runs in blocks of %d threads, and is compiled for %d at most", m->threads, most);
}

/* The guarded, poisoned space of one more array. */
static void *
shared_add(simt_machine *m, const void *site, const char *name, size_t bytes)
{
    simt_array *array = &m->array[m->arrays++];
    size_t room = (bytes + 15) / 16 * 16;
    array->site = site;
    array->name = name;
    array->bytes = bytes;
    array->offset = m->used + SIMT_GUARD;
    m->used = array->offset + room + SIMT_GUARD;
    memset(m->shared + array->offset - SIMT_GUARD, 0xa5, SIMT_GUARD);
    memset(m->shared + array->offset, 0xff, room);
    memset(m->shared + array->offset + room, 0xa5, SIMT_GUARD);
    return m->shared + array->offset;
}

void *
tp_simt_shared(const void *site, size_t bytes, const char *name)
{
    simt_machine *m = tp_simt_machine;
    for (int i = 1; i < m->arrays; i++)
        if (m->array[i].site == site)
            return m->shared + m->array[i].offset;
    m->used_static += bytes;
    if (m->used_static > SIMT_STATIC || m->arrays == SIMT_ARRAYS)
        tp_simt_fail(m, "static shared memory of %zu bytes in %d arrays: at most %d bytes and %d arrays", m->used_static,
                    m->arrays, SIMT_STATIC, SIMT_ARRAYS - 1);
    if (m->array[0].bytes <= TP_SHARED_PLAIN && m->array[0].bytes + m->used_static > SIMT_STATIC)
        tp_simt_fail(m, "%zu bytes of static and %zu of dynamic shared memory: at most %d without being allowed more", m->used_static,
                    m->array[0].bytes, SIMT_STATIC);
    if (m->array[0].bytes + m->used_static > SIMT_DYNAMIC)
        tp_simt_fail(m, "%zu bytes of static and %zu of dynamic shared memory: at most %d in all", m->used_static,
                     m->array[0].bytes, SIMT_DYNAMIC);
    return shared_add(m, site, name, bytes);
}

void *
tp_simt_dynamic(void)
{
    return tp_simt_machine->shared + tp_simt_machine->array[0].offset;
}

/* ---- launching --------------------------------------------------------------------------------------------------------------- */

static void
machine_free(void *argument)
{
    simt_machine *m = argument;
    if (m == NULL)
        return;
    if (m->stacks)
        munmap(m->stacks, (size_t)SIMT_THREADS * (SIMT_STACK + SIMT_PAGE));
    free(m->products);
    free(m->shared);
    free(m);
}

static void
machine_key_make(void)
{
    (void)pthread_key_create(&machine_key, machine_free);
}

/* The calling thread's machine, made at its first launch and freed when the thread ends. */
static tp_status
machine_get(void)
{
    size_t bytes = (size_t)SIMT_THREADS * (SIMT_STACK + SIMT_PAGE);
    if (tp_simt_machine)
        return TP_OK;
    simt_machine *m = calloc(1, sizeof *m);
    if (m == NULL)
        return tp_fail(TP_EMEMORY, "the emulator of CUDA has no memory for its %zu bytes of state", sizeof *m);
    void *shared = NULL;
    void *stacks = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks != MAP_FAILED)
        m->stacks = stacks;
    if (stacks == MAP_FAILED || posix_memalign(&shared, SIMT_TILES, SIMT_SHARED + 2 * SIMT_ARRAYS * SIMT_GUARD)) {
        machine_free(m);
        return tp_fail(TP_EMEMORY, "the emulator of CUDA has no memory for %zu bytes of stacks", bytes);
    }
    m->shared = shared;
    for (int i = 0; i < SIMT_THREADS; i++) {
        (void)mprotect(fiber_stack(m, i) - SIMT_PAGE, SIMT_PAGE, PROT_NONE);
        m->fiber[i].copy = m->copy[i];
    }
    (void)pthread_once(&machine_once, machine_key_make);
    (void)pthread_setspecific(machine_key, m);
    tp_simt_machine = m;
    return TP_OK;
}

static void
run_block(simt_machine *m, int x, int y, int z, size_t smem)
{
    tp_race_block();
    m->used = SIMT_TILES - SIMT_GUARD; /* where the dynamic array's front guard lies */
    m->used_static = 0;
    m->arrays = m->at_block = m->ended = 0;
    memset(m->at_warp, 0, sizeof m->at_warp);
    memset(m->at_warpgroup, 0, sizeof m->at_warpgroup);
    tp_simt_products_begin(m);
    memset(m->named, 0, sizeof m->named);
    (void)shared_add(m, NULL, "(dynamic)", smem);
    for (int i = 0; i < m->threads; i++) {
        tp_simt_thread *self = &m->fiber[i].self;
        self->thread = m->order & 2 ? m->threads - 1 - i : i;
        self->threads = m->threads;
        self->block[0] = x, self->block[1] = y, self->block[2] = z;
        fiber_begin(m, i);
    }
    while (m->ended < m->threads && !m->failed) {
        int next = who_runs(m);
        if (next == m->threads && tp_simt_copies_land(m))
            continue; /* the copies for which who waits has waited */
        if (next == m->threads) {
            fail_divergent(m);
            return;
        }
        switch_to(m, next);
    }
    const char *left = tp_simt_products_left(m), *met = tp_simt_named_left(m);
    int copies = tp_simt_copies_left(m);
    if (left != NULL)
        machine_fail(m, -1, "%s: nobody waits for this product", left);
    if (met != NULL)
        machine_fail(m, -1, "%s: the block ends, and not all have come to this named barrier", met);
    if (copies >= 0)
        machine_fail(m, copies, "the block ends, and nobody has waited for an asynchronous copy of its");
}

typedef struct {
    void (*kernel)(const void *);
    const char *name;
    tp_grid grid;
    int64_t block;
    size_t smem;
    _Alignas(16) char args[SIMT_ARGUMENTS];
} simt_work;

static tp_status
run_grid(const void *body)
{
    const simt_work *w = body;
    TP_TRY(machine_get());
    simt_machine *m = tp_simt_machine;
    int64_t blocks = w->grid.x * w->grid.y * w->grid.z;
    m->kernel = w->kernel;
    m->name = w->name;
    m->arguments = w->args;
    m->threads = (int)w->block;
    m->order = atomic_load(&launch_order);
    m->failed = 0;
    memset(m->range, 0, sizeof m->range);
    m->current = SIMT_THREADS;
    tp_race_grid();
    for (int i = 0; i < m->threads; i++) {
        int *count = m->fiber[i].self.blocks;
        count[0] = (int)w->grid.x, count[1] = (int)w->grid.y, count[2] = (int)w->grid.z;
    }
    int64_t step = tp_simt_chance_begin(m, blocks), at = m->order & 1 ? blocks - 1 : 0;
    for (int64_t i = 0; i < blocks && !m->failed; i++, at = (at + step) % blocks)
        run_block(m, (int)(at % w->grid.x), (int)(at / w->grid.x % w->grid.y), (int)(at / w->grid.x / w->grid.y), w->smem);
    tp_simt_self = NULL;
    return m->failed ? TP_ERUNTIME : TP_OK;
}

/* The rule at TP_LAUNCH. */
static int
asks_as_ever(void (*kernel)(const void *), size_t smem)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct {
        void (*kernel)(const void *);
        size_t smem;
    } asked[64];
    int i = 0;
    if (smem <= TP_SHARED_PLAIN)
        return 1;
    pthread_mutex_lock(&lock);
    while (i < 63 && asked[i].kernel != NULL && asked[i].kernel != kernel)
        i++;
    if (asked[i].kernel == NULL) {
        asked[i].kernel = kernel;
        asked[i].smem = smem;
    }
    int same = asked[i].smem == smem || asked[i].kernel != kernel; /* of more than 64 the rest goes by */
    pthread_mutex_unlock(&lock);
    return same;
}

tp_status
tp_simt_launch(void (*kernel)(const void *), const char *name, tp_grid grid, int block, size_t smem, tp_stream stream,
               const void *args, size_t args_bytes)
{
    simt_work work;
    if (grid.x <= 0 || grid.y <= 0 || grid.z <= 0)
        return TP_OK;
    if (grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535 || block < TP_WARP || block > SIMT_THREADS ||
        block % TP_WARP || smem > SIMT_DYNAMIC || args_bytes > sizeof work.args)
        return tp_fail(TP_EVALUE, "CUDA kernel %s: a grid of %lld x %lld x %lld blocks of %d threads with %zu bytes of shared "
                       "memory and %zu of arguments cannot be launched", name, (long long)grid.x, (long long)grid.y,
                       (long long)grid.z, block, smem, args_bytes);
    if (!asks_as_ever(kernel, smem))
        return tp_fail(TP_ERUNTIME, "CUDA kernel %s asks for %zu bytes of shared memory, and before for another number above %d", name,
                       smem, TP_SHARED_PLAIN);
    memset(&work, 0, offsetof(simt_work, args)); /* gaps too: they are hashed */
    work.kernel = kernel, work.name = name, work.grid = grid, work.block = block, work.smem = smem;
    memcpy(work.args, args, args_bytes);
    if (tp_simt_self)
        return tp_fail(TP_EINTERNAL, "CUDA kernel %s launched inside a kernel", name);
    kernel(work.args); /* clears gaps */
    TP_TRY(tp_emu_do(stream, name, run_grid, &work, offsetof(simt_work, args) + args_bytes));
    return tp_cuda_launched(name);
}

tp_status
tp_simt_reaches(tp_stream stream, const char *kernel, const void *table, size_t bytes)
{
    tp_emu_enter(); /* the table lies in device memory */
    tp_status status = tp_emu_order_do(stream, kernel, table, bytes);
    tp_emu_leave();
    return status;
}

void
tp_simt_set_order(int order)
{
    atomic_store(&launch_order, order);
}
