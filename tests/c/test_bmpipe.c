/* The BMPipe planner with each of its allocations failing in turn: an error each time, no leak, no half-made plan. */
#include "csrc/base/mem.h"
#include "csrc/plan/bmpipe.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

int
main(void)
{
    /* the last one's search ends before its proof: groups of 2 and of 4 layers are looked for, too, and make a faster plan */
    const int32_t counts[][3] = {{1, 12, 1}, {1, 12, 1}, {4, 8, 4}}, choices[] = {2, 2, 1};
    const double forward[] = {1.0, 2.0, 3.0}, backward[] = {2.0, 4.0, 6.0}, still[] = {1.0, 1.0, 1.0};
    const double extra[] = {0.0, 1.0, 0.0, 2.0, 0.0, 0.0}, kept[] = {4.0, 1.0, 4.0, 1.0, 2.0, 0.0};
    for (int i = 0; i < 3; i++) {
        int chunks = i > 0 ? 2 : 1;
        tp_bmpipe_layers layers = {3, 2, counts[i], choices, forward, backward, still, extra, kept};
        tp_bmpipe_options options = {.stages = 2, .chunks = chunks, .micros = 4, .memory_bytes = i < 2 ? 60.0 : 30.0,
                                     .effort = i < 2 ? 2000 : 50, .unproven = i == 2};
        tp_bmpipe_plan plan;
        int64_t fail = 1;
        for (;; fail += 1 + fail / 50) {
            tp_heap_fail_after(fail);
            tp_status status = tp_plan_bmpipe(&layers, &options, &plan);
            tp_heap_fail_after(0);
            double step = plan.step_time_s;
            tp_bmpipe_plan_free(&plan);
            if (status == TP_OK && step > 0.0 && (i < 2 || step < 300.0)) /* 320 without groups */
                break;
            if (status != TP_EMEMORY || fail > 1000000) {
                fprintf(stderr, "allocation %lld of case %d: %s\n", (long long)fail, i, tp_error_message());
                return 1;
            }
        }
        if (fail < 20) {
            fprintf(stderr, "only %lld allocations failed\n", (long long)fail);
            return 1;
        }
    }
    return 0;
}
