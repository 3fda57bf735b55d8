#include "cuda/properties.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "cuda/dl.h"

enum { MULTIPROCESSORS = 16, CLOCK = 13, MEMORY_CLOCK = 36, BUS_WIDTH = 37, L2_BYTES = 38, MAJOR = 75, MINOR = 76, SHARED_OPTIN = 97 };

/* The functions of these names, in order, into a table of pointers (POSIX: one that dlsym gave is a function's); the library is never
 * closed. 0: it, or one of them, is missing: *missing. */
static int
load(const char *soname, const char *const *names, void **table, const char **missing)
{
    void *library = tp_dl_cut(soname) ? NULL : dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    *missing = library ? NULL : soname;
    for (int i = 0; library && names[i] && !*missing; i++)
        if ((table[i] = dlsym(library, names[i])) == NULL)
            *missing = names[i];
    return *missing == NULL;
}

static tp_status
load_driver(tp_properties_driver *out)
{
    static const char *const names[] = {"cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDeviceGetName", "cuDeviceTotalMem_v2",
                                        "cuDeviceGetUuid_v2", "cuDeviceGetPCIBusId", NULL};
    _Static_assert(sizeof *out == 7 * sizeof(void *), "a pointer for each name");
    const char *missing;
    if (load("libcuda.so.1", names, (void **)(void *)out, &missing))
        return TP_OK;
    return tp_fail(TP_ERUNTIME, "what a GPU is cannot be asked: %s is missing in the NVIDIA driver's library", missing);
}

static int
load_nvml(tp_properties_nvml *out)
{
    static const char *const names[] = {"nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo", NULL};
    _Static_assert(sizeof *out == 3 * sizeof(void *), "a pointer for each name");
    const char *missing;
    return load("libnvidia-ml.so.1", names, (void **)(void *)out, &missing);
}

#define DRIVER_TRY(call)                                                                  \
    do {                                                                                  \
        int result_ = (call);                                                             \
        if (result_ != 0)                                                                 \
            return tp_fail(TP_ERUNTIME, "%s: the driver answers %d", #call, result_);      \
    } while (0)

static tp_status
ask_numbers(const tp_properties_driver *driver, int device, tp_cuda_properties *out)
{
    int l2 = 0, shared = 0;
    const struct {
        int which, *value;
    } wanted[] = {{MAJOR, &out->major}, {MINOR, &out->minor}, {MULTIPROCESSORS, &out->multiprocessors}, {CLOCK, &out->clock_khz},
                  {MEMORY_CLOCK, &out->memory_clock_khz}, {BUS_WIDTH, &out->memory_bus_bits}, {L2_BYTES, &l2}, {SHARED_OPTIN, &shared}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        DRIVER_TRY(driver->attribute(wanted[i].value, wanted[i].which, device));
    out->l2_bytes = (uint64_t)l2;
    out->shared_bytes = (uint64_t)shared;
    return TP_OK;
}

/* As nvidia-smi writes it, behind GPU- or, of a part of one, MIG-. */
static void
write_uuid(const unsigned char *bytes, const char *prefix, char *text)
{
    text += snprintf(text, 8, "%s", prefix);
    for (int i = 0; i < 16; i++)
        text += snprintf(text, 8, "%s%02x", i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", (unsigned)bytes[i]);
}

static void
ask_nvml(const tp_properties_nvml *nvml, const unsigned char *bytes, tp_cuda_properties *out)
{
    char part[sizeof out->uuid];
    unsigned long long memory[3];
    void *device = NULL;
    if (nvml->init() != 0)
        return;
    write_uuid(bytes, "MIG", part);
    if (nvml->by_uuid(out->uuid, &device) != 0) {
        if (nvml->by_uuid(part, &device) != 0)
            return;
        write_uuid(bytes, "MIG", out->uuid); /* CUDA_VISIBLE_DEVICES knows it by no other name */
    }
    if (nvml->memory(device, memory) == 0 && memory[1] < out->total_bytes)
        out->free_bytes = memory[1];
}

tp_status
tp_properties_ask(int index, const tp_properties_driver *driver, const tp_properties_nvml *nvml, tp_cuda_properties *out)
{
    tp_properties_driver real;
    tp_properties_nvml real_nvml;
    unsigned char uuid[16];
    size_t total;
    int device;
    if (driver == NULL) {
        TP_TRY(load_driver(&real));
        driver = &real;
    }
    if (nvml == NULL && load_nvml(&real_nvml))
        nvml = &real_nvml;
    memset(out, 0, sizeof *out);
    out->index = index;
    DRIVER_TRY(driver->init(0));
    DRIVER_TRY(driver->get(&device, index));
    TP_TRY(ask_numbers(driver, device, out));
    DRIVER_TRY(driver->name(out->name, (int)sizeof out->name, device));
    DRIVER_TRY(driver->total(&total, device));
    DRIVER_TRY(driver->uuid(uuid, device));
    DRIVER_TRY(driver->bus_id(out->bus_id, (int)sizeof out->bus_id, device));
    write_uuid(uuid, "GPU", out->uuid);
    out->total_bytes = out->free_bytes = total;
    if (nvml != NULL)
        ask_nvml(nvml, uuid, out);
    return TP_OK;
}
