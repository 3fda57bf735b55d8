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
    return table.get_version(&found) == NC_SUCCESS ? found : 0;
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

void
tp_nccl_found(const char **path, int *number)
{
    tp_dl_found(&state, path, number);
}
