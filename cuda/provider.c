#include "cuda/provider.h"

#include "cuda/rank.h"

static void
attach(const tp_host *host)
{
    if (host->abi == TP_PROVIDER_ABI)
        tp_error_mirror(host->fail_at);
}

const tp_provider *
tp_cuda_provider(void)
{
    static const tp_provider provider = {.abi = TP_PROVIDER_ABI,
                                         .size = sizeof(tp_provider),
#ifdef TP_CUDA_EMULATED
                                         .name = "cuda_emu",
                                         .host_memory = 1,
#else
                                         .name = "cuda",
#endif
                                         .attach = attach,
                                         .device = &tp_cuda_device_ops,
                                         .stage = &tp_cuda_stage_ops};
    return &provider;
}
