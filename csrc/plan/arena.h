/* Memory of one planner call: all of it ends together, on success and on error alike. Internal to the plan room. */
#ifndef TP_PLAN_ARENA_H
#define TP_PLAN_ARENA_H

#include <stddef.h>

#include "csrc/base/mem.h"

#define TP_ARENA_PAD 128 /* bytes behind every array, because kernels round up to whole vectors */

typedef struct {
    tp_heap *heap;
    void **held;
    int count, room;
} tp_arena;

TP_MUST_USE tp_status
tp_arena_open(tp_arena *arena);
/* count elements of `size` bytes, zeroed. */
TP_MUST_USE tp_status
tp_arena_take(tp_arena *arena, size_t count, size_t size, void **out);
void
tp_arena_close(tp_arena *arena);

/* count + 1 zeroed elements of what the pointer points to; in a function that returns tp_status. */
#define TP_ARENA_TAKE(arena, count, pointer)                                                                           \
    do {                                                                                                               \
        void *memory_ = NULL;                                                                                          \
        TP_TRY(tp_arena_take((arena), (size_t)(count) + 1, sizeof *(pointer), &memory_));                              \
        (pointer) = memory_;                                                                                           \
    } while (0)

#endif
