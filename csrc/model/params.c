/* The parameters of a model: names and shapes of Hugging Face's GPT2LMHeadModel, and their initial values. */
#include "csrc/model/model.h"

#include <math.h>
#include <string.h>

#include "csrc/base/rng.h"

/* A name with its length: planners ask for every tensor of every stage of thousands of plans. */
#define NAMED(text) text, sizeof text - 1

typedef struct {
    const char *name;
    size_t length;      /* of the name */
    int32_t ffn;        /* 0: of the attention block, 1: of the FFN block */
    int32_t rows, cols; /* multiples of n_embd; rows 0: a vector */
    int32_t is_bias;
    tp_init init;
} layer_param;

static const layer_param layer_params[] = {
    {NAMED("ln_1.weight"), 0, 0, 1, 0, TP_INIT_ONE},          {NAMED("ln_1.bias"), 0, 0, 1, 1, TP_INIT_ZERO},
    {NAMED("attn.c_attn.weight"), 0, 1, 3, 0, TP_INIT_NORMAL}, {NAMED("attn.c_attn.bias"), 0, 0, 3, 1, TP_INIT_ZERO},
    {NAMED("attn.c_proj.weight"), 0, 1, 1, 0, TP_INIT_RESIDUAL}, {NAMED("attn.c_proj.bias"), 0, 0, 1, 1, TP_INIT_ZERO},
    {NAMED("ln_2.weight"), 1, 0, 1, 0, TP_INIT_ONE},          {NAMED("ln_2.bias"), 1, 0, 1, 1, TP_INIT_ZERO},
    {NAMED("mlp.c_fc.weight"), 1, 1, 4, 0, TP_INIT_NORMAL},   {NAMED("mlp.c_fc.bias"), 1, 0, 4, 1, TP_INIT_ZERO},
    {NAMED("mlp.c_proj.weight"), 1, 4, 1, 0, TP_INIT_RESIDUAL}, {NAMED("mlp.c_proj.bias"), 1, 0, 1, 1, TP_INIT_ZERO},
};
enum { LAYER_PARAMS = sizeof layer_params / sizeof layer_params[0] };

static int
per_layer(const tp_model *model)
{
    return model->bias ? LAYER_PARAMS : LAYER_PARAMS / 2;
}

int
tp_model_params(const tp_model *model)
{
    return 2 + model->n_layer * per_layer(model) + (model->bias ? 2 : 1) + (model->tie_weights ? 0 : 1);
}

static void
append(tp_param *out, const char *text, size_t count)
{
    size_t at = (size_t)out->length, room = sizeof out->name - 1 - at;
    count = count < room ? count : room;
    memcpy(out->name + at, text, count); /* what is behind is zero */
    out->length += (int32_t)count;
}

/* printf's share of planning was a fifth. */
static void
append_number(tp_param *out, int number)
{
    char digits[12] = {0};
    int at = (int)sizeof digits - 1;
    do
        digits[--at] = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    append(out, digits + at, sizeof digits - 1 - (size_t)at);
}

static void
set(tp_param *out, const char *name, size_t length, int64_t rows, int64_t cols, int is_matrix, int block, tp_init init)
{
    append(out, name, length);
    out->rows = rows;
    out->cols = cols;
    out->is_matrix = is_matrix;
    out->block = block;
    out->init = init;
}

static const layer_param *
of_layer(const tp_model *model, int index)
{
    int which = (index - 2) % per_layer(model);
    return &layer_params[model->bias ? which : 2 * which];
}

static int
block_of(const tp_model *model, int index)
{
    if (index < 2)
        return 0;
    if (index >= 2 + model->n_layer * per_layer(model))
        return tp_model_blocks(model) - 1;
    return 1 + 2 * ((index - 2) / per_layer(model)) + of_layer(model, index)->ffn;
}

int
tp_model_first_param(const tp_model *model, int block)
{
    int layers_end = 2 + model->n_layer * per_layer(model), head = tp_model_blocks(model) - 1;
    if (block == 0)
        return 0;
    if (block >= head)
        return block == head ? layers_end : tp_model_params(model);
    int layer = (block - 1) / 2, is_ffn = (block - 1) % 2; /* half of a layer's tensors are the attention's */
    return 2 + layer * per_layer(model) + is_ffn * per_layer(model) / 2;
}

void
tp_model_param(const tp_model *model, int index, tp_param *out)
{
    int64_t width = model->n_embd;
    int block = block_of(model, index), layers_end = 2 + model->n_layer * per_layer(model);
    memset(out, 0, sizeof *out);
    if (index == 0) {
        set(out, NAMED("transformer.wte.weight"), model->vocab_size, width, 1, block, TP_INIT_NORMAL);
    } else if (index == 1) {
        set(out, NAMED("transformer.wpe.weight"), model->block_size, width, 1, block, TP_INIT_NORMAL);
    } else if (index < layers_end) {
        int layer = (index - 2) / per_layer(model);
        const layer_param *param = of_layer(model, index);
        append(out, NAMED("transformer.h."));
        append_number(out, layer);
        append(out, NAMED("."));
        set(out, param->name, param->length, param->rows ? param->rows * width : 1, param->cols * width, param->rows != 0, block,
            param->init);
    } else if (index == layers_end) {
        set(out, NAMED("transformer.ln_f.weight"), 1, width, 0, block, TP_INIT_ONE);
    } else if (model->bias && index == layers_end + 1) {
        set(out, NAMED("transformer.ln_f.bias"), 1, width, 0, block, TP_INIT_ZERO);
    } else {
        set(out, NAMED("lm_head.weight"), model->vocab_size, width, 1, block, TP_INIT_NORMAL);
    }
}

void
tp_model_init_param(const tp_model *model, const tp_param *param, uint64_t seed, float *out)
{
    int64_t n = param->rows * param->cols;
    double std = param->init == TP_INIT_RESIDUAL ? 0.02 / sqrt(2.0 * model->n_layer) : 0.02;
    if (param->init == TP_INIT_NORMAL || param->init == TP_INIT_RESIDUAL)
        tp_rng_normal(seed, tp_rng_stream(param->name), std, n, out);
    else
        for (int64_t i = 0; i < n; i++)
            out[i] = param->init == TP_INIT_ONE ? 1.0f : 0.0f;
}
