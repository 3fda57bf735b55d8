/* The instruction IR: one list of 16-byte instructions per rank. The builders make compute-only programs, passes turn
 * programs into programs, the checker proves one, the simulator times it, the engine runs it.
 *
 * Text: one line per rank, words `<stage><OP><micro>.<slice>[@peer]` separated by one space, e.g. `2F0.3`, `2SF0.3@3`;
 * parse(print(p)) == p for programs whose slots have not been assigned or are reproduced by assigning them again. */
#ifndef TP_SCHED_SCHED_H
#define TP_SCHED_SCHED_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/base/status.h"

/* F forward, B whole backward, I / W its input and weight halves, R recompute, SF/RF, SB/RB send and receive activation
 * and gradient, SO/SI swap out and in, AR exchange of a tied weight's gradients, OPT update. */
#define TP_OP_MAP(X) X(F) X(B) X(I) X(W) X(R) X(SF) X(RF) X(SB) X(RB) X(SO) X(SI) X(AR) X(OPT)
typedef enum {
#define TP_OP_ENUM(name) TP_OP_##name,
    TP_OP_MAP(TP_OP_ENUM)
#undef TP_OP_ENUM
        TP_OPS
} tp_op;

typedef struct {
    uint16_t op, stage, micro, slice; /* stage: the global (virtual) stage */
    int16_t peer;                     /* rank at the other end of a comm op; -1 */
    uint16_t flags;
    uint32_t slot;                    /* TP_SLOT(activation, gradient): buffers of this micro-batch on this stage */
} tp_instr;

#define TP_SLOT(activation, gradient) ((uint32_t)(activation) | (uint32_t)(gradient) << 16)
#define TP_SLOT_ACTIVATION(slot) ((slot)&0xffffu)
#define TP_SLOT_GRADIENT(slot) ((slot) >> 16)

typedef struct {
    int32_t ranks, stages, micros; /* stages: virtual stages, ranks * chunks */
    int32_t max_slices;
    int32_t *slices;               /* [micros] slices of each micro-batch */
    int32_t *rank_of;              /* [stages] the rank that holds a virtual stage */
    int64_t *begin;                /* [ranks + 1] rank r's instructions are code[begin[r]..begin[r + 1]) */
    tp_instr *code;
} tp_program;

/* ---- builders (compute only: F and B, or F, I, W) ------------------------------------------------------------------- */
/* slices: [micros] counts. The order of micro-batches in backward is ascending in every builder of ours, so that weight
 * gradients accumulate in one canonical order whatever the schedule (bit-equal training). */
typedef enum { TP_GPIPE, TP_1F1B, TP_SEQ1F1B, TP_INTERLEAVED, TP_SCHEDULES } tp_schedule;
TP_MUST_USE tp_status
tp_program_build(tp_schedule schedule, int ranks, int chunks, int micros, const int32_t *slices, tp_program **out);
/* An empty program with room for counts[ranks] instructions: for builders and parsers. */
TP_MUST_USE tp_status
tp_program_open(int ranks, int stages, int micros, const int32_t *slices, const int32_t *rank_of, const int64_t *counts,
                tp_program **out);
void
tp_program_close(tp_program *program);
int
tp_program_equal(const tp_program *a, const tp_program *b);

/* ---- text ------------------------------------------------------------------------------------------------------------ */
/* Bytes needed (without the final NUL) whatever the size of the buffer; like snprintf. */
size_t
tp_program_print(const tp_program *program, char *text, size_t size);
TP_MUST_USE tp_status
tp_program_parse(const char *text, size_t length, tp_program **out);

/* ---- durations: what the simulator, the fill pass and the bounds read ------------------------------------------------ */
/* seconds[op] NULL: the op takes 0; else stride_* index it: value = seconds[op][stage * stage_stride + unit], where
 * unit = offset[micro] + slice, offset = running sum of slices (stage_stride = sum of all slices), or 0-stride scalars. */
typedef struct {
    const double *seconds[TP_OPS]; /* F, B, I, W, OPT ... ; B missing but I and W given: B = I + W */
    int64_t stage_stride, unit_stride;
    const double *comm_s;          /* [stages] seconds of a message that leaves this stage (SF: to the next, SB: to the
                                      one before); NULL: 0 */
    const double *comm_unit_s;     /* or [stages * units] per message; NULL: comm_s */
} tp_durations;

/* ---- passes ----------------------------------------------------------------------------------------------------------- */
/* B -> I and W; each W is placed where its rank would wait otherwise (time-driven by `durations`), at the latest when
 * more than `pending` micro-batches would have gradients waiting (pending >= 1). Order of W: micro ascending, slice
 * descending. pending 0: W directly behind its I. */
TP_MUST_USE tp_status
tp_program_split(const tp_program *program, const tp_durations *durations, int pending, tp_program **out);
/* Adds RF/SF/RB/SB (the sender places the peer's receive; both ends of every pair in the same order), slots (activation
 * slot: first F to last W or B of a micro-batch; gradient slot: first I or B to last W or B), `tied` != 0: an AR between
 * the ranks of the first and the last stage where they differ, and one OPT per stage at the end. */
TP_MUST_USE tp_status
tp_program_lower(const tp_program *program, int tied, tp_program **out);
/* The program without comms, slots, AR and OPT. */
TP_MUST_USE tp_status
tp_program_strip(const tp_program *program, tp_program **out);
/* Slots that `stage` uses: 1 + the largest number, 0 if it has none. */
int
tp_program_activation_slots(const tp_program *program, int stage);
int
tp_program_gradient_slots(const tp_program *program, int stage);

/* ---- proof -------------------------------------------------------------------------------------------------------------- */
/* ESCHEDULE naming rank, position, instruction and rule, with the neighbourhood and `<-- here`; tp_error_rank/position set.
 * Works on compute-only and on lowered programs; on lowered ones also comms, deadlock (rendezvous and eager) and slots. */
TP_MUST_USE tp_status
tp_program_check(const tp_program *program);

/* ---- timing -------------------------------------------------------------------------------------------------------------- */
#define TP_BUBBLE_MAP(X) X(warmup) X(cooldown) X(imbalance) X(slice_skew) X(recompute) X(comm)
typedef enum {
#define TP_BUBBLE_ENUM(name) TP_BUBBLE_##name,
    TP_BUBBLE_MAP(TP_BUBBLE_ENUM)
#undef TP_BUBBLE_ENUM
        TP_BUBBLES
} tp_bubble;

typedef struct {
    int64_t operations;      /* intervals of compute ops (and AR, OPT), grouped by rank, in program order */
    int64_t *begin;          /* [ranks + 1] */
    double *start_s, *end_s; /* [operations] */
    int32_t *at;             /* [operations] position in the rank's program */
    double makespan_s;
    double *busy_s;          /* [ranks] */
    double bubbles_s[TP_BUBBLES]; /* summed over ranks; their sum = ranks * makespan - sum of busy */
    double *peak_bytes;      /* [ranks] with activation_bytes, else 0 */
    double lower_bound_s;    /* no order of these operations on this placement is faster */
} tp_timeline;

/* Messages take comm_s as a lag between the ranks (overlapped). activation_bytes: NULL, or [stages * units] (or scalar by
 * strides 0) held from F to B (or W). keep_intervals 0: only the totals are filled. Deadlock: ESCHEDULE. */
TP_MUST_USE tp_status
tp_program_simulate(const tp_program *program, const tp_durations *durations, const double *activation_bytes,
                    int64_t bytes_stage_stride, int64_t bytes_unit_stride, int keep_intervals, tp_timeline **out);
void
tp_timeline_close(tp_timeline *timeline);

#endif
