/* What false libnccls tell the emulator of streams (cuda/emu/order.h), where the process has it. */
#ifndef TP_TESTS_FAKE_EMULATOR_H
#define TP_TESTS_FAKE_EMULATOR_H

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <string.h>

#include "cuda/dl_nccl.h"

/* Look for it by find_emulator; NULL: it is not there. */
static struct {
    int (*touch)(tp_stream, const char *, const void *, size_t, int);
    int (*foreign)(const void *, size_t, int);
    void (*waited)(tp_stream);
    const char *(*message)(void);
} emulator;

static int
look_for_emulator(struct dl_phdr_info *info, size_t size, void *unused)
{
    (void)size, (void)unused;
    void *handle = strstr(info->dlpi_name, "_cuda_emu") != NULL ? dlopen(info->dlpi_name, RTLD_NOW | RTLD_NOLOAD) : NULL;
    if (handle == NULL)
        return 0;
    *(void **)&emulator.touch = dlsym(handle, "tp_emu_order_touch");
    *(void **)&emulator.foreign = dlsym(handle, "tp_emu_order_foreign");
    *(void **)&emulator.waited = dlsym(handle, "tp_emu_order_host_stream");
    *(void **)&emulator.message = dlsym(handle, "tp_error_message");
    return 1;
}

static void
look(void)
{
    dl_iterate_phdr(look_for_emulator, NULL);
}

static void
find_emulator(void)
{
    static pthread_once_t looked = PTHREAD_ONCE_INIT;
    pthread_once(&looked, look);
}

#endif
