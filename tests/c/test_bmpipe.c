/* The BMPipe planner with each of its allocations failing in turn: an error each time, no leak, no half-made plan. */
#include "csrc/base/mem.h"
#include "csrc/plan/bmpipe.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

int
main(void)
{
    const int32_t count[] = {1, 12, 1}, choices[] = {2, 2, 1};
    const double forward[] = {1.0, 2.0, 3.0}, backward[] = {2.0, 4.0, 6.0}, still[] = {1.0, 1.0, 1.0};
    const double extra[] = {0.0, 1.0, 0.0, 2.0, 0.0, 0.0}, kept[] = {4.0, 1.0, 4.0, 1.0, 2.0, 0.0};
    tp_bmpipe_layers layers = {3, 2, count, choices, forward, backward, still, extra, kept};
    for (int chunks = 1; chunks <= 2; chunks++) {
        tp_bmpipe_options options = {.stages = 2, .chunks = chunks, .micros = 4, .memory_bytes = 60.0, .effort = 2000};
        tp_bmpipe_plan plan;
        int64_t fail = 1;
        for (;; fail += 1 + fail / 50) {
            tp_heap_fail_after(fail);
            tp_status status = tp_plan_bmpipe(&layers, &options, &plan);
            tp_heap_fail_after(0);
            double step = plan.step_time_s;
            tp_bmpipe_plan_free(&plan);
            if (status == TP_OK && step > 0.0)
                break;
            if (status != TP_EMEMORY || fail > 1000000) {
                fprintf(stderr, "allocation %lld of chunks %d: %s\n", (long long)fail, chunks, tp_error_message());
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
