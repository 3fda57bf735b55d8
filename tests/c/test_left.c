/* Splits that are left where they are known to be slower. What is left changes no answer: of random programs and durations a split is
 * the one that a copy of split.c gives which leaves nothing; and with a goal it is that one, or, where that takes longer, none. */
#define tp_sched_split unhurried_split
#define tp_program_split unhurried_program_split
#include "csrc/sched/filled.h"
#define tp_filled_is_known(given, x) ((void)(given), (void)(x), 0) /* no other program limits how long one may take */
#include "csrc/sched/split.c"

#include "tests/c/check.h"
#include "tests/c/drawn.h"

enum { MOST_STAGES = 8, MOST_MICROS = 8, MOST_UNITS = 2 * MOST_MICROS * 4 };

typedef struct {
    tp_program *compute;
    tp_durations d;
    double table[TP_OPS + 8][MOST_STAGES * MOST_UNITS];
    int pending;
} job;

static tp_program *
build(void)
{
    static const tp_schedule schedules[] = {TP_GPIPE, TP_1F1B, TP_SEQ1F1B, TP_INTERLEAVED, TP_LOOPED_BFS};
    const int way = drawn(0, 7), ranks = drawn(1, 4), chunks = way == 3 || way == 4 ? drawn(1, 2) : 1;
    const int micros = way == 3 ? ranks * drawn(1, 2) : drawn(1, MOST_MICROS);
    int32_t slices[MOST_MICROS];
    tp_program *out = NULL;
    for (int q = 0; q < micros; q++)
        slices[q] = drawn(0, 1) ? 1 : drawn(1, 4);
    MUST((way < 5   ? tp_program_build(schedules[way], ranks, chunks, micros, slices, &out)
          : way < 7 ? tp_program_build_pipedream(ranks, micros, slices, &out)
                    : tp_program_build_chimera(2 * ((ranks + 1) / 2), 2 * ((micros + 1) / 2), slices, &out)) == TP_OK ||
         way == 7);
    return out;
}

/* Whole numbers now and then, so that times are equal. */
static void
fill_table(job *j, int k, int64_t count, int most, int whole)
{
    for (int64_t i = 0; i < count; i++)
        j->table[k][i] = whole ? drawn(0, most) : drawn(0, 1000 * most) / 999.0;
}

static void
draw(job *j)
{
    static const int ops[] = {TP_OP_F, TP_OP_I, TP_OP_W, TP_OP_OPT, TP_OP_SF, TP_OP_RF, TP_OP_SB, TP_OP_RB, TP_OP_U};
    const int64_t units = tp_program_units(j->compute), count = j->compute->stages * units;
    const int whole = drawn(0, 1), copies = drawn(0, 1), ends = drawn(0, 2);
    MUST(count <= MOST_STAGES * MOST_UNITS);
    j->d = (tp_durations){.stage_stride = units, .unit_stride = 1};
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        fill_table(j, ops[i], count, ops[i] == TP_OP_OPT ? 20 : ops[i] > TP_OP_W && ops[i] != TP_OP_U ? 1 : 6, whole);
        if (i < 3 || (ops[i] == TP_OP_OPT && ends > 0) || ops[i] == TP_OP_U || (copies && i > 3))
            j->d.seconds[ops[i]] = j->table[ops[i]];
    }
    fill_table(j, TP_OPS, count, 2, whole);
    j->d.comm_unit_s = drawn(0, 1) ? j->table[TP_OPS] : NULL;
    fill_table(j, TP_OPS + 1, count, 15, whole); /* sums of replicas, of some ranks more than of others */
    j->d.sum_s = ends == 2 ? j->table[TP_OPS + 1] : NULL;
    fill_table(j, TP_OPS + 2, 2 * j->compute->stages, 1, whole);
    for (int v = 0; v < 2 * j->compute->stages; v++)
        j->table[TP_OPS + 2][v] *= 0.1;
    j->d.latency_s = j->d.comm_unit_s != NULL && drawn(0, 1) ? j->table[TP_OPS + 2] : NULL;
    j->pending = drawn(0, 3);
}

static double
seconds_of(const tp_completed *of, const tp_durations *d)
{
    double seconds;
    tp_sim_run(of->sim, d, &seconds);
    return seconds;
}

static void
check_goals(const job *j, const tp_completed *full, double seconds)
{
    static const double goals[] = {0.5, 0.9, 0.98, 1 - 1e-4, 1.0, 1 + 1e-4, 1.02, 1.1, 2.0};
    for (size_t i = 0; i < sizeof goals / sizeof *goals; i++) {
        tp_completed left;
        CHECK(tp_program_complete(j->compute, &j->d, j->pending, 0, NULL, goals[i] * seconds, &left) == TP_OK);
        CHECK(left.order == NULL ? goals[i] < 1.0 || seconds == 0.0 : tp_program_equal(left.order, full->order));
        tp_completed_close(&left, NULL);
    }
}

/* 1: the program was found in the end, and so the goal was of use. */
static void
check_one(job *j)
{
    tp_completed full;
    tp_program *unhurried = NULL;
    j->compute = build();
    if (j->compute == NULL)
        return;
    draw(j);
    MUST(tp_program_complete(j->compute, &j->d, j->pending, 0, NULL, INFINITY, &full) == TP_OK && full.order != NULL);
    CHECK(unhurried_split(j->compute, tp_sched_ops(j->compute), &j->d, j->pending, INFINITY, &unhurried) == TP_OK);
    CHECK(tp_program_equal(full.order, unhurried));
    CHECK(tp_program_complete_length(j->compute, j->pending, 0) == full.program->begin[full.program->ranks]);
    check_goals(j, &full, seconds_of(&full, &j->d));
    tp_program_close(unhurried);
    tp_completed_close(&full, NULL);
    tp_program_close(j->compute);
}

int
main(void)
{
    static job j;
    for (uint32_t seed = 0; seed < 4000; seed++) {
        state = seed * 2654435761u;
        check_one(&j);
    }
    return failures != 0;
}
