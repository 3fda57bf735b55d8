#include "csrc/sched/sums.h"

#include <stdlib.h>

tp_status
tp_sched_sums_open(const tp_program *p, const tp_durations *durations, tp_sched_sums *sums)
{
    *sums = (tp_sched_sums){NULL, NULL, NULL};
    if (durations != NULL && durations->beside_s == NULL)
        return TP_OK;
    sums->last = malloc((size_t)p->stages * sizeof *sums->last);
    sums->stages = malloc((size_t)p->stages * sizeof *sums->stages);
    sums->begin = calloc((size_t)p->ranks + 1, sizeof *sums->begin);
    if (sums->last == NULL || sums->stages == NULL || sums->begin == NULL) {
        tp_sched_sums_close(sums);
        return tp_fail(TP_EMEMORY, "no memory for the sums of %d stages", p->stages);
    }
    for (int v = 0; v < p->stages; v++)
        sums->last[v] = -1;
    int32_t count = 0;
    for (int r = 0; r < p->ranks; r++) {
        for (int64_t k = p->begin[r]; k < p->begin[r + 1]; k++)
            if (p->code[k].op == TP_OP_B || p->code[k].op == TP_OP_W)
                sums->last[p->code[k].stage] = k;
        for (int64_t k = p->begin[r]; k < p->begin[r + 1]; k++)
            if (sums->last[p->code[k].stage] == k)
                sums->stages[count++] = p->code[k].stage;
        sums->begin[r + 1] = count;
    }
    return TP_OK;
}

void
tp_sched_sums_close(tp_sched_sums *sums)
{
    free(sums->last);
    free(sums->stages);
    free(sums->begin);
    *sums = (tp_sched_sums){NULL, NULL, NULL};
}
