#include "cuda/emu/race_phases.h"

#include "cuda/emu/machine.h"

#ifdef TP_CUDA_RACES

#include <stdlib.h>

#define WARPS (SIMT_THREADS / TP_WARP)
#define MEETINGS 64 /* barriers of a block */

/* Of each thread, up to when what it did is known; and told to the asynchronous proxy. */
typedef struct {
    uint32_t done[SIMT_THREADS], told[SIMT_THREADS];
} knowledge;

/* Of each warp, when it last read something; and when a product of its warpgroup that did was over. 0: never. */
typedef struct {
    uint32_t read[WARPS], product[WARPS];
} readers;

typedef struct {
    int phased, meetings;
    uint32_t now, least_at, used, room;
    int least_of; /* the warpgroup of which `least` was computed, at least_at */
    knowledge *of, least;
    const void *at[MEETINGS];
    knowledge *come, *over; /* of a barrier: who comes brings what it knows; who goes on has what was there when all had come */
    readers *pool;
} watcher;

static __thread watcher w;

static void *
take(size_t count, size_t bytes)
{
    void *memory = calloc(count, bytes);
    if (memory == NULL)
        abort();
    return memory;
}

void
tp_race_phases_grid(void)
{
    w.used = 1; /* 0 is nobody */
}

void
tp_race_phases_block(void)
{
    if (w.phased)
        memset(w.of, 0, SIMT_THREADS * sizeof *w.of);
    w.phased = w.meetings = 0;
    w.now = 1;
    w.least_at = 0;
}

int
tp_race_phased(void)
{
    return w.phased;
}

uint32_t
tp_race_now(void)
{
    return w.now;
}

static void
join(knowledge *to, const knowledge *from)
{
    int threads = tp_simt_machine->threads;
    for (int i = 0; i < threads; i++) {
        to->done[i] = to->done[i] > from->done[i] ? to->done[i] : from->done[i];
        to->told[i] = to->told[i] > from->told[i] ? to->told[i] : from->told[i];
    }
}

/* ---- meetings ------------------------------------------------------------------------------------------------------------- */

static int
meeting_of(const void *at)
{
    int i = 0;
    while (i < w.meetings && w.at[i] != at)
        i++;
    if (i < w.meetings)
        return i;
    if (i == MEETINGS)
        abort();
    if (w.of == NULL) {
        w.of = take(SIMT_THREADS, sizeof *w.of);
        w.come = take(MEETINGS, sizeof *w.come);
        w.over = take(MEETINGS, sizeof *w.over);
    }
    w.phased = 1;
    w.at[w.meetings++] = at;
    memset(&w.come[i], 0, sizeof w.come[i]);
    memset(&w.over[i], 0, sizeof w.over[i]);
    return i;
}

void
tp_race_phases(const void *at)
{
    (void)meeting_of(at);
}

void
tp_race_come(const void *at, int thread, int copies)
{
    int i = meeting_of(at);
    if (!copies)
        join(&w.come[i], &w.of[thread]);
    w.come[i].done[thread] = w.now++;
}

void
tp_race_over(const void *at)
{
    int i = meeting_of(at);
    w.over[i] = w.come[i];
}

void
tp_race_pass(const void *at)
{
    join(&w.of[tp_simt_machine->current], &w.over[meeting_of(at)]);
    w.now++;
}

void
tp_race_phases_warp(int warp)
{
    if (!w.phased)
        return;
    knowledge *first = &w.of[warp * TP_WARP];
    for (int lane = 0; lane < TP_WARP; lane++) {
        join(first, first + lane);
        first->done[warp * TP_WARP + lane] = w.now;
    }
    for (int lane = 1; lane < TP_WARP; lane++)
        first[lane] = *first;
    w.now++;
}

void
tp_race_phases_fence(void)
{
    int thread = tp_simt_machine->current;
    if (!w.phased)
        return;
    memcpy(w.of[thread].told, w.of[thread].done, sizeof w.of[thread].told);
    w.of[thread].told[thread] = w.now++;
}

/* ---- who knows ------------------------------------------------------------------------------------------------------------ */

int
tp_race_knows(int thread, int other, uint32_t time)
{
    return thread == other || (w.phased && w.of[thread].done[other] >= time);
}

void
tp_race_reads(uint32_t *index, int warp, int product)
{
    if (!w.phased)
        return;
    if (*index == 0) {
        if (w.used >= w.room) {
            w.room = w.room ? 2 * w.room : 1 << 12;
            w.pool = realloc(w.pool, w.room * sizeof *w.pool);
            if (w.pool == NULL)
                abort();
        }
        *index = w.used++;
        memset(&w.pool[*index], 0, sizeof *w.pool);
    }
    *(product ? &w.pool[*index].product[warp] : &w.pool[*index].read[warp]) = w.now;
}

int
tp_race_knows_readers(int thread, uint32_t index)
{
    const readers *r = index == 0 ? NULL : &w.pool[index];
    for (int warp = 0; r != NULL && warp < WARPS; warp++) {
        int all = 1, any = r->product[warp] == 0;
        for (int i = warp * TP_WARP; (r->read[warp] > 0 || !any) && i < (warp + 1) * TP_WARP; i++) {
            all &= tp_race_knows(thread, i, r->read[warp]);
            any |= tp_race_knows(thread, i, r->product[warp]);
        }
        if (!all || !any)
            return 0;
    }
    return 1;
}

/* What all 128 threads know, of each the least. */
static void
least_of(int group)
{
    const knowledge *of = &w.of[group * SIMT_WARPGROUP];
    if (w.least_at == w.now && w.least_of == group)
        return;
    w.least = of[0];
    for (int i = 1; i < SIMT_WARPGROUP; i++)
        for (int y = 0; y < tp_simt_machine->threads; y++) {
            w.least.done[y] = w.least.done[y] < of[i].done[y] ? w.least.done[y] : of[i].done[y];
            w.least.told[y] = w.least.told[y] < of[i].told[y] ? w.least.told[y] : of[i].told[y];
        }
    w.least_at = w.now;
    w.least_of = group;
}

const char *
tp_race_warpgroup_knows(int writer, uint32_t time)
{
    least_of(tp_simt_machine->current / SIMT_WARPGROUP);
    if (w.least.done[writer] < time)
        return "multiplies, with no barrier between, what a thread wrote";
    return w.least.told[writer] < time ? "multiplies what a thread wrote and told by no fence" : NULL;
}

#endif
