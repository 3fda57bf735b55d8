/* The part of cuda/emu/race.c for blocks whose threads meet at phases and named barriers (cuda/pipeline.h): who knows of whom
 * (vector clocks: Fidge 1988; Mattern 1989; of a thread's last reads as in Flanagan and Freund 2009, "FastTrack"). Time passes at
 * meetings alone. */
#ifndef TP_CUDA_EMU_RACE_PHASES_H
#define TP_CUDA_EMU_RACE_PHASES_H

#include <stdint.h>

#ifdef TP_CUDA_RACES
/* A grid, a block, begins; a warp has met; the current fiber has told the asynchronous proxy of all that it knows. */
void
tp_race_phases_grid(void);
void
tp_race_phases_block(void);
void
tp_race_phases_warp(int warp);
void
tp_race_phases_fence(void);
/* 1 once this block has initialised a barrier, or come to a named one. */
int
tp_race_phased(void);
uint32_t
tp_race_now(void);
/* Does `thread` know what `other` had done at that time? */
int
tp_race_knows(int thread, int other, uint32_t time);
/* A warp reads now what has these readers, or a product of its warpgroup that did is over. Nothing, unless tp_race_phased. */
void
tp_race_reads(uint32_t *readers, int warp, int product);
/* Does it know that all of them are done: all lanes of a warp that read; one of a warp whose product it was? */
int
tp_race_knows_readers(int thread, uint32_t readers);
/* What is wrong if the current fiber's warpgroup multiplies what `writer` wrote at that time; NULL: nothing. */
const char *
tp_race_warpgroup_knows(int writer, uint32_t time);
#endif

#endif
