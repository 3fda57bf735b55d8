/* The device's memory as the emulator knows it: what kernels may touch. */
#include <pthread.h>
#include <stdlib.h>

#include "cuda/emu/machine.h"
#include "cuda/emu/order.h"

typedef struct {
    uintptr_t begin, end;
} simt_range;

static simt_range *ranges; /* sorted, disjoint */
static size_t ranges_count, ranges_room;
static pthread_rwlock_t ranges_lock = PTHREAD_RWLOCK_INITIALIZER;

/* The number of ranges that begin at or before the address. */
static size_t
range_find(uintptr_t at)
{
    size_t low = 0, high = ranges_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].begin <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

tp_status
tp_simt_range_add(const void *pointer, size_t bytes)
{
    tp_status status = TP_OK;
    pthread_rwlock_wrlock(&ranges_lock);
    if (ranges_count == ranges_room) {
        size_t room = ranges_room ? 2 * ranges_room : 64;
        simt_range *more = realloc(ranges, room * sizeof *more);
        if (more == NULL)
            status = tp_fail(TP_EMEMORY, "the emulator has no memory for %zu ranges", room);
        else
            ranges = more, ranges_room = room;
    }
    if (status == TP_OK) {
        size_t at = range_find((uintptr_t)pointer);
        memmove(ranges + at + 1, ranges + at, (ranges_count++ - at) * sizeof *ranges);
        ranges[at].begin = (uintptr_t)pointer;
        ranges[at].end = (uintptr_t)pointer + bytes;
    }
    pthread_rwlock_unlock(&ranges_lock);
    return status;
}

void
tp_simt_range_remove(const void *pointer)
{
    pthread_rwlock_wrlock(&ranges_lock);
    size_t at = range_find((uintptr_t)pointer), bytes = 0;
    if (at > 0 && ranges[at - 1].begin == (uintptr_t)pointer) {
        bytes = ranges[at - 1].end - ranges[at - 1].begin;
        memmove(ranges + at - 1, ranges + at, (ranges_count-- - at) * sizeof *ranges);
    }
    pthread_rwlock_unlock(&ranges_lock);
    tp_emu_order_forget(pointer, bytes); /* not under the lock: who holds order.c's asks for ranges */
}

int
tp_simt_range_of(const void *pointer, size_t bytes, uintptr_t range[2])
{
    uintptr_t at = (uintptr_t)pointer;
    range[0] = 0;
    range[1] = UINTPTR_MAX;
    if (ranges_count == 0)
        return 1;
    pthread_rwlock_rdlock(&ranges_lock);
    size_t found = range_find(at);
    int inside = found > 0 && at + bytes <= ranges[found - 1].end;
    if (inside) {
        range[0] = ranges[found - 1].begin;
        range[1] = ranges[found - 1].end;
    }
    pthread_rwlock_unlock(&ranges_lock);
    return inside;
}

int
tp_simt_may_touch(simt_machine *m, const void *pointer, size_t bytes)
{
    uintptr_t at = (uintptr_t)pointer;
    for (int i = 0; i < SIMT_RANGES; i++)
        if (at >= m->range[i][0] && at + bytes <= m->range[i][1])
            return 1;
    return tp_simt_range_of(pointer, bytes, m->range[m->next_range++ % SIMT_RANGES]);
}

void
tp_simt_check(const char *site, const void *pointer, size_t bytes, size_t align)
{
    simt_machine *m = tp_simt_machine;
    uintptr_t at = (uintptr_t)pointer, shared = (uintptr_t)m->shared;
    if (at % align)
        tp_simt_fail(m, "%s: address %p of %zu bytes is not a multiple of %zu", site, pointer, bytes, align);
    if (at >= shared && at < shared + SIMT_SHARED)
        return;
    if (!tp_simt_may_touch(m, pointer, bytes))
        tp_simt_fail(m, "%s: %zu bytes at %p are outside every allocation of the device", site, bytes, pointer);
}
