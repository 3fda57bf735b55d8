#include "csrc/comm/region.h"

#include "csrc/base/clock.h"
#include "csrc/base/cpu_relax.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NO_INSTRUCTION UINT64_MAX
#define TEXT_WAIT_NS   1000000000ll /* an aborter that is alive writes its text within this, on a busy machine too */
#define TEXT_SPIN_NS   100000ll     /* until then without sleep; and between two looks */

enum { TEXT_OPEN, TEXT_READY, TEXT_MISSED }; /* of text_ready; missed: one has waited in vain, and no other waits again */

static uint64_t
lines(uint64_t bytes)
{
    return (bytes + (TP_LINE - 1)) & ~(uint64_t)(TP_LINE - 1);
}

/* ---- layout ------------------------------------------------------------------------------------------------- */

static uint64_t
capacity_of(const tp_region *plan, uint8_t pair)
{
    int halved = pair - 1 < 63 ? pair - 1 : 63;
    uint64_t bytes = plan->ring_bytes >> halved;
    return lines(bytes < TP_RING_FLOOR ? TP_RING_FLOOR : bytes);
}

/* Where each arena begins; the last one's end. */
static uint64_t
arena_end(const tp_region_shape *shape, int ranks, uint64_t at)
{
    const uint64_t page = TP_ARENA_ALIGN;
    at = (at + (page - 1)) / page * page;
    for (int rank = 0; shape->arena_bytes != NULL && rank < ranks; rank++)
        at += (shape->arena_bytes[rank] + (page - 1)) / page * page;
    return at;
}

static tp_status
check_shape(const tp_region_shape *shape)
{
    const size_t limit = (size_t)1 << 48;
    if (shape->ranks < 1 || shape->ranks > TP_REGION_RANKS)
        return tp_fail(TP_EVALUE, "ranks is %d: 1 to %d would be right", shape->ranks, TP_REGION_RANKS);
    if (shape->ring_bytes > limit || shape->max_gather_bytes > limit)
        return tp_fail(TP_EVALUE, "ring_bytes is %zu and max_gather_bytes %zu: at most 2^48 each would be right", shape->ring_bytes,
                       shape->max_gather_bytes);
    for (int rank = 0; shape->arena_bytes != NULL && rank < shape->ranks; rank++)
        if (shape->arena_bytes[rank] > limit)
            return tp_fail(TP_EVALUE, "arena_bytes of rank %d is %zu: at most 2^48 would be right", rank, shape->arena_bytes[rank]);
    return TP_OK;
}

/* Where all begins but each ring and arena: of so many ranks, rings and bytes that are gathered. */
static void
lay_out_parts(tp_region *plan, uint64_t rings)
{
    uint64_t ranks = (uint64_t)plan->ranks;
    plan->ranks_at = lines(sizeof *plan);
    plan->table_at = plan->ranks_at + 2 * ranks * sizeof(tp_region_rank);
    plan->places_at = lines(plan->table_at + ranks * ranks * sizeof(int32_t));
    plan->arenas_at = lines(plan->places_at + rings * sizeof(uint64_t));
    plan->gather_at = lines(plan->arenas_at + (ranks + 1) * sizeof(uint64_t));
    plan->rings_at = plan->gather_at + 2 * ranks * (plan->gather_bytes + TP_LINE);
}

static tp_status
lay_out(const tp_region_shape *shape, tp_region *plan)
{
    TP_TRY(check_shape(shape));
    uint64_t rings = 0, ranks = (uint64_t)shape->ranks, square = ranks * ranks;
    for (uint64_t i = 0; i < square; i++)
        rings += shape->pairs[i] != 0;
    memset(plan, 0, sizeof *plan);
    plan->abi = TP_COMM_ABI;
    plan->ranks = shape->ranks;
    plan->ring_bytes = lines(shape->ring_bytes < TP_RING_FLOOR ? TP_RING_FLOOR : shape->ring_bytes);
    plan->gather_bytes = lines(shape->max_gather_bytes);
    lay_out_parts(plan, rings);
    if (rings > 0 && (UINT64_MAX / 4) / rings < plan->ring_bytes + sizeof(tp_ring))
        return tp_fail(TP_EVALUE, "%llu rings of %zu bytes do not fit in an address space", (unsigned long long)rings,
                       shape->ring_bytes);
    plan->bytes = plan->rings_at;
    for (uint64_t i = 0; i < square; i++)
        plan->bytes += shape->pairs[i] ? sizeof(tp_ring) + capacity_of(plan, shape->pairs[i]) : 0;
    plan->bytes = arena_end(shape, shape->ranks, plan->bytes);
    return TP_OK;
}

tp_status
tp_region_bytes(const tp_region_shape *shape, size_t *out)
{
    tp_region plan;
    TP_TRY(lay_out(shape, &plan));
    *out = (size_t)plan.bytes;
    return TP_OK;
}

/* Rings, one behind the other, and behind them the arenas. */
static void
place(tp_region *region, const tp_region_shape *shape)
{
    int32_t *table = (int32_t *)((uintptr_t)region + region->table_at), rings = 0;
    uint64_t *places = (uint64_t *)((uintptr_t)region + region->places_at), at = region->rings_at;
    uint64_t *arenas = (uint64_t *)((uintptr_t)region + region->arenas_at);
    for (int64_t i = 0; i < (int64_t)shape->ranks * shape->ranks; i++) {
        table[i] = shape->pairs[i] ? rings : -1;
        if (!shape->pairs[i])
            continue;
        tp_ring *ring = (tp_ring *)((uintptr_t)region + at);
        places[rings++] = at;
        ring->capacity = capacity_of(region, shape->pairs[i]);
        at += sizeof(tp_ring) + ring->capacity;
    }
    for (int rank = 0; rank <= shape->ranks; rank++)
        arenas[rank] = arena_end(shape, rank, at);
}

tp_status
tp_region_create(void *memory, size_t bytes, const tp_region_shape *shape, tp_region **out)
{
    tp_region plan, *region = memory;
    TP_TRY(lay_out(shape, &plan));
    if (bytes < plan.bytes)
        return tp_fail(TP_EVALUE, "the memory has %zu bytes: a region of %d ranks needs %llu", bytes, shape->ranks,
                       (unsigned long long)plan.bytes);
    memcpy(region, &plan, sizeof plan);
    place(region, shape);
    for (int rank = 0; rank < shape->ranks; rank++)
        atomic_store_explicit(&tp_region_rank_at(region, rank)->instruction, NO_INSTRUCTION, memory_order_relaxed);
    region->magic = TP_REGION_MAGIC; /* the fd or pointer is handed on after this, which orders it */
    *out = region;
    return TP_OK;
}

/* Rings lie one behind the other, and arenas behind them, within the region. */
static int
holds_its_parts(const tp_region *region, uint64_t rings)
{
    const uint64_t *places = (const uint64_t *)((uintptr_t)region + region->places_at);
    const uint64_t *arenas = (const uint64_t *)((uintptr_t)region + region->arenas_at);
    uint64_t at = region->rings_at;
    for (uint64_t i = 0; i < rings; i++) {
        if (places[i] != at || region->bytes - at < sizeof(tp_ring))
            return 0;
        uint64_t capacity = ((const tp_ring *)((uintptr_t)region + at))->capacity;
        at += sizeof(tp_ring);
        if (capacity < TP_RING_FLOOR || capacity % TP_LINE != 0 || capacity > region->bytes - at)
            return 0;
        at += capacity;
    }
    for (int rank = 0; rank <= region->ranks; at = arenas[rank++])
        if (arenas[rank] < at || arenas[rank] > region->bytes || arenas[rank] % TP_ARENA_ALIGN != 0)
            return 0;
    return 1;
}

/* Nobody reads or writes beyond it, whatever damaged its head. */
static int
is_sound(const tp_region *region)
{
    tp_region plan = {.ranks = region->ranks, .gather_bytes = region->gather_bytes};
    uint64_t rings = 0, square = (uint64_t)region->ranks * (uint64_t)region->ranks;
    if (region->ranks < 1 || region->ranks > TP_REGION_RANKS || region->gather_bytes > (uint64_t)1 << 49)
        return 0;
    lay_out_parts(&plan, 0);
    if (region->table_at != plan.table_at || plan.places_at > region->bytes)
        return 0;
    const int32_t *table = (const int32_t *)((uintptr_t)region + region->table_at);
    for (uint64_t i = 0; i < square; i++) {
        if (table[i] != -1 && table[i] != (int32_t)rings)
            return 0;
        rings += table[i] >= 0;
    }
    lay_out_parts(&plan, rings);
    return region->ranks_at == plan.ranks_at && region->places_at == plan.places_at && region->gather_at == plan.gather_at &&
           region->arenas_at == plan.arenas_at && region->rings_at == plan.rings_at && region->bytes >= plan.rings_at &&
           holds_its_parts(region, rings);
}

tp_status
tp_region_attach(void *memory, size_t bytes, tp_region **out)
{
    tp_region *region = memory;
    if (bytes < sizeof *region || region->magic != TP_REGION_MAGIC)
        return tp_fail(TP_EVALUE, "this memory of %zu bytes is not a region of terapipe_c", bytes);
    if (region->abi != TP_COMM_ABI)
        return tp_fail(TP_EVALUE, "the region has version %u: this build reads version %u", region->abi, TP_COMM_ABI);
    if (region->bytes > bytes)
        return tp_fail(TP_EVALUE, "the region has %llu bytes, its memory only %zu", (unsigned long long)region->bytes,
                       bytes);
    if (!is_sound(region))
        return tp_fail(TP_EVALUE, "the region of %d ranks and %llu bytes is damaged: its parts do not lie where they would; one that is as "
                       "it was made would be right", region->ranks, (unsigned long long)region->bytes);
    *out = region;
    return TP_OK;
}

int
tp_region_ranks(const tp_region *region)
{
    return region->ranks;
}

/* ---- sleeping and waking -------------------------------------------------------------------------------------- */

static void
wake(_Atomic uint32_t *word, int shared)
{
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE | (shared ? 0 : FUTEX_PRIVATE_FLAG), INT_MAX, NULL, NULL, 0);
}

void
tp_region_ring_bell(tp_region_rank *rank, int shared)
{
    /* Sequentially consistent against the sleeper's store of `asleep` and its last look (Dekker): one of us sees the
     * other. A fence would do too, but TSan does not model fences. */
    if (atomic_load(&rank->asleep) == 0)
        return;
    atomic_fetch_add(&rank->bell, 1);
    wake(&rank->bell, shared);
}

void
tp_region_sleep(tp_region_rank *rank, uint32_t seen, int64_t timeout_ns, int shared)
{
    struct timespec span = {(time_t)(timeout_ns / 1000000000), (long)(timeout_ns % 1000000000)};
    syscall(SYS_futex, (uint32_t *)&rank->bell, FUTEX_WAIT | (shared ? 0 : FUTEX_PRIVATE_FLAG), seen, &span, NULL, 0);
}

/* ---- abort ---------------------------------------------------------------------------------------------------- */

/* All in one write, so that the lines of many ranks stay whole. */
static void
tell(const tp_region *region, size_t length)
{
    static const char before[] = "terapipe_c: ", after[] = "\n";
    char line[sizeof before + sizeof region->text + sizeof after];
    int fd = atomic_load(&region->told) - 1;
    if (fd < 0)
        return;
    memcpy(line, before, sizeof before - 1);
    memcpy(line + sizeof before - 1, region->text, length);
    memcpy(line + sizeof before - 1 + length, after, 1);
    if (write(fd, line, sizeof before + length) < 0) { /* nobody reads it */
    }
}

void
tp_region_abort(tp_region *region, tp_status code, int rank, const char *text)
{
    int saved = errno;
    uint64_t none = 0, failure = (uint64_t)code << 32 | (uint32_t)(rank + 1);
    if (atomic_compare_exchange_strong(&region->failure, &none, failure)) {
        size_t length = strnlen(text, sizeof region->text - 1);
        memcpy(region->text, text, length);
        region->text[length] = 0;
        atomic_store(&region->text_ready, TEXT_READY);
        tell(region, length);
    }
    for (int i = 0; i < 2 * region->ranks; i++) { /* also when not the first: the first may have died before it woke all */
        tp_region_rank *each = tp_region_rank_at(region, i);
        atomic_fetch_add(&each->bell, 1);
        wake(&each->bell, 0); /* the two kinds of futex have different keys, and a region does not know its kind */
        wake(&each->bell, 1);
    }
    errno = saved;
}

int
tp_region_is_aborted(const tp_region *region)
{
    return atomic_load_explicit(&region->failure, memory_order_acquire) != 0;
}

tp_status
tp_region_aborted(const tp_region *region, int *rank, char text[512])
{
    uint64_t failure = atomic_load_explicit(&region->failure, memory_order_acquire);
    if (failure == 0)
        return TP_OK;
    tp_status code = (tp_status)(failure >> 32);
    *rank = (int)(uint32_t)failure - 1;
    int64_t since = tp_clock_ns(), now = since;
    uint32_t state;
    while ((state = atomic_load_explicit(&region->text_ready, memory_order_acquire)) == TEXT_OPEN) {
        if (now > since + TEXT_WAIT_NS)
            atomic_compare_exchange_strong(&((tp_region *)region)->text_ready, &state, TEXT_MISSED);
        else if (now > since + TEXT_SPIN_NS)
            tp_clock_sleep_until(now + TEXT_SPIN_NS); /* it may have lost its processor to those that wait for its words */
        else
            tp_cpu_relax();
        now = tp_clock_ns();
    }
    if (state == TEXT_MISSED) {
        snprintf(text, 512, "%s, and died before it could say why", tp_status_name(code));
        return code;
    }
    memcpy(text, region->text, 512);
    return code;
}

void
tp_region_tell(tp_region *region, int fd)
{
    atomic_store(&region->told, fd + 1);
}

/* ---- progress ------------------------------------------------------------------------------------------------- */

void
tp_region_progress(tp_region *region, int rank, uint64_t step, uint64_t instruction)
{
    tp_region_rank *own = tp_region_rank_at(region, rank);
    atomic_store_explicit(&own->step, step, memory_order_relaxed);
    atomic_store_explicit(&own->instruction, instruction, memory_order_relaxed);
}

void
tp_region_read_progress(const tp_region *region, int rank, uint64_t *step, uint64_t *instruction)
{
    const tp_region_rank *other = tp_region_rank_at(region, rank);
    *step = atomic_load_explicit(&other->step, memory_order_relaxed);
    *instruction = atomic_load_explicit(&other->instruction, memory_order_relaxed);
}

#define REDUCTION 11u /* and behind it the update: of a stage, not of a slice */

int
tp_region_is_update(uint64_t instruction)
{
    return instruction >> 48 == REDUCTION + 1;
}

void
tp_tag_print(uint64_t tag, char text[TP_TAG_TEXT])
{
    static const char *const words[TP_TAG_OPS] = {"forward",
                                                  "backward",
                                                  "input gradient",
                                                  "weight gradient",
                                                  "recomputation",
                                                  "send of the activation",
                                                  "receive of the activation",
                                                  "send of the gradient",
                                                  "receive of the gradient",
                                                  "swap out",
                                                  "swap in",
                                                  "exchange of the tied weight",
                                                  "optimizer update",
                                                  "eviction",
                                                  "receive of the evicted activations",
                                                  "return of the evicted activations",
                                                  "load",
                                                  "update"};
    unsigned op = (unsigned)(tag >> 48), stage = (unsigned)(tag >> 32 & 0xffff);
    unsigned micro = (unsigned)(tag >> 16 & 0xffff), slice = (unsigned)(tag & 0xffff);
    if (op >= TP_TAG_OPS)
        snprintf(text, TP_TAG_TEXT, "tag 0x%016llx", (unsigned long long)tag);
    else if (op == REDUCTION || op == REDUCTION + 1)
        snprintf(text, TP_TAG_TEXT, "%s on stage %u", words[op], stage);
    else
        snprintf(text, TP_TAG_TEXT, "%s of micro-batch %u slice %u on stage %u", words[op], micro, slice, stage);
}

void
tp_region_doing(const tp_region *region, int rank, char text[TP_DOING_TEXT])
{
    uint64_t step, instruction;
    char words[TP_TAG_TEXT];
    tp_region_read_progress(region, rank, &step, &instruction);
    if (instruction == NO_INSTRUCTION) {
        snprintf(text, TP_DOING_TEXT, step == 0 ? "before its first instruction" : "at step %llu, between instructions",
                 (unsigned long long)step);
        return;
    }
    if (instruction == TP_WRITING) {
        snprintf(text, TP_DOING_TEXT, "at step %llu, writing the checkpoint", (unsigned long long)step);
        return;
    }
    tp_tag_print(instruction, words);
    snprintf(text, TP_DOING_TEXT, "at step %llu while running %s", (unsigned long long)step, words);
}
