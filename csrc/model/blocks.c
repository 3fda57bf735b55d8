/* The model's sizes checked, and which kind each of its blocks is. */
#include "csrc/model/model.h"

tp_status
tp_model_check(const tp_model *model)
{
    const struct {
        const char *name;
        int32_t value;
    } fields[] = {{"n_layer", model->n_layer},
                  {"n_head", model->n_head},
                  {"n_embd", model->n_embd},
                  {"vocab_size", model->vocab_size},
                  {"block_size", model->block_size}};
    for (int i = 0; i < 5; i++)
        if (fields[i].value < 1)
            return tp_fail(TP_EVALUE, "%s is %d: at least 1 would be right", fields[i].name, fields[i].value);
    if (model->n_embd % model->n_head != 0)
        return tp_fail(TP_EVALUE, "n_head is %d: a divisor of n_embd = %d would be right", model->n_head,
                       model->n_embd);
    if (model->n_layer > TP_MODEL_LAYERS)
        return tp_fail(TP_EVALUE, "n_layer is %d: at most %d would be right", model->n_layer, TP_MODEL_LAYERS);
    double params = (double)model->n_embd * (12.0 * model->n_embd * model->n_layer + 2.0 * model->vocab_size + model->block_size);
    if (params > TP_MODEL_PARAMS)
        return tp_fail(TP_EVALUE, "the model has %.3g parameters: at most %.3g would be right", params, TP_MODEL_PARAMS);
    return TP_OK;
}

int
tp_model_blocks(const tp_model *model)
{
    return 2 * model->n_layer + 2;
}

tp_block_kind
tp_model_block_kind(const tp_model *model, int block)
{
    if (block == 0)
        return TP_EMBEDDING;
    if (block == tp_model_blocks(model) - 1)
        return TP_HEAD;
    return block % 2 == 1 ? TP_ATTENTION : TP_FFN;
}
