#include "cuda/dl_cudnn.h"

#include "cuda/dl.h"

static const char *const names[] = {
#define NAME(member, type, name) #name,
    TP_CUDNN_TABLE(NAME)
#undef NAME
        NULL};
static tp_cudnn_library table;

static int
version(void)
{
    return table.get_version ? (int)table.get_version() : 0;
}

static const tp_dl_library library = {.what = "cuDNN",
                                      .variable = "TERAPIPE_CUDNN",
                                      .package = "nvidia-cudnn-cu13",
                                      .names = names,
                                      .sonames = {"libcudnn.so.9"},
                                      .optional = 0,
                                      .needed = 90600,
                                      .version = version,
                                      .table = &table};
static tp_dl_state state = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Not older than needed, and yet not to be used. */
static tp_status
check_bugs(void)
{
    const char *path;
    int found;
    tp_cudnn_found(&path, &found);
    if (found != 91000 && found != 91001)
        return TP_OK;
    return tp_fail(TP_ERUNTIME, "cuDNN at %s is version 9.10.%d, whose attention is known to be wrong; 9.10.2 or newer is needed: pip "
                   "install -U nvidia-cudnn-cu13, or name another in TERAPIPE_CUDNN", path, found % 100);
}

tp_status
tp_cudnn_load(const tp_cudnn_library **out)
{
    tp_status status = tp_dl_load(&library, &state);
    if (status == TP_OK)
        status = check_bugs();
    *out = status == TP_OK ? &table : NULL;
    return status;
}

void
tp_cudnn_found(const char **path, int *number)
{
    tp_dl_found(&state, path, number);
}
