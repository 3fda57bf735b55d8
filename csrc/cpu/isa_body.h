/* The kernels of one instruction set: isa_<name>.c defines TP_ISA and includes this; setup.py gives it that set's flags.
 * Each kernel file defines static functions cpu_<op> with the signatures of backend.h. */
#include "csrc/cpu/cpu.h"

#include "csrc/cpu/attention.c"
#include "csrc/cpu/gemm.c"
#include "csrc/cpu/norm.c"
#include "csrc/cpu/optim.c"
#include "csrc/cpu/pointwise.c"
#include "csrc/cpu/vocab.c"

#define TP_PASTE_(a, b) a##b
#define TP_PASTE(a, b) TP_PASTE_(a, b)
#define TP_STRING_(a) #a
#define TP_STRING(a) TP_STRING_(a)

static size_t
cpu_workspace_bytes(int64_t n_embd, int64_t n_head, int64_t vocab, int64_t seq_len, int64_t rows, int members)
{
    size_t most = gemm_workspace_bytes(n_embd, vocab, rows, seq_len, members);
    size_t attention = attention_workspace_bytes(n_embd, n_head, seq_len, rows, members);
    return most > attention ? most : attention;
}

const tp_backend_ops TP_PASTE(tp_cpu_ops_, TP_ISA) = {
    .abi = TP_BACKEND_ABI,
    .name = TP_STRING(TP_ISA),
    .weight_floats = cpu_weight_floats,
    .weight_t_floats = cpu_weight_t_floats,
    .weight_import = cpu_weight_import,
    .weight_export = cpu_weight_export,
    .weight_transpose = cpu_weight_transpose,
    .linear = cpu_linear,
    .linear_t = cpu_linear_t,
    .linear_w = cpu_linear_w,
    .bias_w = cpu_bias_w,
    .attention_forward = cpu_attention_forward,
    .attention_backward = cpu_attention_backward,
    .layernorm = cpu_layernorm,
    .layernorm_apply = cpu_layernorm_apply,
    .layernorm_backward = cpu_layernorm_backward,
    .embedding = cpu_embedding,
    .scatter_add = cpu_scatter_add,
    .softmax_loss = cpu_softmax_loss,
    .add = cpu_add,
    .copy = cpu_copy,
    .zero = cpu_zero,
    .sumsq = cpu_sumsq,
    .sumsq_leaves = cpu_sumsq_leaves,
    .adamw = cpu_adamw,
    .workspace_bytes = cpu_workspace_bytes,
};
