/* Where memory is saved: R on the stages that compute again what they did not keep, SO and SI on those that swap. */
#include "csrc/sched/internal.h"

#include <stdlib.h>

typedef struct {
    const tp_program *from;
    const uint8_t *again, *swapped;
    tp_instr *to;
} saving;

static void
put(saving *x, const tp_instr *like, int op, int slice)
{
    *x->to++ = (tp_instr){.op = (uint16_t)op, .stage = like->stage, .micro = like->micro, .slice = (uint16_t)slice, .peer = -1};
}

/* What of R or SI stands before the backward `instr`. */
static void
put_before(saving *x, const tp_instr *instr, int op, int when)
{
    int first = when == TP_AGAIN_ALL ? 0 : instr->slice;
    if (when == TP_AGAIN_NOT || (when == TP_AGAIN_ALL && instr->slice != x->from->slices[instr->micro] - 1))
        return;
    for (int s = first; s <= instr->slice; s++)
        put(x, instr, op, s);
}

static void
save_around(saving *x, const tp_instr *instr)
{
    if (tp_sched_is_backward(instr->op)) {
        put_before(x, instr, TP_OP_SI, x->swapped[instr->stage]);
        put_before(x, instr, TP_OP_R, x->again[instr->stage]);
    }
    *x->to = *instr;
    x->to++->flags &= (uint16_t)~TP_OVERLAPS; /* with what may now stand between */
    if (instr->op == TP_OP_F && tp_instr_halves(instr) & TP_HALF_SECOND && x->swapped[instr->stage])
        put(x, instr, TP_OP_SO, instr->slice);
}

tp_status
tp_program_save_memory(const tp_program *program, const uint8_t *again, const uint8_t *swapped, tp_program **out)
{
    tp_program *compute = NULL, *p = NULL;
    for (int v = 0; v < program->stages; v++)
        if (again[v] > TP_AGAIN_SLICES || swapped[v] > TP_AGAIN_SLICES)
            return tp_fail(TP_EVALUE, "stage %d saves memory in ways %d (recompute) and %d (swap): 0 to %d would be right", v,
                           again[v], swapped[v], TP_AGAIN_SLICES);
    TP_TRY(tp_program_strip(program, &compute));
    tp_status status = tp_program_check(compute);
    if (status == TP_OK && tp_sched_ops(compute) & (TP_SCHED_BIT(TP_OP_R) | TP_SCHED_BIT(TP_OP_SO) | TP_SCHED_BIT(TP_OP_SI)))
        status = tp_fail(TP_ESCHEDULE, "the program saves memory already: one without R, SO and SI would be right");
    int64_t *counts = calloc((size_t)compute->ranks, sizeof *counts);
    if (status == TP_OK && counts == NULL)
        status = tp_fail(TP_EMEMORY, "no memory for %d ranks", compute->ranks);
    for (int i = 0; status == TP_OK && i < compute->ranks; i++)
        counts[i] = compute->begin[i + 1] - compute->begin[i];
    for (int v = 0; status == TP_OK && v < compute->stages; v++)
        counts[compute->rank_of[v]] += ((again[v] != 0) + 2 * (swapped[v] != 0)) *
                                       (compute->offset[tp_program_micro_end(compute, v)] -
                                        compute->offset[tp_program_micro_begin(compute, v)]);
    if (status == TP_OK)
        status = tp_sched_open_like(compute, counts, &p);
    if (status == TP_OK) {
        saving x = {compute, again, swapped, p->code};
        for (int64_t i = 0; i < compute->begin[compute->ranks]; i++)
            save_around(&x, &compute->code[i]);
        *out = p;
    }
    free(counts);
    tp_program_close(compute);
    return status;
}
