/* The memory of a stage on a GPU: arenas walked once to count and once to carve, so that the size that the plan predicts
 * and the size that the stage takes are the same code. */
#include "cuda/stage.h"

#include <string.h>

#ifdef TP_CUDA_EMULATED /* tests have fewer */
#include "cuda/emu/emu.h"
#define WEIGHT_ROWS tp_emu_weight_rows()
#else
#define WEIGHT_ROWS TP_CUDA_WEIGHT_ROWS
#endif

enum { ALIGN = 256 }; /* bytes: what kernels and products read widest, and more */

static void *
layout_activations(const tp_stage_base *stage, const tp_stage_block *block, tp_activations *out, tp_stage_arena *from)
{
    int64_t rows = tp_stage_rows(stage), width = stage->config.model.n_embd;
    out->input = tp_lay_elements(from, rows * width);
    out->mean = tp_lay_floats(from, rows);
    out->rstd = tp_lay_floats(from, rows);
    if (block->kind == TP_HEAD)
        out->d_norm = tp_lay_elements(from, rows * width);
    if (block->kind == TP_ATTENTION)
        out->lse = tp_lay_floats(from, rows * stage->config.model.n_head);
    return out->input;
}

static void
layout_gradients(const tp_stage_base *stage, const tp_stage_block *block, void *d_input, tp_gradients *out, tp_stage_arena *from)
{
    int64_t rows = tp_stage_rows(stage), own = stage->slice_rows, width = stage->config.model.n_embd;
    out->d_input = d_input;
    if (block->kind == TP_HEAD)
        return;
    out->d_norm = tp_lay_elements(from, own * width);
    if (block->kind == TP_ATTENTION) {
        out->dqkv = tp_lay_elements(from, own * 3 * width);
        out->d_o = tp_lay_elements(from, rows * width);
        out->delta = tp_lay_floats(from, rows * stage->config.model.n_head);
    } else {
        out->dh = tp_lay_elements(from, own * 4 * width);
    }
}

static void
layout_groups(const tp_stage_base *stage, row_groups *groups, int64_t height, tp_stage_arena *from)
{
    int64_t rows = tp_stage_tokens(stage), most = rows < height ? rows : height;
    if (stage->config.versions > 0) /* each sum's begin where its rows do */
        most = rows + tp_cuda_sums(stage) - 1;
    groups->index = tp_lay(from, most, sizeof(int32_t));
    groups->start = tp_lay(from, most + 1, sizeof(int32_t));
    groups->rows = tp_lay(from, rows, sizeof(int32_t));
}

/* The same order on both sides: one copy takes all of it. */
static size_t
layout_ints(const tp_stage *stage, stage_ints *ints, tp_stage_arena *from)
{
    int64_t tokens = tp_stage_tokens(&stage->base);
    size_t before = from->used;
    *ints = (stage_ints){0};
    if (tp_stage_heads(&stage->base))
        ints->targets = tp_lay(from, tokens, sizeof(int32_t));
    if (tp_stage_scatters(&stage->base)) {
        ints->tokens = tp_lay(from, tokens, sizeof(int32_t));
        layout_groups(&stage->base, &ints->by_token, stage->base.config.model.vocab_size, from);
    }
    if (tp_stage_embeds(&stage->base)) {
        ints->positions = tp_lay(from, tokens, sizeof(int32_t));
        layout_groups(&stage->base, &ints->by_position, stage->base.config.slicing->seq_len, from);
    }
    return from->used - before;
}

/* The tables of what is measured and updated (tp_cuda_stage_list). Of shards with room for whichever member has most leaves: a plan
 * counts one member's memory for all. */
static void
layout_tensors(tp_stage *stage, tp_stage_arena *from)
{
    stage->leaves = 0;
    for (int i = 0; i < stage->base.params; i++)
        if (stage->base.config.shards)
            stage->leaves += tp_cuda_leaves(tp_stage_shard_part(&stage->base, i).floats);
        else if (tp_stage_answers_for(&stage->base, i))
            stage->leaves += tp_cuda_leaves(stage->base.param[i].info.rows * stage->base.param[i].info.cols);
    stage->tensors = tp_lay(from, (int64_t)tp_cuda_lists(&stage->base) * stage->base.params, sizeof *stage->tensors);
    stage->owner = tp_lay(from, stage->base.config.shards ? stage->base.squares_each : stage->leaves, sizeof *stage->owner);
}

size_t
tp_cuda_stage_layout(tp_stage *stage, char *base)
{
    const tp_model *model = &stage->base.config.model;
    int64_t tokens = tp_stage_tokens(&stage->base), width = model->n_embd;
    tp_stage_arena from = {base, 0, ALIGN, stage->base.sizes.element};
    tp_lay_params(&stage->base, &from);
    if (stage->base.config.versions > 0) {
        tp_lay_versions(&stage->base, &from);
        stage->squares = tp_lay(&from, stage->base.params, sizeof *stage->squares);
        stage->clipped = tp_lay(&from, 1, sizeof *stage->clipped);
    }
    layout_tensors(stage, &from);
    stage->zeroed_bytes = from.used;
    tp_lay_slots(&stage->base, &from, layout_activations, layout_gradients);
    if (tp_stage_heads(&stage->base)) {
        stage->tile_rows = tokens < TP_CUDA_HEAD_TILE ? tokens : TP_CUDA_HEAD_TILE;
        stage->tile_logits = tp_lay_elements(&from, stage->tile_rows * tp_cuda_padded_vocab(model));
        stage->tile_x = tp_lay_elements(&from, stage->tile_rows * width);
        stage->loss = tp_lay_floats(&from, tokens);
    }
    if (tp_stage_scatters(&stage->base))
        stage->base.embedding_rows = tp_lay_elements(&from, tokens * width);
    if (!stage->base.config.shards) { /* of these all members' leaves are added up by the host */
        stage->partial = tp_lay(&from, stage->leaves, sizeof *stage->partial);
        stage->sums = tp_lay(&from, stage->base.params, sizeof(double));
    }
    stage->ints_bytes = layout_ints(stage, &stage->on_device, &from);
    return from.used;
}

size_t
tp_cuda_stage_layout_host(tp_stage *stage, char *base)
{
    tp_stage_arena from = {base, 0, ALIGN, stage->base.sizes.element};
    layout_ints(stage, &stage->on_host, &from);
    stage->host_loss = tp_lay_floats(&from, tp_stage_tokens(&stage->base));
    stage->host_sums = tp_lay(&from, stage->base.params, sizeof(double));
    stage->host_clipped = tp_lay(&from, stage->base.config.versions > 0, sizeof *stage->host_clipped);
    if (stage->base.config.shards) {
        stage->host_squares = tp_lay(&from, stage->base.config.replicas * stage->base.squares_each, sizeof(double));
        stage->host_leaves = tp_lay(&from, stage->base.leaves, sizeof(double));
    }
    return from.used;
}

/* ---- the tables ------------------------------------------------------------------------------------------------------------ */

static int
ends_in(const char *name, const char *suffix)
{
    size_t length = strlen(name), tail = strlen(suffix);
    return length >= tail && strcmp(name + length - tail, suffix) == 0;
}

/* By what all stages of a plan know, so that the bits follow from what is saved and not from the schedule. */
static int
sums_groups(const tp_stage_config *config)
{
    int saves = 0;
    for (int block = 0; config->saves != NULL && block < tp_model_blocks(&config->model); block++) {
        if (config->saves[block] == TP_SWAPS && tp_model_block_kind(&config->model, block) == TP_ATTENTION)
            return 0;
        saves |= config->saves[block] != TP_KEEPS;
    }
    return saves;
}

tp_status
tp_cuda_stage_describe(const tp_stage_config *config, tp_dtype dtype, tp_stage **out)
{
    const tp_stage_sizes sizes = {sizeof(tp_stage), sizeof(tp_activations), sizeof(tp_gradients), tp_dtype_bytes(dtype), 1, 1,
                                  1, WEIGHT_ROWS, 1, 1};
    TP_TRY(tp_stage_describe(config, &sizes, out));
    (*out)->dtype = dtype;
    (*out)->group_rows = sums_groups(config) ? WEIGHT_ROWS : 0;
    const tp_stage_base *stage = &(*out)->base;
    for (int i = 0; i < stage->params; i++) {
        tp_stage_param *param = &stage->param[i];
        const tp_param *info = &param->info;
        int head = ends_in(info->name, "lm_head.weight") || (param->index == 0 && config->model.tie_weights);
        int product = ends_in(info->name, "c_attn.bias") || ends_in(info->name, "c_proj.bias") ||
                      ends_in(info->name, "c_fc.bias");
        param->floats = (head ? tp_cuda_padded_vocab(&config->model) : info->rows) * info->cols;
        param->copy_count = dtype != TP_F32 && (info->is_matrix || product) ? param->floats : 0;
    }
    return TP_OK;
}
