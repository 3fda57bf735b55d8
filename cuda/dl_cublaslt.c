#include "cuda/dl_cublaslt.h"

#include <pthread.h>
#include <stdio.h>

#include "cuda/dl.h"

enum { NEEDED = 130000 };

static const char *const names[] = {
#define NAME(member, type, name) #name,
    TP_CUBLASLT_TABLE(NAME)
#undef NAME
        NULL};
static const tp_dl_library library = {"cublasLt", "TERAPIPE_CUBLASLT", "nvidia-cublas", names, {"libcublasLt.so.13"}, 0};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tp_cublaslt table;
static char path[512];
static int version;

static tp_status
load(void)
{
    TP_TRY(tp_dl_load(&library, &table, path, sizeof path));
    int found = (int)table.version();
    if (found < NEEDED) {
        char text[32];
        snprintf(text, sizeof text, "%d.%d.%d", found / 10000, found % 10000 / 100, found % 100);
        return tp_dl_refuse_version(&library, path, text, "13.0.0");
    }
    version = found;
    return TP_OK;
}

tp_status
tp_cublaslt_load(const tp_cublaslt **out)
{
    pthread_mutex_lock(&lock);
    tp_status status = version ? TP_OK : load();
    pthread_mutex_unlock(&lock);
    *out = status == TP_OK ? &table : NULL;
    return status;
}

void
tp_cublaslt_found(const char **where, int *number)
{
    pthread_mutex_lock(&lock);
    *where = version ? path : "";
    *number = version;
    pthread_mutex_unlock(&lock);
}
