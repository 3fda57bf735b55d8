/* Counts of multiply-adds x 2. The whole-model formula is Megatron-LM's (Narayanan et al., SC 2021, section 5.1) with the
 * causal half of attention. */
#include "csrc/model/model.h"

int64_t
tp_model_num_params(const tp_model *model)
{
    int64_t total = 0;
    for (int i = 0; i < tp_model_params(model); i++) {
        tp_param param;
        tp_model_param(model, i, &param);
        total += param.rows * param.cols;
    }
    return total;
}

double
tp_model_block_flops(const tp_model *model, tp_block_kind kind, int64_t tokens, int64_t context)
{
    double width = model->n_embd, rows = (double)tokens;
    switch (kind) {
    case TP_ATTENTION: { /* q, k, v and output products; each query meets context + (1..tokens) keys, twice (QK', PV) */
        double pairs = rows * (double)context + rows * (rows + 1) / 2;
        return 2 * rows * 4 * width * width + 4 * pairs * width;
    }
    case TP_FFN: return 2 * rows * 8 * width * width;
    case TP_HEAD: return 2 * rows * width * model->vocab_size;
    default: return 0;
    }
}

double
tp_model_flops_per_token(const tp_model *model, int64_t seq_len)
{
    double forward = 0;
    for (int block = 0; block < tp_model_blocks(model); block++)
        forward += tp_model_block_flops(model, tp_model_block_kind(model, block), seq_len, 0);
    return 3 * forward / (double)seq_len; /* backward: the gradient of each factor costs one forward */
}
