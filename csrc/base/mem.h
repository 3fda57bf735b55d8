/* A counted, aligned heap. Each rank's stage and engine take all their memory from one heap, so that its peak is the
 * figure the plan predicts, to the byte, and its count of calls proves that a step allocates nothing. */
#ifndef TP_BASE_MEM_H
#define TP_BASE_MEM_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/base/status.h"

#define TP_ALIGN 64 /* bytes: one cache line, one AVX-512 register */

typedef struct tp_heap tp_heap;

/* Open an account. limit_bytes 0: no limit. The caller ends it with tp_heap_close (which frees nothing still held). */
TP_MUST_USE tp_status
tp_heap_open(size_t limit_bytes, tp_heap **out);
void
tp_heap_close(tp_heap *heap);
/* Other memory than the host's, for every block from now on: the account stays the same code. Both calls are made with
 * counted bytes; `give` with those of the block's `take`. hook NULL: the host's again, once nothing of the other is held. */
typedef struct {
    void *context;
    /* Aligned to TP_ALIGN at least; what is in it is the hook's business. EMEMORY names what and what there is. */
    tp_status (*take)(void *context, size_t bytes, const char *what, void **out);
    void (*give)(void *context, void *memory);
} tp_heap_hook;
void
tp_heap_use(tp_heap *heap, const tp_heap_hook *hook);
/* Zeroed memory aligned to TP_ALIGN; `what` names it in the error. Counts tp_align_bytes(bytes). EMEMORY: names what,
 * bytes, and how many bytes short of the limit. bytes 0 gives NULL and counts nothing. Thread-safe. */
TP_MUST_USE tp_status
tp_heap_alloc(tp_heap *heap, size_t bytes, const char *what, void **out);
/* NULL is allowed. */
void
tp_heap_free(tp_heap *heap, void *memory);
/* Count tp_align_bytes(bytes) that were taken elsewhere and are the rank's all the same, as memory that others map; EMEMORY as above.
 * And no longer. */
TP_MUST_USE tp_status
tp_heap_count(tp_heap *heap, size_t bytes, const char *what);
void
tp_heap_uncount(tp_heap *heap, size_t bytes);
size_t
tp_heap_bytes(const tp_heap *heap);
size_t
tp_heap_peak_bytes(const tp_heap *heap);
uint64_t
tp_heap_allocations(const tp_heap *heap);

static inline size_t
tp_align_bytes(size_t bytes)
{
    return (bytes + (TP_ALIGN - 1)) & ~(size_t)(TP_ALIGN - 1);
}

/* Make the N-th allocation from now on fail (0: never), in any heap: for tests of every error path. */
void
tp_heap_fail_after(int64_t allocations);

#endif
