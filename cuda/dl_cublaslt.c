#include "cuda/dl_cublaslt.h"

#include "cuda/dl.h"

static const char *const names[] = {
#define NAME(member, type, name) #name,
    TP_CUBLASLT_TABLE(NAME)
#undef NAME
        NULL};
static tp_cublaslt table;

static int
version(void)
{
    return table.version ? (int)table.version() : 0;
}

static const tp_dl_library library = {.what = "cublasLt",
                                      .variable = "TERAPIPE_CUBLASLT",
                                      .package = "nvidia-cublas",
                                      .names = names,
                                      .sonames = {"libcublasLt.so.13"},
                                      .optional = 0,
                                      .needed = 130000,
                                      .version = version,
                                      .table = &table};
static tp_dl_state state = {.lock = PTHREAD_MUTEX_INITIALIZER};

tp_status
tp_cublaslt_load(const tp_cublaslt **out)
{
    tp_status status = tp_dl_load(&library, &state);
    *out = status == TP_OK ? &table : NULL;
    return status;
}

void
tp_cublaslt_found(const char **path, int *number)
{
    tp_dl_found(&state, path, number);
}
