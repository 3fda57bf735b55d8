/* The searches of one stage of DawnPiper against enumeration, each called by itself: a whole plan reaches them only where the
 * core search gives up. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/mem.h"
#include "csrc/plan/memopt_search.h"
#include "tests/c/check.h"

enum { MOST = 160, KINDS = 7 };
static double values[6][MOST];
static uint64_t state = 1;

static double
draw(double low, double high)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return low + (high - low) * (double)(state >> 11) * 0x1p-53;
}

/* 0 wild, 1 narrow, 2 equal, 3 proportional, 4 nearly so, 5 few huge ones, 6 whole numbers, many alike */
static tp_nodes
graph_of(int kind, int n)
{
    memset(values, 0, sizeof values);
    for (int k = 0; k < n; k++) {
        double bytes = kind == 1 ? draw(95, 105) : kind == 2 ? 7.0 : draw(1, 40);
        double seconds = kind == 1 ? draw(9.8, 10.2) : kind == 2 ? 3.0 : draw(1, 5);
        if (kind == 3 || kind == 4)
            seconds = bytes * (kind == 4 ? draw(0.1, 0.101) : 0.1);
        if (kind == 5 && draw(0, 1) < 0.2)
            bytes *= 40;
        values[0][k] = draw(1, 3);
        values[1][k] = 2 * values[0][k];
        values[2][k] = kind == 6 ? floor(seconds) : seconds;
        values[3][k] = kind == 6 ? floor(bytes / 8) : bytes; /* also 0: no tensor */
    }
    return (tp_nodes){.count = n, .forward_s = values[0], .backward_s = values[1], .recompute_s = values[2],
                      .activation_bytes = values[3], .param_bytes = values[4], .optimizer_bytes = values[5]};
}

static tp_memopt_stage
stage_of(tp_memopt *m)
{
    tp_memopt_stage t = {.m = m, .end = m->n, .time = tp_memopt_time(m, 0, m->n), .width = m->options->swap_Bps, .enough = -1.0,
                         .cutoff = INFINITY, .best = INFINITY};
    t.need = tp_memopt_need(m, 0, 0, m->n, &t.slack);
    for (int k = 0; k < m->n; k++)
        if (m->nodes->activation_bytes[m->order[k]] > 0.0)
            m->item[t.count++] = m->order[k];
    return t;
}

static double
enumerated(const tp_memopt_stage *t)
{
    double best = INFINITY;
    for (unsigned set = 0; set < 1u << t->count; set++) {
        double r = 0.0, s = 0.0;
        for (int k = 0; k < t->count; k++)
            if (set >> k & 1) {
                r += tp_memopt_seconds(t, k);
                s += tp_memopt_bytes(t, k);
            }
        best = fmin(best, tp_memopt_value(t, r, s));
    }
    return best;
}

static double
chosen_value(const tp_memopt_stage *t)
{
    double r = 0.0, s = 0.0;
    for (int k = 0; k < t->m->n; k++)
        if (t->m->chosen[k]) {
            r += t->m->nodes->recompute_s[k];
            s += t->m->nodes->activation_bytes[k];
        }
    return tp_memopt_value(t, r, s * (1.0 + 1e-13));
}

static int
near(double a, double b)
{
    return fabs(a - b) <= 1e-11 * fabs(b);
}

static tp_dawnpiper_options
options_of(const tp_nodes *nodes, double share)
{
    double all = 0.0, seconds = 0.0;
    for (int k = 0; k < nodes->count; k++) {
        all += nodes->activation_bytes[k];
        seconds += nodes->forward_s[k] + nodes->backward_s[k];
    }
    tp_dawnpiper_options options = {.stages = 1, .micros = 1, .optimise = 1, .memory_bytes = share * all};
    options.swap_Bps = draw(0, 1) < 0.5 ? 0.0 : draw(0, 0.6) * all / seconds;
    return options;
}

/* Both the linear base and those of each number of tensors: bounds below every set that they speak of. */
static void
bounds_hold(tp_memopt_stage *t, double want)
{
    tp_memopt_base base;
    CHECK(tp_memopt_base_open(t->m, &base) == TP_OK);
    if (tp_memopt_base_linear(t, &base))
        CHECK(base.bound <= want * (1.0 + 1e-12));
    double least = INFINITY;
    for (int size = 0; size <= t->count; size++) {
        tp_memopt_base_counted(t, size, 0.3, INFINITY, &base);
        int members = 0;
        for (int k = 0; k < t->count; k++)
            members += base.in[k];
        CHECK(members == size);
        least = fmin(least, base.bound);
    }
    CHECK(least <= want * (1.0 + 1e-12));
}

static int
pairs_equal_enumeration(void)
{
    int whole = 0;
    for (int i = 0; i < 2800; i++) {
        int n = 2 + (int)draw(0, 11);
        tp_nodes nodes = graph_of(i % KINDS, n);
        tp_dawnpiper_options options = options_of(&nodes, draw(0.05, 0.95));
        tp_memopt m;
        CHECK(tp_memopt_open(&nodes, &options, &m) == TP_OK);
        tp_memopt_stage t = stage_of(&m);
        if (t.count > 0 && t.need - t.width * t.time > t.slack) {
            tp_memopt_outlook outlook;
            double want = enumerated(&t);
            CHECK(tp_memopt_pairs(&t, i % 2, &outlook) == TP_OK);
            CHECK(t.low <= want * (1.0 + 1e-12) && t.best >= want * (1.0 - 1e-12));
            if (tp_memopt_settled(&t)) {
                whole++;
                CHECK(near(t.best, want) && near(chosen_value(&t), want));
            }
            bounds_hold(&t, want);
        }
        tp_memopt_close(&m);
    }
    return whole;
}

/* Large ones: what is chosen is what it says, and bounds of one search hold for what another finds. */
static int
searches_agree(void)
{
    int met = 0;
    for (int i = 0; i < 140; i++) {
        tp_nodes nodes = graph_of(i % KINDS, MOST - i % 3);
        tp_dawnpiper_options options = options_of(&nodes, draw(0.2, 0.8));
        tp_memopt m;
        CHECK(tp_memopt_open(&nodes, &options, &m) == TP_OK);
        tp_memopt_stage t = stage_of(&m), other = t;
        if (t.need - t.width * t.time > t.slack) {
            tp_memopt_outlook outlook;
            tp_memopt_known known = {0, {0.0, INFINITY}, INFINITY, NULL, 0};
            double best;
            CHECK(tp_memopt_pairs(&t, 1, &outlook) == TP_OK);
            CHECK(isinf(t.best) || near(chosen_value(&t), t.best));
            CHECK(tp_memopt_knapsack(&m, 0, 0, m.n, -1.0, INFINITY, 0.0, &known, &best) == TP_OK);
            CHECK(near(chosen_value(&t), best));
            CHECK(t.low <= best * (1.0 + 1e-12) && known.range.low_s <= t.best * (1.0 + 1e-12));
            tp_memopt_base base;
            CHECK(tp_memopt_base_open(&m, &base) == TP_OK);
            if (i % KINDS == 3 && tp_memopt_base_linear(&other, &base)) {
                tp_memopt_base_list(&other, INFINITY, &base);
                CHECK(tp_memopt_four(&other, &base) == TP_OK);
                CHECK(near(chosen_value(&other), other.best) && other.best >= base.bound * (1.0 - 1e-12));
                met += other.best <= base.bound * (1.0 + 1e-11);
            }
        }
        tp_memopt_close(&m);
    }
    return met;
}

static void
refused_memory_is_said(void)
{
    tp_nodes nodes = graph_of(3, MOST);
    tp_dawnpiper_options options = options_of(&nodes, 0.5);
    options.swap_Bps = 0.0;
    int64_t n = 0;
    for (tp_status status = TP_EMEMORY; status == TP_EMEMORY;) {
        tp_memopt m = {0};
        tp_heap_fail_after(++n);
        status = tp_memopt_open(&nodes, &options, &m);
        if (status == TP_OK) {
            tp_memopt_known known = {0, {0.0, INFINITY}, INFINITY, NULL, 0};
            double best;
            status = tp_memopt_knapsack(&m, 0, 0, m.n, -1.0, INFINITY, 0.0, &known, &best);
        }
        tp_heap_fail_after(0);
        CHECK(status == TP_OK || status == TP_EMEMORY);
        tp_memopt_close(&m);
    }
    CHECK(n > 20);
}

int
main(void)
{
    int whole = pairs_equal_enumeration(), met = searches_agree();
    CHECK(whole > 1500);
    CHECK(met > 5);
    refused_memory_is_said();
    printf("test_memopt: %d stages proven by pairs alone, %d of 20 proportional ones met to rounding by four lists, %d failures\n",
           whole, met, failures);
    return failures != 0;
}
