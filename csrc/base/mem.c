#include "csrc/base/mem.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "csrc/base/deadline.h"

/* Matrix products walk rows 4 KiB and more apart: with small pages every row is a TLB entry. Measured: 3 to 7 % of a
 * 768-wide layer's time. */
#define HUGE_PAGE ((size_t)2 << 20)
#define HUGE_WORTH (2 * HUGE_PAGE)
#define PIECE      ((size_t)16 << 20) /* bytes zeroed between two questions whether to stop */

typedef struct foreign_block foreign_block;
struct foreign_block { /* a hook's memory has no header: what we know of it lies here */
    foreign_block *next;
    void *memory;
    size_t counted;
};

struct tp_heap {
    size_t limit;
    _Atomic size_t bytes, peak;
    _Atomic uint64_t allocations;
    tp_heap_hook hook; /* take NULL: the host's memory */
    foreign_block *foreign;
    pthread_mutex_t lock; /* of foreign */
};

typedef struct {
    size_t counted;
    char pad[TP_ALIGN - sizeof(size_t)];
} header; /* sits before every block; not counted: it is ours, not the rank's */

static _Atomic int64_t fail_after;

void
tp_heap_fail_after(int64_t allocations)
{
    atomic_store(&fail_after, allocations);
}

static int
told_to_fail(void)
{
    return atomic_load(&fail_after) > 0 && atomic_fetch_sub(&fail_after, 1) == 1;
}

tp_status
tp_heap_open(size_t limit_bytes, tp_heap **out)
{
    tp_heap *heap = told_to_fail() ? NULL : calloc(1, sizeof *heap);
    if (heap == NULL)
        return tp_fail(TP_EMEMORY, "no memory for a heap account");
    heap->limit = limit_bytes;
    pthread_mutex_init(&heap->lock, NULL);
    *out = heap;
    return TP_OK;
}

void
tp_heap_close(tp_heap *heap)
{
    if (heap != NULL)
        pthread_mutex_destroy(&heap->lock);
    free(heap);
}

void
tp_heap_use(tp_heap *heap, const tp_heap_hook *hook)
{
    heap->hook = hook == NULL ? (tp_heap_hook){0} : *hook;
}

static tp_status
take_host(size_t counted, const char *what, void **out)
{
    void *block = NULL;
    size_t align = counted >= HUGE_WORTH ? HUGE_PAGE : TP_ALIGN;
    if (counted > SIZE_MAX - sizeof(header) || posix_memalign(&block, align, counted + sizeof(header)) != 0)
        return tp_fail(TP_EMEMORY, "%s: the system refused %zu bytes", what, counted);
    if (counted >= HUGE_WORTH)
        madvise(block, counted + sizeof(header), MADV_HUGEPAGE); /* a wish: where it is refused, small pages do */
    size_t whole = counted + sizeof(header);
    int64_t steps = 0;
    for (size_t done = 0; done < whole; done += PIECE) { /* new pages take their time */
        memset((char *)block + done, 0, whole - done < PIECE ? whole - done : PIECE);
        if (tp_deadline_told_after(&steps, PIECE / 64)) {
            free(block);
            return tp_deadline_check_told();
        }
    }
    ((header *)block)->counted = counted;
    *out = (char *)block + sizeof(header);
    return TP_OK;
}

static tp_status
take_foreign(tp_heap *heap, size_t counted, const char *what, void **out)
{
    foreign_block *node = malloc(sizeof *node);
    if (node == NULL)
        return tp_fail(TP_EMEMORY, "%s: no memory to remember a block by", what);
    tp_status status = heap->hook.take(heap->hook.context, counted, what, &node->memory);
    if (status != TP_OK) {
        free(node);
        return status;
    }
    node->counted = counted;
    pthread_mutex_lock(&heap->lock);
    node->next = heap->foreign;
    heap->foreign = node;
    pthread_mutex_unlock(&heap->lock);
    *out = node->memory;
    return TP_OK;
}

/* *now: what is counted with it. */
static tp_status
count(tp_heap *heap, size_t counted, const char *what, size_t *now)
{
    *now = atomic_fetch_add(&heap->bytes, counted) + counted;
    if (heap->limit == 0 || *now <= heap->limit)
        return TP_OK;
    atomic_fetch_sub(&heap->bytes, counted);
    return tp_fail(TP_EMEMORY, "%s needs %zu bytes: %zu bytes short of the limit of %zu bytes", what, counted, *now - heap->limit,
                   heap->limit);
}

static void
raise_peak(tp_heap *heap, size_t now)
{
    size_t peak = atomic_load(&heap->peak);
    while (now > peak && !atomic_compare_exchange_weak(&heap->peak, &peak, now)) {
    }
}

tp_status
tp_heap_count(tp_heap *heap, size_t bytes, const char *what)
{
    size_t now;
    TP_TRY(count(heap, tp_align_bytes(bytes), what, &now));
    raise_peak(heap, now);
    return TP_OK;
}

void
tp_heap_uncount(tp_heap *heap, size_t bytes)
{
    atomic_fetch_sub(&heap->bytes, tp_align_bytes(bytes));
}

tp_status
tp_heap_alloc(tp_heap *heap, size_t bytes, const char *what, void **out)
{
    if (bytes == 0) {
        *out = NULL;
        return TP_OK;
    }
    size_t counted = tp_align_bytes(bytes), now;
    TP_TRY(count(heap, counted, what, &now));
    tp_status status = told_to_fail() ? tp_fail(TP_EMEMORY, "%s: the system refused %zu bytes", what, counted)
                       : heap->hook.take != NULL ? take_foreign(heap, counted, what, out)
                                                 : take_host(counted, what, out);
    if (status != TP_OK) {
        atomic_fetch_sub(&heap->bytes, counted);
        return status;
    }
    raise_peak(heap, now);
    atomic_fetch_add(&heap->allocations, 1);
    return TP_OK;
}

static void
free_foreign(tp_heap *heap, void *memory)
{
    pthread_mutex_lock(&heap->lock);
    foreign_block **at = &heap->foreign;
    while (*at != NULL && (*at)->memory != memory)
        at = &(*at)->next;
    foreign_block *node = *at;
    if (node != NULL)
        *at = node->next;
    pthread_mutex_unlock(&heap->lock);
    if (node == NULL)
        return;
    atomic_fetch_sub(&heap->bytes, node->counted);
    heap->hook.give(heap->hook.context, memory);
    free(node);
}

void
tp_heap_free(tp_heap *heap, void *memory)
{
    if (memory == NULL)
        return;
    if (heap->hook.give != NULL) {
        free_foreign(heap, memory);
        return;
    }
    header *block = (header *)((char *)memory - sizeof(header));
    atomic_fetch_sub(&heap->bytes, block->counted);
    free(block);
}

size_t
tp_heap_bytes(const tp_heap *heap)
{
    return atomic_load(&((tp_heap *)(uintptr_t)heap)->bytes);
}

size_t
tp_heap_peak_bytes(const tp_heap *heap)
{
    return atomic_load(&((tp_heap *)(uintptr_t)heap)->peak);
}

uint64_t
tp_heap_allocations(const tp_heap *heap)
{
    return atomic_load(&((tp_heap *)(uintptr_t)heap)->allocations);
}
