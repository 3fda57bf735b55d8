/* Asynchronous copies, and the barriers by which threads of a block that work at different times meet (cuda/pipeline.h, cuda/mma.h).
 * A copy is done as late as can be: at the wait that covers it, or, where its thread arrives for it at a barrier, when no thread of
 * the block can run; or at once, by tp_simt_set_order(4); or some so, some so, by chance. Who reads or writes too early gets other
 * numbers in one of them.
 * Also checked: arrivals are as many as a phase counts, nobody waits for a phase that is not the present or the last one, nobody
 * comes twice to one phase of a named barrier, all come with the same count and the same warps to each phase (those of another set
 * might mix with them: four warps of two groups are 128 threads, too), nobody is left there, nobody waits for ever, and no copy is
 * under way when all have ended. */
#include "cuda/pipeline.h"

#include "cuda/emu/machine.h"

/* ---- phases: a barrier's 8 bytes are its count (20 bits), the arrivals still to come (20), a mark, and its phase (16) -------- */

#define COUNT_BITS 20
#define MARK ((uint64_t)0x5a << 40)

typedef struct {
    int count, left, phase;
} barrier;

static barrier
read_barrier(const char *site, const uint64_t *at)
{
    simt_machine *m = tp_simt_machine;
    uint64_t word;
    uintptr_t to = (uintptr_t)at, begin = (uintptr_t)m->shared;
    if (to % 8 || to < begin || to + 8 > begin + SIMT_SHARED)
        tp_simt_fail(m, "%s: a barrier at %p, which is not 8 bytes of shared memory", site, (const void *)at);
    memcpy(&word, at, sizeof word);
    if ((word & (uint64_t)0xff << 40) != MARK)
        tp_simt_fail(m, "%s: the barrier at byte %td of shared memory was not initialised", site, (const char *)at - m->shared);
    barrier b = {(int)(word & ((1 << COUNT_BITS) - 1)), (int)(word >> COUNT_BITS & ((1 << COUNT_BITS) - 1)), (int)(word >> 48)};
    return b;
}

static void
write_barrier(uint64_t *at, barrier b)
{
    uint64_t word = (uint64_t)b.count | (uint64_t)b.left << COUNT_BITS | MARK | (uint64_t)(b.phase & 0xffff) << 48;
    memcpy(at, &word, sizeof word);
}

void
tp_simt_phase_init(const char *site, uint64_t *at, int count)
{
    barrier b = {count, count, 0};
    write_barrier(at, b);
    tp_race_phases(at);
    if (count < 1 || count >= 1 << COUNT_BITS)
        tp_simt_fail(tp_simt_machine, "%s: a barrier of %d arrivals", site, count);
    (void)read_barrier(site, at);
}

/* thread: the fiber that does; copies: by copies that are there, not by what it did itself. */
static void
arrive(const char *site, uint64_t *at, int thread, int copies)
{
    simt_machine *m = tp_simt_machine;
    barrier b = read_barrier(site, at);
    tp_race_come(at, thread, copies);
    (void)copies;
    if (--b.left == 0) {
        b.left = b.count;
        b.phase++;
        tp_race_over(at);
        for (int i = 0; i < m->threads; i++) {
            simt_fiber *fiber = &m->fiber[i];
            if (fiber->state == SIMT_AT_PHASE && fiber->phase_barrier == at && fiber->phase_parity != (b.phase & 1))
                fiber->state = SIMT_RUNS;
        }
    }
    write_barrier(at, b);
}

void
tp_simt_phase_arrive(const char *site, uint64_t *at)
{
    arrive(site, at, tp_simt_machine->current, 0);
    tp_simt_yield(tp_simt_machine);
}

void
tp_simt_phase_wait(const char *site, uint64_t *at, int parity)
{
    simt_machine *m = tp_simt_machine;
    barrier b = read_barrier(site, at);
    if (parity != 0 && parity != 1)
        tp_simt_fail(m, "%s: waits for parity %d", site, parity);
    if (parity == (b.phase & 1)) {
        m->fiber[m->current].phase_barrier = at;
        m->fiber[m->current].phase_parity = parity;
        tp_simt_sleep(m, SIMT_AT_PHASE, site);
    }
    tp_race_pass(at);
}

/* ---- named barriers ------------------------------------------------------------------------------------------------------------ */

const char *
tp_simt_named_left(const simt_machine *m)
{
    for (int i = 0; i < SIMT_NAMED; i++)
        if (m->named[i].come > 0)
            return m->named[i].site;
    return NULL;
}

void
tp_simt_named(const char *site, int name, int threads, int waits)
{
    simt_machine *m = tp_simt_machine;
    if (name < 1 || name >= SIMT_NAMED || threads < TP_WARP || threads % TP_WARP || threads > m->threads)
        tp_simt_fail(m, "%s: named barrier %d of %d threads, in a block of %d", site, name, threads, m->threads);
    simt_named *n = &m->named[name];
    simt_fiber *fiber = &m->fiber[m->current];
    if (n->come > 0 && n->threads != threads)
        tp_simt_fail(m, "%s: comes to named barrier %d as of %d threads, others, at %s, as of %d", site, name, threads, n->site,
                     n->threads);
    if (fiber->named_phase[name] == n->phase + 1)
        tp_simt_fail(m, "%s: comes to named barrier %d twice, before all others have come", site, name);
    fiber->named_phase[name] = n->phase + 1;
    n->site = site;
    n->threads = threads;
    n->warps |= (uint32_t)1 << m->current / TP_WARP;
    tp_race_come(n, m->current, 0);
    if (++n->come < threads) {
        fiber->named_name = name;
        if (waits) {
            tp_simt_sleep(m, SIMT_AT_NAMED, site);
            tp_race_pass(n);
        }
        return;
    }
    if (n->phase > 0 && n->warps != n->warps_before)
        tp_simt_fail(m, "%s: named barrier %d is of other warps than before: one name for each set would be right", site, name);
    n->warps_before = n->warps;
    n->warps = 0;
    n->come = 0;
    n->phase++;
    tp_race_over(n);
    if (waits)
        tp_race_pass(n);
    for (int i = 0; i < m->threads; i++)
        if (m->fiber[i].state == SIMT_AT_NAMED && m->fiber[i].named_name == name)
            m->fiber[i].state = SIMT_RUNS;
}

/* ---- asynchronous copies ------------------------------------------------------------------------------------------------------- */

static void
copy_now(const simt_copy *copy)
{
    memcpy(copy->shared, copy->global, copy->bytes);
    memset((char *)copy->shared + copy->bytes, 0, copy->size - copy->bytes);
}

/* The oldest copy of a fiber, or its arrival, comes true. */
static void
land(simt_machine *m, int thread)
{
    simt_fiber *fiber = &m->fiber[thread];
    const simt_copy *copy = &fiber->copy[fiber->first_copy];
    if (copy->size == 0) {
        arrive("an arrival for copies", copy->shared, thread, 1);
    } else {
        copy_now(copy);
        tp_race_land(thread, copy->shared, copy->size);
    }
    fiber->first_copy = (fiber->first_copy + 1) % SIMT_COPIES;
    fiber->copies--;
}

static void
begin_copy(const char *site, simt_copy copy)
{
    simt_machine *m = tp_simt_machine;
    simt_fiber *fiber = &m->fiber[m->current];
    if (fiber->copies == SIMT_COPIES)
        tp_simt_fail(m, "%s: more than %d asynchronous copies of a thread are under way", site, SIMT_COPIES);
    fiber->copy[(fiber->first_copy + fiber->copies++) % SIMT_COPIES] = copy;
    if (tp_simt_at_once(m))
        land(m, m->current);
}

void
tp_simt_copy_async(const char *site, void *shared, const void *global, size_t bytes, size_t size)
{
    simt_machine *m = tp_simt_machine;
    simt_copy copy = {shared, global, bytes, size, m->fiber[m->current].group};
    uintptr_t at = (uintptr_t)shared, begin = (uintptr_t)m->shared;
    tp_simt_check(site, shared, size, size);
    if (bytes)
        tp_simt_check(site, global, bytes, size);
    if (at < begin || at + size > begin + SIMT_SHARED)
        tp_simt_fail(m, "%s: an asynchronous copy to %p, which is not shared memory", site, shared);
    tp_race_touch(global, bytes, 0);
    tp_race_depart(shared, size);
    begin_copy(site, copy);
}

void
tp_simt_phase_copies(const char *site, uint64_t *at)
{
    simt_copy copy = {at, NULL, 0, 0, tp_simt_machine->fiber[tp_simt_machine->current].group};
    (void)read_barrier(site, at);
    begin_copy(site, copy);
}

void
tp_simt_copy_commit(void)
{
    tp_simt_machine->fiber[tp_simt_machine->current].group++;
}

void
tp_simt_copy_wait(int groups_left)
{
    simt_machine *m = tp_simt_machine;
    simt_fiber *fiber = &m->fiber[m->current];
    while (fiber->copies > 0 && fiber->copy[fiber->first_copy].group < fiber->group - groups_left)
        land(m, m->current);
}

int
tp_simt_copies_left(const simt_machine *m)
{
    int i = 0;
    while (i < m->threads && m->fiber[i].copies == 0)
        i++;
    return i < m->threads ? i : -1;
}

int
tp_simt_copies_land(simt_machine *m)
{
    for (int i = 0; i < m->threads; i++) {
        simt_fiber *fiber = &m->fiber[i];
        for (int j = 0; j < fiber->copies; j++)
            if (fiber->copy[(fiber->first_copy + j) % SIMT_COPIES].size == 0) {
                for (; j >= 0; j--)
                    land(m, i);
                return 1;
            }
    }
    return 0;
}
