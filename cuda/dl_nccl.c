#include "cuda/dl_nccl.h"

#include "cuda/dl.h"

static const char *const names[] = {
#define NAME(member, type, name) #name,
    TP_NCCL_TABLE(NAME)
#undef NAME
        NULL};
static tp_nccl table;

static int
version(void)
{
    int found = 0;
    return table.get_version && table.get_version(&found) == NC_SUCCESS ? found : 0;
}

static const tp_dl_library library = {.what = "NCCL",
                                      .variable = "TERAPIPE_NCCL",
                                      .package = "nvidia-nccl-cu13",
                                      .names = names,
                                      .sonames = {"libnccl.so.2"},
                                      .optional = TP_NCCL_OPTIONAL,
                                      .needed = 21801,
                                      .version = version,
                                      .table = &table};
static tp_dl_state state = {.lock = PTHREAD_MUTEX_INITIALIZER};

tp_status
tp_nccl_load(const tp_nccl **out)
{
    tp_status status = tp_dl_load(&library, &state);
    *out = status == TP_OK ? &table : NULL;
    return status;
}

const char *
tp_nccl_lacks(void)
{
    const char *path;
    int number;
    tp_nccl_found(&path, &number);
    if (number == 0)
        return "";
    if (table.mem_alloc == NULL || table.mem_free == NULL)
        return "ncclMemAlloc is not in it (2.19 has it): messages go through plain device memory, and NCCL copies them once more";
    if (table.register_buffer == NULL || table.deregister_buffer == NULL)
        return "ncclCommRegister is not in it (2.19 has it): NCCL copies messages once more";
    return "";
}

void
tp_nccl_found(const char **path, int *number)
{
    tp_dl_found(&state, path, number);
}
