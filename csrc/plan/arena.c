#include "csrc/plan/arena.h"

#include <string.h>

tp_status
tp_arena_open(tp_arena *arena)
{
    memset(arena, 0, sizeof *arena);
    return tp_heap_open(0, &arena->heap);
}

tp_status
tp_arena_take(tp_arena *arena, size_t count, size_t size, void **out)
{
    if (arena->count == arena->room) {
        int room = 2 * arena->room + 32;
        void *held = NULL;
        TP_TRY(tp_heap_alloc(arena->heap, (size_t)room * sizeof(void *), "the planner's list of arrays", &held));
        if (arena->count > 0)
            memcpy(held, arena->held, (size_t)arena->count * sizeof(void *));
        tp_heap_free(arena->heap, arena->held);
        arena->held = held;
        arena->room = room;
    }
    TP_TRY(tp_heap_alloc(arena->heap, count * size + TP_ARENA_PAD, "the planner", out));
    arena->held[arena->count++] = *out;
    return TP_OK;
}

void
tp_arena_close(tp_arena *arena)
{
    for (int i = 0; i < arena->count; i++)
        tp_heap_free(arena->heap, arena->held[i]);
    tp_heap_free(arena->heap, arena->held);
    tp_heap_close(arena->heap);
}
