/* Texts of programs, mutated at random, through parse, print, check, lower, strip and simulate: whatever the text says,
 * the answer is a status or a program that prints itself back; and the same of CSV. fuzz_program [seconds] [seed] */
#include "csrc/base/clock.h"
#include "csrc/base/rng.h"
#include "csrc/sched/sched.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROOM 65536

static uint64_t seed, drawn;

static uint64_t
below(uint64_t bound)
{
    return tp_rng_below(seed, 0, drawn++, bound);
}

static char *
print(const tp_program *program)
{
    size_t length = tp_program_print(program, NULL, 0);
    char *text = malloc(length + 1);
    if (text == NULL || tp_program_print(program, text, length + 1) != length)
        exit(99);
    return text;
}

/* With R (within B too), SO and SI on some stages, where the program takes them. */
static tp_program *
saving_memory(tp_program *program)
{
    static const uint8_t again_ways[] = {TP_AGAIN_NOT, TP_AGAIN_SLICES, TP_AGAIN_ALL, TP_AGAIN_KEYS + 2, TP_AGAIN_WITHIN};
    uint8_t again[16], swapped[16];
    tp_program *saved = NULL;
    if (program->stages > 16 || below(2))
        return program;
    for (int v = 0; v < program->stages; v++) {
        again[v] = again_ways[below(sizeof again_ways)];
        swapped[v] = below(3) ? TP_AGAIN_NOT : (uint8_t)below(TP_AGAIN_SLICES + 1);
    }
    if (tp_program_save_memory(program, again, swapped, (int)below(TP_SWAP_TWO + 1), (int)below(2), &saved) != TP_OK)
        return program; /* within B of slices; a schedule that has guests */
    tp_program_close(program);
    return saved;
}

/* A true program's text, compute-only or lowered. */
static char *
true_text(void)
{
    tp_program *program = NULL, *lowered = NULL;
    int micros = 1 + (int)below(6), ranks = 1 + (int)below(5), chunks = 1 + (int)below(2);
    int32_t slices[6];
    int whole = below(3) == 0; /* what R within B wants */
    for (int i = 0; i < micros; i++)
        slices[i] = whole ? 1 : 1 + (int32_t)below(3);
    if (below(3) == 0 && tp_program_build_sliced(ranks, micros, (int)below((uint64_t)micros + 1), &program) != TP_OK)
        exit(99);
    if (program == NULL && ranks % 2 == 0 && micros % 2 == 0 && below(2) &&
        tp_program_build_chimera(ranks, micros, slices, &program) != TP_OK)
        exit(99);
    if (program == NULL && below(3) == 0 && tp_program_build_bpipe(ranks, micros, slices, &program) != TP_OK)
        exit(99);
    if (program == NULL && below(3) == 0 && tp_program_build_pipedream(ranks, micros, slices, &program) != TP_OK)
        exit(99);
    while (program == NULL &&
           tp_program_build((tp_schedule)below(TP_SCHEDULES), ranks, chunks, micros, slices, &program) != TP_OK)
        chunks = 1; /* interleaved asks for more than the others do */
    program = saving_memory(program);
    char *text;
    if (below(2) && tp_program_lower(program, (int)below(2), &lowered) == TP_OK) {
        if (tp_program_check(lowered) != TP_OK) {
            fprintf(stderr, "a lowered program of ours does not check: %s\n", tp_error_message());
            exit(1);
        }
        text = print(lowered);
        tp_program_close(lowered);
    } else
        text = print(program);
    tp_program_close(program);
    return text;
}

static size_t
mutate(const char *text, char *out)
{
    static const char alphabet[] = "0123456789FBIWRSOAPTELU.@ \n,-ab+&();";
    size_t length = strlen(text);
    if (length > ROOM / 2)
        length = ROOM / 2;
    memcpy(out, text, length);
    for (uint64_t edits = below(6); edits > 0 && length > 1; edits--) {
        size_t at = below(length), other = below(length), span = 1 + below(12);
        switch (below(5)) {
        case 0: out[at] = alphabet[below(sizeof alphabet - 1)]; break;
        case 1: out[at] = (char)below(256); break;
        case 2: /* cut */
            span = span < length - at ? span : length - at;
            memmove(out + at, out + at + span, length - at - span);
            length -= span;
            break;
        case 3: /* copy a span from elsewhere over this one */
            span = span < length - at ? span : length - at;
            span = span < length - other ? span : length - other;
            memmove(out + at, out + other, span);
            break;
        default: /* open a gap and write a digit: large numbers */
            memmove(out + at + 1, out + at, length - at);
            out[at] = (char)('0' + below(10));
            length++;
        }
    }
    return length;
}

static void
use_csv(const tp_program *program)
{
    tp_program *stripped = NULL, *again = NULL;
    size_t length = tp_program_print_csv(program, NULL, 0);
    char *text = malloc(length + 1);
    if (text == NULL || tp_program_print_csv(program, text, length + 1) != length)
        exit(99);
    tp_status status = tp_program_strip(program, &stripped);
    if (status == TP_OK && tp_program_check(stripped) == TP_OK &&
        (tp_program_parse_csv(text, length, &again) != TP_OK || !tp_program_equal(stripped, again))) {
        fprintf(stderr, "does not survive CSV (%s):\n%s\n", tp_error_message(), text);
        exit(1);
    }
    tp_program_close(again);
    tp_program_close(stripped);
    again = NULL;
    char mutated[512];
    if (length < sizeof mutated / 2) {
        length = mutate(text, mutated);
        if (tp_program_parse_csv(mutated, length, &again) == TP_OK)
            tp_program_close(again);
    }
    free(text);
}

/* Few slots or many, whatever the program; a proven one comes to its end where every message finds a slot. */
static void
use_slots(const tp_program *program)
{
    if ((int64_t)program->stages * tp_program_units(program) > 1 << 20)
        return;
    int proven = tp_program_check(program) == TP_OK;
    int64_t *at = malloc((size_t)program->ranks * sizeof *at);
    if (at == NULL)
        exit(99);
    tp_status status = tp_program_stuck(program, proven ? 1 << 20 : 1 + (int)below(3), (int)below(2), at);
    for (int rank = 0; proven && rank < program->ranks; rank++)
        if (status != TP_OK || at[rank] != program->begin[rank + 1] - program->begin[rank]) {
            fprintf(stderr, "rank %d of a proven program ends at %lld (%s)\n", rank, (long long)at[rank], tp_error_message());
            exit(1);
        }
    free(at);
}

static void
use(const tp_program *program)
{
    tp_program *again = NULL, *lowered = NULL, *stripped = NULL;
    char *text = print(program);
    if (tp_program_parse(text, strlen(text), &again) != TP_OK || !tp_program_equal(program, again)) {
        fprintf(stderr, "does not survive print and parse (%s):\n%s\n", tp_error_message(), text);
        exit(1);
    }
    free(text);
    tp_program_close(again);
    use_slots(program);
    if (tp_program_check(program) == TP_OK) {
        double one = 1.0, two = 2.0;
        tp_durations durations = {.seconds = {[TP_OP_F] = &one, [TP_OP_B] = &two, [TP_OP_I] = &one, [TP_OP_W] = &one,
                                              [TP_OP_U] = &one, [TP_OP_R] = &two, [TP_OP_SO] = &one, [TP_OP_SI] = &one}};
        tp_timeline *line = NULL;
        tp_program *split = NULL;
        tp_sim *sim = NULL;
        double makespan = -1.0;
        if (tp_program_split(program, &durations, (int)below(3), &split) == TP_OK) {
            if (tp_program_check(split) != TP_OK) {
                fprintf(stderr, "a split program does not check: %s\n", tp_error_message());
                exit(1);
            }
            tp_program_close(split);
        }
        if (tp_sim_open(program, &sim) == TP_OK) {
            tp_sim_run(sim, &durations, &makespan);
            tp_sim_close(sim);
        }
        if (tp_program_simulate(program, &durations, &one, 0, 0, 1, &line) == TP_OK) {
            if (!(line->makespan_s >= line->lower_bound_s - 1e-9)) {
                fprintf(stderr, "makespan %g is under its lower bound %g\n", line->makespan_s, line->lower_bound_s);
                exit(1);
            }
            if (line->makespan_s != makespan) {
                fprintf(stderr, "makespan %g, and %g again\n", line->makespan_s, makespan);
                exit(1);
            }
            tp_timeline_close(line);
        }
    }
    if (tp_program_can_csv(program) == TP_OK)
        use_csv(program);
    if (tp_program_strip(program, &stripped) == TP_OK) {
        if (tp_program_lower(stripped, 1, &lowered) == TP_OK)
            tp_program_close(lowered);
        tp_program_close(stripped);
    }
}

int
main(int argc, char **argv)
{
    static char mutated[ROOM + 16];
    double seconds = argc > 1 ? atof(argv[1]) : 5.0;
    seed = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)tp_clock_ns();
    int64_t end = tp_clock_ns() + (int64_t)(seconds * 0.9e9);
    long texts = 0, parsed = 0;
    fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
    while (tp_clock_ns() < end) {
        char *text = true_text();
        for (int i = 0; i < 50; i++, texts++) {
            tp_program *program = NULL;
            size_t length = mutate(text, mutated);
            char *exact = malloc(length ? length : 1); /* its own allocation: a read past the end is seen */
            memcpy(exact, mutated, length);
            if (tp_program_parse(exact, length, &program) == TP_OK) {
                parsed++;
                use(program);
                tp_program_close(program);
            }
            free(exact);
        }
        free(text);
    }
    fprintf(stderr, "%ld texts, %ld were programs\n", texts, parsed);
    return 0;
}
