/* The builders whose order has a closed rule: GPipe, 1F1B (sliced, and PipeDream's), Seq1F1B, interleaved, looped BFS, ZB-H1, ZB-H2
 * and ZB-V.
 * zigzag.c, dualpipe_v.c, chimera.c and bpipe.c have the others. */
#include "csrc/sched/internal.h"

#include <stdlib.h>

#include "csrc/base/deadline.h"

/* A rank's list while it is written. */
typedef struct {
    const tp_program *program;
    tp_instr *at;
    int split;   /* micro-batches whose forward is in halves */
    int updates; /* 1: U behind the backward of each micro-batch */
} pen;

static void
put(pen *p, int op, int stage, int micro, int slice)
{
    *p->at++ = (tp_instr){
        .op = (uint16_t)op, .stage = (uint16_t)stage, .micro = (uint16_t)micro, .slice = (uint16_t)slice, .peer = -1};
}

static void
put_forward(pen *p, int stage, int micro)
{
    for (int s = 0; s < p->program->slices[micro]; s++)
        put(p, TP_OP_F, stage, micro, s);
}

/* F of one slice of 1F1B; a message of both halves joined where it is the last of the warm-up: its reader's next op is the
 * first of its steady state, which AutoPipe leaves as it is. */
static void
put_1f1b_forward(pen *p, int stage, int micro, int warm)
{
    if (micro >= p->split) {
        put_forward(p, stage, micro);
        return;
    }
    unsigned joined = micro == warm - 1 ? TP_HALF_JOINED : 0;
    for (unsigned half = TP_HALF_FIRST; half <= TP_HALF_SECOND; half++) {
        put(p, TP_OP_F, stage, micro, 0);
        p->at[-1].flags = (uint16_t)(half | joined);
    }
}

/* Descending: the gradient of a slice's context K and V comes from the slices behind it (TeraPipe, sec. 3.2). */
static void
put_backward(pen *p, int stage, int micro)
{
    for (int s = p->program->slices[micro] - 1; s >= 0; s--)
        put(p, TP_OP_B, stage, micro, s);
}

static void
write_gpipe(pen *p, int rank)
{
    for (int q = 0; q < p->program->micros; q++)
        put_forward(p, rank, q);
    for (int q = 0; q < p->program->micros; q++)
        put_backward(p, rank, q);
}

static int
at_most(int a, int b)
{
    return a < b ? a : b;
}

static void
write_1f1b(pen *p, int rank)
{
    int m = p->program->micros, warm = at_most(m, p->program->ranks - 1 - rank);
    for (int q = 0; q < warm; q++)
        put_1f1b_forward(p, rank, q, warm);
    for (int q = 0; q < m; q++) {
        if (q + warm < m)
            put_1f1b_forward(p, rank, q + warm, warm);
        put_backward(p, rank, q);
        if (p->updates)
            put(p, TP_OP_U, rank, q, 0);
    }
}

/* Seq1F1B (Sun et al. 2024): FIFO over micro-batches, LIFO over slices; the unit is the slice. Ragged counts: with
 * w >= max slices - 1 every B finds all forwards of its micro-batch done. */
static void
write_seq1f1b(pen *p, int rank)
{
    const tp_program *g = p->program;
    int64_t units = tp_program_units(g), warm = (int64_t)g->ranks - rank - 2 + g->max_slices;
    warm = warm < units ? warm : units;
    int fq = 0, fs = 0, bq = 0, bs = g->slices[0] - 1;
    for (int64_t f = 0, b = 0; b < units;) {
        if (f < units) {
            put(p, TP_OP_F, rank, fq, fs);
            f++;
            if (++fs == g->slices[fq]) {
                fq++;
                fs = 0;
            }
        }
        if (f > warm || f == units) {
            put(p, TP_OP_B, rank, bq, bs);
            b++;
            if (--bs < 0 && ++bq < g->micros)
                bs = g->slices[bq] - 1;
        }
    }
}

/* Interleaved 1F1B (Narayanan et al. 2021, sec. 2.2). The k-th forward of a rank is chunk (k mod PC) / P of micro-batch
 * (k / PC) P + k mod P; the k-th backward the same with the chunks reversed. */
static void
write_interleaved(pen *p, int rank)
{
    int m = p->program->micros, ranks = p->program->ranks, chunks = p->program->stages / ranks, total = m * chunks;
    int warm = m == ranks ? total : at_most(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks);
    for (int k = 0; k < total + warm; k++) {
        if (k < total)
            put_forward(p, k % (ranks * chunks) / ranks * ranks + rank, k / (ranks * chunks) * ranks + k % ranks);
        int b = k - warm;
        if (b >= 0)
            put_backward(p, (chunks - 1 - b % (ranks * chunks) / ranks) * ranks + rank,
                         b / (ranks * chunks) * ranks + b % ranks);
    }
}

/* Breadth-first (Lamy-Poirier 2023): all micro-batches pass a stage of the rank before any passes its next one. */
static void
write_looped_bfs(pen *p, int rank)
{
    const tp_program *g = p->program;
    for (int v = rank; v < g->stages; v += g->ranks)
        for (int q = 0; q < g->micros; q++)
            put_forward(p, v, q);
    for (int v = g->stages - g->ranks + rank; v >= 0; v -= g->ranks)
        for (int q = 0; q < g->micros; q++)
            put_backward(p, v, q);
}

/* The slices of a micro-batch's I or W, descending as in B. */
static void
put_half_backward(pen *p, int op, int stage, int micro)
{
    for (int s = p->program->slices[micro] - 1; s >= 0; s--)
        put(p, op, stage, micro, s);
}

/* `warm` forwards, then one forward, one I and, `delay` micro-batches behind, one W. */
static void
write_zero_bubble(pen *p, int rank, int warm, int delay)
{
    int m = p->program->micros, w = 0;
    warm = at_most(m, warm);
    for (int q = 0; q < warm; q++)
        put_forward(p, rank, q);
    for (int q = 0; q < m; q++) {
        if (q + warm < m)
            put_forward(p, rank, q + warm);
        put_half_backward(p, TP_OP_I, rank, q);
        if (q >= delay)
            put_half_backward(p, TP_OP_W, rank, w++);
    }
    while (w < m)
        put_half_backward(p, TP_OP_W, rank, w++);
}

/* Qi et al. 2024, ZB-H1: 1F1B's warm-up, and as many W's late as the rank is far from the first: every rank holds P. */
static void
write_zb_h1(pen *p, int rank)
{
    write_zero_bubble(p, rank, p->program->ranks - 1 - rank, rank);
}

/* ZB-H2: twice the warm-up, so that no rank waits for its first I; every rank holds 2 P - 1. */
static void
write_zb_h2(pen *p, int rank)
{
    write_zero_bubble(p, rank, 2 * (p->program->ranks - 1 - rank), 2 * rank);
}

/* Next micro-batches of a rank's two stages; an op that is not due yet, or no more, is skipped. */
typedef struct {
    pen *p;
    int stage[2], forward[2], input[2], weight[2];
} v_rank;

static void
put_next(v_rank *v, int op, int chunk)
{
    int f = v->forward[chunk], i = v->input[chunk], w = v->weight[chunk], m = v->p->program->micros;
    if (op == TP_OP_F && f < m)
        put_forward(v->p, v->stage[chunk], v->forward[chunk]++);
    else if (op == TP_OP_I && i < f)
        put_half_backward(v->p, TP_OP_I, v->stage[chunk], v->input[chunk]++);
    else if (op == TP_OP_W && w < i)
        put_half_backward(v->p, TP_OP_W, v->stage[chunk], v->weight[chunk]++);
}

/* I and W of one chunk, with a forward before them. */
static void
put_round(v_rank *v, int chunk, int with_forward)
{
    if (with_forward)
        put_next(v, TP_OP_F, chunk);
    put_next(v, TP_OP_I, chunk);
    put_next(v, TP_OP_W, chunk);
}

/* ZB-V (Qi et al. 2024, sec. 6) for f = i = w, m >= 2 P - 1: as many forwards of the first stage as fit before the first
 * micro-batch is back, then both stages in turn; W's that are r late let the last I's through. */
static void
write_zb_v(pen *p, int rank)
{
    int ranks = p->program->ranks, m = p->program->micros, left = ranks - rank;
    v_rank v = {.p = p, .stage = {rank, 2 * ranks - 1 - rank}};
    for (int k = 0; k < 2 * left - 1; k++)
        put_next(&v, TP_OP_F, 0);
    for (int k = 0; k < rank; k++) {
        put_next(&v, TP_OP_F, 1);
        put_next(&v, TP_OP_F, 0);
    }
    for (int k = 0; k < left; k++)
        put_round(&v, 1, 1);
    for (int k = 0; k < m - ranks - left + 1; k++) {
        put_round(&v, 0, 1);
        put_round(&v, 1, 1);
    }
    for (int k = 0; k < left - 1; k++) {
        put_round(&v, 0, 0);
        put_round(&v, 1, 1);
    }
    for (int k = 0; k < rank; k++) {
        put_next(&v, TP_OP_I, 0);
        put_next(&v, TP_OP_I, 1);
    }
    for (int k = 0; k < left; k++)
        put_round(&v, 0, 0);
    for (int k = 0; k < m; k++) {
        put_next(&v, TP_OP_W, 1);
        put_next(&v, TP_OP_W, 0);
    }
}

static tp_status
request_ok(tp_schedule schedule, int ranks, int chunks, int micros)
{
    if ((unsigned)schedule >= TP_SCHEDULES)
        return tp_fail(TP_EVALUE, "schedule is %d: 0 to %d would be right", (int)schedule, TP_SCHEDULES - 1);
    if (ranks < 1 || ranks > 32767)
        return tp_fail(TP_EVALUE, "ranks is %d: 1 to 32767 would be right", ranks);
    if (micros < 1 || micros > 65536)
        return tp_fail(TP_EVALUE, "micro-batches is %d: 1 to 65536 would be right", micros);
    int round = schedule == TP_INTERLEAVED || schedule == TP_LOOPED_BFS;
    if (round && (chunks < 1 || (int64_t)ranks * chunks > 65536))
        return tp_fail(TP_EVALUE, "chunks is %d with %d ranks: 1 to %d would be right", chunks, ranks, 65536 / ranks);
    if (schedule == TP_ZB_V && (chunks != 2 || ranks > 32768 || micros < 2 * ranks - 1))
        return tp_fail(TP_EVALUE, "ZB-V of %d ranks has %d chunks and %d micro-batches: 2 and at least %d would be right",
                       ranks, chunks, micros, 2 * ranks - 1);
    if (!round && schedule != TP_ZB_V && chunks != 1)
        return tp_fail(TP_EVALUE, "chunks is %d: only the schedules interleaved and looped BFS have more than 1", chunks);
    if (schedule == TP_INTERLEAVED && micros % ranks != 0)
        return tp_fail(TP_EVALUE,
                       "micro-batches is %d with %d ranks: the interleaved schedule needs a multiple of the ranks",
                       micros, ranks);
    return TP_OK;
}

static tp_status
build(tp_schedule schedule, int ranks, int chunks, int micros, pen like, const int32_t *slices, tp_program **out)
{
    static void (*const write[])(pen *, int) = {write_gpipe,      write_1f1b,  write_seq1f1b, write_interleaved,
                                                     write_looped_bfs, write_zb_h1, write_zb_h2,   write_zb_v};
    int stages = ranks * chunks;
    int64_t units = 0;
    for (int q = 0; q < micros; q++)
        units += slices[q];
    int64_t *counts = malloc((size_t)ranks * sizeof *counts);
    int32_t *rank_of = malloc((size_t)stages * sizeof *rank_of);
    tp_program *program = NULL;
    tp_status status = TP_OK;
    if (counts == NULL || rank_of == NULL) {
        status = tp_fail(TP_EMEMORY, "no memory for %d stages", stages);
    } else {
        for (int r = 0; r < ranks; r++)
            counts[r] = (schedule >= TP_ZB_H1 ? 3 : 2) * units * chunks + like.split + (like.updates ? micros : 0);
        for (int v = 0; v < stages; v++)
            rank_of[v] = schedule == TP_ZB_V && v >= ranks ? stages - 1 - v : v % ranks;
        status = tp_program_open(ranks, stages, micros, slices, rank_of, counts, &program);
    }
    free(counts);
    free(rank_of);
    TP_TRY(status);
    int64_t steps = 0;
    for (int r = 0; r < ranks && status == TP_OK; r++) {
        pen p = {program, program->code + program->begin[r], like.split, like.updates};
        write[schedule](&p, r);
        status = tp_deadline_check_after(&steps, 4 * (program->begin[r + 1] - program->begin[r]));
    }
    if (status == TP_OK)
        *out = program;
    else
        tp_program_close(program);
    return status;
}

tp_status
tp_program_build(tp_schedule schedule, int ranks, int chunks, int micros, const int32_t *slices, tp_program **out)
{
    TP_TRY(request_ok(schedule, ranks, chunks, micros));
    return build(schedule, ranks, chunks, micros, (pen){0}, slices, out);
}

tp_status
tp_program_build_sliced(int ranks, int micros, int split, tp_program **out)
{
    TP_TRY(request_ok(TP_1F1B, ranks, 1, micros));
    if (split < 0 || split > micros)
        return tp_fail(TP_EVALUE, "split is %d: 0 to the %d micro-batches would be right", split, micros);
    int32_t *slices = malloc((size_t)micros * sizeof *slices);
    if (slices == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d micro-batches", micros);
    for (int q = 0; q < micros; q++)
        slices[q] = 1;
    tp_status status = build(TP_1F1B, ranks, 1, micros, (pen){.split = split}, slices, out);
    free(slices);
    return status;
}

tp_status
tp_program_build_pipedream(int ranks, int micros, const int32_t *slices, tp_program **out)
{
    TP_TRY(request_ok(TP_1F1B, ranks, 1, micros));
    return build(TP_1F1B, ranks, 1, micros, (pen){.updates = 1}, slices, out);
}
