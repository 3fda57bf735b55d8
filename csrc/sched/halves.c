/* Micro-batches whose forward is done in two halves: which, and on which stages (sched.h, "Halves"). */
#include "csrc/sched/internal.h"

#include <stdlib.h>

tp_status
tp_sched_halves(const tp_program *program, unsigned ops, uint8_t **halves)
{
    int64_t length = program->begin[program->ranks], units = tp_program_units(program);
    *halves = NULL;
    if (!(ops & TP_SCHED_HAS_HALVES))
        return TP_OK;
    for (int64_t i = 0; i < length; i++) {
        const tp_instr *instr = &program->code[i];
        if (instr->op != TP_OP_F || !(instr->flags & TP_HALVES))
            continue;
        if (*halves == NULL)
            *halves = calloc((size_t)program->stages * (size_t)units, 1);
        if (*halves == NULL)
            return tp_fail(TP_EMEMORY, "no memory for the halves of %lld instructions", (long long)length);
        int apart = tp_sched_leaving(program, instr) == tp_instr_halves(instr);
        (*halves)[instr->stage * units + tp_program_unit(program, instr)] =
            (uint8_t)(apart ? TP_SCHED_HALVED | TP_SCHED_APART : TP_SCHED_HALVED);
    }
    return TP_OK;
}
