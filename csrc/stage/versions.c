/* Versions of a stage's weights: the newest, and the older ones that later backwards will still read (PipeDream's weight stashing,
 * Narayanan et al., SOSP 2019, section 3.3). They form a ring. The last update of a step ends at version 0, where a stage without
 * versions has its weights, so each step finds every version where the step before had it, and a captured graph stays right. */
#include "csrc/stage/describe.h"

#include <math.h>

void
tp_lay_versions(tp_stage_base *stage, tp_stage_arena *from)
{
    tp_stage_arena one = {NULL, 0, from->align, from->element};
    for (int i = 0; i < stage->params; i++) {
        tp_stage_param *param = &stage->param[i];
        param->value_at = one.used;
        tp_lay_floats(&one, param->floats);
        param->copy_at = one.used;
        tp_lay_elements(&one, param->copy_count);
    }
    stage->version_bytes = one.used;
    stage->versions = tp_lay(from, stage->config.versions > 1 ? stage->config.versions - 1 : 0, one.used);
}

/* Of version 1 and up. */
static char *
version_at(const tp_stage_base *stage, int version)
{
    return stage->versions + (size_t)(version - 1) * stage->version_bytes;
}

float *
tp_stage_version(const tp_stage_base *stage, int i, int version)
{
    const tp_stage_param *param = &stage->param[i];
    return version == 0 ? param->first_value : (float *)(void *)(version_at(stage, version) + param->value_at);
}

void *
tp_stage_version_copy(const tp_stage_base *stage, int i, int version)
{
    const tp_stage_param *param = &stage->param[i];
    return version == 0 || param->copy_count == 0 ? param->first_copy : version_at(stage, version) + param->copy_at;
}

static void
select_version(tp_stage_base *stage, int version)
{
    for (int i = 0; version != stage->selected && i < stage->params; i++) {
        tp_stage_param *param = &stage->param[i];
        param->value = tp_stage_version(stage, i, version);
        param->copy = tp_stage_version_copy(stage, i, version);
    }
    stage->selected = version;
}

void
tp_stage_select(tp_stage_base *stage, int micro, int begins)
{
    if (stage->version_of == NULL)
        return;
    if (begins)
        stage->version_of[micro] = stage->newest;
    select_version(stage, micro < 0 ? stage->newest : stage->version_of[micro]);
}

int
tp_stage_advance(tp_stage_base *stage, int micro)
{
    int before = stage->newest, last = micro == stage->config.slicing->micros - 1;
    stage->newest = last ? 0 : (before + 1) % stage->config.versions; /* no backward is to come that reads another */
    select_version(stage, stage->newest);
    return before;
}

tp_status
tp_stage_refuse_norm(const tp_stage_base *stage, int micro, double norm2)
{
    return tp_fail(TP_ERUNTIME,
                   "the gradient norm of micro-batch %d on %s is %g; what micro-batches before it updated stays so. A smaller lr, a "
                   "longer warm-up or grad_clip may help", micro, stage->what, isnan(norm2) ? (double)NAN : sqrt(norm2));
}
