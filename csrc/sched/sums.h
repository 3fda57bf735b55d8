/* Sums of replicas' gradients beside the work (tp_durations.beside_s): each rank has one thread for them, which takes its stages in the
 * order in which their gradients are complete. */
#ifndef TP_SCHED_SUMS_H
#define TP_SCHED_SUMS_H

#include "csrc/sched/sched.h"

typedef struct {
    int64_t *last;   /* [stages] position in the program's code of the last B or W of each; -1: none */
    int32_t *stages; /* [stages] grouped by rank, in that order */
    int32_t *begin;  /* [ranks + 1] */
} tp_sched_sums;
/* Where durations (NULL: whatever) have sums beside the work; else all NULL. EMEMORY. */
TP_MUST_USE tp_status
tp_sched_sums_open(const tp_program *program, const tp_durations *durations, tp_sched_sums *sums);
void
tp_sched_sums_close(tp_sched_sums *sums);

/* When the sums of a stage are done whose last gradients took from start_s to end_s, where the thread is free at free_s. whole: they are
 * those of a B, which goes back block by block: as many steps of that, evenly, as there are last_s in beside_s, each with its sum. */
static inline double
tp_sched_sum_beside(const tp_durations *d, int stage, int whole, double free_s, double start_s, double end_s)
{
    int64_t at = stage * d->stage_stride;
    double all = d->beside_s[at], last = whole && d->last_s != NULL && d->last_s[at] < all ? d->last_s[at] : all;
    if (!(all > 0.0))
        return free_s;
    double first = start_s + (end_s - start_s) * (last / all), through = (free_s > first ? free_s : first) + all;
    return through > end_s + last ? through : end_s + last;
}

#endif
