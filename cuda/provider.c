#include "cuda/provider.h"

#include "cuda/rank.h"
#ifdef TP_CUDA_EMULATED
#include "cuda/emu/apart.h"
#endif

static void
attach(const tp_host *host)
{
    if (host->abi == TP_PROVIDER_ABI)
        tp_error_mirror(host->fail_at);
}

const tp_provider *
tp_cuda_provider(void)
{
    static tp_provider provider = {.abi = TP_PROVIDER_ABI,
                                         .size = sizeof(tp_provider),
#ifdef TP_CUDA_EMULATED
                                         .name = "cuda_emu",
#else
                                         .name = "cuda",
#endif
                                         .attach = attach,
                                         .device = &tp_cuda_device_ops,
                                         .stage = &tp_cuda_stage_ops};
#ifdef TP_CUDA_EMULATED
    provider.host_memory = !tp_emu_apart();
#endif
    return &provider;
}
