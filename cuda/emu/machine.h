/* The inside of the emulator of a grid's threads (cuda/emu/simt.c), for what looks on while they run (cuda/emu/race.c). */
#ifndef TP_CUDA_EMU_MACHINE_H
#define TP_CUDA_EMU_MACHINE_H

#include "cuda/simt.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define SIMT_ASAN 1
#else
#define SIMT_ASAN 0
#endif
#if defined(__x86_64__)
#define SIMT_UCONTEXT 0
#else
#include <ucontext.h>
#define SIMT_UCONTEXT 1
#endif

#define SIMT_THREADS 1024
#define SIMT_STACK (64 * 1024 * (1 + 3 * SIMT_ASAN)) /* with an unmapped page below it */
#define SIMT_PAGE 4096
#define SIMT_COLOURS 16 /* places of a page at which fibers' stacks begin */
#define SIMT_SHARED (229 * 1024 + 49152)
#define SIMT_DYNAMIC (227 * 1024) /* the most a block may have on sm_90 and sm_100 */
#define SIMT_STATIC (48 * 1024)
#define SIMT_GUARD 64
#define SIMT_TILES 1024 /* dynamic shared memory begins at a multiple, as TP_SHARED_TILES asks */
#define SIMT_ARRAYS 32
#define SIMT_COPIES 192
#define SIMT_NAMED 16
#define SIMT_WARPGROUP 128
#define SIMT_RANGES 8
#define SIMT_BY_CHANCE 8 /* of an order */
#define SIMT_ARGUMENTS 4096 /* what every GPU takes (CUDA Programming Guide, kernel parameters) */

typedef enum { SIMT_RUNS, SIMT_AT_WARP, SIMT_AT_WARPGROUP, SIMT_AT_BLOCK, SIMT_AT_NAMED, SIMT_AT_PHASE, SIMT_ENDED } simt_state;

typedef struct {
    void *shared;
    const void *global;
    size_t bytes, size; /* `bytes` are copied, the rest of `size` becomes zero */
    int group;
} simt_copy; /* size 0: an arrival at the barrier `shared` when all before it are there */

/* A named barrier: who has come to its phase now; warps: a bit each, of this phase and of the one before. */
typedef struct {
    const char *site;
    int threads, come, phase;
    uint32_t warps, warps_before;
} simt_named;

typedef struct {
    tp_simt_thread self;
    simt_state state;
    const char *site;            /* where it waits */
    void (*work)(void **lanes);  /* what for, at a meeting of the warp or warpgroup */
    void *mine;
    int copies, first_copy, group, groups_done;
    simt_copy *copy; /* [SIMT_COPIES] a ring, oldest at first_copy; elsewhere, as meetings look at every fiber's other fields */
    int named_name;              /* where it waits: a named barrier, or a phase's barrier and parity */
    int named_phase[SIMT_NAMED]; /* 1 + the last phase that it came to */
    const void *phase_barrier;
    int phase_parity;
#if SIMT_UCONTEXT
    ucontext_t context;
#else
    void *stack_pointer;
#endif
    void *fake_stack; /* AddressSanitizer's */
} simt_fiber;

typedef struct {
    const void *site;
    const char *name;
    size_t offset, bytes;
} simt_array;

typedef struct {
    simt_fiber fiber[SIMT_THREADS + 1]; /* the last is the launching thread's own */
    char *stacks, *shared;
    void (*kernel)(const void *);
    const char *name;
    const void *arguments;
    int threads, current, at_block, ended, order;
    uint64_t chance; /* of an order by chance, what the next number comes of */
    int at_warp[SIMT_THREADS / TP_WARP], at_warpgroup[SIMT_THREADS / SIMT_WARPGROUP];
    struct simt_products *products; /* of wgmma, NULL before the first (cuda/emu/wgmma.c) */
    simt_named named[SIMT_NAMED];
    int arrays;
    simt_array array[SIMT_ARRAYS]; /* [0] is the dynamic one */
    size_t used, used_static;
    int failed;
    uintptr_t range[SIMT_RANGES][2]; /* where this launch went last: allocations do not change meanwhile */
    unsigned next_range;
    const void *host_stack;
    size_t host_stack_bytes;
    simt_copy copy[SIMT_THREADS][SIMT_COPIES];
} simt_machine;

/* The calling thread's; NULL before its first launch. */
extern __thread simt_machine *tp_simt_machine __attribute__((visibility("hidden")));

/* Ends the launch from inside a fiber. */
void
tp_simt_fail(simt_machine *m, const char *format, ...) TP_PRINTF(2, 3);

/* Whether these bytes lie in one allocation of the device. (cuda/emu/ranges.c) */
int
tp_simt_may_touch(simt_machine *m, const void *pointer, size_t bytes);
/* As tp_simt_meet, of the 128 threads of a warpgroup. */
void
tp_simt_meet_warpgroup(const char *site, void (*work)(void **lanes), void *mine);
/* A block begins; and has ended: the line of a product that was not waited for, or NULL. */
void
tp_simt_products_begin(simt_machine *m);
const char *
tp_simt_products_left(const simt_machine *m);
/* Whether the current thread has registers here that a product uses, or has used without that they were pinned since. */
int
tp_simt_products_hold(const simt_machine *m, uintptr_t at, size_t bytes, int writes);

/* No thread can run: the oldest copies of one that lead to an arrival land, and it arrives. 0: there are none. (cuda/emu/pipeline.c) */
int
tp_simt_copies_land(simt_machine *m);
/* A block has ended: a thread for a copy of whose nobody has waited, or -1; the line of a named barrier to which some, not all, have
 * come, or NULL. */
int
tp_simt_copies_left(const simt_machine *m);
const char *
tp_simt_named_left(const simt_machine *m);
/* A number below n (Marsaglia 2003, "Xorshift RNGs"); a grid of so many blocks begins: how far it is from each that runs to the
 * next, modulo their number. (cuda/emu/chance.c) */
int
tp_simt_chance(simt_machine *m, int n);
int64_t
tp_simt_chance_begin(simt_machine *m, int64_t blocks);
/* Whether an asynchronous copy, or a product, that begins now is done at once. */
int
tp_simt_at_once(simt_machine *m);
/* In an order by chance others may go on before the current thread does. */
void
tp_simt_yield(simt_machine *m);
/* Of a thread that waits; it comes back when another has set it running. */
void
tp_simt_sleep(simt_machine *m, simt_state state, const char *site);

/* What cuda/emu/race.c is told, in a build that looks for races; else nothing. */
#ifdef TP_CUDA_RACES
/* A grid, or a block of it, begins. */
void
tp_race_grid(void);
void
tp_race_block(void);
/* All threads of the block, or of this warp, have met: what each did before is before what any does from now on. */
void
tp_race_met(void);
void
tp_race_met_warp(int warp);
/* The current fiber reads, or writes, these bytes. */
void
tp_race_touch(const void *pointer, size_t bytes, int writes);
/* It has begun an asynchronous copy to these bytes of shared memory; the copy of `thread` is there, for that fiber. */
void
tp_race_depart(const void *shared, size_t bytes);
void
tp_race_land(int thread, const void *shared, size_t bytes);
/* A barrier of phases, or a named one, `at`: is initialised; `thread` comes to it, with all that it knows or, for its copies, with
 * these alone; all have come; it goes on behind it. */
void
tp_race_phases(const void *at);
void
tp_race_come(const void *at, int thread, int copies);
void
tp_race_over(const void *at);
void
tp_race_pass(const void *at);
/* The current fiber has told the asynchronous proxy of what it wrote. */
void
tp_race_fence(void);
/* A product of its warpgroup begins, or has ended, to read these bytes of shared memory by that proxy. */
void
tp_race_product(const void *shared, size_t bytes, int begins);
#else
#define tp_race_grid() ((void)0)
#define tp_race_block() ((void)0)
#define tp_race_met() ((void)0)
#define tp_race_met_warp(warp) ((void)(warp))
#define tp_race_touch(pointer, bytes, writes) ((void)0)
#define tp_race_depart(shared, bytes) ((void)0)
#define tp_race_land(thread, shared, bytes) ((void)(thread))
#define tp_race_phases(at) ((void)0)
#define tp_race_come(at, thread, copies) ((void)(thread))
#define tp_race_over(at) ((void)0)
#define tp_race_pass(at) ((void)0)
#define tp_race_fence() ((void)0)
#define tp_race_product(shared, bytes, begins) ((void)(shared), (void)(bytes), (void)(begins))
#endif

#endif
