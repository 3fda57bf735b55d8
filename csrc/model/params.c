/* The parameters of a model: names and shapes of Hugging Face's GPT2LMHeadModel, and their initial values. */
#include "csrc/model/model.h"

#include <math.h>
#include <string.h>

#include "csrc/base/rng.h"

/* A name with its length: planners ask for every tensor of every stage of thousands of plans. */
#define NAMED(text) text, sizeof text - 1

typedef struct {
    char name[20];
    int32_t length;     /* of the name */
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

/* The name of a tensor of a layer: printf's share of planning was a fifth. */
static void
name_of_layer(tp_param *out, int layer, const layer_param *param)
{
    static const char prefix[] = "transformer.h.";
    char digits[12];
    int first = (int)sizeof digits;
    char *at = out->name + sizeof prefix - 1;
    do
        digits[--first] = (char)('0' + layer % 10);
    while ((layer /= 10) > 0);
    memcpy(out->name, prefix, sizeof prefix - 1);
    while (first < (int)sizeof digits)
        *at++ = digits[first++];
    *at++ = '.';
    memcpy(at, param->name, sizeof param->name); /* with the zeros behind it */
    out->length = (int32_t)(at - out->name) + param->length;
}

static void
set(tp_param *out, int64_t rows, int64_t cols, int is_matrix, int block, tp_init init)
{
    out->rows = rows;
    out->cols = cols;
    out->is_matrix = is_matrix;
    out->block = block;
    out->init = init;
}

static void
set_named(tp_param *out, const char *name, size_t length, int64_t rows, int64_t cols, int is_matrix, int block, tp_init init)
{
    memcpy(out->name, name, length); /* what is behind is zero */
    out->length = (int32_t)length;
    set(out, rows, cols, is_matrix, block, init);
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

static void
set_of_layer(const tp_model *model, int index, tp_param *out)
{
    int64_t width = model->n_embd;
    int per = per_layer(model), layer = index / per, which = index - layer * per;
    const layer_param *param = &layer_params[model->bias ? which : 2 * which];
    name_of_layer(out, layer, param);
    set(out, param->rows ? param->rows * width : 1, param->cols * width, param->rows != 0, 1 + 2 * layer + param->ffn, param->init);
}

void
tp_model_param(const tp_model *model, int index, tp_param *out)
{
    int64_t width = model->n_embd;
    int layers_end = 2 + model->n_layer * per_layer(model), head = tp_model_blocks(model) - 1;
    memset(out->name, 0, sizeof out->name); /* the rest is set below; zeroing that, too, took as long as setting all */
    if (index == 0)
        set_named(out, NAMED("transformer.wte.weight"), model->vocab_size, width, 1, 0, TP_INIT_NORMAL);
    else if (index == 1)
        set_named(out, NAMED("transformer.wpe.weight"), model->block_size, width, 1, 0, TP_INIT_NORMAL);
    else if (index < layers_end)
        set_of_layer(model, index - 2, out);
    else if (index == layers_end)
        set_named(out, NAMED("transformer.ln_f.weight"), 1, width, 0, head, TP_INIT_ONE);
    else if (model->bias && index == layers_end + 1)
        set_named(out, NAMED("transformer.ln_f.bias"), 1, width, 0, head, TP_INIT_ZERO);
    else
        set_named(out, NAMED("lm_head.weight"), model->vocab_size, width, 1, head, TP_INIT_NORMAL);
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
