#include "csrc/py/device.h"

#include <string.h>

#include "csrc/backend/backend.h"

/* A module's provider, told once where its errors are heard. */
static const tp_provider *
provider_of(PyObject *capsule)
{
    static const tp_host host = {.abi = TP_PROVIDER_ABI, .size = sizeof(tp_host), .fail_at = tp_fail_at};
    if (capsule == NULL || capsule == Py_None)
        return tp_cpu_provider();
    if (!PyCapsule_IsValid(capsule, TP_PROVIDER_CAPSULE)) {
        tp_py_invalid_type("provider is %.100s: a capsule \"" TP_PROVIDER_CAPSULE "\", as a backend's module has, "
                           "would be right", Py_TYPE(capsule)->tp_name);
        return NULL;
    }
    const tp_provider *provider = PyCapsule_GetPointer(capsule, TP_PROVIDER_CAPSULE);
    if (provider->abi != TP_PROVIDER_ABI || provider->size != sizeof(tp_provider)) {
        PyErr_Format(PyExc_RuntimeError, "the backend's module has version %u of the provider (%u bytes), this package %u (%zu "
                     "bytes): both of one build would be right", provider->abi, provider->size, TP_PROVIDER_ABI,
                     sizeof(tp_provider));
        return NULL;
    }
    if (provider->attach != NULL)
        provider->attach(&host);
    return provider;
}

int
tp_py_device(PyObject *provider, const char *dtype, const tp_provider **out, tp_device_config *config)
{
    *out = provider_of(provider);
    if (*out == NULL)
        return -1;
    if (dtype != NULL && strcmp(dtype, "float32") != 0 && strcmp(dtype, "bf16") != 0) {
        tp_py_invalid_value("dtype is '%s': float32 or bf16 would be right", dtype);
        return -1;
    }
    config->dtype = dtype != NULL && strcmp(dtype, "bf16") == 0 ? TP_BF16 : TP_F32;
    tp_backend unused;
    if (*out == tp_cpu_provider() && tp_cpu_open(config->isa, NULL, NULL, &unused) != TP_OK) {
        tp_py_invalid_value("%s", tp_error_message());
        return -1;
    }
    return 0;
}
