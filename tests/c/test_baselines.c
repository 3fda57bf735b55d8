/* The baselines and the layer planners under the sanitizers: random instances, every allocation failing in its turn, and the time
 * being up at every question. */
#include "csrc/plan/baselines.h"
#include "csrc/plan/layer_graph.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "csrc/base/deadline.h"
#include "csrc/base/mem.h"

static unsigned state = 1;

static int
upto(int most) /* 0 .. most */
{
    state = state * 1664525u + 1013904223u;
    return (int)((state >> 8) % (unsigned)(most + 1));
}

#define MOST 12
static double numbers[7][MOST];

static tp_status
plan_chain(const tp_chain *chain, int which, int stages, tp_chain_plan *plan)
{
    switch (which) {
    case 0: return tp_plan_uniform(chain, stages, plan);
    case 1: return tp_plan_merak(chain, stages, 0, plan);
    case 2: return tp_plan_pipedream(chain, stages, 0, plan);
    case 3: return tp_plan_dapple(chain, stages, 0, plan);
    case 4: return tp_plan_vpipe(chain, stages, 2.0, plan);
    default: return tp_plan_adapipe(chain, stages, plan);
    }
}

static int
check_chain(int round)
{
    int n = 1 + upto(MOST - 1), stages = 1 + upto(n - 1);
    for (int k = 0; k < 7; k++)
        for (int i = 0; i < n; i++)
            numbers[k][i] = upto(9);
    tp_chain chain = {.blocks = n, .micros = 1 + upto(7), .forward_s = numbers[0], .backward_s = numbers[1],
                      .comm_s = upto(3), .blocking = upto(1), .limit_bytes = round % 3 == 0 ? 0.0 : 5 + upto(90),
                      .static_bytes = numbers[2], .activation_bytes = numbers[3],
                      .transient_bytes = upto(1) ? numbers[4] : NULL, .recompute_s = upto(3) ? numbers[5] : NULL,
                      .param_bytes = numbers[6], .bandwidth_Bps = 2.0};
    for (int which = 0; which < 6; which++)
        for (int fail = 0; fail < (round % 50 == 0 ? 20 : 1); fail++) {
            tp_chain_plan plan;
            tp_heap_fail_after(fail);
            tp_status status = plan_chain(&chain, which, stages, &plan);
            tp_heap_fail_after(0);
            if (status != TP_OK && status != TP_EINFEASIBLE && !(fail > 0 && status == TP_EMEMORY)) {
                printf("round %d, planner %d: %s\n", round, which, tp_error_message());
                return 1;
            }
            if (status == TP_OK && !(plan.lower_bound_s <= plan.step_time_s && plan.boundary[plan.stages] == n)) {
                printf("round %d, planner %d: bound %g above step %g\n", round, which, plan.lower_bound_s, plan.step_time_s);
                return 1;
            }
            tp_chain_plan_free(&plan);
        }
    return 0;
}

/* The time is up when a planner asks for the stop-th time: it has a plan, or says so. *over: it was done before. */
static int
stop_chain(const tp_chain *chain, int which, int stages, int stop, int *over)
{
    tp_chain_plan plan;
    tp_deadline_count(1);
    tp_deadline_set(stop);
    tp_status status = plan_chain(chain, which, stages, &plan);
    *over = !tp_deadline_late() && stop > 1;
    tp_deadline_set(0);
    tp_deadline_count(0);
    int good = status == TP_OK ? plan.lower_bound_s <= plan.step_time_s && plan.boundary[plan.stages] == chain->blocks
                               : status == TP_ETIMEOUT || status == TP_EINFEASIBLE;
    tp_chain_plan_free(&plan);
    return good;
}

static int
check_stops(void)
{
    const int n = MOST;
    for (int k = 0; k < 7; k++)
        for (int i = 0; i < n; i++)
            numbers[k][i] = 1 + upto(8);
    tp_chain chain = {.blocks = n, .micros = 4, .forward_s = numbers[0], .backward_s = numbers[1], .limit_bytes = 60.0,
                      .static_bytes = numbers[2], .activation_bytes = numbers[3], .recompute_s = numbers[5],
                      .param_bytes = numbers[6], .bandwidth_Bps = 2.0};
    for (int which = 0; which < 6; which++)
        for (int stop = 1, over = 0; !over && stop < 400; stop++)
            if (!stop_chain(&chain, which, 4, stop, &over)) {
                printf("planner %d, stopped at question %d: %s\n", which, stop, tp_error_message());
                return 1;
            }
    return 0;
}

static int32_t ends[2][64], node[64], degree[64];
static double bytes[64], value[4][64], sync[1024];

static int
check_graph(int round)
{
    int n = 1 + upto(6), edges = 0, variants = 0;
    for (int i = 0; i < n; i++)
        for (int j = i + 1; j < n; j++)
            if (j == i + 1 || upto(4) == 0) {
                ends[0][edges] = i, ends[1][edges] = j;
                bytes[edges++] = upto(5);
            }
    for (int i = 0; i < n; i++)
        for (int t = 1; t <= 2; t++)
            for (int l = upto(1); l < 3; l++, variants++) {
                node[variants] = i, degree[variants] = t;
                for (int k = 0; k < 4; k++)
                    value[k][variants] = upto(9);
            }
    for (int k = 0; k < 1024; k++)
        sync[k] = upto(3);
    tp_layer_graph graph = {.nodes = n, .edges = edges, .variants = variants, .devices = 1 + upto(7), .micro_batches = 12,
                            .memory_bytes = 10 + upto(100), .bandwidth_Bps = 4.0, .from = ends[0], .to = ends[1],
                            .edge_bytes = bytes, .node = node, .degree = degree, .time_s = value[0], .param_bytes = value[1],
                            .memory_a = value[2], .memory_b = value[3], .sync_bytes = sync};
    for (int stop = 1; stop < (round % 20 == 0 ? 30 : 1); stop++) {
        tp_layer_plan plan;
        tp_deadline_count(1);
        tp_deadline_set(stop);
        tp_status status = tp_plan_piper(&graph, 0, &plan);
        tp_deadline_set(0);
        tp_deadline_count(0);
        tp_layer_plan_free(&plan);
        if (status != TP_OK && status != TP_ETIMEOUT && status != TP_EINFEASIBLE) {
            printf("round %d, stopped at question %d: %s\n", round, stop, tp_error_message());
            return 1;
        }
    }
    double time[2] = {INFINITY, INFINITY};
    for (int fail = 0; fail < (round % 50 == 0 ? 60 : 1); fail++)
        for (int which = 0; which < 2; which++) {
            tp_layer_plan plan;
            tp_heap_fail_after(fail);
            tp_status status = which ? tp_plan_piper(&graph, 0, &plan) : tp_plan_layers(&graph, &plan);
            tp_heap_fail_after(0);
            if (status == TP_OK)
                time[which] = plan.time_per_sample_s;
            else if (status != TP_EINFEASIBLE && !(fail > 0 && status == TP_EMEMORY)) {
                printf("round %d, planner %d: %s\n", round, which, tp_error_message());
                return 1;
            }
            tp_layer_plan_free(&plan);
        }
    if (time[0] <= time[1] * (1.0 + 1e-12) || time[0] == time[1])
        return 0;
    printf("round %d: exact %g, Piper %g\n", round, time[0], time[1]);
    return 1;
}

/* AdaPipe's table of all stages, the one that grows with the blocks' square, held [i, j) for j below i, too: here 134 MB, not 67.
 * Sanitizers add memory of their own. */
static int
check_table(void)
{
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    enum { BLOCKS = 512, STAGES = 64 };
    static double second[BLOCKS];
    struct rusage before, after;
    tp_chain_plan plan;
    for (int i = 0; i < BLOCKS; i++)
        second[i] = 1.0;
    tp_chain chain = {.blocks = BLOCKS, .micros = STAGES, .forward_s = second, .backward_s = second, .bandwidth_Bps = 1.0};
    getrusage(RUSAGE_SELF, &before);
    tp_status status = tp_plan_adapipe(&chain, STAGES, &plan);
    getrusage(RUSAGE_SELF, &after);
    tp_chain_plan_free(&plan);
    if (status != TP_OK || after.ru_maxrss - before.ru_maxrss > 100000) {
        printf("%ld KiB, status %d: %s\n", after.ru_maxrss - before.ru_maxrss, status, tp_error_message());
        return 1;
    }
#endif
    return 0;
}

int
main(void)
{
    if (check_table())
        return 1;
    for (int round = 0; round < 400; round++)
        if (check_chain(round) || check_graph(round) || (round % 20 == 0 && check_stops()))
            return 1;
    return 0;
}
