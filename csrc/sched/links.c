#include "csrc/sched/links.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/sched/internal.h"

tp_status
tp_sched_links_open(const tp_program *program, tp_sched_links *links)
{
    tp_pairs pairs;
    size_t cells = 2 * (size_t)program->stages;
    *links = (tp_sched_links){.stages = program->stages};
    TP_TRY(tp_pairs_open(program, 0, &pairs)); /* of neighbours: guests have links of their own */
    links->of = malloc(cells * sizeof *links->of);
    links->free_s = calloc(cells, sizeof *links->free_s);
    if (links->of != NULL) {
        memcpy(links->of, pairs.forward, cells / 2 * sizeof *links->of);
        memcpy(links->of + program->stages, pairs.backward, cells / 2 * sizeof *links->of);
    }
    tp_pairs_close(&pairs);
    if (links->of != NULL && links->free_s != NULL)
        return TP_OK;
    tp_sched_links_close(links);
    return tp_fail(TP_EMEMORY, "no memory for the links of %d stages", program->stages);
}

void
tp_sched_links_close(tp_sched_links *links)
{
    free(links->of);
    free(links->free_s);
    *links = (tp_sched_links){.stages = 0};
}

void
tp_sched_links_reset(tp_sched_links *links, const tp_durations *durations)
{
    links->latency_s = durations->latency_s;
    if (links->free_s != NULL)
        memset(links->free_s, 0, 2 * (size_t)links->stages * sizeof *links->free_s);
}
