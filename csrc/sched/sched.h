/* The instruction IR: one list of 16-byte instructions per rank. The builders make compute-only programs, passes turn
 * programs into programs, the checker proves one, the simulator times it, the engine runs it.
 *
 * Text: one line per rank, words `<stage><OP><micro>.<slice>[half][@peer]` separated by one space, e.g. `2F0.3`, `2SF0.3@3`; an idle
 * last rank is a comma, for empty lines at the end are no ranks;
 * parse(print(p)) == p for programs whose slots have not been assigned or are reproduced by assigning them again.
 *
 * What an instruction means to whoever runs it:
 *  - F, B, I, W, R compute; one rank runs its list in order, one at a time. F (and B, I) of a stage whose neighbour lives
 *    on another rank first waits for its message.
 *  - `vRF`, `vRB` announce the receive of stage v's input and NEVER BLOCK (comm.h: recv_post); the F (B, I) that reads the
 *    message waits for it. `vSF`, `vSB` send stage v's output and return when its buffer may be reused: at once while
 *    there is buffer (eager), at the latest when the peer has posted the receive (rendezvous).
 *  - Halves (AutoPipe's sliced schedule, Liu et al. 2022, sec. III-C): the forward of a micro-batch of one slice may be two
 *    instructions, the first half of its sequences (`2F0.0a`) and then the second (`2F0.0b`), each with its own message
 *    (`2SF0.0a@3`); backward is of the whole. Halves marked `2F0.0a+`, `2F0.0b+` leave as one message (`2SF0.0@3`) behind
 *    the second. Who receives halves apart from another rank reads them in halves.
 *  - Guests (BPipe's balanced memory, Kim et al. 2023): `0SE4.0@3` sends all that stage 0 keeps of micro-batch 4 to rank 3,
 *    behind its last forward (and its SF; on its rank the next stage's forward), and its slot is free; rank 3 has announced it
 *    (`0RE4.0@0`: a slot for a guest is taken) and sends it back (`0SL4.0@0`: waits until it is there; the guest's slot is free) once
 *    rank 0 has announced that (`0RL4.0@3`: a slot is taken again). The R, I or B that reads it waits for it. They are of a whole
 *    micro-batch, written as its slice 0, and builders place all four: lower adds messages between neighbours alone. A stage's
 *    guests are on one rank.
 *  - U (PipeDream's asynchronous updates, Narayanan et al. 2019): its stage's update by this micro-batch's gradient alone, behind the
 *    last B or W of it. Forwards read the newest values from then on; what follows a forward (R, B, I, W of that micro-batch) reads
 *    those that the forward read, of which the stage keeps as many versions as that needs. Written as slice 0; all micro-batches of
 *    all stages have one, or none has. OPT then ends the step and updates nothing.
 *  - AR and OPT end a rank's list: at most one AR for each copy of the model (both ends meet), then one OPT per stage. The first
 *    OPT waits until every rank has come to its own, because the norm of the gradient is global; by then each rank has
 *    added up its replicas' gradients and measured the sums (tp_durations.sum_s, norm_s). */
#ifndef TP_SCHED_SCHED_H
#define TP_SCHED_SCHED_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/base/status.h"

/* F forward, B whole backward, I / W its input and weight halves, R recompute, SF/RF, SB/RB send and receive activation
 * and gradient, SO/SI swap out and in, AR gradients of a tied weight's rows to the head's stage, OPT update, SE/RE, SL/RL send and receive
 * evicted and loaded activations, U update by one micro-batch. */
#define TP_OP_MAP(X)                                                                                                   \
    X(F) X(B) X(I) X(W) X(R) X(SF) X(RF) X(SB) X(RB) X(SO) X(SI) X(AR) X(OPT) X(SE) X(RE) X(SL) X(RL) X(U)
typedef enum {
#define TP_OP_ENUM(name) TP_OP_##name,
    TP_OP_MAP(TP_OP_ENUM)
#undef TP_OP_ENUM
        TP_OPS
} tp_op;

typedef struct {
    uint16_t op, stage, micro, slice; /* stage: the global (virtual) stage */
    int16_t peer;                     /* rank at the other end of a comm op; -1 */
    uint16_t flags;                   /* of F, SF, RF: TP_HALF_*; of F: TP_HALF_JOINED; TP_OVERLAPS; of R: TP_WITHIN */
    uint32_t slot;                    /* TP_SLOT(activation, gradient): buffers of this micro-batch on this stage; of RE and SL:
                                         TP_SLOT(guest, 0) */
} tp_instr;

/* Of which half an instruction is; neither: of the whole. */
#define TP_HALF_FIRST 1u
#define TP_HALF_SECOND 2u
#define TP_HALVES (TP_HALF_FIRST | TP_HALF_SECOND)
#define TP_HALF_JOINED 4u
/* Of F, B or I: it overlaps with the next op that computes, one forward and the other backward (DualPipe); text `0F1.0& 3B0.0`.
 * A mark for those who can: the simulator and the engine here run one behind the other. */
#define TP_OVERLAPS 8u
/* On SO and SI, on all of a program or on none: the rank's copier makes the copies beside the rank's work, one after another in
 * program order (`0SO1.0&`). The instruction begins a copy and does not wait. An F waits for the copies out of its stage that were
 * begun before it (they read what it overwrites), a B or I for the copy in of its slice. Without it the rank copies by itself. */
#define TP_BESIDE TP_OVERLAPS
/* On SO beside the work, on all of a program or on none (`0SO1.0&&`): each stage that swaps has two buffers for what its forward
 * makes, one for even and one for odd activation slots, and an F waits only for the copies out of the one that it overwrites. */
#define TP_TWO_PLACES 16u
/* On R (`0R1.0+`), right before its B, which is whole and of a micro-batch of one slice, on all R of a stage or on none: that B makes
 * each block again right before the block's own gradients, so that all share one's room (Chen et al. 2016; Megatron-LM). So R waits
 * for what B reads, and stands for the time that B spends so. */
#define TP_WITHIN 32u

#define TP_SLOT(activation, gradient) ((uint32_t)(activation) | (uint32_t)(gradient) << 16)
#define TP_SLOT_ACTIVATION(slot) ((slot)&0xffffu)
#define TP_SLOT_GRADIENT(slot) ((slot) >> 16)

typedef struct {
    int32_t ranks, stages, micros; /* stages: virtual stages, ranks * chunks */
    int32_t max_slices;
    int32_t copies;                /* of the model: 1, or 2 (below) */
    int32_t *slices;               /* [micros] slices of each micro-batch */
    int32_t *rank_of;              /* [stages] the rank that holds a virtual stage */
    int64_t *begin;                /* [ranks + 1] rank r's instructions are code[begin[r]..begin[r + 1]) */
    tp_instr *code;
    int64_t *offset;               /* [micros + 1] running sum of slices: unit (micro, slice) is offset[micro] + slice */
} tp_program;

/* Two copies (Chimera, Li & Hoefler 2021): the first half of the stages is one model, the second half the same model again. Stages
 * follow each other within a copy alone, and so do micro-batches: the first half of them goes through the first copy, the second
 * half through the second. Stage v is on rank v, stage ranks + v on rank ranks - 1 - v, ranks is even. The text has no word for
 * that; it is recognised: a program has two copies if its stages are placed so and at least three quarters of its forwards keep to
 * the halves. (Of a program with one copy that passes check, half of them do.) */
static inline int
tp_program_copy_stages(const tp_program *program)
{
    return program->stages / program->copies;
}
static inline int
tp_program_copy_micros(const tp_program *program)
{
    return program->micros / program->copies;
}
/* First and last stage of its copy? */
static inline int
tp_program_is_first(const tp_program *program, int stage)
{
    return stage == 0 || (program->copies > 1 && stage == program->stages / 2);
}
static inline int
tp_program_is_last(const tp_program *program, int stage)
{
    return stage == program->stages - 1 || (program->copies > 1 && stage == program->stages / 2 - 1);
}
/* The micro-batches that go through a stage: begin to end - 1. */
static inline int
tp_program_micro_begin(const tp_program *program, int stage)
{
    return program->copies > 1 && stage >= program->stages / 2 ? program->micros / 2 : 0;
}
static inline int
tp_program_micro_end(const tp_program *program, int stage)
{
    return program->copies > 1 && stage < program->stages / 2 ? program->micros / 2 : program->micros;
}
static inline int64_t
tp_program_units(const tp_program *program)
{
    return program->offset[program->micros];
}
static inline int64_t
tp_program_unit(const tp_program *program, const tp_instr *instr)
{
    return program->offset[instr->micro] + instr->slice;
}
/* Does `stage` receive its forward input (SF of the stage before) from another rank? */
static inline int
tp_program_remote(const tp_program *program, int stage)
{
    return stage > 0 && stage < program->stages && program->rank_of[stage - 1] != program->rank_of[stage] &&
           !tp_program_is_first(program, stage);
}

/* Is it an R that the B behind it makes? */
static inline int
tp_instr_is_within(const tp_instr *instr)
{
    return instr->op == TP_OP_R && instr->flags & TP_WITHIN;
}
/* The halves that an instruction is of: the whole is both. */
static inline unsigned
tp_instr_halves(const tp_instr *instr)
{
    return instr->flags & TP_HALVES ? instr->flags & TP_HALVES : TP_HALVES;
}

/* ---- builders (compute only: F and B, or F, I, W) ------------------------------------------------------------------- */
/* slices: [micros] counts. The order of micro-batches in backward is ascending in every builder of ours, so that weight
 * gradients accumulate in one canonical order whatever the schedule (bit-equal training). */
typedef enum { TP_GPIPE, TP_1F1B, TP_SEQ1F1B, TP_INTERLEAVED, TP_LOOPED_BFS, TP_ZB_H1, TP_ZB_H2, TP_ZB_V, TP_SCHEDULES } tp_schedule;
TP_MUST_USE tp_status
tp_program_build(tp_schedule schedule, int ranks, int chunks, int micros, const int32_t *slices, tp_program **out);
/* AutoPipe's sliced 1F1B (Liu et al. 2022, sec. III-C): micro-batches of one slice in 1F1B's order, the forwards of the
 * first `split` of them in halves, and the message of each stage's last warm-up forward joined. EVALUE: split below 0 or
 * above the micro-batches. */
TP_MUST_USE tp_status
tp_program_build_sliced(int ranks, int micros, int split, tp_program **out);
/* TP_ZB_V has 2 chunks and at least 2 ranks - 1 micro-batches; fewer, or other times than f = i = w: list scheduling.
 *
 * ZB-V for any times: list scheduling, with which TP_ZB_V's closed rule competes where it applies. Rank r holds stages r and
 * 2 ranks - 1 - r, and at most `most` activations of a stage at once, counted from F to W. */
typedef struct {
    int ranks, micros, most;
    const int32_t *slices;               /* [micros] */
    double forward_s, input_s, weight_s; /* nominal, of one stage */
} tp_zigzag_request;
/* EVALUE; EINFEASIBLE: `most` is too small for anything to move. */
TP_MUST_USE tp_status
tp_program_build_zb_v(const tp_zigzag_request *request, tp_program **out);
/* Hanayo (Liu et al. 2023), its placement: 2 waves chunks, a micro-batch goes down the ranks and up again `waves` times. The order
 * is ours: the faster of list scheduling at the nominal times with whole backwards (B takes input_s + weight_s) and, for one
 * wave, ZB-V's pattern with its weight gradients left where their I is. */
TP_MUST_USE tp_status
tp_program_build_hanayo(const tp_zigzag_request *request, int waves, tp_program **out);
/* DualPipeV: rank r holds stages r and 2 ranks - 1 - r; pairs of F and B are marked TP_OVERLAPS. EVALUE: fewer than 2 ranks
 * micro-batches. */
TP_MUST_USE tp_status
tp_program_build_dualpipe_v(int ranks, int micros, const int32_t *slices, tp_program **out);
/* Chimera (Li & Hoefler 2021, sec. 3): two copies, one pipeline down the ranks and one up, half of the micro-batches each; units of
 * as many micro-batches as there are ranks, one behind the other (direct concatenation). EVALUE: an odd number of ranks or of
 * micro-batches. */
TP_MUST_USE tp_status
tp_program_build_chimera(int ranks, int micros, const int32_t *slices, tp_program **out);
/* BPipe (Kim et al. 2023): 1F1B, its unit the whole micro-batch, whose rank r < ranks / 2 keeps some of its activations at rank
 * ranks - 1 - r between forward and backward, so that no rank holds those of more than tp_bpipe_most(ranks) micro-batches, guests
 * included. What is loaded comes while another micro-batch goes forward (nominal times: B takes two F). EVALUE. */
TP_MUST_USE tp_status
tp_program_build_bpipe(int ranks, int micros, const int32_t *slices, tp_program **out);
/* PipeDream (Narayanan et al. 2019): 1F1B's order, its unit the whole micro-batch, with a U behind each backward. EVALUE. */
TP_MUST_USE tp_status
tp_program_build_pipedream(int ranks, int micros, const int32_t *slices, tp_program **out);
/* ceil((ranks + 2) / 2). 1F1B's pairs of ranks hold ranks + 1 together; one more lets a load overlap. */
static inline int
tp_bpipe_most(int ranks)
{
    return (ranks + 3) / 2;
}
/* An empty program with room for counts[ranks] instructions and one copy of the model: for builders and parsers. */
TP_MUST_USE tp_status
tp_program_open(int ranks, int stages, int micros, const int32_t *slices, const int32_t *rank_of, const int64_t *counts,
                tp_program **out);
void
tp_program_close(tp_program *program); /* NULL is allowed */
int
tp_program_equal(const tp_program *a, const tp_program *b);

/* A program from lists of instructions: dimensions, placement, copies and slice counts are what the instructions say (a stage's
 * rank is the one that has most of its instructions). Slots are kept where keep_slots, else assigned if it has an OPT, else 0.
 * ESCHEDULE: an operation that there is not. */
TP_MUST_USE tp_status
tp_program_from_code(int ranks, const int64_t *counts, const tp_instr *code, int keep_slots, tp_program **out);

/* ---- text ------------------------------------------------------------------------------------------------------------ */
/* Bytes needed (without the final NUL) whatever the size of the buffer; like snprintf. */
size_t
tp_program_print(const tp_program *program, char *text, size_t size);
TP_MUST_USE tp_status
tp_program_parse(const char *text, size_t length, tp_program **out);
/* torch.distributed.pipelining's compute-only CSV: one line per rank, actions `<stage><F|B|I|W><micro>` or
 * `(<action>;<action>)OVERLAP_F_B` with commas between; empty cells (idle steps) are skipped. Comms, AR and OPT are left out
 * in writing: torch adds its own. ESCHEDULE where the program has what that format has no word for: more than one slice,
 * halves, R, SO, SI. Its compute_comms CSV is read, too: SEND_F, RECV_F, SEND_B and RECV_B, if there are any, are checked as SF, RF,
 * SB and RB are, UNSHARD, RESHARD and REDUCE_GRAD to stand around and behind what their stage computes, and none is in the program.
 * Reading names line and cell, both from 1; ESCHEDULE naming the line where check refuses. */
TP_MUST_USE tp_status
tp_program_can_csv(const tp_program *program);
size_t
tp_program_print_csv(const tp_program *program, char *text, size_t size);
TP_MUST_USE tp_status
tp_program_parse_csv(const char *text, size_t length, tp_program **out);
/* One word, at most TP_WORD bytes with its NUL; returns its length. */
#define TP_WORD 40
size_t
tp_instr_print(const tp_instr *instr, char word[TP_WORD]);
const char *
tp_op_name(int op); /* "?" where there is none */

/* ---- durations: what the simulator, the fill pass and the bounds read ------------------------------------------------ */
/* seconds[op] NULL: the op takes 0; else stride_* index it: value = seconds[op][stage * stage_stride + unit], where
 * unit = offset[micro] + slice, offset = running sum of slices (stage_stride = sum of all slices), or 0-stride scalars. */
typedef struct {
    const double *seconds[TP_OPS]; /* F, B, I, W, OPT ... ; B missing but I and W given: B = I + W */
    int64_t stage_stride, unit_stride;
    const double *comm_s;          /* [stages] seconds of a message that leaves this stage (SF: to the next, SB: to the
                                      one before); NULL: 0 */
    const double *comm_unit_s;     /* or [stages * units] per message; NULL: comm_s */
    const double *back_comm_unit_s; /* [stages * units] of SB where the link to the stage before is another one than that to
                                       the next; NULL: as SF */
    const double *latency_s;        /* [2 * stages] forward and back: the last seconds of a message, in which its link already takes
                                       the next one (csrc/sched/links.h); NULL: a link carries any number of messages at once */
    const double *half_s[2][TP_OPS]; /* of the first and the second half: F, SF, RF; strides as above; NULL: half the whole's */
    const double *half_comm_s[2];    /* [stages * units]; NULL: half the whole's */
    const double *sum_s;             /* the part of OPT's seconds in which replicas add up gradients; strides as above; NULL: 0 */
    const double *norm_s;            /* the part of OPT's seconds in which the sums' norm is measured; both parts come before the ranks
                                        meet; strides as above; NULL: 0 */
    const double *gather_s;          /* the part of OPT's seconds, behind the meeting, in which a rank takes what others have updated;
                                        strides as above; NULL: 0 */
    /* Not of OPT's seconds: those in which replicas add up a stage's gradients beside the work, from when the first of its blocks has gone
     * back last, and of these those of the block that goes back last of all. A rank's are summed one after another; what is left of them
     * comes before OPT. Strides as above; NULL: 0, and all of beside_s. */
    const double *beside_s, *last_s;
    const double *guest_comm_s;      /* [stages * units], read at slice 0: of a guest of the stage, there or back. Guests have a
                                        link of their own, which takes one at a time in each direction; NULL: 0 */
} tp_durations;
/* Seconds of an instruction with these flags; B without a table is I + W. */
static inline double
tp_durations_s(const tp_durations *d, int op, unsigned flags, int stage, int64_t unit)
{
    int64_t at = stage * d->stage_stride + unit * d->unit_stride;
    const double *table = d->seconds[op];
    if (flags & TP_HALVES) {
        const double *half = d->half_s[flags & TP_HALF_SECOND ? 1 : 0][op];
        return half != NULL ? half[at] : table == NULL ? 0.0 : 0.5 * table[at];
    }
    if (table == NULL && op == TP_OP_B)
        return tp_durations_s(d, TP_OP_I, 0, stage, unit) + tp_durations_s(d, TP_OP_W, 0, stage, unit);
    return table == NULL ? 0.0 : table[at];
}
/* Seconds on the link of a message that leaves `stage`: SB's, `back` != 0, or SF's. */
static inline double
tp_durations_lag_s(const tp_durations *d, int64_t units, int back, unsigned flags, int stage, int64_t unit)
{
    if (back && d->back_comm_unit_s != NULL)
        return d->back_comm_unit_s[stage * units + unit];
    const double *half = flags & TP_HALVES ? d->half_comm_s[flags & TP_HALF_SECOND ? 1 : 0] : NULL;
    if (half != NULL)
        return half[stage * units + unit];
    double whole = d->comm_unit_s != NULL ? d->comm_unit_s[stage * units + unit]
                   : d->comm_s == NULL    ? 0.0
                                          : d->comm_s[stage];
    return flags & TP_HALVES ? 0.5 * whole : whole;
}
/* What a stage's OPT takes, and how much of it comes before the ranks meet. */
static inline double
tp_durations_update_s(const tp_durations *d, int stage, double *before_s)
{
    int64_t at = stage * d->stage_stride;
    double all = tp_durations_s(d, TP_OP_OPT, 0, stage, 0);
    double before = (d->sum_s == NULL ? 0.0 : d->sum_s[at]) + (d->norm_s == NULL ? 0.0 : d->norm_s[at]);
    *before_s = before > all ? all : before;
    return all;
}
/* Of a rank's OPTs together, which end its list. */
double
tp_program_update_s(const tp_program *program, const tp_durations *durations, int rank, double *before_s);
/* comm_s is time on the link (the ranks go on computing). seconds[SF], [SB] (of the sending stage) and [RF], [RB] (of the
 * receiving stage) are time a message takes of the ranks themselves (copies): right behind the op that makes it, right
 * before the op that reads it. Compute-only programs count both like lowered ones. */

/* ---- passes ----------------------------------------------------------------------------------------------------------- */
/* B -> I and W; each W is placed where its rank would wait otherwise (time-driven by `durations`), at the latest when
 * more than `pending` micro-batches would have gradients waiting (pending >= 1). Order of W: micro ascending, slice
 * descending. pending 0: W directly behind its I. */
TP_MUST_USE tp_status
tp_program_split(const tp_program *program, const tp_durations *durations, int pending, tp_program **out);
/* F and B of the program (I and W are B again) in the order of list scheduling, on the placement as it is: a rank does what can start
 * first by `durations` (of F, I and W), a backward before a forward, of backwards the latest stage's, of forwards the earliest stage's;
 * where it would wait, weight gradients, whose places split finds anew. Of looped BFS: as soon as a micro-batch can go back it does.
 * ESCHEDULE: it has other operations, halves, or does not pass check. EVALUE, EMEMORY. */
TP_MUST_USE tp_status
tp_program_reorder(const tp_program *program, const tp_durations *durations, tp_program **out);
/* Adds RF/SF/RB/SB (the sender places the peer's receive; both ends of every pair in the same order) and leaves guests where they
 * are; slots (activation slot: first RF or F to last W or B of a micro-batch, or to its SE and from its RL on; guest's: RE to SL;
 * gradient slot: first RB, R, SI, I or B to last W, B or SB, or to the last backward
 * of the stage below where it is on the same rank and reads it there), `tied` != 0: an AR between the ranks of the first and the last
 * stage (of each copy) where they differ, and one OPT per stage at the end. */
TP_MUST_USE tp_status
tp_program_lower(const tp_program *program, int tied, tp_program **out);
/* The same slots again, lowest free number first, in place: what lower does last. */
TP_MUST_USE tp_status
tp_program_assign_slots(tp_program *program);
/* The compute program with what saves memory. again: [stages] of tp_again for R; swapped: the same for SI, and SO stands behind
 * each forward; ahead: of tp_swap_ahead; beside != 0: they are TP_BESIDE. Whole or split backwards; marks of overlap go. EVALUE:
 * another value; TP_AGAIN_WITHIN where backwards are split or micro-batches have slices. ESCHEDULE: it has R, SO or SI already, or
 * does not pass check. */
typedef enum {
    TP_AGAIN_NOT,
    TP_AGAIN_ALL,   /* all R (SI) of a micro-batch, slices ascending, before its first backward: a slice attends to those before it */
    TP_AGAIN_SLICES, /* each before its own backward: nothing attends, or keys are kept, and there may be room for one slice alone */
    TP_AGAIN_KEYS,   /* R alone. TP_AGAIN_KEYS + n: TP_AGAIN_SLICES on a stage that holds n micro-batches at most at once, and 1 at most
                        if its W wait, so that there is no room of one slice alone; else, or where none has several, TP_AGAIN_ALL */
    TP_AGAIN_WITHIN = UINT8_MAX /* R alone: within the whole backward of a micro-batch of one slice (TP_WITHIN) */
} tp_again;
enum { TP_AGAIN_MOST_KEYS = TP_AGAIN_WITHIN - 1 - TP_AGAIN_KEYS };
TP_MUST_USE tp_status
tp_program_save_memory(const tp_program *program, const uint8_t *again, const uint8_t *swapped, int ahead, int beside,
                       tp_program **out);
/* Are R of this stage slice by slice? Then R of a slice that is not a micro-batch's first does not follow R of the slice before, and
 * attentions that are made again keep keys and values, where the provider keeps_keys. */
int
tp_program_remakes_apart(const tp_program *program, int stage);
/* How far ahead SI stands, so that its copy may be made beside what is between, and never before its SO. */
typedef enum {
    TP_SWAP_LATE,   /* right before the backward that reads it: of a slice, or where TP_AGAIN_ALL of all the micro-batch's */
    TP_SWAP_BEHIND, /* right behind the backward before that one on its stage: beside the forward between */
    TP_SWAP_BEFORE, /* right before that one: beside it, too; a gradient slot more */
    TP_SWAP_TWO     /* the same, and SO are TP_TWO_PLACES if beside: also forwards in a row go on beside the copies out */
} tp_swap_ahead;
/* Has what goes forward two places on this stage (TP_TWO_PLACES)? */
int
tp_program_has_two_places(const tp_program *program, int stage);
/* Has it swaps, and does a rank's copier make them (TP_BESIDE)? */
int
tp_program_swaps_beside(const tp_program *program);
/* The program without comms, slots, AR and OPT. */
TP_MUST_USE tp_status
tp_program_strip(const tp_program *program, tp_program **out);
/* Slots that `stage` uses: 1 + the largest number, 0 if it has none. */
int
tp_program_activation_slots(const tp_program *program, int stage);
int
tp_program_gradient_slots(const tp_program *program, int stage);
/* The most versions of its weights that `stage` has at once: the newest, and those that later backwards will read. 0: no U. */
int
tp_program_versions(const tp_program *program, int stage);
/* Has `stage` an I or a W, apart from each other? */
int
tp_program_has_apart(const tp_program *program, int stage);
/* Those of its R that are within B (TP_WITHIN). */
int
tp_program_within(const tp_program *program, int stage);
/* These six numbers of every stage at once, counts[stages]. */
typedef struct {
    int32_t activation_slots, gradient_slots, versions, two_places, apart, within;
} tp_stage_counts;
void
tp_program_count(const tp_program *program, tp_stage_counts *counts);
/* Slots for guests of `stage` on the rank that holds them, and that rank; 0 and -1: it has none. */
int
tp_program_guest_slots(const tp_program *program, int stage);
int
tp_program_host(const tp_program *program, int stage);

/* ---- proof -------------------------------------------------------------------------------------------------------------- */
/* ESCHEDULE naming rank, position, instruction and rule, with the neighbourhood and `<-- here`; tp_error_rank/position set.
 * Works on compute-only and on lowered programs; on lowered ones also comms, deadlock (rendezvous and eager) and slots. */
TP_MUST_USE tp_status
tp_program_check(const tp_program *program);
/* Run a lowered program that passes check by the rules of messages through `slots` slots at both ends of a channel, one direction of a
 * pair of ranks for one kind of message; guests go past them, unless they have slots. at[ranks]: the position that a rank ends at,
 * of one that waits for ever less than its instructions. ESCHEDULE: sends and receives that do not match. EMEMORY. */
TP_MUST_USE tp_status
tp_program_stuck(const tp_program *program, int slots, int guests_have_slots, int64_t *at);

/* What the engine demands besides, so that results do not depend on the schedule: on every stage the micro-batches of its
 * backwards (B or I) ascend, those of its weight gradients (B or W) do, and on the last stage those of F too. Where the program has
 * U, a micro-batch's B and W (on the last stage its F too) stand behind U of the micro-batch before it. ESCHEDULE. */
TP_MUST_USE tp_status
tp_program_check_canonical(const tp_program *program);

/* The local rules alone, without the proof of progress: what simulate runs first. Linear, no messages are followed. */
TP_MUST_USE tp_status
tp_program_check_order(const tp_program *program);

/* ---- timing -------------------------------------------------------------------------------------------------------------- */
#define TP_BUBBLE_MAP(X) X(warmup) X(cooldown) X(imbalance) X(slice_skew) X(recompute) X(swap) X(comm)
typedef enum {
#define TP_BUBBLE_ENUM(name) TP_BUBBLE_##name,
    TP_BUBBLE_MAP(TP_BUBBLE_ENUM)
#undef TP_BUBBLE_ENUM
        TP_BUBBLES
} tp_bubble;

typedef struct {
    int64_t operations;      /* intervals of compute ops (swaps, U, AR and OPT too), grouped by rank, in program order; of SO
                                and SI beside the work those of the copies, which overlap with the others */
    int64_t *begin;          /* [ranks + 1] */
    double *start_s, *end_s; /* [operations] */
    int32_t *at;             /* [operations] position in the rank's program */
    double makespan_s;
    double *busy_s;          /* [ranks] */
    double bubbles_s[TP_BUBBLES]; /* summed over ranks; their sum = ranks * makespan - sum of busy */
    double *peak_bytes;      /* [ranks] with activation_bytes, else 0 */
    double lower_bound_s;    /* no order of these operations on this placement is faster */
} tp_timeline;

/* Why ranks idle. With R ranks, makespan T, w[r] the seconds rank r is at work (R and swaps included; messages, AR and replicas'
 * sums, sum_s and beside_s, not), W = max w:
 *   recompute  = seconds in R instructions, summed over ranks
 *   swap       = the same of SO and SI: the rank waits for its copies; + R * (T - Ts) of those beside the work
 *                Ts: makespan of the same program with copies beside the work that take no time
 *   imbalance  = sum over r of (W - w[r])                     less work than the busiest rank (BMPipe's B_I)
 *   comm       = R * (Ts - Tc)            Tc: also messages, AR and replicas' sums take no time: while two ranks add up the
 *                gradients of a weight that both hold, the others are not short of work
 *   slice_skew = R * (Tc - Te), at least 0   Te: also every op of a kind takes, on each stage, the mean of those that are done there
 *   warmup + cooldown = the rest, R * (min(Tc, Te) - W): filling and draining; shared in proportion to the seconds idle
 *                before and after the start of each rank's first backward.
 * Every term is >= 0 and they sum to R * T - sum of busy, where busy[r] = w[r] less recomputation and swaps. */
/* Messages take comm_s as a lag between the ranks (overlapped). activation_bytes: NULL, or [stages * units] (or scalar by
 * strides 0) held from F to B (or W). keep_intervals 0: only the totals are filled. Deadlock: ESCHEDULE. */
TP_MUST_USE tp_status
tp_program_simulate(const tp_program *program, const tp_durations *durations, const double *activation_bytes,
                    int64_t bytes_stage_stride, int64_t bytes_unit_stride, int keep_intervals, tp_timeline **out);
void
tp_timeline_close(tp_timeline *timeline);

/* Proven lower bound on the makespan of any order of the program's operations on its placement that keeps data
 * dependencies and slice order: per rank head + work + tail, of all its passes and (Jackson) of the hardest set of them, and the
 * longest path of one micro-batch (PLANNERS.md 5.6). */
TP_MUST_USE tp_status
tp_program_bound(const tp_program *program, const tp_durations *durations, double *bound_s);
/* Bytes held per rank, peak[ranks]: `bytes` of (stage, unit) from F to the end of its B or W. */
void
tp_program_peak_bytes(const tp_program *program, const double *bytes, int64_t stage_stride, int64_t unit_stride,
                      double *peak);

/* ---- the same makespan again and again, for searches: one order is found once, each run is one linear pass ------------- */
typedef struct tp_sim tp_sim;
/* Keeps no pointer to the program. ESCHEDULE as simulate. A send right behind what it sends (but for receives), as lowering puts it,
 * costs nothing; one that was moved is one more operation of the pass. */
TP_MUST_USE tp_status
tp_sim_open(const tp_program *program, tp_sim **out);
/* A program that the engine could run, what it was lowered from, and its simulator. */
typedef struct {
    tp_program *order, *program;
    tp_sim *sim;
} tp_completed;
/* tp_program_split (pending < 0: not split), tp_program_lower and tp_sim_open in one, for searches that make thousands of programs.
 * known: of the same `tied`, or NULL; where the order is the known one's, *out is *known, whose program the caller has then twice.
 * Unchecked, so the caller answers for it: `compute` was made by the builders and passes here and, if it is split, has no I or W
 * yet; durations have I and W. goal_s: where it is found on the way that the makespan is more, *out is left empty; INFINITY: it never
 * is. EVALUE: bad durations. EMEMORY. */
TP_MUST_USE tp_status
tp_program_complete(const tp_program *compute, const tp_durations *durations, int pending, int tied, const tp_completed *known,
                    double goal_s, tp_completed *out);
/* Instructions of the program that it makes. */
int64_t
tp_program_complete_length(const tp_program *compute, int pending, int tied);
/* Closes what is not `kept`'s too (NULL: all), and empties *completed. */
void
tp_completed_close(tp_completed *completed, const tp_completed *kept);
/* Not thread-safe on one tp_sim. durations are trusted: finite, >= 0. *makespan_s equals tp_program_simulate's, or says nothing
 * where the thread is told to stop (csrc/base/deadline.h). */
void
tp_sim_run(tp_sim *sim, const tp_durations *durations, double *makespan_s);
/* One critical path of the last tp_sim_run (the same durations): count[op * stages + stage] times `op` of `stage` lies on it,
 * *lag_s is its messages' time on the link. For a program without AR, OPT, halves and swaps beside the work, and durations without
 * latency_s and without seconds of SF .. RB, makespan = sum of count * seconds + *lag_s; under any other durations the same sum is
 * a lower bound on the makespan. Ties: an op waited for its own rank. count: [TP_OPS * stages], overwritten. */
void
tp_sim_path(const tp_sim *sim, const tp_durations *durations, int64_t *count, double *lag_s);
void
tp_sim_close(tp_sim *sim);

#endif
