/* DawnPiper without Python: instances of every kind, and every allocation refused once. Under ASan nothing is lost. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"
#include "csrc/base/mem.h"
#include "csrc/plan/dawnpiper.h"
#include "csrc/plan/graph.h"
#include "tests/c/check.h"

enum { MOST = 60 };
static double values[9][MOST];
static uint64_t state = 1;

static unsigned
draw(unsigned below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(state >> 33) % below;
}

static tp_nodes
random_nodes(int n)
{
    for (int a = 0; a < 9; a++)
        for (int k = 0; k < n; k++)
            values[a][k] = a == 7 ? 1.0 + draw(3) : draw(40) * 0.5;
    return (tp_nodes){n,         values[0], values[1], values[2], values[3], values[4],
                      values[5], values[6], values[7], draw(2) ? values[8] : NULL};
}

static tp_dawnpiper_options
random_options(int n)
{
    tp_dawnpiper_options o = {.stages = 1 + (int)draw(n < 6 ? (unsigned)n : 6), .micros = 1 + (int)draw(8), .optimise = draw(8) > 0,
                              .flight = (tp_flight)draw(TP_FLIGHTS), .paper = draw(4) == 0};
    o.memory_bytes = 20.0 * n + draw((unsigned)(60 * n));
    o.swap_Bps = draw(2) ? 0.0 : draw(30) * 0.1;
    o.link_Bps = draw(3) ? 0.0 : 0.5 + draw(20);
    o.work_limit = draw(4) ? 0 : 1 + draw(50);
    return o;
}

static int
plans_hold(void)
{
    int found = 0;
    for (int i = 0; i < 1500; i++) {
        int n = 1 + (int)draw(MOST);
        tp_nodes nodes = random_nodes(n);
        tp_dawnpiper_options options = random_options(n);
        tp_dawnpiper_plan best, own;
        tp_status exact = tp_plan_dawnpiper(&nodes, &options, &best);
        tp_status published = tp_plan_dawnpiper_binary(&nodes, &options, &own);
        CHECK(exact == TP_OK || exact == TP_EINFEASIBLE);
        CHECK(published == TP_OK || published == TP_EINFEASIBLE);
        CHECK(published != TP_OK || exact == TP_OK);
        found += exact == TP_OK;
        if (exact == TP_OK) {
            CHECK(best.lower_bound_s <= best.period_s && best.relaxed_s <= best.lower_bound_s);
            CHECK(best.optimal || options.work_limit > 0);
            for (int x = 0; x < best.stages; x++)
                CHECK(best.peak_bytes[x] <= options.memory_bytes && best.boundary[x] < best.boundary[x + 1]);
        }
        if (published == TP_OK)
            CHECK(own.period_s >= best.lower_bound_s);
        tp_dawnpiper_plan_free(&best);
        tp_dawnpiper_plan_free(&own);
    }
    return found;
}

static void
refused_memory_is_said(void)
{
    tp_nodes nodes = random_nodes(40);
    tp_dawnpiper_options options = {.stages = 4, .micros = 6, .optimise = 1, .swap_Bps = 0.2, .memory_bytes = 1.0};
    for (options.memory_bytes = 1.0; options.memory_bytes < 1e6; options.memory_bytes *= 1.3) {
        tp_dawnpiper_plan plan;
        if (tp_plan_dawnpiper(&nodes, &options, &plan) == TP_OK) {
            tp_dawnpiper_plan_free(&plan);
            break;
        }
    }
    for (int which = 0; which < 2; which++) {
        int64_t n = 0;
        for (tp_status status = TP_EMEMORY; status == TP_EMEMORY;) {
            tp_dawnpiper_plan plan;
            tp_heap_fail_after(++n);
            status = (which ? tp_plan_dawnpiper_binary : tp_plan_dawnpiper)(&nodes, &options, &plan);
            tp_heap_fail_after(0);
            CHECK(status == TP_OK || status == TP_EMEMORY || (which && status == TP_EINFEASIBLE));
            tp_dawnpiper_plan_free(&plan);
        }
        CHECK(n > 15);
        for (int stop = 1, over = 0; !over && stop < 1000; stop++) { /* the time is up at every question in turn */
            tp_dawnpiper_plan plan;
            tp_deadline_count(1);
            tp_deadline_set(stop);
            tp_status status = (which ? tp_plan_dawnpiper_binary : tp_plan_dawnpiper)(&nodes, &options, &plan);
            over = status != TP_ETIMEOUT;
            tp_deadline_set(0);
            tp_deadline_count(0);
            CHECK(status == TP_OK || status == TP_ETIMEOUT || (which && status == TP_EINFEASIBLE));
            if (status == TP_OK)
                tp_dawnpiper_plan_free(&plan);
        }
    }
}

static void
graphs_hold(void)
{
    for (int i = 0; i < 2000; i++) {
        int n = 1 + (int)draw(20), edges = (int)draw(40), cycle = 0;
        int32_t from[40], to[40], order[20];
        double bytes[40], forward[20], cuts[20], tensors[20];
        for (int e = 0; e < edges; e++) {
            from[e] = (int32_t)draw((unsigned)n);
            to[e] = (int32_t)draw((unsigned)n);
            if (i % 2 && from[e] >= to[e])
                to[e] = from[e] = 0, edges = e;
            bytes[e] = draw(9);
        }
        for (int k = 0; k < n; k++)
            forward[k] = draw(5);
        tp_graph graph = {n, edges, from, to, bytes};
        CHECK(tp_graph_order(&graph, forward, order, &cycle) == TP_OK);
        CHECK(i % 2 == 0 || cycle == 0);
        for (int k = 0; k < cycle; k++) { /* each step of it is an edge */
            int linked = 0;
            for (int e = 0; e < edges; e++)
                linked |= from[e] == order[k] && to[e] == order[(k + 1) % cycle];
            CHECK(linked);
        }
        if (i % 2)
            CHECK(tp_graph_cuts(&graph, cuts, tensors) == TP_OK && cuts[n - 1] == 0.0);
    }
}

int
main(void)
{
    int found = plans_hold();
    CHECK(found > 500);
    refused_memory_is_said();
    graphs_hold();
    printf("test_dawnpiper: %d of 1500 instances have a plan, %d failures\n", found, failures);
    return failures != 0;
}
