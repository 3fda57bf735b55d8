/* Chimera (Li & Hoefler 2021, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines", sec. 3.1):
 * stage s of one copy of the model on rank s, of the other on rank D - 1 - s, half of the micro-batches through each.
 *
 * With forwards and backwards of one length, all of them are on a grid. Of a unit of D micro-batches, D / 2 a copy, rank w does the
 * forward of micro-batch m of the first copy in slot w + 2 m, its backward in 2 D - 1 - w + 2 m; of the second copy, by symmetry, in
 * D - 1 - w + 2 m and D + w + 2 m. So every second slot, from w on, is a forward of the first copy or a backward of the second, and
 * every other one, from D - 1 - w on, the opposite: D even, they never meet, and a unit takes 2 D slots of each kind of slot
 * without a gap between the first and the last, so that the next unit begins in the slot behind. The last unit may be smaller. */
#include "csrc/sched/internal.h"

#include <stdlib.h>

/* Every second slot of a rank, from `begin` on: the forwards of copy `ahead` and the backwards of the other. */
typedef struct {
    int begin, ahead;
    int unit, step; /* of the next op: step 0 .. D / 2 - 1 forwards, D / 2 .. D - 1 backwards */
} line;

typedef struct {
    const tp_program *program;
    tp_instr *at;
} pen;

static int
micro_of(const line *l, int ranks)
{
    return l->unit * (ranks / 2) + l->step % (ranks / 2);
}

/* The slot of its next op; -1: there is none. */
static int64_t
slot_of(const line *l, int ranks, int each)
{
    return l->unit * (ranks / 2) >= each ? -1 : l->begin + 2 * ((int64_t)l->unit * ranks + l->step);
}

static void
advance(line *l, int ranks, int each)
{
    l->step++;
    if (l->step % (ranks / 2) != 0 && micro_of(l, ranks) >= each) /* a smaller unit's forwards, or backwards, end here */
        l->step = l->step < ranks / 2 ? ranks / 2 : ranks;
    if (l->step == ranks) {
        l->step = 0;
        l->unit++;
    }
}

static void
put(pen *p, const line *l, int rank)
{
    const tp_program *program = p->program;
    int ranks = program->ranks, forward = l->step < ranks / 2, copy = forward ? l->ahead : !l->ahead;
    int micro = copy * (program->micros / 2) + micro_of(l, ranks), slices = program->slices[micro];
    for (int s = 0; s < slices; s++)
        *p->at++ = (tp_instr){.op = (uint16_t)(forward ? TP_OP_F : TP_OP_B),
                              .stage = (uint16_t)(copy ? 2 * ranks - 1 - rank : rank),
                              .micro = (uint16_t)micro,
                              .slice = (uint16_t)(forward ? s : slices - 1 - s),
                              .peer = -1};
}

static void
write_rank(tp_program *program, int rank)
{
    int ranks = program->ranks, each = program->micros / 2;
    pen p = {program, program->code + program->begin[rank]};
    line down = {.begin = rank, .ahead = 0}, up = {.begin = ranks - 1 - rank, .ahead = 1};
    for (;;) {
        int64_t a = slot_of(&down, ranks, each), b = slot_of(&up, ranks, each);
        if (a < 0 && b < 0)
            return;
        line *next = b < 0 || (a >= 0 && a < b) ? &down : &up;
        put(&p, next, rank);
        advance(next, ranks, each);
    }
}

static tp_status
request_ok(int ranks, int micros)
{
    if (ranks < 2 || ranks > 32766 || ranks % 2 != 0)
        return tp_fail(TP_EVALUE, "ranks is %d: Chimera has an even number of them, 2 to 32766", ranks);
    if (micros < 2 || micros > 65536 || micros % 2 != 0)
        return tp_fail(TP_EVALUE,
                       "micro-batches is %d: Chimera has as many of them in both directions, an even number from 2 to 65536", micros);
    return TP_OK;
}

tp_status
tp_program_build_chimera(int ranks, int micros, const int32_t *slices, tp_program **out)
{
    TP_TRY(request_ok(ranks, micros));
    int64_t units = 0;
    for (int q = 0; q < micros; q++)
        units += slices[q];
    int64_t *counts = malloc((size_t)ranks * sizeof *counts);
    int32_t *rank_of = malloc(2 * (size_t)ranks * sizeof *rank_of);
    tp_program *program = NULL;
    tp_status status = TP_OK;
    if (counts == NULL || rank_of == NULL) {
        status = tp_fail(TP_EMEMORY, "no memory for %d ranks", ranks);
    } else {
        for (int r = 0; r < ranks; r++)
            counts[r] = 2 * units;
        for (int v = 0; v < 2 * ranks; v++)
            rank_of[v] = v < ranks ? v : 2 * ranks - 1 - v;
        status = tp_program_open(ranks, 2 * ranks, micros, slices, rank_of, counts, &program);
    }
    free(counts);
    free(rank_of);
    TP_TRY(status);
    program->copies = 2;
    for (int r = 0; r < ranks; r++)
        write_rank(program, r);
    *out = program;
    return TP_OK;
}

int
tp_sched_copies(const tp_program *program)
{
    int ranks = program->ranks, stages = program->stages;
    if (ranks % 2 != 0 || stages != 2 * ranks || program->micros % 2 != 0)
        return 1;
    for (int v = 0; v < stages; v++)
        if (program->rank_of[v] != (v < ranks ? v : stages - 1 - v))
            return 1;
    int64_t forwards = 0, kept = 0;
    for (int64_t i = 0; i < program->begin[ranks]; i++)
        if (program->code[i].op == TP_OP_F) {
            forwards++;
            kept += (program->code[i].stage >= ranks) == (program->code[i].micro >= program->micros / 2);
        }
    return kept > 0 && 4 * kept >= 3 * forwards ? 2 : 1;
}
