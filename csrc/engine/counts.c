/* What the sizes of engines take from a program, counted once for all its stages and ranks. */
#include "csrc/engine/internal.h"

#include <stdlib.h>

tp_status
tp_engine_count(const tp_program *program, tp_engine_counts *counts)
{
    size_t ranks = (size_t)program->ranks;
    *counts = (tp_engine_counts){.stage = malloc((size_t)program->stages * sizeof *counts->stage),
                                 .copies = malloc(2 * ranks * sizeof *counts->copies)};
    if (counts->stage == NULL || counts->copies == NULL) {
        tp_engine_counts_close(counts);
        return tp_fail(TP_EMEMORY, "no memory to count the slots of %d stages", program->stages);
    }
    counts->guests = counts->copies + ranks;
    tp_program_count(program, counts->stage);
    for (int r = 0; r < program->ranks; r++) {
        counts->copies[r] = tp_engine_copies(program, r);
        counts->guests[r] = tp_engine_has_guests(program, r);
    }
    return TP_OK;
}

void
tp_engine_counts_close(tp_engine_counts *counts)
{
    free(counts->stage);
    free(counts->copies);
    *counts = (tp_engine_counts){0};
}

tp_stage_counts
tp_engine_stage_counts(const tp_engine_config *config, int stage)
{
    const tp_program *program = config->program;
    if (config->counts != NULL)
        return config->counts->stage[stage];
    return (tp_stage_counts){tp_program_activation_slots(program, stage), tp_program_gradient_slots(program, stage),
                             tp_program_versions(program, stage), tp_program_has_two_places(program, stage),
                             tp_program_has_apart(program, stage), tp_program_within(program, stage)};
}

int
tp_engine_rank_copies(const tp_engine_config *config)
{
    return config->counts != NULL ? config->counts->copies[config->rank] : tp_engine_copies(config->program, config->rank);
}

int
tp_engine_rank_has_guests(const tp_engine_config *config)
{
    return config->counts != NULL ? config->counts->guests[config->rank] : tp_engine_has_guests(config->program, config->rank);
}
