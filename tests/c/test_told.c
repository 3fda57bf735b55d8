/* Every planner told to stop at its first question, its second, ..: it ends, with EABORTED or with whatever it has, nothing is
 * lost (under a sanitizer), and asked again it gives the answer that it gave before. */
#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"
#include "csrc/plan/autopipe.h"
#include "csrc/plan/baselines.h"
#include "csrc/plan/bmpipe.h"
#include "csrc/plan/dawnpiper.h"
#include "csrc/plan/layer_graph.h"
#include "csrc/plan/plan.h"
#include "csrc/plan/shop.h"
#include "csrc/plan/slicing_bound.h"
#include "csrc/sched/sched.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/c/check.h"

enum { BLOCKS = 24, UNITS = 300, TABLE = 48 };

static double one[BLOCKS], two[BLOCKS], bytes[BLOCKS], more[BLOCKS], g[UNITS + 1], table[(TABLE + 1) * (TABLE + 1)];

static double
draw(void)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return 1.0 + (double)(state >> 16) / 65536.0;
}

static void
fill(void)
{
    for (int i = 0; i < BLOCKS; i++) {
        one[i] = draw();
        two[i] = 2.0 * draw();
        bytes[i] = draw();
        more[i] = draw();
    }
    for (int i = 1; i <= UNITS; i++)
        g[i] = 30.0 + i + draw();
    for (int i = 1; i <= TABLE; i++)
        for (int j = 0; j <= TABLE - i; j++)
            table[i * (TABLE + 1) + j] = 5.0 + i + 0.01 * i * j + draw();
}

/* ---- calls: what the answer is, as one number ------------------------------------------------------------------------------- */

static tp_chain
chain(double limit)
{
    return (tp_chain){.blocks = BLOCKS, .micros = 12, .forward_s = one, .backward_s = two, .limit_bytes = limit, .static_bytes = bytes,
                      .activation_bytes = more, .recompute_s = one, .param_bytes = bytes, .bandwidth_Bps = 1.0};
}

static tp_status
baseline(int which, double *answer)
{
    tp_chain c = chain(which < 2 || which == 4 ? 0.0 : 26.0);
    tp_chain_plan plan;
    tp_status status = which == 0   ? tp_plan_pipedream(&c, 8, 0, &plan)
                       : which == 1 ? tp_plan_dapple(&c, 8, 0, &plan)
                       : which == 2 ? tp_plan_vpipe(&c, 4, 0.5, &plan)
                       : which == 3 ? tp_plan_adapipe(&c, 4, &plan)
                                    : tp_plan_merak(&c, 8, 12, &plan);
    *answer = plan.step_time_s;
    tp_chain_plan_free(&plan);
    return status;
}

static tp_status
layers(int which, double *answer)
{
    static int32_t from[BLOCKS], to[BLOCKS], node[2 * BLOCKS], degree[2 * BLOCKS];
    static double time_s[2 * BLOCKS], param[2 * BLOCKS], a[2 * BLOCKS], b[2 * BLOCKS], sync[8 * BLOCKS];
    for (int i = 0; i < 2 * BLOCKS; i++) {
        node[i] = i / 2;
        degree[i] = 1;
        time_s[i] = one[i / 2] * (i % 2 ? 1.4 : 1.0);
        param[i] = bytes[i / 2];
        a[i] = more[i / 2] * (i % 2 ? 0.3 : 1.0);
        b[i] = bytes[i / 2];
    }
    for (int i = 0; i + 1 < BLOCKS; i++) {
        from[i] = i;
        to[i] = i + 1;
    }
    tp_layer_graph graph = {.nodes = BLOCKS, .edges = BLOCKS - 1, .variants = 2 * BLOCKS, .devices = 12, .micro_batches = 24,
                            .memory_bytes = 30.0, .bandwidth_Bps = 1.0, .from = from, .to = to, .edge_bytes = one, .node = node,
                            .degree = degree, .time_s = time_s, .param_bytes = param, .memory_a = a, .memory_b = b,
                            .sync_bytes = sync};
    tp_layer_plan plan;
    tp_status status = which ? tp_plan_layers(&graph, &plan) : tp_plan_piper(&graph, 0, &plan);
    *answer = plan.time_per_sample_s;
    tp_layer_plan_free(&plan);
    return status;
}

static tp_status
autopipe(int which, double *answer)
{
    static double limit[6];
    if (which == 4) {
        tp_slicer_plan plan = {0};
        tp_status status = tp_plan_slicer(BLOCKS, 40, one, two, 0.1, &plan);
        *answer = plan.step_time_s;
        return status;
    }
    for (int k = 0; k < 6; k++)
        limit[k] = 55.0;
    tp_stage_memory memory = {.static_bytes = bytes, .activation_bytes = more, .limit_bytes = limit};
    tp_stage_problem problem = {BLOCKS, 6, 8, one, two, 0.3, 0, &memory};
    tp_stage_plan plan;
    tp_status status = tp_plan_autopipe(&problem, (tp_autopipe_method)which, NULL, &plan);
    *answer = plan.step_time_s;
    tp_stage_plan_free(&plan);
    return status;
}

static tp_status
dawnpiper(int which, double *answer)
{
    tp_nodes nodes = {.count = BLOCKS, .forward_s = one, .backward_s = two, .recompute_s = one, .activation_bytes = more,
                      .param_bytes = bytes, .optimizer_bytes = bytes};
    tp_dawnpiper_options options = {.stages = 4, .micros = 6, .optimise = 1, .memory_bytes = 42.0, .swap_Bps = which ? 0.1 : 0.0};
    tp_dawnpiper_plan plan;
    tp_status status = (which ? tp_plan_dawnpiper_binary : tp_plan_dawnpiper)(&nodes, &options, &plan);
    *answer = status == TP_OK ? plan.step_s : 0.0;
    tp_dawnpiper_plan_free(&plan);
    return status;
}

static tp_status
bmpipe(int which, double *answer)
{
    static const int32_t count[] = {1, 14, 1}, choices[] = {2, 2, 1};
    static const double forward[] = {1.0, 2.0, 3.0}, backward[] = {2.0, 4.0, 6.0}, still[] = {1.0, 1.0, 1.0};
    static const double extra[] = {0.0, 1.0, 0.0, 2.0, 0.0, 0.0}, kept[] = {4.0, 1.0, 4.0, 1.0, 2.0, 0.0};
    tp_bmpipe_layers given = {3, 2, count, choices, forward, backward, still, extra, kept};
    tp_bmpipe_options options = {.stages = 4, .chunks = which + 1, .micros = 8, .memory_bytes = which == 2 ? 62.0 : 60.0,
                                 .effort = which ? 3000 : 0};
    tp_bmpipe_plan plan;
    tp_status status = tp_plan_bmpipe(&given, &options, &plan);
    *answer = plan.step_time_s;
    tp_bmpipe_plan_free(&plan);
    return status;
}

static tp_status
slices(int which, double *answer)
{
    const tp_slice_cost smooth = {.units = UNITS, .g0 = g, .g1 = g, .a2 = 0.01, .a3 = 1e-4};
    const tp_slice_cost dense = {.units = TABLE, .table = table}, costs[3] = {smooth, smooth, smooth};
    tp_slice_options options = {.stages = 8, .queue = which == 1};
    tp_slice_plan plan = {0};
    double bound = 0.0;
    int slice[] = {TABLE / 2, TABLE / 2}, flush_of[3], flushes;
    tp_status status = which == 0 || which == 1 ? tp_plan_slices(&smooth, 1, &options, &plan)
                       : which == 2             ? tp_plan_slices(costs, 3, &options, &plan)
                       : which == 3             ? tp_plan_slices(&dense, 1, &options, &plan)
                       : which == 4             ? tp_plan_slices_apart(&smooth, &smooth, &options, &plan)
                       : which == 5             ? tp_plan_slices_apart(&dense, &dense, &options, &plan)
                       : which == 6 ? tp_plan_slices_flushed(costs, 3, 2, &options, &plan, flush_of, &flushes)
                                    : tp_slice_bound(&dense, &options, slice, 2, &bound);
    *answer = status == TP_OK ? plan.latency_s + bound : 0.0;
    tp_slice_plan_free(&plan);
    return status;
}

static tp_status
shop(int which, double *answer)
{
    static const int of[] = {0, 0, 1, 1, 0};
    const tp_slice_cost dense[2] = {{.units = TABLE, .table = table}, {.units = TABLE, .g0 = g, .g1 = g, .a2 = 0.02}};
    const tp_slice_cost smooth[2] = {{.units = UNITS, .g0 = g, .g1 = g, .a2 = 0.01}, {.units = UNITS, .g0 = g, .g1 = g, .a2 = 0.03}};
    tp_shop given = {which ? UNITS : TABLE, 1, 5, 2, which ? smooth : dense, of};
    tp_shop_options options = {.work = 400000};
    tp_shop_plan plan = {0};
    if (which == 2) {
        double clock[TABLE + 1];
        *answer = tp_flow_shop(table, TABLE + 1, TABLE + 1, clock);
        return tp_deadline_check_told();
    }
    tp_status status = tp_plan_shop(&given, &options, &plan);
    *answer = plan.latency_s;
    tp_shop_plan_free(&plan);
    return status;
}

static tp_status
bound(int which, double *answer)
{
    const tp_slice_cost smooth = {.units = UNITS, .g0 = g, .g1 = g, .a2 = 0.01, .a3 = 1e-4};
    const tp_slicing_rank rank[2] = {{smooth, smooth, 0.0, 0.0, g, g}, {smooth, smooth, 1.0, 0.0, g, g}};
    const tp_slicing_micro micro[2] = {{2, rank}, {1, rank}};
    (void)which;
    return tp_slicing_bound(2, 2, micro, 1.0, answer);
}

/* Build, split, lower, check, simulate, print, parse; which: of which schedule. */
static tp_status
program(int which, double *answer)
{
    static const double f = 1.0, i = 1.1, w = 0.7;
    int32_t of[12];
    for (int q = 0; q < 12; q++)
        of[q] = which < 2 ? 2 : 1;
    tp_zigzag_request zigzag = {.ranks = 4, .micros = 12, .most = 8, .slices = of, .forward_s = f, .input_s = i, .weight_s = w};
    tp_durations d = {.stage_stride = 0};
    tp_program *made = NULL, *split = NULL, *lowered = NULL, *parsed = NULL;
    tp_timeline *line = NULL;
    char text[40000];
    d.seconds[TP_OP_F] = &f;
    d.seconds[TP_OP_I] = &i;
    d.seconds[TP_OP_W] = &w;
    tp_status status = which == 0   ? tp_program_build(TP_SEQ1F1B, 4, 1, 12, of, &made)
                       : which == 1 ? tp_program_build(TP_INTERLEAVED, 4, 2, 12, of, &made)
                       : which == 2 ? tp_program_build_zb_v(&zigzag, &made)
                                    : tp_program_build_hanayo(&zigzag, 1, &made);
    if (status == TP_OK && which != 2)
        status = tp_program_split(made, &d, 2, &split);
    if (status == TP_OK)
        status = tp_program_lower(split != NULL ? split : made, 1, &lowered);
    if (status == TP_OK)
        status = tp_program_check(lowered);
    if (status == TP_OK)
        status = tp_program_simulate(lowered, &d, NULL, 0, 0, 1, &line);
    size_t length = status == TP_OK ? tp_program_print(lowered, text, sizeof text) : 0;
    if (status == TP_OK)
        status = tp_deadline_check_told(); /* a text that was cut short is no status */
    if (status == TP_OK && length < sizeof text)
        status = tp_program_parse(text, strlen(text), &parsed);
    *answer = status == TP_OK ? line->makespan_s + line->lower_bound_s + (double)strlen(text) : 0.0;
    tp_timeline_close(line);
    tp_program_close(parsed);
    tp_program_close(lowered);
    tp_program_close(split);
    tp_program_close(made);
    return status;
}

/* ---- being told ------------------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t asked, at;
} ear;

static int
heard(void *context)
{
    ear *e = context;
    return ++e->asked == e->at;
}

static const struct {
    const char *name;
    tp_status (*call)(int which, double *answer);
    int count;
} calls[] = {{"baseline", baseline, 5}, {"layers", layers, 2}, {"autopipe", autopipe, 5}, {"dawnpiper", dawnpiper, 2},
             {"bmpipe", bmpipe, 3},     {"slices", slices, 8}, {"shop", shop, 3},         {"bound", bound, 1},
             {"program", program, 4}};

/* All questions, where they are few, else some: each of the first hundred, and then fewer and fewer. */
static void
tell(int k, int which)
{
    tp_listener none;
    double whole = 0.0, again = 0.0;
    int64_t told = 0, questions = 0;
    tp_status status = calls[k].call(which, &whole);
    if (status != TP_OK)
        fprintf(stderr, "%s %d: %s\n", calls[k].name, which, tp_error_message());
    CHECK(status == TP_OK && whole > 0.0);
    for (ear e = {0, 1};; e.at += 1 + e.at / 100) {
        double part = 0.0;
        e.asked = 0;
        tp_deadline_listen(heard, &e, &none);
        status = calls[k].call(which, &part);
        int was_told = tp_deadline_was_told();
        tp_deadline_unlisten(&none);
        if (was_told && status != TP_OK && status != TP_EABORTED)
            fprintf(stderr, "%s %d, question %lld: %s\n", calls[k].name, which, (long long)e.at, tp_error_message());
        CHECK(status == TP_OK || (was_told && status == TP_EABORTED));
        CHECK(!tp_deadline_was_told() && !tp_deadline_late());
        told += was_told;
        questions = e.asked;
        if (!was_told) {
            CHECK(part == whole);
            break;
        }
    }
    CHECK(calls[k].call(which, &again) == TP_OK && again == whole);
    if (told < 3)
        fprintf(stderr, "%s %d: only %lld questions\n", calls[k].name, which, (long long)questions);
    CHECK(told >= 3);
}

/* The same by a deadline at which what is of no use unless it is complete is given up. */
static void
abandon(int k, int which)
{
    double whole = 0.0, again = 0.0;
    int64_t stopped = 0;
    CHECK(calls[k].call(which, &whole) == TP_OK);
    for (int64_t at = 1, late = 1; late; at += 1 + at / 100) {
        double part = 0.0;
        tp_deadline_count(1);
        tp_deadline_set(at);
        CHECK(tp_deadline_abandon(1) == 0);
        tp_status status = calls[k].call(which, &part);
        late = tp_deadline_was_told();
        CHECK(!tp_deadline_was_interrupted() && tp_deadline_check_told() == (late ? TP_ETIMEOUT : TP_OK));
        CHECK(tp_deadline_abandon(0) == 1 && !tp_deadline_was_told());
        tp_deadline_set(0);
        tp_deadline_count(0);
        if (late && status != TP_OK && status != TP_ETIMEOUT)
            fprintf(stderr, "%s %d, question %lld: %s\n", calls[k].name, which, (long long)at, tp_error_message());
        CHECK(status == TP_OK || (late && status == TP_ETIMEOUT));
        CHECK(late || part == whole);
        stopped += late;
    }
    CHECK(calls[k].call(which, &again) == TP_OK && again == whole);
    CHECK(stopped >= 3);
}

static int
never(void *context)
{
    ++*(int *)context;
    return -1;
}

/* What is told to one is no other's: of a planner that a listener runs, of what comes after. */
static int
plan_meanwhile(void *context)
{
    double answer = 0.0;
    CHECK(!tp_deadline_late() && tp_deadline_get() == 0);
    CHECK(baseline(0, &answer) == TP_OK && answer > 0.0);
    ++*(int *)context;
    return 0;
}

static void
listeners_nest(void)
{
    tp_listener none, outer;
    int count = 0;
    double answer = 0.0;
    ear e = {0, 1};
    tp_deadline_set(tp_clock_ns() - 1);
    tp_deadline_listen(plan_meanwhile, &count, &none);
    CHECK(tp_deadline_told() == 0 && count == 1 && tp_deadline_late());
    tp_deadline_listen(heard, &e, &outer);
    CHECK(tp_deadline_told() && tp_deadline_told() && e.asked == 1 && tp_deadline_check_told() == TP_EABORTED);
    CHECK(tp_deadline_check("x") == TP_EABORTED);
    tp_deadline_unlisten(&outer);
    CHECK(!tp_deadline_was_told() && tp_deadline_check_told() == TP_OK && tp_deadline_check("x") == TP_ETIMEOUT);
    tp_deadline_unlisten(&none);
    CHECK(tp_deadline_told() == 0 && tp_deadline_set(0) != 0);
    count = 0;
    tp_deadline_listen(never, &count, &none);
    CHECK(baseline(0, &answer) == TP_OK && count == 1);
    tp_deadline_unlisten(&none);
}

/* Before a long piece of work the clock is looked at, however often it just was. */
static void
long_work_asks_at_once(void)
{
    tp_listener none;
    ear e = {0, 1000};
    tp_deadline_listen_ns = 1;
    tp_deadline_listen(heard, &e, &none);
    for (int i = 0; i < 40; i++) {
        CHECK(!tp_deadline_told());
        int64_t before = e.asked, now = tp_clock_ns();
        while (tp_clock_ns() == now) {
        }
        CHECK(!tp_deadline_told_before() && e.asked == before + 1);
    }
    tp_deadline_unlisten(&none);
    tp_deadline_listen_ns = 0;
}

/* A listener that fails and goes on, as a signal's handler may: the error that it meets, at whatever question, stays as it was. */
static int
fail_meanwhile(void *context)
{
    tp_status status = tp_fail(TP_EVALUE, "of the listener");
    tp_error_locate(7, 9);
    ++*(int *)context;
    return status == TP_OK;
}

static void
errors_stay(void)
{
    tp_listener none;
    tp_error_state before, behind;
    int count = 0;
    CHECK(tp_fail(TP_ESCHEDULE, "of the planner") == TP_ESCHEDULE);
    tp_error_locate(1, 2);
    tp_error_save(&before);
    tp_deadline_listen(fail_meanwhile, &count, &none);
    CHECK(tp_deadline_told() == 0 && count == 1);
    tp_deadline_unlisten(&none);
    tp_error_save(&behind);
    CHECK(strcmp(tp_error_message(), "of the planner") == 0 && tp_error_rank() == 1 && tp_error_position() == 2);
    CHECK(strcmp(before.where, behind.where) == 0);
}

int
main(void)
{
    tp_deadline_steps = 1;
    tp_deadline_listen_ns = 0;
    fill();
    listeners_nest();
    long_work_asks_at_once();
    errors_stay();
    for (size_t k = 0; k < sizeof calls / sizeof *calls; k++)
        for (int which = 0; which < calls[k].count; which++) {
            tell((int)k, which);
            abandon((int)k, which);
        }
    return failures != 0;
}
