/* DualPipeV: DualPipe (DeepSeek-AI 2024, sec. 3.2.1) cut in half, so that a rank holds the stages r and 2 P - 1 - r of one
 * model; in its main part the forward of one overlaps with the backward of the other. Order: DeepSeek's published eight
 * steps; `near` is the rank's first stage, `far` its second. */
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

enum { NEAR, FAR };

typedef struct {
    const tp_program *program;
    tp_instr *at;
    int stage[2], forward[2], backward[2]; /* next micro-batches */
    int split;                             /* backwards are I from now on */
    int32_t *late;                         /* W's to come, in the order of their I's: 2 micro + chunk */
    int first_late, lates;
} writer;

static void
put(writer *w, int op, int chunk, int micro)
{
    int slices = w->program->slices[micro];
    for (int s = 0; s < slices; s++)
        *w->at++ = (tp_instr){.op = (uint16_t)op,
                              .stage = (uint16_t)w->stage[chunk],
                              .micro = (uint16_t)micro,
                              .slice = (uint16_t)(op == TP_OP_F ? s : slices - 1 - s),
                              .peer = -1};
}

static void
put_forward(writer *w, int chunk)
{
    put(w, TP_OP_F, chunk, w->forward[chunk]++);
}

static void
put_backward(writer *w, int chunk)
{
    if (w->split)
        w->late[w->lates++] = 2 * w->backward[chunk] + chunk;
    put(w, w->split ? TP_OP_I : TP_OP_B, chunk, w->backward[chunk]++);
}

static void
put_weight(writer *w)
{
    int next = w->late[w->first_late++];
    put(w, TP_OP_W, next % 2, next / 2);
}

static void
put_overlapping(writer *w, int forward)
{
    put_forward(w, forward);
    w->at[-1].flags = TP_OVERLAPS;
    put_backward(w, 1 - forward);
}

static void
write_filling(writer *w, int rank, int ranks)
{
    int left = ranks - 1 - rank;
    for (int k = 0; k < 2 * left; k++)
        put_forward(w, NEAR);
    for (int k = 0; k <= rank; k++) {
        put_forward(w, NEAR);
        put_forward(w, FAR);
    }
    for (int k = 0; k < left; k++) {
        w->split = 1;
        put_backward(w, FAR);
        put_weight(w);
        w->split = 0;
        put_forward(w, FAR);
    }
}

static void
write_rank(writer *w, int rank, int ranks)
{
    int left = ranks - 1 - rank, m = w->program->micros;
    write_filling(w, rank, ranks);
    for (int k = 0; k < m - ranks - left; k++) {
        if (k == 0 && left == 0) { /* the last rank's first backward needs this very forward's work out of the way */
            put_forward(w, NEAR);
            put_backward(w, FAR);
        } else {
            put_overlapping(w, NEAR);
        }
        put_overlapping(w, FAR);
    }
    for (int k = 0; k < left; k++) {
        put_backward(w, FAR);
        put_overlapping(w, FAR);
    }
    for (int k = 0; k <= rank; k++) { /* from the middle on, W's wait: they fill the end */
        int middle = k == (rank + 1) / 2;
        w->split |= middle && rank % 2 == 1;
        put_backward(w, FAR);
        w->split |= middle && rank % 2 == 0;
        put_backward(w, NEAR);
    }
    for (int k = 0; k < left; k++) {
        put_weight(w);
        put_backward(w, NEAR);
    }
    while (w->first_late < w->lates)
        put_weight(w);
}

/* A rank has as many instructions as it has; the arrays are sized for all backwards apart. */
static void
write_all(const tp_program *shape, tp_instr *code, int64_t *counts, int32_t *late)
{
    int ranks = shape->ranks;
    tp_instr *at = code;
    for (int r = 0; r < ranks; r++) {
        writer w = {.program = shape, .at = at, .stage = {r, 2 * ranks - 1 - r}, .late = late};
        write_rank(&w, r, ranks);
        counts[r] = w.at - at;
        at = w.at;
    }
}

static tp_status
build(int ranks, int micros, const int32_t *slices, int64_t *counts, int32_t *rank_of, int32_t *late, tp_program **out)
{
    int64_t units = 0, most = 0;
    for (int q = 0; q < micros; q++)
        units += slices[q];
    for (int v = 0; v < 2 * ranks; v++)
        rank_of[v] = v < ranks ? v : 2 * ranks - 1 - v;
    memset(counts, 0, (size_t)ranks * sizeof *counts);
    tp_program *shape = NULL; /* its slices are read while the code is written */
    TP_TRY(tp_program_open(ranks, 2 * ranks, micros, slices, rank_of, counts, &shape));
    if (4 * units * ranks > INT32_MAX) { /* told before as much memory is asked for, and written */
        tp_program_close(shape);
        return tp_fail(TP_EVALUE, "the program has at least %lld instructions: at most %d would be right",
                       (long long)(4 * units * ranks), INT32_MAX);
    }
    most = 6 * units * ranks;
    tp_instr *code = malloc((size_t)most * sizeof *code);
    tp_status status = TP_OK;
    if (code == NULL)
        status = tp_fail(TP_EMEMORY, "no memory for %lld instructions", (long long)most);
    else
        write_all(shape, code, counts, late);
    tp_program_close(shape);
    if (status == TP_OK)
        status = tp_program_open(ranks, 2 * ranks, micros, slices, rank_of, counts, out);
    if (status == TP_OK)
        memcpy((*out)->code, code, (size_t)(*out)->begin[ranks] * sizeof *code);
    free(code);
    return status;
}

tp_status
tp_program_build_dualpipe_v(int ranks, int micros, const int32_t *slices, tp_program **out)
{
    if (ranks < 1 || ranks > 32767)
        return tp_fail(TP_EVALUE, "ranks is %d: 1 to 32767 would be right", ranks);
    if (micros < 2 * ranks || micros > 65536)
        return tp_fail(TP_EVALUE, "micro-batches is %d with %d ranks: DualPipeV needs %d to 65536", micros, ranks,
                       2 * ranks);
    int64_t *counts = malloc((size_t)ranks * sizeof *counts);
    int32_t *rank_of = malloc(2 * (size_t)ranks * sizeof *rank_of), *late = malloc(2 * (size_t)micros * sizeof *late);
    tp_status status = counts == NULL || rank_of == NULL || late == NULL
                           ? tp_fail(TP_EMEMORY, "no memory for %d ranks and %d micro-batches", ranks, micros)
                           : build(ranks, micros, slices, counts, rank_of, late, out);
    free(counts);
    free(rank_of);
    free(late);
    return status;
}
