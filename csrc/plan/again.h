/* How a stage makes again what its blocks do not keep: which R stand where (tp_program_save_memory). */
#ifndef TP_PLAN_AGAIN_H
#define TP_PLAN_AGAIN_H

#include <stdint.h>

/* Of the stages of one copy of the model. */
typedef struct {
    int stages;
    const int32_t *boundary;         /* [stages + 1] blocks, ascending */
    const int32_t *kind;             /* [blocks] tp_block_kind */
    const uint8_t *recompute;        /* [blocks] */
    int32_t micros;
    const int32_t *batches, *slices; /* [micros] */
    const int32_t *lengths;          /* [units] */
    int keeps_keys;                  /* tp_stage_ops.keeps_keys: of a GPU 3 */
    int waits;                       /* 1: W may wait (tp_program_split) */
} tp_again_asked;

/* ways: [stages] of tp_again: what takes least memory, by the rows that csrc/stage/room.c would lay out. */
void
tp_again_ways(const tp_again_asked *asked, uint8_t *ways);

#endif
