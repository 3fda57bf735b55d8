/* Looks for races between a kernel's threads, which the emulator, running one at a time, would not meet by itself.
 *
 * Built only where TP_CUDA_RACES is defined (tests/cuda_emu.py, races=True): there gcc compiles the kernels with
 * -fsanitize=thread, whose calls at each access come here in place of libtsan. For every half word that a grid touches the last
 * writer and the readers since are kept, each with the number of barriers of the block and of the warp before it. An access is
 * ordered behind another thread's if a barrier of both lies between them; if not, and one of the two writes, it is a race.
 * Blocks of a grid order nothing between them. An asynchronous copy writes at any time between its begin and the wait for it.
 * Blocks whose threads meet at phases or named barriers have besides, for every two threads, up to when one knows what the other has
 * done, and of that what a fence has told the asynchronous proxy (cuda/emu/race_phases.c).
 * Also found: shared memory that is read before any thread of the block has written it; and an access by no TP_LD or TP_ST outside
 * the device's allocations, where these are registered. */
#include "cuda/emu/machine.h"
#include "cuda/emu/race_phases.h"

#ifdef TP_CUDA_RACES

#include <dlfcn.h>
#include <stdlib.h>

#define GRAIN 2 /* bytes: the smallest that kernels touch */
#define NOBODY (-1)
#define SEVERAL (-2) /* threads of several warps */
#define OF_WARP (-3) /* - warp: several threads of one warp */

/* block 0: none. Blocks are numbered through all grids. */
typedef struct {
    uint32_t block, barrier, meeting, time;
    int thread; /* a fiber, which keeps its number in every order */
} access;

typedef struct {
    uintptr_t at; /* address / GRAIN; 0: a free cell */
    access wrote, read;
    uint32_t flying; /* the block of an asynchronous copy under way */
    uint32_t fences; /* its writer's, when it wrote */
    int products;    /* of wgmma that read it, under way */
    int blocks_read; /* several blocks of the grid have read it */
    uint32_t readers; /* in a block with phases: when its warps read it (race_phases.h); 0: not yet */
} cell;

typedef struct {
    cell *cells;
    size_t count, room; /* room: a power of two */
    uint32_t block, first, barrier, meeting[SIMT_THREADS / TP_WARP];
    uint32_t fences[SIMT_THREADS], fenced[SIMT_THREADS]; /* of a fiber in this block: so many, so many before the last barrier */
} watcher;

static __thread watcher watching;

/* ---- the table ------------------------------------------------------------------------------------------------------------- */

static cell *
place_of(cell *cells, size_t room, uintptr_t at)
{
    size_t i = (size_t)((uint64_t)at * 11400714819323198485u >> 20) & (room - 1);
    while (cells[i].at != 0 && cells[i].at != at)
        i = (i + 1) & (room - 1);
    return &cells[i];
}

static cell *
cell_of(uintptr_t at)
{
    watcher *w = &watching;
    if (2 * (w->count + 1) > w->room) {
        size_t room = w->room ? 2 * w->room : 1 << 16;
        cell *cells = calloc(room, sizeof *cells);
        if (cells == NULL)
            abort();
        for (size_t i = 0; i < w->room; i++)
            if (w->cells[i].at != 0)
                *place_of(cells, room, w->cells[i].at) = w->cells[i];
        free(w->cells);
        w->cells = cells;
        w->room = room;
    }
    cell *found = place_of(w->cells, w->room, at);
    if (found->at == 0) {
        *found = (cell){.at = at, .wrote.thread = NOBODY, .read.thread = NOBODY};
        w->count++;
    }
    return found;
}

void
tp_race_grid(void)
{
    watcher *w = &watching;
    if (w->room > 0)
        memset(w->cells, 0, w->room * sizeof *w->cells);
    w->count = 0;
    w->first = w->block + 1;
    tp_race_phases_grid();
}

void
tp_race_block(void)
{
    watching.block++;
    watching.barrier = 0;
    memset(watching.meeting, 0, sizeof watching.meeting);
    memset(watching.fences, 0, sizeof watching.fences);
    memset(watching.fenced, 0, sizeof watching.fenced);
    tp_race_phases_block();
}

void
tp_race_met(void)
{
    watching.barrier++;
    memcpy(watching.fenced, watching.fences, sizeof watching.fenced);
}

void
tp_race_met_warp(int warp)
{
    watching.meeting[warp]++;
    tp_race_phases_warp(warp);
}

/* ---- one access ------------------------------------------------------------------------------------------------------------ */

static access
now_of(int thread)
{
    return (access){watching.block, watching.barrier, watching.meeting[thread / TP_WARP], tp_race_now(), thread};
}

/* Is what was done ordered before what `now` does? Both of this block. */
static int
ordered(const access *before, const access *now)
{
    if (before->thread == NOBODY || before->thread == now->thread || before->barrier < now->barrier)
        return 1;
    int warp = before->thread >= 0 ? before->thread / TP_WARP : before->thread == SEVERAL ? -1 : OF_WARP - before->thread;
    return (warp == now->thread / TP_WARP && before->meeting < now->meeting) ||
           (before->thread >= 0 && tp_race_knows(now->thread, before->thread, before->time));
}

/* The same of all who have read it. */
static int
ordered_reads(const cell *c, const access *now, int shared)
{
    if (shared && tp_race_phased())
        return c->read.barrier < now->barrier || tp_race_knows_readers(now->thread, c->readers);
    return ordered(&c->read, now);
}

/* What of another block is in the cell is nothing where the memory is the block's own. */
static void
refresh(cell *c, int shared)
{
    if (!shared)
        return;
    if (c->wrote.block != watching.block)
        c->wrote = (access){.thread = NOBODY};
    if (c->read.block != watching.block) {
        c->read = (access){.thread = NOBODY};
        c->products = 0;
        c->readers = 0;
    }
    c->blocks_read = 0;
}

static const char *
fault_of(const cell *c, const access *now, int writes, int shared)
{
    if (c->flying == now->block)
        return "touches what an asynchronous copy may be writing";
    if (writes && c->products > 0)
        return "writes what a product under way may be reading";
    if (!shared && c->wrote.block != 0 && c->wrote.block != now->block)
        return writes ? "writes what another block writes" : "reads what another block writes";
    if (c->wrote.block == now->block && !ordered(&c->wrote, now))
        return writes ? "writes, with no barrier between, what another thread wrote"
                      : "reads, with no barrier between, what another thread wrote";
    if (writes && !shared && c->read.block != 0 && (c->blocks_read || c->read.block != now->block))
        return "writes what another block reads";
    if (writes && c->read.block == now->block && !ordered_reads(c, now, shared))
        return "writes, with no barrier between, what another thread read";
    if (!writes && shared && c->wrote.block == 0)
        return "reads shared memory that nobody has written";
    return NULL;
}

static void
note_read(cell *c, const access *now)
{
    const access *was = &c->read;
    int thread = now->thread, warp = thread / TP_WARP;
    if (was->block != 0 && was->block != now->block)
        c->blocks_read = 1;
    if (was->block == now->block && was->barrier == now->barrier && was->thread != NOBODY && was->thread != thread) {
        int before = was->thread >= 0 ? was->thread / TP_WARP : was->thread == SEVERAL ? -1 : OF_WARP - was->thread;
        thread = before != warp ? SEVERAL : was->meeting == now->meeting ? OF_WARP - warp : thread;
    }
    c->read = *now;
    c->read.thread = thread;
}

static int
is_shared(const simt_machine *m, uintptr_t at)
{
    uintptr_t begin = (uintptr_t)m->shared;
    return at >= begin && at < begin + SIMT_SHARED;
}

/* What is a thread's own: its stack, its numbers, the launch's arguments. */
static int
is_own(const simt_machine *m, uintptr_t at)
{
    return at - (uintptr_t)m->stacks < (size_t)SIMT_THREADS * (SIMT_STACK + SIMT_PAGE) ||
           at - (uintptr_t)&tp_simt_self < sizeof tp_simt_self || at - (uintptr_t)m < sizeof *m ||
           at - (uintptr_t)m->arguments < SIMT_ARGUMENTS;
}

static void
found(simt_machine *m, const char *fault, int shared, size_t bytes, const void *pointer, const void *caller)
{
    Dl_info where = {0};
    (void)dladdr(caller, &where);
    tp_simt_fail(m, "race: it %s, in %s memory (%zu bytes at %p; code %s+%#lx)", fault, shared ? "shared" : "global", bytes, pointer,
                 where.dli_fname ? where.dli_fname : "?", (unsigned long)((uintptr_t)caller - (uintptr_t)where.dli_fbase));
}

static void
touch(const void *pointer, size_t bytes, int writes, const void *caller)
{
    simt_machine *m = tp_simt_machine;
    uintptr_t at = (uintptr_t)pointer;
    if (tp_simt_self == NULL || m == NULL || m->failed)
        return;
    if (tp_simt_products_hold(m, at, bytes, writes))
        tp_simt_fail(m, "race: it %s registers of a product that is not over, or were not pinned since",
                     writes ? "writes" : "reads");
    if (is_own(m, at))
        return;
    int shared = is_shared(m, at);
    if (!shared && !tp_simt_may_touch(m, pointer, bytes))
        found(m, "touches what lies in no allocation of the device", shared, bytes, pointer, caller);
    access now = now_of(m->current);
    for (uintptr_t grain = at / GRAIN; grain <= (at + bytes - 1) / GRAIN && bytes > 0; grain++) {
        cell *c = cell_of(grain);
        refresh(c, shared);
        const char *fault = fault_of(c, &now, writes, shared);
        if (fault != NULL)
            found(m, fault, shared, bytes, pointer, caller);
        if (writes) {
            c->wrote = now;
            c->fences = watching.fences[m->current];
        } else {
            note_read(c, &now);
            if (shared)
                tp_race_reads(&c->readers, now.thread / TP_WARP, 0);
        }
    }
}

void
tp_race_touch(const void *pointer, size_t bytes, int writes)
{
    touch(pointer, bytes, writes, __builtin_return_address(0));
}

void
tp_race_depart(const void *shared, size_t bytes)
{
    touch(shared, bytes, 1, __builtin_return_address(0));
    for (uintptr_t grain = (uintptr_t)shared / GRAIN; grain < ((uintptr_t)shared + bytes) / GRAIN; grain++)
        cell_of(grain)->flying = watching.block;
}

void
tp_race_land(int thread, const void *shared, size_t bytes)
{
    for (uintptr_t grain = (uintptr_t)shared / GRAIN; grain < ((uintptr_t)shared + bytes) / GRAIN; grain++) {
        cell *c = cell_of(grain);
        c->flying = 0;
        c->wrote = now_of(thread);
        c->fences = watching.fences[c->wrote.thread];
    }
}

/* ---- wgmma ------------------------------------------------------------------------------------------------------------------ */

void
tp_race_fence(void)
{
    watching.fences[tp_simt_machine->current]++;
    tp_race_phases_fence();
}

/* Its writers' fences lie between the writes and a barrier: so CUTLASS has it (PTX ISA 9.0, 9.7.15.4, asks for a fence). Which of
 * the four warps reads what nobody knows: behind a barrier of all it is over. What came by copies whose arrival at a phase was waited
 * for is told by the reader's fence. */
static const char *
fault_of_product(const cell *c)
{
    if (c->flying == watching.block)
        return "multiplies what an asynchronous copy may be writing";
    if (c->wrote.block == 0)
        return "multiplies shared memory that nobody has written";
    if (c->wrote.barrier >= watching.barrier && tp_race_phased())
        return tp_race_warpgroup_knows(c->wrote.thread, c->wrote.time);
    if (c->wrote.barrier >= watching.barrier)
        return "multiplies, with no barrier between, what a thread wrote";
    if (watching.fenced[c->wrote.thread] <= c->fences)
        return "multiplies what a thread wrote and told by no fence";
    return NULL;
}

void
tp_race_product(const void *shared, size_t bytes, int begins)
{
    for (uintptr_t grain = (uintptr_t)shared / GRAIN; grain < ((uintptr_t)shared + bytes) / GRAIN; grain++) {
        cell *c = cell_of(grain);
        refresh(c, 1);
        const char *fault = begins ? fault_of_product(c) : NULL;
        if (fault != NULL)
            found(tp_simt_machine, fault, 1, bytes, shared, __builtin_return_address(0));
        c->products += begins ? 1 : -1;
        c->read = (access){watching.block, watching.barrier, 0, 0, SEVERAL};
        if (!begins)
            for (int warp = 0; warp < 4; warp++)
                tp_race_reads(&c->readers, tp_simt_machine->current / SIMT_WARPGROUP * 4 + warp, 1);
    }
}

/* ---- what gcc calls (gcc/sanitizer.def) ------------------------------------------------------------------------------------ */

#define HOOK(name, bytes, writes)                              \
    void __tsan_##name(void *);                                \
    void __tsan_##name(void *pointer)                          \
    {                                                          \
        touch(pointer, bytes, writes, __builtin_return_address(0)); \
    }
#define HOOKS(bytes)                 \
    HOOK(read##bytes, bytes, 0)      \
    HOOK(write##bytes, bytes, 1)
#define WIDE_HOOKS(bytes)                   \
    HOOKS(bytes)                            \
    HOOK(unaligned_read##bytes, bytes, 0)   \
    HOOK(unaligned_write##bytes, bytes, 1)
HOOKS(1)
WIDE_HOOKS(2)
WIDE_HOOKS(4)
WIDE_HOOKS(8)
WIDE_HOOKS(16)

void
__tsan_read_range(void *pointer, size_t bytes);
void
__tsan_write_range(void *pointer, size_t bytes);
void
__tsan_init(void);
void
__tsan_func_entry(void *caller);
void
__tsan_func_exit(void);

void
__tsan_read_range(void *pointer, size_t bytes)
{
    touch(pointer, bytes, 0, __builtin_return_address(0));
}

void
__tsan_write_range(void *pointer, size_t bytes)
{
    touch(pointer, bytes, 1, __builtin_return_address(0));
}

void
__tsan_init(void)
{
}

void
__tsan_func_entry(void *caller)
{
    (void)caller;
}

void
__tsan_func_exit(void)
{
}

#endif
