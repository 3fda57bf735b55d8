/* What a stage takes by its blocks, asked once for each shape that it may have. */
#include "csrc/engine/internal.h"

#include <stdlib.h>

#include "csrc/base/deadline.h"

/* Layers are alike: what a stage takes depends on how many blocks it has, on the kind of the first, and on whether it has an end. */
enum { SHAPES = 6 };
#define MOST ((size_t)1 << 22) /* sizes that are remembered where layers are not alike: 64 MiB */

/* Does what is remade or swapped depend on the kind of a block alone? */
static int
layers_are_alike(const tp_engine_config *config)
{
    for (int i = 3; config->saves != NULL && i < tp_model_blocks(&config->model) - 1; i++)
        if (config->saves[i] != config->saves[i - 2])
            return 0;
    return 1;
}

tp_status
tp_engine_sizes_open(const tp_engine_config *config, tp_engine_sizes *out)
{
    size_t stages = (size_t)config->program->stages, parts = (size_t)tp_program_copy_stages(config->program);
    *out = (tp_engine_sizes){.config = *config, .blocks = tp_model_blocks(&config->model), .alike = layers_are_alike(config)};
    size_t blocks = (size_t)out->blocks, count = stages * (out->alike ? SHAPES : blocks) * (blocks + 1);
    out->boundary = calloc(parts + 1, sizeof *out->boundary);
    out->known = out->alike || count <= MOST ? calloc(count, sizeof *out->known) : NULL;
    out->config.partition = out->boundary;
    if (out->boundary == NULL || (out->known == NULL && (out->alike || count <= MOST))) {
        tp_engine_sizes_close(out);
        return tp_fail(TP_EMEMORY, "no memory for the sizes of %d stages", config->program->stages);
    }
    return TP_OK;
}

void
tp_engine_sizes_close(tp_engine_sizes *sizes)
{
    free(sizes->boundary);
    free(sizes->known);
    *sizes = (tp_engine_sizes){0};
}

static tp_engine_size *
known_size(const tp_engine_sizes *sizes, int stage, int from, int to)
{
    int shape = (from == 0 ? 0 : 2 + 2 * (from & 1)) + (to == sizes->blocks);
    size_t blocks = (size_t)sizes->blocks;
    size_t row = sizes->alike ? (size_t)stage * SHAPES + (size_t)shape : (size_t)stage * blocks + (size_t)from;
    return sizes->known == NULL ? NULL : &sizes->known[row * (blocks + 1) + (size_t)(to - from)];
}

tp_engine_size
tp_engine_size_of(tp_engine_sizes *sizes, int stage, int from, int to)
{
    tp_engine_size *known = known_size(sizes, stage, from, to), size;
    if (known != NULL && known->stage > 0)
        return *known;
    int part = tp_engine_part(&sizes->config, stage);
    sizes->boundary[part] = from;
    sizes->boundary[part + 1] = to;
    sizes->config.rank = sizes->config.program->rank_of[stage];
    size = (tp_engine_size){(int64_t)tp_engine_stage_bytes(&sizes->config, stage),
                            (int64_t)tp_engine_workspace_bytes(&sizes->config, stage)};
    if (known != NULL)
        *known = size;
    return size;
}
