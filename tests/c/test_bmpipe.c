/* The BMPipe planner with each of its allocations failing in turn: an error each time, no leak, no half-made plan. Its bound
 * where times lie far apart, and how long it takes where there is no time. */
#include "csrc/base/deadline.h"
#include "csrc/base/mem.h"
#include "csrc/plan/bmpipe.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* A case of the bound's tree was once closed as one without a plan on the rounding of a very long ray of its linear programme: of
 * these layers, whose strategies take from microseconds to hours, the bound was 1.1 % above the best plan. */
static int
bound_is_below_the_best_plan(void)
{
    const int32_t count[] = {2, 2, 2, 1}, choices[] = {3, 3, 2, 1};
    const double forward[] = {1.1072287077525229e-06, 2798.9393881213741, 5340.7134849235426, 0.17056518203497145};
    const double backward[] = {1.3098855489535427e-06, 5636.5195707773628, 11623.376986556732, 0.31081430004558502};
    const double still[] = {657702518.42939603, 141988508.6134674, 339564214.01337218, 318342388.61510432};
    const double extra[] = {1.3945615137832641, 9300.7027451020258, 0.0064768247404823924, 0.0, 0.00042046706869637969,
                            12363.157981419447, 481.07634879977007, 3.5547443241254425e-06, 0.0, 0.0, 0.0, 0.0};
    const double kept[] = {47196806.645393424, 90070726.231980845, 193264254.58713123, 521704954.79584187, 74896964.861102238,
                           917797986.74799538, 792417734.54362798, 1175939395.2206316, 0.0, 259669356.22362438, 0.0, 0.0};
    tp_bmpipe_layers layers = {4, 3, count, choices, forward, backward, still, extra, kept};
    tp_bmpipe_options options = {.stages = 2, .chunks = 3, .micros = 4, .memory_bytes = 4581314148.2417622, .effort = 1};
    double bound_s = 0.0, step_s = 0.0;
    for (int i = 0; i < 2; i++) { /* with next to no effort the search stops at a worse plan; then all plans are looked at */
        tp_bmpipe_plan plan;
        tp_status status = tp_plan_bmpipe(&layers, &options, &plan);
        bound_s = i == 0 ? plan.lower_bound_s : bound_s;
        step_s = plan.step_time_s;
        int ok = status == TP_OK && (i == 0 || plan.optimal);
        tp_bmpipe_plan_free(&plan);
        if (!ok)
            return 0;
        options.effort = 0;
    }
    if (bound_s <= step_s)
        return 1;
    fprintf(stderr, "a bound of %.17g s, and a plan of %.17g s\n", bound_s, step_s);
    return 0;
}

/* ---- steps, of about a nanosecond, counted by the questions whether to stop ------------------------------------------------ */

static int questions;

static int
heard(void *context)
{
    (void)context;
    questions++;
    return 0;
}

/* The vectors in flight of 512 chunks were looked for among all micro-batches: of a limit of 0.1 s this took 4.4. Once they come
 * round again there are no others. */
static int
many_chunks_are_opened_soon(void)
{
    enum { CHUNKS = 512, VIRTUALS = 2 * CHUNKS };
    static double seconds[VIRTUALS];
    static int64_t forward_runs[VIRTUALS], backward_runs[VIRTUALS];
    double makespan = 0.0, lag = 0.0;
    int asked[2];
    for (int i = 0; i < 2; i++) {
        tp_bmpipe_options options = {.stages = 2, .chunks = CHUNKS, .micros = i > 0 ? 64 : 6, .memory_bytes = 1.0};
        questions = 0;
        if (tp_bmpipe_path(&options, seconds, seconds, &makespan, forward_runs, backward_runs, &lag) != TP_OK)
            return 0;
        asked[i] = questions;
    }
    if (asked[0] > 0 && asked[1] < 2 * asked[0])
        return 1;
    fprintf(stderr, "6 micro-batches take %d questions, 64 take %d\n", asked[0], asked[1]);
    return 0;
}

/* Moves of layers toward a plan that fits went on whatever the limit, and every move looked at every stage: 13 s here. */
static int
what_does_not_fit_is_refused_soon(void)
{
    const int32_t count[] = {256, 256, 256, 256}, choices[] = {1, 1, 1, 1};
    const double one[] = {1.0, 1.0, 1.0, 1.0}, still[] = {10.0, 11.0, 12.0, 13.0}, kept[] = {4.0, 4.1, 4.2, 4.3}, none[4] = {0.0};
    tp_bmpipe_layers layers = {4, 1, count, choices, one, one, still, none, kept};
    tp_bmpipe_options options = {.stages = 16, .chunks = 8, .micros = 32, .memory_bytes = 4000.0, .time_limit_s = 1e-9};
    tp_bmpipe_plan plan;
    questions = 0;
    tp_status status = tp_plan_bmpipe(&layers, &options, &plan);
    tp_bmpipe_plan_free(&plan);
    if (status == TP_EINFEASIBLE && questions < 8000)
        return 1;
    fprintf(stderr, "%d after %d questions: %s\n", status, questions, tp_error_message());
    return 0;
}

static int
heard_to_stop(void *context)
{
    (void)context;
    return ++questions == 20;
}

/* Nobody was asked while the order of the layers was written, the largest part of a programme: at 512 layers of as many types on
 * 512 stages 0.5 s, each way to recompute as much again. */
static int
a_programme_is_stopped(void)
{
    enum { TYPES = 256 };
    int32_t count[TYPES], choices[TYPES];
    double none[TYPES] = {0.0};
    for (int t = 0; t < TYPES; t++)
        count[t] = choices[t] = 1;
    tp_bmpipe_layers layers = {TYPES, 1, count, choices, none, none, none, none, none};
    tp_bmpipe_options options = {.stages = TYPES, .chunks = 1, .micros = 1, .memory_bytes = INFINITY};
    tp_bmpipe_ilp ilp;
    questions = 0;
    tp_deadline_listen(heard_to_stop, NULL, NULL);
    tp_status status = tp_bmpipe_ilp_build(&layers, &options, 0, NULL, NULL, NULL, &ilp);
    tp_bmpipe_ilp_free(&ilp);
    if (status == TP_EABORTED)
        return 1;
    fprintf(stderr, "a programme that was to stop gave %d\n", status);
    return 0;
}

int
main(void)
{
    if (!bound_is_below_the_best_plan())
        return 1;
    tp_deadline_listen_ns = 0; /* every question is heard */
    tp_deadline_listen(heard, NULL, NULL);
    if (!many_chunks_are_opened_soon() || !what_does_not_fit_is_refused_soon() || !a_programme_is_stopped())
        return 1;
    tp_deadline_listen(NULL, NULL, NULL);
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
