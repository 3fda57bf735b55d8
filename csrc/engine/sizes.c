/* What a stage takes by its blocks, asked once for each shape that it may have. */
#include "csrc/engine/internal.h"

#include <stdlib.h>

/* Layers are alike: what a stage takes depends on how many blocks it has, on the kind of the first, and on whether it has an end. */
enum { SHAPES = 6 };
#define MOST ((size_t)1 << 22) /* sizes that are remembered where layers are not alike: 96 MiB */

/* Does what is remade or swapped depend on the kind of a block alone? */
static int
layers_are_alike(const tp_engine_config *config)
{
    for (int i = 3; config->saves != NULL && i < tp_model_blocks(&config->model) - 1; i++)
        if (config->saves[i] != config->saves[i - 2])
            return 0;
    return 1;
}

static void
look_at_program(tp_engine_sizes *sizes)
{
    const tp_program *program = sizes->config.program;
    int32_t held = 0;
    for (int stage = 0; stage < program->stages; stage++) {
        sizes->host[stage] = tp_program_host(program, stage);
        sizes->rooms[stage] = sizes->host[stage] < 0 ? 0 : tp_program_guest_slots(program, stage);
    }
    for (int r = 0; r < program->ranks; r++) {
        for (int stage = 0; stage < program->stages; stage++)
            if (program->rank_of[stage] == r || sizes->host[stage] == r)
                sizes->held[held++] = stage;
        sizes->first_held[r + 1] = held;
        sizes->config.rank = r;
        sizes->beside[r] = (int64_t)tp_engine_table_bytes(&sizes->config);
    }
}

tp_status
tp_engine_sizes_open(const tp_engine_config *config, tp_engine_sizes *out)
{
    size_t ranks = (size_t)config->program->ranks, stages = (size_t)config->program->stages;
    size_t parts = (size_t)tp_program_copy_stages(config->program);
    *out = (tp_engine_sizes){.config = *config, .blocks = tp_model_blocks(&config->model), .parts = (int)parts,
                             .alike = layers_are_alike(config)};
    size_t blocks = (size_t)out->blocks, count = stages * (out->alike ? SHAPES : blocks) * (blocks + 1);
    out->boundary = calloc(parts + 1 + 4 * stages + ranks + 1, sizeof *out->boundary);
    out->beside = calloc(ranks, sizeof *out->beside);
    out->known = out->alike || count <= MOST ? calloc(count, sizeof *out->known) : NULL;
    out->config.partition = out->boundary;
    if (out->boundary == NULL || out->beside == NULL || (out->known == NULL && (out->alike || count <= MOST))) {
        tp_engine_sizes_close(out);
        return tp_fail(TP_EMEMORY, "no memory for the sizes of %d stages", config->program->stages);
    }
    out->host = out->boundary + parts + 1;
    out->rooms = out->host + stages;
    out->held = out->rooms + stages; /* a stage has its rank, and a host at most */
    out->first_held = out->held + 2 * stages;
    look_at_program(out);
    return TP_OK;
}

void
tp_engine_sizes_close(tp_engine_sizes *sizes)
{
    free(sizes->boundary);
    free(sizes->beside);
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
    const tp_engine_size never = {TP_ENGINE_NEVER / sizes->config.program->stages, 0, 0}; /* those of a rank are added up */
    if (known != NULL && known->stage > 0)
        return *known;
    if (sizes->failed != TP_OK) /* what comes later would say something else of it than the first */
        return never;
    int part = tp_engine_part(&sizes->config, stage);
    sizes->boundary[part] = from;
    sizes->boundary[part + 1] = to;
    sizes->config.rank = sizes->config.program->rank_of[stage];
    tp_stage_bytes bytes;
    size_t workspace;
    tp_status status = tp_engine_stage_bytes(&sizes->config, stage, &bytes, &workspace);
    if (status != TP_OK) {
        sizes->failed = status;
        return never;
    }
    size = (tp_engine_size){(int64_t)bytes.memory, (int64_t)workspace, sizes->rooms[stage] * (int64_t)bytes.guest};
    if (known != NULL)
        *known = size;
    return size;
}

int64_t
tp_engine_sizes_of_rank(tp_engine_sizes *sizes, const int32_t *boundary, int rank)
{
    int64_t bytes = sizes->beside[rank], workspace = 0;
    for (int32_t i = sizes->first_held[rank]; i < sizes->first_held[rank + 1]; i++) {
        int stage = sizes->held[i], part = stage % sizes->parts;
        tp_engine_size size = tp_engine_size_of(sizes, stage, boundary[part], boundary[part + 1]);
        if (sizes->config.program->rank_of[stage] == rank) {
            bytes += size.stage;
            workspace = size.workspace > workspace ? size.workspace : workspace;
        }
        bytes += sizes->host[stage] == rank ? size.guests : 0;
    }
    return (int64_t)tp_align_bytes((size_t)bytes) + workspace;
}

int64_t
tp_engine_sizes_count(tp_engine_sizes *sizes, const int32_t *boundary, int64_t *bytes)
{
    int64_t most = 0;
    for (int r = 0; r < sizes->config.program->ranks; r++) {
        bytes[r] = tp_engine_sizes_of_rank(sizes, boundary, r);
        most = bytes[r] > most ? bytes[r] : most;
    }
    return most;
}
