/* The part of the CUDA runtime and driver that NCCL's host code calls: device memory is the host's, copies are done at once,
 * streams and events know which kernels are not over, and what gives memory back waits for all kernels of its device. A process has
 * HOST_DEVICES devices, without peers, graphs, memory pools of their own or virtual memory. What is no more than a line has one. */
/* clang-format off */
#include "tests/cuda/nccl_host.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/cuda/fake_emulator.h"

#define OK      { return cudaSuccess; }
#define NONE(x) { (void)(x); return cudaSuccess; }

enum { ORDERS = 1 << 14, UNDER_WAY = 64 };

/* ---- streams and events ---------------------------------------------------------------------------------------------------- */

typedef struct { /* of a stream or an event: the kernels before it that may not be over */
    const void *key;
    int count;
    host_job *job[UNDER_WAY];
} order;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static order orders[ORDERS];

/* With the lock held. */
static order *
order_of(const void *key)
{
    size_t at = ((size_t)key >> 4) * 2654435761u % ORDERS;
    const char *sought = (const char *)key + 1; /* not NULL, as the default stream is */
    for (int i = 0; i < ORDERS; i++, at = (at + 1) % ORDERS)
        if (orders[at].key == NULL || orders[at].key == sought) {
            orders[at].key = sought;
            return &orders[at];
        }
    fprintf(stderr, "nccl_host.c: %d streams and events, and one more: a larger ORDERS would be right\n", ORDERS);
    abort();
}

static int
unfinished(order *o)
{
    int kept = 0;
    for (int i = 0; i < o->count; i++)
        if (!o->job[i]->done)
            o->job[kept++] = o->job[i];
    return o->count = kept;
}

static void
add(order *o, host_job *job)
{
    for (int i = 0; i < o->count; i++)
        if (o->job[i] == job)
            return;
    if (unfinished(o) == UNDER_WAY) {
        fprintf(stderr, "nccl_host.c: %d kernels before a stream: a larger UNDER_WAY would be right\n", UNDER_WAY);
        abort();
    }
    o->job[o->count++] = job;
}

void
tp_host_stream_add(const void *stream, host_job *job)
{
    pthread_mutex_lock(&lock);
    add(order_of(stream), job);
    pthread_mutex_unlock(&lock);
}

static int
is_over(const void *key)
{
    pthread_mutex_lock(&lock);
    int left = unfinished(order_of(key));
    pthread_mutex_unlock(&lock);
    return left == 0;
}

static cudaError_t
wait_for(const void *key)
{
    while (!is_over(key))
        usleep(200);
    return cudaSuccess;
}

/* `to` comes after all that `from` comes after. */
static cudaError_t
follow(const void *to, const void *from, int instead)
{
    pthread_mutex_lock(&lock);
    order *after = order_of(to), *before = order_of(from);
    after->count = instead ? 0 : after->count;
    unfinished(before);
    for (int i = 0; i < before->count; i++)
        add(after, before->job[i]);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t
cudaDeviceSynchronize(void)
{
    while (tp_host_running() > 0)
        usleep(200);
    return cudaSuccess;
}

static void *
new_handle(void)
{
    static _Atomic size_t last;
    return (void *)(0x1000 + (last += 16));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { *s = new_handle(); NONE(flags) }
cudaError_t cudaStreamDestroy(cudaStream_t s) NONE(s)
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return wait_for(s); }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { (void)flags; return follow(s, e, 0); }
cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long *id) { *id = (size_t)s; OK }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *is) { *is = cudaStreamCaptureStatusNone; NONE(s) }
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = new_handle(); OK }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { *e = new_handle(); NONE(flags) }
cudaError_t cudaEventDestroy(cudaEvent_t e) NONE(e)
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return follow(e, s, 1); }
cudaError_t cudaEventQuery(cudaEvent_t e) { return is_over(e) ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return wait_for(e); }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) NONE(mode)

cudaError_t
cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *is, unsigned long long *id, cudaGraph_t *graph,
                         const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count)
{
    (void)s, (void)id, (void)graph, (void)nodes, (void)edges, (void)count;
    *is = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t
cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void *with)
{
    wait_for(s);
    call(with);
    return cudaSuccess;
}

/* ---- memory ------------------------------------------------------------------------------------------------------------------ */

typedef struct block {
    struct block *next;
    char *data;
    size_t bytes;
} block;

static block *blocks;

static cudaError_t
give(void **out, size_t bytes, int of_device)
{
    block *b = malloc(sizeof *b);
    size_t whole = (bytes + 4095) / 4096 * 4096;
    void *data = mmap(NULL, whole ? whole : 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b == NULL || data == MAP_FAILED)
        return cudaErrorMemoryAllocation;
    find_emulator();
    if (of_device && emulator.foreign != NULL)
        emulator.foreign(data, bytes, 1);
    pthread_mutex_lock(&lock);
    *b = (block){blocks, data, whole ? whole : 4096};
    blocks = b;
    pthread_mutex_unlock(&lock);
    *out = data;
    return cudaSuccess;
}

static cudaError_t
take(void *data)
{
    pthread_mutex_lock(&lock);
    block **at = &blocks, *found;
    while (*at != NULL && (*at)->data != data)
        at = &(*at)->next;
    if ((found = *at) != NULL)
        *at = found->next;
    pthread_mutex_unlock(&lock);
    if (found == NULL)
        return data == NULL ? cudaSuccess : cudaErrorInvalidValue;
    if (emulator.foreign != NULL)
        emulator.foreign(data, 0, 0);
    munmap(data, found->bytes);
    free(found);
    return cudaSuccess;
}

#define COPY(...) { __VA_ARGS__; OK }
cudaError_t cudaMalloc(void **p, size_t n) { return give(p, n, 1); }
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { (void)s; return give(p, n, 1); }
cudaError_t cudaFree(void *p) { cudaDeviceSynchronize(); return take(p); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { wait_for(s); return take(p); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) { (void)flags; return give(p, n, 0); }
cudaError_t cudaFreeHost(void *p) { cudaDeviceSynchronize(); return take(p); }
cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags) { (void)n, (void)flags; NONE(p) }
cudaError_t cudaHostUnregister(void *p) NONE(p)
cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned flags) { *d = h; NONE(flags) }
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) COPY((void)k, memcpy(d, s, n))
cudaError_t
cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    (void)stream;
    return cudaMemcpy(d, s, n, kind);
}

cudaError_t cudaMemset(void *d, int v, size_t n) COPY(memset(d, v, n))
cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t t) COPY((void)t, memset(d, v, n))
cudaError_t cudaMemPoolCreate(cudaMemPool_t *p, const struct cudaMemPoolProps *of) { *p = new_handle(); NONE(of) }
cudaError_t cudaMemPoolDestroy(cudaMemPool_t p) NONE(p)
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { (void)a, (void)v; NONE(p) }

cudaError_t
cudaMallocFromPoolAsync(void **p, size_t n, cudaMemPool_t pool, cudaStream_t stream)
{
    (void)pool;
    return cudaMallocAsync(p, n, stream);
}

cudaError_t
cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p)
{
    *out = (struct cudaPointerAttributes){.type = cudaMemoryTypeDevice, .devicePointer = (void *)(size_t)p};
    return cudaSuccess;
}

static CUresult
driver_range(CUdeviceptr *base, size_t *bytes, CUdeviceptr of)
{
    pthread_mutex_lock(&lock);
    block *b = blocks;
    while (b != NULL && !((char *)of >= b->data && (char *)of < b->data + b->bytes))
        b = b->next;
    if (b != NULL && base != NULL)
        *base = (CUdeviceptr)b->data;
    if (b != NULL && bytes != NULL)
        *bytes = b->bytes;
    pthread_mutex_unlock(&lock);
    return b != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* ---- the device -------------------------------------------------------------------------------------------------------------- */

static int
attribute(int which)
{
    return which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9
         : which == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 132
         : which == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 227 << 10
         : which == CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING;
}

_Thread_local int tp_host_device;
cudaError_t cudaGetDevice(int *d) { *d = tp_host_device; OK }
cudaError_t cudaSetDevice(int d) { tp_host_device = d; OK }
cudaError_t cudaGetDeviceCount(int *n) { *n = HOST_DEVICES; OK }
cudaError_t cudaDriverGetVersion(int *v) { *v = CUDA_VERSION; OK }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; OK }
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { *v = attribute((int)a); NONE(d) }
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, (size_t)n, "0000:%02x:00.0", 1 + d); OK }
cudaError_t cudaDeviceGetByPCIBusId(int *d, const char *s) { *d = (int)strtol(s + 5, NULL, 16) - 1; OK }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; (void)a; NONE(b) }
cudaError_t cudaDeviceEnablePeerAccess(int d, unsigned flags) { (void)flags; NONE(d) }
cudaError_t cudaDeviceSetLimit(enum cudaLimit l, size_t v) { (void)v; NONE(l) }
cudaError_t cudaGetLastError(void) OK
const char *cudaGetErrorString(cudaError_t e) { return e == cudaErrorNotReady ? "not ready" : "an error of nccl_host.c"; }

cudaError_t
cudaGetDeviceProperties(struct cudaDeviceProp *out, int d)
{
    *out = (struct cudaDeviceProp){.name = "a host", .major = 9, .multiProcessorCount = 132, .totalGlobalMem = 1ull << 33};
    NONE(d)
}

/* ---- kernels ----------------------------------------------------------------------------------------------------------------- */

cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { (void)a, (void)v; NONE(f) }
cudaError_t cudaGetFuncBySymbol(cudaFunction_t *f, const void *symbol) { *f = (cudaFunction_t)(size_t)symbol; OK }

cudaError_t
cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *f)
{
    *out = (struct cudaFuncAttributes){.maxThreadsPerBlock = 640, .binaryVersion = 90};
    NONE(f)
}

/* `extra` is a list of names and values; the first says where the arguments lie. */
static CUresult
driver_launch(const CUlaunchConfig *config, CUfunction kernel, void **arguments, void **extra)
{
    (void)kernel, (void)arguments;
    tp_host_stream_add(config->hStream, tp_host_launch(config->gridDimX, extra[1]));
    return CUDA_SUCCESS;
}

static CUresult
driver_words(CUresult result, const char **out)
{
    *out = result == CUDA_SUCCESS ? "no error" : "an error of nccl_host.c";
    return CUDA_SUCCESS;
}

static CUresult driver_device(CUdevice *d, int which) { *d = which; return CUDA_SUCCESS; }
static CUresult driver_attribute(int *v, CUdevice_attribute a, CUdevice d) { *v = attribute((int)a); (void)d; return CUDA_SUCCESS; }
static CUresult driver_context(CUcontext *c) { *c = NULL; return CUDA_SUCCESS; }
static CUresult driver_set_context(CUcontext c) { (void)c; return CUDA_SUCCESS; }
static CUresult driver_context_device(CUdevice *d) { *d = tp_host_device; return CUDA_SUCCESS; }

/* Asked for the device of a pointer alone. */
static CUresult
driver_pointer(void *out, CUpointer_attribute which, CUdeviceptr of)
{
    (void)of;
    memset(out, 0, sizeof(int));
    return which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

cudaError_t
cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags,
                                 enum cudaDriverEntryPointQueryResult *found)
{
    static const struct {
        const char *name;
        void (*call)(void);
    } calls[] = {
#define CALL(name, ours) {name, (void (*)(void))ours}
        CALL("cuGetErrorString", driver_words),        CALL("cuGetErrorName", driver_words),
        CALL("cuDeviceGet", driver_device),            CALL("cuDeviceGetAttribute", driver_attribute),
        CALL("cuLaunchKernelEx", driver_launch),       CALL("cuMemGetAddressRange", driver_range),
        CALL("cuCtxGetCurrent", driver_context),       CALL("cuCtxSetCurrent", driver_set_context),
        CALL("cuCtxGetDevice", driver_context_device), CALL("cuPointerGetAttribute", driver_pointer),
#undef CALL
    };
    (void)version, (void)flags;
    *out = NULL;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (strcmp(calls[i].name, name) == 0)
            memcpy(out, &calls[i].call, sizeof *out);
    *found = *out != NULL ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* ---- threads that wait ------------------------------------------------------------------------------------------------------- */

/* NCCL's spin, each rank's by the half dozen: they would keep the other ranks' from few cores. (Ranks of tp.launch are sessions of
 * their own, and Linux's autogroups give a session that only yields its whole share.) */
int
sched_yield(void)
{
    usleep(50);
    return 0;
}

ssize_t
recv(int socket, void *out, size_t bytes, int flags)
{
    ssize_t got = syscall(SYS_recvfrom, socket, out, bytes, flags, NULL, NULL);
    if (got < 0 && errno == EAGAIN) {
        usleep(50);
        errno = EAGAIN;
    }
    return got;
}
