#include "cuda/dl_nccl.h"

#include <pthread.h>
#include <stdio.h>

#include "cuda/dl.h"

enum { NEEDED = 21801 };

static const char *const names[] = {
#define NAME(member, type, name) #name,
    TP_NCCL_TABLE(NAME)
#undef NAME
        NULL};
static const tp_dl_library library = {"NCCL",          "TERAPIPE_NCCL",    "nvidia-nccl-cu13", names,
                                      {"libnccl.so.2"}, TP_NCCL_OPTIONAL};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tp_nccl table;
static char path[512];
static int version;

static tp_status
load(void)
{
    int found = 0;
    TP_TRY(tp_dl_load(&library, &table, path, sizeof path));
    if (table.get_version(&found) != NC_SUCCESS || found < NEEDED) {
        char text[32];
        snprintf(text, sizeof text, "%d.%d.%d", found / 10000, found % 10000 / 100, found % 100);
        return tp_dl_refuse_version(&library, path, text, "2.18.1");
    }
    version = found;
    return TP_OK;
}

tp_status
tp_nccl_load(const tp_nccl **out)
{
    pthread_mutex_lock(&lock);
    tp_status status = version ? TP_OK : load();
    pthread_mutex_unlock(&lock);
    *out = status == TP_OK ? &table : NULL;
    return status;
}

void
tp_nccl_found(const char **where, int *number)
{
    pthread_mutex_lock(&lock);
    *where = version ? path : "";
    *number = version;
    pthread_mutex_unlock(&lock);
}
